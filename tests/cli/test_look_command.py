"""`manyheads look`: the page, one offline file, a head in the terminal and as a figure."""

from __future__ import annotations

import json
import os
import signal
import time
from io import StringIO
from multiprocessing.connection import Connection
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

import pytest
from command import run, started
from offline_file import answers_of, assert_trusted
from rich.console import Console
from small_checkpoints import folder_of
from small_runs import described, train_all

from manyheads.cli.look import print_matrix

TEXT = "word1 word2 word3 word1"


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return folder_of("bert", tmp_path_factory.mktemp("bert"))


def error(*arguments, code):
    done = run("look", *arguments, check=code)
    assert done.stdout == ""
    return done.stderr


def test_the_terminal_shows_a_row_per_query(bert):
    lines = run("look", bert, TEXT, "--terminal", "--layer", 1, "--head", 2).stdout.splitlines()
    assert lines[0] == "encoder.layers.1.attention, head 2"
    assert [line.split()[0] for line in lines[2:8]] == ["[CLS]", "word1", "word2", "word3", "word1", "[SEP]"]
    mean = run("look", bert, TEXT, "--terminal").stdout.splitlines()
    assert mean[0] == "encoder.layers.2.attention, mean over heads"
    named = run("look", bert, TEXT, "--terminal", "--attention", "encoder.layers.0.attention").stdout
    assert named.startswith("encoder.layers.0.attention")


def test_blocks_are_darker_for_larger_weights():
    out = Console(file=StringIO(), width=80)
    print_matrix([[0.03, 0.05, 0.2, 0.4, 0.7]], ["q"], list("abcde"), out)
    first, *_, legend = out.file.getvalue().rstrip().splitlines()
    assert first.split() == ["q", "░░", "▒▒", "▓▓", "██"]
    assert legend.split()[::3] == ["░░", "▒▒", "▓▓", "██"]
    assert legend.split()[2::3] == ["0.04", "0.16", "0.36", "0.64"]


def test_the_figure_and_the_page_are_files(bert, tmp_path):
    run("look", bert, TEXT, "--png", tmp_path / "a.png", "--head", 0)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    done = run("look", bert, TEXT, "--html", tmp_path / "a.html")
    assert done.stdout == ""
    assert "MB" in done.stderr
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert len(page) < 20_000_000
    assert "Content-Security-Policy" in page
    assert error(bert, TEXT, "--html", tmp_path / "a.html", code=2)


def test_a_recurrent_run_is_shown(tmp_path):
    train_all(described("recurrent"), tmp_path / "run")
    printed = run("look", tmp_path / "run", "a b c", "--terminal").stdout.splitlines()
    assert printed[0].endswith("mean over heads")
    run("look", tmp_path / "run", "a b c", "--html", tmp_path / "a.html")
    assert_trusted(tmp_path / "a.html")
    (attention,) = json.loads(answers_of(tmp_path / "a.html")["look/run"])["attentions"]
    assert attention["kind"] == "alignment"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--terminal"],
        [TEXT, "--layer", "1"],
        [TEXT, "--terminal", "--layer", "9"],
        [TEXT, "--terminal", "--head", "9"],
        [TEXT, "--terminal", "--attention", "encoder.layers.9.attention"],
        [TEXT, "--terminal", "--html", "x.html"],
        [TEXT, "--port", "99999999"],
        [TEXT, "--compare", "nothing/here/at/all"],
    ],
)
def test_options_that_do_not_fit_are_errors(bert, arguments):
    assert error(bert, *arguments, code=2)


@pytest.mark.parametrize("output", [["--html", "x.html"], ["--terminal"], ["--png", "x.png"]], ids=lambda item: item[0])
@pytest.mark.parametrize("option", ["--compare", "--state", "--port", "--no-browser"])
def test_options_of_the_page_are_refused_without_the_page_before_anything_is_loaded(tmp_path, option, output):
    (tmp_path / "config.json").write_text("{}")  # which no model can be loaded from
    values = {"--compare": [tmp_path], "--state": ["head=1"], "--port": [8080], "--no-browser": []}[option]
    message = error(tmp_path, TEXT, *output, option, *values, code=2)
    assert option in message
    assert "65535" in error(tmp_path, TEXT, "--port", 70000, code=2)


def test_a_head_that_does_not_exist_is_answered_with_numbers(bert):
    message = error(bert, TEXT, "--terminal", "--head", 99, code=2)
    assert "99" in message
    assert "mean" not in message


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train_all(described("causal", steps=3, save_every=1, keep_last=9), folder)
    return folder


@pytest.mark.parametrize(("model", "steps"), [("bert", None), ("trained", [1, 2, 3])])
def test_the_page_is_served_until_it_is_interrupted(request, model, steps):
    path = request.getfixturevalue(model)
    reading, writing = os.pipe()
    process = started("look", path, TEXT, "--no-browser", "--state", "head=1", stdout=Connection(writing))
    try:
        with open(reading) as stdout:
            address = stdout.readline().strip()
            parts = urlsplit(address)
            assert parts.hostname == "127.0.0.1"
            assert parse_qs(parts.fragment) == {"head": ["1"], "text": [TEXT]}
            base = address.partition("#")[0]
            session = json.load(urlopen(Request(f"{base}api/session", method="POST")))["session"]
            info = json.load(urlopen(f"{base}api/look/info?session={session}"))
            assert info["text"] == TEXT
            assert (info["steps"] and info["steps"]["numbers"]) == steps
            deadline = time.monotonic() + 60
            os.kill(process.pid, signal.SIGINT)
            process.join(max(0, deadline - time.monotonic()))
            assert process.exitcode == 0
    finally:
        process.kill()  # it would wait for ever after a failure
