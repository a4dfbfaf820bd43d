"""Learning from text alone: the next token, or tokens that were hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from manyheads.objective.score import NOTHING, Batch, ObjectiveSpec, Row, Tokens, asked, padded
from manyheads.spec import field


class CausalSpec(ObjectiveSpec, kind="causal"):
    """−Σ log p(x_t | x_<t), the end of a text included"""

    fields: ClassVar[tuple[str, ...]] = ("text",)
    shapes: ClassVar[tuple[str, ...]] = ("decoder", "recurrent", "ngram")
    frame: ClassVar[str] = "<s> $A"
    wants: ClassVar[Literal["tokens"]] = "tokens"

    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch:
        given = [np.concatenate(([tokens.begin], text)) for (text, *_) in rows]
        wanted = [np.concatenate((text, [tokens.end])) for (text, *_) in rows]
        return Batch(padded(given, tokens.pad), asked(wanted))


class MaskedSpec(ObjectiveSpec, kind="masked"):
    """−Σ log p(x_t | the rest), over a share of places chosen by chance

    Devlin et al. 2018, arXiv 1810.04805: of the chosen, most are shown as <mask>, some as another token, some as they are. Every
    token keeps its place.
    """

    fields: ClassVar[tuple[str, ...]] = ("text",)
    shapes: ClassVar[tuple[str, ...]] = ("encoder",)
    frame: ClassVar[str] = "<s> $A </s>"
    added: ClassVar[int] = 2
    wants: ClassVar[Literal["tokens"]] = "tokens"

    share: float = field(0.15, "of the places that are asked", gt=0, lt=1)
    hidden: float = field(0.8, "of those, shown as <mask>", ge=0, le=1)
    swapped: float = field(0.1, "of those, shown as a token drawn by chance", ge=0, le=1)

    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch:
        if tokens.mask < 0:
            raise ValueError("this tokenizer has no token that stands for a hidden one, and masked needs it")
        given, wanted = [], []
        for text, *_ in rows:
            chosen = chance.random(len(text)) < self.share
            if not chosen.any():
                chosen[chance.integers(len(text))] = True  # every text asks for something
            fate = chance.random(len(text))
            shown = np.where(chosen & (fate < self.hidden), tokens.mask, text)
            swapped = chosen & (fate >= self.hidden) & (fate < self.hidden + self.swapped)
            shown = np.where(swapped, tokens.ordinary[chance.integers(len(tokens.ordinary), size=len(text))], shown)
            given.append(tokens.framed(shown, self.frame))
            wanted.append(np.full(len(given[-1]), NOTHING))
            first = tokens.before(self.frame)
            wanted[-1][first : first + len(text)] = np.where(chosen, text, NOTHING)
        return Batch(padded(given, tokens.pad), asked(wanted))
