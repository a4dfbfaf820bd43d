"""One stack of transformer layers: encoder, decoder, or either tower of a pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.model.spec import LayerSpec, TowerSpec
from manyheads.model.state import Cache, Seen, Uncached, check_rows_of
from manyheads.parts.attention import KeyValue, Scene
from manyheads.parts.batch import Inputs, Memory, next_position, numberless, positions_of
from manyheads.parts.embed import Embed
from manyheads.parts.mask import Mask, MaskSpec
from manyheads.parts.position import Places, Position
from manyheads.spec import located


@dataclass(frozen=True)
class Across:
    """One layer's view of the encoder: the memory, its keys and values where they were made before, and who sees what."""

    memory: Memory
    kept: KeyValue | None
    scene: Scene


class Layer(nn.Module):
    """Self-attention, cross-attention where there is an encoder to see, and the feed-forward network."""

    def __init__(self, spec: LayerSpec, width: int, memory_width: int | None) -> None:
        super().__init__()
        self.attention = spec.attention.build(width, spec.core)
        self.position = build_position(spec, width) if spec.position.per_layer else None
        self.cross = None
        if spec.cross is not None:
            attention, core = spec.cross.attention or spec.attention, spec.cross.core or spec.core
            with located("cross"):
                self.cross = attention.build(width, core, memory_width)
        self.feedforward = spec.feedforward.build(width)
        self.residual = spec.residual.build(spec.norm, width, 2 if self.cross is None else 3)

    def forward(self, x_BLD: Tensor, scene: Scene, cache: Cache, across: Across | None) -> Tensor:
        sublayers = [partial(self.attend, scene=scene, cache=cache), self.feedforward]
        if self.cross is not None:
            assert across is not None, "a layer with cross-attention needs a memory"
            sublayers.insert(1, partial(self.look_across, across=across))
        return self.residual(x_BLD, sublayers)

    def attend(self, x_BLD: Tensor, scene: Scene, cache: Cache) -> Tensor:
        return self.attention(x_BLD, cache.extend(self.attention.memory(x_BLD, scene)), scene)

    def look_across(self, x_BLD: Tensor, across: Across) -> Tensor:
        assert self.cross is not None
        memory = across.kept or self.cross.memory(across.memory.states, across.scene)
        return self.cross(x_BLD, memory, across.scene)


def build_position(spec: LayerSpec, width: int) -> Position:
    return spec.position.build(spec.attention.heads, spec.attention.query_size(width, spec.core))


