"""Parts of the recurrent network: the cell, and the readout that computes the input of the head."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from manyheads.errors import IncompatibleError
from manyheads.parts.core import AdditiveSpec, CoreSpec
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions
from manyheads.spec import Part, field, locate_errors


class CellSpec(Part, slot="cell", default="gru"):
    """The cell of a recurrent network, which computes one step."""

    states: ClassVar[int]  # the number of vectors in a state; the first is the output
    reads_past: ClassVar[bool] = False  # whether a step reads all earlier states, or only the last one
    encoder: ClassVar[type[nn.GRU | nn.LSTM | nn.RNN]]
    decoder: ClassVar[type[nn.GRUCell | nn.LSTMCell | nn.RNNCell]]

    def build_encoder(self, size: int, hidden: int, *, layers: int, bidirectional: bool, dropout: float) -> nn.RNNBase:
        between = dropout if layers > 1 else 0.0
        return self.encoder(size, hidden, layers, batch_first=True, bidirectional=bidirectional, dropout=between)

    def build_cell(self, size: int, hidden: int) -> Cell:
        return Cell(self, size, hidden)


class GruSpec(CellSpec, kind="gru", caption="GRU"):
    """h′ = (1 − z) ∘ tanh(Wx + r ∘ Uh) + z ∘ h, with gates r and z from x and h

    Cho et al. 2014, arXiv 1406.1078; r is applied after U, as in torch; the paper applies it before.
    """

    states, encoder, decoder = 1, nn.GRU, nn.GRUCell


class LstmSpec(CellSpec, kind="lstm", caption="LSTM"):
    """c′ = f ∘ c + i ∘ tanh(Wx + Uh), h′ = o ∘ tanh(c′), with gates i, f and o from x and h

    Hochreiter and Schmidhuber 1997; Gers et al. 2000 for f.
    """

    states, encoder, decoder = 2, nn.LSTM, nn.LSTMCell


@dataclass(frozen=True)
class Past:
    """The states before the first token and after each token, B×T×layers×S; those of padding are not attended to."""

    states: Tensor
    padding_mask: Tensor  # B×T

    @staticmethod
    def of(state: Tensor) -> Past:
        return Past(state[:, None], torch.zeros(len(state), 1, dtype=torch.bool, device=state.device))

    def append(self, state: Tensor, is_padding: Tensor) -> Past:
        return Past(
            torch.cat((self.states, state[:, None]), dim=1),
            torch.cat((self.padding_mask, is_padding[:, None]), dim=1),
        )

    def layer(self, index: int) -> Past:
        """The states of one layer, B×T×S."""
        return Past(self.states[:, :, index], self.padding_mask)


class Cell(nn.Module):
    """A cell whose state is one tensor, B×(states·hidden), that starts with the output."""

    def __init__(self, spec: CellSpec, size: int, hidden: int) -> None:
        super().__init__()
        self.states, self.hidden = spec.states, hidden
        self.cell = spec.decoder(size, hidden)

    def forward(self, x_BD: Tensor, state_BS: Tensor, past: Past | None = None) -> Tensor:
        """The next state. `past` is for a cell with `reads_past`."""
        vectors = state_BS.split(self.hidden, dim=-1)
        new_state: Any = self.cell(x_BD, vectors if self.states > 1 else vectors[0])
        return torch.cat(new_state, dim=-1) if self.states > 1 else new_state


class LstmnSpec(CellSpec, kind="lstmn", caption="LSTM that attends to its past"):
    """h̃, c̃ = Σ_i softmax_i(score([x, h̃′], h_i)) (h_i, c_i) over all earlier i; h, c = LSTM(x, h̃, c̃)

    Cheng, Dong and Lapata 2016, arXiv 1601.06733: a long short-term memory-network, whose step attends to its own past.
    The state before the first token counts as an earlier one. The encoder of a model with this cell is a plain LSTM.
    """

    states, reads_past, encoder, decoder = 3, True, nn.LSTM, nn.LSTMCell

    core: CoreSpec = field(AdditiveSpec(), "the score of an earlier state")

    @model_validator(mode="after")
    def _scores_vectors(self) -> Self:
        with locate_errors("core"):
            check_scores_vectors(self.core)
        return self

    def build_cell(self, size: int, hidden: int) -> Cell:
        return AttentiveCell(self, size, hidden)


def check_scores_vectors(core: CoreSpec) -> None:
    """Raises unless a core scores queries and keys as they are, as a recurrent network needs it."""
    if (core.query_source, core.key_source) != ("head", "head"):
        raise IncompatibleError(
            f"'{core.kind}' replaces projections, and a recurrent network has no projections; "
            f"use additive, bilinear, projected or dot"
        )


class AttentiveCell(Cell):
    """An LSTM cell on the mean of all earlier states (h, c) under attention; the third vector of its state is h̃."""

    def __init__(self, spec: LstmnSpec, size: int, hidden: int) -> None:
        super().__init__(spec, size, hidden)
        with locate_errors("core"):
            self.core = spec.core.build(1, size + hidden, hidden)

    def forward(self, x_BD: Tensor, state_BS: Tensor, past: Past | None = None) -> Tensor:
        assert past is not None, "this cell reads its past"
        h, c = self.attend(torch.cat((x_BD, state_BS[:, 2 * self.hidden :]), dim=-1), past)
        return torch.cat((*self.cell(x_BD, (h, c)), h), dim=-1)

    def attend(self, query_BQ: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """h̃ and c̃, the mean of the earlier states."""
        states_BTS, device = past.states, query_BQ.device
        length = states_BTS.shape[1]
        key = self.core.key_transform(states_BTS[:, None, :, : self.hidden])
        mask = Mask(1, length, device, padding_BM=past.padding_mask)
        index = torch.arange(length + 1, device=device)[None]
        positions = Positions(index[:, -1:], index[:, :-1])
        value = states_BTS[:, None, :, : 2 * self.hidden]
        mean: Tensor = self.core(query_BQ[:, None, None], key, value, mask=mask, positions=positions)
        h, c = mean[:, 0, 0].split(self.hidden, dim=-1)
        return h, c


class ReadoutSpec(Part, slot="readout", default="state"):
    """The input of the head, computed from the decoder's states s and s′ (previous), embedding e and context c."""

    reads: ClassVar[frozenset[str]] = frozenset({"s", "s′", "e", "c"})  # which of them its output depends on

    def width(self, hidden: int) -> int:
        """The size of its output."""
        return hidden

    @abstractmethod
    def build(self, hidden: int, embedding: int, context: int) -> nn.Module:
        """Builds the readout for vectors of these sizes."""


