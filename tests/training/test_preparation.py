"""Reading a run file opens neither data nor checkpoints; preparing it loads each, once."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from small_checkpoints import folder_of
from small_runs import described, opened_files, train_all
from tokenizers import Tokenizer, models

import manyheads
from manyheads import Checkpoint, build, read
from manyheads.model.spec import ModelSpec
from manyheads.spec import to_toml, to_tree
from manyheads.training.loop import train_events
from manyheads.training.preparation import checkpoint_hash, prepare
from manyheads.training.run import read_run, read_run_file

NOWHERE = "no/such/folder"
PAIRS = {"kind": "pairs", "path": f"{NOWHERE}/pairs.tsv"}
TOKENIZER = {"kind": "file", "path": f"{NOWHERE}/tokenizer.json"}


def without(tree, *names):
    return {name: value for name, value in tree.items() if name not in names}


MISSING = {
    "data": ({"data": PAIRS}, "data.file", "pairs.tsv"),
    "tokenizer": ({"tokenizer": TOKENIZER}, "data.file", "tokenizer.json"),
    "tokenized data": ({"data": {"kind": "tokenized", "path": NOWHERE}}, "data.file", NOWHERE),
    "checkpoint": ({"init_from": NOWHERE, "model": {"encoder": {"layers": 2}}}, "usage.path-not-found", NOWHERE),
    "checkpoint for a whole model": ({"init_from": NOWHERE}, "usage.path-not-found", NOWHERE),
    "everything": ({"init_from": NOWHERE, "data": PAIRS, "tokenizer": TOKENIZER}, "usage.path-not-found", NOWHERE),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_run_is_read_where_its_files_do_not_exist_and_preparing_it_is_an_error(name, tmp_path, monkeypatch):
    changes, code, value = MISSING[name]
    monkeypatch.chdir(tmp_path)
    spec = read_run(described("seq2seq") | changes)
    (tmp_path / "run.toml").write_text(to_toml(to_tree(spec)))
    assert read_run_file(tmp_path / "run.toml") == spec, "what is written is read the same, without the files"
    with raises(code, value):
        prepare(spec)


FILES = {
    "pairs.csv": ("pairs", "a {0},b {0}\n", "seq2seq"),
    "quoted.csv": ("pairs", '"a, {0}","b {0}"\n', "seq2seq"),
    "pairs.tsv": ("pairs", "a {0}\tb {0}\n", "seq2seq"),
    "pairs.jsonl": ("pairs", '{{"source": "a {0}", "target": "b {0}"}}\n', "seq2seq"),
    "text.txt": ("text", "a text {0}\n\n", "causal"),
}


@pytest.mark.parametrize("name", FILES)
def test_data_and_checkpoint_are_loaded_once_and_never_again(name, tmp_path):
    kind, line, task = FILES[name]
    train_all(described(task, steps=1), tmp_path / "first")
    (tmp_path / name).write_text("".join(map(line.format, range(60))))
    changes = {"data": {"kind": kind, "path": str(tmp_path / name)}, "init_from": str(tmp_path / "first")}
    spec = read_run(without(described(task, steps=1), "model", "tokenizer") | changes)
    with opened_files(tmp_path) as loading:
        spec.data.load()
        manyheads.load(tmp_path / "first", verify=True)
    assert loading[name]
    with opened_files(tmp_path) as preparing:
        run = prepare(spec)
    assert preparing == loading
    with opened_files(tmp_path) as training:
        list(train_events(run, tmp_path / "run"))
    assert not training.keys() & loading.keys()


def test_with_init_from_the_model_stays_a_tree_of_overrides_until_the_checkpoint_is_opened(tmp_path):
    train_all(described("seq2seq", steps=1), tmp_path / "first")
    overrides = {"encoder": {"residual": {"dropout": 0.3}}, "head": {"kind": "untied"}}
    tree = without(described("seq2seq"), "tokenizer") | {"init_from": str(tmp_path / "first"), "model": overrides}
    spec = read_run(tree)
    assert not isinstance(spec.model, ModelSpec)
    assert spec.model == overrides == to_tree(spec)["model"]
    assert spec.tokenizer.kind == "checkpoint"
    for table in (spec.model, spec.model["encoder"], spec.replace(seed=2).model):
        with pytest.raises(TypeError):
            table["layers"] = 3
    run = prepare(spec)
    theirs, ours = manyheads.load(tmp_path / "first").spec, run.model_spec
    assert ours.head.kind == "untied" != theirs.head.kind
    assert ours.encoder.residual.dropout == 0.3 != theirs.encoder.residual.dropout
    assert ours.encoder.residual.kind == theirs.encoder.residual.kind, "a table without a kind refines the part"
    assert ours.decoder == theirs.decoder
    assert run.spec.model == overrides, "the spec is not changed"
    assert run.init_checkpoint.spec == theirs


def test_without_a_table_the_model_is_the_checkpoints(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2")
    spec = read_run(without(described("causal"), "model") | {"init_from": str(folder)})
    assert to_tree(spec)["model"] == {}
    assert prepare(spec).model_spec == manyheads.load(folder).spec


@pytest.mark.parametrize(
    ("overrides", "code", "path"),
    [
        ({"encodr": {"layers": 1}}, "config.unknown-key", "model"),
        ({"encoder": {"layrs": 1}}, "config.unknown-key", "model.encoder"),
        ({"encoder": {"width": "wide"}}, "config.wrong-type", "model.encoder.width"),
        ({"head": {"kind": "classes", "classes": 3}}, "config.incompatible", "model.head"),
    ],
)
def test_overrides_that_do_not_fit_the_checkpoint_are_refused_with_their_path(overrides, code, path, tmp_path):
    train_all(described("seq2seq", steps=1), tmp_path / "first")
    tree = without(described("seq2seq"), "tokenizer") | {"init_from": str(tmp_path / "first"), "model": overrides}
    with raises(code) as caught:
        prepare(read_run(tree))
    assert ".".join(map(str, caught.value.path)) == path


def test_the_hash_of_a_checkpoint_depends_on_every_tensor_and_the_tokenizer():
    def checkpoint(tokenizer=None, **changes):
        model = build(read("gpt2", "vocab=9", "decoder.layers=1", "decoder.width=8", "decoder.attention.heads=2"))
        model.register_buffer("own", torch.zeros(3))
        for name, value in changes.items():
            model.state_dict()[name.replace("__", ".")].view(-1)[-1] += value
        return Checkpoint(model, tokenizer)

    whole = checkpoint_hash(checkpoint())
    assert checkpoint_hash(checkpoint()) == whole
    assert checkpoint_hash(checkpoint(own=1.0)) != whole, "a buffer is part of the model"
    assert checkpoint_hash(checkpoint(decoder__norm__weight=1.0)) != whole
    assert checkpoint_hash(checkpoint(Tokenizer(models.BPE()))) != whole


def test_a_run_without_a_model_and_without_a_checkpoint_is_refused():
    for model in ({}, {"model": {}}, {"model": "gpt2"}):
        with raises("config.missing-key", "model"):
            read_run(without(described("causal"), "model") | model)
