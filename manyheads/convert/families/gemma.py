"""Gemma: Mesnard et al. 2024. Embeddings are multiplied by √D, norms by 1 + γ, and the head is tied."""

from __future__ import annotations

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import Family, decoder_architectures
from manyheads.convert.families.llama import BASE, BIASES, IGNORED, KEYS, WEIGHTS, heads
from manyheads.convert.keys import Choice, RopeKeys, read_activation, tying, write_activation
from manyheads.spec import merge_trees

# "gelu" in the first releases means the tanh approximation
ACTIVATION = Key(
    "hidden_act", "decoder.feedforward.activation", "gelu",
    reads=lambda name: "gelu-tanh" if name == "gelu" else read_activation(name),
    writes=lambda ours: "gelu_pytorch_tanh" if ours == "gelu-tanh" else write_activation(ours),
)  # fmt: skip
# a second key for the same activation, which some configs have
HIDDEN_ACTIVATION = Choice("hidden_activation", "decoder.feedforward", ((None, {}), ("gelu_pytorch_tanh", {})), None)

FAMILIES = {
    "gemma": Family(
        "gemma",
        merge_trees(BASE, {"decoder": {"embed": {"scale": True}, "norm": {"kind": "rms-one"}}}),
        keys=(
            *KEYS,
            *heads(kv_heads=16, size=256),
            RopeKeys(),
            BIASES,
            ACTIVATION,
            HIDDEN_ACTIVATION,
            Fixed("use_bidirectional_attention", None),
        ),
        weights=WEIGHTS,
        architectures=decoder_architectures("Gemma", keys=(tying(True),)),
        ignored=IGNORED,
    )
}
