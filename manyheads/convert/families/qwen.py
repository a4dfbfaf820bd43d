"""Qwen 2 and 3: Yang et al. 2024 and 2025. Biases on q, k and v alone; from 3 on norms on queries and keys instead."""

from __future__ import annotations

from manyheads.convert.config import Key
from manyheads.convert.families import Family
from manyheads.convert.families.llama import HEAD_SIZE, KEYS, SHAPE, SILENT, tasks, tower
from manyheads.convert.keys import Rope, Windows
from manyheads.spec import merged

BIASES = Key("attention_bias", ("decoder.attention.bias", "decoder.attention.output_bias"), False)
NORMS = Key("rms_norm_eps", "decoder.attention.query_key_norm.eps")

FAMILIES = {
    "qwen2": Family(
        "qwen2", merged(SHAPE, {"decoder": {"attention": {"bias": True}}}), (*KEYS, Rope(), Windows()), tower, tasks("Qwen2"), SILENT
    ),
    "qwen3": Family(
        "qwen3",
        merged(SHAPE, {"decoder": {"attention": {"query_key_norm": {"kind": "rms"}}}}),
        (*KEYS, HEAD_SIZE, Rope(), Windows(), BIASES, NORMS),
        tower,
        tasks("Qwen3"),
        SILENT,
    ),
}
