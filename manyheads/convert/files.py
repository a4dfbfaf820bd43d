"""Reading files that other people made: nothing is executed, nothing outside the folder is opened, nothing is believed unchecked."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from manyheads.spec import DEEPEST, SpecError, Tree, copied, quoted

LARGEST_CONFIG = 1 << 20
LARGEST_TOKENIZER = 64 << 20
LARGEST_HEADER = 100 << 20  # of a safetensors file, as its own library has it
LARGEST_INDEX = 64 << 20

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
}  # fmt: skip


class FileError(ValueError):
    """A model file that is broken, or not to be trusted."""

    exit_code = 4


class DiskFullError(ValueError):
    """A disk that is full."""

    exit_code = 5


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the disk, of one's share of it, of one file


def unwritable(target: Path, error: OSError) -> ValueError:
    """What to say of a place that cannot be written."""
    return (DiskFullError if error.errno in FULL else ValueError)(f"cannot write {target}: {error.strerror or error}")


def inside(folder: Path, name: str) -> Path:
    """A file of the folder by its plain name; a link that leads out of it is refused."""
    if not name or name in (".", "..") or Path(name).name != name or not name.isprintable() or "\\" in name:
        raise FileError(f"{quoted(name)} is not the name of a file in {folder}")
    path = folder / name
    if path.is_symlink():
        target, home = (Path(os.path.realpath(place)) for place in (path, folder))  # links in a circle are left as they are
        # a cache of the hub keeps files once, in blobs/, and links to them from snapshots/NAME/ and the folders in it
        blobs = [place.parent.parent / "blobs" for place in (home, home.parent) if place.parent.name == "snapshots"]
        if not target.is_relative_to(home) and target.parent not in blobs:
            raise FileError(f"{path} is a link that leads out of its folder")
    return path


def read_json(path: Path, largest: int) -> Tree:
    """A table from a JSON file of bounded size and depth, without NaN and without the same key twice."""
    try:
        if path.exists() and not path.is_file():
            raise FileError(f"{path} is not a plain file")
        if path.stat().st_size > largest:
            raise FileError(f"{path} has {path.stat().st_size:,} bytes, expected at most {largest:,}")
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant, object_pairs_hook=once)
        found = copied(found)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None
    except RecursionError:
        raise FileError(f"{path} has tables within tables, more than {DEEPEST} deep") from None
    except FileError:
        raise
    except (SpecError, ValueError) as error:
        raise FileError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise FileError(f"{path} holds {quoted(found)}, expected a table")
    return found


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number that JSON has")


def once(pairs: list[tuple[str, Any]]) -> Tree:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands there twice")
    return table


class Stamp(NamedTuple):
    """What tells that a file is still the same: which it is, how long, and when it was written."""

    number: int
    size: int
    written: int

    @staticmethod
    def of(file: BinaryIO) -> Stamp:
        found = os.fstat(file.fileno())
        return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


class Shard:
    """One safetensors file, its header read and checked against its size before any number is; mapped, or copied piece by piece."""

    def __init__(self, path: Path, *, copy: bool = False) -> None:
        self.path, self.copy = path, copy
        if path.exists() and not path.is_file():
            raise FileError(f"{path} is not a plain file")
        try:
            with path.open("rb") as file:
                self.stamp = Stamp.of(file)
                size = self.stamp.size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(LARGEST_HEADER, size - 8):
                    raise FileError(f"{path} is no safetensors file: its header should have {length:,} bytes, the file has {size:,}")
                text = file.read(length)
        except OSError as error:
            raise FileError(f"cannot read {path}: {error.strerror or error}") from None
        self.begin, self.entries = 8 + length, dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]()
        try:
            header = json.loads(text.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=once)
            entries = sorted(((name, entry) for name, entry in header.items() if name != "__metadata__"), key=begins)
            end = 0
            for name, entry in entries:
                if entry["dtype"] not in DTYPES:
                    raise FileError(f"{path}: {quoted(name)} is stored as {quoted(entry['dtype'])}, a form that is not known")
                dtype, shape, (start, stop) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
                whole = all(type(count) is int and count >= 0 for count in (*shape, start, stop))
                if not whole or start != end or stop - start != math.prod(shape) * dtype.itemsize:
                    raise FileError(
                        f"{path}: {quoted(name)} should stand at bytes {start} to {stop}, which do not hold {entry['dtype']} {shape}"
                    )
                end, self.entries[name] = stop, (dtype, shape, start, stop)
        except FileError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FileError(f"{path} has a header that cannot be read: {type(error).__name__}: {error}") from None
        if self.begin + end != size:
            raise FileError(f"{path} should have {self.begin + end:,} bytes by its header, and has {size:,}")

    @cached_property
    def mapped(self) -> Tensor:
        """The file mapped into memory, copied page by page where somebody writes: what is never used is never read."""
        with self.unchanged():
            return torch.from_file(str(self.path), shared=False, size=self.stamp.size, dtype=torch.uint8)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        dtype, shape, start, stop = self.entries[name]
        if start == stop:
            return torch.empty(shape, dtype=dtype)
        raw = self.copied(start, stop) if self.copy else self.mapped[self.begin + start : self.begin + stop]
        # where no tensor of this sort can begin, its bytes are copied to where one can
        return (raw.clone() if raw.storage_offset() % dtype.itemsize else raw).view(dtype).reshape(shape)

    def copied(self, start: int, stop: int) -> Tensor:
        """Bytes in memory of their own."""
        data = torch.empty(stop - start, dtype=torch.uint8)
        with self.unchanged() as file:
            file.seek(self.begin + start)
            if file.readinto(data.numpy()) != stop - start:  # type: ignore[attr-defined]
                raise FileError(f"{self.path} ends before its weights do")
        return data

    @contextmanager
    def unchanged(self) -> Iterator[BinaryIO]:
        """The file, if it is still the one whose header was read."""
        try:
            with self.path.open("rb") as file:
                if Stamp.of(file) != self.stamp:
                    raise FileError(f"{self.path} was changed while it was read")
                yield file
        except OSError as error:
            raise FileError(f"cannot read {self.path}: {error.strerror or error}") from None


def begins(item: tuple[str, Any]) -> Any:
    return item[1]["data_offsets"]


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """Where to write a draft, a file or a folder, which is moved to its place once it is whole; until then nothing stands there."""
    check_free(target)
    missing = [place for place in target.parents if not os.path.exists(place)]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=target.parent, ignore_cleanup_errors=True) as around:
            draft = Path(around) / "draft"
            yield draft
            check_free(target)  # somebody else may have been faster
            draft.rename(target)
    except OSError as error:
        raise unwritable(target, error) from None
    finally:
        for place in missing:
            with suppress(OSError):  # not empty: what was written is in it
                place.rmdir()


def check_free(target: Path) -> None:
    """Refuses a place where something stands, a link that leads nowhere too, and one where nothing can."""
    try:
        target.lstat()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot write {target}: {getattr(error, 'strerror', error)}") from None
    raise ValueError(f"{target} exists already; name a place where nothing is")


class Store(Mapping[str, Tensor]):
    """Tensors by name, read when asked for; their shapes and types are known before."""

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    @abstractmethod
    def dtypes(self) -> dict[str, torch.dtype]: ...


class Checkpoint(Store):
    """All tensors of a folder."""

    def __init__(self, folder: Path, *, copy: bool = False) -> None:
        self.folder = folder
        index = inside(folder, "model.safetensors.index.json")
        names, listed = ["model.safetensors"], None
        if index.exists():
            listed = read_json(index, LARGEST_INDEX).get("weight_map")
            if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
                raise FileError(f"{index} has no weight_map that names a file for each tensor")
            names = sorted(set(listed.values()))
        elif not inside(folder, names[0]).exists():
            raise FileError(f"{folder} has no model.safetensors{refused(folder)}")
        self.places: dict[str, Shard] = {}
        for name in names:
            shard = Shard(inside(folder, name), copy=copy)
            for tensor in shard.entries:
                if tensor in self.places:
                    raise FileError(f"{tensor} stands in {self.places[tensor].path.name} and in {name}")
                self.places[tensor] = shard
        if listed is not None and set(self.places) != set(listed):
            wrong = sorted(set(self.places) ^ set(listed))[0]
            raise FileError(f"{index} and its files do not agree on {wrong}")

    def __getitem__(self, name: str) -> Tensor:
        return self.places[name].read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shard.entries[name][1] for name, shard in self.places.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: shard.entries[name][0] for name, shard in self.places.items()}


def refused(folder: Path) -> str:
    """What to say of weights in a form that is never read."""
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    return f"; {pickles[0]} is a pickle, which could run code when read, and is not read" if pickles else ""
