"""N-gram blocking."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.generate.filter import FilterContext, FilterSpec
from manyheads.spec import field


class NoRepeatNgramSpec(FilterSpec, kind="no-repeat-ngram"):
    """−∞ for a token that would complete an n-gram that is in the prompt or was generated

    Paulus et al. 2018, arXiv 1705.04304, section 2.5.
    """

    order: ClassVar[int] = 30

    no_repeat_ngram_size: int = field(0, "n", ge=1, le=1024)

    def apply(self, logits_BV: Tensor, context: FilterContext) -> Tensor:
        n, tokens_BL = self.no_repeat_ngram_size, context.tokens
        if tokens_BL.shape[1] < n:
            return logits_BV
        ngrams_BWN = tokens_BL.unfold(1, n, 1)
        last_B1N = tokens_BL[:, None, tokens_BL.shape[1] - n + 1 :]
        repeated_BW = (ngrams_BWN[..., :-1] == last_B1N).all(dim=-1) & (ngrams_BWN >= 0).all(dim=-1)
        rows, windows = repeated_BW.nonzero(as_tuple=True)
        logits_BV = logits_BV.clone()
        logits_BV[rows, ngrams_BWN[rows, windows, -1]] = -torch.inf
        return logits_BV
