"""Laws of every decoding method and every processor, also those not yet written: batch = single, cached = uncached = one beam, sampled = computed frequencies."""

from __future__ import annotations

import pytest
import torch
from kinds import VOCAB, choices, decoder, fits, kind_id, ngram, pair, random_model, recurrent
from raising import raises
from scripted import Scripted, chi2_tail, frequencies, processed
from tokenizers import Tokenizer, decoders, models

import manyheads
from manyheads import Checkpoint, presets
from manyheads.generate.config import CheckpointSettings, generation_config, method_kinds, processor_kinds
from manyheads.spec import to_tree

METHODS = {
    "greedy": {},
    "sample": {"temperature": 1.3, "seed": 2},
    "beam": {"num_beams": 3},
    "gnmt-beam": {"decoding": "gnmt-beam"},
    "diverse-beam": {"num_beams": 4, "num_beam_groups": 2},
    "contrastive": {"penalty_alpha": 0.4, "top_k": 3},
    "prompt-lookup": {"prompt_lookup_num_tokens": 3},
}
PROCESSORS = {
    "sequence-bias": {"sequence_bias": [[[4], 2.5], [[7, 9], -1.5]]},
    "logit-bias": {"logit_bias": {"3": 2.0, "9": -3.0}},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "no-repeat-ngram": {"no_repeat_ngram_size": 2},
    "bad-words": {"bad_words_ids": [[5], [9, 4], [3, 3]]},
    "min-new-tokens": {"min_new_tokens": 4},
    "min-length": {"min_length": 7},
    "forced-bos": {"forced_bos_token_id": [9]},
    "forced-eos": {"forced_eos_token_id": [2]},
    "suppress-tokens": {"suppress_tokens": [3, 4, 8]},
    "begin-suppress-tokens": {"begin_suppress_tokens": [3, 4, 8]},
    "forced-prefix": {"forced_prefix_ids": [8, 3]},
    "forced-prefix-text": {"forced_prefix": "cab"},
    "json-schema": {"json_schema": {"type": "string", "pattern": "^[a-d]*$"}},
    "regex": {"regex": "[a-f]{2,5}(ab|g)*"},
    "temperature": {"temperature": 2.0},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.2},
    "typical": {"typical_p": 0.6},
    "renormalize": {"renormalize_logits": True},
}
SHAPES = {"decoder": decoder(position="rope"), "pair": pair(), "recurrent": recurrent(), "ngram": ngram()}
UNTIED = {"head": {"kind": "untied"}, "init": {"kind": "normal", "std": 1.0}}  # a tied head tends to repeat its input
EOS = (2, 6, 10)
PROMPTS = [[6, 7, 8, 9, 10, 11], [5], [9, 4, 9], [3, 3], [12, 11, 10, 9, 8]]


def own_kinds(kinds):
    return {kind for kind, spec in kinds.items() if spec.__module__.startswith("manyheads.")}


def test_every_method_and_every_processor_has_settings_for_these_laws():
    assert set(METHODS) == own_kinds(method_kinds())
    assert set(PROCESSORS) == own_kinds(processor_kinds())
    for kind, settings in METHODS.items():
        assert generation_config(**settings).decoding.kind == kind
    for kind, settings in PROCESSORS.items():
        assert kind in [item.kind for item in generation_config(**{"do_sample": True} | settings).processors]


def letters():
    """A tokenizer of one character per token: three that end a text, letters, and a quotation mark."""
    names = [f"<{i}>" if i in EOS else chr(ord("a") + i - 3) for i in range(VOCAB)]
    names[0], names[1], names[2] = '"', " ", "<2>"
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def checkpoint_of(spec, seed=1):
    tree = to_tree(spec) | UNTIED
    checkpoint = Checkpoint(random_model(manyheads.read_model(tree), seed=seed), letters())
    base = CheckpointSettings(eos_token_id=EOS, decoder_start_token_id=1)
    checkpoint.__dict__["generation_settings"] = base
    return checkpoint


