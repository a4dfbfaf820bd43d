"""Claims C (many heads) and D (positions) of the source documents; every test is named for its row.

Tolerances: float64 1e-10, float32 1e-5, unless the row says otherwise.
"""

from __future__ import annotations

import kinds
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kinds import choices, random_model, tokens
from raising import raises
from small_attention import attention_context, count, positions, seeds
from torch import nn

from manyheads import build, read_model
from manyheads.parts.attention import HeadsSpec
from manyheads.parts.core import DotSpec
from manyheads.parts.norm import NoNormSpec
from manyheads.parts.position import ClippedSpec, LearnedSpec, Positions, SinusoidalSpec
from manyheads.parts.rope import RopeSpec
from manyheads.spec import SLOTS

# ------------------------------------------------------------------------------------------------- C: many heads


@given(heads=st.integers(1, 4), size=st.integers(1, 5), seed=seeds)
def test_c1_split_heads_are_torch_multi_head_attention(heads, size, seed):
    torch.manual_seed(seed)
    width = heads * size
    ours, theirs = HeadsSpec(heads=heads).build(width, DotSpec()), nn.MultiheadAttention(width, heads, batch_first=True)
    assert count(ours) == 4 * width**2 + 4 * width == count(theirs)
    with torch.no_grad():
        nn.init.normal_(theirs.in_proj_bias)
        for part, weight, bias in zip(
            (ours.query, ours.key, ours.value),
            theirs.in_proj_weight.chunk(3),
            theirs.in_proj_bias.chunk(3),
            strict=True,
        ):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
        ours.output.load_state_dict(theirs.out_proj.state_dict())
    x, memory, context = torch.randn(2, 4, width), torch.randn(2, 6, width), attention_context(4, 6)
    expected, _ = theirs(x, memory, memory)
    torch.testing.assert_close(ours(x, ours.key_value(memory, context), context), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", SLOTS["residual"].kinds)
def test_c4_dropout_of_every_residual_kind_keeps_the_mean_in_training(kind):
    """Without norms, so that a mean can be computed: x is 1 and every sublayer gives 1."""
    residual = SLOTS["residual"].from_config({"kind": kind, "dropout": 0.1}).build(NoNormSpec(), 8, 2)
    x, sublayers = torch.ones(1, 4, 8), [torch.ones_like] * 2
    steady = residual.eval()(x, sublayers)
    assert torch.equal(steady, (1 if kind == "none" else 3) * x)
    residual.train()
    outputs = torch.stack([residual(x, sublayers) for _ in range(3000)])
    assert outputs.std(0).min() > 0.1, "something is dropped"
    torch.testing.assert_close(outputs.mean((0, 1, 2, 3)), steady.mean(), rtol=0.02, atol=0)


def test_c5_heads_that_do_not_divide_the_width_are_an_error_with_the_nearest_that_do():
    with raises("config.incompatible", "encoder.attention.heads", "width 64", "8 or 16 heads", "width 60 or 70"):
        read_model({"vocab": 5, "encoder": {"width": 64, "attention": {"heads": 10}}})
    with raises("config.incompatible", "decoder.attention.kv_heads", "3 key heads", "4 query heads"):
        read_model({"vocab": 5, "decoder": {"width": 64, "attention": {"heads": 4, "kv_heads": 3}}})


# --------------------------------------------------------------------------------------------------- D: positions


@given(
    length=st.integers(2, 9),
    seed=seeds,
    core=st.sampled_from([c for c in choices("core") if SLOTS["core"].kinds[c["kind"]].key_source != "none"]),
)
def test_d1_without_position_and_mask_the_model_is_equivariant_to_order(length, seed, core):
    model = random_model(kinds.encoder(core=core), torch.float64, seed=seed)
    ids, order = tokens(1, length, seed=seed), torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(model(ids[:, order]), model(ids)[:, order], rtol=1e-5, atol=1e-5)


def test_d3_the_layout_in_halves_has_the_same_columns_in_another_order():
    """Their formula is checked in tests/parts/test_formulas.py."""
    table = sinusoids(8, 50)
    halves = sinusoids(8, 50, layout="halves")
    torch.testing.assert_close(halves, torch.cat((table[:, ::2], table[:, 1::2]), dim=-1))


def sinusoids(width, length, **options):
    return SinusoidalSpec(**options).build_embed(width).table(torch.arange(length)[None], torch.float64)[0]


@given(length=st.integers(1, 20), width=st.integers(1, 8))
def test_d9_learned_positions_have_t_rows_and_a_later_position_is_an_error(length, width):
    embed = LearnedSpec(length=length).build_embed(width)
    assert count(embed) == length * width
    embed(torch.zeros(1, length, width), positions(length, length))
    with raises("input.length", f"position {length} ", f"of {length} positions"):
        embed(torch.zeros(1, length + 1, width), positions(length + 1, length + 1))


@given(length=st.integers(1, 20), heads=st.integers(1, 6), layers=st.integers(1, 3))
def test_d10_relative_biases_are_two_t_minus_one_per_head_and_layer(length, heads, layers):
    stack = {"layers": layers, "width": 2 * heads, "attention": {"heads": heads}}
    relative = {"kind": "relative", "length": length}
    model = build(read_model({"vocab": 5, "decoder": stack | {"position": relative}}))
    assert sum(count(layer.position) for layer in model.decoder.layers) == layers * (2 * (length - 1) + 1) * heads
    position = model.decoder.layers[0].position
    bias = position.precompute(positions(length, length), torch.float32)[0]
    for offset in range(1 - length, length):
        shared = position.table.weight[offset + length - 1]
        assert (bias.diagonal(offset, dim1=1, dim2=2) == shared[:, None]).all()
    with raises("input.length", f"offset of {length} ", f"ends at {length - 1}"):
        position.precompute(positions(length + 1, length + 1), torch.float32)


@given(clip=st.integers(1, 8), heads=st.integers(1, 4), length=st.integers(1, 40))
def test_d11_clipped_biases_share_their_ends_at_any_length(clip, heads, length):
    position = ClippedSpec(clip=clip).build(heads, 4)
    assert count(position) == (2 * clip + 1) * heads
    bias = position.precompute(positions(length, length), torch.float32)[0]
    for offset in range(1 - length, length):
        shared = position.table.weight[max(-clip, min(clip, offset)) + clip]
        assert (bias.diagonal(offset, dim1=1, dim2=2) == shared[:, None]).all()


@given(
    m=st.integers(0, 500),
    n=st.integers(0, 500),
    shift=st.integers(1, 500),
    layout=st.sampled_from(["halves", "interleaved"]),
    fraction=st.sampled_from([1.0, 0.5, 0.25]),
)
def test_d14_rotation_depends_on_the_offset_alone_and_preserves_norms(m, n, shift, layout, fraction):
    rope = RopeSpec(layout=layout, fraction=fraction).build(1, 16)
    assert count(rope) == 0
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def rotated(x, position):
        index = torch.tensor([[position]])
        return rope.rotate(x, rope.precompute(Positions(index, index), torch.float64))

    product = (rotated(q, m) * rotated(k, n)).sum()
    torch.testing.assert_close((rotated(q, m + shift) * rotated(k, n + shift)).sum(), product, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rotated(q, m).norm(), q.norm())
    size = int(16 * fraction)
    assert torch.equal(rotated(q, m)[..., size:], q[..., size:])


def test_d14_the_two_layouts_are_one_rotation_of_reordered_coordinates():
    q = torch.randn(1, 1, 9, 8, dtype=torch.float64)
    index = positions(9, 9)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    halves, interleaved = (RopeSpec(layout=layout).build(1, 8) for layout in ("halves", "interleaved"))
    rotated = interleaved.rotate(q[..., order], interleaved.precompute(index, torch.float64))
    torch.testing.assert_close(rotated, halves.rotate(q, halves.precompute(index, torch.float64))[..., order])
