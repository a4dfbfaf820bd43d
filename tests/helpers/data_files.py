"""Data and tokenizers by their kind, files to read them from, and errors by their code."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from manyheads.data import builtin, conllu, images, prepared, tables  # noqa: F401  (fill the slots)
from manyheads.errors import ManyheadsError
from manyheads.spec import SLOTS, parse


def data_spec(kind, **fields):
    return parse(SLOTS["data"].kinds[kind], fields)


def load_data(kind, **fields):
    return data_spec(kind, **fields).load()


def make_tokenizer(kind, texts=(), **fields):
    return parse(SLOTS["tokenizer"].kinds[kind], fields).make(texts)


def write_file(folder, name, content):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def all_rows(corpus):
    """The rows of all splits, sorted."""
    return sorted(row for rows in corpus.splits.values() for row in rows)


@contextmanager
def refused(code, *values):
    """Expects an error with this code, in one line, that contains these values."""
    with pytest.raises(ManyheadsError) as caught:
        yield caught
    assert caught.value.code == code, caught.value
    assert "\n" not in str(caught.value)
    for value in values:
        assert str(value) in str(caught.value)
