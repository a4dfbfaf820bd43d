"""Attention as an operation: a distribution over keys, and the mean of their values."""

from __future__ import annotations

import itertools
import math
from typing import Annotated

import torch
from torch import Tensor

from manyheads.labs.figures import Heatmap, Lines, heatmap
from manyheads.labs.finding import Finding, at_least, at_most, equals, is_true, judging, near, reported
from manyheads.labs.lab import check_choice, lab
from manyheads.labs.plain import attend, attention_weights, head_context, plain_core
from manyheads.parts.core import DotSpec

FLOAT64 = 1e-10  # tolerance


def orthonormal(count: int, size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q[:count]


def grow(strength: float) -> list[float]:
    """Ten strengths up to the given one."""
    return [strength * i / 10 for i in range(1, 11)]


# ------------------------------------------------------------------------------------- a distribution, and a mean


@lab("attention", rows=("A1",), counterexample={"normalized": False}, try_next=("--keys 2", "--dim 1"))
def distribution(
    *,
    keys: Annotated[int, "number of keys"] = 6,
    dim: Annotated[int, "size of the vectors"] = 8,
    queries: Annotated[int, "number of queries"] = 100,
    normalized: Annotated[bool, "whether the weights are divided by their sum"] = True,
) -> Finding:
    """Attention is a distribution over the keys, and the mean of the values under it.

    The softmax makes weights that are at least 0 and sum to 1 from the scores of a query: α_i = exp(q·k_i) / Σ_j
    exp(q·k_j). The output Σ_i α_i v_i is a mean, so it cannot leave the values: each of its coordinates lies between
    the smallest and the largest of that coordinate among the values.
    """
    q, k, v = (torch.randn(n, dim, dtype=torch.float64) for n in (queries, keys, keys))
    weights = attention_weights(q, k) if normalized else (q @ k.T).exp()
    output = weights @ v
    outside = torch.maximum(v.amin(0) - output, output - v.amax(0)).clamp(min=0)
    span = {"smallest value": v.amin(0), "output for the first query": output[0], "largest value": v.amax(0)}
    curves = {name: list(enumerate(coordinates.tolist(), 1)) for name, coordinates in span.items()}
    return Finding(
        (
            at_least("smallest weight", weights.min(), 0),
            at_most("largest difference between the sum of a row and 1", (weights.sum(-1) - 1).abs().max(), 1e-6),
            at_most("farthest that a coordinate is outside of the values", outside.max(), FLOAT64),
        ),
        (
            heatmap("Weights of five queries", weights[:5]),
            Lines("The output lies between the values", "coordinate", "", curves),
        ),
    )


@lab("attention", rows=("A2",), errata=("E8",), seconds=(1, 1), smallest={"largest": 64},
     counterexample={"scaled": False}, try_next=("--largest 4096", "--vectors 100"))  # fmt: skip
def scaled_scores(
    *,
    largest: Annotated[int, "largest size of a head; smaller ones are a fourth of it, down to 16"] = 1024,
    vectors: Annotated[int, "number of queries, and of keys"] = 2000,
    scaled: Annotated[bool, "whether the scores are divided by the root of the size"] = True,
) -> Finding:
    """Divided by √d, scores have variance one at every size d.

    The product of two vectors of d independent unit-normal numbers is a sum of d terms of variance 1, which has the
    variance d. Scores that grow with the size of a head would make the softmax choose one key from the start. q·k / √d
    has variance 1 at every size. Clipping would not do: it makes scores equal that should differ.
    """
    sizes = [largest // 4**i for i in range(10) if largest // 4**i >= 16][::-1]
    spec = DotSpec() if scaled else DotSpec(scale=1.0)
    checks, curves, clipped = [], {"q·k": list[tuple[float, float]](), "q·k / √d": list[tuple[float, float]]()}, 0.0
    for size in sizes:
        q, k = torch.randn(2, 1, 1, vectors, size)
        positions = head_context(q[0, 0], k[0, 0], False)[1]
        raw, scores = (each.build(1, size, size).scores(q, k, positions) for each in (DotSpec(scale=1.0), spec))
        checks += [near(f"variance of q·k at d = {size}", raw.var().item(), size, 0.05 * size)]
        checks += [near(f"variance of the score at d = {size}", scores.var().item(), 1, 0.05)]
        curves["q·k"].append((size, raw.var().item()))
        curves["q·k / √d"].append((size, scores.var().item()))
        clipped = (raw.abs() > 1).double().mean().item()
    checks += [reported(f"share of q·k at d = {sizes[-1]} that clipping to ±1 would make ±1", clipped)]
    return Finding(
        tuple(checks),
        (Lines("Variance of the scores", "d", "variance", curves, log_x=True, log_y=True),),
        correction="The notes say that the scores are clipped; they are divided by √d, which keeps their order.",
    )


# ------------------------------------------------------------------------------------------- one key, several keys


@lab("attention", rows=("A4",), counterexample={"strength": 1.0}, try_next=("--strength 5", "--keys 100"))
def copying(
    *,
    strength: Annotated[float, "length of the query"] = 20.0,
    keys: Annotated[int, "number of keys"] = 7,
) -> Finding:
    """A query along one key copies the value of that key.

    The keys are orthonormal, and the query is s times one of them. Its score with that key is s, and 0 with the others,
    so the softmax gives each of the others e⁻ˢ, relative to 1. The output is the value of that key, up to a distance of
    (n − 1) e⁻ˢ times the largest distance between two values.
    """
    k, v = orthonormal(keys, keys + 5), torch.randn(keys, 5, dtype=torch.float64)

    def error(s: float) -> float:
        return float((attend(s * k[:1], k, v)[0] - v[0]).norm())

    largest = float((v - v[0]).norm(dim=-1).max())
    strengths = grow(strength)
    errors, bounds = ([f(s) for s in strengths] for f in (error, lambda s: (keys - 1) * math.exp(-s) * largest))
    curves = {"measured": list(zip(strengths, errors, strict=True)), "bound": list(zip(strengths, bounds, strict=True))}
    title = "Distance between the output and the copied value"
    is_below = all(e <= b + FLOAT64 for e, b in zip(errors, bounds, strict=True))
    falls = all(later <= earlier + FLOAT64 for earlier, later in itertools.pairwise(errors))
    return Finding(
        (
            at_most("distance to the value", errors[-1], 1e-6),
            is_true("below the bound at every strength", is_below),
            is_true("falls as the query grows", falls),
        ),
        (Lines(title, "length of the query", "distance", curves, log_y=True),),
    )


@lab("attention", rows=("A5", "A6"), counterexample={"strength": 1.0}, try_next=("--num-averaged 5", "--strength 3"))
def averaging(
    *,
    strength: Annotated[float, "s, the factor of the query"] = 20.0,
    keys: Annotated[int, "number of keys"] = 10,
    num_averaged: Annotated[int, "how many values to average"] = 2,
) -> Finding:
    """A query along the sum of some keys averages their values.

    With orthonormal keys and q = s (k_a + k_b), both keys have the score s and all others 0. So both weights are
    1 / (2 + (n − 2) e⁻ˢ), which tends to ½ as s grows. The same works for any m keys, with 1 / (m + (n − m) e⁻ˢ). The
    softmax never gives the exact mean, but it comes as near as one likes.
    """
    k, v = orthonormal(keys, keys + 5), torch.randn(keys, 5, dtype=torch.float64)
    order = torch.randperm(keys)

    def query(s: float, m: int) -> Tensor:
        return s * k[order[:m]].sum(0, keepdim=True)

    def weights(s: float, m: int) -> Tensor:
        return attention_weights(query(s, m), k)[0, order[:m]]

    def formula(s: float, m: int) -> float:
        return 1 / (m + (keys - m) * math.exp(-s))

    cases = [(s, m) for s in grow(strength) for m in range(1, keys + 1)]
    error = max(float((weights(s, m) - formula(s, m)).abs().max()) for s, m in cases)
    distance = (attend(query(strength, num_averaged), k, v)[0] - v[order[:num_averaged]].mean(0)).norm()
    curves = {
        "measured": [(s, float(weights(s, num_averaged)[0])) for s in grow(strength)],
        "formula": [(s, formula(s, num_averaged)) for s in grow(strength)],
    }
    return Finding(
        (
            at_most("largest difference of a weight from the formula, for every m", error, 1e-6),
            at_most(f"distance between the output and the mean, m = {num_averaged}", distance, 1e-6),
        ),
        (Lines("Weight of each averaged key", "s", "weight", curves, {f"1/{num_averaged}": 1 / num_averaged}),),
    )


def noisy_keys(draws: int, means: Tensor, noise: float, variance: float) -> Tensor:
    """k_i ~ N(μ_i, αI), and the first with the covariance αI + variance · μ μᵀ, so that its length varies."""
    keys = means + noise**0.5 * torch.randn(draws, *means.shape, dtype=torch.float64)
    keys[:, 0] += variance**0.5 * torch.randn(draws, 1, dtype=torch.float64) * means[0]
    return keys


def attend_draws(queries: list[Tensor], keys: Tensor, values: Tensor) -> Tensor:
    """The mean of the outputs of some heads, one per query, for every draw of the keys."""
    mask, positions = head_context(keys[0, :1], keys[0], False)
    v = values.expand(len(keys), 1, -1, -1)
    core = plain_core(queries[0])
    heads = [core(q.expand(len(keys), 1, 1, -1), keys[:, None], v, mask=mask, positions=positions) for q in queries]
    return torch.stack(heads).mean(0)[:, 0, 0]


def histogram(fractions: Tensor, bins: int = 21) -> list[tuple[float, float]]:
    """The share of draws in each bin from −0.025 to 1.025."""
    width = 1.05 / bins
    counts = torch.histc(fractions.clamp(-0.025, 1.025), bins, -0.025, 1.025) / len(fractions)
    return [(-0.025 + (i + 0.5) * width, float(share)) for i, share in enumerate(counts)]


@lab("attention", rows=("A7", "A8", "A9"), errata=("E8",), seconds=(0.3, 6.0), smallest={"draws": 4000},
     full={"draws": 200_000}, counterexample={"heads": 1},
     row_counterexamples={"A7": {"noise": 1e-3}, "A8": {"variance": 0.0}},
     try_next=("--variance 0.01", "--strength 10"))  # fmt: skip
def noisy_key_norms(
    *,
    heads: Annotated[int, "2: a query for each value; 1: one query for both"] = 2,
    variance: Annotated[float, "variance of the length of one key"] = 0.5,
    noise: Annotated[float, "variance of the noise in every coordinate of a key"] = 1e-8,
    strength: Annotated[float, "s, the factor of the queries"] = 40.0,
    keys: Annotated[int, "number of keys"] = 10,
    draws: Annotated[int, "how often the keys are drawn"] = 20_000,
) -> Finding:
    """If the length of one key varies, one head no longer averages two values, and two heads still do.

    The query s (μ_a + μ_b) averages two values as long as both keys are equally long. If k_a is (1 + ε) μ_a, its score
    is s (1 + ε) against s: for a large s the longer key takes all, and the output jumps between v_a and v_b from draw
    to draw. Two heads with the queries s μ_a and s μ_b copy one value each; a longer key only makes a copy sharper. So
    the mean of the two stays. Draws in which the query and k_a disagree in sign are left out, as the document says.
    """
    check_choice("heads", heads, (1, 2))
    means, values = orthonormal(keys, keys), torch.randn(keys, keys, dtype=torch.float64)
    half, gap = values[:2].mean(0), values[0] - values[1]
    both, each = [strength * means[:2].sum(0)], [strength * means[0], strength * means[1]]
    tiny = attend_draws(both, noisy_keys(draws, means, noise, 0.0), values)
    noisy = noisy_keys(draws, means, noise, variance)
    noisy = noisy[noisy[:, 0] @ means[0] > 0]
    one, several = attend_draws(both, noisy, values), attend_draws(both if heads == 1 else each, noisy, values)
    name = "one head" if heads == 1 else "two heads"
    largest = torch.softmax(noisy @ both[0], -1)[:, :2].amax(-1)
    errors, single = (((c - half).norm(dim=-1) / gap.norm()) for c in (several, one))
    harmless = ((tiny - half).norm(dim=-1) / gap.norm() < 1e-2).double().mean()
    curves = {
        label: histogram(1 - (c - values[1]) @ gap / gap.square().sum())
        for label, c in {"one head": one, "two heads": attend_draws(each, noisy, values)}.items()
    }
    return Finding(
        (
            *judging("A7", at_least("tiny noise in all keys: share of draws within 1 % of ‖v_a − v_b‖ of the mean",
                                    harmless, 0.99)),
            *judging(
                "A8",
                at_least("one head: share of draws with over 0.95 on one key", (largest > 0.95).double().mean(), 0.85),
                at_least("one head: median distance from the mean, divided by ‖v_a − v_b‖", single.median(), 0.45),
            ),
            *judging(
                "A9",
                at_most(f"{name}: median distance", errors.median(), 1e-6),
                at_most(f"{name}: 95th percentile of the distance", errors.quantile(0.95), 1e-2),
            ),
        ),
        (Lines("Where the output lies between v_a (0) and v_b (1)", "position", "share of draws", curves),),
        correction="The answers in the document are vague: the output of one head swings between v_a and v_b, and that "
        "of two heads stays at their mean.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- what a score is made of


@lab("attention", rows=("A20",), counterexample={"own": True}, try_next=("--heads 8", "--heads 8 --own"))
def naive_heads(
    *,
    heads: Annotated[int, "number of heads"] = 4,
    own: Annotated[bool, "whether each head has matrices of its own"] = False,
) -> Finding:
    """Heads that compare tokens by the plain inner product are all the same head.

    The score x_i·x_j has no parameters, so nothing tells one head from another, and K heads cost K times as much as one
    for one and the same matrix. With W_Q and W_K of its own, a head compares x_iᵀ W_Qᵀ W_K x_j, and each can look for
    something else. An output layer needs no such matrix: there is one of it, and both of its vectors are learned.
    """
    x = torch.randn(1, 1, 5, 8).expand(-1, heads, -1, -1)
    q, k = (x @ torch.randn(heads, 8, 8) if own else x for _ in range(2))
    mask, positions = head_context(x[0, 0], x[0, 0], False)
    weights = DotSpec().build(heads, 8, 8).weights(q, k, mask=mask, positions=positions)[0]
    return Finding(
        (equals("largest difference between two heads", float((weights - weights[:1]).abs().max()), 0),),
        tuple(Heatmap(f"Head {i + 1}", weights[i].tolist()) for i in range(min(heads, 2))),
    )


@lab("attention", rows=("A21",), errata=("E4",), counterexample={"normalized": False},
     try_next=("--strength 0", "--strength 10"))  # fmt: skip
def bias_as_factor(
    *,
    strength: Annotated[float, "standard deviation of the biases"] = 1.0,
    normalized: Annotated[bool, "whether the products are divided by their sum"] = True,
) -> Finding:
    """A bias that is added to a score multiplies the weight by e^π, before the normalization.

    exp(q·k + π) = exp(q·k) exp(π), so a learned bias for each offset is a factor that says how much near and far tokens
    count. It is a factor of the weights before they are divided by their sum. Without that sum, as the document prints
    it, the rows do not sum to 1, and the output is no mean of the values.
    """
    q, k = torch.randn(2, 5, 8, dtype=torch.float64)
    bias = strength * torch.randn(5, 5, dtype=torch.float64)
    weights = attention_weights(q, k, bias_LM=bias)
    products = (q @ k.T).exp() * bias.exp()
    printed = products.sum(-1)
    factored = products / products.sum(-1, keepdim=True) if normalized else products
    return Finding(
        (
            at_most("largest difference between bias and factor", (weights - factored).abs().max(), 1e-6),
            at_least("as printed: largest difference of a row sum from 1", (printed - 1).abs().max(), 0.1),
        ),
        (
            Heatmap("Biases π", bias.tolist()),
            Heatmap("Weights without bias", attention_weights(q, k).tolist()),
            Heatmap("Weights with bias", weights.tolist()),
        ),
        correction="The formula in the document lacks the denominator: Σ_j e^π e^{q·k} v_j must be divided by "
        "Σ_j e^π e^{q·k}.",
    )
