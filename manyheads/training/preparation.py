"""Prepares a run: loads its data and its initial checkpoint once, and turns rows into token ids."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.checkpoint.loading import load
from manyheads.data.attention_targets import AttentionTargets
from manyheads.data.source import NON_TEXT_FIELDS, Corpus
from manyheads.data.tokenized import (
    InMemoryDataset,
    OnDiskDataset,
    TokenizedDataset,
    TruncatedDataset,
    resolve_tokenizer_spec,
)
from manyheads.data.tokenizer import TokenizerSpec, special_ids
from manyheads.errors import CheckpointTokenizerError, IncompatibleError, OutOfRangeError, TokenizerError
from manyheads.files.tokenizer import all_special_ids, copy_tokenizer, encode_texts
from manyheads.model.builder import Model, build
from manyheads.model.spec import ModelSpec, StackSpec, read_model
from manyheads.spec import copy_tree, did_you_mean, locate_errors, merge_trees, quote, to_tree
from manyheads.tasks.batch import SpecialTokens
from manyheads.tasks.task import TaskSpec, patchify_rows
from manyheads.training.events import Event, Initialized, Truncated
from manyheads.training.lora import adapter_names, add_lora
from manyheads.training.run import RunSpec

COMPARED_TEXTS = 16  # number of texts on which two tokenizers are compared


@dataclass(frozen=True)
class PreparedData:
    """The rows of a run as texts, with the tokenizer that is trained on them or loaded from the checkpoint."""

    model_spec: ModelSpec  # in a PreparedRun, with the numbers of tokens and classes of the data
    corpus: Corpus
    tokenizer: Any  # None if the data has no texts
    special_tokens: SpecialTokens
    init_checkpoint: Checkpoint | None


@dataclass(frozen=True)
class PreparedRun(PreparedData):
    """A run with everything that the training loop needs."""

    spec: RunSpec
    labels: tuple[str, ...]
    train_dataset: TokenizedDataset
    validation_dataset: TokenizedDataset
    num_truncated: tuple[int, int] = (0, 0)  # training and validation rows
    # by the name of a guided loss, the targets of each training row
    attention_targets: dict[str, list[AttentionTargets]] = field(default_factory=dict)

    @property
    def family(self) -> str | None:
        """The Hugging Face family of the initial checkpoint, even if that is itself a fine-tuned run."""
        metadata = self.init_checkpoint.metadata if self.init_checkpoint else None
        if metadata is None:
            return None
        return (
            metadata.config.get("family") if metadata.family.model_type == "manyheads" else metadata.family.model_type
        )

    @property
    def max_length(self) -> int | None:
        """The length to which a source or a single text is truncated, special tokens included."""
        return max_length(self.spec, self.model_spec.encoder or self.model_spec.decoder)


def prepare(spec: RunSpec) -> PreparedRun:
    """Loads the data and the initial checkpoint of a run, and encodes the rows."""
    data = prepare_data(spec)
    corpus, tokenizer, special_tokens = data.corpus, data.tokenizer, data.special_tokens
    fields, folder = spec.task.fields_in(corpus.fields), spec.data.tokenized_folder
    labels = label_order(corpus.labels(), data.init_checkpoint) if "label" in fields else ()
    model_spec = fill_sizes(data.model_spec, vocab_size=special_tokens.vocab_size, num_labels=len(labels))

    def encode(split: str) -> TokenizedDataset:
        if folder:
            return OnDiskDataset(folder, split, tokenizer=tokenizer, fields=fields, labels=labels)
        rows = patchify_rows(corpus.select(corpus.splits[split], fields), fields, model_spec)
        return InMemoryDataset(rows, tokenizer, fields, labels)

    limits = text_limits(spec, fields, model_spec, special_tokens)
    train, validation = (TruncatedDataset(encode(split), limits) for split in ("train", "validation"))
    return PreparedRun(
        **vars(replace(data, model_spec=model_spec)),
        spec=spec,
        labels=labels,
        train_dataset=train if limits else train.dataset,
        validation_dataset=validation if limits else validation.dataset,
        num_truncated=(train.num_truncated, validation.num_truncated),
        attention_targets=prepare_attention_targets(spec, corpus, tokenizer, limits),
    )


def prepare_data(spec: RunSpec) -> PreparedData:
    """Loads the data and the initial checkpoint of a run, and trains or loads the tokenizer."""
    initial = load(Path(spec.init_from), dtype=torch.float32, verify=True) if spec.init_from else None
    model_spec = resolve_model(spec, initial)
    corpus = spec.data.load()
    fields = spec.task.fields_in(corpus.fields)
    if missing := [name for name in fields if name not in corpus.fields]:
        raise IncompatibleError(
            f"{spec.task.kind} needs the field {missing[0]} and {spec.data.kind} has {', '.join(corpus.fields)}",
            ("task",),
        )
    columns = [corpus.fields.index(name) for name in fields if name not in NON_TEXT_FIELDS]
    if not columns:
        return PreparedData(model_spec, corpus, None, SpecialTokens(vocab_size=0), initial)
    folder, texts = spec.data.tokenized_folder, (row[i] for row in corpus.train for i in columns)
    tokenizer_spec = resolve_tokenizer_spec(folder, spec.tokenizer) if folder else spec.tokenizer
    tokenizer = checkpoint_tokenizer(initial, tokenizer_spec, texts) if initial else tokenizer_spec.make(texts)
    if spec.tokenizer.adds_tokens:
        tokenizer.add_special_tokens(list(spec.task.additional_special_tokens()))
    special_tokens = task_special_tokens(spec.task, tokenizer, initial)
    spec.task.check_tokens(special_tokens, model_spec)
    return PreparedData(model_spec, corpus, tokenizer, special_tokens, initial)


def resolve_model(spec: RunSpec, initial: Checkpoint | None) -> ModelSpec:
    """Returns the run's model; with init_from, the checkpoint's model with the run's overrides."""
    if isinstance(spec.model, ModelSpec):
        return spec.model
    assert initial is not None
    with locate_errors("model"):
        model = read_model(merge_trees(to_tree(initial.spec), copy_tree(spec.model)))
    spec.check_model(model)
    return model


