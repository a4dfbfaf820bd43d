"""The frame of a figure as SVG: its title, its legend and its style, light and dark, without scripts or fonts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manyheads.inspect.layout import text_width, wrap
from manyheads.inspect.svg import number, text

WIDTH = 640.0
LINE = 16.0  # height of a line of text
# the color of each series, light and dark; each also has a marker of its own
COLORS = (
    ("#1f6fc4", "#6fb1ff"), ("#c4500c", "#ff9d5c"), ("#1b7f4d", "#5ed39a"), ("#8a3fa8", "#cf9bf0"),
    ("#96700f", "#e3bd5a"), ("#0f7f8c", "#5ecfdc"), ("#b8285f", "#ff86b0"), ("#5c5c5c", "#bdbdbd"),
)  # fmt: skip
SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "M-3.6-3.6H3.6V3.6H-3.6Z",
    "M0-4.6L4.4 3.4H-4.4Z",
    "M0-5L5 0L0 5L-5 0Z",
)


def style() -> str:
    """The style of all figures, for a file of its own or once for a page."""

    def series(dark: int) -> str:
        return "".join(
            f".mh-figure .mh-line-{i} {{ stroke: {pair[dark]} }}\n.mh-figure .mh-fill-{i} {{ fill: {pair[dark]} }}\n"
            for i, pair in enumerate(COLORS)
        )

    return f"""
.mh-figure {{ font-family: "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif;
  max-width: 100%; height: auto }}
.mh-figure .mh-paper {{ fill: #ffffff }}
.mh-figure text {{ fill: #1a1a1a; font-size: 11px }}
.mh-figure .mh-text-title {{ font-size: 13px; font-weight: 600 }}
.mh-figure .mh-soft {{ fill: #555555 }}
.mh-figure .mh-axis {{ stroke: #767676; stroke-width: 1; fill: none }}
.mh-figure .mh-grid {{ stroke: #e2e2e2; stroke-width: 1; fill: none }}
.mh-figure .mh-level {{ stroke: #444444; stroke-width: 1.3; fill: none }}
.mh-figure .mh-curve {{ fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round }}
.mh-figure .mh-mark {{ stroke: #ffffff; stroke-width: .8 }}
.mh-figure .mh-error {{ stroke: #1a1a1a; stroke-width: 1.4; fill: none }}
.mh-figure .mh-positive {{ fill: #3876d6 }}
.mh-figure .mh-negative {{ fill: #d06a1c }}
.mh-figure .mh-cell {{ stroke: #888888; stroke-opacity: .35; stroke-width: 1 }}
.mh-figure .mh-hatch {{ stroke: #8a8a8a; stroke-width: 1 }}
.mh-figure .mh-outline {{ fill: none; stroke: #999999; stroke-width: 1 }}
.mh-figure text.mh-on-ink {{ fill: #ffffff }}
.mh-figure image {{ image-rendering: pixelated }}
{series(0)}@media (prefers-color-scheme: dark) {{
.mh-figure .mh-paper {{ fill: #16181b }}
.mh-figure text {{ fill: #eeeeee }}
.mh-figure .mh-soft {{ fill: #b0b0b0 }}
.mh-figure .mh-axis {{ stroke: #8a8a8a }}
.mh-figure .mh-grid {{ stroke: #303439 }}
.mh-figure .mh-level, .mh-figure .mh-error {{ stroke: #dddddd }}
.mh-figure .mh-mark {{ stroke: #16181b }}
.mh-figure text.mh-on-ink {{ fill: #ffffff }}
{series(1)}}}
"""


def frame(title: str, description: str, content: str, size: tuple[float, float], *, has_style: bool) -> str:
    """An SVG element around the content of a figure, which is below its title."""
    width, height = map(number, size)
    styled = f"<style>{style()}</style>\n" if has_style else ""
    return f"""<svg xmlns="http://www.w3.org/2000/svg" class="mh-figure" role="img" width="{width}" height="{height}" \
viewBox="0 0 {width} {height}">
<title>{text(title)}</title>
<desc>{text(description)}</desc>
{styled}<rect class="mh-paper" width="{width}" height="{height}"/>
{content}
</svg>
"""


def label(x: float, y: float, value: str, *, classes: str = "", anchor: str = "start", turn: float = 0) -> str:
    """A text; `turn` is in degrees around its own point."""
    attributes = f' class="{classes}"' if classes else ""
    attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
    attributes += f' transform="rotate({number(turn)} {number(x)} {number(y)})"' if turn else ""
    return f'<text x="{number(x)}" y="{number(y)}"{attributes}>{text(value)}</text>'


def title_lines(title: str) -> tuple[str, float]:
    """The title in as many lines as it needs, and the height that it takes."""
    rows = wrap(title, "title", WIDTH - 16)
    lines = [label(8, 18 + 17 * i, row, classes="mh-text-title") for i, row in enumerate(rows)]
    return "".join(lines), 17.0 * len(rows) + 8


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a curve or a level with its name."""

    name: str
    series: int
    is_level: bool = False

    def svg(self, x: float, y: float) -> str:
        line = f"M{number(x)} {number(y - 4)}h24"
        if self.is_level:
            mark = f'<path class="mh-level" d="{line}" stroke-dasharray="{dashes(self.series)}"/>'
        else:
            mark = f'<path class="mh-curve mh-line-{self.series % len(COLORS)}" d="{line}"/>'
            mark += marker(self.series, x + 12, y - 4)
        return mark + label(x + 30, y, self.name)


def dashes(series: int) -> str:
    return ("6 4", "2 3", "10 4", "8 3 2 3")[series % 4]


def marker(series: int, x: float, y: float, tooltip: str = "") -> str:
    title = f"<title>{text(tooltip)}</title>" if tooltip else ""
    place = f'transform="translate({number(x)} {number(y)})"'
    shape = SHAPES[series % len(SHAPES)]
    return f'<path class="mh-mark mh-fill-{series % len(COLORS)}" {place} d="{shape}">{title}</path>'


def legend(keys: Sequence[Key], top: float) -> tuple[str, float]:
    """The entries in rows, and the height that they take."""
    if not keys:
        return "", 0.0
    parts, rows = [], 1
    for key, x, row in flow(keys):
        parts.append(key.svg(x, top + LINE * row + 12))
        rows = row + 1
    return "".join(parts), LINE * rows + 6


def flow(keys: Sequence[Key]) -> Iterator[tuple[Key, float, int]]:
    """Where each entry stands: from left to right, in a new row where there is no room."""
    x, row = 8.0, 0
    for key in keys:
        width = 46 + text_width(key.name, "line")
        if x > 8 and x + width > WIDTH - 8:
            x, row = 8.0, row + 1
        yield key, x, row
        x += width
