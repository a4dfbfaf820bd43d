"""Training: equal bits through every kill and resume, events, folders, and models that learn and work elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from command import error_of, run, run_json, started
from safetensors.torch import load_file
from small_runs import (
    PATCHES,
    RESTORED,
    SEQUENCE,
    STACK,
    TASKS,
    described,
    end_of,
    hashes,
    in_a_process,
    last_metrics,
    resume,
    stop_after,
    train_all,
)
from torch.nn.modules.module import register_module_forward_hook
from trivial_losses import mean_patch, random_document, unigram_entropy

import manyheads
from manyheads.data.builtin import read_sources, stdlib
from manyheads.errors import CorruptFileError, DivergedError, IncompatibleError, RunChangedError, RunLockedError
from manyheads.files.read import read_toml
from manyheads.model.transformer import Transformer
from manyheads.presets import preset
from manyheads.spec import SLOTS, override, to_toml
from manyheads.training.comparison import parameter_count
from manyheads.training.events import Evaluated, Finished, Prepared, Resumed, Saved, Step
from manyheads.training.loop import train_events, validate
from manyheads.training.optim import OptimSpec, ScheduleSpec
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run
from manyheads.training.store import list_checkpoints


@pytest.mark.parametrize("name", TASKS)
def test_a_killed_run_ends_in_the_same_bits(name, tmp_path):
    tree = described(name)
    assert in_a_process(tree, tmp_path / "whole") == 0
    step = int(np.random.default_rng(len(name)).integers(1, 6))
    assert in_a_process(tree, tmp_path / "broken", step=step) == -signal.SIGKILL
    assert in_a_process(tree, tmp_path / "broken") == 0
    assert hashes(tmp_path / "broken") == hashes(tmp_path / "whole")


MOMENTS = {  # of a save: the process is killed right before a file operation
    "draft folder": ("os.mkdir", r"step-\d+\.tmp-"),
    "config": ("open", r"step-\d+\.tmp-\w+/config\.json$"),
    "state": ("open", r"step-\d+\.tmp-\w+/trainer\.json$"),
    "manifest": ("open", r"step-\d+\.tmp-\w+/manifest\.json$"),
    "rename": ("os.rename", r"step-\d+\.tmp-"),
    "latest": ("os.rename", r"/\.latest\.draft$"),
    "purge": ("shutil.rmtree", r"/step-\d+\.tmp-\w+$"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that is not killed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert in_a_process(described("seq2seq"), folder) == 0
    return folder


@pytest.mark.parametrize("name", MOMENTS)
def test_a_kill_at_any_moment_of_a_save_loses_nothing(name, tmp_path, whole):
    tree = described("seq2seq")
    for count in (1,) if name == "purge" else (1, 2):  # only the last of three saves removes a checkpoint
        assert in_a_process(tree, tmp_path / "broken", moment=MOMENTS[name], count=count) == -signal.SIGKILL
    assert in_a_process(tree, tmp_path / "broken") == 0
    assert hashes(tmp_path / "broken") == hashes(whole)
    assert not list((tmp_path / "broken" / "checkpoints").glob("*.tmp-*"))


def test_a_kill_while_a_checkpoint_replaces_another_of_its_step_loses_neither(tmp_path):
    """The next start repeats an interrupted evaluation and then saves that step, the only checkpoint, again."""
    tree = described("seq2seq", steps=3, save_every=100)
    assert in_a_process(tree, tmp_path / "whole") == 0
    stop_after(tree, tmp_path / "broken", step=3)
    folder = tmp_path / "broken" / "checkpoints"
    assert in_a_process(tree, tmp_path / "broken", moment=("os.rename", r"step-00000003\.tmp-")) == -signal.SIGKILL
    assert not list_checkpoints(folder)
    assert resume(tree, tmp_path / "broken") == Resumed(3)
    assert in_a_process(tree, tmp_path / "broken") == 0
    assert hashes(tmp_path / "broken") == hashes(tmp_path / "whole")
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000003"]


def test_a_missing_latest_checkpoint_is_a_warning_and_missing_all_is_an_error(tmp_path):
    tree, folder = described("seq2seq", steps=4), tmp_path / "run" / "checkpoints"
    train_all(tree, tmp_path / "run")
    shutil.rmtree(folder / "step-00000004")
    resumed = resume(tree, tmp_path / "run")
    assert resumed.step == 2
    assert str(folder / "latest") in resumed.warnings[0]
    assert "step-00000004" in resumed.warnings[0]
    for path in list_checkpoints(folder):
        shutil.rmtree(path)
    with pytest.raises(CorruptFileError) as error:
        train_all(tree, tmp_path / "run")
    assert str(folder / "latest") in str(error.value)


# ---------------------------------------------------------------------------------------------------------- the folder


def test_events_say_what_happened_and_the_folder_has_it(tmp_path):
    events = train_all(described("seq2seq"), tmp_path / "run")
    kinds = [type(event) for event in events]
    assert (kinds.count(Step), kinds.count(Evaluated)) == (6, 2)
    assert [event.step for event in events if isinstance(event, Saved)] == [2, 4, 6]
    assert end_of(events) == (6, "steps")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == [kind.__name__.lower() for kind in kinds]
    assert lines[0].keys() == {"event", *vars(events[0])}
    names = ["checkpoints", "data.json", "env.json", "metrics.jsonl", "run.toml"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names
    names = ["latest", "step-00000004", "step-00000006"]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == names
    events = train_all(described("seq2seq"), tmp_path / "run")
    assert [type(event) for event in events] == [Prepared, Resumed, Finished]
    assert end_of(events) == (6, "steps")


def test_a_run_is_loaded_like_any_model(tmp_path):
    run = prepare(read_run(described("seq2seq")))
    list(train_events(run, tmp_path / "run"))
    checkpoint = manyheads.load(tmp_path / "run")
    assert checkpoint.spec == run.model_spec
    assert isinstance(checkpoint.generate("a b c"), str)


def test_a_loaded_run_has_what_its_task_needs(tmp_path):
    for name in ("mae", "classify", "spans", "retrieval"):
        run = prepare(read_run(described(name, steps=1)))
        list(train_events(run, tmp_path / name))
        checkpoint = manyheads.load(tmp_path / name)
        assert checkpoint.spec == run.model_spec
        assert checkpoint.task["kind"] == name
        if name in ("mae", "classify"):
            assert checkpoint.tokenizer is None
            assert bool(checkpoint.id2label) == (name == "classify")
        elif name == "spans":
            assert checkpoint.tokenizer.token_to_id("<extra_0>") == run.special_tokens.sentinels[0]
        else:
            texts = ["a b c", "d"]
            rows = [tuple(np.array(run.tokenizer.encode(text).ids) for _ in "qd") for text in texts]
            batch = run.spec.task.batch(rows, run.special_tokens, None)
            torch.testing.assert_close(checkpoint.embed(texts), checkpoint.model(batch.inputs))


def test_a_run_continues_with_more_steps_and_another_run_is_refused(tmp_path):
    train_all(described("seq2seq"), tmp_path / "run")
    longer = train_all(described("seq2seq", steps=8), tmp_path / "run")
    assert (longer[1], end_of(longer)) == (Resumed(6), (8, "steps"))
    with pytest.raises(RunChangedError) as error:
        train_all(described("seq2seq", batch_tokens=100), tmp_path / "run")
    assert error.value.code == "run.changed"
    assert ("train.batch_tokens", 200, 100) in error.value.changes


def test_a_run_that_reached_stop_at_does_not_continue(tmp_path):
    tree = described("seq2seq", best={"metric": "loss", "stop_at": 100.0})
    assert end_of(train_all(tree, tmp_path / "run")) == (3, "stop_at")
    events = train_all(tree, tmp_path / "run")
    assert [type(event) for event in events] == [Prepared, Resumed, Finished]
    assert end_of(events) == (3, "stop_at")
    further = described("seq2seq", best={"metric": "loss", "stop_at": 0.0})
    assert end_of(train_all(further, tmp_path / "run")) == (6, "steps")


def test_an_invalid_checkpoint_is_not_used_and_no_valid_one_is_an_error(tmp_path):
    tree = described("seq2seq")
    train_all(tree, tmp_path / "run")
    expected = hashes(tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000006" / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    events = train_all(tree, tmp_path / "run")
    assert events[0].step == 4
    assert str(newest) in events[1].warnings[0]
    assert hashes(tmp_path / "run") == expected
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"):
        path.write_text("{}")
    with pytest.raises(CorruptFileError):
        train_all(tree, tmp_path / "run")


def test_two_runs_cannot_share_a_folder(tmp_path):
    first = train_events(prepare(read_run(described("seq2seq"))), tmp_path / "run")
    next(first)
    (tmp_path / "run" / "lock.json").write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    with pytest.raises(RunLockedError) as error:
        train_all(described("seq2seq"), tmp_path / "run")
    assert str(os.getppid()) in str(error.value)
    first.close()


def test_steps_that_are_nan_are_skipped_and_ten_in_a_row_stop_the_run(tmp_path):
    calls, events = [], []

    def hook(module, inputs, logits):
        """NaN in step 3, and in every step from the seventh."""
        if isinstance(module, Transformer) and module.training:
            calls.append(module)
            return logits * torch.nan if len(calls) == 3 or len(calls) > 6 else logits
        return None

    run = prepare(read_run(described("seq2seq", steps=30, accumulate=1)))
    handle = register_module_forward_hook(hook)
    try:
        with pytest.raises(DivergedError) as error:
            events.extend(train_events(run, tmp_path / "run"))  # keeps what came before the error
    finally:
        handle.remove()
    assert error.value.code == "run.diverged"
    assert "16" in str(error.value)
    skipped = [event for event in events if isinstance(event, Step) and event.skipped]
    assert [event.step for event in skipped] == [3, *range(7, 17)]
    assert all(event.rows for event in skipped)


def test_should_stop_ends_a_run_after_the_step_with_a_checkpoint(tmp_path):
    events = stop_after(described("seq2seq", save_every=100, eval_every=100), tmp_path / "run", step=3)
    assert end_of(events) == (3, "terminated")
    assert isinstance(events[-2], Saved)


# ----------------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("kind", ScheduleSpec.kinds)
def test_learning_rates_rise_to_their_peak_and_never_above(kind):
    schedule = ScheduleSpec.from_config({"kind": kind, "warmup_steps": 10})
    factors = [schedule.factor(step, 100) for step in range(1, 101)]
    assert factors[:9] == pytest.approx([step / 10 for step in range(1, 10)])
    assert max(factors) == pytest.approx(1.0)
    assert factors[10:] == sorted(factors[10:], reverse=True)


@pytest.mark.parametrize("kind", ScheduleSpec.kinds)
def test_no_step_has_a_learning_rate_of_0(kind):
    lowest = {"min_lr_ratio": 0.0} if "min_lr_ratio" in ScheduleSpec.kinds[kind].model_fields else {}
    for warmup in (0, 1, 5, 30):
        schedule = ScheduleSpec.from_config({"kind": kind, "warmup_steps": warmup} | lowest)
        for steps in (1, 2, 6, 20):
            factors = [schedule.factor(step, steps) for step in range(1, steps + 1)]
            assert 0 < min(factors) <= max(factors) <= 1
            assert max(factors) == pytest.approx(min(1.0, steps / warmup) if warmup else 1.0)


def test_linear_decay_reaches_0_one_step_after_the_last():
    """As in Hugging Face's schedules: 1/N is left for the last of N steps after the warm-up."""
    linear, stable = (
        ScheduleSpec.from_config({"kind": kind, "warmup_steps": 2}) for kind in ("linear", "warmup-stable-decay")
    )
    assert [linear.factor(step, 7) for step in range(1, 8)] == pytest.approx([1 / 2, 1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5])
    assert [stable.factor(step, 20) for step in range(15, 21)] == pytest.approx([1, 1, 1, 3 / 4, 2 / 4, 1 / 4])


