"""Looking at a run: what every attention was given, kept by reference from the very run on the fast kernel.

Nothing is computed until it is asked for, and a run that is looked at gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from manyheads.parts.attend import Core
from manyheads.parts.mask import Mask
from manyheads.parts.position import Places
from manyheads.parts.statistics import Cells, Statistics, log_weights, statistics


@dataclass(frozen=True)
class Attended:
    """One attention of a run: by which part of the model, from what to what."""

    name: str  # 'decoder.layers.3.attention', 'decoder.layers.3.cross'
    core: Core
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    places: Places
    bias: Tensor | None

    def weights(self) -> Tensor:
        """The distribution of every query over the keys, B×H×L×M."""
        return self.core.weights(self.query, self.key, mask=self.mask, places=self.places, bias=self.bias)

    @cached_property
    def statistics(self) -> Statistics:
        """Entropy and distance of every row, without the matrix."""
        return statistics(self.core, self.query, self.key, mask=self.mask, places=self.places, bias=self.bias)

    def log_weights(self, cells: Cells) -> Tensor:
        """ln α of chosen cells, H×N, without the matrix."""
        return log_weights(self.core, self.query, self.key, cells, mask=self.mask, places=self.places, bias=self.bias)

    def seen(self) -> Tensor | None:
        """True where the query may see the key, (B or 1)×1×L×M; None where everybody sees everything."""
        seen = self.mask.dense
        return None if seen is None else seen.expand(-1, -1, self.mask.queries, -1)


@contextmanager
def record(model: nn.Module) -> Iterator[list[Attended]]:
    """`with record(model) as seen: model(ids)`; then `seen[0].weights()`, one entry an attention, in the order they ran."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"given a {type(model).__name__}, expected a model, as build makes")
    seen: list[Attended] = []

    def keep(name: str, core: Core, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query, key, value = args
        seen.append(Attended(name, core, query, key, value, kwargs["mask"], kwargs["places"], kwargs.get("bias")))

    handles = [
        module.register_forward_pre_hook(partial(keep, name.removesuffix(".core")), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, Core)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
