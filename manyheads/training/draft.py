"""The run file that `manyheads new` writes, while its settings are chosen: tables of lines, each with its reason."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.checkpoint.loading import load
from manyheads.convert.families import NAMES
from manyheads.convert.match import find_architecture
from manyheads.data.source import DataSpec
from manyheads.errors import ExportError, IncompatibleError, UsageError, one_line
from manyheads.model.spec import ModelSpec, StackSpec
from manyheads.parts.head import HeadSpec
from manyheads.spec import Tree, quote, to_inline_toml, to_tree
from manyheads.tasks.suggestion import SIZES, Lines, ModelSize, Suggestion
from manyheads.tasks.task import TaskSpec
from manyheads.training.preparation import PreparedRun, fill_sizes, prepare, resolve_model
from manyheads.training.run import RunSpec, read_run

EVALUATIONS = 10  # maximum evaluations per run
SPLIT_LENGTH = 2000  # characters to which texts are split if they are too long and cannot be packed


# ----------------------------------------------------------------------------------------------------------- checkpoint


@dataclass(frozen=True)
class InitialModel:
    """The checkpoint to fine-tune, and the head that the task needs; None if the checkpoint has it."""

    path: str
    spec: ModelSpec
    head: Tree | None

    @classmethod
    def load(cls, path: str, task: type[TaskSpec], architecture: str | None) -> InitialModel:
        """Reads the checkpoint; raises if it does not fit the task, before any data is read."""
        checkpoint = load(path)
        spec = checkpoint.spec
        if architecture not in (None, spec.architecture):
            raise UsageError(f"--architecture is {quote(architecture)}, but {path} is {spec.architecture}")
        if spec.architecture not in task.architectures:
            expected = " or ".join(task.architectures)
            raise IncompatibleError(f"{task.kind} needs a model that is {expected}; {path} is {spec.architecture}")
        stack = spec.encoder or spec.decoder
        if stack and (stack.embed.reads == "patches") != ("image" in task.fields):
            raise IncompatibleError(f"{task.kind} reads {', '.join(task.fields)}, but {path} reads {stack.embed.reads}")
        if checkpoint.tokenizer is None and "image" not in task.fields:
            raise IncompatibleError(f"{path} has no tokenizer", hint="write the run file yourself, with a [tokenizer]")
        return cls(path, spec, head_for(task, checkpoint))

    @property
    def size(self) -> ModelSize:
        stack: Any = self.spec.encoder or self.spec.decoder or self.spec.recurrent or self.spec.ngram
        heads = stack.attention.heads if isinstance(stack, StackSpec) else 1
        return ModelSize(getattr(stack, "layers", 1), stack.width, heads, math.inf)


def head_for(task: type[TaskSpec], checkpoint: Checkpoint) -> Tree | None:
    """Returns what to change in the head of a checkpoint for a task, if possible to a head that its family has."""
    output = checkpoint.spec.head.output
    classes = {"classes": "data"} if "classes" in task.head_outputs else {}
    if output in task.head_outputs:
        return classes or None
    if "states" in task.head_outputs:
        return {"kind": "none"}
    pooled: Tree = {"pool": "mean"} if checkpoint.spec.encoder else {"pool": "last", "bias": False}
    default_head = {"kind": "classes"} | pooled if classes else {"kind": "tied"}
    heads = (head for head in family_heads(checkpoint) if HeadSpec.from_config(head).output in task.head_outputs)
    return next(heads, default_head) | classes


def family_heads(checkpoint: Checkpoint) -> Iterator[Tree]:
    """Yields the heads that the checkpoint's family has for this model, each without the fields at their defaults."""
    metadata = checkpoint.metadata
    name = metadata and (metadata.config.get("family") or metadata.family.model_type)
    if name not in NAMES:
        return
    with suppress(ExportError):
        family, _, config, *_ = find_architecture(checkpoint.spec, [name])
        for architecture in family.architectures:
            head = to_tree(family.spec_of(config | {"architectures": [architecture]}).head)
            defaults = to_tree(HeadSpec.from_config(head["kind"]))
            yield {key: value for key, value in head.items() if key == "kind" or value != defaults[key]}


# ---------------------------------------------------------------------------------------------------------------- draft


@dataclass(frozen=True)
class Settings:
    """The settings of a run file besides the model and the task: tokenizer, batches and steps."""

    vocab_size: int | None = None  # vocabulary of the tokenizer; None for bytes, 0 for words
    batch_tokens: int = 2048
    steps: int = 1000
    evaluations: int = EVALUATIONS
    pack: int | None = None
    max_length: int | None = None
    max_length_reason: str = ""
    lora: bool = False


