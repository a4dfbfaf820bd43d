"""Classification: one class per text or image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.data.source import Row
from manyheads.errors import CheckpointConfigError, LabelError, UnsupportedError
from manyheads.metrics import metric
from manyheads.metrics.baselines import Majority, NaiveBayes
from manyheads.metrics.classes import class_scores, confusion_matrix
from manyheads.parts.inputs import Inputs, pad_rows
from manyheads.spec import Tree, quote
from manyheads.tasks.batch import Batch, EncodedRow, SpecialTokens
from manyheads.tasks.evaluation import EvalResult, Evaluation, class_names
from manyheads.tasks.prediction import PredictOptions
from manyheads.tasks.suggestion import Lines, Suggestion
from manyheads.tasks.task import TaskSpec, patchify_rows

REGRESSION, MULTI_LABEL, SINGLE_LABEL = "regression", "multi_label_classification", "single_label_classification"
PROBLEM_TYPES = (REGRESSION, MULTI_LABEL, SINGLE_LABEL)  # values of problem_type in a Hugging Face config


class ClassifySpec(TaskSpec, kind="classify"):
    """Classification: −log p(class | x), with x a text or an image"""

    fields: ClassVar[tuple[str, ...]] = ("text", "label")
    architectures: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    generates_text: ClassVar[bool] = False
    head_outputs: ClassVar[tuple[str, ...]] = ("classes",)
    is_default: ClassVar[bool] = True
    eval_outputs: ClassVar[str] = "rows"
    template: ClassVar[str] = "<s> $A </s>"
    num_special_tokens: ClassVar[int] = 2
    attention_target_fields: ClassVar[tuple[str, ...]] = ("arcs",)
    architecture_reason: ClassVar[str] = "no text is generated, so every token may attend to every other"
    file_kind: ClassVar[str | None] = "labels"
    default_data: ClassVar[Tree | None] = {"kind": "stdlib", "subset": "classify"}

    def fields_in(self, available: Sequence[str]) -> tuple[str, ...]:
        return ("image", "label") if "image" in available else self.fields

    def batch(self, rows: Sequence[EncodedRow], special_tokens: SpecialTokens, rng: np.random.Generator) -> Batch:
        targets = torch.from_numpy(np.array([int(label[0]) for _, label in rows]))
        if rows[0][0].ndim > 1:
            return Batch(Inputs(torch.from_numpy(np.stack([patches for patches, _ in rows]))), targets)
        inputs = [special_tokens.add_special_tokens(text, self.template) for text, _ in rows]
        return Batch(pad_rows(inputs, special_tokens.pad), targets)

    def results(
        self, checkpoint: Checkpoint, rows: Sequence[list[int]], options: PredictOptions
    ) -> Iterator[tuple[int, Tree]]:
        """Yields every class with its probability, the most probable first."""
        for i, logits_C in checkpoint.outputs(rows):
            yield i, {"classes": ranked_classes(checkpoint, logits_C)}

    def format_line(self, result: Tree) -> str:
        best = result["classes"][0]
        return " ".join(f"{best['class']}\t{best.get('probability', best.get('score')):.4f}".splitlines())

    def format_result(self, result: Tree) -> list[str]:
        return [f"{row.get('probability', row.get('score')):8.4f}  {row['class']}" for row in result["classes"]]

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        """Scores the predicted classes, next to the most common class and naive Bayes."""
        data, names = evaluation.data, class_names(evaluation.checkpoint)
        if (kind := problem_type(evaluation.checkpoint, len(names))) != SINGLE_LABEL:
            raise UnsupportedError(f"this checkpoint is for {kind}, and an evaluation compares one class per text")
        inputs, targets = [row[0] for row in data.rows], class_indices(data.rows, names)
        probabilities, notes = class_probabilities(evaluation, inputs, len(names))
        scores = {"model": metric.scores("classes", targets, probabilities)}
        if data.train_rows:
            labels = class_indices(data.train_rows, names)
            majority = Majority(labels, len(names))
            scores["majority"] = metric.scores("classes", targets, majority.probabilities(inputs))
            if data.fields[0] == "text":
                bayes = NaiveBayes((row[0] for row in data.train_rows), labels, len(names))
                scores["naive Bayes"] = metric.scores("classes", targets, bayes.probabilities(inputs))
        predictions = probabilities.argmax(1)
        notes = (*notes, *evaluation.baseline_note)
        outputs = tuple(
            ({"row": i} if data.fields[0] == "image" else {"text": row[0]})
            | {"reference": row[1], "prediction": names[predictions[i]]}
            for i, row in enumerate(data.rows)
        )
        confusion = confusion_matrix(targets, predictions, len(names))
        extra = {"classes": list(names), "confusion_matrix": confusion.tolist()}
        return EvalResult(
            scores, notes, outputs=outputs, extra=extra | {"by_class": describe_classes(confusion, names)}
        )

    @classmethod
    def suggest_head(cls, suggestion: Suggestion) -> Lines:
        labels = suggestion.corpus.labels()
        rows = sum(len(part) for part in suggestion.corpus.splits.values())
        if not 2 <= len(labels) <= rows / 2:
            raise LabelError(
                f"{rows:,} rows have {len(labels):,} different classes, which cannot be learned",
                hint="choose the column of the class with --columns",
            )
        decoder, encoder = {"pool": "last", "bias": False}, {"pool": "mean", "dense": True, "activation": "gelu"}
        head = {"kind": "classes", "classes": "data"} | (decoder if "decoder" in suggestion.stacks else encoder)
        return [("head", head, f"the number of classes in the data, which is {len(labels)}")]


def problem_type(checkpoint: Checkpoint, num_classes: int) -> str:
    """Returns the problem_type of the checkpoint's config, or the one that transformers assumes without it."""
    kind = checkpoint.config.get("problem_type") or (REGRESSION if num_classes == 1 else SINGLE_LABEL)
    if kind not in PROBLEM_TYPES:
        raise CheckpointConfigError(f"problem_type is {quote(kind)}, expected {', '.join(PROBLEM_TYPES)}")
    return str(kind)


