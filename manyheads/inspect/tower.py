"""Stacks the boxes of a tower from its input at the bottom to its output at the top, with their arrows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from manyheads.inspect.layout import Arrow, Box, Point
from manyheads.inspect.residual_graph import Node, ranks

BOX_WIDTH, SIDE_WIDTH, LABEL_WIDTH = 248.0, 144.0, 108.0
GAP = 32.0  # between rows, with room for a fork and for horizontal lines
COLUMN_GAP = 18.0  # between boxes side by side
TOWER_GAP = 44.0  # between two towers, where the encoder's output passes
LANE = 14.0  # between a box and the residual path next to it
FRAME = 14.0  # between the border of a frame and what is in it
FORK, CIRCLE = 5.0, 20.0  # diameters of the point where an arrow branches, and of a sum


class Tower:
    """Boxes around x = 0, upwards from y = 0. `side` is −1 if residual paths and labels are on the left, 1 if right."""

    def __init__(self, side: int) -> None:
        self.side = side
        self.boxes: list[Box] = []
        self.arrows: list[Arrow] = []
        self.top = 0.0
        self.last: Box | None = None  # whose output the next box reads

    def add(self, box: Box, *, gap: float = GAP, row_height: float = 0.0, label: str = "") -> Box:
        """Puts a box on top, which reads the last one; if its row is higher, it is in the middle."""
        spare = max(0.0, row_height - box.height) / 2
        box = box.moved(-box.center[0], self.top - (gap if self.last else 0.0) - spare - box.bottom)
        if self.last is not None:
            self.arrows.append(replace(upwards(self.last, box), label=label))
        self.boxes.append(box)
        self.top, self.last = box.y - spare, box
        return box

    def add_beside(self, circle: Box, side_box: Box) -> None:
        """Puts a circle on top that joins the last box and a box at the side."""
        joined = self.add(circle, row_height=side_box.height)
        x = self.side * (BOX_WIDTH / 2 + COLUMN_GAP + side_box.width / 2)
        beside = side_box.moved(x - side_box.center[0], joined.center[1] - side_box.center[1])
        self.boxes.append(beside)
        self.arrows.append(sideways(beside, joined))

    def add_graph(self, nodes: Sequence[Node], boxes: dict[str, Box]) -> None:
        """Puts the nodes of a layer on top: parallel ones side by side, paths that skip some of them at the side."""
        rank, first = ranks(nodes), nodes[0].name
        skips = [(u, v.name) for v in nodes for u in v.inputs if rank[v.name] > rank[u] + 1]
        if sum(first in node.inputs for node in nodes) != 1 or self.last is None:
            self.add(boxes[first], gap=GAP / 2)
        assert self.last is not None
        outputs, placed, first_box = {first: self.last}, dict[str, Box](), len(self.boxes)
        for row in range(1, max(rank.values()) + 1):
            members = [node for node in nodes if rank[node.name] == row]
            bottom = self.top - GAP
            placed |= self._add_row({node.name: boxes[node.name] for node in members})
            for node in members:
                box = placed[node.name]
                self.arrows += [upwards(outputs[u], box, bottom) for u in node.inputs if rank[u] == row - 1]
                outputs[node.name] = box
                if any(u == node.name for u, _ in skips):
                    fork = circle(f"{box.name}.fork", "fork", FORK)
                    fork = fork.moved(box.center[0] - fork.center[0], box.y - GAP / 3 - fork.center[1])
                    self.boxes.append(fork)
                    self.arrows.append(replace(upwards(box, fork), has_tip=False))
                    outputs[node.name] = fork
        self._add_skips(skips, outputs, placed)
        order = [boxes[node.name].name for node in nodes]  # that in which they run; rows are by rank
        self.boxes[first_box:] = sorted(
            self.boxes[first_box:], key=lambda box: order.index(box.name.removesuffix(".fork"))
        )
        self.last = outputs[nodes[-1].name]

    def _add_row(self, row: dict[str, Box]) -> dict[str, Box]:
        """Puts boxes side by side on top; their arrows are the caller's."""
        x = -sum(box.width for box in row.values()) / 2 - COLUMN_GAP * (len(row) - 1) / 2
        height, placed = max(box.height for box in row.values()), dict[str, Box]()
        for name, box in row.items():
            placed[name] = box.moved(x - box.x, self.top - GAP - height / 2 - box.center[1])
            x += box.width + COLUMN_GAP
        self.boxes += placed.values()
        self.top -= GAP + height
        return placed

    def _add_skips(self, skips: list[tuple[str, str]], outputs: dict[str, Box], placed: dict[str, Box]) -> None:
        """Draws the paths around boxes: each in the nearest lane where no other path is at its height."""
        outside = max([max(abs(box.x), abs(box.right)) for box in placed.values()], default=0.0)
        lanes: list[list[tuple[float, float]]] = []
        for source, target in skips:
            start, end = outputs[source], placed[target]
            low, high = start.center[1], end.center[1]
            free = [i for i, lane in enumerate(lanes) if all(high >= other[0] or low <= other[1] for other in lane)]
            lane = free[0] if free else len(lanes)
            lanes[lane:lane] = [[]] if lane == len(lanes) else []
            lanes[lane].append((low, high))
            x = self.side * (outside + LANE * (lane + 1))
            points = (edge(start, self.side), (x, low), (x, high), edge(end, self.side))
            self.arrows.append(Arrow(start.name, end.name, points, "residual"))

    @contextmanager
    def frame(self, box: Box, label: Box | None) -> Iterator[None]:
        """Draws a frame around what is put on top in the block, with a label next to it."""
        first_box, first_arrow = len(self.boxes), len(self.arrows)
        self.top -= GAP * 0.75
        bottom = self.top
        yield
        children, arrows = self.boxes[first_box:], self.arrows[first_arrow:]
        xs = [x for child in children for x in (child.x, child.right)]
        xs += [x for arrow in arrows for x, _ in arrow.points]
        left, right = min(xs) - FRAME, max(xs) + FRAME
        self.top -= FRAME
        outer = replace(box, x=left, y=self.top, width=right - left, height=bottom - self.top, children=tuple(children))
        self.boxes[first_box:] = [outer]
        if label is not None:
            x = left - label.width if self.side < 0 else right
            self.boxes.append(label.moved(x - label.x, outer.center[1] - label.center[1]))

    def moved(self, dx: float) -> Tower:
        """The tower, complete, further to the right."""
        tower = Tower(self.side)
        tower.boxes = [box.moved(dx, 0.0) for box in self.boxes]
        tower.arrows = [arrow.moved(dx, 0.0) for arrow in self.arrows]
        return tower

    def find(self, name: str) -> Box:
        return next(box for top in self.boxes for box in top.walk() if box.name == name)


