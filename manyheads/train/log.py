"""What happened in a run: metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyheads.spec import Tree
from manyheads.train.files import append, put, writing


class Log:
    """metrics.jsonl, a line an event. A disk that is full costs no line: what could not be written is written later."""

    def __init__(self, path: Path, also: Callable[[Tree], None] | None = None) -> None:
        self.path, self.also, self.waiting, self.failing, self.begun = path, also, list[str](), False, False

    def add(self, line: Tree) -> str | None:
        """Writes a line; the first time that this fails, what is wrong."""
        self.waiting.append(json.dumps(plain(line)) + "\n")
        before, self.failing = self.failing, True
        try:
            append(self.path, "".join(self.waiting).encode(), make=not self.begun)
            self.begun = True
            self.waiting.clear()
            if self.also is not None:
                self.also(line)
        except OSError as error:
            where = self.path if self.waiting else self.path.with_name("events…")  # the board's
            return None if before else f"cannot write {where}: {error.strerror or error}; training goes on, and it is tried again"
        self.failing = False
        return None

    def forget_after(self, step: int, looked: int) -> None:
        """Leaves out what was written of steps and looks that will be made again, and a line that a crash cut short."""
        if self.path.exists():
            with writing(self.path):
                lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
                put(self.path, "".join(f"{line}\n" for line in lines if known(line, step, looked)))


def known(line: str, step: int, looked: int) -> bool:
    """Whether a line tells of what a checkpoint knows, that was made at a step, after a look."""
    try:
        found = json.loads(line)
        return bool(found["step"] <= (looked if found["event"] == "evaluated" else step))
    except (ValueError, TypeError, KeyError):
        return False


def plain(value: Any) -> Any:
    """As JSON has it, which knows no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return {name: plain(inner) for name, inner in value.items()} if isinstance(value, dict) else value
