"""Draws an attention matrix with matplotlib, as a figure for a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

MAX_LABELS = 80  # tokens from which the axes have positions instead of names
DPI = 200


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
    figure.savefig(path, dpi=DPI, format="png")


def plain(name: str) -> str:
    """A token as a label: visible if it is a space, and no formula for matplotlib."""
    return (name.strip() or "␣").replace("$", r"\$").replace("\n", "⏎")
