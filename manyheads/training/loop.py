"""The training loop: optimizer steps, evaluations and checkpoints, as a generator of events."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.data.order import sample_indices
from manyheads.errors import DivergedError, NonFiniteError, OutOfDiskError, OutOfMemoryError, RunChangedError
from manyheads.files.write import free_bytes, write_atomic
from manyheads.model.builder import Model, manual_seed, resolve_device
from manyheads.spec import Tree
from manyheads.tasks.auxiliary import auxiliary_counts, loss_with_auxiliary, total_loss
from manyheads.tasks.batch import IGNORE_INDEX, Batch, LossSum
from manyheads.training.batches import BatchLoader, BatchStream
from manyheads.training.events import (
    Change,
    ConfigChanged,
    Evaluated,
    Event,
    Finished,
    Prepared,
    Resumed,
    Saved,
    SaveFailed,
    Step,
    Warned,
)
from manyheads.training.folder import (
    check_folder,
    config_changes,
    data_hashes,
    environment_changes,
    lock_folder,
    write_run_files,
)
from manyheads.training.log import open_log
from manyheads.training.optim import ema_weights, restore_ema, update_ema
from manyheads.training.preparation import PreparedRun, checkpoint_hash, initial_model, prepare
from manyheads.training.resources import check_resources, estimate_resources
from manyheads.training.run import RunSpec, to_spec
from manyheads.training.signals import handle_signals
from manyheads.training.store import (
    TrainState,
    checkpoint_bytes,
    checkpoint_writer,
    find_resume_checkpoint,
    newest_finite,
    remove_leftovers,
    rename_newer_checkpoints,
    repair_best,
    restore,
)

GENERATED_ROWS = 64  # rows per batch of greedy decoding in an evaluation
MAX_SKIPPED_STEPS = 10  # consecutive skipped steps before the run stops
MAX_FAILED_SAVES = 3  # consecutive failed saves before the run stops

ShouldStop = Callable[[], str | None]  # polled between pieces of work; returns a reason to stop, or None


def train(
    run: RunSpec | Tree | str | Path,
    folder: str | Path,
    *,
    overrides: Sequence[str] = (),
    device: torch.device | str = "auto",
    resume: str = "auto",
    override_resume: Sequence[str] = (),
    progress: Callable[[Event], None] = lambda event: None,
) -> Tree:
    """Trains or resumes a run, as `manyheads train` does, and returns how it ended as a dict.

    `run` is a run file, a dict or a spec. `progress` is called with every event; `train_events` yields them instead.
    """
    spec, folder = to_spec(run, overrides), Path(folder)
    event: Any = None  # after the loop, this is Finished
    with handle_signals() as should_stop:
        device = resolve_device(device)
        check_folder(folder, resume)
        prepared = prepare(spec)
        check_resources(estimate_resources(prepared, folder, device))
        events = train_events(
            prepared, folder, should_stop=should_stop, device=device, resume=resume, override_resume=override_resume
        )
        for event in events:
            progress(event)
    return {"schema": 1, "folder": str(folder)} | asdict(event)


def train_events(
    run: PreparedRun | RunSpec | Tree | str | Path,
    folder: str | Path,
    *,
    should_stop: ShouldStop = lambda: None,
    device: torch.device | str = "auto",
    resume: str = "auto",
    override_resume: Sequence[str] = (),
) -> Iterator[Event]:
    """Trains a run in a folder, or resumes it there, and yields what happens.

    `resume` is "auto", "never" or one of the run's checkpoints. A run whose settings or data changed is refused, except
    for the fields in `override_resume`.
    """
    run = run if isinstance(run, PreparedRun) else prepare(to_spec(run))
    device, folder = resolve_device(device), Path(folder)
    checkpoint_folder = folder / "checkpoints"
    check_folder(folder, resume)
    with lock_folder(folder) as check_lock, open_log(folder, tensorboard=run.spec.train.tensorboard) as log:
        hashes = data_hashes(run)
        remove_leftovers(checkpoint_folder)
        checkpoint, warnings = find_resume_checkpoint(checkpoint_folder, resume)
        changes = config_changes(run, hashes, folder, checkpoint, override_resume)
        with explain_memory_errors("the model"):
            model, events = initial_model(run, device)
            optimizer = run.spec.optim.build(model)
        state = restore_or_init(checkpoint, run, model, optimizer)
        if checkpoint and resume != "auto":
            warnings = rename_newer_checkpoints(checkpoint_folder, checkpoint)
        environment_warnings = environment_changes(folder, device)
        write_run_files(run, hashes, folder, device)
        log.drop_after(state.step if checkpoint else -1, state.evaluated_step if checkpoint else -1)
        if checkpoint:
            write_atomic(checkpoint_folder / "latest", checkpoint.name)  # the run may have been killed between the two
            if any(change.field == "train.eval_rows" for change in changes):
                state.reset_best()  # evaluations on other rows are not comparable
            best_warning = repair_best(checkpoint_folder, state, run.spec.train.best)
            messages = [*([best_warning] if best_warning else []), *environment_warnings]
            events = [Resumed(state.step, tuple(warnings)), *(Warned(state.step, message) for message in messages)]
        if changes:
            events.append(ConfigChanged(state.step, tuple(changes)))
        events += check_free_space(folder, checkpoint_bytes(checkpoint_folder, model), state.step)
        write = checkpoint_writer(run, model, optimizer, checkpoint_folder)
        checkpointer = Checkpointer(write, checkpoint_folder, check_lock, last_saved_state=replace(state))
        loop = train_loop(run, model, optimizer, state=state, checkpointer=checkpointer, should_stop=should_stop)
        for event in chain([Prepared(state.step, run.corpus.description, str(device))], events, loop):
            if message := log.add(event):
                yield Warned(event.step, message)
            yield event


def restore_or_init(
    checkpoint: Path | None, run: PreparedRun, model: Model, optimizer: torch.optim.Optimizer
) -> TrainState:
    """Restores weights, optimizer and training state from a checkpoint; without one, returns the state of a new run."""
    init_hash = checkpoint_hash(run.init_checkpoint) if run.init_checkpoint else ""
    state = (
        restore(checkpoint, model, optimizer, lora=run.spec.lora is not None)
        if checkpoint
        else TrainState(init_hash=init_hash)
    )
    restore_ema(optimizer, run.spec.optim.ema_decay)
    if state.init_hash != init_hash:
        raise RunChangedError(
            f"{run.spec.init_from} is not the checkpoint that this run was initialized from",
            [Change("init_from", state.init_hash, init_hash)],
            hint="restore it, or use another --output",
        )
    return state


def check_free_space(folder: Path, checkpoint_size: int, step: int) -> list[Event]:
    """Raises if no checkpoint fits on the disk, and warns if only one does."""
    fits = free_bytes(folder) / checkpoint_size
    message = f"the disk of {folder} has space for {fits:.1f} checkpoints"
    if fits < 1:
        raise OutOfDiskError(message, hint="free some space, or use another --output")
    return [Warned(step, f"{message}, and a run needs at least 2")] if fits < 2 else []


def train_loop(
    run: PreparedRun,
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    state: TrainState,
    checkpointer: Checkpointer,
    should_stop: ShouldStop,
) -> Iterator[Event]:
    """Trains, evaluates and saves until train.steps, train.best or a signal ends the run."""
    settings, best, stream = run.spec.train, run.spec.train.best, BatchStream(run, state)

    def evaluation_due() -> bool:
        is_eval_step = state.step % settings.eval_every == 0 or state.step == settings.steps
        return is_eval_step and state.evaluated_step != state.step

    reason, improved = state.stop_reason(best) or should_stop(), False
    while reason is None and (state.step < settings.steps or evaluation_due()):
        improved = False
        if not evaluation_due():  # due on resume if a signal interrupted the evaluation of this step
            with explain_memory_errors(f"batches of {settings.batch_tokens:,} tokens"):
                event = train_step(model, optimizer, stream, run, state)
            yield event
            check_skipped_steps(state, checkpointer.folder)
        if evaluation_due() and (metrics := interruptible_evaluation(model, optimizer, run, should_stop)):
            improved = state.add_evaluation(metrics, best)
            yield Evaluated(state.step, metrics)
        reason = state.stop_reason(best) or should_stop()
        if improved or (state.step % settings.save_every == 0 and not state.consecutive_skips):
            run.train_dataset.check()  # raises if the data files changed during training
            yield checkpointer.save(state, is_best=improved)
            checkpointer.check(MAX_FAILED_SAVES)
            reason = reason or should_stop()
    if checkpointer.last_saved_state != state:
        run.train_dataset.check()
        yield checkpointer.save(state, is_best=improved)
        checkpointer.check(1)
        if checkpointer.last_saved_state != state:
            raise DivergedError(
                f"the weights at step {state.step:,} are NaN or infinite",
                hint=f"the last checkpoint is of step {checkpointer.last_saved_state.step:,}",
            )
    yield Finished(state.step, reason or "steps", metrics=dict(state.metrics))


@dataclass
class Checkpointer:
    """Saves checkpoints; knows the state of the last one and how many saves failed since."""

    write: Callable[..., Path]  # (state, is_best=…) → the checkpoint
    folder: Path
    check_lock: Callable[[], None]
    last_saved_state: TrainState
    failures: int = 0
    message: str = ""

    def save(self, state: TrainState, *, is_best: bool = False) -> Saved | SaveFailed | Warned:
        """Saves one checkpoint. It becomes the best only once it is written, so that a failed save never is."""
        snapshot = state.as_best() if is_best else replace(state)
        try:
            self.check_lock()
            path = self.write(snapshot, is_best=is_best)
        except OSError as error:
            self.failures += 1
            self.message = f"cannot save in {self.folder}: {error.strerror or error}"
            return SaveFailed(state.step, self.message, self.failures)
        except NonFiniteError as error:
            return Warned(state.step, f"no checkpoint is saved: {error}")
        self.last_saved_state, self.failures = snapshot, 0
        state.best_value, state.best_step = snapshot.best_value, snapshot.best_step
        return Saved(state.step, str(path))

    def check(self, max_failures: int) -> None:
        """Raises if the last `max_failures` saves failed."""
        if self.failures >= max_failures:
            times = f" ({self.failures} times in a row)" if self.failures > 1 else ""
            raise OutOfDiskError(f"{self.message}{times}; training after step {self.last_saved_state.step:,} is lost")


@contextmanager
def explain_memory_errors(purpose: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_memory_error = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_memory_error and not re.search("not enough memory|can't allocate memory|out of memory", str(error)):
            raise
        hint = (
            "lower train.batch_tokens, and raise train.accumulate to keep the effective batch size, "
            "or make the model smaller"
        )
        raise OutOfMemoryError(f"there is not enough memory for {purpose}", hint=hint) from None


def interruptible_evaluation(
    model: Model, optimizer: torch.optim.Optimizer, run: PreparedRun, should_stop: ShouldStop
) -> dict[str, float] | None:
    """Returns the metrics on the validation set, or None if a signal interrupted it; the next launch repeats it."""
    try:
        with explain_memory_errors("an evaluation"), ema_weights(optimizer):
            return validate(model, run, should_stop)
    except Interrupted:
        return None


def check_skipped_steps(state: TrainState, checkpoint_folder: Path) -> None:
    """Raises after too many skipped steps in a row; no checkpoint was saved since the first of them."""
    if state.consecutive_skips >= MAX_SKIPPED_STEPS:
        path = newest_finite(checkpoint_folder)
        raise DivergedError(
            f"{state.consecutive_skips} steps in a row, up to step {state.step}, had NaN or infinite loss or gradients",
            hint="lower optim.lr, or inspect the rows that metrics.jsonl lists"
            + (f"; the last good checkpoint is {path}" if path else ""),
        )


def train_step(
    model: Model, optimizer: torch.optim.Optimizer, stream: BatchStream, run: PreparedRun, state: TrainState
) -> Step:
    """One optimizer step over train.accumulate batches; a loss or gradient that is NaN or infinite skips the update."""
    start, spec, device = time.perf_counter(), run.spec, next(model.parameters()).device
    state.step += 1
    batches, rows = list[Batch](), list[int]()
    for _ in range(spec.train.accumulate):
        batches.append(stream.next().to(device))
        rows += stream.row_indices
    lr = spec.optim.lr * spec.optim.schedule.factor(state.step, spec.train.steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss, auxiliary_losses = accumulate_gradients(model, batches, spec, state.step)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    grad_norm = torch.nn.utils.get_total_norm(gradients)
    finite = math.isfinite(loss) and bool(grad_norm.isfinite())
    if finite:
        if spec.optim.clip:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), spec.optim.clip, grad_norm)
        optimizer.step()
        if spec.optim.ema_decay:
            update_ema(optimizer, spec.optim.ema_decay, state.step)
    optimizer.zero_grad(set_to_none=True)
    tokens = sum(batch.num_tokens for batch in batches)
    state.tokens += tokens
    state.rows += len(rows)
    state.consecutive_skips = 0 if finite else state.consecutive_skips + 1
    return Step(
        step=state.step,
        loss=loss,
        lr=lr,
        grad_norm=float(grad_norm),
        tokens=tokens,
        seconds=time.perf_counter() - start,
        skipped=not finite,
        auxiliary_losses=auxiliary_losses,
        rows=() if finite else tuple(rows),
    )


def accumulate_gradients(
    model: Model, batches: Sequence[Batch], spec: RunSpec, step: int
) -> tuple[float, dict[str, float]]:
    """Accumulates gradients of the mean loss over all targets; returns that mean and the auxiliary losses."""
    target_count = sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in batches)
    model.train()
    loss_sum, counts = 0.0, auxiliary_counts(spec.auxiliary_losses, model, batches)
    auxiliary_losses = dict.fromkeys(counts, 0.0)
    for i, batch in enumerate(batches):
        manual_seed(mix_seed(spec.seed, step, i))  # so that resuming needs no random state
        with autocast(batch.inputs.tokens.device):
            loss = loss_with_auxiliary(spec.task, spec.auxiliary_losses, model, batch)
        total_loss(loss, target_count, spec.auxiliary_losses, counts).backward()
        loss_sum += float(loss.sum.detach())
        for name, auxiliary in loss.auxiliary_losses.items():
            auxiliary_losses[name] += float(auxiliary.sum.detach()) / max(1, counts[name])
    return loss_sum / max(1, target_count), auxiliary_losses


def mix_seed(*numbers: int) -> int:
    """Derives one seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


