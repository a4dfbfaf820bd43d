"""The recurrent network: an encoder, a decoder, and the attention that was invented for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from manyheads.model.spec import ModelSpec, RecurrentSpec
from manyheads.model.state import check_capacity, check_rows_of, check_state, check_writes, select
from manyheads.parts.batch import Inputs, Memory, next_position, positions_of, real_first, refuse_masks
from manyheads.parts.mask import Mask
from manyheads.parts.position import Places
from manyheads.parts.recurrent import Cell
from manyheads.spec import located


@dataclass(frozen=True)
class RecurrentState:
    """The cells' states B×layers×S, the position of the next token B×1, and the source."""

    spec: ModelSpec
    cells: Tensor | None = None  # None before the first token, where no source was read
    next: Tensor | None = None  # 0 if None
    memory: Memory | None = None
    keys: Tensor | None = None  # what the score function makes of the memory, once a source

    def select(self, rows: Tensor) -> RecurrentState:
        return select(self, rows)


class Encoder(nn.Module):
    """Reads the source in one or two directions; padding on either side changes nothing."""

    def __init__(self, spec: RecurrentSpec, vocab: int) -> None:
        super().__init__()
        size = spec.embedding_width
        self.embed = spec.embed.build(vocab, size, spec.position, None)
        self.reader = spec.cell.build_encoder(size, spec.width, layers=spec.layers, two_way=spec.two_way, dropout=spec.dropout)

    def forward(self, source: Inputs) -> tuple[Memory, Tensor]:
        """The memory, and the output at each row's end of reading (backwards: at its beginning)."""
        refuse_masks(source)
        positions = positions_of(source)
        counted = source.positions is None
        places = Places(positions, positions, bound=source.length if counted else None)
        x_BMD = self.embed(source, places, table=None, memory=None)
        given = None if source.padding is None and counted else positions.expand(source.batch, -1)
        if source.padding is None:
            h_BMD, _ = self.reader(x_BMD)
            return Memory(h_BMD, given, counted=counted), self.ends(h_BMD, h_BMD[:, -1])
        order = real_first(source.padding)  # the packing cuts the rest
        x_BMD = x_BMD.gather(1, order[..., None].expand_as(x_BMD))
        nothing = source.padding.all(dim=1)
        lengths = (~source.padding).sum(dim=1).clamp(min=1).cpu()  # a row of padding alone reads one token, and forgets it
        packed = pack_padded_sequence(x_BMD, lengths, batch_first=True, enforce_sorted=False)
        output, _ = self.reader(packed)
        h_BMD, _ = pad_packed_sequence(output, batch_first=True, total_length=source.length)
        last = h_BMD.gather(1, (lengths - 1).to(h_BMD.device)[:, None, None].expand(-1, 1, h_BMD.shape[-1])).squeeze(1)
        last = self.ends(h_BMD, last)
        h_BMD = torch.zeros_like(h_BMD).scatter(1, order[..., None].expand_as(h_BMD), h_BMD)
        return Memory(h_BMD, given, source.padding, counted=counted), last.masked_fill(nothing[:, None], 0.0)

    def ends(self, h_BMD: Tensor, last_BD: Tensor) -> Tensor:
        """The outputs where reading ends: forwards at the last token, then backwards at the first."""
        if not self.reader.bidirectional:
            return last_BD
        width = h_BMD.shape[-1] // 2
        return torch.cat((last_BD[:, :width], h_BMD[:, 0, width:]), dim=-1)


