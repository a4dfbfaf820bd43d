"""The pages of docs/reference are what docs/generate.py makes of the code now."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command import FORKS

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402

STALE = "docs/reference is stale: run python docs/generate.py"


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """Written by a new process, in which no test has registered a part of its own."""
    folder = tmp_path_factory.mktemp("reference")
    page = folder.with_name("architecture.md")
    process = FORKS.Process(target=generate.main, args=(folder, page))
    process.start()
    process.join()
    assert process.exitcode == 0
    return {path.name: path.read_text(encoding="utf-8") for path in (page, *folder.iterdir())}


def test_the_reference_is_what_the_generator_writes(generated):
    written = {
        path.name: path.read_text(encoding="utf-8") for path in (generate.ARCHITECTURE, *generate.FOLDER.iterdir())
    }
    assert set(written) == set(generated)
    for name, text in generated.items():
        assert written[name] == text, STALE


def test_a_key_without_a_meaning_and_a_meaning_without_a_key_are_found():
    with pytest.raises(AssertionError, match="other"):
        generate.output_block("x", [{"schema": 1, "known": 1, "other": 2}], {"known": "a"})
    with pytest.raises(AssertionError, match="unused"):
        generate.output_block("x", [{"known": {"a": [1]}}], {"known.*[]": "a", "unused": "b"})
    block = generate.output_block("x", [{"known": {"a": [1, None]}}], {"known.*[]": "a|b"})
    assert "| `known.*[]` | null or number | a\\|b |" in block
