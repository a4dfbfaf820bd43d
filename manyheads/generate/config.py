"""The settings of generation: those of a caller on top of those of a checkpoint, as one GenerationConfig."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from manyheads.errors import ConfigError, GenerationConfigError, ManyheadsError
from manyheads.generate import methods, processors  # noqa: F401  # registers every processor and method
from manyheads.generate.decoding import DecodingSpec
from manyheads.generate.logits_processor import LogitsProcessorSpec
from manyheads.spec import MAX_COUNT, Part, Tree, did_you_mean, quote, to_tree

DEFAULT_MAX_NEW_TOKENS = 64
MAX_SEQUENCES, MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_STOP_LENGTH = 256, 100, 16, 1000
MAX_TOKEN_IDS = 1 << 10  # in one setting
TRANSFORMERS_TOP_K = 50  # transformers samples with it unless told otherwise
# the settings that do not depend on the method
COMMON = ("max_new_tokens", "max_length", "n", "seed", "stop", "logprobs", "eos_token_id", "decoder_start_token_id")
ALIASES = {  # names of other libraries
    "num_return_sequences": "n", "stop_strings": "stop", "max_length": "max_new_tokens", "max_tokens": "max_new_tokens",
    "stop_token_ids": "eos_token_id",
}  # fmt: skip


@dataclass(frozen=True)
class GenerationConfig:
    """All settings of generation. A caller's settings override a checkpoint's."""

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    max_new_tokens_given: bool = False  # by the caller: then a text that has no room for them is an error
    max_length: int | None = None  # of the checkpoint: tokens of the prompt and the new ones together
    decoding: DecodingSpec = field(default_factory=lambda: choose_decoding("greedy"))
    processors: tuple[LogitsProcessorSpec, ...] = ()  # in the order in which they are applied
    seed: int = 0  # random seed for sampling
    n: int = 1  # sequences per prompt
    stop: tuple[str, ...] = ()  # strings that end a sequence and are not part of it
    logprobs: int | None = None  # number of most probable tokens to report per step, besides the chosen one
    eos_token_id: tuple[int, ...] = ()
    decoder_start_token_id: int | None = None
    set_by_caller: frozenset[str] = frozenset()  # the names of the settings of the caller
    set_by_checkpoint: frozenset[str] = frozenset()  # and of the checkpoint

    def __post_init__(self) -> None:
        check_integer("max_new_tokens", self.max_new_tokens, 1, MAX_COUNT)
        check_integer("seed", self.seed, 0, (1 << 63) - 1)
        check_integer("n", self.n, 1, MAX_SEQUENCES)
        for name, limit in (("logprobs", MAX_LOGPROBS), ("decoder_start_token_id", MAX_COUNT)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, limit)
        if self.n > 1 and not self.decoding.do_sample and self.n > self.decoding.max_sequences:
            raise GenerationConfigError(
                f"n is {self.n}, but {self.decoding.kind} finds only {self.decoding.max_sequences} per prompt",
                hint="sample with a temperature, or raise num_beams",
            )

    def effective_settings(self) -> Tree:
        """Every setting in effect by name: its value, and whether it is from the caller, the checkpoint or neither."""
        values: Tree = {"decoding": self.decoding.kind} | {name: getattr(self, name) for name in COMMON}
        for part in (self.decoding, *self.processors):
            values |= {name: getattr(part, name) for name in type(part).model_fields}
        origins = dict.fromkeys(self.set_by_checkpoint, "checkpoint") | dict.fromkeys(self.set_by_caller, "caller")
        return {
            name: {"value": value, "from": origins.get(name, "default")}
            for name, value in values.items()
            if value not in (None, ())
        }

    @cached_property
    def eos_set(self) -> frozenset[int]:
        """The eos tokens as a set: each generated token is looked up among up to thousands."""
        return frozenset(self.eos_token_id)

    def without_eos(self, tokens: list[int]) -> list[int]:
        """The tokens before the first eos token."""
        return tokens[: next((i for i, token in enumerate(tokens) if token in self.eos_set), len(tokens))]


def stop_strings(name: str, value: Any, error_type: type[ManyheadsError] = GenerationConfigError) -> tuple[str, ...]:
    """One text, or a list of texts, as a tuple."""
    texts = [value] if isinstance(value, str) else value
    valid = isinstance(texts, list | tuple) and len(texts) <= MAX_STOP_STRINGS
    valid = valid and all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in texts)
    if not valid or "".join(texts).encode(errors="ignore").decode() != "".join(texts):  # half a character
        expected = f"expected up to {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_LENGTH} characters"
        raise error_type(f"{name} is {quote(value)}, {expected}")
    return tuple(texts)


def end_tokens(value: Any) -> tuple[int, ...]:
    """The ids of the tokens that end a sequence: one, or a list."""
    ids = [value] if type(value) is int else value
    if not isinstance(ids, list | tuple) or len(ids) > MAX_TOKEN_IDS:
        raise GenerationConfigError(f"eos_token_id is {quote(value)}, expected up to {MAX_TOKEN_IDS:,} token ids")
    for token in ids:
        check_integer("eos_token_id", token, 0, MAX_COUNT)
    return tuple(ids)


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise GenerationConfigError(f"{name} is {quote(value)}, expected an integer from {low} to {high:,}")


@dataclass(frozen=True)
class CheckpointSettings:
    """What a checkpoint says about generation: special tokens, settings of methods and processors, unsupported ones."""

    settings: Tree = field(default_factory=dict)
    do_sample: bool = False  # whether its default is sampling
    eos_token_id: tuple[int, ...] = ()
    decoder_start_token_id: int | None = None
    max_new_tokens: int | None = None
    max_length: int | None = None  # of the prompt and the new tokens together
    stop: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()  # sentences about settings that are not supported

    def check(self) -> None:
        if self.unsupported:
            raise GenerationConfigError(self.unsupported[0], hint="remove it from generation_config.json to ignore it")


def generation_config(
    base: CheckpointSettings | None = None,
    default_max_new_tokens: int | None = None,
    /,
    *,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    n: int | None = None,
    stop: str | Iterable[str] | None = None,
    logprobs: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    decoder_start_token_id: int | None = None,
    decoding: str | Tree | DecodingSpec | None = None,
    **settings: Any,
) -> GenerationConfig:
    """A GenerationConfig from keyword arguments, on top of a checkpoint's settings.

    `decoding` is a kind of method, or a table with its fields. Without it, other settings, such as num_beams or top_p,
    select a method. The remaining settings are its fields and those of processors. `default_max_new_tokens` is used
    instead of a checkpoint's, as far as the model has positions.
    """
    base = base or CheckpointSettings()
    base.check()
    base, settings = with_do_sample(base, settings)
    check_known(settings)
    method, merged_settings = choose_method(base, settings, decoding)
    limits = (max_new_tokens, default_max_new_tokens, base.max_new_tokens)
    limit = next((value for value in limits if value is not None), None)
    start = base.decoder_start_token_id if decoder_start_token_id is None else decoder_start_token_id
    common_settings = {
        "max_new_tokens": max_new_tokens, "seed": seed, "n": n, "stop": stop, "logprobs": logprobs,
        "eos_token_id": eos_token_id, "decoder_start_token_id": decoder_start_token_id,
        "decoding": decoding or selected_method(settings),
    }  # fmt: skip
    set_by_checkpoint = [name for name, value in vars(base).items() if value]
    set_by_checkpoint += ["decoding"] if type(method) is not default_method() else []
    set_by_checkpoint += (name for name, value in base.settings.items() if getattr(method, name, value) == value)
    return GenerationConfig(
        max_new_tokens=DEFAULT_MAX_NEW_TOKENS if limit is None else limit,
        max_new_tokens_given=max_new_tokens is not None,
        max_length=base.max_length if limit is None else None,
        decoding=method,
        processors=make_processors(method, merged_settings),
        seed=0 if seed is None else seed,
        n=1 if n is None else n,
        stop=base.stop if stop is None else stop_strings("stop", stop),
        logprobs=logprobs,
        eos_token_id=base.eos_token_id if eos_token_id is None else end_tokens(eos_token_id),
        decoder_start_token_id=start,
        set_by_caller=frozenset((*settings, *(name for name, value in common_settings.items() if value is not None))),
        set_by_checkpoint=frozenset(set_by_checkpoint),
    )


# --------------------------------------------------------------------------------------------- settings by their owners


def method_kinds() -> dict[str, type[DecodingSpec]]:
    return DecodingSpec.kinds  # type: ignore[return-value]


def default_method() -> type[DecodingSpec]:
    return method_kinds()[DecodingSpec.default_kind]


def sampling_method() -> type[DecodingSpec]:
    """The method that a setting of a sampling processor selects."""
    return next(kind for kind in method_kinds().values() if kind.do_sample)


def processor_kinds() -> dict[str, type[LogitsProcessorSpec]]:
    return LogitsProcessorSpec.kinds  # type: ignore[return-value]


def fields_of(kinds: Iterable[type[Part]]) -> set[str]:
    return {name for kind in kinds for name in kind.model_fields}


def sampling_settings() -> set[str]:
    return fields_of(kind for kind in processor_kinds().values() if kind.for_sampling)


def selectors() -> dict[str, tuple[type[DecodingSpec], object]]:
    """The methods by the setting that selects them, with the value that does not."""
    # a method that is derived from another does not inherit its selector
    selector_by_method = {kind: vars(kind).get("selected_by") for kind in method_kinds().values()}
    return {selector[0]: (kind, selector[1]) for kind, selector in selector_by_method.items() if selector}


def check_known(settings: Mapping[str, Any]) -> None:
    names = fields_of(method_kinds().values()) | fields_of(processor_kinds().values())
    for name in settings:
        if name not in names:
            hint = f"; use {ALIASES[name]}" if name in ALIASES else did_you_mean(name, names)
            raise GenerationConfigError(f"unknown setting {quote(name)}{hint}")


def with_do_sample(base: CheckpointSettings, settings: Tree) -> tuple[CheckpointSettings, Tree]:
    """Replaces do_sample of transformers: false is temperature 0, true the checkpoint's sampling, or temperature 1."""
    settings = dict(settings)
    match settings.pop("do_sample", None):
        case None:
            return base, settings
        case True if base.settings:
            sampling = {"temperature": 1.0, "top_k": TRANSFORMERS_TOP_K} | base.settings
            return replace(base, do_sample=True, settings=sampling), settings
        case True:
            return base, {"temperature": 1.0} | settings
        case False:
            return base, settings | {"temperature": 0}
        case value:
            raise GenerationConfigError(f"do_sample is {quote(value)}, expected true or false")


