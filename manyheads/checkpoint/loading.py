"""Loads checkpoints in any supported format, and the best checkpoint of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.convert.fairseq.model import CHECKPOINT, read_fairseq
from manyheads.convert.gguf.model import read_gguf
from manyheads.convert.hf import name_in_errors, read_folder, read_tokenizer
from manyheads.convert.hub import download, is_name
from manyheads.convert.pooling import read_pooling
from manyheads.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    HashMismatchError,
    ManyheadsError,
    PathNotFoundError,
    UsageError,
)
from manyheads.files.manifest import TRAINER, verify_manifest
from manyheads.files.read import explain_read_errors, read_bytes, safe_join
from manyheads.model.builder import DTYPES, check_device
from manyheads.model.quantization import FORMATS as QUANTIZED
from manyheads.model.quantization import quantize_model
from manyheads.spec import quote

STORED = "stored"  # as `weights`: the blocks of a GGUF file
MAX_READS = 100  # attempts to read a checkpoint that a running `train` keeps replacing


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    allow_nonfinite: bool = False,
    copy: bool = False,
    verify: bool = False,
    weights: str | None = None,
) -> Checkpoint:
    """Loads a Hugging Face folder, OWNER/NAME on the Hub, a GGUF file, a run or a fairseq folder. Executes none of it.

    Weights in safetensors are memory-mapped, so the file must not change while the model is used, unless `copy` is set.
    With `verify`, the files of a run's checkpoint are compared with the hashes that the run saved. `weights` quantizes
    the matrices to "int8" or "int4", or keeps the blocks of a GGUF file, "stored": to predict, not to train or export.
    """
    if dtype not in (None, *DTYPES):
        raise UsageError(f"dtype is {quote(dtype)}, expected {', '.join(map(str, DTYPES))}, or None for the stored one")
    device = check_device(device)
    path = check_path(path)
    if not os.path.exists(path):
        if not is_name(str(path)) or os.path.isdir(path.parts[0]):  # a mistyped path is not downloaded from the Hub
            raise PathNotFoundError(f"no folder or file {path}")
        path = download(str(path))
    check_weights(weights, path, dtype, device)
    read = partial(
        read_checkpoint_at,
        dtype=dtype if weights is None else torch.float32,  # of norms and biases, with which the kernels compute
        allow_nonfinite=allow_nonfinite,
        copy=copy,
        verify=verify,
        keep_blocks=weights == STORED,
    )
    checkpoint = read_while_saved(path, read)
    if weights is not None:
        quantize_model(checkpoint.model, None if weights == STORED else weights)
    with name_in_errors(path):  # checked here, because they are read only where they are used
        _ = checkpoint.generation_settings, checkpoint.chat_template
    checkpoint.model.to(device)
    return checkpoint


def check_weights(weights: str | None, path: Path, dtype: torch.dtype | None, device: torch.device) -> None:
    """Raises if the weights of this path cannot be quantized as requested."""
    if weights not in (None, STORED, *QUANTIZED):
        raise UsageError(f"weights is {quote(weights)}, expected one of {', '.join((*QUANTIZED, STORED))}")
    if weights == STORED and path.suffix != ".gguf":
        raise UsageError(f"weights is {STORED!r}, but {path} is no GGUF file; use {' or '.join(QUANTIZED)}")
    if weights is not None and device.type != "cpu":
        raise UsageError(f"weights is {weights!r}, which is for a CPU, but the device is {device}")
    if weights is not None and dtype not in (None, torch.float32):
        raise UsageError(f"weights is {weights!r}, which computes in float32, but dtype is {dtype}")


def check_path(path: str | Path) -> Path:
    if not isinstance(path, str | Path) or not str(path):
        raise UsageError(f"given {quote(path)}, expected the path of a folder or a file")
    return Path(path)


def read_while_saved(path: Path, read: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Reads a checkpoint, and reads the next one if its run removed or replaced it meanwhile."""
    for _ in range(MAX_READS):
        with explain_read_errors(path):
            folder = checkpoint_dir(path)
            before = inode(folder)
            try:
                checkpoint = read(folder)
            except (ManyheadsError, OSError):
                if inode(folder) == before and checkpoint_dir(path) == folder:
                    raise
            else:
                if inode(folder) == before:
                    return checkpoint
    raise CheckpointError(f"{path} is replaced faster than it can be read", hint="raise train.save_every")


def inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def read_checkpoint_at(
    path: Path, *, dtype: torch.dtype | None, allow_nonfinite: bool, copy: bool, verify: bool, keep_blocks: bool
) -> Checkpoint:
    """Reads a checkpoint in any supported format."""
    from_run = (path / TRAINER).is_file()
    if verify and from_run and (fault := verify_manifest(path, optimizer=False)):
        raise HashMismatchError(f"{fault}; this checkpoint differs from the one that its run saved")
    if path.suffix == ".gguf" and not path.is_dir():
        model, metadata, tokenizer = read_gguf(
            path, dtype=dtype, allow_nonfinite=allow_nonfinite, keep_blocks=keep_blocks
        )
        return Checkpoint(model, tokenizer, metadata)
    if (path.suffix == ".pt" and not path.is_dir()) or os.path.lexists(path.joinpath(*CHECKPOINT)):
        model, metadata, tokenizer = read_fairseq(path, dtype=dtype, allow_nonfinite=allow_nonfinite)
        return Checkpoint(model, tokenizer, metadata)
    model, metadata = read_folder(path, dtype=dtype, allow_nonfinite=allow_nonfinite, copy=copy)
    tokenizer = read_tokenizer(path, metadata.extra_files, keep_truncation=from_run)
    pooling = read_pooling(metadata.extra_files) if "modules.json" in metadata.extra_files else None
    checkpoint = Checkpoint(model, tokenizer, metadata, pooling, path)
    if pooling and tokenizer is not None:
        pooling.configure(tokenizer, checkpoint.max_positions)
    return checkpoint


def checkpoint_dir(folder: Path) -> Path:
    """The best checkpoint of a run, or its latest if none was selected; other paths are returned unchanged."""
    checkpoints = folder / "checkpoints"
    paths = (checkpoints / "best", checkpoints / "latest")
    pointers = [path for path in paths if os.path.lexists(path) and not path.is_dir()]
    for pointer in pointers:
        target = safe_join(checkpoints, read_bytes(pointer, 100).decode(errors="replace").strip())
        if target.is_dir() or pointer == pointers[-1]:
            return target
    if (folder / "run.toml").is_file() and checkpoints.is_dir():
        raise CheckpointNotFoundError(f"the run {folder} has saved no checkpoint yet")
    return folder
