"""Training as a person watches it: a line that moves, signals that are heard, and what became of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from manyheads.metrics.figures import SHARES
from manyheads.model.build import device_for
from manyheads.model.size import readable
from manyheads.spec import Tree, one_line, quoted, to_tree
from manyheads.train.events import Changed, Ended, Evaluated, Event, Resumed, Saved, SaveFailed, Shortened, Started, Stepped, Warned
from manyheads.train.folder import Change, ChangedRunError, contents, differences
from manyheads.train.forecast import check_room, duration, epoch_of, needs_of, pace_of, tried_compiled
from manyheads.train.lock import check_place
from manyheads.train.loop import train
from manyheads.train.run import Ready, RunSpec, made_ready

EXIT = {"steps": 0, "goal": 0, "patience": 0, "interrupted": 130, "terminated": 75}
LONG = 1200.0  # seconds of a run for which compiling is tried out beforehand
EVERY = 10.0  # seconds between lines where there is no terminal


class Heard:
    """What signals asked for. The first asks to finish the step and save, the second stops at once.

    Until the run first asks there is nothing to finish or to save, and the first stops at once too: data that are made ready
    are made ready again. SIGTERM then means the same as later: run again.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.asked = False

    def __call__(self) -> str | None:
        self.asked = True
        return self.reason

    def interrupted(self, *_: Any) -> None:
        if self.reason is not None or not self.asked:
            raise KeyboardInterrupt
        self.reason = "interrupted"

    def terminated(self, *_: Any) -> None:
        if self.reason is not None or not self.asked:
            raise SystemExit(143 if self.asked else EXIT["terminated"])
        self.reason = "terminated"


@contextmanager
def heard() -> Iterator[Heard]:
    wish = Heard()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, wish.interrupted)
    signal.signal(signal.SIGTERM, wish.terminated)
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def trained(
    run: RunSpec, folder: Path, *, quiet: bool = False, device: str = "auto", resume: str = "auto", overridden: Sequence[str] = ()
) -> Ended:
    """Makes the data ready and runs to the end. What can be known to be wrong before is said before; signals are heard throughout."""
    with heard() as wish:
        where = device_for(device)
        check_place(folder, resume)
        ready = made_ready(run)
        if not quiet:
            print(f"{ready.corpus.about}\n{'no GPU here: ' if device == 'auto' and where.type == 'cpu' else ''}on {where}", file=sys.stderr)
        return watched(ready, folder, quiet=quiet, wish=wish, device=where, resume=resume, overridden=overridden)


def watched(
    ready: Ready, folder: Path, *, device: torch.device | str = "cpu", quiet: bool = False, wish: Heard | None = None, **options: Any
) -> Ended:  # fmt: skip
    """Runs to the end, telling on standard error how it goes; refused where there is no room for it."""
    check_room(needs_of(ready, folder, device))
    with nullcontext(wish) if wish else heard() as asked, Display(ready, quiet=quiet) as shown:
        try:
            for event in train(ready, folder, wish=asked, device=device, **options):
                shown.tell(event)
        except ChangedRunError as error:
            shown.table(error.changes)
            raise
    assert isinstance(event, Ended)
    return event


# -------------------------------------------------------------------------------------------------- before it starts


def foreseen(ready: Ready, folder: Path | None, *, device: str = "auto", resume: str = "auto", overridden: Sequence[str] = ()) -> Tree:
    """What the run will take, as plain data; nothing is written. Refused where it would be."""
    if folder is not None:
        check_place(folder, resume)
        differences(ready, contents(ready), folder, overridden)
    where = device_for(device)
    needs = needs_of(ready, folder, where)
    check_room(needs)
    epoch, how = epoch_of(ready), ready.run.train
    with heard() as wish:
        pace = pace_of(ready, where)
        if duration(ready, pace) > LONG and not how.compile and not wish():
            pace = tried_compiled(ready, pace, where)
    if wish():
        raise KeyboardInterrupt
    run = to_tree(ready.run) | {"model": to_tree(ready.spec)}
    return {
        "schema": 1, "about": ready.corpus.about, "shape": ready.spec.shape, "needs": asdict(needs), "epoch": asdict(epoch),
        "steps": how.steps, "epochs": how.steps * how.accumulate / epoch.batches, "pace": asdict(pace), "seconds": duration(ready, pace),
        "device": str(where), "run": run,
    }  # fmt: skip


