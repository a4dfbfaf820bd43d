"""Writes the pictures of the demo's model: `make pictures`, or `python docs/pictures.py [RUN] [FOLDER]` after a demo.

The page is opened in a headless Chromium, the system's or playwright's. docs/pictures/mnist.png is of another model;
docs/recipes.md says how it is made.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from urllib.parse import urlencode

import torch
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from manyheads import Checkpoint, load
from manyheads.studio import forward
from manyheads.studio.app import serve
from manyheads.studio.session import MAX_BYTES, Sessions

FOLDER = Path(__file__).parent / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
MARGIN = 8  # pixels
WAIT = 120_000  # milliseconds; a busy machine is slow
COLORS = 128  # which makes a picture a third as large
MAX_PICTURE = 150_000  # bytes
DATE = "25 December 2031"
DATES = ("luni, 29 septembrie 1975", "śr., 5 mar 2087")
HEAD = {"text": DATE, "attention": "decoder.layers.1.cross", "head": "0"}
# a picture, the state of the page, what is waited for, and the element that is shown
VIEWS = (
    ("look-grid", HEAD, "canvas.grid", "section.heads"),
    ("look-head", HEAD, "canvas.matrix", "section.head"),
    ("look-cell", HEAD | {"row": "5", "column": "2"}, ".cell .steps", "section.cell"),
    ("model", {"tab": "model"}, "main svg", "main"),
)


def write_page_pictures(checkpoint: Checkpoint, folder: Path) -> None:
    """One picture per view of the page."""
    with sync_playwright() as playwright, serve(Sessions([checkpoint], ["runs/dates"], DATE)) as address:
        found = next(filter(None, map(shutil.which, BROWSERS)), playwright.chromium.executable_path)
        browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        for name, state, ready, shown in VIEWS:
            # a new context, because a change of the state alone would not load the page again
            page = browser.new_context(viewport={"width": 1200, "height": 1040}, color_scheme="light").new_page()
            page.set_default_timeout(WAIT)
            page.goto(f"{address}#{urlencode(state)}")
            page.wait_for_selector(ready)
            page.wait_for_load_state("networkidle")  # the effects of heads come one by one
            write_picture(page, shown, folder / f"{name}.png")
            page.context.close()
        browser.close()


def write_picture(page: Page, shown: str, path: Path) -> None:
    """The part of the window with the element, and a margin."""
    box, window = page.locator(shown).first.bounding_box(), page.viewport_size
    assert box is not None, f"{shown} is not visible"
    assert window is not None
    left, top = max(0, box["x"] - MARGIN), max(0, box["y"] - MARGIN)
    right = min(window["width"], box["x"] + box["width"] + MARGIN)
    bottom = min(window["height"], box["y"] + box["height"] + MARGIN)
    data = page.screenshot(clip={"x": left, "y": top, "width": right - left, "height": bottom - top})
    Image.open(io.BytesIO(data)).convert("RGB").quantize(COLORS).save(path, optimize=True)


def write_dates_figure(checkpoint: Checkpoint, path: Path) -> None:
    """The last cross-attention of two dates side by side, as the mean over heads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12)
    for axes, date in zip(figure.subplots(1, len(DATES)), DATES, strict=True):
        texts = forward.read(checkpoint, forward.ForwardRequest(date))
        tape, _ = forward.forward(checkpoint, texts, (), MAX_BYTES)
        weights_LM = tape.weights("decoder.layers.1.cross")[0].mean(dim=0)
        generated = texts["target"].tokens[1:]
        axes.imshow(torch.as_tensor(weights_LM), cmap="Blues", vmin=0, vmax=1)
        columns, rows = texts["source"].tokens, [*generated, "</s>"]
        axes.set_xticks(range(len(columns)), [name.strip() for name in columns], rotation=45, ha="right")
        axes.set_yticks(range(len(rows)), rows)
        axes.set(title=f"{date} → {''.join(generated)}", xlabel="input token", ylabel="generated token")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=100)


def main(run: str = "runs/dates", folder: str = str(FOLDER)) -> None:
    checkpoint, target = load(run), Path(folder)
    target.mkdir(exist_ok=True)
    write_dates_figure(checkpoint, target / "dates.png")
    write_page_pictures(checkpoint, target)
    for path in (target / f"{name}.png" for name in ("dates", *(name for name, *_ in VIEWS))):
        size = path.stat().st_size
        print(f"{path} {size:,} bytes")
        assert size < MAX_PICTURE, f"{path} is too large for a page"


if __name__ == "__main__":
    main(*sys.argv[1:])
