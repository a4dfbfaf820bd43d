"""The pooling of a sentence-transformers folder, which computes one vector per text, and how it reads a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import CheckpointConfigError, CheckpointError
from manyheads.files.read import parse_json, parse_json_value
from manyheads.parts.head import PoolSpec, VectorSpec
from manyheads.spec import MAX_COUNT, Tree, quote

SETTINGS = "sentence_bert_config.json"
MIN_LENGTH = 3  # tokens of a truncated text, of which two may be special
POOLING_FILES = ("modules.json", SETTINGS, "config_sentence_transformers.json")
MODULES = ["Transformer", "Pooling", "Normalize"]
MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first", "pooling_mode_lasttoken": "last"}


@dataclass(frozen=True)
class Pooling:
    """The kind of pooling, whether vectors are normalized to length 1, and how texts are read."""

    kind: str = "mean"
    normalize: bool = False
    max_seq_length: int | None = None  # tokens to which texts are truncated, special tokens included
    do_lower_case: bool = False
    unsupported: str = ""  # why the config is not supported, which is an error only if a vector is computed

    def pool(self, x_BLD: Tensor, padding_mask: Tensor | None) -> Tensor:
        if self.unsupported:
            raise CheckpointConfigError(self.unsupported)
        pooled: Tensor = PoolSpec.from_config(self.kind).pool(x_BLD, padding_mask)
        return F.normalize(pooled, dim=-1) if self.normalize else pooled

    def configure(self, tokenizer: Any, max_positions: int | None) -> None:
        """Makes the tokenizer read texts as sentence-transformers does, unless a run has set its own truncation."""
        from tokenizers import normalizers

        if self.do_lower_case:
            steps = [tokenizer.normalizer] if tokenizer.normalizer else []
            tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
        if self.max_seq_length is not None and tokenizer.truncation is None:
            tokenizer.enable_truncation(min(self.max_seq_length, max_positions or self.max_seq_length))


def read_pooling(extra_files: Mapping[str, bytes]) -> Pooling:
    """The pooling that modules.json and sentence_bert_config.json describe."""
    try:
        return replace(parse_modules(extra_files), **parse_settings(extra_files))
    except CheckpointError as error:
        return Pooling(unsupported=str(error))


def parse_settings(extra_files: Mapping[str, bytes]) -> Tree:
    """Reads max_seq_length and do_lower_case from sentence_bert_config.json."""
    data = extra_files.get(SETTINGS)
    config = {} if data is None else parse_json(data, Path(SETTINGS))
    length, lower = config.get("max_seq_length"), config.get("do_lower_case", False)
    if length is not None and (type(length) is not int or not MIN_LENGTH <= length <= MAX_COUNT):
        raise CheckpointConfigError(f"{SETTINGS}: max_seq_length is {quote(length)}, expected at least {MIN_LENGTH}")
    if type(lower) is not bool:
        raise CheckpointConfigError(f"{SETTINGS}: do_lower_case is {quote(lower)}, expected true or false")
    return {"max_seq_length": length, "do_lower_case": lower}


def parse_modules(extra_files: Mapping[str, bytes]) -> Pooling:
    """Reads modules.json, which lists Transformer, Pooling and Normalize in this order; the last two are optional."""
    try:
        modules = parse_json_value(extra_files["modules.json"], Path("modules.json"))
        names = [module["type"].rpartition(".")[2] for module in modules]
        paths = [str(module.get("path", "")) for module in modules]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointConfigError("modules.json is not a list of modules, each with a type and a path") from None
    if not names or names != MODULES[: len(names)]:
        raise CheckpointConfigError(
            f"modules.json has the modules {quote(', '.join(names))}, expected {', '.join(MODULES)} in this order"
        )
    path = f"{paths[1]}/config.json" if len(names) > 1 else ""
    if path and path not in extra_files:
        raise CheckpointConfigError(f"modules.json names {quote(path)}, which the folder does not have")
    config = parse_json(extra_files[path], Path(path)) if path else {}
    modes = {key: value for key, value in config.items() if key.startswith("pooling_mode")}
    if unknown := [key for key, value in modes.items() if key == "pooling_mode" or type(value) is not bool]:
        mode = quote(unknown[0])
        raise CheckpointConfigError(f"{path}: {mode} is {quote(modes[unknown[0]])}, expected true or false")
    active = [key for key, value in modes.items() if value]
    if len(active) > 1 or any(key not in MODES for key in active):
        raise CheckpointConfigError(f"{path} has {quote(', '.join(active))}, expected one of {', '.join(MODES)}")
    return Pooling(MODES[active[0]] if active else "mean", "Normalize" in names)


def write_pooling(head: VectorSpec, width: int) -> dict[str, bytes]:
    """The files of a sentence-transformers folder that compute what the head does; none if they cannot."""
    active = next((mode for mode, kind in MODES.items() if kind == head.pool.kind), None)
    if active is None or head.dense:
        return {}
    paths = ["", "1_Pooling", *(["2_Normalize"] if head.normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{MODULES[i]}"}
        for i, path in enumerate(paths)
    ]
    pooling = {"word_embedding_dimension": width} | {mode: mode == active for mode in MODES}
    trees = {"modules.json": modules, "1_Pooling/config.json": pooling}
    return {name: json.dumps(tree, indent=2).encode() + b"\n" for name, tree in trees.items()}
