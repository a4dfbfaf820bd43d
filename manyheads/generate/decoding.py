"""Decoding: the settings of generation, and the base of the methods that choose the next tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyheads.errors import CheckpointConfigError, ConfigError, GenerationConfigError, UnsupportedError
from manyheads.files.read import parse_json
from manyheads.model.build import Model
from manyheads.model.finite import check_next_token_logits
from manyheads.parts.head import token_at
from manyheads.parts.inputs import Inputs, tokens_first
from manyheads.spec import MAX_COUNT, Part, Tree, did_you_mean, quoted

MAX_IDS, MAX_BAD_IDS = 1 << 10, 1 << 14  # token ids of one setting of a checkpoint, and of all its bad words

# One generator per row, so that a row's samples do not depend on its neighbours.
Generators = Sequence[torch.Generator]


class DecodingSpec(Part, slot="decoding", default="greedy"):
    """The decoding method, which chooses the next tokens."""

    # (name, off): passing the setting `name` with any value except `off` selects this method; it is not inherited
    selected_by: ClassVar[tuple[str, float] | None] = None

    @property
    def beams(self) -> int:
        """The number of batch rows per sequence."""
        return 1

    @abstractmethod
    def generate(
        self, model: Model, prompt: Inputs, source: Inputs | None, *, config: GenerationConfig, rng: Generators
    ) -> list[list[int]]:
        """The new tokens of each row, up to an eos token (included) or `config.max_new_tokens`."""


@dataclass(frozen=True)
class GenerationConfig:
    """All settings of generation, with the names of transformers. A caller's settings override a checkpoint's."""

    max_new_tokens: int = 64
    decoding: DecodingSpec = field(default_factory=lambda: choose_decoding("greedy"))
    seed: int = 0  # random seed for sampling
    decoder_start_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    forced_bos_token_id: tuple[int, ...] = ()  # forced after the first token
    forced_eos_token_id: tuple[int, ...] = ()  # forced at max_new_tokens
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that are never generated

    def __post_init__(self) -> None:
        if type(self.max_new_tokens) is not int or not 1 <= self.max_new_tokens <= MAX_COUNT:
            expected = f"expected an integer from 1 to {MAX_COUNT:,}"
            raise GenerationConfigError(f"max_new_tokens is {quoted(self.max_new_tokens)}, {expected}")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise GenerationConfigError(f"seed is {quoted(self.seed)}, expected a non-negative integer")

    def process_logits(self, logits_BV: Tensor, tokens_BL: Tensor, remaining: int) -> Tensor:
        """Applies bad_words_ids and forced tokens. `remaining` counts the tokens up to max_new_tokens.

        `tokens_BL` is padded with −1 on the left.
        """
        logits_BV = logits_BV.clone() if self.bad_words_ids else logits_BV
        for *before, token in self.bad_words_ids:
            if token < logits_BV.shape[1] and len(before) < tokens_BL.shape[1]:
                ending = tokens_BL[:, tokens_BL.shape[1] - len(before) :]
                logits_BV[(ending == torch.tensor(before, device=ending.device)).all(dim=1), token] = -torch.inf
        if self.forced_eos_token_id and remaining == 1:
            return force_tokens(self.forced_eos_token_id, logits_BV)
        if self.forced_bos_token_id and (first := (tokens_BL >= 0).sum(dim=1) == 1).any():
            return torch.where(first[:, None], force_tokens(self.forced_bos_token_id, logits_BV), logits_BV)
        return logits_BV

    def without_eos(self, tokens: list[int]) -> list[int]:
        """The tokens before the first eos token."""
        eos = frozenset(self.eos_token_id)
        return tokens[: next((i for i, token in enumerate(tokens) if token in eos), len(tokens))]


def force_tokens(tokens: tuple[int, ...], logits_BV: Tensor) -> Tensor:
    """Returns logits of 0 for these tokens and −∞ for all others."""
    if max(tokens) >= logits_BV.shape[1]:
        raise UnsupportedError(f"forced token {max(tokens)} is outside the vocabulary of {logits_BV.shape[1]}")
    index = torch.tensor(tokens, device=logits_BV.device)
    return torch.full_like(logits_BV, -torch.inf).index_fill(1, index, 0.0)


# ------------------------------------------------------------------------------------------------------------ settings


def generation_config(
    base: GenerationConfig | None = None,
    *,
    max_new_tokens: int = 64,
    seed: int = 0,
    decoder_start_token_id: int | None = None,
    decoding: str | Tree | DecodingSpec | None = None,
    **settings: Any,
) -> GenerationConfig:
    """A GenerationConfig from keyword arguments, on top of a checkpoint's own.

    `decoding` is a kind, or a table with its fields. Without it, the other settings, such as temperature or num_beams,
    select a method and set its fields.
    """
    base = base or GenerationConfig()
    if decoding is not None and settings:
        name = next(iter(settings))
        raise GenerationConfigError(f"given both decoding and {name}; give {name} as a field of decoding")
    method = decoding_for(settings) if decoding is None else choose_decoding(decoding)
    start = base.decoder_start_token_id if decoder_start_token_id is None else decoder_start_token_id
    return replace(base, max_new_tokens=max_new_tokens, decoding=method, seed=seed, decoder_start_token_id=start)


def decoding_for(settings: Tree) -> DecodingSpec:
    """The method that the settings select, greedy by default."""
    kinds: list[type[DecodingSpec]] = list(DecodingSpec.kinds.values())  # type: ignore[arg-type]
    # a method that is derived from another does not inherit its selector
    selectors = {kind: vars(kind)["selected_by"] for kind in kinds if vars(kind).get("selected_by")}
    given = [kind for kind, (name, _) in selectors.items() if name in settings]
    for name in settings:
        owners = [kind for kind in kinds if name in kind.model_fields]
        if not owners:
            known = {field for kind in kinds for field in kind.model_fields}
            raise GenerationConfigError(f"unknown setting {quoted(name)}{did_you_mean(name, known)}")
        if not any(kind in given for kind in owners):
            owner, needed = owners[0].kind, selectors.get(owners[0], ("decoding",))[0]
            raise GenerationConfigError(f"{name} is a setting of {owner}, which is not selected; give {needed}")
    selected = dict[str, DecodingSpec]()
    for kind in given:
        name, off = selectors[kind]
        fields = {field: value for field, value in settings.items() if field in kind.model_fields}
        is_off = type(fields[name]) in (int, float) and fields[name] == off
        if is_off:
            del fields[name]
        method = choose_decoding({"kind": kind.kind} | fields)  # raises for a wrong value, also if it is off
        selected |= {} if is_off else {name: method}
    if len(selected) > 1:
        names = " and ".join(selected)
        raise GenerationConfigError(f"{names} select different decoding methods; give only one of them")
    return next(iter(selected.values()), choose_decoding("greedy"))


def choose_decoding(decoding: str | Tree | DecodingSpec) -> DecodingSpec:
    try:
        return DecodingSpec.choose(decoding)
    except ConfigError as error:
        raise GenerationConfigError(error.message) from None


def read_generation_config(config: Mapping[str, Any], extra_files: Mapping[str, bytes]) -> GenerationConfig:
    """Settings from generation_config.json or, without one, from the checkpoint's config, as in transformers."""
    if (data := extra_files.get("generation_config.json")) is not None:
        config = parse_json(data, Path("generation_config.json"))
    starts = (config.get(key) for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    eos = tuple(dict.fromkeys((*token_ids(config, "eos_token_id"), *token_ids(config, "eot_token_id"))))
    words = config.get("bad_words_ids")
    if isinstance(words, list) and sum(len(word) if isinstance(word, list) else 1 for word in words) > MAX_BAD_IDS:
        raise CheckpointConfigError(f"bad_words_ids has more than {MAX_BAD_IDS:,} token ids")
    bad_words = [valid_ids(word) for word in words if isinstance(word, list)] if isinstance(words, list) else []
    return GenerationConfig(
        decoder_start_token_id=next((start for start in starts if type(start) is int), None),
        eos_token_id=eos,
        forced_bos_token_id=token_ids(config, "forced_bos_token_id"),
        forced_eos_token_id=token_ids(config, "forced_eos_token_id"),
        bad_words_ids=tuple(word for word in dict.fromkeys(bad_words) if word and word not in {(end,) for end in eos}),
    )


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One id or a list of ids as a tuple."""
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    if len(values) > MAX_IDS:
        raise CheckpointConfigError(f"{key} has {len(values):,} token ids, expected at most {MAX_IDS:,}")
    return valid_ids(values)


def valid_ids(values: Sequence[Any]) -> tuple[int, ...]:
    """Leaves out values that are not token ids."""
    return tuple(token for token in values if type(token) is int and 0 <= token < 1 << 31)


# --------------------------------------------------------------------------------------------------------------- steps


class Hypotheses:
    """Unfinished sequences, one per row, with their tokens so far and the decoding state of the model."""

    def __init__(self, model: Model, prompt: Inputs, source: Inputs | Tensor | None, max_new_tokens: int) -> None:
        self.model, self.inputs = model, prompt
        self.state: Any = model.start(source, capacity=prompt.length + max_new_tokens)
        self.tokens = prompt.tokens  # rows×length, padded with −1 on the left
        if prompt.padding_mask is not None:
            self.tokens = prompt.tokens.masked_fill(prompt.padding_mask, -1).gather(
                1, tokens_first(~prompt.padding_mask)
            )

    def logits(self) -> Tensor:
        """The logits of the next token of each row; raises if they are not finite."""
        logits, self.state = self.model.step(self.inputs, self.state)
        return check_next_token_logits(token_at(logits, self.inputs.padding_mask, -1))

    def extend(self, tokens: Tensor, rows: Tensor | None = None) -> None:
        """Appends a token to each row. With `rows`, selects these rows first; a row may be left out or repeated."""
        if rows is not None:
            self.state, self.tokens = self.state.select(rows), self.tokens.index_select(0, rows)
        self.inputs, self.tokens = Inputs(tokens[:, None]), torch.cat((self.tokens, tokens[:, None]), dim=1)


@torch.no_grad()
def generate_token_by_token(
    model: Model,
    prompt: Inputs,
    source: Inputs | None,
    *,
    config: GenerationConfig,
    choose: Callable[[Tensor, list[int]], Tensor],
) -> list[list[int]]:
    """Appends the token that `choose(logits_BV, rows)` returns for each row. Finished rows leave the batch."""
    hypotheses, eos = Hypotheses(model, prompt, source, config.max_new_tokens), frozenset(config.eos_token_id)
    active_rows = list(range(prompt.batch_size))
    output: list[list[int]] = [[] for _ in active_rows]
    for remaining in range(config.max_new_tokens, 0, -1):
        tokens = choose(config.process_logits(hypotheses.logits(), hypotheses.tokens, remaining), active_rows)
        values = tokens.tolist()
        for row, token in zip(active_rows, values, strict=True):
            output[row].append(token)
        unfinished = [i for i, token in enumerate(values) if token not in eos]
        if not unfinished:
            break
        if len(unfinished) < len(active_rows):
            rows = torch.tensor(unfinished, device=tokens.device)
            active_rows = [active_rows[i] for i in unfinished]
            hypotheses.extend(tokens[rows], rows)
        else:
            hypotheses.extend(tokens)
    return output
