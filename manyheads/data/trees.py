"""Sentences and their dependency trees, from .conllu files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

from manyheads.data.source import DataError, FileSpec, Lines, Row
from manyheads.spec import quoted


class Word(NamedTuple):
    """A word, the place of its head, and what it is to that."""

    text: str
    head: int
    relation: str


class ConlluSpec(FileSpec, kind="conllu"):
    """Sentences and their dependency trees, from a .conllu file: words with single spaces between, the head of each, and its relation

    Heads are places from 0, and −1 is that of the root. Of a multiword token (3-4) its words are read, an empty node (5.1) is no
    word; a space within a word becomes _. universaldependencies.org/format.html.
    """

    names: ClassVar[tuple[str, ...]] = ("text", "arcs", "relations")
    each: ClassVar[str] = "sentences"

    def rows(self, path: Path, faults: Counter[str]) -> Iterator[Row]:
        if path.is_dir():
            raise DataError(f"{path} is a folder, expected a .conllu file")
        words: list[Word] = []
        number = 0
        for number, line in Lines(path, self.encoding_errors, self.longest_line, faults):
            if not line.strip():
                yield from sentence(words, f"{path}, line {number:,}")
                words = []
            elif not line.startswith("#"):
                words += self._word(line, len(words) + 1, f"{path}, line {number:,}")
        yield from sentence(words, f"{path}, line {number:,}")

    def _word(self, line: str, number: int, at: str) -> Iterator[Word]:
        """The word of one line, if it holds one, which is then that of this number."""
        cells = line.split("\t")
        if len(cells) != 10:
            raise DataError(f"{at} has {len(cells)} columns, expected 10, separated by tabs: {quoted(line)}")
        place, word, head, relation = cells[0], cells[1], cells[6], cells[7]
        if not place.isdecimal() and all(piece.isdecimal() for piece in re.split("[-.]", place, maxsplit=1)):
            return  # a multiword token, or an empty node
        if place != str(number):
            raise DataError(f"{at} is word {quoted(place)}, expected {number}: words are counted from 1 in each sentence")
        if not word.strip():
            raise DataError(f"{at} has no word in its second column")
        if not (head.isascii() and head.isdecimal() and len(head) < 10) or int(head) == number:
            raise DataError(f"{at} has the head {quoted(head)}, expected the number of another word, or 0 for the root")
        yield Word("_".join(word.split()), int(head) - 1, relation)


def sentence(words: list[Word], at: str) -> Iterator[Row]:
    """A sentence that ends here, if there is one."""
    if outside := [word.head for word in words if word.head >= len(words)]:
        raise DataError(f"{at} ends a sentence of {len(words)} words, and one of them has the head {outside[0] + 1}")
    if words:
        texts, heads, relations = zip(*words, strict=True)
        yield " ".join(texts), heads, relations
