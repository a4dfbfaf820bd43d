"""Weight tables, whose rows convert stored tensors to parameters of a model, and back.

A row names a parameter, or a module with its weight and bias; `*` is the index of a layer. Rows of biases and optional
modules that a model does not have are left out.
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
Parameters = Mapping[str, Tensor]  # parameters of a model by name
Spelling = tuple[tuple[str, str], ...]  # pairs of a regular expression for names and its replacement
QKV = ("query", "key", "value")


@dataclass(frozen=True)
class WeightRow:
    """A stored tensor (`theirs`) and the names of the parameters that it holds (`ours`)."""

    theirs: str
    ours: tuple[str, ...] = ()

    def renamed(self, rename: Callable[[str], str]) -> Self:
        return replace(self, theirs=rename(self.theirs))


class Ignored(WeightRow):
    """A tensor that no computation reads. An export writes it unchanged."""


class TiedTensor(WeightRow):
    """A second name of a parameter, which a checkpoint may omit."""


@dataclass(frozen=True, kw_only=True)
class Weight(WeightRow, ABC):
    """A tensor that a checkpoint must hold, unless it is `optional` and the model does not have it."""

    optional: bool = False

    @abstractmethod
    def read(self, stored: Tensor, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        """Converts the stored tensor to our parameters. The shapes of `ours` are those of the result."""

    @abstractmethod
    def write(self, ours: Sequence[Tensor]) -> Tensor:
        """Converts our parameters to the stored tensor."""


@dataclass(frozen=True, kw_only=True)
class Rename(Weight):
    """One parameter under another name, stored `transposed` (in×out) or with another `shape` if these are given."""

    transposed: bool = False
    shape: tuple[int, ...] | None = None

    def read(self, stored: Tensor, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        tensor = stored.reshape(ours[0].shape) if self.shape else stored
        return (tensor.mT if self.transposed and tensor.dim() > 1 else tensor,)

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        tensor = ours[0].reshape(self.shape) if self.shape else ours[0]
        return tensor.mT.contiguous() if self.transposed and tensor.dim() > 1 else tensor


@dataclass(frozen=True, kw_only=True)
class PermuteForRope(Weight):
    """A query or key projection whose rotated pairs are stored as neighbours; ours are half a head apart."""

    heads: int = 1

    def read(self, stored: Tensor, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return (stored.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2),)

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0].unflatten(0, (self.heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True, kw_only=True)
class AddConstant(Weight):
    """A parameter that is stored with the constant `by` added."""

    by: float = 0.0

    def read(self, stored: Tensor, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return (stored.float() - self.by,)

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0].float() + self.by  # half precision would round a small parameter to 0


@dataclass(frozen=True, kw_only=True)
class Concatenated(Weight):
    """Several parameters in one tensor, concatenated as a whole or, with `heads`, within each head."""

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


Rows = tuple[WeightRow, ...]
Table = Rows | Callable[[ModelSpec], Rows]  # a function if the rows depend on the spec


def renames(
    names: Mapping[str, str], ours: str = "", theirs: str = "", *, transposed: bool = False, optional: bool = False
) -> Rows:
    """A Rename row for each pair of our and their name, which follow the prefixes `ours` and `theirs`."""
    return tuple(
        Rename(theirs + stored, (ours + name,), transposed=transposed, optional=optional)
        for name, stored in names.items()
    )


def concatenated(theirs: str, ours: str, parts: Iterable[str], **options: Any) -> Concatenated:
    return Concatenated(theirs, tuple(ours + part for part in parts), **options)


def token_scores(theirs: str, embedding: str) -> Rows:
    """The rows of a token head, which is tied to the token embedding or has its own matrix."""
    output = renames({"head.output": theirs, "head.bias": f"{theirs}.bias"}, optional=True)
    return *output, TiedTensor(f"{theirs}.weight", (f"{embedding}.weight",))


def expand(rows: Iterable[WeightRow], parameters: Container[str], layers: Mapping[str, int]) -> Iterator[WeightRow]:
    """Expands rows to every layer, weight and bias of a model. `layers` is the number of layers of each stack."""
    stored = set[str]()
    for row in rows:
        stacks = [row.ours[0].partition(".")[0]] if row.ours else layers
        for i in range(max((layers.get(stack, 0) for stack in stacks), default=0)) if "*" in row.theirs else (0,):
            for stored_row in concrete(row, i, parameters):
                if (
                    stored_row.theirs not in stored
                ):  # the name of an untied matrix is also the second name of a tied one
                    stored.add(stored_row.theirs)
                    yield stored_row


def concrete(row: WeightRow, layer: int, parameters: Container[str]) -> list[WeightRow]:
    """The rows of one layer, one for each parameter of the module that the model has."""
    theirs, ours = row.theirs.replace("*", str(layer)), [name.replace("*", str(layer)) for name in row.ours]
    rows = [
        replace(row, theirs=theirs + ending, ours=tuple(name + ending for name in ours))
        for ending in (("", ".weight", ".bias") if isinstance(row, Weight) else ("",))
        if all(name + ending in parameters for name in ours)
    ]
    if isinstance(row, Weight) and not row.optional and not rows:
        return [replace(row, theirs=theirs, ours=tuple(ours))]  # names no parameter, so that `covers` is false
    return rows


@dataclass(frozen=True)
class WeightTable:
    """The rows of one model, which convert all its weights."""

    rows: Rows

    def respelled(self, spelling: Spelling) -> WeightTable:
        """The table for checkpoints that have other names for the same tensors."""

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
        return frozenset(row.theirs for row in self.rows if isinstance(row, Ignored))

    @cached_property
    def tied(self) -> dict[str, str]:
        """Maps second names of tied tensors to their first names."""
        first = {row.ours: row.theirs for row in self.weights}
        return {row.theirs: first[row.ours] for row in self.rows if isinstance(row, TiedTensor)}

    @property
    def renamed(self) -> dict[str, str]:
        """Maps our names to theirs, for parameters that are stored unchanged."""
        rows = [row for row in self.weights if type(row) is Rename and not row.transposed and row.shape is None]
        return {row.ours[0]: row.theirs for row in rows}

    def covers(self, parameters: Parameters) -> bool:
        """Whether each parameter of a model occurs in exactly one row."""
        return sorted(name for row in self.weights for name in row.ours) == sorted(parameters)

    def shapes(self, parameters: Parameters) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the tensors that a checkpoint must hold. Parameters may be on the meta device."""
        return {name: tuple(tensor.shape) for name, tensor in self.write(parameters).items()}

    def read(self, stored: Callable[[str], Tensor], parameters: Parameters) -> Iterator[tuple[str, Tensor]]:
        """Yields our parameters by name, reading one stored tensor at a time. `parameters` gives the shapes."""
        for row in self.weights:
            ours = [parameters[name] for name in row.ours]
            yield from zip(row.ours, row.read(stored(row.theirs), ours), strict=True)

    def write(self, parameters: Parameters) -> Tensors:
        """Converts our parameters to the tensors of a checkpoint."""
        return {row.theirs: row.write([parameters[name] for name in row.ours]) for row in self.weights}
