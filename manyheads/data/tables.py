"""Files with columns: .tsv, or .jsonl with an object a line; what stands in them as pairs, labels or queries."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictInt, StrictStr

from manyheads.data.source import Corpus, DataError, FileSpec, Lines, Row
from manyheads.spec import field, nearest, parse, quoted

LOOKED_AT = 1000  # rows, to see whether the first line names their columns

Columns = tuple[StrictStr | Annotated[StrictInt, Field(ge=0)], ...]


def form_of(path: Path, first: str) -> str:
    """What a file with columns is, by its name or else by its first line."""
    said = [name for name in (".tsv", ".jsonl") if name in path.suffixes[-2:]]
    return said[0] if said else ".jsonl" if first.lstrip().startswith("{") else ".tsv"


def names_columns(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first line looks like names: single words that never come again in their columns, above longer texts."""
    rows = [row for row in rows if len(row) >= len(first)]
    if not rows or len(set(first)) < len(first) or any(len(cell.split()) != 1 or len(cell) > 40 for cell in first):
        return False
    longer = [sum(len(row[i].split()) > 1 for row in rows) / len(rows) for i in range(len(first))]
    return max(longer) > 0.9 and not any(row[i] == cell for row in rows for i, cell in enumerate(first))


def looked_ahead(lines: Iterator[tuple[int, str]], count: int) -> tuple[list[tuple[int, str]], Iterator[tuple[int, str]]]:
    """The first of some lines, and all of them, from the first on."""
    some = list(islice(lines, count))
    return some, chain(some, lines)


class TableSpec(FileSpec):
    """What files with columns share: .tsv, or .jsonl with one object a line; a name that says neither is judged by its first line."""

    fields: Columns

    def columns(self) -> tuple[str, ...]:
        return self.names[: len(self.fields)]

    def rows(self, path: Path, faults: Counter[str]) -> Iterator[Row]:
        if path.is_dir():
            raise DataError(f"{path} is a folder, expected a .tsv or .jsonl file")
        lines = Lines(path, self.encoding_errors, self.longest_line, faults)
        filled: Iterator[tuple[int, str]] = (numbered for numbered in lines if numbered[1].strip())
        first, filled = looked_ahead(filled, 1)
        if first and form_of(path, first[0][1]) == ".jsonl":
            yield from self._from_objects(filled, lines)
        elif first:
            yield from self._from_table(filled, lines)

    def _from_objects(self, filled: Iterator[tuple[int, str]], lines: Lines) -> Iterator[Row]:
        for number, line in filled:
            at = f"{lines.path}, line {number:,}"
            row = self._from_object(line, at)
            if any("\ud800" <= c <= "\udfff" for text in row for c in text):
                mended = lines.spoiled("", f"{at} holds half a surrogate pair, which is no character")
                if mended is None:
                    continue
                row = tuple(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in row)
            yield row

    def _from_table(self, filled: Iterator[tuple[int, str]], lines: Lines) -> Iterator[Row]:
        ((number, line),), filled = looked_ahead(filled, 1)
        first = line.split("\t")
        places = self._places(first, f"{lines.path}, line {number:,}")
        if any(first[place] == name for place, name in zip(places, self.fields, strict=True) if place < len(first)):
            next(filled)  # it is the header
        elif self._unsaid(first):
            (_, *some), filled = looked_ahead(filled, LOOKED_AT + 1)
            if names_columns(first, [line.split("\t") for _, line in some]):
                said = " and ".join(quoted(name) for name in first)
                lines.faults[f"left out that name columns, {said}: fields = {places} reads them as rows"] += 1
                next(filled)
        for number, line in filled:
            cells = line.split("\t")
            if len(cells) <= max(places):
                at, by = f"{lines.path}, line {number:,}", "tabs, not by commas" if "," in line else "tabs"
                raise DataError(f"{at} has {len(cells)} columns, expected at least {max(places) + 1}, separated by {by}: {quoted(line)}")
            yield tuple(cells[place] for place in places)

    def _unsaid(self, first: list[str]) -> bool:
        """Whether nobody says which columns are meant, neither the run nor the first line."""
        return self.fields == self.columns() and not set(self.fields) & set(first)

    def _places(self, first: list[str], at: str) -> list[int]:
        """Which columns are meant: by the names of a header, by number, or the first ones where nothing was said."""
        if self._unsaid(first):
            return list(range(len(self.fields)))
        if missing := [name for name in self.fields if isinstance(name, str) and name not in first]:
            raise DataError(f"{at} has no column {quoted(missing[0])}{nearest(missing[0], first)}; columns can be given by number, from 0")
        return [first.index(name) if isinstance(name, str) else name for name in self.fields]

    def _from_object(self, line: str, at: str) -> Row:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{at} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise DataError(f"{at} holds {quoted(found)}, expected one object a line")
        if missing := [name for name in self.fields if name not in found]:
            raise DataError(f"{at} has no field {quoted(missing[0])}{nearest(str(missing[0]), found)}; data.fields says which are meant")
        return tuple(self._value(found[name], meant, f"{at}, {name}") for name, meant in zip(self.fields, self.columns(), strict=True))

    def _value(self, value: Any, name: str, at: str) -> str:
        if name == "label" and isinstance(value, int):  # true and false too
            return str(value).lower()
        if not isinstance(value, str):
            raise DataError(f"{at} holds {quoted(value)}, expected a text")
        return value


