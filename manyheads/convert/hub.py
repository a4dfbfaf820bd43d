"""Checkpoints by their name on the Hugging Face Hub: fetched only when somebody gives such a name, and only through huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path

from manyheads.convert.files import FileError
from manyheads.convert.folder import BESIDE
from manyheads.spec import one_line

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,100})?", re.ASCII)
# what a folder is read from; weights in other forms, and code, stay where they are
WANTED = ("config.json", "model*.safetensors", "model.safetensors.index.json", "modules.json", "*_Pooling/config.json", *BESIDE)


def is_name(text: str) -> bool:
    """Whether this is OWNER/NAME, or OWNER/NAME@REVISION, and no path."""
    return NAME.fullmatch(text) is not None and ".." not in text


def fetched(name: str) -> Path:
    """The folder that the hub's own library keeps a copy in."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise FileError(f"there is no folder {name}; to fetch it from the Hub, pip install 'manyheads[hf]'") from None
    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(WANTED)))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise FileError(f"there is no folder {name}, and no such model on the Hub that may be read") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise FileError(one_line(f"there is no folder {name}, and it could not be fetched from the Hub: {error}")) from None
