"""What seeing costs: recording against the plain forward pass and transformers' eager attention, and fused statistics.

    python bench/record.py [--repeats 5] [--length 1024] [--lengths 256,1024,4096] [--json]

Times are of one process each, in turn. The memory of recording is measured in processes of their own: what a forward
pass leaves behind while its attentions can still be seen.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from manyheads import build, read, record
from manyheads.parts.core import Dot, DotSpec
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions
from manyheads.parts.statistics import AttentionCall

HEADS, SIZE = 12, 64
NAMES = ("plain", "record", "record with activations", "transformers eager")


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The median time of each, run in turn after one run that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            elapsed = seconds(function)
            if repeat:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


# ----------------------------------------------------------------------------------------------------------- recording


def forward(name: str) -> Callable[[Tensor], Any]:
    """One forward pass of ids, which returns what must stay in memory to see the attention."""
    if name == "transformers eager":
        transformers: Any = import_module("transformers")
        eager = transformers.GPT2LMHeadModel(transformers.GPT2Config(attn_implementation="eager")).eval()
        return lambda ids: eager(ids, output_attentions=True, use_cache=False)
    model = build(read("gpt2")).eval()

    def recorded(ids: Tensor) -> Any:
        with record(model, activations=name == "record with activations") as tape:
            return model(ids), tape

    return model if name == "plain" else recorded


def resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@torch.no_grad()
def kept_megabytes(name: str, length: int) -> float:
    """What stays in memory after a forward pass, in this process, which has done nothing else."""
    function = forward(name)
    function(torch.zeros(1, 8, dtype=torch.long))
    before = resident()
    kept = function(torch.zeros(1, length, dtype=torch.long))
    after = resident()
    del kept
    return after - before


def memory(length: int) -> dict[str, float]:
    commands = {name: [sys.executable, __file__, "--memory-of", name, "--length", str(length)] for name in NAMES}
    return {
        name: float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for name, command in commands.items()
    }


# ---------------------------------------------------------------------------------------------------------- statistics


@torch.no_grad()
def statistics_times(length: int, repeats: int) -> dict[str, float]:
    """Attention alone, with fused statistics, and with the entropy of the explicit matrix."""
    core = Dot(DotSpec(), SIZE)
    q, k, v = (torch.randn(1, HEADS, length, SIZE) for _ in range(3))
    mask, index = Mask(length, length, q.device, causal=True), torch.arange(length)[None]
    context: dict[str, Any] = {"mask": mask, "positions": Positions(index, index, bound=length)}

    def explicit() -> Any:
        weights = core.weights(q, k, **context)
        return -(weights * weights.clamp(min=1e-38).log()).sum(-1)

    def fused() -> Any:
        call = AttentionCall("attention", core, q, k, **context)
        return call.entropy, call.squared_distance

    functions = {
        "attention": lambda: core(q, k, v, **context),
        "fused statistics": fused,
    }
    return interleaved(functions | ({"explicit": explicit} if length <= 4096 else {}), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lengths", default="256,1024,4096,16384")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print(kept_megabytes(options.memory_of, options.length))
        return
    with torch.no_grad():
        ids, functions = torch.randint(0, 50257, (1, options.length)), {name: forward(name) for name in NAMES}
        times = interleaved({name: partial(function, ids) for name, function in functions.items()}, options.repeats)
    kept = memory(options.length)
    by_length = {length: statistics_times(length, options.repeats) for length in map(int, options.lengths.split(","))}
    if options.json:
        print(json.dumps({"seconds": times, "megabytes": kept, "statistics": by_length}))
        return
    print(f"GPT-2 small, {options.length:,} tokens, one thread")
    for name in times:
        extra, share = kept[name] - kept["plain"], times[name] / times["plain"]
        print(f"  {name:<24} {times[name] * 1e3:8.0f} ms  {share:5.2f} × plain  {extra:+8.0f} MB")
    print(f"Entropy and distance, {HEADS} heads of {SIZE}, causal")
    for length, row in by_length.items():
        figures = "  ".join(
            f"{name} {value * 1e3:,.1f} ms ({value / row['attention']:.2f} ×)" for name, value in row.items()
        )
        print(f"  {length:>6,} tokens: {figures}")


if __name__ == "__main__":
    main()
