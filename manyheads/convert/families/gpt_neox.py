"""GPT-NeoX and Pythia: Black et al. 2022, Biderman et al. 2023. q, k and v lie side by side within each head."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import Key
from manyheads.convert.families import BARE, Family, Task
from manyheads.convert.families.gpt2 import SHAPE
from manyheads.convert.keys import Choice, Rope, activation, tying
from manyheads.convert.tables import joined, scores
from manyheads.convert.weights import Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.spec import merged


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.decoder is not None
    attention = spec.decoder.attention
    yield Same("decoder.embed.table.weight", f"{prefix}embed_in.weight")
    for i in range(spec.decoder.layers):
        ours, theirs = f"decoder.layers.{i}", f"{prefix}layers.{i}"
        yield from both(f"{ours}.residual.norms.0", f"{theirs}.input_layernorm")
        yield from both(f"{ours}.residual.norms.1", f"{theirs}.post_attention_layernorm")
        kinds = ("weight", "bias") if attention.bias else ("weight",)
        yield from joined(f"{ours}.attention", f"{theirs}.attention.query_key_value", kinds=kinds, heads=attention.heads)
        yield from both(f"{ours}.attention.output", f"{theirs}.attention.dense", bias=attention.output_bias)
        yield from both(f"{ours}.feedforward.up", f"{theirs}.mlp.dense_h_to_4h")
        yield from both(f"{ours}.feedforward.down", f"{theirs}.mlp.dense_4h_to_h")
        for buffer in ("bias", "masked_bias", "rotary_emb.inv_freq"):  # which older checkpoints hold
            yield Unused(f"{theirs}.attention.{buffer}")
    yield from both("decoder.norm", f"{prefix}final_layer_norm")


FAMILIES = {
    "gpt_neox": Family(
        "gpt_neox",
        merged(SHAPE, {"decoder": {"position": {"kind": "rope"}}}),
        keys=(
            Key("vocab_size", "vocab"),
            Key("num_hidden_layers", "decoder.layers"),
            Key("hidden_size", "decoder.width"),
            Key("num_attention_heads", "decoder.attention.heads"),
            Key("intermediate_size", "decoder.feedforward.hidden"),
            activation("hidden_act", "decoder.feedforward.activation"),
            Key("layer_norm_eps", "decoder.norm.eps"),
            Key("hidden_dropout", ("decoder.residual.dropout", "decoder.embed.dropout"), 0.0),
            Key("attention_dropout", "decoder.core.dropout", 0.0),
            Key("attention_bias", ("decoder.attention.bias", "decoder.attention.output_bias"), True),
            Choice("use_parallel_residual", "decoder.residual", ((True, {"kind": "parallel-norms"}), (False, {"kind": "pre"})), True),
            Rope(partial=0.25, share="rotary_pct", old=("rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base")),
        ),
        table=tower,
        tasks={
            "GPTNeoXForCausalLM": Task(table=scores("embed_out", "embed_in"), keys=(tying(False),), prefix="gpt_neox."),
            "GPTNeoXModel": BARE,
        },
        silent=("attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob", "is_decoder", "tie_word_embeddings"),
    )
}
