"""One stack of transformer layers: encoder, decoder, or either tower of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from manyheads.model.spec import LayerSpec, TowerSpec
from manyheads.model.state import Cache, Seen, Uncached
from manyheads.parts.attention import KeyValue, Scene
from manyheads.parts.embed import Embed, Inputs, Memory, positions_of
from manyheads.parts.mask import Mask, MaskSpec
from manyheads.parts.position import Places, Position


@dataclass(frozen=True)
class Across:
    """One layer's view of the encoder: keys and values of the memory, and who sees what."""

    memory: KeyValue
    scene: Scene


class Layer(nn.Module):
    """Self-attention, cross-attention where there is an encoder to see, and the feed-forward network."""

    def __init__(self, spec: LayerSpec, width: int, memory_width: int | None) -> None:
        super().__init__()
        self.attention = spec.attention.build(width, spec.core)
        self.cross = None
        if spec.cross is not None:
            attention, core = spec.cross.attention or spec.attention, spec.cross.core or spec.core
            self.cross = attention.build(width, core, memory_width)
        self.feedforward = spec.feedforward.build(width)
        self.residual = spec.residual.build(spec.norm, width, 2 if self.cross is None else 3)

    def forward(self, x_BLD: Tensor, scene: Scene, cache: Cache, across: Across | None) -> Tensor:
        sublayers = [partial(self.attend, scene=scene, cache=cache), self.feedforward]
        if self.cross is not None:
            assert across is not None, "a layer with cross-attention needs a memory"
            sublayers.insert(1, partial(self.cross, memory=across.memory, scene=across.scene))
        return self.residual(x_BLD, sublayers)

    def attend(self, x_BLD: Tensor, scene: Scene, cache: Cache) -> Tensor:
        return self.attention(x_BLD, cache.extend(self.attention.memory(x_BLD, scene)), scene)


