"""Reads a user's images from idx files, the format of MNIST, or from tables of pixels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isqrt, prod
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from manyheads.data.source import Corpus, FileSpec, Row
from manyheads.errors import ColumnError, DataFileError, DataSizeError, RowError
from manyheads.files.text import DecompressedFile, LineReader, open_decompressed
from manyheads.spec import field, quote

IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MAX_BYTES = 1 << 33  # bytes of images, which are held in memory
READ_BYTES = 1 << 24  # bytes per read

Array = NDArray[Any]


class ImagesSpec(FileSpec, kind="images"):
    """Images and their classes, from idx files, the format of MNIST, or from a .csv with one image per line

    An idx file holds count × height × width numbers, or count × channels × height × width; the classes are in a file
    of their own. A line of a .csv holds the pixels, row by row, and the class.
    """

    row_fields: ClassVar[tuple[str, ...]] = ("image", "label")
    unit: ClassVar[str] = "images"

    labels: str | None = field(None, "idx file with the classes of the training images", min_length=1)
    validation_labels: str | None = field(None, "idx file with the classes of the validation images", min_length=1)
    test_labels: str | None = field(None, "idx file with the classes of the test images", min_length=1)
    label: Literal["first", "last", "none"] = field("last", "column of a .csv with the class")
    height: int | None = field(None, "height of the images of a .csv; square by default", ge=1, le=1 << 16)
    channels: int = field(1, "channels of the images of a .csv, one after the other in a line", ge=1, le=1024)
    max_value: float | None = field(
        None, "pixels are divided by this; by default the largest training pixel, at least 1", gt=0
    )

    def load(self) -> Corpus:
        for name in ("validation", "test"):
            labels = getattr(self, f"{name}_labels")
            if labels and not getattr(self, name):
                raise DataFileError(f"{name}_labels is {labels}, and {name} is not set")
        corpus = super().load()
        paths = {"validation": self.validation or self.path, "test": self.test or self.path}
        return self._scale(corpus.train, corpus, paths)

    def load_file(self, path: str) -> Corpus:
        """Reads another file in the same format; pixels are divided by the same number as in the training images."""
        return self._scale(super().load().train, super().load_file(path), {"validation": path})

    def _scale(self, train: Sequence[Row], corpus: Corpus, paths: Mapping[str, str]) -> Corpus:
        """Scales pixels to 0 to 1; raises if a file has images of another shape than the training file."""
        image, *label = train[0]
        for path, rows in ((path, corpus.splits[name]) for name, path in paths.items()):
            other, *its_label = rows[0] if rows else train[0]
            if other.shape != image.shape:
                raise RowError(f"{path} has images of {size_of(other)} pixels, and {self.path} of {size_of(image)}")
            if bool(its_label) != bool(label):
                raise ColumnError(f"{path} has {'' if its_label else 'no '}classes, unlike {self.path}")
        divisor = self.max_value or max(1.0, *(float(row[0].max()) for row in train))
        splits: Any = {
            name: [
                (to_float32(row[0], f"{self.path}, {name} image {i:,} divided by {divisor:g}", divisor), *row[1:])
                for i, row in enumerate(rows, 1)
            ]
            for name, rows in corpus.splits.items()
        }
        description = f"{corpus.description}; {size_of(image)} pixels, divided by {divisor:g}"
        return Corpus(self.row_fields[: 1 + len(label)], description=description, **splits)

    def split_key(self, row: Row) -> str | bytes:
        image: Array = row[0]
        return image.tobytes()

    def read_rows(self, path: Path, warnings: Counter[str]) -> Iterator[Row]:
        files = (self.test, self.test_labels), (self.validation, self.validation_labels), (self.path, self.labels)
        labels_of = {Path(images): labels for images, labels in files if images}
        labels = labels_of.get(path)
        if ".csv" not in path.suffixes[-2:]:
            if self.labels and path not in labels_of:
                raise ColumnError(
                    f"the classes of {path} are in a file of their own",
                    hint="set data.test and data.test_labels, and evaluate that split",
                )
            yield from read_idx_rows(path, labels)
        elif labels:
            raise ColumnError(f"the classes of {path} are its {self.label} column (label), so {labels} is not read")
        else:
            yield from self._from_csv(self.lines(path, warnings))

    def _from_csv(self, lines: LineReader) -> Iterator[Row]:
        columns, size = 0, 0
        for number, line in lines:
            if not line.strip():
                continue
            location, cells = f"{lines.path}, line {number:,}", [cell.strip() for cell in line.split(",")]
            if not columns:
                columns = len(cells)
                if not any(map(is_number, cells)):
                    continue  # a header
            if len(cells) != columns:
                raise RowError(f"{location} has {len(cells)} columns, expected {columns} as in the first line")
            label = [] if self.label == "none" else [cells.pop(0 if self.label == "first" else -1)]
            image = self._parse_image(cells, location)
            size += image.nbytes
            if size > MAX_BYTES:
                raise DataSizeError(
                    f"{location} comes after {MAX_BYTES:,} bytes of images, the most that are kept in memory"
                )
            yield image, *label

    def _parse_image(self, cells: list[str], location: str) -> Array:
        if invalid := [cell for cell in cells if not is_number(cell)]:
            raise RowError(f"{location} has the pixel {quote(invalid[0])}, expected a number")
        pixels, rest = divmod(len(cells), self.channels)
        height = self.height or isqrt(pixels)
        if rest or not pixels or pixels % height or (self.height is None and height**2 != pixels):
            shape = f"an image of height {self.height}" if self.height else "a square image"
            raise RowError(
                f"{location} has {len(cells)} numbers, which are not {shape} with channels = {self.channels}",
                hint="set data.height and data.channels",
            )
        image = to_float32(np.array(cells, np.float64), location).reshape(self.channels, height, -1)
        return image[0] if self.channels == 1 else image


def size_of(image: Array) -> str:
    return " × ".join(map(str, image.shape))


def to_float32(numbers: Array, location: str, divisor: float = 1.0) -> Array:
    """Divides numbers and casts them to float32; raises if one is NaN, infinite, or larger than float32 can hold."""
    with np.errstate(over="ignore"):
        cast: Array = (numbers / divisor).astype(np.float32)
    if not np.isfinite(cast).all():
        value = numbers[~np.isfinite(cast)].flat[0]
        raise RowError(f"{location} has the number {value:g}, expected one that is finite in float32")
    return cast


def is_number(cell: str) -> bool:
    try:
        return bool(np.isfinite(float(cell)))
    except ValueError:
        return False


def read_idx_rows(path: Path, labels: str | None) -> Iterator[Row]:
    images = read_idx(path, (3, 4))
    if not labels:
        yield from ((image,) for image in images)
        return
    classes = read_idx(Path(labels), (1,))
    if len(classes) != len(images):
        raise RowError(f"{labels} has {len(classes):,} classes, and {path} has {len(images):,} images")
    yield from ((image, class_name(number)) for image, number in zip(images, classes, strict=True))


def class_name(number: Any) -> str:
    """Formats the number of a class with as many digits as distinguish it from all others of its dtype."""
    return np.format_float_positional(number, trim="-") if isinstance(number, np.floating) else str(number)


def read_idx(path: Path, ranks: tuple[int, ...]) -> Array:
    """Reads the array of an idx file; its header is checked before memory is allocated.

    The file has two zero bytes, the dtype, the number of dimensions, the dimensions, and the numbers, big-endian:
    yann.lecun.com/exdb/mnist.
    """
    with open_decompressed(path) as source:
        head = source.file.read(4)
        if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_DTYPES:
            raise DataFileError(
                f"{path} is not an idx file: it begins with {quote(head)}, expected two zeros and a dtype"
            )
        if head[3] not in ranks:
            raise DataFileError(f"{path} has {head[3]} dimensions, expected {' or '.join(map(str, ranks))}")
        shape = tuple(int(size) for size in np.frombuffer(read_exactly(source, 4 * head[3]), ">u4"))
        shape_text, dtype = " × ".join(map(str, shape)), np.dtype(IDX_DTYPES[head[2]])
        size = prod(shape) * dtype.itemsize
        if size > MAX_BYTES or not size:
            raise DataSizeError(f"{path} has {shape_text} numbers by its header, expected 1 to {MAX_BYTES:,} bytes")
        data = read_exactly(source, size)
        if source.file.read(1):
            raise DataFileError(f"{path} continues after its {shape_text} numbers")
    numbers = np.frombuffer(data, dtype).reshape(shape)
    if dtype.kind == "f":
        for i, row in enumerate(numbers, 1):
            to_float32(np.atleast_1d(row), f"{path}, row {i:,}")
    return numbers


def read_exactly(source: DecompressedFile, size: int) -> bytes:
    """Reads `size` bytes in pieces, because a header may announce more than the file holds."""
    pieces: list[bytes] = []
    done = 0
    while done < size:
        piece = source.file.read(min(READ_BYTES, size - done))
        done += len(piece)
        source.check_size(done)
        if not piece:
            raise DataFileError(f"{source.path} ends after {done:,} of the {size:,} bytes in its header")
        pieces.append(piece)
    return b"".join(pieces)
