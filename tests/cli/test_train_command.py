"""The events of a run as `manyheads train` and `manyheads compare` show them on standard error."""

from __future__ import annotations

import math

import pytest

from manyheads.cli.compare import CompareProgress
from manyheads.cli.train import TrainingProgress
from manyheads.training import comparison as c
from manyheads.training import events as e


def step(number, **fields):
    return e.Step(number, **({"loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100, "seconds": 0.1} | fields))


EVENTS = [
    (
        e.Initialized(
            0,
            12,
            missing_keys=("head.weight",),
            unexpected_keys=tuple(f"layer{i}" for i in range(20)),
            notes=("a note",),
        ),
        False,
    ),
    (e.Truncated(0, train_rows=1234, validation_rows=5), False),
    (e.Resumed(40, warnings=("step-00000050 is broken",)), True),
    (e.ConfigChanged(40, (e.Change("optim.lr", 0.1, 0.2),)), False),
    (e.Evaluated(40, {"loss": 1.5, "accuracy": 0.25}), False),
    (e.SaveFailed(40, "No space left on device", 1), True),
    (e.Warned(40, "the disk is nearly full"), True),
    (e.Saved(100, "run/checkpoints/step-00000100"), False),
    (step(41, loss=math.nan, skipped=True), True),
]


@pytest.mark.parametrize(("event", "is_warning"), EVENTS, ids=lambda value: type(value).__name__)
def test_every_event_is_shown_and_if_quiet_only_warnings(event, is_warning, capsys):
    for quiet in (False, True):
        with TrainingProgress(100, quiet=quiet) as progress:
            progress.show(event)
        lines = capsys.readouterr().err.splitlines()
        assert bool(lines) == (not quiet or is_warning)
        assert all(line.isprintable() for line in lines)


def test_counts_and_names_are_shown(capsys):
    with TrainingProgress(100, quiet=False) as progress:
        for event, _ in EVENTS:
            progress.show(event)
    text = capsys.readouterr().err
    for value in (
        "1,234",
        "head.weight",
        "layer7 and 12 more",
        "step-00000050",
        "optim.lr",
        "25.0%",
        "resuming from step 40",
    ):
        assert value in text


def test_a_skipped_step_leaves_the_mean_loss_finite(capsys):
    with TrainingProgress(100, quiet=False) as progress:
        for event in (step(1, loss=math.nan, skipped=True), step(2), step(3, loss=math.inf, skipped=True), step(4)):
            progress.show(event)
        assert progress.means["loss"] == 2.0
    assert "step 3: " in capsys.readouterr().err


def test_the_bar_names_the_step_of_a_metric():
    """The metric of an evaluation is not shown as that of a later step."""
    notes = []
    with TrainingProgress(100, quiet=True) as progress:
        progress.update = lambda name, done, total, note: notes.append(note)
        for event in (step(1), e.Evaluated(1, {"loss": 3.0, "exact_match": 0.25}), step(2), step(3)):
            progress.show(event)
    assert "exact_match" not in notes[0]
    assert all("exact_match 25.0% at step 1 " in note for note in notes[1:])


def test_a_run_with_nothing_left_to_do(capsys):
    for events in ([e.Finished(100, "steps")], [step(100), e.Finished(100, "steps")], [e.Finished(3, "interrupted")]):
        with TrainingProgress(100, quiet=False) as progress:
            for event in events:
                progress.show(event)
    assert capsys.readouterr().err.count("train.steps") == 1


def test_comparisons_show_every_run(capsys):
    with CompareProgress("reading", quiet=False) as progress:
        progress.show(c.CellProgress("position=rope", 1, number=3, runs=12, steps=100, step=50))
        progress.show(c.CellProgress("position=rope", 1, 3, 12, 100, metrics={"loss": 1.5}))
        progress.show(c.CellProgress("position=none", 1, 12, 12, 100, metrics={}, error="no memory"))
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("3 of 12 · position=rope, seed 1: loss 1.5000 · about ")
    assert last == "12 of 12 · position=none, seed 1: no memory"
