"""The claims of the source documents and their errata, from claims.toml, and what shows each of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from manyheads.files.read import read_toml
from manyheads.labs.lab import Lab, all_labs


@dataclass(frozen=True)
class Document:
    """A source document."""

    id: str
    title: str


@dataclass(frozen=True)
class Chapter:
    """A chapter of the labs, with a sentence that introduces it."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Row:
    """A claim, and its source in the documents, such as "S1 1(a)"."""

    id: str
    chapter: str
    claim: str
    source: str
    tests: tuple[str, ...] = ()  # that show it, if no lab does

    def labs(self) -> list[Lab]:
        return [lab for lab in all_labs().values() if self.id in lab.rows]


@dataclass(frozen=True)
class Erratum:
    """A claim that is wrong as its document states it, and what is true instead."""

    id: str
    claim: str
    correction: str
    source: str
    tests: tuple[str, ...] = ()

    def labs(self) -> list[Lab]:
        return [lab for lab in all_labs().values() if self.id in lab.errata]


@dataclass(frozen=True)
class Claims:
    """All claims, by their ids."""

    documents: dict[str, Document]
    chapters: dict[str, Chapter]
    rows: dict[str, Row]
    errata: dict[str, Erratum]


@cache
def read_claims() -> Claims:
    tree = read_toml(Path(__file__).with_name("claims.toml"))

    def read(name: str, kind: Any) -> dict[str, Any]:
        entries = [
            kind(**{k: tuple(v) if k == "tests" else v for k, v in entry.items()}) for entry in tree.get(name, [])
        ]
        assert len({entry.id for entry in entries}) == len(entries), f"an id occurs twice among the {name} tables"
        return {entry.id: entry for entry in entries}

    return Claims(read("document", Document), read("chapter", Chapter), read("row", Row), read("erratum", Erratum))
