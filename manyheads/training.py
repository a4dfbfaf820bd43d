"""Training as a person watches it: a line that moves, signals that are heard, and what became of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manyheads.train.loop import Ended, Evaluated, Event, Resumed, Saved, Shortened, Started, Stepped, train
from manyheads.train.run import Ready

EXIT = {"steps": 0, "goal": 0, "interrupted": 130, "terminated": 75}
EVERY = 10.0  # seconds between lines where there is no terminal


class Wish:
    """What a signal asked for. The first Ctrl-C asks to finish the step and save, the second stops at once."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def __call__(self) -> str | None:
        return self.reason

    def interrupted(self, *_: Any) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.reason = "interrupted"

    def terminated(self, *_: Any) -> None:
        if self.reason is not None:
            raise SystemExit(143)
        self.reason = "terminated"


@contextmanager
def heard() -> Iterator[Wish]:
    wish = Wish()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, wish.interrupted)
    signal.signal(signal.SIGTERM, wish.terminated)
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watched(ready: Ready, folder: Path, *, quiet: bool = False) -> Ended:
    """Runs to the end, telling on standard error how it goes."""
    shown = Display(ready, quiet=quiet)
    with heard() as wish, shown:
        for event in train(ready, folder, wish=wish):
            shown.tell(event)
    assert isinstance(event, Ended)
    return event


class Display:
    """A bar with loss, exact answers, tokens a second and the time left; single lines where there is no terminal."""

    def __init__(self, ready: Ready, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.steps, self.quiet, self.console = ready.run.train.steps, quiet, Console(stderr=True)
        self.live = sys.stderr.isatty() and not quiet
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
                self.line(f"step {event.step:,}: the loss or its gradient was no number; the update was left out")
        elif isinstance(event, Evaluated):
            self.metrics = event.metrics
            self.line(f"step {event.step:,} · unseen rows: {named(event.metrics)}")
        elif isinstance(event, Started):
            self.line(f"{event.taken} weights taken from the checkpoint")
            for what, names in (("new, by the seed", event.new), ("left out", event.left)):
                if names:
                    self.line(f"{what}: {few(names)}")
            for note in event.notes:
                self.line(note)
        elif isinstance(event, Shortened):
            self.line(f"too long, and cut: {event.rows:,} rows to learn from, {event.unseen:,} unseen ones")
        elif isinstance(event, Resumed):
            for wrong in event.wrong:
                self.line(f"passed over: {wrong}")
            self.line(f"going on from step {event.step:,}")
        elif isinstance(event, Saved) and event.step == self.steps:
            self.line(f"saved {event.path}")

    def said(self) -> str:
        exact = f" · exact {self.metrics['exact']:.1%}" if "exact" in self.metrics else ""
        return f"loss {self.loss:.3f}{exact} · {self.speed:,.0f} tokens/s"

    def line(self, text: str) -> None:
        if not self.quiet:
            self.bar.console.print(text, highlight=False)


def named(metrics: dict[str, float]) -> str:
    return " · ".join(f"{name} {value:.3f}" if name == "loss" else f"{name} {value:.1%}" for name, value in metrics.items())


def few(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
