"""ONNX files: onnxruntime gives the numbers of the exported model, for every batch size, length and side of padding."""

from __future__ import annotations

import json
import signal
import sys
import warnings
from functools import partial

import numpy as np
import onnxruntime
import pytest
import torch
from command import error_of
from command import run as run_command
from kinds import decoder, ngram, random_model, recurrent
from raising import raises
from small_checkpoints import assert_close, folder_of, patches, random_images
from small_runs import at_file
from tokenizers import Tokenizer, models

import manyheads
from manyheads import Checkpoint, Inputs, build, read
from manyheads.convert import onnx
from manyheads.errors import ExportError
from manyheads.parts.core import CoreSpec, register_score

SMALL = ["decoder.layers=1", "decoder.width=16", "decoder.attention.heads=2", "vocab=9"]
ENCODER = [item.replace("decoder", "encoder") for item in SMALL]
# batch, length, length of the target, side of the padding
SHAPES = [(2, 17, 9, None), (1, 1, 1, None), (3, 11, 4, "left"), (3, 11, 4, "right"), (5, 2, 12, "left")]


def open_session(folder):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(folder / "model.onnx", options)


def export(checkpoint, folder):
    manyheads.export(checkpoint, folder, to="onnx")
    return open_session(folder)


def run(session, **inputs):
    """The output of onnxruntime, given the inputs that the graph names."""
    (out,) = session.run(None, {item.name: inputs[item.name].numpy() for item in session.get_inputs()})
    assert out.dtype == np.float32
    return torch.from_numpy(out)


def padding_mask(batch, length, side):
    """No padding in the first row, and one more position of it in each of the others."""
    padding_mask = torch.zeros(batch, length, dtype=torch.bool)
    for row in range(batch if side else 0):
        count = min(row, length - 1)
        padding_mask[row, : count if side == "left" else 0] = True
        padding_mask[row, length - count if side == "right" else length :] = True
    return padding_mask


def check_outputs(session, ours, vocab=60):
    """The same numbers for every shape, at padded positions too."""
    for batch, length, target_length, side in SHAPES:
        ids, target = torch.randint(3, vocab, (batch, length)), torch.randint(3, vocab, (batch, target_length))
        types, padding = torch.randint(0, 2, (batch, length)), padding_mask(batch, length, side)
        mask = (~padding).long()
        out = run(session, input_ids=ids, attention_mask=mask, decoder_input_ids=target, token_type_ids=types)
        more = {"token_type_ids": types} if "token_type_ids" in names(session)[0] else {}
        logits = ours.logits(ids, target if ours.has_source else None, padding if side else None, **more)
        assert_close(out, logits)


def names(session):
    return [item.name for item in session.get_inputs()], session.get_outputs()[0].name


def check_family(session, ours, more):
    """For every batch size, length and side of padding."""
    check_outputs(session, ours)
    assert names(session) == (["input_ids", "attention_mask", more], "logits")
    assert session.get_inputs()[0].shape == ["batch", "length"]


def test_outputs_of_two_stacks_with_biases_are_ours_for_every_batch_length_and_side_of_padding(tmp_path):
    one = {"num_layers": 1, "num_decoder_layers": 1}
    ours = manyheads.load(folder_of("t5", tmp_path / "theirs", tokenizer=False, **one))
    check_family(export(ours, tmp_path / "onnx"), ours, "decoder_input_ids")


def test_an_output_is_named_as_in_other_exporters():
    for head, output in (("none", "last_hidden_state"), ("vector", "sentence_embedding"), ("masked", "logits")):
        model = onnx.OnnxModel(build(read("bert-base", *ENCODER, f"head={head}")), None)
        assert model.output == output


@torch.no_grad()
def test_a_masked_autoencoder_takes_whole_images_and_the_positions_of_visible_patches(tmp_path):
    one = {"num_hidden_layers": 1, "decoder_num_hidden_layers": 1}
    ours = manyheads.load(folder_of("vit-mae", tmp_path / "mae", tokenizer=False, **one))
    session = export(ours, tmp_path / "onnx")
    assert names(session) == (["pixel_values", "visible_patches"], "logits")
    for batch, count in ((2, 3), (1, 9), (3, 1)):
        images, positions = random_images(batch=batch), torch.rand(batch, 9).argsort(dim=1)[:, :count]
        whole = patches(images)
        visible = whole.gather(1, positions[..., None].expand(-1, -1, whole.shape[-1]))
        out = run(session, pixel_values=images, visible_patches=positions)
        assert_close(out, ours.model(whole, Inputs(visible, positions=positions)))


def model_of_many_parts():
    """ALiBi, relative keys with another core and a window, scaled RoPE with grouped keys: one per layer."""
    rope = {
        "position": {"kind": "rope", "scaling": {"kind": "banded", "factor": 3.0, "length": 16}},
        "attention": {"kv_heads": 1},
        "feedforward": "gated",
        "norm": "rms",
    }
    shaw = {"position": {"kind": "shaw", "clip": 3}, "core": {"kind": "additive", "size": 5}, "mask": {"window": 3}}
    pattern = [{"position": "alibi"}, shaw, rope]
    return random_model(decoder(layers=3, pattern=pattern, position="none"), torch.float32)


