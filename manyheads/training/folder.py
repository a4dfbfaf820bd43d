"""The folder of a run: its lock, and its record of settings and data."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from manyheads.data.tokenized import fingerprint, hash_arrays
from manyheads.errors import (
    CheckpointNotFoundError,
    RunChangedError,
    RunError,
    RunLockedError,
    UsageError,
)
from manyheads.files.read import read_json_or_empty, read_toml
from manyheads.files.write import check_writable, explain_write_errors, write_atomic
from manyheads.spec import Tree, did_you_mean, quote, to_toml, to_tree
from manyheads.training.events import Change
from manyheads.training.log import read_events
from manyheads.training.preparation import PreparedRun
from manyheads.training.run import SAFE_TO_CHANGE, RunSpec
from manyheads.training.store import SAVED_RUN, find_checkpoint, list_checkpoints

# fields that are safe to change when a run is resumed, but change its metrics
METRIC_FIELDS = ("train.steps", "train.best", "train.eval_every", "train.eval_rows")
DATA_FIELDS = (
    "data.train_rows",
    "data.validation_rows",
    "data.attention_targets",
    "data.labels",
    "tokenizer.hash",
)  # fields of data.json
NEW_OUTPUT = "use another --output"


def check_folder(folder: Path, resume: str = "auto") -> None:
    """Raises if a run cannot use the folder, before any data is read; writes nothing."""
    check_writable(folder)
    check_foreign_files(folder)
    if resume == "never" and is_run(folder):
        raise RunError(f"{folder} already contains a run, and --resume is never", hint=NEW_OUTPUT)
    check_unlocked(folder)
    if resume not in ("auto", "never"):
        find_checkpoint(folder / "checkpoints", Path(resume))


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
                "it is not the lock of a run"
                if path.name == "lock.json"
                else f"{folder} has no env.json, so it is no run"
            )
            raise RunError(f"{path} would be overwritten: {reason}", hint=NEW_OUTPUT)


# ----------------------------------------------------------------------------------------------------------- the lock


@contextmanager
def lock_folder(folder: Path) -> Iterator[Callable[[], None]]:
    """Locks the folder for this process, replacing a stale lock; yields a function that raises if the lock is lost."""
    path = folder / "lock.json"
    lock = {"pid": os.getpid(), "host": socket.gethostname(), "started": process_start(os.getpid())}

    def check() -> None:
        if read_json_or_empty(path) != lock:  # the folder was removed, its disk unmounted, or another process locked it
            raise OSError(errno.ENOENT, "the run's folder is gone, or locked by another process", str(folder))

    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder):
            check_unlocked(folder)
            try:
                write_atomic(path, json.dumps(lock))
            except OSError:
                path.unlink(missing_ok=True)
                raise
    try:
        yield check
    finally:
        with suppress(OSError):
            if read_json_or_empty(path) == lock:
                path.unlink()


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
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
    start = process_start(pid)
    return start is None or (start != "ended" and lock.get("started") in (None, start))


def process_start(pid: int) -> str | None:
    """Returns when a process started, in clock ticks since boot, or None if the system does not report it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = stat.rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "ended" if state in "ZX" else fields[18]


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
    unsafe_changes = [change for change in changes if not is_within(change.field, (*SAFE_TO_CHANGE, *override_fields))]
    if unsafe_changes:
        raise changed_error(
            folder,
            unsafe_changes,
            f"{NEW_OUTPUT}, restore the old value, or pass --override-resume {unsafe_changes[0].field}",
        )
    if any(change.field == "optim.kind" for change in changes):
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
    changes = spec_changes(folder, next(iter(list_checkpoints(folder / "checkpoints")), None), spec)
    if unsafe_changes := [
        change
        for change in changes
        if is_within(change.field, METRIC_FIELDS) or not is_within(change.field, SAFE_TO_CHANGE)
    ]:
        raise changed_error(folder, unsafe_changes, f"{NEW_OUTPUT}, or restore the old value")


def changed_error(folder: Path, changes: Sequence[Change], hint: str) -> RunChangedError:
    shown_changes = "; ".join(f"{field} was {quote(old)} and is {quote(new)}" for field, old, new in changes[:3])
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return RunChangedError(f"{folder} has another run: {shown_changes}{more}", changes, hint=hint)


def spec_changes(folder: Path, checkpoint: Path | None, spec: RunSpec) -> list[Change]:
    """Returns the differences from the run that saved the checkpoint, and from run.toml, which users may edit."""
    new, changes = tomllib.loads(to_toml(to_tree(spec))), dict[str, Change]()
    for path in (folder / "run.toml", *([checkpoint / SAVED_RUN] if checkpoint else [])):
        if path.exists():
            changes |= {change.field: change for change in tree_changes(read_toml(path), new)}
    return [changes[name] for name in sorted(changes)]


def tree_changes(old: Tree, new: Tree) -> Iterator[Change]:
    """Yields every field that differs between two trees."""
    old_leaves, new_leaves = flatten(old), flatten(new)
    for name in sorted(old_leaves.keys() | new_leaves.keys()):
        if old_leaves.get(name) != new_leaves.get(name):
            yield Change(name, old_leaves.get(name), new_leaves.get(name))


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
    known_fields = {".".join(leaf.split(".")[:depth]) for leaf in leaves for depth in range(1, 9)}
    if unknown := [name for name in override_fields if name not in known_fields]:
        raise UsageError(
            f"--override-resume: a run has no field {quote(unknown[0])}{did_you_mean(unknown[0], known_fields)}"
        )


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
        "train_rows": run.train_dataset.content_hash(),
        "validation_rows": run.validation_dataset.content_hash(),
        "attention_targets": hash_arrays(json.dumps(sorted(run.attention_targets)), targets) if targets else "",
        "labels": hash_arrays(json.dumps(run.labels)) if run.labels else "",
    }
    return {"schema": 1, "data": data, "tokenizer": {"hash": fingerprint(run.tokenizer)[:16] if run.tokenizer else ""}}


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
        process = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or no repository here
        return None
    return process.stdout.strip() or None
