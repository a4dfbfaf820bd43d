"""Findings as plain data, for JSON output and for the pages that are made from it later."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from manyheads import __version__
from manyheads.labs.claims import Erratum, Row
from manyheads.labs.figures import Bars, Drawing, Figure, Heatmap, Lines, Table
from manyheads.labs.finding import Check, Finding, Verdict
from manyheads.labs.lab import Lab, LabRun, Size, all_labs

FIGURES: dict[str, type[Any]] = {"lines": Lines, "bars": Bars, "heatmap": Heatmap, "table": Table, "drawing": Drawing}
DIGITS = 6  # of the numbers in a figure
# what a verdict of several labs is: that of the first in this list
ORDER = ("error", "fails", "undecided at this size", "holds with a correction", "holds")


@dataclass(frozen=True)
class LabError:
    """A lab that raised, or whose process ended, and why."""

    lab: Lab
    message: str


Outcome = LabRun | LabError


def verdict_of(outcome: Outcome) -> Verdict | str:
    return "error" if isinstance(outcome, LabError) else outcome.finding.verdict


def has_failed(outcomes: Sequence[Outcome]) -> bool:
    return any(verdict_of(outcome) in ("error", "fails") for outcome in outcomes)


# -------------------------------------------------------------------------------------------------------------- to data


def outcome_tree(outcome: Outcome) -> dict[str, Any]:
    lab = outcome.lab
    tree: dict[str, Any] = {
        "lab": lab.id, "chapter": lab.chapter, "claim": lab.title, "rows": list(lab.rows), "errata": list(lab.errata),
        "verdict": verdict_of(outcome), "error": None,
    }  # fmt: skip
    if isinstance(outcome, LabError):
        return tree | {"error": outcome.message}
    finding = outcome.finding
    return tree | {
        "command": outcome.command,
        "size": outcome.size,
        "seed": outcome.seed,
        "parameters": dict(outcome.parameters),
        "seconds": round(outcome.seconds, 2),
        "checks": [check_tree(check) for check in finding.checks],
        "correction": finding.correction,
        "corrected_rows": list(finding.corrected),
        "note": finding.note,
        "figures": [figure_tree(figure) for figure in finding.figures],
    }


def check_tree(check: Check) -> dict[str, Any]:
    measured = check.measured
    is_finite = isinstance(measured, str) or math.isfinite(measured)
    # JSON has no infinity
    return asdict(check) | {"measured": measured if is_finite else str(measured), "rows": list(check.rows)}


def figure_tree(figure: Figure) -> dict[str, Any]:
    kind = next(name for name, figure_type in FIGURES.items() if isinstance(figure, figure_type))
    return {"kind": kind} | plain(asdict(figure))


def plain(value: Any) -> Any:
    """Mappings, sequences and numbers as JSON has them."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def claim_tree(entry: Row | Erratum, outcomes: Sequence[Outcome] = ()) -> dict[str, Any]:
    """A row or an erratum with what shows it, and the verdict of the labs that ran."""
    labs = [lab.id for lab in entry.labs()]
    verdicts = [claim_verdict(entry, outcome) for outcome in outcomes if outcome.lab.id in labs]
    tree = {"row" if isinstance(entry, Row) else "erratum": entry.id} | {
        name: value for name, value in asdict(entry).items() if name not in ("id", "tests")
    }
    return tree | {"labs": labs, "tests": list(entry.tests), "verdict": joint_verdict(verdicts, entry)}


def claim_verdict(entry: Row | Erratum, outcome: Outcome) -> Verdict | str:
    """What a lab says of a row, by the checks that judge it, or of an erratum."""
    if isinstance(outcome, LabError) or isinstance(entry, Erratum):
        return verdict_of(outcome)
    return outcome.finding.row_verdict(entry.id)


def joint_verdict(verdicts: Sequence[str], entry: Row | Erratum) -> str | None:
    """The worst verdict of the labs of a claim, "tested" if only tests show it, or None if no lab of it ran.

    An erratum whose labs hold is "shown".
    """
    if verdicts:
        worst = min(verdicts, key=ORDER.index)
        return "shown" if isinstance(entry, Erratum) and worst.startswith("holds") else worst
    return "tested" if entry.tests and not entry.labs() else None


def versions() -> dict[str, str]:
    return {"manyheads": __version__, "torch": torch.__version__, "python": platform.python_version()}


def machine() -> str:
    """The kind of the machine, such as "2 cores, AVX512"."""
    cores = available_cores()
    return f"{cores} {'core' if cores == 1 else 'cores'}, {torch.backends.cpu.get_cpu_capability()}"


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ------------------------------------------------------------------------------------------------------------ from data


def read_runs(trees: Sequence[Mapping[str, Any]]) -> list[LabRun]:
    """The runs of JSON output, of the labs that exist now."""
    labs = all_labs()
    return [run_from(labs[tree["lab"]], tree) for tree in trees if tree["lab"] in labs and tree["error"] is None]


def run_from(lab: Lab, tree: Mapping[str, Any]) -> LabRun:
    size: Size = tree["size"]
    finding = Finding(
        tuple(Check(**check | {"rows": tuple(check.get("rows", ()))}) for check in tree["checks"]),
        tuple(figure_from(figure) for figure in tree["figures"]),
        tree["correction"],
        tree["note"],
        tuple(tree.get("corrected_rows", ())),
    )
    parameters = lab.parameters_at(size) | {
        name: value for name, value in tree["parameters"].items() if name in lab.parameters_at(size)
    }
    return LabRun(lab, size, tree["seed"], parameters, finding, tree["seconds"])


def figure_from(tree: Mapping[str, Any]) -> Figure:
    fields = dict(tree)
    figure: Figure = FIGURES[fields.pop("kind")](**fields)
    return figure
