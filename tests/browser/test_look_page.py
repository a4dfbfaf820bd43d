"""The tab Look in a real browser."""

from __future__ import annotations

from threading import Event
from xml.etree import ElementTree

import pytest
import torch
from conftest import WAIT, Tab, all_effects
from shown_checkpoints import HOSTILE, TEXT, checkpoint, image_checkpoint, long_checkpoint, weights_of
from small_runs import described, train_all

from manyheads import load
from manyheads.model.recording import record
from manyheads.studio.offline import offline_page
from manyheads.studio.run_checkpoints import find_run_checkpoints
from manyheads.studio.session import Sessions

NAME = "decoder.layers.1.attention"


def cell_position(tab, row, column):
    """Where a cell is on the screen, as long as the whole matrix is shown."""
    canvas = tab.page.locator("canvas.matrix[data-cells]").first
    left, top, scale = map(float, canvas.get_attribute("data-cells").split())
    box = canvas.bounding_box()
    return box["x"] + left + (column + 0.5) * scale, box["y"] + top + (row + 0.5) * scale


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


def test_a_target_is_typed_and_an_empty_one_is_generated(open_tab):
    tab = open_tab(checkpoint("pair"), text=TEXT, state="tables=1")
    rows = "() => [...document.querySelectorAll('.tables table')[0].tBodies[0].rows].map((row) => row.cells[0].textContent).join(' ')"
    tab.page.wait_for_selector(".tables table")
    generated = tab.page.evaluate(rows)
    assert tab.page.get_attribute("#target", "placeholder").endswith(generated.removeprefix("<s> "))
    tab.page.fill("#target", "the dog ran")
    tab.wait_for(f"() => ({rows})() === '<s> the dog ran'")
    assert tab.state()["target"] == "the dog ran"
    tab.page.reload()
    tab.page.wait_for_selector(".tables table")
    tab.wait_for(f"() => ({rows})() === '<s> the dog ran'")
    tab.page.locator(".next tbody button").first.click()  # tokens that are appended replace the field
    tab.wait_for(f"() => ({rows})().startsWith('<s> the dog ran ')")
    assert "target" not in tab.state()
    tab.page.get_by_role("button", name="Clear").click()
    tab.wait_for(f"(text) => ({rows})() === text", generated)


def test_a_model_without_a_source_has_no_target(open_tab):
    assert open_tab(checkpoint("decoder"), text=TEXT).page.locator("#target").is_hidden()


def test_hovering_a_cell_gives_both_tokens_and_the_exact_number(open_tab):
    shown = checkpoint("decoder")
    tab = open_tab(shown, text=TEXT, state=f"attention={NAME}&head=1")
    weights = weights_of(shown, NAME, 1)
    for row, column in ((4, 2), (8, 8), (3, 7)):
        tab.page.mouse.move(*cell_position(tab, row, column))
        tokens = shown.encode([TEXT])[0].tokens
        expected = f"{tokens[row]} → {tokens[column]}: {float(weights[row, column]):.6f}"
        tab.wait_for("(text) => document.querySelector('.readout').textContent === text", expected)


