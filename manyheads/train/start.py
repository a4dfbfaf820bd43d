"""Where a run begins: the description, the tokenizer and the weights of another checkpoint, and what of them is taken, new or left out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyheads.convert.opened import Opened, opened
from manyheads.convert.tokenizer import read_rules
from manyheads.data.tokens import CheckpointTokenizerSpec, TokenizerSpec, special_ids
from manyheads.model.spec import SHAPES
from manyheads.objective.score import Tokens
from manyheads.spec import SpecError, Tree, merged, nearest, quoted, to_tree

COMPARED = 16  # texts that two tokenizers must cut alike


def opened_start(start: str) -> Opened:
    return opened(Path(start), dtype=torch.float32)


def described_by(start: str, own: Tree) -> Tree:
    """The checkpoint's description with what the run says laid over it; a description that is whole stands for itself."""
    if "vocab" in own and any(isinstance(own.get(shape), dict) for shape in SHAPES):
        return own
    return merged(to_tree(opened_start(start).model.spec), own)


def digest(found: Opened) -> str:
    """The hash of every weight and of the tokenizer, whatever files they stand in."""
    total = hashlib.sha256()
    for name, tensor in found.model.named_parameters():
        total.update(name.encode())
        total.update(tensor.detach().contiguous().numpy().data)
    total.update(found.tokenizer.to_str().encode() if hasattr(found.tokenizer, "to_str") else b"")
    return total.hexdigest()


# ------------------------------------------------------------------------------------------------------------- tokens


def tokenizer_from(found: Opened, said: TokenizerSpec, texts: Iterable[str], start: str) -> Any:
    """The checkpoint's tokenizer; one that the run says must be the same."""
    from tokenizers import Tokenizer

    own = Tokenizer.from_str(found.tokenizer.to_str()) if hasattr(found.tokenizer, "to_str") else None
    if own is not None:
        own.no_truncation()  # where a run that it comes from cut is not where this one does
    if isinstance(said, CheckpointTokenizerSpec):
        if own is None:
            raise SpecError(f"{start} has no tokenizer to train with; say one that has its vocabulary", ("tokenizer",))
        return own
    texts = list(texts)
    made = said.make(texts)
    if own is None:
        return made
    check_same(own, made, texts[:COMPARED])
    return own


def check_same(theirs: Any, ours: Any, texts: Sequence[str]) -> None:
    """Refuses a tokenizer with another vocabulary, naming the first entry that differs, and one that cuts texts otherwise."""
    there, here = ({i: token for token, i in one.get_vocab(with_added_tokens=True).items()} for one in (theirs, ours))
    for i in sorted({*there, *here}):
        if there.get(i) != here.get(i):
            one, other = (quoted(found[i]) if i in found else "nothing" for found in (there, here))
            raise SpecError(f"the vocabulary differs at id {i}: {one} there, {other} here; leave [tokenizer] out", ("tokenizer",))
    for text in texts:
        if theirs.encode(text, add_special_tokens=False).ids != ours.encode(text, add_special_tokens=False).ids:
            raise SpecError(f"{quoted(text)} is cut otherwise than by the checkpoint's tokenizer; leave [tokenizer] out", ("tokenizer",))


