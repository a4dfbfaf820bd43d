"""A run as data: model, data, tokenizer, task and training. Reading a run file opens neither data nor checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import field_validator

from manyheads.data.source import DataSpec
from manyheads.data.tokenized import stored_tokenizer_spec
from manyheads.data.tokenizer import TokenizerSpec, WordsSpec
from manyheads.errors import IncompatibleError, MissingKeyError
from manyheads.files.read import locate_config_errors, read_toml
from manyheads.metrics.metric import higher_is_better
from manyheads.model.spec import BACKBONES, ModelSpec, read_model
from manyheads.spec import (
    Spec,
    Tree,
    check_names,
    field,
    import_all,
    locate_errors,
    make_immutable,
    override,
    parse,
    quote,
    to_tree,
)
from manyheads.tasks.auxiliary import AuxiliaryLossSpec
from manyheads.tasks.task import TaskSpec
from manyheads.training.lora import LoraSpec
from manyheads.training.optim import AdamWSpec, OptimSpec

for _package in ("manyheads.data", "manyheads.tasks"):
    import_all(_package)  # registers every kind of data and task


class BestSpec(Spec):
    """Which checkpoint is the best, and when to stop early."""

    metric: str = field("loss", "metric of the validation set by which checkpoints are compared", min_length=1)
    stop_at: float | None = field(None, "stop when the metric is this good")
    patience: int | None = field(None, "stop after this many evaluations without a better value", ge=1)

    def is_better(self, value: float, than: float) -> bool:
        return value > than if higher_is_better(self.metric) else value < than

    def prefers(self, metrics: Mapping[str, float], than: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than another, or the first with this metric."""
        name = self.metric
        return name in metrics and (name not in than or self.is_better(metrics[name], than[name]))

    def is_reached(self, value: float) -> bool:
        return self.stop_at is not None and not self.is_better(self.stop_at, value)


class TrainSpec(Spec):
    """Steps, batches, evaluations and checkpoints."""

    steps: int = field(1000, "optimizer steps", ge=1)
    batch_tokens: int = field(4096, "tokens per batch, padding included", ge=1)
    pack: int | None = field(
        None, "tokens per row of packed texts, for causal and masked; longer texts are split", ge=2
    )
    accumulate: int = field(1, "batches per optimizer step", ge=1, le=4096)
    eval_every: int = field(200, "steps between evaluations on the validation set", ge=1)
    eval_rows: int = field(512, "rows of the validation set to evaluate on", ge=1)
    save_every: int = field(500, "steps between checkpoints", ge=1)
    max_length: int | None = field(
        None,
        "maximum tokens per text, special tokens included; longer texts are truncated [default: the model's positions]",
        ge=1,
    )
    keep_last: int = field(2, "number of newest checkpoints to keep", ge=2, le=1000)
    best: BestSpec | None = field(None, "keep the best checkpoint by a metric, which is then the one that is loaded")
    compile: bool = field(False, "compile each layer with torch.compile; --dry-run measures whether it pays")
    tensorboard: bool = field(False, "write TensorBoard event files next to metrics.jsonl")


