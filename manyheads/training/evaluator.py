"""Evaluates a run or any other checkpoint with the metrics of its task, next to baselines on the same rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.checkpoint.loading import load
from manyheads.data.columns import choose_columns
from manyheads.data.source import Corpus, DataSpec, Row, same_file
from manyheads.data.tables import TableSpec
from manyheads.errors import (
    CheckpointTokenizerError,
    ColumnError,
    EmptyDataError,
    MissingKeyError,
    UnsupportedError,
    UsageError,
)
from manyheads.metrics.metric import higher_is_better
from manyheads.model.builder import resolve_device
from manyheads.spec import Tree, did_you_mean, locate_errors, override, quote, to_tree
from manyheads.tasks.batch import SpecialTokens
from manyheads.tasks.evaluation import EvalData, EvalOptions, EvalResult, Evaluation, OnProgress
from manyheads.tasks.task import TaskSpec, task_of
from manyheads.training.preparation import task_special_tokens
from manyheads.training.run import RunSpec, read_run_file

SPLITS = ("validation", "test", "train")
LAYOUT = ("columns", "delimiter", "quotes", "header", "document")  # how one file is written; another may differ
LAYOUT_PATHS = {f"data.{name}" for name in LAYOUT}


def evaluate(
    path: str | Path,
    *,
    data: str | Path | None = None,
    task: str | None = None,
    split: str = "validation",
    overrides: Sequence[str] = (),
    max_rows: int | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    examples: int = 0,
    output: str | None = None,
    device: str = "auto",
    weights: str | None = None,
    progress: OnProgress = lambda action, done, total: None,
    **settings: Any,
) -> Tree:
    """Returns the scores of a checkpoint and of baselines, and the output for every row, as a dict.

    A run records its task and its data. For any other checkpoint the head decides the task, and `data` names a file.
    With `output` as "rows" or "images", a task that has no such outputs raises before anything is computed. `settings`
    are those of generation, such as num_beams; `weights` are those of `load`.
    """
    start = time.perf_counter()
    options = EvalOptions(max_rows, max_length, max_new_tokens, examples, output, settings)
    data = None if data is None else str(data)
    if split not in SPLITS:
        raise UsageError(f"split is {quote(split)}, expected {', '.join(SPLITS)}")
    if task is not None and (not isinstance(task, str) or task not in TaskSpec.kinds):
        raise UsageError(f"no task {quote(task)}{did_you_mean(str(task), TaskSpec.kinds)}")
    if isinstance(overrides, str) or not all(isinstance(assignment, str) for assignment in overrides):
        raise UsageError(f"overrides is {quote(overrides)}, expected a list such as ['data.path=rows.tsv']")
    checkpoint = load(path, device=resolve_device(device), verify=True, weights=weights)
    checkpoint.model.eval()
    if checkpoint.tokenizer is None and checkpoint.spec.vocab is not None:
        raise CheckpointTokenizerError(f"{path} has no tokenizer, so it cannot read texts")
    file_overrides = [
        assignment
        for assignment in overrides
        if data is not None and assignment.partition("=")[0].strip() in LAYOUT_PATHS
    ]
    run = find_run(Path(path), task, [assignment for assignment in overrides if assignment not in file_overrides])
    task_spec = run.task if run else find_task(checkpoint, task)
    options.check_task(task_spec)
    data_spec = run.data if run else read_data(task_spec, data, overrides)
    corpus, rows = load_rows(
        data_spec, task_spec, data=data, split=split, from_run=run is not None, overrides=file_overrides
    )
    evaluation = make_evaluation(checkpoint, task_spec, run, corpus, rows, options=options, progress=progress)
    if not evaluation.data.rows:
        raise EmptyDataError(
            f"the {split} split is empty ({corpus.description})", hint="choose another, or name a file with --data"
        )
    result = task_spec.evaluate(evaluation)
    notes = tuple(row_notes(run, split=split, data=data, overrides=overrides, corpus=corpus)) if run else ()
    report = evaluation_report(evaluation, result, notes)
    report |= {"split": "file" if data else split, "seconds": round(time.perf_counter() - start, 3)}
    return {"schema": 1, "path": str(path)} | report | {"outputs": list(result.outputs)}


def evaluation_report(evaluation: Evaluation, result: EvalResult, notes: Sequence[str]) -> Tree:
    names = list(next(iter(result.scores.values())))
    examples = list(result.images) or [
        output for output in result.outputs[: evaluation.options.examples] if "text" in output
    ]
    return {
        "task": evaluation.task.kind,
        "data": evaluation.data.corpus.description,
        "rows": len(evaluation.data.rows),
        "better": {name: "higher" if higher_is_better(name) else "lower" for name in names},
        "primary": list(result.primary or names),
        "metrics": result.scores,
        "signatures": result.signatures,
        "notes": [*notes, *result.notes],
        "examples": examples,
    } | result.extra


# ----------------------------------------------------------------------------------------------------- task and rows


def find_run(path: Path, task: str | None, overrides: Sequence[str]) -> RunSpec | None:
    """Returns the run of a folder, or None if the folder has no run for this task."""
    file = path / "run.toml"
    if not file.is_file() or task not in (None, read_run_file(file).task.kind):
        return None  # overrides are then of another task's data
    return read_run_file(file, overrides)


def find_task(checkpoint: Checkpoint, name: str | None) -> TaskSpec:
    """Returns the named task, or the model's own task without a name; raises if the model does not support it."""
    if name is None:
        return task_of(checkpoint)
    task: TaskSpec = TaskSpec.kinds[name]()  # type: ignore[assignment]
    if not task.supports(checkpoint):
        model = f"{checkpoint.spec.architecture} with the head '{checkpoint.spec.head.kind}'"
        trained_task = task_of(checkpoint).kind
        raise UnsupportedError(f"this model ({model}) is for {trained_task} and cannot be evaluated as {name}")
    return task


