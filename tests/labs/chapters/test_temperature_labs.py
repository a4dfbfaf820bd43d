"""The slow labs of the chapter on temperature: each holds, and fails with its counterexample."""

from __future__ import annotations

import math

import pytest
import torch
from lab_verdicts import check_both_ways, slow_labs

from manyheads.labs.chapters.temperature import PairSource


@pytest.mark.parametrize("name", slow_labs("temperature"))
def test_the_claim_holds_and_its_counterexample_fails(name):
    check_both_ways(name)


def test_a_model_that_knows_more_tokens_has_less_entropy():
    torch.manual_seed(0)
    source = PairSource(7, 1.0)
    tokens = source.triples_VVV.sum((0, 1))  # how often each occurs
    assert source.nats(0) == pytest.approx(float(-(tokens * tokens.log()).sum()))
    assert math.log(7) > source.nats(0) > source.nats(1) > source.nats(2) > 0