# ------------------------------------------------------------------------------------------------------------ learning


def test_a_task_that_the_model_cannot_learn_is_refused():
    with pytest.raises(IncompatibleError) as error:
        read_run(described("seq2seq") | {"model": TASKS["causal"]["model"]})
    assert error.value.path == ("task",)
    assert "decoder" in str(error.value)


def test_a_model_learns_to_half_its_untrained_loss(tmp_path):
    stack = STACK | {"width": 32, "embed": {"kind": "tokens", "scale": True}, "residual": "pre"}
    decoder = {"like": "encoder", "embed": {"kind": "shared", "scale": True}, "cross": True}
    model = {"vocab": "tokenizer", "init": "xavier", "encoder": stack, "decoder": decoder}
    tree = described("seq2seq", steps=200, batch_tokens=1000, accumulate=1, eval_every=200, save_every=200)
    run = prepare(read_run(tree | {"model": model, "data": SEQUENCE | {"function": "copy", "count": 2000}}))
    untrained = validate(manyheads.build(run.model_spec), run)["loss"]
    assert last_metrics(train_events(run, tmp_path / "run"))["loss"] < 0.5 * untrained


SMALL = STACK | {"width": 32, "embed": {"kind": "tokens", "scale": True}, "residual": "pre"}
LEARNED = {"position": {"kind": "learned", "length": 16}}
CLASSES = {"kind": "classes", "classes": "data", "pool": "mean"}
MODELS = {
    "seq2seq": {
        "vocab": "tokenizer",
        "encoder": SMALL,
        "decoder": {"like": "encoder", "embed": {"kind": "shared", "scale": True}, "cross": True},
    },
    "causal": {"vocab": "tokenizer", "decoder": SMALL},
    "retrieval": {"vocab": "tokenizer", "encoder": SMALL, "head": {"kind": "vector", "pool": "mean"}},
    "classify": {"vocab": "tokenizer", "encoder": SMALL, "head": CLASSES},
    "classify images": {"encoder": SMALL | PATCHES | LEARNED, "head": CLASSES},
    "mae": {
        "encoder": SMALL | PATCHES | LEARNED,
        "decoder": SMALL | RESTORED | LEARNED,
        "head": {"kind": "pixels", "pixels": 4},
        "init": "fan-in",
    },
}
BUILTIN = {
    "dates": ("seq2seq", {"kind": "dates", "count": 1000, "validation_count": 64}),
    "stdlib language": ("causal", {"kind": "stdlib"}),
    "stdlib summary": ("seq2seq", {"kind": "stdlib", "subset": "summary"}),
    "stdlib retrieval": ("retrieval", {"kind": "stdlib", "subset": "retrieval"}),
    "stdlib classify": ("classify", {"kind": "stdlib", "subset": "classify", "min_functions": 20}),
    "digits": ("classify images", "digits"),
    "digits mae": ("mae", "digits"),
    "biographies": ("causal", {"kind": "biographies", "people": 100}),
    "biographies questions": ("seq2seq", {"kind": "biographies", "people": 300, "subset": "questions"}),
    **{
        f"sequence {name}": ("seq2seq", {"kind": "sequence", "function": name, "count": 500, "validation_count": 64})
        for name in ("copy", "reverse", "sort", "lookup", "dyck")
    },
}


