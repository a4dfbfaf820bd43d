"""A pytest plugin of `tests/mutants.py`: coverage notes the test during which a line runs, in its process or in others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import coverage
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    os.environ["TEST_CONTEXT"] = item.nodeid  # the context of the processes that the test starts
    coverage.Coverage.current().switch_context(item.nodeid)
    start, failed = time.perf_counter(), item.session.testsfailed
    result = yield
    if item.session.testsfailed > failed:  # it can tell nothing about a fault
        return result
    with Path(os.environ["TEST_DURATIONS"]).open("a") as file:
        file.write(f"{time.perf_counter() - start:.3f} {item.nodeid}\n")
    return result
