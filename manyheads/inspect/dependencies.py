"""Which heads follow dependency relations, coreference or other links between words: each against the best offset."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.data.attention_targets import tokens_per_word
from manyheads.errors import CheckpointTokenizerError, EmptyDataError
from manyheads.model.recording import record

Link = tuple[int, int, str]  # a word, the word that it should attend to, and the name of the relation
Counts = dict[str, Counter[tuple[str, int]]]


@dataclass(frozen=True)
class RelationHead:
    """The head whose highest weight is most often at the linked word, beside the best fixed offset."""

    relation: str
    attention: str
    head: int
    accuracy: float
    offset: int  # in words, from the word to the linked one
    offset_accuracy: float
    count: int  # links of this relation

    @property
    def is_better(self) -> bool:
        """Whether the head is better than the offset, which needs no model."""
        return self.accuracy > self.offset_accuracy


def tree_links(heads: Sequence[int], relations: Sequence[str]) -> list[Link]:
    """The links of a dependency tree in both directions: a word to its head, and the head to the word (relation⁻¹)."""
    links = [
        (word, head, relation) for word, (head, relation) in enumerate(zip(heads, relations, strict=True)) if head >= 0
    ]
    return links + [(head, word, f"{relation}⁻¹") for word, head, relation in links]


def relation_heads(
    checkpoint: Checkpoint, sentences: Iterable[tuple[str, Sequence[Link]]], *, min_count: int = 10
) -> list[RelationHead]:
    """For each relation, the best head of a model with one stack, by how often its highest weight is the linked word.

    `sentences` are texts, whose words are separated by white space, with their links. A word's weight for another is
    the sum over the tokens of the other, and the mean over its own; special tokens and the word itself do not count.
    """
    if checkpoint.tokenizer is None:
        raise CheckpointTokenizerError("relations between words need a tokenizer")
    right: Counts = defaultdict(Counter)
    offsets: dict[str, Counter[int]] = defaultdict(Counter)
    totals: Counter[str] = Counter()
    for text, links in sentences:
        words = len(text.split())
        encoding = checkpoint.encode([text])[0]
        spans = word_tokens(checkpoint, text, encoding)
        usable = [(i, j, relation) for i, j, relation in links if spans[i] and spans[j]]
        if not usable:
            continue
        pooling = torch.zeros(words, len(encoding.ids))
        for word, tokens in enumerate(spans):
            pooling[word, tokens] = 1.0
        with torch.no_grad(), record(checkpoint.model, activations=False) as tape:
            checkpoint.logits(torch.tensor([encoding.ids]))
        for relation, offset in ((relation, j - i) for i, j, relation in usable):
            totals[relation] += 1
            offsets[relation][offset] += 1
        counts = pooling.sum(dim=1, keepdim=True).clamp(min=1)
        for attention in tape:
            by_word = (pooling / counts) @ attention.weights()[0].float().cpu() @ pooling.mT  # H×words×words
            by_word.diagonal(dim1=1, dim2=2).fill_(-1.0)
            highest = by_word.argmax(dim=-1)
            for i, j, relation in usable:
                for head in (highest[:, i] == j).nonzero().flatten().tolist():
                    right[relation][attention.name, head] += 1
    if not totals:
        raise EmptyDataError("the sentences have no links between words that the tokenizer keeps")
    return [
        best_head(relation, right, offsets, totals) for relation, count in totals.most_common() if count >= min_count
    ]


def best_head(relation: str, right: Counts, offsets: dict[str, Counter[int]], totals: Counter[str]) -> RelationHead:
    total = totals[relation]
    (name, head), hits = (right[relation].most_common(1) or [(("", 0), 0)])[0]
    offset, offset_hits = offsets[relation].most_common(1)[0]
    return RelationHead(relation, name, head, hits / total, offset, offset_hits / total, total)


def word_tokens(checkpoint: Checkpoint, text: str, encoding: object) -> list[list[int]]:
    """The indices of the tokens of each word among all tokens of the text, special ones included."""
    (words,) = tokens_per_word([text], checkpoint.tokenizer)
    plain = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]  # type: ignore[attr-defined]
    return [[plain[token] for token in tokens if token < len(plain)] for tokens in words]
