"""Labels for probes from a .conllu file: the part of speech of a word, or its relation to its head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.data.attention_targets import word_tokens
from manyheads.data.conllu import TaggedSpec
from manyheads.errors import InputLengthError
from manyheads.inspect.probe import Label


def word_labels(
    checkpoint: Checkpoint, path: str | Path, column: Literal["tag", "relation"]
) -> tuple[list[list[int]], Label]:
    """The ids of the sentences of a file, and a label for `probe`; equal sentences are one row, so none tests itself.

    The last token of a word has its label, because a causal model has read the whole word there. The other tokens,
    and the special ones, are left out, as is a word without a part of speech (_), and a sentence that is longer than
    the model has positions.

    Example: `rows, tag = word_labels(checkpoint, "en.conllu", "tag")`, then `probe(checkpoint.model, rows, tag)`.
    """
    labels: dict[tuple[int, ...], dict[int, str]] = {}
    for text, _, relations, tags in TaggedSpec(path=str(path)).read_rows(Path(path), Counter()):
        try:
            encoding = checkpoint.encode([text])[0]
        except InputLengthError:
            continue
        names = zip(word_tokens(text, encoding.offsets), tags if column == "tag" else relations, strict=True)
        labels[tuple(encoding.ids)] = {tokens[-1]: name for tokens, name in names if tokens and name != "_"}

    def label(ids: Sequence[int], index: int) -> str | None:
        return labels[tuple(ids)].get(index)

    return [list(ids) for ids in labels], label
