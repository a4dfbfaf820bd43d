"""Decoding: the base of the methods that choose the next tokens, and the sequences that they extend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias

import torch
from torch import Tensor

from manyheads.errors import GenerationConfigError
from manyheads.generate.logits_processor import LogitsProcessor, LogitsProcessorContext
from manyheads.generate.prefix_cache import PrefixCache
from manyheads.model.builder import Model
from manyheads.model.finite import check_next_token_logits
from manyheads.parts.head import token_at
from manyheads.parts.inputs import Inputs, tokens_first
from manyheads.spec import Part

if TYPE_CHECKING:
    from manyheads.generate.config import GenerationConfig


@dataclass(frozen=True)
class Hypothesis:
    """One generated sequence."""

    token_ids: list[int]  # the new tokens, with the eos token if it ends with one
    is_finished: bool = True  # False if it ends at max_new_tokens
    score: float | None = None  # of a search, by which its hypotheses are ordered
    logprobs: list[float] | None = None  # log p of each token, before logits processors and temperature
    top_logprobs: list[dict[int, float]] | None = None  # the most probable tokens of each step


# Yields a list of (prompt index, token) per step; returns the hypotheses of each prompt, best first.
DecodingSteps: TypeAlias = Generator[list[tuple[int, int]], None, list[list[Hypothesis]]]


class DecodingRules:
    """How tokens are chosen and when a sequence ends, for one request or for all of a batch."""

    config: GenerationConfig
    processors: Sequence[LogitsProcessor]  # those of the config, prepared, in the order in which they are applied
    # whether the new tokens of a sequence end it, by a stop string or a complete grammar
    stopping_criteria: Callable[[list[int]], bool] | None

    def process_logits(self, logits_BV: Tensor, tokens_BL: Tensor, num_generated: int) -> Tensor:
        """Applies the processors, in float32 or more. `tokens_BL` is padded with −1 on the left."""
        logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
        remaining = self.config.max_new_tokens - num_generated
        forces_bos = any(spec.forces_bos for spec in self.config.processors)
        context = LogitsProcessorContext(tokens_BL, num_generated, remaining, self.config.eos_token_id, forces_bos)
        for processor in self.processors:
            logits_BV = processor.apply(logits_BV, context)
        return logits_BV

    def has_ended(self, token: int, new_tokens: Callable[[], list[int]]) -> bool:
        """Whether a sequence ends with this token, which is the last of its new tokens."""
        return token in self.config.eos_set or (
            self.stopping_criteria is not None and self.stopping_criteria(new_tokens())
        )


@dataclass(frozen=True)
class RequestRules(DecodingRules):
    """The rules of one request of an engine."""

    config: GenerationConfig
    processors: Sequence[LogitsProcessor] = ()
    stopping_criteria: Callable[[list[int]], bool] | None = None


@dataclass(frozen=True)
class GenerationBatch(DecodingRules):
    """A batch of sequences to generate. `decoder_inputs` are prompts, or the first tokens after a source."""

    model: Model
    decoder_inputs: Inputs
    source: Inputs | None
    config: GenerationConfig
    processors: Sequence[LogitsProcessor]
    # one random generator per row, so that a row's samples do not depend on its neighbors
    rng: Sequence[torch.Generator] = ()
    stopping_criteria: Callable[[list[int]], bool] | None = None
    # of one row, for a method that supports it: what earlier prompts have read
    cache: PrefixCache | None = None

    def step(self, inputs: Inputs, state: Any, num_drafted: int = 0) -> tuple[Tensor, Any]:
        """The logits of the next token, B×V, and the state; raises if they are not finite.

        If the last `num_drafted` tokens are a draft, there are also those after each of them, as further rows.
        """
        logits, state = self.model.step(inputs, state)
        last = [token_at(logits, inputs.padding_mask, i) for i in range(-1 - num_drafted, 0)]
        return check_next_token_logits(torch.cat(last)), state


class DecodingSpec(Part, slot="decoding", default="greedy"):
    """The decoding method, which chooses the next tokens."""

    # (name, off): passing the setting `name` with any value except `off` selects this method; it is not inherited
    selected_by: ClassVar[tuple[str, float] | None] = None
    do_sample: ClassVar[bool] = False  # whether it uses the processors of sampling
    supports_prefix_cache: ClassVar[bool] = False  # whether it continues from `batch.cache`
    last_token_needs_position: ClassVar[bool] = False  # whether the model reads the last new token too

    @property
    def rows_per_sequence(self) -> int:
        """The number of batch rows that each prompt takes."""
        return 1

    @property
    def max_sequences(self) -> int:
        """The number of sequences that it can return per prompt, except for sampling."""
        return 1

    @abstractmethod
    def generate(self, batch: GenerationBatch) -> DecodingSteps:
        """Yields the tokens of each step as soon as they are final; returns all hypotheses of each row."""


class TokenByTokenSpec(DecodingSpec):
    """A method that appends one token to each sequence at a time, chosen by the logits of that sequence alone."""

    @abstractmethod
    def next_tokens(self, logits_BV: Tensor, rng: Sequence[torch.Generator]) -> Tensor:
        """The next token of each row, B, from logits after the processors."""

    def generate(self, batch: GenerationBatch) -> DecodingSteps:
        with torch.no_grad():
            running = RunningSequences(batch)

        def advance() -> list[int]:
            logits_BV = check_any_token_allowed(running.process_logits(running.logits()))
            tokens = self.next_tokens(logits_BV, [batch.rng[i] for i in running.prompt_indices] if batch.rng else ())
            running.append(tokens)
            return tokens.tolist()

        return extend_until_end(running, advance)


class RunningSequences:
    """The unfinished sequences of a batch, one per batch row, with the decoding state of the model."""

    def __init__(self, batch: GenerationBatch) -> None:
        self.batch, config, prompt = batch, batch.config, batch.decoder_inputs
        self.state = batch.model.start(batch.source, capacity=prompt.length + config.max_new_tokens)
        self.inputs, self.prompt_length = prompt, prompt.length
        self.tokens = prompt.tokens  # rows×length, padded with −1 on the left
        if prompt.padding_mask is not None:
            padding_first = tokens_first(~prompt.padding_mask)
            self.tokens = prompt.tokens.masked_fill(prompt.padding_mask, -1).gather(1, padding_first)
        self.prompt_indices = list(range(prompt.batch_size))  # the prompt that each sequence continues
        self.logprobs = TokenLogprobs(config.logprobs) if config.logprobs is not None else None

    @property
    def num_generated(self) -> int:
        return self.tokens.shape[1] - self.prompt_length

    def logits(self) -> Tensor:
        """The logits of the next token of each sequence, without processors; raises if they are not finite."""
        self.last_logits, self.state = self.batch.step(self.inputs, self.state)
        return self.last_logits

    def process_logits(self, logits_BV: Tensor) -> Tensor:
        """The logits, or log-probabilities, after the processors."""
        return self.batch.process_logits(logits_BV, self.tokens, self.num_generated)

    def new_tokens(self, index: int) -> list[int]:
        """The generated tokens of a sequence."""
        return self.tokens[index, self.prompt_length :].tolist()

    def append(self, tokens: Tensor, beam_indices: Tensor | None = None) -> None:
        """Appends a token to each sequence; first selects `beam_indices`, if given. One may be left out or repeated."""
        if beam_indices is not None:
            self.select(beam_indices)
        if self.logprobs is not None:
            self.logprobs.append(self.last_logits, tokens)
        self.inputs, self.tokens = Inputs(tokens[:, None]), torch.cat((self.tokens, tokens[:, None]), dim=1)

    def select(self, beam_indices: Tensor) -> None:
        """Keeps these sequences, each as often as it is named."""
        self.state, self.tokens = self.state.select(beam_indices), self.tokens.index_select(0, beam_indices)
        self.prompt_indices = [self.prompt_indices[i] for i in beam_indices.tolist()]
        self.inputs, self.last_logits = Inputs(self.tokens[:, -1:]), self.last_logits.index_select(0, beam_indices)
        if self.logprobs is not None:
            self.logprobs.select(beam_indices)

    def hypothesis(
        self, index: int, token: int | None = None, *, is_finished: bool, score: float | None = None
    ) -> Hypothesis:
        """A sequence as a result; with `token`, continued by it."""
        tokens = self.new_tokens(index) + ([] if token is None else [token])
        logprobs = self.logprobs
        if logprobs is None:
            return Hypothesis(tokens, is_finished, score)
        token_logprobs, top = logprobs.of_row(index)
        if token is not None:
            last = TokenLogprobs(logprobs.count)
            last.append(self.last_logits[index : index + 1], torch.tensor([token], device=self.tokens.device))
            token_logprobs, top = token_logprobs + last.of_row(0)[0], top + last.of_row(0)[1]
        return Hypothesis(tokens, is_finished, score, token_logprobs, top)


@dataclass
class TokenLogprobs:
    """log p of the tokens of some sequences, and of the `count` most probable tokens of each step."""

    count: int
    steps: tuple[Tensor, ...] = ()  # log p of the tokens, B×T, and log p and ids of the most probable, B×T×count

    def append(self, logits_BV: Tensor, tokens: Tensor) -> None:
        logp_BV = log_probabilities(logits_BV)
        values, index = logp_BV.topk(min(self.count, logp_BV.shape[1]))
        new = (logp_BV.gather(1, tokens[:, None]), values[:, None], index[:, None])
        self.steps = tuple(map(partial(torch.cat, dim=1), zip(self.steps, new, strict=True))) if self.steps else new

    def select(self, beam_indices: Tensor) -> None:
        self.steps = tuple(tensor.index_select(0, beam_indices) for tensor in self.steps)

    def of_row(self, row: int) -> tuple[list[float], list[dict[int, float]]]:
        token_logprobs, values, index = (tensor[row].tolist() for tensor in self.steps) if self.steps else ([], [], [])
        return token_logprobs, [dict(zip(*step, strict=True)) for step in zip(index, values, strict=True)]


def log_probabilities(logits: Tensor) -> Tensor:
    """ln p of every token, in float32 or more."""
    return logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def check_any_token_allowed(logits_BV: Tensor) -> Tensor:
    """The logits after all processors; raises if they leave no token for some sequence."""
    if not (logits_BV > -torch.inf).any(dim=1).all():
        raise_no_token_allowed()
    return logits_BV


def raise_no_token_allowed() -> NoReturn:
    raise GenerationConfigError(
        "these settings together allow no further token of the vocabulary, and the text may not end here"
    )


def extend_until_end(running: RunningSequences, advance: Callable[[], list[int]]) -> DecodingSteps:
    """Calls `advance`, which appends a token to every running sequence, until all have ended and left the batch."""
    batch, results = running.batch, list[list[Hypothesis]]([] for _ in running.prompt_indices)
    for remaining in range(batch.config.max_new_tokens, 0, -1):
        with torch.no_grad():  # not around the yield, where the caller's code runs
            tokens = advance()
        yield list(zip(running.prompt_indices, tokens, strict=True))
        unfinished = []
        for i, token in enumerate(tokens):
            is_finished = batch.has_ended(token, partial(running.new_tokens, i))
            if is_finished or remaining == 1:
                results[running.prompt_indices[i]].append(running.hypothesis(i, is_finished=is_finished))
            else:
                unfinished.append(i)
        if not unfinished:
            break
        if len(unfinished) < len(tokens):
            running.select(torch.tensor(unfinished, device=running.tokens.device))
    return results


def run_to_end(steps: DecodingSteps) -> list[list[Hypothesis]]:
    """Runs a method to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
