"""The notebook of every chapter: it is nbformat 4, its calls have the parameters of their labs, and a first one runs."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from manyheads.labs.claims import read_claims
from manyheads.labs.lab import all_labs
from manyheads.labs.views.notebook_file import notebook_json

CHAPTERS = list(dict.fromkeys(lab.chapter for lab in all_labs().values()))


def labs_of(chapter):
    return [lab for lab in all_labs().values() if lab.chapter == chapter]


def cheapest(chapter):
    return min(labs_of(chapter), key=lambda lab: lab.seconds[0])


def notebook(chapter):
    return json.loads(notebook_json(read_claims().chapters[chapter], labs_of(chapter)))


def code_of(chapter):
    return ["".join(cell["source"]) for cell in notebook(chapter)["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_notebook_has_what_nbformat_4_5_requires(chapter):
    """The required properties of its schema, nbformat.v4.5.schema.json, and no others."""
    tree = notebook(chapter)
    assert tree.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (tree["nbformat"], tree["nbformat_minor"]) == (4, 5)
    assert {"name", "display_name"} <= tree["metadata"]["kernelspec"].keys()
    assert "name" in tree["metadata"]["language_info"]
    required = {"id", "cell_type", "metadata", "source"}
    for cell in tree["cells"]:
        is_code = cell["cell_type"] == "code"
        assert cell.keys() == required | ({"execution_count", "outputs"} if is_code else set())
        assert is_code or cell["cell_type"] == "markdown"
        assert re.fullmatch(r"[\w-]{1,64}", cell["id"])
        assert all(isinstance(line, str) for line in cell["source"])
        assert cell["metadata"] == {}
        assert not is_code or (cell["execution_count"], cell["outputs"]) == (None, [])
    assert len({cell["id"] for cell in tree["cells"]}) == len(tree["cells"])
    assert len(tree["cells"]) == 2 + 2 * len(labs_of(chapter))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_call_of_a_notebook_gives_its_lab_the_parameters_of_quick(chapter):
    calls = {}
    names = {"manyheads": SimpleNamespace(run_lab=lambda name, **parameters: calls.update({name: parameters}))}
    first, *cells = code_of(chapter)
    for cell in cells:
        exec(cell, names)
    assert first == "import manyheads"
    assert calls == {lab.id: {"seed": 0, **lab.parameters_at("quick")} for lab in labs_of(chapter)}


@pytest.mark.parametrize("chapter", [chapter for chapter in CHAPTERS if cheapest(chapter).seconds[0] <= 1])
def test_the_cheapest_call_of_a_notebook_runs(chapter):
    """The labs of other chapters run at their smallest size in the tests of the chapter."""
    lab, names = cheapest(chapter), {}
    first, *cells = code_of(chapter)
    exec(first, names)
    result = eval(cells[labs_of(chapter).index(lab)], names)
    assert result.lab is lab
    assert result.finding.verdict in ("holds", "holds with a correction")
    assert lab.title.partition(" ")[0] in result._repr_html_()
