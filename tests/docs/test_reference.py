"""The pages of docs/reference and docs/labs are what docs/generate.py makes of the code, and of recorded results, now."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command import FORKS

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402
import generate_labs  # noqa: E402
import json_outputs  # noqa: E402

from manyheads.labs.lab import all_labs  # noqa: E402

STALE = "a page is stale: run python docs/generate.py"


def texts_of(*paths):
    """The text of files, and of all pages and figures in folders, by their paths."""
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    return {
        f"{file.parent.name}/{file.name}": file.read_text(encoding="utf-8")
        for file in files
        if file.suffix in (".md", ".svg")
    }


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """Written by a new process, in which no test has registered a part of its own."""
    folder = tmp_path_factory.mktemp("written") / "docs"
    paths = folder / "reference", folder / "architecture.md", folder / "labs"
    folder.mkdir()
    process = FORKS.Process(target=generate.main, args=paths)
    process.start()
    process.join()
    assert process.exitcode == 0
    return texts_of(*paths)


def test_the_pages_are_what_the_generator_writes(generated):
    written = texts_of(generate.FOLDER, generate.ARCHITECTURE, generate_labs.FOLDER)
    assert set(written) == set(generated), STALE
    for name, text in generated.items():
        assert written[name] == text, STALE


def test_every_lab_has_a_recorded_result_and_none_fails():
    results = json.loads(generate_labs.RESULTS.read_text(encoding="utf-8"))["labs"]
    package = [lab.id for lab in all_labs().values() if lab.function.__module__.startswith("manyheads.labs.")]
    assert {result["lab"] for result in results} == set(package), "docs/labs/results.json is stale: run make labs-full"
    accepted = {"full": ("holds",), "quick": ("holds", "undecided")}
    assert not [result["lab"] for result in results if not result["verdict"].startswith(accepted[result["size"]])]


def test_a_key_without_a_meaning_and_a_meaning_without_a_key_are_found():
    with pytest.raises(AssertionError, match="other"):
        json_outputs.output_block("x", [{"schema": 1, "known": 1, "other": 2}], {"known": "a"})
    with pytest.raises(AssertionError, match="unused"):
        json_outputs.output_block("x", [{"known": {"a": [1]}}], {"known.*[]": "a", "unused": "b"})
    block = json_outputs.output_block("x", [{"known": {"a": [1, None]}}], {"known.*[]": "a|b"})
    assert "| `known.*[]` | null or number | a\\|b |" in block
