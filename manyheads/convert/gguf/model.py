"""Reads models from GGUF files and writes them, with their tokenizer and chat template."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from manyheads.convert.families import GGUF
from manyheads.convert.families.gguf import HEAD, NEEDS_HEAD, resolve_sizes
from manyheads.convert.gguf.container import OUTTYPES, SPECIAL, GgufFile, config_of, write_container
from manyheads.convert.gguf.vocabulary import read_vocabulary, write_vocabulary
from manyheads.convert.hf import (
    CHAT_TEMPLATE,
    MAX_POSITION_KEYS,
    CheckpointMetadata,
    StoredWeights,
    load_model,
    read_chat_template,
)
from manyheads.convert.match import expressible
from manyheads.errors import CheckpointTokenizerError, ExportError, UsageError
from manyheads.files.write import atomic_output
from manyheads.model.builder import Model
from manyheads.spec import MAX_COUNT


def read_gguf(
    path: Path, *, dtype: torch.dtype | None = None, allow_nonfinite: bool = False, keep_blocks: bool = False
) -> tuple[Model, CheckpointMetadata, Any]:
    """A model, its metadata and its tokenizer. With `keep_blocks`, matrices stay quantized where the kernels can."""
    file = GgufFile(path, keep_blocks=keep_blocks)
    template = file.metadata.get("tokenizer.chat_template")
    tokens, rows = file.metadata.get("tokenizer.ggml.tokens"), file.shapes.get("token_embd.weight", (0,))[0]
    if isinstance(tokens, list) and len(tokens) > rows:
        raise CheckpointTokenizerError(f"{path} has {len(tokens):,} tokens, but embeddings for {rows:,}")
    extra_files = {CHAT_TEMPLATE: template.encode()} if isinstance(template, str) else {}
    model, metadata = load_model(path, config_of(file), file, extra_files, dtype=dtype, allow_nonfinite=allow_nonfinite)
    return model, metadata, read_vocabulary(file.metadata, path)


def write_gguf(
    model: Model, path: Path, metadata: CheckpointMetadata | None, tokenizer: Any, outtype: str = "f32"
) -> None:
    """Writes a file for llama.cpp. The error names a part that none of its architectures has."""
    if outtype not in OUTTYPES:
        raise UsageError(f"outtype is {outtype!r}, expected one of {', '.join(OUTTYPES)}")
    model, (family, architecture, config, *_) = expressible(model, GGUF, resolve_sizes)
    old = metadata.config if metadata else {}
    if not config["block_count"]:
        raise ExportError("GGUF export needs a model with at least one layer")
    config |= special_tokens(old, config["vocab_size"])
    lengths = (old[key] for key in MAX_POSITION_KEYS if type(old.get(key)) is int and 1 <= old[key] <= MAX_COUNT)
    config.setdefault("context_length", next(lengths, 2048))
    if tokenizer is None:
        warnings.warn("the model has no tokenizer, so llama.cpp can open the file but cannot read texts", stacklevel=3)
    vocabulary = write_vocabulary(tokenizer, config["vocab_size"], config)
    if (template := read_chat_template(metadata.extra_files if metadata else {})) is not None:
        vocabulary["tokenizer.chat_template"] = template
    tied = frozenset({HEAD} if family.model_type in NEEDS_HEAD else ())
    table = family.table(model.spec, architecture, dict(model.named_parameters()))
    tensors = StoredWeights(table, tied=tied & set(table.tied)).tensors(model)
    with atomic_output(path) as draft:
        write_container(draft, config, tensors, vocabulary, outtype)


def special_tokens(config: Mapping[str, Any], vocab_size: int) -> dict[str, int | None]:
    """One id per special token. Of several eos tokens, the first is eos and the second is eot."""
    ids = {key: config.get(key) for key in SPECIAL}
    ends = ids["eos_token_id"] if isinstance(ids["eos_token_id"], list) else [ids["eos_token_id"]]
    ids["eos_token_id"] = ends[0] if ends else None
    if ids["eot_token_id"] is None and len(ends) > 1:
        ids["eot_token_id"] = ends[1]
    return {key: token if type(token) is int and 0 <= token < vocab_size else None for key, token in ids.items()}
