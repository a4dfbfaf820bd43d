"""The neural n-gram model: the next word from the last n − 1, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.model.spec import ModelSpec
from manyheads.model.state import select
from manyheads.parts.embed import Inputs, Rows


@dataclass(frozen=True)
class NgramState:
    """The embeddings of the last n − 2 tokens, B×(n−2)×D: with the next token they are all the model sees."""

    last: Tensor

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
        self.head = spec.head.build(own.hidden or own.width, vocab, Rows(own.width, own.width))
        self.before = own.order - 2

    def forward(self, inputs: Inputs | Tensor, source: Inputs | Tensor | None = None) -> Tensor:
        inputs = Inputs.of(inputs)
        return self.step(inputs, self.start(source, batch=inputs.batch))[0]

    def start(self, source: Inputs | Tensor | None = None, *, batch: int = 1, capacity: int | None = None) -> NgramState:
        if source is not None:
            raise ValueError("an n-gram model reads no source")
        return NgramState(self.embedding.weight.new_zeros(batch, self.before, self.embedding.embedding_dim))

    def step(self, inputs: Inputs | Tensor, state: NgramState) -> tuple[Tensor, NgramState]:
        given = Inputs.of(inputs)
        e_BLD = self.embedding(given.tokens)
        if given.padding is not None:
            e_BLD = e_BLD.masked_fill(given.padding[..., None], 0.0)  # before the text begins, an embedding is zero
        text = torch.cat((state.last.expand(len(e_BLD), -1, -1), e_BLD), dim=1)
        windows = text.unfold(1, self.before + 1, 1).transpose(2, 3).flatten(2)
        h_BLD = self.dropout(torch.tanh(self.hidden(windows)))
        logits = self.head(h_BLD, table=self.embedding.weight, padding=given.padding)
        return logits, NgramState(text[:, text.shape[1] - self.before :])
