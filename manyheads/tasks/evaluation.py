"""The inputs and results of an evaluation, and the batches that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.data.order import batch_by_length
from manyheads.data.source import Corpus, Row
from manyheads.data.tokenized import InMemoryDataset
from manyheads.errors import UnsupportedError, UsageError
from manyheads.generate.config import (
    CheckpointSettings,
    GenerationConfig,
    generation_config,
    method_kinds,
    sampling_settings,
    selectors,
)
from manyheads.model.finite import check_finite
from manyheads.spec import MAX_COUNT, Tree, quote
from manyheads.tasks.batch import IGNORE_INDEX, Loss, LossSum, SpecialTokens
from manyheads.tasks.task import TaskSpec, patchify_rows

WINDOW = 1024  # tokens per window of a long text if the model has no limit
BATCH_TOKENS, BATCH_LOGITS = 8192, 1 << 25  # maximum numbers of tokens and of logits per batch

OnProgress = Callable[[str, int, int], None]  # (what is done, rows done, rows in all)
Scores = dict[str, float]


@dataclass(frozen=True)
class EvalOptions:
    """Limits of an evaluation, and settings of generation."""

    max_rows: int | None = None
    max_length: int | None = None  # tokens per text
    max_new_tokens: int | None = None
    examples: int = 0
    output: str | None = None  # what will be written: "rows" or "images"
    settings: Tree = field(default_factory=dict)  # of generation, such as num_beams

    def __post_init__(self) -> None:
        self.generation(CheckpointSettings(), default_max_new_tokens=1)
        for name, minimum in (("max_rows", 1), ("max_length", 3), ("examples", 0)):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and minimum <= value <= MAX_COUNT):
                raise UsageError(f"{name} is {quote(value)}, expected an integer from {minimum} to {MAX_COUNT:,}")

    def check_task(self, task: TaskSpec) -> None:
        """Raises if the task has no outputs to write."""
        if self.output is not None and self.output != task.eval_outputs:
            kinds = {"rows": "JSON lines with a result per row", "images": "images as a .png", "": "scores only"}
            hint = "leave out --output" if not task.eval_outputs else f"it can write {kinds[task.eval_outputs]}"
            raise UsageError(f"{task.kind} cannot write {kinds.get(self.output, quote(self.output))}", hint=hint)

    def generation(self, base: CheckpointSettings, *, default_max_new_tokens: int) -> GenerationConfig:
        """The settings of generation: those given, and 4 beams of gnmt-beam if neither they nor a checkpoint differ."""
        gnmt_fields = method_kinds()["gnmt-beam"].model_fields
        method_settings = {*selectors(), "decoding", "do_sample", *sampling_settings()}.difference(gnmt_fields)
        is_other = "num_beams" in base.settings or not method_settings.isdisjoint(self.settings)
        settings: Tree = ({} if is_other else {"decoding": "gnmt-beam"}) | self.settings
        return generation_config(base, default_max_new_tokens, max_new_tokens=self.max_new_tokens, **settings)


@dataclass(frozen=True)
class EvalData:
    """The evaluated rows, and the training rows that baselines are fitted on; columns are `fields`."""

    corpus: Corpus
    fields: tuple[str, ...]
    rows: Sequence[Row]
    train_rows: Sequence[Row]
    labels: tuple[list[str], list[str]] | None = None  # labels of the rows and of the training rows


@dataclass(frozen=True)
class Evaluation:
    """Everything a task needs to evaluate a checkpoint."""

    checkpoint: Checkpoint
    task: TaskSpec
    special_tokens: SpecialTokens
    data: EvalData
    options: EvalOptions
    max_length: int | None  # tokens per text, special tokens included
    from_run: bool  # whether a run of manyheads trained the checkpoint for this task
    seed: int = 0
    progress: OnProgress = lambda action, done, total: None

    def encode(self, texts: Sequence[str]) -> tuple[list[list[int]], tuple[str, ...]]:
        """Returns the ids of each text, and a note if some were truncated."""
        encodings = self.checkpoint.encode(texts)
        count = sum(bool(encoding.overflowing) for encoding in encodings)
        if not count:
            return [encoding.ids for encoding in encodings], ()
        note = f"{count:,} of {len(texts):,} texts were truncated to {self.max_length:,} tokens"
        return [encoding.ids for encoding in encodings], (note,)

    def batches(self, lengths: Sequence[int], action: str, *, logits: bool = False) -> Iterator[list[int]]:
        """Yields batches of row indices with similar lengths; gradients are disabled in the loop over them."""
        vocab, done = self.checkpoint.spec.vocab, 0
        max_tokens = min(BATCH_TOKENS, BATCH_LOGITS // vocab) if logits and isinstance(vocab, int) else BATCH_TOKENS
        with torch.no_grad():
            for index in batch_by_length(np.array(lengths), 0, 0, max_tokens=max(max_tokens, *lengths, 1)):
                self.progress(action, done, len(lengths))
                yield index.tolist()
                done += len(index)
        self.progress(action, done, len(lengths))

    @property
    def baseline_note(self) -> tuple[str, ...]:
        if self.data.train_rows:
            return ()
        return ("no baselines, because there are no training rows to fit them on; name a file with -s data.path=...",)


@dataclass(frozen=True)
class EvalResult:
    """Scores of the model and of each baseline, the model's first."""

    scores: dict[str, Scores]
    notes: tuple[str, ...] = ()
    primary: tuple[str, ...] = ()  # the metrics to show first; all if empty
    signatures: dict[str, str] = field(default_factory=dict)
    outputs: tuple[Tree, ...] = ()  # one per row, if `eval_outputs` is "rows"; text, reference and prediction
    images: tuple[Tree, ...] = ()  # examples, each with the images visible, restored and target
    extra: Tree = field(default_factory=dict)  # further keys of the report


