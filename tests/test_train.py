"""Training: the same bits through every kill, batches that do not depend on how they are cut, and runs that explain themselves."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from baselines import mean_patch, one_of_all, unigram_entropy
from command import FORKS, run
from safetensors.torch import load_file
from small_runs import OBJECTIVES, PATCHES, RESTORED, SEQUENCE, TOWER, described, digests, in_a_process, stopped

import manyheads
from manyheads.data import builtin
from manyheads.objective.score import NOTHING
from manyheads.presets import preset
from manyheads.spec import SLOTS, SpecError, override, to_toml
from manyheads.train import checkpoint, look
from manyheads.train.events import Ended, Evaluated, Resumed, Saved, Stepped
from manyheads.train.forecast import places_of
from manyheads.train.look import evaluate
from manyheads.train.loop import train
from manyheads.train.model import first_model
from manyheads.train.optim import OptimSpec, ScheduleSpec
from manyheads.train.run import RunError, made_ready, read_run
from manyheads.train.stream import Order, Stream, lengths_of
from manyheads.training import Display


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_run_that_is_killed_ends_in_the_same_bits(name, tmp_path):
    tree = described(name)
    assert in_a_process(tree, tmp_path / "whole") == 0
    chance = np.random.default_rng(len(name))
    assert in_a_process(tree, tmp_path / "broken", step=int(chance.integers(1, 6))) == -signal.SIGKILL
    assert in_a_process(tree, tmp_path / "broken") == 0
    assert digests(tmp_path / "broken") == digests(tmp_path / "whole")


@pytest.mark.parametrize("phase", ["begun", "weights", "state", "manifest", "renamed", "latest"])
def test_a_kill_at_any_moment_of_a_save_loses_nothing(phase, tmp_path):
    tree = described("seq2seq")
    assert in_a_process(tree, tmp_path / "whole") == 0
    for count in (1, 2):
        assert in_a_process(tree, tmp_path / "broken", phase=phase, count=count) == -signal.SIGKILL
    assert in_a_process(tree, tmp_path / "broken") == 0
    assert digests(tmp_path / "broken") == digests(tmp_path / "whole")
    assert not list((tmp_path / "broken" / "checkpoints").glob("*.tmp-*"))


def test_a_kill_while_a_checkpoint_takes_the_place_of_another_loses_neither(tmp_path):
    """A look that was cut short is made by the next start, which then makes the checkpoint of that step again: the only one."""
    tree = described("seq2seq", steps=3, save_every=100)
    assert in_a_process(tree, tmp_path / "whole") == 0
    stopped(tree, tmp_path / "broken", step=3)
    places = tmp_path / "broken" / "checkpoints"
    assert in_a_process(tree, tmp_path / "broken", phase="set aside") == -signal.SIGKILL
    assert not checkpoint.steps(places)
    assert next(train(made_ready(read_run(tree)), tmp_path / "broken")) == Resumed(3, ())
    assert in_a_process(tree, tmp_path / "broken") == 0
    assert digests(tmp_path / "broken") == digests(tmp_path / "whole")
    assert sorted(path.name for path in places.iterdir()) == ["latest", "step-00000003"]


def test_a_latest_checkpoint_that_is_not_there_is_said(tmp_path):
    tree, places = described("seq2seq", steps=4), tmp_path / "run" / "checkpoints"
    list(train(made_ready(read_run(tree)), tmp_path / "run"))
    shutil.rmtree(places / "step-00000004")
    said = f"{places / 'latest'} names 'step-00000004', which is not there"
    assert next(train(made_ready(read_run(tree)), tmp_path / "run")) == Resumed(2, (said,))
    for path in checkpoint.steps(places):
        shutil.rmtree(path)
    with pytest.raises(ValueError, match="it is not begun again over them: .*latest names .*, which is not there"):
        list(train(made_ready(read_run(tree)), tmp_path / "run"))


# --------------------------------------------------------------------------------------------------------- the folder


def test_events_tell_what_happened_and_the_folder_keeps_it(tmp_path):
    events = list(train(made_ready(read_run(described("seq2seq"))), tmp_path / "run"))
    found = [type(event) for event in events]
    assert found.count(Stepped) == 6
    assert found.count(Evaluated) == 2
    assert [event.step for event in events if isinstance(event, Saved)] == [2, 4, 6]
    assert events[-1] == Ended(6, "steps")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == [kind.__name__.lower() for kind in found]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "data.json",
        "env.json",
        "metrics.jsonl",
        "run.toml",
    ]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["latest", "step-00000004", "step-00000006"]
    again = list(train(made_ready(read_run(described("seq2seq"))), tmp_path / "run"))
    assert again == [Resumed(6, ()), Ended(6, "steps")]


def test_a_run_is_loaded_as_any_model_is(tmp_path):
    ready = made_ready(read_run(described("seq2seq")))
    list(train(ready, tmp_path / "run"))
    loaded = manyheads.load(tmp_path / "run")
    assert loaded.spec == ready.spec
    assert isinstance(loaded.generate("a b c"), str)


def test_what_an_objective_needs_is_there_when_its_run_is_loaded(tmp_path):
    for name in ("patches", "classify", "spans", "contrastive"):
        ready = made_ready(read_run(described(name, steps=1)))
        list(train(ready, tmp_path / name))
        loaded = manyheads.load(tmp_path / name)
        assert loaded.spec == ready.spec
        if name in ("patches", "classify"):
            assert loaded.tokenizer is None
            assert ("id2label" in loaded.origin.config) == (name == "classify")
        elif name == "spans":
            assert loaded.tokenizer.token_to_id("<extra_0>") == ready.tokens.extra[0]
        else:
            texts = ["a b c", "d"]
            batch = ready.run.objective.batch(
                [tuple(np.array(ready.tokenizer.encode(text).ids) for _ in "qd") for text in texts], ready.tokens, None
            )
            torch.testing.assert_close(loaded.embed(texts), loaded.model(batch.inputs))


def test_more_steps_are_taken_and_another_run_is_refused(tmp_path):
    list(train(made_ready(read_run(described("seq2seq"))), tmp_path / "run"))
    longer = list(train(made_ready(read_run(described("seq2seq", steps=8))), tmp_path / "run"))
    assert (longer[0], longer[-1]) == (Resumed(6, ()), Ended(8, "steps"))
    with pytest.raises(RunError, match="holds another run: train.tokens was 200 and is 100"):
        list(train(made_ready(read_run(described("seq2seq", tokens=100))), tmp_path / "run"))


def test_a_run_that_reached_its_goal_does_not_go_on(tmp_path):
    tree = described("seq2seq", goal={"metric": "loss", "reach": 100.0})
    assert list(train(made_ready(read_run(tree)), tmp_path / "run"))[-1] == Ended(3, "goal")
    assert list(train(made_ready(read_run(tree)), tmp_path / "run")) == [Resumed(3, ()), Ended(3, "goal")]
    further = described("seq2seq", goal={"metric": "loss", "reach": 0.0})
    assert list(train(made_ready(read_run(further)), tmp_path / "run"))[-1] == Ended(6, "steps")


def test_a_spoiled_checkpoint_is_passed_over_and_none_sound_is_an_error(tmp_path):
    tree = described("seq2seq")
    list(train(made_ready(read_run(tree)), tmp_path / "run"))
    expected = digests(tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000006" / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    events = list(train(made_ready(read_run(tree)), tmp_path / "run"))
    assert events[0].step == 4
    assert "step-00000006/model.safetensors is not what was written" in events[0].wrong[0]
    assert digests(tmp_path / "run") == expected
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"):
        path.write_text("{}")
    with pytest.raises(ValueError, match="no checkpoint of this run is sound"):
        list(train(made_ready(read_run(tree)), tmp_path / "run"))


def test_two_runs_do_not_share_a_folder(tmp_path):
    first = train(made_ready(read_run(described("seq2seq"))), tmp_path / "run")
    next(first)
    (tmp_path / "run" / "lock.json").write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    with pytest.raises(RunError, match="is in use by process"):
        next(train(made_ready(read_run(described("seq2seq"))), tmp_path / "run"))
    first.close()


def test_updates_that_are_nan_are_left_out_and_then_the_run_stops(tmp_path, monkeypatch):
    ready = made_ready(read_run(described("seq2seq", steps=30, accumulate=1)))
    sound, seen, events = ready.run.objective.score, [], []

    def score(self, model, batch):
        found = sound(model, batch)
        seen.extend([1] * model.training)
        bad = model.training and (len(seen) == 3 or len(seen) > 6)
        return type(found)(found.total * torch.nan, found.count) if bad else found

    def trained():
        for event in train(ready, tmp_path / "run"):
            events.append(event)

    monkeypatch.setattr(type(ready.run.objective), "score", score)
    with pytest.raises(RunError, match=r"10 updates in a row were NaN or infinite \(the last at step 16\)"):
        trained()
    assert [event.step for event in events if isinstance(event, Stepped) and event.skipped] == [3, *range(7, 17)]
    with Display(ready, quiet=True) as shown:
        for event in events:
            shown.tell(event)
        assert math.isfinite(shown.loss)


def test_a_wish_ends_a_run_at_the_next_step_with_a_checkpoint(tmp_path):
    *_, saved, last = stopped(described("seq2seq", save_every=100, evaluate_every=100), tmp_path / "run", step=3)
    assert last == Ended(3, "terminated")
    assert isinstance(saved, Saved)


@pytest.mark.parametrize("kind", ScheduleSpec.kinds)
def test_rates_rise_to_the_highest_and_never_above(kind):
    schedule = ScheduleSpec.choose({"kind": kind, "warmup": 10})
    shares = [schedule.share(step, 100) for step in range(1, 101)]
    assert shares[:9] == pytest.approx([step / 10 for step in range(1, 10)])
    assert max(shares) == pytest.approx(1.0)
    assert shares[10:] == sorted(shares[10:], reverse=True)


@pytest.mark.parametrize("kind", ScheduleSpec.kinds)
def test_every_step_learns_something(kind):
    least = {"least": 0.0} if "least" in ScheduleSpec.kinds[kind].model_fields else {}
    for warmup in (0, 1, 5, 30):
        schedule = ScheduleSpec.choose({"kind": kind, "warmup": warmup} | least)
        for steps in (1, 2, 6, 20):
            shares = [schedule.share(step, steps) for step in range(1, steps + 1)]
            assert 0 < min(shares) <= max(shares) <= 1
            assert max(shares) == pytest.approx(min(1.0, steps / warmup) if warmup else 1.0)


def test_a_straight_line_reaches_0_one_step_behind_the_last():
    """As Hugging Face's does: 1/N is left for the last of N steps behind the warm-up."""
    linear, stable = (ScheduleSpec.choose({"kind": kind, "warmup": 2}) for kind in ("linear", "stable"))
    assert [linear.share(step, 7) for step in range(1, 8)] == pytest.approx([1 / 2, 1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5])
    assert [stable.share(step, 20) for step in range(15, 21)] == pytest.approx([1, 1, 1, 3 / 4, 2 / 4, 1 / 4])


