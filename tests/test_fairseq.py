"""Pickles of fairseq, read without their power: a real torch.save, with a trap inside."""

from __future__ import annotations

import argparse
import os
import pickle
import zipfile

import pytest
import torch

import manyheads
from manyheads import build, read_model
from manyheads.convert.families import family
from manyheads.convert.files import FileError
from manyheads.convert.inert import Stub, read_pickle
from manyheads.convert.weights import write_weights

CONFIG = {
    "encoder_embed_dim": 16, "decoder_embed_dim": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_embed_dim": 24, "decoder_ffn_embed_dim": 20, "encoder_normalize_before": True,
    "decoder_normalize_before": True, "activation_fn": "relu", "share_decoder_input_output_embed": True,
}  # fmt: skip


class Trap:
    """An object whose reading makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def saved(path, trap, **changes):
    """A model of ours under the names of fairseq, in a pickle with options, history and a trap."""
    known = family("fairseq")
    spec = known.spec_of(CONFIG | {"source_tokens": 13, "target_tokens": 11})
    model = build(spec, seed=3).eval()
    weights = write_weights(known.rows(spec, "TransformerModel"), dict(model.named_parameters()))
    weights |= {"encoder.version": torch.tensor([3.0]), "decoder.embed_positions._float_tensor": torch.tensor([float("nan")])}
    weights["decoder.output_projection.weight"] = weights["decoder.embed_tokens.weight"]
    said = {key: value for key, value in (CONFIG | changes).items() if value is not None}  # None: left out
    options = argparse.Namespace(**said, lr=[0.1], optimizer_overrides="{}")
    torch.save({"cfg": {"model": options}, "model": weights, "extra_state": {"trap": Trap(trap)}}, path)
    return model


def test_it_is_read_and_nothing_runs(tmp_path):
    model = saved(tmp_path / "x.pt", tmp_path / "sprung")
    found = manyheads.load(tmp_path / "x.pt")
    assert not (tmp_path / "sprung").exists()
    source, target = torch.tensor([[5, 9, 2]]), torch.tensor([[2, 7]])
    assert torch.equal(found.logits(source, target), model(target, source))
    with pytest.raises(ValueError, match="no family can say this model"):
        manyheads.export(found, tmp_path / "out")
    torch.load(tmp_path / "x.pt", weights_only=False)  # the trap is a real one
    assert (tmp_path / "sprung").exists()


def test_sinusoids_end_where_theirs_end():
    """θ^(−i/(h−1)), counted from 2."""
    spec = family("fairseq").spec_of(CONFIG | {"source_tokens": 13, "target_tokens": 11})
    table = spec.encoder.position.build_embed(16).table(torch.arange(2, 9)[None], torch.float64)[0]
    for t in range(7):
        for i in range(8):
            angle = torch.tensor((t + 2) * 10000 ** (-i / 7), dtype=torch.float64)
            torch.testing.assert_close(table[t, i], angle.sin())
            torch.testing.assert_close(table[t, 8 + i], angle.cos())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layernorm_embedding": True}, "layernorm_embedding = True changes the model"),
        ({"encoder_learned_pos": True}, "encoder_learned_pos = True changes the model"),
        ({"share_decoder_input_output_embed": False}, "share_decoder_input_output_embed = False changes the model"),
        ({"share_decoder_input_output_embed": None}, "share_decoder_input_output_embed = False changes the model"),
        ({"full_context_alignment": True}, "full_context_alignment = True changes the model"),
        ({"encoder_layers_to_keep": "0"}, "encoder_layers_to_keep = '0' changes the model"),
        ({"decoder_output_dim": 8}, "decoder_output_dim is 8, and the decoder is 16 wide: two widths are not supported"),
        ({"gated_heads": 2}, "a key this family does not know, 'gated_heads'"),
        ({"encoder_attention_heads": 3}, "3 heads do not divide width 16"),
        ({"activation_fn": "linear"}, "no activation 'linear'"),
        ({"encoder_layers": 3}, "lacks a weight this family has: encoder.layers.2"),
    ],
)
def test_what_would_change_the_maths_is_refused(tmp_path, changes, said):
    saved(tmp_path / "x.pt", tmp_path / "sprung", **changes)
    with pytest.raises(FileError, match=said):
        manyheads.load(tmp_path / "x.pt")


def archive(path, data, **storages):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", data)
        for name, content in storages.items():
            file.writestr(f"archive/data/{name.removeprefix('s')}", content)
    return path


def test_pickles_that_mean_harm(tmp_path):
    harmless = read_pickle(archive(tmp_path / "a", pickle.dumps({"trap": Trap(tmp_path / "sprung"), "code": argparse.Namespace(x=1)})))
    assert isinstance(harmless["trap"], Stub)
    assert harmless["code"].state == {"x": 1}
    assert not (tmp_path / "sprung").exists()
    for text in (b"cos\nsystem\n(S'touch sprung'\ntR.", b"cbuiltins\neval\n(S'1+1'\ntR.", b"c__builtin__\nexec\n(S'x=1'\ntR."):
        assert isinstance(read_pickle(archive(tmp_path / "b", text)), Stub)
    for data, said in ((b"", "EOFError"), (b"garbage", "cannot be read"), (b"\x80\x04\x95", "cannot be read"), (pickle.dumps([1]) * 2, "")):
        path = archive(tmp_path / "c", data)
        if said:
            with pytest.raises(FileError, match=said):
                read_pickle(path)
    (tmp_path / "d").write_bytes(pickle.dumps({"model": {}}))
    with pytest.raises(FileError, match="cannot be read: BadZipFile"):
        read_pickle(tmp_path / "d")


def test_tensors_that_do_not_fit_their_storage(tmp_path):
    torch.save({"model": {"x": torch.arange(6.0)}}, tmp_path / "good")
    with zipfile.ZipFile(tmp_path / "good") as file:
        data = next(file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
    good = read_pickle(archive(tmp_path / "whole", data, s0=torch.arange(6.0).numpy().tobytes()))
    assert torch.equal(good["model"]["x"], torch.arange(6.0))
    with pytest.raises(FileError, match="does not fit into its storage"):
        read_pickle(archive(tmp_path / "short", data, s0=b"\0" * 8))
    with pytest.raises(FileError, match="cannot be read: KeyError"):
        read_pickle(archive(tmp_path / "none", data))


def test_words_are_cut_and_joined(tmp_path):
    saved_in = tmp_path / "folder"
    (saved_in / "checkpoints").mkdir(parents=True)
    (saved_in / "data").mkdir()
    saved(saved_in / "checkpoints" / "checkpoint_best.pt", tmp_path / "sprung")
    (saved_in / "data" / "dict.aa.txt").write_text("".join(f"{word} 5\n" for word in ("a", "b@@", "ab", "c", "ab@@", "d", "e", "f", "g")))
    (saved_in / "data" / "dict.bb.txt").write_text("".join(f"{word} 5\n" for word in ("x@@", "y", "z", "u", "v", "w", "t")))
    (saved_in / "data" / "bpe.code").write_text("#version: 0.2\na b</w>\na b\n")
    ours = manyheads.load(saved_in)
    assert ours.tokenizer.encode_batch(["ab abc q"])[0].ids == [6, 8, 7, 3, 2]
    assert ours.tokenizer.decode([4, 5, 6, 2]) == "xy z"
    assert isinstance(ours.generate("ab abc", max_new=4), str)


def test_a_spec_of_ours_says_the_same():
    assert read_model({"vocab": 9, "encoder": {"position": {"kind": "sinusoidal", "offset": 2}}}).encoder.position.offset == 2
