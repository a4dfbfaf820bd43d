"""One update, one look, one order of rows, each against its formula: what a run that is only compared with itself cannot tell."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import kinds
import numpy as np
import pytest
import torch
from small_runs import OBJECTIVES, SEQUENCE, described

import manyheads
from manyheads.train import look
from manyheads.train.events import Evaluated
from manyheads.train.look import evaluate
from manyheads.train.loop import train, update
from manyheads.train.optim import OptimSpec, ScheduleSpec, orthogonal
from manyheads.train.run import GoalSpec, made_ready, read_run
from manyheads.train.state import State
from manyheads.train.stream import Order, Stream


class Given:
    """Batches that are there already, one after the other as a stream gives them."""

    def __init__(self, batches):
        self.batches, self.rows = iter(batches), ()

    def next(self):
        return next(self.batches)


def without_dropout(tree):
    parts = {name: part | {"residual": "pre"} if "residual" in part else part for name, part in tree["model"].items()}
    return tree | {"model": parts}


def updated(ready, batches, **optim):
    """The gradients that an update hands to its optimiser, which changes nothing here; and what the update says of itself."""
    run, kept = ready.run, []
    run = run.changed(train=run.train.changed(accumulate=len(batches)), optim=run.optim.changed(**optim))
    model = manyheads.build(ready.spec, seed=1).double()
    changer = run.optim.build(model)
    changer.step = lambda: kept.append([parameter.grad.clone() for parameter in model.parameters()])
    event = update(model, changer, Given(batches), replace(ready, run=run), State())
    (gradients,) = kept
    return gradients, event


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "contrastive"])  # whose other rows are what a row is compared with
def test_an_update_from_small_batches_is_that_from_one_large_batch(name):
    """Of unlike sizes: the mean of their means would be another number."""
    ready = made_ready(read_run(without_dropout(described(name))))
    rows = [tuple(one.astype(float) if one.dtype == np.float32 else one for one in ready.rows[i]) for i in range(16)]
    chance, batch = np.random.default_rng(0), ready.run.objective.batch
    parts = [batch(rows[start:stop], ready.tokens, chance) for start, stop in ((0, 1), (1, 3), (3, 8), (8, 16))]
    whole = batch(rows, ready.tokens, np.random.default_rng(0))
    (few, small), (many, large) = updated(ready, parts, clip=0.0), updated(ready, [whole], clip=0.0)
    for one, other in zip(few, many, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    assert (small.loss, small.gradient, small.tokens) == pytest.approx((large.loss, large.gradient, large.tokens), rel=1e-6)
    assert small.terms == pytest.approx(large.terms, rel=1e-6)


def test_gradients_are_cut_to_the_longest_that_they_may_be_and_not_turned():
    ready = made_ready(read_run(described("causal")))
    batch = Order(ready, ready.rows).batch(0)
    free, event = updated(ready, [batch], clip=0.0)
    for clip, share in ((event.gradient / 2, 0.5), (event.gradient * 2, 1.0)):
        cut, same = updated(ready, [batch], clip=clip)
        assert same.gradient == event.gradient  # as it was before
        assert torch.cat([one.flatten() for one in cut]).norm() <= clip
        for one, whole in zip(cut, free, strict=True):
            torch.testing.assert_close(one, share * whole, atol=1e-9, rtol=1e-5)


@pytest.mark.parametrize("optimiser", OptimSpec.kinds)
@pytest.mark.parametrize("schedule", ScheduleSpec.kinds)
def test_every_update_is_made_at_the_rate_that_the_schedule_says(schedule, optimiser):
    optim = {"kind": optimiser, "rate": 0.02, "schedule": {"kind": schedule, "warmup": 2}}
    ready = made_ready(read_run(described("seq2seq") | {"data": SEQUENCE | {"count": 100}, "optim": optim}))
    model, state = manyheads.build(ready.spec), State()
    changer, stream, used = ready.run.optim.build(model), Stream(ready), []
    changer.step = lambda: used.append({group["lr"] for group in changer.param_groups})
    told = [update(model, changer, stream, ready, state).rate for _ in range(6)]
    expected = [0.02 * ready.run.optim.schedule.share(step, 6) for step in range(1, 7)]
    assert told == expected
    assert used == [{rate} for rate in expected]
    assert len(set(expected)) > 2


@pytest.mark.parametrize("kind", OptimSpec.kinds)
def test_matrices_decay_and_what_has_one_axis_does_not(kind):
    """Without any gradient, decay is all that moves a weight."""
    optim = OptimSpec.choose({"kind": kind, "rate": 0.5, "decay": 0.1})
    model = kinds.made(kinds.pair(norm="layer"), dtype=torch.float32)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    changer = optim.build(model)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    changer.step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach(), before[name] * (0.95 if weight.dim() > 1 else 1.0), msg=name)
    assert {weight.dim() for weight in model.parameters()} == {1, 2}


def test_chance_is_another_in_every_batch_of_an_update_and_in_every_update():
    """Dropout draws from a seed of its own each time, and the same ones if asked again."""
    ready = made_ready(read_run(described("causal", accumulate=2)))
    found = []
    for _ in range(2):
        model, stream, seeds = manyheads.build(ready.spec), Stream(ready), []
        model.register_forward_pre_hook(lambda *_, seeds=seeds: seeds.append(torch.initial_seed()))
        changer = ready.run.optim.build(model)
        for _ in range(3):
            update(model, changer, stream, ready, stream.state)
        found.append(seeds)
    assert len(set(found[0])) == len(found[0]) == 6
    assert found[0] == found[1]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_an_update_that_is_infinite_anywhere_changes_nothing(where):
    ready = made_ready(read_run(described("causal")))
    model, stream = manyheads.build(ready.spec, seed=1), Stream(ready)
    before = [weight.detach().clone() for weight in model.parameters()]
    if where == "loss":
        model.register_forward_hook(lambda module, given, logits: logits * math.inf)
    else:
        next(model.parameters()).register_hook(lambda gradient: gradient + math.inf)
    event = update(model, ready.run.optim.build(model), stream, ready, stream.state)
    assert event.skipped
    assert math.isfinite(event.loss) == (where == "gradient")
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


# ------------------------------------------------------------------------------------------------------------ optimisers


def test_adamw_is_its_formula():
    optim = OptimSpec.choose({"kind": "adamw", "rate": 0.1, "decay": 0.2, "first": 0.7, "second": 0.8, "eps": 0.01})
    model = torch.nn.Linear(3, 2)
    changer, chance = optim.build(model), torch.Generator().manual_seed(0)
    weight = model.weight.detach().clone().double()
    mean = square = torch.zeros(2, 3, dtype=torch.double)
    for step in (1, 2, 3):
        gradient = torch.randn(2, 3, generator=chance)
        model.weight.grad, model.bias.grad = gradient, torch.zeros(2)
        changer.step()
        mean, square = 0.7 * mean + 0.3 * gradient, 0.8 * square + 0.2 * gradient**2
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * (mean / (1 - 0.7**step)) / ((square / (1 - 0.8**step)).sqrt() + 0.01)
        torch.testing.assert_close(model.weight.detach().double(), weight, atol=1e-6, rtol=0)


def test_muon_is_its_formula():
    """Nesterov's momentum, made orthogonal, and decay by the rate."""
    optim = OptimSpec.choose({"kind": "muon", "rate": 0.1, "decay": 0.2, "momentum": 0.6})
    model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    changer, chance, linear = optim.build(model), torch.Generator().manual_seed(0), model[0]
    weight, held = linear.weight.detach().clone(), torch.zeros(5, 3)
    for _ in range(3):
        gradient = torch.randn(5, 3, generator=chance)
        linear.weight.grad, linear.bias.grad = gradient, torch.zeros(5)
        changer.step()
        held = 0.6 * held + 0.4 * gradient
        turn = orthogonal((0.6 * held + 0.4 * gradient)[None])[0]
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * 0.2 * math.sqrt(5) * turn
        torch.testing.assert_close(linear.weight.detach(), weight, atol=1e-5, rtol=0)


