"""LLaMA, all versions: Touvron et al. 2023, Dubey et al. 2024. Layers with RMS norm, gated MLP and RoPE."""

from __future__ import annotations

from manyheads.convert.config import ConfigRow, Key, fixed
from manyheads.convert.families import Family, decoder_architectures
from manyheads.convert.keys import RopeKeys, activation, sizes
from manyheads.convert.weights import Ignored, Rows, renames
from manyheads.spec import Tree

STACK: Tree = {
    "position": {"kind": "rope"},
    "attention": {"bias": False, "output_bias": False},
    "feedforward": {"kind": "gated"},
    "norm": {"kind": "rms"},
}
BASE: Tree = {"decoder": STACK}


def stack_keys(stack: str) -> tuple[ConfigRow, ...]:
    return (
        Key("vocab_size", "vocab"),
        *sizes(stack),
        activation("hidden_act", f"{stack}.feedforward.activation", default="silu"),
        Key("rms_norm_eps", f"{stack}.norm.eps"),
        Key("attention_dropout", f"{stack}.core.dropout", 0.0),
    )


def heads(*, kv_heads: int | None = None, size: int | None = None, stack: str = "decoder") -> tuple[ConfigRow, ...]:
    """Rows for the number of key/value heads and the head size, with their defaults if a config omits them."""
    return (
        Key("num_key_value_heads", f"{stack}.attention.kv_heads", kv_heads),
        Key("head_dim", f"{stack}.attention.size", size),
    )


def biases(stack: str) -> tuple[ConfigRow, ...]:
    return (
        Key("attention_bias", (f"{stack}.attention.bias", f"{stack}.attention.output_bias"), False),
        Key("mlp_bias", f"{stack}.feedforward.bias", False),
    )


KEYS = stack_keys("decoder")
EMBEDDINGS = {"embed.table": "embed_tokens", "norm": "norm"}
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
    *renames(EMBEDDINGS, "decoder."),
    *renames(LAYER, "decoder.layers.*.", "layers.*."),
    *renames(QUERY_KEY_NORMS, "decoder.layers.*.", "layers.*.", optional=True),
    INV_FREQ,
)
IGNORED = ("tie_word_embeddings",)
BIASES = biases("decoder")[0]

FAMILIES = {
    "llama": Family(
        "llama",
        BASE,
        keys=(
            *KEYS,
            *heads(),
            RopeKeys(),
            *biases("decoder"),
            *fixed(pretraining_tp=1, rope_interleaved=False),
        ),
        weights=WEIGHTS,
        architectures=decoder_architectures("Llama"),
        ignored=(*IGNORED, "is_llama_config", "max_sequence_length"),
    )
}
