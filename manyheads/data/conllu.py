"""Reads sentences, their dependency trees and their coreference from .conllu files."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple

from manyheads.data.source import FileSpec, Row
from manyheads.errors import RowError
from manyheads.spec import quote

MAX_OPEN_MENTIONS = 100  # at one word


class Word(NamedTuple):
    """A word, the position of its head (−1 for the root), the relation to it, and its part of speech."""

    text: str
    head: int
    relation: str
    tag: str


class Brackets(NamedTuple):
    """The coreference brackets of a word or an empty node: (e1 begins a mention of e1, e1) ends it, (e1) is both."""

    first: int  # the word that a mention begins with here
    last: int  # and the one that it ends with; an empty node is not a word
    value: str
    location: str


class ConlluSpec(FileSpec, kind="conllu"):
    """Sentences with dependency trees from a .conllu file: words joined by spaces, the head of each word, its relation

    Heads are positions from 0; the head of the root is −1. The words of a multiword token (3-4) are read, empty nodes
    (5.1) are skipped, a space within a word becomes _. universaldependencies.org/format.html.
    """

    row_fields: ClassVar[tuple[str, ...]] = ("text", "arcs", "relations")
    unit: ClassVar[str] = "sentences"

    def read_rows(self, path: Path, warnings: Counter[str]) -> Iterator[Row]:
        words: list[Word] = []
        brackets: list[Brackets] = []
        number = 0
        for number, line in self.lines(path, warnings):
            location = f"{path}, line {number:,}"
            if not line.strip():
                yield from self.sentence_row(words, brackets, location)
                words, brackets = [], []
            elif not line.startswith("#"):
                brackets += read_brackets(line, len(words), location)
                words += parse_word(line, len(words) + 1, location)
        yield from self.sentence_row(words, brackets, f"{path}, line {number:,}")

    def sentence_row(self, words: list[Word], brackets: Sequence[Brackets], location: str) -> Iterator[Row]:
        """Yields the row of a sentence that ends here, if it has words."""
        if outside := [word.head for word in words if word.head >= len(words)]:
            raise RowError(
                f"{location} ends a sentence of {len(words)} words, and one of them has the head {outside[0] + 1}"
            )
        if words:
            texts, heads, relations, _ = zip(*words, strict=True)
            yield " ".join(texts), heads, relations


class TaggedSpec(ConlluSpec):
    """Sentences of a .conllu file with the part of speech of each word as a fourth field."""

    row_fields: ClassVar[tuple[str, ...]] = (*ConlluSpec.row_fields, "tags")

    def sentence_row(self, words: list[Word], brackets: Sequence[Brackets], location: str) -> Iterator[Row]:
        for row in super().sentence_row(words, brackets, location):
            yield *row, [word.tag for word in words]


class CoreferenceSpec(ConlluSpec):
    """Sentences of a .conllu file with their coreference: links (word, earlier word, name) as a fourth field."""

    row_fields: ClassVar[tuple[str, ...]] = (*ConlluSpec.row_fields, "links")

    def sentence_row(self, words: list[Word], brackets: Sequence[Brackets], location: str) -> Iterator[Row]:
        for row in super().sentence_row(words, brackets, location):
            yield *row, coreference_links(words, brackets)


def parse_word(line: str, number: int, location: str) -> Iterator[Word]:
    """Yields word `number` of a sentence from its line; skips a multiword token and an empty node."""
    cells = line.split("\t")
    if len(cells) != 10:
        raise RowError(f"{location} has {len(cells)} columns, expected 10, separated by tabs: {quote(line)}")
    id_, word, tag, head, relation = cells[0], cells[1], cells[3], cells[6], cells[7]
    if not id_.isdecimal() and all(piece.isdecimal() for piece in re.split("[-.]", id_, maxsplit=1)):
        return
    if id_ != str(number):
        raise RowError(f"{location} has the id {quote(id_)}, expected {number}: ids count from 1 in each sentence")
    if not word.strip():
        raise RowError(f"{location} has no word in its second column")
    if not (head.isascii() and head.isdecimal() and len(head) < 10) or int(head) == number:
        raise RowError(f"{location} has the head {quote(head)}, expected the id of another word, or 0 for the root")
    yield Word("_".join(word.split()), int(head) - 1, relation, tag)


# --------------------------------------------------------------------------------------------------------- coreference


def read_brackets(line: str, position: int, location: str) -> Iterator[Brackets]:
    """Yields the value of Entity= in the last column, at the word or the empty node that comes after `position` words.

    It is that of CorefUD, ufal.mff.cuni.cz/corefud: (e1-person-1 begins a mention of the entity e1, e1) ends it.
    """
    id_, _, rest = line.partition("\t")
    values = (item for item in rest.rpartition("\t")[2].split("|") if item.startswith("Entity="))
    for value in values:
        is_word = id_.isdecimal()
        yield Brackets(position, position if is_word else position - 1, value.removeprefix("Entity="), location)


def coreference_links(words: Sequence[Word], brackets: Sequence[Brackets]) -> list[tuple[int, int, str]]:
    """Links from the head word of each mention to that of the previous mention of its entity in the sentence.

    They are named coref, and coref:pron as well if the word is a pronoun. The head word of a mention is its first word
    whose head is outside of it; a mention in parts counts with its first part.
    """
    heads: dict[str, set[int]] = defaultdict(set)
    for entity, first, last in find_mentions(brackets):
        outside = (i for i in range(first, last + 1) if not first <= words[i].head <= last)
        heads[entity].update([next(outside, first)] if first <= last else [])  # none if it has only empty nodes
    pairs = sorted((word, earlier) for entity in heads.values() for earlier, word in pairwise(sorted(entity)))
    return [
        (word, earlier, name)
        for word, earlier in pairs
        for name in ("coref", *(["coref:pron"] if words[word].tag == "PRON" else []))
    ]


def find_mentions(brackets: Sequence[Brackets]) -> Iterator[tuple[str, int, int]]:
    """Yields each mention as (entity, first word, last word); raises for brackets that do not match."""
    opened: list[tuple[str, Brackets]] = []
    for bracket in brackets:
        for piece in filter(None, re.split(r"(?<=\))|(?=\()", bracket.value)):
            entity = piece.strip("()").partition("-")[0]
            if not entity or piece.strip("()") == piece or re.search(r"[()]", piece[1:-1]):
                raise RowError(f"{bracket.location} has {quote(piece)} in Entity=, expected (e1, e1) or (e1)")
            if piece.startswith("("):
                opened.append((entity, bracket))
            if len(opened) > MAX_OPEN_MENTIONS:
                raise RowError(f"{bracket.location} is inside of more than {MAX_OPEN_MENTIONS} mentions")
            if piece.endswith(")"):
                yield from close_mention(entity, opened, bracket)
    if opened:
        entity, bracket = opened[-1]
        raise RowError(f"{bracket.location} begins a mention of {quote(entity)} that does not end in its sentence")


def close_mention(entity: str, opened: list[tuple[str, Brackets]], end: Brackets) -> Iterator[tuple[str, int, int]]:
    """Removes the last open mention of an entity, and yields it unless it is a later part of a mention."""
    index = next((i for i in reversed(range(len(opened))) if opened[i][0] == entity), None)
    if index is None:
        raise RowError(f"{end.location} ends a mention of {quote(entity)} that does not begin in its sentence")
    _, start = opened.pop(index)
    name, _, part = entity.partition("[")
    if not part or part.startswith("1/"):
        yield name, start.first, end.last
