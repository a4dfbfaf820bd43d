"""Runs under faults: full disks, lost folders, signals at every moment, spoiled checkpoints, files with faults. Real ones."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import pty
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from fcntl import ioctl
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from command import FORKS, child, run
from safetensors.torch import load_file, save_file
from small_runs import OBJECTIVES, described, in_a_process

import manyheads
from manyheads import training
from manyheads.data.prepared import prepare, sha256
from manyheads.spec import SLOTS, SpecError, read_toml, to_toml, to_tree
from manyheads.train import checkpoint, folder, loop, stream
from manyheads.train import run as runs
from manyheads.train.events import Changed, Ended, Resumed, Stepped, Warned
from manyheads.train.folder import ChangedRunError, contents, differences, flat, within, write_down
from manyheads.train.lock import begun as began
from manyheads.train.lock import in_use, locked
from manyheads.train.log import Log
from manyheads.train.loop import train
from manyheads.train.run import SAFE, made_ready, read_run, read_run_file
from manyheads.train.state import State

USUAL = {"steps": 8, "save_every": 2, "evaluate_every": 4, "accumulate": 1}
FEW = {"kind": "sequence", "task": "reverse", "count": 120, "held_out": 20}  # soon made


def tree(**changed):
    return described("seq2seq", **USUAL) | {"data": FEW} | changed


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(tree()))
    return path


def bits(place):
    last = place / "checkpoints" / (place / "checkpoints" / "latest").read_text()
    return {name: sha256(last / name) for name in ("model.safetensors", "optimizer.safetensors", "trainer.json")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bits of a run that nothing happened to."""
    place = tmp_path_factory.mktemp("whole") / "run"
    assert list(train(made_ready(read_run(tree())), place))[-1] == Ended(8, "steps")
    return place


def told(place):
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]


def refused(*arguments, code, **options):
    """One sentence on standard error, nothing on standard output."""
    done = run(*arguments, check=code, **options)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


# --- signals at every moment: sent by the process to itself, so that the moment is certain ---


def at(moment, *numbers):
    """Makes a moment of a run send signals."""
    seen = []

    def here(name):
        seen.append(name)
        if seen.count(moment) == 1 and name == moment:
            for number in numbers:
                os.kill(os.getpid(), number)

    sound, following, made = stream.Order.batch, stream.Stream.next, runs.sized
    checkpoint.PHASE = here
    stream.Order.batch = lambda order, index: (order.rows is order.ready.unseen and here("look")) or sound(order, index)
    stream.Stream.next = lambda stream: here("first step") or following(stream)
    runs.sized = lambda *given: here("preparation") or made(*given)


CODES = {signal.SIGTERM: (75, 143), signal.SIGINT: (130, 130)}
MOMENTS = {"preparation": 0, "first step": 1, "look": 4, "weights": 2, "latest": 2}  # and the step that is kept then


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_finishes_the_step_and_saves(moment, run_file, tmp_path, whole):
    place, number = tmp_path / "run", (signal.SIGTERM, signal.SIGINT)[len(moment) % 2]
    run("train", run_file, "--output", place, check=CODES[number][0], before=partial(at, moment, number))
    if moment == "preparation":
        assert not place.exists()
        return
    last = told(place)[-1]
    assert (last["event"], last["step"]) == ("ended", MOMENTS[moment])
    assert checkpoint.unsound(place / "checkpoints" / f"step-{last['step']:08}") is None
    assert not (place / "lock.json").exists()
    assert moment != "look" or not [line for line in told(place) if line["event"] == "evaluated"]  # it was not waited for
    run("train", run_file, "--output", place)
    assert bits(place) == bits(whole)
    assert [line["step"] for line in told(place) if line["event"] == "evaluated"] == [4, 8]


def test_a_second_signal_leaves_at_once_with_nothing_half_written(run_file, tmp_path, whole):
    place = tmp_path / "run"
    run("train", run_file, "--output", place, check=75, before=partial(at, "look", signal.SIGTERM))  # made again by the next, which dies
    for number, moment in (
        (signal.SIGTERM, "manifest"),
        (signal.SIGINT, "look"),
        (signal.SIGINT, "renamed"),
        (signal.SIGTERM, "first step"),
    ):
        run("train", run_file, "--output", place, check=CODES[number][1], before=partial(at, moment, number, number))
        assert not (place / "lock.json").exists()
        assert not list(place.rglob("*.tmp*"))
    run("train", run_file, "--output", place)
    assert bits(place) == bits(whole)
    assert [line["step"] for line in told(place) if line["event"] == "evaluated"] == [4, 8]


def signalled(number):
    os.kill(os.getpid(), number)


def test_signals_at_random_steps_change_no_bit(run_file, tmp_path, whole):
    place, chance, step = tmp_path / "run", Random(3), 0
    for _ in range(3):
        number, more = chance.choice([signal.SIGTERM, signal.SIGINT]), chance.randint(1, 2)
        step += more
        run("train", run_file, "--output", place, check=CODES[number][0], before=partial(when, {more: partial(signalled, number)}))
        assert (told(place)[-1]["event"], told(place)[-1]["step"]) == ("ended", step)
        assert not (place / "lock.json").exists()
    run("train", run_file, "--output", place)
    assert bits(place) == bits(whole)


def started(*arguments, err, before=None):
    err.touch()
    process = FORKS.Process(target=child, args=([*map(str, arguments)], os.devnull, os.devnull, err, os.getcwd(), dict(os.environ), before))
    process.start()
    return process


