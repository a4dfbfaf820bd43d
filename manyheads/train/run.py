"""A run as data: model, data, tokenizer, objective and how to train, in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as made
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from manyheads.convert.opened import Opened
from manyheads.data import builtin, pictures, tables, trees  # noqa: F401  (fill the slot)
from manyheads.data.links import Links, aligned, arcs, within
from manyheads.data.prepared import Cut, Encoded, Ids, Rows, tokenizer_for, tokenizer_of
from manyheads.data.source import NO_TEXT, Corpus, DataSpec, Row
from manyheads.data.tokens import CheckpointTokenizerSpec, TokenizerFileSpec, TokenizerSpec, WordsSpec
from manyheads.model.spec import ModelSpec, TowerSpec, read_model
from manyheads.objective import language, pairs, pooled  # noqa: F401  (fill the slot)
from manyheads.objective.score import ObjectiveSpec, Tokens
from manyheads.objective.shaping import GuidedSpec, ShapingSpec
from manyheads.parts.embed import PatchesSpec
from manyheads.spec import Spec, SpecError, Tree, check_names, field, in_file, located, override, parse, quoted, read_toml
from manyheads.train.lora import LoraSpec
from manyheads.train.optim import AdamWSpec, OptimSpec
from manyheads.train.start import classes_of, described_by, opened_start, tokenizer_from, tokens_of


class GoalSpec(Spec):
    """When a run may end before its last step."""

    metric: Literal["loss", "exact", "accuracy"] = field("loss", "what is looked at")
    reach: float | None = field(None, "where it is good enough: a loss at most this, a share at least this")
    patience: int | None = field(None, "looks without a better value, after which the run ends", ge=1)

    def better(self, value: float, than: float) -> bool:
        return value < than if self.metric == "loss" else value > than

    def prefers(self, look: Mapping[str, float], than: Mapping[str, float]) -> bool:
        """Whether a look is better than another, or the first to find anything."""
        return self.metric in look and (self.metric not in than or self.better(look[self.metric], than[self.metric]))

    def reached(self, value: float) -> bool:
        return self.reach is not None and not self.better(self.reach, value)


class TrainSpec(Spec):
    """How long, how much at once, and what is kept."""

    steps: int = field(1000, "updates of the weights", ge=1)
    tokens: int = field(4096, "places in a batch, padding included", ge=1)
    pack: int | None = field(
        None, "tokens of a row that texts share, for causal and masked; longer texts are cut, elsewhere every epoch", ge=2
    )
    accumulate: int = field(1, "batches that make one update", ge=1, le=4096)
    evaluate_every: int = field(200, "steps between looks at unseen rows", ge=1)
    evaluate_rows: int = field(512, "unseen rows to look at", ge=1)
    save_every: int = field(500, "steps between checkpoints", ge=1)
    longest: int | None = field(
        None, "tokens in a text, those around it included; longer ones are cut, in any case to what the model has places for", ge=1
    )
    keep: int = field(2, "checkpoints that are kept", ge=2, le=1000)
    goal: GoalSpec | None = field(None, "when to stop early; the checkpoint that is best by its metric is kept, and is what is loaded")
    compile: bool = field(False, "each layer by torch.compile; --dry-run measures whether that pays for a long run")
    tensorboard: bool = field(False, "event files for TensorBoard beside metrics.jsonl")


class RunSpec(Spec):
    """Everything about one experiment."""

    seed: int = field(1, "of the weights, the order of rows, and every other chance", ge=0)
    start: str | None = field(None, "a checkpoint to begin from: a Hugging Face folder, a Hub name, a GGUF file, a run", min_length=1)
    freeze: tuple[str, ...] | None = field(None, "paths under which weights do not change, such as encoder.embed", strict=False)
    lora: LoraSpec | None = field(None, "changes of low rank beside the weights of the checkpoint, which stay as they are")
    model: ModelSpec = field(..., "what is trained; beside start, only what is to be different")
    data: DataSpec = field(..., "what it is trained on")
    tokenizer: TokenizerSpec = field(WordsSpec(), "how texts become tokens")
    objective: ObjectiveSpec = field(..., "what it is trained for")
    shaping: tuple[ShapingSpec, ...] = field((), "terms beside the objective: how attention should look", strict=False)
    optim: OptimSpec = field(AdamWSpec(), "how weights change")
    train: TrainSpec = field(TrainSpec(), "how long, and what is kept")

    def check(self) -> None:
        """Whether its pieces fit each other."""
        if self.model.shape not in self.objective.shapes:
            known = " or ".join(self.objective.shapes)
            raise SpecError(f"{self.objective.kind} is learned by {known}, and this model is {self.model.shape}", ("objective",))
        self.objective.check(self.model)
        for i, shaping in enumerate(self.shaping):
            with located("shaping", i):
                shaping.places(self.model)
                shaping.check(self.objective.kind)
        if self.train.pack is not None:
            self.check_pack(self.train.pack)
        if self.train.goal is not None and self.train.goal.metric not in self.objective.figures:
            said = f"is {quoted(self.train.goal.metric)}, and a look at unseen rows gives {', '.join(self.objective.figures)}"
            raise SpecError(said, ("train", "goal", "metric"))
        if self.lora is not None and self.start is None:
            raise SpecError("is a change of low rank to trained weights: say with start = … whose", ("lora",))

    def check_pack(self, pack: int) -> None:
        """Whether texts can share rows."""
        at = ("train", "pack")
        if not isinstance(self.objective, language.PackableSpec) or self.shaping:
            given = self.objective.kind + (" with it" if self.shaping else "")
            raise SpecError(f"texts share rows for causal and masked without shaping, and this is {given}", at)
        tower = self.model.encoder or self.model.decoder
        if tower is None:
            raise SpecError(f"texts that share a row are kept apart by a mask, and a model that is {self.model.shape} has none", at)
        if self.train.longest is not None:
            raise SpecError("cuts texts, and train.pack alone cuts those that share rows: leave one of the two out", ("train", "longest"))
        if pack > self.train.tokens:
            raise SpecError(f"is {pack}, and a batch has {self.train.tokens} places", at)
        if tower.longest is not None and pack > tower.longest:
            raise SpecError(f"is {pack}, and the model has {tower.longest} places", at)


def read_run(tree: Tree) -> RunSpec:
    """A run file as a spec."""
    check_names(RunSpec, tree)
    own, start = tree.get("model", {}), tree.get("start")
    if not isinstance(own, dict) or not (own or start):
        raise SpecError(
            "[model] is required: a description, as manyheads show --toml prints; or start, a checkpoint to begin from", ("model",)
        )
    if isinstance(start, str) and start:
        own, tree = described_by(start, own), {"tokenizer": "checkpoint"} | tree
    with located("model"):
        model = read_model(own)
    run = parse(RunSpec, tree | {"model": model})
    if run.data.prepared and "tokenizer" not in tree:
        run = run.changed(tokenizer=tokenizer_of(run.data.prepared))
    run.check()
    return run


def read_run_file(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The same from a file, with what the command line changes; what is wrong comes with its line."""
    with in_file(path, overrides):
        return read_run(override(read_toml(path), overrides))


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
    rows: Ids
    unseen: Ids
    cut: tuple[int, int] = (0, 0)  # of these and those, how many were too long
    start: Opened | None = None
    links: dict[str, list[Links]] = made(default_factory=dict)  # who should look where in each row, by what a guide is called


