"""What a run will need, before it starts: memory, disk, epochs, and the time it takes on this machine."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from manyheads.errors import NotEnoughMemoryError, OutOfDiskError
from manyheads.model.build import Model, build_meta, resolve_device
from manyheads.model.size import BYTES, MAX_RECURRENT_LENGTH, dummy_inputs, format_bytes, saved_bytes
from manyheads.spec import Tree, to_tree
from manyheads.tasks.task import Batch
from manyheads.train.batches import BatchPlan, BatchStream
from manyheads.train.folder import check_folder, config_changes, data_hashes
from manyheads.train.loop import GENERATED_ROWS, handle_signals, train_step, validate
from manyheads.train.lora import add_lora
from manyheads.train.optim import trainable
from manyheads.train.prepare import PreparedRun, compile_layers, freeze, initial_model
from manyheads.train.store import checkpoints

MAX_COUNTED_BATCHES = 200
LOGITS_TENSORS = 3  # of the size of all logits: themselves, their logarithms, their gradient
MOMENTS = 2  # numbers per weight in the optimizer's state
COMPILING_STEPS = 3  # until layers are compile_layers, first for the shapes of the first batches and then for any
LONG_RUN = 1200.0  # seconds; a longer run is worth trying torch.compile


@dataclass(frozen=True)
class EpochEstimate:
    """One epoch; tokens and padding are extrapolated from `counted_batches`."""

    rows: int
    batches: int
    tokens: int  # without padding
    padding: float  # as a fraction
    counted_batches: int


@dataclass(frozen=True)
class ResourceEstimate:
    """Bytes that a run needs in memory and on the disk, and how many are free."""

    parameters: int
    weights: int
    gradients: int
    optimizer_state: int
    activations: int  # of the largest batch, with its logits
    batch: tuple[int, int, int]  # its rows, their length, and the length of their sources or 0
    memory: int
    memory_free: int | None
    checkpoint: int
    disk: int  # for all checkpoints that are kept, the best too, and one that is being written
    disk_free: int | None


@dataclass(frozen=True)
class SpeedEstimate:
    """Measured seconds."""

    step: float
    evaluation: float
    timed_steps: int
    compiled_step: float | None = None  # with train.compile, if that was tried
    compiling: float = 0.0


def estimate_run(
    run: PreparedRun, folder: Path | None, *, device: str = "auto", resume: str = "auto", overridden: Sequence[str] = ()
) -> Tree:
    """All estimates as plain data, writing nothing; the same errors as the start of the run."""
    if folder is not None:
        check_folder(folder, resume)
        config_changes(run, data_hashes(run), folder, overridden)
    torch_device, settings = resolve_device(device), run.spec.train
    resources = estimate_resources(run, folder, torch_device)
    check_resources(resources)
    epoch = estimate_epoch(run)
    with handle_signals() as should_stop:
        speed = measure_speed(run, torch_device)
        if run_seconds(run, speed) > LONG_RUN and not settings.compile and not should_stop():
            speed = measure_compiled(run, speed, torch_device)
    if should_stop():
        raise KeyboardInterrupt
    return {
        "schema": 1,
        "data": run.corpus.description,
        "shape": run.model_spec.shape,
        "resources": asdict(resources),
        "epoch": asdict(epoch),
        "steps": settings.steps,
        "epochs": settings.steps * settings.accumulate / epoch.batches,
        "speed": asdict(speed),
        "seconds": run_seconds(run, speed),
        "device": str(torch_device),
        "run": to_tree(run.spec) | {"model": to_tree(run.model_spec)},
    }


# ---------------------------------------------------------------------------------------------------- epochs and bytes


def estimate_epoch(run: PreparedRun) -> EpochEstimate:
    """Makes and counts the first batches of an epoch."""
    stream = BatchStream(run)
    count = len(stream.plan())
    batches = (stream.next() for _ in range(min(count, MAX_COUNTED_BATCHES)))
    counted = [(batch.tokens, batch_positions(batch)) for batch in batches]
    tokens, positions = map(sum, zip(*counted, strict=True))
    return EpochEstimate(
        rows=len(run.train_rows),
        batches=count,
        tokens=round(tokens * count / len(counted)),
        padding=1 - tokens / positions,
        counted_batches=len(counted),
    )


def batch_positions(batch: Batch) -> int:
    """Tokens of a batch, padding included."""
    return sum(one.tokens.shape[0] * one.tokens.shape[1] for one in (batch.inputs, batch.source) if one is not None)


def estimate_resources(
    run: PreparedRun, folder: Path | None = None, device: torch.device | str = "cpu"
) -> ResourceEstimate:
    """Counts on the meta device; activations are those of the largest batch or of the one with the longest row."""
    plan = BatchPlan(run, run.train_rows)
    shapes = [plan.shape(i) for i in range(len(plan))]
    largest = {
        shapes.index(max(shapes, key=key)) for key in (lambda shape: shape[0] * shape[1], lambda shape: shape[1])
    }
    model = build_meta(run.model_spec)
    activations, shape = max(activation_bytes(run, model, plan.batch(i)) for i in largest)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weights, gradients = BYTES * parameters, BYTES * trainable_count(run)
    optimizer_state = (MOMENTS + bool(run.spec.optim.ema_decay)) * gradients
    evaluation = logits_bytes(run, max(rows * length for rows, length in evaluation_shapes(run)))
    checkpoint = weights + optimizer_state
    kept = run.spec.train.keep_last + (run.spec.train.best is not None)
    existing = min(len(checkpoints(folder / "checkpoints")), kept) if folder else 0
    return ResourceEstimate(
        parameters=parameters,
        weights=weights,
        gradients=gradients,
        optimizer_state=optimizer_state,
        activations=activations,
        batch=shape,
        memory=weights + gradients + optimizer_state + max(activations, evaluation),
        memory_free=memory_free(torch.device(device)),
        checkpoint=checkpoint,
        disk=(kept + 1 - existing) * checkpoint,
        disk_free=disk_free(folder) if folder else None,
    )


def trainable_count(run: PreparedRun) -> int:
    model, spec = build_meta(run.model_spec), run.spec
    if spec.lora:
        add_lora(model, spec.lora, seed=0, new=())
    freeze(model, spec.freeze or ())
    return sum(parameter.numel() for parameter in trainable(model))


def activation_bytes(run: PreparedRun, model: Model, batch: Batch) -> tuple[int, tuple[int, int, int]]:
    """What the forward pass of a batch keeps for the backward pass, and the batch's shape."""
    rows, length = batch.inputs.tokens.shape[:2]
    source_length = batch.source.tokens.shape[1] if batch.source else 0
    counted_length = min(length, MAX_RECURRENT_LENGTH) if run.model_spec.recurrent else length
    inputs, source = dummy_inputs(run.model_spec, rows, counted_length, source_length)
    total = saved_bytes(model, inputs, source) * length // counted_length + logits_bytes(run, rows * length)
    if source_length and source is None:  # a second text, read by the same model
        total += saved_bytes(model, dummy_inputs(run.model_spec, rows, source_length, source_length)[0], None)
    return total, (rows, length, source_length)


