"""Claims A (attention) and B (masks) of the source documents; every test is named for its row.

Rows B1, B3, B4 and B5 are invariants of every kind, checked in tests/model/test_invariants.py.
Tolerances: float64 1e-10, float32 1e-5, unless the row says otherwise.
"""

from __future__ import annotations

import itertools
import math
from html.parser import HTMLParser

import kinds
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kinds import choices, random_model, tokens
from merged_qk import merged_weight, split_weight
from raising import raises
from small_attention import attention_context, make_mask, plain, positions, seeds
from torch import nn

from manyheads import build, read_model
from manyheads.inspect.notebook import attention_table
from manyheads.model.cache import NoCache
from manyheads.parts.attention import HeadsSpec
from manyheads.parts.core import ArgmaxSpec, DotSpec, MergedQKSpec, check_rows
from manyheads.spec import SLOTS

sizes = st.integers(1, 6)


def attend(core, q, k, v=None, **mask):
    """One head of a core on vectors L×d and M×d: the output, or with v=None the weights."""
    context = {"mask": make_mask(len(q), len(k), **mask), "positions": positions(len(q), len(k))}
    if v is None:
        return core.weights(q[None, None], k[None, None], **context)[0, 0]
    return core(q[None, None], k[None, None], v[None, None], **context)[0, 0]


def orthonormal(count, size):
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q[:count]


# ----------------------------------------------------------------------------------------- A: attention as an operation


@given(queries=sizes, keys=sizes, size=sizes, seed=seeds, core=st.sampled_from(choices("core")))
def test_a1_attention_is_a_distribution_and_a_mean(queries, keys, size, seed, core):
    torch.manual_seed(seed)
    spec = SLOTS["core"].choose(core)
    width = {"head": size, "memory": size, "none": 0}
    module = (
        spec.build(2, width[spec.query_source], {"head": size, "raw": size, "none": 0}[spec.key_source]).double().eval()
    )
    q = torch.randn(1, 2, queries, width[spec.query_source], dtype=torch.float64)
    k = torch.randn(1, 2, keys, 0 if spec.key_source == "none" else size, dtype=torch.float64)
    v = torch.randn(1, 2, keys, size, dtype=torch.float64)
    context = {"mask": make_mask(queries, keys), "positions": positions(queries, keys)}
    k = module.key_transform(k)
    weights, out = module.weights(q, k, **context), module(q, k, v, **context)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, queries, dtype=torch.float64), rtol=0, atol=1e-6)
    low, high = v.amin(dim=2, keepdim=True), v.amax(dim=2, keepdim=True)
    assert ((out >= low - 1e-9) & (out <= high + 1e-9)).all()


@pytest.mark.parametrize("size", [16, 64, 256, 1024])
def test_a2_scaled_scores_have_variance_one(size):
    q, k = torch.randn(2, 1, 1, 1000, size)
    index = positions(1000, 1000)
    scaled = DotSpec().build(1, size, size).scores(q, k, index)
    unscaled = DotSpec(scale=1.0).build(1, size, size).scores(q, k, index)
    assert scaled.var().item() == pytest.approx(1, rel=0.05)
    assert unscaled.var().item() == pytest.approx(size, rel=0.05)


def test_a3_scores_are_batch_by_length_by_length_and_a_wrong_axis_is_an_error():
    x = torch.randn(3, 1, 5, 8)
    core = DotSpec().build(1, 8, 8)
    weights = core.weights(x, x, mask=make_mask(5, 5), positions=positions(5, 5))
    expected = torch.softmax(torch.bmm(x[:, 0], x[:, 0].transpose(1, 2)) / math.sqrt(8), dim=-1)
    torch.testing.assert_close(weights[:, 0], expected)
    with raises("input.shape", (3, 1, 5, 8), (3, 1, 8, 5)):
        core(x, x.transpose(2, 3), x, mask=make_mask(5, 5), positions=positions(5, 5))
    with raises("input.shape", (3, 1, 5, 8), (3, 1, 5, 5)):
        core(x, torch.randn(3, 1, 5, 5), x, mask=make_mask(5, 5), positions=positions(5, 5))


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
        q.expand(draws, 1, 1, size), keys[:, None], values.expand(draws, 1, n, -1),
        mask=make_mask(1, n), positions=positions(1, n),
    )[:, 0, 0]  # fmt: skip