@pytest.fixture(scope="module")
def small_stdlib(tmp_path_factory):
    """Every second of the shorter files of the standard library, which is large."""
    folder = tmp_path_factory.mktemp("stdlib")
    short = [(name, text) for name, text in read_sources(stdlib()) if len(text) < 12_000]
    for name, text in short[::2]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", BUILTIN)
def test_every_builtin_data_set_is_learned_better_than_a_trivial_prediction(name, small_stdlib, tmp_path, monkeypatch):
    paths = sysconfig.get_paths
    monkeypatch.setattr(sysconfig, "get_paths", lambda *options: paths(*options) | {"stdlib": str(small_stdlib)})
    task, data = BUILTIN[name]
    settings = {"steps": 40, "batch_tokens": 800, "save_every": 1000, "eval_every": 1000, "eval_rows": 64}
    settings |= {} if task in ("classify images", "mae") else {"max_length": 40}
    tree = {"model": {"init": "xavier"} | MODELS[task], "data": data, "task": task.split()[0]}
    tree |= {"tokenizer": {"kind": "words", "vocab_size": 500}, "train": settings}
    run = prepare(read_run(tree | {"optim": {"lr": 1e-2, "schedule": {"kind": "cosine", "warmup_steps": 5}}}))
    metrics = last_metrics(train_events(run, tmp_path / "run"))
    trivial = {"retrieval": random_document, "mae": mean_patch}.get(task, unigram_entropy)
    assert metrics["loss"] < trivial(run)


