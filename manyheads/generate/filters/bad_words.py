"""Sequences of tokens that are never generated."""

from __future__ import annotations

import math
from typing import ClassVar

from manyheads.generate.filters.sequence_bias import BiasedIds, Ids, SequencesFilter
from manyheads.spec import field


class BadWordsSpec(SequencesFilter, kind="bad-words"):
    """−∞ for the last token of each sequence, where the tokens before it are the last tokens so far"""

    order: ClassVar[int] = 35

    bad_words_ids: tuple[Ids, ...] = field((), "sequences of token ids that are never generated", strict=False)

    @property
    def sequences(self) -> tuple[BiasedIds, ...]:
        return tuple((ids, -math.inf) for ids in self.bad_words_ids)
