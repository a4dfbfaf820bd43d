"""Every part against its formula, written out here: test_invariants.py checks that parts are consistent, this file what they
compute.

Every kind of every slot must be listed with `formula`; a new kind that is not fails test_every_kind_has_a_formula.
"""

from __future__ import annotations

import itertools
import math

import kinds
import pytest
import torch
from kinds import random_model, tokens
from raising import raises

from manyheads import Inputs, build, read_model, record
from manyheads.model.builder import build_meta
from manyheads.parts.core import CoreSpec, DotSpec
from manyheads.parts.feedforward import ACTIVATIONS
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions
from manyheads.parts.rope import NtkScalingSpec
from manyheads.spec import SLOTS

FLOAT64 = {"dtype": torch.float64}
CHECKED: dict[str, set[str]] = {}


def formula(slot, *kinds_):
    """Marks a test that checks the formula of some kinds."""
    CHECKED.setdefault(slot, set()).update(kinds_)
    return lambda test: test


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def positions(queries, keys):
    return Positions(torch.arange(queries)[None], torch.arange(keys)[None])


def randomize(module):
    for parameter in module.requires_grad_(False).parameters():
        torch.nn.init.normal_(parameter)
    return module.double().eval()


# ---------------------------------------------------------------------------------------------------------- masks


def may_attend(i, j, *, causal, window, prefix, pad, document_ids, non_padding_indices):
    """Whether query i may attend to key j, by the definition of each field."""
    if pad[j] or document_ids[i] != document_ids[j]:
        return False
    if prefix is not None and non_padding_indices[j] < prefix:
        return True
    return (not causal or j <= i) and (window is None or abs(non_padding_indices[i] - non_padding_indices[j]) < window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("prefix", [None, 2])
@pytest.mark.parametrize("pad", ["", "left", "right", "middle"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_lets_through_what_its_fields_define(causal, window, prefix, pad, packed):
    if prefix is not None and not (causal or window):
        return
    mask = {"causal": causal, "prefix": prefix is not None} | ({"window": window} if window else {})
    model, length = build(read_model({"vocab": 9, "decoder": kinds.stack(mask=mask)})), 8
    padded = [index in {"": (), "left": (0, 1), "right": (6, 7), "middle": (3, 4)}[pad] for index in range(length)]
    document_ids = [int(packed and index > 3) for index in range(length)]
    non_padding_indices = [sum(not p for p in padded[: index + 1]) - 1 for index in range(length)]
    with record(model) as attentions:
        model(
            Inputs(
                tokens(1, length, vocab=9),
                padding_mask=torch.tensor([padded]) if pad else None,
                document_ids=torch.tensor([document_ids]) if packed else None,
                prefix_lengths=None if prefix is None else torch.tensor([prefix]),
            )
        )
    fields = {"causal": causal, "window": window, "prefix": prefix, "pad": padded, "document_ids": document_ids}
    expected = [
        [may_attend(i, j, **fields, non_padding_indices=non_padding_indices) for j in range(length)]
        for i in range(length)
    ]
    assert (attentions[0].weights()[0, 0] > 0).tolist() == expected


# ---------------------------------------------------------------------------------------------------------- cores


def core_weights(spec, queries=5, keys=7, query_size=4, key_size=4):
    core = randomize(spec.build(2, query_size, key_size))
    q, k = torch.randn(1, 2, queries, query_size, **FLOAT64), torch.randn(1, 2, keys, key_size, **FLOAT64)
    weights = core.weights(
        q, core.key_transform(k), mask=Mask(queries, keys, q.device), positions=positions(queries, keys)
    )
    return core, q[0], k[0], weights[0]


def softmax_rows(score, queries, keys):
    """softmax over the keys of score(h, i, j), one number at a time."""
    table = torch.tensor([[[score(h, i, j) for j in range(keys)] for i in range(queries)] for h in range(2)], **FLOAT64)
    return torch.softmax(table, dim=-1)


@formula("core", "dot")
@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 3.0}, {"scale": 0.7}, {"softcap": 2.0}, {"softcap": 1.5, "temperature": 0.5}]
)
def test_dot_is_its_formula(fields):
    _, q, k, weights = core_weights(CoreSpec.from_config({"kind": "dot", **fields}))

    def score(h, i, j):
        s = float(q[h, i] @ k[h, j]) * fields.get("scale", 1 / 2) / fields.get("temperature", 1.0)
        return fields["softcap"] * math.tanh(s / fields["softcap"]) if "softcap" in fields else s

    close(weights, softmax_rows(score, 5, 7))


@formula("core", "bilinear", "projected", "additive")
@pytest.mark.parametrize("scaled", [True, False])
def test_bilinear_projected_and_additive_scores_are_their_formulas(scaled):
    core, q, k, weights = core_weights(
        CoreSpec.from_config({"kind": "bilinear", "scaled": scaled}), query_size=3, key_size=4
    )
    close(weights, softmax_rows(lambda h, i, j: float(q[h, i] @ core.weight[h] @ k[h, j]) / (2 if scaled else 1), 5, 7))
    core, q, k, weights = core_weights(
        CoreSpec.from_config({"kind": "projected", "size": 9, "scaled": scaled}), query_size=3, key_size=4
    )

    def score(h, i, j):
        return float((q[h, i] @ core.query_weight[h]) @ (k[h, j] @ core.key_transform.weight[h])) / (3 if scaled else 1)

    close(weights, softmax_rows(score, 5, 7))
    core, q, k, weights = core_weights(CoreSpec.from_config({"kind": "additive", "size": 6}), query_size=3, key_size=4)
    hidden = lambda h, i, j: torch.tanh(q[h, i] @ core.query_weight[h] + k[h, j] @ core.key_transform.weight[h])  # noqa: E731
    close(weights, softmax_rows(lambda h, i, j: float(core.score_weight[h, :, 0] @ hidden(h, i, j)), 5, 7))


