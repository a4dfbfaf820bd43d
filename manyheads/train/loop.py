"""The loop: batches in an order that the seed alone decides, updates, looks at unseen rows, checkpoints. It yields what happens."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from manyheads.convert.files import DiskFullError
from manyheads.model.build import Model, usable
from manyheads.objective.score import NOTHING, Batch
from manyheads.objective.shaping import counts_of, shaped, total
from manyheads.train.average import averaged, follow, taken_up
from manyheads.train.board import following
from manyheads.train.checkpoint import NotFiniteError, chosen, mend, newest, restore, set_aside, size_of, skipped, steps
from manyheads.train.events import Changed, Ended, Evaluated, Event, Resumed, Saved, SaveFailed, Stepped, Warned
from manyheads.train.files import free
from manyheads.train.folder import contents, differences, write_down
from manyheads.train.lock import check_place, locked
from manyheads.train.log import Log
from manyheads.train.look import Leaving, Wish, evaluate, lower_precision
from manyheads.train.model import first_model, writer
from manyheads.train.optim import gradient_length
from manyheads.train.run import Ready, RunError
from manyheads.train.start import digest
from manyheads.train.state import State
from manyheads.train.stream import Stream

MOST_SKIPPED = 10  # updates in a row that were NaN or infinite, after which a run stops
MOST_FAILED = 3  # saves in a row that failed, after which it does too


class MemoryFullError(RunError):
    """A run that needs more memory than there is."""

    exit_code = 5


class DivergedError(RunError):
    """A run whose loss, gradients or weights have become NaN or infinite."""

    exit_code = 1


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
    data, places = contents(ready), folder / "checkpoints"
    changed = differences(ready, data, folder, overridden)
    with enough_memory("the model"):
        model, begun = first_model(ready, device)
        changer = ready.run.optim.build(model)
    state, resumed = taken_from(places, resume, ready, model, changer)
    write_down(ready, data, folder, device)
    if resumed is None:
        log.forget_after(-1, -1)  # of a start that came to no checkpoint
        yield from begun
    else:
        log.forget_after(state.step, state.looked)
        if any(one.field == "train.evaluate_rows" for one in changed):
            state.forget_best()  # looks at other rows are not compared
        lost = mend(places, state, ready.run.train.goal)
        yield resumed
        if lost:
            yield Warned(state.step, lost)
    if changed:
        yield Changed(state.step, tuple(changed))
    if (fits := free(folder) / size_of(places, model)) < 2:
        said = f"the disk of {folder} has room for {fits:.1f} more checkpoints"
        if fits < 1:
            raise DiskFullError(f"{said}; make room, or take another --output")
        yield Warned(state.step, f"{said}, and a run needs two at the least")
    yield from learn(ready, model, changer, state, Keeper(writer(ready, model, changer, places), places, still_ours, replace(state)), wish)


def taken_from(
    places: Path, resume: str, ready: Ready, model: Model, changer: torch.optim.Optimizer
) -> tuple[State, Resumed | None]:  # fmt: skip
    """Where the run is: at its beginning, or at one of its checkpoints, whose weights and memory are taken."""
    start = digest(ready.start) if ready.start else ""
    named = None if resume in ("auto", "never") else chosen(places, Path(resume))
    checkpoint, wrong = (named, []) if named else newest(places)
    state = State(start=start) if checkpoint is None else restore(checkpoint, model, changer)
    taken_up(changer, ready.run.optim.average)
    if state.start != start:
        raise RunError(f"this run began from {ready.run.start}, which is not what it was; put it back, or take another --output")
    if named:
        wrong = set_aside(places, named)
    return state, None if checkpoint is None else Resumed(state.step, tuple(wrong))


def learn(ready: Ready, model: Model, changer: torch.optim.Optimizer, state: State, keeper: Keeper, wish: Wish) -> Iterator[Event]:
    """Updates, looks and checkpoints, until the last step, a goal, or a wish to stop."""
    how, goal, stream = ready.run.train, ready.run.train.goal, Stream(ready, state)

    def due() -> bool:
        return state.looked != state.step and (state.step % how.evaluate_every == 0 or state.step == how.steps)

    reason, better = state.verdict(goal) or wish(), False
    while reason is None and (state.step < how.steps or due()):
        better = False
        if not due():  # otherwise a signal cut the last look short
            with enough_memory(f"batches of {how.tokens:,} tokens"):
                event = update(model, changer, stream, ready, state)
            yield event
            check_numbers(state, keeper.places)
        if due() and (metrics := one_look(model, changer, ready, wish)):
            better = state.look(metrics, goal)
            yield Evaluated(state.step, metrics)
        reason = state.verdict(goal) or wish()
        if better or (state.step % how.save_every == 0 and not state.skipped):
            yield keeper.keep(state, best=better)
            keeper.check(MOST_FAILED)
            reason = reason or wish()
    if keeper.saved != state:
        yield keeper.keep(state, best=better)
        keeper.check(1)
        if keeper.saved != state:
            raise DivergedError(f"the weights at step {state.step:,} are NaN or infinite; what stands is of step {keeper.saved.step:,}")
    yield Ended(state.step, reason or "steps")


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
        """One more checkpoint. The state knows of a best one only when it is there: otherwise it would wait for a better than is kept."""
        kept = state.as_best() if best else replace(state)
        try:
            self.still_ours()
            path = self.write(kept, best=best)
        except OSError as error:
            self.failures, self.said = self.failures + 1, f"cannot save in {self.places}: {error.strerror or error}"
            return SaveFailed(state.step, self.said, self.failures)
        except NotFiniteError as error:
            return Warned(state.step, f"no checkpoint is made of these weights: {error}")
        self.saved, self.failures = kept, 0
        state.best, state.best_step = kept.best, kept.best_step
        return Saved(state.step, str(path))

    def check(self, most: int) -> None:
        """Ends a run that learns what it cannot keep."""
        if self.failures >= most:
            times = f" ({self.failures} times in a row)" if self.failures > 1 else ""
            raise DiskFullError(f"{self.said}{times}; what was learned after step {self.saved.step:,} is lost")


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


def one_look(model: Model, changer: torch.optim.Optimizer, ready: Ready, wish: Wish) -> dict[str, float] | None:
    """A look at unseen rows; nothing if somebody asked for an end meanwhile."""
    try:
        with enough_memory("a look at unseen rows"), averaged(changer):
            return evaluate(model, ready, wish)
    except Leaving:
        return None


def check_numbers(state: State, places: Path) -> None:
    """Stops a run whose updates are NaN or infinite and remain so; no checkpoint was made of it since."""
    if state.skipped >= MOST_SKIPPED:
        last = next((f"; the last good checkpoint is {path}" for path in steps(places) if not skipped(path)), "")
        said = f"{state.skipped} updates in a row were NaN or infinite (the last at step {state.step})"
        raise DivergedError(f"{said}: lower optim.rate or look at the rows that metrics.jsonl names{last}")


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
    loss, counts = 0.0, counts_of(run.shaping, model, batches)
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


def mixed(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