CHECKPOINTS = {name: checkpoint_of(spec) for name, spec in SHAPES.items()}
UNSUPPORTED = {
    ("contrastive", "recurrent"),
    ("contrastive", "ngram"),
    ("prompt-lookup", "recurrent"),
    ("prompt-lookup", "ngram"),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", METHODS)
def test_a_batch_gives_what_each_text_gives_alone_with_every_method(kind, name):
    same = {"max_new_tokens": 9, "details": True} | METHODS[kind]
    if (kind, name) in UNSUPPORTED:  # no cache, or no hidden states
        with raises("model.unsupported"):
            CHECKPOINTS[name].generate(PROMPTS, **same)
        return
    together = CHECKPOINTS[name].generate(PROMPTS, **same)
    alone = [CHECKPOINTS[name].generate(ids, **same) for ids in PROMPTS]
    assert [(item.token_ids, item.finish_reason) for item in together] == [
        (result.token_ids, result.finish_reason) for result in alone
    ]
    assert name != "decoder" or len({len(item.token_ids) for item in together}) > 1, "some end before others"


@pytest.mark.parametrize("method", ["sample", "beam"])
@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_batch_gives_what_each_text_gives_alone_with_every_processor(kind, method):
    if method == "beam" and processor_kinds()[kind].for_sampling:
        method = "greedy"
    checkpoint = CHECKPOINTS["decoder"]
    same = {"max_new_tokens": 9} | METHODS[method] | PROCESSORS[kind]
    together = checkpoint.generate(PROMPTS, **same)
    assert together == [checkpoint.generate(ids, **same) for ids in PROMPTS]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", METHODS)
def test_every_method_generates_a_forced_prefix_of_ids_or_of_text(kind, name):
    checkpoint, same = CHECKPOINTS[name], {"max_new_tokens": 7} | METHODS[kind]
    if (kind, name) in UNSUPPORTED:
        with raises("model.unsupported"):
            checkpoint.generate(PROMPTS, forced_prefix_ids=[5, 3, 4], **same)
        return
    ids = checkpoint.generate(PROMPTS, forced_prefix_ids=[5, 3, 4], **same)
    assert ids == checkpoint.generate(PROMPTS, forced_prefix="cab", **same)
    assert [row[:3] for row in ids] == [[5, 3, 4]] * len(PROMPTS)
    if kind == "greedy" and name == "decoder":
        rest = [checkpoint.generate([*row, 5, 3, 4], max_new_tokens=4) for row in PROMPTS]
        assert ids == [[5, 3, 4, *row] for row in rest]


# ---------------------------------------------------------------------------------------- cached = uncached = one beam


def greedy_without_a_cache(model, row, count, eos):
    """argmax of one forward pass over the whole text per token."""
    has_source, tokens = model.spec.has_source, []
    for _ in range(count):
        with torch.no_grad():
            logits = (
                model(torch.tensor([[1, *tokens]]), torch.tensor([row]))
                if has_source
                else model(torch.tensor([[*row, *tokens]]))
            )
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] in eos:
            break
    return [token for token in tokens if token not in eos]


def check_alike(checkpoint, rows=PROMPTS[:3]):
    for row in rows:
        expected = greedy_without_a_cache(checkpoint.model, row, 6, EOS)
        same = {"max_new_tokens": 6, "details": True}
        assert checkpoint.generate(row, **same).token_ids == expected
        for kind in ("beam", "gnmt-beam"):
            assert checkpoint.generate(row, decoding={"kind": kind, "num_beams": 1}, **same).token_ids == expected


def shrunk(tree):
    """A preset with small layers, and all else as published."""
    for stack in ("encoder", "decoder"):
        if stack in tree:
            attention = tree[stack]["attention"]
            kv_heads = {"kv_heads": 1} if attention.get("kv_heads") not in (None, attention["heads"]) else {}
            tree[stack] = tree[stack] | {"layers": 2, "width": 32}
            tree[stack]["attention"] = {k: v for k, v in attention.items() if k not in ("size", "kv_heads")}
            tree[stack]["attention"] |= {"heads": 2} | kv_heads
            tree[stack]["feedforward"] = tree[stack]["feedforward"] | {"hidden": 24}
    if "recurrent" in tree:
        tree["recurrent"] |= {"width": 16}
    tree.pop("source_vocab", None)
    return tree | {"vocab": VOCAB} | UNTIED


def generates(spec):
    reads = {stack.embed.reads for stack in (spec.encoder, spec.decoder) if stack}
    return spec.head.per_token and "patches" not in reads and bool(spec.decoder or spec.recurrent)


GENERATING = [name for name in presets.names() if generates(manyheads.read(name))]


@pytest.mark.parametrize("name", GENERATING)
def test_cached_uncached_and_one_beam_are_alike_for_every_preset(name):
    check_alike(checkpoint_of(manyheads.read_model(shrunk(to_tree(manyheads.read(name))))))


PARTS = [
    {slot: choice}
    for slot in ("position", "core", "attention", "feedforward", "residual", "norm")
    for choice in choices(slot)
    if slot != "core" or fits({"kind": "none"}, choice)
]


# without those whose angles depend on the final length, which a forward pass over a part of the text does not know
COMPARABLE = [changes for changes in PARTS if not decoder(**changes).decoder.position.needs_final_length]


@pytest.mark.parametrize("changes", COMPARABLE, ids=lambda changes: kind_id(next(iter(changes.values()))))
@pytest.mark.filterwarnings("ignore:the text is longer than")
def test_cached_uncached_and_one_beam_are_alike_for_every_kind(changes):
    check_alike(checkpoint_of(decoder(**changes)), PROMPTS[:1])


# --------------------------------------------------------------------------------------------- sampled frequencies


@pytest.mark.parametrize("kind", PROCESSORS)
def test_sampled_frequencies_are_the_processed_distribution_with_every_processor(kind):
    """Chi-square of 2,000 samples against softmax of the processed logits, p > 10⁻⁶."""
    count, rng = 2000, torch.Generator().manual_seed(5)
    model = Scripted((torch.randn(VOCAB, generator=rng) * 1.5).softmax(-1)[None].tolist())
    config = generation_config(
        CheckpointSettings(eos_token_id=EOS), max_new_tokens=1, **{"temperature": 1.0} | PROCESSORS[kind]
    )
    expected = processed(config, model.steps, torch.tensor([[0]]), letters()).softmax(-1)[0].double()
    sampled = frequencies(model, config, count, VOCAB, letters()).double()
    possible = expected > 0
    assert (sampled[~possible] == 0).all()
    chi = count * ((sampled - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert chi2_tail(chi, int(possible.sum()) - 1) > 1e-6
