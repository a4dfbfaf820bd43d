"""The order of samples as pure functions of seed, epoch and index: nothing to save, nothing to replay."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.data.source import DataError

Whole = NDArray[np.int64]
ROUNDS = 6
POOL = 1 << 15
WORD = (1 << 64) - 1


def hashed(*keys: Any) -> NDArray[np.uint64]:
    """A 64-bit number for whole numbers, or for each of arrays of them (splitmix64: Steele, Lea and Flood 2014)."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        word = np.array([key & WORD], np.uint64) if isinstance(key, int) else np.atleast_1d(key).astype(np.uint64)
        state = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permuted(seed: int, epoch: int, index: Any, count: int) -> Whole:
    """Where `index` goes when 0 … count − 1 are shuffled: a Feistel network, walked on until it lands inside.

    The square a × b ≥ count is barely larger than count (Black and Rogaway 2002), so hardly any walk takes a second step.
    """
    x = np.atleast_1d(np.asarray(index, np.int64))
    if x.size and (int(x.min()) < 0 or int(x.max()) >= count):
        raise ValueError(f"an index is outside of 0 … {count - 1}")
    a = int(np.ceil(np.sqrt(max(count, 1))))
    b = -(-max(count, 1) // a)
    result = _round_trip(seed, epoch, x, a, b)
    while (outside := result >= count).any():
        result[outside] = _round_trip(seed, epoch, result[outside], a, b)
    return result


def some_of(count: int, most: int) -> Whole:
    """Which rows are looked at, where there are more: the same for all runs, and from anywhere, for those of a file may be sorted."""
    return permuted(0, 0, np.arange(min(count, most)), count)


def _round_trip(seed: int, epoch: int, x: Whole, a: int, b: int) -> Whole:
    left, right = x // b, x % b
    for turn in range(ROUNDS):
        if turn % 2:
            right = (right + (hashed(seed, epoch, turn, left) % np.uint64(b)).astype(np.int64)) % b
        else:
            left = (left + (hashed(seed, epoch, turn, right) % np.uint64(a)).astype(np.int64)) % a
    return left * b + right


def plan(lengths: NDArray[Any], seed: int, epoch: int, *, tokens: int, pool: int = POOL, longest: int | None = None) -> list[Whole]:
    """All batches of one epoch: each the rows that share it, every row once, rows of like length together, batches in random order.

    `lengths` is one number a row, or one a field and row; rows are taken as cut to `longest`. Padded to the longest of its
    rows, field by field, no batch has more than `tokens`. Rows are shuffled, sorted by length within pools, and dealt out; every
    other pool is sorted the other way round, so a batch may reach from one into the next.
    """
    if not len(lengths):
        return []
    sizes = np.maximum(np.asarray(lengths, np.int64).reshape(len(lengths), -1), 1)
    if longest is not None:
        sizes = np.minimum(sizes, longest)
    total = sizes.sum(1)
    if int(total.max()) > tokens:
        row = int(np.argmax(total > tokens))
        raise DataError(
            f"row {row:,} has {int(total[row]):,} tokens, and a batch may have {tokens:,}: raise the budget, or cut rows to a longest"
        )
    order = permuted(seed, epoch, np.arange(len(sizes)), len(sizes))
    order = order[_alike(sizes[order], tokens, np.arange(len(sizes)) // pool)]
    ends = _ends(sizes[order], tokens)
    batches = np.split(order, ends[:-1])
    return [batches[i] for i in permuted(seed, ~epoch, np.arange(len(batches)), len(batches))]


def _alike(sizes: Whole, tokens: int, pools: Whole) -> Whole:
    """The order in which neighbours are of like length within each pool.

    Of several fields, the longest decides first; rows that are alike in it, a strip of them, are sorted by which field it is. Strips
    grow with the batches, so that these tile the plane of two lengths; they are gone through up and down in turn.
    """
    widest, total = sizes.max(1), sizes.sum(1)
    order = np.lexsort((np.where(pools % 2, widest, -widest), pools))
    if sizes.shape[1] == 1:
        return order
    widest, skew = widest[order], (2 * sizes[:, 0] - total)[order]
    batches = total.sum() / tokens / (pools[-1] + 1)  # in a pool
    begins = np.diff(widest, prepend=-1) != 0
    before = (np.cumsum(total[order]) - total[order])[begins][np.cumsum(begins) - 1]
    strips = before // (tokens * max(1, round(batches**0.5 / 4)))
    return order[np.lexsort((np.where(strips % 2, skew, -skew), strips))]


def _ends(sizes: Whole, tokens: int) -> list[int]:
    """Where each batch ends when rows are taken one after another while they fit."""
    ends, start, most = [], 0, (tokens // sizes.sum(1)).tolist()
    counts = np.arange(1, tokens + 1)
    while start < len(sizes):
        taken = most[start]
        if taken > 1:
            widest = np.maximum.accumulate(sizes[start : start + taken]).sum(1)
            taken = int(np.searchsorted(widest * counts[: len(widest)], tokens, "right"))
        start += taken
        ends.append(start)
    return ends


def packed(lengths: NDArray[Any], length: int, seed: int, epoch: int, *, pool: int = POOL) -> list[Whole]:
    """Which pieces of which documents share a row of `length` tokens: for each row, its (document, start, stop).

    A document longer than a row is cut, at other places every epoch; every token is in exactly one piece. Within pools, the
    longest piece first, each goes where it leaves the least room (best fit decreasing).
    """
    sizes = np.asarray(lengths, np.int64)
    cut = (hashed(seed, epoch, np.arange(len(sizes))) % np.uint64(length)).astype(np.int64) + 1
    first = np.where(sizes > length, cut, sizes)
    counts = np.where(sizes > 0, 1 + -(-(sizes - first) // length), 0)
    document = np.repeat(np.arange(len(sizes)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.where(nth > 0, first[document] + (nth - 1) * length, 0)
    stop = np.where(nth > 0, np.minimum(start + length, sizes[document]), first[document])
    order = permuted(seed, epoch, np.arange(len(document)), len(document))
    pieces = np.stack((document, start, stop), 1)[order]
    rows: list[Whole] = []
    for begin in range(0, len(pieces), pool):
        rows += _best_fit(pieces[begin : begin + pool], length)
    return [rows[i] for i in permuted(seed, ~epoch, np.arange(len(rows)), len(rows))]


def _best_fit(pieces: Whole, length: int) -> list[Whole]:
    pieces = pieces[np.argsort(pieces[:, 1] - pieces[:, 2], kind="stable")]
    room: list[list[int]] = [[] for _ in range(length + 1)]  # the rows with so much room
    some, rows = 0, 0  # bit r of `some` is set where room[r] holds any
    where = np.empty(len(pieces), np.int64)
    for i, size in enumerate((pieces[:, 2] - pieces[:, 1]).tolist()):
        fitting = some >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = room[left].pop()
            if not room[left]:
                some ^= 1 << left
        else:
            row, left, rows = rows, length, rows + 1
        where[i] = row
        room[left - size].append(row)
        some |= 1 << (left - size)
    order = np.argsort(where, kind="stable")
    return np.split(pieces[order], np.searchsorted(where[order], np.arange(1, rows)))
