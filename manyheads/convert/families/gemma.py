"""Gemma: Mesnard et al. 2024. Embeddings times √D, norms that multiply by 1 + γ, and a tied head."""

from __future__ import annotations

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import Family
from manyheads.convert.families.llama import BIASES, HEAD_SIZE, KEYS, SHAPE, SILENT, tasks, tower
from manyheads.convert.keys import Rope, read_activation, write_activation
from manyheads.spec import merged

# the first releases say "gelu" and mean the approximation by tanh
ACTIVATION = Key(
    "hidden_act", "decoder.feedforward.activation", "gelu",
    reads=lambda name: "gelu-tanh" if name == "gelu" else read_activation(name),
    writes=lambda ours: "gelu_pytorch_tanh" if ours == "gelu-tanh" else write_activation(ours),
)  # fmt: skip

FAMILIES = {
    "gemma": Family(
        "gemma",
        merged(SHAPE, {"decoder": {"embed": {"scale": True}, "norm": {"kind": "rms-one"}}}),
        (*KEYS, HEAD_SIZE, Rope(), BIASES, ACTIVATION, Fixed("use_bidirectional_attention", None)),
        tower,
        tasks("Gemma", tied=True),
        SILENT,
    )
}
