"""Grids of runs: axes, runs that are not repeated, cells that fail, and metrics that are those of the runs."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from command import error_of, run, run_json, started
from small_runs import last_metrics, train_all

from manyheads import build
from manyheads.data.source import DataSpec
from manyheads.errors import ConfigError, ManyheadsError, RunChangedError, UsageError
from manyheads.inspect.figure import draw_comparison
from manyheads.spec import to_toml
from manyheads.training.comparison import compare, is_improving
from manyheads.training.grid import axis_paths, folder_name, read_axis, split_values
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run
from manyheads.training.store import newest_valid

STACK = {
    "layers": 1,
    "width": 16,
    "attention": {"kind": "heads", "heads": 2},
    "feedforward": {"kind": "mlp", "hidden": 16},
}
TREE = {
    "seed": 4,
    "model": {
        "vocab": "tokenizer",
        "encoder": STACK | {"position": "sinusoidal"},
        "decoder": {"like": "encoder", "embed": "shared", "cross": True},
    },
    "data": {"kind": "sequence", "function": "copy", "count": 60, "validation_count": 10, "max_length": 4},
    "task": {"kind": "seq2seq"},
    "train": {"steps": 3, "batch_tokens": 200, "eval_every": 2, "eval_rows": 8},
}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(to_toml(TREE))
    return file


# ----------------------------------------------------------------------------------------------------------------- axes


def test_a_short_name_means_every_stack_that_has_its_own_value():
    own = TREE | {"model": TREE["model"] | {"decoder": STACK | {"position": "rope", "embed": "shared", "cross": True}}}
    assert axis_paths("position", TREE) == ("model.encoder.position",)
    assert axis_paths("position", own) == ("model.encoder.position", "model.decoder.position")
    assert axis_paths("embed", TREE) == ("model.encoder.embed", "model.decoder.embed")
    assert axis_paths("attention.heads", TREE) == ("model.encoder.attention.heads",)
    assert axis_paths("decoder.position", TREE) == ("model.decoder.position",)
    assert axis_paths("model.decoder.position", TREE) == ("model.decoder.position",)
    assert axis_paths("head", TREE) == ("model.head",)
    assert axis_paths("lr", TREE) == ("optim.lr",)
    assert axis_paths("schedule.warmup", TREE) == ("optim.schedule.warmup",)
    assert axis_paths("steps", TREE) == ("train.steps",)
    assert axis_paths("data.count", TREE) == ("data.count",)
    assert axis_paths("cell", {"model": {"recurrent": {}}}) == ("model.recurrent.cell",)


@pytest.mark.parametrize(
    ("name", "tree", "code", "value"),
    [
        ("residual", {"init_from": "somewhere"}, "config.unknown-key", "model.encoder.residual"),
        ("positoin", TREE, "config.unknown-key", "'position'"),
        ("seed", TREE, "usage.argument", "--seeds"),
    ],
)
def test_a_name_that_means_no_field_is_refused(name, tree, code, value):
    with pytest.raises(ManyheadsError) as error:
        axis_paths(name, tree)
    assert error.value.code == code
    assert value in str(error.value)


def test_values_are_split_at_commas_outside_brackets_and_quotes():
    values = ["none", '{kind = "rope", theta = 1e4}', "[1,2]", '"a,b"']
    assert list(split_values(", ".join(values))) == values
    for wrong in ("position", "=a", "position=", "position=a,", "position=a,a"):
        with pytest.raises(UsageError):
            read_axis(wrong, TREE)


def test_folder_names_are_distinct_and_valid_on_every_file_system():
    values = ("rope", '{kind = "rope"}', '{kind="rope"}', "../rope", "x" * 300)
    names = [folder_name((("position", value),)) for value in values]
    assert len(set(names)) == len(names)
    assert names[0] == "position=rope"
    assert all("/" not in name and len(name) < 200 for name in names)


@pytest.mark.parametrize(
    ("axis", "value"),
    [
        ("positoin=none", "'position'"),
        ("encoder.positoin=none", "'positoin'"),
        ("position=none,ropee", "position=ropee"),
        ("attention.heads=2,3", "attention.heads=3"),
        ("train.steps=none", "steps"),
        ("seed=1,2", "--seeds"),
    ],
)
def test_a_wrong_axis_is_refused_before_anything_is_trained(path, tmp_path, axis, value):
    with pytest.raises((ConfigError, UsageError)) as error:
        compare(path, ["lr=1e-3", axis], tmp_path / "grid")
    assert value in str(error.value)
    assert not (tmp_path / "grid").exists()


def test_two_axes_of_one_field_or_no_axis_or_no_seed_are_refused(path, tmp_path):
    for axes in (["position=none", "encoder.position=rope"], []):
        with pytest.raises(UsageError):
            compare(path, axes, tmp_path / "grid")
    for seeds, jobs in ((0, 1), (1, 0), (10_000, 1)):
        with pytest.raises(UsageError):
            compare(path, ["position=none,rope"], tmp_path / "grid", seeds=seeds, jobs=jobs)


# -------------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([(25, 4.0), (50, 3.0), (75, 2.0), (100, 1.0)], True),
        ([(25, 4.0), (50, 1.0), (75, 0.99), (100, 0.98)], False),
        ([(25, 1.0), (50, 2.0), (75, 3.0), (100, 4.0)], False),
        ([(50, 4.0), (100, 1.0)], False),  # too few to tell
        ([(100, 4.0)], False),
        ([], False),
    ],
)
def test_a_curve_that_still_falls_is_known(curve, expected):
    assert is_improving(curve) == expected


def test_a_note_tells_how_many_curves_still_fall(path, tmp_path):
    """None of two, and then one, whose log is given other losses; no run is trained again."""
    options = ("--seeds", "2", "-s", "train.eval_every=1", "-s", "train.steps=4", "--output", tmp_path / "grid")
    command, report = ("compare", path, "lr=1e-9", *options), tmp_path / "grid" / "compare.json"
    assert "train.steps" not in run(*command).stderr
    assert json.loads(report.read_text())["cells"][0]["still_improving"] == 0
    log = tmp_path / "grid" / "lr=1e-9" / "seed-4" / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["event"] == "evaluated":
            line["metrics"]["loss"] = 5.0 - line["step"]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "train.steps" in run(*command).stderr
    (cell,) = json.loads(report.read_text())["cells"]
    assert cell["still_improving"] == 1
    assert cell["seeds"][0]["curve"] == [[1, 4.0], [2, 3.0], [3, 2.0], [4, 1.0]]


def test_the_report_has_the_metrics_of_the_runs_and_no_run_is_trained_twice(path, tmp_path):
    grid = tmp_path / "grid"
    command = ("compare", path, "position=none,rope", "lr=1e-2", "--seeds", "2", "--output", grid)
    report = run_json(*command)
    assert report["axes"] == {"position": ["none", "rope"], "lr": ["1e-2"]}
    assert [cell["cell"] for cell in report["cells"]] == [{"position": name, "lr": "1e-2"} for name in ("none", "rope")]
    for cell in report["cells"]:
        losses = [seed["metrics"]["loss"] for seed in cell["seeds"]]
        assert [seed["seed"] for seed in cell["seeds"]] == [4, 5]
        assert len(set(losses)) == 2
        assert cell["metrics"]["loss"]["mean"] == pytest.approx(statistics.fmean(losses))
        assert cell["metrics"]["loss"]["std"] == pytest.approx(statistics.stdev(losses))
    torch.set_num_threads(1)
    model = TREE["model"] | {"encoder": STACK | {"position": "rope"}}
    tree = TREE | {"seed": 5, "model": model, "optim": {"lr": 1e-2}}
    alone = last_metrics(train_all(tree, tmp_path / "alone"))
    assert report["cells"][1]["seeds"][1]["metrics"] == alone, "a run of a cell is the same as that run alone"
    parameters = build(prepare(read_run(tree)).model_spec).parameters()
    assert report["cells"][1]["parameters"] == sum(parameter.numel() for parameter in parameters)
    assert (grid / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((grid / "compare.json").read_text()) == report

    files = {file: file.stat().st_mtime_ns for file in grid.glob("*/seed-*/**/*") if file.is_file()}
    again = run(*command)
    assert f"± {report['cells'][0]['metrics']['loss']['std']:.4f}" in again.stdout
    assert {file: file.stat().st_mtime_ns for file in files} == files
    events = []
    compare(path, ["position=none,rope,sinusoidal", "lr=1e-2"], grid, seeds=2, progress=events.append)
    started = [event for event in events if event.metrics is None and not event.step]
    assert [(event.name, event.seed, event.number, event.runs) for event in started] == [
        ("position=sinusoidal lr=1e-2", 4, 5, 6),
        ("position=sinusoidal lr=1e-2", 5, 6, 6),
    ], "one more value is one more cell"
    assert [event.step for event in events if event.step] == [1, 2, 3] * 2
    finished = [event for event in events if event.metrics is not None]
    assert len(finished) == 2
    assert all(event.metrics and not event.error for event in finished)
    for override, field in (("train.steps=9", "train.steps"), ("model.encoder.layers=2", "model.decoder.layers")):
        command = ("compare", path, "position=none", "lr=1e-2", "--output", grid, "-s", override)
        error = error_of(*command, check=2)
        assert error["code"] == "run.changed"
        assert field in error["message"]


def test_a_cell_that_fails_has_an_error_and_the_others_are_trained(path, tmp_path):
    axes, wide = ("position=none,rope", "core=dot,synthesizer-random"), os.environ | {"COLUMNS": "200"}
    command = ("compare", path, *axes, "--seeds", "1", "--output", tmp_path / "grid")
    lines = run(*command, env=wide).stdout.splitlines()
    rows = [line.split() for line in lines if line.startswith(("none", "rope"))]
    assert [row[:2] for row in rows] == [
        [item, other] for item in ("none", "rope") for other in ("dot", "synthesizer-random")
    ]
    assert len(rows[3]) > len(rows[0]), "which has an error at its end"
    there = tmp_path / "a.tsv"
    there.write_text("".join(f"{word} b\tb {word}\n" for word in "abcdefgh"))
    paths = f'data={{kind="pairs",path="{there}"}},{{kind="pairs",path="{tmp_path}/none.tsv"}}'
    good, bad = run_json("compare", path, paths, "--seeds", "1", "--output", tmp_path / "files")["cells"]
    assert (good["error"], bad["metrics"]) == (None, {})
    assert good["metrics"]
    assert f"{tmp_path}/none.tsv" in bad["error"]
    only_bad = paths.partition(",{")[0].replace("a.tsv", "none.tsv")
    run("compare", path, only_bad, "--seeds", "1", "--output", tmp_path / "all", check=1)


def test_a_seed_that_fails_does_not_affect_the_others(path, tmp_path):
    blocked = tmp_path / "grid" / "lr=1e-3" / "seed-4"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where the folder of a run should be")
    (cell,) = compare(path, ["lr=1e-3"], tmp_path / "grid", seeds=2)["cells"]
    assert str(blocked) in cell["error"]
    assert [seed["seed"] for seed in cell["seeds"]] == [5]
    assert cell["parameters"] > 0
    assert (tmp_path / "grid" / "compare.json").is_file()


class BrokenData(DataSpec, kind="test-broken"):
    """A user's own part with a mistake."""

    def load(self):
        raise IndexError("index out of range in self")