def logits_bytes(run: PreparedRun, positions: int) -> int:
    return LOGITS_TENSORS * BYTES * positions * run.tokens.vocab_size if run.model_spec.head.output == "tokens" else 0


def evaluation_shapes(run: PreparedRun) -> list[tuple[int, int]]:
    plan = BatchPlan(run, run.validation_rows, max_rows=run.spec.train.eval_rows)
    return [plan.shape(i) for i in range(len(plan))]


def check_resources(needs: ResourceEstimate) -> None:
    """Refuses a run that does not fit into memory or on the disk."""
    if needs.memory_free is not None and needs.memory > needs.memory_free:
        rows, length, _ = needs.batch
        raise NotEnoughMemoryError(
            f"the run needs about {format_bytes(needs.memory)} of memory and {format_bytes(needs.memory_free)} are "
            f"free: {format_bytes(needs.memory - needs.activations)} for {needs.parameters:,} parameters, gradients "
            f"and optimizer state, {format_bytes(needs.activations)} for a batch of {rows:,} × {length:,}",
            hint="make the model or train.batch_tokens smaller",
        )
    if needs.disk_free is not None and needs.checkpoint > needs.disk_free:  # where two do not fit, the run warns
        raise OutOfDiskError(
            f"the run needs about {format_bytes(needs.disk)} on the disk and {format_bytes(needs.disk_free)} are free; "
            f"each checkpoint has {format_bytes(needs.checkpoint)}",
            hint="free some space, or use another --output",
        )


