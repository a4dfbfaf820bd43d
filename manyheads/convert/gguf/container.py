"""The GGUF file format, with metadata and tensors in one file. The header is checked before a tensor is read."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from manyheads.convert.families import GGUF
from manyheads.convert.families.gguf import BY_NAME, FACTORS, HEAD, TIED, shortest_float32
from manyheads.errors import (
    CheckpointConfigError,
    CorruptFileError,
    ExportError,
    UnknownArchitectureError,
    WeightsError,
)
from manyheads.files.read import open_regular
from manyheads.files.tensors import Shape, TensorStore, is_shape
from manyheads.kernels.blocks import FORMATS
from manyheads.kernels.weight import QuantizedWeight
from manyheads.spec import Tree, quote

MAX_TENSORS, MAX_KEYS, MAX_TEXT_BYTES, MAX_ITEMS = 1 << 16, 1 << 12, 1 << 24, 1 << 22

# number of a value type → its struct code; strings and lists have other encodings
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9


class HeaderReader:
    """Reads the values of a header, and raises an error at the end of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.size = path, file, os.fstat(file.fileno()).st_size

    def read(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise CorruptFileError(f"{self.path} ends within its header, at byte {self.size:,}")
        return self.file.read(count)

    def number(self, code: str) -> Any:
        value = struct.unpack(f"<{code}", self.read(struct.calcsize(code)))[0]
        return shortest_float32(value) if code == "f" else value

    def count(self, maximum: int, what: str) -> int:
        value = int(self.number("Q"))
        if value > maximum:
            raise CorruptFileError(f"{self.path} has {value:,} {what} by its header, expected at most {maximum:,}")
        return value

    def text(self) -> str:
        return self.read(self.count(MAX_TEXT_BYTES, "bytes of text")).decode("utf-8", errors="replace")

    def value(self, kind: int, *, in_list: bool = False) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == LIST and not in_list:
            inner, length = self.number("I"), self.count(MAX_ITEMS, "items in a list")
            if inner in SCALARS:
                code = f"<{length}{SCALARS[inner]}"
                return list(struct.unpack(code, self.read(struct.calcsize(code))))
            return [self.value(inner, in_list=True) for _ in range(length)]
        if kind not in SCALARS:
            raise CorruptFileError(f"{self.path} has a value of the unknown type {kind}")
        return self.number(SCALARS[kind])


class GgufFile(TensorStore):
    """A GGUF file whose header was checked, with its metadata and the offset of each tensor.

    Tensors are read as float32 or, with `keep_blocks`, matrices as the blocks that they are.
    """

    def __init__(self, path: Path, *, keep_blocks: bool = False) -> None:
        self.path, self.keep_blocks, self.metadata = path, keep_blocks, dict[str, Any]()
        # the number of the quantization type, and the offset of the first byte
        self.entries = dict[str, tuple[int, int]]()
        self.shapes = dict[str, Shape]()
        with open_regular(path) as file:
            header = HeaderReader(path, file)
            self._read_header(header)
            self._check_tensors(header)
        self.dtypes = dict.fromkeys(self.shapes, torch.float32)  # all quantizations are converted to float32

    def _read_header(self, header: HeaderReader) -> None:
        if header.size < 24 or header.read(4) != b"GGUF":
            raise CorruptFileError(f"{self.path} is not a GGUF file")
        version = header.number("I")
        if version not in (2, 3):
            raise CorruptFileError(f"{self.path} has version {version}, expected 2 or 3")
        tensors, keys = header.count(MAX_TENSORS, "tensors"), header.count(MAX_KEYS, "keys")
        for _ in range(keys):
            name = header.text()
            if name in self.metadata:
                raise CorruptFileError(f"{self.path} has the key {quote(name)} twice")
            self.metadata[name] = header.value(header.number("I"))
        for _ in range(tensors):
            name, axes = header.text(), header.number("I")
            if axes > 4 or name in self.shapes:
                raise CorruptFileError(f"{self.path}: {quote(name)} has {axes} axes, or occurs twice")
            shape = self.shapes[name] = tuple(int(header.number("Q")) for _ in range(axes))[::-1]
            if not is_shape(shape) or 0 in shape:
                raise CorruptFileError(f"{self.path}: {quote(name)} cannot have the shape {shape}")
            self.entries[name] = header.number("I"), header.number("Q")

    def _check_tensors(self, header: HeaderReader) -> None:
        """Checks that tensors are aligned, do not overlap, and end within the file."""
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 16:
            raise CorruptFileError(f"{self.path} has the alignment {quote(alignment)}")
        self.data_start, end = -(-header.file.tell() // alignment) * alignment, 0
        for name, (kind, start) in sorted(self.entries.items(), key=lambda entry: entry[1][1]):
            if start < end or start % alignment:
                raise CorruptFileError(f"{self.path}: {quote(name)} cannot start at byte {start:,} of the tensors")
            end = start + stored_bytes(self.path, name, self.shapes[name], kind)
            if self.data_start + end > header.size:
                raise CorruptFileError(f"{self.path} ends within {quote(name)}, at byte {header.size:,}")

    def read_raw(self, name: str) -> bytearray:
        kind, start = self.entries[name]
        data = bytearray(stored_bytes(self.path, name, self.shapes[name], kind))
        with open_regular(self.path) as file:
            file.seek(self.data_start + start)
            if file.readinto(data) != len(data):
                raise CorruptFileError(f"{self.path} ends within {quote(name)}")
        return data

    def __getitem__(self, name: str) -> Tensor:
        """Reads one tensor."""
        import gguf
        import numpy

        shape, data, kind = self.shapes[name], self.read_raw(name), gguf.GGMLQuantizationType(self.entries[name][0])
        if self.keep_blocks and len(shape) == 2 and kind.name.lower() in FORMATS:
            rows = torch.frombuffer(data, dtype=torch.uint8).unflatten(0, (shape[0], -1))
            return QuantizedWeight(rows, kind.name.lower())
        if kind == gguf.GGMLQuantizationType.F32:
            return torch.frombuffer(data, dtype=torch.float32).reshape(shape)
        try:
            dequantized = gguf.dequantize(numpy.frombuffer(data, dtype=numpy.uint8), kind)
        except NotImplementedError:
            raise WeightsError(f"{self.path}: {quote(name)} is stored as {kind.name}, which is not supported") from None
        return torch.from_numpy(numpy.ascontiguousarray(dequantized, dtype=numpy.float32)).reshape(shape)

    def same_bytes(self, name: str, other: str) -> bool:
        """Whether two tensors are stored with the same shape, quantization and bytes."""
        same_kind = self.entries[name][0] == self.entries[other][0]
        return same_kind and self.shapes[name] == self.shapes[other] and self.read_raw(name) == self.read_raw(other)


def stored_bytes(path: Path, name: str, shape: Shape, kind: int) -> int:
    import gguf

    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise WeightsError(f"{path}: {quote(name)} has the unknown quantization {kind}") from None
    if not shape or shape[-1] % block:
        raise CorruptFileError(
            f"{path}: the rows of {quote(name)}, {shape[-1:]}, are not a multiple of the block size {block}"
        )
    return int(prod(shape) // block * size)


# -------------------------------------------------------------------------------------------------------------- config

SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "eot_token_id": "eot", "pad_token_id": "padding"}
# keys that are computed here and must not occur in a file
MADE_HERE = ("model_type", "architectures", TIED, *BY_NAME, *FACTORS, *SPECIAL)


def config_of(file: GgufFile) -> Tree:
    """The keys of the file without the architecture's prefix, and the keys that follow from its tensors."""
    kind = file.metadata.get("general.architecture")
    if f"gguf-{kind}" not in GGUF:
        supported = ", ".join(name.removeprefix("gguf-") for name in GGUF)
        raise UnknownArchitectureError(f"{file.path} holds a {quote(kind)} model, expected one of {supported}")
    config = {key.removeprefix(f"{kind}."): value for key, value in file.metadata.items() if key.startswith(f"{kind}.")}
    if wrong := sorted(set(MADE_HERE) & set(config)):
        raise CheckpointConfigError(f"{file.path} has the unknown key {kind}.{wrong[0]}")
    if len(file.shapes.get("token_embd.weight", ())) != 2:
        raise WeightsError(f"{file.path} has no token embedding, token_embd.weight")
    config.setdefault("vocab_size", file.shapes["token_embd.weight"][0])
    config |= {key: name in file for key, name in BY_NAME.items()}
    config[TIED] = HEAD not in file or file.same_bytes(HEAD, "token_embd.weight")
    for name in FACTORS:
        if f"{name}.weight" in file:
            if not 1 <= (count := file.shapes[f"{name}.weight"][-1]) <= 1 << 15:
                raise WeightsError(f"{file.path}: {name}.weight has {count:,} factors")
            config[name] = [shortest_float32(float(factor)) for factor in file[f"{name}.weight"].flatten()]
    ids = {key: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in SPECIAL.items()}
    return {"model_type": f"gguf-{kind}", "architectures": ["CausalLM"]} | config | ids


# ------------------------------------------------------------------------------------------------------------- writing

OUTTYPES = {"f32": 0, "f16": 1, "q8_0": 7}  # type of matrices → its number in general.file_type
MAX_VALUES = {"F32": 3.4028235e38, "F16": 65504.0, "Q8_0": 127 * 65504.0}


def write_container(
    path: Path, config: Tree, tensors: Mapping[str, Tensor], vocabulary: Mapping[str, Any], outtype: str
) -> None:
    """Writes a file from a config and tensors with the names of its architecture, and the tokenizer's metadata."""
    import gguf
    import numpy

    architecture = str(config["model_type"]).removeprefix("gguf-")
    writer = gguf.GGUFWriter(str(path), architecture)
    metadata = {f"{architecture}.{key}": value for key, value in config.items() if key not in MADE_HERE}
    metadata |= {"general.file_type": OUTTYPES[outtype]} | dict(vocabulary)
    metadata |= {f"tokenizer.ggml.{name}_token_id": config.get(key) for key, name in SPECIAL.items()}
    for key, value in metadata.items():
        add_value(writer, key, value)
    tensors = {**tensors, **{f"{name}.weight": torch.tensor(config[name]) for name in FACTORS if name in config}}
    kinds = {
        name: gguf.GGMLQuantizationType[stored_as(name, tuple(tensor.shape), outtype)]
        for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        kind, largest = kinds[name], float(tensor.detach().abs().max())
        if not largest <= MAX_VALUES[kind.name]:
            raise ExportError(
                f"{name} has a value of {largest:g}; the maximum of {kind.name.lower()} is {MAX_VALUES[kind.name]:g}",
                hint="choose another outtype",
            )
        size = stored_bytes(path, name, tuple(tensor.shape), kind)
        writer.add_tensor_info(name, tuple(tensor.shape), numpy.dtype(numpy.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():  # converts one tensor at a time to save memory
        data = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        writer.write_tensor_data(gguf.quantize(data, kinds[name]))
    writer.close()


def stored_as(name: str, shape: Shape, outtype: str) -> str:
    """The type of a tensor: `outtype` for matrices whose rows fit its blocks, float32 for norms, biases, positions."""
    if len(shape) < 2 or name == "position_embd.weight":
        return "F32"
    return "F16" if outtype == "q8_0" and shape[-1] % 32 else outtype.upper()


def add_value(writer: Any, key: str, value: Any) -> None:
    if value is not None:
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        adders.get(type(value), writer.add_array)(key, value)
