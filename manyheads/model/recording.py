"""Records the inputs of every attention, and the activations, during a forward pass with the fused kernel.

Attention weights are computed only when they are used, and a recorded forward gives the same bits as any other.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any, overload

import torch
from torch import Tensor, nn

from manyheads.errors import UnsupportedError, UsageError
from manyheads.model.notebook import ShownInNotebook
from manyheads.model.stack import Stack
from manyheads.model.transformer import Transformer
from manyheads.parts.core import Core, block_arguments, repeat_kv
from manyheads.parts.statistics import AttentionCall
from manyheads.spec import did_you_mean, quote

# modules whose outputs are recorded besides the attentions, by their names
ACTIVATIONS = re.compile(
    r"((encoder|decoder)\.)?(embed|norm|readout|head|layers\.\d+(\.(attention|cross|feedforward))?)"
)
Index = int | slice | None  # one of an axis, which is then left out of the result, a part of it, or all


@dataclass(frozen=True)
class RecordedAttention(AttentionCall, ShownInNotebook):
    """The inputs of one attention call. Its weights, entropy and distance are computed from them."""

    value: Tensor | None = None  # only if activations are recorded: the weights do not need it
    output: Tensor | None = None  # of each head, B×H×L×K, if activations are recorded

    def weights(self, head: Index = None, rows: Index = None, columns: Index = None) -> Tensor:
        """The distribution of every query over the keys, B×H×L×M, or of some heads and rows; only they are computed."""
        key = self.key
        heads = as_slice(head, self.query.shape[1], "head")
        rows_slice = as_slice(rows, self.query.shape[2], "row")
        columns_slice = as_slice(columns, key.shape[2], "column")
        if heads.start == heads.stop or not self.core.heads_are_alike:  # all, or none
            query, bias, selected_heads = self.query, self.bias, heads
        else:
            query, selected_heads = self.query[:, heads], slice(None)
            key = repeat_kv(self.key, self.query)[:, heads]
            bias = self.bias if self.bias is None or self.bias.shape[1] == 1 else self.bias[:, heads]
        block = block_arguments(rows_slice, slice(None), k=key, positions=self.positions, bias=bias)
        mask = self.mask if rows_slice == slice(None) else self.mask.submask(rows_slice, slice(None))
        weights = self.core.weights(query[:, :, rows_slice], mask=mask, **block)[:, selected_heads, :, columns_slice]
        axes = [axis for axis, index in ((1, head), (2, rows), (3, columns)) if isinstance(index, int)]
        return weights.squeeze(axes) if axes else weights

    def visible(self) -> Tensor | None:
        """True where the query may attend to the key, (B or 1)×1×L×M; None for no mask."""
        dense = self.mask.dense
        return None if dense is None else dense.expand(-1, -1, self.mask.num_queries, -1)

    @torch.no_grad()
    def difference(self) -> float:
        """The largest difference between weights @ v, computed now, and the recorded output."""
        if self.value is None or self.output is None:
            raise UsageError("the output was not recorded", hint="record(model, activations=True)")
        if self.core.training and self.core.dropout:
            raise UnsupportedError("dropout changed the recorded output; record in evaluation mode, model.eval()")
        return self.check()["difference"]

    @torch.no_grad()
    def check(self) -> dict[str, float]:
        """The largest error of the weights: of the sum of a row, of a masked key, and of weights @ v, if recorded."""
        value = None if self.value is None else repeat_kv(self.value, self.query)
        largest = {"row_sum": 0.0, "masked": 0.0}
        for rows, columns, mask in Core.blocks(self.core, self.query, self.key, self.mask):
            weights = self.weights(rows=rows, columns=columns)
            total = weights.sum(dim=-1).float()
            errors = {"row_sum": torch.where(total == 0, 0, total - 1)}  # a row without a visible key has only zeros
            if mask.dense is not None:
                errors["masked"] = weights.masked_fill(mask.dense, 0)
            if value is not None and self.output is not None:
                errors["difference"] = weights @ value[:, :, columns] - self.output[:, :, rows]
            largest |= {name: max(largest.get(name, 0.0), float(error.abs().max())) for name, error in errors.items()}
        return largest


def as_slice(index: Index, size: int, axis: str) -> slice:
    """The part of an axis that an index names; a negative one counts from the end, as in Python."""
    if index is None:
        return slice(None)
    if isinstance(index, slice):
        if index.step not in (None, 1) or any(type(end) is not int for end in (index.start or 0, index.stop or 0)):
            raise UsageError(f"{axis} is {index}, expected a slice of integers with a step of 1")
        start, stop, _ = index.indices(size)
        return slice(None) if (start, stop) == (0, size) else slice(start, max(start, stop))
    if type(index) is not int:
        raise UsageError(f"{axis} is {quote(index)}, expected an integer, a slice or None")
    if not -size <= index < size:
        raise UsageError(f"there is no {axis} {index}, expected {-size} to {size - 1}")
    return slice(index % size, index % size + 1)


class Tape(Sequence[RecordedAttention], ShownInNotebook):
    """What was recorded: the attentions, in the order in which they ran, and the activations by name."""

    def __init__(self) -> None:
        self.attentions: list[RecordedAttention] = []
        self.outputs: dict[str, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self.attentions)

    @overload
    def __getitem__(self, index: int) -> RecordedAttention: ...
    @overload
    def __getitem__(self, index: slice) -> list[RecordedAttention]: ...
    def __getitem__(self, index: int | slice) -> RecordedAttention | list[RecordedAttention]:
        return self.attentions[index]

    def names(self) -> list[str]:
        """The names of the attentions, such as decoder.layers.3.attention and decoder.layers.3.cross."""
        return list(dict.fromkeys(attention.name for attention in self.attentions))

    def calls(self, name: str) -> list[RecordedAttention]:
        """The calls of one attention: one, or one per step of generation and of a recurrent network."""
        calls = [attention for attention in self.attentions if attention.name == name]
        if not calls:
            raise UsageError(f"no attention {quote(name)} was recorded{did_you_mean(name, self.names())}")
        return calls

    def weights(self, name: str, head: Index = None, rows: Index = None, columns: Index = None) -> Tensor:
        """The weights of one attention, B×H×L×M; an integer instead of a slice leaves out its axis.

        The rows of several calls follow one another. A call that had fewer keys has zeros for the others.
        """
        calls = self.calls(name)
        if len(calls) == 1:
            return calls[0].weights(head, rows, columns)
        width = max(call.key.shape[2] for call in calls)
        matrices = [call.weights(head) for call in calls]
        matrix = torch.cat([nn.functional.pad(weights, (0, width - weights.shape[-1])) for weights in matrices], dim=-2)
        part = matrix[..., as_slice(rows, matrix.shape[-2], "row"), as_slice(columns, width, "column")]
        axes = [axis for axis, index in ((-2, rows), (-1, columns)) if isinstance(index, int)]
        return part.squeeze(axes) if axes else part

    def activations(self) -> dict[str, Tensor]:
        """The outputs of modules by name; those of several calls follow one another along the sequence.

        Names are those of the modules: embed, layers.N, layers.N.attention, layers.N.cross and layers.N.feedforward
        (before they are added to the residual stream) and norm, after `encoder.` or `decoder.`, and head.
        """
        return {name: outputs[0] if len(outputs) == 1 else join(outputs) for name, outputs in self.outputs.items()}

    def verify(self) -> dict[str, float]:
        """The largest difference between weights @ v and the recorded output, by the name of the attention."""
        return {name: max(call.difference() for call in self.calls(name)) for name in self.names()}


def join(outputs: list[Tensor]) -> Tensor:
    """The outputs of several steps along the sequence, which is axis 1, or is missing if each is of one token."""
    return torch.stack(outputs, dim=1) if outputs[0].dim() == 2 else torch.cat(outputs, dim=1)


def last_cross_attention(model: Any) -> Core:
    """The core of the last attention from the decoder to the source; raises if the model has none."""
    core: Core | None = model.last_cross_core
    if core is None:
        raise UnsupportedError(
            f"this needs the attention from a decoder to its source, and this {model.spec.architecture} has none"
        )
    return core


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook of a module that other threads may use too, without their calls; a compiled layer is for one thread."""
    thread = threading.get_ident()

    def call(*args: Any) -> Any:  # while it is added or removed, torch may call it without the keyword arguments
        if torch.compiler.is_compiling() or threading.get_ident() == thread:  # which torch.compile cannot trace
            return hook(*args)
        return None

    return call


