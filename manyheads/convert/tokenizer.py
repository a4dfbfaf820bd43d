"""Tokenizers as they come: tokenizer.json through the tokenizers library, which runs no code of the file's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyheads.convert.files import FileError


def read_tokenizer(folder: Path, beside: Mapping[str, bytes]) -> Any:
    """The tokenizer of a folder, without padding and truncation of its own; None where there is none."""
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
    tokenizer.no_truncation()
    return tokenizer


def special_ids(config: Mapping[str, Any]) -> tuple[set[int], int]:
    """The tokens that end a text, and the one that begins an answer."""
    ends = config.get("eos_token_id")
    stop = {end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int and 0 <= end < 1 << 31}  # others never come
    starts = (config.get(key) for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    return stop, next((start for start in starts if type(start) is int), 0)
