"""Claims H (objectives), J (loss shaping), K (temperature) and O (tasks) of the source documents; every test is named for its row.

Tolerances: float64 1e-10, float32 1e-5, unless the row says otherwise.
"""

from __future__ import annotations

import json
import math
import string
from itertools import pairwise

import kinds
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kinds import LENGTH, choices, kind_id, random_model, tokens
from raising import raises
from small_attention import make_mask, plain, positions, seeds
from small_runs import train_and_evaluate
from torch.utils._python_dispatch import TorchDispatchMode
from trivial_losses import mean_of, unigram_entropy

from manyheads import Checkpoint, Inputs, build, predict, read_model
from manyheads.data.attention_targets import targets_from_arcs
from manyheads.data.builtin import BiographiesSpec, functions_of, stdlib
from manyheads.data.tokenizer import TokenizerSpec
from manyheads.labs.loops import find_loop, ngram_successor
from manyheads.model.recording import RecordedAttention, record
from manyheads.parts.core import DotSpec, inverse_root
from manyheads.parts.mask import MaskSpec
from manyheads.parts.statistics import entropy
from manyheads.tasks.auxiliary import (
    AttentionLayer,
    AuxiliaryLossSpec,
    RecordedQueries,
    loss_with_auxiliary,
    total_loss,
)
from manyheads.tasks.batch import IGNORE_INDEX, Batch, SpecialTokens
from manyheads.tasks.images import MaeSpec
from manyheads.tasks.language import CausalSpec, InfillSpec, MaskedSpec
from manyheads.tasks.task import TaskSpec
from manyheads.training.evaluator import evaluate
from manyheads.training.loop import train_events
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run
from manyheads.training.suggest import choose_architecture

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
def test_h2_masked_language_modelling_masks_tokens_and_no_positions():
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


def test_h4_a_quarter_of_an_infilled_text_is_missing():
    """prefix M suffix M content: how much is content; that the parts give the text back is tested in tests/tasks."""
    rng, special, text = np.random.default_rng(0), SpecialTokens(vocab_size=1000), np.arange(5, 905)
    shares, lengths = [], []
    for _ in range(400):
        batch = InfillSpec(block_size=128).batch([(text,)] * 8, special, rng)
        for row in batch.targets.tolist():
            real = [token for token in row if token != IGNORE_INDEX]
            _, second = (i for i, token in enumerate(real) if token == special.mask)
            assert set(row[len(real) :]) <= {IGNORE_INDEX}, "padding is not in the loss"
            lengths.append(len(real) - 3)
            shares.append((len(real) - second - 2) / lengths[-1])
    assert np.mean(shares) == pytest.approx(0.25, rel=0.02)
    assert (min(lengths), max(lengths)) == (4, 112)


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


def test_k1_k2_attention_and_the_head_have_one_temperature():
    assert DotSpec().build(1, 64, 64).scale == inverse_root(64) == 1 / 8
    model = build(
        read_model({"vocab": 500, "decoder": {"width": 64}, "head": {"kind": "tied", "logit_scale": "inverse-sqrt"}})
    )
    h, table = torch.randn(1, 400, 64), torch.randn(500, 64)
    logits = model.head(h, table=table, padding_mask=None)
    assert logits.mean().item() == pytest.approx(0, abs=0.05)
    assert logits.var().item() == pytest.approx(1, rel=0.05)


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


def test_k7_loops_of_a_transformer_are_reported_and_rarer_at_a_higher_temperature():
    """What was seen in 40 tokens, and no proof: a transformer reads all tokens before the next one."""
    words = [2 * letter for letter in string.ascii_lowercase]
    tokenizer = TokenizerSpec.choose("words").make([" ".join(words)])
    spec = kinds.decoder(position="sinusoidal").replace(vocab=tokenizer.get_vocab_size())
    checkpoint = Checkpoint(random_model(spec, seed=2), tokenizer)
    shares = {}
    for temperature in (0.0, 1.0, 4.0):
        settings = {"max_new_tokens": 40, "temperature": temperature, "suppress_tokens": list(SpecialTokens().all_ids)}
        results = predict(checkpoint, words, loops=True, **settings)
        found = [(one["generated"].split(), one["loop"]) for one in results if one["loop"] is not None]
        shares[temperature] = len(found) / len(results)
        for output, loop in found:
            rest, period = output[loop["prefix"] :], loop["period"]
            assert rest[:period] == loop["text"].split()
            assert rest[:-period] == rest[period:]
            assert len(rest) // period == loop["repeats"] >= 2
    assert shares[0.0] > shares[4.0], shares


# --------------------------------------------------------------------------------------------------- J: loss shaping


