"""What attention does, without its matrix: entropy, distance and single weights of every row, with memory linear in the length.

With s the scale and E the expectation under the weights of row i,

    lse_i = ln Σ_j exp(s·q_i·k_j)
    entropy of row i = lse_i − s·q_i·E[k]
    mean squared distance of row i = i² − 2i·E[j] + E[j²]

so k, j and j² as the values of one fused call give them all; `lse` is what the kernel keeps for its backward. Scores that are no
inner products, or have a bias, are computed literally, some rows at a time, and once more on the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from manyheads.parts.attend import Core, InnerProduct, cut, spread
from manyheads.parts.mask import Mask
from manyheads.parts.position import Places

ROWS = 1024  # in one fused call; positions are counted from their middle, so that in float32 a squared distance is true to 0.1
COLUMNS = 8  # the kernels are fast where there is a multiple of these

Cells = tuple[Tensor, Tensor, Tensor]  # of N cells: the text, the query, the key
Span = tuple[slice, slice]  # rows, and the columns they can reach


@dataclass(frozen=True)
class Statistics:
    """Of every row, B×H×L; 0 where a query may see nothing."""

    entropy: Tensor  # −Σ_j α_ij ln α_ij, with 0·ln 0 = 0
    distance: Tensor  # Σ_j α_ij (i − j)², by positions


def statistics(core: Core, q: Tensor, k: Tensor, *, mask: Mask, places: Places, bias: Tensor | None = None) -> Statistics:
    """Entropy and distance of every row, of the weights before dropout."""
    if isinstance(core, InnerProduct) and fusable(q, bias):
        return Statistics(*fused(core, q, k, mask, places)[1:])

    def measured(weights: Tensor, rows: slice, columns: slice) -> tuple[Tensor, ...]:
        surprise = -torch.where(weights > 0, weights, 1.0).log()
        offsets = cut(rows, columns, k=k, places=places, bias=None)["places"].offsets()
        return (weights * surprise).sum(-1), (weights * offsets.square()[:, None]).sum(-1)

    return Statistics(*literally(core, q, k, mask, places, bias, measured, dim=2))


def log_weights(
    core: Core, q: Tensor, k: Tensor, cells: Cells, *, mask: Mask, places: Places, bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    """ln α of chosen cells, each of which the query may see: H×N, before dropout.

    It is s·q_i·k_j − lse_i, or the logarithm of the literal weight; one that is exactly 0 counts as the smallest number there is.
    """
    order = cells[1].argsort(stable=True)  # by query: the blocks come in their order
    text, query, key = (index[order] for index in cells)
    if isinstance(core, InnerProduct) and fusable(q, bias):
        lse = fused(core, q, k, mask, places)[0]
        ours, theirs = core.query(q)[text, :, query], spread(k, q)[text, :, key]
        found = ((ours * theirs).sum(-1) * core.scale - lse[text, :, query]).mT
        return found[:, order.argsort()]

    def measured(weights: Tensor, rows: slice, columns: slice) -> tuple[Tensor, ...]:
        inside = (query >= rows.start) & (query < rows.stop)
        found = weights[text[inside], :, query[inside] - rows.start, key[inside] - columns.start]
        return (found.clamp(min=torch.finfo(found.dtype).tiny).log().mT,)

    return literally(core, q, k, mask, places, bias, measured, dim=1)[0][:, order.argsort()]


def fusable(q: Tensor, bias: Tensor | None) -> bool:
    """Whether one fused call can do it: E of a bias is no column of values, and the kernel must hand out its lse."""
    return bias is None and q.device.type in KERNELS


# --------------------------------------------------------------------------------------------------- the literal way


def literally(
    core: Core, q: Tensor, k: Tensor, mask: Mask, places: Places, bias: Tensor | None,
    measured: Callable[[Tensor, slice, slice], tuple[Tensor, ...]], *, dim: int,
) -> list[Tensor]:  # fmt: skip
    """What is `measured` of the weights in blocks of rows, joined; no block is kept, each is made again for its gradient."""

    def block(q_rows: Tensor, k: Tensor, bias: Tensor | None, rows: slice, columns: slice) -> tuple[Tensor, ...]:
        weights = core.weights(q_rows, mask=mask.cut(rows, columns), **cut(rows, columns, k=k, places=places, bias=bias))
        return measured(weights.to(widened(weights)), rows, columns)

    parts = [
        checkpoint(block, q[:, :, rows], k, bias, rows, columns, use_reentrant=False, preserve_rng_state=False)
        for rows, columns in whole(Core.blocks(core, q, k, mask), mask)
    ]
    return [torch.cat(part, dim=dim) for part in zip(*parts, strict=True)]


def whole(blocks: list[tuple[slice, slice, Mask]], mask: Mask) -> list[Span]:
    """The spans of blocks, by their ends. Their masks are made anew where they are used, not kept: together they are a matrix."""
    return [(slice(*rows.indices(mask.queries)[:2]), slice(*columns.indices(mask.keys)[:2])) for rows, columns, _ in blocks]


def widened(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# ----------------------------------------------------------------------------------------------------- the fused way


def fused(core: InnerProduct, q: Tensor, k: Tensor, mask: Mask, places: Places) -> tuple[Tensor, Tensor, Tensor]:
    """lse, entropy and distance of every row, B×H×L. Half precision is widened: it cannot hold j²."""
    q = core.query(q)
    return Fused.apply(q.to(widened(q)), k.to(widened(k)), mask, places, core.scale)  # type: ignore[no-untyped-call]


class Fused(torch.autograd.Function):
    """One call of the kernel for every block of rows, and one of its own backward.

    A kernel's backward knows the gradient of its output O alone: ∂L/∂S_ij = P_ij (∂L/∂O_i·v_j − Σ ∂L/∂O_i ∘ O_i). As ∂lse_i/∂S_ij = P_ij,
    a column of v that is 0 is given ∂L/∂O = 1 and, in place of its output, O = −∂L/∂lse: the sum then carries that term too.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, mask: Mask, places: Places, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        kept, found = [], []
        for rows, columns in spans(mask):
            block = Block.of(q, k, mask, places, rows, columns)
            out, lse = KERNELS[q.device.type][0](*block.given(), block.added, block.causal, scale)
            mean = out[..., : q.shape[-1] + 2]
            kept.append((mean, lse))
            found.append(block.emptied(lse, *block.measured(mean, lse, scale)))
        ctx.circumstances = mask, places, scale
        ctx.save_for_backward(q, k, *joined(kept))
        lse, entropy, distance = joined(found)
        return lse, entropy, distance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, mean, lse = ctx.saved_tensors
        mask, places, scale = ctx.circumstances
        of_q, of_k, size = torch.zeros_like(q), torch.zeros_like(k), q.shape[-1]
        for rows, columns in spans(mask):
            block = Block.of(q, k, mask, places, rows, columns)
            here, (of_lse, of_entropy, of_distance) = mean[:, :, rows], block.emptied(*(one[:, :, rows] for one in gradients))
            of_mean = (-scale * of_entropy[..., None] * block.q, -2 * block.i * of_distance, of_distance)
            output = block.wide(here, -(of_lse + of_entropy))
            of_output = block.wide(*of_mean, torch.ones_like(of_lse))
            of_queries, of_keys, of_values = KERNELS[q.device.type][1](
                of_output, *block.given(), output, lse[:, :, rows].contiguous(), block.added, block.causal, scale
            )
            of_q[:, :, rows] = of_queries[..., :size] - scale * of_entropy[..., None] * here[..., :size]
            of_both = of_keys[..., :size] + of_values[..., :size]
            of_k[:, :, columns] += of_both if k.shape[1] == q.shape[1] else of_both.unflatten(1, (k.shape[1], -1)).sum(2)
        return of_q, of_k, None, None, None


