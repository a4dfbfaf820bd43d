"""Reads and runs tokenizers from other people: bounded in size and time, and a panic of their library is an error."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar

from manyheads.errors import ManyheadsError, TokenizerError
from manyheads.files.read import no_duplicate_keys
from manyheads.spec import quote, shorten

MAX_TOKENIZER_BYTES = 64 << 20
MAX_TOKEN_LENGTH = 1 << 16  # characters
MAX_EXPANSION = 256  # characters that the steps of a tokenizer may make of one; NFKC makes 18 of some
SECONDS, CHARACTERS_PER_SECOND = 60, 1000  # the time for a call, and for its text: 1000 times more than is usual

Result = TypeVar("Result")


@contextmanager
def explain_tokenizer_errors(message: str, error_type: type[ManyheadsError] = TokenizerError) -> Iterator[None]:
    """Turns errors of the tokenizers library, and its panics, which are not Exceptions, into an error of ours."""
    try:
        yield
    except (ManyheadsError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise error_type(f"{message}: {shorten(str(error))}") from None


# ------------------------------------------------------------------------------------------------------------- reading


def parse_tokenizer(data: bytes, path: object, error_type: type[ManyheadsError] = TokenizerError) -> Any:
    """The tokenizer of a tokenizer.json, after checking that its steps cannot make a long text of a short one."""
    from tokenizers import Tokenizer

    with explain_tokenizer_errors(f"{path} is not a tokenizer that can be read", error_type):
        tokenizer = Tokenizer.from_buffer(data)
        check_sizes(json.loads(data, object_pairs_hook=no_duplicate_keys))
        return tokenizer


def check_sizes(tree: Any) -> None:
    """Raises if a token, or what becomes of one character or token of a text, is implausibly long."""
    added_tokens = [str(token.get("content")) for token in tree.get("added_tokens") or ()]
    vocab = tree["model"]["vocab"]
    check_tokens([*added_tokens, *(token if isinstance(token, str) else token[0] for token in vocab)])
    for steps in (("normalizer", "pre_tokenizer"), ("post_processor",), ("decoder",)):
        if math.prod(expansion(tree.get(name)) for name in steps) > MAX_EXPANSION:
            raise ValueError(f"its {' and '.join(steps)} can make more than {MAX_EXPANSION} of one character or token")


def check_tokens(tokens: Sequence[str]) -> None:
    if len(longest := max(tokens, key=len, default="")) > MAX_TOKEN_LENGTH:
        raise ValueError(f"the token {quote(longest)} is longer than {MAX_TOKEN_LENGTH:,} characters")


def expansion(step: Any) -> int:
    """The largest number of characters, or of tokens, that a step of a tokenizer makes of one, up to 2³²."""
    size = 1
    match step:
        case {"type": "Sequence"}:
            for inner in (item for steps in step.values() if isinstance(steps, list) for item in steps):
                size = min(size * expansion(inner), 1 << 32)
        case {"type": "Replace", "pattern": {"String": str(text)}, "content": str(content)} if text:
            size = max(1, math.ceil(len(content) / len(text)))
        case {"type": "Replace", "content": str(content)}:  # a regular expression may match between characters
            size = 1 + len(content)
        case {"type": "Prepend", "prepend": str(text)}:
            size = 1 + len(text)
        case {"type": "ByteLevel"}:  # a character has up to four bytes
            size = 4
        case {"type": "Precompiled", "precompiled_charsmap": str(text)}:  # the size of an index, the index, and texts
            data = base64.b64decode(text)
            size = max(1, *map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))
        case {"type": "TemplateProcessing", "single": list(single), "pair": list(pair)}:
            ids = (len(token["ids"]) for token in step["special_tokens"].values())
            size = max(len(single), len(pair), 1) * max(ids, default=1)
    return size


# ------------------------------------------------------------------------------------------------------------- running


def copy_tokenizer(tokenizer: Any, *, encode_special_tokens: bool = False) -> Any:
    """A copy that recognizes special tokens within a text, or with `encode_special_tokens` reads them as text."""
    from tokenizers import Tokenizer

    if not hasattr(tokenizer, "to_str"):
        return tokenizer.copy()  # a tokenizer that never recognizes special tokens
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = encode_special_tokens  # not stored in tokenizer.json
    return copy


def all_special_ids(tokenizer: Any) -> set[int]:
    """The ids of the special tokens; none without a tokenizer."""
    added_tokens: dict[int, Any] = getattr(tokenizer, "get_added_tokens_decoder", dict)()
    return {i for i, token in added_tokens.items() if token.special}


def is_unicode_text(text: Any) -> bool:
    """Whether this is a text that can be encoded: one of Unicode characters, without surrogates."""
    return isinstance(text, str) and not any("\ud800" <= character <= "\udfff" for character in text)


def encode_texts(
    tokenizer: Any,
    texts: Sequence[str],
    error_type: type[ManyheadsError] = TokenizerError,
    *,
    offsets: bool = True,
    add_special_tokens: bool = True,
) -> list[Any]:
    """The encodings of texts, in bounded time. Without `offsets`, the positions of tokens are not computed."""
    encode, texts = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast, list(texts)
    options = {} if add_special_tokens else {"add_special_tokens": False}  # not every tokenizer can leave them out
    return run_bounded(lambda: list(encode(texts, **options)), sum(map(len, texts)), error_type)


def decode_ids(tokenizer: Any, ids: Sequence[int], error_type: type[ManyheadsError] = TokenizerError) -> str:
    """The text of token ids, in bounded time."""

    def decode() -> str:
        return str(tokenizer.decode_batch([list(ids)])[0])

    if has_regex(getattr(tokenizer, "decoder", None)):
        return run_bounded(decode, len(ids), error_type)
    with explain_tokenizer_errors("the tokenizer failed", error_type):  # its time is linear, so no thread is needed
        return decode()


def has_regex(step: Any) -> bool:
    """Whether a step of a tokenizer has a regular expression, which may need exponential time."""
    return step is not None and b'"Regex"' in step.__getstate__()


def run_bounded(function: Callable[[], Result], size: int, error_type: type[ManyheadsError]) -> Result:
    """Calls the tokenizers library in a thread, and raises if it fails, panics or takes far too long for its text.

    A regular expression of a tokenizer may need exponential time, and the library cannot be interrupted: the thread is
    left behind. Only functions that release the interpreter's lock can be bounded, which `encode` and `decode` do not.
    """
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    seconds = SECONDS + size / CHARACTERS_PER_SECOND
    with explain_tokenizer_errors("the tokenizer failed", error_type):
        try:
            return future.result(seconds)
        except TimeoutError:
            raise error_type(
                f"the tokenizer took over {seconds:.0f} seconds for {size:,} characters or tokens"
            ) from None
