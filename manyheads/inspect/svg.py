"""Renders the layout of a drawing as one SVG, without scripts, fonts or anything else from elsewhere."""

from __future__ import annotations

import math
import re
from html import escape

from manyheads.inspect.layout import LINE_HEIGHT, PADDING, TITLE_HEIGHT, Arrow, Box, Drawing, Point

ROUND, TIP = 6.0, 7.0  # the radius of corners, and the length of the tip of an arrow
NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# the fill of each slot, light and dark
FILLS = {
    "embed": ("#fbe0e0", "#5b3237"),
    "position": ("#ece4f7", "#43375c"),
    "attention": ("#fde3c4", "#5e4424"),
    "core": ("#fde3c4", "#5e4424"),
    "feedforward": ("#cfe8f5", "#234a5e"),
    "norm": ("#f4f5c6", "#50512a"),
    "head": ("#dcdff2", "#363d63"),
    "softmax": ("#d0ecd3", "#2b5233"),
    "cell": ("#cfe8f5", "#234a5e"),
    "readout": ("#f4f5c6", "#50512a"),
    "frame": ("#f4f4f4", "#202327"),
    "sum": ("#ffffff", "#16181b"),
}
BARE = ("value", "label", "heading")  # slots of boxes that have no border


def style() -> str:
    light = "".join(f".mh-drawing .mh-{slot} > rect {{ fill: {fill} }}\n" for slot, (fill, _) in FILLS.items())
    dark = "".join(f".mh-drawing .mh-{slot} > rect {{ fill: {fill} }}\n" for slot, (_, fill) in FILLS.items())
    return f"""
.mh-drawing {{ font-family: "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif }}
.mh-drawing .mh-paper {{ fill: #ffffff }}
.mh-drawing text {{ fill: #1a1a1a; text-anchor: middle; font-size: 11px }}
.mh-drawing .mh-text-title {{ font-size: 13px; font-weight: 600 }}
.mh-drawing .mh-text-line {{ fill: #3c3c3c }}
.mh-drawing .mh-text-shape {{ fill: #666666; font-style: italic }}
.mh-drawing rect {{ fill: #ffffff; stroke: #555555; stroke-width: 1 }}
.mh-drawing .mh-paper, .mh-drawing .mh-frame > rect {{ stroke: none }}
.mh-drawing .mh-frame > rect {{ stroke: #b5b5b5 }}
.mh-drawing .mh-softmax > rect {{ stroke-dasharray: 4 3 }}
.mh-drawing .mh-fork > circle {{ fill: #444444 }}
.mh-drawing .mh-line {{ fill: none; stroke: #444444; stroke-width: 1.3 }}
.mh-drawing .mh-tip {{ fill: #444444 }}
.mh-drawing .mh-line.mh-recurrent {{ stroke-dasharray: 5 3 }}
{light}@media (prefers-color-scheme: dark) {{
.mh-drawing .mh-paper {{ fill: #16181b }}
.mh-drawing text {{ fill: #eeeeee }}
.mh-drawing .mh-text-line {{ fill: #cfcfcf }}
.mh-drawing .mh-text-shape {{ fill: #a8a8a8 }}
.mh-drawing rect {{ fill: #16181b; stroke: #9a9a9a }}
.mh-drawing .mh-paper {{ stroke: none }}
.mh-drawing .mh-frame > rect {{ stroke: #555555 }}
.mh-drawing .mh-fork > circle, .mh-drawing .mh-tip {{ fill: #bbbbbb }}
.mh-drawing .mh-line {{ stroke: #bbbbbb }}
{dark}}}
"""


