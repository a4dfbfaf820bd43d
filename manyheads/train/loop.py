"""The loop: batches in an order that the seed alone decides, updates, looks at unseen rows, checkpoints. It yields what happens."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyheads.convert.folder import Origin, described
from manyheads.data.order import plan
from manyheads.data.prepared import Encoded
from manyheads.generate.sample import Rules, sample
from manyheads.model.build import Model, build
from manyheads.objective.score import NOTHING, Batch
from manyheads.spec import LARGEST, Tree, read_toml, to_toml, to_tree
from manyheads.train.checkpoint import newest, restore, save
from manyheads.train.lora import adapt, naming, write_adapter
from manyheads.train.optim import gradient_length, optimiser
from manyheads.train.run import Ready, RunError, check_unchanged, environment, locked
from manyheads.train.start import digest, freeze, take

MOST_SKIPPED = 10  # updates in a row that were no numbers, after which a run stops


@dataclass(frozen=True)
class Started:
    """A run begins from a checkpoint: how many weights are taken, which are new, which of its own are left out, and more to know."""

    step: int
    taken: int
    new: tuple[str, ...]
    left: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shortened:
    """How many rows, to learn from and unseen, were longer than they may be, and were cut."""

    step: int
    rows: int
    unseen: int


@dataclass(frozen=True)
class Resumed:
    """A run goes on; checkpoints that were not sound are named."""

    step: int
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Stepped:
    """One update, or one that was left out because its numbers were none."""

    step: int
    loss: float
    rate: float
    gradient: float
    tokens: int
    seconds: float
    skipped: bool = False


@dataclass(frozen=True)
class Evaluated:
    """A look at unseen rows."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Saved:
    """A checkpoint is in its place."""

    step: int
    path: str


@dataclass(frozen=True)
class Ended:
    """Why a run ended: its last step, its goal, or somebody asked."""

    step: int
    reason: str


Event = Started | Shortened | Resumed | Stepped | Evaluated | Saved | Ended


class Stream:
    """Batches one after the other; where it stands is two numbers."""

    def __init__(self, ready: Ready, epoch: int = 0, index: int = 0) -> None:
        self.ready, self.epoch, self.index = ready, epoch, index
        objective = ready.run.objective
        self.lengths = objective.length([ready.rows.lengths(name) for name in objective.fields if name != "label"])
        self._plan: tuple[int, Sequence[np.ndarray]] | None = None

    def batches(self) -> Sequence[np.ndarray]:
        if self._plan is None or self._plan[0] != self.epoch:
            self._plan = self.epoch, plan(self.lengths, self.ready.run.seed, self.epoch, tokens=self.ready.run.train.tokens)
        return self._plan[1]

    def next(self) -> Batch:
        if self.index >= len(self.batches()):
            self.epoch, self.index = self.epoch + 1, 0
        chance = np.random.default_rng([self.ready.run.seed, self.epoch, self.index])
        rows = [self.ready.rows[int(i)] for i in self.batches()[self.index]]
        self.index += 1
        return self.ready.run.objective.batch(rows, self.ready.tokens, chance)


def train(ready: Ready, folder: Path, *, wish: Callable[[], str | None] = lambda: None) -> Iterator[Event]:
    """Trains, or goes on where the folder says it stopped. `wish` is asked after every step: a reason to stop, or none."""
    with locked(folder):
        for event in run_in(ready, folder, wish):
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": type(event).__name__.lower()} | asdict(event)) + "\n")
            yield event


