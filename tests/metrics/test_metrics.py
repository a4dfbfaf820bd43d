"""Metrics and baselines against their formulas and against other libraries, and the registry of metrics."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.errors import MissingExtraError
from manyheads.metrics import metric
from manyheads.metrics.baselines import BM25, Bigram, Majority, NaiveBayes, Unigram, lead, words
from manyheads.metrics.classes import calibration_error
from manyheads.metrics.likelihood import LogLikelihood
from manyheads.metrics.metric import METRICS, format_value, register_metric
from manyheads.metrics.probe import linear_probe, ridge_regression
from manyheads.metrics.ranking import chance_level, rank_targets
from manyheads.metrics.text import (
    count_without_words,
    exact_match,
    ngram_f1,
    rouge_words,
    sacrebleu_signatures,
    subsequence_f1,
)
from manyheads.spec import load_parts

TEXT = st.lists(st.sampled_from(["the", "cat", "sat", "on", "a", "mat", "Mat,", "mat.", "7", "ü"]), max_size=12).map(
    " ".join
)

# --- the registry ---

GROUPS = {
    "text": ("exact_match", "bleu", "chrf", "rouge1", "rouge2", "rougeL"),
    "classes": ("accuracy", "macro_f1", "calibration_error"),
    "ranking": ("mrr", "mrr@10", "recall@1", "recall@10"),
    "likelihood": ("loss", "perplexity", "bits_per_byte", "nats_per_character"),
    "probe": ("probe",),
}
# arguments of each group: perfect ones, and worse ones
CLASSES = [0, 1, 2, 1]
EXAMPLES = {
    "text": ((["a b c d e f"], ["a b c d e f"]), (["a b c d x"], ["a b c d e f"])),
    "classes": ((CLASSES, np.eye(3)[CLASSES]), (CLASSES, np.eye(3)[[0, 1, 1, 0]])),
    "ranking": ((np.array([1.0, 1.0]),), (np.array([1.0, 30.0]),)),
    "likelihood": ((LogLikelihood(1.0, 4, 10, 12),), (LogLikelihood(2.0, 4, 10, 12),)),
    "probe": (
        (np.eye(2).repeat(20, 0), [*"a" * 20, *"b" * 20], np.eye(2), ["a", "b"]),
        (np.eye(2).repeat(20, 0), [*"a" * 20, *"b" * 20], np.eye(2), ["b", "b"]),
    ),
}


@pytest.fixture
def registry(monkeypatch):
    """A copy of the registry that a test may add to."""
    monkeypatch.setattr(metric, "METRICS", dict(METRICS))
    return metric.METRICS


def test_groups_have_their_metrics_in_order():
    groups = {item.group for item in METRICS.values()}
    assert {group: metric.metric_names(group) for group in groups} == GROUPS


@pytest.mark.parametrize("group", GROUPS)
def test_the_direction_of_every_metric_is_that_of_its_function(group):
    perfect, worse = (metric.scores(group, *args) for args in EXAMPLES[group])
    assert tuple(perfect) == GROUPS[group]
    for name, value in perfect.items():
        assert type(value) is float
        assert (value > worse[name]) is metric.higher_is_better(name)
        assert (value < worse[name]) is not metric.higher_is_better(name)


def test_shares_are_shown_in_per_cent():
    assert {name for name in METRICS if METRICS[name].percent} == {
        "accuracy",
        "exact_match",
        "probe",
        "recall@1",
        "recall@10",
    }
    assert format_value("exact_match", 0.1234) == "12.3%"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("loss", 1.23456, "1.2346"),
        ("loss", 12.3456, "12.35"),
        ("perplexity", 12345.678, "12,345.68"),
        ("perplexity", 1.23456e43, "1.23e+43"),
        ("bleu", 3.14159, "3.14"),
        ("chrf", 31.4159, "31.42"),
        ("unknown", -0.5, "-0.5000"),
        ("unknown", -12345.678, "-12,345.68"),
    ],
)
def test_numbers_are_shown_with_decimals_that_fit_them(name, value, shown):
    assert format_value(name, value) == shown


def test_a_name_without_a_metric_is_better_higher_and_no_share():
    assert metric.higher_is_better("unknown")
    assert metric.format_value("unknown", 0.5) == "0.5000"


PARTS = """
from manyheads.metrics.metric import register_metric

