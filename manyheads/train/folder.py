"""The folder that explains a run: what it is and was, what it learns from, and what it ran on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from manyheads.data.prepared import Cut, Ids, Rows, fingerprint, read_index
from manyheads.spec import SpecError, Tree, nearest, quoted, read_toml, to_toml, to_tree
from manyheads.train.files import put, read_object, writing
from manyheads.train.run import SAFE, Ready, RunError, RunSpec, read_run

FIGURES = ("train.steps", "train.goal", "train.evaluate_every", "train.evaluate_rows")  # those on which a run's figures depend


class Change(NamedTuple):
    """A field that differs between a run and the one before."""

    field: str
    old: Any
    new: Any


class ChangedRunError(RunError):
    """A folder that holds another run."""

    def __init__(self, message: str, changes: Sequence[Change]) -> None:
        super().__init__(message)
        self.changes = tuple(changes)


def differences(ready: Ready, data: Tree, folder: Path, overridden: Sequence[str] = ()) -> list[Change]:
    """What may differ from the run that is there, and does; refused where more does. Nothing is written."""
    run, path = to_tree(ready.run), folder / "run.toml"
    check_known(overridden, run)
    check_own(folder)
    if not path.exists():
        if (folder / "checkpoints").exists():
            raise RunError(f"{folder} has checkpoints and no run.toml that says of what run; take another --output")
        return []
    seen = read_object(folder / "data.json")
    if not seen and "data" not in overridden and any((folder / "checkpoints").glob("*")):
        raise RunError(f"{folder / 'data.json'} is gone, which says what this run learned from; --override-resume data goes on without")
    found = [*changes(filled(read_toml(path)), run), *(changes(seen, as_written(seen, ready, data)) if seen else ())]
    refuse(folder, [one for one in found if not within(one.field, (*SAFE, *overridden))])
    if any(one.field == "optim.kind" for one in found):
        raise RunError("optim.kind is another, and no optimiser goes on with the memory of another; take another --output")
    return found


def check_own(folder: Path) -> None:
    """Refuses a folder in which files of somebody else have the names of a run's."""
    if not isinstance(read_object(folder / "env.json").get("starts"), list) and not (folder / "checkpoints").exists():
        for path in (folder / name for name in ("run.toml", "data.json", "env.json", "metrics.jsonl")):
            if path.exists():
                raise RunError(f"{path} is no file of a run, and would be written over; take another --output")


def write_down(ready: Ready, data: Tree, folder: Path, device: torch.device) -> None:
    """What the run is, what it learns from (its `contents`), and where it was started."""
    with writing(folder):
        starts = read_object(folder / "env.json").get("starts")  # the first to be written: by it a folder is known to be a run's
        starts = [*(starts if isinstance(starts, list) else ()), environment(ready.run, device)]
        put(folder / "env.json", json.dumps({"schema": 1, "starts": starts}, indent=1) + "\n")
        put(folder / "run.toml", to_toml(to_tree(ready.run)))
        put(folder / "data.json", json.dumps(data, indent=1) + "\n")
        (folder / "checkpoints").mkdir(exist_ok=True)


def check_unchanged(folder: Path, run: RunSpec) -> None:
    """Refuses a folder that holds another run, or what may change in a run and not among equals: a longer schedule, other looks."""
    if (folder / "run.toml").exists():
        found = changes(filled(read_toml(folder / "run.toml")), to_tree(run))
        if unsafe := [one for one in found if within(one.field, FIGURES) or not within(one.field, SAFE)]:
            raise ChangedRunError(f"{folder} holds another run: {spelled(unsafe)}. Take another --output, or put it back", unsafe)


def filled(tree: Tree) -> Tree:
    """A run as it was written down, with what later versions added to it."""
    try:
        return to_tree(read_run(tree))
    except SpecError:  # they may have taken something away too
        return tree


def within(field: str, names: Iterable[str]) -> bool:
    """Whether a field is one of those named, or inside of one."""
    return any(field == name or field.startswith(f"{name}.") for name in names)


def refuse(folder: Path, unsafe: Sequence[Change]) -> None:
    if unsafe:
        advice = f"Take another --output, put it back, or say --override-resume {unsafe[0].field}"
        raise ChangedRunError(f"{folder} holds another run: {spelled(unsafe)}. {advice}", unsafe)


