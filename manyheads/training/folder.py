"""The folder of a run: its lock, its record of settings and data, and its log."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic_core import to_jsonable_python

from manyheads.data.tokenized import TokenizedRows, TokenRows, TruncatedRows, fingerprint, read_index
from manyheads.errors import (
    CheckpointNotFoundError,
    RunChangedError,
    RunError,
    RunLockedError,
    UsageError,
    needs_extra,
)
from manyheads.files.read import open_regular, read_json_or_empty, read_toml
from manyheads.files.write import append_atomic, check_writable, explain_write_errors, write_atomic
from manyheads.spec import Tree, did_you_mean, quoted, to_toml, to_tree
from manyheads.training.events import Change, Event
from manyheads.training.prepare import PreparedRun
from manyheads.training.run import SAFE_TO_CHANGE, RunSpec
from manyheads.training.store import SAVED_RUN, checkpoints

# fields that are safe to change when a run is resumed, but change its metrics
METRIC_FIELDS = ("train.steps", "train.best", "train.eval_every", "train.eval_rows")
DATA_FIELDS = (
    "data.train_rows",
    "data.validation_rows",
    "data.attention_targets",
    "data.labels",
    "tokenizer.hash",
)  # fields of data.json
ROWS_PER_HASH_CALL = 4096  # one call per row would take longer than hashing its ids
MAX_EVENT_BYTES = 1 << 24  # a longer line of metrics.jsonl is read in pieces, which are no events
NEW_OUTPUT = "use another --output"


def check_folder(folder: Path, resume: str = "auto") -> None:
    """Raises if a run cannot use the folder, before any data is read; writes nothing."""
    check_writable(folder)
    check_foreign_files(folder)
    if resume == "never" and is_run(folder):
        raise RunError(f"{folder} already contains a run, and --resume is never", hint=NEW_OUTPUT)
    check_unlocked(folder)


def is_run(folder: Path) -> bool:
    """Whether the folder has the env.json of a run, which is the first file that a run writes."""
    launches = read_json_or_empty(folder / "env.json").get("launches")
    return isinstance(launches, list) and all(isinstance(launch, dict) for launch in launches)


def check_foreign_files(folder: Path) -> None:
    """Raises if files that no run wrote have the names of a run's files."""
    lock = read_json_or_empty(folder / "lock.json")
    names = ["lock.json"] if lock and "pid" not in lock else []
    names += [] if is_run(folder) else ["run.toml", "data.json", "env.json", "metrics.jsonl", "checkpoints"]
    for path in (folder / name for name in names):
        if os.path.lexists(path):
            reason = (
                "is not the lock of a run" if path.name == "lock.json" else "has no env.json beside it, as a run has"
            )
            raise RunError(f"{path} {reason}, and would be overwritten", hint=NEW_OUTPUT)


# ----------------------------------------------------------------------------------------------------------- the lock


@contextmanager
def lock_folder(folder: Path) -> Iterator[Callable[[], None]]:
    """Locks the folder for this process, replacing a stale lock; yields a function that raises if the lock is lost."""
    path = folder / "lock.json"
    own = {"pid": os.getpid(), "host": socket.gethostname(), "started": process_start(os.getpid())}

    def check() -> None:
        if read_json_or_empty(path) != own:  # the folder was removed, its disk unmounted, or another process locked it
            raise OSError(errno.ENOENT, "the run's folder is gone, or locked by another process", str(folder))

    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder):
            check_unlocked(folder)
            try:
                write_atomic(path, json.dumps(own))
            except OSError:
                path.unlink(missing_ok=True)
                raise
    try:
        yield check
    finally:
        with suppress(OSError):
            if read_json_or_empty(path) == own:
                path.unlink()


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Holds a file lock, so that of two processes that start together only one replaces a stale lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # the file system has no file locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def check_unlocked(folder: Path) -> None:
    path = folder / "lock.json"
    if is_held(other := read_json_or_empty(path)):
        raise RunLockedError(
            f"{folder} is in use by process {other.get('pid')} on {other.get('host')}",
            hint=f"stop it, or remove {path}",
        )


def is_held(lock: Tree) -> bool:
    """Whether the process of a lock may be running. On another host that is unknown; here its pid may be reused."""
    pid = lock.get("pid")
    if type(pid) is not int or pid < 1:
        return False
    if lock.get("host") != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    started = process_start(pid)
    return started is None or (started != "ended" and lock.get("started") in (None, started))


