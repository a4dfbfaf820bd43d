"""Gemma: Mesnard et al. 2024. Embeddings times √D, norms that multiply by 1 + γ, and a tied head."""

from __future__ import annotations

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import Family
from manyheads.convert.families.llama import BIASES, KEYS, SHAPE, SILENT, heads, tasks, tower
from manyheads.convert.keys import Choice, Rope, read_activation, write_activation
from manyheads.spec import merged

# the first releases say "gelu" and mean the approximation by tanh
ACTIVATION = Key(
    "hidden_act", "decoder.feedforward.activation", "gelu",
    reads=lambda name: "gelu-tanh" if name == "gelu" else read_activation(name),
    writes=lambda ours: "gelu_pytorch_tanh" if ours == "gelu-tanh" else write_activation(ours),
)  # fmt: skip

AGAIN = Choice("hidden_activation", "decoder.feedforward", ((None, {}), ("gelu_pytorch_tanh", {})), None)  # which some say as well

FAMILIES = {
    "gemma": Family(
        "gemma",
        merged(SHAPE, {"decoder": {"embed": {"scale": True}, "norm": {"kind": "rms-one"}}}),
        keys=(*KEYS, *heads(groups=16, size=256), Rope(), BIASES, ACTIVATION, AGAIN, Fixed("use_bidirectional_attention", None)),
        table=tower,
        tasks=tasks("Gemma", tied=True),
        silent=SILENT,
    )
}
