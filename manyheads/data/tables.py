"""Reads files with columns, .csv, .tsv, .jsonl or .parquet, as pairs, labels or queries."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictInt, StrictStr

from manyheads.data.records import Dialect, Record, Table, open_table
from manyheads.data.source import Corpus, FileSpec, Row
from manyheads.errors import ColumnError, RowError
from manyheads.spec import did_you_mean, field, parse, quote

MIN_CLASS_ROWS = 5  # training rows of a class; fewer are reported
MAX_RARE = 5  # classes that are reported
INVALID = re.compile("[\0\ud800-\udfff]")

ColumnNames = tuple[StrictStr | Annotated[StrictInt, Field(ge=0)], ...]


class TableSpec(FileSpec):
    """Base of files with columns; without one of their suffixes, the first lines decide what a file is."""

    columns: ColumnNames
    delimiter: Literal[",", ";", "\t"] | None = field(
        None, "character between the columns of a .csv or .tsv; recognized by default"
    )
    quotes: bool | None = field(
        None, "whether a cell may be in quotes, as in Python's csv; by default if the whole file can be read so"
    )
    header: bool | None = field(
        None, "whether the first line has the names of the columns; decided by the lines below it by default"
    )

    @classmethod
    def file_columns(cls, path: str | Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
        required: tuple[str, ...] = cls.model_fields["columns"].default
        return required, cls.row_fields[len(required) :]

    def corpus_fields(self) -> tuple[str, ...]:
        return self.row_fields[: len(self.columns)]

    def open_table(self, path: Path, warnings: Counter[str]) -> Table | None:
        """Decides how a file is written; None if it is blank."""
        names = tuple(name for name in self.columns if isinstance(name, str)) or self.corpus_fields()
        return open_table(self.lines(path, warnings), Dialect(self.delimiter, self.quotes, self.header, names))

    def read_rows(self, path: Path, warnings: Counter[str]) -> Iterator[Row]:
        if (table := self.open_table(path, warnings)) is None:
            return
        columns = self.columns_of(table)
        for note in self._notes(table, columns):
            if note not in warnings:
                warnings[note if path == Path(self.path) else f"{path}: {note}"] = 0
        for number, record in table.records(columns):
            row = tuple(
                self._cell(record, column, name, table, number)
                for column, name in zip(columns, self.corpus_fields(), strict=True)
            )
            valid = row if all(map(is_text, row)) else self._replace_invalid(row, table, number)
            if valid is not None:
                yield valid

    def _notes(self, table: Table, columns: list[str | int]) -> Iterator[str]:
        yield from table.notes()
        names = [table.names[column] if isinstance(column, int) else column for column in columns]
        if names != [*(self.corpus_fields() if table.has_names else map(str, range(len(names))))]:
            yield f"columns {', '.join(map(quote, names))}"

    def fits(self, path: str) -> bool:
        """Whether a file can be read with these settings: it has the names in `columns`, and as many columns."""
        if not self.file_columns(path)[0] or (table := self.open_table(Path(path), Counter())) is None:
            return True
        if self.uses_default_columns(table):
            return not table.has_names and len(table.names) >= len(self.columns)
        return all(
            column < len(table.names) if isinstance(column, int) else column in table.names for column in self.columns
        )

    def uses_default_columns(self, table: Table) -> bool:
        """Whether neither `columns` nor the file names the columns, so that the first ones are read."""
        default = self.columns == self.corpus_fields() and not set(self.columns) & set(table.names)
        return default and (table.header or not table.has_names)

    def columns_of(self, table: Table) -> list[str | int]:
        """Returns the columns as keys of the table's records: by name, by number, or the first ones by default."""
        by_number = table.header or not table.has_names  # a record is a list of cells
        columns = list(range(len(self.columns))) if self.uses_default_columns(table) else self.columns
        keys = list[str | int]()
        for column in columns:
            if isinstance(column, str):
                if (count := list(table.names).count(column)) != 1:
                    raise ColumnError(
                        f"{table.locate(1)} has {count or 'no'} column{'s' * (count > 1)} {quote(column)}"
                        f"{'' if count else did_you_mean(column, table.names)}",
                        hint="set data.columns to the names in the file, or to numbers from 0",
                    )
                keys.append(list(table.names).index(column) if by_number else column)
            elif column >= len(table.names):
                description = f"{len(table.names)} columns{table.delimiter_note}"
                raise RowError(
                    f"{table.locate(1)} has {description}, expected at least {column + 1}",
                    hint="set data.delimiter if another character separates them" if table.delimiter_note else "",
                )
            else:
                keys.append(column if by_number else table.names[column])
        return keys

    def _cell(self, record: Record, column: Any, name: str, table: Table, number: int) -> str:
        if isinstance(record, dict) and column not in record:
            raise ColumnError(
                f"{table.locate(number)} has no field {quote(column)}{did_you_mean(column, record)}",
                hint="set data.columns to the names in the file",
            )
        value = record[column]
        return value if isinstance(value, str) else self._value(value, name, f"{table.locate(number)}, {column}")

    def _replace_invalid(self, row: Row, table: Table, number: int) -> Row | None:
        """Handles a NUL or half of a surrogate pair, which JSON writes as an escape, like a byte that is no text."""
        message = f"{table.locate(number)} has a NUL or half of a surrogate pair"
        lines = replace(table.lines, encoding_hint="set encoding_errors to 'replace' or 'skip'")
        if lines.handle_invalid(message, replacement="") is None:
            return None
        return tuple(
            text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "�") for text in row
        )

    def _value(self, value: Any, name: str, location: str) -> str:
        if self._is_id(name) and (type(value) is int or (name == "label" and isinstance(value, bool))):
            return str(value).lower()
        expected = "a string or an integer" if self._is_id(name) else "a string"
        raise RowError(f"{location} has {quote(value)}, expected {expected}")

    def _is_id(self, name: str) -> bool:
        """Whether the field is a label or an id, so that an integer is read as text."""
        return name in ("label", "id")


