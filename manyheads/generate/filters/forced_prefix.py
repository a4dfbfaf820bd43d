"""The first tokens of the output, as ids or as a text."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from manyheads.errors import CheckpointTokenizerError, UnsupportedError
from manyheads.files.tokenizer import encode_texts
from manyheads.generate.filter import FilterContext, FilterSpec, LogitsFilter, keep_only
from manyheads.generate.vocabulary import Vocabulary
from manyheads.spec import field


class ForcedPrefixSpec(FilterSpec, kind="forced-prefix"):
    """−∞ for all but one of these tokens at each of the first steps: a constrained prefix

    The logit of the token stays, so the score of a search is that of the model, among the texts with this prefix.
    """

    order: ClassVar[int] = 90

    forced_prefix_ids: tuple[int, ...] = field((), "token ids", strict=False, max_length=1 << 20)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        token = self.forced_prefix_ids[context.num_generated : context.num_generated + 1]
        return logits_BV + keep_only(token, logits_BV) if token else logits_BV


class ForcedPrefixTextSpec(FilterSpec, kind="forced-prefix-text"):
    """forced-prefix with the tokens of a text"""

    order: ClassVar[int] = 90

    forced_prefix: str = field("", "the first text that is generated", max_length=1 << 20)

    def prepare(self, vocabulary: Vocabulary) -> LogitsFilter:
        if vocabulary.tokenizer is None:
            raise UnsupportedError(
                "forced_prefix needs a tokenizer, and this checkpoint has none; use forced_prefix_ids"
            )
        kind = CheckpointTokenizerError
        (encoding,) = encode_texts(vocabulary.tokenizer, [self.forced_prefix], kind, add_special_tokens=False)
        return ForcedPrefixSpec(forced_prefix_ids=tuple(encoding.ids)).prepare(vocabulary)
