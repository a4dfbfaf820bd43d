"""Residual connections, which determine where the norms are and what is added to the residual stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from manyheads.parts.norm import NormSpec
from manyheads.spec import Part, field

Sublayer = Callable[[Tensor], Tensor]
Norms = Sequence[nn.Module]


class ResidualSpec(Part, slot="residual", default="pre"):
    """The residual connections of a layer. Its sublayers f are attention, cross-attention if any, and feed-forward."""

    # whether the stack needs a norm after the last layer, because the output of a layer is not normalised
    final_norm: ClassVar[bool] = True

    dropout: float = field(0.0, "dropout probability of each sublayer's output", ge=0, lt=1)

    def num_norms(self, sublayers: int) -> int:
        """The number of norms in a layer with this number of sublayers."""
        return sublayers

    def build(self, norm: NormSpec, width: int, sublayers: int) -> Residual:
        return Residual(self, norm, width, self.num_norms(sublayers))

    @abstractmethod
    def run(self, x_BLD: Tensor, sublayers: Sequence[Sublayer], norms: Norms, dropout: nn.Module) -> Tensor:
        """Applies all sublayers of a layer to x."""


class Residual(nn.Module):
    """Owns the norms of a layer and runs its sublayers."""

    def __init__(self, spec: ResidualSpec, norm: NormSpec, width: int, norms: int) -> None:
        super().__init__()
        self.spec = spec
        self.norms = nn.ModuleList(norm.build(width) for _ in range(norms))
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BLD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        return self.spec.run(x_BLD, sublayers, list(self.norms), self.dropout)


class PreSpec(ResidualSpec, kind="pre"):
    """x + f(norm(x)), for each sublayer in turn

    Xiong et al. 2020, arXiv 2002.04745.
    """

    def run(self, x_BLD: Tensor, sublayers: Sequence[Sublayer], norms: Norms, dropout: nn.Module) -> Tensor:
        for norm, sublayer in zip(norms, sublayers, strict=True):
            x_BLD = x_BLD + dropout(sublayer(norm(x_BLD)))
        return x_BLD


class PostSpec(ResidualSpec, kind="post"):
    """norm(x + f(x)), for each sublayer in turn

    Vaswani et al. 2017, section 3.1.
    """

    final_norm: ClassVar[bool] = False

    def run(self, x_BLD: Tensor, sublayers: Sequence[Sublayer], norms: Norms, dropout: nn.Module) -> Tensor:
        for norm, sublayer in zip(norms, sublayers, strict=True):
            x_BLD = norm(x_BLD + dropout(sublayer(x_BLD)))
        return x_BLD


class SandwichSpec(ResidualSpec, kind="sandwich"):
    """x + norm′(f(norm(x))), for each sublayer in turn

    Ding et al. 2021 (CogView), arXiv 2105.13290.
    """

    def num_norms(self, sublayers: int) -> int:
        return 2 * sublayers

    def run(self, x_BLD: Tensor, sublayers: Sequence[Sublayer], norms: Norms, dropout: nn.Module) -> Tensor:
        for before, after, sublayer in zip(norms[::2], norms[1::2], sublayers, strict=True):
            x_BLD = x_BLD + dropout(after(sublayer(before(x_BLD))))
        return x_BLD


class ParallelSpec(ResidualSpec, kind="parallel"):
    """x + f₁(norm(x)) + f₂(norm(x)), with sublayers in parallel that share one norm

    Wang and Komatsuzaki 2021 (mesh-transformer-jax).
    """

    def num_norms(self, sublayers: int) -> int:
        return 1

    def run(self, x_BLD: Tensor, sublayers: Sequence[Sublayer], norms: Norms, dropout: nn.Module) -> Tensor:
        normed = norms[0](x_BLD)
        for sublayer in sublayers:
            x_BLD = x_BLD + dropout(sublayer(normed))
        return x_BLD


class ParallelNormsSpec(ResidualSpec, kind="parallel-norms"):
    """x + f₁(norm₁(x)) + f₂(norm₂(x)), with sublayers in parallel and a norm each

    Black et al. 2022, arXiv 2204.06745, section 2.1.
    """

    def run(self, x_BLD: Tensor, sublayers: Sequence[Sublayer], norms: Norms, dropout: nn.Module) -> Tensor:
        start = x_BLD
        for norm, sublayer in zip(norms, sublayers, strict=True):
            x_BLD = x_BLD + dropout(sublayer(norm(start)))
        return x_BLD


class NoResidualSpec(ResidualSpec, kind="none"):
    """f(norm(x)), for each sublayer in turn, without adding x"""

    def run(self, x_BLD: Tensor, sublayers: Sequence[Sublayer], norms: Norms, dropout: nn.Module) -> Tensor:
        for norm, sublayer in zip(norms, sublayers, strict=True):
            x_BLD = dropout(sublayer(norm(x_BLD)))
        return x_BLD
