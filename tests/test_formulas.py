"""Each part against its formula, written out plainly here: the laws say that parts agree with themselves, this says with what.

Every kind of the slots below must have an entry; a new kind without one fails the last test.
"""

from __future__ import annotations

import itertools
import math

import kinds
import pytest
import torch
from kinds import made, tokens

from manyheads import Inputs, build, read_model
from manyheads.model.build import outline
from manyheads.model.init import initialise
from manyheads.parts.attend import CoreSpec, DotSpec
from manyheads.parts.feedforward import ACTIVATIONS
from manyheads.parts.mask import Mask
from manyheads.parts.position import Places
from manyheads.spec import SLOTS

torch_double = {"dtype": torch.float64}
CHECKED: dict[str, set[str]] = {}


def formula(slot, *kinds_):
    CHECKED.setdefault(slot, set()).update(kinds_)
    return lambda test: test


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def randomised(module):
    for parameter in module.requires_grad_(False).parameters():
        torch.nn.init.normal_(parameter)
    return module.double().eval()


# ---------------------------------------------------------------------------------------------------------- masks


def may_see(i, j, *, causal, window, prefix, pad, segments, ranks):
    """May query i see key j, by the words of the spec."""
    if pad[j] or segments[i] != segments[j]:
        return False
    if prefix is not None and ranks[j] < prefix:
        return True
    return (not causal or j <= i) and (window is None or abs(ranks[i] - ranks[j]) < window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("prefix", [None, 2])
@pytest.mark.parametrize("pad", ["", "left", "right", "middle"])
@pytest.mark.parametrize("packed", [False, True])
def test_masks_say_who_may_see_whom(causal, window, prefix, pad, packed):
    if prefix is not None and not (causal or window):
        return
    model = build(
        read_model(
            {
                "vocab": 9,
                "decoder": kinds.tower(mask={"causal": causal, "prefix": prefix is not None} | ({"window": window} if window else {})),
            }
        )
    )
    length = 8
    padded = [place in {"": (), "left": (0, 1), "right": (6, 7), "middle": (3, 4)}[pad] for place in range(length)]
    segments = [int(packed and place > 3) for place in range(length)]
    ranks = [sum(not p for p in padded[: place + 1]) - 1 for place in range(length)]
    seen = []
    model.decoder.layers[0].attention.core.register_forward_hook(
        lambda core, args, kwargs, out: seen.append(core.weights(*args[:2], **kwargs) > 0), with_kwargs=True
    )
    model(
        Inputs(
            tokens(1, length, vocab=9),
            padding=torch.tensor([padded]) if pad else None,
            segments=torch.tensor([segments]) if packed else None,
            prefix=None if prefix is None else torch.tensor([prefix]),
        )
    )
    options = {"causal": causal, "window": window, "prefix": prefix, "pad": padded, "segments": segments, "ranks": ranks}
    expected = [[may_see(i, j, **options) for j in range(length)] for i in range(length)]
    assert seen[0][0, 0].tolist() == expected


# ---------------------------------------------------------------------------------------------------------- cores


def core_weights(spec, queries=5, keys=7, query_size=4, key_size=4, **given):
    core = randomised(spec.build(2, query_size, key_size))
    q, k = torch.randn(1, 2, queries, query_size, **torch_double), torch.randn(1, 2, keys, key_size, **torch_double)
    places = Places(torch.arange(queries)[None], torch.arange(keys)[None])
    weights = core.weights(q, core.key(k), mask=Mask(queries, keys, q.device), places=places)
    return core, q[0], k[0], weights[0]


def rows_of(score, queries, keys):
    """softmax over the keys of score(h, i, j), one number at a time."""
    table = torch.tensor([[[score(h, i, j) for j in range(keys)] for i in range(queries)] for h in range(2)], **torch_double)
    return torch.softmax(table, dim=-1)


@formula("core", "dot")
@pytest.mark.parametrize("fields", [{}, {"temperature": 3.0}, {"scale": 0.7}, {"softcap": 2.0}, {"softcap": 1.5, "temperature": 0.5}])
def test_dot(fields):
    _, q, k, weights = core_weights(CoreSpec.choose({"kind": "dot", **fields}))

    def score(h, i, j):
        s = float(q[h, i] @ k[h, j]) * fields.get("scale", 1 / 2) / fields.get("temperature", 1.0)
        return fields["softcap"] * math.tanh(s / fields["softcap"]) if "softcap" in fields else s

    close(weights, rows_of(score, 5, 7))


@formula("core", "bilinear", "projected", "additive")
@pytest.mark.parametrize("scaled", [True, False])
def test_scores_with_matrices(scaled):
    core, q, k, weights = core_weights(CoreSpec.choose({"kind": "bilinear", "scaled": scaled}), query_size=3, key_size=4)
    close(weights, rows_of(lambda h, i, j: float(q[h, i] @ core.weight[h] @ k[h, j]) / (2 if scaled else 1), 5, 7))
    core, q, k, weights = core_weights(CoreSpec.choose({"kind": "projected", "size": 9, "scaled": scaled}), query_size=3, key_size=4)
    score = lambda h, i, j: float((q[h, i] @ core.query_weight[h]) @ (k[h, j] @ core.key.weight[h])) / (3 if scaled else 1)  # noqa: E731
    close(weights, rows_of(score, 5, 7))
    core, q, k, weights = core_weights(CoreSpec.choose({"kind": "additive", "size": 6}), query_size=3, key_size=4)
    hidden = lambda h, i, j: torch.tanh(q[h, i] @ core.query_weight[h] + k[h, j] @ core.key.weight[h])  # noqa: E731
    close(weights, rows_of(lambda h, i, j: float(core.score_weight[h, :, 0] @ hidden(h, i, j)), 5, 7))


@formula("core", "fused", "argmax", "dense", "random")
def test_the_other_cores():
    _, q, k, weights = core_weights(CoreSpec.choose("fused"))
    close(weights, rows_of(lambda h, i, j: float(q[h, i] @ k[h, j]), 5, 7))
    _, q, k, weights = core_weights(CoreSpec.choose("argmax"))
    close(weights, torch.nn.functional.one_hot((q @ k.transpose(1, 2)).argmax(-1), 7).double())
    core, q, _, weights = core_weights(CoreSpec.choose({"kind": "dense", "length": 9}), key_size=0)
    score = lambda h, i, j: float(torch.relu(q[h, i]) @ core.weight[h, :, j] + core.bias[h, 0, j])  # noqa: E731
    close(weights, rows_of(score, 5, 7))
    core, _, _, weights = core_weights(CoreSpec.choose({"kind": "random", "length": 9}), query_size=0, key_size=0)
    close(weights, rows_of(lambda h, i, j: float(core.table[h, i, j]), 5, 7))


# ------------------------------------------------------------------------------------------------------ positions


@formula("position", "none", "sinusoidal", "learned")
@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
@pytest.mark.parametrize("join", ["add", "concat", "multiply"])
def test_positions_at_the_embedding(kind, join):
    spec = SLOTS["position"].choose({"kind": kind, "join": join} | ({"length": 9, "offset": 2} if kind == "learned" else {}))
    door = randomised(spec.build_embed(8))
    x, here = torch.randn(1, 5, spec.token_width(8), **torch_double), torch.tensor([[0, 3, 1, 7, 2]])
    width = 4 if join == "concat" else 8
    if kind == "learned":
        p = door.table.weight[here[0] + 2]
    else:
        angle = lambda t, i: t / 10000 ** ((i - i % 2) / width)  # noqa: E731
        p = torch.tensor([[(math.cos if i % 2 else math.sin)(angle(t, i)) for i in range(width)] for t in here[0].tolist()], **torch_double)
    expected = {"add": lambda: x[0] + p, "multiply": lambda: x[0] * p, "concat": lambda: torch.cat((x[0], p), -1)}[join]()
    close(door(x, Places(here, here))[0], expected)


def bias_of(position, queries=6, keys=6, heads=2, size=4, scale=0.5):
    spec = SLOTS["position"].choose(position)
    module = randomised(spec.build(heads, size))
    q = torch.randn(1, heads, queries, size, **torch_double)
    places = Places(torch.arange(queries)[None], torch.arange(keys)[None])
    bias = module.bias(q, module.plan(places, torch.float64), scale)
    return module, q[0], bias.expand(1, -1, -1, -1)[0]


@formula("position", "relative", "clipped", "bucketed", "shaw", "alibi")
def test_positions_in_the_scores():
    pairs = list(itertools.product(range(2), range(6), range(6)))
    module, _, bias = bias_of({"kind": "relative", "length": 6})
    assert all(bias[h, i, j] == module.table.weight[j - i + 5, h] for h, i, j in pairs)
    module, _, bias = bias_of({"kind": "clipped", "clip": 2})
    assert all(bias[h, i, j] == module.table.weight[max(-2, min(2, j - i)) + 2, h] for h, i, j in pairs)
    module, q, bias = bias_of({"kind": "shaw", "clip": 2}, scale=0.3)
    for h, i, j in pairs:
        close(bias[h, i, j], 0.3 * q[h, i] @ module.table.weight[max(-2, min(2, j - i)) + 2])
    _, _, bias = bias_of("alibi")
    assert all(bias[h, i, j] == -(2.0 ** (-4 * (h + 1))) * abs(i - j) for h, i, j in pairs)
    module, _, bias = bias_of({"kind": "bucketed", "buckets": 8, "distance": 16})
    # half of the buckets for each direction: 0 and 1 exact, 2 and 3 shared by logarithm up to 16
    bucket = lambda d: d if d < 2 else min(3, 2 + int(math.log(d / 2) / math.log(16 / 2) * 2))  # noqa: E731
    assert all(bias[h, i, j] == module.table.weight[bucket(abs(j - i)) + (4 if j > i else 0), h] for h, i, j in pairs)


def banded(w, factor=4.0, trained=30, low=1.0, high=4.0):
    """Waves shorter than T/high are kept, longer than T/low squeezed, between them a blend by how often they fit into T."""
    wave = 2 * math.pi / w
    if wave < trained / high:
        return w
    if wave > trained / low:
        return w / factor
    kept = (trained / wave - low) / (high - low)
    return kept * w + (1 - kept) * w / factor


def yarn(i, w, factor=4.0, trained=300, fast=32.0, slow=1.0):
    """Pairs that turn more than `fast` times within T are kept, less than `slow` times squeezed; a ramp over the pairs between."""
    pair_that_turns = lambda turns: 8 * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(10000))  # noqa: E731
    first, last = max(math.floor(pair_that_turns(fast)), 0), min(math.ceil(pair_that_turns(slow)), 7)
    squeezed = min(max((i - first) / (last - first), 0.0), 1.0)
    return squeezed * w / factor + (1 - squeezed) * w


