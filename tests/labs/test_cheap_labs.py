"""The labs that take little time: each row holds, and fails with its counterexample. `make labs` runs the others.

A lab is cheap if it states at most `lab_verdicts.CHEAP` seconds for `--quick`; its smallest size takes less.
"""

from __future__ import annotations

import pytest
from lab_verdicts import cheap_labs, check_both_ways

from manyheads.labs.lab import all_labs


@pytest.mark.parametrize("name", cheap_labs())
def test_the_claim_holds_and_its_counterexample_fails(name):
    check_both_ways(name)


def test_rows_that_labs_alone_show_completely_are_among_them():
    assert {"F3", "D8", "G3"} <= {row for name in cheap_labs() for row in all_labs()[name].rows}