@register_metric("{name}", "text", higher_is_better=False, decimals=1)
def length_error(outputs, targets):
    return sum(abs(len(a) - len(b)) for a, b in zip(outputs, targets)) / len(targets)
"""


def test_a_metric_in_a_parts_file_is_reported_with_its_group(registry, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PARTS.format(name="length_error"))
    for _ in range(2):  # the same function may register again
        load_parts(path)
        assert metric.scores("text", ["ab", "a"], ["a", "abcd"]).popitem() == ("length_error", 2.0)
    assert tuple(metric.scores("text", ["a"], ["a"])) == (*GROUPS["text"], "length_error")
    assert not metric.higher_is_better("length_error")
    assert metric.format_value("length_error", 2.0) == "2.0"


def test_a_name_is_registered_once(registry, tmp_path):
    with pytest.raises(ValueError, match="bleu") as caught:
        register_metric("bleu", "classes")(lambda targets, probabilities: 0.0)
    assert caught.value.code == "usage.parts-file"
    path = tmp_path / "mine.py"
    path.write_text(PARTS.format(name="exact_match"))
    with pytest.raises(ValueError, match="exact_match") as caught:
        load_parts(path)
    assert caught.value.code == "usage.parts-file"
    assert {name: item.function for name, item in registry.items()} == {n: m.function for n, m in METRICS.items()}


def test_importing_metrics_needs_only_numpy():
    code = (
        "import sys\nfrom manyheads.metrics.metric import METRICS\nassert len(METRICS) == 18\n"
        "assert not {'torch', 'sacrebleu', 'sklearn', 'scipy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- text ---


def test_exact_ignores_the_amount_of_white_space():
    assert exact_match([" a  b", "a", "A"], ["a b", "a b", "a"]) == pytest.approx(1 / 3)


def test_bleu_and_chrf_equal_those_of_sacrebleu():
    import sacrebleu

    outputs = ["Ein Mann schläft im grünen Zimmer.", "eine Gruppe lädt Baumwolle auf einen Lastwagen", "Der Hund."]
    targets = [
        "Ein Mann schläft in einem grünen Raum.",
        "Eine Gruppe lädt Baumwolle auf einen Lastwagen",
        "Der Hund rennt .",
    ]
    scores, swapped = metric.scores("text", outputs, targets), metric.scores("text", targets, outputs)
    assert scores["bleu"] == sacrebleu.corpus_bleu(outputs, [targets]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(outputs, [targets]).score
    assert all(scores[name] != swapped[name] for name in ("bleu", "chrf"))  # outputs come first


def test_signatures_are_those_of_scores_against_one_reference():
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    metrics = {"bleu": BLEU(), "chrf": CHRF()}
    for item in metrics.values():
        item.corpus_score(["the cat sat", "a mat"], [["a cat sat", "the mat"]])
    signatures = sacrebleu_signatures()
    assert signatures == {name: str(item.get_signature()) for name, item in metrics.items()}
    assert {"case:mixed", "tok:13a", "nrefs:1"} <= set(signatures["bleu"].split("|"))
    assert "nc:6" in signatures["chrf"].split("|")


def test_without_sacrebleu_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    for name in [name for name in sys.modules if name.startswith("sacrebleu.")]:
        monkeypatch.delitem(sys.modules, name)
    for call in (sacrebleu_signatures, lambda: metric.scores("text", ["a"], ["a"])):
        with pytest.raises(MissingExtraError, match=r"manyheads\[eval\]"):
            call()


def test_rouge_equals_counting_by_hand():
    output, target = "The cat sat, on the mat", "the cat was on a Mat."
    assert rouge_words(output) == ["the", "cat", "sat", "on", "the", "mat"]
    scores = metric.scores("text", [output], [target])
    assert scores["rouge1"] == pytest.approx(2 * 4 / (6 + 6))  # the, cat, on, mat
    assert scores["rouge2"] == pytest.approx(2 * 1 / (5 + 5))  # the cat
    assert scores["rougeL"] == pytest.approx(2 * 4 / (6 + 6))
    scores = metric.scores("text", ["a b c d"], ["d c b a"])
    assert [scores[name] for name in ("rouge1", "rouge2", "rougeL")] == [1, 0, 0.25]
    assert subsequence_f1([*"abcd"], [*"dcba"]) == pytest.approx(2 * 1 / 8)
    assert subsequence_f1([*"bd"], [*"abcd"]) == pytest.approx(2 * (2 / 2) * (2 / 4) / (2 / 2 + 2 / 4))
    assert ngram_f1([*"aaa"], [*"ab"], n=1) == pytest.approx(2 * 1 / 5)  # counted as often as the other has it
    assert rouge_words("für x_y") == ["f", "r", "x", "y"]  # as in rouge_score: only a to z, 0 to 9


def rouge(outputs, targets):
    return {name: METRICS[name].function(outputs, targets) for name in ("rouge1", "rouge2", "rougeL")}


def test_rouge_is_the_mean_over_texts():
    assert rouge(["", "x"], ["x", ""]) == {"rouge1": 0, "rouge2": 0, "rougeL": 0}
    assert rouge(["a b", "x", "y", "y"], ["a b", "x", "z", "z"]) == {"rouge1": 0.5, "rouge2": 0.25, "rougeL": 0.5}


@given(TEXT, TEXT)
def test_rouge_is_symmetric_and_one_for_equal_texts(one, other):
    forward, backward = rouge([one], [other]), rouge([other], [one])
    assert forward == pytest.approx(backward)
    assert all(0 <= value <= 1 for value in forward.values())
    if len(rouge_words(one)) > 1:
        assert rouge([one], [one]) == {"rouge1": 1, "rouge2": 1, "rougeL": 1}


def test_texts_without_rouge_words_are_counted():
    """Their ROUGE is 0 even for equal texts."""
    texts = ["привет мир", "", " ", "мир 2", "hello", "漢字"]
    assert count_without_words(texts) == 2
    for text in filter(str.strip, texts):
        assert bool(rouge([text], [text])["rouge1"]) is not bool(count_without_words([text]))


def test_lead_is_the_first_words():
    assert lead("one  two\nthree four", 3) == "one two three"
    assert lead("one", 12) == "one"


# --- classes ---

LABELLED = st.integers(2, 6).flatmap(
    lambda count: st.tuples(
        st.just(count), st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, 2**20)), min_size=1, max_size=40)
    )
)


@given(LABELLED)
def test_accuracy_and_macro_f1_equal_those_of_sklearn(labelled):
    from sklearn.metrics import accuracy_score, f1_score

    count, rows = labelled
    targets = [label for label, _ in rows]
    probabilities = np.stack([np.random.default_rng(seed).dirichlet(np.ones(count)) for _, seed in rows])
    predicted = probabilities.argmax(1)
    scores = metric.scores("classes", targets, probabilities)
    assert scores["accuracy"] == pytest.approx(accuracy_score(targets, predicted))
    assert scores["macro_f1"] == pytest.approx(f1_score(targets, predicted, average="macro"))


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    probabilities = [[0.9, 0.1], [0.9, 0.1], [0.55, 0.45], [0.2, 0.8]]
    # (13/15, 14/15] has the first two, one of them right; (8/15, 9/15] a right one; (11/15, 12/15] a wrong one
    assert calibration_error([0, 1, 0, 0], probabilities) == pytest.approx((2 * 0.4 + 0.45 + 0.8) / 4)
    assert calibration_error([0, 1], [[1.0, 0.0], [0.0, 1.0]]) == 0
    # 9/15 is the last number of its bin, so the right one and the wrong one are in two bins
    assert calibration_error([0, 1], [[0.6, 0.4], [0.6 + 1e-9, 0.4 - 1e-9]]) == pytest.approx((0.4 + 0.6) / 2)


def test_naive_bayes_equals_that_of_sklearn():
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB

    rng = np.random.default_rng(0)
    vocabulary = np.array(["good", "bad", "film", "plot", "Schön", "über", "ok", "the", "the-end", "7", "x_y"])
    texts = [" ".join(rng.choice(vocabulary, rng.integers(0, 12))) for _ in range(60)]
    labels = rng.integers(0, 3, 60)
    test_texts = [*texts[:20], "good words never seen", ""]
    vectorizer = CountVectorizer(analyzer=words)
    model = MultinomialNB().fit(vectorizer.fit_transform(texts[20:]), labels[20:])
    expected = model.predict_proba(vectorizer.transform(test_texts))
    assert np.allclose(NaiveBayes(texts[20:], labels[20:], 3).probabilities(test_texts), expected)


def test_majority_gives_the_shares_of_the_classes():
    probabilities = Majority([0, 2, 2, 0, 2], 4).probabilities(["a", "b"])
    assert np.allclose(probabilities, [[0.4, 0, 0.6, 0]] * 2)


def test_a_class_without_training_rows_has_probability_zero():
    probabilities = NaiveBayes(["a", "b"], [0, 2], 3).probabilities(["a", "b", "c"])
    assert probabilities[:, 1].tolist() == [0, 0, 0]
    assert np.allclose(probabilities.sum(1), 1)


# --- ranking ---


def test_equal_scores_share_their_ranks():
    assert rank_targets([[3, 1, 2], [1, 1, 1], [0, 5, 0]], [2, 0, 0]).tolist() == [2, 2, 2.5]


def test_nan_ranks_below_every_number():
    nan = math.nan
    scores = [[nan] * 3, [nan, 1, 2], [-math.inf, 1, nan], [5, 1, nan]]
    assert rank_targets(scores, [0, 0, 1, 0]).tolist() == [2, 3, 1, 1]


def test_ranking_scores_follow_their_formulas():
    assert metric.scores("ranking", np.array([1.0, 2.0, 20.0])) == pytest.approx(
        {"mrr": (1 + 1 / 2 + 1 / 20) / 3, "mrr@10": (1 + 1 / 2) / 3, "recall@1": 1 / 3, "recall@10": 2 / 3}
    )


@pytest.mark.parametrize("count", [1, 7, 30])
def test_chance_level_is_the_mean_over_all_ranks(count):
    assert chance_level(count) == pytest.approx(metric.scores("ranking", np.arange(1.0, count + 1)))


@given(st.lists(TEXT, min_size=1, max_size=8), TEXT)
def test_bm25_follows_its_formula(documents, query):
    k1, b = 1.2, 0.75
    texts = [words(text) for text in documents]
    mean = sum(map(len, texts)) / len(texts)
    expected = []
    for document in texts:
        score = 0.0
        for word in words(query):
            n, f = sum(word in other for other in texts), document.count(word)
            idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
            score += idf * f * (k1 + 1) / (f + k1 * (1 - b + b * len(document) / mean)) if f else 0
        expected.append(score)
    assert np.allclose(BM25(documents).scores(query), expected)


# --- likelihood ---


def test_a_random_byte_takes_eight_bits():
    text = "schön"
    size = len(text.encode())
    assert metric.scores("likelihood", LogLikelihood(size * math.log(256), size, len(text), size)) == pytest.approx(
        {"loss": math.log(256), "perplexity": 256, "bits_per_byte": 8, "nats_per_character": 6 * math.log(256) / 5}
    )


@pytest.mark.parametrize(("nats", "expected"), [(709.0, math.exp(709)), (710.0, math.inf), (1e9, math.inf)])
def test_perplexity_is_infinite_where_floats_end(nats, expected):
    assert metric.scores("likelihood", LogLikelihood(nats, 1, 1, 1))["perplexity"] == expected


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=6))
def test_bigrams_and_unigrams_are_distributions_that_follow_the_counts(texts):
    rows = [np.array([6, *text, 7]) for text in texts]  # 6 begins a text, 7 ends it; 8 never occurs
    unigram, bigram = Unigram((row[1:] for row in rows), 9), Bigram(rows, 9)
    tokens = Counter(int(token) for row in rows for token in row[1:])
    expected = [(tokens[token] + 1) / (tokens.total() + 9) for token in range(9)]
    assert np.allclose(np.exp(-unigram.nats(np.arange(9))), expected)
    for previous in range(9):
        probabilities = [math.exp(-bigram.nats(np.array([previous, token]))[0]) for token in range(9)]
        assert sum(probabilities) == pytest.approx(1)
    counts = Counter((a, b) for row in rows for a, b in pairwise(row))
    first = rows[0][1]
    count = sum(number for (a, _), number in counts.items() if a == 6)
    followers = sum(a == 6 for a, _ in counts)
    p = math.exp(-unigram.nats(np.array([first]))[0])
    assert math.exp(-bigram.nats(rows[0])[0]) == pytest.approx((counts[6, first] + followers * p) / (count + followers))


# --- probe ---


def test_a_probe_reads_what_is_linear_and_no_more():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 6)) * [1, 1, 1, 1, 1, 100.0] + 5
    linear = ["ab"[int(row[0] > row[1])] for row in x]
    exclusive_or = ["ab"[int(row[0] > 5) ^ int(row[1] > 5)] for row in x]
    assert linear_probe(x[:200], linear[:200], x[200:], linear[200:]) > 0.93
    assert linear_probe(x[:200], exclusive_or[:200], x[200:], exclusive_or[200:]) < 0.65


@pytest.fixture(scope="module")
def noisy():
    """Ten classes, as many dimensions as training rows: too small a λ gives 0.18 where 0.95 is possible."""
    rng = np.random.default_rng(5)
    classes = np.arange(700) % 10
    return rng.normal(size=(700, 199)) + 0.3 * np.eye(10)[classes] @ rng.normal(size=(10, 199)), classes.astype(str)


@pytest.mark.parametrize("order", ["alternating", "sorted"])
def test_a_probe_chooses_its_strength_whatever_the_order_of_the_rows(order, noisy):
    x, labels = noisy
    # a held-out part by position, every fifth row or the first rows, would have classes that the others lack
    rows = np.arange(200) if order == "alternating" else np.argsort(labels[:200], kind="stable")
    assert linear_probe(x[rows], labels[rows], x[200:], labels[200:]) > 0.85


def test_a_probe_chooses_its_strength_without_the_test_rows(noisy):
    """So the accuracy on many rows is the mean of the accuracies on the single rows."""
    x, labels = noisy
    single = [linear_probe(x[:200], labels[:200], x[i : i + 1], labels[i : i + 1]) for i in range(200, 240)]
    assert linear_probe(x[:200], labels[:200], x[200:240], labels[200:240]) == pytest.approx(np.mean(single))


def test_both_forms_of_ridge_regression_are_equal():
    rng = np.random.default_rng(0)
    for shape in ((20, 50), (50, 20)):
        x, y = rng.normal(size=shape), rng.normal(size=(shape[0], 3))
        expected = np.linalg.solve(x.T @ x + 0.1 * shape[0] * np.eye(shape[1]), x.T @ y)
        np.testing.assert_allclose(ridge_regression(x, y)(0.1), expected, atol=1e-9)
