"""Config rows that many families share: activations, rotation, windows by layer, labels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyheads.convert.config import NEEDED, Config, Key, Look, Placed
from manyheads.spec import Tree, nearest, quoted

# their names → ours; the first of several names for one function is the one written
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
        raise ValueError(f"no activation {quoted(name)}{nearest(str(name), ACTIVATIONS)}")
    return ACTIVATIONS[name]


def write_activation(ours: str) -> str:
    return next((name for name, known in ACTIVATIONS.items() if known == ours), ours)


def activation(theirs: str, *ours: str, default: str | None = None) -> Key:
    """A key that names an activation function."""
    given = {} if default is None else {"default": default}
    return Key(theirs, ours, reads=read_activation, writes=write_activation, **given)


def in_both(path: str) -> tuple[str, str]:
    """One place in either tower."""
    return f"encoder.{path}", f"decoder.{path}"


@dataclass(frozen=True)
class Rope:
    """θ, the share that is turned, and the scaling: newer configs hold them in `rope_parameters`, older ones in keys of their own."""

    at: str = "decoder.position"
    partial: float | None = None  # the default share, where a family turns only some coordinates
    share: str = "partial_rotary_factor"  # and what older configs call it
    old: tuple[str, ...] = ("rope_theta", "rope_scaling", "partial_rotary_factor")
    theta: float = 10000.0
    trained: int | None = None  # the length trained on, where a family has one that its configs may leave out
    older: tuple[tuple[str, str], ...] = ()  # former names of scalings, and what they are called now

    @property
    def keys(self) -> tuple[str, ...]:
        return ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", *self.old)

    def read(self, config: Config) -> Placed:
        newer, older = config.get("rope_parameters"), config.get("rope_scaling")
        if newer and older and newer != older:
            raise ValueError("the config has both rope_parameters and rope_scaling, and they differ")
        rope = newer or older or {}
        if not isinstance(rope, Mapping):
            raise ValueError(f"rope_parameters in the config is {quoted(rope)}, expected a table")
        kind = rope.get("rope_type", rope.get("type", "default"))
        kind = next((now for before, now in self.older if before == kind), kind)
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise ValueError(f"no rotation scaling {quoted(kind)}{nearest(str(kind), SCALINGS)}")
        names = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *SCALINGS[kind].values()} | IMPLIED.get(kind, set())
        if unknown := sorted(set(rope) - names):
            raise ValueError(f"rotation scaling '{kind}' has a key that is not supported: {unknown[0]}")
        share = rope.get("partial_rotary_factor", config.get(self.share, self.partial))
        if self.partial is None and share not in (None, 1):
            raise ValueError(f"partial_rotary_factor is {quoted(share)}, and this family turns every coordinate")
        lengths = {rope.get("original_max_position_embeddings"), config.get("original_max_position_embeddings")} - {None}
        if "length" in SCALINGS[kind] and kind != "dynamic" and len(lengths) > 1:
            raise ValueError("original_max_position_embeddings is said twice in the config, and not the same")
        theta = rope.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", self.theta)))
        return {
            f"{self.at}.theta": number(theta, "rope_theta"),
            f"{self.at}.fraction": None if share is None else number(share, "partial_rotary_factor"),
            f"{self.at}.scaling": scaling(kind, rope, {"original_max_position_embeddings": self.trained, **config}),
        }

    def write(self, look: Look) -> Tree:
        ours = look(f"{self.at}.scaling") or {}
        kind = next((theirs for theirs, known in OURS.items() if known == ours.get("kind")), "default")
        rope = {"rope_type": kind, "rope_theta": look(f"{self.at}.theta")}
        rope |= {theirs: ours[field] for field, theirs in SCALINGS[kind].items() if field in ours and theirs != "max_position_embeddings"}
        if self.partial is not None:
            rope["partial_rotary_factor"] = look(f"{self.at}.fraction")
        longest = ours.get("length", 2048)
        return {
            "rope_parameters": rope,
            "max_position_embeddings": int(longest * ours.get("stretch", 1) if kind == "longrope" else longest),
        }


# by their kind: fields of our scaling and the names they have there
SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor", "length": "max_position_embeddings"},
    "yarn": {
        "length": "original_max_position_embeddings", "factor": "factor", "fast": "beta_fast", "slow": "beta_slow",
        "attention": "attention_factor", "truncate": "truncate",
    },
    "llama3": {"factor": "factor", "length": "original_max_position_embeddings", "low": "low_freq_factor", "high": "high_freq_factor"},
    "longrope": {
        "short": "short_factor", "long": "long_factor", "length": "original_max_position_embeddings", "stretch": "factor",
        "attention": "attention_factor",
    },
}  # fmt: skip
OURS = {"default": "none", "linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "llama3": "banded", "longrope": "longrope"}
LEFT_OUT = ("max_position_embeddings", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate")
# keys that a config repeats beside those that count
IMPLIED = {"dynamic": {"original_max_position_embeddings"}, "linear": {"original_max_position_embeddings"}}


def scaling(kind: str, rope: Mapping[str, Any], config: Config) -> Tree:
    """The scaling of ours that a table of theirs describes; what it leaves out is looked for in the config around it."""
    found: Tree = {"kind": OURS[kind]}
    for field, theirs in SCALINGS[kind].items():
        value = rope.get(theirs)
        if value is None and field == "length":
            value = config.get(theirs) or config.get("max_position_embeddings")
        if value is None and theirs == "factor" and kind in ("yarn", "longrope"):
            value = number(config.get("max_position_embeddings"), "max_position_embeddings") / number(found.get("length"), "length")
        if value is None and theirs not in LEFT_OUT:
            raise ValueError(f"rotation scaling '{kind}' lacks {theirs}")
        if value is not None:
            found[field] = float(value) if isinstance(value, int) and field not in ("length", "truncate") else value
    return found


def number(value: Any, name: str) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{name} in the config is {quoted(value)}, expected a number")
    return float(value)


@dataclass(frozen=True)
class Windows:
    """Which layers see only a window: all of them, none, or those that `layer_types` and its older forms name."""

    at: str = "decoder"
    layers: str = "num_hidden_layers"

    @property
    def keys(self) -> tuple[str, ...]:
        return ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

    def read(self, config: Config) -> Placed:
        window, types, layers = config.get("sliding_window"), config.get("layer_types"), config.get(self.layers)
        if types is not None and not (isinstance(types, list) and all(isinstance(kind, str) for kind in types)):
            raise ValueError(f"layer_types in the config is {quoted(types)}, expected a list of names")
        if window is None or not config.get("use_sliding_window", False):
            if types and set(types) != {"full_attention"}:
                raise ValueError(f"layer_types in the config is {quoted(types)}, and no sliding_window is in use")
            return {}
        if types is None:
            first = config.get("max_window_layers", 28)
            if type(layers) is not int or type(first) is not int or layers > 1024:
                raise ValueError(f"max_window_layers in the config is {quoted(first)}, of {quoted(layers)} layers")
            types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
        if set(types) == {"sliding_attention"}:
            return {f"{self.at}.mask.window": window}
        if set(types) == {"full_attention"}:
            return {}
        if set(types) - {"full_attention", "sliding_attention"}:
            raise ValueError(f"layer_types in the config is {quoted(types)}, expected full_attention and sliding_attention alone")
        return {f"{self.at}.pattern": [{"mask": {"window": window}} if kind == "sliding_attention" else {} for kind in types]}

    def write(self, look: Look) -> Tree:
        everywhere, pattern = look(f"{self.at}.mask.window"), look(f"{self.at}.pattern") or []
        windows = [(entry.get("mask") or {}).get("window") for entry in pattern]
        layers = look(f"{self.at}.layers")
        windows = [windows[i % len(windows)] if windows else everywhere for i in range(layers)]
        if not any(windows):
            return {"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * layers}
        types = ["sliding_attention" if window else "full_attention" for window in windows]
        return {"sliding_window": next(filter(None, windows)), "use_sliding_window": True, "max_window_layers": 0, "layer_types": types}


@dataclass(frozen=True)
class Labels:
    """How many classes: a table of names, of which only the number counts."""

    at: str = "head.classes"

    @property
    def keys(self) -> tuple[str, ...]:
        return ("num_labels", "id2label", "label2id")

    def read(self, config: Config) -> Placed:
        names = config.get("id2label")
        if names is None:
            return {self.at: config.get("num_labels", 2)}
        if not isinstance(names, Mapping) or not all(re.fullmatch("[0-9]{1,9}", str(key)) for key in names):
            raise ValueError(f"id2label in the config is {quoted(names)}, expected a table of names by their numbers")
        return {self.at: len(names)}

    def write(self, look: Look) -> Tree:
        count = look(self.at) or 0
        return {"id2label": {str(i): f"LABEL_{i}" for i in range(count)}, "label2id": {f"LABEL_{i}": i for i in range(count)}}


@dataclass(frozen=True)
class LastToken:
    """A head that takes a text's last token asks which one is padding: none is, unless a config says so."""

    keys: tuple[str, ...] = ("pad_token_id",)

    def read(self, config: Config) -> Placed:
        return {}

    def write(self, look: Look) -> Tree:
        return {"pad_token_id": -1}


