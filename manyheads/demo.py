"""The first thing to run: a model that reads dates in twenty languages, trained while one watches, and what it looks at."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.checkpoint import Loaded, load
from manyheads.model.build import device_for
from manyheads.parts.batch import Inputs
from manyheads.parts.record import record
from manyheads.spec import Tree
from manyheads.train.run import made_ready, read_run
from manyheads.training import EXIT, watched

TOWER: Tree = {
    "layers": 2,
    "width": 64,
    "attention": {"kind": "heads", "heads": 4},
    "embed": {"kind": "tokens", "scale": True},
    "position": "sinusoidal",
    "feedforward": {"kind": "mlp", "hidden": 256, "activation": "relu"},
    "residual": "pre",
}
SHARED: Tree = {"kind": "shared", "scale": True}
RUN: Tree = {
    "seed": 1,
    "model": {"vocab": "tokenizer", "init": "xavier", "encoder": TOWER, "decoder": {"like": "encoder", "embed": SHARED, "cross": True}},
    "data": {"kind": "dates"},
    "objective": {"kind": "seq2seq"},
    "optim": {"rate": 3e-3, "schedule": {"kind": "linear", "warmup": 100}},
    "train": {"steps": 1200, "tokens": 4096, "goal": {"metric": "exact", "reach": 0.99}},
}
SHADES = " ░▒▓█"


def run(output: Path, console: Any) -> int:
    """Trains, translates some unseen days, and shows where the decoder looked while it wrote one of them."""
    ready = made_ready(read_run(RUN))
    console.print(f"{ready.corpus.about}\n", highlight=False)
    ended = watched(ready, output, device=device_for("auto"))
    if EXIT[ended.reason]:
        return EXIT[ended.reason]
    loaded = load(output)
    unseen = ready.corpus.validation
    for i in range(0, min(len(unseen), 240), 40):
        source, target = unseen[i]
        written = loaded.generate(source, max_new=16)
        console.print(f"  {source:<38} → {written:<12} {'' if same(written, target) else f'(it is {target})'}", highlight=False)
    look(loaded, unseen[120][0], console)
    here = os.path.relpath(sys.argv[0])
    program = "manyheads" if shutil.which("manyheads") else "python -m manyheads" if here.endswith("__main__.py") else here  # to be typed
    console.print("\nNext:", highlight=False)
    for command in (f'predict {output} "<en> 5/6/2031"', f"evaluate {output} --examples 5", f"audit {output}"):
        console.print(f"  {program} {command}", highlight=False)
    return 0


def same(written: str, target: str) -> bool:
    return written.replace(" ", "") == target.replace(" ", "")


@torch.no_grad()
def look(loaded: Loaded, text: str, console: Any) -> None:
    """Each token that was written, and how much it looked at each token that was read: the mean over the heads of the last layer."""
    encoding = loaded.tokenizer.encode(text)
    assert loaded.origin is not None
    written = [loaded.origin.config["decoder_start_token_id"], *loaded.generate(encoding.ids, max_new=16)]
    with record(loaded.model) as seen:
        loaded.model(torch.tensor([written]), Inputs(torch.tensor([encoding.ids])))
    weights: Tensor = [one for one in seen if "cross" in one.name][-1].weights()[0].mean(dim=0)
    read = [token.strip("▁") or " " for token in encoding.tokens]  # which stands for a space
    names = [loaded.tokenizer.id_to_token(token).strip("▁") for token in written[1:]] + ["</s>"]
    console.print(f"\nWhere the decoder looked while it wrote {''.join(names[:-1])} (last layer, mean of its heads):\n", highlight=False)
    widest = max(map(len, names))
    for i, name in enumerate(names):
        cells = "".join(SHADES[min(4, int(weight * 5))] * 2 + " " for weight in weights[i].tolist())
        console.print(f"  {name:>{widest}} {cells}", highlight=False)
    for row in range(max(map(len, read))):  # the names of columns, downwards
        console.print(" " * (widest + 3) + "".join(f"{token[row] if row < len(token) else ' '}  " for token in read), highlight=False)