# ----------------------------------------------------------------------------------------------------- from the command


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(described("seq2seq", steps=100_000, save_every=50_000, eval_every=50_000)))
    return path


@pytest.mark.parametrize(
    ("number", "status", "reason"), [(signal.SIGTERM, 75, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_saves_and_the_same_command_resumes(run_file, tmp_path, number, status, reason):
    folder, stderr = tmp_path / "run", tmp_path / "err"
    stderr.touch()
    command = ["train", str(run_file), "--output", str(folder)]
    process = started(*command, stderr=stderr)
    deadline = time.monotonic() + 100
    log = folder / "metrics.jsonl"
    while not (log.is_file() and '"event": "step"' in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == status, stderr.read_text()
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("finished", reason)
    assert (folder / "checkpoints" / f"step-{last['step']:08}" / "manifest.json").is_file()
    assert not (folder / "lock.json").exists()
    report = run_json("train", run_file, "--output", folder, "-s", f"train.steps={last['step'] + 2}")
    expected = {"schema": 1, "folder": str(folder), "step": last["step"] + 2, "reason": "steps"}
    assert report == expected | {"metrics": report["metrics"]}


@pytest.mark.parametrize(
    ("override", "status", "code", "value"),
    [
        ("task=causal", 2, "config.incompatible", "decoder"),
        ("train.stepz=3", 2, "config.unknown-key", "steps"),
        (f'data={{kind="images",path="{__file__}"}}', 3, "data.file", __file__),
    ],
)
def test_an_error_of_the_command_has_a_code_and_writes_nothing(override, status, code, value, run_file, tmp_path):
    error = error_of("train", run_file, "--output", tmp_path / "x", "-s", override, check=status)
    assert error["code"] == code
    assert value in error["message"]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("assignment", "status", "code"),
    [
        ('data={kind="pairs",path="nowhere"}', 3, "data.file"),
        ('data={kind="conllu",path="nowhere"}', 3, "data.file"),
        ('tokenizer={kind="file",path="nowhere"}', 3, "data.file"),
        ('init_from="nowhere"', 2, "usage.path-not-found"),
    ],
)
def test_a_path_that_does_not_exist_is_the_same_error_in_an_override_as_in_the_run_file(
    assignment, status, code, run_file, tmp_path
):
    (tmp_path / "other.toml").write_text(to_toml(override(described("seq2seq"), [assignment])))
    errors = [
        error_of("train", *arguments, "--output", tmp_path / "x", check=status)
        for arguments in ((run_file, "-s", assignment), (tmp_path / "other.toml",))
    ]
    assert errors[0] == errors[1]
    assert errors[0]["code"] == code
    assert "nowhere" in errors[0]["message"]
    assert not (tmp_path / "x").exists()


def test_the_command_uses_a_run_that_was_trained(run_file, tmp_path):
    run("train", run_file, "--output", tmp_path / "run", "-s", "train.steps=4", "--quiet")
    assert run_json("predict", tmp_path / "run", "a b c")["task"] == "seq2seq"
    run("export", tmp_path / "run", tmp_path / "out", "--to", "manyheads")
    assert manyheads.load(tmp_path / "out").tokenizer is not None


# ----------------------------------------------------------------------------------------------- in transformers' hands


def test_transformers_gives_the_same_logits_for_an_exported_run(tmp_path):
    """As in a process of its own, in tests/checkpoint."""
    heads = {"kind": "heads", "heads": 4, "kv_heads": 2, "bias": False, "output_bias": False}
    feedforward = {"kind": "gated", "hidden": 48, "activation": "silu", "bias": False}
    stack = {"layers": 2, "width": 32, "attention": heads, "position": "rope", "feedforward": feedforward}
    model = {"vocab": "tokenizer", "head": "untied", "decoder": stack | {"norm": "rms", "residual": "pre"}}
    train_all(described("causal") | {"model": model}, tmp_path / "run")
    manyheads.export(tmp_path / "run", tmp_path / "out")
    model, ids = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(),
        torch.tensor([[1, 9, 8, 7]]),
    )
    ours = manyheads.load(tmp_path / "run").logits(ids)
    torch.testing.assert_close(ours, model(ids).logits.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tokenizer", ["words", {"kind": "bpe", "vocab_size": 280}], ids=["words", "bpe"])
def test_transformers_gives_the_same_ids_with_a_tokenizer_trained_here(tokenizer, tmp_path):
    """Whatever it takes for the tokenizer of the family; and it truncates at the model's last position."""
    lines = (f"alpha {'beta' if i % 2 else 'gamma'} delta {i}\t{'xy'[i % 2]}\n" for i in range(60))
    (tmp_path / "a.tsv").write_text("".join(lines))
    fields = {"layers": 1, "width": 16, "attention.heads": 2, "feedforward.hidden": 16, "position.length": 12}
    small = [f"encoder.{name}={value}" for name, value in fields.items()]
    model = override(preset("bert-base"), ["vocab='tokenizer'", *small])
    model["head"] = {"kind": "classes", "classes": "data", "dense": True}
    tree = {"model": model, "tokenizer": tokenizer, "data": {"kind": "labels", "path": str(tmp_path / "a.tsv")}}
    train_all(tree | {"task": "classify", "train": {"steps": 1, "batch_tokens": 200}}, tmp_path / "run")
    manyheads.export(tmp_path / "run", tmp_path / "out")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), manyheads.load(tmp_path / "run")
    texts = ["alpha beta 3", "delta " * 30]
    ids = [encoding.ids for encoding in ours.encode(texts)]
    assert [theirs(text, truncation=True)["input_ids"] for text in texts] == ids
    assert len(ids[1]) == 12


# ---------------------------------------------------------------------------------------- averages, and every optimizer


def test_the_moving_average_is_what_is_saved_and_training_is_as_without(tmp_path):
    """With a decay rate near 1, the mean over all steps."""
    losses, weights = {}, {}
    for decay in (0.0, 0.999999):
        tree = described("causal", save_every=1, keep_last=10) | {"optim": {"ema_decay": decay}}
        losses[decay] = [event.loss for event in train_all(tree, tmp_path / str(decay)) if isinstance(event, Step)]
        paths = sorted((tmp_path / str(decay) / "checkpoints").glob("step-*"))
        weights[decay] = [load_file(path / "model.safetensors") for path in paths]
    assert losses[0.0] == losses[0.999999]
    for name, average in weights[0.999999][-1].items():
        expected = torch.stack([tensors[name].double() for tensors in weights[0.0]]).mean(0)
        torch.testing.assert_close(average.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9)])
