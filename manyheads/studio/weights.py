"""Attention weights of a recorded call in blocks of rows, and the scores of one query."""

from __future__ import annotations

from torch import Tensor

from manyheads.model.recording import RecordedAttention
from manyheads.parts.core import block_arguments, repeat_kv
from manyheads.parts.mask import Mask


def block_of(call: RecordedAttention, rows: slice, head: int | None = None) -> tuple[slice, Mask, Tensor]:
    """The weights of some rows, H×N×M, with their mask, and without the columns that a causal mask hides from all.

    `head` is for a core whose heads are alike; then H is 1.
    """
    columns = slice(0, rows.stop) if call.mask.form == "causal" else slice(None)
    mask = call.mask.submask(rows, columns)
    query, key, bias = call.query, call.key, call.bias
    if head is not None:
        kv_head, heads = head * key.shape[1] // query.shape[1], slice(head, head + 1)
        query, key = query[:, heads], key[:, kv_head : kv_head + 1]
        bias = bias if bias is None or bias.shape[1] == 1 else bias[:, heads]
    block = block_arguments(rows, columns, k=key, positions=call.positions, bias=bias)
    return columns, mask, call.core.weights(query[:, :, rows], mask=mask, **block)[0]


def row_scores(call: RecordedAttention, head: int, row: int) -> Tensor:
    """The scores of one query, with the bias and before the mask, M."""
    rows = slice(row, row + 1)
    query = call.query[:, :, rows]
    block = block_arguments(rows, slice(None), k=call.key, positions=call.positions, bias=call.bias)
    scores = call.core.scores(query, repeat_kv(block["k"], query), block["positions"])
    if block["bias"] is not None:
        scores = scores + block["bias"]
    return scores[0, head, 0].float()
