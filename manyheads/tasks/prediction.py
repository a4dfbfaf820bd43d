"""Predictions: the settings of `predict`, the ids of a text without a tokenizer, and generated texts as a dict."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from manyheads.checkpoint.chat import with_system
from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import InputError
from manyheads.files.chat_template import Message
from manyheads.generate.config import GenerationConfig
from manyheads.generate.loops import find_repetition
from manyheads.generate.text import GeneratedText
from manyheads.spec import Tree, quote

Result = TypeVar("Result")


@dataclass(frozen=True)
class PredictOptions:
    """Settings of `predict`."""

    generation: GenerationConfig
    num_fills: int = 5  # how many candidate tokens to report per mask
    mask_token_id: int | None = None  # if the checkpoint has none
    loops: bool = False  # whether to report the loop at the end of each generated text
    chat: bool = False  # whether a text is a message to answer, after the system prompt
    system: str | None = None

    def messages(self, text: str) -> list[Message]:
        return with_system(self.system, [{"role": "user", "content": text}])


def ids_and_truncation(encodings: Sequence[Any]) -> tuple[list[list[int]], dict[int, Tree]]:
    """Returns the ids of each encoding, and by index `truncated_to`, the tokens left, of each truncated one."""
    truncation = {
        i: {"truncated_to": len(encoding.ids)} for i, encoding in enumerate(encodings) if encoding.overflowing
    }
    return [encoding.ids for encoding in encodings], truncation


def generated_result(checkpoint: Checkpoint, texts: Sequence[GeneratedText], options: PredictOptions) -> Tree:
    """The best generated text as a dict; if n > 1, all of them are under `sequences`."""
    results = [
        {
            "generated": text.token_ids if checkpoint.tokenizer is None else text.text,
            "finish_reason": text.finish_reason,
        }
        | ({} if text.score is None else {"score": text.score})
        | ({} if text.note is None else {"note": text.note})
        | ({} if text.logprobs is None else {"logprobs": token_logprobs(checkpoint, text)})
        | ({"loop": loop_at_end(checkpoint, text)} if options.loops else {})
        for text in texts
    ]
    return results[0] | ({"sequences": results} if options.generation.n > 1 else {})


def loop_at_end(checkpoint: Checkpoint, text: GeneratedText) -> Tree | None:
    """What the last tokens of a text repeat; None if they do not, or if the text ended by itself."""
    loop = find_repetition(text.token_ids) if text.finish_reason == "length" else None
    if loop is None:
        return None
    first = text.token_ids[loop.prefix : loop.prefix + loop.period]
    names = " ".join(map(checkpoint.text_generator.token_name, first))  # of special tokens, which have no text
    return {
        "prefix": loop.prefix,
        "period": loop.period,
        "repeats": (len(text.token_ids) - loop.prefix) // loop.period,
        "text": checkpoint.decode(first) or names,
    }


def format_loop(loop: Tree | None) -> str:
    """Formats a loop as one line of text."""
    if loop is None:
        return "no loop"
    text = loop["text"] if isinstance(loop["text"], str) else " ".join(map(str, loop["text"]))
    return f"loop after {loop['prefix']:,} tokens: {loop['period']:,} tokens, {loop['repeats']:,} times: {quote(text)}"


def token_logprobs(checkpoint: Checkpoint, text: GeneratedText) -> list[Tree]:
    """Each token with its log-probability and the most probable tokens of its step."""
    rows = zip(text.token_ids, text.logprobs or (), text.top_logprobs or (), strict=False)
    name = checkpoint.text_generator.token_name
    return [{"token": name(i), "id": i, "logprob": p, "top": [list(pair) for pair in top]} for i, p, top in rows]


def apply_to_each(
    function: Callable[[Sequence[str]], Sequence[Result]], texts: Sequence[str], errors: dict[int, InputError] | None
) -> dict[int, Result]:
    """What a function of many texts returns for each, by index.

    A text that it refuses raises, or, if `errors` is given, has its error there instead of a result.
    """
    try:
        return dict(enumerate(function(texts)))
    except InputError:
        if errors is None:
            raise
    results = {}
    for i, text in enumerate(texts):
        try:
            (results[i],) = function([text])
        except InputError as error:
            errors[i] = error
    return results


def parse_row(text: str, index: int = 0) -> list[int]:
    """Parses the token ids of a text, for a model without a tokenizer."""
    if not re.fullmatch(r"\s*\d{1,9}(\s+\d{1,9})*\s*", text):
        raise InputError(
            f"given {quote(text)}, but the checkpoint has no tokenizer",
            index,
            hint="give token ids, such as '3 14 15'",
        )
    return [int(word) for word in text.split()]


def parse_ids(checkpoint: Checkpoint, texts: Sequence[str]) -> list[list[int]]:
    """Parses token ids that a model can read."""
    return checkpoint.to_input_ids([parse_row(text, index) for index, text in enumerate(texts)])