def test_any_exception_of_a_cell_is_its_error(path, tmp_path):
    axis = f"data={{kind='test-broken'}},{to_inline(TREE['data'])}"
    bad, good = compare(path, [axis], tmp_path / "grid", seeds=1)["cells"]
    assert (bad["error"], len(bad["seeds"])) == ("index out of range in self", 0)
    assert (good["error"], len(good["seeds"])) == (None, 1)


def to_inline(tree):
    return "{" + ", ".join(f"{name} = {json.dumps(value)}" for name, value in tree.items()) + "}"


def test_the_metrics_of_a_run_with_train_best_are_those_of_its_best_checkpoint(path, tmp_path):
    overrides = ["train.best={metric='loss',patience=2}", "train.eval_every=1", "train.steps=40", "optim.lr=0.3"]
    (cell,) = compare(path, ["optim.clip=1.0"], tmp_path / "grid", seeds=1, overrides=overrides)["cells"]
    curve = [loss for _, loss in cell["seeds"][0]["curve"]]
    assert cell["metrics"]["loss"]["mean"] == min(curve) < curve[-1]


def test_a_dict_and_a_spec_give_the_metrics_of_the_file(path, tmp_path):
    """Paths of axes are those of the file, and the runs in the folder are the same runs."""
    axes, grid = ["position=none,rope"], tmp_path / "grid"
    report = compare(path, axes, grid, seeds=1)
    for form in (TREE, read_run(TREE)):
        events = []
        assert compare(form, axes, grid, seeds=1, progress=events.append) == report
        assert not events, "every run had been trained"


