"""Addresses that nobody's page wrote: what is not allowed in them is left out, and the page shows its default."""

from __future__ import annotations

import pytest
from shown_checkpoints import TEXT, checkpoint

SILENT = [
    "row=-1&column=0", "row=0&column=999", "row=999&column=0", "row=0.5&column=0", "row=0&column=abc", "row=&column=1e1",
    "position=abc", "position=1.5", "position=-3", "position=999", "compare=step", "compare=zzz", "compare=checkpoint-7", "compare=constructor",
    "tab=__proto__", "tab=constructor", "head=abc", "head=-1", "head=99", "compare=head&attention2=zzz&head2=99", "mode=zzz", "mode=toString",
    "view=zzz", "isolate=zzz", "sort=zzz", "gain=abc", "mass=abc", "mass=-1", "temperature=abc", "temperature=0", "add=abc", "add=1.5,-2",
    "attention=zzz", "step=abc&step2=abc", "tour=zzz", "__proto__=1",
]  # fmt: skip
WRONG = ("undefined", "Cannot read", "NaN", "null", "not a function")


def opened(tab, state):
    """Loads the page again, at another address."""
    tab.page.goto(f"{tab.page.url.split('#')[0]}#{state}")
    tab.page.reload()
    tab.page.wait_for_selector("[data-effects=all]")
    tab.page.wait_for_selector(".next tbody tr")


def test_what_an_address_may_not_ask_for_is_left_out_silently(open_tab):
    tab = open_tab(checkpoint("decoder"), text=TEXT)
    for state in SILENT:
        opened(tab, state)
        assert tab.page.inner_text("#status") == "", state
        title = tab.page.inner_text(".head h2")
        assert "layer 1 · " in title, state
        texts = [
            title,
            tab.readout(),
            tab.page.inner_text(".nextpanel"),
            tab.page.inner_text(".cell"),
            tab.page.inner_text(".controls"),
        ]
        assert [item for item in WRONG if any(item in text for text in texts)] == [], state
        assert "locked" not in tab.readout(), state
        assert tab.page.input_value("#look-mode") == "head", state


@pytest.mark.parametrize("index", ["99", "-1", "abc", "0.5"])
def test_an_unknown_checkpoint_is_named_and_the_first_one_is_shown(open_tab, index):
    tab = open_tab(checkpoint("decoder"), text=TEXT, state=f"checkpoint={index}")
    tab.page.wait_for_selector("[data-effects=all]")
    assert tab.page.inner_text("#status") == f"There is no checkpoint {index}; checkpoint 0 is shown."
    assert "layer 1 · head 0" in tab.page.inner_text(".head h2")


@pytest.mark.parametrize("head", ["zzz", "zzz:0", "decoder.layers.0.attention:abc", "decoder.layers.0.attention:9"])
def test_an_unknown_head_to_switch_off_is_named_and_no_request_asks_for_it(open_tab, head):
    known = "decoder.layers.1.attention:0"
    tab = open_tab(checkpoint("decoder"), text=TEXT, state=f"off={head},{known}&compare=off")
    tab.page.wait_for_selector("[data-effects=all]")
    assert tab.page.inner_text("#status") == f"There is no head {head} to switch off."
    assert "1 head off" in tab.page.inner_text(".head h2")
    tab.page.wait_for_selector(".next tbody tr")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"tab": "field", "output": "abc"}, "There is no position abc; the last one is shown."),
        ({"tab": "field", "output": "-1"}, "There is no position -1; the last one is shown."),
        ({"tab": "probe", "probe": "position", "window": "abc"}, "A window has 2 to 64 tokens, not abc; it has 8."),
        ({"tab": "probe", "probe": "position", "window": "1"}, "A window has 2 to 64 tokens, not 1; it has 8."),
        ({"tab": "probe", "probe": "zzz"}, "There is no label zzz; positions are probed."),
        ({"tab": "probe", "probe": "next", "windows": "zzz"}, "There are no windows of zzz."),
    ],
)
def test_a_wrong_field_of_another_tab_is_named_and_its_default_is_shown(open_page, state, message):
    page = open_page(checkpoint("decoder"), text=TEXT, **state)
    page.locator({"field": "#field-grid", "probe": "#probe-result table"}[state["tab"]]).wait_for()
    assert page.inner_text(f"#{state['tab']}-error") == message
