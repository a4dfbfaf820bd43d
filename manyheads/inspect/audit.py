"""A linter for models: laws that a model must keep whoever wrote it, checked by running it.

Each row has a verdict and a figure. Models of transformers are checked as live objects, and compared with ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

LENGTH, TOLERANCE = 12, 1e-4

Verdict = Literal["ok", "fault", "not checked"]


@dataclass(frozen=True)
class Row:
    """One law: whether it holds, by which figure, and in words."""

    law: str
    verdict: Verdict
    figure: float | None
    said: str


class Subject(Protocol):
    """A model to be audited, ours or another's."""

    shape: str  # encoder, decoder, encoder–decoder
    vocab: int
    longest: int | None  # the longest text it has positions for; the longest source, where there is one
    longest_written: int | None  # the same of what it writes
    picture: tuple[int, ...] | None  # channels, height and width of what it reads, where that is no text
    causal: bool  # whether it claims that no token sees its future

    @property
    def a_token(self) -> bool:
        """Whether it says something of each token, rather than one thing of the whole text."""
        ...

    def logits(self, ids: Tensor, *, padding: Tensor | None = None, target: Tensor | None = None) -> Tensor: ...

    def attention(self, ids: Tensor, target: Tensor | None) -> list[Tensor]:
        """The weights of every attention of a run, B×H×L×M; nothing where it does not show them."""
        ...

    def stepwise(self, ids: Tensor, source: Tensor | None) -> Tensor | None:
        """The logits of a text read token by token with a cache; None where it does not write."""
        ...

    def silent(self, ids: Tensor, target: Tensor | None) -> int | None:
        """How many heads add nothing to any token, whatever they look at; None where that cannot be told."""
        ...

    def tied(self) -> tuple[Tensor, Tensor] | str:
        """Two weights that are claimed to be one, or why there is nothing to compare."""
        ...

    def tokens(self) -> int | None:
        """How many tokens its tokenizer has."""
        ...

    def elsewhere(self) -> tuple[str, Callable[[Tensor, Tensor | None], Tensor]] | None:
        """Another implementation of the same model, by name."""
        ...


@torch.no_grad()
def check(subject: Subject) -> Iterator[Row]:
    """Every law in turn; a check that cannot run says why, and one that fails to run is a fault."""
    for law, run in LAWS.items():
        try:
            yield run(subject, law)
        except Exception as error:
            yield Row(law, "fault", None, f"could not be run: {type(error).__name__}: {' '.join(str(error).split())[:160]}")


def texts(subject: Subject, batch: int = 2, length: int = LENGTH, seed: int = 0, *, written: bool = False) -> Tensor:
    """Random ids, or random pictures; `written`: of what it writes."""
    generator = torch.Generator().manual_seed(seed)
    if subject.picture:
        return torch.randn(batch, *subject.picture, generator=generator)
    longest = subject.longest_written if written else subject.longest
    length = length if longest is None else min(length, longest)
    return torch.randint(0, subject.vocab, (batch, length), generator=generator)


def target_of(subject: Subject, batch: int = 2) -> Tensor | None:
    return texts(subject, batch, 7, seed=1, written=True) if subject.shape == "encoder–decoder" and not subject.picture else None


