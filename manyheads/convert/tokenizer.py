"""Tokenizers as they come: tokenizer.json through the tokenizers library, which runs no code of the file's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyheads.convert.files import FileError
from manyheads.generate.sample import Rules


def read_tokenizer(folder: Path, beside: Mapping[str, bytes], *, cuts: bool = False) -> Any:
    """The tokenizer of a folder, without padding of its own; None where there is none.

    It cuts long texts only where `cuts` says that it may: what others left in their files is seldom what they meant. Where its config
    says that special tokens are split, as ours do, a text that says </s> remains a text.
    """
    data = beside.get("tokenizer.json")
    if data is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except BaseException as error:  # the library panics on some files, which is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise FileError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from None
    tokenizer.no_padding()
    if not cuts:
        tokenizer.no_truncation()
    tokenizer.encode_special_tokens = said_beside(beside).get("split_special_tokens") is True  # which tokenizer.json cannot say
    return tokenizer


def said_beside(beside: Mapping[str, bytes]) -> dict[str, Any]:
    """What tokenizer_config.json says, if it can be read."""
    try:
        found = json.loads(beside.get("tokenizer_config.json", b"{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_rules(config: Mapping[str, Any], beside: Mapping[str, bytes]) -> Rules:
    """How texts are written: generation_config.json says it alone where there is one, as in transformers, and otherwise the config."""
    if (data := beside.get("generation_config.json")) is not None:
        try:
            config = dict(json.loads(data))
        except (ValueError, TypeError, RecursionError):
            raise FileError("generation_config.json cannot be read: expected a table") from None
    starts = (config.get(key) for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    stop = (*tokens(config.get("eos_token_id")), *tokens(config.get("eot_token_id")))
    words = config.get("bad_words_ids")
    never = [tokens(word) for word in words if isinstance(word, list) and word] if isinstance(words, list) else []
    return Rules(
        start=next((start for start in starts if type(start) is int), None),
        stop=stop,
        first=tokens(config.get("forced_bos_token_id")),
        last=tokens(config.get("forced_eos_token_id")),
        never=tuple(word for word in never if word and word not in [(end,) for end in stop]),
    )


def tokens(given: Any) -> tuple[int, ...]:
    """One id or several; what is no id never comes."""
    return tuple(token for token in (given if isinstance(given, list) else [given]) if type(token) is int and 0 <= token < 1 << 31)
