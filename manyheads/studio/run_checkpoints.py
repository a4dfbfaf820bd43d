"""The saved checkpoints of a training run, by their steps; each is loaded when it is shown, and a few are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import UsageError
from manyheads.studio.session import ShownCheckpoint
from manyheads.training.store import list_checkpoints

MAX_LOADED = 3  # besides the initial one


class RunCheckpoints:
    """Checkpoints by their index, from the first step to the last. The initial one is loaded already."""

    def __init__(self, paths: Sequence[Path], initial: Checkpoint, load: Callable[[str], Checkpoint]) -> None:
        assert initial.path is not None
        self.paths, self._load = list(paths), load
        self.initial = [path.name for path in paths].index(initial.path.name)
        self._first = ShownCheckpoint(initial, str(paths[self.initial]))
        self._loaded: OrderedDict[int, ShownCheckpoint] = OrderedDict()
        self._lock = Lock()  # of their order

    @property
    def numbers(self) -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in self.paths]

    @property
    def loaded(self) -> list[Checkpoint]:
        with self._lock:
            return [shown.checkpoint for shown in (self._first, *self._loaded.values())]

    def __getitem__(self, index: int) -> ShownCheckpoint:
        if not 0 <= index < len(self.paths):
            raise UsageError(f"there is no checkpoint {index} of this run, expected 0 to {len(self.paths) - 1}")
        if index == self.initial:
            return self._first
        path = str(self.paths[index])
        shown = self._loaded.get(index) or ShownCheckpoint(self._load(path), path)
        with self._lock:
            self._loaded[index] = shown
            self._loaded.move_to_end(index)
            while len(self._loaded) > MAX_LOADED:
                self._loaded.popitem(last=False)
        return shown

    def use(self, checkpoint: Checkpoint) -> None:
        """Marks one as used, so that those that no page looks at go first."""
        with self._lock:
            for index in [index for index, shown in self._loaded.items() if shown.checkpoint is checkpoint]:
                self._loaded.move_to_end(index)


def find_run_checkpoints(run: str, initial: Checkpoint, load: Callable[[str], Checkpoint]) -> RunCheckpoints | None:
    """The checkpoints of a run's folder, if it has more than one; `load` reads one of them."""
    paths = list_checkpoints(Path(run) / "checkpoints")[::-1]
    is_among_them = initial.path is not None and initial.path.name in [path.name for path in paths]
    return RunCheckpoints(paths, initial, load) if len(paths) > 1 and is_among_them else None
