"""Tokens per second of decoding a GGUF file, against llama.cpp on the same file: processes of their own, in turn.

python bench/decode.py FILE.gguf [--weights stored] [--tokens 128] [--repeats 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPT = "The history of the city begins with"
# after a first text that is not counted; the time of the prompt is measured alone and subtracted
OURS = """
import json, sys, time
import torch
path, weights, prompt, tokens, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
import manyheads
checkpoint = manyheads.load(path, weights=None if weights == "float32" else weights)
def generate(count):
    start = time.perf_counter()
    text = checkpoint.generate(prompt, max_new_tokens=count, temperature=0.0, min_new_tokens=count)
    return time.perf_counter() - start, text
generate(8)
one, (seconds, text) = generate(1)[0], generate(tokens)
print(json.dumps({"rate": (tokens - 1) / (seconds - one), "text": text}))
"""
THEIRS = """
import json, os, sys, time
import xllamacpp
path, weights, prompt, tokens, threads = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.cpuparams.n_threads = path, 1024, 1, threads
server = xllamacpp.Server(params)
def generate(count):
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    start = time.perf_counter()
    out = server.handle_completions(body)
    return time.perf_counter() - start, out["choices"][0]["text"]
generate(8)
one, (seconds, text) = generate(1)[0], generate(tokens)
print(json.dumps({"rate": (tokens - 1) / (seconds - one), "text": text}))
sys.stdout.flush()
os._exit(0)  # without waiting for threads of its own
"""


def measure(program: str, arguments: list[Any]) -> dict[str, Any]:
    command = [sys.executable, "-c", program, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--weights", default="stored", help="stored, int8, int4 or float32")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    arguments = [str(options.file), options.weights, PROMPT, options.tokens, options.threads]
    pairs = [(measure(OURS, arguments), measure(THEIRS, arguments)) for _ in range(options.repeats)]
    ratios = sorted(ours["rate"] / theirs["rate"] for ours, theirs in pairs)
    for name, results in zip(("manyheads", "llama.cpp"), zip(*pairs, strict=True), strict=True):
        rates = sorted(result["rate"] for result in results)
        print(f"{name}: {statistics.median(rates):.1f} tokens/s ({rates[0]:.1f} to {rates[-1]:.1f})")
    print(f"ratio: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), {options.repeats} pairs")
    ours, theirs = pairs[0]
    same = next((i for i, pair in enumerate(zip(ours["text"], theirs["text"], strict=False)) if pair[0] != pair[1]), -1)
    print("the same text" if same < 0 else f"the texts differ after {same} characters")


if __name__ == "__main__":
    main()