def fill_sizes(spec: ModelSpec, *, vocab_size: int, num_labels: int) -> ModelSpec:
    """Fills in the numbers of tokens and classes of the data; raises if the model specifies others."""
    if spec.vocab == "tokenizer":
        if not vocab_size:
            raise IncompatibleError("given 'tokenizer', but the data has no texts; leave it out", ("model", "vocab"))
        spec = spec.replace(vocab=vocab_size)
    elif spec.vocab is not None and spec.vocab < vocab_size:
        raise IncompatibleError(
            f'given {spec.vocab}, but the tokenizer has {vocab_size} tokens; write "tokenizer"', ("model", "vocab")
        )
    classes = getattr(spec.head, "classes", None)
    if classes == "data":
        return spec.replace(head=spec.head.replace(classes=num_labels))
    if num_labels and classes is not None and classes != num_labels:
        raise IncompatibleError(
            f'given {classes}, but the data has {num_labels} classes; write "data"', ("model", "head", "classes")
        )
    return spec


def label_order(labels: tuple[str, ...], initial: Checkpoint | None) -> tuple[str, ...]:
    """Returns the classes, in the order of the checkpoint if it has the same ones."""
    names = custom_class_names(initial) if initial else ()
    return names if sorted(names) == sorted(labels) else labels


def custom_class_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns the names of a checkpoint's classes, or () if they are only numbered."""
    names = tuple(checkpoint.id2label[i] for i in sorted(checkpoint.id2label))
    return () if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


# -------------------------------------------------------------------------------------------------------------- lengths


def max_length(spec: RunSpec, stack: StackSpec | None) -> int | None:
    """Returns the length to which texts are truncated: train.max_length, or the model's number of positions."""
    limits = (spec.train.max_length, stack.max_positions if stack else None)
    return min((limit for limit in limits if limit is not None), default=None)


def text_limits(
    spec: RunSpec, fields: Sequence[str], model: ModelSpec, special_tokens: SpecialTokens
) -> dict[str, int]:
    """Returns the maximum length of each text field, without special tokens."""
    limits = {}
    for name in () if spec.train.pack else fields:
        stack = model.decoder if name == "target" and model.decoder else model.encoder or model.decoder
        limit = max_length(spec, stack)
        if limit is not None and name not in NON_TEXT_FIELDS:
            limits[name] = limit - spec.task.max_special_tokens(special_tokens)
            if limits[name] < 1:
                raise OutOfRangeError(
                    f"{limit} tokens leave no room for a text besides its special tokens", ("train", "max_length")
                )
    return limits


def prepare_attention_targets(
    spec: RunSpec, corpus: Corpus, tokenizer: Any, limits: Mapping[str, int]
) -> dict[str, list[AttentionTargets]]:
    """Returns the attention targets of each training row, for each auxiliary loss that needs some."""
    targets: dict[str, list[AttentionTargets]] = {}
    for i, auxiliary in enumerate(spec.auxiliary_losses):
        if auxiliary.fields and auxiliary.name not in targets:
            if missing := [name for name in auxiliary.fields if name not in corpus.fields]:
                raise IncompatibleError(
                    f"{auxiliary.kind} needs the field {missing[0]}; {spec.data.kind} has {', '.join(corpus.fields)}",
                    ("auxiliary_losses", i),
                )
            columns = {name: [row[corpus.fields.index(name)] for row in corpus.train] for name in auxiliary.fields}
            targets[auxiliary.name] = auxiliary.attention_targets(columns, tokenizer, limits)
    return targets


