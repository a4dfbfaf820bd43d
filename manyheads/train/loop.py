"""The loop: batches in an order that the seed alone decides, updates, looks at unseen rows, checkpoints. It yields what happens."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from dataclasses import field as made
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyheads.convert.files import DiskFullError
from manyheads.convert.folder import Origin, described
from manyheads.data.prepared import Ids
from manyheads.generate.sample import Rules, sample
from manyheads.model.build import Model, build, usable
from manyheads.model.transformer import Transformer
from manyheads.objective.score import NOTHING, Batch
from manyheads.objective.shaping import asked, shaped, total
from manyheads.spec import LARGEST, Tree
from manyheads.train.average import averaged, follow, swap
from manyheads.train.board import following
from manyheads.train.checkpoint import NotFiniteError, chosen, mend, newest, restore, save, size_of, skipped, steps
from manyheads.train.folder import Change, Log, begin, check_place, free, locked
from manyheads.train.lora import adapt, naming, write_adapter
from manyheads.train.optim import gradient_length
from manyheads.train.run import Ready, RunError
from manyheads.train.start import digest, freeze, take
from manyheads.train.state import State
from manyheads.train.stream import Order, Stream

MOST_SKIPPED = 10  # updates in a row that were no numbers, after which a run stops
AT_ONCE = 64  # unseen rows that are looked at together
MOST_FAILED = 3  # saves in a row that failed, after which it does too


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
    terms: dict[str, float] = made(default_factory=dict)
    rows: tuple[int, ...] = ()  # those of the update, where it was left out


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
class SaveFailed:
    """A checkpoint could not be written. Those before are untouched; the run goes on, and the next is tried in its turn."""

    step: int
    said: str
    times: int  # in a row


@dataclass(frozen=True)
class Changed:
    """A run goes on with fields that were others before: each with its old and new value."""

    step: int
    fields: tuple[Change, ...]


@dataclass(frozen=True)
class Warned:
    """Something is not as it should be, and the run goes on."""

    step: int
    said: str


@dataclass(frozen=True)
class Ended:
    """Why a run ended: its last step, its goal, its patience, or somebody asked."""

    step: int
    reason: str


Event = Started | Shortened | Resumed | Stepped | Evaluated | Saved | SaveFailed | Changed | Warned | Ended
Wish = Callable[[], str | None]  # asked between any two pieces of work: a reason to stop, or none


class DivergedError(RunError):
    """A run whose numbers are none any more."""

    exit_code = 1


class MemoryFullError(RunError):
    """A run that needs more memory than there is."""

    exit_code = 5


class Leaving(Exception):  # noqa: N818
    """Somebody asked for an end in the middle of a look, which is made again by the next start."""


def train(
    ready: Ready, folder: Path, *, wish: Wish = lambda: None, device: torch.device | str = "cpu", resume: str = "auto",
    overridden: Sequence[str] = (),
) -> Iterator[Event]:  # fmt: skip
    """Trains, or goes on where the folder says it stopped.

    `resume` is auto, never, or one of the run's checkpoints. A run that was changed is refused, but for fields in `overridden`.
    """
    check_place(folder, resume)
    with locked(folder) as still_ours, following(ready.run.train, folder) as log:
        for event in run_in(ready, folder, log, wish, usable(device), resume, overridden, still_ours):
            if said := log.add({"event": type(event).__name__.lower()} | asdict(event)):
                yield Warned(event.step, said)
            yield event


def run_in(
    ready: Ready, folder: Path, log: Log, wish: Wish, device: torch.device, resume: str, overridden: Sequence[str],
    still_ours: Callable[[], None],
) -> Iterator[Event]:  # fmt: skip
    run, how, places = ready.run, ready.run.train, folder / "checkpoints"
    changed = begin(ready, folder, device=device, overridden=overridden)
    with enough_memory("the model"):
        model, begun = first_model(ready, device)
        changer = run.optim.build(model)
    start = digest(ready.start) if ready.start else ""
    checkpoint, wrong = newest(places) if resume in ("auto", "never") else chosen(places, Path(resume))
    state = State(start=start) if checkpoint is None else restore(checkpoint, model, changer)
    swap(changer)  # a checkpoint has the means where the model has its weights
    if state.start != start:
        raise RunError(f"this run began from {run.start}, which is not what it was; put it back, or take another --output")
    if checkpoint is None:
        yield from begun
    else:
        log.forget_after(state.step, state.looked)
        mend(places, state)
        yield Resumed(state.step, tuple(wrong))
    if changed:
        yield Changed(state.step, tuple(changed))
    if (fits := free(folder) / size_of(places, model)) < 2:
        said = f"the disk of {folder} has room for {fits:.1f} more checkpoints"
        if fits < 1:
            raise DiskFullError(f"{said}; make room, or take another --output")
        yield Warned(state.step, f"{said}, and a run needs two at the least")
    stream, goal = Stream(ready, state), how.goal
    keeper = Keeper(writer(ready, model, changer, places), places, still_ours, replace(state))

    def due() -> bool:
        return state.looked != state.step and (state.step % how.evaluate_every == 0 or state.step == how.steps)

    reason = state.verdict(goal) or wish()
    while reason is None and (state.step < how.steps or due()):
        better = False
        if not due():  # otherwise a signal cut the last look short
            with enough_memory(f"batches of {how.tokens:,} tokens"):
                event = update(model, changer, stream, ready, state)
            yield event
            check_numbers(state, places)
        if due() and (metrics := looked(model, changer, ready, wish)):
            better = state.look(metrics, goal)
            yield Evaluated(state.step, metrics)
        reason = state.verdict(goal) or wish()
        if better or (state.step % how.save_every == 0 and not state.skipped):
            yield keeper.keep(state, best=better)
            keeper.check(MOST_FAILED)
            reason = reason or wish()
    if keeper.saved != state:
        yield keeper.keep(state)
        keeper.check(1)
        if keeper.saved != state:
            raise DivergedError(f"the weights at step {state.step:,} are no numbers; what stands is of step {keeper.saved.step:,}")
    yield Ended(state.step, reason or "steps")


def writer(ready: Ready, model: Model, changer: torch.optim.Optimizer, places: Path) -> Callable[..., Path]:
    """What writes a checkpoint of a run, with the tokenizer and, of low ranks, what PEFT reads."""
    run = ready.run
    origin = with_tokens(described(model, ready.start.origin if ready.start else None), ready)
    names = naming(model, family_of(ready))[0] if run.lora else {}

    def also(draft: Path) -> None:
        if run.lora:
            write_adapter(draft, model, run.lora, str(run.start), names)

    held: Tree = {"model": model, "optimiser": changer, "origin": origin, "tokenizer": framed(ready), "keep": run.train.keep}

    def write(state: State, *, best: bool) -> Path:
        with averaged(changer):
            return save(places, state, best=best, also=also, **held)

    return write


@dataclass
class Keeper:
    """Makes checkpoints, and knows which was the last and how many failed since."""

    write: Callable[..., Path]
    places: Path
    still_ours: Callable[[], None]
    saved: State
    failures: int = 0
    said: str = ""

    def keep(self, state: State, *, best: bool = False) -> Saved | SaveFailed | Warned:
        try:
            self.still_ours()
            path = self.write(state, best=best)
        except OSError as error:
            self.failures, self.said = self.failures + 1, f"cannot save in {self.places}: {error.strerror or error}"
            return SaveFailed(state.step, self.said, self.failures)
        except NotFiniteError as error:
            return Warned(state.step, f"no checkpoint is made of these weights: {error}")
        self.saved, self.failures = replace(state), 0
        return Saved(state.step, str(path))

    def check(self, most: int) -> None:
        """Ends a run that learns what it cannot keep."""
        if self.failures >= most:
            times = f" ({self.failures} times in a row)" if self.failures > 1 else ""
            raise DiskFullError(f"{self.said}{times}; what was learned after step {self.saved.step:,} is lost")


def check_numbers(state: State, places: Path) -> None:
    """Stops a run that gives no numbers any more; no checkpoint was made of it since."""
    if state.skipped >= MOST_SKIPPED:
        last = next((f"; the last good checkpoint is {path}" for path in steps(places) if not skipped(path)), "")
        said = f"{state.skipped} updates in a row were no numbers, the last at step {state.step}"
        raise DivergedError(f"{said}: lower optim.rate or look at the rows that metrics.jsonl names{last}")


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Says in one sentence that there is not."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not full and not re.search("not enough memory|can't allocate memory|out of memory", str(error)):
            raise
        advice = "lower train.tokens and raise train.accumulate, which keeps updates as large, or make the model smaller"
        raise MemoryFullError(f"the memory is not enough for {what}: {advice}") from None


def first_model(ready: Ready, device: torch.device | str = "cpu") -> tuple[Model, list[Event]]:
    """The model before the first step, and what there is to know of it."""
    run, events = ready.run, list[Event]()
    model = build(ready.spec, seed=run.seed)
    found = take(model, ready.start, str(run.start)) if ready.start else None
    notes: tuple[str, ...] = ()
    if found and run.lora:
        adapt(model, run.lora, seed=run.seed, new=found.new)
        notes = tuple(filter(None, [naming(model, family_of(ready))[1]]))
    freeze(model, run.freeze or ())
    if run.train.compile:
        compiled(model)
    if found:
        events.append(Started(0, len(found.taken), found.new, found.left, notes))
    if any(ready.cut):
        events.append(Shortened(0, *ready.cut))
    return model.to(device), events


def compiled(model: Model) -> None:
    """Compiles what is the same many times: the layers, for batches of any size. A recurrent network has none."""
    for tower in (model.encoder, model.decoder) if isinstance(model, Transformer) else ():
        for layer in tower.layers if tower else ():
            layer.compile(dynamic=True)


def family_of(ready: Ready) -> str | None:
    """The family of the checkpoint that a run began from, or that this one began from, and so on."""
    if ready.start is None:
        return None
    origin = ready.start.origin
    return origin.config.get("family") if origin.family.model_type == "manyheads" else origin.family.model_type


def with_tokens(origin: Origin, ready: Ready) -> Origin:
    """What those who load the model must know of its tokens and classes; what the checkpoint says that it began from stands."""
    tokens, named = ready.tokens, {str(i): name for i, name in enumerate(ready.labels)}
    roles = {"pad": tokens.pad, "bos": tokens.begin, "eos": tokens.end, "decoder_start": tokens.opening[0]}
    ids = {f"{role}_token_id": token for role, token in roles.items()}
    came = {key: value for key, value in origin.config.items() if key != "problem_type" or not named}
    config = came | ({} if ready.tokenizer is None else ids)
    config |= {key: value for key, value in came.items() if value is not None} if ready.start else {}
    config |= {"id2label": named, "label2id": {name: i for i, name in enumerate(ready.labels)}} if named else {}
    config |= {"family": known} if (known := family_of(ready)) else {}
    if tokens.around is None:  # the tokenizer is one of ours, and in texts special tokens are none
        beside = origin.beside | {"tokenizer_config.json": b'{"split_special_tokens": true}\n'}
        return replace(origin, config=config, beside={name: data for name, data in beside.items() if name != "tokenizer.json"})
    return replace(origin, config=config)


def framed(ready: Ready) -> Any:
    """The tokenizer for those who load the model: it puts around a text what the objective put there; none where there is none."""
    if ready.tokenizer is None:
        return None
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(ready.tokenizer.to_str())
    if ready.tokens.around is None:
        ends = [("<s>", ready.tokens.begin), ("</s>", ready.tokens.end)]
        tokenizer.post_processor = processors.TemplateProcessing(single=ready.run.objective.frame, special_tokens=ends)
    return tokenizer


def update(model: Model, changer: torch.optim.Optimizer, stream: Stream, ready: Ready, state: State) -> Stepped:
    """One change of the weights, from as many batches as it takes."""
    begun, run, device = time.perf_counter(), ready.run, next(model.parameters()).device
    state.step += 1
    step, batches, rows = state.step, list[Batch](), list[int]()
    for _ in range(run.train.accumulate):
        batches.append(stream.next().to(device))
        rows += stream.rows
    count = sum(int((batch.wanted != NOTHING).sum()) for batch in batches)
    rate = run.optim.rate * run.optim.schedule.share(step, run.train.steps)
    for group in changer.param_groups:
        group["lr"] = rate
    model.train()
    loss, counts = 0.0, asked(run.shaping, model, batches)
    terms = dict.fromkeys(counts, 0.0)
    for i, batch in enumerate(batches):
        torch.manual_seed(mixed(run.seed, step, i))  # so that dropout needs no memory of its own
        with lower_precision(device):
            score = shaped(run.objective, run.shaping, model, batch)
        total(score, count, run.shaping, counts).backward()
        loss += float(score.total.detach())
        for name, term in score.terms.items():
            terms[name] += float(term.total.detach()) / max(1, counts[name])
    gradient = gradient_length(model.parameters())
    finite = math.isfinite(loss) and bool(gradient.isfinite())
    if finite:
        if run.optim.clip:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), run.optim.clip, gradient)
        changer.step()
        if run.optim.average:
            follow(changer, run.optim.average, step)
    changer.zero_grad(set_to_none=True)
    tokens = sum(batch.tokens for batch in batches)
    state.tokens, state.rows, state.skipped = state.tokens + tokens, state.rows + len(rows), 0 if finite else state.skipped + 1
    spent, named = time.perf_counter() - begun, () if finite else tuple(rows)
    return Stepped(step, loss / max(1, count), rate, float(gradient), tokens, spent, not finite, terms, named)


def lower_precision(device: torch.device) -> torch.autocast:
    """Matrices in 16 bits where a GPU multiplies them faster; float32 on a CPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def mixed(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


# ------------------------------------------------------------------------------------------------------- unseen rows


@torch.no_grad()
def evaluate(model: Model, ready: Ready, wish: Wish = lambda: None) -> dict[str, float]:
    """Loss on unseen rows; accuracy where a guess can be right; where whole answers are written, how many are exactly right."""
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
            score = ready.run.objective.score(model, batch)
        total, count = total + float(score.total), count + score.count
        right.append(score.right)
    metrics = {"loss": total / max(1, count)}
    if None not in right:
        metrics["accuracy"] = sum(filter(None, right)) / max(1, count)
    if ready.run.objective.fields == ("source", "target"):
        groups = grouped(ready.unseen, ready.run.train.evaluate_rows, AT_ONCE, wish)
        answers = [written for rows in groups for written in exact(model, ready, rows)]
        metrics["exact"] = sum(answers) / max(1, len(answers))
    return metrics


def looked(model: Model, changer: torch.optim.Optimizer, ready: Ready, wish: Wish) -> dict[str, float] | None:
    """A look at unseen rows; nothing if somebody asked for an end meanwhile."""
    try:
        with enough_memory(f"a look at unseen rows, {AT_ONCE} at once"), averaged(changer):
            return evaluate(model, ready, wish)
    except Leaving:
        return None


def grouped(rows: Ids, most: int, size: int, wish: Wish) -> Iterator[list[Any]]:
    count = min(len(rows), most)
    for start in range(0, count, size):
        if wish():
            raise Leaving
        yield [rows[i] for i in range(start, min(start + size, count))]


def exact(model: Model, ready: Ready, rows: Sequence[Any]) -> list[bool]:
    """Which targets the model writes to the letter."""
    device = next(model.parameters()).device
    batch = ready.run.objective.batch(rows, ready.tokens, np.random.default_rng(0)).to(device)
    prompt = torch.tensor([ready.tokens.opening] * len(rows), device=device)
    places = ready.spec.decoder.longest if ready.spec.decoder else None
    longest = min(max(len(target) for _, target in rows) + 2, LARGEST if places is None else places - prompt.shape[1] + 1)
    written = torch.stack(list(sample(model, prompt, batch.source, max_new=longest, rules=Rules(stop=(ready.tokens.end,)))), dim=1).tolist()
    found = [row[: row.index(ready.tokens.end)] if ready.tokens.end in row else row for row in written]
    return [row == target.tolist() for row, (_, target) in zip(found, rows, strict=True)]
