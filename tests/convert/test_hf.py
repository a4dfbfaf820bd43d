"""Folders of other people: nothing executes, nothing outside is opened, and what is broken is refused by name."""

from __future__ import annotations

import json
import os
import pickle
import resource
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from command import error_of, run, set_attribute
from raising import raises
from safetensors.torch import load_file, save_file

import manyheads
from manyheads import build, read
from manyheads.convert.hf import write_folder
from manyheads.errors import CheckpointError, ManyheadsError

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
    """A small folder that loads."""
    manyheads.export(build(read("gpt2", *SMALL)), tmp_path / "model")
    manyheads.load(tmp_path / "model")
    return tmp_path / "model"


def load_fails(folder, code, *values, **options):
    with raises(f"checkpoint.{code}", *values) as caught:
        manyheads.load(folder, **options)
    assert caught.value.exit_status == 4


def change_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# -------------------------------------------------------------------------------------------------------------- configs


def test_configs_that_cannot_be_read(folder):
    path, whole = folder / "config.json", (folder / "config.json").read_text()
    for text in ("{", "[]", whole[:-3] + ', "n_layer": 2}', '{"n_layer": NaN}', "[" * 100_000, " " * (1 << 20) + whole):
        path.write_text(text)
        load_fails(folder, "corrupt", "config.json")
    path.write_bytes(b"\xff\xfe")
    load_fails(folder, "corrupt", "config.json")
    path.unlink()
    load_fails(folder, "not-found", "config.json")
    with raises("usage.path-not-found", "nothing"):
        manyheads.load(folder / "nothing")
    (folder / "file").write_text("")
    load_fails(folder / "file", "not-found", "file")


def test_an_unknown_model_type_is_named_before_its_weights_are_looked_for(folder):
    (folder / "model.safetensors").unlink()
    for value in ("mamba", None, ["gpt2"], {}):
        change_config(folder, model_type=value)
        load_fails(folder, "architecture", repr(value))
    change_config(folder, model_type="gpt2", architectures=["GPT2DoubleHeadsModel"])
    load_fails(folder, "architecture", "GPT2DoubleHeadsModel", "config.json")
    change_config(folder, architectures=["GPT2LMHeadModel"], n_head=3)
    load_fails(folder, "config", "decoder", "config.json")
    change_config(folder, n_head=2, activation_function=["relu"])
    load_fails(folder, "config", "activation_function", "config.json")
    change_config(folder, activation_function="relu")
    load_fails(folder, "weights", "model.safetensors")


def test_a_description_of_our_own_format_is_checked_too(tmp_path):
    folder = tmp_path / "own"
    manyheads.export(build(read("gpt2", *SMALL)), folder, to="manyheads")
    model = json.loads((folder / "config.json").read_text())["model"]
    for value in (None, 3, {"encoder": 1}, model | {"vocab": "many"}, model | {"extra": 1}):
        change_config(folder, model=value)
        load_fails(folder, "config", "config.json")
    change_config(folder, model=model | {"vocab": 8})
    load_fails(folder, "weights", "decoder.embed.table.weight", "(7, 8)", "(8, 8)")


def test_a_config_that_implies_huge_weights_takes_no_memory(folder):
    change_config(folder, n_embd=65536, n_layer=16, n_inner=1 << 20, n_head=2)
    load_fails(folder, "weights", "h.1")


def test_remote_code_is_not_run(folder, tmp_path):
    change_config(folder, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    manyheads.load(folder)
    assert not (tmp_path / "ran").exists()


# -------------------------------------------------------------------------------------------------------- unsafe files


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl"])
def test_pickles_are_never_read(folder, name, tmp_path):
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "aside")
    (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "trap")))
    load_fails(folder, "unsafe", name)
    weights.write_bytes(pickle.dumps(Trap(tmp_path / "trap")))  # under a good name too
    load_fails(folder, "corrupt", "model.safetensors")
    assert not (tmp_path / "trap").exists()


