"""Writes docs/labs from the labs and from docs/labs/results.json, which `make labs-full` makes; it runs no lab.

Called by docs/generate.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from markup import page, prose, table

FOLDER = Path(__file__).parent / "labs"
RESULTS = FOLDER / "results.json"


def lab_pages(results: Path = RESULTS) -> dict[str, str]:
    """The text of every page and figure, by its path in docs/labs."""
    from manyheads.labs.claims import read_claims
    from manyheads.labs.results import read_runs

    tree = json.loads(results.read_text(encoding="utf-8"))
    runs = {run.lab.id: run for run in read_runs(tree["labs"])}
    pages = {"index.md": index_page(tree, runs)}
    for chapter in read_claims().chapters.values():
        pages[f"{chapter.id}.md"] = chapter_page(chapter, runs)
    return pages | dict(figure_files(runs.values()))


def figure_files(runs: Iterable[Any]) -> Iterator[tuple[str, str]]:
    from manyheads.labs.figures import Table
    from manyheads.labs.views.figures_svg import to_svg

    for run in runs:
        for i, figure in enumerate(run.finding.figures, 1):
            if not isinstance(figure, Table):
                yield f"figures/{run.lab.id}-{i}.svg", to_svg(figure)


# --------------------------------------------------------------------------------------------------------------- index


def index_page(tree: dict[str, Any], runs: dict[str, Any]) -> str:
    from manyheads.labs.claims import read_claims
    from manyheads.labs.lab import all_labs
    from manyheads.labs.views.explain import citation, summary

    claims, labs = read_claims(), all_labs()
    rows = claims.rows.values()
    verdicts = [run.finding.verdict for run in runs.values()]
    introduction = (
        "What five documents about attention and transformers claim, run and judged. A lab measures what a claim "
        "predicts; its verdict follows from the numbers. `manyheads lab list` lists the labs, `manyheads lab run ID` "
        "runs one and prints a page about it, `manyheads lab notebook CHAPTER` writes a chapter as a notebook."
    )
    chapters = [
        (f"[{one.title}]({one.id}.md)", one.text, sum(lab.chapter == one.id for lab in labs.values()))
        for one in claims.chapters.values()
    ]
    size, seed = next(((run.size, run.seed) for run in runs.values()), ("quick", 0))
    made = (
        f"`manyheads lab run --all --{size} --seed {seed}`, {tree['seconds']:,.0f} seconds on {tree['machine']}, with "
        f"torch {tree['versions']['torch']}: {len(runs)} labs, of which {summary(verdicts)}. The numbers depend on the "
        "seed and the kind of processor."
    )
    documents = "\n".join(f"- {one.id}: {one.title}" for one in claims.documents.values())
    errata = [
        (one.id, citation(one.source), one.claim, one.correction, shown_by(one)) for one in claims.errata.values()
    ]
    return page(
        "Labs", introduction,
        table(("chapter", "", "labs"), chapters),
        f"## Verdicts\n\n{made}",
        table(("lab", "verdict", "measured", "predicted", "seconds"), [lab_row(lab, runs) for lab in labs.values()]),
        f"## Claims\n\nEvery claim with its source in the documents:\n\n{documents}",
        table(("row", "claim", "source", "verdict", "shown by"), [claim_row(row, runs) for row in rows]),
        "## Errata\n\nWhat the documents state and is not so.",
        table(("erratum", "source", "as stated", "what is true", "shown by"), errata),
    )  # fmt: skip


def lab_row(lab: Any, runs: dict[str, Any]) -> tuple[str, ...]:
    from manyheads.labs.views.explain import deciding_text

    name = f"[{lab.id}]({lab.chapter}.md#{lab.id})"
    if lab.id not in runs:
        return name, "not run", "", "", ""
    return name, verdict(runs[lab.id]), *deciding_text(runs[lab.id]), f"{runs[lab.id].seconds:,.1f}"


def claim_row(row: Any, runs: dict[str, Any]) -> tuple[str, ...]:
    from manyheads.labs.results import claim_tree

    judged = claim_tree(row, list(runs.values()))["verdict"]
    return row.id, row.claim, row.source, judged or "not run", shown_by(row)


def shown_by(entry: Any) -> str:
    labs = [f"[{lab.id}]({lab.chapter}.md#{lab.id})" for lab in entry.labs()]
    return ", ".join(labs or [f"`{test}`" for test in entry.tests])


def verdict(run: Any) -> str:
    from manyheads.labs.views.explain import MARKS

    return f"{MARKS[run.finding.verdict]} {run.finding.verdict}"


# ------------------------------------------------------------------------------------------------------------ chapters


def chapter_page(chapter: Any, runs: dict[str, Any]) -> str:
    from manyheads.labs.claims import read_claims
    from manyheads.labs.lab import all_labs

    labs = [lab for lab in all_labs().values() if lab.chapter == chapter.id]
    rows = [row for row in read_claims().rows.values() if row.chapter == chapter.id and not row.labs()]
    tested = [(row.id, row.claim, row.source, shown_by(row)) for row in rows]
    return page(
        chapter.title, chapter.text,
        *(block for lab in labs for block in lab_blocks(lab, runs.get(lab.id))),
        "## Shown by tests" if tested else "",
        table(("row", "claim", "source", "tests"), tested) if tested else "",
    )  # fmt: skip


def lab_blocks(lab: Any, run: Any) -> Iterator[str]:
    """A lab: its claims, the explanation, the commands, and what was found."""
    from manyheads.labs.views.explain import citation, claims_of, errata_of, file_of

    yield f"## {lab.id}"
    yield f"**{prose(lab.title)}** {verdict(run) if run else ''}".strip()
    claims = [f"- {row.id}: {prose(row.claim)} *{citation(row.source)}*" for row in claims_of(lab)]
    claims += [f"- Erratum {one.id}: {prose(one.claim)} {prose(one.correction)}" for one in errata_of(lab)]
    yield "\n".join(claims)
    yield prose(lab.text)
    if run is not None:
        yield from finding_blocks(run)
    yield f"```text\n{chr(10).join(commands(lab, run))}\n```"
    yield f"Code: `{file_of(lab)}`."


def commands(lab: Any, run: Any) -> Iterator[str]:
    from manyheads.labs.views.explain import counterexample_command, next_commands

    yield run.command if run else f"manyheads lab run {lab.id}"
    yield from next_commands(lab)
    if counterexample := counterexample_command(lab):
        yield f"{counterexample}   # counterexample: the claim fails"


def finding_blocks(run: Any) -> Iterator[str]:
    from manyheads.labs.figures import Table
    from manyheads.labs.views.explain import format_measured, mark
    from manyheads.labs.views.figures_text import format_cell

    checks = [(mark(one), one.name, format_measured(one), one.expected) for one in run.finding.checks]
    yield table(("", "", "measured", "predicted"), checks)
    for i, figure in enumerate(run.finding.figures, 1):
        if isinstance(figure, Table):
            rows: list[Sequence[str]] = [[format_cell(one) for one in row] for row in figure.rows]
            yield f"*{prose(figure.title)}*\n\n{table(figure.columns, rows)}"
        else:
            yield f"![{prose(figure.title).replace('[', '(').replace(']', ')')}](figures/{run.lab.id}-{i}.svg)"
    for name, text in (("Correction", run.finding.correction), ("Note", run.finding.note)):
        if text:
            yield f"**{name}.** {prose(text)}"