def test_muon_turns_every_matrix_of_the_layers_by_the_same_amount():
    """Whatever the gradient's singular values are, those of the change lie around one length; tables and gains are AdamW's."""
    ready = made_ready(read_run(described("seq2seq") | {"optim": {"kind": "muon", "rate": 1e-2, "decay": 0.0}}))
    model = manyheads.build(ready.spec, seed=1)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    changer = ready.run.optim.build(model)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) * torch.rand(weight.shape[-1])
    changer.step()
    for name, weight in model.named_parameters():
        change = weight.detach() - before[name]
        held = set(changer.state[weight])
        if weight.dim() == 2 and "embed" not in name:
            values = torch.linalg.svdvals(change) / (changer.param_groups[0]["lr"] * 0.2 * max(weight.shape) ** 0.5)
            assert held == {"momentum"}
            assert values.max() < 1.3
            assert values.median() > 0.6, name  # the least of a square matrix may be far below
        else:
            assert held == {"step", "exp_avg", "exp_avg_sq"}, name


def test_muon_leaves_the_head_to_adamw():
    ready = made_ready(read_run(described("causal") | {"optim": {"kind": "muon"}}))
    free = ready.spec.changed(head={"kind": "free"})
    model = manyheads.build(free)
    changer = ready.run.optim.build(model)
    turned = {id(weight) for weight in changer.param_groups[0]["params"]}
    heads = [weight for name, weight in model.named_parameters() if name.startswith("head.") and weight.dim() == 2]
    assert heads
    assert not turned & {id(weight) for weight in heads}


