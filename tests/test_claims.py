"""The claims of the source documents, row by row.

A attention, B masks, C heads, D positions, E recurrent, F blocks, G shapes, H objectives, J loss shaping, O tasks.

Each test is named for its row. Tolerances: float64 1e-10, float32 1e-5, unless the row says otherwise.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from html.parser import HTMLParser

import kinds
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from baselines import unigram_entropy
from hypothesis import given
from hypothesis import strategies as st
from kinds import LENGTH, choices, made, named, tokens
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads import Inputs, build, read_model
from manyheads.data.links import arcs
from manyheads.data.tokens import TokenizerSpec
from manyheads.inspect.page import attention_page
from manyheads.objective.language import CausalSpec, InfillSpec, MaskedSpec
from manyheads.objective.pooled import PatchesSpec
from manyheads.objective.score import NOTHING, Batch, Tokens
from manyheads.objective.shaping import Look, Place, ShapingSpec, shaped, total
from manyheads.parts.attend import ArgmaxSpec, BilinearSpec, CoreSpec, DotSpec, FusedSpec, ProjectedSpec, check_rows, inverse_root, score
from manyheads.parts.attention import ChunkedSpec, HeadsSpec, KeyValue, Scene, WideSpec, fused_weight, split_weight
from manyheads.parts.feedforward import ACTIVATIONS, GatedSpec, MlpSpec
from manyheads.parts.mask import Mask, MaskSpec
from manyheads.parts.norm import LayerNormSpec
from manyheads.parts.position import AlibiSpec, ClippedSpec, LearnedSpec, Places, Position, SinusoidalSpec
from manyheads.parts.record import Attended, record
from manyheads.parts.residual import NoResidualSpec, PreSpec
from manyheads.parts.rope import RopeSpec
from manyheads.parts.statistics import statistics
from manyheads.spec import SLOTS, SpecError
from manyheads.train.loop import train as train_run
from manyheads.train.run import made_ready, read_run

CPU = torch.device("cpu")
sizes = st.integers(1, 6)
seeds = st.integers(0, 10_000)


def open_mask(queries, keys, **options):
    return Mask(queries, keys, CPU, **options)


def places(queries, keys):
    return Places(torch.arange(queries)[None], torch.arange(keys)[None])


def attend(core, q, k, v=None, **mask):
    """One head of a core on plain vectors L×d, M×d: the output, or with v=None the weights."""
    circumstances = {"mask": open_mask(len(q), len(k), **mask), "places": places(len(q), len(k))}
    if v is None:
        return core.weights(q[None, None], k[None, None], **circumstances)[0, 0]
    return core(q[None, None], k[None, None], v[None, None], **circumstances)[0, 0]


def plain(size, dtype=torch.float64):
    """softmax(q·k) v, unscaled."""
    return DotSpec(scale=1.0).build(1, size, size).to(dtype)


def orthonormal(count, size):
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q[:count]


# ------------------------------------------------------------------------------------------ A: attention as an operation


@given(queries=sizes, keys=sizes, size=sizes, seed=seeds, core=st.sampled_from(choices("core")))
def test_a1_attention_is_a_distribution_and_a_mean(queries, keys, size, seed, core):
    torch.manual_seed(seed)
    spec = SLOTS["core"].choose(core)
    width = {"head": size, "memory": size, "none": 0}
    module = spec.build(2, width[spec.query], {"head": size, "raw": size, "none": 0}[spec.key]).double().eval()
    q = torch.randn(1, 2, queries, width[spec.query], dtype=torch.float64)
    k = torch.randn(1, 2, keys, 0 if spec.key == "none" else size, dtype=torch.float64)
    v = torch.randn(1, 2, keys, size, dtype=torch.float64)
    circumstances = {"mask": open_mask(queries, keys), "places": places(queries, keys)}
    k = module.key(k)
    weights, out = module.weights(q, k, **circumstances), module(q, k, v, **circumstances)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, queries, dtype=torch.float64), rtol=0, atol=1e-6)
    low, high = v.amin(dim=2, keepdim=True), v.amax(dim=2, keepdim=True)
    assert ((out >= low - 1e-9) & (out <= high + 1e-9)).all()


@pytest.mark.parametrize("size", [16, 64, 256, 1024])
def test_a2_scaled_scores_have_variance_one(size):
    q, k = torch.randn(2, 1, 1, 1000, size)
    here = places(1000, 1000)
    scaled = DotSpec().build(1, size, size).scores(q, k, here)
    unscaled = DotSpec(scale=1.0).build(1, size, size).scores(q, k, here)
    assert scaled.var().item() == pytest.approx(1, rel=0.05)
    assert unscaled.var().item() == pytest.approx(size, rel=0.05)


def test_a3_scores_are_batch_by_length_by_length_and_a_wrong_axis_is_named():
    x = torch.randn(3, 1, 5, 8)
    core = DotSpec().build(1, 8, 8)
    weights = core.weights(x, x, mask=open_mask(5, 5), places=places(5, 5))
    expected = torch.softmax(torch.bmm(x[:, 0], x[:, 0].transpose(1, 2)) / math.sqrt(8), dim=-1)
    torch.testing.assert_close(weights[:, 0], expected)
    with pytest.raises(ValueError, match=r"\(3, 1, 5, 8\).*\(3, 1, 8, 5\)"):
        core(x, x.transpose(2, 3), x, mask=open_mask(5, 5), places=places(5, 5))
    with pytest.raises(ValueError, match=r"8 in.*|has 8.*has 5"):
        core(x, torch.randn(3, 1, 5, 5), x, mask=open_mask(5, 5), places=places(5, 5))


def test_a4_a_strong_query_copies():
    n, keys, values = 7, orthonormal(7, 12), torch.randn(7, 5, dtype=torch.float64)
    for j in range(n):
        spread = (values - values[j]).norm(dim=-1).max()
        errors = []
        for s in (1.0, 5.0, 10.0, 20.0):
            error = (attend(plain(12), s * keys[j : j + 1], keys, values) - values[j]).norm()
            assert error <= (n - 1) * math.exp(-s) * spread + 1e-12
            errors.append(error.item())
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 1e-6


@given(count=st.integers(1, 6), s=st.floats(0.5, 15), seed=seeds)
def test_a5_a6_a_query_for_a_subset_averages_it(count, s, seed):
    torch.manual_seed(seed)
    n, keys = 6, orthonormal(6, 9)
    subset = torch.randperm(n)[:count]
    weights = attend(plain(9), s * keys[subset].sum(0, keepdim=True), keys)[0]
    expected = 1 / (count + (n - count) * math.exp(-s))
    torch.testing.assert_close(weights[subset], torch.full((count,), expected, dtype=torch.float64), rtol=0, atol=1e-6)


def noisy_keys(draws, *, n=10, size=10, along_first=0.0, alpha=1e-8):
    """μ orthonormal; k_i ~ N(μ_i, αI), and k_a with ½ μ_a μ_aᵀ more, as the assignment has it."""
    means = orthonormal(n, size)
    keys = means + alpha**0.5 * torch.randn(draws, n, size, dtype=torch.float64)
    keys[:, 0] += along_first**0.5 * torch.randn(draws, 1, dtype=torch.float64) * means[0]
    return means, keys


def attend_many(q, keys, values):
    """The same query on many draws of the keys: batch × 1 × size."""
    draws, n, size = keys.shape
    core = plain(size)
    return core(
        q.expand(draws, 1, 1, size), keys[:, None], values.expand(draws, 1, n, -1), mask=open_mask(1, n), places=places(1, n)
    )[:, 0, 0]  # fmt: skip


def test_a7_tiny_noise_in_the_keys_is_harmless():
    means, keys = noisy_keys(1000)
    values = torch.randn(10, 10, dtype=torch.float64)
    half = (values[0] + values[1]) / 2
    error = (attend_many(40 * (means[0] + means[1]), keys, values) - half).norm(dim=-1) / half.norm()
    assert (error < 1e-2).double().mean() >= 0.99


def test_a8_a9_one_head_swings_and_two_heads_stay():
    means, keys = noisy_keys(4000, along_first=0.5)
    values = torch.randn(10, 10, dtype=torch.float64)
    s, (v_a, v_b) = 40, values[:2]
    half, gap = (v_a + v_b) / 2, (v_a - v_b).norm()
    one = s * (means[0] + means[1])
    keys = keys[(keys[:, 0] @ one) > 0]
    weights = torch.softmax(keys @ one, dim=-1)
    assert (weights[:, :2].max(dim=-1).values > 0.95).double().mean() >= 0.85
    single = attend_many(one, keys, values)
    assert ((single - half).norm(dim=-1) / gap).median() >= 0.45
    double = (attend_many(s * means[0], keys, values) + attend_many(s * means[1], keys, values)) / 2
    errors = (double - half).norm(dim=-1) / gap
    assert errors.median() < 1e-6
    assert errors.quantile(0.95) < 1e-2


def lecture_vectors(beta=10.0):
    a, b, c, d = beta * orthonormal(4, 4)
    return a, b, c, d, torch.stack((d + b, a, c + b))


def test_a10_plain_self_attention_cannot_fetch_what_is_not_there():
    beta = 10.0
    a, b, c, d, x = lecture_vectors(beta)
    torch.testing.assert_close(attend(plain(4), x, x, x)[1], a, rtol=0, atol=1e-6)
    for added in (d, c):
        changed = x.clone()
        changed[1] = a + added
        found = attend(plain(4), changed, changed, changed)[1]
        assert (found - b).norm() > 1.5 * beta
        torch.testing.assert_close(found, changed[1], rtol=0, atol=1e-6)


def test_a11_query_key_value_attention_can():
    beta = 10.0
    a, b, c, d, x = lecture_vectors(beta)
    value = (torch.outer(b, b) - torch.outer(c, c)) / beta**2
    query = (torch.outer(d, a) + torch.outer(c, d)) / beta**2
    out = attend(plain(4), x @ query.T, x, x @ value.T)
    torch.testing.assert_close(out[1], b, rtol=0, atol=1e-6)
    torch.testing.assert_close(out[0], b - c, rtol=0, atol=1e-6)
    # and gradient descent finds matrices that do the same
    wanted = torch.stack((b - c, b))
    learned = [nn.Parameter(0.1 * torch.randn(4, 4, dtype=torch.float64)) for _ in range(2)]
    optimiser = torch.optim.Adam(learned, lr=0.02)
    for _ in range(1500):
        loss = (attend(plain(4), x @ learned[0].T, x, x @ learned[1].T)[:2] - wanted).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 1e-2 * beta**2 * 1e-2


class Cells(HTMLParser):
    """A page's table as a reader sees it: headings, and each row's cells with their classes."""

    def __init__(self):
        super().__init__()
        self.rows, self.headings, self.tag = [], [], None

    def handle_starttag(self, tag, attrs):
        self.tag = tag
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append(dict(attrs) | {"text": ""})

    def handle_data(self, data):
        if self.tag == "th" and data.strip():
            self.headings.append(data)
        elif self.tag == "td" and data.strip():
            self.rows[-1][-1]["text"] = data


def test_a12_the_printed_matrix_renders_and_aligns():
    words = torch.tensor([[0.91, 0.04, 0.05], [0.03, 0.10, 0.87], [0.09, 0.88, 0.03]])
    check_rows(words)
    page = Cells()
    page.feed(attention_page(words, ["kediler", "fareleri", "kovalar"], ["cats", "chase", "mice"]))
    assert page.headings == ["cats", "chase", "mice", "kediler", "fareleri", "kovalar"]
    cells = [row for row in page.rows if row]
    assert [[float(cell["text"]) for cell in row] for row in cells] == [[0.91, 0.04, 0.05], [0.03, 0.10, 0.87], [0.09, 0.88, 0.03]]
    assert [[j for j, cell in enumerate(row) if "highest" in cell["class"]] for row in cells] == [[0], [2], [1]]


def test_a_page_shows_what_is_hidden_and_runs_nothing_it_was_given():
    weights, seen = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[True, False], [True, True]])
    text = attention_page(weights, ["<script>x</script>", "b"], ['"a', "b"], seen_LM=seen, title="<b>")
    page = Cells()
    page.feed(text)
    assert [["hidden" in cell["class"] for cell in row] for row in page.rows if row] == [[False, True], [False, False]]
    assert "<script>" not in text
    with pytest.raises(ValueError, match=r"weights has shape \(2, 2\), expected \(3, 2\)"):
        attention_page(weights, ["a", "b", "c"], ["a", "b"])


def scene(queries, keys, position=None, **mask):
    return Scene(position or Position(), None, open_mask(queries, keys, **mask), places(queries, keys))


def test_a13_self_attention_is_attention_with_one_sequence():
    model = made(kinds.encoder())
    attention = model.encoder.layers[0].attention
    x = torch.randn(2, 5, kinds.WIDTH, dtype=torch.float64)
    here = scene(5, 5)
    own = attention(x, attention.memory(x, here), here)
    captured = []
    attention.register_forward_hook(lambda module, args, kwargs, output: captured.append(output), with_kwargs=True)
    model.encoder.layers[0].attend(x, here, kinds_uncached())
    assert torch.equal(captured[0], own)


def kinds_uncached():
    from manyheads.model.state import Uncached

    return Uncached()


def test_a14_argmax_rows_are_one_hot_ties_go_first_and_it_learns():
    core = ArgmaxSpec().build(2, 4, 4)
    q, k, v = (torch.randn(2, 2, 6, 4, requires_grad=True) for _ in range(3))
    weights = core.weights(q, k, mask=open_mask(6, 6, causal=True), places=places(6, 6))
    assert set(weights.unique().tolist()) == {0.0, 1.0}
    assert (weights.sum(-1) == 1).all()
    tied = core.weights(q, k[:, :, :1].expand(-1, -1, 6, -1), mask=open_mask(6, 6), places=places(6, 6))
    assert (tied[..., 0] == 1).all()
    core(q, k, v, mask=open_mask(6, 6), places=places(6, 6)).square().sum().backward()
    assert q.grad.abs().sum() > 0
    assert k.grad.abs().sum() > 0
    mixed = ArgmaxSpec(heads=(1,)).build(2, 4, 4).weights(q, k, mask=open_mask(6, 6), places=places(6, 6))
    assert ((mixed[:, 0] > 0) & (mixed[:, 0] < 1)).all()
    assert set(mixed[:, 1].unique().tolist()) == {0.0, 1.0}
    with pytest.raises(SpecError, match="no head 2 among 2"):
        ArgmaxSpec(heads=(2,)).build(2, 4, 4)


def pointing(pointers, length):
    """A causal stack of argmax layers whose head h of layer l points `pointers[l][h]` back, set through relative biases."""
    heads = len(pointers[0])
    spec = read_model(
        {
            "vocab": 3,
            "decoder": {
                "layers": len(pointers), "width": 4 * heads, "attention": {"heads": heads}, "core": "argmax", "mask": {"causal": True},
                "position": {"kind": "relative", "length": length}, "feedforward": "none", "norm": "none", "residual": "pre",
            },
            "head": "none",
        }
    )  # fmt: skip
    model = build(spec, dtype=torch.float64).eval()
    with torch.no_grad():
        for layer, steps in zip(model.decoder.layers, pointers, strict=True):
            position = layer.position
            for projection in (layer.attention.query, layer.attention.key):
                projection.weight.zero_()
                projection.bias.zero_()
            for projection in (layer.attention.value, layer.attention.output):
                nn.init.normal_(projection.weight)
            position.table.weight.zero_()
            for head, step in enumerate(steps):
                position.table.weight[length - 1 - step, head] = 9.0
        nn.init.normal_(model.decoder.embed.table.weight)
    return model


def receptive_field(model, length, place):
    """By perturbation: the positions whose change changes the output at `place`."""
    ids = torch.zeros(1, length, dtype=torch.long)
    with torch.no_grad():
        before = model(ids)[0, place]
        changed = ids.repeat(length, 1) + torch.eye(length, dtype=torch.long)
        return {j for j, after in enumerate(model(changed)[:, place]) if not torch.equal(before, after)}


@pytest.mark.parametrize(("k", "n"), list(itertools.product((1, 2, 3), repeat=2)))
def test_a15_argmax_reaches_k_plus_one_to_the_n(k, n):
    length = (k + 1) ** n
    model = pointing([[h * (k + 1) ** layer for h in range(1, k + 1)] for layer in range(n)], length)
    assert receptive_field(model, length, length - 1) == set(range(length))


@given(k=st.integers(1, 3), n=st.integers(1, 3), seed=seeds)
def test_a16_the_measured_field_is_the_pointer_graph(k, n, seed):
    generator = torch.Generator().manual_seed(seed)
    length, place = 12, 11
    pointers = [torch.randint(0, 4, (k,), generator=generator).tolist() for _ in range(n)]
    model = pointing(pointers, length)
    reached = {place}
    for steps in reversed(pointers):
        reached |= {i - step for i in reached for step in steps}
    reached = {i for i in reached if i >= 0}
    measured = receptive_field(model, length, place)
    assert measured == reached
    assert len(measured) <= min((k + 1) ** n, length, place + 1)


def fused_pair(dtype, width=12, heads=3):
    """Separate query and key projections without biases, and the fused attention made from them."""
    separate = HeadsSpec(heads=heads, bias=False).build(width, DotSpec()).to(dtype)
    fused = HeadsSpec(heads=heads, bias=False).build(width, FusedSpec()).to(dtype)
    with torch.no_grad():
        fused.query.weight.copy_(fused_weight(separate.query.weight, separate.key.weight, heads))
    return separate, fused


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("causal", [False, True])
def test_a17_the_fused_matrix_gives_the_same_attention(dtype, tolerance, causal):
    separate, fused = fused_pair(dtype)
    x, here = torch.randn(2, 6, 12, dtype=dtype), scene(6, 6, causal=causal)
    weights = [a.core.weights(a.query(x), a.key(x), mask=here.mask, places=here.places) for a in (separate, fused)]
    assert weights[0].shape == (2, 3, 6, 6)
    assert (weights[0] - weights[1]).abs().max() <= tolerance


@given(heads=st.integers(1, 6), size=st.integers(1, 8))
def test_a18_parameters_of_fused_and_separate(heads, size):
    width = heads * size
    separate = HeadsSpec(heads=heads, bias=False).build(width, DotSpec())
    fused = HeadsSpec(heads=heads, bias=False).build(width, FusedSpec())

    def scoring(attention):
        return sum(p.numel() for part in (attention.query, attention.key, attention.core) for p in part.parameters())

    assert scoring(separate) == 2 * heads * size * width
    assert scoring(fused) == heads * width**2
    assert scoring(fused) * 2 == scoring(separate) * heads
    if heads == 2:
        assert scoring(fused) == scoring(separate)


def test_a19_fused_is_trainable_and_splits_again_while_its_rank_allows():
    _separate, fused = fused_pair(torch.float64)
    ranks = torch.linalg.matrix_rank(fused.query.weight.unflatten(0, (3, -1)))
    assert (ranks <= 4).all()
    query, key = split_weight(fused.query.weight.detach(), 3, 4)
    torch.testing.assert_close(fused_weight(query, key, 3), fused.query.weight.detach())
    x, here = torch.randn(2, 6, 12, dtype=torch.float64), scene(6, 6)
    optimiser = torch.optim.SGD(fused.query.parameters(), lr=0.1)
    for step in range(3):
        target = torch.randn(2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimiser.zero_grad()
        (fused(x, fused.memory(x, here), here) - target).square().sum().backward()
        optimiser.step()
    ranks = torch.linalg.matrix_rank(fused.query.weight.unflatten(0, (3, -1)))
    assert (ranks > 4).any()
    with pytest.raises(ValueError, match=f"rank {int(ranks.max())} cannot be split into heads of size 4"):
        split_weight(fused.query.weight.detach(), 3, 4)


def test_a20_heads_without_parameters_of_their_own_are_one_head():
    x = torch.randn(2, 1, 5, 8).expand(-1, 4, -1, -1)
    weights = DotSpec().build(4, 8, 8).weights(x, x, mask=open_mask(5, 5), places=places(5, 5))
    assert (weights - weights[:, :1]).abs().max() == 0


@given(seed=seeds)
def test_a21_a_bias_before_the_softmax_is_a_factor_after_the_exponential(seed):
    torch.manual_seed(seed)
    q, k = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64)
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    found = DotSpec().build(2, 4, 4).weights(q, k, mask=open_mask(5, 5), places=places(5, 5), bias=bias)
    product = (q @ k.transpose(-1, -2) / 2).exp() * bias.exp()
    torch.testing.assert_close(found, product / product.sum(-1, keepdim=True), rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- B: masks


def test_b1_causal_rows_sum_to_one_and_the_future_is_exactly_zero():
    q, k = torch.randn(2, 2, 2, 6, 4)
    weights = DotSpec().build(2, 4, 4).weights(q, k, mask=open_mask(6, 6, causal=True), places=places(6, 6))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 6))
    assert (weights.triu(1) == 0.0).all()


def test_b2_multiplying_after_the_softmax_is_wrong_and_is_flagged():
    printed = torch.tensor([[0.91, 0.04, 0.05], [0.03, 0.74, 0.23], [0.01, 0.41, 0.58]])
    wrong = printed * torch.ones(3, 3).tril()
    torch.testing.assert_close(wrong.sum(-1), torch.tensor([0.91, 0.77, 1.00]))
    with pytest.raises(ValueError, match=r"row \(0,\) sums to 0.91.*2 of 3 rows"):
        check_rows(wrong)
    masked = printed.log().masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf).softmax(-1)
    torch.testing.assert_close(masked, torch.tensor([[1, 0, 0], [0.039, 0.961, 0], [0.01, 0.41, 0.58]]), rtol=0, atol=1e-3)
    check_rows(masked)


@given(length=st.integers(2, 10), place=st.integers(0, 9), seed=seeds, data=st.data())
def test_b3_no_output_depends_on_a_later_token(length, place, seed, data):
    place %= length
    position = data.draw(st.sampled_from(choices("position")))
    core = data.draw(st.sampled_from([core for core in choices("core") if kinds.fits(position, core)]))
    residual = data.draw(st.sampled_from(choices("residual")))
    model = made(kinds.decoder(position=position, core=core, residual=residual), seed=seed)
    ids = tokens(1, length, seed=seed)
    other = ids.clone()
    other[0, place] = (other[0, place] + 1) % kinds.VOCAB
    assert torch.equal(model(ids)[:, :place], model(other)[:, :place])


def test_b4_padded_keys_weigh_nothing():
    model = made(kinds.encoder(position="rope"), torch.float32)
    ids = tokens()
    for side in ("left", "right"):
        given_inputs = kinds.padded(ids, (4, kinds.LENGTH), side, filler=7)
        weights = []

        def keep(core, args, kwargs, output, weights=weights):
            weights.append(core.weights(*args[:2], **kwargs))

        handles = [layer.attention.core.register_forward_hook(keep, with_kwargs=True) for layer in model.encoder.layers]
        out = model(given_inputs)
        for handle in handles:
            handle.remove()
        assert all((w.masked_select(given_inputs.padding[:, None, None]) == 0).all() for w in weights)
        torch.testing.assert_close(out[0, ~given_inputs.padding[0]], model(ids[:1, :4])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["fused", "literal", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_b5_a_row_that_sees_nothing_is_zeros_without_nan(backend, dtype):
    core = (DotSpec(softcap=5.0) if backend == "literal" else DotSpec()).build(2, 8, 8)
    q, k, v = (torch.randn(2, 2, 300, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    padding = torch.zeros(2, 300, dtype=torch.bool)
    padding[0] = True
    mask = open_mask(300, 300, padding_BM=padding, causal=True, window=9 if backend == "blocks" else None)
    assert (mask.form == "blocks") == (backend == "blocks")
    out = core(q, k, v, mask=mask, places=places(300, 300))
    assert (out[0] == 0).all()
    out.float().square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert all((x.grad[0] == 0).all() for x in (q, k, v))


def test_b7_the_decoder_is_causal_and_its_view_of_the_source_is_not():
    model = made(kinds.pair())
    source, target = tokens(1, 6), tokens(1, 5, seed=4)
    changed = source.clone()
    changed[0, -1] = (changed[0, -1] + 1) % kinds.VOCAB
    assert (model(target, source) != model(target, changed)).any(dim=-1).all(), "every target token may see the last source token"
    other = target.clone()
    other[0, -1] = (other[0, -1] + 1) % kinds.VOCAB
    assert torch.equal(model(target, source)[:, :-1], model(other, source)[:, :-1])


# ------------------------------------------------------------------------------------------------- C: many heads


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@given(heads=st.integers(1, 4), size=st.integers(1, 5), seed=seeds)
def test_c1_split_heads_are_torch_multi_head_attention(heads, size, seed):
    torch.manual_seed(seed)
    width = heads * size
    ours, theirs = HeadsSpec(heads=heads).build(width, DotSpec()), nn.MultiheadAttention(width, heads, batch_first=True)
    assert count(ours) == 4 * width**2 + 4 * width == count(theirs)
    with torch.no_grad():
        nn.init.normal_(theirs.in_proj_bias)
        for part, weight, bias in zip(
            (ours.query, ours.key, ours.value), theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True
        ):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
        ours.output.load_state_dict(theirs.out_proj.state_dict())
    x, memory, here = torch.randn(2, 4, width), torch.randn(2, 6, width), scene(4, 6)
    expected, _ = theirs(x, memory, memory)
    torch.testing.assert_close(ours(x, ours.memory(memory, here), here), expected, rtol=1e-5, atol=1e-5)


@given(heads=st.integers(1, 4), width=st.integers(1, 8))
def test_c2_wide_heads(heads, width):
    attention = WideSpec(heads=heads, bias=False, output_bias=False).build(width, DotSpec())
    assert count(attention) == 4 * heads * width**2
    x, here = torch.randn(1, 3, width), scene(3, 3)
    assert attention(x, attention.memory(x, here), here).shape == (1, 3, width)


@given(heads=st.integers(1, 4), size=st.integers(1, 5))
def test_c3_chunked_heads(heads, size):
    width = heads * size
    attention = ChunkedSpec(heads=heads, bias=False, output_bias=False).build(width, DotSpec())
    assert count(attention) == 3 * width**2 // heads + width**2
    x = torch.randn(1, 3, width)
    changed = x.clone()
    changed[..., -1] += 1
    assert torch.equal(attention.query(x)[:, :-1], attention.query(changed)[:, :-1]), "a head reads its own chunk only"


def test_c4_dropout_is_off_in_evaluation_and_keeps_the_mean_in_training():
    core = DotSpec(dropout=0.1).build(1, 8, 8)
    q, k, v = torch.randn(3, 1, 1, 16, 8).unbind(0)
    circumstances = {"mask": open_mask(16, 16), "places": places(16, 16)}
    steady = core.eval()(q, k, v.abs(), **circumstances)
    assert torch.equal(steady, core(q, k, v.abs(), **circumstances))
    core.train()
    mean = torch.stack([core(q, k, v.abs(), **circumstances) for _ in range(3000)]).mean(dim=0)
    torch.testing.assert_close(mean, steady, rtol=0.02, atol=0.02)
    residual = PreSpec(dropout=0.1).build(LayerNormSpec(), 8, 1)
    x = torch.ones(1, 4, 8)
    mean = torch.stack([residual(x, [torch.ones_like]) for _ in range(5000)]).mean(dim=0)
    torch.testing.assert_close(mean, 2 * x, rtol=0.02, atol=0)
    assert torch.equal(residual.eval()(x, [torch.ones_like]), 2 * x)


def test_c5_heads_that_do_not_divide_the_width_are_named_with_those_that_do():
    with pytest.raises(
        SpecError, match="encoder.attention.heads: 10 heads do not divide width 64; nearest that do: 8 or 16 heads, or width 60 or 70"
    ):
        read_model({"vocab": 5, "encoder": {"width": 64, "attention": {"heads": 10}}})
    with pytest.raises(SpecError, match="decoder.attention.groups: 3 key heads cannot be shared evenly by 4"):
        read_model({"vocab": 5, "decoder": {"width": 64, "attention": {"heads": 4, "groups": 3}}})


# --------------------------------------------------------------------------------------------------- D: positions


@given(length=st.integers(2, 9), seed=seeds, core=st.sampled_from([c for c in choices("core") if c["kind"] not in ("dense", "random")]))
def test_d1_without_position_and_mask_order_is_not_seen(length, seed, core):
    model = made(kinds.encoder(core=core), torch.float64, seed=seed)
    ids, order = tokens(1, length, seed=seed), torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(model(ids[:, order]), model(ids)[:, order], rtol=1e-5, atol=1e-5)


def test_d1_the_two_same_words_get_the_same_attention():
    model, ids = made(kinds.encoder(layers=1)), torch.tensor([[1, 2, 3, 4, 5, 1]])  # big … dog … big
    seen = []
    core = model.encoder.layers[0].attention.core
    core.register_forward_hook(lambda c, args, kwargs, out: seen.append(c.weights(*args[:2], **kwargs)), with_kwargs=True)
    model(ids)
    assert torch.equal(seen[0][..., 2, 0], seen[0][..., 2, 5])


def sinusoids(width, length, **options):
    return SinusoidalSpec(**options).build_embed(width).table(torch.arange(length)[None], torch.float64)[0]


def test_d3_sinusoids_follow_the_formula_and_never_repeat():
    table = sinusoids(8, 50)
    assert table[0].tolist() == [0, 1] * 4
    for t, i in itertools.product((1, 7, 49), range(4)):
        angle = t / 10000 ** (2 * i / 8)
        assert table[t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-12)
        assert table[t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)
    halves = sinusoids(8, 50, layout="halves")
    torch.testing.assert_close(halves, torch.cat((table[:, ::2], table[:, 1::2]), dim=-1))
    circle = sinusoids(2, 2000)
    distances = (circle[1:] - circle[0]).norm(dim=-1)
    assert distances.argmin().item() + 1 == 710
    assert distances.min().item() == pytest.approx(6.03e-5, rel=1e-3)
    wide = sinusoids(64, 2000)
    assert (torch.cdist(wide, wide) + 9 * torch.eye(2000)).min().item() == pytest.approx(1.47, abs=0.005)


def test_d4_the_product_of_two_sinusoids_depends_on_their_offset():
    gram = sinusoids(64, 300) @ sinusoids(64, 300).T
    for offset in range(300):
        diagonal = gram.diagonal(offset)
        assert (diagonal - diagonal[0]).abs().max() < 1e-9
    near, far = gram[0, :5], gram[0, 5:]  # beyond a few places the fall is no longer steady, but it never comes back
    assert (near.diff() < 0).all()
    assert far.max() < near.min(), "near positions have the higher product"


@pytest.mark.parametrize(("join", "terms"), [("add", 4), ("concat", 2)])
def test_d5_d6_added_has_four_terms_and_concatenated_two(join, terms):
    spec = SinusoidalSpec(join=join)
    width = 16
    w = torch.randn(1, 7, spec.token_width(width), dtype=torch.float64)
    x = spec.build_embed(width)(w, places(7, 7))[0]
    p = sinusoids(spec.position_width(width), 7)
    ww, wp, pw, pp = w[0] @ w[0].T, 0, 0, p @ p.T
    if terms == 4:
        wp, pw = w[0] @ p.T, p @ w[0].T
    torch.testing.assert_close(x @ x.T, ww + wp + pw + pp, rtol=0, atol=1e-6)
    only_words = torch.cat((w[0], torch.zeros_like(p)), -1) if join == "concat" else w[0]
    only_places = torch.cat((torch.zeros_like(w[0]), p), -1) if join == "concat" else p
    cross = only_words @ only_places.T
    assert (cross == 0).all() if join == "concat" else (cross != 0).any()


def test_d7_multiplied_positions_run_forward_backward_and_step_by_step():
    model = made(kinds.decoder(position={"kind": "sinusoidal", "join": "multiply"}))
    ids = tokens()
    model(ids).sum().backward()
    _, state = model.step(ids[:, :5], model.start())
    torch.testing.assert_close(model.step(ids[:, 5:], state)[0], model(ids)[:, 5:])


def test_d8_cross_terms_shrink_with_the_width_at_the_start():
    """With embeddings of the positions' own size (entries of variance 1/2): mean |w·p| over mean p·p of neighbours."""
    shares = []
    for width in (32, 128, 512):
        words, p = torch.randn(200, width, dtype=torch.float64) * 0.5**0.5, sinusoids(width, 200)
        shares.append(((words @ p.T).abs().mean() / (p[1:] * p[:-1]).sum(-1).mean()).item())
    assert shares[0] > shares[1] > shares[2]
    assert shares[0] / shares[2] == pytest.approx(4, rel=0.3), "as 1/√d: a sixteenfold width, a fourth of the share"


