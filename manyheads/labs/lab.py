"""Labs: functions that test a claim and return a finding, registered by a decorator, at three sizes.

    @lab("attention", rows=("A4",), opposite={"strength": 1.0}, try_next=("--strength 40", "--keys 50"))
    def copying(*, strength: Annotated[float, "length of the query"] = 20.0, seed: int = 0) -> Finding:
        \"\"\"A strong query copies one value.

        What happens, for a reader who has just met the idea.
        \"\"\"

Its parameters are the flags of `manyheads lab run copying`. `opposite` has parameters for which the claim is false.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

import torch

from manyheads.errors import PartsFileError, UsageError
from manyheads.labs.finding import Finding
from manyheads.spec import did_you_mean, import_all, quote

Size = Literal["smallest", "quick", "full"]
Parameters = Mapping[str, Any]
OnProgress = Callable[[str, int, int], None]  # what is done, how many, of how many
OWN_PARAMETERS = ("seed", "progress")
LABS: dict[str, Lab] = {}


def no_progress(name: str, done: int, total: int) -> None:
    """Shows nothing."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a lab, which is a flag on the command line."""

    name: str
    type: type
    default: Any
    meaning: str


@dataclass(frozen=True)
class Lab:
    """A function that tests a claim, the rows and errata that it judges, and its parameters at each size."""

    function: Callable[..., Finding]
    chapter: str
    rows: tuple[str, ...] = ()
    errata: tuple[str, ...] = ()
    seconds: tuple[float, float] = (1.0, 1.0)  # that it takes, quick and full
    smallest: Parameters = field(default_factory=dict)
    full: Parameters = field(default_factory=dict)
    opposite: Parameters = field(default_factory=dict)  # for which the claim is false
    try_next: tuple[str, ...] = ()  # flags of two other runs
    code: Callable[..., Any] | None = None  # the function that a reader is shown; the lab itself if None

    @property
    def id(self) -> str:
        return self.function.__name__.replace("_", "-")

    @property
    def title(self) -> str:
        return docstring(self.function).partition("\n")[0]

    @property
    def text(self) -> str:
        return docstring(self.function).partition("\n")[2].strip()

    def parameters(self) -> list[Parameter]:
        hints = get_type_hints(self.function, include_extras=True)
        signature = inspect.signature(self.function).parameters
        names = [name for name in signature if name not in OWN_PARAMETERS]
        return [
            Parameter(name, hints[name].__origin__, signature[name].default, hints[name].__metadata__[0])
            for name in names
        ]

    def at(self, size: Size) -> Parameters:
        """The parameters of a size that are not the defaults, which are those of `quick`."""
        return {"smallest": self.smallest, "quick": {}, "full": self.full}[size]


def docstring(function: Callable[..., Any]) -> str:
    return inspect.getdoc(function) or ""


def lab(chapter: str, **fields: Any) -> Callable[[Callable[..., Finding]], Callable[..., Finding]]:
    """Registers a function as a lab; the fields are those of `Lab`."""

    def register(function: Callable[..., Finding]) -> Callable[..., Finding]:
        new = Lab(function, chapter, **fields)
        if not new.title:
            raise PartsFileError(f"the lab {new.id} needs a docstring: its claim, and an explanation")
        LABS[new.id] = new
        return function

    return register


def all_labs() -> Mapping[str, Lab]:
    """Every lab by its id: those of the package, and those of a user's --parts file."""
    import_all("manyheads.labs.chapters")
    return LABS


def choose_labs(names: Sequence[str]) -> list[Lab]:
    """The labs of some ids and chapters, in the order of the list; all of them for no name."""
    labs = all_labs()
    known = {*labs, *(each.chapter for each in labs.values())}
    for name in names:
        if name not in known:
            raise UsageError(f"no lab or chapter {quote(name)}{did_you_mean(name, known)}", hint="manyheads lab list")
    return [each for each in labs.values() if not names or each.id in names or each.chapter in names]


@dataclass(frozen=True)
class LabRun:
    """A finding, and what gives it again: the lab, its parameters and the seed."""

    lab: Lab
    parameters: Parameters
    seed: int
    finding: Finding
    seconds: float


def run_lab(
    lab: Lab, *, size: Size = "quick", seed: int = 0, progress: OnProgress = no_progress, **parameters: Any
) -> LabRun:
    """Runs a lab with one thread, so that its numbers depend on the seed and the kind of processor alone."""
    given = {**lab.at(size), **parameters}
    own = {"seed": seed, "progress": progress}
    accepted = {name: own[name] for name in OWN_PARAMETERS if name in inspect.signature(lab.function).parameters}
    with one_thread(), torch.random.fork_rng():
        torch.manual_seed(seed)
        start = time.perf_counter()
        finding = lab.function(**given, **accepted)
        seconds = time.perf_counter() - start
    defaults = {parameter.name: parameter.default for parameter in lab.parameters()}
    return LabRun(lab, defaults | given, seed, finding, seconds)


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
