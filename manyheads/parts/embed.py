"""From a batch to vectors: token tables, patches of pictures, and what is restored around them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from math import isqrt
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.parts.batch import Inputs, Memory, positions_of
from manyheads.parts.norm import NoNormSpec, NormSpec
from manyheads.parts.position import Places, PositionSpec, check_length
from manyheads.spec import Part, SpecError, field


@dataclass(frozen=True)
class Rows:
    """The token table as a head sees it: rows of `size`, standing first within vectors of `within`."""

    size: int
    within: int


class EmbedSpec(Part, slot="embed", default="tokens"):
    """What the first layer reads."""

    reads: ClassVar[Literal["tokens", "patches", "memory"]] = "tokens"  # ids, pictures, or what an encoder has seen
    borrows: ClassVar[bool] = False  # whether its table is the encoder's

    dropout: float = field(0.0, "share dropped in training", ge=0, lt=1)

    def table_width(self, width: int) -> int:
        """The size of the vectors that are joined with their positions, in a tower of this width."""
        return width

    def patch(self) -> int | None:
        """Numbers in a patch, where it reads pictures."""
        return None

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
    """E[token] (·√D) + T[type] + S[task], joined with its position, normalised, dropped; E, T and S are learned

    With `size`, the table is narrower than the model and a projection follows: Lan et al. 2020, arXiv 1909.11942.
    """

    types: int = field(0, "how many token types have a vector of their own", ge=0)
    tasks: int = field(0, "how many task types have a vector of their own", ge=0)
    scale: bool = field(False, "multiply by √D, as in section 3.4 of Vaswani et al. 2017")
    norm: NormSpec = field(NoNormSpec(), "after everything is added")
    size: int | None = field(None, "the width of the tables, where it is not D", ge=1, le=65536)

    def table_width(self, width: int) -> int:
        return self.size or width

    def build(self, vocab: int, width: int, position: PositionSpec, memory_width: int | None) -> Embed:
        return Tokens(self, vocab, width, position)


class Tokens(Embed):
    def __init__(self, spec: TokensSpec, vocab: int, width: int, position: PositionSpec, *, own: bool = True) -> None:
        super().__init__()
        size = spec.table_width(width)
        token_width = position.token_width(size)
        self.shape = Rows(token_width, size if size == width else token_width)
        self.table = nn.Embedding(vocab, token_width) if own else None
        self.types = nn.Embedding(spec.types, token_width) if spec.types else None
        self.tasks = nn.Embedding(spec.tasks, token_width) if spec.tasks else None
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
        for kind, sorts, given in (("type", self.types, inputs.types), ("task", self.tasks, inputs.tasks)):
            if sorts is not None:
                x_BLD = x_BLD + look_up(torch.zeros_like(inputs.tokens) if given is None else given, sorts, kind, f"{kind}s")
            elif given is not None:
                raise ValueError(f"token {kind}s were given, but the embedding has none; set embed.{kind}s")
        return self.project(self.dropout(self.norm(self.position(x_BLD, places))))


def look_up(ids: Tensor, table: nn.Embedding | Tensor, one: str = "token", many: str = "vocabulary") -> Tensor:
    """Rows of the table; one that it does not have is named."""
    if ids.dim() != 2:
        raise ValueError(f"{one}s have shape {tuple(ids.shape)}, expected batch × length")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{one}s are {ids.dtype}, expected whole numbers, the places of rows in a table")
    weight = table if isinstance(table, Tensor) else table.weight
    try:
        if ids.device.type not in ("cpu", "meta") and not 0 <= int(ids.min()) <= int(ids.max()) < len(weight):
            raise IndexError  # which a CPU raises by itself, and other devices only with the death of the process
        return F.embedding(ids, table) if isinstance(table, Tensor) else table(ids)
    except IndexError:
        wrong = int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())
        raise ValueError(f"{one} {wrong} is not in the {many} of {len(weight)} (0 to {len(weight) - 1})") from None


class SharedTokensSpec(TokensSpec, kind="shared"):
    """as tokens, with the encoder's E; types, position and norm are its own"""

    borrows: ClassVar[bool] = True

    def build(self, vocab: int, width: int, position: PositionSpec, memory_width: int | None) -> Embed:
        if memory_width is None:
            raise SpecError("only a decoder beside an encoder can share the encoder's table")
        return Tokens(self, vocab, width, position, own=False)


