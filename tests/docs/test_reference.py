"""The pages of docs/reference are what docs/generate.py makes of the code now."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402

STALE = "docs/reference is stale: run python docs/generate.py"


@pytest.fixture(scope="module")
def generated():
    return generate.pages()


def test_the_reference_is_as_the_code_is(generated):
    assert {path.name for path in generate.FOLDER.iterdir()} == set(generated)
    for name, text in generated.items():
        assert (generate.FOLDER / name).read_text(encoding="utf-8") == text, STALE


def test_a_key_without_a_meaning_and_a_meaning_without_a_key_are_found():
    with pytest.raises(AssertionError, match="other"):
        generate.output_block("x", [{"schema": 1, "known": 1, "other": 2}], {"known": "a"})
    with pytest.raises(AssertionError, match="unused"):
        generate.output_block("x", [{"known": {"a": [1]}}], {"known.*[]": "a", "unused": "b"})
    block = generate.output_block("x", [{"known": {"a": [1, None]}}], {"known.*[]": "a|b"})
    assert "| `known.*[]` | null or number | a\\|b |" in block


def test_every_error_and_every_option_is_listed(generated):
    from manyheads import errors

    codes = {
        one.code for one in vars(errors).values() if getattr(one, "code", None) and one is not errors.ManyheadsError
    }
    assert all(f"| `{code}` |" in generated["errors.md"] for code in codes)
    assert all(
        f"`{option}`" in generated["command-line.md"] for option in ("--num-beams", "--override-resume", "--form")
    )
