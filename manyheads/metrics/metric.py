"""The registry of metrics: a metric is one function with a name, a group and a direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from manyheads.errors import PartsFileError

Function = TypeVar("Function", bound=Callable[..., float])


@dataclass(frozen=True)
class Metric:
    """A function that returns one number, and how that number is shown and compared."""

    name: str
    function: Callable[..., float]
    group: str
    higher_is_better: bool = True
    percent: bool = False  # whether it is a share from 0 to 1, shown in per cent
    decimals: int = 4  # decimals shown for values below 10; larger values have two


METRICS: dict[str, Metric] = {}
UNREGISTERED = Metric("", float, "")  # how values of an unregistered name are shown and compared


def register_metric(
    name: str, group: str, *, higher_is_better: bool = True, percent: bool = False, decimals: int = 4
) -> Callable[[Function], Function]:
    """Registers the decorated function as a metric. The group decides which tasks report it and what it is called with:

    - "text", sequence-to-sequence tasks: outputs and targets, one text per row
    - "classes", classification: the target class of each row, and the probability of every class, rows × classes
    - "ranking", retrieval: the rank of each query's document among all documents, from 1
    - "likelihood", causal language modeling: a `LogLikelihood`
    - any other: what a task of your own passes to `scores`
    """

    def register(function: Function) -> Function:
        other = METRICS[name].function if name in METRICS else function
        same = (other.__module__, other.__qualname__) == (function.__module__, function.__qualname__)
        if not same:  # a notebook cell may run again
            raise PartsFileError(f"there is already a metric '{name}'", hint="give yours another name")
        METRICS[name] = Metric(
            name, function, group, higher_is_better=higher_is_better, percent=percent, decimals=decimals
        )
        return function

    return register


def metric_names(group: str) -> tuple[str, ...]:
    """Returns the metrics of the group, in order of registration."""
    return tuple(name for name, metric in METRICS.items() if metric.group == group)


def scores(group: str, *args: Any) -> dict[str, float]:
    """Computes every metric of the group, in order of registration."""
    return {name: float(METRICS[name].function(*args)) for name in metric_names(group)}


def higher_is_better(name: str) -> bool:
    """Whether a higher value is better; true for a name that is not registered."""
    return METRICS.get(name, UNREGISTERED).higher_is_better


def format_value(name: str, value: float) -> str:
    """Formats a value for tables."""
    metric = METRICS.get(name, UNREGISTERED)
    if metric.percent:
        return f"{value:.1%}"
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{value:,.{2 if abs(value) >= 10 else metric.decimals}f}"
