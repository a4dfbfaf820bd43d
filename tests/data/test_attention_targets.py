"""Links between words as links between tokens: word alignments and dependency arcs, whatever the tokenizer."""

from __future__ import annotations

from data_files import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from manyheads.data.attention_targets import targets_from_alignments, targets_from_arcs


def words():
    return make_tokenizer("words", ["I prefer the morning flight", "je préfère le vol du matin"])


def test_alignments_of_words_become_pairs_of_tokens():
    (links,) = targets_from_alignments(["I prefer it"], ["je le préfère"], ["0-0 1-2 2-1"], words())
    assert links.tolist() == [[0, 0], [1, 2], [2, 1]]
    # one token per byte: y and z of the target attend to a and b
    (links,) = targets_from_alignments(["ab c"], ["x yz"], ["0-1"], make_tokenizer("bytes"))
    assert links.tolist() == [[2, 0], [2, 1], [3, 0], [3, 1]]
    assert targets_from_alignments(["a b"], ["c"], [""], words())[0].shape == (0, 2)
    for alignment, values in (("0:0", ["0:0"]), ("0-3", ["0-3", 2, 1])):
        with raises("data.row", *values):
            targets_from_alignments(["a b"], ["c"], [alignment], words())


def test_arcs_that_do_not_fit_their_text_are_refused():
    for heads, values in (((1, -1), ["row 0", 3, 2]), ((1, -1, 3), ["row 0", "word 3", "0 to 2"])):
        with raises("data.row", *values):
            targets_from_arcs(["a b c"], [heads], None, words(), toward="head", relation=None)


@given(data=st.data(), kind=st.sampled_from(["words", "bytes", "characters"]))
def test_every_token_of_a_word_is_found_whatever_the_tokenizer(data, kind):
    text = data.draw(st.lists(st.text(st.sampled_from("abé漢"), min_size=1, max_size=4), min_size=1, max_size=5))
    joined = data.draw(st.sampled_from([" ", "  ", " \t "])).join(text)
    tokenizer = make_tokenizer(kind, [joined])
    (links,) = targets_from_arcs([joined], [[-1] * len(text)], None, tokenizer, toward="head", relation=None)
    linked = {token: {int(j) for i, j in links if i == token} for token in links[:, 0].tolist()}
    groups = sorted({frozenset(group) for group in linked.values()}, key=min)
    assert len(groups) == len(text)
    assert sum(len(group) for group in groups) == len(linked), "no token belongs to two words"
    for group, word in zip(groups, text, strict=True):
        ids = tokenizer.encode(joined, add_special_tokens=False).ids
        assert tokenizer.decode([ids[i] for i in sorted(group)]).strip() == word
