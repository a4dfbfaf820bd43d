"""One optimizer step, one evaluation and the order of rows, each against its formula."""

from __future__ import annotations

import errno
import math
from dataclasses import replace
from itertools import combinations
from typing import ClassVar

import kinds
import numpy as np
import pytest
import torch
from small_runs import SEQUENCE, TASKS, described, last_metrics

import manyheads
from manyheads.tasks.seq2seq import Seq2SeqSpec
from manyheads.training.batches import BatchLoader, BatchStream
from manyheads.training.events import Saved, SaveFailed
from manyheads.training.loop import Checkpointer, train_events, train_step, validate
from manyheads.training.optim import OptimSpec, ScheduleSpec, orthogonalize
from manyheads.training.preparation import prepare
from manyheads.training.run import BestSpec, read_run
from manyheads.training.store import TrainState


class Given:
    """A stream of given batches."""

    def __init__(self, batches):
        self.batches, self.row_indices = iter(batches), ()

    def next(self):
        return next(self.batches)


def without_dropout(tree):
    parts = {name: part | {"residual": "pre"} if "residual" in part else part for name, part in tree["model"].items()}
    return tree | {"model": parts}


def gradients_of_step(run, batches, **optim):
    """The gradients that a step passes to the optimizer, which changes nothing here; and the event of the step."""
    spec, kept = run.spec, []
    spec = spec.replace(train=spec.train.replace(accumulate=len(batches)), optim=spec.optim.replace(**optim))
    model = manyheads.build(run.model_spec, seed=1).double()
    optimizer = spec.optim.build(model)
    optimizer.step = lambda: kept.append([parameter.grad.clone() for parameter in model.parameters()])
    event = train_step(model, optimizer, Given(batches), replace(run, spec=spec), TrainState())
    (gradients,) = kept
    return gradients, event


@pytest.mark.parametrize(
    "name", [name for name in TASKS if name != "retrieval"]
)  # whose loss compares the rows of a batch
def test_a_step_over_small_batches_is_that_over_one_large_batch(name):
    """Of different sizes, so that the mean of their means would be another number."""
    run = prepare(read_run(without_dropout(described(name))))
    rows = [
        tuple(item.astype(float) if item.dtype == np.float32 else item for item in run.train_dataset[i])
        for i in range(16)
    ]
    rng, batch = np.random.default_rng(0), run.spec.task.batch
    parts = [batch(rows[start:stop], run.special_tokens, rng) for start, stop in ((0, 1), (1, 3), (3, 8), (8, 16))]
    whole = batch(rows, run.special_tokens, np.random.default_rng(0))
    (few, small), (many, large) = gradients_of_step(run, parts, clip=0.0), gradients_of_step(run, [whole], clip=0.0)
    for value, other in zip(few, many, strict=True):
        torch.testing.assert_close(value, other, atol=1e-6, rtol=1e-6)
    assert (small.loss, small.grad_norm, small.tokens) == pytest.approx(
        (large.loss, large.grad_norm, large.tokens), rel=1e-6
    )
    assert small.auxiliary_losses == pytest.approx(large.auxiliary_losses, rel=1e-6)


def test_gradients_are_clipped_to_their_maximum_norm_in_the_same_direction():
    run = prepare(read_run(described("causal")))
    batch = BatchLoader(run, run.train_dataset)[0]
    free, event = gradients_of_step(run, [batch], clip=0.0)
    for clip, share in ((event.grad_norm / 2, 0.5), (event.grad_norm * 2, 1.0)):
        cut, same = gradients_of_step(run, [batch], clip=clip)
        assert same.grad_norm == event.grad_norm  # before clipping
        assert torch.cat([clipped.flatten() for clipped in cut]).norm() <= clip
        for clipped, whole in zip(cut, free, strict=True):
            torch.testing.assert_close(clipped, share * whole, atol=1e-9, rtol=1e-5)


