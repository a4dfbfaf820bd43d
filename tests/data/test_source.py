"""A user's own files of texts and tables: how they are read and split, and an error with its location for whatever is wrong."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys

import pytest
from data_files import all_rows, data_spec, load_data, write_file
from raising import raises

from manyheads.errors import ManyheadsError, OutOfRangeError
from manyheads.spec import SLOTS, parse, to_tree


def test_texts_are_paragraphs_lines_or_files(tmp_path):
    path = write_file(tmp_path, "a.txt", "one\ntwo\n \nthree\n\n\nfour\n")
    assert all_rows(load_data("text", path=path)) == [("four",), ("one\ntwo",), ("three",)]
    assert all_rows(load_data("text", path=path, document="line")) == [("four",), ("one",), ("three",), ("two",)]
    single = load_data("text", path=path, document="file")  # its end is the validation split
    assert single.train[0][0] + single.validation[0][0] == "one\ntwo\n \nthree\n\n\nfour"
    write_file(tmp_path, "b.txt.gz", gzip.compress(b"five"))
    write_file(tmp_path, "c.md", "not read")
    assert all_rows(load_data("text", path=str(tmp_path), document="file")) == [
        ("five",),
        ("one\ntwo\n \nthree\n\n\nfour",),
    ]


def test_the_split_depends_on_no_order_and_repeated_inputs_stay_together(tmp_path):
    lines = [f"question {i % 180}\tanswer {i}" for i in range(200)]
    first = load_data("pairs", path=write_file(tmp_path, "a.tsv", "\n".join(lines)))
    second = load_data("pairs", path=write_file(tmp_path, "b.tsv", "\n".join(reversed(lines))))
    assert set(first.validation) == set(second.validation)
    assert len(first.validation) == 10
    assert not {row[0] for row in first.train} & {row[0] for row in first.validation}
    assert len(first.train) + len(first.validation) == 200


def test_validation_gets_its_fraction_of_the_rows_and_at_most_two_thousand():
    spec = data_spec("pairs", path="none.tsv", validation_fraction=0.1)
    for count, expected in ((60, 6), (5, 1), (30_000, 2000)):
        train, validation = spec.split([(str(i), "x") for i in range(count)])
        assert (len(train), len(validation)) == (count - expected, expected)
        assert not set(train) & set(validation)


def test_columns_are_given_by_name_or_number_or_found_by_default(tmp_path):
    tsv = write_file(tmp_path, "a.tsv", "id\ttarget\tsource\n1\tz\ta\n2\ty\tb\n3\tx\tc\n")
    assert all_rows(load_data("pairs", path=tsv)) == [("a", "z"), ("b", "y"), ("c", "x")]
    by_name = load_data("pairs", path=tsv, columns=["id", "source"])
    assert all_rows(by_name) == [("1", "a"), ("2", "b"), ("3", "c")]
    assert all_rows(load_data("pairs", path=tsv, columns=[1, 0]))[-1] == ("z", "1")
    plain = write_file(tmp_path, "no suffix.data.gz", gzip.compress(b"a\tz\nb\ty\n"))
    assert all_rows(load_data("pairs", path=plain)) == [("a", "z"), ("b", "y")]
    objects = '{"source": "a", "target": "z", "more": 1}\n\n{"target": "y", "source": "b"}\n'
    assert all_rows(load_data("pairs", path=write_file(tmp_path, "jsonl", objects))) == [("a", "z"), ("b", "y")]
    both = load_data("pairs", path=tsv, validation=plain, test=plain)
    assert (len(both.train), len(both.validation), len(both.test)) == (3, 2, 2)


def test_labels_of_a_jsonl_file_may_be_strings_integers_or_booleans(tmp_path):
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": True}, {"text": "c", "label": "x"}]
    path = write_file(tmp_path, "l.jsonl", "\n".join(map(json.dumps, rows)))
    assert load_data("labels", path=path).labels() == ("1", "true", "x")


HEADERS = {
    "pairs": ("english\tgerman", "a small word {}\tein kleines Wort {}"),
    "labels": ("review\tsentiment", "how good it was {}\tgood{}"),
    "queries": ("question\tanswer", "what is it {}\tit is {}"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_is_not_a_row(kind, tmp_path):
    """Whatever its names are. The description mentions it, and `header` overrides it."""
    header, line = HEADERS[kind]
    rows = [line.format(i, i % 3) for i in range(40)]
    path = write_file(tmp_path, "a.tsv", "\n".join((header, *rows)) + "\n")
    corpus = load_data(kind, path=path, test=path)
    assert sorted(corpus.train + corpus.validation) == sorted(tuple(row.split("\t")) for row in rows)
    assert len(corpus.test) == 40
    for value in ("tab-separated", *header.split("\t"), "header = false"):
        assert value in corpus.description
    for settings in ({"columns": [0, 1]}, {"columns": header.split("\t")}, {"header": True}):
        assert len(load_data(kind, path=path, test=path, **settings).test) == 40
    as_row = load_data(kind, path=path, header=False)
    assert tuple(header.split("\t")) in as_row.train + as_row.validation


@pytest.mark.parametrize("first", ["one word\tzwei", "small\tgroß und klein", "word1\tWort2"])
def test_a_row_is_not_a_header(first, tmp_path):
    """A cell of several words is not a column name, nor one that a row repeats."""
    lines = [first, *(f"a word{i}\tein Wort{i}" for i in range(30)), "word1\tsonst"]
    corpus = load_data("pairs", path=write_file(tmp_path, "a.tsv", "\n".join(lines)))
    assert all_rows(corpus) == sorted(tuple(line.split("\t")) for line in lines)


# name: kind, file, content, settings, code of the error, values in its message
FAULTS = {
    "a column missing": (
        "pairs",
        "a.tsv",
        "source\ttargte\na\tb\n",
        {},
        "data.columns",
        ["line 1 ", "'target'", "'targte'"],
    ),
    "an unknown name": (
        "pairs",
        "a.tsv",
        "a\tb\nc\td\n",
        {"columns": ["en", "de"]},
        "data.columns",
        ["line 1 ", "'en'"],
    ),
    "a key missing": (
        "queries",
        "a.jsonl",
        '{"query": "a", "doc": "b"}',
        {},
        "data.columns",
        ["line 1 ", "'document'"],
    ),
    "a short row": ("pairs", "a.tsv", "a\tb\nc\n", {}, "data.row", ["line 2 has 1 columns", "expected 2"]),
    "commas": ("pairs", "a.tsv", "a\tb\nc,d\n", {}, "data.row", ["line 2 ", "not by commas"]),
    "not JSON": ("pairs", "a.jsonl", "{}}", {}, "data.row", ["line 1 "]),
    "deep JSON": ("pairs", "a.jsonl", "[" * 100_000, {}, "data.row", ["line 1 "]),
    "a list": ("pairs", "a.jsonl", "[1]", {}, "data.row", ["line 1 ", "[1]"]),
    "a number": ("pairs", "a.jsonl", '{"source": 1, "target": "b"}', {}, "data.row", ["line 1, source", "1"]),
    "a surrogate": ("pairs", "a.jsonl", '{"source": "\\ud800", "target": "b"}', {}, "data.encoding", ["line 1 "]),
    "latin-1": ("text", "a.txt", b"ab\r\ncaf\xe9\n", {}, "data.encoding", ["line 2 ", "0xe9", "byte 7"]),
    "latin-1 after a mark": ("text", "a.txt", b"\xef\xbb\xbfab\ncaf\xe9\n", {}, "data.encoding", ["line 2 ", "byte 9"]),
    "latin-1 on the line of a mark": (
        "text",
        "a.txt",
        b"\xef\xbb\xbfcaf\xe9\n",
        {},
        "data.encoding",
        ["line 1 ", "byte 6"],
    ),
    "latin-1 in gzip": ("text", "a.gz", gzip.compress(b"ab\ncaf\xe9"), {}, "data.encoding", ["line 2 ", "byte 6"]),
    "latin-1 and CR": ("text", "a.txt", b"a\rb\rcaf\xe9\n", {}, "data.encoding", ["line 3 ", "0xe9", "byte 7"]),
    "UTF-8 surrogates": ("text", "a.txt", b"a\xed\xa0\x80", {}, "data.encoding", ["line 1 "]),
    "half of UTF-16": ("text", "a.txt", "hello".encode("utf-16")[:-1], {}, "data.file", ["UTF-16"]),
    "a UTF-16 surrogate": ("text", "a.txt", b"\xff\xfea\0\0\xd8b\0", {}, "data.encoding", ["line 1 "]),
    "UTF-16 without a mark": ("text", "a.txt", "hello".encode("utf-16-le"), {}, "data.encoding", ["NUL", "byte 1"]),
    "empty": ("text", "a.txt", b"", {}, "data.empty", []),
    "blank": ("pairs", "a.tsv", " \n\n\t\r\n", {}, "data.empty", []),
    "only a mark": ("text", "a.txt", b"\xef\xbb\xbf", {}, "data.empty", []),
    "one pair": ("pairs", "a.tsv", "a\tb\n", {}, "data.empty", ["1 pairs, 1 of them distinct"]),
    "equal pairs": ("pairs", "a.tsv", "a\tb\n" * 50, {}, "data.empty", ["50 pairs, 1 of them distinct"]),
    "one short text": ("text", "a.txt", "a", {}, "data.empty", ["1 characters"]),
    "a long line": (
        "text",
        "a.txt",
        "ok\n" + "x" * 101,
        {"max_line_length": 100},
        "data.too-large",
        ["line 2 ", "100"],
    ),
    "a longer line": (
        "text",
        "a.txt",
        "ok\n" + "x" * 999,
        {"max_line_length": 100},
        "data.too-large",
        ["line 2 ", "100"],
    ),
    "many CR": ("text", "a.txt", "ok\n" + "x\r" * 1000, {"max_line_length": 100}, "data.too-large", ["line 2 ", "100"]),
    "a gzip bomb": ("text", "a.gz", gzip.compress(b"0123456789abcde\n" * (1 << 17)), {}, "data.too-large", []),
    "a broken gzip file": ("text", "a.gz", gzip.compress(os.urandom(1000).hex().encode())[:-20], {}, "data.file", []),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_a_file_is_one_error_that_names_its_location(fault, tmp_path):
    kind, name, content, settings, code, values = FAULTS[fault]
    path = write_file(tmp_path, name, content)
    with raises(code, path, *values) as caught:
        load_data(kind, path=path, **settings)
    assert caught.value.exit_status == 3


def test_missing_files_folders_and_pipes_are_refused_by_name(tmp_path):
    with raises("data.file", tmp_path / "none.txt"):
        load_data("text", path=str(tmp_path / "none.txt"))
    for kind in ("text", "pairs", "conllu", "images"):
        with raises("data.file", tmp_path):
            load_data(kind, path=str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with raises("data.file", tmp_path / "pipe"):
        load_data("text", path=str(tmp_path / "pipe"))
    with pytest.raises(OutOfRangeError) as caught:
        data_spec("text", path="x", validation_fraction=0.0)
    assert caught.value.path == ("validation_fraction",)


def test_lines_that_are_not_text_are_repaired_or_skipped_and_counted(tmp_path):
    path = write_file(tmp_path, "a.txt", b"caf\xe9\none\ntwo\x00\nthree \xef\xbf\xbd\n")
    replaced, skipped = (
        load_data("text", path=path, document="line", encoding_errors=errors) for errors in ("replace", "skip")
    )
    assert all_rows(replaced) == [("caf�",), ("one",), ("three �",), ("two�",)]
    assert all_rows(skipped) == [("one",), ("three �",)]
    assert "2 lines with �" in replaced.description
    assert "2 lines skipped" in skipped.description
    rows = [{"source": "\ud800x", "target": "b"}, {"source": "c", "target": "d"}, {"source": "😀", "target": "d"}]
    path = write_file(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert all_rows(load_data("pairs", path=path, encoding_errors="replace"))[-2:] == [("�x", "b"), ("😀", "d")]
    assert "1 line skipped" in load_data("pairs", path=path, encoding_errors="skip").description


def test_rows_are_the_same_whatever_ends_a_line(tmp_path):
    text = "\ufeffone\ntwo\n\nthree \ufeff four\n\nfive"
    paths = [write_file(tmp_path, f"{i}.txt", text.replace("\n", end)) for i, end in enumerate(("\n", "\r\n", "\r"))]
    rows = [all_rows(load_data("text", path=path)) for path in paths]
    assert rows[0] == rows[1] == rows[2]
    assert ("one\ntwo",) in rows[0]
    assert ("three \ufeff four",) in rows[0]  # only the first is a byte order mark


def test_a_line_without_end_takes_bounded_memory(tmp_path):
    path = tmp_path / "endless.txt"
    with path.open("wb") as handle:
        handle.truncate(1 << 30)
    code = (
        "import sys\nfrom manyheads.data.texts import TextSpec\n"
        "try: TextSpec(path=sys.argv[1]).load()\nexcept ValueError as error: print(error.code, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (700 << 20, 700 << 20)),
    )  # fmt: skip
    assert done.stdout.startswith("data.too-large"), done.stderr
    assert "line 1 is longer than 16,777,216 characters" in done.stdout


def test_queries_are_joined_with_a_file_of_documents(tmp_path):
    documents = write_file(tmp_path, "docs.tsv", "".join(f"d{i}\ttext {i}\n" for i in range(30)))
    path = write_file(tmp_path, "q.tsv", "".join(f"query {i}\td{i}\n" for i in range(20)))
    corpus = load_data("queries", path=path, documents=documents)
    assert all_rows(corpus) == sorted((f"query {i}", f"text {i}") for i in range(20))
    assert corpus.documents() == tuple(f"text {i}" for i in range(30))
    few = write_file(tmp_path, "few.tsv", "".join(f"d{i}\ttext {i}\n" for i in range(30) if i != 7))
    with raises("data.row", path, few, "'d7'"):
        load_data("queries", path=path, documents=few)
    twice = write_file(tmp_path, "twice.tsv", "d0\tx\nd1\ty\nd1\tz\n")
    with raises("data.row", twice, "'d1'"):
        load_data("queries", path=path, documents=twice)


def test_a_spec_says_what_it_reads_and_reads_another_file_of_the_same_form(tmp_path):
    """So that no caller compares kinds."""
    path, other = (write_file(tmp_path, name, "a\tb\nc\td\n") for name in ("a.tsv", "b.tsv"))
    spec = data_spec("pairs", path=path, columns=[1, 0])
    assert (spec.source_path, spec.tokenized_folder) == (path, None)
    corpus = spec.load_file(other)
    assert (len(corpus.train), corpus.validation) == (0, [("b", "a"), ("d", "c")])
    assert other in corpus.description
    assert spec.file_columns(path) == (("source", "target"), ("alignment",))
    text = data_spec("text", path=path)
    assert (text.file_columns("a.txt"), text.file_columns("a.csv.gz")) == (((), ()), (("text",), ()))
    for spec in (data_spec("dates"), data_spec("tokenized", path="folder")):
        assert spec.source_path is None
        with raises("config.incompatible", other):
            spec.load_file(other)
    assert str(data_spec("tokenized", path="folder").tokenized_folder) == "folder"


def test_a_spec_is_read_without_opening_its_files(tmp_path):
    """In a process that refuses to open anything below the folder."""
    for name in ("a.txt", "b.tsv", "tokenizer.json"):
        write_file(tmp_path, name, "x\ty\n")
    trees = [
        {"kind": kind, "path": f"{tmp_path}/b.tsv"}
        for kind in ("text", "pairs", "labels", "queries", "conllu", "images")
    ]
    trees += [{"kind": "tokenized", "path": str(tmp_path)}]
    code = """
