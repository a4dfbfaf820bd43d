"""GPT-2: Radford et al. 2019 (and the shape of GPT-3, Brown et al. 2020). Matrices are stored in×out, with q, k and v in one."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import Family, Task
from manyheads.convert.keys import Choice, Labels, LastToken, activation
from manyheads.convert.weights import Joined, Repeated, Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.spec import Tree


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.decoder is not None
    yield Same("decoder.embed.table.weight", f"{prefix}wte.weight")
    yield Same("decoder.embed.position.table.weight", f"{prefix}wpe.weight")
    for i in range(spec.decoder.layers):
        ours, theirs = f"decoder.layers.{i}", f"{prefix}h.{i}"
        yield from both(f"{ours}.residual.norms.0", f"{theirs}.ln_1")
        for kind in ("weight", "bias"):
            parts = tuple(f"{ours}.attention.{part}.{kind}" for part in ("query", "key", "value"))
            yield Joined(parts, f"{theirs}.attn.c_attn.{kind}", transposed=kind == "weight")
        yield from both(f"{ours}.attention.output", f"{theirs}.attn.c_proj", transposed=True)
        yield from both(f"{ours}.residual.norms.1", f"{theirs}.ln_2")
        yield from both(f"{ours}.feedforward.up", f"{theirs}.mlp.c_fc", transposed=True)
        yield from both(f"{ours}.feedforward.down", f"{theirs}.mlp.c_proj", transposed=True)
        yield Unused(f"{theirs}.attn.bias")  # the causal mask, which older checkpoints hold
        yield Unused(f"{theirs}.attn.masked_bias")
    yield from both("decoder.norm", f"{prefix}ln_f")


def next_tokens(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield Repeated("lm_head.weight", same_as=f"{prefix}wte.weight")


def classes(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield Same("head.output.weight", "score.weight")


def bare(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from ()


SHAPE: Tree = {
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

FAMILIES = {
    "gpt2": Family(
        "gpt2",
        SHAPE,
        (
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
        tower,
        {
            "GPT2LMHeadModel": Task({"kind": "tied"}, next_tokens, (Fixed("tie_word_embeddings", True),), "transformer."),
            "GPT2ForSequenceClassification": Task(
                {"kind": "classes", "pool": "last", "bias": False}, classes, (Labels(), LastToken()), "transformer."
            ),
            "GPT2Model": Task({"kind": "none"}, bare, (), ""),
        },
        (
            "is_decoder", "n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn", "summary_activation",
            "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "tie_word_embeddings",
        ),
        spellings=(((r"^transformer\.", ""),),),
    )
}  # fmt: skip
