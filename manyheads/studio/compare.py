"""Compares all heads of two runs: how much weight moved, and where."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import UsageError
from manyheads.studio.views import Run
from manyheads.studio.weights import pooled


@torch.no_grad()
def head_differences(run: Run, other: Run, name: str) -> tuple[Tensor, Tensor]:
    """Per head of an attention, the share of weight that moved from one run to the other, H, and its thumbnails.

    The share is ½ Σ|Δ| of a query's weights, averaged over queries; Δ is run − other. A pixel is the largest Δ in it as
    int8, ±127·√|Δ|, H×height×width. Of a long text, it is made of the queries that thumbnails are made of.
    """
    info, second = run.info(name), other.info(name)
    shapes = [(one.heads, one.rows, one.columns) for one in (info, second)]
    if shapes[0] != shapes[1]:
        shown = " and ".join(" × ".join(map(str, shape)) for shape in shapes)
        raise UsageError(f"{name} has other shapes in the two runs: {shown}")
    moved, rows, pixels = torch.zeros(info.heads), 0, []
    for pair in zip(run.thumbnail_weights(name), other.thumbnail_weights(name), strict=True):
        first, last = (F.pad(one.float(), (0, info.columns - one.shape[-1])).cpu() for one in pair)
        change = first - last
        moved, rows = moved + change.abs().sum(dim=(1, 2)) / 2, rows + change.shape[1]
        more, less = (pooled(one, *info.pixel, "max") for one in (change, -change))
        pixels.append(torch.where(more >= less, more, -less))
    picture = torch.cat(pixels, dim=1)
    scaled = picture.abs().clamp(0, 1).sqrt().mul(127).round() * picture.sign()
    return moved / rows, scaled.to(torch.int8)
