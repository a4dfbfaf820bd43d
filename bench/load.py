"""What loading a folder costs, in time and memory, against transformers: each load in a process of its own, interleaved.

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

# the baseline is taken after everything is imported and a first tensor made; what grows from there is the load's
PROBE = """
import json, sys, time
import torch
torch.set_num_threads(2)
if sys.argv[1] == "ours":
    from manyheads.checkpoint import load as run
else:
    import transformers
    from transformers import LlamaForCausalLM
    transformers.utils.logging.disable_progress_bar()
    run = LlamaForCausalLM.from_pretrained
torch.ones(8) @ torch.ones(8)
def held(which):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(which))
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
before, start = held("VmRSS"), time.perf_counter()
found = run(sys.argv[2])
model = found.model if sys.argv[1] == "ours" else found
seconds = time.perf_counter() - start
with torch.no_grad():
    logits = model(torch.tensor([[1, 2, 3]]))
logits = logits if sys.argv[1] == "ours" else logits.logits
first = time.perf_counter() - start
weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
said = {"seconds": seconds, "first": first, "grown": held("VmHWM") - before, "weights": weights}
print(json.dumps(said | {"sum": float(logits.double().sum())}))
"""


def folder(path: Path) -> Path:
    """A LLaMA of about 400 MB, random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8
    )
    LlamaForCausalLM(config).save_pretrained(path)  # type: ignore[no-untyped-call]
    return path


def probe(who: str, path: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROBE, who, str(path)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeats", type=int, default=7)
    repeats = arguments.parse_args().repeats
    with tempfile.TemporaryDirectory() as place:
        path = folder(Path(place) / "llama")
        probe("ours", path), probe("theirs", path)  # the file is in the page cache from here on
        runs = [(probe("ours", path), probe("theirs", path)) for _ in range(repeats)]
    apart = max(abs(ours["sum"] - theirs["sum"]) / abs(theirs["sum"]) for ours, theirs in runs)
    ours, theirs = zip(*runs, strict=True)

    def median(found: tuple[dict[str, Any], ...], key: str) -> float:
        return statistics.median(run[key] for run in found)

    ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in runs)
    first = statistics.median(a["first"] / b["first"] for a, b in runs)
    weights = ours[0]["weights"]
    print(f"{weights / 1e6:.0f} MB of weights, {repeats} pairs of processes; sums of logits differ by {apart:.1e}")
    print(f"memory grown / weights: manyheads {median(ours, 'grown') / weights:.3f}, transformers {median(theirs, 'grown') / weights:.3f}")
    print(f"seconds to load: manyheads {median(ours, 'seconds'):.3f}, transformers {median(theirs, 'seconds'):.3f}, ratio {ratio:.3f}")
    print(f"seconds to the first logits, after imports: ratio {first:.3f}")


if __name__ == "__main__":
    main()