def run_in(ready: Ready, folder: Path, wish: Callable[[], str | None]) -> Iterator[Event]:
    run, how = ready.run, ready.run.train
    begin(ready, folder)
    model, begun = first_model(ready)
    changer = optimiser(model, run.optim)
    origin, tokenizer = with_tokens(described(model, ready.start.origin if ready.start else None), ready), framed(ready)
    known = digest(ready.start) if ready.start else None
    checkpoint, wrong = newest(folder / "checkpoints")
    state: Tree = {"step": 0, "epoch": 0, "index": 0, "tokens": 0}
    if checkpoint is not None:
        state |= restore(checkpoint, model, changer)
        if state.get("start") != known:
            raise RunError(f"this run began from {run.start}, which is not what it was; put it back, or take another --output")
        forget_after(folder / "metrics.jsonl", state["step"])
        yield Resumed(state["step"], tuple(wrong))
    else:
        yield from begun
    stream = Stream(ready, state["epoch"], state["index"])
    step, tokens, skipped, kept = state["step"], state["tokens"], 0, state["step"]

    def keep() -> Saved:
        said = {"epoch": stream.epoch, "index": stream.index, "tokens": tokens} | ({"start": known} if known else {})
        return Saved(step, str(save(folder / "checkpoints", step, model, changer, origin, tokenizer, said, how.keep, also)))

    names = naming(model, family_of(ready))[0] if run.lora else {}

    def also(draft: Path) -> None:
        if run.lora:
            write_adapter(draft, model, run.lora, str(run.start), names)

    reason = None
    if how.goal and step and step % how.evaluate_every == 0:  # where an unbroken run would have looked, and perhaps have ended
        reason = "goal" if reached(ready, evaluate(model, ready)) else None
    while reason is None and step < how.steps:
        step += 1
        event = update(model, changer, stream, ready, step)
        tokens += event.tokens
        skipped = skipped + 1 if event.skipped else 0
        yield event
        if skipped >= MOST_SKIPPED:
            raise RunError(f"{skipped} updates in a row were no numbers, the last at step {step}; lower optim.rate or look at the data")
        if step % how.evaluate_every == 0 or step == how.steps:
            metrics = evaluate(model, ready)
            yield Evaluated(step, metrics)
            reason = "goal" if reached(ready, metrics) else None
        reason = reason or wish()
        if step % how.save_every == 0:
            yield keep()
            kept = step
    if kept != step:
        yield keep()
    yield Ended(step, reason or "steps")


def first_model(ready: Ready) -> tuple[Model, list[Event]]:
    """The model before the first step, and what there is to know of it."""
    run, events = ready.run, list[Event]()
    model = build(ready.spec, seed=run.seed)
    found = take(model, ready.start, str(run.start)) if ready.start else None
    notes: tuple[str, ...] = ()
    if found and run.lora:
        adapt(model, run.lora, seed=run.seed, new=found.new)
        notes = tuple(filter(None, [naming(model, family_of(ready))[1]]))
    freeze(model, run.freeze or ())
    if found:
        events.append(Started(0, len(found.taken), found.new, found.left, notes))
    if ready.rows.cut or ready.unseen.cut:
        events.append(Shortened(0, ready.rows.cut, ready.unseen.cut))
    return model, events


def family_of(ready: Ready) -> str | None:
    """The family of the checkpoint that a run began from, or that this one began from, and so on."""
    if ready.start is None:
        return None
    origin = ready.start.origin
    return origin.config.get("family") if origin.family.model_type == "manyheads" else origin.family.model_type


def with_tokens(origin: Origin, ready: Ready) -> Origin:
    """What those who load the model must know of its tokens and classes; what the checkpoint says that it began from stands."""
    tokens, named = ready.tokens, {str(i): name for i, name in enumerate(ready.labels)}
    ids = {
        "pad_token_id": tokens.pad,
        "bos_token_id": tokens.begin,
        "eos_token_id": tokens.end,
        "decoder_start_token_id": tokens.opening[0],
    }
    came = {key: value for key, value in origin.config.items() if key != "problem_type" or not named}
    config = came | ids | ({key: value for key, value in came.items() if value is not None} if ready.start else {})
    config |= {"id2label": named, "label2id": {name: i for i, name in enumerate(ready.labels)}} if named else {}
    config |= {"family": known} if (known := family_of(ready)) else {}
    beside = {name: data for name, data in origin.beside.items() if name != "tokenizer.json" or ready.tokens.around is not None}
    return replace(origin, config=config, beside=beside)