def choose_method(
    base: CheckpointSettings, settings: Tree, decoding: str | Tree | DecodingSpec | None
) -> tuple[DecodingSpec, Tree]:
    """The method, and all settings of methods and processors. A caller's settings override a checkpoint's.

    The fields of a method are those of the checkpoint only if its own method is the same, or one that it extends.
    """
    sampling = sampling_settings()
    base_settings = base.settings if base.do_sample else {n: v for n, v in base.settings.items() if n not in sampling}
    base_kind = selected_method(base_settings) or default_method()
    fields: Tree = {}
    if decoding is None:
        kind = selected_method(settings) or base_kind
        check_unselected(settings)
    else:
        method = choose_decoding(decoding)
        kind = type(method)
        fields = {name: value for name, value in to_tree(method).items() if name in method.model_fields_set}
        for name in settings:
            if name in fields or name not in fields_of((kind, *processor_kinds().values())):
                reason = "which it has too" if name in fields else f"which {method.kind} does not use"
                raise GenerationConfigError(f"given both decoding and {name}, {reason}")
            if name in sampling and not method.do_sample:
                raise GenerationConfigError(f"given both decoding and {name}, which {method.kind} does not use")
    inherited_fields = settings_of_kind(kind, base.settings) if issubclass(kind, base_kind) else {}
    fields = inherited_fields | fields | settings_of_kind(kind, settings)
    return choose_decoding({"kind": kind.kind} | fields), base.settings | settings


