"""Writing token by token: the most probable one, or one drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.model.build import Model
from manyheads.parts.batch import Inputs


@dataclass(frozen=True)
class Rules:
    """What a checkpoint asks of the texts written with it."""

    start: int | None = None  # the token that begins an answer
    stop: tuple[int, ...] = ()  # those that end a text
    first: tuple[int, ...] = ()  # the only ones that may follow a text of one token
    last: tuple[int, ...] = ()  # the only ones that may stand where a text is cut off
    never: tuple[tuple[int, ...], ...] = ()  # what is never written, a token or several in a row

    def applied(self, logits_BV: Tensor, text_BL: Tensor, left: int) -> Tensor:
        """The logits of what may follow the text, with so many tokens left to write."""
        if only := self.last if self.last and left == 1 else self.first if text_BL.shape[1] == 1 else ():
            if max(only) >= logits_BV.shape[1]:
                raise ValueError(f"token {max(only)} must be written, and is not in the vocabulary of {logits_BV.shape[1]}")
            return torch.full_like(logits_BV, -torch.inf).index_fill(1, torch.tensor(only, device=logits_BV.device), 0.0)
        logits_BV = logits_BV.clone() if self.never else logits_BV
        for *before, token in self.never:
            if token < logits_BV.shape[1] and len(before) < text_BL.shape[1]:
                ending = text_BL[:, text_BL.shape[1] - len(before) :]
                logits_BV[(ending == torch.tensor(before, device=ending.device)).all(dim=1), token] = -torch.inf
        return logits_BV


FREE = Rules()


@torch.no_grad()
def sample(
    model: Model, prompt: Inputs | Tensor, source: Inputs | Tensor | None = None, *,
    max_new: int = 64, temperature: float = 0.0, rules: Rules = FREE, generator: torch.Generator | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """The next tokens, B at a time, until every text has ended in a token of `rules.stop` or `max_new` are written.

    Temperature 0 takes the most probable token; above it, tokens are drawn from softmax(logits / temperature). A text that has
    ended repeats its last token.
    """
    prompt = Inputs.of(prompt)
    state = model.start(source, capacity=prompt.length + max_new)
    ended = torch.zeros(prompt.batch, dtype=torch.bool, device=prompt.tokens.device)
    given, last = prompt, prompt.tokens[:, -1]
    text, stop = prompt.tokens, torch.tensor(rules.stop, device=prompt.tokens.device, dtype=torch.long)
    for left in range(max_new, 0, -1):
        logits, state = model.step(given, state)  # type: ignore[arg-type]
        new = chosen(rules.applied(final(logits, given.padding), text, left), temperature, generator)
        last = torch.where(ended, last, new)
        yield last
        ended |= torch.isin(last, stop)
        if ended.all():
            return
        given, text = Inputs(last[:, None]), torch.cat((text, last[:, None]), dim=1)


def final(logits_BLV: Tensor, padding: Tensor | None) -> Tensor:
    """The logits after each row's last real token."""
    if padding is None:
        return logits_BLV[:, -1]
    last = logits_BLV.shape[1] - 1 - (~padding).flip(1).to(torch.int8).argmax(dim=1)
    return logits_BLV[torch.arange(len(logits_BLV), device=last.device), last]


def chosen(logits_BV: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    return torch.multinomial(torch.softmax(logits_BV.float() / temperature, dim=-1), 1, generator=generator)[:, 0]
