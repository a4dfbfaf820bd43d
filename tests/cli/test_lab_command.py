"""`manyheads lab`: lists, runs with flags, several labs in processes, a user's own labs, pages and notebooks."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time

import pytest
from command import error_of, run, run_json, started

from manyheads.cli.lab import read_flags
from manyheads.labs.lab import all_labs
from manyheads.labs.views.explain import counterexample_command, next_commands

OWN_LABS = '''
import os
import time
from typing import Annotated

import torch

from manyheads.labs.figures import Lines
from manyheads.labs.finding import Finding, at_least, equals
from manyheads.labs.lab import lab, no_progress


@lab("mine", seconds=(0.1, 9.0), full={"count": 50}, counterexample={"bound": 2.0}, try_next=("--count 7",))
def drawn_numbers(
    *,
    count: Annotated[int, "how many numbers"] = 5,
    bound: Annotated[float, "the least that their mean may be"] = 0.0,
    upper: Annotated[bool, "whether they are below 1"] = True,
    seed: int = 0,
    progress=no_progress,
) -> Finding:
    """Numbers between 0 and 1 have a mean above 0.

    The mean of `n` numbers.
    """
    numbers = torch.rand(count) * (1 if upper else 100)
    progress("number", count, count)
    curve = [(i, float(number)) for i, number in enumerate(numbers)]
    return Finding(
        (at_least("mean", numbers.mean().item(), bound), equals("threads", torch.get_num_threads(), 1)),
        (Lines("The numbers", "which", "number", {"": curve}),),
    )


@lab("mine", seconds=(0.1, 0.1))
def wrong_claim(*, seed: int = 0) -> Finding:
    """Seven is eight."""
    return Finding((equals("seven", 7, 8),))


@lab("broken")
def raising(*, seed: int = 0) -> Finding:
    """A lab that raises."""
    raise RuntimeError("no luck")


@lab("broken")
def dying(*, seed: int = 0) -> Finding:
    """A lab whose process ends."""
    os._exit(7)


@lab("slow", seconds=(60.0, 60.0))
def endless(*, seed: int = 0) -> Finding:
    """A lab that never ends."""
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600)


@lab("slow", seconds=(60.0, 60.0))
def endless_too(*, seed: int = 0) -> Finding:
    """Another one."""
    endless()
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN_LABS)
    return ("--parts", str(path))


def without_times(tree):
    if isinstance(tree, dict):
        return {name: without_times(value) for name, value in tree.items() if name != "seconds"}
    return [without_times(one) for one in tree] if isinstance(tree, list) else tree


# ---------------------------------------------------------------------------------------------------------------- list


def test_labs_are_listed_with_those_of_a_parts_file(own):
    labs = {one["lab"]: one for one in run_json("lab", "list", *own)["labs"]}
    assert labs["copying"]["rows"] == ["A4"]
    assert labs["drawn-numbers"]["chapter"] == "mine"
    assert labs["drawn-numbers"]["seconds"] == {"quick": 0.1, "full": 9.0}
    assert [one["name"] for one in labs["drawn-numbers"]["parameters"]] == ["count", "bound", "upper"]
    text = run("lab", "list", *own).stdout
    assert all(name in text for name in labs)


def test_every_row_and_erratum_is_listed_with_what_shows_it():
    tree = run_json("lab", "list", "--rows")
    rows, errata = ({one[key]: one for one in tree[name]} for name, key in (("rows", "row"), ("errata", "erratum")))
    assert (len(rows), len(errata)) == (133, 16)
    assert rows["E1"]["claim"] != errata["E1"]["claim"], "rows and errata share names"
    assert "copying" in rows["A4"]["labs"]
    assert all(one["tests"] or one["labs"] or not one["verdict"] for one in (*rows.values(), *errata.values()))
    text = run("lab", "list", "--rows").stdout
    assert "E16" in text
    assert "P12" in text


# ----------------------------------------------------------------------------------------------------------- one lab


def test_one_lab_prints_a_page(own):
    done = run("lab", "run", "drawn-numbers", "--count", "3", "--no-upper", *own)
    for part in ("have a mean above 0", "✓ holds", "measured", "≥ 0", "The numbers", "own.py"):
        assert part in done.stdout
    assert "manyheads lab run drawn-numbers --count 3 --no-upper" in done.stdout
    assert "manyheads lab run drawn-numbers --count 7" in done.stdout
    assert re.search(r"manyheads lab run drawn-numbers --bound 2 .*the claim fails", done.stdout)
    assert "def drawn_numbers(" in done.stdout
    assert "@lab" not in done.stdout
    assert "Claim" not in done.stdout, "it judges no row"
    assert done.stdout.count("have a mean above 0") == 1, "the code has no docstring"


def test_flags_and_sizes_set_parameters(own):
    def parameters(*arguments):
        return run_json("lab", "run", "drawn-numbers", *arguments, *own)["labs"][0]["parameters"]

    assert parameters() == {"count": 5, "bound": 0.0, "upper": True}
    assert parameters("--full") == {"count": 50, "bound": 0.0, "upper": True}
    assert parameters("--full", "--count=8", "--bound", "-1.5") == {"count": 8, "bound": -1.5, "upper": True}
    assert parameters("--upper", "--seed", "3") == {"count": 5, "bound": 0.0, "upper": True}
    assert parameters("--upper=false") == {"count": 5, "bound": 0.0, "upper": False}


def test_the_counterexample_has_exit_status_1(own):
    done = run("lab", "run", "drawn-numbers", "--bound", "2", *own, check=1)
    assert "✗ fails" in done.stdout
    assert run_json("lab", "run", "drawn-numbers", "--bound", "2", *own, check=1)["labs"][0]["verdict"] == "fails"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["copying", "--strengh", "5"], ["--strengh", "'--strength'", "--keys"]),
        (["copying", "--keys", "few"], ["--keys", "'few'", "integer"]),
        (["copying", "--keys"], ["--keys", "value"]),
        (["copying", "-k", "5"], ["-k", "--keys"]),
        (["copyin"], ["'copying'"]),
        (["attention", "nowhere"], ["nowhere"]),
        ([], ["--all"]),
        (["copying", "--all"], ["--all"]),
        (["copying", "--quick", "--full"], ["--quick", "--full"]),
        (["copying", "--jobs", "0"], ["--jobs", "0"]),
        (["--all", "--strength", "5"], ["--strength", "one lab"]),
        (["copying", "--seed", "x"], ["'x'"]),
        (["copying", "--html", "no/folder/page.html"], ["no/folder"]),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_an_error_that_says_what_is_right(arguments, words, own):
    error = error_of("lab", "run", *arguments, *own, check=2)
    assert error["code"].startswith("usage.")
    for word in words:
        assert word in error["message"] + error["hint"]


def test_help_of_one_lab_lists_its_flags(own):
    text = run("lab", "run", "drawn-numbers", "--help", *own).stdout
    assert re.search(r"--count INT +how many numbers +5 +50", text)
    assert "--upper, --no-upper" in text
    assert "--jobs" in run("lab", "run", "-h").stdout


def test_an_error_of_one_lab_is_the_error_of_the_command(own):
    assert error_of("lab", "run", "raising", *own, check=1)["code"] == "internal"


# -------------------------------------------------------------------------------------------------------- several labs


def test_numbers_depend_on_the_seed_and_not_on_the_number_of_jobs(own):
    def outputs(*arguments):
        return without_times(run_json("lab", "run", "mine", "copying", *arguments, *own, check=1))

    first = outputs("--jobs", "1")
    assert first == outputs("--jobs", "2")
    assert first != outputs("--jobs", "2", "--seed", "1")
    alone = without_times(run_json("lab", "run", "drawn-numbers", *own))
    assert alone["labs"][0] in first["labs"]


def test_a_lab_that_raises_or_ends_its_process_does_not_end_the_others(own):
    labs = {one["lab"]: one for one in run_json("lab", "run", "broken", "copying", *own, check=1)["labs"]}
    assert labs["copying"]["verdict"] == "holds"
    assert (labs["raising"]["verdict"], labs["dying"]["verdict"]) == ("error", "error")
    assert "no luck" in labs["raising"]["error"]
    assert "7" in labs["dying"]["error"]
    text = run("lab", "run", "broken", "copying", *own, check=1).stdout
    assert re.search(r"raising +! error +RuntimeError: no luck", text)
    assert "1 hold, 2 ended with an error" in text


def test_several_labs_print_a_line_each_and_the_claims_that_they_judge(own):
    done = run("lab", "run", "mine", "copying", *own, check=1)
    assert re.search(r"copying +✓ holds +distance to the value: \S+ +≤ 1e-06", done.stdout)
    assert re.search(r"wrong-claim +✗ fails +seven: 7 +8", done.stdout)
    assert re.search(r"A4 +✓ holds", done.stdout)
    assert "A5" not in done.stdout
    assert "3 labs: 2 hold, 1 fail" in done.stdout


def test_ctrl_c_ends_the_workers(own, tmp_path):
    process = started("lab", "run", "slow", *own, "--jobs", "2", cwd=tmp_path)
    pids = tmp_path / "pids"
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().splitlines()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


# ---------------------------------------------------------------------------------------------------- pages, notebooks


def test_the_page_loads_nothing_and_shows_every_lab(own, tmp_path):
    path = tmp_path / "labs.html"
    run("lab", "run", "mine", "broken", "copying", "--html", path, *own, check=1)
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?\s*(?:https?:)?//", page)
    assert "<script" not in page
    assert {*re.findall(r'href="([^"]*)"', page)} <= {f"#{id_}" for id_ in re.findall(r'id="([^"]*)"', page)}
    for name in ("copying", "drawn-numbers", "wrong-claim", "raising"):
        assert f'id="lab-{name}"' in page
    assert "no luck" in page
    assert "✗ fails" in page
    assert page.count("<style>") == 1


def test_a_notebook_runs(own, tmp_path):
    path = tmp_path / "mine.ipynb"
    run("lab", "notebook", "attention", "-o", path)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    assert any("A4" in text for text in texts)
    (copying,) = [one for one in code if "'copying'" in one]
    names = {}
    exec(code[0], names)
    result = eval(copying, names)
    assert result.finding.verdict == "holds"
    assert "mh-figure" in result._repr_html_()
    assert error_of("lab", "notebook", "attention", "-o", path, check=2)["code"] == "usage.output-exists"
    assert "attention" in error_of("lab", "notebook", "atention", check=2)["message"]


@pytest.mark.parametrize("name", all_labs())
def test_the_commands_that_a_lab_suggests_have_flags_that_it_takes(name):
    lab = all_labs()[name]
    for command in (*next_commands(lab), counterexample_command(lab)):
        _, _, _, lab_id, *flags = shlex.split(re.sub(" --seed [0-9]+", "", command))
        assert lab_id == name
        read_flags([lab], flags)  # raises for a flag or a value that the lab does not take


def test_every_lab_has_at_least_two_commands_to_try_next():
    def commands(lab):
        return {*next_commands(lab), counterexample_command(lab)} - {"", f"manyheads lab run {lab.id}"}

    assert [name for name, lab in all_labs().items() if len(commands(lab)) < 2] == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["transformer-loop", "--model"], "usage.argument"),
        (["greedy-loop", "--models", "0"], "usage.argument"),
        (["grammar-probe", "--treebank", "nowhere.conllu"], "usage.path-not-found"),
        (["grammar-probe", "--model", "no/such/folder"], "usage.path-not-found"),
    ],
    ids=str,
)
def test_parameters_with_which_a_lab_cannot_run_are_an_error_of_usage(arguments, code):
    assert error_of("lab", "run", *arguments, check=2)["code"] == code
