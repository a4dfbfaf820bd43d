"""`train.best` with any metric of generated text: measured on the validation set, and used to select the checkpoint."""

from __future__ import annotations

import json

import pytest
from raising import raises
from small_runs import described, train_all

import manyheads
from manyheads.metrics import metric
from manyheads.tasks.seq2seq import Seq2SeqSpec
from manyheads.training.events import Evaluated
from manyheads.training.loop import validate
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run


def tree_with(name, **best):
    tree = described("seq2seq", steps=12, eval_every=2, save_every=2, keep_last=2, best={"metric": name} | best)
    return tree | {"optim": {"lr": 2e-2, "schedule": {"kind": "linear", "warmup_steps": 2}}}


def evaluations(events, name):
    return {event.step: event.metrics[name] for event in events if isinstance(event, Evaluated)}


@pytest.mark.parametrize("name", ["chrf", "rougeL"])
def test_a_metric_of_text_selects_the_best_checkpoint(name, tmp_path):
    assert name not in Seq2SeqSpec().validation_metrics
    tree = tree_with(name)
    values = evaluations(train_all(tree, tmp_path / "run"), name)
    assert len(values) == 6
    assert len(set(values.values())) > 1, "evaluations differ, or nothing was tested"
    best = max(values, key=lambda step: (values[step], -step))  # the first of equals
    checkpoint = manyheads.load(tmp_path / "run")
    assert checkpoint.path.name == f"step-{best:08}"
    assert validate(checkpoint.model, prepare(read_run(tree)))[name] == pytest.approx(values[best])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = [line["metrics"] for line in lines if line["event"] == "evaluated"]
    assert all(set(item) == {"loss", "accuracy", "exact_match", name} for item in metrics)


def test_the_value_is_the_metric_of_greedy_texts_against_their_targets(tmp_path):
    """The same function as in `evaluate`, of the same texts."""
    tree = tree_with("chrf")
    train_all(tree, tmp_path / "run")
    spec, checkpoint = read_run(tree), manyheads.load(tmp_path / "run")
    run = prepare(spec.replace(train=spec.train.replace(eval_rows=1000)))
    pairs = run.corpus.validation
    assert len(pairs) <= 1000
    outputs = checkpoint.generate([source for source, _ in pairs], max_new_tokens=20)
    expected = metric.METRICS["chrf"].function(outputs, [target for _, target in pairs])
    assert validate(checkpoint.model, run)["chrf"] == pytest.approx(expected, rel=1e-6)


def test_a_run_may_stop_at_a_value_of_the_metric(tmp_path):
    events = train_all(tree_with("chrf", stop_at=0.0), tmp_path / "run")
    assert (events[-1].step, events[-1].reason) == (2, "stop_at")


def test_a_metric_that_the_task_does_not_have_is_refused_with_those_that_it_has():
    for task, name, known in (
        ("seq2seq", "mrr", "chrf"),
        ("causal", "chrf", "accuracy"),
        ("mae", "accuracy", "loss"),
        ("classify", "exact_match", "accuracy"),
    ):
        with raises("config.incompatible", "train.best.metric", name, known):
            read_run(described(task, best={"metric": name}))
