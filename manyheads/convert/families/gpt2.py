"""GPT-2: Radford et al. 2019 (and the shape of GPT-3, Brown et al. 2020). Matrices are stored in×out, with q, k and v in one."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import BARE, Family, Task
from manyheads.convert.keys import Choice, Labels, LastToken, activation
from manyheads.convert.tables import class_scores, joined, scores
from manyheads.convert.weights import Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.spec import Tree


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.decoder is not None
    yield Same("decoder.embed.table.weight", f"{prefix}wte.weight")
    yield Same("decoder.embed.position.table.weight", f"{prefix}wpe.weight")
    for i in range(spec.decoder.layers):
        ours, theirs = f"decoder.layers.{i}", f"{prefix}h.{i}"
        yield from both(f"{ours}.residual.norms.0", f"{theirs}.ln_1")
        yield from joined(f"{ours}.attention", f"{theirs}.attn.c_attn", transposed=True)
        yield from both(f"{ours}.attention.output", f"{theirs}.attn.c_proj", transposed=True)
        yield from both(f"{ours}.residual.norms.1", f"{theirs}.ln_2")
        yield from both(f"{ours}.feedforward.up", f"{theirs}.mlp.c_fc", transposed=True)
        yield from both(f"{ours}.feedforward.down", f"{theirs}.mlp.c_proj", transposed=True)
        yield Unused(f"{theirs}.attn.bias")  # the causal mask, which older checkpoints hold
        yield Unused(f"{theirs}.attn.masked_bias")
    yield from both("decoder.norm", f"{prefix}ln_f")


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
        table=tower,
        tasks={
            "GPT2LMHeadModel": Task(
                head={"kind": "tied"},
                table=scores("lm_head", "wte"),
                keys=(Fixed("tie_word_embeddings", True),),
                prefix="transformer.",
            ),
            "GPT2ForSequenceClassification": Task(
                head={"kind": "classes", "pool": "last", "bias": False},
                table=class_scores,
                keys=(Labels(), LastToken()),
                prefix="transformer.",
            ),
            "GPT2Model": BARE,
        },
        silent=(
            "is_decoder", "n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn", "summary_activation",
            "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "tie_word_embeddings",
        ),
        spellings=(((r"^transformer\.", ""),),),
    )
}  # fmt: skip
