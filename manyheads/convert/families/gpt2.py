"""GPT-2 and GPT-J, whose configs have the same keys."""

from __future__ import annotations

from manyheads.convert.config import Config, ConfigRow, Fields, GetField, Key, fixed, require
from manyheads.convert.families import Family, decoder_architectures
from manyheads.convert.keys import Choice, activation
from manyheads.convert.weights import QKV, Ignored, Rows, concatenate, renames
from manyheads.errors import CheckpointConfigError
from manyheads.spec import Tree, quote

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


class RotaryDim:
    """The number of rotated coordinates per head, which a description holds as a fraction of the head."""

    keys = ("rotary_dim",)

    def read(self, config: Config) -> Fields:
        width, heads, rotated = (config.get(key, 64) for key in ("n_embd", "n_head", "rotary_dim"))
        valid = all(type(count) is int and 0 < count <= 65536 for count in (width, heads, rotated))
        if not valid or rotated * heads > width:
            raise CheckpointConfigError(
                f"rotary_dim is {quote(rotated)}, with {quote(heads)} heads in a width of {quote(width)}"
            )
        return {"decoder.position.fraction": rotated / (width // heads)}

    def write(self, get: GetField) -> Tree:
        size = require(get, "decoder.width") // require(get, "decoder.attention.heads")
        return {"rotary_dim": round(size * (get("decoder.position.fraction") or 1.0))}


GPTJ_LAYER = {
    "residual.norms.0": "ln_1",
    "attention.query": "attn.q_proj",
    "attention.key": "attn.k_proj",
    "attention.value": "attn.v_proj",
    "attention.output": "attn.out_proj",
    "feedforward.up": "mlp.fc_in",
    "feedforward.down": "mlp.fc_out",
}

FAMILIES = (
    # Radford et al. 2019 (and GPT-3, Brown et al. 2020): matrices are stored in×out, and q, k, v concatenate
    Family(
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
            concatenate("h.*.attn.c_attn", "decoder.layers.*.attention.", QKV, transposed=True),
            *MASKS,
        ),
        architectures=decoder_architectures(
            "GPT2", "transformer.", language="LMHeadModel", head={"kind": "tied"}, keys=fixed(tie_word_embeddings=True)
        ),
        ignored_keys=(
            "is_decoder", "n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn",
            "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
            "summary_use_proj", "tie_word_embeddings",
        ),
        key_mappings=(((r"^transformer\.", ""),),),
    ),
    # Wang and Komatsuzaki 2021: interleaved RoPE on some coordinates, one norm per layer, a head with a bias
    Family(
        "gptj",
        {
            "decoder": {
                "position": {"kind": "rope", "layout": "interleaved"},
                "attention": {"bias": False, "output_bias": False},
                "residual": {"kind": "parallel"},
            }
        },
        keys=(*keys(dropout=0.0), RotaryDim()),
        weights=(
            *renames({"decoder.embed.table": "wte", "decoder.norm": "ln_f"}),
            *renames(GPTJ_LAYER, "decoder.layers.*.", "h.*."),
            *MASKS,
        ),
        architectures=decoder_architectures("GPTJ", "transformer.", head={"kind": "untied", "bias": True}, keys=()),
        ignored_keys=(
            "n_ctx", "n_positions", "rotary", "scale_attn_weights", "summary_activation", "summary_first_dropout",
            "summary_proj_to_labels", "summary_type", "summary_use_proj", "tie_word_embeddings",
        ),
    ),
)  # fmt: skip
