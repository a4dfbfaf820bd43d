"""Beam search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from manyheads.generate.decoding import (
    DecodingSpec,
    DecodingSteps,
    GenerationBatch,
    Hypothesis,
    RunningSequences,
    log_probabilities,
    raise_no_token_allowed,
)
from manyheads.spec import field

if TYPE_CHECKING:
    from manyheads.generate.config import GenerationConfig


class BeamSearchSpec(DecodingSpec):
    """What all kinds of beam search share; a kind defines the score of a sequence and when a row is done.

    Each step computes the best (1 + number of eos tokens) · num_beams continuations. Those that end, with eos, a stop
    string or a complete grammar, and are among the best `num_beams` are finished; the best `num_beams` of the others
    continue. At max_new_tokens every sequence ends. A width of 1 is greedy decoding.
    """

    num_beams: int = field(4, "beam width", ge=1, le=256)

    @property
    def rows_per_sequence(self) -> int:
        return self.num_beams

    @property
    def max_sequences(self) -> int:
        return self.num_beams

    @property
    def group_size(self) -> int:
        """The number of beams that are searched together."""
        return self.num_beams

    def score(self, logp: float, length: int) -> float:
        """The score of a finished sequence of this many new tokens."""
        raise NotImplementedError

    def is_done(self, finished: Sequence[float], best_live: float, length: int, config: GenerationConfig) -> bool:
        """Whether a row is done, by the scores of its finished sequences, best first, and the best live log p."""
        raise NotImplementedError

    def search(self, batch: GenerationBatch) -> BeamSearch:
        return BeamSearch(self, batch)

    def generate(self, batch: GenerationBatch) -> DecodingSteps:
        with torch.no_grad():
            results = self.search(batch).run()
        yield from ()  # no token is final before the end
        return results if all(results) else raise_no_token_allowed()


class BeamSpec(BeamSearchSpec, kind="beam"):
    """argmax_y log p(y | x) / |y|^α over the sequences that are found by `num_beams` beams

    As in transformers: |y| includes the eos token, and α > 0 prefers longer sequences. A row is done when it has
    num_beams finished sequences and, unless early_stopping is true, the best live one divided by n^α cannot pass the
    worst of them, with its present length as n (false) or, if α > 0, max_new_tokens ("never").
    """

    selected_by: ClassVar[tuple[str, float]] = ("num_beams", 1)

    length_penalty: float = field(1.0, "α; a higher value prefers longer sequences", ge=-10, le=10)
    early_stopping: bool | Literal["never"] = field(False, "when a row is done")

    def score(self, logp: float, length: int) -> float:
        return logp / length**self.length_penalty

    def is_done(self, finished: Sequence[float], best_live: float, length: int, config: GenerationConfig) -> bool:
        if len(finished) < self.group_size:
            return False
        longest = config.max_new_tokens if self.early_stopping == "never" and self.length_penalty > 0 else length
        return self.early_stopping is True or self.score(best_live, longest) <= finished[-1]


class BeamSearch:
    """One run of a beam search over the rows of a batch."""

    def __init__(self, spec: BeamSearchSpec, batch: GenerationBatch) -> None:
        self.spec, self.batch, self.width = spec, batch, spec.group_size
        self.running, self.device = self.start(), batch.decoder_inputs.tokens.device
        self.eos = torch.tensor(batch.config.eos_token_id, device=self.device, dtype=torch.long)
        self.prompt_indices = list(range(batch.decoder_inputs.batch_size))  # of the prompts that are not done
        self.finished: list[list[Hypothesis]] = [[] for _ in self.prompt_indices]

    def start(self) -> RunningSequences:
        return RunningSequences(self.batch)

    def score(self, row: int, logp: float, length: int) -> float:
        """The score of a running sequence, by its number, that ends with this many new tokens."""
        return self.spec.score(logp, length)

    def run(self) -> list[list[Hypothesis]]:
        # log p of the live sequences, one per row at first
        live_BN = torch.zeros(len(self.prompt_indices), 1, device=self.device)
        for length in range(1, self.batch.config.max_new_tokens + 1):
            logp_RV = log_probabilities(self.running.logits())  # R = B·N sequences
            logp_BNV = self.running.process_logits(logp_RV).unflatten(0, live_BN.shape) + live_BN[:, :, None]
            best_BC, beam_BC, token_BC, is_end_BC = self.candidates(logp_BNV)
            self.finish(best_BC, beam_BC, token_BC, is_end_BC, length=length)
            live_BN, index_BN = best_BC.masked_fill(is_end_BC, -torch.inf).topk(min(self.width, best_BC.shape[1]))
            unfinished = self.unfinished_rows(live_BN[:, 0].tolist(), length)
            if not unfinished:
                break
            index = torch.tensor(unfinished, device=self.device)
            live_BN, index_BN = live_BN[index], index_BN[index]
            tokens, beam_indices = token_BC[index].gather(1, index_BN), beam_BC[index].gather(1, index_BN)
            self.running.append(tokens.flatten(), beam_indices.flatten())
        return self.finished

    def candidates(self, logp_BNV: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The best continuations of each row, B×C: log p, the running sequence, the token, and whether it ends there.

        `first` is the number of the first running sequence of these rows.
        """
        batch, beams, vocab = logp_BNV.shape
        best_BC, index_BC = logp_BNV.flatten(1).topk(min((1 + max(1, len(self.eos))) * self.width, beams * vocab))
        first_B1 = first + beams * torch.arange(batch, device=self.device)[:, None]
        beam_BC, token_BC = index_BC // vocab + first_B1, index_BC % vocab
        return best_BC, beam_BC, token_BC, self.is_end(best_BC, beam_BC, token_BC)

    def is_end(self, best_BC: Tensor, beam_BC: Tensor, token_BC: Tensor) -> Tensor:
        """Which candidates end their sequence, with eos, a stop string or a complete grammar."""
        stops, is_end_BC = self.batch.stopping_criteria, torch.isin(token_BC, self.eos)
        if stops is not None:
            for b, c in (~is_end_BC & best_BC.isfinite()).nonzero().tolist():
                tokens = self.running.new_tokens(int(beam_BC[b, c]))
                is_end_BC[b, c] = stops([*tokens, int(token_BC[b, c])])
        return is_end_BC

    def finish(self, best_BC: Tensor, beam_BC: Tensor, token_BC: Tensor, is_end_BC: Tensor, *, length: int) -> None:
        """Adds those of the best `width` candidates that end, at the limit all, and keeps the best `width` of a row."""
        ends_BC = (is_end_BC | (length == self.batch.config.max_new_tokens)) & best_BC.isfinite()
        for b, c in ends_BC[:, : self.width].nonzero().tolist():
            finished = self.finished[self.prompt_indices[b]]
            score = self.score(int(beam_BC[b, c]), float(best_BC[b, c]), length)
            if len(finished) < self.width or score > finished[-1].score:
                beam, token, is_finished = int(beam_BC[b, c]), int(token_BC[b, c]), bool(is_end_BC[b, c])
                new = self.running.hypothesis(beam, token, is_finished=is_finished, score=score)
                finished.append(new)
                finished.sort(key=lambda hypothesis: -hypothesis.score)
                del finished[self.width :]

    def unfinished_rows(self, best_live: list[float], length: int) -> list[int]:
        """The indices of the rows that continue."""
        config, index = self.batch.config, list[int]()
        for i, row in enumerate(self.prompt_indices):
            scores = [float(hypothesis.score or 0) for hypothesis in self.finished[row]]
            if best_live[i] > -math.inf and not self.spec.is_done(scores, best_live[i], length, config):
                index.append(i)
        self.prompt_indices = [self.prompt_indices[i] for i in index]
        return index if length < config.max_new_tokens else []
