"""The neural n-gram model: the next word from the last n − 1, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.model.spec import ModelSpec
from manyheads.model.state import check_capacity, check_rows_of, check_state, check_writes, select
from manyheads.parts.batch import Inputs, real_first, refuse_masks
from manyheads.parts.embed import Rows, look_up
from manyheads.spec import located


@dataclass(frozen=True)
class NgramState:
    """The embeddings of the last n − 2 tokens, B×(n−2)×D: with the next token they are all the model sees."""

    spec: ModelSpec
    last: Tensor | None = None  # None before the first token

    def select(self, rows: Tensor) -> NgramState:
        return select(self, rows)


class Ngram(nn.Module):
    """Embeddings of the last n − 1 tokens, one hidden layer, a head."""

    def __init__(self, spec: ModelSpec, vocab: int) -> None:
        super().__init__()
        assert spec.ngram is not None
        self.spec, own = spec, spec.ngram
        self.embedding = nn.Embedding(vocab, own.width)
        self.hidden = nn.Linear((own.order - 1) * own.width, own.hidden or own.width)
        self.dropout = nn.Dropout(own.dropout)
        with located("head"):
            self.head = spec.head.build(own.hidden or own.width, vocab, Rows(own.width, own.width))
        self.before = own.order - 2

    @property
    def writes(self) -> bool:
        """Whether it can write token by token: its head must say something of each token."""
        return self.spec.head.a_token

    def forward(self, inputs: Inputs | Tensor, source: Inputs | Tensor | None = None, *, at: Tensor | None = None) -> Tensor:
        """Logits of a batch, B×L×V; with `at`, B×L, of the places alone where it is True."""
        logits = self._step(inputs, self._start(source))[0]
        return logits if at is None else logits[at]

    def start(self, source: Inputs | Tensor | None = None, *, capacity: int | None = None) -> NgramState:
        check_capacity(capacity)
        check_writes(self.writes)
        return self._start(source)

    def _start(self, source: Inputs | Tensor | None) -> NgramState:
        if source is not None:
            raise ValueError("an n-gram model reads no source")
        return NgramState(self.spec)

    def step(self, inputs: Inputs | Tensor, state: NgramState) -> tuple[Tensor, NgramState]:
        check_writes(self.writes)
        return self._step(inputs, state)

    def _step(self, inputs: Inputs | Tensor, state: NgramState) -> tuple[Tensor, NgramState]:
        check_state(state, NgramState, self.spec)
        given = Inputs.of(inputs)
        refuse_masks(given)
        if given.types is not None or given.positions is not None:
            raise ValueError("an n-gram model knows neither token types nor positions; give tokens and padding alone")
        batch, length = given.batch, given.length
        e_BLD, order = look_up(given.tokens, self.embedding), None
        last = e_BLD.new_zeros(batch, self.before, e_BLD.shape[-1]) if state.last is None else state.last
        check_rows_of(last, batch)
        counts = torch.full((batch,), length, device=e_BLD.device)
        if given.padding is not None:
            # real tokens side by side, in their order, whichever side was padded
            order = real_first(given.padding)
            e_BLD, counts = e_BLD.gather(1, order[..., None].expand_as(e_BLD)), (~given.padding).sum(dim=1)
        text = torch.cat((last, e_BLD), dim=1)
        windows = text.unfold(1, self.before + 1, 1).transpose(2, 3).flatten(2)
        h_BLD = self.dropout(torch.tanh(self.hidden(windows)))
        if order is not None:
            h_BLD = torch.zeros_like(h_BLD).scatter(1, order[..., None].expand_as(h_BLD), h_BLD)
        logits = self.head(h_BLD, table=self.embedding.weight, padding=given.padding)
        kept = counts[:, None] + torch.arange(self.before, device=text.device)
        return logits, NgramState(self.spec, text.gather(1, kept[..., None].expand(-1, -1, text.shape[-1])))
