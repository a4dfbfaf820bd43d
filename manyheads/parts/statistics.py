"""Entropy, distance and single weights of attention, computed without the attention matrix in memory linear in the
length.

With s the scale and E the expectation under the weights of row i,

    lse_i = ln Σ_j exp(s·q_i·k_j)
    entropy of row i = lse_i − s·q_i·E[k]
    mean squared distance of row i = i² − 2i·E[j] + E[j²]

so one fused call with the values k, j and j² computes them all; the kernel also returns `lse`. Explicit attention, in
blocks of rows that the backward computes again, is used for scores that are not inner products or have a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from manyheads.parts.core import Core, InnerProduct, block_arguments, repeat_kv
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions

# rows per fused call; positions are counted from the middle row, which makes squared distances exact to 0.1 in float32
ROWS = 1024
COLUMNS = 8  # the kernel is fast if the number of columns is a multiple of this

WeightIndices = tuple[Tensor, Tensor, Tensor]  # batch, query and key indices of N weights
Span = tuple[slice, slice]  # queries, and the keys they can attend to


@dataclass(frozen=True)
class Statistics:
    """Statistics of every row, B×H×L; 0 for a query without visible keys."""

    entropy: Tensor  # −Σ_j α_ij ln α_ij, with 0·ln 0 = 0
    distance: Tensor  # Σ_j α_ij (i − j)², with i and j the positions


def attention_statistics(
    core: Core, q: Tensor, k: Tensor, *, mask: Mask, positions: Positions, bias: Tensor | None = None
) -> Statistics:
    """Entropy and mean squared distance of every row of the weights before dropout."""
    if isinstance(core, InnerProduct) and is_fusable(q, bias):
        return Statistics(*fused_statistics(core, q, k, mask, positions)[1:])

    def measure(weights: Tensor, rows: slice, columns: slice) -> tuple[Tensor, ...]:
        surprisal = -torch.where(weights > 0, weights, 1.0).log()
        offsets = block_arguments(rows, columns, k=k, positions=positions, bias=None)["positions"].offsets()
        return (weights * surprisal).sum(-1), (weights * offsets.square()[:, None]).sum(-1)

    return Statistics(*explicit_blocks(core, q, k, mask, positions, bias, measure, dim=2))


def log_weights(
    core: Core, q: Tensor, k: Tensor, indices: WeightIndices, *, mask: Mask, positions: Positions,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """ln α at N indices, H×N, before dropout. Each index must be a key that its query may attend to.

    Fused attention computes s·q_i·k_j − lse_i. Explicit attention computes the logarithm of the weight, and of the
    smallest positive number for a weight of 0.
    """
    order = indices[1].argsort(stable=True)  # by query, as the blocks are
    row, query, key = (index[order] for index in indices)
    if isinstance(core, InnerProduct) and is_fusable(q, bias):
        lse = fused_statistics(core, q, k, mask, positions)[0]
        q_NHK, k_NHK = core.query_transform(q)[row, :, query], repeat_kv(k, q)[row, :, key]
        logs = ((q_NHK * k_NHK).sum(-1) * core.scale - lse[row, :, query]).mT
        return logs[:, order.argsort()]

    def measure(weights: Tensor, rows: slice, columns: slice) -> tuple[Tensor, ...]:
        inside = (query >= rows.start) & (query < rows.stop)
        weights_NH = weights[row[inside], :, query[inside] - rows.start, key[inside] - columns.start]
        return (weights_NH.clamp(min=torch.finfo(weights_NH.dtype).tiny).log().mT,)

    return explicit_blocks(core, q, k, mask, positions, bias, measure, dim=1)[0][:, order.argsort()]


def is_fusable(q: Tensor, bias: Tensor | None) -> bool:
    """Whether fused attention can be used, which needs scores without a bias and a kernel that returns lse."""
    return bias is None and q.device.type == "cpu"


# ------------------------------------------------------------------------------------------------- explicit attention


def explicit_blocks(
    core: Core, q: Tensor, k: Tensor, mask: Mask, positions: Positions, bias: Tensor | None,
    measure: Callable[[Tensor, slice, slice], tuple[Tensor, ...]], *, dim: int,
) -> list[Tensor]:  # fmt: skip
    """Applies `measure` to the weights in blocks of rows, and concatenates. The backward computes the blocks again."""

    def block(q_rows: Tensor, k: Tensor, bias: Tensor | None, rows: slice, columns: slice) -> tuple[Tensor, ...]:
        arguments = block_arguments(rows, columns, k=k, positions=positions, bias=bias)
        weights = core.weights(q_rows, mask=mask.submask(rows, columns), **arguments)
        return measure(weights.to(at_least_float32(weights)), rows, columns)

    blocks = [
        checkpoint(block, q[:, :, rows], k, bias, rows, columns, use_reentrant=False, preserve_rng_state=False)
        for rows, columns in spans_of(Core.blocks(core, q, k, mask), mask)
    ]
    return [torch.cat(part, dim=dim) for part in zip(*blocks, strict=True)]


def spans_of(blocks: list[tuple[slice, slice, Mask]], mask: Mask) -> list[Span]:
    """The rows and columns of blocks without their masks, which together would be as large as the matrix."""
    return [
        (slice(*rows.indices(mask.num_queries)[:2]), slice(*columns.indices(mask.num_keys)[:2]))
        for rows, columns, _ in blocks
    ]


def at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# ---------------------------------------------------------------------------------------------------- fused attention


def fused_statistics(
    core: InnerProduct, q: Tensor, k: Tensor, mask: Mask, positions: Positions
) -> tuple[Tensor, Tensor, Tensor]:
    """lse, entropy and distance of every row, B×H×L, in at least float32, as half precision cannot represent j²."""
    q = core.query_transform(q)
    q, k = q.to(at_least_float32(q)), k.to(at_least_float32(k))
    return FusedStatistics.apply(q, k, mask, positions, core.scale)  # type: ignore[no-untyped-call]


class FusedStatistics(torch.autograd.Function):
    """Calls the kernel, and in the backward the kernel's backward, once per block of rows.

    The kernel's backward takes only the gradient of its output O, ∂L/∂S_ij = P_ij (∂L/∂O_i·v_j − Σ ∂L/∂O_i ∘ O_i). The
    gradient of lse adds P_ij ∂L/∂lse_i, because ∂lse_i/∂S_ij = P_ij. A column of zeros in v, for which ∂L/∂O = 1 and
    O = −∂L/∂lse are passed, adds this term to the sum.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, mask: Mask, positions: Positions, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        saved, results = [], []
        for rows, columns in spans(mask):
            block = Block.of(q, k, mask, positions, rows, columns)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *block.query_key_value(), 0.0, block.causal, attn_mask=block.attn_mask, scale=scale
            )
            mean = out[..., : q.shape[-1] + 2]
            saved.append((mean, lse))
            results.append(block.zero_empty_rows(lse, *block.measure(mean, lse, scale)))
        ctx.arguments = mask, positions, scale
        ctx.save_for_backward(q, k, *concatenate(saved))
        lse, entropy, distance = concatenate(results)
        return lse, entropy, distance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, mean, lse = ctx.saved_tensors
        mask, positions, scale = ctx.arguments
        q_grad, k_grad, size = torch.zeros_like(q), torch.zeros_like(k), q.shape[-1]
        for rows, columns in spans(mask):
            block = Block.of(q, k, mask, positions, rows, columns)
            block_mean = mean[:, :, rows]
            lse_grad, entropy_grad, distance_grad = block.zero_empty_rows(*(grad[:, :, rows] for grad in gradients))
            mean_grad = (-scale * entropy_grad[..., None] * block.q, -2 * block.i * distance_grad, distance_grad)
            output = block.pad(block_mean, -(lse_grad + entropy_grad))
            output_grad = block.pad(*mean_grad, torch.ones_like(lse_grad))
            kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            queries_grad, keys_grad, values_grad = kernel_backward(
                output_grad, *block.query_key_value(), output, lse[:, :, rows].contiguous(), 0.0, block.causal,
                attn_mask=block.attn_mask, scale=scale,
            )  # fmt: skip
            q_grad[:, :, rows] = queries_grad[..., :size] - scale * entropy_grad[..., None] * block_mean[..., :size]
            repeated = keys_grad[..., :size] + values_grad[..., :size]
            shared = k.shape[1] != q.shape[1]
            k_grad[:, :, columns] += repeated.unflatten(1, (k.shape[1], -1)).sum(2) if shared else repeated
        return q_grad, k_grad, None, None, None


