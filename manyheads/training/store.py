"""Saves the checkpoints of a run atomically, with hashes of their files, and restores the newest valid one."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

from manyheads.convert.hf import CheckpointMetadata, check_finite_weight, fill_folder, native_metadata, save_tensors
from manyheads.errors import (
    CheckpointConfigError,
    CheckpointNotFoundError,
    CorruptFileError,
    PathNotFoundError,
    WeightsError,
)
from manyheads.files.manifest import MANIFEST, OPTIMIZER, TRAINER, verify_manifest
from manyheads.files.read import MAX_CONFIG_BYTES, read_bytes, read_json, read_json_or_empty, sha256
from manyheads.files.tensors import SafetensorsFile
from manyheads.files.tokenizer import copy_tokenizer
from manyheads.files.write import free_bytes, fsync_path, write_atomic
from manyheads.model.builder import Model, build_meta
from manyheads.spec import Tree, quote, shorten, to_toml, to_tree
from manyheads.training.lora import TRAINED, adapter_names, merge_lora, trained_tensors, write_adapter
from manyheads.training.optim import ema_weights
from manyheads.training.preparation import PreparedRun
from manyheads.training.run import BestSpec

SCHEMA = 2  # version of trainer.json
NAME = re.compile(r"step-(\d{8})")
# in the name of a checkpoint that is being written or removed, or that is being replaced by one of the same step
STAGING, REPLACED = "tmp", "old"
LEFTOVER = re.compile(rf"(step-\d{{8}})\.({STAGING}|{REPLACED})-[0-9a-f]{{8}}")
SAVED_RUN = "saved_run.toml"  # in each checkpoint, the settings of the run when it was saved
DISK_MARGIN = 1.1  # the free space a checkpoint needs, relative to its size
DEFAULT_POSITIONS = 2048  # positions of an exported model without a limit of its own, if it was trained on no more
SMALL_FILES = 1 << 16  # bytes of tokenizer, config and so on, assumed until a checkpoint exists


@dataclass
class TrainState:
    """Where a run is: everything a checkpoint holds besides weights and optimizer state. Counts are over the whole run.

    The order of rows, dropout and masking are functions of this state and the seed, so no random state needs saving.
    """

    step: NonNegativeInt = 0
    epoch: NonNegativeInt = 0
    batch_index: NonNegativeInt = 0  # index of the next batch in the epoch
    rows: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    consecutive_skips: NonNegativeInt = 0  # steps in a row whose loss or gradients were NaN or infinite
    evaluated_step: NonNegativeInt = 0
    metrics: dict[str, float | None] = field(default_factory=dict)  # of that evaluation; None for NaN or infinity
    best_metric: str = ""  # name of the metric by which evaluations are compared
    best_value: float | None = None
    best_step: NonNegativeInt = 0
    evaluations_since_best: NonNegativeInt = 0
    init_hash: str = ""  # hash of the checkpoint that the weights were initialized from

    def add_evaluation(self, metrics: dict[str, float], best: BestSpec | None) -> bool:
        """Stores the metrics; returns whether they are better than the best checkpoint's, if train.best is given."""
        self.evaluated_step = self.step
        self.metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        if best is None:
            return False
        if self.best_metric != best.metric:
            self.reset_best(best.metric)
        value = self.metrics[best.metric]
        improved = value is not None and (self.best_value is None or best.is_better(value, self.best_value))
        self.evaluations_since_best = 0 if improved else self.evaluations_since_best + 1
        return improved

    def as_best(self) -> TrainState:
        return replace(self, best_value=self.metrics[self.best_metric], best_step=self.step)

    def reset_best(self, metric: str = "") -> None:
        self.best_metric, self.best_value, self.best_step, self.evaluations_since_best = metric, None, 0, 0

    def stop_reason(self, best: BestSpec | None) -> str | None:
        """Returns which field of train.best ends the run after this evaluation, or None."""
        if best is None or self.evaluated_step != self.step or self.best_metric != best.metric:
            return None
        value = self.metrics[best.metric]
        if value is not None and best.is_reached(value):
            return "stop_at"
        return "patience" if best.patience is not None and self.evaluations_since_best >= best.patience else None

    def to_tree(self) -> Tree:
        return {"schema": SCHEMA} | asdict(self)

    @classmethod
    def from_tree(cls, tree: Tree) -> TrainState:
        """Reads what `to_tree` gives; a missing field has its default."""
        values = {name: value for name, value in tree.items() if name != "schema"}
        unknown = sorted(values.keys() - {f.name for f in fields(cls)})
        if tree.get("schema") != SCHEMA or unknown:
            is_other = tree.get("schema") != SCHEMA
            problem = f"schema {quote(tree.get('schema'))}" if is_other else f"an unknown field {quote(unknown[0])}"
            raise CheckpointConfigError(f"{TRAINER} has {problem}; this version reads schema {SCHEMA}")
        try:
            return TypeAdapter(cls).validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise CheckpointConfigError(f"{TRAINER} has a wrong {first['loc'][0]}: {quote(first['input'])}") from None