def process_start(pid: int) -> str | None:
    """Returns when a process started, in clock ticks since boot, or None if the system does not report it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *rest = stat.rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "ended" if state in "ZX" else rest[18]


# --------------------------------------------------------------------------------------- changes since the last launch


def config_changes(
    run: PreparedRun, hashes: Tree, folder: Path, checkpoint: Path | None, override_fields: Sequence[str] = ()
) -> list[Change]:
    """Returns the fields that changed since the checkpoint was saved, or since the last launch.

    Raises if one is neither safe nor in `override_fields`.
    """
    check_field_names(override_fields, run.spec)
    if checkpoint is None:
        check_nothing_saved(folder)
    if not (folder / "run.toml").exists():
        if (folder / "checkpoints").exists():
            raise RunError(
                f"{folder} has checkpoints but no run.toml, so the run cannot be identified", hint=NEW_OUTPUT
            )
        return []
    old_hashes = read_json_or_empty(folder / "data.json")
    if not old_hashes and "data" not in override_fields and any((folder / "checkpoints").glob("*")):
        raise RunError(
            f"{folder / 'data.json'} with the hashes of the run's data is missing",
            hint="--override-resume data resumes without it",
        )
    changes = [*spec_changes(folder, checkpoint, run.spec), *(tree_changes(old_hashes, hashes) if old_hashes else ())]
    unsafe = [one for one in changes if not is_within(one.field, (*SAFE_TO_CHANGE, *override_fields))]
    if unsafe:
        raise changed_error(
            folder, unsafe, f"{NEW_OUTPUT}, restore the old value, or pass --override-resume {unsafe[0].field}"
        )
    if any(one.field == "optim.kind" for one in changes):
        raise RunError("optim.kind changed, and no optimizer can use the state of another one", hint=NEW_OUTPUT)
    return changes


def check_nothing_saved(folder: Path) -> None:
    """Raises if the log of a run without a checkpoint has saves, because the run must not silently start again."""
    path = folder / "metrics.jsonl"
    if steps := [event["step"] for event in read_events(path) if event["event"] == "saved"]:
        raise CheckpointNotFoundError(
            f"{folder / 'checkpoints'} has no checkpoint, but {path.name} has saves up to step {steps[-1]:,}",
            hint=f"restore the checkpoints, or {NEW_OUTPUT} to start again",
        )


def check_same_run(folder: Path, spec: RunSpec) -> None:
    """Raises if `compare` finds another run in the folder; a safe field counts too if the metrics depend on it."""
    changes = spec_changes(folder, next(iter(checkpoints(folder / "checkpoints")), None), spec)
    if unsafe := [
        one for one in changes if is_within(one.field, METRIC_FIELDS) or not is_within(one.field, SAFE_TO_CHANGE)
    ]:
        raise changed_error(folder, unsafe, f"{NEW_OUTPUT}, or restore the old value")


def changed_error(folder: Path, changes: Sequence[Change], hint: str) -> RunChangedError:
    shown = "; ".join(f"{field} was {quoted(old)} and is {quoted(new)}" for field, old, new in changes[:3])
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return RunChangedError(f"{folder} has another run: {shown}{more}", changes, hint=hint)


def spec_changes(folder: Path, checkpoint: Path | None, spec: RunSpec) -> list[Change]:
    """Returns the differences from the run that saved the checkpoint, and from run.toml, which users may edit."""
    new, changes = tomllib.loads(to_toml(to_tree(spec))), dict[str, Change]()
    for path in (folder / "run.toml", *([checkpoint / SAVED_RUN] if checkpoint else [])):
        if path.exists():
            changes |= {change.field: change for change in tree_changes(read_toml(path), new)}
    return [changes[name] for name in sorted(changes)]


def tree_changes(old: Tree, new: Tree) -> Iterator[Change]:
    """Yields every field that differs between two trees."""
    before, after = flatten(old), flatten(new)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield Change(name, before.get(name), after.get(name))


def flatten(tree: Tree, path: str = "") -> Tree:
    """Returns every leaf of a tree under its dotted path."""
    leaves: Tree = {}
    for name, value in tree.items():
        leaves |= flatten(value, f"{path}{name}.") if isinstance(value, dict) and value else {f"{path}{name}": value}
    return leaves


def is_within(field: str, names: Iterable[str]) -> bool:
    """Whether a field is one of `names`, or inside one of them."""
    return any(field == name or field.startswith(f"{name}.") for name in names)


def check_field_names(override_fields: Sequence[str], spec: RunSpec) -> None:
    leaves = [*flatten(to_tree(spec)), *DATA_FIELDS]
    known = {".".join(leaf.split(".")[:depth]) for leaf in leaves for depth in range(1, 9)}
    if unknown := [name for name in override_fields if name not in known]:
        raise UsageError(f"--override-resume: a run has no field {quoted(unknown[0])}{did_you_mean(unknown[0], known)}")


# ------------------------------------------------------------------------------------------------- the files of a run


def write_run_files(run: PreparedRun, hashes: Tree, folder: Path, device: torch.device) -> None:
    """Writes run.toml, data.json with the `data_hashes`, and env.json with one entry per launch."""
    with explain_write_errors(folder):
        launches = read_json_or_empty(folder / "env.json").get("launches")
        launches = [*(launches if isinstance(launches, list) else ()), environment(run.spec, device)]
        # env.json comes first, because is_run recognizes the folder of a run by it
        write_atomic(folder / "env.json", json.dumps({"schema": 1, "launches": launches}, indent=1) + "\n")
        write_atomic(folder / "run.toml", to_toml(to_tree(run.spec)))
        write_atomic(folder / "data.json", json.dumps(hashes, indent=1) + "\n")
        (folder / "checkpoints").mkdir(exist_ok=True)


def data_hashes(run: PreparedRun) -> Tree:
    """Returns hashes of all training data, because a file may change under the same name."""
    fields = [run.attention_targets[name] for name in sorted(run.attention_targets)]
    targets = [array for rows in fields for array in (np.array([*map(len, rows)]), *rows)]
    data = {
        "train_rows": hash_rows(run.train_rows),
        "validation_rows": hash_rows(run.validation_rows),
        "attention_targets": hash_arrays(json.dumps(sorted(run.attention_targets)), targets) if targets else "",
        "labels": hash_arrays(json.dumps(run.labels)) if run.labels else "",
    }
    return {"schema": 1, "data": data, "tokenizer": {"hash": fingerprint(run.tokenizer)[:16] if run.tokenizer else ""}}


def hash_rows(rows: TokenRows) -> str:
    """Hashes every id. The index of tokenized rows has hashes, which were checked when the files were opened."""
    if isinstance(rows, TruncatedRows):
        return hash_arrays(json.dumps([rows.max_lengths, hash_rows(rows.rows)]))
    if isinstance(rows, TokenizedRows):
        split = read_index(rows.folder.parent)["splits"][rows.folder.name]
        return hash_arrays(json.dumps([rows.fields, split], sort_keys=True))
    arrays = chain((rows.lengths(name) for name in rows.fields), chain.from_iterable(rows[i] for i in range(len(rows))))
    return hash_arrays(json.dumps([len(rows), rows.fields]), arrays)


def hash_arrays(header: str, arrays: Iterable[np.ndarray] = ()) -> str:
    digest, remaining = hashlib.sha256(header.encode()), iter(arrays)
    while some := [array.tobytes() for array in islice(remaining, ROWS_PER_HASH_CALL)]:
        digest.update(b"".join(some))
    return digest.hexdigest()[:16]


def environment_changes(folder: Path, device: torch.device) -> list[str]:
    """Returns warnings about changes in torch, threads or device that can change results."""
    last = (read_json_or_empty(folder / "env.json").get("launches") or [{}])[-1]
    new = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": str(device)}
    hints = {"threads": "; set OMP_NUM_THREADS to the old number"}
    return [
        f"{name} was {last[name]} and is {value}, so the results may differ in the last bits{hints.get(name, '')}"
        for name, value in new.items()
        if last.get(name, value) != value
    ]


def environment(spec: RunSpec, device: torch.device) -> Tree:
    """Returns the versions, machine, command and git commit of one launch."""
    from manyheads import __version__

    return {
        "manyheads": __version__, "torch": torch.__version__, "numpy": np.__version__,
        "python": platform.python_version(), "platform": platform.platform(), "threads": torch.get_num_threads(),
        "device": str(device), "seed": spec.seed,
        "command": sys.argv, "folder": os.getcwd(), "git": git_commit(), "started": time.time(),
    }  # fmt: skip


def git_commit() -> str | None:
    """Returns the commit of the repository that the run was started in, or None outside a repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or no repository here
        return None
    return done.stdout.strip() or None


