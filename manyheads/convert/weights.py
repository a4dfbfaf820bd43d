"""Two-way tables: each row says how a weight is called and laid out on both sides, and reads in both directions.

What a checkpoint must hold follows from the same rows: written from a model without memory, they give every name and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Held = Mapping[str, Tensor]


@dataclass(frozen=True)
class One:
    """One tensor of ours in one of theirs."""

    ours: str
    theirs: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.ours,)


@dataclass(frozen=True)
class Same(One):
    """One tensor under two names; `transposed` where theirs is stored in×out, `shape` where theirs has other axes."""

    transposed: bool = False
    shape: tuple[int, ...] | None = None

    def read(self, theirs: Held, ours: Held) -> Tensors:
        tensor = theirs[self.theirs]
        tensor = tensor.reshape(ours[self.ours].shape) if self.shape else tensor
        return {self.ours: tensor.transpose(0, 1) if self.transposed else tensor}

    def write(self, ours: Held) -> Tensors:
        tensor = ours[self.ours]
        tensor = tensor.reshape(self.shape) if self.shape else tensor
        return {self.theirs: tensor.transpose(0, 1).contiguous() if self.transposed else tensor}


@dataclass(frozen=True)
class Paired(One):
    """One tensor of queries or keys: in theirs the two coordinates that are turned together are neighbours, in ours half a head apart."""

    heads: int

    def read(self, theirs: Held, ours: Held) -> Tensors:
        return {self.ours: theirs[self.theirs].unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)}

    def write(self, ours: Held) -> Tensors:
        return {self.theirs: ours[self.ours].unflatten(0, (self.heads, 2, -1)).transpose(1, 2).flatten(0, 2)}


@dataclass(frozen=True)
class Shifted(One):
    """One tensor to which theirs has a number added."""

    by: float

    def read(self, theirs: Held, ours: Held) -> Tensors:
        return {self.ours: theirs[self.theirs].float() - self.by}

    def write(self, ours: Held) -> Tensors:
        return {self.theirs: ours[self.ours].float() + self.by}  # in less, a small number would vanish beside it


@dataclass(frozen=True)
class Joined:
    """Several of ours in one of theirs: one after the other, or, with `heads`, side by side within each head."""

    ours: tuple[str, ...]
    theirs: str
    transposed: bool = False
    heads: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.ours

    def read(self, theirs: Held, ours: Held) -> Tensors:
        tensor = theirs[self.theirs]
        tensor = tensor.transpose(0, 1) if self.transposed else tensor
        if self.heads is None:
            return dict(zip(self.ours, tensor.split([len(ours[name]) for name in self.ours]), strict=True))
        by_head = tensor.unflatten(0, (self.heads, len(self.ours), -1)).unbind(1)
        return dict(zip(self.ours, (part.flatten(0, 1) for part in by_head), strict=True))

    def write(self, ours: Held) -> Tensors:
        parts = [ours[name] for name in self.ours]
        if self.heads is None:
            tensor = torch.cat(parts)
        else:
            tensor = torch.stack([part.unflatten(0, (self.heads, -1)) for part in parts], dim=1).flatten(0, 2)
        return {self.theirs: tensor.transpose(0, 1).contiguous() if self.transposed else tensor}


@dataclass(frozen=True)
class Repeated:
    """A name of theirs for a tensor that another row already holds: a tied weight, which a checkpoint may repeat or leave out."""

    theirs: str
    same_as: str


@dataclass(frozen=True)
class Unused:
    """A tensor of theirs that no forward of ours reads, known by name: kept, and given back as it came."""

    theirs: str


Weight = Same | Joined | Paired | Shifted
Row = Weight | Repeated | Unused


def both(ours: str, theirs: str, *, bias: bool = True, transposed: bool = False) -> Iterator[Row]:
    """A weight and, where there is one, its bias."""
    yield Same(f"{ours}.weight", f"{theirs}.weight", transposed)
    if bias:
        yield Same(f"{ours}.bias", f"{theirs}.bias")


def expected(rows: Iterable[Row], ours: Held) -> dict[str, tuple[int, ...]]:
    """Every name that a checkpoint of this model must have, with its shape; `ours` may be without memory."""
    shapes = {}
    for row in rows:
        if isinstance(row, Weight):
            shapes.update({name: tuple(tensor.shape) for name, tensor in row.write(ours).items()})
    return shapes


def check_names(rows: Iterable[Row], ours: Held, given: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses a name missing or left over on either side, and a shape that the config does not imply."""
    rows = list(rows)
    needed = expected(rows, ours)
    allowed = set(needed) | {row.theirs for row in rows if isinstance(row, Repeated | Unused)}
    if unknown := sorted(set(given) - allowed):
        raise ValueError(f"the checkpoint holds a weight this family does not have: {unknown[0]} ({len(unknown)} in all)")
    if missing := sorted(set(needed) - set(given)):
        raise ValueError(f"the checkpoint lacks a weight this family has: {missing[0]} ({len(missing)} in all)")
    needed |= {row.theirs: needed[row.same_as] for row in rows if isinstance(row, Repeated)}
    for name, shape in given.items():
        if name in needed and tuple(shape) != needed[name]:
            raise ValueError(f"{name} has shape {tuple(shape)}, the config implies {needed[name]}")
    filled = {name for row in rows if isinstance(row, Weight) for name in row.names}
    assert filled == set(ours), f"the table and the model differ in {sorted(filled ^ set(ours))[:3]}"


def read_weights(rows: Iterable[Row], theirs: Held, ours: Held, place: Callable[[str, Tensor], None]) -> tuple[Tensors, frozenset[str]]:
    """Our weights from theirs, each handed to `place`; and what is given back as it came: unused tensors, and which tied ones stood there.

    Each of theirs is asked for once, in the order of the table, so that a mapping that reads from disk holds one at a time.
    """
    unused, repeated = Tensors(), set[str]()
    for row in rows:
        if isinstance(row, Weight):
            for name, tensor in row.read(theirs, ours).items():
                place(name, tensor)
        elif row.theirs not in theirs:
            continue
        elif isinstance(row, Unused):
            unused[row.theirs] = theirs[row.theirs]
        else:
            tensor, other = theirs[row.theirs], theirs[row.same_as]
            sort = torch.promote_types(tensor.dtype, other.dtype)
            if not torch.equal(tensor.to(sort), other.to(sort)):
                raise ValueError(f"{row.theirs} should be tied to {row.same_as}, but holds other numbers")
            repeated.add(row.theirs)
    return unused, frozenset(repeated)


def write_weights(rows: Iterable[Row], ours: Held, unused: Held = MappingProxyType({}), repeated: Container[str] = ()) -> Tensors:
    """Our weights under their names, with unused tensors as they came and the tied ones that are to stand there."""
    theirs = Tensors()
    for row in rows:
        if isinstance(row, Weight):
            theirs.update(row.write(ours))
        elif isinstance(row, Unused) and row.theirs in unused:
            theirs[row.theirs] = unused[row.theirs]
        elif isinstance(row, Repeated) and row.theirs in repeated:
            theirs[row.theirs] = theirs[row.same_as].clone()
    return theirs
