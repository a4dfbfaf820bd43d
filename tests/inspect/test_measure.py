"""Measures of attention: each equals a literal computation from the matrices."""

from __future__ import annotations

import itertools
from dataclasses import fields

import kinds
import pytest
import torch
from kinds import HEADS, LENGTH, padded, random_model, tokens
from raising import raises
from shown_checkpoints import checkpoint

from manyheads import Inputs, record
from manyheads.inspect.measure import (
    PATTERNS,
    HeadMeasures,
    head_patterns,
    mean_measures,
    measure_heads,
    ov_matrix,
    pointer_field,
    qk_matrix,
    receptive_field,
    rollout,
)


def recorded(model, *inputs):
    with torch.no_grad(), record(model.eval()) as tape:
        model(*inputs)
    return tape


def literal_measures(weights_LM, ids, real):
    """The means over the real queries, by loops over the cells."""
    rows = [i for i in range(len(weights_LM)) if real[i]]
    first = real.index(True)
    sums = dict.fromkeys(("entropy", "distance", "first", "self", "previous", "next", "same", "induction"), 0.0)
    for i, j in itertools.product(rows, range(len(weights_LM[0]))):
        weight = float(weights_LM[i][j])
        sums["entropy"] -= weight * torch.tensor(weight, dtype=torch.float64).log().item() if weight else 0.0
        sums["first"] += weight * (j == first)
        sums["self"] += weight * (j == i)
        sums["previous"] += weight * (j == i - 1)
        sums["next"] += weight * (j == i + 1)
        sums["same"] += weight * (j != i and ids[j] == ids[i])
        sums["induction"] += weight * (0 < j <= i and ids[j - 1] == ids[i] and j - 1 != i)
        sums["distance"] += weight * (i - j) ** 2
    means = {name: value / len(rows) for name, value in sums.items()}
    return means | {"distance": means["distance"] ** 0.5}


def test_every_mass_is_a_pattern_with_a_letter_of_its_own():
    masses = {field.name for field in fields(HeadMeasures)} - {"queries", "entropy", "squared_distance"}
    assert set(PATTERNS) == masses
    assert len({pattern.letter for pattern in PATTERNS.values()}) == len(PATTERNS)


@pytest.mark.parametrize("core", ["dot", "additive", "argmax"])
@pytest.mark.parametrize("shape", ["decoder", "encoder"])
def test_measures_equal_a_literal_computation(shape, core):
    model = random_model(getattr(kinds, shape)(core=core))
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2, 2]])
    for attention in recorded(model, ids):
        measures = measure_heads(attention, ids)
        for head in range(HEADS):
            expected = literal_measures(attention.weights()[0, head].tolist(), ids[0].tolist(), [True] * LENGTH)
            assert measures.to_dict(head) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_measured(side):
    model, ids = random_model(kinds.encoder()), tokens(1)
    alone = [measure_heads(attention, ids[:, :5]) for attention in recorded(model, ids[:, :5])]
    inputs = padded(ids, [5], side, filler=int(ids[0, 1]))
    assert inputs.padding_mask.sum() == LENGTH - 5
    for attention, expected in zip(recorded(model, inputs), alone, strict=True):
        measures = measure_heads(attention, inputs.tokens)
        for head in range(HEADS):
            assert measures.to_dict(head) == pytest.approx(expected.to_dict(head), abs=1e-6)


def test_rows_without_a_visible_key_are_not_measured():
    model = random_model(kinds.pair())
    source, target = tokens(2, 4), tokens(2, 5, seed=4)
    empty = Inputs(source, padding_mask=torch.tensor([[False] * 4, [True] * 4]))
    (cross, *_) = recorded(model, target, empty).calls("decoder.layers.0.cross")
    (alone, *_) = recorded(model, target[:1], Inputs(source[:1])).calls("decoder.layers.0.cross")
    measures, expected = measure_heads(cross), measure_heads(alone)
    assert (measures.queries, expected.queries) == (5, 5)
    for head in range(HEADS):
        assert measures.to_dict(head) == pytest.approx(expected.to_dict(head), abs=1e-6)


def test_the_mean_of_calls_counts_each_query_once():
    model, ids = random_model(kinds.decoder()), torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2, 2]])
    whole = measure_heads(recorded(model, ids)[0])
    with torch.no_grad(), record(model) as tape:
        _, state = model.step(ids[:, :6], model.start(capacity=9))
        model.step(ids[:, 6:], state)
    parts = [measure_heads(call) for call in tape.calls(tape.names()[0])]
    together = mean_measures(parts)
    assert [part.queries for part in parts] == [6, 3]
    torch.testing.assert_close(together.entropy, whole.entropy)
    torch.testing.assert_close(together.distance, whole.distance)


