"""The console: help, errors as sentences and as JSON, progress with and without a terminal, broken pipes, encodings."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import typer
from command import COMMAND_NAMES, PRELOADED, error_of, run
from rich.console import Console
from small_runs import described

from manyheads.cli import console
from manyheads.cli.console import Progress, as_error
from manyheads.cli.evaluate import image_text
from manyheads.errors import DataError, ManyheadsError
from manyheads.spec import to_toml

GROUPS = {"data": ("show", "prepare"), "lab": ("list", "run", "notebook")}
COMMANDS = [*([name] for name in COMMAND_NAMES if name not in GROUPS)]
COMMANDS += [[group, name] for group, names in GROUPS.items() for name in names]


@pytest.mark.parametrize("name", PRELOADED)
def test_every_module_that_forks_preload_exists(name):
    assert find_spec(name)


def test_every_file_of_the_command_line_is_a_command_in_its_help():
    commands = run("-h").stdout.partition("Commands:")[2]
    assert set(re.findall(r"^  (\w+)", commands, re.M)) == set(COMMAND_NAMES)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command):
    text = " ".join(run(*command, "--help").stdout.split())
    assert re.search(rf"Examples?: manyheads {' '.join(command)}", text)


def test_no_argument_shows_the_help():
    assert run().stdout == run("-h").stdout


def test_the_version_names_torch():
    assert re.match(r"manyheads 0\.\S+ · torch 2\.", run("--version").stdout)


def test_an_error_is_one_sentence_on_standard_error():
    done = run("show", "gtp2", check=2)
    assert done.stdout == ""
    assert re.fullmatch(r"manyheads: .*'gpt2'.*\n", done.stderr)


def test_debug_shows_the_traceback_wherever_it_stands():
    for arguments in (("--debug", "show", "gtp2"), ("show", "gtp2", "--debug")):
        assert "Traceback" in run(*arguments, check=1).stderr


@pytest.mark.parametrize(
    "arguments", [["show", "--nonsense"], ["shw"], ["show", "--length"], ["predict"], ["train", "a"]]
)
def test_a_wrong_command_line_has_a_code(arguments):
    error = error_of(*arguments, check=2)
    assert error["code"] == "usage.argument"
    assert error["hint"]


@pytest.mark.parametrize(
    "command",
    [
        ("new", "copy", "--output", ""),
        ("train", "run.toml", "-o", ""),
        ("compare", "run.toml", "seed=1,2", "--output="),
        ("data", "prepare", "run.toml", "--output", ""),
        ("evaluate", ".", "--output", ""),
        ("export", ".", ""),
    ],
    ids=lambda command: command[0],
)
def test_an_empty_output_is_refused_before_anything_is_read(command, tmp_path):
    """Such as "$OUT" of a shell in which it is not set; a Path would take it for the current folder."""
    error = error_of(*command, cwd=tmp_path, check=2)
    assert error["code"] == "usage.argument"
    assert "empty" in error["message"]
    assert not list(tmp_path.iterdir())


def test_options_after_two_dashes_are_arguments():
    assert run("show", "--", "--json", check=2).stderr.startswith("manyheads: ")
    done = run("show", "--json", "--", "--debug", check=2)
    assert "'--debug'" in json.loads(done.stderr)["error"]["message"]


@pytest.mark.parametrize(
    ("exception", "code", "status"),
    [
        (DataError("no rows"), "data.invalid", 3),
        (OSError(errno.ENOSPC, "No space left on device", "a.txt"), "resource.disk", 5),
        (OSError(errno.ENOSPC, "No space left on device"), "resource.disk", 5),
        (PermissionError(errno.EACCES, "Permission denied", "a.txt"), "file.access", 2),
        (OSError("something else"), "internal", 1),
        (ValueError("a mistake of ours"), "internal", 1),
        (KeyError("x"), "internal", 1),
    ],
)
def test_every_exception_has_a_code_and_a_status(exception, code, status):
    error = as_error(exception)
    assert isinstance(error, ManyheadsError)
    assert (error.code, error.exit_status) == (code, status)
    assert "\n" not in str(error)


def test_a_full_disk_under_standard_output_has_a_code(tmp_path):
    command = f"{sys.executable} -m manyheads show parts --json > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 5
    assert json.loads(done.stderr)["error"]["code"] == "resource.disk"


def test_a_reader_that_stops_is_no_error():
    command = f"{sys.executable} -m manyheads show parts | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout
    assert done.stderr == ""


def test_a_terminal_without_a_character_gets_the_rest():
    assert "parameters" in run("show", "gpt2", env=os.environ | {"PYTHONIOENCODING": "ascii"}).stdout


# ------------------------------------------------------------------------------------------------------------ progress


def test_progress_without_a_terminal_is_a_line_every_ten_seconds(capsys):
    with Progress("loading", first_line=0) as progress:
        for i in range(3):
            progress.update("row", i, 3000, "loss 0.5")
        progress.line("a\x1b[31m line")
    assert capsys.readouterr().err == "row 0 of 3,000 · loss 0.5\na\\x1b[31m line\n"
    with Progress("loading") as progress:
        progress.update("row", 1)
    assert capsys.readouterr().err == ""


def test_quiet_progress_shows_warnings_alone(capsys):
    with Progress("loading", quiet=True, first_line=0) as progress:
        progress.update("row", 3, 30)
        progress.line("a line")
        progress.line("a warning", warning=True)
    assert capsys.readouterr().err == "a warning\n"


AT_A_TERMINAL = """
import sys
from manyheads.cli.console import Progress
with Progress("loading") as progress:
    progress.update("row", 3, 30, "loss 0.5")
    progress.line("a line")
    with progress.pause():
        print("a result", flush=True)