def test_amplitudes():
    of = lambda **fields: SLOTS["scaling"].choose(fields).amplitude()  # noqa: E731
    assert of(kind="yarn", factor=4.0) == pytest.approx(0.1 * math.log(4) + 1)
    assert of(kind="yarn", factor=4.0, attention=1.7) == 1.7
    assert of(kind="longrope", length=100, stretch=8.0) == pytest.approx(math.sqrt(1 + math.log(8) / math.log(100)))
    assert {of(kind=kind) for kind in ("none", "linear", "ntk", "dynamic", "banded")} == {1.0}


@formula("position", "rope")
@formula("scaling", "none", "linear", "ntk", "dynamic", "yarn", "banded", "longrope")
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize(
    ("scaling", "frequency"),
    [
        ({"kind": "none"}, lambda i, w: w),
        ({"kind": "linear", "factor": 4.0}, lambda i, w: w / 4),
        ({"kind": "ntk", "factor": 4.0}, lambda i, w: (10000 * 4 ** (8 / 6)) ** (-2 * i / 8)),
        ({"kind": "dynamic", "factor": 4.1, "length": 5}, lambda i, w: (10000 * (4.1 * 6 / 5 - 3.1) ** (8 / 6)) ** (-2 * i / 8)),
        ({"kind": "banded", "factor": 4.0, "length": 30, "low": 1.0, "high": 4.0}, lambda i, w: banded(w)),
        ({"kind": "yarn", "factor": 4.0, "length": 300, "fast": 32.0, "slow": 1.0, "attention": 1.0}, lambda i, w: yarn(i, w)),
        ({"kind": "longrope", "short": [1.0], "long": [2.0, 3.0, 4.0, 5.0], "length": 3, "attention": 1.0}, lambda i, w: w / (2 + i)),
        ({"kind": "longrope", "short": [7.0], "long": [2.0], "length": 9, "attention": 1.0}, lambda i, w: w / 7),
    ],
)
def test_rotation(layout, scaling, frequency):
    rope = SLOTS["position"].choose({"kind": "rope", "layout": layout, "scaling": scaling}).build(1, 8)
    x, here = torch.randn(1, 1, 6, 8, **torch_double), torch.arange(6)[None]
    turned = rope.rotate_query(x, rope.plan(Places(here, here), torch.float64))
    for t, i in itertools.product(range(6), range(4)):
        angle = t * frequency(i, 10000 ** (-2 * i / 8))
        a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + 4)
        close(turned[0, 0, t, a], x[0, 0, t, a] * math.cos(angle) - x[0, 0, t, b] * math.sin(angle))
        close(turned[0, 0, t, b], x[0, 0, t, b] * math.cos(angle) + x[0, 0, t, a] * math.sin(angle))