def test_a7_tiny_noise_in_the_keys_is_harmless():
    means, keys = noisy_keys(1000)
    values = torch.randn(10, 10, dtype=torch.float64)
    half = (values[0] + values[1]) / 2
    error = (attend_many(40 * (means[0] + means[1]), keys, values) - half).norm(dim=-1) / half.norm()
    assert (error < 1e-2).double().mean() >= 0.99


def test_a8_a9_one_head_is_unstable_and_two_heads_are_stable():
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


def test_a10_plain_self_attention_cannot_give_u_b():
    beta = 10.0
    a, b, c, d, x = lecture_vectors(beta)
    torch.testing.assert_close(attend(plain(4), x, x, x)[1], a, rtol=0, atol=1e-6)
    for added in (d, c):
        changed = x.clone()
        changed[1] = a + added
        output = attend(plain(4), changed, changed, changed)[1]
        assert (output - b).norm() > 1.5 * beta
        torch.testing.assert_close(output, changed[1], rtol=0, atol=1e-6)


def test_a11_query_key_value_attention_can():
    beta = 10.0
    a, b, c, d, x = lecture_vectors(beta)
    value = (torch.outer(b, b) - torch.outer(c, c)) / beta**2
    query = (torch.outer(d, a) + torch.outer(c, d)) / beta**2
    out = attend(plain(4), x @ query.T, x, x @ value.T)
    torch.testing.assert_close(out[1], b, rtol=0, atol=1e-6)
    torch.testing.assert_close(out[0], b - c, rtol=0, atol=1e-6)
    # gradient descent finds matrices that do the same
    targets = torch.stack((b - c, b))
    learned = [nn.Parameter(0.1 * torch.randn(4, 4, dtype=torch.float64)) for _ in range(2)]
    optimizer = torch.optim.Adam(learned, lr=0.02)
    for _ in range(1500):
        loss = (attend(plain(4), x @ learned[0].T, x, x @ learned[1].T)[:2] - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1e-2 * beta**2 * 1e-2


class WeightIndices(HTMLParser):
    """The table of a page: headings, and the cells of each row with their classes."""

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
    page = WeightIndices()
    page.feed(attention_table(words, ["kediler", "fareleri", "kovalar"], ["cats", "chase", "mice"]))
    assert page.headings == ["cats", "chase", "mice", "kediler", "fareleri", "kovalar"]
    cells = [row for row in page.rows if row]
    assert [[float(cell["text"]) for cell in row] for row in cells] == [
        [0.91, 0.04, 0.05],
        [0.03, 0.10, 0.87],
        [0.09, 0.88, 0.03],
    ]
    assert [[j for j, cell in enumerate(row) if "highest" in cell["class"]] for row in cells] == [[0], [2], [1]]


def test_b6_masked_cells_of_a_page_are_marked_and_its_texts_are_escaped():
    weights, visible = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[True, False], [True, True]])
    text = attention_table(weights, ["<script>x</script>", "b"], ['"a', "b"], mask_LM=visible).page("<b>")
    page = WeightIndices()
    page.feed(text)
    assert [["hidden" in cell["class"] for cell in row] for row in page.rows if row] == [[False, True], [False, False]]
    assert "<script>" not in text
    with raises("input.shape", (2, 2), (3, 2)):
        attention_table(weights, ["a", "b", "c"], ["a", "b"])


def test_a13_self_attention_is_attention_with_one_sequence():
    layer = random_model(kinds.encoder()).encoder.layers[0]
    x, context = torch.randn(2, 5, kinds.WIDTH, dtype=torch.float64), attention_context(5, 5)
    expected = layer.attention(x, layer.attention.key_value(x, context), context)
    assert torch.equal(layer.self_attention(x, context, NoCache()), expected)


