"""Activations by the names their configs use."""

from __future__ import annotations

from manyheads.spec import nearest

THEIRS = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "quick_gelu": "gelu-quick",
    "relu": "relu",
    "relu2": "relu-squared",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def activation(name: str) -> str:
    if name not in THEIRS:
        raise ValueError(f"no activation '{name}'{nearest(name, THEIRS)}")
    return THEIRS[name]
