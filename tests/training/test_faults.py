"""Real faults: signals at every moment, full and lost disks, damaged checkpoints, NaN, little memory, bad data."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random
from threading import Event, Thread

import pytest
import torch
from command import COMMAND_NAMES, at_terminal, error_of, run
from safetensors.torch import load_file, save_file
from small_runs import at_file, at_forward, described, end_of, hashes, resume, train_all

import manyheads
from manyheads.checkpoint.exporter import FORMATS
from manyheads.files.manifest import verify_manifest
from manyheads.files.read import sha256
from manyheads.files.write import write_atomic
from manyheads.spec import to_toml
from manyheads.training.events import Resumed, Step
from manyheads.training.folder import data_hashes
from manyheads.training.log import Log
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run
from manyheads.training.store import list_checkpoints, newest_valid, remove_old_checkpoints

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
    """The folder of a run without faults."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert end_of(train_all(tree(), folder)) == (8, "steps")
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def log_lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder, event):
    return [line["step"] for line in log_lines(folder) if line["event"] == event]


# ------------------------------------------- signals, which the process sends to itself at every moment


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


def signal_at(moment, *numbers):
    """In the process of a command: sends signals to itself at a moment of the run."""
    action = partial(send, *numbers)
    if moment in ("first step", "evaluation"):
        at_forward({1: action}, training=moment == "first step")
    else:
        at_file(*MOMENTS[moment], action)


MOMENTS = {
    "preparation": ("open", r"/a\.tsv$"),
    "first step": (),
    "evaluation": (),
    "state": ("open", r"\.tmp-\w+/trainer\.json$"),
    "manifest": ("open", r"\.tmp-\w+/manifest\.json$"),
    "rename": ("os.rename", r"step-\d+\.tmp-"),
    "latest": ("os.rename", r"/\.latest\.draft$"),
}
# after the first signal, and after the second
STATUS = {signal.SIGTERM: (75, 143), signal.SIGINT: (130, 130), signal.SIGHUP: (75, 75)}
LAST_STEP = {"first step": 1, "evaluation": 4, "state": 2, "latest": 2}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


@pytest.mark.parametrize(("moment", "number"), [*zip(LAST_STEP, SIGNALS, strict=True)])
def test_a_signal_at_any_moment_finishes_the_step_and_saves(moment, number, run_file, tmp_path, whole):
    folder = tmp_path / "run"
    run("train", run_file, "--output", folder, check=STATUS[number][0], before=partial(signal_at, moment, number))
    last = log_lines(folder)[-1]
    assert (last["event"], last["step"]) == ("finished", LAST_STEP[moment])
    assert verify_manifest(folder / "checkpoints" / f"step-{last['step']:08}") is None
    assert not (folder / "lock.json").exists()
    assert moment != "evaluation" or not steps_of(folder, "evaluated")  # the run did not wait for it
    run("train", run_file, "--output", folder)
    assert hashes(folder) == hashes(whole)
    assert steps_of(folder, "evaluated") == [4, 8]


@pytest.mark.parametrize("number", STATUS)
def test_a_signal_while_data_is_read_stops_at_once(number, run_file, tmp_path):
    data = pairs_file(tmp_path, "a.tsv", PAIRS.encode())
    before = partial(signal_at, "preparation", number)
    run("train", run_file, "--output", tmp_path / "run", *data, check=STATUS[number][0], before=before)
    assert not (tmp_path / "run").exists()


def test_a_second_signal_stops_at_once_and_leaves_nothing_half_written(run_file, tmp_path, whole):
    folder = tmp_path / "run"
    before = partial(signal_at, "evaluation", signal.SIGTERM)  # so that every later start repeats that evaluation
    run("train", run_file, "--output", folder, check=75, before=before)
    for number, moment in (
        (signal.SIGTERM, "manifest"),
        (signal.SIGINT, "evaluation"),
        (signal.SIGINT, "rename"),
        (signal.SIGTERM, "first step"),
    ):
        before = partial(signal_at, moment, number, number)
        run("train", run_file, "--output", folder, check=STATUS[number][1], before=before)
        assert not (folder / "lock.json").exists()
        assert not [*folder.rglob("*.tmp*"), *folder.rglob(".*.draft")]
    run("train", run_file, "--output", folder)
    assert hashes(folder) == hashes(whole)
    assert steps_of(folder, "evaluated") == [4, 8]


