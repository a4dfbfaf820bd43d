"""A convolution as an attention core: the weight of a neighbour is learned for its offset, and is 0 beyond the kernel.

Its weights are a distribution, so masks, caches and records treat it as any other core.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.parts.core import Core, CoreSpec
from manyheads.parts.position import Positions
from manyheads.spec import field

FAR = -1e4  # the score per step beyond the kernel: its softmax is exactly 0 beside that of a visible neighbour


class ConvolutionSpec(CoreSpec, kind="convolution", caption="convolution over neighbours"):
    """Σ_j softmax_j(w[j − i]) v_j over the neighbours |i − j| < k, with a kernel w per head

    Wu et al. 2019, arXiv 1901.10430, "lightweight convolution": depthwise, with a normalized kernel that the channels
    of a head share; with D heads each channel has its own. Neighbours are counted by position, without padding, and the
    kernel is normalized over those that are visible. If none is visible, the nearest visible keys take their place.
    """

    query_source: ClassVar[Literal["head", "memory", "none"]] = "none"
    key_source: ClassVar[Literal["head", "raw", "none"]] = "none"

    kernel: int = field(
        3, "k: k neighbours under a causal mask, the token itself included, and 2k − 1 without one", ge=1, le=65536
    )

    def build(self, heads: int, query_size: int, key_size: int) -> Core:
        return Convolution(self, heads)


class Convolution(Core):
    def __init__(self, spec: ConvolutionSpec, heads: int) -> None:
        super().__init__(spec)
        self.reach = spec.kernel - 1
        self.table = nn.Parameter(torch.empty(heads, 2 * self.reach + 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table)

    def scores(self, q_BHLK: Tensor, k_BHMK: Tensor, positions: Positions) -> Tensor:
        offsets = positions.offsets()
        table = self.table.to(torch.promote_types(self.table.dtype, torch.float32))  # FAR is too large for float16
        near = table[:, offsets.clamp(-self.reach, self.reach) + self.reach].transpose(0, 1)
        beyond = (offsets.abs() - self.reach).clamp(min=0)[:, None]
        return (near + FAR * beyond).expand(q_BHLK.shape[0], -1, -1, -1)
