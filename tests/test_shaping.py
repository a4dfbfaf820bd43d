"""Loss shaping: statistics of attention without its matrix, and the terms made of them, exact however a batch is cut."""

from __future__ import annotations

import json
from dataclasses import replace

import kinds
import numpy as np
import pytest
import torch
from command import run as command
from hypothesis import given
from hypothesis import strategies as st
from small_runs import OBJECTIVES, described
from trees import SHE, conllu

import manyheads
from manyheads import Inputs
from manyheads.data.links import aligned, arcs
from manyheads.data.source import Corpus, DataError, DataSpec
from manyheads.data.tokens import TokenizerSpec
from manyheads.objective.score import Batch
from manyheads.objective.shaping import counts_of, looks_of, shaped, total, with_links
from manyheads.parts import attend, statistics
from manyheads.parts.attend import DotSpec
from manyheads.parts.mask import Mask
from manyheads.parts.position import Places
from manyheads.parts.record import record
from manyheads.spec import SLOTS, SpecError, override, to_toml
from manyheads.train.events import Evaluated, Stepped
from manyheads.train.loop import train, update
from manyheads.train.run import made_ready, read_run
from manyheads.train.stream import Stream

CPU = torch.device("cpu")
LENGTH = 12
LEFT = torch.tensor([[True] * 4 + [False] * 8, [False] * 12])
EMPTY = torch.tensor([[True] * 12, [False] * 5 + [True] * 7])
MASKS = {
    "open": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 2},
    "two-sided window": {"window": 2},
    "left padding": {"causal": True, "padding_BM": LEFT},
    "nothing to see": {"padding_BM": EMPTY},
    "prefix": {"causal": True, "prefix_B": torch.tensor([3, 0])},
    "documents": {"causal": True, "segments": (torch.arange(12)[None].expand(2, -1) // 5,) * 2},
}


def positions(padding):
    return torch.arange(LENGTH)[None] if padding is None else ((~padding).cumsum(1) - 1).clamp(min=0)


def scene(mask):
    where = positions(mask.get("padding_BM"))
    return {"mask": Mask(LENGTH, LENGTH, CPU, **mask), "places": Places(where, where)}


def written_out(weights, places):
    """The formulas, from the matrix."""
    entropy = -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)
    return entropy, (weights * (places.key[:, None, :] - places.query[:, :, None]).square()[:, None]).sum(-1)


def core_and_inputs(choice, heads=4, groups=2, size=5):
    spec = SLOTS["core"].choose(choice)
    query, key = {"head": size, "memory": size, "none": 0}[spec.query], {"head": size, "raw": size, "none": 0}[spec.key]
    core = spec.build(heads, query, key).double().eval()
    q = torch.randn(2, heads, LENGTH, query, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, groups if key else 1, LENGTH, key, dtype=torch.float64, requires_grad=True)
    return core, q, k


def gradients(loss, *tensors):
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(tensor) if one is None else one for one, tensor in zip(found, tensors, strict=True)]


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("choice", kinds.choices("core"), ids=kinds.named)
def test_statistics_of_every_core_are_those_of_its_weights(choice, mask, blocks, monkeypatch):
    if blocks:
        monkeypatch.setattr(attend, "LITERAL_LIMIT", 2 * 4 * LENGTH * 5)
        monkeypatch.setattr(statistics, "ROWS", 5)
    core, q, k = core_and_inputs(choice)
    here, learned = scene(MASKS[mask]), [q, k, *core.parameters()]
    found = statistics.statistics(core, q, core.key(k), **here)
    expected = written_out(core.weights(q, core.key(k), **here), here["places"])
    by = torch.randn(2, 2, 4, LENGTH, dtype=torch.float64)
    torch.testing.assert_close((found.entropy, found.distance), expected, rtol=1e-10, atol=1e-10)
    ours = gradients((by[0] * found.entropy + by[1] * found.distance).sum(), *learned)
    theirs = gradients((by[0] * expected[0] + by[1] * expected[1]).sum(), *learned)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("choice", [c for c in kinds.choices("core") if c["kind"] != "argmax"], ids=kinds.named)