def with_tokenizer(run: RunSpec, start: Opened | None = None) -> tuple[Corpus, Any, Tokens]:
    """The samples, and the tokenizer made from those to learn from, with the ids that the objective adds."""
    corpus = run.data.load()
    fields = run.objective.reads(corpus.fields)
    if missing := [name for name in fields if name not in corpus.fields]:
        raise SpecError(f"{run.objective.kind} needs {missing[0]}, and {run.data.kind} gives {', '.join(corpus.fields)}", ("objective",))
    texts = [corpus.fields.index(name) for name in fields if name not in NO_TEXT]
    if not texts:
        return corpus, None, Tokens(count=0)
    folder, given = run.data.prepared, (row[i] for row in corpus.train for i in texts)
    making = tokenizer_for(folder, run.tokenizer) if folder else run.tokenizer
    tokenizer = tokenizer_from(start, making, given, str(run.start)) if start else making.make(given)
    return corpus, tokenizer, with_extra(tokenizer, run, start)


def made_ready(run: RunSpec) -> Ready:
    start = opened_start(run.start) if run.start else None
    corpus, tokenizer, tokens = with_tokenizer(run, start)
    fields, folder = run.objective.reads(corpus.fields), run.data.prepared
    order = [corpus.fields.index(name) for name in fields]
    labels = ordered(corpus.labels(), start) if "label" in fields else ()
    spec = sized(run.model, tokens.count, len(labels))
    rows, unseen = (
        Rows(folder, split, tokenizer=tokenizer, only=fields, labels=labels)
        if folder
        else Encoded(as_read([tuple(row[i] for i in order) for row in corpus.splits[split]], fields, spec), tokenizer, fields, labels)
        for split in ("train", "validation")
    )
    most = limits(run, fields, spec, tokens)
    cut, also_cut = Cut(rows, most), Cut(unseen, most)
    shown: tuple[Ids, Ids] = (cut, also_cut) if most else (rows, unseen)
    links = guides(run, corpus, tokenizer, most)
    return Ready(run, spec, corpus, tokenizer, tokens, labels, *shown, (cut.count, also_cut.count), start, links)