def to_svg(drawing: Drawing) -> str:
    """The drawing as an SVG element with its own style, for a file or within a page."""
    width, height = number(drawing.width), number(drawing.height)
    boxes = "\n".join(map(box_svg, drawing.boxes))
    arrows = "\n".join(map(arrow_svg, drawing.arrows))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" class="mh-drawing" role="img" \
width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<title>{text(drawing.title)}</title>
<desc>{text(description(drawing))}</desc>
<style>{style()}</style>
<rect class="mh-paper" width="{width}" height="{height}"/>
{boxes}
{arrows}
</svg>
"""


def text(value: str) -> str:
    """A text of anybody within XML."""
    return escape(NOT_IN_XML.sub("\ufffd", value))


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def description(drawing: Drawing) -> str:
    """What the drawing shows, from the input to the output."""
    return "From the input to the output: " + "; ".join(map(describe_box, drawing.boxes[1:-1]))


def describe_box(box: Box) -> str:
    inside = ", then ".join(filter(None, map(describe_box, box.children)))
    own = ", ".join(filter(None, (box.title, *box.lines, box.shape)))
    return f"{own} ({inside})" if own and inside else own or inside


def box_svg(box: Box) -> str:
    """A group with the shape, the texts and the inner boxes; its <title> is shown as a tooltip."""
    detail = f"<title>{text(box.detail)}</title>" if box.detail else ""
    inner = "".join(f"\n{box_svg(child)}" for child in box.children)
    return f'<g class="mh-box mh-{text(box.slot)}">{detail}{outline(box)}{texts_svg(box)}{inner}</g>'


def outline(box: Box) -> str:
    x, y = box.center
    if box.slot == "fork":
        return f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(box.width / 2)}"/>'
    if box.slot in BARE:
        return ""
    radius = box.width / 2 if box.slot == "sum" else 6
    size = f'x="{number(box.x)}" y="{number(box.y)}" width="{number(box.width)}" height="{number(box.height)}"'
    return f'<rect {size} rx="{number(radius)}"/>'


def texts_svg(box: Box) -> str:
    if box.slot == "sum":
        x, y = box.center
        return f'<text class="mh-text-title" x="{number(x)}" y="{number(y + 4.5)}">{text(box.title)}</text>'
    rows, y = [], box.y + (PADDING if box.children else (box.height - box.text_height()) / 2)
    for style_name, row in box.texts():
        y += TITLE_HEIGHT if style_name == "title" else LINE_HEIGHT
        rows.append(
            f'<text class="mh-text-{style_name}" x="{number(box.center[0])}" y="{number(y - 4)}">{text(row)}</text>'
        )
    return "".join(rows)


def arrow_svg(arrow: Arrow) -> str:
    line = f'<path class="mh-line mh-{text(arrow.style)}" d="{path(arrow.points, short=TIP / 2 * arrow.has_tip)}"/>'
    tip = f'<path class="mh-tip" d="{tip_path(arrow.points)}"/>' if arrow.has_tip else ""
    label = ""
    if arrow.label:
        (x, y), (next_x, next_y) = arrow.points[0], arrow.points[1]
        dx, dy = (8.0 + 3 * len(arrow.label), 4.0) if x == next_x else (0.0, -5.0)  # beside the line, or above it
        position = f'x="{number((x + next_x) / 2 + dx)}" y="{number((y + next_y) / 2 + dy)}"'
        label = f'<text class="mh-text-shape" {position}>{text(arrow.label)}</text>'
    return line + tip + label


def path(points: tuple[Point, ...], *, short: float) -> str:
    """A line through the points with round corners, which ends a bit before the last one."""
    *others, end = points
    end = towards(end, others[-1], short)
    steps = [f"M{number(points[0][0])} {number(points[0][1])}"]
    for before, corner, after in zip(points, points[1:], [*points[2:-1], end], strict=False):
        radius = min(ROUND, math.dist(before, corner) / 2, math.dist(corner, after) / 2)
        (x, y), (x2, y2) = towards(corner, before, radius), towards(corner, after, radius)
        steps.append(f"L{number(x)} {number(y)}Q{number(corner[0])} {number(corner[1])} {number(x2)} {number(y2)}")
    return "".join([*steps, f"L{number(end[0])} {number(end[1])}"])


def towards(start: Point, end: Point, distance: float) -> Point:
    """The point at a distance from the start on the way to the end."""
    share = distance / (math.dist(start, end) or 1.0)
    return start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share


def tip_path(points: tuple[Point, ...]) -> str:
    """A triangle at the last point."""
    end, (x, y) = points[-1], towards(points[-1], points[-2], TIP)
    dx, dy = (end[1] - y) * 0.5, (x - end[0]) * 0.5
    corners = [end, (x + dx, y + dy), (x - dx, y - dy)]
    return "M" + "L".join(f"{number(a)} {number(b)}" for a, b in corners) + "Z"
