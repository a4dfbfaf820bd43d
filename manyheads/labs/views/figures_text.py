"""Figures as text for a terminal: plots of characters, bars of blocks, shaded matrices and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import singledispatch
from itertools import pairwise

from manyheads.labs.figures import Bars, Cell, Drawing, Figure, Heatmap, Lines, Point, Table
from manyheads.labs.views.axes import Axis, extent, format_number, format_value, is_shown, make_axis

WIDTH, HEIGHT = 76, 14  # characters of a figure, and rows of a plot
MARKERS = "●○▲△■□◆◇★☆"
LEVELS = "╌┄╍┅"  # one for each level of a plot
SHADES = " ░▒▓█"
EIGHTHS = " ▏▎▍▌▋▊▉█"
MASKED = "╱"
MAX_NUMBERS, MAX_ROWS = 12, 40  # columns of a matrix whose numbers are shown, and rows of a larger one


def to_text(figure: Figure, width: int = WIDTH) -> str:
    """A figure with its title, at most as wide as `width` if it is no table."""
    return f"{figure.title}\n\n{body(figure, width)}"


@singledispatch
def body(figure: Figure, width: int) -> str:
    raise TypeError(f"no text for a {type(figure).__name__}")


@body.register
def _(figure: Drawing, width: int) -> str:
    return figure.text


# --------------------------------------------------------------------------------------------------------------- lines


@body.register
def _(figure: Lines, width: int) -> str:
    points = [point for curve in figure.curves.values() for point in curve]
    y = make_axis([*(y for _, y in points), *figure.levels.values()], log=figure.log_y, zero=True, max_ticks=5)
    margin = max(map(len, y.labels)) + 1
    columns = width - margin - 1
    x = make_axis([x for x, _ in points], log=figure.log_x, max_ticks=max(2, columns // 10))
    grid = [[" "] * columns for _ in range(HEIGHT)]
    for level, character in zip(figure.levels.values(), LEVELS * len(figure.levels), strict=False):
        if is_shown(level, y.log):
            grid[row_of(y, level)] = [character] * columns
    for (_, curve), marker in reversed(list(zip(figure.curves.items(), MARKERS * len(figure.curves), strict=False))):
        draw_curve(grid, curve, x, y, marker)
    labels = {row_of(y, tick): label for tick, label in zip(y.ticks, y.labels, strict=True)}
    lines = [
        f"{labels.get(i, ''):>{margin - 1}} {'┤' if i in labels else '│'}{''.join(row)}" for i, row in enumerate(grid)
    ]
    ticks, numbers = x_ticks(x, columns)
    return "\n".join(
        [figure.y, *(line.rstrip() for line in lines), f"{'':{margin}}└{ticks}", f"{'':{margin}} {numbers}",
         f"{figure.x:>{width}}", *legend(figure)]
    )  # fmt: skip


def row_of(y: Axis, value: float) -> int:
    return round((1 - y.share(value)) * (HEIGHT - 1))


def draw_curve(grid: list[list[str]], curve: Sequence[Point], x: Axis, y: Axis, marker: str) -> None:
    """Dots between the points, and a marker at each, unless there are too many to tell them apart."""
    columns = len(grid[0])
    shown = [
        (round(x.share(a) * (columns - 1)), row_of(y, b)) for a, b in curve if is_shown(a, x.log) and is_shown(b, y.log)
    ]
    for (start, first), (end, last) in pairwise(shown):
        for column in range(start + 1, end):
            row = round(first + (last - first) * (column - start) / (end - start))
            if grid[row][column] in f" {LEVELS}":
                grid[row][column] = "·"
    for column, row in shown:
        grid[row][column] = marker


def x_ticks(x: Axis, columns: int) -> tuple[str, str]:
    """The axis with its ticks, and the labels below those that have room for one."""
    line, numbers, end = ["─"] * columns, [" "] * columns, -2
    for tick, label in zip(x.ticks, x.labels, strict=True):
        column = round(x.share(tick) * (columns - 1))
        line[column] = "┬"
        first = min(max(0, column - len(label) // 2), columns - len(label))
        if first > end + 1:
            numbers[first : first + len(label)] = label
            end = first + len(label)
    return "".join(line), "".join(numbers).rstrip()


def legend(figure: Lines) -> list[str]:
    names = list(zip(figure.curves, MARKERS * len(figure.curves), strict=False))
    lines = [f"  {marker} {name}" for name, marker in names] if len(names) > 1 or names[0][0] else []
    levels = zip(figure.levels.items(), LEVELS * len(figure.levels), strict=False)
    lines += [f"  {character * 2} {name}: {format_number(value)}" for (name, value), character in levels]
    points = [point for curve in figure.curves.values() for point in curve]
    if not all(is_shown(a, figure.log_x) and is_shown(b, figure.log_y) for a, b in points):
        lines.append("  A value that has no place on the axis, such as 0 on a logarithmic one, is not shown.")
    return lines


# ---------------------------------------------------------------------------------------------------------------- bars


@body.register
def _(figure: Bars, width: int) -> str:
    names = max(map(len, figure.values))
    numbers = {name: bar_number(figure, name) for name in figure.values}
    columns = max(10, width - names - 3 - max(map(len, numbers.values())))
    ends = [0.0, *(value for value in [*figure.values.values(), *figure.levels.values()] if math.isfinite(value))]
    axis = Axis(min(ends), max(ends) if max(ends) > min(ends) else min(ends) + 1, (), ())
    lines = [
        f"{name:>{names}} │{bar(value, axis, columns, figure.levels)} {numbers[name]}"
        for name, value in figure.values.items()
    ]
    marks = [f"{'':{names}} ┊ {name}: {format_number(value)}" for name, value in figure.levels.items()]
    return "\n".join([figure.y, *lines, *marks])


def bar_number(figure: Bars, name: str) -> str:
    deviation = figure.deviations.get(name)
    return format_number(figure.values[name]) + ("" if deviation is None else f" ± {format_number(deviation)}")


def bar(value: float, axis: Axis, columns: int, levels: Mapping[str, float]) -> str:
    """From zero to the value, in eighths of a character, with the levels as dotted lines."""
    if not math.isfinite(value):
        return " " * columns
    start, end = sorted((axis.share(0) * columns, axis.share(value) * columns))
    cells = [EIGHTHS[round(8 * min(1.0, max(0.0, end - i)))] if i + 1 > start else " " for i in range(columns)]
    for level in levels.values():
        i = min(columns - 1, round(axis.share(level) * columns)) if math.isfinite(level) else 0
        cells[i] = "┊" if cells[i] in EIGHTHS[:2] else cells[i]
    return "".join(cells)


# ------------------------------------------------------------------------------------------------------------- heatmap


@body.register
def _(figure: Heatmap, width: int) -> str:
    columns = max(map(len, figure.values))
    has_numbers = columns <= MAX_NUMBERS and len(figure.values) <= 2 * MAX_NUMBERS
    text = numbered(figure) if has_numbers else shaded(figure, width)
    axes = [f"{side}: {name}" for side, name in (("rows", figure.row_axis), ("columns", figure.column_axis)) if name]
    return "\n".join([text, *(["  " + " · ".join(axes)] if axes else []), *scale_legend(figure)])


def numbered(figure: Heatmap) -> str:
    """Each value with its shade."""
    low, high = extent(figure.values)
    cells = [
        [MASKED * 3 if value is None else format_value(value, low, high) for value in row] for row in figure.values
    ]
    size = max(len(cell) for row in [*cells, figure.columns] for cell in row)
    names = max((len(name) for name in figure.rows), default=0)
    lines = [" " * (names + 1) + " ".join(f"{name:>{size + 1}}" for name in figure.columns)] if figure.columns else []
    for i, (row, values) in enumerate(zip(cells, figure.values, strict=True)):
        name = figure.rows[i] if i < len(figure.rows) else ""
        shades = [" " if value is None else shade(value, low, high) for value in values]
        lines.append(f"{name:>{names}} " + " ".join(f"{a}{b:>{size}}" for a, b in zip(shades, row, strict=True)))
    return "\n".join(lines)


def shaded(figure: Heatmap, width: int) -> str:
    """Two characters per value; of a matrix that is too wide, the mean of some."""
    names = max((len(name) for name in figure.rows), default=0)
    step = math.ceil(max(2 * max(map(len, figure.values)) / (width - names - 2), len(figure.values) / MAX_ROWS))
    values = pooled(figure.values, step)
    low, high = extent(figure.values)
    rows = figure.rows[::step] if figure.rows else [""] * len(values)
    lines = [
        f"{name:>{names}} │"
        + "".join(2 * (MASKED if value is None else shade(value, low, high)) for value in row)
        + "│"
        for name, row in zip(rows, values, strict=False)
    ]
    return "\n".join([*lines, *([f"  one cell is the mean of {step} × {step}"] if step > 1 else [])])


def pooled(values: Sequence[Sequence[float | None]], step: int) -> list[list[float | None]]:
    """The mean of squares of step × step values; None if all of them are."""

    def mean(i: int, j: int) -> float | None:
        square = [value for row in values[i : i + step] for value in row[j : j + step] if value is not None]
        return sum(square) / len(square) if square else None

    return [[mean(i, j) for j in range(0, len(values[i]), step)] for i in range(0, len(values), step)]


def shade(value: float, low: float, high: float) -> str:
    if not math.isfinite(value) or high <= low:
        return "?" if not math.isfinite(value) else SHADES[0]
    return SHADES[min(4, int(5 * (value - low) / (high - low)))]


def scale_legend(figure: Heatmap) -> list[str]:
    low, high = extent(figure.values)
    masked = any(value is None for row in figure.values for value in row)
    return [
        f"  {SHADES[0]} {format_number(low)} … {SHADES[-1]} {format_number(high)}"
        + (f"   {MASKED} masked" if masked else "")
    ]


# --------------------------------------------------------------------------------------------------------------- table


@body.register
def _(figure: Table, width: int) -> str:
    rows = [[format_cell(cell) for cell in row] for row in figure.rows]
    sizes = [max(len(cell) for cell in column) for column in zip(figure.columns, *rows, strict=True)]
    is_number = [all(not isinstance(row[i], str) for row in figure.rows) for i in range(len(sizes))]

    def line(cells: Sequence[str]) -> str:
        columns = zip(cells, sizes, is_number, strict=True)
        return "  ".join(f"{cell:>{size}}" if right else f"{cell:<{size}}" for cell, size, right in columns).rstrip()

    return "\n".join([line(figure.columns), "─" * (sum(sizes) + 2 * len(sizes) - 2), *map(line, rows)])


def format_cell(cell: Cell) -> str:
    return "–" if cell is None else cell if isinstance(cell, str) else format_number(cell)
