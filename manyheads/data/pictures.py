"""Pictures of the user's own: idx files, as MNIST has them, and tables of pixels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isqrt, prod
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from manyheads.data.source import Corpus, DataError, FileSpec, Lines, Row, Unpacked, unpacked
from manyheads.spec import field, quoted

SORTS = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}  # of numbers in an idx file
MOST_BYTES = 1 << 33  # of pictures, which are held in memory
AT_ONCE = 1 << 24

Array = NDArray[Any]


class PicturesSpec(FileSpec, kind="pictures"):
    """Pictures and their classes, from idx files as MNIST has them (-idx3-ubyte), or a .csv with a picture a line

    An idx file holds count × height × width numbers, or count × colours × height × width; its classes stand in a file of their own. A
    line of a .csv holds the pixels, one row of the picture after the other, and the class.
    """

    names: ClassVar[tuple[str, ...]] = ("picture", "label")
    each: ClassVar[str] = "pictures"

    labels: str | None = field(None, "the idx file with the classes of these pictures", min_length=1)
    validation_labels: str | None = field(None, "the same for the validation file", min_length=1)
    test_labels: str | None = field(None, "the same for the test file", min_length=1)
    label: Literal["first", "last", "none"] = field("last", "which column of a .csv is the class")
    height: int | None = field(None, "rows in a picture of a .csv; as many as columns if not given", ge=1, le=1 << 16)
    channels: int = field(1, "numbers in a point of a .csv: all pixels of one come before those of the next", ge=1, le=1024)
    white: float | None = field(
        None, "the number by which all are divided; the greatest there is to learn from, 1 at least, if not given", gt=0
    )

    def load(self) -> Corpus:
        for labels, path, name in ((self.validation_labels, self.validation, "validation"), (self.test_labels, self.test, "test")):
            if labels and not path:
                raise DataError(f"{labels} has the classes of a file that is not named; set {name}")
        corpus = super().load()
        return self._like(corpus.train, corpus, {"validation": self.validation or self.path, "test": self.test or self.path})

    def other(self, path: str) -> Corpus:
        """Another file of the same form, divided as the pictures to learn from are."""
        return self._like(super().load().train, super().other(path), {"validation": path})

    def _like(self, learned: Sequence[Row], corpus: Corpus, files: Mapping[str, str]) -> Corpus:
        """The pictures as a model reads them; refused where those of a file have not the form of those to learn from."""
        picture, *label = learned[0]
        for path, (other, *its) in [(path, corpus.splits[name][0]) for name, path in files.items() if corpus.splits[name]]:
            if other.shape != picture.shape:
                raise DataError(f"{path} has pictures of {sizes(other)}, and {self.path} of {sizes(picture)}")
            if bool(its) != bool(label):
                raise DataError(f"{path} has {'classes' if its else 'no classes'}, unlike {self.path}")
        white = self.white or max(1.0, *(float(row[0].max()) for row in learned))
        splits: Any = {name: [(scaled(row[0], white), *row[1:]) for row in rows] for name, rows in corpus.splits.items()}
        about = f"{corpus.about}; {sizes(picture)} pixels, divided by {white:g}"
        return Corpus(self.names[: 1 + len(label)], about=about, **splits)

    def given(self, row: Row) -> str | bytes:
        picture: Array = row[0]
        return picture.tobytes()

    def rows(self, path: Path, faults: Counter[str]) -> Iterator[Row]:
        if path.is_dir():
            raise DataError(f"{path} is a folder, expected an idx file or a .csv")
        beside = ((self.test, self.test_labels), (self.validation, self.validation_labels), (self.path, self.labels))
        known = {Path(name): labels for name, labels in beside if name}
        labels = known.get(path)
        if ".csv" not in path.suffixes[-2:]:
            if self.labels and path not in known:
                asked = "name both, test = … and test_labels = …, and ask that split"
                raise DataError(f"{path} has its classes in a file of their own: {asked}")
            yield from from_idx(path, labels)
        elif labels:
            raise DataError(f"{path} has its classes in the {self.label} column (label), and {labels} is not read")
        else:
            yield from self._from_table(Lines(path, self.encoding_errors, self.longest_line, faults))

    def _from_table(self, lines: Lines) -> Iterator[Row]:
        columns, size = 0, 0
        for number, line in lines:
            if not line.strip():
                continue
            at, cells = f"{lines.path}, line {number:,}", [cell.strip() for cell in line.split(",")]
            if not columns:
                columns = len(cells)
                if not any(map(is_number, cells)):
                    continue  # it is the header
            if len(cells) != columns:
                raise DataError(f"{at} has {len(cells)} columns, expected {columns} as in the first line")
            label = [] if self.label == "none" else [cells.pop(0 if self.label == "first" else -1)]
            picture = self._picture(cells, at)
            size += picture.nbytes
            if size > MOST_BYTES:
                raise DataError(f"{at} comes after {MOST_BYTES:,} bytes of pictures: too many for the memory")
            yield picture, *label

    def _picture(self, cells: list[str], at: str) -> Array:
        if wrong := [cell for cell in cells if not is_number(cell)]:
            raise DataError(f"{at} has the pixel {quoted(wrong[0])}, expected a number")
        points, rest = divmod(len(cells), self.channels)
        height = self.height or isqrt(points)
        if rest or not points or points % height or (self.height is None and height**2 != points):
            shape = f"{self.height} rows" if self.height else "a square"
            raise DataError(f"{at} has {len(cells)} pixels, which are no picture of {shape}, {self.channels} numbers a point; set height")
        picture = np.array(cells, np.float32).reshape(self.channels, height, -1)
        return picture[0] if self.channels == 1 else picture


def sizes(picture: Array) -> str:
    return " × ".join(map(str, picture.shape))


def scaled(picture: Array, white: float) -> Array:
    return (picture / white).astype(np.float32)


def from_idx(path: Path, labels: str | None) -> Iterator[Row]:
    pictures = read_idx(path, (3, 4), "pictures")
    if not labels:
        yield from ((picture,) for picture in pictures)
        return
    classes = read_idx(Path(labels), (1,), "classes")
    if len(classes) != len(pictures):
        raise DataError(f"{labels} has {len(classes):,} classes, and {path} {len(pictures):,} pictures")
    yield from ((picture, f"{number:g}") for picture, number in zip(pictures, classes.tolist(), strict=True))


def is_number(cell: str) -> bool:
    try:
        return bool(np.isfinite(float(cell)))
    except ValueError:
        return False


def read_idx(path: Path, ranks: tuple[int, ...], what: str) -> Array:
    """The numbers of an idx file; what its head says is checked before memory is taken.

    yann.lecun.com/exdb/mnist: two zeros, the sort of numbers, how many sizes; the sizes; the numbers, the highest byte first.
    """
    with unpacked(path) as source:
        head = source.file.read(4)
        if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in SORTS:
            raise DataError(f"{path} is no idx file, which begins with two zeros and the sort of its numbers; given {quoted(head)}")
        if head[3] not in ranks:
            expected = " or ".join(map(str, ranks))
            raise DataError(f"{path} has {head[3]} sizes, and {what} have {expected}")
        shape = tuple(int(size) for size in np.frombuffer(exactly(source, 4 * head[3]), ">u4"))
        sort = np.dtype(SORTS[head[2]])
        size = prod(shape) * sort.itemsize
        if size > MOST_BYTES or not size:
            raise DataError(f"{path} says that it holds {' × '.join(map(str, shape))} numbers, expected 1 to {MOST_BYTES:,} bytes")
        data = exactly(source, size)
        if source.file.read(1):
            raise DataError(f"{path} goes on after its {' × '.join(map(str, shape))} numbers")
    numbers = np.frombuffer(data, sort).reshape(shape)
    if not np.isfinite(numbers).all():
        raise DataError(f"{path} holds numbers that are NaN or infinite")
    return numbers


def exactly(source: Unpacked, size: int) -> bytes:
    """So many bytes, piece by piece: a head may promise more than there is."""
    pieces: list[bytes] = []
    done = 0
    while done < size:
        piece = source.file.read(min(AT_ONCE, size - done))
        done += len(piece)
        source.check(done, "pictures")
        if not piece:
            raise DataError(f"{source.path} ends after {done:,} of {size:,} bytes that its head promises")
        pieces.append(piece)
    return b"".join(pieces)
