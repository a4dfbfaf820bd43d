"""With the same weights, composed models and the plain ones of labs/reference.py give the same logits and gradients."""

from __future__ import annotations

import pytest
import torch
from kinds import random_model, tokens

from manyheads import Inputs, read_model
from manyheads.labs.reference import bidirectional_2018, causal_2019, transformer_2017

VOCAB, WIDTH, HEADS = 23, 16, 4
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def check(composed, plain, weights, dtype):
    ours, theirs = composed(), plain()
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    gradients = (torch.autograd.grad(out.square().mean(), list(weights.values())) for out in (ours, theirs))
    for name, a, b in zip(weights, *gradients, strict=True):
        torch.testing.assert_close(
            a, b, rtol=10 * TOLERANCE[dtype], atol=TOLERANCE[dtype], msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_composed_transformer_of_2017_equals_the_plain_one(dtype):
    stack = {
        "layers": 3, "width": WIDTH, "embed": {"scale": True}, "position": "sinusoidal",
        "attention": {"heads": HEADS, "bias": False, "output_bias": False},
        "feedforward": {"hidden": 24, "activation": "relu"}, "residual": "post",
    }  # fmt: skip
    other = {
        "like": "encoder",
        "layers": 2,
        "embed": {"kind": "shared", "scale": True},
        "mask": {"causal": True},
        "cross": True,
    }
    model = random_model(read_model({"vocab": VOCAB, "encoder": stack, "decoder": other}), dtype)
    weights, source, target = dict(model.named_parameters()), tokens(2, 7), tokens(2, 5, seed=4)
    check(
        lambda: model(target, source),
        lambda: transformer_2017(weights, source, target, heads=HEADS, encoder_layers=3, decoder_layers=2),
        weights,
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_composed_bidirectional_encoder_of_2018_equals_the_plain_one(dtype):
    norm = {"kind": "layer", "eps": 1e-12}
    stack = {
        "layers": 3, "width": WIDTH, "embed": {"type_vocab_size": 2, "norm": norm}, "position": {"kind": "learned", "length": 9},
        "attention": {"heads": HEADS}, "feedforward": {"hidden": 24, "activation": "gelu"}, "norm": norm,
        "residual": "post",
    }  # fmt: skip
    head = {"kind": "masked", "norm": norm}
    model = random_model(read_model({"vocab": VOCAB, "encoder": stack, "head": head}), dtype)
    weights, ids, types = dict(model.named_parameters()), tokens(2, 9), tokens(2, 9, seed=4, vocab=2)
    check(
        lambda: model(Inputs(ids, token_type_ids=types)),
        lambda: bidirectional_2018(weights, ids, types, heads=HEADS, layers=3),
        weights,
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_composed_causal_decoder_of_2019_equals_the_plain_one(dtype):
    stack = {
        "layers": 3, "width": WIDTH, "position": {"kind": "learned", "length": 9}, "attention": {"heads": HEADS},
        "mask": {"causal": True}, "feedforward": {"hidden": 24, "activation": "gelu-tanh"}, "residual": "pre",
    }  # fmt: skip
    model = random_model(read_model({"vocab": VOCAB, "decoder": stack}), dtype)
    weights, ids = dict(model.named_parameters()), tokens(2, 9)
    check(lambda: model(ids), lambda: causal_2019(weights, ids, heads=HEADS, layers=3), weights, dtype)
