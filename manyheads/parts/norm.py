"""Normalisation: what keeps each vector at a size the softmax can work with."""

from __future__ import annotations

from abc import abstractmethod

from torch import nn

from manyheads.spec import Part, field


class NormSpec(Part, slot="norm", default="layer"):
    """Rescales every vector on its own."""

    @abstractmethod
    def build(self, width: int) -> nn.Module:
        raise NotImplementedError


class LayerNormSpec(NormSpec, kind="layer"):
    """(x − mean x) / √(var x + ε) ∘ γ + β

    Ba, Kiros and Hinton 2016, arXiv 1607.06450.
    """

    eps: float = field(1e-5, "ε under the root", gt=0)
    bias: bool = field(True, "whether β is learned")

    def build(self, width: int) -> nn.Module:
        return nn.LayerNorm(width, eps=self.eps, bias=self.bias)


class RMSNormSpec(NormSpec, kind="rms"):
    """x / √(mean x² + ε) ∘ γ

    Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    eps: float = field(1e-6, "ε under the root", gt=0)

    def build(self, width: int) -> nn.Module:
        return nn.RMSNorm(width, eps=self.eps)


class NoNormSpec(NormSpec, kind="none"):
    """x"""

    def build(self, width: int) -> nn.Module:
        return nn.Identity()
