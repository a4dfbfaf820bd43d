"""Statistics of attention without its matrix: equal to those of the weights, with memory linear in the length."""

from __future__ import annotations

import json

import kinds
import numpy as np
import pytest
import torch

from manyheads.parts import statistics
from manyheads.parts.core import Core, DotSpec
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions
from manyheads.spec import SLOTS

CPU = torch.device("cpu")
LENGTH = 12
LEFT = torch.tensor([[True] * 4 + [False] * 8, [False] * 12])
EMPTY = torch.tensor([[True] * 12, [False] * 5 + [True] * 7])
MASKS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 2},
    "two-sided window": {"window": 2},
    "left padding": {"causal": True, "padding_BM": LEFT},
    "no visible key": {"padding_BM": EMPTY},
    "prefix": {"causal": True, "prefix_B": torch.tensor([3, 0])},
    "documents": {"causal": True, "document_ids": (torch.arange(12)[None].expand(2, -1) // 5,) * 2},
}


def context(mask):
    padding_mask = mask.get("padding_BM")
    indices = torch.arange(LENGTH)[None] if padding_mask is None else ((~padding_mask).cumsum(1) - 1).clamp(min=0)
    return {"mask": Mask(LENGTH, LENGTH, CPU, **mask), "positions": Positions(indices, indices)}


def causal_context(length, **mask):
    indices = torch.arange(length)[None]
    return {"mask": Mask(length, length, CPU, causal=True, **mask), "positions": Positions(indices, indices)}


def by_the_matrix(weights, positions):
    """Entropy and mean squared distance by their formulas."""
    entropy = -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)
    squared = (positions.key[:, None, :] - positions.query[:, :, None]).square()
    return entropy, (weights * squared[:, None]).sum(-1)


def core_and_inputs(choice, heads=4, groups=2, size=5):
    spec = SLOTS["core"].from_config(choice)
    query, key = (
        {"head": size, "memory": size, "none": 0}[spec.query_source],
        {"head": size, "raw": size, "none": 0}[spec.key_source],
    )
    core = spec.build(heads, query, key).double().eval()
    q = torch.randn(2, heads, LENGTH, query, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, groups if key else 1, LENGTH, key, dtype=torch.float64, requires_grad=True)
    return core, q, k


def attention_call(*args, **arguments):
    return statistics.AttentionCall("attention", *args, **arguments)


def entropy_and_distance(*args, **arguments):
    call = attention_call(*args, **arguments)
    return call.entropy, call.squared_distance


def gradients(loss, *tensors, retain_graph=False):
    gradients = torch.autograd.grad(loss, tensors, allow_unused=True, retain_graph=retain_graph)
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(gradients, tensors, strict=True)
    ]


