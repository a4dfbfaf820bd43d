"""Learning from text alone: the next token, tokens that were hidden, or spans of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

import numpy as np
from pydantic import model_validator

from manyheads.model.spec import ModelSpec
from manyheads.objective.score import NOTHING, Batch, ObjectiveSpec, Row, Tokens, answered, asked, padded
from manyheads.spec import SpecError, field


class Piece(NamedTuple):
    """A text, or some of it: what stands around a text stands at its own ends alone."""

    text: np.ndarray
    opens: bool = True
    closes: bool = True


class PackableSpec(ObjectiveSpec):
    """What is learned of every place of a text, so that texts may share a row, and long ones be cut where it ends."""

    fields: ClassVar[tuple[str, ...]] = ("text",)
    ahead: ClassVar[int] = 0  # tokens that a piece is asked for beyond those that are read

    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch:
        return self.pieces([Piece(text) for text, *_ in rows], tokens, chance)

    def cut(self, text: np.ndarray, start: int, stop: int) -> Piece:
        """Of the places that a text takes with what stands around it, those from start to stop."""
        return Piece(text[max(0, start - 1) : stop - 1 + self.ahead], start == 0, stop == len(text) + self.added)

    @abstractmethod
    def pieces(self, pieces: Sequence[Piece], tokens: Tokens, chance: np.random.Generator) -> Batch: ...


class HidingSpec(ObjectiveSpec):
    """What hides tokens behind one that stands for them."""

    def check_tokens(self, tokens: Tokens, model: ModelSpec) -> None:
        self.mask(tokens)

    def mask(self, tokens: Tokens) -> int:
        """The token that stands for hidden ones."""
        if tokens.mask < 0:
            said = f"no token of it stands for a hidden one, and {self.kind} needs one; take a tokenizer that has <mask> or [MASK]"
            raise SpecError(said, ("tokenizer",))
        return tokens.mask


class CausalSpec(PackableSpec, kind="causal"):
    """−Σ log p(x_t | x_<t), the end of a text included"""

    shapes: ClassVar[tuple[str, ...]] = ("decoder", "recurrent", "ngram")
    frame: ClassVar[str] = "<s> $A"
    ahead: ClassVar[int] = 1

    def before(self, tokens: Tokens) -> int:
        return 1  # a text's first token is asked too, so one stands before it whatever the tokenizer says

    def pieces(self, pieces: Sequence[Piece], tokens: Tokens, chance: np.random.Generator) -> Batch:
        whole = [np.concatenate(([tokens.begin] * opens, text, [tokens.end] * closes)).astype(np.int64) for text, opens, closes in pieces]
        return Batch(padded([ids[:-1] for ids in whole], tokens.pad), asked([ids[1:] for ids in whole]))


class MaskedSpec(HidingSpec, PackableSpec, kind="masked"):
    """−Σ log p(x_t | the rest), over a share of places chosen by chance

    Devlin et al. 2018, arXiv 1810.04805: of the chosen, most are shown as <mask>, some as another token, some as they are. Every
    token keeps its place.
    """

    shapes: ClassVar[tuple[str, ...]] = ("encoder",)
    frame: ClassVar[str] = "<s> $A </s>"
    added: ClassVar[int] = 2

    share: float = field(0.15, "of the places that are asked", gt=0, lt=1)
    hidden: float = field(0.8, "of those, shown as <mask>", ge=0, le=1)
    swapped: float = field(0.1, "of those, shown as a token drawn by chance", ge=0, le=1)

    @model_validator(mode="after")
    def _parts_of_one(self) -> Self:
        if self.hidden + self.swapped > 1 + 1e-9:
            raise SpecError(f"is {self.swapped:g}, and {self.hidden:g} are hidden already: together they are at most 1", ("swapped",))
        return self

    def pieces(self, pieces: Sequence[Piece], tokens: Tokens, chance: np.random.Generator) -> Batch:
        mask = self.mask(tokens)
        given, wanted = [], []
        for text, opens, closes in pieces:
            before, behind = (ids[: len(ids) * there] for ids, there in zip(tokens.ends(self.frame), (opens, closes), strict=True))
            chosen = chance.random(len(text)) < self.share
            if len(text) and not chosen.any():
                chosen[chance.integers(len(text))] = True  # every text asks for something
            fate = chance.random(len(text))
            shown = np.where(chosen & (fate < self.hidden), mask, text)
            swapped = chosen & (fate >= self.hidden) & (fate < self.hidden + self.swapped)
            shown = np.where(swapped, tokens.ordinary[chance.integers(len(tokens.ordinary), size=len(text))], shown)
            given.append(np.concatenate((before, shown, behind)).astype(np.int64))
            asked_for = np.where(chosen, text, NOTHING)
            wanted.append(np.concatenate(([NOTHING] * len(before), asked_for, [NOTHING] * len(behind))).astype(np.int64))
        return Batch(padded(given, tokens.pad), asked(wanted))


class SpansSpec(ObjectiveSpec, kind="spans"):
    """−Σ log p(y_t | y_<t, x), with x a text that has <extra_i> for each hidden span and y those spans, each behind its own

    Raffel et al. 2020, arXiv 1910.10683, section 3.1.4: a b c d e f → a <0> d e <1> and <0> b c <1> f <2>, the last one for the end.
    How much is hidden is exact, where it stands is chance; no two spans touch. In the published code every text begins with a token
    that is shown and ends with a span; here a span may stand anywhere.
    """

    fields: ClassVar[tuple[str, ...]] = ("text",)
    shapes: ClassVar[tuple[str, ...]] = ("encoder–decoder", "recurrent")
    frame: ClassVar[str] = "$A </s>"
    added: ClassVar[int] = 1  # beside sentinels, which `length` counts

    share: float = field(0.15, "of the tokens that are hidden", gt=0, lt=1)
    mean: float = field(3.0, "tokens in a span, on average", ge=1)
    sentinels: int = field(100, "how many <extra_i> there are: one more than spans in a text", ge=2, le=1 << 16)

    def extra(self) -> tuple[str, ...]:
        return tuple(f"<extra_{i}>" for i in range(self.sentinels))

    def length(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """Of the source and of the target: what is shown or hidden, a sentinel a span, and </s>, or <s> and the last sentinel."""
        hidden, count = hidden_of(lengths[0], self.share, self.mean)
        return np.stack((lengths[0] - hidden + count + 1, hidden + count + 2), axis=1)

    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch:
        pairs = []
        for text, *_ in rows:
            spans = spans_of(len(text), self.share, self.mean, chance)
            if len(spans) >= len(tokens.extra):
                raise ValueError(
                    f"a text of {len(text):,} tokens has {len(spans)} hidden spans, and there are {len(tokens.extra)} sentinels for them "
                    f"and the end: raise objective.sentinels, or cut texts"
                )
            shown, hidden = corrupted(text, spans, tokens.extra)
            pairs.append((np.array(shown), np.array(hidden)))
        return answered(pairs, tokens, self.frame)


def hidden_of(lengths: np.ndarray, share: float, mean: float) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens of each text are hidden, round(share · length), at least one and not all; and in how many spans."""
    hidden = np.maximum(1, np.minimum(np.rint(share * lengths), lengths - 1))
    count = np.maximum(1, np.minimum(np.rint(hidden / mean), lengths - hidden + 1))
    return np.where(lengths > 0, hidden, 0).astype(np.int64), np.where(lengths > 0, count, 0).astype(np.int64)


