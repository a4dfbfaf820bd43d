"""Which columns of a file are read: detected from its rows, or named by the user."""

from __future__ import annotations

import json

import pyarrow
import pytest
from data_files import data_spec, write_file
from pyarrow import parquet
from raising import raises

from manyheads.data.columns import choose_columns
from manyheads.data.tables import LabelsSpec, PairsSpec
from manyheads.data.texts import TextSpec


def table(folder, *rows, header=()):
    path = folder / "a.tsv"
    write_file(
        folder, "a.tsv", "".join("\t".join(map(str, row)) + "\n" for row in ([header] if header else []) + [*rows])
    )
    return path


def texts(count=30):
    return [(i, f"a short text {i}", f"a text that is a good deal longer {i}") for i in range(count)]


def test_the_only_columns_with_several_words_are_the_texts(tmp_path):
    path = table(tmp_path, *texts(), header=("id", "en", "de"))
    assert choose_columns(path, PairsSpec).names == ("en", "de")
    assert choose_columns(path, PairsSpec, longer_column_first=True).names == ("de", "en")


def test_the_column_with_the_fewest_values_is_the_label(tmp_path):
    path = table(tmp_path, *((f"a text {i}", i, i % 3) for i in range(30)))
    columns = choose_columns(path, LabelsSpec)
    assert columns.names == (0, 2)
    assert "3 values in 30 rows" in columns.reason


def test_nothing_is_set_if_the_default_reads_the_file(tmp_path):
    assert choose_columns(table(tmp_path, ("a b", "c d")), PairsSpec).names is None
    named = table(tmp_path, ("c d", 1, "a b"), header=("target", "id", "source"))
    assert choose_columns(named, PairsSpec).names is None
    assert choose_columns(tmp_path, PairsSpec).names is None  # a folder, which reading refuses


def test_columns_that_cannot_be_told_apart_are_an_error_with_a_proposal(tmp_path):
    path = table(tmp_path, *((f"a b {i}", f"a b c {i}", f"a b c d {i}") for i in range(30)), header=("en", "de", "fr"))
    with raises("data.columns", path, "en, de, fr", "--columns de,fr"):
        choose_columns(path, PairsSpec)


def test_columns_the_user_names_are_read_by_the_names_in_the_header(tmp_path):
    path = table(tmp_path, *texts(), header=("id", "en", "de"))
    assert choose_columns(path, PairsSpec, columns="de, en").names == ("de", "en")
    assert choose_columns(path, PairsSpec, columns="2,1").names == ("de", "en")
    assert choose_columns(table(tmp_path, *texts()), PairsSpec, columns="2,1").names == (2, 1)


@pytest.mark.parametrize(
    ("kind", "columns"), [(PairsSpec, "en"), (PairsSpec, "a,b,c,d"), (PairsSpec, "a,"), (TextSpec, "a,b")]
)
def test_a_wrong_number_of_columns_is_refused(kind, columns, tmp_path):
    with raises("config.incompatible", repr(columns)):
        choose_columns(table(tmp_path, *texts()), kind, columns=columns)
    with raises("config.incompatible", repr(columns)):
        choose_columns(tmp_path / "a.txt", TextSpec, columns=columns)


WORDS = ["the", "a", "red", "blue", "small", "old", "cat", "dog", "house", "tree", "sees", "likes"]
PAIRS = [(f"the cat sees {i} trees", f"THE CAT SEES {i} TREES") for i in range(60)]
LABELLED = [(f"the cat {'likes and ' * (i % 2)}sees {i} trees", "long" if i % 2 else "short") for i in range(60)]
SWAPPED = [(label, text) for text, label in LABELLED]


def objects(folder, rows, *names):
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