# ------------------------------------------------------------------------------------------------------------- the log


@contextmanager
def open_log(folder: Path, *, tensorboard: bool) -> Iterator[Log]:
    with closing(TensorBoardWriter(folder)) if tensorboard else nullcontext() as writer:
        yield Log(folder / "metrics.jsonl", writer=writer)


class Log:
    """Writes metrics.jsonl, one line per event. On a full disk, lines wait in memory until they can be written."""

    def __init__(self, path: Path, writer: Callable[[Tree], None] | None = None) -> None:
        self.path, self.writer = path, writer
        self.waiting, self.failing, self.created = list[str](), False, False

    def add(self, event: Event) -> str | None:
        """Writes an event: its name in snake case and its fields. Returns the error of the first write that fails."""
        line = {"event": re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()} | asdict(event)
        self.waiting.append(json.dumps(to_jsonable_python(line, inf_nan_mode="null")) + "\n")
        failed_before, self.failing = self.failing, True
        try:
            append_atomic(self.path, "".join(self.waiting).encode(), create=not self.created)
            self.created = True
            self.waiting.clear()
            if self.writer is not None:
                self.writer(line)
        except OSError as error:
            path = self.path if self.waiting else self.path.with_name("events.out.tfevents.*")
            message = f"cannot write {path}: {error.strerror or error}; training continues, and the write is retried"
            return None if failed_before else message
        self.failing = False
        return None

    def drop_after(self, step: int, evaluated_step: int) -> None:
        """Removes lines of steps and evaluations that will be repeated, and a line that a crash left incomplete."""
        if self.path.exists():
            with explain_write_errors(self.path):
                last_steps = {"evaluated": evaluated_step}
                kept = (one for one in read_events(self.path) if one["step"] <= last_steps.get(one["event"], step))
                write_atomic(self.path, "".join(f"{json.dumps(event)}\n" for event in kept))


