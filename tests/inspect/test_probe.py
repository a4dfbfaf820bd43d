"""Probes find position where it is and chance where it is not (claims L1 to L7)."""

from __future__ import annotations

import kinds
import pytest
import torch
from kinds import random_model
from raising import raises

from manyheads import build, read_model
from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.data.tokenizer import TokenizerSpec
from manyheads.inspect.probe import (
    hash_weights,
    layer_outputs,
    next_token,
    position,
    previous_token,
    probe,
    wilson,
)
from manyheads.inspect.word_labels import word_labels
from manyheads.model.recording import record

NAMES = ("walk", "run", "play", "look")  # nouns, and verbs
ROWS = torch.randint(0, kinds.VOCAB, (150, 8), generator=torch.Generator().manual_seed(0)).tolist()


def report(shape, label=position, **changes):
    model = random_model(getattr(kinds, shape)(**changes), dtype=torch.float32)
    before = hash_weights(model)
    result = probe(model, ROWS, label)
    assert hash_weights(model) == before == result.weights_hash, "the model is frozen"
    return result


@pytest.mark.parametrize("embedded", ["sinusoidal", {"kind": "learned", "length": 64}])
def test_an_embedded_position_is_found_in_every_layer(embedded):
    result = report("encoder", position=embedded, layers=1)
    assert result.chance == pytest.approx(1 / 8)
    assert result.layers[0].name == "encoder.embed"
    assert result.layers[0].accuracy > 0.95
    for layer in result.layers:
        assert layer.interval[0] > 3 * result.chance
        assert layer.shuffled < 2 * result.chance
        assert layer.mean_distance < 1.5


def test_l4_without_positions_a_bidirectional_encoder_stays_at_chance():
    result = report("encoder", position="none")
    for layer in result.layers:
        assert layer.interval[0] <= result.chance + 0.02
        assert layer.accuracy < 2 * result.chance


@pytest.mark.parametrize("stack", ["decoder", "encoder"])
def test_l3_l7_without_positions_only_a_causal_model_knows_them_even_untrained(stack):
    """All rows begin with the same token, whose share of the attention is 1/(i + 1) in a causal model."""
    layers = {"layers": 2, "width": 64, "attention": {"kind": "heads", "heads": 4}, "position": "none"}
    model = build(read_model({"vocab": kinds.VOCAB + 1, stack: layers, "head": "untied"}))
    result = probe(model, [[kinds.VOCAB, *row[1:]] for row in ROWS])
    embeddings, best = result.layers[0].accuracy, max(layer.accuracy for layer in result.layers[1:])
    assert embeddings < 0.35, "the first position, and chance"
    assert best > 1.6 * embeddings if stack == "decoder" else best < 1.3 * embeddings
    assert all(layer.untrained == pytest.approx(layer.accuracy, abs=0.15) for layer in result.layers)


def test_l6_any_label_of_a_token():
    same = report("decoder", label=lambda ids, i: ids[i] % 3, layers=1)
    assert same.classes == 3
    assert same.layers[0].accuracy > 0.95, "the token itself"
    assert same.layers[0].mean_distance < 0.1
    names = report(
        "decoder", label=lambda ids, i: None if i == 0 else "odd" if ids[i] % 2 else "even", layers=1, width=32
    )
    assert names.layers[0].mean_distance is None
    assert names.layers[0].accuracy > 0.95
    following = report("encoder", label=next_token, position="sinusoidal", layers=1)
    assert following.layers[0].accuracy < 3 * following.chance, "a random next token is not in the embedding"


def test_what_cannot_be_probed_is_an_error():
    model = random_model(kinds.decoder(), dtype=torch.float32)
    with raises("data.empty"):
        probe(model, ROWS, lambda ids, i: 1)
    with raises("model.unsupported"):
        probe(random_model(kinds.ngram()), ROWS)
    with raises("input.invalid", 3, len(ROWS)):
        probe(random_model(kinds.pair()), ROWS, sources=ROWS[:3])


def test_each_stack_of_an_encoder_decoder_is_probed_on_the_rows_that_it_reads():
    model = random_model(kinds.pair(position="sinusoidal", layers=1), dtype=torch.float32)
    sources = [row[::-1] for row in ROWS]
    encoder, decoder = probe(model, ROWS), probe(model, ROWS, sources=sources)
    assert [layer.name for layer in encoder.layers] == ["encoder.embed", "encoder.layers.0"]
    assert [layer.name for layer in decoder.layers] == ["decoder.embed", "decoder.layers.0"]
    assert all(report.layers[0].accuracy > 0.95 for report in (encoder, decoder))
    with record(model) as tape, torch.no_grad():
        model(torch.tensor(ROWS), torch.tensor(sources))
    for rows, of, prefix in ((sources, None, "encoder"), (ROWS, sources, "decoder")):
        for name, states in layer_outputs(model, rows, of).items():
            assert name.startswith(prefix)
            assert torch.allclose(states, tape.activations()[name].flatten(0, 1), atol=1e-5)


