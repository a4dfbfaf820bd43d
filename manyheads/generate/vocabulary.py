"""The tokens of a vocabulary as bytes, so that the text of some tokens is the concatenation of their bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from manyheads.errors import MissingExtraError, UnsupportedError
from manyheads.spec import Tree

if TYPE_CHECKING:
    from llguidance import LLTokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "▁"  # what SentencePiece writes for a space


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a tokenizer. What is computed from it is computed once."""

    tokenizer: Any

    @cached_property
    def tokens(self) -> TokenBytes:
        return token_bytes(self.tokenizer)

    @cached_property
    def for_grammars(self) -> LLTokenizer:
        """llguidance's trie of the tokens, with one more, `end`, for the end of a text."""
        import_llguidance()
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(self.tokens), slices=[])


def import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError(
            "json_schema and regex need llguidance", hint="pip install 'manyheads[constrain]'"
        ) from None
    return llguidance


class TokenBytes:
    """The bytes of each token, with the attributes that llguidance reads. Special tokens have none."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: set[int], *, strips_space: bool) -> None:
        self.tokens, self.end = [*tokens, b"<end>"], len(tokens)
        self.eos_token_id = self.end
        self.special_token_ids = [*special, self.end]
        self.strips_space = strips_space  # whether decoding removes a space at the start of a text
        self.starts_with_space = torch.tensor([data.startswith(b" ") for data in tokens], dtype=torch.bool)
        self.has_no_text = {i for i, data in enumerate(tokens) if not data} | special

    def __call__(self, text: bytes) -> list[int]:
        """llguidance encodes texts only to force tokens, which grammars here turn off."""
        return []


def token_bytes(tokenizer: Any) -> TokenBytes:
    """The bytes of the tokens of a `tokenizers.Tokenizer`, by its decoder; a decoder that is not a join is refused."""
    if not hasattr(tokenizer, "to_str"):
        raise UnsupportedError(f"a grammar needs a tokenizer of bytes or SentencePiece, not {type(tokenizer).__name__}")
    tree = json.loads(tokenizer.to_str())
    decode, strips_space = decoder_of(tree.get("decoder"))
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [b""] * (1 + max(vocab.values(), default=-1))
    for name, token in vocab.items():
        tokens[token] = decode(name)
    special = {one["id"] for one in tree.get("added_tokens") or () if one.get("special")}
    return TokenBytes(tokens, special, strips_space=strips_space)


def decoder_of(decoder: Tree | None) -> tuple[Callable[[str], bytes], bool]:
    """The bytes of a token, and whether a space at the start of a text is removed."""
    steps = list(steps_of(decoder))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level(), False
    has_bytes = "ByteFallback" in kinds
    strips_space = False
    for step in steps:
        match step:
            case {"type": "Fuse" | "ByteFallback"}:
                pass
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                pass
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                strips_space |= start > 0
            case {"type": "Metaspace", "replacement": "▁"}:
                strips_space |= step.get("prepend_scheme") != "never"
            case _:
                raise refused(step["type"])
    if not steps:
        raise refused("none")
    has_spaces = bool({"Replace", "Metaspace"} & set(kinds))

    def sentence_piece(name: str) -> bytes:
        found = BYTE_TOKEN.fullmatch(name) if has_bytes else None
        return bytes([int(found[1], 16)]) if found else (name.replace(SPACE, " ") if has_spaces else name).encode()

    return sentence_piece, strips_space


def refused(kind: str) -> UnsupportedError:
    return UnsupportedError(
        f"a grammar needs a tokenizer whose tokens are joined as they are, such as one of bytes or SentencePiece; the "
        f"decoder of this one is {kind}"
    )


def steps_of(decoder: Tree | None) -> Iterator[Tree]:
    if decoder is not None and decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from steps_of(step)
    elif decoder is not None:
        yield decoder


def byte_level() -> Callable[[str], bytes]:
    """The bytes of a token whose characters stand for bytes; another one, such as an added token, is a text."""
    from manyheads.data.tokenizer import byte_characters

    table = {character: byte for byte, character in enumerate(byte_characters())}
    return lambda name: bytes(table[one] for one in name) if all(one in table for one in name) else name.encode()