@pytest.mark.parametrize("optimizer", OptimSpec.kinds)
@pytest.mark.parametrize("schedule", ScheduleSpec.kinds)
def test_every_step_has_the_learning_rate_of_the_schedule(schedule, optimizer):
    optim = {"kind": optimizer, "lr": 0.02, "schedule": {"kind": schedule, "warmup_steps": 2}}
    run = prepare(read_run(described("seq2seq") | {"data": SEQUENCE | {"count": 100}, "optim": optim}))
    model, state = manyheads.build(run.model_spec), TrainState()
    optimizer, stream, used = run.spec.optim.build(model), BatchStream(run), []
    optimizer.step = lambda: used.append({group["lr"] for group in optimizer.param_groups})
    reported = [train_step(model, optimizer, stream, run, state).lr for _ in range(6)]
    expected = [0.02 * run.spec.optim.schedule.factor(step, 6) for step in range(1, 7)]
    assert reported == expected
    assert used == [{lr} for lr in expected]
    assert len(set(expected)) > 2


@pytest.mark.parametrize("kind", OptimSpec.kinds)
def test_matrices_decay_and_vectors_do_not(kind):
    """Without gradients only weight decay changes a weight."""
    optim = OptimSpec.from_config({"kind": kind, "lr": 0.5, "weight_decay": 0.1})
    model = kinds.random_model(kinds.pair(norm="layer"), dtype=torch.float32)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = optim.build(model)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach(), before[name] * (0.95 if weight.dim() > 1 else 1.0), msg=name)
    assert {weight.dim() for weight in model.parameters()} == {1, 2}


def test_every_batch_of_every_step_has_its_own_random_seed():
    """And the same seeds when the run is repeated."""
    run = prepare(read_run(described("causal", accumulate=2)))
    found = []
    for _ in range(2):
        model, stream, seeds = manyheads.build(run.model_spec), BatchStream(run), []
        model.register_forward_pre_hook(lambda *_, seeds=seeds: seeds.append(torch.initial_seed()))
        optimizer = run.spec.optim.build(model)
        for _ in range(3):
            train_step(model, optimizer, stream, run, stream.state)
        found.append(seeds)
    assert len(set(found[0])) == len(found[0]) == 6
    assert found[0] == found[1]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_infinite_anywhere_changes_nothing(where):
    run = prepare(read_run(described("causal")))
    model, stream = manyheads.build(run.model_spec, seed=1), BatchStream(run)
    before = [weight.detach().clone() for weight in model.parameters()]
    if where == "loss":
        model.register_forward_hook(lambda module, given, logits: logits * math.inf)
    else:
        next(model.parameters()).register_hook(lambda gradient: gradient + math.inf)
    event = train_step(model, run.spec.optim.build(model), stream, run, stream.state)
    assert event.skipped
    assert math.isfinite(event.loss) == (where == "gradient")
    assert all(torch.equal(item, other) for item, other in zip(before, model.parameters(), strict=True))


# ----------------------------------------------------------------------------------------------------------- optimizers


def test_adamw_is_its_formula():
    optim = OptimSpec.from_config(
        {"kind": "adamw", "lr": 0.1, "weight_decay": 0.2, "beta1": 0.7, "beta2": 0.8, "eps": 0.01}
    )
    model = torch.nn.Linear(3, 2)
    optimizer, rng = optim.build(model), torch.Generator().manual_seed(0)
    weight = model.weight.detach().clone().double()
    mean = square = torch.zeros(2, 3, dtype=torch.double)
    for step in (1, 2, 3):
        gradient = torch.randn(2, 3, generator=rng)
        model.weight.grad, model.bias.grad = gradient, torch.zeros(2)
        optimizer.step()
        mean, square = 0.7 * mean + 0.3 * gradient, 0.8 * square + 0.2 * gradient**2
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * (mean / (1 - 0.7**step)) / ((square / (1 - 0.8**step)).sqrt() + 0.01)
        torch.testing.assert_close(model.weight.detach().double(), weight, atol=1e-6, rtol=0)


