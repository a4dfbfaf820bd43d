"""The tab Model in a real browser: swaps, errors, walks, copies, the keyboard, and names that are text."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from urllib.parse import parse_qs, urlsplit

import kinds
import pytest
from conftest import WAIT
from playwright.sync_api import expect

from manyheads import Checkpoint, build, read, read_model
from manyheads.studio.app import serve
from manyheads.studio.session import Sessions

HOSTILE = "<img src=x onerror=document.title='broken'>"
TITLES = {"gpt2": "GPT-2 small", "llama-7b": "LLaMA 7B"}

expect.set_options(timeout=WAIT)


@pytest.fixture(scope="module")
def address():
    with serve(Sessions([Checkpoint(build(kinds.decoder()).eval())], [HOSTILE])) as address:
        yield address


@pytest.fixture
def page(browser, address):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    context.set_default_timeout(WAIT)
    page, problems = context.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if "Content Security" in message.text else None)
    page.on("request", lambda item: None if item.url.startswith((address, "data:")) else problems.append(item.url))
    yield page
    context.close()
    assert problems == []


def open_model(page, address, **state):
    query = "&".join(f"{key}={value}" for key, value in {"tab": "model", **state}.items())
    page.goto("about:blank")
    page.goto(f"{address}#{query}")
    wait_for_drawing(page)


def wait_for_drawing(page):
    """Waits for the drawing and for its figures, which come after it."""
    page.locator(".model-svg svg").wait_for()
    page.locator(".model-figures:not(.waiting) #model-costs td").first.wait_for()


def parameters(page):
    return int(page.locator("#model-parameters td").nth(1).inner_text().replace(",", ""))


def spec_of(page):
    """The spec that the shown command gives."""
    words = shlex.split(page.locator("#model-command").inner_text())
    return read(words[2], *words[4::2])


def test_a_swap_changes_drawing_figures_and_command_at_once(page, address):
    open_model(page, address, model="transformer-base")
    before, drawn = parameters(page), page.locator(".model-svg").inner_text()
    assert "Positional" in page.locator(".model-svg").text_content()
    page.locator("[id='field-encoder.position']").select_option("rope")
    page.locator("[id='field-decoder.position']").wait_for()
    expect(page.locator("#model-command")).to_contain_text("rope")
    page.locator("[id='field-head']").select_option("untied")
    expect(page.locator("#model-command")).to_contain_text("head=untied")
    expect(page.locator("#model-parameters")).to_contain_text("+18,944,000")
    wait_for_drawing(page)
    assert parameters(page) == before + 37000 * 512
    assert page.locator(".model-svg").inner_text() != drawn
    assert spec_of(page) == read("transformer-base", "encoder.position=rope", "head=untied")
    page.locator("#model-undo").click()
    expect(page.locator("#model-command")).not_to_contain_text("untied")
    page.locator("#model-reset").click()
    expect(page.locator("#model-equal")).to_contain_text("transformer-base")


def test_an_invalid_swap_is_explained_and_changes_nothing(page, address):
    open_model(page, address, model="gpt2")
    drawn, state = page.locator(".model-svg").inner_html(), page.url
    page.locator("[id='field-decoder.attention.heads']").fill("7")
    page.locator("[id='field-decoder.attention.heads']").press("Enter")
    expect(page.locator("#model-error")).to_contain_text("768")
    expect(page.locator("[id='field-decoder.attention.heads']")).to_have_value("12")
    assert (page.locator(".model-svg").inner_html(), page.url) == (drawn, state)
    page.locator("[id='field-decoder.attention.heads']").fill("6")
    page.locator("[id='field-decoder.attention.heads']").press("Enter")
    expect(page.locator("#model-error")).to_be_empty()
    expect(page.locator("#model-command")).to_contain_text("decoder.attention.heads=6")


def test_overrides_that_are_valid_only_together_are_applied_together(page, address):
    open_model(page, address, model="gpt2")
    page.locator("#model-free").fill("decoder.width=96\ndecoder.attention.heads=3")
    page.locator("#model-apply").click()
    expect(page.locator("[id='field-decoder.width']")).to_have_value("96")
    assert spec_of(page) == read("gpt2", "decoder.width=96", "decoder.attention.heads=3")


def test_a_teacher_walks_from_the_2017_transformer_over_gpt2_to_llama(page, address):
    open_model(page, address, model="transformer-base")
    for goal in ("gpt2", "llama-7b"):
        page.locator("#model-goal").select_option(goal)
        expect(page.locator("[aria-label=Steps] h2")).to_have_text(re.compile(f"Step 0 of .* to {TITLES[goal]}"))
        steps = page.locator("#model-steps > li").count() - 1
        for step in range(1, steps + 1):
            page.locator("#model-next").click()
            expect(page.locator("#model-steps > [aria-current=step]")).to_contain_text(f"{step}. ")
            expect(page.locator("#model-error")).to_be_empty()
        expect(page.locator("#model-next")).to_be_disabled()
        expect(page.locator("#model-equal")).to_contain_text(goal)
        assert spec_of(page) == read(goal)
    page.locator("#model-back").click()
    expect(page.locator("#model-equal")).to_be_hidden()
    page.locator("#model-step-0").click()
    expect(page.locator("#model-equal")).to_contain_text("gpt2")


def test_the_state_is_in_the_address(page, address):
    groups = [["decoder.norm=rms"]]
    open_model(page, address, model="gpt2", set=json.dumps(groups), to="llama-7b", walk=2, length=64)
    expect(page.locator("#model-steps > [aria-current=step]")).to_contain_text("2. ")
    assert "of 1 × 64 tokens" in page.locator("#model-costs").inner_text()
    shown = page.locator("#model-command").inner_text()
    page.locator("#model-next").click()
    expect(page.locator("#model-steps > [aria-current=step]")).to_contain_text("3. ")
    assert parse_qs(urlsplit(page.url).fragment)["walk"] == ["3"]
    page.go_back()
    expect(page.locator("#model-command")).to_have_text(shown)
    page.reload()
    wait_for_drawing(page)
    assert page.locator("#model-command").inner_text() == shown


def test_the_command_and_the_toml_are_copied(page, address):
    open_model(page, address, model="gpt2", set='[["decoder.position=rope"]]')
    page.locator("#model-copy-command").click()
    expect(page.locator("#status")).to_contain_text("copied")
    assert page.evaluate("navigator.clipboard.readText()") == "manyheads show gpt2 -s decoder.position=rope"
    page.locator("#model-copy-toml").click()
    expect(page.locator("#status")).to_contain_text("TOML")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert read_model(tomllib.loads(copied)) == read("gpt2", "decoder.position=rope")


def test_the_keyboard_is_enough(page, address):
    open_model(page, address, model="gpt2")
    reached = []
    page.locator("#model-target").focus()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert {"model-copy-toml", "model-copy-command", "model-goal"} <= set(reached)
    page.locator("#model-goal").focus()
    page.keyboard.type("llama-7b")
    page.keyboard.press("Enter")
    expect(page.locator("#model-next")).to_be_enabled()
    page.locator("#model-next").focus()
    for step in (1, 2):
        page.keyboard.press("Enter")
        expect(page.locator("#model-steps > [aria-current=step]")).to_contain_text(f"{step}. ")
    assert page.evaluate("document.activeElement.id") == "model-next", "the focus stays"
    page.locator("[id='field-decoder.residual']").focus()
    page.keyboard.type("post")
    page.keyboard.press("Enter")
    expect(page.locator("#model-command")).to_contain_text("decoder.residual=")
    assert page.evaluate("document.activeElement.id") == "field-decoder.residual"


def test_a_hostile_name_is_text(page, address):
    open_model(page, address)
    assert page.locator("#model-target").evaluate("node => node.selectedOptions[0].textContent") == HOSTILE
    assert HOSTILE in page.locator(".model-svg").text_content()
    assert HOSTILE in shlex.split(page.locator("#model-command").inner_text())
    page.locator("#model-free").fill(f"decoder.position={HOSTILE}")
    page.locator("#model-apply").click()
    expect(page.locator("#model-error")).to_contain_text("img")
    assert page.locator("main img").count() == 0
    assert page.title() == "manyheads"
