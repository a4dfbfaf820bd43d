"""A look at unseen rows: loss, accuracy, and whole answers that are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from manyheads.data.order import some_of
from manyheads.data.prepared import Ids
from manyheads.generate.sample import Rules, sample
from manyheads.model.build import Model
from manyheads.spec import LARGEST
from manyheads.train.run import Ready
from manyheads.train.stream import Order

AT_ONCE = 64  # unseen rows that are answered together
Wish = Callable[[], str | None]  # asked between any two pieces of work: a reason to stop, or none


class Leaving(Exception):  # noqa: N818
    """Somebody asked for an end in the middle of a look, which is made again by the next start."""


@torch.no_grad()
def evaluate(model: Model, ready: Ready, wish: Wish = lambda: None) -> dict[str, float]:
    """Loss on unseen rows; accuracy where a guess can be right; where whole answers are written, how many are exactly right.

    Runs that differ in their seed alone are asked the same. What is hidden of a text, and which documents a query's own stands among,
    also depend on which rows make a batch, and so on train.tokens.
    """
    model.eval()
    device = next(model.parameters()).device
    total = count = 0.0
    right: list[int | None] = []
    order = Order(ready, ready.unseen, most=ready.run.train.evaluate_rows)
    for i in range(len(order)):
        if wish():
            raise Leaving
        batch = order.batch(i).to(device)
        with lower_precision(device):
            score = ready.run.objective.unsoftened.score(model, batch)
        total, count = total + float(score.total), count + score.count
        right.append(score.right)
    metrics = {"loss": total / max(1, count)}
    if None not in right:
        metrics["accuracy"] = sum(filter(None, right)) / max(1, count)
    if "exact" in ready.run.objective.figures:
        groups = grouped(ready.unseen, ready.run.train.evaluate_rows, AT_ONCE, wish)
        answers = [written for rows in groups for written in exact(model, ready, rows)]
        metrics["exact"] = sum(answers) / max(1, len(answers))
    return metrics


def grouped(rows: Ids, most: int, size: int, wish: Wish) -> Iterator[list[Any]]:
    some = some_of(len(rows), most)
    for start in range(0, len(some), size):
        if wish():
            raise Leaving
        yield [rows[int(i)] for i in some[start : start + size]]


def exact(model: Model, ready: Ready, rows: Sequence[Any]) -> list[bool]:
    """Which targets the model writes to the letter, as far as they were not cut; an unknown word has no letters."""
    device = next(model.parameters()).device
    batch = ready.run.objective.batch(rows, ready.tokens, np.random.default_rng(0)).to(device)
    prompt = torch.tensor([ready.tokens.opening] * len(rows), device=device)
    places = ready.spec.decoder.longest if ready.spec.decoder else None
    longest = min(max(len(target) for _, target in rows) + 2, LARGEST if places is None else places - prompt.shape[1] + 1)
    written = torch.stack(list(sample(model, prompt, batch.source, max_new=longest, rules=Rules(stop=(ready.tokens.end,)))), dim=1).tolist()
    found = [row[: row.index(ready.tokens.end)] if ready.tokens.end in row else row for row in written]
    wanted = [target.tolist() for _, target in rows]
    return [row == target and ready.tokens.unknown not in target for row, target in zip(found, wanted, strict=True)]


def lower_precision(device: torch.device) -> torch.autocast:
    """Matrices in 16 bits where a GPU multiplies them faster; float32 on a CPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
