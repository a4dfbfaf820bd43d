"""Findings as HTML: one lab for a notebook, or all of them as one page that opens offline, without scripts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from manyheads.inspect.notebook import Html
from manyheads.labs.claims import Chapter, Erratum, Row, read_claims
from manyheads.labs.figures import Figure, Table
from manyheads.labs.finding import Finding
from manyheads.labs.lab import LabRun
from manyheads.labs.results import LabError, Outcome, claim_tree, verdict_of
from manyheads.labs.views import explain
from manyheads.labs.views.figures_svg import to_svg
from manyheads.labs.views.figures_text import format_cell
from manyheads.labs.views.page_style import STYLE
from manyheads.labs.views.svg_frame import style

SUBSCRIPT = re.compile(r"(?<=\b[^\W\d_])_([A-Za-z0-9]{1,5})(?![A-Za-z0-9_])")  # of one letter: v_a, μ_b, L_max
TITLE = "Claims about attention and transformers, run and judged"


def run_html(run: LabRun) -> Html:
    """One lab, for a notebook."""
    return Html(f'<div class="mh-labs"><style>{STYLE}{style()}</style>\n{article(run)}</div>\n')


def report_html(outcomes: Sequence[Outcome], facts: Mapping[str, str], *, has_all: bool) -> str:
    """One page of all outcomes by chapter, with the errata; `facts` are the command, the versions and the like."""
    claims = read_claims()
    chapters = [
        chapter for chapter in chapters_of(outcomes) if has_all or any(o.lab.chapter == chapter.id for o in outcomes)
    ]
    errata = [
        erratum
        for erratum in claims.errata.values()
        if has_all or any(erratum.id in outcome.lab.errata for outcome in outcomes)
    ]
    verdicts = [verdict_of(outcome) for outcome in outcomes]
    content = f"""<div class="mh-labs"><style>{STYLE}{style()}</style>
<h1>{TITLE}</h1>
<p>{len(outcomes)} {"lab" if len(outcomes) == 1 else "labs"}: {explain.summary(verdicts)}.</p>
{contents(chapters, outcomes, bool(errata))}
{"".join(chapter_html(chapter, outcomes, has_all) for chapter in chapters)}
{errata_html(errata, outcomes) if errata else ""}
<footer><dl>{"".join(f"<dt>{escape(name)}</dt><dd>{inline(value)}</dd>" for name, value in facts.items())}</dl></footer>
</div>
"""
    return Html(content).page(TITLE)


def chapters_of(outcomes: Sequence[Outcome]) -> list[Chapter]:
    """The chapters of the documents, and those of a user's labs."""
    chapters = dict(read_claims().chapters)
    for outcome in outcomes:
        chapters.setdefault(outcome.lab.chapter, Chapter(outcome.lab.chapter, outcome.lab.chapter, ""))
    return list(chapters.values())


def contents(chapters: Sequence[Chapter], outcomes: Sequence[Outcome], has_errata: bool) -> str:
    rows = []
    for chapter in chapters:
        verdicts = [verdict_of(outcome) for outcome in outcomes if outcome.lab.chapter == chapter.id]
        count = explain.summary(verdicts) or "shown by tests"
        rows.append(f'<li><a href="#{escape(chapter.id)}">{escape(chapter.title)}</a> <small>{count}</small></li>')
    errata = '<li><a href="#errata">Errata</a></li>' if has_errata else ""
    return f'<nav aria-label="Contents"><ol>{"".join(rows)}{errata}</ol></nav>'


def chapter_html(chapter: Chapter, outcomes: Sequence[Outcome], has_all: bool) -> str:
    labs = "\n".join(article(outcome) for outcome in outcomes if outcome.lab.chapter == chapter.id)
    rows = [row for row in read_claims().rows.values() if row.chapter == chapter.id and row.tests and not row.labs()]
    tests = tested_html(rows) if has_all and rows else ""
    return f"""<section id="{escape(chapter.id)}">
<h2>{escape(chapter.title)}</h2>
<p>{inline(chapter.text)}</p>
{labs}
{tests}</section>
"""


def tested_html(rows: Iterable[Row]) -> str:
    items = "\n".join(f"<li><b>{row.id}</b> {inline(row.claim)} {tests_html(row.tests)}</li>" for row in rows)
    return f"<h3>Shown by tests</h3>\n<ul>{items}</ul>\n"


def tests_html(tests: Sequence[str]) -> str:
    return f"<small>{', '.join(f'<code>{escape(test)}</code>' for test in tests)}</small>"


# ------------------------------------------------------------------------------------------------------------- one lab


def article(outcome: Outcome) -> str:
    lab = outcome.lab
    body = error_html(outcome) if isinstance(outcome, LabError) else finding_html(outcome)
    return f"""<article id="lab-{lab.id}">
<h3>{inline(lab.title)} {badge(verdict_of(outcome))}</h3>
{claims_html(explain.claims_of(lab), explain.errata_of(lab))}
{prose(lab.text)}
{body}
</article>
"""


