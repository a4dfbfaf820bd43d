"""A fairseq folder: a pickle in checkpoints/, read without its power, and dictionaries and merges in data/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.convert.config import Config
from manyheads.convert.families.fairseq import TRAINER
from manyheads.convert.files import FileError, Store, inside
from manyheads.convert.inert import Stub, read_pickle
from manyheads.spec import Tree, quoted

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # which every dictionary begins with
END, UNKNOWN = 2, 3
LARGEST_DICTIONARY = 16 << 20
CHECKPOINT = ("checkpoints", "checkpoint_best.pt")


class Held(Store):
    """Tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self.tensors.items()}


def read_checkpoint(path: Path) -> tuple[Tree, Held]:
    """The config, as far as it matters, and the weights."""
    found = read_pickle(path)
    weights = found.get("model") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise FileError(f"{path} holds no weights under 'model'")
    said = options(found)
    config: Config = {key: value for key, value in said.items() if key not in TRAINER}
    towers = {"source_tokens": "encoder.embed_tokens.weight", "target_tokens": "decoder.embed_tokens.weight"}
    if missing := [name for name in towers.values() if name not in weights]:
        raise FileError(f"{path} lacks {missing[0]}")
    sizes = {key: len(weights[name]) for key, name in towers.items()}
    ends = {"eos_token_id": END, "decoder_start_token_id": END, "pad_token_id": 1}
    return {"model_type": "fairseq", "architectures": ["TransformerModel"], **config, **sizes, **ends}, Held(dict(weights))


def options(found: Tree) -> Tree:
    """What the model was made with: newer files say it under cfg.model, older ones under args."""
    config = found.get("cfg")
    said: Any = config.get("model") if isinstance(config, dict) else found.get("args")
    said = said.state if isinstance(said, Stub) else said
    if not isinstance(said, dict):
        raise FileError("the checkpoint does not say how its model was made")
    return said


@dataclass(frozen=True)
class Encoding:
    """What a tokenizer makes of a text."""

    ids: list[int]


class WordPieces:
    """Words cut into pieces by learned merges, looked up in one dictionary, and read back from another."""

    def __init__(self, merges: Sequence[tuple[str, str]], source: Sequence[str], target: Sequence[str]) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        pieces = dict.fromkeys(piece for pair in merges for piece in (*pair, pair[0] + pair[1]))
        for word in source:  # a piece that goes on is written with @@, one that ends a word without
            pieces |= dict.fromkeys([word.removesuffix("@@") if word.endswith("@@") else f"{word}</w>"])
        self.pieces = list(pieces)
        vocabulary = {piece: i for i, piece in enumerate(self.pieces)} | {"<unk>": len(self.pieces)}
        self.cut = Tokenizer(models.BPE(vocabulary, list(merges), unk_token="<unk>", end_of_word_suffix="</w>"))
        self.cut.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.places = {word: i for i, word in enumerate((*SPECIAL, *source))}
        self.target = (*SPECIAL, *target)

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        return [Encoding([*map(self.place, found.tokens), END]) for found in self.cut.encode_batch(list(texts))]

    def place(self, piece: str) -> int:
        return self.places.get(piece.removesuffix("</w>") if piece.endswith("</w>") else f"{piece}@@", UNKNOWN)

    def decode(self, ids: Sequence[int]) -> str:
        words = (self.target[i] if 0 <= i < len(self.target) else SPECIAL[UNKNOWN] for i in ids if i not in (0, 1, END))
        return f"{' '.join(words)} ".replace("@@ ", "").strip()

    def get_vocab_size(self, *, with_added_tokens: bool = True) -> int:
        return len(self.places)


def read_words(folder: Path, config: Tree) -> WordPieces | None:
    """The tokenizer of a folder with data/: merges, and two dictionaries told apart by how many words they have."""
    data = inside(folder, "data")
    codes = inside(data, "bpe.code") if data.is_dir() else data
    if not codes.is_file():
        return None
    found = {len(words) + len(SPECIAL): words for path in sorted(data.glob("dict.*.txt")) if (words := lines(inside(data, path.name)))}
    source, target = found.get(config["source_tokens"]), found.get(config["target_tokens"])
    if source is None or target is None or source is target:
        return None
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines(codes) if not line.startswith("#")) if right]
    try:
        return WordPieces(merges, [line.rpartition(" ")[0] for line in source], [line.rpartition(" ")[0] for line in target])
    except Exception as error:
        raise FileError(f"{data} holds merges that cannot be read: {error}") from None


def lines(path: Path) -> list[str]:
    if path.stat().st_size > LARGEST_DICTIONARY:
        raise FileError(f"{path} has {path.stat().st_size:,} bytes, expected at most {LARGEST_DICTIONARY:,}")
    try:
        return [line for line in path.read_text(encoding="utf-8").split("\n") if line]
    except UnicodeDecodeError:
        raise FileError(f"{quoted(str(path))} is not UTF-8 text") from None
