"""A grid of changes to one run, every cell trained with several seeds, and what became of them as means and deviations."""

from __future__ import annotations

import json
import math
import multiprocessing
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from manyheads.grid import MOST_RUNS, Axis, Cell, grid, read_axis
from manyheads.model.build import device_for
from manyheads.spec import SpecError, Tree, load_parts, one_line, override, read_toml
from manyheads.train.events import Ended, Stepped
from manyheads.train.files import read_object, writing
from manyheads.train.folder import as_written, changes, check_unchanged, contents
from manyheads.train.forecast import check_room, needs_of
from manyheads.train.lock import check_place
from manyheads.train.loop import train
from manyheads.train.run import Ready, RunError, made_ready, read_run, read_run_file
from manyheads.training import heard, spoken

# ------------------------------------------------------------------------------------------------------------ the runs


@dataclass(frozen=True)
class Outcome:
    """What became of one run: the figures of the model that it keeps and all looks at unseen rows, or why there are none."""

    folder: Path
    seed: int
    metrics: dict[str, float]  # of its last look, or of the best where it has a goal; but for those that were NaN or infinite
    curve: tuple[tuple[int, float], ...]
    steps: int
    seconds: float
    reason: str | None  # why it ended, none where it did not


def outcome(tree: Tree, folder: Path) -> Outcome:
    """As the run's own folder tells it."""
    metrics, curve, seconds, step, reason = dict[str, float](), list[tuple[int, float]](), 0.0, 0, None
    how = read_run(tree).train
    for event in events_of(folder / "metrics.jsonl"):
        step, reason = event["step"], None
        if event["event"] == "stepped":
            seconds += event["seconds"]
        elif event["event"] == "evaluated":
            look = {name: value for name, value in event["metrics"].items() if value is not None}
            metrics = look if how.goal is None or how.goal.prefers(look, metrics) else metrics
            curve += [(step, look["loss"])] if "loss" in look else []
        elif event["event"] == "ended":
            reason = event["reason"]
    ended = reason in ("goal", "patience") or (reason == "steps" and step >= how.steps)
    return Outcome(folder, tree["seed"], metrics, tuple(curve), step, seconds, reason if ended else None)


