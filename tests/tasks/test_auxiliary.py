"""Auxiliary losses: every term is the mean of its formula, however the batch is split and padded, and can be learned."""

from __future__ import annotations

import json
from dataclasses import replace

import kinds
import numpy as np
import pytest
import torch
from command import error_of
from command import run as command
from raising import raises
from small_runs import TASKS, described
from trees import SHE, conllu
from trivial_losses import mean_of

import manyheads
from manyheads import Inputs
from manyheads.data.source import Corpus, DataSpec
from manyheads.model.recording import record
from manyheads.spec import override, to_toml
from manyheads.tasks.auxiliary import (
    add_attention_targets,
    attention_records,
    auxiliary_counts,
    loss_with_auxiliary,
    total_loss,
)
from manyheads.tasks.batch import Batch
from manyheads.training.batches import BatchStream
from manyheads.training.events import Evaluated, Step
from manyheads.training.loop import train_events, train_step
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run

FOCUS, NEAR = {"kind": "focus", "weight": 0.5}, {"kind": "near", "where": "all", "max_cost": 20.0, "weight": 0.02}


def shaped_run(name, *auxiliary_losses, **train):
    return read_run(described(name, **train) | {"auxiliary_losses": list(auxiliary_losses)})


def to_double(batch):
    """Images as precise as the model."""
    inputs = {name: getattr(batch, name) for name in ("inputs", "source")}
    images = {name: item for name, item in inputs.items() if item is not None and item.tokens.is_floating_point()}
    return replace(batch, **{name: replace(image, tokens=image.tokens.double()) for name, image in images.items()})


def double_model(run):
    return manyheads.build(run.model_spec).double().eval()


def real_positions(inputs):
    none = torch.zeros(inputs.tokens.shape[:2], dtype=torch.bool)
    return ~(none if inputs.padding_mask is None else inputs.padding_mask)


def by_the_matrix(attention):
    """Entropy and mean squared distance of the weights, by their formulas."""
    weights, positions = attention.weights(), attention.positions
    entropy = -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)
    squared = (positions.key[:, None, :] - positions.query[:, :, None]).square()
    return entropy, (weights * squared[:, None]).sum(-1)


# ---------------------------------------------------------------------------------------------------- focus and near


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("shaped", "packed")])
def test_terms_are_means_over_heads_real_positions_and_layers(name):
    run = prepare(shaped_run(name, FOCUS, NEAR))
    model, batch = double_model(run), to_double(BatchStream(run).next())
    with torch.no_grad():
        for weight in model.parameters():  # otherwise all weights are alike, and a bound of each is one of their mean
            weight.mul_(6 if weight.dim() > 1 else 1)
    loss = loss_with_auxiliary(run.spec.task, run.spec.auxiliary_losses, model, batch)
    entropies, distances = [], []
    with record(model) as attentions:
        run.spec.task.loss(model, batch)
    for i, attention in enumerate(attentions):
        of_source = attention.name.startswith("encoder.") and batch.source is not None
        real = real_positions(batch.source if of_source else batch.inputs)
        real = real[:, i : i + 1] if name == "recurrent" else real
        entropy, distance = by_the_matrix(attention)
        entropies.append(entropy.transpose(1, 2)[real].flatten())
        distances.append(distance.transpose(1, 2)[real].flatten().clamp(max=20.0))
    assert mean_of(loss.auxiliary_losses["focus"]) == pytest.approx(
        float(torch.cat(entropies).mean().detach()), abs=1e-10
    )
    assert mean_of(loss.auxiliary_losses["near"]) == pytest.approx(
        float(torch.cat(distances).mean().detach()), abs=1e-10
    )
    assert loss.auxiliary_losses["focus"].count == torch.cat(entropies).numel()


def terms_and_gradients(model, run, batches):
    """Of the terms alone: the task's own loss is computed in float32."""
    model.zero_grad()
    counts, losses = auxiliary_counts(run.spec.auxiliary_losses, model, batches), []
    for batch in batches:
        loss = loss_with_auxiliary(run.spec.task, run.spec.auxiliary_losses, model, batch)
        losses.append(total_loss(replace(loss, sum=torch.zeros(())), 1, run.spec.auxiliary_losses, counts))
    sum(losses).backward()
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for parameter in model.parameters()
    ]
    return float(sum(losses).detach()), gradients


