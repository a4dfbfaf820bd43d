"""From a batch to vectors: token tables, patches of pictures, and what is restored around them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.parts.norm import NoNormSpec, NormSpec
from manyheads.parts.position import Places, PositionSpec, check_length
from manyheads.spec import Part, SpecError, field


@dataclass(frozen=True)
class Inputs:
    """One batch of sequences and all that is said about them; only `tokens` is required."""

    tokens: Tensor  # ids B×L, or pictures as patches B×L×pixels
    padding: Tensor | None = None  # B×L, True at padded places
    positions: Tensor | None = None  # B×L or 1×L; counted over the real tokens if not given
    segments: Tensor | None = None  # B×L, a number a packed document
    types: Tensor | None = None  # B×L, token types
    prefix: Tensor | None = None  # B, how many first tokens are seen by all
    span: int | None = None  # how long the texts will be, where they are only begun; for position schemes that ask

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
        for name in ("padding", "positions", "segments", "types", "prefix"):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, Tensor) or given.is_floating_point()):
                kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
                raise ValueError(
                    f"{name} is {kind}, expected a tensor of whole numbers"
                    if name != "padding"
                    else f"{name} is {kind}, expected torch.bool"
                )
        for name in ("padding", "positions", "segments", "types"):
            given = getattr(self, name)
            allowed = {(batch, length)} | ({(1, length)} if name == "positions" else set())
            if given is not None and tuple(given.shape) not in allowed:
                raise ValueError(f"{name} has shape {tuple(given.shape)}, expected {(batch, length)}: one a token")
        if self.padding is not None and self.padding.dtype != torch.bool:
            raise ValueError(f"padding is {self.padding.dtype}, expected torch.bool, True at padded places")
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

    @property
    def batch(self) -> int:
        return len(self.tokens)

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


@dataclass(frozen=True)
class Rows:
    """The token table as a head sees it: rows of `size`, standing first within vectors of `within`."""

    size: int
    within: int


class EmbedSpec(Part, slot="embed", default="tokens"):
    """What the first layer reads."""

    dropout: float = field(0.0, "share dropped in training", ge=0, lt=1)

    @abstractmethod
    def build(self, vocab: int, width: int, position: PositionSpec, memory_width: int | None) -> Embed:
        raise NotImplementedError


class Embed(nn.Module):
    """Vectors for a batch. `lay_out` may change the length first; `table` is another tower's token table, where shared."""

    table: nn.Embedding | None

    def __init__(self) -> None:
        super().__init__()
        self.table = None

    def rows(self) -> Rows | None:
        """The shape of the token table, its own or shared; None where there are no tokens."""
        return None

    def lay_out(self, inputs: Inputs) -> Inputs:
        return inputs

    def forward(self, inputs: Inputs, places: Places, *, table: Tensor | None, memory: Memory | None) -> Tensor:
        raise NotImplementedError


class TokensSpec(EmbedSpec, kind="tokens"):
    """E[token] (·√D) + T[type], joined with its position, normalised, dropped; E is learned

    With `size`, the table is narrower than the model and a projection follows: Lan et al. 2020, arXiv 1909.11942.
    """

    types: int = field(0, "how many token types have a vector of their own", ge=0)
    scale: bool = field(False, "multiply by √D, as in section 3.4 of Vaswani et al. 2017")
    norm: NormSpec = field(NoNormSpec(), "after everything is added")
    size: int | None = field(None, "the width of the tables, where it is not D", ge=1)

    def build(self, vocab: int, width: int, position: PositionSpec, memory_width: int | None) -> Embed:
        return Tokens(self, vocab, width, position)


class Tokens(Embed):
    def __init__(self, spec: TokensSpec, vocab: int, width: int, position: PositionSpec, *, own: bool = True) -> None:
        super().__init__()
        size = spec.size or width
        token_width = position.token_width(size)
        self.shape = Rows(token_width, size if size == width else token_width)
        self.table = nn.Embedding(vocab, token_width) if own else None
        self.types = nn.Embedding(spec.types, token_width) if spec.types else None
        self.scale = size**0.5 if spec.scale else 1.0
        self.position = position.build_embed(size)
        self.norm = spec.norm.build(size)
        self.dropout = nn.Dropout(spec.dropout)
        self.project: nn.Module = nn.Linear(size, width) if size != width else nn.Identity()

    def rows(self) -> Rows:
        return self.shape

    def forward(self, inputs: Inputs, places: Places, *, table: Tensor | None, memory: Memory | None) -> Tensor:
        rows = self.table or table
        assert rows is not None
        x_BLD = look_up(inputs.tokens, rows)
        if self.scale != 1.0:
            x_BLD = x_BLD * self.scale
        if self.types is not None:
            types = torch.zeros_like(inputs.tokens) if inputs.types is None else inputs.types
            x_BLD = x_BLD + look_up(types, self.types, "type", "types")
        elif inputs.types is not None:
            raise ValueError("token types were given, but the embedding has none; set embed.types")
        return self.project(self.dropout(self.norm(self.position(x_BLD, places))))


def look_up(ids: Tensor, table: nn.Embedding | Tensor, one: str = "token", many: str = "vocabulary") -> Tensor:
    """Rows of the table; one that it does not have is named."""
    if ids.dim() != 2:
        raise ValueError(f"{one}s have shape {tuple(ids.shape)}, expected batch × length")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{one}s are {ids.dtype}, expected whole numbers, the places of rows in a table")
    try:
        return F.embedding(ids, table) if isinstance(table, Tensor) else table(ids)
    except IndexError:
        wrong = int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())
        known = len(table) if isinstance(table, Tensor) else table.num_embeddings
        raise ValueError(f"{one} {wrong} is not in the {many} of {known} (0 to {known - 1})") from None


