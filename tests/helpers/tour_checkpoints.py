"""A small checkpoint whose tokenizer knows the words of the tour."""

from __future__ import annotations

from dataclasses import replace

import shown_checkpoints
from tokenizers import Tokenizer, models, pre_tokenizers

TEXTS = "the man chased dog big and cat I run a small business went for prefer morning flight"


def tour_checkpoint(name="decoder", **options):
    words = ["[UNK]", "<s>", "</s>", *TEXTS.split()]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return replace(shown_checkpoints.checkpoint(name, **options), tokenizer=made)