def test_a14_argmax_rows_are_one_hot_ties_take_the_lowest_index_and_it_is_trainable():
    core = ArgmaxSpec().build(2, 4, 4)
    q, k, v = (torch.randn(2, 2, 6, 4, requires_grad=True) for _ in range(3))
    weights = core.weights(q, k, mask=make_mask(6, 6, causal=True), positions=positions(6, 6))
    assert set(weights.unique().tolist()) == {0.0, 1.0}
    assert (weights.sum(-1) == 1).all()
    tied = core.weights(q, k[:, :, :1].expand(-1, -1, 6, -1), mask=make_mask(6, 6), positions=positions(6, 6))
    assert (tied[..., 0] == 1).all()
    core(q, k, v, mask=make_mask(6, 6), positions=positions(6, 6)).square().sum().backward()
    assert q.grad.abs().sum() > 0
    assert k.grad.abs().sum() > 0
    mixed = ArgmaxSpec(heads=(1,)).build(2, 4, 4).weights(q, k, mask=make_mask(6, 6), positions=positions(6, 6))
    assert ((mixed[:, 0] > 0) & (mixed[:, 0] < 1)).all()
    assert set(mixed[:, 1].unique().tolist()) == {0.0, 1.0}
    with raises("config.incompatible", "heads", "head 2", "0 to 1"):
        ArgmaxSpec(heads=(2,)).build(2, 4, 4)


