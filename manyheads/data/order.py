"""The order of rows as pure functions of seed, epoch and index, so that there is no state to save."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import DataSizeError

IntArray = NDArray[np.int64]
FEISTEL_ROUNDS = 6
POOL_SIZE = 1 << 15  # rows sorted by length, or documents packed, at a time
UINT64_MAX = (1 << 64) - 1


def splitmix64(*keys: Any) -> NDArray[np.uint64]:
    """Hashes integers, or each element of integer arrays, to 64 bits (Steele, Lea and Flood 2014)."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        word = np.array([key & UINT64_MAX], np.uint64) if isinstance(key, int) else np.atleast_1d(key).astype(np.uint64)
        state = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def shuffled_index(seed: int, epoch: int, index: Any, count: int) -> IntArray:
    """Returns the position of `index` after shuffling 0 … count − 1: a Feistel network, repeated while it is ≥ count.

    The domain a × b ≥ count is barely larger than count (Black and Rogaway 2002), so a second repetition is rare.
    """
    x = np.atleast_1d(np.asarray(index, np.int64))
    if x.size and (int(x.min()) < 0 or int(x.max()) >= count):
        raise IndexError(f"index {x.tolist()[:3]} is outside of 0 … {count - 1}")
    a = int(np.ceil(np.sqrt(max(count, 1))))
    b = -(-max(count, 1) // a)
    result = _feistel(seed, epoch, x, a, b)
    while (outside := result >= count).any():
        result[outside] = _feistel(seed, epoch, result[outside], a, b)
    return result


def sample_indices(count: int, max_count: int) -> IntArray:
    """Samples at most `max_count` of `count` rows, the same in every run; random, because a file may be sorted."""
    return shuffled_index(0, 0, np.arange(min(count, max_count)), count)


def _feistel(seed: int, epoch: int, x: IntArray, a: int, b: int) -> IntArray:
    left, right = x // b, x % b
    for i in range(FEISTEL_ROUNDS):
        if i % 2:
            right = (right + (splitmix64(seed, epoch, i, left) % np.uint64(b)).astype(np.int64)) % b
        else:
            left = (left + (splitmix64(seed, epoch, i, right) % np.uint64(a)).astype(np.int64)) % a
    return left * b + right


def batch_by_length(
    lengths: NDArray[Any], seed: int, epoch: int, *, max_tokens: int, pool_size: int = POOL_SIZE
) -> list[IntArray]:
    """Returns the batches of one epoch, in random order, as arrays of row indices; rows of similar length are together.

    `lengths` has one number per row, or one per row and field. A batch, each field padded to its longest row, has at
    most `max_tokens` tokens. Rows are shuffled, sorted by length within pools and cut into batches; every other pool
    is sorted in descending order, so that a batch may continue from one pool into the next.
    """
    if not len(lengths):
        return []
    sizes = np.maximum(np.asarray(lengths, np.int64).reshape(len(lengths), -1), 1)
    total = sizes.sum(1)
    if int(total.max()) > max_tokens:
        row = int(np.argmax(total > max_tokens))
        raise DataSizeError(
            f"row {row:,} has {int(total[row]):,} tokens, and a batch has at most {max_tokens:,}",
            hint="raise train.batch_tokens, or truncate rows with train.max_length",
        )
    order = shuffled_index(seed, epoch, np.arange(len(sizes)), len(sizes))
    order = order[_sort_by_length(sizes[order], max_tokens, np.arange(len(sizes)) // pool_size)]
    batches = np.split(order, _batch_ends(sizes[order], max_tokens)[:-1])
    return [batches[i] for i in shuffled_index(seed, ~epoch, np.arange(len(batches)), len(batches))]


def _sort_by_length(sizes: IntArray, max_tokens: int, pools: IntArray) -> IntArray:
    """Returns an order in which neighbours within a pool have similar lengths.

    With several fields, rows are first sorted by their longest field. Rows with about the same longest field, a strip,
    are then sorted by the difference of the fields. A strip holds about √batches batches, so that batches tile the
    plane of two lengths; every other strip is in descending order.
    """
    longest, total = sizes.max(1), sizes.sum(1)
    order = np.lexsort((np.where(pools % 2, longest, -longest), pools))
    if sizes.shape[1] == 1:
        return order
    longest, skew = longest[order], (2 * sizes[:, 0] - total)[order]
    batches_per_pool = total.sum() / max_tokens / (pools[-1] + 1)
    new_length = np.diff(longest, prepend=-1) != 0
    tokens_before = (np.cumsum(total[order]) - total[order])[new_length][np.cumsum(new_length) - 1]
    strips = tokens_before // (max_tokens * max(1, round(batches_per_pool**0.5 / 4)))
    return order[np.lexsort((np.where(strips % 2, skew, -skew), strips))]


def _batch_ends(sizes: IntArray, max_tokens: int) -> list[int]:
    """Returns where each batch ends if rows are added one after another while they fit."""
    ends, start, upper_bounds = [], 0, (max_tokens // sizes.sum(1)).tolist()
    counts = np.arange(1, max_tokens + 1)
    while start < len(sizes):
        count = upper_bounds[start]
        if count > 1:
            padded = np.maximum.accumulate(sizes[start : start + count]).sum(1)
            count = int(np.searchsorted(padded * counts[: len(padded)], max_tokens, "right"))
        start += count
        ends.append(start)
    return ends


def pack_documents(
    lengths: NDArray[Any], row_length: int, seed: int, epoch: int, *, pool_size: int = POOL_SIZE
) -> list[IntArray]:
    """Packs documents into rows of `row_length` tokens; returns the chunks (document, start, stop) of each row.

    A document longer than a row is split, at other positions in every epoch; every token is in exactly one chunk.
    Within pools, longest chunk first, each chunk goes to the row where it leaves the least space (best-fit
    decreasing).
    """
    sizes = np.asarray(lengths, np.int64)
    offset = (splitmix64(seed, epoch, np.arange(len(sizes))) % np.uint64(row_length)).astype(np.int64) + 1
    first = np.where(sizes > row_length, offset, sizes)
    counts = np.where(sizes > 0, 1 + -(-(sizes - first) // row_length), 0)
    document = np.repeat(np.arange(len(sizes)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.where(nth > 0, first[document] + (nth - 1) * row_length, 0)
    stop = np.where(nth > 0, np.minimum(start + row_length, sizes[document]), first[document])
    order = shuffled_index(seed, epoch, np.arange(len(document)), len(document))
    chunks = np.stack((document, start, stop), 1)[order]
    rows: list[IntArray] = []
    for begin in range(0, len(chunks), pool_size):
        rows += _best_fit(chunks[begin : begin + pool_size], row_length)
    return [rows[i] for i in shuffled_index(seed, ~epoch, np.arange(len(rows)), len(rows))]


def _best_fit(chunks: IntArray, row_length: int) -> list[IntArray]:
    chunks = chunks[np.argsort(chunks[:, 1] - chunks[:, 2], kind="stable")]
    rows_by_space: list[list[int]] = [[] for _ in range(row_length + 1)]
    nonempty, count = 0, 0  # bit s of `nonempty` is set if a row has space s
    row_of_chunk = np.empty(len(chunks), np.int64)
    for i, size in enumerate((chunks[:, 2] - chunks[:, 1]).tolist()):
        fitting = nonempty >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                nonempty ^= 1 << space
        else:
            row, space, count = count, row_length, count + 1
        row_of_chunk[i] = row
        rows_by_space[space - size].append(row)
        nonempty |= 1 << (space - size)
    order = np.argsort(row_of_chunk, kind="stable")
    return np.split(chunks[order], np.searchsorted(row_of_chunk[order], np.arange(1, count)))
