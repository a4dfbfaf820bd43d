"""Generated paragraphs with gold links: dependency trees, and what pronouns, tenses and end marks go back to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

NAMES = {"he": ("John", "Peter", "Paul", "Tom"), "she": ("Mary", "Anna", "Jane", "Ruth")}
TIMES = {"past": "yesterday", "present": "today"}
VERBS = {
    "run": {"past": "ran", "present": "runs"},
    "see": {"past": "saw", "present": "sees"},
    "buy": {"past": "bought", "present": "buys"},
    "sell": {"past": "sold", "present": "sells"},
}
NOUNS = ("shop", "school", "farm", "hotel", "bakery")
ADJECTIVES = ("small", "old", "new", "good")
MARKS = {"¶": ".", "•": ";"}  # what begins a paragraph decides what ends its sentences


@dataclass
class Paragraph:
    """Words, the head of each (−1 for the root) and its relation, and further links by their names."""

    words: list[str] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    relations: list[str] = field(default_factory=list)
    links: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def add(self, word: str, relation: str, head: int = -1) -> int:
        self.words.append(word)
        self.heads.append(head)
        self.relations.append(relation)
        return len(self.words) - 1


def pick(rng: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(rng.integers(len(choices)))]


def make_paragraph(rng: np.random.Generator) -> Paragraph:
    """For instance "¶ yesterday old Mary from a farm ran a small shop . there she often bought a good hotel ."."""
    result, mark, tense = Paragraph(), pick(rng, tuple(MARKS)), pick(rng, tuple(TIMES))
    pronoun = pick(rng, tuple(NAMES))
    start, time = result.add(mark, "mark"), result.add(TIMES[tense], "advmod")
    add_adjectives(result, rng, max_count=1)
    subject = result.add(pick(rng, NAMES[pronoun]), "nsubj")
    if rng.random() < 0.5:
        preposition, *_, noun = result.add("from", "case"), *add_noun(result, rng)
        result.heads[noun], result.relations[noun] = subject, "nmod"
        result.heads[preposition] = noun
    verb = add_clause(result, rng, tense, subject, time, start)
    for word in (start, time):
        result.heads[word] = verb
    if rng.random() < 0.5:
        result.add(pick(rng, ("there", "again")), "advmod")
    again = result.add(pronoun, "nsubj")
    result.links.append((again, subject, "pronoun"))
    second = add_clause(result, rng, tense, again, time, start)
    result.heads[second], result.relations[second] = verb, "parataxis"
    if result.words[again - 1] in ("there", "again"):
        result.heads[again - 1] = second
    return result


def add_clause(result: Paragraph, rng: np.random.Generator, tense: str, subject: int, time: int, start: int) -> int:
    """Adds a verb, its object and the mark at the end; returns the verb."""
    name = pick(rng, tuple(VERBS))
    if rng.random() < 0.3:
        result.add("often", "advmod", len(result.words) + 1)
    verb = result.add(VERBS[name][tense], "root")
    result.heads[subject] = verb
    result.links += [(verb, time, "tense")] + [(verb, subject, "subject of run")] * (name == "run")
    *_, noun = add_noun(result, rng)
    result.heads[noun], result.relations[noun] = verb, "obj"
    end = result.add(MARKS[result.words[start]], "punct", verb)
    result.links.append((end, start, "paragraph start"))
    return verb


def add_noun(result: Paragraph, rng: np.random.Generator) -> list[int]:
    """Adds a determiner, up to two adjectives and a noun; returns them, the noun last."""
    words = [result.add("a", "det"), *add_adjectives(result, rng, max_count=2)]
    noun = result.add(pick(rng, NOUNS), "obj")
    for word in words:
        result.heads[word] = noun
    return [*words, noun]


def add_adjectives(result: Paragraph, rng: np.random.Generator, *, max_count: int) -> list[int]:
    """Adds adjectives before a noun or a name that follows."""
    count = int(rng.integers(max_count + 1))
    last = len(result.words) + count
    return [result.add(pick(rng, ADJECTIVES), "amod", last) for _ in range(count)]
