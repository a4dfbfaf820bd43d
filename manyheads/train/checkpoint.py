"""What a run keeps: folders that are there whole or not at all, each with the hashes of its files, and the newest sound one is taken."""

from __future__ import annotations

import errno
import json
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from manyheads.convert.files import FileError
from manyheads.convert.folder import Origin, fill_folder
from manyheads.convert.folder import save as save_tensors
from manyheads.convert.manifest import MANIFEST, MEMORY, TRAINER, sha256, unsound
from manyheads.data.prepared import flushed
from manyheads.model.build import Model
from manyheads.spec import quoted
from manyheads.train.files import free, put
from manyheads.train.lora import TRAINED, adapters, merged
from manyheads.train.run import GoalSpec
from manyheads.train.state import State

NAME = re.compile(r"step-(\d{8})")
PHASE: Callable[[str], None] = lambda name: None  # noqa: E731  (tests stop here)
ROOM = 1.1  # of the last checkpoint's size must be free before another is begun
ASIDE = "was"  # in the name of a checkpoint while another of the same step takes its place
SMALL_FILES = 1 << 16  # a tokenizer, headers, and the like, where nothing is known yet


def save(
    folder: Path, state: State, model: Model, optimiser: torch.optim.Optimizer, origin: Origin, tokenizer: Any, keep: int, *,
    best: bool = False, also: Callable[[Path], None] = lambda draft: None,
) -> Path:  # fmt: skip
    """Writes a checkpoint beside its place, with whatever `also` adds, then moves it there; older ones go only after that.

    Any OSError leaves all as it was.
    """
    final = folder / f"step-{state.step:08}"
    draft, old = (folder / f"{final.name}.{role}-{uuid.uuid4().hex[:8]}" for role in ("tmp", ASIDE))
    check_room(folder, model)
    check_finite(model)
    try:
        draft.mkdir()
        PHASE("begun")
        fill_folder(draft, merged(model), origin, tokenizer)
        also(draft)
        PHASE("weights")
        save_tensors(moments(model, optimiser), draft / MEMORY)
        (draft / TRAINER).write_text(json.dumps(state.to_tree()), encoding="utf-8")
        PHASE("state")
        found = sorted(path for path in draft.rglob("*") if path.is_file())
        files = {path.relative_to(draft).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in found}
        (draft / MANIFEST).write_text(json.dumps({"schema": 1, "files": files}, indent=1), encoding="utf-8")
        for path in (*draft.rglob("*"), draft):
            flushed(path)
        PHASE("manifest")
        if final.exists():  # of this very step: it was not sound, or more is known of it now
            final.rename(old)
            PHASE("set aside")
        draft.rename(final)
        flushed(folder)
        PHASE("renamed")
    except BaseException:
        if old.exists() and not final.exists():
            old.rename(final)
        for path in (draft, old):
            shutil.rmtree(path, ignore_errors=True)
        raise
    point(folder, "latest", final)
    if best:
        point(folder, "best", final)
    PHASE("latest")
    purge(folder, keep)
    return final


def point(folder: Path, name: str, checkpoint: Path) -> None:
    """Says which checkpoint is the latest, or the best, for those who load the run."""
    put(folder / name, checkpoint.name)


def pointed(folder: Path, name: str) -> Path | None:
    """The checkpoint that is the latest, or the best, if it is there."""
    try:
        found = (folder / name).read_text(encoding="utf-8", errors="replace")[:100]
    except OSError:
        return None
    return folder / found if NAME.fullmatch(found) and (folder / found).is_dir() else None


def mend(folder: Path, state: State, goal: GoalSpec | None) -> str | None:
    """Points to the best as the state knows it: a run may have been killed before it could, or have gone back behind a better one.

    Where that is lost the next look is the best, and it is said why; where looks are not compared by that any more, there is none.
    """
    if goal is None or goal.metric != state.metric:
        state.forget_best()
    best = folder / f"step-{state.best_step:08}"
    fault = unsound(best) if state.best_step else None
    if state.best_step and fault is None:
        point(folder, "best", best)
        return None
    (folder / "best").unlink(missing_ok=True)
    if fault:
        state.forget_best(state.metric)
    return fault and f"{fault}: the best checkpoint is lost, and the next look is compared with none"


def purge(folder: Path, keep: int) -> None:
    """Removes what is not needed any more: neither one of the newest, nor the best, nor the last whose update was finite."""
    sweep(folder)
    old = steps(folder)[keep:]
    kept = {pointed(folder, "best"), next((path for path in steps(folder) if not skipped(path)), None)} if old else set()
    for path in old:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def skipped(checkpoint: Path) -> bool:
    """Whether the weights of a checkpoint had just been found to give a NaN or an infinite loss or gradient."""
    try:
        return bool(json.loads((checkpoint / TRAINER).read_text(encoding="utf-8"))["skipped"])
    except (OSError, ValueError, KeyError, TypeError):
        return True


