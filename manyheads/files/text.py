"""Reads a user's data files line by line, in bounded memory; decompresses gzip and locates every invalid byte."""

from __future__ import annotations

import gzip
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from manyheads.errors import DataError, DataFileError, DataSizeError, EncodingError

MAX_FILE_BYTES = 1 << 36  # bytes after decompression
MAX_COMPRESSION_RATIO = 200  # text compresses 3 to 20 times


def check_rereadable(path: Path) -> None:
    """Raises for a pipe, a socket or a device, because data files are read more than once."""
    if path.is_fifo() or path.is_socket() or path.is_char_device():
        raise DataFileError(f"{path} is a stream, and data is read more than once", hint="save it as a file")


@contextmanager
def open_decompressed(path: Path, file: BufferedReader | None = None) -> Iterator[DecompressedFile]:
    """Opens `path`, or takes `file` if it is open already; a gzip file is decompressed as it is read."""
    try:
        with file or path.open("rb") as raw:
            compressed = raw.peek(2)[:2] == b"\x1f\x8b"
            size = os.fstat(raw.fileno()).st_size
            with gzip.open(raw) if compressed else raw as content:
                yield DecompressedFile(path, cast(Any, content), size if compressed else 0)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataFileError(f"{path} is a broken gzip file: {error}") from None
    except OSError as error:
        raise DataFileError(f"cannot read {path}: {error.strerror or error}") from None


@dataclass
class DecompressedFile:
    """An open file; `compressed_size` is its size on disk if it is a gzip file, otherwise 0."""

    path: Path
    file: Any
    compressed_size: int

    def check_size(self, size: int) -> None:
        """Raises if `size` is implausible for a data file; a small gzip file may decompress to terabytes."""
        limit = MAX_COMPRESSION_RATIO * self.compressed_size
        if size > MAX_FILE_BYTES or (self.compressed_size and size > max(1 << 20, limit)):
            raise DataSizeError(f"{self.path} decompresses to more than {size:,} bytes, too many for a data file")


@dataclass
class LineReader:
    """The numbered lines of a file, from 1, in bounded memory.

    LF, CRLF and CR end a line; a byte order mark at the start is dropped. An invalid UTF-8 byte or a NUL raises an
    error with its position in the decompressed file, unless `encoding_errors` is "replace" or "skip".
    """

    path: Path
    encoding_errors: str
    max_length: int  # characters
    warnings: Counter[str] = field(default_factory=Counter)  # number of lines by how they were handled
    file: BufferedReader | None = None  # open already, such as standard input; `path` is then only its name
    length_hint: str = "raise max_line_length to allow it"
    encoding_hint: str = "save the file as UTF-8, or set encoding_errors to 'replace' or 'skip'"
    errors: dict[int, DataError] | None = None  # if given, a bad line is empty and its error is put here, not raised

    def __iter__(self) -> Iterator[tuple[int, str]]:
        with open_decompressed(self.path, self.file) as source:
            yield from self._lines(source)

    def _lines(self, source: DecompressedFile) -> Iterator[tuple[int, str]]:
        number = offset = 0
        while raw := source.file.readline(4 * self.max_length + 3):
            end = offset + len(raw)
            source.check_size(end)
            if len(raw) > 4 * self.max_length + 2:  # a character has at most four bytes
                self._keep_or_raise(self._too_long(number := number + 1), number)
                while raw and not raw.endswith(b"\n"):  # the rest of the line
                    raw = source.file.readline(1 << 20)
                    end += len(raw)
                    source.check_size(end)
                yield number, ""
                offset = end
                continue
            if offset == 0 and raw.startswith(b"\xef\xbb\xbf"):
                offset, raw = 3, raw[3:]
            for piece in raw.removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
                number += 1
                try:
                    line = self._decode(piece, number, offset)
                except DataError as error:
                    self._keep_or_raise(error, number)
                    line = ""
                offset += len(piece) + 1
                if line is not None:
                    yield number, line
            offset = end

    def _decode(self, raw: bytes, number: int, offset: int) -> str | None:
        try:
            text, position, problem = raw.decode(), raw.find(0), "has a NUL"
        except UnicodeDecodeError as error:
            text, position, problem = (
                raw.decode(errors="replace"),
                error.start,
                f"is not UTF-8 ({raw[error.start]:#04x})",
            )
        if len(text) > self.max_length:
            raise self._too_long(number)
        if position < 0:
            return text
        message = f"{self.path}, line {number:,} {problem} at byte {offset + position:,}"
        return self.handle_invalid(message, replacement=text.replace("\0", "�"))

    def _keep_or_raise(self, error: DataError, number: int) -> None:
        if self.errors is None:
            raise error
        self.errors[number] = error

    def _too_long(self, number: int) -> DataSizeError:
        return DataSizeError(
            f"{self.path}, line {number:,} is longer than {self.max_length:,} characters", hint=self.length_hint
        )

    def handle_invalid(self, message: str, *, replacement: str) -> str | None:
        """Handles an invalid line by `encoding_errors`: raises, or returns the replacement, or None to skip it."""
        if self.encoding_errors == "strict":
            raise EncodingError(message, hint=self.encoding_hint)
        skip = self.encoding_errors == "skip"
        self.warnings["skipped (not UTF-8)" if skip else "with � in place of bytes that are not UTF-8"] += 1
        return None if skip else replacement
