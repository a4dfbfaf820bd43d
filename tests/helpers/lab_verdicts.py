"""Runs a lab at its smallest size, as it is and with its counterexample."""

from __future__ import annotations

from manyheads.labs.lab import all_labs, run_lab


def labs_of(*chapters):
    return [name for name, lab in all_labs().items() if lab.chapter in chapters]


def check_both_ways(name):
    """The claim holds, perhaps with a correction, and fails with its counterexample."""
    lab = all_labs()[name]
    finding = run_lab(lab, size="smallest").finding
    assert finding.verdict == ("holds with a correction" if finding.correction else "holds"), finding.checks
    assert lab.counterexample, "a lab says which parameters make its claim false"
    counterexample = run_lab(lab, size="smallest", **lab.counterexample).finding
    assert counterexample.verdict == "fails", counterexample.checks
