"""Writing token by token: the most probable one, or one drawn."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from manyheads.model.build import Model
from manyheads.parts.batch import Inputs


@torch.no_grad()
def sample(
    model: Model, prompt: Inputs | Tensor, source: Inputs | Tensor | None = None, *,
    max_new: int = 64, temperature: float = 0.0, stop: Collection[int] = (), generator: torch.Generator | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """The next tokens, B at a time, until every text has ended in a token of `stop` or `max_new` are written.

    Temperature 0 takes the most probable token; above it, tokens are drawn from softmax(logits / temperature). A text that has
    ended repeats its last token.
    """
    prompt = Inputs.of(prompt)
    state = model.start(source, capacity=prompt.length + max_new)
    ended = torch.zeros(prompt.batch, dtype=torch.bool, device=prompt.tokens.device)
    given, last = prompt, prompt.tokens[:, -1]
    for _ in range(max_new):
        logits, state = model.step(given, state)  # type: ignore[arg-type]
        new = chosen(final(logits, given.padding), temperature, generator)
        last = torch.where(ended, last, new)
        yield last
        ended |= torch.isin(last, torch.tensor(sorted(stop), device=last.device, dtype=last.dtype))
        if ended.all():
            return
        given = Inputs(last[:, None])


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
