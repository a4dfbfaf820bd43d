"""Reads safetensors files, whose headers are checked before any weight is mapped or copied."""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from manyheads.errors import CorruptFileError, UnsafeFileError, WeightsError
from manyheads.files.read import MAX_INDEX_BYTES, open_regular, parse_json, read_json, safe_join
from manyheads.spec import Tree, quote, shorten

MAX_HEADER_BYTES = 100 << 20  # as in the safetensors library
MAX_AXES, MAX_ELEMENTS = 8, 1 << 48

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
}  # fmt: skip

Shape = tuple[int, ...]


class TensorStore(Mapping[str, Tensor]):
    """Tensors by name, read on access; shapes and dtypes are known without reading."""

    shapes: dict[str, Shape]
    dtypes: dict[str, torch.dtype]

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def check(self, required: Mapping[str, Shape], optional: Container[str]) -> None:
        """Raises for missing and unexpected names, and for a shape other than the required one."""
        if unexpected := sorted(name for name in self if name not in required and name not in optional):
            raise WeightsError(f"unexpected weight {shorten(unexpected[0])} ({len(unexpected)} in all)")
        if missing := sorted(set(required) - set(self)):
            raise WeightsError(f"missing weight {missing[0]} ({len(missing)} in all)")
        for name, shape in required.items():
            if self.shapes[name] != shape:
                raise WeightsError(f"{name} has shape {self.shapes[name]}, the config implies {shape}")


class InMemoryTensors(TensorStore):
    """Tensors that are already in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def are_counts(values: Iterable[Any]) -> bool:
    """Whether these can be sizes, strides or offsets of a tensor that torch can describe."""
    return all(type(value) is int and 0 <= value <= MAX_ELEMENTS for value in values)


def is_shape(sizes: Sequence[Any]) -> bool:
    """Whether these are the sizes of a tensor that torch can describe, even if one of them is 0."""
    return len(sizes) <= MAX_AXES and are_counts(sizes) and math.prod(max(size, 1) for size in sizes) <= MAX_ELEMENTS


def stamp(file: BinaryIO) -> tuple[int, int, int]:
    """Identifies one version of a file: inode, size and time."""
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


class SafetensorsFile(TensorStore):
    """One safetensors file, its header checked against its size; tensors are memory-mapped, or copied one by one.

    safetensors.safe_open is not used, because it accepts two entries of one name. It also maps a file when it opens it,
    so that a file that is truncated before its tensors are read or copied kills the process (SIGBUS).
    """

    def __init__(self, path: Path, *, copy: bool = False) -> None:
        self.path, self.copy = path, copy
        with open_regular(path) as file:
            self.stamp = stamp(file)
            self.size = self.stamp[1]
            length = int.from_bytes(file.read(8), "little")
            if self.size < 8 or length > min(MAX_HEADER_BYTES, self.size - 8):
                raise CorruptFileError(
                    f"{path} is not a safetensors file: its header would have {length:,} of {self.size:,} bytes"
                )
            header = parse_json(file.read(length), path)
        try:
            self._check_entries({name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + length)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {shorten(str(error))}"
            raise CorruptFileError(f"{path} has an invalid header: {reason}") from None

    def _check_entries(self, entries: Tree, end: int) -> None:
        """Raises unless the tensors fill the file, one after another."""
        self.shapes, self.dtypes = dict[str, Shape](), dict[str, torch.dtype]()
        self.ranges = dict[str, tuple[int, int]]()
        base = end
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            (start, stop), shape = entry["data_offsets"], tuple(entry["shape"])
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{quote(name)} has the unknown dtype {quote(entry['dtype'])}")
            dtype = DTYPES[entry["dtype"]]
            valid = is_shape(shape) and are_counts((start, stop))
            if not valid or base + start != end or stop - start != math.prod(shape) * dtype.itemsize:
                byte_range = f"bytes {quote(start)} to {quote(stop)}"
                raise ValueError(f"{byte_range} cannot hold {quote(name)}, {entry['dtype']} {quote(shape)}")
            end = base + stop
            self.shapes[name], self.dtypes[name], self.ranges[name] = shape, dtype, (base + start, end)
        if end != self.size:
            raise ValueError(f"its tensors end at byte {end:,} of {self.size:,}")

    def __getitem__(self, name: str) -> Tensor:
        (start, stop), dtype = self.ranges[name], self.dtypes[name]
        if start == stop:
            return torch.empty(self.shapes[name], dtype=dtype)
        raw = self._copy(start, stop) if self.copy else self._mapped[start:stop]
        # bytes that are not aligned for this dtype are copied to an aligned address
        return (raw.clone() if raw.storage_offset() % dtype.itemsize else raw).view(dtype).reshape(self.shapes[name])

    @cached_property
    def _mapped(self) -> Tensor:
        """The file mapped into memory, copy-on-write; a page that is never used is never read."""
        with self._open():
            return torch.from_file(str(self.path), shared=False, size=self.size, dtype=torch.uint8)

    def _copy(self, start: int, stop: int) -> Tensor:
        data = torch.empty(stop - start, dtype=torch.uint8)
        with self._open() as file:
            file.seek(start)
            if file.readinto(data.numpy()) != stop - start:  # type: ignore[attr-defined]
                raise CorruptFileError(f"{self.path} ends before its weights do")
        return data

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        """Opens the file; raises if it is not the one whose header was read."""
        with open_regular(self.path) as file:
            if stamp(file) != self.stamp:
                raise CorruptFileError(f"{self.path} changed while it was read")
            yield file


class SafetensorsFolder(TensorStore):
    """All tensors of a folder, from one file or from several that an index lists."""

    def __init__(self, folder: Path, *, copy: bool = False) -> None:
        index, single_file = (safe_join(folder, f"model.safetensors{end}") for end in (".index.json", ""))
        weight_map = read_weight_map(index) if os.path.lexists(index) else None
        if weight_map is None and not os.path.lexists(single_file):
            raise missing_weights(folder)
        self.files: dict[str, SafetensorsFile] = {}
        for file_name in sorted(set(weight_map.values())) if weight_map is not None else [single_file.name]:
            file = SafetensorsFile(safe_join(folder, file_name), copy=copy)
            if duplicates := sorted(set(file) & set(self.files)):
                raise CorruptFileError(
                    f"{file.path} and {self.files[duplicates[0]].path.name} both hold {quote(duplicates[0])}"
                )
            self.files |= dict.fromkeys(file, file)
        if weight_map is not None and (difference := sorted(set(self.files) ^ set(weight_map))):
            raise CorruptFileError(f"{index} and the files that it lists differ in {quote(difference[0])}")
        self.shapes = {name: file.shapes[name] for name, file in self.files.items()}
        self.dtypes = {name: file.dtypes[name] for name, file in self.files.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.files[name][name]


def read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CorruptFileError(f"{index} has no weight_map that names a file for each tensor")
    return weight_map


def missing_weights(folder: Path) -> WeightsError | UnsafeFileError:
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if pickles:
        return UnsafeFileError(
            f"{folder} has no model.safetensors, and {pickles[0]} is a pickle, which could run code when it is read"
        )
    return WeightsError(f"{folder} has no model.safetensors")
