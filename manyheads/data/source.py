"""What samples there are: the user's own files of text, read with care, and what every other source hands over."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from dataclasses import field as made
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, overload

from pydantic import Field, StrictInt, StrictStr

from manyheads.spec import Part, field, nearest, one_line, parse, quoted

Row = tuple[Any, ...]  # a text by field; a label is a text too, a picture a numpy array, arcs a tuple of places, relations of names
NO_TEXT = ("label", "picture", "arcs", "relations")  # fields that no tokenizer reads

LARGEST_FILE = 1 << 36  # bytes, once unpacked
LARGEST_RATIO = 200  # bytes unpacked for each one packed; text needs 3 to 20
MOST_HELD_OUT = 2000
LOOKED_AT = 1000  # rows, to see whether the first line names their columns


class DataError(ValueError):
    """Data that cannot be used: where, what was found, what would work."""

    exit_code = 3

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True)
class Corpus:
    """Samples by split, each a row of as many values as there are fields; test may be empty."""

    fields: tuple[str, ...]
    train: Sequence[Row]
    validation: Sequence[Row]
    test: Sequence[Row]
    about: str
    pool: Sequence[str] = ()  # every document there is to be found, where that is more than the rows name

    @property
    def splits(self) -> dict[str, Sequence[Row]]:
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def labels(self) -> tuple[str, ...]:
        """The classes there are to learn, in the order of their names; none where no field is a label."""
        if "label" not in self.fields:
            return ()
        place = self.fields.index("label")
        return tuple(sorted({row[place] for rows in self.splits.values() for row in rows}))

    def documents(self, name: str = "document") -> tuple[str, ...]:
        """All that a query could find, each text once: the pool, or what the rows of all splits have in this field."""
        place = self.fields.index(name)
        return tuple(dict.fromkeys(self.pool or (row[place] for rows in self.splits.values() for row in rows)))


class Made(Sequence[Row]):
    """Rows that are made when they are asked for: row i is a pure function of i."""

    def __init__(self, make: Callable[[int], Row], count: int) -> None:
        self.make, self.size = make, count

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.make(i) for i in range(self.size)[index]]
        return self.make(range(self.size)[index])


class DataSpec(Part, slot="data"):
    """Where the samples come from."""

    @property
    def prepared(self) -> Path | None:
        """The folder that holds the rows as ids already; none where they are texts."""
        return None

    @abstractmethod
    def load(self) -> Corpus:
        raise NotImplementedError


class FileSpec(DataSpec):
    """What all files of the user's own share."""

    names: ClassVar[tuple[str, ...]]
    each: ClassVar[str]  # what a row is called

    path: str = field(..., "the file to learn from; .gz is unpacked as it is read", min_length=1)
    validation: str | None = field(None, "a file of its own to validate with; otherwise a share is held out", min_length=1)
    test: str | None = field(None, "a file of its own to test with, at the very end", min_length=1)
    held_out: float = field(0.05, f"the share held out where there is no validation file: 1 to {MOST_HELD_OUT:,} rows", gt=0, le=0.5)
    encoding_errors: Literal["stop", "replace", "skip"] = field("stop", "a line that is not UTF-8: stop, write � for it, or skip the line")
    longest_line: int = field(1 << 24, "characters in one line; more is taken for a mistake", ge=1, le=1 << 28)

    @abstractmethod
    def rows(self, path: Path, faults: Counter[str]) -> Iterator[Row]:
        raise NotImplementedError

    def load(self) -> Corpus:
        faults: Counter[str] = Counter()
        train, validation, test = (self._read(path, faults) if path else [] for path in (self.path, self.validation, self.test))
        if not self.validation:
            train, validation = self.split(train)
        counts = f"{len(train):,} {self.each} to learn from, {len(validation):,} to validate, {len(test):,} to test"
        about = "; ".join((f"{self.path}: {counts}", *(f"{count:,} lines {fault}" for fault, count in faults.items())))
        return self.joined(Corpus(self.columns(), train, validation, test, one_line(about)))

    def columns(self) -> tuple[str, ...]:
        """What a row holds."""
        return self.names

    def other(self, path: str) -> Corpus:
        """Another file of the same form: all of it to validate, nothing to learn from."""
        faults: Counter[str] = Counter()
        rows = self._read(path, faults)
        about = "; ".join((f"{path}: {len(rows):,} {self.each}", *(f"{count:,} lines {fault}" for fault, count in faults.items())))
        return self.joined(Corpus(self.columns(), [], rows, [], one_line(about)))

    def joined(self, corpus: Corpus) -> Corpus:
        """The rows together with what stands in other files."""
        return corpus

    def _read(self, path: str, faults: Counter[str]) -> list[Row]:
        found = list(self.rows(Path(path), faults))
        if not found:
            left = "".join(f", and {count:,} lines {fault}" for fault, count in faults.items())
            raise DataError(f"{path} holds no {self.each}: it is empty or blank{left}")
        return found

    def split(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        """Some rows held out by the hash of what is given (the first field), so neither order nor a repeated row matters."""
        wanted = min(max(1, round(len(rows) * self.held_out)), MOST_HELD_OUT)
        given = [self.given(row) for row in rows]
        groups = Counter(given)
        held: set[str | bytes] = set()
        for text in sorted(groups, key=digest):
            if groups[text] <= wanted:
                held.add(text)
                wanted -= groups[text]
            if not wanted:
                break
        if not held and len(groups) > 1:
            held = {min(groups, key=lambda text: (groups[text], digest(text)))}
        if not held or len(held) == len(groups):
            counts = f"{len(rows):,} {self.each}, {len(groups):,} of them different"
            raise DataError(f"{self.path} has {counts}: too few to hold one out; name a file for validation")
        pairs = list(zip(rows, given, strict=True))
        return [row for row, text in pairs if text not in held], [row for row, text in pairs if text in held]

    def given(self, row: Row) -> str | bytes:
        """What a model is given of a row, of which none is to be in two splits."""
        text: str = row[0]
        return text


def digest(text: str | bytes) -> bytes:
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=16).digest()


