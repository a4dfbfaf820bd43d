"""The slow labs of the chapter on loss shaping: each holds, and fails with its counterexample; gold links of generated paragraphs."""

from __future__ import annotations

import numpy as np
import pytest
from lab_verdicts import check_both_ways, slow_labs

from manyheads.labs.lab import all_labs, run_lab
from manyheads.labs.paragraphs import MARKS, NAMES, TIMES, make_paragraph


@pytest.mark.parametrize("name", slow_labs("shaping"))
def test_the_claim_holds_and_its_counterexample_fails(name):
    check_both_ways(name)


def test_paragraphs_are_trees_and_their_links_are_what_decides_a_word():
    rng = np.random.default_rng(0)
    for _ in range(100):
        one = make_paragraph(rng)
        assert len(one.words) == len(one.heads) == len(one.relations)
        assert one.heads.count(-1) == 1, "one root"
        for word in range(len(one.words)):
            path = [word]
            while path[-1] >= 0:
                path.append(one.heads[path[-1]])
                assert len(path) <= len(one.words) + 1, "a cycle"
        for word, linked, name in one.links:
            if name == "pronoun":
                assert one.words[linked] in NAMES[one.words[word]]
            elif name == "paragraph start":
                assert MARKS[one.words[linked]] == one.words[word]
            elif name == "tense":
                assert one.words[linked] in TIMES.values()
            else:
                assert one.words[word] in ("ran", "runs")
                assert one.heads[linked] == word


def test_a_negative_weight_breaks_the_rise_of_the_loss_and_nothing_else():
    lab = all_labs()["shaping-price"]
    finding = run_lab(lab, size="smallest", **lab.counterexample).finding
    assert [check.name[:21] for check in finding.checks if check.holds is False] == ["L_near: largest fall "]