@dataclass(frozen=True)
class FirstOf:
    """A value under the first of several keys that gives one."""

    names: tuple[str, ...]
    ours: str
    default: Any = NEEDED

    @property
    def keys(self) -> tuple[str, ...]:
        return self.names

    def read(self, config: Config) -> Placed:
        value = next((config[name] for name in self.names if config.get(name) is not None), self.default)
        if value is NEEDED:
            raise ValueError(f"the config lacks {self.names[-1]}")
        return {self.ours: value}

    def write(self, look: Look) -> Tree:
        return {self.names[0]: look(self.ours)}


@dataclass(frozen=True)
class Choice:
    """A key whose value chooses between kinds: whole tables of ours by what theirs says."""

    theirs: str
    ours: str
    tables: tuple[tuple[Any, Tree], ...]  # their value, our table
    default: Any

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, config: Config) -> Placed:
        given = config.get(self.theirs, self.default)
        for value, table in self.tables:
            if given == value:
                return {f"{self.ours}.{field}": inner for field, inner in table.items()}
        raise ValueError(f"{self.theirs} in the config is {quoted(given)}, expected {' or '.join(str(value) for value, _ in self.tables)}")

    def write(self, look: Look) -> Tree:
        fits = (value for value, table in self.tables if all(look(f"{self.ours}.{field}") == inner for field, inner in table.items()))
        return {self.theirs: next(fits, self.default)}


def tying(default: bool) -> Choice:
    """Whether the head scores against the token table or has rows of its own."""
    return Choice("tie_word_embeddings", "head", ((True, {"kind": "tied"}), (False, {"kind": "free"})), default)
