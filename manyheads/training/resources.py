"""Estimates the memory and disk space of a run before it starts, with a model on the meta device."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from manyheads.errors import OutOfDiskError, OutOfMemoryError
from manyheads.files.write import free_bytes
from manyheads.model.builder import Model, build_meta
from manyheads.model.cost import (
    BYTES,
    MAX_RECURRENT_LENGTH,
    count_parameters,
    dummy_inputs,
    format_bytes,
    saved_bytes,
)
from manyheads.tasks.batch import Batch
from manyheads.training.batches import BatchLoader
from manyheads.training.lora import add_lora
from manyheads.training.optim import trainable
from manyheads.training.preparation import PreparedRun, freeze
from manyheads.training.store import list_checkpoints

LOGITS_TENSORS = 3  # tensors of the size of the logits: logits, log-softmax, gradient
MOMENTS = 2  # numbers per weight in the optimizer's state


@dataclass(frozen=True)
class ResourceEstimate:
    """Bytes that a run needs in memory and on the disk, and how many are free."""

    parameters: int
    weights: int
    gradients: int
    optimizer_state: int
    activations: int  # for the largest batch, logits included
    batch: tuple[int, int, int]  # rows of that batch, their length, and the length of their sources or 0
    memory: int
    memory_free: int | None
    checkpoint: int
    disk: int  # all checkpoints that are kept, the best included, and one that is being written
    disk_free: int | None


def estimate_resources(
    run: PreparedRun, folder: Path | None = None, device: torch.device | str = "cpu"
) -> ResourceEstimate:
    """Counts bytes on the meta device; activations are for the largest batch, or the batch with the longest row."""
    loader = BatchLoader(run, run.train_dataset)
    shapes = [loader.shape(i) for i in range(len(loader))]
    largest = {
        shapes.index(max(shapes, key=key)) for key in (lambda shape: shape[0] * shape[1], lambda shape: shape[1])
    }
    model = build_meta(run.model_spec)
    activations, shape = max(activation_bytes(run, model, loader[i]) for i in largest)
    parameters = count_parameters(model)
    weights, gradients = BYTES * parameters, BYTES * trainable_count(run, model)
    optimizer_state = (MOMENTS + bool(run.spec.optim.ema_decay)) * gradients
    evaluation = logits_bytes(run, max(rows * length for rows, length in evaluation_shapes(run)))
    checkpoint = weights + optimizer_state
    num_kept_checkpoints = run.spec.train.keep_last + (run.spec.train.best is not None)
    existing = min(len(list_checkpoints(folder / "checkpoints")), num_kept_checkpoints) if folder else 0
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
        disk=(num_kept_checkpoints + 1 - existing) * checkpoint,
        disk_free=free_bytes(folder) if folder else None,
    )


def trainable_count(run: PreparedRun, model: Model) -> int:
    """Adds LoRA to the model, freezes what the run freezes, and returns the number of trained weights."""
    if run.spec.lora:
        add_lora(model, run.spec.lora, seed=0, new=())
    freeze(model, run.spec.freeze or ())
    return sum(parameter.numel() for parameter in trainable(model))


def activation_bytes(run: PreparedRun, model: Model, batch: Batch) -> tuple[int, tuple[int, int, int]]:
    """Returns the bytes that a forward pass saves for the backward pass, and the batch's shape."""
    rows, length = batch.inputs.tokens.shape[:2]
    source_length = batch.source.tokens.shape[1] if batch.source else 0
    counted_length = min(length, MAX_RECURRENT_LENGTH) if run.model_spec.recurrent else length
    inputs, source = dummy_inputs(run.model_spec, rows, counted_length, source_length)
    total = saved_bytes(model, inputs, source) * length // counted_length + logits_bytes(run, rows * length)
    if source_length and source is None:  # the same model also reads a second text
        total += saved_bytes(model, dummy_inputs(run.model_spec, rows, source_length, source_length)[0], None)
    return total, (rows, length, source_length)


def logits_bytes(run: PreparedRun, positions: int) -> int:
    return (
        LOGITS_TENSORS * BYTES * positions * run.special_tokens.vocab_size
        if run.model_spec.head.output == "tokens"
        else 0
    )


def evaluation_shapes(run: PreparedRun) -> list[tuple[int, int]]:
    loader = BatchLoader(run, run.validation_dataset, max_rows=run.spec.train.eval_rows)
    return [loader.shape(i) for i in range(len(loader))]


def check_resources(needs: ResourceEstimate) -> None:
    """Raises if a run does not fit into memory or on the disk."""
    if needs.memory_free is not None and needs.memory > needs.memory_free:
        rows, length, _ = needs.batch
        raise OutOfMemoryError(
            f"the run needs about {format_bytes(needs.memory)} of memory and {format_bytes(needs.memory_free)} are "
            f"free: {format_bytes(needs.memory - needs.activations)} for {needs.parameters:,} parameters, gradients "
            f"and optimizer state, {format_bytes(needs.activations)} for a batch of {rows:,} × {length:,}",
            hint="make the model or train.batch_tokens smaller",
        )
    if needs.disk_free is not None and needs.checkpoint > needs.disk_free:  # the run warns if two do not fit
        raise OutOfDiskError(
            f"the run needs about {format_bytes(needs.disk)} on the disk and {format_bytes(needs.disk_free)} are free; "
            f"each checkpoint has {format_bytes(needs.checkpoint)}",
            hint="free some space, or use another --output",
        )


# --------------------------------------------------------------------------------------------------------- the machine


def memory_free(device: torch.device) -> int | None:
    """Returns the bytes that are free on the GPU, or that machine, control group and process limit leave free."""
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
    """Reads a size from a file such as /proc/meminfo, in bytes."""
    try:
        lines = dict(line.split(":", 1) for line in path.read_text(encoding="utf-8").splitlines())
        return int(lines[name].split()[0]) << 10
    except (OSError, ValueError, KeyError):
        return None
