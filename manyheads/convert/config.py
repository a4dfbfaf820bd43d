"""Two-way config keys: what a key of theirs sets in a description of ours, and how it is written back from one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from manyheads.model.spec import ModelSpec
from manyheads.spec import Tree, nearest, quoted, to_tree

Config = Mapping[str, Any]
Placed = dict[str, Any]  # dotted path → value
Look = Callable[[str], Any]  # the value at a dotted path of a description; None where its part has no such field


class UnsayableError(ValueError):
    """A description has not what a config must say."""


class ConfigRow(Protocol):
    """Some keys of a config and the places of a description they set."""

    @property
    def keys(self) -> tuple[str, ...]: ...

    def read(self, config: Config) -> Placed: ...

    def write(self, look: Look) -> Tree: ...


class _Stands:
    """Stands where a value could be anything, even nothing."""


NEEDED = _Stands()  # for a default: the key must be given
SAME = _Stands()  # for a default: the one value there is


@dataclass(frozen=True)
class Key:
    """One key for one value, at one or several places."""

    theirs: str
    ours: str | tuple[str, ...]
    default: Any = NEEDED  # what a config that leaves the key out means by it
    reads: Callable[[Any], Any] = lambda value: value
    writes: Callable[[Any], Any] = lambda value: value

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    @property
    def places(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def read(self, config: Config) -> Placed:
        value = config.get(self.theirs, self.default)
        if value is NEEDED:
            raise ValueError(f"the config lacks {self.theirs}")
        try:
            value = self.reads(value)
        except (TypeError, KeyError, AttributeError):
            raise ValueError(f"{self.theirs} in the config is {quoted(value)}, which cannot be read") from None
        return dict.fromkeys(self.places, value)

    def write(self, look: Look) -> Tree:
        value = look(self.places[0])
        return {self.theirs: None if value is None else self.writes(value)}


@dataclass(frozen=True)
class Fixed:
    """A key that may have one value only, because another would change the maths in a way no part of ours has."""

    theirs: str
    value: Any
    default: Any = SAME  # what a config that leaves the key out means by it: the value, unless said

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, config: Config) -> Placed:
        given = config.get(self.theirs, self.value if self.default is SAME else self.default)
        if given != self.value and not (given is None and not self.value):
            raise ValueError(f"{self.theirs} = {quoted(given)} changes the model in a way that is not supported; expected {self.value!r}")
        return {}

    def write(self, look: Look) -> Tree:
        return {self.theirs: self.value}


# keys that say nothing about the numbers a forward gives
SILENT = frozenset((
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "_num_labels", "architectures",
    "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "eos_token_ids", "eot_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "init_std", "initializer_factor",
    "initializer_range", "is_encoder_decoder", "label2id", "language", "length_penalty", "mask_token_id", "max_length", "min_length",
    "model_type", "name", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "objective",
    "output_attentions", "output_hidden_states", "output_past", "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    "use_cache", "xla_device",
))  # fmt: skip


def read_config(rows: Iterable[ConfigRow], config: Config, tree: Tree, *, silent: Iterable[str] = ()) -> Tree:
    """The description that a config implies: `tree`, what every model of the family has, and what the keys set in it."""
    rows = list(rows)
    known = {key for row in rows for key in row.keys}
    for key in config:
        if key not in known and key not in SILENT and key not in silent:
            close, _, _ = nearest(key, known).partition(" (")
            raise ValueError(f"the config has a key this family does not know, {quoted(key)}{close}; it may change the maths, so it is "
                             "not passed over")  # fmt: skip
    for row in rows:
        for path, value in row.read(config).items():
            place(tree, path, value)
    return tree


def write_config(rows: Iterable[ConfigRow], spec: ModelSpec) -> Tree:
    """The config that says the same as a description, as far as the family's keys reach."""
    tree = to_tree(spec)
    config: Tree = {}
    for row in rows:
        config |= row.write(lambda path: look(tree, path))
    return config


def place(tree: Tree, path: str, value: Any) -> None:
    *steps, last = path.split(".")
    for step in steps:
        inner = tree.get(step, {})
        tree[step] = {"kind": inner} if isinstance(inner, str) else inner
        tree = tree[step]
    if value is not None:
        tree[last] = value


def look(tree: Any, path: str) -> Any:
    tower, *steps = path.split(".")
    if steps and tower not in tree:
        raise UnsayableError(f"the description has no {tower}")
    tree = tree.get(tower)
    for step in steps:
        tree = tree.get(step) if isinstance(tree, dict) else None
    return tree


def needed(look: Look, path: str) -> Any:
    """The value at a path that a config cannot be written without."""
    value = look(path)
    if value is None:
        raise UnsayableError(f"the description has no {path}")
    return value
