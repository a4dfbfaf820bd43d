"""Rotary position embeddings (RoPE). Queries and keys are rotated by an angle proportional to their position, so q·k
depends on their offset.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from manyheads.errors import IncompatibleError
from manyheads.parts.position import AttentionPosition, Mechanism, Positions, PositionSpec, Rotation, angle_dtype
from manyheads.spec import MAX_VALUE, MIN_POSITIVE, Part, field


class RopeScalingSpec(Part, slot="scaling", default="none"):
    """How the frequencies ω_i = θ^(−2i/d) change for sequences longer than those in training."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return False

    def frequencies(self, theta: float, size: int, length: Tensor) -> Tensor:
        """Radians per position for each of the size/2 pairs; `length` is the number of positions in use."""
        return plain_frequencies(theta, size, length.device)

    def attention_scaling(self) -> float:
        """The factor of the rotated vectors."""
        return 1.0

    def check(self, size: int) -> None:
        """Raises an error if a rotation of `size` coordinates cannot be scaled."""


def plain_frequencies(theta: float, size: int, device: torch.device) -> Tensor:
    pairs = torch.arange(0, size, 2, device=device, dtype=angle_dtype(device))
    return theta ** (-pairs / size)


class NoScalingSpec(RopeScalingSpec, kind="none", caption=""):
    """ω_i = θ^(−2i/d)"""


class LinearScalingSpec(RopeScalingSpec, kind="linear"):
    """ω_i / s, which divides positions by s

    Chen et al. 2023, arXiv 2306.15595.
    """

    factor: float = field(2.0, "s", ge=1)

    def frequencies(self, theta: float, size: int, length: Tensor) -> Tensor:
        return plain_frequencies(theta, size, length.device) / self.factor


class NtkScalingSpec(RopeScalingSpec, kind="ntk"):
    """ω_i with θ·s^(d/(d−2)), which divides low frequencies by s and leaves high ones almost unchanged

    bloc97 2023; Peng et al. 2023, section 3.1.
    """

    factor: float = field(2.0, "s", ge=1)

    def check(self, size: int) -> None:
        if size < 4:
            raise IncompatibleError(
                f"the base changes as s^(d/(d−2)), which needs at least 4 rotated coordinates, given {size}",
                ("scaling",),
            )

    def factor_at(self, length: Tensor) -> Tensor:
        return torch.full_like(length, self.factor, dtype=angle_dtype(length.device))

    def frequencies(self, theta: float, size: int, length: Tensor) -> Tensor:
        pairs = torch.arange(0, size, 2, device=length.device, dtype=angle_dtype(length.device))
        return (theta * self.factor_at(length) ** (size / (size - 2))) ** (-pairs / size)


class DynamicScalingSpec(NtkScalingSpec, kind="dynamic"):
    """the same as ntk with s·L/T − (s − 1) in place of s, once the length L of the sequence is above T

    emozilla 2023; Peng et al. 2023, section 3.3.
    """

    length: int = field(2048, "T, the length trained on", ge=1)

    @property
    def depends_on_length(self) -> bool:
        return True

    def factor_at(self, length: Tensor) -> Tensor:
        length = length.to(angle_dtype(length.device))
        return self.factor * length.clamp(min=self.length) / self.length - (self.factor - 1)