# -------------------------------------------------------------------------------------------- what stands in a layer


@formula("residual", "pre", "post", "sandwich", "parallel", "parallel-norms", "none")
def test_residuals():
    x, f, g = torch.randn(1, 3, 4, **torch_double), torch.sin, torch.cos
    norm = SLOTS["norm"].choose("layer")
    built = {kind: randomised(SLOTS["residual"].choose(kind).build(norm, 4, 2)) for kind in SLOTS["residual"].kinds}
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


@formula("norm", "layer", "rms", "rms-one", "none")
@formula("feedforward", "mlp", "gated", "none")
def test_norms_and_feed_forward():
    x = torch.randn(5, 6, **torch_double)
    layer, rms, none = (randomised(SLOTS["norm"].choose(kind).build(6)) for kind in ("layer", "rms", "none"))
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    close(layer(x), (x - mean) / torch.sqrt(variance + 1e-5) * layer.weight + layer.bias)
    close(rms(x), x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * rms.weight)
    assert torch.equal(none(x), x)
    gated = randomised(SLOTS["feedforward"].choose({"kind": "gated", "hidden": 9, "bias": True}).build(6))
    gate = x @ gated.gate.weight.T + gated.gate.bias
    close(gated(x), (gate * torch.sigmoid(gate) * (x @ gated.up.weight.T + gated.up.bias)) @ gated.down.weight.T + gated.down.bias)
    assert torch.equal(SLOTS["feedforward"].choose("none").build(6)(x), x)
    assert SLOTS["feedforward"].choose("mlp").build(6).up.out_features == 24
    assert SLOTS["feedforward"].choose("gated").build(6).up.out_features == 16