def module_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """The name of each module, or all its names if several layers share it, in the order in which they run."""
    names = {module: [name] for name, module in model.named_modules()}
    for stack, (stack_name, *_) in list(names.items()):
        if isinstance(stack, Stack) and (size := stack.spec.group_size) > 1:
            for group, layer in enumerate(stack.layers):
                for name, module in layer.named_modules(prefix="x"):
                    numbers = range(group * size, (group + 1) * size)
                    names[module] = [f"{stack_name}.layers.{i}{name.removeprefix('x')}" for i in numbers]
    return names


@contextmanager
def record(model: nn.Module, only: Core | None = None, *, activations: bool = True) -> Iterator[Tape]:
    """Records every attention of the forwards inside the block, or `only` one, and the activations of modules.

    Tensors are kept by reference. Forwards of other threads are not recorded. A compiled model runs eagerly inside the
    block, unless `activations` is false.

    Example: `with record(model) as tape: model(ids)`, then `tape.weights("decoder.layers.0.attention", head=3)`.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"given a {type(model).__name__}, expected a model, which build returns")
    tape = Tape()
    activations = activations and only is None

    def attention_hook(names: Iterator[str]) -> Callable[..., None]:
        def keep(core: Core, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor | None = None) -> None:
            query, key, value = args
            mask, positions, bias = kwargs["mask"], kwargs["positions"], kwargs.get("bias")
            tensors = {"value": value, "output": output} if activations else {}
            tape.attentions.append(RecordedAttention(next(names), core, query, key, mask, positions, bias, **tensors))

        return keep

    def output_hook(names: Iterator[str]) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            name = next(names)
            if isinstance(output, Tensor):
                tape.outputs.setdefault(name, []).append(output)

        return keep

    with ExitStack() as stack:
        if activations:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module, names in module_names(model).items():
            if isinstance(module, Core) and only in (None, module):
                hook = in_this_thread(attention_hook(cycle(name.removesuffix(".core") for name in names)))
                register = module.register_forward_hook if activations else module.register_forward_pre_hook
                stack.callback(register(hook, with_kwargs=True).remove)
            if activations and ACTIVATIONS.fullmatch(names[0]):
                stack.callback(module.register_forward_hook(in_this_thread(output_hook(cycle(names)))).remove)
        yield tape


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