def test_seeds_that_were_trained_on_other_data_are_not_compared(path, tmp_path):
    pairs = tmp_path / "a.tsv"
    axis = [f'data={{kind="pairs",path="{pairs}"}}']
    pairs.write_text("".join(f"{word} b\tb {word}\n" for word in "abcdefgh"))
    compare(path, axis, tmp_path / "grid", seeds=1)
    pairs.write_text("".join(f"{word} b\tb {word}\n" for word in "abcdefgi"))
    (cell,) = compare(path, axis, tmp_path / "grid", seeds=2)["cells"]
    assert "seed-4" in cell["error"]
    assert [seed["seed"] for seed in cell["seeds"]] == [4]


@pytest.mark.parametrize(
    "changed", ["task.label_smoothing=0.1", "train.eval_rows=4", "train.eval_every=3", "train.best={metric='loss'}"]
)
def test_what_would_change_the_metrics_of_a_finished_run_is_refused(path, tmp_path, changed):
    compare(path, ["position=none"], tmp_path / "grid", seeds=1)
    with pytest.raises(RunChangedError) as error:
        compare(path, ["position=none"], tmp_path / "grid", seeds=2, overrides=[changed])
    assert any(change.field.startswith(changed.partition("=")[0]) for change in error.value.changes)


def test_the_plot_takes_many_cells_and_seeds_without_metrics(tmp_path):
    seeds = [
        {"seed": 1, "metrics": {"loss": 0.1}, "curve": [(1, 5.0), (2, 0.1)]},
        {"seed": 2, "metrics": {}, "curve": []},
    ]
    cells = [{"cell": {"width": str(i)}, "metrics": {"loss": {}}, "seeds": seeds, "error": None} for i in range(30)]
    failed = {"cell": {"width": "x"}, "metrics": {}, "seeds": [], "error": "no"}
    draw_comparison({"cells": [*cells, failed]}, tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size > 10_000


# ------------------------------------------------------------------------------------------------ parallel, and signals


def metrics_of(report):
    return [
        (cell["cell"], cell["error"], [(seed["seed"], seed["metrics"], seed["curve"]) for seed in cell["seeds"]])
        for cell in report["cells"]
    ]


def test_parallel_runs_have_the_results_of_runs_in_turn(path, tmp_path):
    torch.set_num_threads(1)
    axes = ["position=none,rope", "core=dot,synthesizer-random"]
    one, two = (compare(path, axes, tmp_path / str(jobs), seeds=1, jobs=jobs) for jobs in (1, 2))
    assert metrics_of(one) == metrics_of(two)
    assert one["stopped"] is two["stopped"] is None


FAILING_PARTS = """
import os
import signal

from manyheads.data.source import DataSpec


class LongErrorData(DataSpec, kind="test-long-error"):
    def load(self):
        raise IndexError("x" * (1 << 20))


class KilledData(DataSpec, kind="test-killed"):
    def load(self):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_error_that_is_larger_than_a_pipe_and_a_killed_process_reach_the_report(path, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING_PARTS)
    axis = "data={kind='test-long-error'},{kind='test-killed'}"
    command = ("compare", path, axis, "--seeds", "1", "--jobs", "2", "--parts", tmp_path / "failing.py", "--json")
    done = run(*command, "--output", tmp_path / "grid", check=1)
    long, killed = json.loads(done.stdout)["cells"]
    assert long["error"] == "x" * (1 << 20)
    assert str(-signal.SIGKILL) in killed["error"]


@pytest.mark.parametrize(
    ("jobs", "number", "status"),
    [(1, signal.SIGINT, 130), (2, signal.SIGINT, 130), (2, signal.SIGTERM, 75), (2, signal.SIGHUP, 75)],
)
def test_a_grid_that_is_stopped_by_a_signal_is_resumed(path, tmp_path, jobs, number, status):
    torch.set_num_threads(1)
    axes, grid, stderr = ["position=none,rope,sinusoidal"], tmp_path / "grid", tmp_path / "err"
    command = ["compare", path, *axes, "--seeds", 1, "--jobs", jobs, "-s", "train.steps=20", "--quiet", "-o", grid]
    stderr.touch()
    process = started(*command, stderr=stderr)
    while process.is_alive() and not list(grid.glob("*/*/metrics.jsonl")):
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(120)
    assert process.exitcode == status, stderr.read_text()
    assert not list(grid.glob("*/*/lock.json"))
    assert len(list(grid.glob("*/*/checkpoints/step-00000020"))) < 3
    overrides = ["train.steps=20"]
    resumed, whole = (compare(path, axes, tmp_path / name, seeds=1, overrides=overrides) for name in ("grid", "whole"))
    assert all(len(cell["seeds"]) == 1 for cell in resumed["cells"])
    assert metrics_of(resumed) == metrics_of(whole)


def test_two_signals_end_parallel_runs_at_once(path, tmp_path):
    command = ("compare", path, "position=none,rope", "--seeds", 1, "--jobs", 2, "-s", "train.steps=100000")
    reading, stderr = Pipe(duplex=False)
    process = started(*command, "--output", tmp_path / "grid", stderr=stderr, before=os.setsid)
    try:
        while len(list(tmp_path.glob("grid/*/*/metrics.jsonl"))) < 2:
            time.sleep(0.05)
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.02)
        output = b""
        while reading.poll(60) and (chunk := os.read(reading.fileno(), 1 << 16)):
            output += chunk  # to the end, which is not before the last of its processes ended
        assert reading.poll(0), "they have not ended"
        process.join(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.exitcode == 130, output


def is_running(pid):
    """Whether a process exists and is not a zombie, which a container without an init process keeps."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_killed_comparison_takes_its_runs_with_it_and_they_save(path, tmp_path):
    command = ["compare", path, "position=none,rope", "--seeds", 1, "--jobs", 2, "-s", "train.steps=1000000"]
    grid, stderr = tmp_path / "grid", tmp_path / "err"
    stderr.touch()
    process = started(*command, "-o", grid, stderr=stderr)
    while process.is_alive() and len(list(grid.glob("*/*/metrics.jsonl"))) < 2:
        time.sleep(0.05)
    workers = [json.loads(item.read_text())["pid"] for item in grid.glob("*/*/lock.json")]
    assert len(workers) == 2, stderr.read_text()
    process.kill()
    process.join()
    deadline = time.monotonic() + 100
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
    for folder in grid.glob("*/*"):
        last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        assert (last["event"], last["reason"]) == ("finished", "terminated")
        assert newest_valid(folder / "checkpoints")[0].name == f"step-{last['step']:08}"
