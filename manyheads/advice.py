"""A run file for a task and the user's data: shape, size, tokenizer, batch and steps, chosen for both and for the machine, saying why."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from manyheads.data.columns import Columns, columns_of, wanted_by
from manyheads.data.source import NO_TEXT, Corpus, DataError, DataSpec
from manyheads.data.tables import TableSpec
from manyheads.data.tokens import BPESpec
from manyheads.model.build import outline
from manyheads.model.size import readable
from manyheads.model.spec import ModelSpec
from manyheads.spec import SLOTS, SpecError, Tree, nearest, one_line, parse, quoted
from manyheads.train.forecast import Pace, duration, epoch_of, memory_free, needs_of, pace_of
from manyheads.train.run import Ready, RunSpec, made_ready, read_run, sized
from manyheads.train.stream import lengths_of
from manyheads.training import spoken

MINUTES = 30.0
LOOKS = 10  # at unseen rows in a run
PACKED = 512  # tokens in a row, where one text may be cut into several
USUAL, LONGEST = 2048, 8192  # tokens in a row; longer ones are cut where little is lost, or in any case
FEWEST_STEPS = 400
SAMPLE = 2_000_000  # characters that a tokenizer is tried on

WHOLE = "the whole source is read before the first word is written, and every word that is written looks at all of it"


@dataclass(frozen=True)
class Task:
    """What is asked for: the shapes that can learn it, the first of them advised, each with its objective."""

    about: str
    shapes: dict[str, str]
    why: str
    file: str | None  # the kind of data that a file is
    usual: Tree  # the data where there is no file
    long_first: bool = False


TASKS = {
    "translate": Task("a text into another", {"encoder–decoder": "seq2seq", "recurrent": "seq2seq"}, WHOLE, "pairs", {"kind": "dates"}),
    "summarise": Task(
        "a long text in a short one", {"encoder–decoder": "seq2seq", "recurrent": "seq2seq"}, WHOLE, "pairs",
        {"kind": "stdlib", "task": "summary"}, long_first=True,
    ),
    "classify": Task(
        "the class of a text", {"encoder": "classify", "decoder": "classify"},
        "nothing is written, so every word may look at every other, before and behind it", "labels", {"kind": "stdlib", "task": "classify"},
    ),
    "embed": Task(
        "a vector a text, by which a query finds its document", {"encoder": "contrastive"},
        "nothing is written, so every word may look at every other, before and behind it", "queries",
        {"kind": "stdlib", "task": "retrieval"},
    ),
    "lm": Task(
        "how a text goes on", {"decoder": "causal", "recurrent": "causal", "ngram": "causal", "encoder": "masked"},
        "each word is written from those before it, and nothing else is read", "text", {"kind": "stdlib", "task": "language"},
    ),
    "mae": Task(
        "a picture from a few of its patches", {"encoder–decoder": "patches"},
        "the encoder reads the patches that are shown, and a small decoder restores the rest", "pictures", {"kind": "digits"},
    ),
    "copy": Task("the same symbols again: the smallest task there is", {"encoder–decoder": "seq2seq", "recurrent": "seq2seq"}, WHOLE, None,
                 {"kind": "sequence", "task": "copy"}),
}  # fmt: skip
ALSO = {"summarize": "summarise", "sentiment": "classify", "retrieval": "embed", "language": "lm"}
IN_WORDS = ("dates", "sequence")  # data of few different words


@dataclass(frozen=True)
class Rung:
    """A size of model, for data of at most so many tokens."""

    layers: int
    width: int
    heads: int
    most: float


LADDER = (Rung(2, 64, 4, 3e5), Rung(3, 128, 4, 3e6), Rung(4, 256, 8, 3e7), Rung(6, 512, 8, math.inf))
PIECES = ((5e7, 16000), (5e6, 8000), (1e6, 4000), (3e5, 2000), (5e4, 1000), (0, 500))  # characters in all, and pieces of a tokenizer
PASSES = ((1e5, 40), (1e6, 20), (1e7, 10), (math.inf, 3))  # tokens in all at most, and passes over them


def new(
    task: str, file: Path | None = None, *, shape: str | None = None, fields: str | None = None, minutes: float = MINUTES
) -> tuple[str, list[str]]:
    """A run file as text, and the reasons as lines."""
    if not 0 < minutes <= 60 * 24 * 365:
        raise SpecError(f"--minutes is {minutes:g}, expected some, at most a year of them")
    name = ALSO.get(task, task)
    if name not in TASKS:
        raise SpecError(f"no task {quoted(task)}{nearest(task, TASKS)}")
    draft = Draft(name, chosen_shape(name, shape), data_of(name, file, fields), minutes)
    return draft.fitted().text_and_reasons()


def chosen_shape(name: str, said: str | None) -> str:
    shapes = TASKS[name].shapes
    shape = (said or next(iter(shapes))).replace("-", "–")
    if shape not in shapes:
        raise SpecError(f"--shape is {quoted(said)}, and {name} is learned by {' or '.join(shapes)}")
    return shape


@dataclass(frozen=True)
class Data:
    """The table [data], why its columns are those, and the samples themselves."""

    tree: Tree
    why: str
    corpus: Corpus


def data_of(name: str, file: Path | None, said: str | None) -> Data:
    task = TASKS[name]
    if file is None or task.file is None:
        if file is not None or said:
            raise SpecError(f"{name} makes its own data" if file is not None else "--fields are the columns of a file; name one")
        return Data(task.usual, "", SLOTS["data"].choose(task.usual).load())  # type: ignore[attr-defined]
    kind = cast(type[DataSpec], SLOTS["data"].kinds[task.file])
    found = Columns(None, "")
    if issubclass(kind, TableSpec):
        found = columns_of(file, kind, long_first=task.long_first) if said is None else said_columns(kind, said)
    elif said is not None:
        raise SpecError(f"--fields are columns, and {name} reads a file without them")
    tree: Tree = {"kind": task.file, "path": str(file)} | ({"fields": list(found.fields)} if found.fields else {})
    return Data(tree, found.why, loaded(tree))


def loaded(tree: Tree) -> Corpus:
    spec = parse(cast(type[DataSpec], SLOTS["data"].kinds[tree["kind"]]), {key: value for key, value in tree.items() if key != "kind"})
    return spec.load()


def said_columns(kind: type[TableSpec], said: str) -> Columns:
    names, wanted = [name.strip() for name in said.split(",")], wanted_by(kind)
    if not len(wanted) <= len(names) <= len(kind.names) or not all(names):
        raise SpecError(f"--fields is {quoted(said)}, expected {len(wanted)} columns, separated by a comma: {' and '.join(wanted)}")
    return Columns(tuple(int(name) if name.isdecimal() else name for name in names), "as was said")


@dataclass(frozen=True)
class Draft:
    """A run file in the making: what was chosen so far."""

    task: str
    shape: str
    data: Data
    minutes: float
    rung: Rung = LADDER[0]
    pieces: int | None = None
    tokens: int = 2048
    steps: int = 1000
    passes: float = 1.0
    ready: Ready | None = None
    pace: Pace | None = None
    cut: bool = False  # whether the time decided how many steps there are
    pack: int | None = None
    longest: int | None = None
    cut_rows: str = ""

    @property
    def objective(self) -> str:
        return TASKS[self.task].shapes[self.shape]

    @property
    def made(self) -> Ready:
        assert self.ready is not None
        return self.ready

    # ------------------------------------------------------------------------------------------------------- choosing

    def fitted(self) -> Draft:
        """Size, batch and steps for the data; then what the machine cannot do in time is made smaller."""
        self.check_classes()
        draft = self.with_tokenizer().with_rows_cut()
        lengths = lengths_of(draft.made, draft.made.rows).sum(1)
        longest, total = draft.pack or int(lengths.max()), int(lengths.sum())
        share = total // (10 if self.objective == "contrastive" else 20)  # of an epoch; in contrast to many others one learns more
        budget = max(512, min(4096, 1 << max(0, share).bit_length() - 1 if share else 512), 64 * math.ceil(longest / 64))
        rung = next(rung for rung in LADDER if total <= rung.most)
        draft = draft.changed(rung=rung, tokens=budget).with_room()
        epoch = epoch_of(draft.made)
        passes = next(passes for most, passes in PASSES if total <= most)
        return draft.in_time(rounded(max(FEWEST_STEPS, passes * epoch.batches)), epoch.batches)

    def with_rows_cut(self) -> Draft:
        """A few long rows would decide how large every batch is: they are cut, if little is lost; or, where one text goes on, in pieces."""
        if not self.texts:
            return self
        lengths = lengths_of(self.made, self.made.rows).max(1)
        if self.task == "lm" and self.shape in ("decoder", "encoder") and lengths.max() > PACKED:
            return self.changed(pack=PACKED)
        for most, share in ((USUAL, 0.05), (LONGEST, 0.5)):
            lost = 1 - np.minimum(lengths, most).sum() / lengths.sum()
            if 0 < lost <= share:
                said = f"tokens; {int((lengths > most).sum()):,} of {len(lengths):,} rows are longer, and their ends are left out"
                return self.changed(longest=most, cut_rows=said)
        if (longest := int(lengths.max())) > LONGEST:
            raise DataError(f"the longest row has {longest:,} tokens, and {LONGEST:,} are the most that is advised; cut it in pieces")
        return self

    def check_classes(self) -> None:
        labels, rows = self.data.corpus.labels(), len(self.data.corpus.train)
        if self.objective == "classify" and not 2 <= len(labels) <= rows / 2:
            raise DataError(
                f"{rows:,} texts have {len(labels):,} different classes, which cannot be learned; --fields says which column is the class"
            )

    def with_tokenizer(self) -> Draft:
        """Many pieces for much text, and no more than it gives."""
        if not self.texts:
            return self.changed()
        if self.data.tree["kind"] in IN_WORDS:
            return self.changed(pieces=0)
        sample, characters = self.sampled()
        for least, size in PIECES:
            if characters >= least:
                try:
                    BPESpec(size=size).make(sample)
                    return self.changed(pieces=size)
                except DataError:  # too few different ones
                    continue
        return self.changed(pieces=None)

    @property
    def texts(self) -> list[str]:
        return [name for name in self.data.corpus.fields if name not in NO_TEXT]

    def sampled(self) -> tuple[list[str], int]:
        """The first texts, and how many characters there are in all."""
        places = [self.data.corpus.fields.index(name) for name in self.texts]
        sample, characters = list[str](), 0
        for row in self.data.corpus.train:
            if characters <= SAMPLE:
                sample += [row[i][:SAMPLE] for i in places]
            characters += sum(len(row[i]) for i in places)
        return sample, characters

    def changed(self, **others: Any) -> Draft:
        """With the run made anew; rows are encoded once for each tokenizer."""
        draft = replace(self, **others)
        run = read_run(tomllib.loads(draft.text()))
        if draft.ready is None or rows_of(run) != rows_of(draft.ready.run):
            return replace(draft, ready=made_ready(run))
        spec: ModelSpec = sized(run.model, draft.ready.tokens.count, len(draft.ready.labels))
        return replace(draft, ready=replace(draft.ready, run=run, spec=spec))

    def smaller(self) -> Draft | None:
        place = LADDER.index(self.rung)
        return self.changed(rung=LADDER[place - 1]) if place else None

    def with_room(self) -> Draft:
        """The largest model down the ladder that half of the memory holds."""
        needs = needs_of(self.made)
        if needs.memory_free is None or needs.memory <= needs.memory_free / 2:
            return self
        lower = self.smaller()
        return self if lower is None else lower.with_room()

    def in_time(self, steps: int, batches: int) -> Draft:
        """As many steps as wanted, if the machine makes half of them in time; otherwise a smaller model, or as many as it makes."""
        pace = pace_of(self.made, seconds=1.5)
        possible = rounded(max(1.0, (60 * self.minutes - LOOKS * pace.evaluation) / pace.step))
        lower = self.smaller() if 2 * possible < steps else None
        if lower is not None:
            return lower.in_time(steps, batches)
        count = min(steps, possible)
        return self.changed(steps=count, passes=count / batches, pace=pace, cut=possible < steps)

    # ------------------------------------------------------------------------------------------------------- writing

    def text_and_reasons(self) -> tuple[str, list[str]]:
        reasons = self.reasons()
        return "\n".join((*(f"# {one_line(reason)}" for reason in reasons), "", self.text())), reasons

    def reasons(self) -> list[str]:
        assert self.pace is not None
        task, parameters = TASKS[self.task], sum(one.numel() for one in outline(self.made.spec).parameters())
        epoch, how = epoch_of(self.made), self.made.run.train
        advised = next(iter(task.shapes))
        shape = f"{self.shape}: {task.why}" if self.shape == advised else f"{self.shape}, as was said; advised is {advised}, as {task.why}"
        free = memory_free()
        cores = f"{os.cpu_count()} cores of which {torch.get_num_threads()} work"
        machine = f"{cores}, {readable(free)} of memory free" if free else cores
        timed = f"an update took {1000 * self.pace.step:,.0f} ms"
        time = f"about {spoken(duration(self.made, self.pace))} here ({machine}; {timed})"
        limit = f"; {spoken(60 * self.minutes)} decided, more steps may be better" if self.cut else ""
        return [
            self.data.corpus.about,
            shape,
            f"{self.rung.layers} layers of width {self.rung.width}, {parameters:,} parameters, for {epoch.tokens:,} tokens to learn from",
            f"{how.steps:,} steps, {self.passes:.3g} passes over {epoch.rows:,} rows: {time}{limit}",
        ]

    def text(self) -> str:
        """The run file, without the reasons at its head."""
        lines = assigned("seed", 1, "of the weights, the order of rows, and every other chance")
        for table, rows in self.tables():
            lines += ["", f"[{table}]"]
            for key, value, why in rows:
                lines += assigned(key, value, why)
        return "\n".join(lines) + "\n"

    def tables(self) -> Iterator[tuple[str, list[tuple[str, Any, str]]]]:
        yield "data", [(key, value, self.said_of_data(key)) for key, value in self.data.tree.items()]
        if self.texts and self.pieces != 0:
            yield "tokenizer", self.tokenizer()
        yield "model", self.model()
        yield from self.towers()
        yield "objective", self.asked()
        yield "optim", self.optim()
        yield "train", self.train()

    def said_of_data(self, key: str) -> str:
        return {
            "path": "as seen from where manyheads train is called",
            "fields": self.data.why,
            "kind": "" if "path" in self.data.tree else f"nothing to download; a file of your own: manyheads new {self.task} FILE",
        }.get(key, "") if self.task != "copy" else ""  # fmt: skip

    def tokenizer(self) -> list[tuple[str, Any, str]]:
        if self.pieces is None:
            return [("kind", "bytes", "there is too little text to learn pieces from")]
        return [("kind", "bpe", "pieces of words, learned from the text; nothing is ever unknown"), ("size", self.pieces, "how many")]

    def model(self) -> list[tuple[str, Any, str]]:
        rows: list[tuple[str, Any, str]] = []
        if self.texts:
            rows.append(("vocab", "tokenizer", "as many tokens as it has"))
        if self.objective == "classify":
            count = len(self.data.corpus.labels())
            rows.append(("head", {"kind": "classes", "classes": "data", "pool": self.pool}, f"as many as the data has, which are {count}"))
        elif self.objective == "contrastive":
            rows.append(("head", {"kind": "vector", "pool": "mean"}, "the mean over the words of a text"))
        elif self.objective == "masked":
            rows.append(("head", "masked", "what stood where a word was hidden"))
        elif self.objective == "patches":
            rows.append(("head", {"kind": "pixels", "pixels": self.patch[0]}, "of every patch"))
        why = "with the small weights that are usual, a model beside sinusoids learned far later" if self.position == "sinusoidal" else ""
        return [*rows, ("init", "xavier", why)]

    @property
    def position(self) -> Any:
        if self.objective == "patches":
            return {"kind": "learned", "length": self.patch[2]}
        return {"recurrent": None, "ngram": None, "decoder": "rope"}.get(self.shape, "sinusoidal")

    @property
    def pool(self) -> str:
        return "last" if self.shape == "decoder" else "mean"

    @cached_property
    def patch(self) -> tuple[int, int, int]:
        """Numbers in a patch, colours, and patches in a picture: squares of 2 for small pictures, of 4 or more for large ones."""
        picture = self.data.corpus.train[0][0]
        colours, height, width = picture.shape if picture.ndim == 3 else (1, *picture.shape)
        sides = [side for side in range(2, height + 1) if height % side == 0 and width % side == 0]
        small = [side for side in sides if (height // side) * (width // side) <= 64]
        if not small:
            raise DataError(f"pictures of {height} × {width} cannot be cut into 2 to 64 square patches")
        return small[0] ** 2 * colours, colours, (height // small[0]) * (width // small[0])

    def towers(self) -> Iterator[tuple[str, list[tuple[str, Any, str]]]]:
        rung = self.rung
        if self.shape == "recurrent":
            source = [] if self.objective == "seq2seq" else [("source", False, "there is nothing to read but what is written")]
            yield "model.recurrent", [("width", rung.width, "for so much data"), *source]
            return
        if self.shape == "ngram":
            yield "model.ngram", [("order", 4, "it sees three words"), ("width", rung.width, "for so much data")]
            return
        first, _, second = self.shape.partition("–")
        dropout = 0.1 if self.passes > 5 else 0.0
        residual: Any = {"kind": "pre", "dropout": dropout} if dropout else "pre"
        pictures = self.objective == "patches"
        pixels, colours, places = self.patch if pictures else (0, 0, 0)
        embed = {"kind": "patches", "pixels": pixels, "channels": colours} if pictures else {"kind": "tokens", "scale": True}
        yield (
            f"model.{first}",
            [
                ("layers", rung.layers, ""),
                ("width", rung.width, "for so much data; the ladder is " + ", ".join(str(one.width) for one in LADDER)),
                ("embed", embed, f"{places} patches a picture" if pictures else "times √width"),
                ("position", self.position, "manyheads show position has others"),
                ("attention", {"kind": "heads", "heads": rung.heads}, ""),
                ("feedforward", {"kind": "mlp", "hidden": 4 * rung.width, "activation": "gelu" if pictures else "relu"}, ""),
                ("residual", residual, f"dropout, as every row is seen {self.passes:.3g} times" if dropout else ""),
            ],
        )
        if pictures:
            small = rung.width // 2
            yield (
                "model.decoder",
                [
                    ("like", "encoder", "but smaller: what the encoder makes of a picture is what will be used"),
                    ("layers", max(1, rung.layers // 2), ""),
                    ("width", small, ""),
                    ("embed", "restored", "what the encoder made, at its places, and one vector for all that is hidden"),
                    ("mask", {"causal": False}, "a picture has no order to write it in"),
                    ("feedforward", {"hidden": 4 * small}, ""),
                ],
            )
        elif second:
            yield (
                "model.decoder",
                [
                    ("like", "encoder", "everything above, but:"),
                    ("embed", {"kind": "shared", "scale": True}, "one table of tokens for both"),
                    ("cross", True, "it looks at what the encoder made of the source"),
                ],
            )

    def asked(self) -> list[tuple[str, Any, str]]:
        smooth = self.objective == "seq2seq" and self.data.tree["kind"] in ("pairs", "stdlib")
        why = {
            "seq2seq": "the target, word by word, given its source",
            "classify": "the class",
            "contrastive": "a query's own document among all of the batch",
            "causal": "the next token",
            "masked": "the tokens that were hidden",
            "patches": "the patches that were hidden",
        }
        rows: list[tuple[str, Any, str]] = [("kind", self.objective, why[self.objective])]
        return [*rows, ("smoothing", 0.1, "of the weight on other tokens, so that it is never too sure")] if smooth else rows

    def optim(self) -> list[tuple[str, Any, str]]:
        warmup = max(1, min(200, self.steps // 10))
        why = "3e-3 at width 64, and less where it is wider" if self.rung.width > 64 else "what a model of this width takes"
        return [
            ("rate", float(f"{3e-3 * (64 / self.rung.width) ** 0.75:.2g}"), why),
            ("schedule", {"kind": "linear", "warmup": warmup}, "up in so many steps, then down to 0 in a straight line"),
        ]

    def train(self) -> list[tuple[str, Any, str]]:
        every = max(1, self.steps // LOOKS)
        return [
            ("steps", self.steps, f"updates of the weights: {self.passes:.3g} passes over the data"),
            ("tokens", self.tokens, "places in a batch, padding included; rows of like length go together"),
            *(
                [("pack", self.pack, "tokens in a row: long texts are cut, at other places in every pass, and short ones share")]
                if self.pack
                else []
            ),
            *([("longest", self.longest, self.cut_rows)] if self.longest else []),
            ("evaluate_every", every, "steps between looks at unseen rows"),
            ("evaluate_rows", 256, "at most, of those held out"),
            ("save_every", max(1, self.steps // 4), "steps between checkpoints"),
        ]


def rows_of(run: RunSpec) -> tuple[Any, ...]:
    """What decides how rows become ids."""
    return run.tokenizer, run.train.longest, run.train.pack


def rounded(count: float) -> int:
    """Downwards to two digits."""
    size: int = 10 ** max(0, len(str(int(count))) - 2)
    return int(count) // size * size


# ---------------------------------------------------------------------------------------------------------- as TOML


def assigned(key: str, value: Any, why: str) -> list[str]:
    line = f"{key} = {inline(value)}"
    return [f"{line:<48}  # {one_line(why)}" if why else line]


def inline(value: Any) -> str:
    """A value on one line of TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {inline(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
