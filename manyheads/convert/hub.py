"""Checkpoints by their name on the Hugging Face Hub: downloaded only for such a name, and only by huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path

from manyheads.convert.hf import EXTRA_FILES
from manyheads.errors import CheckpointNotFoundError

WORD = r"[A-Za-z0-9](?:[\w.-]{0,94}[\w])?"  # starts with a letter or digit, and does not end with a dot
NAME = re.compile(rf"{WORD}/{WORD}(@{WORD}(/{WORD}){{0,3}})?", re.ASCII)
FILE_SUFFIXES = (".gguf", ".pt", ".safetensors", ".toml", ".bin", ".git")  # of a path that does not exist
# what a folder is read from; weights in other formats, and code, are not downloaded
DOWNLOADED = (
    "config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json",
    "*_Pooling/config.json", *EXTRA_FILES,
)  # fmt: skip


def is_name(text: str) -> bool:
    """Whether this is OWNER/NAME or OWNER/NAME@REVISION, and not a path."""
    allowed = ".." not in text and "--" not in text and not text.endswith(FILE_SUFFIXES)
    return allowed and NAME.fullmatch(text) is not None


def download(name: str) -> Path:
    """The folder of the Hub's own cache."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise CheckpointNotFoundError(
            f"no folder {name}", hint="to download it from the Hub, pip install 'manyheads[hf]'"
        ) from None
    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(DOWNLOADED)))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise CheckpointNotFoundError(f"no folder {name}, and no public model of this name on the Hub") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointNotFoundError(f"no folder {name}, and the download from the Hub failed: {error}") from None
