"""LLaMA, all versions: Touvron et al. 2023, Dubey et al. 2024."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from manyheads.convert.activation import activation
from manyheads.convert.weights import Repeated, Row, Same, both
from manyheads.model.spec import ModelSpec, read_model
from manyheads.parts.attention import HeadsSpec
from manyheads.parts.feedforward import GatedSpec
from manyheads.parts.head import TiedSpec
from manyheads.spec import Tree


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    tower = {
        "layers": config["num_hidden_layers"],
        "width": config["hidden_size"],
        "position": {"kind": "rope", **rope_of(config)},
        "attention": {
            "kind": "heads",
            "heads": config["num_attention_heads"],
            "groups": config.get("num_key_value_heads"),
            "size": config.get("head_dim"),
            "bias": config.get("attention_bias", False),
            "output_bias": config.get("attention_bias", False),
        },
        "core": {"kind": "dot", "dropout": config.get("attention_dropout", 0.0)},
        "mask": {"causal": True},
        "feedforward": {
            "kind": "gated",
            "hidden": config["intermediate_size"],
            "activation": activation(config["hidden_act"]),
            "bias": config.get("mlp_bias", False),
        },
        "norm": {"kind": "rms", "eps": config["rms_norm_eps"]},
        "residual": "pre",
    }
    return read_model(
        {"vocab": config["vocab_size"], "decoder": tower, "head": "tied" if config.get("tie_word_embeddings", False) else "free"}
    )


def rope_of(config: Mapping[str, Any]) -> Tree:
    """θ and its scaling, from the newer `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise ValueError("rope scaling with mscale is not supported: it changes the amplitude by a formula of its own")
    if kind not in SCALINGS:
        raise ValueError(f"rope scaling '{kind}' is not one of {', '.join(SCALINGS)}")
    return {"theta": theta, "scaling": SCALINGS[kind](rope, config)}


SCALINGS: dict[str, Any] = {
    "default": lambda rope, config: {"kind": "none"},
    "linear": lambda rope, config: {"kind": "linear", "factor": rope["factor"]},
    "dynamic": lambda rope, config: {
        "kind": "dynamic",
        "factor": rope["factor"],
        "length": config["max_position_embeddings"],
    },
    "yarn": lambda rope, config: {
        "kind": "yarn",
        "factor": rope["factor"],
        "length": rope["original_max_position_embeddings"],
        "fast": float(rope.get("beta_fast") or 32.0),
        "slow": float(rope.get("beta_slow") or 1.0),
        "attention": rope.get("attention_factor"),
        "truncate": rope.get("truncate", True),
    },
    "llama3": lambda rope, config: {
        "kind": "banded",
        "factor": rope["factor"],
        "length": rope["original_max_position_embeddings"],
        "low": rope["low_freq_factor"],
        "high": rope["high_freq_factor"],
    },
    "longrope": lambda rope, config: {
        "kind": "longrope",
        "short": rope["short_factor"],
        "long": rope["long_factor"],
        "length": rope["original_max_position_embeddings"],
        "stretch": rope.get("factor") or config["max_position_embeddings"] / rope["original_max_position_embeddings"],
        "attention": rope.get("attention_factor"),
    },
}


def table(spec: ModelSpec) -> Iterator[Row]:
    assert spec.decoder is not None
    attention, feedforward = spec.decoder.attention, spec.decoder.feedforward
    assert isinstance(attention, HeadsSpec)
    assert isinstance(feedforward, GatedSpec)
    yield Same("decoder.embed.table.weight", "model.embed_tokens.weight")
    for i in range(spec.decoder.layers):
        ours, theirs = f"decoder.layers.{i}", f"model.layers.{i}"
        yield Same(f"{ours}.residual.norms.0.weight", f"{theirs}.input_layernorm.weight")
        for part, name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
            yield from both(f"{ours}.attention.{part}", f"{theirs}.self_attn.{name}", bias=attention.bias)
        yield from both(f"{ours}.attention.output", f"{theirs}.self_attn.o_proj", bias=attention.output_bias)
        yield Same(f"{ours}.residual.norms.1.weight", f"{theirs}.post_attention_layernorm.weight")
        for part in ("gate", "up", "down"):
            yield from both(f"{ours}.feedforward.{part}", f"{theirs}.mlp.{part}_proj", bias=feedforward.bias)
    yield Same("decoder.norm.weight", "model.norm.weight")
    if isinstance(spec.head, TiedSpec):
        yield Repeated("lm_head.weight", same_as="model.embed_tokens.weight")
    else:
        yield Same("head.output.weight", "lm_head.weight")
