"""Entropy, distance and single weights of attention, computed without the attention matrix in memory linear in the
length.

With s the scale, S_ij = s·q_i·k_j and E the expectation under the weights α_i of row i,

    lse_i = ln Σ_j exp(S_ij)
    entropy of row i = lse_i − s·q_i·E[k]
    mean squared distance of row i = i² − 2i·E[j] + E[j²]

so a fused call with the keys as values, or with the columns j and j², computes each; the kernel also returns `lse`.
Explicit attention, in blocks of rows that the backward computes again, is used for scores that are not inner products
or have a bias.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from manyheads.parts.core import Core, InnerProduct, block_arguments, repeat_kv
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions

# rows per fused call; positions are counted from the middle row, which keeps squared distances exact to 1e-5 of their
# value in float32, and those of near keys to 0.1
ROWS = 1024

WeightIndices = tuple[Tensor, Tensor, Tensor]  # batch, query and key indices of N weights
Span = tuple[slice, slice]  # queries, and the keys they can attend to


@dataclass(frozen=True)
class AttentionCall:
    """The inputs of one attention call. Its statistics are those of the weights before dropout."""

    name: str  # 'decoder.layers.3.attention', 'decoder.layers.3.cross'
    core: Core
    query: Tensor
    key: Tensor
    mask: Mask
    positions: Positions
    bias: Tensor | None = None

    @cached_property
    def entropy(self) -> Tensor:
        """−Σ_j α_ij ln α_ij of every row, B×H×L, with 0·ln 0 = 0, computed without the attention matrix."""
        if self.is_fusable:
            return self.fused(Entropy())

        def measure(weights: Tensor, rows: slice, columns: slice) -> Tensor:
            surprisal = -torch.where(weights > 0, weights, 1.0).log()
            return (weights * surprisal).sum(-1)

        return self.explicit(measure, dim=2)

    @cached_property
    def squared_distance(self) -> Tensor:
        """Σ_j α_ij (i − j)² of every row, B×H×L, with i and j the positions, computed without the attention matrix.

        It is 0 for a query without visible keys.
        """
        if self.is_fusable and self.key.shape[-1] >= SquaredDistance.COLUMNS:
            return self.fused(SquaredDistance())
        i, j = self.positions.query, self.positions.key

        def measure(weights: Tensor, rows: slice, columns: slice) -> Tensor:
            offsets = j[:, None, columns] - i[:, rows, None]
            return (weights * offsets.square()[:, None]).sum(-1)

        return self.explicit(measure, dim=2)

    def log_weights(self, indices: WeightIndices) -> Tensor:
        """ln α at N indices, H×N, computed without the attention matrix.

        Each index must be a key that its query may attend to. Fused attention computes s·q_i·k_j − lse_i. Explicit
        attention computes the logarithm of the weight, and of the smallest positive number for a weight of 0.
        """
        order = indices[1].argsort(stable=True)  # by query, as the blocks are
        row, query, key = (index[order] for index in indices)
        if isinstance(self.core, InnerProduct) and self.is_fusable:
            lse = self.fused(LogSumExp())
            q_NHK = self.core.query_transform(self.query)[row, :, query]
            k_NHK = repeat_kv(self.key, self.query)[row, :, key]
            logs = ((q_NHK * k_NHK).sum(-1) * self.core.scale - lse[row, :, query]).mT
            return logs[:, order.argsort()]

        def measure(weights: Tensor, rows: slice, columns: slice) -> Tensor:
            inside = (query >= rows.start) & (query < rows.stop)
            weights_NH = weights[row[inside], :, query[inside] - rows.start, key[inside] - columns.start]
            return weights_NH.clamp(min=torch.finfo(weights_NH.dtype).tiny).log().mT

        return self.explicit(measure, dim=1)[:, order.argsort()]

    @property
    def is_fusable(self) -> bool:
        """Whether fused attention can be used: inner products without a bias, and a kernel that returns lse."""
        return isinstance(self.core, InnerProduct) and self.bias is None and self.query.device.type == "cpu"

    def fused(self, statistic: Statistic) -> Tensor:
        """A statistic of every row, B×H×L, in at least float32, as half precision cannot represent j²."""
        assert isinstance(self.core, InnerProduct)
        q, k = self.core.query_transform(self.query), self.key
        q, k = q.to(at_least_float32(q)), k.to(at_least_float32(k))
        return FusedStatistic.apply(q, k, statistic, self.mask, self.positions, self.core.scale)  # type: ignore[no-untyped-call]

    def explicit(self, measure: Callable[[Tensor, slice, slice], Tensor], *, dim: int) -> Tensor:
        """Applies `measure` to the weights in blocks of rows, and concatenates. The backward computes them again."""
        # the graph of the result holds `block` and `measure`, which must not hold the call: it caches the result
        core, q, k, mask, positions = self.core, self.query, self.key, self.mask, self.positions

        def block(q_rows: Tensor, k: Tensor, bias: Tensor | None, rows: slice, columns: slice) -> Tensor:
            arguments = block_arguments(rows, columns, k=k, positions=positions, bias=bias)
            weights = core.weights(q_rows, mask=mask.submask(rows, columns), **arguments)
            return measure(weights.to(at_least_float32(weights)), rows, columns)

        blocks = [
            checkpoint(block, q[:, :, rows], k, self.bias, rows, columns, use_reentrant=False, preserve_rng_state=False)
            for rows, columns in spans_of(Core.blocks(core, q, k, mask), mask)
        ]
        return torch.cat(blocks, dim=dim)


def spans_of(blocks: list[tuple[slice, slice, Mask]], mask: Mask) -> list[Span]:
    """The rows and columns of blocks without their masks, which together would be as large as the matrix."""
    return [
        (slice(*rows.indices(mask.num_queries)[:2]), slice(*columns.indices(mask.num_keys)[:2]))
        for rows, columns, _ in blocks
    ]


def at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# ---------------------------------------------------------------------------------------------------- fused attention


@dataclass(frozen=True)
class Block:
    """Some rows and the keys they can attend to, with positions counted from the middle of the rows."""

    q: Tensor  # B×H×L×K
    k: Tensor  # B×H×M×K
    i: Tensor  # (B or 1)×1×L
    j: Tensor  # (B or 1)×1×M
    causal: bool
    attn_mask: Tensor | None  # added to the scores; 0 where a key is visible, −∞ elsewhere
    # True for rows without visible keys, which are not masked in the kernel and set to zero afterwards
    empty: Tensor | None

    @staticmethod
    def of(q: Tensor, k: Tensor, mask: Mask, positions: Positions, rows: slice, columns: slice) -> Block:
        is_whole = (rows, columns) == (slice(0, mask.num_queries), slice(0, mask.num_keys))
        mask = mask if is_whole else mask.submask(rows, columns)
        queries, keys = q[:, :, rows], repeat_kv(k[:, :, columns], q)
        query, key = positions.query[:, rows], positions.key[:, columns]
        middle = (query.amin(1, keepdim=True) + query.amax(1, keepdim=True)) // 2
        i, j = ((indices - middle).to(q.dtype)[:, None] for indices in (query, key))
        visible = None if mask.form in ("none", "causal") else mask.dense
        if visible is None:
            return Block(queries, keys, i, j, mask.form == "causal", None, None)
        empty = ~visible.any(dim=-1)
        zeros = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
        attn_mask = zeros.masked_fill(~(visible | empty[..., None]), -torch.inf)
        return Block(queries, keys, i, j, False, attn_mask, empty)

    def columns(self, *columns: Tensor) -> Tensor:
        """These columns of (B or 1)×(H or 1)×N as B×H×N×K, as wide as the keys, with zeros for the others."""
        padded = self.k.new_zeros(*self.k.shape[:2], columns[0].shape[2], self.k.shape[3])
        for number, column in enumerate(columns):
            padded[..., number] = column
        return padded

    def zero_empty_rows(self, rows: Tensor) -> Tensor:
        return rows if self.empty is None else rows.masked_fill(self.empty, 0.0)


class Statistic(ABC):
    """A statistic of every row, from the output O = E[v] and the lse of the kernel, with its gradient.

    The kernel's backward gives the gradients of q and k for ∂L/∂S_ij = α_ij (G_i·v_j − G_i·O_i), of any G, v and O. So
    `backward` returns a G, v and O with which that is the gradient of the statistic, given ∂L/∂statistic.
    """

    uses_positions = False  # then a call has at most ROWS rows

    @abstractmethod
    def values(self, block: Block) -> Tensor: ...

    @abstractmethod
    def forward(self, block: Block, out: Tensor, lse: Tensor, scale: float) -> Tensor: ...

    @abstractmethod
    def backward(self, block: Block, out: Tensor, grad: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]: ...


class Entropy(Statistic):
    """lse_i − s·q_i·E[k], with ∂/∂S_ij = −α_ij (S_ij − E[S_i]): v = k and G = −s·q."""

    def values(self, block: Block) -> Tensor:
        return block.k

    def forward(self, block: Block, out: Tensor, lse: Tensor, scale: float) -> Tensor:
        return lse - scale * (block.q * out).sum(-1)

    def backward(self, block: Block, out: Tensor, grad: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        return -scale * grad[..., None] * block.q, block.k, out


class SquaredDistance(Statistic):
    """i² − 2i·E[j] + E[j²]: v = (j, j²) and G = (−2i, 1)."""

    COLUMNS = 2
    uses_positions = True

    def values(self, block: Block) -> Tensor:
        return block.columns(block.j, block.j.square())

    def forward(self, block: Block, out: Tensor, lse: Tensor, scale: float) -> Tensor:
        return block.i.square() - 2 * block.i * out[..., 0] + out[..., 1]

    def backward(self, block: Block, out: Tensor, grad: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        return block.columns(-2 * block.i * grad, grad), self.values(block), out


class LogSumExp(Statistic):
    """lse_i, with ∂/∂S_ij = α_ij: v = 0 and G·O = −1."""

    def values(self, block: Block) -> Tensor:
        return block.k

    def forward(self, block: Block, out: Tensor, lse: Tensor, scale: float) -> Tensor:
        return lse

    def backward(self, block: Block, out: Tensor, grad: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        return block.columns(torch.ones_like(grad)), torch.zeros_like(block.k), block.columns(-grad)


class FusedStatistic(torch.autograd.Function):
    """Calls the kernel, and in the backward the kernel's backward, once per block of rows."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, statistic: Statistic, mask: Mask, positions: Positions, scale: float
    ) -> Tensor:
        blocks = []
        for rows, columns in spans(mask, statistic):
            block = Block.of(q, k, mask, positions, rows, columns)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                block.q, block.k, statistic.values(block), 0.0, block.causal, attn_mask=block.attn_mask, scale=scale
            )
            blocks.append((out, lse, block.zero_empty_rows(statistic.forward(block, out, lse, scale))))
        ctx.arguments = statistic, mask, positions, scale
        out, lse, result = (part[0] if len(part) == 1 else torch.cat(part, dim=2) for part in zip(*blocks, strict=True))
        ctx.save_for_backward(q, k, out, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, out, lse = ctx.saved_tensors
        statistic, mask, positions, scale = ctx.arguments
        q_grad, k_grad = torch.zeros_like(q), torch.zeros_like(k)
        for rows, columns in spans(mask, statistic):
            block = Block.of(q, k, mask, positions, rows, columns)
            row_grad = block.zero_empty_rows(grad[:, :, rows])
            out_grad, values, block_out = statistic.backward(block, out[:, :, rows], row_grad, scale)
            queries_grad, keys_grad, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                out_grad, block.q, block.k, values, block_out, lse[:, :, rows].contiguous(), 0.0, block.causal,
                attn_mask=block.attn_mask, scale=scale,
            )  # fmt: skip
            q_grad[:, :, rows] = queries_grad
            shared = k.shape[1] != q.shape[1]
            k_grad[:, :, columns] += keys_grad.unflatten(1, (k.shape[1], -1)).sum(2) if shared else keys_grad
        return q_grad, k_grad, None, None, None, None


def spans(mask: Mask, statistic: Statistic) -> list[Span]:
    """The rows of each fused call. That is all rows, unless positions need fewer or the mask is banded."""
    if mask.form != "blocks" and (mask.num_queries <= ROWS or not statistic.uses_positions):
        return [(slice(0, mask.num_queries), slice(0, mask.num_keys))]
    return spans_of(mask.blocks(ROWS), mask)
