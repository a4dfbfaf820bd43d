"""`manyheads evaluate` and `evaluate(...)`: models of every task next to their baselines."""

from __future__ import annotations

import io
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import torch
from command import error_of, run, run_json
from data_files import data_spec
from matplotlib.image import imread
from raising import raises
from rich.console import Console
from small_runs import train_all

import manyheads
from manyheads import evaluate
from manyheads.cli.evaluate import print_classes
from manyheads.files.read import read_toml
from manyheads.generate.config import CheckpointSettings
from manyheads.metrics import metric
from manyheads.metrics.baselines import Bigram, Majority, NaiveBayes, Unigram
from manyheads.metrics.classes import confusion_matrix as confusion_of
from manyheads.metrics.probe import linear_probe
from manyheads.metrics.ranking import rank_targets
from manyheads.parts.inputs import Inputs
from manyheads.tasks import evaluation as batching
from manyheads.tasks.classify import describe_classes
from manyheads.tasks.evaluation import EvalOptions, evaluate_loss
from manyheads.tasks.seq2seq import max_target_tokens
from manyheads.tasks.task import task_of
from manyheads.training.evaluator import load_rows, make_evaluation
from manyheads.training.loop import validate
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run

ATTENTION, MLP = {"kind": "heads", "heads": 2}, {"kind": "mlp", "hidden": 32}
STACK = {"layers": 1, "width": 16, "attention": ATTENTION, "feedforward": MLP, "position": "sinusoidal"}
BIOGRAPHIES = {"kind": "biographies", "people": 60}
ENCODER_DECODER = {
    "vocab": "tokenizer",
    "encoder": STACK,
    "decoder": {"like": "encoder", "embed": "shared", "cross": True},
}
ENCODER = {"vocab": "tokenizer", "encoder": STACK}
PATCHES = STACK | {"embed": {"kind": "patches", "pixels": 4, "channels": 1}}
AUTOENCODER = {
    "encoder": PATCHES,
    "decoder": STACK | {"embed": "mask-tokens", "mask": {"causal": False}},
    "head": {"kind": "pixels", "pixels": 4},
}
COLORS = [
    (f"the {color} {thing} number {i}", color)
    for i in range(6)
    for color in ("red", "green")
    for thing in ("car", "hat", "cup")
]
OPTIM = {"lr": 1e-2, "schedule": {"kind": "linear", "warmup_steps": 5}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder per run, each trained for a few steps."""
    folder = tmp_path_factory.mktemp("runs")
    labels, queries = folder / "labels.tsv", folder / "queries.tsv"
    labels.write_text("".join(f"{text}\t{label}\n" for text, label in COLORS))
    queries.write_text("".join(f"{text}\tthis is about {text}\n" for text, _ in COLORS))
    trees = {
        "causal": (BIOGRAPHIES, {"vocab": "tokenizer", "decoder": STACK}),
        "masked": (BIOGRAPHIES, ENCODER | {"head": "masked"}),
        "spans": (BIOGRAPHIES, ENCODER_DECODER),
        "mae": ({"kind": "digits"}, AUTOENCODER),
        "seq2seq": (
            {"kind": "sequence", "function": "reverse", "count": 300, "validation_count": 30},
            ENCODER_DECODER,
        ),
        "classify": (
            {"kind": "labels", "path": str(labels), "validation_fraction": 0.2},
            ENCODER | {"head": {"kind": "classes", "classes": 2}},
        ),
        "retrieval": (
            {"kind": "queries", "path": str(queries), "validation_fraction": 0.2},
            ENCODER | {"head": {"kind": "vector", "pool": "mean"}},
        ),
    }
    for kind, (data, model) in trees.items():
        steps = 60 if kind in ("classify", "seq2seq") else 8
        settings = {"steps": steps, "batch_tokens": 800, "eval_every": 100, "eval_rows": 1}
        train_all({"model": model, "data": data, "task": kind, "optim": OPTIM, "train": settings}, folder / kind)
    return folder


def run_spec(folder):
    return read_run(read_toml(folder / "run.toml"))


METRICS = {
    "causal": ({"loss", "perplexity", "bits_per_byte", "nats_per_character"}, {"model", "unigram", "bigram"}),
    "masked": ({"loss", "accuracy"}, {"model", "unigram"}),
    "spans": ({"loss", "accuracy"}, {"model"}),
    "mae": ({"loss", "probe"}, {"model", "untrained", "pixels"}),
    "seq2seq": ({"exact_match", "bleu", "chrf", "rouge1", "rouge2", "rougeL"}, {"model", "copy"}),
    "classify": ({"accuracy", "macro_f1", "calibration_error"}, {"model", "majority", "naive Bayes"}),
    "retrieval": ({"mrr", "mrr@10", "recall@1", "recall@10"}, {"model", "BM25", "chance"}),
}
ALWAYS = {"schema", "path", "task", "data", "split", "rows", "better", "primary", "metrics", "signatures", "notes"}
ALWAYS |= {"examples", "seconds"}


@pytest.mark.parametrize("kind", METRICS)
def test_every_task_is_scored_next_to_its_baselines(kind, runs):
    report, (metrics, models) = run_json("evaluate", runs / kind, "--num-beams", 2), METRICS[kind]
    assert report.keys() >= ALWAYS
    assert (report["schema"], report["task"], report["split"]) == (1, kind, "validation")
    assert report["metrics"].keys() == models
    assert all(
        scores.keys() == ({"probe"} if name == "untrained" else metrics) for name, scores in report["metrics"].items()
    )
    assert report["better"].keys() == metrics >= set(report["primary"])
    assert all(math.isfinite(value) for scores in report["metrics"].values() for value in scores.values())
    assert report["rows"] == {"seq2seq": 30, "classify": 7, "retrieval": 7, "mae": 180}.get(kind, 60)
    assert report["signatures"].keys() == ({"bleu", "chrf"} if kind == "seq2seq" else set())


def test_the_table_names_the_model_its_baselines_and_the_better_direction(runs):
    done = run("evaluate", runs / "seq2seq", "--examples", 2, "--max-rows", 5, "--num-beams", 1)
    first, *lines = done.stdout.splitlines()
    assert first.startswith("seq2seq · validation · 5 rows")
    assert any(re.match(r"metric +model +copy", line) for line in lines)
    assert any(re.match(r"bleu +↑ +[\d.]+ +[\d.]+$", line) for line in lines)
    assert any("tok:13a" in line for line in lines)
    assert sum(line.strip().startswith("reference ") for line in lines) == 2


def test_bleu_and_chrf_take_the_outputs_as_hypotheses_and_the_targets_as_references(runs, tmp_path):
    """A short hypothesis has the precision 1 and a brevity penalty; swapped, it has neither."""
    sources, targets = ["a b c d e", "b c d e f"], ["a b c d e f g", "b c d e f g a"]
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in zip(sources, targets, strict=True)))
    report = evaluate(runs / "seq2seq", data=str(path), num_beams=1, max_new_tokens=4)
    assert report["metrics"]["copy"]["bleu"] == pytest.approx(100 * math.exp(1 - 7 / 5))
    for name, hypotheses in {"model": [row["prediction"] for row in report["outputs"]], "copy": sources}.items():
        assert report["metrics"][name]["bleu"] == sacrebleu.corpus_bleu(hypotheses, [targets]).score
        assert report["metrics"][name]["chrf"] == sacrebleu.corpus_chrf(hypotheses, [targets]).score


def test_a_note_counts_the_targets_without_words_that_rouge_counts(runs, tmp_path):
    for text, count in (("привет мир", 2), ("hello мир", 0)):
        path = tmp_path / "pairs.tsv"
        path.write_text(f"a b c\t{text} как дела\nb a c\t{text} тоже\n")
        report = evaluate(runs / "seq2seq", data=str(path), num_beams=1, max_new_tokens=4)
        notes = [note for note in report["notes"] if "ROUGE" in note]
        assert [note.split()[0] for note in notes] == ([str(count)] if count else [])


# ---------------------------------------------------------------------------------------------- the same as in training


def test_a_checkpoint_without_its_run_has_the_fields_of_its_task(tmp_path):
    """A masked autoencoder of normalized patches has another loss."""
    task = {"kind": "mae", "norm_pix_loss": True, "mask_ratio": 0.5}
    tree = {"model": AUTOENCODER, "data": {"kind": "digits"}, "task": task, "train": {"steps": 1, "eval_rows": 1}}
    train_all(tree, tmp_path / "run")
    manyheads.export(tmp_path / "run", tmp_path / "alone", to="manyheads")
    for path in (tmp_path / "run", tmp_path / "alone"):
        assert task_of(manyheads.load(path)) == run_spec(tmp_path / "run").task


def test_the_loss_is_that_of_training(runs):
    for kind, rows in (("causal", 60), ("masked", 64)):
        spec = run_spec(runs / kind)
        prepared = prepare(spec.replace(train=spec.train.replace(eval_rows=rows)))
        model = manyheads.load(runs / kind).model
        loss = evaluate(runs / kind)["metrics"]["model"]["loss"]
        # masks are random, so the losses are only similar; over all tokens they are equal
        assert loss == pytest.approx(validate(model, prepared)["loss"], rel=1e-5 if kind == "causal" else 0.1)


def test_texts_are_read_as_in_training_however_long_they_are(tmp_path):
    """A model that never saw position 9 gives anything there; sinusoids have no last position that would stop it."""
    color = {"a": "red", "b": "blue"}
    rows = [
        f"{' '.join(first for _ in range(8))} {' '.join('ab'[(i + j) % 2] for j in range(40))}\t{color[first]}\n"
        for i in range(40)
        for first in "ab"
    ]
    (tmp_path / "long.tsv").write_text("".join(rows))
    labels = {"kind": "labels", "path": str(tmp_path / "long.tsv"), "validation_fraction": 0.25}
    settings = {"steps": 60, "batch_tokens": 800, "eval_every": 60, "max_length": 8}
    model = ENCODER | {"head": {"kind": "classes", "classes": 2, "pool": "mean"}}
    tree = {"model": model, "data": labels, "task": "classify", "optim": OPTIM, "train": settings}
    train_all(tree, tmp_path / "labels")
    assert validate(manyheads.load(tmp_path / "labels").model, prepare(read_run(tree)))["accuracy"] == 1
    report = evaluate(tmp_path / "labels")
    assert report["metrics"]["model"]["accuracy"] == 1
    (note,) = report["notes"]
    assert re.findall(r"\d+", note) == ["20", "20", "8"], "20 of 20 texts were truncated to 8 tokens"
    text = rows[0].split("\t")[0]
    done = run("predict", tmp_path / "labels", text)
    assert re.findall(r"\d+", done.stderr) == ["8"], "its first 8 tokens were read"
    assert done.stdout.split()[1] == "red"
    assert run_json("predict", tmp_path / "labels", text)["truncated_to"] == 8
    (tmp_path / "long.txt").write_text("".join(row.replace("\t", " ") for row in rows))
    assert re.findall(r"\d+", run("predict", tmp_path / "labels", "-f", tmp_path / "long.txt").stderr)[-1] == "80"
    longer = {"data": labels, "task": "classify", "train": settings | {"max_length": 30}}
    again = prepare(read_run({"init_from": str(tmp_path / "labels")} | longer))
    assert max(len(again.train_dataset[i][0]) for i in range(60)) > 8, "another run truncates where it says"

    few = model | {"encoder": model["encoder"] | {"position": {"kind": "learned", "length": 8}}}
    train_all(tree | {"model": few, "train": {"steps": 1, "batch_tokens": 800}}, tmp_path / "few")
    done = run("predict", tmp_path / "few", text)  # the model has no more positions
    assert re.findall(r"\d+", done.stderr) == ["8"]


def test_packed_runs_are_evaluated_in_windows_of_their_rows(tmp_path):
    (tmp_path / "long.txt").write_text(
        "".join(f"{' '.join('ab'[(i + j) % 2] for j in range(40))}\n" for i in range(80))
    )
    data = {"kind": "text", "path": str(tmp_path / "long.txt"), "validation_fraction": 0.25, "document": "file"}
    model = {"vocab": "tokenizer", "decoder": STACK}
    settings = {"steps": 30, "batch_tokens": 800, "eval_every": 30, "pack": 16}
    train_all({"model": model, "data": data, "task": "causal", "optim": OPTIM, "train": settings}, tmp_path / "packed")
    report = evaluate(tmp_path / "packed")
    (note,) = report["notes"]
    assert re.findall(r"\d+", note) == ["16"], "texts were read in windows of 16 tokens"
    by_length = {length: evaluate(tmp_path / "packed", max_length=length)["metrics"]["model"] for length in (16, 400)}
    assert report["metrics"]["model"] == by_length[16] != by_length[400]


def test_windows_predict_every_token_once(runs):
    whole, windows = (evaluate(runs / "causal", max_length=length) for length in (None, 7))
    assert whole["tokens"] == windows["tokens"]
    assert whole["metrics"]["model"] != windows["metrics"]["model"]


def test_scores_do_not_depend_on_the_size_of_batches(runs, monkeypatch):
    for kind in ("causal", "classify", "retrieval"):
        usual = evaluate(runs / kind)["metrics"]["model"]
        monkeypatch.setattr(batching, "BATCH_TOKENS", 64)
        assert evaluate(runs / kind)["metrics"]["model"] == pytest.approx(usual, rel=1e-5)
        monkeypatch.undo()


def test_each_row_gets_its_own_output(runs):
    """Rows of a batch, in another order, give what they give one by one."""
    checkpoint = manyheads.load(runs / "classify")
    outputs = evaluate(runs / "classify", split="train")["outputs"]
    classes = [row["prediction"] for row in outputs]
    texts = [text for text, _ in run_spec(runs / "classify").data.load().train]
    assert list(classes) == [manyheads.predict(checkpoint, text)["classes"][0]["class"] for text in texts]
    assert len(set(classes)) == 2
    checkpoint, settings = (
        manyheads.load(runs / "seq2seq"),
        {"num_beams": 2, "length_penalty": 0.6, "max_new_tokens": 5},
    )
    report = evaluate(runs / "seq2seq", max_rows=8, examples=8, **settings)
    texts = [row["prediction"] for row in report["outputs"]]
    assert texts == [checkpoint.generate(row["text"], decoding="gnmt-beam", **settings) for row in report["examples"]]
    assert len(set(texts)) > 1
    assert report["generation"]["max_new_tokens"] == 5
    chosen = report["generation"]["decoding"]
    assert (chosen["kind"], chosen["num_beams"], chosen["length_penalty"]) == ("gnmt-beam", 2, 0.6)


OUTPUT_KEYS = {
    "seq2seq": {"text", "reference", "prediction"},
    "classify": {"text", "reference", "prediction"},
    "retrieval": {"query", "document", "rank"},
}


@pytest.mark.parametrize("kind", OUTPUT_KEYS)
def test_every_row_is_written_with_its_result(kind, runs, tmp_path):
    path = tmp_path / "rows.jsonl"
    run("evaluate", runs / kind, "--max-rows", 6, "--num-beams", 1, "--output", path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    report = evaluate(runs / kind, max_rows=6, num_beams=1)
    assert rows == report["outputs"]
    assert {frozenset(row) for row in rows} == {frozenset(OUTPUT_KEYS[kind])}
    inputs = [tuple(row.values())[:2] for row in rows]
    assert inputs == run_spec(runs / kind).data.load().validation[:6]
    if kind == "retrieval":
        assert np.mean([1 / row["rank"] for row in rows]) == pytest.approx(report["metrics"]["model"]["mrr"])
    elif kind == "classify":
        right = [row["reference"] == row["prediction"] for row in rows]
        assert np.mean(right) == pytest.approx(report["metrics"]["model"]["accuracy"])
    before = path.read_bytes()
    assert error_of("evaluate", runs / kind, "--output", path, check=2)["code"] == "usage.output-exists"
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["rows.jsonl"]


def test_an_output_that_a_task_does_not_have_is_refused_before_anything_is_computed(runs, tmp_path):
    refused = {"causal": "a.jsonl", "masked": "a.jsonl", "spans": "a.jsonl", "mae": "a.jsonl", "seq2seq": "a.png"}
    for kind, name in refused.items():
        error = error_of("evaluate", runs / kind, "--output", tmp_path / name, check=2)
        assert error["code"] == "usage.argument"
        assert kind in error["message"]
    assert not list(tmp_path.iterdir())


def test_classes_have_their_scores_and_a_confusion_matrix(runs):
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    report = run_json("evaluate", runs / "classify", "--split", "train")
    rows = evaluate(runs / "classify", split="train")["outputs"]
    names, targets, predicted = report["classes"], *([row[key] for row in rows] for key in ("reference", "prediction"))
    assert report["confusion_matrix"] == confusion_matrix(targets, predicted, labels=names).tolist()
    columns = precision_recall_fscore_support(targets, predicted, labels=names, zero_division=0)
    for row, *values in zip(report["by_class"], names, *columns, strict=True):
        assert [row[key] or 0 for key in ("precision", "recall", "f1", "rows")] == pytest.approx(values[1:])
        assert row["class"] == values[0]
    assert np.mean([row["f1"] for row in report["by_class"]]) == pytest.approx(report["metrics"]["model"]["macro_f1"])
    text = run("evaluate", runs / "classify", "--split", "train").stdout
    assert all(word in text for word in ("precision", "recall", "f1", *names))


@pytest.mark.parametrize("count", [3, 10, 11, 60])
def test_the_table_of_classes_is_short_however_many_there_are(count):
    names = [f"class {i}" for i in range(count)]
    targets = [i % count for i in range(5 * count)]
    confusion = confusion_of(targets, [(i * i) % count for i in range(5 * count)], count)
    report = {"classes": names, "by_class": describe_classes(confusion, names), "confusion_matrix": confusion.tolist()}
    console = Console(file=io.StringIO(), width=200)
    print_classes(report, console)
    lines = console.file.getvalue().splitlines()
    assert len(lines) < 50
    assert sum(line.startswith("class ") for line in lines) >= min(count, 20)
    assert any("confusion matrix" in line for line in lines) == (count <= 10)


def test_a_class_without_rows_and_predictions_has_no_scores():
    (row,) = describe_classes(confusion_of([0, 0], [0, 0], 2), ["a", "b"])[1:]
    assert row == {"class": "b", "precision": None, "recall": None, "f1": None, "rows": 0}


@pytest.mark.parametrize(
    "wrong", [{"task": 3}, {"task": ["causal"]}, {"split": 3}, {"overrides": "a=1"}, {"overrides": [3]}]
)
def test_arguments_of_a_wrong_type_have_a_code(wrong, runs):
    with raises("usage.argument"):
        evaluate(runs / "causal", **wrong)


# ----------------------------------------------------------------------------------------------------------- baselines


def test_baselines_are_fitted_on_the_training_rows_and_scored_on_the_evaluated_ones(runs):
    corpus = run_spec(runs / "classify").data.load()
    labels = corpus.labels()
    (train_texts, train_labels), (texts, targets) = (
        ([text for text, _ in rows], [labels.index(label) for _, label in rows])
        for rows in (corpus.train, corpus.validation)
    )
    scores = evaluate(runs / "classify")["metrics"]
    bayes, majority = NaiveBayes(train_texts, train_labels, 2), Majority(train_labels, 2)
    assert scores["naive Bayes"] == metric.scores("classes", targets, bayes.probabilities(texts))
    assert scores["majority"] == metric.scores("classes", targets, majority.probabilities(texts))


def test_the_unigram_and_the_bigram_of_a_language_model_are_fitted_on_the_training_rows(runs):
    corpus, tokenizer = run_spec(runs / "causal").data.load(), manyheads.load(runs / "causal").tokenizer
    train, validation = (
        [np.array([1, *tokenizer.encode(text, add_special_tokens=False).ids, 2]) for (text,) in corpus.splits[split]]
        for split in ("train", "validation")
    )
    size = manyheads.load(runs / "causal").spec.vocab
    unigram, bigram = Unigram((ids[1:] for ids in train), size), Bigram(train, size)
    scores, count = evaluate(runs / "causal")["metrics"], sum(len(ids) - 1 for ids in validation)
    losses = {
        "unigram": sum(unigram.nats(ids[1:]).sum() for ids in validation) / count,
        "bigram": sum(bigram.nats(ids).sum() for ids in validation) / count,
    }
    assert {name: scores[name]["loss"] for name in losses} == pytest.approx(losses)


def masked_evaluation(folder, **fields):
    spec, checkpoint = run_spec(folder), manyheads.load(folder)
    task = spec.task.model_copy(update=fields)
    corpus, rows = load_rows(spec.data, task, data=None, split="validation", from_run=True)
    options, progress = EvalOptions(max_length=7), lambda what, done, total: None
    return make_evaluation(checkpoint, task, spec, corpus, rows, options=options, progress=progress)


def test_windows_of_masked_tokens_have_every_token(runs):
    evaluation = masked_evaluation(runs / "masked", mlm_probability=1.0)
    _, targets = evaluate_loss(evaluation)
    ids = [
        evaluation.checkpoint.tokenizer.encode(text, add_special_tokens=False).ids for (text,) in evaluation.data.rows
    ]
    assert sorted(targets) == sorted(token for row in ids for token in row)


def test_the_unigram_of_masked_tokens_is_fitted_on_texts_without_special_tokens(runs):
    spec, checkpoint = run_spec(runs / "masked"), manyheads.load(runs / "masked")
    corpus, rows = load_rows(spec.data, spec.task, data=None, split="validation", from_run=True)
    options, progress = EvalOptions(), lambda what, done, total: None
    evaluation = make_evaluation(checkpoint, spec.task, spec, corpus, rows, options=options, progress=progress)
    _, targets = evaluate_loss(evaluation)
    ids = [checkpoint.tokenizer.encode(text, add_special_tokens=False).ids for (text,) in corpus.train]
    unigram = Unigram((np.array(row) for row in ids), checkpoint.spec.vocab)
    common = np.bincount(np.concatenate(ids)).argmax()
    expected = {"loss": unigram.nats(targets).mean(), "accuracy": (targets == common).mean()}
    assert spec.task.evaluate(evaluation).scores["unigram"] == pytest.approx(expected)
    assert evaluate(runs / "masked")["metrics"]["unigram"] == pytest.approx(expected)


def test_outputs_may_be_twice_as_long_as_any_training_target_wherever_it_stands_in_the_file(runs):
    checkpoint = manyheads.load(runs / "seq2seq")
    rows = [("x", "1")] * 2500 + [("x", "1 2 3 4 5 6 7")] * 500
    length = len(checkpoint.tokenizer.encode("1 2 3 4 5 6 7").ids)
    evaluation = SimpleNamespace(checkpoint=checkpoint, data=SimpleNamespace(train_rows=rows))
    assert max_target_tokens(evaluation) == 8 + 2 * length


def test_a_collapsed_model_is_not_first(runs):
    """Where every vector is the same, every document has the middle rank."""
    checkpoint = manyheads.load(runs / "retrieval", copy=True)
    with torch.no_grad():
        for name, parameter in checkpoint.model.named_parameters():
            parameter.fill_(1.0 if name.endswith("bias") else 0.0)
    vectors = checkpoint.embed(["one", "another text"])
    assert torch.equal(vectors[0], vectors[1])
    assert rank_targets((vectors @ vectors.T).numpy(), [0, 1]).tolist() == [1.5, 1.5]


# --------------------------------------------------------------------------------------- other files, other checkpoints


def test_another_file_of_the_same_form_is_evaluated_with_baselines_of_the_training_rows(runs, tmp_path):
    other = tmp_path / "other.tsv"
    other.write_text("".join(f"{text}, it is\t{label}\n" for text, label in COLORS[:10]))
    report = evaluate(runs / "classify", data=str(other))
    assert (report["rows"], report["split"]) == (10, "file")
    assert report["metrics"]["naive Bayes"]["accuracy"] == 1  # fitted on the run's training rows
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a b\tb a\nc d e\te d c\n")
    report = evaluate(runs / "seq2seq", data=str(pairs), num_beams=1)
    assert report["rows"] == 2  # though the data of the run are generated


def test_the_columns_of_another_file_are_found_as_new_finds_them(runs, tmp_path):
    """Whatever the names in the training file are; `-s data.columns` names them."""
    rows = [(f"{text}, it is", label) for text, label in COLORS[:10]]
    (tmp_path / "a.csv").write_text("".join(f'{i};{label};"{text}"\n' for i, (text, label) in enumerate(rows)))
    (tmp_path / "b.csv").write_text("Nr;Color;What was said\n" + (tmp_path / "a.csv").read_text())
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"said": text, "color": label}) + "\n" for text, label in rows)
    )
    expected = evaluate(runs / "classify", data=str(tmp_path / "c.jsonl"))
    assert (expected["rows"], "columns 'said', 'color'" in expected["data"]) == (10, True)
    report = evaluate(runs / "classify", data=str(tmp_path / "b.csv"))
    assert report["metrics"] == expected["metrics"]
    for name in ("semicolon-separated", "columns 'What was said', 'Color'"):
        assert name in report["data"]
    report = evaluate(runs / "classify", data=str(tmp_path / "a.csv"), overrides=["data.columns=[2, 1]"])
    assert report["metrics"] == expected["metrics"]
    with raises("data.columns", "b.csv", "'said'"):
        evaluate(runs / "classify", data=str(tmp_path / "b.csv"), overrides=['data.columns=["said", "color"]'])


@pytest.mark.parametrize("columns", [[2, 1], ["de", "en"], ["de", 1], None])
def test_a_file_of_the_run_is_read_as_the_run_reads_it(columns, tmp_path):
    """By number as by name; numbers fit every file with as many columns."""
    lines = [f"{i},the house {i},das Haus {i}\n" for i in range(30)]
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("id,en,de\n" + "".join(lines))
    spec = data_spec("pairs", path=str(tmp_path / "a.csv"), **({"columns": columns} if columns else {}))
    expected = sorted((*spec.load().train, *spec.load().validation))
    for name in ("a.csv", "b.csv")[: 2 if columns else 1]:
        options = {"data": str(tmp_path / name), "split": "validation", "from_run": True}
        assert sorted(load_rows(spec, SimpleNamespace(file_kind="pairs"), **options)[1]) == expected


def test_a_table_is_evaluated_whatever_a_document_of_the_run_is(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"some words {i}\n" for i in range(30)))
    spec = data_spec("text", path=str(tmp_path / "a.txt"), document="line")
    task = SimpleNamespace(file_kind="text", longer_column_first=False)
    for name in ("text", "said"):
        (tmp_path / "a.jsonl").write_text(json.dumps({name: "two\nlines"}) + "\n")
        options = {"data": str(tmp_path / "a.jsonl"), "split": "validation", "from_run": True}
        assert load_rows(spec, task, **options)[1] == [("two\nlines",)]
        with raises("config.incompatible", "document"):
            load_rows(spec, task, **options, overrides=['data.document="line"'])


def test_the_texts_of_a_table_are_evaluated_one_by_one(runs, tmp_path):
    texts = [f"the cat sat {'there ' * (i % 4)}and saw {i}" for i in range(12)]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"id": i, "said": text}) + "\n" for i, text in enumerate(texts))
    )
    (tmp_path / "a.txt").write_text("".join(f"{text}.\n" for text in texts))
    latest = runs / "causal" / "checkpoints" / (runs / "causal" / "checkpoints" / "latest").read_text()
    for path in (runs / "causal", latest):
        for name in ("a.jsonl", "a.txt"):
            assert evaluate(path, data=str(tmp_path / name))["rows"] == 12


def test_a_checkpoint_without_its_run_is_evaluated_for_the_task_it_was_trained_for(runs, tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat\n" * 30)
    for kind in ("causal", "masked", "spans"):
        latest = runs / kind / "checkpoints" / (runs / kind / "checkpoints" / "latest").read_text()
        report = evaluate(latest, data=str(tmp_path / "a.txt"))
        assert report["task"] == kind
        assert math.isfinite(report["metrics"]["model"]["loss"])


def test_any_checkpoint_can_be_evaluated(runs, tmp_path):
    """An encoder retrieves documents by its mean output; without training rows only baselines that need none are scored."""
    texts = [data_spec("biographies", people=60).text(4 * i)[0] for i in range(30)]
    files = {
        "queries": [{"query": text, "doc_id": i} for i, text in enumerate(texts[:8])],
        "docs": [{"id": i, "text": text} for i, text in enumerate(texts)],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ["-s", f'data.documents="{tmp_path}/docs.jsonl"', "-s", 'data.columns=["query", "doc_id"]']
    data = ["--data", tmp_path / "queries.jsonl"]
    report = run_json("evaluate", runs / "masked", "--task", "retrieval", *data, *overrides)
    assert (report["task"], report["rows"], report["documents"]) == ("retrieval", 8, 30)
    assert report["metrics"]["model"]["mrr"] == 1  # a document that equals the query has its vector
    assert report["metrics"]["BM25"]["recall@10"] == 1
    text = tmp_path / "book.txt"
    text.write_text("Somebody was born in the year 1850.\n\nSomebody was a smith.\n")
    folder = next((runs / "causal" / "checkpoints").glob("step-*"))  # only a model, without its run
    report = run_json("evaluate", folder, "--data", text)
    assert (report["task"], report["rows"], list(report["metrics"])) == ("causal", 2, ["model"])
    assert any("data.path" in note for note in report["notes"])
    train = tmp_path / "train.txt"
    train.write_text("Somebody was born in the year 1851.\n")
    report = run_json("evaluate", folder, "--data", text, "-s", f"data.path={train}")
    assert (report["rows"], report["metrics"].keys() > {"model"}) == (2, True)
    assert not any("data.path" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("masked", "causal"),
        ("causal", "masked"),
        ("retrieval", "causal"),
        ("classify", "masked"),
        ("causal", "seq2seq"),
        ("causal", "spans"),
        ("seq2seq", "infill"),
        ("seq2seq", "mae"),
    ],
)
def test_a_model_is_not_evaluated_for_a_task_that_it_cannot_do(runs, tmp_path, kind, task):
    (tmp_path / "a.txt").write_text("one two\tthree\n" * 9)
    error = error_of("evaluate", runs / kind, "--task", task, "--data", tmp_path / "a.txt", check=2)
    assert error["code"] == "model.unsupported"
    assert {kind, task} <= set(re.findall(r"\w+", error["message"]))


def test_a_recurrent_language_model_is_not_evaluated_as_seq2seq(tmp_path):
    model = {"vocab": "tokenizer", "recurrent": {"width": 16, "source": False}}
    settings = {"steps": 1, "batch_tokens": 800, "eval_rows": 1}
    train_all({"model": model, "data": BIOGRAPHIES, "task": "causal", "train": settings}, tmp_path / "run")
    (tmp_path / "a.tsv").write_text("one two\tthree\n" * 9)
    with raises("model.unsupported", "seq2seq", "causal"):
        evaluate(tmp_path / "run", task="seq2seq", data=str(tmp_path / "a.tsv"))


FAULTS = {
    "an empty split": (["causal", "--split", "test"], 3, "data.empty", "test"),
    "no such split": (["causal", "--split", "dev"], 2, "usage.argument", "dev"),
    "no such task": (["causal", "--task", "summarize"], 2, "usage.argument", "summarise"),
    "a task without a file": (["masked", "--task", "retrieval"], 2, "config.missing-key", "--data"),
    "a file that does not exist": (["classify", "--data", "nowhere.tsv"], 2, "usage.path-not-found", "nowhere.tsv"),
    "no rows": (["causal", "--max-rows", "0"], 2, "usage.argument", "rows"),
    "no beams": (["seq2seq", "--num-beams", "0"], 2, "generate.config", "num_beams"),
    "a short maximum": (["causal", "--max-length", "2"], 2, "usage.argument", "max_length"),
    "an output nowhere": (["seq2seq", "--output", "nowhere/x.txt"], 2, "usage.output", "nowhere"),
    "an unknown class": (["classify", "--data", "{folder}/blue.tsv"], 3, "data.label", "blue"),
    "a blank file": (["classify", "--data", "{folder}/blank.tsv"], 3, "data.empty", "blank.tsv"),
    "no classifier": (
        ["causal", "--task", "classify", "--data", "{folder}/blue.tsv"],
        2,
        "model.unsupported",
        "classif",
    ),
    "a misspelt field": (["classify", "-s", "data.held=1"], 2, "config.unknown-key", "held"),
    "no folder": (["nothing-here"], 2, "usage.path-not-found", "nothing-here"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_evaluated_has_a_code(name, runs, tmp_path):
    (tmp_path / "blue.tsv").write_text("a hat\tblue\n")
    (tmp_path / "blank.tsv").write_text("\n \n")
    (kind, *options), status, code, value = FAULTS[name]
    arguments = ["evaluate", runs / kind, *(option.format(folder=tmp_path) for option in options)]
    error = error_of(*arguments, check=status)
    assert error["code"] == code, error
    assert value in error["message"] + error["hint"]
    assert run(*arguments, check=status).stderr.count("\n") == 1


# --------------------------------------------------------------------------------------------------------------- notes


def notes_about(report, word):
    return [note for note in report["notes"] if word in note]


def test_a_note_tells_that_the_split_selected_the_checkpoint(runs, tmp_path):
    tree = read_toml(runs / "causal" / "run.toml")
    tree["train"] |= {"steps": 2, "eval_every": 1, "best": {"metric": "loss"}}
    train_all(tree, tmp_path / "run")
    (note,) = notes_about(evaluate(tmp_path / "run"), "selected")
    assert "--data FILE" in note
    assert not notes_about(evaluate(tmp_path / "run", split="train"), "selected")
    assert not notes_about(evaluate(runs / "causal"), "selected")
    with_test = read_toml(runs / "seq2seq" / "run.toml")
    with_test["train"] |= tree["train"]
    train_all(with_test, tmp_path / "with-test")
    (note,) = notes_about(evaluate(tmp_path / "with-test"), "selected")
    assert "--split test" in note


def test_a_note_tells_that_rows_may_be_training_rows(runs):
    path = read_toml(runs / "classify" / "run.toml")["data"]["path"]
    assert path in evaluate(runs / "classify", data=path)["notes"][0]
    assert "-s" in evaluate(runs / "classify", overrides=["data.validation_fraction=0.4"])["notes"][0]


# -------------------------------------------------------------------------------------------------------------- images


def digit_rows(split):
    return data_spec("digits").load().splits[split]


def test_images_have_classes_too(tmp_path):
    model = {"encoder": PATCHES, "head": {"kind": "classes", "classes": 10}}
    settings = {"steps": 2, "batch_tokens": 800, "eval_every": 100, "eval_rows": 1}
    train_all({"model": model, "data": "digits", "task": "classify", "train": settings}, tmp_path / "run")
    report = evaluate(tmp_path / "run", max_rows=20, examples=3)
    classes = [row["prediction"] for row in report["outputs"]]
    assert report["metrics"].keys() == {"model", "majority"}  # an image has no words
    assert len(classes) == report["rows"] == 20
    assert report["metrics"]["model"].keys() == METRICS["classify"][0]


def untrained_probe(folder):
    """The probe of the encoder's output with the run's initial weights, by hand."""
    prepared = prepare(run_spec(folder))
    model = manyheads.build(prepared.model_spec, seed=prepared.spec.seed).eval()

    def states(rows):
        patches = [image.reshape(4, 2, 4, 2).swapaxes(1, 2).reshape(16, 4) for image, _ in rows]
        with torch.no_grad():
            return model.encode(Inputs(torch.tensor(np.stack(patches)))).states.mean(dim=1).numpy()

    train, test = digit_rows("train"), digit_rows("test")
    (train_states, train_labels), (test_states, test_labels) = (
        (states(rows), [label for _, label in rows]) for rows in (train, test)
    )
    return linear_probe(train_states, train_labels, test_states, test_labels)


def test_restored_images_are_scored_next_to_the_mean_image_and_probes(tmp_path):
    model = AUTOENCODER | {
        "encoder": PATCHES | {"position": {"kind": "learned", "length": 16}},
        "decoder": {"like": "encoder", "embed": "mask-tokens", "mask": {"causal": False}},
    }
    settings = {"optim": {"lr": 0.1}, "train": {"steps": 2, "eval_every": 2, "eval_rows": 20}}
    train_all({"model": model, "data": "digits", "task": "mae"} | settings, tmp_path / "run")
    report = evaluate(tmp_path / "run", split="test")
    assert report["better"] == {"loss": "lower", "probe": "higher"}
    mean = np.mean([image for image, _ in digit_rows("train")], axis=0)
    error = np.mean([(image - mean) ** 2 for image, _ in digit_rows("test")])
    assert report["metrics"]["pixels"]["loss"] == pytest.approx(error, rel=1e-5)
    assert 0.85 < report["metrics"]["pixels"]["probe"] < 1
    untrained = untrained_probe(tmp_path / "run")
    assert report["metrics"]["untrained"] == {"probe": untrained}
    assert report["metrics"]["model"]["probe"] != untrained


def test_examples_of_images_are_the_visible_patches_the_restored_image_and_the_target(runs, tmp_path):
    report = evaluate(runs / "mae", split="test", max_rows=9, examples=3)
    assert len(report["examples"]) == 3
    for example, (image, _) in zip(report["examples"], digit_rows("test"), strict=False):
        visible, restored, target = (np.array(example[name]) for name in ("visible", "restored", "target"))
        np.testing.assert_allclose(target, image, atol=1e-3)
        masked = (visible == 0.5).reshape(4, 2, 4, 2).all(axis=(1, 3))  # patches of 2 × 2 pixels
        assert masked.sum() >= 12
        kept = ~masked.repeat(2, 0).repeat(2, 1)
        np.testing.assert_array_equal(visible[kept], target[kept])
        np.testing.assert_array_equal(restored[kept], target[kept])
    common = ["evaluate", runs / "mae", "--max-rows", "9", "--split", "test"]
    file = tmp_path / "some.png"
    assert "▒" in run(*common, "--examples", "1").stdout
    assert "▒" not in run(*common, "--output", file).stdout
    drawn = imread(file)[..., 0]
    points = drawn[  # 3 × 8 images with a line around each
        len(drawn) // 60 :: len(drawn) // 30, drawn.shape[1] // 160 :: drawn.shape[1] // 80
    ]
    assert points.shape == (30, 80)
    for i, (image, _) in enumerate(digit_rows("test")[:8]):
        np.testing.assert_allclose(points[21:29, 10 * i + 1 : 10 * i + 9], image, atol=0.01)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("gnmt-beam", 4, 0.6)),
        ({"num_beams": 2}, ("gnmt-beam", 2, 0.6)),
        ({"length_penalty": 1.5}, ("gnmt-beam", 4, 1.5)),
        ({"stop": "x"}, ("gnmt-beam", 4, 0.6)),
        ({"num_beams": 2, "coverage_penalty": 0.1}, ("gnmt-beam", 2, 0.6)),
        ({"decoding": "beam", "num_beams": 2}, ("beam", 2, 1.0)),
        ({"temperature": 0}, ("greedy", None, None)),
        ({"top_p": 0.5}, ("sample", None, None)),
    ],
    ids=str,
)
def test_a_setting_of_generation_changes_no_other_one_of_an_evaluation(settings, expected):
    method = EvalOptions(settings=settings).generation(CheckpointSettings(), default_max_new_tokens=5).decoding
    found = (method.kind, getattr(method, "num_beams", None), getattr(method, "length_penalty", None))
    assert found == expected
