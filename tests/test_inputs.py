"""What a model is given: refused in one sentence where it cannot be what was meant."""

from __future__ import annotations

import kinds
import pytest
import torch
from kinds import made, tokens

from manyheads import Inputs, build, read_model, record
from manyheads.parts.attend import DotSpec
from manyheads.parts.mask import Mask
from manyheads.parts.position import Places

FALSE = torch.zeros(2, 9, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": torch.zeros(9, dtype=torch.long)}, r"tokens has shape \(9,\), expected batch × length"),
        ({"padding": FALSE[:, :5]}, r"padding has shape \(2, 5\), expected \(2, 9\)"),
        ({"padding": FALSE.T}, r"padding has shape \(9, 2\), expected \(2, 9\)"),
        ({"padding": FALSE.long()}, "padding is torch.int64, expected torch.bool, True at padded places"),
        ({"positions": torch.zeros(3, 9, dtype=torch.long)}, r"positions has shape \(3, 9\), expected \(2, 9\)"),
        ({"segments": torch.zeros(2, 8, dtype=torch.long)}, r"segments has shape \(2, 8\)"),
        ({"types": torch.zeros(2, 8, dtype=torch.long)}, r"types has shape \(2, 8\)"),
        ({"prefix": torch.zeros(2)}, "prefix is torch.float32, expected a tensor of whole numbers"),
        ({"padding": [[False]]}, "padding is list, expected torch.bool, True at padded places"),
        ({"prefix": torch.zeros(2, 9, dtype=torch.long)}, r"prefix has shape \(2, 9\), expected \(2,\)"),
        ({"tokens": [[1, 2]]}, "tokens is list, expected a tensor batch × length"),
        ({"span": 3}, "span is 3, expected a whole number of at least the 9 tokens given"),
    ],
)
def test_shapes_are_named(given, said):
    with pytest.raises(ValueError, match=said):
        Inputs(**({"tokens": tokens()} | given))


