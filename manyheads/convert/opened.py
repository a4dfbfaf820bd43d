"""What stands at a path, whatever its form: a model, its tokenizer and where it came from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manyheads.convert.fairseq import CHECKPOINT, read_checkpoint, read_words
from manyheads.convert.files import FileError, inside
from manyheads.convert.folder import Origin, assembled, read_folder
from manyheads.convert.gguf_file import read_file
from manyheads.convert.hub import fetched, is_name
from manyheads.convert.manifest import TRAINER, unsound
from manyheads.convert.pooling import Pooling, read_pooling
from manyheads.convert.tokenizer import read_tokenizer
from manyheads.model.build import Model


@dataclass(frozen=True)
class Opened:
    """A model as it was found, with what stood beside it."""

    model: Model
    origin: Origin
    tokenizer: Any = None  # a tokenizers.Tokenizer, where there is one
    pooling: Pooling | None = None
    folder: Path | None = None  # of transformers' form, that it was read from


def opened(path: Path, *, dtype: torch.dtype | None = None, allow_nonfinite: bool = False, copy: bool = False) -> Opened:
    """A Hugging Face folder, a name on the Hub, a GGUF file, a run, a fairseq folder, each read by its own reader."""
    try:
        return _opened(path, dtype=dtype, allow_nonfinite=allow_nonfinite, copy=copy)
    except OSError as error:
        raise FileError(f"cannot read {error.filename or path}: {error.strerror or error}") from None


def _opened(folder: Path, *, dtype: torch.dtype | None, allow_nonfinite: bool, copy: bool) -> Opened:
    if not os.path.exists(folder):
        if not is_name(str(folder)) or os.path.isdir(folder.parts[0]):  # a slip in a path is no name on the Hub
            raise FileError(f"there is no folder {folder}")
        folder = fetched(str(folder))
    folder = checkpoint_of(folder)
    if folder.suffix == ".gguf" and not folder.is_dir():
        return Opened(*read_file(folder, dtype=dtype, allow_nonfinite=allow_nonfinite))
    if (folder.suffix == ".pt" and not folder.is_dir()) or folder.joinpath(*CHECKPOINT).is_file():
        path = folder.joinpath(*CHECKPOINT) if folder.is_dir() else folder
        config, weights = read_checkpoint(path)
        model, origin = assembled(path, config, weights, {}, dtype=dtype, allow_nonfinite=allow_nonfinite)
        return Opened(model, origin, None if path is folder else read_words(folder, config))
    own = (folder / TRAINER).is_file()  # the checkpoint of a run
    if own and (fault := unsound(folder, memory=False)):
        raise FileError(f"{fault}: this checkpoint is not what its run saved")
    model, origin = read_folder(folder, dtype=dtype, allow_nonfinite=allow_nonfinite, copy=copy)
    return Opened(model, origin, read_tokenizer(folder, origin.beside, cuts=own), read_pooling(folder), folder)


def checkpoint_of(folder: Path) -> Path:
    """Of a run the checkpoint that is the best, where it looked for one, or the latest; any other folder as it is."""
    places = folder / "checkpoints"
    for pointer in (places / "best", places / "latest"):
        if pointer.is_file():
            with pointer.open(encoding="utf-8", errors="replace") as file:
                return inside(places, file.read(100))
    if (folder / "run.toml").is_file() and places.is_dir():
        raise FileError(f"{folder} holds a run that has saved nothing yet; train it until it has")
    return folder