@contextmanager
def unpacked(path: Path, already: BufferedReader | None = None) -> Iterator[Unpacked]:
    """The bytes of a file, or of one that is open already; a gzip file is unpacked as it is read. What goes wrong is a sentence."""
    try:
        with already or path.open("rb") as plain:
            packed = plain.peek(2)[:2] == b"\x1f\x8b"
            size = os.fstat(plain.fileno()).st_size
            with gzip.open(plain) if packed else plain as file:
                yield Unpacked(path, cast(Any, file), size if packed else 0)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a broken gzip file: {error}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


@dataclass
class Unpacked:
    """A file that is being read; `packed` is its size where it is a gzip file, otherwise 0."""

    path: Path
    file: Any
    packed: int

    def check(self, end: int, what: str = "text") -> None:
        """Refuses to be read beyond what there can be."""
        if end > LARGEST_FILE or (self.packed and end > max(1 << 20, LARGEST_RATIO * self.packed)):
            raise DataError(f"{self.path} unpacks to more than {end:,} bytes from {self.packed:,}: too many to be {what}")


@dataclass
class Lines:
    """The lines of one file, in bounded memory: CRLF and CR end a line as LF does, a byte order mark at the start is dropped.

    Each comes with its number, counted from 1. What is not UTF-8, and a NUL, stops with its place in the unpacked file.
    """

    path: Path
    errors: str
    longest: int
    faults: Counter[str] = made(default_factory=Counter)
    file: BufferedReader | None = None  # open already, such as standard input; the path is then its name
    longer: str = "raise longest_line if that is meant"  # what to do about a line that is too long,
    mended: str = "save the file as UTF-8, or set encoding_errors to 'replace' or 'skip'"  # and about one that is not text

    def __iter__(self) -> Iterator[tuple[int, str]]:
        with unpacked(self.path, self.file) as source:
            yield from self._lines(source)

    def _lines(self, source: Unpacked) -> Iterator[tuple[int, str]]:
        number = offset = 0
        while raw := source.file.readline(4 * self.longest + 3):
            end = offset + len(raw)
            source.check(end)
            if len(raw) > 4 * self.longest + 2:  # no character takes more than four bytes
                raise self._too_long(number + 1)
            if offset == 0 and raw.startswith(b"\xef\xbb\xbf"):
                offset, raw = 3, raw[3:]
            for piece in raw.removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
                number += 1
                line = self._decoded(piece, number, offset)
                offset += len(piece) + 1
                if line is not None:
                    yield number, line
            offset = end

    def _decoded(self, raw: bytes, number: int, offset: int) -> str | None:
        try:
            text, place, what = raw.decode(), raw.find(0), "holds a NUL"
        except UnicodeDecodeError as error:
            text, place, what = raw.decode(errors="replace"), error.start, f"is not UTF-8 ({raw[error.start]:#04x})"
        if len(text) > self.longest:
            raise self._too_long(number)
        if place < 0:
            return text
        return self.spoiled(text.replace("\0", "�"), f"{self.path}, line {number:,} {what} at byte {offset + place:,}")

    def _too_long(self, number: int) -> DataError:
        return DataError(f"{self.path}, line {number:,} is longer than {self.longest:,} characters; {self.longer}")

    def spoiled(self, mended: str, sentence: str) -> str | None:
        """What becomes of a line that is not text: nothing, the line mended, or the end."""
        if self.errors == "stop":
            raise DataError(f"{sentence}; {self.mended}")
        self.faults["skipped that were not UTF-8" if self.errors == "skip" else "mended that were not UTF-8"] += 1
        return None if self.errors == "skip" else mended


