"""Whole models from and to GGUF files: weights, tokenizer and chat template in one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from manyheads.convert.families import GGUF
from manyheads.convert.families.gguf import HEAD, NEEDS_HEAD, outright
from manyheads.convert.files import FileError, published
from manyheads.convert.folder import CONTEXT, Origin, assembled
from manyheads.convert.gguf import FORMS, SPECIAL, Gguf, config_of, write_gguf
from manyheads.convert.match import fitting
from manyheads.convert.tokenizer import said_beside
from manyheads.convert.vocabulary import read_vocabulary, write_vocabulary
from manyheads.convert.weights import write_weights
from manyheads.model.build import Model
from manyheads.spec import LARGEST, SpecError

TEMPLATE = "chat_template.jinja"
LONGEST_TEMPLATE = 1 << 16


def read_file(path: Path, *, dtype: torch.dtype | None = None, allow_nonfinite: bool = False) -> tuple[Model, Origin, Any]:
    """A model, where it came from, and its tokenizer."""
    file = Gguf(path)
    template = file.said.get("tokenizer.chat_template")
    beside = {TEMPLATE: template.encode()} if isinstance(template, str) and len(template) <= LONGEST_TEMPLATE else {}
    tokens, rows = file.said.get("tokenizer.ggml.tokens"), file.shapes().get("token_embd.weight", (0,))[0]
    if isinstance(tokens, list) and len(tokens) > rows:
        raise FileError(f"{path} has {len(tokens):,} tokens, and a table of {rows:,}")
    model, origin = assembled(path, config_of(file), file, beside, dtype=dtype, allow_nonfinite=allow_nonfinite)
    return model, origin, read_vocabulary(file.said, path)


def write_file(model: Model, path: Path, origin: Origin | None, tokenizer: Any, form: str = "f32") -> None:
    """Writes a file that llama.cpp opens; refused, naming the part, where it has no architecture for the model."""
    if form not in FORMS:
        raise SpecError(f"given {form!r}, expected one of {', '.join(FORMS)}")
    spec = outright(model.spec)
    known, architecture, config = fitting(spec, GGUF)
    came = origin.config if origin else {}
    if not config["block_count"]:
        raise ValueError("a GGUF file holds a model with layers, and this one has none")
    config |= special(came, config["vocab_size"])
    config.setdefault(
        "context_length", next((came[key] for key in CONTEXT if type(came.get(key)) is int and 1 <= came[key] <= LARGEST), 2048)
    )
    if tokenizer is None:
        warnings.warn("without a tokenizer llama.cpp opens a file, and cannot be asked: give the folder a tokenizer.json", stacklevel=3)
    said = write_vocabulary(tokenizer, config["vocab_size"], config)
    if (template := chat_template(origin.beside if origin else {})) is not None:
        said["tokenizer.chat_template"] = template
    repeated = {HEAD} if known.model_type in NEEDS_HEAD else set()
    tensors = write_weights(known.rows(spec, architecture), dict(model.named_parameters()), repeated=repeated)
    with published(path) as draft:
        write_gguf(draft, config, tensors, said, form)


def special(config: Mapping[str, Any], vocab: int) -> dict[str, int | None]:
    """One id for each special token: of several that end a text, the first, and the next as the end of a turn."""
    said = {key: config.get(key) for key in SPECIAL}
    ends = said["eos_token_id"] if isinstance(said["eos_token_id"], list) else [said["eos_token_id"]]
    said |= {"eos_token_id": ends[0] if ends else None, "eot_token_id": said["eot_token_id"] or (ends[1] if len(ends) > 1 else None)}
    return {key: value if type(value) is int and 0 <= value < vocab else None for key, value in said.items()}


def chat_template(beside: Mapping[str, bytes]) -> str | None:
    """How a conversation is written as one text: a file of its own, or a key beside the tokenizer."""
    if TEMPLATE in beside:
        return beside[TEMPLATE].decode(errors="replace")
    said = said_beside(beside).get("chat_template")
    return said if isinstance(said, str) else None
