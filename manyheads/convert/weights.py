"""Weight tables: each row says which parameters a stored tensor holds, and reads and writes it.

A row names a parameter, or a module with its weight and bias; `*` stands for the index of a layer. What a checkpoint
must hold follows from the rows and the model: biases and optional modules that the model does not have are left out.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from manyheads.model.spec import ModelSpec

Tensors = dict[str, Tensor]
Parameters = Mapping[str, Tensor]  # of a model, by name
Spelling = tuple[tuple[str, str], ...]  # patterns for the start or the end of a name, and their replacements
QKV = ("query", "key", "value")


@dataclass(frozen=True)
class Row:
    """One tensor of a checkpoint, and the names of our parameters for it."""

    theirs: str
    ours: tuple[str, ...] = ()

    def renamed(self, rename: Callable[[str], str]) -> Self:
        return replace(self, theirs=rename(self.theirs))


class Unused(Row):
    """A tensor that no forward reads: kept, and exported as it came."""


class Tied(Row):
    """A second name for a parameter, which a checkpoint may hold or leave out."""


@dataclass(frozen=True, kw_only=True)
class Weight(Row, ABC):
    """A tensor that a checkpoint must hold; `optional` if only some models of the family have it."""

    optional: bool = False

    @abstractmethod
    def read(self, stored: Tensor, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        """Our parameters, given the stored tensor and our parameters as they are now."""

    @abstractmethod
    def write(self, ours: Sequence[Tensor]) -> Tensor:
        """The stored tensor, given our parameters."""


@dataclass(frozen=True, kw_only=True)
class Same(Weight):
    """One parameter; `transposed` if matrices are stored in×out, `shape` if it is stored with other axes."""

    transposed: bool = False
    shape: tuple[int, ...] | None = None

    def read(self, stored: Tensor, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        tensor = stored.reshape(ours[0].shape) if self.shape else stored
        return (tensor.mT if self.transposed and tensor.dim() > 1 else tensor,)

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        tensor = ours[0].reshape(self.shape) if self.shape else ours[0]
        return tensor.mT.contiguous() if self.transposed and tensor.dim() > 1 else tensor


@dataclass(frozen=True, kw_only=True)
class Interleaved(Weight):
    """Queries or keys in which the two coordinates that rotate together are neighbours; ours are half a head apart."""

    heads: int = 1

    def read(self, stored: Tensor, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return (stored.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2),)

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0].unflatten(0, (self.heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True, kw_only=True)
class Shifted(Weight):
    """A parameter that is stored with a constant added."""

    by: float = 0.0

    def read(self, stored: Tensor, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return (stored.float() - self.by,)

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0].float() + self.by  # in half precision, a small parameter would be rounded away


@dataclass(frozen=True, kw_only=True)
class Fused(Weight):
    """Several parameters in one tensor: one after the other or, with `heads`, side by side within each head."""

    transposed: bool = False
    heads: int | None = None

    def read(self, stored: Tensor, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        tensor = stored.mT if self.transposed and stored.dim() > 1 else stored
        if self.heads is None:
            return tensor.split([len(parameter) for parameter in ours])
        return [part.flatten(0, 1) for part in tensor.unflatten(0, (self.heads, len(ours), -1)).unbind(1)]

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        if self.heads is None:
            tensor = torch.cat(list(ours))
        else:
            tensor = torch.stack([part.unflatten(0, (self.heads, -1)) for part in ours], dim=1).flatten(0, 2)
        return tensor.mT.contiguous() if self.transposed and tensor.dim() > 1 else tensor


Rows = tuple[Row, ...]
Table = Rows | Callable[[ModelSpec], Rows]  # a function where rows depend on more than the model's parameters


def same(
    names: Mapping[str, str], ours: str = "", theirs: str = "", *, transposed: bool = False, optional: bool = False
) -> Rows:
    """A row for each pair of names, ours and theirs, each after its prefix."""
    return tuple(
        Same(theirs + stored, (ours + name,), transposed=transposed, optional=optional)
        for name, stored in names.items()
    )


def fused(theirs: str, ours: str, parts: Iterable[str], **options: Any) -> Fused:
    return Fused(theirs, tuple(ours + part for part in parts), **options)


def token_scores(theirs: str, embedding: str) -> Rows:
    """The rows of a head over the vocabulary, which is tied to the token embedding or has a matrix of its own."""
    output = same({"head.output": theirs, "head.bias": f"{theirs}.bias"}, optional=True)
    return *output, Tied(f"{theirs}.weight", (f"{embedding}.weight",))


def expand(rows: Iterable[Row], parameters: Container[str], layers: Mapping[str, int]) -> Iterator[Row]:
    """The rows of every layer, weight and bias of a model; `layers` is their number in each stack."""
    stored = set[str]()
    for row in rows:
        stacks = [row.ours[0].partition(".")[0]] if row.ours else layers
        for i in range(max((layers.get(stack, 0) for stack in stacks), default=0)) if "*" in row.theirs else (0,):
            for one in concrete(row, i, parameters):
                if one.theirs not in stored:  # a second name of a tied matrix may be the name of one that is not tied
                    stored.add(one.theirs)
                    yield one


def concrete(row: Row, layer: int, parameters: Container[str]) -> list[Row]:
    """The row of one layer, for each parameter of its module that the model has."""
    theirs, ours = row.theirs.replace("*", str(layer)), [name.replace("*", str(layer)) for name in row.ours]
    rows = [
        replace(row, theirs=theirs + ending, ours=tuple(name + ending for name in ours))
        for ending in (("", ".weight", ".bias") if isinstance(row, Weight) else ("",))
        if all(name + ending in parameters for name in ours)
    ]
    if isinstance(row, Weight) and not row.optional and not rows:
        return [replace(row, theirs=theirs, ours=tuple(ours))]  # of no parameter: `covers` is false
    return rows


@dataclass(frozen=True)
class WeightTable:
    """The rows of one model."""

    rows: Rows

    def respelled(self, spelling: Spelling) -> WeightTable:
        """The table of checkpoints that spell the stored names in another way."""

        def respell(name: str) -> str:
            return next((re.sub(usual, other, name) for usual, other in spelling if re.search(usual, name)), name)

        rows = tuple(row.renamed(respell) for row in self.rows)
        assert len({row.theirs for row in rows}) == len(rows), f"{spelling} gives two tensors the same name"
        return WeightTable(rows)

    @cached_property
    def weights(self) -> list[Weight]:
        return [row for row in self.rows if isinstance(row, Weight)]

    @cached_property
    def unused(self) -> frozenset[str]:
        return frozenset(row.theirs for row in self.rows if isinstance(row, Unused))

    @cached_property
    def tied(self) -> dict[str, str]:
        """Second names, each with the first name of the same tensor."""
        first = {row.ours: row.theirs for row in self.weights}
        return {row.theirs: first[row.ours] for row in self.rows if isinstance(row, Tied)}

    @property
    def renamed(self) -> dict[str, str]:
        """Our names and theirs of the parameters that are stored as they are."""
        rows = [row for row in self.weights if type(row) is Same and not row.transposed and row.shape is None]
        return {row.ours[0]: row.theirs for row in rows}

    def covers(self, parameters: Parameters) -> bool:
        """Whether each parameter of a model is in exactly one row."""
        return sorted(name for row in self.weights for name in row.ours) == sorted(parameters)

    def shapes(self, parameters: Parameters) -> dict[str, tuple[int, ...]]:
        """The tensors that a checkpoint must hold; parameters may be on the meta device."""
        return {name: tuple(tensor.shape) for name, tensor in self.write(parameters).items()}

    def read(self, stored: Callable[[str], Tensor], parameters: Parameters) -> Iterator[tuple[str, Tensor]]:
        """Our parameters by name, from one stored tensor after the other; those given have the shapes."""
        for row in self.weights:
            ours = [parameters[name] for name in row.ours]
            yield from zip(row.ours, row.read(stored(row.theirs), ours), strict=True)

    def write(self, parameters: Parameters) -> Tensors:
        """Our parameters as they are stored."""
        return {row.theirs: row.write([parameters[name] for name in row.ours]) for row in self.weights}
