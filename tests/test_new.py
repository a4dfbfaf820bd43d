"""A run file for a task and one's own data: it parses, it trains, it says why, and what it says is so."""

from __future__ import annotations

import json
import os
import re
import tomllib

import numpy as np
import pytest
from command import run

from manyheads import build
from manyheads.advice import TASKS, new
from manyheads.advice.draft import inline
from manyheads.data.columns import columns_of
from manyheads.data.source import DataError
from manyheads.data.tables import LabelsSpec, PairsSpec
from manyheads.spec import SpecError
from manyheads.train.events import Ended
from manyheads.train.loop import train
from manyheads.train.run import made_ready, read_run
from manyheads.train.stream import Stream

WORDS = ["the", "a", "red", "blue", "small", "old", "cat", "dog", "house", "tree", "sees", "likes", "finds", "under", "over", "near"]


def sentences(count, seed=0, words=(3, 9)):
    chance = np.random.default_rng(seed)
    return [" ".join(chance.choice(WORDS, chance.integers(*words))) + f" {i}." for i in range(count)]


def table(path, rows, *header):
    path.write_text("".join("\t".join(row) + "\n" for row in [header, *rows] if row))
    return path


def objects(path, rows, *names):
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def pairs(count=60):
    return [(text, text.upper()) for text in sentences(count)]


def labelled(count=60):
    return [(text, "long" if len(text) > 35 else "short") for text in sentences(count)]


def pictures(path):
    rows = np.random.default_rng(0).integers(0, 255, (80, 16)).tolist()
    path.write_text("".join(",".join(map(str, [*row, i % 3])) + "\n" for i, row in enumerate(rows)))
    return path


FILES = {
    "translate": lambda folder: table(folder / "whatever.tsv", pairs()),
    "summarise": lambda folder: objects(folder / "docs.jsonl", [(short, long * 3) for long, short in pairs()], "abstract", "body"),
    "classify": lambda folder: objects(folder / "reviews.jsonl", labelled(), "text", "label"),
    "embed": lambda folder: table(folder / "pairs.tsv", pairs()),
    "lm": lambda folder: (folder / "book.txt", (folder / "book.txt").write_text("\n\n".join(sentences(80))))[0],
    "mae": lambda folder: pictures(folder / "small.csv"),
    "copy": lambda folder: None,
}


def trained(text, folder, steps=2):
    tree = tomllib.loads(text)
    tree["train"] |= {"steps": steps, "evaluate_rows": 4}
    ready = made_ready(read_run(tree))
    assert list(train(ready, folder))[-1] == Ended(steps, "steps")
    return ready


@pytest.mark.parametrize("task", TASKS)
def test_what_is_advised_trains_and_says_what_is_so(task, tmp_path):
    path = FILES[task](tmp_path)
    text, reasons = new(task, path)
    ready = trained(text, tmp_path / "run")
    whole = made_ready(read_run(tomllib.loads(text)))
    steps, passes, rows = re.search(r"# ([\d,]+) steps, ([\d.e+]+) passes over ([\d,]+) rows", text).groups()
    assert int(steps.replace(",", "")) == whole.run.train.steps
    assert int(rows.replace(",", "")) == len(whole.rows)
    assert float(passes) == pytest.approx(whole.run.train.steps / len(Stream(whole).order()), rel=0.01)
    assert f"{sum(one.numel() for one in build(ready.spec).parameters()):,} parameters" in text
    assert ready.corpus.about == reasons[0]
    assert f"# {reasons[0]}" in text
    assert all(f"# {reason}" in text for reason in reasons)
    assert max(map(len, text.splitlines())) < 250


@pytest.mark.parametrize(
    ("task", "shape"),
    [("lm", "encoder"), ("lm", "recurrent"), ("lm", "ngram"), ("classify", "decoder"), ("translate", "recurrent")],
)
def test_another_shape_than_the_advised_trains_too(task, shape, tmp_path):
    text, reasons = new(task, FILES[task](tmp_path), shape=shape)
    assert trained(text, tmp_path / "run").spec.shape == shape
    assert "as was said; advised is" in reasons[1]


def test_two_commands_from_a_file_nobody_prepared(tmp_path):
    table(tmp_path / "whatever.tsv", pairs(), "english", "shouted")
    done = run("new", "translate", "whatever.tsv", "--output", "run.toml", cwd=tmp_path)
    assert done.stdout == ""
    assert "57 pairs to learn from" in done.stderr
    assert tomllib.loads((tmp_path / "run.toml").read_text())["data"]["fields"] == ["english", "shouted"]
    run("train", "run.toml", "--output", "runs/x", "-s", "train.steps=2", cwd=tmp_path)
    assert (tmp_path / "runs" / "x" / "checkpoints" / "step-00000002").is_dir()
    before = (tmp_path / "run.toml").read_text()
    assert "is there already" in run("new", "copy", "--output", "run.toml", cwd=tmp_path, check=2).stderr
    assert (tmp_path / "run.toml").read_text() == before
    printed = run("new", "translate", "whatever.tsv", "--fields", "shouted,english", "--minutes", "0.001", cwd=tmp_path)
    assert tomllib.loads(printed.stdout)["data"]["fields"] == ["shouted", "english"]
    assert "decided, more steps may be better" in printed.stderr


