"""Reads the generation settings of a checkpoint: each key is applied, refused by name, or known to have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyheads.errors import CheckpointConfigError, GenerationConfigError
from manyheads.files.read import parse_json
from manyheads.generate.config import (
    MAX_TOKEN_IDS,
    TRANSFORMERS_TOP_K,
    CheckpointSettings,
    choose_method,
    fields_of,
    make_processors,
    method_kinds,
    processor_kinds,
    stop_strings,
)
from manyheads.spec import MAX_COUNT, quote

FILE = "generation_config.json"
MAX_BAD_IDS = 1 << 14  # in all bad words

# keys handled outside methods and processors
TOKENS = ("eos_token_id", "eot_token_id", "decoder_start_token_id", "bos_token_id", "pad_token_id")
OTHER_KEYS = ("max_new_tokens", "max_length", "do_sample", "stop_strings")
# unsupported keys of transformers that would change the output, and the value at which each has no effect
UNSUPPORTED: dict[str, Any] = {
    "assistant_early_exit": None,
    "constraints": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "num_return_sequences": 1,
    "token_healing": False,
    "top_h": None,
    "watermarking_config": None,
}
# keys of transformers without an effect on the output here: how it computes and what it returns
NO_EFFECT = frozenset((
    "_from_model_config", "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind",
    "cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile",
    "is_assistant", "low_memory", "max_cache_len", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "prefill_chunk_size",
    "remove_invalid_values",  # logits that are NaN or infinite are an error here
    "return_dict_in_generate", "speculation_type", "target_lookbehind", "transformers_version", "use_cache", "use_mtp",
))  # fmt: skip


def read_checkpoint_settings(config: Mapping[str, Any], extra_files: Mapping[str, bytes]) -> CheckpointSettings:
    """The settings in generation_config.json or, without one, in the checkpoint's config, as in transformers."""
    data = extra_files.get(FILE)
    if data is not None:
        config = parse_json(data, Path(FILE))
    values = {name: value for name, value in config.items() if value is not None}
    processor_settings = fields_of(kind for kind in processor_kinds().values() if not kind.is_grammar)
    setting_names = fields_of(method_kinds().values()) | processor_settings
    unsupported = [
        f"{FILE if data else 'config.json'} sets {quote(name)}, which is not supported"
        for name in values
        if name in UNSUPPORTED and values[name] != UNSUPPORTED[name]
    ]
    if data is not None:
        known_names = {*setting_names, *TOKENS, *OTHER_KEYS, *UNSUPPORTED, *NO_EFFECT}
        unsupported += [f"{FILE} has the unknown key {quote(name)}" for name in values if name not in known_names]
    eos = (*token_ids(values, "eos_token_id"), *token_ids(values, "eot_token_id"))
    settings = {name: value for name, value in values.items() if name in setting_names}
    for name in ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        if name in settings:
            settings[name] = token_ids(settings, name)
    if words := settings.pop("bad_words_ids", None):
        check_bad_words(words)
        eos_set = frozenset(eos)  # both may be thousands
        settings["bad_words_ids"] = [word for word in words if not is_eos_alone(word, eos_set)]
    do_sample = values.get("do_sample", False)
    if type(do_sample) is not bool:
        raise CheckpointConfigError(f"do_sample is {quote(do_sample)}, expected true or false")
    if do_sample:
        settings = {"temperature": 1.0, "top_k": TRANSFORMERS_TOP_K} | settings
    starts = (values.get(key) for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    checkpoint_settings = CheckpointSettings(
        settings=settings,
        do_sample=do_sample,
        eos_token_id=eos,
        decoder_start_token_id=next((start for start in starts if type(start) is int), None),
        max_new_tokens=count_of(values, "max_new_tokens"),
        max_length=count_of(values, "max_length"),
        stop=stop_strings("stop_strings", values.get("stop_strings", []), CheckpointConfigError),
        unsupported=tuple(unsupported),
    )
    check_values(checkpoint_settings)
    return checkpoint_settings


def token_ids(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """One id, or a list of ids, as a tuple."""
    value = values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_TOKEN_IDS or not all(type(token) is int for token in ids):
        raise CheckpointConfigError(f"{name} is {quote(value)}, expected up to {MAX_TOKEN_IDS:,} token ids")
    return tuple(token for token in ids if 0 <= token < 1 << 31)  # no vocabulary has others, and −1 often means none


def is_eos_alone(word: Any, eos: frozenset[int]) -> bool:
    match word:
        case [int(token) | float(token)]:
            return token in eos
    return False


def check_bad_words(words: Any) -> None:
    if not isinstance(words, list) or sum(len(word) if isinstance(word, list) else 1 for word in words) > MAX_BAD_IDS:
        raise CheckpointConfigError(
            f"bad_words_ids is {quote(words)}, expected lists of {MAX_BAD_IDS:,} token ids in all"
        )


def count_of(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is not None and (type(value) is not int or not 1 <= value <= MAX_COUNT):
        raise CheckpointConfigError(f"{name} is {quote(value)}, expected an integer from 1 to {MAX_COUNT:,}")
    return value


def check_values(settings: CheckpointSettings) -> None:
    """Raises for a value that no method or processor accepts."""
    try:
        make_processors(*choose_method(settings, {}, None))
    except GenerationConfigError as error:
        raise CheckpointConfigError(f"generation settings: {error}") from None
