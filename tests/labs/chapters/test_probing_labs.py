"""The slow labs of the chapter on probing: each holds, and fails with its counterexample."""

from __future__ import annotations

import pytest
from lab_verdicts import check_both_ways, slow_labs
from small_checkpoints import folder_of

from manyheads.labs.lab import run_lab


@pytest.mark.parametrize("name", slow_labs("probing"))
def test_the_claim_holds_and_its_counterexample_fails(name):
    check_both_ways(name)


def test_a_checkpoint_is_probed_on_a_treebank(tmp_path):
    """The tag is a function of the word, so the embeddings of a random model have it already: the claim fails."""
    folder_of("llama", tmp_path)
    words = [(f"word{i}", "NOUN" if i % 2 else "VERB") for i in range(40)]
    lines = ["\n".join(f"{n}\t{word}\t_\t{tag}\t_\t_\t{n - 1}\tdep\t_\t_"
                       for n, (word, tag) in enumerate(words[i : i + 5], 1)) + "\n\n" for i in range(36)]  # fmt: skip
    treebank = tmp_path / "small.conllu"
    treebank.write_text("".join(lines))
    finding = run_lab("grammar-probe", model=str(tmp_path), treebank=str(treebank)).finding
    measured = {check.name: check.measured for check in finding.checks}
    assert measured["accuracy at layer 0"] > 0.9
    assert measured["labels"] == 2
    assert finding.verdict == "fails"
