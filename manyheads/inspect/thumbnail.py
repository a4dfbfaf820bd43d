"""Thumbnails of heads: attention weights pooled to pixels, and pixels as shades."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

THUMBNAIL = 48  # pixels
Pool = Literal["mean", "max"]


def pool_weights(weights: Tensor, height: int, width: int, pool: Pool = "max") -> Tensor:
    """The largest or mean weight of each height × width cells, H×L×M → H×⌈L/height⌉×⌈M/width⌉."""
    if height == width == 1:
        return weights
    if pool == "max":
        return max_of_groups(max_of_groups(weights, 2, width), 1, height)
    return F.avg_pool2d(weights[:, None], (height, width), ceil_mode=True, count_include_pad=False)[:, 0]


def max_of_groups(weights: Tensor, dim: int, size: int) -> Tensor:
    """The largest of each `size` neighbours in a dimension, whose last group may be smaller. Copies no weights."""
    groups, rest = divmod(weights.shape[dim], size)
    result = weights.narrow(dim, 0, groups * size).unflatten(dim, (groups, size)).amax(dim=dim + 1)
    if not rest:
        return result
    return torch.cat([result, weights.narrow(dim, groups * size, rest).amax(dim=dim, keepdim=True)], dim=dim)


def to_shades(weights: Tensor, darkest: int) -> Tensor:
    """Weights as uint8 from 0 to `darkest`, which is 1: √weight, so that small weights are visible."""
    return weights.clamp(0, 1).sqrt().mul(darkest).round().to(torch.uint8)
