"""The recurrent network, with an encoder, a decoder, and attention between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from manyheads.errors import InputError
from manyheads.model.cache import State, StepwiseModel, check_batch, check_state, join_memories, join_rows
from manyheads.model.spec import ModelSpec, RecurrentSpec
from manyheads.parts.inputs import Inputs, Memory, check_not_packed, input_positions, next_position, tokens_first
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions
from manyheads.parts.recurrent import Past
from manyheads.spec import locate_errors


@dataclass(frozen=True)
class RecurrentState(State):
    """The states of the cells, B×layers×S, the position of the next token, B×1, and the source."""

    spec: ModelSpec
    cells: Tensor | None = None  # None before the first token of a model without a source
    position: Tensor | None = None  # None means 0
    memory: Memory | None = None
    keys: Tensor | None = None  # the keys of the memory, computed once per source
    past: Past | None = None  # all states so far, if the cells read them

    def join(self, others: Sequence[RecurrentState], capacity: int) -> RecurrentState:
        """`capacity` has no effect, because no memory is reserved."""
        states = (self, *others)

        def parts(name: str) -> list[Any]:
            return [part for state in states if (part := getattr(state, name)) is not None]

        pasts, memories, keys = parts("past"), parts("memory"), parts("keys")
        past = pasts and Past(
            join_rows([past.states for past in pasts], dim=1, left=True),
            join_rows([past.padding_mask for past in pasts], dim=1, left=True, value=True),
        )
        return replace(
            self,
            cells=torch.cat(parts("cells")),
            position=torch.cat(parts("position")),
            memory=join_memories(memories) if memories else None,
            keys=join_rows(keys, dim=2) if keys else None,
            past=past or None,
        )


class Encoder(nn.Module):
    """Reads the source in one or both directions. Padding on either side does not change the output."""

    def __init__(self, spec: RecurrentSpec, vocab: int) -> None:
        super().__init__()
        size = spec.embedding_width
        self.embed = spec.embed.build(vocab, size, spec.position, None)
        self.reader = spec.cell.build_encoder(
            size, spec.width, layers=spec.layers, bidirectional=spec.bidirectional, dropout=spec.dropout
        )

    def forward(self, source: Inputs) -> tuple[Memory, Tensor]:
        """The memory, and the output at the last token (of the backward direction, at the first token)."""
        check_not_packed(source)
        index, default_positions = input_positions(source), source.positions is None
        positions = Positions(index, index, bound=source.length if default_positions else None)
        x_BMD = self.embed(source, positions, table=None, memory=None)
        memory_positions = (
            None if source.padding_mask is None and default_positions else index.expand(source.batch_size, -1)
        )
        if source.padding_mask is None:
            h_BMD, _ = self.reader(x_BMD)
            last = h_BMD[:, -1]
        else:
            order = tokens_first(source.padding_mask)[..., None]  # packing ignores the rest
            x_BMD = x_BMD.gather(1, order.expand_as(x_BMD))
            # packing needs at least one token; the output of a row of padding is set to zero below
            lengths = (~source.padding_mask).sum(dim=1).clamp(min=1).cpu()
            packed = pack_padded_sequence(x_BMD, lengths, batch_first=True, enforce_sorted=False)
            h_BMD, _ = pad_packed_sequence(self.reader(packed)[0], batch_first=True, total_length=source.length)
            last_index = (lengths - 1).to(h_BMD.device)[:, None, None]
            last = h_BMD.gather(1, last_index.expand(-1, 1, h_BMD.shape[-1])).squeeze(1)
        if self.reader.bidirectional:
            width = h_BMD.shape[-1] // 2
            last = torch.cat((last[:, :width], h_BMD[:, 0, width:]), dim=-1)
        if source.padding_mask is not None:
            h_BMD = torch.zeros_like(h_BMD).scatter(1, order.expand_as(h_BMD), h_BMD)
            last = last.masked_fill(source.padding_mask.all(dim=1)[:, None], 0.0)
        return Memory(h_BMD, memory_positions, source.padding_mask, default_positions=default_positions), last


class Recurrent(StepwiseModel[RecurrentState]):
    """A recurrent encoder-decoder, or without a source a recurrent language model."""

    hidden_names = ("embed", "readout")

    def __init__(self, spec: ModelSpec, vocab: int) -> None:
        super().__init__()
        assert spec.recurrent is not None
        self.spec, backbone = spec, spec.recurrent
        self.cell_states, self.reads_past = backbone.cell.states, backbone.cell.reads_past
        self.layers, self.width = backbone.layers, backbone.width
        size = backbone.embedding_width
        memory_width = backbone.width * (2 if backbone.bidirectional else 1) if backbone.source else 0
        context = memory_width if backbone.attention else 0
        self.encoder = Encoder(backbone, spec.source_vocab or vocab) if backbone.source else None
        bridge_width = backbone.width if backbone.attention else memory_width
        self.bridge = nn.Linear(bridge_width, backbone.layers * backbone.width) if backbone.source else None
        self.embed = backbone.embed.build(vocab, size, backbone.position, None)
        with locate_errors("recurrent", "core"):
            self.core = (
                backbone.core.build(1, backbone.width, memory_width) if backbone.source and backbone.attention else None
            )
        with locate_errors("recurrent", "cell"):
            self.cells = nn.ModuleList(
                backbone.cell.build_cell(size + context if i == 0 else backbone.width, backbone.width)
                for i in range(backbone.layers)
            )
        self.readout = backbone.readout.build(backbone.width, size, context)
        self.dropout = nn.Dropout(backbone.dropout)
        with locate_errors("head"):
            self.head = spec.head.build(backbone.readout.width(backbone.width), vocab, self.embed.table_shape)

    @property
    def table(self) -> Tensor | None:
        return None if self.embed.table is None else self.embed.table.weight

    def initial_state(self, source: Inputs | Tensor | None) -> RecurrentState:
        """s₀ = tanh(W h), or zeros without a source.

        h is the encoder's output at the last token. With attention and a bidirectional encoder, it is the output of the
        backward direction at the first token.
        """
        if source is None and self.encoder is not None:
            raise InputError("this model needs a source")
        if source is not None and self.encoder is None:
            raise InputError("a source was given, but the model has no encoder")
        if source is None or self.encoder is None or self.bridge is None:
            return RecurrentState(self.spec)
        memory, last = self.encoder(Inputs.of(source))
        first = torch.tanh(self.bridge(last[:, -self.bridge.in_features :])).unflatten(-1, (self.layers, -1))
        rest = first.new_zeros(len(first), self.layers, (self.cell_states - 1) * self.width)
        keys = None if self.core is None else self.core.key_transform(memory.states[:, None])
        return RecurrentState(self.spec, torch.cat((first, rest), dim=-1), None, memory, keys)

    @property
    def last_cross_core(self) -> nn.Module | None:  # type: ignore[override]
        return self.core

    def hidden_step(self, inputs: Inputs, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        check_state(state, RecurrentState, self.spec)
        check_not_packed(inputs)
        index = input_positions(inputs, 0 if state.position is None else state.position).expand(inputs.batch_size, -1)
        e_BLD = self.embed(inputs, Positions(index, index), table=None, memory=None)
        is_token = (
            torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.padding_mask is None else ~inputs.padding_mask
        )
        cells, outputs = state.cells, []
        if cells is None:
            cells = e_BLD.new_zeros(len(e_BLD), self.layers, self.cell_states * self.width)
        check_batch(cells, inputs.batch_size)
        past = state.past or (Past.of(cells) if self.reads_past else None)
        for i in range(inputs.length):
            context = self.attend(cells, index[:, i : i + 1], state)
            new_cells = self.run_cells(torch.cat((e_BLD[:, i], context), dim=-1), cells, past)
            # padding does not change the state
            previous, cells = cells, torch.where(is_token[:, i, None, None], new_cells, cells)
            past = past and past.append(cells, ~is_token[:, i])
            outputs.append(self.readout(self.output(cells), self.output(previous), e_BLD[:, i], context))
        h_BLD = self.dropout(torch.stack(outputs, dim=1))
        position = next_position(index, inputs.padding_mask)
        if state.position is not None:
            position = torch.where(is_token.any(dim=1, keepdim=True), position, state.position)
        return h_BLD, replace(state, cells=cells, position=position, past=past)

    def output(self, cells: Tensor) -> Tensor:
        """The output of the last layer of cells."""
        return cells[:, -1, : self.width]

    def run_cells(self, x_BD: Tensor, cells: Tensor, past: Past | None) -> Tensor:
        """Runs all layers of cells on one token."""
        states = []
        for layer, cell in enumerate(self.cells):
            states.append(cell(x_BD, cells[:, layer], past and past.layer(layer)))
            x_BD = self.dropout(states[-1][:, : self.width])
        return torch.stack(states, dim=1)

    def attend(self, cells: Tensor, position: Tensor, state: RecurrentState) -> Tensor:
        """c_i = Σ_j α_ij h_j with α_i = softmax_j(score(s_{i−1}, h_j)); of width 0 without attention."""
        memory = state.memory
        if self.core is None or memory is None or state.keys is None:
            return cells.new_zeros(len(cells), 0)
        q, h = self.output(cells)[:, None, None], memory.states[:, None]
        mask = Mask(1, h.shape[2], h.device, padding_BM=memory.padding_mask)
        positions = Positions(position, memory.key_positions())
        context: Tensor = self.core(q, state.keys, h, mask=mask, positions=positions)
        return context[:, 0, 0]