def test_activations():
    x = torch.linspace(-4, 4, 41, **torch_double)
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


@formula("head", "none", "tied", "free", "bilinear", "masked", "classes", "vector", "pixels")
@formula("pool", "first", "last", "mean", "at")
def test_heads():
    def head(**fields):
        model = made(read_model({"vocab": 9, "encoder": kinds.tower(layers=1), "head": fields}))
        h, _ = model.states(tokens(vocab=9))
        return model.head, h, model.table, model(tokens(vocab=9))

    own, h, e, out = head(kind="tied", bias=True, temperature="root")
    close(out, h @ e.T / 4 + own.bias)
    own, h, _, out = head(kind="free", bias=True)
    close(out, h @ own.output.weight.T + own.bias)
    own, h, e, out = head(kind="bilinear", temperature="root", learned=True)
    close(out, own.beta * (h @ own.project.weight.T @ e.T))
    own, h, e, out = head(kind="masked", activation="relu", norm="none")
    close(out, torch.relu(h @ own.project.weight.T + own.project.bias) @ e.T + own.scores.bias)
    own, h, _, out = head(kind="classes", classes=3, pool="mean", dense=True)
    pooled = torch.tanh(h.mean(1) @ own.dense.weight.T + own.dense.bias)
    close(out, pooled @ own.output.weight.T + own.output.bias)
    _, h, _, out = head(kind="vector", pool="last", unit=True)
    close(out, h[:, -1] / h[:, -1].norm(dim=-1, keepdim=True))
    close(head(kind="vector")[3], head(kind="vector")[1][:, 0])
    close(head(kind="vector", pool={"kind": "at", "index": 2})[3], head(kind="vector")[1][:, 2])
    own, h, _, out = head(kind="pixels", pixels=5)
    close(out, h @ own.output.weight.T + own.output.bias)
    _, h, _, out = head(kind="none")
    close(out, h)


@formula("embed", "tokens", "shared", "patches", "restored")
def test_embeddings():
    tower = kinds.tower(
        layers=0,
        embed={"scale": True, "types": 3, "norm": "layer", "size": 9},
        position={"kind": "learned", "length": 12},
        final_norm="none",
    )
    model = made(read_model({"vocab": 9, "encoder": tower, "head": "none"}))
    ids, types, own = tokens(vocab=9), tokens(vocab=3, seed=8), model.encoder.embed
    summed = own.table.weight[ids] * 3 + own.types.weight[types] + own.position.table.weight[: ids.shape[1]]
    close(model(Inputs(ids, types=types)), own.project(own.norm(summed)))
    pair = made(kinds.pair(layers=0, final_norm="none", embed={"scale": True}).changed(head="none"))
    close(pair(tokens(), tokens()), pair.encoder.embed.table.weight[tokens()])


# ------------------------------------------------------------------------------------------------ recurrent, n-gram


@formula("cell", "gru", "lstm")
@formula("readout", "state", "tanh", "maxout")
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("readout", ["state", "tanh", {"kind": "maxout", "size": 6}])
def test_recurrent_step(cell, readout):
    """One step after another, by the equations: context, cell, readout, head."""
    spec = read_model(
        {"vocab": 9, "recurrent": {"width": 4, "cell": cell, "readout": readout, "core": {"kind": "additive", "size": 3}}, "head": "free"}
    )
    model = made(spec)
    source, target = tokens(1, 5, vocab=9), tokens(1, 3, vocab=9, seed=8)
    h = model.encoder.reader(model.encoder.embed.table(source))[0][0]
    s = torch.tanh(model.bridge(h[0, 4:]))  # from where reading backwards ended: the first word
    c = torch.zeros(4, **torch_double)
    for t, logits in enumerate(model(target, source)[0]):
        e = model.embed.table(target[0, t])
        hidden = torch.tanh(s @ model.core.query_weight[0] + h @ model.core.key.weight[0])
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


def test_ngram():
    model = made(read_model({"vocab": 9, "ngram": {"order": 3, "width": 4, "hidden": 5}, "head": "free"}))
    ids = tokens(1, 4, vocab=9)
    e = torch.cat((torch.zeros(1, 4, **torch_double), model.embedding(ids[0])))
    expected = [model.head.output(torch.tanh(model.hidden(torch.cat((e[t], e[t + 1]))))) for t in range(4)]
    close(model(ids)[0], torch.stack(expected))