def test_links_and_names_that_lead_out_of_the_folder(folder, tmp_path):
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    load_fails(folder, "unsafe", "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for name in ("../outside.safetensors", str(outside), "..", "", "a/b.safetensors", "x\0y"):
        index.write_text(json.dumps({"weight_map": {"wte.weight": name}}))
        load_fails(folder, "unsafe", str(folder))
    index.write_text(json.dumps({"weight_map": {"wte.weight": "a" * 300}}))
    load_fails(folder, "invalid", "a" * 300)
    index.write_text(json.dumps({"weight_map": {"wte.weight": 3}}))
    load_fails(folder, "corrupt", "weight_map")


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
    assert manyheads.load(snapshot).metadata.extra_files["1_Pooling/config.json"] == b"{}"
    other = tmp_path / "models--y" / "blobs"
    other.mkdir(parents=True)
    (blobs / "within").mkdir()
    for target in (tmp_path, tmp_path / "models--x", other, snapshot.parent, blobs / "within"):
        (target / "config.json").write_bytes((blobs / "config.json").read_bytes())
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(target / "config.json")
        load_fails(snapshot, "unsafe", "config.json")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../blobs/config.json")
    snapshot.rename(tmp_path / "models--x" / "elsewhere")
    with pytest.raises(CheckpointError):
        manyheads.load(tmp_path / "models--x" / "elsewhere")


def test_a_pipe_is_not_waited_for(folder):
    (folder / "tokenizer.json").write_text("{}")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).rename(folder / "aside")
        os.mkfifo(folder / name)
        load_fails(folder, "unsafe", name)
        (folder / name).unlink()
        (folder / "aside").rename(folder / name)


@pytest.mark.parametrize("name", ["x.gguf", "x.pt", "ünï 🙂"])
def test_a_folder_may_have_any_name(folder, tmp_path, name):
    manyheads.load(folder.rename(tmp_path / name))


def test_tokenizers_that_cannot_be_read(folder):
    for data in (b"", b"{}", b"\xff", b"[" * 100_000, json.dumps({"model": {"type": "BPE", "vocab": 3}}).encode()):
        (folder / "tokenizer.json").write_bytes(data)
        load_fails(folder, "tokenizer", "tokenizer.json")
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    load_fails(folder, "corrupt", "tokenizer.json")


# -------------------------------------------------------------------------------------------------------------- weights


def test_a_copy_does_not_depend_on_its_file(folder):
    ids = torch.tensor([[1, 2, 3]])
    ours = manyheads.load(folder, copy=True)
    before = ours.logits(ids)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert torch.equal(ours.logits(ids), before)


def test_weights_must_be_floating_point(folder):
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.uint16):
        tensors = load_file(folder / "model.safetensors")
        tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].to(dtype)
        save_file(tensors, folder / "model.safetensors")
        load_fails(folder, "weights", "transformer.wpe.weight", str(dtype))


def test_an_unused_tensor_may_have_any_dtype(folder):
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint16)}
    save_file(load_file(folder / "model.safetensors") | mask, folder / "model.safetensors")
    assert manyheads.load(folder).metadata.weights.unused["transformer.h.0.attn.bias"].dtype == torch.uint16


