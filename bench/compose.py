"""What composition costs: forward and backward of the composed model against a plain one with the same weights.

    python bench/compose.py [--repeats 15] [--json]

Both run in this process, in turn, on the same tensors, with the same fused kernel; the ratio is the median of
those of paired times. The outputs must agree, and the composed model must not compute a tensor of length × length.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads import build, read_model
from manyheads.labs.reference import causal_2019, transformer_2017

VOCAB = 512


@dataclass(frozen=True)
class Case:
    """The composed and the plain model as functions without arguments, and the weights they share."""

    name: str
    composed: Callable[[], Tensor]
    plain: Callable[[], Tensor]
    weights: Mapping[str, Tensor]
    lengths: set[int]
    tokens: int


def fused(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """The fused kernel for the plain models, whose only mask is the causal one."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=visible is not None)


def decoder(width: int, length: int, batch: int) -> Case:
    stack = {
        "layers": 4, "width": width, "attention": {"heads": width // 32}, "mask": {"causal": True}, "residual": "pre",
        "position": {"kind": "learned", "length": length}, "feedforward": {"activation": "gelu-tanh"},
    }  # fmt: skip
    model = build(read_model({"vocab": VOCAB, "decoder": stack}))
    weights = dict(model.named_parameters())
    ids = torch.randint(0, VOCAB, (batch, length))
    return Case(
        f"decoder, width {width}",
        lambda: model(ids),
        lambda: causal_2019(weights, ids, heads=width // 32, layers=4, attend=fused),
        weights,
        {length},
        batch * length,
    )


def pair(width: int, length: int, batch: int) -> Case:
    stack = {
        "layers": 3, "width": width, "attention": {"heads": width // 32, "bias": False, "output_bias": False},
        "embed": {"scale": True}, "position": "sinusoidal", "feedforward": {"activation": "relu"}, "residual": "post",
    }  # fmt: skip
    other = {"like": "encoder", "embed": {"kind": "shared", "scale": True}, "mask": {"causal": True}, "cross": True}
    model = build(read_model({"vocab": VOCAB, "encoder": stack, "decoder": other}))
    weights = dict(model.named_parameters())
    source, target = (torch.randint(0, VOCAB, (batch, size)) for size in (length, length - 8))
    return Case(
        f"encoder–decoder, width {width}",
        lambda: model(target, source),
        lambda: transformer_2017(
            weights, source, target, heads=width // 32, encoder_layers=3, decoder_layers=3, attend=fused
        ),
        weights,
        {length, length - 8},
        batch * (2 * length - 8),
    )


class NoSquare(TorchDispatchMode):
    """Fails when an operation computes a tensor whose last two sizes are both the length of a sequence."""

    def __init__(self, lengths: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lengths = lengths

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.dim() >= 2 and set(tensor.shape[-2:]) <= self.lengths:
                raise AssertionError(f"{func} computed a tensor of {tuple(tensor.shape)}")
        return out


def seconds(run: Callable[[], Tensor], weights: Mapping[str, Tensor]) -> float:
    for weight in weights.values():
        weight.grad = None
    start = time.perf_counter()
    run().square().mean().backward()
    return time.perf_counter() - start


def compare(case: Case, repeats: int) -> dict[str, Any]:
    with torch.no_grad():
        ours, theirs = case.composed(), case.plain()
    difference = float((ours - theirs).abs().max())
    assert difference < 1e-4, f"{case.name}: the outputs differ by {difference}"
    with NoSquare(case.lengths):
        case.composed().square().mean().backward()
    times: list[tuple[float, float]] = []
    for repeat in range(repeats + 2):
        runs = [case.composed, case.plain]
        first, second = (seconds(run, case.weights) for run in (runs if repeat % 2 == 0 else runs[::-1]))
        if repeat >= 2:  # the first two warm up
            times.append((first, second) if repeat % 2 == 0 else (second, first))
    ratios = sorted(ours / theirs for ours, theirs in times)
    return {
        "case": case.name,
        "composed_ms": 1000 * statistics.median(ours for ours, _ in times),
        "plain_ms": 1000 * statistics.median(theirs for _, theirs in times),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "tokens_per_second": case.tokens / statistics.median(ours for ours, _ in times),
        "difference": difference,
    }


def main() -> None:
    """Runs every case and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each, in turn")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args()
    torch.manual_seed(0)
    # lengths that no width, head or vocabulary has, so that a square tensor cannot be mistaken
    cases = [make(width, 141, batch) for make in (decoder, pair) for width, batch in ((128, 16), (384, 8))]
    rows = []
    for case in cases:
        rows.append(compare(case, options.repeats))
        if not options.json:
            row = rows[-1]
            low, high = row["ratio_quartiles"]
            print(
                f"{row['case']:<28} composed {row['composed_ms']:7.1f} ms   plain {row['plain_ms']:7.1f} ms   "
                f"ratio {row['ratio']:.3f} ({low:.3f} to {high:.3f})   outputs differ by {row['difference']:.1e}",
                flush=True,
            )
    versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    print(json.dumps({"schema": 1, "versions": versions, "rows": rows}) if options.json else f"{versions}")


if __name__ == "__main__":
    main()
