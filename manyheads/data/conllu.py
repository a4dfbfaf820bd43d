"""Reads sentences and their dependency trees from .conllu files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

from manyheads.data.source import FileSpec, Row
from manyheads.errors import RowError
from manyheads.spec import quote


class Word(NamedTuple):
    """A word, the position of its head (−1 for the root) and the relation to it."""

    text: str
    head: int
    relation: str


class ConlluSpec(FileSpec, kind="conllu"):
    """Sentences with dependency trees from a .conllu file: words joined by spaces, the head of each word, its relation

    Heads are positions from 0; the head of the root is −1. The words of a multiword token (3-4) are read, empty nodes
    (5.1) are skipped, a space within a word becomes _. universaldependencies.org/format.html.
    """

    row_fields: ClassVar[tuple[str, ...]] = ("text", "arcs", "relations")
    unit: ClassVar[str] = "sentences"

    def read_rows(self, path: Path, warnings: Counter[str]) -> Iterator[Row]:
        words: list[Word] = []
        number = 0
        for number, line in self.lines(path, warnings):
            if not line.strip():
                yield from sentence_row(words, f"{path}, line {number:,}")
                words = []
            elif not line.startswith("#"):
                words += parse_word(line, len(words) + 1, f"{path}, line {number:,}")
        yield from sentence_row(words, f"{path}, line {number:,}")


def parse_word(line: str, number: int, location: str) -> Iterator[Word]:
    """Yields word `number` of a sentence from its line; skips a multiword token and an empty node."""
    cells = line.split("\t")
    if len(cells) != 10:
        raise RowError(f"{location} has {len(cells)} columns, expected 10, separated by tabs: {quote(line)}")
    id_, word, head, relation = cells[0], cells[1], cells[6], cells[7]
    if not id_.isdecimal() and all(piece.isdecimal() for piece in re.split("[-.]", id_, maxsplit=1)):
        return
    if id_ != str(number):
        raise RowError(f"{location} has the id {quote(id_)}, expected {number}: ids count from 1 in each sentence")
    if not word.strip():
        raise RowError(f"{location} has no word in its second column")
    if not (head.isascii() and head.isdecimal() and len(head) < 10) or int(head) == number:
        raise RowError(f"{location} has the head {quote(head)}, expected the id of another word, or 0 for the root")
    yield Word("_".join(word.split()), int(head) - 1, relation)


def sentence_row(words: list[Word], location: str) -> Iterator[Row]:
    """Yields the row of a sentence that ends here, if it has words."""
    if outside := [word.head for word in words if word.head >= len(words)]:
        raise RowError(
            f"{location} ends a sentence of {len(words)} words, and one of them has the head {outside[0] + 1}"
        )
    if words:
        texts, heads, relations = zip(*words, strict=True)
        yield " ".join(texts), heads, relations
