"""Reads files with columns, .tsv or .jsonl, as pairs, labels or queries."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictInt, StrictStr

from manyheads.data.source import Corpus, FileSpec, Row
from manyheads.errors import ColumnError, RowError
from manyheads.files.text import LineReader
from manyheads.spec import did_you_mean, field, parse, quoted

HEADER_SAMPLE = 1000  # rows read to decide whether the first line is a header

NumberedLines = Iterator[tuple[int, str]]
ColumnNames = tuple[StrictStr | Annotated[StrictInt, Field(ge=0)], ...]


def is_jsonl(path: Path, first_line: str) -> bool:
    """Whether a table is .jsonl rather than .tsv, by its suffix or else by its first line."""
    suffixes = path.suffixes[-2:]
    return ".tsv" not in suffixes and (".jsonl" in suffixes or first_line.lstrip().startswith("{"))


def looks_like_header(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first line has column names, which are single words that no row repeats, above longer texts."""
    rows = [row for row in rows if len(row) >= len(first)]
    if not rows or len(set(first)) < len(first) or any(len(cell.split()) != 1 or len(cell) > 40 for cell in first):
        return False
    longer = [sum(len(row[i].split()) > 1 for row in rows) / len(rows) for i in range(len(first))]
    return max(longer) > 0.9 and not any(row[i] == cell for row in rows for i, cell in enumerate(first))


def peek(lines: NumberedLines, count: int) -> tuple[list[tuple[int, str]], NumberedLines]:
    """Returns the first lines, and an iterator over all lines, including the first."""
    first = list(islice(lines, count))
    return first, chain(first, lines)


class TableSpec(FileSpec):
    """Base of files with columns: .tsv, or .jsonl with one object per line; without a suffix the first line decides."""

    fields: ColumnNames

    @classmethod
    def file_columns(cls) -> tuple[tuple[str, ...], tuple[str, ...]]:
        required: tuple[str, ...] = cls.model_fields["fields"].default
        return required, cls.row_fields[len(required) :]

    def corpus_fields(self) -> tuple[str, ...]:
        return self.row_fields[: len(self.fields)]

    def read_rows(self, path: Path, warnings: Counter[str]) -> Iterator[Row]:
        lines = self.lines(path, warnings)
        nonblank: NumberedLines = (numbered for numbered in lines if numbered[1].strip())
        first, nonblank = peek(nonblank, 1)
        if first:
            yield from (self._from_jsonl if is_jsonl(path, first[0][1]) else self._from_tsv)(nonblank, lines)

    def _from_jsonl(self, nonblank: NumberedLines, lines: LineReader) -> Iterator[Row]:
        for number, line in nonblank:
            location = f"{lines.path}, line {number:,}"
            row = self._from_object(line, location)
            if any("\ud800" <= c <= "\udfff" for text in row for c in text):
                if lines.handle_invalid(f"{location} has half of a surrogate pair", replacement="") is None:
                    continue
                row = tuple(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in row)
            yield row

    def _from_tsv(self, nonblank: NumberedLines, lines: LineReader) -> Iterator[Row]:
        ((number, line),), nonblank = peek(nonblank, 1)
        first = line.split("\t")
        indices = self._column_indices(first, f"{lines.path}, line {number:,}")
        if any(first[index] == name for index, name in zip(indices, self.fields, strict=True) if index < len(first)):
            next(nonblank)  # a header with the names in `fields`
        elif self._uses_default_columns(first):
            (_, *sample), nonblank = peek(nonblank, HEADER_SAMPLE + 1)
            if looks_like_header(first, [line.split("\t") for _, line in sample]):
                names = ", ".join(quoted(name) for name in first)
                lines.warnings[f"skipped as a header, {names} (fields = {indices} reads it as a row)"] += 1
                next(nonblank)
        for number, line in nonblank:
            cells = line.split("\t")
            if len(cells) <= max(indices):
                expected = f"at least {max(indices) + 1}, separated by tabs{', not by commas' if ',' in line else ''}"
                raise RowError(
                    f"{lines.path}, line {number:,} has {len(cells)} columns, expected {expected}: {quoted(line)}"
                )
            yield tuple(cells[index] for index in indices)

    def _uses_default_columns(self, first: list[str]) -> bool:
        """Whether neither `fields` nor the first line names the columns."""
        return self.fields == self.corpus_fields() and not set(self.fields) & set(first)

    def _column_indices(self, first: list[str], location: str) -> list[int]:
        """Returns the columns by the names of a header, by number, or the first ones by default."""
        if self._uses_default_columns(first):
            return list(range(len(self.fields)))
        if missing := [name for name in self.fields if isinstance(name, str) and name not in first]:
            raise ColumnError(
                f"{location} has no column {quoted(missing[0])}{did_you_mean(missing[0], first)}",
                hint="columns can be given by number, from 0",
            )
        return [first.index(name) if isinstance(name, str) else name for name in self.fields]

    def _from_object(self, line: str, location: str) -> Row:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{location} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise RowError(f"{location} has {quoted(record)}, expected one object per line")
        if missing := [name for name in self.fields if name not in record]:
            raise ColumnError(
                f"{location} has no field {quoted(missing[0])}{did_you_mean(str(missing[0]), record)}",
                hint="set data.fields to the names in the file",
            )
        columns = zip(self.fields, self.corpus_fields(), strict=True)
        return tuple(self._value(record[column], name, f"{location}, {column}") for column, name in columns)

    def _value(self, value: Any, name: str, location: str) -> str:
        if self._is_id(name) and (type(value) is int or (name == "label" and isinstance(value, bool))):
            return str(value).lower()
        if not isinstance(value, str):
            raise RowError(f"{location} has {quoted(value)}, expected a string")
        return value

    def _is_id(self, name: str) -> bool:
        """Whether the field is a label or an id, so that an integer is read as text."""
        return name in ("label", "id")