def test_a_click_locks_a_cell_and_escape_releases_it(open_tab):
    shown = checkpoint("decoder")
    tab = open_tab(shown, text=TEXT, state=f"attention={NAME}&head=0")
    tab.page.mouse.click(*cell_position(tab, 5, 2))
    tab.page.wait_for_selector(".cell .steps")
    assert tab.state()["row"] == "5"
    locked = tab.readout()
    tab.page.mouse.move(*cell_position(tab, 8, 1))
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
    png = (tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    box = tab.page.locator("canvas.matrix").bounding_box()
    assert int.from_bytes(png[16:20], "big") == 2 * box["width"]


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


def pixel(tab, patch, at=0.5):
    """The color of a patch of the picture, in its middle or near its border."""
    return tab.page.evaluate(
        """([row, column, at]) => {
            const canvas = document.querySelector("canvas.picture");
            const step = canvas.width / 4;
            const [x, y] = [Math.round((column + 0.5) * step), Math.round((row + at) * step)];
            return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3);
        }""",
        [*patch, at],
    )


def test_a_picture_shows_the_patches_of_the_query_and_the_key(open_tab):
    tab = open_tab(image_checkpoint(), text=" ".join(["0"] * 32 + ["1"] * 32))
    picture = tab.page.locator("canvas.picture")
    tab.wait_for("() => document.querySelector('canvas.picture').getAttribute('aria-label').includes('4 × 4 patches')")
    tab.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert [pixel(tab, patch) for patch in ((0, 1), (3, 1))] == [[0, 0, 0], [255, 255, 255]]
    plain = pixel(tab, (1, 2), at=0.02)
    tab.page.mouse.move(*cell_position(tab, 7, 12))  # after the class token: patches 6 and 11
    tab.wait_for("() => document.querySelector('.picturepanel p').textContent.includes('the query, r2c3')")
    assert "the key, r3c4" in tab.page.inner_text(".picturepanel p")
    tab.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    red, _, blue = pixel(tab, (1, 2), at=0.02)
    assert red > blue
    assert [red, blue] != plain[::2]
    red, _, blue = pixel(tab, (2, 3), at=0.02)
    assert blue > red
    red, _, blue = pixel(tab, (0, 1))  # a black patch with the weight of the row over it
    assert blue > red
    box = picture.bounding_box()
    tab.page.mouse.click(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.1)
    tab.page.wait_for_selector(".cell .steps")
    assert tab.state()["row"] == "4"  # r1c4
    assert tab.readout().startswith("locked: r1c4 → ")


def test_a_slider_moves_over_the_checkpoints_of_a_run(open_tab, tmp_path):
    train_all(described("causal", save_every=1, keep_last=9), tmp_path)
    initial = load(tmp_path)
    steps = find_run_checkpoints(str(tmp_path), initial, load)
    last = steps.numbers[-1]
    assert steps.initial == len(steps.numbers) - 1
    name = "decoder.layers.0.attention"
    tab = open_tab(initial, text="a b c", steps=steps, state=f"attention={name}&head=1&row=2&column=1")
    chosen = "(text) => document.querySelector('.readout')?.textContent.endsWith(text)"

    def expected(number):
        shown = load(tmp_path / "checkpoints" / f"step-{number:08}")
        return f"{float(weights_of(shown, name, 1, 'a b c')[2, 1]):.6f}"

    tab.wait_for(chosen, expected(last))
    tab.page.locator("#step").focus()
    tab.page.keyboard.press("Home")
    tab.wait_for("() => location.hash.includes('step=1')")
    tab.wait_for(chosen, expected(1))
    assert tab.page.inner_text(".texts .steps-slider output") == f"1 of {last}"
    assert (tab.state()["row"], tab.state()["head"], tab.state()["text"]) == ("2", "1", "a b c")
    tab.page.reload()
    tab.page.wait_for_selector(".cell .steps")
    tab.wait_for(chosen, expected(1))
    tab.page.get_by_role("tab", name="Model").click()
    tab.page.select_option("#model-goal", "gpt2")
    tab.page.locator("#model-steps li").nth(2).wait_for()
    tab.page.locator("#model-steps button").nth(2).click()
    tab.wait_for("() => location.hash.includes('walk=')")
    tab.page.get_by_role("tab", name="Look").click()
    tab.wait_for(chosen, expected(1))  # a step of the walk is no step of training
    tab.page.get_by_role("button", name="Copy command").click()
    tab.wait_for("() => /--state .*step=1/.test(document.querySelector('#status').textContent)")
    tab.page.select_option("#look-compare", "step")
    tab.page.locator("#step2").focus()
    for number in range(2, 6):  # more than are kept
        tab.page.keyboard.press("ArrowRight")
        tab.wait_for(chosen, f"{expected(1)} · second: {expected(number)}")
    assert tab.state()["step2"] == "5"
    tab.page.locator("#step").focus()
    tab.page.keyboard.press("End")
    tab.wait_for(chosen, f"{expected(last)} · second: {expected(5)}")
    assert "step" not in tab.state()
    assert all(str(tmp_path) not in url for url in tab.requests)


def test_a_single_checkpoint_has_no_slider(open_tab):
    tab = open_tab(checkpoint("decoder"), text=TEXT)
    assert tab.page.locator("#step").count() == 0
    assert tab.page.locator("#look-compare option[value=step]").count() == 0


LEAVING = {"close": lambda page: page.close(run_before_unload=True), "leave": lambda page: page.goto("about:blank")}


@pytest.mark.parametrize("way", LEAVING)
def test_the_server_frees_what_a_tab_held_when_it_is_closed_or_left(open_tab, way):
    tab, closed = open_tab(checkpoint("decoder"), text=TEXT), Event()
    all_effects(tab)
    assert len(tab.sessions) == 1
    close = tab.sessions.close
    tab.sessions.close = lambda key: (close(key), closed.set())
    LEAVING[way](tab.page)
    assert closed.wait(WAIT / 1000)
    assert len(tab.sessions) == 0


def test_a_model_of_texts_has_no_picture(open_tab):
    assert open_tab(checkpoint("decoder"), text=TEXT).page.locator(".picturepanel").is_hidden()