class SharedTokensSpec(TokensSpec, kind="shared"):
    """as tokens, with the encoder's E; types, position and norm are its own"""

    def build(self, vocab: int, width: int, position: PositionSpec, memory_width: int | None) -> Embed:
        if memory_width is None:
            raise SpecError("only a decoder beside an encoder can share the encoder's table")
        return Tokens(self, vocab, width, position, own=False)


class PatchesSpec(EmbedSpec, kind="patches"):
    """W·patch + b, joined with its position; optionally a learned vector before them all

    Dosovitskiy et al. 2021, arXiv 2010.11929. A patch is a token: the batch holds B×L×pixels.
    """

    pixels: int = field(4, "numbers in a patch: side × side × channels", ge=1)
    first: bool = field(False, "a learned vector at position 0, the patches after it")
    norm: NormSpec = field(NoNormSpec(), "after the position is joined")

    def build(self, vocab: int, width: int, position: PositionSpec, memory_width: int | None) -> Embed:
        return Patches(self, width, position, self.pixels)


class Patches(Embed):
    def __init__(self, spec: PatchesSpec, width: int, position: PositionSpec, pixels: int) -> None:
        super().__init__()
        size = position.token_width(width)
        self.project = nn.Linear(pixels, size)
        self.first = nn.Parameter(torch.zeros(1, 1, size)) if spec.first else None
        self.position = position.build_embed(width)
        self.norm = spec.norm.build(width)
        self.dropout = nn.Dropout(spec.dropout)

    def reset_parameters(self) -> None:
        if self.first is not None:
            nn.init.normal_(self.first, std=0.02)

    def lay_out(self, inputs: Inputs) -> Inputs:
        if self.first is None:
            return inputs
        if inputs.segments is not None or inputs.prefix is not None:
            raise ValueError("pictures behind a first vector take neither segments nor a prefix")
        positions = positions_of(inputs) + 1
        padding = inputs.padding
        return replace(
            inputs,
            tokens=F.pad(inputs.tokens, (0, 0, 1, 0)),
            positions=F.pad(positions, (1, 0)),
            padding=None if padding is None else F.pad(padding, (1, 0)),
        )

    def forward(self, inputs: Inputs, places: Places, *, table: Tensor | None, memory: Memory | None) -> Tensor:
        pixels = self.project.in_features
        if inputs.tokens.dim() != 3 or inputs.tokens.shape[-1] != pixels:
            raise ValueError(f"patches have shape {tuple(inputs.tokens.shape)}, expected batch × length × {pixels} pixels")
        x_BLD = self.project(inputs.tokens)
        if self.first is not None:
            x_BLD = torch.cat((self.first.expand(len(x_BLD), -1, -1), x_BLD[:, 1:]), dim=1)
        return self.dropout(self.norm(self.position(x_BLD, places)))


class RestoredSpec(EmbedSpec, kind="restored"):
    """W·memory at the places the encoder saw, a learned vector at those it did not, joined with the position

    He et al. 2022, arXiv 2111.06377: the decoder of a masked autoencoder. Of the batch only the shape is read.
    """

    def build(self, vocab: int, width: int, position: PositionSpec, memory_width: int | None) -> Embed:
        if memory_width is None:
            raise SpecError("only a decoder beside an encoder can restore what the encoder did not see")
        return Restored(self, width, position, memory_width)


class Restored(Embed):
    def __init__(self, spec: RestoredSpec, width: int, position: PositionSpec, memory_width: int) -> None:
        super().__init__()
        size = position.token_width(width)
        self.project = nn.Linear(memory_width, size)
        self.hidden = nn.Parameter(torch.zeros(1, 1, size))
        self.position = position.build_embed(width)
        self.dropout = nn.Dropout(spec.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.hidden, std=0.02)

    def forward(self, inputs: Inputs, places: Places, *, table: Tensor | None, memory: Memory | None) -> Tensor:
        assert memory is not None
        check_length(Places(memory.places(), memory.places()), inputs.length, "the text to restore", queries=False)
        seen = self.project(memory.states)
        where = memory.places().expand(inputs.batch, -1)
        if memory.padding is not None:
            where = where.masked_fill(memory.padding, inputs.length)  # padding goes to a place of its own, cut off below
        hidden = self.hidden.expand(inputs.batch, inputs.length + 1, -1).to(seen.dtype)
        x_BLD = hidden.scatter(1, where[..., None].expand_as(seen), seen)[:, : inputs.length]
        return self.dropout(self.position(x_BLD, places))


def refuse_masks(inputs: Inputs) -> None:
    """For networks that read one token after the other: there is no mask that could keep documents apart."""
    if inputs.segments is not None or inputs.prefix is not None:
        raise ValueError("segments and prefixes are masks of attention, which this network does not read by; give one text a row")


def next_position(positions_BL: Tensor, padding: Tensor | None) -> Tensor:
    """Where the text goes on, B×1: one past its last real token; 0 where there is none."""
    past = positions_BL + 1 if padding is None else (positions_BL + 1).masked_fill(padding, 0)
    last = past.flip(1).ne(0).to(torch.int8).argmax(dim=1, keepdim=True)
    return past.flip(1).gather(1, last)


def positions_of(inputs: Inputs, before: Tensor | int = 0) -> Tensor:
    """Given positions, or the count of real tokens up to each: padding on either side moves nobody. (B or 1)×L."""
    if inputs.positions is not None:
        return inputs.positions
    if inputs.padding is not None:
        counted = (~inputs.padding).cumsum(dim=-1) - 1
        return counted.clamp(min=0) + before
    places = torch.arange(inputs.length, device=inputs.tokens.device)[None]
    return places + before