class RunSpec(Spec):
    """Everything about one experiment."""

    seed: int = field(1, "random seed of the weights, the order of rows, dropout and masking", ge=0)
    init_from: str | None = field(
        None, "checkpoint to start from: a Hugging Face folder, a Hub name, a GGUF file, a run", min_length=1
    )
    freeze: tuple[str, ...] | None = field(
        None, "paths whose weights are not trained, such as encoder.embed", strict=False
    )
    lora: LoraSpec | None = field(None, "train low-rank matrices next to the frozen weights of the checkpoint")
    model: Any = field(..., "the model; with init_from, only what differs from the checkpoint's")
    data: DataSpec = field(..., "training data")
    tokenizer: TokenizerSpec = field(WordsSpec(), "how texts become tokens")
    task: TaskSpec = field(..., "what the model is trained for")
    auxiliary_losses: tuple[AuxiliaryLossSpec, ...] = field(
        (), "terms added to the loss that shape the attention", strict=False
    )
    optim: OptimSpec = field(AdamWSpec(), "optimizer and learning rate")
    train: TrainSpec = field(TrainSpec(), "steps, batches, evaluations and checkpoints")

    @field_validator("model", mode="before")
    @classmethod
    def _freeze_overrides(cls, model: Any) -> Any:
        return make_immutable(model) if isinstance(model, Mapping) else model

    def check_model(self, model: ModelSpec) -> None:
        """Raises if the model does not fit the task, or the run's other settings."""
        if model.architecture not in self.task.architectures:
            architectures = " or ".join(self.task.architectures)
            raise IncompatibleError(
                f"{self.task.kind} needs a model that is {architectures}; this is {model.architecture}", ("task",)
            )
        self.task.check_model(model)
        for i, auxiliary in enumerate(self.auxiliary_losses):
            with locate_errors("auxiliary_losses", i):
                auxiliary.select_layers(model)
                auxiliary.check_task(self.task)
        if self.train.pack is not None:
            self.check_pack(self.train.pack, model)

    def check_pack(self, pack: int, model: ModelSpec) -> None:
        path, stack = ("train", "pack"), model.encoder or model.decoder
        if not self.task.packable or self.auxiliary_losses:
            raise IncompatibleError(
                f"{self.task.kind}{' with auxiliary losses' if self.auxiliary_losses else ''} cannot pack texts",
                path,
            )
        if stack is None:
            raise IncompatibleError(
                f"packing needs an attention mask, which the architecture {model.architecture} does not have", path
            )
        if self.train.max_length is not None:
            raise IncompatibleError(
                "train.pack already limits the length of texts; leave one of the two out", ("train", "max_length")
            )
        if pack > self.train.batch_tokens:
            raise IncompatibleError(f"given {pack}, but a batch has {self.train.batch_tokens} tokens", path)
        if stack.max_positions is not None and pack > stack.max_positions:
            raise IncompatibleError(f"given {pack}, but the model has {stack.max_positions} positions", path)

    def check(self) -> None:
        """Raises if settings do not fit each other; those that need the model are checked when it is known."""
        best = self.train.best
        if best is not None and best.metric not in (names := self.task.all_validation_metrics):
            raise IncompatibleError(
                f"given {quote(best.metric)}, expected one of {', '.join(names)}", ("train", "best", "metric")
            )
        if self.lora is not None and self.init_from is None:
            raise IncompatibleError("LoRA needs trained weights; set init_from to a checkpoint", ("lora",))
        if isinstance(self.model, ModelSpec):
            self.check_model(self.model)


def read_run(tree: Tree) -> RunSpec:
    """Reads a run's tree. With `init_from`, [model] stays a tree of overrides until `prepare` opens the checkpoint."""
    check_names(RunSpec, tree)
    model, init_from = tree.get("model", {}), tree.get("init_from")
    if not isinstance(model, dict) or not (model or init_from):
        raise MissingKeyError(
            "missing; describe a model, as manyheads show --toml prints, or set init_from to a checkpoint",
            ("model",),
        )
    with locate_errors("model"):
        if not init_from or is_whole(model):
            model = read_model(model)
        else:
            check_names(ModelSpec, model)
    tree = ({"tokenizer": "checkpoint"} if init_from else {}) | tree | {"model": model}
    spec = parse(RunSpec, tree)
    if spec.data.tokenized_folder and "tokenizer" not in tree:
        spec = spec.replace(tokenizer=stored_tokenizer_spec(spec.data.tokenized_folder))
    spec.check()
    return spec


def is_whole(model: Tree) -> bool:
    """Whether [model] describes a whole model rather than changes to a checkpoint's."""
    return "vocab" in model and any(isinstance(model.get(name), dict) for name in BACKBONES)


def read_run_file(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Reads a run file with `path=value` overrides; an error names the line."""
    with locate_config_errors(path, overrides):
        return read_run(to_run_tree(path, overrides))


def to_run_tree(run: RunSpec | Tree | str | Path, overrides: Sequence[str] = ()) -> Tree:
    """The tree of a run file, of a dict or of a spec, as it is written, without defaults."""
    if isinstance(run, RunSpec):
        run = to_tree(run)
    return override(read_toml(Path(run)) if isinstance(run, str | Path) else run, overrides)


def to_spec(run: RunSpec | Tree | str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Reads a run from the path of a run file, from its tree, or from a spec."""
    if isinstance(run, str | Path):
        return read_run_file(Path(run), overrides)
    return read_run(to_run_tree(run, overrides))


# fields that may change when a run is resumed; every other change makes it a different run
SAFE_TO_CHANGE = (
    "train.steps",
    "train.save_every",
    "train.eval_every",
    "train.eval_rows",
    "train.keep_last",
    "train.best",
    "train.tensorboard",
)
