"""Dependency trees from .conllu files."""

from __future__ import annotations

import numpy as np
import pytest
from data_files import load_data, make_tokenizer, write_file
from raising import raises
from trees import SHE, conllu

from manyheads.data.tokenized import InMemoryDataset


def test_a_tree_is_its_words_the_positions_of_their_heads_and_their_relations(tmp_path):
    path = write_file(tmp_path, "t.conllu", conllu(SHE, [("1", "Yes", "0")]))
    corpus = load_data("conllu", path=path, validation=path)
    assert corpus.fields == ("text", "arcs", "relations")
    relations = ("nsubj", "root", "aux:can", "advmod", "obj")
    assert corpus.train == [("She sees can not 10_000", (1, -1, 1, 2, 1), relations), ("Yes", (-1,), ("_",))]
    assert all(len(text.split()) == len(heads) == len(names) for text, heads, names in corpus.train)
    rows = InMemoryDataset(corpus.train, make_tokenizer("words", [text for text, *_ in corpus.train]), corpus.fields)
    assert rows[0][1].dtype == np.int64
    assert rows[0][1].tolist() == [1, -1, 1, 2, 1]
    assert rows[0][2].tolist() == list(relations)


@pytest.mark.parametrize(
    ("lines", "values"),
    [
        ("1\tShe\t2\n", ["line 1 has 3 columns", "10"]),
        (conllu([("2", "She", "0")]), ["line 2 ", "'2'", "expected 1"]),
        (conllu([("1", "She", "0"), ("1", "sees", "1")]), ["line 3 ", "'1'", "expected 2"]),
        (conllu([("x", "She", "0")]), ["line 2 ", "'x'", "expected 1"]),
        (conllu([("1", "She", "_")]), ["line 2 ", "head '_'"]),
        (conllu([("1", "She", "1")]), ["line 2 ", "head '1'"]),
        (conllu([("1", "She", "7")]), ["line 2 ", "1 words", "head 7"]),
        (conllu([("1", " ", "0")]), ["line 2 ", "no word"]),
    ],
)
def test_a_fault_in_a_tree_is_refused_with_its_line(lines, values, tmp_path):
    path = write_file(tmp_path, "t.conllu", lines)
    with raises("data.row", path, *values):
        load_data("conllu", path=path)


def test_a_file_without_sentences_is_refused(tmp_path):
    path = write_file(tmp_path, "t.conllu", "# only a comment\n")
    with raises("data.empty", path):
        load_data("conllu", path=path)