# --------------------------------------------------------------------------------------------------------------- speed


def measure_speed(run: PreparedRun, device: torch.device | str = "cpu", *, seconds: float = 3.0) -> SpeedEstimate:
    """Times some steps of the real model, and an evaluation of some rows; keeps and writes nothing."""
    model, _ = initial_model(run, device)
    optimizer, stream = run.spec.optim.build(model), BatchStream(run)
    train_step(model, optimizer, stream, run, stream.state)  # the first one takes longer
    times = list[float]()
    while not times or (sum(times) < seconds / 2 and len(times) < run.spec.train.steps):
        times.append(train_step(model, optimizer, stream, run, stream.state).seconds)
    step, all_rows = sum(times) / len(times), sum(rows for rows, _ in evaluation_shapes(run))
    rows = min(all_rows, GENERATED_ROWS if step < seconds / 3 else 8)  # fewer rows take longer per row
    start = time.perf_counter()
    validate(model, replace(run, spec=run.spec.changed(train=run.spec.train.changed(eval_rows=rows))))
    evaluation = (time.perf_counter() - start) * all_rows / rows
    return SpeedEstimate(step=step, evaluation=evaluation, timed_steps=len(times))


def measure_compiled(
    run: PreparedRun, speed: SpeedEstimate, device: torch.device | str = "cpu", *, seconds: float = 3.0
) -> SpeedEstimate:
    """Adds the time of a step with compiled layers, and of compiling them."""
    model, _ = initial_model(run, device)
    compile_layers(model)
    optimizer, stream, times = run.spec.optim.build(model), BatchStream(run), list[float]()
    while len(times) < COMPILING_STEPS or sum(times[COMPILING_STEPS:]) < seconds:
        times.append(train_step(model, optimizer, stream, run, stream.state).seconds)
    step = sum(times[COMPILING_STEPS:]) / len(times[COMPILING_STEPS:])
    compiling = max(0.0, sum(times[:COMPILING_STEPS]) - COMPILING_STEPS * step)
    return replace(speed, compiled_step=step, compiling=compiling)


def run_seconds(run: PreparedRun, speed: SpeedEstimate) -> float:
    """How long the whole run takes."""
    settings = run.spec.train
    return settings.steps * speed.step + -(-settings.steps // settings.eval_every) * speed.evaluation


def format_seconds(seconds: float) -> str:
    """A duration in its largest fitting unit: '2.5 hours', '40 seconds'."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} seconds"


# --------------------------------------------------------------------------------------------------------- the machine


def memory_free(device: torch.device) -> int | None:
    """Bytes that this process may still use: of a GPU; else by the machine, its control group or its own limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [read_kibibytes(Path("/proc/meminfo"), "MemAvailable")]
    with suppress(OSError, ValueError):  # no control group, or "max"
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        limits.append(max(0, limit - used))
    limit, size = resource.getrlimit(resource.RLIMIT_AS)[0], read_kibibytes(Path("/proc/self/status"), "VmSize")
    if limit != resource.RLIM_INFINITY and size is not None:
        limits.append(max(0, limit - size))
    return min((limit for limit in limits if limit is not None), default=None)


def read_kibibytes(path: Path, name: str) -> int | None:
    """A size in a file such as /proc/meminfo, in bytes."""
    try:
        lines = dict(line.split(":", 1) for line in path.read_text(encoding="utf-8").splitlines())
        return int(lines[name].split()[0]) << 10
    except (OSError, ValueError, KeyError):
        return None


def disk_free(folder: Path) -> int | None:
    """Bytes on the disk where the folder is, or will be."""
    there = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), None)
    try:
        return shutil.disk_usage(there).free if there else None
    except OSError:
        return None
