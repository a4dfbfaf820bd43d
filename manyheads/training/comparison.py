"""Trains a grid of runs, every cell with several seeds, and reports the mean and standard deviation of every metric."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from manyheads.checkpoint.loading import load
from manyheads.errors import RunChangedError, UsageError, one_line
from manyheads.files.read import read_json_or_empty
from manyheads.files.write import check_writable, explain_write_errors, write_atomic
from manyheads.model.builder import resolve_device
from manyheads.model.cost import count_parameters
from manyheads.spec import Tree, load_parts
from manyheads.training.events import Finished, Step
from manyheads.training.folder import check_same_run, data_hashes, tree_changes
from manyheads.training.grid import MAX_RUNS, Axis, CellRun, GridCell, make_grid, read_axes
from manyheads.training.log import read_events
from manyheads.training.loop import train_events
from manyheads.training.preparation import PreparedRun, prepare
from manyheads.training.resources import check_resources, estimate_resources
from manyheads.training.run import RunSpec, read_run, to_run_tree, to_spec
from manyheads.training.signals import handle_signals
from manyheads.training.store import read_pointer

MAX_JOBS = 1024
IMPROVING = 0.05  # a fall of the loss by this fraction in the last quarter of the steps is notable


@dataclass(frozen=True)
class CellProgress:
    """Progress of one run, the `number`-th of `runs`: its current step, or the metrics or error with which it ended.

    Steps are known only if runs are trained one after the other.
    """

    name: str
    seed: int
    number: int
    runs: int
    steps: int
    step: int = 0
    metrics: dict[str, float] | None = None  # None until the run ends
    error: str | None = None


OnCellProgress = Callable[[CellProgress], None]


def compare(
    run: RunSpec | Tree | str | Path,
    axes: Sequence[str],
    folder: str | Path,
    *,
    seeds: int = 3,
    jobs: int = 1,
    device: str = "auto",
    overrides: Sequence[str] = (),
    parts: Sequence[Path] = (),
    progress: OnCellProgress = lambda event: None,
) -> Tree:
    """Trains the unfinished runs of the grid and returns a report. An invalid value raises before the first run.

    `run` is a run file, a dict or a spec.
    """
    if not 1 <= seeds <= MAX_RUNS or not 1 <= jobs <= MAX_JOBS:
        raise UsageError(f"--seeds is {seeds} and --jobs is {jobs}, expected 1 to {MAX_RUNS:,} and 1 to {MAX_JOBS:,}")
    folder = Path(folder)
    to_spec(run, overrides)  # raises errors that name the line
    resolve_device(device)
    tree = to_run_tree(run, overrides)
    grid_axes = read_axes(axes, tree)
    cells = make_grid(tree, grid_axes, seeds, folder)
    runs = [(cell, cell_run) for cell in cells for cell_run in cell.runs]
    check_writable(folder)
    for _, cell_run in runs:
        check_same_run(cell_run.folder, cell_run.spec)
    remaining = [pair for pair in runs if not read_result(pair[1].folder, pair[1].spec).finished]
    queue = Queue(remaining, runs=len(runs), progress=progress)
    stop_reason = queue.train_in_parallel(jobs, device, parts) if jobs > 1 else queue.train_in_turn(device)
    report = comparison_report(cells, grid_axes, seeds, queue.errors) | {"stopped": stop_reason, "folder": str(folder)}
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "compare.json", json.dumps(report, indent=1, ensure_ascii=False))
    return report


# ------------------------------------------------------------------------------------------------------------ training


class Queue:
    """The runs that are still to be trained, and the errors of those that failed, by folder."""

    def __init__(self, remaining: Sequence[tuple[GridCell, CellRun]], *, runs: int, progress: OnCellProgress) -> None:
        self.remaining, self.runs, self.progress = list(remaining), runs, progress
        self.done, self.errors = runs - len(remaining), dict[Path, str]()

    def train_in_turn(self, device: str) -> str | None:
        """Trains one run after the other; returns the reason if a signal stops them."""
        with handle_signals() as should_stop:
            for cell, run in self.remaining:
                event = self.event(cell, run, self.done + 1)
                self.progress(event)
                error = train_cell(run.spec, run.folder, device, should_stop, partial(self.show_step, event))
                if reason := should_stop():
                    return reason
                self.finish(cell, run, error)
        return None

    def train_in_parallel(self, jobs: int, device: str, parts: Sequence[Path]) -> str | None:
        """Trains each run in its own process, `jobs` at a time; forwards a signal to all processes once."""
        context, are_terminated = multiprocessing.get_context("forkserver"), False
        context.set_forkserver_preload(["manyheads.training.comparison"])  # so that torch is imported once
        processes = dict[Any, tuple[GridCell, CellRun, Any]]()
        with handle_signals() as should_stop, kill_on_error(processes):
            while processes or (self.remaining and not should_stop()):
                while self.remaining and len(processes) < jobs and not should_stop():
                    (cell, run), (receiver, sender) = self.remaining.pop(0), context.Pipe(duplex=False)
                    process = context.Process(
                        target=train_in_process, args=(run.tree, run.folder, device, parts, sender)
                    )
                    process.start()
                    sender.close()
                    processes[process] = cell, run, receiver
                # not for their ends: a process cannot end before all it sends is received, or fits into its pipe
                ready_receivers = wait([receiver for _, _, receiver in processes.values()], timeout=0.2)
                for process, (cell, run, receiver) in list(processes.items()):
                    if receiver not in ready_receivers:
                        continue
                    error = receive_error(process, receiver)
                    del processes[process]
                    if not should_stop():
                        self.finish(cell, run, error)
                if should_stop() and not are_terminated:
                    are_terminated = True
                    for process in processes:
                        process.terminate()
        return should_stop()

    def show_step(self, event: CellProgress, step: int) -> None:
        self.progress(replace(event, step=step))

    def event(self, cell: GridCell, run: CellRun, number: int) -> CellProgress:
        return CellProgress(cell.name, run.spec.seed, number, self.runs, run.spec.train.steps)

    def finish(self, cell: GridCell, run: CellRun, error: str | None) -> None:
        self.done += 1
        if error:
            self.errors[run.folder] = error
        metrics = read_result(run.folder, run.spec).metrics
        self.progress(replace(self.event(cell, run, self.done), metrics=metrics, error=error))


def train_cell(
    spec: RunSpec,
    folder: Path,
    device: str,
    should_stop: Callable[[], str | None],
    at_step: Callable[[int], None] = lambda step: None,
) -> str | None:
    """Trains or resumes one run; returns the message of an error, or the signal that stopped it."""
    try:
        run, torch_device = prepare(spec), resolve_device(device)
        check_same_data(run, folder)
        check_resources(estimate_resources(run, folder, torch_device))
        for event in train_events(run, folder, should_stop=should_stop, device=torch_device):
            if isinstance(event, Step):
                at_step(event.step)
            elif isinstance(event, Finished) and event.reason in ("interrupted", "terminated"):
                return event.reason
    except Exception as error:  # a user's part may raise any class; the other cells are still trained
        return one_line(str(error) or type(error).__name__)
    return None


def check_same_data(run: PreparedRun, folder: Path) -> None:
    """Raises if the cell's other seeds were trained on different data; a file may have changed since."""
    hashes = data_hashes(run)
    for path in sorted(folder.parent.glob("seed-*/data.json")):
        if (old := read_json_or_empty(path)) and (changes := list(tree_changes(old, hashes))):
            raise RunChangedError(
                f"{path.parent} was trained on different data of the same name", changes, hint="use another --output"
            )