class PatchesSpec(EmbedSpec, kind="patches"):
    """W·patch + b, joined with its position; optionally a learned vector before them all

    Dosovitskiy et al. 2021, arXiv 2010.11929. A patch is a token: the batch holds B×L×pixels.
    """

    reads: ClassVar[Literal["tokens", "patches", "memory"]] = "patches"

    pixels: int = field(4, "numbers in a patch: side × side × channels", ge=1, le=1 << 20)
    channels: int = field(3, "numbers in a point of the picture, for those who cut it: a patch holds one channel after the other", ge=1)
    first: bool = field(False, "a learned vector at position 0, the patches after it")
    norm: NormSpec = field(NoNormSpec(), "after the position is joined")

    def patch(self) -> int | None:
        return self.pixels

    @property
    def side(self) -> int:
        """How many points a patch has in a row, and as many rows."""
        side = isqrt(self.pixels // self.channels)
        if side**2 * self.channels != self.pixels:
            raise SpecError(f"only square patches are cut, not {self.pixels} numbers in {self.channels} channels", ("pixels",))
        return side

    def cut(self, pictures: Tensor) -> Tensor:
        """Pictures, batch × colours × height × width, as patches, B×L×pixels, one row of them after the other.

        In a patch, colours come before rows before columns, as a convolution reads them.
        """
        _, colours, height, width = pictures.shape
        if colours != self.channels or height % self.side or width % self.side:
            size = f"{height} × {width} points of {colours} numbers"
            raise SpecError(f"pictures of {size} cannot be cut into patches of {self.side} × {self.side} points of {self.channels}")
        cut = pictures.unflatten(3, (-1, self.side)).unflatten(2, (-1, self.side))  # batch, colour, down, row, across, column
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def joined(self, patches_BLP: Tensor, height: int, width: int) -> Tensor:
        """The pictures of which `cut` made these."""
        parts = patches_BLP.unflatten(2, (self.channels, self.side, -1)).unflatten(1, (height // self.side, width // self.side))
        return parts.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)

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
        if inputs.types is not None or inputs.tasks is not None:
            raise ValueError("token types were given, and patches have none")
        if inputs.tokens.dim() != 3 or inputs.tokens.shape[-1] != pixels:
            raise ValueError(f"patches have shape {tuple(inputs.tokens.shape)}, expected batch × length × {pixels} pixels")
        if inputs.tokens.dtype != self.project.weight.dtype:
            raise ValueError(f"patches are {inputs.tokens.dtype}, the model is {self.project.weight.dtype}; give numbers of that sort")
        # what stands at padded places must not matter, whatever it is
        tokens = inputs.tokens if inputs.padding is None else inputs.tokens.masked_fill(inputs.padding[..., None], 0.0)
        x_BLD = self.project(tokens)
        if self.first is not None:
            x_BLD = torch.cat((self.first.expand(x_BLD.shape[0], -1, -1), x_BLD[:, 1:]), dim=1)
        return self.dropout(self.norm(self.position(x_BLD, places)))


class RestoredSpec(EmbedSpec, kind="restored"):
    """W·memory at the places the encoder saw, a learned vector at those it did not, joined with the position

    He et al. 2022, arXiv 2111.06377: the decoder of a masked autoencoder. Of the batch only the shape is read.
    """

    reads: ClassVar[Literal["tokens", "patches", "memory"]] = "memory"

    first: bool = field(False, "place 0 is that of the encoder's first vector, the patches stand after it")

    def build(self, vocab: int, width: int, position: PositionSpec, memory_width: int | None) -> Embed:
        if memory_width is None:
            raise SpecError("only a decoder beside an encoder can restore what the encoder did not see")
        return Restored(self, width, position, memory_width)


class Restored(Embed):
    def __init__(self, spec: RestoredSpec, width: int, position: PositionSpec, memory_width: int) -> None:
        super().__init__()
        size = position.token_width(width)
        self.project = nn.Linear(memory_width, size)
        self.first = spec.first
        self.hidden = nn.Parameter(torch.zeros(1, 1, size))
        self.position = position.build_embed(width)
        self.dropout = nn.Dropout(spec.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.hidden, std=0.02)

    def lay_out(self, inputs: Inputs) -> Inputs:
        if not self.first:
            return inputs
        tokens = inputs.tokens
        return replace(inputs, tokens=torch.cat((tokens[:, :1], tokens), dim=1))  # only the shape is read

    def forward(self, inputs: Inputs, places: Places, *, table: Tensor | None, memory: Memory | None) -> Tensor:
        assert memory is not None
        if any(given is not None for given in (inputs.padding, inputs.positions, inputs.segments, inputs.types, inputs.prefix)):
            raise ValueError("what is restored is whole, and of the batch only the shape is read: give neither padding nor anything else")
        if memory.states.shape[0] != inputs.batch:
            raise ValueError(f"{inputs.batch} targets for {len(memory.states)} sources; each target needs its own")
        check_length(Places(memory.places(), memory.places()), inputs.length, "the text to restore", queries=False)
        seen = self.project(memory.states)
        where = memory.places().expand(inputs.batch, -1)
        if memory.padding is not None:
            where = where.masked_fill(memory.padding, inputs.length)  # padding goes to a place of its own, cut off below
        hidden = self.hidden.expand(inputs.batch, inputs.length + 1, -1).to(seen.dtype)
        x_BLD = hidden.scatter(1, where[..., None].expand_as(seen), seen)[:, : inputs.length]
        return self.dropout(self.position(x_BLD, places))
