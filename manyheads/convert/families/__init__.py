"""The families, by the name their config gives them: each module has `spec_of(config)` and `table(spec)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from manyheads.convert.weights import Row
from manyheads.model.spec import ModelSpec
from manyheads.spec import nearest

NAMES = ("bert", "gpt2", "llama", "marian", "t5")


class Family(Protocol):
    """A config read as a spec, and the table of weights that a spec implies."""

    def spec_of(self, config: Mapping[str, Any]) -> ModelSpec: ...

    def table(self, spec: ModelSpec) -> Iterator[Row]: ...


def family(model_type: str) -> Family:
    if model_type not in NAMES:
        raise ValueError(f"no family '{model_type}'{nearest(model_type, NAMES)}")
    return cast(Family, import_module(f"{__name__}.{model_type}"))
