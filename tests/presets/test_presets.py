"""Every preset, field by field, against the config published with its weights, or against the figures of its paper."""

from __future__ import annotations

from pathlib import Path

import pytest
from published import PUBLISHED

from manyheads import presets, read, read_model
from manyheads.convert.families import get_family
from manyheads.convert.match import canonical, differences
from manyheads.labs.chapters.families import PARAMETERS
from manyheads.spec import to_tree

ROOT = Path(__file__).parents[2]
# a preset, the published config it must agree with, and the architecture if the preset has another head
CONFIGS = {
    "albert-base-v2": ("albert-base-v2", "AlbertForSequenceClassification"),
    "bart-base": ("bart-base", "BartForConditionalGeneration"),
    "bert-base": ("bert-base-uncased", "BertForSequenceClassification"),
    "bert-large": ("bert-large-uncased", "BertForSequenceClassification"),
    "distilbert": ("distilbert-base-uncased", "DistilBertModel"),
    "ernie-2.0-base-en": ("ernie-2.0-base-en", "ErnieForSequenceClassification"),
    "gpt-j-6b": ("gpt-j-6b", None),
    "gpt2": ("gpt2", None),
    "gpt2-medium": ("gpt2-medium", None),
    "gpt2-large": ("gpt2-large", None),
    "gpt2-xl": ("gpt2-xl", None),
    "llama-7b": ("llama-7b", None),
    "llama-2-7b": ("Llama-2-7b-hf", None),
    "llama-3-8b": ("Meta-Llama-3-8B", None),
    "mistral-7b": ("Mistral-7B-v0.1", None),
    "phi-2": ("phi-2", None),
    "pythia-70m": ("pythia-70m", None),
    "pythia-410m": ("pythia-410m", None),
    "pythia-6.9b": ("pythia-6.9b", None),
    "roberta-base": ("roberta-base", "RobertaForSequenceClassification"),
    "t5-small": ("t5-small", None),
}
POOLED = {"head": ("vector", "classes")}  # the pooler without the classifier: its fields are compared on their own
# every other field must be equal
ALLOWED = {
    "albert-base-v2": POOLED,
    "bert-base": POOLED,
    "bert-large": POOLED,
    "ernie-2.0-base-en": POOLED,
    "roberta-base": POOLED,
    "bart-base": {"head.bias": ("False", "True")},  # final_logits_bias is a buffer of zeros in the published weights
}
# DistilBERT has dropout after the embeddings and the feed-forward network, not after attention: neither is exactly that
ALLOWED_DROPOUT = {"distilbert": {"encoder.residual.dropout": (0.1, 0.0), "encoder.feedforward.dropout": (0.0, 0.1)}}
# Mistral: table 1 of the paper, the config has the maximum position. RoBERTa: two rows of its table precede position 0
CONTEXTS = {"mistral-7b": 8192, "roberta-base": 512}


def config_of(name):
    published, architecture = CONFIGS[name]
    config = PUBLISHED[published] | ({"architectures": [architecture]} if architecture else {})
    known = get_family(config["model_type"])
    return config, known.spec_of(known.resolve(config, ["lm_head.weight"]))