def spans_of(length: int, share: float, mean: float, chance: np.random.Generator) -> list[tuple[int, int]]:
    """Where spans start and stop, of about that mean."""
    if not length:
        return []
    hidden, count = (int(one) for one in hidden_of(np.array(length), share, mean))
    shown = length - hidden
    ends = np.sort(chance.choice(hidden - 1, count - 1, replace=False)) + 1 if count > 1 else np.empty(0, np.int64)
    before = np.concatenate(([0], ends))  # how many are hidden before each span
    sizes = np.diff(np.concatenate((before, [hidden])))
    starts = np.sort(chance.choice(shown + 1, count, replace=False)) + before
    return [(int(start), int(start + size)) for start, size in zip(starts, sizes, strict=True)]


def corrupted(text: np.ndarray, spans: Sequence[tuple[int, int]], sentinels: Sequence[int]) -> tuple[list[int], list[int]]:
    """What is shown, a sentinel for each span, and what is hidden, each span behind its sentinel and one more at the end."""
    shown: list[int] = []
    hidden: list[int] = []
    last = 0
    for sentinel, (start, stop) in zip(sentinels, spans, strict=False):
        shown += [*text[last:start].tolist(), sentinel]
        hidden += [sentinel, *text[start:stop].tolist()]
        last = stop
    return [*shown, *text[last:].tolist()], [*hidden, sentinels[len(spans)]]


class InfillSpec(HidingSpec, kind="infill"):
    """−Σ log p(x_t | x_<t), with x = prefix <mask> suffix <mask> content: what is missing from a text is written at its end

    The causal form of span corruption, as in Stanford's CS224N, assignment 5. A text is cut to a random length from 4 to 7/8 of the
    block, and of that a quarter is missing on average. </s> stands behind, where the assignment has padding; padding is not learned.
    """

    fields: ClassVar[tuple[str, ...]] = ("text",)
    shapes: ClassVar[tuple[str, ...]] = ("decoder", "recurrent")
    frame: ClassVar[str] = "<s> $A"
    added: ClassVar[int] = 3

    block: int = field(128, "tokens: a text is cut to 7/8 of this at most", ge=8)

    @property
    def longest(self) -> int:
        return self.block * 7 // 8

    def length(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        return np.minimum(super().length(lengths), self.longest + self.added)

    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch:
        given, wanted, mask = [], [], self.mask(tokens)
        for text, *_ in rows:
            cut = text[: chance.integers(4, self.longest + 1)]
            start, stop = missing_part(len(cut), chance)
            row = [*cut[:start].tolist(), mask, *cut[stop:].tolist(), mask, *cut[start:stop].tolist()]
            given.append([tokens.begin, *row])
            wanted.append([*row, tokens.end])
        return Batch(padded(given, tokens.pad), asked(wanted))


def missing_part(length: int, chance: np.random.Generator) -> tuple[int, int]:
    """Where what is missing starts and stops: any size from 1 to twice the mean less 1, which is a quarter of the length."""
    mean = int(length / 4 + chance.random())  # rounded up as often as it takes
    size = int(chance.integers(1, 2 * mean)) if mean else 0
    start = int(chance.integers(length - size + 1))
    return start, start + size