def selected_method(settings: Tree) -> type[DecodingSpec] | None:
    """The method that settings select: greedy if they turn another one off, None if they say nothing about it."""
    candidates = list[tuple[str, type[DecodingSpec]]]()
    for name, (kind, off) in selectors().items():
        if name in settings:
            is_selected = not is_off(settings[name], off)
            # a wrong value raises, also if the method is off
            choose_decoding({"kind": kind.kind} | settings_of_kind(kind, settings, without="" if is_selected else name))
            candidates.append((name, kind if is_selected else default_method()))
    if is_off(settings.get("temperature"), 0):
        candidates.append(("temperature", default_method()))
    else:
        active = [
            kind for kind in processor_kinds().values() if kind.for_sampling and is_processor_selected(kind, settings)
        ]
        candidates += [(kind.selector()[0], sampling_method()) for kind in active[:1]]
    selecting = [(name, kind) for name, kind in candidates if kind is not default_method()]
    # a method that has the setting of another as a field is the more specific one
    selecting = [
        (name, kind)
        for name, kind in selecting
        if not any(name in other.model_fields and other is not kind for _, other in selecting)
    ]
    if len(selecting) > 1:
        names = " and ".join(name for name, _ in selecting)
        raise GenerationConfigError(f"{names} select different decoding methods; give only one of them")
    return (selecting or candidates)[0][1] if candidates else None