# ------------------------------------------------------------------------------------------------------------- saving


def save(
    folder: Path,
    state: TrainState,
    *,
    is_best: bool,
    run: PreparedRun,
    model: Model,
    optimizer: torch.optim.Optimizer,
    metadata: CheckpointMetadata,
    tokenizer: Any,
    adapter: dict[str, str],
) -> Path:
    """Writes a checkpoint into a staging folder, renames it, and only then removes old ones.

    An error leaves every earlier checkpoint as it was. For LoRA, the saved weights are merged, and `adapter` has the
    names for PEFT.
    """
    final = folder / f"step-{state.step:08}"
    staging, old = (temporary_path(final, role) for role in (STAGING, REPLACED))
    check_disk_space(folder, model)
    try:
        with ema_weights(optimizer):
            for name, parameter in model.named_parameters():
                check_finite_weight(name, parameter)
            staging.mkdir()
            merged_model = merge_lora(model) if run.spec.lora else model
            fill_folder(staging, merged_model, metadata, tokenizer, shard_bytes=math.inf)
            if run.spec.lora:
                write_adapter(staging, model, run.spec.lora, base=str(run.spec.init_from), names=adapter)
            save_tensors(optimizer_tensors(model, optimizer), staging / OPTIMIZER)
        (staging / TRAINER).write_text(json.dumps(state.to_tree()), encoding="utf-8")
        (staging / SAVED_RUN).write_text(to_toml(to_tree(run.spec)), encoding="utf-8")
        write_manifest(staging)
        for path in (*staging.rglob("*"), staging):
            fsync_path(path)
        if final.exists():  # a checkpoint of the same step was invalid, or lacked an evaluation
            final.rename(old)
        staging.rename(final)
        fsync_path(folder)
    except BaseException:
        if old.exists() and not final.exists():
            old.rename(final)
        for path in (staging, old):
            shutil.rmtree(path, ignore_errors=True)
        raise
    write_atomic(folder / "latest", final.name)
    if is_best:
        write_atomic(folder / "best", final.name)
    remove_old_checkpoints(folder, run.spec.train.keep_last)
    return final


def write_manifest(staging: Path) -> None:
    paths = sorted(path for path in staging.rglob("*") if path.is_file())
    files = {
        path.relative_to(staging).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths
    }
    (staging / MANIFEST).write_text(json.dumps({"schema": 1, "files": files}, indent=1), encoding="utf-8")


def check_disk_space(folder: Path, model: Model) -> None:
    needed_bytes, free = int(DISK_MARGIN * checkpoint_bytes(folder, model)), free_bytes(folder)
    if free < needed_bytes:
        raise OSError(errno.ENOSPC, f"{free:,} bytes are free and a checkpoint needs {needed_bytes:,}", str(folder))


def checkpoint_bytes(folder: Path, model: Model) -> int:
    """Returns the size of the last checkpoint; before the first, of the weights and two moments of AdamW."""
    for path in list_checkpoints(folder)[:1]:
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return SMALL_FILES + 3 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def optimizer_tensors(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the optimizer state by PARAMETER/KEY."""
    return {
        f"{name}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def remove_old_checkpoints(folder: Path, keep_last: int) -> None:
    """Removes all checkpoints except the newest ones, the best, and the newest whose last step was finite.

    One that is removed is renamed first, so that `load` sees either all of its files or none.
    """
    remove_leftovers(folder)
    old = list_checkpoints(folder)[keep_last:]
    keep = {read_pointer(folder, "best"), newest_finite(folder)} if old else set()
    for path in old:
        if path not in keep and not path.is_symlink():
            with suppress(OSError):
                shutil.rmtree(path.rename(temporary_path(path, STAGING)))


def newest_finite(folder: Path) -> Path | None:
    """Returns the newest checkpoint whose last step was not skipped, so its weights gave finite loss and gradients."""
    finite = (
        path for path in list_checkpoints(folder) if read_json_or_empty(path / TRAINER).get("consecutive_skips") == 0
    )
    return next(finite, None)


def temporary_path(checkpoint: Path, role: str) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.{role}-{uuid.uuid4().hex[:8]}")


def remove_leftovers(folder: Path) -> None:
    """Removes the folder of a killed save, and restores the checkpoint it was replacing. Needs the run's lock."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        match = LEFTOVER.fullmatch(path.name)
        if not match or not path.is_dir() or path.is_symlink():
            continue
        final = folder / match[1]
        if match[2] == REPLACED and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)


