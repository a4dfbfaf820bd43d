"""The tab Look in a real browser."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from conftest import Tab
from shown_checkpoints import HOSTILE, TEXT, checkpoint, long_checkpoint

from manyheads.model.recording import record
from manyheads.studio.offline import offline_page
from manyheads.studio.session import Sessions

LEFT, TOP = 112, 92  # of the matrix in its canvas
NAME = "decoder.layers.1.attention"


def weights_of(shown, name, head, text=TEXT):
    ids = torch.tensor([shown.encode_ids([text])[0] if shown.tokenizer else [int(one) for one in text.split()]])
    with record(shown.model) as tape:
        shown.logits(ids)
    return tape.weights(name, head)[0]


def cell_position(tab, row, column, size):
    """Where a cell is on the screen, as long as the whole matrix is shown."""
    box = tab.page.locator("canvas.matrix").first.bounding_box()
    scale = min(46, (box["width"] - LEFT - 4) / size, (box["height"] - TOP - 4) / size)
    return box["x"] + LEFT + (column + 0.5) * scale, box["y"] + TOP + (row + 0.5) * scale


def all_effects(tab):
    tab.page.wait_for_selector("[data-effects=all]")


def test_the_page_loads_checks_itself_and_shows_the_effect_of_every_head(open_tab):
    tab = open_tab(checkpoint("decoder"), text=TEXT)
    all_effects(tab)
    assert tab.page.locator(".chip.good").count() == 3
    assert tab.page.locator(".chip.bad").count() == 0
    effects = [url for url in tab.requests if "/look/effect" in url]
    assert len(effects) == 4
    assert tab.page.input_value("#text") == TEXT
    assert "sha256" in tab.page.inner_text(".trust")


@pytest.mark.parametrize("name", ["encoder", "pair", "recurrent"])
def test_every_architecture_is_shown(open_tab, name):
    tab = open_tab(checkpoint(name), text=TEXT, state="tables=1")
    all_effects(tab)
    kinds = {
        "encoder": ["encoder self"],
        "pair": ["encoder self", "decoder self", "decoder cross"],
        "recurrent": ["decoder alignment"],
    }
    titles = [title.removesuffix("-attention") for title in tab.page.locator(".grids h3").all_inner_texts()]
    assert titles == kinds[name]
    assert tab.page.locator(".chip.bad").count() == 0


def test_typing_a_text_shows_its_tokens(open_tab):
    tab = open_tab(checkpoint("decoder"), text=TEXT, state="tables=1")
    tab.page.fill("#text", "a dog ran on")
    tab.wait_for("() => document.querySelectorAll('.tables table')[0]?.tBodies[0].rows.length === 5")
    rows = tab.page.locator(".tables table").first.locator("tbody th").all_inner_texts()
    assert rows == ["<s>", "a", "dog", "ran", "on"]
    assert tab.state()["text"] == "a dog ran on"
    tab.page.fill("#text", "")  # only <s> is left
    tab.wait_for("() => document.querySelectorAll('.tables table')[0]?.tBodies[0].rows.length === 1")


def test_hovering_a_cell_gives_both_tokens_and_the_exact_number(open_tab):
    shown = checkpoint("decoder")
    tab = open_tab(shown, text=TEXT, state=f"attention={NAME}&head=1")
    size = len(shown.encode_ids([TEXT])[0])
    weights = weights_of(shown, NAME, 1)
    for row, column in ((4, 2), (8, 8), (3, 7)):
        tab.page.mouse.move(*cell_position(tab, row, column, size))
        tokens = shown.encode([TEXT])[0].tokens
        expected = f"{tokens[row]} → {tokens[column]}: {float(weights[row, column]):.6f}"
        tab.wait_for("(text) => document.querySelector('.readout').textContent === text", expected)


def test_a_click_locks_a_cell_and_escape_releases_it(open_tab):
    shown = checkpoint("decoder")
    tab = open_tab(shown, text=TEXT, state=f"attention={NAME}&head=0")
    size = len(shown.encode_ids([TEXT])[0])
    tab.page.mouse.click(*cell_position(tab, 5, 2, size))
    tab.page.wait_for_selector(".cell .steps")
    assert tab.state()["row"] == "5"
    locked = tab.readout()
    tab.page.mouse.move(*cell_position(tab, 8, 1, size))
    assert tab.readout() == locked
    assert tab.page.inner_text(".cell .big") == f"{float(weights_of(shown, NAME, 0)[5, 2]):.4f}"
    tab.page.keyboard.press("Escape")
    tab.wait_for("() => !document.querySelector('.cell .steps')")
    assert "row" not in tab.state()


def test_a_threshold_by_mass_keeps_the_largest_weights_of_a_row(open_tab):
    shown = checkpoint("decoder")
    weights = weights_of(shown, NAME, 0)
    row = len(weights) - 1
    order = weights[row].argsort(descending=True).tolist()
    tab = open_tab(shown, text=TEXT, state=f"attention={NAME}&head=0&mass=0.5&row={row}&column={order[0]}")
    tab.wait_for("() => document.querySelector('.readout').textContent.startsWith('locked')")
    assert tab.readout().endswith(f"{float(weights[row, order[0]]):.6f}")
    tab.page.evaluate(
        "(column) => { location.hash = location.hash.replace(/column=\\d+/, `column=${column}`); }", order[-1]
    )
    tab.wait_for("() => document.querySelector('.readout').textContent.endsWith(': 0.000000')")


def test_special_tokens_are_hidden_and_subwords_merged(open_tab):
    tab = open_tab(checkpoint("encoder"), text="the unknown cat", state="tables=1")
    rows = "() => [...document.querySelectorAll('.tables table')[0].tBodies[0].rows].map((row) => row.cells[0].textContent).join('|')"
    tab.wait_for(f"() => ({rows})() === '<s>|the|un|##known|cat'")
    tab.page.check("#look-special")
    tab.wait_for(f"() => ({rows})() === 'the|un|##known|cat'")
    tab.page.check("#look-merge")
    tab.wait_for(f"() => ({rows})() === 'the|un##known|cat'")


@pytest.mark.parametrize("mode", ["mean", "max", "all-mean", "all-max", "rollout"])
def test_heads_are_averaged_and_rolled_out(open_tab, mode):
    tab = open_tab(checkpoint("decoder"), text=TEXT)
    tab.page.select_option("#look-mode", mode)
    tab.wait_for("(head) => location.hash.includes(`mode=${head}`)", mode)
    tab.page.locator("canvas.matrix").focus()
    tab.page.keyboard.press("ArrowDown")
    tab.wait_for("() => /: [01]\\.\\d{6}$/.test(document.querySelector('.readout').textContent)")
    assert any(f"head={mode}&" in url for url in tab.requests)


def test_switching_a_head_off_shows_what_changes(open_tab):
    tab = open_tab(checkpoint("decoder"), text=TEXT, state=f"attention={NAME}&head=1")
    tab.page.wait_for_selector(".next tbody tr")
    assert tab.page.locator(".next thead th").count() == 3
    tab.page.get_by_role("button", name="Switch off").click()
    tab.page.wait_for_selector(".next .after")
    assert tab.page.locator(".next thead th").count() == 4
    assert tab.state()["off"] == f"{NAME}:1"
    tab.page.select_option("#look-compare", "off")
    tab.wait_for("() => document.querySelectorAll('canvas.matrix').length === 2")
    tab.page.get_by_role("button", name="Switch on").click()
    tab.wait_for("() => !document.querySelector('.next .after')")


def test_two_heads_two_texts_and_two_checkpoints_are_compared(open_tab):
    tab = open_tab(checkpoint("decoder"), checkpoint("rope"), text=TEXT)
    two = "() => document.querySelectorAll('canvas.matrix').length === 2"
    tab.page.select_option("#look-compare", "head")
    tab.page.select_option("#head2", f"{NAME}/1")
    tab.wait_for(two)
    tab.page.select_option("#look-compare", "text")
    tab.page.fill("#text2", "the dog sat on the mat . the dog ran")
    tab.wait_for("() => location.hash.includes('text2=the+dog')")
    tab.page.locator("canvas.matrix").first.focus()
    tab.page.keyboard.press("ArrowDown")
    tab.wait_for("() => document.querySelector('.readout').textContent.includes('second: ')")
    tab.page.check("#look-difference")
    tab.wait_for("() => document.querySelectorAll('canvas.matrix').length === 1")
    tab.page.select_option("#look-compare", "checkpoint-1")
    tab.page.uncheck("#look-difference")
    tab.wait_for(two)


def test_generation_is_stepped_through_with_probabilities_at_a_temperature(open_tab):
    tab = open_tab(checkpoint("decoder"), text="the cat")
    tab.page.wait_for_selector(".next tbody tr")
    before = tab.page.locator(".next .value").first.inner_text()
    tab.page.locator("#temperature").focus()
    tab.page.keyboard.press("Home")
    tab.wait_for("(text) => document.querySelector('.next .value').textContent !== text", before)
    token = tab.page.locator(".next tbody button").first
    token.click()
    tab.wait_for("() => new URLSearchParams(location.hash.slice(1)).get('add')")
    tab.page.get_by_role("button", name="Generate").click()
    tab.wait_for("() => new URLSearchParams(location.hash.slice(1)).get('add').split(',').length > 1")
    title = tab.page.inner_text(".nextpanel h3")
    tab.page.locator("canvas.matrix").focus()
    tab.page.keyboard.press("[")
    tab.wait_for("(text) => document.querySelector('.nextpanel h3').textContent !== text", title)


def test_the_svg_is_the_matrix_with_its_tokens_as_text(open_tab, tmp_path):
    shown = checkpoint("encoder")
    tab = open_tab(shown, text=f"the {HOSTILE} cat")
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="SVG").click()
    path = tmp_path / "a.svg"
    download.value.save_as(path)
    root = ElementTree.parse(path).getroot()
    names = {element.tag.split("}")[1] for element in root.iter()}
    assert names == {"svg", "title", "rect", "text"}
    assert any(HOSTILE in (element.text or "") for element in root.iter())
    assert sum(element.tag.endswith("rect") for element in root.iter()) == 4 * 4 + 2
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="PNG").click()
    download.value.save_as(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_everything_is_reached_with_the_keyboard(open_tab):
    tab = open_tab(checkpoint("decoder"), text=TEXT)
    press = tab.page.keyboard.press
    tab.page.locator("body").press("g")
    press("ArrowDown")
    press("ArrowUp")
    press("ArrowRight")
    tab.wait_for("() => new URLSearchParams(location.hash.slice(1)).get('head') === '1'")
    assert tab.state()["attention"] == "decoder.layers.0.attention"
    press("Enter")
    tab.wait_for("() => document.activeElement.classList.contains('matrix')")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        press(key)
    tab.wait_for("() => document.querySelector('.readout').textContent.includes('→')")
    press("Enter")
    tab.page.wait_for_selector(".cell .steps")
    press("r")
    tab.wait_for("() => location.hash.includes('isolate=row')")
    press("v")
    tab.page.wait_for_selector("canvas.lines")
    press("v")
    press("x")
    tab.wait_for("() => location.hash.includes('off=')")
    press("Escape")
    tab.wait_for("() => !location.hash.includes('row=') || !/[#&]row=/.test(location.hash)")
    press("Escape")
    tab.wait_for("() => document.activeElement.classList.contains('grid')")
    press("t")
    tab.page.wait_for_selector(".tables table")
    press("?")
    tab.page.wait_for_selector("dialog[open]")
    press("Escape")
    tab.wait_for("() => !document.querySelector('dialog[open]')")


def test_the_state_is_in_the_address(open_tab):
    tab = open_tab(
        checkpoint("decoder"),
        text=TEXT,
        state=f"attention={NAME}&head=1&row=3&column=2&special=&view=matrix&sort=entropy",
    )
    tab.page.wait_for_selector(".cell .steps")
    before = tab.readout(), tab.page.inner_text(".head h2")
    tab.page.reload()
    tab.page.wait_for_selector(".cell .steps")
    assert (tab.readout(), tab.page.inner_text(".head h2")) == before
    tab.page.get_by_role("button", name="Copy command").click()
    tab.wait_for("() => document.querySelector('#status').textContent.includes('manyheads look model0')")
    assert f"attention={NAME}" in tab.page.inner_text("#status")


def test_thousands_of_tokens_pan_and_zoom(open_tab):
    shown = long_checkpoint()
    length = 8192
    text = " ".join(str(i * i % 23) for i in range(length))
    tab = open_tab(shown, text=text, state="head=1")
    tab.wait_for("() => performance.getEntriesByType('resource').some((one) => /level=[1-9]/.test(one.name))")
    canvas = tab.page.locator("canvas.matrix")
    canvas.focus()
    for _ in range(14):
        tab.page.keyboard.press("+")
    for key in ("ArrowDown", "End"):
        tab.page.keyboard.press(key)
    with record(shown.model) as tape:
        shown.logits(torch.tensor([[i * i % 23 for i in range(length)]]))
    assert tab.readout().startswith("0 → ")
    for _ in range(5):
        tab.page.keyboard.press("Shift+ArrowDown")
    tab.page.keyboard.press("Home")
    value = float(tape.weights("decoder.layers.0.attention", 1, 50, 0)[0])
    expected = f"{value:.6f}" if value >= 1e-4 else f"{value:.4e}".replace("e-0", "e-")
    tab.wait_for("(text) => document.querySelector('.readout').textContent.endsWith(text)", expected)
    box = canvas.bounding_box()
    tab.page.mouse.move(box["x"] + 300, box["y"] + 300)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 150, box["y"] + 150, steps=5)
    tab.page.mouse.up()
    tiles = [url for url in tab.requests if "/look/tile" in url]
    assert len(tiles) < 100  # of 1,365


def test_a_token_that_looks_like_html_is_text(open_tab):
    tab = open_tab(
        checkpoint("decoder"), text=f"the {HOSTILE} cat {HOSTILE}", state="tables=1&row=3&column=2&compare=head"
    )
    all_effects(tab)
    tab.page.wait_for_selector(".cell .steps")
    assert tab.page.locator("img").count() == 0
    assert HOSTILE in tab.page.inner_text(".tables")
    assert HOSTILE[:4] in tab.page.inner_text(".cell")


def test_the_offline_file_works_from_disk_without_a_network(browser, tmp_path):
    shown = checkpoint("decoder")
    html, _ = offline_page(Sessions([shown], ["model"], f"{TEXT} {HOSTILE}"))
    path = tmp_path / "look.html"
    path.write_text(html, encoding="utf-8")
    context = browser.new_context(offline=True, viewport={"width": 1400, "height": 900})
    tab = Tab(context, path.as_uri())
    tab.page.goto(f"{path.as_uri()}#attention={NAME}&head=0&row=4&column=2&tables=1")
    all_effects(tab)
    tab.page.wait_for_selector(".cell .steps")
    value = float(weights_of(shown, NAME, 0, f"{TEXT} {HOSTILE}")[4, 2])
    assert float(tab.readout().split(": ")[-1]) == pytest.approx(value, rel=2e-3, abs=1e-6)
    tab.page.select_option("#look-mode", "rollout")
    tab.page.select_option("#look-view", "lines")
    tab.page.wait_for_selector("canvas.lines")
    tab.page.select_option("#look-compare", "head")
    tab.wait_for("() => document.querySelectorAll('canvas.lines').length === 2")
    assert HOSTILE in tab.page.inner_text(".tables")
    assert tab.page.locator("img").count() == 0
    assert tab.problems == []
    assert tab.outside == []
    context.close()


def test_a_brighter_matrix_shows_small_weights(open_tab):
    tab = open_tab(checkpoint("decoder"), text=TEXT)
    picture = "() => document.querySelector('canvas.matrix').toDataURL()"
    tab.page.locator("canvas.matrix").focus()
    tab.page.keyboard.press("ArrowDown")
    before, readout = tab.page.evaluate(picture), tab.readout()
    tab.page.select_option("#look-gain", "100")
    tab.wait_for(f"(before) => ({picture})() !== before && location.hash.includes('gain=100')", before)
    assert tab.readout() == readout