def joined(blocks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [part[0] if len(part) == 1 else torch.cat(part, dim=2) for part in zip(*blocks, strict=True)]


def spans(mask: Mask) -> list[Span]:
    """The rows of one call: all of them, unless there are many or they see only their neighbourhood."""
    if mask.form != "blocks" and mask.queries <= ROWS:
        return [(slice(0, mask.queries), slice(0, mask.keys))]
    return whole(mask.blocks(ROWS), mask)


@dataclass(frozen=True)
class Block:
    """Some rows and the keys they can reach, with positions counted from the middle of the rows."""

    q: Tensor  # B×H×L×K
    k: Tensor  # B×H×M×K
    i: Tensor  # (B or 1)×1×L
    j: Tensor  # (B or 1)×1×M
    causal: bool
    added: Tensor | None  # to the scores: 0 where a key is seen, −∞ where not
    blind: Tensor | None  # True for rows that may see nothing: they pass open, and are emptied after

    @staticmethod
    def of(q: Tensor, k: Tensor, mask: Mask, places: Places, rows: slice, columns: slice) -> Block:
        entire = (rows, columns) == (slice(0, mask.queries), slice(0, mask.keys))
        mask = mask if entire else mask.cut(rows, columns)
        here, keys = q[:, :, rows], spread(k[:, :, columns], q)
        query, key = places.query[:, rows], places.key[:, columns]
        middle = (query.amin(1, keepdim=True) + query.amax(1, keepdim=True)) // 2
        i, j = ((one - middle).to(q.dtype)[:, None] for one in (query, key))
        seen = None if mask.form in ("open", "causal") else mask.dense
        if seen is None:
            return Block(here, keys, i, j, mask.form == "causal", None, None)
        blind = ~seen.any(dim=-1)
        added = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~(seen | blind[..., None]), -torch.inf)
        return Block(here, keys, i, j, False, added, blind)

    def given(self) -> tuple[Tensor, Tensor, Tensor]:
        """q and k, filled up with zeros, and the values k, j, j² and 0."""
        j = self.j.expand(*self.k.shape[:3])
        return self.wide(self.q), self.wide(self.k), self.wide(self.k, j, j.square())

    def wide(self, *columns: Tensor) -> Tensor:
        """Columns side by side, B×H×L×K or B×H×L each, filled up with zeros to the width of the call: one is always left."""
        width = -(-(self.q.shape[-1] + 3) // COLUMNS) * COLUMNS
        filled, place = columns[0].new_empty(*columns[0].shape[:3], width), 0
        for column in columns:  # once each, and nothing joined before it is filled up: this is most of what is not the kernel
            one = column if column.dim() == 4 else column[..., None]
            filled[..., place : place + one.shape[-1]] = one
            place += one.shape[-1]
        filled[..., place:] = 0.0
        return filled

    def measured(self, mean: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        size = self.q.shape[-1]
        entropy = lse - scale * (self.q * mean[..., :size]).sum(-1)
        return entropy, self.i.square() - 2 * self.i * mean[..., size] + mean[..., size + 1]

    def emptied(self, *rows: Tensor) -> list[Tensor]:
        return [one if self.blind is None else one.masked_fill(self.blind, 0.0) for one in rows]


def flash(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=added, scale=scale)
    return out, lse


def flash_backward(
    of_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, added: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_q, of_k, of_v = backward(of_out, q, k, v, out, lse, 0.0, causal, attn_mask=added, scale=scale)
    return of_q, of_k, of_v


KERNELS = {"cpu": (flash, flash_backward)}  # by device: forward, which gives lse, and its backward
