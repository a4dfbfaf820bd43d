"""Downloads checkpoints from the Hugging Face Hub, by their name and with huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path

from manyheads.convert.hf import EXTRA_FILES
from manyheads.errors import PathNotFoundError

WORD = r"[A-Za-z0-9](?:[\w.-]{0,94}[\w])?"  # starts with a letter or digit, and does not end with a dot
NAME = re.compile(rf"{WORD}/{WORD}(@{WORD}(/{WORD}){{0,3}})?", re.ASCII)
# a name with such an ending is a missing file, not a repository
FILE_SUFFIXES = (".gguf", ".pt", ".safetensors", ".toml", ".bin", ".git")
# the files that are downloaded, without code and without weights in other formats
DOWNLOADED = (
    "config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json",
    "*_Pooling/config.json", *EXTRA_FILES,
)  # fmt: skip


def is_name(text: str) -> bool:
    """Whether a text is OWNER/NAME or OWNER/NAME@REVISION, rather than a path."""
    is_allowed = ".." not in text and "--" not in text and not text.endswith(FILE_SUFFIXES)
    return is_allowed and NAME.fullmatch(text) is not None


def download(name: str) -> Path:
    """Downloads a repository and returns its folder in the cache of huggingface_hub."""
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
        raise PathNotFoundError(
            f"{name} is not a folder", hint="to download it from the Hub, pip install 'manyheads[hf]'"
        ) from None
    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(DOWNLOADED)))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise PathNotFoundError(f"{name} is neither a folder nor a public model on the Hub") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise PathNotFoundError(f"{name} is not a folder, and its download from the Hub failed: {reason}") from None
