"""Rows as ids: equal in memory and on disk, complete or absent, refused if changed; and runs that train on them."""

from __future__ import annotations

import json
import os
import pickle
import tomllib
from functools import partial

import numpy as np
import pytest
from command import FORKS, error_of, run
from data_files import all_rows, load_data, make_tokenizer, write_file
from raising import raises
from small_runs import at_forward
from tokenizers import Tokenizer
from trees import SHE, conllu

from manyheads.data.source import Corpus, LazyRows
from manyheads.data.tokenized import InMemoryDataset, OnDiskDataset, TruncatedDataset, read_at, write_tokenized
from manyheads.spec import to_toml

TEXTS = [
    f"the {adjective} {noun} saw {i} others"
    for i, adjective in enumerate(("old", "größte"))
    for noun in ("cat", "домов")
]


@pytest.fixture(scope="module")
def bpe():
    return make_tokenizer("bpe", TEXTS, vocab_size=270)


@pytest.fixture
def corpus():
    rows = [(text, str(i % 3)) for i, text in enumerate([*TEXTS, "", "x</s>"])]
    return Corpus(("text", "label"), rows, rows[:5], [], "a test")


def as_lists(row):
    return [ids.tolist() for ids in row]


@pytest.mark.parametrize("shard_tokens", [1, 50, 1 << 28])
def test_tokenized_rows_equal_encoded_rows(corpus, bpe, tmp_path, shard_tokens):
    other = Tokenizer.from_str(bpe.to_str())  # which encodes </s> in a text as the special token
    folder = write_tokenized(corpus, other, tmp_path / "deep" / "data", shard_tokens=shard_tokens)
    for split, rows in corpus.splits.items():
        mapped = OnDiskDataset(folder, split, tokenizer=bpe)
        memory = InMemoryDataset(rows, bpe, corpus.fields, corpus.labels())
        assert len(mapped) == len(memory) == len(rows)
        for name in corpus.fields:
            assert mapped.lengths(name).tolist() == memory.lengths(name).tolist()
        for view in (mapped, pickle.loads(pickle.dumps(mapped))):
            for i in reversed(range(len(rows))):
                assert as_lists(view[i]) == as_lists(memory[i])
                assert bpe.decode(view[i][0].tolist()) == rows[i][0]
                assert corpus.labels()[view[i][1].item()] == rows[i][1]
        with pytest.raises(IndexError):
            mapped[len(rows)]


def test_fields_and_classes_can_be_in_another_order(corpus, bpe, tmp_path):
    folder = write_tokenized(corpus, bpe, tmp_path / "data")
    stored, other = OnDiskDataset(folder), OnDiskDataset(folder, fields=("label", "text"), labels=("2", "0", "1"))
    for i in range(len(stored)):
        (ids, label), (other_label, other_ids) = stored[i], other[i]
        assert ids.tolist() == other_ids.tolist()
        assert stored.labels[label.item()] == other.labels[other_label.item()]
    with raises("data.columns", "'source'", "text, label"):
        stored.lengths("source")