FILES = {
    "no header": (lambda folder: table(folder, *PAIRS), PairsSpec, None),
    "another header": (lambda folder: table(folder, *PAIRS, header=("en", "loud")), PairsSpec, ("en", "loud")),
    "the default header": (lambda folder: table(folder, *PAIRS, header=("source", "target")), PairsSpec, None),
    "single words": (lambda folder: table(folder, *((word, word.upper()) for word in WORDS)), PairsSpec, None),
    "objects": (lambda folder: objects(folder, PAIRS, "en", "loud"), PairsSpec, ("en", "loud")),
    "a class first": (lambda folder: table(folder, *SWAPPED), LabelsSpec, (1, 0)),
    "a class last": (lambda folder: table(folder, *LABELLED), LabelsSpec, None),
    "a class in a header": (
        lambda folder: table(folder, *SWAPPED, header=("stars", "review")),
        LabelsSpec,
        ("review", "stars"),
    ),
    "a class as a number": (
        lambda folder: objects(folder, [(i % 2, text) for i, (text, _) in enumerate(PAIRS[:9])], "y", "x"),
        LabelsSpec,
        ("x", "y"),
    ),
    "a number before two texts": (
        lambda folder: objects(folder, [("1", *pair) for pair in PAIRS], "id", "en", "loud"),
        PairsSpec,
        ("en", "loud"),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_columns_of_a_file_are_detected(name, tmp_path):
    make, kind, fields = FILES[name]
    assert choose_columns(make(tmp_path), kind).names == fields


@pytest.mark.parametrize(
    "classes", [[i % 3 for i in range(30)], [i % 2 == 0 for i in range(30)], ["ab"[i % 2] for i in range(30)]]
)
def test_a_class_is_found_in_parquet_as_in_json(classes, tmp_path):
    rows = [(f"some words {i}", i / 2, name) for i, name in enumerate(classes)]
    columns = {name: pyarrow.array(values) for name, values in zip("xzy", zip(*rows, strict=True), strict=True)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    for path in (tmp_path / "a.parquet", objects(tmp_path, rows, *"xzy")):
        assert choose_columns(path, LabelsSpec).names == ("x", "y")


def test_a_column_named_label_is_the_class_and_a_constant_one_never_is(tmp_path):
    rows = [(f"some words {i}", str(i % 5), "here", str(i % 7)) for i in range(60)]
    path = objects(tmp_path, [row[:3] for row in rows], "sentence", "stars", "source")
    assert choose_columns(path, LabelsSpec).names == ("sentence", "stars")
    path = objects(tmp_path, rows, "sentence", "stars", "source", "label")
    assert choose_columns(path, LabelsSpec).names == ("sentence", "label")


def test_a_class_is_detected_in_a_file_that_is_sorted_by_it(tmp_path):
    rows = ((f"some words {i}", i % 4, i // 1500) for i in range(3000))
    path = table(tmp_path, *rows, header=("review", "site", "stars"))
    assert choose_columns(path, LabelsSpec).names == ("review", "stars")


def test_a_header_is_detected_where_reading_detects_it(tmp_path):
    rows = ((i % 5, f"some words {i}" if i < 1000 or i % 4 else f"word{i}") for i in range(5000))
    path = table(tmp_path, *rows, header=("stars", "review"))
    columns = choose_columns(path, LabelsSpec).names
    assert columns == ("review", "stars")
    assert data_spec("labels", path=str(path), columns=list(columns)).load().labels() == tuple("01234")


def test_the_text_of_a_table_is_found_or_asked_for(tmp_path):
    rows = [(i, f"some words {i}", "ab"[i % 2]) for i in range(30)]
    for path in (
        table(tmp_path, *rows, header=("id", "review", "class")),
        objects(tmp_path, rows, "id", "review", "class"),
    ):
        assert choose_columns(path, TextSpec).names == ("review",)
    assert choose_columns(table(tmp_path, *rows), TextSpec).names == (1,)
    assert choose_columns(objects(tmp_path, rows, "id", "text", "class"), TextSpec).names is None
    for path, names in ((table(tmp_path, *texts()), "0, 1, 2"), (objects(tmp_path, texts(), *"abc"), "a, b, c")):
        with raises("data.columns", path, names, "--columns"):
            choose_columns(path, TextSpec)


@pytest.mark.parametrize(
    ("header", "expected"),
    [("text;score", ("text", "score")), ("score;review", ("review", "score")), ("Class;words", ("words", "Class"))],
)
def test_a_column_with_the_name_of_a_text_or_of_a_class_is_one_whatever_its_values(header, expected, tmp_path):
    """Nine texts and 40 numbers, so that the number of values alone would swap them."""
    texts, numbers = [f"a review number {i % 9} of some words" for i in range(80)], [f"3,{i % 40}" for i in range(80)]
    first, second = (texts, numbers) if header.startswith("text") else (numbers, texts)
    path = tmp_path / "reviews.csv"
    path.write_text(f"{header}\n" + "".join(f"{a};{b}\n" for a, b in zip(first, second, strict=True)))
    assert choose_columns(path, LabelsSpec).names == expected
