"""BERT with its masked-token head: Devlin et al. 2019."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from manyheads.convert.activation import activation
from manyheads.convert.weights import Repeated, Row, Same, both
from manyheads.model.spec import ModelSpec, read_model


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ValueError("is_decoder = true makes another model of it, which is not supported")
    norm = {"kind": "layer", "eps": config["layer_norm_eps"]}
    dropout, act = config["hidden_dropout_prob"], activation(config["hidden_act"])
    tower = {
        "layers": config["num_hidden_layers"],
        "width": config["hidden_size"],
        "embed": {"kind": "tokens", "types": config["type_vocab_size"], "norm": norm, "dropout": dropout},
        "position": {"kind": "learned", "length": config["max_position_embeddings"]},
        "attention": {"kind": "heads", "heads": config["num_attention_heads"]},
        "core": {"kind": "dot", "dropout": config["attention_probs_dropout_prob"]},
        "feedforward": {"hidden": config["intermediate_size"], "activation": act},
        "norm": norm,
        "residual": {"kind": "post", "dropout": dropout},
    }
    head = {"kind": "masked", "activation": act, "norm": norm, "scores": {"kind": "tied", "bias": True}}
    return read_model({"vocab": config["vocab_size"], "encoder": tower, "head": head})


def table(spec: ModelSpec) -> Iterator[Row]:
    assert spec.encoder is not None
    theirs = "bert.embeddings"
    yield Same("encoder.embed.table.weight", f"{theirs}.word_embeddings.weight")
    yield Same("encoder.embed.position.table.weight", f"{theirs}.position_embeddings.weight")
    yield Same("encoder.embed.types.weight", f"{theirs}.token_type_embeddings.weight")
    yield from both("encoder.embed.norm", f"{theirs}.LayerNorm")
    for i in range(spec.encoder.layers):
        ours, theirs = f"encoder.layers.{i}", f"bert.encoder.layer.{i}"
        for part in ("query", "key", "value"):
            yield from both(f"{ours}.attention.{part}", f"{theirs}.attention.self.{part}")
        yield from both(f"{ours}.attention.output", f"{theirs}.attention.output.dense")
        yield from both(f"{ours}.residual.norms.0", f"{theirs}.attention.output.LayerNorm")
        yield from both(f"{ours}.feedforward.up", f"{theirs}.intermediate.dense")
        yield from both(f"{ours}.feedforward.down", f"{theirs}.output.dense")
        yield from both(f"{ours}.residual.norms.1", f"{theirs}.output.LayerNorm")
    yield from both("head.project", "cls.predictions.transform.dense")
    yield from both("head.norm", "cls.predictions.transform.LayerNorm")
    yield Same("head.scores.bias", "cls.predictions.bias")
    yield Repeated("cls.predictions.decoder.weight", same_as="bert.embeddings.word_embeddings.weight")
    yield Repeated("cls.predictions.decoder.bias", same_as="cls.predictions.bias")
