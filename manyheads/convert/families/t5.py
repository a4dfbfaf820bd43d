"""T5, version 1.0 and 1.1: Raffel et al. 2020. Scores are not scaled; each stack has one table of relative biases."""

from __future__ import annotations

from collections.abc import Collection

from manyheads.convert.config import Config, Fields, GetField, Key, fixed
from manyheads.convert.families import Architecture, Family
from manyheads.convert.keys import FirstOf, in_both, read_activation, write_activation
from manyheads.convert.weights import Ignored, Rows, TiedTensor, renames, token_scores
from manyheads.errors import CheckpointConfigError
from manyheads.model.spec import ModelSpec
from manyheads.spec import Tree, quote


class FeedForward:
    """The activation and whether the MLP is gated, from values such as "relu" and "gated-gelu"."""

    keys = ("feed_forward_proj", "dense_act_fn", "is_gated_act")

    def read(self, config: Config) -> Fields:
        value = config.get("feed_forward_proj", "relu")
        if not isinstance(value, str):
            raise CheckpointConfigError(f"feed_forward_proj is {quote(value)}, expected a string such as gated-gelu")
        gated, name = value.startswith("gated-"), value.removeprefix("gated-")
        if config.get("is_gated_act", gated) is not gated:
            raise CheckpointConfigError(
                f"is_gated_act is {quote(config['is_gated_act'])}, but feed_forward_proj is {quote(value)}"
            )
        # "gated-gelu" means the tanh approximation
        name = config.get("dense_act_fn") or ("gelu_new" if value == "gated-gelu" else name)
        kinds = dict.fromkeys(in_both("feedforward.kind"), "gated" if gated else "mlp")
        return kinds | dict.fromkeys(in_both("feedforward.activation"), read_activation(name))

    def write(self, get: GetField) -> Tree:
        gated = get("encoder.feedforward.kind") == "gated"
        name = write_activation(get("encoder.feedforward.activation"))
        value = f"gated-{'gelu' if name == 'gelu_new' else name}" if gated else name
        return {"feed_forward_proj": value, "dense_act_fn": name, "is_gated_act": gated}


class TiedHead:
    """Whether the head is tied, with its input scaled by 1/√D (version 1.0), or has its own matrix (version 1.1)."""

    keys = ("tie_word_embeddings", "scale_decoder_outputs")

    def read(self, config: Config) -> Fields:
        if not config.get("tie_word_embeddings", True):
            return {"head.kind": "untied"}
        return {
            "head.kind": "tied",
            "head.logit_scale": "inverse-sqrt" if config.get("scale_decoder_outputs", True) else "one",
        }

    def write(self, get: GetField) -> Tree:
        return {
            "tie_word_embeddings": get("head.kind") == "tied",
            "scale_decoder_outputs": get("head.logit_scale") == "inverse-sqrt",
        }


def resolve(config: Config, names: Collection[str]) -> Config:
    """Sets tie_word_embeddings from the stored names, because newer configs of version 1.1 have true for every head."""
    if config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)):
        return config
    return {**config, "tie_word_embeddings": "lm_head.weight" not in names, "scale_decoder_outputs": False}


PROJECTIONS = {"query": "q", "key": "k", "value": "v", "output": "o"}


def weights(spec: ModelSpec) -> Rows:
    """The rows of T5, whose blocks have numbered sublayers `layer.0`, `layer.1`, …, of which the last is the MLP."""
    assert spec.encoder is not None
    gated = spec.encoder.feedforward.kind == "gated"
    names = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
    rows: Rows = (
        *renames({"encoder.embed.table": "shared"}),
        *renames(PROJECTIONS, "decoder.layers.*.cross.", "decoder.block.*.layer.1.EncDecAttention."),
        # in the first published checkpoints
        Ignored("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
    )
    for stack, sublayers in (("encoder", 2), ("decoder", 3)):
        prefix, tensor_prefix = f"{stack}.layers.*.", f"{stack}.block.*.layer."
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        rows += (
            *renames({f"{stack}.position_modules.0.table": bias, f"{stack}.norm": f"{stack}.final_layer_norm"}),
            *renames(PROJECTIONS, f"{prefix}attention.", f"{tensor_prefix}0.SelfAttention."),
            *renames(names, f"{prefix}feedforward.", f"{tensor_prefix}{sublayers - 1}.DenseReluDense."),
            *renames({f"residual.norms.{i}": f"{i}.layer_norm" for i in range(sublayers)}, prefix, tensor_prefix),
            TiedTensor(f"{stack}.embed_tokens.weight", ("encoder.embed.table.weight",)),
        )
    return rows


STACK: Tree = {
    "position": {"kind": "bucketed"},
    "attention": {"bias": False, "output_bias": False},
    "core": {"scale": 1.0},
    "feedforward": {"bias": False},
    "norm": {"kind": "rms"},
}
DECODER: Tree = {
    "embed": {"kind": "shared"},
    "position": {"kind": "bucketed", "bidirectional": False},
    "cross": True,
}
DROPOUT = ("embed.dropout", "core.dropout", "feedforward.dropout", "residual.dropout")

FAMILIES = (
    Family(
        "t5",
        {"encoder": STACK, "decoder": STACK | DECODER, "init": "fan-in"},
        keys=(
            Key("vocab_size", "vocab"),
            Key("d_model", in_both("width")),
            Key("d_kv", in_both("attention.size")),
            Key("d_ff", in_both("feedforward.hidden")),
            Key("num_heads", in_both("attention.heads")),
            Key("num_layers", "encoder.layers"),
            FirstOf(("num_decoder_layers", "num_layers"), "decoder.layers"),
            Key("relative_attention_num_buckets", in_both("position.buckets"), 32),
            Key("relative_attention_max_distance", in_both("position.max_distance"), 128),
            Key("layer_norm_epsilon", in_both("norm.eps"), 1e-6),
            Key("dropout_rate", tuple(path for name in DROPOUT for path in in_both(name)), 0.1),
            FeedForward(),
            *fixed(is_decoder=False, is_encoder_decoder=True),
        ),
        weights=weights,
        architectures={
            "T5ForConditionalGeneration": Architecture(
                weights=token_scores("lm_head", "encoder.embed.table"), keys=(TiedHead(),)
            )
        },
        ignored_keys=("classifier_dropout", "n_positions", "num_hidden_layers"),
        resolve=resolve,
    ),
)
