"""Which columns of a user's own file are meant, where nobody said: judged by some of its rows, and said why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from manyheads.data.source import DataError, Lines, check_again
from manyheads.data.tables import LOOKED_AT, TableSpec, form_of, names_columns
from manyheads.spec import quoted

LONGEST_LINE = 1 << 24


@dataclass(frozen=True)
class Columns:
    """The columns to read, in the order that the data wants them; none where that is the usual."""

    fields: tuple[str | int, ...] | None
    why: str


def columns_of(path: Path, spec: type[TableSpec], *, long_first: bool = False) -> Columns:
    """Looks at some rows. `long_first`: of two texts the longer is the source, as a document is longer than its summary."""
    if path.is_dir():
        return Columns(None, "")  # what reads it says so
    wanted = wanted_by(spec)
    first, found = some_lines(path)
    if not found:
        return Columns(None, "")
    if form_of(path, found[0]) == ".jsonl":
        names, rows = of_objects(found, wanted)
        header = True
    else:
        cells = [line.split("\t") for line in found]
        header = set(wanted) <= set(cells[0]) or named_by(first)
        names, rows = (cells[0], cells[1:]) if header else ([str(i) for i in range(len(cells[0]))], cells)
    rows = [row for row in rows if len(row) == len(names)]
    if set(wanted) <= set(names) or len(names) < len(wanted) or not rows:
        return Columns(None, "as the data names them" if set(wanted) <= set(names) else "")
    in_first_line = header and form_of(path, found[0]) != ".jsonl"
    return chosen(path, names, rows, wanted, header=header, in_first_line=in_first_line, long_first=long_first)


def by_name(path: Path, fields: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Columns that were said by their numbers, by their names where the first line has them: it is no row then."""
    lines = some_lines(path)[0] if path.is_file() else []
    if not lines or form_of(path, lines[0]) == ".jsonl" or not named_by(lines):
        return fields
    names = lines[0].split("\t")
    return tuple(names[one] if isinstance(one, int) and one < len(names) else one for one in fields)


def named_by(lines: Sequence[str]) -> bool:
    """Whether the first of the first lines names the columns, as whoever reads the file will find."""
    first, *rows = (line.split("\t") for line in lines)
    return names_columns(first, rows)


def some_lines(path: Path) -> tuple[list[str], list[str]]:
    """The first thousand, and beside the very first a thousand drawn from all others: a file may be sorted."""
    check_again(path)
    chance, first, kept = Random(0), list[str](), list[str]()
    for i, line in enumerate(line for _, line in Lines(path, "stop", LONGEST_LINE) if line.strip()):
        if i <= LOOKED_AT:
            first.append(line)
            kept.append(line)
        elif (place := chance.randrange(i)) < LOOKED_AT:
            kept[1 + place] = line
    return first, kept


def wanted_by(spec: type[TableSpec]) -> tuple[str, ...]:
    """The columns that must be there, by the names that they usually have."""
    usual: tuple[str, ...] = spec.model_fields["fields"].default
    return usual


def of_objects(lines: Sequence[str], wanted: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The fields that hold a text or a class in every object, or have a wanted name, and their values; nothing where a line is none."""
    try:
        objects = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return [], []
    if not all(isinstance(one, dict) for one in objects):
        return [], []
    names = [name for name in objects[0] if name in wanted or all(isinstance(one.get(name), str | int) for one in objects)]
    return names, [[str(one.get(name)) for name in names] for one in objects]


def chosen(
    path: Path, names: Sequence[str], rows: Sequence[Sequence[str]], wanted: tuple[str, ...], *, header: bool, in_first_line: bool,
    long_first: bool,
) -> Columns:  # fmt: skip
    known = [name if header else int(name) for name in names]
    size = {i: sum(len(row[i]) for row in rows) for i in range(len(names))}
    if "label" in wanted:
        different = {i: len({row[i] for row in rows}) for i in size}
        named = names.index("label") if "label" in names else None
        label = min(reversed(size), key=lambda i: (different[i] < 2, different[i])) if named is None else named
        text = max((i for i in size if i != label), key=lambda i: size[i])
        why = f"{quoted(known[label])} has {different[label]:,} different values in {len(rows):,} rows, so it is the class"
        return Columns(usual_or((known[text], known[label])), "by its name" if named is not None else why)
    texts = [i for i in size if sum(len(row[i].split()) > 1 for row in rows) > len(rows) / 2]
    if len(names) == len(wanted):
        pair, why = [0, 1], "in the order of the file"
    elif len(texts) == len(wanted):
        pair, why = texts, f"the only ones of {len(names)} with more than a word"
    elif header:
        such = ",".join(names[i] for i in sorted(sorted(size, key=lambda i: -size[i])[: len(wanted)]))
        raise DataError(f"{path} has {', '.join(names)}: say which are {' and '.join(wanted)}, such as --fields {such}")
    else:
        pair, why = [0, 1], f"in the order of the file, the first two of {len(names)}"
    if long_first:
        pair, why = sorted(pair, key=lambda i: -size[i]), "the longer of the two is the source"
    why += "; the first line names them, and is no row" if in_first_line else "" if header else "; the first line is a row"
    return Columns(usual_or(tuple(known[i] for i in pair)), why)


def usual_or(fields: tuple[str | int, ...]) -> tuple[str | int, ...] | None:
    """None for the first columns, which are read where nothing is said."""
    return None if fields == tuple(range(len(fields))) else fields