@dataclass(frozen=True)
class RunFileDraft:
    """A run file while its settings are chosen, and its run."""

    suggestion: Suggestion
    data_tree: Tree
    columns_reason: str
    initial: InitialModel | None = None
    settings: Settings = Settings()
    prepared_run: PreparedRun | None = None

    @property
    def run(self) -> PreparedRun:
        assert self.prepared_run is not None
        return self.prepared_run

    def replace(self, *, suggestion: Suggestion | None = None, **settings: Any) -> RunFileDraft:
        """Returns a draft with changed settings and its run prepared; rows are encoded once per tokenizer."""
        new_settings = replace(self.settings, **settings)
        draft = replace(self, suggestion=suggestion or self.suggestion, settings=new_settings)
        spec, prepared = read_run(tomllib.loads(draft.text())), self.prepared_run
        if prepared is None or encoding_of(spec) != encoding_of(prepared.spec):
            return replace(draft, prepared_run=prepare(spec))
        model = resolve_model(spec, prepared.init_checkpoint)
        model = fill_sizes(model, vocab_size=prepared.special_tokens.vocab_size, num_labels=len(prepared.labels))
        return replace(draft, prepared_run=replace(prepared, spec=spec, model_spec=model))

    @property
    def can_split_texts(self) -> bool:
        """Whether the data can split long texts, and is not set to."""
        name = "max_document_length"
        return name in type(self.suggestion.data).model_fields and name not in self.data_tree

    def with_split_texts(self) -> RunFileDraft:
        tree = self.data_tree | {"max_document_length": SPLIT_LENGTH}
        data = DataSpec.from_config(tree)
        suggestion = replace(self.suggestion, data=data, corpus=data.load())
        return replace(self, suggestion=suggestion, data_tree=tree, prepared_run=None).replace()

    def smaller(self) -> RunFileDraft | None:
        """Returns the next smaller draft; a checkpoint has one size, and LoRA needs less memory for it."""
        if self.initial:
            return None if self.settings.lora else self.replace(lora=True)
        index = SIZES.index(self.suggestion.size)
        return self.replace(suggestion=replace(self.suggestion, size=SIZES[index - 1])) if index else None

    def text(self) -> str:
        """Returns the run file, without the reasons at its top."""
        lines = toml_line("seed", 1, "random seed of the weights, the order of rows, dropout and masking")
        if self.initial:
            lines += toml_line("init_from", self.initial.path, "the checkpoint to fine-tune, with its tokenizer")
        if self.settings.lora:
            reason = "trains small matrices next to the weights, which need more memory than there is"
            lines += toml_line("lora", {"rank": 8, "alpha": 16, "target_modules": ["query", "value"]}, reason)
        for table, rows in self.tables():
            lines += ["", f"[{table}]"]
            for key, value, reason in rows:
                lines += toml_line(key, value, reason)
        return "\n".join(lines) + "\n"

    def tables(self) -> Iterator[tuple[str, Lines]]:
        suggestion, task = self.suggestion, self.suggestion.task
        yield "data", [(key, value, self.data_reason(key)) for key, value in self.data_tree.items()]
        if self.initial is None:
            if suggestion.text_fields and self.settings.vocab_size != 0:
                yield "tokenizer", self.tokenizer()
            yield "model", suggestion.model()
            yield from task.suggest_stacks(suggestion)
        elif self.initial.head:
            yield "model", [("head", self.initial.head, "the rest of the model is the checkpoint's")]
        yield "task", [("kind", task.kind, task.summary()), *task.suggest_task(suggestion)]
        yield "optim", self.optim()
        yield "train", self.train()

    def data_reason(self, key: str) -> str:
        if "path" in self.data_tree:
            column = "columns" if "columns" in self.data_tree else "kind"
            pieces = "characters; longer texts are split, so that nothing is truncated"
            reasons = {"path": "relative to where manyheads train is called", "max_document_length": pieces}
            return (reasons | {column: self.columns_reason}).get(key, "")
        if key == "kind" and self.suggestion.task.takes_file:
            return f"built-in data; for a file of your own, manyheads new {self.suggestion.task.kind} FILE"
        return ""

    def tokenizer(self) -> Lines:
        if self.settings.vocab_size is None:
            return [("kind", "bytes", "there is too little text to learn subwords from")]
        reason = "subwords learned from the text; no token is ever unknown"
        return [("kind", "bpe", reason), ("vocab_size", self.settings.vocab_size, "")]

    def optim(self) -> Lines:
        width, warmup = self.suggestion.size.width, max(1, min(200, self.settings.steps // 10))
        reason = "3e-3 at width 64, lower for wider models" if width > 64 else "usual for a model of this width"
        lr = 3e-3 * (64 / width) ** 0.75
        if self.initial and not self.settings.lora:
            lr, reason = lr / 10, "a tenth of that of a new model, so that little is forgotten"
        return [
            ("lr", float(f"{lr:.2g}"), reason),
            ("schedule", {"kind": "linear", "warmup_steps": warmup}, "up in this many steps, then linearly down to 0"),
        ]

    def train(self) -> Lines:
        settings, steps = self.settings, self.settings.steps
        pack = "tokens per row; long texts are split, differently in every epoch, and short ones share a row"
        return [
            ("steps", steps, f"optimizer steps, {self.suggestion.epochs:.3g} epochs"),
            ("batch_tokens", settings.batch_tokens, "tokens per batch, padding included"),
            *([("pack", settings.pack, pack)] if settings.pack else []),
            *([("max_length", settings.max_length, settings.max_length_reason)] if settings.max_length else []),
            ("eval_every", max(1, steps // settings.evaluations), "steps between evaluations on the validation set"),
            ("eval_rows", 256, "maximum rows of the validation set to evaluate on"),
            ("save_every", max(1, steps // 4), "steps between checkpoints"),
        ]


def encoding_of(spec: RunSpec) -> tuple[Any, ...]:
    """Returns the settings that decide how rows are encoded."""
    return spec.tokenizer, spec.task.additional_special_tokens(), spec.train.max_length, spec.train.pack


def toml_line(key: str, value: Any, reason: str) -> list[str]:
    line = f"{key} = {to_inline_toml(value)}"
    return [f"{line:<48}  # {one_line(reason)}" if reason else line]