class Stack(nn.Module):
    """Embedding, layers, a closing norm. Reading a whole text and taking one step are the same call."""

    def __init__(self, spec: TowerSpec, vocab: int, memory_width: int | None = None) -> None:
        super().__init__()
        self.spec, self.layer_specs = spec, spec.expanded()
        with located("embed"):
            self.embed: Embed = spec.embed.build(vocab, spec.width, spec.position, memory_width)
        self.layers = nn.ModuleList(Layer(layer, spec.width, memory_width) for layer in self.layer_specs[:: spec.run])
        self.terms = sum(3 if layer.cross else 2 for layer in self.layer_specs)  # of the sum that leaves the last layer
        self.positions, self.position_of = self._shared_positions()
        self.masks = list(dict.fromkeys(layer.mask for layer in self.layer_specs))
        self.mask_of = [self.masks.index(layer.mask) for layer in self.layer_specs]
        self.no_position = Position()
        closing = spec.closing_norm()
        self.norm = closing.build(spec.width) if closing else nn.Identity()

    def _shared_positions(self) -> tuple[nn.ModuleList, list[int | None]]:
        """The position modules that layers share, and which each layer uses; None where a layer has its own."""
        modules, known, order = nn.ModuleList(), list[object](), list[int | None]()
        for layer in self.layer_specs:
            alike = (layer.position, layer.attention.heads, layer.attention.query_size(self.spec.width, layer.core))
            if not layer.position.per_layer and alike not in known:
                known.append(alike)
                modules.append(build_position(layer, self.spec.width))
            order.append(None if layer.position.per_layer else known.index(alike))
        return modules, order

    def layer(self, index: int) -> Layer:
        layer = self.layers[index // self.spec.run]
        assert isinstance(layer, Layer)
        return layer

    def position(self, index: int) -> Position:
        shared = self.position_of[index]
        position = self.layer(index).position if shared is None else self.positions[shared]
        assert isinstance(position, Position)
        return position

    def empty(self, cache: Cache, span: int | None = None) -> Seen:
        """Nothing read yet, and a cache of this sort a layer."""
        return Seen(caches=tuple(cache.fork() for _ in range(self.spec.layers)), span=span)

    def forward(
        self, inputs: Inputs, *, seen: Seen | None = None, memory: Memory | None = None,
        kept: Sequence[KeyValue | None] | None = None, table: Tensor | None = None,
    ) -> tuple[Tensor, Seen]:  # fmt: skip
        """The states of `inputs`, read after all that was `seen`; and all that is seen now.

        `kept` are the layers' keys and values of the memory, where they were made before.
        """
        inputs = self.embed.lay_out(inputs)
        if seen is not None and inputs.span not in (None, seen.span):
            raise ValueError(
                f"the text was started for {seen.span or 'any number of'} tokens, and a step says {inputs.span}; say it at the start"
            )
        seen = seen or self.empty(Uncached(), inputs.span)
        now = after(seen, inputs)
        self._check(now)
        places = places_of(seen, now, inputs.tokens.device)
        x_BLD = self.embed(inputs, places, table=table, memory=memory)
        scenes = self._scenes(inputs, places, seen, now, x_BLD.dtype)
        across = self._across(inputs, places, memory, kept)
        for i, (scene, cache, view) in enumerate(zip(scenes, now.caches, across, strict=True)):
            x_BLD = self.layer(i)(x_BLD, scene, cache, view)
        return self.norm(x_BLD), now

    def _scenes(self, inputs: Inputs, places: Places, seen: Seen, now: Seen, dtype: torch.dtype) -> Iterator[Scene]:
        """Each layer's circumstances, when its turn comes: a layer's own biases are not made before it runs."""
        masks, plans = [mask_for(spec, inputs, seen, now) for spec in self.masks], dict[int, Any]()
        for i, shared in enumerate(self.position_of):
            position = self.position(i)
            if shared is None:
                plan = position.plan(places, dtype)
            else:
                plan = plans[shared] = plans[shared] if shared in plans else position.plan(places, dtype)
            yield Scene(position, plan, masks[self.mask_of[i]], places)

    def _check(self, now: Seen) -> None:
        """Refuses what this tower cannot use, or cannot do without."""
        if any(mask.prefix for mask in self.masks) and now.prefix is None:
            raise ValueError("a prefix mask needs the length of each prefix: give prefix, one number a sequence")
        if now.prefix is not None and not any(mask.prefix for mask in self.masks):
            raise ValueError("prefix lengths were given, but the mask has no prefix; set mask.prefix = true")
        if now.segments is not None and now.span is None and any(layer.position.asks_span for layer in self.layer_specs):
            raise ValueError("the angles of this model depend on the length of each text, and a row holds several: give span")

    def memories(self, memory: Memory) -> list[KeyValue | None]:
        """Keys and values of the memory, once a source and layer; None where a layer does not look across."""
        scene = self._cross_scene(memory, Places(memory.places(), memory.places()), queries=0, segments=None)
        crosses = (self.layer(i).cross for i in range(self.spec.layers))
        return [None if cross is None else cross.memory(memory.states, scene) for cross in crosses]

    def _cross_scene(self, memory: Memory, places: Places, *, queries: int, segments: tuple[Tensor, Tensor] | None) -> Scene:
        keys = memory.states.shape[1]
        mask = Mask(queries, keys, memory.states.device, padding_BM=memory.padding, segments=segments)
        bound = max(places.bound, keys) if places.bound is not None and memory.counted else None
        return Scene(self.no_position, None, mask, Places(places.query, memory.places(), bound=bound))

    def _across(
        self, inputs: Inputs, places: Places, memory: Memory | None, kept: Sequence[KeyValue | None] | None
    ) -> Sequence[Across | None]:
        if memory is None or not any(layer.cross for layer in self.layer_specs):
            return [None] * self.spec.layers
        if memory.states.shape[0] != inputs.batch:
            raise ValueError(f"{inputs.batch} targets for {len(memory.states)} sources; each target needs its own")
        segments = None
        if memory.segments is not None and inputs.segments is not None:
            segments = (inputs.segments, memory.segments)
        elif memory.segments is not None or inputs.segments is not None:
            raise ValueError("segments must be given for source and target, or for neither")
        scene = self._cross_scene(memory, places, queries=inputs.length, segments=segments)
        return [Across(memory, pair, scene) for pair in kept or [None] * self.spec.layers]


def places_of(seen: Seen, now: Seen, device: torch.device) -> Places:
    """Where the new tokens stand, and all tokens."""
    bound = now.length if now.counted else None
    positions = torch.arange(now.length, device=device)[None] if now.positions is None else now.positions
    return Places(positions[:, seen.length :], positions, seen.span, bound)


def after(seen: Seen, inputs: Inputs) -> Seen:
    """`seen`, with what is said of the new tokens behind it and its caches forked for the step."""
    batch, device = inputs.batch, inputs.tokens.device
    held = [tensor for tensor in (seen.padding, seen.positions, seen.segments) if tensor is not None]
    held += [cache.held.key for cache in seen.caches if cache.held is not None]
    if held:
        check_rows_of(held[0], batch)
    padding, positions, segments, prefix = inputs.padding, None, inputs.segments, seen.prefix
    if any(part is not None for part in (seen.positions, seen.padding, inputs.positions, padding)):
        before: Tensor | int = seen.length
        if seen.positions is not None:
            before = next_position(seen.positions, seen.padding)
        old = torch.arange(seen.length, device=device)[None] if seen.positions is None else seen.positions
        positions = torch.cat((old.expand(batch, -1), positions_of(inputs, before).expand(batch, -1)), dim=1)
    if padding is not None or seen.padding is not None:
        nothing = torch.zeros(batch, max(seen.length, inputs.length), dtype=torch.bool, device=device)
        old = nothing[:, : seen.length] if seen.padding is None else seen.padding
        padding = torch.cat((old, nothing[:, : inputs.length] if padding is None else padding), dim=1)
    if seen.length and (segments is None) != (seen.segments is None):
        raise ValueError("segments must be given at every step or at none")
    if segments is not None and seen.segments is not None:
        segments = torch.cat((seen.segments, segments), dim=1)
    if segments is not None and not seen.counted and inputs.positions is None:
        raise ValueError("positions were given for packed documents; give them at every step")
    if segments is not None and inputs.positions is None:
        positions = within_segments(segments, padding)
    if inputs.prefix is not None:
        prefix = first_prefix(seen, inputs, padding)
    caches, counted = tuple(cache.fork() for cache in seen.caches), seen.counted and inputs.positions is None
    return Seen(caches, seen.length + inputs.length, positions, padding, segments, prefix, counted, seen.span)


def within_segments(segments: Tensor, padding: Tensor | None) -> Tensor:
    """Positions that start anew with each packed document, counting its real tokens; those of one number are one document."""
    if padding is not None:
        segments = segments.masked_fill(padding, torch.iinfo(segments.dtype).max)  # it does not matter whose number padding has
    order = segments.argsort(dim=1, stable=True)  # documents side by side, each in its order
    sorted_ = segments.gather(1, order)
    begins = torch.ones_like(sorted_, dtype=torch.bool)
    begins[:, 1:] = sorted_[:, 1:] != sorted_[:, :-1]
    index = torch.arange(sorted_.shape[1], device=sorted_.device).expand_as(sorted_)
    counted = index - torch.where(begins, index, 0).cummax(dim=1).values
    placed = torch.zeros_like(counted).scatter(1, order, counted)
    return placed if padding is None else placed.masked_fill(padding, 0)


def first_prefix(seen: Seen, inputs: Inputs, padding: Tensor | None) -> Tensor:
    """A prefix is read whole, and first: its tokens see each other."""
    assert inputs.prefix is not None
    if seen.length:
        raise ValueError("the length of a prefix is said with the first step, not later")
    if not numberless(inputs.prefix):
        real = torch.full_like(inputs.prefix, inputs.length) if padding is None else (~padding).sum(dim=1)
        short = (inputs.prefix > real) | (inputs.prefix < 0)
        if short.any():
            row = int(short.nonzero()[0])
            raise ValueError(
                f"text {row} has {int(real[row])} tokens, and its prefix is said to have {int(inputs.prefix[row])}; read it whole"
            )
    return inputs.prefix


def mask_for(spec: MaskSpec, inputs: Inputs, seen: Seen, now: Seen) -> Mask:
    """A tower's mask for these queries over all that is seen."""
    segments = None if inputs.segments is None or now.segments is None else (inputs.segments, now.segments)
    ranks = None
    if now.padding is not None and (spec.window is not None or spec.prefix):
        counted = (~now.padding).cumsum(dim=1) - 1
        ranks = counted[:, seen.length :], counted
    return Mask(
        queries=inputs.length, keys=now.length, device=inputs.tokens.device, offset=seen.length, causal=spec.causal,
        window=spec.window, prefix_B=now.prefix if spec.prefix else None, padding_BM=now.padding, segments=segments, ranks=ranks,
    )  # fmt: skip
