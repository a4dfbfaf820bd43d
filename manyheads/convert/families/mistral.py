"""Mistral: Jiang et al. 2023. The layout of its neighbour, with a window."""

from __future__ import annotations

from manyheads.convert.config import Key
from manyheads.convert.families import Family
from manyheads.convert.families.llama import KEYS, SHAPE, SILENT, heads, tasks, tower
from manyheads.convert.keys import Rope

WINDOW = Key("sliding_window", "decoder.mask.window", 4096)

FAMILIES = {
    "mistral": Family("mistral", SHAPE, keys=(*KEYS, *heads(groups=8), Rope(), WINDOW), table=tower, tasks=tasks("Mistral"), silent=SILENT)
}
