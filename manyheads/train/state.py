"""Where a run is: every number that a checkpoint keeps beside the weights and the optimiser's memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace

from manyheads.convert.files import FileError
from manyheads.spec import Tree, quoted
from manyheads.train.run import GoalSpec

SCHEMA = 1


@dataclass
class State:
    """The one object that a run changes as it goes; the order of samples, dropout and corruption are functions of it and the seed.

    All counts are of the whole run, over all its processes.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0  # of the next batch within the epoch
    rows: int = 0
    tokens: int = 0
    skipped: int = 0  # updates in a row that were NaN or infinite
    looked: int = 0  # the step of the last look at unseen rows
    metrics: dict[str, float | None] = field(default_factory=dict)  # what it saw; None where that was NaN or infinite
    metric: str = ""  # by which looks are compared
    best: float | None = None
    best_step: int = 0
    waited: int = 0  # looks since the best one
    start: str = ""  # the hash of the checkpoint that it began from

    def look(self, metrics: dict[str, float], goal: GoalSpec | None) -> bool:
        """Takes note of a look; whether it is better than the best that is kept, where there is a goal to compare by."""
        self.looked = self.step
        self.metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        if goal is None:
            return False
        if self.metric != goal.metric:
            self.forget_best(goal.metric)
        value = self.metrics[goal.metric]
        if value is None or (self.best is not None and not goal.better(value, self.best)):
            self.waited += 1
            return False
        self.waited = 0
        return True

    def as_best(self) -> State:
        """What a checkpoint says that is the best."""
        return replace(self, best=self.metrics[self.metric], best_step=self.step)

    def forget_best(self, metric: str = "") -> None:
        self.metric, self.best, self.best_step, self.waited = metric, None, 0, 0

    def verdict(self, goal: GoalSpec | None) -> str | None:
        """Why the run ends behind its last look, if it does."""
        if goal is None or self.looked != self.step or self.metric != goal.metric:
            return None
        value = self.metrics[goal.metric]
        if value is not None and goal.reached(value):
            return "goal"
        return "patience" if goal.patience is not None and self.waited >= goal.patience else None

    def to_tree(self) -> Tree:
        return {"schema": SCHEMA} | asdict(self)

    @classmethod
    def from_tree(cls, tree: Tree) -> State:
        """As a checkpoint has it; what it does not say is as at the beginning."""
        known = {one.name for one in fields(cls)}
        if tree.get("schema") != SCHEMA or (wrong := sorted(set(tree) - known - {"schema"})):
            what = f"a field {quoted(wrong[0])}" if tree.get("schema") == SCHEMA else f"schema {quoted(tree.get('schema'))}"
            raise FileError(f"trainer.json has {what}, which this version does not know")
        return cls(**{name: value for name, value in tree.items() if name != "schema"})