@formula("core", "merged-qk", "argmax", "synthesizer-dense", "synthesizer-random")
def test_fused_argmax_dense_and_random_cores_are_their_formulas():
    _, q, k, weights = core_weights(CoreSpec.from_config("merged-qk"))
    close(weights, softmax_rows(lambda h, i, j: float(q[h, i] @ k[h, j]), 5, 7))
    _, q, k, weights = core_weights(CoreSpec.from_config("argmax"))
    close(weights, torch.nn.functional.one_hot((q @ k.transpose(1, 2)).argmax(-1), 7).double())
    core, q, _, weights = core_weights(CoreSpec.from_config({"kind": "synthesizer-dense", "length": 9}), key_size=0)
    score = lambda h, i, j: float(torch.relu(q[h, i]) @ core.weight[h, :, j] + core.bias[h, 0, j])  # noqa: E731
    close(weights, softmax_rows(score, 5, 7))
    core, _, _, weights = core_weights(
        CoreSpec.from_config({"kind": "synthesizer-random", "length": 9}), query_size=0, key_size=0
    )
    close(weights, softmax_rows(lambda h, i, j: float(core.table[h, i, j]), 5, 7))


@formula("core", "convolution")
@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_a_convolution_is_a_normalized_kernel_over_the_neighbours(kernel):
    core, _, _, weights = core_weights(
        CoreSpec.from_config({"kind": "convolution", "kernel": kernel}), query_size=0, key_size=0
    )

    def score(h, i, j):
        return float(core.table[h, j - i + kernel - 1]) if abs(i - j) < kernel else -math.inf

    close(weights, softmax_rows(score, 5, 7))
    q, k = torch.empty(1, 2, 9, 0, **FLOAT64), torch.empty(1, 2, 2, 0, **FLOAT64)
    far = core.weights(q, k, mask=Mask(9, 2, q.device), positions=positions(9, 2))
    close(far[0, :, 8], torch.tensor([[0.0, 1.0]] * 2, **FLOAT64))  # no neighbour: the nearest key instead


# ------------------------------------------------------------------------------------------------------ positions


@formula("position", "none", "sinusoidal", "learned")
@pytest.mark.parametrize("theta", [10000.0, 100.0])
@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
@pytest.mark.parametrize("join", ["add", "concat", "multiply"])
def test_sinusoids_and_learned_positions_join_the_embedding_by_their_formulas(kind, join, theta):
    """Claim D3: the formula of the sinusoids; and how a position vector p joins x."""
    fields = {"length": 9, "offset": 2} if kind == "learned" else {"theta": theta}
    spec = SLOTS["position"].from_config({"kind": kind, "join": join} | fields)
    embedding = randomize(spec.build_embed(8))
    x, index = torch.randn(1, 5, spec.token_width(8), **FLOAT64), torch.tensor([[0, 3, 1, 7, 2]])
    width = 4 if join == "concat" else 8
    if kind == "learned":
        p = embedding.table.weight[index[0] + 2]
    else:
        angle = lambda t, i: t / theta ** ((i - i % 2) / width)  # noqa: E731
        p = torch.tensor(
            [[(math.cos if i % 2 else math.sin)(angle(t, i)) for i in range(width)] for t in index[0].tolist()],
            **FLOAT64,
        )
    expected = x[0] + p if join == "add" else torch.cat((x[0], p), -1) if join == "concat" else x[0] * p
    close(embedding(x, Positions(index, index))[0], expected)


def bias_of(position, queries=6, keys=6, heads=2, size=4, scale=0.5):
    spec = SLOTS["position"].from_config(position)
    module = randomize(spec.build(heads, size))
    q = torch.randn(1, heads, queries, size, **FLOAT64)
    bias = module.bias(q, module.precompute(positions(queries, keys), torch.float64), scale)
    return module, q[0], bias.expand(1, -1, -1, -1)[0]


formula("position", "relative", "clipped")  # claims D10 and D11 in tests/labs


@formula("position", "shaw", "alibi")
def test_position_biases_are_their_formulas():
    cells = list(itertools.product(range(2), range(6), range(6)))
    module, q, bias = bias_of({"kind": "shaw", "clip": 2}, scale=0.3)
    for h, i, j in cells:
        close(bias[h, i, j], 0.3 * q[h, i] @ module.table.weight[max(-2, min(2, j - i)) + 2])
    _, _, bias = bias_of("alibi")
    assert all(bias[h, i, j] == -(2.0 ** (-4 * (h + 1))) * abs(i - j) for h, i, j in cells)


@pytest.mark.parametrize(("heads", "slopes"), [(8, range(1, 9)), (12, [*range(1, 9), 0.5, 1.5, 2.5, 3.5])])
def test_alibi_slopes_are_those_published(heads, slopes):
    """As published: 2^−1 … 2^−8 for 8 heads, and every other slope of 16 heads for 4 more."""
    _, _, bias = bias_of("alibi", queries=2, keys=2, heads=heads)
    close(-bias[:, 0, 1], torch.tensor([2.0**-h for h in slopes], **FLOAT64))


def t5_bucket(offset, buckets, distance, *, bidirectional):
    """Raffel et al. 2020, section 2.1, in integers: bucket b has the distances d with (d/e)^(n−e) from (D/e)^(b−e) on.

    n buckets per direction, the first e = n/2 of one distance each, and all distances from D on in the last.
    """
    n = buckets // 2 if bidirectional else buckets
    d, e = abs(offset) if bidirectional else max(-offset, 0), n // 2
    b = d if d < e else max(b for b in range(e, n) if d ** (n - e) * e ** (b - e) >= distance ** (b - e) * e ** (n - e))
    return b + (n if bidirectional and offset > 0 else 0)


