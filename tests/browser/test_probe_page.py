"""The tab Probe in a real browser: numbers of the library arrive layer by layer, by keyboard alone, and refusals are shown."""

from __future__ import annotations

import re
from functools import partial

import pytest
from conftest import WAIT
from playwright.sync_api import expect
from shown_checkpoints import HOSTILE, checkpoint

from manyheads.inspect.probe import position, probe

TEXT = "the cat sat on a mat . a dog ran un ##known " * 8  # 24 windows of 4 tokens

expect.set_options(timeout=WAIT)


@pytest.fixture
def open_probe(open_page):
    return partial(open_page, name=HOSTILE, text=TEXT, tab="probe")


def finished(page, layers):
    page.locator(f"#probe-result[data-layers='{layers}']").wait_for(timeout=WAIT)


def percent(share):
    return f"{100 * share:.1f} %"


def expected_rows(shown):
    ids = shown.tokenizer.encode(TEXT, add_special_tokens=False).ids
    report = probe(shown.model, [ids[i : i + 4] for i in range(0, len(ids), 4)], position)
    rows = [
        [
            "embeddings" if layer.name.endswith("embed") else f"layer {i - 1}", percent(layer.accuracy),
            " to ".join(map(percent, layer.interval)), percent(report.chance), percent(layer.shuffled),
            percent(layer.untrained), f"{layer.mean_distance:.2f}",
        ]
        for i, layer in enumerate(report.layers)
    ]  # fmt: skip
    return rows, report


def test_the_keyboard_fits_probes_and_the_numbers_are_the_librarys(open_probe):
    shown = checkpoint("decoder")
    page = open_probe(shown)
    page.locator("#probe-length").fill("4")
    page.locator("#probe-length").press("Enter")
    finished(page, 3)
    rows, report = expected_rows(shown)
    cells = page.locator("#probe-result tbody tr").all()
    assert [row.locator("th, td").all_inner_texts() for row in cells] == rows
    assert report.weights_hash[:12] in page.inner_text("#probe-hash")
    assert page.locator("#probe-hash.probe-good").count() == 1
    heights = [float(bar.get_attribute("height")) for bar in page.locator("[role=img] .bar").all()]
    assert heights == pytest.approx([194 * layer.accuracy for layer in report.layers])
    assert page.locator("[role=img] .chance").count() == 1
    state = page.url
    assert "probe=position" in state
    assert "window=4" in state
    page.reload()
    finished(page, 3)
    assert [row.locator("th, td").all_inner_texts() for row in page.locator("#probe-result tbody tr").all()] == rows


def test_leaving_the_tab_ends_the_requests(open_probe):
    page, requests = open_probe(checkpoint("decoder")), []
    page.locator("#probe-text").wait_for()
    page.on("request", lambda item: requests.append(item.url))
    page.locator("#probe-start").click()
    page.locator("#probe-source").wait_for(timeout=WAIT)
    page.locator("#tab-model").click()
    page.locator("#model-target").wait_for(timeout=WAIT)
    page.wait_for_load_state("networkidle")
    assert len([request for request in requests if "probe/layer" in request]) < 3
    page.locator("#tab-probe").click()
    finished(page, 3)


def test_a_model_that_cannot_be_probed_and_a_short_text_are_explained(open_probe):
    page = open_probe(checkpoint("pair"), probe="position")
    expect(page.locator("#probe-error")).to_contain_text("one stack")
    page = open_probe(checkpoint("decoder"), probe="position", window="60", windows="text")
    expect(page.locator("#probe-error")).to_contain_text(re.compile("20"))
    page.locator("#probe-windows").select_option("random")
    page.locator("#probe-start").click()
    expect(page.locator("#probe-source")).to_contain_text("random ids")
    assert page.locator("main img").count() == 0
