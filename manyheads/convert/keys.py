"""Config rows that many families share: activations, rotary embeddings, attention windows, labels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyheads.convert.config import REQUIRED, Config, Fields, GetField, Key, OneKey, WriteOnlyKey, missing_key
from manyheads.errors import CheckpointConfigError
from manyheads.spec import Tree, did_you_mean, quote

# names in Hugging Face configs → our names; of several names for one function, the first is written
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "quick_gelu": "gelu-quick",
    "relu": "relu",
    "relu2": "relu-squared",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def read_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise CheckpointConfigError(f"unknown activation {quote(name)}{did_you_mean(str(name), ACTIVATIONS)}")
    return ACTIVATIONS[name]


def write_activation(activation: str) -> str:
    return next((name for name, value in ACTIVATIONS.items() if value == activation), activation)


def activation(key: str, *paths: str, default: Any = REQUIRED) -> Key:
    """A row for a key that names an activation function."""
    return Key(key, paths, default, reads=read_activation, writes=write_activation)


def in_both(path: str) -> tuple[str, str]:
    """The paths of a field in the encoder and in the decoder."""
    return f"encoder.{path}", f"decoder.{path}"


def sizes(stack: str, prefix: str = "") -> tuple[Key, ...]:
    """The rows of the sizes of a stack, under the names that most configs have."""
    return (
        Key(f"{prefix}num_hidden_layers", f"{stack}.layers"),
        Key(f"{prefix}hidden_size", f"{stack}.width"),
        Key(f"{prefix}num_attention_heads", f"{stack}.attention.heads"),
        Key(f"{prefix}intermediate_size", f"{stack}.feedforward.hidden"),
    )


def number(value: Any, name: str) -> float:
    if type(value) not in (int, float):
        raise CheckpointConfigError(f"{name} is {quote(value)}, expected a number")
    return float(value)


# ---------------------------------------------------------------------------------------------------- rotary embeddings


@dataclass(frozen=True)
class RopeKeys:
    """θ, the rotated fraction and the scaling, which newer configs have in `rope_parameters` and older ones in keys."""

    # the default fraction of rotated coordinates; None if a family always rotates all
    default_fraction: float | None = None
    fraction_key: str = "partial_rotary_factor"  # the key of the fraction in older configs
    old_keys: tuple[str, ...] = ("rope_theta", "rope_scaling", "partial_rotary_factor")
    trained_length: int | None = None  # the default training length of a family whose configs may omit it
    former_kinds: tuple[tuple[str, str], ...] = ()  # pairs of a former and the current name of a scaling
    stack: str = "decoder"

    @property
    def keys(self) -> tuple[str, ...]:
        return ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", *self.old_keys)

    def read(self, config: Config) -> Fields:
        rope = self.table(config)
        kind = rope.get("rope_type", rope.get("type", "default"))
        kind = next((new for old, new in self.former_kinds if old == kind), kind)
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise CheckpointConfigError(f"unknown RoPE scaling {quote(kind)}{did_you_mean(str(kind), SCALINGS)}")
        names = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
        names |= {config_key(kind, field) for field in SCALINGS[kind][1]}
        if unknown := sorted(set(rope) - names - IMPLIED.get(kind, set())):
            raise CheckpointConfigError(f"the RoPE scaling '{kind}' has an unknown key {unknown[0]}")
        fraction = rope.get("partial_rotary_factor", config.get(self.fraction_key, self.default_fraction))
        if self.default_fraction is None and fraction not in (None, 1):
            raise CheckpointConfigError(
                f"partial_rotary_factor is {quote(fraction)}, but this family rotates whole heads"
            )
        lengths = {table.get("original_max_position_embeddings") for table in (rope, config)} - {None}
        if "length" in SCALINGS[kind][1] and kind != "dynamic" and len(lengths) > 1:
            raise CheckpointConfigError("the config has two different values of original_max_position_embeddings")
        theta = rope.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10000.0)))
        return {
            f"{self.stack}.position.theta": number(theta, "rope_theta"),
            f"{self.stack}.position.fraction": None if fraction is None else number(fraction, "partial_rotary_factor"),
            f"{self.stack}.position.scaling": scaling(
                kind, rope, {"original_max_position_embeddings": self.trained_length, **config}
            ),
        }

    def table(self, config: Config) -> Mapping[str, Any]:
        newer, older = config.get("rope_parameters"), config.get("rope_scaling")
        if newer and older and newer != older:
            raise CheckpointConfigError("the config has different values of rope_parameters and rope_scaling")
        rope = newer or older or {}
        if not isinstance(rope, Mapping):
            raise CheckpointConfigError(f"rope_parameters is {quote(rope)}, expected a JSON object")
        return rope

    def write(self, get: GetField) -> Tree:
        scaling = get(f"{self.stack}.position.scaling") or {}
        kinds = (hf_kind for hf_kind, (kind, _) in SCALINGS.items() if kind == scaling.get("kind"))
        kind = next(kinds, "default")
        rope = {"rope_type": kind, "rope_theta": get(f"{self.stack}.position.theta")}
        rope |= {config_key(kind, field): scaling[field] for field in SCALINGS[kind][1] if field in scaling}
        rope.pop("max_position_embeddings", None)
        if self.default_fraction is not None:
            rope["partial_rotary_factor"] = get(f"{self.stack}.position.fraction")
        length = scaling.get("length", 2048)
        max_positions = int(length * scaling.get("factor", 1) if kind == "longrope" else length)
        return {"rope_parameters": rope, "max_position_embeddings": max_positions}


# Hugging Face kind → our kind and its fields, which have the same names in both, except `length`
SCALINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "default": ("none", ()),
    "linear": ("linear", ("factor",)),
    "dynamic": ("dynamic", ("factor", "length")),
    "yarn": ("yarn", ("length", "factor", "beta_fast", "beta_slow", "attention_factor", "truncate")),
    "llama3": ("banded", ("factor", "length", "low_freq_factor", "high_freq_factor")),
    "longrope": ("longrope", ("short_factor", "long_factor", "length", "factor", "attention_factor")),
}
OPTIONAL = ("length", "beta_fast", "beta_slow", "attention_factor", "truncate")
# keys that a config may repeat for a kind, and that are ignored
IMPLIED = {"dynamic": {"original_max_position_embeddings"}, "linear": {"original_max_position_embeddings"}}


def config_key(kind: str, field: str) -> str:
    length = "max_position_embeddings" if kind == "dynamic" else "original_max_position_embeddings"
    return length if field == "length" else field


def scaling(kind: str, rope: Mapping[str, Any], config: Config) -> Tree:
    """Converts a RoPE scaling. Values that its table omits are taken from the config."""
    our_kind, fields = SCALINGS[kind]
    tree: Tree = {"kind": our_kind}
    for field in fields:
        key = config_key(kind, field)
        value = rope.get(key)
        if value is None and field == "length":
            value = config.get(key) or config.get("max_position_embeddings")
        if value is None and field == "factor" and kind in ("yarn", "longrope"):
            max_positions = number(config.get("max_position_embeddings"), "max_position_embeddings")
            value = max_positions / number(tree.get("length"), "length")
        if value is None and field not in OPTIONAL:
            raise CheckpointConfigError(f"the RoPE scaling '{kind}' has no {key}")
        if value is not None:
            tree[field] = float(value) if isinstance(value, int) and field not in ("length", "truncate") else value
    return tree


# ---------------------------------------------------------------------------------------------------------- other keys


class SlidingWindow:
    """The window of all layers, or of the layers that `layer_types` or `max_window_layers` name."""

    keys = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

    def read(self, config: Config) -> Fields:
        window, types, layers = config.get("sliding_window"), config.get("layer_types"), config.get("num_hidden_layers")
        in_use = window is not None and config.get("use_sliding_window", False)
        allowed_types = ("full_attention", "sliding_attention") if in_use else ("full_attention",)
        if types is not None and not (isinstance(types, list) and all(kind in allowed_types for kind in types)):
            raise CheckpointConfigError(
                f"layer_types is {quote(types)}, expected a list of {' and '.join(allowed_types)}"
            )
        if not in_use:
            return {}
        if types is None:
            first = config.get("max_window_layers", 28)
            if type(layers) is not int or type(first) is not int or layers > 1024:
                raise CheckpointConfigError(
                    f"max_window_layers is {quote(first)} and num_hidden_layers is {quote(layers)}, expected integers"
                )
            types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
        if set(types) == {"sliding_attention"}:
            return {"decoder.mask.window": window}
        if set(types) == {"full_attention"}:
            return {}
        windowed = {"mask": {"window": window}}
        return {"decoder.pattern": [windowed if kind == "sliding_attention" else {} for kind in types]}

    def write(self, get: GetField) -> Tree:
        layers, pattern = get("decoder.layers"), get("decoder.pattern") or [{"mask": get("decoder.mask")}]
        windows = [(entry.get("mask") or {}).get("window") for entry in pattern]
        windows = [windows[i % len(windows)] for i in range(layers)]
        if not any(windows):
            return {"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * layers}
        return {
            "sliding_window": next(filter(None, windows)),
            "use_sliding_window": True,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        }


class Labels:
    """The number of classes, from the number of names in id2label or from num_labels."""

    keys = ("num_labels", "id2label", "label2id")

    def read(self, config: Config) -> Fields:
        names = config.get("id2label")
        if names is None:
            return {"head.classes": config.get("num_labels", 2)}
        if not isinstance(names, Mapping) or not all(re.fullmatch("[0-9]{1,9}", str(key)) for key in names):
            raise CheckpointConfigError(f"id2label is {quote(names)}, expected a JSON object of names by their index")
        return {"head.classes": len(names)}

    def write(self, get: GetField) -> Tree:
        names = {str(i): f"LABEL_{i}" for i in range(get("head.classes") or 0)}
        return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


# transformers pools the last token other than pad_token_id, so that −1 gives the last token
PAD_TOKEN_FOR_LAST_POOLING = WriteOnlyKey(("pad_token_id",), lambda get: -1)


@dataclass(frozen=True)
class FirstOf:
    """A value that is stored under the first present key of several."""

    keys: tuple[str, ...]
    path: str
    default: Any = REQUIRED

    def read(self, config: Config) -> Fields:
        value = next((config[key] for key in self.keys if config.get(key) is not None), self.default)
        if value is REQUIRED:
            raise missing_key(self.keys[-1])
        return {self.path: value}

    def write(self, get: GetField) -> Tree:
        return {self.keys[0]: get(self.path)}


@dataclass(frozen=True)
class Choice(OneKey):
    """A key each of whose values selects a table of fields."""

    path: str
    tables: tuple[tuple[Any, Tree], ...]  # pairs of a value of the key and the fields it sets
    default: Any

    def read(self, config: Config) -> Fields:
        config_value = config.get(self.key, self.default)
        for value, table in self.tables:
            if config_value == value:
                return {f"{self.path}.{field}": field_value for field, field_value in table.items()}
        expected = " or ".join(str(value) for value, _ in self.tables)
        raise CheckpointConfigError(f"{self.key} is {quote(config_value)}, expected {expected}")

    def write(self, get: GetField) -> Tree:
        for value, table in self.tables:
            if all(get(f"{self.path}.{field}") == field_value for field, field_value in table.items()):
                return {self.key: value}
        return {self.key: self.default}


def tying(default: bool) -> Choice:
    """A row for whether the head is tied to the token embedding."""
    return Choice("tie_word_embeddings", "head", ((True, {"kind": "tied"}), (False, {"kind": "untied"})), default)
