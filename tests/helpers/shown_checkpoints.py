"""Small checkpoints of every architecture for the page, whose tokenizer has a token that looks like HTML."""

from __future__ import annotations

from dataclasses import replace

import torch
from kinds import decoder, encoder, pair, random_model, recurrent
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from manyheads import Checkpoint, build, read_model
from manyheads.convert.hf import native_metadata
from manyheads.model.recording import record
from manyheads.model.spec import ModelSpec

HOSTILE = "<img src=x onerror=alert(1)>"
WORDS = ["[UNK]", "<s>", "</s>", HOSTILE, "the", "cat", "sat", "on", "mat", "un", "##known", "a", "dog", "ran", "."]
TEXT = "the cat sat on the mat . the cat ran"
SPECS = {
    "decoder": decoder(position={"kind": "learned", "length": 64}),
    "encoder": encoder(position={"kind": "learned", "length": 64}),
    "pair": pair(position="sinusoidal"),
    "recurrent": recurrent(),
    "rope": decoder(position="rope"),
    "additive": decoder(core="additive"),
}


def tokenizer():
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")])
    made.add_tokens([AddedToken(HOSTILE, normalized=False)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def checkpoint(name="decoder", *, text=True, spec: ModelSpec | None = None):
    """With a tokenizer, or with ids as numbers."""
    model = random_model(spec or SPECS[name], dtype=torch.float32)
    metadata = native_metadata(model)
    metadata = replace(metadata, config=metadata.config | {"eos_token_id": 2, "decoder_start_token_id": 1})
    return Checkpoint(model, tokenizer() if text else None, metadata)


def long_checkpoint():
    """A decoder for thousands of tokens: positions are rotated, so that their number is not limited."""
    spec = {
        "vocab": 23,
        "decoder": {
            "layers": 1, "width": 16, "attention": {"kind": "heads", "heads": 2}, "position": "rope",
            "feedforward": {"kind": "mlp", "hidden": 16},
        },
    }  # fmt: skip
    model = build(read_model(spec)).eval()
    return Checkpoint(model, None, native_metadata(model))


def image_checkpoint():
    spec = {
        "encoder": {
            "layers": 1, "width": 16, "attention": {"kind": "heads", "heads": 2}, "position": {"kind": "learned", "length": 17},
            "embed": {"kind": "patches", "pixels": 4, "channels": 1, "class_token": True},
            "feedforward": {"kind": "mlp", "hidden": 16},
        },
        "head": {"kind": "classes", "classes": 3, "pool": "mean"},
    }  # fmt: skip
    return Checkpoint(build(read_model(spec)).eval())


def tape_of(shown, text=TEXT):
    """A plain recorded forward pass of one text."""
    ids = torch.tensor([shown.encode_ids([text])[0] if shown.tokenizer else [int(word) for word in text.split()]])
    with record(shown.model) as tape:
        shown.logits(ids)
    return tape


def weights_of(shown, name, head, text=TEXT):
    return tape_of(shown, text).weights(name, head)[0]
