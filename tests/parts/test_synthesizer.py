"""What a dense Synthesizer cannot see: its scores for a token do not depend on the others."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from small_attention import positions, seeds
from torch import nn

from manyheads.parts.attention import HeadsSpec
from manyheads.parts.core import DotSpec
from manyheads.parts.synthesizer import DenseSynthesizerSpec


def gradients(core, x_LD, heads):
    """How much the scores of token i change with token j, L×L."""
    length, width = x_LD.shape
    attention = HeadsSpec(heads=heads).build(width, core).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)

    def scores(x_LD):
        x_BLD = x_LD[None]
        return attention.core.scores(attention.query(x_BLD), attention.key(x_BLD), positions(length, length))[0]

    return torch.autograd.functional.jacobian(scores, x_LD).abs().sum(dim=(0, 2, 4))


@given(length=st.integers(2, 6), heads=st.integers(1, 3), size=st.integers(1, 4), seed=seeds)
def test_i4_the_scores_of_a_token_depend_on_no_other_token(length, heads, size, seed):
    torch.manual_seed(seed)
    x, others = torch.randn(length, heads * size, dtype=torch.float64), ~torch.eye(length).bool()
    assert (gradients(DenseSynthesizerSpec(length=length), x, heads)[others] == 0).all()
    assert (gradients(DotSpec(), x, heads)[others] > 0).all(), "those of q·k do"
