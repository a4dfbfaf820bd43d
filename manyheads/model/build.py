"""From a spec to a model with weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from manyheads.model.init import initialise
from manyheads.model.ngram import Ngram
from manyheads.model.recurrent import Recurrent
from manyheads.model.spec import ModelSpec
from manyheads.model.transformer import Transformer
from manyheads.spec import SpecError, quoted

Model = Transformer | Recurrent | Ngram


@contextmanager
def countable() -> Iterator[None]:
    """Turns torch's complaint about a size past 2⁶³ into a sentence."""
    try:
        yield
    except RuntimeError as error:
        if "overflow" not in str(error).lower():
            raise
        raise SpecError(
            "one tensor of this model would hold more numbers than can be counted; make the model, batch or length smaller"
        ) from None


class NoFirstValues(TorchFunctionMode):
    """Leaves out what modules do to their weights when they are made: without memory there is nothing to set.

    Drawing numbers for no memory also makes torch load its compiler, which takes longer than all the rest.
    """

    SETTERS = frozenset(
        getattr(place, name)
        for place in (nn.init, torch.Tensor)
        for name in ("normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_", "zeros_", "ones_", "constant_", "fill_", "zero_")
        if hasattr(place, name)
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.SETTERS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def outline(spec: ModelSpec) -> Model:
    """The model without memory: every shape is there, no number is."""
    if not isinstance(spec, ModelSpec):
        raise SpecError(f"given a {type(spec).__name__}, expected a ModelSpec, as read and read_model make")
    if spec.vocab == "tokenizer":
        raise SpecError("is 'tokenizer': the number of tokens is known only with the data; give a number to build without", ("vocab",))
    vocab = spec.vocab or 0
    kind = Recurrent if spec.recurrent else Ngram if spec.ngram else Transformer
    with countable(), torch.device("meta"), NoFirstValues():
        return kind(spec, vocab)


def usable(device: str | torch.device) -> torch.device:
    """The device by its name, if there is one."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise SpecError(f"device is {quoted(device)}, expected cpu, cuda, cuda:1 or mps") from None
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(found.type, False):
        raise SpecError(f"there is no {found.type} here; take cpu")
    if found.type == "cuda" and found.index is not None and found.index >= torch.cuda.device_count():
        raise SpecError(f"there is no {found} here: there are {torch.cuda.device_count()}, counted from 0")
    return found


def device_for(name: str) -> torch.device:
    """A device by its name; auto takes a GPU where there is one."""
    if name != "auto":
        return usable(name)
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def build(spec: ModelSpec, *, seed: int = 0, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """The model with its first weights: the same spec and seed give the same bits."""
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise SpecError(f"seed is {quoted(seed)}, expected a whole number from 0")
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise SpecError(f"dtype is {quoted(dtype)}, expected torch.float64, float32, bfloat16 or float16")
    device = usable(device)
    model = outline(spec).to(dtype).to_empty(device=device)
    for name, module in model.named_modules():
        if module._buffers and not hasattr(module, "reset_parameters"):
            raise SpecError(f"{name} has a buffer and no reset_parameters: what it holds is lost in a build without memory; set it there")
    tensors = dict(model.named_parameters()) | {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    with torch.no_grad(), torch.random.fork_rng():
        for tensor in tensors.values():
            tensor.fill_(torch.nan)  # so that what nobody sets is seen
        torch.manual_seed(seed)
        initialise(model, spec.init)
        for name, tensor in tensors.items():
            if tensor.isnan().any():
                raise SpecError(f"nobody sets {name}: a part with weights of its own sets them in reset_parameters")
            if not tensor.isfinite().all():
                raise SpecError(f"{name} begins beyond the numbers that {dtype} has; begin smaller (init) or take another dtype")
    return model
