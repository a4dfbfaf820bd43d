"""What auxiliary losses cost: a training step and attention alone with L_focus, fused and with explicit attention.

    python bench/auxiliary.py [--repeats 5] [--length 1024] [--json]

Both run in this process, in turn, with the same weights and tokens. The explicit step computes each attention matrix
once and uses it twice, for the values and for the entropy; the fused one never computes it. Losses and gradients must
agree.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyheads import build, read_model
from manyheads.parts.core import Dot, DotSpec, InnerProduct
from manyheads.parts.inputs import Inputs
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions
from manyheads.parts.statistics import AttentionCall
from manyheads.tasks.auxiliary import FocusSpec, auxiliary_counts, loss_with_auxiliary, total_loss
from manyheads.tasks.batch import Batch
from manyheads.tasks.language import CausalSpec

VOCAB = 512
FOCUS = (FocusSpec(weight=0.1),)


def random_batch(length: int, rows: int) -> Batch:
    ids = torch.randint(0, VOCAB, (rows, length + 1))
    return Batch(Inputs(ids[:, :-1]), ids[:, 1:])


def fused(model: Any, batch: Batch) -> Tensor:
    loss = loss_with_auxiliary(CausalSpec(), FOCUS, model, batch)
    return total_loss(loss, loss.count, FOCUS, auxiliary_counts(FOCUS, model, [batch]))


def explicit(model: Any, batch: Batch) -> Tensor:
    """The same loss by the matrices: every core computes its weights, whose entropy is kept."""
    entropies: list[Tensor] = []
    future = torch.ones(batch.inputs.length, batch.inputs.length, dtype=torch.bool).triu(1)

    def forward(core: InnerProduct, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        weights = torch.softmax((q @ k.mT * core.scale).masked_fill_(future, -torch.inf), dim=-1)
        entropies.append(-(weights * weights.clamp(min=1e-38).log()).sum(-1))
        return weights @ v

    cores = [module for module in model.modules() if isinstance(module, InnerProduct)]
    for core in cores:
        core.forward = forward.__get__(core)  # type: ignore[method-assign]
    try:
        loss = CausalSpec().loss(model, batch)
    finally:
        for core in cores:
            del core.forward
    return loss.sum / loss.count + FOCUS[0].weight * torch.stack(entropies).mean()


def plain(model: Any, batch: Batch) -> Tensor:
    """The task's loss alone."""
    loss = CausalSpec().loss(model, batch)
    return loss.sum / loss.count


def seconds(step: Callable[[], Tensor]) -> float:
    """The time of one loss and its gradients."""
    start = time.perf_counter()
    step().backward()
    return time.perf_counter() - start


def check_equal(model: Any, batch: Batch) -> float:
    """The largest difference between the gradients of both, relative to the largest gradient."""
    results = []
    for step in (fused, explicit):
        model.zero_grad()
        loss = step(model, batch)
        loss.backward()
        results.append((float(loss.detach()), [parameter.grad.clone() for parameter in model.parameters()]))
    (ours, our_gradients), (theirs, their_gradients) = results
    assert abs(ours - theirs) < 1e-4, f"the losses are {ours} and {theirs}"
    pairs = zip(our_gradients, their_gradients, strict=True)
    difference = max(float((first - other).abs().max()) for first, other in pairs)
    difference /= max(float(gradient.abs().max()) for gradient in their_gradients)
    assert difference < 1e-3, f"the gradients differ by {difference}"
    return difference


def compare_steps(width: int, heads: int, length: int, rows: int, repeats: int) -> dict[str, Any]:
    """A training step of a decoder of four layers."""
    stack = {"layers": 4, "width": width, "attention": {"heads": heads}, "position": "rope", "residual": "pre"}
    model, batch = build(read_model({"vocab": VOCAB, "decoder": stack})), random_batch(length, rows)
    difference = check_equal(model, batch)
    steps = [partial(step, model, batch) for step in (fused, explicit, plain)]
    return measure(steps, repeats) | {"case": f"step, width {width}, {heads} heads", "difference": difference}


def compare_attention(heads: int, size: int, length: int, repeats: int) -> dict[str, Any]:
    """Causal attention alone, forward and backward."""
    core, index = Dot(DotSpec(), size), torch.arange(length)[None]
    q, k, v = (torch.randn(1, heads, length, size, requires_grad=True) for _ in range(3))
    mask, future = Mask(length, length, q.device, causal=True), torch.ones(length, length, dtype=torch.bool).triu(1)
    context: dict[str, Any] = {"mask": mask, "positions": Positions(index, index, bound=length)}

    def by_the_kernel() -> Tensor:
        entropies = AttentionCall("attention", core, q, k, **context).entropy
        return core(q, k, v, **context).square().sum() + entropies.mean()

    def by_the_matrix() -> Tensor:
        weights = torch.softmax((q @ k.mT * core.scale).masked_fill_(future, -torch.inf), dim=-1)
        entropies = -(weights * weights.clamp(min=1e-38).log()).sum(-1)
        return (weights @ v).square().sum() + entropies.mean()

    def alone() -> Tensor:
        return core(q, k, v, **context).square().sum()

    ours, theirs = (torch.autograd.grad(step(), (q, k, v)) for step in (by_the_kernel, by_the_matrix))
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
    assert difference < 1e-3, f"the gradients differ by {difference}"
    row = measure([by_the_kernel, by_the_matrix, alone], repeats)
    return row | {"case": f"attention, {heads} heads of {size}", "difference": difference}


def measure(steps: Sequence[Callable[[], Tensor]], repeats: int) -> dict[str, Any]:
    """Median times of fused, explicit and plain, each run in every position of the turn."""
    times: list[list[float]] = []
    for turn in range(repeats):
        measured = {i: seconds(steps[i]) for i in ((turn + j) % 3 for j in range(3))}
        times.append([measured[i] for i in range(3)])
    ratios = sorted(theirs / ours for ours, theirs, _ in times)
    return {
        "fused_ms": 1000 * statistics.median(ours for ours, _, _ in times),
        "explicit_ms": 1000 * statistics.median(theirs for _, theirs, _ in times),
        "plain_ms": 1000 * statistics.median(alone for _, _, alone in times),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
    }


def main() -> None:
    """Runs every case and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each, in turn")
    parser.add_argument("--length", type=int, default=1024, help="tokens per text")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    cases = [partial(compare_steps, width, heads, rows=4) for width, heads in ((128, 8), (128, 4), (256, 8))]
    cases += [partial(compare_attention, heads, size) for heads, size in ((8, 32), (12, 64))]
    for case in cases:
        rows.append(case(length=options.length, repeats=options.repeats))
        if not options.json:
            row = rows[-1]
            low, high = row["ratio_quartiles"]
            print(
                f"{row['case']:<28} fused {row['fused_ms']:7.0f} ms   explicit {row['explicit_ms']:7.0f} ms   "
                f"without the term {row['plain_ms']:7.0f} ms   {row['ratio']:.2f} × faster ({low:.2f} to {high:.2f})   "
                f"gradients differ by {row['difference']:.1e}",
                flush=True,
            )
    versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    versions["peak_MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"schema": 1, "versions": versions, "rows": rows}) if options.json else f"{versions}")


if __name__ == "__main__":
    main()