def test_schedules_are_their_formulas():
    def share(kind, step, steps=11, **fields):
        return ScheduleSpec.choose({"kind": kind, "warmup": 1, **fields}).share(step, steps)

    assert share("cosine", 7, least=0.2) == pytest.approx(0.2 + 0.8 / 2)  # half of the ten steps behind the warm-up are made
    assert share("cosine", 4, steps=13, least=0.0) == pytest.approx((1 + math.cos(math.pi / 6)) / 2)
    assert share("linear", 7, least=0.2) == pytest.approx(0.6)
    assert share("inverse-root", 9) == pytest.approx(1 / 3)
    assert [share("stable", step, steps=20, decay=0.2) for step in (16, 17, 18, 20)] == pytest.approx([1, 1, 0.75, 0.25])


# -------------------------------------------------------------------------------------------------------------- looks


@pytest.mark.parametrize(
    ("metric", "values"), [("loss", (3.0, 2.0, 2.0, 4.0)), ("accuracy", (0.1, 0.4, 0.4, 0.2)), ("exact", (0.0, 1.0, 1.0, 0.5))]
)
def test_the_best_look_is_the_lowest_loss_or_the_highest_share_and_the_first_of_equals(metric, values):
    state, goal = State(), GoalSpec(metric=metric, reach=values[1], patience=2)
    ends = []
    for step, value in enumerate(values, start=1):
        state.step = step
        state = state.as_best() if state.look({metric: value}, goal) else state
        ends.append(state.verdict(goal))
    assert (state.best, state.best_step) == (values[1], 2)
    assert ends == [None, "goal", "goal", "patience"]  # what is reached is good enough


def test_a_look_reads_nothing_that_is_learned():
    ready = made_ready(read_run(described("seq2seq")))
    model = manyheads.build(ready.spec, seed=1)
    assert evaluate(model, replace(ready, rows=None)) == evaluate(model, ready)


def test_exact_is_the_whole_answer_and_no_more(monkeypatch):
    ready = made_ready(read_run(described("seq2seq")))
    rows = [ready.unseen[i] for i in range(40)]
    source, target = next(row for row in rows if len(row[1]) > 2)
    end = [ready.tokens.end]
    for written, right in (([*target, *end], True), ([*target[:-1], *end], False), ([*target, target[0], *end], False), ([*target], True)):
        monkeypatch.setattr(look, "sample", lambda *_, written=written, **__: torch.tensor(written)[:, None])
        assert look.exact(manyheads.build(ready.spec), ready, [(source, target)]) == [right]


def test_a_run_with_a_mean_of_its_weights_looks_at_that_mean(tmp_path):
    ready = made_ready(read_run(described("seq2seq") | {"optim": {"rate": 0.05, "average": 0.9}}))
    seen = [event for event in train(ready, tmp_path / "run") if isinstance(event, Evaluated)][-1]
    assert evaluate(manyheads.load(tmp_path / "run").model, ready) == pytest.approx(seen.metrics)


# -------------------------------------------------------------------------------------------------------------- orders


def test_what_is_hidden_is_drawn_anew_in_every_batch_and_epoch():
    """Rows come in another order each time, so that it is the places in a batch that would repeat."""
    ready = made_ready(read_run(described("patches")))
    shown = [Order(ready, ready.rows, epoch).batch(i).source.positions for epoch in (0, 1) for i in (0, 1)]
    assert len({one.shape for one in shown}) == 1
    assert not any(torch.equal(one, other) for one, other in combinations(shown, 2))


def test_texts_share_rows_with_others_every_epoch():
    ready = made_ready(read_run(described("packed", pack=200, tokens=600)))
    first, second = (
        [sorted({tuple(line[:, 0].tolist()) for batch in Order(ready, ready.rows, epoch).batches for line in batch})] for epoch in (0, 1)
    )
    assert first != second
