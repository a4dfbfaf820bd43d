"""The transformer model, which has an encoder, a decoder or both, and a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from manyheads.errors import InputError, UnsupportedError
from manyheads.model.cache import (
    Cache,
    StackState,
    State,
    StaticCache,
    check_can_generate,
    check_capacity,
    check_state,
    join_memories,
    join_rows,
)
from manyheads.model.lowering import lowered_decoder
from manyheads.model.spec import ModelSpec
from manyheads.model.stack import Stack
from manyheads.parts.attention import KeyValue
from manyheads.parts.head import MeanSpec, Pool
from manyheads.parts.inputs import Inputs, Memory
from manyheads.spec import locate_errors


@dataclass(frozen=True)
class TransformerState(State):
    """The state of the decoder, and the source with its keys and values for each layer."""

    spec: ModelSpec
    decoder: StackState
    memory: Memory | None = None
    cross_key_values: tuple[KeyValue | None, ...] | None = None

    def truncate(self, lengths: Tensor) -> TransformerState:
        return replace(self, decoder=self.decoder.truncate(lengths))

    def resume(self, length: int, capacity: int) -> TransformerState | None:
        """None for an encoder–decoder, whose source may differ, and if the positions depend on the final length."""
        if self.memory is not None or self.spec.needs_final_length:
            return None
        return replace(self, decoder=self.decoder.resume(length, capacity))

    def join(self, others: Sequence[TransformerState], capacity: int) -> TransformerState:
        states = (self, *others)
        decoder = self.decoder.join([state.decoder for state in others], capacity)
        if self.memory is None:
            return replace(self, decoder=decoder)
        memories = [state.memory for state in states if state.memory is not None]
        layers = zip(*(state.cross_key_values or () for state in states), strict=True)
        return replace(
            self,
            decoder=decoder,
            memory=join_memories(memories),
            cross_key_values=tuple(join_key_values(layer) for layer in layers),
        )


def join_key_values(parts: Sequence[KeyValue | None]) -> KeyValue | None:
    """The keys and values of several sources as one batch; None for a layer without cross-attention."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return KeyValue(*(join_rows([getattr(part, name) for part in present], dim=2) for name in ("key", "value")))