class Stack(nn.Module):
    """Embedding, layers, a closing norm. Reading a whole text and taking one step are the same call."""

    def __init__(self, spec: TowerSpec, vocab: int, memory_width: int | None = None) -> None:
        super().__init__()
        self.spec, self.layer_specs = spec, spec.expanded()
        self.embed: Embed = spec.embed.build(vocab, spec.width, spec.position, memory_width)
        self.layers = nn.ModuleList(Layer(layer, spec.width, memory_width) for layer in self.layer_specs[:: spec.run])
        self.positions, self.position_of = self._positions()
        self.no_position = Position()
        closing = spec.closing_norm()
        self.norm = closing.build(spec.width) if closing else nn.Identity()

    def _positions(self) -> tuple[nn.ModuleList, list[int]]:
        """The position modules and which one each layer uses: its own where each learns one, else one for all alike."""
        modules, place_of = nn.ModuleList(), {}
        order = []
        for i, layer in enumerate(self.layer_specs):
            size = layer.attention.query_size(self.spec.width, layer.core)
            alike = (layer.position, layer.attention.heads, size, i // self.spec.run if layer.position.per_layer else None)
            if alike not in place_of:
                place_of[alike] = len(modules)
                modules.append(layer.position.build(layer.attention.heads, size))
            order.append(place_of[alike])
        return modules, order

    def layer(self, index: int) -> Layer:
        layer = self.layers[index // self.spec.run]
        assert isinstance(layer, Layer)
        return layer

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
        seen = seen or self.empty(Uncached(), inputs.span)
        now = after(seen, inputs)
        assert now.positions is not None
        places = Places(now.positions[:, seen.length :], now.positions, seen.span)
        x_BLD = self.embed(inputs, places.query, table=table, memory=memory)
        scenes = self._scenes(inputs, places, seen, now, x_BLD.dtype)
        across = self._across(inputs, places.query, memory, kept)
        for i, (scene, cache, view) in enumerate(zip(scenes, now.caches, across, strict=True)):
            x_BLD = self.layer(i)(x_BLD, scene, cache, view)
        return self.norm(x_BLD), now

    def _scenes(self, inputs: Inputs, places: Places, seen: Seen, now: Seen, dtype: torch.dtype) -> list[Scene]:
        plans: dict[int, object] = {}
        masks: dict[MaskSpec, Mask] = {}
        scenes = []
        for spec, index in zip(self.layer_specs, self.position_of, strict=True):
            position = self.positions[index]
            assert isinstance(position, Position)
            if index not in plans:
                plans[index] = position.plan(places, dtype)
            if spec.mask not in masks:
                masks[spec.mask] = mask_of(spec.mask, inputs, seen, now)
            scenes.append(Scene(position, plans[index], masks[spec.mask], places))
        return scenes

    def memories(self, memory: Memory) -> list[KeyValue | None]:
        """Keys and values of the memory, once a source and layer; None where a layer does not look across."""
        scene = self._cross_scene(memory, memory.positions, queries=0, segments=None)
        crosses = (self.layer(i).cross for i in range(self.spec.layers))
        return [None if cross is None else cross.memory(memory.states, scene) for cross in crosses]

    def _cross_scene(self, memory: Memory, places: Tensor, *, queries: int, segments: tuple[Tensor, Tensor] | None) -> Scene:
        mask = Mask(queries, memory.states.shape[1], memory.states.device, padding_BM=memory.padding, segments=segments)
        return Scene(self.no_position, None, mask, Places(places, memory.positions))

    def _across(
        self, inputs: Inputs, places: Tensor, memory: Memory | None, kept: Sequence[KeyValue | None] | None
    ) -> Sequence[Across | None]:
        if memory is None:
            return [None] * self.spec.layers
        segments = None
        if memory.segments is not None and inputs.segments is not None:
            segments = (inputs.segments, memory.segments)
        elif memory.segments is not None or inputs.segments is not None:
            raise ValueError("segments must be given for source and target, or for neither")
        scene = self._cross_scene(memory, places, queries=inputs.length, segments=segments)
        pairs = self.memories(memory) if kept is None else kept
        return [None if pair is None else Across(pair, scene) for pair in pairs]


def after(seen: Seen, inputs: Inputs) -> Seen:
    """`seen`, with the places, padding and segments of the new tokens behind it and its caches forked for the step."""
    before: Tensor | int = seen.length
    if seen.padding is not None:
        before = (~seen.padding).sum(dim=1, keepdim=True)
    positions = positions_of(inputs, before)
    if seen.positions is not None:
        rows = max(len(seen.positions), len(positions))
        positions = torch.cat((seen.positions.expand(rows, -1), positions.expand(rows, -1)), dim=1)
    padding = inputs.padding
    if padding is not None or seen.padding is not None:
        nothing = inputs.tokens.new_zeros(inputs.batch, max(seen.length, inputs.length), dtype=torch.bool)
        old = nothing[:, : seen.length] if seen.padding is None else seen.padding
        padding = torch.cat((old, nothing[:, : inputs.length] if padding is None else padding), dim=1)
    segments = inputs.segments
    if seen.length and (segments is None) != (seen.segments is None):
        raise ValueError("segments must be given at every step or at none")
    if segments is not None and seen.segments is not None:
        segments = torch.cat((seen.segments, segments), dim=1)
    return Seen(tuple(cache.fork() for cache in seen.caches), seen.length + inputs.length, positions, padding, segments, seen.span)


def mask_of(spec: MaskSpec, inputs: Inputs, seen: Seen, now: Seen) -> Mask:
    """A tower's mask for these queries over all that is seen."""
    if spec.prefix and inputs.prefix is None:
        raise ValueError("a prefix mask needs the length of each prefix: give prefix, one number a sequence")
    if inputs.prefix is not None and not spec.prefix:
        raise ValueError("prefix lengths were given, but the mask has no prefix; set mask.prefix = true")
    segments = None if inputs.segments is None or now.segments is None else (inputs.segments, now.segments)
    return Mask(
        queries=inputs.length, keys=now.length, device=inputs.tokens.device, offset=seen.length, causal=spec.causal,
        window=spec.window, prefix_B=inputs.prefix, padding_BM=now.padding, segments=segments,
    )  # fmt: skip
