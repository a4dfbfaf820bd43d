"""Whole texts that were written, against those that were wanted: exact match, BLEU, chrF."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def exact(written: Sequence[str], wanted: Sequence[str]) -> float:
    """The share that is right to the letter; how much white space there is does not matter."""
    return sum(one.split() == other.split() for one, other in zip(written, wanted, strict=True)) / len(wanted)


class Translation:
    """BLEU (Papineni et al. 2002) and chrF (Popović 2015) of a whole corpus, cased, as sacrebleu computes them.

    Post 2018, arXiv 1804.08771: the signature says how, and belongs beside every figure.
    """

    def __init__(self) -> None:
        try:
            from sacrebleu.metrics.bleu import BLEU
            from sacrebleu.metrics.chrf import CHRF
        except ImportError:
            raise ValueError("BLEU and chrF are computed by sacrebleu, which is not installed: pip install 'manyheads[eval]'") from None
        self.metrics: dict[str, Any] = {"bleu": BLEU(), "chrf": CHRF()}

    def scores(self, written: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
        """From 0 to 100, as they are cited."""
        found = {name: float(metric.corpus_score(list(written), [list(wanted)]).score) for name, metric in self.metrics.items()}
        return {"exact": exact(written, wanted)} | found

    def signatures(self) -> dict[str, str]:
        """How each was computed; known once something was."""
        return {name: str(metric.get_signature()) for name, metric in self.metrics.items()}
