"""Attention cores: what happens between queries, keys and values.

Every core has two methods and one law. `forward` is fast and returns the attended values; `weights` is literal and
returns the matrix; `weights @ v == forward`, for every kind, mask and dtype, in training (on a CPU, with the same random
state) as in evaluation.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import StrictInt
from torch import Tensor, nn

from manyheads.parts.batch import numberless
from manyheads.parts.mask import Mask
from manyheads.parts.position import Places
from manyheads.spec import Part, SpecError, field

LITERAL_LIMIT = 1 << 22  # cells of a score matrix computed at once where no fused kernel applies


class CoreSpec(Part, slot="core", default="dot"):
    """From queries, keys and values to one vector a query: a distribution over the keys and the mean under it."""

    query: ClassVar[Literal["head", "memory", "none"]] = "head"  # the size of a query: a head's, the memory's width, none at all
    key: ClassVar[Literal["head", "raw", "none"]] = "head"  # keys projected to a head's size, the memory as it is, none at all

    dropout: float = field(0.0, "share of the weights dropped in training", ge=0, lt=1)

    @property
    def longest(self) -> int | None:
        """The longest memory it can weigh; None for any."""
        return None

    @abstractmethod
    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        raise NotImplementedError


class Core(nn.Module):
    """A core by its scores: `weights` normalises them, `forward` does so in blocks of rows and averages the values.

    A core without queries or keys is handed tensors whose last size is 0.
    """

    scale = 1.0  # what q·k is multiplied by
    cell = 1  # numbers held for one score while it is computed

    def __init__(self, spec: CoreSpec) -> None:
        super().__init__()
        self.drop = spec.dropout
        self.key: nn.Module = nn.Identity()  # what is made of the keys before they meet any query: done once, kept by a cache

    def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, places: Places) -> Tensor:
        raise NotImplementedError

    def normalise(self, scores_BHLM: Tensor) -> Tensor:
        return torch.softmax(scores_BHLM, dim=-1)

    def weights(self, q: Tensor, k: Tensor, *, mask: Mask, places: Places, bias: Tensor | None = None, dropped: bool = False) -> Tensor:
        """The distribution of every query over the keys, B×H×L×M. Looking draws no random number.

        With `dropped`, the weights as training multiplies them with v, drawn from the present random state.
        """
        # without memory nothing needs to be spared
        blocks = [] if numberless(q) else self.blocks(q, k, mask)
        if len(blocks) <= 1:
            return self._weights(q, k, mask, places, bias, dropped)
        whole = q.new_zeros(*q.shape[:3], k.shape[2])
        for rows, columns, part in blocks:  # in the order of `forward`, so that both drop the same weights
            here = cut(rows, columns, k=k, places=places, bias=bias)
            whole[:, :, rows, columns] = self._weights(q[:, :, rows], mask=part, dropped=dropped, **here)
        return whole

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, places: Places, bias: Tensor | None = None) -> Tensor:
        """The mean of the values under the weights, B×H×L×K."""
        check_shapes(q, k, v)
        # without memory nothing needs to be spared
        blocks = [] if numberless(q) else self.blocks(q, k, mask)
        if len(blocks) <= 1:
            return self._attended(q, k, v, mask, places, bias)
        parts = (
            self._attended(q[:, :, rows], v=v[:, :, columns], mask=part, **cut(rows, columns, k=k, places=places, bias=bias))
            for rows, columns, part in blocks
        )
        return torch.cat(list(parts), dim=2)

    def blocks(self, q: Tensor, k: Tensor, mask: Mask) -> list[tuple[slice, slice, Mask]]:
        """The rows computed at once: all of them, unless the mask is banded or the scores would be too many."""
        batch, heads, queries, _ = q.shape
        most = max(1, LITERAL_LIMIT // (batch * heads * k.shape[2] * self.cell))
        if mask.form != "blocks" and queries <= most:
            return [(slice(None), slice(None), mask)]
        return mask.blocks(most)

    def _weights(self, q: Tensor, k: Tensor, mask: Mask, places: Places, bias: Tensor | None, dropped: bool) -> Tensor:
        scores = self.scores(q, spread(k, q), places)
        if bias is not None:
            scores = scores + bias
        # half precision would lose the rows' sums; torch's fused kernels accumulate in float32 too
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        seen = mask.dense
        if seen is None:
            weights = self.normalise(scores)
        else:
            # a row that sees nothing has no distribution: it passes the softmax open and is emptied after
            nobody = ~seen.any(dim=-1, keepdim=True)
            weights = self.normalise(scores.masked_fill(~(seen | nobody), -torch.inf)).masked_fill(nobody, 0.0)
        return F.dropout(weights.to(q.dtype), self.drop, self.training and dropped)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, places: Places, bias: Tensor | None) -> Tensor:
        return self._weights(q, k, mask, places, bias, dropped=True) @ spread(v, q)


def cut(rows: slice, columns: slice, *, k: Tensor, places: Places, bias: Tensor | None) -> dict[str, Any]:
    """The circumstances of attention for some rows and the columns they reach."""
    return {
        "k": k[:, :, columns],
        "places": replace(places, query=places.query[:, rows], key=places.key[:, columns]),
        "bias": None if bias is None else bias[:, :, rows, columns],
    }


def check_rows(weights: Tensor, tolerance: float = 1e-4) -> None:
    """Refuses a matrix that is no attention: a row that does not sum to one (nor to zero, seeing nothing) is named.

    The usual cause is a mask multiplied after the softmax instead of added before it.
    """
    sums = weights.sum(dim=-1)
    wrong = ((sums - 1).abs() > tolerance) & (sums != 0) | (weights < 0).any(dim=-1) | sums.isnan()
    if wrong.any():
        row = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"row {row} sums to {float(sums[row]):.4g}, expected 1: {int(wrong.sum())} of {wrong.numel()} rows are no distribution; "
            f"was a mask multiplied after the softmax?"
        )


def spread(x_BGMK: Tensor, q_BHLK: Tensor) -> Tensor:
    """Keys or values of G heads as those of the H query heads that share them."""
    shared = q_BHLK.shape[1] // x_BGMK.shape[1]
    return x_BGMK if shared == 1 else x_BGMK.repeat_interleave(shared, dim=1)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    batch, heads, _, size = q.shape
    expected = f"k of shape ({batch}, G, M, {size}) and v of shape ({batch}, G, M, K), with G a divisor of {heads} heads"
    fits = k.dim() == v.dim() == 4 and k.shape[0] == v.shape[0] == batch and k.shape[2] == v.shape[2]
    if not fits or heads % k.shape[1] or heads % v.shape[1]:
        raise ValueError(f"for q of shape {tuple(q.shape)} expected {expected}; given k {tuple(k.shape)} and v {tuple(v.shape)}")


# ------------------------------------------------------------------------------------- cores that are inner products


class DotSpec(CoreSpec, kind="dot"):
    """softmax(q·k / (τ√K) + bias + mask) v

    Vaswani et al. 2017, section 3.2.1. With τ = 1 the scores of unit-normal q and k have variance one.
    """

    temperature: float = field(1.0, "τ: above 1 flattens the weights, below sharpens them", gt=0)
    scale: float | None = field(None, "what q·k is multiplied by instead of 1/√K", gt=0)
    softcap: float | None = field(None, "c: scores become c·tanh(score/c)", gt=0)

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        needs_one_size(query_size, key_size)
        return Dot(self, query_size) if self.softcap is None else Capped(self, query_size, self.softcap)

    def factor(self, query_size: int) -> float:
        """What q·k is multiplied by."""
        return (inverse_root(query_size) if self.scale is None else self.scale) / self.temperature


def inverse_root(size: int) -> float:
    """1/√size: the one temperature that keeps an inner product of `size` unit-normal terms at variance one."""
    return size**-0.5


def needs_one_size(query_size: int, key_size: int) -> None:
    if query_size != key_size:
        raise SpecError(
            f"a dot product needs queries and keys of one size, given {query_size} and {key_size}; "
            f"'bilinear', 'projected' and 'additive' take any two sizes"
        )


class InnerProduct(Core):
    """Any core whose score is an inner product of (transformed) queries and keys: runs on the fused kernel."""

    def query(self, q_BHLK: Tensor) -> Tensor:
        """What the core makes of the queries."""
        return q_BHLK

    def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, places: Places) -> Tensor:
        return self.query(q_BHLK) @ k_BHMK.transpose(-1, -2) * self.scale

    def blocks(self, q: Tensor, k: Tensor, mask: Mask) -> list[tuple[slice, slice, Mask]]:
        return mask.blocks() if mask.form == "blocks" else [(slice(None), slice(None), mask)]

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, places: Places, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_exporting():  # other people's kernels do not agree on what a query gets that may see nothing
            return super()._attended(q, k, v, mask, places, bias)
        q = self.query(q)
        if q.shape[-1] != k.shape[-1]:
            raise ValueError(
                f"q·k needs one size: q of shape {tuple(q.shape)} has {q.shape[-1]}, k of shape {tuple(k.shape)} has {k.shape[-1]}"
            )
        flag = mask.form == "causal" and bias is None
        seen = None if flag or mask.form == "open" else mask.dense
        if bias is not None:
            seen = bias if seen is None else bias.masked_fill(~seen, -torch.inf)
            seen = seen.to(q.dtype)
        if k.shape[1] != v.shape[1] or seen is not None:
            k, v = spread(k, q), spread(v, q)  # shared keys beside a mask leave the fused kernels on some devices
        size = v.shape[-1]
        widest = max(q.shape[-1], size)
        # the kernel wants one size throughout; zeros change neither q·k nor the columns of v that are kept
        q, k, v = (x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=flag, scale=self.scale,
            dropout_p=self.drop if self.training else 0.0, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return out if size == widest else out[..., :size]


class Dot(InnerProduct):
    def __init__(self, spec: DotSpec, query_size: int) -> None:
        super().__init__(spec)
        self.scale = spec.factor(query_size)


class Capped(Core):
    """The same with soft-capped scores, which no fused kernel has."""

    def __init__(self, spec: DotSpec, query_size: int, cap: float) -> None:
        super().__init__(spec)
        self.scale, self.cap = spec.factor(query_size), cap

    def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, places: Places) -> Tensor:
        return self.cap * torch.tanh(q_BHLK @ k_BHMK.transpose(-1, -2) * self.scale / self.cap)


class BilinearSpec(CoreSpec, kind="bilinear"):
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

    def query(self, q_BHLK: Tensor) -> Tensor:
        return q_BHLK @ self.weight


class ProjectedSpec(CoreSpec, kind="projected"):
    """softmax((W₁q)ᵀ (W₂k) / √A) v, with W₁ and W₂ per head

    A bilinear score with W = W₁ᵀW₂ of rank at most A.
    """

    size: int = field(16, "A, the size both are projected to", ge=1, le=65536)
    scaled: bool = field(True, "divide by √A")

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        return Projected(self, heads, query_size, key_size)


class Projected(InnerProduct):
    def __init__(self, spec: ProjectedSpec, heads: int, query_size: int, key_size: int) -> None:
        super().__init__(spec)
        self.scale = inverse_root(spec.size) if spec.scaled else 1.0
        self.query_weight = nn.Parameter(torch.empty(heads, query_size, spec.size))
        self.key = ByHead(heads, key_size, spec.size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.query_weight, std=inverse_root(self.query_weight.shape[1]))

    def query(self, q_BHLK: Tensor) -> Tensor:
        return q_BHLK @ self.query_weight


class ByHead(nn.Module):
    """Keys of G heads through a matrix for each of the H heads that share them."""

    def __init__(self, heads: int, key_size: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, key_size, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=inverse_root(self.weight.shape[1]))

    def forward(self, k_BGMK: Tensor) -> Tensor:
        return k_BGMK.repeat_interleave(len(self.weight) // k_BGMK.shape[1], dim=1) @ self.weight


class FusedSpec(CoreSpec, kind="fused"):
    """softmax(xᵀ W̃ y) v: one matrix per head instead of two, W̃ = W_Qᵀ W_K / √K

    The keys are the memory itself, shared by all heads: D² parameters a head where two projections have 2KD.
    """

    query: ClassVar[Literal["head", "memory", "none"]] = "memory"
    key: ClassVar[Literal["head", "raw", "none"]] = "raw"

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        return Fused(self)


class Fused(InnerProduct):
    pass


class ArgmaxSpec(CoreSpec, kind="argmax"):
    """v of the one key with the highest q·k / √K; the gradient is the softmax's (straight-through)

    Ties go to the lowest index. Bengio, Léonard and Courville 2013 for the gradient, arXiv 1308.3432.
    """

    heads: tuple[StrictInt, ...] | None = field(None, "the heads that are hard; all of them if not given", strict=False, min_length=1)

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        wrong = [head for head in self.heads or () if not 0 <= head < heads]
        if wrong:
            raise SpecError(f"there is no head {wrong[0]} among {heads}; heads count from 0 to {heads - 1}", ("heads",))
        needs_one_size(query_size, key_size)
        return Argmax(self, heads, query_size)


class Argmax(Core):
    def __init__(self, spec: ArgmaxSpec, heads: int, query_size: int) -> None:
        super().__init__(spec)
        self.scale = inverse_root(query_size)
        self.hard = list(range(heads)) if spec.heads is None else sorted(set(spec.heads))

    def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, places: Places) -> Tensor:
        return q_BHLK @ k_BHMK.transpose(-1, -2) * self.scale

    def normalise(self, scores_BHLM: Tensor) -> Tensor:
        soft = torch.softmax(scores_BHLM, dim=-1)
        if len(self.hard) == soft.shape[1]:
            return one_hot(soft, scores_BHLM)
        hard = one_hot(soft[:, self.hard], scores_BHLM[:, self.hard])
        return soft.index_copy(1, torch.tensor(self.hard, device=soft.device), hard)


def one_hot(soft: Tensor, scores: Tensor) -> Tensor:
    """1 at the highest score and exactly 0 elsewhere, with the gradient of `soft`."""
    return StraightThrough.apply(soft, scores)  # type: ignore[no-untyped-call]


class StraightThrough(torch.autograd.Function):
    """Forward: exactly one-hot at the highest score. Backward: as if the softmax had been passed on."""

    @staticmethod
    def forward(ctx: Any, soft: Tensor, scores: Tensor) -> Tensor:
        return torch.zeros_like(soft).scatter(-1, scores.argmax(dim=-1, keepdim=True), 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


# ---------------------------------------------------------------------------------------- cores that are not


class AdditiveSpec(CoreSpec, kind="additive"):
    """softmax(uᵀ tanh(W q + U k)) v

    Bahdanau, Cho and Bengio 2015, arXiv 1409.0473, appendix A.1.2.
    """

    size: int = field(16, "the size of the hidden layer in between", ge=1, le=65536)

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        return Additive(self, heads, query_size, key_size)


class Additive(Core):
    def __init__(self, spec: AdditiveSpec, heads: int, query_size: int, key_size: int) -> None:
        super().__init__(spec)
        self.cell = spec.size
        self.query_weight = nn.Parameter(torch.empty(heads, query_size, spec.size))
        self.key = ByHead(heads, key_size, spec.size)
        self.score_weight = nn.Parameter(torch.empty(heads, spec.size, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.query_weight, self.score_weight):
            nn.init.normal_(weight, std=inverse_root(weight.shape[1]))

    def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, places: Places) -> Tensor:
        hidden = torch.tanh((q_BHLK @ self.query_weight)[:, :, :, None] + k_BHMK[:, :, None])
        return (hidden @ self.score_weight[:, None]).squeeze(-1)


# ---------------------------------------------------------------------------------------------------- your own


def score(kind: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Makes any score(q, k) → B×H×L×M a core, in one line: `score("distance", lambda q, k: -torch.cdist(q, k))`."""

    class FunctionSpec(CoreSpec, kind=kind):
        def build(self, heads: int, query_size: int, key_size: int) -> Core:
            return Function(self)

    class Function(Core):
        def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, places: Places) -> Tensor:
            return function(q_BHLK, k_BHMK)

    FunctionSpec.__doc__ = f"softmax(score(q, k)) v with the score {getattr(function, '__name__', 'given')}"
