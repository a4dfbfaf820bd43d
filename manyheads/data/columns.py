"""Detects which columns of a user's file hold the fields of a kind of data, from a sample of its rows."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from manyheads.data.records import SAMPLE_ROWS, Record, Table
from manyheads.data.source import DataSpec
from manyheads.data.tables import TableSpec
from manyheads.errors import ColumnError, IncompatibleError
from manyheads.spec import Tree, parse, quote

LABEL_NAMES = ("label", "class", "category", "sentiment", "rating", "score")
TEXT_NAMES = ("text", "sentence", "review", "comment", "document", "description", "content", "title")


@dataclass(frozen=True)
class Columns:
    """The value for `data.columns`, None if the default fits the file, and the reason."""

    names: tuple[str | int, ...] | None
    reason: str


@dataclass(frozen=True)
class Sample:
    """Sampled rows of a file and the names of its columns, or their numbers if the columns have no names."""

    names: Sequence[str]
    rows: list[list[str]]
    has_names: bool

    def column(self, index: int) -> str | int:
        return self.names[index] if self.has_names else index


def choose_columns(
    path: Path,
    kind: type[DataSpec],
    *,
    columns: str | None = None,
    longer_column_first: bool = False,
    settings: Tree | None = None,
) -> Columns:
    """Returns the columns in `columns` (names or numbers, separated by commas), or detects them if it is None.

    With `longer_column_first`, the longer of two texts is the source, as a document is longer than its summary.
    `settings` are other fields of the data, such as the delimiter.
    """
    required, optional = kind.file_columns(path)
    if columns is None and (not required or path.is_dir()):
        return Columns(None, "")
    spec: Any = parse(kind, {"path": str(path)} | (settings or {}))
    if columns is None:
        return detect_columns(spec, required, longer_column_first=longer_column_first)
    if not required:
        raise IncompatibleError(f"columns is {quote(columns)}, and {path} has no columns for the kind {kind.kind}")
    names = [name.strip() for name in columns.split(",")]
    if not len(required) <= len(names) <= len(required + optional) or not all(names):
        expected = f"{len(required)} columns separated by a comma: {' and '.join(required)}"
        raise IncompatibleError(f"columns is {quote(columns)}, expected {expected}")
    return Columns(numbers_to_names(spec, [int(name) if name.isdecimal() else name for name in names]), "as given")


def numbers_to_names(spec: TableSpec, columns: Sequence[str | int]) -> tuple[str | int, ...]:
    """Replaces column numbers by names, if the file has them, so that another file with these names is read alike."""
    table = spec.open_table(Path(spec.path), Counter())
    names = table.names if table is not None and table.has_names else ()
    return tuple(names[column] if isinstance(column, int) and column < len(names) else column for column in columns)


def detect_columns(spec: TableSpec, required: Sequence[str], *, longer_column_first: bool = False) -> Columns:
    """Finds the columns of a file whose rows look like the required fields."""
    table = spec.open_table(Path(spec.path), Counter())
    if table is not None and set(required) <= set(table.names):
        return Columns(None, "by their names")
    sample = None if table is None else read_sample(table)
    if sample is None or len(sample.names) < len(required) or not sample.rows:
        return Columns(None, "")
    if "label" in required:
        columns, reason = label_columns(sample)
    else:
        columns, reason = text_columns(Path(spec.path), sample, required, longer_column_first=longer_column_first)
    default = columns == tuple(range(len(columns)))  # what is read if `columns` is not set
    return Columns(None if default else columns, reason)


def read_sample(table: Table) -> Sample:
    """Returns a random sample of the rows, because a file may be sorted, and the columns of strings and integers."""
    rng, records = Random(0), list[Record]()
    for i, (_, record) in enumerate(table.records()):
        if i < SAMPLE_ROWS:
            records.append(record)
        elif (index := rng.randrange(i + 1)) < SAMPLE_ROWS:
            records[index] = record
    if not records or isinstance(records[0], list):
        return Sample(table.names, records, table.has_names)
    names = [name for name in table.names if all(isinstance(record.get(name), str | int) for record in records)]
    return Sample(names, [[str(record[name]) for name in names] for record in records], has_names=True)


def label_columns(sample: Sample) -> tuple[tuple[str | int, ...], str]:
    """Chooses the class by its name, or as the column with the fewest values, and the longest other one as the text."""
    columns = range(len(sample.names))
    distinct = [len({row[i] for row in sample.rows}) for i in columns]
    names = [name.lower() if sample.has_names else "" for name in sample.names]
    by_name = [names.index(name) for name in LABEL_NAMES if name in names and distinct[names.index(name)] > 1]
    if by_name:
        label, reason = by_name[0], f"{quote(sample.column(by_name[0]))} is the class, by its name"
    else:
        others = [i for i in columns if names[i] not in TEXT_NAMES] or columns
        label = min(reversed(others), key=lambda i: (distinct[i] < 2, distinct[i]))
        reason = f"{quote(sample.column(label))} is the class: {distinct[label]:,} values in {len(sample.rows):,} rows"
    text = max((i for i in columns if i != label), key=column_sizes(sample).__getitem__)
    return (sample.column(text), sample.column(label)), reason


def text_columns(
    path: Path, sample: Sample, required: Sequence[str], *, longer_column_first: bool
) -> tuple[tuple[str | int, ...], str]:
    """Chooses columns of texts: the only ones, the only ones with several words, or the first ones without names."""
    columns, sizes, count = range(len(sample.names)), column_sizes(sample), len(required)
    texts = [i for i in columns if sum(len(row[i].split()) > 1 for row in sample.rows) > len(sample.rows) / 2]
    if len(columns) == count:
        indices, reason = list(columns), "in the order of the file"
    elif len(texts) == count:
        indices, reason = texts, f"more than one word, as in no other of the {len(columns)} columns"
    elif sample.has_names or count == 1:
        longest = sorted(sorted(columns, key=lambda i: -sizes[i])[:count])
        raise ColumnError(
            f"{path} has {', '.join(sample.names)}, and it is not clear what is {' and '.join(required)}",
            hint=f"choose with --columns, such as --columns {shlex.quote(','.join(sample.names[i] for i in longest))}",
        )
    else:
        indices, reason = list(range(count)), f"in the order of the file, the first {count} of {len(columns)}"
    if longer_column_first:
        indices, reason = sorted(indices, key=lambda i: -sizes[i]), "the longer of the two is the source"
    return tuple(sample.column(i) for i in indices), reason


def column_sizes(sample: Sample) -> list[int]:
    """Returns the number of characters in each column."""
    return [sum(len(row[i]) for row in sample.rows) for i in range(len(sample.names))]
