"""What a run keeps: folders that are there whole or not at all, each with the hashes of its files, and the newest sound one is taken."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyheads.convert.files import FileError
from manyheads.convert.folder import Origin, fill_folder
from manyheads.data.prepared import flushed, sha256
from manyheads.model.build import Model
from manyheads.spec import Tree
from manyheads.train.lora import TRAINED, adapters, merged

NAME = re.compile(r"step-(\d{8})")
PHASE: Callable[[str], None] = lambda name: None  # noqa: E731  (tests stop here)


def save(
    folder: Path, step: int, model: Model, optimiser: torch.optim.Optimizer, origin: Origin, tokenizer: Any, state: Tree, keep: int,
    also: Callable[[Path], None] = lambda draft: None,
) -> Path:  # fmt: skip
    """Writes a checkpoint beside its place, with whatever `also` adds, then moves it there; older ones go only after that."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08}"
    draft = folder / f"{final.name}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        draft.mkdir()
        PHASE("begun")
        fill_folder(draft, merged(model), origin, tokenizer)
        also(draft)
        PHASE("weights")
        save_file(moments(model, optimiser), draft / "optimizer.safetensors")
        (draft / "trainer.json").write_text(json.dumps({"schema": 1, "step": step} | state), encoding="utf-8")
        PHASE("state")
        found = sorted(path for path in draft.rglob("*") if path.is_file())
        files = {path.relative_to(draft).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in found}
        (draft / "manifest.json").write_text(json.dumps({"schema": 1, "files": files}, indent=1), encoding="utf-8")
        for path in (*draft.rglob("*"), draft):
            flushed(path)
        PHASE("manifest")
        if final.exists():
            shutil.rmtree(final)  # of this very step: it was not sound, or the run began again
        draft.rename(final)
        flushed(folder)
        PHASE("renamed")
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    point_to(final)
    PHASE("latest")
    for old in steps(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def point_to(checkpoint: Path) -> None:
    """Says which checkpoint those who load the run should take."""
    draft = checkpoint.parent / "latest.tmp"
    draft.write_text(checkpoint.name, encoding="utf-8")
    draft.replace(checkpoint.parent / "latest")


def moments(model: Model, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimiser remembers, by the names of the weights."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return found


def restore(checkpoint: Path, model: Model, optimiser: torch.optim.Optimizer) -> Tree:
    """Weights, the optimiser's memory, and where the run was."""
    ours, whole = dict(model.named_parameters()), not adapters(model)
    weights = load_file(checkpoint / ("model.safetensors" if whole else TRAINED))
    held = load_file(checkpoint / "optimizer.safetensors")
    ours = {name: parameter for name, parameter in ours.items() if whole or parameter.requires_grad}
    if set(weights) != set(ours):
        raise FileError(f"{checkpoint} holds another model: {sorted(set(weights) ^ set(ours))[0]}")
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(weights[name])
    for name, value in held.items():
        weight, _, key = name.rpartition("/")
        optimiser.state[ours[weight]][key] = value
    state: Tree = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    return state


def steps(folder: Path) -> list[Path]:
    """All checkpoints, the newest step first."""
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda path: path.name, reverse=True)


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint, and what was wrong with newer ones; none sound although there are some is an error."""
    if folder.is_dir():
        for path in folder.glob("step-*.tmp-*"):
            shutil.rmtree(path, ignore_errors=True)  # of a process that is gone: the run's lock is ours
    wrong: list[str] = []
    for path in steps(folder):
        fault = unsound(path)
        if fault is None:
            point_to(path)  # a run may have been killed between the two
            return path, wrong
        wrong.append(fault)
    if wrong:
        raise FileError(f"no checkpoint of this run is sound, and it is not begun again over them: {wrong[0]}")
    return None, []


def unsound(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by its own list of files."""
    try:
        listed = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["files"]
        for name, said in listed.items():
            path = checkpoint / name
            if not path.is_file() or path.stat().st_size != said["bytes"]:
                return f"{path} should have {said['bytes']:,} bytes"
            if sha256(path) != said["sha256"]:
                return f"{path} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{checkpoint / 'manifest.json'} is missing or broken"
    return None
