"""The role of a weight matrix, set by the part that owns it, so that an init scheme does not depend on names."""

from __future__ import annotations

from typing import Literal, TypeVar

from torch import nn

# "query" projects to queries, "residual" adds its output to the residual stream, "token_head" computes token logits
Role = Literal["projection", "query", "residual", "token_head"]

Module = TypeVar("Module", bound=nn.Module)


def with_role(module: Module, role: Role) -> Module:
    module.role = role  # type: ignore[assignment]
    return module


def role_of(module: nn.Module) -> Role:
    return getattr(module, "role", "projection")
