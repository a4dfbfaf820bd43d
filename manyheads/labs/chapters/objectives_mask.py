"""Which objectives need the causal mask, and what a language model learns without it."""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.labs.figures import Lines, Table
from manyheads.labs.finding import Finding, at_least, at_most, equals
from manyheads.labs.fitting import fit, next_token_loss, small_model
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.tasks.batch import IGNORE_INDEX, Batch, SpecialTokens
from manyheads.tasks.language import MaskedSpec
from manyheads.tasks.seq2seq import Seq2SeqSpec
from manyheads.tasks.task import TaskSpec

NUMBERS, COUNTING_STEPS, LENGTH = 16, 3, 12


def visible_targets(kind: str) -> tuple[str, float]:
    """The architecture of a task, and the share of its targets that stand in the input of the same stack."""
    task: Any = TaskSpec.kinds[kind]
    if "tokens" not in task.head_outputs:  # the target is a class, or another text
        return task.architectures[0], 0.0
    tasks = {"masked": MaskedSpec(mask_replace_prob=1.0, random_replace_prob=0.0), "seq2seq": Seq2SeqSpec()}
    special = SpecialTokens(vocab_size=200, sentinels=tuple(range(100, 160)))
    fields = [np.arange(5, 45), np.arange(45, 85)][: 2 if kind == "seq2seq" else 1]
    batch: Batch = tasks.get(kind, task()).batch([tuple(fields)], special, np.random.default_rng(0))
    inputs, targets = batch.inputs.tokens[0].tolist(), batch.targets[0].tolist()
    shown = [target in inputs[i + 1 :] for i, target in enumerate(targets) if target not in (IGNORE_INDEX, special.eos)]
    return task.architectures[0], sum(shown) / len(shown)


def counting(count: int) -> Tensor:
    """<s>, numbers, </s>: each number is the one before it plus 1, 2 or 3, which is the same for a whole text."""
    start, step = torch.randint(0, NUMBERS, (count, 1)), torch.randint(1, COUNTING_STEPS + 1, (count, 1))
    numbers = (start + step * torch.arange(LENGTH)) % NUMBERS
    return F.pad(F.pad(numbers, (1, 0), value=NUMBERS), (0, 1), value=NUMBERS + 1)


def train_to_count(*, causal: bool, steps: int, seed: int, progress: OnProgress) -> tuple[list[float], float, float]:
    """The losses of training, the last ones' mean, and the share of generated numbers that are right."""
    position = {"kind": "learned", "length": LENGTH + 1}
    model = small_model(vocab=NUMBERS + 2, seed=seed, position=position, mask={"causal": causal}, layers=1)
    name = "with a mask" if causal else "without a mask"
    losses = fit(model, lambda _: counting(64), next_token_loss, steps=steps, lr=1e-2, progress=progress, name=name)
    texts = counting(200)
    ids = texts[:, :4]
    with torch.no_grad():
        while ids.shape[1] <= LENGTH:
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
    right = float((ids[:, 4:] == texts[:, 4:-1]).float().mean())
    return losses, float(np.mean(losses[-10:])), right


@lab("objectives", rows=("P7",), seconds=(4, 40.0), smallest={"steps": 200}, full={"steps": 1000},
     counterexample={"causal": True}, try_next=("--causal", "--steps 50"))  # fmt: skip
def without_the_mask(
    *,
    causal: Annotated[bool, "whether the model has a causal mask"] = False,
    steps: Annotated[int, "training steps"] = 300,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A task whose targets stand in the input needs the mask: without it a language model cheats, and writes nonsense.

    The target of a position is the next token, which is an input of the next position. Without a mask the model copies
    it from there: its loss falls to almost 0, below the entropy of the text, which no honest prediction can. When it
    writes there is no next token to copy, and what it writes is wrong. Here a text counts in steps of 1, 2 or 3, so a
    model that has read three numbers can know the rest.
    """
    on_trial = train_to_count(causal=causal, steps=steps, seed=seed, progress=progress)
    control = on_trial if causal else train_to_count(causal=True, steps=steps, seed=seed, progress=progress)
    floor = (math.log(NUMBERS) + math.log(COUNTING_STEPS)) / (LENGTH + 1)
    kinds = ("causal", "infill", "seq2seq", "spans", "masked", "classify", "retrieval")
    table = [(kind, *visible_targets(kind)) for kind in kinds]
    rows = [(*row, "needed" if row[2] else "not needed") for row in table]
    needed = ", ".join(row[0] for row in rows if row[3] == "needed")
    names = ("with a mask" if causal else "without a mask", "control, with a mask")
    curves = {name: list(enumerate(result[0], 1)) for name, result in zip(names, (on_trial, control), strict=True)}
    return Finding(
        (
            at_most(f"loss {names[0]}", on_trial[1], floor / 3),
            at_most(f"generated numbers that are right, {names[0]}", on_trial[2], 0.4),
            at_least(f"loss, {names[1]}", control[1], 0.9 * floor),
            at_least(f"generated numbers that are right, {names[1]}", control[2], 0.8),
            equals("tasks that need the mask", needed, "causal, infill, seq2seq, spans"),
        ),
        (
            Table("Which tasks need the mask", ("task", "architecture", "share of targets in the input", "mask"), rows),
            Lines("Loss while training", "step", "nats per token", curves, {"entropy of the text": floor}),
        ),
    )
