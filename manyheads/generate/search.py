"""Beam search: of whole texts the most probable one that a few kept at a time lead to."""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.generate.sample import FREE, Rules, Texts
from manyheads.model.build import Model
from manyheads.parts.batch import Inputs


@torch.no_grad()
def search(
    model: Model, prompt: Inputs | Tensor, source: Inputs | Tensor | None = None, *,
    beams: int = 4, penalty: float = 0.6, max_new: int = 64, rules: Rules = FREE,
) -> list[list[int]]:  # fmt: skip
    """The best text found for each row, with the token that ends it: the one of the highest log p(y | x) / lp(|y|).

    lp(n) = ((5 + n) / 6)^α (Wu et al. 2016, arXiv 1609.08144, equation 14; as in Tensor2Tensor and JoeyNMT), n counting the
    token that ends y, α = 0.6 as in Vaswani et al. 2017. Transformers and CTranslate2 divide by n^α: other figures for other α, the
    same at α = 0, where nothing is divided. The paper's coverage term and its pruning are left out.

    At each step the best (1 + stops) · beams continuations are looked at, stops being the number of tokens that end a text. Those
    that end, if among the best `beams`, are set apart with their score; the best `beams` of the others live on. At the last step
    every text ends. A row is done when `beams` of its texts have ended, or when none that lives can still pass the best that has:
    log p only falls, so it ends at log p / lp(max_new) at best. With one beam this is what the most probable token at each step gives.
    """
    prompt = Inputs.of(prompt)
    texts = Texts(model, prompt, source, max_new)
    found, device = Ended(prompt, beams), prompt.tokens.device
    stop = torch.tensor(rules.stop, device=device, dtype=torch.long)
    live_BK = torch.zeros(prompt.batch, 1, device=device)  # log p of the texts that live; one a row at first
    for left in range(max_new, 0, -1):
        logits_RV = texts.logits()  # R = B·K rows
        wide = torch.promote_types(logits_RV.dtype, torch.float32)
        logp_RV = rules.applied(logits_RV.log_softmax(dim=-1, dtype=wide), texts.tokens, left)
        vocab, kept = logp_RV.shape[1], live_BK.shape[1]
        logp_BN = (logp_RV.unflatten(0, (-1, kept)) + live_BK[:, :, None]).flatten(1)
        best_BC, place_BC = logp_BN.topk(min((1 + len(rules.stop)) * beams, logp_BN.shape[1]))
        row_BC, new_BC = place_BC // vocab + kept * torch.arange(len(place_BC), device=device)[:, None], place_BC % vocab
        ends_BC = torch.isin(new_BC, stop) | (left == 1)
        found.add(texts, row_BC, new_BC, (best_BC / lengthened(max_new - left + 1, penalty)).masked_fill(~ends_BC, -torch.inf))
        live_BK, which_BK = best_BC.masked_fill(ends_BC, -torch.inf).topk(min(beams, best_BC.shape[1]))
        going = found.going(live_BK[:, 0] / lengthened(max_new, penalty))
        if not len(going):
            break
        live_BK, which_BK = live_BK[going], which_BK[going]
        texts.extend(new_BC[going].gather(1, which_BK).flatten(), row_BC[going].gather(1, which_BK).flatten())
    return found.texts


def lengthened(length: int, penalty: float) -> float:
    """lp(n) = ((5 + n) / 6)^α, by which longer texts are forgiven their lower probability."""
    return float(((5 + length) / 6) ** penalty)


class Ended:
    """The texts that have ended, apart from those that are still written: of each row the best, its score, and how many there were."""

    def __init__(self, prompt: Inputs, beams: int) -> None:
        self.texts: list[list[int]] = [[] for _ in range(prompt.batch)]
        self.start, self.beams = prompt.length, beams
        self.rows = torch.arange(prompt.batch, device=prompt.tokens.device)  # those not done
        self.score = torch.full((prompt.batch,), -torch.inf, device=prompt.tokens.device)
        self.count = torch.zeros_like(self.rows)

    def add(self, texts: Texts, row_BC: Tensor, new_BC: Tensor, score_BC: Tensor) -> None:
        """Of the best continuations those that end have a score; where one passes the best before, it is kept instead."""
        score_BC = score_BC[:, : self.beams]
        self.count = self.count + score_BC.isfinite().sum(dim=1)
        score, place = score_BC.max(dim=1)
        for i in (score > self.score).nonzero()[:, 0].tolist():
            row, new = int(row_BC[i, place[i]]), int(new_BC[i, place[i]])
            self.texts[int(self.rows[i])] = [*texts.tokens[row, self.start :].tolist(), new]
        self.score = torch.maximum(score, self.score)

    def going(self, hope: Tensor) -> Tensor:
        """Which rows are not done, given the best score that each can still reach; the others are left."""
        going = ((hope > self.score) & (self.count < self.beams)).nonzero()[:, 0]
        self.rows, self.score, self.count = self.rows[going], self.score[going], self.count[going]
        return going
