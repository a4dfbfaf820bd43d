"""Phi-3: Abdin et al. 2024. The layout of LLaMA with q, k and v in one matrix, and gate and up in another."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import Family
from manyheads.convert.families.llama import KEYS, SHAPE, SILENT, heads, tasks
from manyheads.convert.keys import Rope
from manyheads.convert.tables import joined
from manyheads.convert.weights import Joined, Row, Same, Unused
from manyheads.model.spec import ModelSpec


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.decoder is not None
    yield Same("decoder.embed.table.weight", f"{prefix}embed_tokens.weight")
    for i in range(spec.decoder.layers):
        ours, theirs = f"decoder.layers.{i}", f"{prefix}layers.{i}"
        yield from joined(f"{ours}.attention", f"{theirs}.self_attn.qkv_proj", kinds=("weight",))
        yield Same(f"{ours}.attention.output.weight", f"{theirs}.self_attn.o_proj.weight")
        yield Joined((f"{ours}.feedforward.gate.weight", f"{ours}.feedforward.up.weight"), f"{theirs}.mlp.gate_up_proj.weight")
        yield Same(f"{ours}.feedforward.down.weight", f"{theirs}.mlp.down_proj.weight")
        yield Same(f"{ours}.residual.norms.0.weight", f"{theirs}.input_layernorm.weight")
        yield Same(f"{ours}.residual.norms.1.weight", f"{theirs}.post_attention_layernorm.weight")
        yield Unused(f"{theirs}.self_attn.rotary_emb.inv_freq")
    yield Same("decoder.norm.weight", f"{prefix}norm.weight")


FAMILIES = {
    "phi3": Family(
        "phi3",
        SHAPE,
        keys=(
            *KEYS,
            heads()[0],
            Rope(partial=1.0, trained=4096, older=(("su", "longrope"), ("yarn", "longrope"))),
            Key("sliding_window", "decoder.mask.window", None),
            Key("embd_pdrop", "decoder.embed.dropout", 0.0),
            Key("resid_pdrop", "decoder.residual.dropout", 0.0),
            *(Fixed(key, False) for key in ("attention_bias", "lm_head_bias", "mlp_bias")),
            *(Fixed(key, 1) for key in ("full_attn_mod", "interpolate_factor")),
        ),
        table=tower,
        tasks=tasks("Phi3"),
        silent=SILENT,
    )
}
