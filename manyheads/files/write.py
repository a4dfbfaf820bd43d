"""Writes files completely or not at all, and reports disk errors in one sentence."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manyheads.errors import ManyheadsError, OutOfDiskError, OutputError, OutputExistsError

# the disk is full, the user's quota is reached, or the file is too large
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_error(target: Path, error: OSError) -> ManyheadsError:
    kind = OutOfDiskError if error.errno in DISK_FULL else OutputError
    return kind(f"cannot write {target}: {error.strerror or error}")


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turns an OSError into an OutputError or an OutOfDiskError."""
    try:
        yield
    except OSError as error:
        raise write_error(Path(error.filename) if isinstance(error.filename, str) else folder, error) from None


@contextmanager
def atomic_output(target: Path) -> Iterator[Path]:
    """Yields a path for a temporary file or folder, which is renamed to `target` at the end of the block."""
    check_absent(target)
    new_folders = [folder for folder in target.parents if not os.path.exists(folder)]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=target.parent, ignore_cleanup_errors=True) as parent:
            temporary = Path(parent) / "draft"
            yield temporary
            check_absent(target)  # another process may have been faster
            temporary.rename(target)
    except OSError as error:
        raise write_error(target, error) from None
    finally:
        for folder in new_folders:
            with suppress(OSError):  # not empty: the output is in it
                folder.rmdir()


def check_absent(target: Path, *, hint: str = "name a path that does not exist") -> None:
    """Raises if a path exists, even as a dangling link, or if no file can have this path."""
    try:
        target.lstat()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {target}: {getattr(error, 'strerror', error)}") from None
    raise OutputExistsError(f"{target} already exists", hint=hint)


def check_new_file(path: Path, *, force: bool = False, hint: str = "name a path that does not exist") -> None:
    """Raises if a file cannot be written at this path, before the work for it; with `force` it may exist already."""
    with explain_write_errors(path):
        if path.is_dir():
            raise OutputError(f"{path} is a folder; name a file")
        if not path.absolute().parent.is_dir():
            raise OutputError(f"cannot write {path}: there is no folder {path.absolute().parent}")
    if not force:
        check_absent(path, hint=hint)
    check_writable(path.absolute().parent)


def check_writable(folder: Path) -> None:
    """Raises if files cannot be made in a folder, or the folder itself in the nearest one that exists."""
    with explain_write_errors(folder):
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        if not existing.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
        if not os.access(existing, os.W_OK | os.X_OK):
            code = errno.EROFS if os.statvfs(existing).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code), str(existing))


def write_atomic(path: Path, text: str) -> None:
    """Writes or replaces a small file, completely or not at all."""
    temporary = path.with_name(f".{path.name}.draft")  # no name that a user would give a file
    try:
        temporary.unlink(missing_ok=True)  # of a killed process; a pipe would block, and a link would be followed
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        fsync_path(temporary)
        temporary.replace(path)
        fsync_path(path.parent)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Writes a file of text, completely or not at all. A file that exists raises, unless `overwrite` is true."""
    if overwrite:
        with explain_write_errors(path):
            write_atomic(path, text)
    else:
        with atomic_output(path) as draft:
            draft.write_text(text, encoding="utf-8")


def append_atomic(path: Path, data: bytes, *, create: bool) -> None:
    """Appends to a file, all or nothing, also if other processes do; without `create`, a deleted file raises instead.

    The lock is released when the file is closed.
    """
    # a pipe that nobody reads raises instead of blocking
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | (os.O_CREAT if create else 0), 0o666)
    try:
        with suppress(OSError):  # the file system has no file locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        end = os.lseek(handle, 0, os.SEEK_END)
        if os.write(handle, data) != len(data):
            os.ftruncate(handle, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(handle)


def free_bytes(folder: Path) -> int:
    """Returns the free space on the disk where the folder is or will be."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


def fsync_path(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
