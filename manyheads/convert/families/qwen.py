"""Qwen 2 and 3: Yang et al. 2024 and 2025. Biases on q, k and v alone; from 3 on, norms on queries and keys instead."""

from __future__ import annotations

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import Family
from manyheads.convert.families.llama import BIASES, IGNORED, KEYS, SHAPE, WEIGHTS, architectures, heads
from manyheads.convert.keys import Rope, Windows
from manyheads.spec import merge_trees

MROPE = Fixed("use_mrope", False)  # one position per token, as in texts
NORMS = Key("rms_norm_eps", "decoder.attention.qk_norm.eps")

FAMILIES = {
    "qwen2": Family(
        "qwen2",
        merge_trees(SHAPE, {"decoder": {"attention": {"bias": True}}}),
        keys=(*KEYS, heads(kv_heads=32)[0], Rope(), Windows(), MROPE),
        weights=WEIGHTS,
        architectures=architectures("Qwen2"),
        ignored=(*IGNORED, "seq_length"),
    ),
    "qwen3": Family(
        "qwen3",
        merge_trees(SHAPE, {"decoder": {"attention": {"qk_norm": {"kind": "rms"}}}}),
        keys=(*KEYS, *heads(kv_heads=32, size=128), Rope(), Windows(), BIASES, NORMS),
        weights=WEIGHTS,
        architectures=architectures("Qwen3"),
        ignored=IGNORED,
    ),
}
