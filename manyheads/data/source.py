"""What samples there are: the user's own files of text, read with care, and what every other source hands over."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as made
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, overload

from manyheads.spec import Part, field, one_line

Row = tuple[Any, ...]  # a text by field; a label is a text too, a picture a numpy array, arcs a tuple of places, relations of names
NO_TEXT = ("label", "picture", "arcs", "relations")  # fields that no tokenizer reads

LARGEST_FILE = 1 << 36  # bytes, once unpacked
LARGEST_RATIO = 200  # bytes unpacked for each one packed; text needs 3 to 20
MOST_HELD_OUT = 2000


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
        said = [f"{count:,} lines {fault}" for fault, count in faults.items()]
        for what, other in (("validate", self.validation), ("test", self.test)):
            if other and same_file(self.path, other):
                said.append(f"those to {what} are the same that are learned from")
        about = "; ".join((f"{self.path}: {counts}", *said))
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
        check_again(Path(path))
        found = list(self.rows(Path(path), faults))
        if blank := sum(any(isinstance(text, str) and not text.strip() for text in row) for row in found):
            faults["with a text that is empty"] += blank
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


def check_again(path: Path) -> None:
    """Refuses what gives its bytes only once."""
    if path.is_fifo() or path.is_socket() or path.is_char_device():
        raise DataError(f"{path} is no file but a stream, and data are read more than once: save it as a file")


def same_file(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


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
