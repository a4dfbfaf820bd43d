"""T5, version 1.0 and 1.1: Raffel et al. 2020."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from manyheads.convert.activation import activation
from manyheads.convert.weights import Repeated, Row, Same, both
from manyheads.model.spec import ModelSpec, read_model
from manyheads.parts.feedforward import GatedSpec
from manyheads.parts.head import TiedSpec


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    dropout = config["dropout_rate"]
    gated = config["feed_forward_proj"].startswith("gated-")
    act = config.get("dense_act_fn") or config["feed_forward_proj"].removeprefix("gated-")
    position = {
        "kind": "bucketed",
        "buckets": config["relative_attention_num_buckets"],
        "distance": config["relative_attention_max_distance"],
    }
    encoder = {
        "layers": config["num_layers"],
        "width": config["d_model"],
        "embed": {"kind": "tokens", "dropout": dropout},
        "position": position,
        "attention": {"kind": "heads", "heads": config["num_heads"], "size": config["d_kv"], "bias": False, "output_bias": False},
        "core": {"kind": "dot", "scale": 1.0, "dropout": dropout},
        "feedforward": {
            "kind": "gated" if gated else "mlp",
            "hidden": config["d_ff"],
            "activation": activation(act),
            "bias": False,
            "dropout": dropout,
        },
        "norm": {"kind": "rms", "eps": config["layer_norm_epsilon"]},
        "residual": {"kind": "pre", "dropout": dropout},
    }
    decoder = {
        "like": "encoder",
        "layers": config["num_decoder_layers"],
        "embed": {"kind": "shared", "dropout": dropout},
        "position": {"bidirectional": False},
        "mask": {"causal": True},
        "cross": True,
    }
    # version 1.1 has a head of its own and does not scale; newer configs say only the latter
    tied = config["tie_word_embeddings"] and config.get("scale_decoder_outputs", True)
    head = {"kind": "tied", "temperature": "root"} if tied else {"kind": "free"}
    return read_model({"vocab": config["vocab_size"], "encoder": encoder, "decoder": decoder, "head": head, "init": "fan-in"})


def table(spec: ModelSpec) -> Iterator[Row]:
    assert spec.encoder is not None
    assert spec.decoder is not None
    gated = isinstance(spec.encoder.feedforward, GatedSpec)
    yield Same("encoder.embed.table.weight", "shared.weight")
    for name, tower in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        yield Repeated(f"{name}.embed_tokens.weight", same_as="shared.weight")
        yield Same(f"{name}.positions.0.table.weight", f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
        attentions = [("attention", "SelfAttention"), ("cross", "EncDecAttention")][: 2 if tower.cross else 1]
        for i in range(tower.layers):
            ours, theirs = f"{name}.layers.{i}", f"{name}.block.{i}.layer"
            for at, (part, called) in enumerate(attentions):
                for projection in ("query", "key", "value", "output"):
                    yield Same(f"{ours}.{part}.{projection}.weight", f"{theirs}.{at}.{called}.{projection[0]}.weight")
            last = len(attentions)
            names = (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")) if gated else (("up", "wi"), ("down", "wo"))
            for part, called in names:
                yield from both(f"{ours}.feedforward.{part}", f"{theirs}.{last}.DenseReluDense.{called}", bias=False)
            for at in range(last + 1):
                yield Same(f"{ours}.residual.norms.{at}.weight", f"{theirs}.{at}.layer_norm.weight")
        yield Same(f"{name}.norm.weight", f"{name}.final_layer_norm.weight")
    if isinstance(spec.head, TiedSpec):
        yield Repeated("lm_head.weight", same_as="shared.weight")
    else:
        yield Same("head.output.weight", "lm_head.weight")