# --------------------------------------------------------------------------------------------------------------- tokens


def checkpoint_tokenizer(initial: Checkpoint, spec: TokenizerSpec, texts: Iterable[str]) -> Any:
    """Returns the checkpoint's tokenizer without truncation; raises if the run describes a different one."""
    initial_tokenizer = copy_tokenizer(initial.tokenizer) if hasattr(initial.tokenizer, "to_str") else None
    if initial_tokenizer is not None:
        initial_tokenizer.no_truncation()  # drop the truncation that the earlier run saved
    if spec.from_checkpoint:
        if initial_tokenizer is None:
            raise IncompatibleError("the checkpoint has no tokenizer; describe one with its vocabulary", ("tokenizer",))
        return initial_tokenizer
    texts = list(texts)
    tokenizer = spec.make(texts)
    if initial_tokenizer is None:
        return tokenizer
    check_equal(initial_tokenizer, tokenizer, texts[:COMPARED_TEXTS])
    return initial_tokenizer


def check_equal(initial_tokenizer: Any, run_tokenizer: Any, texts: Sequence[str]) -> None:
    """Raises if two tokenizers have different vocabularies, or split one of the texts differently."""
    tokenizers = (initial_tokenizer, run_tokenizer)
    vocabularies = [
        {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()} for tokenizer in tokenizers
    ]
    for i in sorted({*vocabularies[0], *vocabularies[1]}):
        expected, token = (quote(tokens[i]) if i in tokens else "nothing" for tokens in vocabularies)
        if expected != token:
            raise IncompatibleError(
                f"the vocabulary differs at id {i}: {expected} in the checkpoint, {token} in [tokenizer]; leave it out",
                ("tokenizer",),
            )
    encodings = (encode_texts(tokenizer, texts, add_special_tokens=False) for tokenizer in tokenizers)
    for text, initial_encoding, encoding in zip(texts, *encodings, strict=True):
        if initial_encoding.ids != encoding.ids:
            raise IncompatibleError(
                f"{quote(text)} is split differently by the checkpoint's tokenizer; leave [tokenizer] out",
                ("tokenizer",),
            )


def task_special_tokens(task: TaskSpec, tokenizer: Any, initial: Checkpoint | None) -> SpecialTokens:
    """Returns the special tokens of a tokenizer; raises if it lacks those of the task."""
    extra = task.additional_special_tokens()
    spellings = [
        [tokenizer.token_to_id(name.replace("<extra_", prefix)) for name in extra]
        for prefix in ("<extra_", "<extra_id_")
    ]
    sentinels = max((tuple(takewhile(lambda token_id: token_id is not None, ids)) for ids in spellings), key=len)
    if extra and not sentinels:
        raise IncompatibleError(
            f"{task.kind} needs the tokens {extra[0]} … or <extra_id_0> …, and this tokenizer has none", ("tokenizer",)
        )
    return replace(find_special_tokens(tokenizer, initial), sentinels=sentinels)


def find_special_tokens(tokenizer: Any, checkpoint: Checkpoint | None = None) -> SpecialTokens:
    """Finds the special tokens of a tokenizer by the checkpoint's configs, or by their usual names."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    default_ids, vocab_size = special_ids(tokenizer), max(vocab.values()) + 1
    config = checkpoint.config if checkpoint else {}
    names = checkpoint.token_names if checkpoint else {}

    def find(*roles: str) -> int | None:
        ids = [config.get(f"{role}_token_id") for role in roles]
        ids = [value[0] if isinstance(value, list) and value else value for value in ids]
        ids += [vocab.get(names[role]) for role in roles if role in names]
        return next((value for value in ids if type(value) is int and 0 <= value < vocab_size), default_ids[roles[0]])

    bos, eos, pad, unk, mask = find("bos", "cls"), find("eos", "sep"), find("pad"), find("unk"), find("mask")
    eos = bos if eos is None else eos
    # without bos, pad or else eos starts a text
    bos = next((token_id for token_id in (bos, pad, eos) if token_id is not None), None)
    if bos is None or eos is None:
        raise TokenizerError("this tokenizer has no bos or eos token")
    special_token_ids = {i for i in (pad, bos, eos, unk, mask) if i is not None} | all_special_ids(tokenizer)
    is_native = checkpoint is None or checkpoint.tokenizer is None or has_native_tokenizer(checkpoint)
    return SpecialTokens(
        pad=eos if pad is None else pad,
        bos=bos,
        eos=eos,
        unk=-1 if unk is None else unk,
        mask=-1 if mask is None else mask,
        vocab_size=vocab_size,
        all_ids=tuple(sorted(special_token_ids | (set(range(vocab_size)) - set(vocab.values())))),
        decoder_start_token_id=checkpoint.generation_settings.decoder_start_token_id if checkpoint else None,
        prefix_suffix_ids=None if is_native else added_special_tokens(tokenizer),
        pool=checkpoint.pooling.pool if checkpoint and checkpoint.pooling else None,
    )


def has_native_tokenizer(checkpoint: Checkpoint) -> bool:
    """Whether a run of manyheads trained the tokenizer, so that each task adds its own special tokens."""
    assert checkpoint.metadata is not None
    return checkpoint.metadata.family.model_type == "manyheads" and "family" not in checkpoint.config


def added_special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the ids that a tokenizer adds before and after every text."""
    for encoding in encode_texts(tokenizer, ("a", *sorted(tokenizer.get_vocab())[:100]), CheckpointTokenizerError):
        mask = encoding.special_tokens_mask
        if 0 in mask:
            first, last = mask.index(0), mask[::-1].index(0)
            return tuple(encoding.ids[:first]), tuple(encoding.ids[len(encoding.ids) - last :])
    return (), ()


