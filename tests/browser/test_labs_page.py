"""The page of findings in a real browser, from its file: nothing from elsewhere, no overflow on a phone, light and dark."""

from __future__ import annotations

import pytest
from conftest import Tab

from manyheads.labs.figures import Bars, Heatmap, Lines, Table
from manyheads.labs.finding import Finding, at_most, is_true
from manyheads.labs.lab import Lab, LabRun, all_labs, run_lab
from manyheads.labs.results import LabError
from manyheads.labs.views.page_html import report_html

LONG = "a_very_long_name_without_any_space_" * 5


def wide_claim(*, seed: int = 0) -> Finding:
    """A claim with a long word: an_expression_that_no_browser_can_break_at_a_space_because_it_has_none_in_it.

    A formula that is long: softmax(q·k/√d)·v = Σᵢ exp(q·kᵢ/√d)·vᵢ / Σⱼ exp(q·kⱼ/√d).
    """
    figures = (
        Table("Wide", [f"column {i}" for i in range(12)], [[LONG[:20]] * 12]),
        Bars(LONG, "score", {LONG: 0.5, "b": 0.25}, {"b": 0.1}, {"chance": 0.1}),
        Lines("Curves", "x", "y", {LONG[:60]: [(1, 2), (2, 3)], "b": [(1, 1)]}, {"level": 2.5}),
        Heatmap("Matrix", [[0.5, None]] * 2, [LONG[:30], "b"], ["c", LONG[:30]]),
    )
    return Finding((at_most(LONG, 1.0, 0.5), is_true("x", True)), figures, correction=LONG, note="a note")


def outcomes():
    lab = Lab(wide_claim, "attention", rows=("A1",), errata=("E8",))
    failed = LabRun(lab, "quick", 0, {}, wide_claim(), 1.0)
    return [run_lab(all_labs()["copying"]), failed, LabError(Lab(wide_claim, "mine"), LONG)]


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_offline_and_never_scrolls_sideways(browser, tmp_path, width, scheme):
    path = tmp_path / "labs.html"
    path.write_text(report_html(outcomes(), {"command": f"`manyheads lab run {LONG}`"}, has_all=True), encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    tab = Tab(context, path.as_uri())
    tab.page.goto(path.as_uri())
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    background = "getComputedStyle(document.querySelector('.mh-labs')).backgroundColor"
    assert tab.page.evaluate(background) == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 27)"}[scheme]
    assert "✗ fails" in tab.page.inner_text("#lab-wide-claim .badge")
    tab.page.click("nav a[href='#errata']")
    assert tab.page.locator("#errata article").count() == 16
    for figure in tab.page.locator("figure svg").all():
        assert figure.bounding_box()["height"] > 80
    context.close()
    assert tab.problems == []
    assert tab.outside == []
