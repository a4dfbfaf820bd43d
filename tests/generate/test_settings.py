"""The generation settings of a checkpoint: each key of transformers is applied, refused or without effect, and a caller's settings override them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from raising import raises
from scripted import processed
from small_checkpoints import folder_of
from transformers import GenerationConfig as TheirConfig

import manyheads
from manyheads.generate.checkpoint_settings import NO_EFFECT, OTHER_KEYS, TOKENS, UNSUPPORTED, read_checkpoint_settings
from manyheads.generate.config import fields_of, generation_config, method_kinds, processor_kinds


def settings_of(tree):
    return read_checkpoint_settings({}, {"generation_config.json": json.dumps(tree).encode()})


def test_every_key_of_transformers_is_applied_refused_or_has_no_effect():
    owned = fields_of(method_kinds().values()) | fields_of(processor_kinds().values())
    groups = [owned, set(TOKENS), set(OTHER_KEYS), set(UNSUPPORTED), set(NO_EFFECT)]
    for name in vars(TheirConfig()):
        assert sum(name in group for group in groups) == 1, name


def test_the_values_without_effect_are_the_published_defaults():
    """Of transformers before version 5, whose configs write them out."""
    numbers = {name: value for name, value in UNSUPPORTED.items() if type(value) in (int, float)}
    assert {name: numbers[name] for name in ("epsilon_cutoff", "eta_cutoff")} == {"epsilon_cutoff": 0, "eta_cutoff": 0}
    assert {numbers[name] for name in ("encoder_repetition_penalty", "guidance_scale")} == {1}
    assert numbers["encoder_no_repeat_ngram_size"] == 0


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_setting_that_is_not_supported_is_refused_by_name_when_a_text_is_generated(name):
    neutral = settings_of({name: UNSUPPORTED[name]})
    assert generation_config(neutral).decoding.kind == "greedy"
    with raises("generate.config", name):
        generation_config(settings_of({name: 7}))


def test_an_unknown_key_is_refused_by_name():
    with raises("generate.config", "temperatur"):
        generation_config(settings_of({"temperatur": 0.5}))
    assert read_checkpoint_settings({"temperatur": 0.5}, {}).unsupported == (), "a config has other keys too"


class CountedWord(list):
    """A bad word that counts how often it is compared."""

    comparisons = 0
    __hash__ = None

    def __eq__(self, other):
        CountedWord.comparisons += 1
        return list(self) == other


def test_bad_words_lose_the_eos_tokens_and_are_not_compared_with_each():
    words = [CountedWord(word) for word in ([5], [3], [3, 4], [7], [5, 5])]
    config = {"bad_words_ids": words, "eos_token_id": [3, 8, 5], "eot_token_id": 9}
    assert read_checkpoint_settings(config, {}).settings["bad_words_ids"] == [[3, 4], [7], [5, 5]]
    CountedWord.comparisons = 0
    read_checkpoint_settings({"bad_words_ids": words, "eos_token_id": [*range(1024)]}, {})
    assert CountedWord.comparisons <= len(words)


def test_eos_tokens_keep_their_order_and_are_looked_up_in_a_set():
    config = generation_config(eos_token_id=[9, 2, 5])
    assert config.eos_token_id == config.effective_settings()["eos_token_id"]["value"] == (9, 2, 5)
    assert config.eos_set == {9, 2, 5}
    assert isinstance(config.eos_set, frozenset)
    assert config.without_eos([4, 2, 5]) == [4]
    assert replace(config, eos_token_id=(4,)).without_eos([2, 4, 5]) == [2]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", "x"),
        ("eos_token_id", list(range(5000))),
        ("num_beams", 1.5),
        ("num_beams", -2),
        ("top_p", 7),
        ("repetition_penalty", "hot"),
        ("bad_words_ids", [[token] for token in range(100_001)]),
        ("max_length", 0),
        ("stop_strings", 3),
        ("min_length", -1),
    ],
    ids=lambda item: item if isinstance(item, str) else str(item)[:20],  # an id is sent to every worker
)
def test_a_wrong_value_is_an_error_of_the_checkpoint(key, value):
    with raises("checkpoint.config"):
        settings_of({key: value})


def test_the_settings_of_a_checkpoint_are_applied_and_say_where_they_are_from():
    base = settings_of({
        "num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3, "min_length": 5,
        "max_length": 20, "forced_eos_token_id": 2, "eos_token_id": [2, 3], "stop_strings": ["."], "top_p": 0.5,
    })  # fmt: skip
    config = generation_config(base)
    assert (config.decoding.kind, config.decoding.num_beams, config.decoding.length_penalty) == ("beam", 4, 2.0)
    assert config.decoding.early_stopping is True
    assert [item.kind for item in config.processors] == ["no-repeat-ngram", "min-length", "forced-eos"]
    assert (config.eos_token_id, config.max_length, config.stop) == ((2, 3), 20, (".",))
    effective = config.effective_settings()
    assert {name for name, item in effective.items() if item["from"] == "default"} == {"max_new_tokens", "n", "seed"}
    assert {item["from"] for item in effective.values()} == {"checkpoint", "default"}
    assert effective["decoding"] == {"value": "beam", "from": "checkpoint"}
    assert "top_p" not in effective, "without do_sample it has no effect, as in transformers"
    own = generation_config(base, no_repeat_ngram_size=2, num_beams=2, max_new_tokens=7, stop=())
    assert (own.decoding.num_beams, own.decoding.length_penalty, own.max_new_tokens, own.max_length) == (
        2,
        2.0,
        7,
        None,
    )
    assert own.effective_settings()["no_repeat_ngram_size"] == {"value": 2, "from": "caller"}
    assert own.effective_settings()["length_penalty"] == {"value": 2.0, "from": "checkpoint"}
    assert own.effective_settings()["decoding"] == {"value": "beam", "from": "caller"}
    assert own.stop == ()
    assert "no_repeat_ngram_size" not in generation_config(base, no_repeat_ngram_size=0).effective_settings()


def test_a_method_that_is_named_takes_its_settings_from_the_caller_and_from_a_checkpoint_of_the_same_method():
    base = settings_of({"num_beams": 8, "length_penalty": 2.0})
    same = generation_config(base, decoding="beam", early_stopping=True)
    assert (same.decoding.num_beams, same.decoding.length_penalty, same.decoding.early_stopping) == (8, 2.0, True)
    other = generation_config(base, decoding="gnmt-beam", num_beams=3)  # its length penalty is another formula
    assert (other.decoding.num_beams, other.decoding.length_penalty) == (3, 0.6)
    assert other.effective_settings()["num_beams"] == {"value": 3, "from": "caller"}
    assert other.effective_settings()["length_penalty"] == {"value": 0.6, "from": "default"}
    assert generation_config(base, coverage_penalty=0.1).decoding == other.decoding.replace(
        num_beams=4, coverage_penalty=0.1
    )
    for settings in ({"early_stopping": True}, {"top_p": 0.5}, {"penalty_alpha": 0.5}):
        with raises("generate.config", next(iter(settings)), "gnmt-beam"):
            generation_config(base, decoding="gnmt-beam", **settings)
    with raises("generate.config", "num_beams"):
        generation_config(decoding={"kind": "beam", "num_beams": 2}, num_beams=3)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("num_return_sequences", "n"),
        ("stop_strings", "stop"),
        ("max_length", "max_new_tokens"),
        ("stop_token_ids", "eos_token_id"),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(name, other):
    with raises("generate.config", name, f"use {other}"):
        generation_config(**{name: 3})


def test_a_checkpoint_that_samples_does_unless_the_caller_selects_another_method():
    base = settings_of({"do_sample": True, "temperature": 0.6, "top_p": 0.9})
    kinds = {item.kind: item for item in generation_config(base).processors}
    assert generation_config(base).decoding.kind == "sample"
    assert (kinds["temperature"].temperature, kinds["top-p"].top_p, kinds["top-k"].top_k) == (0.6, 0.9, 50)
    assert generation_config(base, temperature=0).decoding.kind == "greedy"
    assert generation_config(base, do_sample=False).decoding.kind == "greedy"
    assert generation_config(base, num_beams=3).decoding.kind == "beam"
    assert not generation_config(base, num_beams=3).processors
    warm = {item.kind: item for item in generation_config(base, temperature=0.9).processors}
    assert (warm["temperature"].temperature, warm["top-p"].top_p) == (0.9, 0.9)
    silent = settings_of({"temperature": 0.6, "top_p": 0.9})
    assert generation_config(silent).decoding.kind == "greedy"
    assert generation_config(silent, do_sample=True).decoding.kind == "sample"


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3},
        {"do_sample": True, "min_p": 0.1, "typical_p": 0.9, "top_k": 0, "min_new_tokens": 3, "suppress_tokens": [4, 5]},
        {"do_sample": True, "no_repeat_ngram_size": 2, "bad_words_ids": [[7], [5, 9]], "sequence_bias": [[[3], 2.0]]},
    ],
    ids=str,
)
def test_the_distribution_that_is_sampled_is_that_of_transformers(settings, tmp_path):
    """The probabilities of the next token after all processors, in transformers' order."""
    folder = folder_of("llama", tmp_path / "llama", tokenizer=False)
    generation = {"eos_token_id": [2, 11], "bos_token_id": 1, "pad_token_id": 60} | settings
    (folder / "generation_config.json").write_text(json.dumps(generation))
    ours = manyheads.load(folder)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 9, 7, 5]])
    options = {"max_new_tokens": 3, "output_scores": True, "return_dict_in_generate": True}
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options).scores[0].softmax(-1)
    own = generation_config(ours.generation_settings, max_new_tokens=3)
    torch.testing.assert_close(processed(own, ours.logits(ids)[:, -1], ids).softmax(-1), expected, rtol=1e-4, atol=1e-6)
    assert own.decoding.kind == "sample"


