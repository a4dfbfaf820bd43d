"""Embeddings, which turn a batch of tokens or image patches into the vectors that the first layer reads."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from math import isqrt
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import IncompatibleError, InputError, InputShapeError, UnsupportedError
from manyheads.parts.inputs import INTEGERS, Inputs, Memory, input_positions
from manyheads.parts.norm import NoNormSpec, NormSpec
from manyheads.parts.position import Positions, PositionSpec, check_positions
from manyheads.spec import Part, field

Source = Literal["tokens", "patches", "memory"]


@dataclass(frozen=True)
class TableShape:
    """Shape of the token embedding.

    With concatenated positions a hidden vector has `vector_size` entries, of which the first `size` are the token's.
    """

    size: int
    vector_size: int


class EmbedSpec(Part, slot="embed", default="tokens"):
    """The embedding, whose output the first layer reads."""

    reads: ClassVar[Source] = "tokens"  # its input is token ids, image patches, or the output of the encoder
    shares_table: ClassVar[bool] = False  # whether it uses the encoder's token table

    dropout: float = field(0.0, "dropout probability of the embeddings", ge=0, lt=1)

    def table_width(self, width: int) -> int:
        """The width of the embedding before its projection to the width of the stack."""
        return width

    def patch_pixels(self) -> int | None:
        """The number of pixel values per patch; None if it does not read images."""
        return None

    @abstractmethod
    def build(self, vocab: int, width: int, position: PositionSpec, memory_width: int | None) -> Embed:
        """Builds the embedding of a stack of this width. `memory_width` is the encoder's width, None without one."""


class Embed(nn.Module):
    """Computes vectors for a batch. `table` in `forward` is the encoder's token table, for a decoder that shares it."""

    table: nn.Embedding | None
    table_shape: TableShape | None  # the shape of its own or the shared token table; None if it reads no tokens

    def __init__(self) -> None:
        super().__init__()
        self.table = self.table_shape = None

    def prepare_inputs(self, inputs: Inputs) -> Inputs:
        """Returns the batch as the layers read it, which is one longer if the embedding adds a class token.

        Raises if the batch has inputs that the embedding does not use.
        """
        return inputs


class TokensSpec(EmbedSpec, kind="tokens", caption="Token Embedding"):
    """E[token] (·√D) + T[type] + S[task], joined with its position, normalized, dropped out; E, T and S are learned

    With `size`, the table is narrower than the model and a projection follows: Lan et al. 2020, arXiv 1909.11942.
    """

    type_vocab_size: int = field(0, "the number of token types; 0 for no token type embedding", ge=0)
    task_type_vocab_size: int = field(0, "the number of task types; 0 for no task type embedding", ge=0)
    scale: bool = field(False, "multiply by √D, as in section 3.4 of Vaswani et al. 2017")
    norm: NormSpec = field(NoNormSpec(), "the norm after all embeddings are added")
    size: int | None = field(None, "the width of the tables; D by default", ge=1, le=65536)

    def table_width(self, width: int) -> int:
        return self.size or width

    def build(self, vocab: int, width: int, position: PositionSpec, memory_width: int | None) -> Embed:
        return TokenEmbedding(self, vocab, width, position)


class TokenEmbedding(Embed):
    def __init__(self, spec: TokensSpec, vocab: int, width: int, position: PositionSpec) -> None:
        super().__init__()
        size = spec.table_width(width)
        token_width = position.token_width(size)
        self.table_shape = TableShape(token_width, size if size == width else token_width)
        self.table = None if spec.shares_table else nn.Embedding(vocab, token_width)
        self.types = nn.Embedding(spec.type_vocab_size, token_width) if spec.type_vocab_size else None
        self.tasks = nn.Embedding(spec.task_type_vocab_size, token_width) if spec.task_type_vocab_size else None
        self.scale = size**0.5 if spec.scale else 1.0
        self.position = position.build_embed(size)
        self.norm = spec.norm.build(size)
        self.dropout = nn.Dropout(spec.dropout)
        self.project: nn.Module = nn.Linear(size, width) if size != width else nn.Identity()

    def forward(self, inputs: Inputs, positions: Positions, *, table: Tensor | None, memory: Memory | None) -> Tensor:
        token_table = self.table or table
        assert token_table is not None
        x_BLD = embed_ids(inputs.tokens, token_table)
        if self.scale != 1.0:
            x_BLD = x_BLD * self.scale
        for name, type_table, ids in (
            ("token_type", self.types, inputs.token_type_ids),
            ("task_type", self.tasks, inputs.task_type_ids),
        ):
            if type_table is not None:
                x_BLD = x_BLD + embed_ids(torch.zeros_like(inputs.tokens) if ids is None else ids, type_table, name)
            elif ids is not None:
                field = f"{name}_vocab_size".removeprefix("token_")
                raise InputError(f"{name}_ids were given, but the embedding has no {name}s; set embed.{field}")
        return self.project(self.dropout(self.norm(self.position(x_BLD, positions))))


