"""The slow labs of the chapter on recurrent networks: each holds, and fails with its counterexample."""

from __future__ import annotations

import pytest
from lab_verdicts import check_both_ways, slow_labs

from manyheads.labs.lab import all_labs, run_lab


@pytest.mark.parametrize("name", [name for name in slow_labs("recurrent") if name != "bottleneck"])
def test_the_claim_holds_and_its_counterexample_fails(name):
    check_both_ways(name)


def test_the_bottleneck_shows_at_few_tokens_but_50_need_the_full_size():
    lab = all_labs()["bottleneck"]
    finding = run_lab(lab, size="smallest").finding
    assert finding.verdict == "undecided at this size", finding.checks
    assert [check.holds for check in finding.checks if check.expected] == [True, True, None], finding.checks
    assert run_lab(lab, size="smallest", **lab.counterexample).finding.verdict == "fails"
