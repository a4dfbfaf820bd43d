"""Reads the records of tables, .csv, .tsv, .jsonl or .parquet, and detects delimiter, quotes and header."""

from __future__ import annotations

import csv
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from manyheads.errors import DataFileError, DataSizeError, EncodingError, RowError, needs_extra
from manyheads.files.read import no_duplicate_keys, open_regular
from manyheads.files.text import LineReader, check_plausible_size, check_rereadable
from manyheads.spec import quote

SAMPLE_ROWS = 1000  # rows from which the delimiter and the header are detected
SAMPLE_LENGTH = 1 << 25  # characters of them
DELIMITERS = {"\t": "tab", ";": "semicolon", ",": "comma"}  # the first of several that fit
JSONL, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
TABLES = (".csv", ".tsv", *JSONL, *PARQUET)
PARQUET_ROWS = 256  # rows per read
CLASS_TYPE = re.compile(r"u?int\d+|bool")  # types of parquet that a label may have, besides strings
NUMBER = re.compile(r"[-+]?\d[\d.,:/-]*%?")  # dates and times too
SEPARATOR_LINE = re.compile("sep=([\t;,])")  # the first line of a file for Excel
MAX_NAME_LENGTH, MAX_NAME_WORDS = 40, 5

Record = Any  # the cells of a line, by number, or an object, by name


def has_suffix(path: Path, *suffixes: str) -> bool:
    """Whether a file has one of these suffixes, or has it before .gz."""
    uncompressed = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return uncompressed.suffix.lower() in suffixes


@dataclass(frozen=True)
class Dialect:
    """How a delimited file is written, as far as the user says it; None is decided by the file."""

    delimiter: str | None = None
    quotes: bool | None = None
    header: bool | None = None
    names: tuple[str, ...] = ()  # a first line with one of them is a header


class Table(ABC):
    """A file of records. `names` are its columns, or their numbers if they have no names."""

    unit = "line"  # what records are numbered by
    has_names = True
    header = False  # whether the first line has the names
    names: Sequence[str] = ()
    delimiter_note = ""  # which character separates the columns, if one does

    def __init__(self, lines: LineReader) -> None:
        self.lines = lines

    @abstractmethod
    def records(self, columns: Sequence[str | int] | None = None) -> Iterator[tuple[int, Record]]:
        """Yields the records, each with the number of its first line; other columns may be left out."""

    def notes(self) -> Iterator[str]:
        """Yields what was detected about the file, and how to override it."""
        yield from ()

    def locate(self, number: int) -> str:
        return f"{self.lines.path}, {self.unit} {number:,}"


def open_table(lines: LineReader, dialect: Dialect) -> Table | None:
    """Returns the table in a file, by its suffix or else by its first line; None if the file is blank."""
    path = lines.path
    check_rereadable(path)
    if has_suffix(path, *PARQUET):
        return ParquetTable(lines)
    # what is wrong with a line is counted once, when its record is read
    quiet_lines = replace(lines, warnings=Counter())
    first = next((line for _, line in quiet_lines if line.strip()), None)
    if first is None:
        for _ in lines:  # counts what is wrong with its lines
            pass
        return None
    if has_suffix(path, *JSONL) or (not has_suffix(path, ".tsv", ".csv") and first.lstrip().startswith("{")):
        return JsonLinesTable(lines, quiet_lines)
    return DelimitedTable(lines, quiet_lines, dialect)


# ----------------------------------------------------------------------------------------------------- .csv and .tsv


