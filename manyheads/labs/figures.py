"""Figures as data, which a terminal shows as text, and a page as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Point = tuple[float, float]
Cell = float | str | None


@dataclass(frozen=True)
class Lines:
    """Curves over a shared axis, with horizontal lines such as chance."""

    title: str
    x: str  # the label of the axis
    y: str
    curves: Mapping[str, Sequence[Point]]
    levels: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Bars:
    """One bar per name, with an error bar (± standard deviation) if it has one."""

    title: str
    y: str  # the label of the axis
    values: Mapping[str, float]
    deviations: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Heatmap:
    """A matrix with a row per query and a column per key, for instance; a value of None is masked, and hatched."""

    title: str
    values: Sequence[Sequence[float | None]]
    rows: Sequence[str] = ()  # labels; none for a large matrix
    columns: Sequence[str] = ()
    row_axis: str = ""
    column_axis: str = ""

    def __post_init__(self) -> None:
        assert len(self.rows) in (0, len(self.values)), "a label per row, or none"
        assert all(len(row) == len(self.values[0]) for row in self.values), "rows of one length"
        assert len(self.columns) in (0, *map(len, self.values[:1])), "a label per column, or none"


def heatmap(
    title: str,
    values: Tensor,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    *,
    row_axis: str = "query",
    column_axis: str = "key",
    visible: Tensor | None = None,
) -> Heatmap:
    """A matrix as a heatmap; a cell that is not `visible` is masked."""
    cells = values.tolist()
    if visible is not None:
        pairs = zip(cells, visible.tolist(), strict=True)
        cells = [[value if is_visible else None for value, is_visible in zip(*pair, strict=True)] for pair in pairs]
    return Heatmap(title, cells, rows, columns, row_axis, column_axis)


@dataclass(frozen=True)
class Table:
    """Rows of cells below the names of their columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), "a cell per column"


@dataclass(frozen=True)
class Drawing:
    """A picture that is SVG already, such as that of a model, and its text for a terminal."""

    title: str
    svg: str
    text: str


Figure = Lines | Bars | Heatmap | Table | Drawing