def test_ctrl_c_at_a_terminal(run_file, tmp_path):
    """A real terminal: a bar that moves, Ctrl-C typed once."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "manyheads", "train", run_file, "--output", tmp_path / "run", "-s", "train.steps=100000"]
    process = subprocess.Popen(
        [*map(str, command)], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0), env=os.environ | {"TERM": "xterm", "NO_COLOR": "1"},  # noqa: PLW1509
    )  # fmt: skip
    os.close(slave)
    said, typed, deadline = b"", False, time.monotonic() + 100
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 1)[0]:
            continue
        try:
            said += os.read(master, 4096)
        except OSError:  # it is gone
            break
        if not typed and b"loss" in said:
            os.write(master, b"\x03")
            typed = True
    os.close(master)
    assert process.wait(60) == 130, said.decode()
    assert b"left" in said
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]m", said)  # NO_COLOR
    assert told(tmp_path / "run")[-1]["reason"] == "interrupted"


# --- a disk that is full, read-only or gone ---


@pytest.fixture
def disk(tmp_path):
    """A small disk of its own, really mounted."""
    place, mounted = tmp_path / "disk", []
    place.mkdir()

    def mount(size):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"NO REAL DISK WAS FILLED: this machine does not let us mount one ({done.stderr.strip()})")
        mounted.append(place)
        return place

    yield mount
    for one in mounted:
        subprocess.run(["umount", "-l", one], capture_output=True)


def fill(place):
    with (place / "ballast").open("wb", buffering=0) as file:
        try:
            while file.write(b"0" * 4096):
                pass
        except OSError:
            pass


def when(happenings):
    """Makes things happen before the batches of some steps."""
    sound, count = stream.Stream.next, []

    def following(stream):
        count.append(1)
        happenings.get(len(count), lambda: None)()
        return sound(stream)

    stream.Stream.next = following


def size(place):
    return sum(path.stat().st_size for path in (place / "checkpoints" / "step-00000008").iterdir())


def test_a_full_disk_costs_neither_the_run_nor_a_line(run_file, disk, whole):
    place = disk(f"{8 * size(whole) // 1024}k")
    before = partial(when, {3: partial(fill, place), 7: partial(os.unlink, place / "ballast")})
    done = run("train", run_file, "--output", place / "run", before=before)
    assert [(line["step"], line["times"]) for line in told(place / "run") if line["event"] == "savefailed"] == [(4, 1), (6, 2)]
    assert [line["step"] for line in told(place / "run") if line["event"] == "stepped"] == list(range(1, 9))
    assert "the checkpoints before are untouched" in done.stderr
    assert bits(place / "run") == bits(whole)


def test_a_disk_that_stays_full_ends_the_run_with_what_it_had(run_file, disk, whole):
    place = disk(f"{8 * size(whole) // 1024}k")
    done = run("train", run_file, "--output", place / "run", "--quiet", check=5, before=partial(when, {3: partial(fill, place)}))
    assert "(3 times in a row); what was learned after step 2 is lost" in done.stderr.splitlines()[-1]
    assert checkpoint.unsound(place / "run" / "checkpoints" / "step-00000002") is None
    assert not list(place.rglob("*.tmp*"))
    assert "on the disk and" in refused("train", run_file, "--output", place / "other", "--quiet", code=5)
    assert not (place / "other" / "lock.json").exists()
    (place / "ballast").unlink()
    run("train", run_file, "--output", place / "run")
    assert bits(place / "run") == bits(whole)


def test_too_little_room_is_said_at_the_start(run_file, disk, whole):
    place = disk(f"{21 * size(whole) // 10 // 1024}k")
    done = run("train", run_file, "--output", place / "run", check=5)
    assert "more checkpoints, and a run needs two at the least" in done.stderr
    assert "bytes are free, and a checkpoint takes" in done.stderr
    assert checkpoint.unsound(place / "run" / "checkpoints" / "step-00000002") is None
    fill(place)
    assert "on the disk and" in refused("train", run_file, "--output", place / "run", "--quiet", code=5)


def test_lines_that_cannot_be_written_are_written_later(tmp_path):
    log = Log(Path("/dev/full"))
    assert "cannot write /dev/full: No space left on device; training goes on" in log.add(
        {"event": "stepped", "step": 1, "loss": float("nan")}
    )
    assert log.add({"event": "stepped", "step": 2}) is None  # it was said
    log.path = tmp_path / "metrics.jsonl"
    assert log.add({"event": "stepped", "step": 3}) is None
    assert [line["step"] for line in told(tmp_path)] == [1, 2, 3]
    assert told(tmp_path)[0]["loss"] is None
    log.path.unlink()
    assert "No such file" in log.add({"event": "stepped", "step": 4})  # what was taken away is not made anew
    assert not log.path.exists()


def limit_files(most):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def test_a_file_that_may_not_grow_is_a_full_disk(run_file, tmp_path, whole):
    done = run("train", run_file, "--output", tmp_path / "run", "--quiet", check=5, before=partial(limit_files, 20_000))
    assert "File too large" in done.stderr
    assert not checkpoint.steps(tmp_path / "run" / "checkpoints")
    run("train", run_file, "--output", tmp_path / "run")
    assert bits(tmp_path / "run") == bits(whole)


def remount(place, how):
    subprocess.run(["mount", "-o", f"remount,{how}", place], check=True)


def test_a_disk_that_becomes_read_only(run_file, disk, whole):
    place = disk("10m")
    done = run("train", run_file, "--output", place / "run", "--quiet", check=5, before=partial(when, {3: partial(remount, place, "ro")}))
    assert "Read-only file system (3 times in a row)" in done.stderr
    assert "Read-only file system" in refused("train", run_file, "--output", place / "run", code=2)
    assert "Read-only file system" in refused("train", run_file, "--output", place / "new" / "run", code=2)
    remount(place, "rw")
    run("train", run_file, "--output", place / "run")  # its lock was left, and is stale
    assert bits(place / "run") == bits(whole)


def unmount(place):
    subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_that_goes_away_is_not_written_to_where_it_was(run_file, disk):
    place = disk("10m")
    done = run("train", run_file, "--output", place, "--quiet", check=5, before=partial(when, {3: partial(unmount, place)}))
    assert "the run's folder is gone" in done.stderr
    assert not list(place.iterdir())


def test_a_folder_that_is_removed_is_not_made_again(run_file, tmp_path):
    done = run(
        "train", run_file, "--output", tmp_path / "run", check=5, before=partial(when, {3: partial(shutil.rmtree, tmp_path / "run")})
    )
    assert "the run's folder is gone" in done.stderr
    assert not (tmp_path / "run").exists()


def as_nobody():
    os.setgid(65534)
    os.setuid(65534)


def test_a_folder_that_may_not_be_written_is_found_before_anything_is_made_ready(run_file, tmp_path):
    (tmp_path / "file").touch()
    slow = ("-s", "data.count=1000000")
    assert "Not a directory" in refused("train", run_file, "--output", tmp_path / "file" / "run", *slow, code=2)
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(run_file, name)
        os.chmod(name, 0o555)
        before = as_nobody if os.getuid() == 0 else None  # root may write everywhere
        said = refused("train", f"{name}/run.toml", "--output", f"{name}/run", *slow, code=2, before=before)
        assert f"cannot write {name}: Permission denied" in said


# --- spoiled checkpoints, and which is the newest ---


def spoil(path, data):
    path.write_bytes(data)
    os.utime(path, (0, 0))


@pytest.fixture
def copied(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copied"))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer.json", "config.json", "manifest.json"])
def test_a_checkpoint_cut_or_changed_anywhere_is_passed_over(name, copied):
    places = copied / "checkpoints"
    path = places / "step-00000008" / name
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little") if name.endswith("safetensors") else len(data) // 3
    cuts = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(data) // 2, len(data) - 1}
    spoiled = [data[:cut] for cut in sorted(cuts)] + [data + b"\0"]
    for place in {0, 7, 8, header - 1, header, len(data) - 1}:
        changed = bytearray(data)
        changed[place] ^= 1 << (place % 8)
        spoiled.append(bytes(changed))
    for content in spoiled:
        spoil(path, content)
        found, wrong = checkpoint.newest(places)
        if name == "manifest.json" and found.name == "step-00000008":  # a space, say: it lists the same
            assert json.loads(content)["files"] == json.loads(data)["files"]
            continue
        assert found.name == "step-00000006"
        assert str(path.parent if name == "manifest.json" else path) in wrong[0]
    path.unlink()
    assert checkpoint.newest(places)[0].name == "step-00000006"


def test_a_spoiled_checkpoint_is_passed_over_loudly_and_made_again(run_file, copied, whole):
    last = copied / "checkpoints" / "step-00000008"
    data = bytearray((last / "optimizer.safetensors").read_bytes())
    data[len(data) // 2] ^= 4
    (last / "optimizer.safetensors").write_bytes(data)
    done = run("train", run_file, "--output", copied, "--quiet")
    assert f"passed over: {last}/optimizer.safetensors is not what was written" in done.stderr
    assert bits(copied) == bits(whole)
    for path in (copied / "checkpoints").glob("step-*/manifest.json"):
        path.write_text('{"files": {}}')
    assert "no checkpoint of this run is sound" in refused("train", run_file, "--output", copied, "--quiet", code=4)


def test_steps_tell_which_is_newest_whatever_the_clock_said(copied):
    for number, path in enumerate(checkpoint.steps(copied / "checkpoints")):
        for file in (path, *path.iterdir()):
            os.utime(file, (10**9 * number, 10**9 * number))  # the newest is the oldest
    (event, *_) = train(made_ready(read_run(tree())), copied)
    assert event == Resumed(8, ())


def test_only_what_is_dead_is_removed_at_the_start(copied):
    places = copied / "checkpoints"
    (places / "step-00000010.tmp-0a1b2c3d").mkdir()
    (places / "latest.tmp").touch()
    (places / "mine").mkdir()
    (places / "notes.txt").touch()
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"event": "stepped", "st')  # cut short by a crash
    list(train(made_ready(read_run(tree())), copied))
    names = {path.name for path in places.iterdir()}
    assert names == {"latest", "mine", "notes.txt", "step-00000006", "step-00000008"}
    assert told(copied)[-1]["event"] == "ended"


# --- losses and weights that are NaN or infinite ---


def test_a_run_that_diverges_stops_names_its_rows_and_leaves_what_was_good(run_file, tmp_path):
    wild = ("-s", "optim.rate=5.0", "-s", "optim.decay=1.0", "-s", "optim.clip=0.0", "-s", "train.steps=100", "-s", "train.save_every=5")
    done = run("train", run_file, "--output", tmp_path / "run", "--quiet", *wild, check=1)
    assert "10 updates in a row were NaN or infinite" in done.stderr
    skipped = [line for line in told(tmp_path / "run") if line["event"] == "stepped" and line["skipped"]]
    assert len(skipped) >= 10
    assert all(line["rows"] and line["loss"] is None for line in skipped[-5:])
    last = re.search(r"the last good checkpoint is (\S+)", done.stderr)[1]
    assert all(tensor.isfinite().all() for tensor in load_file(f"{last}/model.safetensors").values())
    assert json.loads((Path(last) / "trainer.json").read_text())["skipped"] == 0


def test_a_poisoned_weight_does_not_push_sound_checkpoints_out(run_file, copied):
    last = copied / "checkpoints" / "step-00000008"
    weights = load_file(last / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = torch.nan
    save_file(weights, last / "model.safetensors", metadata={"format": "pt"})
    manifest = json.loads((last / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] |= {
        "sha256": sha256(last / "model.safetensors"),
        "bytes": (last / "model.safetensors").stat().st_size,
    }
    (last / "manifest.json").write_text(json.dumps(manifest))
    before = {path.name for path in checkpoint.steps(copied / "checkpoints")}
    done = run("train", run_file, "--output", copied, "--quiet", "-s", "train.steps=10", check=1)  # it ends before ten are left out
    assert "the weights at step 10 are NaN or infinite; what stands is of step 8" in done.stderr
    done = run("train", run_file, "--output", copied, "--quiet", "-s", "train.steps=40", check=1)
    assert "10 updates in a row were NaN or infinite (the last at step 18)" in done.stderr
    assert {path.name for path in checkpoint.steps(copied / "checkpoints")} == before
    run("train", run_file, "--output", copied, "--quiet", "--resume", copied / "checkpoints" / "step-00000006", "-s", "train.steps=10")
    assert told(copied)[-1]["step"] == 10


# --- memory ---


def unforeseen(more):
    """A limit that comes up only when the run is on its way."""
    training.check_room = lambda needs: None
    limit_memory(more)


def limit_memory(more):
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


def test_too_little_memory_is_one_sentence_with_advice(run_file, tmp_path):
    large = ("-s", "train.tokens=40000", "-s", "data.count=6000", "-s", "model.encoder.feedforward.hidden=8192")
    done = run("train", run_file, "--output", tmp_path / "run", "--quiet", *large, check=5, before=partial(unforeseen, 300 << 20))
    assert done.stderr.count("\n") == 1
    assert "the memory is not enough for batches of 40,000 tokens: lower train.tokens" in done.stderr


# --- data with faults, through the command ---


def words(folder, name, data):
    (folder / name).write_bytes(data)
    return ("-s", f'data={{kind="pairs",path="{folder / name}"}}')


PAIRS = "".join(f"wort {i % 17} {i}\tword {i % 17} {i}\n" for i in range(60))

FAULTY = {
    "latin-1": (PAIRS.encode() + b"caf\xe9\tcoffee\n", r"line 61 is not UTF-8 \(0xe9\) at byte [\d,]+"),
    "UTF-16": (PAIRS.encode("utf-16"), "line 1 is not UTF-8"),
    "NUL": (PAIRS.encode() + b"a\0b\tc\n", "line 61 holds a NUL at byte"),
    "empty": (b"", "holds no pairs: it is empty or blank"),
    "blank": (b" \n\n \t \n"[:3], "holds no pairs: it is empty or blank"),
    "too short": (b"a\tb\n", "too few to hold one out"),
    "a column missing": (b"source\ttargte\na\tb\n", "no column 'target': did you mean 'targte'"),
    "a cell missing": (PAIRS.encode() + b"alone\n", "line 61 has 1 columns, expected at least 2"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_data_with_a_fault_stops_the_command_with_its_place(name, run_file, tmp_path):
    data, said = FAULTY[name]
    assert re.search(said, refused("train", run_file, "--output", tmp_path / "run", *words(tmp_path, "a.tsv", data), code=3))
    assert not (tmp_path / "run").exists()


def test_a_line_of_a_gigabyte_is_refused_in_little_memory(run_file, tmp_path):
    with (tmp_path / "a.tsv").open("wb") as file:
        file.truncate(1 << 30)
    given = ("-s", f'data={{kind="pairs",path="{tmp_path / "a.tsv"}"}}')
    said = refused("train", run_file, "--output", tmp_path / "run", *given, code=3, before=partial(limit_memory, 400 << 20))
    assert "line 1 is longer than 16,777,216 characters" in said


def test_faulty_lines_that_may_be_left_out_are_counted(run_file, tmp_path):
    given = words(tmp_path, "a.tsv", PAIRS.encode() + b"caf\xe9\tcoffee\n")
    done = run("train", run_file, "--output", tmp_path / "run", *given, "-s", "data.encoding_errors=skip", "-s", "train.steps=1")
    assert "1 lines skipped that were not UTF-8" in done.stderr


def test_marks_and_line_ends_make_no_difference(tmp_path):
    forms = {"lf": PAIRS, "crlf": PAIRS.replace("\n", "\r\n"), "cr": PAIRS.replace("\n", "\r"), "mark": "\ufeff" + PAIRS}
    forms["mixed"] = "\n".join(f"{line}\r" if i % 2 else line for i, line in enumerate(PAIRS.splitlines()))
    found = []
    for name, text in forms.items():
        (tmp_path / f"{name}.tsv").write_bytes(text.encode())
        ready = made_ready(read_run(tree(data={"kind": "pairs", "path": str(tmp_path / f"{name}.tsv")})))
        found.append((contents(ready), [[ids.tolist() for ids in ready.rows[i]] for i in range(len(ready.rows))]))
    assert all(one == found[0] for one in found)


def test_a_vocabulary_that_does_not_fit_is_refused_before_anything_runs(run_file, tmp_path):
    count = made_ready(read_run(tree())).tokens.count
    for vocab, code in ((count - 1, 2), (count, 0)):
        done = run("train", run_file, "--output", tmp_path / str(vocab), "-s", f"model.vocab={vocab}", "-s", "train.steps=1", check=code)
        assert code == 0 or f"model.vocab: is {vocab}, and the tokenizer has {count} tokens" in done.stderr
    tokenizer = made_ready(read_run(tree())).tokenizer
    data = json.loads(tokenizer.to_str())
    words = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    data["model"]["vocab"][words[-1]] += 7  # a gap, so there are ids beyond the number of tokens
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    given = ("-s", f'tokenizer={{kind="file",path="{tmp_path / "tokenizer.json"}"}}')
    said = refused("train", run_file, "--output", tmp_path / "gap", *given, "-s", f"model.vocab={count}", code=2)
    assert f"the tokenizer has {count + 7} tokens" in said
    run("train", run_file, "--output", tmp_path / "gap", *given, "-s", "train.steps=1")


# --- run files and their keys ---


def lines_with_keys(text):
    """Every line of a file that names something, with the names."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in re.finditer(r"(?<![\w\".])([a-z_]+)(?= = |\])" if not line.startswith("[") else r"([a-z_]+)(?=\])", line):
            yield number, found.start(1), found.end(1)


WHOLE_FILE = """seed = 5
[model]
vocab = "tokenizer"
init = "xavier"
[model.encoder]
layers = 1
width = 16
attention = { kind = "heads", heads = 2 }
feedforward = { kind = "mlp", hidden = 32, activation = "relu" }
position = "sinusoidal"
residual = { kind = "pre", dropout = 0.1 }
pattern = [
  { mask = { window = 4 } },
]

# what it writes
[model.decoder]
like = "encoder"
embed = "shared"
cross = true
[data]
kind = "sequence"
task = "reverse"
count = 400
[tokenizer]
kind = "words"
lower = true
[objective]
kind = "seq2seq"
smoothing = 0.1
[optim]
rate = 0.001
[optim.schedule]
kind = "cosine"
warmup = 2
[train]
steps = 4
goal = { metric = "loss", reach = 0.5, patience = 3 }
"""


def test_every_key_misspelt_once_is_named_with_its_line_and_the_nearest(tmp_path):
    path, count = tmp_path / "run.toml", 0
    path.write_text(WHOLE_FILE)
    read_run_file(path)
    lines = WHOLE_FILE.splitlines()
    for number, start, end in lines_with_keys(WHOLE_FILE):
        line = lines[number - 1]
        name = line[start:end]
        wrong = name[:-1] + "q" + name[-1]
        path.write_text("\n".join([*lines[: number - 1], f"{line[:start]}{wrong}{line[end:]}", *lines[number:]]))
        with pytest.raises(SpecError) as found:
            read_run_file(path)
        said = str(found.value)
        begins = next(n for n in range(number, 0, -1) if not lines[n - 1].startswith(" ")) if line.startswith(" ") else number
        assert f"{path}:{begins}: " in said, (wrong, said)
        assert f"no field '{wrong}' here: did you mean '{name}'?" in said, said
        count += 1
    assert count > 35


def test_a_wrong_value_comes_with_its_line_or_with_who_changed_it(run_file, tmp_path):
    at = lambda begin: next(i for i, line in enumerate(WHOLE_FILE.splitlines(), 1) if line.startswith(begin))  # noqa: E731
    for change, said in (
        (("steps = 4", "steps = 0"), f"{run_file}:{at('steps')}: train.steps: given 0, expected at least 1"),
        (('kind = "cosine"', 'kind = "cosinus"'), f"{run_file}:{at('[optim.schedule]')}: optim.schedule: no kind 'cosinus' of schedule"),
    ):
        run_file.write_text(WHOLE_FILE.replace(*change))
        assert said in refused("train", run_file, "--output", tmp_path / "run", code=2)
    run_file.write_text(WHOLE_FILE)
    said = refused("train", run_file, "--output", tmp_path / "run", "-s", "train.steps=0", code=2)
    assert "manyheads: -s train.steps=0: train.steps: given 0, expected at least 1" in said


# --- devices ---


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(run_file, tmp_path):
    for name, said in (("cuda", "there is no cuda here"), ("cuda:1", "there is no cuda here"), ("gpu", "expected cpu, cuda")):
        assert said in refused("train", run_file, "--output", tmp_path / "run", "--device", name, code=2)
        assert said in refused("train", run_file, "--dry-run", "--device", name, code=2)
    done = run("train", run_file, "--output", tmp_path / "auto")
    assert len(re.findall("no GPU here", done.stderr)) == 1
    assert "no GPU" not in run("train", run_file, "--output", tmp_path / "cpu", "--device", "cpu").stderr
    assert bits(tmp_path / "auto") == bits(tmp_path / "cpu")
    for verb, *more in (("evaluate",), ("predict", "a text")):
        assert "there is no cuda here" in refused(verb, tmp_path / "cpu", *more, "--device", "cuda", code=2)
    assert json.loads((tmp_path / "cpu" / "env.json").read_text())["starts"][0]["device"] == "cpu"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_goes_to_a_device_with_all_it_holds(name):
    flow = stream.Stream(made_ready(read_run(described(name))))
    moved = flow.next().to(torch.device("meta"))
    held = [moved.wanted, *(value for one in (moved.inputs, moved.source) if one is not None for value in vars(one).values())]
    assert {value.device.type for value in held if isinstance(value, torch.Tensor)} == {"meta"}


# --- going on with what was changed ---


def begun(ready, folder, overridden=()):
    """As a start does, but for the model."""
    data = contents(ready)
    found = differences(ready, data, folder, overridden)
    write_down(ready, data, folder, torch.device("cpu"))
    return found


def test_every_field_changed_once_is_refused_unless_it_is_safe_or_named(copied, monkeypatch):
    monkeypatch.setattr(folder, "commit", lambda: None)  # asking git so often takes long
    ready = made_ready(read_run(tree()))
    path, run_tree = copied / "run.toml", to_tree(ready.run)
    before = path.read_text()
    leaves = flat(run_tree)
    assert len(leaves) > 60
    for field, value in leaves.items():
        other = (
            not value
            if isinstance(value, bool)
            else value + 1
            if isinstance(value, int | float)
            else f"{value}x"
            if isinstance(value, str)
            else [9]
        )
        old = read_toml(path)
        *tables, name = field.split(".")
        inner = old
        for table in tables:
            inner = inner[table]
        inner[name] = other
        path.write_text(to_toml(old))
        if within(field, SAFE):
            found = begun(ready, copied)
        else:
            with pytest.raises(ChangedRunError, match=re.escape(f"{field} was ")) as error:
                begun(ready, copied)
            assert field in [one.field for one in error.value.changes]
            if field == "optim.kind":
                with pytest.raises(ValueError, match="no optimiser goes on with the memory of another"):
                    begun(ready, copied, [field])
                path.write_text(before)
                continue
            found = begun(ready, copied, [one.field for one in error.value.changes])
        assert field in [one.field for one in found]
        assert path.read_text() == before  # and is now what is asked for


def test_a_changed_run_is_shown_as_a_table_and_goes_on_when_told(run_file, copied):
    change = ("-s", "optim.rate=0.001", "-s", "train.steps=10", "-s", "objective.smoothing=0.2")
    done = run("train", run_file, "--output", copied, *change, check=2)
    *table, sentence = done.stderr.splitlines()
    rows = [line.split() for line in table[-3:]]
    assert rows == [["field", "was", "is"], ["objective.smoothing", "0.1", "0.2"], ["optim.rate", "0.003", "0.001"]]
    assert "holds another run: objective.smoothing was 0.1 and is 0.2; optim.rate was 0.003 and is 0.001" in sentence
    done = run("train", run_file, "--output", copied, *change, "--override-resume", "optim.rate", check=2)
    assert "optim.rate" not in done.stderr.splitlines()[-1]
    allowed = ("--override-resume", "optim.rate", "--override-resume", "objective")
    done = run("train", run_file, "--output", copied, *change, *allowed)
    assert ["train.steps", "8", "10"] in [line.split() for line in done.stderr.splitlines()]
    assert told(copied)[-1]["step"] == 10
    run("train", run_file, "--output", copied, *change, *allowed)  # the same again
    wrong = run("train", run_file, "--output", copied, *change, "--override-resume", "optim.ratee", check=2)
    assert "a run has no field 'optim.ratee': did you mean 'optim.rate'?" in wrong.stderr
    before = {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()}
    wider = ("-s", "model.encoder.width=32", "--override-resume", "model", *change, *allowed)
    for more in ((), ("--resume", "step-00000008")):
        other = run("train", run_file, "--output", copied, *wider, *more, check=4)
        assert "holds another model" in other.stderr
        assert {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()} == before, "what is refused changes nothing"
        assert (copied / "checkpoints" / "step-00000010").is_dir()


def test_a_folder_of_somebody_else_is_left_as_it_is(run_file, tmp_path):
    for name in ("run.toml", "data.json", "env.json", "metrics.jsonl"):
        place = tmp_path / name.replace(".", "-")
        place.mkdir()
        (place / name).write_text('{"starts": 3}')
        for more in ((), ("--dry-run",)):
            assert "is no file of a run, and would be written over" in run("train", run_file, "--output", place, *more, check=2).stderr
        assert [path.name for path in place.iterdir()] == [name]
        assert (place / name).read_text() == '{"starts": 3}'


def test_a_dry_run_refuses_what_the_run_would(run_file, copied, tmp_path):
    (tmp_path / "file").write_text("")
    assert "Not a directory" in run("train", run_file, "--output", tmp_path / "file", "--dry-run", check=2).stderr
    other = run("train", run_file, "--output", copied, "--dry-run", "-s", "optim.rate=0.5", check=2)
    assert "holds another run: optim.rate" in other.stderr
    run("train", run_file, "--output", copied, "--dry-run", "-s", "optim.rate=0.5", "--override-resume", "optim")


def test_a_start_that_came_to_no_checkpoint_leaves_no_lines(tmp_path):
    ready = made_ready(read_run(tree()))
    for _ in range(2):
        first = train(ready, tmp_path / "run")
        next(event for event in first if isinstance(event, Stepped))
        (tmp_path / "run" / "lock.json").unlink()
        del first
    list(train(ready, tmp_path / "run"))
    steps = [line["step"] for line in told(tmp_path / "run") if line["event"] == "stepped"]
    assert steps == list(range(1, len(steps) + 1))


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_weights_that_are_not_what_the_run_saved_are_refused_by_all(run_file, copied, tmp_path):
    latest = copied / "checkpoints" / (copied / "checkpoints" / "latest").read_text()
    flipped(latest / "optimizer.safetensors")
    assert run("predict", copied, "1 2").stdout  # which needs no such memory
    for broken in ("model.safetensors", "manifest.json"):
        place = tmp_path / broken.partition(".")[0]
        shutil.copytree(copied, place)
        flipped(place / "checkpoints" / latest.name / broken) if "model" in broken else (
            place / "checkpoints" / latest.name / broken
        ).unlink()
        for command in (("predict", place, "1 2"), ("evaluate", place), ("export", place, tmp_path / "out", "--to", "manyheads")):
            assert "this checkpoint is not what its run saved" in refused(*command, code=4)
    assert not (tmp_path / "out").exists()


def test_a_best_checkpoint_that_is_lost_is_said_to_be(tmp_path, monkeypatch):
    rising = itertools.count(1.0)
    monkeypatch.setattr(loop, "evaluate", lambda model, ready, wish: {"loss": next(rising)})
    goal = {"goal": {"metric": "loss"}, "steps": 6, "evaluate_every": 2, "save_every": 2, "keep": 3}
    worse = described("causal", **goal)
    list(train(made_ready(read_run(worse)), tmp_path / "run"))
    places = tmp_path / "run" / "checkpoints"
    assert ((places / "best").read_text(), (places / "latest").read_text()) == ("step-00000002", "step-00000006")
    flipped(places / "step-00000002" / "model.safetensors")
    worse["train"] |= {"steps": 8}
    events = list(train(made_ready(read_run(worse)), tmp_path / "run"))
    assert [event for event in events if isinstance(event, Warned) and "the best checkpoint is lost" in event.said]
    assert (places / "best").read_text() == "step-00000008", "the next look is the best then"


def test_a_best_look_that_could_not_be_kept_is_not_waited_for(tmp_path, monkeypatch):
    looks, room = iter((3.0, 1.0, 2.0, 2.5, 4.0)), checkpoint.check_room

    def full_at_step_four(places, model):
        if (there := checkpoint.steps(places)) and there[0].name == "step-00000002" and not failed:
            failed.append(there)
            raise OSError(errno.ENOSPC, "No space left on device")
        room(places, model)

    failed = []
    monkeypatch.setattr(checkpoint, "check_room", full_at_step_four)
    monkeypatch.setattr(loop, "evaluate", lambda model, ready, wish: {"loss": next(looks)})
    how = described("causal", goal={"metric": "loss"}, steps=8, evaluate_every=2, save_every=100)
    list(train(made_ready(read_run(how)), tmp_path / "run"))
    places = tmp_path / "run" / "checkpoints"
    assert failed
    assert (places / "best").read_text() == "step-00000006", "better than any that is kept"
    how["train"] |= {"steps": 10}
    assert not [event for event in train(made_ready(read_run(how)), tmp_path / "run") if isinstance(event, Warned)]
    assert (places / "best").read_text() == "step-00000006"


def test_a_run_whose_goal_is_taken_away_is_loaded_at_its_latest(tmp_path, monkeypatch):
    rising = itertools.count(1.0)
    monkeypatch.setattr(loop, "evaluate", lambda model, ready, wish: {"loss": next(rising)})
    how = {"steps": 4, "evaluate_every": 2, "save_every": 2}
    list(train(made_ready(read_run(described("causal", goal={"metric": "loss"}, **how))), tmp_path / "run"))
    assert manyheads.load(tmp_path / "run").folder.name == "step-00000002"
    list(train(made_ready(read_run(described("causal", **how))), tmp_path / "run"))
    assert manyheads.load(tmp_path / "run").folder.name == "step-00000004"


def test_looks_at_other_rows_are_not_compared(tmp_path, monkeypatch):
    rising = itertools.count(1.0)
    monkeypatch.setattr(loop, "evaluate", lambda model, ready, wish: {"loss": next(rising)})
    how = {"steps": 4, "evaluate_every": 2, "save_every": 2, "goal": {"metric": "loss"}}
    list(train(made_ready(read_run(described("causal", **how, evaluate_rows=1))), tmp_path / "run"))
    list(train(made_ready(read_run(described("causal", **how | {"steps": 8}, evaluate_rows=9))), tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / "best").read_text() == "step-00000006", "the first look at the new rows"


def test_a_run_that_has_saved_nothing_says_so(tmp_path):
    first = train(made_ready(read_run(tree())), tmp_path / "run")
    next(event for event in first if isinstance(event, Stepped))
    for command in (("predict", tmp_path / "run", "1 2"), ("evaluate", tmp_path / "run")):
        assert "holds a run that has saved nothing yet" in refused(*command, code=4)
    first.close()


def test_a_run_that_does_not_know_what_it_learned_from_says_so(run_file, copied):
    (copied / "data.json").unlink()
    assert "data.json is gone" in run("train", run_file, "--output", copied, check=2).stderr
    run("train", run_file, "--output", copied, "--override-resume", "data")
    assert (copied / "data.json").is_file()


def test_data_that_changed_under_the_same_name_is_another_run(run_file, tmp_path):
    given = words(tmp_path, "a.tsv", PAIRS.encode())
    run("train", run_file, "--output", tmp_path / "run", *given, "-s", "train.steps=2")
    words(tmp_path, "a.tsv", PAIRS.replace("word 3 3", "word 4 3").encode())
    done = run("train", run_file, "--output", tmp_path / "run", *given, "-s", "train.steps=4", check=2)
    assert "data.rows was" in done.stderr
    run(
        "train",
        run_file,
        "--output",
        tmp_path / "run",
        *given,
        "-s",
        "train.steps=4",
        "--override-resume",
        "data",
        "--override-resume",
        "tokenizer",
    )


def hashes(folder, lines):
    """Of a run from a file of these lines, whose bytes are its tokens: no other tokenizer comes of other lines."""
    (folder / "a.tsv").write_text("".join(lines))
    data = {"kind": "pairs", "path": str(folder / "a.tsv")}
    return flat(contents(made_ready(read_run(tree(data=data, tokenizer="bytes")))))


MANY = [f"{i % 10} {i % 7}\t{i % 7} {i % 3}\n" for i in range(9_000)]


def test_one_row_among_thousands_is_seen_to_have_changed(tmp_path):
    before = hashes(tmp_path, MANY)
    assert hashes(tmp_path, MANY) == before
    for i in (0, 1, 4_321, 8_999):
        changed = hashes(tmp_path, [*MANY[:i], "1 1\t9 1\n", *MANY[i + 1 :]])
        assert len([name for name in before if changed[name] != before[name]]) == 1
    ends = [hashes(tmp_path, [*MANY[:10], line, *MANY[11:]]) for line in ("11\t1\n", "1\t11\n")]
    assert ends[0] != ends[1]  # the same tokens, but not of the same text


@pytest.mark.parametrize("longest", [None, 4])
def test_prepared_rows_are_known_by_the_hashes_of_their_files(longest, tmp_path):
    found = []
    for name, lines in (("one", MANY), ("same", MANY), ("other", [*MANY[:-1], "1 1\t9 1\n"])):
        (tmp_path / f"{name}.tsv").write_text("".join(lines))
        corpus = SLOTS["data"].choose({"kind": "pairs", "path": str(tmp_path / f"{name}.tsv")}).load()
        tokenizer = SLOTS["tokenizer"].choose("words").make(f"{i}" for i in range(10))
        prepare(corpus, tokenizer, tmp_path / name)
        prepared = described("seq2seq", **USUAL, longest=longest) | {"data": {"kind": "prepared", "path": str(tmp_path / name)}}
        found.append(contents(made_ready(read_run(prepared)))["data"])
    assert found[0] == found[1] != found[2]


def test_links_and_the_names_of_classes_are_part_of_what_is_learned(tmp_path):
    guided = {"shaping": [{"kind": "guided"}], "objective": "seq2seq"}
    found = []
    for link in ("0-0 1-1", "0-1 1-0"):
        lines = [f"a {i}\tb {i}\t0-0 1-1\n" for i in range(50)]
        data = {"kind": "pairs", "path": str(tmp_path / "a.tsv"), "fields": [0, 1, 2]}
        (tmp_path / "a.tsv").write_text("".join([*lines[:30], lines[30].replace("0-0 1-1", link), *lines[31:]]))
        found.append(contents(made_ready(read_run(tree(**guided) | {"data": data})))["data"])
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"links"}
    model = {"vocab": "tokenizer", "encoder": OBJECTIVES["classify"]["model"]["encoder"] | {"embed": "tokens"}, "head": {"kind": "classes", "classes": 2}}  # fmt: skip
    found = []
    for name in ("good", "great"):
        (tmp_path / "a.tsv").write_text("".join(f"text {i}\t{('bad', name)[i % 2]}\n" for i in range(50)))
        data = {"kind": "labels", "path": str(tmp_path / "a.tsv")}
        found.append(contents(made_ready(read_run(tree(objective="classify", model=model, data=data))))["data"])
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"classes"}