def dropouts(tree, path=""):
    """Every dropout of a description by its path, those of 0 included."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from dropouts(value, f"{path}{name}.")
        elif name == "dropout":
            yield f"{path}{name}", value


@pytest.mark.parametrize("name", CONFIGS)
def test_a_preset_is_the_model_its_published_config_describes(name):
    _, theirs = config_of(name)
    ours = read(name)
    different = {path: pair for path, *pair in differences(canonical(ours), canonical(theirs))}
    assert different == {path: list(pair) for path, pair in ALLOWED.get(name, {}).items()}
    trees = [{key: value for key, value in to_tree(spec).items() if key != "head"} for spec in (ours, theirs)]
    our_dropouts, their_dropouts = (dict(dropouts(tree)) for tree in trees)
    assert our_dropouts.keys() == their_dropouts.keys()
    pairs = {path: (rate, their_dropouts[path]) for path, rate in our_dropouts.items()}
    different = {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
    assert different == ALLOWED_DROPOUT.get(name, {})
    if ours.head.kind == "vector":  # the pooler: the classifier reads what the preset gives
        pooler, classifier = to_tree(ours.head), to_tree(theirs.head)
        assert all(pooler[field] == classifier[field] for field in ("pool", "dense", "activation"))
        assert pooler["pool"]["kind"] == "first"
        assert (pooler["normalize"], pooler["dense"], pooler["activation"]) == (False, True, "tanh")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_preset_has_the_context_and_the_initial_weights_of_its_published_config(name):
    config, _ = config_of(name)
    context = config.get("max_position_embeddings", config.get("n_positions"))
    assert presets.read_about(name)["context"] == CONTEXTS.get(name, context)
    init = to_tree(read(name).init)
    if config["model_type"] == "t5":
        assert init == {"kind": "fan-in", "factor": config["initializer_factor"]}
    else:
        scaled = config["model_type"] == "gpt2"  # Radford et al. 2019, section 2.3: residual layers are divided by √N
        std = config.get("initializer_range", config.get("init_std"))
        assert init == {"kind": "normal", "std": std, "scaled": scaled}


def vaswani(width, heads, hidden, dropout):
    """Vaswani et al. 2017, table 3, and sections 3.1 to 3.5 and 5.4; about 37000 tokens, section 5.1."""
    stack = {
        "layers": 6,
        "width": width,
        "position": {"kind": "sinusoidal", "join": "add", "layout": "interleaved", "theta": 10000.0},
        "attention": {"kind": "heads", "heads": heads, "size": 64, "bias": False, "output_bias": False},
        "core": {"kind": "dot"},
        "feedforward": {"kind": "mlp", "hidden": hidden, "activation": "relu", "bias": True},
        "norm": {"kind": "layer"},
        "residual": {"kind": "post", "dropout": dropout},
    }
    encoder = stack | {"embed": {"kind": "tokens", "scale": True, "dropout": dropout}, "mask": {"causal": False}}
    embed = {"kind": "shared", "scale": True, "dropout": dropout}
    decoder = stack | {"embed": embed, "mask": {"causal": True}, "cross": True}
    return {"vocab": 37000, "encoder": encoder, "decoder": decoder, "head": "tied", "init": "xavier"}


PAPERS = {
    "transformer-base": vaswani(512, 8, 2048, 0.1),
    "transformer-big": vaswani(1024, 16, 4096, 0.3),
    # Brown et al. 2020, table 2.1: 96 layers, d_model 12288, 96 heads of 128; section 2.1: as GPT-2, d_ff = 4 d_model,
    # n_ctx 2048
    "gpt3-175b": {
        "vocab": 50257,
        "decoder": {
            "layers": 96,
            "width": 12288,
            "embed": {"kind": "tokens"},
            "position": {"kind": "learned", "length": 2048},
            "attention": {"kind": "heads", "heads": 96, "size": 128},
            "core": {"kind": "dot"},
            "mask": {"causal": True},
            "feedforward": {"kind": "mlp", "hidden": 4 * 12288, "activation": "gelu-tanh"},
            "norm": {"kind": "layer", "eps": 1e-5},
            "residual": {"kind": "pre"},
        },
        "head": {"kind": "tied"},
        "init": {"kind": "normal", "std": 0.02, "scaled": True},
    },
    # Bahdanau et al. 2015, appendix A.2.3: n = 1000, m = 620, l = 500, n' = 1000; section 4.1: 30,000 words
    "rnnsearch": {
        "vocab": 30000,
        "recurrent": {
            "cell": "gru",
            "layers": 1,
            "width": 1000,
            "embed": {"kind": "tokens", "size": 620},
            "position": {"kind": "none"},
            "source": True,
            "bidirectional": True,
            "attention": True,
            "core": {"kind": "additive", "size": 1000},
            "readout": {"kind": "maxout", "size": 500},
            "dropout": 0.0,
        },
        "head": {"kind": "untied", "bias": True},
    },
    # He et al. 2022: a ViT as the encoder, mask tokens, a decoder that is shallower and narrower; 8×8 in patches of 2×2
    "mae-tiny": {
        "encoder": {
            "layers": 4,
            "width": 64,
            "embed": {"kind": "patches", "pixels": 2 * 2, "channels": 1},
            "position": {"kind": "learned", "length": 16},
            "attention": {"kind": "heads", "heads": 4},
            "feedforward": {"kind": "mlp", "hidden": 4 * 64, "activation": "gelu"},
            "norm": {"kind": "layer"},
            "residual": {"kind": "pre"},
            "mask": {"causal": False},
        },
        "decoder": {
            "layers": 2,
            "width": 32,
            "embed": {"kind": "mask-tokens"},
            "position": {"kind": "learned", "length": 16},
            "attention": {"kind": "heads", "heads": 4},
            "feedforward": {"kind": "mlp", "hidden": 4 * 32, "activation": "gelu"},
            "norm": {"kind": "layer"},
            "residual": {"kind": "pre"},
            "mask": {"causal": False},
        },
        "head": {"kind": "pixels", "pixels": 2 * 2},
        "init": {"kind": "xavier"},
    },
}
# tokens, or patches, per sequence: rnnsearch-50 reads sentences of 50 words; the 2017 paper gives none
PAPER_CONTEXTS = {"transformer-base": 512, "transformer-big": 512, "gpt3-175b": 2048, "rnnsearch": 50, "mae-tiny": 16}


@pytest.mark.parametrize("name", PAPERS)
def test_a_preset_has_the_figures_of_its_paper(name):
    ours, theirs = read(name), read_model(PAPERS[name])
    assert not list(differences(canonical(ours), canonical(theirs)))
    assert list(dropouts(to_tree(ours))) == list(dropouts(to_tree(theirs)))
    assert ours.init == theirs.init
    assert presets.read_about(name)["context"] == PAPER_CONTEXTS[name]


def test_every_preset_is_held_against_a_published_config_or_a_paper():
    assert sorted([*CONFIGS, *PAPERS]) == sorted(presets.names())
    page, readme = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in ("docs/models.md", "README.md")
    )
    assert f"{len(PARAMETERS)} of the {len(presets.names())} presets" in page
    assert f"{len(CONFIGS)} presets with a Hugging Face architecture" in page
    assert f"{len(presets.names())} presets, {len(CONFIGS)} of them checked field by field" in readme


# claim N2: the position scheme of every family that the source documents name, and the rotated fraction of each head
ROTATED = {
    "gpt-j-6b": 0.25, "llama-7b": 1.0, "llama-2-7b": 1.0, "llama-3-8b": 1.0, "mistral-7b": 1.0, "phi-2": 0.4,
    "pythia-70m": 0.25, "pythia-410m": 0.25, "pythia-6.9b": 0.25,
}  # fmt: skip
LEARNED = ["albert-base-v2", "bert-base", "bert-large", "distilbert", "ernie-2.0-base-en", "gpt2", "gpt2-medium"]
LEARNED += ["gpt2-large", "gpt2-xl", "gpt3-175b", "roberta-base"]


@pytest.mark.parametrize("name", [*ROTATED, *LEARNED])
def test_n2_a_preset_has_the_position_scheme_of_its_family_and_names_its_source(name):
    spec = read(name)
    position = (spec.encoder or spec.decoder).position
    assert (position.kind, getattr(position, "fraction", None)) == (
        ("rope", ROTATED[name]) if name in ROTATED else ("learned", None)
    )
    assert presets.read_about(name)["source"]


def test_n4_the_documentation_says_that_closed_models_cannot_be_loaded():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (line,) = [block for block in text.replace("\n  ", " ").splitlines() if block.startswith("- Closed models")]
    assert all(name in line for name in ("ChatGPT", "Claude", "Gemini", "GPT-4"))
    assert "no preset for them and nothing to load" in line
    assert not {"chatgpt", "claude", "gemini", "gpt-4"} & set(presets.names())
