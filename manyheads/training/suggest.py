"""`manyheads new`: writes a run file for a task and the user's data, with a reason for each choice."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyheads.data.columns import choose_columns
from manyheads.data.source import DataSpec
from manyheads.data.tokenizer import BPESpec
from manyheads.errors import DataError, DataSizeError, UsageError, one_line
from manyheads.model.builder import build_meta, resolve_device
from manyheads.model.cost import count_parameters, format_bytes
from manyheads.spec import Tree, did_you_mean, override, quote
from manyheads.tasks.suggestion import SIZES, Suggestion
from manyheads.tasks.task import TaskSpec
from manyheads.training.batches import row_lengths
from manyheads.training.draft import EVALUATIONS, InitialModel, RunFileDraft
from manyheads.training.estimate import (
    EpochEstimate,
    SpeedEstimate,
    estimate_epoch,
    format_seconds,
    measure_speed,
    run_seconds,
)
from manyheads.training.resources import estimate_resources, memory_free

MAX_MINUTES = 60 * 24 * 365
PACKED = 512  # tokens per row if texts are packed
# tokens to which rows are truncated if that loses at most 5 %, or at most 50 %, of all tokens
USUAL_LENGTH, MAX_LENGTH = 2048, 8192
MIN_STEPS = 400
USEFUL_STEPS, USEFUL_EPOCH = 200, 1000  # fewest steps, and an epoch if it has at most this many, however short the time
FINE_TUNING_EPOCHS = 3
SAMPLE = 2_000_000  # characters on which a tokenizer is tried
# (minimum characters of all texts, vocabulary size)
VOCAB_SIZES = ((5e7, 16000), (5e6, 8000), (1e6, 4000), (3e5, 2000), (5e4, 1000), (0, 500))
EPOCHS = ((1e5, 40), (1e6, 20), (1e7, 10), (math.inf, 3))  # (maximum training tokens, epochs)


def suggest_run(
    task: str,
    file: Path | None = None,
    *,
    architecture: str | None = None,
    columns: str | None = None,
    overrides: Sequence[str] = (),
    minutes: float = 30.0,
    init_from: str | None = None,
) -> tuple[str, list[str]]:
    """Returns a run file as text, and the reasons as lines; with `init_from`, to fine-tune this checkpoint.

    `overrides` are fields of the data, as path=value.
    """
    if not 0 < minutes <= MAX_MINUTES:
        raise UsageError(f"--minutes is {minutes:g}, expected more than 0 and at most a year")
    if task not in TaskSpec.kinds:
        raise UsageError(f"no task {quote(task)}{did_you_mean(task, TaskSpec.kinds)}")
    kind: Any = TaskSpec.kinds[task]
    if other := [assignment for assignment in overrides if not assignment.startswith("data.")]:
        raise UsageError(f"-s is {quote(other[0])}, expected a field of the data", hint="change others in the run file")
    initial = InitialModel.load(init_from, kind, architecture) if init_from is not None else None
    tree, columns_reason = suggest_data(kind, file, columns, overrides)
    data = DataSpec.from_config(tree)
    architecture = initial.spec.architecture if initial else choose_architecture(kind, architecture)
    suggestion = Suggestion(task=kind, architecture=architecture, corpus=data.load(), data=data)
    if initial:
        suggestion = replace(suggestion, size=initial.size)
    draft = limit_lengths(choose_tokenizer(RunFileDraft(suggestion, tree, columns_reason, initial)))
    draft, steps, epoch = choose_size(draft)
    draft, reasons = fit_time(draft, steps, epoch, minutes=minutes)
    header = [f"# {one_line(reason)}" for reason in reasons]
    return "\n".join((*header, "", draft.text())), reasons


# ----------------------------------------------------------------------------------------------------------------- data


def choose_architecture(task: type[TaskSpec], name: str | None) -> str:
    architecture = name or task.architectures[0]
    if architecture not in task.architectures:
        raise UsageError(f"--architecture is {quote(name)}, expected {' or '.join(task.architectures)} for {task.kind}")
    return architecture


def suggest_data(
    task: type[TaskSpec], file: Path | None, columns: str | None, overrides: Sequence[str]
) -> tuple[Tree, str]:
    """Returns the table [data], and why its columns were chosen."""
    if file is None or not task.takes_file:
        if file is not None or columns:
            raise UsageError(
                f"{task.kind} generates its data"
                if file is not None
                else "--columns names columns of a file, and no file is given"
            )
        if task.default_data is None:
            raise UsageError(f"{task.kind} has no built-in data; name a file")
        return override({"data": task.default_data}, overrides)["data"], ""
    if task.file_kind is None:
        raise UsageError(
            f"{task.kind} has no file_kind, the kind of data of a file", hint="write the run file yourself"
        )
    kind: Any = DataSpec.kinds[task.file_kind]
    tree: Tree = override({"data": {"kind": task.file_kind, "path": str(file)}}, overrides)["data"]
    if "columns" in tree and not columns:
        return tree, "as given"
    settings = {name: value for name, value in tree.items() if name not in ("kind", "path", "columns")}
    longer_first = task.longer_column_first
    choice = choose_columns(file, kind, columns=columns, longer_column_first=longer_first, settings=settings)
    return tree | ({"columns": list(choice.names)} if choice.names else {}), choice.reason


# -------------------------------------------------------------------------------------------------------------- choices


def choose_tokenizer(draft: RunFileDraft) -> RunFileDraft:
    """Chooses the largest vocabulary size that the text supports."""
    suggestion = draft.suggestion
    if not suggestion.text_fields or draft.initial:
        return draft.replace()
    if suggestion.task.word_tokens or suggestion.data.closed_vocabulary:
        return draft.replace(vocab_size=0)
    sample, characters = sample_texts(suggestion)
    for min_characters, vocab_size in VOCAB_SIZES:
        if characters >= min_characters:
            try:
                BPESpec(vocab_size=vocab_size).make(sample)
                return draft.replace(vocab_size=vocab_size)
            except DataError:  # the text has too few distinct subwords
                continue
    return draft.replace(vocab_size=None)


def sample_texts(suggestion: Suggestion) -> tuple[list[str], int]:
    """Returns the first texts, and the number of characters of all texts."""
    columns = [suggestion.corpus.fields.index(name) for name in suggestion.text_fields]
    sample, characters = list[str](), 0
    for row in suggestion.corpus.train:
        if characters <= SAMPLE:
            sample += [row[i][:SAMPLE] for i in columns]
        characters += sum(len(row[i]) for i in columns)
    return sample, characters


def limit_lengths(draft: RunFileDraft) -> RunFileDraft:
    """Truncates long rows if little is lost, because they would decide the batch size; packs single texts."""
    suggestion = draft.suggestion
    if not suggestion.text_fields:
        return draft
    lengths = row_lengths(draft.run, draft.run.train_dataset).max(1)
    stack = draft.run.model_spec.encoder or draft.run.model_spec.decoder
    pack = min(PACKED, (stack.max_positions if stack else None) or PACKED)
    too_long = any(draft.run.num_truncated) or lengths.max() > pack
    if suggestion.task.packable and len(suggestion.stacks) == 1 and too_long:
        return draft.replace(pack=pack)
    if lengths.max() > MAX_LENGTH and draft.can_split_texts:
        return limit_lengths(draft.with_split_texts())
    for limit, max_fraction in ((USUAL_LENGTH, 0.05), (MAX_LENGTH, 0.5)):
        truncated_fraction = 1 - np.minimum(lengths, limit).sum() / lengths.sum()
        if 0 < truncated_fraction <= max_fraction:
            longer = int((lengths > limit).sum())
            reason = f"tokens; {longer:,} of {len(lengths):,} rows are longer and are truncated"
            return draft.replace(
                suggestion=replace(suggestion, max_row_length=limit), max_length=limit, max_length_reason=reason
            )
    longest = int(lengths.max())
    if longest > MAX_LENGTH:
        raise DataSizeError(f"the longest row has {longest:,} tokens, more than {MAX_LENGTH:,}; split it into pieces")
    rows = draft.run.train_dataset, draft.run.validation_dataset
    longest = max(int(row_lengths(draft.run, split).sum(1).max()) for split in rows)
    return draft.replace(suggestion=replace(suggestion, max_row_length=longest))


def choose_size(draft: RunFileDraft) -> tuple[RunFileDraft, int, EpochEstimate]:
    """Chooses model, batch size and steps for the data; takes a smaller model until it fits into half of the memory."""
    lengths = row_lengths(draft.run, draft.run.train_dataset).sum(1)
    longest, total = draft.settings.pack or int(lengths.max()), int(lengths.sum())
    tokens_per_batch = total // draft.suggestion.task.batches_per_epoch
    power = 1 << max(0, tokens_per_batch.bit_length() - 1) if tokens_per_batch else 512
    batch_tokens = max(512, min(4096, power), 64 * math.ceil(longest / 64))
    size = draft.suggestion.size if draft.initial else next(size for size in SIZES if total <= size.max_tokens)
    draft = draft.replace(suggestion=replace(draft.suggestion, size=size), batch_tokens=batch_tokens)
    while True:
        estimate = estimate_resources(draft.run, device=resolve_device("auto"))
        if (
            estimate.memory_free is None
            or estimate.memory <= estimate.memory_free / 2
            or (smaller_draft := draft.smaller()) is None
        ):
            break
        draft = smaller_draft
    epoch = estimate_epoch(draft.run)
    if draft.initial:
        return draft, FINE_TUNING_EPOCHS * epoch.batches, epoch
    epochs = next(epochs for limit, epochs in EPOCHS if total <= limit)
    return draft, two_digits(max(MIN_STEPS, epochs * epoch.batches)), epoch


def explain_choices(
    draft: RunFileDraft, epoch: EpochEstimate, speed: SpeedEstimate, *, seconds_allowed: float | None
) -> list[str]:
    """Returns the reasons for the run file; `seconds_allowed` if the time decided the number of steps."""
    run, suggestion, task = draft.run, draft.suggestion, draft.suggestion.task
    parameters = count_parameters(build_meta(run.model_spec))
    architecture, device = suggestion.architecture, resolve_device("auto")
    architecture_reason = (
        f": {task.architecture_reason}"
        if architecture == task.architectures[0]
        else f", as given; usual is {task.architectures[0]}"
    )
    threads = torch.get_num_threads()
    cores = f"{os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else str(device)
    machine = f"{cores}, {format_bytes(free)} of memory free" if (free := memory_free(device)) else cores
    seconds = format_seconds(run_seconds(run, speed))
    time = f"about {seconds} here ({machine}; a step took {1000 * speed.step:,.0f} ms)"
    limit = f"; limited to {format_seconds(seconds_allowed)}, more steps may be better" if seconds_allowed else ""
    if draft.initial:
        architecture_reason = f": the weights and the tokenizer of {draft.initial.path}"
    layers = f"{suggestion.size.layers} layers of " if suggestion.stacks else ""
    return [
        suggestion.corpus.description,
        f"{architecture}{architecture_reason}",
        f"{layers}width {suggestion.size.width}, {parameters:,} parameters, for {epoch.tokens:,} training tokens",
        f"{draft.settings.steps:,} steps, {suggestion.epochs:.3g} epochs of {epoch.rows:,} rows, {time}{limit}",
    ]


def fit_time(
    draft: RunFileDraft, steps: int, epoch: EpochEstimate, *, minutes: float
) -> tuple[RunFileDraft, list[str]]:
    """Takes a smaller model if fewer than half of the steps fit into the time, and then as many steps as fit."""
    seconds = 60 * minutes
    speed = measure_speed(draft.run, resolve_device("auto"), seconds=min(1.5, seconds / 10), one_thread=True)
    evaluations = max(1, min(EVALUATIONS, int(seconds / 5 / max(speed.evaluation, 1e-9))))  # in a fifth of the time
    affordable_steps = two_digits(max(1.0, (seconds - evaluations * speed.evaluation) / speed.step))
    smaller_draft = draft.smaller() if 2 * affordable_steps < steps and not draft.initial else None
    if smaller_draft is not None:
        return fit_time(smaller_draft, steps, epoch, minutes=minutes)
    min_steps = min(steps, max(USEFUL_STEPS, epoch.batches if epoch.batches <= USEFUL_EPOCH else 0))
    count = max(min_steps, min(steps, affordable_steps))
    suggestion = replace(draft.suggestion, epochs=count / epoch.batches)
    draft = draft.replace(suggestion=suggestion, steps=count, evaluations=evaluations)
    reasons = explain_choices(
        draft, epoch, speed, seconds_allowed=seconds if min_steps <= affordable_steps < steps else None
    )
    if affordable_steps < min_steps:
        reasons.append(
            f"warning: {min_steps:,} steps, the fewest that are worth training, take about "
            f"{format_seconds(run_seconds(draft.run, speed))} here, longer than --minutes {minutes:g}"
        )
    return draft, reasons


def two_digits(count: float) -> int:
    """Rounds down to two significant digits."""
    size: int = 10 ** max(0, len(str(int(count))) - 2)
    return int(count) // size * size
