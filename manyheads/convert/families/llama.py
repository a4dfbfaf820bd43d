"""LLaMA, all versions: Touvron et al. 2023, Dubey et al. 2024. Layers with RMS norm, gated MLP and RoPE."""

from __future__ import annotations

from manyheads.convert.config import ConfigRow, Fixed, Key
from manyheads.convert.families import BARE, Architecture, Family
from manyheads.convert.keys import PAD_TOKEN_FOR_LAST_POOLING, Labels, RopeKeys, activation, tying
from manyheads.convert.weights import Ignored, Rows, same, token_scores
from manyheads.spec import Tree

SHAPE: Tree = {
    "decoder": {
        "embed": {"kind": "tokens"},
        "position": {"kind": "rope"},
        "attention": {"kind": "heads", "bias": False, "output_bias": False},
        "core": {"kind": "dot"},
        "mask": {"causal": True},
        "feedforward": {"kind": "gated"},
        "norm": {"kind": "rms"},
        "residual": {"kind": "pre"},
    }
}

KEYS: tuple[ConfigRow, ...] = (
    Key("vocab_size", "vocab"),
    Key("num_hidden_layers", "decoder.layers"),
    Key("hidden_size", "decoder.width"),
    Key("num_attention_heads", "decoder.attention.heads"),
    Key("intermediate_size", "decoder.feedforward.hidden"),
    activation("hidden_act", "decoder.feedforward.activation", default="silu"),
    Key("rms_norm_eps", "decoder.norm.eps"),
    Key("attention_dropout", "decoder.core.dropout", 0.0),
)


def heads(*, kv_heads: int | None = None, size: int | None = None) -> tuple[ConfigRow, ...]:
    """Rows for the number of key/value heads and the head size, with their defaults if a config omits them."""
    return (
        Key("num_key_value_heads", "decoder.attention.kv_heads", kv_heads),
        Key("head_dim", "decoder.attention.size", size),
    )


EMBEDDINGS = {"decoder.embed.table": "embed_tokens", "decoder.norm": "norm"}
LAYER = {
    "residual.norms.0": "input_layernorm",
    "residual.norms.1": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
}
QUERY_KEY_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
INV_FREQ = Ignored("layers.*.self_attn.rotary_emb.inv_freq")  # a buffer that older checkpoints store
WEIGHTS: Rows = (
    *same(EMBEDDINGS),
    *same(LAYER, "decoder.layers.*.", "layers.*."),
    *same(QUERY_KEY_NORMS, "decoder.layers.*.", "layers.*.", optional=True),
    INV_FREQ,
)


def architectures(name: str, *, tied: bool = False) -> dict[str, Architecture]:
    return {
        f"{name}ForCausalLM": Architecture(
            weights=token_scores("lm_head", "decoder.embed.table"), keys=(tying(tied),), prefix="model."
        ),
        f"{name}ForSequenceClassification": Architecture(
            head={"kind": "classes", "pool": "last", "bias": False},
            weights=same({"head.output": "score"}),
            keys=(Labels(), PAD_TOKEN_FOR_LAST_POOLING),
            prefix="model.",
        ),
        f"{name}Model": BARE,
    }


IGNORED = ("tie_word_embeddings",)
BIASES = Key("attention_bias", ("decoder.attention.bias", "decoder.attention.output_bias"), False)

FAMILIES = {
    "llama": Family(
        "llama",
        SHAPE,
        keys=(
            *KEYS,
            *heads(),
            RopeKeys(),
            BIASES,
            Key("mlp_bias", "decoder.feedforward.bias", False),
            Fixed("pretraining_tp", 1),
            Fixed("rope_interleaved", False),
        ),
        weights=WEIGHTS,
        architectures=architectures("Llama"),
        ignored=(*IGNORED, "is_llama_config", "max_sequence_length"),
    )
}
