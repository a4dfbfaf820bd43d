"""Metrics against their formulas and against other people's code; and the command on models of every objective."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command import run
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

import manyheads
from manyheads.evaluation import How, evaluate
from manyheads.metrics import classes, ranking, summary
from manyheads.metrics.baselines import BM25, Bigram, Majority, NaiveBayes, Unigram, lead, words
from manyheads.metrics.language import Foreseen
from manyheads.metrics.translation import Translation, exact
from manyheads.parts.batch import Inputs
from manyheads.spec import SLOTS, parse, read_toml
from manyheads.train.look import evaluate as looked
from manyheads.train.loop import train
from manyheads.train.run import made_ready, read_run

TEXT = st.lists(st.sampled_from(["the", "cat", "sat", "on", "a", "mat", "Mat,", "mat.", "7", "ü"]), max_size=12).map(" ".join)

# --- written texts ---


def test_rouge_is_what_a_hand_counts():
    written, wanted = "The cat sat, on the mat", "the cat was on a Mat."
    assert summary.tokens(written) == ["the", "cat", "sat", "on", "the", "mat"]
    found = summary.scores([written], [wanted])
    assert found["rouge1"] == pytest.approx(2 * 4 / (6 + 6))  # the, cat, on, mat
    assert found["rouge2"] == pytest.approx(2 * 1 / (5 + 5))  # the cat
    assert found["rougeL"] == pytest.approx(2 * 4 / (6 + 6))
    assert summary.rouge_l(["a", "b", "c", "d"], ["d", "c", "b", "a"]) == pytest.approx(2 * 1 / 8)
    assert summary.rouge_l(["b", "d"], ["a", "b", "c", "d"]) == pytest.approx(2 * (2 / 2) * (2 / 4) / (2 / 2 + 2 / 4))
    assert summary.rouge_n(["a", "a", "a"], ["a", "b"], 1) == pytest.approx(2 * 1 / 5)  # counted as often as the other has it
    assert summary.scores(["", "x"], ["x", ""]) == {"rouge1": 0, "rouge2": 0, "rougeL": 0}
    assert summary.tokens("für x_y") == ["f", "r", "x", "y"]  # as the package has it: only a to z, 0 to 9


@given(TEXT, TEXT)
def test_rouge_is_even_and_one_for_the_same_text(one, other):
    there, back = summary.scores([one], [other]), summary.scores([other], [one])
    assert there == pytest.approx(back)
    assert all(0 <= value <= 1 for value in there.values())
    if len(summary.tokens(one)) > 1:
        assert summary.scores([one], [one]) == {"rouge1": 1, "rouge2": 1, "rougeL": 1}


def test_bleu_and_chrf_are_those_of_sacrebleu():
    import sacrebleu

    written = ["Ein Mann schläft im grünen Zimmer.", "eine Gruppe lädt Baumwolle auf einen Lastwagen", "Der Hund rennt."]
    wanted = ["Ein Mann schläft in einem grünen Raum.", "Eine Gruppe lädt Baumwolle auf einen Lastwagen", "Der Hund rennt ."]
    translation = Translation()
    found = translation.scores(written, wanted)
    assert found["bleu"] == sacrebleu.corpus_bleu(written, [wanted]).score
    assert found["chrf"] == sacrebleu.corpus_chrf(written, [wanted]).score
    signatures = translation.signatures()
    assert {"case:mixed", "tok:13a"} <= set(signatures["bleu"].split("|"))
    assert "nc:6" in signatures["chrf"].split("|")
    assert exact([" a  b", "a", "A"], ["a b", "a b", "a"]) == pytest.approx(1 / 3)


def test_without_sacrebleu_one_sentence_says_what_to_install():
    code = (
        "import sys\nsys.modules['sacrebleu'] = None\nfrom manyheads.metrics.translation import Translation\n"
        "try: Translation()\nexcept ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'manyheads[eval]'" in done.stdout


def test_the_metrics_know_no_torch():
    code = (
        "import sys\nfrom manyheads.metrics import baselines, classes, language, ranking, summary, translation\n"
        "assert not {'torch', 'sacrebleu', 'sklearn', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_lead_is_the_first_words():
    assert lead("one  two\nthree four", 3) == "one two three"
    assert lead("one", 12) == "one"


# --- classes ---

DRAWN = st.integers(2, 6).flatmap(
    lambda count: st.tuples(st.just(count), st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, 2**20)), min_size=1, max_size=40))
)


@given(DRAWN)
def test_accuracy_and_macro_f1_are_those_of_sklearn(drawn):
    from sklearn.metrics import accuracy_score, f1_score

    count, rows = drawn
    wanted = [label for label, _ in rows]
    shares = np.stack([np.random.default_rng(seed).dirichlet(np.ones(count)) for _, seed in rows])
    found = classes.scores(wanted, shares)
    assert found["accuracy"] == pytest.approx(accuracy_score(wanted, shares.argmax(1)))
    assert found["macro_f1"] == pytest.approx(f1_score(wanted, shares.argmax(1), average="macro"))


def test_calibration_is_the_gap_between_being_sure_and_being_right():
    sure = np.array([[0.9, 0.1], [0.9, 0.1], [0.55, 0.45], [0.2, 0.8]])
    # (13/15, 14/15] holds the first two, half of them right; (8/15, 9/15] a right one; (11/15, 12/15] a wrong one
    assert classes.calibration_error(np.array([0, 1, 0, 0]), sure) == pytest.approx((2 * 0.4 + 0.45 + 0.8) / 4)
    assert classes.calibration_error(np.array([0, 1]), np.array([[1.0, 0.0], [0.0, 1.0]])) == 0
    edge = np.array([[0.6, 0.4], [0.6 + 1e-9, 0.4 - 1e-9]])  # 9/15 closes its bin: one right and one wrong do not cancel out
    assert classes.calibration_error(np.array([0, 1]), edge) == pytest.approx((0.4 + 0.6) / 2)


@pytest.mark.parametrize("binary", [False, True])
def test_naive_bayes_is_that_of_sklearn(binary):
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB

    chance = np.random.default_rng(0)
    vocabulary = np.array(["good", "bad", "film", "plot", "Schön", "über", "ok", "the", "the-end", "7", "x_y"])
    texts = [" ".join(chance.choice(vocabulary, chance.integers(0, 12))) for _ in range(60)]
    labels = chance.integers(0, 3, 60)
    unseen = [*texts[:20], "good words never seen", ""]
    counted = CountVectorizer(analyzer=words, binary=binary)
    theirs = MultinomialNB().fit(counted.fit_transform(texts[20:]), labels[20:]).predict_proba(counted.transform(unseen))
    assert np.allclose(NaiveBayes(texts[20:], labels[20:], 3, binary=binary).probabilities(unseen), theirs)
    shares = Majority(labels, 3).probabilities(unseen)
    assert np.allclose(shares, [[(labels == i).mean() for i in range(3)]] * len(unseen))


def test_a_class_that_was_never_learned_is_never_chosen():
    shares = NaiveBayes(["a", "b"], [0, 2], 3).probabilities(["a", "b", "c"])
    assert shares[:, 1].tolist() == [0, 0, 0]
    assert np.allclose(shares.sum(1), 1)


# --- ranking ---


def test_ranks_share_their_place_where_nothing_tells_them_apart():
    assert ranking.ranks([[3, 1, 2], [1, 1, 1], [0, 5, 0]], [2, 0, 0]).tolist() == [2, 2, 2.5]
    nothing = math.nan
    assert ranking.ranks([[nothing] * 3, [nothing, 1, 2], [-math.inf, 1, nothing], [5, 1, nothing]], [0, 0, 1, 0]).tolist() == [2, 3, 1, 1]
    found = ranking.scores(np.array([1.0, 2.0, 20.0]))
    assert found == pytest.approx({"mrr": (1 + 1 / 2 + 1 / 20) / 3, "mrr@10": (1 + 1 / 2) / 3, "recall@1": 1 / 3, "recall@10": 2 / 3})


@pytest.mark.parametrize("count", [1, 7, 30])
def test_chance_is_the_mean_over_all_places(count):
    assert ranking.chance(count) == pytest.approx(ranking.scores(np.arange(1.0, count + 1)))


@given(st.lists(TEXT, min_size=1, max_size=8), TEXT)
def test_bm25_is_its_formula(documents, query):
    k1, b = 1.2, 0.75
    found = [words(text) for text in documents]
    mean = sum(map(len, found)) / len(found)
    wanted = []
    for document in found:
        score = 0.0
        for word in words(query):
            within = sum(word in other for other in found)
            idf = math.log(1 + (len(found) - within + 0.5) / (within + 0.5))
            often = document.count(word)
            score += idf * often * (k1 + 1) / (often + k1 * (1 - b + b * len(document) / mean)) if often else 0
        wanted.append(score)
    assert np.allclose(BM25(documents).scores(query), wanted)


# --- language ---


def test_a_byte_drawn_by_chance_takes_eight_bits():
    text = "schön"
    count = len(text.encode())
    found = Foreseen(count * math.log(256), count, len(text), count).scores()
    assert found == pytest.approx(
        {"loss": math.log(256), "perplexity": 256, "bits_per_byte": 8, "nats_per_character": 6 * math.log(256) / 5}
    )


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=6))
def test_bigrams_and_unigrams_are_distributions_that_follow_the_counts(texts):
    rows = [np.array([6, *text, 7]) for text in texts]  # 6 begins, 7 ends; 8 never occurs
    unigram, bigram = Unigram((row[1:] for row in rows), 9), Bigram(rows, 9)
    assert np.exp(-unigram.nats(np.arange(9))).sum() == pytest.approx(1)
    for before in range(9):
        shares = [math.exp(-bigram.nats(np.array([before, token]))[0]) for token in range(9)]
        assert sum(shares) == pytest.approx(1)
    counts = Counter((a, b) for row in rows for a, b in pairwise(row))
    first = rows[0][1]
    after = sum(count for (a, _), count in counts.items() if a == 6)
    kinds = sum(a == 6 for a, _ in counts)
    alone = math.exp(-unigram.nats(np.array([first]))[0])
    assert math.exp(-bigram.nats(rows[0])[0]) == pytest.approx((counts[6, first] + kinds * alone) / (after + kinds))


# --- queries and the documents they find ---


def queries(**fields):
    return parse(SLOTS["data"].kinds["queries"], fields)


def written_to(folder, **files):
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(folder / f"{name}.jsonl") for name in files}


def test_queries_find_documents_in_a_file_of_their_own(tmp_path):
    asked = [{"query": f"q{i}", "doc_id": i} for i in range(10)]
    paths = written_to(tmp_path, asked=asked, docs=[{"id": i, "text": f"text {i}"} for i in range(30)])
    spec = queries(path=paths["asked"], fields=["query", "doc_id"], documents=paths["docs"])
    corpus = spec.load()
    assert {(query[1:], text.removeprefix("text ")) for query, text in (*corpus.train, *corpus.validation)} == {
        (str(i),) * 2 for i in range(10)
    }
    assert corpus.documents() == tuple(f"text {i}" for i in range(30))
    there = spec.other(paths["asked"])
    assert (len(there.train), len(there.validation), len(there.pool)) == (0, 10, 30)


@pytest.mark.parametrize(
    ("docs", "said"),
    [
        ([{"id": "a", "text": "x"}], "asks for the document 'b'.*none of that id"),
        ([{"id": "a", "text": "x"}, {"id": "a", "text": "y"}], "two documents with the id 'a'"),
        ([{"id": "a", "body": "x"}], "no field 'text'"),
        ([], "holds no documents"),
    ],
)
def test_documents_that_are_not_there_are_named(tmp_path, docs, said):
    paths = written_to(tmp_path, asked=[{"query": "q", "document": "a"}, {"query": "r", "document": "b"}], docs=docs)
    with pytest.raises(ValueError, match=said) as raised:
        queries(path=paths["asked"], documents=paths["docs"]).load()
    assert raised.value.exit_code == 3


def test_texts_of_which_rouge_counts_nothing_are_told_apart():
    """Such a text with itself is 0, which is no judgement."""
    texts = ["привет мир", "", " ", "мир 2", "hello", "漢字"]
    assert summary.uncounted(texts) == 2
    assert all(bool(summary.scores([text], [text])["rouge1"]) is not bool(summary.uncounted([text])) for text in texts if text.strip())


# --- models of every objective ---

TOWER = {"layers": 1, "width": 16, "attention": {"kind": "heads", "heads": 2}, "feedforward": {"kind": "mlp", "hidden": 32}, "position": "sinusoidal"}  # fmt: skip
PEOPLE = {"kind": "biographies", "people": 60}
PAIR = {"vocab": "tokenizer", "encoder": TOWER, "decoder": {"like": "encoder", "embed": "shared", "cross": True}}
ENCODER = {"vocab": "tokenizer", "encoder": TOWER}
PATCHES = TOWER | {"embed": {"kind": "patches", "pixels": 4, "channels": 1}}
PICTURES = {
    "encoder": PATCHES,
    "decoder": TOWER | {"embed": "restored", "mask": {"causal": False}},
    "head": {"kind": "pixels", "pixels": 4},
}
COLOURS = [(f"the {colour} {thing} number {i}", colour) for i in range(6) for colour in ("red", "green") for thing in ("car", "hat", "cup")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder a run, each trained for a few steps."""
    folder = tmp_path_factory.mktemp("runs")
    labels = folder / "labels.tsv"
    labels.write_text("".join(f"{text}\t{label}\n" for text, label in COLOURS))
    found = folder / "queries.tsv"
    found.write_text("".join(f"{text}\tthis is about {text}\n" for text, _ in COLOURS))
    trees = {
        "causal": (PEOPLE, {"vocab": "tokenizer", "decoder": TOWER}),
        "masked": (PEOPLE, ENCODER | {"head": "masked"}),
        "spans": (PEOPLE, PAIR),
        "patches": ({"kind": "digits"}, PICTURES),
        "seq2seq": ({"kind": "sequence", "task": "reverse", "count": 300, "held_out": 30}, PAIR),
        "classify": ({"kind": "labels", "path": str(labels), "held_out": 0.2}, ENCODER | {"head": {"kind": "classes", "classes": 2}}),
        "contrastive": ({"kind": "queries", "path": str(found), "held_out": 0.2}, ENCODER | {"head": {"kind": "vector", "pool": "mean"}}),
    }
    for kind, (data, model) in trees.items():
        how = {"steps": 60 if kind in ("classify", "seq2seq") else 8, "tokens": 800, "evaluate_every": 100, "evaluate_rows": 1}
        optim = {"rate": 1e-2, "schedule": {"kind": "linear", "warmup": 5}}
        ready = made_ready(read_run({"model": model, "data": data, "objective": {"kind": kind}, "optim": optim, "train": how}))
        list(train(ready, folder / kind))
    return folder


