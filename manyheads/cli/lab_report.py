"""What `manyheads lab` prints: the page of one lab, the table of several, the verdict of every claim; and its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from manyheads.cli import console

if TYPE_CHECKING:
    from manyheads.labs.claims import Erratum, Row
    from manyheads.labs.lab import LabRun
    from manyheads.labs.results import Outcome

STYLES = {
    "holds": "green", "holds with a correction": "yellow", "undecided at this size": "yellow", "fails": "bold red",
    "error": "bold red", "tested": "green", "shown": "green",
}  # fmt: skip
PROSE_WIDTH = 90


def report(outcomes: Sequence[Outcome], seconds: float, *, has_all: bool, as_json: bool, html: Path | None) -> None:
    """Prints and writes what labs found. Exit status 1 if a claim fails, or if a lab raised."""
    from manyheads.labs.results import LabError, has_failed

    if html is not None:
        write_page(html, outcomes, seconds, has_all)
    if as_json:
        console.print_json(report_tree(outcomes, seconds, has_all))
    elif len(outcomes) == 1 and not isinstance(outcomes[0], LabError):
        print_page(outcomes[0])
    else:
        print_table(outcomes)
        print_claims(*judged(outcomes, has_all), outcomes)
        print_summary(outcomes, seconds)
    if html is not None and not as_json:
        console.print_note(f"wrote {html}")
    if has_failed(outcomes):
        raise typer.Exit(console.EXIT_FAILURE)


def judged(outcomes: Sequence[Outcome], has_all: bool) -> tuple[list[Row], list[Erratum]]:
    """The rows and errata that the labs judge; all of them if all labs ran."""
    from manyheads.labs.claims import read_claims

    claims = read_claims()
    rows = [row for row in claims.rows.values() if has_all or any(row.id in outcome.lab.rows for outcome in outcomes)]
    errata = [
        erratum for erratum in claims.errata.values() if has_all or any(erratum.id in o.lab.errata for o in outcomes)
    ]
    return rows, errata


def report_tree(outcomes: Sequence[Outcome], seconds: float, has_all: bool) -> dict[str, Any]:
    from manyheads.labs.results import claim_tree, machine, outcome_tree, versions

    rows, errata = judged(outcomes, has_all)
    return {
        "schema": 1,
        "labs": [outcome_tree(outcome) for outcome in outcomes],
        "rows": [claim_tree(row, outcomes) for row in rows],
        "errata": [claim_tree(erratum, outcomes) for erratum in errata],
        "seconds": round(seconds, 1),
        "machine": machine(),
        "versions": versions(),
    }


def print_page(run: LabRun) -> None:
    """The page of one lab."""
    from manyheads.labs.views.page_text import page_text

    out = console.stdout()
    for number, (heading, text) in enumerate(page_text(run, min(out.width, PROSE_WIDTH))):
        if heading:
            out.print(heading, style="bold", soft_wrap=True)
        style = STYLES[run.finding.verdict] if number == 0 else ""
        out.print(text, style=style, soft_wrap=True)
        out.print()


def print_table(outcomes: Sequence[Outcome]) -> None:
    """A line per lab: its verdict, and the number that decides beside its prediction."""
    from rich.text import Text

    from manyheads.labs.results import LabError, verdict_of
    from manyheads.labs.views.explain import MARKS, deciding_text

    table = console.new_table(["lab", "verdict", "measured", "predicted"], ["seconds"])
    for outcome in outcomes:
        verdict = verdict_of(outcome)
        seconds = "" if isinstance(outcome, LabError) else f"{outcome.seconds:,.1f}"
        mark = Text(f"{MARKS[verdict]} {verdict}", STYLES[verdict])
        table.add_row(outcome.lab.id, mark, *deciding_text(outcome), seconds)
    console.stdout().print(table)


def print_summary(outcomes: Sequence[Outcome], seconds: float) -> None:
    from manyheads.labs.results import machine, verdict_of
    from manyheads.labs.views.explain import summary

    verdicts = [verdict_of(outcome) for outcome in outcomes]
    console.stdout().print(
        f"{len(outcomes)} labs: {summary(verdicts)}; {seconds:,.0f} seconds on {machine()}", style="bold"
    )


def write_page(path: Path, outcomes: Sequence[Outcome], seconds: float, has_all: bool) -> None:
    from manyheads.files.write import write_text
    from manyheads.labs.results import machine, versions
    from manyheads.labs.views.page_html import report_html

    facts = {"command": f"`{command_of_all(outcomes, has_all)}`", "time": f"{seconds:,.0f} seconds"}
    facts |= {"machine": machine()} | versions()
    write_text(path, report_html(outcomes, facts, has_all=has_all), overwrite=True)


def command_of_all(outcomes: Sequence[Outcome], has_all: bool) -> str:
    """The command that gives these outcomes again."""
    from manyheads.labs.results import LabError

    runs = [outcome for outcome in outcomes if not isinstance(outcome, LabError)]
    if len(outcomes) == 1 and runs:
        return runs[0].command
    words = ["manyheads lab run", "--all" if has_all else " ".join(outcome.lab.id for outcome in outcomes)]
    words += ["--full"] if any(run.size == "full" for run in runs) else ["--quick"]
    words += [f"--seed {runs[0].seed}"] if runs and runs[0].seed else []
    return " ".join(words)


def print_claims(
    rows: Sequence[Row], errata: Sequence[Erratum], outcomes: Sequence[Outcome], *, as_json: bool = False
) -> None:
    """Every row and erratum with its labs or tests, and with the verdict if labs ran."""
    from rich.text import Text

    from manyheads.labs.results import claim_tree
    from manyheads.labs.views.explain import MARKS

    trees = {
        "rows": [claim_tree(row, outcomes) for row in rows],
        "errata": [claim_tree(erratum, outcomes) for erratum in errata],
    }
    if as_json:
        console.print_json({"schema": 1} | trees)
        return
    for name, key in (("rows", "row"), ("errata", "erratum")):
        if not trees[name]:
            continue
        more = ["verdict"] if outcomes else ["source"]
        table = console.new_table([key, more[0], "claim" if key == "row" else "what is true", "shown by"])
        for tree in trees[name]:
            verdict = Text(f"{MARKS[tree['verdict']]} {tree['verdict'] or 'not run'}", STYLES.get(tree["verdict"], ""))
            claim = tree["claim"] if key == "row" else tree["correction"]
            table.add_row(tree[key], verdict if outcomes else tree["source"], claim, shown_by(tree))
        console.stdout().print(table)


def shown_by(tree: dict[str, Any]) -> str:
    """The labs of a claim, or the first of its tests."""
    tests = tree["tests"]
    more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
    return ", ".join(tree["labs"]) or (tests[0] + more if tests else "nothing")
