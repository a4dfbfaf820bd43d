"""A quantized matrix that stands in for a float32 weight: products and lookups read its blocks, all else a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from manyheads.errors import UnsupportedError
from manyheads.kernels.blocks import BLOCK, FORMATS
from manyheads.kernels.linear import tiled_linear


class QuantizedWeight(torch.Tensor):
    """A matrix of blocks. It has the shape and dtype of the weight that it replaces, and cannot be changed.

    The kernels compute a step of one token; whole texts are read with weights that are dequantized tile by tile. So the
    path does not depend on the batch, and in a step a sequence has the same output beside any others.
    """

    rows: Tensor  # outputs × bytes
    format: str
    int8_activations: bool

    @staticmethod
    def __new__(cls, rows: Tensor, format: str, int8_activations: bool = True) -> QuantizedWeight:  # noqa: A002
        size = rows.shape[1] // FORMATS[format].block_bytes * BLOCK
        weight: QuantizedWeight = torch.Tensor._make_wrapper_subclass(
            cls, (len(rows), size), dtype=torch.float32, device=rows.device
        )
        weight.rows, weight.format, weight.int8_activations = rows, format, int8_activations
        return weight

    @classmethod
    def quantize(cls, weight: Tensor, format: str, int8_activations: bool = True) -> QuantizedWeight:  # noqa: A002
        return cls(FORMATS[format].quantize(weight.detach()), format, int8_activations)

    def with_rows(self, rows: Tensor) -> QuantizedWeight:
        return QuantizedWeight(rows, self.format, self.int8_activations)

    def dequantize(self) -> Tensor:
        return torch.ops.manyheads.dequantize(self.rows, self.format)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedWeight({self.format}, {tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, bool]]:
        """So that torch exchanges whole tensors where a module moves to another device."""
        return ["rows"], (self.format, self.int8_activations)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], settings: tuple[str, bool], *_: Any) -> QuantizedWeight:
        return QuantizedWeight(tensors["rows"], *settings)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in REPLACED:
            return REPLACED[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # the base class would make results QuantizedWeights
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return args[0].with_rows(args[0].rows)
        if func is aten.clone.default:
            return args[0].with_rows(args[0].rows.clone())
        if func is aten._to_copy.default:
            if kwargs.get("dtype") not in (None, torch.float32):
                raise UnsupportedError("quantized weights compute in float32; load the checkpoint without `weights`")
            return args[0].with_rows(args[0].rows.to(kwargs.get("device")))
        if func._schema.is_mutable and isinstance(args[0], QuantizedWeight):
            raise UnsupportedError("quantized weights cannot be changed in place; quantize the changed ones")
        plain = tree_map_only(QuantizedWeight, QuantizedWeight.dequantize, (args, kwargs))
        return func(*plain[0], **plain[1])


def linear(input: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    is_step = input.dim() == 3 and input.shape[1] == 1 and not (torch.is_grad_enabled() and input.requires_grad)
    if is_step:
        return torch.ops.manyheads.quantized_linear(input, weight.rows, bias, weight.format, weight.int8_activations)
    return tiled_linear(input, weight.rows, bias, weight.format)


def embedding(input: Tensor, weight: QuantizedWeight, *_: Any, **__: Any) -> Tensor:  # noqa: A002
    return torch.ops.manyheads.dequantize(F.embedding(input, weight.rows), weight.format)


def select_rows(weight: QuantizedWeight, index: Any) -> Any:
    """Some rows of the matrix are quantized too; any other part is float32."""
    if isinstance(index, slice) or (isinstance(index, Tensor) and index.dim() == 1):
        return weight.with_rows(weight.rows[index])
    return weight.dequantize()[index]


def split(weight: QuantizedWeight, sizes: Any, dim: int = 0) -> Any:
    if dim != 0:
        return weight.dequantize().split(sizes, dim)
    return tuple(weight.with_rows(rows) for rows in weight.rows.split(sizes))


def contiguous(weight: QuantizedWeight, **_: Any) -> QuantizedWeight:
    return weight.with_rows(weight.rows.contiguous())


REPLACED: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    F.embedding: embedding,
    torch.Tensor.__getitem__: select_rows,
    torch.Tensor.split: split,
    torch.Tensor.contiguous: contiguous,
}