def concatenate(blocks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [part[0] if len(part) == 1 else torch.cat(part, dim=2) for part in zip(*blocks, strict=True)]


def spans(mask: Mask) -> list[Span]:
    """The rows of each fused call. That is all rows, unless there are many or the mask is banded."""
    if mask.form != "blocks" and mask.num_queries <= ROWS:
        return [(slice(0, mask.num_queries), slice(0, mask.num_keys))]
    return spans_of(mask.blocks(ROWS), mask)


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

    def query_key_value(self) -> tuple[Tensor, Tensor, Tensor]:
        """The kernel's arguments: q and k, padded with zeros, and the values k, j, j² and 0."""
        j = self.j.expand(*self.k.shape[:3])
        return self.pad(self.q), self.pad(self.k), self.pad(self.k, j, j.square())

    def pad(self, *columns: Tensor) -> Tensor:
        """Concatenates tensors of B×H×L×K or B×H×L along the last axis, padded with zeros to the width of the call."""
        width = -(-(self.q.shape[-1] + 3) // COLUMNS) * COLUMNS  # at least one column of zeros is left
        padded, start = columns[0].new_empty(*columns[0].shape[:3], width), 0
        # each tensor is copied once, which takes most of the time outside the kernel
        for column in columns:
            part = column if column.dim() == 4 else column[..., None]
            padded[..., start : start + part.shape[-1]] = part
            start += part.shape[-1]
        padded[..., start:] = 0.0
        return padded

    def measure(self, mean: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        size = self.q.shape[-1]
        entropy = lse - scale * (self.q * mean[..., :size]).sum(-1)
        return entropy, self.i.square() - 2 * self.i * mean[..., size] + mean[..., size + 1]

    def zero_empty_rows(self, *rows: Tensor) -> list[Tensor]:
        return [row if self.empty is None else row.masked_fill(self.empty, 0.0) for row in rows]
