"""Generation for many prompts: batches of rows go to the decoding method, and its tokens become texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from manyheads.errors import (
    CheckpointTokenizerError,
    GenerationConfigError,
    InputLengthError,
    NonFiniteOutputError,
    UnsupportedError,
)
from manyheads.files.tokenizer import decode_ids, explain_tokenizer_errors
from manyheads.generate.config import GenerationConfig
from manyheads.generate.decoding import (
    GenerationBatch,
    Hypothesis,
    RequestRules,
    TokenByTokenSpec,
    run_to_end,
)
from manyheads.generate.engine import Engine, Request, cache_tokens
from manyheads.generate.logits_processor import LogitsProcessor
from manyheads.generate.prefix_cache import PrefixCache
from manyheads.generate.text import GeneratedText, PartialText, StopStrings, TextStreamer, find_stop
from manyheads.generate.vocabulary import Vocabulary
from manyheads.model.builder import Model
from manyheads.model.finite import raise_nonfinite
from manyheads.parts.inputs import BATCH_TOKENS, group_by_length, pad_rows


@dataclass(frozen=True)
class LengthLimit:
    """How many tokens may follow a prompt, and a sentence about why, unless that is max_new_tokens."""

    prompt_length: int  # tokens that the decoder reads before it generates
    max_new_tokens: int
    reason: str | None = None


@dataclass(frozen=True)
class TextGenerator:
    """A model that generates, and its tokenizer if it has one."""

    model: Model
    tokenizer: Any = None
    context_length: int | None = None  # tokens that the model was made for, if known

    def stream(
        self, ids: list[int], config: GenerationConfig, cache: PrefixCache | None = None
    ) -> Generator[str, None, GeneratedText]:
        """Yields the generated text for a row of ids in pieces, each as soon as it is final; returns it whole."""
        if config.n != 1 or config.logprobs is not None:
            raise GenerationConfigError("a stream is the text of one sequence; n and logprobs are for generate")
        if self.tokenizer is None:
            raise CheckpointTokenizerError("a stream is text, and this checkpoint has no tokenizer")
        texts = TextStreamer(self.empty_text, config.stop)
        limit = self.limit(len(ids), config)
        for _, item in self.run([ids], config, [limit], cache):
            if not isinstance(item, int):
                result = self.to_text(item[0], config, limit)
            elif item not in config.eos_set and (piece := texts.push(item)):
                yield piece
        if piece := texts.send(result.text):
            yield piece
        return result

    def generate_texts(
        self, rows: Sequence[list[int]], config: GenerationConfig
    ) -> Iterator[tuple[int, list[GeneratedText]]]:
        """Yields (index, generated texts) for each row, batch by batch. Rows of similar length share a batch."""
        limits = self.limits(rows, config)
        for i, item in self.run(rows, config, limits):
            if not isinstance(item, int):
                texts = [self.to_text(hypothesis, config, limits[i]) for hypothesis in item]
                if len(texts) < config.n:
                    note = f"the search found only {len(texts):,} of {config.n:,} sequences"
                    texts[0] = replace(texts[0], note="; ".join(filter(None, (note, texts[0].note))))
                yield i, texts

    def run(
        self,
        rows: Sequence[list[int]],
        config: GenerationConfig,
        limits: Sequence[LengthLimit],
        cache: PrefixCache | None = None,
    ) -> Iterator[tuple[int, int | list[Hypothesis]]]:
        """Yields (index, token) for each new token of the first sequence of a row, then (index, all its hypotheses)."""
        if isinstance(config.decoding, TokenByTokenSpec) and not self.model.spec.needs_final_length:
            yield from self.run_engine(rows, config, limits, cache)
            return
        needs_equal_lengths = self.model.spec.needs_final_length
        keys = [(limit.max_new_tokens, needs_equal_lengths and limit.prompt_length) for limit in limits]
        num_samples = config.n if config.decoding.do_sample else 1
        max_tokens = BATCH_TOKENS // (config.decoding.rows_per_sequence * num_samples)
        for indices in group_by_length([len(row) for row in rows], max_tokens, keys=keys):
            batch_config = replace(config, max_new_tokens=limits[indices[0]].max_new_tokens)
            yield from self.run_batch(rows, indices, batch_config, num_samples, cache)

    def run_engine(
        self,
        rows: Sequence[list[int]],
        config: GenerationConfig,
        limits: Sequence[LengthLimit],
        cache: PrefixCache | None = None,
    ) -> Iterator[tuple[int, int | list[Hypothesis]]]:
        """As `run`, for a method that chooses one token at a time: rows join and leave one batch."""
        num_samples, device = config.n if config.decoding.do_sample else 1, next(self.model.parameters()).device
        rules = {
            count: RequestRules(replace(config, max_new_tokens=count), *self.processors(config))
            for count in {limit.max_new_tokens for limit in limits}
        }
        start = [start_token(config.decoder_start_token_id)] if self.model.spec.has_source and rows else []
        requests = [
            Request(row, rules[limit.max_new_tokens], rng_for(config.seed, row, device, k), start)
            for row, limit in zip(rows, limits, strict=True)
            for k in range(num_samples)
        ]
        sizes = [request.max_tokens + request.source_tokens for request in requests]
        order = sorted(range(len(requests)), key=lambda i: -sizes[i])  # alike ones run together
        capacity = max(
            cache_tokens(self.model), 2 * max(sizes, default=0)
        )  # the longest request, and what the cache has read
        engine = Engine(self.model, max_cache_tokens=capacity, prefixes=cache, keep_answers=cache is not None)
        results: dict[int, Hypothesis] = {}
        try:
            for token in engine.run(requests[i] for i in order):
                if token.error is not None:
                    raise token.error
                index, sample = divmod(order[token.number - 1], num_samples)
                if sample == 0 and token.token is not None:
                    yield index, token.token
                if token.hypothesis is not None:
                    results[index * num_samples + sample] = token.hypothesis
                    samples = range(index * num_samples, (index + 1) * num_samples)
                    if all(i in results for i in samples):
                        yield index, [results.pop(i) for i in samples]
        except GeneratorExit:  # the caller stopped, between two steps
            engine.keep([])
            raise

    def processors(self, config: GenerationConfig) -> tuple[list[LogitsProcessor], Callable[[list[int]], bool] | None]:
        """The logits processors of a config, prepared, and what tells by its new tokens that a sequence ends."""
        processors = [spec.prepare(self.vocabulary) for spec in config.processors]
        criteria = [processor.is_complete for processor in processors if processor.is_complete is not None]
        if config.stop:
            criteria.append(StopStrings(self.empty_text, config.stop).is_complete)
        return processors, (lambda ids: any(is_complete(ids) for is_complete in criteria)) if criteria else None

    def run_batch(
        self,
        rows: Sequence[list[int]],
        indices: Sequence[int],
        config: GenerationConfig,
        num_samples: int,
        cache: PrefixCache | None = None,
    ) -> Iterator[tuple[int, int | list[Hypothesis]]]:
        """As `run`, for the rows of one batch, each with this many samples."""
        prompt_of_row = [i for i in indices for _ in range(num_samples)]
        batch = self.make_batch([rows[i] for i in prompt_of_row], config, num_samples, cache)
        steps, hypotheses = None, None
        while hypotheses is None:
            try:
                steps = steps or config.decoding.generate(batch)
                tokens = next(steps)
            except StopIteration as end:
                hypotheses = end.value
            except NonFiniteOutputError:
                raise_nonfinite(self.model, lambda: run_to_end(config.decoding.generate(batch)))
            else:
                yield from ((prompt_of_row[k], token) for k, token in tokens if k % num_samples == 0)
        for k in range(0, len(prompt_of_row), num_samples):
            yield (
                prompt_of_row[k],
                [hypothesis for sample in hypotheses[k : k + num_samples] for hypothesis in sample][: config.n],
            )

    def make_batch(
        self, rows: Sequence[list[int]], config: GenerationConfig, num_samples: int, cache: PrefixCache | None = None
    ) -> GenerationBatch:
        device, source = next(self.model.parameters()).device, None
        prompt = pad_rows(rows, left=not self.model.spec.has_source).to(device)
        if self.model.spec.has_source:
            source, prompt = prompt, pad_rows([[start_token(config.decoder_start_token_id)]] * len(rows)).to(device)
        rng = [rng_for(config.seed, row, device, k % num_samples) for k, row in enumerate(rows)]
        processors, stopping_criteria = self.processors(config)
        usable_cache = cache if source is None and len(rows) == 1 and config.decoding.supports_prefix_cache else None
        return GenerationBatch(self.model, prompt, source, config, processors, rng, stopping_criteria, usable_cache)

    # --------------------------------------------------------------------------------------------------------- lengths

    def remaining_positions(self, count: int, config: GenerationConfig) -> int | None:
        """How many tokens the decoder has positions for besides `count` others, the new ones included."""
        positions = self.model.spec.max_target_positions
        return None if positions is None else positions - count + (not config.decoding.last_token_needs_position)

    def limits(self, rows: Sequence[Sequence[int]], config: GenerationConfig) -> list[LengthLimit]:
        """The limit of each row; raises if the model has no positions for the tokens that the caller wants."""
        return [self.limit(len(row), config, index) for index, row in enumerate(rows)]

    def limit(self, length: int, config: GenerationConfig, index: int = 0) -> LengthLimit:
        """How many tokens may follow a prompt of `length`; raises if these are none, or fewer than the caller wants.

        The max_length of the settings is the default for an encoder–decoder, and an upper bound for a decoder.
        """
        length, count, reason = 1 if self.model.spec.has_source else length, config.max_new_tokens, None
        positions, remaining = self.model.spec.max_target_positions, self.remaining_positions(length, config)
        if config.max_length is not None:
            max_tokens = max(1, config.max_length - length)
            if self.model.spec.has_source:
                count = max_tokens
            elif max_tokens < count:
                count, reason = max_tokens, f"the text ends at max_length, {config.max_length:,} tokens with the prompt"
        needed = config.max_new_tokens if config.max_new_tokens_given else 1
        if remaining is not None and remaining < needed:
            hint = f"set max_new_tokens to {remaining} or less, or leave it out to stop where the positions end"
            raise InputLengthError(
                f"{length:,} tokens and {needed:,} new ones are more than the model's {positions:,} positions",
                index,
                hint=hint if remaining > 0 else "shorten the text",
            )
        if remaining is not None and remaining < count:
            count, reason = remaining, f"the text ends where the {positions:,} positions of the model end"
        return LengthLimit(length, count, reason)

    def length_note(self, hypothesis: Hypothesis, config: GenerationConfig, limit: LengthLimit) -> str | None:
        """A sentence about a text that ends before max_new_tokens or min_new_tokens, or is longer than in training."""
        if not hypothesis.is_finished and limit.reason:
            return limit.reason
        length, count, decoder = limit.prompt_length, len(hypothesis.token_ids), self.model.spec.decoder
        needed = max((spec.min_new_tokens_after(length) for spec in config.processors), default=0)
        if hypothesis.is_finished and count < needed:
            return f"a stop string or a grammar ends the text after {count:,} tokens, before its minimum of {needed:,}"
        position_specs = [layer.position for layer in decoder.expanded_layers()] if decoder else []
        trained_length = self.context_length or next(
            (position.trained_length for position in position_specs if position.trained_length), None
        )
        is_bounded = self.model.spec.max_target_positions is not None
        if not position_specs or trained_length is None or is_bounded or length + count - 1 <= trained_length:
            return None
        position_spec = next(
            (position for position in position_specs if position.mechanism != "none"), position_specs[0]
        )
        return (
            f"the text is longer than the {trained_length:,} tokens of the texts that the model was trained on; "
            f"{position_spec.beyond_training}"
        )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer)

    @property
    def empty_text(self) -> PartialText:
        """The text to which tokens are added."""
        decoder = self.vocabulary.decoder
        return PartialText(self.decode_without_timeout if decoder.is_local else self.decode, decoder)

    def decode_without_timeout(self, ids: Sequence[int]) -> str:
        """As `decode`, without a limit of time, which a local decoder does not need: it has no regular expression."""
        with explain_tokenizer_errors("the tokenizer failed", CheckpointTokenizerError):
            return str(self.tokenizer.decode(list(ids)))

    def decode(self, ids: Sequence[int]) -> Any:
        """The text of ids; without a tokenizer, the ids."""
        return list(ids) if self.tokenizer is None else decode_ids(self.tokenizer, ids, CheckpointTokenizerError)

    def to_text(self, hypothesis: Hypothesis, config: GenerationConfig, limit: LengthLimit) -> GeneratedText:
        """A generated sequence as text, without its eos token and what follows a stop string."""
        ids, stop = config.without_eos(hypothesis.token_ids), None
        text = self.decode(ids) if self.tokenizer is not None else ""
        if match := find_stop(text, config.stop):
            text, stop = text[: match[0]], match[1]
        top = hypothesis.top_logprobs
        return GeneratedText(
            text,
            ids,
            finish_reason="stop" if hypothesis.is_finished else "length",
            stop=stop,
            score=hypothesis.score,
            logprobs=hypothesis.logprobs,
            top_logprobs=None if top is None else [[(self.token_name(i), p) for i, p in step.items()] for step in top],
            note=self.length_note(hypothesis, config, limit),
        )

    def token_name(self, token: int, *, strip: bool = False) -> str:
        """The text of one token, or its name or number if it has none; with `strip`, without the spaces around it."""
        if self.tokenizer is None:
            return str(token)
        text: str = self.decode([token])
        return (text.strip() if strip else text) or self.tokenizer.id_to_token(token) or f"#{token}"


def start_token(token: int | None) -> int:
    """The first token that the decoder of an encoder–decoder reads."""
    if token is None:
        raise UnsupportedError("the checkpoint has no decoder_start_token_id; pass decoder_start_token_id=ID")
    return token


def rng_for(seed: int, ids: Sequence[int], device: torch.device, number: int = 0) -> torch.Generator:
    """A random generator for the first, second, … sample of a text, which does not depend on the batch."""
    digest = hashlib.blake2b(f"{seed} {ids}{f' {number}' if number else ''}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
