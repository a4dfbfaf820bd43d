"""Claims H (objectives), J (loss shaping), K (temperature) and O (tasks) of the source documents; every test is named for its row.

Tolerances: float64 1e-10, float32 1e-5, unless the row says otherwise.
"""

from __future__ import annotations

import json
from itertools import pairwise

import kinds
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kinds import LENGTH, choices, kind_id, random_model, tokens
from small_attention import make_mask, positions, seeds
from small_runs import train_and_evaluate
from torch.utils._python_dispatch import TorchDispatchMode
from trivial_losses import mean_of, unigram_entropy

from manyheads import Checkpoint, Inputs, read_model
from manyheads.data.builtin import BiographiesSpec, functions_of, stdlib
from manyheads.labs.chapters.temperature_loops import find_loop, ngram_successor
from manyheads.model.recording import RecordedAttention
from manyheads.parts.core import DotSpec
from manyheads.parts.mask import MaskSpec
from manyheads.tasks.auxiliary import (
    AttentionLayer,
    AuxiliaryLossSpec,
    RecordedQueries,
    loss_with_auxiliary,
)
from manyheads.tasks.batch import IGNORE_INDEX, Batch, SpecialTokens
from manyheads.tasks.images import MaeSpec
from manyheads.tasks.language import CausalSpec, MaskedSpec
from manyheads.training.evaluator import evaluate
from manyheads.training.loop import train_events
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run

# --------------------------------------------------------------------------------------------------- H: objectives

TEXTS = st.lists(
    st.lists(st.integers(5, kinds.VOCAB - 1), min_size=1, max_size=12).map(np.array), min_size=1, max_size=4
)


@given(texts=TEXTS, seed=seeds)
def test_h1_targets_are_the_inputs_shifted_and_no_position_sees_its_target(texts, seed):
    special = SpecialTokens(vocab_size=kinds.VOCAB)
    batch = CausalSpec().batch([(text,) for text in texts], special, np.random.default_rng(seed))
    ids, targets = batch.inputs.tokens, batch.targets
    mask = targets != IGNORE_INDEX
    for row, text in enumerate(texts):
        assert targets[row, mask[row]].tolist() == [*text.tolist(), special.eos]
        assert ids[row, mask[row]].tolist() == [special.bos, *text.tolist()]
    assert torch.equal(ids[:, 1:][mask[:, 1:]], targets[:, :-1][mask[:, 1:]])
    model, index = random_model(kinds.decoder(position="sinusoidal")), seed % ids.shape[1]
    changed = ids.clone()
    changed[:, index] = (changed[:, index] + 1) % kinds.VOCAB
    with torch.no_grad():  # the target of a position is the next token
        torch.testing.assert_close(model(changed)[:, :index], model(ids)[:, :index], rtol=0, atol=1e-10)


WITH_POSITIONS = [position for position in choices("position") if position["kind"] != "none"]


@pytest.mark.parametrize("position", WITH_POSITIONS, ids=kind_id)
@torch.no_grad()
def test_h2_h3_masked_tokens_differ_by_their_positions_alone(position):
    model, mask_id = random_model(kinds.encoder(position=position)), SpecialTokens().mask
    text = torch.tensor([[6, 7, mask_id, 9, 10, mask_id, 12, mask_id]])
    masked = text[0] == mask_id
    outputs = model(Inputs(text))[0, masked]
    assert (torch.pdist(outputs) > 1e-3).all()
    without = torch.arange(8)[None].masked_fill(masked[None], 0)
    outputs = model(Inputs(text, positions=without))[0, masked]
    assert (outputs - outputs[:1]).abs().max() <= 1e-6


@torch.no_grad()
def test_h2_masked_language_modeling_masks_tokens_and_no_positions():
    text, special = np.arange(5, 5 + 18), SpecialTokens(vocab_size=23)
    batch = MaskedSpec(mlm_probability=0.5, mask_replace_prob=1.0, random_replace_prob=0.0).batch(
        [(text,)], special, np.random.default_rng(0)
    )
    ids = batch.inputs.tokens[0, 1:-1].numpy()
    masked = ids == special.mask
    assert 2 < masked.sum() < 16
    assert (ids[~masked] == text[~masked]).all()
    assert (batch.targets[0, 1:-1].numpy() == np.where(masked, text, IGNORE_INDEX)).all()
    assert batch.inputs.positions is None, "positions are counted, with and without masks"


