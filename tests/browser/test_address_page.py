"""Addresses that nobody's page wrote: what is not allowed in them is left out, and the page shows its default."""

from __future__ import annotations

import pytest
from shown_checkpoints import TEXT, checkpoint

SILENT = [
    "row=-1&column=0", "row=0&column=999", "row=999&column=0", "row=0.5&column=0", "row=0&column=abc", "row=&column=1e1",
    "position=abc", "position=1.5", "position=-3", "position=999", "compare=step", "compare=zzz", "compare=checkpoint-7", "compare=constructor",
    "tab=__proto__", "tab=constructor", "head=abc", "head=-1", "head=99", "compare=head&attention2=zzz&head2=99", "mode=zzz", "mode=toString",
    "view=zzz", "isolate=zzz", "sort=zzz", "gain=abc", "mass=abc", "mass=-1", "temperature=abc", "temperature=0", "add=abc", "add=1.5,-2",
    "off=zzz", "off=decoder.layers.0.attention:abc", "attention=zzz", "step=abc&step2=abc", "tour=zzz", "__proto__=1",
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
