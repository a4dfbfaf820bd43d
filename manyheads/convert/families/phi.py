"""Phi-1 and Phi-2: Gunasekar et al. 2023. Attention and feed-forward side by side behind one norm, and a head with a bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from manyheads.convert.config import Config, ConfigRow, Key, Look, Placed
from manyheads.convert.families import BARE, Family, Task
from manyheads.convert.families.gpt2 import SHAPE
from manyheads.convert.keys import Rope, activation
from manyheads.convert.tables import scores
from manyheads.convert.weights import Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.parts.norm import NoNormSpec
from manyheads.spec import Tree, merged


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.decoder is not None
    yield Same("decoder.embed.table.weight", f"{prefix}embed_tokens.weight")
    for i in range(spec.decoder.layers):
        ours, theirs = f"decoder.layers.{i}", f"{prefix}layers.{i}"
        for part, name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "dense")):
            yield from both(f"{ours}.attention.{part}", f"{theirs}.self_attn.{name}")
        if not isinstance(spec.decoder.attention.query_key_norm, NoNormSpec):
            yield from both(f"{ours}.attention.query_norm", f"{theirs}.self_attn.q_layernorm")
            yield from both(f"{ours}.attention.key_norm", f"{theirs}.self_attn.k_layernorm")
        yield from both(f"{ours}.feedforward.up", f"{theirs}.mlp.fc1")
        yield from both(f"{ours}.feedforward.down", f"{theirs}.mlp.fc2")
        yield from both(f"{ours}.residual.norms.0", f"{theirs}.input_layernorm")
        yield Unused(f"{theirs}.self_attn.rotary_emb.inv_freq")
    yield from both("decoder.norm", f"{prefix}final_layernorm")


@dataclass(frozen=True)
class QueryKeyNorm:
    """Norms on queries and keys, where there are any, with the ε of all others."""

    keys: tuple[str, ...] = ("qk_layernorm", "layer_norm_eps")

    def read(self, config: Config) -> Placed:
        norm = {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-5)} if config.get("qk_layernorm", False) else {"kind": "none"}
        return {"decoder.attention.query_key_norm": norm}

    def write(self, look: Look) -> Tree:
        return {"qk_layernorm": look("decoder.attention.query_key_norm.kind") == "layer"}


KEYS: tuple[ConfigRow, ...] = (
    Key("vocab_size", "vocab"),
    Key("num_hidden_layers", "decoder.layers"),
    Key("hidden_size", "decoder.width"),
    Key("num_attention_heads", "decoder.attention.heads"),
    Key("num_key_value_heads", "decoder.attention.groups", None),
    Key("intermediate_size", "decoder.feedforward.hidden"),
    activation("hidden_act", "decoder.feedforward.activation"),
    Key("layer_norm_eps", "decoder.norm.eps"),
    Key("attention_dropout", "decoder.core.dropout", 0.0),
    Key("embd_pdrop", "decoder.embed.dropout", 0.0),
    Key("resid_pdrop", "decoder.residual.dropout", 0.0),
    Rope(partial=0.5),
    QueryKeyNorm(),
)

FAMILIES = {
    "phi": Family(
        "phi",
        merged(SHAPE, {"decoder": {"position": {"kind": "rope"}, "residual": {"kind": "parallel"}}}),
        keys=KEYS,
        table=tower,
        tasks={
            "PhiForCausalLM": Task(head={"kind": "free", "bias": True}, table=scores("lm_head", "embed_tokens"), prefix="model."),
            "PhiModel": BARE,
        },
        silent=("tie_word_embeddings",),
    )
}
