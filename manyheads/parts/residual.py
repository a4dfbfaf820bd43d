"""Residual connections, which determine where the norms are and what is added to the residual stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from manyheads.kernels.plan import NotLoweredError, Op, Plan, Register, require_type
from manyheads.parts.norm import NormSpec, lower_norm
from manyheads.spec import Part, field

Sublayer = Callable[[Tensor], Tensor]
LoweredSublayer = Callable[[Register, Register | None], Register]  # reads a register; its output is added to the other


class ResidualSpec(Part, slot="residual", default="pre"):
    """The residual connections of a layer, whose sublayers f are attention, cross-attention and feed-forward."""

    # whether the stack needs a norm after the last layer, because the output of a layer is not normalized
    final_norm: ClassVar[bool] = True

    dropout: float = field(0.0, "dropout probability of each sublayer's output", ge=0, lt=1)

    @abstractmethod
    def build(self, norm: NormSpec, width: int, sublayers: int) -> Residual:
        """The module that runs this number of sublayers, with its norms."""


class Residual(nn.Module):
    """Owns the norms of a layer; `forward(x_BLD, sublayers)` of a subclass runs its sublayers."""

    def __init__(self, spec: ResidualSpec, norm: NormSpec, width: int, norms: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm.build(width) for _ in range(norms))
        self.dropout = nn.Dropout(spec.dropout)

    def lower(self, plan: Plan, x: Register, sublayers: Sequence[LoweredSublayer]) -> Register:
        """Adds the layer to a plan, in which x may be overwritten; returns the register of its output."""
        raise NotLoweredError


class PreSpec(ResidualSpec, kind="pre", caption="pre-norm"):
    """x + f(norm(x)), for each sublayer in turn

    Xiong et al. 2020, arXiv 2002.04745.
    """

    def build(self, norm: NormSpec, width: int, sublayers: int) -> Residual:
        return PreNorm(self, norm, width, sublayers)


class PreNorm(Residual):
    def forward(self, x_BLD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        for norm, sublayer in zip(self.norms, sublayers, strict=True):
            x_BLD = x_BLD + self.dropout(sublayer(norm(x_BLD)))
        return x_BLD

    def lower(self, plan: Plan, x: Register, sublayers: Sequence[LoweredSublayer]) -> Register:
        require_type(self, PreNorm)
        for norm, sublayer in zip(self.norms, sublayers, strict=True):
            sublayer(lower_norm(norm, plan, x), x)
        return x


class PostSpec(ResidualSpec, kind="post", caption="post-norm"):
    """norm(x + f(x)), for each sublayer in turn

    Vaswani et al. 2017, section 3.1.
    """

    final_norm: ClassVar[bool] = False

    def build(self, norm: NormSpec, width: int, sublayers: int) -> Residual:
        return PostNorm(self, norm, width, sublayers)


class PostNorm(Residual):
    def forward(self, x_BLD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        for norm, sublayer in zip(self.norms, sublayers, strict=True):
            x_BLD = norm(x_BLD + self.dropout(sublayer(x_BLD)))
        return x_BLD

    def lower(self, plan: Plan, x: Register, sublayers: Sequence[LoweredSublayer]) -> Register:
        require_type(self, PostNorm)
        for norm, sublayer in zip(self.norms, sublayers, strict=True):
            sublayer(x, x)
            lower_norm(norm, plan, x, out=x)
        return x


class SandwichSpec(ResidualSpec, kind="sandwich", caption="sandwich norm"):
    """x + norm′(f(norm(x))), for each sublayer in turn

    Ding et al. 2021 (CogView), arXiv 2105.13290.
    """

    def build(self, norm: NormSpec, width: int, sublayers: int) -> Residual:
        return SandwichNorm(self, norm, width, 2 * sublayers)


class SandwichNorm(Residual):
    def forward(self, x_BLD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        for before, after, sublayer in zip(self.norms[::2], self.norms[1::2], sublayers, strict=True):
            x_BLD = x_BLD + self.dropout(after(sublayer(before(x_BLD))))
        return x_BLD

    def lower(self, plan: Plan, x: Register, sublayers: Sequence[LoweredSublayer]) -> Register:
        require_type(self, SandwichNorm)
        for before, after, sublayer in zip(self.norms[::2], self.norms[1::2], sublayers, strict=True):
            output = lower_norm(after, plan, sublayer(lower_norm(before, plan, x), None))
            plan.add(Op.ADD, x, x, output, width=x.width)
        return x


class ParallelSpec(ResidualSpec, kind="parallel", caption="parallel sublayers"):
    """x + f₁(norm(x)) + f₂(norm(x)), with sublayers in parallel that share one norm

    Wang and Komatsuzaki 2021 (mesh-transformer-jax).
    """

    def build(self, norm: NormSpec, width: int, sublayers: int) -> Residual:
        return Parallel(self, norm, width, 1)


class Parallel(Residual):
    def forward(self, x_BLD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        normed = self.norms[0](x_BLD)
        for sublayer in sublayers:
            x_BLD = x_BLD + self.dropout(sublayer(normed))
        return x_BLD

    def lower(self, plan: Plan, x: Register, sublayers: Sequence[LoweredSublayer]) -> Register:
        require_type(self, Parallel)
        normed = lower_norm(self.norms[0], plan, x)
        if normed == x:  # the first sublayer would change what the second reads
            raise NotLoweredError
        for sublayer in sublayers:
            sublayer(normed, x)
        return x


class ParallelNormsSpec(ResidualSpec, kind="parallel-norms", caption="parallel sublayers, a norm each"):
    """x + f₁(norm₁(x)) + f₂(norm₂(x)), with sublayers in parallel and a norm each

    Black et al. 2022, arXiv 2204.06745, section 2.1.
    """

    def build(self, norm: NormSpec, width: int, sublayers: int) -> Residual:
        return ParallelNorms(self, norm, width, sublayers)


class ParallelNorms(Residual):
    def forward(self, x_BLD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        start = x_BLD
        for norm, sublayer in zip(self.norms, sublayers, strict=True):
            x_BLD = x_BLD + self.dropout(sublayer(norm(start)))
        return x_BLD

    def lower(self, plan: Plan, x: Register, sublayers: Sequence[LoweredSublayer]) -> Register:
        require_type(self, ParallelNorms)
        normed = [lower_norm(norm, plan, x) for norm in self.norms]  # all of them before x changes
        if x in normed:
            raise NotLoweredError
        for input, sublayer in zip(normed, sublayers, strict=True):  # noqa: A001
            sublayer(input, x)
        return x


class NoResidualSpec(ResidualSpec, kind="none", caption="no residual"):
    """f(norm(x)), for each sublayer in turn, without adding x"""

    def build(self, norm: NormSpec, width: int, sublayers: int) -> Residual:
        return NoResidual(self, norm, width, sublayers)


class NoResidual(Residual):
    def forward(self, x_BLD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        for norm, sublayer in zip(self.norms, sublayers, strict=True):
            x_BLD = self.dropout(sublayer(norm(x_BLD)))
        return x_BLD

    def lower(self, plan: Plan, x: Register, sublayers: Sequence[LoweredSublayer]) -> Register:
        require_type(self, NoResidual)
        for norm, sublayer in zip(self.norms, sublayers, strict=True):
            x = sublayer(lower_norm(norm, plan, x), None)
        return x
