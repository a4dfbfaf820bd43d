"""Tasks: what a model is trained and used for. A task makes batches, computes the loss, predicts and evaluates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from manyheads.checkpoint.chat import check_messages
from manyheads.checkpoint.checkpoint import Checkpoint, check_texts
from manyheads.checkpoint.loading import load
from manyheads.errors import ConfigError, IncompatibleError, InputError, UnknownKindError, UnsupportedError, UsageError
from manyheads.generate.config import GenerationConfig, generation_config
from manyheads.model.builder import Model
from manyheads.model.spec import ModelSpec
from manyheads.spec import Part, Tree, locate_errors, quote
from manyheads.tasks.batch import Batch, Chunk, EncodedRow, Loss, SpecialTokens, target_loss
from manyheads.tasks.prediction import (
    PredictOptions,
    apply_to_each,
    format_loop,
    generated_result,
    ids_and_truncation,
    parse_ids,
)

if TYPE_CHECKING:
    from manyheads.tasks.evaluation import EvalResult, Evaluation
    from manyheads.tasks.suggestion import Lines, Suggestion


class TaskSpec(Part, slot="task"):
    """What a model is trained and used for.

    A task of your own needs `fields`, `architectures`, `template` and `batch`; its loss is then the cross-entropy of
    the targets, evaluation reports loss and accuracy, and prediction generates text. Override what differs.
    """

    fields: ClassVar[tuple[str, ...]]  # the columns of the data that the task reads
    architectures: ClassVar[tuple[str, ...]]  # those that can learn it; `manyheads new` suggests the first
    head_outputs: ClassVar[tuple[str, ...]] = ("tokens",)  # outputs of the heads that can learn it
    has_source: ClassVar[bool] = False  # whether the model generates a target for a source
    model_can_generate: ClassVar[bool | None] = None  # what `can_generate` of the model must be; None: either
    generates_text: ClassVar[bool] = True  # whether its result is a generated text, which can be shown as it grows
    can_chat: ClassVar[bool] = True  # whether `predict --chat` may give it a message
    is_default: ClassVar[bool] = False  # whether a checkpoint with such a head that records no task has this one
    template: ClassVar[str]  # the special tokens around a text, $A
    num_special_tokens: ClassVar[int] = 1  # special tokens that the template, or a target, adds to a text
    validation_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy")  # measured while training, for `train.best`
    packable: ClassVar[bool] = False  # whether several texts may share a row, see `PackableTask`
    attention_target_fields: ClassVar[tuple[str, ...]] = ()  # the data fields that may guide its attention
    eval_in_windows: ClassVar[bool] = False  # whether evaluation reads a long text in windows instead of truncating it
    eval_outputs: ClassVar[str] = ""  # what `evaluate --output` writes: "rows", with a result each, "images" or nothing

    # for `manyheads new`
    architecture_reason: ClassVar[str] = "the first architecture that can learn it"
    file_kind: ClassVar[str | None] = None  # the kind of data that a user's file is
    takes_file: ClassVar[bool] = True  # whether `manyheads new` reads a user's file
    default_data: ClassVar[Tree | None] = None  # the [data] table if there is no file
    word_tokens: ClassVar[bool] = False  # whether it needs one token per word
    longer_column_first: ClassVar[bool] = False  # whether the longer column of two is the first field
    batches_per_epoch: ClassVar[int] = 20  # `manyheads new` chooses the batch size for it

    # ------------------------------------------------------------------------------------------------------- training

    def fields_in(self, available: Sequence[str]) -> tuple[str, ...]:
        """Returns which of the data's fields the task reads."""
        return self.fields

    def additional_special_tokens(self) -> tuple[str, ...]:
        """Returns the special tokens that the task needs besides bos, eos and mask."""
        return ()

    def check_model(self, model: ModelSpec) -> None:
        """Raises if the model has the wrong head or parts."""
        if model.head.output not in self.head_outputs:
            raise IncompatibleError(
                f"{self.kind} needs a head that gives {' or '.join(self.head_outputs)}; '{model.head.kind}' gives "
                f"{model.head.output}",
                ("model", "head"),
            )

    def check_tokens(self, special_tokens: SpecialTokens, model: ModelSpec) -> None:
        """Raises if the tokenizer lacks a token that the task needs."""

    @abstractmethod
    def batch(self, rows: Sequence[EncodedRow], special_tokens: SpecialTokens, rng: np.random.Generator) -> Batch:
        """Makes the inputs and targets of some rows; `rng` draws what is random, such as masks."""

    def lengths(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the number of tokens of each row, rows × texts, from the lengths of its fields."""
        return np.stack(lengths, axis=1) + self.num_special_tokens

    def num_prefix_tokens(self, special_tokens: SpecialTokens) -> int:
        """Returns how many special tokens are before a text."""
        return len(special_tokens.prefix_and_suffix(self.template)[0])

    def max_special_tokens(self, special_tokens: SpecialTokens) -> int:
        """Returns the maximum number of special tokens that are added to a text."""
        if special_tokens.prefix_suffix_ids is None:
            return self.num_special_tokens
        prefix, suffix = special_tokens.prefix_suffix_ids
        return max(self.num_special_tokens, len(prefix) + max(1, len(suffix)))

    def loss(self, model: Model, batch: Batch) -> Loss:
        """Returns the cross-entropy of the targets."""
        return target_loss(model, batch)

    @property
    def all_validation_metrics(self) -> tuple[str, ...]:
        """`validation_metrics`, and those that are measured only if `train.best` names one."""
        return self.validation_metrics

    def generation_metrics(
        self,
        checkpoint: Checkpoint,
        groups: Iterable[Sequence[EncodedRow]],
        special_tokens: SpecialTokens,
        *,
        extra_metric: str | None,
    ) -> dict[str, float]:
        """Computes metrics of generated targets for groups of validation rows; `extra_metric` names one more."""
        return {}

    # ------------------------------------------------------------------------------------------------------ prediction

    def supports(self, checkpoint: Checkpoint) -> bool:
        """Whether the model can be used and evaluated for this task, whatever it was trained for."""
        generates = checkpoint.model.can_generate if self.model_can_generate is None else self.model_can_generate
        fits = (checkpoint.has_source, checkpoint.model.can_generate) == (self.has_source, generates)
        return checkpoint.spec.head.output in self.head_outputs and fits

    def check_options(self, options: PredictOptions) -> None:
        """Raises if a task that generates no text is to find loops, or one that reads no plain text is to chat."""
        if options.loops and not self.generates_text:
            raise UsageError(f"--loops needs a task that generates text, and {self.kind} does not")
        if options.chat and not (self.generates_text and self.can_chat):
            raise UnsupportedError(f"a model for the task {self.kind} cannot chat")
        if options.chat:
            check_messages(options.messages(""))  # the system prompt

    def encode(
        self, checkpoint: Checkpoint, texts: Sequence[str], options: PredictOptions
    ) -> tuple[list[list[int]], dict[int, Tree]]:
        """Returns the input ids of each text, and by index `truncated_to`, the tokens read, of each truncated one."""
        check_texts(texts)
        if options.chat:
            return checkpoint.encode_chats([options.messages(text) for text in texts]), {}
        if checkpoint.tokenizer is None:
            return parse_ids(checkpoint, texts), {}
        return ids_and_truncation(checkpoint.encode(texts))

    def encode_checked(
        self, checkpoint: Checkpoint, options: PredictOptions, texts: Sequence[str]
    ) -> list[tuple[list[int], Tree]]:
        """Each text's ids, and `truncated_to` if it was; raises if the model has no positions for new tokens."""
        rows, truncation_by_row = self.encode(checkpoint, texts, options)
        if self.generates_text:
            checkpoint.text_generator.limits(rows, options.generation)
        return [(ids, truncation_by_row.get(i, {})) for i, ids in enumerate(rows)]

    def with_truncation(self, checkpoint: Checkpoint, generation: GenerationConfig) -> Checkpoint:
        """Returns a copy that truncates texts to what the model can read; by default it reads their first tokens."""
        return checkpoint.with_truncation(checkpoint.max_positions)

    def results(
        self, checkpoint: Checkpoint, rows: Sequence[list[int]], options: PredictOptions
    ) -> Iterator[tuple[int, Tree]]:
        """Yields the index and the model's output for each row of ids, as soon as it is ready, as a dict."""
        for i, texts in checkpoint.text_generator.generate_texts(rows, options.generation):
            yield i, generated_result(checkpoint, texts, options)

    def predict(
        self,
        checkpoint: Checkpoint,
        texts: Sequence[str],
        options: PredictOptions,
        errors: dict[int, InputError] | None = None,
    ) -> Iterator[tuple[int, Tree]]:
        """Yields the index and result for each text, as a dict with the keys task, text and those of `results`.

        A text that the model cannot read raises, or, if `errors` is given, has its error there instead of a result.
        """
        encoded_texts = apply_to_each(partial(self.encode_checked, checkpoint, options), texts, errors)
        index = list(encoded_texts)
        for k, result in self.results(checkpoint, [ids for ids, _ in encoded_texts.values()], options):
            i = index[k]
            yield i, {"task": self.kind, "text": texts[i]} | result | encoded_texts[i][1]

    def format_line(self, result: Tree) -> str:
        """Formats a result as one line of text."""
        generated = result["generated"]
        text = generated if isinstance(generated, str) else " ".join(map(str, generated))
        return " ".join(text.splitlines())

    def format_result(self, result: Tree) -> list[str]:
        """Formats the result for a single text, as lines to print."""
        if not {"generated", "sequences"} & result.keys():
            return [self.format_line(result)]
        lines = []
        for sequence in result.get("sequences", [result]):
            lines.append(
                sequence["generated"] if isinstance(sequence["generated"], str) else self.format_line(sequence)
            )
            lines += [format_loop(sequence["loop"])] if "loop" in sequence else []
        return lines

    # ------------------------------------------------------------------------------------------------------ evaluation

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        """Scores the model on the evaluated rows, next to baselines fitted on the training rows."""
        from manyheads.tasks.evaluation import evaluate_loss

        return evaluate_loss(evaluation)[0]

    # ------------------------------------------------------------------------------------------------ for manyheads new

    @classmethod
    def suggest_head(cls, suggestion: Suggestion) -> Lines:
        """Suggests lines of [model] besides the vocabulary: the head, if it is not the default."""
        if len(suggestion.stacks) < 2:
            return []
        return [("head", {"kind": "tied", "bias": True}, "the token embedding, and a bias per token")]

    @classmethod
    def suggest_stacks(cls, suggestion: Suggestion) -> Iterator[tuple[str, Lines]]:
        """Suggests the tables of the stacks, each with its lines."""
        return suggestion.text_stacks()

    @classmethod
    def suggest_task(cls, suggestion: Suggestion) -> Lines:
        """Suggests lines of [task] besides its kind."""
        return []


class TextTask(TaskSpec):
    """A task whose targets are the text itself."""

    fields: ClassVar[tuple[str, ...]] = ("text",)
    eval_in_windows: ClassVar[bool] = True
    file_kind: ClassVar[str | None] = "text"
    default_data: ClassVar[Tree | None] = {"kind": "stdlib", "subset": "language"}


class PackableTask(TextTask):
    """A task with a target at every position of a text, so that texts may share a row and long ones may be split."""

    packable: ClassVar[bool] = True
    lookahead: ClassVar[int] = 0  # number of tokens after a chunk that are among its targets

    def batch(self, rows: Sequence[EncodedRow], special_tokens: SpecialTokens, rng: np.random.Generator) -> Batch:
        return self.batch_chunks([Chunk(text) for text, *_ in rows], special_tokens, rng)

    def chunk(self, text: np.ndarray, start: int, stop: int) -> Chunk:
        """Returns the positions from start to stop of a text with its special tokens."""
        is_start, is_end = start == 0, stop == len(text) + self.num_special_tokens
        return Chunk(text[max(0, start - 1) : stop - 1 + self.lookahead], is_start, is_end)

    @abstractmethod
    def batch_chunks(self, chunks: Sequence[Chunk], special_tokens: SpecialTokens, rng: np.random.Generator) -> Batch:
        """Makes a batch of chunks, one per row."""


def predict(
    checkpoint: Checkpoint | str | Path,
    text: str | Sequence[str],
    *,
    num_fills: int = 5,
    mask_token_id: int | None = None,
    truncate: bool = False,
    loops: bool = False,
    **settings: Any,
) -> Any:
    """Applies a checkpoint to a text as `manyheads predict` does; returns a dict, or a list for a list of texts.

    With `truncate`, a text that is longer than the model can read is truncated, and its result has `truncated_to`, the
    number of tokens that were read. With `loops`, the result of a task that generates has `loop`, what the generated
    text repeats at its end, or None. Settings are those of `generation_config`. Without a tokenizer, a text consists of
    token ids, such as "3 14 15".
    """
    if not isinstance(text, str | Sequence):
        raise InputError(f"given {quote(text)}, expected a text or a list of texts")
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = load(checkpoint)
    if type(num_fills) is not int or num_fills < 1:
        raise UsageError(f"num_fills is {quote(num_fills)}, expected a positive integer")
    if mask_token_id is not None and (type(mask_token_id) is not int or mask_token_id < 0):
        raise UsageError(f"mask_token_id is {quote(mask_token_id)}, expected a token id")
    generation = generation_config(checkpoint.generation_settings, **settings)
    options = PredictOptions(generation, num_fills=num_fills, mask_token_id=mask_token_id, loops=loops)
    pipeline = Pipeline.from_checkpoint(checkpoint, options, truncate=truncate)
    texts = [text] if isinstance(text, str) else text
    results = dict(pipeline.results(texts))
    return results[0] if isinstance(text, str) else [results[i] for i in range(len(texts))]


@dataclass(frozen=True)
class Pipeline:
    """A checkpoint with its task, applied to texts."""

    checkpoint: Checkpoint
    task: TaskSpec
    options: PredictOptions

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, options: PredictOptions, *, truncate: bool) -> Pipeline:
        """A pipeline; raises if the model reads no texts, or its task cannot do what the options ask for."""
        checkpoint.check_reads_text()
        task = task_of(checkpoint)
        task.check_options(options)
        return cls(task.with_truncation(checkpoint, options.generation) if truncate else checkpoint, task, options)

    def results(self, texts: Sequence[str], errors: dict[int, InputError] | None = None) -> Iterator[tuple[int, Tree]]:
        return self.task.predict(self.checkpoint, texts, self.options, errors)

    def format_line(self, result: Tree) -> str:
        return self.task.format_line(result)


