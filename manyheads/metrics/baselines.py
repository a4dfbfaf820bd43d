"""Baselines that need no network: the most common class, naive Bayes, BM25, unigrams and bigrams."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


def words(text: str) -> list[str]:
    """Returns the runs of letters and digits of any script, in lower case."""
    return re.findall(r"[^\W_]+", text.lower())


def lead(source: str, count: int) -> str:
    """Returns the first words of the source, as its summary."""
    return " ".join(source.split()[:count])


# -------------------------------------------------------------------------------------------------------------- classes


class Majority:
    """Predicts p(class) = its share of the training rows, for every text"""

    def __init__(self, labels: Sequence[int], classes: int) -> None:
        self.prior_C = np.bincount(labels, minlength=classes) / len(labels)

    def probabilities(self, texts: Sequence[str]) -> Floats:
        return np.tile(self.prior_C, (len(texts), 1))


class NaiveBayes:
    """p(class | text) ∝ p(class) Π p(word | class), with p(word | class) = (count + α) / (all counts + α · vocabulary)

    Multinomial, McCallum and Nigam 1998; words that are not in the training texts are ignored.
    """

    def __init__(self, texts: Iterable[str], labels: Sequence[int], classes: int, *, alpha: float = 1.0) -> None:
        counts = [Counter(words(text)) for text in texts]
        vocabulary = dict.fromkeys(word for text_counts in counts for word in text_counts)
        self.index = {word: i for i, word in enumerate(vocabulary)}
        total_CV = np.zeros((classes, len(self.index)))
        for label, text_counts in zip(labels, counts, strict=True):
            total_CV[label, [self.index[word] for word in text_counts]] += list(text_counts.values())
        total_CV += alpha
        self.log_likelihood_CV = np.log(total_CV) - np.log(total_CV.sum(1, keepdims=True))
        with np.errstate(divide="ignore"):  # a class without training rows has probability 0
            self.log_prior_C = np.log(np.bincount(labels, minlength=classes) / len(labels))

    def probabilities(self, texts: Sequence[str]) -> Floats:
        rows = []
        for text in texts:
            counts = {self.index[word]: count for word, count in Counter(words(text)).items() if word in self.index}
            evidence_C = self.log_likelihood_CV[:, list(counts)] @ np.array(list(counts.values()), np.float64)
            rows.append(self.log_prior_C + evidence_C)
        logits_NC = np.stack(rows)
        exp_NC = np.exp(logits_NC - logits_NC.max(1, keepdims=True))
        return np.asarray(exp_NC / exp_NC.sum(1, keepdims=True))


# -------------------------------------------------------------------------------------------------------------- ranking


class BM25:
    """Σ over the words of a query of idf · f (k₁ + 1) / (f + k₁ (1 − b + b · |d| / mean |d|))

    Robertson and Zaragoza 2009, with idf = ln(1 + (N − n + ½) / (n + ½)): f is the word's count in the document d, n
    the number of documents that have the word, of N.
    """

    def __init__(self, documents: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        self.count, self.index = len(documents), dict[str, int]()
        postings: list[tuple[int, int, int]] = []  # word, document, count
        sizes = np.zeros(self.count)
        for i, text in enumerate(documents):
            counts = Counter(words(text))
            sizes[i] = counts.total()
            postings += [(self.index.setdefault(word, len(self.index)), i, count) for word, count in counts.items()]
        table = np.array(postings, np.int64).reshape(-1, 3)
        word, self.documents, frequency = table[np.argsort(table[:, 0], kind="stable")].T.copy()
        document_counts = np.bincount(word, minlength=len(self.index))
        idf = np.log(1 + (self.count - document_counts + 0.5) / (document_counts + 0.5))
        length = 1 - b + b * sizes / max(sizes.mean(), 1e-9)
        self.weights = idf[word] * frequency * (k1 + 1) / (frequency + k1 * length[self.documents])
        self.offsets = np.concatenate(([0], np.cumsum(document_counts)))  # start of each word's part of `documents`

    def scores(self, query: str) -> Floats:
        """Returns the score of every document."""
        total = np.zeros(self.count)
        for word in words(query):
            if (index := self.index.get(word)) is not None:
                part = slice(self.offsets[index], self.offsets[index + 1])
                total[self.documents[part]] += self.weights[part]
        return total


# ------------------------------------------------------------------------------------------------------------- language


class Unigram:
    """p(token) = (count + 1) / (all counts + vocabulary), independent of other tokens"""

    def __init__(self, texts: Iterable[Ids], vocab_size: int) -> None:
        counts = np.ones(vocab_size)
        for text in texts:
            np.add.at(counts, text, 1)
        self.log_probs_V = np.log(counts / counts.sum())

    def nats(self, text: Ids) -> Floats:
        """Returns −ln p of each token."""
        return -self.log_probs_V[text]


class Bigram:
    """p(b | a) = (count(ab) + t(a) · p(b)) / (count(a) + t(a)), with t(a) different tokens after a and p(b) the unigram

    Witten and Bell 1991: the weight of the unigram is estimated from counts and needs no parameter.
    """

    def __init__(self, texts: Sequence[Ids], vocab_size: int) -> None:
        self.unigram, self.vocab_size = Unigram((text[1:] for text in texts), vocab_size), vocab_size
        pairs = np.concatenate([self.pair_ids(text) for text in texts])
        self.pairs, self.pair_counts = np.unique(pairs, return_counts=True)
        first = self.pairs // vocab_size
        self.counts_V = np.bincount(first, weights=self.pair_counts, minlength=vocab_size)
        self.followers_V = np.bincount(first, minlength=vocab_size)

    def pair_ids(self, text: Ids) -> Ids:
        """Returns one number per pair of adjacent tokens."""
        return text[:-1] * self.vocab_size + text[1:]

    def nats(self, text: Ids) -> Floats:
        """Returns −ln p of each token except the first, which is bos."""
        previous, pairs = text[:-1], self.pair_ids(text)
        index = np.minimum(np.searchsorted(self.pairs, pairs), len(self.pairs) - 1)
        pair_counts = np.where(self.pairs[index] == pairs, self.pair_counts[index], 0)
        count, followers = self.counts_V[previous], self.followers_V[previous]
        unigram = np.exp(self.unigram.log_probs_V[text[1:]])
        smoothed = (pair_counts + followers * unigram) / np.maximum(count + followers, 1)
        return np.asarray(-np.log(np.where(count > 0, smoothed, unigram)))