def badge(verdict: str | None) -> str:
    """The verdict in words with a sign, so that it does not depend on its color."""
    kind = {"holds": "holds", "tested": "holds", "holds with a correction": "corrected", "fails": "fails",
            "error": "fails"}.get(verdict or "", "open")  # fmt: skip
    return f'<span class="badge {kind}">{explain.MARKS[verdict]} {verdict or "not run"}</span>'


def claims_html(rows: Sequence[Row], errata: Sequence[Erratum]) -> str:
    items = [
        f"<li><b>{row.id}</b> {inline(row.claim)} <cite>{escape(explain.citation(row.source))}</cite></li>"
        for row in rows
    ]
    items += [
        f'<li>Erratum <a href="#erratum-{erratum.id}">{erratum.id}</a>: {inline(erratum.correction)}</li>'
        for erratum in errata
    ]
    return f'<ul class="claims">{"".join(items)}</ul>' if items else ""


def error_html(outcome: LabError) -> str:
    return f"<p>The lab ended with an error: <code>{escape(outcome.message)}</code></p>"


def finding_html(run: LabRun) -> str:
    code, path, line = explain.code_of(run.lab)
    finding = run.finding
    notes = "".join(
        f'<p class="{kind}"><b>{name}.</b> {inline(text)}</p>\n'
        for kind, name, text in (("correction", "Correction", finding.correction), ("note", "Note", finding.note))
        if text
    )
    return f"""{checks_html(finding)}
{"".join(map(figure_html, finding.figures))}
{notes}<pre class="commands">{escape(chr(10).join(commands(run)))}</pre>
<details><summary>Code: {escape(path)}, line {line}</summary><pre>{escape(code)}</pre></details>"""


def commands(run: LabRun) -> Iterator[str]:
    yield f"{run.command}   # this run, {run.seconds:.1f} seconds"
    yield from explain.next_commands(run.lab)
    if counterexample := explain.counterexample_command(run.lab):
        yield f"{counterexample}   # counterexample: the claim fails"


def checks_html(finding: Finding) -> str:
    rows = [
        (explain.mark(check), inline(check.name), escape(explain.format_measured(check)), escape(check.expected))
        for check in finding.checks
    ]
    table = table_html("", ("", "", "measured", "predicted"), rows, (False, False, True, True))
    return f'<div class="scroll">{table}</div>'


def figure_html(figure: Figure) -> str:
    if not isinstance(figure, Table):
        return f'<figure class="scroll">{to_svg(figure, has_style=False)}</figure>\n'
    right = [all(not isinstance(row[i], str) for row in figure.rows) for i in range(len(figure.columns))]
    rows = [[escape(format_cell(cell)) for cell in row] for row in figure.rows]
    table = table_html(figure.title, [escape(name) for name in figure.columns], rows, right)
    return f'<figure class="scroll">{table}</figure>\n'


def table_html(title: str, names: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool]) -> str:
    """A table of cells that are HTML; some columns are aligned on the right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        classes = [' class="number"' if is_right else "" for is_right in right]
        return "<tr>" + "".join(f"<{tag}{a}>{b}</{tag}>" for a, b in zip(classes, cells, strict=True)) + "</tr>"

    caption = f"<caption>{escape(title)}</caption>" if title else ""
    body = "\n".join(line("td", row) for row in rows)
    return f"<table>{caption}<thead>{line('th', names)}</thead>\n<tbody>{body}</tbody></table>"


# -------------------------------------------------------------------------------------------------------------- errata


def errata_html(errata: Sequence[Erratum], outcomes: Sequence[Outcome]) -> str:
    items = "\n".join(erratum_html(erratum, outcomes) for erratum in errata)
    return (
        f'<section id="errata">\n<h2>Errata</h2>\n<p>What the documents state and is not so.</p>\n{items}</section>\n'
    )


def erratum_html(erratum: Erratum, outcomes: Sequence[Outcome]) -> str:
    shown = claim_tree(erratum, outcomes)
    runs = [outcome for outcome in outcomes if erratum.id in outcome.lab.errata]
    links = [
        f'<a href="#lab-{outcome.lab.id}">{outcome.lab.id}</a>: {inline(explain.evidence(outcome))}' for outcome in runs
    ]
    evidence = "; ".join(links) or tests_html(shown["tests"])
    return f"""<article id="erratum-{erratum.id}">
<h3>{erratum.id} <cite>{escape(explain.citation(erratum.source))}</cite></h3>
<dl><dt>As stated</dt><dd>{inline(erratum.claim)}</dd><dt>What is true</dt><dd>{inline(erratum.correction)}</dd>
<dt>Evidence</dt><dd>{evidence}</dd></dl>
</article>"""


# ---------------------------------------------------------------------------------------------------------------- text


def inline(text: str) -> str:
    """A text with its code between backticks as code, and v_a elsewhere with a subscript."""
    pieces = re.split(r"`([^`]+)`", escape(text, quote=False))
    return "".join(
        f"<code>{piece}</code>" if i % 2 else SUBSCRIPT.sub(r"<sub>\1</sub>", piece) for i, piece in enumerate(pieces)
    )


def prose(text: str) -> str:
    blocks = text.split("\n\n") if text else []
    return "\n".join(
        f"<pre>{escape(block)}</pre>" if block.startswith(" ") else f"<p>{inline(block)}</p>" for block in blocks
    )
