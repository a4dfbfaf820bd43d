"""Reads a text with a checkpoint: its tokens, one recorded forward pass, and the outputs that the page compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import InputError, InputLengthError, OutOfMemoryError, UnsupportedError
from manyheads.files.tokenizer import all_special_ids, encode_texts
from manyheads.generate.generator import start_token
from manyheads.inspect.edit import ablate, edit
from manyheads.model.recording import Tape, record
from manyheads.parts.inputs import Inputs, check_token_ids
from manyheads.spec import Tree
from manyheads.tasks.prediction import parse_row

MAX_TEXT = 400_000  # characters
MAX_TOKENS = 16384
MAX_PIXELS = 1 << 20
GENERATED = 48  # tokens of a target that the page does not give
WORD_STARTS = ("Ġ", "▁", " ")

Head = tuple[str, int]  # the name of an attention, and a head of it


@dataclass(frozen=True)
class Text:
    """What the model reads on one side: ids, or patches of an image, with how the page shows each."""

    tokens: list[str]
    ids: list[int] = field(default_factory=list)
    special: list[bool] = field(default_factory=list)
    words: list[int] = field(default_factory=list)  # number of the word of each token
    patches: Tensor | None = None  # L×P
    image: Tree | None = None  # its channels, and the sides of the image and of a patch in pixels

    def __len__(self) -> int:
        return len(self.tokens)

    def tensor(self) -> Tensor:
        return torch.tensor([self.ids]) if self.patches is None else self.patches[None]

    def to_tree(self) -> Tree:
        names = ("tokens", "ids", "special", "words", "image")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ForwardRequest:
    """A text to read, with what follows it: ids after a text, or of the target of an encoder–decoder."""

    text: str
    target: str | None = None
    add: tuple[int, ...] = ()
    generate: int = 0
    temperature: float = 0.0
    seed: int = 0
    off: tuple[Head, ...] = ()


# --------------------------------------------------------------------------------------------------------------- texts


def encode_text(checkpoint: Checkpoint, text: str, *, add_special_tokens: bool = True) -> Text:
    """The tokens of a text; without a tokenizer, the text is ids as numbers."""
    if checkpoint.tokenizer is None:
        return text_of_numbers(parse_row(text))
    if add_special_tokens:
        encoding = checkpoint.encode([text])[0]
    else:
        (encoding,) = encode_texts(checkpoint.tokenizer, [text], InputError, add_special_tokens=False)
    special = [bool(is_special) for is_special in encoding.special_tokens_mask]
    by_tokenizer = encoding.word_ids
    read_text = text_of_ids(checkpoint, encoding.ids)
    if all(word is not None or is_special for word, is_special in zip(by_tokenizer, special, strict=True)):
        read_text = replace(read_text, words=number_words(by_tokenizer))
    return replace(read_text, special=[a or b for a, b in zip(special, read_text.special, strict=True)])


def number_words(words: Sequence[int | None]) -> list[int]:
    """Counts words from 0; a special token, which has no number, is a word of its own."""
    numbers, last = list[int](), object()
    for word in words:
        new = word is None or word != last
        numbers.append(len(numbers) and numbers[-1] + new)
        last = word
    return numbers


def text_of_ids(checkpoint: Checkpoint, ids: Sequence[int]) -> Text:
    """The tokens of ids, with words as their names begin: with Ġ, ▁ or a space, or not with ##."""
    if checkpoint.tokenizer is None:
        return text_of_numbers(ids)
    special_ids = all_special_ids(checkpoint.tokenizer)
    names = [str(checkpoint.tokenizer.id_to_token(token)) for token in ids]
    special = [token in special_ids for token in ids]
    spaced = any(name.startswith(WORD_STARTS) for name in names)
    words, number = [], -1
    for i, name in enumerate(names):
        apart = special[i] or (i and special[i - 1]) or not i
        continues = name.startswith("##") or (spaced and not name.startswith(WORD_STARTS))
        number += bool(apart or not continues)
        words.append(number)
    tokens = [name if special[i] else checkpoint.text_generator.token_name(ids[i]) for i, name in enumerate(names)]
    return Text(tokens, list(ids), special, words)


def text_of_numbers(ids: Sequence[int]) -> Text:
    return Text([str(token) for token in ids], list(ids), [False] * len(ids), list(range(len(ids))))


