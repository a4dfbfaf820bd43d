"""Position schemes. Each has one mechanism, which is `embed` (joins positions to the token embeddings), `rotate`
(rotates queries and keys, in rope.py), or `bias` (adds to the attention scores).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from manyheads.errors import IncompatibleError, InputLengthError
from manyheads.parts.inputs import has_no_data
from manyheads.spec import Part, field

Join = Literal["add", "concat", "multiply"]
Mechanism = Literal["none", "embed", "rotate", "bias"]


@dataclass(frozen=True)
class Positions:
    """The positions of queries, (B or 1)×L, and keys, (B or 1)×M, counted from 0."""

    query: Tensor
    key: Tensor
    final_length: int | None = None  # the length of the sequence after generation, if known
    bound: int | None = None  # every position is below it; None if unknown without reading the tensors

    def offsets(self) -> Tensor:
        """The offsets j − i of key j from query i, (B or 1)×L×M."""
        return self.key[:, None, :] - self.query[:, :, None]


class PositionSpec(Part, slot="position", default="none"):
    """How the model represents the position of a token."""

    mechanism: ClassVar[Mechanism] = "none"
    # "query" or "key", if the scheme changes them and the core must have them
    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def per_layer(self) -> bool:
        """Whether every layer has its own parameters; otherwise the layers share one module."""
        return False

    @property
    def max_positions(self) -> int | None:
        """The largest number of positions; None if unlimited."""
        return None

    @property
    def needs_final_length(self) -> bool:
        """Whether the scheme depends on the length after generation, which must then be known at the start."""
        return False

    @property
    def trained_length(self) -> int | None:
        """The tokens of a text of training, if the scheme says how many."""
        return None

    @property
    def beyond_training(self) -> str:
        """What a text of more tokens than those of training means for a scheme without a limit."""
        return f"{self.kind} positions have no limit, but the model has not learned from such distances"

    def token_width(self, width: int) -> int:
        """The width of token embeddings, which is less than `width` if positions are concatenated to them."""
        return width

    def build_embed(self, width: int) -> PositionEmbedding:
        return PositionEmbedding()

    def build(self, heads: int, head_dim: int) -> AttentionPosition:
        return AttentionPosition()


class PositionEmbedding(nn.Module):
    """Joins positions to the token embeddings. The base class returns the embeddings unchanged."""

    def forward(self, x_BLD: Tensor, positions: Positions) -> Tensor:
        return x_BLD


@dataclass(frozen=True)
class Rotation:
    """The number of rotated coordinates of a head, 0 for none, and whether neighbours are pairs."""

    size: int
    interleaved: bool = False


class AttentionPosition(nn.Module):
    """The methods of a scheme that attention calls. The base class changes nothing.

    `precompute` runs once per forward, and its result is passed to the other methods.
    """

    def precompute(self, positions: Positions, dtype: torch.dtype) -> Any:
        return None

    def rotate(self, x_BHLK: Tensor, position_data: Any) -> Tensor:
        """Rotates queries or keys."""
        return x_BHLK

    @property
    def rotation(self) -> Rotation | None:
        """How a plan rotates queries and keys by the cosines and sines of `precompute`; None if it cannot."""
        return Rotation(0) if type(self) is AttentionPosition else None

    def bias(self, q_BHLK: Tensor, position_data: Any, scale: float) -> Tensor | None:
        """A term added to the scores before the softmax, (B or 1)×H×L×M. `scale` is the core's factor of q·k."""
        return None


class NoPositionSpec(PositionSpec, kind="none", caption=""):
    """no position information; only a causal mask makes order visible"""


# ---------------------------------------------------------------------------------------------------- mechanism: embed


class AbsoluteSpec(PositionSpec):
    """Fields of every scheme that joins a position vector to the token embedding."""

    mechanism: ClassVar[Mechanism] = "embed"

    join: Join = field("add", "add computes x + p, concat [x, p], multiply x ∘ p")
    size: int | None = field(
        None, "the width of the position vector with join = 'concat'; half of the width by default", ge=1
    )

    @model_validator(mode="after")
    def _size_needs_concat(self) -> Self:
        if self.size is not None and self.join != "concat":
            raise IncompatibleError(f"size needs join = 'concat', given join = '{self.join}'", ("size",))
        return self

    def position_width(self, width: int) -> int:
        if self.join != "concat":
            return width
        size = self.size or width // 2
        if not 1 <= size < width:
            raise IncompatibleError(f"given {size}, expected at least 1 and less than the width {width}", ("size",))
        return size

    def token_width(self, width: int) -> int:
        return width - self.position_width(width) if self.join == "concat" else width


def join_position(x_BLD: Tensor, p_BLD: Tensor, join: Join) -> Tensor:
    if join == "concat":
        return torch.cat((x_BLD, p_BLD.expand(*x_BLD.shape[:2], -1)), dim=-1)
    return x_BLD + p_BLD if join == "add" else x_BLD * p_BLD


