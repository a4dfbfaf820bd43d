"""The boxes of parts, which describe themselves: embeddings, attention, feed-forward networks, norms and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from manyheads.inspect.describe import format_field, to_row
from manyheads.inspect.layout import PADDING, Box
from manyheads.inspect.tower import BOX_WIDTH, CIRCLE, LABEL_WIDTH, SIDE_WIDTH, Tower, circle
from manyheads.model.spec import ModelSpec
from manyheads.parts.attention import AttentionSpec
from manyheads.parts.core import CoreSpec
from manyheads.parts.embed import EmbedSpec
from manyheads.parts.feedforward import FeedForwardSpec
from manyheads.parts.mask import MaskSpec
from manyheads.parts.norm import NormSpec
from manyheads.parts.position import PositionSpec
from manyheads.spec import Part, Spec

JOINS = {"add": "+", "concat": "‖", "multiply": "×"}
ACTS = {"rotate": "rotates q and k", "bias": "added to the scores"}
INPUTS = {"tokens": "token ids", "patches": "image patches"}
OUTPUTS = {
    "tokens": "Output Probabilities",
    "classes": "Class Logits",
    "vector": "One Vector per Sequence",
    "pixels": "Pixels of each Patch",
    "states": "Hidden States",
}


def part_box(name: str, part: Part, lines: Sequence[str] = (), *, title: str = "", shape: str = "") -> Box:
    texts = tuple(line for line in lines if line)
    box = Box(name, title or part.caption, texts, part.slot, shape, detail_of(part), width=BOX_WIDTH)
    return box.fitted()


def detail_of(part: Part) -> str:
    slot, text, formula = to_row(part.slot, part)
    return f"{slot}: {text}\n{formula}"


def text_box(name: str, title: str, lines: Sequence[str] = (), *, slot: str = "value", shape: str = "") -> Box:
    box = Box(name, title, tuple(line for line in lines if line), slot, shape, width=BOX_WIDTH)
    return (box.narrowed() if slot == "value" else box).fitted()


def number(value: int | None, symbol: str) -> str:
    """A number with separators, or its symbol if it is not known yet."""
    return symbol if value is None else f"{value:,}"


def vocab_of(spec: ModelSpec) -> int | None:
    return spec.vocab if isinstance(spec.vocab, int) else None


def longer(length: str, extra: int) -> str:
    """A length with extra vectors, such as '(L + 1)'."""
    return f"({length} {'+' if extra > 0 else '−'} {abs(extra)})" if extra else length


def extra_vectors(embed: EmbedSpec) -> int:
    """How many vectors an embedding adds to those of tokens or patches, such as a class token."""
    return int(getattr(embed, "class_token", False))


def shape_of(*sizes: int | str) -> str:
    return " × ".join(size if isinstance(size, str) else f"{size:,}" for size in sizes)


def shown_fields(spec: Spec, *hidden: str) -> str:
    """The fields without those that are hidden, without dropout, and without choices and factors at their default."""
    texts = []
    for name, field in type(spec).model_fields.items():
        value = getattr(spec, name)
        is_default = value == field.get_default() and isinstance(value, str | float)
        if is_default or value in (None, False, ()) or name in (*hidden, "dropout"):
            continue
        if isinstance(value, Part):
            inside = shown_fields(value)
            texts += [f"{name}={value.kind}{f'({inside})' if inside else ''}"] if value.caption else []
        else:
            texts.append(name if value is True else f"{name}={format_field(value)}")
    return ", ".join(texts)


def attention_box(
    name: str, attention: AttentionSpec, core: CoreSpec, width: int, *, mask: MaskSpec | None = None,
    position: PositionSpec | None = None, lines: Sequence[str] = (),
) -> Box:  # fmt: skip
    """Projections, core and mask as texts, and a position scheme that acts within attention as a box in the box."""
    heads, groups = attention.heads, attention.num_kv_heads()
    changes = shown_fields(core)
    texts = [
        *lines,
        f"{heads:,} heads × {attention.head_dim(width):,}" + (f", {groups:,} for k and v" if groups != heads else ""),
        f"{attention.qk_norm.caption} of q and k" if attention.qk_norm.caption else "",
        f"{core.caption}{f' ({changes})' if changes else ''}",
        f"mask: {shown_fields(mask)}" if mask is not None and shown_fields(mask) else "",
    ]
    masked = "Masked " if mask is not None and mask.causal else ""
    box = part_box(name, attention, texts, title=f"{masked}{attention.caption}")
    box = replace(box, detail=f"{box.detail}\n{detail_of(core)}")
    if position is None or position.mechanism == "embed" or not position.caption:
        return box
    inside = part_box(f"{name}.position", position, [ACTS.get(position.mechanism, ""), shown_fields(position)])
    return replace(box, children=(replace(inside, width=BOX_WIDTH - 4 * PADDING).fitted(),)).fitted()


def feedforward_box(name: str, part: FeedForwardSpec, width: int) -> Box:
    hidden, activation = part.hidden_size(width), getattr(part, "activation", "")
    sizes = f"{width:,} → {hidden:,} → {width:,}" if hidden else shown_fields(part)
    return part_box(name, part, [sizes + (f", {activation}" if hidden and activation else "")])


def norm_box(name: str, norm: NormSpec, *, after_sum: bool = False) -> Box:
    return part_box(name, norm, [norm.caption], title="Add & Norm") if after_sum else part_box(name, norm)


def label_box(name: str, title: str, lines: Sequence[str] = ()) -> Box:
    return Box(name, title, tuple(line for line in lines if line), "label", width=LABEL_WIDTH).fitted()


# ------------------------------------------------------------------------------------------------ embeddings and heads


def add_embedding(
    tower: Tower, name: str, embed: EmbedSpec, position: PositionSpec, width: int, *, vocab: int | None, length: str,
    inputs: str = "Inputs", memory_width: int | None = None,
) -> None:  # fmt: skip
    """The input, the embedding, the position if it is joined to it, and the norm and the projection that follow."""
    size, pixels = embed.table_width(width), embed.patch_pixels()
    token_width = position.token_width(size)
    if embed.reads != "memory":
        shape = shape_of("B", length) if pixels is None else shape_of("B", length, pixels)
        tower.add(text_box(f"{name}.inputs", inputs, [INPUTS[embed.reads]], shape=shape))
    length = longer(length, extra_vectors(embed))
    rows = {"tokens": number(vocab, "V"), "patches": number(pixels, "P"), "memory": number(memory_width, "D")}
    lines = [f"{rows[embed.reads]} × {token_width:,}", shown_fields(embed, "norm", "size", "pixels")]
    tower.add(part_box(f"{name}.embed", embed, lines, shape=shape_of("B", length, token_width)))
    if position.mechanism == "embed":
        join = str(getattr(position, "join", "add"))
        side = part_box(f"{name}.position", position, [shown_fields(position, "join")])
        joined = circle(f"{name}.join", "sum", CIRCLE, JOINS.get(join, join))
        tower.add_beside(joined, replace(side, width=SIDE_WIDTH).fitted())
    norm: NormSpec | None = getattr(embed, "norm", None)
    if norm is not None and norm.caption:
        tower.add(part_box(f"{name}.embed.norm", norm))
    if size != width:
        lines = [f"{size:,} → {width:,}"]
        tower.add(text_box(f"{name}.embed.project", "Linear", lines, slot="head", shape=shape_of("B", length, width)))


def add_head(tower: Tower, spec: ModelSpec, width: int, extra: int = 0) -> None:
    """The head and the output. Softmax is drawn where it follows the logits, though the model itself returns logits."""
    head, has_logits = spec.head, spec.head.output == "tokens"
    size = number(head.output_size(width, vocab_of(spec)), "V" if has_logits else "C")
    if head.caption:
        lines = [f"{width:,} → {size}", shown_fields(head, "classes", "pixels", "skip")]
        tower.add(part_box("head", head, lines))
    if has_logits:
        tower.add(text_box("softmax", "Softmax", ["of the returned logits"], slot="softmax"))
    length = longer("L", extra - getattr(head, "skip", 0))
    shape = shape_of("B", length, size) if head.per_token else shape_of("B", size)
    tower.add(text_box("outputs", OUTPUTS.get(head.output, str(head.output)), shape=shape))