def print_foreseen(found: Tree, console: Any) -> None:
    needs, epoch, pace = found["needs"], found["epoch"], found["pace"]
    rows, length, source = needs["batch"]
    free, room = needs["memory_free"], needs["disk_free"]
    parts = f"weights {readable(needs['weights'])}, gradients {readable(needs['gradients'])}, moments {readable(needs['moments'])}, "
    parts += f"activations {readable(needs['activations'])} for {rows:,} × {length:,}{f' from {source:,}' if source else ''}"
    counted = "" if epoch["looked_at"] == epoch["batches"] else f" (by {epoch['looked_at']:,} of them)"
    lines = {
        "data": found["about"],
        "model": f"{found['shape']}, {needs['parameters']:,} parameters",
        "memory": f"about {readable(needs['memory'])}{f' of {readable(free)} free' if free is not None else ''}: {parts}",
        "disk": f"{readable(needs['checkpoint'])} a checkpoint, {readable(needs['disk'])} in all"
        + (f", {readable(room)} free" if room is not None else ""),
        "an epoch": f"{epoch['rows']:,} rows, {epoch['batches']:,} batches, {epoch['tokens']:,} tokens and {epoch['padding']:.1%} "
        f"padding{counted}",
        "steps": f"{found['steps']:,}, which is {found['epochs']:.3g} epochs",
        "time": f"about {spoken(found['seconds'])} on this machine: {1000 * pace['step']:,.0f} ms a step (mean of {pace['updates']}), "
        f"{spoken(pace['evaluation'])} a look at unseen rows",
    }
    if pace["compiled"]:
        saved = found["steps"] * (pace["step"] - pace["compiled"]) - pace["compiling"]
        lines["compile"] = f"{1000 * pace['compiled']:,.0f} ms a step after {spoken(pace['compiling'])} of compiling: " + (
            f"-s train.compile=true saves {spoken(saved)}" if saved > 0 else "it does not pay"
        )
    for name, said in lines.items():
        console.print(f"{name:<9} {said}", highlight=False, markup=False)


def spoken(seconds: float) -> str:
    """A time as people say it."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} seconds"


class Display:
    """A bar with loss, exact answers, tokens a second and the time left; single lines where there is no terminal."""

    def __init__(self, ready: Ready, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.steps, self.quiet, self.console = ready.run.train.steps, quiet, Console(stderr=True)
        self.live = sys.stderr.isatty() and not self.console.is_dumb_terminal and not quiet
        columns = (
            TextColumn("step {task.completed:,} of {task.total:,}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self.bar = Progress(*columns, console=self.console, disable=not self.live, transient=True)
        self.task = self.bar.add_task("", total=self.steps, said="")
        self.loss, self.speed, self.metrics, self.waited = 0.0, 0.0, dict[str, float](), EVERY
        self.terms = dict[str, float]()

    def __enter__(self) -> Display:
        self.bar.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.bar.__exit__(*raised)

    def tell(self, event: Event) -> None:
        if isinstance(event, Stepped):
            share = 0.05 if self.speed else 1.0
            if not event.skipped:
                self.loss += (share if self.loss else 1.0) * (event.loss - self.loss)
                self.terms = {name: (1 - share) * self.terms.get(name, 0.0) + share * value for name, value in event.terms.items()}
            self.speed += share * (event.tokens / max(event.seconds, 1e-9) - self.speed)
            self.waited += event.seconds
            self.bar.update(self.task, completed=event.step, said=self.said())
            if not self.live and not self.quiet and self.waited >= EVERY:
                self.waited = 0.0
                self.line(f"step {event.step:,} of {self.steps:,} · {self.said()}")
            if event.skipped:
                self.line(f"step {event.step:,}: the loss or its gradient was NaN or infinite; the update was left out", wrong=True)
        elif isinstance(event, Evaluated):
            self.metrics = event.metrics
            self.line(f"step {event.step:,} · unseen rows: {named(event.metrics)}")
        elif isinstance(event, Changed):
            self.table(event.fields)
        elif isinstance(event, SaveFailed):
            self.line(f"step {event.step:,}: {event.said}; the checkpoints before are untouched, and it is tried again", wrong=True)
        elif isinstance(event, Warned):
            self.line(f"step {event.step:,}: {event.said}", wrong=True)
        elif isinstance(event, Saved):
            if event.step == self.steps:
                self.line(f"saved {event.path}")
        else:
            self.at_the_ends(event)

    def at_the_ends(self, event: Event) -> None:
        """What there is to know before the first step, and after the last."""
        if isinstance(event, Started):
            self.line(f"{event.taken} weights taken from the checkpoint")
            for what, names in (("not in the checkpoint, begun by the seed", event.new), ("left out", event.left)):
                if names:
                    self.line(f"{what}: {few(names)}")
            for note in event.notes:
                self.line(note)
        elif isinstance(event, Shortened):
            self.line(f"too long, and cut: {event.rows:,} rows to learn from, {event.unseen:,} unseen ones")
        elif isinstance(event, Resumed):
            for wrong in event.wrong:
                self.line(f"passed over: {wrong}", wrong=True)
            self.line(f"going on from step {event.step:,}")
        elif isinstance(event, Ended) and not self.speed and not EXIT[event.reason]:
            self.line("nothing was left to do: more train.steps, or another goal, go on with it")

    def table(self, changes: Sequence[Change]) -> None:
        """What differs from the run before: field, was, is."""
        rows = [("field", "was", "is"), *((one.field, brief(one.old), brief(one.new)) for one in changes)]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        for name, old, new in rows:
            self.line(f"  {name:<{widths[0]}}  {old:<{widths[1]}}  {new}", wrong=True)

    def said(self) -> str:
        exact = f" · exact {self.metrics['exact']:.1%}" if "exact" in self.metrics else ""
        terms = "".join(f" · {name} {value:.3f}" for name, value in self.terms.items())
        return f"loss {self.loss:.3f}{terms}{exact} · {self.speed:,.0f} tokens/s"

    def line(self, text: str, *, wrong: bool = False) -> None:
        if wrong or not self.quiet:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)


def brief(value: Any) -> str:
    return "–" if value is None else one_line(quoted(value))


def named(metrics: dict[str, float]) -> str:
    return " · ".join(f"{name} {value:.1%}" if name in SHARES else f"{name} {value:.3f}" for name, value in metrics.items())


def few(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
