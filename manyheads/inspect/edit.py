"""Edits of a forward pass: switch off, scale or replace an activation or a head, and patch one from another run.

An edit names an activation as `record` does: 'decoder.layers.3', 'decoder.layers.3.attention', '….feedforward'. With
`head`, it changes the output of one head before the output projection. With `positions`, it changes only these.

    with edit(model, ablate("decoder.layers.3.attention", head=5), scale("decoder.layers.0.feedforward", 0.5)):
        logits = model(ids)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import InputShapeError, UnsupportedError, UsageError
from manyheads.model.builder import build
from manyheads.model.recording import ACTIVATIONS, Tape, in_this_thread, module_names
from manyheads.model.spec import read_model
from manyheads.model.stack import Layer
from manyheads.parts.attention import Attention
from manyheads.parts.core import Core
from manyheads.spec import did_you_mean, merge_trees, quote, to_tree

Positions = int | slice | Sequence[int] | None  # one position, some, or all


@dataclass(frozen=True)
class Edit:
    """A change of one activation in every forward inside the block of `edit`."""

    name: str
    change: Callable[[Tensor, Tensor], Tensor]  # new output from (output, input of the module)
    head: int | None = None
    positions: Positions = None


def ablate(name: str, *, head: int | None = None, positions: Positions = None) -> Edit:
    """Removes what a module adds: a head, an attention or a feed-forward network gives 0, a layer gives its input."""
    return Edit(name, lambda output, x: x if x.shape == output.shape else output.mul(0), head, positions)


def scale(name: str, factor: float, *, head: int | None = None, positions: Positions = None) -> Edit:
    """Multiplies an activation by a factor."""
    return Edit(name, lambda output, _: output * factor, head, positions)


def replace_with(name: str, value: Tensor, *, head: int | None = None, positions: Positions = None) -> Edit:
    """Replaces an activation by a tensor that has its shape, or broadcasts to it."""

    def change(output: Tensor, _: Tensor) -> Tensor:
        try:
            return value.to(output).expand_as(output)
        except RuntimeError:
            raise InputShapeError(
                f"the value for {name} has shape {tuple(value.shape)}, expected {tuple(output.shape)}"
            ) from None

    return Edit(name, change, head, positions)


def patch(name: str, tape: Tape, *, head: int | None = None, positions: Positions = None) -> Edit:
    """Replaces an activation by that of a recorded run; with `head`, its output at these positions."""
    if head is None:
        activations = tape.activations()
        if name not in activations:
            raise UsageError(f"no activation {quote(name)} was recorded{did_you_mean(name, activations)}")
        value = activations[name]
    else:
        outputs = [call.output for call in tape.calls(name) if call.output is not None]
        if not outputs:
            raise UsageError("the outputs of heads were not recorded", hint="record(model, activations=True)")
        value = torch.cat(outputs, dim=2)
        check_head(name, head, value.shape[1])
        value = value[:, head]
    index = as_index(positions)
    return replace_with(name, value if positions is None else value[:, index], head=head, positions=positions)


def as_index(positions: Positions) -> Any:
    """An index of the axis of positions that keeps the axis."""
    if positions is None or isinstance(positions, slice):
        return slice(None) if positions is None else positions
    return [positions] if isinstance(positions, int) else list(positions)


def check_head(name: str, head: int, heads: int) -> None:
    if type(head) is not int or not 0 <= head < heads:
        raise UsageError(f"{name} has no head {quote(head)}, expected 0 to {heads - 1}")


def apply(edit: Edit, output: Tensor, layer_input: Tensor) -> Tensor:
    """The output of a module, B×L×D, or of a core, B×H×L×K, after one edit."""
    if edit.head is not None:
        check_head(edit.name, edit.head, output.shape[1])
    try:
        index = as_index(edit.positions)
        where = (slice(None), index) if edit.head is None else (slice(None), edit.head, index)
        part, before = output[where], layer_input[where] if layer_input.shape == output.shape else layer_input
    except (IndexError, OverflowError, RuntimeError, TypeError, ValueError):
        raise UsageError(
            f"{edit.name} has {output.shape[-2]:,} positions, which {quote(edit.positions)} is not among"
        ) from None
    if part.shape == output.shape:
        return edit.change(output, before)
    result = output.clone()
    result[where] = edit.change(part, before)
    return result


@contextmanager
def edit(model: nn.Module, *edits: Edit) -> Iterator[None]:
    """Applies edits to the forwards of this thread inside the block. Weights are not changed.

    Edits of one activation are applied in the order given. A compiled model runs eagerly inside the block.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"given a {type(model).__name__}, expected a model, which build returns")
    names = module_names(model)
    modules = {name: module for module, all_names in names.items() for name in all_names}
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        by_module: dict[nn.Module, dict[str, list[Edit]]] = {}
        for item in edits:
            name = module_of(item, modules)
            by_module.setdefault(modules[name], {}).setdefault(name, []).append(item)
        for module, edits_by_name in by_module.items():
            hook = in_this_thread(output_hook(names[module], edits_by_name))
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def module_of(edit: Edit, modules: Mapping[str, nn.Module]) -> str:
    """The name of the module whose output is changed: of a head, the core of its attention."""
    editable = [name for name in modules if ACTIVATIONS.fullmatch(name)]
    cores = {name.removesuffix(".core"): name for name, module in modules.items() if isinstance(module, Core)}
    if edit.head is not None and edit.name in cores:
        return cores[edit.name]
    if edit.head is not None and edit.name in editable:
        raise UsageError(f"{edit.name} has no heads", hint="leave out head, or name an attention")
    if edit.head is not None:
        raise UsageError(f"no attention {quote(edit.name)}{did_you_mean(edit.name, cores)}")
    if edit.name not in editable:
        raise UsageError(f"no activation {quote(edit.name)}{did_you_mean(edit.name, editable)}")
    return edit.name