def settings_of_kind(kind: type[Part], settings: Tree, *, without: str = "") -> Tree:
    return {name: value for name, value in settings.items() if name in kind.model_fields and name != without}


def check_unselected(settings: Tree) -> None:
    """Raises if a setting belongs to methods that no setting selects."""
    by_setting = selectors()
    selected_methods = [kind for name, (kind, _) in by_setting.items() if name in settings]
    names = fields_of(selected_methods) | fields_of(processor_kinds().values())
    for name in settings:
        if name not in names:
            owner = next(kind for kind in method_kinds().values() if name in kind.model_fields)
            selector = next((key for key, (kind, _) in by_setting.items() if kind is owner), f"decoding = {owner.kind}")
            raise GenerationConfigError(f"{name} is a setting of {owner.kind}, which is not selected; give {selector}")


def is_off(value: Any, off: object) -> bool:
    """Whether a value turns a method or processor off; false is not 0, and a list is as good as a tuple."""
    value = tuple(value) if isinstance(value, list) else value
    return value == off and isinstance(value, bool) == isinstance(off, bool)


def is_processor_selected(kind: type[LogitsProcessorSpec], settings: Tree) -> bool:
    name, off = kind.selector()
    return name in settings and not is_off(settings[name], off)


def make_processors(method: DecodingSpec, settings: Tree) -> tuple[LogitsProcessorSpec, ...]:
    """The processors that the settings select and the method uses, in their order; a wrong value raises in any case."""
    selected_processors = []
    for kind in processor_kinds().values():
        fields = settings_of_kind(kind, settings)
        if fields and (selector := kind.selector()[0]) not in fields:
            raise GenerationConfigError(f"{next(iter(fields))} is a setting of {kind.kind}, which needs {selector}")
        if is_processor_selected(kind, settings):
            selected_processors.append(choose_processor({"kind": kind.kind} | fields))
            selected_processors[-1].check()
    if len(names := [spec.name for spec in selected_processors if spec.is_grammar]) > 1:
        raise GenerationConfigError(f"given both {names[0]} and {names[1]}; a text follows at most one")
    active_processors = [spec for spec in selected_processors if method.do_sample or not spec.for_sampling]
    return tuple(sorted(active_processors, key=lambda spec: spec.order))


def choose_decoding(decoding: str | Tree | DecodingSpec) -> DecodingSpec:
    try:
        return DecodingSpec.from_config(decoding)
    except ConfigError as error:
        raise GenerationConfigError(error.message, hint=error.hint) from None


def choose_processor(tree: Tree) -> LogitsProcessorSpec:
    values = dict(tree)
    fields = processor_kinds()[tree["kind"]].model_fields
    for name, value in tree.items():
        if type(value) is dict:  # a table of token ids may have integers as keys, which TOML and JSON write as strings
            values[name] = {str(key): inner for key, inner in value.items()}
        elif type(value) is int and name in fields and fields[name].default == ():  # one token id instead of a list
            values[name] = (value,)
    try:
        return LogitsProcessorSpec.from_config(values)
    except ConfigError as error:
        raise GenerationConfigError(error.message) from None
