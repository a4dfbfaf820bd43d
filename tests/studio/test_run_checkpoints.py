"""The checkpoints of a run on the page: by an index only, loaded when they are shown, and few of them kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from small_runs import described, train_all
from studio_client import Page, literal

from manyheads import load
from manyheads.studio import run_checkpoints
from manyheads.studio.run_checkpoints import find_run_checkpoints

TEXT = "the a of"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Checkpoints at steps 1 to 6."""
    folder = tmp_path_factory.mktemp("run")
    train_all(described("causal", save_every=1, keep_last=9), folder)
    return folder


@pytest.fixture
def page(run_folder):
    loaded = []

    def read(path):
        loaded.append(weakref.ref(made := load(path)))
        return made

    initial = load(run_folder)
    made = Page(initial, steps=find_run_checkpoints(str(run_folder), initial, read))
    made.loaded = loaded
    return made


def test_a_step_shows_its_own_weights(page, run_folder):
    info = page.client.get("look/info", params={"session": page.key}).json()["steps"]
    assert info["numbers"] == [1, 2, 3, 4, 5, 6]
    for index, number in enumerate(info["numbers"]):
        run = page.run(TEXT, step=index)
        assert run["step"] == index
        name = run["attentions"][-1]["name"]
        expected = literal(load(run_folder / "checkpoints" / f"step-{number:08}"), run)[0].weights(name, 1)[0]
        torch.testing.assert_close(page.tile(run, name=name, head=1), expected)
    hashes = [
        page.client.get("look/hash", params={"session": page.key, "checkpoint": 0, "step": index}).json()["sha256"]
        for index in (0, 1, info["initial"])
    ]
    assert len(set(hashes)) == 3
    plain = page.client.get("look/hash", params={"session": page.key, "checkpoint": 0}).json()["sha256"]
    assert plain == hashes[-1]


def test_other_tabs_use_the_checkpoint_of_the_step(page):
    for step in (0, 3, None):
        given = {"session": page.key, **({} if step is None else {"step": step})}
        shown = page.client.get("look/hash", params=given | {"checkpoint": 0}).json()["sha256"]
        probed = page.client.post("probe/start", json=given | {"windows": "random", "length": 4})
        assert probed.json()["hash_before"] == shown, probed.text
        measured = page.client.post("field/measure", json=given | {"text": TEXT})
        assert measured.status_code == 200, measured.text
    assert page.client.post("field/measure", json={"session": page.key, "text": TEXT, "step": 99}).status_code == 422


def test_few_checkpoints_are_kept_and_the_runs_of_others_are_freed(page):
    assert page.loaded == []  # none before it is shown
    initial = page.sessions.run_checkpoints.initial
    first = page.run(TEXT)
    others = [index for index in range(6) if index != initial]
    runs = [page.run(TEXT, step=index) for index in others]
    gc.collect()
    assert sum(item() is not None for item in page.loaded) == run_checkpoints.MAX_LOADED
    assert page.get("next", runs[0], check=422, position=0).json()["code"] == "usage.expired"
    for run in (first, runs[-1]):
        page.get("next", run, position=0)
    page.run(TEXT, step=others[-1])  # again from memory
    page.run(TEXT, step=initial)
    assert len(page.loaded) == len(others)


def test_a_checkpoint_that_is_looked_at_is_kept(page):
    first, *others = (index for index in range(6) if index != page.sessions.run_checkpoints.initial)
    run = page.run(TEXT, step=first)
    for index in others:
        page.run(TEXT, step=index)
        page.get("next", run, position=0)


@pytest.mark.parametrize("step", [6, -1, "0", "../x", 1.5])
def test_a_step_is_an_index_of_the_list(page, step):
    assert page.run(TEXT, check=422, step=step)["code"] == "usage.argument"
    assert page.loaded == []


def test_a_run_with_one_checkpoint_and_a_checkpoint_itself_have_no_steps(run_folder, tmp_path):
    train_all(described("causal", steps=1, save_every=1), tmp_path)
    for folder in (tmp_path, run_folder / "checkpoints" / "step-00000002"):
        initial = load(folder)
        assert find_run_checkpoints(str(folder), initial, load) is None
        page = Page(initial)
        assert page.client.get("look/info", params={"session": page.key}).json()["steps"] is None
        assert page.run(TEXT, check=422, step=0)["code"] == "usage.argument"


def test_a_checkpoint_that_was_removed_is_an_error_with_a_code(run_folder, tmp_path):
    train_all(described("causal", save_every=2, keep_last=9), tmp_path)
    initial = load(tmp_path)
    page = Page(initial, steps=find_run_checkpoints(str(tmp_path), initial, load))
    (tmp_path / "checkpoints" / "step-00000002").rename(tmp_path / "gone")
    assert page.run(TEXT, check=422, step=0)["code"] == "usage.path-not-found"
    page.run(TEXT)
