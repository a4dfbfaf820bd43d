"""Grammars that a generated text must follow, run by llguidance: bounded in size, and in time per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from manyheads.errors import GenerationConfigError
from manyheads.generate.vocabulary import Vocabulary, import_llguidance
from manyheads.spec import shorten

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

    from manyheads.generate.logits_processor import LogitsProcessorContext

MAX_BYTES = 1 << 16  # of a schema or a regular expression


def limits() -> LLParserLimits:
    """Bounds of memory and of work, of which llguidance does 10,000 to 50,000 units per millisecond."""
    return import_llguidance().LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def lark(start: str) -> str:
    """A grammar whose masks allow every token that may begin or continue a text of it."""
    return f'%llguidance {{"no_forcing": true}}\nstart: {start}'


def check_grammar(name: str, grammar: str) -> None:
    """Raises if a grammar cannot be compiled; `name` is the setting that it is from."""
    if message := import_llguidance().LLMatcher.validate_grammar(grammar, limits=limits()):
        lines = message.splitlines()  # "AT: MESSAGE", or a regular expression, a pointer to its fault, and "error: …"
        detail = next((line for line in lines if line.startswith("error: ")), lines[0].partition("): ")[2] or lines[0])
        raise GenerationConfigError(f"{name} cannot be compiled: {shorten(detail.removeprefix('error: '))}")


@dataclass(frozen=True)
class GrammarState:
    """What a grammar has read of a text. It does not change: the state after another token is another object."""

    name: str  # the setting, for errors
    vocabulary: Vocabulary
    matcher: LLMatcher
    is_empty: bool = True  # whether no text has been read

    @cached_property
    def allowed_tokens(self) -> Tensor:
        """Which tokens of the tokenizer may follow; not the end of the text."""
        tokens = self.vocabulary.tokens
        bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")
        self.check_complexity(self.matcher)
        mask = torch.from_numpy(bits[: tokens.end].astype(bool))
        if self.is_empty and tokens.strips_space:  # decoding would remove it, and the text would not match
            mask &= ~tokens.starts_with_space
        return mask

    @property
    def may_end(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self.matcher.is_accepting() and self.matcher.is_stopped()

    def after(self, token: int) -> GrammarState | None:
        """The state after a token; None if no text of the grammar continues so."""
        tokens = self.vocabulary.tokens
        if token in tokens.has_no_text:
            return self
        if token >= tokens.end or not self.allowed_tokens[token]:
            return None
        matcher = self.matcher.deep_copy()
        matcher.consume_token(token)
        self.check_complexity(matcher)
        return GrammarState(self.name, self.vocabulary, matcher, is_empty=False)

    def check_complexity(self, matcher: LLMatcher) -> None:
        if matcher.is_error() and not matcher.get_error().startswith("NoExtension"):  # which is no token that fits
            raise GenerationConfigError(
                f"{self.name} is too complex: a step takes more work than is allowed",
                hint="give fewer alternatives and shorter repetitions",
            )


class GrammarProcessor:
    """−∞ for the tokens that no text of a grammar continues with, and for eos tokens until a text may end.

    Sequences with the same generated tokens share a state, and a step adds one token to each: only the states of the
    last step are kept. A special token has no text, so it is allowed only if other settings force it.
    """

    def __init__(self, name: str, grammar: str, vocabulary: Vocabulary) -> None:
        matcher = import_llguidance().LLMatcher(vocabulary.for_grammars, grammar, log_level=0, limits=limits())
        self.start = GrammarState(name, vocabulary, matcher)
        self.start.check_complexity(matcher)
        self.states: dict[tuple[int, ...], GrammarState | None] = {}

    def state(self, tokens: tuple[int, ...]) -> GrammarState | None:
        """The state after these tokens, one step from that of the tokens before the last, which is usually known."""
        count = next((count for count in (len(tokens), len(tokens) - 1) if tokens[:count] in self.states), 0)
        state = self.states.get(tokens[:count], self.start)
        for token in tokens[count:]:
            state = state and state.after(token)
        return state

    def apply(self, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        rows = [tuple(row) for row in context.generated_tokens.tolist()]
        self.states = {tokens: self.state(tokens) for tokens in dict.fromkeys(rows)}
        masks = {tokens: self.mask(state, logits_BV, context) for tokens, state in self.states.items()}
        allowed_BV = torch.stack([masks[tokens] for tokens in rows]).to(logits_BV.device)
        forced_B = (logits_BV > -torch.inf).sum(dim=1) == 1
        if forced_B.any():
            tokens_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
            without_text = self.start.vocabulary.tokens.has_no_text.difference(context.eos_token_id)
            allowed_BV |= forced_B[:, None] & torch.isin(tokens_V, tokens_V.new_tensor(list(without_text)))
        return logits_BV.masked_fill(~allowed_BV, -torch.inf)

    def mask(self, state: GrammarState | None, logits_BV: Tensor, context: LogitsProcessorContext) -> Tensor:
        """The tokens that may follow, V."""
        mask_V = torch.zeros(logits_BV.shape[1], dtype=torch.bool)
        if state is None:  # a beam of probability 0
            return mask_V
        size = min(len(mask_V), len(state.allowed_tokens))
        mask_V[:size] = state.allowed_tokens[:size]
        mask_V[[token for token in context.eos_token_id if token < len(mask_V)]] = state.may_end
        return mask_V

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Whether these generated tokens are a text of the grammar that nothing can follow."""
        key = tuple(tokens)
        state = self.states[key] = self.state(key)
        return state is not None and state.is_complete
