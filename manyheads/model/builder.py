"""Builds a model from its spec, with initial weights or on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from manyheads.errors import ConfigError, DeviceError, OutOfRangeError, PartsFileError, UsageError, WrongTypeError
from manyheads.model.init import init_weights
from manyheads.model.ngram import Ngram
from manyheads.model.recurrent import Recurrent
from manyheads.model.spec import ModelSpec
from manyheads.model.transformer import Transformer
from manyheads.spec import quote

Model = Transformer | Recurrent | Ngram
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def overflow_as_error() -> Iterator[None]:
    """Raises OutOfRangeError for torch's error about a size above 2⁶³."""
    try:
        yield
    except RuntimeError as error:
        if "overflow" not in str(error).lower():
            raise
        raise OutOfRangeError("a tensor of this model would have more than 2⁶³ elements; reduce its sizes") from None


class SkipInit(TorchFunctionMode):
    """Skips the initialization in the constructors of modules, which has no effect on the meta device.

    Random numbers on the meta device also make torch import its compiler, which is slower than the rest of the build.
    """

    SKIPPED = frozenset(
        getattr(owner, name)
        for owner in (nn.init, torch.Tensor)
        for name in (
            "normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_",
            "zeros_", "ones_", "constant_", "fill_", "zero_",
        )
        if hasattr(owner, name)
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.SKIPPED:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def build_meta(spec: ModelSpec) -> Model:
    """Builds the model on the meta device, where tensors have shapes but no values and no memory."""
    if not isinstance(spec, ModelSpec):
        raise WrongTypeError(f"given a {type(spec).__name__}, expected a ModelSpec, which read and read_model return")
    if spec.vocab == "tokenizer":
        raise ConfigError("'tokenizer' needs a tokenizer; give a vocabulary size to build without one", ("vocab",))
    model = Recurrent if spec.recurrent else Ngram if spec.ngram else Transformer
    with overflow_as_error(), torch.device("meta"), SkipInit():
        return model(spec, spec.vocab or 0)


def modules_with_buffers(model: Model) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if list(module.buffers(recurse=False))}


def check_buffers(model: Model) -> None:
    """Raises if a module with buffers has no reset_parameters() that initializes them."""
    for name, module in modules_with_buffers(model).items():
        if not hasattr(module, "reset_parameters"):
            raise PartsFileError(f"{name} has a buffer but no reset_parameters() that initializes it")


def floating_tensors(model: Model) -> dict[str, torch.Tensor]:
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return dict(model.named_parameters()) | buffers


def init_buffers(model: Model, dtype: torch.dtype) -> None:
    """Initializes the buffers of a model on the meta device, whose weights are loaded afterwards."""
    check_buffers(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for module in modules_with_buffers(model).values():
            module.to_empty(device="cpu", recurse=False).to(dtype).reset_parameters()


def check_device(device: str | torch.device) -> torch.device:
    """Checks that this machine has the device, and returns it."""
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError):
        raise DeviceError(f"device is {quote(device)}, expected cpu, cuda, cuda:1 or mps") from None
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = {"cpu": 1, "cuda": cuda, "mps": int(torch.backends.mps.is_available())}.get(torch_device.type, 0)
    if not count:
        raise DeviceError(f"this machine has no {torch_device.type} device; use cpu")
    if torch_device.type == "cuda" and torch_device.index is not None and torch_device.index >= count:
        raise DeviceError(f"this machine has no {torch_device}, only cuda:0 to cuda:{count - 1}")
    return torch_device


def resolve_device(name: str | torch.device) -> torch.device:
    """The device of this name. 'auto' is a GPU if there is one, else the CPU."""
    if name != "auto":
        return check_device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def manual_seed(seed: int) -> None:
    """As torch.manual_seed, which without an accelerator formats three stack traces, a millisecond, at each call."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Computes with this many threads inside the block."""
    old_count = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(old_count)


def build(
    spec: ModelSpec, *, seed: int = 0, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Model:
    """Builds the model with initial weights. The same spec and seed give the same bits."""
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise UsageError(f"seed is {quote(seed)}, expected an integer from 0 to 2⁶³ − 1")
    if dtype not in DTYPES:
        raise UsageError(f"dtype is {quote(dtype)}, expected torch.float64, float32, bfloat16 or float16")
    device = check_device(device)
    model = build_meta(spec).to(dtype).to_empty(device=device)
    check_buffers(model)
    with torch.no_grad(), torch.random.fork_rng():
        for tensor in floating_tensors(model).values():
            tensor.fill_(torch.nan)  # a tensor that is still NaN below was not initialized
        manual_seed(seed)
        init_weights(model, spec.init)
        parameters = dict(model.named_parameters())
        for name, tensor in floating_tensors(model).items():  # reset_parameters() may have replaced some
            if tensor.isnan().any():
                raise PartsFileError(f"{name} is uninitialized: its module needs reset_parameters()")
            if name in parameters and not tensor.isfinite().all():
                raise OutOfRangeError(
                    f"initial values of {name} are outside the range of {dtype}; lower init or use another dtype"
                )
    return model
