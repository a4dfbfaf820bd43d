"""Marian: Junczys-Dowmunt et al. 2018, as published for translation by Tiedemann and Thottingal 2020."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from manyheads.convert.activation import activation
from manyheads.convert.weights import Derived, Repeated, Row, Same, both
from manyheads.model.spec import ModelSpec, read_model


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    def tower(name: str, embed: str) -> dict[str, Any]:
        return {
            "layers": config[f"{name}_layers"],
            "width": config["d_model"],
            "embed": {"kind": embed, "scale": config["scale_embedding"], "dropout": config["dropout"]},
            "position": {"kind": "sinusoidal", "layout": "halves"},
            "attention": {"kind": "heads", "heads": config[f"{name}_attention_heads"]},
            "core": {"kind": "dot", "dropout": config["attention_dropout"]},
            "feedforward": {
                "hidden": config[f"{name}_ffn_dim"],
                "activation": activation(config["activation_function"]),
                "dropout": config["activation_dropout"],
            },
            "norm": "layer",
            "residual": {"kind": "post", "dropout": config["dropout"]},
        }

    decoder = tower("decoder", "shared") | {"mask": {"causal": True}, "cross": True}
    return read_model(
        {"vocab": config["vocab_size"], "encoder": tower("encoder", "tokens"), "decoder": decoder, "head": {"kind": "tied", "bias": True}}
    )


def table(spec: ModelSpec) -> Iterator[Row]:
    assert spec.encoder is not None
    assert spec.decoder is not None
    assert isinstance(spec.vocab, int)
    yield Same("encoder.embed.table.weight", "model.shared.weight")
    yield Same("head.bias", "final_logits_bias", shape=(1, spec.vocab))
    yield Repeated("lm_head.weight", same_as="model.shared.weight")
    for name, tower in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        yield Repeated(f"model.{name}.embed_tokens.weight", same_as="model.shared.weight")
        yield Derived(f"model.{name}.embed_positions.weight")
        for i in range(tower.layers):
            ours, theirs = f"{name}.layers.{i}", f"model.{name}.layers.{i}"
            attentions = [("attention", "self_attn"), ("cross", "encoder_attn")][: 2 if tower.cross else 1]
            for at, (part, called) in enumerate(attentions):
                for projection, named in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "out_proj")):
                    yield from both(f"{ours}.{part}.{projection}", f"{theirs}.{called}.{named}")
                yield from both(f"{ours}.residual.norms.{at}", f"{theirs}.{called}_layer_norm")
            yield from both(f"{ours}.feedforward.up", f"{theirs}.fc1")
            yield from both(f"{ours}.feedforward.down", f"{theirs}.fc2")
            yield from both(f"{ours}.residual.norms.{len(attentions)}", f"{theirs}.final_layer_norm")
