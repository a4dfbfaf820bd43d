"""Figures as SVG: curves with axes, bars with error bars; matrices are in heatmap_svg."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import singledispatch

from manyheads.inspect.layout import text_width, wrap
from manyheads.inspect.svg import number, text
from manyheads.labs.figures import Bars, Drawing, Figure, Heatmap, Lines, Point
from manyheads.labs.views.axes import Axis, format_number, is_shown, make_axis
from manyheads.labs.views.heatmap_svg import heatmap_svg
from manyheads.labs.views.svg_frame import COLORS, LINE, WIDTH, Key, dashes, frame, label, legend, marker, title_lines

HEIGHT = 250.0  # of the plot of curves
RIGHT = 18.0  # margin
MAX_MARKERS = 16  # of one curve
MAX_NAME = 200.0  # width of the name of a bar


@singledispatch
def to_svg(figure: Figure, *, has_style: bool = True) -> str:
    """A figure as an SVG element: with its style for a file, or without for a page that has it once."""
    raise TypeError(f"a {type(figure).__name__} is no SVG")


@to_svg.register
def _(figure: Drawing, *, has_style: bool = True) -> str:
    return figure.svg


@to_svg.register
def _(figure: Heatmap, *, has_style: bool = True) -> str:
    return heatmap_svg(figure, has_style=has_style)


# --------------------------------------------------------------------------------------------------------------- lines


@to_svg.register
def _(figure: Lines, *, has_style: bool = True) -> str:
    points = [point for curve in figure.curves.values() for point in curve]
    y = make_axis([*(y for _, y in points), *figure.levels.values()], log=figure.log_y, zero=True)
    x = make_axis([x for x, _ in points], log=figure.log_x, max_ticks=9)
    title, top = title_lines(figure.title)
    key, height = legend(line_keys(figure), top)
    plot = Plot(x, y, left=max(text_width(label, "line") for label in y.labels) + 16, top=top + height + 26)
    hidden = not all(is_shown(a, x.log) and is_shown(b, y.log) for a, b in points)
    parts = [
        title, key, plot.axes(figure.x, figure.y),
        *(plot.level(value, i, name) for i, (name, value) in enumerate(figure.levels.items())),
        *(plot.curve(name, curve, i) for i, (name, curve) in enumerate(figure.curves.items())),
        label(8, plot.bottom + 54, "Values that have no place on a logarithmic axis, such as 0, are not shown.",
              classes="mh-soft") if hidden else "",
    ]  # fmt: skip
    size = (WIDTH, plot.bottom + (62 if hidden else 44))
    return frame(figure.title, describe_lines(figure), "\n".join(filter(None, parts)), size, has_style=has_style)


def line_keys(figure: Lines) -> list[Key]:
    names = list(figure.curves)
    keys = [Key(name, i) for i, name in enumerate(names)] if names != [""] else []
    levels = [Key(f"{name}: {format_number(value)}", i, True) for i, (name, value) in enumerate(figure.levels.items())]
    return keys + levels


def describe_lines(figure: Lines) -> str:
    """For those who cannot see it: where each curve begins and ends."""
    ends = [
        f"{name or figure.y}: {format_number(curve[0][1])} at {format_number(curve[0][0])}, "
        f"{format_number(curve[-1][1])} at {format_number(curve[-1][0])}"
        for name, curve in figure.curves.items()
        if curve
    ]
    levels = [f"{name}: {format_number(value)}" for name, value in figure.levels.items()]
    return f"{figure.y} by {figure.x}. " + "; ".join(ends + levels)


class Plot:
    """The area between two axes."""

    def __init__(self, x: Axis, y: Axis, *, left: float, top: float) -> None:
        self.x, self.y, self.left, self.top = x, y, left, top
        self.right, self.bottom = WIDTH - RIGHT, top + HEIGHT

    def at(self, x: float, y: float) -> Point:
        across, up = self.x.share(x), self.y.share(y)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def axes(self, x_name: str, y_name: str) -> str:
        left, right, bottom = map(number, (self.left, self.right, self.bottom))
        rows = [self.at(self.x.low, tick)[1] for tick in self.y.ticks]
        grid = "".join(f"M{left} {number(row)}H{right}" for row in rows)
        parts = [f'<path class="mh-grid" d="{grid}"/>', f'<path class="mh-axis" d="M{left} {bottom}H{right}"/>']
        parts += [
            label(self.left - 8, row + 4, name, anchor="end") for row, name in zip(rows, self.y.labels, strict=True)
        ]
        parts += x_labels(self.x, self.left, self.right, self.bottom)
        parts.append(label(8, self.top - 12, y_name, classes="mh-soft"))
        parts.append(label((self.left + self.right) / 2, self.bottom + 36, x_name, classes="mh-soft", anchor="middle"))
        return "\n".join(parts)

    def level(self, value: float, series: int, name: str) -> str:
        if not is_shown(value, self.y.log):
            return ""
        left, row, right = number(self.left), number(self.at(self.x.low, value)[1]), number(self.right)
        title = f"<title>{text(f'{name}: {format_number(value)}')}</title>"
        return f'<path class="mh-level" stroke-dasharray="{dashes(series)}" d="M{left} {row}H{right}">{title}</path>'

    def curve(self, name: str, curve: Sequence[Point], series: int) -> str:
        shown = [point for point in curve if is_shown(point[0], self.x.log) and is_shown(point[1], self.y.log)]
        if not shown:
            return ""
        positions = [self.at(*point) for point in shown]
        path = "M" + "L".join(f"{number(a)} {number(b)}" for a, b in positions)
        step = math.ceil(len(shown) / MAX_MARKERS)
        marks = [
            marker(series, *positions[i], f"{name + ': ' if name else ''}{format_number(b)} at {format_number(a)}")
            for i, (a, b) in enumerate(shown)
            if (i + series * (step // 3)) % step == 0
        ]
        return f'<path class="mh-curve mh-line-{series % len(COLORS)}" d="{path}"/>\n' + "".join(marks)


def x_labels(x: Axis, left: float, right: float, bottom: float) -> list[str]:
    """Ticks, and the labels that have room."""
    parts, end = [], -math.inf
    for tick, name in zip(x.ticks, x.labels, strict=True):
        column, half = left + x.share(tick) * (right - left), text_width(name, "line") / 2
        parts.append(f'<path class="mh-axis" d="M{number(column)} {number(bottom)}v5"/>')
        if column - half > end + 4:
            parts.append(label(column, bottom + 18, name, anchor="middle"))
            end = column + half
    return parts


# ---------------------------------------------------------------------------------------------------------------- bars


@to_svg.register
def _(figure: Bars, *, has_style: bool = True) -> str:
    spans = [bar_span(figure, name) for name in figure.values]
    ends = [0.0, *(end for span in spans for end in span), *figure.levels.values()]
    axis = make_axis(ends, log=False)
    title, top = title_lines(figure.title)
    levels = [Key(f"{name}: {format_number(value)}", i, True) for i, (name, value) in enumerate(figure.levels.items())]
    key, height = legend(levels, top)
    names = {name: wrap(name, "line", MAX_NAME) for name in figure.values}
    left = max(text_width(row, "line") for rows in names.values() for row in rows) + 18
    numbers = max(text_width(bar_label(figure, name), "line") for name in figure.values) + 14
    area = BarArea(axis, left, WIDTH - RIGHT - numbers)
    y, parts = top + height + 6, [title, key]
    for name, rows in names.items():
        row_height = max(26.0, LINE * len(rows) + 8)
        parts.append(area.row(figure, name, rows, y, row_height))
        y += row_height
    parts.insert(2, area.axis_svg(figure.y, top + height + 4, y))
    parts += [area.level(value, i, top + height + 4, y) for i, value in enumerate(figure.levels.values())]
    description = "; ".join(f"{name}: {bar_label(figure, name)}" for name in figure.values)
    return frame(figure.title, f"{figure.y}. {description}", "\n".join(parts), (WIDTH, y + 46), has_style=has_style)


def bar_span(figure: Bars, name: str) -> tuple[float, float]:
    """The ends of a bar with its error bar."""
    value, deviation = figure.values[name], figure.deviations.get(name, 0.0)
    return value - deviation, value + deviation


def bar_label(figure: Bars, name: str) -> str:
    deviation = figure.deviations.get(name)
    return format_number(figure.values[name]) + ("" if deviation is None else f" ± {format_number(deviation)}")


class BarArea:
    """The area of horizontal bars, whose names are to the left and whose numbers are to the right."""

    def __init__(self, axis: Axis, left: float, right: float) -> None:
        self.axis, self.left, self.right = axis, left, right

    def at(self, value: float) -> float:
        return self.left + self.axis.share(value) * (self.right - self.left)

    def axis_svg(self, name: str, top: float, bottom: float) -> str:
        grid = "".join(f"M{number(self.at(tick))} {number(top)}V{number(bottom)}" for tick in self.axis.ticks)
        zero = f"M{number(self.at(0))} {number(top)}V{number(bottom)}"
        center = (self.left + self.right) / 2
        return "\n".join(
            [
                f'<path class="mh-grid" d="{grid}"/>',
                f'<path class="mh-axis" d="{zero}"/>',
                *x_labels(self.axis, self.left, self.right, bottom),
                label(center, bottom + 36, name, classes="mh-soft", anchor="middle"),
            ]
        )

    def row(self, figure: Bars, name: str, rows: Sequence[str], y: float, height: float) -> str:
        middle, value = y + height / 2, figure.values[name]
        first = middle + 4 - LINE * (len(rows) - 1) / 2
        parts = [label(self.left - 10, first + LINE * i, row, anchor="end") for i, row in enumerate(rows)]
        if math.isfinite(value):
            start, end = sorted((self.at(0), self.at(value)))
            title = f"<title>{text(f'{name}: {bar_label(figure, name)}')}</title>"
            size = f'width="{number(max(1.0, end - start))}" height="{number(min(18.0, height - 8))}"'
            place = f'x="{number(start)}" y="{number(middle - min(18.0, height - 8) / 2)}"'
            parts.append(f'<rect class="mh-fill-0" {place} {size}>{title}</rect>')
        if deviation := figure.deviations.get(name):
            low, high = number(self.at(value - deviation)), number(self.at(value + deviation))
            caps = "".join(f"M{end} {number(middle - 4)}v8" for end in (low, high))
            parts.append(f'<path class="mh-error" d="M{low} {number(middle)}H{high}{caps}"/>')
        parts.append(label(WIDTH - 8, middle + 4, bar_label(figure, name), anchor="end"))
        return "".join(parts)

    def level(self, value: float, series: int, top: float, bottom: float) -> str:
        line = f"M{number(self.at(value))} {number(top)}V{number(bottom)}"
        return f'<path class="mh-level" stroke-dasharray="{dashes(series)}" d="{line}"/>'
