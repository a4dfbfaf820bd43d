"""What loss shaping costs: a training step with L_focus at 1,024 tokens, by the fused kernel and by explicit attention.

    python bench/shaping.py [--repeats 5] [--length 1024] [--json]

Both run in this process, in turn, with the same weights and tokens. The explicit step makes each attention matrix once and uses it
twice, for the values and for the entropy; the fused one never makes it. Losses and gradients are checked to agree.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyheads import build, read_model
from manyheads.objective.language import CausalSpec
from manyheads.objective.score import Batch
from manyheads.objective.shaping import FocusSpec, counts_of, shaped, total
from manyheads.parts.attend import InnerProduct
from manyheads.parts.batch import Inputs

VOCAB = 512
FOCUS = (FocusSpec(weight=0.1),)


def batch_of(length: int, rows: int) -> Batch:
    ids = torch.randint(0, VOCAB, (rows, length + 1))
    return Batch(Inputs(ids[:, :-1]), ids[:, 1:])


def fused(model: Any, batch: Batch) -> Tensor:
    score = shaped(CausalSpec(), FOCUS, model, batch)
    return total(score, score.count, FOCUS, counts_of(FOCUS, model, [batch]))


def explicit(model: Any, batch: Batch) -> Tensor:
    """The same loss by the matrices: every core attends by the weights it makes, and leaves their entropy here."""
    entropies: list[Tensor] = []
    future = torch.ones(batch.inputs.length, batch.inputs.length, dtype=torch.bool).triu(1)

    def attended(core: InnerProduct, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        weights = torch.softmax((q @ k.mT * core.scale).masked_fill_(future, -torch.inf), dim=-1)
        entropies.append(-(weights * weights.clamp(min=1e-38).log()).sum(-1))
        return weights @ v

    cores = [module for module in model.modules() if isinstance(module, InnerProduct)]
    for core in cores:
        core.forward = attended.__get__(core)  # type: ignore[method-assign]
    try:
        score = CausalSpec().score(model, batch)
    finally:
        for core in cores:
            del core.forward
    return score.total / score.count + FOCUS[0].weight * torch.stack(entropies).mean()


def plain(model: Any, batch: Batch) -> Tensor:
    """The objective alone."""
    score = CausalSpec().score(model, batch)
    return score.total / score.count


def seconds(step: Callable[[Any, Batch], Tensor], model: Any, batch: Batch) -> float:
    model.zero_grad()
    start = time.perf_counter()
    step(model, batch).backward()
    return time.perf_counter() - start


def checked(model: Any, batch: Batch) -> float:
    """How far the gradients of both are apart, as a share of the longest."""
    found = []
    for step in (fused, explicit):
        model.zero_grad()
        loss = step(model, batch)
        loss.backward()
        found.append((float(loss.detach()), [parameter.grad.clone() for parameter in model.parameters()]))
    (ours, our_gradients), (theirs, their_gradients) = found
    assert abs(ours - theirs) < 1e-4, f"the losses are {ours} and {theirs}"
    pairs = zip(our_gradients, their_gradients, strict=True)
    difference = max(float((one - other).abs().max()) for one, other in pairs)
    difference /= max(float(gradient.abs().max()) for gradient in their_gradients)
    assert difference < 1e-3, f"the gradients differ by {difference}"
    return difference


def compare(width: int, heads: int, length: int, rows: int, repeats: int) -> dict[str, Any]:
    tower = {"layers": 4, "width": width, "attention": {"heads": heads}, "position": "rope", "residual": "pre"}
    model, batch = build(read_model({"vocab": VOCAB, "decoder": tower})), batch_of(length, rows)
    difference = checked(model, batch)
    steps = (fused, explicit, plain)
    times: list[list[float]] = []
    for turn in range(repeats):
        order = [(turn + i) % 3 for i in range(3)]
        taken = {i: seconds(steps[i], model, batch) for i in order}
        times.append([taken[i] for i in range(3)])
    ratios = sorted(theirs / ours for ours, theirs, _ in times)
    return {
        "case": f"width {width}, {heads} heads, {length} tokens",
        "fused_ms": 1000 * statistics.median(ours for ours, _, _ in times),
        "explicit_ms": 1000 * statistics.median(theirs for _, theirs, _ in times),
        "unshaped_ms": 1000 * statistics.median(alone for _, _, alone in times),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "difference": difference,
    }


def main() -> None:
    """Runs every case and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each, in turn")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a text")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for width, heads in ((128, 8), (128, 4), (256, 8)):
        rows.append(compare(width, heads, options.length, 4, options.repeats))
        if not options.json:
            row = rows[-1]
            low, high = row["ratio_quartiles"]
            print(
                f"{row['case']:<36} fused {row['fused_ms']:7.0f} ms   explicit {row['explicit_ms']:7.0f} ms   "
                f"without the term {row['unshaped_ms']:7.0f} ms   {row['ratio']:.2f} × faster ({low:.2f} to {high:.2f})   "
                f"gradients differ by {row['difference']:.1e}",
                flush=True,
            )
    versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    versions["peak_MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"schema": 1, "versions": versions, "rows": rows}) if options.json else f"{versions}")


if __name__ == "__main__":
    main()
