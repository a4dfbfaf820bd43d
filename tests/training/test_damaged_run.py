"""Pipes, devices and links among the files of a run: none is waited for, and no link is written through."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext

import pytest
import torch
from command import error_of
from raising import raises
from safetensors.torch import load_file, save_file
from small_runs import described, end_of, train_all

from manyheads.training.store import write_manifest


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    train_all(described("seq2seq", steps=2), folder)
    return folder


def endless_link(path):
    path.symlink_to("/dev/zero")


def huge_file(path):
    with path.open("wb") as file:
        file.truncate(1 << 36)


@pytest.mark.parametrize("make", [os.mkfifo, endless_link, huge_file])
@pytest.mark.parametrize(
    ("name", "code", "status"),
    [
        ("lock.json", None, 0),
        (".lock.json.draft", None, 0),
        ("env.json", "run.invalid", 2),
        (".env.json.draft", None, 0),
        ("data.json", "run.invalid", 2),
        ("run.toml", "config.file", 2),
        ("metrics.jsonl", "usage.output", 2),
        ("checkpoints/latest", None, 0),
        ("checkpoints/best", None, 0),
        ("checkpoints/step-00000002/manifest.json", "checkpoint.corrupt", 4),
        ("checkpoints/step-00000002/trainer.json", "checkpoint.corrupt", 4),
        ("checkpoints/step-00000002/config.json", "checkpoint.corrupt", 4),
    ],
)
def test_an_endless_file_of_a_run_is_not_waited_for(name, code, status, make, trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    named = "run.toml" if name == "env.json" else name.rpartition("/")[2]  # without env.json, run.toml is a user's
    with raises(code, named) if code else nullcontext() as caught:
        assert end_of(train_all(described("seq2seq", steps=3), folder))[0] == 3
    assert caught is None or caught.value.exit_status == status


def test_a_link_in_place_of_a_draft_is_not_followed(tmp_path):
    train_all(described("seq2seq", steps=1), tmp_path / "run")
    (tmp_path / "own").write_text("mine")
    (tmp_path / "run" / ".env.json.draft").symlink_to(tmp_path / "own")
    train_all(described("seq2seq", steps=2), tmp_path / "run")
    assert (tmp_path / "own").read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "code", "status"),
    [("train", "config.file", 2), ("evaluate", "checkpoint.not-found", 4), ("show", "config.file", 2)],
)
def test_a_run_file_is_a_regular_file(command, code, status, tmp_path):
    os.mkfifo(tmp_path / "run.toml")
    (tmp_path / "parts.py").symlink_to("/dev/zero")
    options = ["--output", tmp_path / "out"] if command == "train" else []
    for path in (tmp_path / "run.toml", "/dev/zero"):
        assert error_of(command, path, *options, check=status)["code"] == code
    error = error_of(command, tmp_path / "run.toml", *options, "--parts", tmp_path / "parts.py", check=2)
    assert error["code"] == "usage.parts-file"


def set_fields(**fields):
    def change(checkpoint):
        path = checkpoint / "trainer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def set_tensors(**tensors):
    def change(checkpoint):
        path = checkpoint / "optimizer.safetensors"
        state = load_file(path)
        first = next(name for name in state if name.endswith("/exp_avg"))
        save_file(state | {first if name == "first" else name: tensor for name, tensor in tensors.items()}, path)

    return change


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (set_fields(step="x"), "config"),
        (set_fields(epoch=-1), "config"),
        (set_fields(rows=None), "config"),
        (set_fields(metrics={"loss": "x" * 10**5}), "config"),
        (set_tensors(unknown=torch.zeros(3)), "weights"),
        (set_tensors(first=torch.zeros(1, dtype=torch.bool)), "weights"),
        (set_tensors(first=torch.zeros(10**5)), "weights"),
        (lambda checkpoint: (checkpoint / "model.safetensors").write_bytes(b"x" * 99), "corrupt"),
        (lambda checkpoint: (checkpoint / "optimizer.safetensors").write_bytes(b""), "corrupt"),
    ],
)
def test_a_run_that_was_changed_together_with_its_manifest_is_not_resumed(change, code, tmp_path):
    train_all(described("seq2seq", steps=2), tmp_path / "run")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    change(checkpoint)
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)
    with raises(f"checkpoint.{code}") as caught:
        train_all(described("seq2seq", steps=3), tmp_path / "run")
    assert len(str(caught.value)) < 1000
