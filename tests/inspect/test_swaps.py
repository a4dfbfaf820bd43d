"""The difference of two models is a list of overrides, and applying it gives the other model, step by valid step."""

from __future__ import annotations

import kinds
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from manyheads import presets, read_model
from manyheads.errors import ConfigError
from manyheads.inspect.swaps import steps, swaps
from manyheads.model.spec import override_model
from manyheads.spec import to_tree

SLOTS = ("attention", "core", "position", "feedforward", "norm", "residual")
GOALS = {name: read_model(presets.preset(name)) for name in presets.names()}
PATTERNS = [[], [{"mask": {"window": 2}}, {}], [{"position": "rope"}], [{"feedforward": {"hidden": 8}}, {}]]


def check(tree, goal):
    """Every step is a valid model, and the last one is the goal."""
    found = steps(tree, goal)
    for step in found:
        tree = override_model(tree, step.overrides)
        assert step.changes, step
        spec = read_model(tree)
    assert not found or spec == goal
    return found


@pytest.mark.parametrize("name", presets.names())
def test_presets_differ_by_overrides_that_give_an_equal_spec(name):
    """Each goes to three others: over all presets, near and far ones of every architecture."""
    tree, names = presets.preset(name), list(GOALS)
    assert swaps(tree, GOALS[name]) == []
    for distance in (1, 5, 12):
        goal = GOALS[names[(names.index(name) + distance) % len(names)]]
        assert read_model(override_model(tree, swaps(tree, goal))) == goal


@pytest.mark.parametrize(
    ("start", "goal"), [("t5-small", "mae-tiny"), ("bart-base", "rnnsearch"), ("gpt2", "bart-base")]
)
def test_a_resolved_description_and_one_with_like_reach_the_same_model(start, goal):
    for tree in (presets.preset(start), to_tree(GOALS[start])):
        check(tree, GOALS[goal])


def test_the_way_from_the_2017_transformer_over_gpt2_to_llama():
    first = [step.overrides for step in check(presets.preset("transformer-base"), GOALS["gpt2"])]
    assert first[0][:2] == ("encoder=false", "decoder.cross=false")
    assert ('decoder.position={ kind = "learned", length = 1024 }',) in first
    second = check(presets.preset("gpt2"), GOALS["llama-7b"])
    assert [step.overrides for step in second[:2]] == [("decoder.position=rope",), ("decoder.norm=rms",)]
    change = second[0].changes[0]
    assert (change.path, change.before.partition("(")[0], change.after.partition("(")[0]) == (
        "decoder.position",
        "learned",
        "rope",
    )
    assert change.before_formula != change.after_formula != ""
    assert max(len(step.overrides) for step in second) <= 4, "steps are small"


def test_what_both_stacks_change_is_one_override():
    tree = presets.preset("transformer-base")
    goal = read_model(override_model(tree, ["position=rope"]))
    assert swaps(tree, goal) == swaps(to_tree(read_model(tree)), goal) == ["position=rope"]


def test_a_change_of_the_encoder_alone_leaves_a_decoder_that_is_like_it():
    tree = presets.preset("transformer-base")
    goal = read_model(override_model(tree, ["decoder.like=encoder", "encoder.position=rope"]))
    assert (goal.encoder.position.kind, goal.decoder.position.kind) == ("rope", "sinusoidal")
    check(tree, goal)


@st.composite
def specs(draw):
    """Any architecture with any parts; only valid ones."""
    chosen = {slot: draw(st.sampled_from(kinds.choices(slot)), label=slot) for slot in SLOTS}
    assume(kinds.fits(chosen["position"], chosen["core"]))
    stack = kinds.stack(**chosen) | {"layers": 2, "width": draw(st.sampled_from([16, 32]))}
    stack |= draw(st.sampled_from([{}, {"final_norm": "rms"}, {"layer_groups": 1}, {"embed": {"norm": "layer"}}]))
    if pattern := draw(st.sampled_from(PATTERNS)):
        stack["pattern"] = pattern
    other = {"layers": draw(st.integers(1, 3)), "width": 16, "embed": "tokens"}
    cross = draw(st.sampled_from([True, {"core": "additive"}, {"attention": {"heads": 1}}]))
    models = {
        "encoder": {"encoder": stack},
        "decoder": {"decoder": stack},
        "pair": {"encoder": stack, "decoder": {"like": "encoder", "cross": cross}},
        "unlike": {"encoder": other, "decoder": stack | {"cross": cross}, "source_vocab": 5},
        "recurrent": {"recurrent": {"width": 8, "cell": draw(st.sampled_from(kinds.choices("cell")))}},
        "ngram": {"ngram": {"order": 2}},
    }
    tree = {"vocab": draw(st.sampled_from([7, "tokenizer"])), **draw(st.sampled_from(sorted(models)).map(models.get))}
    try:
        return tree, read_model(tree)
    except ConfigError:
        assume(False)


@given(specs(), specs())
def test_any_two_models_differ_by_overrides_that_give_an_equal_spec(start, goal):
    for tree in (start[0], to_tree(start[1])):
        check(tree, goal[1])
