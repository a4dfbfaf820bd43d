"""Reads targets for guided attention between tokens from word alignments or dependency arcs."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from manyheads.data.tokenizer import special_tokens_as_text
from manyheads.errors import DataError, RowError
from manyheads.files.tokenizer import encode_texts
from manyheads.spec import did_you_mean, quote

AttentionTargets = NDArray[np.int64]  # N×2: a query token, and a key token it should attend to


def tokens_per_word(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[list[int]]]:
    """Returns the tokens of every word (by white space) of every text; a token belongs to the last word it overlaps."""
    encodings = encode_texts(special_tokens_as_text(tokenizer), texts, add_special_tokens=False)
    return [word_tokens(text, encoding.offsets) for text, encoding in zip(texts, encodings, strict=True)]


def word_tokens(text: str, offsets: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The tokens of every word of a text, by where each token begins and ends; one that is empty belongs to none."""
    spans = [match.span() for match in re.finditer(r"\S+", text)]
    starts, tokens = [start for start, _ in spans], [list[int]() for _ in spans]
    for token, (begin, end) in enumerate(offsets):
        word = bisect_left(starts, end) - 1  # the last word that begins before the token ends
        if begin < end and word >= 0 and begin < spans[word][1]:
            tokens[word].append(token)
    return tokens


def truncate_targets(targets: AttentionTargets, max_query: int | None, max_key: int | None) -> AttentionTargets:
    """Keeps the pairs whose tokens remain when texts are truncated to these lengths; None means no truncation."""
    keep = np.ones(len(targets), bool)
    for column, max_length in enumerate((max_query, max_key)):
        keep &= True if max_length is None else targets[:, column] < max_length
    return targets[keep]


def token_pairs(
    word_pairs: Iterable[tuple[int, int]], query_tokens: list[list[int]], key_tokens: list[list[int]]
) -> AttentionTargets:
    """Converts pairs of words to pairs of tokens, each token of one word with each token of the other."""
    pairs = sorted({(i, j) for query, key in word_pairs for i in query_tokens[query] for j in key_tokens[key]})
    return np.array(pairs, np.int64).reshape(-1, 2)


def targets_from_alignments(
    sources: Sequence[str], targets: Sequence[str], alignments: Sequence[str], tokenizer: Tokenizer
) -> list[AttentionTargets]:
    """Returns (target token, aligned source token) pairs from word pairs such as "0-0 1-2", source-target, from 0."""
    words = tokens_per_word(sources, tokenizer), tokens_per_word(targets, tokenizer)
    return [
        token_pairs(parse_alignment(alignment, len(source), len(target)), target, source)
        for source, target, alignment in zip(*words, alignments, strict=True)
    ]


def parse_alignment(alignment: str, source_words: int, target_words: int) -> list[tuple[int, int]]:
    """Parses an alignment into pairs (target word, source word)."""
    pairs = []
    for piece in alignment.split():
        match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", piece)
        if match is None:
            raise RowError(
                f"{quote(piece)} of the alignment {quote(alignment)} is not a pair of words",
                hint="write source-target, as in 0-0 1-2",
            )
        source, target = int(match[1]), int(match[2])
        if source >= source_words or target >= target_words:
            raise RowError(
                f"{quote(piece)} of the alignment {quote(alignment)} is outside of {source_words} source and "
                f"{target_words} target words, counted from 0"
            )
        pairs.append((target, source))
    return pairs


def targets_from_arcs(
    texts: Sequence[str],
    heads: Sequence[Sequence[int]],
    relations: Sequence[Sequence[str]] | None,
    tokenizer: Tokenizer,
    *,
    toward: str,
    relation: str | None,
) -> list[AttentionTargets]:
    """Pairs each word with its head (toward = "head"), or each head with its dependents; `relation` selects arcs.

    The root, whose head is −1, attends to itself.
    """
    all_relations = {name for row in relations or () for name in row}
    if relation is not None and relation not in all_relations:
        raise DataError(f"no arc has the relation {quote(relation)}{did_you_mean(relation, all_relations)}")
    result = []
    for row, words in enumerate(tokens_per_word(texts, tokenizer)):
        names = None if relations is None else relations[row]
        check_arcs(texts[row], heads[row], names, row=row, words=len(words))
        arcs = [
            (i, int(head))
            for i, head in enumerate(heads[row])
            if relation is None or (names is not None and names[i] == relation)
        ]
        if toward == "head":
            pairs = [(i, i if head < 0 else head) for i, head in arcs]
        else:
            pairs = [(head, i) for i, head in arcs if head >= 0]
        result.append(token_pairs(pairs, words, words))
    return result


def check_arcs(text: str, heads: Sequence[int], names: Sequence[str] | None, *, row: int, words: int) -> None:
    if len(heads) != words or (names is not None and len(names) != words):
        raise RowError(
            f"row {row:,} has {words} words and {len(heads)} arcs, expected one head per word: {quote(text)}"
        )
    if outside := [int(head) for head in heads if not -1 <= head < words]:
        raise RowError(f"row {row:,} has an arc to word {outside[0]}, expected 0 to {words - 1}, or -1 for the root")