def in_small_blocks(monkeypatch, rows, scores):
    """As many rows at a time as a longer text would have."""
    monkeypatch.setattr(Core, "max_scores", scores)
    monkeypatch.setattr(statistics, "ROWS", rows)


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("choice", kinds.choices("core"), ids=kinds.kind_id)
def test_statistics_of_every_core_are_those_of_its_weights(choice, mask, blocks, monkeypatch):
    if blocks:
        in_small_blocks(monkeypatch, rows=5, scores=2 * 4 * LENGTH * 5)
    core, q, k = core_and_inputs(choice)
    arguments, leaves = context(MASKS[mask]), [q, k, *core.parameters()]
    ours = entropy_and_distance(core, q, core.key_transform(k), **arguments)
    expected = by_the_matrix(core.weights(q, core.key_transform(k), **arguments), arguments["positions"])
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    by = torch.randn(2, 4, LENGTH, dtype=torch.float64)
    for measured, other in zip(ours, expected, strict=True):
        of_measured, of_other = (gradients((by * rows).sum(), *leaves, retain_graph=True) for rows in (measured, other))
        torch.testing.assert_close(of_measured, of_other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize(
    "choice",
    [c for c in kinds.choices("core") if c["kind"] not in ("argmax", "convolution")],  # whose weights may be 0
    ids=kinds.kind_id,
)
def test_single_log_weights_of_every_core_are_those_of_its_weights(choice, blocks, monkeypatch):
    if blocks:
        in_small_blocks(monkeypatch, rows=5, scores=2 * 4 * LENGTH * 5)
    core, q, k = core_and_inputs(choice)
    arguments = context({"causal": True})
    row, query, key = torch.tensor([[1, 9, 9], [0, 3, 0], [1, 2, 2], [0, 11, 5]]).T
    ours = attention_call(core, q, core.key_transform(k), **arguments).log_weights((row, query, key))
    expected = core.weights(q, core.key_transform(k), **arguments)[row, :, query, key].log().T
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    leaves, by = [q, k, *core.parameters()], torch.randn(4, 4, dtype=torch.float64)
    one, other = (gradients((by * logs).sum(), *leaves) for logs in (ours, expected))
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_learned_bias_has_its_gradient():
    core, q, k = core_and_inputs({"kind": "dot"})
    bias = torch.randn(1, 4, LENGTH, LENGTH, dtype=torch.float64, requires_grad=True)
    arguments = context({"causal": True}) | {"bias": bias}
    ours = entropy_and_distance(core, q, k, **arguments)
    expected = by_the_matrix(core.weights(q, k, **arguments), arguments["positions"])
    torch.testing.assert_close(ours, expected)
    one, other = (gradients((entropy.square() + distance).sum(), bias, q) for entropy, distance in (ours, expected))
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("statistic", [statistics.Entropy, statistics.SquaredDistance, statistics.LogSumExp])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_are_finite_differences(mask, statistic):
    core, q, k = core_and_inputs({"kind": "dot", "temperature": 0.7}, size=3)
    arguments = context(MASKS[mask])

    def measure(q, k):
        return attention_call(core, q, k, **arguments).fused(statistic())

    assert torch.autograd.gradcheck(measure, (q, k), fast_mode=True)


def test_heads_of_size_one_have_no_room_for_the_columns_of_positions():
    core, q, k = core_and_inputs({"kind": "dot"}, size=1)
    arguments = context({"causal": True})
    expected = by_the_matrix(core.weights(q, k, **arguments), arguments["positions"])
    torch.testing.assert_close(entropy_and_distance(core, q, k, **arguments), expected, rtol=1e-10, atol=1e-10)


def test_in_float32_a_distance_far_from_zero_is_still_exact():
    length = 4096
    core = DotSpec(scale=1.0).build(1, 2, 2)
    angle = torch.arange(length) * 0.37
    q = torch.stack((angle.cos(), angle.sin()), dim=-1)[None, None] * 3.0  # near and far keys have similar weights
    window, causal = causal_context(length, window=9), causal_context(length)
    single = attention_call(core, q, q, **window).squared_distance
    double = attention_call(core.double(), q.double(), q.double(), **window).squared_distance
    assert float((single - double).abs().max()) < 1e-3
    sharp = 40 * q  # nearly all weight on the query's own position
    single, double = (attention_call(core, x, x, **causal).squared_distance for x in (sharp, sharp.double()))
    assert float(((single - double).abs() / (1 + double)).max()) < 0.1


def peak_memory(run, path):
    """The most bytes that torch had allocated at once during a run, by the trace of its profiler."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    profile.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    sizes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return int(np.cumsum(sizes).max())


@pytest.mark.parametrize(("choice", "bound"), [("dot", 3.0), ("additive", 3.0), ("matrix", None)])
def test_memory_is_linear_in_the_length(choice, bound, monkeypatch, tmp_path):
    if choice != "matrix":
        in_small_blocks(monkeypatch, rows=128, scores=1 << 17)
    size = 2 if choice == "additive" else 4
    core = (
        SLOTS["core"]
        .from_config({"kind": "additive", "size": 2} if choice == "additive" else "dot")
        .build(2, size, size)
    )

    def step(length):
        q, k = (torch.randn(1, 2, length, size, requires_grad=True) for _ in range(2))
        arguments, keys = causal_context(length), core.key_transform(k)
        if choice == "matrix":
            entropy, distance = by_the_matrix(core.weights(q, keys, **arguments), arguments["positions"])
        else:
            entropy, distance = entropy_and_distance(core, q, keys, **arguments)
        (entropy + distance).sum().backward()

    long, short = (peak_memory(lambda length=length: step(length), tmp_path / "trace.json") for length in (1024, 512))
    assert (long / short < bound) if bound else (long / short > 3.5), long / short
