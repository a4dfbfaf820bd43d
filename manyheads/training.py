"""Training as a person watches it: a line that moves, signals that are heard, and what became of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from manyheads.model.build import usable
from manyheads.spec import one_line, quoted
from manyheads.train.folder import Change, ChangedRunError, check_place
from manyheads.train.loop import Changed, Ended, Evaluated, Event, Resumed, Saved, SaveFailed, Stepped, Warned, train
from manyheads.train.run import Ready, RunSpec, made_ready

EXIT = {"steps": 0, "goal": 0, "patience": 0, "interrupted": 130, "terminated": 75}
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


def device_for(name: str) -> torch.device:
    """A device by its name; auto takes a GPU where there is one."""
    if name != "auto":
        return usable(name)
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def watched(ready: Ready, folder: Path, *, quiet: bool = False, wish: Heard | None = None, **options: Any) -> Ended:
    """Runs to the end, telling on standard error how it goes."""
    with nullcontext(wish) if wish else heard() as asked, Display(ready, quiet=quiet) as shown:
        try:
            for event in train(ready, folder, wish=asked, **options):
                shown.tell(event)
        except ChangedRunError as error:
            shown.table(error.changes)
            raise
    assert isinstance(event, Ended)
    return event


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

    def __enter__(self) -> Display:
        self.bar.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.bar.__exit__(*raised)

    def tell(self, event: Event) -> None:
        if isinstance(event, Stepped):
            share = 0.05 if self.speed else 1.0
            self.loss += share * (event.loss - self.loss)
            self.speed += share * (event.tokens / max(event.seconds, 1e-9) - self.speed)
            self.waited += event.seconds
            self.bar.update(self.task, completed=event.step, said=self.said())
            if not self.live and not self.quiet and self.waited >= EVERY:
                self.waited = 0.0
                self.line(f"step {event.step:,} of {self.steps:,} · {self.said()}")
            if event.skipped:
                self.line(f"step {event.step:,}: the loss or its gradient was no number; the update was left out", wrong=True)
        elif isinstance(event, Evaluated):
            self.metrics = event.metrics
            self.line(f"step {event.step:,} · unseen rows: {named(event.metrics)}")
        elif isinstance(event, Resumed):
            for wrong in event.wrong:
                self.line(f"passed over: {wrong}", wrong=True)
            self.line(f"going on from step {event.step:,}")
        elif isinstance(event, Changed):
            self.table(event.fields)
        elif isinstance(event, SaveFailed):
            self.line(f"step {event.step:,}: {event.said}; the checkpoints before are untouched, and it is tried again", wrong=True)
        elif isinstance(event, Warned):
            self.line(f"step {event.step:,}: {event.said}", wrong=True)
        elif isinstance(event, Saved) and event.step == self.steps:
            self.line(f"saved {event.path}")

    def table(self, changes: Sequence[Change]) -> None:
        """What differs from the run before: field, was, is."""
        rows = [("field", "was", "is"), *((one.field, brief(one.old), brief(one.new)) for one in changes)]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        for name, old, new in rows:
            self.line(f"  {name:<{widths[0]}}  {old:<{widths[1]}}  {new}", wrong=True)

    def said(self) -> str:
        exact = f" · exact {self.metrics['exact']:.1%}" if "exact" in self.metrics else ""
        return f"loss {self.loss:.3f}{exact} · {self.speed:,.0f} tokens/s"

    def line(self, text: str, *, wrong: bool = False) -> None:
        if wrong or not self.quiet:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)


def brief(value: Any) -> str:
    return "–" if value is None else one_line(quoted(value))


def named(metrics: dict[str, float]) -> str:
    return " · ".join(f"{name} {value:.3f}" if name == "loss" else f"{name} {value:.1%}" for name, value in metrics.items())
