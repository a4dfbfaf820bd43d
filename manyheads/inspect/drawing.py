"""Draws the architecture of any model as an SVG: each part describes itself, and each layer is drawn as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from manyheads.errors import WrongTypeError
from manyheads.inspect.boxes import (
    add_embedding,
    add_head,
    attention_box,
    detail_of,
    extra_vectors,
    feedforward_box,
    label_box,
    longer,
    norm_box,
    part_box,
    shape_of,
    text_box,
    vocab_of,
)
from manyheads.inspect.layout import PADDING, Arrow, Box, Drawing
from manyheads.inspect.recurrent_drawing import ngram_model, recurrent_model
from manyheads.inspect.residual_graph import Node, residual_graph
from manyheads.inspect.svg import to_svg
from manyheads.inspect.tower import (
    CIRCLE,
    FORK,
    GAP,
    TOWER_GAP,
    Tower,
    beside,
    bounds,
    circle,
    edge,
    from_trunk,
)
from manyheads.model.builder import SkipInit
from manyheads.model.spec import LayerSpec, ModelSpec, StackSpec
from manyheads.model.stack import Layer

MARGIN = 20.0


def draw_model(spec: ModelSpec, *, title: str = "") -> str:
    """The architecture of a model as an SVG, to be read from its input at the bottom to its output at the top."""
    return to_svg(layout_model(spec, title=title))


def layout_model(spec: ModelSpec, *, title: str = "") -> Drawing:
    """The boxes and arrows of the drawing of a model, as plain data."""
    if not isinstance(spec, ModelSpec):
        raise WrongTypeError(f"given a {type(spec).__name__}, expected a ModelSpec, which read and read_model return")
    if spec.recurrent is not None:
        boxes, arrows = recurrent_model(spec, spec.recurrent)
    elif spec.ngram is not None:
        boxes, arrows = ngram_model(spec, spec.ngram)
    else:
        boxes, arrows = stack_model(spec)
    left, top, right, bottom = bounds(boxes, arrows)
    heading = Box("title", title or spec.architecture.replace("-", "–"), slot="heading", width=right - left)
    heading = replace(heading.fitted(), x=left)
    note = replace(Box("legend", "", (legend(spec),), "label", width=right - left).fitted(), x=left, y=bottom + PADDING)
    boxes = [heading.moved(0, top - GAP / 2 - heading.height), *boxes, note]
    left, top, right, bottom = bounds(boxes, arrows)
    dx, dy = MARGIN - left, MARGIN - top
    return Drawing(
        heading.title,
        right + dx + MARGIN,
        bottom + dy + MARGIN,
        tuple(box.moved(dx, dy) for box in boxes),
        tuple(arrow.moved(dx, dy) for arrow in arrows),
    )


def legend(spec: ModelSpec) -> str:
    """The meaning of B, L and M."""
    stacks = [stack for stack in (spec.encoder, spec.decoder) if stack]
    reads = [stack.embed.reads for stack in stacks] or ["tokens"]
    if reads[-1] == "memory":
        return "B images of L patches, of which the encoder reads M"
    target = "B images of L patches" if reads[-1] == "patches" else "B texts of L tokens"
    return target + (f", sources of M {reads[0]}" if spec.has_source else "")


# ------------------------------------------------------------------------------------------------------------- stacks


def stack_model(spec: ModelSpec) -> tuple[list[Box], list[Arrow]]:
    """One stack, or an encoder on the left and a decoder on the right, with arrows from the encoder's output."""
    if spec.encoder is None or spec.decoder is None:
        stack = spec.decoder or spec.encoder
        assert stack is not None
        tower = Tower(-1)
        add_stack(tower, spec, spec.architecture, stack, length="L")
        add_head(tower, spec, stack.width, extra_vectors(stack.embed))
        return tower.boxes, tower.arrows
    encoder, decoder = Tower(-1), Tower(1)
    add_stack(encoder, spec, "encoder", spec.encoder, length="M")
    shape = shape_of("B", longer("M", extra_vectors(spec.encoder.embed)), spec.encoder.width)
    encoder.add(text_box("encoder.output", "Encoder Output", shape=shape))
    add_stack(decoder, spec, "decoder", spec.decoder, length="L", memory_width=spec.encoder.width)
    add_head(decoder, spec, spec.decoder.width, extra_vectors(spec.decoder.embed))
    encoder, decoder = beside(encoder, decoder, TOWER_GAP)
    x, output = bounds(encoder.boxes, encoder.arrows)[2] + TOWER_GAP / 2, encoder.find("encoder.output")
    arrows = [memory_arrow(output, box, x) for top in decoder.boxes for box in top.walk() if box.reads_memory]
    if spec.decoder.embed.reads == "memory":
        arrows.append(from_trunk(output, decoder.find("decoder.embed"), x))
    return encoder.boxes + decoder.boxes, encoder.arrows + decoder.arrows + arrows


def memory_arrow(source: Box, target: Box, x: float) -> Arrow:
    """From the encoder's output, along the space between the towers, to the bottom of a box of the decoder."""
    (right, y), port, below = edge(source, 1), target.x + target.width / 5, target.bottom + GAP * 0.35
    points = ((right, y), (x, y), (x, below), (port, below), (port, target.bottom))
    return Arrow(source.name, target.name, points, "memory")