@pytest.mark.parametrize("reduction", ["mean", "batchmean"])
@pytest.mark.parametrize("name", ["seq2seq", "recurrent", "causal"])
def test_four_batches_give_what_one_gives_and_padding_changes_nothing(name, reduction):
    run = prepare(shaped_run(name, FOCUS | {"reduction": reduction}, NEAR | {"reduction": reduction}))
    task, model = run.spec.task, double_model(run)
    rows = sorted(
        (run.train_dataset[i] for i in range(16)), key=lambda row: len(row[0])
    )  # batches of different lengths
    parts = [task.batch(rows[i : i + 4], run.special_tokens, np.random.default_rng(0)) for i in range(0, 16, 4)]
    whole = task.batch(rows, run.special_tokens, np.random.default_rng(0))
    assert whole.inputs.padding_mask is not None
    one, other = (terms_and_gradients(model, run, batches) for batches in (parts, [whole]))
    assert one[0] == pytest.approx(other[0], abs=1e-10)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["seq2seq", "recurrent", "masked"])
def test_a_term_of_weight_zero_is_logged_and_changes_no_bit(name):
    results = []
    for auxiliary_losses in ((), (FOCUS | {"weight": 0.0}, NEAR | {"weight": 0.0})):
        run = prepare(shaped_run(name, *auxiliary_losses))
        model = manyheads.build(run.model_spec, seed=1)
        optimizer, stream = run.spec.optim.build(model), BatchStream(run)
        steps = [train_step(model, optimizer, stream, run, stream.state) for _ in (1, 2)]
        results.append((steps, [parameter.detach().clone() for parameter in model.parameters()]))
    (plain, plain_weights), (logged, logged_weights) = results
    assert all(torch.equal(weight, other) for weight, other in zip(plain_weights, logged_weights, strict=True))
    assert [step.loss for step in plain] == [step.loss for step in logged]
    assert plain[0].auxiliary_losses == {}
    assert set(logged[0].auxiliary_losses) == {"focus", "near"}
    assert all(value > 0 for step in logged for value in step.auxiliary_losses.values())


def test_selected_layers_heads_and_stacks_are_those_alone():
    tree = described("seq2seq")
    tree["model"] = tree["model"] | {"encoder": tree["model"]["encoder"] | {"layers": 3}}
    selected = {"kind": "focus", "where": "self", "stack": "encoder", "layers": [0, 2], "heads": [1]}
    run = prepare(read_run(tree | {"auxiliary_losses": [selected, FOCUS]}))
    model, batch = double_model(run), BatchStream(run).next()
    loss = loss_with_auxiliary(run.spec.task, run.spec.auxiliary_losses, model, batch)
    with record(model) as attentions:
        run.spec.task.loss(model, batch)
    real = real_positions(batch.source)
    expected = torch.stack([attentions[i].entropy[:, 1][real].sum() for i in (0, 2)]).sum()
    assert list(loss.auxiliary_losses) == ["focus-1", "focus-2"]
    torch.testing.assert_close(loss.auxiliary_losses["focus-1"].sum, expected)
    assert loss.auxiliary_losses["focus-1"].count == 2 * int(real.sum())


def test_layers_that_share_weights_are_different():
    stack = kinds.stack(layers=4, layer_groups=2, position="sinusoidal")
    spec = manyheads.read_model({"vocab": 23, "encoder": stack, "head": "masked"})
    model, ids = kinds.random_model(spec), kinds.tokens()
    with record(model) as attentions:
        model(ids)
    records = attention_records(model.spec, attentions, Batch(Inputs(ids), ids))
    assert [item.layer.index for item in records] == [0, 1, 2, 3]


