"""A plan gives the logits of the modules, for every kind that it takes, and a model that it cannot follow has none."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from kinds import choices, decoder, random_model, tokens
from raising import raises
from torch import nn

from manyheads import presets, read, record
from manyheads.inspect.edit import ablate, edit
from manyheads.kernels.plan import NotLoweredError
from manyheads.model import lowering
from manyheads.model.cache import Cache
from manyheads.model.finite import raise_nonfinite
from manyheads.model.lowering import LoweredDecoder, lowered_decoder
from manyheads.model.quantization import is_quantized, quantize_model
from manyheads.parts.feedforward import ACTIVATIONS
from manyheads.parts.inputs import Inputs

WIDE = {"width": 64, "feedforward": {"kind": "mlp", "hidden": 96}}  # rows that are a multiple of 32 long


def compared_steps(model, prompt, steps):
    """The logits of some steps by the modules, and by a plan that continues the same states."""
    lowered = LoweredDecoder(model.decoder, model.head)
    states = [model.start(capacity=32) for _ in range(2)]
    states = [model.step(prompt, state)[1] for state in states]
    outputs = []
    for ids in steps:
        logits, states[0] = model.step(ids, states[0])
        inputs = Inputs.of(ids)
        assert lowered.can_run(inputs, states[1].decoder)
        ours, decoder_state = lowered.step(model.decoder, inputs, states[1].decoder)
        states[1] = replace(states[1], decoder=decoder_state)
        outputs.append((logits, ours))
    return outputs


def check(model, prompt=None):
    """One token, several, and one, after a prompt."""
    vocab = model.spec.vocab
    with torch.no_grad():
        steps = [
            tokens(2, 1, seed=4, vocab=vocab),
            tokens(2, 3, seed=5, vocab=vocab),
            tokens(2, 1, seed=6, vocab=vocab),
        ]
        for logits, ours in compared_steps(model, tokens(2, 5, vocab=vocab) if prompt is None else prompt, steps):
            torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)


def is_lowered(position):
    """Not a bias of the scores, nor a concatenation, after which the head reads a part of a vector."""
    return position["kind"] in ("none", "sinusoidal", "learned", "rope") and position.get("join") != "concat"


LOWERED = [
    *({"norm": choice} for choice in choices("norm")),
    *({"residual": choice} for choice in choices("residual")),
    *({"residual": choice, "norm": {"kind": "rms"}} for choice in choices("residual")),
    *({"feedforward": {"kind": kind, "activation": name}} for kind in ("mlp", "gated") for name in ACTIVATIONS),
    *({"feedforward": choice} for choice in choices("feedforward")),
    *({"attention": choice} for choice in choices("attention") if choice["kind"] == "heads"),
    *({"position": choice} for choice in choices("position") if is_lowered(choice)),
    {"core": {"kind": "dot", "temperature": 2.0}},
    {"mask": {"window": 3}},
    {"embed": {"kind": "tokens", "size": 12, "scale": True}, "head": {"kind": "untied", "bias": True}},
    {
        "pattern": [
            {"attention": {"kv_heads": 1}},
            {"mask": {"window": 2}, "position": {"kind": "rope", "fraction": 0.5}},
        ]
    },
]


def spec_of(changes):
    spec = decoder(**{name: value for name, value in changes.items() if name != "head"})
    return spec.replace(head=changes["head"]) if "head" in changes else spec


@pytest.mark.parametrize("changes", LOWERED, ids=lambda changes: "-".join(map(str, changes.values())))
def test_a_plan_gives_the_logits_of_the_modules(changes):
    check(random_model(spec_of(changes), torch.float32))


SMALL = ["decoder.layers=2", "decoder.width=64", "decoder.attention.heads=4", "vocab=23"]
DECODERS = [name for name in presets.names() if (spec := read(name)).decoder and not spec.encoder]


@pytest.mark.parametrize("name", DECODERS)
def test_every_preset_that_is_a_decoder_has_a_plan_with_its_logits(name):
    spec = read(name)
    kv_heads = getattr(spec.decoder.attention, "kv_heads", None)
    changes = [] if kv_heads is None else [f"decoder.attention.kv_heads={1 if kv_heads == 1 else 2}"]
    if getattr(spec.decoder.attention, "size", None) is not None:
        changes.append("decoder.attention.size=16")
    if spec.decoder.pattern:
        changes.append(f"decoder.layers={len(spec.decoder.pattern)}")
    model = random_model(read(name, *SMALL, *changes), torch.float32)
    check(model)


def quantized(weights="int8", **changes):
    model = random_model(decoder(**WIDE | changes), torch.float32)
    quantize_model(model, weights)
    return model


def after_a_prompt(model):
    """The state after a prompt of five tokens, and the logits of one more."""
    _, state = model.step(tokens(1, 5), model.start(capacity=9))
    return state, model.step(tokens(1, 1), state)[0]


@pytest.mark.parametrize("weights", ["int8", "int4"])
@torch.no_grad()
def test_a_quantized_model_decodes_by_its_plan_alike(weights, monkeypatch):
    """Up to the rounding of activations to 8 bits, where a small difference may become one of a step."""
    model, prompt = quantized(weights, position="rope"), tokens(2, 5)
    logits, state = model.step(tokens(2, 1), model.step(prompt, model.start(capacity=9))[1])
    assert lowered_decoder(model.decoder, model.head) is not None
    monkeypatch.setattr(lowering, "MAX_LENGTH", 0)
    expected, _ = model.step(tokens(2, 1), model.step(prompt, model.start(capacity=9))[1])
    assert (logits - expected).abs().max() < 0.02 * expected.abs().max()
    assert state.decoder.length == 6


@torch.no_grad()
def test_a_step_gives_a_sequence_the_same_bits_beside_any_others_and_with_any_number_of_threads():
    """The prompt is read once for both: torch's products of many vectors may sum in another order in a larger batch."""
    model, new = quantized(position="rope"), tokens(5, 3, seed=8)
    _, prompted = model.step(tokens(5, 4), model.start(capacity=16))

    def run(rows):
        state, outputs = prompted.select(torch.arange(5)[rows]), []
        for ids in new[rows].split(1, dim=1):
            logits, state = model.step(ids, state)
            outputs.append(logits)
        return torch.cat(outputs, dim=1)

    alone = torch.cat([run(slice(i, i + 1)) for i in range(5)])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(slice(None)), alone)
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def test_padding_on_the_left_is_ignored():
    model = random_model(decoder(position="rope"), torch.float32)
    mask = torch.tensor([[True, True, False, False, False], [False] * 5])
    check(model, Inputs(tokens(2, 5), padding_mask=mask))