def test_an_objective_that_the_model_cannot_learn_is_refused():
    with pytest.raises(SpecError, match="objective: seq2seq is learned by encoder–decoder or recurrent, and this model is decoder"):
        read_run(described("seq2seq") | {"model": OBJECTIVES["causal"]["model"]})


def test_every_row_comes_once_an_epoch():
    ready = made_ready(read_run(described("seq2seq")))
    stream = Stream(ready)
    first = stream.order().batches
    assert sorted(np.concatenate(first).tolist()) == list(range(len(ready.rows)))
    stream.state.epoch = 1
    assert [list(one) for one in stream.order().batches] != [list(one) for one in first]


@pytest.mark.parametrize("around", [None, ((1,), (2,))])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_batch_has_more_places_than_it_may(name, around):
    """Padding, and what stands around a text or is asked for, all included."""
    ready = made_ready(read_run(described(name)))
    if ready.tokenizer is not None:
        ready = replace(ready, tokens=replace(ready.tokens, around=around))
    for rows, most in ((ready.rows, 200), (ready.unseen, max(200, int(lengths_of(ready, ready.unseen).sum(1).max())))):
        order = Order(ready, rows, most=None if rows is ready.rows else 50)
        places = [places_of(order.batch(i)) for i in range(len(order))]
        assert max(places) <= most
        assert np.mean(places) > 0.5 * most  # and none is left mostly empty


