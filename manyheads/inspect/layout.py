"""The layout of a drawing as plain data: boxes within boxes, arrows between their edges, and the width of texts."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace

TITLE_HEIGHT, LINE_HEIGHT = 17.0, 15.0
FONT_SIZES = {"title": 13.0, "line": 11.0, "shape": 11.0}
PADDING = 7.0  # between the border of a box and its text

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A rectangle with texts. x and y are its upper left corner; y grows downwards."""

    name: str  # unique; a box of a part has the path of its field, such as 'decoder.layers.0.attention'
    title: str = ""
    lines: tuple[str, ...] = ()
    slot: str = ""  # the slot of its part, or what it is instead, such as 'sum' or 'frame'
    shape: str = ""  # of its output
    detail: str = ""  # the part with all its fields, and its formula
    reads_memory: bool = False  # whether it attends to the encoder's output
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    children: tuple[Box, ...] = ()

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def center(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2

    def texts(self) -> list[tuple[str, str]]:
        """The texts of the box line by line, each with its style: title, line or shape."""
        room = self.width - 2 * PADDING
        styled = [("title", self.title), *(("line", line) for line in self.lines), ("shape", self.shape)]
        return [(style, row) for style, text in styled for row in wrap(text, style, room)]

    def text_height(self) -> float:
        return sum(TITLE_HEIGHT if style == "title" else LINE_HEIGHT for style, _ in self.texts())

    def fitted(self) -> Box:
        """The box as high as its texts and children, which are below one another, need."""
        below = sum(child.height + PADDING for child in self.children)
        box = replace(self, height=self.text_height() + 2 * PADDING + below)
        top, children = box.y + PADDING + self.text_height(), []
        for child in self.children:
            children.append(child.moved(box.x + (box.width - child.width) / 2 - child.x, top + PADDING / 2 - child.y))
            top += child.height + PADDING
        return replace(box, children=tuple(children))

    def narrowed(self) -> Box:
        """The box as wide as its texts need."""
        return replace(self, width=max(text_width(row, style) for style, row in self.texts()) + 2 * PADDING + 1)

    def moved(self, dx: float, dy: float) -> Box:
        children = tuple(child.moved(dx, dy) for child in self.children)
        return replace(self, x=self.x + dx, y=self.y + dy, children=children)

    def walk(self) -> Iterator[Box]:
        """Yields the box and all boxes in it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Arrow:
    """A line from the edge of one box to the edge of another, along horizontal and vertical segments."""

    source: str
    target: str
    points: tuple[Point, ...]
    style: str = "data"  # data, residual, memory (from the encoder) or recurrent
    label: str = ""
    has_tip: bool = True

    def moved(self, dx: float, dy: float) -> Arrow:
        return replace(self, points=tuple((x + dx, y + dy) for x, y in self.points))


@dataclass(frozen=True)
class Drawing:
    """Boxes, from the input to the output, and arrows in a rectangle that begins at 0, 0."""

    title: str
    width: float
    height: float
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]

    def all_boxes(self) -> Iterator[Box]:
        for box in self.boxes:
            yield from box.walk()


# -------------------------------------------------------------------------------------------------------------- texts

NARROW, WIDE = frozenset(" .,:;|!'`·ijlIft()[]/-"), frozenset("mwMW@%→←")


def text_width(text: str, style: str) -> float:
    """An upper estimate of the width of a text, as the fonts of the reader are unknown: that of a wide sans-serif."""
    bold = 1.1 if style == "title" else 1.0
    return bold * FONT_SIZES[style] * sum(map(character_width, text))


def character_width(character: str) -> float:
    if character in NARROW:
        return 0.41
    if character in WIDE or unicodedata.east_asian_width(character) in "WF":
        return 1.02
    if character.isupper() or unicodedata.category(character) == "Sm":  # such as × and +
        return 0.79
    return 0.65


def wrap(text: str, style: str, width: float) -> list[str]:
    """Breaks a text into lines of at most this width, at spaces if possible."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if text_width(longer, style) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for character in word:
            if lines[-1] and text_width(lines[-1] + character, style) > width:
                lines.append("")
            lines[-1] += character
    return [line for line in lines if line]