def read_data(task: TaskSpec, path: str | None, overrides: Sequence[str]) -> DataSpec:
    tree = override({"data": {"kind": task.file_kind} | ({"path": path} if path else {})}, overrides)
    if tree["data"] == {"kind": task.file_kind}:
        raise MissingKeyError(
            "this checkpoint has no run for this task; name a file to evaluate on with --data FILE", ("data", "path")
        )
    with locate_errors("data"):
        return DataSpec.from_config(tree["data"])


def load_rows(
    spec: DataSpec, task: TaskSpec, *, data: str | None, split: str, from_run: bool, overrides: Sequence[str] = ()
) -> tuple[Corpus, Sequence[Row]]:
    """Returns the corpus, and the rows to evaluate on: a split, or all rows of a file."""
    if data is None:
        corpus = spec.load()
        return corpus, corpus.splits[split]
    other = file_data_spec(spec, task, data, overrides, from_run=from_run).load_file(data)
    has_train = from_run or (spec.source_path is not None and not same_file(spec.source_path, data))
    return (replace(other, train=spec.load().train) if has_train else other), other.validation


def file_data_spec(
    spec: DataSpec, task: TaskSpec, path: str, overrides: Sequence[str], *, from_run: bool = False
) -> DataSpec:
    """Returns the settings that read a file: those of the run, or those that `new` would choose if they do not fit."""
    file_spec = spec if spec.source_path is not None or task.file_kind is None else read_data(task, path, ())
    data_overrides: Tree = override({"data": {}}, overrides)["data"]
    if data_overrides:
        file_spec = DataSpec.from_config(to_tree(file_spec) | data_overrides)
    if not isinstance(file_spec, TableSpec):
        return file_spec
    if "document" not in data_overrides:
        file_spec = file_spec.for_file(path)
    files = (spec.path, spec.validation, spec.test) if from_run and isinstance(spec, TableSpec) else ()
    is_run_file = any(file and same_file(file, path) for file in files)
    if "columns" in data_overrides or is_run_file or file_spec.fits(path):
        return file_spec
    tree = {name: value for name, value in to_tree(file_spec).items() if name not in LAYOUT} | data_overrides
    settings = {name: value for name, value in tree.items() if name not in ("kind", "path")}
    longer = task.longer_column_first
    columns = choose_columns(Path(path), type(file_spec), longer_column_first=longer, settings=settings)
    return DataSpec.from_config(tree | ({"columns": columns.names} if columns.names else {}))


def make_evaluation(
    checkpoint: Checkpoint,
    task: TaskSpec,
    run: RunSpec | None,
    corpus: Corpus,
    rows: Sequence[Row],
    *,
    options: EvalOptions,
    progress: OnProgress,
) -> Evaluation:
    fields = task.fields_in(corpus.fields)
    if missing := [name for name in fields if name not in corpus.fields]:
        raise ColumnError(
            f"{task.kind} needs the field {missing[0]} and {corpus.description} has {', '.join(corpus.fields)}"
        )
    evaluated_rows, labels = rows[: options.max_rows], None
    if "label" in corpus.fields:
        index = corpus.fields.index("label")
        labels = [row[index] for row in evaluated_rows], [row[index] for row in corpus.train]
    limits = (checkpoint.max_positions, options.max_length or trained_length(checkpoint, run))
    max_length = min((limit for limit in limits if limit is not None), default=None)
    data = EvalData(
        corpus=corpus,
        fields=fields,
        rows=corpus.select(evaluated_rows, fields),
        train_rows=corpus.select(corpus.train, fields),
        labels=labels,
    )
    return Evaluation(
        checkpoint=checkpoint if task.eval_in_windows else checkpoint.for_evaluation(max_length),
        task=task,
        special_tokens=evaluation_special_tokens(checkpoint, task),
        data=data,
        options=options,
        max_length=max_length,
        from_run=run is not None,
        seed=run.seed if run else 0,
        progress=progress,
    )


def trained_length(checkpoint: Checkpoint, run: RunSpec | None) -> int | None:
    """Returns the length to which texts were truncated in training."""
    if run is not None:
        return run.train.pack or run.train.max_length
    truncation: Tree = (checkpoint.tokenizer and checkpoint.tokenizer.truncation) or {}
    return truncation.get("max_length")


def evaluation_special_tokens(checkpoint: Checkpoint, task: TaskSpec) -> SpecialTokens:
    """Returns the special tokens that were used in training."""
    if checkpoint.tokenizer is None:
        return SpecialTokens(vocab_size=0)
    return task_special_tokens(task, checkpoint.tokenizer, checkpoint if checkpoint.metadata else None)


def row_notes(run: RunSpec, *, split: str, data: str | None, overrides: Sequence[str], corpus: Corpus) -> Iterator[str]:
    """Yields a note for everything that makes the scores optimistic."""
    if data is not None and run.data.source_path is not None and same_file(run.data.source_path, data):
        yield f"{data} is the training file of the run"
    if any(assignment.startswith("data" if data is None else "data.path") for assignment in overrides):
        yield "-s changed the data, so the run may have been trained on some of these rows"
    if data is None and run.train.best is not None and split == "validation":
        other = "use --split test" if corpus.splits["test"] else "use --data FILE"
        yield f"this checkpoint was selected on this split, so these scores are optimistic; {other}"
    if data is None and run.data.tokenized_folder and run.tokenizer is not None:
        yield "texts are decoded from stored ids, without their unknown tokens"
