"""A checkpoint, which is a model with its tokenizer, and running it on texts or token ids."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.checkpoint.chat import chat_config, check_messages, prompt_ids, render_chats
from manyheads.convert.hf import MAX_POSITION_KEYS, CheckpointMetadata, read_chat_template, read_tokenizer_config
from manyheads.convert.pooling import Pooling
from manyheads.errors import (
    CheckpointConfigError,
    CheckpointTokenizerError,
    InputError,
    InputLengthError,
    InputShapeError,
    UnsupportedError,
    UsageError,
)
from manyheads.files.tokenizer import copy_tokenizer, encode_texts, explain_tokenizer_errors, is_unicode_text
from manyheads.generate.checkpoint_settings import read_checkpoint_settings
from manyheads.generate.config import CheckpointSettings, generation_config
from manyheads.generate.generator import TextGenerator
from manyheads.generate.text import GeneratedText
from manyheads.model.builder import Model
from manyheads.model.finite import check_finite
from manyheads.model.recording import record_hidden_states
from manyheads.model.spec import ModelSpec
from manyheads.model.transformer import as_transformer
from manyheads.parts.inputs import Inputs, check_token_ids, group_by_length, pad_rows
from manyheads.spec import MAX_COUNT, Tree, quote


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
        return read_chat_template(self.metadata.extra_files) if self.metadata else None

    @property
    def max_positions(self) -> int | None:
        """The maximum number of input tokens (of source tokens, if there is a source); None if there is no limit."""
        stack = self.spec.encoder or self.spec.decoder
        return stack.max_positions if stack else None

    @property
    def max_target_positions(self) -> int | None:
        """The maximum number of decoder tokens; None if there is no limit."""
        return self.spec.max_target_positions

    @property
    def context_length(self) -> int | None:
        """Maximum sequence length: the decoder's positions, else the length in the config or in the run."""
        truncation = None if self.has_source else getattr(self.tokenizer, "truncation", None)  # of a run
        lengths = (
            self.max_target_positions,
            *(self.config.get(key) for key in MAX_POSITION_KEYS),
            (truncation or {}).get("max_length"),
        )
        return next((length for length in lengths if type(length) is int and 1 <= length <= MAX_COUNT), None)

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
                f"id2label is {quote(self.config['id2label'])}, expected names by index"
            ) from None

    # -------------------------------------------------------------------------------------------------------- tensors

    @torch.no_grad()
    def logits(
        self, ids: Tensor, decoder_input_ids: Tensor | None = None, padding_mask: Tensor | None = None, **kwargs: Tensor
    ) -> Tensor:
        """The output of the head, B×L×V for tokens. `ids` and `padding_mask` are those of the encoder, if any."""
        inputs = Inputs(ids, padding_mask=padding_mask, **kwargs).to(self.device)  # type: ignore[arg-type]
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
    def hidden_states(
        self, ids: Tensor, decoder_input_ids: Tensor | None = None, padding_mask: Tensor | None = None, **kwargs: Tensor
    ) -> list[Tensor]:
        """The embeddings and the output of every layer (the last after the final norm), first of the encoder."""
        with record_hidden_states(as_transformer(self.model, "the list of hidden states")) as states:
            self.logits(ids, decoder_input_ids, padding_mask, **kwargs)
        return states

    @torch.no_grad()
    def embed(self, texts: str | Sequence[str], *, truncate: bool = False) -> Tensor:
        """One vector per text, by a vector head, the pooling of sentence-transformers, or the mean over tokens.

        With `truncate`, a text that is longer than the model has positions is truncated, with a warning.
        """
        self.check_reads_text()
        checkpoint = self.with_truncation(self.max_positions) if truncate else self
        rows = checkpoint.encode_ids([texts] if isinstance(texts, str) else texts)
        return self.embed_inputs(self.pad(rows or [[0]]))[: len(rows)]  # an empty list gives a 0×D tensor

    def embed_inputs(self, inputs: Inputs) -> Tensor:
        model, has_decoder = as_transformer(self.model, "an embedding"), self.spec.decoder is not None
        if self.has_source or (has_decoder and not self.pooling):
            raise UnsupportedError(
                f"embeddings need an encoder, or a decoder with a pooling config; this is {self.spec.architecture}"
            )
        pool = self.pooling.pool if self.pooling else None
        return self.compute_checked(partial(model.embed_sequences, inputs, pool))

    def pad(self, rows: Sequence[Sequence[int]]) -> Inputs:
        """Pads rows of ids to one batch, on the right."""
        return pad_rows(rows).to(self.device)

    def outputs(
        self, rows: Sequence[Sequence[int]], function: Callable[[Inputs], Tensor] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields (index, output) for each row of ids, batch by batch. Rows of similar length share a batch.

        An output per token is as long as the longest row of its batch. `function` is called instead of the model.
        """
        for batch in group_by_length([len(row) for row in rows]):
            with torch.no_grad():
                outputs = self.compute_checked(partial(function or self.model, self.pad([rows[i] for i in batch])))
            yield from zip(batch, outputs, strict=True)

    def compute_checked(self, compute: Callable[[], Tensor]) -> Tensor:
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
        if count := sum(bool(encoding.overflowing) for encoding in encodings):
            limit = self.tokenizer.truncation["max_length"]
            warnings.warn(f"{count:,} of {len(texts):,} texts were truncated to {limit:,} tokens", stacklevel=3)
        return [encoding.ids for encoding in encodings]

    def to_input_ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """The ids of each text, or rows of ids as they are."""
        if all_texts(prompts):
            return self.encode_ids(prompts)
        rows, vocab = [], self.spec.source_vocab or self.spec.vocab
        for index, ids in enumerate(prompts):
            rows.append(checked_ids(ids, index))
            self.check_length(len(rows[-1]), index)
            if isinstance(vocab, int):
                check_token_ids(rows[-1], vocab, index)
        return rows

    def encode_with_special(self, texts: Sequence[str], names: Sequence[str]) -> list[Any]:
        """As `encode`, but these special tokens are recognized in a text, even if the tokenizer reads them as text."""
        check_texts(texts)
        special, plain = self.piece_tokenizers
        encode = partial(encode_texts, error_type=CheckpointTokenizerError, add_special_tokens=False)
        tokens = dict(zip(names, encode(special, names), strict=True))
        between = re.compile(f"({'|'.join(map(re.escape, names))})")
        encodings = []
        for index, text in enumerate(texts):
            pieces = between.split(text)
            parts = [tokens.get(piece, encoding) for piece, encoding in zip(pieces, encode(plain, pieces), strict=True)]
            with explain_tokenizer_errors("the tokenizer failed", CheckpointTokenizerError):
                encodings.append(self.tokenizer.post_process(type(parts[0]).merge(parts)))
            self.check_length(len(encodings[-1].ids), index)
        return encodings

    def encode_pieces(self, pieces: Sequence[str]) -> list[Any]:
        """The encodings of parts of a text, without special tokens and truncation."""
        return encode_texts(self.piece_tokenizers[1], pieces, CheckpointTokenizerError, add_special_tokens=False)

    @cached_property
    def piece_tokenizers(self) -> tuple[Any, Any]:
        """Copies of the tokenizer for parts of a text: one recognizes special tokens, and none truncates."""
        special, plain = (copy_tokenizer(self.tokenizer, encode_special_tokens=as_text) for as_text in (False, True))
        special.no_truncation()
        plain.no_truncation()
        return special, plain

    def for_evaluation(self, max_length: int | None) -> Checkpoint:
        """A copy whose tokenizer truncates texts, and reads the names of special tokens in a text as plain text."""
        if self.tokenizer is None:
            return self
        tokenizer = copy_tokenizer(self.tokenizer, encode_special_tokens=True)
        if max_length is not None:
            tokenizer.enable_truncation(max_length)
        return replace(self, tokenizer=tokenizer)

    def with_truncation(self, max_length: int | None, *, direction: str = "right") -> Checkpoint:
        """A copy whose tokenizer truncates texts at their end ("right") or start; itself if it truncates already."""
        if self.tokenizer is None or self.tokenizer.truncation is not None or max_length is None:
            return self
        as_text = getattr(self.tokenizer, "encode_special_tokens", True)
        tokenizer = copy_tokenizer(self.tokenizer, encode_special_tokens=as_text)
        tokenizer.enable_truncation(max_length, **({} if direction == "right" else {"direction": direction}))
        return replace(self, tokenizer=tokenizer)

    def decode(self, ids: Sequence[int]) -> Any:
        """The text of ids; without a tokenizer, the ids."""
        return self.text_generator.decode(ids)

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
        is_list = is_batch(prompt)
        prompts: Sequence[Any] = prompt if is_list else [prompt]
        is_text, rows = all_texts(prompts), self.to_input_ids(prompts)
        outputs = dict(self.text_generator.generate_texts(rows, config))
        results: list[Any] = [outputs[i] for i in range(len(rows))]
        warn_notes(text for texts in results for text in texts)
        if "n" not in settings:
            results = [best for best, *_ in results]
            if not details and config.logprobs is None:
                results = [best.text if is_text else best.token_ids for best in results]
        return results if is_list else results[0]

    def chat(self, messages: Sequence[Mapping[str, str]], *, details: bool = False, **settings: Any) -> Any:
        """The answer to a conversation, a list of {"role": …, "content": …} whose last message is of the user.

        Roles are system, user and assistant. Settings and results are those of `generate`. `Conversation` remembers
        the messages, and what the model has read of them.
        """
        config = chat_config(self, **settings)
        ((_, results),) = self.text_generator.generate_texts(self.encode_chats([check_messages(messages)]), config)
        warn_notes(results)
        if "n" in settings:
            return results
        return results[0] if details or config.logprobs is not None else results[0].text

    def stream_chat(self, messages: Sequence[Mapping[str, str]], **settings: Any) -> Iterator[str]:
        """Yields the answer to a conversation in pieces, each as soon as it is final. Settings are those of `chat`."""
        config = chat_config(self, **settings)
        return with_warning(self.text_generator.stream(self.encode_chats([check_messages(messages)])[0], config))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation as one text, up to where the answer begins, as `apply_chat_template` of transformers."""
        return render_chats(self, [check_messages(messages)])[0]

    def encode_chats(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[list[int]]:
        """The ids of conversations by the chat template; special tokens in a message are read as text."""
        rows = prompt_ids(self, conversations)
        for index, ids in enumerate(rows):
            self.check_length(len(ids), index)
        return rows

    def stream(self, text: str, **settings: Any) -> Iterator[str]:
        """Yields the generated text in pieces, each as soon as it is final. Settings are those of `generate`."""
        config = generation_config(self.generation_settings, **settings)
        self.check_reads_text()
        return with_warning(self.text_generator.stream(self.encode_ids([text])[0], config))

    @cached_property
    def text_generator(self) -> TextGenerator:
        """Runs the decoding methods on rows of ids."""
        return TextGenerator(self.model, self.tokenizer, self.context_length)

    # -------------------------------------------------------------------------------------------------------- scoring

    def score(
        self,
        text: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        context: Any = None,
        source: Any = None,
        stride: int | None = None,
        decoder_start_token_id: int | None = None,
    ) -> Any:
        """The log-probability of each token of a given text, or row of ids, as a ScoredText; a list for a list.

        A text directly follows its `context`, which is not scored. An encoder–decoder needs a `source`, whose target is
        the text. Both are one for all texts, or a list of one per text. Tokens that the tokenizer adds are read: those
        before a text are not scored, those after it, such as eos, are. A decoder has nothing before the first token
        unless the tokenizer adds bos or there is a context: that token has no log-probability. A text longer than
        `context_length` is read in windows, each `stride` tokens after the last; by default half a window.
        """
        from manyheads.checkpoint.scoring import score

        return score(self, text, context, source, stride, decoder_start_token_id)


def is_batch(inputs: Any) -> bool:
    """Whether these are a list of texts or of rows of ids; True for an empty list."""
    return isinstance(inputs, list | tuple) and all(isinstance(item, Sequence) for item in inputs)


def all_texts(inputs: Sequence[Any]) -> bool:
    """Whether there are inputs, all of which are texts."""
    return bool(inputs) and all(isinstance(item, str) for item in inputs)


def with_warning(pieces: Generator[str, None, GeneratedText]) -> Iterator[str]:
    """The pieces of a stream, and then the warning about its length, if there is one."""
    warn_notes([(yield from pieces)])


def warn_notes(texts: Iterable[GeneratedText]) -> None:
    for note in dict.fromkeys(text.note for text in texts if text.note):
        warnings.warn(note, stacklevel=3)


def check_texts(texts: Sequence[str]) -> None:
    for index, text in enumerate(texts):
        if not is_unicode_text(text):
            raise InputError(f"given {quote(text)}, expected a text of Unicode characters", index)


def checked_ids(ids: Sequence[int], index: int = 0) -> list[int]:
    try:
        if isinstance(ids, bytes | bytearray | memoryview):
            raise TypeError
        tensor = torch.tensor([list(ids)])
    except (TypeError, ValueError, RuntimeError):  # bytes, not iterable, nested, or too large
        raise InputShapeError(f"given {quote(ids)}, expected a text or a list of token ids", index) from None
    if tensor.numel() and (tensor.dim() != 2 or tensor.dtype is not torch.int64):
        raise InputShapeError(
            f"token ids are {tensor.dtype} of shape {tuple(tensor.shape)}, expected a list of integers", index
        )
    return list(map(int, tensor[0].tolist()))
