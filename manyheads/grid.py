"""What is compared: fields of one run and their values, found by short names, and a cell for every combination."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyheads.model.spec import SHAPES, ModelSpec, NgramSpec, RecurrentSpec, TowerSpec
from manyheads.spec import Spec, SpecError, Tree, nearest, override, quoted
from manyheads.train.optim import OptimSpec
from manyheads.train.run import RunSpec, TrainSpec, read_run

MOST_RUNS = 10_000


@dataclass(frozen=True)
class Axis:
    """One thing that is changed, where it stands in the run, and what it becomes in turn."""

    name: str
    paths: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One choice of every axis; `wrong` where no run can be like that."""

    choices: tuple[tuple[str, str], ...]
    trees: tuple[Tree, ...]  # by seed
    folder: Path
    wrong: str | None = None

    @property
    def name(self) -> str:
        return " ".join(f"{axis}={value}" for axis, value in self.choices)


def read_axis(said: str, tree: Tree) -> Axis:
    """`position=none,rope` and where that is in this run."""
    name, equals, values = said.partition("=")
    found = tuple(split_values(values))
    if not equals or not name.strip() or not all(found):
        raise SpecError(f"given {quoted(said)}, expected what is changed and its values, such as position=none,rope")
    if len(set(found)) < len(found):
        raise SpecError(f"{quoted(said)} says a value twice")
    return Axis(name.strip(), paths_of(name.strip(), tree), found)


def split_values(text: str) -> Iterator[str]:
    """At commas that stand in no brackets and no quotation marks."""
    depth, quote, start = 0, "", 0
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and not depth:
            yield text[start:i].strip()
            start = i + 1
    yield text[start:].strip()


def paths_of(name: str, tree: Tree) -> tuple[str, ...]:
    """A full path as it is; a short one wherever the run has that field: in every tower, else in the model, the optimiser, the training."""
    first = name.partition(".")[0]
    if name == "seed":
        raise SpecError("seed: every cell is trained with several; --seeds says with how many")
    model = tree["model"] if isinstance(tree.get("model"), dict) else {}
    towers = [shape for shape in SHAPES if isinstance(model.get(shape), dict) and first in fields_of_tower(shape)]
    if first in RunSpec.model_fields:
        return (name,)
    if first in ModelSpec.model_fields:
        return (f"model.{name}",)
    if towers:
        # a tower that is like the other has what is said of that one, unless it says its own
        return tuple(f"model.{shape}.{name}" for shape in towers if "like" not in model[shape] or first in model[shape])
    for table, spec in (("optim", OptimSpec), ("train", TrainSpec)):
        if first in spec.model_fields:
            return (f"{table}.{name}",)
    if first in TowerSpec.model_fields:
        raise SpecError(f"{quoted(first)} is a tower's, and this run describes none with it: say whose, such as model.encoder.{first}")
    known = {*RunSpec.model_fields, *ModelSpec.model_fields, *OptimSpec.model_fields, *TrainSpec.model_fields, *TowerSpec.model_fields}
    raise SpecError(f"no field {quoted(first)} in this run{nearest(first, known - {'seed'})}")


def fields_of_tower(shape: str) -> set[str]:
    specs: dict[str, type[Spec]] = {"recurrent": RecurrentSpec, "ngram": NgramSpec}
    return set(specs.get(shape, TowerSpec).model_fields)


def grid(tree: Tree, axes: Sequence[Axis], seeds: int, folder: Path) -> list[Cell]:
    """Every cell. A value that works in none of its cells is refused; a cell that does not work although its values do says why."""
    first = read_run(tree).seed
    cells = []
    if math.prod(len(axis.values) for axis in axes) * seeds > MOST_RUNS:
        raise SpecError(f"that makes more than {MOST_RUNS:,} runs; compare less at once")
    for values in itertools.product(*(axis.values for axis in axes)):
        said = [f"{path}={value}" for axis, value in zip(axes, values, strict=True) for path in axis.paths]
        choices = tuple((axis.name, value) for axis, value in zip(axes, values, strict=True))
        cell, wrong = override(tree, said), None
        try:
            read_run(cell)
        except SpecError as error:
            wrong = str(error)
        trees = tuple(cell | {"seed": first + i} for i in range(seeds))
        cells.append(Cell(choices, trees, folder / folder_name(choices), wrong))
    for choice in dict.fromkeys(choice for cell in cells for choice in cell.choices):
        if all(cell.wrong for cell in cells if choice in cell.choices):
            raise SpecError(f"{'='.join(choice)}: {next(cell.wrong for cell in cells if choice in cell.choices)}")
    return cells


def folder_name(choices: tuple[tuple[str, str], ...]) -> str:
    """As it is said, where every disk can write that; otherwise a part of it, and a hash."""
    said = ",".join(f"{axis}={value}" for axis, value in choices)
    if re.fullmatch(r"[\w.=,+-]{1,120}", said, re.ASCII):
        return said
    return f"{re.sub(r'[^a-zA-Z0-9.=,+-]+', '-', said)[:60]}-{hashlib.sha256(said.encode()).hexdigest()[:8]}"