class DelimitedTable(Table):
    """Lines of cells, separated by tabs, commas or semicolons, and quoted by the rules of Python's csv or not."""

    def __init__(self, lines: LineReader, quiet_lines: LineReader, dialect: Dialect) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), lines.max_length))
        sample = tuple(first_items(line for _, line in quiet_lines))
        if separator := SEPARATOR_LINE.fullmatch(sample[0]):
            lines, quiet_lines = replace(lines, skip=1), replace(quiet_lines, skip=1)
        super().__init__(lines)
        self.dialect, self.no_quotes_reason = dialect, ""
        self.delimiter = dialect.delimiter or (separator[1] if separator else detect_delimiter(lines.path, sample))
        self.delimiter_note = f", separated by {DELIMITERS[self.delimiter]}s"
        self.quotes = self._has_quotes(quiet_lines) if dialect.quotes is None else dialect.quotes
        records = (cells for _, cells in self._parse(quiet_lines, quotes=self.quotes))
        first, *rows = tuple(first_items(records)) or [[]]
        self.num_columns = len(first)
        self.header = self.has_names = (
            dialect.header if dialect.header is not None else is_header(first, rows, dialect.names)
        )
        self.names = first if self.header else [str(i) for i in range(len(first))]

    def records(self, columns: Sequence[str | int] | None = None) -> Iterator[tuple[int, Record]]:
        records = self._parse(self.lines, quotes=self.quotes)
        if self.header:
            next(records, None)
        for number, cells in records:
            if len(cells) != self.num_columns:
                like = "as in the header" if self.header else "as in the first line"
                others = [
                    name
                    for delimiter, name in DELIMITERS.items()
                    if delimiter != self.delimiter and delimiter in "".join(cells)
                ]
                not_by = f", not by {others[0]}s" if len(cells) == 1 and others else ""
                expected = f"{self.num_columns} {like}{self.delimiter_note}{not_by}"
                line = quote(self.delimiter.join(cells))
                raise RowError(f"{self.locate(number)} has {len(cells)} columns, expected {expected}: {line}")
            yield number, cells

    def notes(self) -> Iterator[str]:
        quotes = ", with quoted cells" if self.quotes else ""
        yield f"{DELIMITERS[self.delimiter]}-separated{quotes}"
        if self.no_quotes_reason:
            yield f"quotes are read as text, because {self.no_quotes_reason} (quotes = true reads quoted cells)"
        if self.dialect.header is None:
            line, other = ("a header", "false") if self.header else ("a row", "true")
            yield f"the first line is {line} (header = {other} overrides it)"

    def _parse(self, lines: LineReader, *, quotes: bool) -> Iterator[tuple[int, list[str]]]:
        """Yields the cells of every record that is not blank, with the line where it starts."""
        records = (
            RecordReader(lines, self.delimiter)
            if quotes
            else ((number, line.split(self.delimiter)) for number, line in lines)
        )
        return ((number, cells) for number, cells in records if any(cell and not cell.isspace() for cell in cells))

    def _has_quotes(self, quiet_lines: LineReader) -> bool:
        """Whether the file is written with csv's quotes; if not, and a cell begins with a quote, says why.

        A file of which csv makes no sense is read without quotes if all its lines then have equally many columns.
        """
        opening = re.compile(f'(?:^|{self.delimiter})"')
        unneeded_quotes = re.compile(f'(?:^|{self.delimiter})"[^"{self.delimiter}]+"(?={self.delimiter}|$)')
        counts = Counter[str]()
        for _, line in quiet_lines:
            counts["lines"] += 1
            if '"' in line:
                counts["opening"] += bool(opening.search(line))
                counts["unneeded_quotes"] += bool(unneeded_quotes.search(line))
        if not counts["opening"]:
            return False
        try:
            for _ in RecordReader(quiet_lines, self.delimiter):
                pass
        except (RowError, DataSizeError) as error:
            if len({len(cells) for _, cells in self._parse(quiet_lines, quotes=False)}) > 1:
                raise
            self.no_quotes_reason = error.message.removeprefix(f"{quiet_lines.path}, ")
            return False
        # a program quotes all texts, or those that contain a delimiter, a quote or a line break
        if self.delimiter == "\t" and 0 < 2 * counts["unneeded_quotes"] <= counts["lines"]:
            self.no_quotes_reason = (
                f"{counts['unneeded_quotes']:,} of {counts['lines']:,} lines have quotes that no cell needs"
            )
            return False
        return True


