"""Detects which columns of a user's file hold the fields of a kind of data, from a sample of its rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from manyheads.data.source import DataSpec
from manyheads.data.tables import HEADER_SAMPLE, is_jsonl, looks_like_header
from manyheads.errors import ColumnError, IncompatibleError
from manyheads.files.text import LineReader, check_rereadable
from manyheads.spec import quoted

MAX_LINE_LENGTH = 1 << 24


@dataclass(frozen=True)
class Columns:
    """The value for `data.fields`, None if the default fits the file, and the reason."""

    fields: tuple[str | int, ...] | None
    reason: str


@dataclass(frozen=True)
class Sample:
    """Sampled rows of a file and the names of its columns, or their numbers if the columns have no names."""

    names: list[str]
    rows: list[list[str]]
    named: bool
    header: bool  # whether the first line has the names

    def column(self, index: int) -> str | int:
        return self.names[index] if self.named else index


def choose_columns(
    path: Path, kind: type[DataSpec], *, fields: str | None = None, longer_column_first: bool = False
) -> Columns:
    """Returns the columns in `fields` (names or numbers, separated by commas), or detects them if it is None.

    With `longer_column_first`, the longer of two texts is the source, as a document is longer than its summary.
    """
    required, optional = kind.file_columns()
    if fields is None:
        return detect_columns(path, kind, longer_column_first=longer_column_first) if required else Columns(None, "")
    if not required:
        raise IncompatibleError(f"fields is {quoted(fields)}, and a file of kind {kind.kind} has no columns")
    names = [name.strip() for name in fields.split(",")]
    if not len(required) <= len(names) <= len(required + optional) or not all(names):
        expected = f"{len(required)} columns separated by a comma: {' and '.join(required)}"
        raise IncompatibleError(f"fields is {quoted(fields)}, expected {expected}")
    return Columns(numbers_to_names(path, [int(name) if name.isdecimal() else name for name in names]), "as given")


def numbers_to_names(path: Path, fields: Sequence[str | int]) -> tuple[str | int, ...]:
    """Replaces column numbers by the names in the header, if there is one, so that it is not read as a row."""
    first = read_lines(path)[0] if path.is_file() else []
    if not first or is_jsonl(path, first[0]) or not has_header(first):
        return tuple(fields)
    names = first[0].split("\t")
    return tuple(names[column] if isinstance(column, int) and column < len(names) else column for column in fields)


def detect_columns(path: Path, kind: type[DataSpec], *, longer_column_first: bool = False) -> Columns:
    """Finds the columns of a file whose rows look like the fields of `kind`."""
    required = kind.file_columns()[0]
    sample = None if path.is_dir() else read_sample(path, required)
    if sample is not None and set(required) <= set(sample.names):
        return Columns(None, "by their names")
    if sample is None or len(sample.names) < len(required) or not sample.rows:
        return Columns(None, "")
    if "label" in required:
        fields, reason = label_columns(sample)
    else:
        fields, reason = text_columns(path, sample, required, longer_column_first=longer_column_first)
    default = fields == tuple(range(len(fields)))  # what is read if `fields` is not set
    return Columns(None if default else fields, reason)


def read_sample(path: Path, required: Sequence[str]) -> Sample | None:
    first, lines = read_lines(path)
    if not lines:
        return None
    if is_jsonl(path, lines[0]):
        names, rows = parse_objects(lines, required)
        named, header = True, False
    else:
        cells = [line.split("\t") for line in lines]
        named = header = set(required) <= set(cells[0]) or has_header(first)
        names, rows = (cells[0], cells[1:]) if header else ([str(i) for i in range(len(cells[0]))], cells)
    return Sample(names, [row for row in rows if len(row) == len(names)], named, header)


def has_header(lines: Sequence[str]) -> bool:
    first, *rows = (line.split("\t") for line in lines)
    return looks_like_header(first, rows)


def read_lines(path: Path) -> tuple[list[str], list[str]]:
    """Returns the first lines; and the first line with a random sample of the others, because a file may be sorted."""
    check_rereadable(path)
    rng, first, sample = Random(0), list[str](), list[str]()
    for i, line in enumerate(line for _, line in LineReader(path, "strict", MAX_LINE_LENGTH) if line.strip()):
        if i <= HEADER_SAMPLE:
            first.append(line)
            sample.append(line)
        elif (index := rng.randrange(i)) < HEADER_SAMPLE:
            sample[1 + index] = line
    return first, sample


def parse_objects(lines: Sequence[str], required: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Returns the keys that are required or always have a string or integer and their values; empty without objects."""
    try:
        objects = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return [], []
    if not all(isinstance(record, dict) for record in objects):
        return [], []
    names = [
        name
        for name in objects[0]
        if name in required or all(isinstance(record.get(name), str | int) for record in objects)
    ]
    return names, [[str(record.get(name)) for name in names] for record in objects]


def label_columns(sample: Sample) -> tuple[tuple[str | int, ...], str]:
    """Chooses the longest column as the text, and the one named "label", or with the fewest values, as the class."""
    columns = range(len(sample.names))
    distinct = [len({row[i] for row in sample.rows}) for i in columns]
    if "label" in sample.names:
        label, reason = sample.names.index("label"), "by its name"
    else:
        label = min(reversed(columns), key=lambda i: (distinct[i] < 2, distinct[i]))
        reason = f"{quoted(sample.column(label))} is the class: {distinct[label]:,} values in {len(sample.rows):,} rows"
    text = max((i for i in columns if i != label), key=column_sizes(sample).__getitem__)
    return (sample.column(text), sample.column(label)), reason


def text_columns(
    path: Path, sample: Sample, required: Sequence[str], *, longer_column_first: bool
) -> tuple[tuple[str | int, ...], str]:
    """Chooses two columns of texts: the only two, the only two with several words, or the first two without names."""
    columns, sizes = range(len(sample.names)), column_sizes(sample)
    texts = [i for i in columns if sum(len(row[i].split()) > 1 for row in sample.rows) > len(sample.rows) / 2]
    if len(columns) == len(required):
        pair, reason = [0, 1], "in the order of the file"
    elif len(texts) == len(required):
        pair, reason = texts, f"the only ones of {len(columns)} with more than one word"
    elif sample.named:
        longest = sorted(sorted(columns, key=lambda i: -sizes[i])[: len(required)])
        raise ColumnError(
            f"{path} has {', '.join(sample.names)}, and it is not clear which are {' and '.join(required)}",
            hint=f"choose with --fields, such as --fields {','.join(sample.names[i] for i in longest)}",
        )
    else:
        pair, reason = [0, 1], f"in the order of the file, the first two of {len(columns)}"
    if longer_column_first:
        pair, reason = sorted(pair, key=lambda i: -sizes[i]), "the longer of the two is the source"
    first_line = (
        "; the first line is a header" if sample.header else "" if sample.named else "; the first line is a row"
    )
    return tuple(sample.column(i) for i in pair), reason + first_line


def column_sizes(sample: Sample) -> list[int]:
    """Returns the number of characters in each column."""
    return [sum(len(row[i]) for row in sample.rows) for i in range(len(sample.names))]