def test_muon_is_its_formula():
    """Nesterov momentum, orthogonalized, and weight decay by the learning rate."""
    optim = OptimSpec.from_config({"kind": "muon", "lr": 0.1, "weight_decay": 0.2, "momentum": 0.6})
    model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    optimizer, rng, linear = optim.build(model), torch.Generator().manual_seed(0), model[0]
    weight, mean = linear.weight.detach().clone(), torch.zeros(5, 3)
    for _ in range(3):
        gradient = torch.randn(5, 3, generator=rng)
        linear.weight.grad, linear.bias.grad = gradient, torch.zeros(5)
        optimizer.step()
        mean = 0.6 * mean + 0.4 * gradient
        update = orthogonalize((0.6 * mean + 0.4 * gradient)[None])[0]
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * 0.2 * math.sqrt(5) * update
        torch.testing.assert_close(linear.weight.detach(), weight, atol=1e-5, rtol=0)


def test_muon_changes_every_matrix_of_the_layers_by_the_same_amount():
    """Its singular values are about equal, whatever those of the gradient; AdamW updates embeddings and gains."""
    run = prepare(read_run(described("seq2seq") | {"optim": {"kind": "muon", "lr": 1e-2, "weight_decay": 0.0}}))
    model = manyheads.build(run.model_spec, seed=1)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = run.spec.optim.build(model)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) * torch.rand(
            weight.shape[-1]
        )
    optimizer.step()
    for name, weight in model.named_parameters():
        change = weight.detach() - before[name]
        state = set(optimizer.state[weight])
        if weight.dim() == 2 and "embed" not in name:
            values = torch.linalg.svdvals(change) / (optimizer.param_groups[0]["lr"] * 0.2 * max(weight.shape) ** 0.5)
            assert state == {"momentum"}
            assert values.max() < 1.3
            assert values.median() > 0.6, name  # the smallest of a square matrix may be far below
        else:
            assert state == {"step", "exp_avg", "exp_avg_sq"}, name


def test_muon_leaves_the_head_to_adamw():
    run = prepare(read_run(described("causal") | {"optim": {"kind": "muon"}}))
    free = run.model_spec.replace(head={"kind": "untied"})
    model = manyheads.build(free)
    optimizer = run.spec.optim.build(model)
    turned = optimizer.param_groups[0]["params"]
    heads = [weight for name, weight in model.named_parameters() if name.startswith("head.") and weight.dim() == 2]
    assert heads
    assert not any(weight is head for weight in turned for head in heads)


def test_schedules_are_their_formulas():
    def factor(kind, step, steps=11, **fields):
        return ScheduleSpec.from_config({"kind": kind, "warmup_steps": 1, **fields}).factor(step, steps)

    assert factor("cosine", 7, min_lr_ratio=0.2) == pytest.approx(
        0.2 + 0.8 / 2
    )  # half of the ten steps after the warm-up are done
    assert factor("cosine", 4, steps=13, min_lr_ratio=0.0) == pytest.approx((1 + math.cos(math.pi / 6)) / 2)
    assert factor("linear", 7, min_lr_ratio=0.2) == pytest.approx(0.6)
    assert factor("inverse-sqrt", 9) == pytest.approx(1 / 3)
    assert [
        factor("warmup-stable-decay", step, steps=20, decay_fraction=0.2) for step in (16, 17, 18, 20)
    ] == pytest.approx([1, 1, 0.75, 0.25])


# --------------------------------------------------------------------------------------------------------- evaluations