def loss_with(model, ids, *auxiliary_losses, padding_mask=None):
    """L_LM of a causal model and its terms."""
    batch = Batch(
        Inputs(ids, padding_mask=padding_mask),
        ids if padding_mask is None else ids.masked_fill(padding_mask, IGNORE_INDEX),
    )
    return loss_with_auxiliary(
        CausalSpec(), [AuxiliaryLossSpec.choose(term) for term in auxiliary_losses], model, batch
    )


def decoder_with(query, **changes):
    """A decoder whose queries are multiplied by a number: 0 gives uniform attention, a large one one-hot rows."""
    model = random_model(kinds.decoder(position="sinusoidal", **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attention.query." in name:
                parameter.mul_(query)
    return model


def test_j1_a_head_can_be_a_dependency_relation():
    text, heads, labels = "I prefer the morning flight", [1, -1, 4, 4, 1], ["nsubj", "root", "det", "nmod", "dobj"]
    words = text.split()
    tokenizer = TokenizerSpec.choose("words").make([text])

    def target(**options):
        (links,) = targets_from_arcs([text], [heads], [labels], tokenizer, **options)
        matrix = torch.zeros(5, 5)
        matrix[tuple(torch.from_numpy(links).T)] = 1.0
        return matrix

    parse = target(toward="head", relation=None)
    assert parse.sum(1).tolist() == [1.0] * 5, "one head per word: one-hot in every row"
    assert parse[words.index("flight"), words.index("prefer")] == 1
    dobj = target(toward="dependents", relation="dobj")
    assert dobj[words.index("prefer")].tolist() == [float(word == "flight") for word in words]
    assert dobj.sum() == 1, "only prefer has a direct object"


def test_j2_focus_is_the_mean_entropy():
    ids, focus = tokens(length=LENGTH), {"kind": "focus"}
    uniform = mean_of(loss_with(decoder_with(0.0), ids, focus).terms["focus"])
    assert uniform == pytest.approx(sum(math.log(t) for t in range(1, LENGTH + 1)) / LENGTH, abs=1e-10)
    core, q = plain(3), torch.zeros(1, 1, 7, 3, dtype=torch.float64)
    without_mask = entropy(core, q, q, mask=make_mask(7, 7), positions=positions(7, 7))
    torch.testing.assert_close(without_mask, torch.full((1, 1, 7), math.log(7), dtype=torch.float64))
    assert mean_of(loss_with(decoder_with(1e5), ids, focus).terms["focus"]) == pytest.approx(0.0, abs=1e-6), "one-hot"
    model = decoder_with(1.0)
    with record(model) as attentions:
        model(ids)
    alpha = torch.stack([one.weights() for one in attentions])  # L×B×K×T×T
    entropies = (alpha * -torch.where(alpha > 0, alpha, 1.0).log()).sum((0, 2, 3, 4))
    expected = entropies / (alpha.shape[2] * LENGTH * len(attentions))
    term = loss_with(model, ids, focus).terms["focus"]
    assert mean_of(term) == pytest.approx(float(expected.mean().detach()), abs=1e-10)
    (term.sum / term.count).backward()
    for name, parameter in model.named_parameters():
        if ".attention.query.weight" in name or ".attention.key.weight" in name:
            with torch.no_grad():
                step = 1e-6 * torch.randn_like(parameter).sign()
                values = []
                for sign in (1, -1):
                    parameter.add_(sign * step)
                    values.append(mean_of(loss_with(model, ids, focus).terms["focus"]))
                    parameter.sub_(sign * step)
            slope = float((parameter.grad * step).sum())
            assert (values[0] - values[1]) / 2 == pytest.approx(slope, rel=1e-4, abs=1e-13)


@pytest.mark.parametrize("core", choices("core"), ids=kind_id)
def test_j2_zero_times_its_logarithm_is_zero(core):
    """Weights that are exactly 0, by a mask or because another is 1, give no NaN, forward or backward."""
    model = decoder_with(1e5, core=core)
    padding_mask = torch.tensor([[True] * 3 + [False] * (LENGTH - 3), [False] * LENGTH])
    terms = loss_with(model, tokens(), {"kind": "focus"}, {"kind": "near"}, padding_mask=padding_mask).terms
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
    near = AuxiliaryLossSpec.choose({"kind": "near", "max_cost": max_cost})
    return float(near.total(RecordedQueries(attention_layer, attention, None), None))


@given(length=st.integers(1, 4096), max_cost=st.floats(0.5, 1e4), seed=seeds, sharp=st.sampled_from([0.0, 1.0, 30.0]))
def test_j3_near_costs_at_most_l_max_per_row(length, max_cost, seed, sharp):
    torch.manual_seed(seed)
    core, q, k = DotSpec().build(1, 2, 2), torch.randn(1, 1, length, 2), torch.randn(1, 1, length, 2)
    assert 0 <= near_cost(core, sharp * q, k, max_cost=max_cost, causal=True) <= max_cost * length * (1 + 1e-6)


def test_j3_attending_to_oneself_costs_nothing_and_an_outlier_at_most_l_max():
    q = 100 * torch.eye(64, dtype=torch.float64)[None, None]

    def cost(first, second):
        k = q.clone()
        k[0, 0, [first, second]] = k[0, 0, [second, first]]  # these two attend to each other
        return near_cost(plain(64), q, k, max_cost=50.0)

    assert cost(0, 0) == 0.0
    assert cost(0, 63) == 2 * 50.0
    assert cost(5, 6) == 2 * 1.0


def test_j4_the_total_is_the_loss_and_its_terms():
    ids, model = tokens(), decoder_with(1.0)
    term = {"kind": "focus", "weight": 0.3}
    loss = loss_with(model, ids, term)
    counts = {"focus": loss.terms["focus"].count}
    total = total_loss(loss, loss.count, [AuxiliaryLossSpec.choose(term)], counts)
    torch.testing.assert_close(total, loss.sum / loss.count + 0.3 * loss.terms["focus"].sum / counts["focus"])
    assert mean_of(loss) == pytest.approx(mean_of(loss_with(model, ids)), abs=0), "the loss of the task is the same"


def test_j4_lambda_is_comparable_over_sizes_if_the_reduction_is_a_mean():
    """Uniform attention costs the same per row, whatever the number of heads, layers and texts."""
    ids = tokens(batch=4)
    means, ratios = [], []
    for heads, layers, batch in ((2, 2, 1), (4, 2, 1), (2, 6, 1), (2, 2, 4)):
        model = decoder_with(0.0, attention={"heads": heads}, layers=layers)
        mean, total = (
            mean_of(loss_with(model, ids[:batch], {"kind": "focus", "reduction": reduction}).terms["focus"])
            for reduction in ("mean", "sum")
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
        (loss.sum + sum(term.sum for term in loss.terms.values())).backward()
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
    model, baseline = report["scores"]["model"], report["scores"]["copy"]
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
        assert report["scores"]["model"][metric] > report["scores"]["lead-12"][metric] + 0.2


FILES = ("argparse.py", "typing.py", "tarfile.py", "inspect.py", "statistics.py", "calendar.py")


def test_o3_a_trained_encoder_is_better_than_the_majority_class(tmp_path):
    """The file that a function is from; naive Bayes is reported next to it."""
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in functions(*FILES)))
    data = {"kind": "labels", "path": str(path), "validation_fraction": 0.2}
    report = train_and_score(tmp_path, data, "classify", {"kind": "classes", "classes": len(FILES)}, lr=3e-2)
    model, majority, bayes = (report["scores"][name] for name in ("model", "majority", "naive Bayes"))
    assert model["accuracy"] > majority["accuracy"] + 0.3
    assert model["macro_f1"] > majority["macro_f1"] + 0.3
    assert bayes["accuracy"] > majority["accuracy"] + 0.3


def test_o4_trained_vectors_retrieve_better_than_chance(tmp_path):
    """The function that a docstring describes, after a few hundred examples; BM25 is reported next to it."""
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in functions(*FILES) if row["query"]))
    data = {"kind": "queries", "path": str(path), "validation_fraction": 0.2}
    report = train_and_score(tmp_path, data, "retrieval", {"kind": "vector"}, steps=60, lr=3e-2)
    model, chance = (report["scores"][name] for name in ("model", "chance"))
    assert report["scores"].keys() >= {"BM25"}
    assert report["documents"] > 3 * report["rows"], "documents of the training set are ranked too"
    assert model["mrr@10"] > 3 * chance["mrr@10"]
    assert model["recall@10"] > 3 * chance["recall@10"]


@pytest.mark.parametrize(
    ("task", "architecture"),
    [
        ("summarise", "encoder-decoder"), ("translate", "encoder-decoder"), ("classify", "encoder"),
        ("retrieval", "encoder"), ("causal", "decoder"), ("mae", "encoder-decoder"),
    ],
)  # fmt: skip
def test_o5_a_task_has_a_default_architecture(task, architecture):
    spec = TaskSpec.kinds[task]
    assert choose_architecture(spec, None) == architecture
    for other in spec.architectures:
        assert choose_architecture(spec, other.replace("–", "-")) == other
    with raises("usage.argument", architecture, "sideways"):
        choose_architecture(spec, "sideways")