def _columns(*names: str, optional: str = "") -> Any:
    meaning = "columns, by name (header of a .tsv, keys of a .jsonl) or by number from 0"
    meaning += f"; optional third: {optional}" if optional else ""
    return field(names, meaning, strict=False, min_length=len(names), max_length=len(names) + bool(optional))


class PairsSpec(TableSpec, kind="pairs"):
    """Source and target, such as a sentence and its translation, from a .tsv or .jsonl file"""

    row_fields: ClassVar[tuple[str, ...]] = ("source", "target", "alignment")
    unit: ClassVar[str] = "pairs"
    fields: ColumnNames = _columns("source", "target", optional="word alignment, 0-0 1-2, for guided attention")


class LabelsSpec(TableSpec, kind="labels"):
    """Texts and the class of each, from a .tsv or .jsonl file"""

    row_fields: ClassVar[tuple[str, ...]] = ("text", "label")
    unit: ClassVar[str] = "labelled texts"
    fields: ColumnNames = _columns("text", "label")


class DocumentsSpec(TableSpec):
    """Documents by id, for queries that refer to one."""

    row_fields: ClassVar[tuple[str, ...]] = ("id", "text")
    unit: ClassVar[str] = "documents"
    fields: ColumnNames = _columns("id", "text")


class QueriesSpec(TableSpec, kind="queries"):
    """Queries and the document that each should retrieve, from a .tsv or .jsonl file

    With `documents`, the second column is the id of a document, and a query is evaluated against all documents of
    that file.
    """

    row_fields: ClassVar[tuple[str, ...]] = ("query", "document")
    unit: ClassVar[str] = "queries"
    fields: ColumnNames = _columns("query", "document")
    documents: str | None = field(None, "file of all documents, if queries refer to them by id", min_length=1)
    document_fields: ColumnNames = _columns("id", "text")

    def join(self, corpus: Corpus) -> Corpus:
        if self.documents is None:
            return corpus
        shared = {"encoding_errors": self.encoding_errors, "max_line_length": self.max_line_length}
        spec = parse(DocumentsSpec, {"path": self.documents, "fields": self.document_fields} | shared)
        rows = spec._read(self.documents, Counter())
        documents: dict[str, str] = dict(rows)
        if len(documents) < len(rows):
            repeated = Counter(name for name, _ in rows).most_common(1)[0][0]
            raise RowError(f"{self.documents} has two documents with the id {quoted(repeated)}")
        if missing := [name for rows in corpus.splits.values() for _, name in rows if name not in documents]:
            raise RowError(f"{self.path} names the document {quoted(missing[0])}, and {self.documents} has no such id")
        splits: Any = {
            split: [(query, documents[name]) for query, name in rows] for split, rows in corpus.splits.items()
        }
        return replace(
            corpus,
            **splits,
            description=f"{corpus.description}; {len(documents):,} documents",
            candidates=tuple(documents.values()),
        )

    def _is_id(self, name: str) -> bool:
        return self.documents is not None and name == "document"