@given(length=st.integers(1, 20), width=st.integers(1, 8))
def test_d9_learned_positions_have_t_rows_and_end_there(length, width):
    embed = LearnedSpec(length=length).build_embed(width)
    assert count(embed) == length * width
    embed(torch.zeros(1, length, width), places(length, length))
    with pytest.raises(ValueError, match=f"position {length} is beyond .* which has {length} "):
        embed(torch.zeros(1, length + 1, width), places(length + 1, length + 1))


@given(length=st.integers(1, 20), heads=st.integers(1, 6), layers=st.integers(1, 3))
def test_d10_relative_biases_are_two_t_minus_one_a_head_and_layer(length, heads, layers):
    spec = read_model(
        {
            "vocab": 5,
            "decoder": {
                "layers": layers,
                "width": 2 * heads,
                "attention": {"heads": heads},
                "position": {"kind": "relative", "length": length},
            },
        }
    )
    model = build(spec)
    assert sum(count(layer.position) for layer in model.decoder.layers) == layers * (2 * (length - 1) + 1) * heads
    position = model.decoder.layers[0].position
    bias = position.plan(places(length, length), torch.float32)
    assert all(len(bias[0, h].diagonal(offset).unique()) == 1 for h in range(heads) for offset in range(1 - length, length))
    with pytest.raises(ValueError, match=f"which reaches {length - 1};"):
        position.plan(places(length + 1, length + 1), torch.float32)


