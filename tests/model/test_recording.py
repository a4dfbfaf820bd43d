"""Recording: a recorded run is the fast run, bit for bit, and its weights are those that the run used."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import kinds
import pytest
import torch
from kinds import LENGTH, choices, kind_id, random_model, tokens
from raising import raises

from manyheads import build, read, record
from manyheads.parts.core import check_rows

TWO_STACKS = ("pair", "recurrent")
CHANGES = [
    {slot: choice} for slot in ("core", "position", "attention", "feedforward", "residual", "norm")
    for choice in choices(slot)
]  # fmt: skip


def change_id(change):
    return "-".join(f"{slot}-{kind_id(choice)}" for slot, choice in change.items())


def inputs_for(shape):
    return (tokens(), tokens(seed=4)) if shape in TWO_STACKS else (tokens(),)


def run(model, inputs):
    """The output, and the random state after it, which dropout changes."""
    torch.manual_seed(0)
    return model(*inputs), torch.get_rng_state()


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("shape", ["decoder", "encoder", "pair", "recurrent", "ngram"])
def test_a_recorded_run_gives_the_same_bits(shape, training):
    model, inputs = random_model(getattr(kinds, shape)()).train(training), inputs_for(shape)
    plain, state = run(model, inputs)
    with record(model) as tape:
        recorded, recorded_state = run(model, inputs)
    assert torch.equal(recorded, plain)
    assert torch.equal(recorded_state, state)
    count = len(tape)
    assert torch.equal(run(model, inputs)[0], plain)
    assert len(tape) == count, "and nothing after the recording"


@pytest.mark.parametrize("change", CHANGES, ids=change_id)
def test_a_recorded_run_gives_the_same_bits_for_every_kind(change):
    model, ids = random_model(kinds.encoder(**change)), tokens()
    for training in (False, True):
        model.train(training)
        plain, _ = run(model, [ids])
        with record(model) as tape:
            assert torch.equal(run(model, [ids])[0], plain)
    with torch.no_grad(), record(model.eval()) as tape:
        model(ids)
    assert max(tape.verify().values()) < 1e-10, "weights @ v is the recorded output"


@pytest.mark.parametrize("shape", ["decoder", "encoder", "pair", "recurrent"])
def test_names_are_those_of_the_modules(shape):
    model = random_model(getattr(kinds, shape)())
    with torch.no_grad(), record(model) as tape:
        model(*inputs_for(shape))
    expected = {
        "decoder": ["decoder.layers.0.attention", "decoder.layers.1.attention"],
        "encoder": ["encoder.layers.0.attention", "encoder.layers.1.attention"],
        "pair": [
            *(f"encoder.layers.{i}.attention" for i in (0, 1)),
            *(f"decoder.layers.{i}.{part}" for i in (0, 1) for part in ("attention", "cross")),
        ],
        "recurrent": ["core"],
    }
    assert tape.names() == expected[shape]
    assert len(tape) == (LENGTH if shape == "recurrent" else len(tape.names()))
    for name in tape.names():
        check_rows(tape.weights(name))
        assert tape.weights(name).shape[2] == LENGTH
    modules = dict(model.named_modules())
    for name, output in tape.activations().items():
        assert name in modules
        assert output.shape[:2] == (2, LENGTH)
    for attention in tape:
        visible, weights = attention.visible(), attention.weights()
        assert visible is None or (weights[~visible.expand_as(weights)] == 0).all()


def test_activations_are_what_the_modules_return():
    model, ids = random_model(kinds.decoder(residual="pre")), tokens()
    with torch.no_grad(), record(model) as tape:
        logits = model(ids)
    x = tape.activations()
    for i in (0, 1):
        before = x["decoder.embed"] if i == 0 else x["decoder.layers.0"]
        added = x[f"decoder.layers.{i}.attention"] + x[f"decoder.layers.{i}.feedforward"]
        torch.testing.assert_close(before + added, x[f"decoder.layers.{i}"])
    assert torch.equal(model.decoder.norm(x["decoder.layers.1"]), x["decoder.norm"])
    assert x["head"] is logits


@torch.no_grad()
@pytest.mark.parametrize("change", [{"core": choice} for choice in choices("core")], ids=change_id)
@pytest.mark.parametrize("attention", [{"kind": "heads", "heads": 4}, {"kind": "heads", "heads": 4, "kv_heads": 2}])
def test_part_of_the_weights_is_a_part_of_the_matrix(change, attention):
    if change["core"].get("heads"):
        attention = attention | {"heads": 2, "kv_heads": None}
    for position in ("rope", {"kind": "bucketed", "buckets": 8, "max_distance": 6}):
        if not kinds.fits(position if isinstance(position, dict) else {"kind": position}, change["core"]):
            continue
        model = random_model(kinds.decoder(attention=attention, position=position, **change)).eval()
        with record(model) as tape:
            model(tokens())
        name = tape.names()[1]
        whole = tape.weights(name)
        for head in range(whole.shape[1]):
            torch.testing.assert_close(tape.weights(name, head), whole[:, head], rtol=0, atol=1e-12)
        part = tape.weights(name, slice(1, 2), slice(3, 7), slice(0, 5))
        torch.testing.assert_close(part, whole[:, 1:2, 3:7, :5], rtol=0, atol=1e-12)
        torch.testing.assert_close(tape.weights(name, -1, -1, -1), whole[:, -1, -1, -1], rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_steps_of_a_generation_are_the_rows_of_one_matrix():
    model, ids = random_model(kinds.decoder()), tokens()
    with record(model) as whole:
        model(ids)
    with record(model) as steps:
        state = model.start()
        for i in range(LENGTH):
            _, state = model.step(ids[:, i : i + 1], state)
    for name in whole.names():
        torch.testing.assert_close(steps.weights(name), whole.weights(name))
        torch.testing.assert_close(steps.weights(name, 1, slice(2, 4), 0), whole.weights(name, 1, slice(2, 4), 0))
    for name, expected in whole.activations().items():
        torch.testing.assert_close(steps.activations()[name], expected)


@torch.no_grad()
def test_layers_that_share_weights_have_names_of_their_own():
    changes = (
        "encoder.layers=4",
        "encoder.layer_groups=2",
        "encoder.width=16",
        "encoder.attention.heads=2",
        "vocab=23",
    )
    model = build(read("albert-base-v2", *changes)).eval()
    with record(model) as tape:
        model(tokens())
        model(tokens(seed=5))
    assert tape.names() == [f"encoder.layers.{i}.attention" for i in range(4)]
    assert all(len(tape.calls(name)) == 2 for name in tape.names())
    first = [tape.outputs[f"encoder.layers.{i}"][0] for i in range(4)]
    x = tape.outputs["encoder.embed"][0]
    with record(model) as again:
        model(tokens())
    assert all(torch.equal(again.activations()[f"encoder.layers.{i}"], tensor) for i, tensor in enumerate(first))
    assert not any(torch.equal(x, tensor) for tensor in first)


@torch.no_grad()
def test_verify_notices_an_output_that_the_weights_do_not_give():
    model = random_model(kinds.decoder())
    core = model.decoder.layers[1].attention.core
    plain = type(core).forward
    core.forward = lambda *args, **kwargs: plain(core, *args, **kwargs) * 1.5
    with record(model) as tape:
        model(tokens())
    differences = tape.verify()
    assert differences["decoder.layers.0.attention"] < 1e-12
    assert differences["decoder.layers.1.attention"] > 1e-3


def test_what_was_not_recorded_is_an_error():
    model = random_model(kinds.decoder(core={"kind": "dot", "dropout": 0.5})).eval()
    with record(model, activations=False) as tape:
        model(tokens())
    assert not tape.activations()
    with raises("usage.argument", "decoder.layers.0.attention"):
        tape.weights("decoder.layer.0.attention")
    with raises("usage.argument"):
        tape.verify()
    with record(model.train()) as tape:
        model(tokens())
    with raises("model.unsupported", "eval"):
        tape.verify()


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("axis", ["head", "rows", "columns"])
def test_a_part_of_the_weights_that_does_not_exist_is_an_error(axis, calls):
    model = random_model(kinds.decoder()).eval()
    with torch.no_grad(), record(model) as tape:
        _, state = model.step(tokens(1, 4), model.start(capacity=8))
        if calls == 2:
            model.step(tokens(1, 4), state)
    name = tape.names()[0]
    size = tape.weights(name).shape[["head", "rows", "columns"].index(axis) + 1]
    for wrong in (size, 99, -size - 1):
        with raises("usage.argument", wrong, size - 1):
            tape.weights(name, **{axis: wrong})
        with raises("usage.argument", wrong):
            tape[0].weights(**{axis: wrong})
    for wrong in (1.0, "1", True, [0], slice(0, None, 2), slice(None, None, -1), slice(0.5, 2), slice(0, "2")):
        with raises("usage.argument"):
            tape.weights(name, **{axis: wrong})
    position = ["head", "rows", "columns"].index(axis) + 1
    for right in (0, -1, -size, slice(1, None), slice(-2, None), slice(2, 1), slice(0, 99), slice(0, None, 1)):
        expected = tape.weights(name)[(slice(None),) * position + (right,)]
        torch.testing.assert_close(tape.weights(name, **{axis: right}), expected)


def test_the_check_of_an_attention_finds_wrong_sums_weights_on_masked_keys_and_another_output():
    model = random_model(kinds.decoder())
    with torch.no_grad(), record(model) as tape:
        model(tokens(2, LENGTH))
    call = tape[0]
    assert call.check() == pytest.approx({"row_sum": 0, "masked": 0, "difference": 0}, abs=1e-6)
    assert replace(call, output=call.output + 0.5).check()["difference"] == pytest.approx(0.5, abs=1e-6)
    unmasked = replace(call, mask=replace(call.mask, causal=False))  # weights of another core than the mask allows
    weights = unmasked.weights()
    core = deepcopy(call.core)
    core.weights = lambda *args, **kwargs: 2 * weights
    hidden = weights.masked_fill(call.visible(), 0).max()
    expected = {"row_sum": 1, "masked": 2 * float(hidden)}
    assert replace(call, core=core, output=None).check() == pytest.approx(expected, abs=1e-5)
