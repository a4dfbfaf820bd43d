"""Edits: switching a head off is zeroing its output projection, and a run patched everywhere is the other run."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import kinds
import pytest
import torch
from kinds import choices, kind_id, random_model, tokens
from raising import raises

from manyheads import Checkpoint, build, export, load, read, record
from manyheads.inspect.edit import ablate, edit, patch, prune_heads, replace_with, scale

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


def close(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


SHAPES = {
    "decoder": (kinds.decoder, "decoder.layers.1.attention", 1),
    "encoder": (kinds.encoder, "encoder.layers.0.attention", 1),
    "cross": (kinds.pair, "decoder.layers.1.cross", 2),
}


@pytest.mark.parametrize("residual", choices("residual"), ids=kind_id)
@pytest.mark.parametrize("shape", SHAPES)
def test_ablating_a_head_is_zeroing_its_output_projection(shape, residual):
    make, name, count = SHAPES[shape]
    model, inputs = random_model(make(residual=residual)).eval(), [tokens(seed=i) for i in range(count)]
    plain = model(*inputs)
    for head in range(kinds.HEADS):
        with edit(model, ablate(name, head=head)):
            without = model(*inputs)
        zeroed = copy.deepcopy(model)
        weight = zeroed.get_submodule(name).output.weight
        weight.unflatten(1, (kinds.HEADS, -1))[:, head] = 0.0
        close(without, zeroed(*inputs))
        assert (without - plain).abs().max() > 1e-6
    assert torch.equal(model(*inputs), plain), "the weights are as they were"


@pytest.mark.parametrize("shape", ["decoder", "encoder", "pair"])
def test_patching_everything_reproduces_the_other_run(shape):
    model = random_model(getattr(kinds, shape)()).eval()
    count = 2 if shape == "pair" else 1
    one, other = ([tokens(seed=seed + i) for i in range(count)] for seed in (3, 7))
    with record(model) as tape:
        expected = model(*other)
    for names in (list(tape.activations()), ["head"]):
        with edit(model, *(patch(name, tape) for name in names)):
            assert torch.equal(model(*one), expected)
    stack = "encoder" if shape == "encoder" else "decoder"
    embeds = [name for name in tape.activations() if name.endswith("embed")]
    heads = [patch(name, tape, head=head) for name in tape.names() for head in range(kinds.HEADS)]
    with edit(model, *(patch(name, tape) for name in embeds), *heads):
        assert torch.equal(model(*one), expected)
    with edit(model, patch(f"{stack}.layers.0", tape, positions=2)):
        changed = model(*one)
    assert not torch.equal(changed, model(*one))
    assert not torch.equal(changed, expected)


def test_scaling_is_linear_and_by_zero_is_ablation():
    model, ids = random_model(kinds.decoder()).eval(), tokens()
    plain = model(ids)
    for name, options in (("decoder.layers.0.feedforward", {}), ("decoder.layers.1.attention", {"head": 1})):

        def output(*edits, name=name):
            with edit(model, *edits), record(model) as tape:
                logits = model(ids)
            return tape.activations()[name], logits

        (whole, _), (without, zero) = output(), output(ablate(name, **options))
        assert torch.equal(output(scale(name, 1.0, **options))[1], plain)
        close(output(scale(name, 0.0, **options))[1], zero)
        close(output(scale(name, 0.5, **options))[0], (whole + without) / 2)
        assert (zero - plain).abs().max() > 1e-6


@pytest.mark.parametrize("residual", ["pre", "post"])
def test_an_ablated_layer_gives_its_input(residual):
    model, ids = random_model(kinds.decoder(residual=residual)).eval(), tokens()
    with edit(model, ablate("decoder.layers.0"), ablate("decoder.layers.1")), record(model) as tape:
        model(ids)
    close(tape.activations()["decoder.norm"], model.decoder.norm(tape.activations()["decoder.embed"]))


def test_positions_limit_an_edit_and_causality_holds():
    model, ids = random_model(kinds.decoder()).eval(), tokens()
    plain = model(ids)
    for positions in (4, slice(4, 5), [4], -5):
        with edit(model, ablate("decoder.layers.0.attention", positions=positions)):
            changed = model(ids)
        assert torch.equal(changed[:, :4], plain[:, :4])
        assert (changed[:, 4] != plain[:, 4]).any()


def test_a_value_replaces_an_activation():
    model, ids = random_model(kinds.decoder()).eval(), tokens()
    value = torch.randn(1, 1, kinds.WIDTH)
    with edit(model, replace_with("decoder.layers.1.feedforward", value)), record(model) as tape:
        model(ids)
    with edit(model, replace_with("decoder.layers.1.feedforward", value, positions=[0, 2])), record(model) as some:
        model(ids)
    assert torch.isfinite(some.activations()["head"]).all()
    assert not torch.equal(tape.activations()["head"], some.activations()["head"])
    with raises("input.shape", 5, kinds.WIDTH), edit(model, replace_with("decoder.embed", torch.zeros(5))):
        model(ids)


@pytest.mark.parametrize(
    "wrong",
    [
        ablate("decoder.layers.7"),
        ablate("decoder.layers.0.residual"),
        ablate("decoder.layers.0.feedforward", head=0),
        ablate("decoder.layers.0", head=0),
        ablate("nothing"),
    ],
)
def test_an_unknown_name_is_an_error(wrong):
    model = random_model(kinds.decoder())
    with raises("usage.argument"), edit(model, wrong):
        pass


@pytest.mark.parametrize("head", [kinds.HEADS, 10**30, -1, 1.0, True])
def test_a_head_that_does_not_exist_is_an_error_that_says_which_do(head):
    model, name = random_model(kinds.decoder()), "decoder.layers.0.attention"
    with raises("usage.argument", name, kinds.HEADS - 1), edit(model, ablate(name, head=head)):
        model(tokens())
    with record(model) as tape:
        model(tokens())
    with raises("usage.argument", name, kinds.HEADS - 1):
        patch(name, tape, head=head)


@pytest.mark.parametrize("positions", [99, [99], -99, 10**30, 1.5, "x"])
@pytest.mark.parametrize("head", [None, 0])
def test_a_position_that_does_not_exist_is_an_error_that_says_how_many_do(positions, head):
    model, name = random_model(kinds.decoder()), "decoder.layers.0.attention"
    with raises("usage.argument", name, kinds.LENGTH), edit(model, ablate(name, head=head, positions=positions)):
        model(tokens())


def test_an_activation_without_heads_is_not_proposed_instead_of_itself():
    name = "decoder.layers.0.feedforward"
    with raises("usage.argument") as caught, edit(random_model(kinds.decoder()), ablate(name, head=0)):
        pass
    assert caught.value.message.count(name) == 1


def test_an_edit_is_for_its_own_thread():
    model, ids = random_model(kinds.decoder()).eval(), tokens()
    plain = model(ids)
    with ThreadPoolExecutor(1) as pool, edit(model, ablate("decoder.layers.0")):
        other = pool.submit(lambda: torch.no_grad()(model)(ids)).result()
        assert torch.equal(other, plain)
        assert not torch.equal(model(ids), plain)


def test_one_of_several_layers_that_share_weights_is_edited():
    changes = ("encoder.layers=3", "encoder.width=16", "encoder.attention.heads=2", "vocab=23")
    model, ids = build(read("albert-base-v2", *changes)).eval(), tokens()
    with record(model) as plain:
        model(ids)
    with edit(model, ablate("encoder.layers.1")), record(model) as tape:
        model(ids)
    before, after = plain.activations(), tape.activations()
    assert torch.equal(after["encoder.layers.0"], before["encoder.layers.0"])
    assert torch.equal(after["encoder.layers.1"], after["encoder.layers.0"])
    assert not torch.equal(after["encoder.layers.2"], before["encoder.layers.2"])


# -------------------------------------------------------------------------------------------------------------- pruning


@pytest.mark.parametrize(
    ("attention", "pruned"),
    [
        ({"kind": "heads", "heads": 4}, [0, 2]),
        ({"kind": "heads", "heads": 4, "bias": False, "qk_norm": "rms"}, [3]),
        ({"kind": "heads", "heads": 4, "kv_heads": 2}, [0, 1]),
        ({"kind": "heads", "heads": 4, "kv_heads": 2}, [0, 3]),
        ({"kind": "heads", "heads": 4, "size": 3}, [1, 2, 3]),
    ],
)
def test_a_pruned_model_is_the_model_without_these_heads(attention, pruned, tmp_path):
    model, ids = random_model(kinds.pair(attention=attention)).eval(), [tokens(), tokens(seed=4)]
    heads = {"decoder.layers.1.attention": pruned, "decoder.layers.0.cross": pruned}
    with edit(model, *(ablate(name, head=head) for name in heads for head in pruned)):
        expected = model(*ids)
    smaller = prune_heads(Checkpoint(model), heads)
    close(smaller.model(*ids), expected)
    assert sum(p.numel() for p in smaller.model.parameters()) < sum(p.numel() for p in model.parameters())
    export(smaller, tmp_path / "pruned", to="manyheads")
    torch.testing.assert_close(load(tmp_path / "pruned").model(*ids), expected, check_dtype=False)


def test_what_cannot_be_pruned_is_refused_by_name():
    grouped = Checkpoint(random_model(kinds.decoder(attention={"kind": "heads", "heads": 4, "kv_heads": 2})))
    plain = Checkpoint(random_model(kinds.decoder()))
    biased = Checkpoint(random_model(kinds.decoder(position="alibi")))
    own = Checkpoint(random_model(kinds.decoder(core="bilinear")))
    narrow = Checkpoint(random_model(kinds.decoder(attention={"kind": "narrow", "heads": 2})))
    name = "decoder.layers.0.attention"
    for checkpoint, heads, code in (
        (grouped, {name: [0]}, "model.unsupported"),
        (biased, {name: [0]}, "model.unsupported"),
        (own, {name: [0]}, "model.unsupported"),
        (narrow, {name: [0]}, "model.unsupported"),
        (plain, {name: [0, 1]}, "model.unsupported"),
        (plain, {name: [2]}, "usage.argument"),
        (plain, {"decoder.layers.9.attention": [0]}, "usage.argument"),
    ):
        with raises(code):
            prune_heads(checkpoint, heads)