@formula("position", "bucketed")
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (32, 100), (8, 16), (8, 6), (5, 7)])
def test_bucketed_positions_are_those_of_t5_also_beyond_the_maximum_distance(buckets, distance, bidirectional):
    fields = {"buckets": buckets, "max_distance": distance, "bidirectional": bidirectional}
    spec = SLOTS["position"].from_config({"kind": "bucketed", **fields})
    module, offsets = randomize(spec.build(2, 4)), range(-5 * distance, 5 * distance + 1)
    expected = [t5_bucket(offset, buckets, distance, bidirectional=bidirectional) for offset in offsets]
    per_direction = buckets // 2 if bidirectional else buckets
    assert expected[0] == per_direction - 1, "the last bucket holds every distance from the maximum on"
    assert expected.count(per_direction - 1) > 4 * distance
    assert expected[-1] == (2 * per_direction - 1 if bidirectional else 0)
    one_query = Positions(torch.tensor([[0]]), torch.tensor([list(offsets)]))
    bias = module.precompute(one_query, torch.float64)
    assert torch.equal(bias[0, :, 0], module.table.weight[expected].T)
    from transformers.models.t5.modeling_t5 import T5Attention

    theirs = T5Attention._relative_position_bucket(torch.tensor(offsets), bidirectional, buckets, distance)
    assert theirs.tolist() == expected


def banded(w, factor=4.0, trained=30, low=1.0, high=4.0):
    """ω for wavelengths below T/high, ω/s above T/low, between them a blend by the rotations within T."""
    wavelength = 2 * math.pi / w
    if wavelength < trained / high:
        return w
    if wavelength > trained / low:
        return w / factor
    ramp = (trained / wavelength - low) / (high - low)
    return ramp * w + (1 - ramp) * w / factor


def yarn(i, w, factor=4.0, trained=300, fast=32.0, slow=1.0):
    """ω for pairs with more than `fast` rotations within T, ω/s below `slow`, a ramp over the pairs between."""
    pair = lambda rotations: 8 * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(10000))  # noqa: E731
    first, last = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), 7)
    ramp = min(max((i - first) / (last - first), 0.0), 1.0)
    return ramp * w / factor + (1 - ramp) * w


def test_attention_scalings_of_scaled_rope_are_their_formulas():
    of = lambda **fields: SLOTS["scaling"].from_config(fields).attention_scaling()  # noqa: E731
    assert of(kind="yarn", factor=4.0) == pytest.approx(0.1 * math.log(4) + 1)
    assert of(kind="yarn", factor=4.0, attention_factor=1.7) == 1.7
    assert of(kind="longrope", length=100, factor=8.0) == pytest.approx(math.sqrt(1 + math.log(8) / math.log(100)))
    assert {of(kind=kind) for kind in ("none", "linear", "ntk", "dynamic", "banded")} == {1.0}


LONGROPE = {"kind": "longrope", "attention_factor": 1.0}


@formula("position", "rope")
@formula("scaling", "none", "linear", "ntk", "dynamic", "yarn", "banded", "longrope")
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize(
    ("scaling", "frequency"),
    [
        ({"kind": "none"}, lambda i, w: w),
        ({"kind": "linear", "factor": 4.0}, lambda i, w: w / 4),
        ({"kind": "ntk", "factor": 4.0}, lambda i, w: (10000 * 4 ** (8 / 6)) ** (-2 * i / 8)),
        (
            {"kind": "dynamic", "factor": 4.1, "length": 5},
            lambda i, w: (10000 * (4.1 * 6 / 5 - 3.1) ** (8 / 6)) ** (-2 * i / 8),
        ),
        ({"kind": "banded", "factor": 4.0, "length": 30}, lambda i, w: banded(w)),
        ({"kind": "yarn", "factor": 4.0, "length": 300, "attention_factor": 1.0}, lambda i, w: yarn(i, w)),
        (
            {**LONGROPE, "short_factor": [1.0], "long_factor": [2.0, 3.0, 4.0, 5.0], "length": 3},
            lambda i, w: w / (2 + i),
        ),
        ({**LONGROPE, "short_factor": [7.0], "long_factor": [2.0], "length": 9}, lambda i, w: w / 7),
    ],
)
def test_rope_rotates_each_pair_by_position_times_frequency(layout, scaling, frequency):
    rope = SLOTS["position"].from_config({"kind": "rope", "layout": layout, "scaling": scaling}).build(1, 8)
    x = torch.randn(1, 1, 6, 8, **FLOAT64)
    rotated = rope.rotate(x, rope.precompute(positions(6, 6), torch.float64))
    for t, i in itertools.product(range(6), range(4)):
        angle = t * frequency(i, 10000 ** (-2 * i / 8))
        a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + 4)
        close(rotated[0, 0, t, a], x[0, 0, t, a] * math.cos(angle) - x[0, 0, t, b] * math.sin(angle))
        close(rotated[0, 0, t, b], x[0, 0, t, b] * math.cos(angle) + x[0, 0, t, a] * math.sin(angle))


# ------------------------------------------------------------------------------------------------- parts of a layer


@formula("residual", "pre", "post", "sandwich", "parallel", "parallel-norms", "none")
def test_residual_connections_are_their_formulas():
    x, f, g = torch.randn(1, 3, 4, **FLOAT64), torch.sin, torch.cos
    norm = SLOTS["norm"].from_config("layer")
    built = {kind: randomize(SLOTS["residual"].from_config(kind).build(norm, 4, 2)) for kind in SLOTS["residual"].kinds}
    n = {kind: list(module.norms) for kind, module in built.items()}
    pre = x + f(n["pre"][0](x))
    post = n["post"][0](x + f(x))
    sandwich = x + n["sandwich"][1](f(n["sandwich"][0](x)))
    expected = {
        "pre": pre + g(n["pre"][1](pre)),
        "post": n["post"][1](post + g(post)),
        "sandwich": sandwich + n["sandwich"][3](g(n["sandwich"][2](sandwich))),
        "parallel": x + f(n["parallel"][0](x)) + g(n["parallel"][0](x)),
        "parallel-norms": x + f(n["parallel-norms"][0](x)) + g(n["parallel-norms"][1](x)),
        "none": g(n["none"][1](f(n["none"][0](x)))),
    }
    for kind, value in expected.items():
        close(built[kind](x, [f, g]), value)


