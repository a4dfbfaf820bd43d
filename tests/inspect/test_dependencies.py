"""Heads for relations between words: a head that follows a relation is found, beside the best fixed offset."""

from __future__ import annotations

import pytest
import torch
from pointing import WORDS, pointing
from raising import raises

from manyheads import Checkpoint
from manyheads.inspect.dependencies import highest_words, relation_heads, tree_links


def sentences(seed=0, count=30):
    """Sentences of distinct words, each linked to the word with the number plus one, if it is there."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        order = torch.randperm(12, generator=generator)[:7].tolist()
        place = {number: i for i, number in enumerate(order)}
        links = [(place[i], place[(i + 1) % 12], "next-number") for i in order if (i + 1) % 12 in place]
        links += [(i, i + 1, "after") for i in range(6)]
        yield " ".join(WORDS[i] for i in order), links


def test_the_head_that_follows_a_relation_is_found():
    found = {head.relation: head for head in relation_heads(pointing(lambda i: (i + 1) % 12), sentences())}
    best = found["next-number"]
    assert (best.attention, best.head) == ("encoder.layers.0.attention", 0)
    assert best.accuracy == 1.0
    assert best.is_better
    assert best.offset_accuracy < 0.5
    assert found["after"].offset == 1
    assert found["after"].offset_accuracy == 1.0
    assert not found["after"].is_better, "no head is better than the fixed offset"


def test_another_relation_is_not_found_in_it():
    found = {head.relation: head for head in relation_heads(pointing(lambda i: (i + 5) % 12), sentences())}
    assert found["next-number"].accuracy < 0.5


def test_j1_a_tree_gives_links_in_both_directions():
    links = tree_links([1, -1, 3, 1], ["nsubj", "root", "det", "dobj"])
    assert (3, 1, "dobj") in links
    assert (1, 3, "dobj⁻¹") in links
    assert not any(relation.startswith("root") for *_, relation in links)


def test_rare_relations_are_left_out_and_none_is_an_error():
    checkpoint = pointing(lambda i: i)
    assert relation_heads(checkpoint, [("w1 w2", [(0, 1, "x")])]) == []
    (one,) = relation_heads(checkpoint, [("w1 w2", [(0, 1, "x")])], min_count=1)
    assert one.count == 1
    with raises("data.empty"):
        relation_heads(checkpoint, [("w1 w2", [])])
    with raises("checkpoint.tokenizer"):
        relation_heads(Checkpoint(checkpoint.model), [("w1 w2", [(0, 1, "x")])])


@pytest.mark.parametrize("words", [1, 3])
def test_the_weight_of_a_word_is_summed_over_its_tokens(words):
    """Words of several tokens: w1.w5 is three tokens of one word, and only w5 has its target in the text."""
    checkpoint = pointing(lambda i: (i + 1) % 12)
    text = [*["w1.w5", "w8", "w10"][:words], "w6"]
    found = relation_heads(checkpoint, [(" ".join(text), [(0, words, "x")])], min_count=1)
    assert found[0].accuracy == 1.0


def test_a_word_that_sees_no_other_word_points_to_none():
    """Under a causal mask the first word has no weight on the second, so no head can follow this link."""
    checkpoint = pointing(lambda i: (i + 1) % 12, causal=True)
    forward, back = relation_heads(checkpoint, [("w1 w2", [(0, 1, "forward"), (1, 0, "back")])], min_count=1)
    assert (forward.accuracy, back.accuracy) == (0.0, 1.0)
    to_itself = pointing(lambda i: i, score=1000.0)  # no weight at all on other words
    ((_, highest),) = highest_words(to_itself, [1, 2, 3], [[0], [1], [2]])
    assert highest[0].tolist() == [-1, -1, -1]
    assert (highest[1] >= 0).all()