def _columns(*names: str, more: str = "") -> Any:
    meaning = f"the columns: names in the first line of a .tsv or in each object of a .jsonl, or numbers from 0{more and f'; {more}'}"
    return field(names, meaning, strict=False, min_length=len(names), max_length=len(names) + bool(more))


class PairsSpec(TableSpec, kind="pairs"):
    """Source and target, such as a sentence and its translation, from a .tsv or .jsonl file"""

    names: ClassVar[tuple[str, ...]] = ("source", "target", "alignment")
    each: ClassVar[str] = "pairs"
    fields: Columns = _columns("source", "target", more="a third is the alignment of their words, 0-0 1-2, for guided attention")


class LabelsSpec(TableSpec, kind="labels"):
    """Texts and the class of each, from a .tsv or .jsonl file"""

    names: ClassVar[tuple[str, ...]] = ("text", "label")
    each: ClassVar[str] = "texts with a label"
    fields: Columns = _columns("text", "label")


class DocumentsSpec(TableSpec):
    """Documents by their ids, for those who name one."""

    names: ClassVar[tuple[str, ...]] = ("id", "text")
    each: ClassVar[str] = "documents"
    fields: Columns = _columns("id", "text")

    def by_id(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, text in self._read(self.path, Counter()):
            if name in found:
                raise DataError(f"{self.path} has two documents with the id {quoted(name)}")
            found[name] = text
        return found

    def _value(self, value: Any, name: str, at: str) -> str:
        return str(value) if name == "id" and type(value) is int else super()._value(value, name, at)


class QueriesSpec(TableSpec, kind="queries"):
    """Queries and the document each should find, from a .tsv or .jsonl file

    With documents in a file of their own, the second column is the id of one, and each query is looked for among them all.
    """

    names: ClassVar[tuple[str, ...]] = ("query", "document")
    each: ClassVar[str] = "queries"
    fields: Columns = _columns("query", "document")
    documents: str | None = field(None, "a file of all documents, where queries name theirs by its id", min_length=1)
    document_fields: Columns = _columns("id", "text")

    def joined(self, corpus: Corpus) -> Corpus:
        if self.documents is None:
            return corpus
        shared = {"encoding_errors": self.encoding_errors, "longest_line": self.longest_line}
        found = parse(DocumentsSpec, {"path": self.documents, "fields": self.document_fields} | shared).by_id()
        if missing := [name for rows in corpus.splits.values() for _, name in rows if name not in found]:
            raise DataError(f"{self.path} asks for the document {quoted(missing[0])}, and {self.documents} has none of that id")
        splits: Any = {split: [(query, found[name]) for query, name in rows] for split, rows in corpus.splits.items()}
        return replace(corpus, **splits, about=f"{corpus.about}; {len(found):,} documents", pool=tuple(found.values()))

    def _value(self, value: Any, name: str, at: str) -> str:
        an_id = self.documents is not None and name == "document"
        return str(value) if an_id and type(value) is int else super()._value(value, name, at)