def test_rouge_of_another_script_comes_with_a_word(runs, tmp_path):
    for text, said in (("привет мир", "2 of 2 wanted texts hold nothing that ROUGE counts"), ("hello мир", None)):
        path = tmp_path / "pairs.tsv"
        path.write_text(f"a b c\t{text} как дела\nb a c\t{text} тоже\n")
        report, _ = evaluate(runs / "seq2seq", data=str(path), how=How(beams=1, max_new=4))
        assert [note for note in report["notes"] if "ROUGE" in note] == ([f"{said}, a–z and 0–9: it is 0 for them"] if said else [])


KEYS = {
    "causal": ({"loss", "perplexity", "bits_per_byte", "nats_per_character"}, {"model", "unigram", "bigram"}),
    "masked": ({"loss", "accuracy"}, {"model", "unigram"}),
    "spans": ({"loss", "accuracy"}, {"model"}),
    "patches": ({"loss", "probe"}, {"model", "untrained", "pixels"}),
    "seq2seq": ({"exact", "bleu", "chrf", "rouge1", "rouge2", "rougeL"}, {"model", "copy"}),
    "classify": ({"accuracy", "macro_f1", "calibration_error"}, {"model", "majority", "naive Bayes"}),
    "contrastive": ({"mrr", "mrr@10", "recall@1", "recall@10"}, {"model", "BM25", "chance"}),
}
ALWAYS = {"schema", "path", "task", "data", "split", "rows", "better", "matter", "scores", "signatures", "notes", "examples", "seconds"}


