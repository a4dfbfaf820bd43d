"""Lowers the step of a decoder to a plan, which the C kernels run in one call, and runs it in place of the modules."""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from manyheads.kernels.library import kernels
from manyheads.kernels.plan import NotLoweredError, Plan, Register
from manyheads.kernels.weight import QuantizedWeight
from manyheads.model.cache import StackState, StaticCache
from manyheads.model.stack import Stack, append_inputs, positions_after
from manyheads.parts.head import Head
from manyheads.parts.inputs import Inputs
from manyheads.parts.norm import lower_norm
from manyheads.parts.position import AttentionPosition, Positions
from manyheads.parts.residual import LoweredSublayer

MAX_LENGTH = 8  # new tokens of a sequence; the modules read longer texts faster


class LoweredDecoder:
    """The plan of a decoder and its head, made at the first step and again if a weight is replaced.

    It does not hold the decoder, which is the key of LOWERED.
    """

    def __init__(self, stack: Stack, head: Head) -> None:
        self.plan, self.has_window = Plan(stack.spec.width), any(mask.window for mask in stack.masks)
        # read at every step: a model that is recorded or edited has hooks, and runs as its modules do
        modules = [*stack.modules(), *head.modules()]
        self.hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self.children = [(module._modules, tuple(module._modules.values())) for module in modules if module._modules]
        self.head, self.dropouts = head, [module for module in modules if isinstance(module, nn.Dropout) and module.p]
        attentions = [spec.attention for spec in stack.layer_specs]
        self.cache_sizes = [(spec.num_kv_heads(), spec.head_dim(stack.spec.width)) for spec in attentions]
        self.empty = dict[int, list[Tensor]]()  # by batch size
        x = self.plan.input
        for i in range(stack.spec.layers):
            x = self.lower_layer(stack, i, x)
            self.plan.free_after(x)
        x = lower_norm(stack.norm, self.plan, x)
        table = stack.embed.table
        self.plan.output = head.lower(self.plan, x, table)

    def lower_layer(self, stack: Stack, index: int, x: Register) -> Register:
        layer, spec, shared = stack.layer(index), stack.layer_specs[index], stack.position_index[index]
        if layer.cross is not None or shared is None or not spec.mask.causal or spec.mask.prefix:
            raise NotLoweredError
        sublayers: list[LoweredSublayer] = [
            partial(
                layer.attention.lower, self.plan, layer=index, rotation=stack.position(index).rotation,
                angles=shared, window=spec.mask.window,
            )
        ]  # fmt: skip
        if layer.feedforward is not None:
            lower = getattr(layer.feedforward, "lower", None)
            if lower is None:
                raise NotLoweredError
            sublayers.append(partial(lower, self.plan))
        return layer.residual.lower(self.plan, x, sublayers)

    def is_current(self, head: Head) -> bool:
        """Whether the model has the modules and weights that it had when the plan was made."""
        same_modules = all(tuple(modules.values()) == before for modules, before in self.children)
        return self.head is head and same_modules and self.plan.is_current()

    def can_run(self, inputs: Inputs, state: StackState) -> bool:
        """Whether a step has nothing that the plan does not know."""
        unknown = (
            inputs.positions, inputs.padding_mask, inputs.document_ids, inputs.prefix_lengths, inputs.final_length,
            state.prefix_lengths,
        )  # fmt: skip
        return (
            state.length > 0  # a prompt is read by the modules, beside others and alone
            and inputs.length <= MAX_LENGTH
            and all(value is None for value in unknown)
            and not (self.has_window and state.padding_mask is not None)  # a window does not count padding
            and all(isinstance(cache, StaticCache) for cache in state.caches)
            and not any(self.hooks)
            and not any(module.training for module in self.dropouts)
        )

    def empty_caches(self, batch: int) -> list[Tensor]:
        """A tensor per layer with the sizes of its cache, and no tokens."""
        if batch not in self.empty:
            self.empty[batch] = [
                torch.empty(batch, heads, 0, size, dtype=torch.float32) for heads, size in self.cache_sizes
            ]
        return self.empty[batch]

    def step(self, stack: Stack, inputs: Inputs, state: StackState) -> tuple[Tensor, StackState]:
        library = kernels()
        assert library is not None
        new_state = append_inputs(state, inputs)
        positions = positions_after(state, new_state, inputs.tokens.device)
        x_BLD = stack.embed(inputs, positions, table=None, memory=None)
        angles = [position_angles(module, positions, x_BLD) for module in stack.position_modules]
        buffers = [
            cache.reserve(inputs.length, empty, empty)
            for cache, empty in zip(new_state.caches, self.empty_caches(inputs.batch_size), strict=True)
            if isinstance(cache, StaticCache)
        ]
        logits = self.plan.run(
            library, x_BLD, keys=[buffer.key for buffer in buffers], values=[buffer.value for buffer in buffers],
            past=state.length, padding=new_state.padding_mask, angles=angles,
        )  # fmt: skip
        return logits, new_state


def position_angles(module: nn.Module, positions: Positions, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines of a rotation; a scheme without one has tensors that no instruction reads."""
    assert isinstance(module, AttentionPosition)
    cos, sin = module.precompute(positions, x_BLD.dtype) or (x_BLD, x_BLD)
    return cos.contiguous(), sin.contiguous()


def decodes_quantized(stack: Stack) -> bool:
    """Whether a stack has a token table and quantized weights; one weight tells, because every step asks."""
    if stack.embed.table is None or not len(stack.layers):
        return False
    return isinstance(stack.layer(0).attention.output.weight, QuantizedWeight)


LOWERED: WeakKeyDictionary[nn.Module, LoweredDecoder | None] = WeakKeyDictionary()


def lowered_decoder(stack: Stack, head: Head) -> LoweredDecoder | None:
    """The plan of a decoder with quantized weights; None if a part has none, or if there are no kernels."""
    if stack.training or torch.is_grad_enabled() or not decodes_quantized(stack) or kernels() is None:
        return None
    lowered = LOWERED.get(stack)
    if stack not in LOWERED or (lowered is not None and not lowered.is_current(head)):
        try:
            lowered = LoweredDecoder(stack, head)
        except NotLoweredError:
            lowered = None
        LOWERED[stack] = lowered
    return lowered
