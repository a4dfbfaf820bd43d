"""`manyheads train --dry-run`: estimates memory, disk space, the size of an epoch, and the time on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import torch

from manyheads.model.builder import Model, num_threads, resolve_device
from manyheads.spec import Tree, to_tree
from manyheads.tasks.batch import Batch
from manyheads.training.batches import BatchStream
from manyheads.training.events import Step
from manyheads.training.folder import check_folder, config_changes, data_hashes
from manyheads.training.loop import GENERATED_ROWS, train_step, validate
from manyheads.training.preparation import PreparedRun, compile_layers, initial_model
from manyheads.training.resources import check_resources, estimate_resources, evaluation_shapes
from manyheads.training.signals import EXIT_STATUS, handle_signals
from manyheads.training.store import find_resume_checkpoint

MAX_COUNTED_BATCHES = 200
MIN_TIMED_STEPS = 3  # fewer only if a step is very slow
MAX_TIMED_STEPS = 30  # more would change their median little
COMPILING_STEPS = 3  # first steps that compile: for the shapes of the first batches, then for dynamic shapes
LONG_RUN = 1200.0  # seconds; a longer run is worth trying torch.compile


@dataclass(frozen=True)
class EpochEstimate:
    """The size of one epoch; tokens and padding are extrapolated from `counted_batches`."""

    rows: int
    batches: int
    tokens: int  # without padding
    padding: float  # fraction of all positions
    counted_batches: int


@dataclass(frozen=True)
class SpeedEstimate:
    """Measured times, in seconds."""

    step: float
    evaluation: float
    timed_steps: int
    compiled_step: float | None = None  # a step with train.compile, if that was measured
    compiling: float = 0.0


def estimate_run(
    run: PreparedRun,
    folder: Path | None,
    *,
    device: str = "auto",
    resume: str = "auto",
    override_resume: Sequence[str] = (),
) -> Tree:
    """Returns all estimates as a dict. Writes nothing, and raises the same errors as the start of the run."""
    if folder is not None:
        check_folder(folder, resume)
        checkpoint, _ = find_resume_checkpoint(folder / "checkpoints", resume)
        config_changes(run, data_hashes(run), folder, checkpoint, override_resume)
    torch_device, settings = resolve_device(device), run.spec.train
    resources = estimate_resources(run, folder, torch_device)
    check_resources(resources)
    epoch = estimate_epoch(run)
    with handle_signals() as should_stop:
        speed = measure_speed(run, torch_device)
        if run_seconds(run, speed) > LONG_RUN and not settings.compile and not should_stop():
            speed = measure_compiled(run, speed, torch_device)
    if reason := should_stop():
        raise SystemExit(EXIT_STATUS[reason])
    return {
        "schema": 1,
        "data": run.corpus.description,
        "architecture": run.model_spec.architecture,
        "resources": asdict(resources),
        "epoch": asdict(epoch),
        "steps": settings.steps,
        "epochs": settings.steps * settings.accumulate / epoch.batches,
        "speed": asdict(speed),
        "seconds": run_seconds(run, speed),
        "device": str(torch_device),
        "run": to_tree(run.spec) | {"model": to_tree(run.model_spec)},
    }


# -------------------------------------------------------------------------------------------------------------- epochs


def estimate_epoch(run: PreparedRun) -> EpochEstimate:
    """Makes and counts the first batches of an epoch."""
    stream = BatchStream(run)
    count = len(stream.loader())
    batches = (stream.next() for _ in range(min(count, MAX_COUNTED_BATCHES)))
    counts = [(batch.num_tokens, batch_positions(batch)) for batch in batches]
    tokens, positions = map(sum, zip(*counts, strict=True))
    return EpochEstimate(
        rows=len(run.train_dataset),
        batches=count,
        tokens=round(tokens * count / len(counts)),
        padding=1 - tokens / positions,
        counted_batches=len(counts),
    )


def batch_positions(batch: Batch) -> int:
    """Returns the number of tokens of a batch, padding included."""
    return sum(
        inputs.tokens.shape[0] * inputs.tokens.shape[1] for inputs in (batch.inputs, batch.source) if inputs is not None
    )


# --------------------------------------------------------------------------------------------------------------- speed


def measure_speed(
    run: PreparedRun, device: torch.device | str = "cpu", *, seconds: float = 3.0, one_thread: bool = False
) -> SpeedEstimate:
    """Times some steps of the real model, and an evaluation of some rows; writes nothing.

    With `one_thread`, steps are timed with one thread, too, and the faster counts: if other programs use the cores,
    several threads wait for each other and are slower than one, which says little about the machine.
    """
    model, _ = initial_model(run, device)
    thread_counts = dict.fromkeys((torch.get_num_threads(), *((1,) if one_thread else ())))
    steps_by_threads = dict[int, list[Step]]()
    for count in thread_counts:
        with num_threads(count):
            steps_by_threads[count] = time_steps(run, model, first=1, seconds=seconds / 2 / len(thread_counts))[1]
    fastest = min(steps_by_threads, key=lambda count: typical_seconds(steps_by_threads[count]))
    step, all_rows = typical_seconds(steps_by_threads[fastest]), sum(rows for rows, _ in evaluation_shapes(run))
    rows = min(all_rows, GENERATED_ROWS if step < seconds / 3 else 8)  # fewer rows take longer per row
    start = time.perf_counter()
    with num_threads(fastest):
        validate(model, replace(run, spec=run.spec.replace(train=run.spec.train.replace(eval_rows=rows))))
    evaluation = (time.perf_counter() - start) * all_rows / rows
    return SpeedEstimate(step=step, evaluation=evaluation, timed_steps=len(steps_by_threads[fastest]))


def typical_seconds(steps: Sequence[Step]) -> float:
    """Returns the seconds of a step, as the median per token, so that a few interrupted steps change little."""
    return median(step.seconds / step.tokens for step in steps) * fmean(step.tokens for step in steps)


def time_steps(run: PreparedRun, model: Model, *, first: int, seconds: float) -> tuple[list[Step], list[Step]]:
    """Returns the first steps, which take longer, and the steps of this time after them, if possible 3 to 30."""
    optimizer, stream, steps = run.spec.optim.build(model), BatchStream(run), list[Step]()

    def seconds_so_far() -> float:
        return sum(step.seconds for step in steps[first:])

    while len(steps) <= first or (
        len(steps) < first + MAX_TIMED_STEPS
        and seconds_so_far() < (seconds if len(steps) >= first + MIN_TIMED_STEPS else 10 * seconds)
    ):
        steps.append(train_step(model, optimizer, stream, run, stream.state))
    return steps[:first], steps[first:]


def measure_compiled(
    run: PreparedRun, speed: SpeedEstimate, device: torch.device | str = "cpu", *, seconds: float = 3.0
) -> SpeedEstimate:
    """Adds the time of a step with compiled layers, and of compiling them."""
    model, _ = initial_model(run, device)
    compile_layers(model)
    first, steps = time_steps(run, model, first=COMPILING_STEPS, seconds=seconds)
    step = typical_seconds(steps)
    compiling = max(0.0, sum(event.seconds for event in first) - COMPILING_STEPS * step)
    return replace(speed, compiled_step=step, compiling=compiling)


def run_seconds(run: PreparedRun, speed: SpeedEstimate) -> float:
    """Returns the estimated seconds of the whole run."""
    settings = run.spec.train
    return settings.steps * speed.step + -(-settings.steps // settings.eval_every) * speed.evaluation


def format_seconds(seconds: float) -> str:
    """Formats a duration in its largest fitting unit: '2.5 hours', '40 seconds'."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} seconds"
