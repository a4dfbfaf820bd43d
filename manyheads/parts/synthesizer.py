"""Synthesizer cores, whose attention weights are predicted from each token or learned for each pair of positions."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.parts.core import Core, CoreSpec, inverse_root
from manyheads.parts.position import Positions, check_positions
from manyheads.spec import field


class SynthesizerSpec(CoreSpec):
    """The base of both Synthesizers, which compute scores without keys for up to a fixed number of keys."""

    key_source: ClassVar[Literal["head", "raw", "none"]] = "none"

    length: int = field(512, "T, the largest number of keys", ge=1, le=1 << 20)

    @property
    def max_positions(self) -> int | None:
        return self.length


class DenseSynthesizerSpec(SynthesizerSpec, kind="synthesizer-dense", caption="dense Synthesizer"):
    """softmax(ReLU(XA + b₁) B + b₂) v, which predicts the weights of each token from the token alone

    Tay et al. 2021, arXiv 2005.00743. XA + b₁ is the query projection; each head has its own B and b₂.
    """

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        return DenseSynthesizer(self, heads, query_size)


class DenseSynthesizer(Core):
    def __init__(self, spec: DenseSynthesizerSpec, heads: int, query_size: int) -> None:
        super().__init__(spec)
        self.weight = nn.Parameter(torch.empty(heads, query_size, spec.length))
        self.bias = nn.Parameter(torch.empty(heads, 1, spec.length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=inverse_root(self.weight.shape[1]))
        nn.init.zeros_(self.bias)

    def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, positions: Positions) -> Tensor:
        check_positions(positions, self.bias.shape[-1], "the synthesizer's weights", queries=False)
        by_position = F.relu(q_BHLK) @ self.weight + self.bias
        return by_position.gather(-1, positions.key[:, None, None].expand(*q_BHLK.shape[:3], -1))


class RandomSynthesizerSpec(SynthesizerSpec, kind="synthesizer-random", caption="random Synthesizer"):
    """softmax(R) v, with R a learned H×T×T table, so that the weights depend on the positions alone

    Tay et al. 2021, arXiv 2005.00743.
    """

    query_source: ClassVar[Literal["head", "memory", "none"]] = "none"

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        return RandomSynthesizer(self, heads)


class RandomSynthesizer(Core):
    def __init__(self, spec: RandomSynthesizerSpec, heads: int) -> None:
        super().__init__(spec)
        self.table = nn.Parameter(torch.empty(heads, spec.length, spec.length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table)

    def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, positions: Positions) -> Tensor:
        check_positions(positions, self.table.shape[1], "the synthesizer's table")
        scores = self.table[:, positions.query[:, :, None], positions.key[:, None, :]].transpose(0, 1)
        return scores.expand(q_BHLK.shape[0], -1, -1, -1)
