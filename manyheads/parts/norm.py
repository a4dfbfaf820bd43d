"""Normalization layers: LayerNorm and RMSNorm."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import UnsupportedError
from manyheads.kernels.plan import NotLoweredError, Plan, Register
from manyheads.spec import Part, field


class NormSpec(Part, slot="norm", default="layer"):
    """The normalization of each vector."""

    @abstractmethod
    def build(self, width: int) -> nn.Module:
        """Builds the norm of vectors of this width."""


class LayerNormSpec(NormSpec, kind="layer", caption="LayerNorm"):
    """(x − mean x) / √(var x + ε) ∘ γ + β

    Ba, Kiros and Hinton 2016, arXiv 1607.06450.
    """

    eps: float = field(1e-5, "ε under the root", gt=0)
    bias: bool = field(True, "whether β is learned")

    def build(self, width: int) -> nn.Module:
        return nn.LayerNorm(width, eps=self.eps, bias=self.bias)


class RMSNormSpec(NormSpec, kind="rms", caption="RMSNorm"):
    """x / √(mean x² + ε) ∘ γ

    Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    eps: float = field(1e-6, "ε under the root", gt=0)

    def build(self, width: int) -> nn.Module:
        return nn.RMSNorm(width, eps=self.eps)


class RMSOneSpec(NormSpec, kind="rms-one", caption="RMSNorm, gain 1 + γ"):
    """x / √(mean x² + ε) ∘ (1 + γ), the same as rms with a gain of 1 + γ

    Mesnard et al. 2024, arXiv 2403.08295, as published in code.
    """

    eps: float = field(1e-6, "ε under the root", gt=0)

    def build(self, width: int) -> nn.Module:
        return RMSOne(width, eps=self.eps)


class RMSOne(nn.RMSNorm):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        # half precision would lose the 1 + γ
        x_float32 = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(x_float32, self.weight.shape, 1.0 + self.weight.to(x_float32.dtype), self.eps).to(x.dtype)


class NoNormSpec(NormSpec, kind="none", caption=""):
    """x, without normalization"""

    def build(self, width: int) -> nn.Module:
        return nn.Identity()


def frozen_norm(norm: nn.Module, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The norm as a linear map and an offset, norm(x) = map(x) + offset, with its scale at x held fixed."""
    zero = torch.zeros_like(x)
    match norm:
        case nn.Identity():
            return (lambda part: part), zero
        case nn.LayerNorm():
            factor = (x.var(dim=-1, unbiased=False, keepdim=True) + norm.eps).rsqrt() * norm.weight
            offset = zero if norm.bias is None else norm.bias
            return (lambda part: (part - part.mean(dim=-1, keepdim=True)) * factor), offset
        case nn.RMSNorm():
            gain = 1.0 + norm.weight if isinstance(norm, RMSOne) else norm.weight
            factor = (x.square().mean(dim=-1, keepdim=True) + (norm.eps or 0.0)).rsqrt() * gain
            return (lambda part: part * factor), zero
    raise UnsupportedError(f"attribution does not support the norm {type(norm).__name__}")


def lower_norm(
    norm: nn.Module, plan: Plan, x: Register, *, width: int | None = None, out: Register | None = None
) -> Register:
    """Adds the norm of x, or of each `width` floats of it, to a plan."""
    kind, eps = type(norm), getattr(norm, "eps", 0.0)
    if kind is nn.Identity:
        return x
    if kind not in (nn.LayerNorm, nn.RMSNorm, RMSOne):
        raise NotLoweredError
    settings: dict[str, Any] = {"subtract_mean": kind is nn.LayerNorm, "gain": 1.0 if kind is RMSOne else 0.0}
    return plan.norm(x, norm, eps=eps, width=width, out=out, **settings)
