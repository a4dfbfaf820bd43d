"""Pickles of fairseq are read and never executed: real files of torch.save, with a trap inside."""

from __future__ import annotations

import argparse
import os
import pickle
import zipfile

import pytest
import torch
from command import error_of, run, run_json
from raising import raises

import manyheads
from manyheads import build, build_meta
from manyheads.convert.fairseq.safe_pickle import Stub, read_pickle
from manyheads.convert.families import get_family
from manyheads.errors import ExportError

CONFIG = {
    "encoder_embed_dim": 16, "decoder_embed_dim": 16, "encoder_layers": 2, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_embed_dim": 24,
    "decoder_ffn_embed_dim": 20, "encoder_normalize_before": True, "decoder_normalize_before": True,
    "activation_fn": "relu", "share_decoder_input_output_embed": True,
}  # fmt: skip


class Trap:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def save(path, trap, **changes):
    """One of our models under fairseq's names, in a pickle with options and a trap; a change to None drops the option."""
    family = get_family("fairseq")
    model = build(family.spec_of(CONFIG | {"source_tokens": 13, "target_tokens": 11}), seed=3).eval()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights = family.table(model.spec, "TransformerModel", parameters).write(parameters)
    weights |= {
        "encoder.version": torch.tensor([3.0]),
        "decoder.embed_positions._float_tensor": torch.tensor([float("nan")]),
        "decoder.output_projection.weight": weights["decoder.embed_tokens.weight"],
    }
    options = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    options = argparse.Namespace(**options, lr=[0.1], optimizer_overrides="{}")
    torch.save({"cfg": {"model": options}, "model": weights, "extra_state": {"trap": Trap(trap)}}, path)
    return model


def load_fails(path, code, *values, read=manyheads.load):
    with raises(f"checkpoint.{code}", path, *values):
        read(path)


def test_a_checkpoint_is_read_and_nothing_runs(tmp_path):
    model = save(tmp_path / "x.pt", tmp_path / "sprung")
    ours = manyheads.load(tmp_path / "x.pt")
    assert not (tmp_path / "sprung").exists()
    source, target = torch.tensor([[5, 9, 2]]), torch.tensor([[2, 7]])
    assert torch.equal(ours.logits(source, target), model(target, source))
    with pytest.raises(ExportError):
        manyheads.export(ours, tmp_path / "out")
    torch.load(tmp_path / "x.pt", weights_only=False)  # the trap is a real one
    assert (tmp_path / "sprung").exists()


def test_exponents_of_the_sinusoids_run_to_the_end_of_the_range():
    """θ^(−i/(h−1)), counted from 2."""
    spec = get_family("fairseq").spec_of(CONFIG | {"source_tokens": 13, "target_tokens": 11})
    table = spec.encoder.position.build_embed(16).table(torch.arange(2, 9)[None], torch.float64)[0]
    for t in range(7):
        for i in range(8):
            angle = torch.tensor((t + 2) * 10000 ** (-i / 7), dtype=torch.float64)
            torch.testing.assert_close(table[t, i], angle.sin())
            torch.testing.assert_close(table[t, 8 + i], angle.cos())


@pytest.mark.parametrize(
    ("changes", "code", "value"),
    [
        ({"layernorm_embedding": True}, "config", "layernorm_embedding"),
        ({"encoder_learned_pos": True}, "config", "encoder_learned_pos"),
        ({"share_decoder_input_output_embed": False}, "config", "share_decoder_input_output_embed"),
        ({"share_decoder_input_output_embed": None}, "config", "share_decoder_input_output_embed"),
        ({"full_context_alignment": True}, "config", "full_context_alignment"),
        ({"encoder_layers_to_keep": "0"}, "config", "encoder_layers_to_keep"),
        ({"decoder_output_dim": 8}, "config", "decoder_output_dim"),
        ({"encoder_embed_dim": 10**400}, "config", "encoder_embed_dim"),
        ({"gated_heads": 2}, "config", "gated_heads"),
        ({"encoder_attention_heads": 3}, "config", "encoder.attention"),
        ({"activation_fn": "linear"}, "config", "'linear'"),
        ({"encoder_layers": 3}, "weights", "encoder.layers.2"),
    ],
)
def test_an_option_that_changes_the_computation_is_refused(tmp_path, changes, code, value):
    save(tmp_path / "x.pt", tmp_path / "sprung", **changes)
    load_fails(tmp_path / "x.pt", code, value)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ({"cfg": {"model": {}}}, "weights"),
        ({"model": {"a": 1}}, "weights"),
        ([1], "weights"),
        ({"model": {"encoder.embed_tokens.weight": torch.ones(2)}}, "weights"),
        ({"model": {f"{name}coder.embed_tokens.weight": torch.ones(2) for name in ("en", "de")}}, "config"),
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path, content, code):
    torch.save(content, tmp_path / "x.pt")
    load_fails(tmp_path / "x.pt", code)


