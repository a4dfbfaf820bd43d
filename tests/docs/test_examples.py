"""Every block of README.md and docs/ runs as it is written, with fewer steps and on little data."""

from __future__ import annotations

import re
import shutil

import pytest
from command import run
from examples import (
    FEWER,
    FEWER_ROWS,
    PAGES,
    blocks_of,
    check_output,
    run_manyheads,
    run_page,
    write_checkpoints,
    write_fixtures,
)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with the data, the checkpoints and the demo's run that the pages start from."""
    folder = tmp_path_factory.mktemp("given")
    write_fixtures(folder)
    write_checkpoints(folder)
    run("train", "dates.toml", "--output", "runs/dates", *FEWER["train"], *FEWER_ROWS, cwd=folder)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(page, given, tmp_path):
    folder = tmp_path / "user"
    shutil.copytree(given, folder)
    run_page(page, folder)


def test_the_readme_is_short_and_shows_six_uses():
    text = PAGES[0].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert sum(line.startswith("### ") for line in text.splitlines()) == 6
    assert "make demo" in text
    assert "make test" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_picture_is_there_and_small(page):
    for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / name).stat().st_size < 150_000, name


def test_an_output_that_differs_is_found():
    check_output("one\n…\nfour … six\n", "zero\none\ntwo\nthree\nfour five six\n")
    for wrong in ("one\nthree\n", "four … seven\n", "on\n"):
        with pytest.raises(AssertionError):
            check_output(wrong, "one\ntwo\nthree\nfour five six\n")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("look model text", "look model text --heads"),
        ("look model --compare model --port 0", "look model --compare modle --port 0"),
        ("look model", "look modle"),
        ("demo --output runs/dates", "demo --output runs/dates 3"),
        ("export model graph --to onnx", "export modle graph --to onnx"),
    ],
)
def test_the_arguments_of_a_command_that_is_not_run_are_checked(tmp_path, right, wrong):
    (tmp_path / "model").mkdir()
    run_manyheads(right.split(), tmp_path)
    with pytest.raises(AssertionError):
        run_manyheads(wrong.split(), tmp_path)


def test_every_block_has_a_language():
    """A block without one would not be run."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("\n```") == 2 * len(blocks_of(page)), page.name
