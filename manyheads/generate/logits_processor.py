"""Logits processors: the base of the kinds that change the logits of a step before a token is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from manyheads.errors import UnsupportedError
from manyheads.spec import Part

if TYPE_CHECKING:
    from manyheads.generate.vocabulary import Vocabulary


@dataclass(frozen=True)
class LogitsProcessorContext:
    """What a processor may depend on besides the logits."""

    tokens: Tensor  # B×L, the prompt and the generated tokens, padded with −1 on the left
    num_generated: int
    remaining: int  # tokens up to max_new_tokens, the next one included
    eos_token_id: tuple[int, ...]
    forces_bos: bool = False  # whether the token after a single first token is forced

    @property
    def generated_tokens(self) -> Tensor:
        """The generated tokens, B×num_generated."""
        return self.tokens[:, self.tokens.shape[1] - self.num_generated :]


@dataclass(frozen=True)
class LogitsProcessor:
    """What a processor does at each step of one batch."""

    apply: Callable[[Tensor, LogitsProcessorContext], Tensor]  # the changed logits; the given ones stay as they are
    # whether nothing can follow these generated tokens, which end a sequence; None for a processor that ends none
    is_complete: Callable[[Sequence[int]], bool] | None = None


class LogitsProcessorSpec(Part, slot="logits_processor"):
    """A logits processor. It is a function of the logits and the tokens so far, so that any method can use it.

    Its first field is the setting that adds it, with any value except the default.
    """

    # whether it shapes the distribution that is sampled from: it then selects sampling, and no other method uses it
    for_sampling: ClassVar[bool] = False
    order: ClassVar[int] = 50  # processors are applied by increasing order, which is that of transformers
    forces_bos: ClassVar[bool] = False  # whether it forces the token after a single first token
    # whether it runs an expression of the caller: no checkpoint can set it, and a text follows at most one
    is_grammar: ClassVar[bool] = False

    @classmethod
    def selector(cls) -> tuple[str, object]:
        """The name of the setting that adds the processor, and the value that does not."""
        return next((name, info.get_default(call_default_factory=True)) for name, info in cls.model_fields.items())

    @property
    def name(self) -> str:
        """The name of the setting that adds the processor."""
        return self.selector()[0]

    def min_new_tokens_after(self, length: int) -> int:
        """The number of generated tokens before which eos is forbidden, after `length` tokens of the decoder."""
        return 0

    def check(self) -> None:
        """Raises for a value that only the processor itself can judge."""

    def prepare(self, vocabulary: Vocabulary) -> LogitsProcessor:
        """The processor of one batch: `apply`, unless it needs the tokenizer or keeps a state."""
        return LogitsProcessor(self.apply)

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        """Returns the changed logits; the given ones stay as they are."""
        raise NotImplementedError


def keep_only(tokens: tuple[int, ...], logits_BV: Tensor) -> Tensor:
    """Returns logits of 0 for these tokens and −∞ for all others."""
    check_tokens(tokens, logits_BV)
    index = torch.tensor(tokens, device=logits_BV.device)
    return torch.full_like(logits_BV, -torch.inf).index_fill(1, index, 0.0)


def remove(tokens: tuple[int, ...], logits_BV: Tensor) -> Tensor:
    """Returns the logits with −∞ for these tokens."""
    check_tokens(tokens, logits_BV)
    return logits_BV.index_fill(1, torch.tensor(tokens, device=logits_BV.device, dtype=torch.long), -torch.inf)


def check_tokens(tokens: tuple[int, ...], logits_BV: Tensor) -> None:
    if wrong := [token for token in tokens if not 0 <= token < logits_BV.shape[1]]:
        raise UnsupportedError(f"token {wrong[0]} is outside the vocabulary of {logits_BV.shape[1]}")


def token_counts(tokens_BL: Tensor, vocab: int) -> Tensor:
    """Returns how often each token occurs, B×V; −1 is not counted."""
    counts = torch.zeros(len(tokens_BL), vocab + 1, device=tokens_BL.device)
    index = torch.where((tokens_BL < 0) | (tokens_BL >= vocab), vocab, tokens_BL)
    return counts.scatter_add_(1, index, torch.ones_like(index, dtype=counts.dtype))[:, :vocab]
