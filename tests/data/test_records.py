"""The records of tables: the format is detected from the file, reported, and can be overridden."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import string
import subprocess
import sys
from pathlib import Path

import pytest
from data_files import all_rows, data_spec, load_data, write_file
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from manyheads.data.records import detect_delimiter, repeats
from manyheads.errors import ManyheadsError

ROWS = [
    ('a "quoted" word', "good"),
    ("one, two; three", "bad"),
    ("a tab\there", "good"),
    ("two\nlines", "bad"),
    ("", "good"),
    ("plain", "bad"),
    ("  spaces  ", "good"),
    ("é😀", "bad"),
]


def write_csv(folder, rows, *, name="a.csv", encoding="utf-8", **dialect):
    text = io.StringIO(newline="")
    csv.writer(text, **dialect).writerows(rows)
    return write_file(folder, name, text.getvalue().encode(encoding))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize(("delimiter", "name"), [(",", "a.csv"), (";", "a.csv"), ("\t", "a.csv"), ("\t", "a.tsv")])
def test_a_file_is_read_as_csv_wrote_it(delimiter, name, quoting, encoding, tmp_path):
    dialect = {"delimiter": delimiter, "quoting": quoting, "lineterminator": "\r\n", "encoding": encoding}
    path = write_csv(tmp_path, [("text", "label"), *ROWS], name=name, **dialect)
    corpus = load_data("labels", path=path)
    assert all_rows(corpus) == sorted(ROWS)
    expected = {",": "comma", ";": "semicolon", "\t": "tab"}[delimiter]
    for value in (f"{expected}-separated", "quoted cells", "header = false"):
        assert value in corpus.description
    compressed = write_file(tmp_path, f"b.{name[-3:]}.gz", gzip.compress((tmp_path / name).read_bytes()))
    assert all_rows(load_data("labels", path=compressed)) == sorted(ROWS)


CELLS = st.text(st.sampled_from('ab",;\t\n é'), max_size=6)


@given(st.lists(st.tuples(CELLS, CELLS), min_size=2, max_size=8), st.sampled_from(",;\t"))
def test_whatever_csv_writes_is_read_again(tmp_path_factory, rows, delimiter):
    """In every file that csv reads strictly, with the settings that say how it was written."""
    path = write_csv(tmp_path_factory.mktemp("csv"), rows, delimiter=delimiter)
    spec = data_spec("pairs", path=path, delimiter=delimiter, quotes=True, header=False)
    expected = [row for row in rows if any(cell.strip() for cell in row)]
    if expected:
        assert spec.load_file(path).validation == expected
    else:
        with pytest.raises(ManyheadsError):
            spec.load_file(path)


def test_utf_16_is_read_in_both_byte_orders(tmp_path):
    text = "one\ttwo 😀\r\nthree\tfour\u2028five\n"
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        path = write_file(tmp_path, "a.tsv", mark + text.encode(encoding))
        assert all_rows(load_data("pairs", path=path)) == [("one", "two 😀"), ("three", "four\u2028five")]


# ------------------------------------------------------------------------------------------------------------- quotes

SPOKEN = ['"Hello," he said.\t„Hallo“, sagte er.', "He left.\tEr ging.", '"Stop!\t„Halt!', '5" pipe\tein 5"-Rohr']


def test_quotes_of_a_text_are_kept_if_csv_makes_no_sense_of_the_file(tmp_path):
    """As in a corpus of translations, where a sentence may begin with a quote."""
    path = write_file(tmp_path, "a.tsv", "\n".join(SPOKEN) + "\n")
    corpus = load_data("pairs", path=path)
    assert all_rows(corpus) == sorted(tuple(line.split("\t")) for line in SPOKEN)
    for value in ("line 1 ", "quotes = true"):
        assert value in corpus.description
    with raises("data.row", path, "line 1 ", "quotes = false"):
        load_data("pairs", path=path, quotes=True)


def test_balanced_quotes_that_no_cell_needs_are_text_in_a_few_lines_and_csv_in_most(tmp_path):
    lines = ['"Hello!"\t"Hallo!"', *(f"some words {i}\teinige Worte {i}" for i in range(9))]
    path = write_file(tmp_path, "a.tsv", "\n".join(lines))
    assert ('"Hello!"', '"Hallo!"') in all_rows(load_data("pairs", path=path))
    assert ("Hello!", "Hallo!") in all_rows(load_data("pairs", path=path, quotes=True))
    quoted_everywhere = "\n".join("\t".join(f'"{cell}"' for cell in line.split("\t")) for line in lines[1:])
    rows = all_rows(load_data("pairs", path=write_file(tmp_path, "b.tsv", quoted_everywhere)))
    assert rows == sorted(tuple(line.split("\t")) for line in lines[1:])


@pytest.mark.parametrize(("needless", "is_csv"), [(2, False), (3, True)])
def test_quotes_that_no_cell_needs_are_csv_in_more_than_half_of_the_lines(needless, is_csv, tmp_path):
    lines = [f'"word {i}"\t"Wort {i}"' if i < needless else f"word {i}\tWort {i}" for i in range(4)]
    rows = all_rows(load_data("pairs", path=write_file(tmp_path, "a.tsv", "\n".join(lines))))
    assert (("word 0", "Wort 0") in rows) == is_csv
    assert (('"word 0"', '"Wort 0"') in rows) != is_csv


def test_a_quote_within_a_cell_is_text(tmp_path):
    path = write_file(tmp_path, "a.csv", 'size,text\n5" pipe,"a ""b"", c"\n6" pipe,d\n')
    assert all_rows(load_data("pairs", path=path, columns=["size", "text"])) == [
        ('5" pipe', 'a "b", c'),
        ('6" pipe', "d"),
    ]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('text,label\none,a\n"two, three,b\nfour,c\n', 3),
        ('text,label\n"one\n, two",a\n"three, ""four"",b\nfive,c\n', 4),
        ('text,label\n"a, b" c,d\n', 2),
        ('text,label\n"one\ntwo","three\nfour,c\n', 3),
    ],
)
def test_a_quote_that_is_not_closed_is_an_error_with_its_line(content, line, tmp_path):
    path = write_file(tmp_path, "a.csv", content)
    for settings in ({}, {"quotes": True}):
        with raises("data.row", path, f"line {line} ", "quotes = false"):
            load_data("labels", path=path, **settings)


def test_a_quoted_cell_is_bounded_as_a_line_is(tmp_path):
    path = write_file(tmp_path, "a.csv", 'text,label\none,a\n"' + "two\n" * 100 + '",b\nthree,c\n')
    with raises("data.too-large", path, "line 3 ", "100"):
        load_data("labels", path=path, max_line_length=100)
    with raises("data.too-large", path, "line 3 "):
        load_data("labels", path=path, max_line_length=100, quotes=True)
    assert len(all_rows(load_data("labels", path=path, max_line_length=1000))) == 3


@pytest.mark.parametrize("row", ["one", "one,two,three"])
def test_a_row_with_another_number_of_columns_is_an_error_with_the_line_where_it_starts(row, tmp_path):
    path = write_file(tmp_path, "a.csv", f'text,label\n"two\nlines",a\n{row}\n"b, c",d\n')
    with raises("data.row", path, "line 4 ", f"{row.count(',') + 1} columns", "expected 2"):
        load_data("labels", path=path)


# ------------------------------------------------------------------------------------------------- delimiters, headers


def test_the_delimiter_is_recognized_and_can_be_overridden(tmp_path):
    decimals = write_file(tmp_path, "a.csv", "".join(f"word {i};{i},5\n" for i in range(9)))
    corpus = load_data("pairs", path=decimals)
    assert ("word 3", "3,5") in all_rows(corpus)
    assert "semicolon-separated" in corpus.description
    assert ("word 3;3", "5") in all_rows(load_data("pairs", path=decimals, delimiter=","))
    prose = write_file(tmp_path, "b.csv", "text\tlabel\n" + "".join(f"yes, no; {i}\t{i % 2}\n" for i in range(9)))
    assert ("yes, no; 3", "1") in all_rows(load_data("labels", path=prose))
    exported = write_file(tmp_path, "c.txt", (tmp_path / "b.csv").read_text().encode("utf-16"))
    assert ("yes, no; 3", "1") in all_rows(load_data("labels", path=exported))


def test_a_delimiter_gives_as_many_columns_in_more_than_half_of_the_lines():
    lines = ["a;b", "c;d", "e", "f"]
    assert detect_delimiter(Path("a.csv"), lines) == ","
    assert detect_delimiter(Path("a.csv"), lines[:3]) == ";"


@pytest.mark.parametrize("settings", [{}, {"max_line_length": 1000}])
def test_the_delimiter_is_recognized_though_a_quote_is_not_closed(settings, tmp_path):
    csv.field_size_limit(1 << 17)  # csv's own
    rows = [(f"{'some words ' * 18}{i}", "ab"[i % 2]) for i in range(1000)]
    rows[3] = ('"' + rows[3][0], "a")
    path = write_file(tmp_path, "a.csv", "".join(f"{text};{label}\n" for text, label in rows))
    corpus = load_data("labels", path=path, **settings)
    assert all_rows(corpus) == sorted(rows)
    assert "semicolon-separated" in corpus.description


def test_a_tsv_is_separated_by_tabs_unless_it_has_none(tmp_path):
    commas = write_file(tmp_path, "a.tsv", "".join(f'"yes, {i}",{i % 2}\n' for i in range(9)))
    assert ("yes, 3", "1") in all_rows(load_data("labels", path=commas))
    tabs = write_file(tmp_path, "b.tsv", "".join(f"word {i}, word\t{i % 2}\n" for i in range(9)) + "a, b\n")
    with raises("data.row", tabs, "line 10 "):
        load_data("labels", path=tabs)
    texts = write_file(tmp_path, "c.tsv", "".join(f"word {i}, word\n" for i in range(9)) + "word\n")
    assert ("word 3, word",) in all_rows(load_data("text", path=texts, columns=[0]))


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_the_line_that_tells_excel_the_delimiter_is_no_row(delimiter, mark, tmp_path):
    rows = [(f'a "b", {i}; c', "xy"[i % 2]) for i in range(9)]
    write_csv(tmp_path, [("said", "class"), *rows], delimiter=delimiter)
    text = f"{mark}sep={delimiter}\r\n" + (tmp_path / "a.csv").read_bytes().decode()
    path = write_file(tmp_path, "b.csv", text)
    assert all_rows(load_data("labels", path=path, columns=["said", "class"])) == sorted(rows)
    with raises("data.row", path, "line 12 "):
        load_data("labels", path=write_file(tmp_path, "b.csv", text + "one\n"), columns=[0, 1])


def test_too_few_columns_are_an_error_that_names_the_delimiter(tmp_path):
    path = write_file(tmp_path, "c.tsv", "one|two\nthree|four\n")
    with raises("data.row", path, "tabs", "data.delimiter"):
        load_data("pairs", path=path)


def test_only_the_last_suffix_before_gz_tells_what_a_file_is(tmp_path):
    for name in ("notes.csv.txt", "notes.jsonl.txt"):
        path = write_file(tmp_path, name, "one, two\nthree, four\n")
        assert all_rows(load_data("text", path=path)) == [("one, two",), ("three, four",)]
    path = write_file(tmp_path, "a.CSV.GZ", gzip.compress(b"text,label\none,two\nthree,two\n"))
    assert all_rows(load_data("text", path=path)) == [("one",), ("three",)]


HEADERS = {
    "a number below a name": ("id\tthe words\tΣ-verdict (final)", "{i}\tsome words {i}\t{x}"),
    "classes below a name": ("Review Text\tSentiment", "some words {i}\t{x}"),
    "an index without a name": ("\tReview Text\tSentiment", "{i}\tsome words {i}\t{x}"),
    "decimals": ("text\tScore 1", "word {i}\t{i},5"),
    "single words": ("review\tsentiment", "some words {i}\tword{i}"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_is_recognized_by_the_lines_below_it(name, tmp_path):
    header, line = HEADERS[name]
    lines = [line.format(i=i, x="ab"[i % 2]) for i in range(12)]
    columns = [0, header.count("\t")]
    path = write_file(tmp_path, "a.tsv", "\n".join((header, *lines)))
    corpus = load_data("pairs", path=path, columns=columns)
    assert len(all_rows(corpus)) == 12
    assert "header = false" in corpus.description
    assert len(all_rows(load_data("pairs", path=path, columns=columns, header=False))) == 13
    without = load_data("pairs", path=write_file(tmp_path, "b.tsv", "\n".join(lines)), columns=columns)
    assert len(all_rows(without)) == 12
    assert "header = true" in without.description


@pytest.mark.parametrize(
    ("column", "expected"),
    [("aabba", True), ("aabb", False), ("aabbc", False), ("aabbccaabb", True), ("aabbcc", False), ("  aa", False)],
)
def test_classes_are_values_of_which_each_is_in_more_than_two_rows_on_average_and_at_least_in_two(column, expected):
    assert repeats(column) == expected


def test_a_class_of_one_row_does_not_make_it_a_header(tmp_path):
    """If another class has one row too, or if the row has a number where the others have."""
    rows = ["some words\trare", *(f"more words {i}\t{'ab'[i % 2]}" for i in range(12)), "last words\tseldom"]
    path = write_file(tmp_path, "a.tsv", "\n".join(rows))
    corpus = load_data("labels", path=path)
    assert corpus.labels() == ("a", "b", "rare", "seldom")
    for value in ("very few", "'rare'", "'seldom'"):
        assert value in corpus.description
    numbered = [f"{i}\t{row}" for i, row in enumerate(rows[:-1])]
    corpus = load_data("labels", path=write_file(tmp_path, "b.tsv", "\n".join(numbered)), columns=[1, 2])
    assert "rare" in corpus.labels()


def test_a_column_that_occurs_twice_is_not_guessed(tmp_path):
    path = write_file(tmp_path, "a.csv", "text,text,label\na,b,c\nd,e,f\n")
    with raises("data.columns", path, "'text'"):
        load_data("labels", path=path)
    assert all_rows(load_data("labels", path=path, columns=[1, 2])) == [("b", "c"), ("e", "f")]


# ----------------------------------------------------------------------------------------------------- JSON and parquet


def test_a_duplicate_key_is_an_error_and_an_escaped_nul_is_handled_as_a_byte(tmp_path):
    line = '{{"text": "{}", "label": "b"}}\n'
    twice = write_file(tmp_path, "a.jsonl", line.format("a") + '{"text": "a", "label": "b", "text": "c"}\n')
    with raises("data.row", twice, "line 2 ", "'text'"):
        load_data("labels", path=twice)
    path = write_file(tmp_path, "b.jsonl", line.format("a") + line.format("x\\u0000y") + line.format("z"))
    with raises("data.encoding", path, "line 2 ") as caught:
        load_data("labels", path=path)
    assert caught.value.hint.startswith("set encoding_errors")  # the file is UTF-8
    assert ("x�y", "b") in all_rows(load_data("labels", path=path, encoding_errors="replace"))
    skipped = load_data("labels", path=path, encoding_errors="skip")
    assert all_rows(skipped) == [("a", "b"), ("z", "b")]
    assert "1 line skipped" in skipped.description


def test_a_label_may_be_a_string_or_an_integer_and_a_text_only_a_string(tmp_path):
    line = '{"text": "a", "label": 1, "score": 1.0}\n{"text": "b", "label": 2, "score": 1.0}\n'
    path = write_file(tmp_path, "a.jsonl", line)
    assert all_rows(load_data("labels", path=path)) == [("a", "1"), ("b", "2")]
    with raises("data.row", "1.0", "integer"):
        load_data("labels", path=path, columns=["text", "score"])
    with raises("data.row", "1.0") as caught:
        load_data("labels", path=path, columns=["score", "label"])
    assert "integer" not in str(caught.value)


def write_parquet(folder, *, compression="snappy", row_group_size=7, **columns):
    import pyarrow
    from pyarrow import parquet

    path = folder / "a.parquet"
    parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size, compression=compression)
    return str(path)


def test_parquet_is_read_by_the_names_of_its_columns(tmp_path):
    texts, labels = [f"some words {i}" for i in range(20)], [i % 2 for i in range(20)]
    path = write_parquet(tmp_path, id=list(range(20)), score=[0.5] * 20, text=texts, label=labels)
    assert all_rows(load_data("labels", path=path)) == sorted(zip(texts, map(str, labels), strict=True))
    assert all_rows(load_data("text", path=path)) == sorted((text,) for text in texts)
    assert all_rows(load_data("labels", path=path, columns=["text", "id"]))[0] == ("some words 0", "0")
    for column, code in (("score", "data.row"), ("text ", "data.columns")):
        with raises(code, path, column):
            load_data("labels", path=path, columns=["text", column])
    with raises("data.too-large", path, "row 11"):
        load_data("text", path=path, max_line_length=12)
    with raises("data.row", "row 2", "text"):
        load_data("text", path=write_parquet(tmp_path, text=["a", None, "b"]))
    with raises("data.encoding", "row 1"):
        load_data("text", path=write_parquet(tmp_path, text=["a\0", "b"]))
    with raises("data.too-large", path):
        load_data("text", path=write_parquet(tmp_path, compression="zstd", text=["x" * (1 << 20)] * 40))
    long = "".join(random.Random(0).choices(string.ascii_letters, k=10_000))
    with raises("data.too-large", path):  # stored once, and read a thousand times
        load_data("text", path=write_parquet(tmp_path, row_group_size=1000, text=[long] * 1000))
    for content in (b"", b"PAR1" * 9, (tmp_path / "a.parquet").read_bytes()[:-9]):
        with raises("data.file", path):
            load_data("text", path=write_file(tmp_path, "a.parquet", content))


def test_without_pyarrow_the_extra_is_named(tmp_path):
    path = write_parquet(tmp_path, text=["a", "b"])
    code = """
import sys
sys.modules["pyarrow"] = None
from manyheads.data.texts import TextSpec
try: TextSpec(path=sys.argv[1]).load()
except ValueError as error: print(error.code, error.hint)
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.stdout == "usage.missing-extra pip install 'manyheads[parquet]'\n", done.stderr


def test_decisions_on_other_files_of_the_data_are_reported_if_they_differ(tmp_path):
    train = write_file(tmp_path, "a.csv", "text,label\n" + "".join(f"word {i},{i % 2}\n" for i in range(40)))
    objects = "".join(json.dumps({"text": f"word {i}", "label": str(i % 2)}) + "\n" for i in range(9))
    same = load_data("labels", path=train, validation=train, test=write_file(tmp_path, "b.jsonl", objects))
    assert same.description.count("-separated") == 1
    other = write_file(tmp_path, "c.tsv", "text\tlabel\nword\t1\n")
    assert f"{other}: tab-separated" in load_data("labels", path=train, validation=other).description
