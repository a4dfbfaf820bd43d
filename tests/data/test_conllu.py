"""Dependency trees from .conllu files."""

from __future__ import annotations

import numpy as np
import pytest
from data_files import load_data, make_tokenizer, write_file
from raising import raises
from trees import SHE, conllu, with_entities

from manyheads.data.conllu import CoreferenceSpec
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


# "The old dog of Ann ran: Ann called it, her dog"; e1 is the dog, e2 is Ann
DOG = [
    ("1", "The", "DET", "3", "(e1-animal-3"),
    ("2", "old", "ADJ", "3", ""),
    ("3", "dog", "NOUN", "6", ""),
    ("4", "of", "ADP", "5", ""),
    ("5", "Ann", "PROPN", "3", "(e2-person-1)e1)"),
    ("6", "ran", "VERB", "0", ""),
    ("6.1", "ghost", "_", "_", "(e2)"),
    ("7", "Ann", "PROPN", "8", "(e2)"),
    ("8", "called", "VERB", "6", ""),
    ("9", "it", "PRON", "8", "(e1)"),
    ("10", "her", "PRON", "11", "(e1-animal-2(e2)"),
    ("11", "dog", "NOUN", "9", "e1)"),
]


def read_links(folder, text):
    path = str(write_file(folder, "t.conllu", text))
    return [row[-1] for row in CoreferenceSpec(path=path).load_file(path).validation]


def test_p10_a_mention_is_linked_to_the_previous_mention_of_its_entity_by_their_head_words(tmp_path):
    first, second = read_links(tmp_path, with_entities(*DOG) + with_entities(("1", "Ann", "PROPN", "0", "(e2)")))
    assert first == [
        (6, 4, "coref"),  # Ann → Ann: the empty node between them is no word
        (8, 2, "coref"), (8, 2, "coref:pron"),  # it → dog, the head word of "The old dog of Ann"
        (9, 6, "coref"), (9, 6, "coref:pron"),  # her → Ann
        (10, 8, "coref"),  # dog → it
    ]  # fmt: skip
    assert second == [], "a link does not leave its sentence"


def test_a_mention_in_parts_counts_with_its_first_part(tmp_path):
    words = [
        ("1", "Ann", "PROPN", "2", "(e1)"),
        ("2", "ran", "VERB", "0", "(e2[1/2])"),
        ("3", "away", "ADV", "2", "(e1[1/2])"),
    ]
    assert read_links(tmp_path, with_entities(*words, ("4", "she", "PRON", "2", "(e1[2/2])"))) == [[(2, 0, "coref")]]  # fmt: skip


@pytest.mark.parametrize(
    ("entities", "values"),
    [
        (["(e1", ""], ["line 1 ", "'e1'", "does not end"]),
        (["", "e1)"], ["line 2 ", "'e1'", "does not begin"]),
        (["(e1", "e2)"], ["line 2 ", "'e2'"]),
        (["(e1)", "e1"], ["line 2 ", "'e1'", "expected"]),
        (["()", ""], ["line 1 ", "'()'"]),
        (["(e1))", ""], ["line 1 ", "')'"]),
        (["", "(e1" * 101], ["line 2 ", "more than 100 mentions"]),
    ],
)
def test_a_fault_in_the_brackets_is_refused_with_its_line_if_coreference_is_read(entities, values, tmp_path):
    words = [(str(i), "word", "NOUN", str(i - 1), entity) for i, entity in enumerate(entities, 1)]
    with raises("data.row", "t.conllu", *values):
        read_links(tmp_path, with_entities(*words))
    path = str(tmp_path / "t.conllu")
    assert len(load_data("conllu", path=path, validation=path).train) == 1, "training does not read it"


def test_reading_brackets_takes_time_linear_in_the_line(tmp_path):
    """A second for a megabyte, which a pattern that backtracks would not finish."""
    for value in ("a" * 1_000_000, "(a" + "-b" * 500_000, "(a)" * 300_000):
        words = [("1", "word", "NOUN", "0", value)]
        if value.endswith(")"):
            assert read_links(tmp_path, with_entities(*words)) == [[]]
        else:
            with raises("data.row", "line 1 "):
                read_links(tmp_path, with_entities(*words))
