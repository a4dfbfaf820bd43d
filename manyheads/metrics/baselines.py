"""What needs no network: the commonest class, counted words, the source itself. A model that is not above them has learned little."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Whole = NDArray[np.int64]


def words(text: str) -> list[str]:
    """Runs of letters and digits of any script, in lower case."""
    return re.findall(r"[^\W_]+", text.lower())


def copied(source: str) -> str:
    """The source, taken for the target."""
    return source


def lead(source: str, count: int) -> str:
    """The first words of the source, taken for its summary."""
    return " ".join(source.split()[:count])


# --------------------------------------------------------------------------------------------------------------- classes


class Majority:
    """p(class) = its share of what was learned from, whatever the text."""

    def __init__(self, labels: Sequence[int], classes: int) -> None:
        self.shares = np.bincount(labels, minlength=classes) / len(labels)

    def probabilities(self, texts: Sequence[str]) -> Numbers:
        return np.tile(self.shares, (len(texts), 1))


class NaiveBayes:
    """p(class | text) ∝ p(class) Π p(word | class), with p(word | class) = (count + α) / (all counts + α · words)

    Multinomial (McCallum and Nigam 1998); words that were never seen say nothing. Binary: a word counts once a text.
    """

    def __init__(self, texts: Iterable[str], labels: Sequence[int], classes: int, *, alpha: float = 1.0, binary: bool = False) -> None:
        self.binary, self.place = binary, dict[str, int]()
        found = [(label, self._counted(text)) for text, label in zip(texts, labels, strict=True)]
        for _, counts in found:
            for word in counts:
                self.place.setdefault(word, len(self.place))
        total_CV = np.zeros((classes, len(self.place)))
        for label, counts in found:
            total_CV[label, [self.place[word] for word in counts]] += list(counts.values())
        total_CV += alpha
        self.likely_CV = np.log(total_CV) - np.log(total_CV.sum(1, keepdims=True))
        with np.errstate(divide="ignore"):  # a class that never occurs is never chosen
            self.before_C = np.log(np.bincount(labels, minlength=classes) / len(labels))

    def _counted(self, text: str) -> Counter[str]:
        found = words(text)
        return Counter(set(found) if self.binary else found)

    def probabilities(self, texts: Sequence[str]) -> Numbers:
        rows = []
        for text in texts:
            known = {self.place[word]: count for word, count in self._counted(text).items() if word in self.place}
            rows.append(self.before_C + self.likely_CV[:, list(known)] @ np.array(list(known.values()), np.float64))
        logits_NC = np.stack(rows)
        shares_NC = np.exp(logits_NC - logits_NC.max(1, keepdims=True))
        return np.asarray(shares_NC / shares_NC.sum(1, keepdims=True))


# --------------------------------------------------------------------------------------------------------------- ranking


class BM25:
    """Σ over the words of a query of idf · f (k₁ + 1) / (f + k₁ (1 − b + b · |d| / mean |d|)), idf = ln(1 + (N − n + ½) / (n + ½))

    Robertson and Zaragoza 2009: f is how often the word is in the document, n in how many of all N it is.
    """

    def __init__(self, documents: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        self.count, self.place = len(documents), dict[str, int]()
        found: list[tuple[int, int, int]] = []  # word, document, how often
        sizes = np.zeros(self.count)
        for i, text in enumerate(documents):
            counts = Counter(words(text))
            sizes[i] = counts.total()
            found += [(self.place.setdefault(word, len(self.place)), i, count) for word, count in counts.items()]
        of_word, self.documents, often = np.array(found, np.int64).reshape(-1, 3).T
        order = np.argsort(of_word, kind="stable")
        of_word, self.documents = of_word[order], self.documents[order]
        often, within = often[order], np.bincount(of_word, minlength=len(self.place))
        idf = np.log(1 + (self.count - within + 0.5) / (within + 0.5))
        length = 1 - b + b * sizes / max(sizes.mean(), 1e-9)
        self.weights = idf[of_word] * often * (k1 + 1) / (often + k1 * length[self.documents])
        self.ends = np.concatenate(([0], np.cumsum(within)))

    def scores(self, query: str) -> Numbers:
        """Of every document."""
        total = np.zeros(self.count)
        for word in words(query):
            if (place := self.place.get(word)) is not None:
                part = slice(self.ends[place], self.ends[place + 1])
                total[self.documents[part]] += self.weights[part]
        return total


# -------------------------------------------------------------------------------------------------------------- language


class Unigram:
    """p(token) = (count + 1) / (all + vocabulary): tokens that know nothing of each other."""

    def __init__(self, texts: Iterable[Whole], vocabulary: int) -> None:
        counts = np.ones(vocabulary)
        for text in texts:
            np.add.at(counts, text, 1)
        self.likely_V = np.log(counts / counts.sum())

    def nats(self, text: Whole) -> Numbers:
        """−ln p of each token."""
        return -self.likely_V[text]


class Bigram:
    """p(b | a) = (count(ab) + t(a) · p(b)) / (count(a) + t(a)), t(a) different tokens having followed a, p(b) the unigram's

    Witten and Bell 1991: how much is left to what never followed is counted, not chosen.
    """

    def __init__(self, texts: Sequence[Whole], vocabulary: int) -> None:
        self.unigram, self.vocabulary = Unigram((text[1:] for text in texts), vocabulary), vocabulary
        pairs = np.concatenate([text[:-1] * vocabulary + text[1:] for text in texts])
        self.pairs, self.often = np.unique(pairs, return_counts=True)
        first = self.pairs // vocabulary
        self.after = np.bincount(first, weights=self.often, minlength=vocabulary)
        self.kinds = np.bincount(first, minlength=vocabulary)

    def nats(self, text: Whole) -> Numbers:
        """−ln p of each token but the first, which begins the text."""
        before, token = text[:-1], text[1:]
        pair = before * self.vocabulary + token
        place = np.minimum(np.searchsorted(self.pairs, pair), len(self.pairs) - 1)
        seen = np.where(self.pairs[place] == pair, self.often[place], 0)
        kinds, after, alone = self.kinds[before], self.after[before], np.exp(self.unigram.likely_V[token])
        return np.asarray(-np.log(np.where(after > 0, (seen + kinds * alone) / np.maximum(after + kinds, 1), alone)))