def archive(path, data, compression=zipfile.ZIP_STORED, **storages):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", data)
        for name, content in storages.items():
            file.writestr(f"archive/data/{name.removeprefix('s')}", content)
    return path


def test_a_pickle_that_would_execute_something_gives_stubs(tmp_path):
    content = pickle.dumps({"trap": Trap(tmp_path / "sprung"), "options": argparse.Namespace(x=1)})
    table = read_pickle(archive(tmp_path / "a", content))
    assert isinstance(table["trap"], Stub)
    assert table["options"].state == {"x": 1}
    assert not (tmp_path / "sprung").exists()
    for text in (
        b"cos\nsystem\n(S'touch sprung'\ntR.",
        b"cbuiltins\neval\n(S'1+1'\ntR.",
        b"c__builtin__\nexec\n(S'x=1'\ntR.",
    ):
        assert isinstance(read_pickle(archive(tmp_path / "b", text)), Stub)


def test_files_that_are_broken_or_compressed(tmp_path):
    for data in (b"", b"garbage", b"\x80\x04\x95"):
        load_fails(archive(tmp_path / "c", data), "corrupt", read=read_pickle)
    load_fails(archive(tmp_path / "d", pickle.dumps({}), zipfile.ZIP_DEFLATED), "unsafe", read=read_pickle)
    (tmp_path / "e").write_bytes(pickle.dumps({"model": {}}))  # not an archive
    load_fails(tmp_path / "e", "corrupt", read=read_pickle)
    with zipfile.ZipFile(tmp_path / "f", "w") as file:
        file.writestr("other", "")
    load_fails(tmp_path / "f", "corrupt", read=read_pickle)


def test_tensors_that_do_not_fit_their_storage(tmp_path):
    torch.save({"model": {"x": torch.arange(6.0)}}, tmp_path / "good")
    with zipfile.ZipFile(tmp_path / "good") as file:
        data = next(file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
    good = read_pickle(archive(tmp_path / "whole", data, s0=torch.arange(6.0).numpy().tobytes()))
    assert torch.equal(good["model"]["x"], torch.arange(6.0))
    load_fails(archive(tmp_path / "short", data, s0=b"\0" * 8), "corrupt", read=read_pickle)
    load_fails(archive(tmp_path / "empty", data, s0=b""), "corrupt", read=read_pickle)
    load_fails(archive(tmp_path / "none", data), "corrupt", read=read_pickle)


@pytest.mark.parametrize(
    "tensors",
    [[torch.zeros(1).expand(1 << 40)], [torch.zeros(1, 1).expand(1 << 30, 1 << 30)], [torch.zeros(10_000)] * 2],
    ids=["one number", "rows of one number", "one storage many times"],
)
def test_tensors_larger_than_their_file_are_refused(tensors, tmp_path):
    if len(tensors) > 1:  # distinct tensors of one storage
        tensors = [tensors[0].view(-1) for _ in range(100)]
    torch.save({"model": dict(enumerate(tensors))}, tmp_path / "x.pt")
    load_fails(tmp_path / "x.pt", "corrupt", read=read_pickle)


def test_tensors_may_share_a_storage(tmp_path):
    shared = torch.arange(1000.0)
    torch.save({"a": shared, "b": shared.view(10, 100), "c": shared[::2]}, tmp_path / "x.pt")
    content = read_pickle(tmp_path / "x.pt")
    assert torch.equal(content["b"].flatten(), shared)
    assert torch.equal(content["c"], shared[::2])
    content["a"].zero_()
    assert torch.equal(content["b"].flatten(), shared), "each tensor is a copy"


def test_options_that_share_lists_within_lists_are_refused(tmp_path):
    nested = []
    for _ in range(60):
        nested = [nested, nested]  # 2^60 lists to print
    for key in ("activation_fn", "adaptive_softmax_cutoff", "unknown"):
        save(tmp_path / "x.pt", tmp_path / "sprung", **{key: nested})
        load_fails(tmp_path / "x.pt", "config", key)


@pytest.fixture
def folder(tmp_path):
    """A fairseq folder with a tokenizer."""
    folder = tmp_path / "folder"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "data").mkdir()
    save(folder / "checkpoints" / "checkpoint_best.pt", tmp_path / "sprung")
    source, target = ("a", "b@@", "ab", "c", "ab@@", "d", "e", "f", "g"), ("x@@", "y", "z", "u", "v", "w", "t")
    (folder / "data" / "dict.aa.txt").write_text("".join(f"{word} 5\n" for word in source))
    (folder / "data" / "dict.bb.txt").write_text("".join(f"{word} 5\n" for word in target))
    (folder / "data" / "bpe.code").write_text("#version: 0.2\na b</w>\na b\n")
    return folder


