"""The presence penalty."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec, token_counts
from manyheads.spec import field


class PresenceSpec(FilterSpec, kind="presence"):
    """z − p for the logits z of tokens that were generated, however often; the prompt does not count

    As in the API of OpenAI and in vLLM.
    """

    order: ClassVar[int] = 21

    presence_penalty: float = field(0.0, "p; above 0 makes repetition less probable", ge=-100, le=100)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        return logits_BV - self.presence_penalty * (token_counts(context.generated_tokens, logits_BV.shape[1]) > 0)