@pytest.mark.parametrize(
    ("metric", "values"),
    [("loss", (3.0, 2.0, 2.0, 4.0)), ("accuracy", (0.1, 0.4, 0.4, 0.2)), ("exact_match", (0.0, 1.0, 1.0, 0.5))],
)
def test_the_best_evaluation_is_the_lowest_loss_or_the_highest_accuracy_and_the_first_of_equals(metric, values):
    state, best = TrainState(), BestSpec(metric=metric, stop_at=values[1], patience=2)
    reasons = []
    for step, value in enumerate(values, start=1):
        state.step = step
        state = state.as_best() if state.add_evaluation({metric: value}, best) else state
        reasons.append(state.stop_reason(best))
    assert (state.best_value, state.best_step) == (values[1], 2)
    assert reasons == [None, "stop_at", "stop_at", "patience"]  # a value equal to stop_at is good enough


def test_a_best_evaluation_that_could_not_be_saved_does_not_count(tmp_path):
    """Otherwise later evaluations would have to be better than one whose checkpoint does not exist."""
    state, best, full_disk = TrainState(), BestSpec(metric="loss"), [False]

    def write(state, *, is_best):
        if full_disk[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return tmp_path / f"step-{state.step:08}"

    checkpointer = Checkpointer(write, tmp_path, lambda: None, last_saved_state=TrainState())
    events = []
    for step, (loss, full) in enumerate([(3.0, False), (1.0, True), (2.0, False), (2.5, False)], start=1):
        state.step, full_disk[0] = step, full
        if state.add_evaluation({"loss": loss}, best):
            events.append(type(checkpointer.save(state, is_best=True)))
    assert events == [Saved, SaveFailed, Saved]
    assert (state.best_value, state.best_step) == (2.0, 3), "better than any that was saved"


def test_an_evaluation_reads_no_training_row():
    run = prepare(read_run(described("seq2seq")))
    model = manyheads.build(run.model_spec, seed=1)
    assert validate(model, replace(run, train_dataset=None)) == validate(model, run)


class FixedOutputs(Seq2SeqSpec, kind="test-fixed-outputs"):
    """Generates what a test says."""

    pairs: ClassVar[list] = []

    def generate_targets(self, checkpoint, rows, tokens):
        return self.pairs


def test_exact_is_the_whole_target_and_nothing_more():
    run = prepare(read_run(described("seq2seq")))
    target = [7, 8, 9]
    for output, of, exact in (
        ([7, 8, 9], target, 1.0),
        ([7, 8], target, 0.0),
        ([7, 8, 9, 7], target, 0.0),
        ([7, run.special_tokens.unk], [7, run.special_tokens.unk], 0.0),
    ):
        FixedOutputs.pairs = [(output, of)]
        assert FixedOutputs().generation_metrics(None, [[]], run.special_tokens, extra_metric=None) == {
            "exact_match": exact
        }


def test_a_run_with_a_moving_average_evaluates_the_average(tmp_path):
    run = prepare(read_run(described("seq2seq") | {"optim": {"lr": 0.05, "ema_decay": 0.9}}))
    metrics = last_metrics(train_events(run, tmp_path / "run"))
    assert validate(manyheads.load(tmp_path / "run").model, run) == pytest.approx(metrics)


# -------------------------------------------------------------------------------------------------------------- orders


def test_every_batch_and_epoch_masks_other_patches():
    """Rows are in another order each time, so the positions within a batch are what could repeat."""
    run = prepare(read_run(described("mae")))
    loaders = [BatchLoader(run, run.train_dataset, epoch=epoch) for epoch in (0, 1)]
    visible = [loader[i].source.positions for loader in loaders for i in (0, 1)]
    assert len({positions.shape for positions in visible}) == 1
    assert not any(torch.equal(first, other) for first, other in combinations(visible, 2))


def test_texts_share_rows_with_other_texts_in_every_epoch():
    run = prepare(read_run(described("packed", pack=200, batch_tokens=600)))
    first, second = (
        sorted({tuple(row[:, 0].tolist()) for batch in loader.batches for row in batch})
        for loader in (BatchLoader(run, run.train_dataset, epoch=epoch) for epoch in (0, 1))
    )
    assert first != second
