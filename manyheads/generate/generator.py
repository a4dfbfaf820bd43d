"""Generation for many prompts: batches of rows go to the decoding method, and its tokens become texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from manyheads.errors import CheckpointTokenizerError, GenerationConfigError, NonFiniteOutputError, UnsupportedError
from manyheads.files.tokenizer import decode_ids
from manyheads.generate.config import GenerationConfig
from manyheads.generate.decoding import Hypothesis, Request, exhaust
from manyheads.generate.text import Decoding, GeneratedText, TextStream, find_stop
from manyheads.generate.vocabulary import Vocabulary
from manyheads.model.build import Model
from manyheads.model.finite import raise_nonfinite
from manyheads.parts.inputs import group_by_length, pad_rows

BATCH_TOKENS = 2048  # tokens per batch, padding included, with one row per beam


@dataclass(frozen=True)
class TextGenerator:
    """A model that generates, and its tokenizer if it has one."""

    model: Model
    tokenizer: Any = None

    def stream(self, ids: list[int], config: GenerationConfig) -> Iterator[str]:
        """Yields the generated text for a row of ids in pieces, each as soon as it is final."""
        if config.n != 1 or config.logprobs is not None:
            raise GenerationConfigError("a stream is the text of one sequence; n and logprobs are for generate")
        texts = TextStream(Decoding.of(self.tokenizer, self.decode), config.stop)
        for _, item in self.run([ids], config):
            if isinstance(item, int):
                if item not in config.eos_token_id and (piece := texts.push(item)):
                    yield piece
            elif piece := texts.finish(self.to_text(item[0], config).text):
                yield piece

    def texts(self, rows: Sequence[list[int]], config: GenerationConfig) -> Iterator[tuple[int, list[GeneratedText]]]:
        """Yields (index, generated texts) for each row, batch by batch. Rows of similar length share a batch."""
        for i, item in self.run(rows, config):
            if not isinstance(item, int):
                yield i, [self.to_text(hypothesis, config) for hypothesis in item]

    def run(self, rows: Sequence[list[int]], config: GenerationConfig) -> Iterator[tuple[int, int | list[Hypothesis]]]:
        """Yields (index, token) for each new token of the first sequence of a row, then (index, all its hypotheses)."""
        if self.model.spec.has_source and config.decoder_start_token_id is None:
            raise UnsupportedError("the checkpoint has no decoder_start_token_id; pass decoder_start_token_id=ID")
        groups: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault(self.limit(len(row), config), []).append(i)
        samples = config.n if config.decoding.samples else 1
        max_tokens = BATCH_TOKENS // (config.decoding.beams * samples)
        for (max_new_tokens, _), group in groups.items():
            limited = replace(config, max_new_tokens=max_new_tokens)
            for batch in group_by_length([len(rows[i]) for i in group], max_tokens):
                yield from self.run_batch(rows, [group[i] for i in batch], limited, samples)

    def run_batch(
        self, rows: Sequence[list[int]], batch: Sequence[int], config: GenerationConfig, samples: int
    ) -> Iterator[tuple[int, int | list[Hypothesis]]]:
        """As `run`, for the rows of one batch, each with this many samples."""
        index = [i for i in batch for _ in range(samples)]
        request = self.request([rows[i] for i in index], config, samples)
        generated, hypotheses = config.decoding.generate(request), None
        while hypotheses is None:
            try:
                tokens = next(generated)
            except StopIteration as end:
                hypotheses = end.value
            except NonFiniteOutputError:
                raise_nonfinite(self.model, lambda: exhaust(config.decoding.generate(request)))
            else:
                yield from ((index[k], token) for k, token in tokens if k % samples == 0)
        for k in range(0, len(index), samples):
            yield index[k], [one for some in hypotheses[k : k + samples] for one in some][: config.n]

    def request(self, rows: Sequence[list[int]], config: GenerationConfig, samples: int) -> Request:
        has_source, device = self.model.spec.has_source, next(self.model.parameters()).device
        inputs = pad_rows(rows, left=not has_source).to(device)
        rng = [rng_for(config.seed, row, device, k % samples) for k, row in enumerate(rows)]
        config = config.prepare(self.vocabulary)
        is_stopped = partial(self.is_stopped, config) if config.stop or config.ending_filters else None
        if not has_source:
            return Request(self.model, inputs, None, config, rng, is_stopped)
        start = pad_rows([[config.decoder_start_token_id or 0]] * len(rows)).to(device)
        return Request(self.model, start, inputs, config, rng, is_stopped)

    def limit(self, length: int, config: GenerationConfig) -> tuple[int, int]:
        """`max_new_tokens` within the model's positions, and the length that all rows of a batch must share, or 0.

        Rows must share a length if the RoPE frequencies depend on the length after generation. The max_length of a
        checkpoint is the default for an encoder–decoder, and an upper bound for a decoder.
        """
        spec = self.model.spec
        length, max_new_tokens = 1 if spec.has_source else length, config.max_new_tokens
        if config.max_length is not None:
            rest = max(1, config.max_length - length)
            max_new_tokens = rest if spec.has_source else min(max_new_tokens, rest)
        if spec.decoder is None:
            return max_new_tokens, 0
        limit = spec.decoder.max_positions
        if limit is not None and length <= limit:
            max_new_tokens = min(max_new_tokens, limit - length + 1)
        needs_equal_lengths = any(layer.position.needs_final_length for layer in spec.decoder.expanded_layers())
        return max_new_tokens, length if needs_equal_lengths else 0

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer)

    def is_stopped(self, config: GenerationConfig, ids: list[int]) -> bool:
        """Whether generated ids end with a stop string, or are all that a filter allows."""
        if config.stop and find_stop(self.decode(ids), config.stop) is not None:
            return True
        return any(one.is_complete(ids) for one in config.ending_filters)

    def decode(self, ids: Sequence[int]) -> Any:
        """The text of ids; without a tokenizer, the ids."""
        return list(ids) if self.tokenizer is None else decode_ids(self.tokenizer, ids, CheckpointTokenizerError)

    def to_text(self, hypothesis: Hypothesis, config: GenerationConfig) -> GeneratedText:
        """A generated sequence as text, without its eos token and what follows the first stop string."""
        ids, stop = config.without_eos(hypothesis.tokens), None
        text = self.decode(ids) if self.tokenizer is not None else ""
        if found := find_stop(text, config.stop):
            text, stop = text[: found[0]], found[1]
        top = hypothesis.top_logprobs
        return GeneratedText(
            text,
            ids,
            finish_reason="stop" if hypothesis.is_finished else "length",
            stop=stop,
            score=hypothesis.score,
            logprobs=hypothesis.logprobs,
            top_logprobs=None if top is None else [[(self.token_name(i), p) for i, p in one.items()] for one in top],
        )

    def token_name(self, token: int) -> str:
        """The text of one token, or its name if it has none."""
        if self.tokenizer is None:
            return str(token)
        return self.tokenizer.decode([token]) or str(self.tokenizer.id_to_token(token))


def rng_for(seed: int, ids: Sequence[int], device: torch.device, number: int = 0) -> torch.Generator:
    """A random generator for the first, second, … sample of a text, which does not depend on the batch."""
    digest = hashlib.blake2b(f"{seed} {ids}{f' {number}' if number else ''}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
