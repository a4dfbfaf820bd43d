"""Outputs that are NaN or infinite are an error, which names the first layer where they appear."""

from __future__ import annotations

import math
import threading

import kinds
import pytest
import torch
from command import error_of, run
from raising import raises
from small_checkpoints import folder_of, patches, random_images
from small_runs import described, train_all

import manyheads
from manyheads import build, evaluate
from manyheads.model.finite import raise_nonfinite
from manyheads.model.lowering import lowered_decoder
from manyheads.training.loop import validate
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run

HUGE = 3e38  # finite in float32, but not twice as much
TEXTS = {
    "gpt2": "word0 word1",
    "bert": "word0 [MASK]",
    "bert-classes": "word0",
    "bert-bare": "word0",
    "bart": "word0 word1",
    "llama": "word0 word1",
}


def overflow(model, layer=1):
    """Makes the output of one linear layer infinite; returns its name."""
    name, linear = next(
        (name, module)
        for name, module in model.named_modules()
        if f"layers.{layer}.feedforward" in name and isinstance(module, torch.nn.Linear)
    )
    with torch.no_grad():
        linear.weight.fill_(HUGE)
    return name


@pytest.mark.parametrize("name", TEXTS)
def test_a_prediction_that_is_not_finite_is_an_error_that_names_the_layer(name, tmp_path):
    """By greedy decoding, beam search and sampling."""
    checkpoint = manyheads.load(folder_of(name, tmp_path / name), copy=True)
    several = [{}, {"num_beams": 2}, {"temperature": 1.0}]
    for settings in several:
        assert manyheads.predict(checkpoint, TEXTS[name], **settings)["text"] == TEXTS[name]
    layer = overflow(checkpoint.model)
    for settings in several:
        with raises("model.non-finite", layer):
            manyheads.predict(checkpoint, TEXTS[name], **settings)
    ids = torch.tensor(checkpoint.encode_ids([TEXTS[name]]))
    assert not checkpoint.model(ids, *([ids] if checkpoint.has_source else [])).isfinite().all()  # no check stays on it


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(
    ("layer", "row"),
    [("decoder.layers.1.residual.norms.1", slice(None)), ("decoder.embed.position.table", 3)],
    ids=["in the prompt", "in the second step after it"],
)
def test_a_quantized_model_that_is_not_finite_is_an_error_that_names_the_layer(weights, layer, row, tmp_path):
    """Although its steps are computed by a plan, which has no modules."""
    checkpoint = manyheads.load(folder_of("gpt2", tmp_path / "gpt2"), copy=True, weights=weights)
    with torch.no_grad():
        assert lowered_decoder(checkpoint.model.decoder, checkpoint.model.head) is not None
        checkpoint.model.get_submodule(layer).weight[row] = torch.inf
    for settings in ({}, {"num_beams": 2}, {"temperature": 1.0}):
        with raises("model.non-finite", layer):
            manyheads.predict(checkpoint, "word0 word1", max_new_tokens=5, **settings)


def test_an_embedding_that_is_not_finite_is_an_error(tmp_path):
    checkpoint = manyheads.load(folder_of("bert-bare", tmp_path / "bert"), copy=True)
    layer = overflow(checkpoint.model)
    with raises("model.non-finite", layer):
        checkpoint.embed(["word0", "word1 word2"])


def test_the_command_line_prints_no_answer_for_a_model_that_computes_nan(tmp_path):
    for name in ("gpt2", "bert-classes"):
        checkpoint = manyheads.load(folder_of(name, tmp_path / name), copy=True)
        layer = overflow(checkpoint.model)
        manyheads.export(checkpoint, tmp_path / f"broken-{name}", to="manyheads")
        error = error_of("predict", tmp_path / f"broken-{name}", "word0", check=4)
        assert error["code"] == "model.non-finite"
        assert layer in error["message"]
        assert run("predict", tmp_path / f"broken-{name}", stdin=b"word0\nword1\n", check=4).stdout == ""


@pytest.mark.parametrize("task", ["causal", "masked", "seq2seq", "classify", "retrieval", "mae"])
def test_an_evaluation_that_is_not_finite_is_an_error(task, tmp_path):
    tree = described(task, steps=1)
    train_all(tree, tmp_path / "run")
    folder = next(path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir())
    checkpoint = manyheads.load(tmp_path / "run", copy=True)
    layer = overflow(checkpoint.model, layer=0)
    manyheads.export(checkpoint, tmp_path / "broken", to="manyheads")
    (folder / "model.safetensors").write_bytes((tmp_path / "broken" / "model.safetensors").read_bytes())
    (folder / "trainer.json").unlink()  # its hashes are of the other weights
    with raises("model.non-finite", layer):
        evaluate(tmp_path / "run", max_rows=4)


def test_images_that_give_nan_are_an_error(tmp_path):
    checkpoint = manyheads.load(folder_of("vit", tmp_path / "vit", tokenizer=False), copy=True)
    inputs = manyheads.Inputs(patches(random_images()))
    assert checkpoint.compute_checked(lambda: checkpoint.model(inputs)).isfinite().all()
    layer = overflow(checkpoint.model)
    with raises("model.non-finite", layer):
        checkpoint.compute_checked(lambda: checkpoint.model(inputs))


def test_a_token_may_be_forbidden_by_a_logit_of_minus_infinity(tmp_path):
    """A head of one's own may do so; only NaN, +inf and a row of −inf are errors."""
    from manyheads.model.finite import check_next_token_logits

    row = torch.tensor([[0.0, -torch.inf, 1.0], [1.0, 2.0, 3.0]])
    assert check_next_token_logits(row) is row
    for wrong in (torch.nan, torch.inf):
        with raises("model.non-finite"):
            check_next_token_logits(torch.where(row == 2, wrong, row))
    with raises("model.non-finite"):
        check_next_token_logits(torch.cat((row, torch.full((1, 3), -torch.inf))))


def test_a_run_that_diverges_is_still_evaluated_by_the_loop():
    """Its metrics are NaN, and the loop decides what to do."""
    run = prepare(read_run(described("seq2seq", steps=1)))
    model = build(run.model_spec, seed=0)
    overflow(model, layer=0)
    metrics = validate(model, run)
    assert math.isnan(metrics["exact_match"])
    assert not math.isfinite(metrics["loss"])


def test_the_search_for_the_layer_does_not_see_the_forward_of_another_thread():
    """The other thread gets its output, although that is infinite too, and the search finds its own layer."""
    model, outputs = build(kinds.decoder()).eval(), []
    broken = overflow(model)

    def compute():
        with torch.no_grad():
            outputs.append(model(kinds.tokens(2, 5)))

    def compute_twice():
        other = threading.Thread(target=compute)
        other.start()
        other.join()
        compute()

    with raises("model.non-finite", broken):
        raise_nonfinite(model, compute_twice)
    assert [bool(output.isfinite().all()) for output in outputs] == [False]
