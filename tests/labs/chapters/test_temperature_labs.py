"""The slow labs of the chapter on temperature: each holds, and fails with its counterexample."""

from __future__ import annotations

import math

import pytest
import torch
from lab_verdicts import check_both_ways, slow_labs
from safetensors.torch import load_file, save_file
from small_checkpoints import folder_of

from manyheads.labs.chapters.temperature import PairSource
from manyheads.labs.lab import run_lab


@pytest.mark.parametrize("name", slow_labs("temperature"))
def test_the_claim_holds_and_its_counterexample_fails(name):
    check_both_ways(name)


def test_the_loops_of_a_checkpoint_are_counted(tmp_path):
    """A model that gives one token at any temperature has a loop in each text, so the claim is false of it."""
    folder_of("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name, weight in weights.items():
        weight.fill_(float("norm" in name or "embed" in name))  # every hidden state is a row of ones
    weights["lm_head.weight"][5] = 1.0
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    finding = run_lab("transformer-loop", model=str(tmp_path), prompts=3, tokens=12, files=3).finding
    difference, at_one, otherwise, *reported = finding.checks
    assert (difference.measured, at_one.measured, otherwise.measured) == (0.0, 1.0, 0)
    assert len(reported) == 1, "there is no loss: nothing was trained"
    assert [row[1:4] for row in finding.figures[-1].rows] == [(0, 1, 12)] * 3, "prefix, period, repeats"


def test_a_model_that_knows_more_tokens_has_less_entropy():
    torch.manual_seed(0)
    source = PairSource(7, 1.0)
    tokens = source.triples_VVV.sum((0, 1))  # how often each occurs
    assert source.nats(0) == pytest.approx(float(-(tokens * tokens.log()).sum()))
    assert math.log(7) > source.nats(0) > source.nats(1) > source.nats(2) > 0
