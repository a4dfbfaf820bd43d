"""A lab that runs twice with one seed finds the same, times excepted."""

from __future__ import annotations

import pytest
from lab_verdicts import TIMES, cheap_labs

from manyheads.labs.lab import run_lab


@pytest.mark.parametrize("name", cheap_labs())
def test_the_numbers_depend_on_the_seed_alone(name):
    first, second = (run_lab(name, size="smallest").finding.checks for _ in range(2))
    assert [c for c in first if not TIMES.search(c.name)] == [c for c in second if not TIMES.search(c.name)]
