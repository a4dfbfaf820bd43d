"""Renders an attention matrix as an HTML page without scripts or network access."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import torch
from torch import Tensor

from manyheads.errors import InputShapeError
from manyheads.parts.core import check_rows

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --full: 26, 82, 160 }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; --full: 120, 176, 255 } }
body { font: 16px/1.4 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem }
table { border-collapse: separate; border-spacing: 3px }
th { font-weight: 500; padding: .2rem .6rem; white-space: pre }
tbody th { text-align: right }
td { min-width: 3.2rem; height: 3.2rem; text-align: center; border-radius: 4px; font-variant-numeric: tabular-nums;
     background: rgba(var(--full), var(--weight)); outline: 1px solid rgba(128, 128, 128, .25) }
td.dark { color: var(--paper) }
td.highest { outline: 2px solid var(--ink) }
td.hidden { background: repeating-linear-gradient(45deg, transparent 0 5px, rgba(128, 128, 128, .35) 5px 6px) }
caption, p { text-align: left; max-width: 40rem; opacity: .8 }
"""


def attention_page(
    weights_LM: Tensor,
    queries: Sequence[object],
    keys: Sequence[object],
    *,
    mask_LM: Tensor | None = None,
    title: str = "attention",
) -> str:
    """A table with a row per query and a column per key. The highest weight of a row is outlined, masked cells hatched.

    `mask_LM` is True where a query may attend to a key, as in torch.
    """
    shape = (len(queries), len(keys))
    for name, tensor in (("weights", weights_LM), ("mask", mask_LM)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise InputShapeError(f"{name} is a {type(tensor).__name__}, expected a tensor")
        if tensor is not None and tensor.shape != shape:
            raise InputShapeError(f"{name} has shape {tuple(tensor.shape)}, expected queries × keys: {shape}")
    if not weights_LM.numel():
        raise InputShapeError("the weights are empty; give at least one query and one key")
    if mask_LM is not None and mask_LM.dtype is not torch.bool:
        raise InputShapeError(f"mask is {mask_LM.dtype}, expected torch.bool, True where a query may attend to a key")
    check_rows(weights_LM, tolerance=0.02)
    row_names, column_names = [str(query) for query in queries], [str(key) for key in keys]
    legend = "" if mask_LM is None else " Hatched: masked."
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in column_names)
    mask = [[True] * len(keys)] * len(queries) if mask_LM is None else mask_LM.tolist()
    rows = "\n".join(
        row(name, column_names, weights, visible)
        for name, weights, visible in zip(row_names, weights_LM.tolist(), mask, strict=True)
    )
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(str(title))}</title>
<style>{STYLE}</style>
<h1>{escape(str(title))}</h1>
<table>
<thead><tr><th></th>{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
<p>Each row is a query and sums to one; each column is a key. Outlined: the highest weight of the row.{legend}</p>
</html>
"""


def row(query: str, keys: Sequence[str], weights: Sequence[float], mask: Sequence[bool]) -> str:
    highest = max(range(len(weights)), key=lambda column: (mask[column], weights[column]))  # the first of equals
    cells = (cell(query, key, weights[column], mask[column], column == highest) for column, key in enumerate(keys))
    return f'<tr><th scope="row">{escape(query)}</th>{"".join(cells)}</tr>'


def cell(query: str, key: str, weight: float, visible: bool, highest: bool) -> str:
    if not visible:
        return f'<td class="hidden" title="{escape(f"{query} → {key}: masked")}"></td>'
    classes = " ".join(name for name, on in (("highest", highest), ("dark", weight > 0.55)) if on)
    title = escape(f"{query} → {key}: {weight:.4f}")
    return f'<td class="{classes}" style="--weight: {weight:.3f}" title="{title}">{weight:.2f}</td>'
