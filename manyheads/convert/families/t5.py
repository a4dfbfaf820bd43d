"""T5, version 1.0 and 1.1: Raffel et al. 2020. Scores are not scaled; one table of relative biases serves a tower."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from manyheads.convert.config import Config, Fixed, Key, Look, Placed
from manyheads.convert.families import Family, Task
from manyheads.convert.keys import FirstOf, in_both, read_activation, write_activation
from manyheads.convert.tables import scores
from manyheads.convert.weights import Repeated, Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.parts.feedforward import GatedSpec
from manyheads.spec import Tree, quoted

TOWERS = ("encoder", "decoder")


@dataclass(frozen=True)
class FeedForward:
    """ "relu", or "gated-gelu" and its like: gated or not, and by which function."""

    keys: tuple[str, ...] = ("feed_forward_proj", "dense_act_fn", "is_gated_act")

    def read(self, config: Config) -> Placed:
        said = config.get("feed_forward_proj", "relu")
        if not isinstance(said, str):
            raise ValueError(f"feed_forward_proj in the config is {quoted(said)}, expected a text such as relu or gated-gelu")
        gated, name = said.startswith("gated-"), said.removeprefix("gated-")
        if config.get("is_gated_act", gated) is not gated:
            raise ValueError(f"is_gated_act in the config is {quoted(config['is_gated_act'])}, and feed_forward_proj is {quoted(said)}")
        # "gated-gelu" has always meant the approximation by tanh
        name = config.get("dense_act_fn") or ("gelu_new" if said == "gated-gelu" else name)
        kind, function = "gated" if gated else "mlp", read_activation(name)
        return dict.fromkeys(in_both("feedforward.kind"), kind) | dict.fromkeys(in_both("feedforward.activation"), function)

    def write(self, look: Look) -> Tree:
        name, gated = write_activation(look("encoder.feedforward.activation")), look("encoder.feedforward.kind") == "gated"
        said = "gelu" if name == "gelu_new" and gated else name
        return {"feed_forward_proj": f"gated-{said}" if gated else said, "dense_act_fn": name, "is_gated_act": gated}


@dataclass(frozen=True)
class TiedHead:
    """Version 1.0 scores against the token table, scaled by 1/√D; version 1.1 has a head of its own, and newer configs say so twice."""

    keys: tuple[str, ...] = ("tie_word_embeddings", "scale_decoder_outputs")

    def read(self, config: Config) -> Placed:
        if not config.get("tie_word_embeddings", True):
            return {"head.kind": "free"}
        return {"head.kind": "tied", "head.temperature": "root" if config.get("scale_decoder_outputs", True) else "one"}

    def write(self, look: Look) -> Tree:
        return {"tie_word_embeddings": look("head.kind") == "tied", "scale_decoder_outputs": look("head.temperature") == "root"}


def settle(config: Config, names: Collection[str]) -> Config:
    """Newer configs call every head tied; whether version 1.1 has one of its own is seen from what is stored."""
    if config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)):
        return config
    return {**config, "tie_word_embeddings": "lm_head.weight" not in names, "scale_decoder_outputs": False}


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.encoder is not None
    assert spec.decoder is not None
    gated = isinstance(spec.encoder.feedforward, GatedSpec)
    yield Same("encoder.embed.table.weight", "shared.weight")
    yield Unused("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")  # which the first checkpoints hold
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


TOWER: Tree = {
    "embed": {"kind": "tokens"},
    "position": {"kind": "bucketed"},
    "attention": {"kind": "heads", "bias": False, "output_bias": False},
    "core": {"kind": "dot", "scale": 1.0},
    "feedforward": {"bias": False},
    "norm": {"kind": "rms"},
    "residual": {"kind": "pre"},
}
DROPPED = ("embed.dropout", "core.dropout", "feedforward.dropout", "residual.dropout")

FAMILIES = {
    "t5": Family(
        "t5",
        {
            "encoder": TOWER,
            "decoder": TOWER
            | {
                "embed": {"kind": "shared"},
                "position": {"kind": "bucketed", "bidirectional": False},
                "mask": {"causal": True},
                "cross": True,
            },
            "init": "fan-in",
        },
        keys=(
            Key("vocab_size", "vocab"),
            Key("d_model", in_both("width")),
            Key("d_kv", in_both("attention.size")),
            Key("d_ff", in_both("feedforward.hidden")),
            Key("num_heads", in_both("attention.heads")),
            Key("num_layers", "encoder.layers"),
            FirstOf(("num_decoder_layers", "num_layers"), "decoder.layers"),
            Key("relative_attention_num_buckets", in_both("position.buckets"), 32),
            Key("relative_attention_max_distance", in_both("position.distance"), 128),
            Key("layer_norm_epsilon", in_both("norm.eps"), 1e-6),
            Key("dropout_rate", tuple(path for name in DROPPED for path in in_both(name)), 0.1),
            FeedForward(),
            Fixed("is_decoder", False),
            Fixed("is_encoder_decoder", True),
        ),
        table=tower,
        tasks={"T5ForConditionalGeneration": Task(table=scores("lm_head", "shared"), keys=(TiedHead(),))},
        silent=("classifier_dropout", "n_positions", "num_hidden_layers"),
        settle=settle,
    )
}