def events_of(path: Path) -> Iterator[Tree]:
    """What a run wrote down; a line that a crash cut short is passed over."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):
            if isinstance(event := json.loads(line), dict) and {"event", "step"} <= event.keys():
                yield event


def run_cell(
    tree: Tree, folder: Path, device: str, wish: Callable[[], str | None], tell: Callable[[int], None] = lambda step: None
) -> str | None:  # fmt: skip
    """Trains one run, or goes on with it; gives why it could not, or that somebody asked to stop."""
    try:
        ready, where = made_ready(read_run(tree)), device_for(device)
        check_data(ready, folder)
        check_room(needs_of(ready, folder, where))
        for event in train(ready, folder, wish=wish, device=where):
            if isinstance(event, Stepped):
                tell(event.step)
            if isinstance(event, Ended) and event.reason in ("interrupted", "terminated"):
                return event.reason
    except Exception as error:  # whatever a part of the user's own may raise: the other cells go on
        return one_line(str(error) or type(error).__name__)
    return None


def check_data(ready: Ready, folder: Path) -> None:
    """Refuses what other seeds of the cell did not learn from: a file may have been changed since."""
    now = contents(ready)
    for path in sorted(folder.parent.glob("seed-*/data.json")):
        if (seen := read_object(path)) and any(changes(seen, as_written(seen, ready, now))):
            raise RunError(f"{path.parent} learned from other data, of the same name: take another --output")


def in_process(tree: Tree, folder: Path, device: str, parts: Sequence[Path], answer: Any) -> None:
    """One of several runs side by side, with one thread. Ctrl-C at a terminal reaches all processes: the first hands it on as SIGTERM."""
    torch.set_num_threads(1)
    for path in parts:
        load_parts(path)
    with heard() as wish:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        said = run_cell(tree, folder, device, wish)
        with suppress(BrokenPipeError):  # nobody waits for it any more
            answer.send(said)


def compare(
    path: Path,
    said: Sequence[str],
    folder: Path,
    *,
    seeds: int = 3,
    jobs: int = 1,
    device: str = "auto",
    overrides: Sequence[str] = (),
    parts: Sequence[Path] = (),
    quiet: bool = False,
) -> Tree:
    """Trains what is not trained yet, and tells what came out. Nothing is begun before the whole grid is known to be sound."""
    if not 1 <= seeds <= MOST_RUNS or not 1 <= jobs <= 1024:
        raise SpecError(f"--seeds is {seeds} and --jobs is {jobs}, expected 1 to {MOST_RUNS:,} and 1 to 1,024")
    if not said:
        raise SpecError("nothing to compare: say what is changed and its values, such as position=none,rope")
    tree = override(read_toml(path), overrides)
    read_run_file(path, overrides)
    device_for(device)
    axes = [read_axis(one, tree) for one in said]
    if len({path for axis in axes for path in axis.paths}) < sum(len(axis.paths) for axis in axes):
        raise SpecError("two of the axes change the same field")
    cells = grid(tree, axes, seeds, folder)
    runs = [(cell, tree, folder_of(cell, tree)) for cell in cells if not cell.wrong for tree in cell.trees]
    check_place(folder)
    for _, one, place in runs:
        check_unchanged(place, read_run(one))
    left = [one for one in runs if outcome(one[1], one[2]).reason is None]
    progress = Progress(len(runs), len(runs) - len(left), quiet=quiet)
    wrong, stopped = side_by_side(left, jobs, device, parts, progress) if jobs > 1 else one_by_one(left, device, progress)
    found = told(cells, axes, wrong, seeds) | {"stopped": stopped, "folder": str(folder)}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "compare.json").write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")
    return found


def folder_of(cell: Cell, tree: Tree) -> Path:
    return cell.folder / f"seed-{tree['seed']}"


Run = tuple[Cell, Tree, Path]


def one_by_one(left: Sequence[Run], device: str, progress: Progress) -> tuple[dict[Path, str], str | None]:
    """Why some runs failed, by their folders, and the signal that stopped all."""
    wrong: dict[Path, str] = {}
    with heard() as wish:
        for cell, tree, folder in left:
            progress.begin(cell, tree)
            failed = run_cell(tree, folder, device, wish, progress.stepped)
            if reason := wish():
                return wrong, reason
            if failed:
                wrong[folder] = failed
            progress.end(cell, outcome(tree, folder), failed)
    return wrong, None


def side_by_side(
    left: Sequence[Run], jobs: int, device: str, parts: Sequence[Path], progress: Progress
) -> tuple[dict[Path, str], str | None]:  # fmt: skip
    """The same with a process a run, so many at a time; a signal is handed on to all of them, once."""
    wrong, asked = dict[Path, str](), False
    context, waiting, working = multiprocessing.get_context("forkserver"), list(left), dict[Any, tuple[Run, Any]]()
    context.set_forkserver_preload(["manyheads.compare"])  # so that torch is imported once
    with heard() as wish, ended_with_us(working):
        while working or (waiting and not wish()):
            while waiting and len(working) < jobs and not wish():
                run, (answer, sender) = waiting.pop(0), context.Pipe(duplex=False)
                process = context.Process(target=in_process, args=(run[1], run[2], device, parts, sender))
                process.start()
                sender.close()
                working[process] = run, answer
            wait([process.sentinel for process in working], timeout=0.2)
            for process in [process for process in working if process.exitcode is not None]:
                (cell, tree, folder), answer = working.pop(process)
                failed = answered(answer, process.exitcode)
                if not wish():
                    if failed:
                        wrong[folder] = failed
                    progress.end(cell, outcome(tree, folder), failed)
            if wish() and not asked:
                asked = True
                for process in working:
                    process.terminate()
    return wrong, wish()


@contextmanager
def ended_with_us(working: Iterable[Any]) -> Iterator[None]:
    """Whoever presses Ctrl-C twice is not kept waiting by processes that do not hear it."""
    try:
        yield
    except BaseException:
        for process in working:
            process.kill()
        raise


def answered(answer: Any, code: int) -> str | None:
    """Why a run failed, as its process said before it ended; some end without a word."""
    try:
        said: str | None = answer.recv()
    except EOFError:
        return f"its process ended with code {code}"
    return said


class Progress:
    """Lines on standard error: which run of how many, how it went, and the time left."""

    def __init__(self, runs: int, done: int, *, quiet: bool) -> None:
        self.runs, self.done, self.quiet, self.made, self.begun = runs, done, quiet, 0, time.perf_counter()
        self.line, self.steps, self.live = "", 0, sys.stderr.isatty() and not quiet

    def begin(self, cell: Cell, tree: Tree) -> None:
        self.line = f"{self.done + 1} of {self.runs} · {cell.name}, seed {tree['seed']}"
        self.steps = read_run(tree).train.steps

    def stepped(self, step: int) -> None:
        if self.live and step % 10 == 0:
            print(f"\r\x1b[K{one_line(self.line)} · step {step:,} of {self.steps:,}", end="", file=sys.stderr, flush=True)

    def end(self, cell: Cell, found: Outcome, failed: str | None) -> None:
        self.done, self.made = self.done + 1, self.made + 1
        left = (time.perf_counter() - self.begun) / self.made * (self.runs - self.done)
        came = failed or " · ".join(f"{name} {value:.4g}" for name, value in found.metrics.items())
        more = f" · about {spoken(left)} left" if self.done < self.runs else ""
        if not self.quiet:
            clear = "\r\x1b[K" if self.live else ""
            print(clear + one_line(f"{self.done} of {self.runs} · {cell.name}, seed {found.seed}: {came}{more}"), file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------- the table


def told(cells: Sequence[Cell], axes: Sequence[Axis], wrong: dict[Path, str], seeds: int) -> Tree:
    """All cells with their runs, and the mean and the deviation of every figure over the seeds."""
    rows = []
    for cell in cells:
        found = [] if cell.wrong else [outcome(tree, folder_of(cell, tree)) for tree in cell.trees]
        ended = [one for one in found if one.reason]
        failed = cell.wrong or next((wrong[folder_of(cell, tree)] for tree in cell.trees if folder_of(cell, tree) in wrong), None)
        names = list(dict.fromkeys(name for one in ended for name in one.metrics))
        rows.append(
            {
                "cell": dict(cell.choices),
                "parameters": parameters_of(ended[0].folder) if ended else None,
                "seconds": statistics.fmean(one.seconds for one in ended) if ended else None,
                "metrics": {name: summed([one.metrics[name] for one in ended if name in one.metrics]) for name in names},
                "seeds": [
                    {"seed": one.seed, "steps": one.steps, "seconds": one.seconds, "metrics": one.metrics, "curve": one.curve}
                    for one in ended
                ],
                "wrong": failed,
            }
        )
    return {"schema": 1, "axes": {axis.name: list(axis.values) for axis in axes}, "seeds": seeds, "cells": rows}


def summed(values: Sequence[float]) -> Tree:
    """Mean and standard deviation (n − 1), which one value has not."""
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None, "count": len(values)}


def parameters_of(folder: Path) -> int | None:
    """Of the model as a run kept it; none where its checkpoints were taken away."""
    kept = folder / "checkpoints"
    try:
        with safe_open(kept / (kept / "latest").read_text(encoding="utf-8") / "model.safetensors", "pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  (it is no dict)
    except OSError:
        return None
