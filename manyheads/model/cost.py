"""Parameters, multiply–adds and memory of a model, counted on the meta device without allocating its weights."""

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

from manyheads.errors import UsageError
from manyheads.model.builder import Model, build_meta, overflow_as_error
from manyheads.model.cache import state_bytes
from manyheads.model.recording import in_this_thread
from manyheads.model.spec import ModelSpec, StackSpec
from manyheads.parts.inputs import Inputs
from manyheads.spec import MAX_COUNT, quote

BYTES = 4  # bytes of a float32
MAX_RECURRENT_LENGTH = 1 << 10  # a recurrent network runs token by token, which is slow


@dataclass(frozen=True)
class Size:
    """Costs of one batch of sequences of `length`. A multiply–add is two floating-point operations."""

    parameters: int
    parameters_by_part: dict[str, int]
    batch: int
    length: int
    source_length: int | None
    multiply_adds: int  # in one forward pass
    multiply_adds_by_part: dict[str, int]
    weights_bytes: int  # in float32
    activation_bytes: int  # saved for the backward pass on a CPU, without masks; too low for an LSTM encoder
    training_bytes: int  # weights, gradients, Adam's two moments, activations
    cache_bytes: int | None  # size of the decoding state at `length`; None if the model cannot generate


def size(spec: ModelSpec, *, batch: int = 1, length: int = 128, source_length: int | None = None) -> Size:
    """Runs the model on the meta device, and counts the multiply–adds and the saved tensors of every part."""
    source_length = length if source_length is None else source_length
    for name, value in (("batch", batch), ("length", length), ("source_length", source_length)):
        if type(value) is not int or not 1 <= value <= MAX_COUNT:
            raise UsageError(f"{name} is {quote(value)}, expected an integer from 1 to {MAX_COUNT}")
    model = build_meta(spec)
    if spec.recurrent and length > MAX_RECURRENT_LENGTH:
        raise UsageError(f"length is {length}, expected at most {MAX_RECURRENT_LENGTH} for a recurrent network")
    inputs, source = dummy_inputs(spec, batch, length, source_length)
    activations = saved_bytes(model, inputs, source)
    by_module, state = count_multiply_adds(model, inputs, source)
    parameters, multiply_adds = Counter[str](), Counter[str]()
    for path, parameter in model.named_parameters():
        parameters[part_of(path)] += parameter.numel()
    for path, count in by_module.items():
        multiply_adds[part_of(path)] += count
    weights = BYTES * parameters.total()
    return Size(
        parameters=parameters.total(),
        parameters_by_part=dict(parameters),
        batch=batch,
        length=length,
        source_length=source.length if source else None,
        multiply_adds=multiply_adds.total(),
        multiply_adds_by_part=dict(multiply_adds),
        weights_bytes=weights,
        activation_bytes=activations,
        training_bytes=4 * weights + activations,
        cache_bytes=None if state is None else state_bytes(state),
    )


def count_parameters(module: nn.Module) -> int:
    """The number of parameters of a module; a shared one counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_multiply_adds(model: Model, inputs: Inputs, source: Inputs | None) -> tuple[Counter[str], Any]:
    """The multiply–adds of each module in a forward pass on the meta device, and the decoding state after it."""
    with torch.device("meta"), torch.no_grad(), MultiplyAdds(model.eval()) as multiply_adds:
        state = final_state(model, inputs, source)
    return multiply_adds.by_module, state


def saved_bytes(model: Model, inputs: Inputs, source: Inputs | None) -> int:
    """The bytes that a forward pass on the meta device saves for the backward pass."""
    saved = SavedTensors(model.train())
    with overflow_as_error(), torch.device("meta"), saved, FusedAttention():
        model(inputs, source)
    return saved.bytes


def dummy_inputs(spec: ModelSpec, batch: int, length: int, source_length: int) -> tuple[Inputs, Inputs | None]:
    """Inputs of the given sizes on the meta device, and a source if the model has one."""

    def tokens(stack: StackSpec | None, length: int) -> Tensor:
        pixels = stack.embed.patch_pixels() if stack else None
        shape = (batch, length, pixels) if pixels else (batch, length)
        return torch.zeros(shape, device="meta", dtype=torch.float32 if pixels else torch.long)

    last = spec.decoder or spec.encoder
    needs_prefix = last is not None and any(layer.mask.prefix for layer in last.expanded_layers())
    prefix = torch.zeros(batch, device="meta", dtype=torch.long) if needs_prefix else None
    source = Inputs(tokens(spec.encoder, source_length)) if spec.has_source else None
    return Inputs(tokens(last, length), prefix_lengths=prefix), source


def format_bytes(count: int) -> str:
    """Formats a number of bytes with its unit, such as 1.5 GiB."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.4g} {units[0]}"


def part_of(path: str) -> str:
    """The part that a path belongs to, the same for all layers.

    Example: 'decoder.layers.3.attention.query.weight' → 'decoder.layers.attention'.
    """
    steps = [step for step in path.split(".") if not step.isdigit()]
    return ".".join(steps[: 3 if "layers" in steps else 2 if steps[0] in ("encoder", "decoder") else 1])


class MultiplyAdds(TorchDispatchMode):
    """Counts multiply–adds with torch's formulas. Each product counts for the innermost running module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_module, self.running = Counter[str](), list[str]()
        for path, module in model.named_modules():
            module.register_forward_pre_hook(in_this_thread(partial(self._enter, path)))
            module.register_forward_hook(in_this_thread(self._leave))

    def _enter(self, path: str, *_: Any) -> None:
        self.running.append(path)

    def _leave(self, *_: Any) -> None:
        self.running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            self.by_module[self.running[-1]] += formula(*args, **(kwargs or {}), out_val=out) // 2
        return out


class SavedTensors(saved_tensors_hooks):
    """Collects the tensors that autograd saves during a forward pass, each storage once, without the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {storage_of(parameter) for parameter in model.parameters()}
        self.tensors: dict[int, Tensor] = {}
        super().__init__(self.save, lambda tensor: tensor)

    def save(self, tensor: Tensor) -> Tensor:
        self.tensors[storage_of(tensor)] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        activations = (tensor for storage, tensor in self.tensors.items() if storage not in self.weights)
        return sum(tensor.untyped_storage().nbytes() for tensor in activations)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class FusedAttention(TorchFunctionMode):
    """Calls the fused kernel of the CPU, because on the meta device torch would compute the whole attention matrix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mask = kwargs.get("attn_mask")
        learned_bias = mask is not None and mask.requires_grad
        if func is not F.scaled_dot_product_attention or kwargs["dropout_p"] or learned_bias:
            return func(*args, **kwargs)
        if mask is not None and not mask.is_floating_point():
            mask = mask.to(args[0].dtype)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(*args, 0.0, kwargs["is_causal"], attn_mask=mask, scale=kwargs["scale"])[0]


def final_state(model: Model, inputs: Inputs, source: Inputs | None) -> Any:
    """Runs a forward pass, and returns the decoding state after it; None if the model cannot generate."""
    if not model.can_generate:
        model(inputs, source)
        return None
    return model.step(inputs, model.start(source, capacity=inputs.length))[1]  # type: ignore[arg-type]
