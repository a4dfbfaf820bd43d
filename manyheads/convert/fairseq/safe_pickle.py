"""Reads pickles without executing their code. Classes are replaced by stubs, and tensors are built from their bytes."""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.errors import CheckpointError, CorruptFileError, UnsafeFileError
from manyheads.files.read import open_regular
from manyheads.files.tensors import are_counts, is_shape
from manyheads.spec import quote, shorten

MAX_PICKLE_BYTES = 64 << 20
MAX_SHARED = 4  # tensors that share a storage, such as embeddings, are copied: their size relative to the file's
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

    def __init__(self, data: bytes, storage: Callable[[Any], Tensor], max_bytes: int) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.storage, self.remaining = storage, max_bytes

    def find_class(self, module: str, name: str) -> Any:
        safe = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self.rebuild_tensor,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
        } | {("torch", storage): storage for storage in STORAGES}
        return safe.get((module, name), Stub)

    def persistent_load(self, pid: Any) -> Any:
        return self.storage(pid)

    def rebuild_tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
        """Copies a tensor from its storage, after checking that it fits, and that all together are not too large."""
        valid = isinstance(storage, Tensor) and is_shape(shape) and are_counts((offset, *stride))
        if valid and not math.prod(shape):
            return torch.empty(tuple(shape), dtype=storage.dtype)
        last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) if valid else 0
        if not valid or last >= len(storage):
            raise ValueError(f"a tensor of shape {quote(shape)} does not fit into its storage")
        self.remaining -= math.prod(shape) * storage.dtype.itemsize
        if self.remaining < 0:
            raise ValueError("its tensors are much larger than the file")
        return torch.as_strided(storage, tuple(shape), tuple(stride), offset).clone()


def read_pickle(path: Path) -> Any:
    """Reads a torch checkpoint as dictionaries, numbers, strings and tensors. Other objects are stubs."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            pickles = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
                raise CorruptFileError(
                    f"{path} does not contain exactly one data.pkl of at most {MAX_PICKLE_BYTES:,} bytes"
                )
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise UnsafeFileError(f"{path} is compressed, expected an uncompressed zip file")
            folder = pickles[0].filename.removesuffix("data.pkl")

            @cache  # tensors may share a storage
            def storage(name: str, kind: str) -> Tensor:
                data = bytearray(archive.read(f"{folder}data/{name}"))
                return torch.frombuffer(data, dtype=STORAGES[kind]) if data else torch.empty(0, dtype=STORAGES[kind])

            def storage_of(pid: Any) -> Tensor:
                if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or pid[1] not in STORAGES:
                    raise ValueError("unknown storage")
                return storage(str(pid[2]), pid[1])

            size = os.fstat(file.fileno()).st_size
            return SafeUnpickler(archive.read(pickles[0]), storage_of, MAX_SHARED * size).load()
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CorruptFileError(f"{path} cannot be read: {type(error).__name__}: {shorten(str(error))}") from None