def add_stack(
    tower: Tower, spec: ModelSpec, name: str, stack: StackSpec, *, length: str, memory_width: int | None = None
) -> None:
    """The embedding, the layers and the final norm of a stack."""
    is_target = memory_width is not None and all(layer.mask.causal for layer in stack.expanded_layers())
    vocab = (spec.source_vocab if name == "encoder" else None) or vocab_of(spec)
    add_embedding(
        tower, name, stack.embed, stack.position, stack.width, vocab=vocab, length=length, memory_width=memory_width,
        inputs="Outputs (shifted right)" if is_target else "Inputs",
    )  # fmt: skip
    add_layers(tower, name, stack, memory_width)
    norm = stack.output_norm()
    if norm is not None and norm.caption:
        tower.add(part_box(f"{name}.final_norm", norm))


# ------------------------------------------------------------------------------------------------------------- layers


def add_layers(tower: Tower, name: str, stack: StackSpec, memory_width: int | None) -> None:
    """Each run of equal layers as one frame, and a pattern that repeats as a frame around its frames."""
    layers = stack.expanded_layers()
    size = period(layers)
    repeats = len(layers) // size if len(runs(layers[:size])) > 1 else 1

    def add_runs(first: int, last: int, *, numbered: bool) -> None:
        for start, count in runs(layers[first:last]):
            index, path = first + start, f"{name}.layers.{first + start}"
            which = f"layer {index}" if count == 1 else f"layers {index}–{index + count - 1}"
            lines = [which if numbered else "", layers[index].residual.caption, shared_weights(stack)]
            with tower.frame(
                Box(path, slot="frame", detail=detail_of(layers[index].residual)),
                label_box(f"{path}.label", f"{count} ×", lines),
            ):
                add_layer(tower, path, layers[index], stack.width, memory_width)

    if repeats > 1:
        frame = Box(f"{name}.pattern", slot="frame")
        with tower.frame(frame, label_box(f"{name}.pattern.label", f"{repeats} ×")):
            add_runs(0, size, numbered=False)
    rest = size * repeats if repeats > 1 else 0
    add_runs(rest, len(layers), numbered=len(runs(layers)) > 1)


def runs(layers: Sequence[LayerSpec]) -> list[tuple[int, int]]:
    """The first index and the number of layers of each run of equal layers."""
    indices = [next(i for i, other in enumerate(layers) if other is layer or other == layer) for layer in layers]
    counts = [len(list(group)) for _, group in groupby(indices)]
    return [(sum(counts[:i]), count) for i, count in enumerate(counts)]


def period(layers: Sequence[LayerSpec]) -> int:
    """The number of layers after which they repeat."""
    sizes = range(1, len(layers))
    return next((n for n in sizes if all(layers[i] == layers[i - n] for i in range(n, len(layers)))), len(layers))


def shared_weights(stack: StackSpec) -> str:
    if stack.group_size == 1:
        return ""
    return "shared weights" if stack.layer_groups == 1 else f"weights shared by each {stack.group_size} layers"


def add_layer(tower: Tower, name: str, layer: LayerSpec, width: int, memory_width: int | None) -> None:
    """One layer as it runs, which is found by tracing its residual connection."""
    with torch.device("meta"), SkipInit():
        built = Layer(layer, width, memory_width)
        boxes = sublayer_boxes(name, layer, width, has_feedforward=built.feedforward is not None)
        nodes = residual_graph(built.residual, list(boxes), has_norm=bool(layer.norm.caption))
    nodes, after_sum = merge_norms(nodes)
    placed = dict[str, Box]()
    for node in nodes:
        path = f"{name}.{node.name}"
        if node.role == "sublayer":
            placed[node.name] = replace(boxes[node.label], name=path)
        elif node.role == "norm":
            placed[node.name] = norm_box(path, layer.norm, after_sum=node.name in after_sum)
        elif node.role == "other":
            placed[node.name] = text_box(path, node.label, slot="other")
        elif node.role == "sum":
            placed[node.name] = circle(path, "sum", CIRCLE, "+")
        else:
            placed[node.name] = circle(path, "fork", FORK)
    tower.add_graph(nodes, placed)


def sublayer_boxes(name: str, layer: LayerSpec, width: int, *, has_feedforward: bool) -> dict[str, Box]:
    """The sublayers in their order."""
    boxes = {
        "attention": attention_box(
            f"{name}.attention", layer.attention, layer.core, width, mask=layer.mask, position=layer.position
        )
    }
    if layer.cross is not None:
        attention, core = layer.cross.attention or layer.attention, layer.cross.core or layer.core
        cross = attention_box(f"{name}.cross", attention, core, width, lines=["to the encoder’s output"])
        boxes["cross"] = replace(cross, reads_memory=True)
    if has_feedforward:
        boxes["feedforward"] = feedforward_box(f"{name}.feedforward", layer.feedforward, width)
    return boxes


def merge_norms(nodes: Sequence[Node]) -> tuple[list[Node], set[str]]:
    """Merges a sum that only a norm reads with the norm; also returns the names of such norms."""
    merged, after_sum = list(nodes), set[str]()
    for total in [node for node in nodes if node.role == "sum"]:
        readers = [node for node in merged if total.name in node.inputs]
        if [node.role for node in readers] == ["norm"]:
            index = merged.index(readers[0])
            merged[index] = replace(readers[0], inputs=total.inputs)
            merged.remove(total)
            after_sum.add(readers[0].name)
    return merged, after_sum