def as_token_embedding(embed: Embed) -> TokenEmbedding:
    if not isinstance(embed, TokenEmbedding):
        raise UnsupportedError("this needs a stack that embeds tokens")
    return embed


def embed_ids(ids: Tensor, table: nn.Embedding | Tensor, name: str = "token") -> Tensor:
    """Looks ids up in a table. Raises an error that names an id outside it."""
    if ids.dim() != 2 or ids.dtype not in INTEGERS:
        raise InputShapeError(
            f"{name}s are {ids.dtype} of shape {tuple(ids.shape)}, expected integers of batch × length"
        )
    count = len(table if isinstance(table, Tensor) else table.weight)
    try:
        if ids.device.type not in ("cpu", "meta") and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise IndexError  # on a CPU torch raises it; on other devices the process would abort
        return F.embedding(ids, table) if isinstance(table, Tensor) else table(ids)
    except IndexError:
        wrong = int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())
        raise InputError(f"{name} {wrong} is outside the {count} {name}s of the model (0 to {count - 1})") from None


class SharedTokensSpec(TokensSpec, kind="shared", caption="Token Embedding, shared"):
    """the same as tokens with the encoder's E; types, position and norm are not shared"""

    shares_table: ClassVar[bool] = True


class PatchesSpec(EmbedSpec, kind="patches", caption="Patch Embedding"):
    """W·patch + b, joined with its position; optionally a class token before the patches

    Dosovitskiy et al. 2021, arXiv 2010.11929. Each patch is a token, so the batch is B×L×pixels.
    """

    reads: ClassVar[Source] = "patches"

    pixels: int = field(4, "pixel values per patch, side × side × channels", ge=1, le=1 << 20)
    channels: int = field(3, "channels of the image; within a patch, the values are ordered by channel", ge=1)
    class_token: bool = field(False, "whether a learned vector precedes the patches, at position 0")
    norm: NormSpec = field(NoNormSpec(), "the norm after the position is joined")

    def patch_pixels(self) -> int | None:
        return self.pixels

    @property
    def side(self) -> int:
        """The height and width of a patch in pixels."""
        side = isqrt(self.pixels // self.channels)
        if side**2 * self.channels != self.pixels:
            raise IncompatibleError(
                f"{self.pixels} values in {self.channels} channels are not a square patch", ("pixels",)
            )
        return side

    def patchify(self, images: Tensor) -> Tensor:
        """Splits images, batch × channels × height × width, into patches, B×L×pixels, row by row.

        In a patch, channels come before rows before columns, as in a convolution.
        """
        _, channels, height, width = images.shape
        if channels != self.channels or height % self.side or width % self.side:
            raise IncompatibleError(
                f"images of {channels} × {height} × {width} cannot be split into patches of "
                f"{self.channels} × {self.side} × {self.side}"
            )
        # the axes are batch, channel, patch row, row in the patch, patch column, column in the patch
        patches = images.unflatten(3, (-1, self.side)).unflatten(2, (-1, self.side))
        return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def unpatchify(self, patches_BLP: Tensor, height: int, width: int) -> Tensor:
        """The inverse of `patchify`."""
        patches = patches_BLP.unflatten(2, (self.channels, self.side, -1))
        patches = patches.unflatten(1, (height // self.side, width // self.side))
        return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)

    def build(self, vocab: int, width: int, position: PositionSpec, memory_width: int | None) -> Embed:
        return PatchEmbedding(self, width, position)


class PatchEmbedding(Embed):
    def __init__(self, spec: PatchesSpec, width: int, position: PositionSpec) -> None:
        super().__init__()
        size = position.token_width(width)
        self.project = nn.Linear(spec.pixels, size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, size)) if spec.class_token else None
        self.position = position.build_embed(width)
        self.norm = spec.norm.build(width)
        self.dropout = nn.Dropout(spec.dropout)

    def reset_parameters(self) -> None:
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=0.02)

    def prepare_inputs(self, inputs: Inputs) -> Inputs:
        if inputs.token_type_ids is not None or inputs.task_type_ids is not None:
            raise InputError("token_type_ids or task_type_ids were given, but an embedding of patches has no types")
        if self.cls_token is None:
            return inputs
        if inputs.document_ids is not None or inputs.prefix_lengths is not None:
            raise InputError("an embedding with a class token takes neither document_ids nor a prefix")
        return replace(
            inputs,
            tokens=F.pad(inputs.tokens, (0, 0, 1, 0)),
            positions=F.pad(input_positions(inputs) + 1, (1, 0)),
            padding_mask=None if inputs.padding_mask is None else F.pad(inputs.padding_mask, (1, 0)),
        )

    def forward(self, inputs: Inputs, positions: Positions, *, table: Tensor | None, memory: Memory | None) -> Tensor:
        pixels, dtype, tokens = self.project.in_features, self.project.weight.dtype, inputs.tokens
        if tokens.dim() != 3 or tokens.shape[-1] != pixels or tokens.dtype != dtype:
            expected = f"{dtype} of batch × length × {pixels}"
            raise InputShapeError(f"patches are {tokens.dtype} of shape {tuple(tokens.shape)}, expected {expected}")
        if inputs.padding_mask is not None:  # values at padding must not matter, not even NaN
            tokens = tokens.masked_fill(inputs.padding_mask[..., None], 0.0)
        x_BLD = self.project(tokens)
        if self.cls_token is not None:
            x_BLD = torch.cat((self.cls_token.expand(x_BLD.shape[0], -1, -1), x_BLD[:, 1:]), dim=1)
        return self.dropout(self.norm(self.position(x_BLD, positions)))