class RecordReader:
    """The records of a delimited file by the strict rules of Python's csv; one may continue on further lines."""

    def __init__(self, lines: LineReader, delimiter: str) -> None:
        self.lines, self.delimiter = lines, delimiter
        self.record: list[tuple[int, str]] = []  # the lines of the record that is being read

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        try:
            for cells in csv.reader(self._feed(), delimiter=self.delimiter, strict=True):
                yield self.record[0][0], cells
                self.record = []
        except csv.Error as error:
            number = self._opening_line()
            unclosed = "unexpected end" in str(error)
            problem = "a quote that is not closed" if unclosed else "a quoted cell that continues after its quote"
            raise RowError(
                f"{self.lines.path}, line {number:,} has {problem}",
                hint="quotes = false reads quotes as text",
            ) from None

    def _feed(self) -> Iterator[str]:
        length = 0
        for number, line in self.lines:
            length = len(line) + (length + 1 if self.record else 0)
            self.record.append((number, line))
            if length > self.lines.max_length:
                raise DataSizeError(
                    f"{self.lines.path}, line {self._opening_line():,} begins a cell in quotes of more than "
                    f"{self.lines.max_length:,} characters",
                    hint="quotes = false reads quotes as text",
                )
            yield line + "\n"

    def _opening_line(self) -> int:
        """Returns the line of the record where the quote opens that is open at its end."""
        opening_line, is_open = self.record[0][0], False
        for number, line in self.record:
            for _ in range(line.replace('""', "").count('"')):  # two are an escape, or an empty cell
                is_open = not is_open
                opening_line = number if is_open else opening_line
        return opening_line


def first_items(items: Iterable[Any], max_items: int = SAMPLE_ROWS + 1) -> Iterator[Any]:
    """Yields the first lines or records, fewer than `max_items` if they are long."""
    length = 0
    for item in islice(items, max_items):
        yield item
        length += len(item) if isinstance(item, str) else sum(map(len, item))
        if length > SAMPLE_LENGTH:
            return


def detect_delimiter(path: Path, lines: Sequence[str]) -> str:
    """Returns the delimiter by which most lines have as many columns as the first, at least two; otherwise a comma.

    In a .tsv it is a tab, unless no line has one and all lines have as many columns by another delimiter.
    """
    is_tsv = has_suffix(path, ".tsv")
    if is_tsv and any("\t" in line for line in lines):
        return "\t"
    agreement = {delimiter: column_agreement(lines, delimiter) for delimiter in DELIMITERS}
    best = max(agreement, key=agreement.__getitem__)
    if is_tsv:
        return best if agreement[best] == 1 else "\t"
    return best if agreement[best] > 0.5 else ","


def column_agreement(lines: Sequence[str], delimiter: str) -> float:
    """Returns the fraction of records with as many columns as the first; 0 if that has one column."""
    fractions = []
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        records = csv.reader((line + "\n" for line in lines), delimiter=delimiter, quoting=quoting)
        try:
            counts = [len(cells) for cells in records if any(cell and not cell.isspace() for cell in cells)]
        except csv.Error:  # a quote that is not closed makes a cell of all that follows
            counts = []
        fractions.append(counts.count(counts[0]) / len(counts) if counts and counts[0] > 1 else 0.0)
    return max(fractions)


def is_header(first: Sequence[str], rows: Sequence[Sequence[str]], names: Iterable[str]) -> bool:
    """Whether the first line has column names: one of `names`, or cells that no row below it could have.

    No row has one of its cells in the same column, and one column shows that it is not a row: numbers below a cell that
    is none, values that all occur again below one that does not, or texts of several words below a single word.
    """
    if set(names) & set(first):
        return True
    rows = [row for row in rows if len(row) == len(first)]
    could_be_names = all(len(cell) <= MAX_NAME_LENGTH and len(cell.split()) <= MAX_NAME_WORDS for cell in first)
    if not rows or len(set(first)) < len(first) or not could_be_names:
        return False
    columns = list(zip(*rows, strict=True))
    if any(cell in column for cell, column in zip(first, columns, strict=True)):
        return False
    numbers = [is_number_column(column) for column in columns]
    if any(is_number and NUMBER.fullmatch(cell.strip()) for cell, is_number in zip(first, numbers, strict=True)):
        return False
    words = all(len(cell.split()) == 1 and not cell.rstrip().endswith((".", "!", "…", '"')) for cell in first)
    return any(
        (is_number and cell.strip()) or repeats(column) or (words and is_text_column(column))
        for cell, column, is_number in zip(first, columns, numbers, strict=True)
    )


