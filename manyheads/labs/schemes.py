"""The position schemes under the names that the labs use, and the part of the attention score that each gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from manyheads.errors import UsageError
from manyheads.model.builder import Model
from manyheads.model.stack import Stack
from manyheads.model.transformer import as_transformer
from manyheads.parts.position import AbsoluteSpec, Positions, SinusoidalSpec
from manyheads.spec import Tree, did_you_mean, quote

LENGTH = 64  # positions of the tables
SCHEMES: Mapping[str, Tree] = {
    "none": {"kind": "none"},
    "sinusoidal": {"kind": "sinusoidal"},
    "concatenated": {"kind": "sinusoidal", "join": "concat"},
    "multiplied": {"kind": "sinusoidal", "join": "multiply"},
    "learned": {"kind": "learned", "length": LENGTH},
    "relative": {"kind": "relative", "length": LENGTH},
    "clipped": {"kind": "clipped", "clip": 8},
    "bucketed": {"kind": "bucketed", "buckets": 16, "max_distance": LENGTH},
    "shaw": {"kind": "shaw", "clip": 8},
    "alibi": {"kind": "alibi"},
    "rope": {"kind": "rope"},
}
POSITIONAL = " ".join(list(SCHEMES)[1:])


def scheme_names(text: str) -> list[str]:
    """The names of schemes in a text, separated by spaces or commas."""
    names = text.replace(",", " ").split()
    for name in names:
        if name not in SCHEMES:
            raise UsageError(f"no position scheme {quote(name)}{did_you_mean(name, SCHEMES)}")
    return names


def sinusoids(width: int, length: int, *, step: float = 1.0) -> Tensor:
    """The table of sinusoidal positions of the package, in float64, at 0, step, 2·step, …"""
    embed = SinusoidalSpec().build_embed(width)
    return embed.table((step * torch.arange(length, dtype=torch.float64))[None], torch.float64)[0]  # type: ignore[operator]


def count_positions(length: int) -> Positions:
    index = torch.arange(length)[None]
    return Positions(index, index)


@torch.no_grad()
def position_table(model: Model, length: int) -> Tensor | None:
    """The vector that the model joins to the token embedding at each position, T×d; None if it joins none."""
    stack = last_stack(model)
    spec = stack.spec.position
    if not isinstance(spec, AbsoluteSpec):
        return None
    width, position_width = spec.token_width(stack.spec.width), spec.position_width(stack.spec.width)
    tokens = torch.full((1, length, width), 1.0 if spec.join == "multiply" else 0.0)
    join: Any = stack.embed.position
    table: Tensor = join(tokens, count_positions(length))[0]
    return table[:, -position_width:].double()


@torch.no_grad()
def position_scores(model: Model, length: int, *, seed: int = 0) -> Tensor:
    """The part of the score of every query (row) and key (column) that depends on their positions alone.

    It is p_i · p_j if vectors are joined, the bias of a head if a bias is added (with one query for every position, if
    the bias depends on it), and q · k rotated to their positions, with one vector as every q and k.
    """
    table = position_table(model, length)
    if table is not None:
        return table @ table.T
    stack, positions = last_stack(model), count_positions(length)
    size = stack.spec.width // stack.spec.attention.heads
    vector = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    same = vector.expand(1, stack.spec.attention.heads, length, size)
    module = stack.position(0)
    data = module.precompute(positions, torch.float64)
    bias = module.bias(same, data, size**-0.5)
    if bias is not None:
        return bias[0, 0].double()
    rotated = module.rotate(same.double(), data)[0, 0]
    return rotated @ rotated.T * size**-0.5


def by_offset(scores: Tensor) -> dict[int, float]:
    """The mean of each diagonal of a T×T matrix, by the offset j − i of the key from the query."""
    length = len(scores)
    return {offset: float(scores.diagonal(offset).mean()) for offset in range(1 - length, length)}


def spread_of_diagonals(scores: Tensor) -> float:
    """The largest difference on one diagonal, relative to that in the matrix; 0 if a Toeplitz matrix."""
    length = len(scores)
    spreads = [scores.diagonal(o).max() - scores.diagonal(o).min() for o in range(1 - length, length)]
    return float(max(spreads) / (scores.max() - scores.min()).clamp(min=1e-12))


def last_stack(model: Model) -> Stack:
    return as_transformer(model, "a position scheme of attention").last
