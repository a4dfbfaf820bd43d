"""The recurrent network's parts: cells, and how a state becomes a prediction."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.spec import Part, field


class CellSpec(Part, slot="cell", default="gru"):
    """One step of a recurrent network."""

    @property
    @abstractmethod
    def states(self) -> int:
        """How many vectors of the hidden size a state holds; the first is the output."""
        raise NotImplementedError

    @abstractmethod
    def build_encoder(self, size: int, hidden: int, *, layers: int, two_way: bool, dropout: float) -> nn.RNNBase:
        raise NotImplementedError

    @abstractmethod
    def build_cell(self, size: int, hidden: int) -> nn.RNNCellBase:
        raise NotImplementedError


class GruSpec(CellSpec, kind="gru"):
    """h′ = (1 − z) ∘ tanh(Wx + r ∘ Uh) + z ∘ h, with gates r and z from x and h

    Cho et al. 2014, arXiv 1406.1078; r is applied after U, as in torch, where the paper applies it before.
    """

    @property
    def states(self) -> int:
        return 1

    def build_encoder(self, size: int, hidden: int, *, layers: int, two_way: bool, dropout: float) -> nn.RNNBase:
        return nn.GRU(size, hidden, layers, batch_first=True, bidirectional=two_way, dropout=dropout if layers > 1 else 0.0)

    def build_cell(self, size: int, hidden: int) -> nn.RNNCellBase:
        return nn.GRUCell(size, hidden)


class LstmSpec(CellSpec, kind="lstm"):
    """c′ = f ∘ c + i ∘ tanh(Wx + Uh), h′ = o ∘ tanh(c′), with gates i, f and o from x and h

    Hochreiter and Schmidhuber 1997; Gers et al. 2000 for f.
    """

    @property
    def states(self) -> int:
        return 2

    def build_encoder(self, size: int, hidden: int, *, layers: int, two_way: bool, dropout: float) -> nn.RNNBase:
        return nn.LSTM(size, hidden, layers, batch_first=True, bidirectional=two_way, dropout=dropout if layers > 1 else 0.0)

    def build_cell(self, size: int, hidden: int) -> nn.RNNCellBase:
        return nn.LSTMCell(size, hidden)


class Cell(nn.Module):
    """A cell whose state is one tensor, B×(states·hidden), with the output first."""

    def __init__(self, spec: CellSpec, size: int, hidden: int) -> None:
        super().__init__()
        self.states, self.hidden = spec.states, hidden
        self.cell = spec.build_cell(size, hidden)

    def forward(self, x_BD: Tensor, state_BS: Tensor) -> Tensor:
        vectors = state_BS.split(self.hidden, dim=-1)
        after: Any = self.cell(x_BD, vectors if self.states > 1 else vectors[0])
        return torch.cat(after, dim=-1) if self.states > 1 else after


class ReadoutSpec(Part, slot="readout", default="state"):
    """From the decoder's state s, that before it s′, the last token's embedding e and the context c to what the head reads."""

    @abstractmethod
    def build(self, hidden: int, embedding: int, context: int) -> Readout:
        raise NotImplementedError


class Readout(nn.Module):
    width: int

    def forward(self, s: Tensor, before: Tensor, e: Tensor, c: Tensor) -> Tensor:
        raise NotImplementedError


class StateReadoutSpec(ReadoutSpec, kind="state"):
    """s"""

    def build(self, hidden: int, embedding: int, context: int) -> Readout:
        return StateReadout(hidden)


class StateReadout(Readout):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.width = hidden

    def forward(self, s: Tensor, before: Tensor, e: Tensor, c: Tensor) -> Tensor:
        return s


class TanhReadoutSpec(ReadoutSpec, kind="tanh"):
    """tanh(W [s, c])

    Luong et al. 2015, arXiv 1508.04025, equation 5.
    """

    def build(self, hidden: int, embedding: int, context: int) -> Readout:
        return TanhReadout(hidden, context)


class TanhReadout(Readout):
    def __init__(self, hidden: int, context: int) -> None:
        super().__init__()
        self.width = hidden
        self.project = nn.Linear(hidden + context, hidden, bias=False)

    def forward(self, s: Tensor, before: Tensor, e: Tensor, c: Tensor) -> Tensor:
        return torch.tanh(self.project(torch.cat((s, c), dim=-1)))


class MaxoutReadoutSpec(ReadoutSpec, kind="maxout"):
    """max over pairs of U s′ + V e + C c, with the state s′ that chose the context

    Bahdanau, Cho and Bengio 2015, arXiv 1409.0473, appendix A.2.2.
    """

    size: int = field(32, "how many pairs", ge=1)

    def build(self, hidden: int, embedding: int, context: int) -> Readout:
        return MaxoutReadout(self.size, hidden, embedding, context)


class MaxoutReadout(Readout):
    def __init__(self, size: int, hidden: int, embedding: int, context: int) -> None:
        super().__init__()
        self.width = size
        self.project = nn.Linear(hidden + embedding + context, 2 * size)

    def forward(self, s: Tensor, before: Tensor, e: Tensor, c: Tensor) -> Tensor:
        pairs: Tensor = self.project(torch.cat((before, e, c), dim=-1))
        return pairs.unflatten(-1, (-1, 2)).amax(dim=-1)