def test_the_patterns_of_heads_count_each_token_of_each_text_once():
    shown, rows = checkpoint("decoder", text=False), [[1, 2, 1], [3, 1, 3, 1, 2, 2, 3, 1], [4]]
    found = head_patterns(shown, rows)
    tapes = [recorded(shown.model, torch.tensor([row])) for row in rows]
    assert [(result.attention, result.head) for result in found] == [
        (item.name, h) for item in tapes[0] for h in range(2)
    ]
    for result in found:
        sums = dict.fromkeys(result.measures, 0.0)
        for row, tape in zip(rows, tapes, strict=True):
            weights = tape.weights(result.attention, result.head)[0].tolist()
            means = literal_measures(weights, row, [True] * len(row))
            for name, mean in (means | {"distance": means["distance"] ** 2}).items():
                sums[name] += mean * len(row)
        expected = {name: total / sum(map(len, rows)) for name, total in sums.items()}
        assert result.measures == pytest.approx(expected | {"distance": expected["distance"] ** 0.5}, abs=1e-5)


def test_cross_attention_has_no_own_position():
    model = random_model(kinds.pair())
    tape = recorded(model, tokens(), tokens(seed=4))
    (cross, *_) = tape.calls("decoder.layers.0.cross")
    measures = measure_heads(cross)
    assert float(measures.first.min()) > 0
    for name in ("self", "previous", "next", "same", "induction"):
        assert not getattr(measures, name).any()


def test_rollout_multiplies_the_layers():
    tape = recorded(random_model(kinds.encoder()), tokens())
    result = torch.eye(LENGTH, dtype=torch.float64).expand(2, -1, -1)
    for name in tape.names():
        layer = 0.5 * tape.weights(name).mean(dim=1) + 0.5 * torch.eye(LENGTH, dtype=torch.float64)
        result = layer @ result
    torch.testing.assert_close(rollout(tape), result)
    torch.testing.assert_close(rollout(tape).sum(-1), torch.ones(2, LENGTH, dtype=torch.float64))
    both = recorded(random_model(kinds.pair()), tokens(), tokens(seed=4))
    with raises("usage.argument", "encoder", "decoder"):
        rollout(both)
    assert rollout(both, "encoder").shape == (2, LENGTH, LENGTH)


def test_the_receptive_field_of_a_causal_model_is_what_came_before():
    model = random_model(kinds.decoder()).eval()
    ids = tokens(1)[0].tolist()
    for position in (0, 4, LENGTH - 1):
        assert receptive_field(model, ids, position, replacements=range(4)) == set(range(position + 1))
    windowed = random_model(kinds.decoder(mask={"window": 2}, layers=2)).eval()
    assert receptive_field(windowed, ids, 8, replacements=range(4)) == {6, 7, 8}, "two layers of one step back"


@pytest.mark.parametrize("layers", [1, 2])
def test_the_pointers_of_argmax_bound_its_receptive_field(layers):
    """A change of a token may also move a pointer, so the measured field can only be compared where none moves."""
    model = random_model(kinds.decoder(core="argmax", layers=layers)).eval()
    ids = tokens(1)
    tape = recorded(model, ids)
    field = pointer_field(tape, LENGTH - 1)
    assert len(field) <= (HEADS + 1) ** layers
    for j in set(range(LENGTH)) - field:
        moved = ids.clone()
        moved[0, j] = (moved[0, j] + 1) % kinds.VOCAB
        other = recorded(model, moved)
        if pointer_field(other, LENGTH - 1) == field:
            assert torch.equal(model(moved)[0, -1], model(ids)[0, -1])


@pytest.mark.parametrize("attention", [{"heads": 4}, {"heads": 4, "kv_heads": 2}, {"heads": 2, "size": 3}])
def test_qk_and_ov_matrices_are_what_the_head_computes(attention):
    spec = kinds.encoder(
        attention={"kind": "heads", "bias": False, **attention}, position="none", norm="none", residual="pre"
    )
    model = random_model(spec).eval()
    tape = recorded(model, tokens())
    layer, call = model.encoder.layers[0], tape[0]
    x = tape.activations()["encoder.embed"][0]
    for head in range(attention["heads"]):
        weights = torch.softmax(x @ qk_matrix(layer.attention, head) @ x.mT, dim=-1)
        torch.testing.assert_close(call.weights(head)[0], weights)
        size = call.output.shape[-1]
        added = call.output[0, head] @ layer.attention.output.weight[:, head * size : (head + 1) * size].mT
        torch.testing.assert_close(weights @ x @ ov_matrix(layer.attention, head).mT, added)
    with raises("usage.argument"):
        qk_matrix(layer.attention, attention["heads"])
    with raises("model.unsupported"):
        qk_matrix(random_model(kinds.encoder(core="additive")).encoder.layers[0].attention, 0)
