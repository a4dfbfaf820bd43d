"""What a model costs, from its spec alone: parameters, multiply–adds, memory. Nothing is allocated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from manyheads.model.build import Model, countable, outline
from manyheads.model.spec import ModelSpec, TowerSpec
from manyheads.model.state import size_of
from manyheads.parts.batch import Inputs
from manyheads.spec import LARGEST, SpecError, quoted

BYTES = 4  # of a float32
LONGEST_WALK = 1 << 10


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
    activation_bytes: int  # what a forward keeps for its backward on a CPU, if nothing is masked; of an LSTM's reader, less
    training_bytes: int  # weights, gradients, Adam's two moments, activations
    cache_bytes: int | None  # of decoding up to `length`; None where the model does not write


def size(spec: ModelSpec, *, batch: int = 1, length: int = 128, source_length: int | None = None) -> Size:
    """Runs the model without memory, counting what every part multiplies and keeps."""
    if not isinstance(spec, ModelSpec):
        raise SpecError(f"given a {type(spec).__name__}, expected a ModelSpec, as read and read_model make")
    source_length = length if source_length is None else source_length
    for name, given in (("batch", batch), ("length", length), ("source_length", source_length)):
        if type(given) is not int or not 1 <= given <= LARGEST:
            raise SpecError(f"{name} is {quoted(given)}, expected a whole number from 1 to {LARGEST}")
    if spec.recurrent and length > LONGEST_WALK:
        raise SpecError(f"length is {length}: a recurrent network is walked token by token, {LONGEST_WALK} at most to be counted")
    model = outline(spec)
    inputs, source = blank(spec, batch, length, source_length)
    activations = kept_bytes(model, inputs, source)
    with torch.device("meta"), torch.no_grad(), Products(model.eval()) as products:
        model(inputs, source) if source else model(inputs)
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
        multiply_adds=products.by_part.total(),
        multiply_adds_by_part=dict(products.by_part),
        weights_bytes=weights,
        activation_bytes=activations,
        training_bytes=4 * weights + activations,
        cache_bytes=cache_bytes(model, inputs, source),
    )


def kept_bytes(model: Model, inputs: Inputs, source: Inputs | None) -> int:
    """What a forward of a model without memory keeps for its backward."""
    kept = Kept(model.train())
    with countable(), torch.device("meta"), kept, FusedAttention():
        model(inputs, source) if source else model(inputs)
    return kept.bytes


def blank(spec: ModelSpec, batch: int, length: int, source_length: int) -> tuple[Inputs, Inputs | None]:
    """Inputs of the right shapes for the last tower and, where there is one, for the source."""

    def tokens(tower: TowerSpec | None, length: int) -> Inputs:
        pixels = tower.embed.patch() if tower else None
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


def readable(count: int) -> str:
    """Bytes as people read them."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def part_of(path: str) -> str:
    """'decoder.layers.3.attention.query.weight' → 'decoder.layers.attention': layers together, a part a row."""
    steps = [step for step in path.split(".") if not step.isdigit()]
    return ".".join(steps[: 3 if "layers" in steps else 2 if steps[0] in ("encoder", "decoder") else 1])


class Products(TorchDispatchMode):
    """Multiply–adds by part: every product goes to the innermost module at work, counted by torch's own formulas."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_part, self.at_work = Counter[str](), list[str]()
        for path, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, path))
            module.register_forward_hook(self._leave)

    def _enter(self, path: str, *_: Any) -> None:
        self.at_work.append(path)

    def _leave(self, *_: Any) -> None:
        self.at_work.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            self.by_part[part_of(self.at_work[-1])] += formula(*args, **(kwargs or {}), out_val=made) // 2
        return made


class Kept(saved_tensors_hooks):
    """Bytes that a forward keeps for its backward: every storage that autograd saves, once each, but for the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {storage_of(parameter) for parameter in model.parameters()}
        self.held: dict[int, Tensor] = {}
        super().__init__(self.hold, lambda tensor: tensor)

    def hold(self, tensor: Tensor) -> Tensor:
        self.held[storage_of(tensor)] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for storage, tensor in self.held.items() if storage not in self.weights)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class FusedAttention(TorchFunctionMode):
    """Takes the fused kernel where a CPU would: without memory, torch takes the one that makes the whole matrix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mask = kwargs.get("attn_mask")
        if func is not F.scaled_dot_product_attention or kwargs["dropout_p"] or (mask is not None and mask.requires_grad):
            return func(*args, **kwargs)
        if mask is not None and not mask.is_floating_point():
            mask = mask.to(args[0].dtype)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(*args, 0.0, kwargs["is_causal"], attn_mask=mask, scale=kwargs["scale"])[0]


def cache_bytes(model: Model, inputs: Inputs, source: Inputs | None) -> int | None:
    """What a state holds after reading the inputs; None for a model that does not write."""
    if not model.writes:
        return None
    with torch.device("meta"), torch.no_grad():
        _, state = model.step(inputs, model.start(source, capacity=inputs.length))  # type: ignore[arg-type]
    return size_of(state)
