"""The transformer: an encoder, a decoder or both, and a head."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from manyheads.model.spec import ModelSpec
from manyheads.model.stack import Stack
from manyheads.model.state import Cache, FixedCache, Seen, check_capacity, check_state, select
from manyheads.parts.attention import KeyValue
from manyheads.parts.batch import Inputs, Memory
from manyheads.parts.head import MeanSpec, Pool
from manyheads.spec import located

CANNOT_WRITE = "only a decoder with a causal mask and a head for each token writes token by token"


@dataclass(frozen=True)
class TransformerState:
    """What the decoder has read, and the source it looks at."""

    spec: ModelSpec
    seen: Seen
    memory: Memory | None = None
    kept: tuple[KeyValue | None, ...] | None = None

    def select(self, rows: Tensor) -> TransformerState:
        return select(self, rows)


class Transformer(nn.Module):
    """One or two towers; which exist is the shape."""

    def __init__(self, spec: ModelSpec, vocab: int) -> None:
        super().__init__()
        self.spec = spec
        encoder, decoder = spec.encoder, spec.decoder
        with located("encoder"):
            self.encoder = Stack(encoder, spec.source_vocab or vocab) if encoder else None
        with located("decoder"):
            self.decoder = Stack(decoder, vocab, encoder.width if encoder else None) if decoder else None
        with located("head"):
            self.head = spec.head.build(self.last.spec.width, vocab, self.last.embed.rows())

    @property
    def last(self) -> Stack:
        """The tower the head stands on."""
        tower = self.decoder or self.encoder
        assert tower is not None
        return tower

    @property
    def writes(self) -> bool:
        """Whether it can write token by token: a decoder that never looks ahead, with a head that says something of each token."""
        if self.decoder is None or self.decoder.spec.embed.reads == "memory":
            return False
        return self.spec.head.a_token and all(layer.mask.causal for layer in self.decoder.layer_specs)

    @property
    def table(self) -> Tensor | None:
        """The token table of the last tower, its own or the encoder's."""
        for tower in (self.decoder, self.encoder):
            if tower is not None and tower.embed.table is not None:
                return tower.embed.table.weight
        return None

    def forward(self, inputs: Inputs | Tensor, source: Inputs | Tensor | None = None, *, at: Tensor | None = None) -> Tensor:
        """Logits (or whatever the head makes) for a batch; of an encoder–decoder, for a target given its source.

        With `at`, B×L, those of the places alone where it is True, N×V: what nobody asks for costs nothing.
        """
        if not self.spec.head.a_token and Inputs.of(inputs).segments is not None:
            raise ValueError("a head that pools gives one answer a row, and a packed row holds several texts; give one text a row")
        states, padding = self.states(inputs, source)
        if at is not None and self.spec.head.scores_tokens:
            states, padding, at = states[at], None, None
        out = self.head(states, table=self.table, padding=padding)
        return out if at is None else out[at]

    def states(self, inputs: Inputs | Tensor, source: Inputs | Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The last layer's vectors and their padding."""
        memory = self.encode(source)
        x_BLD, seen = self.last(Inputs.of(inputs), memory=memory, table=self.table)
        return x_BLD, seen.padding

    def vectors(self, inputs: Inputs | Tensor, pool: Pool | None = None) -> Tensor:
        """One vector a text, B×D: what `pool` makes of its tokens' states; without one, what a head gives that is for it, or the mean."""
        if self.spec.head.kind == "vector" and pool is None:
            out: Tensor = self(inputs)
            return out
        return (pool or MeanSpec().pool)(*self.states(inputs))

    def encode(self, source: Inputs | Tensor | None) -> Memory | None:
        """What the decoder attends to; None where there is only one tower."""
        if self.encoder is None or self.decoder is None:
            if source is not None:
                raise ValueError(f"a source was given, but the model is only {self.spec.shape}")
            return None
        if source is None:
            raise ValueError("an encoder–decoder needs a source beside the target")
        states, seen = self.encoder(Inputs.of(source))
        return Memory(states, seen.positions, seen.padding, seen.segments, seen.counted)

    def start(self, source: Inputs | Tensor | None = None, *, capacity: int | None = None) -> TransformerState:
        """A state before the first token; with a capacity, the text's utmost length, caches are fixed instead of growing."""
        if not self.writes or self.decoder is None:
            raise ValueError(CANNOT_WRITE)
        check_capacity(capacity)
        if capacity is None and any(layer.position.asks_span for layer in self.decoder.layer_specs):
            raise ValueError("the angles of this model depend on how long the text will be: start it with a capacity")
        memory = self.encode(source)
        seen = self.decoder.empty(Cache() if capacity is None else FixedCache(capacity), capacity)
        return TransformerState(self.spec, seen, memory, tuple(self.decoder.memories(memory)) if memory else None)

    def step(self, inputs: Inputs | Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """Logits after each of the new tokens, one or many, and the state behind them."""
        check_state(state, TransformerState, self.spec)
        if not self.writes or self.decoder is None:
            raise ValueError(CANNOT_WRITE)
        inputs = Inputs.of(inputs)
        x_BLD, seen = self.decoder(inputs, seen=state.seen, memory=state.memory, kept=state.kept, table=self.table)
        logits = self.head(x_BLD, table=self.table, padding=inputs.padding)
        return logits, replace(state, seen=seen)
