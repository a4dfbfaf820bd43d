"""Attribution: the terms of a logit and of a score sum to it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import kinds
import pytest
import torch
from kinds import HEADS, choices, kind_id, random_model, tokens
from raising import raises

from manyheads import read_model, record
from manyheads.inspect.attribution import direct_logit_attribution, input_gradients, logit_lens, score_terms
from manyheads.inspect.edit import ablate, edit

ROW = tokens(1)[0].tolist()


def recorded(model, *inputs):
    with torch.no_grad(), record(model.eval()) as tape:
        logits = model(*inputs)
    return tape, logits


@pytest.mark.parametrize("shape", ["decoder", "pair"])
def test_the_lens_of_the_last_layer_gives_the_logits(shape):
    model = random_model(getattr(kinds, shape)())
    tape, logits = recorded(model, *([tokens()] * (2 if shape == "pair" else 1)))
    lens = logit_lens(model, tape)
    assert list(lens) == ["decoder.embed", "decoder.layers.0", "decoder.layers.1"]
    torch.testing.assert_close(lens["decoder.layers.1"], logits)
    with torch.no_grad(), edit(model, ablate("decoder.layers.1")):
        torch.testing.assert_close(lens["decoder.layers.0"], model(*([tokens()] * (2 if shape == "pair" else 1))))


@pytest.mark.parametrize("norm", choices("norm"), ids=kind_id)
@pytest.mark.parametrize("shape", ["decoder", "pair"])
@pytest.mark.parametrize("residual", ["pre", "parallel"])
def test_the_terms_of_a_logit_sum_to_it(shape, residual, norm):
    model = random_model(getattr(kinds, shape)(residual=residual, norm=norm))
    tape, logits = recorded(model, *([tokens()] * (2 if shape == "pair" else 1)))
    attribution = direct_logit_attribution(model, tape, 4, 7, row=1)
    assert sum(attribution.terms.values()) == pytest.approx(float(logits[1, 4, 7]), abs=1e-9)
    assert attribution.logit == pytest.approx(float(logits[1, 4, 7]), abs=1e-9)
    heads = [name for name in attribution.terms if ".attention." in name or ".cross." in name]
    assert len(heads) == HEADS * len([name for name in tape.names() if name.startswith("decoder")])


@pytest.mark.parametrize("residual", ["post", "sandwich"])
def test_a_stream_that_is_no_sum_is_refused(residual):
    model = random_model(kinds.decoder(residual=residual))
    tape, _ = recorded(model, tokens())
    with raises("model.unsupported"):
        direct_logit_attribution(model, tape, 4, 7)


def test_input_gradients_are_those_of_a_small_change():
    model = random_model(kinds.decoder()).eval()
    gradients = input_gradients(model, ROW, 5, 3)
    assert gradients.shape == (len(ROW), kinds.WIDTH)
    assert not gradients[6:].any(), "a later token changes nothing"
    step, index = 1e-6, ROW[2]
    with torch.no_grad():
        before = model(torch.tensor([ROW]))[0, 5, 3]
        embed = model.decoder.embed.register_forward_hook(
            lambda _, __, out: (
                out
                + step
                * torch.nn.functional.one_hot(torch.tensor(4), kinds.WIDTH)
                * (torch.arange(out.shape[1]) == 2)[:, None]
            )
        )
        after = model(torch.tensor([ROW]))[0, 5, 3]
        embed.remove()
    assert float((after - before) / step) == pytest.approx(float(gradients[2, 4]), rel=1e-3, abs=1e-6)
    assert index == ROW[2]


EMBEDS = {
    "added": {"position": "sinusoidal"},
    "concatenated": {"position": {"kind": "sinusoidal", "join": "concat"}},
    "with a norm": {"position": {"kind": "learned", "length": 64}, "embed": {"kind": "tokens", "norm": "layer"}},
    "narrower": {"position": "sinusoidal", "embed": {"kind": "tokens", "size": 8}},
    "relative": {"position": {"kind": "clipped", "clip": 3}},
}


@pytest.mark.parametrize("residual", ["pre", "post"])
@pytest.mark.parametrize("name", EMBEDS)
def test_the_terms_of_a_score_sum_to_it(name, residual):
    """Claims D5 and D6 in a whole model: added positions give four terms, concatenated ones two."""
    attention = {"kind": "heads", "heads": HEADS, "bias": False}
    model = random_model(kinds.encoder(attention=attention, residual=residual, **EMBEDS[name])).eval()
    tape, _ = recorded(model, torch.tensor([ROW]))
    for head in range(HEADS):
        terms = score_terms(model, ROW, head)
        expected = torch.softmax(terms.total, dim=-1)
        torch.testing.assert_close(tape.weights("encoder.layers.0.attention", head)[0], expected)
        rest = terms.word_word + terms.word_position + terms.position_word + terms.position_position
        if name == "relative":
            assert not terms.position_position.any()
            assert terms.bias.abs().max() > 1e-3
        elif residual == "post" and name in ("added", "concatenated"):  # no bias of a norm or of a projection
            torch.testing.assert_close(rest, terms.total, rtol=0, atol=1e-6)


@pytest.mark.parametrize("position", ["added", "relative"])
def test_the_terms_of_some_rows_are_those_of_all(position):
    model = random_model(kinds.encoder(**EMBEDS[position])).eval()
    for head, rows in ((0, slice(2, 3)), (1, slice(4, 9)), (HEADS - 1, slice(0, 1))):
        terms, whole = score_terms(model, ROW, head, rows), score_terms(model, ROW, head)
        for field in fields(terms):
            torch.testing.assert_close(getattr(terms, field.name), getattr(whole, field.name)[rows])


def in_another_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_forward_of_another_thread_changes_no_terms_and_no_gradients():
    """The other forward runs in the midst of ours: when ours looks up its tokens."""
    model, other = random_model(kinds.decoder(position="learned")).eval(), tokens(1, 4, seed=7)
    terms, gradients = score_terms(model, ROW, 1), input_gradients(model, ROW, 3, 2)
    here = threading.get_ident()

    def interrupt(*_):
        if threading.get_ident() == here:
            in_another_thread(lambda: model(other))

    model.decoder.embed.table.register_forward_pre_hook(interrupt)
    model.decoder.layers[0].attention.register_forward_pre_hook(interrupt)
    for field in fields(terms):
        assert torch.equal(getattr(score_terms(model, ROW, 1), field.name), getattr(terms, field.name))
    assert torch.equal(input_gradients(model, ROW, 3, 2), gradients)


def test_d6_concatenated_positions_have_no_cross_terms():
    attention = {"kind": "heads", "heads": 1, "bias": False}
    model = random_model(kinds.encoder(attention=attention, norm="none", **EMBEDS["concatenated"])).eval()
    size = model.encoder.embed.table.weight.shape[1]
    with torch.no_grad():  # W_Q and W_K that do not mix the two halves
        for projection in (model.encoder.layers[0].attention.query, model.encoder.layers[0].attention.key):
            projection.weight.copy_(torch.eye(kinds.WIDTH, dtype=projection.weight.dtype))
    terms = score_terms(model, ROW, 0)
    assert not terms.word_position.any()
    assert not terms.position_word.any()
    assert terms.word_word.abs().max() > 0
    assert terms.position_position.abs().max() > 0
    assert size < kinds.WIDTH


def test_d18_equal_offsets_have_equal_position_terms_and_other_totals():
    """The same words at other positions: with sinusoids that are added, q·k = w·w + w·p + p·w + p·p."""
    attention = {"kind": "heads", "heads": 1, "bias": False}
    model = random_model(kinds.encoder(attention=attention, norm="none", position="sinusoidal")).eval()
    with torch.no_grad():
        for projection in (model.encoder.layers[0].attention.query, model.encoder.layers[0].attention.key):
            projection.weight.copy_(torch.eye(kinds.WIDTH, dtype=projection.weight.dtype))
    terms = score_terms(model, [1, 2, 3, 4, 5, 1, 2], 0)
    near, far = (0, 1), (5, 6)  # words 1 and 2, one position apart
    torch.testing.assert_close(terms.word_word[near], terms.word_word[far])
    torch.testing.assert_close(terms.position_position[near], terms.position_position[far])
    assert abs(float(terms.total[near] - terms.total[far])) > 1e-3
    cross = [float((terms.word_position + terms.position_word)[cell]) for cell in (near, far)]
    assert float(terms.total[near] - terms.total[far]) == pytest.approx(cross[0] - cross[1])


def test_what_has_no_such_terms_is_refused():
    encoder = read_model({"vocab": kinds.VOCAB, "encoder": kinds.stack(), "head": "classes"})
    model = random_model(encoder)
    tape, _ = recorded(model, tokens())
    with raises("model.unsupported"):
        logit_lens(model, tape)
    with raises("model.unsupported"):
        score_terms(random_model(kinds.recurrent()), ROW, 0)