# ------------------------------------------------------------------------------------------------- finding checkpoints


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns all checkpoints of a run, newest step first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if NAME.fullmatch(path.name) and path.is_dir()), reverse=True)


def read_pointer(folder: Path, name: str) -> Path | None:
    """Returns the checkpoint that `latest` or `best` names, or None if it does not exist."""
    target = pointer_target(folder / name)
    return folder / target if NAME.fullmatch(target) and (folder / target).is_dir() else None


def pointer_target(pointer: Path) -> str:
    """Returns the text of a pointer, or nothing if it cannot be read or is too long for the name of a checkpoint."""
    try:
        return read_bytes(pointer, 100).decode(errors="replace").strip()
    except (OSError, CorruptFileError):
        return ""


def find_resume_checkpoint(folder: Path, resume: str) -> tuple[Path | None, list[str]]:
    """Returns the checkpoint from which a run resumes, or None for a new run, and why newer ones are not used."""
    if resume in ("auto", "never"):
        return newest_valid(folder)
    checkpoint = find_checkpoint(folder, Path(resume))
    if fault := verify_manifest(checkpoint):
        raise CorruptFileError(fault)
    return checkpoint, []


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """Returns the newest checkpoint with intact files, or None if there never was one, and why newer ones are not used.

    Raises if there are, or were, checkpoints and none is valid, because a run must not silently start again.
    """
    latest, warnings = folder / "latest", list[str]()
    if latest.exists() and not read_pointer(folder, "latest"):
        warnings.append(f"{latest} names {quote(pointer_target(latest))}, which does not exist")
    for path in list_checkpoints(folder):
        fault = verify_manifest(path)
        if fault is None:
            return path, warnings
        warnings.append(fault)
    if warnings:
        raise CorruptFileError(
            f"{folder} has no valid checkpoint: {warnings[0]}", hint="use another --output to start again"
        )
    return None, []


def find_checkpoint(folder: Path, name: Path) -> Path:
    """Returns the checkpoint of this run that the user named, by its path or its name."""
    path = next((path for path in (name, folder / name) if path.exists()), None)
    match = next((checkpoint for checkpoint in list_checkpoints(folder) if path and checkpoint.samefile(path)), None)
    if match is None:
        names = ", ".join(checkpoint.name for checkpoint in list_checkpoints(folder)) or "none"
        error_type = CheckpointNotFoundError if path else PathNotFoundError
        raise error_type(f"{name} is not a checkpoint of this run (it has: {names})")
    return match


def rename_newer_checkpoints(folder: Path, checkpoint: Path) -> list[str]:
    """Renames all checkpoints newer than this one, and returns what was renamed."""
    warnings = []
    for newer in [path for path in list_checkpoints(folder) if path.name > checkpoint.name]:
        new_path = next(path for i in range(1, 10**6) if not (path := folder / f"aside-{i}-{newer.name}").exists())
        newer.rename(new_path)
        warnings.append(f"{newer} is newer; it is kept as {new_path.name}")
    return warnings


# ---------------------------------------------------------------------------------------- the contents of a checkpoint


def saved_tokenizer(run: PreparedRun) -> Any:
    """Returns the tokenizer of checkpoints, which adds the task's special tokens and truncates as the run does."""
    if run.tokenizer is None:
        return None
    from tokenizers import processors

    tokenizer = copy_tokenizer(run.tokenizer)
    if run.special_tokens.prefix_suffix_ids is None:
        special_tokens = [("<s>", run.special_tokens.bos), ("</s>", run.special_tokens.eos)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=run.spec.task.template, special_tokens=special_tokens
        )
    if run.max_length is not None and not run.spec.task.eval_in_windows:
        tokenizer.enable_truncation(run.max_length)
    return tokenizer


def run_metadata(run: PreparedRun) -> CheckpointMetadata:
    """Adds special tokens, classes and task to the config of the initial checkpoint, and keeps its files."""
    initial = run.init_checkpoint
    # a new model, because one with LoRA has other parameters than the merged one that is saved
    metadata = native_metadata(build_meta(run.model_spec), initial.metadata if initial else None)
    special_tokens, labels = run.special_tokens, {str(i): name for i, name in enumerate(run.labels)}
    roles = {
        "pad": special_tokens.pad,
        "bos": special_tokens.bos,
        "eos": special_tokens.eos,
    }
    if run.model_spec.has_source:
        roles["decoder_start"] = special_tokens.decoder_prompt_ids[0]
    inherited_config = {key: value for key, value in metadata.config.items() if key != "problem_type" or not labels}
    config = dict(inherited_config)
    if run.tokenizer is not None:
        config |= {f"{role}_token_id": token for role, token in roles.items()}
    if run.max_length is not None and run.max_length > DEFAULT_POSITIONS:
        config["max_position_embeddings"] = run.max_length
    if initial:
        config |= {key: value for key, value in inherited_config.items() if value is not None}
    if labels:
        config |= {"id2label": labels, "label2id": {name: i for i, name in enumerate(run.labels)}}
    config |= {"task": to_tree(run.spec.task)} | ({"family": run.family} if run.family else {})
    return replace(metadata, config=config, extra_files=saved_files(run, dict(metadata.extra_files)))


