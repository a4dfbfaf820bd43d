"""Attention cores, which compute the attention output from queries, keys and values.

Every core has two methods. `forward` is fast and returns the attention output; `weights` follows the formula and
returns the attention matrix. `weights @ v == forward` for every kind, mask and dtype, in evaluation and in training (on
a CPU, with the same random state).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import StrictInt
from torch import Tensor, nn

from manyheads.errors import IncompatibleError, InputError, InputShapeError
from manyheads.parts.inputs import has_no_data
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions
from manyheads.spec import Part, field


class CoreSpec(Part, slot="core", default="dot"):
    """Computes a distribution over the keys for each query, and the mean of the values under it."""

    # a query has the size of a head or the width of the memory; "none" means that the core uses no queries
    query_source: ClassVar[Literal["head", "memory", "none"]] = "head"
    # keys are projected to the size of a head, or are the memory itself ("raw"); "none" means that it uses no keys
    key_source: ClassVar[Literal["head", "raw", "none"]] = "head"

    dropout: float = field(0.0, "dropout probability of the attention weights", ge=0, lt=1)

    @property
    def max_positions(self) -> int | None:
        """The largest number of keys that the core can attend to; None if unlimited."""
        return None

    @abstractmethod
    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        """Builds the core. `query_size` and `key_size` are sizes per head."""


class Core(nn.Module):
    """A core that is defined by its scores, q·k times `scale` unless a subclass has others.

    `weights` normalizes the scores and `forward` averages the values with them, both in blocks of rows.
    A core without queries or keys gets tensors whose last size is 0.
    """

    scale = 1.0  # q·k is multiplied by it
    hard: Sequence[int] = ()  # heads that take only the key with the highest score
    floats_per_score = 1  # floats of memory that the computation of one score needs
    max_scores = 1 << 22  # scores computed at once where no fused kernel applies
    heads_are_alike = False  # whether all heads have one formula without parameters, so that some can be computed alone

    def __init__(self, spec: CoreSpec) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.key_transform: nn.Module = nn.Identity()  # applied to keys before scoring; its output is cached

    def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, positions: Positions) -> Tensor:
        return q_BHLK @ k_BHMK.transpose(-1, -2) * self.scale

    def normalize(self, scores_BHLM: Tensor) -> Tensor:
        return torch.softmax(scores_BHLM, dim=-1)

    def weights(
        self, q: Tensor, k: Tensor, *, mask: Mask, positions: Positions, bias: Tensor | None = None,
        dropout: bool = False,
    ) -> Tensor:  # fmt: skip
        """The distribution of every query over the keys, B×H×L×M, without dropout and without random numbers.

        With `dropout`, and in training mode, dropout is applied as in `forward`, from the current random state.
        """
        blocks = [] if has_no_data(q) else self.blocks(q, k, mask)  # without data there is no memory to save
        if len(blocks) <= 1:
            return self._weights(q, k, mask, positions, bias, dropout)
        matrix = q.new_zeros(*q.shape[:3], k.shape[2])
        for rows, columns, submask in blocks:  # in the order of `forward`, so that both drop the same weights
            block = block_arguments(rows, columns, k=k, positions=positions, bias=bias)
            matrix[:, :, rows, columns] = self._weights(q[:, :, rows], mask=submask, dropout=dropout, **block)
        return matrix

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, positions: Positions, bias: Tensor | None = None
    ) -> Tensor:
        """The mean of the values under the weights, B×H×L×K."""
        check_shapes(q, k, v)
        blocks = [] if has_no_data(q) else self.blocks(q, k, mask)  # without data there is no memory to save
        if len(blocks) <= 1:
            return self._attend(q, k, v, mask, positions, bias)
        outputs = []
        for rows, columns, submask in blocks:
            block = block_arguments(rows, columns, k=k, positions=positions, bias=bias)
            outputs.append(self._attend(q[:, :, rows], v=v[:, :, columns], mask=submask, **block))
        return torch.cat(outputs, dim=2)

    def blocks(self, q: Tensor, k: Tensor, mask: Mask) -> list[tuple[slice, slice, Mask]]:
        """The rows that are computed at once: all rows, unless the mask is banded or there are too many scores."""
        batch, heads, queries, _ = q.shape
        max_rows = max(1, self.max_scores // (batch * heads * k.shape[2] * self.floats_per_score))
        if mask.form != "blocks" and queries <= max_rows:
            return [(slice(None), slice(None), mask)]
        return mask.blocks(max_rows)

    def _weights(
        self, q: Tensor, k: Tensor, mask: Mask, positions: Positions, bias: Tensor | None, dropout: bool
    ) -> Tensor:
        scores = self.scores(q, repeat_kv(k, q), positions)
        if bias is not None:
            scores = scores + bias
        # in half precision the rows would not sum to 1; torch's fused kernels accumulate in float32 too
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        visible = mask.dense
        if visible is None:
            weights = self.normalize(scores)
        else:
            # a row without visible keys has no distribution; it is not masked in the softmax and set to zero afterwards
            empty = ~visible.any(dim=-1, keepdim=True)
            weights = self.normalize(scores.masked_fill(~(visible | empty), -torch.inf)).masked_fill(empty, 0.0)
        return F.dropout(weights.to(q.dtype), self.dropout, self.training and dropout)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, positions: Positions, bias: Tensor | None) -> Tensor:
        return self._weights(q, k, mask, positions, bias, dropout=True) @ repeat_kv(v, q)


def block_arguments(
    rows: slice, columns: slice, *, k: Tensor, positions: Positions, bias: Tensor | None
) -> dict[str, Any]:
    """Arguments of attention (keys, positions, bias) for a block of rows and columns."""
    return {
        "k": k[:, :, columns],
        "positions": replace(positions, query=positions.query[:, rows], key=positions.key[:, columns]),
        "bias": None if bias is None else bias[:, :, rows, columns],
    }


def check_rows(weights: Tensor, tolerance: float = 1e-4) -> None:
    """Raises an error that names the first row that is not a distribution. A fully masked row may sum to 0.

    The usual cause is a mask multiplied after the softmax instead of added before it.
    """
    sums = weights.sum(dim=-1)
    wrong = ((sums - 1).abs() > tolerance) & (sums != 0) | (weights < 0).any(dim=-1) | sums.isnan()
    if wrong.any():
        row = tuple(wrong.nonzero()[0].tolist())
        raise InputError(
            f"row {row} of the attention weights sums to {float(sums[row]):.4g}, expected 1; "
            f"{int(wrong.sum())} of {wrong.numel()} rows are not a distribution",
            hint="apply the mask before the softmax, not after it",
        )


def repeat_kv(x_BGMK: Tensor, q_BHLK: Tensor) -> Tensor:
    """Keys or values of G heads repeated for the H query heads that share them."""
    repeats = q_BHLK.shape[1] // x_BGMK.shape[1]
    return x_BGMK if repeats == 1 else x_BGMK.repeat_interleave(repeats, dim=1)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    batch, heads, _, size = q.shape
    fits = k.dim() == v.dim() == 4 and k.shape[0] == v.shape[0] == batch and k.shape[2] == v.shape[2]
    if not fits or heads % k.shape[1] or heads % v.shape[1]:
        raise InputShapeError(
            f"for q of shape {tuple(q.shape)} expected k of ({batch}, G, M, {size}) and v of ({batch}, G, M, K) with G "
            f"a divisor of {heads}, given k of {tuple(k.shape)} and v of {tuple(v.shape)}"
        )


# ------------------------------------------------------------------------------------- cores that are inner products


class DotSpec(CoreSpec, kind="dot", caption="scaled dot product"):
    """softmax(q·k / (τ√K) + bias + mask) v

    Vaswani et al. 2017, section 3.2.1. With τ = 1 the scores of unit-normal q and k have variance one.
    """

    temperature: float = field(1.0, "τ; a value above 1 flattens the weights, below 1 sharpens them", gt=0)
    scale: float | None = field(None, "the factor of q·k; 1/√K by default", gt=0)
    softcap: float | None = field(None, "c in c·tanh(score/c), which limits the scores; no limit by default", gt=0)

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        check_equal_sizes(query_size, key_size)
        return Dot(self, query_size) if self.softcap is None else SoftcappedDot(self, query_size, self.softcap)

    def factor(self, query_size: int) -> float:
        """The factor of q·k."""
        return (inverse_root(query_size) if self.scale is None else self.scale) / self.temperature


def inverse_root(size: int) -> float:
    """1/√size, the scale that gives an inner product of `size` unit-normal terms variance one."""
    return size**-0.5


def check_equal_sizes(query_size: int, key_size: int) -> None:
    if query_size != key_size:
        raise IncompatibleError(
            f"a dot product needs queries and keys of the same size, given {query_size} and {key_size}; "
            f"use 'bilinear', 'projected' or 'additive' for different sizes"
        )


class InnerProduct(Core):
    """A core whose score is an inner product of (transformed) queries and keys, so torch's fused kernel computes it."""

    def query_transform(self, q_BHLK: Tensor) -> Tensor:
        """The queries after the transformation that precedes the inner product."""
        return q_BHLK

    def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, positions: Positions) -> Tensor:
        return super().scores(self.query_transform(q_BHLK), k_BHMK, positions)

    def blocks(self, q: Tensor, k: Tensor, mask: Mask) -> list[tuple[slice, slice, Mask]]:
        return mask.blocks() if mask.form == "blocks" else [(slice(None), slice(None), mask)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, positions: Positions, bias: Tensor | None) -> Tensor:
        # kernels of other libraries, to which a graph is exported, disagree on the output of a fully masked row
        if torch.compiler.is_exporting():
            return super()._attend(q, k, v, mask, positions, bias)
        q = self.query_transform(q)
        if q.shape[-1] != k.shape[-1]:
            raise InputShapeError(
                f"q·k needs q and k of one size, given {q.shape[-1]} for q of shape {tuple(q.shape)} "
                f"and {k.shape[-1]} for k of shape {tuple(k.shape)}"
            )
        is_causal = mask.form == "causal" and bias is None
        attn_mask = None if is_causal or mask.form == "none" else mask.dense
        if bias is not None:
            attn_mask = bias if attn_mask is None else bias.masked_fill(~attn_mask, -torch.inf)
            attn_mask = attn_mask.to(q.dtype)
        if k.shape[1] != v.shape[1] or attn_mask is not None:
            k, v = repeat_kv(k, q), repeat_kv(v, q)  # some devices have no fused kernel for shared keys with a mask
        size = v.shape[-1]
        max_size = max(q.shape[-1], size)
        # the kernel needs q, k and v of one size; zeros change neither q·k nor the columns of v that are kept
        q, k, v = (x if x.shape[-1] == max_size else F.pad(x, (0, max_size - x.shape[-1])) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return out if size == max_size else out[..., :size]


class Dot(InnerProduct):
    heads_are_alike = True

    def __init__(self, spec: DotSpec, query_size: int) -> None:
        super().__init__(spec)
        self.scale = spec.factor(query_size)


class SoftcappedDot(Core):
    """Dot with soft-capped scores, which no fused kernel computes."""

    heads_are_alike = True

    def __init__(self, spec: DotSpec, query_size: int, cap: float) -> None:
        super().__init__(spec)
        self.scale, self.cap = spec.factor(query_size), cap

    def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, positions: Positions) -> Tensor:
        return self.cap * torch.tanh(super().scores(q_BHLK, k_BHMK, positions) / self.cap)


