"""Claims E (recurrent networks), F (blocks) and G (shapes) of the source documents; every test is named for its row.

Tolerances: float64 1e-10, float32 1e-5, unless the row says otherwise.
"""

from __future__ import annotations

import math
from functools import partial

import kinds
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from kinds import choices, kind_id, random_model, tokens
from raising import raises
from small_attention import attention_context, make_mask, positions, seeds
from small_runs import train_and_evaluate
from torch import nn
from trivial_losses import unigram_entropy

from manyheads import Inputs, build, read_model
from manyheads.model.recording import record
from manyheads.parts.attention import HeadsSpec
from manyheads.parts.core import BilinearSpec, CoreSpec, DotSpec, ProjectedSpec, register_score
from manyheads.parts.feedforward import ACTIVATIONS, GatedSpec, MlpSpec
from manyheads.parts.norm import LayerNormSpec
from manyheads.parts.residual import NoResidualSpec, PreSpec
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


def test_e2_attention_of_the_recurrent_decoder_is_a_distribution_with_exact_gradients():
    model = random_model(kinds.recurrent(width=4, core={"kind": "additive", "size": 3}))
    states = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    s = torch.randn(2, 1, 1, 4, dtype=torch.float64, requires_grad=True)

    def context(s, states):
        return model.core(
            s,
            model.core.key_transform(states[:, None]),
            states[:, None],
            mask=make_mask(1, 5),
            positions=positions(1, 5),
        )

    assert torch.autograd.gradcheck(context, (s, states))
    weights = model.core.weights(
        s, model.core.key_transform(states[:, None]), mask=make_mask(1, 5), positions=positions(1, 5)
    )
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1, 1, dtype=torch.float64))
    assert (weights > 0).all()


# with the readout of Bahdanau et al. the context must be that of the generated word, not of the next one (see LOG.md)
RNNSEARCH = {"width": 48, "core": {"kind": "additive", "size": 24}, "readout": "maxout"}


@pytest.mark.parametrize(("function", "aligned"), [("copy", lambda j: j), ("reverse", lambda j: 5 - j)])
def test_e2_it_learns_to_attend_to_the_word_it_generates(function, aligned):
    """After at most a few hundred steps with teacher forcing, the weights of output j are highest at its source word."""
    torch.manual_seed(1)
    model = build(read_model({"vocab": 14, "recurrent": RNNSEARCH, "head": "untied", "init": "xavier"}))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def batch(size):
        source = torch.stack([torch.randperm(12)[:6] for _ in range(size)])  # without repetition: one right alignment
        targets = source if function == "copy" else source.flip(-1)
        return source, targets, torch.cat((torch.full((size, 1), 13), targets[:, :-1]), dim=1)

    for _ in range(300):
        source, targets, inputs = batch(64)
        loss = F.cross_entropy(model(inputs, source).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() < 0.02:
            break
    assert loss.item() < 0.05
    source, _, inputs = batch(100)
    with torch.no_grad(), record(model.eval()) as attentions:
        model(inputs, source)
    alignment = torch.stack([attention.weights()[:, 0, 0].argmax(-1) for attention in attentions], dim=1)
    expected = torch.tensor([aligned(j) for j in range(6)])
    assert (alignment == expected).float().mean() >= 0.95


def test_e3_two_projections_are_a_bilinear_score():
    projected, bilinear = ProjectedSpec(size=3, scaled=False).build(2, 5, 4), BilinearSpec(scaled=False).build(2, 5, 4)
    with torch.no_grad():
        bilinear.weight.copy_(projected.query_weight @ projected.key_transform.weight.transpose(1, 2))
    q, k = torch.randn(1, 2, 3, 5), torch.randn(1, 2, 6, 4)
    context = {"mask": make_mask(3, 6), "positions": positions(3, 6)}
    torch.testing.assert_close(
        projected.weights(q, projected.key_transform(k), **context),
        bilinear.weights(q, k, **context),
        rtol=0,
        atol=1e-6,
    )


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


def test_f2_the_residual_is_a_sum_and_can_be_switched_off():
    x = torch.randn(2, 5, 8)
    with_it, without = (spec.build(LayerNormSpec(), 8, 1) for spec in (PreSpec(), NoResidualSpec()))
    assert torch.equal(with_it(x, [torch.sin]), x + without(x, [torch.sin]))


def test_f3_a_token_that_may_not_attend_to_itself_is_lost_without_a_residual():
    x = torch.randn(1, 4, 8, requires_grad=True)
    attention = HeadsSpec(heads=2).build(8, DotSpec())
    context = attention_context(4, 4)
    own = torch.eye(4, dtype=torch.bool)[None, None]

    def sublayer(y, *, detached):
        q, memory = attention.query(y), attention.key_value(y, context)
        bias = torch.zeros(1, 2, 4, 4).masked_fill(own, -math.inf)
        heads = attention.core(
            q.detach() if detached else q,
            memory.key,
            memory.value,
            mask=context.mask,
            positions=context.positions,
            bias=bias,
        )
        return attention.output(heads.transpose(1, 2).flatten(2))

    def own_gradient(spec, *, detached):
        residual = spec.build(SLOTS["norm"].choose("none"), 8, 1)
        (gradient,) = torch.autograd.grad(residual(x, [partial(sublayer, detached=detached)])[0, 2].sum(), x)
        return gradient[0, 2].abs().max()

    as_stated, corrected = (own_gradient(NoResidualSpec(), detached=detached) for detached in (False, True))
    assert as_stated > 0, "the row as stated is false: x still forms the query (erratum E16)"
    assert corrected == 0, "the value of the token is lost"
    assert own_gradient(PreSpec(), detached=True) > 0.5, "x itself is added"


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
    rms = SLOTS["norm"].choose("rms").build(width).double()
    nn.init.normal_(rms.weight)
    torch.testing.assert_close(rms(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * rms.weight)


def test_f4_layer_norm_is_invariant_to_scale():
    norm, x = LayerNormSpec().build(64), torch.randn(10, 64)
    assert (norm(100 * x) - norm(x)).abs().max() < 1e-3


@pytest.mark.parametrize("layers", [0, 1, 5])
def test_f7_the_number_of_layers_is_a_field_and_0_is_the_embeddings_alone(layers):
    model = random_model(kinds.decoder(layers=layers, final_norm="none"))
    assert len(model.decoder.layers) == layers
    states, _ = model.last_hidden_state(Inputs(tokens()))
    if layers == 0:
        assert torch.equal(states, model.decoder.embed.table(tokens()))


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
