"""Runs a lab at its smallest size, as it is and with its opposite planted."""

from __future__ import annotations

from manyheads.labs.lab import all_labs, run_lab


def labs_of(*chapters):
    return [name for name, lab in all_labs().items() if lab.chapter in chapters]


def check_both_ways(name):
    """The claim holds, perhaps with a correction, and fails if its opposite is planted."""
    lab = all_labs()[name]
    finding = run_lab(lab, at="smallest").finding
    assert finding.verdict == ("holds with a correction" if finding.correction else "holds"), finding.checks
    assert lab.opposite, "a lab says which parameters make its claim false"
    planted = run_lab(lab, at="smallest", **lab.opposite).finding
    assert planted.verdict == "fails", planted.checks