class StateReadoutSpec(ReadoutSpec, kind="state", caption=""):
    """s, the state itself"""

    reads: ClassVar[frozenset[str]] = frozenset({"s"})

    def build(self, hidden: int, embedding: int, context: int) -> nn.Module:
        return StateReadout()


class StateReadout(nn.Module):
    def forward(self, s: Tensor, previous: Tensor, e: Tensor, c: Tensor) -> Tensor:
        return s


class TanhReadoutSpec(ReadoutSpec, kind="tanh", caption="Readout, tanh"):
    """tanh(W [s, c])

    Luong et al. 2015, arXiv 1508.04025, equation 5.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"s", "c"})

    def build(self, hidden: int, embedding: int, context: int) -> nn.Module:
        return TanhReadout(hidden, context)


class TanhReadout(nn.Module):
    def __init__(self, hidden: int, context: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden + context, hidden, bias=False)

    def forward(self, s: Tensor, previous: Tensor, e: Tensor, c: Tensor) -> Tensor:
        return torch.tanh(self.project(torch.cat((s, c), dim=-1)))


class MaxoutReadoutSpec(ReadoutSpec, kind="maxout", caption="Readout, maxout"):
    """max over pairs of U s′ + V e + C c, with the state s′ that the context was computed from

    Bahdanau, Cho and Bengio 2015, arXiv 1409.0473, appendix A.2.2.
    """

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