def saved_files(run: PreparedRun, files: dict[str, bytes]) -> dict[str, bytes]:
    # a tokenizer that manyheads trained has no family, and reads special tokens in a text as plain text
    if run.special_tokens.prefix_suffix_ids is None:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True}
        settings |= special_token_names(run) if run.tokenizer is not None else {}
        settings |= {} if run.max_length is None else {"model_max_length": run.max_length}
        files["tokenizer_config.json"] = json.dumps(settings).encode() + b"\n"
        files.pop("tokenizer.json", None)
    elif "tokenizer.json" in files and (truncation := json.loads(saved_tokenizer(run).to_str())["truncation"]):
        tokenizer = json.loads(files["tokenizer.json"]) | {"truncation": truncation}
        files["tokenizer.json"] = json.dumps(tokenizer, ensure_ascii=False).encode()
    return files


def special_token_names(run: PreparedRun) -> dict[str, str]:
    """Returns the special tokens as tokenizer_config.json has them, so that other libraries can pad and mask."""
    special = run.special_tokens
    ids = {"pad": special.pad, "bos": special.bos, "eos": special.eos, "unk": special.unk, "mask": special.mask}
    names = {role: run.tokenizer.id_to_token(token) for role, token in ids.items() if token >= 0}
    return {f"{role}_token": name for role, name in names.items() if name is not None}


def checkpoint_writer(
    run: PreparedRun, model: Model, optimizer: torch.optim.Optimizer, folder: Path
) -> Callable[..., Path]:
    """Returns a function (state, is_best=…) that saves a checkpoint of this run."""
    return partial(
        save,
        folder,
        run=run,
        model=model,
        optimizer=optimizer,
        metadata=run_metadata(run),
        tokenizer=saved_tokenizer(run),
        adapter=adapter_names(model, run.family)[0] if run.spec.lora else {},
    )


# ---------------------------------------------------------------------------------------------------------- restoring


def restore(checkpoint: Path, model: Model, optimizer: torch.optim.Optimizer, *, lora: bool = False) -> TrainState:
    """Loads weights and optimizer state in place, and returns the training state."""
    state, parameters = trained_tensors(model) if lora else model.state_dict(), dict(model.named_parameters())
    weights = dict(SafetensorsFile(checkpoint / (TRAINED if lora else "model.safetensors"), copy=True))
    if unmatched_names := sorted(weights.keys() ^ state.keys()):
        name = shorten(unmatched_names[0])
        raise WeightsError(f"{checkpoint} does not match this model: {name} is in only one of them")
    for name, tensor in state.items():
        if weights[name].shape != tensor.shape:
            shapes = (" × ".join(map(str, side.shape)) for side in (weights[name], tensor))
            raise WeightsError(f"{checkpoint} does not match this model: {name} has shape {', not '.join(shapes)}")
    model.load_state_dict(weights, strict=False)
    for name, value in SafetensorsFile(checkpoint / OPTIMIZER, copy=True).items():
        owner, _, key = name.rpartition("/")
        parameter = parameters.get(owner)
        if parameter is None or not value.is_floating_point() or value.numel() > parameter.numel():
            raise WeightsError(f"{checkpoint / OPTIMIZER} does not match this model: {quote(name)}")
        optimizer.state[parameter][key] = value.to(parameter.device)
    return TrainState.from_tree(read_json(checkpoint / TRAINER, MAX_CONFIG_BYTES))


def repair_best(folder: Path, state: TrainState, best: BestSpec | None) -> str | None:
    """Makes the file `best` name the best checkpoint of the restored state; returns a message if that is lost.

    A run may have been killed before it wrote that file, or was resumed from a checkpoint before a better one.
    """
    if best is None or best.metric != state.best_metric:
        state.reset_best()
    checkpoint = folder / f"step-{state.best_step:08}"
    fault = verify_manifest(checkpoint) if state.best_step else None
    if state.best_step and not fault:
        write_atomic(folder / "best", checkpoint.name)
        return None
    (folder / "best").unlink(missing_ok=True)
    if fault:
        state.reset_best(state.best_metric)
        return f"{fault}: the best checkpoint is lost, and the next evaluation becomes the best"
    return None
