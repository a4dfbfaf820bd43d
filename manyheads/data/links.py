"""Who should look where, token by token: from alignments of words or dependency arcs, for attention that is guided."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from manyheads.data.source import DataError
from manyheads.spec import nearest, quoted

Links = NDArray[np.int64]  # N×2: a token that looks, a token it should look at


def words_of(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[list[int]]]:
    """The tokens of every word of every text; words are what white space separates, and a token belongs to the last it touches."""
    found = []
    for text, encoding in zip(texts, tokenizer.encode_batch(list(texts), add_special_tokens=False), strict=True):
        spans = [match.span() for match in re.finditer(r"\S+", text)]
        starts, tokens = [start for start, _ in spans], [list[int]() for _ in spans]
        for token, (begin, end) in enumerate(encoding.offsets):
            word = bisect_left(starts, end) - 1  # the last that begins before the token ends
            if begin < end and word >= 0 and begin < spans[word][1]:
                tokens[word].append(token)
        found.append(tokens)
    return found


def within(links: Links, looking: int | None, seen: int | None) -> Links:
    """The links between tokens that are left where texts are cut to so many; None for a text that is not."""
    kept = np.ones(len(links), bool)
    for column, most in enumerate((looking, seen)):
        kept &= True if most is None else links[:, column] < most
    return links[kept]


def spread_over(pairs: Iterable[tuple[int, int]], looking: list[list[int]], seen: list[list[int]]) -> Links:
    """Pairs of words as pairs of tokens: each token of one word with each of the other."""
    cells = sorted({(i, j) for one, other in pairs for i in looking[one] for j in seen[other]})
    return np.array(cells, np.int64).reshape(-1, 2)


def aligned(sources: Sequence[str], targets: Sequence[str], alignments: Sequence[str], tokenizer: Tokenizer) -> list[Links]:
    """Target tokens and the source tokens aligned with them, from pairs of words as 0-0 1-2: source, target, counted from 0."""
    links = []
    for source, target, said in zip(words_of(sources, tokenizer), words_of(targets, tokenizer), alignments, strict=True):
        pairs = []
        for piece in said.split():
            match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", piece)
            if match is None:
                raise DataError(
                    f"{quoted(piece)} of the alignment {quoted(said)} is no pair of words; expected source-target, as in 0-0 1-2"
                )
            one, other = int(match[1]), int(match[2])
            if one >= len(source) or other >= len(target):
                counts = f"{len(source)} source and {len(target)} target words"
                raise DataError(f"{quoted(piece)} of the alignment {quoted(said)} is outside of {counts}, which count from 0")
            pairs.append((other, one))
        links.append(spread_over(pairs, target, source))
    return links


def arcs(
    texts: Sequence[str], heads: Sequence[Sequence[int]], relations: Sequence[Sequence[str]] | None, tokenizer: Tokenizer, *,
    toward: str, relation: str | None,
) -> list[Links]:  # fmt: skip
    """Each word and its head, or each head and its dependents; the root, whose head is −1, is its own. With a relation, its arcs alone."""
    known = {one for row in relations or () for one in row}
    if relation is not None and relation not in known:
        raise DataError(f"no arc is of the relation {quoted(relation)}{nearest(relation, known)}")
    links = []
    for row, (words, said) in enumerate(zip(words_of(texts, tokenizer), heads, strict=True)):
        labels = None if relations is None else relations[row]
        if len(said) != len(words) or (labels is not None and len(labels) != len(words)):
            raise DataError(f"row {row:,} has {len(words)} words and {len(said)} arcs; expected a head for each word: {quoted(texts[row])}")
        if wrong := [int(head) for head in said if not -1 <= head < len(words)]:
            raise DataError(f"row {row:,} has an arc to word {wrong[0]}, and words count from 0 to {len(words) - 1}; -1 is the root's")
        pairs = [(i, int(head)) for i, head in enumerate(said) if relation is None or (labels is not None and labels[i] == relation)]
        if toward == "head":
            links.append(spread_over(((i, i if head < 0 else head) for i, head in pairs), words, words))
        else:
            links.append(spread_over(((head, i) for i, head in pairs if head >= 0), words, words))
    return links
