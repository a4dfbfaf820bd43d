"""GPT-NeoX and Pythia: Black et al. 2022, Biderman et al. 2023. q, k and v are concatenate within each head."""

from __future__ import annotations

from manyheads.convert.config import Key
from manyheads.convert.families import Family, decoder_architectures
from manyheads.convert.keys import Choice, RopeKeys, activation, sizes
from manyheads.convert.weights import QKV, Ignored, Rows, concatenate, renames
from manyheads.model.spec import ModelSpec

LAYER = {
    "residual.norms.0": "input_layernorm",
    "residual.norms.1": "post_attention_layernorm",
    "attention.output": "attention.dense",
    "feedforward.up": "mlp.dense_h_to_4h",
    "feedforward.down": "mlp.dense_4h_to_h",
}


def weights(spec: ModelSpec) -> Rows:
    assert spec.decoder is not None
    heads = spec.decoder.attention.heads
    return (
        *renames({"decoder.embed.table": "embed_in", "decoder.norm": "final_layer_norm"}),
        *renames(LAYER, "decoder.layers.*.", "layers.*."),
        concatenate("layers.*.attention.query_key_value", "decoder.layers.*.attention.", QKV, heads=heads),
        Ignored("layers.*.attention.bias"),  # buffers that older checkpoints store
        Ignored("layers.*.attention.masked_bias"),
        Ignored("layers.*.attention.rotary_emb.inv_freq"),
    )


PARALLEL = Choice(
    "use_parallel_residual", "decoder.residual", ((True, {"kind": "parallel-norms"}), (False, {"kind": "pre"})), True
)

FAMILIES = (
    Family(
        "gpt_neox",
        {"decoder": {"position": {"kind": "rope"}}},
        keys=(
            Key("vocab_size", "vocab"),
            *sizes("decoder"),
            activation("hidden_act", "decoder.feedforward.activation"),
            Key("layer_norm_eps", "decoder.norm.eps"),
            Key("hidden_dropout", ("decoder.residual.dropout", "decoder.embed.dropout"), 0.0),
            Key("attention_dropout", "decoder.core.dropout", 0.0),
            Key("attention_bias", ("decoder.attention.bias", "decoder.attention.output_bias"), True),
            PARALLEL,
            RopeKeys(
                default_fraction=0.25,
                fraction_key="rotary_pct",
                old_keys=("rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base"),
            ),
        ),
        weights=weights,
        architectures=decoder_architectures("GPTNeoX", "gpt_neox.", output="embed_out"),
        ignored_keys=(
            "attention_probs_dropout_prob",
            "classifier_dropout",
            "hidden_dropout_prob",
            "is_decoder",
            "tie_word_embeddings",
        ),
    ),
)
