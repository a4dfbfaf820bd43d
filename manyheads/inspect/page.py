"""An attention matrix as one page of HTML that needs nothing else: no script, no network, no server."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import torch
from torch import Tensor

from manyheads.parts.attend import check_rows

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
    weights_LM: Tensor, queries: Sequence[object], keys: Sequence[object], *, seen_LM: Tensor | None = None, title: str = "attention"
) -> str:
    """A row a query, a column a key, a cell a weight: the highest of each row is framed, what the mask hides is hatched."""
    for name, given in (("weights", weights_LM), ("seen", seen_LM)):
        if given is not None and not isinstance(given, Tensor):
            raise ValueError(f"{name} is {type(given).__name__}, expected a tensor")
        if given is not None and given.shape != (len(queries), len(keys)):
            raise ValueError(f"{name} has shape {tuple(given.shape)}, expected {(len(queries), len(keys))}: a row a query, a column a key")
    if not weights_LM.numel():
        raise ValueError("there is nothing to show: give at least one query and one key")
    if seen_LM is not None and seen_LM.dtype is not torch.bool:
        raise ValueError(f"seen is {seen_LM.dtype}, expected torch.bool, True where a query may see a key")
    check_rows(weights_LM, tolerance=0.02)  # the page says that rows sum to one
    rows_of, columns = [str(query) for query in queries], [str(key) for key in keys]
    hidden = "" if seen_LM is None else " Hatched: hidden by the mask."
    head = "".join(f'<th scope="col">{escape(key)}</th>' for key in columns)
    seen = [[True] * len(keys)] * len(queries) if seen_LM is None else seen_LM.tolist()
    rows = "\n".join(row(query, columns, *of_row) for query, *of_row in zip(rows_of, weights_LM.tolist(), seen, strict=True))
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
<p>Each row is a query and sums to one; each column is a key. Framed: the highest weight of the row.{hidden}</p>
</html>
"""


def row(query: str, keys: Sequence[str], weights: Sequence[float], seen: Sequence[bool]) -> str:
    highest = max(range(len(weights)), key=lambda column: (seen[column], weights[column]))  # the lowest index of equals
    cells = (cell(query, key, weights[column], seen[column], column == highest) for column, key in enumerate(keys))
    return f'<tr><th scope="row">{escape(query)}</th>{"".join(cells)}</tr>'


def cell(query: str, key: str, weight: float, seen: bool, highest: bool) -> str:
    if not seen:
        return f'<td class="hidden" title="{escape(f"{query} may not see {key}")}"></td>'
    kinds = " ".join(name for name, on in (("highest", highest), ("dark", weight > 0.55)) if on)
    return f'<td class="{kinds}" style="--weight: {weight:.3f}" title="{escape(f"{query} → {key}: {weight:.4f}")}">{weight:.2f}</td>'
