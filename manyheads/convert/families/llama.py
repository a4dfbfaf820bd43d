"""LLaMA, all versions: Touvron et al. 2023, Dubey et al. 2024. Its layout is shared by many: rms norms, gated feed-forward, rotation."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import ConfigRow, Fixed, Key
from manyheads.convert.families import BARE, Family, Task
from manyheads.convert.keys import Labels, LastToken, Rope, activation, tying
from manyheads.convert.tables import class_scores, scores
from manyheads.convert.weights import Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.parts.feedforward import GatedSpec
from manyheads.parts.norm import NoNormSpec
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


def heads(*, groups: int | None = None, size: int | None = None) -> tuple[ConfigRow, ...]:
    """How many key heads, and how wide a head is: by default as many as there are query heads, and an equal share of the width."""
    return Key("num_key_value_heads", "decoder.attention.groups", groups), Key("head_dim", "decoder.attention.size", size)


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.decoder is not None
    attention, feedforward = spec.decoder.attention, spec.decoder.feedforward
    assert isinstance(feedforward, GatedSpec)
    yield Same("decoder.embed.table.weight", f"{prefix}embed_tokens.weight")
    for i in range(spec.decoder.layers):
        ours, theirs = f"decoder.layers.{i}", f"{prefix}layers.{i}"
        yield Same(f"{ours}.residual.norms.0.weight", f"{theirs}.input_layernorm.weight")
        for part, name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
            yield from both(f"{ours}.attention.{part}", f"{theirs}.self_attn.{name}", bias=attention.bias)
        yield from both(f"{ours}.attention.output", f"{theirs}.self_attn.o_proj", bias=attention.output_bias)
        if not isinstance(attention.query_key_norm, NoNormSpec):
            yield Same(f"{ours}.attention.query_norm.weight", f"{theirs}.self_attn.q_norm.weight")
            yield Same(f"{ours}.attention.key_norm.weight", f"{theirs}.self_attn.k_norm.weight")
        yield Same(f"{ours}.residual.norms.1.weight", f"{theirs}.post_attention_layernorm.weight")
        for part in ("gate", "up", "down"):
            yield from both(f"{ours}.feedforward.{part}", f"{theirs}.mlp.{part}_proj", bias=feedforward.bias)
        yield Unused(f"{theirs}.self_attn.rotary_emb.inv_freq")
    yield Same("decoder.norm.weight", f"{prefix}norm.weight")


def tasks(name: str, *, tied: bool = False) -> dict[str, Task]:
    """The tasks of a tower of this kind, by the names of their classes."""
    return {
        f"{name}ForCausalLM": Task(table=scores("lm_head", "embed_tokens"), keys=(tying(tied),), prefix="model."),
        f"{name}ForSequenceClassification": Task(
            head={"kind": "classes", "pool": "last", "bias": False}, table=class_scores, keys=(Labels(), LastToken()), prefix="model."
        ),
        f"{name}Model": BARE,
    }


SILENT = ("tie_word_embeddings",)
BIASES = Key("attention_bias", ("decoder.attention.bias", "decoder.attention.output_bias"), False)

FAMILIES = {
    "llama": Family(
        "llama",
        SHAPE,
        keys=(
            *KEYS,
            *heads(),
            Rope(),
            BIASES,
            Key("mlp_bias", "decoder.feedforward.bias", False),
            Fixed("pretraining_tp", 1),
            Fixed("rope_interleaved", False),
        ),
        table=tower,
        tasks=tasks("Llama"),
        silent=(*SILENT, "is_llama_config", "max_sequence_length"),
    )
}
