"""Writing a folder so that it is there whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_free(folder: Path) -> None:
    if folder.exists():
        raise ValueError(f"{folder} exists already; name a folder that does not")


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """A draft beside the folder's final place, renamed at the end: what is interrupted leaves nothing under the final name."""
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        draft.mkdir()
        yield draft
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
