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
KeyMapping = tuple[tuple[str, str], ...]  # pairs of a regular expression for names and its replacement
QKV = ("query", "key", "value")


@dataclass(frozen=True)
class WeightRow:
    """The name of a stored tensor, and the names of the parameters that it holds."""

    tensor_name: str
    parameter_names: tuple[str, ...] = ()

    def rename(self, new_name: Callable[[str], str]) -> Self:
        return replace(self, tensor_name=new_name(self.tensor_name))


class Ignored(WeightRow):
    """A tensor that no computation reads. An export writes it unchanged."""


class TiedTensor(WeightRow):
    """A second name of a parameter, which a checkpoint may omit."""


@dataclass(frozen=True, kw_only=True)
class Weight(WeightRow, ABC):
    """A tensor that a checkpoint must hold, unless it is `optional` and the model does not have it."""

    optional: bool = False

    @abstractmethod
    def read(self, stored_tensor: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Converts the stored tensor to parameters. The given `parameters` have the shapes of the result."""

    @abstractmethod
    def write(self, parameters: Sequence[Tensor]) -> Tensor:
        """Converts parameters to the stored tensor."""


@dataclass(frozen=True, kw_only=True)
class Rename(Weight):
    """One parameter under another name, stored `transposed` (in×out) or with another `shape` if these are given."""

    transposed: bool = False
    shape: tuple[int, ...] | None = None

    def read(self, stored_tensor: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        tensor = stored_tensor.reshape(parameters[0].shape) if self.shape else stored_tensor
        return (tensor.mT if self.transposed and tensor.dim() > 1 else tensor,)

    def write(self, parameters: Sequence[Tensor]) -> Tensor:
        tensor = parameters[0].reshape(self.shape) if self.shape else parameters[0]
        return tensor.mT.contiguous() if self.transposed and tensor.dim() > 1 else tensor


@dataclass(frozen=True, kw_only=True)
class PermuteForRope(Weight):
    """A query or key projection whose rotated pairs are stored as neighbours, not half a head apart."""

    heads: int = 1

    def read(self, stored_tensor: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        rows = torch.arange(len(stored_tensor)).unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten()
        return (stored_tensor[rows],)  # of a quantized matrix too

    def write(self, parameters: Sequence[Tensor]) -> Tensor:
        return parameters[0].unflatten(0, (self.heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True, kw_only=True)
class AddConstant(Weight):
    """A parameter that is stored with the constant `shift` added."""

    shift: float = 0.0

    def read(self, stored_tensor: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        return (stored_tensor.float() - self.shift,)

    def write(self, parameters: Sequence[Tensor]) -> Tensor:
        return parameters[0].float() + self.shift  # half precision would round a small parameter to 0


@dataclass(frozen=True, kw_only=True)
class Concatenate(Weight):
    """Several parameters in one tensor, concatenated as a whole or, with `heads`, within each head."""

    transposed: bool = False
    heads: int | None = None

    def read(self, stored_tensor: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        tensor = stored_tensor.mT if self.transposed and stored_tensor.dim() > 1 else stored_tensor
        if self.heads is None:
            return tensor.split([len(parameter) for parameter in parameters])
        return [part.flatten(0, 1) for part in tensor.unflatten(0, (self.heads, len(parameters), -1)).unbind(1)]

    def write(self, parameters: Sequence[Tensor]) -> Tensor:
        if self.heads is None:
            tensor = torch.cat(list(parameters))
        else:
            tensor = torch.stack([part.unflatten(0, (self.heads, -1)) for part in parameters], dim=1).flatten(0, 2)
        return tensor.mT.contiguous() if self.transposed and tensor.dim() > 1 else tensor


Rows = tuple[WeightRow, ...]
Table = Rows | Callable[[ModelSpec], Rows]  # a function if the rows depend on the spec


def renames(
    names: Mapping[str, str],
    prefix: str = "",
    tensor_prefix: str = "",
    *,
    transposed: bool = False,
    optional: bool = False,
) -> Rows:
    """A Rename row for each pair of a parameter and its stored tensor, whose names follow the two prefixes."""
    return tuple(
        Rename(tensor_prefix + tensor, (prefix + name,), transposed=transposed, optional=optional)
        for name, tensor in names.items()
    )


def concatenate(tensor_name: str, prefix: str, parts: Iterable[str], **options: Any) -> Concatenate:
    return Concatenate(tensor_name, tuple(prefix + part for part in parts), **options)


def token_scores(tensor_name: str, embedding: str) -> Rows:
    """The rows of a token head, which is tied to the token embedding or has its own matrix."""
    output = renames({"head.output": tensor_name, "head.bias": f"{tensor_name}.bias"}, optional=True)
    return *output, TiedTensor(f"{tensor_name}.weight", (f"{embedding}.weight",))


def expand(rows: Iterable[WeightRow], parameters: Container[str], layers: Mapping[str, int]) -> Iterator[WeightRow]:
    """Expands rows to every layer, weight and bias of a model. `layers` is the number of layers of each stack."""
    names = set[str]()
    for row in rows:
        stacks = [row.parameter_names[0].partition(".")[0]] if row.parameter_names else layers
        for i in range(max((layers.get(stack, 0) for stack in stacks), default=0)) if "*" in row.tensor_name else (0,):
            for layer_row in expand_row(row, i, parameters):
                # the name of an untied matrix is also the second name of a tied one
                if layer_row.tensor_name not in names:
                    names.add(layer_row.tensor_name)
                    yield layer_row


def expand_row(row: WeightRow, layer: int, parameters: Container[str]) -> list[WeightRow]:
    """The rows of one layer, one for each parameter of the module that the model has."""
    tensor_name = row.tensor_name.replace("*", str(layer))
    names = [name.replace("*", str(layer)) for name in row.parameter_names]
    rows = [
        replace(row, tensor_name=tensor_name + ending, parameter_names=tuple(name + ending for name in names))
        for ending in (("", ".weight", ".bias") if isinstance(row, Weight) else ("",))
        if all(name + ending in parameters for name in names)
    ]
    if isinstance(row, Weight) and not row.optional and not rows:
        # names no parameter, so that `covers` is false
        return [replace(row, tensor_name=tensor_name, parameter_names=tuple(names))]
    return rows


@dataclass(frozen=True)
class WeightTable:
    """The rows of one model, which convert all its weights."""

    rows: Rows

    def map_keys(self, key_mapping: KeyMapping) -> WeightTable:
        """The table for checkpoints that have other names for the same tensors."""

        def new_name(name: str) -> str:
            matches = (re.sub(pattern, other, name) for pattern, other in key_mapping if re.search(pattern, name))
            return next(matches, name)

        rows = tuple(row.rename(new_name) for row in self.rows)
        assert len({row.tensor_name for row in rows}) == len(rows), f"{key_mapping} gives two tensors the same name"
        return WeightTable(rows)

    @cached_property
    def weights(self) -> list[Weight]:
        return [row for row in self.rows if isinstance(row, Weight)]

    @cached_property
    def unused(self) -> frozenset[str]:
        return frozenset(row.tensor_name for row in self.rows if isinstance(row, Ignored))

    @cached_property
    def tied(self) -> dict[str, str]:
        """Maps second names of tied tensors to their first names."""
        first = {row.parameter_names: row.tensor_name for row in self.weights}
        return {row.tensor_name: first[row.parameter_names] for row in self.rows if isinstance(row, TiedTensor)}

    @property
    def unchanged_names(self) -> dict[str, str]:
        """Maps parameters that are stored unchanged to the names of their tensors."""
        rows = [row for row in self.weights if type(row) is Rename and not row.transposed and row.shape is None]
        return {row.parameter_names[0]: row.tensor_name for row in rows}

    def covers(self, parameters: Parameters) -> bool:
        """Whether each parameter of a model occurs in exactly one row."""
        return sorted(name for row in self.weights for name in row.parameter_names) == sorted(parameters)

    def shapes(self, parameters: Parameters) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the tensors that a checkpoint must hold. Parameters may be on the meta device."""
        return {name: tuple(tensor.shape) for name, tensor in self.write(parameters).items()}

    def read(self, read_tensor: Callable[[str], Tensor], parameters: Parameters) -> Iterator[tuple[str, Tensor]]:
        """Yields parameters by name, reading one stored tensor at a time. `parameters` gives the shapes."""
        for row in self.weights:
            outputs = row.read(read_tensor(row.tensor_name), [parameters[name] for name in row.parameter_names])
            yield from zip(row.parameter_names, outputs, strict=True)

    def write(self, parameters: Parameters) -> Tensors:
        """Converts parameters to the tensors of a checkpoint."""
        return {row.tensor_name: row.write([parameters[name] for name in row.parameter_names]) for row in self.weights}
