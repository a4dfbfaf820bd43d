"""`manyheads demo`, with fewer steps."""

from __future__ import annotations

import json
import sys

from command import run

from manyheads.cli import demo


def fewer_steps():
    demo.RUN["data"] |= {"count": 200}
    demo.RUN["train"] = {"steps": 4, "batch_tokens": 512, "eval_every": 4, "eval_rows": 8}


def without_fastapi():
    fewer_steps()
    sys.modules["fastapi"] = None


def test_the_demo_shows_results_and_cross_attention_and_writes_its_page_or_says_what_it_needs(tmp_path):
    folder = tmp_path / "dates"
    done = run("demo", "--output", folder, before=without_fastapi)
    assert "manyheads[studio]" in done.stdout
    assert not (folder / "look.html").exists()
    (folder / "look.html").write_text("of an earlier run")
    done = run("demo", "--output", folder, before=fewer_steps)
    page = (folder / "look.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert f"{folder / 'look.html'} ({len(page.encode()) / 1e6:.1f} MB" in done.stdout
    assert done.stdout.count("→") == len(demo.EXAMPLES)
    assert "</s>" in done.stdout
    state = json.loads((folder / "checkpoints" / "step-00000004" / "trainer.json").read_text())
    assert f"{state['metrics']['exact_match']:.1%} of the dates" in done.stdout
    assert demo.TAG in done.stdout
    assert f"predict {folder}" in done.stdout
    assert done.stdout.endswith(f'look {folder} "{demo.DATE}"\n')
    assert run("predict", folder, demo.DATE, "--max-new-tokens", "2").stdout
    assert run("demo", "--output", folder, before=fewer_steps).stdout == done.stdout
