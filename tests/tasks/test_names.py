"""One list of task names: [task] kind in a run file, `new`, `evaluate --task`, and "task" in every JSON output."""

from __future__ import annotations

import pytest
from command import error_of, run_json
from small_runs import described, train_all

import manyheads
from manyheads import evaluate
from manyheads.files.read import read_toml
from manyheads.tasks.task import TaskSpec
from manyheads.training.run import read_run

KINDS = tuple(kind for kind, spec in TaskSpec.kinds.items() if spec.__module__.startswith("manyheads."))
PRESETS = ("translate", "summarise", "copy")  # of seq2seq


def tree_of(kind, folder):
    tree = described("seq2seq" if kind in PRESETS else kind, steps=1, eval_every=1, eval_rows=4)
    if kind == "classify":
        labels = folder / "labels.tsv"
        labels.write_text("".join(f"text number {i}\t{'even' if i % 2 else 'odd'}\n" for i in range(60)))
        tree["data"] = {"kind": "labels", "path": str(labels)}
        stack = {name: value for name, value in tree["model"]["encoder"].items() if name != "embed"}
        head = {"kind": "classes", "classes": "data", "pool": "mean"}
        tree["model"] = {"vocab": "tokenizer", "encoder": stack, "head": head}
    return tree | {"task": {"kind": kind}}


def test_show_lists_the_kinds_of_the_slot():
    (slot,) = run_json("show", "task")["slots"]
    assert sorted(kind["kind"] for kind in slot["kinds"]) == sorted(KINDS)


@pytest.mark.parametrize("arguments", [["new", "no-such-task"], ["evaluate", ".", "--task", "no-such-task"]])
def test_new_and_evaluate_know_the_kinds_of_the_slot(arguments):
    error = error_of(*arguments, check=2)
    assert error["code"] == "usage.argument"
    assert [kind for kind in KINDS if kind not in error["message"]] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_one_name_from_the_run_file_to_every_output(kind, tmp_path):
    train_all(tree_of(kind, tmp_path), tmp_path / "run")
    assert read_run(read_toml(tmp_path / "run" / "run.toml")).task.kind == kind
    checkpoint = manyheads.load(tmp_path / "run")
    assert checkpoint.task["kind"] == kind
    options = {"max_rows": 2, "num_beams": 1, "max_new_tokens": 2}
    for task in (None, kind):
        report = evaluate(tmp_path / "run", task=task, **options)
        assert report["task"] == kind
    if kind in PRESETS:  # though its data may be generated, a file of pairs has the same form
        (tmp_path / "pairs.tsv").write_text("a b\ta b\nc d\tc d\n")
        for path in (tmp_path / "run", checkpoint.path):
            report = evaluate(path, data=str(tmp_path / "pairs.tsv"), **options)
            assert (report["task"], report["rows"]) == (kind, 2)
    if kind != "mae":  # which reads no text
        text = {"masked": "he <mask> it", "infill": "he <mask> it"}.get(kind, "a b c")
        assert manyheads.predict(checkpoint, text, max_new_tokens=2)["task"] == kind
