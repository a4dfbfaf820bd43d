"""The slow labs of the chapter on positions: each holds, and fails with its counterexample."""

from __future__ import annotations

import pytest
from lab_verdicts import check_both_ways, slow_labs


@pytest.mark.parametrize("name", slow_labs("position"))
def test_the_claim_holds_and_its_counterexample_fails(name):
    check_both_ways(name)
