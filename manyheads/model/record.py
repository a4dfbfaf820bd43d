"""Records the inputs of every attention, and the hidden states, during a forward pass with the fused kernel.

Attention weights are computed only when they are used, and a recorded forward gives the same bits as any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import UnsupportedError, UsageError
from manyheads.model.recurrent import Recurrent
from manyheads.model.transformer import Transformer
from manyheads.parts.core import Core
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions
from manyheads.parts.statistics import Statistics, WeightIndices, log_weights, statistics


@dataclass(frozen=True)
class RecordedAttention:
    """The inputs of one attention call. Its weights and statistics are computed from them."""

    name: str  # 'decoder.layers.3.attention', 'decoder.layers.3.cross'
    core: Core
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    positions: Positions
    bias: Tensor | None

    def weights(self) -> Tensor:
        """The distribution of every query over the keys, B×H×L×M."""
        return self.core.weights(self.query, self.key, **self._context)

    @cached_property
    def statistics(self) -> Statistics:
        """Entropy and mean squared distance of every row, computed without the attention matrix."""
        return statistics(self.core, self.query, self.key, **self._context)

    def log_weights(self, indices: WeightIndices) -> Tensor:
        """ln α at N indices, H×N, computed without the attention matrix."""
        return log_weights(self.core, self.query, self.key, indices, **self._context)

    def visible(self) -> Tensor | None:
        """True where the query may attend to the key, (B or 1)×1×L×M; None for no mask."""
        dense = self.mask.dense
        return None if dense is None else dense.expand(-1, -1, self.mask.num_queries, -1)

    @property
    def _context(self) -> dict[str, Any]:
        return {"mask": self.mask, "positions": self.positions, "bias": self.bias}


def last_cross_attention(model: Any) -> Core:
    """The core of the last attention from the decoder to the source; raises if the model has none."""
    if isinstance(model, Transformer) and model.decoder is not None:
        layers = (model.decoder.layer(i) for i in reversed(range(model.decoder.spec.layers)))
        core = next((layer.cross.core for layer in layers if layer.cross is not None), None)
    else:
        core = model.core if isinstance(model, Recurrent) else None
    if core is None:
        raise UnsupportedError(
            f"this needs the attention from a decoder to its source, and this {model.spec.architecture} has none"
        )
    return core


def in_this_thread(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook of a module that other threads may use too, without their calls; a compiled layer is for one thread."""
    thread = threading.get_ident()

    def call(*args: Any) -> None:  # while it is added or removed, torch may call it without the keyword arguments
        if torch.compiler.is_compiling() or threading.get_ident() == thread:  # which torch.compile cannot trace
            hook(*args)

    return call


@contextmanager
def record(model: nn.Module, only: Core | None = None) -> Iterator[list[RecordedAttention]]:
    """Records every attention of the forwards inside the block, or `only` one, in the order in which they run.

    Forwards of other threads are not recorded, here and in `record_hidden_states`.

    Example: `with record(model) as attentions: model(ids)`, then `attentions[0].weights()`.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"given a {type(model).__name__}, expected a model, which build returns")
    attentions: list[RecordedAttention] = []

    def hook(name: str, core: Core, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query, key, value = args
        mask, positions, bias = kwargs["mask"], kwargs["positions"], kwargs.get("bias")
        attentions.append(RecordedAttention(name, core, query, key, value, mask, positions, bias))

    handles = [
        module.register_forward_pre_hook(in_this_thread(partial(hook, name.removesuffix(".core"))), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, Core) and only in (None, module)
    ]
    try:
        yield attentions
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_hidden_states(model: Transformer) -> Iterator[list[Tensor]]:
    """Records the embeddings and every layer's output (the last after the final norm), first of the encoder."""
    states: list[Tensor] = []

    def append(_: nn.Module, __: Any, out: Tensor) -> None:
        states.append(out)

    def replace_last(_: nn.Module, __: Any, out: Tensor) -> None:
        states[-1] = out

    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    modules = [module for stack in stacks for module in (stack.embed, *stack.layers)]
    handles = [module.register_forward_hook(in_this_thread(append)) for module in modules]
    handles += [stack.norm.register_forward_hook(in_this_thread(replace_last)) for stack in stacks]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