@pytest.mark.parametrize("stop", [3, {"a": 1}, [3], b"x", "", "a\ud800"])
def test_a_wrong_stop_string_has_a_code(stop):
    with raises("generate.config", "stop"):
        generation_config(stop=stop)


def test_do_sample_is_the_sampling_of_the_checkpoint():
    for own in ({"do_sample": True}, {}):
        base = settings_of({"temperature": 0.6, "top_p": 0.9} | own)
        processors = {item.kind: item for item in generation_config(base, do_sample=True).processors}
        assert (processors["temperature"].temperature, processors["top-k"].top_k, processors["top-p"].top_p) == (
            0.6,
            50,
            0.9,
        )
    assert [item.kind for item in generation_config(do_sample=True).processors] == ["temperature"]
    assert generation_config(base, do_sample=True, temperature=0.3).processors[0].temperature == 0.3


@pytest.mark.parametrize("name", ["base", "default_max_new_tokens"])
def test_an_argument_that_is_no_setting_is_unknown(name):
    with raises("generate.config", name):
        generation_config(**{name: 3})


def test_processors_are_documented_in_the_order_in_which_they_are_applied():
    page = (Path(__file__).parents[2] / "docs" / "generating.md").read_text()
    rows = re.findall(r"^\| (`.+?) \|", page.split("## Logits processors")[1].split("\n## ")[0], re.M)
    groups = [re.findall(r"`(\w+)`", row) for row in rows]
    orders = {kind.selector()[0]: kind.order for kind in processor_kinds().values()}
    assert sorted(name for group in groups for name in group) == sorted(orders)
    for before, after in pairwise(groups):
        assert max(orders[name] for name in before) <= min(orders[name] for name in after)


@pytest.mark.parametrize("forced", [None, 50])
def test_tokens_are_suppressed_after_a_forced_one_as_in_transformers(forced, tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    folder = folder_of("bart", tmp_path / "bart", tokenizer=False)
    settings = {"begin_suppress_tokens": list(range(40)), "forced_bos_token_id": forced, "max_new_tokens": 3}
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder)
    expected = theirs.generate(
        torch.tensor([[5, 9, 7]]), do_sample=False, num_beams=1, forced_eos_token_id=None, **settings
    )
    ours = manyheads.load(folder).generate([5, 9, 7], **settings | {"forced_bos_token_id": forced or []})
    assert ours[:3] == expected[0, 1 : 1 + len(ours)].tolist()
    assert ours[bool(forced)] >= 40
