"""Which files are opened to load a checkpoint: each small one once, and the manifest with the hashes only to verify."""

from __future__ import annotations

import pytest
from small_checkpoints import folder_of
from small_runs import described, opened_files, train_all

import manyheads


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of Hugging Face, and a run."""
    folder = tmp_path_factory.mktemp("reads")
    folder_of("llama", folder / "llama")
    train_all(described("seq2seq", steps=1), folder / "run")
    return folder


USES = {
    "load": manyheads.load,
    "load quantized": lambda path: manyheads.load(path, weights="int8"),
    "predict": lambda path: manyheads.predict(path, "1 2 3", max_new_tokens=1),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["llama", "run"])
def test_each_small_file_is_read_once_and_no_weight_is_hashed(name, use, folder):
    with opened_files(folder / name) as opened:
        USES[use](folder / name)
    files = {path.rpartition("/")[2]: count for path, count in opened.items()}
    assert files.pop("model.safetensors") == 2  # its header, and the weights, which are mapped
    assert set(files.values()) == {1}
    assert {"config.json", "tokenizer.json"} <= files.keys()
    assert "manifest.json" not in files


def test_the_manifest_is_read_to_verify(folder):
    with opened_files(folder / "run") as opened:
        manyheads.load(folder / "run", verify=True)
    assert opened["checkpoints/step-00000001/manifest.json"] == 1
