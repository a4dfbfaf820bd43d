"""Claims E (recurrent networks), F (blocks) and G (shapes) of the source documents; every test is named for its row.

Tolerances: float64 1e-10, float32 1e-5, unless the row says otherwise.
"""

from __future__ import annotations

import kinds
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kinds import choices, kind_id, random_model, tokens
from raising import raises
from small_attention import seeds
from small_runs import train_and_evaluate
from torch import nn
from trivial_losses import unigram_entropy

from manyheads import Inputs, build, read_model
from manyheads.parts.core import CoreSpec, register_score
from manyheads.parts.feedforward import ACTIVATIONS, GatedSpec, MlpSpec
from manyheads.parts.norm import LayerNormSpec
from manyheads.spec import SLOTS

# -------------------------------------------------------------------------------------------------- E: recurrent


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_e1_recurrent_pairs_without_attention_train_where_a_transformer_does(cell, tmp_path):
    """The data, the task and the rest of the run are the same: only the table of the model differs."""
    stack = kinds.stack(layers=1, position="sinusoidal", residual="pre", embed={"kind": "tokens", "scale": True})
    decoder = {"like": "encoder", "embed": {"kind": "shared", "scale": True}, "cross": True}
    models = {
        "transformer": {"encoder": stack, "decoder": decoder},
        cell: {"recurrent": {"width": 24, "cell": cell, "attention": False}},
    }
    data = {
        "kind": "sequence",
        "function": "copy",
        "max_length": 3,
        "symbols": 6,
        "count": 1000,
        "validation_count": 20,
    }
    for name, model in models.items():
        table = {"vocab": "tokenizer", "init": "xavier"} | model
        run, metrics = train_and_evaluate({"model": table, "data": data, "task": "seq2seq"}, tmp_path / name, steps=80)
        assert metrics["loss"] < 0.9 * unigram_entropy(run)


def test_e3_a_score_function_of_the_user_is_one_line():
    try:
        register_score("distance", lambda q, k: -torch.cdist(q, k))
        for spec in (kinds.decoder(core="distance"), kinds.recurrent(core="distance", bidirectional=False)):
            model = random_model(spec)
            out = model(tokens(), *([tokens()] if spec.recurrent else []))
            out.sum().backward()
            assert out.isfinite().all()
    finally:
        SLOTS["core"].kinds.pop("distance", None)
    assert "distance" not in CoreSpec.kinds


# ------------------------------------------------------------------------------------------------------ F: blocks


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_f1_feed_forward_is_two_matrices_and_works_on_each_position_alone(activation):
    mlp = MlpSpec(hidden=12, activation=activation).build(8)
    assert mlp.up.weight.shape == (12, 8)
    assert mlp.down.weight.shape == (8, 12)
    x = torch.randn(2, 5, 8)
    expected = ACTIVATIONS[activation](x @ mlp.up.weight.T + mlp.up.bias) @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(x), expected)
    for module in (mlp, GatedSpec(hidden=12, activation=activation).build(8)):
        changed = x.clone()
        changed[:, 3] += 1
        same = (module(x) == module(changed)).all(dim=-1)
        assert same.tolist() == [[True, True, True, False, True]] * 2


@given(width=st.integers(2, 16), seed=seeds)
def test_f4_layer_norm_and_rms_norm_are_their_formulas(width, seed):
    torch.manual_seed(seed)
    norm = LayerNormSpec(eps=1e-5).build(width).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(3, width, dtype=torch.float64)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    torch.testing.assert_close(
        norm(x), (x - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias, rtol=0, atol=1e-6
    )
    rms = SLOTS["norm"].from_config("rms").build(width).double()
    nn.init.normal_(rms.weight)
    torch.testing.assert_close(rms(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * rms.weight)


# ------------------------------------------------------------------------------------------------------- G: shapes


@pytest.mark.parametrize("attention", choices("attention"), ids=kind_id)
def test_g6_widths_may_differ(attention):
    wider = {"width": 24, "attention": {"heads": kinds.HEADS} | attention, "embed": {"size": 6}}
    narrow = {
        "width": 16,
        "attention": {"heads": kinds.HEADS} | attention,
        "embed": {"size": 10},
        "cross": True,
        "mask": {"causal": True},
    }
    spec = read_model({"vocab": 9, "encoder": wider, "decoder": narrow, "head": "bilinear"})
    model = random_model(spec)
    model(tokens(vocab=9), tokens(vocab=9)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with raises("config.incompatible", "head", "16", "10"):
        build(spec.replace(head="tied"))


def test_g6_widths_that_do_not_fit_are_an_error():
    encoder = {"width": 9, "attention": {"heads": 3}}
    decoder = {"width": 16, "attention": {"kind": "narrow", "heads": 4}, "cross": True, "mask": {"causal": True}}
    with raises("config.incompatible", "decoder.cross.attention.heads", "width 9"):
        build(read_model({"vocab": 9, "encoder": encoder, "decoder": decoder}))
    with raises("config.incompatible", "recurrent.core", "8", "16"):
        build(kinds.recurrent(width=8, core="dot", bidirectional=True))


@pytest.mark.parametrize("pool", ["first", "last", "mean", {"kind": "at", "index": 2}, {"kind": "at", "index": -2}])
def test_g7_predict_from_any_vector(pool):
    head = {"kind": "classes", "classes": 3, "pool": pool}
    model, ids = random_model(read_model({"vocab": kinds.VOCAB, "encoder": kinds.stack(), "head": head})), tokens()
    states, _ = model.last_hidden_state(Inputs(ids))
    index = {"first": 0, "last": -1}.get(pool) if isinstance(pool, str) else pool["index"]
    vector = states.mean(1) if pool == "mean" else states[:, index]
    torch.testing.assert_close(model(ids), model.head.output(vector))
    for side in ("left", "right"):
        inputs = kinds.padded(ids, (5, kinds.LENGTH), side)
        torch.testing.assert_close(model(inputs)[:1], model(ids[:1, :5]))
