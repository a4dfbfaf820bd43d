"""Quantizes the matrices of a model to 8 or 4 bits per weight, for decoding on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from manyheads.kernels.blocks import BLOCK
from manyheads.kernels.weight import QuantizedWeight
from manyheads.parts.embed import Embed

FORMATS = {"int8": "q8_0", "int4": "q4_0"}  # a scale in half precision per 32 weights: 8.5 and 4.5 bits per weight


def quantize_model(model: nn.Module, weights: str | None) -> None:
    """Replaces the matrices of linear layers and the token table by quantized ones, "int8" or "int4", one at a time.

    Other parameters, and matrices whose rows are not a multiple of 32 long, stay as they are. None only freezes a model
    whose matrices are quantized already.
    """
    model.requires_grad_(False)
    if weights is None:
        return
    for module in quantizable_modules(model):
        weight = module.weight
        if weight.shape[1] % BLOCK == 0 and not isinstance(weight, QuantizedWeight):
            quantized = QuantizedWeight.quantize(weight, FORMATS[weights])
            module.weight = nn.Parameter(quantized, requires_grad=False)


def is_quantized(module: nn.Module) -> bool:
    """Whether some matrices of a module are quantized."""
    return any(isinstance(weight, QuantizedWeight) for weight in module.parameters())


def quantizable_modules(model: nn.Module) -> Iterator[nn.Linear | nn.Embedding]:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield module
        elif isinstance(module, Embed) and module.table is not None:
            yield module.table
