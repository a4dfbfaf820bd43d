"""A stack of transformer layers: an encoder, a decoder, or one of the two stacks of an encoder–decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import InputError, InputLengthError, InputShapeError
from manyheads.model.cache import Cache, NoCache, StackState, check_batch
from manyheads.model.spec import LayerSpec, StackSpec
from manyheads.parts.attention import AttentionContext, KeyValue
from manyheads.parts.embed import Embed
from manyheads.parts.inputs import Inputs, Memory, has_no_data, input_positions, next_position
from manyheads.parts.mask import Mask, MaskSpec
from manyheads.parts.position import AttentionPosition, Positions
from manyheads.parts.residual import Sublayer
from manyheads.spec import locate_errors


@dataclass(frozen=True)
class CrossContext:
    """Arguments of cross-attention in one layer: the memory, its keys and values if cached, and the mask."""

    memory: Memory
    key_value: KeyValue | None
    attention: AttentionContext


class Layer(nn.Module):
    """Self-attention, then cross-attention and a feed-forward network if the layer has them."""

    def __init__(self, spec: LayerSpec, width: int, memory_width: int | None) -> None:
        super().__init__()
        self.attention = spec.attention.build(width, spec.core)
        self.position = build_position(spec, width) if spec.position.per_layer else None
        self.cross = None
        if spec.cross is not None:
            attention, core = spec.cross.attention or spec.attention, spec.cross.core or spec.core
            with locate_errors("cross"):
                self.cross = attention.build(width, core, memory_width)
        self.feedforward = spec.feedforward.build(width)
        self.num_sublayers = 1 + (self.cross is not None) + (self.feedforward is not None)
        self.residual = spec.residual.build(spec.norm, width, self.num_sublayers)

    def forward(self, x_BLD: Tensor, context: AttentionContext, cache: Cache, cross: CrossContext | None) -> Tensor:
        sublayers: list[Sublayer] = [partial(self.self_attention, context=context, cache=cache)]
        if self.cross is not None:
            assert cross is not None, "a layer with cross-attention needs a memory"
            sublayers.append(partial(self.cross_attention, cross=cross))
        if self.feedforward is not None:
            sublayers.append(self.feedforward)
        return self.residual(x_BLD, sublayers)

    def self_attention(self, x_BLD: Tensor, context: AttentionContext, cache: Cache) -> Tensor:
        return self.attention(x_BLD, cache.extend(self.attention.key_value(x_BLD, context)), context)

    def cross_attention(self, x_BLD: Tensor, cross: CrossContext) -> Tensor:
        assert self.cross is not None
        key_value = cross.key_value or self.cross.key_value(cross.memory.states, cross.attention)
        return self.cross(x_BLD, key_value, cross.attention)


def build_position(spec: LayerSpec, width: int) -> AttentionPosition:
    return spec.position.build(spec.attention.heads, spec.attention.query_size(width, spec.core))


class Stack(nn.Module):
    """Embedding, layers and final norm. A forward pass over a sequence and a decoding step are the same call."""

    def __init__(self, spec: StackSpec, vocab: int, memory_width: int | None = None) -> None:
        super().__init__()
        self.spec, self.layer_specs = spec, spec.expanded_layers()
        with locate_errors("embed"):
            self.embed: Embed = spec.embed.build(vocab, spec.width, spec.position, memory_width)
        group_specs = self.layer_specs[:: spec.group_size]
        self.layers = nn.ModuleList(Layer(layer, spec.width, memory_width) for layer in group_specs)
        self.residual_terms = sum(self.layer(i).num_sublayers for i in range(spec.layers))
        self.position_modules, self.position_index = self._shared_positions()
        self.masks = list(dict.fromkeys(layer.mask for layer in self.layer_specs))
        self.mask_index = [self.masks.index(layer.mask) for layer in self.layer_specs]
        self.no_position = AttentionPosition()
        norm = spec.output_norm()
        self.norm = norm.build(spec.width) if norm else nn.Identity()

    def _shared_positions(self) -> tuple[nn.ModuleList, list[int | None]]:
        """The position modules that layers share, and each layer's index among them; None if a layer has its own."""
        modules, keys, indices = nn.ModuleList(), list[object](), list[int | None]()
        for layer in self.layer_specs:
            key = (layer.position, layer.attention.heads, layer.attention.query_size(self.spec.width, layer.core))
            if not layer.position.per_layer and key not in keys:
                keys.append(key)
                modules.append(build_position(layer, self.spec.width))
            indices.append(None if layer.position.per_layer else keys.index(key))
        return modules, indices

    def layer(self, index: int) -> Layer:
        layer = self.layers[index // self.spec.group_size]
        assert isinstance(layer, Layer)
        return layer

    def position(self, index: int) -> AttentionPosition:
        shared = self.position_index[index]
        position = self.layer(index).position if shared is None else self.position_modules[shared]
        assert isinstance(position, AttentionPosition)
        return position

    def start(self, cache: Cache, final_length: int | None = None) -> StackState:
        """The state before the first token, with a copy of the empty `cache` for each layer."""
        return StackState(caches=tuple(cache.fork() for _ in range(self.spec.layers)), final_length=final_length)

    def forward(
        self, inputs: Inputs, *, state: StackState | None = None, memory: Memory | None = None,
        cross_key_values: Sequence[KeyValue | None] | None = None, table: Tensor | None = None,
    ) -> tuple[Tensor, StackState]:  # fmt: skip
        """The hidden states of `inputs`, which continue the sequences of `state`, and the next state.

        `cross_key_values` are the keys and values of the memory for each layer, if cached.
        """
        inputs = self.embed.prepare_inputs(inputs)
        if state is None:
            state = self.start(NoCache(), inputs.final_length)
        elif inputs.final_length not in (None, state.final_length):
            raise InputLengthError(
                f"final_length is {inputs.final_length}, but decoding started with {state.final_length}"
            )
        new_state = append_inputs(state, inputs)
        self._check(new_state)
        # len() would make a traced size constant
        if memory is not None and memory.states.shape[0] != inputs.batch_size:
            raise InputShapeError(
                f"given {inputs.batch_size} targets and {len(memory.states)} sources, expected one source per target"
            )
        positions = positions_after(state, new_state, inputs.tokens.device)
        x_BLD = self.embed(inputs, positions, table=table, memory=memory)
        crosses = self._cross_contexts(inputs, positions, memory, cross_key_values)
        contexts = self._contexts(inputs, positions, state, new_state, x_BLD.dtype)
        for i, (context, cache, cross) in enumerate(zip(contexts, new_state.caches, crosses, strict=True)):
            x_BLD = self.layer(i)(x_BLD, context, cache, cross)
        return self.norm(x_BLD), new_state

    def _contexts(
        self, inputs: Inputs, positions: Positions, state: StackState, new_state: StackState, dtype: torch.dtype
    ) -> Iterator[AttentionContext]:
        """Yields the context of each layer when the layer runs, so that biases of other layers take no memory."""
        masks = [mask_for(spec, inputs, state, new_state) for spec in self.masks]
        shared_data = dict[int, Any]()
        for i, shared in enumerate(self.position_index):
            position = self.position(i)
            if shared is None:
                data = position.precompute(positions, dtype)
            elif shared in shared_data:
                data = shared_data[shared]
            else:
                data = shared_data[shared] = position.precompute(positions, dtype)
            yield AttentionContext(position, data, masks[self.mask_index[i]], positions)

    def _check(self, state: StackState) -> None:
        """Raises an error for inputs that are missing or that this stack cannot use."""
        has_prefix = any(mask.prefix for mask in self.masks)
        if has_prefix and state.prefix_lengths is None:
            raise InputError(
                "mask.prefix is true, so prefix_lengths are needed; pass Inputs(prefix_lengths=…), one length per row"
            )
        if not has_prefix and state.prefix_lengths is not None:
            raise InputError("prefix_lengths were given, but the mask has no prefix; set mask.prefix = true")
        if state.document_ids is None or state.final_length is not None:
            return
        if any(layer.position.needs_final_length for layer in self.layer_specs):
            raise InputError(
                "the positions of this model depend on the length of a sequence; give final_length with document_ids"
            )

    def cross_key_values(self, memory: Memory) -> list[KeyValue | None]:
        """Keys and values of the memory for each layer; None for a layer without cross-attention."""
        positions = Positions(memory.key_positions(), memory.key_positions())
        context = self._cross_attention_context(memory, positions, queries=0, document_ids=None)
        crosses = (self.layer(i).cross for i in range(self.spec.layers))
        return [None if cross is None else cross.key_value(memory.states, context) for cross in crosses]

    def _cross_attention_context(
        self, memory: Memory, positions: Positions, *, queries: int, document_ids: tuple[Tensor, Tensor] | None
    ) -> AttentionContext:
        keys = memory.states.shape[1]
        mask = Mask(queries, keys, memory.states.device, padding_BM=memory.padding_mask, document_ids=document_ids)
        bound = max(positions.bound, keys) if positions.bound is not None and memory.default_positions else None
        cross_positions = Positions(positions.query, memory.key_positions(), bound=bound)
        return AttentionContext(self.no_position, None, mask, cross_positions)

    def _cross_contexts(
        self, inputs: Inputs, positions: Positions, memory: Memory | None,
        key_values: Sequence[KeyValue | None] | None,
    ) -> Sequence[CrossContext | None]:  # fmt: skip
        if memory is None or not any(layer.cross for layer in self.layer_specs):
            return [None] * self.spec.layers
        document_ids = None
        if memory.document_ids is not None and inputs.document_ids is not None:
            document_ids = (inputs.document_ids, memory.document_ids)
        elif memory.document_ids is not None or inputs.document_ids is not None:
            raise InputError("document_ids must be given for source and target, or for neither")
        context = self._cross_attention_context(memory, positions, queries=inputs.length, document_ids=document_ids)
        return [CrossContext(memory, pair, context) for pair in key_values or [None] * self.spec.layers]


def positions_after(state: StackState, new_state: StackState, device: torch.device) -> Positions:
    """The positions of the queries, which are the new tokens, and of the keys, which are all tokens."""
    bound = new_state.length if new_state.default_positions else None
    key = torch.arange(new_state.length, device=device)[None] if new_state.positions is None else new_state.positions
    return Positions(key[:, state.length :], key, state.final_length, bound)


def append_inputs(state: StackState, inputs: Inputs) -> StackState:
    """The state after `inputs`, with copies of the caches for this step to extend."""
    batch, device = inputs.batch_size, inputs.tokens.device
    cached = (cache.key_value.key for cache in state.caches if cache.key_value is not None)
    tensors = (tensor for tensor in (state.padding_mask, state.positions, state.document_ids) if tensor is not None)
    if (tensor := next(chain(tensors, cached), None)) is not None:
        check_batch(tensor, batch)
    padding_mask, positions, document_ids = inputs.padding_mask, None, inputs.document_ids
    if any(part is not None for part in (state.positions, state.padding_mask, inputs.positions, padding_mask)):
        start = state.length if state.positions is None else next_position(state.positions, state.padding_mask)
        old = torch.arange(state.length, device=device)[None] if state.positions is None else state.positions
        positions = torch.cat((old.expand(batch, -1), input_positions(inputs, start).expand(batch, -1)), dim=1)
    if padding_mask is not None or state.padding_mask is not None:
        none = torch.zeros(batch, max(state.length, inputs.length), dtype=torch.bool, device=device)
        old = none[:, : state.length] if state.padding_mask is None else state.padding_mask
        padding_mask = torch.cat((old, none[:, : inputs.length] if padding_mask is None else padding_mask), dim=1)
    if state.length and (document_ids is None) != (state.document_ids is None):
        raise InputError("document_ids must be given at every step or at none")
    if document_ids is not None and state.document_ids is not None:
        document_ids = torch.cat((state.document_ids, document_ids), dim=1)
    if document_ids is not None and inputs.positions is None:
        if not state.default_positions:
            raise InputError("positions were given for earlier tokens of packed documents; give them at every step")
        positions = positions_in_documents(document_ids, padding_mask)
    return StackState(
        caches=tuple(cache.fork() for cache in state.caches),
        length=state.length + inputs.length,
        positions=positions,
        padding_mask=padding_mask,
        document_ids=document_ids,
        prefix_lengths=state.prefix_lengths
        if inputs.prefix_lengths is None
        else first_prefix(state, inputs, padding_mask),
        default_positions=state.default_positions and inputs.positions is None,
        final_length=state.final_length,
    )


def positions_in_documents(document_ids: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Positions that count the non-padding tokens of each packed document from 0."""
    if padding_mask is not None:
        # the output must not depend on document_ids of padding
        document_ids = document_ids.masked_fill(padding_mask, torch.iinfo(document_ids.dtype).max)
    order = document_ids.argsort(dim=1, stable=True)  # sorts by document and keeps the order within each
    by_document = document_ids.gather(1, order)
    starts = torch.ones_like(by_document, dtype=torch.bool)
    starts[:, 1:] = by_document[:, 1:] != by_document[:, :-1]
    index = torch.arange(by_document.shape[1], device=by_document.device).expand_as(by_document)
    counts = index - torch.where(starts, index, 0).cummax(dim=1).values
    positions = torch.zeros_like(counts).scatter(1, order, counts)
    return positions if padding_mask is None else positions.masked_fill(padding_mask, 0)


def first_prefix(state: StackState, inputs: Inputs, padding_mask: Tensor | None) -> Tensor:
    """Returns prefix_lengths; raises unless this is the first step and it contains every prefix."""
    prefix = inputs.prefix_lengths
    assert prefix is not None
    if state.length:
        raise InputError("prefix_lengths must be given with the first step")
    if not has_no_data(prefix):
        lengths = torch.full_like(prefix, inputs.length) if padding_mask is None else (~padding_mask).sum(dim=1)
        wrong = (prefix > lengths) | (prefix < 0)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise InputLengthError(f"row {row} has {int(lengths[row])} tokens, but a prefix of {int(prefix[row])}", row)
    return prefix


def mask_for(spec: MaskSpec, inputs: Inputs, state: StackState, new_state: StackState) -> Mask:
    """The mask of the new tokens, as queries, over all tokens."""
    document_ids = (
        None
        if inputs.document_ids is None or new_state.document_ids is None
        else (inputs.document_ids, new_state.document_ids)
    )
    non_padding_indices = None
    if new_state.padding_mask is not None and (spec.window is not None or spec.prefix):
        counts = (~new_state.padding_mask).cumsum(dim=1) - 1
        non_padding_indices = counts[:, state.length :], counts
    return Mask(
        num_queries=inputs.length,
        num_keys=new_state.length,
        device=inputs.tokens.device,
        query_offset=state.length,
        causal=spec.causal,
        window=spec.window,
        prefix_B=new_state.prefix_lengths if spec.prefix else None,
        padding_BM=new_state.padding_mask,
        document_ids=document_ids,
        non_padding_indices=non_padding_indices,
    )
