"""Who is asked what: a model, rows, what baselines may learn from, and in which batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from manyheads.checkpoint import Loaded, load
from manyheads.convert.opened import Opened
from manyheads.data.order import plan
from manyheads.data.source import Corpus, DataError, DataSpec, FileSpec, Row, same_file
from manyheads.generate.sample import Writing
from manyheads.model.build import device_for
from manyheads.objective.score import ObjectiveSpec, Tokens
from manyheads.spec import LARGEST, Spec, SpecError, Tree, override, parse, quoted
from manyheads.train.run import RunSpec, read_run_file, with_extra
from manyheads.train.start import tokens_of as known_tokens

# what each task reads, and the kind of file that holds it
TASKS = {
    "causal": (("text",), "text"),
    "masked": (("text",), "text"),
    "seq2seq": (("source", "target"), "pairs"),
    "classify": (("text", "label"), "labels"),
    "contrastive": (("query", "document"), "queries"),
}
FORMS = tuple(form for _, form in TASKS.values())
SPLITS = ("validation", "test", "train")
PLACES, NUMBERS = 8192, 1 << 25  # at once: tokens, and logits
Tell = Callable[[str, int, int], None]  # what is going on, how much is done, of how much


@dataclass(frozen=True)
class How:
    """How much is looked at, and how texts are written."""

    rows: int | None = None  # only so many, the first
    longest: int | None = None  # tokens of a text that are read
    beams: int = 4
    penalty: float = 0.6
    max_new: int | None = None
    examples: int = 0

    def check(self) -> None:
        self.writing(1)
        for name, least in (("rows", 1), ("longest", 3), ("examples", 0)):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and least <= value <= LARGEST):
                raise ValueError(f"{name} is {quoted(value)}, expected a whole number from {least} to {LARGEST:,}")

    def writing(self, usual: int) -> Writing:
        """Of so many tokens at most, where nobody says how many."""
        return Writing(usual if self.max_new is None else self.max_new, beams=self.beams, penalty=self.penalty)


@dataclass(frozen=True)
class Subject:
    """A model, the rows it is asked about, and those that a baseline may learn from."""

    loaded: Loaded
    task: str
    objective: ObjectiveSpec | None  # of the run
    tokens: Tokens
    corpus: Corpus
    rows: Sequence[Row]
    learned: Sequence[Row]
    fields: tuple[str, ...]
    how: How
    tell: Tell
    seed: int = 0
    classes: tuple[list[str], list[str]] | None = None  # of these rows and those, where the data knows them
    limit: int | None = None  # tokens of a text that are read, what stands around it included
    notes: tuple[str, ...] = ()  # what must be said of the rows


@dataclass(frozen=True)
class Found:
    """Scores by who earned them, the model first; what was written; and what must be said beside them."""

    scores: dict[str, dict[str, float]]
    notes: tuple[str, ...] = ()
    matter: tuple[str, ...] = ()
    signatures: dict[str, str] | None = None
    written: tuple[str, ...] = ()
    drawn: tuple[Tree, ...] = ()  # pictures: what was shown, what was made of it, what it was
    more: Tree | None = None


def subject_of(
    path: Path, data: str | None, task: str | None, split: str, overrides: Sequence[str], how: How, tell: Tell, *, device: str
) -> Subject:
    """A run says what it was trained for, and on what; of any other checkpoint the head says it, and the caller names a file."""
    how.check()
    if split not in SPLITS:
        raise ValueError(f"split is {quoted(split)}, expected {', '.join(SPLITS)}")
    if task is not None and task not in TASKS:
        raise ValueError(f"task is {quoted(task)}, expected {', '.join(TASKS)}")
    loaded = load(path, device=device_for(device))
    loaded.model.eval()
    if loaded.tokenizer is None and loaded.spec.vocab is not None:
        raise ValueError(f"{path} has no tokenizer beside it, so no text can be read with it")
    run = run_at(path, task, overrides)
    if run is None:
        task = task or task_of(loaded)
        check_task(loaded, task)
        spec = read_data(override({"data": {"kind": TASKS[task][1]} | ({"path": data} if data else {})}, overrides))
    else:
        task, spec = run.objective.kind, run.data
    known, rows = chosen(spec, task, data, split, own=run is not None)
    fields = run.objective.reads(known.fields) if run else TASKS[task][0]
    if missing := [name for name in fields if name not in known.fields]:
        raise DataError(f"{task} needs {missing[0]}, and {known.about} gives {', '.join(known.fields)}")
    if not rows:
        raise DataError(f"the {split} split is empty: name another, or a file with --data ({known.about})")
    order = [known.fields.index(name) for name in fields]
    some, learned = ([tuple(row[i] for i in order) for row in part] for part in (rows[: how.rows], known.train))
    place = known.fields.index("label") if "label" in known.fields else None
    labelled = None if place is None else ([row[place] for row in rows[: how.rows]], [row[place] for row in known.train])
    whole = fields == ("text",)  # a text is read in windows, and nothing of it is cut
    limit = least(loaded.longest, how.longest or read_at_once(loaded, run))
    return Subject(
        loaded=loaded if whole else cut(loaded, limit), task=task, objective=run.objective if run else None, tokens=tokens_of(loaded, run),
        corpus=known, rows=some, learned=learned, fields=fields, how=how, tell=tell, seed=run.seed if run else 0, classes=labelled,
        limit=limit, notes=tuple(said_of_rows(run, split, data, overrides, tested=bool(known.splits["test"]))) if run else (),
    )  # fmt: skip


def run_at(path: Path, task: str | None, overrides: Sequence[str]) -> RunSpec | None:
    """The run whose folder this is, if it is for the task."""
    file = path / "run.toml"
    if not file.is_file() or task not in (None, read_run_file(file).objective.kind):
        return None
    return read_run_file(file, overrides)


def said_of_rows(run: RunSpec, split: str, data: str | None, overrides: Sequence[str], *, tested: bool) -> Iterator[str]:
    """What would make a figure look better than it is."""
    if data is not None and isinstance(run.data, FileSpec) and same_file(run.data.path, data):
        yield f"{data} is what the run learned from"
    if any(one.startswith("data" if data is None else "data.path") for one in overrides):
        yield "the data are others than the run's own, by -s: it may have learned from some of these rows"
    if data is None and run.train.goal is not None and split == "validation":
        others = "--split test has others" if tested else "--data FILE asks others"
        yield f"some of these rows chose the checkpoint, the best by {run.train.goal.metric}, and flatter it: {others}"
    if data is None and run.data.prepared and run.tokenizer is not None:
        yield "texts are what the tokenizer gives back of prepared ids: what it does not know is in none of them"


def read_at_once(loaded: Loaded, run: RunSpec | None) -> int | None:
    """How many tokens were read together in training, where longer texts were cut."""
    if run is not None:
        return run.train.pack or run.train.longest
    cuts: Tree = (loaded.tokenizer and loaded.tokenizer.truncation) or {}
    return cuts.get("max_length")


def least(*limits: int | None) -> int | None:
    """Of several limits the lowest, where there is one."""
    return min((one for one in limits if one is not None), default=None)


class Asked(Spec):
    """What is said of a checkpoint that is no run."""

    data: DataSpec


def read_data(tree: Tree) -> DataSpec:
    if isinstance(tree["data"], dict) and set(tree["data"]) == {"kind"} and tree["data"]["kind"] in FORMS:
        raise SpecError("this checkpoint is no run for this task: name a file to evaluate with, --data FILE", ("data", "path"))
    return parse(Asked, tree).data


def chosen(spec: DataSpec, task: str, data: str | None, split: str, *, own: bool) -> tuple[Corpus, Sequence[Row]]:
    """All there is, and the rows that are asked: of a split, or of a file of the same form, beside what baselines learn from."""
    if data is None:
        corpus = spec.load()
        return corpus, corpus.splits[split]
    if not isinstance(spec, FileSpec) and task not in TASKS:
        raise SpecError(f"a file was named, and {task} learns from {spec.kind}, which is made here", ("data",))
    form = spec if isinstance(spec, FileSpec) else read_data({"data": {"kind": TASKS[task][1], "path": data}})
    assert isinstance(form, FileSpec)
    there = form.other(data)
    learned = own or (isinstance(spec, FileSpec) and not same_file(spec.path, data))
    return (replace(there, train=spec.load().train) if learned else there), there.validation


def tokens_of(loaded: Loaded, run: RunSpec | None) -> Tokens:
    """The ids that begin, end and hide, as training has them."""
    if loaded.tokenizer is None:
        return Tokens(count=0)
    found = Opened(loaded.model, loaded.origin, loaded.tokenizer) if loaded.origin else None
    return with_extra(loaded.tokenizer, run, found) if run else known_tokens(loaded.tokenizer, found)


def task_of(loaded: Loaded) -> str:
    """What a checkpoint without a run is for: as it says, or by its shape and its head."""
    head = loaded.spec.head
    if loaded.objective in TASKS:
        return str(loaded.objective)
    if loaded.paired:
        return "seq2seq"
    if head.kind == "classes":
        return "classify"
    if head.scores_tokens:
        return "causal" if loaded.model.writes else "masked"
    return "contrastive"


def check_task(loaded: Loaded, task: str) -> None:
    """Refuses to ask a model what its figures would say nothing about: an encoder sees the token it would be asked for."""
    tokens, writes = loaded.spec.head.scores_tokens, loaded.model.writes
    alone = tokens and not loaded.paired
    if not {"causal": alone and writes, "masked": alone and not writes, "seq2seq": loaded.paired}.get(task, True):
        model = f"{loaded.spec.shape} with the head '{loaded.spec.head.kind}'"
        raise ValueError(f"this model ({model}) cannot be asked for {task}: it is for {task_of(loaded)}")


def cut(loaded: Loaded, limit: int | None) -> Loaded:
    """With a tokenizer of its own, which cuts what is too long to be read, and for which a text that says </s> remains a text."""
    if loaded.tokenizer is None:
        return loaded
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(loaded.tokenizer.to_str())
    tokenizer.encode_special_tokens = True
    if limit is not None:
        tokenizer.enable_truncation(limit)
    return replace(loaded, tokenizer=tokenizer)


def as_ids(subject: Subject, texts: Sequence[str]) -> tuple[list[list[int]], tuple[str, ...]]:
    """The tokens of each text, and a word about those that were cut."""
    found = subject.loaded.encodings(texts)
    were_cut = sum(bool(one.overflowing) for one in found)
    note = (f"{were_cut:,} of {len(texts):,} texts were cut to {subject.limit:,} tokens",) if were_cut else ()
    return [one.ids for one in found], note


def with_logits(loaded: Loaded) -> int:
    """How many places there is room for where each has a score for every token."""
    vocabulary = loaded.spec.vocab
    return min(PLACES, NUMBERS // vocabulary) if isinstance(vocabulary, int) else PLACES


def in_batches(subject: Subject, lengths: Sequence[int], what: str, most: int | None = None) -> Iterator[list[int]]:
    """Which rows go together: those of like length, as many as there is room for; without gradients while they are used."""
    done = 0
    with torch.no_grad():
        for places in plan(np.array(lengths), 0, 0, tokens=max(most or PLACES, *lengths, 1)):
            subject.tell(what, done, len(lengths))
            yield places.tolist()
            done += len(places)
    subject.tell(what, done, len(lengths))


def unlearned(subject: Subject) -> list[str]:
    return [] if subject.learned else ["there was nothing for baselines to learn from: -s data.path=... names a file to learn from"]
