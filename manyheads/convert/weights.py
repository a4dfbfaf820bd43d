"""Two-way tables: each row says how a weight is called on both sides, and reads in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Same:
    """One tensor under two names; `transposed` where theirs is stored in×out; `shape` where theirs has other axes."""

    ours: str
    theirs: str
    transposed: bool = False
    shape: tuple[int, ...] | None = None

    def read(self, theirs: Mapping[str, Tensor]) -> Tensors:
        tensor = theirs[self.theirs]
        tensor = tensor.flatten() if self.shape else tensor
        return {self.ours: tensor.transpose(0, 1).contiguous() if self.transposed else tensor}

    def write(self, ours: Mapping[str, Tensor]) -> Tensors:
        tensor = ours[self.ours]
        tensor = tensor.reshape(self.shape) if self.shape else tensor
        return {self.theirs: tensor.transpose(0, 1).contiguous() if self.transposed else tensor}


@dataclass(frozen=True)
class Joined:
    """Several of ours, one after the other, in one of theirs."""

    ours: tuple[str, ...]
    theirs: str
    transposed: bool = False

    def read(self, theirs: Mapping[str, Tensor]) -> Tensors:
        tensor = theirs[self.theirs]
        tensor = tensor.transpose(0, 1).contiguous() if self.transposed else tensor
        return dict(zip(self.ours, tensor.chunk(len(self.ours)), strict=True))

    def write(self, ours: Mapping[str, Tensor]) -> Tensors:
        tensor = torch.cat([ours[name] for name in self.ours])
        return {self.theirs: tensor.transpose(0, 1).contiguous() if self.transposed else tensor}


@dataclass(frozen=True)
class Repeated:
    """A name of theirs for a tensor that another row already holds: a tied weight."""

    theirs: str
    same_as: str

    def read(self, theirs: Mapping[str, Tensor]) -> Tensors:
        if self.theirs in theirs and not torch.equal(theirs[self.theirs], theirs[self.same_as]):
            raise ValueError(f"{self.theirs} should be tied to {self.same_as}, but holds other numbers")
        return {}

    def write(self, ours: Mapping[str, Tensor]) -> Tensors:
        return {}


@dataclass(frozen=True)
class Derived:
    """A tensor of theirs that follows from the config, such as a table of sinusoids: passed over, and not written."""

    theirs: str

    def read(self, theirs: Mapping[str, Tensor]) -> Tensors:
        return {}

    def write(self, ours: Mapping[str, Tensor]) -> Tensors:
        return {}


Row = Same | Joined | Repeated | Derived


def both(ours: str, theirs: str, *, bias: bool = True, transposed: bool = False) -> Iterator[Row]:
    """A weight and, where there is one, its bias."""
    yield Same(f"{ours}.weight", f"{theirs}.weight", transposed)
    if bias:
        yield Same(f"{ours}.bias", f"{theirs}.bias")


def read_weights(table: Iterable[Row], theirs: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copies their weights into the model; a name missing or left over on either side is an error."""
    rows = list(table)
    unknown = sorted(set(theirs) - {row.theirs for row in rows})
    if unknown:
        raise ValueError(f"the checkpoint holds a weight this family does not have: {unknown[0]} ({len(unknown)} in all)")
    missing = sorted(row.theirs for row in rows if isinstance(row, Same | Joined) and row.theirs not in theirs)
    if missing:
        raise ValueError(f"the checkpoint lacks a weight this family has: {missing[0]} ({len(missing)} in all)")
    tensors: Tensors = {}
    for row in rows:
        tensors.update(row.read(theirs))
    for name, parameter in model.named_parameters():
        if name in tensors and tensors[name].shape != parameter.shape:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, the config implies {tuple(parameter.shape)}")
    model.load_state_dict(tensors, strict=True)


def write_weights(table: Iterable[Row], model: nn.Module) -> Tensors:
    """The model's weights under their names; tied ones once."""
    ours, theirs = model.state_dict(), Tensors()
    for row in table:
        theirs.update(row.write(ours))
    return theirs