def evaluate_loss(evaluation: Evaluation) -> tuple[EvalResult, NDArray[np.int64]]:
    """Computes loss and accuracy as in training; also returns all predicted targets."""
    task, data, checkpoint = evaluation.task, evaluation.data, evaluation.checkpoint
    if not getattr(checkpoint.tokenizer, "encodes_targets", True):
        raise UnsupportedError("this tokenizer encodes sources only, so the loss of targets cannot be computed")
    labels = class_names(checkpoint) if "label" in data.fields else ()
    patched_rows = patchify_rows(list(data.rows), data.fields, checkpoint.spec)
    rows = InMemoryDataset(patched_rows, checkpoint.tokenizer, data.fields, labels).rows
    if task.eval_in_windows:
        window = max(1, (evaluation.max_length or WINDOW) - task.num_special_tokens)
        rows = [(ids[i : i + window],) for (ids,) in rows for i in range(0, len(ids), window)]
    total, targets, rng = LossSum(), list[NDArray[np.int64]](), np.random.default_rng(evaluation.seed)
    lengths = [max(map(len, row)) + task.num_special_tokens for row in rows]
    for index in evaluation.batches(lengths, "reading", logits=True):
        batch = task.batch([rows[i] for i in index], evaluation.special_tokens, rng).to(checkpoint.device)
        total.add(finite_loss(checkpoint, partial(task.loss, checkpoint.model, batch)))
        targets.append(batch.targets[batch.targets != IGNORE_INDEX].numpy(force=True))
    return EvalResult({"model": total.metrics()}, extra={"targets": total.count}), np.concatenate(targets)


def finite_loss(checkpoint: Checkpoint, compute: Callable[[], Loss]) -> Loss:
    """Returns what `compute` returns; raises if it is NaN or infinite, and names the first layer where it is."""
    loss = compute()
    check_finite(checkpoint.model, loss.sum, compute)
    return loss


def class_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns the classes of a classifier, in order."""
    count = getattr(checkpoint.spec.head, "classes", 0)
    if count < 2:
        raise UnsupportedError("this model has no classes to predict, so it cannot be evaluated as a classifier")
    return tuple(checkpoint.id2label.get(i, str(i)) for i in range(count))