def task_of(checkpoint: Checkpoint) -> TaskSpec:
    """Returns the task that a run recorded in the checkpoint, or else the task that fits its architecture and head."""
    kinds: dict[str, Any] = TaskSpec.kinds
    metadata, task_tree = checkpoint.metadata, checkpoint.task
    if task_tree and task_tree["kind"] in kinds:
        with suppress(ConfigError):  # another version may have had other fields
            if (task := TaskSpec.from_config(task_tree)).supports(checkpoint):
                return task
    elif task_tree and metadata and metadata.family.model_type == "manyheads":
        raise UnknownKindError(
            f"this checkpoint was trained for the task {quote(task_tree['kind'])}, which does not exist here",
            hint="if it is your own, name its file with --parts",
        )
    tasks = [task for task in (kind() for kind in kinds.values() if kind.is_default) if task.supports(checkpoint)]
    if tasks:  # prefer a task that needs this head
        return min(tasks, key=lambda task: checkpoint.spec.head.output not in task.head_outputs)
    head = f"{checkpoint.spec.architecture} with the head '{checkpoint.spec.head.kind}'"
    raise UnsupportedError(f"no task fits this model ({head})")


def patchify_rows(rows: list[Any], fields: Sequence[str], model: ModelSpec) -> list[Any]:
    """Splits the images of the rows into the patches that the model reads."""
    stack = model.encoder or model.decoder
    embed: Any = stack.embed if stack and stack.embed.reads == "patches" else None
    if "image" not in fields:
        if embed is not None:
            raise IncompatibleError(f"the model reads images, but the data has {', '.join(fields)}", ("model",))
        return rows
    if embed is None:
        raise IncompatibleError("the model reads tokens, but the data has images; use embed = patches", ("model",))
    index = fields.index("image")
    images = torch.from_numpy(np.stack([row[index] for row in rows]))
    with locate_errors("model", "encoder", "embed"):
        patches = embed.patchify(images if images.dim() == 4 else images[:, None]).numpy()
    return [(*row[:index], image_patches, *row[index + 1 :]) for row, image_patches in zip(rows, patches, strict=True)]
