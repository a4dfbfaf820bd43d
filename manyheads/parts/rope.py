"""Rotary position: queries and keys are turned by an angle that grows with their position, so q·k depends on the offset."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from manyheads.parts.position import Places, Position, PositionSpec, precise
from manyheads.spec import HIGHEST, SMALLEST, Part, SpecError, field


class RopeScalingSpec(Part, slot="scaling", default="none"):
    """How the angles θ^(−2i/d) change for long texts."""

    @property
    def grows(self) -> bool:
        """Whether the angles depend on the length of the text."""
        return False

    def frequencies(self, theta: float, size: int, length: Tensor) -> Tensor:
        """Radians a position for each of the size/2 pairs; `length` is the number of positions in use."""
        return plain_frequencies(theta, size, length.device)

    def amplitude(self) -> float:
        """What the turned vectors are multiplied by."""
        return 1.0

    def check(self, size: int) -> None:
        """Refuses what cannot scale a rotation of `size` coordinates."""


def plain_frequencies(theta: float, size: int, device: torch.device) -> Tensor:
    pairs = torch.arange(0, size, 2, device=device, dtype=precise(device))
    return theta ** (-pairs / size)


class NoScalingSpec(RopeScalingSpec, kind="none"):
    """ω_i = θ^(−2i/d)"""


class LinearScalingSpec(RopeScalingSpec, kind="linear"):
    """ω_i / s: positions are squeezed by s

    Chen et al. 2023, arXiv 2306.15595.
    """

    factor: float = field(2.0, "s", ge=1)

    def frequencies(self, theta: float, size: int, length: Tensor) -> Tensor:
        return plain_frequencies(theta, size, length.device) / self.factor


class NtkScalingSpec(RopeScalingSpec, kind="ntk"):
    """ω_i with θ·s^(d/(d−2)): the slow pairs are squeezed by s, the fast ones hardly

    bloc97 2023; Peng et al. 2023, section 3.1.
    """

    factor: float = field(2.0, "s", ge=1)

    def check(self, size: int) -> None:
        if size < 4:
            raise SpecError(f"the base changes as s^(d/(d−2)), which {size} turned coordinates do not have; 4 or more do", ("scaling",))

    def stretch(self, length: Tensor) -> Tensor:
        return torch.full_like(length, self.factor, dtype=precise(length.device))

    def frequencies(self, theta: float, size: int, length: Tensor) -> Tensor:
        pairs = torch.arange(0, size, 2, device=length.device, dtype=precise(length.device))
        return (theta * self.stretch(length) ** (size / (size - 2))) ** (-pairs / size)


class DynamicScalingSpec(NtkScalingSpec, kind="dynamic"):
    """as ntk, with s·L/T − (s − 1) for s once the length L of the text passes T

    emozilla 2023; Peng et al. 2023, section 3.3.
    """

    length: int = field(2048, "T, the length trained on", ge=1)

    @property
    def grows(self) -> bool:
        return True

    def stretch(self, length: Tensor) -> Tensor:
        length = length.to(precise(length.device))
        return self.factor * length.clamp(min=self.length) / self.length - (self.factor - 1)


class YarnScalingSpec(RopeScalingSpec, kind="yarn"):
    """ω_i blended between ω_i/s (slow pairs) and ω_i (fast pairs), what is turned multiplied by 0.1 ln s + 1

    Peng et al. 2023, arXiv 2309.00071, as published in code: the blend is linear in the pair's index, not in its turns.
    """

    factor: float = field(2.0, "s", ge=1)
    length: int = field(2048, "T, the length trained on", ge=1)
    fast: float = field(32.0, "turns within T above which a pair is kept", gt=0)
    slow: float = field(1.0, "turns within T below which a pair is squeezed", gt=0)
    attention: float | None = field(None, "the sharpening of q and k each; 0.1 ln s + 1 if not given", gt=0)
    truncate: bool = field(True, "whether the two borders fall on whole pairs")

    @model_validator(mode="after")
    def _a_band(self) -> Self:
        if self.slow >= self.fast:
            raise SpecError(f"given {self.fast}, expected more than slow = {self.slow}", ("fast",))
        return self

    def frequencies(self, theta: float, size: int, length: Tensor) -> Tensor:
        def border(turns: float) -> float:
            return size * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = border(self.fast), border(self.slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        pairs = torch.arange(size // 2, device=length.device, dtype=precise(length.device))
        squeezed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
        plain = plain_frequencies(theta, size, length.device)
        return plain / self.factor * squeezed + plain * (1 - squeezed)

    def amplitude(self) -> float:
        if self.attention is not None:
            return self.attention
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


class BandedScalingSpec(RopeScalingSpec, kind="banded"):
    """ω_i for short waves, ω_i/s for long ones, a blend between T/high and T/low

    Dubey et al. 2024 (Llama 3.1), arXiv 2407.21783.
    """

    factor: float = field(8.0, "s", ge=1)
    length: int = field(8192, "T, the length trained on", ge=1)
    low: float = field(1.0, "waves longer than T/low are squeezed", gt=0)
    high: float = field(4.0, "waves shorter than T/high are kept", gt=0)

    @model_validator(mode="after")
    def _a_band(self) -> Self:
        if self.low >= self.high:
            raise SpecError(f"given {self.high}, expected more than low = {self.low}", ("high",))
        return self

    def frequencies(self, theta: float, size: int, length: Tensor) -> Tensor:
        plain = plain_frequencies(theta, size, length.device)
        turns = self.length * plain / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain / self.factor * (1 - kept) + plain * kept


Factor = Annotated[float, Field(ge=SMALLEST, le=HIGHEST, strict=True)]


class LongRopeScalingSpec(RopeScalingSpec, kind="longrope"):
    """ω_i / s_i, with one list of s_i up to the length trained on and another beyond it

    Ding et al. 2024, arXiv 2402.13753. Amplitude √(1 + ln(S/T) / ln T) for a stretch from T to S.
    """

    short: tuple[Factor, ...] = field((1.0,), "s_i while the text is at most T long", strict=False)
    long: tuple[Factor, ...] = field((2.0,), "s_i beyond", strict=False)
    length: int = field(2048, "T, the length trained on", ge=2)
    stretch: float = field(2.0, "S/T, for the amplitude", ge=1)
    attention: float | None = field(None, "the amplitude, if it is not the formula's", gt=0)

    @property
    def grows(self) -> bool:
        return self.short != self.long

    def check(self, size: int) -> None:
        for name, factors in (("short", self.short), ("long", self.long)):
            if len(factors) not in (1, size // 2):
                raise SpecError(f"{len(factors)} factors for {size // 2} pairs; give 1 or {size // 2}", ("scaling", name))

    def frequencies(self, theta: float, size: int, length: Tensor) -> Tensor:
        short, long = (torch.tensor(f, device=length.device, dtype=precise(length.device)) for f in (self.short, self.long))
        return plain_frequencies(theta, size, length.device) / torch.where(length > self.length, long, short)

    def amplitude(self) -> float:
        if self.attention is not None:
            return self.attention
        return math.sqrt(1 + math.log(self.stretch) / math.log(self.length))


class RopeSpec(PositionSpec, kind="rope"):
    """⟨R_m q, R_n k⟩ with R_t turning pair i by t·θ^(−2i/d): no parameters, depends on m − n only

    Su et al. 2021, arXiv 2104.09864. `interleaved` pairs neighbours (2i, 2i+1); `halves` pairs (i, i + d/2).
    """

    door: ClassVar[Literal["none", "embed", "rotate", "bias"]] = "rotate"
    needs: ClassVar[frozenset[str]] = frozenset({"query", "key"})

    theta: float = field(10000.0, "θ, the base of the angles", gt=1)
    fraction: float = field(1.0, "how much of each head is turned; the rest keeps no position", gt=0, le=1)
    layout: Literal["halves", "interleaved"] = field("halves", "which coordinates form a pair")
    scaling: RopeScalingSpec = field(NoScalingSpec(), "how the angles are stretched for texts longer than those trained on")

    @property
    def asks_span(self) -> bool:
        return self.scaling.grows

    def rotated(self, head_size: int) -> int:
        size = int(head_size * self.fraction)
        if size % 2:
            size = int(head_size * self.fraction + 1e-6)  # 100 · (58 / 100) is a little less than 58
        if size < 2 or size % 2:
            raise SpecError(f"rotation works on pairs: {self.fraction} of a head of {head_size} is {size}, which is not even and above 0")
        self.scaling.check(size)
        return size

    def build(self, heads: int, head_size: int) -> Position:
        return Rope(self, self.rotated(head_size))


Turns = tuple[Tensor, Tensor]  # cos and sin of every angle, (B or 1)×1×L×pairs


class Rope(Position):
    def __init__(self, spec: RopeSpec, size: int) -> None:
        super().__init__()
        self.spec, self.size = spec, size

    def plan(self, places: Places, dtype: torch.dtype) -> Turns:
        # counted row by row: texts padded to a common length must not change each other's angles
        length = places.key.amax(dim=-1, keepdim=True)[..., None] + 1
        if places.span is not None:
            length = torch.full_like(length, places.span)
        frequencies = self.spec.scaling.frequencies(self.spec.theta, self.size, length)
        angles = (places.query.to(frequencies.dtype)[..., None] * frequencies)[:, None]
        amplitude = self.spec.scaling.amplitude()
        return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)

    def turn(self, x_BHLK: Tensor, turns: Turns) -> Tensor:
        cos, sin = turns
        turned, rest = x_BHLK[..., : self.size], x_BHLK[..., self.size :]
        if self.spec.layout == "interleaved":
            a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    def rotate_query(self, q_BHLK: Tensor, plan: Turns) -> Tensor:
        return self.turn(q_BHLK, plan)

    def rotate_key(self, k_BGLK: Tensor, plan: Turns) -> Tensor:
        return self.turn(k_BGLK, plan)
