"""One head of an attention core of the package on plain vectors, without a model."""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.parts.core import Core, DotSpec
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions


def attend(q_LK: Tensor, k_MK: Tensor, v_MK: Tensor, core: Core | None = None, *, causal: bool = False) -> Tensor:
    """The output of one head for queries, keys and values; without a core, softmax(q·k) v, unscaled."""
    mask, positions = head_context(q_LK, k_MK, causal)
    head = plain_core(q_LK) if core is None else core
    return head(q_LK[None, None], k_MK[None, None], v_MK[None, None], mask=mask, positions=positions)[0, 0]


def attention_weights(
    q_LK: Tensor, k_MK: Tensor, core: Core | None = None, *, causal: bool = False, bias_LM: Tensor | None = None
) -> Tensor:
    """The weights of one head, a row per query; a bias is added to the scores."""
    mask, positions = head_context(q_LK, k_MK, causal)
    head = plain_core(q_LK) if core is None else core
    bias = None if bias_LM is None else bias_LM[None, None]
    return head.weights(q_LK[None, None], k_MK[None, None], mask=mask, positions=positions, bias=bias)[0, 0]


def plain_core(q_LK: Tensor) -> Core:
    size = q_LK.shape[-1]
    return DotSpec(scale=1.0).build(1, size, size).to(q_LK.dtype)


def head_context(q_LK: Tensor, k_MK: Tensor, causal: bool) -> tuple[Mask, Positions]:
    queries, keys = len(q_LK), len(k_MK)
    positions = Positions(torch.arange(queries)[None], torch.arange(keys)[None])
    return Mask(queries, keys, q_LK.device, causal=causal), positions