def test_what_a_model_cannot_use_is_refused():
    decoder, pair, encoder = made(kinds.decoder()), made(kinds.pair()), made(kinds.encoder())
    refused = {
        "a source was given, but the model is only decoder": lambda: decoder(tokens(), tokens()),
        "needs a source beside the target": lambda: pair(tokens()),
        "prefix lengths were given, but the mask has no prefix": lambda: decoder(Inputs(tokens(), prefix=torch.tensor([1, 2]))),
        "token types were given, but the embedding has none": lambda: decoder(Inputs(tokens(), types=tokens())),
        "only a decoder with a causal mask": lambda: encoder.start(),
        "and a head for each token writes token by token": lambda: made(kinds.decoder().changed(head={"kind": "classes"})).start(),
        "a head that pools speaks of a whole text": lambda: made(kinds.ngram().changed(head={"kind": "classes"})).start(),
        "only one that says something of each token writes": lambda: made(
            kinds.recurrent(source=False).changed(head={"kind": "vector"})
        ).start(),
        "and patches have none": lambda: autoencoder().encoder(
            Inputs(torch.zeros(2, 3, 3, dtype=torch.float64), types=torch.zeros(2, 3, dtype=torch.long))
        ),
        "a row holds several: give span": lambda: made(kinds.decoder(position={"kind": "rope", "scaling": {"kind": "dynamic"}}))(
            Inputs(tokens(), segments=tokens())
        ),
        "segments must be given for source and target": lambda: pair(Inputs(tokens(), segments=tokens()), tokens()),
        "segments must be given at every step or at none": lambda: decoder.step(
            Inputs(tokens(), segments=tokens()), decoder.step(tokens(), decoder.start())[1]
        ),
        "the cache holds 4 tokens and is asked to hold 9": lambda: decoder.step(tokens(), decoder.start(capacity=4)),
        "this network needs a source": lambda: made(kinds.recurrent())(tokens()),
        "this network has no encoder": lambda: made(kinds.recurrent(source=False))(tokens(), tokens()),
        r"token 23 is not in the vocabulary of 23 \(0 to 22\)": lambda: decoder(tokens() * 0 + 23),
        "token -1 is not in the vocabulary": lambda: made(kinds.ngram())(tokens() * 0 - 1),
        "tokens are torch.float32, expected whole numbers": lambda: decoder(tokens().float()),
        "type 5 is not in the types of 2": lambda: made(kinds.decoder(embed={"types": 2}))(Inputs(tokens(), types=tokens() * 0 + 5)),
        "there is nothing to read": lambda: decoder(tokens()[:, :0]),
        "given a list, expected tokens as a tensor": lambda: decoder([[1, 2]]),
        "2 targets for 3 sources": lambda: pair(tokens(), tokens(3)),
        "the state holds 2 texts and is given the next tokens of 3": lambda: decoder.step(
            tokens(3), decoder.step(tokens(), decoder.start())[1]
        ),
        "this network does not read by": lambda: made(kinds.ngram())(Inputs(tokens(), segments=tokens())),
        "which this network does not read": lambda: made(kinds.recurrent(source=False))(Inputs(tokens(), segments=tokens())),
        "a vector of whole numbers": lambda: decoder.step(tokens(), decoder.start())[1].select(torch.tensor([True, False])),
        r"tokens have shape \(2, 9, 1\), expected batch × length": lambda: decoder(tokens()[..., None]),
        r"tokens have shape \(2, 9, 2\)": lambda: made(kinds.ngram())(tokens()[..., None].expand(-1, -1, 2)),
        r"tokens have shape \(2, 9, 3\)": lambda: made(kinds.recurrent(source=False))(tokens()[..., None].expand(-1, -1, 3)),
        "given a NoneType, expected the state that start": lambda: decoder.step(tokens(), None),
        "given a NgramState, expected the state": lambda: decoder.step(tokens(), made(kinds.ngram()).start()),
        "given a TransformerState, expected the state": lambda: made(kinds.ngram()).step(tokens(), decoder.start()),
        "given a list, expected the state": lambda: made(kinds.recurrent(source=False)).step(tokens(), []),
        "the state was started by another model": lambda: decoder.step(tokens(), made(kinds.decoder(layers=3)).start()),
        "was started by another model; start one here": lambda: pair.step(tokens(), decoder.start()),
        "state was started by another": lambda: made(kinds.ngram()).step(tokens(), made(kinds.ngram(order=5)).start()),
        "started by another model": lambda: made(kinds.recurrent()).step(tokens(), made(kinds.recurrent(source=False)).start()),
        "positions is torch.bool, expected a tensor of whole numbers": lambda: Inputs(tokens(), positions=FALSE),
        "segments is torch.complex64": lambda: Inputs(tokens(), segments=torch.zeros(2, 9, dtype=torch.complex64)),
        "what is restored is whole": lambda: autoencoder()(
            Inputs(torch.zeros(2, 6, 3, dtype=torch.float64), padding=torch.zeros(2, 6, dtype=torch.bool)),
            torch.zeros(2, 3, 3, dtype=torch.float64),
        ),
        "1 targets for 2 sources": lambda: autoencoder()(
            torch.zeros(1, 6, 3, dtype=torch.float64), torch.zeros(2, 3, 3, dtype=torch.float64)
        ),
        "patches are torch.float32, the model is torch.float64": lambda: autoencoder()(torch.zeros(1, 6, 3), torch.zeros(1, 3, 3)),
        "and a head for each token writes": lambda: autoencoder(causal=True).start(torch.zeros(2, 3, 3, dtype=torch.float64)),
        "capacity is 1000000000, expected": lambda: decoder.start(capacity=10**9),
        "a packed row holds several texts": lambda: made(kinds.encoder().changed(head={"kind": "classes"}))(
            Inputs(tokens(), segments=tokens())
        ),
        "given a int, expected a model": lambda: record(5).__enter__(),
        "begins beyond the numbers that torch.float16 has": lambda: build(kinds.decoder().changed(init={"std": 1e6}), dtype=torch.float16),
        "capacity is 0, expected the number of tokens": lambda: decoder.start(capacity=0),
        "capacity is -1, expected": lambda: made(kinds.ngram()).start(capacity=-1),
        "capacity is 2.5, expected": lambda: made(kinds.recurrent()).start(tokens(), capacity=2.5),
        "knows neither token types nor positions": lambda: made(kinds.ngram())(Inputs(tokens(), types=tokens())),
        "an n-gram model knows neither": lambda: made(kinds.ngram())(Inputs(tokens(), positions=tokens())),
        "the text was started for 20 tokens, and a step says 30": lambda: decoder.step(
            Inputs(tokens(), span=30), decoder.start(capacity=20)
        ),
        "positions were given for packed documents; give them at every step": lambda: decoder.step(
            Inputs(tokens(), segments=tokens()),
            decoder.step(Inputs(tokens(), segments=tokens(), positions=tokens()), decoder.start())[1],
        ),
        "there is no row": lambda: decoder.step(tokens(), decoder.start())[1].select(torch.tensor([5])),
        "reads no source": lambda: made(kinds.ngram())(tokens(), tokens()),
        "start it with a capacity": lambda: made(kinds.decoder(position={"kind": "rope", "scaling": {"kind": "longrope"}})).start(),
    }
    for said, run in refused.items():
        with pytest.raises(ValueError, match=said):
            run()


POSITIONS = [
    {"kind": "sinusoidal"},
    {"kind": "learned", "length": 64},
    {"kind": "rope"},
    {"kind": "alibi"},
    {"kind": "clipped", "clip": 3},
]


