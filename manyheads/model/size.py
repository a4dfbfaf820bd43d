"""What a model costs, from its spec alone: parameters, multiply–adds, memory. Nothing is allocated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.model.build import Model, outline
from manyheads.model.spec import ModelSpec, TowerSpec
from manyheads.model.state import size_of
from manyheads.parts.attend import Core
from manyheads.parts.attention import ChunksLinear
from manyheads.parts.embed import Inputs
from manyheads.parts.head import TokenHead

BYTES = 4  # of a float32


@dataclass(frozen=True)
class Size:
    """Counts for one batch of texts of `length`; a multiply–add is two floating-point operations."""

    parameters: int
    parameters_by_part: dict[str, int]
    batch: int
    length: int
    source_length: int | None
    multiply_adds: int  # of one forward
    multiply_adds_by_part: dict[str, int]
    weights_bytes: int  # in float32
    activation_bytes: int  # what a backward pass keeps, about
    training_bytes: int  # weights, gradients, Adam's two moments, activations
    cache_bytes: int | None  # of decoding up to `length`; None where the model does not write


def size(spec: ModelSpec, *, batch: int = 1, length: int = 128, source_length: int | None = None) -> Size:
    """Runs the model once without memory, counting what every part multiplies and keeps."""
    model = outline(spec).eval()
    inputs, source = blank(spec, batch, length, source_length or length)
    count = Count()
    handles = [module.register_forward_hook(count.at(path), with_kwargs=True) for path, module in model.named_modules()]
    with torch.device("meta"):
        model(inputs, source) if source else model(inputs)
    for handle in handles:
        handle.remove()
    parameters = Counter[str]()
    for path, parameter in model.named_parameters():
        parameters[part_of(path)] += parameter.numel()
    weights = BYTES * parameters.total()
    return Size(
        parameters=parameters.total(),
        parameters_by_part=dict(parameters),
        batch=batch,
        length=length,
        source_length=source.length if source else None,
        multiply_adds=count.products.total(),
        multiply_adds_by_part=dict(count.products),
        weights_bytes=weights,
        activation_bytes=count.kept(),
        training_bytes=4 * weights + count.kept(),
        cache_bytes=cache_bytes(model, inputs, source),
    )


def blank(spec: ModelSpec, batch: int, length: int, source_length: int) -> tuple[Inputs, Inputs | None]:
    """Inputs of the right shapes for the last tower and, where there is one, for the source."""

    def tokens(tower: TowerSpec | None, length: int) -> Inputs:
        pixels = getattr(tower and tower.embed, "pixels", None)
        shape = (batch, length, pixels) if pixels else (batch, length)
        return Inputs(torch.zeros(shape, device="meta", dtype=torch.float32 if pixels else torch.long))

    prefix = torch.zeros(batch, device="meta", dtype=torch.long)
    towers = [tower for tower in (spec.encoder, spec.decoder) if tower]
    inputs = tokens(towers[-1] if towers else None, length)
    if towers and any(layer.mask.prefix for layer in towers[-1].expanded()):
        inputs = Inputs(inputs.tokens, prefix=prefix)
    if len(towers) == 2:
        return inputs, tokens(spec.encoder, source_length)
    return inputs, tokens(None, source_length) if spec.recurrent and spec.recurrent.source else None


def part_of(path: str) -> str:
    """'decoder.layers.3.attention.query.weight' → 'decoder.layers.attention': layers together, a part a row."""
    steps = [step for step in path.split(".") if not step.isdigit()]
    return ".".join(steps[: 3 if "layers" in steps else 2])


class Count:
    """Collects products by part and every tensor that passes between modules, once each."""

    def __init__(self) -> None:
        self.products = Counter[str]()
        self.tensors: dict[int, Tensor] = {}

    def at(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if products := multiply_adds(module, args, output):
                self.products[part_of(path)] += products
            if not list(module.children()) or isinstance(module, Core):
                tensors = [value for value in (*args, output) if isinstance(value, Tensor) and value.is_floating_point()]
                self.tensors.update({id(tensor): tensor for tensor in tensors})

        return hook

    def kept(self) -> int:
        return sum(tensor.numel() * BYTES for tensor in self.tensors.values())


def multiply_adds(module: nn.Module, args: Any, output: Any) -> int:
    """The products a module computes itself; what its children compute is theirs."""
    if isinstance(module, nn.Linear):
        return output.numel() * module.in_features
    if isinstance(module, ChunksLinear):
        return output.numel() * module.weight.shape[1]
    if isinstance(module, TokenHead):
        return output.numel() * module.size
    if isinstance(module, Core):
        return module.multiply_adds(*args)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        matrices = sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 2)
        return matrices * (args[0].numel() // args[0].shape[-1])
    return 0


def cache_bytes(model: Model, inputs: Inputs, source: Inputs | None) -> int | None:
    """What a state holds after reading the inputs; None for a model that does not write."""
    with torch.device("meta"):
        try:
            state: Any = model.start(source, batch=inputs.batch, capacity=inputs.length)
        except ValueError:
            return None
        _, state = model.step(inputs, state)
    return size_of(state)