COLUMNS = {
    "no header": (lambda path: table(path / "a.tsv", pairs()), PairsSpec, None),
    "a header of its own": (lambda path: table(path / "a.tsv", pairs(), "en", "loud"), PairsSpec, ("en", "loud")),
    "a usual header": (lambda path: table(path / "a.tsv", pairs(), "source", "target"), PairsSpec, None),
    "single words": (lambda path: table(path / "a.tsv", [(a, a.upper()) for a in WORDS]), PairsSpec, None),
    "objects": (lambda path: objects(path / "a.jsonl", pairs(), "en", "loud"), PairsSpec, ("en", "loud")),
    "a class first": (lambda path: table(path / "a.tsv", [(b, a) for a, b in labelled()]), LabelsSpec, (1, 0)),
    "a class last": (lambda path: table(path / "a.tsv", labelled()), LabelsSpec, None),
    "a class in a header": (lambda path: table(path / "a.tsv", [(b, a) for a, b in labelled()], "stars", "review"), LabelsSpec, ("review", "stars")),
    "a class as a number": (
        lambda path: objects(path / "a.jsonl", [(i % 2, text) for i, text in enumerate(sentences(9))], "y", "x"), LabelsSpec, ("x", "y"),
    ),
    "a number before two texts": (
        lambda path: objects(path / "a.jsonl", [("1", a, b) for a, b in pairs()], "id", "en", "loud"), PairsSpec, ("en", "loud"),
    ),
    "no objects": (lambda path: (path / "a.jsonl", (path / "a.jsonl").write_text("[1]\n"))[0], PairsSpec, None),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_found_where_nobody_says_them(name, tmp_path):
    make, spec, fields = COLUMNS[name]
    assert columns_of(make(tmp_path), spec).fields == fields


def test_a_class_is_found_by_its_name_and_is_never_one_value(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"sentence": f"some words {i}", "stars": str(i % 5), "source": "here"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert columns_of(path, LabelsSpec).fields == ("sentence", "stars")
    path.write_text("".join(json.dumps(row | {"label": str(i % 7)}) + "\n" for i, row in enumerate(rows)))
    assert columns_of(path, LabelsSpec).fields == ("sentence", "label")


def test_a_class_is_found_in_a_file_that_is_sorted_by_it(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("review\tsite\tstars\n" + "".join(f"some words {i}\t{i % 4}\t{i // 1500}\n" for i in range(3000)))
    assert columns_of(path, LabelsSpec).fields == ("review", "stars")


def test_a_column_with_the_right_name_is_taken_and_what_is_wrong_in_it_is_said(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"title": f"title {i}", "text": f"some words {i}", "label": None if i == 7 else "ab"[i % 2]} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="line 8, label holds None, expected a text"):
        new("classify", path, minutes=0.05)


def test_a_first_line_that_may_name_columns_is_said_to_be_a_row(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("in words\tin digits\n" + "".join(f"some words {i}\tother words {i}\n" for i in range(40)))
    assert "the first line is a row" in new("translate", path, minutes=0.05)[0]
    path.write_text("one,two\nthree,four\n")
    with pytest.raises(DataError, match="separated by tabs, not by commas"):
        new("translate", path, minutes=0.05)


def test_a_header_is_found_where_whoever_reads_the_file_finds_it(tmp_path):
    path = tmp_path / "a.tsv"
    rows = (f"{i % 5}\t{f'some words {i}' if i < 1000 or i % 4 else f'word{i}'}\n" for i in range(5000))
    path.write_text("stars\treview\n" + "".join(rows))
    found = columns_of(path, LabelsSpec)
    assert found.fields == ("review", "stars")
    assert LabelsSpec(path=str(path), fields=found.fields).load().labels() == tuple("01234")


def test_columns_said_by_number_leave_a_header_out(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("id\tsentence\tlabel\n" + "".join(f"{i}\tsome words {i}\t{i % 3}\n" for i in range(60)))
    text, _ = new("classify", path, fields="1,2", minutes=0.05)
    assert tomllib.loads(text)["data"]["fields"] == ["sentence", "label"]
    assert "which are 3" in text
    path.write_text("".join(f"{i}\tsome words {i}\t{i % 3}\n" for i in range(60)))
    assert tomllib.loads(new("classify", path, fields="1,2", minutes=0.05)[0])["data"]["fields"] == [1, 2]


def test_what_is_odd_about_data_is_refused_or_said(tmp_path):
    path, pipe = tmp_path / "a.tsv", tmp_path / "pipe"
    path.write_text("".join(f"word {i}\tother {i}\n" for i in range(30)))
    os.mkfifo(pipe)
    for refused in (lambda: new("translate", pipe), PairsSpec(path=str(pipe)).load):
        with pytest.raises(DataError, match="is no file but a stream"):
            refused()
    same = PairsSpec(path=str(path), validation=str(tmp_path / "." / "a.tsv")).load()
    assert same.about.endswith("; those to validate are the same that are learned from")
    path.write_text("".join(f"word {i}\t{'' if i % 3 else 'other'}\n" for i in range(30)))
    assert "20 lines with a text that is empty" in PairsSpec(path=str(path)).load().about


def test_columns_that_may_mean_anything_are_asked_for(tmp_path):
    path = objects(tmp_path / "a.jsonl", [("a b", a, b) for a, b in pairs()], "id", "en", "loud")
    with pytest.raises(DataError, match="has id, en, loud: say which are source and target, such as --fields en,loud"):
        new("translate", path)
    assert tomllib.loads(new("translate", path, fields="en,loud")[0])["data"]["fields"] == ["en", "loud"]


def test_what_cannot_be_followed_is_one_sentence(tmp_path):
    path = table(tmp_path / "a.tsv", pairs())
    broken = tmp_path / "b.tsv"
    broken.write_bytes(b"caf\xe9\tcoffee\n")
    for sentence, kind, arguments in (
        ("no task 'translatte': did you mean 'translate'", SpecError, ("translatte",)),
        ("--shape is 'decoder', and translate is learned by encoder–decoder or recurrent", SpecError, ("translate", path, "decoder")),
        ("copy makes its own data", SpecError, ("copy", path)),
        ("--fields are the columns of a file", SpecError, ("copy", None, None, "a,b")),
        ("expected 2 columns", SpecError, ("translate", path, None, "a")),
        ("60 texts have 60 different classes", DataError, ("classify", table(tmp_path / "c.tsv", [(a, a) for a, _ in pairs()]))),
        ("line 1 is not UTF-8", DataError, ("translate", broken)),
        ("cannot read", DataError, ("translate", tmp_path / "none.tsv")),
        ("holds no pairs", DataError, ("translate", table(tmp_path / "d.tsv", []))),
        ("too few to hold one out", DataError, ("translate", table(tmp_path / "e.tsv", pairs(1)))),
        ("expected at least 2, separated by tabs", DataError, ("translate", table(tmp_path / "f.tsv", [("one",), ("two",)]))),
    ):
        names = ("shape", "fields")
        options = {name: value for name, value in zip(names, arguments[2:], strict=False) if value is not None}
        with pytest.raises(kind, match=re.escape(sentence)):
            new(*arguments[:2], **options)
    with pytest.raises(SpecError, match="minutes"):
        new("copy", minutes=0)
    assert run("new", "translate", broken, check=3).stdout == ""


@pytest.mark.parametrize("value", ['a"b\\c\n\x7f\x00é', 3e-3, True, {"kind": "x", "deep": {"y": [1, "z"]}}, ["a", 1], 12])
def test_what_is_written_is_read_the_same(value):
    assert tomllib.loads(f"value = {inline(value)}")["value"] == value


def test_a_book_without_an_end_is_cut_into_rows(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(" ".join(sentences(1500)))
    text, _ = new("lm", path)
    assert tomllib.loads(text)["train"]["pack"] == 512
    trained(text, tmp_path / "run")
    path.write_text(" ".join(sentences(6000)))
    with pytest.raises(DataError, match="the longest row has"):
        new("lm", path, shape="recurrent")


def test_a_few_long_rows_are_cut_and_counted(tmp_path):
    long = " ".join(sentences(280))
    text, _ = new("translate", table(tmp_path / "a.tsv", [*pairs(6000), (f"{long} a", long), (f"{long} b", long)]))
    tree = tomllib.loads(text)
    assert "rows are longer, and their ends are left out" in text
    assert tree["train"]["longest"] <= tree["train"]["tokens"]
    ready = made_ready(read_run(tree))
    assert f"{ready.cut[0]:,} of {len(ready.rows):,} rows" in text


def test_more_data_gets_a_larger_model(tmp_path):
    small, large = (tomllib.loads(new("translate", table(tmp_path / f"{count}.tsv", pairs(count)))[0]) for count in (60, 12_000))
    assert small["tokenizer"].get("size", 256) < large["tokenizer"]["size"]
    assert small["train"]["tokens"] <= large["train"]["tokens"]