def read_events(path: Path) -> Iterator[Tree]:
    """Yields the events of metrics.jsonl, without a line that a crash left incomplete."""
    if not path.exists():
        return
    with open_regular(path) as file:
        while line := file.readline(MAX_EVENT_BYTES):
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and "event" in event and type(event.get("step")) is int:
                    yield event


class TensorBoardWriter:
    """Writes one event file per launch; its first record makes TensorBoard drop later steps of earlier files.

    tensorboardX's own writer has a thread, which a full disk kills with a traceback; here the caller gets the error.
    """

    def __init__(self, folder: Path) -> None:
        with needs_extra("train.tensorboard needs tensorboardX", "log"):
            from tensorboardX import event_file_writer, proto, summary  # noqa: F401
            from tensorboardX.proto import event_pb2
        self.file: Any = None
        self.prefix, self.open = str(folder / "events"), event_file_writer.EventsWriter
        self.event, self.session, self.scalar = event_pb2.Event, event_pb2.SessionLog, summary.scalar

    def __call__(self, line: Tree) -> None:
        if line["event"] == "evaluated":
            scalars = {f"validation/{name}": value for name, value in line["metrics"].items()}
        elif line["event"] == "step":
            scalars = {f"train/{name}": line[name] for name in ("loss", "lr", "grad_norm")}
            scalars["train/tokens_per_second"] = line["tokens"] / max(line["seconds"], 1e-9)
        else:
            return
        if self.file is None:
            self.file = self.open(self.prefix, filename_suffix=f".{os.getpid()}.{line['step']}")
            self.write(line["step"], session_log=self.session(status=self.session.START))
        for name, value in scalars.items():
            self.write(line["step"], summary=self.scalar(name, value))
        self.file.flush()

    def write(self, step: int, **fields: Any) -> None:
        self.file.write_event(self.event(wall_time=time.time(), step=step, **fields))

    def close(self) -> None:
        with suppress(OSError):
            if self.file is not None:
                self.file.close()
