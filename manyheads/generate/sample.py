"""Writing token by token: the most probable one, or one drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyheads.model.build import Model
from manyheads.parts.batch import Inputs, real_first
from manyheads.spec import LARGEST, quoted


@dataclass(frozen=True)
class Rules:
    """What a checkpoint asks of the texts written with it."""

    start: int | None = None  # the token that begins an answer
    stop: tuple[int, ...] = ()  # those that end a text
    first: tuple[int, ...] = ()  # the only ones that may follow a text of one token
    last: tuple[int, ...] = ()  # the only ones that may stand where a text is cut off
    never: tuple[tuple[int, ...], ...] = ()  # what is never written, a token or several in a row

    def applied(self, logits_BV: Tensor, text_BL: Tensor, left: int) -> Tensor:
        """The logits of what may follow each text, with so many tokens left to write; a text ends on the right, −1 before it begins."""
        logits_BV = logits_BV.clone() if self.never else logits_BV
        for *before, token in self.never:
            if token < logits_BV.shape[1] and len(before) < text_BL.shape[1]:
                ending = text_BL[:, text_BL.shape[1] - len(before) :]
                logits_BV[(ending == torch.tensor(before, device=ending.device)).all(dim=1), token] = -torch.inf
        if self.last and left == 1:
            return only(self.last, logits_BV)
        if self.first and (alone := (text_BL >= 0).sum(dim=1) == 1).any():
            return torch.where(alone[:, None], only(self.first, logits_BV), logits_BV)
        return logits_BV


def only(tokens: tuple[int, ...], logits_BV: Tensor) -> Tensor:
    """Logits of 0 for these tokens, and no chance for the others."""
    if max(tokens) >= logits_BV.shape[1]:
        raise ValueError(f"token {max(tokens)} must be written, and is not in the vocabulary of {logits_BV.shape[1]}")
    return torch.full_like(logits_BV, -torch.inf).index_fill(1, torch.tensor(tokens, device=logits_BV.device), 0.0)


FREE = Rules()
MOST_BEAMS = 256


@dataclass(frozen=True)
class Writing:
    """What whoever asks wants of the texts."""

    max_new: int = 64  # tokens, at most
    temperature: float = 0.0  # 0 takes the likeliest token
    seed: int = 0
    beams: int = 1  # more than one: search
    penalty: float = 0.6  # α of the search
    start: int | None = None  # the token that begins an answer, where the checkpoint does not say so

    def __post_init__(self) -> None:
        if type(self.max_new) is not int or not 1 <= self.max_new <= LARGEST:
            raise ValueError(f"max_new is {quoted(self.max_new)}, expected a whole number from 1 to {LARGEST:,}")
        if type(self.temperature) not in (int, float) or not (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6):
            raise ValueError(f"temperature is {quoted(self.temperature)}, expected 0 or a number from 1e-6 to 1e6")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {quoted(self.seed)}, expected a whole number from 0")
        if type(self.beams) is not int or not 1 <= self.beams <= MOST_BEAMS:
            raise ValueError(f"beams is {quoted(self.beams)}, expected a whole number from 1 to {MOST_BEAMS}")
        if type(self.penalty) not in (int, float) or not 0 <= self.penalty <= 10:
            raise ValueError(f"penalty is {quoted(self.penalty)}, expected a number from 0 to 10: α of ((5 + length) / 6)^α")
        if self.beams > 1 and self.temperature:
            raise ValueError(f"{self.beams} beams look for the likeliest text, and a temperature draws one by chance; give one of them")


class Texts:
    """Texts that are being written, a row each: the tokens so far, and what the model knows of them. What sampling and search share."""

    def __init__(self, model: Model, prompt: Inputs, source: Inputs | Tensor | None, max_new: int) -> None:
        self.model, self.given = model, prompt
        self.state: Any = model.start(source, capacity=prompt.length + max_new)
        self.tokens = prompt.tokens  # rows×length, each text on the right, −1 before it begins
        if prompt.padding is not None:
            self.tokens = prompt.tokens.masked_fill(prompt.padding, -1).gather(1, real_first(~prompt.padding))

    def logits(self) -> Tensor:
        """Of what follows each text."""
        logits, self.state = self.model.step(self.given, self.state)
        return final(logits, self.given.padding)

    def extend(self, new: Tensor, rows: Tensor | None = None) -> None:
        """Goes on with a new token a row; with `rows`, with these alone: one may be left, or taken more than once."""
        if rows is not None:
            self.state, self.tokens = self.state.select(rows), self.tokens.index_select(0, rows)
        self.given, self.tokens = Inputs(new[:, None]), torch.cat((self.tokens, new[:, None]), dim=1)


Chance = torch.Generator | Sequence[torch.Generator] | None


@torch.no_grad()
def sample(
    model: Model, prompt: Inputs | Tensor, source: Inputs | Tensor | None = None, *,
    max_new: int = 64, temperature: float = 0.0, rules: Rules = FREE, generator: Chance = None,
) -> Iterator[Tensor]:  # fmt: skip
    """The next tokens, B at a time, until every text has ended in a token of `rules.stop` or `max_new` are written.

    Temperature 0 takes the most probable token; above it, tokens are drawn from softmax(logits / temperature), with one generator
    for all texts or with one each. A text that has ended repeats its last token, and is computed no more.
    """
    prompt = Inputs.of(prompt)
    texts, last = Texts(model, prompt, source, max_new), prompt.tokens[:, -1]
    stop = torch.tensor(rules.stop, device=last.device, dtype=torch.long)
    alive = torch.arange(prompt.batch, device=last.device)
    for left in range(max_new, 0, -1):
        chance = [generator[i] for i in alive.tolist()] if isinstance(generator, Sequence) else generator
        new = chosen(rules.applied(texts.logits(), texts.tokens, left), temperature, chance)
        last = last.index_copy(0, alive, new)
        yield last
        rows = (~torch.isin(new, stop)).nonzero()[:, 0]
        if not len(rows):
            return
        if len(rows) < len(alive):
            alive = alive[rows]
            texts.extend(new[rows], rows)
        else:
            texts.extend(new)


def final(logits_BLV: Tensor, padding: Tensor | None) -> Tensor:
    """The logits after each row's last real token."""
    if padding is None:
        return logits_BLV[:, -1]
    last = logits_BLV.shape[1] - 1 - (~padding).flip(1).to(torch.int8).argmax(dim=1)
    return logits_BLV[torch.arange(len(logits_BLV), device=last.device), last]


def chosen(logits_BV: Tensor, temperature: float, generator: Chance) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    chances = torch.softmax(logits_BV.float() / temperature, dim=-1)
    if isinstance(generator, Sequence):
        return torch.cat([torch.multinomial(row, 1, generator=own) for row, own in zip(chances, generator, strict=True)])
    return torch.multinomial(chances, 1, generator=generator)[:, 0]