def framed(ready: Ready) -> Any:
    """The tokenizer for those who load the model: it puts around a text what the objective put there."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(ready.tokenizer.to_str())
    if ready.tokens.around is None:
        ends = [("<s>", ready.tokens.begin), ("</s>", ready.tokens.end)]
        tokenizer.post_processor = processors.TemplateProcessing(single=ready.run.objective.frame, special_tokens=ends)
    return tokenizer


def begin(ready: Ready, folder: Path) -> None:
    """Writes down what the run is, or checks that it is the same."""
    path = folder / "run.toml"
    if path.exists():
        check_unchanged(read_toml(path), ready.run)
    path.write_text(to_toml(to_tree(ready.run)), encoding="utf-8")
    with (folder / "env.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(environment()) + "\n")


def forget_after(path: Path, step: int) -> None:
    """Leaves out what was written of steps that will be made again."""
    if path.exists():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= step]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def update(model: Model, changer: torch.optim.Optimizer, stream: Stream, ready: Ready, step: int) -> Stepped:
    """One change of the weights, from as many batches as it takes."""
    begun, run = time.perf_counter(), ready.run
    batches = [stream.next() for _ in range(run.train.accumulate)]
    count = sum(int((batch.wanted != NOTHING).sum()) for batch in batches)
    rate = run.optim.rate * run.optim.schedule.share(step, run.train.steps)
    for group in changer.param_groups:
        group["lr"] = rate
    model.train()
    loss = 0.0
    for i, batch in enumerate(batches):
        torch.manual_seed(mixed(run.seed, step, i))  # so that dropout needs no memory of its own
        score = run.objective.score(model, batch)
        (score.total / count).backward()
        loss += float(score.total.detach())
    gradient = gradient_length(model.parameters())
    finite = math.isfinite(loss) and bool(gradient.isfinite())
    if finite:
        if run.optim.clip:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), run.optim.clip, gradient)
        changer.step()
    changer.zero_grad(set_to_none=True)
    tokens = sum(batch.tokens for batch in batches)
    return Stepped(step, loss / max(1, count), rate, float(gradient), tokens, time.perf_counter() - begun, skipped=not finite)


def mixed(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


# ------------------------------------------------------------------------------------------------------- unseen rows


@torch.no_grad()
def evaluate(model: Model, ready: Ready) -> dict[str, float]:
    """Loss and accuracy on unseen rows; where whole answers are written, how many are exactly right."""
    model.eval()
    total = count = right = 0.0
    chance = np.random.default_rng(ready.run.seed)
    for rows in grouped(ready.unseen, ready.run.train.evaluate_rows, 64):
        score = ready.run.objective.score(model, ready.run.objective.batch(rows, ready.tokens, chance))
        total, count, right = total + float(score.total), count + score.count, right + score.right
    metrics = {"loss": total / max(1, count), "accuracy": right / max(1, count)}
    if ready.run.objective.fields == ("source", "target"):
        answers = [written for rows in grouped(ready.unseen, ready.run.train.evaluate_rows, 64) for written in exact(model, ready, rows)]
        metrics["exact"] = sum(answers) / max(1, len(answers))
    return metrics


def grouped(rows: Encoded, most: int, size: int) -> Iterator[list[Any]]:
    count = min(len(rows), most)
    for start in range(0, count, size):
        yield [rows[i] for i in range(start, min(start + size, count))]


def exact(model: Model, ready: Ready, rows: Sequence[Any]) -> list[bool]:
    """Which targets the model writes to the letter."""
    batch = ready.run.objective.batch(rows, ready.tokens, np.random.default_rng(0))
    prompt = torch.tensor([ready.tokens.opening] * len(rows))
    places = ready.spec.decoder.longest if ready.spec.decoder else None
    longest = min(max(len(target) for _, target in rows) + 2, LARGEST if places is None else places - prompt.shape[1] + 1)
    written = torch.stack(list(sample(model, prompt, batch.source, max_new=longest, rules=Rules(stop=(ready.tokens.end,)))), dim=1).tolist()
    found = [row[: row.index(ready.tokens.end)] if ready.tokens.end in row else row for row in written]
    return [row == target.tolist() for row, (_, target) in zip(found, rows, strict=True)]


def reached(ready: Ready, metrics: dict[str, float]) -> bool:
    goal = ready.run.train.goal
    if goal is None or goal.metric not in metrics:
        return False
    return metrics[goal.metric] <= goal.reach if goal.metric == "loss" else metrics[goal.metric] >= goal.reach