@given(clip=st.integers(1, 8), heads=st.integers(1, 4), length=st.integers(1, 40))
def test_d11_clipped_biases_share_their_ends_at_any_length(clip, heads, length):
    position = ClippedSpec(clip=clip).build(heads, 4)
    assert count(position) == (2 * clip + 1) * heads
    bias = position.plan(places(length, length), torch.float32)[0]
    for offset in range(1 - length, length):
        shared = position.table.weight[max(-clip, min(clip, offset)) + clip]
        assert (bias.diagonal(offset, dim1=1, dim2=2) == shared[:, None]).all()


def test_d12_a_bias_can_equal_concatenation_at_the_same_scale():
    q, k, q_position, k_position = (torch.randn(1, 1, 6, size, dtype=torch.float64) for size in (8, 8, 4, 4))
    scale = 12**-0.5
    core = DotSpec(scale=scale).build(1, 8, 8)
    joined = DotSpec(scale=scale).build(1, 12, 12)
    circumstances = {"mask": open_mask(6, 6), "places": places(6, 6)}
    bias = scale * q_position @ k_position.transpose(-1, -2)
    concatenated = joined.weights(torch.cat((q, q_position), -1), torch.cat((k, k_position), -1), **circumstances)
    torch.testing.assert_close(core.weights(q, k, bias=bias, **circumstances), concatenated, rtol=0, atol=1e-6)
    # erratum E5: with each at its own 1/√d they differ
    own = DotSpec().build(1, 8, 8).weights(q, k, bias=bias, **circumstances)
    assert (own - concatenated).abs().max() > 1e-3


