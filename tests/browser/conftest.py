"""A real Chromium for the tests of the page: the system's, or playwright's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import sync_playwright

from manyheads.studio.app import serve
from manyheads.studio.session import Sessions

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT = 60_000  # milliseconds; a busy machine is slow


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), playwright.chromium.executable_path)
        if not Path(found).exists():
            pytest.exit("no Chromium: apt-get install chromium, or .venv/bin/playwright install chromium", returncode=2)
        opened = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield opened
        opened.close()


class Tab:
    """A page in the browser, with what went wrong in it."""

    def __init__(self, context, address):
        self.problems, self.outside, self.requests = [], [], []
        self.page = context.new_page()
        self.page.set_default_timeout(WAIT)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))
        self.page.on("dialog", lambda dialog: (self.problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.note(request.url, address))

    def note(self, url, address):
        self.requests.append(url)
        if not url.startswith((address, "data:", "blob:")):
            self.outside.append(url)

    def readout(self):
        return self.page.inner_text(".readout")

    def wait_for(self, expression, argument=None):
        self.page.wait_for_function(expression, arg=argument, timeout=WAIT)

    def state(self):
        return self.page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")


def all_effects(tab):
    tab.page.wait_for_selector("[data-effects=all]")


@pytest.fixture
def open_tab(browser):
    """Serves checkpoints, and opens the page at a state; afterwards nothing may have gone wrong in it."""
    opened = []

    def start(*checkpoints, text="", state="", width=1400, steps=None, **options):
        sessions = Sessions(checkpoints, [f"model{i}" for i in range(len(checkpoints))], text, steps)
        server = serve(sessions)
        address = server.__enter__()
        context = browser.new_context(viewport={"width": width, "height": 900}, accept_downloads=True, **options)
        tab = Tab(context, address)
        opened.append((server, context, tab))
        tab.sessions = sessions
        tab.page.goto(f"{address}#{state}")
        tab.page.wait_for_selector("canvas.matrix, canvas.lines")
        return tab

    yield start
    for server, context, tab in opened:
        context.close()
        server.__exit__(None, None, None)
        assert tab.problems == []
        assert tab.outside == []


@pytest.fixture
def open_page(browser):
    """Serves one checkpoint, and opens a tab of the page at a state, without waiting for the tab Look."""
    opened = []

    def start(shown, name="model", text="", **state):
        server = serve(Sessions([shown], [name], text))
        address = server.__enter__()
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(WAIT)
        tab = Tab(context, address)
        opened.append((server, context, tab))
        tab.page.goto(f"{address}#{urlencode(state)}")
        return tab.page

    yield start
    for server, context, tab in opened:
        context.close()
        server.__exit__(None, None, None)
        # the browser logs a request that the server refuses
        refused = [problem for problem in tab.problems if "422" in problem]
        assert [problem for problem in tab.problems if problem not in refused] == []
        assert tab.outside == []
