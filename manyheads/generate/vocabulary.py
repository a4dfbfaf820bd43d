"""The tokens of a vocabulary as bytes, so that the text of some tokens is the concatenation of their bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from manyheads.errors import UnsupportedError, needs_extra
from manyheads.files.tokenizer import all_special_ids
from manyheads.spec import Tree

if TYPE_CHECKING:
    from llguidance import LLTokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "▁"  # what SentencePiece writes for a space


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a tokenizer. What is computed from it is computed once."""

    tokenizer: Any

    @cached_property
    def decoder(self) -> TokenDecoder:
        return TokenDecoder(self.tokenizer)

    @cached_property
    def tokens(self) -> TokenBytes:
        return token_bytes(self.decoder)

    @cached_property
    def for_grammars(self) -> LLTokenizer:
        """llguidance's trie of the tokens, with one more, `end`, for the end of a text."""
        import_llguidance()
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(self.tokens), slices=[])


def import_llguidance() -> Any:
    with needs_extra("json_schema and regex need llguidance", "constrain"):
        import llguidance
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


class TokenDecoder:
    """What the decoder of a tokenizer does, read once for grammars and for texts that grow."""

    def __init__(self, tokenizer: Any) -> None:
        decoder = getattr(tokenizer, "decoder", None)
        self.tokenizer, self.steps = tokenizer, list(steps_of(decoder and json.loads(decoder.__getstate__())))
        self.kinds = [step["type"] for step in self.steps]
        self.strips = [strips_space(step) for step in self.steps]
        self.has_bytes = "ByteFallback" in self.kinds
        self.special = all_special_ids(tokenizer)

    @cached_property
    def is_local(self) -> bool:
        """Whether the text of a token depends on no other tokens than those next to it, and only later ones add text.

        The bytes of a character, and a run of byte tokens, are one in this sense. The first token may be an exception.
        """
        match self.steps:
            case [{"type": "BPEDecoder", "suffix": str(suffix)}]:  # it becomes a space, or nothing in the last token
                return not any(suffix in name.removesuffix(suffix) for name in self.tokenizer.get_vocab())
        return self.kinds in ([], ["ByteLevel"], ["WordPiece"], ["CTC"]) or None not in self.strips

    def is_closed(self, token: int) -> bool:
        """Whether no later token is decoded together with this one; bytes that are no characters are not considered."""
        name = self.tokenizer.id_to_token(token) if self.has_bytes else ""
        return not self.has_bytes or not (name is None or token in self.special or BYTE_TOKEN.fullmatch(name))

    def bytes_of(self) -> Callable[[str], bytes]:
        """The bytes of a token by its name; raises if the text is not the tokens joined as they are."""
        if self.kinds == ["ByteLevel"]:
            return byte_level()
        unsupported = [kind for kind, strip in zip(self.kinds, self.strips, strict=True) if strip is None]
        if unsupported or not self.kinds:
            raise UnsupportedError(
                f"a grammar needs a tokenizer whose tokens are joined as they are, such as one of bytes or "
                f"SentencePiece; the decoder of this one is {(unsupported or ['none'])[0]}"
            )
        has_spaces = bool({"Replace", "Metaspace"} & set(self.kinds))

        def sentence_piece(name: str) -> bytes:
            match = BYTE_TOKEN.fullmatch(name) if self.has_bytes else None
            return bytes([int(match[1], 16)]) if match else (name.replace(SPACE, " ") if has_spaces else name).encode()

        return sentence_piece


def token_bytes(decoder: TokenDecoder) -> TokenBytes:
    """The bytes of the tokens of a `tokenizers.Tokenizer`, by its decoder; a decoder that is not a join is refused."""
    tokenizer = decoder.tokenizer
    if not hasattr(tokenizer, "to_str"):
        raise UnsupportedError(f"a grammar needs a tokenizer of bytes or SentencePiece, not {type(tokenizer).__name__}")
    decode, vocab = decoder.bytes_of(), tokenizer.get_vocab(with_added_tokens=True)
    tokens = [b""] * (1 + max(vocab.values(), default=-1))
    for name, token in vocab.items():
        tokens[token] = decode(name)
    return TokenBytes(tokens, decoder.special, strips_space=any(decoder.strips))


def strips_space(step: Tree) -> bool | None:
    """Whether a step of a decoder removes a space at the start of a text; None if it does more than to join tokens."""
    match step:
        case {"type": "Fuse" | "ByteFallback"} | {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
            return False
        case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
            return start > 0
        case {"type": "Metaspace", "replacement": "▁"}:
            return step.get("prepend_scheme") != "never"
    return None


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
    return lambda name: (
        bytes(table[character] for character in name)
        if all(character in table for character in name)
        else name.encode()
    )
