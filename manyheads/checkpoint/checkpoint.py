"""A checkpoint, which is a model with its tokenizer: loading it, and running it on texts or token ids."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.convert.fairseq.model import CHECKPOINT, read_fairseq
from manyheads.convert.gguf.model import chat_template, read_gguf
from manyheads.convert.hf import (
    MAX_POSITION_KEYS,
    CheckpointMetadata,
    name_in_errors,
    read_folder,
    read_tokenizer,
    read_tokenizer_config,
)
from manyheads.convert.hub import download, is_name
from manyheads.convert.pooling import Pooling, read_pooling
from manyheads.errors import (
    CheckpointConfigError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTokenizerError,
    HashMismatchError,
    InputError,
    InputLengthError,
    InputShapeError,
    ManyheadsError,
    PathNotFoundError,
    UnsupportedError,
    UsageError,
)
from manyheads.files.manifest import TRAINER, verify_manifest
from manyheads.files.read import explain_read_errors, read_bytes, safe_join
from manyheads.files.tokenizer import encode_texts, explain_tokenizer_errors
from manyheads.generate.checkpoint_settings import read_checkpoint_settings
from manyheads.generate.config import CheckpointSettings, generation_config
from manyheads.generate.generator import BATCH_TOKENS, TextGenerator
from manyheads.model.build import DTYPES, Model, check_device
from manyheads.model.finite import check_finite
from manyheads.model.record import record_hidden_states
from manyheads.model.spec import ModelSpec
from manyheads.model.transformer import Transformer
from manyheads.parts.inputs import Inputs, group_by_length, pad_rows
from manyheads.spec import Tree, quoted

MAX_READS = 100  # of a run's checkpoint, while the run replaces it


@dataclass(frozen=True)
class Checkpoint:
    """A model, its tokenizer if it has one, and the files it was read with. It is immutable."""

    model: Model
    tokenizer: Any = None  # a tokenizers.Tokenizer
    metadata: CheckpointMetadata | None = None
    pooling: Pooling | None = None
    path: Path | None = None  # the folder with config.json, if it was read from one

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def config(self) -> Tree:
        return self.metadata.config if self.metadata else {}

    @property
    def token_names(self) -> dict[str, str]:
        """The special tokens in tokenizer_config.json, by role."""
        config = read_tokenizer_config(self.metadata.extra_files) if self.metadata else {}
        values = {role: config.get(f"{role}_token") for role in ("bos", "eos", "cls", "sep", "pad", "unk", "mask")}
        texts = {role: value.get("content") if isinstance(value, dict) else value for role, value in values.items()}
        return {role: text for role, text in texts.items() if isinstance(text, str)}

    @property
    def task(self) -> Tree | None:
        """The task of training with its fields, if a run recorded it."""
        task = self.config.get("task")
        return task if isinstance(task, dict) and isinstance(task.get("kind"), str) else None

    @cached_property
    def generation_settings(self) -> CheckpointSettings:
        """What the checkpoint says about generation."""
        if self.metadata is None:
            return CheckpointSettings()
        return read_checkpoint_settings(self.config, self.metadata.extra_files)

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that formats a conversation as one text, if the checkpoint has one."""
        return chat_template(self.metadata.extra_files) if self.metadata else None

    @property
    def max_positions(self) -> int | None:
        """The maximum number of input tokens (of source tokens, if there is a source); None if there is no limit."""
        stack = self.spec.encoder or self.spec.decoder
        return stack.max_positions if stack else None

    @property
    def max_target_positions(self) -> int | None:
        """The maximum number of decoder tokens; None if there is no limit."""
        return self.spec.decoder.max_positions if self.spec.decoder else None

    @property
    def trained_length(self) -> int | None:
        """The tokens of the texts that the model was trained on, of the config, a run or its rope; None if unknown."""
        decoder = self.spec.decoder
        scaled = (getattr(layer.position, "scaling", None) for layer in (decoder.expanded_layers() if decoder else ()))
        lengths = (
            *(self.config.get(key) for key in MAX_POSITION_KEYS),
            ((self.tokenizer and getattr(self.tokenizer, "truncation", None)) or {}).get("max_length"),
            *(getattr(scaling, "length", None) for scaling in scaled),
        )
        return next((length for length in lengths if type(length) is int), None)

    @property
    def has_source(self) -> bool:
        """Whether the model reads a source and a target, as an encoder–decoder does."""
        return self.spec.has_source

    @cached_property
    def id2label(self) -> dict[int, str]:
        """The names of the classes by index, from the config."""
        try:
            return {int(index): str(name) for index, name in (self.config.get("id2label") or {}).items()}
        except (ValueError, AttributeError):
            raise CheckpointConfigError(
                f"id2label is {quoted(self.config['id2label'])}, expected names by index"
            ) from None

    # -------------------------------------------------------------------------------------------------------- tensors

    @torch.no_grad()
    def logits(
        self, ids: Tensor, decoder_input_ids: Tensor | None = None, padding_mask: Tensor | None = None, **more: Tensor
    ) -> Tensor:
        """The output of the head, B×L×V for tokens. `ids` and `padding_mask` are those of the encoder, if any."""
        inputs = Inputs(ids, padding_mask=padding_mask, **more).to(self.device)  # type: ignore[arg-type]
        if not self.has_source:
            if decoder_input_ids is not None:
                raise UsageError(
                    f"decoder_input_ids are for an encoder–decoder; this model is {self.spec.architecture}"
                )
            return self.model(inputs)
        if decoder_input_ids is None:
            raise UsageError(f"this {self.spec.architecture} model needs decoder_input_ids too")
        return self.model(Inputs.of(decoder_input_ids).to(self.device), inputs)

    @torch.no_grad()
    def hidden(
        self, ids: Tensor, decoder_input_ids: Tensor | None = None, padding_mask: Tensor | None = None, **more: Tensor
    ) -> list[Tensor]:
        """The embeddings and the output of every layer (the last after the final norm), first of the encoder."""
        if not isinstance(self.model, Transformer):
            raise UnsupportedError(
                f"hidden states are available for transformers; this model is {self.spec.architecture}"
            )
        with record_hidden_states(self.model) as states:
            self.logits(ids, decoder_input_ids, padding_mask, **more)
        return states

    @torch.no_grad()
    def embed(self, texts: str | Sequence[str], *, truncate: bool = False) -> Tensor:
        """One vector per text, by a vector head, the pooling of sentence-transformers, or the mean over tokens.

        With `truncate`, a text that is longer than the model has positions is truncated, with a warning.
        """
        self.check_reads_text()
        checkpoint = self.truncating(self.max_positions) if truncate else self
        return self.embed_inputs(self.pad(checkpoint.encode_ids([texts] if isinstance(texts, str) else texts)))

    def embed_inputs(self, inputs: Inputs) -> Tensor:
        architectures = ("encoder", "decoder") if self.pooling else ("encoder",)
        if not isinstance(self.model, Transformer) or self.spec.architecture not in architectures:
            raise UnsupportedError(
                f"embeddings need an encoder, or a decoder with a pooling config; this is {self.spec.architecture}"
            )
        pool = self.pooling.pool if self.pooling else None
        return self.finite(partial(self.model.embed_sequences, inputs, pool))

    def pad(self, rows: Sequence[Sequence[int]], *, left: bool = False) -> Inputs:
        """Pads rows of ids to one batch, on the right or on the left."""
        return pad_rows(rows, left=left).to(self.device)

    def outputs(
        self, rows: Sequence[Sequence[int]], function: Callable[[Inputs], Tensor] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields (index, output) for each row of ids, batch by batch. Rows of similar length share a batch.

        An output per token is as long as the longest row of its batch. `function` is called instead of the model.
        """
        for batch in group_by_length([len(row) for row in rows], BATCH_TOKENS):
            with torch.no_grad():
                outputs = self.finite(partial(function or self.model, self.pad([rows[i] for i in batch])))
            yield from zip(batch, outputs, strict=True)

    def finite(self, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` returns; raises if it is NaN or infinite, and names the first layer where it is."""
        return check_finite(self.model, compute(), compute)

    # ---------------------------------------------------------------------------------------------------------- texts

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """The tokenizer's encoding of each text. Its `overflowing` holds the tokens that were truncated."""
        if self.tokenizer is None:
            raise CheckpointTokenizerError("this checkpoint has no tokenizer; give token ids")
        check_texts(texts)
        encodings = encode_texts(self.tokenizer, texts, CheckpointTokenizerError)
        for index, encoding in enumerate(encodings):
            self.check_length(len(encoding.ids), index)
        return encodings

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, with a warning if some were truncated."""
        encodings = self.encode(texts)
        if count := sum(bool(one.overflowing) for one in encodings):
            limit = self.tokenizer.truncation["max_length"]
            warnings.warn(f"{count:,} of {len(texts):,} texts were truncated to {limit:,} tokens", stacklevel=3)
        return [one.ids for one in encodings]

    def encode_with_special(self, texts: Sequence[str], names: Sequence[str]) -> list[Any]:
        """As `encode`, but these special tokens are recognised in a text, even if the tokenizer reads them as text."""
        check_texts(texts)
        special, plain = self._piece_tokenizers
        encode = partial(encode_texts, kind=CheckpointTokenizerError, add_special_tokens=False)
        tokens = dict(zip(names, encode(special, names), strict=True))
        between = re.compile(f"({'|'.join(map(re.escape, names))})")
        encodings = []
        for index, text in enumerate(texts):
            pieces = between.split(text)
            parts = [tokens.get(one, encoding) for one, encoding in zip(pieces, encode(plain, pieces), strict=True)]
            with explain_tokenizer_errors("the tokenizer failed", CheckpointTokenizerError):
                encodings.append(self.tokenizer.post_process(type(parts[0]).merge(parts)))
            self.check_length(len(encodings[-1].ids), index)
        return encodings

    def encode_pieces(self, pieces: Sequence[str]) -> list[Any]:
        """The encodings of parts of a text, without special tokens and truncation."""
        return encode_texts(self._piece_tokenizers[1], pieces, CheckpointTokenizerError, add_special_tokens=False)

    @cached_property
    def _piece_tokenizers(self) -> tuple[Any, Any]:
        """Copies of the tokenizer for parts of a text: one recognises special tokens, and none truncates."""
        special, plain = (copy_tokenizer(self.tokenizer, encode_special_tokens=one) for one in (False, True))
        special.no_truncation()
        plain.no_truncation()
        return special, plain

    def with_truncation(self, max_length: int | None) -> Checkpoint:
        """A copy whose tokenizer truncates texts, and reads the names of special tokens in a text as plain text."""
        if self.tokenizer is None:
            return self
        tokenizer = copy_tokenizer(self.tokenizer, encode_special_tokens=True)
        if max_length is not None:
            tokenizer.enable_truncation(max_length)
        return replace(self, tokenizer=tokenizer)

    def truncating(self, max_length: int | None, *, direction: str = "right") -> Checkpoint:
        """A copy whose tokenizer truncates texts at their end ("right") or start; itself if it truncates already."""
        if self.tokenizer is None or self.tokenizer.truncation is not None or max_length is None:
            return self
        as_text = getattr(self.tokenizer, "encode_special_tokens", True)
        tokenizer = copy_tokenizer(self.tokenizer, encode_special_tokens=as_text)
        tokenizer.enable_truncation(max_length, **({} if direction == "right" else {"direction": direction}))
        return replace(self, tokenizer=tokenizer)

    def decode(self, ids: Sequence[int]) -> Any:
        """The text of ids; without a tokenizer, the ids."""
        return self.generator.decode(ids)

    def check_length(self, count: int, index: int = 0) -> None:
        if not count:
            raise InputLengthError("the text is empty; give at least one token", index)
        if self.max_positions is not None and count > self.max_positions:
            raise InputLengthError(
                f"the text has {count:,} tokens, but the model has {self.max_positions:,} positions", index
            )

    def check_reads_text(self) -> None:
        stack = self.spec.encoder or self.spec.decoder
        if stack and stack.embed.reads == "patches":
            raise UnsupportedError(
                "this model reads images, not texts; use load(...).logits(patches), batch × patches × pixels"
            )

    # ----------------------------------------------------------------------------------------------------- generation

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        details: bool = False,
        **settings: Any,
    ) -> Any:
        """Continues a text, or generates a target for a source. Returns a text, or new ids for ids; a list for a list.

        Settings are those of `generation_config`, such as max_new_tokens, temperature, top_p, num_beams, stop, n, seed.
        The output for a prompt does not depend on the others of a list. With `details`, or if n or logprobs is given, a
        result is a GeneratedText, with tokens, log-probabilities and why it ended; with n, a list of them.
        """
        config = generation_config(self.generation_settings, **settings)
        self.check_reads_text()
        is_list = isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(one, Sequence) for one in prompt)
        prompts: Sequence[Any] = prompt if is_list else [prompt]
        is_text = all(isinstance(one, str) for one in prompts)
        rows = self.encode_ids(prompts) if is_text else [checked_ids(one) for one in prompts]
        outputs = dict(self.generator.texts(rows, config))
        results: list[Any] = [outputs[i] for i in range(len(rows))]
        for note in dict.fromkeys(one.note for texts in results for one in texts if one.note):
            warnings.warn(note, stacklevel=2)
        if "n" not in settings:
            results = [best for best, *_ in results]
            if not details and config.logprobs is None:
                results = [best.text if is_text else best.tokens for best in results]
        return results if is_list else results[0]

    def stream(self, text: str, **settings: Any) -> Iterator[str]:
        """Yields the generated text in pieces, each as soon as it is final. Settings are those of `generate`."""
        config = generation_config(self.generation_settings, **settings)
        self.check_reads_text()
        return self.generator.stream(self.encode_ids([text])[0], config)

    @cached_property
    def generator(self) -> TextGenerator:
        """Runs the decoding methods on rows of ids."""
        return TextGenerator(self.model, self.tokenizer, self.trained_length)


def copy_tokenizer(tokenizer: Any, *, encode_special_tokens: bool) -> Any:
    from tokenizers import Tokenizer

    if not hasattr(tokenizer, "to_str"):
        return tokenizer.copy()  # a tokenizer that never recognises special tokens
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = encode_special_tokens
    return copy


def check_texts(texts: Sequence[str]) -> None:
    for index, text in enumerate(texts):
        if not isinstance(text, str) or any("\ud800" <= c <= "\udfff" for c in text):
            raise InputError(f"given {quoted(text)}, expected a text of Unicode characters", index)


def checked_ids(ids: Sequence[int]) -> list[int]:
    try:
        tensor = torch.tensor([list(ids)])
    except (TypeError, ValueError, RuntimeError):  # not iterable, nested, or too large
        raise InputShapeError(f"given {quoted(ids)}, expected a text or a list of token ids") from None
    if tensor.numel() and (tensor.dim() != 2 or tensor.dtype is not torch.int64):
        raise InputShapeError(
            f"token ids are {tensor.dtype} of shape {tuple(tensor.shape)}, expected a list of integers"
        )
    return list(map(int, tensor[0].tolist()))


# -------------------------------------------------------------------------------------------------------------- loading


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    allow_nonfinite: bool = False,
    copy: bool = False,
    verify: bool = False,
) -> Checkpoint:
    """Loads a Hugging Face folder, OWNER/NAME on the Hub, a GGUF file, a run or a fairseq folder. Executes none of it.

    Weights in safetensors are memory-mapped, so the file must not change while the model is used, unless `copy` is set.
    With `verify`, the files of a run's checkpoint are compared with the hashes that the run saved.
    """
    if dtype not in (None, *DTYPES):
        raise UsageError(
            f"dtype is {quoted(dtype)}, expected {', '.join(map(str, DTYPES))}, or None for the stored one"
        )
    device = check_device(device)
    path = check_path(path)
    if not os.path.exists(path):
        if not is_name(str(path)) or os.path.isdir(path.parts[0]):  # a mistyped path is not downloaded from the Hub
            raise PathNotFoundError(f"no folder or file {path}")
        path = download(str(path))
    read = partial(read_checkpoint_at, dtype=dtype, allow_nonfinite=allow_nonfinite, copy=copy, verify=verify)
    checkpoint = read_while_saved(path, read)
    with name_in_errors(path):  # checked here, because they are read only where they are used
        _ = checkpoint.generation_settings, checkpoint.chat_template
    checkpoint.model.to(device)
    return checkpoint


def check_path(path: str | Path) -> Path:
    if not isinstance(path, str | Path) or not str(path):
        raise UsageError(f"given {quoted(path)}, expected the path of a folder or a file")
    return Path(path)


def read_while_saved(path: Path, read: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Reads a checkpoint, and reads the next one if its run removed or replaced it meanwhile."""
    for _ in range(MAX_READS):
        with explain_read_errors(path):
            folder = checkpoint_dir(path)
            before = inode(folder)
            try:
                checkpoint = read(folder)
            except (ManyheadsError, OSError):
                if inode(folder) == before and checkpoint_dir(path) == folder:
                    raise
            else:
                if inode(folder) == before:
                    return checkpoint
    raise CheckpointError(f"{path} is replaced faster than it can be read", hint="raise train.save_every")


def inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def read_checkpoint_at(
    path: Path, *, dtype: torch.dtype | None, allow_nonfinite: bool, copy: bool, verify: bool
) -> Checkpoint:
    """Reads a checkpoint in any supported format."""
    from_run = (path / TRAINER).is_file()
    if verify and from_run and (fault := verify_manifest(path, optimizer=False)):
        raise HashMismatchError(f"{fault}; this checkpoint differs from the one that its run saved")
    if path.suffix == ".gguf" and not path.is_dir():
        model, metadata, tokenizer = read_gguf(path, dtype=dtype, allow_nonfinite=allow_nonfinite)
        return Checkpoint(model, tokenizer, metadata)
    if (path.suffix == ".pt" and not path.is_dir()) or os.path.lexists(path.joinpath(*CHECKPOINT)):
        model, metadata, tokenizer = read_fairseq(path, dtype=dtype, allow_nonfinite=allow_nonfinite)
        return Checkpoint(model, tokenizer, metadata)
    model, metadata = read_folder(path, dtype=dtype, allow_nonfinite=allow_nonfinite, copy=copy)
    tokenizer = read_tokenizer(path, metadata.extra_files, keep_truncation=from_run)
    pooling = read_pooling(metadata.extra_files) if "modules.json" in metadata.extra_files else None
    checkpoint = Checkpoint(model, tokenizer, metadata, pooling, path)
    if pooling and tokenizer is not None:
        pooling.configure(tokenizer, checkpoint.max_positions)
    return checkpoint


def checkpoint_dir(folder: Path) -> Path:
    """The best checkpoint of a run, or its latest if none was selected; other paths are returned unchanged."""
    checkpoints = folder / "checkpoints"
    paths = (checkpoints / "best", checkpoints / "latest")
    pointers = [path for path in paths if os.path.lexists(path) and not path.is_dir()]
    for pointer in pointers:
        target = safe_join(checkpoints, read_bytes(pointer, 100).decode(errors="replace").strip())
        if target.is_dir() or pointer == pointers[-1]:
            return target
    if (folder / "run.toml").is_file() and checkpoints.is_dir():
        raise CheckpointNotFoundError(f"the run {folder} has saved no checkpoint yet")
    return folder
