"""A run as data: model, data, tokenizer, objective and how to train, in one file; and the folder that explains a run."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from manyheads.convert.opened import Opened
from manyheads.data import builtin  # noqa: F401  (fills the slot)
from manyheads.data.prepared import Encoded
from manyheads.data.source import Corpus, DataSpec
from manyheads.data.tokens import TokenizerSpec, WordsSpec
from manyheads.model.spec import ModelSpec, read_model
from manyheads.objective import language, pairs, pooled  # noqa: F401  (fill the slot)
from manyheads.objective.score import ObjectiveSpec, Tokens
from manyheads.spec import Spec, SpecError, Tree, field, located, parse, quoted, to_tree
from manyheads.train.lora import LoraSpec
from manyheads.train.optim import OptimSpec
from manyheads.train.start import described_by, opened_start, tokenizer_of, tokens_of


class GoalSpec(Spec):
    """When a run may end before its last step."""

    metric: Literal["loss", "exact", "accuracy"] = field("loss", "what is looked at")
    reach: float = field(0.0, "where it is good enough: a loss at most this, a share at least this")


class TrainSpec(Spec):
    """How long, how much at once, and what is kept."""

    steps: int = field(1000, "updates of the weights", ge=1)
    tokens: int = field(4096, "places in a batch, padding included", ge=1)
    accumulate: int = field(1, "batches that make one update", ge=1, le=4096)
    evaluate_every: int = field(200, "steps between looks at unseen rows", ge=1)
    evaluate_rows: int = field(512, "unseen rows to look at", ge=1)
    save_every: int = field(500, "steps between checkpoints", ge=1)
    longest: int | None = field(
        None, "tokens in a text, those around it included; longer ones are cut, in any case to what the model has places for", ge=1
    )
    keep: int = field(2, "checkpoints that are kept", ge=2, le=1000)
    goal: GoalSpec | None = field(None, "when to stop early")


HEAD = ("model", "head")


class RunSpec(Spec):
    """Everything about one experiment."""

    seed: int = field(1, "of the weights, the order of rows, and every other chance", ge=0)
    start: str | None = field(None, "a checkpoint to begin from: a Hugging Face folder, a Hub name, a GGUF file, a run", min_length=1)
    freeze: tuple[str, ...] | None = field(None, "paths under which weights do not change, such as encoder.embed", strict=False)
    lora: LoraSpec | None = field(None, "changes of low rank beside the weights of the checkpoint, which stay as they are")
    model: ModelSpec
    data: DataSpec
    tokenizer: TokenizerSpec = field(WordsSpec(), "how texts become tokens")
    objective: ObjectiveSpec
    optim: OptimSpec = field(OptimSpec(), "how weights change")
    train: TrainSpec = field(TrainSpec(), "how long, and what is kept")

    def check(self) -> None:
        """Whether its pieces fit each other."""
        if self.model.shape not in self.objective.shapes:
            known = " or ".join(self.objective.shapes)
            raise SpecError(f"{self.objective.kind} is learned by {known}, and this model is {self.model.shape}", ("objective",))
        head = self.model.head
        gives = "tokens" if head.scores_tokens else "classes" if hasattr(head, "classes") else "neither"
        if self.objective.wants not in ("", gives):
            such = {"tokens": "tied, free or masked", "classes": 'classes, with classes = "data"'}[self.objective.wants]
            raise SpecError(f"{self.objective.kind} needs a head that scores {self.objective.wants}, given '{head.kind}': {such}", HEAD)
        if self.lora is not None and self.start is None:
            raise SpecError("is a change of low rank to trained weights: say with start = … whose", ("lora",))


def read_run(tree: Tree) -> RunSpec:
    """A run file as a spec."""
    own, start = tree.get("model", {}), tree.get("start")
    if not isinstance(own, dict) or not (own or start):
        raise SpecError(
            "[model] is required: a description, as manyheads show --toml prints; or start, a checkpoint to begin from", ("model",)
        )
    if isinstance(start, str) and start:
        own, tree = described_by(start, own), {"tokenizer": "checkpoint"} | tree
    with located("model"):
        tree = tree | {"model": read_model(own)}
    run = parse(RunSpec, tree)
    run.check()
    return run


# ---------------------------------------------------------------------------------------------------------- made ready


@dataclass(frozen=True)
class Ready:
    """A run with its data: rows as ids, a tokenizer, and a model that knows how many tokens there are."""

    run: RunSpec
    spec: ModelSpec
    corpus: Corpus
    tokenizer: Any
    tokens: Tokens
    labels: tuple[str, ...]
    rows: Encoded
    unseen: Encoded
    start: Opened | None = None


def made_ready(run: RunSpec) -> Ready:
    corpus = run.data.load()
    if missing := [name for name in run.objective.fields if name not in corpus.fields]:
        raise SpecError(f"{run.objective.kind} needs {missing[0]}, and {run.data.kind} gives {', '.join(corpus.fields)}", ("objective",))
    order = [corpus.fields.index(name) for name in run.objective.fields]
    texts = [i for i in order if corpus.fields[i] != "label"]
    given = (row[i] for row in corpus.train for i in texts)
    start = opened_start(run.start) if run.start else None
    tokenizer = tokenizer_of(start, run.tokenizer, given, str(run.start)) if start else run.tokenizer.make(given)
    tokens = tokens_of(tokenizer, start)
    labels = ordered(corpus.labels(), start) if "label" in run.objective.fields else ()
    spec = sized(run.model, tokens.count, len(labels))
    rows, unseen = (
        Encoded([tuple(row[i] for i in order) for row in part], tokenizer, run.objective.fields, labels)
        for part in (corpus.train, corpus.validation)
    )
    for part in (rows, unseen):
        part.shorten(limits(run, spec, tokens))
    return Ready(run, spec, corpus, tokenizer, tokens, labels, rows, unseen, start)


def ordered(labels: tuple[str, ...], start: Opened | None) -> tuple[str, ...]:
    """The classes in the order of the checkpoint, where it has the same ones."""
    named = (start.origin.config.get("id2label") if start else None) or {}
    known = tuple(named[i] for i in sorted(named, key=int))
    return known if sorted(map(str, known)) == sorted(labels) else labels


def limits(run: RunSpec, spec: ModelSpec, tokens: Tokens) -> dict[str, int]:
    """How many tokens of its own a text may have, by field: what the run says, and what the model has places for."""
    found = {}
    for name in run.objective.fields:
        tower = spec.decoder if name == "target" and spec.decoder else spec.encoder or spec.decoder
        most = [length for length in (run.train.longest, tower.longest if tower else None) if length is not None]
        if most and name not in ("label", "picture"):
            found[name] = min(most) - run.objective.room(tokens)
            if found[name] < 1:
                raise SpecError(f"a text of {min(most)} tokens has no room for one of its own beside those around it", ("train", "longest"))
    return found


def sized(spec: ModelSpec, tokens: int, labels: int) -> ModelSpec:
    """The model with as many tokens and classes as the data has; refused where it says another number."""
    if spec.vocab == "tokenizer":
        spec = spec.changed(vocab=tokens)
    elif spec.vocab is not None and spec.vocab < tokens:
        raise SpecError(f'is {spec.vocab}, and the tokenizer has {tokens} tokens; write "tokenizer"', ("model", "vocab"))
    classes = getattr(spec.head, "classes", None)
    if classes == "data":
        return spec.changed(head=spec.head.changed(classes=labels))
    if labels and classes is not None and classes != labels:
        raise SpecError(f'is {classes}, and the data has {labels} classes; write "data"', ("model", "head", "classes"))
    return spec


# ---------------------------------------------------------------------------------------------------------- the folder


class RunError(ValueError):
    """A run that cannot go on as asked."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder for this process alone; a lock whose process is gone is taken over."""
    folder.mkdir(parents=True, exist_ok=True)
    path, own = folder / "lock.json", {"pid": os.getpid(), "host": socket.gethostname()}
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(own, file)
    except FileExistsError:
        other = read_lock(path)
        if other.get("host") == own["host"] and not alive(other.get("pid")):
            path.write_text(json.dumps(own), encoding="utf-8")
        else:
            raise RunError(f"{folder} is in use by process {other.get('pid')} on {other.get('host')}; stop it, or remove {path}") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def read_lock(path: Path) -> Tree:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def alive(pid: object) -> bool:
    if type(pid) is not int or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def environment() -> Tree:
    """What a run ran on."""
    from manyheads import __version__

    return {
        "schema": 1, "manyheads": __version__, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
        "platform": platform.platform(), "threads": torch.get_num_threads(), "command": sys.argv, "started": time.time(),
    }  # fmt: skip


# of what may differ between one start and the next; everything else changes the run
SAFE = ("train.steps", "train.save_every", "train.evaluate_every", "train.evaluate_rows", "train.keep", "train.goal")


def changes(old: Tree, new: Tree, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every field that differs between two runs: its path, and both values."""
    for name in sorted(set(old) | set(new)):
        here = f"{path}.{name}" if path else name
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from changes(before, after, here)
        elif before != after:
            yield here, before, after


def check_unchanged(old: Tree, run: RunSpec) -> None:
    """Refuses to go on with a run that is another one."""
    unsafe = [change for change in changes(old, to_tree(run)) if not change[0].startswith(SAFE)]
    if unsafe:
        said = "; ".join(f"{path} was {quoted(before)} and is {quoted(after)}" for path, before, after in unsafe[:4])
        raise RunError(f"this folder holds another run: {said}. Take another --output, or put it back")
