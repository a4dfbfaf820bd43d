"""GPT-2: Radford et al. 2019 (and GPT-3, Brown et al. 2020). Matrices are stored in×out, and q, k, v concatenated."""

from __future__ import annotations

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import HEADLESS, Architecture, Family, last_token_classes
from manyheads.convert.keys import Choice, activation
from manyheads.convert.weights import QKV, Ignored, concatenated, renames, token_scores
from manyheads.spec import Tree

BASE: Tree = {
    "decoder": {
        "embed": {"kind": "tokens"},
        "position": {"kind": "learned"},
        "attention": {"kind": "heads"},
        "core": {"kind": "dot"},
        "mask": {"causal": True},
        "feedforward": {"kind": "mlp"},
        "norm": {"kind": "layer"},
        "residual": {"kind": "pre"},
    }
}
EMBEDDINGS = {"decoder.embed.table": "wte", "decoder.embed.position.table": "wpe", "decoder.norm": "ln_f"}
NORMS = {"residual.norms.0": "ln_1", "residual.norms.1": "ln_2"}
MATRICES = {"attention.output": "attn.c_proj", "feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"}

FAMILIES = {
    "gpt2": Family(
        "gpt2",
        BASE,
        keys=(
            Key("vocab_size", "vocab"),
            Key("n_layer", "decoder.layers"),
            Key("n_embd", "decoder.width"),
            Key("n_head", "decoder.attention.heads"),
            Key("n_positions", "decoder.position.length"),
            Key("n_inner", "decoder.feedforward.hidden", None),
            activation("activation_function", "decoder.feedforward.activation"),
            Key("layer_norm_epsilon", "decoder.norm.eps"),
            Key("embd_pdrop", "decoder.embed.dropout", 0.1),
            Key("attn_pdrop", "decoder.core.dropout", 0.1),
            Key("resid_pdrop", "decoder.residual.dropout", 0.1),
            Choice("scale_attn_weights", "decoder.core", ((True, {"scale": None}), (False, {"scale": 1.0})), True),
            Fixed("scale_attn_by_inverse_layer_idx", False),
            Fixed("add_cross_attention", False),
        ),
        weights=(
            *renames(EMBEDDINGS),
            *renames(NORMS, "decoder.layers.*.", "h.*."),
            *renames(MATRICES, "decoder.layers.*.", "h.*.", transposed=True),
            concatenated("h.*.attn.c_attn", "decoder.layers.*.attention.", QKV, transposed=True),
            Ignored("h.*.attn.bias"),  # the causal mask, which older checkpoints store
            Ignored("h.*.attn.masked_bias"),
        ),
        architectures={
            "GPT2LMHeadModel": Architecture(
                head={"kind": "tied"},
                weights=token_scores("lm_head", "decoder.embed.table"),
                keys=(Fixed("tie_word_embeddings", True),),
                prefix="transformer.",
            ),
            "GPT2ForSequenceClassification": last_token_classes("transformer."),
            "GPT2Model": HEADLESS,
        },
        ignored=(
            "is_decoder", "n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn",
            "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
            "summary_use_proj", "tie_word_embeddings",
        ),
        spellings=(((r"^transformer\.", ""),),),
    )
}  # fmt: skip