@given(
    m=st.integers(0, 500),
    n=st.integers(0, 500),
    shift=st.integers(1, 500),
    layout=st.sampled_from(["halves", "interleaved"]),
    fraction=st.sampled_from([1.0, 0.5, 0.25]),
)
def test_d14_rotation_sees_only_the_offset_and_keeps_lengths(m, n, shift, layout, fraction):
    rope = RopeSpec(layout=layout, fraction=fraction).build(1, 16)
    assert count(rope) == 0
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def turned(x, place):
        here = torch.tensor([[place]])
        return rope.rotate_query(x, rope.plan(Places(here, here), torch.float64))

    product = (turned(q, m) * turned(k, n)).sum()
    torch.testing.assert_close((turned(q, m + shift) * turned(k, n + shift)).sum(), product, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(turned(q, m).norm(), q.norm())
    kept = int(16 * fraction)
    assert torch.equal(turned(q, m)[..., kept:], q[..., kept:])


def test_d14_the_two_layouts_are_one_rotation_of_reordered_coordinates():
    q = torch.randn(1, 1, 9, 8, dtype=torch.float64)
    here = places(9, 9)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    halves, interleaved = (RopeSpec(layout=layout).build(1, 8) for layout in ("halves", "interleaved"))
    turned = interleaved.rotate_query(q[..., order], interleaved.plan(here, torch.float64))
    torch.testing.assert_close(turned, halves.rotate_query(q, halves.plan(here, torch.float64))[..., order])


def test_alibi_slopes_are_the_published_ones():
    slopes = -AlibiSpec().build(8, 4).plan(places(2, 2), torch.float64)[0, :, 0, 1]
    torch.testing.assert_close(slopes, torch.tensor([2.0**-h for h in range(1, 9)], dtype=torch.float64))
    twelve = -AlibiSpec().build(12, 4).plan(places(2, 2), torch.float64)[0, :, 0, 1]
    torch.testing.assert_close(twelve[8:], torch.tensor([2.0 ** -(h - 0.5) for h in range(1, 5)], dtype=torch.float64))


# -------------------------------------------------------------------------------------------------- E: recurrent


def trained(tree, folder, **train):
    """A run to its end: how it went, and what it made of unseen rows."""
    usual = {"steps": 40, "tokens": 600, "evaluate_every": 1000, "save_every": 1000, "evaluate_rows": 100}
    optim = {"rate": 1e-2, "schedule": {"kind": "cosine", "warmup": 5}}
    ready = made_ready(read_run({"optim": optim, "train": usual | train} | tree))
    *_, looked, _, _ = train_run(ready, folder)
    return ready, looked.metrics


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_e1_pairs_without_attention_train_where_a_transformer_does(cell, tmp_path):
    """The same data, objective and rest of the run: only the model's table is another."""
    tower = kinds.tower(layers=1, position="sinusoidal", residual="pre", embed={"kind": "tokens", "scale": True})
    models = {
        "transformer": {"encoder": tower, "decoder": {"like": "encoder", "embed": {"kind": "shared", "scale": True}, "cross": True}},
        cell: {"recurrent": {"width": 24, "cell": cell, "attention": False}},
    }
    data = {"kind": "sequence", "task": "copy", "length": 3, "vocabulary": 6, "count": 1000, "held_out": 20}
    for name, model in models.items():
        table = {"vocab": "tokenizer", "init": "xavier"} | model
        ready, metrics = trained({"model": table, "data": data, "objective": "seq2seq"}, tmp_path / name, steps=80)
        assert metrics["loss"] < 0.9 * unigram_entropy(ready)


def test_e2_attention_of_the_recurrent_decoder_is_a_distribution_with_true_gradients():
    model = made(kinds.recurrent(width=4, core={"kind": "additive", "size": 3}))
    states = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    s = torch.randn(2, 1, 1, 4, dtype=torch.float64, requires_grad=True)

    def context(s, states):
        return model.core(s, model.core.key(states[:, None]), states[:, None], mask=open_mask(1, 5), places=places(1, 5))

    assert torch.autograd.gradcheck(context, (s, states))
    weights = model.core.weights(s, model.core.key(states[:, None]), mask=open_mask(1, 5), places=places(1, 5))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1, 1, dtype=torch.float64))
    assert (weights > 0).all()


