"""A notebook of a chapter: a cell of text and a cell of code per lab, in the format of Jupyter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from manyheads.labs.claims import Chapter
from manyheads.labs.lab import Lab
from manyheads.labs.views.explain import citation, claims_of, errata_of


def notebook_json(chapter: Chapter, labs: list[Lab]) -> str:
    """The text of an .ipynb file, of nbformat 4."""
    cells = [markdown_cell(f"# {chapter.title}\n\n{chapter.text}".strip()), code_cell("import manyheads")]
    for lab in labs:
        cells += [markdown_cell("\n\n".join(lab_text(lab))), code_cell(run_code(lab))]
    numbered = [{"id": f"cell-{i}"} | cell for i, cell in enumerate(cells)]
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    tree = {"cells": numbered, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(tree, ensure_ascii=False, indent=1) + "\n"


def markdown_cell(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def code_cell(code: str) -> dict[str, Any]:
    source = code.splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source}


def lab_text(lab: Lab) -> Iterator[str]:
    yield f"## {lab.title}"
    claims = [f"- **{row.id}** {row.claim} *{citation(row.source)}*" for row in claims_of(lab)]
    claims += [f"- Erratum {erratum.id}: {erratum.claim} {erratum.correction}" for erratum in errata_of(lab)]
    if claims:
        yield "\n".join(claims)
    if lab.text:
        yield lab.text


def run_code(lab: Lab) -> str:
    """A call with every parameter and its meaning, so that a reader sees what can be changed."""
    lines = [f"    {parameter.name}={parameter.default!r},  # {parameter.meaning}" for parameter in lab.parameters()]
    return "\n".join(["manyheads.run_lab(", f"    {lab.id!r},", *lines, "    seed=0,", ")"])