def test_a_run_of_an_earlier_version_goes_on_by_the_hashes_that_it_knew(tmp_path, copied):
    ready, path = made_ready(read_run(tree())), copied / "data.json"
    now = json.loads(path.read_text())
    before = {"tokenizer": now["tokenizer"], "data": {}}
    for name, rows in (("rows", ready.rows), ("unseen", ready.unseen)):
        assert len(rows) < folder.LOOKED_AT  # so that every row was hashed then too
        lengths = b"".join(np.array([len(row[i]) for row in rows.rows]).tobytes() for i in range(2))
        ids = b"".join(ids.tobytes() for row in rows.rows for ids in row)
        before["data"][name] = hashlib.sha256(str(len(rows)).encode() + lengths + ids).hexdigest()[:16]
    path.write_text(json.dumps(before))
    assert begun(ready, copied) == []
    assert json.loads(path.read_text()) == now
    before["data"]["rows"] = "0" * 16
    path.write_text(json.dumps(before))
    with pytest.raises(ChangedRunError, match="data.rows was '0000000000000000' and is"):
        begun(ready, copied)
    path.write_text(json.dumps(now | {"schema": 3}))
    with pytest.raises(ValueError, match="data.json of this run has schema 3, and this version knows 2"):
        begun(ready, copied)


