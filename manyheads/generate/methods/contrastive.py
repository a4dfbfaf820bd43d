"""Contrastive search."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.generate.decoding import (
    DecodingSpec,
    DecodingSteps,
    GenerationBatch,
    RunningSequences,
    check_any_token_allowed,
    extend_until_end,
)
from manyheads.model.recording import record_hidden_states
from manyheads.model.transformer import as_transformer
from manyheads.parts.inputs import Inputs
from manyheads.spec import field


class ContrastiveSpec(DecodingSpec, kind="contrastive"):
    """argmax_v (1 − α) p(v | x_<t) − α max_j cos(h_v, h_j) over the k most probable tokens v

    Su et al. 2022, arXiv 2202.06417, equation 5: h_j are the last hidden states of the tokens so far, and h_v is that
    of the candidate. Each step computes k candidates.
    """

    selected_by: ClassVar[tuple[str, float]] = ("penalty_alpha", 0)
    last_token_needs_position: ClassVar[bool] = True  # as a candidate

    penalty_alpha: float = field(0.6, "α, the weight of the similarity to earlier tokens", ge=0, le=1)
    top_k: int = field(4, "k, the number of candidates", ge=1, le=256)

    @property
    def rows_per_sequence(self) -> int:
        return self.top_k

    def generate(self, batch: GenerationBatch) -> DecodingSteps:
        as_transformer(batch.model, "contrastive search")
        with torch.no_grad():
            running = ContrastiveSequences(batch, self)
        return extend_until_end(running, running.advance)


class ContrastiveSequences(RunningSequences):
    """Running sequences with the last hidden state of each of their tokens, and the logits of the next one."""

    def __init__(self, batch: GenerationBatch, spec: ContrastiveSpec) -> None:
        super().__init__(batch)
        self.spec, self.padding_mask = spec, batch.decoder_inputs.padding_mask
        self.last_logits, self.hidden_BLD = self.step(self.inputs)

    def step(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The logits of the next token, and the hidden states of the new tokens."""
        with record_hidden_states(self.batch.model) as states:  # type: ignore[arg-type]
            logits, self.state = self.batch.step(inputs, self.state)
        return logits, states[-1]

    def select(self, beam_indices: Tensor) -> None:
        super().select(beam_indices)
        self.hidden_BLD = self.hidden_BLD.index_select(0, beam_indices)
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask.index_select(0, beam_indices)

    def advance(self) -> list[int]:
        """Appends the best candidate to each sequence; returns the new tokens."""
        num_rows, k = len(self.tokens), min(self.spec.top_k, self.last_logits.shape[1])
        p_BV = check_any_token_allowed(self.process_logits(self.last_logits)).softmax(dim=-1)
        p_BC, token_BC = p_BV.topk(k)
        index_R = torch.arange(num_rows, device=self.tokens.device).repeat_interleave(k)
        self.state = self.state.select(index_R)
        next_RV, hidden_R1D = self.step(Inputs(token_BC.flatten()[:, None]))
        similarity_RL = F.cosine_similarity(hidden_R1D, self.hidden_BLD[index_R], dim=-1)
        if self.padding_mask is not None:
            similarity_RL = similarity_RL.masked_fill(self.padding_mask[index_R], -torch.inf)
        penalty_BC = similarity_RL.max(dim=1).values.unflatten(0, (num_rows, k))
        score_BC = (1 - self.spec.penalty_alpha) * p_BC - self.spec.penalty_alpha * penalty_BC
        best_B = score_BC.masked_fill(p_BC == 0, -torch.inf).argmax(dim=1)
        index_B = best_B + k * torch.arange(num_rows, device=best_B.device)
        tokens_B = token_BC.flatten()[index_B]
        self.append(tokens_B)
        self.state, self.last_logits = self.state.select(index_B), next_RV[index_B]
        self.hidden_BLD = torch.cat((self.hidden_BLD, hidden_R1D[index_B]), dim=1)
        if self.padding_mask is not None:
            self.padding_mask = F.pad(self.padding_mask, (0, 1))
        return tokens_B.tolist()
