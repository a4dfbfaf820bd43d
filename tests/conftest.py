"""What every test shares: one thread a worker, no time limits inside hypothesis, and `--parts` for invariants on parts of your own."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import hypothesis
import pytest
import torch

from manyheads.model.builder import manual_seed

hypothesis.settings.register_profile("manyheads", deadline=None, max_examples=25, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("manyheads")

# in this order; a file is one worker's, which makes what its tests share once, so a long file that starts late leaves
# the others without work
FIRST = (
    "tests/docs/test_examples.py",
    "tests/training/test_train.py",
    "tests/training/test_faults.py",
    "tests/convert/test_families.py",
    "tests/training/test_suggest.py",
    "tests/convert/test_onnx.py",
    "tests/training/test_comparison.py",
    "tests/model/test_invariants.py",
    "tests/training/",
    "tests/cli/test_chat_command.py",
    "tests/checkpoint/",
    "tests/inspect/",
    "tests/generate/",
    "tests/convert/",
    "tests/cli/",
    "tests/model/test_compile.py",
    "tests/docs/",
    "tests/data/",
)


def pytest_addoption(parser):
    parser.addoption(
        "--parts", action="append", default=[], metavar="FILE.py", help="run the invariants on your own parts too"
    )


def pytest_xdist_auto_num_workers():
    """Twice as many as there are cores: tests of signals and processes wait, and another can work meanwhile."""
    return 2 * (os.cpu_count() or 1)


def pytest_collection_modifyitems(items):
    """The files with the longest tests first, so that no worker is left alone with one of them at the end."""
    ranks = {start: rank for rank, start in enumerate(FIRST)}
    items.sort(key=lambda item: next((ranks[start] for start in FIRST if item.nodeid.startswith(start)), len(FIRST)))


def pytest_collection_finish():
    """What was imported stays, so the garbage collector need not look at it again."""
    gc.enable()
    gc.freeze()


def pytest_configure(config):
    gc.disable()  # until everything is collected: it would look at a million new objects again and again
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `make test &` in a script starts with it ignored
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # in the processes that tests start too: other counts, other bits
    import manyheads.model.spec  # noqa: F401
    from manyheads.spec import load_parts

    for path in config.getoption("--parts"):
        try:
            load_parts(Path(path))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None


@pytest.fixture(autouse=True)
def _seeded():
    manual_seed(0)