def test_an_average_can_end_or_begin_when_a_run_is_resumed(before, after, tmp_path):
    old, new = (described("causal", keep_last=10) | {"optim": {"ema_decay": decay}} for decay in (before, after))
    stop_after(old, tmp_path / "changed", step=3)
    train_all(new, tmp_path / "changed", override_resume=["optim.ema_decay"])
    train_all(new, tmp_path / "whole")
    if after == 0:
        assert hashes(tmp_path / "changed") == hashes(tmp_path / "whole")
    paths = (tmp_path / "changed" / "checkpoints" / f"step-0000000{i}" / "model.safetensors" for i in (4, 6))
    fourth, sixth = map(load_file, paths)
    assert all((fourth[name] != sixth[name]).any() for name in sixth)


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("kind", OptimSpec.kinds)
def test_every_optimizer_resumes_with_the_same_bits(kind, decay, tmp_path):
    tree = described("causal") | {"optim": {"kind": kind, "ema_decay": decay}}
    assert in_a_process(tree, tmp_path / "whole") == 0
    assert in_a_process(tree, tmp_path / "broken", step=3) == -signal.SIGKILL
    assert in_a_process(tree, tmp_path / "broken") == 0
    assert hashes(tmp_path / "broken") == hashes(tmp_path / "whole")