@formula("attention", "heads", "wide", "chunked")
def test_heads_and_chunks():
    """Grouped: query head h reads key head h·G/H. Chunked: head h projects its own share of x."""
    core, x = CoreSpec.choose({"kind": "dot", "scale": 1.0}), torch.randn(1, 5, 8, **torch_double)
    model = made(read_model({"vocab": 9, "encoder": kinds.tower(attention={"heads": 4, "groups": 2}), "head": "none"}))
    attention = model.encoder.layers[0].attention
    q, k = attention.query(torch.randn(1, 3, 16, **torch_double)), attention.key(torch.randn(1, 3, 16, **torch_double))
    weights = attention.core.weights(q, k, mask=Mask(3, 3, q.device), places=Places(torch.arange(3)[None], torch.arange(3)[None]))
    for h in range(4):
        close(weights[0, h], torch.softmax(q[0, h] @ k[0, h // 2].T / 2, dim=-1))
    chunked = randomised(SLOTS["attention"].choose({"kind": "chunked", "heads": 2}).build(8, core))
    for h in range(2):
        close(chunked.value(x)[0, h], x[0, :, 4 * h : 4 * h + 4] @ chunked.value.weight[h] + chunked.value.bias[h])
    wide = randomised(SLOTS["attention"].choose({"kind": "wide", "heads": 3}).build(8, core))
    close(wide.value(x)[0, 2], x[0] @ wide.value.weight[16:].T + wide.value.bias[16:])


# -------------------------------------------------------------------------------------------------- how weights begin


@formula("init", "normal", "xavier", "fan-in")
def test_how_weights_begin():
    tower = {"layers": 8, "width": 128, "attention": {"heads": 4}, "feedforward": {"hidden": 256}}

    def begun(init, head="free"):
        model = outline(read_model({"vocab": 500, "decoder": tower, "head": head, "init": init})).to_empty(device="cpu")
        with torch.no_grad():
            initialise(model, model.spec.init)
        layer = model.decoder.layers[3]
        matrices = {
            "query": layer.attention.query,
            "key": layer.attention.key,
            "output": layer.attention.output,
            "up": layer.feedforward.up,
        }
        found = {
            name: module.weight.std().item()
            for name, module in (matrices | {"down": layer.feedforward.down, "head": model.head.output}).items()
        }
        return found | {"table": model.decoder.embed.table.weight.std().item()}

    near = lambda **expected: pytest.approx(expected, rel=0.05)  # noqa: E731
    assert begun({"kind": "normal", "std": 0.1}) == near(query=0.1, key=0.1, output=0.025, up=0.1, down=0.025, head=0.1, table=0.1)
    assert begun({"kind": "normal", "scaled": False}) == near(query=0.02, key=0.02, output=0.02, up=0.02, down=0.02, head=0.02, table=0.02)
    glorot = lambda *sizes: math.sqrt(2 / sum(sizes))  # noqa: E731  (the standard deviation of U(−√(6/n), √(6/n)))
    square, oblong = glorot(128, 128), glorot(128, 256)
    assert begun("xavier") == near(query=square, key=square, output=square, up=oblong, down=oblong, head=glorot(128, 500), table=128**-0.5)
    fan = {
        "query": (128 * 32) ** -0.5,
        "key": 128**-0.5,
        "output": 128**-0.5,
        "up": 128**-0.5,
        "down": 256**-0.5,
        "head": 1.0,
        "table": 1.0,
    }
    assert begun("fan-in") == near(**fan)


DROPPED = [
    kinds.decoder(embed={"dropout": 0.5}),
    kinds.decoder(core={"dropout": 0.5}),
    *(kinds.decoder(residual={"kind": kind, "dropout": 0.5}) for kind in SLOTS["residual"].kinds),
    kinds.decoder(feedforward={"kind": "mlp", "hidden": 9, "dropout": 0.5}),
    kinds.decoder(feedforward={"kind": "gated", "hidden": 9, "dropout": 0.5}),
    kinds.recurrent(source=False, dropout=0.5),
    kinds.recurrent(source=False, dropout=0.5, layers=2, cell="lstm"),
    kinds.ngram(dropout=0.5),
    read_model({"vocab": kinds.VOCAB, "encoder": kinds.tower(), "head": {"kind": "classes", "dropout": 0.5}}),
]


@pytest.mark.parametrize("spec", DROPPED, ids=range(len(DROPPED)))
def test_dropout_drops_in_training_only(spec):
    model = made(spec)
    assert torch.equal(model(tokens()), model(tokens()))
    model.train()
    assert not torch.equal(model(tokens()), model(tokens()))


def test_tables_of_positions_are_shared_or_not():
    def tables(**position):
        return [name for name, _ in made(kinds.decoder(layers=3, position=position)).named_parameters() if "position" in name]

    assert tables(kind="bucketed") == ["decoder.positions.0.table.weight"]
    own = [f"decoder.layers.{i}.position.table.weight" for i in range(3)]
    assert tables(kind="bucketed", shared=False) == tables(kind="shaw") == tables(kind="clipped") == own


def test_query_and_key_norms_come_before_the_rotation():
    model = made(
        kinds.decoder(layers=1, position="rope", attention={"query_key_norm": "rms"}, residual="none", norm="none", feedforward="none")
    )
    attention, seen = model.decoder.layers[0].attention, []
    attention.core.register_forward_hook(lambda core, args, kwargs, out: seen.append(args[0]), with_kwargs=True)
    model(tokens())
    q = attention.query_norm(attention.query(model.decoder.embed.table(tokens())))
    here, rope = torch.arange(kinds.LENGTH)[None], model.decoder.position(0)
    close(seen[0], rope.rotate_query(q, rope.plan(Places(here, here), torch.float64)))


def test_layers_of_a_pattern_have_their_own_masks_and_cross_attention_its_own_parts():
    model = made(kinds.decoder(layers=2, pattern=[{"mask": {"window": 1}}, {}]))
    seen = []
    for layer in model.decoder.layers:
        layer.attention.core.register_forward_hook(
            lambda c, args, kwargs, out: seen.append(c.weights(*args[:2], **kwargs)), with_kwargs=True
        )
    model(tokens())
    assert (seen[0].tril(-1) == 0).all()
    assert (seen[1].tril() > 0).any(dim=-1).all()
    assert (seen[1].tril(-1) > 0).any()
    spec = read_model(
        {"vocab": 9, "encoder": kinds.tower(), "decoder": kinds.tower(cross={"attention": {"heads": 4, "size": 6}, "core": "argmax"})}
    )
    cross = build(spec).decoder.layers[0].cross
    assert cross.query.weight.shape == (24, 16)
    assert type(cross.core).__name__ == "Argmax"


def test_each_side_has_its_own_vocabulary():
    for shape in ({"encoder": {}, "decoder": {"cross": True}}, {"recurrent": {}}):
        model = outline(read_model({"vocab": 9, "source_vocab": 5, **shape}))
        assert model.encoder.embed.table.num_embeddings == 5
        assert model.table.shape[0] == 9


def test_patches_and_what_is_restored():
    spec = read_model(
        {
            "encoder": kinds.tower(
                layers=0,
                final_norm="none",
                embed={"kind": "patches", "pixels": 3, "first": True},
                position={"kind": "learned", "length": 9},
            ),
            "head": "none",
        }
    )
    model, picture = made(spec), torch.randn(1, 4, 3, **torch_double)
    own = model.encoder.embed
    expected = torch.cat((own.first[0], own.project(picture[0]))) + own.position.table.weight[:5]
    close(model(picture)[0], expected)
    tower = kinds.tower(layers=0, final_norm="none", embed={"kind": "patches", "pixels": 3})
    model = made(read_model({"encoder": tower, "decoder": tower | {"embed": "restored", "mask": {"causal": False}}, "head": "none"}))
    restored, where = model.decoder.embed, torch.tensor([[2, 0]])
    found = model(Inputs(picture), Inputs(picture[:, :2], positions=where))[0]
    states = restored.project(model.encoder.embed.project(picture[0, :2]))
    close(found, torch.stack((states[1], restored.hidden[0, 0], states[0], restored.hidden[0, 0])))


def test_a_learned_temperature_begins_at_its_value():
    model = build(read_model({"vocab": 9, "decoder": kinds.tower(), "head": {"kind": "free", "temperature": "root", "learned": True}}))
    assert model.head.beta.item() == 0.25


def test_schemes_go_by_what_a_matrix_is_for():
    """A head's own transform is no table of rows; chunked heads are projections too; a stream with cross-attention has three terms a layer."""
    tower = {"layers": 4, "width": 128, "attention": {"kind": "chunked", "heads": 2}}

    def begun(init, **more):
        return build(read_model({"vocab": 300, "encoder": tower, "init": init, **more}))

    masked = begun("fan-in", head={"kind": "masked", "scores": "free"})
    assert masked.head.project.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert masked.head.scores.output.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert begun({"std": 0.05}).encoder.layers[0].attention.key.weight.std().item() == pytest.approx(0.05, rel=0.05)
    pair = begun({"std": 0.1}, decoder={"like": "encoder", "cross": True})
    assert pair.decoder.layers[0].feedforward.down.weight.std().item() == pytest.approx(0.1 / math.sqrt(12), rel=0.05)
    assert pair.encoder.layers[0].feedforward.down.weight.std().item() == pytest.approx(0.1 / math.sqrt(8), rel=0.05)


def test_a_document_that_begins_with_padding_begins_at_position_0():
    model = made(kinds.decoder(position={"kind": "learned", "length": 5}))
    ids, segments = tokens(1, 5), torch.tensor([[1, 1, 2, 2, 2]])
    padding = torch.tensor([[False, False, True, False, False]])
    close(model(Inputs(ids, segments=segments, padding=padding))[:, 3:], model(ids[:, 3:]))


def test_layers_with_a_prefix_and_without_in_one_tower():
    model, ids, prefix = made(kinds.decoder(pattern=[{"mask": {"prefix": True}}, {}])), tokens(), torch.tensor([4, 2])
    full = model(Inputs(ids, prefix=prefix))
    _, state = model.step(Inputs(ids[:, :6], prefix=prefix), model.start())
    close(model.step(ids[:, 6:], state)[0], full[:, 6:])


def test_the_form_of_a_mask_hides_what_its_matrix_hides():
    """For any part of a text, cut or not: 'open' and 'causal' only where the dense matrix says the same."""
    for queries, keys, offset, first, window, causal in itertools.product(
        (1, 3, 5), (1, 4, 5), (0, 2, 9), (0, 2), (None, 1, 3, 8), (False, True)
    ):
        mask = Mask(queries, keys, torch.device("cpu"), offset=offset, first=first, window=window, causal=causal)
        seen = torch.ones(queries, keys, dtype=torch.bool) if mask.dense is None else mask.dense[0, 0]
        if mask.form == "open":
            assert seen.all(), mask
        elif mask.form == "causal":
            assert torch.equal(seen, torch.ones(queries, keys, dtype=torch.bool).tril()), mask


def test_segments_hold_over_steps():
    model = made(kinds.decoder(position={"kind": "learned", "length": 5}))
    ids, segments = tokens(), torch.arange(kinds.LENGTH).div(4, rounding_mode="floor").expand(2, -1)
    full = model(Inputs(ids, segments=segments))
    _, state = model.step(Inputs(ids[:, :6], segments=segments[:, :6]), model.start())
    close(model.step(Inputs(ids[:, 6:], segments=segments[:, 6:]), state)[0], full[:, 6:])


def test_building_draws_no_number_from_outside():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    build(kinds.decoder(), seed=3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_every_kind_has_its_formula_here():
    for slot, base in SLOTS.items():
        built_in = {kind for kind, part in base.kinds.items() if part.__module__.startswith(("manyheads.parts", "manyheads.model"))}
        assert built_in <= CHECKED.get(slot, set()), f"{slot}: {built_in - CHECKED.get(slot, set())} has no formula in this file"


def from_zero(queries, keys):
    return Places(torch.arange(queries)[None], torch.arange(keys)[None])


def test_scale_and_temperature_hold_together():
    assert CoreSpec.choose({"kind": "dot", "scale": 0.75, "temperature": 3.0}).build(1, 4, 4).scale == 0.25


def test_argmax_learns_by_the_scaled_softmax():
    """Straight-through: the gradient is that of softmax(q·k/√K)."""
    core = CoreSpec.choose("argmax").build(1, 4, 4)
    q, k, pull = (torch.randn(1, 1, n, m, **torch_double) for n, m in ((5, 4), (7, 4), (5, 7)))
    q.requires_grad_()
    hard = core.weights(q, k, mask=Mask(5, 7, q.device), places=from_zero(5, 7))
    soft = torch.softmax(q @ k.transpose(-1, -2) / 2, dim=-1)
    close(*(torch.autograd.grad((weights * pull).sum(), q)[0] for weights in (hard, soft)))


def test_what_is_computed_at_once_stays_within_its_limit(monkeypatch):
    """Every row of the batch counts, and every number that one score needs."""
    monkeypatch.setattr("manyheads.parts.mask.DENSE_LIMIT", 200)
    segments = torch.zeros(4, 10, dtype=torch.long)
    mask = Mask(10, 10, segments.device, segments=(segments, segments))
    assert mask.form == "blocks"
    assert all(part.dense.numel() <= 200 for _, _, part in mask.blocks())
    monkeypatch.setattr("manyheads.parts.attend.LITERAL_LIMIT", 2000)
    core, q = CoreSpec.choose({"kind": "additive", "size": 5}).build(2, 4, 4), torch.randn(4, 2, 10, 4)
    for _, _, part in core.blocks(q, core.key(q), Mask(10, 10, q.device)):
        assert core.scores(q[:, :, : part.queries], core.key(q), from_zero(part.queries, 10)).numel() * 5 <= 2000


def test_sinusoids_of_another_base():
    table = SLOTS["position"].choose({"kind": "sinusoidal", "theta": 100.0}).build_embed(4).table(torch.arange(9)[None], torch.float64)[0]
    for t, i in itertools.product(range(9), range(2)):
        close(table[t, 2 * i], torch.tensor(math.sin(t / 100 ** (2 * i / 4)), **torch_double))


def test_yarn_blends_between_its_borders():
    """ω·(1 − r) + ω/s·r with r rising from 0 to 1 between the pairs that turn `fast` and `slow` times within T."""
    size, theta, length = 32, 100.0, 1000
    pair = lambda turns: size * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))  # noqa: E731
    for truncate in (True, False):
        spec = SLOTS["scaling"].choose({"kind": "yarn", "factor": 4.0, "length": length, "fast": 40.0, "slow": 7.0, "truncate": truncate})
        found = spec.frequencies(theta, size, torch.tensor(9))
        low, high = pair(40.0), pair(7.0)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        for i in range(size // 2):
            w, r = theta ** (-2 * i / size), min(1.0, max(0.0, (i - low) / (high - low)))
            assert found[i].item() == pytest.approx(w * (1 - r) + w / 4 * r)


def test_longrope_is_short_up_to_the_length_trained_on():
    spec = SLOTS["scaling"].choose({"kind": "longrope", "short": [2.0], "long": [5.0], "length": 6})
    for length, factor in ((5, 2.0), (6, 2.0), (7, 5.0)):
        assert spec.frequencies(10000.0, 2, torch.tensor(length)).item() == 1 / factor


def test_biases_are_there_where_they_are_asked_for():
    for bias, output_bias in itertools.product((True, False), repeat=2):
        own = SLOTS["attention"].choose({"kind": "heads", "heads": 2, "bias": bias, "output_bias": output_bias}).build(8, DotSpec())
        assert [part.bias is not None for part in (own.query, own.key, own.value, own.output)] == [bias] * 3 + [output_bias]
        assert (SLOTS["norm"].choose({"kind": "layer", "bias": bias}).build(8).bias is not None) == bias


@pytest.mark.parametrize("width", range(1, 20))
def test_the_gated_hidden_size_is_eight_thirds_rounded_up(width):
    hidden = SLOTS["feedforward"].choose("gated").build(width).up.out_features
    assert hidden % 8 == 0
    assert hidden - 8 < 8 * width / 3 <= hidden


def pictures(dropout=0.0, init="normal"):
    tower = kinds.tower(embed={"kind": "patches", "pixels": 3, "first": True, "dropout": dropout})
    restored = kinds.tower(embed={"kind": "restored"}, mask={"causal": False})
    return read_model({"encoder": tower, "decoder": restored, "head": {"kind": "pixels", "pixels": 3}, "init": init})


def test_patches_are_dropped_in_training_only():
    embed = made(pictures(dropout=0.5)).encoder.embed
    given = Inputs(torch.randn(2, 4, 3, **torch_double))
    run = lambda: embed(given, from_zero(4, 4), table=None, memory=None)  # noqa: E731
    assert torch.equal(run(), run())
    embed.train()
    assert not torch.equal(run(), run())


def test_learned_vectors_begin_near_zero_but_not_at_it():
    tower = {"width": 2048, "layers": 0}
    patches, restored = {"kind": "patches", "first": True}, {"kind": "restored"}
    spec = read_model({"encoder": tower | {"embed": patches}, "decoder": tower | {"embed": restored}, "head": "pixels"})
    model = outline(spec).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        initialise(model, spec.init)
    for vector in (model.encoder.embed.first, model.decoder.embed.hidden):
        assert vector.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_tied_head_reads_the_tokens_share_of_a_concatenated_vector():
    """[x, p]: the token's share comes first, and the head scores it alone."""
    model = made(kinds.decoder(position={"kind": "sinusoidal", "join": "concat", "size": 5}))
    h, _ = model.states(tokens())
    close(model(tokens()), h[..., :11] @ model.table.T)


def test_neighbours_share_a_layer_and_its_positions():
    stack = made(kinds.decoder(layers=4, distinct=2, position={"kind": "clipped", "clip": 3})).decoder
    assert [list(stack.layers).index(stack.layer(i)) for i in range(4)] == [0, 0, 1, 1]
    assert all(stack.position(i) is stack.layer(i).position for i in range(4))


def test_xavier_is_uniform_fan_in_has_a_factor_and_biases_begin_at_zero():
    def begun(init):
        return build(kinds.decoder(layers=1, width=64).changed(init=init)).decoder.layers[0]

    up = begun("xavier").feedforward.up.weight
    assert up.abs().max().item() <= math.sqrt(6 / sum(up.shape))
    one, three = (begun({"kind": "fan-in", "factor": factor}) for factor in (1.0, 3.0))
    close(three.attention.key.weight, 3 * one.attention.key.weight)
    for init in SLOTS["init"].kinds:
        assert all((bias == 0).all() for name, bias in begun(init).named_parameters() if name.endswith(".bias"))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_cells_are_stacked_and_the_highest_is_read(cell):
    model, ids = made(kinds.recurrent(source=False, layers=2, cell=cell)), tokens(1, 4)
    x, states = model.embed.table(ids[0]), [None, None]
    for t, logits in enumerate(model(ids)[0]):
        y = x[t : t + 1]
        for i, layer in enumerate(model.cells):
            states[i] = layer.cell(y, states[i])
            y = states[i] if cell == "gru" else states[i][0]
        close(logits, y[0] @ model.table.T)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_reader_drops_between_its_layers_in_training_only(cell):
    reader = made(kinds.recurrent(layers=2, cell=cell, dropout=0.5)).encoder
    assert torch.equal(reader(Inputs(tokens()))[1], reader(Inputs(tokens()))[1])
    reader.train()
    assert not torch.equal(reader(Inputs(tokens()))[1], reader(Inputs(tokens()))[1])


def test_a_cut_of_a_mask_is_the_mask_cut():
    """Also where no model cuts today: columns past the first under a prefix."""
    mask = Mask(8, 8, torch.device("cpu"), causal=True, window=3, prefix_B=torch.tensor([4, 1]))
    rows, columns = slice(1, 6), slice(2, 7)
    assert torch.equal(mask.cut(rows, columns).dense, mask.dense[:, :, rows, columns])