@torch.no_grad()
def test_h2_h3_masked_patches_differ_by_their_positions_alone():
    stack = kinds.stack(embed={"kind": "patches", "pixels": 4, "channels": 1}, position="sinusoidal")
    head, init = {"kind": "pixels", "pixels": 4}, {"kind": "normal", "std": 0.3}
    image = np.random.default_rng(1).random((16, 4))
    outputs = {}
    for position in ("sinusoidal", "none"):
        decoder = kinds.stack(embed="mask-tokens", mask={"causal": False}, position=position)
        model = random_model(read_model({"encoder": stack, "decoder": decoder, "head": head, "init": init}))
        batch = MaeSpec().batch([(image,)], SpecialTokens(), np.random.default_rng(2))
        outputs[position] = model(batch.inputs, batch.source)[batch.targets != IGNORE_INDEX]
    assert (torch.pdist(outputs["sinusoidal"]) > 1e-3).all()
    assert torch.pdist(outputs["none"]).max() <= 1e-6


def test_h5_pretraining_needs_one_plain_text_file(tmp_path):
    """No labels: the loss falls below the unigram entropy in a few seconds."""
    path = tmp_path / "novel.txt"
    path.write_text("\n\n".join(text for (text,) in BiographiesSpec(people=60).load().train))
    embed = {"kind": "tokens", "scale": True}
    stack = kinds.stack(layers=1, width=32, position="sinusoidal", residual="pre", embed=embed)
    model = {"vocab": "tokenizer", "decoder": stack, "init": "xavier"}
    tree = {"model": model, "data": {"kind": "text", "path": str(path)}, "task": "causal"}
    run, metrics = train_and_evaluate(tree, tmp_path / "run")
    assert metrics["loss"] < unigram_entropy(run)


# -------------------------------------------------------------------------------------------------- K: temperature


@given(vocab=st.integers(2, 7), seed=seeds, end=st.booleans())
def test_k6_zero_temperature_loops(vocab, seed, end):
    """A trigram model decides by the last two tokens, of which there are V² pairs; a text that ended stays as it is."""
    model = random_model(
        read_model({"vocab": vocab, "ngram": {"width": 4}, "head": "untied", "init": {"kind": "normal", "std": 1.0}}),
        seed=seed % 1000,
    )
    start, eos = (1, vocab - 1), (0,) if end else ()
    loop = find_loop(ngram_successor(model, eos), start)
    assert loop.prefix + loop.period <= vocab**2
    tokens = Checkpoint(model).generate(list(start), max_new_tokens=2 * vocab**2, temperature=0.0)
    if ends := end and 0 in tokens:
        tokens = tokens[: tokens.index(0) + 1] + [0] * len(tokens)
        assert loop.period == 1, "the pair of the last token and eos"
    text = [*start, *tokens]
    bigrams = list(pairwise(text))
    assert len(set(bigrams[: vocab**2 + 1])) < vocab**2 + 1, "V² + 1 bigrams cannot all differ"
    assert all(text[i] == text[i + loop.period] for i in range(loop.prefix + ends, len(text) - loop.period))


# --------------------------------------------------------------------------------------------------- J: loss shaping


def loss_with(model, ids, *auxiliary_losses, padding_mask=None):
    """L_LM of a causal model and its terms."""
    batch = Batch(
        Inputs(ids, padding_mask=padding_mask),
        ids if padding_mask is None else ids.masked_fill(padding_mask, IGNORE_INDEX),
    )
    return loss_with_auxiliary(
        CausalSpec(), [AuxiliaryLossSpec.from_config(term) for term in auxiliary_losses], model, batch
    )


