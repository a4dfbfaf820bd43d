"""What a notebook shows: heads as thumbnails, one matrix as a table, a model as a drawing; HTML without scripts."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import singledispatch
from html import escape
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import InputShapeError, WrongTypeError
from manyheads.inspect.drawing import draw_model
from manyheads.inspect.thumbnail import THUMBNAIL, pool_weights, to_shades
from manyheads.model.recording import RecordedAttention, Tape
from manyheads.model.spec import ModelSpec
from manyheads.parts.core import check_rows

MAX_THUMBNAILS = 256  # of one tape, which keeps it below 1 MB
MAX_CELLS = 4096  # of a table
LEVELS = 32  # shades of a thumbnail
INK = (56, 118, 214)  # is seen on white and on black

# No color of text or paper: a notebook, or a page, has its own.
STYLE = f"""
.mh-attention {{ font: 14px/1.4 system-ui, sans-serif; overflow: auto }}
.mh-attention table {{ border-collapse: separate; border-spacing: 3px; width: auto }}
.mh-attention th {{ font-weight: 500; padding: .2rem .6rem; white-space: pre; text-align: center }}
.mh-attention tbody th {{ text-align: right }}
.mh-attention td {{ padding: .2rem; text-align: center; font-variant-numeric: tabular-nums }}
.mh-attention .mh-cell {{ min-width: 3rem; height: 2.6rem; border-radius: 4px;
  background: rgba({INK[0]}, {INK[1]}, {INK[2]}, var(--weight)); outline: 1px solid rgba(128, 128, 128, .25) }}
.mh-attention .highest {{ outline: 2px solid gray; font-weight: 700 }}
.mh-attention .hidden {{
  background: repeating-linear-gradient(45deg, transparent 0 5px, rgba(128, 128, 128, .35) 5px 6px) }}
.mh-attention .mh-heads {{ display: flex; flex-wrap: wrap; gap: 4px }}
.mh-attention img {{ width: 64px; height: 64px; margin: 0; image-rendering: pixelated;
  outline: 1px solid rgba(128, 128, 128, .4) }}
.mh-attention small, .mh-attention p {{ opacity: .75 }}
"""


class Html(str):
    """HTML within a page, which a notebook shows as it is."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)

    def page(self, title: str) -> str:
        """A whole page for a file, light or dark."""
        return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
{self}</html>
"""


@singledispatch
def to_html(value: object) -> str:
    """What a notebook shows for a value."""
    raise WrongTypeError(f"a notebook has no view of a {type(value).__name__}")


@to_html.register
def _(value: ModelSpec) -> str:
    return f'<div style="overflow: auto">{draw_model(value)}</div>'


@to_html.register
def _(value: RecordedAttention) -> str:
    return head_grid({value.name: [value]})


@to_html.register
def _(value: Tape) -> str:
    return head_grid({name: value.calls(name) for name in value.names()})


# ---------------------------------------------------------------------------------------------------------- thumbnails


def head_grid(attentions: Mapping[str, Sequence[RecordedAttention]]) -> str:
    """A row per attention, with its name, its shape and a thumbnail of each head; the first attentions, if many."""
    rows, heads = list[str](), 0
    for name, calls in attentions.items():
        heads += calls[0].query.shape[1]
        if heads > MAX_THUMBNAILS and rows:
            break
        images = "".join(
            f'<img src="{png(pixels)}" alt="head {head}" title="{escape(name)}, head {head}">'
            for head, pixels in enumerate(thumbnails(calls)[:MAX_THUMBNAILS])
        )
        label = f"{escape(name)}<br><small>{shape_of(calls)}</small>"
        rows.append(f'<tr><th scope="row">{label}</th><td><div class="mh-heads">{images}</div></td></tr>\n')
    rest = len(attentions) - len(rows)
    note = f"{rest:,} more attentions are not shown. " if rest else ""
    note += "One row of pixels per query, as strong as √ of the weight. Of a long text, some queries are shown."
    note = note if attentions else "No attention was recorded."
    return with_style(f"<table><tbody>\n{''.join(rows)}</tbody></table>\n<p>{note}</p>")


def with_style(content: str) -> Html:
    return Html(f'<div class="mh-attention"><style>{STYLE}</style>\n{content}</div>\n')


def shape_of(calls: Sequence[RecordedAttention]) -> str:
    batch, heads = calls[0].query.shape[:2]
    queries, keys = sum(call.query.shape[2] for call in calls), max(call.key.shape[2] for call in calls)
    steps = f" in {len(calls):,} calls" if len(calls) > 1 else ""
    rest = f", the first of {batch:,}" if batch > 1 else ""
    return f"{heads:,} heads, {queries:,} queries × {keys:,} keys{steps}{rest}"


@torch.no_grad()
def thumbnails(calls: Sequence[RecordedAttention]) -> Tensor:
    """All heads of an attention, of the first sequence of the batch, as shades from 0 to 31, H×height×width.

    A row of pixels is one query, each pixel the square root of the largest weight of its keys. Only the weights of
    these queries are computed.
    """
    keys = max(call.key.shape[2] for call in calls)
    weights_HLM = torch.cat([F.pad(weights, (0, keys - weights.shape[-1])) for weights in sampled_rows(calls)], dim=1)
    width = ceil(keys / THUMBNAIL)
    return to_shades(pool_weights(weights_HLM, 1, width), LEVELS - 1)


def sampled_rows(calls: Sequence[RecordedAttention]) -> Iterator[Tensor]:
    """The weights of every n-th query of all calls, at most 48 queries, H×N×M each."""
    step = ceil(sum(call.query.shape[2] for call in calls) / THUMBNAIL)
    start = 0  # of the call among all queries
    for call in calls:
        count = call.query.shape[2]
        spans = [slice(None)] if step == 1 else [slice(i, i + 1) for i in range(-start % step, count, step)]
        for rows in spans:
            yield call.weights(rows=rows)[0].float().cpu()
        start += count


def png(shades: Tensor, ink: tuple[int, int, int] = INK) -> str:
    """A picture as an address of its data: one color with 32 levels of opacity, from a palette."""
    height, width = shades.shape
    pixels = b"".join(b"\0" + bytes(row) for row in shades.tolist())  # 0: no filter
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(ink) * LEVELS),
        (b"tRNS", bytes(round(255 * i / (LEVELS - 1)) for i in range(LEVELS))),
        (b"IDAT", zlib.compress(pixels, 9)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


# --------------------------------------------------------------------------------------------------------------- table


def attention_table(
    weights: Tensor | RecordedAttention,
    queries: Sequence[object],
    keys: Sequence[object],
    *,
    mask_LM: Tensor | None = None,
    head: int | None = None,
) -> Html:
    """A table with a row per query and a column per key. The highest weight of a row is outlined, masked cells hatched.

    `weights` are L×M, or a recorded attention: then of one `head`, or their mean, and with its mask. `mask_LM` is True
    where a query may attend to a key, as in torch. A notebook shows the result; `.page(title)` is a whole file.
    """
    if isinstance(weights, RecordedAttention):
        visible = weights.visible()
        mask_LM = None if visible is None else visible[0, 0]
        weights = weights.weights(head)[0] if head is not None else weights.weights()[0].mean(dim=0)
    check_table(weights, mask_LM, (len(queries), len(keys)))
    row_names, column_names = [str(query) for query in queries], [str(key) for key in keys]
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in column_names)
    mask = [[True] * len(keys)] * len(queries) if mask_LM is None else mask_LM.tolist()
    rows = "\n".join(
        table_row(name, column_names, values, visible)
        for name, values, visible in zip(row_names, weights.tolist(), mask, strict=True)
    )
    legend = "" if mask_LM is None else " Hatched: masked."
    return with_style(f"""<table>
