"""Evaluation as a person watches it: how far it is, a table of scores, some answers; and all of them in a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.chart import draw_pictures
from manyheads.evaluation import Tell
from manyheads.metrics.figures import SHARES
from manyheads.spec import Tree, one_line
from manyheads.training import EVERY

PICTURES = 8  # in a file of them, where nobody says how many
SHADES = " ░▒▓█"
ARROWS = {"lower": "↓", "higher": "↑"}


@contextmanager
def progress(*, quiet: bool) -> Iterator[Tell]:
    """A bar on standard error; lines now and then where there is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    live = sys.stderr.isatty() and not quiet
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not live, transient=True) as bar:
        task, said = bar.add_task("reading", total=None), time.monotonic()

        def tell(what: str, done: int, total: int) -> None:
            nonlocal said
            bar.update(task, description=what, completed=done, total=total)
            if not live and not quiet and time.monotonic() - said >= EVERY:
                said = time.monotonic()
                print(f"{what} · {done:,} of {total:,}", file=sys.stderr)

        yield tell


def show(report: Tree, console: Any) -> None:
    """The model beside its baselines, a line a metric; those that matter for this task in bold."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    counted = f"{report['rows']:,} rows" + (f" among {report['documents']:,} documents" if "documents" in report else "")
    console.print(f"{report['task']} · {report['split']} · {counted} · {report['seconds']:,.1f} s", highlight=False)
    console.print(escape(report["data"]), style="dim", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("metric")
    for name in ("", *report["scores"]):
        table.add_column(escape(name), justify="right")
    for metric, better in report["better"].items():
        cells = [written(metric, scores[metric]) if metric in scores else "–" for scores in report["scores"].values()]
        table.add_row(metric, ARROWS[better], *cells, style="bold" if metric in report["matter"] else "dim")
    console.print(table)
    for line in (*report["notes"], *(f"{name}: {said}" for name, said in report["signatures"].items())):
        console.print(escape(line), style="dim", highlight=False)
    for example in report["examples"]:
        console.print()
        if drawn(example):
            console.print(side_by_side(example, colours=console.color_system is not None), highlight=False)
            continue
        for name, text in example.items():
            console.print(f"  {name:>8}  {escape(one_line(text))}", highlight=False)


def drawn(example: Tree) -> bool:
    return not any(isinstance(value, str) for value in example.values())


def side_by_side(example: Tree, *, colours: bool) -> Any:
    """Pictures as text: a character is two points, one above the other; without colours, a shade of their mean."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_edge=False, header_style="dim")
    columns = []
    for name, picture in example.items():
        points = np.asarray(picture, np.float64)
        points = points[..., None].repeat(3, -1) if points.ndim == 2 else points
        points = np.pad(points, ((0, len(points) % 2), (0, 0), (0, 0)))
        lines = []
        for above, below in zip(points[::2], points[1::2], strict=True):
            line = Text()
            for pair in zip(above, below, strict=True):
                upper, lower = (f"rgb({','.join(str(round(255 * number)) for number in point)})" for point in pair)
                shade = SHADES[round(float(np.mean(pair)) * (len(SHADES) - 1))]
                line.append("▀" if colours else shade, style=f"{upper} on {lower}" if colours else "")
            lines.append(line)
        table.add_column(name, no_wrap=True)
        columns.append(Text("\n").join(lines))
    table.add_row(*columns)
    return table


def written(metric: str, value: float) -> str:
    if metric in SHARES:
        return f"{value:.1%}"
    return f"{value:.3g}" if value >= 1e6 else f"{value:,.2f}" if value >= 10 or metric in ("bleu", "chrf") else f"{value:.4f}"


def check_free(path: Path | None) -> None:
    """Refuses before any work is done what could not be written after it."""
    if path is not None and path.exists():
        raise ValueError(f"{path} is there already: remove it or name another")
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
    if path is not None and path.suffix == ".png" and find_spec("matplotlib") is None:
        raise ValueError(f"{path} would be a picture, which needs matplotlib: pip install 'manyheads[plot]'")


def keep(path: Path | None, texts: Sequence[str], examples: Sequence[Tree]) -> None:
    """One answer a line, where a line break within one becomes a space; or pictures."""
    if path is None:
        return
    if examples and drawn(examples[0]):
        draw_pictures(examples, path)
        return
    if not texts or path.suffix == ".png":
        raise ValueError(f"nothing was written that {path} could keep: only answers, classes and pictures are")
    with path.open("x", encoding="utf-8") as file:
        file.writelines(f"{' '.join(text.splitlines())}\n" for text in texts)
