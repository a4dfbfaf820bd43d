"""Reading other people's files: nothing executes, nothing outside is opened, and what is broken is named. A real folder each time."""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import manyheads
from manyheads import build, read
from manyheads.convert.files import FileError, Shard, inside, published

SMALL = (
    "decoder.layers=1",
    "decoder.width=8",
    "decoder.attention.heads=2",
    "decoder.feedforward.hidden=8",
    "decoder.position.length=6",
    "vocab=7",
)


@pytest.fixture
def folder(tmp_path):
    """A small folder that loads, to be spoiled."""
    manyheads.export(build(read("gpt2", *SMALL)), tmp_path / "model")
    manyheads.load(tmp_path / "model")
    return tmp_path / "model"


def refused(folder, said, **options):
    with pytest.raises(FileError, match=said) as caught:
        manyheads.load(folder, **options)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def changed(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_configs(folder):
    path, whole = folder / "config.json", (folder / "config.json").read_text()
    for text, said in (
        ("{", "cannot be read as JSON"),
        ("[]", "expected a table"),
        (whole[:-3] + ', "n_layer": 2}', "a key stands there twice"),
        ('{"n_layer": NaN}', "NaN is no number that JSON has"),
        ('{"a": ' + "[" * 60 + "]" * 60 + "}", "more than 32 deep"),
        ("[" * 100_000, "more than 32 deep"),
        (" " * (1 << 20) + whole, "expected at most 1,048,576"),
        (whole.replace("gpt2", "mamba", 1).replace('"model_type": "gpt2"', '"model_type": "mamba"'), "no family 'mamba'"),
    ):
        path.write_text(text)
        refused(folder, said)
    path.write_bytes(b"\xff\xfe")
    refused(folder, "cannot be read as JSON")
    path.unlink()
    refused(folder, "cannot read .*config.json: No such file")


def test_a_config_that_asks_for_more_than_there_is_takes_no_memory(folder):
    changed(folder, n_embd=65536, n_layer=1024, n_inner=1 << 20, n_head=2)
    refused(folder, r"h.0.attn.c_attn.bias has shape \(24,\), the config implies \(196608,\)|the checkpoint lacks a weight")


def test_remote_code_is_not_run(folder, tmp_path):
    changed(folder, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    manyheads.load(folder)
    assert not (tmp_path / "ran").exists()


class Trap:
    def __reduce__(self):
        return os.mkdir, ("/tmp/manyheads-trap",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl"])
def test_pickles_are_never_read(folder, name, tmp_path):
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "aside")
    (folder / name).write_bytes(pickle.dumps(Trap()))
    refused(folder, f"has no model.safetensors; {name} is a pickle")
    weights.write_bytes(pickle.dumps(Trap()))  # under a good name too
    refused(folder, "is no safetensors file|header that cannot be read")
    assert not os.path.exists("/tmp/manyheads-trap")


def test_links_and_names_that_lead_out(folder, tmp_path):
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    refused(folder, "is a link that leads out of its folder")
    (folder / "model.safetensors").unlink()
    for name in ("../outside.safetensors", str(outside), "..", "", "a/b.safetensors", "x\0y", "x\ud800"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": name}}))
        refused(folder, "is not the name of a file in")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": "a" * 300}}))
    refused(folder, "cannot read .*: File name too long")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": 3}}))
    refused(folder, "has no weight_map")


def test_a_snapshot_of_the_hubs_cache_may_link_to_its_blobs_and_nowhere_else(folder, tmp_path):
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "0a1b"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    manyheads.load(snapshot)
    (snapshot / "1_Pooling").mkdir()
    (blobs / "pooling").write_text("{}")
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/pooling")
    assert inside(snapshot / "1_Pooling", "config.json").read_text() == "{}"
    other = tmp_path / "models--y" / "blobs"
    other.mkdir(parents=True)
    (blobs / "within").mkdir()
    for place in (tmp_path, tmp_path / "models--x", other, snapshot.parent, blobs / "within"):
        (place / "config.json").write_bytes((blobs / "config.json").read_bytes())
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(place / "config.json")
        refused(snapshot, "is a link that leads out of its folder")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../blobs/config.json")
    snapshot.rename(tmp_path / "models--x" / "elsewhere")
    refused(tmp_path / "models--x" / "elsewhere", "cannot read|leads out of its folder")


def test_a_link_to_itself(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    refused(folder, "config.json")


@pytest.mark.parametrize("copy", [False, True])
def test_a_file_that_is_cut_between_its_header_and_its_weights(folder, copy):
    shard = Shard(folder / "model.safetensors", copy=copy)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(900)
    with pytest.raises(FileError, match="was changed while it was read"):
        shard.read("transformer.wte.weight")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileError, match="cannot read .*model.safetensors: No such file"):
        Shard(folder / "model.safetensors", copy=copy)


def test_a_copy_does_not_depend_on_its_file(folder):
    ids = torch.tensor([[1, 2, 3]])
    ours = manyheads.load(folder, copy=True)
    before = ours.logits(ids)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert torch.equal(ours.logits(ids), before)


def test_what_is_no_plain_file_is_not_waited_for(folder):
    (folder / "tokenizer.json").write_text("{}")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).rename(folder / "aside")
        os.mkfifo(folder / name)
        refused(folder, "is not a plain file")
        (folder / name).unlink()
        (folder / "aside").rename(folder / name)


@pytest.mark.parametrize("name", ["x.gguf", "x.pt", "ünï 🙂"])
def test_a_folder_is_one_whatever_it_is_called(folder, tmp_path, name):
    manyheads.load(folder.rename(tmp_path / name))
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "file is no folder")


def test_whole_numbers_are_no_weights(folder):
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.uint16):
        tensors = load_file(folder / "model.safetensors")
        tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].to(dtype)
        save_file(tensors, folder / "model.safetensors")
        refused(folder, f"transformer.wpe.weight is stored as {str(dtype).removeprefix('torch.')}, and such numbers are no weights")


