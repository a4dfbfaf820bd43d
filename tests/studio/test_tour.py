"""The guided tour: its tables and facts are laws of the library, and a model that cannot show a step says so."""

from __future__ import annotations

import re

import kinds
import pytest
import torch
from shown_checkpoints import checkpoint, image_checkpoint
from studio_client import Client
from tour_checkpoints import tour_checkpoint

from manyheads.model.transformer import Transformer
from manyheads.studio import tour


class Page(Client):
    def get(self, path, check=200, **fields):
        return super().get(f"tour/{path}", check, **fields).json()

    def steps(self):
        return {step["key"]: step for step in self.get("steps")["steps"]}

    def facts(self, step):
        return self.get("numbers", step=step)["facts"]


def tables(step):
    (found,) = [item for item in tour.STEPS if item.key == step]
    return [(torch.tensor(table["values"]), table) for table in found.tables()]


def test_a_mask_before_the_softmax_keeps_the_sums_and_one_after_it_does_not():
    (_, plain), (_, wrong), (right, sums) = tables("mask")
    torch.testing.assert_close(plain["values"], [list(row) for row in tour_printed()], atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.tensor(wrong["sums"]), torch.tensor([0.91, 0.77, 1.0]))
    expected = torch.tensor([[1, 0, 0], [0.039, 0.961, 0], [0.01, 0.41, 0.58]])
    torch.testing.assert_close(right, expected, rtol=0, atol=1e-3)
    assert sums["sums"] == pytest.approx([1, 1, 1])


def tour_printed():
    return ((0.91, 0.04, 0.05), (0.03, 0.74, 0.23), (0.01, 0.41, 0.58))


def test_equal_words_get_equal_weights_and_a_later_one_exactly_zero_under_a_causal_mask():
    (free, _), (causal, _) = tables("big")
    assert free[1, 0] == free[1, 2] > 0
    assert causal[1, 2] == 0
    assert causal[1, 0] > 0


def test_without_positions_another_order_of_words_is_another_order_of_rows_and_columns():
    (a, _), (b, _) = tables("order")
    order = [0, 4, 2, 3, 1]
    torch.testing.assert_close(b, a[order][:, order])
    assert not torch.equal(a, b)


def test_cross_attention_is_2_by_3_and_the_alignment_is_0_2_1():
    ((cross, table),) = tables("cross")
    assert cross.shape == (2, 3) == (len(table["rows"]), len(table["columns"]))
    assert table["sums"] == pytest.approx([1, 1])
    ((_, aligned),) = tables("alignment")
    assert aligned["marked"] == [0, 2, 1]
    assert [aligned["columns"][i] for i in aligned["marked"]] == ["cats", "mice", "chase"]


def test_each_word_has_one_head_and_only_prefer_a_direct_object():
    (parse, table), (dobj, _) = tables("relation")
    words = table["rows"]
    assert table["sums"] == [1.0] * 5
    assert parse[words.index("flight"), words.index("prefer")] == 1
    assert dobj.nonzero().tolist() == [[words.index("prefer"), words.index("flight")]]


def test_pointers_see_k_plus_one_to_the_n():
    ((sizes, _),) = tables("pointers")
    assert sizes.tolist() == [[(k + 1) ** n for n in (1, 2)] for k in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "changes", "apart"),
    [
        ("encoder", {"position": "none"}, False),
        ("encoder", {"position": "sinusoidal"}, True),
        ("decoder", {"position": "none"}, True),
    ],
)
def test_a_model_tells_orders_apart_by_positions_or_by_a_mask(name, changes, apart):
    shown = tour_checkpoint(name, spec=getattr(kinds, name)(**changes))
    difference, law = Page(shown).facts("order")
    assert law["holds"] is True
    value = float(re.search(r"at most ([\d.e+-]+):", difference["text"])[1])
    assert (value > 1e-3) is apart


def test_dog_and_the_two_bigs_of_the_open_model():
    page = Page(tour_checkpoint("decoder", spec=kinds.decoder(position="none")))
    *_, last = page.facts("big")
    assert last["holds"] is True, "exactly 0 under a causal mask"
    state = page.steps()["big"]["state"]
    assert (state["row"], state["column"]) == ("2", "5")
    equal = Page(tour_checkpoint("encoder", spec=kinds.encoder(position="none"))).facts("big")
    for fact in equal[:-1]:
        first, second = re.findall(r"0\.\d{4}", fact["text"])
        assert first == second


def test_the_strongest_head_of_run_and_prefer_is_the_largest_weight_of_the_model():
    shown = tour_checkpoint("decoder")
    page = Page(shown)
    _, tape, _ = tour.run_text(shown, tour.RUN_TEXTS[1])
    largest = max(float(tape.weights(name)[0, :, 4, 3].max()) for name in tape.names())
    assert f"{largest:.3f}" in page.facts("run")[1]["text"]
    _, tape, _ = tour.run_text(shown, tour.PREFER)
    largest = max(float(tape.weights(name)[0, :, 4, 1].max()) for name in tape.names())
    assert f"{largest:.3f}" in page.facts("relation")[1]["text"]


@pytest.mark.parametrize(
    "shown",
    [checkpoint("decoder"), checkpoint("decoder", text=False), checkpoint("pair"), checkpoint("recurrent"),
     image_checkpoint()],
)  # fmt: skip
def test_a_step_that_the_model_cannot_show_keeps_its_tables_or_is_skipped(shown):
    page = Page(shown)
    for key, step in page.steps().items():
        assert step["text"]
        names_the_model = re.search(r"\bbelow\b|\bPress\b|\bopen model\b|\bThe tab\b|\bLook for\b", step["text"])
        numbers = page.get("numbers", step=key)
        if step["refusal"]:
            assert step["state"] == {}
            assert names_the_model is None, "a sentence about what the page cannot show"
            assert numbers["facts"] == []
            assert step["skipped"] is (numbers["tables"] == [])
        else:
            assert step["skipped"] is False
        needs_one_stack = step["state"].get("tab") in ("probe", "field")  # which refuse other models
        assert not (needs_one_stack and (shown.has_source or not shown.model.stacks))
    assert page.steps()["run"]["skipped"]
    is_transformer = isinstance(shown.model, Transformer)
    assert page.steps()["walk"]["skipped"] is not is_transformer
    assert not page.steps()["mask"]["skipped"]
    assert (page.steps()["cross"]["state"] != {}) is (shown.has_source and is_transformer)
    page.get("numbers", check=422, step="none")


def test_every_step_fits_a_model_that_knows_its_words_and_names_a_tab_and_a_walk_that_exist():
    page = Page(tour_checkpoint("decoder"))
    for key, step in page.steps().items():
        assert step["refusal"] is None
        assert step["text"].endswith(next(item.guide for item in tour.STEPS if item.key == key))
        assert all(fact["holds"] is not False for fact in page.get("numbers", step=key)["facts"])
        assert step["state"].get("tab", "look") in {"look", "model", "probe", "field"}
    walk = page.steps()["walk"]["state"]
    assert page.post("model/walk", target=walk["model"], goal=walk["to"])["steps"]
