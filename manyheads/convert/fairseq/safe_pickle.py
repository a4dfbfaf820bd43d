"""Reads pickles without executing their code. Classes are replaced by stubs, and tensors are built from their bytes."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.errors import CheckpointError, CorruptFileError, UnsafeFileError
from manyheads.spec import quoted

MAX_PICKLE_BYTES = 64 << 20
STORAGES = {
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "DoubleStorage": torch.float64,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


class Stub:
    """Replaces an object of an unknown class, and stores only its state."""

    state: Any = None

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def _ignore(self, *_: Any) -> None: ...

    __setitem__ = append = extend = _ignore


class SafeUnpickler(pickle.Unpickler):
    """An unpickler that resolves every global name to a stub or to one of the functions of this file."""

    def __init__(self, data: bytes, storage: Callable[[Any], tuple[bytes, torch.dtype]]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.storage = storage

    def find_class(self, module: str, name: str) -> Any:
        safe = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
            ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
        } | {("torch", storage): storage for storage in STORAGES}
        return safe.get((module, name), Stub)

    def persistent_load(self, pid: Any) -> Any:
        return self.storage(pid)


def rebuild_parameter(tensor: Any, *_: Any) -> Any:
    return tensor


def rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    """Builds a tensor from the bytes of its storage, after checking that it fits into them."""
    data, dtype = storage
    valid = len(shape) <= 8 and all(type(count) is int and count >= 0 for count in (offset, *shape, *stride))
    if valid and not math.prod(shape):
        return torch.empty(tuple(shape), dtype=dtype)
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) if valid else 0
    if not valid or (last + 1) * dtype.itemsize > len(data):
        raise ValueError(f"a tensor of shape {quoted(shape)} does not fit into its storage")
    flat = torch.frombuffer(bytearray(data), dtype=dtype)
    return torch.as_strided(flat, tuple(shape), tuple(stride), offset).clone()


def read_pickle(path: Path) -> Any:
    """Reads a torch checkpoint as dictionaries, numbers, strings and tensors. Other objects are stubs."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
                raise CorruptFileError(
                    f"{path} does not contain exactly one data.pkl of at most {MAX_PICKLE_BYTES:,} bytes"
                )
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise UnsafeFileError(f"{path} is compressed, expected an uncompressed zip file")
            folder = pickles[0].filename.removesuffix("data.pkl")

            def storage(pid: Any) -> tuple[bytes, torch.dtype]:
                if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or pid[1] not in STORAGES:
                    raise ValueError(f"unknown storage {quoted(pid)}")
                return archive.read(f"{folder}data/{pid[2]}"), STORAGES[pid[1]]

            return SafeUnpickler(archive.read(pickles[0]), storage).load()
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CorruptFileError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
