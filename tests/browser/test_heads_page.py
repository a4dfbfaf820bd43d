"""The grid of heads and the matrix of one in a real browser: their order, what is averaged, isolated, brighter or changed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import all_effects
from kinds import decoder
from shown_checkpoints import HOSTILE, TEXT, checkpoint, tape_of, weights_of

from manyheads.inspect.edit import ablate, edit
from manyheads.inspect.measure import measure_heads, rollout
from manyheads.model.recording import record

NAME = "decoder.layers.1.attention"
AVERAGES = {
    "mean": lambda tape: tape.weights(NAME)[0].mean(dim=0),
    "max": lambda tape: tape.weights(NAME)[0].amax(dim=0),
    "all-mean": lambda tape: torch.cat([tape.weights(name)[0] for name in tape.names()]).mean(dim=0),
    "all-max": lambda tape: torch.cat([tape.weights(name)[0] for name in tape.names()]).amax(dim=0),
    "rollout": lambda tape: rollout(tape)[0],
}


@pytest.mark.parametrize("mode", AVERAGES)
def test_heads_are_averaged_and_rolled_out(open_tab, mode):
    shown = checkpoint("decoder")
    tab = open_tab(shown, text=TEXT, state=f"attention={NAME}&head=0&row=5&column=2")
    tab.wait_for("() => document.querySelector('.readout').textContent.startsWith('locked')")
    before = tab.readout()
    tab.page.select_option("#look-mode", mode)
    tab.wait_for("(before) => document.querySelector('.readout').textContent !== before", before)
    expected = float(AVERAGES[mode](tape_of(shown))[5, 2])
    assert float(tab.readout().split(": ")[-1]) == pytest.approx(expected, abs=2e-6)
    assert f"mode={mode}" in tab.page.url


def effects_of(shown):
    """The mean divergence of the output without each head, by its attention and number."""
    ids = torch.tensor([shown.encode_ids([TEXT])[0]])
    tape, plain = tape_of(shown), shown.logits(ids).log_softmax(-1)
    effects = {}
    for attention in tape:
        for head in range(attention.query.shape[1]):
            with edit(shown.model, ablate(attention.name, head=head)):
                without = shown.logits(ids).log_softmax(-1)
            effects[attention.name, head] = float(
                F.kl_div(without, plain, log_target=True, reduction="none").sum(-1).mean()
            )
    return effects


def test_heads_are_sorted_by_entropy_distance_and_effect(open_tab):
    """With the keyboard through two rows of three heads, as they stand in the grid."""
    shown = checkpoint(spec=decoder(width=24, attention={"heads": 3}, position="rope"))
    measured = {attention.name: measure_heads(attention) for attention in tape_of(shown)}
    heads = [(name, head) for name in measured for head in range(3)]
    effects = effects_of(shown)
    orders = {
        "entropy": sorted(heads, key=lambda item: float(measured[item[0]].entropy[item[1]])),
        "distance": sorted(heads, key=lambda item: float(measured[item[0]].distance[item[1]])),
        "effect": sorted(heads, key=lambda item: -effects[item]),
    }
    assert len(set(map(tuple, (heads, *orders.values())))) == 4
    tab = open_tab(shown, text=TEXT)
    all_effects(tab)
    for sort, order in orders.items():
        (name, head), *others = order[:3] + order[:2:-1]  # the second row from its end
        tab.page.evaluate(
            "(state) => { location.hash = state; }", f"text={TEXT}&attention={name}&head={head}&sort={sort}"
        )
        title = "(text) => document.querySelector('.head h2').textContent.endsWith(text)"
        tab.wait_for(title, f"layer {name.split('.')[2]} · head {head}")
        tab.page.locator("canvas.grid").focus()
        walked = []
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowLeft"):
            before = tab.page.inner_text(".head h2")
            tab.page.keyboard.press(key)
            tab.wait_for("(before) => document.querySelector('.head h2').textContent !== before", before)
            walked.append((tab.state()["attention"], int(tab.state()["head"])))
        assert walked == others, sort


def test_a_row_or_a_column_is_isolated_by_its_key(open_tab):
    """The others are covered with the color of the paper; the masked cells of a causal matrix are white already."""
    tab = open_tab(checkpoint("decoder"), text=TEXT, state=f"attention={NAME}&head=0&row=6&column=2")
    tab.page.wait_for_selector(".cell .steps")
    cells = [[6, 1], [6, 4], [4, 2], [8, 2], [4, 1], [8, 5]]
    inks = """(cells) => {
        const canvas = document.querySelector("canvas.matrix");
        const [left, top, scale] = canvas.dataset.cells.split(" ").map(Number);
        const ratio = canvas.width / canvas.getBoundingClientRect().width;
        const at = (start, index) => Math.round((start + (index + 0.2) * scale) * ratio);
        const data = (row, column) => canvas.getContext("2d").getImageData(at(left, column), at(top, row), 1, 1).data;
        return cells.map(([row, column]) => 765 - data(row, column).slice(0, 3).reduce((sum, part) => sum + part));
    }"""
    tab.wait_for(f"(cells) => ({inks})(cells).every((ink) => ink > 40)", cells)
    before = tab.page.evaluate(inks, cells)
    isolated = f"""([cells, before, axis, index]) => ({inks})(cells).every((ink, i) =>
        cells[i][axis] === index ? ink === before[i] : ink < 0.3 * before[i])"""
    for key, state, axis, index in (("r", "row", 0, 6), ("c", "column", 1, 2)):
        tab.page.keyboard.press(key)
        tab.wait_for(isolated, [cells, before, axis, index])
        assert tab.state()["isolate"] == state
        assert tab.page.input_value("#look-isolate") == state
    tab.page.keyboard.press("c")
    tab.wait_for(f"([cells, before]) => ({inks})(cells).every((ink, i) => ink === before[i])", [cells, before])
    assert "isolate" not in tab.state()


def test_the_grid_shows_which_heads_change(open_tab):
    shown = checkpoint("decoder")
    tab = open_tab(shown, text=TEXT, state="off=decoder.layers.0.attention:0&compare=off&tables=1")
    all_effects(tab)
    picture = "() => document.querySelector('canvas.grid').toDataURL()"
    before = tab.page.evaluate(picture)
    tab.page.check("#look-differences")
    moved = """() => [...document.querySelectorAll(".tables table")[1].tBodies[0].rows].map((row) => Number(row.cells[5]?.textContent))"""
    tab.wait_for(f"() => ({moved})().every((one) => Number.isFinite(one))")
    first, second, *later = tab.page.evaluate(moved)
    assert (first, second) == (0, 0)  # nothing before the head that is off changes
    ids = torch.tensor([shown.encode_ids([TEXT])[0]])
    with edit(shown.model, ablate("decoder.layers.0.attention", head=0)), record(shown.model) as tape:
        shown.logits(ids)
    for head, value in enumerate(later):
        change = weights_of(shown, NAME, head) - tape.weights(NAME, head)[0]
        assert value == pytest.approx(float(change.abs().sum(-1).mean()) / 2, abs=1e-4)
        assert value > 0
    tab.wait_for(f"(before) => ({picture})() !== before", before)
    assert tab.state()["differences"] == "1"
    assert "weight that moved" in tab.page.inner_text(".legend")
    tab.page.select_option("#look-compare", "text")
    tab.page.fill("#text2", "the dog")
    tab.wait_for("() => document.querySelector('.legend').textContent.includes('2 attentions have other tokens')")
    tab.page.select_option("#look-compare", "none")
    tab.page.locator("#look-differences").wait_for(state="hidden")
    tab.wait_for("() => document.querySelector('.legend').textContent.includes('without the head')")


def test_a_brighter_matrix_shows_small_weights(open_tab):
    tab = open_tab(checkpoint("decoder"), text=TEXT)
    picture = "() => document.querySelector('canvas.matrix').toDataURL()"
    tab.page.locator("canvas.matrix").focus()
    tab.page.keyboard.press("ArrowDown")
    before, readout = tab.page.evaluate(picture), tab.readout()
    tab.page.select_option("#look-gain", "100")
    tab.wait_for(f"(before) => ({picture})() !== before && location.hash.includes('gain=100')", before)
    assert tab.readout() == readout


@pytest.mark.parametrize("width", [1280, 1600])
def test_twelve_heads_and_the_last_label_fit_into_the_page(open_tab, width):
    spec = decoder(width=24, attention={"heads": 12}, position="rope")
    tab = open_tab(checkpoint(spec=spec), text=f"{TEXT} {HOSTILE}", width=width)
    tab.page.wait_for_selector("canvas.matrix[data-cells]")
    right = "(one) => one.getBoundingClientRect().right"
    section = tab.page.locator(".heads")
    assert tab.page.locator("canvas.grid").evaluate(right) <= section.evaluate(right)
    assert section.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    # no label reaches the border of its canvas
    tab.wait_for("""() => {
        const canvas = document.querySelector("canvas.matrix");
        const [, top] = canvas.dataset.cells.split(" ").map(Number);
        const strip = (x) => canvas.getContext("2d").getImageData(x, 0, 1, top - 2).data;
        const labels = canvas.getContext("2d").getImageData(0, 0, canvas.width, top - 2).data;
        return labels.some(Boolean) && !strip(canvas.width - 1).some(Boolean);
    }""")
