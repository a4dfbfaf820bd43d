"""Which heads follow dependency relations, coreference or other links between words: each against the best offset."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.data.attention_targets import word_tokens
from manyheads.errors import CheckpointTokenizerError, EmptyDataError, UnsupportedError
from manyheads.model.recording import record

Link = tuple[int, int, str]  # a word, the word that it should attend to, and the name of the relation
Counts = dict[str, Counter[tuple[str, int]]]


@dataclass(frozen=True)
class RelationHead:
    """The head whose highest weight is most often at the linked word, beside the best fixed offset."""

    relation: str
    attention: str | None  # None if no head ever has its highest weight there
    head: int | None
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
    check_reads_words(checkpoint)
    right: Counts = defaultdict(Counter)
    offsets: dict[str, Counter[int]] = defaultdict(Counter)
    totals: Counter[str] = Counter()
    for text, links in sentences:
        encoding = checkpoint.encode([text])[0]
        spans = word_tokens(text, encoding.offsets)
        usable = [(i, j, relation) for i, j, relation in links if spans[i] and spans[j]]
        if not usable:
            continue
        for i, j, relation in usable:
            totals[relation] += 1
            offsets[relation][j - i] += 1
        for name, highest in highest_words(checkpoint, encoding.ids, spans):
            for i, j, relation in usable:
                for head in (highest[:, i] == j).nonzero().flatten().tolist():
                    right[relation][name, head] += 1
    if not totals:
        raise EmptyDataError("the sentences have no links between words that the tokenizer keeps")
    return [
        best_head(relation, right, offsets, totals) for relation, count in totals.most_common() if count >= min_count
    ]


def check_reads_words(checkpoint: Checkpoint) -> None:
    if checkpoint.tokenizer is None:
        raise CheckpointTokenizerError("relations between words need a tokenizer")
    if checkpoint.has_source:
        raise UnsupportedError("this needs an encoder or a decoder alone; this model is an encoder-decoder")


@torch.no_grad()
def highest_words(
    checkpoint: Checkpoint, ids: Sequence[int], spans: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the name of each attention, and the other word with the highest weight for each head and word.

    It is −1 for a word that attends to no other word, as the first one under a causal mask.
    """
    pooling = torch.zeros(len(spans), len(ids))
    for word, tokens in enumerate(spans):
        pooling[word, tokens] = 1.0
    counts = pooling.sum(dim=1, keepdim=True).clamp(min=1)
    with record(checkpoint.model, activations=False) as tape:
        checkpoint.logits(torch.tensor([list(ids)]))
    if not len(tape):
        raise UnsupportedError(f"this {checkpoint.spec.architecture} model has no attention")
    for attention in tape:
        by_word = (pooling / counts) @ attention.weights()[0].float().cpu() @ pooling.mT  # H×words×words
        by_word.diagonal(dim1=1, dim2=2).zero_()
        largest, highest = by_word.max(dim=-1)
        yield attention.name, highest.masked_fill(largest == 0, -1)


def best_head(relation: str, right: Counts, offsets: dict[str, Counter[int]], totals: Counter[str]) -> RelationHead:
    total = totals[relation]
    best = right[relation].most_common(1)
    (name, head), hits = best[0] if best else ((None, None), 0)
    offset, offset_hits = offsets[relation].most_common(1)[0]
    return RelationHead(relation, name, head, hits / total, offset, offset_hits / total, total)
