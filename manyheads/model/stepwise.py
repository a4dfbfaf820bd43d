"""The base of the recurrent and the n-gram network, whose forward pass is one `step` over the whole sequence."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

from torch import Tensor, nn

from manyheads.model.cache import check_can_generate, check_capacity
from manyheads.model.spec import ModelSpec
from manyheads.parts.inputs import Inputs

State = TypeVar("State")


class StepwiseModel(nn.Module, Generic[State]):
    """A model without key/value caches. `forward` works with any head, `start` and `step` with one per token."""

    spec: ModelSpec

    @property
    def can_generate(self) -> bool:
        """Whether the model can generate, which needs a head with one output per token."""
        return self.spec.head.per_token

    def forward(
        self, inputs: Inputs | Tensor, source: Inputs | Tensor | None = None, *, logits_to_keep: Tensor | None = None
    ) -> Tensor:
        """Logits, B×L×V. With `logits_to_keep`, B×L, only those where it is True, N×V."""
        logits = self.step(inputs, self.first_state(source))[0]
        return logits if logits_to_keep is None else logits[logits_to_keep]

    def start(self, source: Inputs | Tensor | None = None, *, capacity: int | None = None) -> State:
        """The state before the first token. `capacity` has no effect, because no memory is reserved."""
        check_capacity(capacity)
        check_can_generate(self)
        return self.first_state(source)

    @abstractmethod
    def first_state(self, source: Inputs | Tensor | None) -> State:
        """The state before the first token."""

    @abstractmethod
    def step(self, inputs: Inputs | Tensor, state: State) -> tuple[Tensor, State]:
        """Logits after each of the new tokens, one or many, and the next state."""
