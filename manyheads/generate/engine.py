"""The engine: many requests on one model, which join and leave one batch while it decodes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import InputLengthError, ManyheadsError, NonFiniteOutputError, QueueFullError
from manyheads.generate.decoding import (
    Hypothesis,
    RequestRules,
    TokenByTokenSpec,
    TokenLogprobs,
    check_any_token_allowed,
)
from manyheads.generate.prefix_cache import PrefixCache, common_prefix
from manyheads.model.builder import Model
from manyheads.model.finite import raise_nonfinite
from manyheads.parts.head import token_at
from manyheads.parts.inputs import Inputs, group_by_length, pad_rows

CACHE_BYTES = 2**30
MIN_PREFIX = 16  # tokens; a shorter prefix is read again sooner than its state is copied
MAX_PREFIXES = 8
MAX_ROWS = 64
EMPTY = torch.empty(0, dtype=torch.long)


@dataclass(frozen=True)
class Request:
    """Ids to continue, or the source of an encoder–decoder, and how tokens are chosen.

    `rng` is for sampling. `start` are the first tokens of the decoder, if there is a source.
    """

    ids: Sequence[int]
    rules: RequestRules
    rng: torch.Generator | None = None
    start: Sequence[int] = ()

    @property
    def method(self) -> TokenByTokenSpec:
        method = self.rules.config.decoding
        assert isinstance(method, TokenByTokenSpec)
        return method

    @property
    def prompt(self) -> Sequence[int]:
        """The tokens that the decoder reads before the first new one."""
        return self.start or self.ids

    @property
    def beginning(self) -> tuple[int, ...] | None:
        """The first tokens, by which requests with a common prefix are found; None if there is none to share."""
        return None if self.start or len(self.ids) <= MIN_PREFIX else tuple(self.ids[:MIN_PREFIX])

    @property
    def source_tokens(self) -> int:
        """The tokens of the source, whose keys and values are in the cache too."""
        return len(self.ids) if self.start else 0

    @property
    def max_tokens(self) -> int:
        """The tokens that the decoder reads at most: not the last new one."""
        return len(self.prompt) + self.rules.config.max_new_tokens - 1


@dataclass
class Running:
    """A request in the batch, and its new tokens."""

    number: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    is_finished: bool = False  # by its last token, not by max_new_tokens
    has_failed: bool = False
    history: Tensor = field(init=False)  # memory for the prompt and the new tokens

    def __post_init__(self) -> None:
        prompt = torch.tensor(self.request.prompt)
        self.history = torch.cat((prompt, prompt.new_empty(self.request.rules.config.max_new_tokens)))

    @property
    def has_ended(self) -> bool:
        return self.is_finished or len(self.tokens) == self.request.rules.config.max_new_tokens

    @property
    def num_read(self) -> int:
        """The tokens that the decoder has read."""
        return len(self.request.prompt) + max(0, len(self.tokens) - 1)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    def append(self, token: int, logits_1V: Tensor) -> Token:
        """Adds a token, chosen by these logits before the processors."""
        self.history[self.num_tokens] = token
        self.tokens.append(token)
        rules = self.request.rules
        self.is_finished = rules.has_ended(token, lambda: self.tokens)
        if rules.config.logprobs is not None:
            self.logprobs = self.logprobs or TokenLogprobs(rules.config.logprobs)
            self.logprobs.append(logits_1V, torch.tensor([token], device=logits_1V.device))
        return Token(self.number, token, self.hypothesis() if self.has_ended else None)

    def fail(self, error: ManyheadsError) -> Token:
        """Ends the request by an error."""
        self.is_finished = self.has_failed = True
        return Token(self.number, error=error)

    def hypothesis(self) -> Hypothesis:
        logprobs = () if self.logprobs is None else (None, *self.logprobs.of_row(0))
        return Hypothesis(self.tokens, self.is_finished, *logprobs)


@dataclass(frozen=True)
class Token:
    """A new token of a request, with the whole sequence if it is its last, or the error that ended the request."""

    number: int
    token: int | None = None
    hypothesis: Hypothesis | None = None
    error: ManyheadsError | None = None


class Engine:
    """Decodes many requests with one model, a token of each at a time.

    Requests wait in the order in which they came, join the batch as soon as the cache has room for all their tokens,
    and leave it at their end, so that none is late because of a longer one and none starves. `max_cache_tokens` bounds
    the keys and values of the batch and of shared prefixes together; while requests join, the old and the new batch
    exist at once. The tokens of a request do not depend on others. A recurrent network has no cache; its requests are
    counted in the same way. With `keep_answers`, prompts that continue an answer do not read it again. An engine is for
    one thread.
    """

    def __init__(
        self, model: Model, *, max_cache_tokens: int = 2**16, max_rows: int = MAX_ROWS, max_waiting: int = 1024,
        prefixes: PrefixCache | None = None, keep_answers: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.device = model, next(model.parameters()).device
        self.max_cache_tokens, self.max_rows, self.max_waiting = max_cache_tokens, max_rows, max_waiting
        self.prefixes = PrefixCache(MAX_PREFIXES, MIN_PREFIX) if prefixes is None else prefixes
        self.keep_answers = keep_answers
        self.waiting: deque[tuple[int, Request]] = deque()
        self.running: list[Running] = []
        self.state: Any = None
        self.capacity = 0  # columns of the batch
        self.room = max_cache_tokens  # for prefixes
        self.count = 0

    # -------------------------------------------------------------------------------------------------------- requests

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def cache_tokens(self) -> int:
        """The tokens that memory is reserved for."""
        return len(self.running) * self.capacity + self.prefixes.num_tokens

    def submit(self, request: Request) -> int:
        """Adds a request and returns its number; raises if too many wait, or if it could never fit."""
        needed = request.max_tokens + request.source_tokens
        if needed > self.max_cache_tokens:
            raise InputLengthError(
                f"{needed:,} tokens, of which {request.rules.config.max_new_tokens:,} are new ones, do not fit into a "
                f"cache of {self.max_cache_tokens:,} tokens"
            )
        if len(self.waiting) >= self.max_waiting:
            raise QueueFullError(f"{len(self.waiting):,} requests wait already; try again later")
        self.count += 1
        self.waiting.append((self.count, request))
        return self.count

    def cancel(self, number: int) -> None:
        """Removes a request, whether it waits or runs; nothing happens if it has ended."""
        self.waiting = deque(item for item in self.waiting if item[0] != number)
        self.keep([i for i, row in enumerate(self.running) if row.number != number])

    def run(self, requests: Iterable[Request]) -> Iterator[Token]:
        """Submits requests as soon as there is room for them and yields their tokens; numbers count them from 1."""
        remaining = iter(requests)
        while True:
            while len(self.waiting) < self.max_rows and (request := next(remaining, None)) is not None:
                self.submit(request)
            if self.is_idle:
                return
            yield from self.step()

    # ------------------------------------------------------------------------------------------------------------ steps

    @torch.no_grad()
    def step(self) -> list[Token]:
        """Computes one token of every running request, removes those that end, and admits what fits."""
        tokens: list[Token] = []
        if self.running:
            last_tokens = torch.tensor([[row.tokens[-1]] for row in self.running], device=self.device)
            tokens, self.state = self.advance(self.running, Inputs(last_tokens), self.state)
            self.keep([i for i, row in enumerate(self.running) if not row.has_ended])
        if admitted := self.admit():
            for rows, is_shared in self.prefill_groups(admitted):
                new_tokens, state = self.prefill(rows, is_shared=is_shared)
                tokens += new_tokens
                self.join(rows, state)
        return tokens

    def admit(self) -> list[Running]:
        """Takes the requests that have waited longest, as long as the batch with all their tokens fits."""
        admitted: list[Running] = []
        while self.waiting and len(self.running) + len(admitted) < self.max_rows:
            row = Running(*self.waiting[0])
            rows = [*self.running, *admitted, row]
            room = self.max_cache_tokens - len(rows) * columns(rows)
            if room < 0:
                break
            admitted.append(row)
            self.room = room
            self.waiting.popleft()
        self.prefixes.shrink(self.room)
        return admitted

    def prefill_groups(self, admitted: Sequence[Running]) -> Iterator[tuple[list[Running], bool]]:
        """The requests that are read together, and whether they begin in the same way, as do others."""
        requests = [row.request for row in admitted]
        beginnings = Counter(request.beginning for request in (*requests, *(request for _, request in self.waiting)))
        beginnings.update(tuple(entry[:MIN_PREFIX]) for entry in self.prefixes.entries)
        groups: dict[Any, list[Running]] = {}
        for row in admitted:
            beginning = row.request.beginning
            groups.setdefault(beginning if beginnings[beginning] > 1 else None, []).append(row)
        for beginning, rows in groups.items():
            lengths = [len(row.request.prompt) + row.request.source_tokens for row in rows]
            yield from (([rows[i] for i in index], beginning is not None) for index in group_by_length(lengths))

    def prefill(self, rows: Sequence[Running], *, is_shared: bool) -> tuple[list[Token], Any]:
        """Reads the prompts of requests that join; returns their first tokens and their state."""
        prompts, num_read, source = [list(row.request.prompt) for row in rows], 0, None
        capacity = max(map(len, prompts))
        if self.model.spec.has_source:
            source = pad_rows([list(row.request.ids) for row in rows]).to(self.device)
            state: Any = self.model.start(source, capacity=capacity)
        elif len(rows) == 1:
            # the last token gives the first logits
            state, num_read = self.prefixes.start(self.model, prompts[0][:-1], capacity)
        elif is_shared:
            prefix = prompts[0][: min(common_prefix(prompts), min(map(len, prompts)) - 1)]
            state, num_read = self.read_prefix(prefix, capacity), len(prefix)
            state = state.select(torch.zeros(len(rows), dtype=torch.long, device=self.device))
        else:
            state = self.model.start(capacity=capacity)

        def read_all() -> object:
            first_state: Any = self.model.start(source, capacity=capacity)
            return self.model.step(pad_rows(prompts, left=True).to(self.device), first_state)

        inputs = pad_rows([prompt[num_read:] for prompt in prompts], left=True).to(self.device)
        tokens, state = self.advance(rows, inputs, state, read_all)
        if len(rows) == 1 and source is None and tokens[0].error is None:
            self.prefixes.add(prompts[0], state, self.room)
        return tokens, state

    def read_prefix(self, ids: Sequence[int], capacity: int) -> Any:
        """The state after these tokens, with room for `capacity`."""
        state, num_read = self.prefixes.start(self.model, ids, len(ids))
        if num_read < len(ids):
            state = self.model.step(torch.tensor([ids[num_read:]], device=self.device), state)[1]
            self.prefixes.add(ids, state, self.room)
        return state.resume(len(ids), capacity) or state

    def advance(
        self, rows: Sequence[Running], inputs: Inputs, state: Any, again: Callable[[], object] | None = None
    ) -> tuple[list[Token], Any]:
        """Appends a token to each row, and returns the tokens and the next state.

        `again` computes all that `state` has read once more, to find the layer of numbers that are not finite.
        """
        logits, next_state = self.model.step(inputs, state)
        logits_BV = token_at(logits, inputs.padding_mask, -1)
        tokens: dict[int, Token] = {}
        if not (is_finite := logits_BV.amax(dim=-1).isfinite()).all():
            try:
                raise_nonfinite(self.model, again or (lambda: self.model.step(inputs, state)))
            except NonFiniteOutputError as error:
                tokens = {i: rows[i].fail(error) for i in (~is_finite).nonzero().flatten().tolist()}
        for index in groups(rows, tokens):
            try:
                next_tokens = choose_tokens([rows[i] for i in index], logits_BV[index])
            except ManyheadsError as error:
                tokens |= {i: rows[i].fail(error) for i in index}
            else:
                pairs = zip(index, next_tokens, strict=True)
                tokens |= {i: rows[i].append(token, logits_BV[i : i + 1]) for i, token in pairs}
        return [tokens[i] for i in range(len(rows))], next_state

    # ----------------------------------------------------------------------------------------------------------- batch

    def join(self, rows: Sequence[Running], state: Any) -> None:
        """Adds the rows that go on to the batch."""
        index = [i for i, row in enumerate(rows) if not row.has_ended]
        if not index:
            return
        if len(index) < len(rows):
            state = state.select(torch.tensor(index, device=self.device))
        self.running += [rows[i] for i in index]
        self.capacity = decoder_columns(self.running)
        self.state = state.join((), self.capacity) if self.state is None else self.state.join((state,), self.capacity)

    @torch.no_grad()
    def keep(self, index: Sequence[int]) -> None:
        """Removes all other rows from the batch."""
        if len(index) == len(self.running):
            return
        if self.keep_answers:
            for i in set(range(len(self.running))) - {*index}:
                self.keep_answer(i)
        self.running = [self.running[i] for i in index]
        if index:
            self.state = self.state.select(torch.tensor(index, device=self.device))
        else:
            self.state, self.capacity = None, 0

    def keep_answer(self, i: int) -> None:
        """Keeps the state of a row that has not failed, for prompts that continue it."""
        row = self.running[i]
        if row.has_failed:
            return
        state = self.state.select(torch.tensor([i], device=self.device)).join((), row.num_read)
        self.prefixes.add(row.history[: row.num_read].tolist(), state, self.room)


def cache_tokens(model: Model, num_bytes: int = CACHE_BYTES) -> int:
    """The tokens whose keys and values take so much memory; those of a source count as much."""
    decoder, itemsize = model.spec.decoder, next(model.parameters()).element_size()
    layers = decoder.expanded_layers() if decoder else ()
    sizes = (layer.attention.num_kv_heads() * layer.attention.head_dim(decoder.width) for layer in layers if decoder)
    return num_bytes // max(1, 2 * itemsize * sum(sizes))


def decoder_columns(rows: Sequence[Running]) -> int:
    """The columns of a batch in which every row gets all its tokens: rows end at the same column."""
    return max(row.num_read for row in rows) + max(row.request.max_tokens - row.num_read for row in rows)


def columns(rows: Sequence[Running]) -> int:
    """The columns of a batch with those of the sources."""
    return decoder_columns(rows) + max(row.request.source_tokens for row in rows)


def groups(rows: Sequence[Running], failed: Container[int]) -> list[list[int]]:
    """The rows whose tokens are chosen together, because they have the same rules and number of new tokens."""
    index: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        if i not in failed:
            rules = row.request.rules
            index.setdefault((id(rules), len(row.tokens) if rules.processors else 0), []).append(i)
    return [*index.values()]


def choose_tokens(rows: Sequence[Running], logits_BV: Tensor) -> list[int]:
    """The next tokens of rows with the same rules."""
    rules, longest = rows[0].request.rules, max(row.num_tokens for row in rows)
    histories = [row.history[: row.num_tokens] for row in rows] if rules.processors else []
    tokens_BL = torch.stack([F.pad(history, (longest - len(history), 0), value=-1) for history in histories] or [EMPTY])
    logits_BV = rules.process_logits(logits_BV, tokens_BL.to(logits_BV.device), len(rows[0].tokens))
    rng = [row.request.rng for row in rows if row.request.rng is not None]
    return rows[0].request.method.next_tokens(check_any_token_allowed(logits_BV), rng).tolist()
