"""Reads a user's data files line by line, in bounded memory: UTF-8 or UTF-16, decompressed, invalid bytes located."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedReader, TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, cast

from manyheads.errors import DataError, DataFileError, DataSizeError, EncodingError

MAX_FILE_BYTES = 1 << 36  # bytes after decompression
MAX_SKIPPED_BYTES = 1 << 28  # of a line that is too long and costs only itself
MAX_COMPRESSION_RATIO = 200  # text compresses 3 to 20 times
COMPRESSED_READ = 1 << 12  # bytes per read of a gzip file, so that a bomb is noticed after a megabyte
UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def check_rereadable(path: Path) -> None:
    """Raises for a pipe, a socket or a device, because data files are read more than once."""
    if path.is_fifo() or path.is_socket() or path.is_char_device():
        raise DataFileError(f"{path} is a stream, and data is read more than once", hint="save it as a file")


@contextmanager
def open_decompressed(path: Path, file: BufferedReader | None = None) -> Iterator[DecompressedFile]:
    """Opens `path`, or takes `file` if it is open already; a gzip file is decompressed as it is read."""
    try:
        with file or path.open("rb") as raw:
            if raw.peek(2)[:2] != b"\x1f\x8b":
                yield DecompressedFile(path, raw)
                return
            compressed = CountingReader(raw)
            with gzip.open(cast(Any, compressed)) as content:
                yield DecompressedFile(path, content, compressed)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataFileError(f"{path} is a broken gzip file: {error}") from None
    except OSError as error:
        raise DataFileError(f"cannot read {path}: {error.strerror or error}") from None


class CountingReader:
    """A file that counts the bytes that were read of it."""

    def __init__(self, file: BufferedReader) -> None:
        self.file, self.count = file, 0

    def read(self, size: int) -> bytes:
        data = self.file.read(min(size, COMPRESSED_READ))
        self.count += len(data)
        return data


def check_plausible_size(path: Path, size: int, *, compressed_size: int) -> None:
    """Raises if a file has more bytes than data can have, in all or for so few compressed bytes."""
    if size > min(MAX_FILE_BYTES, max(1 << 20, MAX_COMPRESSION_RATIO * compressed_size)):
        raise DataSizeError(f"{path} decompresses to more than {size:,} bytes, too many for a data file")


@dataclass
class DecompressedFile:
    """An open file, and the gzip file that it is decompressed from."""

    path: Path
    file: Any
    compressed: CountingReader | None = None

    def check_size(self, size: int) -> None:
        """Raises if `size` is implausible for what was read; a small gzip file may decompress to terabytes."""
        check_plausible_size(self.path, size, compressed_size=self.compressed.count if self.compressed else size)

    @contextmanager
    def as_utf8(self) -> Iterator[DecompressedFile]:
        """Opens the file as UTF-8, if it begins with the byte order mark of UTF-16."""
        if encoding := UTF16.get(self.file.peek(2)[:2]):
            with TextIOWrapper(self.file, encoding, errors="surrogatepass", newline="\n") as text:
                yield replace(self, file=Utf16File(self.path, text))
        else:
            yield self


@dataclass
class Utf16File:
    """The lines of a text as UTF-8; half of a surrogate pair stays invalid."""

    path: Path
    text: TextIOWrapper

    def readline(self, size: int) -> bytes:
        try:
            return self.text.readline(size).encode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise DataFileError(f"{self.path} ends in the middle of a UTF-16 character") from None


@dataclass
class LineReader:
    """The numbered lines of a file, from 1, in bounded memory.

    LF, CRLF and CR end a line; a byte order mark at the start is dropped, and that of UTF-16 is obeyed. An invalid byte
    or a NUL raises an error with its position in the decompressed file, or in its text if that is UTF-16, unless
    `encoding_errors` is "replace" or "skip".
    """

    path: Path
    encoding_errors: str
    max_length: int  # characters
    warnings: Counter[str] = field(default_factory=Counter)  # number of lines by how they were handled
    file: BufferedReader | None = None  # open already, such as standard input; `path` is then only its name
    length_hint: str = "raise max_line_length to allow it"
    encoding_hint: str = "save the file as UTF-8, or set encoding_errors to 'replace' or 'skip'"
    skip: int = 0  # lines at the start that are not yielded
    errors: dict[int, DataError] | None = None  # if given, a bad line is empty and its error is put here, not raised

    def __iter__(self) -> Iterator[tuple[int, str]]:
        with open_decompressed(self.path, self.file) as source, source.as_utf8() as decoded:
            yield from islice(self._lines(decoded), self.skip, None)

    def _lines(self, source: DecompressedFile) -> Iterator[tuple[int, str]]:
        number = offset = 0
        while raw := source.file.readline(4 * self.max_length + 3):
            end = offset + len(raw)
            source.check_size(end)
            if len(raw) > 4 * self.max_length + 2:  # a character has at most four bytes
                number += 1
                self._keep_or_raise(self.too_long(f"{self.path}, line {number:,}"), number)
                while raw and not raw.endswith(b"\n"):  # the rest of the line
                    raw = source.file.readline(1 << 20)
                    end += len(raw)
                    source.check_size(end)
                    if end - offset > MAX_SKIPPED_BYTES:  # a device may never end
                        raise self.too_long(f"{self.path}, line {number:,}")
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
            raise self.too_long(f"{self.path}, line {number:,}")
        if position < 0:
            return text
        message = f"{self.path}, line {number:,} {problem} at byte {offset + position:,}"
        return self.handle_invalid(message, replacement=text.replace("\0", "�"))

    def _keep_or_raise(self, error: DataError, number: int) -> None:
        if self.errors is None:
            raise error
        self.errors[number] = error

    def too_long(self, location: str) -> DataSizeError:
        return DataSizeError(f"{location} is longer than {self.max_length:,} characters", hint=self.length_hint)

    def handle_invalid(self, message: str, *, replacement: str) -> str | None:
        """Handles an invalid line by `encoding_errors`: raises, or returns the replacement, or None to skip it."""
        if self.encoding_errors == "strict":
            raise EncodingError(message, hint=self.encoding_hint)
        skip = self.encoding_errors == "skip"
        self.warnings["skipped (not UTF-8)" if skip else "with � in place of bytes that are not UTF-8"] += 1
        return None if skip else replacement
