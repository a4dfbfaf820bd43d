"""What a matrix is for, said by the part that owns it, so that an init scheme need not guess by names."""

from __future__ import annotations

from typing import Literal, TypeVar

from torch import nn

Role = Literal["matrix", "query", "stream", "rows"]  # any; makes queries; writes into the stream between layers; scores tokens

Module = TypeVar("Module", bound=nn.Module)


def marked(module: Module, role: Role) -> Module:
    module.role = role  # type: ignore[assignment]
    return module


def role_of(module: nn.Module) -> Role:
    return getattr(module, "role", "matrix")
