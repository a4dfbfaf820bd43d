"""A run as data: model, data, tokenizer, objective and how to train, in one file; and the folder that explains a run."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from manyheads.data import builtin, pictures  # noqa: F401  (fill the slot)
from manyheads.data.prepared import Encoded
from manyheads.data.source import NO_TEXT, Corpus, DataSpec, Row
from manyheads.data.tokens import TokenizerFileSpec, TokenizerSpec, WordsSpec, special_ids
from manyheads.model.spec import ModelSpec, read_model
from manyheads.objective import language, pairs, pooled  # noqa: F401  (fill the slot)
from manyheads.objective.score import ObjectiveSpec, Tokens
from manyheads.parts.embed import PatchesSpec
from manyheads.spec import Spec, SpecError, Tree, field, located, parse, quoted, to_tree
from manyheads.train.optim import OptimSpec


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
    keep: int = field(2, "checkpoints that are kept", ge=2, le=1000)
    goal: GoalSpec | None = field(None, "when to stop early")


class RunSpec(Spec):
    """Everything about one experiment."""

    seed: int = field(1, "of the weights, the order of rows, and every other chance", ge=0)
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
        self.objective.check(self.model)


def read_run(tree: Tree) -> RunSpec:
    """A run file as a spec."""
    if not isinstance(tree.get("model"), dict):
        raise SpecError("[model] is required: a description, as manyheads show --toml prints", ("model",))
    run = parse(RunSpec, tree | {"model": read_model(tree["model"])})
    run.check()
    return run


# ---------------------------------------------------------------------------------------------------------- made ready


@dataclass(frozen=True)
class Ready:
    """A run with its data: rows as ids, a tokenizer, and a model that knows how many tokens there are."""

    run: RunSpec
    spec: ModelSpec
    corpus: Corpus
    tokenizer: Any  # none where there are no texts
    tokens: Tokens
    labels: tuple[str, ...]
    rows: Encoded
    unseen: Encoded


def made_ready(run: RunSpec) -> Ready:
    corpus = run.data.load()
    fields = run.objective.reads(corpus.fields)
    if missing := [name for name in fields if name not in corpus.fields]:
        raise SpecError(f"{run.objective.kind} needs {missing[0]}, and {run.data.kind} gives {', '.join(corpus.fields)}", ("objective",))
    order = [corpus.fields.index(name) for name in fields]
    texts = [i for i in order if corpus.fields[i] not in NO_TEXT]
    tokenizer = run.tokenizer.make(row[i] for row in corpus.train for i in texts) if texts else None
    tokens = with_extra(tokenizer, run) if texts else Tokens(count=0)
    labels = corpus.labels() if "label" in fields else ()
    spec = sized(run.model, tokens.count, len(labels))
    rows, unseen = (
        Encoded(as_read([tuple(row[i] for i in order) for row in part], fields, spec), tokenizer, fields, labels)
        for part in (corpus.train, corpus.validation)
    )
    return Ready(run, spec, corpus, tokenizer, tokens, labels, rows, unseen)


def with_extra(tokenizer: Any, run: RunSpec) -> Tokens:
    """The ids of a tokenizer that has what the objective asks for: one trained here is given it, another must have it."""
    asked = run.objective.extra()
    if not isinstance(run.tokenizer, TokenizerFileSpec):
        tokenizer.add_special_tokens(list(asked))
        extra = tuple(tokenizer.token_to_id(name) for name in asked)
        return Tokens(count=tokenizer.get_vocab_size(with_added_tokens=True), extra=extra)
    spelt = [[tokenizer.token_to_id(name.replace("<extra_", before)) for name in asked] for before in ("<extra_", "<extra_id_")]
    extra = max((tuple(takewhile(lambda one: one is not None, ids)) for ids in spelt), key=len)
    if asked and not extra:
        raise SpecError(
            f"{run.objective.kind} needs the tokens {asked[0]} or <extra_id_0> and so on, and this one has none", ("tokenizer",)
        )
    known = special_ids(tokenizer)
    if known.end is None:
        raise SpecError("has no token that ends a text, such as </s>", ("tokenizer",))
    pad = known.end if known.pad is None else known.pad
    begin = pad if known.begin is None else known.begin  # as those do that have none
    ids = {name: value for name, value in (("unknown", known.unknown), ("mask", known.mask)) if value is not None}
    return Tokens(pad, begin, known.end, count=tokenizer.get_vocab_size(with_added_tokens=True), extra=extra, **ids)


def as_read(rows: list[Row], fields: Sequence[str], spec: ModelSpec) -> list[Row]:
    """Rows whose pictures are cut into the patches that the model reads."""
    first = spec.encoder or spec.decoder
    embed = first.embed if first else None
    if "picture" not in fields:
        if isinstance(embed, PatchesSpec):
            raise SpecError(f"reads pictures, and the data gives {', '.join(fields)}", ("model",))
        return rows
    if not isinstance(embed, PatchesSpec):
        raise SpecError("reads tokens, and the data gives pictures; take embed = patches", ("model",))
    place = fields.index("picture")
    whole = torch.from_numpy(np.stack([row[place] for row in rows]))
    with located("model", "encoder", "embed"):
        patches = embed.cut(whole if whole.dim() == 4 else whole[:, None]).numpy()
    return [(*row[:place], one, *row[place + 1 :]) for row, one in zip(rows, patches, strict=True)]


def sized(spec: ModelSpec, tokens: int, labels: int) -> ModelSpec:
    """The model with as many tokens and classes as the data has; refused where it says another number."""
    if spec.vocab == "tokenizer":
        if not tokens:
            raise SpecError("is 'tokenizer', and there are no texts here; leave it out", ("model", "vocab"))
        spec = spec.changed(vocab=tokens)
    elif spec.vocab is not None and spec.vocab < tokens:
        raise SpecError(f'is {spec.vocab}, and the tokenizer has {tokens} tokens; write "tokenizer"', ("model", "vocab"))
    classes = getattr(spec.head, "classes", None)
    if labels and classes is not None and classes != labels:
        raise SpecError(f"is {classes}, and the data has {labels} classes", ("model", "head", "classes"))
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