def judged(law: str, worst: float, good: str, bad: str, tolerance: float = TOLERANCE) -> Row:
    if not math.isfinite(worst):
        return Row(law, "fault", None, "what it gives is NaN or infinite")
    return Row(law, "ok" if worst <= tolerance else "fault", worst, good if worst <= tolerance else bad)


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, in units of how much the numbers vary."""
    a, b = a.float().cpu(), b.float().cpu()
    return float((a - b).abs().max() / (a.std() if a.numel() > 1 else a.abs().max()).clamp(min=1e-6))


def largest(numbers: Iterable[Tensor | float]) -> float:
    """The largest, and NaN if one is NaN: `max` would lose it."""
    return float(torch.tensor([float(number) for number in numbers]).max())


def rows_sum_to_one(subject: Subject, law: str) -> Row:
    found = subject.attention(texts(subject), target_of(subject))
    if not found:
        return Row(law, "not checked", None, "the model does not show its attention")
    worst = largest((weights.float().sum(-1) - 1).abs().max() for weights in found)
    many = sum(weights[..., 0].numel() for weights in found)
    return judged(law, worst, f"{many} rows", "rows do not sum to one: was a mask multiplied after the softmax?", 1e-3)


def causality(subject: Subject, law: str) -> Row:
    if not subject.causal:
        return Row(law, "not checked", None, "it sees both sides, and claims no more")
    if not subject.a_token:
        return Row(law, "not checked", None, "one answer a text does not show who sees whom")
    ids, paired = texts(subject, written=True), subject.shape == "encoder–decoder"
    source = texts(subject, seed=2) if paired else None

    def run(text: Tensor) -> Tensor:
        return subject.logits(source, target=text) if source is not None else subject.logits(text)

    before, changes = run(ids), [0.0]
    for place in range(1, ids.shape[1]):
        other = ids.clone()
        other[:, place] = (other[:, place] + 1) % subject.vocab
        changes.append(apart(before[:, :place], run(other)[:, :place]))
    return judged(law, largest(changes), "a changed token changes no output before it", "outputs change with tokens that come after them")


def padding(side: str) -> Callable[[Subject, str], Row]:
    def run(subject: Subject, law: str) -> Row:
        if subject.picture:
            return Row(law, "not checked", None, "a picture is whole, and is not padded")
        ids, count = texts(subject, 1), 4
        target = target_of(subject, 1)
        filler = texts(subject, 1, count, seed=3)
        where = slice(0, count) if side == "left" else slice(ids.shape[1], None)
        padded = torch.cat((filler, ids) if side == "left" else (ids, filler), dim=1)
        hidden = torch.zeros_like(padded, dtype=torch.bool)
        hidden[:, where] = True
        alone = subject.logits(ids, target=target)
        found = subject.logits(padded, padding=hidden, target=target)
        if target is None and subject.a_token:
            found = found[~hidden][None]
        return judged(law, apart(alone, found), "nobody's output changes", "padding changes the outputs of real tokens")

    return run


def cached(subject: Subject, law: str) -> Row:
    if subject.picture:
        return Row(law, "not checked", None, "it does not write token by token")
    ids, paired = texts(subject, written=True), subject.shape == "encoder–decoder"
    source = texts(subject, seed=2) if paired else None
    found = subject.stepwise(ids, source)
    if found is None:
        return Row(law, "not checked", None, "it does not write token by token")
    full = subject.logits(source, target=ids) if source is not None else subject.logits(ids)
    return judged(law, apart(full, found), "token by token says what the whole text says", "token by token says something else")


def batch_invariance(subject: Subject, law: str) -> Row:
    ids, target = texts(subject, 3), target_of(subject, 3)
    together = subject.logits(ids, target=target)
    alone = [subject.logits(ids[i : i + 1], target=None if target is None else target[i : i + 1]) for i in range(3)]
    return judged(law, apart(together, torch.cat(alone)), "a text alone is a text among others", "neighbours in a batch change each other")


def tied(subject: Subject, law: str) -> Row:
    pair = subject.tied()
    if isinstance(pair, str):
        return Row(law, "not checked", None, pair)
    return judged(
        law, float((pair[0] - pair[1]).abs().max()), "head and embedding are one", "head and embedding are said to be one, and differ", 0.0
    )


def heads(subject: Subject, law: str) -> Row:
    ids, target = texts(subject), target_of(subject)
    found = subject.attention(ids, target)
    if not found:
        return Row(law, "not checked", None, "the model does not show its attention")
    twins, dead = 0, subject.silent(ids, target) or 0
    for weights in found:
        for first in range(weights.shape[1]):
            twins += sum(int(torch.equal(weights[:, first], weights[:, other])) for other in range(first))
    if found[0].shape[-1] == 1:
        return Row(law, "not checked", None, "a text of one token shows nothing")
    said = f"{twins} heads are copies of another, {dead} add nothing"
    return Row(
        law,
        "fault" if twins or dead else "ok",
        float(twins + dead),
        said if twins or dead else "no head is a copy of another or adds nothing",
    )


def beyond(subject: Subject, law: str) -> Row:
    if subject.picture:
        return Row(law, "not checked", None, "all its pictures have one size")
    if subject.longest is None or subject.longest > 4096:
        return Row(law, "not checked", None, "it has positions for any length, or for more than are worth trying")
    long = torch.zeros(1, subject.longest + 1, dtype=torch.long)
    target = target_of(subject, 1)
    try:
        found = subject.logits(long, target=target)
    except (ValueError, IndexError, RuntimeError) as error:
        return Row(law, "ok", float(subject.longest), f"refused past {subject.longest}: {' '.join(str(error).split())[:80]}")
    finite = bool(found.isfinite().all())
    return Row(
        law,
        "fault",
        float(subject.longest),
        f"a text longer than {subject.longest} is answered {'in silence' if finite else 'with NaN or infinity'}",
    )


def vocabulary(subject: Subject, law: str) -> Row:
    known = subject.tokens()
    if known is None:
        return Row(law, "not checked", None, "there is no tokenizer")
    said = f"{known} tokens for a vocabulary of {subject.vocab}"
    return Row(law, "ok" if known <= subject.vocab else "fault", float(known - subject.vocab), said)


def reference(subject: Subject, law: str) -> Row:
    other = subject.elsewhere()
    if other is None:
        return Row(law, "not checked", None, "there is no other implementation here to compare with")
    name, run = other
    ids, target = texts(subject), target_of(subject)
    worst = apart(subject.logits(ids, target=target), run(ids, target))
    return judged(law, worst, f"the numbers of {name}", f"other numbers than {name}", 1e-3)


LAWS: dict[str, Callable[[Subject, str], Row]] = {
    "attention rows sum to one": rows_sum_to_one,
    "nobody sees the future": causality,
    "padding on the right": padding("right"),
    "padding on the left": padding("left"),
    "cached = full": cached,
    "batch invariance": batch_invariance,
    "tied weights are tied": tied,
    "no dead or doubled heads": heads,
    "positions past the end": beyond,
    "tokenizer and vocabulary": vocabulary,
    "another implementation": reference,
}