def train_in_process(tree: Tree, folder: Path, device: str, parts: Sequence[Path], sender: Any) -> None:
    """Trains one of several parallel runs, with one thread. Ignores Ctrl-C, which the parent forwards as SIGTERM."""
    torch.set_num_threads(1)
    threading.Thread(target=terminate_with_parent, args=(sender,), daemon=True).start()
    for path in parts:
        load_parts(path)
    with handle_signals() as should_stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        error = train_cell(read_run(tree), folder, device, should_stop)
        with suppress(BrokenPipeError):  # the parent is gone
            sender.send(error)


def terminate_with_parent(sender: Any) -> None:
    """Waits until nobody can receive from the pipe, because the parent was killed, and then sends SIGTERM to itself."""
    poll = select.poll()
    poll.register(sender, 0)  # the end of the other side is always reported
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def receive_error(process: Any, receiver: Any) -> str | None:
    """Receives what `train_in_process` sends, and waits for the end of its process."""
    try:
        error: str | None = receiver.recv()
    except (EOFError, OSError):  # the process was killed before it had sent everything
        process.join()
        return f"its process ended with code {process.exitcode}"
    process.join()
    return error


@contextmanager
def kill_on_error(processes: Iterable[Any]) -> Iterator[None]:
    """Kills the processes if the block raises, so that a second Ctrl-C does not wait for them."""
    try:
        yield
    except BaseException:
        for process in processes:
            process.kill()
        raise


