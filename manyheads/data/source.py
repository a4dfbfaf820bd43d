"""Data sources: the interface of every kind of data, and what all kinds read from a user's files share."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from manyheads.errors import EmptyDataError, IncompatibleError, one_line
from manyheads.files.text import LineReader, check_rereadable
from manyheads.spec import Part, field

# One value per field: a text or a label (str), an image (numpy array), arcs (positions), relations (names).
Row = tuple[Any, ...]
NON_TEXT_FIELDS = ("label", "image", "arcs", "relations")  # fields that are not tokenized

MAX_VALIDATION_ROWS = 2000  # if they are split from the training file


@dataclass(frozen=True)
class Corpus:
    """Rows by split, each with one value per field; the test split may be empty."""

    fields: tuple[str, ...]
    train: Sequence[Row]
    validation: Sequence[Row]
    test: Sequence[Row]
    description: str
    candidates: Sequence[str] = ()  # all documents of a retrieval corpus, if there are more than the rows contain
    classes: tuple[str, ...] = ()  # if they are known without reading all rows

    @property
    def splits(self) -> dict[str, Sequence[Row]]:
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def select(self, rows: Iterable[Row], names: Iterable[str]) -> list[Row]:
        """Returns these fields of rows."""
        columns = [self.fields.index(name) for name in names]
        return [tuple(row[i] for i in columns) for row in rows]

    def labels(self) -> tuple[str, ...]:
        """Returns the classes of all splits, sorted by name; empty if there is no field "label"."""
        return self.classes or (tuple(sorted(set(self._column("label")))) if "label" in self.fields else ())

    def documents(self, name: str = "document") -> tuple[str, ...]:
        """Returns all documents a query can retrieve, each once: the candidates, or this field of all rows."""
        return tuple(dict.fromkeys(self.candidates or self._column(name)))

    def _column(self, name: str) -> Iterator[Any]:
        index = self.fields.index(name)
        return (row[index] for rows in self.splits.values() for row in rows)


class LazyRows(Sequence[Row]):
    """Rows that are computed when they are read: row i is a pure function of i."""

    def __init__(self, row: Callable[[int], Row], count: int) -> None:
        self.row, self.size = row, count

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        indices = range(self.size)[index]
        return [self.row(i) for i in indices] if isinstance(indices, range) else self.row(indices)


class DataSpec(Part, slot="data"):
    """Where the rows come from. Only `load` and `load_file` open files."""

    closed_vocabulary: ClassVar[bool] = False  # whether there are few distinct words, so that each is one token

    @property
    def source_path(self) -> str | None:
        """The user's file that training rows are read from; None for data that is generated, built in or tokenized."""
        return None

    @property
    def tokenized_folder(self) -> Path | None:
        """The folder of `manyheads data prepare` that holds the rows as ids; None for every other kind."""
        return None

    @classmethod
    def file_columns(cls, path: str | Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the required and the optional columns of a file; both empty if such a file has no columns."""
        return (), ()

    @abstractmethod
    def load(self) -> Corpus:
        """Reads all rows, by split."""

    def for_file(self, path: str) -> Self:
        """The settings that read another file of the same kind, which may have another layout."""
        return self

    def load_file(self, path: str) -> Corpus:
        """Reads another file in the same format, with all rows as the validation split."""
        raise IncompatibleError(
            f"{self.kind} is not read from a file, so {path} cannot be read in its format", ("data",)
        )


class FileSpec(DataSpec):
    """What all kinds of data in a user's own file share."""

    row_fields: ClassVar[tuple[str, ...]]  # all fields that a row can have
    unit: ClassVar[str]  # plural noun for the rows

    path: str = field(..., "training file; .gz is decompressed as it is read", min_length=1)
    validation: str | None = field(
        None, "validation file; without one, rows are split from the training file", min_length=1
    )
    test: str | None = field(None, "test file", min_length=1)
    validation_fraction: float = field(
        0.05, f"fraction of the training file used for validation, 1 to {MAX_VALIDATION_ROWS:,} rows", gt=0, le=0.5
    )
    encoding_errors: Literal["strict", "replace", "skip"] = field(
        "strict", "lines with a NUL or not in UTF-8: stop with an error, replace the bytes by �, or skip the line"
    )
    max_line_length: int = field(1 << 24, "characters per line; a longer line is an error", ge=1, le=1 << 28)

    @property
    def source_path(self) -> str:
        return self.path

    @abstractmethod
    def read_rows(self, path: Path, warnings: Counter[str]) -> Iterator[Row]:
        """Yields the rows of one file; `warnings` counts lines that were changed or left out."""

    def load(self) -> Corpus:
        warnings: Counter[str] = Counter()
        train, validation, test = (
            self._read(path, warnings) if path else [] for path in (self.path, self.validation, self.test)
        )
        if not self.validation:
            train, validation = self.split(train)
        counts = row_counts(train, validation, test, self.unit)
        paths = {"validation": self.validation, "test": self.test}
        notes = [
            f"{name} and training file are the same"
            for name, path in paths.items()
            if path and same_file(self.path, path)
        ]
        return self._corpus(train, validation, test, (f"{self.path}: {counts}", *messages(warnings), *notes))

    def load_file(self, path: str) -> Corpus:
        warnings: Counter[str] = Counter()
        rows = self._read(path, warnings)
        return self._corpus([], rows, [], (f"{path}: {len(rows):,} {self.unit}", *messages(warnings)))

    def _corpus(self, train: list[Row], validation: list[Row], test: list[Row], description: Iterable[str]) -> Corpus:
        corpus = self.join(Corpus(self.corpus_fields(), train, validation, test, ""))
        return replace(corpus, description=one_line("; ".join(filter(None, (*description, corpus.description)))))

    def corpus_fields(self) -> tuple[str, ...]:
        """Returns the fields of the rows under these settings."""
        return self.row_fields

    def join(self, corpus: Corpus) -> Corpus:
        """Joins the rows with the contents of other files; the description is what there is to add."""
        return corpus

    def lines(self, path: Path, warnings: Counter[str]) -> LineReader:
        return LineReader(path, self.encoding_errors, self.max_line_length, warnings)

    def _read(self, path: str, warnings: Counter[str]) -> list[Row]:
        check_rereadable(Path(path))
        rows = list(self.read_rows(Path(path), warnings))
        if blank := sum(any(isinstance(text, str) and not text.strip() for text in row) for row in rows):
            warnings["with an empty text or class"] += blank
        if not rows:
            raise EmptyDataError("; ".join((f"{path} has no {self.unit}: it is empty or blank", *messages(warnings))))
        return rows

    def split(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        """Splits rows by the hash of their input, independently of their order; equal inputs stay together."""
        remaining = min(max(1, round(len(rows) * self.validation_fraction)), MAX_VALIDATION_ROWS)
        keys = [self.split_key(row) for row in rows]
        groups = Counter(keys)
        held_out: set[str | bytes] = set()
        for key in sorted(groups, key=digest):
            if groups[key] <= remaining:
                held_out.add(key)
                remaining -= groups[key]
            if not remaining:
                break
        if not held_out and len(groups) > 1:
            held_out = {min(groups, key=lambda key: (groups[key], digest(key)))}
        if not held_out or len(held_out) == len(groups):
            raise EmptyDataError(
                f"{self.path} has {len(rows):,} {self.unit}, {len(groups):,} of them distinct: too few to split",
                hint="set data.validation to a validation file",
            )
        pairs = list(zip(rows, keys, strict=True))
        return [row for row, key in pairs if key not in held_out], [row for row, key in pairs if key in held_out]

    def split_key(self, row: Row) -> str | bytes:
        """Returns the input of a row; rows with the same input are in the same split."""
        text: str = row[0]
        return text


def row_counts(train: Sequence[Row], validation: Sequence[Row], test: Sequence[Row], unit: str = "rows") -> str:
    return f"{len(train):,} training, {len(validation):,} validation and {len(test):,} test {unit}"


def messages(warnings: Counter[str]) -> list[str]:
    """Returns what was decided about a file, counted 0 times, and the number of lines with each warning."""
    return [
        f"{count:,} line{'s' * (count != 1)} {warning}" if count else warning for warning, count in warnings.items()
    ]


def digest(text: str | bytes) -> bytes:
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=16).digest()


def same_file(path: str, other: str) -> bool:
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)
