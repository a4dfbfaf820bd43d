"""GPT-2: Radford et al. 2019 (and GPT-3, Brown et al. 2020). Matrices are stored in×out, and q, k, v concatenated."""

from __future__ import annotations

from manyheads.convert.config import ConfigRow, Key, fixed
from manyheads.convert.families import Family, decoder_architectures
from manyheads.convert.keys import Choice, activation
from manyheads.convert.weights import QKV, Ignored, Rows, concatenated, renames
from manyheads.spec import Tree

BASE: Tree = {"decoder": {"position": {"kind": "learned"}}}


def keys(*position: ConfigRow, dropout: float) -> tuple[ConfigRow, ...]:
    return (
        Key("vocab_size", "vocab"),
        Key("n_layer", "decoder.layers"),
        Key("n_embd", "decoder.width"),
        Key("n_head", "decoder.attention.heads"),
        *position,
        Key("n_inner", "decoder.feedforward.hidden", None),
        activation("activation_function", "decoder.feedforward.activation"),
        Key("layer_norm_epsilon", "decoder.norm.eps"),
        Key("embd_pdrop", "decoder.embed.dropout", dropout),
        Key("attn_pdrop", "decoder.core.dropout", dropout),
        Key("resid_pdrop", "decoder.residual.dropout", dropout),
    )


# the causal mask, which older checkpoints store
MASKS: Rows = (Ignored("h.*.attn.bias"), Ignored("h.*.attn.masked_bias"))
EMBEDDINGS = {"decoder.embed.table": "wte", "decoder.embed.position.table": "wpe", "decoder.norm": "ln_f"}
NORMS = {"residual.norms.0": "ln_1", "residual.norms.1": "ln_2"}
MATRICES = {"attention.output": "attn.c_proj", "feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"}

FAMILIES = {
    "gpt2": Family(
        "gpt2",
        BASE,
        keys=(
            *keys(Key("n_positions", "decoder.position.length"), dropout=0.1),
            Choice("scale_attn_weights", "decoder.core", ((True, {"scale": None}), (False, {"scale": 1.0})), True),
            *fixed(scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
        ),
        weights=(
            *renames(EMBEDDINGS),
            *renames(NORMS, "decoder.layers.*.", "h.*."),
            *renames(MATRICES, "decoder.layers.*.", "h.*.", transposed=True),
            concatenated("h.*.attn.c_attn", "decoder.layers.*.attention.", QKV, transposed=True),
            *MASKS,
        ),
        architectures=decoder_architectures(
            "GPT2", "transformer.", language="LMHeadModel", head={"kind": "tied"}, keys=fixed(tie_word_embeddings=True)
        ),
        ignored=(
            "is_decoder", "n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn",
            "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
            "summary_use_proj", "tie_word_embeddings",
        ),
        spellings=(((r"^transformer\.", ""),),),
    )
}  # fmt: skip
