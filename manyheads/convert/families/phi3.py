"""Phi-3: Abdin et al. 2024. LLaMA's layers with q, k and v concatenated, and gate and up concatenated."""

from __future__ import annotations

from manyheads.convert.config import Key, fixed
from manyheads.convert.families import Family, decoder_architectures
from manyheads.convert.families.llama import BASE, EMBEDDINGS, IGNORED, INV_FREQ, KEYS, heads
from manyheads.convert.keys import RopeKeys
from manyheads.convert.weights import QKV, concatenated, renames

LAYER = {
    "attention.output": "self_attn.o_proj",
    "feedforward.down": "mlp.down_proj",
    "residual.norms.0": "input_layernorm",
    "residual.norms.1": "post_attention_layernorm",
}

FAMILIES = {
    "phi3": Family(
        "phi3",
        BASE,
        keys=(
            *KEYS,
            heads()[0],
            RopeKeys(partial=1.0, trained=4096, former=(("su", "longrope"), ("yarn", "longrope"))),
            Key("sliding_window", "decoder.mask.window", None),
            Key("embd_pdrop", "decoder.embed.dropout", 0.0),
            Key("resid_pdrop", "decoder.residual.dropout", 0.0),
            *fixed(attention_bias=False, lm_head_bias=False, mlp_bias=False, full_attn_mod=1, interpolate_factor=1),
        ),
        weights=(
            *renames(EMBEDDINGS, "decoder."),
            *renames(LAYER, "decoder.layers.*.", "layers.*."),
            concatenated("layers.*.self_attn.qkv_proj", "decoder.layers.*.attention.", QKV),
            concatenated("layers.*.mlp.gate_up_proj", "decoder.layers.*.feedforward.", ("gate", "up")),
            INV_FREQ,
        ),
        architectures=decoder_architectures("Phi3"),
        ignored=IGNORED,
    )
}