def pointing(pointers, length):
    """Causal argmax layers; head h of layer l attends `pointers[l][h]` tokens back, set by relative biases."""
    heads = len(pointers[0])
    spec = read_model(
        {
            "vocab": 3,
            "decoder": {
                "layers": len(pointers), "width": 4 * heads, "attention": {"heads": heads}, "core": "argmax",
                "mask": {"causal": True}, "position": {"kind": "relative", "length": length}, "feedforward": "none",
                "norm": "none", "residual": "pre",
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


def receptive_field(model, length, index):
    """By perturbation: the positions whose change changes the output at `index`."""
    ids = torch.zeros(1, length, dtype=torch.long)
    with torch.no_grad():
        before = model(ids)[0, index]
        changed = ids.repeat(length, 1) + torch.eye(length, dtype=torch.long)
        return {j for j, after in enumerate(model(changed)[:, index]) if not torch.equal(before, after)}


@pytest.mark.parametrize(("k", "n"), list(itertools.product((1, 2, 3), repeat=2)))
def test_a15_argmax_reaches_k_plus_one_to_the_n(k, n):
    length = (k + 1) ** n
    model = pointing([[h * (k + 1) ** layer for h in range(1, k + 1)] for layer in range(n)], length)
    assert receptive_field(model, length, length - 1) == set(range(length))


@given(k=st.integers(1, 3), n=st.integers(1, 3), seed=seeds)
def test_a16_the_measured_field_is_the_pointer_graph(k, n, seed):
    generator = torch.Generator().manual_seed(seed)
    length, index = 12, 11
    pointers = [torch.randint(0, 4, (k,), generator=generator).tolist() for _ in range(n)]
    model = pointing(pointers, length)
    reached = {index}
    for steps in reversed(pointers):
        reached |= {i - step for i in reached for step in steps}
    reached = {i for i in reached if i >= 0}
    measured = receptive_field(model, length, index)
    assert measured == reached
    assert len(measured) <= min((k + 1) ** n, length, index + 1)


def merged_pair(dtype, width=12, heads=3):
    """Separate query and key projections without biases, and the merged attention made from them."""
    separate = HeadsSpec(heads=heads, bias=False).build(width, DotSpec()).to(dtype)
    merged = HeadsSpec(heads=heads, bias=False).build(width, MergedQKSpec()).to(dtype)
    with torch.no_grad():
        merged.query.weight.copy_(merged_weight(separate.query.weight, separate.key.weight, heads))
    return separate, merged


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("causal", [False, True])
def test_a17_the_merged_matrix_gives_the_same_attention(dtype, tolerance, causal):
    separate, merged = merged_pair(dtype)
    x, context = torch.randn(2, 6, 12, dtype=dtype), attention_context(6, 6, causal=causal)
    weights = [
        a.core.weights(a.query(x), a.key(x), mask=context.mask, positions=context.positions) for a in (separate, merged)
    ]
    assert weights[0].shape == (2, 3, 6, 6)
    assert (weights[0] - weights[1]).abs().max() <= tolerance


@given(heads=st.integers(1, 6), size=st.integers(1, 8))
def test_a18_merged_scores_have_half_the_heads_times_the_parameters_of_separate_ones(heads, size):
    width = heads * size
    separate = HeadsSpec(heads=heads, bias=False).build(width, DotSpec())
    merged = HeadsSpec(heads=heads, bias=False).build(width, MergedQKSpec())

    def scoring(attention):
        return sum(p.numel() for part in (attention.query, attention.key, attention.core) for p in part.parameters())

    assert scoring(separate) == 2 * heads * size * width
    assert scoring(merged) == heads * width**2
    assert scoring(merged) * 2 == scoring(separate) * heads
    if heads == 2:
        assert scoring(merged) == scoring(separate)


def test_a19_merged_is_trainable_and_splits_into_two_matrices_if_its_rank_is_at_most_k():
    _separate, merged = merged_pair(torch.float64)
    ranks = torch.linalg.matrix_rank(merged.query.weight.unflatten(0, (3, -1)))
    assert (ranks <= 4).all()
    query, key = split_weight(merged.query.weight.detach(), 3, 4)
    torch.testing.assert_close(merged_weight(query, key, 3), merged.query.weight.detach())
    x, context = torch.randn(2, 6, 12, dtype=torch.float64), attention_context(6, 6)
    optimizer = torch.optim.SGD(merged.query.parameters(), lr=0.1)
    for step in range(3):
        target = torch.randn(2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (merged(x, merged.key_value(x, context), context) - target).square().sum().backward()
        optimizer.step()
    ranks = torch.linalg.matrix_rank(merged.query.weight.unflatten(0, (3, -1)))
    assert (ranks > 4).any()
    with pytest.raises(ValueError, match=f"rank {int(ranks.max())}"):
        split_weight(merged.query.weight.detach(), 3, 4)


def test_a20_heads_without_parameters_of_their_own_are_one_head():
    x = torch.randn(2, 1, 5, 8).expand(-1, 4, -1, -1)
    weights = DotSpec().build(4, 8, 8).weights(x, x, mask=make_mask(5, 5), positions=positions(5, 5))
    assert (weights - weights[:, :1]).abs().max() == 0


@given(seed=seeds)
def test_a21_a_bias_before_the_softmax_is_a_factor_after_the_exponential(seed):
    torch.manual_seed(seed)
    q, k = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64)
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    weights = DotSpec().build(2, 4, 4).weights(q, k, mask=make_mask(5, 5), positions=positions(5, 5), bias=bias)
    product = (q @ k.transpose(-1, -2) / 2).exp() * bias.exp()
    torch.testing.assert_close(weights, product / product.sum(-1, keepdim=True), rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- B: masks


def test_b2_multiplying_after_the_softmax_is_wrong_and_is_flagged():
    printed = torch.tensor([[0.91, 0.04, 0.05], [0.03, 0.74, 0.23], [0.01, 0.41, 0.58]])
    wrong = printed * torch.ones(3, 3).tril()
    torch.testing.assert_close(wrong.sum(-1), torch.tensor([0.91, 0.77, 1.00]))
    with raises("input.invalid", "row (0,)", "0.91", "2 of 3 rows"):
        check_rows(wrong)
    masked = printed.log().masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf).softmax(-1)
    torch.testing.assert_close(
        masked, torch.tensor([[1, 0, 0], [0.039, 0.961, 0], [0.01, 0.41, 0.58]]), rtol=0, atol=1e-3
    )
    check_rows(masked)


def test_b7_the_decoder_is_causal_and_its_cross_attention_is_not():
    model = random_model(kinds.pair())
    source, target = tokens(1, 6), tokens(1, 5, seed=4)
    changed = source.clone()
    changed[0, -1] = (changed[0, -1] + 1) % kinds.VOCAB
    changes = (model(target, source) != model(target, changed)).any(dim=-1)
    assert changes.all(), "every target token may attend to the last source token"
    other = target.clone()
    other[0, -1] = (other[0, -1] + 1) % kinds.VOCAB
    assert torch.equal(model(target, source)[:, :-1], model(other, source)[:, :-1])