def test_single_weights_of_every_core(choice, blocks, monkeypatch):
    if blocks:
        monkeypatch.setattr(attend, "LITERAL_LIMIT", 2 * 4 * LENGTH * 5)
        monkeypatch.setattr(statistics, "ROWS", 5)
    core, q, k = core_and_inputs(choice)
    here = scene({"causal": True})
    text, query, key = torch.tensor([[1, 9, 9], [0, 3, 0], [1, 2, 2], [0, 11, 5]]).T
    found = statistics.log_weights(core, q, core.key(k), (text, query, key), **here)
    expected = core.weights(q, core.key(k), **here)[text, :, query, key].log().T
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    learned, by = [q, k, *core.parameters()], torch.randn(4, 4, dtype=torch.float64)
    torch.testing.assert_close(gradients((by * found).sum(), *learned), gradients((by * expected).sum(), *learned), rtol=1e-10, atol=1e-10)


def test_a_learned_bias_has_its_gradient():
    core, q, k = core_and_inputs({"kind": "dot"})
    bias = torch.randn(1, 4, LENGTH, LENGTH, dtype=torch.float64, requires_grad=True)
    here = scene({"causal": True}) | {"bias": bias}
    found, expected = statistics.statistics(core, q, k, **here), written_out(core.weights(q, k, **here), here["places"])
    torch.testing.assert_close((found.entropy, found.distance), expected)
    ours, theirs = (gradients((one[0].square() + one[1]).sum(), bias, q) for one in ((found.entropy, found.distance), expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_are_finite_differences(mask):
    core, q, k = core_and_inputs({"kind": "dot", "temperature": 0.7}, size=3)
    here = scene(MASKS[mask])

    def all_three(q, k):
        return statistics.fused(core, q, k, here["mask"], here["places"])

    assert torch.autograd.gradcheck(all_three, (q, k), fast_mode=True)


def test_in_float32_and_far_from_zero_a_distance_is_still_true():
    length = 4096
    core = DotSpec(scale=1.0).build(1, 2, 2)
    angle = torch.arange(length) * 0.37
    q = torch.stack((angle.cos(), angle.sin()), dim=-1)[None, None] * 3.0  # near keys and far ones are weighted alike
    here = {"mask": Mask(length, length, CPU, causal=True, window=9), "places": Places(*(torch.arange(length)[None],) * 2)}
    found = statistics.statistics(core, q, q, **here).distance
    rough = statistics.statistics(core.double(), q.double(), q.double(), **here).distance
    assert float((found - rough).abs().max()) < 1e-3
    here["mask"] = Mask(length, length, CPU, causal=True)
    sharp = 40 * q  # who looks at itself, or nearly so
    found, rough = (statistics.statistics(core, x, x, **here).distance for x in (sharp, sharp.double()))
    assert float(((found - rough).abs() / (1 + rough)).max()) < 0.1


def peak(run):
    """The most memory that was taken at once, by the allocations of torch."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(held.max())


@pytest.mark.parametrize(("choice", "bound"), [("dot", 3.0), ("additive", 3.0), ("explicit", None)])
def test_memory_is_linear_in_the_length(choice, bound, monkeypatch):
    if choice != "explicit":  # with as many rows at a time as a longer text would have
        monkeypatch.setattr(statistics, "ROWS", 128)
        monkeypatch.setattr(attend, "LITERAL_LIMIT", 1 << 17)
    size = 2 if choice == "additive" else 4
    core = SLOTS["core"].choose({"kind": "additive", "size": 2} if choice == "additive" else "dot").build(2, size, size)

    def step(length):
        q, k = (torch.randn(1, 2, length, size, requires_grad=True) for _ in range(2))
        here = {"mask": Mask(length, length, CPU, causal=True), "places": Places(*(torch.arange(length)[None],) * 2)}
        keys = core.key(k)
        if choice == "explicit":
            entropy, distance = written_out(core.weights(q, keys, **here), here["places"])
        else:
            found = statistics.statistics(core, q, keys, **here)
            entropy, distance = found.entropy, found.distance
        (entropy + distance).sum().backward()

    ratio = peak(lambda: step(1024)) / peak(lambda: step(512))
    assert (ratio < bound) if bound else (ratio > 3.5), ratio


# ---------------------------------------------------------------------------------------------------------- the terms

FOCUS, NEAR = {"kind": "focus", "weight": 0.5}, {"kind": "near", "where": "all", "most": 20.0, "weight": 0.02}


def shaped_run(name, *shaping, **train):
    return read_run(described(name, **train) | {"shaping": list(shaping)})


def in_double(batch):
    """Pictures as precise as the model."""
    given = {name: getattr(batch, name) for name in ("inputs", "source")}
    return replace(
        batch,
        **{
            name: replace(one, tokens=one.tokens.double())
            for name, one in given.items()
            if one is not None and one.tokens.is_floating_point()
        },
    )


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in ("shaped", "packed")])
def test_terms_are_means_over_heads_real_places_and_layers(name):
    ready = made_ready(shaped_run(name, FOCUS, NEAR))
    model, batch = manyheads.build(ready.spec).double().eval(), in_double(Stream(ready).next())
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.dim() > 1 else 1)  # else every head looks everywhere, and a bound of each is one of their mean
    score = shaped(ready.run.objective, ready.run.shaping, model, batch)
    entropies, distances = [], []
    with record(model) as seen:
        ready.run.objective.score(model, batch)
    for i, one in enumerate(seen):
        inputs = batch.source if one.name.startswith("encoder.") and batch.source is not None else batch.inputs
        real = ~(torch.zeros(inputs.tokens.shape[:2], dtype=torch.bool) if inputs.padding is None else inputs.padding)
        real = real[:, i : i + 1] if name == "recurrent" else real
        entropy, distance = written_out(one.weights(), one.places)
        entropies.append(entropy.transpose(1, 2)[real].flatten())
        distances.append(distance.transpose(1, 2)[real].flatten().clamp(max=20.0))
    assert score.terms["focus"].mean == pytest.approx(float(torch.cat(entropies).mean().detach()), abs=1e-10)
    assert score.terms["near"].mean == pytest.approx(float(torch.cat(distances).mean().detach()), abs=1e-10)
    assert score.terms["focus"].count == torch.cat(entropies).numel()


def terms_and_gradients(model, objective, shaping, batches):
    """Of the terms alone: the objective itself is scored in float32."""
    model.zero_grad()
    counts = counts_of(shaping, model, batches)
    losses = []
    for batch in batches:
        score = shaped(objective, shaping, model, batch)
        losses.append(total(replace(score, total=torch.zeros(())), 1, shaping, counts))
    sum(losses).backward()
    return float(sum(losses).detach()), [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()
    ]


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("name", ["seq2seq", "recurrent", "causal"])
def test_four_batches_are_one_and_padding_changes_nothing(name, normalised):
    ready = made_ready(shaped_run(name, FOCUS | {"normalised": normalised}, NEAR | {"normalised": normalised}))
    objective, shaping = ready.run.objective, ready.run.shaping
    model = manyheads.build(ready.spec).double().eval()
    rows = sorted((ready.rows[i] for i in range(16)), key=lambda row: len(row[0]))  # so that the four are of unlike length
    parts = [objective.batch(rows[i : i + 4], ready.tokens, np.random.default_rng(0)) for i in range(0, 16, 4)]
    whole = objective.batch(rows, ready.tokens, np.random.default_rng(0))
    assert whole.inputs.padding is not None
    one, other = (terms_and_gradients(model, objective, shaping, batches) for batches in (parts, [whole]))
    assert one[0] == pytest.approx(other[0], abs=1e-10)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["seq2seq", "recurrent", "masked"])
def test_a_term_of_weight_zero_is_logged_and_changes_no_bit(name):
    updated = []
    for shaping in ((), (FOCUS | {"weight": 0.0}, NEAR | {"weight": 0.0})):
        ready = made_ready(shaped_run(name, *shaping))
        model = manyheads.build(ready.spec, seed=1)
        changer, stream = ready.run.optim.build(model), Stream(ready)
        events = [update(model, changer, stream, ready, stream.state) for _ in (1, 2)]
        updated.append((events, [parameter.detach().clone() for parameter in model.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(updated[0][1], updated[1][1], strict=True))
    assert [event.loss for event in updated[0][0]] == [event.loss for event in updated[1][0]]
    assert updated[0][0][0].terms == {}
    assert set(updated[1][0][0].terms) == {"focus", "near"}
    assert all(value > 0 for event in updated[1][0] for value in event.terms.values())


def test_chosen_layers_heads_and_towers_are_those_alone():
    tree = described("seq2seq")
    tree["model"] = tree["model"] | {"encoder": tree["model"]["encoder"] | {"layers": 3}}
    chosen = {"kind": "focus", "where": "self", "tower": "encoder", "layers": [0, 2], "heads": [1]}
    ready = made_ready(read_run(tree | {"shaping": [chosen, FOCUS]}))
    model, batch = manyheads.build(ready.spec).double().eval(), Stream(ready).next()
    score = shaped(ready.run.objective, ready.run.shaping, model, batch)
    with record(model) as seen:
        ready.run.objective.score(model, batch)
    real = ~batch.source.padding if batch.source.padding is not None else torch.ones_like(batch.source.tokens, dtype=torch.bool)
    expected = torch.stack([seen[i].statistics.entropy[:, 1][real].sum() for i in (0, 2)]).sum()
    assert list(score.terms) == ["focus-1", "focus-2"]
    torch.testing.assert_close(score.terms["focus-1"].total, expected)
    assert score.terms["focus-1"].count == 2 * int(real.sum())


def test_layers_that_share_weights_are_told_apart():
    tower = kinds.tower(layers=4, distinct=2, position="sinusoidal")
    spec = manyheads.read_model({"vocab": 23, "encoder": tower, "head": "masked"})
    model, ids = kinds.made(spec), kinds.tokens()
    batch = Batch(Inputs(ids), ids)
    with record(model) as seen:
        model(ids)
    assert [look.place.layer for look in looks_of(model.spec, seen, batch)] == [0, 1, 2, 3]


WRONG = {
    '{kind = "focus", layers = [1]}': "shaping.0.layers: there is no 1 among 1; they count from 0 to 0",
    '{kind = "focus", heads = [0, 2]}': "shaping.0.heads: there is no 2 among 2",
    '{kind = "focus", heads = [0, 0]}': "shaping.0.heads: names one twice",
    '{kind = "near", where = "cross"}': "shaping.0: near looks at cross-attention, and this model has none",
    '{kind = "focus", tower = "encoder"}': "shaping.0: focus looks at attention of the encoder, and this model has none",
    '{kind = "near", most = 0}': "shaping.0.most: given 0, expected at least 1e-30",
    '{kind = "guided", by = "arcs", where = "cross"}': "shaping.0.where: arcs guides self-attention, given 'cross'",
    '{kind = "blur"}': "no kind 'blur' of shaping",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit_is_refused_by_name(text):
    import tomllib

    with pytest.raises(SpecError) as caught:
        read_run(described("causal") | {"shaping": [tomllib.loads(f"x = {text}")["x"]]})
    assert WRONG[text] in str(caught.value)


def test_a_model_without_attention_has_nothing_to_shape():
    tree = described("causal") | {"model": {"vocab": "tokenizer", "ngram": {"width": 8}}, "shaping": [FOCUS]}
    with pytest.raises(SpecError, match="focus looks at attention, and this model has none"):
        read_run(tree)


def test_terms_are_in_the_events_the_file_and_what_is_said(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(described("causal", steps=3) | {"shaping": [FOCUS, NEAR]}))
    done = command("train", path, "--output", tmp_path / "run")
    assert "· focus " in done.stderr
    assert "· near " in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(set(line["terms"]) == {"focus", "near"} for line in lines if line["event"] == "stepped")
    done = command("train", path, "--output", tmp_path / "run", "-s", "shaping.0.weight=0.7", check=2)
    assert "shaping" in done.stderr


def pressed(ready, batch, steps=40):
    """The first term, before and after some steps for its sake alone."""
    model, seen = manyheads.build(ready.spec).train(), []
    changer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(steps):
        (term,) = shaped(ready.run.objective, ready.run.shaping, model, batch).terms.values()
        changer.zero_grad()
        (term.total / term.count).backward()
        changer.step()
        seen.append(term.mean)
    return seen[0], seen[-1]


@pytest.mark.parametrize("term", [FOCUS, NEAR | {"most": 1000.0}], ids=lambda term: term["kind"])
def test_what_is_asked_of_attention_can_be_learned(term):
    ready = made_ready(shaped_run("causal", term))
    first, last = pressed(ready, Stream(ready).next())
    assert last < 0.5 * first


# ------------------------------------------------------------------------------------------------------ guided attention


def words():
    return TokenizerSpec.choose("words").make(["I prefer the morning flight", "je préfère le vol du matin"])


def pieces():
    return TokenizerSpec.choose("bytes").make([])


def test_alignments_of_words_become_pairs_of_tokens():
    (links,) = aligned(["I prefer it"], ["je le préfère"], ["0-0 1-2 2-1"], words())
    assert links.tolist() == [[0, 0], [1, 2], [2, 1]]
    (links,) = aligned(["ab c"], ["x yz"], ["0-1"], pieces())  # a byte a token: x, space, y, z look at a, b
    assert links.tolist() == [[2, 0], [2, 1], [3, 0], [3, 1]]
    assert aligned(["a b"], ["c"], [""], words())[0].shape == (0, 2)
    for said, wrong in (("0:0", "'0:0' of the alignment '0:0' is no pair of words"), ("0-3", "outside of 2 source and 1 target words")):
        with pytest.raises(DataError, match=wrong):
            aligned(["a b"], ["c"], [said], words())


def test_arcs_that_do_not_fit_their_text_are_refused():
    for heads, said in (((1, -1), "row 0 has 3 words and 2 arcs"), ((1, -1, 3), "row 0 has an arc to word 3, and words count from 0 to 2")):
        with pytest.raises(DataError, match=said):
            arcs(["a b c"], [heads], None, words(), toward="head", relation=None)


@given(data=st.data(), kind=st.sampled_from(["words", "bytes", "characters"]))
def test_every_token_of_a_word_is_found_whatever_the_tokenizer(data, kind):
    text = data.draw(st.lists(st.text(st.sampled_from("abé漢"), min_size=1, max_size=4), min_size=1, max_size=5))
    joined = data.draw(st.sampled_from([" ", "  ", " \t "])).join(text)
    tokenizer = TokenizerSpec.choose(kind).make([joined])
    (links,) = arcs([joined], [[-1] * len(text)], None, tokenizer, toward="head", relation=None)
    seen = {token: {int(j) for i, j in links if i == token} for token in links[:, 0].tolist()}
    groups = sorted({frozenset(group) for group in seen.values()}, key=min)
    assert len(groups) == len(text)
    assert sum(len(group) for group in groups) == len(seen), "no token belongs to two words"
    for group, word in zip(groups, text, strict=True):
        ids = tokenizer.encode(joined, add_special_tokens=False).ids
        assert tokenizer.decode([ids[i] for i in sorted(group)]).strip() == word


class AlignedSpec(DataSpec, kind="test-aligned"):
    """Words turned round, and which is which"""

    def load(self):
        def row(i):
            given = np.random.default_rng(i).choice(list("abcdefgh"), size=4 + i % 3).tolist()
            count = len(given)
            return " ".join(given), " ".join(reversed(given)), " ".join(f"{j}-{count - 1 - j}" for j in range(count))

        rows = [row(i) for i in range(220)]
        return Corpus(("source", "target", "alignment"), rows[20:], rows[:20], [], "words turned round")


class TreesSpec(DataSpec, kind="test-trees"):
    """Sentences with a parse"""

    def load(self):
        rows = [
            ("I prefer the morning flight", (1, -1, 4, 4, 1), ("nsubj", "root", "det", "nmod", "dobj")),
            ("birds sing", (1, -1), ("nsubj", "root")),
        ]
        return Corpus(("text", "arcs", "relations"), rows * 30, rows, [], "two sentences")


def guided_run(name, data, *shaping, **train):
    return read_run(described(name, **train) | {"data": {"kind": data}, "shaping": list(shaping)})


@pytest.mark.parametrize("name", ["seq2seq", "recurrent"])
def test_guided_attention_is_the_cross_entropy_of_the_alignment(name):
    ready = made_ready(guided_run(name, "test-aligned", {"kind": "guided", "weight": 1.0}))
    model, batch = manyheads.build(ready.spec).double().eval(), Stream(ready).next()
    score = shaped(ready.run.objective, ready.run.shaping, model, batch).terms["guided"]
    with record(model) as seen:
        ready.run.objective.score(model, batch)
    crosses = [one.weights() for one in seen if not one.name.endswith("attention")]
    alpha = torch.cat(crosses, dim=2) if name == "recurrent" else crosses[0]
    costs = []
    for text, (source, target) in enumerate(zip(batch.source.tokens, batch.wanted, strict=True)):
        count = int((target >= 5).sum())  # words, without </s>
        for t in range(count):
            assert target[t] == source[count - 1 - t], "where a word is written it should look at what it stands for"
            costs.append(-alpha[text, :, t, count - 1 - t].log())
    torch.testing.assert_close(score.total, torch.cat(costs).sum(), rtol=1e-10, atol=1e-10)
    assert score.count == torch.cat(costs).numel()


@pytest.mark.parametrize("window", [None, 2, 3])
@pytest.mark.parametrize("name", ["causal", "masked"])
def test_a_row_that_may_not_see_its_target_is_not_asked(name, window):
    tree = described(name) | {"data": {"kind": "test-trees"}, "shaping": [{"kind": "guided", "by": "arcs", "heads": [1]}]}
    tower = "decoder" if name == "causal" else "encoder"
    ready = made_ready(read_run(tree if window is None else override(tree, [f"model.{tower}.mask.window={window}"])))
    batch = with_links(
        ready.run.objective.batch([ready.rows[0]], ready.tokens, np.random.default_rng(0)),
        ready.run.objective,
        ready.tokens,
        {g: rows[:1] for g, rows in ready.links.items()},
    )
    model = manyheads.build(ready.spec).double().eval()
    score = shaped(ready.run.objective, ready.run.shaping, model, batch).terms["guided"]
    with record(model) as seen:
        ready.run.objective.score(model, batch)
    heads = [1, 1, 4, 4, 1]  # of each word; the root is its own
    far = window or LENGTH
    cells = [(i + 1, j + 1) for i, j in enumerate(heads) if (name == "masked" or j <= i) and abs(i - j) < far]  # behind <s>
    assert score.count == len(cells)
    expected = -sum(seen[0].weights()[0, 1, i, j].log() for i, j in cells)
    torch.testing.assert_close(score.total, expected, rtol=1e-10, atol=1e-10)


def test_a_relation_of_a_file_of_trees_guides_its_own_arcs(tmp_path):
    others = [[("1", f"bird{letter}", "2", "nsubj"), ("2", "sings", "0", "root")] for letter in "abcdefghijklmnopqrst"]
    (tmp_path / "t.conllu").write_text(conllu(SHE, *others))
    tree = described("masked") | {"data": {"kind": "conllu", "path": str(tmp_path / "t.conllu")}}
    guided = {"kind": "guided", "by": "arcs", "relation": "nsubj"}
    ready = made_ready(read_run(tree | {"shaping": [guided]}))
    (links,) = ready.links.values()
    for row, found in zip(ready.corpus.train, links, strict=True):
        assert found.tolist() == [[row[2].index("nsubj"), row[1][row[2].index("nsubj")]]]
    events = list(train(ready, tmp_path / "run"))
    assert all(np.isfinite(event.terms["guided"]) and event.terms["guided"] > 0 for event in events if isinstance(event, Stepped))
    with pytest.raises(DataError, match="no arc is of the relation 'nsbj': did you mean 'nsubj'"):
        made_ready(read_run(tree | {"shaping": [guided | {"relation": "nsbj"}]}))


@pytest.mark.parametrize("shaping", [{"kind": "guided", "by": "arcs"}, {"kind": "focus"}, {"kind": "near"}], ids=lambda one: one["kind"])
@pytest.mark.parametrize("name", ["causal", "masked"])
def test_texts_that_share_a_row_are_not_shaped(name, shaping):
    """A link is between places of its own text, and these are not where it stands in a row."""
    guided_run(name, "test-trees", shaping)
    guided_run(name, "test-trees", pack=16)
    with pytest.raises(SpecError, match=f"train.pack: texts share rows for causal and masked without shaping, and this is {name} with it"):
        guided_run(name, "test-trees", shaping, pack=16)


def test_a_word_of_several_tokens_is_looked_at_evenly():
    """And however many there are, its row is one row."""
    tree = described("masked") | {
        "data": {"kind": "test-trees"},
        "tokenizer": {"kind": "bytes"},
        "shaping": [{"kind": "guided", "by": "arcs"}],
    }
    ready = made_ready(read_run(tree))
    objective, links = ready.run.objective, {guide: rows[1:2] for guide, rows in ready.links.items()}
    batch = with_links(objective.batch([ready.rows[1]], ready.tokens, np.random.default_rng(0)), objective, ready.tokens, links)
    model = manyheads.build(ready.spec).double().eval()
    score = shaped(objective, ready.run.shaping, model, batch).terms["guided"]
    with record(model) as seen:
        objective.score(model, batch)
    rows = [*range(1, 6), *range(7, 11)]  # "birds" and "sing", behind <s>, without the space
    alpha = seen[0].weights()[0]
    expected = -sum(alpha[:, i, j].log().sum() / 4 for i in rows for j in range(7, 11))
    torch.testing.assert_close(score.total, expected, rtol=1e-10, atol=1e-10)
    assert score.count == 2 * len(rows)


def test_accumulated_guidance_is_that_of_one_batch():
    ready = made_ready(guided_run("seq2seq", "test-aligned", {"kind": "guided", "weight": 2.0}))
    objective, shaping, model = ready.run.objective, ready.run.shaping, manyheads.build(ready.spec).double().eval()
    rows = sorted(range(16), key=lambda i: len(ready.rows[i][0]))

    def batch(chosen):
        made = objective.batch([ready.rows[i] for i in chosen], ready.tokens, np.random.default_rng(0))
        return with_links(made, objective, ready.tokens, {guide: [found[i] for i in chosen] for guide, found in ready.links.items()})

    one, other = (
        terms_and_gradients(model, objective, shaping, batches)
        for batches in ([batch(rows[i : i + 4]) for i in range(0, 16, 4)], [batch(rows)])
    )
    assert one[0] == pytest.approx(other[0], abs=1e-10)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-9)


def test_guided_attention_learns_to_look_where_it_should():
    ready = made_ready(guided_run("seq2seq", "test-aligned", {"kind": "guided", "heads": [0]}, tokens=100))
    first, last = pressed(ready, Stream(ready).next(), steps=80)
    assert first > 1.2, "who looks anywhere pays ln 5 or so"
    assert last < 0.3


def test_pairs_with_a_third_column_have_an_alignment(tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"a{i} b\tb a{i}\t0-1 1-0\n" for i in range(40)))
    data = {"kind": "pairs", "path": str(tmp_path / "pairs.tsv"), "fields": ["source", "target", "alignment"]}
    corpus = DataSpec.choose(data).load()
    assert corpus.fields == ("source", "target", "alignment")
    assert corpus.train[0][2] == "0-1 1-0"
    assert DataSpec.choose(data | {"fields": ["source", "target"]}).load().fields == ("source", "target")
    tree = described("seq2seq") | {"data": data, "shaping": [{"kind": "guided"}]}
    events = list(train(made_ready(read_run(tree)), tmp_path / "run"))
    assert all(np.isfinite(event.terms["guided"]) for event in events if isinstance(event, Stepped))
    assert any(isinstance(event, Evaluated) for event in events)
    with pytest.raises(SpecError, match="shaping.0: guided needs alignment, and pairs gives source, target"):
        made_ready(read_run(tree | {"data": data | {"fields": ["source", "target"]}}))
    with pytest.raises(SpecError, match="shaping.0.by: 'arcs' is for causal, masked, classify, where every token keeps its place"):
        read_run(tree | {"shaping": [{"kind": "guided", "by": "arcs"}]})
