"""A small run of every objective, and what becomes of it: trained to its end, stopped on the way, or killed in a process of its own."""

from __future__ import annotations

import hashlib
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import torch
from command import FORKS

from manyheads.train import checkpoint
from manyheads.train.events import Stepped
from manyheads.train.loop import train
from manyheads.train.run import made_ready, read_run

TOWER = {"layers": 1, "width": 16, "attention": {"kind": "heads", "heads": 2}, "feedforward": {"kind": "mlp", "hidden": 32}, "position": "sinusoidal", "residual": {"kind": "pre", "dropout": 0.1}}  # fmt: skip
PATCHES = {"embed": {"kind": "patches", "pixels": 4, "channels": 1}}
RESTORED = {"embed": "restored", "mask": {"causal": False}}
SEQUENCE = {"kind": "sequence", "task": "reverse", "count": 400}
# as a file of one's own: scikit-learn takes seconds to import, and each of these processes would
DIGITS = {"kind": "pictures", "path": str(Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz")}
OBJECTIVES = {
    "seq2seq": {
        "model": {"vocab": "tokenizer", "encoder": TOWER, "decoder": {"like": "encoder", "embed": "shared", "cross": True}},
        "data": SEQUENCE,
    },
    "recurrent": {"model": {"vocab": "tokenizer", "recurrent": {"width": 16}}, "data": SEQUENCE},
    "causal": {"model": {"vocab": "tokenizer", "decoder": TOWER}, "data": {"kind": "biographies", "people": 60}},
    "masked": {"model": {"vocab": "tokenizer", "encoder": TOWER, "head": "masked"}, "data": {"kind": "biographies", "people": 60}},
    "packed": {"model": {"vocab": "tokenizer", "decoder": TOWER}, "data": {"kind": "biographies", "people": 60}},
    "spans": {
        "model": {"vocab": "tokenizer", "encoder": TOWER, "decoder": {"like": "encoder", "embed": "shared", "cross": True}},
        "data": {"kind": "biographies", "people": 60},
    },
    "infill": {"model": {"vocab": "tokenizer", "decoder": TOWER}, "data": {"kind": "biographies", "people": 60}},
    "contrastive": {
        "model": {"vocab": "tokenizer", "encoder": TOWER, "head": {"kind": "vector", "pool": "mean"}},
        "data": {"kind": "sequence", "task": "reverse", "count": 400},
    },
    "classify": {"model": {"encoder": TOWER | PATCHES, "head": {"kind": "classes", "classes": 10, "pool": "mean"}}, "data": DIGITS},
    "patches": {
        "model": {"encoder": TOWER | PATCHES, "decoder": TOWER | RESTORED, "head": {"kind": "pixels", "pixels": 4}},
        "data": DIGITS,
    },
    "shaped": {
        "model": {"vocab": "tokenizer", "encoder": TOWER, "decoder": {"like": "encoder", "embed": "shared", "cross": True}},
        "data": SEQUENCE,
        "shaping": [{"kind": "focus"}, {"kind": "near", "most": 9.0}],
    },
}


def described(name, **train):
    objective = (
        {"kind": "seq2seq", "smoothing": 0.1}
        if name in ("seq2seq", "recurrent", "shaped")
        else {"kind": {"packed": "causal"}.get(name, name)}
    )
    train = {"pack": 50} | train if name == "packed" else train
    usual = {"steps": 6, "tokens": 200, "accumulate": 2, "save_every": 2, "evaluate_every": 3, "evaluate_rows": 20}
    optim = {"rate": 3e-3, "schedule": {"kind": "cosine", "warmup": 2}}
    return OBJECTIVES[name] | {"seed": 5, "objective": objective, "optim": optim, "train": usual | train}


def ended(tree, folder, phase=None, count=1, step=None):
    """In a process of its own: trains, and is killed at a phase of a save, or after a step."""
    torch.set_num_threads(1)
    seen = []

    def here(name):
        seen.append(name)
        if seen.count(phase) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    if phase is not None:
        checkpoint.PHASE = here
    for event in train(made_ready(read_run(tree)), folder):
        if step is not None and isinstance(event, Stepped) and event.step == step:
            os.kill(os.getpid(), signal.SIGKILL)


def in_a_process(*arguments, **options):
    process = FORKS.Process(target=ended, args=arguments, kwargs=options)
    process.start()
    process.join(120)
    return process.exitcode


def stopped(tree, folder, step):
    """Trains until somebody asks for an end behind a step, and gives what happened."""
    events = []
    wish = lambda: "terminated" if sum(isinstance(event, Stepped) for event in events) == step else None  # noqa: E731
    for event in train(made_ready(read_run(tree)), folder, wish=wish):
        events.append(event)
    return events


def digests(folder):
    (newest,) = [path for path in (folder / "checkpoints").iterdir() if path.name == (folder / "checkpoints" / "latest").read_text()]
    return {
        name: hashlib.sha256((newest / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "optimizer.safetensors", "trainer.json")
    }
