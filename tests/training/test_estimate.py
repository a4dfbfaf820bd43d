"""Estimates before a run: they are what the run then needs, and a run that cannot fit is refused."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import error_of, run, run_json
from small_runs import STACK, described, in_a_process

import manyheads
from manyheads.errors import ManyheadsError, OutOfDiskError
from manyheads.model.builder import build_meta
from manyheads.spec import to_toml
from manyheads.training import estimate
from manyheads.training.batches import BatchLoader, BatchStream
from manyheads.training.estimate import MAX_TIMED_STEPS, format_seconds, measure_speed
from manyheads.training.loop import GENERATED_ROWS, train_events
from manyheads.training.preparation import prepare
from manyheads.training.resources import (
    activation_bytes,
    check_resources,
    estimate_resources,
    evaluation_shapes,
    read_kibibytes,
)
from manyheads.training.run import read_run


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(described("seq2seq")))
    return path


def test_a_dry_run_estimates_everything_and_writes_nothing(run_file, tmp_path):
    report = run_json("train", run_file, "--dry-run", "--output", tmp_path / "out")
    prepared = prepare(read_run(described("seq2seq")))
    model, stream = manyheads.build(prepared.model_spec), BatchStream(prepared)
    batches = [stream.next() for _ in range(len(stream.loader()))]
    positions = sum(item.tokens.numel() for batch in batches for item in (batch.inputs, batch.source))
    assert report["resources"]["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert report["resources"]["disk_free"] > report["resources"]["disk"]
    assert report["epoch"] == {
        "rows": len(prepared.train_dataset),
        "batches": len(batches),
        "counted_batches": len(batches),
        "tokens": sum(batch.num_tokens for batch in batches),
        "padding": pytest.approx(1 - sum(batch.num_tokens for batch in batches) / positions),
    }
    assert report["epochs"] == pytest.approx(6 * 2 / len(batches))
    assert report["seconds"] > 0
    assert 1 <= report["speed"]["timed_steps"] <= MAX_TIMED_STEPS
    assert read_run(report["run"]).model == prepared.model_spec
    assert f"{report['resources']['parameters']:,}" in run("train", run_file, "--dry-run").stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.toml"]


def test_without_an_output_there_is_no_run(run_file):
    error = error_of("train", run_file, check=2)
    assert error["code"] == "usage.argument"
    assert "--output" in error["message"]


def test_a_checkpoint_has_about_the_estimated_size(tmp_path):
    run = prepare(read_run(described("seq2seq")))
    needs = estimate_resources(run, tmp_path / "run")
    list(train_events(run, tmp_path / "run"))
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    size = sum((newest / name).stat().st_size for name in ("model.safetensors", "optimizer.safetensors"))
    assert needs.checkpoint <= size <= 1.2 * needs.checkpoint + 20_000  # headers and step counts
    assert estimate_resources(run, tmp_path / "run").disk == needs.disk - 2 * needs.checkpoint, "two exist already"
    best = estimate_resources(prepare(read_run(described("seq2seq", best={"metric": "loss"}))), tmp_path / "other")
    assert best.disk == needs.disk + needs.checkpoint, "the best is kept too"


def test_activations_are_those_of_the_batch_that_needs_most():
    """Whatever the order of the batches is, the estimate covers each of them."""
    run = prepare(read_run(described("seq2seq")))
    loader, model = BatchLoader(run, run.train_dataset), build_meta(run.model_spec)
    needed = [activation_bytes(run, model, batch) for batch in loader]
    assert len({size for size, _ in needed}) > 1
    assert estimate_resources(run).activations == max(needed)[0]


def test_an_evaluation_of_packed_texts_is_timed_by_rows_not_by_texts(tmp_path):
    (tmp_path / "book.txt").write_text("a book of one text\n" * 400)
    data = {"kind": "text", "path": str(tmp_path / "book.txt"), "document": "file", "validation_fraction": 0.25}
    tree = {"model": {"vocab": "tokenizer", "decoder": STACK}, "data": data, "tokenizer": "bytes", "task": "causal"}
    run = prepare(read_run(tree | {"train": {"steps": 2, "batch_tokens": 64, "pack": 16, "eval_rows": 1000}}))
    rows = sum(len(batch) for batch in BatchLoader(run, run.validation_dataset, max_rows=1000).batches)
    assert len(run.validation_dataset) < 5 < 100 < rows
    assert sum(count for count, _ in evaluation_shapes(run)) == rows
    assert measure_speed(run, seconds=0.01).evaluation > 0
    check_rows_of_a_timed_evaluation(run)


def check_rows_of_a_timed_evaluation(run):
    """Many if a step is short for the time that is allowed, and few if it is long."""
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "validate", lambda model, run: rows.append(run.spec.train.eval_rows))
        for step in (0.9, 1.1):
            patch.setattr(estimate, "typical_seconds", lambda steps, step=step: step)
            patch.setattr(estimate, "time_steps", lambda *_, **__: ([], [None]))
            measure_speed(run, seconds=3.0)
    all_rows = sum(count for count, _ in evaluation_shapes(run))
    assert rows == [min(all_rows, GENERATED_ROWS), 8]


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_run_that_does_not_fit_into_memory_is_refused_before_it_starts(dry, run_file, tmp_path):
    command = ("train", run_file, "--output", tmp_path / "out", *dry)
    huge = error_of(*command, "-s", "model.encoder.feedforward.hidden=1000000000000", check=2)
    assert huge["code"] == "config.out-of-range"
    error = error_of(*command, "-s", "model.encoder.width=65536", check=5)
    assert error["code"] == "resource.memory"
    assert "batch_tokens" in error["hint"]
    assert not (tmp_path / "out").exists()


def test_free_memory_is_that_of_the_device_that_trains(monkeypatch):
    run = prepare(read_run(described("seq2seq")))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12_345, 99_999))  # there is no GPU here
    assert estimate_resources(run, device="cuda:1").memory_free == 12_345 != estimate_resources(run).memory_free


def test_a_run_that_does_not_fit_on_the_disk_is_refused_before_it_starts(tmp_path):
    needs = estimate_resources(prepare(read_run(described("seq2seq"))), tmp_path / "run")
    check_resources(needs)
    with pytest.raises(OutOfDiskError) as error:
        check_resources(replace(needs, disk_free=needs.checkpoint - 1))
    assert (error.value.code, error.value.exit_status) == ("resource.disk", 5)


def check_with_limit(tree, folder, room):
    """In a process of its own, which may allocate so many bytes more."""
    torch.set_num_threads(1)
    run = prepare(read_run(tree))
    used = read_kibibytes(Path("/proc/self/status"), "VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
    try:
        check_resources(estimate_resources(run, folder))
    except ManyheadsError as error:
        os._exit(error.exit_status)


def test_a_limit_of_the_process_counts(tmp_path):
    tree = described("seq2seq", batch_tokens=4000)
    assert in_a_process(tree, tmp_path / "small", 1 << 20, target=check_with_limit) == 5
    assert in_a_process(tree, tmp_path / "large", 1 << 30, target=check_with_limit) == 0


def test_durations_have_a_unit_that_fits():
    for seconds, text in ((0.25, "0.25 seconds"), (40, "40 seconds"), (100, "1.67 minutes"), (9000, "2.5 hours")):
        assert format_seconds(seconds) == text
