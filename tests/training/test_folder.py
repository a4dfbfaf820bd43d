"""The folder of a run: changed settings, hashes of its data, its lock, its best checkpoint and its log."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from command import error_of, run, started
from small_runs import TASKS, at_file, described, end_of, hashes, in_a_process, train_all

import manyheads
from manyheads.data.tokenized import write_tokenized
from manyheads.errors import CheckpointConfigError, RunChangedError, RunError, RunLockedError
from manyheads.files.read import read_toml
from manyheads.spec import SLOTS, to_toml, to_tree
from manyheads.training.events import ConfigChanged, Evaluated, Finished, Prepared, Resumed, Step, Warned
from manyheads.training.folder import (
    config_changes,
    data_hashes,
    flatten,
    is_held,
    is_within,
    lock_folder,
    process_start,
    write_run_files,
)
from manyheads.training.loop import train_events
from manyheads.training.preparation import prepare
from manyheads.training.run import SAFE_TO_CHANGE, read_run
from manyheads.training.store import TrainState, list_checkpoints, newest_valid

SETTINGS = {"steps": 8, "save_every": 2, "eval_every": 4, "accumulate": 1}
FEW = {"kind": "sequence", "function": "reverse", "count": 120, "validation_count": 20}


def tree(**changed):
    return described("seq2seq", **SETTINGS) | {"data": FEW} | changed


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(tree()))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    train_all(tree(), folder)
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def log_lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ----------------------------------------------------------------------------------------------------- changed settings


def start(run, folder, override_fields=()):
    """What a start of a run does with its folder."""
    hashed = data_hashes(run)
    changes = config_changes(run, hashed, folder, newest_valid(folder / "checkpoints")[0], override_fields)
    write_run_files(run, hashed, folder, torch.device("cpu"))
    return changes


def another(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else [9]


def test_every_changed_field_is_refused_unless_it_is_safe_or_overridden(copied, monkeypatch):
    monkeypatch.setenv("PATH", "")  # without git, whose commit is looked up at every start
    prepared = prepare(read_run(tree()))
    path, leaves = copied / "run.toml", flatten(to_tree(prepared.spec))
    before = path.read_text()
    assert len(leaves) > 60
    for field, value in leaves.items():
        old = read_toml(path)
        *tables, name = field.split(".")
        inner = old
        for table in tables:
            inner = inner[table]
        inner[name] = another(value)
        path.write_text(to_toml(old))
        override_fields = []
        if not is_within(field, SAFE_TO_CHANGE):
            with pytest.raises(RunChangedError) as error:
                start(prepared, copied)
            override_fields = [change.field for change in error.value.changes]
            assert field in override_fields
            assert field in str(error.value)
        if field == "optim.kind":  # no optimizer can use the state of another
            with pytest.raises(RunError) as error:
                start(prepared, copied, override_fields)
            assert error.value.code == "run.invalid"
            path.write_text(before)
            continue
        assert field in [item.field for item in start(prepared, copied, override_fields)]
        assert path.read_text() == before  # and has the settings of this start now


def table_rows(stderr):
    return [line.split() for line in stderr.splitlines()]


def test_changes_are_shown_as_a_table_and_overridden_on_request(run_file, copied):
    change = ("-s", "optim.lr=0.001", "-s", "train.steps=10", "-s", "task.label_smoothing=0.2")
    command = ("train", run_file, "--output", copied, *change)
    done = run(*command, check=2)
    assert ["task.label_smoothing", "0.1", "0.2"] in table_rows(done.stderr)
    assert ["optim.lr", "0.003", "0.001"] in table_rows(done.stderr)
    assert not any(row[:1] == ["train.steps"] for row in table_rows(done.stderr))  # which is safe to change
    done = run(*command, "--json", "--override-resume", "optim.lr", check=2)
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["code"] == "run.changed"
    assert "optim.lr" not in error["message"]
    allowed = ("--override-resume", "optim.lr", "--override-resume", "task")
    done = run(*command, *allowed)
    assert ["train.steps", "8", "10"] in table_rows(done.stderr)
    assert log_lines(copied)[-1]["step"] == 10
    run(*command, *allowed)  # the same again
    unknown = error_of(*command, "--override-resume", "optim.lrr", check=2)
    assert unknown["code"] == "usage.argument"
    assert "'optim.lr'" in unknown["message"]
    files = {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()}
    wider = ("-s", "model.encoder.width=32", "--override-resume", "model", *allowed)
    for more in ((), ("--resume", "step-00000008")):
        error = json.loads(run(*command, *wider, *more, "--json", check=4).stderr.splitlines()[-1])["error"]
        assert error["code"] == "checkpoint.weights"
        assert {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()} == files, "nothing changed"
        assert (copied / "checkpoints" / "step-00000010").is_dir()


def test_a_change_of_both_run_files_is_found_by_the_checkpoint(run_file, copied, tmp_path):
    for path in (run_file, copied / "run.toml"):
        path.write_text(path.read_text().replace("lr = 0.003", "lr = 0.001"))
    assert read_toml(copied / "run.toml")["optim"]["lr"] == 0.001
    for more in ((), ("--dry-run",), ("--resume", "step-00000006")):
        done = run("train", run_file, "--output", copied, *more, check=2)
        assert more[:1] == ("--dry-run",) or ["optim.lr", "0.003", "0.001"] in table_rows(done.stderr)
        assert "optim.lr" in done.stderr
    run("train", run_file, "--output", copied, "-s", "train.steps=10", "--override-resume", "optim.lr")
    run("train", run_file, "--output", copied, "-s", "train.steps=12")  # the last checkpoint knows the new value


def test_other_threads_are_a_warning_because_they_give_other_bits(run_file, tmp_path):
    command = ("train", run_file, "--output", tmp_path / "run", "--quiet")
    run(*command, "-s", "train.steps=2", before=partial(torch.set_num_threads, 2))
    assert "OMP_NUM_THREADS" in run(*command, "-s", "train.steps=4").stderr
    warned = [line for line in log_lines(tmp_path / "run") if line["event"] == "warned"]
    assert [line["step"] for line in warned] == [2]
    assert run(*command, "-s", "train.steps=6").stderr == ""


def test_files_that_are_not_of_a_run_are_not_overwritten(run_file, tmp_path):
    for name in ("run.toml", "data.json", "env.json", "metrics.jsonl", "lock.json"):
        folder = tmp_path / name.replace(".", "-")
        (folder / "checkpoints").mkdir(parents=True)  # which could be anybody's
        (folder / name).write_text('{"launches": 3}')
        for more in ((), ("--dry-run",)):
            done = run("train", run_file, "--output", folder, *more, "--json", check=2)
            error = json.loads(done.stderr.splitlines()[-1])["error"]
            assert error["code"] == "run.invalid"
            assert str(folder / name) in error["message"]
        assert sorted(path.name for path in folder.iterdir()) == sorted(["checkpoints", name])
        assert (folder / name).read_text() == '{"launches": 3}'


def test_a_dry_run_refuses_what_the_run_would(run_file, copied, tmp_path):
    (tmp_path / "file").write_text("")
    assert error_of("train", run_file, "--output", tmp_path / "file", "--dry-run", check=2)["code"] == "usage.output"
    changed = ("train", run_file, "--output", copied, "--dry-run", "-s", "optim.lr=0.5")
    error = error_of(*changed, check=2)
    assert error["code"] == "run.changed"
    assert "optim.lr" in error["message"]
    run(*changed, "--override-resume", "optim")


def test_a_start_without_a_checkpoint_leaves_no_lines_in_the_log(tmp_path):
    prepared = prepare(read_run(tree()))
    for _ in range(2):
        first = train_events(prepared, tmp_path / "run")
        next(event for event in first if isinstance(event, Step))
        (tmp_path / "run" / "lock.json").unlink()
        del first
    list(train_events(prepared, tmp_path / "run"))
    steps = [line["step"] for line in log_lines(tmp_path / "run") if line["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1))


def test_a_run_without_a_checkpoint_cannot_be_used(tmp_path):
    first = train_events(prepare(read_run(tree())), tmp_path / "run")
    next(event for event in first if isinstance(event, Step))
    for command in (("predict", tmp_path / "run", "1 2"), ("evaluate", tmp_path / "run")):
        assert error_of(*command, check=4)["code"] == "checkpoint.not-found"
    first.close()


# ------------------------------------------------------------------------------------------------------------ its data


PAIRS = "".join(f"wort {i % 17} {i}\tword {i % 17} {i}\n" for i in range(60))


def test_a_run_whose_data_hashes_are_missing_is_refused(run_file, copied):
    (copied / "data.json").unlink()
    error = json.loads(run("train", run_file, "--output", copied, "--json", check=2).stderr.splitlines()[-1])["error"]
    assert error["code"] == "run.invalid"
    assert "data.json" in error["message"]
    run("train", run_file, "--output", copied, "--override-resume", "data")
    assert (copied / "data.json").is_file()


def test_data_that_changed_under_the_same_name_is_another_run(run_file, tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text(PAIRS)
    command = ("train", run_file, "--output", tmp_path / "run", "-s", f'data={{kind="pairs",path="{path}"}}')
    run(*command, "-s", "train.steps=2")
    path.write_text(PAIRS.replace("word 3 3", "word 4 3"))
    done = run(*command, "-s", "train.steps=4", "--json", check=2)
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["code"] == "run.changed"
    assert "data.train_rows" in error["message"]
    run(*command, "-s", "train.steps=4", "--override-resume", "data", "--override-resume", "tokenizer")


def hashes_of_lines(folder, lines):
    """With a tokenizer of bytes, which is the same whatever the lines."""
    (folder / "a.tsv").write_text("".join(lines))
    data = {"kind": "pairs", "path": str(folder / "a.tsv")}
    return flatten(data_hashes(prepare(read_run(tree(data=data, tokenizer="bytes")))))


MANY = [f"{i % 10} {i % 7}\t{i % 7} {i % 3}\n" for i in range(9_000)]


def test_one_changed_row_among_thousands_changes_the_hash(tmp_path):
    before = hashes_of_lines(tmp_path, MANY)
    assert hashes_of_lines(tmp_path, MANY) == before
    for i in (0, 1, 4_321, 8_999):
        after = hashes_of_lines(tmp_path, [*MANY[:i], "1 1\t9 1\n", *MANY[i + 1 :]])
        assert len([name for name in before if after[name] != before[name]]) == 1
    ends = [hashes_of_lines(tmp_path, [*MANY[:10], line, *MANY[11:]]) for line in ("11\t1\n", "1\t11\n")]
    assert ends[0] != ends[1]  # the same tokens, split differently into source and target


@pytest.mark.parametrize("max_length", [None, 4])
def test_tokenized_rows_are_identified_by_the_hashes_of_their_files(max_length, tmp_path):
    found = []
    for name, lines in (("one", MANY), ("same", MANY), ("other", [*MANY[:-1], "1 1\t9 1\n"])):
        (tmp_path / f"{name}.tsv").write_text("".join(lines))
        corpus = SLOTS["data"].from_config({"kind": "pairs", "path": str(tmp_path / f"{name}.tsv")}).load()
        write_tokenized(
            corpus, SLOTS["tokenizer"].from_config("words").make(f"{i}" for i in range(10)), tmp_path / name
        )
        data = {"kind": "tokenized", "path": str(tmp_path / name)}
        prepared = described("seq2seq", **SETTINGS, max_length=max_length) | {"data": data}
        found.append(data_hashes(prepare(read_run(prepared)))["data"])
    assert found[0] == found[1] != found[2]


def test_links_and_class_names_are_part_of_the_data(tmp_path):
    path, found = tmp_path / "a.tsv", []
    for link in ("0-0 1-1", "0-1 1-0"):
        lines = [f"a {i}\tb {i}\t0-0 1-1\n" for i in range(50)]
        path.write_text("".join([*lines[:30], lines[30].replace("0-0 1-1", link), *lines[31:]]))
        data = {"kind": "pairs", "path": str(path), "columns": [0, 1, 2]}
        guided = tree(auxiliary_losses=[{"kind": "guided"}], task="seq2seq", data=data)
        found.append(data_hashes(prepare(read_run(guided)))["data"])
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"attention_targets"}
    encoder, found = TASKS["classify"]["model"]["encoder"] | {"embed": "tokens"}, []
    model = {"vocab": "tokenizer", "encoder": encoder, "head": {"kind": "classes", "classes": 2}}
    for name in ("good", "great"):
        path.write_text("".join(f"text {i}\t{('bad', name)[i % 2]}\n" for i in range(50)))
        labels = tree(task="classify", model=model, data={"kind": "labels", "path": str(path)})
        found.append(data_hashes(prepare(read_run(labels)))["data"])
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"labels"}


# --------------------------------------------------------------------------------------- which checkpoint, and the best


def test_a_run_resumes_from_the_checkpoint_that_is_named(run_file, copied, tmp_path, whole):
    assert error_of("train", run_file, "--output", copied, "--resume", "never", check=2)["code"] == "run.invalid"
    run("train", run_file, "--output", tmp_path / "new", "--resume", "never")
    assert hashes(tmp_path / "new") == hashes(whole)
    other = tmp_path / "new" / "checkpoints" / "step-00000006"
    done = run("train", run_file, "--output", copied, "--resume", other, "--json", check=4)
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["code"] == "checkpoint.not-found"
    assert "step-00000008, step-00000006" in error["message"]
    run("train", run_file, "--output", copied, "--resume", copied / "checkpoints" / "step-00000006")
    assert next(line["step"] for line in log_lines(copied) if line["event"] == "resumed") == 6
    assert hashes(copied) == hashes(whole)
    assert (copied / "checkpoints" / "aside-1-step-00000008").is_dir()
    assert [line["step"] for line in log_lines(copied) if line["event"] == "step"] == list(range(1, 9))


@pytest.fixture
def worsening(tmp_path):
    """A run whose validation loss rises: it learns that `a` follows `a`, and is evaluated on texts of `b`."""
    (tmp_path / "train.txt").write_text("a a a a a a a a\n" * 50 + "b b\n")
    (tmp_path / "validation.txt").write_text("b b b b b b b b\n" * 10)
    paths = {name: str(tmp_path / f"{name}.txt") for name in ("train", "validation")}
    data = {"kind": "text", "path": paths["train"], "validation": paths["validation"], "document": "line"}
    optim = {"lr": 0.01, "schedule": {"kind": "linear", "warmup_steps": 0}}

    def train_worsening(**settings):
        settings = {"eval_every": 2, "save_every": 2} | settings
        events = train_all(described("causal", **settings) | {"data": data, "optim": optim}, tmp_path / "run")
        losses = [event.metrics["loss"] for event in events if isinstance(event, Evaluated)]
        assert losses == sorted(set(losses)), "every evaluation is worse than the one before"
        return events

    return train_worsening


def test_a_best_checkpoint_that_is_damaged_is_a_warning_and_the_next_evaluation_the_best(worsening, tmp_path):
    folder, best = tmp_path / "run" / "checkpoints", {"metric": "loss"}
    worsening(best=best, steps=6, keep_last=3)
    assert [(folder / name).read_text() for name in ("best", "latest")] == ["step-00000002", "step-00000006"]
    path = folder / "step-00000002" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (warning,) = [event for event in worsening(best=best, steps=8, keep_last=3) if isinstance(event, Warned)]
    assert str(path) in warning.message
    assert (folder / "best").read_text() == "step-00000008"


def test_a_run_without_train_best_is_loaded_at_its_latest_checkpoint(worsening, tmp_path):
    worsening(best={"metric": "loss"}, steps=4)
    assert manyheads.load(tmp_path / "run").path.name == "step-00000002"
    worsening(steps=4)
    assert manyheads.load(tmp_path / "run").path.name == "step-00000004"


def test_evaluations_on_other_rows_are_not_compared(worsening, tmp_path):
    worsening(best={"metric": "loss"}, steps=4, eval_rows=1)
    worsening(best={"metric": "loss"}, steps=8, eval_rows=9)
    assert (tmp_path / "run" / "checkpoints" / "best").read_text() == "step-00000006", "the first on the new rows"


def with_best(**best):
    return described("seq2seq", steps=12, save_every=5, eval_every=2, accumulate=1, best=best) | {"data": FEW}


def test_patience_ends_a_run_and_the_best_checkpoint_is_kept_and_loaded(tmp_path):
    patient = with_best(metric="exact_match", patience=3)  # which stays 0, so the first evaluation is the best
    assert end_of(train_all(patient, tmp_path / "run")) == (8, "patience")
    folder = tmp_path / "run" / "checkpoints"
    assert [(folder / name).read_text() for name in ("best", "latest")] == ["step-00000002", "step-00000008"]
    assert {path.name for path in list_checkpoints(folder)} == {"step-00000002", "step-00000005", "step-00000008"}
    assert manyheads.load(tmp_path / "run").path == folder / "step-00000002"
    events = train_all(patient, tmp_path / "run")
    assert [type(event) for event in events] == [Prepared, Resumed, Finished]
    assert end_of(events) == (8, "patience")
    longer = train_all(with_best(metric="exact_match", patience=5), tmp_path / "run")
    assert isinstance(longer[2], ConfigChanged)
    assert end_of(longer) == (12, "patience")


def test_the_best_checkpoint_survives_kills_with_the_same_bits(tmp_path):
    best = with_best(metric="loss", patience=3)
    assert in_a_process(best, tmp_path / "whole") == 0
    for step in (3, 6, 11):
        assert in_a_process(best, tmp_path / "run", step=step) in (0, -signal.SIGKILL)
    pointer = ("os.rename", r"/\.(latest|best)\.draft$")  # between a checkpoint and the files that name it
    assert in_a_process(best, tmp_path / "run", moment=pointer, count=2) in (0, -signal.SIGKILL)
    assert in_a_process(best, tmp_path / "run") == 0
    assert hashes(tmp_path / "run") == hashes(tmp_path / "whole")
    names = [(tmp_path / name / "checkpoints" / "best").read_text() for name in ("run", "whole")]
    assert names[0] == names[1]
    state = json.loads((tmp_path / "run" / "checkpoints" / names[0] / "trainer.json").read_text())
    lines = [line for line in log_lines(tmp_path / "run") if line["event"] == "evaluated"]
    losses = {line["step"]: line["metrics"]["loss"] for line in lines}
    assert state["best_value"] == losses[state["best_step"]] == min(losses.values())


def test_the_training_state_goes_to_a_file_and_back():
    state = TrainState(
        step=4,
        epoch=1,
        batch_index=2,
        rows=9,
        tokens=88,
        evaluated_step=4,
        best_metric="loss",
        best_value=1.5,
        best_step=4,
    )
    state.metrics = {"loss": 1.5, "exact_match": None}
    assert TrainState.from_tree(json.loads(json.dumps(state.to_tree()))) == state
    assert TrainState.from_tree({"schema": 2, "step": 3}) == TrainState(step=3)
    for wrong, named in (({"schema": 1, "batch": 3}, "schema 1"), ({"schema": 2, "stepp": 3}, "stepp")):
        with pytest.raises(CheckpointConfigError) as error:
            TrainState.from_tree(wrong)
        assert named in str(error.value)


def test_the_folder_records_the_commit_that_each_start_was_made_in(run_file, tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    for _ in range(2):
        run("train", run_file, "--output", tmp_path / "run", "--seed", "7", "-s", "train.steps=1", cwd=tmp_path)
    launches = json.loads((tmp_path / "run" / "env.json").read_text())["launches"]
    found = [(launch["git"], launch["seed"], launch["command"][0], launch["torch"]) for launch in launches]
    assert found == [(head, 7, "manyheads", torch.__version__)] * 2
    assert read_toml(tmp_path / "run" / "run.toml")["seed"] == 7


# ------------------------------------------------------------------------------------------------------------- the lock


def terminate_twice():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_run_is_refused_until_the_first_is_gone(run_file, tmp_path):
    folder, stderr = tmp_path / "run", tmp_path / "err"
    stderr.touch()
    command = ["train", str(run_file), "--output", str(folder), "-s", "train.steps=1000000"]
    first = started(*command, stderr=stderr)
    deadline = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    error = error_of("train", run_file, "--output", folder, check=2)
    assert error["code"] == "run.locked"
    assert str(first.pid) in error["message"]
    first.kill()
    first.join()
    before = partial(at_file, "open", r"\.tmp-\w+/trainer\.json$", terminate_twice)
    run(*command, check=143, before=before)


def test_a_lock_is_stale_if_its_process_is_gone_or_another(tmp_path):
    here, parent = socket.gethostname(), os.getppid()
    assert is_held({"pid": parent, "host": here, "started": process_start(parent)})
    assert is_held({"pid": os.getpid(), "host": here, "started": process_start(os.getpid())})
    assert not is_held({"pid": parent, "host": here, "started": "1"})  # the number is of another process now
    assert not is_held({"pid": 2**22 + 1, "host": here, "started": "1"})
    assert is_held({"pid": 2**22 + 1, "host": "elsewhere", "started": "1"})  # unknown here
    assert not is_held({})  # a file that was not written completely
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    assert not is_held({"pid": dead.pid, "host": here})  # a zombie
    dead.wait()
    with lock_folder(tmp_path) as check:
        with pytest.raises(RunLockedError), lock_folder(tmp_path):
            pass
        check()
        (tmp_path / "lock.json").write_text("{}")
        with pytest.raises(OSError, match=str(tmp_path)):
            check()
    assert (tmp_path / "lock.json").exists()  # which is not ours to remove


# ---------------------------------------------------------------------------------------------------------- TensorBoard


def scalars(folder):
    """What TensorBoard shows: the first record of a file drops its step and later ones of earlier files."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            at += length + 16
            if event.HasField("session_log"):
                found = [result for result in found if result[1] < event.step]
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def test_tensorboard_shows_every_step_once(tmp_path):
    shown = described("seq2seq", **SETTINGS, tensorboard=True) | {"data": FEW}
    assert in_a_process(shown, tmp_path / "run", step=5) == -signal.SIGKILL
    assert in_a_process(shown, tmp_path / "run") == 0
    found = scalars(tmp_path / "run")
    assert [step for name, step, _ in found if name == "validation/loss"] == [4, 8]
    for key in ("loss", "lr", "grad_norm"):
        logged = {line["step"]: line[key] for line in log_lines(tmp_path / "run") if line["event"] == "step"}
        values = [(step, value) for name, step, value in found if name == f"train/{key}"]
        assert [step for step, _ in values] == list(range(1, 9))
        assert dict(values) == pytest.approx(logged)
