"""A plan: one step of decoding as a list of instructions, which step.c runs in one call.

Each part of a model adds its own instructions (`lower`). A part that cannot raises NotLoweredError, and the model runs
as its modules do.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import InputShapeError
from manyheads.kernels.blocks import FORMATS
from manyheads.kernels.library import Library, num_threads, work_size
from manyheads.kernels.weight import QuantizedWeight

INSTRUCTION, STEP, ANGLES = "12q2d", "11q", "3q"  # the structures of step.c


class NotLoweredError(Exception):
    """Raised by a part that has no instructions."""


def require_type(module: nn.Module, kind: type) -> None:
    """Raises if a module has a class of its own, whose forward may compute something else."""
    if type(module) is not kind:
        raise NotLoweredError


class Op(IntEnum):
    """The operations of step.c."""

    NORM = 0
    LINEAR = 1
    ROTATE_AND_STORE = 2
    ATTEND = 3
    ACTIVATE = 4
    ADD = 5


class Flag(IntFlag):
    """The flags of step.c."""

    SAME_INPUT = 1
    ACCUMULATE = 2
    NO_BARRIER = 4
    SUBTRACT_MEAN = 8
    INTERLEAVED = 16
    INT8_ACTIVATIONS = 32


@dataclass(frozen=True)
class Register:
    """A vector per token; `start` is the number of floats per token before it."""

    start: int
    width: int


@dataclass
class Instruction:
    """One instruction, with the fields of step.c; registers are offsets only when the number of tokens is known."""

    op: Op
    out: Register
    input: Register
    other: Register | None = None
    width: int = 0
    size: int = 0
    count: int = 0
    format: int = 0
    weight: int = 0
    bias: int = 0
    flags: int = 0
    layer: int = 0
    number: float = 0.0
    second: float = 0.0

    def pack(self, tokens: int) -> bytes:
        other = -1 if self.other is None else self.other.start * tokens
        return struct.pack(
            INSTRUCTION, self.op, self.out.start * tokens, self.input.start * tokens, other, self.width, self.size,
            self.count, self.format, self.weight, self.bias, self.flags, self.layer, self.number, self.second,
        )  # fmt: skip


class Plan:
    """The instructions of a model, and the weights whose addresses they hold."""

    def __init__(self, width: int) -> None:
        self.instructions: list[Instruction] = []
        # the parameters of a module, the name of one, the parameter itself, its data and their address
        self.weights: list[tuple[dict[str, Any], str, Tensor | None, Tensor | None, int]] = []
        self.used = self.width = 0  # floats per token of the registers in use, and of all
        self.largest_input = 0
        self.input = self.output = self.register(width)
        self.packed: dict[int, Tensor] = {}

    # ------------------------------------------------------------------------------------------------------ lowering

    def register(self, width: int) -> Register:
        register = Register(self.used, width)
        self.used += width
        self.width = max(self.width, self.used)
        return register

    def free_after(self, register: Register) -> None:
        """Frees all registers that were made after this one, which is still used."""
        self.used = register.start + register.width

    def address(self, module: nn.Module, name: str) -> int:
        """The address of a parameter in float32, or of the rows of a quantized one; 0 if the module has none."""
        parameter: Any = getattr(module, name, None)
        tensor = parameter.rows if isinstance(parameter, QuantizedWeight) else parameter
        if tensor is not None:
            expected = torch.uint8 if isinstance(parameter, QuantizedWeight) else torch.float32
            if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype != expected:
                raise NotLoweredError
        address = 0 if tensor is None else tensor.data_ptr()
        self.weights.append((module._parameters, name, parameter, tensor, address))
        return address

    def add(self, op: Op, out: Register, input: Register, other: Register | None = None, **fields: Any) -> Register:  # noqa: A002
        self.instructions.append(Instruction(op, out, input, other, **fields))
        return out

    def norm(
        self, x: Register, module: nn.Module, *, eps: float, subtract_mean: bool = False, gain: float = 0.0,
        width: int | None = None, out: Register | None = None,
    ) -> Register:  # fmt: skip
        """Normalizes each `width` floats of x, by default all of them; `gain` is added to the weight."""
        width = width or x.width
        return self.add(
            Op.NORM, out or self.register(x.width), x,
            width=width, count=x.width // width, weight=self.address(module, "weight"),
            bias=self.address(module, "bias"), flags=Flag.SUBTRACT_MEAN if subtract_mean else Flag(0),
            number=eps, second=gain,
        )  # fmt: skip

    def linear(
        self, x: Register, module: nn.Module, *, kind: type = nn.Linear, bias_of: nn.Module | None = None,
        add_to: Register | None = None,
    ) -> Register:  # fmt: skip
        """W x + b, in a new register or added to one.

        A module of another type than `kind` may compute something else. `bias_of` is the module of the bias, if it is
        another one.
        """
        require_type(module, kind)
        weight = module.weight
        assert isinstance(weight, Tensor)
        outputs, size = weight.shape
        if size != x.width:
            raise NotLoweredError
        flags, number = Flag.ACCUMULATE if add_to is not None else Flag(0), 0
        if isinstance(weight, QuantizedWeight):
            number, flags = FORMATS[weight.format].number, flags | weight.int8_activations * Flag.INT8_ACTIVATIONS
        assert x != add_to, "a product cannot change the register that it reads"
        previous = self.instructions[-1] if self.instructions else None
        if previous is not None and previous.op is Op.LINEAR and previous.input == x != previous.out:
            previous.flags |= Flag.NO_BARRIER
            if previous.format and number and previous.flags & flags & Flag.INT8_ACTIVATIONS:
                flags |= Flag.SAME_INPUT
        self.largest_input = max(self.largest_input, size)
        return self.add(
            Op.LINEAR, add_to or self.register(outputs), x, width=outputs, size=size, format=number,
            weight=self.address(module, "weight"), bias=self.address(bias_of or module, "bias"), flags=flags,
        )  # fmt: skip

    def attend(
        self, query: Register, key: Register, value: Register, *, layer: int, heads: int, head_dim: int, scale: float,
        window: int | None, rotated: int, interleaved: bool, angles: int,
    ) -> Register:  # fmt: skip
        """Rotates queries and keys, appends keys and values to the cache of a layer, and attends to it."""
        sizes: dict[str, Any] = {"width": heads, "size": key.width // head_dim, "format": head_dim, "layer": layer}
        flags = Flag.INTERLEAVED if interleaved else Flag(0)
        self.add(Op.ROTATE_AND_STORE, value, query, key, count=rotated, bias=angles, flags=flags, **sizes)
        out = self.register(query.width)
        return self.add(Op.ATTEND, out, query, count=window or 0, number=scale, **sizes)

    def activate(self, x: Register, kind: int, times: Register | None = None) -> Register:
        """f(x), or f(x) · times, in place."""
        return self.add(Op.ACTIVATE, x, x, times, width=x.width, format=kind)

    # ------------------------------------------------------------------------------------------------------- running

    def is_current(self) -> bool:
        """Whether the model has the weights that it had when this plan was made."""
        for parameters, name, parameter, tensor, address in self.weights:
            if parameters.get(name) is not parameter or (tensor is not None and tensor.data_ptr() != address):
                return False
        return True

    def run(
        self, library: Library, x_BLD: Tensor, *, keys: Sequence[Tensor], values: Sequence[Tensor], past: int,
        padding: Tensor | None, angles: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:  # fmt: skip
        """The output for the new tokens; their keys and values are written to the caches, B×G×capacity×K."""
        batch, length, _ = x_BLD.shape
        tokens, threads = batch * length, num_threads()
        for buffer in (*keys, *values):  # C writes to them
            is_supported = buffer.dtype == torch.float32 and buffer.device.type == "cpu" and buffer.is_contiguous()
            if not is_supported or (len(buffer), buffer.shape[2]) != (batch, keys[0].shape[2]):
                raise InputShapeError("the caches of this state are not those of this model in float32 on a CPU")
        registers = torch.empty(self.width * tokens, dtype=torch.float32, device="cpu")
        start = self.input.start * tokens
        registers[start : start + x_BLD.numel()] = x_BLD.reshape(-1)
        work_bytes = max(-(-(past + length) // 16) * 64, work_size(tokens, self.largest_input, 1))
        work = torch.empty(threads * work_bytes, dtype=torch.uint8, device="cpu")
        pointers = [[tensor.data_ptr() for tensor in tensors] for tensors in (keys, values)]
        addresses = torch.tensor(pointers, dtype=torch.int64, device="cpu")
        if tokens not in self.packed:
            code = b"".join(instruction.pack(tokens) for instruction in self.instructions)
            self.packed[tokens] = torch.frombuffer(bytearray(code), dtype=torch.uint8)
        angle_data = ctypes.create_string_buffer(
            b"".join(struct.pack(ANGLES, cos.data_ptr(), sin.data_ptr(), len(cos)) for cos, sin in angles)
        )
        if padding is not None:
            padding = padding.contiguous()
        step = struct.pack(
            STEP, batch, length, past, keys[0].shape[2] if keys else 0, registers.data_ptr(),
            ctypes.addressof(angle_data), 0 if padding is None else padding.data_ptr(), addresses[0].data_ptr(),
            addresses[1].data_ptr(), work.data_ptr(), work_bytes,
        )  # fmt: skip
        library.run_step(self.packed[tokens].data_ptr(), len(self.instructions), step, library.variant, threads)
        start, width = self.output.start * tokens, self.output.width
        return registers[start : start + tokens * width].clone().view(batch, length, width)
