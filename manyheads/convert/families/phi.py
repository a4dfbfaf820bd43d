"""Phi-1 and Phi-2: Gunasekar et al. 2023. Parallel attention and MLP after one norm, and a head with a bias."""

from __future__ import annotations

from manyheads.convert.config import Config, ConfigRow, Fields, GetField, Key
from manyheads.convert.families import Family, decoder_architectures
from manyheads.convert.families.llama import INV_FREQ
from manyheads.convert.keys import RopeKeys, activation
from manyheads.convert.weights import renames
from manyheads.spec import Tree


class QueryKeyNorm:
    """Whether queries and keys have norms, whose ε is that of the other norms."""

    keys = ("qk_layernorm", "layer_norm_eps")

    def read(self, config: Config) -> Fields:
        norm = {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-5)}
        return {"decoder.attention.qk_norm": norm if config.get("qk_layernorm", False) else {"kind": "none"}}

    def write(self, get: GetField) -> Tree:
        return {"qk_layernorm": get("decoder.attention.qk_norm.kind") == "layer"}


KEYS: tuple[ConfigRow, ...] = (
    Key("vocab_size", "vocab"),
    Key("num_hidden_layers", "decoder.layers"),
    Key("hidden_size", "decoder.width"),
    Key("num_attention_heads", "decoder.attention.heads"),
    Key("num_key_value_heads", "decoder.attention.kv_heads", None),
    Key("intermediate_size", "decoder.feedforward.hidden"),
    activation("hidden_act", "decoder.feedforward.activation"),
    Key("layer_norm_eps", "decoder.norm.eps"),
    Key("attention_dropout", "decoder.core.dropout", 0.0),
    Key("embd_pdrop", "decoder.embed.dropout", 0.0),
    Key("resid_pdrop", "decoder.residual.dropout", 0.0),
    RopeKeys(default_fraction=0.5),
    QueryKeyNorm(),
)
QUERY_KEY_NORMS = {"attention.query_norm": "self_attn.q_layernorm", "attention.key_norm": "self_attn.k_layernorm"}
LAYER = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.dense",
    "feedforward.up": "mlp.fc1",
    "feedforward.down": "mlp.fc2",
    "residual.norms.0": "input_layernorm",
}

FAMILIES = (
    Family(
        "phi",
        {"decoder": {"position": {"kind": "rope"}, "residual": {"kind": "parallel"}}},
        keys=KEYS,
        weights=(
            *renames({"decoder.embed.table": "embed_tokens", "decoder.norm": "final_layernorm"}),
            *renames(LAYER, "decoder.layers.*.", "layers.*."),
            *renames(QUERY_KEY_NORMS, "decoder.layers.*.", "layers.*.", optional=True),
            INV_FREQ,
        ),
        architectures=decoder_architectures("Phi", head={"kind": "untied", "bias": True}, keys=()),
        ignored_keys=("tie_word_embeddings",),
    ),
)