def test_what_nobody_reads_may_be_of_any_sort(folder):
    tensors = load_file(folder / "model.safetensors") | {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint16)}
    save_file(tensors, folder / "model.safetensors")
    assert manyheads.load(folder).origin.unused["transformer.h.0.attn.bias"].dtype == torch.uint16


def test_a_model_that_has_another_dtype_now_says_so(folder, tmp_path):
    """Or else the reference would cut what was learned in float32 down to what it came in."""
    path = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    changed(folder, dtype="bfloat16")
    manyheads.export(manyheads.load(folder, dtype=torch.float32), tmp_path / "wide")
    manyheads.export(folder, tmp_path / "same")
    said = [json.loads((tmp_path / name / "config.json").read_text())["dtype"] for name in ("wide", "same")]
    assert said == ["float32", "bfloat16"]


def test_shards(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, own in halves.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    places = {name: file for file, own in halves.items() for name in own}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    found = manyheads.load(folder).model
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in found.state_dict().items())
    index.write_text(json.dumps({"weight_map": places | {"more": "b.safetensors"}}))
    refused(folder, "do not agree on more")
    save_file({name: tensors[name] for name in names[4:]}, folder / "b.safetensors")
    index.write_text(json.dumps({"weight_map": places}))
    refused(folder, "stands in a.safetensors and in b.safetensors")
    (folder / "b.safetensors").unlink()
    refused(folder, "cannot read .*b.safetensors")


def test_an_export_in_shards_comes_back(folder, tmp_path):
    from manyheads.convert.folder import write_folder

    ours = manyheads.load(folder)
    write_folder(ours.model, tmp_path / "cut", ours.origin, shard_bytes=500)
    assert len(list((tmp_path / "cut").glob("model-*-of-*.safetensors"))) > 1
    again = manyheads.load(tmp_path / "cut").model
    assert all(torch.equal(a, b) for a, b in zip(ours.model.state_dict().values(), again.state_dict().values(), strict=True))


