"""Checkpoints with quantized weights: close to float32, used by every command, and never trained or exported."""

from __future__ import annotations

import pytest
import torch
from command import error_of, run_json
from raising import raises
from small_checkpoints import folder_of

import manyheads
from manyheads.kernels.weight import QuantizedWeight

IDS = torch.tensor([[5, 9, 13, 7, 22, 40]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of("llama", tmp_path_factory.mktemp("llama") / "llama")


def quantized_names(checkpoint):
    return {name for name, weight in checkpoint.model.named_parameters() if isinstance(weight, QuantizedWeight)}


@pytest.mark.parametrize(("weights", "tolerance"), [("int8", 0.05), ("int4", 0.5)])
def test_matrices_are_quantized_and_the_logits_are_close(folder, weights, tolerance):
    plain, ours = manyheads.load(folder), manyheads.load(folder, weights=weights)
    names = quantized_names(ours)
    assert "decoder.embed.table.weight" in names
    assert "decoder.layers.0.attention.query.weight" in names
    assert "decoder.norm.weight" not in names
    assert "decoder.layers.0.feedforward.down.weight" not in names, "its rows have 48 weights"
    expected = plain.logits(IDS)
    assert (ours.logits(IDS) - expected).abs().max() < tolerance * expected.abs().max()
    assert ours.generate("word3 word7", max_new_tokens=4)


def test_a_checkpoint_in_half_precision_with_biases_is_quantized(tmp_path):
    path = folder_of("gpt2", tmp_path / "gpt2")
    half = tmp_path / "half"
    checkpoint = manyheads.load(path)
    checkpoint.model.bfloat16()
    manyheads.export(checkpoint, half)
    plain, ours = manyheads.load(half, dtype=torch.float32), manyheads.load(half, weights="int8")
    assert {parameter.dtype for parameter in ours.model.parameters()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in ours.model.parameters())
    expected = plain.logits(IDS)
    assert (ours.logits(IDS) - expected).abs().max() < 0.05 * expected.abs().max()
    assert ours.generate("word3 word7", max_new_tokens=4)


def test_wrong_weights_are_refused(folder):
    for options in ({"weights": "int2"}, {"weights": "stored"}, {"weights": "int8", "dtype": torch.float64}):
        with raises("usage.argument", options["weights"]):
            manyheads.load(folder, **options)


def test_quantized_weights_are_not_exported(folder, tmp_path):
    with raises("export.unsupported"):
        manyheads.export(manyheads.load(folder, weights="int8"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_commands_take_the_weights(folder, tmp_path):
    (tmp_path / "texts.txt").write_text("word3 word7 word9 word11\n" * 3)
    assert run_json("predict", folder, "word3 word7", "--weights", "int8", "--max-new-tokens", "2")["text"]
    plain, ours = (
        run_json("evaluate", folder, "--data", tmp_path / "texts.txt", *options)
        for options in ((), ("--weights", "int8"))
    )
    scores = [next(iter(report["metrics"].values()))["loss"] for report in (plain, ours)]
    assert scores[0] != scores[1]
    assert scores[0] == pytest.approx(scores[1], rel=0.02)
    assert error_of("score", folder, "word3", "--weights", "int3", check=2)["code"] == "usage.argument"
