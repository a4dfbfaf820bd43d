"""A small run of every task: trained to its end, stopped at a step, or killed at a moment in a process of its own."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import signal
import sys
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from command import FORKS
from torch.nn.modules.module import register_module_forward_pre_hook

from manyheads.model.spec import ModelSpec
from manyheads.training.events import Evaluated, Finished, Step
from manyheads.training.loop import train_events
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run

STACK = {
    "layers": 1,
    "width": 16,
    "attention": {"kind": "heads", "heads": 2},
    "feedforward": {"kind": "mlp", "hidden": 32},
    "position": "sinusoidal",
    "residual": {"kind": "pre", "dropout": 0.1},
}
PATCHES = {"embed": {"kind": "patches", "pixels": 4, "channels": 1}}
RESTORED = {"embed": "mask-tokens", "mask": {"causal": False}}
SEQUENCE = {"kind": "sequence", "function": "reverse", "count": 400, "validation_count": 40}
# as a file of one's own: scikit-learn takes seconds to import, and each of these processes would
DIGITS = {
    "kind": "images",
    "path": str(Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"),
}
TASKS = {
    "seq2seq": {
        "model": {
            "vocab": "tokenizer",
            "encoder": STACK,
            "decoder": {"like": "encoder", "embed": "shared", "cross": True},
        },
        "data": SEQUENCE,
    },
    "recurrent": {"model": {"vocab": "tokenizer", "recurrent": {"width": 16}}, "data": SEQUENCE},
    "causal": {"model": {"vocab": "tokenizer", "decoder": STACK}, "data": {"kind": "biographies", "people": 60}},
    "masked": {
        "model": {"vocab": "tokenizer", "encoder": STACK, "head": "masked"},
        "data": {"kind": "biographies", "people": 60},
    },
    "packed": {"model": {"vocab": "tokenizer", "decoder": STACK}, "data": {"kind": "biographies", "people": 60}},
    "spans": {
        "model": {
            "vocab": "tokenizer",
            "encoder": STACK,
            "decoder": {"like": "encoder", "embed": "shared", "cross": True},
        },
        "data": {"kind": "biographies", "people": 60},
    },
    "infill": {"model": {"vocab": "tokenizer", "decoder": STACK}, "data": {"kind": "biographies", "people": 60}},
    "retrieval": {
        "model": {"vocab": "tokenizer", "encoder": STACK, "head": {"kind": "vector", "pool": "mean"}},
        "data": SEQUENCE,
    },
    "classify": {
        "model": {"encoder": STACK | PATCHES, "head": {"kind": "classes", "classes": 10, "pool": "mean"}},
        "data": DIGITS,
    },
    "mae": {
        "model": {"encoder": STACK | PATCHES, "decoder": STACK | RESTORED, "head": {"kind": "pixels", "pixels": 4}},
        "data": DIGITS,
    },
    "shaped": {
        "model": {
            "vocab": "tokenizer",
            "encoder": STACK,
            "decoder": {"like": "encoder", "embed": "shared", "cross": True},
        },
        "data": SEQUENCE,
        "auxiliary_losses": [{"kind": "focus"}, {"kind": "near", "max_cost": 9.0}],
    },
}


def described(name, **train):
    task = (
        {"kind": "seq2seq", "label_smoothing": 0.1}
        if name in ("seq2seq", "recurrent", "shaped")
        else {"kind": {"packed": "causal"}.get(name, name)}
    )
    train = {"pack": 50} | train if name == "packed" else train
    usual = {"steps": 6, "batch_tokens": 200, "accumulate": 2, "save_every": 2, "eval_every": 3, "eval_rows": 20}
    optim = {"lr": 3e-3, "schedule": {"kind": "cosine", "warmup_steps": 2}}
    return TASKS[name] | {"seed": 5, "task": task, "optim": optim, "train": usual | train}


def at_file(event, pattern, action, count=1):
    """Calls an action in this process right before its count-th file operation that matches, an audit event of Python.

    Of "open", "os.mkdir", "os.rename" and "shutil.rmtree", the pattern is searched in every path.
    """
    matches = []

    def hook(name, arguments):
        if name == event:
            paths = [os.fsdecode(argument) for argument in arguments if isinstance(argument, str | bytes | os.PathLike)]
            if any(re.search(pattern, path) for path in paths):
                matches.append(paths)
                if len(matches) == count:
                    action()

    sys.addaudithook(hook)


@contextmanager
def opened_files(folder):
    """Counts how often the block opens each file below a folder, in this process."""
    counts, counting = Counter(), True

    def hook(name, arguments):
        if counting and name == "open" and str(arguments[0]).startswith(str(folder)):
            counts[str(Path(arguments[0]).relative_to(folder))] += 1

    sys.addaudithook(hook)  # which cannot be removed
    try:
        yield counts
    finally:
        counting = False


def at_forward(actions, *, training=True):
    """Calls actions[n] in this process right before the n-th forward pass of a model in training, or in evaluation."""
    count = itertools.count(1)

    def hook(module, inputs):
        if not isinstance(getattr(module, "spec", None), ModelSpec) or next(module.parameters()).is_meta:
            return  # a layer, or a model that is only counted
        if module.training is training:
            actions.get(next(count), lambda: None)()

    return register_module_forward_pre_hook(hook)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def train_until(tree, folder, step=None, moment=None, count=1):
    """In a process of its own: trains, and is killed after a step, or at a file operation (event, pattern)."""
    torch.set_num_threads(1)
    if moment is not None:
        at_file(*moment, kill, count=count)
    for event in train_events(prepare(read_run(tree)), folder):
        if isinstance(event, Step) and event.step == step:
            kill()


def in_a_process(*arguments, target=train_until, **options):
    """The exit code of a process that trains, -SIGKILL if it was killed."""
    process = FORKS.Process(target=target, args=arguments, kwargs=options)
    process.start()
    process.join(120)
    return process.exitcode


def train_all(tree, folder, **options):
    return list(train_events(prepare(read_run(tree)), folder, **options))


def end_of(events):
    """The step and the reason of the last event."""
    assert isinstance(events[-1], Finished)
    return events[-1].step, events[-1].reason


def last_metrics(events):
    """The metrics of the last evaluation."""
    return [event.metrics for event in events if isinstance(event, Evaluated)][-1]


def train_and_evaluate(tree, folder, **fields):
    """A prepared run, trained to its end for seconds, and its metrics on the validation set."""
    usual = {"steps": 40, "batch_tokens": 600, "eval_every": 1000, "save_every": 1000, "eval_rows": 100}
    optim = {"lr": 1e-2, "schedule": {"kind": "cosine", "warmup_steps": 5}}
    run = prepare(read_run({"optim": optim, "train": usual | fields} | tree))
    return run, last_metrics(train_events(run, folder))


def resume(tree, folder):
    """The second event of a start, after Prepared; the run goes no further."""
    events = train_events(prepare(read_run(tree)), folder)
    next(events)
    resumed = next(events)
    events.close()
    return resumed


def stop_after(tree, folder, step):
    """Trains until should_stop answers after a step; returns the events."""
    events = []

    def should_stop():
        return "terminated" if sum(isinstance(event, Step) for event in events) == step else None

    for event in train_events(prepare(read_run(tree)), folder, should_stop=should_stop):
        events.append(event)
    return events


def hashes(folder):
    """Of the files of the latest checkpoint that must be equal, bit by bit, in two equal runs."""
    checkpoint = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text()
    names = ("model.safetensors", "optimizer.safetensors", "trainer.json")
    return {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names}
