"""Checkpoints by their name on the Hugging Face Hub: fetched only when somebody gives such a name, and only through huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path

from manyheads.convert.files import FileError
from manyheads.convert.folder import BESIDE
from manyheads.spec import one_line

PIECE = r"[A-Za-z0-9](?:[\w.-]{0,94}[\w])?"  # begins with a letter or digit, ends with no dot
NAME = re.compile(rf"{PIECE}/{PIECE}(@{PIECE}(/{PIECE}){{0,3}})?", re.ASCII)
LOCAL = (".gguf", ".pt", ".safetensors", ".toml", ".bin", ".git")  # of files that somebody meant
# what a folder is read from; weights in other forms, and code, stay where they are
WANTED = (
    "config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "*_Pooling/config.json", *BESIDE,
)  # fmt: skip


def is_name(text: str) -> bool:
    """Whether this is OWNER/NAME, or OWNER/NAME@REVISION, and no path."""
    return NAME.fullmatch(text) is not None and ".." not in text and "--" not in text and not text.endswith(LOCAL)


def fetched(name: str) -> Path:
    """The folder that the hub's own library keeps a copy in."""
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
        raise FileError(f"there is no folder {name}; to fetch it from the Hub, pip install 'manyheads[hf]'") from None
    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(WANTED)))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise FileError(f"there is no folder {name}, and no such model on the Hub that may be read") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise FileError(one_line(f"there is no folder {name}, and it could not be fetched from the Hub: {error}")) from None