@torch.no_grad()
def test_an_earlier_state_is_continued_again_and_rows_are_selected():
    model = quantized(position="rope")
    _, state = model.step(tokens(2, 5), model.start(capacity=9))
    first, later = model.step(tokens(2, 1), state)
    model.step(tokens(2, 1, seed=9), state)
    assert torch.equal(model.step(tokens(2, 1), state)[0], first)
    swapped, _ = model.step(tokens(2, 1).flip(0), state.select(torch.tensor([1, 0])))
    assert torch.equal(swapped.flip(0), first)
    again, _ = model.step(tokens(2, 1), later.truncate(torch.tensor([5, 5])))
    assert torch.equal(again, first)


@torch.no_grad()
def test_a_recorded_or_edited_model_runs_as_its_modules_do():
    model = quantized(position="rope")
    state, plain = after_a_prompt(model)
    with record(model) as tape:
        recorded, _ = model.step(tokens(1, 1), state)
    assert len(tape) == 2
    torch.testing.assert_close(recorded, plain, rtol=0.02, atol=0.1)
    with edit(model, ablate("decoder.layers.0.attention", head=0)):
        edited, _ = model.step(tokens(1, 1), state)
    assert not torch.allclose(edited, plain, atol=0.1)
    assert torch.equal(model.step(tokens(1, 1), state)[0], plain)