# ------------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class RunResult:
    """Results read from a run's folder: metrics of its best or last checkpoint, and the loss of every evaluation."""

    folder: Path
    seed: int
    metrics: dict[str, float]  # NaN and infinite metrics are left out
    curve: tuple[tuple[int, float], ...]
    steps: int
    seconds: float
    finished: bool
    stopped_early: bool = False  # whether train.best ended it, rather than train.steps


def read_result(folder: Path, spec: RunSpec) -> RunResult:
    metrics, curve, seconds, step, reason = dict[str, float](), list[tuple[int, float]](), 0.0, 0, None
    for line in read_events(folder / "metrics.jsonl"):
        step, reason = line["step"], None
        if line["event"] == "step":
            seconds += line["seconds"]
        elif line["event"] == "evaluated":
            eval_metrics = {name: value for name, value in line["metrics"].items() if value is not None}
            if spec.train.best is None or spec.train.best.prefers(eval_metrics, metrics):
                metrics = eval_metrics
            curve += [(step, eval_metrics["loss"])] if "loss" in eval_metrics else []
        elif line["event"] == "finished":
            reason = line["reason"]
    stopped_early = reason in ("stop_at", "patience")
    return RunResult(
        folder,
        spec.seed,
        metrics=metrics,
        curve=tuple(curve),
        steps=step,
        seconds=seconds,
        finished=stopped_early or (reason == "steps" and step >= spec.train.steps),
        stopped_early=stopped_early,
    )


def comparison_report(cells: Sequence[GridCell], axes: Sequence[Axis], seeds: int, errors: dict[Path, str]) -> Tree:
    """Returns every cell with its finished runs, and the mean and standard deviation of every metric over the seeds."""
    rows = []
    for cell in cells:
        results = [read_result(run.folder, run.spec) for run in cell.runs]
        finished = [result for result in results if result.finished]
        names = dict.fromkeys(name for result in finished for name in result.metrics)
        error = cell.error or next((errors[run.folder] for run in cell.runs if run.folder in errors), None)
        rows.append(
            {
                "cell": dict(cell.values),
                "parameters": parameter_count(finished[0].folder) if finished else None,
                "seconds": statistics.fmean(result.seconds for result in finished) if finished else None,
                "metrics": {
                    name: summarize([result.metrics[name] for result in finished if name in result.metrics])
                    for name in names
                },
                "seeds": [
                    {name: getattr(result, name) for name in ("seed", "steps", "seconds", "metrics", "curve")}
                    for result in finished
                ],
                "still_improving": sum(is_improving(result.curve) for result in finished if not result.stopped_early),
                "error": error,
            }
        )
    return {"schema": 1, "axes": {axis.name: list(axis.values) for axis in axes}, "seeds": seeds, "cells": rows}


def is_improving(curve: Sequence[tuple[int, float]]) -> bool:
    """Whether the validation loss fell by more than IMPROVING in the last quarter of the steps of a run."""
    if len(curve) < 3:
        return False
    last_step, last = curve[-1]
    earlier_losses = [loss for step, loss in curve if step <= 3 / 4 * last_step]
    return bool(earlier_losses) and last < (1 - IMPROVING) * earlier_losses[-1]


def summarize(values: Sequence[float]) -> Tree:
    """Returns the mean and the sample standard deviation (n − 1), which is None for a single value."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": deviation, "count": len(values)}


def parameter_count(folder: Path) -> int | None:
    """Returns the number of parameters of the run's latest checkpoint, or None if it has none."""
    checkpoint = read_pointer(folder / "checkpoints", "latest")
    return None if checkpoint is None else count_parameters(load(checkpoint).model)