def decoder_with(query, **changes):
    """A decoder whose queries are multiplied by a number: 0 gives uniform attention, a large one one-hot rows."""
    model = random_model(kinds.decoder(position="sinusoidal", **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attention.query." in name:
                parameter.mul_(query)
    return model


@pytest.mark.parametrize("core", choices("core"), ids=kind_id)
def test_j2_zero_times_its_logarithm_is_zero(core):
    """Weights that are exactly 0, by a mask or because another is 1, give no NaN, forward or backward."""
    model = decoder_with(1e5, core=core)
    padding_mask = torch.tensor([[True] * 3 + [False] * (LENGTH - 3), [False] * LENGTH])
    terms = loss_with(model, tokens(), {"kind": "focus"}, {"kind": "near"}, padding_mask=padding_mask).auxiliary_losses
    sum(term.sum for term in terms.values()).backward()
    assert all(term.sum.isfinite() and term.sum > -1e-4 for term in terms.values())
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def near_cost(core, q, k, *, max_cost, **mask):
    """The sum over all rows of one recorded attention."""
    length = q.shape[2]
    attention = RecordedAttention(
        "x", core, q, k, make_mask(length, length, **mask), positions(length, length), None
    )  # fmt: skip
    attention_layer = AttentionLayer("x", "self", "decoder", 0, 1, MaskSpec())
    near = AuxiliaryLossSpec.from_config({"kind": "near", "max_cost": max_cost})
    return float(near.total(RecordedQueries(attention_layer, attention, None), None))


@given(length=st.integers(1, 4096), max_cost=st.floats(0.5, 1e4), seed=seeds, sharp=st.sampled_from([0.0, 1.0, 30.0]))
def test_j3_near_costs_at_most_l_max_per_row(length, max_cost, seed, sharp):
    torch.manual_seed(seed)
    core, q, k = DotSpec().build(1, 2, 2), torch.randn(1, 1, length, 2), torch.randn(1, 1, length, 2)
    assert 0 <= near_cost(core, sharp * q, k, max_cost=max_cost, causal=True) <= max_cost * length * (1 + 1e-6)


def test_j4_lambda_is_comparable_over_sizes_if_the_reduction_is_a_mean():
    """Uniform attention costs the same per row, whatever the number of heads, layers and texts."""
    ids = tokens(batch=4)
    means, ratios = [], []
    for heads, layers, batch in ((2, 2, 1), (4, 2, 1), (2, 6, 1), (2, 2, 4)):
        model = decoder_with(0.0, attention={"heads": heads}, layers=layers)
        mean, total = (
            mean_of(loss_with(model, ids[:batch], {"kind": "focus", "reduction": reduction}).auxiliary_losses["focus"])
            for reduction in ("mean", "batchmean")
        )
        means.append(mean)
        ratios.append(total / mean)
    assert means == pytest.approx([means[0]] * 4, abs=1e-12)
    assert ratios == pytest.approx([heads * layers * LENGTH for heads, layers in ((2, 2), (4, 2), (2, 6), (2, 2))])


def test_j4_the_terms_come_from_the_fast_path():
    """No tensor of length × length is computed, forward or backward, and the loss is the same without the terms."""
    length = 141  # no other size of the model
    model, ids = decoder_with(1.0), tokens(length=length)

    class NoSquare(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                assert not isinstance(tensor, torch.Tensor) or tensor.shape[-2:] != (length, length), func
            return out

    with NoSquare():
        loss = loss_with(model, ids, {"kind": "focus"}, {"kind": "near"})
        (loss.sum + sum(term.sum for term in loss.auxiliary_losses.values())).backward()
    assert torch.equal(loss.sum, loss_with(model, ids).sum)


# ----------------------------------------------------------------------------------------------------------- O: tasks


def train_and_score(folder, data, task, head=None, steps=100, lr=5e-3):
    """The report of a small model trained for seconds, with its baselines on the validation set."""
    stack = {"width": 32, "embed": {"kind": "tokens", "scale": True}, "position": "sinusoidal", "residual": "pre"}
    stack |= {"layers": 1, "attention": {"kind": "heads", "heads": 4}, "feedforward": {"kind": "mlp", "hidden": 64}}
    decoder = {"like": "encoder", "embed": {"kind": "shared", "scale": True}, "cross": True}
    shape = {"encoder": stack, "decoder": decoder}
    if head is not None:  # the mean of the word embeddings
        shape = {"encoder": stack | {"layers": 0, "position": "none"}, "head": head | {"pool": "mean"}}
    tree = {
        "model": {"vocab": "tokenizer", "init": "xavier"} | shape,
        "data": data,
        "task": task,
        "optim": {"lr": lr, "schedule": {"kind": "linear", "warmup_steps": 20}},
        "tokenizer": {"kind": "words", "lowercase": True},
        "train": {"steps": steps, "batch_tokens": 1024, "eval_every": 1000, "eval_rows": 1},
    }
    list(train_events(prepare(read_run(tree)), folder / "run"))
    return evaluate(folder / "run", num_beams=2, max_new_tokens=16)


def functions(*files):
    """Functions of the standard library: the start of the code, the first line of the docstring, the file."""
    for name in files:
        for code, docstring in functions_of((stdlib() / name).read_text(encoding="utf-8")):
            start = " ".join(code.split()[:60])
            yield {"text": start, "document": start, "query": docstring, "label": name}


def test_o1_a_trained_encoder_decoder_is_better_than_copying_the_source(tmp_path):
    """Reversing short texts, in place of translation: the same words in another order."""
    data = {"kind": "sequence", "function": "reverse", "symbols": 8, "min_length": 4, "max_length": 5}
    report = train_and_score(tmp_path, data | {"count": 2000, "validation_count": 60}, "seq2seq", steps=160)
    model, baseline = report["metrics"]["model"], report["metrics"]["copy"]
    assert model["bleu"] > baseline["bleu"] + 20
    assert model["chrf"] > baseline["chrf"] + 20
    assert report["signatures"].keys() == {"bleu", "chrf"}


def test_o2_a_trained_summary_is_better_than_the_first_words(tmp_path):
    """Of four sentences about a person: the trade and the city."""
    people = BiographiesSpec(people=400, cities=8)
    rows = ((people.text(4 * i)[0], "a {trade} of {city}".format(**people.person(i))) for i in range(400))
    path = tmp_path / "summaries.tsv"
    path.write_text("".join(f"{text}\t{summary}\n" for text, summary in rows))
    report = train_and_score(
        tmp_path, {"kind": "pairs", "path": str(path), "validation_fraction": 0.1}, "seq2seq", steps=150
    )
    assert report["primary"] == ["rouge1", "rouge2", "rougeL"]
    for metric in report["primary"]:
        assert report["metrics"]["model"][metric] > report["metrics"]["lead-12"][metric] + 0.2


FILES = ("argparse.py", "typing.py", "tarfile.py", "inspect.py", "statistics.py", "calendar.py")


def test_o3_a_trained_encoder_is_better_than_the_majority_class(tmp_path):
    """The file that a function is from; naive Bayes is reported next to it."""
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in functions(*FILES)))
    data = {"kind": "labels", "path": str(path), "validation_fraction": 0.2}
    report = train_and_score(tmp_path, data, "classify", {"kind": "classes", "classes": len(FILES)}, lr=3e-2)
    model, majority, bayes = (report["metrics"][name] for name in ("model", "majority", "naive Bayes"))
    assert model["accuracy"] > majority["accuracy"] + 0.3
    assert model["macro_f1"] > majority["macro_f1"] + 0.3
    assert bayes["accuracy"] > majority["accuracy"] + 0.3


def test_o4_trained_vectors_retrieve_better_than_chance(tmp_path):
    """The function that a docstring describes, after a few hundred examples; BM25 is reported next to it."""
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in functions(*FILES) if row["query"]))
    data = {"kind": "queries", "path": str(path), "validation_fraction": 0.2}
    report = train_and_score(tmp_path, data, "retrieval", {"kind": "vector"}, steps=60, lr=3e-2)
    model, chance = (report["metrics"][name] for name in ("model", "chance"))
    assert report["metrics"].keys() >= {"BM25"}
    assert report["documents"] > 3 * report["rows"], "documents of the training set are ranked too"
    assert model["mrr@10"] > 3 * chance["mrr@10"]
    assert model["recall@10"] > 3 * chance["recall@10"]
