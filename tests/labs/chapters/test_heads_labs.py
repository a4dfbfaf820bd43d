"""The slow labs of the chapter on heads: each holds, and fails with its counterexample."""

from __future__ import annotations

import pytest
from lab_verdicts import check_both_ways, slow_labs

from manyheads.labs.lab import all_labs, run_lab


@pytest.mark.parametrize("name", slow_labs("heads"))
def test_the_claim_holds_and_its_counterexample_fails(name):
    check_both_ways(name)


def test_one_layer_more_than_needed_is_found():
    finding = run_lab(all_labs()["more-heads-fewer-layers"], size="smallest", missing=-1).finding
    assert [check.name for check in finding.checks if check.holds is False] == [
        "configurations that need all their layers for it"
    ]
