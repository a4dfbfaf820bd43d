"""The guided tour in a real browser: its steps set the page, by keyboard, and its numbers are those of the server."""

from __future__ import annotations

from conftest import WAIT
from playwright.sync_api import expect
from shown_checkpoints import TEXT, checkpoint
from tour_checkpoints import tour_checkpoint

from manyheads.studio import tour

expect.set_options(timeout=WAIT)
KEYS = [step.key for step in tour.STEPS]


def arrived(page, key):
    page.locator(f"#tour[data-step='{key}']").wait_for(timeout=WAIT)


def test_every_step_is_reached_by_keyboard_and_shows_its_numbers(open_page):
    shown = tour_checkpoint("decoder")
    page = open_page(shown, text=tour.BIG_TEXT)
    page.locator("canvas.matrix").first.wait_for()
    page.locator("#tour-button").press("Enter")
    for number, step in enumerate(tour.STEPS):
        arrived(page, step.key)
        assert page.inner_text("#tour-title") == f"{number + 1} of {len(KEYS)} · {step.title}"
        expected = step.numbers(shown)
        assert page.locator("#tour-facts li").all_inner_texts() == [fact["text"] for fact in expected["facts"]]
        cells = page.locator("#tour-tables tbody td:not(.sum)").all_inner_texts()
        values = [value for table in expected["tables"] for row in table["values"] for value in row]
        assert cells == [str(int(value)) if value == int(value) else f"{value:.3f}" for value in values]
        for name, value in step.state(shown).items():
            assert page.evaluate("(name) => new URLSearchParams(location.hash.slice(1)).get(name)", name) == value
        page.locator("#tab > *").first.wait_for()
        page.locator("#tour-title").click()
        page.keyboard.press("n")
    page.keyboard.press("p")
    arrived(page, KEYS[-2])
    page.go_back()
    arrived(page, KEYS[-1])
    page.locator("#tour-close").click()
    expect(page.locator("#tour")).to_be_hidden()
    assert page.evaluate("document.activeElement.id") == "tour-button"


def test_a_step_opens_its_cell_in_the_tab_look_and_is_in_the_address(open_page):
    page = open_page(tour_checkpoint("decoder"), tour="big")
    arrived(page, "big")
    page.locator("#tour-next").click()
    arrived(page, "mask")
    page.locator("#tour-back").click()
    arrived(page, "big")
    expect(page.locator("#text")).to_have_value(tour.BIG_TEXT)
    expect(page.locator(".readout")).to_contain_text("dog → big: 0.000000")
    page.reload()
    arrived(page, "big")
    expect(page.locator(".readout")).to_contain_text("dog → big: 0.000000")


def test_the_keys_of_the_tour_leave_typing_alone(open_page):
    page = open_page(tour_checkpoint("decoder"), text=tour.BIG_TEXT, tour="mask")
    arrived(page, "mask")
    page.locator("#text").focus()
    page.keyboard.type("np")
    assert page.locator("#tour[data-step='mask']").count() == 1


def test_steps_that_the_model_cannot_show_are_skipped_and_named(open_page):
    page = open_page(checkpoint("pair"), text=TEXT, tour="mask", compare="text", text2="a cat")
    arrived(page, "mask")
    page.locator("#tour-next").click()
    arrived(page, "cross")
    assert "text2" not in page.url  # nothing of the reader's own comparison is left below a step
    number = page.inner_text("#tour-title").split(" of ")[0]
    assert page.locator("#tour-list option:checked").inner_text().startswith(f"{number}. ")
    assert KEYS[int(number) - 1] == "cross"
    between = KEYS[KEYS.index("mask") + 1 : KEYS.index("cross")]
    assert page.inner_text("#tour-refusal").count("is skipped: the open model reads a source") == len(between)
    assert "attention=decoder.layers.1.cross" in page.url
    skipped = page.locator("#tour-list option:disabled").all_inner_texts()
    assert len(skipped) == 2
    assert all("source" in item for item in skipped)
    page.locator("#tour-list").select_option("order")
    arrived(page, "order")
    expect(page.locator("#tour-refusal")).to_contain_text("source")
    assert page.locator("#tour-facts li").count() == 0
    assert page.locator("#tour-tables table").count() == 2