def ignore_and_signal_at(moment, *numbers):
    """As nohup starts a process, or a script one in the background."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal_at(moment, *numbers)


@pytest.mark.parametrize("moment", ["preparation", "first step"])
def test_signals_that_are_ignored_at_the_start_stay_ignored_and_sigterm_saves(moment, run_file, tmp_path, whole):
    data = pairs_file(tmp_path, "a.tsv", PAIRS.encode()) if moment == "preparation" else ()
    ignored = (signal.SIGINT, signal.SIGINT, signal.SIGHUP, signal.SIGHUP)
    before = partial(ignore_and_signal_at, moment, *ignored)
    run("train", run_file, "--output", tmp_path / "one", *data, "--json", before=before)
    assert log_lines(tmp_path / "one")[-1]["reason"] == "steps"
    assert data or hashes(tmp_path / "one") == hashes(whole)
    before = partial(ignore_and_signal_at, "first step", *ignored, signal.SIGTERM)
    run("train", run_file, "--output", tmp_path / "two", check=75, before=before)
    assert log_lines(tmp_path / "two")[-1]["reason"] == "terminated"


def test_a_terminal_that_is_closed_sends_several_signals_and_the_run_saves(run_file, tmp_path):
    """SIGHUP comes from the terminal and from its shell, and SIGTERM from the logout."""
    before = partial(signal_at, "state", signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP)
    run("train", run_file, "--output", tmp_path / "run", check=75, before=before)
    assert log_lines(tmp_path / "run")[-1]["reason"] == "terminated"
    assert newest_valid(tmp_path / "run" / "checkpoints")[0].name == "step-00000002"
    before = partial(signal_at, "first step", signal.SIGHUP, signal.SIGTERM, signal.SIGTERM)
    run("train", run_file, "--output", tmp_path / "run", check=143, before=before)


def test_signals_at_random_steps_change_no_bit(run_file, tmp_path, whole):
    folder, rng, step = tmp_path / "run", Random(3), 0
    for _ in range(3):
        number, more = rng.choice([signal.SIGTERM, signal.SIGINT]), rng.randint(1, 2)
        step += more
        before = partial(at_forward, {more: partial(send, number)})
        run("train", run_file, "--output", folder, check=STATUS[number][0], before=before)
        assert (log_lines(folder)[-1]["event"], log_lines(folder)[-1]["step"]) == ("finished", step)
        assert not (folder / "lock.json").exists()
    run("train", run_file, "--output", folder)
    assert hashes(folder) == hashes(whole)


def test_ctrl_c_at_a_terminal_saves_and_ends_the_run(run_file, tmp_path):
    """A real terminal: a bar that moves, and Ctrl-C typed once."""
    command = ("train", run_file, "--output", tmp_path / "run", "-s", "train.steps=100000")
    process, master = at_terminal(*command, TERM="xterm", NO_COLOR="1")
    output, typed, deadline = b"", False, time.monotonic() + 100
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 1)[0]:
            continue
        try:
            output += os.read(master, 4096)
        except OSError:  # the process is gone
            break
        if not typed and b"loss" in output:
            os.write(master, b"\x03")
            typed = True
    os.close(master)
    process.join(60)
    assert process.exitcode == 130, output.decode()
    assert b"left" in output
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]m", output)  # NO_COLOR
    assert log_lines(tmp_path / "run")[-1]["reason"] == "interrupted"


def test_without_a_terminal_there_are_plain_lines_and_quiet_is_quiet(run_file, tmp_path):
    done = run("train", run_file, "--output", tmp_path / "run", env=os.environ | {"TERM": "xterm-256color"})
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    loss = next(line["metrics"]["loss"] for line in log_lines(tmp_path / "run") if line["event"] == "evaluated")
    assert f"{loss:.4f}" in done.stderr
    assert run("train", run_file, "--output", tmp_path / "other", "--quiet").stderr == ""


# ------------------------------------------------------------------------ standard streams that are full, closed or gone


def read_until(terminal, gone):
    """Reads what a terminal shows, which holds little that is not read, and closes it when it is gone."""
    while not gone.is_set():
        if select.select([terminal], [], [], 0.01)[0]:
            os.read(terminal, 4096)
    os.close(terminal)


def lose_stderr(how):
    """In the process of a command: writing to standard error fails, from the start or from the third step on."""
    if how == "reader":
        reader, number = os.pipe()
        at_forward({3: partial(os.close, reader)})
    elif how == "terminal":
        terminal, number = pty.openpty()
        gone = Event()
        reader = Thread(target=read_until, args=(terminal, gone), daemon=True)
        reader.start()
        at_forward({3: lambda: (gone.set(), reader.join())})
        os.environ["TERM"] = "xterm"
    else:
        number = os.open("/dev/full", os.O_WRONLY)
    os.dup2(number, 2)
    os.close(number)


@pytest.mark.parametrize("how", ["reader", "terminal", "disk"])
def test_a_failed_write_to_standard_error_does_not_end_the_run(how, run_file, tmp_path, whole):
    run("train", run_file, "--output", tmp_path / "run", "-s", "train.eval_every=1", before=partial(lose_stderr, how))
    assert end_of_log(tmp_path / "run") == (8, "steps")
    assert hashes(tmp_path / "run")["model.safetensors"] == hashes(whole)["model.safetensors"]


def test_a_run_outlives_the_reader_of_its_output(run_file, tmp_path, whole):
    """A real shell and a real pipe, whose reader takes three lines of many."""
    command = f"{sys.executable} -m manyheads train run.toml -o run -s train.eval_every=1 2>&1; echo $? > status"
    done = subprocess.run(["sh", "-c", f"{{ {command}; }} | head -n 3"], capture_output=True, text=True, cwd=tmp_path)
    assert (len(done.stdout.splitlines()), (tmp_path / "status").read_text()) == (3, "0\n")
    assert end_of_log(tmp_path / "run") == (8, "steps")
    assert hashes(tmp_path / "run")["model.safetensors"] == hashes(whole)["model.safetensors"]


def test_an_evaluation_writes_its_file_although_nobody_reads_its_table(copied, tmp_path):
    """The reader of the pipe has gone long before the command prints."""
    command = f"{sys.executable} -m manyheads evaluate {copied} --output {tmp_path}/rows.jsonl | true"
    subprocess.run(["sh", "-c", command], capture_output=True, check=True)
    assert (tmp_path / "rows.jsonl").read_text().count("\n") > 0


def end_of_log(folder):
    last = log_lines(folder)[-1]
    return last["step"], last.get("reason")


def close_streams(*numbers):
    """In the process of a command: as after `<&-`, `>&-` and `2>&-`."""
    for number in numbers:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)


# in a folder with run.toml and the finished run `copied`: the exit status, and the folder of a run that is trained
WITHOUT_STREAMS = {
    "--version": (0, None),
    "ask copied '1 2 3'": (0, None),
    "audit copied": (0, None),
    "chat copied": (2, None),  # it has no chat template
    "compare run.toml optim.lr=0.003 --seeds 1 --jobs 2 -o grid": (0, "grid/optim.lr=0.003/seed-5"),
    "data show run.toml": (0, None),
    "data prepare run.toml -o ids": (0, None),
    "demo -o copied": (2, None),  # of another run
    "evaluate copied": (0, None),
    "export copied exported --to manyheads": (0, None),
    "heads copied lines.txt": (2, None),  # an encoder-decoder
    "lab list": (0, None),
    "look copied '1 2 3' --terminal": (0, None),
    "new copy -o copy.toml --minutes 0.001 -s data.count=200": (0, None),
    "predict copied '1 2 3'": (0, None),
    "score copied '1 2 3' --source '1 2'": (0, None),
    "show gpt2 -s decoder.layers=1": (0, None),
    "train run.toml -o run": (0, "run"),
    "train run.toml --dry-run": (0, None),
}


def test_every_command_has_a_case_without_standard_streams():
    assert {command.split()[0] for command in WITHOUT_STREAMS} == {"--version", *COMMAND_NAMES}


@pytest.mark.parametrize("command", WITHOUT_STREAMS)
def test_a_command_works_with_closed_standard_streams(command, run_file, copied, tmp_path, whole):
    (tmp_path / "lines.txt").write_text("1 2 3\n")
    status, trained = WITHOUT_STREAMS[command]
    run(*shlex.split(command), cwd=tmp_path, check=status, before=partial(close_streams, 0, 1, 2))
    assert trained is None or hashes(tmp_path / trained) == hashes(whole)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_closed_stream_leaves_the_others_as_they_are(number, copied):
    before = partial(close_streams, number)
    done = run("predict", copied, "1 2 3", before=before)
    assert (bool(done.stdout), done.stderr) == (number != 1, "")
    done = run("predict", copied, check=3, before=before)  # standard input is empty
    assert (done.stdout, bool(done.stderr)) == ("", number != 2)


def test_an_error_without_a_standard_error_is_not_written_elsewhere(tmp_path):
    command = f"{sys.executable} -m manyheads shw 2>&- <&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")


# ------------------------------------------------------------------------------- a disk that is full, read-only or gone


@pytest.fixture
def disk(tmp_path):
    """Mounts a small disk."""
    folder, mounted = tmp_path / "disk", []
    folder.mkdir()

    def mount(size):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"NO REAL DISK WAS FILLED: this machine does not let us mount one ({done.stderr.strip()})")
        mounted.append(folder)
        return folder

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path], capture_output=True)


def fill(folder):
    with (folder / "ballast").open("wb", buffering=0) as file:
        try:
            while file.write(b"0" * 4096):
                pass
        except OSError:
            pass


def checkpoint_size(folder):
    return sum(path.stat().st_size for path in (folder / "checkpoints" / "step-00000008").iterdir())


def test_a_full_disk_costs_neither_the_run_nor_a_line_of_its_log(run_file, disk, whole):
    folder = disk(f"{8 * checkpoint_size(whole) // 1024}k")
    before = partial(at_forward, {3: partial(fill, folder), 7: partial(os.unlink, folder / "ballast")})
    done = run("train", run_file, "--output", folder / "run", before=before)
    failed = [line for line in log_lines(folder / "run") if line["event"] == "save_failed"]
    assert [(line["step"], line["failures"]) for line in failed] == [(4, 1), (6, 2)]
    assert failed[0]["message"] in done.stderr
    assert steps_of(folder / "run", "step") == list(range(1, 9))
    assert hashes(folder / "run") == hashes(whole)


def test_a_disk_that_stays_full_ends_the_run_with_its_last_checkpoint(run_file, disk, whole):
    folder = disk(f"{8 * checkpoint_size(whole) // 1024}k")
    before = partial(at_forward, {3: partial(fill, folder)})
    done = run("train", run_file, "--output", folder / "run", "--json", check=5, before=before)
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["code"] == "resource.disk"
    assert "3 times" in error["message"]
    assert "step 2 " in error["message"]
    assert verify_manifest(folder / "run" / "checkpoints" / "step-00000002") is None
    assert not [*folder.rglob("*.tmp*"), *folder.rglob(".*.draft")]
    assert error_of("train", run_file, "--output", folder / "other", check=5)["code"] == "resource.disk"
    assert not (folder / "other" / "lock.json").exists()
    (folder / "ballast").unlink()
    run("train", run_file, "--output", folder / "run")
    assert hashes(folder / "run") == hashes(whole)


def test_too_little_disk_space_is_a_warning_at_the_start(run_file, disk, whole):
    folder = disk(f"{21 * checkpoint_size(whole) // 10 // 1024}k")
    run("train", run_file, "--output", folder / "run", check=5)
    warning, *_ = [line for line in log_lines(folder / "run") if line["event"] == "warned"]
    assert warning["step"] == 0
    assert str(folder / "run") in warning["message"]
    assert verify_manifest(folder / "run" / "checkpoints" / "step-00000002") is None
    fill(folder)
    assert error_of("train", run_file, "--output", folder / "run", check=5)["code"] == "resource.disk"


def step_event(step, loss=1.0):
    return Step(step=step, loss=loss, lr=0.1, grad_norm=1.0, tokens=10, seconds=0.1)


def test_lines_that_cannot_be_written_are_written_later(tmp_path):
    log = Log(Path("/dev/full"))
    assert "/dev/full" in log.add(step_event(1, loss=float("nan")))
    assert log.add(step_event(2)) is None  # one warning is enough
    log.path = tmp_path / "metrics.jsonl"
    assert log.add(step_event(3)) is None
    assert steps_of(tmp_path, "step") == [1, 2, 3]
    assert log_lines(tmp_path)[0]["loss"] is None
    log.path.unlink()
    assert str(log.path) in log.add(step_event(4))
    assert not log.path.exists()  # a file that was removed is not created again


def limit_file_size(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def test_a_limit_of_the_file_size_is_like_a_full_disk(run_file, tmp_path, whole):
    before = partial(limit_file_size, 20_000)
    done = run("train", run_file, "--output", tmp_path / "run", "--json", check=5, before=before)
    assert json.loads(done.stderr.splitlines()[-1])["error"]["code"] == "resource.disk"
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")
    run("train", run_file, "--output", tmp_path / "run")
    assert hashes(tmp_path / "run") == hashes(whole)


def remount(folder, mode):
    subprocess.run(["mount", "-o", f"remount,{mode}", folder], check=True)


def test_a_disk_that_becomes_read_only(run_file, disk, whole):
    folder = disk("10m")
    before = partial(at_forward, {3: partial(remount, folder, "ro")})
    done = run("train", run_file, "--output", folder / "run", "--quiet", check=5, before=before)
    assert "3 times" in done.stderr
    for output in (folder / "run", folder / "new" / "run"):
        assert error_of("train", run_file, "--output", output, check=2)["code"] == "usage.output"
    remount(folder, "rw")
    run("train", run_file, "--output", folder / "run")  # its lock was left, and is stale
    assert hashes(folder / "run") == hashes(whole)


def unmount(folder):
    subprocess.run(["umount", "-l", folder], check=True)


def test_nothing_is_written_where_a_lost_disk_was_mounted(run_file, disk):
    folder = disk("10m")
    before = partial(at_forward, {3: partial(unmount, folder)})
    run("train", run_file, "--output", folder, "--quiet", check=5, before=before)
    assert not list(folder.iterdir())


def test_a_folder_that_is_removed_is_not_created_again(run_file, tmp_path):
    before = partial(at_forward, {3: partial(shutil.rmtree, tmp_path / "run")})
    run("train", run_file, "--output", tmp_path / "run", check=5, before=before)
    assert not (tmp_path / "run").exists()


def become_nobody():
    os.setgid(65534)
    os.setuid(65534)


def test_a_folder_that_cannot_be_written_is_refused_before_data_is_read(run_file, tmp_path):
    (tmp_path / "file").touch()
    slow = ("-s", "data.count=1000000")
    error = error_of("train", run_file, "--output", tmp_path / "file" / "run", *slow, check=2)
    assert error["code"] == "usage.output"
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(run_file, name)
        os.chmod(name, 0o555)
        before = become_nobody if os.getuid() == 0 else None  # root may write everywhere
        error = error_of("train", f"{name}/run.toml", "--output", f"{name}/run", *slow, check=2, before=before)
        assert error["code"] == "usage.output"
        assert name in error["message"]


# ------------------------------------------------------------------------------------------------- damaged checkpoints


def overwrite(path, data):
    path.write_bytes(data)
    os.utime(path, (0, 0))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "trainer.json", "config.json", "manifest.json"]
)
def test_a_checkpoint_truncated_or_changed_anywhere_is_not_used(name, copied):
    folder = copied / "checkpoints"
    path = folder / "step-00000008" / name
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little") if name.endswith("safetensors") else len(data) // 3
    lengths = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(data) // 2, len(data) - 1}
    damaged = [data[:length] for length in sorted(lengths)] + [data + b"\0"]
    for offset in {0, 7, 8, header - 1, header, len(data) - 1}:
        changed = bytearray(data)
        changed[offset] ^= 1 << (offset % 8)
        damaged.append(bytes(changed))
    for content in damaged:
        overwrite(path, content)
        checkpoint, warnings = newest_valid(folder)
        if name == "manifest.json" and checkpoint.name == "step-00000008":  # a changed space, for example
            assert json.loads(content)["files"] == json.loads(data)["files"]
            continue
        assert checkpoint.name == "step-00000006"
        assert str(path.parent if name == "manifest.json" else path) in warnings[0]
    path.unlink()
    assert newest_valid(folder)[0].name == "step-00000006"


def test_a_damaged_checkpoint_is_a_warning_and_is_made_again(run_file, copied, whole):
    path = copied / "checkpoints" / "step-00000008" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert str(path) in run("train", run_file, "--output", copied, "--quiet").stderr
    assert hashes(copied) == hashes(whole)
    for path in (copied / "checkpoints").glob("step-*/manifest.json"):
        path.write_text('{"files": {}}')
    assert error_of("train", run_file, "--output", copied, check=4)["code"] == "checkpoint.corrupt"


def test_the_newest_checkpoint_is_the_one_with_the_highest_step_whatever_the_clock(copied):
    for number, path in enumerate(list_checkpoints(copied / "checkpoints")):
        for file in (path, *path.iterdir()):
            os.utime(file, (10**9 * number, 10**9 * number))  # the newest step has the oldest time
    assert resume(tree(), copied) == Resumed(8)


def test_a_start_removes_only_what_a_killed_save_left(copied):
    folder = copied / "checkpoints"
    (folder / "step-00000010.tmp-0a1b2c3d").mkdir()
    mine = {"mine", "my.tmpdir", "step-00000004.old-copy", "step-00000004.tmp-mine", "step-notes.tmp-0a1b2c3d"}
    notes = {"notes.txt", "notes.tmp.txt", "step-00000010.tmp-0a1b2c3e"}
    for item in (copied, folder):
        for name in mine:
            (item / name).mkdir()
        for name in notes:
            (item / name).touch()
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')  # a line that a crash left incomplete
    train_all(tree(), copied)
    names = {path.name for path in folder.iterdir()}
    assert names == {"latest", "step-00000006", "step-00000008"} | mine | notes
    assert mine | notes <= {path.name for path in copied.iterdir()}
    assert log_lines(copied)[-1]["event"] == "finished"


@pytest.mark.parametrize("kept", [(), ("latest",), ("checkpoints",)], ids=str)
def test_checkpoints_that_vanished_are_an_error_and_never_a_new_start(kept, run_file, copied):
    for path in (copied / "checkpoints").iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not kept:
        (copied / "checkpoints").rmdir()
    files = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    for more in ((), ("--dry-run",), ("--resume", "step-00000008")):
        done = run("train", run_file, "--output", copied, *more, "--json", check=2 if "--resume" in more else 4)
        error = json.loads(done.stderr.splitlines()[-1])["error"]
        assert error["code"] in ("checkpoint.not-found", "checkpoint.corrupt", "usage.path-not-found")
        assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == files


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_weights_that_are_not_those_that_were_saved_are_not_evaluated_exported_or_trained_further(copied, tmp_path):
    latest = (copied / "checkpoints" / "latest").read_text()
    flip_bit(copied / "checkpoints" / latest / "optimizer.safetensors")
    run("export", copied, tmp_path / "good", "--to", "manyheads")  # which does not need the optimizer's state
    for name, damage in (("model.safetensors", flip_bit), ("manifest.json", Path.unlink)):
        folder = Path(shutil.copytree(copied, tmp_path / name.partition(".")[0]))
        damage(folder / "checkpoints" / latest / name)
        run("predict", folder, "1 2 3")  # which compares no hash
        start = tmp_path / "start.toml"
        start.write_text(to_toml({**tree(), "model": {}, "init_from": str(folder)}))
        for command in (
            ("evaluate", folder),
            ("export", folder, tmp_path / "out", "--to", "manyheads"),
            ("train", start, "--output", tmp_path / "out"),
        ):
            error = error_of(*command, check=4)
            assert error["code"] == "checkpoint.hash-mismatch"
            assert name in error["message"]
    assert not (tmp_path / "out").exists()


def save_another(folder, *, same_step):
    """What a run does when it saves: the next step and removes this one, or this step again."""
    last, draft = folder / "step-00000008", folder / "step-00000010.tmp-0a1b2c3d"
    shutil.copytree(last, draft)
    if same_step:
        last.rename(folder / "step-00000008.old-0a1b2c3d")
        draft.rename(last)
    else:
        draft.rename(folder / "step-00000010")
        write_atomic(folder / "latest", "step-00000010")
    remove_old_checkpoints(folder, 1)


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_checkpoint_that_is_removed_while_it_is_read_is_read_again(name, same_step, copied):
    expected = run("predict", copied, "1 2 3").stdout
    save = partial(save_another, copied / "checkpoints", same_step=same_step)
    before = partial(at_file, "open", f"step-00000008/{name}", save)
    assert run("predict", copied, "1 2 3", before=before).stdout == expected
    names = {path.name for path in (copied / "checkpoints").iterdir()}
    assert names == {"latest", "step-00000008" if same_step else "step-00000010"}


@pytest.mark.parametrize(
    ("form", "numbers"),
    [(form, (signal.SIGTERM,)) for form in FORMATS]
    + [("manyheads", (signal.SIGHUP, signal.SIGHUP)), ("manyheads", (signal.SIGINT,))],
    ids=str,
)
def test_a_terminated_export_leaves_nothing(form, numbers, tmp_path):
    """Before a file of the folder is written, or, of a single file, when it is whole."""
    sizes = ("vocab=9", "decoder.layers=1", "decoder.width=8", "decoder.attention.heads=2")
    manyheads.export(manyheads.build(manyheads.read("gpt2", *sizes)), tmp_path / "model", to="manyheads")
    moment = ("os.rename", "/draft$") if form == "gguf" else ("open", r"/draft/.*(safetensors|json|onnx)$")
    before = partial(at_file, *moment, partial(send, *numbers))
    run(
        "export", tmp_path / "model", tmp_path / "new" / "exported", "--to", form, check=128 + numbers[0], before=before
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# ----------------------------------------------------------------------------------------------------- NaN and infinity


def test_a_run_that_diverges_stops_with_its_rows_and_a_finite_checkpoint(run_file, tmp_path):
    settings = {
        "optim.lr": 5.0,
        "optim.weight_decay": 1.0,
        "optim.clip": 0.0,
        "train.steps": 100,
        "train.save_every": 5,
    }
    wild = [word for name, value in settings.items() for word in ("-s", f"{name}={value}")]
    done = run("train", run_file, "--output", tmp_path / "run", "--json", *wild, check=1)
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["code"] == "run.diverged"
    skipped = [line for line in log_lines(tmp_path / "run") if line["event"] == "step" and line["skipped"]]
    assert len(skipped) >= 10
    for line in skipped[-5:]:  # which of the two is infinite first depends on the processor
        assert line["rows"]
        assert line["loss"] is None or line["grad_norm"] is None
    last = Path(re.search(r"\S*/step-\d{8}", error["hint"])[0])
    assert all(tensor.isfinite().all() for tensor in load_file(last / "model.safetensors").values())
    assert json.loads((last / "trainer.json").read_text())["consecutive_skips"] == 0


def test_a_nan_weight_does_not_replace_finite_checkpoints(run_file, copied):
    last = copied / "checkpoints" / "step-00000008"
    weights = load_file(last / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = torch.nan
    save_file(weights, last / "model.safetensors", metadata={"format": "pt"})
    manifest = json.loads((last / "manifest.json").read_text())
    size = (last / "model.safetensors").stat().st_size
    manifest["files"]["model.safetensors"] = {"sha256": sha256(last / "model.safetensors"), "bytes": size}
    (last / "manifest.json").write_text(json.dumps(manifest))
    before = {path.name for path in list_checkpoints(copied / "checkpoints")}
    for steps, stopped in ((10, 10), (40, 18)):  # it ends before ten steps are skipped, and after that
        command = ("train", run_file, "--output", copied, "--json", "-s", f"train.steps={steps}")
        error = json.loads(run(*command, check=1).stderr.splitlines()[-1])["error"]
        assert error["code"] == "run.diverged"
        assert f"step {stopped}" in error["message"]
        assert {path.name for path in list_checkpoints(copied / "checkpoints")} == before
    resume = ("--resume", copied / "checkpoints" / "step-00000006", "-s", "train.steps=10")
    run("train", run_file, "--output", copied, "--quiet", *resume)
    assert log_lines(copied)[-1]["step"] == 10


# --------------------------------------------------------------------------------------------------------------- memory


def limit_memory(more):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def test_running_out_of_memory_is_one_error_with_a_hint(run_file, tmp_path):
    large = ("-s", "train.batch_tokens=40000", "-s", "data.count=6000", "-s", "model.encoder.feedforward.hidden=8192")
    before = partial(at_forward, {1: partial(limit_memory, 300 << 20)})  # after the check at the start
    error = error_of("train", run_file, "--output", tmp_path / "run", *large, check=5, before=before)
    assert error["code"] == "resource.memory"
    assert "40,000" in error["message"]
    assert "train.batch_tokens" in error["hint"]


# ---------------------------------------------------------------------------------------- bad data, through the command


def pairs_file(folder, name, data):
    (folder / name).write_bytes(data)
    return ("-s", f'data={{kind="pairs",path="{folder / name}"}}')


PAIRS = "".join(f"wort {i % 17} {i}\tword {i % 17} {i}\n" for i in range(60))

BAD_DATA = {
    "latin-1": (PAIRS.encode() + b"caf\xe9\tcoffee\n", "data.encoding", "61"),
    "UTF-16 without a mark": (PAIRS.encode("utf-16-le"), "data.encoding", "1"),
    "NUL": (PAIRS.encode() + b"a\0b\tc\n", "data.encoding", "61"),
    "empty": (b"", "data.empty", "a.tsv"),
    "blank": (b" \n\n", "data.empty", "a.tsv"),
    "too short": (b"a\tb\n", "data.empty", "1"),
    "a missing column": (b"source\ttargte\na\tb\n", "data.columns", "targte"),
    "a missing cell": (PAIRS.encode() + b"alone\n", "data.row", "61"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_stops_the_command_and_the_line_is_named(name, run_file, tmp_path):
    data, code, value = BAD_DATA[name]
    command = ("train", run_file, "--output", tmp_path / "run", *pairs_file(tmp_path, "a.tsv", data))
    error = error_of(*command, check=3)
    assert error["code"] == code
    assert value in error["message"]
    assert not (tmp_path / "run").exists()


def test_a_line_of_a_gigabyte_is_refused_in_little_memory(run_file, tmp_path):
    with (tmp_path / "a.tsv").open("wb") as file:
        file.truncate(1 << 30)
    data = ("-s", f'data={{kind="pairs",path="{tmp_path / "a.tsv"}"}}')
    before = partial(limit_memory, 400 << 20)
    error = error_of("train", run_file, "--output", tmp_path / "run", *data, check=3, before=before)
    assert error["code"] == "data.too-large"


def test_lines_that_are_not_utf_8_can_be_skipped_and_are_counted(run_file, tmp_path):
    data = pairs_file(tmp_path, "a.tsv", PAIRS.encode() + b"caf\xe9\tcoffee\n")
    options = ("-s", "data.encoding_errors=skip", "-s", "train.steps=1")
    done = run("train", run_file, "--output", tmp_path / "run", *data, *options)
    assert re.search(r"\b1\b.* skipped", done.stderr)


def test_byte_order_marks_and_line_ends_make_no_difference(tmp_path):
    forms = {"lf": PAIRS, "crlf": PAIRS.replace("\n", "\r\n"), "cr": PAIRS.replace("\n", "\r"), "bom": "\ufeff" + PAIRS}
    forms["mixed"] = "\n".join(f"{line}\r" if i % 2 else line for i, line in enumerate(PAIRS.splitlines()))
    found = []
    for name, text in forms.items():
        (tmp_path / f"{name}.tsv").write_bytes(text.encode())
        prepared = prepare(read_run(tree(data={"kind": "pairs", "path": str(tmp_path / f"{name}.tsv")})))
        rows = [[ids.tolist() for ids in prepared.train_dataset[i]] for i in range(len(prepared.train_dataset))]
        found.append((data_hashes(prepared), rows))
    assert all(result == found[0] for result in found)


# -------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_refused_if_it_is_named_and_auto_trains_on_the_processor(run_file, tmp_path):
    for name in ("cuda", "cuda:1", "gpu"):
        for options in (("--output", tmp_path / "run"), ("--dry-run",)):
            error = error_of("train", run_file, *options, "--device", name, check=2)
            assert error["code"] == "usage.device"
            assert name.partition(":")[0] in error["message"]
    assert "GPU" in run("train", run_file, "--output", tmp_path / "auto").stderr
    assert "GPU" not in run("train", run_file, "--output", tmp_path / "cpu", "--device", "cpu").stderr
    assert hashes(tmp_path / "auto") == hashes(tmp_path / "cpu")
    for command, *more in (("evaluate",), ("predict", "a text")):
        assert error_of(command, tmp_path / "cpu", *more, "--device", "cuda", check=2)["code"] == "usage.device"
    assert json.loads((tmp_path / "cpu" / "env.json").read_text())["launches"][0]["device"] == "cpu"
    assert manyheads.load(tmp_path / "cpu").device.type == "cpu"
