"""One attention on plain tensors, without a model: its mask, its positions, its context."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from manyheads.parts.attention import AttentionContext
from manyheads.parts.core import DotSpec
from manyheads.parts.mask import Mask
from manyheads.parts.position import AttentionPosition, Positions

CPU = torch.device("cpu")
seeds = st.integers(0, 10_000)


def make_mask(queries, keys, **fields):
    return Mask(queries, keys, CPU, **fields)


def positions(queries, keys):
    return Positions(torch.arange(queries)[None], torch.arange(keys)[None])


def plain(size, dtype=torch.float64):
    """softmax(q·k) v, unscaled."""
    return DotSpec(scale=1.0).build(1, size, size).to(dtype)


def attention_context(queries, keys, **mask):
    return AttentionContext(AttentionPosition(), None, make_mask(queries, keys, **mask), positions(queries, keys))


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())