def output_hook(names: Sequence[str], edits: Mapping[str, Sequence[Edit]]) -> Callable[..., Tensor]:
    """A hook that changes the outputs of a module, which has several names if several layers share it."""
    calls = count()

    def change(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        layer_input = args[0] if isinstance(module, Layer) else output.new_empty(0)
        for item in edits.get(names[next(calls) % len(names)], ()):
            output = apply(item, output, layer_input)
        return output

    return change


# -------------------------------------------------------------------------------------------------------------- pruning


def prune_heads(checkpoint: Checkpoint, heads: Mapping[str, Sequence[int]]) -> Checkpoint:
    """A copy of a checkpoint without some heads, by the name of their attention, such as decoder.layers.3.attention.

    Its logits are those of the model with these heads switched off, up to rounding. Save it with `export`.
    """
    model, spec = checkpoint.model, to_tree(checkpoint.spec)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, numbers in heads.items():
        attention, (stack, layer, part) = find_attention(model, name)
        layers = getattr(checkpoint.spec, stack).expanded_layers()
        own = (
            layers[layer].attention if part == "attention" else layers[layer].cross.attention or layers[layer].attention
        )
        for number in numbers:
            check_head(name, number, own.heads)
        remaining = [number for number in range(own.heads) if number not in numbers]
        if not remaining:
            raise UnsupportedError(f"{name} would have no head left")
        if layers[layer].position.mechanism == "bias" or not attention.core.heads_are_alike:
            raise UnsupportedError(f"{name}: heads with parameters of their own, besides q, k and v, cannot be pruned")
        pattern = spec[stack].get("pattern") or [{}]
        entries = [merge_trees(pattern[i % len(pattern)], {}) for i in range(len(layers))]
        if part == "attention" and layers[layer].cross:  # which has the same heads unless it names its own
            entries[layer] = merge_trees({"cross": {"attention": to_tree(own)}}, entries[layer])
        pruned_attention = {"attention": to_tree(own.keep_heads(remaining, getattr(checkpoint.spec, stack).width))}
        entries[layer] = merge_trees(
            entries[layer], pruned_attention if part == "attention" else {"cross": pruned_attention}
        )
        spec[stack]["pattern"] = entries
        state |= {f"{name}.{key}": tensor for key, tensor in kept_weights(attention, remaining, own.heads).items()}
    dtype = next(model.parameters()).dtype
    pruned = build(read_model(spec), device=checkpoint.device, dtype=dtype).train(model.training)
    pruned.load_state_dict(state)
    return replace(checkpoint, model=pruned)


def find_attention(model: nn.Module, name: str) -> tuple[Attention, tuple[str, int, str]]:
    """The attention of this name, and its stack, layer and part."""
    attentions = {key: module for key, module in model.named_modules() if isinstance(module, Attention)}
    if (
        name not in attentions
        or (match := re.fullmatch(r"(encoder|decoder)\.layers\.(\d+)\.(attention|cross)", name)) is None
    ):
        raise UsageError(f"no attention {quote(name)}{did_you_mean(name, attentions)}")
    if len(module_names(model)[attentions[name]]) > 1:
        raise UnsupportedError(f"{name} is shared by several layers, so its heads cannot be pruned")
    return attentions[name], (match[1], int(match[2]), match[3])


def kept_weights(attention: Attention, remaining: Sequence[int], heads: int) -> dict[str, Tensor]:
    """The weights of an attention for some of its heads, by name."""
    weights = {}
    for part in ("query", "key", "value"):
        module = getattr(attention, part)
        count = module.weight.shape[0] // module.size
        numbers = sorted({head * count // heads for head in remaining})
        for name, tensor in module.named_parameters():
            weights[f"{part}.{name}"] = tensor.detach().unflatten(0, (count, -1))[numbers].flatten(0, 1)
    weight = attention.output.weight.detach()
    weights["output.weight"] = weight.unflatten(1, (heads, -1))[:, remaining].flatten(1)
    return weights