def circle(name: str, slot: str, size: float, title: str = "") -> Box:
    return Box(name, title, slot=slot, width=size, height=size)


def edge(box: Box, side: int) -> Point:
    """The middle of the left (−1) or right (1) edge."""
    return box.x if side < 0 else box.right, box.center[1]


def upwards(lower: Box, upper: Box, row_bottom: float = 0.0) -> Arrow:
    """From the top of a box to the bottom of another, horizontally below its row if they are not in one column."""
    start, end, middle = (lower.center[0], lower.y), (upper.center[0], upper.bottom), row_bottom + GAP * 0.6
    points = (start, end) if start[0] == end[0] else (start, (start[0], middle), (end[0], middle), end)
    return Arrow(lower.name, upper.name, points, has_tip=upper.slot != "fork")


def sideways(source: Box, target: Box) -> Arrow:
    """From the side of a box to the near side of another at the same height."""
    side = 1 if source.center[0] < target.center[0] else -1
    return Arrow(source.name, target.name, (edge(source, side), edge(target, -side)))


def bounds(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> tuple[float, float, float, float]:
    """Left, top, right and bottom."""
    points = [point for arrow in arrows for point in arrow.points]
    points += [point for box in boxes for point in ((box.x, box.y), (box.right, box.bottom))]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return min(xs), min(ys), max(xs), max(ys)


def beside(left: Tower, right: Tower, gap: float) -> tuple[Tower, Tower]:
    """The second tower to the right of the first."""
    dx = bounds(left.boxes, left.arrows)[2] + gap - bounds(right.boxes, right.arrows)[0]
    return left, right.moved(dx)


def from_trunk(source: Box, target: Box, x: float) -> Arrow:
    """From the right edge of a box, along a vertical line, to the left edge of another."""
    (right, y), (left, end) = edge(source, 1), edge(target, -1)
    return Arrow(source.name, target.name, ((right, y), (x, y), (x, end), (left, end)), "memory")
