"""What a lab found: numbers beside their predictions, figures, and the verdict that follows from the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, SupportsFloat

from manyheads.labs.figures import Figure

Verdict = Literal["holds", "fails", "holds with a correction", "undecided at this size"]


@dataclass(frozen=True)
class Check:
    """A measured value beside its prediction. Without a prediction it is only reported, and decides nothing."""

    name: str
    measured: float | str
    expected: str = ""  # with its tolerance, such as "≤ 0.01"
    holds: bool | None = None  # None if it is only reported, or undecided at this size
    rows: tuple[str, ...] = ()  # that it judges, of those of its lab; all of them if empty


def at_most(name: str, measured: SupportsFloat, bound: float) -> Check:
    return Check(name, float(measured), f"≤ {bound:.6g}", float(measured) <= bound)


def at_least(name: str, measured: SupportsFloat, bound: float) -> Check:
    return Check(name, float(measured), f"≥ {bound:.6g}", float(measured) >= bound)


def near(name: str, measured: SupportsFloat, expected: float, tolerance: float) -> Check:
    value = float(measured)
    holds = math.isclose(value, expected, rel_tol=0, abs_tol=tolerance)
    return Check(name, value, f"{expected:.6g} ± {tolerance:.2g}", holds)


def equals(name: str, measured: float | str, expected: float | str) -> Check:
    return Check(name, measured, f"{expected:,}" if isinstance(expected, int) else str(expected), measured == expected)


def is_true(name: str, measured: bool) -> Check:
    return Check(name, "yes" if measured else "no", "yes", bool(measured))


def reported(name: str, measured: float | str) -> Check:
    return Check(name, measured)


def judging(rows: str, *checks: Check) -> tuple[Check, ...]:
    """The same checks, which judge these rows alone, such as "F2" or "F2 F3"."""
    return tuple(replace(check, rows=tuple(rows.split())) for check in checks)


@dataclass(frozen=True)
class Finding:
    """The checks of a claim, from which its verdict follows; it may be that the claim is false."""

    checks: tuple[Check, ...]
    figures: tuple[Figure, ...] = ()
    correction: str = ""  # what is true instead, if the claim as the document states it is not
    note: str = ""  # what a reader should know about this result
    corrected: tuple[str, ...] = ()  # rows that the correction is about; none if it belongs to an erratum alone

    def __post_init__(self) -> None:
        assert any(check.expected for check in self.checks), "a finding needs a prediction"

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.checks, bool(self.correction))

    def row_verdict(self, row: str) -> Verdict:
        """The verdict of one row: that of its own checks, and of those that judge every row."""
        checks = [check for check in self.checks if not check.rows or row in check.rows]
        return verdict_of(checks, bool(self.correction) and row in self.corrected)


def verdict_of(checks: Sequence[Check], is_corrected: bool) -> Verdict:
    """What some checks say together; without a prediction they say nothing."""
    predictions = [check.holds for check in checks if check.expected]
    if False in predictions:
        return "fails"
    if None in predictions or not predictions:
        return "undecided at this size"
    return "holds with a correction" if is_corrected else "holds"
