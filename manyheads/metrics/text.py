"""Metrics of generated texts: exact match, BLEU, chrF and ROUGE."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from manyheads.errors import needs_extra
from manyheads.metrics.metric import register_metric


@register_metric("exact_match", "text", percent=True)
def exact_match(outputs: Sequence[str], targets: Sequence[str]) -> float:
    """The share of outputs that equal their targets; the amount of white space does not matter."""
    return sum(output.split() == target.split() for output, target in zip(outputs, targets, strict=True)) / len(targets)


# -------------------------------------------------------------------------------------------------------- BLEU and chrF


@register_metric("bleu", "text", decimals=2)
def bleu(outputs: Sequence[str], targets: Sequence[str]) -> float:
    """BLEU of the whole corpus, from 0 to 100 (Papineni et al. 2002), as sacrebleu computes it."""
    return corpus_score("bleu", outputs, targets)


@register_metric("chrf", "text", decimals=2)
def chrf(outputs: Sequence[str], targets: Sequence[str]) -> float:
    """The character n-gram F-score of the whole corpus, from 0 to 100 (Popović 2015), as sacrebleu computes it."""
    return corpus_score("chrf", outputs, targets)


def corpus_score(name: str, outputs: Sequence[str], targets: Sequence[str]) -> float:
    return float(sacrebleu_metrics()[name].corpus_score(list(outputs), [list(targets)]).score)


def sacrebleu_signatures() -> dict[str, str]:
    """Returns the signatures of BLEU and chrF, which Post 2018, arXiv 1804.08771, asks for next to every score."""
    metrics = sacrebleu_metrics()
    for metric in metrics.values():
        # the signature has the number of references, which is known after a first score
        metric.corpus_score(["a"], [["a"]])
    return {name: str(metric.get_signature()) for name, metric in metrics.items()}


def sacrebleu_metrics() -> dict[str, Any]:
    """Returns BLEU and chrF with the default settings of sacrebleu: cased, one reference per text."""
    with needs_extra("BLEU and chrF need sacrebleu", "eval"):
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    return {"bleu": BLEU(), "chrf": CHRF()}


# ----------------------------------------------------------------------------------------------------- ROUGE (Lin 2004)


@register_metric("rouge1", "text")
def rouge1(outputs: Sequence[str], targets: Sequence[str]) -> float:
    """The mean F₁ of words, from 0 to 1."""
    return mean_rouge(outputs, targets, lambda output, target: ngram_f1(output, target, n=1))


@register_metric("rouge2", "text")
def rouge2(outputs: Sequence[str], targets: Sequence[str]) -> float:
    """The mean F₁ of pairs of adjacent words, from 0 to 1."""
    return mean_rouge(outputs, targets, lambda output, target: ngram_f1(output, target, n=2))


@register_metric("rougeL", "text")
def rouge_l(outputs: Sequence[str], targets: Sequence[str]) -> float:
    """The mean F₁ of the longest common subsequence of words, from 0 to 1."""
    return mean_rouge(outputs, targets, subsequence_f1)


def mean_rouge(outputs: Sequence[str], targets: Sequence[str], score: Callable[[list[str], list[str]], float]) -> float:
    pairs = zip(outputs, targets, strict=True)
    return sum(score(rouge_words(output), rouge_words(target)) for output, target in pairs) / len(targets)


def rouge_words(text: str) -> list[str]:
    """Returns runs of a–z and 0–9 in lower case, without stemming, as the rouge_score package does."""
    return re.findall("[a-z0-9]+", text.lower())


def count_without_words(texts: Sequence[str]) -> int:
    """Counts the texts, except blank ones, without a–z or 0–9, whose ROUGE is 0 for any output."""
    return sum(bool(text.strip()) and not rouge_words(text) for text in texts)


def ngram_f1(output: Sequence[str], target: Sequence[str], *, n: int) -> float:
    """Returns F₁ of the n-grams, each counted at most as often as the other text has it."""
    output_ngrams, target_ngrams = (
        Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1)) for text in (output, target)
    )
    return f1((output_ngrams & target_ngrams).total(), output_ngrams.total(), target_ngrams.total())


def subsequence_f1(output: Sequence[str], target: Sequence[str]) -> float:
    """Returns F₁ of the longest common subsequence."""
    previous = [0] * (len(target) + 1)  # its length for the output so far and each prefix of the target
    for word in output:
        row = [0]
        for j, target_word in enumerate(target):
            row.append(previous[j] + 1 if word == target_word else max(previous[j + 1], row[j]))
        previous = row
    return f1(previous[-1], len(output), len(target))


def f1(common: int, output_count: int, target_count: int) -> float:
    """Returns 2PR / (P + R) = 2 · common / (output + target), or 0 without common items."""
    return 2 * common / (output_count + target_count) if common else 0.0