def test_preparing_twice_gives_the_same_bits_and_overwrites_nothing(corpus, bpe, tmp_path):
    one, two = (write_tokenized(corpus, bpe, tmp_path / name) for name in "ab")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    files = [{str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.*")} for root in (one, two)]
    assert files[0] == files[1]
    with pytest.raises(ValueError, match=str(one)):
        write_tokenized(corpus, bpe, one)
    index = json.loads(files[0]["index.json"])
    assert (index["vocab"], index["dtype"], index["splits"]["train"]["rows"]) == (270, "uint16", len(corpus.train))


def test_nothing_appears_before_it_is_complete(corpus, bpe, tmp_path):
    def interrupt(i):
        if i == 7:
            raise KeyboardInterrupt
        return corpus.train[i % 5]

    interrupted = Corpus(corpus.fields, LazyRows(interrupt, 9), corpus.validation, [], "a test")
    with pytest.raises(KeyboardInterrupt):
        write_tokenized(interrupted, bpe, tmp_path / "data")
    assert not list(tmp_path.iterdir())


def test_progress_counts_the_rows_of_every_split(corpus, bpe, tmp_path):
    calls = []
    write_tokenized(corpus, bpe, tmp_path / "data", progress=lambda *values: calls.append(values))
    assert calls == [("train", 0, 6), ("train", 6, 6), ("validation", 0, 5), ("validation", 5, 5), ("test", 0, 0)]


def test_changed_files_and_another_tokenizer_are_refused(corpus, bpe, tmp_path):
    folder = write_tokenized(corpus, bpe, tmp_path / "data")
    with raises("data.tokenized", folder, "270 tokens"):
        OnDiskDataset(folder, tokenizer=make_tokenizer("bytes"))
    with raises("data.tokenized", folder, "'dev'"):
        OnDiskDataset(folder, "dev")
    for name in ("shard-00000.bin", "docs.idx"):
        path = folder / "train" / name
        content = path.read_bytes()
        for broken in (content[:-1], content + b"\0", bytes([content[0] ^ 1]) + content[1:]):
            path.write_bytes(broken)
            with raises("data.tokenized", path):
                OnDiskDataset(folder)
        path.unlink()
        with raises("data.tokenized", path):
            OnDiskDataset(folder)
        path.write_bytes(content)
    OnDiskDataset(folder)
    for content in (b"", b"{", b"[]", b'{"schema": 2}', b'{"schema": 1}', b'{"schema": 1, "splits": {"train": 3}}'):
        (folder / "index.json").write_bytes(content)
        with raises("data.tokenized", folder / "index.json"):
            OnDiskDataset(folder)
    with raises("data.tokenized", tmp_path / "none"):
        OnDiskDataset(tmp_path / "none")


def test_fields_without_token_ids_are_not_tokenized(tmp_path):
    tree = write_file(tmp_path, "t.conllu", conllu(SHE, [("1", "Yes", "0")]))
    pairs = write_file(tmp_path, "p.tsv", "".join(f"a {i}\t{i} a\t0-1 1-0\n" for i in range(9)))
    image = Corpus(("image", "label"), [(np.ones((2, 2)), "a")], [], [], "a test")
    candidates = Corpus(("query", "document"), [("a", "b")], [], [], "a test", candidates=("b", "c"))
    corpora = {
        "arcs": load_data("conllu", path=tree),
        "alignment": load_data("pairs", path=pairs, columns=["source", "target", "alignment"]),
        "image": image,
        "documents": candidates,  # a query would be evaluated against fewer
    }
    for value, corpus in corpora.items():
        with raises("data.tokenized", value):
            write_tokenized(corpus, make_tokenizer("bytes"), tmp_path / "tokenized")


def test_images_need_no_tokenizer_and_an_unknown_label_is_named():
    rows = [(np.ones((2, 2)), "a")]
    assert InMemoryDataset(rows, None, ("image", "label"), ["a"])[0][0].shape == (2, 2)
    with raises("data.label", "'a'"):
        InMemoryDataset(rows, None, ("image", "label"), ["b"])


def test_truncated_rows_keep_their_beginning_and_report_their_length():
    tokenizer = make_tokenizer("words", ["a b c d e f g"])
    rows = InMemoryDataset([("a b c d e", "f g"), ("a", "a b c d e f g")], tokenizer, ("source", "target"))
    truncated = TruncatedDataset(rows, {"source": 3, "target": 4})
    assert truncated.num_truncated == 2
    for name, max_length, column in (("source", 3, 0), ("target", 4, 1)):
        for i in (0, 1):
            assert truncated[i][column].tolist() == rows[i][column][:max_length].tolist()
        assert truncated.lengths(name).tolist() == [len(truncated[i][column]) for i in (0, 1)]


def test_tokenized_classes_and_texts_are_those_of_the_source(tmp_path):
    rows = [(f"word {'ab'[i % 2]} {i}", "yes" if i % 2 else "no") for i in range(60)]
    path = write_file(tmp_path, "labels.tsv", "".join(f"{text}\t{label}\n" for text, label in rows))
    source = load_data("labels", path=path)
    write_tokenized(source, make_tokenizer("words", [text for text, _ in rows]), tmp_path / "ids")
    tokenized = load_data("tokenized", path=str(tmp_path / "ids"))
    assert tokenized.labels() == source.labels() == ("no", "yes")
    assert tokenized.description == source.description
    assert all_rows(tokenized) == all_rows(source)
    for split, part in tokenized.splits.items():
        assert list(part) == list(source.splits[split])


# --- in a run ---


def run_tree(data, **tables):
    stack = {"layers": 1, "width": 16, "attention": {"kind": "heads", "heads": 2}}
    decoder = {"like": "encoder", "embed": "shared", "cross": True}
    return {
        "model": {"vocab": "tokenizer", "encoder": stack, "decoder": decoder},
        "data": data,
        "task": {"kind": "seq2seq"},
        "train": {"steps": 3, "batch_tokens": 200, "eval_rows": 20},
    } | tables


def losses(tree, folder):
    from manyheads.training.loop import train_events
    from manyheads.training.preparation import prepare
    from manyheads.training.run import read_run

    events = train_events(prepare(read_run(tree)), folder)
    return [getattr(event, "loss", None) or getattr(event, "metrics", None) for event in events if is_measured(event)]


def is_measured(event):
    return type(event).__name__ in ("Step", "Evaluated")


SEQUENCE = {"kind": "sequence", "function": "reverse", "count": 300, "validation_count": 40}


@pytest.mark.parametrize("tables", [{}, {"tokenizer": {"kind": "bpe", "vocab_size": 270}}], ids=["words", "bpe"])
def test_training_on_tokenized_rows_gives_the_same_bits(tables, tmp_path):
    source = run_tree(SEQUENCE, **tables)
    (tmp_path / "run.toml").write_text(to_toml(source))
    done = run("data", "prepare", tmp_path / "run.toml", "--output", tmp_path / "ids")
    assert done.stdout == ""
    assert "300" in done.stderr
    ids = {"kind": "tokenized", "path": str(tmp_path / "ids")}
    expected = losses(source, tmp_path / "texts")
    assert expected
    assert losses(run_tree(ids), tmp_path / "without") == expected
    assert losses(run_tree(ids, **tables), tmp_path / "with") == expected
    # the run.toml of a run folder can be trained again
    assert losses(tomllib.loads((tmp_path / "without" / "run.toml").read_text()), tmp_path / "again") == expected


def test_tokenized_rows_are_refused_with_another_tokenizer(tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(run_tree(SEQUENCE)))
    run("data", "prepare", tmp_path / "run.toml", "--output", tmp_path / "ids")
    other = run_tree({"kind": "tokenized", "path": str(tmp_path / "ids")}, tokenizer={"kind": "bytes"})
    (tmp_path / "other.toml").write_text(to_toml(other))
    done = run("train", tmp_path / "other.toml", "--output", tmp_path / "run", check=3)
    assert str(tmp_path / "ids") in done.stderr
    assert "21 tokens" in done.stderr
    assert not (tmp_path / "run").exists()
    run("data", "prepare", tmp_path / "run.toml", "--output", tmp_path / "ids", check=2)


def change_file(path, change):
    size = path.stat().st_size
    with path.open("r+b") as file:
        if change == "truncated":
            file.truncate(size // 2)
        elif change == "other ids":
            file.seek(4)
            file.write(b"\7\0\7\0")
        else:
            file.write(b"\xff" * size)


SHORT_EPOCHS = {"steps": 30, "batch_tokens": 4000, "eval_rows": 20, "eval_every": 5}


@pytest.mark.parametrize("name", ["train/shard-00000.bin", "train/docs.idx", "validation/shard-00000.bin"])
@pytest.mark.parametrize("change", ["truncated", "other ids", "ids out of range"])
def test_tokenized_data_that_changes_under_a_run_is_an_error_by_the_next_epoch(change, name, tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(run_tree(SEQUENCE, train=SHORT_EPOCHS)))
    run("data", "prepare", tmp_path / "run.toml", "--output", tmp_path / "ids")
    data = ("-s", f"data={{kind='tokenized', path='{tmp_path / 'ids'}'}}")
    before = partial(at_forward, {3: partial(change_file, tmp_path / "ids" / name, change)})
    error = error_of("train", tmp_path / "run.toml", "--output", tmp_path / "run", *data, check=3, before=before)
    assert error["code"] == "data.tokenized"
    assert str(tmp_path / "ids" / name.partition("/")[0]) in error["message"]


def test_no_checkpoint_is_saved_after_training_on_changed_rows(tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(run_tree(SEQUENCE)))  # less than an epoch
    run("data", "prepare", tmp_path / "run.toml", "--output", tmp_path / "ids")
    data = ("-s", f"data={{kind='tokenized', path='{tmp_path / 'ids'}'}}")
    before = partial(at_forward, {3: partial(change_file, tmp_path / "ids/train/shard-00000.bin", "other ids")})
    error = error_of("train", tmp_path / "run.toml", "--output", tmp_path / "run", *data, check=3, before=before)
    assert error["code"] == "data.tokenized"
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_tokenized_files_may_be_removed_or_touched_under_a_run(corpus, bpe, tmp_path):
    folder = write_tokenized(corpus, bpe, tmp_path / "data")
    rows = OnDiskDataset(folder)
    expected = [as_lists(rows[i]) for i in range(len(rows))], rows.lengths("text").tolist()
    (folder / "train" / "docs.idx").touch()
    (folder / "train" / "shard-00000.bin").unlink()
    assert ([as_lists(rows[i]) for i in range(len(rows))], rows.lengths("text").tolist()) == expected
    with raises("data.tokenized", folder / "train" / "shard-00000.bin"):
        OnDiskDataset(folder)


def test_batch_i_is_the_same_in_any_order_and_in_any_process():
    tree = run_tree(SEQUENCE)
    in_order = batch_tokens(tree, range(12))
    assert batch_tokens(tree, reversed(range(12)))[::-1] == in_order
    with FORKS.Pool(2) as pool:
        halves = pool.starmap(batch_tokens, [(tree, range(0, 12, 2)), (tree, range(1, 12, 2))])
    assert [batch for pair in zip(*halves, strict=True) for batch in pair] == in_order


def batch_tokens(tree, indices):
    from manyheads.training.batches import BatchLoader
    from manyheads.training.preparation import prepare
    from manyheads.training.run import read_run

    run = prepare(read_run(tree))
    loader = BatchLoader(run, run.train_dataset)
    return [loader[i].inputs.tokens.tolist() for i in indices]


def test_data_show_counts_rows_and_tokens(tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(run_tree(SEQUENCE)))
    run("data", "prepare", tmp_path / "run.toml", "--output", tmp_path / "ids")
    of_run = json.loads(run("data", "show", tmp_path / "run.toml", "--json").stdout)
    of_ids = json.loads(run("data", "show", tmp_path / "ids", "--json").stdout)
    assert of_run["rows"] == of_ids["rows"] == {"train": 300, "validation": 40, "test": 40}
    assert of_run["lengths"] == of_ids["lengths"]
    lengths = of_run["lengths"]["source"]
    assert lengths["min"] <= lengths["median"] <= lengths["percentile_95"] <= lengths["max"]
    assert sum(lengths["histogram"]["counts"]) == 300
    assert len(set(np.diff(lengths["histogram"]["edges"]))) == 1  # equal bins: bars can be compared
    assert 0 < of_run["padding"] < 0.5
    assert of_ids["padding"] is None
    text = run("data", "show", tmp_path / "ids").stdout
    source, target = load_data(**SEQUENCE).train[0]
    for value in ("300", "█", source, target):
        assert value in text
    assert str(tmp_path / "nothing") in run("data", "show", tmp_path / "nothing", check=2).stderr


def test_a_read_that_returns_less_goes_on(tmp_path, monkeypatch):
    """Linux reads at most 2 GiB at a time."""
    path, pread = write_file(tmp_path, "numbers", "0123456789abcdef"), os.pread
    monkeypatch.setattr(os, "pread", lambda handle, size, offset: pread(handle, min(size, 3), offset))
    with open(path, "rb") as file:
        assert read_at(file.fileno(), 11, 2) == b"23456789abc"
        assert read_at(file.fileno(), 100, 12) == b"cdef"
        assert read_at(file.fileno(), 0, 2) == b""
