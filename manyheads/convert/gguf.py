"""GGUF files: a config, weights (dequantised) and a tokenizer in one. The header is walked and checked before anything is read."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from manyheads.convert.files import FileError
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
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

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
        if kind == LIST and depth < 2:
            inner, length = self.number("I"), self.count(LONGEST_LIST, "items in a list")
            return [self.of_type(inner, depth + 1) for _ in range(length)]
        if kind not in SCALARS:
            raise FileError(f"{self.path} has a value of a type that is not known: {kind}")
        return self.number(SCALARS[kind])


class Gguf:
    """A file whose header holds: its keys and values, and where each tensor stands."""

    def __init__(self, path: Path) -> None:
        self.path, self.values, self.entries = path, dict[str, Any](), dict[str, tuple[tuple[int, ...], int, int]]()
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
            if name in self.values:
                raise FileError(f"{self.path} has the key {quoted(name)} twice")
            self.values[name] = walk.value()
        for _ in range(tensors):
            name, axes = walk.text(), walk.number("I")
            if axes > 4 or name in self.entries:
                raise FileError(f"{self.path}: {quoted(name)} has {axes} axes, or stands there twice")
            shape = tuple(int(walk.number("Q")) for _ in range(axes))
            self.entries[name] = (shape[::-1], walk.number("I"), walk.number("Q"))
        alignment = self.values.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 16:
            raise FileError(f"{self.path} has alignment {quoted(alignment)}")
        self.begin = -(-walk.file.tell() // alignment) * alignment
        for name, (shape, kind, start) in self.entries.items():
            if self.begin + start + stored_bytes(self.path, name, shape, kind) > walk.size:
                raise FileError(f"{self.path} ends within {quoted(name)}, at byte {walk.size:,}")

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised to float32, in memory of its own."""
        import gguf
        import numpy

        shape, kind, start = self.entries[name]
        data = bytearray(stored_bytes(self.path, name, shape, kind))
        with self.path.open("rb") as file:
            file.seek(self.begin + start)
            file.readinto(data)
        sort = gguf.GGMLQuantizationType(kind)
        raw = numpy.frombuffer(data, dtype=numpy.uint8)
        if sort == gguf.GGMLQuantizationType.F32:
            return torch.frombuffer(data, dtype=torch.float32).reshape(shape)
        rows = raw.reshape(-1, len(data) // max(1, rows_of(shape)))
        return torch.from_numpy(numpy.ascontiguousarray(gguf.dequantize(rows, sort), dtype=numpy.float32)).reshape(shape)


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


# ------------------------------------------------------------------------------------------ as a folder would have it


class Renamed(Mapping[str, Tensor]):
    """The tensors under the names of a Hugging Face folder, queries and keys in the order of its heads."""

    def __init__(self, file: Gguf, names: Mapping[str, str], heads: Mapping[str, int]) -> None:
        self.file, self.names, self.heads = file, names, heads

    def __getitem__(self, name: str) -> Tensor:
        stored = self.names[name]
        tensor = self.file.read(stored)
        heads = next((count for ending, count in self.heads.items() if stored.endswith(ending)), None)
        return tensor if heads is None else as_halves(tensor, heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.file.entries[stored][0] for name, stored in self.names.items()}

    def dtypes(self) -> set[torch.dtype]:
        return {torch.float32}  # which every form is brought to

    def __len__(self) -> int:
        return len(self.names)


def as_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs of neighbours, as this format turns them, to halves."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def as_neighbours(weight: Tensor, heads: int) -> Tensor:
    """The way back."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def theirs(name: str) -> str | None:
    """The name in a folder of a tensor of this file; None for one that follows from the config."""
    path, _, kind = name.rpartition(".")
    if path == "rope_freqs":
        return None
    if path in OUTSIDE:
        return f"{OUTSIDE[path]}.{kind}"
    block, _, rest = path.partition(".")
    index, _, part = rest.partition(".")
    if block == "blk" and index.isascii() and index.isdigit() and part in LAYER:
        return f"model.layers.{int(index)}.{LAYER[part]}.{kind}"
    raise FileError(f"a tensor that this family does not have: {quoted(name)}")


def config_of(file: Gguf) -> Tree:
    """The config that a folder of the same model would have."""
    kind = file.values.get("general.architecture")
    if kind != "llama":
        raise FileError(f"{file.path} holds a model of {quoted(kind)}; of GGUF files, llama is read")

    def said(name: str, default: Any = None, *, needed: bool = False) -> Any:
        value = file.values.get(f"{kind}.{name}", default)
        if needed and type(value) not in (int, float):
            raise FileError(f"{file.path} lacks {kind}.{name}, or it is no number")
        return value

    scaling = said("rope.scaling.type", "none")
    if scaling not in ("none", None):
        raise FileError(f"{file.path} scales its rotation by {quoted(scaling)}, which is not supported from GGUF")
    if "rope_freqs.weight" in file.entries:
        raise FileError(f"{file.path} has a table of rotations of its own, which is not supported from GGUF")
    for key in ("expert_count", "attention.sliding_window"):
        if said(key):
            raise FileError(f"{file.path}: {kind}.{key} changes the model in a way that is not supported from GGUF")
    heads = said("attention.head_count", needed=True)
    tokens = file.values.get("tokenizer.ggml.tokens")
    vocab = said("vocab_size", len(tokens) if isinstance(tokens, list) else None, needed=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": said("embedding_length", needed=True),
        "num_hidden_layers": said("block_count", needed=True),
        "num_attention_heads": heads,
        "num_key_value_heads": said("attention.head_count_kv", heads),
        "intermediate_size": said("feed_forward_length", needed=True),
        "hidden_act": "silu",
        "rms_norm_eps": said("attention.layer_norm_rms_epsilon", needed=True),
        "max_position_embeddings": said("context_length", 2048),
        "rope_parameters": {"rope_type": "default", "rope_theta": said("rope.freq_base", 10000.0)},
        "head_dim": said("attention.key_length", said("rope.dimension_count")),
        "tie_word_embeddings": "output.weight" not in file.entries,
        "attention_bias": "blk.0.attn_q.bias" in file.entries,
    }
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    config |= {key: file.values.get(f"tokenizer.ggml.{name}_token_id") for key, name in ids.items()}
    return config


def weights_of(file: Gguf, config: Tree) -> Renamed:
    names = {found: name for name in file.entries if (found := theirs(name)) is not None}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    return Renamed(file, names, {"attn_q.weight": heads, "attn_k.weight": groups, "attn_q.bias": heads, "attn_k.bias": groups})


def tokenizer_of(file: Gguf) -> Any:
    """The tokenizer that the file holds, where it is of a sort that is known; None otherwise."""
    values = file.values
    tokens, merges, kinds = (values.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type"))
    cut = SPLITS.get(values.get("tokenizer.ggml.pre", "default"))
    if values.get("tokenizer.ggml.model") != "gpt2" or not isinstance(tokens, list) or not isinstance(merges, list) or cut is None:
        return None
    from tokenizers import AddedToken, Tokenizer, decoders, models

    pairs = [(left, right) for left, _, right in (str(merge).partition(" ") for merge in merges) if right]
    try:
        tokenizer = Tokenizer(models.BPE({str(token): i for i, token in enumerate(tokens)}, pairs))
    except Exception as error:
        raise FileError(f"{file.path} has a tokenizer that cannot be read: {error}") from None
    tokenizer.pre_tokenizer = cut()
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds or [], strict=False) if kind in (3, 4)]
    tokenizer.add_special_tokens([AddedToken(str(token), special=True, normalized=False) for token in special])
    return tokenizer


def by_bytes() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def by_digits() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes()])


# how a text is cut before it is merged, by the name the file gives it
SPLITS: dict[Any, Callable[[], Any]] = {"default": by_bytes, "gpt-2": by_bytes, "smollm": by_digits}
