"""The drawings of the recurrent network, with attention between encoder and decoder, and of the n-gram network."""

from __future__ import annotations

from dataclasses import replace

from manyheads.inspect.boxes import (
    add_embedding,
    add_head,
    number,
    part_box,
    shape_of,
    shown_fields,
    text_box,
    vocab_of,
)
from manyheads.inspect.layout import PADDING, Arrow, Box
from manyheads.inspect.tower import (
    BOX_WIDTH,
    CIRCLE,
    COLUMN_GAP,
    FORK,
    GAP,
    LANE,
    TOWER_GAP,
    Tower,
    beside,
    bounds,
    circle,
    edge,
    from_trunk,
    sideways,
)
from manyheads.model.spec import ModelSpec, NgramSpec, RecurrentSpec
from manyheads.parts.recurrent import StateReadoutSpec


def ngram_model(spec: ModelSpec, own: NgramSpec) -> tuple[list[Box], list[Arrow]]:
    """The embeddings of the last tokens, one hidden layer, and the head."""
    tower, before, hidden = Tower(-1), own.order - 1, own.hidden or own.width
    tower.add(text_box("ngram.inputs", "Inputs", ["token ids"], shape=shape_of("B", "L")))
    table = [f"{number(vocab_of(spec), 'V')} × {own.width:,}"]
    tower.add(text_box("ngram.embed", "Token Embedding", table, slot="embed", shape=shape_of("B", "L", own.width)))
    title = f"Concatenation of the last {before}"
    tower.add(text_box("ngram.window", title, slot="window", shape=shape_of("B", "L", before * own.width)))
    sizes = [f"{before * own.width:,} → {hidden:,}, tanh"]
    box = text_box("ngram.hidden", "Hidden Layer", sizes, slot="feedforward", shape=shape_of("B", "L", hidden))
    tower.add(replace(box, detail=own.summary()))
    add_head(tower, spec, hidden)
    return tower.boxes, tower.arrows


def recurrent_model(spec: ModelSpec, own: RecurrentSpec) -> tuple[list[Box], list[Arrow]]:
    """The encoder on the left, the decoder on the right, and between them the first state and attention."""
    attention = part_box(
        "recurrent.core", own.core, ["scores s′ against each h", shown_fields(own.core)],
        title=f"Attention, {own.core.caption}",
    )  # fmt: skip
    decoder = decoder_tower(spec, own, attention.height)
    if not own.source:
        return decoder.boxes, decoder.arrows
    encoder, decoder = beside(encoder_tower(spec, own), decoder, 2 * TOWER_GAP + BOX_WIDTH)
    middle, arrows = first_state(encoder, decoder)
    if own.attention:
        more = attention_between(encoder, decoder, attention, own)
        middle, arrows = middle + more[0], arrows + more[1]
    return encoder.boxes + middle + decoder.boxes, encoder.arrows + arrows + decoder.arrows


def memory_width(own: RecurrentSpec) -> int:
    return own.width * (2 if own.bidirectional else 1)


def times(count: int, title: str) -> str:
    return title if count == 1 else f"{count} × {title}"


def encoder_tower(spec: ModelSpec, own: RecurrentSpec) -> Tower:
    tower, size, width = Tower(-1), own.embedding_width, memory_width(own)
    vocab = spec.source_vocab or vocab_of(spec)
    add_embedding(tower, "encoder", own.embed, own.position, size, vocab=vocab, length="M")
    title = f"{'Bidirectional ' if own.bidirectional else ''}{times(own.layers, own.cell.encoder.__name__)}"
    tower.add(part_box("encoder.cell", own.cell, [f"{size:,} → {width:,}"], title=title))
    tower.add(text_box("encoder.output", "Encoder States h", shape=shape_of("B", "M", width)))
    return tower


