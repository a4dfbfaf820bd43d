"""The tab Receptive field: its sets are those of the library, bounded by masks, pointers and (k + 1)ⁿ."""

from __future__ import annotations

import kinds
import pytest
import torch
from kinds import HEADS
from shown_checkpoints import TEXT, checkpoint, image_checkpoint
from studio_client import Client

from manyheads.inspect.measure import pointer_field, receptive_field
from manyheads.model.recording import record
from manyheads.studio import field as tab


def measure(shown, code=None, **fields):
    return Client(shown).post("field/measure", code=code, **{"text": TEXT} | fields)


@pytest.mark.parametrize("name", ["decoder", "encoder", "additive"])
@pytest.mark.parametrize("position", [0, 3, None])
def test_the_last_layer_has_the_receptive_field_of_the_library(name, position):
    shown = checkpoint(name)
    answer = measure(shown, position=position)
    ids = shown.encode([TEXT])[0].ids
    assert answer["tokens"] == [shown.text_generator.token_name(token) for token in ids]
    position = len(ids) - 1 if position is None else position
    assert answer["position"] == position
    expected = receptive_field(shown.model, ids, position, replacements=tab.replacements_of(shown))
    assert answer["depths"][-1]["measured"] == sorted(expected)
    seen = range(len(ids)) if name == "encoder" else range(position + 1)
    assert answer["depths"][-1]["visible"] == list(seen)
    assert answer["depths"][0]["measured"] == answer["depths"][0]["visible"] == [position], "the embedding is its own"
    assert answer["tree"] is None
    for depth in answer["depths"]:
        assert set(depth["measured"]) <= set(depth["visible"])
        assert depth["bound"] is None


def test_a_window_lets_one_more_step_through_per_layer():
    answer = measure(checkpoint(spec=kinds.decoder(mask={"window": 2}, layers=3)), position=8)
    assert [depth["visible"] for depth in answer["depths"]] == [list(range(8 - n, 9)) for n in range(4)]
    assert [depth["measured"] for depth in answer["depths"]] == [depth["visible"] for depth in answer["depths"]]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_argmax_heads_point_at_no_more_than_the_formula_allows(layers):
    shown = checkpoint(spec=kinds.decoder(core="argmax", layers=layers))
    answer = measure(shown)
    with record(shown.model) as tape:
        shown.logits(torch.tensor([shown.encode([TEXT])[0].ids]))
    last = answer["depths"][-1]
    assert answer["heads"] == HEADS
    assert last["pointers"] == sorted(pointer_field(tape, answer["position"]))
    for n, depth in enumerate(answer["depths"]):
        assert depth["formula"] == (HEADS + 1) ** n
        assert depth["bound"] == min((HEADS + 1) ** n, answer["position"] + 1)
        assert len(depth["pointers"]) <= depth["bound"]
        assert set(depth["pointers"]) <= set(depth["visible"])
    reached = [{i for i, _ in level} for level in answer["tree"]] + [set(last["pointers"])]
    assert reached[0] == {answer["position"]}
    for n, level in enumerate(answer["tree"]):
        weights = tape.weights(f"decoder.layers.{layers - 1 - n}.attention")[0]
        assert all(weights[head, i, j] == 1 for i, keys in level for head, j in enumerate(keys))
        assert reached[n + 1] == reached[n] | {j for _, keys in level for j in keys}


def test_a_layer_with_one_soft_head_has_no_pointers():
    assert measure(checkpoint(spec=kinds.decoder(core={"kind": "argmax", "heads": [1]})))["heads"] is None


def test_what_cannot_be_measured_is_an_error(monkeypatch):
    shown = checkpoint("decoder")
    measure(checkpoint("pair"), code="model.unsupported")
    measure(checkpoint("recurrent"), code="model.unsupported")
    measure(image_checkpoint(), text="0 " * 64, code="model.unsupported")
    measure(shown, position=len(TEXT.split()) + 1, code="usage.argument")
    measure(checkpoint("rope"), text="the " * tab.MAX_TOKENS, code="input.length")
    per_token = 2 * sum(parameter.numel() for parameter in shown.model.decoder.layers.parameters())
    monkeypatch.setattr(tab, "MAX_FLOPS", per_token * (tab.REPLACEMENTS + 1) * 5**2)
    assert len(measure(shown, text="a cat sat on")["tokens"]) == 5
    measure(shown, text="a cat sat on the", code="input.length")
