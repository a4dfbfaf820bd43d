"""Mistral: Jiang et al. 2023. LLaMA's layers with windowed attention."""

from __future__ import annotations

from manyheads.convert.config import Key
from manyheads.convert.families import Family, decoder_architectures
from manyheads.convert.families.llama import BASE, IGNORED, KEYS, WEIGHTS, heads
from manyheads.convert.keys import RopeKeys

WINDOW = Key("sliding_window", "decoder.mask.window", 4096)

FAMILIES = {
    "mistral": Family(
        "mistral",
        BASE,
        keys=(*KEYS, *heads(kv_heads=8), RopeKeys(), WINDOW),
        weights=WEIGHTS,
        architectures=decoder_architectures("Mistral"),
        ignored=IGNORED,
    )
}