def test_the_command_exports_parts_that_no_other_library_has_with_the_tokenizer_and_prints_one_line(tmp_path):
    folder, tokenizer = tmp_path / "own", Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    manyheads.export(Checkpoint(model_of_many_parts(), tokenizer), folder, to="manyheads")
    (folder / "generation_config.json").write_text("{}")
    before = partial(warnings.simplefilter, "error")
    done = run_command("export", folder, tmp_path / "out", "--to", "onnx", before=before)
    assert done.stdout == ""
    assert str(tmp_path / "out") in done.stderr
    assert len(done.stderr.splitlines()) == 1
    names_of_files = {path.name for path in (tmp_path / "out").iterdir()}
    assert names_of_files == {"model.onnx", "tokenizer.json", "generation_config.json"}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    content = (tmp_path / "out" / "model.onnx").read_bytes()
    assert b"stack_trace" not in content, "a file holds no paths of the computer it was made on"
    assert b"/manyheads/" not in content
    check_outputs(open_session(tmp_path / "out"), manyheads.load(folder), vocab=23)


def test_an_ngram_network_is_exported_with_a_tokenizer_that_has_no_file_and_does_not_change(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    ours = Checkpoint(random_model(ngram(), torch.float32).train(), tokenizer)
    before = {name: (tensor, tensor.clone()) for name, tensor in ours.model.named_parameters()}
    session = export(ours, tmp_path / "out")
    assert ours.model.training
    for name, tensor in ours.model.named_parameters():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])
    ours.model.eval()
    check_outputs(session, ours, vocab=23)
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("b").ids == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exported_copy_is_in_float32_and_shares_weights_that_are(dtype):
    model = build(read("gpt2", *SMALL), dtype=dtype).train()
    copy = onnx.float32_copy(model)
    assert model.training
    assert not copy.training
    assert {parameter.dtype for parameter in copy.parameters()} == {torch.float32}
    shared = [a.data_ptr() == b.data_ptr() for a, b in zip(copy.parameters(), model.parameters(), strict=True)]
    assert set(shared) == {dtype is torch.float32}


def test_an_export_that_is_interrupted_leaves_nothing(tmp_path):
    folder, out = folder_of("gpt2", tmp_path / "gpt2", n_layer=1), tmp_path / "new" / "out"
    interrupt = partial(signal.raise_signal, signal.SIGINT)
    before = partial(at_file, "open", r"draft/tokenizer\.json$", interrupt)
    run_command("export", folder, out, "--to", "onnx", check=130, before=before)
    assert not out.parent.exists()


def test_an_export_does_not_replace_what_exists(tmp_path):
    with raises("usage.output-exists", tmp_path):
        manyheads.export(build(read("gpt2", *SMALL)), tmp_path, to="onnx")


@pytest.mark.parametrize(
    "model",
    [lambda: build(recurrent()), lambda: build(decoder(layers=1, core=data_dependent()))],
    ids=["recurrent", "a part that depends on its values"],
)
def test_a_model_without_one_graph_for_every_length_is_refused(model, tmp_path):
    try:
        with pytest.raises(ExportError) as caught:
            manyheads.export(model(), tmp_path / "out", to="onnx")
    finally:
        CoreSpec.kinds.pop("data-dependent", None)
    assert caught.value.code == "export.unsupported"
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("axis", "size"), [(0, "batch size"), (2, "length")])
def test_the_size_that_must_be_constant_is_named(axis, size, tmp_path):
    register_score("constant-size", lambda q, k: q @ k.mT * (1 if int(q.shape[axis]) == 2 + axis // 2 else 2))
    try:
        with pytest.raises(ExportError) as caught:
            manyheads.export(build(decoder(layers=1, core="constant-size")), tmp_path / "out", to="onnx")
    finally:
        CoreSpec.kinds.pop("constant-size", None)
    assert f"for every {size}:" in str(caught.value)
    assert "manyheads" in caught.value.hint


def test_classes_keep_their_names_and_outputs_and_files_of_other_tasks_are_left_out(tmp_path):
    """With token types and a pooled head."""
    folder = folder_of("bert-classes", tmp_path / "bert", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {"0": "spam", "1": "ham", "2": "Äpfel"}, "label2id": {"spam": 0, "ham": 1, "Äpfel": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text("[]")
    (folder / "generation_config.json").write_text("{}")
    ours = manyheads.load(folder)
    session = export(ours, tmp_path / "onnx")
    check_family(session, ours, "token_type_ids")
    assert json.loads(session.get_modelmeta().custom_metadata_map["id2label"]) == config["id2label"]
    assert {path.name for path in (tmp_path / "onnx").iterdir()} == {"model.onnx", "tokenizer.json"}


def data_dependent():
    """A core with a branch on its values, which no graph has."""
    register_score("data-dependent", lambda q, k: q @ k.mT if float(q.sum()) > 0 else -(q @ k.mT))
    return {"kind": "data-dependent"}


def hide_onnxscript():
    sys.modules["onnxscript"] = None


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", n_layer=1)
    error = error_of("export", folder, tmp_path / "out", "--to", "onnx", check=2, before=hide_onnxscript)
    assert error["code"] == "usage.missing-extra"
    assert "onnxscript" in error["message"]
    assert "manyheads[onnx]" in error["hint"]
    assert not (tmp_path / "out").exists()
