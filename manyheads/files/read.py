"""Reads files from other people: bounded in size and depth, inside their folder, never executed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from manyheads.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    ConfigFileError,
    ConfigSyntaxError,
    CorruptFileError,
    ManyheadsError,
    UnsafeFileError,
)
from manyheads.spec import TOO_DEEP, Tree, copy_tree, quote, shorten

MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_TOML_BYTES = 1 << 20


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file; raises OSError for a pipe, a device or a folder, and never waits for a writer."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    code, reason = (errno.EISDIR, "is a folder") if stat.S_ISDIR(mode) else (errno.EINVAL, "is not a regular file")
    raise OSError(code, reason, str(path))


def safe_join(folder: Path, name: str) -> Path:
    """Returns the path of a file in a folder; raises for a path, a link out of the folder, a pipe or a device."""
    if not name or name in (".", "..") or Path(name).name != name or not name.isprintable() or "\\" in name:
        raise UnsafeFileError(f"{quote(name)} is not the name of a file in {folder}")
    path = folder / name
    if path.is_symlink():
        # unlike Path.resolve, realpath does not raise for a link to itself
        target, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
        # the Hub's cache stores files once, in blobs/, and links to them from snapshots/NAME/ and the folders in it
        blobs = [
            snapshot.parent.parent / "blobs" for snapshot in (root, root.parent) if snapshot.parent.name == "snapshots"
        ]
        if not target.is_relative_to(root) and target.parent not in blobs:
            raise UnsafeFileError(f"{path} is a link that leads out of its folder")
    if os.path.exists(path) and not path.is_file() and not path.is_dir():  # False for a name too long for a file
        raise UnsafeFileError(f"{path} is not a regular file")
    return path


@contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Turns an OSError while a checkpoint is read into a CheckpointError."""
    try:
        yield
    except OSError as error:
        kind = CheckpointNotFoundError if isinstance(error, FileNotFoundError) else CheckpointError
        raise kind(f"cannot read {shorten(str(error.filename or path), 500)}: {error.strerror or error}") from None


def read_bytes(path: Path, max_bytes: int, *, error: type[ManyheadsError] = CorruptFileError) -> bytes:
    """Reads a whole file; raises if it has more than `max_bytes`, without reading further."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise error(f"{path} has more than {max_bytes:,} bytes")
    return data


def decode(data: bytes, path: Path, *, error: type[ManyheadsError] = CorruptFileError) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise error(f"{path} is not UTF-8 text: byte {fault.start} is {data[fault.start]:#04x}") from None


def read_text(path: Path, max_bytes: int) -> str:
    return decode(read_bytes(path, max_bytes), path)


def read_json(path: Path, max_bytes: int) -> Tree:
    """Reads an object from a JSON file."""
    return parse_json(read_bytes(path, max_bytes), path)


def parse_json(data: bytes, path: Path) -> Tree:
    """Parses an object as `parse_json_value` does."""
    table = parse_json_value(data, path)
    if not isinstance(table, dict):
        raise CorruptFileError(f"{path} holds {quote(table)}, expected a JSON object")
    return table


def parse_json_value(data: bytes, path: Path) -> Any:
    """Parses JSON of bounded depth, without NaN, duplicate keys and lone surrogates; a NUL is a character as others."""
    text = decode(data, path)
    try:
        value = copy_tree(json.loads(text, parse_constant=refuse_constant, object_pairs_hook=no_duplicate_keys))
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode()  # raises for half a pair, which is no Unicode text
    except RecursionError:
        raise CorruptFileError(f"{path}: {TOO_DEEP}") from None
    except ValueError as error:
        raise CorruptFileError(f"{path} is not valid JSON: {shorten(str(error))}") from None
    return value


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def no_duplicate_keys(pairs: list[tuple[str, Any]]) -> Tree:
    table: Tree = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"duplicate key {quote(name)}")
        table[name] = value
    return table


def read_json_or_empty(path: Path) -> Tree:
    """Reads an object from a JSON file that manyheads wrote; empty if the file is missing or incomplete."""
    try:
        return read_json(path, MAX_INDEX_BYTES)
    except (OSError, CorruptFileError):
        return {}


def sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------------------------- TOML


def read_toml(path: Path) -> Tree:
    try:
        text = decode(read_bytes(path, MAX_TOML_BYTES, error=ConfigFileError), path, error=ConfigFileError)
    except ConfigFileError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        name = shorten(str(path), 500)
        raise ConfigFileError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return copy_tree(tomllib.loads(text.replace("\r\n", "\n")))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {TOO_DEEP}") from None
    except ValueError as error:  # not TOML, or a number of more digits than Python reads
        raise ConfigSyntaxError(f"{path} is not TOML: {shorten(str(error))}") from None


@contextmanager
def locate_config_errors(path: Path, overrides: Iterable[str] = ()) -> Iterator[None]:
    """Prefixes a ConfigError with the file and line, or the override, that set its field."""
    try:
        yield
    except ConfigError as error:
        field = tuple(str(name) for name in (*error.path, *([error.key] if error.key else [])))
        matching = [
            assignment
            for assignment in overrides
            if field and is_prefix(assignment.partition("=")[0].strip().split("."), field)
        ]
        line = None if matching else line_of_field(path, tuple(name for name in field if not name.isdigit()))
        if not matching and line is None:
            raise
        location = f"-s {matching[-1]}" if matching else f"{path}:{line}"
        raise type(error)(f"{location}: {error.message}", key=error.key, hint=error.hint) from None


def is_prefix(path: Iterable[str], field: tuple[str, ...]) -> bool:
    start = tuple(path)
    return field[: len(start)] == start


def line_of_field(path: Path, field: tuple[str, ...]) -> int | None:
    """Returns the line of a TOML file that first sets a field or opens a table."""
    try:
        lines = read_text(path, MAX_TOML_BYTES).splitlines()
    except (OSError, ValueError):
        return None
    table: tuple[str, ...] = ()
    start = 0
    for end in range(1, len(lines) + 1):
        try:
            statement = tomllib.loads("\n".join(lines[start:end]))  # one field or table header, on one or several lines
        except (ValueError, RecursionError):
            continue
        names = list(field_paths(statement))
        if lines[start].lstrip().startswith("["):
            table, names = max(names, key=len), [()]
        if field and any(is_prefix(field, (*table, *name)) for name in names):
            return start + 1
        start = end
    return None


def field_paths(value: Any) -> Iterator[tuple[str, ...]]:
    """Yields the path of every table and field in a tree, without the indexes of lists."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (name,)
            yield from ((name, *rest) for rest in field_paths(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from field_paths(inner)