def test_names_and_shapes(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for stored, said in (
        (tensors | {"transformer.extra": torch.zeros(1)}, "a weight this family does not have: transformer.extra"),
        (
            {name: tensor for name, tensor in tensors.items() if "ln_f.bias" not in name},
            "lacks a weight this family has: transformer.ln_f.bias",
        ),
        (tensors | {"transformer.ln_f.bias": torch.zeros(9)}, r"ln_f.bias has shape \(9,\), the config implies \(8,\)"),
        (tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, "lm_head.weight should be tied to"),
    ):
        save_file(stored, path)
        refused(folder, said)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none(folder, wrong):
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.mlp.c_fc.weight"][2, 3] = wrong
    save_file(tensors, folder / "model.safetensors")
    refused(folder, "transformer.h.0.mlp.c_fc.weight holds numbers that are not finite")
    manyheads.load(folder, allow_nonfinite=True)


def header(entries):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(start, stop, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is no safetensors file"),
        (b"\0" * 7, "is no safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "should have 1,152,921,504,606,846,976 bytes"),
        (struct.pack("<Q", (100 << 20) + 1) + b" " * 100, "is no safetensors file"),
        (header({"a": entry(0, 8)}), "should have .* bytes by its header"),
        (header({"a": entry(0, 8)}) + b"\0" * 9, "should have .* bytes by its header"),
        (header({"a": entry(0, 8), "b": entry(4, 12)}) + b"\0" * 12, "do not hold F32"),
        (header({"a": entry(8, 16)}) + b"\0" * 16, "do not hold F32"),
        (header({"a": entry(0, 8, shape=(3,))}) + b"\0" * 8, r"do not hold F32 \(3,\)"),
        (header({"a": entry(0, 8, shape=(-2,))}) + b"\0" * 8, "do not hold F32"),
        (header({"a": entry(0, 8, shape=(1 << 62, 4))}) + b"\0" * 8, "do not hold F32"),
        (header({"a": entry(0, 8, dtype="F8")}) + b"\0" * 8, "is stored as 'F8', a form that is not known"),
        (header({"a": {"dtype": "F32"}}) + b"\0" * 8, "header that cannot be read"),
        (header([1]) + b"\0" * 8, "header that cannot be read"),
        (struct.pack("<Q", 4) + b"\xff\xff\xff\xff", "header that cannot be read"),
        (struct.pack("<Q", 9000) + b"[" * 9000, "header that cannot be read"),
    ],
)
def test_headers(tmp_path, data, said):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(FileError, match=said):
        Shard(path)


@settings(max_examples=60)
@given(data=st.data())
def test_a_spoiled_file_is_named_or_says_the_same(data, tmp_path_factory):
    """Cut anywhere, or with any byte of its header changed: an error of one sentence, or the very same tensors."""
    path = tmp_path_factory.mktemp("spoiled") / "x.safetensors"
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.int32)}
    save_file(tensors, path)
    whole = path.read_bytes()
    if data.draw(st.booleans(), label="cut"):
        spoiled = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        place = data.draw(st.integers(0, 8 + int.from_bytes(whole[:8], "little") - 1))
        spoiled = whole[:place] + bytes([data.draw(st.integers(0, 255))]) + whole[place + 1 :]
    path.write_bytes(spoiled)
    try:
        shard = Shard(path)
        for name in shard.entries:
            shard.read(name)
    except FileError:
        return
    assert len(spoiled) == len(whole)


def test_tokenizers_that_are_none(folder):
    for data in (b"", b"{}", b"\xff", b"[" * 100_000, json.dumps({"model": {"type": "BPE", "vocab": 3}}).encode()):
        (folder / "tokenizer.json").write_bytes(data)
        refused(folder, "tokenizer.json cannot be read")
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    refused(folder, "expected at most 67,108,864")


