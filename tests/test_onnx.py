"""ONNX files: onnxruntime gives the numbers of the model that was written, for every batch, length and side of padding."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from kinds import decoder, made, ngram, recurrent
from small_checkpoints import close, folder_of, patches, picture

import manyheads
from manyheads import Inputs, build, read
from manyheads.checkpoint import Loaded
from manyheads.convert import onnx as written
from manyheads.parts.attend import CoreSpec, score

ONE_LAYER = {"num_hidden_layers": 1}
FAMILIES = {  # grouped keys and scaled rotation; token types and no head; a pooled head; two towers and biases
    "llama-llama3": ONE_LAYER,
    "bert-bare": ONE_LAYER,
    "roberta-classes": ONE_LAYER,
    "t5": {"num_layers": 1, "num_decoder_layers": 1},
}
SHAPES = [(2, 17, 9, None), (1, 1, 1, None), (3, 11, 4, "left"), (3, 11, 4, "right"), (5, 2, 12, "left")]  # batch, length, of the target


def session(folder):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(folder / "model.onnx", options)


def exported(loaded, folder):
    manyheads.export(loaded, folder, to="onnx")
    return session(folder)


def ran(running, **given):
    """What onnxruntime says, given what the graph asks for by name."""
    asked = {one.name: given[one.name].numpy() for one in running.get_inputs()}
    (out,) = running.run(None, asked)
    assert out.dtype == np.float32
    return torch.from_numpy(out)


def padded(batch, length, side):
    """The first row whole, each of the others with one more padded place."""
    padding = torch.zeros(batch, length, dtype=torch.bool)
    for row in range(batch if side else 0):
        count = min(row, length - 1)
        padding[row, : count if side == "left" else 0] = True
        padding[row, length - count if side == "right" else length :] = True
    return padding


def agree(running, ours, vocab=60):
    """The same numbers for every shape; padded places too, where nobody looks, hold numbers."""
    for batch, length, target_length, side in SHAPES:
        ids, target = torch.randint(3, vocab, (batch, length)), torch.randint(3, vocab, (batch, target_length))
        types, padding = torch.randint(0, 2, (batch, length)), padded(batch, length, side)
        found = ran(running, input_ids=ids, attention_mask=(~padding).long(), decoder_input_ids=target, token_type_ids=types)
        more = {"types": types} if "token_type_ids" in [one.name for one in running.get_inputs()] else {}
        close(found, ours.logits(ids, target if ours.paired else None, padding if side else None, **more))


def names(running):
    return [one.name for one in running.get_inputs()], running.get_outputs()[0].name


@pytest.mark.parametrize("name", FAMILIES)
def test_every_batch_length_and_side_of_padding_gives_our_numbers(name, tmp_path):
    ours = manyheads.load(folder_of(name, tmp_path / "theirs", tokenizer=False, **FAMILIES[name]))
    running = exported(ours, tmp_path / "onnx")
    agree(running, ours)
    takes = ["input_ids", "attention_mask"]
    takes += ["token_type_ids"] if name in ("bert-bare", "roberta-classes") else ["decoder_input_ids"] if ours.paired else []
    assert names(running) == (takes, "last_hidden_state" if name == "bert-bare" else "logits")
    assert running.get_inputs()[0].shape == ["batch", "length"]


@torch.no_grad()
def test_pictures_come_whole_and_a_masked_autoencoder_is_told_what_is_visible(tmp_path):
    one = {"num_hidden_layers": 1, "decoder_num_hidden_layers": 1}
    ours = manyheads.load(folder_of("vit-mae", tmp_path / "mae", tokenizer=False, **one))
    running = exported(ours, tmp_path / "onnx")
    assert names(running) == (["pixel_values", "visible_patches"], "logits")
    for batch, count in ((2, 3), (1, 9), (3, 1)):
        shown, visible = picture(batch=batch), torch.rand(batch, 9).argsort(dim=1)[:, :count]
        whole = patches(shown)
        seen = whole.gather(1, visible[..., None].expand(-1, -1, whole.shape[-1]))
        close(ran(running, pixel_values=shown, visible_patches=visible), ours.model(whole, Inputs(seen, positions=visible)))


def test_what_no_other_library_has_is_written_too(tmp_path):
    """Slopes, relative keys, other cores and a window, one a layer; a classifier of the last token."""
    pattern = [
        {"position": "alibi"},
        {"position": {"kind": "shaw", "clip": 3}, "core": {"kind": "additive", "size": 5}, "mask": {"window": 3}},
    ]
    ours = Loaded(made(decoder(pattern=pattern, position="none"), torch.float32))
    agree(exported(ours, tmp_path / "decoder"), ours, vocab=23)
    ours = Loaded(made(ngram(), torch.float32))
    agree(exported(ours, tmp_path / "ngram"), ours, vocab=23)


def test_the_command_writes_the_tokenizer_too_and_says_nothing_more(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", n_layer=1)
    command = [sys.executable, "-W", "error", "-m", "manyheads", "export", folder, tmp_path / "out", "--to", "onnx"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"{tmp_path / 'out'} written\n")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.onnx", "tokenizer.json", "generation_config.json"}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    content = (tmp_path / "out" / "model.onnx").read_bytes()
    assert b"stack_trace" not in content, "a file tells nobody where it was made"
    assert b"/manyheads/" not in content
    agree(session(tmp_path / "out"), manyheads.load(folder))


class Nothing:
    """A graph that is not made, where the rest is looked at."""

    def __init__(self, error=None):
        self.error = error

    def save(self, path):
        assert path.parent.name != "out", "nothing is written under the final name"
        path.write_bytes(b"begun")
        if self.error:
            raise self.error


SMALL = ["decoder.layers=1", "decoder.width=16", "decoder.attention.heads=2", "vocab=9"]


def test_an_export_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "graph_of", lambda drawn: Nothing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        manyheads.export(build(read("gpt2", *SMALL)), tmp_path / "out", to="onnx")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="out exists already"):
        manyheads.export(build(read("gpt2", *SMALL)), tmp_path / "out", to="onnx")


def test_a_model_stays_as_it_was(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(written, "graph_of", lambda drawn: seen.append(drawn.model) or Nothing())
    for dtype in (torch.float32, torch.bfloat16):
        model = build(read("gpt2", *SMALL), dtype=dtype).train()
        before = {name: (tensor, tensor.clone()) for name, tensor in model.named_parameters()}
        manyheads.export(model, tmp_path / f"{dtype}", to="onnx")
        assert model.training
        assert all(tensor is before[name][0] and torch.equal(tensor, before[name][1]) for name, tensor in model.named_parameters())
        given = seen.pop()
        assert not given.training
        assert {parameter.dtype for parameter in given.parameters()} == {torch.float32}
        shared = all(a.data_ptr() == b.data_ptr() for a, b in zip(given.parameters(), model.parameters(), strict=True))
        assert shared == (dtype is torch.float32), "weights are copied only where they must change"


def test_a_tokenizer_that_came_in_another_form_is_written(tmp_path, monkeypatch):
    from tokenizers import Tokenizer, models

    monkeypatch.setattr(written, "graph_of", lambda drawn: Nothing())
    own = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    manyheads.export(Loaded(build(read("gpt2", *SMALL)), own), tmp_path / "out", to="onnx")
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("b").ids == [1]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: build(recurrent()), "a recurrent network reads in steps"),
        (lambda: build(decoder(core=data_dependent())), "this model cannot be drawn as one graph for every length: "),
    ],
    ids=["recurrent", "a part of one's own"],
)
def test_what_cannot_be_written_is_refused_in_one_sentence(model, sentence, tmp_path):
    try:
        with pytest.raises(ValueError, match=sentence) as refused:
            manyheads.export(model(), tmp_path / "out", to="onnx")
    finally:
        CoreSpec.kinds.pop("peeks", None)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def data_dependent():
    """A core that looks at its numbers, which no graph does."""
    score("peeks", lambda q, k: q @ k.mT if float(q.sum()) > 0 else -(q @ k.mT))
    return {"kind": "peeks"}


def test_a_missing_package_is_named_with_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(ValueError, match=r"onnxscript, which is not installed: pip install 'manyheads\[onnx\]'"):
        manyheads.export(build(read("gpt2", *SMALL)), tmp_path / "out", to="onnx")
    assert not list(tmp_path.iterdir())