# -------------------------------------------------------------------------------------------------------------- weights


def initial_model(run: PreparedRun, device: torch.device | str = "cpu") -> tuple[Model, list[Event]]:
    """Builds the model before the first step; returns it with the events of its initialization."""
    spec, events = run.spec, list[Event]()
    model = build(run.model_spec, seed=spec.seed)
    if run.init_checkpoint:
        event = copy_weights(model, run.init_checkpoint, run.labels)
        if spec.lora:
            add_lora(model, spec.lora, seed=spec.seed, new=event.missing_keys)
            event = replace(event, notes=tuple(filter(None, [adapter_names(model, run.family)[1]])))
        events.append(event)
    freeze(model, spec.freeze or ())
    if spec.train.compile:
        compile_layers(model)
    if any(run.num_truncated):
        events.append(Truncated(0, *run.num_truncated))
    return model.to(device), events


def compile_layers(model: Model) -> None:
    """Compiles every layer of a transformer, for batches of any size."""
    for stack in model.stacks:
        for layer in stack.layers:
            layer.compile(dynamic=True)


@torch.no_grad()
def copy_weights(model: nn.Module, checkpoint: Checkpoint, labels: Sequence[str] = ()) -> Initialized:
    """Copies every weight of the checkpoint that has the same name and shape.

    Only a head may have another shape or other classes; it then keeps its random weights.
    """
    weights, initial_weights = model.state_dict(), checkpoint.model.state_dict()
    matching_names = {
        name for name in weights if name in initial_weights and weights[name].shape == initial_weights[name].shape
    }
    if labels and (names := custom_class_names(checkpoint)) and sorted(names) != sorted(labels):
        matching_names -= {name for name in matching_names if name.startswith("head.output.")}
    for name in sorted(set(weights) & set(initial_weights) - matching_names):
        if not name.startswith("head."):
            in_checkpoint, in_model = (" × ".join(map(str, side[name].shape)) for side in (initial_weights, weights))
            raise IncompatibleError(
                f"{name} has shape {in_checkpoint} in the checkpoint and {in_model} in [model]", ("model",)
            )
    if not matching_names:
        raise IncompatibleError("no weight of the checkpoint fits this model", ("init_from",))
    for name in matching_names:
        weights[name].copy_(initial_weights[name])
    assert checkpoint.metadata is not None
    return Initialized(
        step=0,
        loaded=len(matching_names),
        missing_keys=tuple(name for name in weights if name not in matching_names),
        unexpected_keys=(
            *(name for name in initial_weights if name not in matching_names),
            *checkpoint.metadata.weights.unused,
        ),
    )


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Excludes the weights under these paths from training."""
    weights = dict(model.named_parameters())
    for prefix in prefixes:
        frozen_names = [name for name in weights if name == prefix or name.startswith(f"{prefix}.")]
        if not frozen_names:
            known_paths = {".".join(name.split(".")[:depth]) for name in weights for depth in (1, 2)}
            raise IncompatibleError(
                f"no weight is under {quote(prefix)}{did_you_mean(prefix, known_paths)}", ("freeze",)
            )
        for name in frozen_names:
            weights[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in weights.values()):
        raise IncompatibleError("every weight is frozen, so there is nothing to train", ("freeze",))


def checkpoint_hash(checkpoint: Checkpoint) -> str:
    """Hashes all weights, buffers and the tokenizer, independently of the files that store them."""
    total = hashlib.sha256()
    for name, tensor in checkpoint.model.state_dict().items():
        total.update(name.encode())
        total.update(tensor.detach().contiguous().numpy().data)
    tokenizer = checkpoint.tokenizer
    total.update(tokenizer.to_str().encode() if hasattr(tokenizer, "to_str") else b"")
    return total.hexdigest()
