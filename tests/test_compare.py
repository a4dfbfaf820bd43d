"""Grids of runs: what a short name means, cells that are not run again, cells that fail, and figures that are those of the runs."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from command import FORKS, child, run

from manyheads import build
from manyheads.chart import draw
from manyheads.compare import compare
from manyheads.grid import folder_name, paths_of, read_axis, split_values
from manyheads.spec import SpecError, to_toml
from manyheads.train.events import Evaluated
from manyheads.train.loop import train
from manyheads.train.run import RunError, made_ready, read_run

TOWER = {"layers": 1, "width": 16, "attention": {"kind": "heads", "heads": 2}, "feedforward": {"kind": "mlp", "hidden": 16}}
TREE = {
    "seed": 4,
    "model": {
        "vocab": "tokenizer",
        "encoder": TOWER | {"position": "sinusoidal"},
        "decoder": {"like": "encoder", "embed": "shared", "cross": True},
    },
    "data": {"kind": "sequence", "task": "copy", "count": 60, "held_out": 10, "length": 4},
    "objective": {"kind": "seq2seq"},
    "train": {"steps": 3, "tokens": 200, "evaluate_every": 2, "evaluate_rows": 8},
}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(to_toml(TREE))
    return file


def test_a_short_name_means_every_tower_that_says_its_own():
    own = TREE | {"model": TREE["model"] | {"decoder": TOWER | {"position": "rope", "embed": "shared", "cross": True}}}
    assert paths_of("position", TREE) == ("model.encoder.position",)
    assert paths_of("position", own) == ("model.encoder.position", "model.decoder.position")
    assert paths_of("embed", TREE) == ("model.encoder.embed", "model.decoder.embed")
    assert paths_of("attention.heads", TREE) == ("model.encoder.attention.heads",)
    assert paths_of("decoder.position", TREE) == ("model.decoder.position",)
    assert paths_of("model.decoder.position", TREE) == ("model.decoder.position",)
    assert paths_of("head", TREE) == ("model.head",)
    assert paths_of("rate", TREE) == ("optim.rate",)
    assert paths_of("schedule.warmup", TREE) == ("optim.schedule.warmup",)
    assert paths_of("steps", TREE) == ("train.steps",)
    assert paths_of("data.count", TREE) == ("data.count",)
    assert paths_of("cell", {"model": {"recurrent": {}}}) == ("model.recurrent.cell",)
    with pytest.raises(SpecError, match=r"'residual' is a tower's, and this run describes none with it: say whose, such as model.encoder"):
        paths_of("residual", {"start": "somewhere"})
    with pytest.raises(SpecError, match="no field 'positoin' in this run: did you mean 'position'"):
        paths_of("positoin", TREE)
    with pytest.raises(SpecError, match="--seeds"):
        paths_of("seed", TREE)


def test_values_are_split_where_no_bracket_is_open():
    assert list(split_values('none, {kind = "rope", theta = 1e4},[1,2],"a,b"')) == [
        "none",
        '{kind = "rope", theta = 1e4}',
        "[1,2]",
        '"a,b"',
    ]
    for wrong in ("position", "=a", "position=", "position=a,", "position=a,a"):
        with pytest.raises(SpecError):
            read_axis(wrong, TREE)


def test_folders_are_told_apart_and_can_be_written():
    names = [folder_name((("position", value),)) for value in ("rope", '{kind = "rope"}', '{kind="rope"}', "../rope", "x" * 300)]
    assert len(set(names)) == len(names)
    assert names[0] == "position=rope"
    assert all("/" not in name and len(name) < 200 for name in names)


def test_the_table_is_what_the_runs_say_and_nothing_is_run_twice(path, tmp_path, capsys):
    command = ("compare", path, "position=none,rope", "rate=1e-2", "--seeds", "2", "--output", tmp_path / "grid")
    found = json.loads(run(*command, "--json").stdout)
    assert found["axes"] == {"position": ["none", "rope"], "rate": ["1e-2"]}
    assert [row["cell"] for row in found["cells"]] == [{"position": position, "rate": "1e-2"} for position in ("none", "rope")]
    for row in found["cells"]:
        losses = [one["metrics"]["loss"] for one in row["seeds"]]
        assert [one["seed"] for one in row["seeds"]] == [4, 5]
        assert len(set(losses)) == 2
        assert row["metrics"]["loss"]["mean"] == pytest.approx(statistics.fmean(losses))
        assert row["metrics"]["loss"]["sd"] == pytest.approx(statistics.stdev(losses))
    torch.set_num_threads(1)
    changed = TREE | {"seed": 5, "model": TREE["model"] | {"encoder": TOWER | {"position": "rope"}}, "optim": {"rate": 1e-2}}
    ready = made_ready(read_run(changed))
    alone = [event.metrics for event in train(ready, tmp_path / "alone") if isinstance(event, Evaluated)]
    assert found["cells"][1]["seeds"][1]["metrics"] == alone[-1], "a cell is that very run"
    assert found["cells"][1]["parameters"] == sum(one.numel() for one in build(ready.spec).parameters())
    assert (tmp_path / "grid" / "compare.png").read_bytes().startswith(b"\x89PNG")

    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "grid").rglob("*") if file.is_file() and "seed-" in str(file)}
    again = run(*command)
    assert "± " in again.stdout
    assert again.stderr == f"figures of unseen rows; curves in {tmp_path / 'grid' / 'compare.png'}\n"
    assert {file: file.stat().st_mtime_ns for file in files} == files
    # one value more is one cell more
    compare(path, ["position=none,rope,sinusoidal", "rate=1e-2"], tmp_path / "grid", seeds=2)
    said = capsys.readouterr().err
    assert "5 of 6" in said
    assert "4 of 6" not in said
    longer = run("compare", path, "position=none", "rate=1e-2", "--output", tmp_path / "grid", "-s", "train.steps=9", check=2)
    assert "train.steps was 3 and is 9. Take another --output, or put it back" in longer.stderr, "what was begun otherwise is no equal"
    refused = run("compare", path, "position=none", "rate=1e-2", "--output", tmp_path / "grid", "-s", "model.encoder.layers=2", check=2)
    assert "holds another run: model.decoder.layers was 1 and is 2" in refused.stderr


def test_a_cell_that_fails_is_a_row_that_says_why(path, tmp_path):
    wide = os.environ | {"COLUMNS": "200"}
    done = run("compare", path, "position=none,rope", "core=dot,random", "--seeds", "1", "--output", tmp_path / "grid", env=wide)
    row = next(line for line in done.stdout.splitlines() if line.startswith("rope") and "random" in line)
    assert "'rope' works on" in row
    assert len([line for line in done.stdout.splitlines() if line.startswith(("none", "rope"))]) == 4
    there = tmp_path / "a.tsv"
    there.write_text("".join(f"{word} b\tb {word}\n" for word in "abcdefgh"))
    paths = f'data={{kind="pairs",path="{there}"}},{{kind="pairs",path="{tmp_path}/none.tsv"}}'
    found = json.loads(run("compare", path, paths, "--seeds", "1", "--output", tmp_path / "files", "--json").stdout)
    assert [row["wrong"] for row in found["cells"]] == [None, f"cannot read {tmp_path}/none.tsv: No such file or directory"]
    assert found["cells"][0]["metrics"]
    run("compare", path, paths.partition(",{")[0].replace("a.tsv", "none.tsv"), "--seeds", "1", "--output", tmp_path / "all", check=1)


def test_a_seed_that_fails_costs_the_others_nothing(path, tmp_path, monkeypatch):
    from manyheads import compare as module

    def failing(tree, folder, *more):
        return "no room" if tree["seed"] == 4 else run_cell(tree, folder, *more)

    run_cell = module.run_cell
    monkeypatch.setattr(module, "run_cell", failing)
    (cell,) = compare(path, ["rate=1e-3"], tmp_path / "grid", seeds=2)["cells"]
    assert (cell["wrong"], len(cell["seeds"])) == ("no room", 1)
    assert cell["parameters"] > 0
    assert (tmp_path / "grid" / "compare.json").is_file()


def test_the_figures_of_a_run_with_a_goal_are_those_of_the_model_it_keeps(path, tmp_path):
    goal = ["train.goal={metric='loss',patience=2}", "train.evaluate_every=1", "train.steps=40", "optim.rate=0.3"]
    (cell,) = compare(path, ["optim.clip=1.0"], tmp_path / "grid", seeds=1, overrides=goal)["cells"]
    curve = [loss for _, loss in cell["seeds"][0]["curve"]]
    assert cell["metrics"]["loss"]["mean"] == min(curve) < curve[-1]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("positoin=none", "did you mean 'position'"),
        ("encoder.positoin=none", "no field 'positoin'"),
        ("position=none,ropee", "position=ropee"),
        ("attention.heads=2,3", "attention.heads=3"),
        ("train.steps=none", "steps"),
        ("seed=1,2", "--seeds"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_trained(path, tmp_path, said, sentence):
    with pytest.raises(SpecError, match=sentence):
        compare(path, ["rate=1e-3", said], tmp_path / "grid")
    assert not (tmp_path / "grid").exists()


def test_two_axes_of_one_field_and_no_axis_are_refused(path, tmp_path):
    for said in (["position=none", "encoder.position=rope"], []):
        with pytest.raises(SpecError):
            compare(path, said, tmp_path / "grid")
    for seeds, jobs in ((0, 1), (1, 0), (10_000, 1)):
        with pytest.raises(SpecError):
            compare(path, ["position=none,rope"], tmp_path / "grid", seeds=seeds, jobs=jobs)


def figures(found):
    return [(row["cell"], row["wrong"], [(one["seed"], one["metrics"], one["curve"]) for one in row["seeds"]]) for row in found["cells"]]


def test_side_by_side_is_the_same_as_one_by_one(path, tmp_path):
    torch.set_num_threads(1)
    axes = ["position=none,rope", "core=dot,random"]
    one, two = (compare(path, axes, tmp_path / str(jobs), seeds=1, jobs=jobs, quiet=True) for jobs in (1, 2))
    assert figures(one) == figures(two)
    assert one["stopped"] is two["stopped"] is None


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupted_grid_goes_on(path, tmp_path, jobs):
    torch.set_num_threads(1)
    command = ["compare", str(path), "position=none,rope", "--seeds", "2", "--jobs", str(jobs), "-s", "train.steps=20", "--quiet"]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        out.touch()
        arguments = ([*command, "--output", str(tmp_path / "grid")], os.devnull, out, out, str(tmp_path), environment)
        process = FORKS.Process(target=child, args=arguments)
        process.start()
        while process.is_alive() and not list(tmp_path.glob("grid/*/*/metrics.jsonl")):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        process.join(120)
        assert process.exitcode == 130, out.read_text()
    assert len(list(tmp_path.glob("grid/*/*/checkpoints/step-00000020"))) < 4
    found, whole = (
        compare(path, ["position=none,rope"], tmp_path / name, seeds=2, overrides=["train.steps=20"], quiet=True)
        for name in ("grid", "whole")
    )
    assert all(len(row["seeds"]) == 2 for row in found["cells"])
    assert figures(found) == figures(whole)


def test_two_signals_end_runs_side_by_side_at_once(path, tmp_path):
    command = [sys.executable, "-m", "manyheads", "compare", path, "position=none,rope", "--seeds", "1", "--jobs", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "-s", "train.steps=100000", "--output", tmp_path / "grid"],
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    try:
        while len(list(tmp_path.glob("grid/*/*/metrics.jsonl"))) < 2:
            time.sleep(0.05)
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.02)
        _, said = process.communicate(timeout=60)  # not before the last of its processes has ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, said


def test_the_picture_takes_many_cells_and_figures_that_are_none(tmp_path):
    seeds = [{"seed": 1, "metrics": {"loss": 0.1}, "curve": [(1, 5.0), (2, 0.1)]}, {"seed": 2, "metrics": {}, "curve": []}]
    rows = [{"cell": {"width": str(i)}, "metrics": {"loss": {}}, "seeds": seeds, "wrong": None} for i in range(30)]
    draw({"cells": [*rows, {"cell": {"width": "x"}, "metrics": {}, "seeds": [], "wrong": "no"}]}, tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size > 10_000


def test_seeds_that_learned_from_other_data_are_no_equals(path, tmp_path):
    pairs = tmp_path / "a.tsv"
    axis = [f'data={{kind="pairs",path="{pairs}"}}']
    pairs.write_text("".join(f"{word} b\tb {word}\n" for word in "abcdefgh"))
    compare(path, axis, tmp_path / "grid", seeds=1, quiet=True)
    pairs.write_text("".join(f"{word} b\tb {word}\n" for word in "abcdefgi"))
    (cell,) = compare(path, axis, tmp_path / "grid", seeds=2, quiet=True)["cells"]
    assert "seed-4 learned from other data, of the same name" in cell["wrong"]
    assert [one["seed"] for one in cell["seeds"]] == [4]


def test_whatever_a_cell_raises_the_others_go_on(path, tmp_path, monkeypatch):
    from manyheads import compare as module

    def failing(ready, *given, **named):
        if ready.run.optim.rate > 1e-3:
            raise IndexError("index out of range in self")
        return train(ready, *given, **named)

    monkeypatch.setattr(module, "train", failing)
    found = compare(path, ["rate=1e-2,1e-3"], tmp_path / "grid", seeds=1, quiet=True)["cells"]
    assert [(cell["wrong"], len(cell["seeds"])) for cell in found] == [("index out of range in self", 0), (None, 1)]


@pytest.mark.parametrize(
    "changed", ["objective.smoothing=0.1", "train.evaluate_rows=4", "train.evaluate_every=3", "train.goal={metric='loss'}"]
)
def test_what_would_change_the_figures_is_refused(path, tmp_path, changed):
    compare(path, ["position=none"], tmp_path / "grid", seeds=1, quiet=True)
    with pytest.raises(RunError, match=rf"holds another run: {changed.partition('=')[0]}.* was"):
        compare(path, ["position=none"], tmp_path / "grid", seeds=2, overrides=[changed], quiet=True)