@pytest.mark.parametrize("kind", KEYS)
def test_every_objective_is_scored_beside_its_baselines(kind, runs):
    done = run("evaluate", runs / kind, "--json", "--beams", 2)
    report, (metrics, names) = json.loads(done.stdout), KEYS[kind]
    assert report.keys() >= ALWAYS
    assert (report["schema"], report["task"], report["split"]) == (1, kind, "validation")
    assert report["scores"].keys() == names
    assert all(scores.keys() == ({"probe"} if name == "untrained" else metrics) for name, scores in report["scores"].items())
    assert report["better"].keys() == metrics >= set(report["matter"])
    assert all(math.isfinite(value) for scores in report["scores"].values() for value in scores.values())
    assert report["rows"] == {"seq2seq": 30, "classify": 7, "contrastive": 7, "patches": 180}.get(kind, 60)
    assert report["signatures"].keys() == ({"bleu", "chrf"} if kind == "seq2seq" else set())


def test_the_table_names_the_model_its_baselines_and_what_is_better(runs):
    done = run("evaluate", runs / "seq2seq", "--examples", 2, "--rows", 5, "--beams", 1)
    first, *lines = done.stdout.splitlines()
    assert first.startswith("seq2seq · validation · 5 rows")
    assert any(re.match(r"metric +model +copy", line) for line in lines)
    assert any(re.match(r"bleu +↑ +[\d.]+ +[\d.]+$", line) for line in lines)
    assert any("tok:13a" in line for line in lines)
    assert sum(line.strip().startswith("wanted ") for line in lines) == 2


