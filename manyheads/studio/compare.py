"""Compares all heads of two forward passes: how much weight moved, and where."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import UsageError
from manyheads.inspect.thumbnail import pool_weights
from manyheads.studio.views import ForwardPass


@torch.no_grad()
def head_differences(first: ForwardPass, second: ForwardPass, name: str) -> tuple[Tensor, Tensor]:
    """Per head of an attention, the share of weight that moved between two forward passes, H, and its thumbnails.

    The share is ½ Σ|Δ| of a query's weights, averaged over queries; Δ is first − second. A pixel is the largest Δ in it
    as int8, ±127·√|Δ|, H×height×width. Of a long text, it is made of the queries that thumbnails are made of.
    """
    infos = [forward_pass.info(name) for forward_pass in (first, second)]
    info, shapes = infos[0], [(attention.heads, attention.rows, attention.columns) for attention in infos]
    if shapes[0] != shapes[1]:
        both = " and ".join(" × ".join(map(str, shape)) for shape in shapes)
        raise UsageError(f"{name} has other shapes in the two runs: {both}")
    moved, rows, pixels = torch.zeros(info.heads), 0, []
    for pair in zip(first.thumbnail_weights(name), second.thumbnail_weights(name), strict=True):
        before, after = (F.pad(weights.float(), (0, info.columns - weights.shape[-1])).cpu() for weights in pair)
        change = before - after
        moved, rows = moved + change.abs().sum(dim=(1, 2)) / 2, rows + change.shape[1]
        more, less = (pool_weights(signed, *info.pixel) for signed in (change, -change))
        pixels.append(torch.where(more >= less, more, -less))
    picture = torch.cat(pixels, dim=1)
    scaled = picture.abs().clamp(0, 1).sqrt().mul(127).round() * picture.sign()
    return moved / rows, scaled.to(torch.int8)
