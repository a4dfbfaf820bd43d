"""What seeing costs: recording, fused statistics and L_focus, in time and memory, against what they replace.

    python bench/record.py [--quick] [--repeats 5] [--length 1024] [--lengths 256,1024,4096,16384] [--json]

Recording is compared with the plain forward pass and with transformers' eager attention, fused statistics with the
attention alone and with the explicit matrix, where that fits into memory. Times are medians of runs in turn, on one
thread. Memory is measured in processes of their own: what a forward pass leaves behind while its attentions can still
be seen, and the peak of statistics.
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
from auxiliary import compare_attention
from torch import Tensor

from manyheads import build, read, record
from manyheads.parts.core import Dot, DotSpec
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions
from manyheads.parts.statistics import AttentionCall

HEADS, SIZE = 12, 64
NAMES = ("plain", "record(model, activations=False)", "record(model)", "transformers eager")
EXPLICIT_COPIES = 5  # matrices in memory at once, as measured
LONG = 4096  # tokens from which two runs suffice, the first of them counted too


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(functions: dict[str, Callable[[], Any]], repeats: int, *, warm_up: int = 1) -> dict[str, float]:
    """The median time of each, run in turn after runs that are not counted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(warm_up + repeats):
        for name, function in functions.items():
            elapsed = seconds(function)
            if repeat >= warm_up:
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
        with record(model, activations=name == "record(model)") as tape:
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


# ---------------------------------------------------------------------------------------------------------- statistics


Functions = dict[str, Callable[[], Any]]


def statistics_functions(length: int) -> Functions:
    """Attention alone, with fused statistics, and the entropy of the explicit matrix if it fits into memory."""
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

    functions: Functions = {"attention": lambda: core(q, k, v, **context), "fused statistics": fused}
    return functions | ({"explicit entropy": explicit} if explicit_megabytes(length) < 0.7 * available() else {})


def explicit_megabytes(length: int) -> float:
    """An estimate of the peak of the explicit form."""
    return EXPLICIT_COPIES * HEADS * length**2 * 4 / 1e6


def available() -> float:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024 / 1e6


@torch.no_grad()
def statistics_peaks(length: int) -> dict[str, float]:
    """The peak of memory of each above what was there before, in this process, which has done nothing else."""
    for function in statistics_functions(8).values():
        function()
    peaks = {}
    for name, function in statistics_functions(length).items():
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins at what is resident now
        before = resident()
        function()
        with open("/proc/self/status") as file:
            peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
        peaks[name] = peak * 1024 / 1e6 - before
    return peaks


@torch.no_grad()
def statistics_costs(length: int, repeats: int) -> dict[str, dict[str, float]]:
    is_long = length >= LONG
    repeats, warm_up = (min(repeats, 2), 0) if is_long else (repeats, 1)
    times = interleaved(statistics_functions(length), repeats, warm_up=warm_up)
    return {"seconds": times, "megabytes": child("statistics", length)}


def print_statistics(length: int, row: dict[str, dict[str, float]]) -> None:
    seconds, peaks = row["seconds"], row["megabytes"]
    for name in seconds:
        share = f"{seconds[name] / seconds['attention']:6.2f} × attention"
        print(f"  {length:>6,} tokens  {name:<18}{seconds[name] * 1e3:10,.1f} ms {share}  peak {peaks[name]:+9,.1f} MB")
    if "explicit entropy" not in seconds:
        print(
            f"  {length:>6,} tokens  explicit entropy  {explicit_megabytes(length) / 1e3:,.1f} GB by estimate: not run"
        )


# ---------------------------------------------------------------------------------------------------------------- main


def child(name: str, length: int) -> Any:
    """A measurement of memory in a process of its own."""
    command = [sys.executable, __file__, "--memory-of", name, "--length", str(length)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help=f"timed runs of each; at most 2 from {LONG:,} tokens")
    parser.add_argument("--length", type=int, default=1024, help="tokens of recording and of L_focus")
    parser.add_argument("--lengths", default="256,1024,4096,16384", help="tokens of the statistics")
    parser.add_argument("--quick", action="store_true", help="small lengths and two repeats, to see that it works")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.length, options.lengths = 2, 128, "128,256"
    return options


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    if options.memory_of:
        is_statistics = options.memory_of == "statistics"
        length = options.length
        print(json.dumps(statistics_peaks(length) if is_statistics else kept_megabytes(options.memory_of, length)))
        return
    with torch.no_grad():
        ids, functions = torch.randint(0, 50257, (1, options.length)), {name: forward(name) for name in NAMES}
        times = interleaved({name: partial(function, ids) for name, function in functions.items()}, options.repeats)
    functions.clear()
    kept = {name: child(name, options.length) for name in NAMES}
    by_length = {length: statistics_costs(length, options.repeats) for length in map(int, options.lengths.split(","))}
    focus = compare_attention(HEADS, SIZE, options.length, options.repeats)
    if options.json:
        print(json.dumps({"seconds": times, "megabytes": kept, "statistics": by_length, "focus": focus}))
        return
    print(f"GPT-2 small, {options.length:,} tokens, one thread")
    for name in times:
        extra, share = kept[name] - kept["plain"], times[name] / times["plain"]
        print(f"  {name:<33} {times[name] * 1e3:8.0f} ms  {share:6.3f} × plain  {extra:+8.0f} MB")
    print(f"Entropy and distance, {HEADS} heads of {SIZE}, causal")
    for length, row in by_length.items():
        print_statistics(length, row)
    low, high = focus["ratio_quartiles"]
    print(f"Attention with L_focus, forward and backward, {options.length:,} tokens, {HEADS} heads of {SIZE}")
    print(
        f"  fused {focus['fused_ms']:,.0f} ms, explicit {focus['explicit_ms']:,.0f} ms: {focus['ratio']:.2f} × faster "
        f"({low:.2f} to {high:.2f}); without the term {focus['plain_ms']:,.0f} ms"
    )


if __name__ == "__main__":
    main()