class TextSpec(FileSpec, kind="text"):
    """Texts from a .txt file, or from all of a folder

    A text on its own is cut, and its end held out.
    """

    names: ClassVar[tuple[str, ...]] = ("text",)
    each: ClassVar[str] = "texts"

    document: Literal["blank", "line", "file"] = field("blank", "what a text is: what stands between blank lines, each line, or each file")

    def rows(self, path: Path, faults: Counter[str]) -> Iterator[Row]:
        files = sorted(file for file in path.rglob("*") if file.name.endswith((".txt", ".txt.gz"))) if path.is_dir() else [path]
        if not files:
            raise DataError(f"{path} is a folder without any .txt or .txt.gz file")
        for file in files:
            block: list[str] = []
            for _, line in Lines(file, self.encoding_errors, self.longest_line, faults):
                if self.document != "file" and not line.strip():
                    yield from self._text(block)
                    block = []
                else:
                    block.append(line)
                if self.document == "line":
                    yield from self._text(block)
                    block = []
            yield from self._text(block)

    def _text(self, lines: list[str]) -> Iterator[Row]:
        text = "\n".join(lines)
        if text.strip():
            yield (text,)

    def split(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        if len(rows) > 1:
            return super().split(rows)
        text = rows[0][0]
        place = text.rfind("\n", 0, int(len(text) * (1 - self.held_out))) + 1 or int(len(text) * (1 - self.held_out))
        if not text[:place].strip() or not text[place:].strip():
            raise DataError(
                f"{self.path} holds one text of {len(text):,} characters: too short to hold out its end; name a validation file"
            )
        return [(text[:place],)], [(text[place:],)]


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
                at = f"{lines.path}, line {number:,}"
                raise DataError(f"{at} has {len(cells)} columns, expected at least {max(places) + 1}, separated by tabs: {quoted(line)}")
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
            raise DataError(f"{at} has no field {quoted(missing[0])}{nearest(str(missing[0]), found)}")
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
