"""Batches: every row once per epoch, within the token limit, the same in evaluations for every seed, exactly packed."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from small_runs import STACK, TASKS, described

import manyheads
from manyheads.errors import ConfigError
from manyheads.tasks.batch import IGNORE_INDEX
from manyheads.tasks.seq2seq import Seq2SeqSpec
from manyheads.training.batches import BatchLoader, BatchStream, row_lengths
from manyheads.training.estimate import batch_positions
from manyheads.training.loop import validate
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run


def batches(loader):
    return [*loader]


def test_every_row_is_in_one_batch_per_epoch():
    run = prepare(read_run(described("seq2seq")))
    stream = BatchStream(run)
    first = stream.loader().batches
    assert sorted(np.concatenate(first).tolist()) == list(range(len(run.train_dataset)))
    stream.state.epoch = 1
    assert [list(batch) for batch in stream.loader().batches] != [list(tensor) for tensor in first]


@pytest.mark.parametrize("template", [None, ((1,), (2,))])
@pytest.mark.parametrize("name", TASKS)
def test_no_batch_has_more_than_batch_tokens(name, template):
    """With padding, special tokens and targets."""
    run = prepare(read_run(described(name)))
    if run.tokenizer is not None:
        run = replace(run, special_tokens=replace(run.special_tokens, prefix_suffix_ids=template))
    longest = int(row_lengths(run, run.validation_dataset).sum(1).max())  # an evaluated row may be longer than a batch
    for loader, limit in (
        (BatchLoader(run, run.train_dataset), 200),
        (BatchLoader(run, run.validation_dataset, max_rows=50), max(200, longest)),
    ):
        sizes = [batch_positions(batch) for batch in batches(loader)]
        assert max(sizes) <= limit
        assert np.mean(sizes) > 0.5 * limit  # and batches are not mostly empty


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_moves_to_a_device_with_all_its_tensors(name):
    batch = BatchStream(prepare(read_run(described(name)))).next().to(torch.device("meta"))
    inputs = [value for item in (batch.inputs, batch.source) if item is not None for value in vars(item).values()]
    tensors = [value for value in (batch.targets, *inputs) if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


# ---------------------------------------------------------------------------------------------------------- evaluations


def test_an_evaluation_has_every_class_of_a_sorted_file_and_the_same_rows_for_every_seed(tmp_path):
    for name, count in (("train", 100), ("validation", 1000)):
        lines = (f"{kind} text {i}\t{kind}\n" for kind in ("bad", "fair", "good", "great") for i in range(count // 4))
        (tmp_path / f"{name}.tsv").write_text("".join(lines))
    data = {"kind": "labels", "path": str(tmp_path / "train.tsv"), "validation": str(tmp_path / "validation.tsv")}
    model = {"vocab": "tokenizer", "encoder": STACK, "head": {"kind": "classes", "classes": 4, "pool": "mean"}}
    evaluated = []
    for seed in (1, 2):
        tree = described("classify", eval_rows=100) | {"model": model, "data": data, "seed": seed}
        run = prepare(read_run(tree))
        loader = BatchLoader(run, run.validation_dataset, max_rows=100)
        evaluated.append(sorted(row for i in range(len(loader)) for row in loader.row_indices(i)))
        assert len(set(evaluated[-1])) == 100
        assert np.bincount(np.array(evaluated[-1]) // 250, minlength=4).min() > 15
    assert evaluated[0] == evaluated[1]


@torch.no_grad()
def test_the_validation_loss_is_that_of_the_tokens_whatever_the_label_smoothing():
    """So that runs with and without smoothing are comparable, and exp(loss) is a perplexity."""
    losses, tree = [], described("seq2seq")
    for smoothing in (0.0, 0.3):
        run = prepare(read_run(tree | {"task": {"kind": "seq2seq", "label_smoothing": smoothing}}))
        model = manyheads.build(run.model_spec, seed=1)
        losses.append(validate(model, run)["loss"])
    assert losses[0] == losses[1]
    logs = []
    for batch in batches(BatchLoader(run, run.validation_dataset, max_rows=run.spec.train.eval_rows)):
        mask = batch.targets != IGNORE_INDEX
        logs.append(model(batch.inputs, batch.source)[mask].log_softmax(-1).gather(1, batch.targets[mask][:, None]))
    assert losses[1] == pytest.approx(-float(torch.cat(logs).mean()), rel=1e-5)


@pytest.mark.parametrize("name", ["seq2seq", "masked", "packed", "retrieval"])
def test_runs_with_other_seeds_are_evaluated_on_the_same_batches(name):
    found = []
    for seed in (5, 6):
        run = prepare(read_run(described(name, eval_rows=30) | {"seed": seed}))
        loader = BatchLoader(run, run.validation_dataset, max_rows=30)
        found.append([(batch.inputs.tokens.tolist(), batch.targets.tolist()) for batch in batches(loader)])
    assert found[0] == found[1]


class RecordingTask(Seq2SeqSpec, kind="test-recording"):
    """Remembers the rows whose loss is computed, and those for which it should generate."""

    scored: ClassVar[list] = []
    generated: ClassVar[list] = []

    def batch(self, rows, tokens, rng):
        self.scored.extend(rows)
        return super().batch(rows, tokens, rng)

    def generate_targets(self, checkpoint, rows, tokens):
        self.generated.extend(rows)
        return [([], []) for _ in rows]


def test_targets_are_generated_for_the_rows_whose_loss_is_computed():
    run = prepare(read_run(described("seq2seq", eval_rows=30) | {"task": "test-recording"}))
    validate(manyheads.build(run.model_spec), run)
    scored, generated = (
        sorted([ids.tolist() for ids in row] for row in rows)
        for rows in (RecordingTask.scored, RecordingTask.generated)
    )
    assert scored == generated
    assert len(scored) == 30 < len(run.validation_dataset)


# ------------------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("name", ["causal", "masked"])
def test_packed_texts_have_the_loss_and_gradients_of_texts_in_rows_of_their_own(name):
    run = prepare(read_run(described(name, pack=160, batch_tokens=800)))
    task, model = run.spec.task, manyheads.build(run.model_spec, seed=1).double().eval()
    loader = BatchLoader(run, run.train_dataset)
    whole = [
        row for row in loader.batches[0] if all(stop - start == loader.lengths[i, 0] for i, start, stop in row.tolist())
    ]
    assert len(whole) > 1
    assert max(map(len, whole)) > 1
    loader.batches = [whole]
    packed = loader[0]
    rows = [run.train_dataset[int(i)] for row in whole for i, _, _ in row]
    alone = task.batch(rows, run.special_tokens, np.random.default_rng([run.spec.seed, 0, 0]))
    assert packed.inputs.batch_size < alone.inputs.batch_size
    results = []
    for batch in (packed, alone):
        model.zero_grad()
        loss = task.loss(model, batch)
        loss.sum.backward()
        results.append((loss, [parameter.grad.clone() for parameter in model.parameters()]))
    (one, gradients), (other, expected) = results
    assert (one.count, one.correct) == (other.count, other.correct)
    torch.testing.assert_close(one.sum, other.sum, atol=1e-9, rtol=1e-12)
    torch.testing.assert_close(gradients, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["causal", "masked"])
@pytest.mark.parametrize("pack", [7, 64])
def test_every_token_is_in_one_slice_and_special_tokens_only_at_the_ends_of_a_text(name, pack):
    run = prepare(read_run(described(name, pack=pack, batch_tokens=pack * 3)))
    task, tokens, chunks = run.spec.task, run.special_tokens, {}
    for row in (row for rows in BatchLoader(run, run.train_dataset, epoch=1).batches for row in rows):
        assert sum(stop - start for _, start, stop in row) <= pack
        for i, start, stop in row.tolist():
            batch = task.batch_chunks(
                [task.chunk(run.train_dataset[i][0], start, stop)], tokens, np.random.default_rng(0)
            )
            chunks.setdefault(i, []).append((start, batch.inputs.tokens[0].tolist(), batch.targets[0].tolist()))
    assert sorted(chunks) == list(range(len(run.train_dataset)))
    for i, parts in chunks.items():
        text = run.train_dataset[i][0].tolist()
        inputs = [token for _, ids, _ in sorted(parts) for token in ids]
        if name == "causal":
            assert inputs == [tokens.bos, *text]
            assert [token for *_, targets in sorted(parts) for token in targets] == [*text, tokens.eos]
        else:
            assert (inputs[0], inputs[-1], len(inputs)) == (tokens.bos, tokens.eos, len(text) + 2)


def test_packing_leaves_little_padding():
    run = prepare(read_run(described("causal", pack=256, batch_tokens=1024)))
    packed = batches(BatchLoader(run, run.train_dataset))
    tokens, positions = sum(batch.num_tokens for batch in packed), sum(batch.inputs.tokens.numel() for batch in packed)
    assert 1 - tokens / positions < 0.1


@pytest.mark.parametrize(
    ("name", "settings", "model", "path"),
    [
        ("seq2seq", {"pack": 64}, None, ("train", "pack")),
        ("spans", {"pack": 64}, None, ("train", "pack")),
        ("causal", {"pack": 300}, None, ("train", "pack")),
        ("causal", {"pack": 64}, {"recurrent": {"width": 16, "attention": False}}, ("train", "pack")),
        ("packed", {"max_length": 10}, None, ("train", "max_length")),
    ],
)
def test_what_does_not_go_with_packing_is_refused(name, settings, model, path):
    tree = described(name, **settings) | ({"model": {"vocab": "tokenizer"} | model} if model else {})
    with pytest.raises(ConfigError) as error:
        read_run(tree)
    assert error.value.code == "config.incompatible"
    assert error.value.path == path
