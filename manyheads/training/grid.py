"""The grid of `compare`: an axis is a field of the run with its values, a cell is one combination of values."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyheads.errors import ConfigError, UnknownKeyError, UsageError
from manyheads.model.spec import ModelSpec, StackSpec, resolve_field
from manyheads.spec import Spec, Tree, did_you_mean, override, quote
from manyheads.training.optim import OptimSpec
from manyheads.training.run import RunSpec, TrainSpec, read_run

MAX_RUNS = 10_000


@dataclass(frozen=True)
class Axis:
    """One axis of the grid: its name as typed, the fields of the run that it sets, and its values."""

    name: str
    paths: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class CellRun:
    """The run of a cell with one seed."""

    tree: Tree  # a worker process reads the tree after it has loaded --parts
    spec: RunSpec
    folder: Path


@dataclass(frozen=True)
class GridCell:
    """One value of every axis, with a run per seed, or with the error if these values are incompatible."""

    values: tuple[tuple[str, str], ...]
    runs: tuple[CellRun, ...] = ()
    error: str | None = None

    @property
    def name(self) -> str:
        return " ".join(f"{axis}={value}" for axis, value in self.values)


def read_axes(texts: Sequence[str], tree: Tree) -> list[Axis]:
    axes = [read_axis(text, tree) for text in texts]
    if not axes:
        raise UsageError("nothing to compare: give a field and its values, such as position=none,rope")
    paths = [path for axis in axes for path in axis.paths]
    if duplicates := [path for path in paths if paths.count(path) > 1]:
        raise UsageError(f"two axes set the same field, {duplicates[0]}")
    return axes


def read_axis(text: str, tree: Tree) -> Axis:
    """Parses `position=none,rope`, and finds the fields of this run that it sets."""
    name, equals, rest = text.partition("=")
    values = tuple(split_values(rest))
    if not equals or not name.strip() or not all(values):
        raise UsageError(f"given {quote(text)}, expected a field and its values, such as position=none,rope")
    if len(set(values)) < len(values):
        raise UsageError(f"{quote(text)} has the same value twice")
    return Axis(name.strip(), axis_paths(name.strip(), tree), values)


def split_values(text: str) -> Iterator[str]:
    """Splits at commas that are not inside brackets or quotation marks."""
    depth, quotation_mark, start = 0, "", 0
    for i, letter in enumerate(text):
        if quotation_mark:
            quotation_mark = "" if letter == quotation_mark else quotation_mark
        elif letter in "\"'":
            quotation_mark = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and not depth:
            yield text[start:i].strip()
            start = i + 1
    yield text[start:].strip()


def axis_paths(name: str, tree: Tree) -> tuple[str, ...]:
    """Resolves a field: a full path stays; a short one means every stack that has it, else a table of the run."""
    first = name.partition(".")[0]
    if name == "seed":
        raise UsageError(
            "seed cannot be an axis, because every cell is trained with several seeds",
            hint="set their number with --seeds",
        )
    model = tree["model"] if isinstance(tree.get("model"), dict) else {}
    if first in RunSpec.model_fields:
        return (name,)
    if paths := resolve_field(name, model):
        return tuple(f"model.{path}" for path in paths)
    for table, spec in (("optim", OptimSpec), ("train", TrainSpec)):
        if first in spec.model_fields:
            return (f"{table}.{name}",)
    if first in StackSpec.model_fields:
        raise UnknownKeyError(
            f"{quote(first)} is a field of a stack, and this run describes no stack that has it",
            key=first,
            hint=f"give the whole path, such as model.encoder.{first}",
        )
    specs: tuple[type[Spec], ...] = (RunSpec, ModelSpec, OptimSpec, TrainSpec, StackSpec)
    field_names = {field for spec in specs for field in spec.model_fields} - {"seed"}
    raise UnknownKeyError(f"a run has no field {quote(first)}{did_you_mean(first, field_names)}", key=first)


def make_grid(tree: Tree, axes: Sequence[Axis], seeds: int, folder: Path) -> list[GridCell]:
    """Returns every cell. Raises if a value is invalid in all of its cells; a single invalid cell keeps its error."""
    if math.prod(len(axis.values) for axis in axes) * seeds > MAX_RUNS:
        raise UsageError(f"these axes and seeds make more than {MAX_RUNS:,} runs")
    cells = [make_cell(tree, axes, values, seeds, folder) for values in itertools.product(*(a.values for a in axes))]
    for value in dict.fromkeys(value for cell in cells for value in cell.values):
        errors = [cell.error for cell in cells if value in cell.values]
        if all(errors):
            raise ConfigError(f"{'='.join(value)}: {errors[0]}")
    return cells


def make_cell(tree: Tree, axes: Sequence[Axis], values: Sequence[str], seeds: int, folder: Path) -> GridCell:
    pairs = tuple((axis.name, value) for axis, value in zip(axes, values, strict=True))
    overrides = [f"{path}={value}" for axis, value in zip(axes, values, strict=True) for path in axis.paths]
    tree = override(tree, overrides)
    try:
        first = read_run(tree)
    except ConfigError as error:
        return GridCell(pairs, error=str(error))
    specs = (first.replace(seed=first.seed + i) for i in range(seeds))
    runs = (
        CellRun(tree | {"seed": spec.seed}, spec, folder / folder_name(pairs) / f"seed-{spec.seed}") for spec in specs
    )
    return GridCell(pairs, tuple(runs))


def folder_name(values: tuple[tuple[str, str], ...]) -> str:
    """Returns the values as typed if every file system allows that, otherwise a shortened form with a hash."""
    name = ",".join(f"{axis}={value}" for axis, value in values)
    if re.fullmatch(r"[\w.=,+-]{1,120}", name, re.ASCII):
        return name
    return f"{re.sub(r'[^a-zA-Z0-9.=,+-]+', '-', name)[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