@pytest.mark.parametrize("kind", SLOTS["residual"].kinds)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_residual_dropout_divides_the_rest_by_one_minus_p(kind, p):
    """Srivastava et al. 2014, section 10: an entry of a sublayer's output is 0 with probability p, or is over 1 − p."""
    module = (
        SLOTS["residual"]
        .from_config({"kind": kind, "dropout": p})
        .build(SLOTS["norm"].from_config("none"), 50, 1)
        .train()
    )
    x, count = torch.zeros(4, 50, 50, **FLOAT64), 10_000
    output = torch.rand(x.shape, **FLOAT64) + 1
    result = module(x, [lambda _: output])  # without a norm and with x = 0, the output after dropout alone
    nonzero = result != 0
    close(result[nonzero], output[nonzero] / (1 - p))
    assert abs(float(nonzero.double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / count)
    assert torch.equal(module.eval()(x, [lambda _: output]), output)


formula("norm", "layer", "rms")  # claim F4 in tests/labs
formula("feedforward", "mlp")  # claim F1


@formula("norm", "rms-one", "none")
@formula("feedforward", "gated")
def test_norms_and_feed_forward_networks_are_their_formulas():
    x = torch.randn(5, 6, **FLOAT64)
    rms_one, none = (randomize(SLOTS["norm"].from_config(kind).build(6)) for kind in ("rms-one", "none"))
    close(rms_one(x), x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (1 + rms_one.weight))
    assert torch.equal(none(x), x)
    gated = randomize(SLOTS["feedforward"].from_config({"kind": "gated", "hidden": 9, "bias": True}).build(6))
    gate = x @ gated.gate.weight.T + gated.gate.bias
    close(
        gated(x),
        (gate * torch.sigmoid(gate) * (x @ gated.up.weight.T + gated.up.bias)) @ gated.down.weight.T + gated.down.bias,
    )
    assert SLOTS["feedforward"].from_config("mlp").build(6).up.out_features == 24
    assert SLOTS["feedforward"].from_config("gated").build(6).up.out_features == 16


def test_activations_are_their_formulas():
    x = torch.linspace(-4, 4, 41, **FLOAT64)
    phi = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    expected = {
        "relu": x.clamp(min=0),
        "gelu": x * phi,
        "gelu-tanh": 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "gelu-quick": x / (1 + torch.exp(-1.702 * x)),
        "silu": x / (1 + torch.exp(-x)),
        "relu-squared": x.clamp(min=0) ** 2,
        "tanh": torch.tanh(x),
        "sigmoid": 1 / (1 + torch.exp(-x)),
        "identity": x,
    }
    assert set(expected) == set(ACTIVATIONS)
    for name, value in expected.items():
        close(ACTIVATIONS[name](x), value)


# -------------------------------------------------------------------------------------------------- heads and pools


@formula("head", "none", "tied", "untied", "bilinear", "masked", "classes", "vector", "pixels")
@formula("pool", "first", "last", "mean", "at")
def test_heads_and_pools_are_their_formulas():
    def head(**fields):
        model = random_model(read_model({"vocab": 9, "encoder": kinds.stack(layers=1), "head": fields}))
        h, _ = model.last_hidden_state(tokens(vocab=9))
        return model.head, h, model.table, model(tokens(vocab=9))

    own, h, e, out = head(kind="tied", bias=True, logit_scale="inverse-sqrt")
    close(out, h @ e.T / 4 + own.bias)
    own, h, _, out = head(kind="untied", bias=True)
    close(out, h @ own.output.weight.T + own.bias)
    own, h, e, out = head(kind="bilinear", logit_scale="inverse-sqrt", learn_logit_scale=True)
    close(out, own.beta * (h @ own.project.weight.T @ e.T))
    own, h, e, out = head(kind="masked", activation="relu", norm="none")
    close(out, torch.relu(h @ own.project.weight.T + own.project.bias) @ e.T + own.scores.bias)
    own, h, _, out = head(kind="classes", classes=3, pool="mean", dense=True)
    pooled = torch.tanh(h.mean(1) @ own.dense.weight.T + own.dense.bias)
    close(out, pooled @ own.output.weight.T + own.output.bias)
    _, h, _, out = head(kind="vector", pool="last", normalize=True)
    close(out, h[:, -1] / h[:, -1].norm(dim=-1, keepdim=True))
    close(head(kind="vector")[3], head(kind="vector")[1][:, 0])
    close(head(kind="vector", pool={"kind": "at", "index": 2})[3], head(kind="vector")[1][:, 2])
    own, h, _, out = head(kind="pixels", pixels=5)
    close(out, h @ own.output.weight.T + own.output.bias)
    _, h, _, out = head(kind="none")
    close(out, h)


@formula("embed", "tokens", "shared", "patches", "mask-tokens")
def test_token_embeddings_are_scaled_summed_normalized_and_projected():
    stack = kinds.stack(
        layers=0,
        embed={"scale": True, "type_vocab_size": 3, "norm": "layer", "size": 9},
        position={"kind": "learned", "length": 12},
        final_norm="none",
    )
    model = random_model(read_model({"vocab": 9, "encoder": stack, "head": "none"}))
    ids, types, own = tokens(vocab=9), tokens(vocab=3, seed=8), model.encoder.embed
    summed = own.table.weight[ids] * 3 + own.types.weight[types] + own.position.table.weight[: ids.shape[1]]
    close(model(Inputs(ids, token_type_ids=types)), own.project(own.norm(summed)))
    pair = random_model(kinds.pair(layers=0, final_norm="none", embed={"scale": True}).replace(head="none"))
    close(pair(tokens(), tokens()), pair.encoder.embed.table.weight[tokens()])


# ------------------------------------------------------------------------------------------------ recurrent, n-gram


@formula("cell", "gru", "lstm")
@formula("readout", "state", "tanh", "maxout")
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("readout", ["state", "tanh", {"kind": "maxout", "size": 6}])
def test_a_recurrent_step_is_context_cell_readout_and_head(cell, readout):
    """Step by step by the equations: context, cell, readout, head."""
    spec = read_model(
        {
            "vocab": 9,
            "recurrent": {"width": 4, "cell": cell, "readout": readout, "core": {"kind": "additive", "size": 3}},
            "head": "untied",
        }
    )
    model = random_model(spec)
    source, target = tokens(1, 5, vocab=9), tokens(1, 3, vocab=9, seed=8)
    h = model.encoder.reader(model.encoder.embed.table(source))[0][0]
    s = torch.tanh(model.bridge(h[0, 4:]))  # from the end of the backward direction: the first token
    c = torch.zeros(4, **FLOAT64)
    for t, logits in enumerate(model(target, source)[0]):
        e = model.embed.table(target[0, t])
        hidden = torch.tanh(s @ model.core.query_weight[0] + h @ model.core.key_transform.weight[0])
        context = torch.softmax(hidden @ model.core.score_weight[0, :, 0], dim=0) @ h
        weights = model.cells[0].cell
        x = torch.cat((e, context)) @ weights.weight_ih.T + weights.bias_ih
        u, before = s @ weights.weight_hh.T + weights.bias_hh, s
        if cell == "gru":
            r, z = torch.sigmoid(x[:4] + u[:4]), torch.sigmoid(x[4:8] + u[4:8])
            s = (1 - z) * torch.tanh(x[8:] + r * u[8:]) + z * s
        else:
            i, f, g, o = (x + u).split(4)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            s = torch.sigmoid(o) * torch.tanh(c)
        if readout == "state":
            y = s
        elif readout == "tanh":
            y = torch.tanh(torch.cat((s, context)) @ model.readout.project.weight.T)
        else:
            y = model.readout.project(torch.cat((before, e, context))).reshape(6, 2).max(-1).values
        close(logits, y @ model.head.output.weight.T)


@formula("cell", "lstmn")
def test_a_cell_that_attends_to_its_past_is_an_lstm_on_the_mean_of_all_earlier_states():
    """Cheng et al. 2016, equations 5 to 10, with the state before the first token as one of them."""
    cell = {"kind": "lstmn", "core": {"kind": "additive", "size": 3}}
    model = random_model(read_model({"vocab": 9, "recurrent": {"width": 4, "cell": cell, "source": False}}))
    ids, own = tokens(1, 5, vocab=9), model.cells[0]
    past, summary = torch.zeros(1, 8, **FLOAT64), torch.zeros(4, **FLOAT64)
    with record(model) as tape:
        out = model(ids)[0]
    for t, logits in enumerate(out):
        x = model.embed.table(ids[0, t])
        hidden = torch.tanh(
            torch.cat((x, summary)) @ own.core.query_weight[0] + past[:, :4] @ own.core.key_transform.weight[0]
        )
        weights = torch.softmax(hidden @ own.core.score_weight[0, :, 0], dim=0)
        close(tape.calls("cells.0")[t].weights()[0, 0, 0], weights)
        summary, c = (weights @ past).split(4)
        gates = own.cell.weight_ih @ x + own.cell.bias_ih + own.cell.weight_hh @ summary + own.cell.bias_hh
        i, f, g, o = gates.split(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        past = torch.cat((past, torch.cat((h, c))[None]))
        close(logits, h @ model.table.T)


def test_the_ngram_network_is_its_formula():
    model = random_model(read_model({"vocab": 9, "ngram": {"order": 3, "width": 4, "hidden": 5}, "head": "untied"}))
    ids = tokens(1, 4, vocab=9)
    e = torch.cat((torch.zeros(1, 4, **FLOAT64), model.embedding(ids[0])))
    expected = [model.head.output(torch.tanh(model.hidden(torch.cat((e[t], e[t + 1]))))) for t in range(4)]
    close(model(ids)[0], torch.stack(expected))


@formula("attention", "heads", "wide", "narrow")
def test_grouped_and_narrow_heads_read_their_own_part():
    """Grouped: query head h uses key head h·G/H. Chunked: head h projects its own part of x."""
    core, x = CoreSpec.from_config({"kind": "dot", "scale": 1.0}), torch.randn(1, 5, 8, **FLOAT64)
    stack = kinds.stack(attention={"heads": 4, "kv_heads": 2})
    attention = random_model(read_model({"vocab": 9, "encoder": stack, "head": "none"})).encoder.layers[0].attention
    q, k = attention.query(torch.randn(1, 3, 16, **FLOAT64)), attention.key(torch.randn(1, 3, 16, **FLOAT64))
    weights = attention.core.weights(q, k, mask=Mask(3, 3, q.device), positions=positions(3, 3))
    for h in range(4):
        close(weights[0, h], torch.softmax(q[0, h] @ k[0, h // 2].T / 2, dim=-1))
    narrow = randomize(SLOTS["attention"].from_config({"kind": "narrow", "heads": 2}).build(8, core))
    for h in range(2):
        close(narrow.value(x)[0, h], x[0, :, 4 * h : 4 * h + 4] @ narrow.value.weight[h] + narrow.value.bias[h])
    wide = randomize(SLOTS["attention"].from_config({"kind": "wide", "heads": 3}).build(8, core))
    close(wide.value(x)[0, 2], x[0] @ wide.value.weight[16:].T + wide.value.bias[16:])


# --------------------------------------------------------------------------------------------------- initialization


@formula("init", "normal", "xavier", "fan-in")
def test_initial_weights_have_the_standard_deviation_of_their_scheme():
    stack = {"layers": 8, "width": 128, "attention": {"heads": 4}, "feedforward": {"hidden": 256}}

    def stds(init):
        model = build(read_model({"vocab": 500, "decoder": stack, "head": "untied", "init": init}))
        layer = model.decoder.layers[3]
        modules = {
            "query": layer.attention.query,
            "key": layer.attention.key,
            "output": layer.attention.output,
            "up": layer.feedforward.up,
            "down": layer.feedforward.down,
            "head": model.head.output,
            "table": model.decoder.embed.table,
        }
        return {name: module.weight.std().item() for name, module in modules.items()}

    near = lambda **expected: pytest.approx(expected, rel=0.05)  # noqa: E731
    assert stds({"kind": "normal", "std": 0.1}) == near(
        query=0.1, key=0.1, output=0.025, up=0.1, down=0.025, head=0.1, table=0.1
    )
    assert stds({"kind": "normal", "scaled": False}) == near(
        query=0.02, key=0.02, output=0.02, up=0.02, down=0.02, head=0.02, table=0.02
    )
    glorot = lambda *sizes: math.sqrt(2 / sum(sizes))  # noqa: E731  (the standard deviation of U(−√(6/n), √(6/n)))
    square, oblong = glorot(128, 128), glorot(128, 256)
    assert stds("xavier") == near(
        query=square, key=square, output=square, up=oblong, down=oblong, head=glorot(128, 500), table=128**-0.5
    )
    narrow, wide = 128**-0.5, 256**-0.5
    assert stds("fan-in") == near(
        query=(128 * 32) ** -0.5, key=narrow, output=narrow, up=narrow, down=wide, head=1.0, table=1.0
    )


WITH_DROPOUT = [
    kinds.decoder(embed={"dropout": 0.5}),
    kinds.decoder(core={"dropout": 0.5}),
    *(kinds.decoder(residual={"kind": kind, "dropout": 0.5}) for kind in SLOTS["residual"].kinds),
    kinds.decoder(feedforward={"kind": "mlp", "hidden": 9, "dropout": 0.5}),
    kinds.decoder(feedforward={"kind": "gated", "hidden": 9, "dropout": 0.5}),
    kinds.recurrent(source=False, dropout=0.5),
    kinds.recurrent(source=False, dropout=0.5, layers=2, cell="lstm"),
    kinds.ngram(dropout=0.5),
    read_model({"vocab": kinds.VOCAB, "encoder": kinds.stack(), "head": {"kind": "classes", "dropout": 0.5}}),
]


@pytest.mark.parametrize("spec", WITH_DROPOUT, ids=range(len(WITH_DROPOUT)))
def test_dropout_is_active_in_training_only(spec):
    model = random_model(spec)
    assert torch.equal(model(tokens()), model(tokens()))
    model.train()
    assert not torch.equal(model(tokens()), model(tokens()))


def test_position_tables_are_shared_or_per_layer():
    def tables(**position):
        return [
            name
            for name, _ in random_model(kinds.decoder(layers=3, position=position)).named_parameters()
            if "position" in name
        ]

    assert tables(kind="bucketed") == ["decoder.position_modules.0.table.weight"]
    own = [f"decoder.layers.{i}.position.table.weight" for i in range(3)]
    assert tables(kind="bucketed", shared=False) == tables(kind="shaw") == tables(kind="clipped") == own


@formula("feedforward", "none")
@pytest.mark.parametrize("residual", SLOTS["residual"].kinds)
def test_a_layer_without_a_feed_forward_network_is_attention_alone(residual):
    """Nothing stands in for it: no norm, no residual connection."""
    model = random_model(kinds.decoder(layers=1, residual=residual, feedforward="none", norm="rms"))
    layer, x = model.decoder.layers[0], torch.randn(2, 5, model.spec.decoder.width, **FLOAT64)
    layer.self_attention = lambda y, context, cache: 3 * y
    norms = list(layer.residual.norms)
    assert len(norms) == (2 if residual == "sandwich" else 1)
    expected = {
        "pre": lambda: x + 3 * norms[0](x),
        "post": lambda: norms[0](x + 3 * x),
        "parallel": lambda: x + 3 * norms[0](x),
        "parallel-norms": lambda: x + 3 * norms[0](x),
        "none": lambda: 3 * norms[0](x),
        "sandwich": lambda: x + norms[1](3 * norms[0](x)),
    }
    close(layer(x, None, None, None), expected[residual]())


def test_query_and_key_norms_come_before_the_rotation():
    plain = {"residual": "none", "norm": "none", "feedforward": "none"}
    model = random_model(kinds.decoder(layers=1, position="rope", attention={"qk_norm": "rms"}, **plain))
    attention, rope = model.decoder.layers[0].attention, model.decoder.position(0)
    with record(model) as attentions:
        model(tokens())
    q = attention.query_norm(attention.query(model.decoder.embed.table(tokens())))
    index = positions(kinds.LENGTH, kinds.LENGTH)
    close(attentions[0].query, rope.rotate(q, rope.precompute(index, torch.float64)))


def test_layers_of_a_pattern_have_their_own_masks():
    model = random_model(kinds.decoder(layers=2, pattern=[{"mask": {"window": 1}}, {}]))
    with record(model) as attentions:
        model(tokens())
    first, second = (attention.weights() for attention in attentions)
    assert (first.tril(-1) == 0).all()
    assert (second.tril() > 0).any(dim=-1).all()
    assert (second.tril(-1) > 0).any()


def test_cross_attention_has_its_own_parts():
    decoder = kinds.stack(cross={"attention": {"heads": 4, "size": 6}, "core": "argmax"})
    cross = build(read_model({"vocab": 9, "encoder": kinds.stack(), "decoder": decoder})).decoder.layers[0].cross
    assert cross.query.weight.shape == (24, 16)
    assert type(cross.core).__name__ == "Argmax"


def test_source_and_target_have_their_own_vocabulary():
    for shape in ({"encoder": {}, "decoder": {"cross": True}}, {"recurrent": {}}):
        model = build_meta(read_model({"vocab": 9, "source_vocab": 5, **shape}))
        assert model.encoder.embed.table.num_embeddings == 5
        assert model.table.shape[0] == 9


def test_patches_and_mask_tokens_are_embedded_by_their_formulas():
    plain = {"layers": 0, "final_norm": "none"}
    patches, learned = {"kind": "patches", "pixels": 3, "class_token": True}, {"kind": "learned", "length": 9}
    stack = kinds.stack(embed=patches, position=learned, **plain)
    model, image = random_model(read_model({"encoder": stack, "head": "none"})), torch.randn(1, 4, 3, **FLOAT64)
    own = model.encoder.embed
    expected = torch.cat((own.cls_token[0], own.project(image[0]))) + own.position.table.weight[:5]
    close(model(image)[0], expected)
    stack = kinds.stack(embed={"kind": "patches", "pixels": 3}, **plain)
    decoder = stack | {"embed": "mask-tokens", "mask": {"causal": False}}
    model = random_model(read_model({"encoder": stack, "decoder": decoder, "head": "none"}))
    embed, visible = model.decoder.embed, torch.tensor([[2, 0]])
    out = model(Inputs(image), Inputs(image[:, :2], positions=visible))[0]
    states, mask_token = embed.project(model.encoder.embed.project(image[0, :2])), embed.mask_token[0, 0]
    close(out, torch.stack((states[1], mask_token, states[0], mask_token)))


def test_a_learned_logit_scale_starts_at_its_value():
    head = {"kind": "untied", "logit_scale": "inverse-sqrt", "learn_logit_scale": True}
    model = build(read_model({"vocab": 9, "decoder": kinds.stack(), "head": head}))
    assert model.head.beta.item() == 0.25


def test_initialization_depends_on_the_role_of_a_matrix():
    """A transform in the head is a projection, as are narrow heads; with cross-attention a layer adds three terms."""
    stack = {"layers": 4, "width": 128, "attention": {"kind": "narrow", "heads": 2}}

    def built(init, **fields):
        return build(read_model({"vocab": 300, "encoder": stack, "init": init, **fields}))

    masked = built("fan-in", head={"kind": "masked", "scores": "untied"})
    assert masked.head.project.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert masked.head.scores.output.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert built({"std": 0.05}).encoder.layers[0].attention.key.weight.std().item() == pytest.approx(0.05, rel=0.05)
    pair = built({"std": 0.1}, decoder={"like": "encoder", "cross": True})
    assert pair.decoder.layers[0].feedforward.down.weight.std().item() == pytest.approx(0.1 / math.sqrt(12), rel=0.05)
    assert pair.encoder.layers[0].feedforward.down.weight.std().item() == pytest.approx(0.1 / math.sqrt(8), rel=0.05)


def test_a_document_that_starts_with_padding_starts_at_position_0():
    model = random_model(kinds.decoder(position={"kind": "learned", "length": 5}))
    ids, document_ids = tokens(1, 5), torch.tensor([[1, 1, 2, 2, 2]])
    padding_mask = torch.tensor([[False, False, True, False, False]])
    close(model(Inputs(ids, document_ids=document_ids, padding_mask=padding_mask))[:, 3:], model(ids[:, 3:]))


def test_layers_with_a_prefix_and_without_continue_from_one_state():
    model, ids, prefix = (
        random_model(kinds.decoder(pattern=[{"mask": {"prefix": True}}, {}])),
        tokens(),
        torch.tensor([4, 2]),
    )
    full = model(Inputs(ids, prefix_lengths=prefix))
    _, state = model.step(Inputs(ids[:, :6], prefix_lengths=prefix), model.start())
    close(model.step(ids[:, 6:], state)[0], full[:, 6:])


def test_the_form_of_a_mask_agrees_with_its_matrix():
    """For any part of a sequence: 'none' and 'causal' only if the dense matrix is the same."""
    for queries, keys, offset, first, window, causal in itertools.product(
        (1, 3, 5), (1, 4, 5), (0, 2, 9), (0, 2), (None, 1, 3, 8), (False, True)
    ):
        mask = Mask(
            queries, keys, torch.device("cpu"), query_offset=offset, key_offset=first, window=window, causal=causal
        )
        visible = torch.ones(queries, keys, dtype=torch.bool) if mask.dense is None else mask.dense[0, 0]
        if mask.form == "none":
            assert visible.all(), mask
        elif mask.form == "causal":
            assert torch.equal(visible, torch.ones(queries, keys, dtype=torch.bool).tril()), mask


def test_segments_continue_over_steps():
    model = random_model(kinds.decoder(position={"kind": "learned", "length": 5}))
    ids, document_ids = tokens(), torch.arange(kinds.LENGTH).div(4, rounding_mode="floor").expand(2, -1)
    full = model(Inputs(ids, document_ids=document_ids))
    _, state = model.step(Inputs(ids[:, :6], document_ids=document_ids[:, :6]), model.start())
    close(model.step(Inputs(ids[:, 6:], document_ids=document_ids[:, 6:]), state)[0], full[:, 6:])


def test_building_leaves_the_global_random_state():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    build(kinds.decoder(), seed=3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_every_kind_has_a_formula():
    for slot, base in SLOTS.items():
        built_in = {
            kind
            for kind, part in base.kinds.items()
            if part.__module__.startswith(("manyheads.parts", "manyheads.model"))
        }
        assert built_in <= CHECKED.get(slot, set()), (
            f"{slot}: {built_in - CHECKED.get(slot, set())} has no test of its formula"
        )


def test_scale_is_divided_by_the_temperature():
    assert CoreSpec.from_config({"kind": "dot", "scale": 0.75, "temperature": 3.0}).build(1, 4, 4).scale == 0.25


def test_argmax_has_the_gradient_of_the_scaled_softmax():
    """Straight-through: the gradient is that of softmax(q·k/√K)."""
    core = CoreSpec.from_config("argmax").build(1, 4, 4)
    q, k, factor = (torch.randn(1, 1, n, m, **FLOAT64) for n, m in ((5, 4), (7, 4), (5, 7)))
    q.requires_grad_()
    hard = core.weights(q, k, mask=Mask(5, 7, q.device), positions=positions(5, 7))
    soft = torch.softmax(q @ k.transpose(-1, -2) / 2, dim=-1)
    close(*(torch.autograd.grad((weights * factor).sum(), q)[0] for weights in (hard, soft)))


def test_blocks_stay_within_their_limits():
    """Every row of the batch counts, and every number that one score needs."""
    document_ids = torch.zeros(4, 10, dtype=torch.long)
    mask = Mask(10, 10, document_ids.device, document_ids=(document_ids, document_ids), dense_limit=200)
    assert mask.form == "blocks"
    assert all(block.dense.numel() <= 200 for _, _, block in mask.blocks())
    core, q = CoreSpec.from_config({"kind": "additive", "size": 5}).build(2, 4, 4), torch.randn(4, 2, 10, 4)
    core.max_scores = 2000
    for _, _, block in core.blocks(q, core.key_transform(q), Mask(10, 10, q.device)):
        rows = block.num_queries
        assert core.scores(q[:, :, :rows], core.key_transform(q), positions(rows, 10)).numel() * 5 <= 2000


def test_yarn_blends_between_its_borders():
    """ω·(1 − r) + ω/s·r, with r from 0 to 1 between the pairs with beta_fast and beta_slow rotations within T."""
    size, theta, length = 32, 100.0, 1000
    pair = lambda rotations: size * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(theta))  # noqa: E731
    for truncate in (True, False):
        fields = {"length": length, "beta_fast": 40.0, "beta_slow": 7.0, "truncate": truncate}
        spec = SLOTS["scaling"].from_config({"kind": "yarn", "factor": 4.0, **fields})
        frequencies = spec.frequencies(theta, size, torch.tensor(9))
        low, high = pair(40.0), pair(7.0)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        for i in range(size // 2):
            w, r = theta ** (-2 * i / size), min(1.0, max(0.0, (i - low) / (high - low)))
            assert frequencies[i].item() == pytest.approx(w * (1 - r) + w / 4 * r)


def test_longrope_uses_the_short_factors_up_to_the_length_trained_on():
    spec = SLOTS["scaling"].from_config({"kind": "longrope", "short_factor": [2.0], "long_factor": [5.0], "length": 6})
    for length, factor in ((5, 2.0), (6, 2.0), (7, 5.0)):
        assert spec.frequencies(10000.0, 2, torch.tensor(length)).item() == 1 / factor


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("output_bias", [True, False])
def test_biases_are_optional(bias, output_bias):
    spec = SLOTS["attention"].from_config({"kind": "heads", "heads": 2, "bias": bias, "output_bias": output_bias})
    own = spec.build(8, DotSpec())
    assert [part.bias is not None for part in (own.query, own.key, own.value)] == [bias] * 3
    assert (own.output.bias is not None) == output_bias
    assert (SLOTS["norm"].from_config({"kind": "layer", "bias": bias}).build(8).bias is not None) == bias


@pytest.mark.parametrize("width", range(1, 20))
def test_the_gated_hidden_size_is_eight_thirds_rounded_up(width):
    hidden = SLOTS["feedforward"].from_config("gated").build(width).up.out_features
    assert hidden % 8 == 0
    assert hidden - 8 < 8 * width / 3 <= hidden


def test_dropout_of_patches_is_active_in_training_only():
    stack = kinds.stack(embed={"kind": "patches", "pixels": 3, "dropout": 0.5})
    embed = random_model(read_model({"encoder": stack, "head": "none"})).encoder.embed
    inputs = Inputs(torch.randn(2, 4, 3, **FLOAT64))
    run = lambda: embed(inputs, positions(4, 4), table=None, memory=None)  # noqa: E731
    assert torch.equal(run(), run())
    embed.train()
    assert not torch.equal(run(), run())


def test_class_token_and_mask_token_start_at_a_small_random_vector():
    stack = {"width": 2048, "layers": 0}
    encoder, decoder = stack | {"embed": {"kind": "patches", "class_token": True}}, stack | {"embed": "mask-tokens"}
    model = build(read_model({"encoder": encoder, "decoder": decoder, "head": "pixels"}))
    for vector in (model.encoder.embed.cls_token, model.decoder.embed.mask_token):
        assert vector.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_tied_head_reads_the_token_part_of_a_concatenated_vector():
    """[x, p]: the token's part comes first, and the head reads it alone."""
    model = random_model(kinds.decoder(position={"kind": "sinusoidal", "join": "concat", "size": 5}))
    h, _ = model.last_hidden_state(tokens())
    close(model(tokens()), h[..., :11] @ model.table.T)


def test_layers_of_a_group_share_weights_and_positions():
    stack = random_model(kinds.decoder(layers=4, layer_groups=2, position={"kind": "clipped", "clip": 3})).decoder
    assert [list(stack.layers).index(stack.layer(i)) for i in range(4)] == [0, 0, 1, 1]
    assert all(stack.position(i) is stack.layer(i).position for i in range(4))


def test_xavier_is_uniform_fan_in_has_a_factor_and_biases_start_at_zero():
    def built(init):
        return build(kinds.decoder(layers=1, width=64).replace(init=init)).decoder.layers[0]

    up = built("xavier").feedforward.up.weight
    assert up.abs().max().item() <= math.sqrt(6 / sum(up.shape))
    one, three = (built({"kind": "fan-in", "factor": factor}) for factor in (1.0, 3.0))
    close(three.attention.key.weight, 3 * one.attention.key.weight)
    for init in SLOTS["init"].kinds:
        assert all((bias == 0).all() for name, bias in built(init).named_parameters() if name.endswith(".bias"))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_cells_are_stacked_and_the_last_is_read(cell):
    model, ids = random_model(kinds.recurrent(source=False, layers=2, cell=cell)), tokens(1, 4)
    x, states = model.embed.table(ids[0]), [None, None]
    for t, logits in enumerate(model(ids)[0]):
        y = x[t : t + 1]
        for i, layer in enumerate(model.cells):
            states[i] = layer.cell(y, states[i])
            y = states[i] if cell == "gru" else states[i][0]
        close(logits, y[0] @ model.table.T)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_recurrent_encoder_has_dropout_between_layers_in_training_only(cell):
    encoder = random_model(kinds.recurrent(layers=2, cell=cell, dropout=0.5)).encoder
    assert torch.equal(encoder(Inputs(tokens()))[1], encoder(Inputs(tokens()))[1])
    encoder.train()
    assert not torch.equal(encoder(Inputs(tokens()))[1], encoder(Inputs(tokens()))[1])


def test_a_submask_is_a_part_of_the_mask():
    """Also where no model uses it today: columns past the first under a prefix."""
    mask = Mask(8, 8, torch.device("cpu"), causal=True, window=3, prefix_B=torch.tensor([4, 1]))
    rows, columns = slice(1, 6), slice(2, 7)
    assert torch.equal(mask.submask(rows, columns).dense, mask.dense[:, :, rows, columns])


def test_ntk_needs_four_rotated_coordinates():
    scaling = NtkScalingSpec()
    scaling.check(4)
    with raises("config.incompatible"):
        scaling.check(2)
