"""The table of claims is whole: every row and erratum is shown by a lab or by tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from manyheads.labs.claims import read_claims
from manyheads.labs.lab import all_labs

REPOSITORY = Path(__file__).parents[2]
CLAIMS_OF_DOCUMENTS = REPOSITORY.parent / "shared" / "CLAIMS.md"


@cache
def functions_of(path):
    file = REPOSITORY / path
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def exists(test):
    path, _, name = test.partition("::")
    return name in functions_of(path)


def entries():
    claims = read_claims()
    return [*claims.rows.values(), *claims.errata.values()]


def test_every_row_and_erratum_is_shown_by_a_lab_or_a_test():
    claims = read_claims()
    waiting = {
        name: [entry.id for entry in table.values() if not entry.labs() and not entry.tests]
        for name, table in {"rows": claims.rows, "errata": claims.errata}.items()
    }
    assert waiting == {"rows": [], "errata": []}


def test_every_test_that_the_table_names_exists():
    assert [test for entry in entries() for test in entry.tests if not exists(test)] == []


def test_labs_judge_rows_errata_and_chapters_that_exist():
    claims = read_claims()
    for lab in all_labs().values():
        assert lab.chapter in claims.chapters, lab.id
        assert set(lab.rows) <= set(claims.rows), lab.id
        assert set(lab.errata) <= set(claims.errata), lab.id
        assert lab.rows or lab.errata, f"{lab.id} judges nothing"


def test_every_source_is_in_a_document():
    claims = read_claims()
    for entry in entries():
        assert set(re.findall(r"\bS\d", entry.source)) <= set(claims.documents), entry.id
        assert re.match(r"S\d", entry.source), entry.id


def test_every_row_has_a_chapter():
    claims = read_claims()
    assert {row.chapter for row in claims.rows.values()} == set(claims.chapters)


def test_every_worked_example_is_a_command_in_the_docs():
    """The tests of the docs run its commands and compare what they print."""
    page = (REPOSITORY / "docs" / "worked-examples.md").read_text(encoding="utf-8")
    commands = re.findall(r"^```sh\nmanyheads lab run ([\w-]+)[^`]*```\n\n```output$", page, re.MULTILINE)
    assert sorted(commands) == sorted(lab.id for lab in read_claims().rows["P12"].labs())


@pytest.mark.skipif(not CLAIMS_OF_DOCUMENTS.is_file(), reason="the list that the table follows is not here")
def test_the_table_has_the_ids_of_the_list_it_follows():
    text = CLAIMS_OF_DOCUMENTS.read_text(encoding="utf-8")
    claims = read_claims()
    assert list(claims.rows) == re.findall(r"^\| ([A-P]\d+) \|", text, re.MULTILINE)
    assert list(claims.errata) == re.findall(r"^- \*\*(E\d+) ", text, re.MULTILINE)