class MaskTokensSpec(EmbedSpec, kind="mask-tokens", caption="Mask Tokens"):
    """W·memory at the patches that the encoder read, a learned mask token elsewhere, joined with the position

    He et al. 2022, arXiv 2111.06377, the decoder of a masked autoencoder. It reads only the shape of the batch.
    """

    reads: ClassVar[Source] = "memory"

    class_token: bool = field(False, "whether the encoder has a class token, at position 0")

    def build(self, vocab: int, width: int, position: PositionSpec, memory_width: int | None) -> Embed:
        assert memory_width is not None, "ModelSpec checks that there is an encoder"
        return MaskTokenEmbedding(self, width, position, memory_width)


class MaskTokenEmbedding(Embed):
    def __init__(self, spec: MaskTokensSpec, width: int, position: PositionSpec, memory_width: int) -> None:
        super().__init__()
        size = position.token_width(width)
        self.project = nn.Linear(memory_width, size)
        self.class_token = spec.class_token
        self.mask_token = nn.Parameter(torch.zeros(1, 1, size))
        self.position = position.build_embed(width)
        self.dropout = nn.Dropout(spec.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.mask_token, std=0.02)

    def prepare_inputs(self, inputs: Inputs) -> Inputs:
        unused = (
            inputs.padding_mask,
            inputs.positions,
            inputs.document_ids,
            inputs.token_type_ids,
            inputs.task_type_ids,
            inputs.prefix_lengths,
        )
        if any(tensor is not None for tensor in unused):
            raise InputError(
                "a decoder of mask tokens reconstructs whole sequences; give tokens without padding, positions or types"
            )
        tokens = inputs.tokens  # only the shape is read
        return replace(inputs, tokens=torch.cat((tokens[:, :1], tokens), dim=1)) if self.class_token else inputs

    def forward(self, inputs: Inputs, positions: Positions, *, table: Tensor | None, memory: Memory | None) -> Tensor:
        assert memory is not None
        batch, length = inputs.batch_size, inputs.length
        index = memory.key_positions()
        check_positions(Positions(index, index), length, "the target", queries=False)
        index, states = index.expand(batch, -1), self.project(memory.states)
        if memory.padding_mask is not None:
            index = index.masked_fill(memory.padding_mask, length)  # an extra position for padding, removed below
        mask_tokens = self.mask_token.expand(batch, length + 1, -1).to(states.dtype)
        x_BLD = mask_tokens.scatter(1, index[..., None].expand_as(states), states)[:, :length]
        return self.dropout(self.position(x_BLD, positions))
