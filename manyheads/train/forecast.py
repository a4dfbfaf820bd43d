"""What a run will take, before it starts: memory, disk, passes over the data, and time by the clock of this machine."""

from __future__ import annotations

import resource
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manyheads.model.build import Model, outline
from manyheads.model.size import BYTES, LONGEST_WALK, blank, kept_bytes, readable
from manyheads.objective.score import Batch
from manyheads.train.checkpoint import steps as checkpoints
from manyheads.train.look import AT_ONCE, evaluate
from manyheads.train.loop import update
from manyheads.train.lora import adapt
from manyheads.train.model import compiled, first_model
from manyheads.train.run import Ready, RunError
from manyheads.train.start import freeze
from manyheads.train.stream import Order, Stream

MOST_LOOKED_AT = 200  # batches that are made only to be counted
OF_LOGITS = 3  # tensors of the size of all logits: those asked for, their logarithms, their gradient
FIRST_COMPILED = 3  # steps in which layers are compiled, for the shapes of the first batches and then for any
MOMENTS = 2  # numbers that the optimiser remembers of each weight


class NoRoomError(RunError):
    """A run that this machine cannot hold."""

    exit_code = 5


@dataclass(frozen=True)
class Epoch:
    """One pass over the rows; tokens and padding are counted on as many batches as were looked at."""

    rows: int
    batches: int
    tokens: int  # without padding
    padding: float  # the share of places that nothing stands in
    looked_at: int


@dataclass(frozen=True)
class Needs:
    """Bytes: what a run holds in memory at once, what it keeps on the disk, and what there is of both."""

    parameters: int
    weights: int
    gradients: int
    moments: int
    activations: int  # of the largest batch, with its logits
    batch: tuple[int, int, int]  # its rows, their length, and that of their sources, 0 where there are none
    memory: int
    memory_free: int | None
    checkpoint: int
    disk: int  # for all checkpoints that are kept, with the best where there is a goal, and one that is being written
    disk_free: int | None


@dataclass(frozen=True)
class Pace:
    """Seconds, as measured."""

    step: float
    evaluation: float
    updates: int  # that were timed
    compiled: float | None = None  # a step, and what it takes to get there, where that was tried
    compiling: float = 0.0


def epoch_of(ready: Ready) -> Epoch:
    """Makes the first batches of an epoch, and counts."""
    stream = Stream(ready)
    batches = len(stream.order())
    looked_at = min(batches, MOST_LOOKED_AT)
    tokens = places = 0
    for _ in range(looked_at):
        batch = stream.next()
        tokens, places = tokens + batch.tokens, places + places_of(batch)
    return Epoch(len(ready.rows), batches, round(tokens * batches / looked_at), 1 - tokens / places, looked_at)


def places_of(batch: Batch) -> int:
    return sum(one.tokens.shape[0] * one.tokens.shape[1] for one in (batch.inputs, batch.source) if one is not None)


def needs_of(ready: Ready, folder: Path | None = None, device: torch.device | str = "cpu") -> Needs:
    """Counts without any memory; of batches, the one with most places and the one with the longest row are looked at."""
    order = Order(ready, ready.rows)
    shapes = [order.places(i) for i in range(len(order))]
    most, longest = (shapes.index(max(shapes, key=key)) for key in (lambda shape: shape[0] * shape[1], lambda shape: shape[1]))
    model = outline(ready.spec)
    parameters, learned = sum(parameter.numel() for parameter in model.parameters()), learned_of(ready)
    activations, shape = max(kept_by(ready, model, order.batch(i)) for i in {most, longest})
    weights, gradients = BYTES * parameters, BYTES * learned
    moments = (MOMENTS + bool(ready.run.optim.average)) * gradients
    memory = weights + gradients + moments + max(activations, evaluation_bytes(ready))
    checkpoint = weights + moments
    kept = ready.run.train.keep + (ready.run.train.goal is not None)
    there = min(len(checkpoints(folder / "checkpoints")), kept) if folder else 0
    return Needs(
        parameters=parameters,
        weights=weights,
        gradients=gradients,
        moments=moments,
        activations=activations,
        batch=shape,
        memory=memory,
        memory_free=memory_free(torch.device(device)),
        checkpoint=checkpoint,
        disk=(kept + 1 - there) * checkpoint,
        disk_free=disk_free(folder) if folder else None,
    )


def learned_of(ready: Ready) -> int:
    """How many numbers change: all, but for what is frozen or stands beside a change of low rank."""
    model, run = outline(ready.spec), ready.run
    if run.lora:
        adapt(model, run.lora, seed=0, new=())
    freeze(model, run.freeze or ())
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def kept_by(ready: Ready, model: Model, batch: Batch) -> tuple[int, tuple[int, int, int]]:
    """What a batch keeps until its backward, and its shape."""
    count, length = batch.inputs.tokens.shape[:2]
    source = batch.source.tokens.shape[1] if batch.source else 0
    walked = min(length, LONGEST_WALK) if ready.spec.recurrent else length
    inputs, given = blank(ready.spec, count, walked, source)
    kept = kept_bytes(model, inputs, given) * length // walked + logits_bytes(ready, count * length)
    if source and given is None:  # a second text, read by the same model
        kept += kept_bytes(model, blank(ready.spec, count, source, source)[0], None)
    return kept, (count, length, source)


