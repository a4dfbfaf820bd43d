"""Weights in blocks of 32, in the formats of GGUF files: a scale in half precision and 8 or 4 bits per weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.errors import NonFiniteError

BLOCK = 32  # weights
MIN_LARGEST = 1e-36  # a block of a vector whose numbers are all smaller is zero


@dataclass(frozen=True)
class BlockFormat:
    """The bytes of a block, and the conversion of blocks from and to float32, …×32."""

    name: str
    number: int  # in products.c
    block_bytes: int
    from_float: Callable[[Tensor], Tensor]
    to_float: Callable[[Tensor], Tensor]

    def quantize(self, weights: Tensor) -> Tensor:
        """The rows of a matrix, whose length is a multiple of 32, as rows of bytes."""
        return self.from_float(weights.float().unflatten(-1, (-1, BLOCK))).flatten(-2)

    def dequantize(self, rows: Tensor) -> Tensor:
        """Rows of bytes as float32."""
        return self.to_float(rows.unflatten(-1, (-1, self.block_bytes))).flatten(-2)


def half_bytes(values: Tensor) -> Tensor:
    """Numbers …×1 as the bytes of half precision, …×2."""
    halves = values.half()
    if not halves.isfinite().all():
        raise NonFiniteError(f"a scale of {float(values.abs().max()):.3g} is too large for half precision")
    return halves.view(torch.uint8)


def read_half(data: Tensor) -> Tensor:
    """Bytes …×2 as numbers …×1."""
    return data.contiguous().view(torch.float16).float()


def q8_0_from_float(x: Tensor) -> Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    q = torch.where(scale > 0, x / scale, 0).round().to(torch.int8)
    return torch.cat((half_bytes(scale), q.view(torch.uint8)), dim=-1)


def q8_0_to_float(data: Tensor) -> Tensor:
    return read_half(data[..., :2]) * data[..., 2:].contiguous().view(torch.int8).float()


def pack_nibbles(q: Tensor) -> Tensor:
    """Numbers from 0 to 15, …×32, as bytes …×16: number i and number i + 16 in one byte."""
    low, high = q.to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4


def read_nibbles(data: Tensor) -> Tensor:
    return torch.cat((data & 15, data >> 4), dim=-1).float()


def q4_0_from_float(x: Tensor) -> Tensor:
    # the number with the largest magnitude becomes −8 or, negated, so does the scale: all 16 values are used
    largest = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    scale = largest / -8
    q = torch.where(scale != 0, x / scale, 0).round().clamp(-8, 7) + 8
    return torch.cat((half_bytes(scale), pack_nibbles(q)), dim=-1)


def q4_0_to_float(data: Tensor) -> Tensor:
    return read_half(data[..., :2]) * (read_nibbles(data[..., 2:]) - 8)


def q4_1_from_float(x: Tensor) -> Tensor:
    low, high = x.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / 15
    q = torch.where(scale > 0, (x - low) / scale, 0).round().clamp(0, 15)
    return torch.cat((half_bytes(scale), half_bytes(low), pack_nibbles(q)), dim=-1)


def q4_1_to_float(data: Tensor) -> Tensor:
    return read_half(data[..., :2]) * read_nibbles(data[..., 4:]) + read_half(data[..., 2:4])


FORMATS = {
    "q8_0": BlockFormat("q8_0", 1, 34, q8_0_from_float, q8_0_to_float),
    "q4_0": BlockFormat("q4_0", 2, 18, q4_0_from_float, q4_0_to_float),
    "q4_1": BlockFormat("q4_1", 3, 20, q4_1_from_float, q4_1_to_float),
}


def quantize_vectors(x: Tensor) -> Tensor:
    """The vectors that a kernel computes with in place of x: 8 bits and a scale per block."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    largest = torch.where(largest < MIN_LARGEST, 0.0, largest)  # 127 / largest would be infinite; NaN stays
    q = (blocks * torch.where(largest == 0, 0.0, 127 / largest)).round()
    return (q * (largest / 127)).flatten(-2)