def test_an_export_that_is_interrupted_leaves_nothing_under_the_final_name(folder, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    ours = manyheads.load(folder)
    monkeypatch.setattr("manyheads.convert.folder.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        manyheads.export(ours, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="exists already"):
        manyheads.export(ours, folder)
    with pytest.raises(ValueError, match="given 'onx', expected one of hf"):
        manyheads.export(ours, tmp_path / "x", to="onx")


def left(place):
    return sorted(path.name for path in place.iterdir())


def test_an_export_to_where_nothing_can_stand_is_one_sentence(folder, tmp_path):
    ours = manyheads.load(folder)
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    for place, said in (
        (tmp_path / "file" / "x", "cannot write .*file/x: Not a directory"),
        (tmp_path / "file" / "y" / "x", "cannot write .*x: Not a directory"),
        (tmp_path / "dangling", "dangling exists already"),
        (tmp_path / "file", "file exists already"),
        (tmp_path / ("a" * 256), "cannot write .*: File name too long"),
        (tmp_path / "new" / ("a" * 256) / "x", "File name too long"),
        (tmp_path / "x\0y", "cannot write .*null byte"),
    ):
        for model in (ours, folder):
            with pytest.raises(ValueError, match=said):
                manyheads.export(model, place)
    assert left(tmp_path) == ["dangling", "file", "model"]
    manyheads.export(ours, tmp_path / ("a" * 250))
    manyheads.load(tmp_path / ("a" * 250))
    with pytest.raises(ValueError, match="model/copy is within .*model, which is to be written there"):
        manyheads.export(folder, folder / "copy")
    with pytest.raises(ValueError, match="exists already"):
        manyheads.export(folder, folder)
    with pytest.raises(ValueError, match="given a dict, expected something loaded, a model of build, or a path"):
        manyheads.export({}, tmp_path / "z")


def test_two_exports_to_one_place_are_one_export_and_one_sentence(folder, tmp_path):
    ours, place = manyheads.load(folder), tmp_path / "new" / "out"

    def publish(text, then=lambda: None):
        with published(place) as draft:
            draft.write_text(text)
            then()

    with pytest.raises(ValueError, match="out exists already"):
        publish("1", lambda: publish("2"))
    assert place.read_text() == "2"
    assert left(place.parent) == ["out"]

    def write(_):
        try:
            manyheads.export(ours, tmp_path / "threads")
        except ValueError as error:
            return str(error)
        return "written"

    with ThreadPoolExecutor(4) as pool:
        found = sorted(pool.map(write, range(4)))
    assert found.count("written") == 1
    assert all("exists already" in said or "cannot write" in said for said in found[:-1])
    assert left(tmp_path) == ["model", "new", "threads"]
    manyheads.load(tmp_path / "threads")


def test_a_draft_that_fails_leaves_nothing_not_even_the_folders_above_it(tmp_path):
    def fill():
        with published(tmp_path / "a" / "b" / "out") as draft:
            draft.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ValueError, match="cannot write .*out: No space left on device"):
        fill()
    assert not left(tmp_path)


def test_a_disk_that_is_full_is_one_sentence(tmp_path):
    code = (
        "import resource, signal, sys, manyheads\nfrom manyheads import build, read\n"
        f"model = build(read('gpt2', *{SMALL!r}))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try: manyheads.export(model, sys.argv[1])\nexcept ValueError as error: assert 'cannot write' in str(error), error\nelse: assert False"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=True)
    assert not left(tmp_path)


@pytest.mark.parametrize("sorts", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float64, torch.float32)])
def test_tensors_of_several_sorts_go_back_as_they_came(folder, tmp_path, sorts):
    """Norms in one, matrices in another: the model holds both as they are, and so does what is written from it."""
    path = folder / "model.safetensors"
    stored = {name: torch.randn_like(tensor).to(sorts["ln" not in name]) for name, tensor in load_file(path).items()}
    stored["lm_head.weight"] = stored["transformer.wte.weight"].to(torch.promote_types(*sorts))  # tied, and of another sort
    save_file(stored, path)
    changed(folder, dtype="float16")  # which the reference would load it in; here a model has what is stored
    ours = manyheads.load(folder)
    assert {parameter.dtype for parameter in ours.model.parameters()} == {torch.promote_types(*sorts)}
    manyheads.export(ours, tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in back.items()} == {name: tensor.dtype for name, tensor in stored.items()}
    assert all(torch.equal(back[name], stored[name]) for name in stored)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    with torch.no_grad():  # what it learns is not lost
        ours.model.decoder.embed.table.weight.add_(1e-7)
    manyheads.export(ours, tmp_path / "learned")
    again = load_file(tmp_path / "learned" / "model.safetensors")["transformer.wte.weight"]
    assert torch.equal(again, ours.model.decoder.embed.table.weight)
    with pytest.raises(ValueError, match="dtype is torch.int8, expected torch.float64"):
        manyheads.load(folder, dtype=torch.int8)