def test_loss_is_that_of_training(runs):
    for kind, rows in (("causal", 60), ("masked", 64)):
        known = read_run(read_toml(runs / kind / "run.toml"))
        ready = made_ready(known.changed(train=known.train.changed(evaluate_rows=rows)))
        model = manyheads.load(runs / kind).model
        ours = evaluate(runs / kind)[0]["scores"]["model"]["loss"]
        # masks are drawn by chance, so that losses are alike; of all tokens they are the same
        assert ours == pytest.approx(looked(model, ready)["loss"], rel=1e-5 if kind == "causal" else 0.1)


def test_texts_are_read_as_they_were_in_training_however_long_they_are(tmp_path):
    """A model that never saw place 9 says anything there; sinusoids have no end that would stop it."""
    end = {"a": "red", "b": "blue"}
    rows = [
        f"{' '.join(first for _ in range(8))} {' '.join('ab'[(i + j) % 2] for j in range(40))}\t{end[first]}\n"
        for i in range(40)
        for first in "ab"
    ]
    (tmp_path / "long.tsv").write_text("".join(rows))
    labels = {"kind": "labels", "path": str(tmp_path / "long.tsv"), "held_out": 0.25}
    how = {"steps": 60, "tokens": 800, "evaluate_every": 60, "longest": 8}
    model = ENCODER | {"head": {"kind": "classes", "classes": 2, "pool": "mean"}}
    optim = {"rate": 1e-2, "schedule": {"kind": "linear", "warmup": 5}}
    ready = made_ready(read_run({"model": model, "data": labels, "objective": "classify", "optim": optim, "train": how}))
    list(train(ready, tmp_path / "labels"))
    assert looked(manyheads.load(tmp_path / "labels").model, ready)["accuracy"] == 1
    report = evaluate(tmp_path / "labels")[0]
    assert report["scores"]["model"]["accuracy"] == 1
    assert report["notes"] == ["20 of 20 texts were cut to 8 tokens"]
    found = run("predict", tmp_path / "labels", rows[0].split("\t")[0])
    assert found.stderr == "of this text the first 8 tokens were read, as many as in training\n"
    assert found.stdout.split()[1] == "red"
    several = run("predict", tmp_path / "labels", "--file", tmp_path / "long.tsv")
    assert "of 80 texts only the beginning was read" in several.stderr
    again = made_ready(
        read_run({"start": str(tmp_path / "labels"), "data": labels, "objective": "classify", "train": how | {"longest": 30}})
    )
    assert max(len(again.rows[i][0]) for i in range(60)) > 8

    few = {"model": model | {"encoder": model["encoder"] | {"position": {"kind": "learned", "length": 8}}}, "data": labels}
    list(train(made_ready(read_run(few | {"objective": "classify", "train": {"steps": 1, "tokens": 800}})), tmp_path / "few"))
    found = run("predict", tmp_path / "few", rows[0].split("\t")[0])  # the model has places for no more
    assert found.stderr == "of this text the first 8 tokens were read, as many as in training\n"

    packed = {"kind": "text", "path": str(tmp_path / "long.tsv"), "held_out": 0.25, "document": "file"}
    how = {"steps": 30, "tokens": 800, "evaluate_every": 30, "pack": 16}
    ready = made_ready(
        read_run({"model": {"vocab": "tokenizer", "decoder": TOWER}, "data": packed, "objective": "causal", "optim": optim, "train": how})
    )
    list(train(ready, tmp_path / "packed"))
    report = evaluate(tmp_path / "packed")[0]
    assert report["notes"] == ["texts were read in windows of 16 tokens"]
    assert report["scores"]["model"] == evaluate(tmp_path / "packed", how=How(longest=16))[0]["scores"]["model"]
    assert report["scores"]["model"] != evaluate(tmp_path / "packed", how=How(longest=400))[0]["scores"]["model"]