class SinusoidalSpec(AbsoluteSpec, kind="sinusoidal", caption="Positional Encoding, sinusoidal"):
    """p[t, 2i] = sin(t / θ^(2i/d)), p[t, 2i+1] = cos(t / θ^(2i/d))

    Vaswani et al. 2017, section 3.5. `halves` puts all sines before all cosines, as some published models do.
    """

    theta: float = field(10000.0, "θ, the base of the wavelengths", gt=1)
    layout: Literal["interleaved", "halves"] = field(
        "interleaved", "interleaved is sin, cos, sin, cos …; halves is all sines, then all cosines"
    )
    offset: int = field(0, "the value of t at the first position", ge=0)

    def build_embed(self, width: int) -> PositionEmbedding:
        return Sinusoidal(self, self.position_width(width))


class Sinusoidal(PositionEmbedding):
    def __init__(self, spec: SinusoidalSpec, width: int) -> None:
        super().__init__()
        self.spec, self.width = spec, width

    def table(self, positions_BL: Tensor, dtype: torch.dtype) -> Tensor:
        # in float32, the third digit of an angle is wrong at position 10⁵
        pairs = torch.arange((self.width + 1) // 2, device=positions_BL.device, dtype=angle_dtype(positions_BL.device))
        angles = positions_BL.to(pairs.dtype)[..., None] * self.spec.theta ** (-2 * pairs / self.width)
        if self.spec.layout == "interleaved":
            table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., : self.width]
        else:
            table = torch.cat((angles.sin(), angles[..., : self.width // 2].cos()), dim=-1)
        return table.to(dtype)

    def forward(self, x_BLD: Tensor, positions: Positions) -> Tensor:
        return join_position(x_BLD, self.table(positions.query + self.spec.offset, x_BLD.dtype), self.spec.join)


class LearnedSpec(AbsoluteSpec, kind="learned", caption="Positional Embedding, learned"):
    """p[t] = row t of a learned table of T rows

    Gehring et al. 2017, arXiv 1705.03122. A position of T or more is an error. `offset` skips rows
    that some published models reserve for padding.
    """

    length: int = field(512, "T, the number of positions", ge=1)
    offset: int = field(0, "unused rows before position 0", ge=0)

    @property
    def max_positions(self) -> int | None:
        return self.length

    def build_embed(self, width: int) -> PositionEmbedding:
        return Learned(self, self.position_width(width))


class Learned(PositionEmbedding):
    def __init__(self, spec: LearnedSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.table = nn.Embedding(spec.length + spec.offset, width)

    def forward(self, x_BLD: Tensor, positions: Positions) -> Tensor:
        check_positions(positions, self.spec.length, "the learned position table", keys=False)
        return join_position(x_BLD, self.table(positions.query + self.spec.offset), self.spec.join)


def check_positions(positions: Positions, length: int, table: str, *, queries: bool = True, keys: bool = True) -> None:
    """Raises an error for a position outside a table of `length` rows. Reads tensors only if `bound` is too large."""
    if positions.bound is not None and positions.bound <= length:
        return
    for indices in [positions.query] * queries + [positions.key] * keys:
        # positions that cannot be read are assumed to count the sequence from 0
        unreadable = has_no_data(indices) or not indices.numel()
        low, high = (0, indices.shape[-1] - 1) if unreadable else (int(indices.min()), int(indices.max()))
        if low < 0 or high >= length:
            raise InputLengthError(
                f"position {low if low < 0 else high} is outside {table} of {length} positions (0 to {length - 1})",
                hint="shorten the text or raise length",
            )


def angle_dtype(device: torch.device) -> torch.dtype:
    """float64, because float32 angles are inexact at high positions; float32 on devices without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


# ----------------------------------------------------------------------------------------------------- mechanism: bias


class BiasSpec(PositionSpec):
    """The base of every scheme that adds to the attention scores. Most learn a table per layer."""

    mechanism: ClassVar[Mechanism] = "bias"

    @property
    def per_layer(self) -> bool:
        return True


class PrecomputedBias(AttentionPosition):
    """A bias that does not depend on the queries, so `precompute` computes it."""

    def bias(self, q_BHLK: Tensor, position_data: Tensor, scale: float) -> Tensor:
        return position_data


class RelativeSpec(BiasSpec, kind="relative", caption="Relative Position Bias"):
    """score(i, j) + π[j − i] with one π per head and offset, (2(T − 1) + 1)·H parameters per layer

    Shaw et al. 2018 in its scalar form. An offset of T or more is an error; use `clipped` for any length.
    """

    length: int = field(512, "T, the number of positions", ge=1)

    @property
    def max_positions(self) -> int | None:
        return self.length

    def build(self, heads: int, head_dim: int) -> AttentionPosition:
        return Relative(heads, self.length - 1, clip=False)


class ClippedSpec(BiasSpec, kind="clipped", caption="Clipped Relative Position Bias"):
    """score(i, j) + π[clip(j − i, −k, k)] for any length, (2k + 1)·H parameters per layer

    Shaw et al. 2018, section 3.2, in its scalar form.
    """

    clip: int = field(16, "k, the largest offset with a value of its own; larger offsets share it", ge=1)

    def build(self, heads: int, head_dim: int) -> AttentionPosition:
        return Relative(heads, self.clip, clip=True)


class Relative(PrecomputedBias):
    def __init__(self, heads: int, max_offset: int, *, clip: bool) -> None:
        super().__init__()
        self.max_offset, self.clip = max_offset, clip
        self.table = nn.Embedding(2 * max_offset + 1, heads)

    def precompute(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        offsets = positions.offsets()
        if not self.clip and (positions.bound is None or positions.bound > self.max_offset + 1):
            largest = positions.key.shape[-1] - 1 if has_no_data(offsets) else int(offsets.abs().max())
            if largest > self.max_offset:
                raise InputLengthError(
                    f"an offset of {largest} is outside the relative position table, which ends at {self.max_offset}",
                    hint="shorten the text or raise length",
                )
        index = offsets.clamp(-self.max_offset, self.max_offset) + self.max_offset
        return self.table(index).permute(0, 3, 1, 2)


class BucketedSpec(BiasSpec, kind="bucketed", caption="Bucketed Relative Position Bias"):
    """score(i, j) + π[bucket(j − i)], where each small offset has a bucket and large ones share logarithmic buckets

    Raffel et al. 2020, arXiv 1910.10683, section 2.1. All layers use one table unless `shared` is false.
    """

    buckets: int = field(32, "the number of buckets, each with a π per head", ge=4)
    max_distance: int = field(128, "offsets of at least this distance share the last bucket", ge=2)
    bidirectional: bool = field(True, "use half of the buckets for keys after the query; set false with a causal mask")
    shared: bool = field(True, "whether all layers share one table")

    @model_validator(mode="after")
    def _max_distance_beyond_exact(self) -> Self:
        exact = self.buckets // (4 if self.bidirectional else 2)
        if self.max_distance <= exact:
            raise IncompatibleError(
                f"given {self.max_distance}, expected more than the {exact} offsets that have a bucket each",
                ("max_distance",),
            )
        return self

    @property
    def per_layer(self) -> bool:
        return not self.shared

    def build(self, heads: int, head_dim: int) -> AttentionPosition:
        return Bucketed(self, heads)


class Bucketed(PrecomputedBias):
    def __init__(self, spec: BucketedSpec, heads: int) -> None:
        super().__init__()
        self.spec = spec
        self.table = nn.Embedding(spec.buckets, heads)

    def bucket(self, offsets: Tensor) -> Tensor:
        buckets, base = self.spec.buckets, torch.zeros_like(offsets)
        if self.spec.bidirectional:
            buckets //= 2
            base = (offsets > 0) * buckets
            distance = offsets.abs()
        else:
            distance = (-offsets).clamp(min=0)
        exact = buckets // 2
        # float32 and this order of operations match T5 at the edges of buckets
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.spec.max_distance / exact)
        far = exact + (ratio * (buckets - exact)).long()
        return base + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))

    def precompute(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        return self.table(self.bucket(positions.offsets())).permute(0, 3, 1, 2)


class ShawSpec(BiasSpec, kind="shaw", caption="Relative Position Keys"):
    """q_i · (k_j + a[clip(j − i, −k, k)]), times the core's scale, with vectors a that the heads of a layer share

    Shaw et al. 2018, equation 5 (without relative values, which did not help in their ablation).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"query"})

    clip: int = field(16, "k, the largest offset with a vector of its own; larger offsets share it", ge=1)

    def build(self, heads: int, head_dim: int) -> AttentionPosition:
        return Shaw(self.clip, head_dim)


class Shaw(AttentionPosition):
    def __init__(self, clip: int, head_dim: int) -> None:
        super().__init__()
        self.clip = clip
        self.table = nn.Embedding(2 * clip + 1, head_dim)

    def precompute(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        return positions.offsets().clamp(-self.clip, self.clip) + self.clip

    def bias(self, q_BHLK: Tensor, position_data: Tensor, scale: float) -> Tensor:
        by_offset = q_BHLK @ self.table.weight.transpose(0, 1) * scale
        return by_offset.gather(-1, position_data[:, None].expand(*q_BHLK.shape[:3], position_data.shape[-1]))


class AlibiSpec(BiasSpec, kind="alibi", caption="ALiBi"):
    """score(i, j) − m_h · |i − j|, with fixed slopes m_h = 2^(−8h/H)

    Press, Smith and Lewis 2022, arXiv 2108.12409. If H is not a power of two, every other slope of the next power of
    two fills the rest.
    """

    @property
    def per_layer(self) -> bool:
        return False

    def build(self, heads: int, head_dim: int) -> AttentionPosition:
        return Alibi(heads)


class Alibi(PrecomputedBias):
    def __init__(self, heads: int) -> None:
        super().__init__()
        power = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
        self.slopes = slopes + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]

    def precompute(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        offsets = positions.offsets()
        slopes = torch.tensor(self.slopes, device=offsets.device, dtype=angle_dtype(offsets.device))
        return (-slopes[:, None, None] * offsets.abs()[:, None]).to(dtype)
