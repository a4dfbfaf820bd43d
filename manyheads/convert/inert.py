"""Pickles without their power: every name a file asks for becomes an inert stub, and tensors are rebuilt by us from its plain bytes."""

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

from manyheads.convert.files import FileError
from manyheads.spec import quoted

LARGEST_PICKLE = 64 << 20
STORAGES = {
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "DoubleStorage": torch.float64, "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


class Stub:
    """Stands for an object of a class that is never looked up: it keeps what it is given and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class Inert(pickle.Unpickler):
    """Reads a pickle; of all callables it may name, none is ever found but the stubs and those that we wrote."""

    def __init__(self, data: bytes, storage: Callable[[Any], tuple[bytes, torch.dtype]]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.storage = storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return rebuilt
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return itself
        if module == "torch" and name in STORAGES:
            return name
        return Stub

    def persistent_load(self, pid: Any) -> Any:
        return self.storage(pid)


def itself(tensor: Any, *_: Any) -> Any:
    return tensor


def rebuilt(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    """A tensor from the bytes of its storage, if they hold it."""
    data, dtype = storage
    whole = all(type(number) is int and number >= 0 for number in (offset, *shape, *stride))
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) if whole and math.prod(shape) else 0
    if not whole or len(shape) > 8 or (last + 1) * dtype.itemsize > max(len(data), dtype.itemsize):
        raise ValueError(f"a tensor of shape {quoted(shape)} does not fit into its storage")
    if not math.prod(shape):
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer(bytearray(data), dtype=dtype)
    return torch.as_strided(flat, tuple(shape), tuple(stride), offset).clone()


def read_pickle(path: Path) -> Any:
    """What a torch checkpoint holds: tables, numbers, texts and tensors; everything else is a stub."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
            if len(inside) != 1 or inside[0].file_size > LARGEST_PICKLE:
                raise FileError(f"{path} is no checkpoint: it holds no table, or one that is too large")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise FileError(f"{path} is compressed, which no checkpoint is")
            folder = inside[0].filename.removesuffix("data.pkl")

            def storage(pid: Any) -> tuple[bytes, torch.dtype]:
                if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or pid[1] not in STORAGES:
                    raise ValueError(f"a storage that is not known: {quoted(pid)}")
                return archive.read(f"{folder}data/{pid[2]}"), STORAGES[pid[1]]

            return Inert(archive.read(inside[0]), storage).load()
    except (FileError, OSError) as error:
        raise FileError(f"cannot read {path}: {error}") from None
    except Exception as error:
        raise FileError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