def test_words_are_split_and_joined(folder):
    ours = manyheads.load(folder)
    assert ours.tokenizer.encode_batch(["ab abc q"])[0].ids == [6, 8, 7, 3, 2]
    assert ours.tokenizer.decode([4, 5, 6, 2]) == "xy z"
    assert isinstance(ours.generate("ab abc", max_new_tokens=4), str)


SOURCES = ["ab abc q", "c", "d e f g a ab"]


def test_texts_are_predicted(folder, tmp_path):
    """Each line of a file gives what its text gives alone."""
    expected = manyheads.load(folder).generate(SOURCES, max_new_tokens=4)
    assert [row["generated"] for row in manyheads.predict(folder, SOURCES, max_new_tokens=4)] == expected
    (tmp_path / "texts").write_text("\n".join(SOURCES))
    command = ("predict", folder, "--max-new-tokens", 4)
    assert run(*command, SOURCES[0]).stdout == f"{expected[0]}\n"
    assert run(*command, "--file", tmp_path / "texts").stdout == "".join(f"{line}\n" for line in expected)


def test_translations_are_evaluated(folder, tmp_path):
    data, settings = tmp_path / "pairs.tsv", {"max_new_tokens": 4, "num_beams": 1}
    outputs = manyheads.load(folder).generate(SOURCES, **settings)
    data.write_text("".join(f"{source}\t{target}\n" for source, target in zip(SOURCES, outputs, strict=True)))
    assert run_json("evaluate", folder, "--data", data, "--num-beams", 1)["task"] == "seq2seq"
    report = manyheads.evaluate(folder, data=str(data), task="translate", **settings)
    assert [row["prediction"] for row in report["outputs"]] == outputs
    assert report["metrics"]["model"]["exact_match"] == 1
    assert report["notes"] == []
    (note,) = manyheads.evaluate(folder, data=str(data), max_length=3, **settings)["notes"]
    assert "2 of 3" in note


def test_a_truncated_text_ends_as_a_whole_one_does(folder):
    whole = manyheads.load(folder)
    (short,) = whole.for_evaluation(3).encode(["ab abc q"])
    assert short.ids == [6, 8, 2]
    assert [item.ids for item in short.overflowing] == [[7, 3]]
    assert not whole.for_evaluation(5).encode(["ab abc q"])[0].overflowing
    assert whole.encode(["ab abc q"])[0].ids == [6, 8, 7, 3, 2], "the original is not changed"


def test_a_task_that_encodes_targets_is_refused(folder, tmp_path):
    """The tokenizer reads texts of the source language only."""
    (tmp_path / "text").write_text("ab abc\n")
    error = error_of("evaluate", folder, "--data", tmp_path / "text", "--task", "spans", check=2)
    assert error["code"] == "config.incompatible"
    (tmp_path / "own.py").write_text(OWN_TASK)
    (tmp_path / "pairs.tsv").write_text("ab abc\txy z\n")
    command = ("evaluate", folder, "--data", tmp_path / "pairs.tsv", "--parts", tmp_path / "own.py")
    assert error_of(*command, "--task", "test-loss", check=2)["code"] == "model.unsupported"


OWN_TASK = """
from manyheads.tasks.seq2seq import Seq2SeqSpec
from manyheads.tasks.task import TaskSpec


class LossSpec(Seq2SeqSpec, kind="test-loss"):
    is_default = False
    evaluate = TaskSpec.evaluate
"""


def test_a_folder_keeps_every_invariant(folder):
    """Its source dictionary is larger than its target dictionary, and its tokenizer encodes sources."""
    assert not [row for row in manyheads.audit(folder) if row.status == "failed"]


def test_dictionaries_that_cannot_be_read(folder, tmp_path):
    path = folder / "data" / "dict.aa.txt"
    path.write_bytes(b"\xff 5\n")
    load_fails(folder, "corrupt", "dict.aa.txt")
    path.unlink()
    path.symlink_to(tmp_path / "outside")
    load_fails(folder, "unsafe", "dict.aa.txt")
    path.unlink()
    assert manyheads.load(folder).tokenizer is None  # one dictionary is missing


def test_every_parameter_has_a_row():
    family = get_family("fairseq")
    for before in (True, False):
        changes = {"encoder_normalize_before": before, "decoder_normalize_before": before}
        spec = family.spec_of(CONFIG | changes | {"source_tokens": 13, "target_tokens": 11})
        parameters = dict(build_meta(spec).named_parameters())
        assert family.table(spec, "TransformerModel", parameters).covers(parameters)