def test_windows_ask_every_token_once(runs):
    whole, cut = (evaluate(runs / "causal", how=How(longest=longest))[0] for longest in (None, 7))
    assert whole["tokens"] == cut["tokens"]
    assert whole["scores"]["model"] != cut["scores"]["model"]


def test_scores_do_not_depend_on_how_many_are_read_at_once(runs, monkeypatch):
    from manyheads.evaluation import subject

    for kind in ("causal", "classify", "contrastive"):
        usual = evaluate(runs / kind)[0]["scores"]["model"]
        monkeypatch.setattr(subject, "PLACES", 64)
        assert evaluate(runs / kind)[0]["scores"]["model"] == pytest.approx(usual, rel=1e-5)
        monkeypatch.undo()


def test_answers_are_kept_one_a_line(runs, tmp_path):
    run("evaluate", runs / "seq2seq", "--rows", 6, "--beams", 1, "--output", tmp_path / "kept.txt")
    kept = (tmp_path / "kept.txt").read_text().split("\n")
    assert len(kept) == 7
    report, written = evaluate(runs / "seq2seq", how=How(rows=6, beams=1, examples=6))
    assert kept[:-1] == list(written) == [example["written"] for example in report["examples"]]
    again = run("evaluate", runs / "seq2seq", "--output", tmp_path / "kept.txt", check=2)
    assert "is there already" in again.stderr


def test_baselines_learn_what_the_run_learned_and_are_asked_what_it_is_asked(runs):
    corpus = read_run(read_toml(runs / "classify" / "run.toml")).data.load()
    labels = corpus.labels()
    (learned, known), (texts, wanted) = (
        ([text for text, _ in rows], [labels.index(label) for _, label in rows]) for rows in (corpus.train, corpus.validation)
    )
    found = evaluate(runs / "classify")[0]["scores"]
    assert found["naive Bayes"] == classes.scores(wanted, NaiveBayes(learned, known, 2).probabilities(texts))
    assert found["majority"] == classes.scores(wanted, Majority(known, 2).probabilities(texts))


def test_the_unigram_beside_hidden_words_counts_words_alone(runs, monkeypatch):
    from manyheads.evaluation import language

    corpus, tokenizer = read_run(read_toml(runs / "masked" / "run.toml")).data.load(), manyheads.load(runs / "masked").tokenizer
    counted = []

    def counting(texts, size):
        counted.extend(texts)
        return Unigram(counted, size)

    monkeypatch.setattr(language, "Unigram", counting)
    evaluate(runs / "masked")
    assert [ids.tolist() for ids in counted] == [tokenizer.encode(text, add_special_tokens=False).ids for (text,) in corpus.train]


