"""Texts: what one is in a .txt is decided by the file; tables have one in each row."""

from __future__ import annotations

import json

import pytest
from data_files import all_rows, load_data, write_file
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from manyheads.data.texts import detect_document, split_text

SENTENCE = "the cat sees the old dog under the tree"
WRAPPED = "\n".join(("the cat and the dog are old friends who like to sit under the tree near the house",) * 30)

DOCUMENTS = {
    "paragraphs": ("\n\n".join(f"{SENTENCE} {i}\nand likes it" for i in range(30)), "paragraph", 30),
    "sentences": ("\n".join(f"The cat sees {i} trees." for i in range(30)), "line", 30),
    "names": ("\n".join(f"name{i}" for i in range(30)), "line", 30),
    "long lines": ("\n".join(f"{SENTENCE * 9} {i}" for i in range(30)), "line", 30),
    "sentences and a blank line": (
        "\n".join(f"The cat sees {i} trees." + "\n" * (i == 15) for i in range(90)),
        "line",
        90,
    ),
    "one wrapped text": (WRAPPED, "file", 2),
    "one line": (SENTENCE, "file", 2),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_is_is_decided_by_the_file_and_reported(name, tmp_path):
    content, document, count = DOCUMENTS[name]
    path = write_file(tmp_path, "a.txt", content)
    corpus = load_data("text", path=path)
    assert len(all_rows(corpus)) == count
    assert f"one text per {document} " in corpus.description
    assert "document = " in corpus.description
    for other in ("paragraph", "line", "file"):
        assert "one text per" not in load_data("text", path=path, document=other, validation=path).description


@pytest.mark.parametrize(("ends", "length", "document"), [
    (4, 60, "file"), (5, 60, "line"), (4, 39, "line"), (4, 40, "file"), (4, 120, "file"), (4, 121, "line"),
])  # fmt: skip
def test_lines_of_usual_width_of_which_fewer_than_half_end_a_sentence_are_one_wrapped_text(ends, length, document):
    lines = ["w" * (length - 1) + ("." if i < ends else "w") for i in range(10)]
    assert detect_document(lines) == document


@pytest.mark.parametrize(("lines", "document"), [(40, "paragraph"), (41, "line")])
def test_blank_lines_separate_paragraphs_of_at_most_twenty_lines_on_average(lines, document):
    assert detect_document(["A sentence.", "", *["A sentence."] * (lines - 1)]) == document


def test_every_row_of_a_table_is_a_text(tmp_path):
    texts = ["one", "two\nlines", "three, four", 'fi"ve']
    objects = write_file(tmp_path, "a.jsonl", "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts))
    quoted = "".join(f'"{text.replace(chr(34), chr(34) * 2)}",1\n' for text in texts)
    table = write_file(tmp_path, "a.csv", "text,id\n" + quoted)
    for path in (objects, table):
        assert all_rows(load_data("text", path=path)) == sorted((text,) for text in texts)
        with raises("config.incompatible", path):
            load_data("text", path=path, document="line")


@given(st.text(st.sampled_from("ab. \n"), max_size=200), st.integers(16, 60))
def test_pieces_of_a_text_are_short_and_together_the_text(text, length):
    pieces = list(split_text(text, length))
    assert all(len(piece) <= length and piece.strip() for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert list(split_text(text, None)) == ([text] if text.strip() else [])
