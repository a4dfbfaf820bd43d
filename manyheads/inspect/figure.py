"""Draws with matplotlib: an attention matrix, learning curves of a comparison, images with their reconstructions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from manyheads.spec import Tree

MAX_LABELS = 80  # tokens from which the axes of a matrix have positions instead of names
MIN_HEIGHT = 300  # pixels; smaller pictures are enlarged
LINE_STYLES = ("-", "--", ":", "-.")


def draw_matrix(weights_LM: Tensor, rows: Sequence[str], columns: Sequence[str], path: Path, *, title: str) -> None:
    """Writes a .png with a row per query and a column per key."""
    from matplotlib.figure import Figure

    cell = 0.24 if max(len(rows), len(columns)) <= MAX_LABELS else 8 / max(len(rows), len(columns))
    figure = Figure(figsize=(2.2 + cell * len(columns), 1.8 + cell * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(weights_LM.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    if max(len(rows), len(columns)) <= MAX_LABELS:
        axes.set_xticks(range(len(columns)), [plain(name) for name in columns], rotation=60, ha="left", fontsize=8)
        axes.set_yticks(range(len(rows)), [plain(name) for name in rows], fontsize=8)
        axes.xaxis.tick_top()
    axes.set(xlabel="key", ylabel="query", title=plain(title))
    axes.tick_params(length=0)
    axes.spines[:].set_linewidth(0.5)
    figure.colorbar(image, ax=axes, shrink=0.6, label="weight")
    figure.savefig(path, dpi=200, format="png")


def plain(name: str) -> str:
    """A token as a label: visible if it is a space, and no formula for matplotlib."""
    return (name.strip() or "␣").replace("$", r"\$").replace("\n", "⏎")


def draw_comparison(report: Tree, path: Path) -> None:
    """Plots validation loss by step, and the final metric of every seed, with one color per cell of a comparison."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    cells = [cell for cell in report["cells"] if cell["seeds"]]
    names = [" ".join(f"{axis}={value}" for axis, value in cell["cell"].items()) for cell in cells]
    metric = next(
        (name for name in ("exact_match", "accuracy") if all(name in cell["metrics"] for cell in cells)), "loss"
    )
    figure = Figure(figsize=(12, max(4.0, 1.4 + 0.36 * len(cells))), layout="constrained")
    curves, points = figure.subplots(1, 2, width_ratios=(3, 2))
    palette = colormaps["tab10" if len(cells) <= 10 else "turbo"]
    for i, cell in enumerate(cells):
        color = palette(i) if len(cells) <= 10 else palette(i / (len(cells) - 1))
        plot_curves(curves, cell, color=color, linestyle=LINE_STYLES[i // 10 % 4], label=names[i])
        values = [seed["metrics"][metric] for seed in cell["seeds"] if metric in seed["metrics"]]
        points.plot(values, [i] * len(values), "o", color=color, alpha=0.6)
        if values:
            points.plot([statistics.fmean(values)] * 2, [i - 0.3, i + 0.3], color=color, linewidth=2.5)
    all_losses = [loss for cell in cells for seed in cell["seeds"] for _, loss in seed["curve"]]
    if all_losses and min(all_losses) > 0 and max(all_losses) / min(all_losses) > 10:
        curves.set_yscale("log")
    curves.set(xlabel="steps", ylabel="validation loss", title="mean over seeds; thin: each seed")
    points.set(
        yticks=range(len(cells)),
        yticklabels=names,
        ylim=(len(cells) - 0.5, -0.5),
        xlabel=f"validation {metric}",
        title="point: one seed; bar: mean",
    )
    for axes in (curves, points):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if len(cells) <= 10:
        curves.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)


def plot_curves(axes: Any, cell: Tree, *, color: Any, linestyle: str, label: str) -> None:
    """Plots the loss of every seed as a thin line, and the mean at the steps that all seeds have."""
    by_step = [dict(map(tuple, seed["curve"])) for seed in cell["seeds"]]
    for losses in by_step:
        axes.plot(list(losses), list(losses.values()), color=color, alpha=0.3, linewidth=0.8)
    steps = sorted(set.intersection(*map(set, by_step)))
    means = [statistics.fmean(losses[step] for losses in by_step) for step in steps]
    axes.plot(steps, means, color=color, linestyle=linestyle, linewidth=1.8, marker=".", label=label)


def draw_images(examples: Sequence[Tree], path: Path) -> None:
    """Draws one column per example, with one row for each of its images."""
    from matplotlib.image import imsave

    rows = [np.concatenate([add_border(example[name]) for example in examples], axis=1) for name in examples[0]]
    pixels = np.concatenate(rows)
    scale = max(1, MIN_HEIGHT // len(pixels))
    imsave(path, pixels.repeat(scale, 0).repeat(scale, 1), cmap="gray", vmin=0, vmax=1, format="png")


def add_border(image: Any) -> NDArray[np.float64]:
    """Adds a white line around an image."""
    pixels = np.asarray(image, np.float64)
    return np.pad(pixels, ((1, 1), (1, 1), *((0, 0) for _ in pixels.shape[2:])), constant_values=1.0)