def test_a_checkpoint_without_its_run_is_asked_what_it_was_trained_for(runs, tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat\n" * 30)
    for kind in ("causal", "masked"):
        latest = runs / kind / "checkpoints" / (runs / kind / "checkpoints" / "latest").read_text()
        assert evaluate(latest, data=str(tmp_path / "a.txt"))[0]["task"] == kind


def test_rows_that_chose_the_checkpoint_are_said_to_have(runs, tmp_path):
    tree = read_toml(runs / "causal" / "run.toml")
    tree["train"] |= {"steps": 2, "evaluate_every": 1, "goal": {"metric": "loss"}}
    list(train(made_ready(read_run(tree)), tmp_path / "run"))
    said = "some of these rows chose the checkpoint, the best by loss, and flatter it: --data FILE asks others"
    assert said in evaluate(tmp_path / "run")[0]["notes"]
    assert said not in evaluate(tmp_path / "run", split="train")[0]["notes"]
    assert said not in evaluate(runs / "causal")[0]["notes"]
    tested = read_toml(runs / "seq2seq" / "run.toml")
    tested["train"] |= tree["train"]
    list(train(made_ready(read_run(tested)), tmp_path / "tested"))
    assert said.replace("--data FILE asks others", "--split test has others") in evaluate(tmp_path / "tested")[0]["notes"]


def test_each_row_gets_its_own_answer(runs):
    """What is read side by side, in another order, is what is answered one by one."""
    loaded = manyheads.load(runs / "classify")
    _, chosen = evaluate(runs / "classify", split="train")
    texts = [text for text, _ in read_run(read_toml(runs / "classify" / "run.toml")).data.load().train]
    assert list(chosen) == [manyheads.predict(loaded, text)["classes"][0]["class"] for text in texts]
    assert len(set(chosen)) == 2
    loaded = manyheads.load(runs / "seq2seq")
    report, written = evaluate(runs / "seq2seq", how=How(rows=8, beams=2, penalty=0.6, max_new=5, examples=8))
    assert list(written) == [loaded.generate(row["source"], beams=2, penalty=0.6, max_new=5) for row in report["examples"]]
    assert len(set(written)) > 1


def test_another_file_of_the_same_form(runs, tmp_path):
    other = tmp_path / "other.tsv"
    other.write_text("".join(f"{text}, it is\t{label}\n" for text, label in COLOURS[:10]))
    report, _ = evaluate(runs / "classify", data=str(other))
    assert (report["rows"], report["split"]) == (10, "file")
    assert report["scores"]["naive Bayes"]["accuracy"] == 1  # it learned from what the run learned from
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a b\tb a\nc d e\te d c\n")
    assert evaluate(runs / "seq2seq", data=str(pairs), how=How(beams=1))[0]["rows"] == 2  # though the run made its own


def test_any_checkpoint_can_be_asked(runs, tmp_path):
    """An encoder finds documents by the mean of its vectors; there is nothing that baselines could learn from, but words to count."""
    told = [parse(SLOTS["data"].kinds["biographies"], {"people": 60}).telling(4 * i)[0] for i in range(30)]
    asked = [{"query": text, "doc_id": i} for i, text in enumerate(told[:8])]
    paths = written_to(tmp_path, asked=asked, docs=[{"id": i, "text": text} for i, text in enumerate(told)])
    given = ["-s", f'data.documents="{paths["docs"]}"', "-s", 'data.fields=["query", "doc_id"]']
    done = run("evaluate", runs / "masked", "--task", "contrastive", "--data", paths["asked"], *given, "--json")
    report = json.loads(done.stdout)
    assert (report["rows"], report["documents"]) == (8, 30)
    assert report["scores"]["model"]["mrr"] == 1  # a document that is the query itself has its vector
    assert report["scores"]["BM25"]["recall@10"] == 1
    text = tmp_path / "book.txt"
    text.write_text("Somebody was born in the year 1850.\n\nSomebody was a smith.\n")
    folder = next((runs / "causal" / "checkpoints").glob("step-*"))  # no run, only a model
    report = json.loads(run("evaluate", folder, "--data", text, "--json").stdout)
    assert (report["task"], report["rows"], list(report["scores"])) == ("causal", 2, ["model"])
    assert any("nothing for baselines to learn from" in note for note in report["notes"])
    learned = tmp_path / "learned.txt"
    learned.write_text("Somebody was born in the year 1851.\n")
    report = json.loads(run("evaluate", folder, "--data", text, "-s", f"data.path={learned}", "--json").stdout)
    assert (report["rows"], set(report["scores"]) > {"model"}) == (2, True)
    assert not any("nothing for baselines" in note for note in report["notes"])


def test_answers_may_be_twice_as_long_as_any_learned_wherever_in_the_file_that_stands(runs):
    from manyheads.evaluation.answers import most_new

    loaded = manyheads.load(runs / "seq2seq")
    learned = [("x", "1")] * 2500 + [("x", "1 2 3 4 5 6 7")] * 500
    assert most_new(SimpleNamespace(loaded=loaded, learned=learned)) == 8 + 2 * len(loaded.tokenizer.encode("1 2 3 4 5 6 7").ids)


@pytest.mark.parametrize(
    ("kind", "task"), [("masked", "causal"), ("causal", "masked"), ("contrastive", "causal"), ("classify", "masked"), ("causal", "seq2seq")]
)
def test_a_model_is_not_asked_what_it_is_not_for(runs, tmp_path, kind, task):
    (tmp_path / "a.txt").write_text("one two\tthree\n" * 9)
    done = run("evaluate", runs / kind, "--task", task, "--data", tmp_path / "a.txt", check=2)
    assert re.fullmatch(rf"manyheads: this model \(.*\) cannot be asked for {task}: it is for {kind}\n", done.stderr)


def test_a_file_that_cannot_be_kept_costs_no_report(runs, tmp_path):
    for kind, name in (("causal", "a.txt"), ("seq2seq", "a.png")):
        done = run("evaluate", runs / kind, "--rows", "4", "--beams", "1", "--output", tmp_path / name, "--json", check=2)
        assert json.loads(done.stdout)["scores"]["model"]
        assert "could keep" in done.stderr
    assert not list(tmp_path.iterdir())


def test_rows_that_were_learned_from_are_said_to_be(runs):
    given = read_toml(runs / "classify" / "run.toml")["data"]["path"]
    assert evaluate(runs / "classify", data=given)[0]["notes"][0] == f"{given} is what the run learned from"
    assert "by -s" in evaluate(runs / "classify", overrides=["data.held_out=0.4"])[0]["notes"][0]


def test_pictures_have_classes_too(tmp_path):
    model = {"encoder": PATCHES, "head": {"kind": "classes", "classes": 10}}
    how = {"steps": 2, "tokens": 800, "evaluate_every": 100, "evaluate_rows": 1}
    list(train(made_ready(read_run({"model": model, "data": "digits", "objective": "classify", "train": how})), tmp_path / "run"))
    report, chosen = evaluate(tmp_path / "run", how=How(rows=20, examples=3))
    assert report["scores"].keys() == {"model", "majority"}  # a picture has no words
    assert len(chosen) == report["rows"] == 20
    assert report["scores"]["model"].keys() == KEYS["classify"][0]


def test_a_collapsed_model_is_not_first(runs):
    """Where every vector is the same, every document is in the middle."""
    loaded = manyheads.load(runs / "contrastive", copy=True)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            parameter.fill_(1.0 if name.endswith("bias") else 0.0)
    vectors = loaded.embed(["one", "another text"])
    assert torch.equal(vectors[0], vectors[1])
    assert ranking.ranks((vectors @ vectors.T).numpy(), [0, 1]).tolist() == [1.5, 1.5]


FAULTS = {
    "an empty split": (["causal", "--split", "test"], 3, "the test split is empty: name another, or a file with --data"),
    "no such split": (["causal", "--split", "dev"], 2, "split is 'dev', expected validation, test, train"),
    "no such task": (["causal", "--task", "summarise"], 2, "task is 'summarise', expected causal"),
    "a task without a file": (["masked", "--task", "contrastive"], 2, "name a file to evaluate with, --data FILE"),
    "a file that is not there": (["classify", "--data", "nowhere.tsv"], 3, "cannot read nowhere.tsv"),
    "no rows": (["causal", "--rows", "0"], 2, "rows is 0, expected a whole number from 1"),
    "no beams": (["seq2seq", "--beams", "0"], 2, "beams is 0"),
    "an output nowhere": (["seq2seq", "--output", "nowhere/x.txt"], 2, "there is no folder"),
    "a class that is none": (["classify", "--data", "{folder}/blue.tsv"], 3, "the label 'blue' is none of the model's 2 classes"),
    "a blank file": (["classify", "--data", "{folder}/blank.tsv"], 3, "holds no texts with a label"),
    "no classifier": (["causal", "--task", "classify", "--data", "{folder}/blue.tsv"], 2, "chooses between no classes"),
    "a misspelt field": (["classify", "-s", "data.held=1"], 2, "no field 'held' here"),
    "no folder": (["nothing-here"], 4, "there is no folder"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_evaluated_is_said_in_one_sentence(name, runs, tmp_path):
    (tmp_path / "blue.tsv").write_text("a hat\tblue\n")
    (tmp_path / "blank.tsv").write_text("\n \n")
    (kind, *rest), code, said = FAULTS[name]
    done = run("evaluate", runs / kind, *(one.format(folder=tmp_path) for one in rest), check=code)
    assert re.search(said, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_a_probe_reads_what_a_line_can_and_no_more():
    from manyheads.metrics.probe import fitted, probe

    chance = np.random.default_rng(0)
    x = chance.normal(size=(300, 6)) * [1, 1, 1, 1, 1, 100.0] + 5
    line = ["ab"[int(one[0] > one[1])] for one in x]
    wrapped = ["ab"[int(one[0] > 5) ^ int(one[1] > 5)] for one in x]  # no line tells these
    assert probe(x[:200], line[:200], x[200:], line[200:]) > 0.93
    assert probe(x[:200], wrapped[:200], x[200:], wrapped[200:]) < 0.65
    chance = np.random.default_rng(5)  # with as many numbers as rows a λ too small reads nothing: 0.25 where 0.67 can be had
    classes = np.arange(700) % 5
    noisy = chance.normal(size=(700, 199)) + 0.15 * np.eye(5)[classes] @ chance.normal(size=(5, 199))
    for order in (np.arange(200), np.argsort(classes[:200], kind="stable")):  # classes that take turns, and those of a sorted file
        assert probe(noisy[order], classes[order].astype(str), noisy[200:], classes[200:].astype(str)) > 0.6
    wide, y = chance.normal(size=(20, 50)), chance.normal(size=(20, 3))
    whole = np.linalg.solve(wide.T @ wide + 0.1 * 20 * np.eye(50), wide.T @ y)
    np.testing.assert_allclose(fitted(wide, y)(0.1), whole, atol=1e-9)


def evaluate_untrained(folder):
    """The probe of the states of the run's first weights, by hand."""
    from manyheads.metrics.probe import probe

    ready = made_ready(read_run(read_toml(folder / "run.toml")))
    model = manyheads.build(ready.spec, seed=ready.run.seed).eval()

    def states(rows):
        patches = torch.tensor(np.stack([picture.reshape(4, 2, 4, 2).swapaxes(1, 2).reshape(16, 4) for picture, _ in rows]))
        with torch.no_grad():
            return model.encode(Inputs(patches)).states.mean(dim=1).numpy()

    parts = [report_rows("train"), report_rows("test")]
    (learned, labels), (unseen, wanted) = ((states(rows), [label for _, label in rows]) for rows in parts)
    return probe(learned, labels, unseen, wanted)


def test_pictures_are_scored_beside_their_mean_and_their_pixels(tmp_path):
    model = {
        "encoder": TOWER | {"embed": {"kind": "patches", "pixels": 4, "channels": 1}, "position": {"kind": "learned", "length": 16}},
        "decoder": {"like": "encoder", "embed": "restored", "mask": {"causal": False}}, "head": {"kind": "pixels", "pixels": 4},
    }  # fmt: skip
    how = {"optim": {"rate": 0.1}, "train": {"steps": 2, "evaluate_every": 2, "evaluate_rows": 20}}
    tree = {"model": model, "data": "digits", "objective": "patches"} | how
    list(train(made_ready(read_run(tree)), tmp_path / "run"))
    report, _ = evaluate(tmp_path / "run", split="test")
    assert report["better"] == {"loss": "lower", "probe": "higher"}
    mean = np.mean([picture for picture, _ in report_rows("train")], axis=0)
    assert report["scores"]["pixels"]["loss"] == pytest.approx(
        np.mean([(picture - mean) ** 2 for picture, _ in report_rows("test")]), rel=1e-5
    )
    assert 0.85 < report["scores"]["pixels"]["probe"] < 1
    untrained = evaluate_untrained(tmp_path / "run")
    assert report["scores"]["untrained"] == {"probe": untrained}
    assert report["scores"]["model"]["probe"] != untrained


def test_pictures_are_drawn_as_seen_as_restored_and_as_they_are(runs, tmp_path):
    report, _ = evaluate(runs / "patches", split="test", how=How(rows=9, examples=3))
    assert len(report["examples"]) == 3
    for example, (picture, _) in zip(report["examples"], report_rows("test"), strict=False):
        shown, restored, wanted = (np.array(example[name]) for name in ("shown", "restored", "wanted"))
        np.testing.assert_allclose(wanted, picture, atol=1e-3)
        patches = (shown == 0.5).reshape(4, 2, 4, 2).all(axis=(1, 3))  # 2 × 2 points each
        assert patches.sum() >= 12
        seen = ~patches.repeat(2, 0).repeat(2, 1)
        np.testing.assert_array_equal(shown[seen], wanted[seen])
        np.testing.assert_array_equal(restored[seen], wanted[seen])
    file = tmp_path / "some.png"
    assert "▒" in run("evaluate", runs / "patches", "--rows", "9", "--split", "test", "--examples", "1").stdout
    assert "▒" not in run("evaluate", runs / "patches", "--rows", "9", "--split", "test", "--output", file).stdout
    drawn = imread(file)[..., 0]
    points = drawn[len(drawn) // 60 :: len(drawn) // 30, drawn.shape[1] // 160 :: drawn.shape[1] // 80]  # 3 × 8 of them, a line around each
    assert points.shape == (30, 80)
    for i, (picture, _) in enumerate(report_rows("test")[:8]):
        np.testing.assert_allclose(points[21:29, 10 * i + 1 : 10 * i + 9], picture, atol=0.01)


def report_rows(split):
    return SLOTS["data"].kinds["digits"]().load().splits[split]
