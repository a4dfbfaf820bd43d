"""A run file in the making: what was chosen, and how it is written, every line with its reason."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from manyheads.advice.task import TASKS, Data
from manyheads.data.source import NO_TEXT, DataError
from manyheads.model.build import device_for, outline
from manyheads.model.size import readable
from manyheads.model.spec import ModelSpec
from manyheads.spec import one_line
from manyheads.train.forecast import Pace, duration, epoch_of, memory_free
from manyheads.train.run import Ready, RunSpec, made_ready, read_run, sized
from manyheads.training import spoken

LOOKS = 10  # at unseen rows in a run, at most


@dataclass(frozen=True)
class Rung:
    """A size of model, for data of at most so many tokens."""

    layers: int
    width: int
    heads: int
    most: float


LADDER = (Rung(2, 64, 4, 3e5), Rung(3, 128, 4, 3e6), Rung(4, 256, 8, 3e7), Rung(6, 512, 8, math.inf))


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
    looks: int = LOOKS
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

    @property
    def texts(self) -> list[str]:
        return [name for name in self.data.corpus.fields if name not in NO_TEXT]

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

    def text_and_reasons(self) -> tuple[str, list[str]]:
        reasons = self.reasons()
        return "\n".join((*(f"# {one_line(reason)}" for reason in reasons), "", self.text())), reasons

    def reasons(self) -> list[str]:
        assert self.pace is not None
        task, parameters = TASKS[self.task], sum(one.numel() for one in outline(self.made.spec).parameters())
        epoch, how = epoch_of(self.made), self.made.run.train
        advised = next(iter(task.shapes))
        shape = f"{self.shape}: {task.why}" if self.shape == advised else f"{self.shape}, as was said; advised is {advised}, as {task.why}"
        where = device_for("auto")
        worker = f"{os.cpu_count()} cores of which {torch.get_num_threads()} work" if where.type == "cpu" else str(where)
        machine = f"{worker}, {readable(free)} of memory free" if (free := memory_free(where)) else worker
        timed = f"an update took {1000 * self.pace.step:,.0f} ms"
        time = f"about {spoken(duration(self.made, self.pace))} here ({machine}; {timed})"
        limit = f"; {spoken(60 * self.minutes)} decided, more steps may be better" if self.cut else ""
        layers = "" if self.shape in ("recurrent", "ngram") else f"{self.rung.layers} layers of "
        return [
            self.data.corpus.about,
            shape,
            f"{layers}width {self.rung.width}, {parameters:,} parameters, for {epoch.tokens:,} tokens to learn from",
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
        own, columns = "path" in self.data.tree, "fields" if "fields" in self.data.tree else "kind"
        said = {} if own or self.task == "copy" else {"kind": f"nothing to download; a file of your own: manyheads new {self.task} FILE"}
        return (said | ({"path": "as seen from where manyheads train is called", columns: self.data.why} if own else {})).get(key, "")

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
        every = max(1, self.steps // self.looks)
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
