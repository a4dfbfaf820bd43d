"""Rows that many tables of weights share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from manyheads.convert.weights import Joined, Repeated, Row, Same, both
from manyheads.model.spec import ModelSpec

Table = Callable[[ModelSpec, str], Iterator[Row]]  # of a model's weights, behind a prefix


def nothing(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    """No weights at all."""
    yield from ()


def scores(theirs: str, embedding: str) -> Table:
    """A head that is tied to the token table, or has a matrix of its own, and a bias where the description has one."""

    def rows(spec: ModelSpec, prefix: str) -> Iterator[Row]:
        if spec.head.kind == "tied":
            yield Repeated(f"{theirs}.weight", same_as=f"{prefix}{embedding}.weight")
            return
        yield Same("head.output.weight", f"{theirs}.weight")
        if getattr(spec.head, "bias", False):
            yield Same("head.bias", f"{theirs}.bias")

    return rows


def class_scores(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    """A head for classes, without a bias."""
    yield Same("head.output.weight", "score.weight")


def joined(
    ours: str, theirs: str, *, kinds: Sequence[str] = ("weight", "bias"), transposed: bool = False, heads: int | None = None
) -> Iterator[Row]:
    """Queries, keys and values in one tensor."""
    for kind in kinds:
        parts = tuple(f"{ours}.{part}.{kind}" for part in ("query", "key", "value"))
        yield Joined(parts, f"{theirs}.{kind}", transposed=transposed and kind == "weight", heads=heads)


def renamed(ours: str, theirs: str, names: Mapping[str, str]) -> Iterator[Row]:
    """Weights and biases of several parts, by our name and theirs."""
    for mine, named in names.items():
        yield from both(f"{ours}.{mine}", f"{theirs}.{named}")
