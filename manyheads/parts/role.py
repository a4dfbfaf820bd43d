"""What a weight matrix is used for, set by the part that owns it, so that an init scheme need not guess from names."""

from __future__ import annotations

from typing import Literal, TypeVar

from torch import nn

# any projection; makes queries; its output is added to the residual stream; gives the logits of tokens
Role = Literal["projection", "query", "residual", "token_head"]

Module = TypeVar("Module", bound=nn.Module)


def with_role(module: Module, role: Role) -> Module:
    module.role = role  # type: ignore[assignment]
    return module


def role_of(module: nn.Module) -> Role:
    return getattr(module, "role", "projection")