@torch.no_grad()
def test_a_weight_that_is_replaced_is_in_the_next_step():
    model = quantized(position="rope")
    state, before = after_a_prompt(model)
    norm = model.decoder.norm
    norm.weight = nn.Parameter(2 * norm.weight)
    norm.bias = nn.Parameter(2 * norm.bias)
    replaced, _ = model.step(tokens(1, 1), state)
    assert not torch.equal(replaced, before)
    norm.weight.data = norm.weight.data / 2
    norm.bias.data = norm.bias.data / 2
    assert torch.equal(model.step(tokens(1, 1), state)[0], before)


@torch.no_grad()
def test_a_module_that_is_replaced_is_in_the_next_step():
    model = quantized(position="rope")
    state, before = after_a_prompt(model)
    model.decoder.layers[1].feedforward.down = Doubled(96, 64)
    assert lowered_decoder(model.decoder, model.head) is None, "its forward is not known"
    assert not torch.equal(model.step(tokens(1, 1), state)[0], before)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@torch.no_grad()
def test_values_that_are_not_finite_stay_so_and_their_first_layer_is_found():
    model = quantized(position="rope")
    _, state = model.step(tokens(1, 5), model.start(capacity=9))
    model.decoder.norm.bias[3] = torch.nan
    assert model.step(tokens(1, 1), state)[0].isnan().all()
    model.decoder.norm.bias[3] = 0.0
    model.decoder.layers[0].residual.norms[0].weight[0] = torch.inf
    assert not model.step(tokens(1, 1), state)[0].isfinite().any()
    with raises("model.non-finite", "decoder.layers.0.residual.norms.0"):
        raise_nonfinite(model, lambda: model.step(tokens(1, 1), state))


@torch.no_grad()
def test_a_plan_does_not_depend_on_the_default_dtype():
    model = quantized(position="rope")
    state, before = after_a_prompt(model)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(model.step(tokens(1, 1), state)[0], before)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_quantized_model_has_one_dtype_and_can_be_copied():
    model = quantized(position="rope")
    with raises("model.unsupported", "float32"):
        model.double()
    for other in (model.to("cpu"), model.float(), copy.deepcopy(model)):
        assert is_quantized(other)
        assert torch.equal(other(tokens(1, 5)), model(tokens(1, 5)))


@torch.no_grad()
def test_a_model_that_is_no_longer_used_is_freed():
    model = quantized()
    model.step(tokens(1, 1), model.start(capacity=4))
    assert lowered_decoder(model.decoder, model.head) is not None
    reference = weakref.ref(model.decoder)
    del model
    gc.collect()
    assert reference() is None


def test_steps_with_gradients_in_training_or_without_a_capacity_run_as_the_modules_do():
    model = quantized(position="rope")
    _, state = model.step(tokens(1, 5), model.start(capacity=9))
    assert lowered_decoder(model.decoder, model.head) is None
    with torch.no_grad():
        lowered = lowered_decoder(model.decoder, model.head)
        growing = replace(state.decoder, caches=tuple(Cache(cache.key_value) for cache in state.decoder.caches))
        assert lowered.can_run(Inputs.of(tokens(1, 1)), state.decoder)
        assert not lowered.can_run(Inputs.of(tokens(1, 1)), growing)
        assert not lowered.can_run(Inputs.of(tokens(1, 9)), state.decoder)
        assert lowered_decoder(model.train().decoder, model.head) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"core": {"kind": "additive"}},
        {"core": {"kind": "dot", "softcap": 3.0}},
        {"position": {"kind": "alibi"}},
        {"position": {"kind": "clipped", "clip": 3}},
        {"attention": {"kind": "narrow"}},
        {"residual": {"kind": "parallel"}, "norm": {"kind": "none"}},
        {"position": {"kind": "sinusoidal", "join": "concat"}},
    ],
    ids=str,
)
def test_a_model_with_another_part_runs_as_its_modules_do(changes):
    model = random_model(decoder(**changes), torch.float32)
    with pytest.raises(NotLoweredError):
        LoweredDecoder(model.decoder, model.head)
    quantize_model(model, "int8")
    with torch.no_grad():
        assert model.step(tokens(2, 1), model.start(capacity=4))[0].isfinite().all()
