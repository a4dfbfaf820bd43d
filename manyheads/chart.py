"""What a person would rather look at: a comparison as a table and as curves, pictures beside what a model made of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.metrics.figures import SHARES
from manyheads.spec import Tree

TALL = 300  # points, of pictures side by side


def print_compared(found: Tree, console: Any) -> None:
    """A row a cell."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    names = list(dict.fromkeys(name for row in found["cells"] for name in row["metrics"]))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in found["axes"]:
        table.add_column(name, overflow="fold")
    for name in (*names, "parameters", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    if any(row["wrong"] for row in found["cells"]):
        table.add_column("", overflow="fold")
    for row in found["cells"]:
        figures = [written(name, row["metrics"][name]) if name in row["metrics"] else "" for name in names]
        costs = ["" if row["parameters"] is None else f"{row['parameters']:,}", "" if row["seconds"] is None else f"{row['seconds']:.3g}"]
        table.add_row(*map(escape, row["cell"].values()), *figures, *costs, *([escape(row["wrong"])] if row["wrong"] else []))
    console.print(table)


def written(name: str, figure: Tree) -> str:
    """Mean ± deviation; shares in per cent."""
    share = name in SHARES
    mean, sd = ((100 * value if share and value is not None else value) for value in (figure["mean"], figure["sd"]))
    digits = ".1f" if share else ".4f" if abs(mean) < 10 else ".4g"
    return f"{mean:{digits}}{'' if sd is None else f' ± {sd:{digits}}'}{' %' if share else ''}"


def draw(found: Tree, path: Path) -> None:
    """Learning curves of the loss on unseen rows, and the last figure of every seed; colours and rows are the same cells."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    rows = [row for row in found["cells"] if row["seeds"]]
    names = [" ".join(f"{axis}={value}" for axis, value in row["cell"].items()) for row in rows]
    metric = next((name for name in ("exact", "accuracy") if all(name in row["metrics"] for row in rows)), "loss")
    figure = Figure(figsize=(12, max(4.0, 1.4 + 0.36 * len(rows))), layout="constrained")
    curves, points = figure.subplots(1, 2, width_ratios=(3, 2))
    palette = colormaps["tab10" if len(rows) <= 10 else "turbo"]
    lines = ("-", "--", ":", "-.")
    for i, row in enumerate(rows):
        colour = palette(i) if len(rows) <= 10 else palette(i / (len(rows) - 1))
        for one in row["seeds"]:
            curves.plot(*zip(*one["curve"], strict=True), color=colour, alpha=0.3, linewidth=0.8)
        shared = sorted(set.intersection(*({step for step, _ in one["curve"]} for one in row["seeds"])))
        means = [statistics.fmean(dict(map(tuple, one["curve"]))[step] for one in row["seeds"]) for step in shared]
        curves.plot(shared, means, color=colour, linestyle=lines[i // 10 % 4], linewidth=1.8, marker=".", label=names[i])
        values = [one["metrics"][metric] for one in row["seeds"] if metric in one["metrics"]]
        points.plot(values, [i] * len(values), "o", color=colour, alpha=0.6)
        points.plot([statistics.fmean(values)] * 2 if values else [], [i - 0.3, i + 0.3] if values else [], color=colour, linewidth=2.5)
    losses = [loss for row in rows for one in row["seeds"] for _, loss in one["curve"]]
    if losses and min(losses) > 0 and max(losses) / min(losses) > 10:
        curves.set_yscale("log")
    curves.set(xlabel="steps", ylabel="loss on unseen rows", title="mean over seeds, each seed thin")
    points.set(
        yticks=range(len(rows)),
        yticklabels=names,
        ylim=(len(rows) - 0.5, -0.5),
        xlabel=f"{metric}, unseen rows",
        title="a point a seed, a bar the mean",
    )
    for axes in (curves, points):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if len(rows) <= 10:
        curves.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)


def draw_pictures(examples: Sequence[Tree], path: Path) -> None:
    """A column an example, a row for each picture of it."""
    from matplotlib.image import imsave

    rows = [np.concatenate([framed(example[name]) for example in examples], axis=1) for name in examples[0]]
    whole = np.concatenate(rows)
    scale = max(1, TALL // len(whole))
    imsave(path, whole.repeat(scale, 0).repeat(scale, 1), cmap="gray", vmin=0, vmax=1, format="png")


def framed(picture: Any) -> NDArray[np.float64]:
    """With a white line around it."""
    points = np.asarray(picture, np.float64)
    return np.pad(points, ((1, 1), (1, 1), *((0, 0) for _ in points.shape[2:])), constant_values=1.0)