"""


def test_progress_at_a_terminal_is_a_bar_that_disappears():
    parent, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", AT_A_TERMINAL], stdout=child, stderr=child, env=environment, check=True)
    os.close(child)
    output = b""
    while chunk := read(parent):
        output += chunk
    text = output.decode()
    assert "row 3 of 30" in text
    assert "loss 0.5" in text
    assert "a line" in text
    before, _, after = text.partition("a result")
    assert "\x1b[2K" in before, "the bar is erased before standard output is written"
    assert after.rstrip().endswith("\x1b[2K"), "and at the end"


def read(parent):
    try:
        return os.read(parent, 1 << 16)
    except OSError:  # the other end is closed
        return b""


# by the command and its parameter, and more of some; model/ has a text and a run file, and no model
MISSING = {
    "ask path": ["ask", "MISSING", "text"],
    "ask file": ["ask", "model", "--file", "MISSING"],
    "ask database": ["ask", "model", "text", "--database", "MISSING.db"],
    "audit path": ["audit", "MISSING"],
    "chat path": ["chat", "MISSING"],
    "compare run": ["compare", "MISSING.toml", "position=none,rope", "-o", "out"],
    "data prepare run": ["data", "prepare", "MISSING.toml", "-o", "out"],
    "data show target": ["data", "show", "MISSING.toml"],
    "evaluate path": ["evaluate", "MISSING"],
    "evaluate data": ["evaluate", "model", "--data", "MISSING.tsv"],
    "export path": ["export", "MISSING", "out"],
    "heads path": ["heads", "MISSING", "model/a.txt"],
    "heads file": ["heads", "model", "MISSING.txt"],
    "look path": ["look", "MISSING", "text"],
    "look compare": ["look", "model", "text", "--compare", "MISSING"],
    "new file": ["new", "classify", "MISSING.tsv"],
    "new init_from": ["new", "copy", "--init-from", "MISSING"],
    "predict path": ["predict", "MISSING", "text"],
    "predict path: in a folder that exists": ["predict", "model/MISSING", "text"],
    "predict file": ["predict", "model", "--file", "MISSING"],
    "predict json_schema": ["predict", "model", "text", "--json-schema", "MISSING.json"],
    "score path": ["score", "MISSING", "text"],
    "score file": ["score", "model", "--file", "MISSING"],
    "show target": ["show", "./MISSING"],
    "show target: a file": ["show", "MISSING.toml"],
    "show target: a GGUF file": ["show", "MISSING.gguf"],
    "show swaps_from": ["show", "gpt2", "--swaps-from", "./MISSING"],
    "show parts": ["show", "gpt2", "--parts", "MISSING.py"],  # an option of every command
    "train run": ["train", "MISSING.toml", "-o", "out"],
    "train resume": ["train", "model/run.toml", "-o", "out", "--resume", "MISSING"],
}
OUTPUTS = {"html", "output", "png", "queue", "svg"}  # which need not exist


def input_paths():
    """The command and the name of each parameter that may be a path, as its help says."""
    console.load_commands()
    for words in COMMANDS:
        command = typer.main.get_command(console.app)
        for word in words:
            command = command.commands[word]
        for parameter in command.params:
            is_path = re.search("PATH(?!=)|FILE|RUN|DIR|MODEL|SCHEMA", parameter.metavar or "")
            if is_path and parameter.name not in OUTPUTS | {"parts"}:
                yield f"{' '.join(words)} {parameter.name}"


def test_every_path_of_every_command_has_a_case_of_a_path_that_does_not_exist():
    assert {*input_paths(), "show parts"} == {name.partition(":")[0] for name in MISSING}


@pytest.mark.parametrize("name", MISSING)
def test_a_path_that_does_not_exist_is_a_wrong_argument(name, tmp_path):
    """Exit status 2 and one sentence, in every command; nothing is written."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.txt").write_text("a text\n")
    (tmp_path / "model" / "run.toml").write_text(to_toml(described("seq2seq")))
    if MISSING[name][0] in ("chat", "look"):  # which have no --json
        assert re.fullmatch("manyheads: .*MISSING.*\n", run(*MISSING[name], cwd=tmp_path, check=2).stderr)
    else:
        error = error_of(*MISSING[name], cwd=tmp_path, check=2)
        assert error["code"] in ("usage.path-not-found", "config.file", "usage.parts-file")
        assert "MISSING" in error["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_image_with_an_odd_number_of_rows_ends_in_half_a_character():
    image = [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    text = image_text(image, Console(color_system=None)).plain.split("\n")
    assert [len(line) for line in text] == [2, 2]
    assert text[0] == console.shade(1.0) + console.shade(0.0)
    assert text[1] == console.shade(0.5) + console.shade(0.0)