def read_image(checkpoint: Checkpoint, text: str) -> Text:
    """Patches of a square image, whose pixels from 0 to 1 are given as numbers, row by row."""
    embed: Any = input_embed(checkpoint)
    words = text.split()
    try:
        pixels = torch.tensor([float(word) for word in words[: MAX_PIXELS + 1]])
    except ValueError:
        raise InputError("an image is its pixels as numbers from 0 to 1, row by row") from None
    side = math.isqrt(len(words) // embed.channels)
    if not len(words) or len(words) > MAX_PIXELS or side * side * embed.channels != len(words):
        raise InputError(f"given {len(words):,} numbers, expected channels × side × side of a square image")
    if not bool(pixels.isfinite().all()):
        raise InputError("a pixel is not a finite number")
    patches = embed.patchify(pixels.reshape(1, embed.channels, side, side))[0]
    across = side // embed.side
    names = [f"r{i // across + 1}c{i % across + 1}" for i in range(len(patches))]
    image = {"channels": embed.channels, "side": side, "patch": embed.side}
    return Text(names, special=[False] * len(names), words=list(range(len(names))), patches=patches, image=image)


def input_embed(checkpoint: Checkpoint) -> Any:
    stack = checkpoint.spec.encoder or checkpoint.spec.decoder
    return stack.embed if stack else None


def reads_images(checkpoint: Checkpoint) -> bool:
    return getattr(input_embed(checkpoint), "reads", "tokens") == "patches"


def read(checkpoint: Checkpoint, request: ForwardRequest) -> dict[str, Text]:
    """The sequences of a forward pass: `text`, or `source` and `target`."""
    if reads_images(checkpoint):
        image = read_image(checkpoint, request.text)
        return {"source": image, "target": image} if checkpoint.has_source else {"text": image}
    first = encode_text(checkpoint, request.text)
    checkpoint.to_input_ids([first.ids])
    if not checkpoint.has_source:
        ids = [*first.ids, *request.add]
        if request.generate:
            ids += generate(checkpoint, ids, request)
        if len(ids) > len(first.ids):
            added = text_of_ids(checkpoint, checkpoint.to_input_ids([ids])[0])
            first = Text(added.tokens, added.ids, first.special + added.special[len(first) :], added.words)
        return {"text": first}
    start = start_token(checkpoint.generation_settings.decoder_start_token_id)
    if request.add:
        target = list(request.add)
    elif request.target is not None:
        target = encode_text(checkpoint, request.target, add_special_tokens=False).ids
    else:
        target = generate(checkpoint, first.ids, replace(request, generate=request.generate or GENERATED))
    vocab = checkpoint.spec.vocab
    if isinstance(vocab, int):
        check_token_ids(target, vocab)
    limit = checkpoint.max_target_positions
    if limit is not None and len(target) >= limit:
        raise InputLengthError(f"the target has {len(target) + 1:,} tokens, but the model has {limit:,} positions")
    return {"source": first, "target": text_of_ids(checkpoint, [start, *target])}


def generate(checkpoint: Checkpoint, ids: Sequence[int], request: ForwardRequest) -> list[int]:
    """New ids: sampled, if the temperature is above 0, or those of the checkpoint's own decoding method."""
    settings: Tree = {"temperature": request.temperature, "seed": request.seed} if request.temperature else {}
    tokens: list[int] = checkpoint.generate(list(ids), max_new_tokens=request.generate, **settings)
    return tokens


# ------------------------------------------------------------------------------------------------------- forward passes


def input_tensors(checkpoint: Checkpoint, texts: dict[str, Text]) -> tuple[Inputs, Inputs | None]:
    tensors = {name: Inputs(text.tensor()).to(checkpoint.device) for name, text in texts.items()}
    return (tensors["target"], tensors["source"]) if "source" in tensors else (tensors["text"], None)


@torch.no_grad()
def last_states(checkpoint: Checkpoint, texts: dict[str, Text]) -> Tensor:
    """What the head reads, 1×L×D, so that only the logits that are shown are computed."""
    inputs, source = input_tensors(checkpoint, texts)
    return checkpoint.model.last_hidden_state(inputs, source)[0]


@torch.no_grad()
def outputs(checkpoint: Checkpoint, states: Tensor, positions: Sequence[int] | None = None) -> Tensor:
    """The output of the head, N×V at some positions, or 1×V if it gives one output per sequence."""
    per_token = checkpoint.spec.head.per_token
    if per_token and positions is not None:
        states = states[:, list(positions)]
    output: Tensor = checkpoint.model.head(states, table=checkpoint.model.table, padding_mask=None)
    return output[0].float() if per_token else output.float()


@torch.no_grad()
def forward(checkpoint: Checkpoint, texts: dict[str, Text], off: Sequence[Head], max_bytes: int) -> tuple[Tape, Tensor]:
    """One recorded forward pass with some heads switched off; returns the tape and what the head reads."""
    check_size(checkpoint, texts, max_bytes)
    with ExitStack() as stack:
        stack.enter_context(edit(checkpoint.model, *(ablate(name, head=head) for name, head in off)))
        tape = stack.enter_context(record(checkpoint.model))
        states = checkpoint.compute_checked(lambda: last_states(checkpoint, texts))
    if not len(tape):
        raise UnsupportedError(f"this {checkpoint.spec.architecture} model has no attention to show")
    tape.outputs.clear()  # the page shows attention; the residual stream would double the memory of a run
    return tape, states


def check_size(checkpoint: Checkpoint, texts: dict[str, Text], max_bytes: int) -> None:
    """Raises before a forward pass that would keep more than the memory of a session."""
    length = max(len(text) for text in texts.values())
    if length > MAX_TOKENS:
        raise InputLengthError(f"the text has {length:,} tokens; the page shows up to {MAX_TOKENS:,}")
    spec, needed_bytes = checkpoint.spec, 0
    for stack in (spec.encoder, spec.decoder):
        if stack is not None:
            # q, k, v and the output
            needed_bytes += stack.layers * stack.width * 4 * (1 + bool(stack.cross)) * length * 4
    if needed_bytes > max_bytes:
        raise OutOfMemoryError(
            f"the attention of {length:,} tokens takes {needed_bytes / 2**30:.1f} GiB; "
            f"a page may hold {max_bytes / 2**30:.1f}",
            hint="give a shorter text",
        )
