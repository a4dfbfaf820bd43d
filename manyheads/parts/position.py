"""Position has three doors: `embed` joins it to the embedding, `rotate` turns queries and keys, `bias` adds to the scores.

Every door is the identity by default; a scheme opens one. (Rotation lives in rope.py.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from manyheads.parts.batch import numberless
from manyheads.spec import Part, SpecError, field

Join = Literal["add", "concat", "multiply"]


@dataclass(frozen=True)
class Places:
    """Where queries and keys stand in their sequences: (B or 1)×L and (B or 1)×M, as positions counted from 0."""

    query: Tensor
    key: Tensor
    span: int | None = None  # how long the text will be, where that was said beforehand
    bound: int | None = None  # no position is this high, where that is known without looking

    def offsets(self) -> Tensor:
        """j − i for query i and key j: (B or 1)×L×M."""
        return self.key[:, None, :] - self.query[:, :, None]


class PositionSpec(Part, slot="position", default="none"):
    """How a token knows where it stands."""

    door: ClassVar[Literal["none", "embed", "rotate", "bias"]] = "none"
    needs: ClassVar[frozenset[str]] = frozenset()  # "query", "key": what the layer doors work on, so the core must have it

    @property
    def per_layer(self) -> bool:
        """Whether every layer learns its own (rather than one module serving the whole stack)."""
        return False

    @property
    def longest(self) -> int | None:
        """The longest text it can place; None for any."""
        return None

    @property
    def asks_span(self) -> bool:
        """Whether it depends on how long the text will be: a text written step by step must then say so at the start."""
        return False

    def token_width(self, width: int) -> int:
        """What is left of the embedding for the token itself; less than all of it when positions are concatenated."""
        return width

    def build_embed(self, width: int) -> PositionEmbed:
        return PositionEmbed()

    def build(self, heads: int, head_size: int) -> Position:
        return Position()


class PositionEmbed(nn.Module):
    """The embed door, closed."""

    def forward(self, x_BLD: Tensor, places: Places) -> Tensor:
        return x_BLD


class Position(nn.Module):
    """The rotate and bias doors, closed. `plan` is computed once a forward and handed back to the others."""

    def plan(self, places: Places, dtype: torch.dtype) -> Any:
        return None

    def rotate_query(self, q_BHLK: Tensor, plan: Any) -> Tensor:
        return q_BHLK

    def rotate_key(self, k_BGLK: Tensor, plan: Any) -> Tensor:
        return k_BGLK

    def bias(self, q_BHLK: Tensor, plan: Any, scale: float) -> Tensor | None:
        """What is added to the scores before the softmax, (B or 1)×H×L×M; `scale` is what the core multiplies q·k by."""
        return None


class NoPositionSpec(PositionSpec, kind="none"):
    """x: order is known only through the mask, if at all"""


# ---------------------------------------------------------------------------------------------- the embed door


class JoinedSpec(PositionSpec):
    """What the schemes of the embed door have in common: how the vector joins the token's."""

    door: ClassVar[Literal["none", "embed", "rotate", "bias"]] = "embed"

    join: Join = field("add", "x + p, [x, p] or x ∘ p")
    size: int | None = field(None, "with concat: how much of the width is position; half of it if not given", ge=1)

    @model_validator(mode="after")
    def _size_of_a_share(self) -> Self:
        if self.size is not None and self.join != "concat":
            raise SpecError(f"a share of the width is for join = 'concat', given '{self.join}'", ("size",))
        return self

    def position_width(self, width: int) -> int:
        if self.join != "concat":
            return width
        size = self.size or width // 2
        if not 1 <= size < width:
            raise SpecError(f"{size} of width {width} for position leaves no room for {'the token' if size else 'it'}", ("size",))
        return size

    def token_width(self, width: int) -> int:
        return width - self.position_width(width) if self.join == "concat" else width


def joined(x_BLD: Tensor, p_BLD: Tensor, join: Join) -> Tensor:
    if join == "concat":
        return torch.cat((x_BLD, p_BLD.expand(*x_BLD.shape[:2], -1)), dim=-1)
    return x_BLD + p_BLD if join == "add" else x_BLD * p_BLD


class SinusoidalSpec(JoinedSpec, kind="sinusoidal"):
    """p[t, 2i] = sin(t / θ^(2i/d)), p[t, 2i+1] = cos(t / θ^(2i/d))

    Vaswani et al. 2017, section 3.5. `halves` puts all sines before all cosines, as some published models do.
    """

    theta: float = field(10000.0, "θ, which sets the longest wave", gt=1)
    layout: Literal["interleaved", "halves"] = field("interleaved", "sin, cos, sin, cos … or all sin, then all cos")
    offset: int = field(0, "the number of the first position", ge=0)

    def build_embed(self, width: int) -> PositionEmbed:
        return Sinusoidal(self, self.position_width(width))


