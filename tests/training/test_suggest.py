"""`manyheads new`: the run file parses and trains, and its comments are true."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from command import error_of, run
from raising import raises
from small_checkpoints import assert_close, folder_of
from small_runs import described, end_of

import manyheads
from manyheads import build
from manyheads.data.source import DataSpec
from manyheads.spec import override, to_inline_toml
from manyheads.tasks.suggestion import SIZES
from manyheads.tasks.task import TaskSpec
from manyheads.training.batches import BatchStream, row_lengths
from manyheads.training.estimate import SpeedEstimate, measure_speed, typical_seconds
from manyheads.training.events import Step
from manyheads.training.loop import train_events
from manyheads.training.preparation import prepare
from manyheads.training.resources import estimate_resources
from manyheads.training.run import read_run
from manyheads.training.suggest import USEFUL_STEPS, VOCAB_SIZES, suggest_run

WORDS = [
    "the",
    "a",
    "red",
    "blue",
    "small",
    "old",
    "cat",
    "dog",
    "house",
    "tree",
    "sees",
    "likes",
    "finds",
    "under",
    "over",
    "near",
]


def sentences(count, seed=0, words=(3, 9)):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(*words))) + f" {i}." for i in range(count)]


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


def images(path):
    rows = np.random.default_rng(0).integers(0, 255, (80, 16)).tolist()
    path.write_text("".join(",".join(map(str, [*row, i % 3])) + "\n" for i, row in enumerate(rows)))
    return path


def book(path):
    path.write_text("\n\n".join(sentences(80)))
    return path


FILES = {
    "seq2seq": lambda folder: table(folder / "pairs.tsv", pairs()),
    "translate": lambda folder: table(folder / "whatever.tsv", pairs()),
    "summarise": lambda folder: objects(
        folder / "docs.jsonl", [(short, long * 3) for long, short in pairs()], "abstract", "body"
    ),
    "classify": lambda folder: objects(folder / "reviews.jsonl", labelled(), "text", "label"),
    "retrieval": lambda folder: table(folder / "pairs.tsv", pairs()),
    "causal": lambda folder: book(folder / "book.txt"),
    "masked": lambda folder: book(folder / "book.txt"),
    "spans": lambda folder: book(folder / "book.txt"),
    "infill": lambda folder: book(folder / "book.txt"),
    "mae": lambda folder: images(folder / "small.csv"),
    "copy": lambda folder: None,
}
FEW = {"copy": ["data.count=300"], "translate": ["data.count=300"]}  # rows, of those that are generated


def trained(text, folder, steps=2):
    tree = tomllib.loads(text)
    tree["train"] |= {"steps": steps, "eval_rows": 4}
    run = prepare(read_run(tree))
    assert end_of(list(train_events(run, folder))) == (steps, "steps")
    return run


@pytest.mark.parametrize("task", FILES)
def test_the_suggested_run_trains_and_its_comments_are_true(task, tmp_path):
    path = FILES[task](tmp_path)
    text, reasons = suggest_run(task, path, overrides=FEW[task] if path is None else (), minutes=0.05)
    run = trained(text, tmp_path / "run")
    whole = prepare(read_run(tomllib.loads(text)))
    steps, epochs, rows = re.search(r"# ([\d,]+) steps, ([\d.e+]+) epochs of ([\d,]+) rows", text).groups()
    assert int(steps.replace(",", "")) == whole.spec.train.steps
    assert int(rows.replace(",", "")) == len(whole.train_dataset)
    assert float(epochs) == pytest.approx(whole.spec.train.steps / len(BatchStream(whole).loader()), rel=0.01)
    assert f"{sum(parameter.numel() for parameter in build(run.model_spec).parameters()):,} parameters" in text
    assert run.corpus.description == reasons[0]
    assert f"# {reasons[0]}" in text
    assert all(f"# {reason}" in text for reason in reasons)
    assert max(map(len, text.splitlines())) < 250


def built_in_tasks():
    """Without those of other tests."""
    return {kind: spec for kind, spec in TaskSpec.kinds.items() if spec.__module__.startswith("manyheads.")}


def test_every_task_has_data_of_its_own_and_is_tried_on_a_file():
    assert built_in_tasks().keys() == FILES.keys()
    for kind, spec in built_in_tasks().items():
        assert DataSpec.from_config(spec.default_data), kind
        assert spec.file_kind in DataSpec.kinds, kind


@pytest.mark.parametrize("task", ["copy", "translate", "mae"])
def test_without_a_file_the_suggested_run_reads_the_data_of_the_task(task):
    """The other tasks read the documentation of Python, which takes longer."""
    text, _ = suggest_run(task, minutes=0.01, overrides=FEW.get(task, ()))
    spec = read_run(tomllib.loads(text))
    expected = override({"data": TaskSpec.kinds[task].default_data}, FEW.get(task, ()))["data"]
    assert (spec.task.kind, spec.data) == (task, DataSpec.from_config(expected))


def test_spans_get_a_sentinel_per_span_of_the_longest_text(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("\n\n".join(" ".join(sentences(count)) for count in (60, 130, 90)))
    text, _ = suggest_run("spans", path, minutes=0.01)
    assert TaskSpec.kinds["spans"]().num_sentinels < tomllib.loads(text)["task"]["num_sentinels"] < 300
    trained(text, tmp_path / "run")


@pytest.mark.parametrize(
    ("task", "architecture"),
    [
        ("causal", "recurrent"),
        ("causal", "ngram"),
        ("classify", "decoder"),
        ("translate", "recurrent"),
        ("spans", "recurrent"),
        ("infill", "recurrent"),
    ],
)
def test_another_architecture_than_the_usual_trains_too(task, architecture, tmp_path):
    text, reasons = suggest_run(task, FILES[task](tmp_path), architecture=architecture, minutes=0.01)
    assert trained(text, tmp_path / "run").model_spec.architecture == architecture
    assert architecture in reasons[1]
    assert TaskSpec.kinds[task].architectures[0] in reasons[1]


def test_new_and_train_make_a_model_of_a_file_and_new_replaces_no_run_file(tmp_path):
    table(tmp_path / "whatever.tsv", pairs(), "english", "shouted")
    done = run("new", "translate", "whatever.tsv", "--output", "run.toml", cwd=tmp_path)
    assert done.stdout == ""
    assert "57" in done.stderr
    assert tomllib.loads((tmp_path / "run.toml").read_text())["data"]["columns"] == ["english", "shouted"]
    run("train", "run.toml", "--output", "runs/x", "-s", "train.steps=2", cwd=tmp_path)
    assert (tmp_path / "runs" / "x" / "checkpoints" / "step-00000002").is_dir()
    before = (tmp_path / "run.toml").read_text()
    done = run("new", "copy", "--output", "run.toml", "--json", cwd=tmp_path, check=2)
    assert json.loads(done.stderr)["error"]["code"] == "usage.output-exists"
    assert (tmp_path / "run.toml").read_text() == before
    printed = run(
        "new", "translate", "whatever.tsv", "--columns", "shouted,english", "--minutes", "0.001", cwd=tmp_path
    )
    assert tomllib.loads(printed.stdout)["data"]["columns"] == ["shouted", "english"]
    assert tomllib.loads(printed.stdout)["train"]["steps"] < 400  # the time decides


def spreadsheet(rows, delimiter):
    """As a spreadsheet saves it: cells with a delimiter, a quote or a line break are in quotes."""
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows(rows)
    return text.getvalue()


SPREADSHEETS = {
    "commas.csv": (",", "utf-8-sig", lambda i, text: (i, f'{text}, "quoted"\nand more')),
    "decimals.csv": (";", "utf-8", lambda i, text: (f"{i},5", f"{text}; it costs {i},50")),
    "unicode.txt": ("\t", "utf-16", lambda i, text: (i, f"«{text}»")),
}


@pytest.mark.parametrize("name", SPREADSHEETS)
def test_a_file_saved_from_a_spreadsheet_is_trained_evaluated_and_used_in_four_commands(name, tmp_path):
    delimiter, encoding, cells = SPREADSHEETS[name]
    rows = [(*cells(i, text), label) for i, (text, label) in enumerate(labelled())]
    content = spreadsheet([("Nr.", "Review Text", "Verdict (final)"), *rows], delimiter)
    (tmp_path / name).write_bytes(content.encode(encoding))
    done = run("new", "classify", name, "--output", "run.toml", "--minutes", "0.01", cwd=tmp_path)
    for value in ("-separated", "'Review Text', 'Verdict (final)'", "header"):
        assert value in done.stderr
    run("train", "run.toml", "--output", "runs/x", "-s", "train.steps=2", "-s", "train.eval_rows=4", cwd=tmp_path)
    report = json.loads(run("evaluate", "runs/x", "--data", name, "--json", cwd=tmp_path).stdout)
    assert report["rows"] == 60
    assert run("predict", "runs/x", rows[0][1], cwd=tmp_path).stdout.split()[-1] in ("long", "short")


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_the_texts_of_a_table_are_learned_one_by_one(task, tmp_path):
    path = objects(tmp_path / "a.jsonl", [(str(i), text) for i, text in enumerate(sentences(60))], "id", "said")
    text, reasons = suggest_run(task, path, minutes=0.01)
    assert tomllib.loads(text)["data"]["columns"] == ["said"]
    assert "57 training, 3 validation" in reasons[0]


def test_what_is_detected_about_a_file_is_reported_and_can_be_overridden(tmp_path):
    path = table(tmp_path / "a.tsv", labelled(), "Review Text", "Verdict")
    text, reasons = suggest_run("classify", path, minutes=0.01)
    assert len(prepare(read_run(tomllib.loads(text))).labels) == 2
    assert "header = false" in reasons[0]
    text, reasons = suggest_run("classify", path, overrides=["data.header=false"], minutes=0.01)
    assert tomllib.loads(text)["data"]["header"] is False
    assert "'Verdict' 1" in reasons[0]  # a class with one row
    text, _ = suggest_run("causal", book(tmp_path / "book.txt"), overrides=["data.document='line'"], minutes=0.01)
    assert tomllib.loads(text)["data"]["document"] == "line"
    with raises("usage.argument", "train.steps=3"):
        suggest_run("classify", path, overrides=["train.steps=3"])


def test_a_value_that_is_no_text_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [
        {"title": f"title {i}", "text": f"some words {i}", "label": None if i == 7 else "ab"[i % 2]} for i in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with raises("data.row", "line 8", "label"):
        suggest_run("classify", path, minutes=0.05)


def test_columns_given_by_number_leave_a_header_out(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("id\tsentence\tlabel\n" + "".join(f"{i}\tsome words {i}\t{i % 3}\n" for i in range(60)))
    text, _ = suggest_run("classify", path, columns="1,2", minutes=0.05)
    assert tomllib.loads(text)["data"]["columns"] == ["sentence", "label"]
    assert len(prepare(read_run(tomllib.loads(text))).labels) == 3
    path.write_text("".join(f"{i}\tsome words {i}\t{i % 3}\n" for i in range(60)))
    assert tomllib.loads(suggest_run("classify", path, columns="1,2", minutes=0.05)[0])["data"]["columns"] == [1, 2]


def test_a_pipe_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with raises("data.file", "pipe"):
        suggest_run("translate", tmp_path / "pipe")


def test_ambiguous_columns_are_asked_for(tmp_path):
    path = objects(tmp_path / "a.jsonl", [("a b", a, b) for a, b in pairs()], "id", "en", "loud")
    with raises("data.columns", "id", "en", "loud"):
        suggest_run("translate", path)
    assert tomllib.loads(suggest_run("translate", path, columns="en,loud", minutes=0.01)[0])["data"]["columns"] == [
        "en",
        "loud",
    ]


def test_wrong_arguments_and_data_have_codes(tmp_path):
    path = table(tmp_path / "a.tsv", pairs())
    broken = tmp_path / "b.tsv"
    broken.write_bytes(b"caf\xe9\tcoffee\n")
    same = table(tmp_path / "c.tsv", [(text, text) for text, _ in pairs()])
    for code, value, arguments, options in (
        ("usage.argument", "'translate'", ("translatte",), {}),
        ("usage.argument", "recurrent", ("translate", path), {"architecture": "decoder"}),
        ("usage.argument", "copy", ("copy", path), {}),
        ("usage.argument", "--columns", ("copy",), {"columns": "a,b"}),
        ("config.incompatible", "2 columns", ("translate", path), {"columns": "a"}),
        ("data.label", "60", ("classify", same), {}),
        ("data.encoding", "line 1", ("translate", broken), {}),
        ("data.file", "none.tsv", ("translate", tmp_path / "none.tsv"), {}),
        ("data.empty", "d.tsv", ("translate", table(tmp_path / "d.tsv", [])), {}),
        ("data.empty", "e.tsv", ("translate", table(tmp_path / "e.tsv", pairs(1))), {}),
        ("data.row", "f.tsv", ("translate", table(tmp_path / "f.tsv", [("one",), ("two",)])), {}),
        ("usage.argument", "minutes", ("copy",), {"minutes": 0}),
    ):
        with raises(code, value):
            suggest_run(*arguments, **options)
    assert run("new", "translate", broken, check=3).stdout == ""


@pytest.mark.parametrize(
    "value", ['a"b\\c\n\x7f\x00é', 3e-3, True, {"kind": "x", "deep": {"y": [1, "z"]}}, ["a", 1], 12]
)
def test_a_value_comes_back_from_toml(value):
    assert tomllib.loads(f"value = {to_inline_toml(value)}")["value"] == value


def test_a_long_text_is_split_into_rows(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(" ".join(sentences(1500)))
    text, _ = suggest_run("causal", path, minutes=0.01)
    assert tomllib.loads(text)["train"]["pack"] == 512
    trained(text, tmp_path / "run")


def test_a_long_text_that_cannot_be_packed_is_split_into_pieces(tmp_path):
    path, text = tmp_path / "book.txt", " ".join(sentences(300, words=(30, 40)))
    path.write_text(text)
    toml, _ = suggest_run("spans", path, minutes=0.01)
    run = trained(toml, tmp_path / "run")
    rows = [row for rows in run.corpus.splits.values() for (row,) in rows]
    assert sorted(rows) == sorted(set(rows))
    assert sum(map(len, rows)) == len(text)
    assert max(map(len, rows)) <= tomllib.loads(toml)["data"]["max_document_length"]


def test_a_few_long_rows_are_truncated_and_counted(tmp_path):
    long = " ".join(sentences(280))
    text, _ = suggest_run(
        "translate", table(tmp_path / "a.tsv", [*pairs(3000), (f"{long} a", long), (f"{long} b", long)])
    )
    tree = tomllib.loads(text)
    assert tree["train"]["max_length"] <= tree["train"]["batch_tokens"]
    run = prepare(read_run(tree))
    assert f"{run.num_truncated[0]:,} of {len(run.train_dataset):,} rows" in text


def test_a_batch_has_room_for_the_longest_row_and_little_more(tmp_path):
    """However few the rows are; the batches of short rows have 512 tokens."""
    words, short = 130, tomllib.loads(suggest_run("classify", table(tmp_path / "a.tsv", labelled()), minutes=0.01)[0])
    long = [(" ".join([text] * (words // len(text.split()))), label) for text, label in labelled(30)]
    tree = tomllib.loads(suggest_run("classify", table(tmp_path / "b.tsv", long), minutes=0.01)[0])
    longest = int(row_lengths(prepare(read_run(tree)), prepare(read_run(tree)).train_dataset).sum(1).max())
    assert short["train"]["batch_tokens"] == 512 < longest <= tree["train"]["batch_tokens"] < longest + 64


def test_more_data_gets_a_larger_model(tmp_path):
    small, large = (
        tomllib.loads(suggest_run("translate", table(tmp_path / f"{count}.tsv", pairs(count)))[0])
        for count in (60, 2_000)
    )
    assert small["tokenizer"].get("vocab_size", 256) < large["tokenizer"]["vocab_size"] > VOCAB_SIZES[-1][1]
    assert small["train"]["batch_tokens"] <= large["train"]["batch_tokens"]


# ---------------------------------------------------------------------------------------- what is suggested is exported


def exported(task, folder, **options):
    """A run of two steps of what is suggested, with weights that differ from their initial values, and its export."""
    path = FILES[task](folder)
    text, _ = suggest_run(task, path, minutes=0.05, overrides=FEW[task] if path is None else (), **options)
    trained(text, folder / "run")
    ours = manyheads.load(folder / "run", copy=True)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in ours.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    manyheads.export(ours, folder / "hf")
    return ours, folder / "hf"


def batch_of(ours, texts):
    """The batch of texts as both libraries take it: ids and the attention mask."""
    inputs = ours.pad([encoding.ids for encoding in ours.encode(texts)])
    return inputs, {"input_ids": inputs.tokens, "attention_mask": (~inputs.padding_mask).long()}


CLASSES = {
    "causal": "AutoModelForCausalLM",
    "infill": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classify": "AutoModelForSequenceClassification",
    "retrieval": "AutoModel",
    "translate": "AutoModelForSeq2SeqLM",
    "summarise": "AutoModelForSeq2SeqLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "spans": "AutoModelForSeq2SeqLM",
    "copy": "AutoModelForSeq2SeqLM",
}


def test_every_task_of_text_is_exported():
    assert set(CLASSES) == built_in_tasks().keys() - {"mae"}


@pytest.mark.parametrize(
    ("task", "options"), [*((task, {}) for task in CLASSES), ("classify", {"architecture": "decoder"})]
)
def test_transformers_gives_the_same_output_for_what_is_suggested(task, options, tmp_path):
    ours, folder = exported(task, tmp_path, **options)
    theirs, info = getattr(transformers, CLASSES[task]).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    texts = ["3 1 4 1 5", "2 7 1"] if task == "copy" else ["the red cat sees 1.", "a dog"]
    with torch.no_grad():
        check_same_output(task, texts, ours, theirs.eval(), folder)


def check_same_output(task, texts, ours, theirs, folder):
    inputs, batch = batch_of(ours, texts)
    mask = ~inputs.padding_mask
    if task == "retrieval":
        states = theirs(**batch).last_hidden_state.masked_fill(~mask[..., None], 0.0)
        vectors = manyheads.load(folder).embed(texts)
        assert_close(vectors, states.sum(1) / mask.sum(1)[:, None])
        assert_close(vectors, ours.embed(texts))
    elif ours.has_source:
        target = torch.tensor([[1, 6, 7], [1, 8, 2]])
        logits = theirs(**batch, decoder_input_ids=target).logits
        assert_close(ours.logits(inputs.tokens, target, inputs.padding_mask), logits)
    else:
        logits = theirs(**batch).logits
        own = ours.logits(inputs.tokens, padding_mask=inputs.padding_mask)
        assert_close(own, logits, None if task == "classify" else mask)
    names = transformers.AutoTokenizer.from_pretrained(folder)
    assert names(texts, padding=True)["input_ids"] == inputs.tokens.tolist()


@pytest.mark.parametrize("task", ["causal", "infill"])
def test_a_suggested_decoder_is_exported_to_gguf_with_its_tokenizer(task, tmp_path):
    ours, _ = exported(task, tmp_path)
    manyheads.export(ours, tmp_path / "model.gguf", to="gguf")
    again = manyheads.load(tmp_path / "model.gguf")
    text = "the red cat sees 1."
    ids = ours.encode([text])[0].ids
    assert again.tokenizer.encode(text).ids == ids
    assert_close(again.logits(torch.tensor([ids])), ours.logits(torch.tensor([ids])))


# ---------------------------------------------------------------------------------------------- the time and the output


def busy(monkeypatch, **speed):
    """Every step is as slow as on a busy machine."""
    usual = {"step": 100.0, "evaluation": 100.0, "timed_steps": 3}
    monkeypatch.setattr("manyheads.training.suggest.measure_speed", lambda *_, **__: SpeedEstimate(**usual | speed))


def test_however_slow_the_machine_is_a_run_has_a_useful_number_of_steps_and_a_warning(tmp_path, monkeypatch):
    path = FILES["translate"](tmp_path)
    busy(monkeypatch)
    text, reasons = suggest_run("translate", path)
    run = prepare(read_run(tomllib.loads(text)))
    assert run.spec.train.steps >= max(USEFUL_STEPS, len(BatchStream(run).loader()))
    assert "--minutes 30" in reasons[-1]
    assert f"# {reasons[-1]}" in text
    busy(monkeypatch, step=1e-3, evaluation=1e-3)
    assert not any("--minutes" in reason for reason in suggest_run("translate", path)[1])


def test_a_few_interrupted_steps_do_not_change_the_estimate():
    steps = [Step(i, 0.0, 0.0, 0.0, tokens=tokens, seconds=tokens / 1000) for i, tokens in enumerate((900, 1000, 1100))]
    slow = [Step(9, 0.0, 0.0, 0.0, tokens=1000, seconds=50.0), Step(10, 0.0, 0.0, 0.0, tokens=1000, seconds=9.0)]
    assert typical_seconds(steps) == pytest.approx(1.0)
    assert typical_seconds([*steps, *slow]) == pytest.approx(1.0)


@pytest.mark.parametrize("one_thread", [False, True])
def test_timing_leaves_the_number_of_threads_as_it_was(one_thread, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = prepare(read_run(described("seq2seq")))
        assert measure_speed(run, seconds=0.01, one_thread=one_thread).step > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_output_that_cannot_be_written_is_an_error_before_data_is_read(tmp_path):
    """The data does not exist, which is a later error."""
    (tmp_path / "file").write_text("")
    for output, code in (
        ("missing/run.toml", "usage.output"),
        ("file/run.toml", "usage.output"),
        (".", "usage.output"),
        ("file", "usage.output-exists"),
        ("x" * 300, "usage.output"),
        ("", "usage.argument"),
        ("fine.toml", "usage.path-not-found"),
    ):
        error = error_of("new", "translate", "nowhere.tsv", "--output", output, cwd=tmp_path, check=2)
        assert error["code"] == code, output


# ---------------------------------------------------------------------------------------------------------- fine-tuning


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("classify", "bert"),
        ("classify", "gpt2"),
        ("classify", "bert-classes"),
        ("masked", "bert-bare"),
        ("retrieval", "bert"),
        ("causal", "llama"),
        ("causal", "gpt2-classes"),
        ("translate", "t5"),
    ],
)
def test_a_checkpoint_is_fine_tuned_and_exported_in_its_family(task, name, tmp_path):
    folder = folder_of(name, tmp_path / "checkpoint")
    text, reasons = suggest_run(task, word_file(task, tmp_path), init_from=str(folder), minutes=0.05)
    tree = tomllib.loads(text)
    assert tree["init_from"] == str(folder)
    assert "tokenizer" not in tree
    assert tree["optim"]["lr"] < 1e-3
    assert any(str(folder) in reason for reason in reasons)
    run = trained(text, tmp_path / "run")
    assert len(BatchStream(run).loader()) <= tree["train"]["steps"] <= 3 * len(BatchStream(run).loader())
    manyheads.export(tmp_path / "run", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == json.loads((folder / "config.json").read_text())["model_type"]


def word_file(task, folder):
    """The words that the tokenizer of the small checkpoints knows."""
    rng = np.random.default_rng(0)
    texts = [" ".join(f"word{i}" for i in rng.integers(0, 50, rng.integers(3, 9))) for _ in range(60)]
    if task in ("causal", "masked"):
        (folder / "book.txt").write_text("\n\n".join(texts))
        return folder / "book.txt"
    second = ["ab"[i % 2] for i in range(60)] if task == "classify" else texts[::-1]
    return table(
        folder / "data.tsv", [*zip(texts, second, strict=True)], "text", "label" if task == "classify" else "b"
    )


def test_a_checkpoint_that_does_not_fit_the_task_is_an_error_before_data_is_read(tmp_path):
    for name, task, code, options in (
        ("bert", "translate", "config.incompatible", {}),
        ("t5", "causal", "config.incompatible", {}),
        ("vit", "masked", "config.incompatible", {}),
        ("bert", "classify", "usage.argument", {"architecture": "decoder"}),
        ("llama", "causal", "config.incompatible", {"tokenizer": False}),
    ):
        tokenizer = options.pop("tokenizer", True)
        folder = folder_of(name, tmp_path / f"{name}-{task}", tokenizer=tokenizer)
        with raises(code):
            suggest_run(task, tmp_path / "nowhere", init_from=str(folder), **options)
    with raises("usage.path-not-found"):
        suggest_run("causal", tmp_path / "nowhere", init_from=str(tmp_path / "none"))


@pytest.fixture
def little_memory(monkeypatch):
    real = estimate_resources
    monkeypatch.setattr(
        "manyheads.training.suggest.estimate_resources",
        lambda *args, **more: replace(real(*args, **more), memory_free=9),
    )


def test_with_little_memory_the_smallest_model_is_suggested(tmp_path, little_memory):
    text, _ = suggest_run("causal", word_file("causal", tmp_path), minutes=0.05)
    decoder = tomllib.loads(text)["model"]["decoder"]
    assert (decoder["layers"], decoder["width"]) == (SIZES[0].layers, SIZES[0].width)


def test_a_checkpoint_that_does_not_fit_into_memory_is_trained_by_lora(tmp_path, little_memory):
    folder = folder_of("llama", tmp_path / "checkpoint")
    text, _ = suggest_run("causal", word_file("causal", tmp_path), init_from=str(folder), minutes=0.05)
    assert tomllib.loads(text)["lora"]["rank"] > 0
    trained(text, tmp_path / "run")