WRONG = {
    '{kind = "focus", layers = [1]}': ("config.out-of-range", "auxiliary_losses.0.layers", 1, 0),
    '{kind = "focus", heads = [0, 2]}': ("config.out-of-range", "auxiliary_losses.0.heads", 2, 1),
    '{kind = "focus", heads = [0, 0]}': ("config.invalid", "auxiliary_losses.0.heads"),
    '{kind = "near", where = "cross"}': ("config.incompatible", "auxiliary_losses.0", "cross-attention"),
    '{kind = "focus", stack = "encoder"}': ("config.incompatible", "auxiliary_losses.0", "encoder"),
    '{kind = "near", max_cost = 0}': ("config.out-of-range", "auxiliary_losses.0.max_cost", 0, "1e-30"),
    '{kind = "guided", by = "arcs", where = "cross"}': (
        "config.incompatible",
        "auxiliary_losses.0.where",
        "self-attention",
    ),
    '{kind = "blur"}': ("config.unknown-kind", "auxiliary_losses.0", "blur"),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit_is_refused_with_its_path(text):
    import tomllib

    code, path, *values = WRONG[text]
    with raises(code, *values) as caught:
        read_run(described("causal") | {"auxiliary_losses": [tomllib.loads(f"x = {text}")["x"]]})
    assert ".".join(map(str, caught.value.path)) == path


def test_a_model_without_attention_cannot_be_shaped():
    tree = described("causal") | {"model": {"vocab": "tokenizer", "ngram": {"width": 8}}, "auxiliary_losses": [FOCUS]}
    with raises("config.incompatible", "auxiliary_losses.0", "focus"):
        read_run(tree)


def test_terms_are_in_the_events_the_file_and_the_progress(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(described("causal", steps=3) | {"auxiliary_losses": [FOCUS, NEAR]}))
    done = command("train", path, "--output", tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert steps
    assert all(set(line["auxiliary_losses"]) == {"focus", "near"} for line in steps)
    assert "focus" in done.stderr
    assert "near" in done.stderr
    changed = ["train", path, "--output", tmp_path / "run", "-s", "auxiliary_losses.0.weight=0.7"]
    assert error_of(*changed, check=2)["code"] == "run.changed"
    assert "auxiliary_losses" in command(*changed, check=2).stderr


def minimize(run, batch, steps=40):
    """The only term before and after some steps on it alone."""
    model, values = manyheads.build(run.model_spec).train(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(steps):
        (term,) = loss_with_auxiliary(run.spec.task, run.spec.auxiliary_losses, model, batch).auxiliary_losses.values()
        optimizer.zero_grad()
        (term.sum / term.count).backward()
        optimizer.step()
        values.append(mean_of(term))
    return values[0], values[-1]


@pytest.mark.parametrize("term", [FOCUS, NEAR | {"max_cost": 1000.0}], ids=lambda term: term["kind"])
def test_a_term_can_be_learned(term):
    run = prepare(shaped_run("causal", term))
    first, last = minimize(run, BatchStream(run).next())
    assert last < 0.5 * first


# --------------------------------------------------------------------------------------------------- guided attention


class AlignedSpec(DataSpec, kind="test-aligned"):
    """Words, the same words in reverse, and their alignment"""

    def load(self):
        def row(i):
            words = np.random.default_rng(i).choice(list("abcdefgh"), size=4 + i % 3).tolist()
            alignment = " ".join(f"{j}-{len(words) - 1 - j}" for j in range(len(words)))
            return " ".join(words), " ".join(reversed(words)), alignment

        rows = [row(i) for i in range(220)]
        return Corpus(("source", "target", "alignment"), rows[20:], rows[:20], [], "words in reverse")


class TreesSpec(DataSpec, kind="test-trees"):
    """Sentences with a parse"""

    def load(self):
        rows = [
            ("I prefer the morning flight", (1, -1, 4, 4, 1), ("nsubj", "root", "det", "nmod", "dobj")),
            ("birds sing", (1, -1), ("nsubj", "root")),
        ]
        return Corpus(("text", "arcs", "relations"), rows * 30, rows, [], "two sentences")


def guided_run(name, data, *auxiliary_losses, **train):
    return read_run(described(name, **train) | {"data": {"kind": data}, "auxiliary_losses": list(auxiliary_losses)})


def linked_batch(run, rows):
    """The batch of some training rows, with their links."""
    task = run.spec.task
    batch = task.batch([run.train_dataset[i] for i in rows], run.special_tokens, np.random.default_rng(0))
    return add_attention_targets(
        batch,
        task,
        run.special_tokens,
        {name: [links[i] for i in rows] for name, links in run.attention_targets.items()},
    )


def guided_term(run, model, batch):
    """The guided term, and the attentions of the same pass."""
    term = loss_with_auxiliary(run.spec.task, run.spec.auxiliary_losses, model, batch).auxiliary_losses["guided"]
    with record(model) as attentions:
        run.spec.task.loss(model, batch)
    return term, attentions


@pytest.mark.parametrize("name", ["seq2seq", "recurrent"])
def test_guided_attention_is_the_cross_entropy_of_the_alignment(name):
    run = prepare(guided_run(name, "test-aligned", {"kind": "guided", "weight": 1.0}))
    batch = BatchStream(run).next()
    term, attentions = guided_term(run, double_model(run), batch)
    cross = [attention.weights() for attention in attentions if not attention.name.endswith("attention")]
    alpha = torch.cat(cross, dim=2) if name == "recurrent" else cross[0]
    costs = []
    for row, (source, targets) in enumerate(zip(batch.source.tokens, batch.targets, strict=True)):
        count = int((targets >= 5).sum())  # words, without </s>
        for t in range(count):
            assert targets[t] == source[count - 1 - t], "a generated word attends to the word it is aligned with"
            costs.append(-alpha[row, :, t, count - 1 - t].log())
    torch.testing.assert_close(term.sum, torch.cat(costs).sum(), rtol=1e-10, atol=1e-10)
    assert term.count == torch.cat(costs).numel()


@pytest.mark.parametrize("window", [None, 2, 3])
@pytest.mark.parametrize("name", ["causal", "masked"])
def test_a_row_whose_target_is_masked_is_not_in_the_loss(name, window):
    guided = {"kind": "guided", "by": "arcs", "heads": [1]}
    tree = described(name) | {"data": {"kind": "test-trees"}, "auxiliary_losses": [guided]}
    stack = "decoder" if name == "causal" else "encoder"
    run = prepare(read_run(tree if window is None else override(tree, [f"model.{stack}.mask.window={window}"])))
    term, attentions = guided_term(run, double_model(run), linked_batch(run, [0]))
    heads = [1, 1, 4, 4, 1]  # of each word; the root is its own
    limit = window or len(heads)
    cells = [  # after <s>
        (i + 1, j + 1) for i, j in enumerate(heads) if (name == "masked" or j <= i) and abs(i - j) < limit
    ]
    assert term.count == len(cells)
    expected = -sum(attentions[0].weights()[0, 1, i, j].log() for i, j in cells)
    torch.testing.assert_close(term.sum, expected, rtol=1e-10, atol=1e-10)


def test_guided_losses_with_different_targets_keep_them_apart(tmp_path):
    """Also a relation that is called "any", which is not the same as no relation."""
    sentences = [[("1", f"bird{letter}", "2", "any"), ("2", "sings", "0", "null")] for letter in "abcdefghijklmnopqrst"]
    (tmp_path / "t.conllu").write_text(conllu(*sentences))
    terms = [
        {"kind": "guided", "by": "arcs"} | more
        for more in ({}, {"relation": "any"}, {"relation": "null"}, {"toward": "dependents"})
    ]
    tree = described("masked") | {"data": {"kind": "conllu", "path": str(tmp_path / "t.conllu")}}
    run = prepare(read_run(tree | {"auxiliary_losses": terms}))
    assert [spec.name for spec in run.spec.auxiliary_losses] == list(run.attention_targets)
    assert len({str([pairs.tolist() for pairs in rows]) for rows in run.attention_targets.values()}) == len(terms)


def test_a_relation_of_a_treebank_guides_its_own_arcs(tmp_path):
    others = [[("1", f"bird{letter}", "2", "nsubj"), ("2", "sings", "0", "root")] for letter in "abcdefghijklmnopqrst"]
    (tmp_path / "t.conllu").write_text(conllu(SHE, *others))
    tree = described("masked") | {"data": {"kind": "conllu", "path": str(tmp_path / "t.conllu")}}
    guided = {"kind": "guided", "by": "arcs", "relation": "nsubj"}
    run = prepare(read_run(tree | {"auxiliary_losses": [guided]}))
    (links,) = run.attention_targets.values()
    for row, pairs in zip(run.corpus.train, links, strict=True):
        assert pairs.tolist() == [[row[2].index("nsubj"), row[1][row[2].index("nsubj")]]]
    events = list(train_events(run, tmp_path / "run"))
    terms = [event.auxiliary_losses["guided"] for event in events if isinstance(event, Step)]
    assert terms
    assert all(np.isfinite(term) and term > 0 for term in terms)
    with raises("data.invalid", "nsbj", "nsubj"):
        prepare(read_run(tree | {"auxiliary_losses": [guided | {"relation": "nsbj"}]}))


@pytest.mark.parametrize(
    "auxiliary_losses",
    [{"kind": "guided", "by": "arcs"}, {"kind": "focus"}, {"kind": "near"}],
    ids=lambda item: item["kind"],
)
@pytest.mark.parametrize("name", ["causal", "masked"])
def test_packed_texts_are_not_shaped(name, auxiliary_losses):
    """A link is between positions of its own text, which are not those of a row that texts share."""
    guided_run(name, "test-trees", auxiliary_losses)
    guided_run(name, "test-trees", pack=16)
    with raises("config.incompatible", "train.pack", name):
        guided_run(name, "test-trees", auxiliary_losses, pack=16)


def test_the_tokens_of_a_target_word_share_the_weight_and_its_row_counts_once():
    tree = described("masked") | {
        "data": {"kind": "test-trees"},
        "tokenizer": {"kind": "bytes"},
        "auxiliary_losses": [{"kind": "guided", "by": "arcs"}],
    }
    run = prepare(read_run(tree))
    term, attentions = guided_term(run, double_model(run), linked_batch(run, [1]))
    rows = [*range(1, 6), *range(7, 11)]  # "birds" and "sing", after <s>, without the space
    alpha = attentions[0].weights()[0]
    expected = -sum(alpha[:, i, j].log().sum() / 4 for i in rows for j in range(7, 11))
    torch.testing.assert_close(term.sum, expected, rtol=1e-10, atol=1e-10)
    assert term.count == 2 * len(rows)


def test_accumulated_guidance_is_that_of_one_batch():
    run = prepare(guided_run("seq2seq", "test-aligned", {"kind": "guided", "weight": 2.0}))
    model = double_model(run)
    rows = sorted(range(16), key=lambda i: len(run.train_dataset[i][0]))
    parts = [linked_batch(run, rows[i : i + 4]) for i in range(0, 16, 4)]
    one, other = (terms_and_gradients(model, run, batches) for batches in (parts, [linked_batch(run, rows)]))
    assert one[0] == pytest.approx(other[0], abs=1e-10)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-9)


def test_guided_attention_learns_its_targets():
    run = prepare(guided_run("seq2seq", "test-aligned", {"kind": "guided", "heads": [0]}, batch_tokens=100))
    first, last = minimize(run, BatchStream(run).next(), steps=80)
    assert first > 1.2, "uniform attention costs about ln 5"
    assert last < 0.3


def test_pairs_with_a_third_column_have_an_alignment(tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"a{i} b\tb a{i}\t0-1 1-0\n" for i in range(40)))
    data = {"kind": "pairs", "path": str(tmp_path / "pairs.tsv"), "columns": ["source", "target", "alignment"]}
    corpus = DataSpec.from_config(data).load()
    assert corpus.fields == ("source", "target", "alignment")
    assert corpus.train[0][2] == "0-1 1-0"
    assert DataSpec.from_config(data | {"columns": ["source", "target"]}).load().fields == ("source", "target")
    tree = described("seq2seq") | {"data": data, "auxiliary_losses": [{"kind": "guided"}]}
    events = list(train_events(prepare(read_run(tree)), tmp_path / "run"))
    assert all(np.isfinite(event.auxiliary_losses["guided"]) for event in events if isinstance(event, Step))
    assert any(isinstance(event, Evaluated) for event in events)
    with raises("config.incompatible", "auxiliary_losses.0", "alignment"):
        prepare(read_run(tree | {"data": data | {"columns": ["source", "target"]}}))
    with raises("config.incompatible", "auxiliary_losses.0.by", "arcs", "seq2seq"):
        read_run(tree | {"auxiliary_losses": [{"kind": "guided", "by": "arcs"}]})
