"""The page of one lab as text, for a student at a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill, indent

from manyheads.labs.finding import Finding
from manyheads.labs.lab import LabRun
from manyheads.labs.views.explain import (
    MARKS,
    citation,
    claims_of,
    code_of,
    counterexample_command,
    errata_of,
    format_measured,
    mark,
    next_commands,
)
from manyheads.labs.views.figures_text import to_text

Section = tuple[str, str]  # a heading, and the text below it


def page_text(run: LabRun, width: int) -> list[Section]:
    """The sections of the page; a line of prose has at most `width` characters."""
    finding, lab = run.finding, run.lab
    state = f"{MARKS[finding.verdict]} {finding.verdict}"
    sections: list[Section] = [(lab.title, state)]
    if claims := "\n".join(claim_lines(run, width)):
        sections.append(("Claim", claims))
    if lab.text:
        sections.append(("", paragraphs(lab.text, width)))
    sections.append(("Predicted and measured", checks_text(finding)))
    sections += [("", to_text(figure, min(width, 76))) for figure in finding.figures]
    sections += [
        (name, paragraphs(text, width))
        for name, text in (("Correction", finding.correction), ("Note", finding.note))
        if text
    ]
    sections.append(("Try next", next_text(run)))
    code, path, line = code_of(lab)
    sections.append((f"Code: {path}, line {line}", indent(code, "  ")))
    return sections


def claim_lines(run: LabRun, width: int) -> Iterator[str]:
    for row in claims_of(run.lab):
        yield wrapped(f"{row.id:<4} {row.claim}", width)
        yield wrapped(f"     {citation(row.source)}", width)
    for erratum in errata_of(run.lab):
        yield wrapped(f"Erratum {erratum.id}, {citation(erratum.source)}: {erratum.claim} {erratum.correction}", width)


def wrapped(text: str, width: int) -> str:
    return fill(text, width, initial_indent="  ", subsequent_indent="       ")


def paragraphs(text: str, width: int) -> str:
    """Prose in lines of this width; an indented block, such as a formula, as it is."""
    blocks = text.split("\n\n")
    return "\n\n".join(block if block.startswith(" ") else fill(" ".join(block.split()), width) for block in blocks)


def checks_text(finding: Finding) -> str:
    rows = [(mark(check), check.name, format_measured(check), check.expected) for check in finding.checks]
    names, values = (max(len(row[i]) for row in rows) for i in (1, 2))
    header = f"    {'':{names}}  {'measured':>{max(8, values)}}  predicted"
    lines = [f"  {a or ' '} {b:<{names}}  {c:>{max(8, values)}}  {d}".rstrip() for a, b, c, d in rows]
    return "\n".join([header, *lines])


def next_text(run: LabRun) -> str:
    lines = next_commands(run.lab)
    if counterexample := counterexample_command(run.lab):
        lines = [*lines, f"{counterexample}   # counterexample: the claim fails"]
    return "\n".join(f"  {line}" for line in [*lines, f"This run: {run.command} ({run.seconds:.1f} seconds)"])
