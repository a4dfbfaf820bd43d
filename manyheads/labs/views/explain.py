"""What every view of a lab says: its claims with their sources, the number that decides, what to try next, its code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

from manyheads.labs.claims import Erratum, Row, read_claims
from manyheads.labs.finding import Check, Finding
from manyheads.labs.lab import Lab, command_of
from manyheads.labs.results import LabError, Outcome
from manyheads.labs.views.axes import format_number

MARKS = {
    "holds": "✓", "holds with a correction": "✓", "fails": "✗", "undecided at this size": "?", "error": "!",
    "tested": "✓", "shown": "✓", None: "·",
}  # fmt: skip
REPOSITORY = Path(__file__).parents[3]


def citation(source: str) -> str:
    """The source of a claim with the titles of the documents, such as "Lecture 6: attention and transformers"."""
    documents = read_claims().documents
    if re.findall(r"S\d", source) == list(documents):
        return "all documents"
    parts = [part.partition(" ") for part in re.split(r",\s*(?=S\d)", source)]
    return "; ".join(documents[name].title + (f", {section}" if section else "") for name, _, section in parts)


def claims_of(lab: Lab) -> list[Row]:
    rows = read_claims().rows
    return [rows[name] for name in lab.rows if name in rows]


def errata_of(lab: Lab) -> list[Erratum]:
    errata = read_claims().errata
    return [errata[name] for name in lab.errata if name in errata]


# ------------------------------------------------------------------------------------------------------------- numbers


def format_measured(check: Check) -> str:
    return check.measured if isinstance(check.measured, str) else format_number(check.measured)


def mark(check: Check) -> str:
    """Whether a prediction was right; nothing for a value that is only reported."""
    return "" if not check.expected else {True: "✓", False: "✗", None: "?"}[check.holds]


def deciding_check(finding: Finding) -> Check:
    """The check that a reader should see first: one that is wrong, else one that is open, else a number."""
    predictions = [check for check in finding.checks if check.expected]
    for holds in (False, None):
        if open_ones := [check for check in predictions if check.holds is holds]:
            return open_ones[0]
    numbers = [check for check in predictions if not isinstance(check.measured, str)]
    return (numbers or predictions)[0]


def deciding_text(outcome: Outcome) -> tuple[str, str]:
    """The value that decides, and its prediction; of a lab that raised, its error."""
    if isinstance(outcome, LabError):
        return outcome.message, ""
    check = deciding_check(outcome.finding)
    return f"{check.name}: {format_measured(check)}", check.expected


def evidence(outcome: Outcome) -> str:
    """What a lab shows about an erratum: its correction, else the number that decides."""
    if not isinstance(outcome, LabError) and outcome.finding.correction:
        return outcome.finding.correction
    value, expected = deciding_text(outcome)
    return f"{value} (predicted: {expected})" if expected else value


def summary(outcomes: Sequence[str]) -> str:
    """How many labs have each verdict."""
    names = {
        "holds": "hold", "holds with a correction": "hold with a correction", "fails": "fail",
        "undecided at this size": "undecided at this size", "error": "ended with an error",
    }  # fmt: skip
    counts = {name: list(outcomes).count(verdict) for verdict, name in names.items()}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


# ------------------------------------------------------------------------------------------------------------ commands


def next_commands(lab: Lab) -> list[str]:
    """Commands of other runs, without the counterexample, which is shown by itself."""
    commands = [f"manyheads lab run {lab.id} {flags}" for flags in lab.try_next]
    return [command for command in commands if command != counterexample_command(lab)]


def counterexample_command(lab: Lab) -> str:
    """The command for which the claim fails, if the lab has one."""
    if not lab.counterexample:
        return ""
    return command_of(lab, "quick", 0, {**lab.parameters_at("quick"), **lab.counterexample})


# ---------------------------------------------------------------------------------------------------------------- code


def code_of(lab: Lab) -> tuple[str, str, int]:
    """The code that a reader is shown, without decorator and docstring; its file and its line."""
    function = inspect.unwrap(lab.function)
    lines, first = inspect.getsourcelines(function)
    source = dedent("".join(lines))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    start, skipped = node.lineno, range(0)
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        skipped = range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)
    code = [line for i, line in enumerate(source.splitlines(), 1) if i >= start and i not in skipped]
    return "\n".join(code), file_of(lab), first + start - 1


def file_of(lab: Lab) -> str:
    """The file of a lab: by its path in the repository, or by its name if it is a user's."""
    path = Path(inspect.getsourcefile(inspect.unwrap(lab.function)) or "")
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY / "manyheads") else path.name
