"""A small English and the same sentences in Turkish, for models that learn them in seconds."""

from __future__ import annotations

from itertools import product

NOUNS = {
    "man": ("adam", "adamı"), "dog": ("köpek", "köpeği"), "cat": ("kedi", "kediyi"),
    "mouse": ("fare", "fareyi"), "child": ("çocuk", "çocuğu"), "bird": ("kuş", "kuşu"),
}  # fmt: skip
ADJECTIVES = {"small": "küçük", "big": "büyük", "red": "kırmızı", "old": "yaşlı"}
VERBS = {"chased": "kovaladı", "saw": "gördü", "liked": "sevdi", "found": "buldu"}
Pair = tuple[list[str], list[str]]


def sentences() -> list[Pair]:
    """Every sentence of a small English, "the small dog chased the man", and the same in Turkish word order."""
    phrases = [([adjective] if adjective else [], noun) for adjective in ("", *ADJECTIVES) for noun in NOUNS]
    pairs = []
    for (first, subject), verb, (second, object_) in product(phrases, VERBS, phrases):
        source = ["the", *first, subject, verb, "the", *second, object_]
        target = [*map(ADJECTIVES.get, first), NOUNS[subject][0], *map(ADJECTIVES.get, second), NOUNS[object_][1]]
        pairs.append((source, [*map(str, target), VERBS[verb]]))
    return pairs
