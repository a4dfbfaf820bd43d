"""Models as they are described here: the config holds the description itself, and every weight has its own name."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import Config
from manyheads.convert.families import NO_TOKENS, Family, Task
from manyheads.convert.weights import Row, Same
from manyheads.model.build import outline
from manyheads.model.spec import ModelSpec, read_model
from manyheads.spec import Tree, copied, quoted, to_tree

NAME, ARCHITECTURE = "manyheads", "Model"


class Own(Family):
    """Every model is of this family."""

    def spec_of(self, config: Config) -> ModelSpec:
        tree = config.get("model")
        if not isinstance(tree, dict):
            raise ValueError(f"model in the config is {quoted(tree)}, expected a description")
        return read_model(copied(tree))

    def config_of(self, spec: ModelSpec, architecture: str) -> Tree:
        return {"architectures": [architecture], "model_type": self.model_type} | NO_TOKENS | {"model": to_tree(spec)}


def weights(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    for name, _ in outline(spec).named_parameters():
        yield Same(name, name)


FAMILIES = {NAME: Own(NAME, {}, keys=(), table=weights, tasks={ARCHITECTURE: Task()})}
