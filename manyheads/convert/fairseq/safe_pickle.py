"""Pickles without code: every name in a file becomes a stub, and tensors are rebuilt by us from their bytes."""

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
    """Stands for an object of any other class: it keeps its state and does nothing."""

    state: Any = None

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def _ignore(self, *_: Any) -> None: ...

    __setitem__ = append = extend = _ignore


class SafeUnpickler(pickle.Unpickler):
    """Reads a pickle; of all the callables that it may name, it finds only stubs and those written here."""

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
    """A tensor from the bytes of its storage, if they hold it."""
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
    """What a torch checkpoint holds: tables, numbers, texts and tensors; all else is a stub."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
                raise CorruptFileError(f"{path} does not hold one data.pkl of at most {MAX_PICKLE_BYTES:,} bytes")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise UnsafeFileError(f"{path} is compressed, which checkpoints are not")
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