import json, sys
from pathlib import Path
from manyheads.data import builtin, conllu, images, texts, tokenized
from manyheads.spec import SLOTS
folder, trees = sys.argv[1], json.loads(sys.argv[2])
def refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(folder):
        raise RuntimeError(f"{event} {arguments[0]}")
sys.addaudithook(refuse)
for tree in trees:
    SLOTS["data"].from_config(tree)
tokenized.stored_tokenizer_spec(Path(folder))
try:
    SLOTS["data"].from_config(trees[0]).load()
except RuntimeError:
    print("refused")
"""
    arguments = [sys.executable, "-c", code, str(tmp_path), json.dumps(trees)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.stdout == "refused\n", done.stderr


def test_every_kind_of_data_and_tokenizer_is_documented_and_can_be_written_and_read_again():
    for slot in ("data", "tokenizer"):
        for kind, part in SLOTS[slot].kinds.items():
            assert part.summary() != "no formula given", kind
            assert all(field.description for field in part.model_fields.values()), kind
            spec = parse(part, {"path": "x"} if "path" in part.model_fields else {})
            assert parse(part, {name: value for name, value in to_tree(spec).items() if name != "kind"}) == spec


def test_every_error_of_the_room_has_a_code_of_its_own():
    for error in ManyheadsError.__subclasses__():
        if error.__name__ == "DataError":
            codes = [error.code, *(subclass.code for subclass in error.__subclasses__())]
            assert len(set(codes)) == len(codes)
            assert all(code.startswith("data.") for code in codes)


def test_what_is_odd_about_a_file_is_in_its_description(tmp_path):
    path = write_file(tmp_path, "a.tsv", "".join(f"word {i}\tother {i}\n" for i in range(30)))
    same = load_data("pairs", path=path, validation=str(tmp_path / "." / "a.tsv")).description
    assert "validation and training file are the same" in same
    assert "are the same" not in load_data("pairs", path=path).description
    write_file(tmp_path, "a.tsv", "".join(f"word {i}\t{'' if i % 3 else 'other'}\n" for i in range(30)))
    assert "20 lines" in load_data("pairs", path=path).description