def test_weights_with_other_names_or_shapes_are_refused_by_name(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    without_bias = {name: tensor for name, tensor in tensors.items() if "ln_f.bias" not in name}
    for stored, *values in (
        (tensors | {"transformer.extra": torch.zeros(1)}, "transformer.extra"),
        (tensors | {"transformer.h.1.attn.bias": torch.zeros(1)}, "transformer.h.1.attn.bias"),  # it has one layer
        (without_bias, "transformer.ln_f.bias"),
        (tensors | {"transformer.ln_f.bias": torch.zeros(9)}, "transformer.ln_f.bias", "(9,)", "(8,)"),
        (tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, "lm_head.weight", "transformer.wte"),
        (tensors | {"lm_head.weight": torch.zeros(2)}, "lm_head.weight", "transformer.wte"),
    ):
        save_file(stored, path)
        load_fails(folder, "weights", *values)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(folder, value):
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.mlp.c_fc.weight"][2, 3] = value
    save_file(tensors, folder / "model.safetensors")
    load_fails(folder, "non-finite", "transformer.h.0.mlp.c_fc.weight")
    manyheads.load(folder, allow_nonfinite=True)


def test_shards_are_read_as_one_file_and_an_index_that_does_not_fit_them_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    keys = sorted(tensors)
    halves = {"a.safetensors": keys[:5], "b.safetensors": keys[5:]}
    for file, own in halves.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in halves.items() for name in own}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    stored = manyheads.load(folder).metadata.weights.tensors(manyheads.load(folder).model)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in tensors.items())
    index.write_text(json.dumps({"weight_map": weight_map | {"more": "b.safetensors"}}))
    load_fails(folder, "corrupt", "more")
    save_file({name: tensors[name] for name in keys[4:]}, folder / "b.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map}))
    load_fails(folder, "corrupt", "a.safetensors", "b.safetensors", keys[4])
    (folder / "b.safetensors").unlink()
    load_fails(folder, "not-found", "b.safetensors")


# -------------------------------------------------------------------------------------------------------------- exports


def export_fails(code, *arguments, **options):
    with pytest.raises(ManyheadsError) as caught:
        manyheads.export(*arguments, **options)
    assert caught.value.code == code
    return str(caught.value)


def test_an_export_in_shards_can_be_loaded(folder, tmp_path):
    ours = manyheads.load(folder)
    write_folder(ours.model, tmp_path / "shards", ours.metadata, shard_bytes=500)
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 1
    again = manyheads.load(tmp_path / "shards").model
    assert all(
        torch.equal(a, b) for a, b in zip(ours.model.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_a_model_with_another_dtype_has_it_in_its_config(folder, tmp_path):
    """Otherwise transformers would round float32 weights to the dtype that they came in."""
    path = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    change_config(folder, dtype="bfloat16")
    manyheads.export(manyheads.load(folder, dtype=torch.float32), tmp_path / "wide")
    manyheads.export(folder, tmp_path / "same")
    dtypes = [json.loads((tmp_path / name / "config.json").read_text())["dtype"] for name in ("wide", "same")]
    assert dtypes == ["float32", "bfloat16"]


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float64, torch.float32)]
)
def test_tensors_of_several_dtypes_are_exported_as_they_came(folder, tmp_path, dtypes):
    """Norms in one, matrices in another: the model holds both exactly, and so does its export."""
    path = folder / "model.safetensors"
    stored = {name: torch.randn_like(tensor).to(dtypes["ln" not in name]) for name, tensor in load_file(path).items()}
    widest = torch.promote_types(*dtypes)
    stored["lm_head.weight"] = stored["transformer.wte.weight"].to(widest)  # tied, and of another dtype
    save_file(stored, path)
    change_config(folder, dtype="float16")  # which transformers would load it in; here the stored dtypes count
    ours = manyheads.load(folder)
    assert {parameter.dtype for parameter in ours.model.parameters()} == {widest}
    manyheads.export(ours, tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in back.items()} == {name: item.dtype for name, item in stored.items()}
    assert all(torch.equal(back[name], stored[name]) for name in stored)
    configs = [json.loads((path / "config.json").read_text()) for path in (tmp_path / "back", folder)]
    assert configs[0] == configs[1]
    with torch.no_grad():  # what it learns is not lost
        ours.model.decoder.embed.table.weight.add_(1e-7)
    manyheads.export(ours, tmp_path / "learned")
    again = load_file(tmp_path / "learned" / "model.safetensors")["transformer.wte.weight"]
    assert torch.equal(again, ours.model.decoder.embed.table.weight)


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_an_export_that_is_interrupted_leaves_nothing_under_the_final_name(folder, tmp_path):
    """Ctrl-C while the weights are written; the next export finds nothing in its way."""
    before = partial(set_attribute, "manyheads.convert.hf", "save_file", interrupt)
    run("export", folder, tmp_path / "new" / "out", check=130, before=before)
    assert names(tmp_path) == ["model"]
    manyheads.export(folder, tmp_path / "new" / "out")


def test_an_export_to_an_impossible_path_is_one_line(folder, tmp_path):
    ours = manyheads.load(folder)
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    for path, code in (
        (tmp_path / "file" / "x", "usage.output"),
        (tmp_path / "file" / "y" / "x", "usage.output"),
        (tmp_path / "dangling", "usage.output-exists"),
        (tmp_path / "file", "usage.output-exists"),
        (tmp_path / ("a" * 256), "usage.output"),
        (tmp_path / "new" / ("a" * 256) / "x", "usage.output"),
        (tmp_path / "x\0y", "usage.output"),
    ):
        for model in (ours, folder):
            assert "\n" not in export_fails(code, model, path)
    assert names(tmp_path) == ["dangling", "file", "model"]
    manyheads.export(ours, tmp_path / ("a" * 250))
    manyheads.load(tmp_path / ("a" * 250))
    export_fails("usage.output-exists", folder, folder)
    assert str(folder / "copy") in export_fails("usage.output", folder, folder / "copy")  # within what it reads


def test_of_exports_to_one_path_one_succeeds(folder, tmp_path):
    ours = manyheads.load(folder)

    def export(_):
        try:
            manyheads.export(ours, tmp_path / "out")
        except ManyheadsError as error:
            return error.code
        return "written"

    with ThreadPoolExecutor(4) as pool:
        results = sorted(pool.map(export, range(4)))
    assert results.count("written") == 1
    assert set(results) <= {"written", "usage.output-exists", "usage.output"}
    assert names(tmp_path) == ["model", "out"]
    manyheads.load(tmp_path / "out")


def test_a_full_disk_is_one_line(folder, tmp_path):
    before = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2000, 2000))
    assert error_of("export", folder, tmp_path / "out", check=5, before=before)["code"] == "resource.disk"
    assert names(tmp_path) == ["model"]