class Transformer(nn.Module):
    """One or two stacks and a head. The model is encoder-only, decoder-only or encoder-decoder."""

    hidden_names: tuple[str, ...] = ()  # of models without stacks

    def __init__(self, spec: ModelSpec, vocab: int) -> None:
        super().__init__()
        self.spec = spec
        encoder, decoder = spec.encoder, spec.decoder
        with locate_errors("encoder"):
            self.encoder = Stack(encoder, spec.source_vocab or vocab) if encoder else None
        with locate_errors("decoder"):
            self.decoder = Stack(decoder, vocab, encoder.width if encoder else None) if decoder else None
        with locate_errors("head"):
            self.head = spec.head.build(self.last.spec.width, vocab, self.last.embed.table_shape)

    @property
    def last(self) -> Stack:
        """The stack whose output the head reads."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return tuple(stack for stack in (self.encoder, self.decoder) if stack is not None)

    @property
    def last_cross_core(self) -> nn.Module | None:
        """The core of the last attention from the decoder to the source."""
        layers = [self.decoder.layer(i) for i in range(self.decoder.spec.layers)] if self.decoder else []
        return next((layer.cross.core for layer in reversed(layers) if layer.cross is not None), None)

    @property
    def can_generate(self) -> bool:
        """Whether the model can generate, which needs a causal decoder and a head with one output per token."""
        if self.decoder is None or self.decoder.spec.embed.reads == "memory":
            return False
        return self.spec.head.per_token and all(layer.mask.causal for layer in self.decoder.layer_specs)

    @property
    def table(self) -> Tensor | None:
        """The token table of the last stack, its own or the encoder's."""
        for stack in (self.decoder, self.encoder):
            if stack is not None and stack.embed.table is not None:
                return stack.embed.table.weight
        return None

    def forward(
        self, inputs: Inputs | Tensor, source: Inputs | Tensor | None = None, *, logits_to_keep: Tensor | None = None
    ) -> Tensor:
        """The output of the head, such as logits B×L×V.

        An encoder–decoder reads `source` with its encoder and `inputs`, the decoder_input_ids, with its decoder.

        With `logits_to_keep`, B×L, only the outputs where it is True, N×V; other logits are not computed.
        """
        if not self.spec.head.per_token and Inputs.of(inputs).document_ids is not None:
            raise InputError("a pooled head gives one output per row; give one sequence per row, without document_ids")
        states, padding_mask = self.last_hidden_state(inputs, source)
        if logits_to_keep is not None and self.spec.head.output == "tokens":
            states, padding_mask, logits_to_keep = states[logits_to_keep], None, None
        out = self.head(states, table=self.table, padding_mask=padding_mask)
        return out if logits_to_keep is None else out[logits_to_keep]

    def last_hidden_state(
        self, inputs: Inputs | Tensor, source: Inputs | Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The last hidden states, B×L×D, and their padding mask."""
        x_BLD, state = self.last(Inputs.of(inputs), memory=self.encode(source), table=self.table)
        return x_BLD, state.padding_mask

    def embed_sequences(self, inputs: Inputs | Tensor, pool: Pool | None = None) -> Tensor:
        """One vector per sequence, B×D, by `pool`. The default is the output of a vector head, or the mean."""
        if self.spec.head.output == "vector" and pool is None:
            out: Tensor = self(inputs)
            return out
        return (pool or MeanSpec().pool)(*self.last_hidden_state(inputs))

    def encode(self, source: Inputs | Tensor | None) -> Memory | None:
        """The output of the encoder, which the decoder attends to; None if there is only one stack."""
        if self.encoder is None or self.decoder is None:
            if source is not None:
                raise InputError(
                    f"a source was given, but this model is {self.spec.architecture}, not an encoder–decoder"
                )
            return None
        if source is None:
            raise InputError("an encoder–decoder needs a source")
        hidden_states, state = self.encoder(Inputs.of(source))
        return Memory(hidden_states, state.positions, state.padding_mask, state.document_ids, state.default_positions)

    def start(self, source: Inputs | Tensor | None = None, *, capacity: int | None = None) -> TransformerState:
        """The state before the first token. With a capacity, which is the maximum length, caches are allocated once."""
        check_can_generate(self)
        assert self.decoder is not None
        check_capacity(capacity)
        if capacity is None and self.spec.needs_final_length:
            raise UnsupportedError(
                "the rotary embeddings of this model depend on the final length; give start a capacity"
            )
        memory = self.encode(source)
        state = self.decoder.start(Cache() if capacity is None else StaticCache(capacity), capacity)
        key_values = tuple(self.decoder.cross_key_values(memory)) if memory else None
        return TransformerState(self.spec, state, memory, key_values)

    def step(self, inputs: Inputs | Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """Logits after each of the new tokens, one or many, and the next state."""
        check_state(state, TransformerState, self.spec)
        assert self.decoder is not None
        inputs = Inputs.of(inputs)
        lowered = lowered_decoder(self.decoder, self.head) if state.memory is None else None
        if lowered is not None and lowered.can_run(inputs, state.decoder):
            logits, decoder_state = lowered.step(self.decoder, inputs, state.decoder)
            return logits, replace(state, decoder=decoder_state)
        x_BLD, decoder_state = self.decoder(
            inputs, state=state.decoder, memory=state.memory, cross_key_values=state.cross_key_values, table=self.table
        )
        logits = self.head(x_BLD, table=self.table, padding_mask=inputs.padding_mask)
        return logits, replace(state, decoder=decoder_state)


def as_transformer(model: nn.Module, feature: str) -> Transformer:
    """The model, if it is a transformer; raises an error that names the feature that needs one."""
    if not isinstance(model, Transformer):
        architecture = getattr(getattr(model, "spec", None), "architecture", type(model).__name__)
        raise UnsupportedError(f"{feature} needs a transformer; this model is {architecture}")
    return model