class Sinusoidal(PositionEmbed):
    def __init__(self, spec: SinusoidalSpec, width: int) -> None:
        super().__init__()
        self.spec, self.width = spec, width

    def table(self, positions_BL: Tensor, dtype: torch.dtype) -> Tensor:
        # at position 10⁵ a float32 angle is off in the third digit
        pairs = torch.arange((self.width + 1) // 2, device=positions_BL.device, dtype=precise(positions_BL.device))
        angles = positions_BL.to(pairs.dtype)[..., None] * self.spec.theta ** (-2 * pairs / self.width)
        if self.spec.layout == "interleaved":
            table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., : self.width]
        else:
            table = torch.cat((angles.sin(), angles[..., : self.width // 2].cos()), dim=-1)
        return table.to(dtype)

    def forward(self, x_BLD: Tensor, places: Places) -> Tensor:
        return joined(x_BLD, self.table(places.query + self.spec.offset, x_BLD.dtype), self.spec.join)


class LearnedSpec(JoinedSpec, kind="learned"):
    """p[t] = row t of a learned table of T rows; a position past T is an error

    Gehring et al. 2017, arXiv 1705.03122. `offset` skips rows that some published models reserve for padding.
    """

    length: int = field(512, "T, the number of positions", ge=1)
    offset: int = field(0, "unused rows before position 0", ge=0)

    @property
    def longest(self) -> int | None:
        return self.length

    def build_embed(self, width: int) -> PositionEmbed:
        return Learned(self, self.position_width(width))


class Learned(PositionEmbed):
    def __init__(self, spec: LearnedSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.table = nn.Embedding(spec.length + spec.offset, width)

    def forward(self, x_BLD: Tensor, places: Places) -> Tensor:
        check_length(places, self.spec.length, "the learned position table", keys=False)
        return joined(x_BLD, self.table(places.query + self.spec.offset), self.spec.join)


def check_length(places: Places, length: int, what: str, *, queries: bool = True, keys: bool = True) -> None:
    """Refuses a position past the end of a table; looks at the numbers only where it cannot know without."""
    if places.bound is not None and places.bound <= length:
        return
    for positions in [places.query] * queries + [places.key] * keys:
        # without memory there are no numbers to look at, but as many positions as there are places
        empty = numberless(positions) or not positions.numel()
        last, first = (positions.shape[-1] - 1, 0) if empty else (int(positions.max()), int(positions.min()))
        if first < 0 or last >= length:
            wrong = first if first < 0 else last
            raise ValueError(f"position {wrong} is beyond {what}, which has {length} (0 to {length - 1}); shorten the text or raise length")


def precise(device: torch.device) -> torch.dtype:
    """float64, in which angles stay true at high positions; float32 on devices that have no other."""
    return torch.float32 if device.type == "mps" else torch.float64


# ---------------------------------------------------------------------------------------------- the bias door


class BiasSpec(PositionSpec):
    """What the schemes of the bias door have in common."""

    door: ClassVar[Literal["none", "embed", "rotate", "bias"]] = "bias"


class RelativeSpec(BiasSpec, kind="relative"):
    """score(i, j) + π[j − i], one π per head and offset: (2(T − 1) + 1)·H parameters a layer

    Shaw et al. 2018 in its scalar form. An offset of T or more is an error; `clipped` takes any length.
    """

    length: int = field(512, "T, the longest text", ge=1)

    @property
    def longest(self) -> int | None:
        return self.length

    @property
    def per_layer(self) -> bool:
        return True

    def build(self, heads: int, head_size: int) -> Position:
        return Relative(heads, self.length - 1, clip=False)


class ClippedSpec(BiasSpec, kind="clipped"):
    """score(i, j) + π[clip(j − i, −k, k)]: (2k + 1)·H parameters a layer, any length

    Shaw et al. 2018, section 3.2, in its scalar form.
    """

    clip: int = field(16, "k: offsets beyond it share the end value", ge=1)

    @property
    def per_layer(self) -> bool:
        return True

    def build(self, heads: int, head_size: int) -> Position:
        return Relative(heads, self.clip, clip=True)


class Relative(Position):
    def __init__(self, heads: int, reach: int, *, clip: bool) -> None:
        super().__init__()
        self.reach, self.clip = reach, clip
        self.table = nn.Embedding(2 * reach + 1, heads)

    def plan(self, places: Places, dtype: torch.dtype) -> Tensor:
        offsets = places.offsets()
        if not self.clip and (places.bound is None or places.bound > self.reach + 1):
            furthest = places.key.shape[-1] - 1 if numberless(offsets) else int(offsets.abs().max())
            if furthest > self.reach:
                raise ValueError(f"tokens {furthest} places apart are beyond the relative position table, which reaches {self.reach}; "
                                 "shorten the text or raise length")  # fmt: skip
        index = offsets.clamp(-self.reach, self.reach) + self.reach
        return self.table(index).permute(0, 3, 1, 2)

    def bias(self, q_BHLK: Tensor, plan: Tensor, scale: float) -> Tensor:
        return plan


class BucketedSpec(BiasSpec, kind="bucketed"):
    """score(i, j) + π[bucket(j − i)]: near offsets have a bucket each, far ones share logarithmic buckets

    Raffel et al. 2020, arXiv 1910.10683, section 2.1. One table serves all layers unless `shared` is off.
    """

    buckets: int = field(32, "how many π per head", ge=4)
    distance: int = field(128, "the offset from which all share the last bucket", ge=2)
    bidirectional: bool = field(True, "half of the buckets for keys to the right; off under a causal mask")
    shared: bool = field(True, "one table for all layers")

    @model_validator(mode="after")
    def _far_enough(self) -> Self:
        exact = self.buckets // (4 if self.bidirectional else 2)
        if self.distance <= exact:
            raise SpecError(f"given {self.distance}, expected more than the {exact} offsets with buckets of their own", ("distance",))
        return self

    @property
    def per_layer(self) -> bool:
        return not self.shared

    def build(self, heads: int, head_size: int) -> Position:
        return Bucketed(self, heads)


class Bucketed(Position):
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
        # float32 and this order of operations decide which side of a bucket's edge an offset falls
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.spec.distance / exact)
        far = exact + (ratio * (buckets - exact)).long()
        return base + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))

    def plan(self, places: Places, dtype: torch.dtype) -> Tensor:
        return self.table(self.bucket(places.offsets())).permute(0, 3, 1, 2)

    def bias(self, q_BHLK: Tensor, plan: Tensor, scale: float) -> Tensor:
        return plan


class ShawSpec(BiasSpec, kind="shaw"):
    """q_i · (k_j + a[clip(j − i, −k, k)]), scaled as the core scales: relative keys, shared by the heads of a layer

    Shaw et al. 2018, equation 5 (relative values are left out, as in their ablation they did not help).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"query"})

    clip: int = field(16, "k: offsets beyond it share the end vector", ge=1)

    @property
    def per_layer(self) -> bool:
        return True

    def build(self, heads: int, head_size: int) -> Position:
        return Shaw(self.clip, head_size)


class Shaw(Position):
    def __init__(self, clip: int, head_size: int) -> None:
        super().__init__()
        self.clip = clip
        self.table = nn.Embedding(2 * clip + 1, head_size)

    def plan(self, places: Places, dtype: torch.dtype) -> Tensor:
        return places.offsets().clamp(-self.clip, self.clip) + self.clip

    def bias(self, q_BHLK: Tensor, plan: Tensor, scale: float) -> Tensor:
        by_offset = q_BHLK @ self.table.weight.transpose(0, 1) * scale
        batch, heads, queries, _ = q_BHLK.shape
        return by_offset.gather(-1, plan[:, None].expand(batch, heads, queries, plan.shape[-1]))


class AlibiSpec(BiasSpec, kind="alibi"):
    """score(i, j) − m_h · |i − j|, with slopes m_h = 2^(−8h/H); nothing is learned

    Press, Smith and Lewis 2022, arXiv 2108.12409; with H not a power of two, every other slope of the next one fills up.
    """

    def build(self, heads: int, head_size: int) -> Position:
        return Alibi(heads)


class Alibi(Position):
    def __init__(self, heads: int) -> None:
        super().__init__()
        power = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
        self.slopes = slopes + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]

    def plan(self, places: Places, dtype: torch.dtype) -> Tensor:
        offsets = places.offsets()
        slopes = torch.tensor(self.slopes, device=offsets.device, dtype=precise(offsets.device))
        return (-slopes[:, None, None] * offsets.abs()[:, None]).to(dtype)

    def bias(self, q_BHLK: Tensor, plan: Tensor, scale: float) -> Tensor:
        return plan
