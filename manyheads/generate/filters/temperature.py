"""The temperature of sampling."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec
from manyheads.spec import field


class TemperatureSpec(FilterSpec, kind="temperature"):
    """z / T; the setting temperature = 0 is greedy decoding, without a division"""

    for_sampling: ClassVar[bool] = True
    order: ClassVar[int] = 100

    temperature: float = field(
        0.0, "T, the temperature; sampling approaches greedy decoding towards 0", ge=1e-6, le=1e6
    )

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        return logits_BV / self.temperature