def test_the_states_of_a_recurrent_network_have_what_its_embeddings_lack():
    """The token before is in the state, and not in the embedding."""
    model = random_model(kinds.recurrent(source=False), dtype=torch.float32)
    result = probe(model, ROWS, previous_token)
    assert [layer.name for layer in result.layers] == ["embed", "readout"]
    embeddings, states = result.layers
    assert embeddings.accuracy < 3 * result.chance
    assert states.accuracy > 5 * result.chance


def conllu_text(words):
    lines = [f"{i}\t{word}\t_\t{tag}\t_\t_\t{0 if relation == 'root' else 3}\t{relation}\t_\t_\n"
             for i, (word, tag, relation) in enumerate(words, 1)]  # fmt: skip
    return "".join(lines) + "\n"


SENTENCES = [
    (("the", "DET", "det"), (noun, "NOUN", "nsubj"), (verb, "VERB", "root"), ("a", "DET", "det"), (object_, "NOUN", "obj"))
    for noun in NAMES for verb in NAMES for object_ in NAMES
]  # fmt: skip


@pytest.mark.parametrize(
    ("column", "names"), [("tag", {"DET", "NOUN", "VERB"}), ("relation", {"det", "nsubj", "root", "obj"})]
)
def test_l6_the_words_of_a_treebank_have_labels(column, names, tmp_path):
    """The same words are nouns and verbs, so that their embeddings do not tell which; their positions do."""
    path = tmp_path / "small.conllu"
    path.write_text("".join(conllu_text(words) for words in SENTENCES))
    tokenizer = TokenizerSpec.from_config({"kind": "words", "vocab_size": 20}).make(["the a _ " + " ".join(NAMES)])
    spec = kinds.encoder(position="sinusoidal", layers=1).replace(vocab=tokenizer.get_vocab_size())
    checkpoint = Checkpoint(random_model(spec, dtype=torch.float32), tokenizer)
    rows, label = word_labels(checkpoint, path, column)
    assert len(rows) == len(SENTENCES)
    expected = [word[1 if column == "tag" else 2] for word in SENTENCES[0]]
    found = [label(rows[0], i) for i in range(len(rows[0]))]
    assert [name for name in found if name is not None] == expected
    result = probe(checkpoint.model, rows, label)
    assert result.classes == len(names)
    assert result.layers[0].accuracy > 0.95


def test_the_interval_is_wilsons():
    """Figures of the formula at 8 of 10, from its definition: the roots of (p − f)² = z² p(1 − p)/n."""
    for fraction, count in ((0.8, 10), (0.0, 20), (1.0, 7)):
        for bound in wilson(fraction, count):
            assert (bound - fraction) ** 2 == pytest.approx(1.96**2 * bound * (1 - bound) / count, abs=1e-9)


def test_the_untrained_control_is_another_model():
    """An encoder whose token table is zero knows no token, and its spec with new weights does."""
    model = random_model(kinds.encoder(position="none", layers=1), dtype=torch.float32)
    with torch.no_grad():
        model.encoder.embed.table.weight.zero_()
    result = probe(model, ROWS, lambda ids, i: ids[i] % 2)
    assert result.layers[0].accuracy < 0.7 < result.layers[0].untrained


def test_the_outputs_of_rows_of_unequal_length_are_those_of_each_alone():
    model = random_model(kinds.encoder(), dtype=torch.float32)
    rows = [ROWS[0], ROWS[1][:3], ROWS[2][:5]]
    together, alone = layer_outputs(model, rows), [layer_outputs(model, [row]) for row in rows]
    for name, outputs in together.items():
        assert torch.allclose(outputs, torch.cat([one[name] for one in alone]), atol=1e-5)


def test_outputs_that_are_not_finite_are_an_error():
    model = random_model(kinds.encoder(), dtype=torch.float32)
    with torch.no_grad():
        model.encoder.embed.table.weight[ROWS[0][0]] = torch.inf
    with raises("model.non-finite", "encoder.embed"):
        probe(model, ROWS)


def test_the_label_of_a_word_is_at_its_last_token_and_a_word_may_have_none(tmp_path):
    path = tmp_path / "words.conllu"
    rows = [[("the", "DET"), ("walking", "NOUN")], [("run", "_"), ("walk", "VERB")], [("the", "DET")] * 9]
    lines = ["\n".join(f"{i}\t{word}\t_\t{tag}\t_\t_\t{i - 1}\tdep\t_\t_"
                       for i, (word, tag) in enumerate(row, 1)) for row in rows]  # fmt: skip
    path.write_text("\n\n".join(lines) + "\n\n")
    tokenizer = TokenizerSpec.from_config({"kind": "characters"}).make(["the walking run walk"])
    spec = kinds.encoder(position={"kind": "learned", "length": 16}).replace(vocab=tokenizer.get_vocab_size())
    rows, label = word_labels(Checkpoint(random_model(spec), tokenizer), path, "tag")
    labels = [[label(ids, i) for i in range(len(ids))] for ids in rows]
    assert len(rows) == 2, "the last sentence is longer than the model has positions"
    assert [[name for name in row if name is not None] for row in labels] == [["DET", "NOUN"], ["VERB"]]
    ends = [
        [tokenizer.decode(ids[: i + 1]) for i, name in enumerate(row) if name]
        for ids, row in zip(rows, labels, strict=True)
    ]
    assert ends == [["the", "the walking"], ["run walk"]]