# ----------------------------------------------------------------------------------------------------------- validation


class Interrupted(Exception):  # noqa: N818
    """A signal arrived during an evaluation, which the next launch repeats."""


@torch.no_grad()
def validate(model: Model, run: PreparedRun, should_stop: ShouldStop = lambda: None) -> dict[str, float]:
    """Returns the task's metrics on the validation set.

    Runs that differ only in their seed are evaluated on the same rows. Masked positions and in-batch negatives
    also depend on the batches, and so on train.batch_tokens.
    """
    model.eval()
    device, total = next(model.parameters()).device, LossSum()
    loader = BatchLoader(run, run.validation_dataset, max_rows=run.spec.train.eval_rows)
    for batch in loader:
        if should_stop():
            raise Interrupted
        with autocast(device):
            total.add(run.spec.task.loss(model, batch.to(device)))
    return total.metrics() | generation_metrics(model, run, should_stop)


def generation_metrics(model: Model, run: PreparedRun, should_stop: ShouldStop) -> dict[str, float]:
    """Returns metrics of greedy decoding, if the task defines any."""
    dataset, best = run.validation_dataset, run.spec.train.best

    def groups() -> Iterator[list[Any]]:
        index = sample_indices(len(dataset), run.spec.train.eval_rows).tolist()
        for start in range(0, len(index), GENERATED_ROWS):
            if should_stop():
                raise Interrupted
            yield [dataset[i] for i in index[start : start + GENERATED_ROWS]]

    checkpoint, extra_metric = Checkpoint(model, run.tokenizer), best.metric if best else None
    return run.spec.task.generation_metrics(checkpoint, groups(), run.special_tokens, extra_metric=extra_metric)


def autocast(device: torch.device) -> torch.autocast:
    """Computes matrix products in bfloat16 on a GPU, and in float32 on a CPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