<thead><tr><th></th>{columns}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
<p>Each row is a query and sums to one; each column is a key. Outlined: the highest weight of the row.{legend}</p>""")


def check_table(weights_LM: Tensor, mask_LM: Tensor | None, shape: tuple[int, int]) -> None:
    """Raises if the weights, or the mask, are no matrix of this shape that a table can show."""
    for name, tensor in (("weights", weights_LM), ("mask", mask_LM)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise InputShapeError(f"{name} is a {type(tensor).__name__}, expected a tensor")
        if tensor is not None and tensor.shape != shape:
            raise InputShapeError(f"{name} has shape {tuple(tensor.shape)}, expected queries × keys: {shape}")
    if not 0 < weights_LM.numel() <= MAX_CELLS:
        raise InputShapeError(
            f"the weights have {weights_LM.numel():,} cells, expected 1 to {MAX_CELLS:,}",
            hint="give some of the rows and columns, or use manyheads look",
        )
    if mask_LM is not None and mask_LM.dtype is not torch.bool:
        raise InputShapeError(f"mask is {mask_LM.dtype}, expected torch.bool, True where a query may attend to a key")
    check_rows(weights_LM, tolerance=0.02)


def table_row(query: str, keys: Sequence[str], weights: Sequence[float], mask: Sequence[bool]) -> str:
    highest = max(range(len(weights)), key=lambda column: (mask[column], weights[column]))  # the first of equals
    cells = (cell(query, key, weights[column], mask[column], column == highest) for column, key in enumerate(keys))
    return f'<tr><th scope="row">{escape(query)}</th>{"".join(cells)}</tr>'


def cell(query: str, key: str, weight: float, visible: bool, highest: bool) -> str:
    if not visible:
        return f'<td class="mh-cell hidden" title="{escape(f"{query} → {key}: masked")}"></td>'
    classes = "mh-cell highest" if highest else "mh-cell"
    title = escape(f"{query} → {key}: {weight:.4f}")
    return f'<td class="{classes}" style="--weight: {weight:.3f}" title="{title}">{weight:.2f}</td>'
