"""Learning from pairs: a target, given its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from manyheads.objective.score import Batch, ObjectiveSpec, Row, Tokens, asked, padded
from manyheads.spec import field


class Seq2SeqSpec(ObjectiveSpec, kind="seq2seq"):
    """−Σ log p(y_t | y_<t, x), the end of a target included

    With smoothing ε, (1 − ε) of the weight is on y_t and ε is spread over all tokens: Szegedy et al. 2016, arXiv 1512.00567.
    """

    fields: ClassVar[tuple[str, ...]] = ("source", "target")
    shapes: ClassVar[tuple[str, ...]] = ("encoder–decoder", "recurrent")
    frame: ClassVar[str] = "$A </s>"
    wants: ClassVar[Literal["tokens"]] = "tokens"

    smoothing: float = field(0.0, "ε, spread over all tokens", ge=0, lt=1)

    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch:
        source = [tokens.framed(source, self.frame) for source, _ in rows]
        wanted = [tokens.answer(target, self.frame) for _, target in rows]
        given = [np.concatenate((tokens.opening[:1], target[:-1])) for target in wanted]
        return Batch(padded(given, tokens.pad), asked(wanted), source=padded(source, tokens.pad))

    @property
    def softened(self) -> float:
        return self.smoothing
