"""One batch of sequences: the tokens, what is said about them, and where each of them stands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """One batch of sequences and all that is said about them; only `tokens` is required.

    tokens: ids, B×L; pictures as patches, B×L×pixels.
    padding: B×L, True at padded places, on either side.
    positions: B×L or 1×L, where each token stands; counted over the real tokens if not given.
    segments: B×L, a number a packed document: tokens of different numbers do not see each other.
    types, tasks: B×L, the token types and task types of an embedding that has them; 0 if not given.
    prefix: B, how many first tokens are seen by all, for a mask with a prefix.
    span: how long the texts will be, where they are only begun, for rotations that depend on it.
    """

    tokens: Tensor
    padding: Tensor | None = None
    positions: Tensor | None = None
    segments: Tensor | None = None
    types: Tensor | None = None
    tasks: Tensor | None = None
    prefix: Tensor | None = None
    span: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor):
            raise ValueError(f"tokens is {type(self.tokens).__name__}, expected a tensor batch × length")
        batch, length = self.tokens.shape[:2] if self.tokens.dim() > 1 else (-1, -1)
        if length < 0:
            raise ValueError(f"tokens has shape {tuple(self.tokens.shape)}, expected batch × length")
        if not batch or not length:
            raise ValueError(
                f"tokens has shape {tuple(self.tokens.shape)}: there is nothing to read; expected at least one text of one token"
            )
        for name in ("padding", "positions", "segments", "types", "tasks", "prefix"):
            given = getattr(self, name)
            expected = (torch.bool,) if name == "padding" else (torch.int64, torch.int32)
            if given is not None and (not isinstance(given, Tensor) or given.dtype not in expected):
                kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
                wanted = "torch.bool, True at padded places" if name == "padding" else "a tensor of whole numbers, torch.int64"
                raise ValueError(f"{name} is {kind}, expected {wanted}")
        for name in ("padding", "positions", "segments", "types", "tasks"):
            given = getattr(self, name)
            allowed = [(batch, length), (1, length)] if name == "positions" else [(batch, length)]
            if given is not None and tuple(given.shape) not in allowed:
                raise ValueError(f"{name} has shape {tuple(given.shape)}, expected {(batch, length)}: one a token")
        if self.prefix is not None and tuple(self.prefix.shape) != (batch,):
            raise ValueError(f"prefix has shape {tuple(self.prefix.shape)}, expected {(batch,)}: a length a sequence")
        if self.span is not None and (type(self.span) is not int or self.span < length):
            raise ValueError(
                f"span is {self.span}, expected a whole number of at least the {length} tokens given: how long the text will be"
            )

    @staticmethod
    def of(given: Inputs | Tensor) -> Inputs:
        """Plain tokens as a batch with nothing more to say."""
        if not isinstance(given, Tensor | Inputs):
            raise ValueError(f"given a {type(given).__name__}, expected tokens as a tensor batch × length, or Inputs")
        return Inputs(given) if isinstance(given, Tensor) else given

    def to(self, device: torch.device | str) -> Inputs:
        """The same batch on a device."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]


@dataclass(frozen=True)
class Memory:
    """What an encoder hands on: its states and where they stand."""

    states: Tensor  # B×M×D
    positions: Tensor | None = None  # B×M; counted from 0 if not given
    padding: Tensor | None = None  # B×M
    segments: Tensor | None = None  # B×M
    counted: bool = True  # whether the positions count tokens, so that none is past the length

    def places(self) -> Tensor:
        """The positions, (B or 1)×M."""
        return torch.arange(self.states.shape[1], device=self.states.device)[None] if self.positions is None else self.positions


def numberless(tensor: Tensor) -> bool:
    """Whether there are no numbers to look at: it has no memory, or a graph is drawn that must hold for all numbers and lengths."""
    return tensor.device.type == "meta" or torch.compiler.is_exporting()


def refuse_masks(inputs: Inputs) -> None:
    """For networks that read one token after the other: there is no mask that could keep documents apart."""
    if inputs.segments is not None or inputs.prefix is not None:
        raise ValueError("segments and prefixes are masks of attention, which this network does not read by; give one text a row")


def next_position(positions_BL: Tensor, padding: Tensor | None) -> Tensor:
    """Where the text goes on, B×1: one past its last real token; 0 where there is none."""
    if padding is None:
        return positions_BL[:, -1:] + 1
    last = (~padding).flip(1).to(torch.int8).argmax(dim=1, keepdim=True)
    after = positions_BL.flip(1).gather(1, last) + 1
    return after.masked_fill(padding.all(dim=1, keepdim=True), 0)


def positions_of(inputs: Inputs, before: Tensor | int = 0) -> Tensor:
    """Given positions, or the count of real tokens up to each: padding on either side moves nobody. (B or 1)×L."""
    if inputs.positions is not None:
        # what stands at padded places must not matter
        return inputs.positions if inputs.padding is None else inputs.positions.expand(inputs.batch, -1).masked_fill(inputs.padding, 0)
    if inputs.padding is not None:
        counted = (~inputs.padding).cumsum(dim=-1) - 1
        return counted.clamp(min=0) + before
    places = torch.arange(inputs.length, device=inputs.tokens.device)[None]
    return places + before


def real_first(padding: Tensor) -> Tensor:
    """The order, B×L, that puts each row's real tokens first and leaves them in theirs, whichever side was padded."""
    places = torch.arange(padding.shape[1], device=padding.device)
    return torch.where(padding, places + padding.shape[1], places).argsort(dim=1)