class BilinearSpec(CoreSpec, kind="bilinear", caption="bilinear score"):
    """softmax(qᵀ W k / √K) v, with a W per head

    Luong et al. 2015, arXiv 1508.04025, "general" (there without the scale).
    """

    scaled: bool = field(True, "divide by √K")

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        return Bilinear(self, heads, query_size, key_size)


class Bilinear(InnerProduct):
    def __init__(self, spec: BilinearSpec, heads: int, query_size: int, key_size: int) -> None:
        super().__init__(spec)
        self.scale = inverse_root(key_size) if spec.scaled else 1.0
        self.weight = nn.Parameter(torch.empty(heads, query_size, key_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=inverse_root(self.weight.shape[1]))

    def query_transform(self, q_BHLK: Tensor) -> Tensor:
        return q_BHLK @ self.weight


class ProjectedSpec(CoreSpec, kind="projected", caption="projected dot product"):
    """softmax((W₁q)ᵀ (W₂k) / √A) v, with W₁ and W₂ per head

    A bilinear score with W = W₁ᵀW₂ of rank at most A.
    """

    size: int = field(16, "A, the size to which q and k are projected", ge=1, le=65536)
    scaled: bool = field(True, "divide by √A")

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        return Projected(self, heads, query_size, key_size)


class Projected(InnerProduct):
    def __init__(self, spec: ProjectedSpec, heads: int, query_size: int, key_size: int) -> None:
        super().__init__(spec)
        self.scale = inverse_root(spec.size) if spec.scaled else 1.0
        self.query_weight = nn.Parameter(torch.empty(heads, query_size, spec.size))
        self.key_transform = PerHeadLinear(heads, key_size, spec.size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.query_weight, std=inverse_root(self.query_weight.shape[1]))

    def query_transform(self, q_BHLK: Tensor) -> Tensor:
        return q_BHLK @ self.query_weight


class PerHeadLinear(nn.Module):
    """Applies a matrix per query head to the keys of the G key heads that they share, B×G×M×K → B×H×M×A."""

    def __init__(self, heads: int, key_size: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, key_size, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=inverse_root(self.weight.shape[1]))

    def forward(self, k_BGMK: Tensor) -> Tensor:
        return k_BGMK.repeat_interleave(len(self.weight) // k_BGMK.shape[1], dim=1) @ self.weight


class MergedQKSpec(CoreSpec, kind="merged-qk", caption="one matrix for q and k"):
    """softmax(xᵀ W̃ y) v: one matrix per head instead of two, W̃ = W_Qᵀ W_K / √K

    The keys are the memory itself, shared by all heads: D² parameters per head where two projections have 2KD.
    """

    query_source: ClassVar[Literal["head", "memory", "none"]] = "memory"
    key_source: ClassVar[Literal["head", "raw", "none"]] = "raw"

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        return InnerProduct(self)


class ArgmaxSpec(CoreSpec, kind="argmax", caption="argmax"):
    """v of the one key with the highest q·k / √K; the gradient is the softmax's (straight-through)

    Ties go to the lowest index. Bengio, Léonard and Courville 2013 for the gradient, arXiv 1308.3432.
    """

    heads: tuple[StrictInt, ...] | None = field(
        None, "indices of the heads that take the maximum; all heads by default", strict=False, min_length=1
    )

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        wrong = [head for head in self.heads or () if not 0 <= head < heads]
        if wrong:
            raise IncompatibleError(f"given head {wrong[0]}, expected 0 to {heads - 1}", ("heads",))
        check_equal_sizes(query_size, key_size)
        return Argmax(self, heads, query_size)


class Argmax(Core):
    def __init__(self, spec: ArgmaxSpec, heads: int, query_size: int) -> None:
        super().__init__(spec)
        self.scale = inverse_root(query_size)
        self.hard = list(range(heads)) if spec.heads is None else sorted(set(spec.heads))

    def normalize(self, scores_BHLM: Tensor) -> Tensor:
        soft = torch.softmax(scores_BHLM, dim=-1)
        if len(self.hard) == soft.shape[1]:
            return one_hot(soft, scores_BHLM)
        hard = one_hot(soft[:, self.hard], scores_BHLM[:, self.hard])
        return soft.index_copy(1, torch.tensor(self.hard, device=soft.device), hard)


def one_hot(soft: Tensor, scores: Tensor) -> Tensor:
    """Returns 1 at the highest score and exactly 0 elsewhere, with the gradient of `soft`."""
    return StraightThrough.apply(soft, scores)  # type: ignore[no-untyped-call]


class StraightThrough(torch.autograd.Function):
    """Straight-through estimator. The forward is one-hot at the highest score, the backward is that of the softmax."""

    @staticmethod
    def forward(ctx: Any, soft: Tensor, scores: Tensor) -> Tensor:
        return torch.zeros_like(soft).scatter(-1, scores.argmax(dim=-1, keepdim=True), 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


# ------------------------------------------------------------------------------------------------------ other cores


class AdditiveSpec(CoreSpec, kind="additive", caption="additive score"):
    """softmax(uᵀ tanh(W q + U k)) v

    Bahdanau, Cho and Bengio 2015, arXiv 1409.0473, appendix A.1.2.
    """

    size: int = field(16, "the size of the hidden layer", ge=1, le=65536)

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        return Additive(self, heads, query_size, key_size)


class Additive(Core):
    def __init__(self, spec: AdditiveSpec, heads: int, query_size: int, key_size: int) -> None:
        super().__init__(spec)
        self.floats_per_score = spec.size
        self.query_weight = nn.Parameter(torch.empty(heads, query_size, spec.size))
        self.key_transform = PerHeadLinear(heads, key_size, spec.size)
        self.score_weight = nn.Parameter(torch.empty(heads, spec.size, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.query_weight, self.score_weight):
            nn.init.normal_(weight, std=inverse_root(weight.shape[1]))

    def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, positions: Positions) -> Tensor:
        hidden = torch.tanh((q_BHLK @ self.query_weight)[:, :, :, None] + k_BHMK[:, :, None])
        return (hidden @ self.score_weight[:, None]).squeeze(-1)


# ------------------------------------------------------------------------------------------- scores from a function


def register_score(kind: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Registers a function score(q, k) → B×H×L×M as a core.

    Example: `register_score("distance", lambda q, k: -torch.cdist(q, k))`.
    """

    class FunctionSpec(CoreSpec, kind=kind):
        def build(self, heads: int, query_size: int, key_size: int) -> Core:
            return Function(self)

    class Function(Core):
        def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, positions: Positions) -> Tensor:
            return function(q_BHLK, k_BHMK)

    FunctionSpec.__doc__ = f"softmax(score(q, k)) v with score = {getattr(function, '__name__', kind)}"