def spelled(found: Sequence[Change]) -> str:
    said = "; ".join(f"{field} was {quoted(old)} and is {quoted(new)}" for field, old, new in found[:3])
    return said + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def check_known(overridden: Sequence[str], run: Tree) -> None:
    """A field that is to be overridden must be one."""
    known = {".".join(one.field.split(".")[:i]) for one in changes({}, run) for i in range(1, 9)} | set(flat(CONTENTS))
    if wrong := [name for name in overridden if name not in known]:
        raise SpecError(f"--override-resume: a run has no field {quoted(wrong[0])}{nearest(wrong[0], known)}")


def changes(old: Tree, new: Tree) -> Iterator[Change]:
    """Every field that differs between two runs: its path, and both values."""
    before, after = flat(old), flat(new)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield Change(name, before.get(name), after.get(name))


def flat(tree: Tree, path: str = "") -> Tree:
    """Every leaf by its path."""
    found: Tree = {}
    for name, value in tree.items():
        found |= flat(value, f"{path}{name}.") if isinstance(value, dict) and value else {f"{path}{name}": value}
    return found


CONTENTS: Tree = {"data": {"rows": "", "unseen": "", "links": "", "classes": ""}, "tokenizer": {"ids": ""}}
DATA_SCHEMA = 2  # of data.json; the first had no number, and no hash of links, of classes, and of most rows
LOOKED_AT = 4096  # rows that were hashed then, beside all lengths
AT_ONCE = 4096  # arrays that are joined before they are hashed: one call a row would take longer than its ids


def contents(ready: Ready) -> Tree:
    """Hashes of what a run learns from: a file may have been changed under the same name."""
    links = [array for guide in sorted(ready.links) for array in (np.array([*map(len, ready.links[guide])]), *ready.links[guide])]
    data = {
        "rows": hash_of(ready.rows),
        "unseen": hash_of(ready.unseen),
        "links": hashed(json.dumps(sorted(ready.links)), links) if links else "",
        "classes": hashed(json.dumps(ready.labels)) if ready.labels else "",
    }
    return {"schema": DATA_SCHEMA, "data": data, "tokenizer": {"ids": fingerprint(ready.tokenizer)[:16] if ready.tokenizer else ""}}


def hash_of(rows: Ids) -> str:
    """Of every id; those of prepared rows are hashed already, and were compared with their files when these were opened."""
    if isinstance(rows, Cut):
        return hashed(json.dumps([rows.most, hash_of(rows.rows)]))
    if isinstance(rows, Rows):
        return hashed(json.dumps([rows.fields, read_index(rows.folder.parent)["splits"][rows.folder.name]], sort_keys=True))
    lengths = (rows.lengths(name) for name in rows.fields)
    return hashed(json.dumps([len(rows), rows.fields]), chain(lengths, chain.from_iterable(rows[i] for i in range(len(rows)))))


def hashed(said: str, arrays: Iterable[np.ndarray] = ()) -> str:
    digest, each = hashlib.sha256(said.encode()), iter(arrays)
    while some := [array.tobytes() for array in islice(each, AT_ONCE)]:
        digest.update(b"".join(some))
    return digest.hexdigest()[:16]


def as_written(seen: Tree, ready: Ready, data: Tree) -> Tree:
    """What a run learns from, in the form that an earlier start of it wrote down."""
    if seen.get("schema") == DATA_SCHEMA:
        return data
    if "schema" in seen:
        raise RunError(f"data.json of this run has schema {quoted(seen['schema'])}, and this version knows {DATA_SCHEMA}")
    return {"data": {"rows": hash_of_some(ready.rows), "unseen": hash_of_some(ready.unseen)}, "tokenizer": data["tokenizer"]}


def hash_of_some(rows: Ids) -> str:
    """As the first data.json has it: of all lengths, and of the ids of some rows."""
    digest = hashlib.sha256(str(len(rows)).encode())
    for name in rows.fields:
        digest.update(np.ascontiguousarray(rows.lengths(name)).tobytes())
    for i in range(0, len(rows), max(1, len(rows) // LOOKED_AT)):
        for ids in rows[i]:
            digest.update(np.ascontiguousarray(ids).tobytes())
    return digest.hexdigest()[:16]


def environment(run: RunSpec, device: torch.device) -> Tree:
    """What a run ran on."""
    from manyheads import __version__

    return {
        "manyheads": __version__, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
        "platform": platform.platform(), "threads": torch.get_num_threads(), "device": str(device), "seed": run.seed,
        "command": sys.argv, "folder": os.getcwd(), "git": commit(), "started": time.time(),
    }  # fmt: skip


def commit() -> str | None:
    """Which commit of the user's own repository the run was started in."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or no repository here
        return None
    return done.stdout.strip() or None