def is_text(text: str) -> bool:
    """Whether a string has neither a NUL nor half of a surrogate pair."""
    return INVALID.search(text) is None


def column_names(*names: str, optional: str = "") -> Any:
    meaning = "columns, by name (in the header, or keys of a .jsonl) or by number from 0"
    meaning += f"; optional third: {optional}" if optional else ""
    return field(names, meaning, strict=False, min_length=len(names), max_length=len(names) + bool(optional))


class PairsSpec(TableSpec, kind="pairs"):
    """Source and target, such as a sentence and its translation, from a .csv, .tsv, .jsonl or .parquet file"""

    row_fields: ClassVar[tuple[str, ...]] = ("source", "target", "alignment")
    unit: ClassVar[str] = "pairs"
    columns: ColumnNames = column_names("source", "target", optional="word alignment, 0-0 1-2, for guided attention")


class LabelsSpec(TableSpec, kind="labels"):
    """Texts and the class of each, from a .csv, .tsv, .jsonl or .parquet file"""

    row_fields: ClassVar[tuple[str, ...]] = ("text", "label")
    unit: ClassVar[str] = "labelled texts"
    columns: ColumnNames = column_names("text", "label")

    def join(self, corpus: Corpus) -> Corpus:
        return replace(corpus, description=rare_classes(corpus))


def rare_classes(corpus: Corpus) -> str:
    """Returns the names of classes with very few training rows; a mistake in the file may have made them."""
    counts = Counter(label for _, label in corpus.train)
    rare = [f"{quote(name)} {counts[name]}" for name in corpus.labels() if counts[name] < MIN_CLASS_ROWS]
    more = f" and {len(rare) - MAX_RARE:,} more" if len(rare) > MAX_RARE else ""
    return f"classes with very few training rows: {', '.join(rare[:MAX_RARE])}{more}" if rare and counts else ""


class DocumentsSpec(TableSpec):
    """Documents by id, for queries that refer to one."""

    row_fields: ClassVar[tuple[str, ...]] = ("id", "text")
    unit: ClassVar[str] = "documents"
    columns: ColumnNames = column_names("id", "text")


class QueriesSpec(TableSpec, kind="queries"):
    """Queries and the document that each should retrieve, from a .csv, .tsv, .jsonl or .parquet file

    With `documents`, the second column is the id of a document, and a query is evaluated against all documents of
    that file.
    """

    row_fields: ClassVar[tuple[str, ...]] = ("query", "document")
    unit: ClassVar[str] = "queries"
    columns: ColumnNames = column_names("query", "document")
    documents: str | None = field(None, "file of all documents, if queries refer to them by id", min_length=1)
    document_columns: ColumnNames = column_names("id", "text")

    def join(self, corpus: Corpus) -> Corpus:
        if self.documents is None:
            return corpus
        shared = {"encoding_errors": self.encoding_errors, "max_line_length": self.max_line_length}
        spec = parse(DocumentsSpec, {"path": self.documents, "columns": self.document_columns} | shared)
        rows = spec._read(self.documents, Counter())
        documents: dict[str, str] = dict(rows)
        if len(documents) < len(rows):
            repeated = Counter(name for name, _ in rows).most_common(1)[0][0]
            raise RowError(f"{self.documents} has two documents with the id {quote(repeated)}")
        if missing := [name for rows in corpus.splits.values() for _, name in rows if name not in documents]:
            raise RowError(f"{self.path} names the document {quote(missing[0])}, and {self.documents} has no such id")
        splits: Any = {
            split: [(query, documents[name]) for query, name in rows] for split, rows in corpus.splits.items()
        }
        return replace(
            corpus,
            **splits,
            description=f"{len(documents):,} documents",
            candidates=tuple(documents.values()),
        )

    def _is_id(self, name: str) -> bool:
        return self.documents is not None and name == "document"
