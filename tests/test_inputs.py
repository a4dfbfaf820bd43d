"""What a model is given: refused in one sentence where it cannot be what was meant."""

from __future__ import annotations

import kinds
import pytest
import torch
from kinds import made, tokens

from manyheads import Inputs, read_model

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
        ({"padding": [[False]]}, "padding is list, expected torch.bool"),
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
        "only a decoder with a causal mask writes": lambda: encoder.start(),
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
        "the state has 3 layers, this model 2": lambda: decoder.step(tokens(), made(kinds.decoder(layers=3)).start()),
        "the state holds 4 key heads of 4, this model makes 2 of 8": lambda: decoder.step(
            tokens(), (other := made(kinds.decoder(attention={"heads": 4}))).step(tokens(), other.start())[1]
        ),
        "the state holds 2 key heads of 8, this model makes 1 of 8": lambda: made(kinds.decoder(attention={"groups": 1})).step(
            tokens(), decoder.step(tokens(), decoder.start(capacity=20))[1]
        ),
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


def autoencoder():
    tower = {"layers": 1, "width": 16, "attention": {"heads": 2}, "position": {"kind": "learned", "length": 6}}
    encoder = tower | {"embed": {"kind": "patches", "pixels": 3}}
    decoder = tower | {"embed": "restored", "mask": {"causal": False}}
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