# Bahdanau's own readout: with it the context must hold the word that is written, not the next one (see LOG.md)
RNNSEARCH = {"width": 48, "core": {"kind": "additive", "size": 24}, "readout": "maxout"}


@pytest.mark.parametrize(("task", "aligned"), [("copy", lambda j: j), ("reverse", lambda j: 5 - j)])
def test_e2_it_learns_to_look_where_the_word_comes_from(task, aligned):
    """Teacher-forced for a few hundred steps; then the weights at output j are highest on the word it copies."""
    torch.manual_seed(1)
    model = build(read_model({"vocab": 14, "recurrent": RNNSEARCH, "head": "free", "init": "xavier"}))
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    start = 13

    def batch(size):
        source = torch.stack([torch.randperm(12)[:6] for _ in range(size)])  # words differ, so that there is one right place
        wanted = source if task == "copy" else source.flip(-1)
        return source, wanted, torch.cat((torch.full((size, 1), start), wanted[:, :-1]), dim=1)

    for _ in range(300):
        source, wanted, target = batch(64)
        loss = F.cross_entropy(model(target, source).flatten(0, 1), wanted.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    assert loss.item() < 0.05
    seen = []
    model.core.register_forward_hook(lambda c, args, kwargs, out: seen.append(c.weights(*args[:2], **kwargs)), with_kwargs=True)
    source, _, target = batch(100)
    with torch.no_grad():
        model.eval()(target, source)
    found = torch.stack([weights[:, 0, 0].argmax(-1) for weights in seen], dim=1)
    expected = torch.tensor([aligned(j) for j in range(6)])
    assert (found == expected).float().mean() >= 0.95


def test_e3_two_projections_are_a_bilinear_score():
    projected, bilinear = ProjectedSpec(size=3, scaled=False).build(2, 5, 4), BilinearSpec(scaled=False).build(2, 5, 4)
    with torch.no_grad():
        bilinear.weight.copy_(projected.query_weight @ projected.key.weight.transpose(1, 2))
    q, k = torch.randn(1, 2, 3, 5), torch.randn(1, 2, 6, 4)
    circumstances = {"mask": open_mask(3, 6), "places": places(3, 6)}
    torch.testing.assert_close(
        projected.weights(q, projected.key(k), **circumstances), bilinear.weights(q, k, **circumstances), rtol=0, atol=1e-6
    )


def test_e3_a_score_of_your_own_is_one_line():
    try:
        score("distance", lambda q, k: -torch.cdist(q, k))
        for spec in (kinds.decoder(core="distance"), kinds.recurrent(core="distance", two_way=False)):
            model = made(spec)
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


def test_f3_a_head_that_masks_itself_loses_the_token_without_a_residual():
    x = torch.randn(1, 4, 8, requires_grad=True)
    attention = HeadsSpec(heads=2).build(8, DotSpec())
    here = Scene(Position(), None, Mask(4, 4, CPU), places(4, 4))
    closed = torch.eye(4, dtype=torch.bool)[None, None]

    def sublayer(y):
        q, memory = attention.query(y), attention.memory(y, here)
        bias = torch.zeros(1, 2, 4, 4).masked_fill(closed, -math.inf)
        # the query's own content is held fixed: what is asked is whether the token's value gets through
        heads = attention.core(q.detach(), memory.key, memory.value, mask=here.mask, places=here.places, bias=bias)
        return attention.output(heads.transpose(1, 2).flatten(2))

    def own_gradient(spec):
        residual = spec.build(SLOTS["norm"].choose("none"), 8, 1)
        (gradient,) = torch.autograd.grad(residual(x, [sublayer])[0, 2].sum(), x)
        return gradient[0, 2].abs().max()

    assert own_gradient(NoResidualSpec()) == 0
    assert own_gradient(PreSpec()) > 0


@given(width=st.integers(2, 16), seed=seeds)
def test_f4_layer_norm_is_its_formula_and_blind_to_scale(width, seed):
    torch.manual_seed(seed)
    norm = LayerNormSpec(eps=1e-5).build(width).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(3, width, dtype=torch.float64)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    torch.testing.assert_close(norm(x), (x - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias, rtol=0, atol=1e-6)
    torch.testing.assert_close(SLOTS["norm"].choose("rms").build(width).double()(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())


def test_f4_scale_does_not_pass_a_norm():
    norm, x = LayerNormSpec().build(64), torch.randn(10, 64)
    assert (norm(100 * x) - norm(x)).abs().max() < 1e-3


@pytest.mark.parametrize("layers", [0, 1, 5])
def test_f7_layers_are_a_number_and_none_is_the_embeddings(layers):
    model = made(kinds.decoder(layers=layers, final_norm="none"))
    assert len(model.decoder.layers) == layers
    states, _ = model.states(Inputs(tokens()))
    if layers == 0:
        assert torch.equal(states, model.decoder.embed.table(tokens()))


# ------------------------------------------------------------------------------------------------------- G: shapes


def test_g1_three_shapes_are_one_code_path():
    models = [made(spec) for spec in (kinds.encoder(), kinds.decoder(), kinds.pair())]
    assert len({type(model) for model in models}) == 1
    assert len({type(layer) for model in models for tower in (model.encoder, model.decoder) if tower for layer in tower.layers}) == 1


def test_g2_decoder_only_is_an_encoder_with_a_causal_mask():
    source = made(read_model({"vocab": kinds.VOCAB, "encoder": kinds.tower(mask={"causal": True}, position="rope")}), torch.float32)
    target = made(kinds.decoder(position="rope"), torch.float32, seed=5)
    target.load_state_dict({name.replace("encoder.", "decoder."): tensor for name, tensor in source.state_dict().items()})
    torch.testing.assert_close(target(tokens()), source(tokens()), rtol=1e-5, atol=1e-5)


def test_g3_decoder_only_is_a_decoder_without_cross_attention():
    both = made(kinds.pair(position="rope", residual="pre"), torch.float32)
    target = made(kinds.decoder(position="rope", residual="pre"), torch.float32, seed=5)
    weights = {name: tensor for name, tensor in both.state_dict().items() if name.startswith("decoder.") and ".cross." not in name}
    weights = {name: tensor for name, tensor in weights.items() if ".norms.1." not in name}
    weights = {name.replace(".norms.2.", ".norms.1."): tensor for name, tensor in weights.items()}
    weights["decoder.embed.table.weight"] = both.state_dict()["encoder.embed.table.weight"]
    target.load_state_dict(weights)
    with torch.no_grad():
        for layer in both.decoder.layers:  # cross-attention removed: what it adds is nothing
            layer.cross.output.weight.zero_()
            layer.cross.output.bias.zero_()
    torch.testing.assert_close(target(tokens()), both(tokens(), tokens(seed=7)), rtol=1e-5, atol=1e-5)


def digest(pairs):
    return hashlib.sha256(b"".join(part.detach().numpy().tobytes() for pair in pairs for part in (pair.key, pair.value))).hexdigest()


def test_g4_queries_come_from_the_decoder_keys_and_values_from_the_encoder():
    model = made(kinds.pair())
    seen = []
    for layer in model.decoder.layers:
        layer.cross.core.register_forward_hook(lambda c, args, kwargs, out: seen.append(KeyValue(args[1], args[2])), with_kwargs=True)

    def keys_and_values(target, source):
        seen.clear()
        out = model(target, source)
        return digest(seen), out

    first, out = keys_and_values(tokens(), tokens(seed=7))
    second, _ = keys_and_values(tokens(seed=8), tokens(seed=7))
    third, other = keys_and_values(tokens(), tokens(seed=9))
    assert first == second != third
    assert not torch.allclose(out, other)


def test_g5_lengths_may_differ():
    model = made(kinds.pair())
    seen = []
    model.decoder.layers[0].cross.core.register_forward_hook(
        lambda c, args, kwargs, out: seen.append(c.weights(*args[:2], **kwargs)), with_kwargs=True
    )
    model(torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5]]))  # drive safe / conduis prudemment toi
    assert seen[0].shape == (1, kinds.HEADS, 2, 3)
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(1, kinds.HEADS, 2, dtype=torch.float64))


