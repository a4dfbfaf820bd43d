"""How quick the page is, in a real Chromium: the grid of a large model after its forward pass, and an edit of the text.

    python bench/page.py [--quick] [--repeats 5] [--length 1024] [--run runs/dates] [--json]

The first has the shape of GPT-2 small with random weights: seconds from the end of its forward pass to the frame with
all thumbnails. The second is the demo's model: milliseconds from an edit to the frame with the new thumbnails and the
new matrix, with everything between them, generation too. Needs the system's Chromium or playwright's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Browser, Page, sync_playwright

from manyheads import Checkpoint, build, load, read
from manyheads.studio import forward
from manyheads.studio.app import serve
from manyheads.studio.session import Sessions

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
WAIT = 300_000  # milliseconds
VIEWPORT: Any = {"width": 1400, "height": 900}
# the end of the frame that draws the thumbnails, and the last tile; and how many effects have arrived
WATCH = """
window.seen = { painted: [], tile: 0, effects: 0 };
const frame = (note) => requestAnimationFrame(() => setTimeout(() => note(performance.now())));
new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) {
        if (entry.name === "look-painted") frame((now) => window.seen.painted.push(now));
        if (entry.name.includes("/look/tile")) frame((now) => { window.seen.tile = now; });
        if (entry.name.includes("/look/effect")) window.seen.effects++;
    }
}).observe({ entryTypes: ["measure", "resource"] });
"""
EDIT = """(text) => {
    const field = document.getElementById("text");
    field.value = text;
    field.dispatchEvent(new Event("input", { bubbles: true }));
    return performance.now();
}"""
DATES = [f"{day} December 2031" for day in range(10, 29)]


def open_page(browser: Browser, address: str) -> Page:
    page = browser.new_context(viewport=VIEWPORT).new_page()
    page.set_default_timeout(WAIT)
    page.add_init_script(WATCH)
    page.goto(address)
    return page


def paint_seconds(browser: Browser, length: int, repeats: int) -> list[float]:
    """From the end of the forward pass to the painted grid, in a new page each time."""
    text = " ".join(map(str, torch.randint(0, 50257, (length,)).tolist()))
    ends, run = [], forward.forward

    def timed(*arguments: Any) -> Any:
        result = run(*arguments)
        ends.append(time.time())
        return result

    seconds: list[float] = []
    forward.forward = timed  # type: ignore[assignment]
    try:
        with serve(Sessions([Checkpoint(build(read("gpt2")).eval())], ["gpt2"], text)) as address:
            for _ in range(1 + repeats):  # the first is not counted
                page = open_page(browser, address)
                page.wait_for_function("() => window.seen.painted.length === 1")
                painted = page.evaluate("() => (performance.timeOrigin + window.seen.painted[0]) / 1000")
                seconds.append(painted - ends[-1])
                page.context.close()
    finally:
        forward.forward = run
    return seconds[1:]


def edit_milliseconds(browser: Browser, checkpoint: Checkpoint, repeats: int) -> list[float]:
    """From an edit of the text to the redrawn grid and matrix, after the effects of all heads have arrived."""
    milliseconds = []
    with serve(Sessions([checkpoint], ["demo"], DATES[0])) as address:
        page = open_page(browser, address)
        page.wait_for_selector("[data-effects=all]")
        heads = page.evaluate("() => window.seen.effects")
        for number in range(1, 2 + repeats):
            start = page.evaluate(EDIT, DATES[number % len(DATES)])
            page.wait_for_function(
                "([start, count]) => window.seen.painted.length > count && window.seen.tile > start",
                arg=[start, number],
            )
            page.wait_for_function("(count) => window.seen.effects >= count", arg=heads * (number + 1))
            painted, tile = page.evaluate("() => [window.seen.painted.at(-1), window.seen.tile]")
            milliseconds.append(max(painted, tile) - start)
        page.context.close()
    return milliseconds[1:]  # the first is not counted


def describe(values: Sequence[float], unit: str, digits: int) -> str:
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:,.{digits}f} {unit} ({low:,.{digits}f} to {high:,.{digits}f}, {len(values)} times)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the large model")
    parser.add_argument(
        "--run", type=Path, default=Path("runs/dates"), help="the demo's run; left out if there is none"
    )
    parser.add_argument("--quick", action="store_true", help="64 tokens and two runs, to see that it works")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the lines")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.length = 2, 64
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), playwright.chromium.executable_path)
        browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        edits = edit_milliseconds(browser, load(options.run), options.repeats) if options.run.is_dir() else []
        paints = paint_seconds(browser, options.length, options.repeats)
        browser.close()
    if options.json:
        print(json.dumps({"length": options.length, "paint_seconds": paints, "edit_milliseconds": edits}))
        return
    print(f"12 × 12 heads, {options.length:,} tokens, forward pass to painted grid: {describe(paints, 's', 2)}")
    edited = describe(edits, "ms", 0) if edits else f"no run {options.run}; make demo trains it"
    print(f"the demo's model, edit to redrawn page: {edited}")


if __name__ == "__main__":
    main()
