"""Diverse beam search."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor

from manyheads.errors import IncompatibleError
from manyheads.generate.decoding import GenerationBatch, Hypothesis
from manyheads.generate.methods.beam import BeamSearch, BeamSpec
from manyheads.parts.inputs import Inputs
from manyheads.spec import field


class DiverseBeamSpec(BeamSpec, kind="diverse-beam"):
    """Beam search in G groups, one after another: log p − λ · (how often earlier groups chose the token at this step)

    Vijayakumar et al. 2018, arXiv 1610.02424, with Hamming diversity. Each group is a beam search of num_beams / G
    beams.
    """

    selected_by: ClassVar[tuple[str, float]] = ("num_beam_groups", 1)

    num_beam_groups: int = field(2, "G, which divides num_beams", ge=1, le=256)
    diversity_penalty: float = field(0.5, "λ", ge=0, le=100)

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.num_beams % self.num_beam_groups:
            raise IncompatibleError(
                f"given {self.num_beam_groups}, which does not divide {self.num_beams} beams", ("num_beam_groups",)
            )
        return self

    @property
    def group_size(self) -> int:
        return self.num_beams // self.num_beam_groups

    def search(self, batch: GenerationBatch) -> BeamSearch:
        return DiverseSearch(self, batch)


class DiverseSearch(BeamSearch):
    """A search in which each group of a row is a row of its own, and knows what earlier groups of the step chose."""

    spec: DiverseBeamSpec

    def __init__(self, spec: DiverseBeamSpec, batch: GenerationBatch) -> None:
        repeated = replace(
            batch,
            decoder_inputs=repeat_rows(batch.decoder_inputs, spec.num_beam_groups),
            source=None if batch.source is None else repeat_rows(batch.source, spec.num_beam_groups),
        )
        super().__init__(spec, repeated)

    def run(self) -> list[list[Hypothesis]]:
        results, groups = super().run(), self.spec.num_beam_groups
        rows = (chain.from_iterable(results[i : i + groups]) for i in range(0, len(results), groups))
        return [sorted(row, key=lambda hypothesis: -(hypothesis.score or 0.0)) for row in rows]

    def candidates(self, logp_BNV: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        groups, (_, beams, vocab) = self.spec.num_beam_groups, logp_BNV.shape
        token_counts: dict[int, Tensor] = {}  # by prompt of the batch, how often its groups chose each token
        candidates: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for i, row in enumerate(self.prompt_indices):  # the groups of a row are next to each other, in their order
            counts_V = token_counts.setdefault(row // groups, logp_BNV.new_zeros(vocab))
            logp_1NV = logp_BNV[i : i + 1] - self.spec.diversity_penalty * counts_V
            best, beam, token, is_end = super().candidates(logp_1NV, first + i * beams)
            unfinished = token[best.isfinite() & ~is_end][: self.width]
            counts_V += torch.bincount(unfinished, minlength=vocab)
            candidates.append((best, beam, token, is_end))
        best_BC, beam_BC, token_BC, is_end_BC = (torch.cat(parts) for parts in zip(*candidates, strict=True))
        return best_BC, beam_BC, token_BC, is_end_BC


def repeat_rows(inputs: Inputs, times: int) -> Inputs:
    tensors = ((name, value) for name, value in vars(inputs).items() if isinstance(value, Tensor))
    repeated: dict[str, Any] = {name: value.repeat_interleave(times, dim=0) for name, value in tensors}
    return replace(inputs, **repeated)
