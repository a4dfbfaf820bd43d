"""A run as data: model, data, tokenizer, objective and how to train, in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from manyheads.data import builtin  # noqa: F401  (fills the slot)
from manyheads.data.prepared import Encoded
from manyheads.data.source import Corpus, DataSpec
from manyheads.data.tokens import TokenizerSpec, WordsSpec
from manyheads.model.spec import ModelSpec, read_model
from manyheads.objective import language, pairs, pooled  # noqa: F401  (fill the slot)
from manyheads.objective.score import ObjectiveSpec, Tokens
from manyheads.spec import Spec, SpecError, Tree, check_names, field, in_file, located, override, parse, quoted, read_toml
from manyheads.train.optim import OptimSpec


class GoalSpec(Spec):
    """When a run may end before its last step."""

    metric: Literal["loss", "exact", "accuracy"] = field("loss", "what is looked at")
    reach: float | None = field(None, "where it is good enough: a loss at most this, a share at least this")
    patience: int | None = field(None, "looks without a better value, after which the run ends", ge=1)

    def value(self, metrics: Mapping[str, float | None]) -> float | None:
        """What a look found; refused where no look can find it."""
        if self.metric not in metrics:
            raise SpecError(f"is {quoted(self.metric)}, and a look at unseen rows gives {', '.join(metrics)}", ("train", "goal", "metric"))
        return metrics[self.metric]

    def better(self, value: float, than: float) -> bool:
        return value < than if self.metric == "loss" else value > than

    def reached(self, value: float) -> bool:
        return self.reach is not None and not self.better(self.reach, value)


class TrainSpec(Spec):
    """How long, how much at once, and what is kept."""

    steps: int = field(1000, "updates of the weights", ge=1)
    tokens: int = field(4096, "places in a batch, padding included", ge=1)
    accumulate: int = field(1, "batches that make one update", ge=1, le=4096)
    evaluate_every: int = field(200, "steps between looks at unseen rows", ge=1)
    evaluate_rows: int = field(512, "unseen rows to look at", ge=1)
    save_every: int = field(500, "steps between checkpoints", ge=1)
    keep: int = field(2, "checkpoints that are kept", ge=2, le=1000)
    goal: GoalSpec | None = field(None, "when to stop early; the checkpoint that is best by its metric is kept, and is what is loaded")
    tensorboard: bool = field(False, "event files for TensorBoard beside metrics.jsonl")


class RunSpec(Spec):
    """Everything about one experiment."""

    seed: int = field(1, "of the weights, the order of rows, and every other chance", ge=0)
    model: ModelSpec
    data: DataSpec
    tokenizer: TokenizerSpec = field(WordsSpec(), "how texts become tokens")
    objective: ObjectiveSpec
    optim: OptimSpec = field(OptimSpec(), "how weights change")
    train: TrainSpec = field(TrainSpec(), "how long, and what is kept")

    def check(self) -> None:
        """Whether its pieces fit each other."""
        if self.model.shape not in self.objective.shapes:
            known = " or ".join(self.objective.shapes)
            raise SpecError(f"{self.objective.kind} is learned by {known}, and this model is {self.model.shape}", ("objective",))


def read_run(tree: Tree) -> RunSpec:
    """A run file as a spec."""
    check_names(RunSpec, tree)
    if not isinstance(tree.get("model"), dict):
        raise SpecError("[model] is required: a description, as manyheads show --toml prints", ("model",))
    with located("model"):
        model = read_model(tree["model"])
    run = parse(RunSpec, tree | {"model": model})
    run.check()
    return run


def read_run_file(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The same from a file, with what the command line changes; what is wrong comes with its line."""
    with in_file(path, overrides):
        return read_run(override(read_toml(path), overrides))


# ---------------------------------------------------------------------------------------------------------- made ready


@dataclass(frozen=True)
class Ready:
    """A run with its data: rows as ids, a tokenizer, and a model that knows how many tokens there are."""

    run: RunSpec
    spec: ModelSpec
    corpus: Corpus
    tokenizer: Any
    tokens: Tokens
    labels: tuple[str, ...]
    rows: Encoded
    unseen: Encoded


def made_ready(run: RunSpec) -> Ready:
    corpus = run.data.load()
    if missing := [name for name in run.objective.fields if name not in corpus.fields]:
        raise SpecError(f"{run.objective.kind} needs {missing[0]}, and {run.data.kind} gives {', '.join(corpus.fields)}", ("objective",))
    order = [corpus.fields.index(name) for name in run.objective.fields]
    texts = [i for i in order if corpus.fields[i] != "label"]
    tokenizer = run.tokenizer.make(row[i] for row in corpus.train for i in texts)
    count = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # there may be gaps
    labels = corpus.labels() if "label" in run.objective.fields else ()
    spec = sized(run.model, count, len(labels))
    rows, unseen = (
        Encoded([tuple(row[i] for i in order) for row in part], tokenizer, run.objective.fields, labels)
        for part in (corpus.train, corpus.validation)
    )
    return Ready(run, spec, corpus, tokenizer, Tokens(count=count), labels, rows, unseen)


def sized(spec: ModelSpec, tokens: int, labels: int) -> ModelSpec:
    """The model with as many tokens and classes as the data has; refused where it says another number."""
    if spec.vocab == "tokenizer":
        spec = spec.changed(vocab=tokens)
    elif spec.vocab is not None and spec.vocab < tokens:
        raise SpecError(f'is {spec.vocab}, and the tokenizer has {tokens} tokens; write "tokenizer"', ("model", "vocab"))
    classes = getattr(spec.head, "classes", None)
    if labels and classes is not None and classes != labels:
        raise SpecError(f"is {classes}, and the data has {labels} classes", ("model", "head", "classes"))
    return spec


class RunError(ValueError):
    """A run that cannot go on as asked."""


# of what may differ between one start and the next; everything else changes the run
SAFE = (
    "train.steps", "train.save_every", "train.evaluate_every", "train.evaluate_rows", "train.keep", "train.goal", "train.tensorboard",
)  # fmt: skip
