"""What a model is given: refused in one sentence where it cannot be what was meant."""

from __future__ import annotations

import kinds
import pytest
import torch
from kinds import made, tokens

from manyheads import Inputs

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
            Inputs(tokens(), segments=tokens()), decoder.step(tokens(), decoder.start(batch=2))[1]
        ),
        "the cache holds 4 tokens and is asked to hold 9": lambda: decoder.step(tokens(), decoder.start(batch=2, capacity=4)),
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
            tokens(3), decoder.step(tokens(), decoder.start(batch=2))[1]
        ),
        "this network does not read by": lambda: made(kinds.ngram())(Inputs(tokens(), segments=tokens())),
        "which this network does not read": lambda: made(kinds.recurrent(source=False))(Inputs(tokens(), segments=tokens())),
        "a vector of whole numbers": lambda: decoder.step(tokens(), decoder.start(batch=2))[1].select(torch.tensor([True, False])),
        "there is no row": lambda: decoder.step(tokens(), decoder.start(batch=2))[1].select(torch.tensor([5])),
        "reads no source": lambda: made(kinds.ngram())(tokens(), tokens()),
        "start it with a capacity": lambda: made(kinds.decoder(position={"kind": "rope", "scaling": {"kind": "longrope"}})).start(),
    }
    for said, run in refused.items():
        with pytest.raises(ValueError, match=said):
            run()
