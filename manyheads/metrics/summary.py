"""ROUGE (Lin 2004): how much of a wanted text was written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence


def tokens(text: str) -> list[str]:
    """What the rouge_score package counts: runs of a–z and 0–9 in lower case, without stemming. Letters of other scripts part them."""
    return re.findall("[a-z0-9]+", text.lower())


def uncounted(texts: Sequence[str]) -> int:
    """How many texts, blank ones aside, hold no such run: ROUGE is 0 for them, whatever was written."""
    return sum(bool(text.strip()) and not tokens(text) for text in texts)


def rouge_n(written: Sequence[str], wanted: Sequence[str], n: int) -> float:
    """F₁ of the n-grams, each counted at most as often as the other text has it."""
    ours, theirs = (Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1)) for text in (written, wanted))
    return f1((ours & theirs).total(), ours.total(), theirs.total())


def rouge_l(written: Sequence[str], wanted: Sequence[str]) -> float:
    """F₁ of the longest common subsequence."""
    return f1(common(written, wanted), len(written), len(wanted))


def f1(shared: int, written: int, wanted: int) -> float:
    """2PR / (P + R), which is twice what is shared over what there is; 0 where nothing is."""
    return 2 * shared / (written + wanted) if shared else 0.0


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence, row by row."""
    before = [0] * (len(other) + 1)
    for word in one:
        row = [0]
        for j, wanted in enumerate(other):
            row.append(before[j] + 1 if word == wanted else max(before[j + 1], row[j]))
        before = row
    return before[-1]


def scores(written: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """The means over all texts, from 0 to 1."""
    pairs = [(tokens(one), tokens(other)) for one, other in zip(written, wanted, strict=True)]
    found = {
        "rouge1": [rouge_n(one, other, 1) for one, other in pairs],
        "rouge2": [rouge_n(one, other, 2) for one, other in pairs],
        "rougeL": [rouge_l(one, other) for one, other in pairs],
    }
    return {name: sum(values) / len(values) for name, values in found.items()}