def with_extra(tokenizer: Any, run: RunSpec, start: Opened | None) -> Tokens:
    """The ids of a tokenizer that has what the objective asks for: one trained here is given it, another must have it."""
    asked = run.objective.extra()
    if not isinstance(run.tokenizer, TokenizerFileSpec | CheckpointTokenizerSpec):
        tokenizer.add_special_tokens(list(asked))
    spelt = [[tokenizer.token_to_id(name.replace("<extra_", before)) for name in asked] for before in ("<extra_", "<extra_id_")]
    extra = max((tuple(takewhile(lambda one: one is not None, ids)) for ids in spelt), key=len)
    if asked and not extra:
        raise SpecError(
            f"{run.objective.kind} needs the tokens {asked[0]} or <extra_id_0> and so on, and this one has none", ("tokenizer",)
        )
    tokens = replace(tokens_of(tokenizer, start), extra=extra)
    run.objective.check_tokens(tokens, run.model)
    return tokens


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


def ordered(labels: tuple[str, ...], start: Opened | None) -> tuple[str, ...]:
    """The classes in the order of the checkpoint, where it has the same ones."""
    known = classes_of(start) if start else ()
    return known if sorted(known) == sorted(labels) else labels


def longest_read(run: RunSpec, tower: TowerSpec | None) -> int | None:
    """Where a run cuts texts: where it says, or where the places of the model end."""
    return min((length for length in (run.train.longest, tower.longest if tower else None) if length is not None), default=None)


def limits(run: RunSpec, fields: Sequence[str], spec: ModelSpec, tokens: Tokens) -> dict[str, int]:
    """How many tokens of its own a text may have, by field: what the run says, and what the model has places for."""
    found = {}
    for name in () if run.train.pack else fields:
        tower = spec.decoder if name == "target" and spec.decoder else spec.encoder or spec.decoder
        most = longest_read(run, tower)
        if most is not None and name not in NO_TEXT:
            found[name] = most - run.objective.room(tokens)
            if found[name] < 1:
                raise SpecError(f"a text of {most} tokens has no room for one of its own beside those around it", ("train", "longest"))
    return found


def guides(run: RunSpec, corpus: Corpus, tokenizer: Any, most: Mapping[str, int]) -> dict[str, list[Links]]:
    """What the rows to learn from, cut to so many tokens, say of who should look where, for each term that asks."""
    found: dict[str, list[Links]] = {}
    for i, guided in enumerate(run.shaping):
        if not isinstance(guided, GuidedSpec) or guided.guide in found:
            continue
        if missing := [name for name in guided.fields if name not in corpus.fields]:
            raise SpecError(f"guided needs {missing[0]}, and {run.data.kind} gives {', '.join(corpus.fields)}", ("shaping", i))
        columns = {name: [row[corpus.fields.index(name)] for row in corpus.train] for name in guided.fields}
        if guided.by == "alignment":
            found[guided.guide] = aligned(columns["source"], columns["target"], columns["alignment"], tokenizer)
        else:
            said = columns["text"], columns["arcs"], columns.get("relations")
            found[guided.guide] = arcs(*said, tokenizer, toward=guided.toward, relation=guided.relation)
        looking, seen = ("target", "source") if guided.by == "alignment" else ("text", "text")
        found[guided.guide] = [within(row, most.get(looking), most.get(seen)) for row in found[guided.guide]]
    return found


def sized(spec: ModelSpec, tokens: int, labels: int) -> ModelSpec:
    """The model with as many tokens and classes as the data has; refused where it says another number."""
    if spec.vocab == "tokenizer":
        if not tokens:
            raise SpecError("is 'tokenizer', and there are no texts here; leave it out", ("model", "vocab"))
        spec = spec.changed(vocab=tokens)
    elif spec.vocab is not None and spec.vocab < tokens:
        raise SpecError(f'is {spec.vocab}, and the tokenizer has {tokens} tokens; write "tokenizer"', ("model", "vocab"))
    classes = getattr(spec.head, "classes", None)
    if classes == "data":
        return spec.changed(head=spec.head.changed(classes=labels))
    if labels and classes is not None and classes != labels:
        raise SpecError(f'is {classes}, and the data has {labels} classes; write "data"', ("model", "head", "classes"))
    return spec


class RunError(ValueError):
    """A run that cannot go on as asked."""


# of what may differ between one start and the next; everything else changes the run
SAFE = (
    "train.steps", "train.save_every", "train.evaluate_every", "train.evaluate_rows", "train.keep", "train.goal", "train.tensorboard",
)  # fmt: skip
