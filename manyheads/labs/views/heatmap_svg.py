"""Matrices as SVG: numbered cells if they are few, pictures of one pixel per value if they are many."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from manyheads.inspect.layout import text_width
from manyheads.inspect.notebook import INK, LEVELS, png
from manyheads.inspect.svg import number, text
from manyheads.labs.figures import Heatmap
from manyheads.labs.views.axes import extent, format_number, format_value
from manyheads.labs.views.svg_frame import WIDTH, frame, label, title_lines

NEGATIVE = (208, 106, 28)
MAX_CELLS = 600  # that are drawn one by one, with a tooltip each
MAX_NUMBERS = 14  # columns of a matrix whose numbers are shown
MAX_SIDE = 400.0  # of a matrix without numbers
Values = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Grid:
    """Where the cells of a matrix are."""

    left: float
    top: float
    width: float  # of one cell
    height: float
    rows: int
    columns: int

    @property
    def right(self) -> float:
        return self.left + self.width * self.columns

    @property
    def bottom(self) -> float:
        return self.top + self.height * self.rows


def heatmap_svg(figure: Heatmap, *, has_style: bool) -> str:
    rows, columns = len(figure.values), max(map(len, figure.values))
    low, high = extent(figure.values)
    has_numbers = columns <= MAX_NUMBERS and rows <= 2 * MAX_NUMBERS
    title, top = title_lines(figure.title)
    grid = place(figure, top, cell_size(figure, has_numbers, low, high))
    is_small = rows * columns <= MAX_CELLS
    cells = small_cells(figure, grid, has_numbers, low, high) if is_small else picture(figure, grid, low, high)
    hatch = f"mh-hatch-{zlib.crc32(repr((figure.title, figure.values)).encode()):08x}"
    masked = masked_cells(figure.values, grid, hatch)
    scale = scale_bar(grid.left, grid.bottom + 30, low, high, hatch if masked else "")
    content = "\n".join(
        filter(None, (title, pattern(hatch) if masked else "", cells, masked, names(figure, grid), scale))
    )
    size = (min(WIDTH, max(grid.right + 16, 420.0)), grid.bottom + 62)
    return frame(figure.title, describe(figure, low, high), content, size, has_style=has_style)


def describe(figure: Heatmap, low: float, high: float) -> str:
    rows, columns = len(figure.values), max(map(len, figure.values))
    axes = " by ".join(filter(None, (figure.row_axis, figure.column_axis)))
    return f"A matrix of {rows} rows and {columns} columns{', ' + axes if axes else ''}, with values from \
{format_number(low)} to {format_number(high)}"


def cell_size(figure: Heatmap, has_numbers: bool, low: float, high: float) -> tuple[float, float]:
    rows, columns = len(figure.values), max(map(len, figure.values))
    if has_numbers:
        texts = [format_value(value, low, high) for row in figure.values for value in row if value is not None]
        needed = max((text_width(label, "line") for label in texts), default=20.0) + 10
        return min(max(46.0, needed), 520 / columns), 30.0
    side = min(26.0, MAX_SIDE / columns, MAX_SIDE / rows) if max(rows, columns) < 4 * min(rows, columns) else 0
    return (side, side) if side else (min(26.0, 520 / columns), min(26.0, MAX_SIDE / rows))


def place(figure: Heatmap, top: float, cell: tuple[float, float]) -> Grid:
    """Room for the labels of rows on the left and of columns above."""
    rows, columns = len(figure.values), max(map(len, figure.values))
    left = max((text_width(name, "line") for name in figure.rows), default=0.0) + 18
    left = max(left, text_width(figure.row_axis, "line") + 16 if figure.row_axis and not figure.rows else 0)
    widest = max((text_width(name, "line") for name in figure.columns), default=0.0)
    above = (18.0 if widest <= cell[0] - 4 else 0.72 * widest + 16) if figure.columns else 4.0
    return Grid(
        left, top + above + (18 if figure.column_axis or (figure.row_axis and figure.rows) else 4), *cell, rows, columns
    )


def names(figure: Heatmap, grid: Grid) -> str:
    """The labels of rows and columns, every n-th if there are many, and the names of the axes."""
    parts = []
    step = math.ceil(13 / grid.height)
    for i in range(0, min(len(figure.rows), grid.rows), step):
        parts.append(label(grid.left - 8, grid.top + grid.height * (i + 0.5) + 4, figure.rows[i], anchor="end"))
    is_flat = max((text_width(name, "line") for name in figure.columns), default=0.0) <= grid.width - 4
    step = 1 if is_flat else math.ceil(13 / grid.width)
    for j in range(0, min(len(figure.columns), grid.columns), step):
        x = grid.left + grid.width * (j + 0.5)
        turned = {"anchor": "middle"} if is_flat else {"turn": -45.0}
        parts.append(label(x, grid.top - 6, figure.columns[j], **turned))
    axis_y = grid.top - 8 if not figure.columns else title_end(figure) + 10
    if figure.column_axis:
        parts.append(label(grid.right, axis_y, f"{figure.column_axis} →", classes="mh-soft", anchor="end"))
    if figure.row_axis:
        y = grid.top + 10 if not figure.rows else axis_y
        parts.append(label(8, y, f"{figure.row_axis} ↓", classes="mh-soft"))
    return "\n".join(parts)


def title_end(figure: Heatmap) -> float:
    return title_lines(figure.title)[1]


# --------------------------------------------------------------------------------------------------------------- cells


def strength(value: float, low: float, high: float) -> float:
    """How dark a cell is, from 0 to 1, by the distance from 0."""
    largest = max(abs(low), abs(high))
    return min(1.0, abs(value) / largest) if largest and math.isfinite(value) else 0.0


def small_cells(figure: Heatmap, grid: Grid, has_numbers: bool, low: float, high: float) -> str:
    parts = []
    for i, row in enumerate(figure.values):
        for j, value in enumerate(row):
            if value is None:
                continue
            x, y, share = grid.left + grid.width * j, grid.top + grid.height * i, strength(value, low, high)
            size = f'x="{number(x)}" y="{number(y)}" width="{number(grid.width)}" height="{number(grid.height)}"'
            sign = "mh-negative" if value < 0 else "mh-positive"
            title = f"<title>{text(cell_name(figure, i, j) + format_number(value))}</title>"
            parts.append(f'<rect class="mh-cell {sign}" fill-opacity="{share:.3g}" {size}>{title}</rect>')
            if has_numbers:
                classes = "mh-on-ink" if share > 0.6 else ""
                middle = (x + grid.width / 2, y + grid.height / 2 + 4)
                parts.append(label(*middle, format_value(value, low, high), classes=classes, anchor="middle"))
    return "\n".join(parts)


def cell_name(figure: Heatmap, i: int, j: int) -> str:
    row = figure.rows[i] if i < len(figure.rows) else str(i)
    column = figure.columns[j] if j < len(figure.columns) else str(j)
    return f"{row}, {column}: "


def picture(figure: Heatmap, grid: Grid, low: float, high: float) -> str:
    """A pixel per value: one picture for the positive values and one for the negative ones."""
    size = f'width="{number(grid.right - grid.left)}" height="{number(grid.bottom - grid.top)}"'
    box = f'x="{number(grid.left)}" y="{number(grid.top)}" {size} preserveAspectRatio="none"'
    parts = []
    for sign, ink in ((1, INK), (-1, NEGATIVE)):
        shades = [
            [
                round((LEVELS - 1) * strength(value, low, high)) if value is not None and sign * value > 0 else 0
                for value in row
            ]
            for row in figure.values
        ]
        if any(map(any, shades)):
            parts.append(f'<image {box} href="{png(torch.tensor(shades, dtype=torch.uint8), ink)}"/>')
    outline = f'<rect class="mh-outline" x="{number(grid.left)}" y="{number(grid.top)}" {size}/>'
    return "\n".join([*parts, outline])


def masked_cells(values: Values, grid: Grid, hatch: str) -> str:
    """One path around all masked cells, by runs of each row."""
    steps = []
    for i, row in enumerate(values):
        for is_masked, run in groupby(range(len(row)), key=lambda j: row[j] is None):
            columns = list(run)
            if is_masked:
                corner = f"M{number(grid.left + grid.width * columns[0])} {number(grid.top + grid.height * i)}"
                width = grid.width * len(columns)
                steps.append(f"{corner}h{number(width)}v{number(grid.height)}h{number(-width)}z")
    if not steps:
        return ""
    outline = ' class="mh-cell"' if len(values) <= MAX_NUMBERS else ""
    return f'<path{outline} fill="url(#{hatch})" d="{"".join(steps)}"><title>masked</title></path>'


def pattern(name: str) -> str:
    return (
        f'<defs><pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<path class="mh-hatch" d="M0 0V6"/></pattern></defs>'
    )


def scale_bar(x: float, y: float, low: float, high: float, hatch: str) -> str:
    """The shades from the lowest to the highest value."""
    count, width = 20, 6.0
    start = label(x, y + 9, format_number(low))
    x += text_width(format_number(low), "line") + 6
    cells = []
    for i in range(count):
        value = low + (high - low) * (i + 0.5) / count
        sign = "mh-negative" if value < 0 else "mh-positive"
        box = f'x="{number(x + width * i)}" y="{number(y)}" width="{number(width)}" height="11"'
        cells.append(f'<rect class="{sign}" fill-opacity="{strength(value, low, high):.3g}" {box}/>')
    cells.append(
        f'<rect class="mh-outline" x="{number(x)}" y="{number(y)}" width="{number(width * count)}" height="11"/>'
    )
    end = x + width * count + 6
    parts = [start, *cells, label(end, y + 9, format_number(high))]
    if hatch:
        at = end + text_width(format_number(high), "line") + 18
        parts.append(f'<rect class="mh-outline" x="{number(at)}" y="{number(y)}" width="22" height="11"/>')
        parts.append(f'<rect fill="url(#{hatch})" x="{number(at)}" y="{number(y)}" width="22" height="11"/>')
        parts.append(label(at + 28, y + 9, "masked"))
    return "\n".join(parts)
