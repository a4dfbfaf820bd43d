"""Prompt lookup: speculative decoding with drafts from the text itself."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import ClassVar

import torch

from manyheads.generate.decoding import (
    DecodingSpec,
    DecodingSteps,
    GenerationBatch,
    Hypothesis,
    TokenLogprobs,
    check_any_token_allowed,
)
from manyheads.generate.prefix_cache import PrefixCache
from manyheads.parts.inputs import Inputs
from manyheads.spec import field


class PromptLookupSpec(DecodingSpec, kind="prompt-lookup"):
    """argmax_v p(v | x_<t), as greedy decoding, with several tokens per step where the text repeats itself

    Saxena 2023 (prompt lookup decoding); Leviathan et al. 2023, arXiv 2211.17192. The tokens that followed the last
    n-gram where it occurred before are a draft. One step computes the logits after each of them, and the tokens up to
    the first that greedy decoding would not choose are kept. Each row runs alone.
    """

    selected_by: ClassVar[tuple[str, float]] = ("prompt_lookup_num_tokens", 0)
    supports_prefix_cache: ClassVar[bool] = True

    prompt_lookup_num_tokens: int = field(10, "maximum tokens of a draft", ge=1, le=1024)
    max_matching_ngram_size: int = field(2, "n, the longest n-gram that is looked up", ge=1, le=64)

    def generate(self, batch: GenerationBatch) -> DecodingSteps:
        results = []
        for row in range(batch.decoder_inputs.batch_size):
            results.append([(yield from self.generate_row(one_row(batch, row), row))])
        return results

    def generate_row(self, batch: GenerationBatch, row: int) -> Generator[list[tuple[int, int]], None, Hypothesis]:
        config, device = batch.config, batch.decoder_inputs.tokens.device
        tokens, new = batch.decoder_inputs.tokens[0].tolist(), list[int]()
        logprobs = None if config.logprobs is None else TokenLogprobs(config.logprobs)
        capacity = len(tokens) + config.max_new_tokens + self.prompt_lookup_num_tokens
        with torch.no_grad():
            cache = PrefixCache() if batch.cache is None else batch.cache
            state, length = cache.start(batch.model, tokens[:-1], capacity, batch.source)
        unread_tokens, is_finished = tokens[length:], False  # tokens that the model has not read
        while len(new) < config.max_new_tokens and not is_finished:
            draft = self.draft(tokens)[: config.max_new_tokens - len(new) - 1]
            with torch.no_grad():
                inputs = Inputs(torch.tensor([unread_tokens + draft], device=device))
                logits_NV, state = batch.step(inputs, state, num_drafted=len(draft))
            length += len(unread_tokens)
            for i in range(len(draft) + 1):
                logits_1V = logits_NV[i : i + 1]
                processed_1V = batch.process_logits(logits_1V, torch.tensor([tokens], device=device), len(new))
                token = int(check_any_token_allowed(processed_1V).argmax())
                tokens.append(token)
                new.append(token)
                if logprobs is not None:
                    logprobs.append(logits_1V, torch.tensor([token], device=device))
                yield [(row, token)]
                is_finished = batch.has_ended(token, lambda: new)
                if is_finished or i == len(draft) or token != draft[i]:
                    break
                length += 1
            state, unread_tokens = state.truncate(torch.tensor([length], device=device)), tokens[-1:]
            if batch.cache is not None:
                batch.cache.add(tokens[:length], state)
        return Hypothesis(new, is_finished, None, *(logprobs.of_row(0) if logprobs is not None else ()))

    def draft(self, tokens: list[int]) -> list[int]:
        """The longest draft for the longest n-gram that occurred before; of equally long ones, the last."""
        for n in range(min(self.max_matching_ngram_size, len(tokens) - 1), 0, -1):
            starts = [i for i in range(len(tokens) - n - 1, -1, -1) if tokens[i : i + n] == tokens[-n:]]
            if starts:
                drafts = (tokens[i + n : i + n + self.prompt_lookup_num_tokens] for i in starts)
                return max(drafts, key=len)
        return []


def one_row(batch: GenerationBatch, row: int) -> GenerationBatch:
    """The batch of one row, without its padding."""
    prompt, source = batch.decoder_inputs, batch.source
    tokens = prompt.tokens[row : row + 1]
    if prompt.padding_mask is not None:
        tokens = tokens[:, ~prompt.padding_mask[row]]
    if source is not None:
        mask = source.padding_mask
        source = Inputs(source.tokens[row : row + 1] if mask is None else source.tokens[row : row + 1, ~mask[row]])
    return replace(batch, decoder_inputs=Inputs(tokens), source=source)
