"""Rows that convert keys of a Hugging Face config to fields of a model's description, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from manyheads.errors import CheckpointConfigError, ExportError
from manyheads.model.spec import ModelSpec
from manyheads.spec import Tree, assign, did_you_mean, quote, to_tree

Config = Mapping[str, Any]
Fields = dict[str, Any]  # dotted path → value
GetField = Callable[[str], Any]  # returns the value at a dotted path of a description; None if there is no such field


class ConfigRow(Protocol):
    """Converts some keys of a config to fields of a description, and back."""

    @property
    def keys(self) -> tuple[str, ...]: ...

    def read(self, config: Config) -> Fields: ...

    def write(self, get: GetField) -> Tree: ...


REQUIRED: Any = object()  # a default that differs from every value of a config: the key must be present


@dataclass(frozen=True)
class OneKey:
    """The base of rows that convert one key."""

    key: str

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)


@dataclass(frozen=True)
class Key(OneKey):
    """A key whose value is stored in one or several fields."""

    path: str | tuple[str, ...]
    default: Any = REQUIRED  # the value of a config without the key
    reads: Callable[[Any], Any] = lambda value: value
    writes: Callable[[Any], Any] = lambda value: value

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path

    def read(self, config: Config) -> Fields:
        value = config.get(self.key, self.default)
        if value is REQUIRED:
            raise missing_key(self.key)
        return dict.fromkeys(self.paths, self.reads(value))

    def write(self, get: GetField) -> Tree:
        value = get(self.paths[0])
        return {self.key: None if value is None else self.writes(value)}


@dataclass(frozen=True)
class Fixed(OneKey):
    """A key of which only one value is supported; others raise."""

    value: Any
    required: bool = False  # a config without the key has the supported value, unless the key is required

    def read(self, config: Config) -> Fields:
        value = config.get(self.key, None if self.required else self.value)
        if value != self.value and not (value is None and not self.value):
            raise CheckpointConfigError(f"{self.key} = {quote(value)} is not supported, expected {self.value!r}")
        return {}

    def write(self, get: GetField) -> Tree:
        return {self.key: self.value}


def fixed(**values: Any) -> tuple[Fixed, ...]:
    """A Fixed row for each of these keys."""
    return tuple(Fixed(key, value) for key, value in values.items())


@dataclass(frozen=True)
class WriteOnlyKey:
    """Keys that are written with a computed value and ignored when a config is read."""

    keys: tuple[str, ...]
    value: Callable[[GetField], Any]

    def read(self, config: Config) -> Fields:
        return {}

    def write(self, get: GetField) -> Tree:
        return dict.fromkeys(self.keys, self.value(get))


def missing_key(name: str) -> CheckpointConfigError:
    return CheckpointConfigError(f"the config has no {name}")


# keys that do not change the output of a forward pass
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


def read_config(rows: Iterable[ConfigRow], config: Config, tree: Tree, *, ignored_keys: Iterable[str] = ()) -> Tree:
    """The description for a config. `tree` holds the fields that all models of the family share."""
    rows = list(rows)
    keys = {key for row in rows for key in row.keys}
    for key in config:
        if key not in keys and key not in IGNORED_KEYS and key not in ignored_keys:
            close, _, _ = did_you_mean(key, keys).partition(" (")
            raise CheckpointConfigError(f"unknown key {quote(key)}{close}, which may change the computation")
    for row in rows:
        try:
            fields = row.read(config)
        except (TypeError, KeyError, AttributeError, ArithmeticError):
            values = {key: config[key] for key in row.keys if key in config}
            raise CheckpointConfigError(f"the config has an invalid value: {quote(values)}") from None
        for path, value in fields.items():
            if value is not None:
                assign(tree, path.split("."), value)
    return tree


def write_config(rows: Iterable[ConfigRow], spec: ModelSpec) -> Tree:
    """The config of a description, with the keys of a family."""
    tree = to_tree(spec)
    config: Tree = {}
    for row in rows:
        config |= row.write(lambda path: get_field(tree, path))
    return config


def get_field(tree: Any, path: str) -> Any:
    stack, *names = path.split(".")
    if names and stack not in tree:
        raise ExportError(f"the model has no {stack}")
    tree = tree.get(stack)
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def require(get: GetField, path: str) -> Any:
    """The value at a path, which must be present."""
    value = get(path)
    if value is None:
        raise ExportError(f"the model has no {path}")
    return value
