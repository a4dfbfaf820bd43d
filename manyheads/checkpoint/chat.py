"""Chat with a checkpoint: conversations as token ids, by its chat template, and a conversation that continues."""

from __future__ import annotations

import math
import re
import warnings
from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from manyheads.errors import (
    ChatTemplateError,
    CheckpointTokenizerError,
    GenerationConfigError,
    InputError,
    InputLengthError,
    UnsupportedError,
    UsageError,
)
from manyheads.files.chat_template import Message, render_template
from manyheads.files.tokenizer import all_special_ids, encode_texts, is_unicode_text
from manyheads.generate.config import GenerationConfig, generation_config
from manyheads.generate.prefix_cache import PrefixCache
from manyheads.generate.text import GeneratedText
from manyheads.spec import quote

if TYPE_CHECKING:
    from manyheads.checkpoint.checkpoint import Checkpoint

ROLES = ("system", "user", "assistant")
MAX_ANSWER_TOKENS = 512  # if neither the caller nor the checkpoint sets max_new_tokens
# two characters that Unicode reserves for a program's own use, around a special token that a message contains
OPEN, CLOSE = "\ufdd0", "\ufdd1"


def check_messages(messages: Any) -> list[Message]:
    """The messages of a conversation; raises unless each has a role and a text, and the last is the user's."""
    if not isinstance(messages, list | tuple) or not messages:
        raise UsageError(f"messages are {quote(messages)}, expected a list of {{'role': …, 'content': …}}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise UsageError(f"message {i} is {quote(message)}, expected a table with role and content")
        if message["role"] not in ROLES:
            raise UsageError(f"message {i} has the role {quote(message['role'])}, expected {', '.join(ROLES)}")
        if not is_unicode_text(content := message["content"]):
            raise UsageError(f"message {i} has the content {quote(content)}, expected a text of Unicode characters")
    if (role := messages[-1]["role"]) != "user":
        raise UsageError(f"the last message has the role {role}, expected a message of the user to answer")
    return list(messages)


def with_system(system: str | None, messages: Sequence[Message]) -> list[Message]:
    """The system prompt, if there is one, and then the messages."""
    return [*([] if system is None else [{"role": "system", "content": system}]), *messages]


def chat_config(checkpoint: Checkpoint, **settings: Any) -> GenerationConfig:
    """As `generation_config`, with longer answers than the default for texts, which end where the context ends."""
    base = checkpoint.generation_settings
    config = generation_config(base, MAX_ANSWER_TOKENS if base.max_new_tokens is None else None, **settings)
    is_bounded = config.max_new_tokens_given or checkpoint.has_source or checkpoint.max_target_positions is not None
    return config if is_bounded else replace(config, max_length=checkpoint.context_length)


# ------------------------------------------------------------------------------------------------------------ templates


def render_chats(checkpoint: Checkpoint, conversations: Sequence[Sequence[Message]]) -> list[str]:
    """Each conversation as one text, up to where the answer begins, by the chat template of the checkpoint."""
    return render_template(
        require_chat_template(checkpoint), conversations, template_tokens(checkpoint) | {"add_generation_prompt": True}
    )


def require_chat_template(checkpoint: Checkpoint) -> str:
    if checkpoint.tokenizer is None:
        raise CheckpointTokenizerError("this checkpoint has no tokenizer, so it cannot chat")
    if (template := checkpoint.chat_template) is None:
        raise UnsupportedError("this checkpoint has no chat template", hint="continue a text with manyheads predict")
    return template


def template_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """The variables bos_token, eos_token, … of a template: as in tokenizer_config.json, or else by the config's ids."""
    if checkpoint.metadata and "tokenizer_config.json" in checkpoint.metadata.extra_files:
        return {f"{role}_token": token for role, token in checkpoint.token_names.items()}
    ids = {name: checkpoint.config.get(f"{name}_id") for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    tokens = {name: checkpoint.tokenizer.id_to_token(i) for name, i in ids.items() if type(i) is int and i >= 0}
    return {name: token for name, token in tokens.items() if token is not None}


def prompt_ids(checkpoint: Checkpoint, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
    """The token ids of each conversation, however many, as of transformers for ordinary texts.

    The special tokens that the template writes are recognized. Those in a message are read as text, so that a message
    cannot end its turn or begin another.
    """
    require_chat_template(checkpoint)
    special_tokenizer, plain_tokenizer = checkpoint.piece_tokenizers
    encode = partial(encode_texts, error_type=CheckpointTokenizerError, add_special_tokens=False)
    special = all_special_ids(checkpoint.tokenizer)
    contents = list(dict.fromkeys(message["content"] for messages in conversations for message in messages))
    for index, messages in enumerate(conversations):
        if any(mark in message["content"] for message in messages for mark in (OPEN, CLOSE)):
            raise InputError("a message has U+FDD0 or U+FDD1, which Unicode reserves and no text has", index)
    spans = {
        content: [span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i in special]
        for content, encoding in zip(contents, encode(special_tokenizer, contents), strict=True)
    }
    marked_conversations = [
        [dict(message, content=mark(message["content"], spans[message["content"]])) for message in messages]
        for messages in conversations
    ]
    prompts = render_chats(checkpoint, marked_conversations)
    names = {content[start:end] for content, content_spans in spans.items() for start, end in content_spans}
    # a text, and then names that are read as text and further texts, in turn; a template may cut off a mark
    pieces = [[text] for text in prompts]
    if names:
        pattern = f"{OPEN}({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))}){CLOSE}?"
        pieces = [[piece.replace(OPEN, "").replace(CLOSE, "") for piece in re.split(pattern, text)] for text in prompts]
    texts, names_as_text = ([piece for parts in pieces for piece in parts[start::2]] for start in (0, 1))
    encodings = (iter(encode(special_tokenizer, texts)), iter(encode(plain_tokenizer, names_as_text)))
    rows = [[token for i in range(len(parts)) for token in next(encodings[i % 2]).ids] for parts in pieces]
    if not all(rows):
        raise ChatTemplateError("the chat template gives an empty text for a conversation")
    return rows


def mark(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """The text with OPEN and CLOSE around these parts."""
    for start, end in reversed(spans):
        text = f"{text[:start]}{OPEN}{text[start:end]}{CLOSE}{text[end:]}"
    return text


# --------------------------------------------------------------------------------------------------------- conversation


class Conversation:
    """A conversation with a checkpoint: the system prompt, the messages, and what the model has read of them.

    Each turn reads only the tokens after the longest prefix that it shares with what was read before, and gives the
    answer that a new conversation with the same messages would give. If the context is full, the oldest turns are not
    read, with a warning; they stay in `messages`. Settings are those of `generate`.
    """

    def __init__(self, checkpoint: Checkpoint, *, system: str | None = None, **settings: Any) -> None:
        require_chat_template(checkpoint)  # raises if it cannot chat
        self.checkpoint, self.config = checkpoint, chat_config(checkpoint, **settings)
        self.system, self.messages = system, list[Message]()
        self.answer: GeneratedText | None = None  # the last one; None if it was stopped
        self.num_dropped = 0  # how many of the first messages were not read in the last turn
        self.cache, self.lock = PrefixCache(), Lock()
        if self.config.n != 1 or self.config.logprobs is not None:
            raise GenerationConfigError("an answer is one text; n and logprobs are for Checkpoint.chat")

    def send(self, text: str) -> str:
        """The answer to a message of the user."""
        return "".join(self.stream(text))

    def stream(self, text: str) -> Generator[str, None, None]:
        """Yields the answer to a message of the user in pieces. If the caller stops, the pieces so far are the answer.

        A message that raises, or is stopped before there is any answer, is not part of the conversation.
        """
        with self.idle():
            self.messages.append({"role": "user", "content": text})
            self.answer, pieces, is_answered = None, list[str](), False
            try:
                steps = self.checkpoint.text_generator.stream(self.encode(), self.config, self.cache)
                while self.answer is None:
                    try:
                        pieces.append(next(steps))
                        yield pieces[-1]
                    except StopIteration as end:
                        self.answer = end.value
                is_answered = True
            except (GeneratorExit, KeyboardInterrupt):
                is_answered = bool(pieces)
                raise
            finally:
                if is_answered:
                    self.messages.append({"role": "assistant", "content": "".join(pieces)})
                else:
                    self.messages.pop()

    def undo(self) -> bool:
        """Removes the last message of the user and what follows it; returns whether there was one."""
        with self.idle():
            starts = self.turn_starts()
            if starts:
                del self.messages[starts[-1] :]
            return bool(starts)

    def reset(self) -> None:
        """Removes all messages; the system prompt stays."""
        with self.idle():
            self.messages.clear()
            self.num_dropped = 0

    def messages_from(self, start: int = 0) -> list[Message]:
        """The system prompt, if there is one, and the messages from `start` on."""
        return with_system(self.system, self.messages[start:])

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Keeps other threads from changing the conversation; raises if it is being changed."""
        if not self.lock.acquire(blocking=False):
            raise UsageError("an answer is still being generated; read it to its end, or close it")
        try:
            yield
        finally:
            self.lock.release()

    def turn_starts(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    # -------------------------------------------------------------------------------------------------------- context

    @property
    def context_length(self) -> int | None:
        """The number of tokens that a prompt and its answer may have; for an encoder–decoder, a prompt."""
        return self.checkpoint.max_positions if self.checkpoint.has_source else self.checkpoint.context_length

    def encode(self) -> list[int]:
        """The ids of the conversation, without its oldest turns if they and the answer do not fit into the context."""

        @cache  # another process renders each
        def ids_from(start: int) -> list[int]:
            return prompt_ids(self.checkpoint, [check_messages(self.messages_from(start))])[0]

        context = self.context_length
        answer_tokens = 0 if context is None else self.num_answer_tokens(context)
        limit = math.inf if context is None else context - answer_tokens
        starts = [0, *self.turn_starts()[1:]]
        index = (
            0 if len(ids_from(0)) <= limit else bisect_left(starts, True, 1, key=lambda i: len(ids_from(i)) <= limit)
        )
        num_dropped = starts[min(index, len(starts) - 1)]
        if (count := len(ids_from(num_dropped))) > limit:
            raise InputLengthError(
                f"the message and the system prompt have {count:,} tokens, but the context has {context:,}, of which "
                f"{answer_tokens:,} are for the answer"
            )
        if num_dropped not in (0, self.num_dropped):
            warnings.warn(
                f"the first {num_dropped:,} messages are not read any more: the context of {context:,} tokens is full",
                stacklevel=4,
            )
        self.num_dropped = num_dropped
        return ids_from(num_dropped)

    def num_answer_tokens(self, context: int) -> int:
        """The tokens of the context that are kept for the answer: as many as the caller wants, or up to a quarter."""
        if self.checkpoint.has_source:
            return 0
        limit = self.config.max_new_tokens
        return limit if self.config.max_new_tokens_given else min(limit, context // 4)
