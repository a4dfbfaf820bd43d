"""Runs a lab at its smallest size, as it is and with its counterexamples."""

from __future__ import annotations

import re

from manyheads.labs.lab import all_labs, run_lab

CHEAP = 1.5  # seconds that a lab states for `--quick`, of which its smallest size takes a part
TIMES = re.compile(r"\b\w*seconds\b|\btime\b")


def cheap_labs():
    """The labs that `make test` runs; the others train models, and `make labs` runs them."""
    return [name for name, lab in all_labs().items() if lab.seconds[0] <= CHEAP]


def slow_labs(*chapters):
    return [name for name, lab in all_labs().items() if lab.chapter in chapters and lab.seconds[0] > CHEAP]


def findings(name):
    """At the smallest size: that of the lab, and of the counterexample of each of its rows."""
    lab, made = all_labs()[name], {}

    def find(parameters):
        key = tuple(parameters.items())
        if key not in made:
            made[key] = run_lab(lab, size="smallest", **parameters).finding
        return made[key]

    assert lab.counterexample, "a lab says which parameters make its claim false"
    assert set(lab.row_counterexamples) <= set(lab.rows)
    assert find(lab.counterexample).verdict == "fails", find(lab.counterexample).checks
    return find({}), {row: find(lab.row_counterexamples.get(row, lab.counterexample)) for row in lab.rows}


def check_both_ways(name):
    """Each row of a lab holds, perhaps with a correction, and fails with its counterexample; no time decides."""
    finding, counterexamples = findings(name)
    assert finding.verdict == ("holds with a correction" if finding.correction else "holds"), finding.checks
    for row, other in counterexamples.items():
        assert finding.row_verdict(row).startswith("holds"), (row, finding.checks)
        assert other.row_verdict(row) == "fails", (row, other.checks)
    check_rows_and_times(name, finding)


def check_rows_and_times(name, finding):
    """Checks and corrections are about rows of the lab, and a time has no prediction."""
    rows = {row for check in finding.checks for row in check.rows} | set(finding.corrected)
    assert rows <= set(all_labs()[name].rows), name
    assert [check.name for check in finding.checks if check.expected and TIMES.search(check.name)] == []