def sweep(folder: Path) -> None:
    """Removes what a save left that did not end, and puts back what it had set aside; the run's lock is ours, so nobody is at it."""
    for path in folder.glob(f"step-*.{ASIDE}-*"):
        final = path.with_suffix("")
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(final)
    for path in folder.glob("*.tmp*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def size_of(folder: Path, model: Model) -> int:
    """How many bytes a checkpoint takes: as many as the last one, or, before there is one, the weights, twice as much for AdamW, a rest."""
    for path in steps(folder)[:1]:
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return SMALL_FILES + 3 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def check_room(folder: Path, model: Model) -> None:
    """Rather than to begin what cannot be ended."""
    needed, there = int(ROOM * size_of(folder, model)), free(folder)
    if there < needed:
        raise OSError(errno.ENOSPC, f"{there:,} bytes are free, and a checkpoint takes {needed:,}", str(folder))


def check_finite(model: Model) -> None:
    """Weights that are NaN or infinite are not worth a place, least of all that of finite ones."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise NotFiniteError(f"{name} holds NaN or infinity")


class NotFiniteError(ValueError):
    """Weights that are lost."""


def moments(model: Model, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimiser remembers, by the names of the weights."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return found


def restore(checkpoint: Path, model: Model, optimiser: torch.optim.Optimizer) -> State:
    """Weights, the optimiser's memory, and where the run was."""
    ours, whole = dict(model.named_parameters()), not adapters(model)
    weights = load_file(checkpoint / ("model.safetensors" if whole else TRAINED))
    held = load_file(checkpoint / MEMORY)
    ours = {name: parameter for name, parameter in ours.items() if whole or parameter.requires_grad}
    if set(weights) != set(ours):
        raise FileError(f"{checkpoint} holds another model: {sorted(set(weights) ^ set(ours))[0]}")
    with torch.no_grad():
        for name, parameter in ours.items():
            if weights[name].shape != parameter.shape:
                was, now = ("×".join(map(str, one.shape)) for one in (weights[name], parameter))
                raise FileError(f"{checkpoint} holds another model: {name} is {was} there, and {now} here")
            parameter.copy_(weights[name])
    for name, value in held.items():
        weight, _, key = name.rpartition("/")
        optimiser.state[ours[weight]][key] = value.to(ours[weight].device)
    return State.from_tree(json.loads((checkpoint / TRAINER).read_text(encoding="utf-8")))


def steps(folder: Path) -> list[Path]:
    """All checkpoints, the newest step first."""
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda path: path.name, reverse=True)


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint, and what was wrong with newer ones; none sound although there are some, or were, is an error."""
    sweep(folder)
    wrong = lost(folder)
    for path in steps(folder):
        fault = unsound(path)
        if fault is None:
            point(folder, "latest", path)  # a run may have been killed between the two
            return path, wrong
        wrong.append(fault)
    if wrong:
        raise FileError(f"no checkpoint of this run is sound, and it is not begun again over them: {wrong[0]}")
    return None, []


def lost(folder: Path) -> list[str]:
    """That the latest checkpoint is gone, if it is: a run that had one does not begin again as if it had none."""
    place = folder / "latest"
    if pointed(folder, "latest") or not place.exists():
        return []
    return [f"{place} names {quoted(place.read_text(encoding='utf-8', errors='replace')[:100])}, which is not there"]


def chosen(folder: Path, wanted: Path) -> Path:
    """A checkpoint that the user named, of this run."""
    sweep(folder)
    path = next((place for place in (wanted, folder / wanted) if place.exists()), wanted)
    known = [one for one in steps(folder) if path.exists() and one.samefile(path)]
    if not known:
        there = ", ".join(one.name for one in steps(folder)) or "none"
        raise FileError(f"{wanted} is no checkpoint of this run (there: {there})")
    if fault := unsound(known[0]):
        raise FileError(fault)
    return known[0]


def set_aside(folder: Path, checkpoint: Path) -> list[str]:
    """Keeps checkpoints that are newer than one under another name, and says so."""
    said = []
    for newer in [path for path in steps(folder) if path.name > checkpoint.name]:
        aside = next(place for i in range(1, 10**6) if not (place := folder / f"aside-{i}-{newer.name}").exists())
        newer.rename(aside)
        said.append(f"{newer} is newer, and is kept as {aside.name}")
    point(folder, "latest", checkpoint)
    return said
