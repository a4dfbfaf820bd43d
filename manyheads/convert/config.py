"""Config keys in both directions: which fields of a model's description a key sets, and how it is written from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from manyheads.errors import CheckpointConfigError, ExportError
from manyheads.model.spec import ModelSpec
from manyheads.spec import Tree, did_you_mean, quoted, to_tree

Config = Mapping[str, Any]
Fields = dict[str, Any]  # dotted path → value
Getter = Callable[[str], Any]  # the value at a dotted path of a description; None if its part has no such field


class ConfigRow(Protocol):
    """Some keys of a config and the fields of a description that they set."""

    @property
    def keys(self) -> tuple[str, ...]: ...

    def read(self, config: Config) -> Fields: ...

    def write(self, get: Getter) -> Tree: ...


class _Default:
    """A default that no config can hold."""


REQUIRED = _Default()  # the key must be present
SAME = _Default()  # the one supported value


@dataclass(frozen=True)
class Key:
    """One key for one value, in one or several fields."""

    theirs: str
    ours: str | tuple[str, ...]
    default: Any = REQUIRED  # the value of a config without the key
    reads: Callable[[Any], Any] = lambda value: value
    writes: Callable[[Any], Any] = lambda value: value

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def read(self, config: Config) -> Fields:
        value = config.get(self.theirs, self.default)
        if value is REQUIRED:
            raise missing_key(self.theirs)
        return dict.fromkeys(self.paths, self.reads(value))

    def write(self, get: Getter) -> Tree:
        value = get(self.paths[0])
        return {self.theirs: None if value is None else self.writes(value)}


@dataclass(frozen=True)
class Fixed:
    """A key with one supported value: any other changes the computation in a way that no part has."""

    theirs: str
    value: Any
    default: Any = SAME  # the value of a config without the key

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, config: Config) -> Fields:
        value = config.get(self.theirs, self.value if self.default is SAME else self.default)
        if value != self.value and not (value is None and not self.value):
            raise CheckpointConfigError(
                f"{self.theirs} = {quoted(value)} is not supported: it changes the computation; expected {self.value!r}"
            )
        return {}

    def write(self, get: Getter) -> Tree:
        return {self.theirs: self.value}


def missing_key(name: str) -> CheckpointConfigError:
    return CheckpointConfigError(f"the config has no {name}")


# keys that do not change the output of a forward
IGNORED_KEYS = frozenset((
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "_num_labels",
    "architectures", "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "eos_token_ids",
    "eot_token_id", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "id2label", "init_std", "initializer_factor",
    "initializer_range", "is_encoder_decoder", "label2id", "language", "length_penalty", "mask_token_id",
    "max_length", "min_length", "model_type", "name", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states", "output_past",
    "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "pruned_heads",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k",
    "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache", "xla_device",
))  # fmt: skip


def read_config(rows: Iterable[ConfigRow], config: Config, tree: Tree, *, ignored: Iterable[str] = ()) -> Tree:
    """The description that a config implies: `tree`, which all models of the family share, and what the keys set."""
    rows = list(rows)
    keys = {key for row in rows for key in row.keys}
    for key in config:
        if key not in keys and key not in IGNORED_KEYS and key not in ignored:
            close, _, _ = did_you_mean(key, keys).partition(" (")
            raise CheckpointConfigError(f"unknown key {quoted(key)}{close}: it may change the computation")
    for row in rows:
        try:
            fields = row.read(config)
        except (TypeError, KeyError, AttributeError, ArithmeticError):
            values = {key: config[key] for key in row.keys if key in config}
            raise CheckpointConfigError(f"the config has an invalid value: {quoted(values)}") from None
        for path, value in fields.items():
            set_field(tree, path, value)
    return tree


def write_config(rows: Iterable[ConfigRow], spec: ModelSpec) -> Tree:
    """The config of a description, as far as the family's keys can express it."""
    tree = to_tree(spec)
    config: Tree = {}
    for row in rows:
        config |= row.write(lambda path: get_field(tree, path))
    return config


def set_field(tree: Tree, path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for name in outer:
        inner = tree.get(name, {})
        tree[name] = {"kind": inner} if isinstance(inner, str) else inner
        tree = tree[name]
    if value is not None:
        tree[last] = value


def get_field(tree: Any, path: str) -> Any:
    stack, *names = path.split(".")
    if names and stack not in tree:
        raise ExportError(f"the model has no {stack}")
    tree = tree.get(stack)
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def required(get: Getter, path: str) -> Any:
    """The value at a path that a config cannot be written without."""
    value = get(path)
    if value is None:
        raise ExportError(f"the model has no {path}")
    return value
