"""Time and memory of loading a folder, against transformers: each load in a process of its own, in turn.

python bench/load.py [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# memory is counted from after all imports and a first operation
PROBE = """
import json, sys, time
import torch
torch.set_num_threads(2)
if sys.argv[1] == "manyheads":
    from manyheads.checkpoint.loading import load
else:
    import transformers
    from transformers import LlamaForCausalLM
    transformers.utils.logging.disable_progress_bar()
    load = LlamaForCausalLM.from_pretrained
torch.ones(8) @ torch.ones(8)
def memory(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
before, start = memory("VmRSS"), time.perf_counter()
model = load(sys.argv[2])
model = getattr(model, "model", model) if sys.argv[1] == "manyheads" else model
seconds = time.perf_counter() - start
with torch.no_grad():
    logits = model(torch.tensor([[1, 2, 3]]))
logits = getattr(logits, "logits", logits)
first_logits = time.perf_counter() - start
weights = sum(parameter.nbytes for parameter in model.parameters())
result = {"seconds": seconds, "first_logits": first_logits, "memory": memory("VmHWM") - before, "weights": weights}
print(json.dumps(result | {"sum": float(logits.double().sum())}))
"""


def save_model(path: Path) -> Path:
    """A random LLaMA of about 400 MB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    LlamaForCausalLM(config).save_pretrained(path)  # type: ignore[no-untyped-call]
    return path


def probe(library: str, path: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", PROBE, library, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as temporary:
        path = save_model(Path(temporary) / "llama")
        probe("manyheads", path), probe("transformers", path)  # from here on the file is in the page cache
        pairs = [(probe("manyheads", path), probe("transformers", path)) for _ in range(repeats)]
    error = max(abs(ours["sum"] - theirs["sum"]) / abs(theirs["sum"]) for ours, theirs in pairs)
    ours, theirs = zip(*pairs, strict=True)

    def median(results: tuple[dict[str, Any], ...], key: str) -> float:
        return statistics.median(result[key] for result in results)

    def ratio(key: str) -> float:
        return statistics.median(a[key] / b[key] for a, b in pairs)

    weights = ours[0]["weights"]
    print(f"{weights / 1e6:.0f} MB of weights, {repeats} pairs of processes; sums of logits differ by {error:.1e}")
    for library, results in (("manyheads", ours), ("transformers", theirs)):
        print(
            f"{library}: {median(results, 'seconds'):.3f} s, memory / weights {median(results, 'memory') / weights:.3f}"
        )
    print(f"ratio of seconds to load: {ratio('seconds'):.3f}; to the first logits: {ratio('first_logits'):.3f}")


if __name__ == "__main__":
    main()