@pytest.mark.parametrize("position", POSITIONS, ids=kinds.named)
@pytest.mark.parametrize("room", [None, 20])
def test_given_positions_are_continued_by_the_next_step(position, room):
    model, ids = made(kinds.decoder(position=position)), tokens()
    positions = torch.tensor([[10, 11, 14, 15, 20, 21, 22, 23, 24], [0, 3, 6, 9, 12, 13, 14, 15, 16]])
    whole = model(Inputs(ids, positions=positions))
    _, state = model.step(Inputs(ids[:, :5], positions=positions[:, :5]), model.start(capacity=room))
    for i in range(5, 9):
        logits, state = model.step(ids[:, i : i + 1], state)
        torch.testing.assert_close(logits[:, 0], whole[:, i])


def test_given_positions_are_continued_past_padding():
    model, ids = made(kinds.decoder(position={"kind": "rope"})), tokens()
    positions = torch.tensor([[10, 11, 12, 0, 0, 13, 14, 15, 16], [0, 5, 6, 7, 8, 9, 10, 11, 12]])
    padding = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 0, 0], [0] * 9], dtype=torch.bool)
    whole = model(Inputs(ids, positions=positions, padding=padding))
    _, state = model.step(Inputs(ids[:, :5], positions=positions[:, :5], padding=padding[:, :5]), model.start())
    rest, _ = model.step(ids[:, 5:], state)
    torch.testing.assert_close(rest, whole[:, 5:])


def test_a_recurrent_network_continues_given_positions_too():
    model, ids = made(kinds.recurrent(source=False, position={"kind": "sinusoidal"})), tokens()
    positions = torch.tensor([[10, 11, 14, 15, 20, 21, 22, 23, 24], [0, 3, 6, 9, 12, 13, 14, 15, 16]])
    whole = model(Inputs(ids, positions=positions))
    _, state = model.step(Inputs(ids[:, :5], positions=positions[:, :5]), model.start())
    nothing = Inputs(ids[:, :2], padding=torch.ones(2, 2, dtype=torch.bool))
    _, state = model.step(nothing, state)
    rest, _ = model.step(ids[:, 5:], state)
    torch.testing.assert_close(rest, whole[:, 5:])


def autoencoder(causal=False):
    tower = {"layers": 1, "width": 16, "attention": {"heads": 2}, "position": {"kind": "learned", "length": 6}}
    encoder = tower | {"embed": {"kind": "patches", "pixels": 3}}
    decoder = tower | {"embed": "restored", "mask": {"causal": causal}}
    return made(read_model({"encoder": encoder, "decoder": decoder, "head": {"kind": "pixels", "pixels": 3}}))


def test_padded_patches_are_not_restored_over_real_ones():
    model = autoencoder()
    patches = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    target = torch.zeros(2, 6, 3, dtype=torch.float64)
    places = torch.tensor([[1, 4, 1], [0, 2, 5]])
    padding = torch.tensor([[False, False, True], [False, False, False]])
    both = model(target, Inputs(patches, positions=places, padding=padding))
    alone = model(target[:1], Inputs(patches[:1, :2], positions=places[:1, :2]))
    torch.testing.assert_close(both[:1], alone)
    with pytest.raises(ValueError, match="position 6 is beyond"):
        model(target, Inputs(patches, positions=places + 1))
    with pytest.raises(ValueError, match="position 5 is beyond the text to restore, which has 4"):
        model(target[:, :4], Inputs(patches, positions=places))


def test_positions_below_zero_are_continued_too():
    model, ids, positions = made(kinds.decoder(position={"kind": "rope"})), tokens(), torch.arange(9)[None] - 4
    _, state = model.step(Inputs(ids[:, :4], positions=positions[:, :4]), model.start())
    torch.testing.assert_close(model.step(ids[:, 4:], state)[0], model(Inputs(ids, positions=positions))[:, 4:])


@pytest.mark.parametrize("number", [-1, 0, 1])
def test_it_does_not_matter_whose_number_padding_has(number):
    """Padding between documents, and after a packed prompt that is continued: nobody's position moves."""
    model = made(kinds.decoder(position={"kind": "learned", "length": 9}))
    first, second = tokens(1, 2), tokens(1, 3, seed=5)
    row, padding = torch.cat((first, tokens(1, 1), second), dim=1), torch.tensor([[0, 0, 1, 0, 0, 0]]).bool()
    out = model(Inputs(row, padding=padding, segments=torch.tensor([[0, 0, number, 1, 1, 1]])))
    torch.testing.assert_close(out[:, 3:], model(second))
    prompt = Inputs(row[:, :3], padding=padding[:, :3], segments=torch.tensor([[0, 0, number]]))
    _, state = model.step(prompt, model.start())
    more, _ = model.step(Inputs(second, segments=torch.zeros(1, 3, dtype=torch.long)), state)
    torch.testing.assert_close(more, model(torch.cat((first, second), dim=1))[:, 2:])


