"""The frequency penalty."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec, token_counts
from manyheads.spec import field


class FrequencySpec(FilterSpec, kind="frequency"):
    """z − f · c for the logits z of tokens that were generated c times; the prompt does not count

    As in the API of OpenAI and in vLLM.
    """

    order: ClassVar[int] = 22

    frequency_penalty: float = field(0.0, "f; above 0 makes repetition less probable", ge=-100, le=100)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        return logits_BV - self.frequency_penalty * token_counts(context.generated_tokens, logits_BV.shape[1])
