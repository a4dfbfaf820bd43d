"""Sentences and their dependency trees, from .conllu files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from manyheads.data.source import DataError, FileSpec, Lines, Row
from manyheads.spec import quoted


class ConlluSpec(FileSpec, kind="conllu"):
    """Sentences and their dependency trees, from a .conllu file: the words with single spaces between, and the place of each word's head

    Places are counted from 0, and −1 is the head of the root. Of a multiword token (3-4) its words are read, an empty node (5.1) is no
    word; a space within a word becomes _. universaldependencies.org/format.html.
    """

    names: ClassVar[tuple[str, ...]] = ("text", "arcs")
    each: ClassVar[str] = "sentences"

    def rows(self, path: Path, faults: Counter[str]) -> Iterator[Row]:
        if path.is_dir():
            raise DataError(f"{path} is a folder, expected a .conllu file")
        words: list[str] = []
        heads: list[int] = []
        number = 0
        for number, line in Lines(path, self.encoding_errors, self.longest_line, faults):
            if not line.strip():
                yield from sentence(words, heads, f"{path}, line {number:,}")
                words, heads = [], []
            elif not line.startswith("#"):
                self._word(line, words, heads, f"{path}, line {number:,}")
        yield from sentence(words, heads, f"{path}, line {number:,}")

    def _word(self, line: str, words: list[str], heads: list[int], at: str) -> None:
        """Adds the word of one line, if it holds one."""
        cells = line.split("\t")
        if len(cells) != 10:
            raise DataError(f"{at} has {len(cells)} columns, expected 10, separated by tabs: {quoted(line)}")
        place, word, head = cells[0], cells[1], cells[6]
        if not place.isdecimal() and all(piece.isdecimal() for piece in re.split("[-.]", place, maxsplit=1)):
            return  # a multiword token, or an empty node
        if place != str(len(words) + 1):
            raise DataError(f"{at} is word {quoted(place)}, expected {len(words) + 1}: words are counted from 1 in each sentence")
        if not word.strip():
            raise DataError(f"{at} has no word in its second column")
        if not (head.isascii() and head.isdecimal() and len(head) < 10) or int(head) == len(words) + 1:
            raise DataError(f"{at} has the head {quoted(head)}, expected the number of another word, or 0 for the root")
        words.append("_".join(word.split()))
        heads.append(int(head) - 1)


def sentence(words: list[str], heads: list[int], at: str) -> Iterator[Row]:
    """A sentence that ends here, if there is one."""
    if outside := [head for head in heads if head >= len(words)]:
        raise DataError(f"{at} ends a sentence of {len(words)} words, and one of them has the head {outside[0] + 1}")
    if words:
        yield " ".join(words), tuple(heads)
