"""Writes a picture of each view of the page: `make pictures`, or `python docs/pictures.py [RUN] [FOLDER]` after a demo.

The page is opened in a headless Chromium, the system's or playwright's, on the demo's model and on a small decoder that
is trained first, in half a minute. docs/pictures/mnist.png is of another model; docs/recipes.md says how it is made.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

import torch
from PIL import Image, ImageChops, ImageOps
from playwright.sync_api import Browser, Page, sync_playwright

from manyheads import Checkpoint, build, load, read_model, train
from manyheads.studio import forward
from manyheads.studio.app import serve
from manyheads.studio.run_checkpoints import find_run_checkpoints
from manyheads.studio.session import MAX_BYTES, Sessions
from manyheads.training.run import read_run

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
View = tuple[str, dict[str, str], str, str]
# a picture, the state of the page, what is waited for, and the element that is shown
DATES_VIEWS: Sequence[View] = (
    ("look-grid", HEAD, "canvas.grid", "section.heads"),
    ("look-head", HEAD, "canvas.matrix", "section.head"),
    ("look-cell", HEAD | {"row": "5", "column": "2"}, ".cell .steps", "section.cell"),
    ("model", {"tab": "model"}, "main svg", "#tab"),
    ("tour", {"text": DATE, "tour": "mask"}, "#tour table", "#tour"),
)
PEOPLE_RUN: dict[str, Any] = {
    "seed": 1,
    "model": {
        "vocab": "tokenizer",
        "decoder": {
            "layers": 3,
            "width": 64,
            "attention": {"kind": "heads", "heads": 4},
            "position": "none",
            "feedforward": {"kind": "mlp", "hidden": 256},
            "residual": "pre",
        },
    },
    "data": {"kind": "biographies", "people": 200},
    "tokenizer": {"kind": "words"},
    "task": {"kind": "causal"},
    "optim": {"lr": 3e-3},
    "train": {"steps": 240, "batch_tokens": 2048, "eval_every": 240, "save_every": 30, "keep_last": 8},
}
PERSON = "Poustu Bababe was born in Zeipouville. By trade Poustu Bababe was a potter."
STEPS = {"compare": "step", "step2": "30"}
PROBE = {"tab": "probe", "probe": "next", "windows": "text", "window": "8"}


def people_views(texts: str) -> Sequence[View]:
    """Those of the run on invented people, and of the same model with argmax heads, which is checkpoint 1."""
    return (
        ("look-steps", STEPS | {"text": PERSON}, "[data-effects=all]", "#tab"),
        ("probe", PROBE | {"text": texts}, "#probe-result[data-layers='4']", "#tab"),
        ("field", {"tab": "field", "text": PERSON, "checkpoint": "1"}, ".field-tree", "#field-result"),
    )


def write_dates_pictures(browser: Browser, checkpoint: Checkpoint, folder: Path) -> list[Path]:
    return write_views(browser, Sessions([checkpoint], ["runs/dates"], DATE), DATES_VIEWS, folder)


def write_people_pictures(browser: Browser, folder: Path) -> list[Path]:
    """Trains the run, for a slider over its checkpoints."""
    with TemporaryDirectory() as run:
        train(PEOPLE_RUN, run)
        checkpoint = load(run)
        torch.manual_seed(0)
        decoder = PEOPLE_RUN["model"]["decoder"] | {"core": "argmax", "attention": {"kind": "heads", "heads": 2}}
        argmax = build(read_model({"vocab": checkpoint.spec.vocab, "decoder": decoder})).eval()
        shown, names = [checkpoint, replace(checkpoint, model=argmax)], ["runs/people", "argmax"]
        sessions = Sessions(shown, names, PERSON, find_run_checkpoints(run, checkpoint, load))
        rows = read_run(PEOPLE_RUN).data.load().validation
        return write_views(browser, sessions, people_views(" ".join(text for (text,) in rows[:40])), folder)


def write_views(browser: Browser, sessions: Sessions, views: Sequence[View], folder: Path) -> list[Path]:
    """One picture per view of the page."""
    paths = []
    with serve(sessions) as address:
        for name, state, ready, shown in views:
            # a new context, because a change of the state alone would not load the page again
            page = browser.new_context(viewport={"width": 1200, "height": 1040}, color_scheme="light").new_page()
            page.set_default_timeout(WAIT)
            page.goto(f"{address}#{urlencode(state)}")
            page.wait_for_selector(ready)
            page.wait_for_load_state("networkidle")  # the effects of heads come one by one
            paths.append(folder / f"{name}.png")
            write_picture(page, shown, paths[-1])
            page.context.close()
    return paths


def write_picture(page: Page, shown: str, path: Path) -> None:
    """The part of the window with the element, without the empty space around its content, and a margin."""
    box, window = page.locator(shown).first.bounding_box(), page.viewport_size
    assert box is not None, f"{shown} is not visible"
    assert window is not None
    left, top = round(box["x"]), round(box["y"])
    right = min(window["width"], ceil(box["x"] + box["width"]))
    bottom = min(window["height"], ceil(box["y"] + box["height"]))
    clip: Any = {"x": left, "y": top, "width": right - left, "height": bottom - top}
    image = Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")
    paper = image.getpixel((0, 0))
    content = ImageChops.difference(image, Image.new("RGB", image.size, paper)).getbbox()
    assert content is not None, f"{shown} is empty"
    image = ImageOps.expand(image.crop(content), MARGIN, paper)
    image.quantize(COLORS).save(path, optimize=True)


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
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), playwright.chromium.executable_path)
        browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        paths = write_dates_pictures(browser, checkpoint, target) + write_people_pictures(browser, target)
        browser.close()
    for path in (target / "dates.png", *paths):
        size = path.stat().st_size
        print(f"{path} {size:,} bytes")
        assert size < MAX_PICTURE, f"{path} is too large for a page"


if __name__ == "__main__":
    main(*sys.argv[1:])
