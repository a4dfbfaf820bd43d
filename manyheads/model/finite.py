"""Checks that the output of a model is finite, and finds the first layer with an output that is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from manyheads.errors import NonFiniteOutputError
from manyheads.model.recording import in_this_thread


def check_finite(model: nn.Module, output: Tensor, again: Callable[[], object]) -> Tensor:
    """Returns the output; raises if a number is NaN or infinite. `again` computes it once more, to find the layer."""
    # aminmax is one pass, and keeps NaN
    if output.numel() and not output.is_meta and not torch.stack(output.detach().aminmax()).isfinite().all():
        raise_nonfinite(model, again)
    return output


def check_next_token_logits(logits_BV: Tensor) -> Tensor:
    """Returns the logits; raises if one is NaN or +inf, or all of a row are −inf. A head may forbid tokens by −inf."""
    if not logits_BV.amax(dim=-1).isfinite().all():
        raise NonFiniteOutputError("the logits of the next token are NaN or infinite")
    return logits_BV


def raise_nonfinite(model: nn.Module, again: Callable[[], object]) -> NoReturn:
    """Computes an output again, and raises an error that names the first module whose output is not finite.

    Forwards of other threads are not checked.
    """

    def check(name: str, _: nn.Module, __: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else (output,)
        if not all(
            tensor.isfinite().all() for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_floating_point()
        ):
            raise error(name or type(model).__name__)

    def error(module_name: str) -> NonFiniteOutputError:
        narrow = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
        hint = "load the model in float32" if narrow else "its weights are too large, or the file is broken"
        return NonFiniteOutputError(
            f"the model computes NaN or infinity, first in the output of {module_name}", hint=hint
        )

    handles = [
        module.register_forward_hook(in_this_thread(partial(check, name))) for name, module in model.named_modules()
    ]
    try:
        again()
    finally:
        for handle in handles:
            handle.remove()
    raise error("the last layer")
