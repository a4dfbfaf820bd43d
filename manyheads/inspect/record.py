"""Looking at a run: the states between its layers. What every attention was given is in parts/record.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from manyheads.model.transformer import Transformer


@contextmanager
def record_states(model: Transformer) -> Iterator[list[Tensor]]:
    """The embeddings of a run and what every layer makes of them, the last one behind the closing norm; tower after tower, as they ran."""
    states: list[Tensor] = []

    def keep(_: nn.Module, __: Any, out: Tensor) -> None:
        states.append(out)

    def close(_: nn.Module, __: Any, out: Tensor) -> None:
        states[-1] = out

    towers = [tower for tower in (model.encoder, model.decoder) if tower is not None]
    handles = [module.register_forward_hook(keep) for tower in towers for module in (tower.embed, *tower.layers)]
    handles += [tower.norm.register_forward_hook(close) for tower in towers]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