def decoder_tower(spec: ModelSpec, own: RecurrentSpec, attention_height: float) -> Tower:
    """The decoder: embedding, context, cell, readout and head, with the paths to the readout on the right."""
    tower, size, attends = Tower(1), own.embedding_width, own.source and own.attention
    inputs = "Outputs (shifted right)" if own.source else "Inputs"
    add_embedding(tower, "decoder", own.embed, own.position, size, vocab=vocab_of(spec), length="L", inputs=inputs)
    reads = reads_of(own)
    embedded = tower.add(circle("decoder.embed.fork", "fork", FORK), gap=GAP / 2) if "e" in reads else None
    if attends:
        tower.add(circle("recurrent.context", "sum", CIRCLE, "‖"), row_height=attention_height)
    lines = [f"{size + (memory_width(own) if attends else 0):,} → {own.width:,}", "one step per token"]
    title = times(own.layers, own.cell.caption)
    cell = part_box("recurrent.cell", own.cell, lines, title=title, shape=shape_of("B", "L", own.width))
    cell = tower.add(cell, row_height=cell.height + (GAP if own.source else 0))
    loop = cell.right + LANE * 2
    points = ((cell.right, cell.y + 14), (loop, cell.y + 14), (loop, cell.bottom - 14), (cell.right, cell.bottom - 14))
    tower.arrows.append(Arrow(cell.name, cell.name, points, "recurrent", "s′"))
    width = own.readout.width(own.width)
    if own.readout.caption:
        box = part_box("recurrent.readout", own.readout, [own.readout.summary()], shape=shape_of("B", "L", width))
        readout = tower.add(box, label=", ".join(sorted(reads & {"s", "s′"})))
        if embedded is not None:
            x = loop + LANE
            points = (edge(embedded, 1), (x, embedded.center[1]), (x, readout.center[1]), edge(readout, 1))
            tower.arrows.append(Arrow(embedded.name, readout.name, points, label="e"))
    add_head(tower, spec, width)
    return tower


def reads_of(own: RecurrentSpec) -> frozenset[str]:
    """What the readout reads; one that is not drawn is the state itself."""
    return own.readout.reads if own.readout.caption else StateReadoutSpec.reads


def first_state(encoder: Tower, decoder: Tower) -> tuple[list[Box], list[Arrow]]:
    """The path from the encoder to the first state of the decoder's cells."""
    output, cell = encoder.find("encoder.output"), decoder.find("recurrent.cell")
    left = bounds(encoder.boxes, encoder.arrows)[2]
    box = text_box("recurrent.bridge", "First State", ["s₀ = tanh(W h)"], slot="head")
    box = box.moved(left + TOWER_GAP - box.x, cell.center[1] - PADDING - box.bottom)
    to_cell = Arrow(box.name, cell.name, (edge(box, 1), (cell.x, box.center[1])), "recurrent")
    return [box], [from_trunk(output, box, left + TOWER_GAP / 2), to_cell]


def attention_between(
    encoder: Tower, decoder: Tower, attention: Box, own: RecurrentSpec
) -> tuple[list[Box], list[Arrow]]:
    """The attention from the decoder's last state to the encoder's states, and its context c for cell and readout."""
    output, cell = encoder.find("encoder.output"), decoder.find("recurrent.cell")
    context, left = decoder.find("recurrent.context"), bounds(encoder.boxes, encoder.arrows)[2]
    attention = attention.moved(left + TOWER_GAP - attention.x, context.center[1] - attention.center[1])
    fork = circle("recurrent.core.fork", "fork", FORK)
    fork = fork.moved(attention.right + COLUMN_GAP - fork.center[0], attention.center[1] - fork.center[1])
    y = cell.bottom - PADDING
    points = ((cell.x, y), (attention.center[0], y), (attention.center[0], attention.y))
    arrows = [
        from_trunk(output, attention, left + TOWER_GAP / 2),
        Arrow(cell.name, attention.name, points, "recurrent", "s′"),
        replace(sideways(attention, fork), has_tip=False),
        replace(sideways(fork, context), label="c"),
    ]
    if own.readout.caption and "c" in own.readout.reads:
        readout = decoder.find("recurrent.readout")
        path = ((fork.center[0], fork.y), (fork.center[0], readout.center[1]), edge(readout, -1))
        arrows.append(Arrow(fork.name, readout.name, path))
    return [attention, fork], arrows
