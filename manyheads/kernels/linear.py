"""y = x Wᵀ + b with quantized W, as a torch operator: the C kernels on a CPU, and the same computation in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import InputShapeError
from manyheads.kernels.blocks import BLOCK, FORMATS, quantize_vectors
from manyheads.kernels.library import kernels, num_threads, work_size

TILE = 1 << 22  # weights that are dequantized at once for a product with many vectors

LIBRARY = torch.library.Library("manyheads", "DEF")
LIBRARY.define("quantized_linear(Tensor x, Tensor rows, Tensor? bias, str format, bool int8_activations) -> Tensor")
LIBRARY.define("dequantize(Tensor rows, str format) -> Tensor")


def quantized_linear(x: Tensor, rows: Tensor, bias: Tensor | None, format: str, int8_activations: bool) -> Tensor:  # noqa: A002
    """The product in torch: the same numbers as the kernels, up to rounding."""
    x = quantize_vectors(x) if int8_activations else x
    return F.linear(x, FORMATS[format].dequantize(rows).to(x.dtype), bias)


def quantized_linear_cpu(x: Tensor, rows: Tensor, bias: Tensor | None, format: str, int8_activations: bool) -> Tensor:  # noqa: A002
    if x.shape[-1] // BLOCK * FORMATS[format].block_bytes != rows.shape[1] or x.shape[-1] % BLOCK:
        raise InputShapeError(f"given vectors of {x.shape[-1]}, expected {rows.shape[1]} bytes of {format} weights")
    if bias is not None and bias.shape != rows.shape[:1]:
        raise InputShapeError(f"given a bias of {tuple(bias.shape)}, expected one per output, {len(rows)}")
    library = kernels()
    if library is None or x.dtype != torch.float32:
        return quantized_linear(x, rows, bias, format, int8_activations)
    x, rows, outputs, size = x.contiguous(), rows.contiguous(), len(rows), x.shape[-1]
    count, threads = x.numel() // size, num_threads()
    bias = None if bias is None else bias.to(x).contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    work = torch.empty(work_size(count, size, threads), dtype=torch.uint8, device="cpu")
    library.linear(
        library.variant, FORMATS[format].number, rows.data_ptr(), x.data_ptr(),
        None if bias is None else bias.data_ptr(), out.data_ptr(), count, size, outputs, int8_activations,
        work.data_ptr(), threads,
    )  # fmt: skip
    return out


def dequantize(rows: Tensor, format: str) -> Tensor:  # noqa: A002
    return FORMATS[format].dequantize(rows)


def dequantize_cpu(rows: Tensor, format: str) -> Tensor:  # noqa: A002
    library, block_format = kernels(), FORMATS[format]
    if library is None:
        return dequantize(rows, format)
    rows, size = rows.contiguous(), rows.shape[-1] // block_format.block_bytes * BLOCK
    out = torch.empty(*rows.shape[:-1], size, dtype=torch.float32, device="cpu")
    count = rows.numel() // max(rows.shape[-1], 1)
    library.dequantize(block_format.number, rows.data_ptr(), out.data_ptr(), count, size, num_threads())
    return out


LIBRARY.impl("quantized_linear", quantized_linear, "CompositeExplicitAutograd")
LIBRARY.impl("quantized_linear", quantized_linear_cpu, "CPU")
LIBRARY.impl("dequantize", dequantize, "CompositeExplicitAutograd")
LIBRARY.impl("dequantize", dequantize_cpu, "CPU")


def tiled_linear(x: Tensor, rows: Tensor, bias: Tensor | None, format: str) -> Tensor:  # noqa: A002
    """The product with many vectors: W is dequantized tile by tile, and x keeps its precision."""
    per_tile, outputs = max(1, TILE // x.shape[-1]), []
    for start in range(0, len(rows), per_tile):
        tile = slice(start, start + per_tile)
        weights = torch.ops.manyheads.dequantize(rows[tile], format).to(x.dtype)
        outputs.append(F.linear(x, weights, None if bias is None else bias[tile]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