def ranked_classes(checkpoint: Checkpoint, logits_C: torch.Tensor) -> list[Tree]:
    """Returns every class with its probability, or its score for a regression, the highest first."""
    kind, logits_C = problem_type(checkpoint, len(logits_C)), logits_C.float()
    values = {REGRESSION: logits_C, MULTI_LABEL: logits_C.sigmoid(), SINGLE_LABEL: logits_C.softmax(dim=-1)}[kind]
    key, order = "score" if kind == REGRESSION else "probability", values.argsort(descending=True).tolist()
    return [{"class": checkpoint.id2label.get(i, str(i)), key: float(values[i])} for i in order]


def class_probabilities(
    evaluation: Evaluation, inputs: Sequence[Any], count: int
) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Returns the probability of every class for each text or image, and notes on truncated texts."""
    checkpoint, probabilities = evaluation.checkpoint, np.zeros((len(inputs), count))
    images, notes = evaluation.data.fields[0] == "image", tuple[str, ...]()
    rows: list[Any]
    if images:
        rows = [patches for (patches,) in patchify_rows([(image,) for image in inputs], ("image",), checkpoint.spec)]
    else:
        rows, notes = evaluation.encode(inputs)
    for index in evaluation.batches([*map(len, rows)], "reading"):
        batch_rows = [rows[i] for i in index]
        batch = (
            Inputs(torch.from_numpy(np.stack(batch_rows))).to(checkpoint.device)
            if images
            else checkpoint.pad(batch_rows)
        )
        logits_BC = checkpoint.compute_checked(partial(checkpoint.model, batch))
        probabilities[index] = logits_BC.double().softmax(-1).numpy(force=True)
    return probabilities, notes


def describe_classes(confusion_CC: NDArray[np.int64], names: Sequence[str]) -> list[Tree]:
    """Returns precision, recall and F₁ of every class, with its number of rows."""
    columns = {"class": names} | class_scores(confusion_CC) | {"rows": confusion_CC.sum(1).tolist()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def class_indices(rows: Sequence[Row], names: Sequence[str]) -> list[int]:
    index = {name: i for i, name in enumerate(names)}
    if unknown := [label for _, label in rows if label not in index]:
        classes = ", ".join(map(quote, names[:20])) + (", …" if len(names) > 20 else "")
        raise LabelError(f"the label {quote(unknown[0])} is not one of the model's {len(names)} classes: {classes}")
    return [index[label] for _, label in rows]