def tokens_of(tokenizer: Any, found: Opened | None = None) -> Tokens:
    """Which tokens pad, begin, end and mask: by the checkpoint's config, by the names in its files, or by how they are usually spelt."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    usual, count = special_ids(tokenizer), max(vocab.values()) + 1
    config, names = (found.origin.config, token_names(found)) if found else ({}, Tree())

    def known(otherwise: int | None, *keys: str) -> int | None:
        ids = [config.get(f"{key}_token_id") for key in keys]
        ids = [one[0] if isinstance(one, list) and one else one for one in ids]
        ids += [vocab.get(names[key]) for key in keys if key in names]
        return next((one for one in ids if type(one) is int and 0 <= one < count), otherwise)

    begin, end = known(usual.begin, "bos", "cls"), known(usual.end, "eos", "sep")
    pad, unknown, mask = known(usual.pad, "pad"), known(usual.unknown, "unk"), known(usual.mask, "mask")
    end = begin if end is None else end
    begin = next((one for one in (begin, pad, end) if one is not None), None)  # where nothing begins a text, padding does
    if begin is None or end is None:
        raise SpecError("nothing says which tokens of this tokenizer begin and end a text", ("tokenizer",))
    named = {i for i in (pad, begin, end, unknown, mask) if i is not None}
    named |= {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    special = tuple(sorted(named | (set(range(count)) - set(vocab.values()))))
    start = read_rules(config, found.origin.beside).start if found else None
    given = (end if pad is None else pad, begin, end, -1 if unknown is None else unknown, -1 if mask is None else mask)
    framed = found is not None and found.tokenizer is not None and not made_here(found)
    pool = found.pooling.pool if found and found.pooling else None
    return Tokens(*given, count, special, start, around(tokenizer) if framed else None, pool=pool)


def token_names(found: Opened) -> Tree:
    """The special tokens as tokenizer_config.json spells them, by their role."""
    try:
        said = json.loads(found.origin.beside.get("tokenizer_config.json", b"{}"))
        texts = {role: said.get(f"{role}_token") for role in ("bos", "eos", "cls", "sep", "pad", "unk", "mask")}
    except (ValueError, AttributeError, RecursionError):
        return {}
    texts = {role: text.get("content") if isinstance(text, dict) else text for role, text in texts.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def made_here(found: Opened) -> bool:
    """Whether the tokenizer is one of ours, around whose texts each objective puts what it needs."""
    return found.origin.family.model_type == "manyheads" and "family" not in found.origin.config


def around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a tokenizer puts before and behind every text."""
    for text in ("a", *sorted(tokenizer.get_vocab())[:100]):
        full = tokenizer.encode(text)
        if 0 in full.special_tokens_mask:
            first, last = (mask.index(0) for mask in (full.special_tokens_mask, full.special_tokens_mask[::-1]))
            return tuple(full.ids[:first]), tuple(full.ids[len(full.ids) - last :])
    return (), ()


# ------------------------------------------------------------------------------------------------------------ weights


@dataclass(frozen=True)
class Taken:
    """What of a model came from the checkpoint, by name: what did, what is new, and what of the checkpoint is left out."""

    taken: tuple[str, ...]
    new: tuple[str, ...]
    left: tuple[str, ...]


def classes_of(found: Opened) -> tuple[str, ...]:
    """The names of a checkpoint's classes; none where they have only numbers."""
    named = found.origin.config.get("id2label") or {}
    names = tuple(str(named[i]) for i in sorted(named, key=int))
    return () if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


@torch.no_grad()
def take(model: nn.Module, found: Opened, start: str, labels: Sequence[str] = ()) -> Taken:
    """Gives a model every weight of the checkpoint that has its name and shape.

    Only a head may have another shape, or tell other classes, and is then new.
    """
    ours, theirs = dict(model.named_parameters()), dict(found.model.named_parameters())
    same = {name for name in ours if name in theirs and ours[name].shape == theirs[name].shape}
    if labels and (known := classes_of(found)) and sorted(known) != sorted(labels):
        same -= {name for name in same if name.startswith("head.output.")}
    for name in sorted(set(ours) & set(theirs) - same):
        if not name.startswith("head."):
            there, here = (" × ".join(map(str, held[name].shape)) for held in (theirs, ours))
            raise SpecError(f"{name} is {there} in {start}, and {here} by the description", ("model",))
    if not same:
        raise SpecError(f"no weight of {start} has a place in this model", ("start",))
    for name in same:
        ours[name].copy_(theirs[name])
    taken, new = ([name for name in ours if (name in same) is kept] for kept in (True, False))
    left = [name for name in theirs if name not in same] + list(found.origin.unused)
    return Taken(tuple(taken), tuple(new), tuple(left))


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Weights under these paths do not change."""
    named = dict(model.named_parameters())
    for prefix in prefixes:
        under = [name for name in named if name == prefix or name.startswith(f"{prefix}.")]
        if not under:
            known = {".".join(name.split(".")[:depth]) for name in named for depth in (1, 2)}
            raise SpecError(f"no weight stands under {quoted(prefix)}{nearest(prefix, known)}", ("freeze",))
        for name in under:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise SpecError("nothing is left to learn: every weight is frozen", ("freeze",))
