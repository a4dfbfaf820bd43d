"""A model whose first head attends from each word to the one that a function names, for any words."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from manyheads import Checkpoint, build, read_model

WORDS = [f"w{i}" for i in range(12)]


def pointing(target, words=WORDS, *, causal=False, score=30.0):
    """One layer of two heads. The first attends to the word with the number `target` of its own; the other to all."""
    size = len(words)
    stack = {
        "layers": 1, "width": 2 * size, "position": "none", "norm": "none", "residual": "pre", "feedforward": "none",
        "attention": {"kind": "heads", "heads": 2, "bias": False}, "core": {"kind": "dot", "scale": 1.0},
    }  # fmt: skip
    name = "decoder" if causal else "encoder"
    model = build(read_model({"vocab": size, name: stack, "head": "tied"})).eval()
    layers = getattr(model, name)
    attention = layers.layers[0].attention
    with torch.no_grad():
        layers.embed.table.weight.copy_(torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1))
        for projection in (attention.query, attention.key):
            projection.weight.zero_()
        for i in range(size):
            attention.query.weight[target(i), i] = score  # of the first head
            attention.key.weight[i, i] = 1.0
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Checkpoint(model, tokenizer)
