"""Reads a fairseq folder, with a pickle in checkpoints/ that is not executed, and dictionaries and merges in data/."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.convert.fairseq.safe_pickle import Stub, read_pickle
from manyheads.convert.families.fairseq import TRAINER
from manyheads.convert.hf import CheckpointMetadata, load_model
from manyheads.errors import CheckpointConfigError, CheckpointTokenizerError, WeightsError
from manyheads.files.read import read_text, safe_join
from manyheads.files.tensors import InMemoryTensors
from manyheads.model.builder import Model
from manyheads.spec import Tree, quote

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # the first tokens of every dictionary
PAD, EOS, UNKNOWN = 1, 2, 3
MAX_DICTIONARY_BYTES = 16 << 20
CHECKPOINT = ("checkpoints", "checkpoint_best.pt")


def read_fairseq(
    path: Path, *, dtype: torch.dtype | None = None, allow_nonfinite: bool = False
) -> tuple[Model, CheckpointMetadata, Any]:
    """A model, its metadata and its tokenizer, from a folder or from a .pt file, which has no tokenizer."""
    file = reduce(safe_join, CHECKPOINT, path) if path.is_dir() else path
    config, weights = read_checkpoint(file)
    model, metadata = load_model(file, config, weights, {}, dtype=dtype, allow_nonfinite=allow_nonfinite)
    return model, metadata, read_fairseq_tokenizer(path, config) if path.is_dir() else None


def read_checkpoint(path: Path) -> tuple[Tree, InMemoryTensors]:
    """The config and the weights of a .pt file."""
    content = read_pickle(path)
    weights = content.get("model") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise WeightsError(f"{path} has no weights under 'model'")
    tables = {"source_tokens": "encoder.embed_tokens.weight", "target_tokens": "decoder.embed_tokens.weight"}
    if missing := [name for name in tables.values() if name not in weights]:
        raise WeightsError(f"{path} has no {missing[0]}")
    config = {key: value for key, value in model_options(content, path).items() if key not in TRAINER}
    # a pickle can share lists within lists, and then even to print one takes forever
    if nested := [key for key, value in config.items() if not isinstance(value, str | int | float | None)]:
        raise CheckpointConfigError(f"{path}: {quote(nested[0])} has a list or table, which is not supported")
    config |= {"model_type": "fairseq", "architectures": ["TransformerModel"]}
    config |= {key: len(weights[name]) for key, name in tables.items()}
    config |= {"eos_token_id": EOS, "decoder_start_token_id": EOS, "pad_token_id": PAD}
    return config, InMemoryTensors(weights)


def model_options(content: Tree, path: Path) -> Tree:
    """The options of the model, which are under cfg.model in newer files and under args in older ones."""
    config = content.get("cfg")
    options: Any = config.get("model") if isinstance(config, dict) else content.get("args")
    options = options.state if isinstance(options, Stub) else options
    if not isinstance(options, dict):
        raise CheckpointConfigError(f"{path} has no model options under cfg.model or args")
    return options


# ----------------------------------------------------------------------------------------------------------- tokenizer


@dataclass(frozen=True)
class Encoding:
    """The token ids of a text, with 1 in the mask at </s>, and those that truncation removed."""

    ids: list[int]
    special_tokens_mask: list[int]
    overflowing: list[Encoding] = field(default_factory=list)


class FairseqTokenizer:
    """Encodes texts with BPE merges and the source dictionary, and decodes ids with the target dictionary.

    Methods have the names of tokenizers.Tokenizer. The names of special tokens in a text are encoded as plain text.
    """

    truncation: dict[str, int] | None = None
    encodes_targets = False  # `encode` uses the source dictionary

    def __init__(self, merges: Sequence[tuple[str, str]], source: Sequence[str], target: Sequence[str]) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        pieces = dict.fromkeys(piece for pair in merges for piece in (*pair, pair[0] + pair[1]))
        for word in source:  # in dictionaries @@ marks a piece within a word; in merges </w> marks the end of a word
            pieces |= dict.fromkeys([word.removesuffix("@@") if word.endswith("@@") else f"{word}</w>"])
        vocabulary = {piece: i for i, piece in enumerate((*pieces, "<unk>"))}
        self.bpe = Tokenizer(models.BPE(vocabulary, list(merges), unk_token="<unk>", end_of_word_suffix="</w>"))
        self.bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.ids = {word: i for i, word in enumerate((*SPECIAL, *source))}
        self.target = (*SPECIAL, *target)

    def copy(self) -> FairseqTokenizer:
        return copy(self)

    def enable_truncation(self, max_length: int) -> None:
        self.truncation = {"max_length": max_length}

    def encode(self, text: str) -> Encoding:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        encodings = self.bpe.encode_batch(list(texts))
        return [self.add_eos([*map(self.id_of, encoding.tokens)]) for encoding in encodings]

    def add_eos(self, ids: list[int]) -> Encoding:
        """Truncates ids, so that they and </s> have at most the maximum length, and appends </s>."""
        limit = self.truncation["max_length"] - 1 if self.truncation else len(ids)
        first, rest = ids[:limit], ids[limit:]
        return Encoding([*first, EOS], [0] * len(first) + [1], [Encoding(rest, [0] * len(rest))] if rest else [])

    def id_of(self, piece: str) -> int:
        return self.ids.get(piece.removesuffix("</w>") if piece.endswith("</w>") else f"{piece}@@", UNKNOWN)

    def decode(self, ids: Sequence[int]) -> str:
        shown = (i for i in ids if i not in (0, PAD, EOS))
        words = (self.target[i] if 0 <= i < len(self.target) else SPECIAL[UNKNOWN] for i in shown)
        return f"{' '.join(words)} ".replace("@@ ", "").strip()

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in rows]

    def token_to_id(self, token: str) -> int | None:
        return self.ids.get(token)

    def get_vocab(self, *, with_added_tokens: bool = True) -> dict[str, int]:
        return dict(self.ids)

    def get_vocab_size(self, *, with_added_tokens: bool = True) -> int:
        return len(self.ids)


def read_fairseq_tokenizer(folder: Path, config: Tree) -> FairseqTokenizer | None:
    """The tokenizer from the merges and dictionaries in data/, which are told apart by size; None if it is missing."""
    from manyheads.files.tokenizer import explain_tokenizer_errors

    data = safe_join(folder, "data")
    merges_file = safe_join(data, "bpe.code") if data.is_dir() else data
    if not merges_file.is_file():
        return None
    lines = {path.name: dictionary_lines(safe_join(data, path.name)) for path in sorted(data.glob("dict.*.txt"))}
    by_size = {len(words) + len(SPECIAL): [line.rpartition(" ")[0] for line in words] for words in lines.values()}
    source, target = by_size.get(config["source_tokens"]), by_size.get(config["target_tokens"])
    if source is None or target is None or source is target:
        return None
    pairs = (line.partition(" ") for line in dictionary_lines(merges_file) if not line.startswith("#"))
    with explain_tokenizer_errors(f"{merges_file} cannot be read", CheckpointTokenizerError):
        return FairseqTokenizer([(left, right) for left, _, right in pairs if right], source, target)


def dictionary_lines(path: Path) -> list[str]:
    return [line for line in read_text(path, MAX_DICTIONARY_BYTES).split("\n") if line]