# -------------------------------------------------------------------------------------------------------------- buffers


class ScaledByMean(torch.nn.Module):
    """x / running mean of |x| + offset: its buffers change in training, are counted in integers, or are not saved."""

    def __init__(self, width):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(2, 2).T)
        self.register_buffer("offset", torch.zeros(width), persistent=False)

    def reset_parameters(self):
        for tensor in (self.gain, self.mean):
            torch.nn.init.ones_(tensor)
        self.steps.zero_()
        self.mask.copy_(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))
        self.offset.copy_(torch.linspace(0, 1, len(self.offset)))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().abs().mean(), 0.1)
            self.steps.add_(1)
        return x / self.mean * self.gain + self.offset.to(x.dtype)


@pytest.fixture
def with_buffers():
    """The tree of a run whose norms have buffers."""

    class ScaledByMeanSpec(SLOTS["norm"], kind="scaled-by-mean"):
        def build(self, width):
            return ScaledByMean(width)

    tree = described("causal")
    yield tree | {"model": {"vocab": "tokenizer", "decoder": STACK | {"norm": "scaled-by-mean"}}}
    del SLOTS["norm"].kinds["scaled-by-mean"]


def buffers_of(checkpoint):
    return {name: buffer.clone() for name, buffer in checkpoint.model.named_buffers()}


