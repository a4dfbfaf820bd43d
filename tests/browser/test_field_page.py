"""The tab Receptive field in a real browser: sets of the library, the keyboard, the tree of pointers, and refusals."""

from __future__ import annotations

import kinds
from conftest import WAIT
from playwright.sync_api import expect
from shown_checkpoints import HOSTILE, TEXT, checkpoint

from manyheads.inspect.measure import receptive_field
from manyheads.studio.field import FieldRequest, measure_field, replacements_of

expect.set_options(timeout=WAIT)


def shown_field(page, row):
    """The positions that a row of the grid shows as changing the output."""
    cells = page.locator("#field-grid tbody tr").nth(row).locator("td").all()
    return [i for i, cell in enumerate(cells) if "changes" in cell.get_attribute("class").split()]


def test_a_token_chosen_by_keyboard_has_the_field_of_the_library(open_page):
    shown = checkpoint("decoder")
    page = open_page(shown, text=TEXT, tab="field")
    ids = shown.encode([TEXT])[0].ids
    page.locator("#field-result[data-position]").wait_for()
    page.locator("#field-grid [aria-pressed=true]").focus()
    for position in (len(ids) - 2, len(ids) - 3):
        page.keyboard.press("ArrowLeft")
        page.locator(f"#field-result[data-position='{position}']").wait_for()
        expected = receptive_field(shown.model, ids, position, replacements=replacements_of(shown))
        assert shown_field(page, 0) == sorted(expected)
        assert page.evaluate("document.activeElement.dataset.position") == str(position), "the focus follows"
    page.locator("#field-grid button").nth(2).click()
    page.locator("#field-result[data-position='2']").wait_for()
    assert "output=2" in page.url
    assert shown_field(page, 0) == [0, 1, 2]
    assert shown_field(page, 2) == [2], "the embeddings"
    assert "3 of 11 tokens" in page.inner_text("#field-summary")
    page.reload()
    page.locator("#field-result[data-position='2']").wait_for()
    assert shown_field(page, 0) == [0, 1, 2]


def test_argmax_heads_have_their_tree_and_the_formula(open_page):
    shown = checkpoint(spec=kinds.decoder(core="argmax", layers=2))
    page = open_page(shown, text=TEXT, tab="field")
    page.locator(".field-tree").wait_for()
    answer = measure_field(shown, FieldRequest(session="", text=TEXT))
    pointers = sum(len(keys) for level in answer["tree"] for _, keys in level)
    assert page.locator(".field-tree .pointer").count() == pointers
    reached = sum(len(level) for level in answer["tree"]) + len(answer["depths"][-1]["pointers"])
    assert page.locator(".field-tree .reached").count() == reached
    assert "(2 + 1)^2 = 9" in page.inner_text("#field-summary")
    rows = page.locator("#field-result table.data tbody tr").all()
    for row, depth in zip(rows, answer["depths"], strict=True):
        numbers = [len(depth[key]) for key in ("measured", "visible", "pointers")] + [depth["formula"], depth["bound"]]
        assert row.locator("td").all_inner_texts() == [str(number) for number in numbers]


def test_a_model_with_two_stacks_and_a_long_text_are_explained_and_tokens_are_text(open_page):
    page = open_page(checkpoint("pair"), text=TEXT, tab="field")
    expect(page.locator("#field-error")).to_contain_text("one stack")
    page = open_page(checkpoint("rope"), text=f"the {HOSTILE}", tab="field")
    expect(page.locator("#field-grid button").nth(2)).to_contain_text("<img")
    assert page.locator("main img").count() == 0
    page.locator("#field-text").fill("the " * 80)
    page.locator("#field-text").press("Enter")
    expect(page.locator("#field-error")).to_contain_text("64")
    assert page.locator("#field-grid").count() == 0
    page.locator("#field-text").fill("the cat")
    page.locator("#field-text").press("Enter")
    expect(page.locator("#field-grid button")).to_have_count(3)
    expect(page.locator("#field-error")).to_be_empty()
