"""Where a run is: every number that a checkpoint keeps beside the weights and the optimiser's memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from manyheads.convert.files import FileError
from manyheads.spec import Tree, quoted

SCHEMA = 1


@dataclass
class State:
    """The one object that a run changes as it goes; the order of samples, dropout and corruption are functions of it and the seed."""

    step: int = 0
    epoch: int = 0
    index: int = 0  # of the next batch within the epoch, counted over all processes
    tokens: int = 0
    skipped: int = 0  # updates in a row that were no numbers

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