def test_a_part_with_buffers_is_resumed_loaded_and_exported(with_buffers, tmp_path):
    train_all(with_buffers, tmp_path / "whole")
    stop_after(with_buffers, tmp_path / "broken", 3)
    train_all(with_buffers, tmp_path / "broken")
    assert hashes(tmp_path / "broken") == hashes(tmp_path / "whole")
    loaded = manyheads.load(tmp_path / "whole")
    buffers = buffers_of(loaded)
    assert {int(buffer) for name, buffer in buffers.items() if name.endswith("steps")} == {12}, "two batches a step"
    assert all(float(buffer) != 1 for name, buffer in buffers.items() if name.endswith("mean"))
    assert all(buffer[-1] == 1 for name, buffer in buffers.items() if name.endswith("offset"))
    assert manyheads.predict(loaded, "a b")["text"] == "a b"
    manyheads.export(tmp_path / "whole", tmp_path / "exported", to="manyheads")
    again = manyheads.load(tmp_path / "exported", dtype=torch.float64)
    for name, buffer in buffers_of(again).items():
        assert buffer.dtype is (torch.int64 if name.endswith("steps") else torch.float64)
        torch.testing.assert_close(buffer, buffers[name].to(buffer.dtype), rtol=0, atol=1e-7)
    assert parameter_count(tmp_path / "whole") == sum(weight.numel() for weight in loaded.model.parameters())
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(again.logits(ids).float(), loaded.logits(ids))


@pytest.mark.parametrize("more", [{}, {"lora": {"rank": 2}}], ids=["whole", "lora"])
def test_a_run_starts_from_the_buffers_of_its_checkpoint(more, with_buffers, tmp_path):
    train_all(with_buffers, tmp_path / "first")
    tree = {name: value for name, value in with_buffers.items() if name != "model"}
    tree |= {"init_from": str(tmp_path / "first")} | more
    train_all(tree, tmp_path / "whole")
    stop_after(tree, tmp_path / "broken", 3)
    train_all(tree, tmp_path / "broken")
    assert hashes(tmp_path / "broken") == hashes(tmp_path / "whole")
    buffers = buffers_of(manyheads.load(tmp_path / "whole"))
    assert {int(buffer) for name, buffer in buffers.items() if name.endswith("steps")} == {24}


# ---------------------------------------------------------------------------------------------------------- from Python


def test_train_does_what_the_command_does_and_returns_plain_data(run_file, tmp_path):
    events = []
    report = manyheads.train(run_file, tmp_path / "python", overrides=["train.steps=4"], progress=events.append)
    command = run_json("train", run_file, "--output", tmp_path / "command", "-s", "train.steps=4")
    assert hashes(tmp_path / "python") == hashes(tmp_path / "command")
    assert report == command | {"folder": str(tmp_path / "python")}
    assert [event.step for event in events if isinstance(event, Step)] == [1, 2, 3, 4]
    assert report["metrics"] == last_metrics(events)
    assert json.loads(json.dumps(report)) == report


def test_train_takes_a_path_a_tree_and_a_spec_also_in_a_thread(run_file, tmp_path):
    """Only the main thread can catch signals: a notebook or a server trains in another one."""
    tree = read_toml(run_file)
    runs = {"path": str(run_file), "tree": tree, "spec": read_run(tree)}
    with ThreadPoolExecutor(1) as pool:
        for name, item in runs.items():
            report = pool.submit(manyheads.train, item, str(tmp_path / name), overrides=["train.steps=2"]).result()
            assert (report["step"], report["reason"]) == (2, "steps")
            assert hashes(tmp_path / name) == hashes(tmp_path / "path")
    events = list(manyheads.train_events(runs["spec"].replace(train={"steps": 2}), tmp_path / "events"))
    assert isinstance(events[0], Prepared)
    assert end_of(events) == (2, "steps")
