"""Many texts, one a line: read from a file or standard input, answered in batches, written in their order."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from manyheads.answer import predict_all
from manyheads.checkpoint import Loaded, TextError
from manyheads.data.source import DataError, Lines
from manyheads.generate.sample import Writing
from manyheads.spec import Tree, one_line

AT_ONCE = 1024  # texts among which those of like length are found
LONGEST = 1 << 24  # characters in a line
PATIENCE, EVERY = 2.0, 10.0  # seconds before anything is said, and between lines where there is no terminal


def lines_of(file: Path | None, errors: str) -> Lines:
    """The lines of a file, or of standard input."""
    given = None if file else cast(BufferedReader, sys.stdin.buffer)
    mended = "save it as UTF-8, or give --encoding-errors replace"
    return Lines(file or Path("standard input"), errors, LONGEST, file=given, longer="a text a line is expected", mended=mended)


def chunks(lines: Lines) -> Iterator[list[str]]:
    """So many lines at once, blank ones among them; an error where there is no other."""
    chunk: list[str] = []
    texts = blank = 0
    for _, line in lines:
        chunk.append(line)
        texts, blank = (texts + 1, blank) if line.strip() else (texts, blank + 1)
        if (line.strip() and texts % AT_ONCE == 0) or len(chunk) == 64 * AT_ONCE:
            yield chunk
            chunk = []
    if not texts:
        raise DataError(f"{lines.path} holds no texts: {f'all of its {blank:,} lines are blank' if blank else 'it is empty'}")
    if chunk:
        yield chunk


def answered(
    loaded: Loaded, name: Path, given: Iterable[list[str]], writing: Writing, told: Callable[[], None]
) -> Iterator[list[Tree | None]]:
    """What the model makes of each line, as many at once as are given; nothing of a blank one. `told` is called for each text."""
    before = 0
    for chunk in given:
        places = [i for i, line in enumerate(chunk) if line.strip()]
        found: list[Tree | None] = [None] * len(chunk)
        try:
            for i, answer in predict_all(loaded, [chunk[i] for i in places], writing):
                found[places[i]] = answer
                told()
        except TextError as error:
            raise DataError(f"{name}, line {before + places[error.place] + 1:,}: {error}") from None
        yield found
        before += len(chunk)


def line_of(found: Tree | None) -> str:
    """An answer as one line: what was written, its line breaks as spaces; the likeliest class, or token of each place, and a vector's
    numbers. A blank line for none."""
    if found is None:
        return ""
    if found["task"] == "classify":
        best = found["classes"][0]
        said = f"{best['class']}\t{best.get('probability', best.get('score')):.4f}"
    elif found["task"] == "fill":
        said = "\t".join(place["tokens"][0]["token"] for place in found["filled"])
    elif found["task"] == "embed":
        said = " ".join(f"{number:.6g}" for number in found["vector"])
    else:
        said = found["written"] if isinstance(found["written"], str) else " ".join(map(str, found["written"]))
    return " ".join(said.splitlines())


class Counted:
    """How many texts are answered, said on standard error once that takes longer than one likes to wait for nothing."""

    def __init__(self, name: Path) -> None:
        from rich.console import Console

        self.name, self.done, self.begun, self.console = one_line(str(name)), 0, time.monotonic(), Console(stderr=True)
        self.said, self.status = self.begun + PATIENCE - EVERY, cast(Any, None)

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.hide()

    def __call__(self) -> None:
        self.done, now = self.done + 1, time.monotonic()
        if now - self.begun < PATIENCE:
            return
        text = f"{self.name}: {self.done:,} texts answered, {self.done / (now - self.begun):,.1f} a second"
        if sys.stderr.isatty():
            self.status = self.status or self.console.status("")
            self.status.update(text)
            self.status.start()
        elif now - self.said >= EVERY:
            self.said = now
            self.console.print(text, highlight=False, markup=False)

    def hide(self) -> None:
        """Clears the terminal for what is written there."""
        if self.status is not None:
            self.status.stop()