def is_number_column(column: Sequence[str]) -> bool:
    cells = [cell.strip() for cell in column if cell.strip()]
    return len(cells) > 2 and all(NUMBER.fullmatch(cell) for cell in cells)


def repeats(column: Sequence[str]) -> bool:
    """Whether every value occurs at least twice, as classes do."""
    counts = Counter(cell for cell in column if cell.strip())
    return len(column) > 4 and bool(counts) and min(counts.values()) > 1 and 2 * len(counts) < len(column)


def is_text_column(column: Sequence[str]) -> bool:
    return sum(len(cell.split()) > 1 for cell in column) > 0.9 * len(column)


# ------------------------------------------------------------------------------------------------ .jsonl and .parquet


def parse_json_line(line: str, location: str) -> Any:
    """Parses a line of JSON; `location` names it in an error."""
    try:
        return json.loads(line, object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{location} is not JSON: {error}") from None


class JsonLinesTable(Table):
    """One JSON object per line. `names` are the keys of the first one."""

    def __init__(self, lines: LineReader, quiet_lines: LineReader) -> None:
        super().__init__(lines)
        self.names = list(next(self._parse(quiet_lines))[1])

    def records(self, columns: Sequence[str | int] | None = None) -> Iterator[tuple[int, Record]]:
        return self._parse(self.lines)

    def _parse(self, lines: LineReader) -> Iterator[tuple[int, Record]]:
        for number, line in lines:
            if not line.strip():
                continue
            record = parse_json_line(line, self.locate(number))
            if not isinstance(record, dict):
                raise RowError(
                    f"{self.locate(number)} has {quote(record)}, expected one object per line",
                    hint="write a JSON array as JSON lines",
                )
            yield number, record


class ParquetTable(Table):
    """The columns of a parquet file, read with pyarrow."""

    unit = "row"

    def __init__(self, lines: LineReader) -> None:
        super().__init__(lines)
        with self._open() as file:
            groups = (file.metadata.row_group(i).to_dict() for i in range(file.metadata.num_row_groups))
            schema, size = file.schema_arrow, sum(group["total_byte_size"] for group in groups)
        check_plausible_size(lines.path, size, compressed_size=lines.path.stat().st_size)
        self.names = schema.names
        self.text_columns = [column.name for column in schema if is_text_type(str(column.type))]
        self.class_columns = [column.name for column in schema if CLASS_TYPE.fullmatch(str(column.type))]

    def records(self, columns: Sequence[str | int] | None = None) -> Iterator[tuple[int, Record]]:
        selected_columns = [*self.text_columns, *self.class_columns] if columns is None else columns
        names = [name for name in self.names if name in selected_columns]
        number, size, file_size = 0, 0, self.lines.path.stat().st_size
        with self._open(read_dictionary=self.text_columns) as file:
            for batch in file.iter_batches(PARQUET_ROWS, columns=names):
                for values in zip(*(batch.column(name) for name in names), strict=True):
                    number += 1
                    cells = [value.as_py() for value in values]
                    lengths = [len(cell) for cell in cells if isinstance(cell, str)]
                    if max(lengths, default=0) > self.lines.max_length:
                        raise self.lines.too_long(self.locate(number))
                    size += sum(lengths)
                    check_plausible_size(self.lines.path, size, compressed_size=file_size)
                    yield number, dict(zip(names, cells, strict=True))

    @contextmanager
    def _open(self, **options: Any) -> Iterator[Any]:
        path = self.lines.path
        with needs_extra(f"{path} needs pyarrow", "parquet"):
            import pyarrow
            from pyarrow import parquet
        try:
            with open_regular(path) as raw, parquet.ParquetFile(raw, **options) as file:
                yield file
        except UnicodeDecodeError as error:
            raise EncodingError(f"{path} has a text that is not UTF-8: {error}") from None
        except OSError as error:
            raise DataFileError(f"cannot read {path}: {error.strerror or error}") from None
        except pyarrow.ArrowException as error:
            raise DataFileError(f"{path} is not a parquet file, or is broken: {error}") from None


def is_text_type(name: str) -> bool:
    return "string" in name and "<" not in name.replace("dictionary<", "", 1)
