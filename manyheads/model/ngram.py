"""The neural n-gram model, which predicts the next token from the last n − 1 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from manyheads.errors import InputError
from manyheads.model.cache import State, StepwiseModel, check_batch, check_state
from manyheads.model.spec import ModelSpec
from manyheads.parts.embed import TableShape, embed_ids
from manyheads.parts.inputs import Inputs, check_not_packed, tokens_first
from manyheads.spec import locate_errors


@dataclass(frozen=True)
class NgramState(State):
    """The embeddings of the last n − 2 tokens, B×(n−2)×D. Together with the next token they are the whole context."""

    spec: ModelSpec
    last: Tensor | None = None  # None before the first token

    def join(self, others: Sequence[NgramState], capacity: int) -> NgramState:
        """`capacity` has no effect, because no memory is reserved."""
        return replace(self, last=torch.cat([part for state in (self, *others) if (part := state.last) is not None]))


class Ngram(StepwiseModel[NgramState]):
    """A hidden layer on the embeddings of the last n − 1 tokens, and a head."""

    def __init__(self, spec: ModelSpec, vocab: int) -> None:
        super().__init__()
        assert spec.ngram is not None
        self.spec, backbone = spec, spec.ngram
        hidden = backbone.hidden or backbone.width
        self.embedding = nn.Embedding(vocab, backbone.width)
        self.hidden = nn.Linear((backbone.order - 1) * backbone.width, hidden)
        self.dropout = nn.Dropout(backbone.dropout)
        with locate_errors("head"):
            self.head = spec.head.build(hidden, vocab, TableShape(backbone.width, backbone.width))
        self.num_previous = backbone.order - 2

    def initial_state(self, source: Inputs | Tensor | None) -> NgramState:
        if source is not None:
            raise InputError("a source was given, but an n-gram model has no encoder")
        return NgramState(self.spec)

    @property
    def table(self) -> Tensor:
        return self.embedding.weight

    def hidden_step(self, inputs: Inputs, state: NgramState) -> tuple[Tensor, NgramState]:
        check_state(state, NgramState, self.spec)
        check_not_packed(inputs)
        unused = (inputs.token_type_ids, inputs.task_type_ids, inputs.positions)
        if any(tensor is not None for tensor in unused):
            raise InputError("an n-gram model has neither types nor positions; give only tokens and padding")
        batch, length = inputs.batch_size, inputs.length
        e_BLD, order = embed_ids(inputs.tokens, self.embedding), None
        last = e_BLD.new_zeros(batch, self.num_previous, e_BLD.shape[-1]) if state.last is None else state.last
        check_batch(last, batch)
        counts = torch.full((batch,), length, device=e_BLD.device)
        if inputs.padding_mask is not None:  # a window must not contain padding
            order = tokens_first(inputs.padding_mask)[..., None]
            e_BLD, counts = e_BLD.gather(1, order.expand_as(e_BLD)), (~inputs.padding_mask).sum(dim=1)
        context = torch.cat((last, e_BLD), dim=1)
        windows = context.unfold(1, self.num_previous + 1, 1).transpose(2, 3).flatten(2)
        h_BLD = self.dropout(torch.tanh(self.hidden(windows)))
        if order is not None:
            h_BLD = torch.zeros_like(h_BLD).scatter(1, order.expand_as(h_BLD), h_BLD)
        index = (counts[:, None] + torch.arange(self.num_previous, device=context.device))[..., None]
        return h_BLD, NgramState(self.spec, context.gather(1, index.expand(-1, -1, context.shape[-1])))
