"""Pipes, devices and links among the files of a run: none is waited for, and no link is written through."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext

import pytest
import torch
from command import error_of
from raising import raises
from safetensors.torch import load_file, save_file
from small_runs import described, end_of, train_all

from manyheads.training.store import write_manifest


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("lock.json", None),
        (".lock.json.draft", None),
        ("env.json", "run.invalid"),
        (".env.json.draft", None),
        ("data.json", "run.invalid"),
        ("run.toml", "config.file"),
        ("metrics.jsonl", "usage.output"),
        ("checkpoints/latest", None),
        ("checkpoints/best", None),
        ("checkpoints/step-00000002/manifest.json", "checkpoint.corrupt"),
        ("checkpoints/step-00000002/trainer.json", "checkpoint.corrupt"),
        ("checkpoints/step-00000002/config.json", "checkpoint.corrupt"),
    ],
)
def test_a_pipe_among_the_files_of_a_run_is_not_waited_for(name, code, tmp_path):
    train_all(described("seq2seq", steps=2), tmp_path / "run")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    named = "run.toml" if name == "env.json" else name.rpartition("/")[2]  # without env.json, run.toml is a user's
    with raises(code, named) if code else nullcontext():
        assert end_of(train_all(described("seq2seq", steps=3), tmp_path / "run"))[0] == 3


def test_a_link_in_place_of_a_draft_is_not_followed(tmp_path):
    train_all(described("seq2seq", steps=1), tmp_path / "run")
    (tmp_path / "own").write_text("mine")
    (tmp_path / "run" / ".env.json.draft").symlink_to(tmp_path / "own")
    train_all(described("seq2seq", steps=2), tmp_path / "run")
    assert (tmp_path / "own").read_text() == "mine"


@pytest.mark.parametrize("command", ["train", "evaluate", "show"])
def test_a_run_file_is_a_regular_file(command, tmp_path):
    os.mkfifo(tmp_path / "run.toml")
    (tmp_path / "parts.py").symlink_to("/dev/zero")
    options = ["--output", tmp_path / "out"] if command == "train" else []
    for path in (tmp_path / "run.toml", "/dev/zero"):
        assert error_of(command, path, *options, check=None)["code"] in (
            "config.file",
            "checkpoint.invalid",
            "checkpoint.not-found",
        )
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
