"""Data and tokenizers by their kind, and files to read them from."""

from __future__ import annotations

from manyheads.data import builtin, conllu, images, texts, tokenized  # noqa: F401  (fill the slots)
from manyheads.spec import SLOTS, parse


def data_spec(kind, **fields):
    return parse(SLOTS["data"].kinds[kind], fields)


def load_data(kind, **fields):
    return data_spec(kind, **fields).load()


def make_tokenizer(kind, corpus=(), **fields):
    return parse(SLOTS["tokenizer"].kinds[kind], fields).make(corpus)


def write_file(folder, name, content):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def all_rows(corpus):
    """The rows of all splits, sorted."""
    return sorted(row for rows in corpus.splits.values() for row in rows)
