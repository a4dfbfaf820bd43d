"""Gemma: Mesnard et al. 2024. Embeddings times √D, norms that multiply by 1 + γ, and a tied head."""

from __future__ import annotations

from manyheads.convert.config import Fixed
from manyheads.convert.families import Family
from manyheads.convert.families.llama import BIASES, HEAD_SIZE, KEYS, SHAPE, SILENT, tasks, tower
from manyheads.convert.keys import Rope
from manyheads.spec import merged

FAMILIES = {
    "gemma": Family(
        "gemma",
        merged(SHAPE, {"decoder": {"embed": {"scale": True}, "norm": {"kind": "rms-one"}}}),
        (*KEYS, HEAD_SIZE, Rope(), BIASES, Fixed("use_bidirectional_attention", None)),
        tower,
        tasks("Gemma", tied=True),
        SILENT,
    )
}