@pytest.mark.parametrize("attention", choices("attention"), ids=named)
def test_g6_widths_may_differ(attention):
    wider = {"width": 24, "attention": {"heads": kinds.HEADS} | attention, "embed": {"size": 6}}
    narrow = {"width": 16, "attention": {"heads": kinds.HEADS} | attention, "embed": {"size": 10}, "cross": True, "mask": {"causal": True}}
    spec = read_model({"vocab": 9, "encoder": wider, "decoder": narrow, "head": "bilinear"})
    model = made(spec)
    model(tokens(vocab=9), tokens(vocab=9)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(SpecError, match="h·e needs one size: h has 16, e 10"):
        build(spec.changed(head="tied"))


def test_g6_a_memory_of_the_wrong_width_is_named():
    with pytest.raises(SpecError, match="heads do not divide width 9"):
        build(
            read_model(
                {
                    "vocab": 9, "encoder": {"width": 9, "attention": {"heads": 3}},
                    "decoder": {"width": 16, "attention": {"kind": "chunked", "heads": 4}, "cross": True, "mask": {"causal": True}},
                }
            )
        )  # fmt: skip
    with pytest.raises(SpecError, match="one size, given 8 and 16"):
        build(kinds.recurrent(width=8, core="dot", two_way=True))


@pytest.mark.parametrize("pool", ["first", "last", "mean", {"kind": "at", "index": 2}, {"kind": "at", "index": -2}])
def test_g7_predict_from_any_vector(pool):
    spec = read_model({"vocab": kinds.VOCAB, "encoder": kinds.tower(), "head": {"kind": "classes", "classes": 3, "pool": pool}})
    model = made(spec)
    ids = tokens()
    states, _ = model.states(Inputs(ids))
    place = {"first": 0, "last": -1}.get(pool) if isinstance(pool, str) else pool["index"]
    chosen = states.mean(1) if pool == "mean" else states[:, place]
    torch.testing.assert_close(model(ids), model.head.output(chosen))
    for side in ("left", "right"):
        padded = kinds.padded(ids, (5, kinds.LENGTH), side)
        torch.testing.assert_close(model(padded)[:1], model(ids[:1, :5]))


def test_g7_a_place_that_is_not_there_is_named():
    spec = read_model({"vocab": kinds.VOCAB, "encoder": kinds.tower(), "head": {"kind": "classes", "pool": {"kind": "at", "index": 20}}})
    with pytest.raises(ValueError, match="no token at place 20"):
        made(spec)(tokens())


# --------------------------------------------------------------------------------------------------- H: objectives

TEXTS = st.lists(st.lists(st.integers(5, kinds.VOCAB - 1), min_size=1, max_size=12).map(np.array), min_size=1, max_size=4)


@given(texts=TEXTS, seed=seeds)
def test_h1_labels_are_the_inputs_shifted_and_no_place_sees_its_label(texts, seed):
    batch = CausalSpec().batch([(text,) for text in texts], Tokens(count=kinds.VOCAB), np.random.default_rng(seed))
    given_, wanted = batch.inputs.tokens, batch.wanted
    asked = wanted != NOTHING
    for row, text in enumerate(texts):
        assert wanted[row, asked[row]].tolist() == [*text.tolist(), Tokens().end]
        assert given_[row, asked[row]].tolist() == [Tokens().begin, *text.tolist()]
    both = asked[:, 1:]
    assert torch.equal(given_[:, 1:][both], wanted[:, :-1][both])
    model = made(kinds.decoder(position="sinusoidal"))
    place = seed % given_.shape[1]
    changed = given_.clone()
    changed[:, place] = (changed[:, place] + 1) % kinds.VOCAB
    with torch.no_grad():  # the label of a place stands one later
        torch.testing.assert_close(model(changed)[:, :place], model(given_)[:, :place], rtol=0, atol=1e-10)


SEES_PLACES = [position for position in choices("position") if position["kind"] != "none"]


@pytest.mark.parametrize("position", SEES_PLACES, ids=named)
@torch.no_grad()
def test_h2_h3_a_masked_token_keeps_its_place_or_all_are_one(position):
    model = made(kinds.encoder(position=position))
    text = torch.tensor([[6, 7, Tokens().mask, 9, 10, Tokens().mask, 12, Tokens().mask]])
    masked = text[0] == Tokens().mask
    kept = model(Inputs(text))[0, masked]
    assert (torch.pdist(kept) > 1e-3).all()
    places = torch.arange(8)[None].masked_fill(masked[None], 0)
    lost = model(Inputs(text, positions=places))[0, masked]
    assert (lost - lost[:1]).abs().max() <= 1e-6


@torch.no_grad()
def test_h2_the_masked_objective_hides_tokens_and_no_places():
    text = np.arange(5, 5 + 18)
    batch = MaskedSpec(share=0.5, hidden=1.0, swapped=0.0).batch([(text,)], Tokens(count=23), np.random.default_rng(0))
    shown = batch.inputs.tokens[0, 1:-1].numpy()
    hidden = shown == Tokens().mask
    assert 2 < hidden.sum() < 16
    assert (shown[~hidden] == text[~hidden]).all()
    assert (batch.wanted[0, 1:-1].numpy() == np.where(hidden, text, NOTHING)).all()
    assert batch.inputs.positions is None  # which is to be counted, for all alike


@torch.no_grad()
def test_h2_h3_hidden_patches_are_restored_by_their_places():
    tower = kinds.tower(embed={"kind": "patches", "pixels": 4, "channels": 1}, position="sinusoidal")
    found = {}
    for position in ("sinusoidal", "none"):
        decoder = kinds.tower(embed="restored", mask={"causal": False}, position=position)
        spec = {"encoder": tower, "decoder": decoder, "head": {"kind": "pixels", "pixels": 4}, "init": {"kind": "normal", "std": 0.3}}
        batch = PatchesSpec().batch([(np.random.default_rng(1).random((16, 4)),)], Tokens(), np.random.default_rng(2))
        found[position] = made(read_model(spec))(batch.inputs, batch.source)[batch.wanted != NOTHING]
    assert (torch.pdist(found["sinusoidal"]) > 1e-3).all()
    assert torch.pdist(found["none"]).max() <= 1e-6


def test_h4_span_corruption_without_an_encoder():
    """prefix M suffix M content: that its parts give the text back is a law of test_objective; here how much is missing."""
    generator, tokens, text = np.random.default_rng(0), Tokens(count=1000), np.arange(5, 905)
    shares, lengths = [], []
    for _ in range(400):
        batch = InfillSpec(block=128).batch([(text,)] * 8, tokens, generator)
        for row in batch.wanted.tolist():
            real = [token for token in row if token != NOTHING]
            _, second = (i for i, token in enumerate(real) if token == tokens.mask)
            assert set(row[len(real) :]) <= {NOTHING}  # pads are not in the loss
            lengths.append(len(real) - 3)
            shares.append((len(real) - second - 2) / lengths[-1])
    assert np.mean(shares) == pytest.approx(0.25, rel=0.02)
    assert (min(lengths), max(lengths)) == (4, 112)


def test_h5_a_plain_text_is_all_that_is_needed(tmp_path):
    """No labels, one file: below the entropy of its words in a few seconds."""
    path = tmp_path / "novel.txt"
    chapters = SLOTS["data"].choose({"kind": "biographies", "people": 60}).load().train
    path.write_text("\n\n".join(text for (text,) in chapters))
    tower = kinds.tower(layers=1, width=32, position="sinusoidal", residual="pre", embed={"kind": "tokens", "scale": True})
    model = {"vocab": "tokenizer", "decoder": tower, "init": "xavier"}
    ready, metrics = trained({"model": model, "data": {"kind": "text", "path": str(path)}, "objective": "causal"}, tmp_path / "run")
    assert metrics["loss"] < unigram_entropy(ready)


# ------------------------------------------------------------------------------------------- temperature, shared


def test_k1_k2_one_temperature_for_attention_and_the_head():
    assert DotSpec().build(1, 64, 64).scale == inverse_root(64) == 1 / 8
    model = build(read_model({"vocab": 500, "decoder": {"width": 64}, "head": {"kind": "tied", "temperature": "root"}}))
    h, table = torch.randn(1, 400, 64), torch.randn(500, 64)
    logits = model.head(h, table=table, padding=None)
    assert logits.mean().item() == pytest.approx(0, abs=0.05)
    assert logits.var().item() == pytest.approx(1, rel=0.05)


# --------------------------------------------------------------------------------------------------- J: loss shaping


def shaped_loss(model, ids, *shaping, padding=None):
    """L_LM of a causal model and its terms, summed and counted."""
    batch = Batch(Inputs(ids, padding=padding), ids if padding is None else ids.masked_fill(padding, -100))
    return shaped(CausalSpec(), [ShapingSpec.choose(term) for term in shaping], model, batch)


def decoder_with(query, **changes):
    """A decoder whose queries are multiplied by a number: 0 looks everywhere alike, a large one at one place."""
    model = made(kinds.decoder(position="sinusoidal", **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attention.query." in name:
                parameter.mul_(query)
    return model


def test_j1_a_head_as_a_dependency_relation():
    text, heads, labels = "I prefer the morning flight", [1, -1, 4, 4, 1], ["nsubj", "root", "det", "nmod", "dobj"]
    words = text.split()
    tokenizer = TokenizerSpec.choose("words").make([text])

    def target(**how):
        (links,) = arcs([text], [heads], [labels], tokenizer, **how)
        matrix = torch.zeros(5, 5)
        matrix[tuple(torch.from_numpy(links).T)] = 1.0
        return matrix

    parse = target(toward="head", relation=None)
    assert parse.sum(1).tolist() == [1.0] * 5, "one head a word: one-hot in every row"
    assert parse[words.index("flight"), words.index("prefer")] == 1
    dobj = target(toward="dependents", relation="dobj")
    assert dobj[words.index("prefer")].tolist() == [float(word == "flight") for word in words]
    assert dobj.sum() == 1, "only prefer has a direct object"


def test_j2_focus_is_the_mean_entropy():
    ids, focus = tokens(length=LENGTH), {"kind": "focus"}
    uniform = shaped_loss(decoder_with(0.0), ids, focus).terms["focus"].mean
    assert uniform == pytest.approx(sum(math.log(t) for t in range(1, LENGTH + 1)) / LENGTH, abs=1e-10)
    core, q = plain(3), torch.zeros(7, 3, dtype=torch.float64)
    everywhere = statistics(core, q[None, None], q[None, None], mask=open_mask(7, 7), places=places(7, 7))
    torch.testing.assert_close(everywhere.entropy, torch.full((1, 1, 7), math.log(7), dtype=torch.float64))
    assert shaped_loss(decoder_with(1e5), ids, focus).terms["focus"].mean == pytest.approx(0.0, abs=1e-6), "one-hot"
    model = decoder_with(1.0)
    with record(model) as seen:
        model(ids)
    alpha = torch.stack([one.weights() for one in seen])  # L×B×K×T×T
    expected = (alpha * -torch.where(alpha > 0, alpha, 1.0).log()).sum((0, 2, 3, 4)) / (alpha.shape[2] * LENGTH * len(seen))
    found = shaped_loss(model, ids, focus).terms["focus"]
    assert found.mean == pytest.approx(float(expected.mean().detach()), abs=1e-10)
    (found.total / found.count).backward()
    for name, parameter in model.named_parameters():
        if ".attention.query.weight" in name or ".attention.key.weight" in name:
            with torch.no_grad():
                step = 1e-6 * torch.randn_like(parameter).sign()
                values = []
                for sign in (1, -1):
                    parameter.add_(sign * step)
                    values.append(shaped_loss(model, ids, focus).terms["focus"].mean)
                    parameter.sub_(sign * step)
            assert (values[0] - values[1]) / 2 == pytest.approx(float((parameter.grad * step).sum()), rel=1e-4, abs=1e-13)


@pytest.mark.parametrize("core", choices("core"), ids=named)
def test_j2_nothing_times_its_logarithm_is_nothing(core):
    """Weights that are exactly 0, by a mask or because another is 1, give no NaN, forward or backward."""
    model = decoder_with(1e5, core=core)
    padding = torch.tensor([[True] * 3 + [False] * (LENGTH - 3), [False] * LENGTH])
    terms = shaped_loss(model, tokens(), {"kind": "focus"}, {"kind": "near"}, padding=padding).terms
    sum(term.total for term in terms.values()).backward()
    assert all(term.total.isfinite() and term.total > -1e-4 for term in terms.values())
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


@given(length=st.integers(1, 4096), most=st.floats(0.5, 1e4), seed=seeds, sharp=st.sampled_from([0.0, 1.0, 30.0]))
def test_j3_near_never_costs_more_than_its_most(length, most, seed, sharp):
    torch.manual_seed(seed)
    core, q = DotSpec().build(1, 2, 2), torch.randn(1, 1, length, 2)
    seen = Attended(
        "x", core, sharp * q, torch.randn(1, 1, length, 2), q, open_mask(length, length, causal=True), places(length, length), None
    )
    near = ShapingSpec.choose({"kind": "near", "most": most})
    found = near.total(Look(Place("x", "self", "decoder", 0, 1, MaskSpec()), seen, None), None)
    assert 0 <= float(found) <= most * length * (1 + 1e-6)


def test_j3_who_looks_at_itself_pays_nothing_and_an_outlier_at_most_the_most():
    near = ShapingSpec.choose({"kind": "near", "most": 50.0})
    place, q = Place("x", "self", "encoder", 0, 1, MaskSpec()), 100 * torch.eye(64, dtype=torch.float64)[None, None]

    def cost(k):
        return float(near.total(Look(place, Attended("x", plain(64), q, k, q, open_mask(64, 64), places(64, 64), None), None), None))

    assert cost(q) == 0.0
    far = q.clone()
    far[0, 0, [0, 63]] = far[0, 0, [63, 0]]  # the first looks at the last, and the last at the first
    assert cost(far) == 2 * 50.0
    close = q.clone()
    close[0, 0, [5, 6]] = close[0, 0, [6, 5]]
    assert cost(close) == 2 * 1.0


def test_j4_the_total_is_the_loss_and_its_terms():
    ids, model = tokens(), decoder_with(1.0)
    term = {"kind": "focus", "weight": 0.3}
    score = shaped_loss(model, ids, term)
    counts = {"focus": score.terms["focus"].count}
    loss = total(score, score.count, [ShapingSpec.choose(term)], counts)
    torch.testing.assert_close(loss, score.total / score.count + 0.3 * score.terms["focus"].total / counts["focus"])
    assert score.mean == pytest.approx(shaped_loss(model, ids).mean, abs=0), "the objective's own value is not touched"


def test_j4_lambda_is_comparable_over_sizes_unless_a_sum_is_asked_for():
    """Attention that is uniform costs the same a row, whatever the number of heads, layers and texts."""
    ids = tokens(batch=4)
    means, sums = [], []
    for heads, layers, batch in ((2, 2, 1), (4, 2, 1), (2, 6, 1), (2, 2, 4)):
        model = decoder_with(0.0, attention={"heads": heads}, layers=layers)
        mean, whole = (
            shaped_loss(model, ids[:batch], {"kind": "focus", "normalised": normalised}).terms["focus"].mean for normalised in (True, False)
        )
        means.append(mean)
        sums.append(whole / mean)
    assert means == pytest.approx([means[0]] * 4, abs=1e-12)
    assert sums == pytest.approx([heads * layers * LENGTH for heads, layers in ((2, 2), (4, 2), (2, 6), (2, 2))])


def test_j4_the_terms_come_from_the_fast_path():
    """No tensor of length × length is made, forward or backward, and a run that is looked at gives the same bits."""
    length = 141  # which nothing else is
    model, ids = decoder_with(1.0), tokens(length=length)

    class NoSquare(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, tuple | list) else (made,):
                assert not isinstance(tensor, torch.Tensor) or tensor.shape[-2:] != (length, length), func
            return made

    with NoSquare():
        score = shaped_loss(model, ids, {"kind": "focus"}, {"kind": "near"})
        (score.total + sum(term.total for term in score.terms.values())).backward()
    assert torch.equal(score.total, shaped_loss(model, ids).total)


# ---------------------------------------------------------------------------------------------------------------- tasks


def scored(folder, data, objective, head=None, steps=100, rate=5e-3):
    """A small model of the shape that fits the task, trained for seconds, beside its baselines on rows it has not seen."""
    from manyheads.evaluation import How, evaluate
    from manyheads.train.loop import train
    from manyheads.train.run import made_ready, read_run

    tower = {"width": 32, "embed": {"kind": "tokens", "scale": True}, "position": "sinusoidal", "residual": "pre"}
    tower |= {"layers": 1, "attention": {"kind": "heads", "heads": 4}, "feedforward": {"kind": "mlp", "hidden": 64}}
    shape = {"encoder": tower, "decoder": {"like": "encoder", "embed": {"kind": "shared", "scale": True}, "cross": True}}
    if head is not None:  # words alone, each a vector, and their mean
        shape = {"encoder": tower | {"layers": 0, "position": "none"}, "head": head | {"pool": "mean"}}
    tree = {"model": {"vocab": "tokenizer", "init": "xavier"} | shape, "data": data, "objective": objective}
    tree |= {"optim": {"rate": rate, "schedule": {"kind": "linear", "warmup": 20}}, "tokenizer": {"kind": "words", "lower": True}}
    tree |= {"train": {"steps": steps, "tokens": 1024, "evaluate_every": 1000, "evaluate_rows": 1}}
    list(train(made_ready(read_run(tree)), folder / "run"))
    return evaluate(folder / "run", how=How(beams=2, max_new=16))[0]


def functions(*files):
    """What some files of the standard library define: the start of each function, what it says it does, and the file."""
    from manyheads.data.builtin import functions_of, stdlib

    for name in files:
        for code, said in functions_of((stdlib() / name).read_text(encoding="utf-8")):
            yield {"text": " ".join(code.split()[:60]), "document": " ".join(code.split()[:60]), "query": said, "label": name}


def test_o1_a_trained_pair_of_towers_is_above_the_copied_source(tmp_path):
    """Turning short texts round stands for translation: the same words, another order."""
    task = {"kind": "sequence", "task": "reverse", "vocabulary": 8, "shortest": 4, "length": 5, "count": 2000, "held_out": 60}
    report = scored(tmp_path, task, "seq2seq", steps=160)
    model, copied = report["scores"]["model"], report["scores"]["copy"]
    assert model["bleu"] > copied["bleu"] + 20
    assert model["chrf"] > copied["chrf"] + 20
    assert report["signatures"].keys() == {"bleu", "chrf"}


def test_o2_a_trained_summary_is_above_the_first_words(tmp_path):
    """Of four sentences about somebody, their trade and their city."""
    from manyheads.data.builtin import BiographiesSpec

    people = BiographiesSpec(people=400, cities=8)
    told = ((people.telling(4 * i)[0], "a {trade} of {city}".format(**people.person(i))) for i in range(400))
    (tmp_path / "told.tsv").write_text("".join(f"{text}\t{summary}\n" for text, summary in told))
    report = scored(tmp_path, {"kind": "pairs", "path": str(tmp_path / "told.tsv"), "held_out": 0.1}, "seq2seq", steps=150)
    assert report["matter"] == ["rouge1", "rouge2", "rougeL"]
    for metric in report["matter"]:
        assert report["scores"]["model"][metric] > report["scores"]["lead-12"][metric] + 0.2


FILES = ("argparse.py", "typing.py", "tarfile.py", "inspect.py", "statistics.py", "calendar.py")


def test_o3_a_trained_encoder_is_above_the_commonest_class(tmp_path):
    """Which file a function is from; what counted words say is reported beside it."""
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in functions(*FILES)))
    data = {"kind": "labels", "path": str(tmp_path / "code.jsonl"), "held_out": 0.2}
    report = scored(tmp_path, data, "classify", {"kind": "classes", "classes": len(FILES)}, rate=3e-2)
    model, majority, bayes = (report["scores"][name] for name in ("model", "majority", "naive Bayes"))
    assert model["accuracy"] > majority["accuracy"] + 0.3
    assert model["macro_f1"] > majority["macro_f1"] + 0.3
    assert bayes["accuracy"] > majority["accuracy"] + 0.3


def test_o4_trained_vectors_find_more_than_chance(tmp_path):
    """Which function a line describes, among all: from some hundred examples more than chance; what counted words find stands beside."""
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in functions(*FILES) if row["query"]))
    data = {"kind": "queries", "path": str(tmp_path / "code.jsonl"), "held_out": 0.2}
    report = scored(tmp_path, data, "contrastive", {"kind": "vector"}, steps=60, rate=3e-2)
    model, chance = (report["scores"][name] for name in ("model", "chance"))
    assert report["scores"].keys() >= {"BM25"}
    assert report["documents"] > 3 * report["rows"]  # those to learn from are there too
    assert model["mrr"] > 3 * chance["mrr"]
    assert model["recall@10"] > 3 * chance["recall@10"]


@pytest.mark.parametrize(
    ("task", "shape"),
    [
        ("summarise", "encoder–decoder"), ("translate", "encoder–decoder"), ("sentiment", "encoder"), ("classify", "encoder"),
        ("retrieval", "encoder"), ("embed", "encoder"), ("lm", "decoder"), ("mae", "encoder–decoder"),
    ],
)  # fmt: skip
def test_o5_a_task_has_its_shape_unless_another_is_said(task, shape):
    from manyheads.advice.task import ALSO, TASKS, chosen_shape
    from manyheads.objective.score import ObjectiveSpec

    name = ALSO.get(task, task)
    assert chosen_shape(name, None) == shape
    for other, objective in TASKS[name].shapes.items():
        assert chosen_shape(name, other.replace("–", "-")) == other
        assert other in ObjectiveSpec.kinds[objective].shapes
    with pytest.raises(SpecError, match=f"{name} is learned by {shape}"):
        chosen_shape(name, "sideways")