class YarnScalingSpec(RopeScalingSpec, kind="yarn"):
    """a blend of ω_i/s (low frequencies) and ω_i (high frequencies), rotated vectors multiplied by 0.1 ln s + 1

    Peng et al. 2023, arXiv 2309.00071, as published in code, where the blend is linear in the pair's index, not in
    its rotations.
    """

    factor: float = field(2.0, "s", ge=1)
    length: int = field(2048, "T, the length trained on", ge=1)
    beta_fast: float = field(32.0, "a pair with more rotations within T has ω", gt=0)
    beta_slow: float = field(1.0, "a pair with fewer rotations within T has ω/s", gt=0)
    attention_factor: float | None = field(None, "the factor of rotated q and k; 0.1 ln s + 1 by default", gt=0)
    truncate: bool = field(True, "whether the two borders are rounded to whole pairs")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.beta_slow >= self.beta_fast:
            raise IncompatibleError(
                f"given {self.beta_fast}, expected more than beta_slow = {self.beta_slow}", ("beta_fast",)
            )
        return self

    def frequencies(self, theta: float, size: int, length: Tensor) -> Tensor:
        def border(rotations: float) -> float:
            return size * math.log(self.length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = border(self.beta_fast), border(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        pairs = torch.arange(size // 2, device=length.device, dtype=angle_dtype(length.device))
        ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
        plain = plain_frequencies(theta, size, length.device)
        return plain / self.factor * ramp + plain * (1 - ramp)

    def attention_scaling(self) -> float:
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


class BandedScalingSpec(RopeScalingSpec, kind="banded"):
    """ω_i for short wavelengths, ω_i/s for long ones, a blend between T/high and T/low

    Dubey et al. 2024 (Llama 3.1), arXiv 2407.21783.
    """

    factor: float = field(8.0, "s", ge=1)
    length: int = field(8192, "T, the length trained on", ge=1)
    low_freq_factor: float = field(1.0, "low; a wavelength above T/low has ω/s", gt=0)
    high_freq_factor: float = field(4.0, "high; a wavelength below T/high has ω", gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        low, high = self.low_freq_factor, self.high_freq_factor
        if low >= high:
            raise IncompatibleError(f"given {high}, expected more than low_freq_factor = {low}", ("high_freq_factor",))
        return self

    def frequencies(self, theta: float, size: int, length: Tensor) -> Tensor:
        plain = plain_frequencies(theta, size, length.device)
        rotations = self.length * plain / (2 * math.pi)
        ramp = ((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain / self.factor * (1 - ramp) + plain * ramp


Factor = Annotated[float, Field(ge=MIN_POSITIVE, le=MAX_VALUE, strict=True)]


class LongRopeScalingSpec(RopeScalingSpec, kind="longrope"):
    """ω_i / s_i, with one list of s_i for sequences of at most T tokens and another for longer ones

    Ding et al. 2024, arXiv 2402.13753. Attention scaling √(1 + ln s / ln T), with s = S/T for an extension from T to S.
    """

    short_factor: tuple[Factor, ...] = field((1.0,), "s_i for sequences of at most T tokens", strict=False)
    long_factor: tuple[Factor, ...] = field((2.0,), "s_i for longer sequences", strict=False)
    length: int = field(2048, "T, the length trained on", ge=2)
    factor: float = field(2.0, "s of the attention scaling", ge=1)
    attention_factor: float | None = field(None, "the factor of rotated q and k; √(1 + ln s / ln T) by default", gt=0)

    @property
    def depends_on_length(self) -> bool:
        return self.short_factor != self.long_factor

    def check(self, size: int) -> None:
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            if count not in (1, size // 2):
                raise IncompatibleError(f"given {count} factors, expected 1 or {size // 2}", ("scaling", name))

    def frequencies(self, theta: float, size: int, length: Tensor) -> Tensor:
        short, long = (
            torch.tensor(factors, device=length.device, dtype=angle_dtype(length.device))
            for factors in (self.short_factor, self.long_factor)
        )
        return plain_frequencies(theta, size, length.device) / torch.where(length > self.length, long, short)

    def attention_scaling(self) -> float:
        formula = math.sqrt(1 + math.log(self.factor) / math.log(self.length))
        return formula if self.attention_factor is None else self.attention_factor


class RopeSpec(PositionSpec, kind="rope", caption="RoPE"):
    """⟨R_m q, R_n k⟩ with R_t rotating pair i by t·θ^(−2i/d), which depends on m − n only

    Su et al. 2021, arXiv 2104.09864. `interleaved` pairs neighbours (2i, 2i+1); `halves` pairs (i, i + d/2).
    """

    mechanism: ClassVar[Mechanism] = "rotate"
    needs: ClassVar[frozenset[str]] = frozenset({"query", "key"})

    theta: float = field(10000.0, "θ, the base of the angles", gt=1)
    fraction: float = field(1.0, "the fraction of each head that is rotated", gt=0, le=1)
    layout: Literal["halves", "interleaved"] = field("halves", "which coordinates form a pair")
    scaling: RopeScalingSpec = field(
        NoScalingSpec(), "how frequencies change for sequences longer than those in training"
    )

    @property
    def needs_final_length(self) -> bool:
        return self.scaling.depends_on_length

    @property
    def trained_length(self) -> int | None:
        return getattr(self.scaling, "length", None)  # of the kinds that have one

    @property
    def beyond_training(self) -> str:
        if self.scaling.kind == "none":
            return super().beyond_training
        return f"the {self.scaling.kind} scaling of rope is made for that"

    def rotated_size(self, head_dim: int) -> int:
        size = int(head_dim * self.fraction)
        if size % 2:
            size = int(head_dim * self.fraction + 1e-6)  # in floating point, 100 · (58 / 100) is below 58
        if size < 2 or size % 2:
            raise IncompatibleError(
                f"{self.fraction} of a head of {head_dim} is {size} coordinates, expected an even number, as RoPE "
                f"rotates pairs"
            )
        self.scaling.check(size)
        return size

    def build(self, heads: int, head_dim: int) -> AttentionPosition:
        return Rope(self, self.rotated_size(head_dim))


CosSin = tuple[Tensor, Tensor]  # cos and sin of every angle, (B or 1)×1×L×pairs


class Rope(AttentionPosition):
    def __init__(self, spec: RopeSpec, size: int) -> None:
        super().__init__()
        self.spec, self.size = spec, size

    @property
    def rotation(self) -> Rotation | None:
        return Rotation(self.size, self.spec.layout == "interleaved") if type(self) is Rope else None

    def precompute(self, positions: Positions, dtype: torch.dtype) -> CosSin:
        # the length is per row, because sequences of a batch must not change each other's angles
        length = positions.key.amax(dim=-1, keepdim=True)[..., None] + 1
        if positions.final_length is not None:
            length = torch.full_like(length, positions.final_length)
        frequencies = self.spec.scaling.frequencies(self.spec.theta, self.size, length)
        angles = (positions.query.to(frequencies.dtype)[..., None] * frequencies)[:, None]
        attention_scaling = self.spec.scaling.attention_scaling()
        return (angles.cos() * attention_scaling).to(dtype), (angles.sin() * attention_scaling).to(dtype)

    def rotate(self, x_BHLK: Tensor, position_data: CosSin) -> Tensor:
        cos, sin = position_data
        rotated, rest = x_BHLK[..., : self.size], x_BHLK[..., self.size :]
        if self.spec.layout == "interleaved":
            a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1)
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = rotated.chunk(2, dim=-1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
