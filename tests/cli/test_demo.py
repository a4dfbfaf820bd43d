"""`manyheads demo`, with fewer steps."""

from __future__ import annotations

import json

from command import run

from manyheads.cli import demo


def fewer_steps():
    demo.RUN["data"] |= {"count": 200}
    demo.RUN["train"] = {"steps": 4, "batch_tokens": 512, "eval_every": 4, "eval_rows": 8}


def test_the_demo_shows_results_and_cross_attention(tmp_path):
    done = run("demo", "--output", tmp_path / "dates", before=fewer_steps)
    assert done.stdout.count("→") == len(demo.EXAMPLES)
    assert "</s>" in done.stdout
    state = json.loads((tmp_path / "dates" / "checkpoints" / "step-00000004" / "trainer.json").read_text())
    assert f"{state['metrics']['exact_match']:.1%} of the dates" in done.stdout
    assert demo.TAG in done.stdout
    assert f"predict {tmp_path / 'dates'}" in done.stdout