def test_a_look_sees_every_class_of_a_sorted_file_and_the_same_rows_whatever_the_seed(tmp_path):
    for name, count in (("train", 100), ("validation", 1000)):
        lines = (f"{kind} text {i}\t{kind}\n" for kind in ("bad", "fair", "good", "great") for i in range(count // 4))
        (tmp_path / f"{name}.tsv").write_text("".join(lines))
    data = {"kind": "labels", "path": str(tmp_path / "train.tsv"), "validation": str(tmp_path / "validation.tsv")}
    model = {"vocab": "tokenizer", "encoder": TOWER, "head": {"kind": "classes", "classes": 4, "pool": "mean"}}
    seen = []
    for seed in (1, 2):
        tree = described("classify", evaluate_rows=100) | {"model": model, "data": data, "seed": seed}
        ready = made_ready(read_run(tree))
        order = Order(ready, ready.unseen, most=100)
        seen.append(sorted(number for i in range(len(order)) for number in order.numbers(i)))
        assert len(set(seen[-1])) == 100
        assert np.bincount(np.array(seen[-1]) // 250, minlength=4).min() > 15
    assert seen[0] == seen[1]


@torch.no_grad()
def test_the_loss_of_a_look_is_that_of_the_tokens_however_a_run_learns_them():
    """So that runs with and without smoothing are comparable, and exp(loss) is a perplexity."""
    found, tree = [], described("seq2seq")
    for smoothing in (0.0, 0.3):
        ready = made_ready(read_run(tree | {"objective": {"kind": "seq2seq", "smoothing": smoothing}}))
        model = manyheads.build(ready.spec, seed=1)
        found.append(evaluate(model, ready)["loss"])
    assert found[0] == found[1]
    order, logs = Order(ready, ready.unseen, most=ready.run.train.evaluate_rows), []
    for batch in map(order.batch, range(len(order))):
        asked = batch.wanted != NOTHING
        logs.append(model(batch.inputs, batch.source)[asked].log_softmax(-1).gather(1, batch.wanted[asked][:, None]))
    assert found[1] == pytest.approx(-float(torch.cat(logs).mean()), rel=1e-5)


@pytest.mark.parametrize("name", ["seq2seq", "masked", "packed", "contrastive"])
def test_runs_of_other_seeds_are_asked_the_same(name):
    found = []
    for seed in (5, 6):
        ready = made_ready(read_run(described(name, evaluate_rows=30) | {"seed": seed}))
        order = Order(ready, ready.unseen, most=30)
        found.append([(batch.inputs.tokens.tolist(), batch.wanted.tolist()) for batch in map(order.batch, range(len(order)))])
    assert found[0] == found[1]


def test_a_target_with_an_unknown_word_is_never_written_to_the_letter(monkeypatch):
    ready = made_ready(read_run(described("seq2seq")))
    rows = [(source, target) for source, target in (ready.unseen[i] for i in range(4))]
    rows[0] = rows[0][0], np.array([ready.tokens.unknown])
    longest = max(len(target) for _, target in rows) + 1
    told = [[*target.tolist(), *[ready.tokens.end] * (longest - len(target))] for _, target in rows]
    monkeypatch.setattr(look, "sample", lambda *given, **more: iter(torch.tensor(told).T))
    assert look.exact(manyheads.build(ready.spec), ready, rows) == [False, True, True, True]


def test_answers_are_written_to_the_rows_whose_loss_is_looked_at(monkeypatch):
    ready, written = made_ready(read_run(described("seq2seq", evaluate_rows=30))), []
    monkeypatch.setattr(look, "exact", lambda model, ready, rows: written.extend(rows) or [])
    evaluate(manyheads.build(ready.spec), ready)
    order = Order(ready, ready.unseen, most=30)
    looked = [ready.unseen[number] for i in range(len(order)) for number in order.numbers(i)]
    assert sorted(map(id, written)) == sorted(map(id, looked))
    assert len(written) == 30 < len(ready.unseen)


def test_a_model_learns_below_what_guessing_gives(tmp_path):
    tower = TOWER | {"width": 32, "embed": {"kind": "tokens", "scale": True}, "residual": "pre"}
    model = {"vocab": "tokenizer", "init": "xavier", "encoder": tower, "decoder": {"like": "encoder", "embed": {"kind": "shared", "scale": True}, "cross": True}}  # fmt: skip
    tree = described("seq2seq", steps=200, tokens=1000, accumulate=1, evaluate_every=200, save_every=200)
    ready = made_ready(read_run(tree | {"model": model, "data": SEQUENCE | {"task": "copy", "count": 2000}}))
    untrained = evaluate(manyheads.build(ready.spec), ready)["loss"]
    *_, looked, _, _ = train(ready, tmp_path / "run")
    assert looked.metrics["loss"] < 0.5 * untrained


SMALL = TOWER | {"width": 32, "embed": {"kind": "tokens", "scale": True}, "residual": "pre"}
PLACES = {"position": {"kind": "learned", "length": 16}}
TASKS = {
    "seq2seq": {"vocab": "tokenizer", "encoder": SMALL, "decoder": {"like": "encoder", "embed": {"kind": "shared", "scale": True}, "cross": True}},
    "causal": {"vocab": "tokenizer", "decoder": SMALL},
    "contrastive": {"vocab": "tokenizer", "encoder": SMALL, "head": {"kind": "vector", "pool": "mean"}},
    "classify": {"vocab": "tokenizer", "encoder": SMALL, "head": {"kind": "classes", "classes": 10, "pool": "mean"}},
    "classify pictures": {"encoder": SMALL | PATCHES | PLACES, "head": {"kind": "classes", "classes": 10, "pool": "mean"}},
    "patches": {"encoder": SMALL | PATCHES | PLACES, "decoder": SMALL | RESTORED | PLACES, "head": {"kind": "pixels", "pixels": 4}, "init": "fan-in"},
}  # fmt: skip
EMBEDDED = {
    "dates": ("seq2seq", {"kind": "dates", "count": 1000, "held_out": 64}),
    "stdlib language": ("causal", {"kind": "stdlib"}),
    "stdlib summary": ("seq2seq", {"kind": "stdlib", "task": "summary"}),
    "stdlib retrieval": ("contrastive", {"kind": "stdlib", "task": "retrieval"}),
    "stdlib classify": ("classify", {"kind": "stdlib", "task": "classify", "least": 20}),
    "digits": ("classify pictures", "digits"),
    "digits restored": ("patches", "digits"),
    "biographies": ("causal", {"kind": "biographies", "people": 100}),
    "biographies questions": ("seq2seq", {"kind": "biographies", "people": 300, "task": "questions"}),
    **{
        f"sequence {task}": ("seq2seq", {"kind": "sequence", "task": task, "count": 500, "held_out": 64})
        for task in ("copy", "reverse", "sort", "lookup", "dyck")
    },
}


@pytest.fixture
def few_files(monkeypatch):
    """Every second of the shorter files of the standard library: it is large."""
    whole = builtin.files_of
    builtin.all_functions.cache_clear()
    monkeypatch.setattr(builtin, "files_of", lambda root: islice((one for one in whole(root) if len(one[1]) < 12_000), 0, None, 2))
    yield
    builtin.all_functions.cache_clear()


@pytest.mark.parametrize("name", EMBEDDED)
def test_every_embedded_data_set_is_learned_below_guessing(name, few_files, tmp_path):
    task, data = EMBEDDED[name]
    model = {"init": "xavier"} | TASKS[task]
    if name == "stdlib classify":
        classes = len(SLOTS["data"].choose(data).load().labels())
        model["head"] = model["head"] | {"classes": classes}
    how = {"steps": 40, "tokens": 800, "accumulate": 1, "save_every": 1000, "evaluate_every": 1000, "evaluate_rows": 64}
    tree = {"model": model, "data": data, "objective": task.split()[0], "tokenizer": {"kind": "words", "size": 500}}
    optim = {"rate": 1e-2, "schedule": {"kind": "cosine", "warmup": 5}}
    ready = made_ready(read_run(tree | {"optim": optim, "train": how}))
    for rows in (ready.rows, ready.unseen):  # the beginning of each text is enough
        rows.rows = [tuple(values[:40] for values in row) for row in rows.rows]
    *_, looked, _, _ = train(ready, tmp_path / "run")
    guessed = {"contrastive": one_of_all, "patches": mean_patch}.get(task, unigram_entropy)(ready)
    assert looked.metrics["loss"] < guessed


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(described("seq2seq", steps=100_000, save_every=50_000, evaluate_every=50_000)))
    return path


@pytest.mark.parametrize(("number", "code", "reason"), [(signal.SIGTERM, 75, "terminated"), (signal.SIGINT, 130, "interrupted")])
def test_a_signal_saves_and_the_same_command_goes_on(run_file, tmp_path, number, code, reason):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "manyheads", "train", str(run_file), "--output", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not (folder / "metrics.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("ended", reason)
    assert (folder / "checkpoints" / f"step-{last['step']:08}" / "manifest.json").is_file()
    assert not (folder / "lock.json").exists()
    done = run("train", run_file, "--output", folder, "-s", f"train.steps={last['step'] + 2}", "--json")
    assert json.loads(done.stdout) == {"schema": 1, "folder": str(folder), "step": last["step"] + 2, "reason": "steps"}


def test_the_command_says_what_is_wrong_in_one_sentence(run_file, tmp_path):
    for change, code, said in (
        ("objective=causal", 2, "causal is learned by decoder"),
        ("train.stepz=3", 2, "no field 'stepz' here: did you mean 'steps'?"),
        ('data={kind="pairs",path="nowhere.tsv"}', 3, "nowhere.tsv"),
        ('data={kind="conllu",path="nowhere.conllu"}', 3, "nowhere.conllu"),
        (f'data={{kind="pictures",path="{__file__}"}}', 3, "is no idx file"),
    ):
        done = run("train", run_file, "--output", tmp_path / "x", "-s", change, check=code)
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_a_run_that_was_trained_is_asked_by_the_command(run_file, tmp_path):
    run("train", run_file, "--output", tmp_path / "run", "-s", "train.steps=4", "--quiet")
    data = json.loads(run("predict", tmp_path / "run", "a b c", "--json").stdout)
    assert data["task"] == "answer"
    run("export", tmp_path / "run", tmp_path / "out", "--to", "manyheads")
    assert manyheads.load(tmp_path / "out").tokenizer is not None


def test_what_was_trained_here_gives_the_same_logits_elsewhere(tmp_path):
    """Exported, and opened by transformers in a process of its own."""
    heads = {"kind": "heads", "heads": 4, "groups": 2, "bias": False, "output_bias": False}
    feedforward = {"kind": "gated", "hidden": 48, "activation": "silu", "bias": False}
    tower = {"layers": 2, "width": 32, "attention": heads, "position": "rope", "feedforward": feedforward, "norm": "rms", "residual": "pre"}
    tree = described("causal") | {"model": {"vocab": "tokenizer", "head": "free", "decoder": tower}}
    list(train(made_ready(read_run(tree)), tmp_path / "run"))
    manyheads.export(tmp_path / "run", tmp_path / "out")
    code = (
        "import sys, torch, transformers\nmodel = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print(*model(torch.tensor([[1, 9, 8, 7]])).logits.detach().flatten().tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True, check=True)
    theirs = torch.tensor([float(number) for number in done.stdout.split()])
    torch.testing.assert_close(manyheads.load(tmp_path / "run").logits(torch.tensor([[1, 9, 8, 7]])).flatten(), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tokenizer", ["words", {"kind": "bpe", "size": 280}], ids=["words", "bpe"])
def test_a_tokenizer_that_was_trained_here_gives_the_same_ids_elsewhere(tokenizer, tmp_path):
    """Whatever transformers takes for the family's own; and it cuts where the model's places end."""
    (tmp_path / "a.tsv").write_text("".join(f"alpha {'beta' if i % 2 else 'gamma'} delta {i}\t{'xy'[i % 2]}\n" for i in range(60)))
    small = ["vocab='tokenizer'", "encoder.layers=1", "encoder.width=16", "encoder.attention.heads=2", "encoder.feedforward.hidden=16"]
    model = override(preset("bert-base"), [*small, "encoder.position.length=12"])
    model["head"] = {"kind": "classes", "classes": "data", "dense": True}
    tree = {"model": model, "tokenizer": tokenizer, "data": {"kind": "labels", "path": str(tmp_path / "a.tsv")}, "objective": "classify"}
    list(train(made_ready(read_run(tree | {"train": {"steps": 1, "tokens": 200}})), tmp_path / "run"))
    manyheads.export(tmp_path / "run", tmp_path / "out")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), manyheads.load(tmp_path / "run")
    texts = ["alpha beta 3", "delta " * 30]
    assert [theirs(text, truncation=True)["input_ids"] for text in texts] == ours.ids(texts)
    assert len(ours.ids(texts)[1]) == 12


def test_what_is_looked_at_and_saved_is_the_mean_of_the_weights(tmp_path):
    """Without forgetting, the mean of all steps; the weights themselves go on as if nobody looked."""
    plain, mean = (described("causal", save_every=1, keep=10) | {"optim": {"average": share}} for share in (0.0, 0.999999))
    runs = {}
    for name, tree in (("plain", plain), ("mean", mean)):
        events = list(train(made_ready(read_run(tree)), tmp_path / name))
        steps = sorted((tmp_path / name / "checkpoints").glob("step-*"))
        runs[name] = (
            [event.loss for event in events if isinstance(event, Stepped)],
            [load_file(step / "model.safetensors") for step in steps],
        )
    assert runs["plain"][0] == runs["mean"][0]
    for key, last in runs["mean"][1][-1].items():
        expected = torch.stack([weights[key].double() for weights in runs["plain"][1]]).mean(0)
        torch.testing.assert_close(last.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("first", "then"), [(0.9, 0.0), (0.0, 0.9)])
def test_a_mean_that_is_no_longer_kept_is_forgotten_and_one_that_is_kept_from_now_on_moves(first, then, tmp_path):
    trees = [described("causal", keep=10) | {"optim": {"average": average}} for average in (first, then)]
    stopped(trees[0], tmp_path / "changed", step=3)
    list(train(made_ready(read_run(trees[1])), tmp_path / "changed", overridden=["optim.average"]))
    list(train(made_ready(read_run(trees[1])), tmp_path / "whole"))
    if then == 0:
        assert digests(tmp_path / "changed") == digests(tmp_path / "whole")
    fourth, sixth = (load_file(tmp_path / "changed" / "checkpoints" / f"step-0000000{i}" / "model.safetensors") for i in (4, 6))
    assert all((fourth[name] != sixth[name]).any() for name in sixth)


@pytest.mark.parametrize("average", [0.0, 0.5])
@pytest.mark.parametrize("kind", OptimSpec.kinds)
def test_every_optimiser_goes_on_as_if_it_had_never_stopped(kind, average, tmp_path):
    tree = described("causal") | {"optim": {"kind": kind, "average": average}}
    assert in_a_process(tree, tmp_path / "whole") == 0
    assert in_a_process(tree, tmp_path / "broken", step=3) == -signal.SIGKILL
    assert in_a_process(tree, tmp_path / "broken") == 0
    assert digests(tmp_path / "broken") == digests(tmp_path / "whole")


# ------------------------------------------------------------------------------------------------ texts that share rows


@pytest.mark.parametrize("name", ["causal", "masked"])
def test_texts_that_share_a_row_give_the_loss_and_gradients_of_texts_alone(name):
    ready = made_ready(read_run(described(name, pack=160, tokens=800)))
    objective, model = ready.run.objective, manyheads.build(ready.spec, seed=1).double().eval()
    order = Order(ready, ready.rows)
    lines = order.batches[0]
    whole = [line for line in lines if all(stop - start == order.lengths[row, 0] for row, start, stop in line)]
    assert len(whole) > 1
    assert max(map(len, whole)) > 1
    order.batches = [whole]
    together = order.batch(0)
    rows = [ready.rows[int(row)] for line in whole for row, _, _ in line]
    alone = objective.batch(rows, ready.tokens, np.random.default_rng([ready.run.seed, 0, 0]))
    assert together.inputs.batch < alone.inputs.batch
    found = []
    for batch in (together, alone):
        model.zero_grad()
        score = objective.score(model, batch)
        score.total.backward()
        found.append((score, [parameter.grad.clone() for parameter in model.parameters()]))
    (one, gradients), (other, others) = found
    assert (one.count, one.right) == (other.count, other.right)
    torch.testing.assert_close(one.total, other.total, atol=1e-9, rtol=1e-12)
    for gradient, expected in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["causal", "masked"])
@pytest.mark.parametrize("pack", [7, 64])
def test_every_token_is_in_one_piece_and_what_stands_around_a_text_at_its_ends(name, pack):
    ready = made_ready(read_run(described(name, pack=pack, tokens=pack * 3)))
    objective, tokens = ready.run.objective, ready.tokens
    pieces = {}
    order = Order(ready, ready.rows, epoch=1)
    for line in (line for lines in order.batches for line in lines):
        assert sum(stop - start for _, start, stop in line) <= pack
        for row, start, stop in line.tolist():
            given = objective.pieces([objective.cut(ready.rows[row][0], start, stop)], tokens, np.random.default_rng(0))
            pieces.setdefault(row, []).append((start, given.inputs.tokens[0].tolist(), given.wanted[0].tolist()))
    assert sorted(pieces) == list(range(len(ready.rows)))
    for row, found in pieces.items():
        text = ready.rows[row][0].tolist()
        given = [token for _, some, _ in sorted(found) for token in some]
        if name == "causal":
            assert given == [tokens.begin, *text]
            assert [token for *_, some in sorted(found) for token in some] == [*text, tokens.end]
        else:
            assert (given[0], given[-1], len(given)) == (tokens.begin, tokens.end, len(text) + 2)


def test_packing_leaves_little_room_and_what_cannot_share_rows_is_refused():
    ready = made_ready(read_run(described("causal", pack=256, tokens=1024)))
    order = Order(ready, ready.rows)
    batches = [order.batch(i) for i in range(len(order))]
    assert 1 - sum(batch.tokens for batch in batches) / sum(batch.inputs.tokens.numel() for batch in batches) < 0.1
    for name, said in (("seq2seq", "causal and masked"), ("spans", "causal and masked")):
        with pytest.raises(SpecError, match=said):
            read_run(described(name, pack=64))
    with pytest.raises(SpecError, match="train.pack: is 300, and a batch has 200 places"):
        read_run(described("causal", pack=300))
    with pytest.raises(SpecError, match="kept apart by a mask"):
        read_run(described("causal", pack=64) | {"model": {"vocab": "tokenizer", "recurrent": {"width": 16, "attention": False}}})


# ------------------------------------------------------------------------------------------------- before a run starts


def test_a_dry_run_says_what_it_takes_and_writes_nothing(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(described("seq2seq")))
    found = json.loads(run("train", path, "--dry-run", "--output", tmp_path / "out", "--json").stdout)
    ready = made_ready(read_run(described("seq2seq")))
    model, stream = manyheads.build(ready.spec), Stream(ready)
    assert found["needs"]["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert found["epoch"]["rows"] == len(ready.rows)
    assert found["epoch"]["batches"] == len(stream.order().batches)
    batches = [stream.next() for _ in stream.order().batches]
    places = sum(one.tokens.numel() for batch in batches for one in (batch.inputs, batch.source))
    assert found["epoch"]["looked_at"] == len(batches)
    assert found["epoch"]["tokens"] == sum(batch.tokens for batch in batches)
    assert found["epoch"]["padding"] == pytest.approx(1 - sum(batch.tokens for batch in batches) / places)
    assert found["epochs"] == pytest.approx(6 * 2 / len(batches))
    assert found["seconds"] > 0
    assert found["needs"]["disk_free"] > found["needs"]["disk"]
    assert read_run(found["run"]).model == ready.spec
    text = run("train", path, "--dry-run").stdout
    assert "parameters" in text
    assert "on this machine" in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.toml"]
    assert "--output" in run("train", path, check=2).stderr


def test_the_forecast_of_a_checkpoint_is_what_is_written(tmp_path):
    from manyheads.train.forecast import needs_of

    ready = made_ready(read_run(described("seq2seq")))
    needs = needs_of(ready, tmp_path / "run")
    list(train(ready, tmp_path / "run"))
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    written = sum((newest / name).stat().st_size for name in ("model.safetensors", "optimizer.safetensors"))
    assert needs.checkpoint <= written <= 1.2 * needs.checkpoint + 20_000  # names and steps beside the numbers
    assert needs_of(ready, tmp_path / "run").disk == needs.disk - 2 * needs.checkpoint, "two are there already"
    best = needs_of(made_ready(read_run(described("seq2seq", goal={"metric": "loss"}))), tmp_path / "other")
    assert best.disk == needs.disk + needs.checkpoint, "the best is kept too"


def test_texts_that_share_rows_are_cut_by_these_alone():
    with pytest.raises(SpecError, match="train.longest: cuts texts, and train.pack alone cuts those that share rows"):
        made_ready(read_run(described("packed", longest=10)))


def test_the_forecast_of_a_look_counts_the_rows_that_texts_share(tmp_path, monkeypatch):
    from manyheads.train import forecast

    (tmp_path / "book.txt").write_text("a book of one text\n" * 400)
    text = {"kind": "text", "path": str(tmp_path / "book.txt"), "document": "file", "held_out": 0.25}
    tree = {"model": {"vocab": "tokenizer", "decoder": TOWER}, "data": text, "tokenizer": "bytes", "objective": "causal"}
    ready = made_ready(read_run(tree | {"train": {"steps": 2, "tokens": 64, "pack": 16, "evaluate_rows": 1000}}))
    seen = []
    monkeypatch.setattr(forecast, "evaluate", lambda model, ready: (seen.append(ready.run.train.evaluate_rows), time.sleep(0.01)))
    lines = sum(len(batch) for batch in Order(ready, ready.unseen, most=1000).batches)
    assert len(ready.unseen) < 5 < 100 < lines
    assert forecast.pace_of(ready, seconds=0.01).evaluation >= 0.01 * lines / seen[0] > 0.01


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_what_no_memory_holds_is_refused_before_it_starts(dry, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(described("seq2seq")))
    done = run("train", path, "--output", tmp_path / "out", *dry, "-s", "model.encoder.feedforward.hidden=1000000000000", check=2)
    assert "at most" in done.stderr
    done = run("train", path, "--output", tmp_path / "out", *dry, "-s", "model.encoder.width=65536", check=5)
    assert "of memory and" in done.stderr
    assert "parameters with gradients and moments" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_free_is_that_of_the_device_that_trains(monkeypatch):
    from manyheads.train.forecast import needs_of

    ready = made_ready(read_run(described("seq2seq")))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12_345, 99_999))  # there is no GPU here
    assert needs_of(ready, device="cuda:1").memory_free == 12_345 != needs_of(ready).memory_free


def test_what_no_disk_holds_is_refused_before_it_starts(tmp_path):
    from manyheads.train.forecast import NoRoomError, check_room, needs_of

    needs = needs_of(made_ready(read_run(described("seq2seq"))), tmp_path / "run")
    check_room(needs)
    with pytest.raises(NoRoomError, match="on the disk and"):
        check_room(replace(needs, disk_free=needs.checkpoint - 1))
    assert NoRoomError.exit_code == 5


def limited(tree, folder, room):
    import resource

    from manyheads.train.forecast import kibibytes
    from manyheads.training import watched

    torch.set_num_threads(1)
    ready = made_ready(read_run(tree))
    now = kibibytes(Path("/proc/self/status"), "VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (now + room, now + room))
    try:
        watched(ready, folder, quiet=True)
    except RunError as error:
        os._exit(error.exit_code)


def test_a_limit_of_the_process_counts(tmp_path):
    tree = described("seq2seq", tokens=4000)
    assert in_a_process_of(limited, tree, tmp_path / "small", 1 << 20) == 5
    assert not (tmp_path / "small").exists()
    assert in_a_process_of(limited, tree, tmp_path / "large", 1 << 30) == 0


def in_a_process_of(target, *arguments):
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # which loading the compiler brings up
def test_compiled_layers_have_the_same_names():
    ready = made_ready(read_run(described("seq2seq", compile=True)))
    model, _ = first_model(ready)
    assert all(layer._compiled_call_impl is not None for tower in (model.encoder, model.decoder) for layer in tower.layers)
    assert list(model.state_dict()) == list(manyheads.build(ready.spec).state_dict())
