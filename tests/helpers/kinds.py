"""Every kind of every slot at small sizes, which the invariants run over. A kind that is not listed has its defaults."""

from __future__ import annotations

import torch

from manyheads import Inputs, build, read_model
from manyheads.spec import SLOTS

WIDTH, HEADS, VOCAB, LENGTH = 16, 2, 23, 9

SETTINGS = {
    "core": {
        "dot": [
            {},
            {"temperature": 2.0},
            {"softcap": 3.0},
            {"scale": 1.0},
            {"dropout": 0.3},
            {"dropout": 0.3, "softcap": 3.0},
        ],
        "additive": [{"size": 5}, {"size": 5, "dropout": 0.3}],
        "bilinear": [{}, {"scaled": False}],
        "projected": [{"size": 5}, {"size": 3, "scaled": False}],
        "argmax": [{}, {"heads": [1]}],
        "synthesizer-dense": [{"length": 64}],
        "synthesizer-random": [{"length": 64}],
        "convolution": [{"kernel": 2}, {"kernel": 4, "dropout": 0.3}],
    },
    "position": {
        "sinusoidal": [
            {},
            {"join": "concat"},
            {"join": "multiply"},
            {"layout": "halves"},
            {"join": "concat", "size": 5},
        ],
        "learned": [
            {"length": 64},
            {"length": 64, "join": "concat"},
            {"length": 64, "join": "multiply"},
            {"length": 64, "offset": 2},
        ],
        "relative": [{"length": 64}],
        "clipped": [{"clip": 3}],
        "bucketed": [
            {"buckets": 8, "max_distance": 6},
            {"buckets": 8, "max_distance": 6, "shared": False, "bidirectional": False},
        ],
        "shaw": [{"clip": 3}],
        "rope": [
            {},
            {"layout": "interleaved"},
            {"fraction": 0.5},
            {"scaling": {"kind": "linear", "factor": 3.0}},
            {"scaling": {"kind": "ntk", "factor": 3.0}},
            {"scaling": {"kind": "dynamic", "factor": 3.0, "length": 4}},
            {"scaling": {"kind": "yarn", "factor": 3.0, "length": 4}},
            {"scaling": {"kind": "banded", "factor": 3.0, "length": 16}},
            {"scaling": {"kind": "longrope", "short_factor": [1.0], "long_factor": [2.0], "length": 4}},
        ],
    },
    "attention": {
        "heads": [
            {},
            {"kv_heads": 1},
            {"heads": 4, "kv_heads": 2},
            {"size": 12},
            {"bias": False, "output_bias": False},
            {"qk_norm": "rms"},
        ],
    },
    "feedforward": {
        "mlp": [{"hidden": 8}, {"activation": "relu", "bias": False}],
        "gated": [{"hidden": 8}, {"activation": "gelu", "bias": True}],
    },
    "residual": {},
    "norm": {"layer": [{}, {"bias": False}]},
    "head": {
        "tied": [
            {},
            {"bias": True, "logit_scale": "inverse-sqrt"},
            {"logit_scale": "inverse-sqrt", "learn_logit_scale": True},
        ],
        "masked": [{}, {"scores": "untied"}],
        "classes": [
            {"classes": 3},
            {"classes": 3, "pool": "last"},
            {"pool": "mean", "dense": True},
            {"pool": {"kind": "at", "index": 1}},
        ],
        "vector": [{}, {"pool": "mean", "normalize": True}],
    },
    "cell": {"lstmn": [{}, {"core": {"kind": "bilinear"}}]},
    "readout": {"maxout": [{"size": 6}]},
    "init": {},
}


def choices(slot):
    """Every kind of a slot, with the settings above or its defaults, as a table of a description."""
    kinds = SLOTS[slot].kinds
    return [{"kind": kind, **fields} for kind in kinds for fields in SETTINGS.get(slot, {}).get(kind, [{}])]


def first_choices(slot):
    """The first choice of every kind of a slot."""
    return [next(choice for choice in choices(slot) if choice["kind"] == kind) for kind in SLOTS[slot].kinds]


def kind_id(choice):
    """A choice as the id of a test."""
    inside = ",".join(
        f"{key}={value['kind'] if isinstance(value, dict) else value}" for key, value in choice.items() if key != "kind"
    )
    return f"{choice['kind']}({inside})" if inside else choice["kind"]


def stack(**changes):
    base = {
        "layers": 2,
        "width": WIDTH,
        "attention": {"kind": "heads", "heads": HEADS},
        "feedforward": {"kind": "mlp", "hidden": 24},
    }
    if isinstance(changes.get("attention"), dict):
        changes["attention"] = {"heads": HEADS} | changes["attention"]
    return base | changes


def fits(position, core):
    """Whether a position scheme works with a core; the spec raises an error for the others."""
    needs, core_spec = SLOTS["position"].kinds[position["kind"]].needs, SLOTS["core"].kinds[core["kind"]]
    return all(getattr(core_spec, f"{part}_source") != "none" for part in needs)


def decoder(**changes):
    return read_model({"vocab": VOCAB, "decoder": stack(**changes), "init": {"kind": "normal", "std": 0.3}})


def encoder(**changes):
    return read_model(
        {
            "vocab": VOCAB,
            "encoder": stack(**changes),
            "head": {"kind": "untied"},
            "init": {"kind": "normal", "std": 0.3},
        }
    )


def pair(**changes):
    other = {"like": "encoder", "embed": "shared", "cross": True}
    position = changes.get("position", {})
    if isinstance(position, dict) and position.get("kind") == "bucketed":
        other["position"] = {"bidirectional": False}
    return read_model(
        {"vocab": VOCAB, "encoder": stack(**changes), "decoder": other, "init": {"kind": "normal", "std": 0.3}}
    )


def recurrent(**changes):
    return read_model(
        {"vocab": VOCAB, "recurrent": {"width": WIDTH, **changes}, "init": {"kind": "normal", "std": 0.3}}
    )


def ngram(**changes):
    return read_model({"vocab": VOCAB, "ngram": {"width": WIDTH, **changes}, "init": {"kind": "normal", "std": 0.3}})


def random_model(spec, dtype=torch.float64, seed=1):
    """The model with noise added to every initial weight: an invariant must not hold because a bias is zero."""
    model = build(spec, seed=seed, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return model


def tokens(batch=2, length=LENGTH, seed=3, vocab=VOCAB):
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(ids, counts, side, filler=0):
    """Rows truncated to their counts and padded on one side with a token that must not matter."""
    batch, length = ids.shape
    tokens, padding_mask = torch.full_like(ids, filler), torch.ones(batch, length, dtype=torch.bool)
    for row, count in enumerate(counts):
        real = slice(length - count, length) if side == "left" else slice(0, count)
        tokens[row, real], padding_mask[row, real] = ids[row, :count], False
    return Inputs(tokens, padding_mask=padding_mask)