class Recurrent(nn.Module):
    """Encoder, bridge, decoder cells, attention between them, readout and head; without a source, a language model."""

    def __init__(self, spec: ModelSpec, vocab: int) -> None:
        super().__init__()
        assert spec.recurrent is not None
        self.spec, own = spec, spec.recurrent
        self.cell_states = own.cell.states
        size = own.embedding_width
        memory_width = own.width * (2 if own.two_way else 1) if own.source else 0
        context = memory_width if own.attention else 0
        self.encoder = Encoder(own, spec.source_vocab or vocab) if own.source else None
        self.bridge = nn.Linear(own.width if own.attention else memory_width, own.layers * own.width) if own.source else None
        self.embed = own.embed.build(vocab, size, own.position, None)
        with located("recurrent", "core"):
            self.core = own.core.build(1, own.width, memory_width) if own.source and own.attention else None
        self.cells = nn.ModuleList(Cell(own.cell, size + context if i == 0 else own.width, own.width) for i in range(own.layers))
        self.readout = own.readout.build(own.width, size, context)
        self.dropout = nn.Dropout(own.dropout)
        with located("head"):
            self.head = spec.head.build(self.readout.width, vocab, self.embed.rows())

    @property
    def writes(self) -> bool:
        """Whether it can write token by token: its head must say something of each token."""
        return self.spec.head.a_token

    @property
    def table(self) -> Tensor | None:
        return None if self.embed.table is None else self.embed.table.weight

    def forward(self, inputs: Inputs | Tensor, source: Inputs | Tensor | None = None, *, at: Tensor | None = None) -> Tensor:
        """Logits of a batch, B×L×V; with `at`, B×L, of the places alone where it is True."""
        logits = self._step(inputs, self._start(source))[0]
        return logits if at is None else logits[at]

    def start(self, source: Inputs | Tensor | None = None, *, capacity: int | None = None) -> RecurrentState:
        """The state before the first token: s₀ = tanh(W h), or zeros without a source. A state never grows.

        h is where reading the source ended; beside attention, of a two-way encoder, where reading backwards did.
        """
        check_capacity(capacity)
        check_writes(self.writes)
        return self._start(source)

    def _start(self, source: Inputs | Tensor | None) -> RecurrentState:
        own = self.spec.recurrent
        assert own is not None
        if (source is None) != (self.encoder is None):
            raise ValueError(
                "this network has no encoder to read a source" if self.encoder is None else "this network needs a source beside the target"
            )
        if source is None or self.encoder is None or self.bridge is None:
            return RecurrentState(self.spec)
        memory, last = self.encoder(Inputs.of(source))
        first = torch.tanh(self.bridge(last[:, -self.bridge.in_features :])).unflatten(-1, (own.layers, -1))
        rest = first.new_zeros(len(first), own.layers, (self.cell_states - 1) * own.width)
        keys = None if self.core is None else self.core.key(memory.states[:, None])
        return RecurrentState(self.spec, torch.cat((first, rest), dim=-1), None, memory, keys)

    def step(self, inputs: Inputs | Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        check_writes(self.writes)
        return self._step(inputs, state)

    def _step(self, inputs: Inputs | Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        check_state(state, RecurrentState, self.spec)
        given = Inputs.of(inputs)
        refuse_masks(given)
        positions = positions_of(given, 0 if state.next is None else state.next).expand(given.batch, -1)
        e_BLD = self.embed(given, Places(positions, positions), table=None, memory=None)
        real = torch.ones_like(given.tokens, dtype=torch.bool) if given.padding is None else ~given.padding
        cells, outputs = self.nothing_read(e_BLD) if state.cells is None else state.cells, []
        check_rows_of(cells, given.batch)
        for i in range(given.length):
            context = self.look(cells, positions[:, i : i + 1], state)
            after = self.advance(torch.cat((e_BLD[:, i], context), dim=-1), cells)
            before, cells = cells, torch.where(real[:, i, None, None], after, cells)  # padding is not read
            outputs.append(self.readout(self.top(cells), self.top(before), e_BLD[:, i], context))
        h_BLD = self.dropout(torch.stack(outputs, dim=1))
        logits = self.head(h_BLD, table=self.table, padding=given.padding)
        ahead = next_position(positions, given.padding)
        if state.next is not None:
            ahead = torch.where(real.any(dim=1, keepdim=True), ahead, state.next)
        return logits, replace(state, cells=cells, next=ahead)

    def nothing_read(self, e_BLD: Tensor) -> Tensor:
        own = self.spec.recurrent
        assert own is not None
        return e_BLD.new_zeros(len(e_BLD), own.layers, self.cell_states * own.width)

    def top(self, cells: Tensor) -> Tensor:
        width = cells.shape[-1] // self.cell_states
        return cells[:, -1, :width]

    def advance(self, x_BD: Tensor, cells: Tensor) -> Tensor:
        """All layers of cells, one token further."""
        after = []
        for layer, cell in enumerate(self.cells):
            after.append(cell(x_BD, cells[:, layer]))
            x_BD = self.dropout(after[-1][:, : cells.shape[-1] // self.cell_states])
        return torch.stack(after, dim=1)

    def look(self, cells: Tensor, position: Tensor, state: RecurrentState) -> Tensor:
        """c_i = Σ_j α_ij h_j with α_i = softmax_j(score(s_{i−1}, h_j)); nothing where there is no attention."""
        memory = state.memory
        if self.core is None or memory is None or state.keys is None:
            return cells.new_zeros(len(cells), 0)
        q, h = self.top(cells)[:, None, None], memory.states[:, None]
        mask = Mask(1, h.shape[2], h.device, padding_BM=memory.padding)
        context: Tensor = self.core(q, state.keys, h, mask=mask, places=Places(position, memory.places()))
        return context[:, 0, 0]
