"""Qwen 2 and 3: Yang et al. 2024 and 2025. Version 2 has biases on q, k and v; version 3 has norms on q and k."""

from __future__ import annotations

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import Family, decoder_architectures
from manyheads.convert.families.llama import BASE, BIASES, IGNORED, KEYS, WEIGHTS, heads
from manyheads.convert.keys import RopeKeys, SlidingWindow
from manyheads.spec import merge_trees

MROPE = Fixed("use_mrope", False)  # each token has one position, not several as in images
NORMS = Key("rms_norm_eps", "decoder.attention.qk_norm.eps")

FAMILIES = {
    "qwen2": Family(
        "qwen2",
        merge_trees(BASE, {"decoder": {"attention": {"bias": True}}}),
        keys=(*KEYS, heads(kv_heads=32)[0], RopeKeys(), SlidingWindow(), MROPE),
        weights=WEIGHTS,
        architectures=decoder_architectures("Qwen2"),
        ignored=(*IGNORED, "seq_length"),
    ),
    "qwen3": Family(
        "qwen3",
        merge_trees(BASE, {"decoder": {"attention": {"qk_norm": {"kind": "rms"}}}}),
        keys=(*KEYS, *heads(kv_heads=32, size=128), RopeKeys(), SlidingWindow(), BIASES, NORMS),
        weights=WEIGHTS,
        architectures=decoder_architectures("Qwen3"),
        ignored=IGNORED,
    ),
}
