"""GGUF files: keys and values, and tensors, in one. The header is walked and checked before anything is read."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from manyheads.convert.families import GGUF
from manyheads.convert.families.gguf import BY_NAME, HEAD, TABLES, TIED, shortest
from manyheads.convert.files import FileError, Store
from manyheads.spec import Tree, quoted

MOST_TENSORS, MOST_KEYS, LONGEST_TEXT, LONGEST_LIST = 1 << 16, 1 << 12, 1 << 24, 1 << 22

# how each type of value is stored: struct codes by number; 8 is a text, 9 a list
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9


class Walk:
    """Reads a file from its beginning, and never past its end."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.size = path, file, os.fstat(file.fileno()).st_size

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise FileError(f"{self.path} ends within its header, at byte {self.size:,}")
        return self.file.read(count)

    def number(self, code: str) -> Any:
        found = struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]
        return shortest(found) if code == "f" else found

    def count(self, most: int, what: str) -> int:
        found = int(self.number("Q"))
        if found > most:
            raise FileError(f"{self.path} claims {found:,} {what}, expected at most {most:,}")
        return found

    def text(self) -> str:
        return self.take(self.count(LONGEST_TEXT, "bytes of text")).decode("utf-8", errors="replace")

    def value(self, depth: int = 0) -> Any:
        return self.of_type(self.number("I"), depth)

    def of_type(self, kind: int, depth: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == LIST and not depth:
            inner, length = self.number("I"), self.count(LONGEST_LIST, "items in a list")
            if inner in SCALARS:
                return list(struct.unpack(f"<{length}{SCALARS[inner]}", self.take(length * struct.calcsize(SCALARS[inner]))))
            return [self.of_type(inner, depth + 1) for _ in range(length)]
        if kind not in SCALARS:
            raise FileError(f"{self.path} has a value of a type that is not known: {kind}")
        return self.number(SCALARS[kind])


class Gguf(Store):
    """A file whose header holds: its keys and values, and where each tensor stands."""

    def __init__(self, path: Path) -> None:
        self.path, self.said, self.entries = path, dict[str, Any](), dict[str, tuple[tuple[int, ...], int, int]]()
        if not path.is_file():
            raise FileError(f"{path} is not a plain file")
        try:
            with path.open("rb") as file:
                self._walk(Walk(path, file))
        except OSError as error:
            raise FileError(f"cannot read {path}: {error.strerror or error}") from None

    def _walk(self, walk: Walk) -> None:
        if walk.size < 24 or walk.take(4) != b"GGUF":
            raise FileError(f"{self.path} is no GGUF file")
        version = walk.number("I")
        if version not in (2, 3):
            raise FileError(f"{self.path} has version {version}, expected 2 or 3")
        tensors, keys = walk.count(MOST_TENSORS, "tensors"), walk.count(MOST_KEYS, "keys")
        for _ in range(keys):
            name = walk.text()
            if name in self.said:
                raise FileError(f"{self.path} has the key {quoted(name)} twice")
            self.said[name] = walk.value()
        for _ in range(tensors):
            name, axes = walk.text(), walk.number("I")
            if axes > 4 or name in self.entries:
                raise FileError(f"{self.path}: {quoted(name)} has {axes} axes, or stands there twice")
            shape = tuple(int(walk.number("Q")) for _ in range(axes))
            self.entries[name] = (shape[::-1], walk.number("I"), walk.number("Q"))
        alignment = self.said.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 16:
            raise FileError(f"{self.path} has alignment {quoted(alignment)}")
        self.begin = -(-walk.file.tell() // alignment) * alignment
        end = 0
        for name, (shape, kind, start) in sorted(self.entries.items(), key=lambda entry: entry[1][2]):
            if start < end or start % alignment:
                raise FileError(f"{self.path}: {quoted(name)} begins at byte {start:,} of the tensors, where none can")
            end = start + stored_bytes(self.path, name, shape, kind)
            if self.begin + end > walk.size:
                raise FileError(f"{self.path} ends within {quoted(name)}, at byte {walk.size:,}")

    def stored(self, name: str) -> bytearray:
        shape, kind, start = self.entries[name]
        data = bytearray(stored_bytes(self.path, name, shape, kind))
        with self.path.open("rb") as file:
            file.seek(self.begin + start)
            if file.readinto(data) != len(data):
                raise FileError(f"{self.path} ends within {quoted(name)}")
        return data

    def __getitem__(self, name: str) -> Tensor:
        """One tensor, dequantised to float32, in memory of its own."""
        import gguf
        import numpy

        (shape, kind, _), data = self.entries[name], self.stored(name)
        sort = gguf.GGMLQuantizationType(kind)
        raw = numpy.frombuffer(data, dtype=numpy.uint8)
        if sort == gguf.GGMLQuantizationType.F32:
            return torch.frombuffer(data, dtype=torch.float32).reshape(shape)
        rows = raw.reshape(-1, len(data) // max(1, rows_of(shape)))
        try:
            plain = gguf.dequantize(rows, sort)
        except NotImplementedError:
            raise FileError(f"{self.path}: {quoted(name)} is stored as {sort.name}, which is not read") from None
        return torch.from_numpy(numpy.ascontiguousarray(plain, dtype=numpy.float32)).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (shape, _, _) in self.entries.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        return dict.fromkeys(self.entries, torch.float32)  # which every form is brought to

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are stored alike, byte for byte."""
        return self.entries[name][:2] == self.entries[other][:2] and self.stored(name) == self.stored(other)


def rows_of(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape[:-1]:
        count *= length
    return count


def stored_bytes(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    import gguf

    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise FileError(f"{path}: {quoted(name)} is stored in a form that is not known: {kind}") from None
    if not shape or shape[-1] % block:
        raise FileError(f"{path}: {quoted(name)} has rows of {shape[-1:]}, which are no blocks of {block}")
    return int(rows_of(shape) * shape[-1] // block * size)


# ------------------------------------------------------------------------------------------------------- what it says

SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "eot_token_id": "eot", "pad_token_id": "padding"}


def config_of(file: Gguf) -> Tree:
    """What the file says of its model: the keys behind the name of its architecture, and what its tensors tell."""
    kind = file.said.get("general.architecture")
    if f"gguf-{kind}" not in GGUF:
        known = ", ".join(name.removeprefix("gguf-") for name in GGUF)
        raise FileError(f"{file.path} holds a model of {quoted(kind)}; of GGUF files, these are read: {known}")
    config = {key.removeprefix(f"{kind}."): value for key, value in file.said.items() if key.startswith(f"{kind}.")}
    if own := {"model_type", "architectures", TIED, *BY_NAME, *TABLES, *SPECIAL} & set(config):  # which its tensors say
        raise FileError(f"{file.path} has a key that no such file has: {kind}.{sorted(own)[0]}")
    if "token_embd.weight" not in file or len(file.shapes()["token_embd.weight"]) != 2:
        raise FileError(f"{file.path} has no table of tokens, token_embd.weight")
    config.setdefault("vocab_size", file.shapes()["token_embd.weight"][0])
    config |= {key: name in file for key, name in BY_NAME.items()}
    config[TIED] = HEAD not in file or file.same(HEAD, "token_embd.weight")
    for name in TABLES:
        if f"{name}.weight" in file:
            if not 1 <= (count := file.shapes()[f"{name}.weight"][-1]) <= 1 << 15:
                raise FileError(f"{file.path}: {name}.weight has {count:,} factors")
            config[name] = [shortest(float(factor)) for factor in file[f"{name}.weight"].flatten()]
    ids = {key: file.said.get(f"tokenizer.ggml.{name}_token_id") for key, name in SPECIAL.items()}
    return {"model_type": f"gguf-{kind}", "architectures": ["CausalLM"]} | config | ids


# -------------------------------------------------------------------------------------------------------------- out

FORMS = ("f32", "f16", "q8_0")
LARGEST_STORED = {"F32": 3.4028235e38, "F16": 65504.0, "Q8_0": 127 * 65504.0}


def write_gguf(path: Path, config: Tree, tensors: Mapping[str, Tensor], vocabulary: Mapping[str, Any], form: str) -> None:
    """Writes a file from a config of one of its architectures, tensors by its names, and what is said of tokens."""
    import gguf
    import numpy

    kind = str(config["model_type"]).removeprefix("gguf-")
    writer = gguf.GGUFWriter(str(path), kind)
    own = {key: value for key, value in config.items() if key not in (*BY_NAME, TIED, *TABLES, *SPECIAL, "model_type", "architectures")}
    ids = {f"tokenizer.ggml.{name}_token_id": config.get(key) for key, name in SPECIAL.items()}
    files = {"general.file_type": int({"f32": 0, "f16": 1, "q8_0": 7}[form])}
    for key, value in ({f"{kind}.{key}": value for key, value in own.items()} | files | ids | dict(vocabulary)).items():
        add_value(writer, key, value)
    tables = {f"{name}.weight": torch.tensor(config[name]) for name in TABLES if name in config}
    everything = {**tensors, **tables}
    sorts = {name: gguf.GGMLQuantizationType[stored_as(name, tuple(tensor.shape), form)] for name, tensor in everything.items()}
    for name, tensor in everything.items():
        largest, most = float(tensor.detach().abs().max()), LARGEST_STORED[sorts[name].name]
        if not largest <= most:
            raise ValueError(f"{name} holds {largest:g}, and {sorts[name].name.lower()} numbers up to {most:g} alone; take another form")
        stored = stored_bytes(path, name, tuple(tensor.shape), sorts[name])
        writer.add_tensor_info(name, tuple(tensor.shape), numpy.dtype(numpy.float32), stored, raw_dtype=sorts[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in everything.items():  # one at a time in another form
        writer.write_tensor_data(gguf.quantize(tensor.detach().to("cpu", torch.float32).contiguous().numpy(), sorts[name]))
    writer.close()


def stored_as(name: str, shape: tuple[int, ...], form: str) -> str:
    """Matrices in the form asked for, as far as their rows are whole blocks; norms, biases and positions as they are."""
    if len(shape) < 2 or name == "position_embd.weight":
        return "F32"
    return "F16" if form == "q8_0" and shape[-1] % 32 else form.upper()


def add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