def logits_bytes(ready: Ready, places: int) -> int:
    return OF_LOGITS * BYTES * places * ready.tokens.count if ready.spec.head.scores_tokens else 0


def evaluation_bytes(ready: Ready) -> int:
    """The logits of unseen rows, which are looked at many at a time."""
    order = looked_at(ready)
    return logits_bytes(ready, max(count * length for count, length in map(order.places, range(len(order)))))


def looked_at(ready: Ready) -> Order:
    """The batches of a look at unseen rows."""
    return Order(ready, ready.unseen, most=ready.run.train.evaluate_rows)


def check_room(needs: Needs) -> None:
    """Refuses what cannot go well, before anything is begun."""
    if needs.memory_free is not None and needs.memory > needs.memory_free:
        rows, length, _ = needs.batch
        raise NoRoomError(
            f"this run needs about {readable(needs.memory)} of memory and {readable(needs.memory_free)} are free: "
            f"{readable(needs.memory - needs.activations)} for {needs.parameters:,} parameters with gradients and moments, "
            f"{readable(needs.activations)} for a batch of {rows:,} × {length:,}; make the model or train.tokens smaller"
        )
    if needs.disk_free is not None and needs.checkpoint > needs.disk_free:  # where two do not fit, the run warns
        raise NoRoomError(
            f"this run needs about {readable(needs.disk)} on the disk and {readable(needs.disk_free)} are free: checkpoints of "
            f"{readable(needs.checkpoint)} each; free some, or name another --output"
        )


def pace_of(ready: Ready, device: torch.device | str = "cpu", *, seconds: float = 3.0) -> Pace:
    """Times some updates of the real model, and a look at some unseen rows. Nothing is kept and nothing is written."""
    model, _ = first_model(ready, device)
    changer, stream = ready.run.optim.build(model), Stream(ready)
    update(model, changer, stream, ready, stream.state)  # the first one takes longer
    took = list[float]()
    while not took or (sum(took) < seconds / 2 and len(took) < ready.run.train.steps):
        took.append(update(model, changer, stream, ready, stream.state).seconds)
    step = sum(took) / len(took)
    order = looked_at(ready)
    whole = sum(count for count, _ in map(order.places, range(len(order))))
    rows = min(whole, AT_ONCE if step < seconds / 3 else 8)  # fewer take longer a row
    begun = time.perf_counter()
    evaluate(model, replace(ready, run=ready.run.changed(train=ready.run.train.changed(evaluate_rows=rows))))
    return Pace(step, (time.perf_counter() - begun) * whole / rows, len(took))


def tried_compiled(ready: Ready, pace: Pace, device: torch.device | str = "cpu", *, seconds: float = 3.0) -> Pace:
    """The pace, with that of compiled layers beside it."""
    model, _ = first_model(ready, device)
    compiled(model)
    changer, stream, took = ready.run.optim.build(model), Stream(ready), list[float]()
    while len(took) < FIRST_COMPILED or sum(took[FIRST_COMPILED:]) < seconds:
        took.append(update(model, changer, stream, ready, stream.state).seconds)
    step = sum(took[FIRST_COMPILED:]) / len(took[FIRST_COMPILED:])
    return replace(pace, compiled=step, compiling=max(0.0, sum(took[:FIRST_COMPILED]) - FIRST_COMPILED * step))


def duration(ready: Ready, pace: Pace) -> float:
    """Seconds that the whole run will take."""
    how = ready.run.train
    looks = -(-how.steps // how.evaluate_every)
    return how.steps * pace.step + looks * pace.evaluation


# ---------------------------------------------------------------------------------------------------------- the machine


def memory_free(device: torch.device) -> int | None:
    """Bytes that this process may still take: of a GPU; or of the machine, of its control group, of its own limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [machine_free(), group_free(), limit_free()]
    known = [bytes_ for bytes_ in found if bytes_ is not None]
    return min(known) if known else None


def machine_free() -> int | None:
    return kibibytes(Path("/proc/meminfo"), "MemAvailable")


def kibibytes(path: Path, name: str) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in path.read_text(encoding="utf-8").splitlines())
        return int(lines[name].split()[0]) << 10
    except (OSError, ValueError, KeyError):
        return None


def group_free() -> int | None:
    try:
        most, now = (int(Path("/sys/fs/cgroup", name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # none, or "max"
        return None
    return max(0, most - now)


def limit_free() -> int | None:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    now = kibibytes(Path("/proc/self/status"), "VmSize")
    return None if most == resource.RLIM_INFINITY or now is None else max(0, most - now)


def disk_free(folder: Path) -> int | None:
    """Bytes at the place where the folder is, or will be."""
    there = next((place for place in (folder.absolute(), *folder.absolute().parents) if place.exists()), None)
    try:
        return shutil.disk_usage(there).free if there else None
    except OSError:
        return None
