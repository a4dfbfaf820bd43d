"""Which rows make which batch: in an order that the seed alone decides, those of like length together, or several texts to a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from manyheads.data.order import packed, plan, some_of
from manyheads.data.prepared import Ids
from manyheads.objective.language import PackableSpec
from manyheads.objective.score import NOTHING, Batch
from manyheads.objective.shaping import with_links
from manyheads.parts.batch import Inputs
from manyheads.train.run import Ready
from manyheads.train.state import State


def lengths_of(ready: Ready, rows: Ids) -> np.ndarray:
    """How many places each row takes, one number a text of it."""
    objective = ready.run.objective
    lengths = objective.length([rows.lengths(name) for name in rows.fields if name != "label"])
    more = 0 if isinstance(objective, PackableSpec) else objective.room(ready.tokens) - objective.added  # where the tokenizer adds more
    return lengths + more


class Order:
    """The batches of one epoch over all rows: a function of the seed and the epoch. Or of a look at some of them, whatever the seed is."""

    def __init__(self, ready: Ready, rows: Ids, epoch: int = 0, most: int | None = None) -> None:
        self.ready, self.rows, self.epoch = ready, rows, epoch
        how, self.seed = ready.run.train, ready.run.seed if most is None else 0
        self.lengths = lengths_of(ready, rows)
        if how.pack is None:
            some = np.arange(len(rows)) if most is None else some_of(len(rows), most)
            longest = 0 if most is None else int(self.lengths[some].sum(1).max())  # a row to learn from must fit, one to look at need not
            batches = plan(self.lengths[some], self.seed, epoch, tokens=max(how.tokens, longest))
            self.batches: Sequence[Any] = [some[batch] for batch in batches]  # numbers of rows
        else:
            lines = packed(self.lengths[:, 0], how.pack, self.seed, epoch)[:most]  # of each the pieces that share it: (row, start, stop)
            size = how.tokens // how.pack
            self.batches = [lines[i : i + size] for i in range(0, len(lines), size)]

    def __len__(self) -> int:
        return len(self.batches)

    def numbers(self, index: int) -> tuple[int, ...]:
        """Which rows a batch is made of."""
        chosen = self.batches[index]
        return tuple(int(i) for i in (chosen if self.ready.run.train.pack is None else np.concatenate(chosen)[:, 0]))

    def places(self, index: int) -> tuple[int, int]:
        """How many rows a batch has, and how long they are."""
        chosen, pack = self.batches[index], self.ready.run.train.pack
        return len(chosen), int(self.lengths[chosen].sum(1).max()) if pack is None else pack

    def batch(self, index: int) -> Batch:
        run, tokens = self.ready.run, self.ready.tokens
        chance = np.random.default_rng([self.seed, self.epoch, index])
        if run.train.pack is None:
            return run.objective.batch([self.rows[i] for i in self.numbers(index)], tokens, chance)
        assert isinstance(run.objective, PackableSpec)
        pieces = [run.objective.cut(self.rows[row][0], start, stop) for line in self.batches[index] for row, start, stop in line.tolist()]
        counts = [len(line) for line in self.batches[index]]
        return side_by_side(run.objective.pieces(pieces, tokens, chance), counts, run.train.pack, tokens.pad)


def side_by_side(batch: Batch, counts: Sequence[int], length: int, pad: int) -> Batch:
    """A batch whose texts share rows, so many in each: they do not see each other, and each begins at position 0."""
    given, wanted = batch.inputs.tokens, batch.wanted
    sizes = [given.shape[1]] * len(given) if batch.inputs.padding is None else (~batch.inputs.padding).sum(1).tolist()
    ids = torch.full((len(counts), length), pad)
    asked, positions, segments = torch.full_like(ids, NOTHING), torch.zeros_like(ids), torch.zeros_like(ids)
    padding = torch.ones_like(ids, dtype=torch.bool)
    texts = iter(range(len(given)))
    for row, count in enumerate(counts):
        begin = 0
        for segment in range(count):
            text = next(texts)
            here, size = slice(begin, begin + sizes[text]), sizes[text]
            ids[row, here], asked[row, here] = given[text, :size], wanted[text, :size]
            positions[row, here], segments[row, here], padding[row, here] = torch.arange(size), segment, False
            begin += size
    apart = (positions, segments) if max(counts) > 1 else (None, None)
    return Batch(Inputs(ids, padding=padding if padding.any() else None, positions=apart[0], segments=apart[1]), asked)


class Stream:
    """Batches one after the other; where it stands is two numbers of the state."""

    def __init__(self, ready: Ready, state: State | None = None) -> None:
        self.ready, self.state = ready, state or State()
        self.rows: tuple[int, ...] = ()  # of the last batch, by their numbers among all
        self._order: Order | None = None

    def order(self) -> Order:
        """The batches of the epoch it is in."""
        if self._order is None or self._order.epoch != self.state.epoch:
            self._order = Order(self.ready, self.ready.rows, self.state.epoch)
        return self._order

    def next(self) -> Batch:
        at = self.state
        if at.index >= len(self.order()):
            at.epoch, at.index = at.epoch + 1, 0
        order, index = self.order(), at.index
        self.rows = order.numbers(index)
        at.index += 1
        links = {guide: [rows[i] for i in self.rows] for guide, rows in self.ready.links.items()}
        batch = order.batch(index)
        return with_links(batch, self.ready.run.objective, self.ready.tokens, links) if links else batch
