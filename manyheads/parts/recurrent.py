"""Parts of the recurrent network: the cell, and the readout that computes the input of the head."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manyheads.spec import Part, field


class CellSpec(Part, slot="cell", default="gru"):
    """The cell of a recurrent network, which computes one step."""

    states: ClassVar[int]  # the number of vectors in a state; the first is the output
    encoder: ClassVar[type[nn.GRU | nn.LSTM | nn.RNN]]
    decoder: ClassVar[type[nn.GRUCell | nn.LSTMCell | nn.RNNCell]]

    def build_encoder(self, size: int, hidden: int, *, layers: int, bidirectional: bool, dropout: float) -> nn.RNNBase:
        between = dropout if layers > 1 else 0.0
        return self.encoder(size, hidden, layers, batch_first=True, bidirectional=bidirectional, dropout=between)

    def build_cell(self, size: int, hidden: int) -> nn.RNNCellBase:
        return self.decoder(size, hidden)


class GruSpec(CellSpec, kind="gru"):
    """h′ = (1 − z) ∘ tanh(Wx + r ∘ Uh) + z ∘ h, with gates r and z from x and h

    Cho et al. 2014, arXiv 1406.1078; r is applied after U, as in torch; the paper applies it before.
    """

    title = "GRU"

    states, encoder, decoder = 1, nn.GRU, nn.GRUCell


class LstmSpec(CellSpec, kind="lstm"):
    """c′ = f ∘ c + i ∘ tanh(Wx + Uh), h′ = o ∘ tanh(c′), with gates i, f and o from x and h

    Hochreiter and Schmidhuber 1997; Gers et al. 2000 for f.
    """

    title = "LSTM"

    states, encoder, decoder = 2, nn.LSTM, nn.LSTMCell


class Cell(nn.Module):
    """A cell whose state is one tensor, B×(states·hidden), that starts with the output."""

    def __init__(self, spec: CellSpec, size: int, hidden: int) -> None:
        super().__init__()
        self.states, self.hidden = spec.states, hidden
        self.cell = spec.build_cell(size, hidden)

    def forward(self, x_BD: Tensor, state_BS: Tensor) -> Tensor:
        vectors = state_BS.split(self.hidden, dim=-1)
        new_state: Any = self.cell(x_BD, vectors if self.states > 1 else vectors[0])
        return torch.cat(new_state, dim=-1) if self.states > 1 else new_state


class ReadoutSpec(Part, slot="readout", default="state"):
    """The input of the head, computed from the decoder's states s and s′ (previous), embedding e and context c."""

    reads: ClassVar[frozenset[str]] = frozenset({"s", "s′", "e", "c"})  # which of them its output depends on

    def width(self, hidden: int) -> int:
        """The size of its output."""
        return hidden

    @abstractmethod
    def build(self, hidden: int, embedding: int, context: int) -> nn.Module:
        """Builds the readout for vectors of these sizes."""


class StateReadoutSpec(ReadoutSpec, kind="state"):
    """s, the state itself"""

    title = ""
    reads: ClassVar[frozenset[str]] = frozenset({"s"})

    def build(self, hidden: int, embedding: int, context: int) -> nn.Module:
        return StateReadout()


class StateReadout(nn.Module):
    def forward(self, s: Tensor, previous: Tensor, e: Tensor, c: Tensor) -> Tensor:
        return s


class TanhReadoutSpec(ReadoutSpec, kind="tanh"):
    """tanh(W [s, c])

    Luong et al. 2015, arXiv 1508.04025, equation 5.
    """

    title = "Readout, tanh"
    reads: ClassVar[frozenset[str]] = frozenset({"s", "c"})

    def build(self, hidden: int, embedding: int, context: int) -> nn.Module:
        return TanhReadout(hidden, context)


class TanhReadout(nn.Module):
    def __init__(self, hidden: int, context: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden + context, hidden, bias=False)

    def forward(self, s: Tensor, previous: Tensor, e: Tensor, c: Tensor) -> Tensor:
        return torch.tanh(self.project(torch.cat((s, c), dim=-1)))


class MaxoutReadoutSpec(ReadoutSpec, kind="maxout"):
    """max over pairs of U s′ + V e + C c, with the state s′ that the context was computed from

    Bahdanau, Cho and Bengio 2015, arXiv 1409.0473, appendix A.2.2.
    """

    title = "Readout, maxout"
    reads: ClassVar[frozenset[str]] = frozenset({"s′", "e", "c"})

    size: int = field(32, "the number of pairs", ge=1)

    def width(self, hidden: int) -> int:
        return self.size

    def build(self, hidden: int, embedding: int, context: int) -> nn.Module:
        return MaxoutReadout(self.size, hidden, embedding, context)


class MaxoutReadout(nn.Module):
    def __init__(self, size: int, hidden: int, embedding: int, context: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden + embedding + context, 2 * size)

    def forward(self, s: Tensor, previous: Tensor, e: Tensor, c: Tensor) -> Tensor:
        pairs: Tensor = self.project(torch.cat((previous, e, c), dim=-1))
        return pairs.unflatten(-1, (-1, 2)).amax(dim=-1)