def test_what_stands_at_padded_places_chooses_no_angle():
    model = made(kinds.decoder(position={"kind": "rope", "scaling": {"kind": "longrope", "length": 4}}))
    given = Inputs(tokens(1, 3), positions=torch.tensor([[0, 1, 900]]), padding=torch.tensor([[False, False, True]]))
    torch.testing.assert_close(model(given)[:, :2], model(tokens(1, 3)[:, :2]))


def test_relative_positions_go_by_distance():
    model = made(kinds.decoder(position={"kind": "relative", "length": 9}))
    ids = tokens()
    torch.testing.assert_close(model(Inputs(ids, positions=torch.arange(1000, 1009)[None])), model(ids))
    with pytest.raises(ValueError, match="tokens 9 places apart are beyond the relative position table, which reaches 8"):
        model(tokens(length=10))


def test_positions_go_on_over_a_step_with_padding():
    model, ids = made(kinds.decoder(position={"kind": "learned", "length": 20})), tokens()
    whole = model(ids)
    _, state = model.step(ids[:, :5], model.start())
    padding = torch.tensor([[True, False, False], [True, False, False]])
    found, _ = model.step(Inputs(torch.cat((ids[:, :1], ids[:, 5:7]), dim=1), padding=padding), state)
    torch.testing.assert_close(found[:, 1:], whole[:, 5:7])


def test_a_place_before_the_beginning_is_named():
    model = made(
        read_model({"vocab": kinds.VOCAB, "encoder": kinds.tower(), "head": {"kind": "vector", "pool": {"kind": "at", "index": -20}}})
    )
    with pytest.raises(ValueError, match="no token at place -20"):
        model(tokens())


def test_keys_of_another_batch_are_named():
    core, x = DotSpec().build(1, 8, 8), torch.randn(3, 1, 5, 8)
    with pytest.raises(ValueError, match=r"\(3, 1, 5, 8\).*\(1, 1, 5, 8\)"):
        core(x, x[:1], x[:1], mask=Mask(5, 5, x.device), places=Places(torch.arange(5)[None], torch.arange(5)[None]))


def test_a_mask_with_a_prefix_needs_its_length_and_only_a_causal_decoder_writes():
    with pytest.raises(ValueError, match="a prefix mask needs the length of each prefix"):
        made(kinds.decoder(mask={"prefix": True}))(tokens())
    with pytest.raises(ValueError, match="only a decoder with a causal mask"):
        made(kinds.decoder(mask={"causal": False})).start()


def test_padding_takes_no_place_in_a_packed_row():
    model, ids = made(kinds.decoder(position={"kind": "learned", "length": 4})), tokens(1, 10)
    padding = torch.zeros(1, 10, dtype=torch.bool)
    padding[0, 4:] = True
    segments = torch.tensor([[0, 0, 1, 1] + [-1] * 6])
    torch.testing.assert_close(model(Inputs(ids, padding=padding, segments=segments))[:, 2:4], model(ids[:, 2:4]))


def test_what_was_hidden_has_the_shape_of_what_was_seen():
    model = made(kinds.encoder())
    given = Inputs(tokens(), padding=torch.tensor([[False] * 9, [False] * 5 + [True] * 4]))
    with record(model) as seen:
        model(given)
    assert seen[0].seen().shape == (2, 1, 9, 9)


def test_a_document_whose_number_comes_back_is_one_document():
    model, ids = made(kinds.decoder(position={"kind": "sinusoidal"})), tokens(1, 4)
    out = model(Inputs(ids, segments=torch.tensor([[0, 1, 0, 1]])))
    torch.testing.assert_close(out[:, [0, 2]], model(ids[:, [0, 2]]))
    _, state = model.step(Inputs(ids[:, :3], segments=torch.tensor([[0, 1, 0]])), model.start())
    torch.testing.assert_close(model.step(Inputs(ids[:, 3:], segments=torch.tensor([[1]])), state)[0], out[:, 3:])


def test_what_is_no_number_at_a_padded_place_does_not_matter():
    model = autoencoder()
    patches, target = torch.randn(1, 3, 3, dtype=torch.float64), torch.zeros(1, 6, 3, dtype=torch.float64)
    padding = torch.tensor([[False, False, True]])
    spoiled = patches.clone()
    spoiled[0, 2] = torch.nan
    places = torch.tensor([[1, 4, 0]])
    found = [model(target, Inputs(given, positions=places, padding=padding)) for given in (patches, spoiled)]
    assert torch.equal(*found)
