"""Whose a run's folder is now: one process at a time."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manyheads.spec import Tree
from manyheads.train.files import read_object, writing
from manyheads.train.run import RunError

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None  # type: ignore[assignment]


def check_place(folder: Path, resume: str = "auto") -> None:
    """Whether a run can be there, before anything is made ready for it; nothing is written."""
    with writing(folder):
        there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
        if not there.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        if not os.access(there, os.W_OK | os.X_OK):
            code = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code), str(there))
        if resume == "never" and any((folder / name).exists() for name in ("run.toml", "checkpoints")):
            raise RunError(f"{folder} holds a run, and --resume never goes on with none; take another --output")
    other = read_object(folder / "lock.json")
    if other and in_use(other):
        raise taken(folder, other)


@contextmanager
def locked(folder: Path) -> Iterator[Callable[[], None]]:
    """The folder for this process alone; a lock whose process is gone is taken over. Gives a check that it is so still."""
    path, own = folder / "lock.json", {"pid": os.getpid(), "host": socket.gethostname(), "started": begun(os.getpid())}

    def check() -> None:
        if read_object(path) != own:  # the folder was removed, its disk unmounted, or somebody else has it
            raise OSError(errno.ENOENT, "the run's folder is gone, or is another's now", str(folder))

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(folder):
            if path.exists() and in_use(other := read_object(path)):
                raise taken(folder, other)
            try:
                path.write_text(json.dumps(own), encoding="utf-8")
            except OSError:
                path.unlink(missing_ok=True)
                raise
    try:
        yield check
    finally:
        with suppress(OSError):
            if read_object(path) == own:
                path.unlink()


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Two that come at once must not both find the same lock stale."""
    handle = os.open(folder, os.O_RDONLY) if fcntl else -1
    try:
        if fcntl:
            with suppress(OSError):  # a file system without it
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if fcntl:
            os.close(handle)


def in_use(lock: Tree) -> bool:
    """Whether the process that holds a lock may be there: on another machine nobody can tell; here, its number may be another's now."""
    pid = lock.get("pid")
    if type(pid) is not int or pid < 1:
        return False
    if lock.get("host") != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    now = begun(pid)
    return now is None or (now != "ended" and lock.get("started") in (None, now))


def begun(pid: int) -> str | None:
    """When a process began, in ticks since the machine did; None where the system does not tell."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "ended" if state in "ZX" else rest[18]


def taken(folder: Path, lock: Tree) -> RunError:
    return RunError(f"{folder} is in use by process {lock.get('pid')} on {lock.get('host')}; stop it, or remove {folder / 'lock.json'}")