# --- which checkpoint to go on from ---


def test_a_run_begins_where_it_is_told(run_file, copied, tmp_path, whole):
    assert "holds a run, and --resume never" in refused("train", run_file, "--output", copied, "--resume", "never", code=2)
    run("train", run_file, "--output", tmp_path / "new", "--resume", "never")
    assert bits(tmp_path / "new") == bits(whole)
    said = refused("train", run_file, "--output", copied, "--resume", tmp_path / "new" / "checkpoints" / "step-00000006", "--quiet", code=4)
    assert "is no checkpoint of this run (there: step-00000008, step-00000006)" in said
    done = run("train", run_file, "--output", copied, "--resume", copied / "checkpoints" / "step-00000006")
    assert "going on from step 6" in done.stderr
    assert bits(copied) == bits(whole)
    assert (copied / "checkpoints" / "aside-1-step-00000008").is_dir()
    assert [line["step"] for line in told(copied) if line["event"] == "stepped"] == list(range(1, 9))


def test_the_folder_knows_which_commit_of_the_user_it_was_started_in(run_file, tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    for _ in range(2):
        run("train", run_file, "--output", tmp_path / "run", "--seed", "7", "-s", "train.steps=1", cwd=tmp_path)
    starts = json.loads((tmp_path / "run" / "env.json").read_text())["starts"]
    assert [start["git"] for start in starts] == [head, head]
    assert [(start["seed"], start["command"][0], start["torch"]) for start in starts] == [(7, "manyheads", torch.__version__)] * 2
    assert read_toml(tmp_path / "run" / "run.toml")["seed"] == 7


# --- whose a folder is ---


def test_a_second_run_is_refused_until_the_first_is_gone(run_file, tmp_path):
    place = tmp_path / "run"
    first = started("train", run_file, "--output", place, "-s", "train.steps=1000000", err=tmp_path / "err")
    deadline = time.monotonic() + 60
    while not (place / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert f"in use by process {first.pid} on {socket.gethostname()}" in refused("train", run_file, "--output", place, code=2)
    first.kill()
    first.join()
    run("train", run_file, "--output", place, "-s", "train.steps=1000000", check=143, before=partial(at, "weights", *[signal.SIGTERM] * 2))


def test_a_lock_is_stale_when_its_process_is_gone_or_another(tmp_path):
    here, parent = socket.gethostname(), os.getppid()
    assert in_use({"pid": parent, "host": here, "started": began(parent)})
    assert in_use({"pid": os.getpid(), "host": here, "started": began(os.getpid())})
    assert not in_use({"pid": parent, "host": here, "started": "1"})  # its number went to another process
    assert not in_use({"pid": 2**22 + 1, "host": here, "started": "1"})
    assert in_use({"pid": 2**22 + 1, "host": "elsewhere", "started": "1"})  # nobody here can tell
    assert not in_use({})  # cut short as it was written
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    assert not in_use({"pid": dead.pid, "host": here})  # a zombie
    dead.wait()
    with locked(tmp_path) as check:
        with pytest.raises(ValueError, match="is in use by process"), locked(tmp_path):
            pass
        check()
        (tmp_path / "lock.json").write_text("{}")
        with pytest.raises(OSError, match="another's now"):
            check()
    assert (tmp_path / "lock.json").exists()  # it was not ours to remove


# --- goals ---


def with_goal(**goal):
    return described("seq2seq", steps=12, save_every=5, evaluate_every=2, accumulate=1, goal=goal) | {"data": FEW}


def test_patience_ends_a_run_and_the_best_is_kept_and_loaded(tmp_path):
    patient = with_goal(metric="exact", patience=3)  # which stays 0: the first look is the best
    events = list(train(made_ready(read_run(patient)), tmp_path / "run"))
    assert events[-1] == Ended(8, "patience")
    places = tmp_path / "run" / "checkpoints"
    assert [(places / name).read_text() for name in ("best", "latest")] == ["step-00000002", "step-00000008"]
    assert {path.name for path in checkpoint.steps(places)} == {"step-00000002", "step-00000005", "step-00000008"}
    assert manyheads.load(tmp_path / "run").folder == places / "step-00000002"
    assert list(train(made_ready(read_run(patient)), tmp_path / "run")) == [Resumed(8, ()), Ended(8, "patience")]
    longer = list(train(made_ready(read_run(with_goal(metric="exact", patience=5))), tmp_path / "run"))
    assert isinstance(longer[1], Changed)
    assert longer[-1] == Ended(12, "patience")


def test_a_goal_survives_kills_with_the_same_bits(tmp_path):
    goal = with_goal(metric="loss", patience=3)
    assert in_a_process(goal, tmp_path / "unbroken") == 0
    for step in (3, 6, 11):
        assert in_a_process(goal, tmp_path / "run", step=step) in (0, -signal.SIGKILL)
    assert in_a_process(goal, tmp_path / "run", phase="renamed") in (0, -signal.SIGKILL)  # between a checkpoint and the pointers to it
    assert in_a_process(goal, tmp_path / "run") == 0
    assert bits(tmp_path / "run") == bits(tmp_path / "unbroken")
    best = [(tmp_path / name / "checkpoints" / "best").read_text() for name in ("run", "unbroken")]
    assert best[0] == best[1]
    state = json.loads((tmp_path / "run" / "checkpoints" / best[0] / "trainer.json").read_text())
    looks = {line["step"]: line["metrics"]["loss"] for line in told(tmp_path / "run") if line["event"] == "evaluated"}
    assert state["best"] == looks[state["best_step"]] == min(looks.values())


def test_a_goal_that_no_look_can_find_is_refused():
    lost = described("causal", **USUAL, goal={"metric": "exact"})
    with pytest.raises(SpecError, match="train.goal.metric: is 'exact', and a look at unseen rows gives loss, accuracy"):
        read_run(lost)


def test_where_a_run_is_goes_to_a_file_and_back():
    state = State(
        step=4, epoch=1, index=2, rows=9, tokens=88, looked=4, metrics={"loss": 1.5, "exact": None}, metric="loss", best=1.5, best_step=4
    )
    assert State.from_tree(json.loads(json.dumps(state.to_tree()))) == state
    assert State.from_tree({"schema": 1, "step": 3}) == State(step=3)
    for wrong in ({"schema": 2}, {"schema": 1, "stepp": 3}):
        with pytest.raises(ValueError, match="which this version does not know"):
            State.from_tree(wrong)


# --- TensorBoard, and what stands on standard error ---


def scalars(place):
    """What TensorBoard would show: a file that begins at a step takes back what others said of it and later ones."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(place.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            at += length + 16
            if event.HasField("session_log"):
                found = [one for one in found if one[1] < event.step]
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def test_tensorboard_shows_every_step_once(tmp_path):
    shown = described("seq2seq", **USUAL, tensorboard=True) | {"data": FEW}
    assert in_a_process(shown, tmp_path / "run", step=5) == -signal.SIGKILL
    assert in_a_process(shown, tmp_path / "run") == 0
    found = scalars(tmp_path / "run")
    assert [step for name, step, _ in found if name == "train/loss"] == list(range(1, 9))
    assert [step for name, step, _ in found if name == "unseen/loss"] == [4, 8]
    logged = {line["step"]: line["loss"] for line in told(tmp_path / "run") if line["event"] == "stepped"}
    assert {step: value for name, step, value in found if name == "train/loss"} == pytest.approx(logged)


def test_without_a_terminal_there_are_plain_lines_and_quiet_is_quiet(run_file, tmp_path):
    done = run("train", run_file, "--output", tmp_path / "run", env=os.environ | {"TERM": "xterm-256color"})
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    assert max(map(len, done.stderr.splitlines())) > 80  # nothing is wrapped
    assert "step 4 · unseen rows: loss" in done.stderr
    assert run("train", run_file, "--output", tmp_path / "other", "--quiet").stderr == ""
