"""Small files of a run: written whole or not at all, and what cannot be said in one sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manyheads.convert.files import unwritable
from manyheads.data.prepared import flushed
from manyheads.spec import Tree


def put(path: Path, text: str) -> None:
    """Writes a small file whole or not at all."""
    draft = path.with_name(f"{path.name}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        flushed(draft)
        draft.replace(path)
        flushed(path.parent)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Says in one sentence that a folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise unwritable(Path(error.filename) if isinstance(error.filename, str) else folder, error) from None


def append(path: Path, data: bytes, *, make: bool) -> None:
    """Adds to a file, all or nothing; one that was taken away since is not made anew."""
    handle = os.open(path, os.O_WRONLY | (os.O_CREAT if make else 0), 0o666)
    try:
        end = os.lseek(handle, 0, os.SEEK_END)
        if os.write(handle, data) != len(data):
            os.ftruncate(handle, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(handle)


def read_object(path: Path) -> Tree:
    """What a file of JSON says; nothing where there is none, or where the one who wrote it did not get to the end."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def free(folder: Path) -> int:
    """How many bytes the disk has left."""
    return shutil.disk_usage(folder).free
