"""Assertions about errors: their code and the values they name, never their wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from manyheads.errors import ManyheadsError


@contextmanager
def raises(code: str, *values: object) -> Iterator[pytest.ExceptionInfo[ManyheadsError]]:
    """The block raises an error with this code, in one line, which contains these values."""
    with pytest.raises(ManyheadsError) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    assert "\n" not in str(caught.value)
    for value in values:
        assert str(value) in str(caught.value), caught.value
