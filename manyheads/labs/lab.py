"""Labs: functions that test a claim and return a finding, registered by a decorator, at three sizes.

    @lab("attention", rows=("A4",), counterexample={"strength": 1.0}, try_next=("--strength 40", "--keys 50"))
    def copying(*, strength: Annotated[float, "length of the query"] = 20.0) -> Finding:
        \"\"\"A strong query copies one value.

        What happens, for a reader who has just met the idea.
        \"\"\"

Its parameters are the flags of `manyheads lab run copying`; a frozen dataclass gives its fields as flags.
`counterexample` has parameters for which the claim is false; a row that stays true with them has its own in
`row_counterexamples`.
"""

from __future__ import annotations

import inspect
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_type_hints

import torch

from manyheads.errors import PartsFileError, UsageError
from manyheads.labs.finding import Finding
from manyheads.model.builder import num_threads
from manyheads.spec import did_you_mean, import_all, quote

Size = Literal["smallest", "quick", "full"]
Parameters = Mapping[str, Any]
OnProgress = Callable[[str, int, int], None]  # what is done, how many, of how many
EXTRA_PARAMETERS = ("seed", "progress")  # which a function takes if it needs them, and which are no flags of a lab
# options of `manyheads lab run` and parameters of `run_lab`, which no parameter of a lab may be named
RESERVED = ("lab", "size", "all", "quick", "full", "jobs", "json", "html", "parts", "help")
TYPES = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
NO_DEFAULT = inspect.Parameter.empty
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

    def check(self, value: Any) -> None:
        """Raises if a value has another type; an integer is a number too."""
        kinds = (int, float) if self.type is float else (self.type,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.type is not bool):
            raise UsageError(f"{self.name} is {quote(value)}, expected {TYPES[self.type]}")


@dataclass(frozen=True)
class Lab:
    """A function that tests a claim, the rows and errata that it judges, and its parameters at each size."""

    function: Callable[..., Finding]
    chapter: str
    rows: tuple[str, ...] = ()
    errata: tuple[str, ...] = ()
    seconds: tuple[float, float] = (0.2, 0.2)  # that it takes, quick and full
    smallest: Parameters = field(default_factory=dict)
    full: Parameters = field(default_factory=dict)
    counterexample: Parameters = field(default_factory=dict)  # for which the claim is false
    row_counterexamples: Mapping[str, Parameters] = field(default_factory=dict)  # of rows that need another one
    try_next: tuple[str, ...] = ()  # flags of two other runs

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
        """The flags: one per parameter, or per field of a parameter that is a dataclass."""
        parameters = list[Parameter]()
        for name, kind, default in self.signature():
            flags = [(name, kind, default)]
            if is_dataclass(kind):
                hints = get_type_hints(kind, include_extras=True)
                flags = [(x.name, hints[x.name], getattr(default, x.name, NO_DEFAULT)) for x in fields(kind)]
            parameters += [read_parameter(self.id, *flag) for flag in flags]
        return parameters

    def signature(self) -> list[tuple[str, Any, Any]]:
        """The name, type and default of each parameter of the function, without `seed` and `progress`."""
        hints = get_type_hints(self.function, include_extras=True)
        parameters = inspect.signature(self.function).parameters
        return [(name, hints.get(name), p.default) for name, p in parameters.items() if name not in EXTRA_PARAMETERS]

    def arguments(self, parameters: Parameters) -> dict[str, Any]:
        """The arguments of the function: parameters, and dataclasses made of those that are their fields."""
        arguments = dict[str, Any]()
        for name, kind, _ in self.signature():
            names = [x.name for x in fields(kind)] if is_dataclass(kind) else None
            arguments[name] = parameters[name] if names is None else kind(**{x: parameters[x] for x in names})
        return arguments

    def parameters_at(self, size: Size) -> dict[str, Any]:
        """The value of every parameter at a size; those of `quick` are the defaults of the function."""
        defaults = {parameter.name: parameter.default for parameter in self.parameters()}
        return {**defaults, **{"smallest": self.smallest, "quick": {}, "full": self.full}[size]}

    def check(self, parameters: Parameters) -> None:
        """Raises if there is no such parameter, or if its value has another type."""
        own_parameters = {parameter.name: parameter for parameter in self.parameters()}
        for name, value in parameters.items():
            if name not in own_parameters:
                raise UsageError(f"{self.id} has no parameter {quote(name)}{did_you_mean(name, own_parameters)}")
            own_parameters[name].check(value)


def read_parameter(lab_id: str, name: str, hint: Any, default: Any) -> Parameter:
    label = f"the parameter {name} of the lab {lab_id}"
    kind, meaning = getattr(hint, "__origin__", None), getattr(hint, "__metadata__", ("",))[0]
    if kind not in TYPES or not meaning or default is NO_DEFAULT:
        raise PartsFileError(f'{label} needs a type, a meaning and a default: Annotated[int, "number of keys"] = 7')
    if name in RESERVED:
        raise PartsFileError(f"{label} needs another name: this one is reserved")
    return Parameter(name, kind, default, meaning)


def docstring(function: Callable[..., Any]) -> str:
    return inspect.getdoc(function) or ""


def lab(chapter: str, **fields: Any) -> Callable[[Callable[..., Finding]], Callable[..., Finding]]:
    """Registers a function as a lab; the fields are those of `Lab`."""

    def register(function: Callable[..., Finding]) -> Callable[..., Finding]:
        new = Lab(function, chapter, **fields)
        if not new.title:
            raise PartsFileError(f"the lab {new.id} needs a docstring: its claim, and an explanation")
        new.parameters()  # raises if one cannot be a flag
        LABS[new.id] = new
        return function

    return register


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises an error unless the value of a parameter is one of a few."""
    if value not in choices:
        raise UsageError(f"{name} is {quote(value)}, expected {' or '.join(map(str, choices))}")


def all_labs() -> Mapping[str, Lab]:
    """Every lab by its id, in the order of the chapters: those of the package, and those of a user's --parts file."""
    from manyheads.labs.claims import read_claims

    import_all("manyheads.labs.chapters")
    order = {chapter: i for i, chapter in enumerate(read_claims().chapters)}
    return dict(sorted(LABS.items(), key=lambda item: order.get(item[1].chapter, len(order))))


def find_lab(name: str) -> Lab:
    labs = all_labs()
    if name not in labs:
        raise UsageError(f"no lab {quote(name)}{did_you_mean(name, labs)}", hint="manyheads lab list")
    return labs[name]


def choose_labs(names: Sequence[str]) -> list[Lab]:
    """The labs of some ids and chapters, in the order of the list; all of them for no name."""
    labs = all_labs()
    ids_and_chapters = {*labs, *(each.chapter for each in labs.values())}
    for name in names:
        if name not in ids_and_chapters:
            raise UsageError(
                f"no lab or chapter {quote(name)}{did_you_mean(name, ids_and_chapters)}", hint="manyheads lab list"
            )
    return [each for each in labs.values() if not names or each.id in names or each.chapter in names]


@dataclass(frozen=True)
class LabRun:
    """A finding, and what reproduces it: the lab, its parameters and the seed. A notebook shows it as a page."""

    lab: Lab
    size: Size
    seed: int
    parameters: Parameters
    finding: Finding
    seconds: float

    @property
    def command(self) -> str:
        """The command that gives this finding."""
        return command_of(self.lab, self.size, self.seed, self.parameters)

    def _repr_html_(self) -> str:
        from manyheads.labs.views.page_html import run_html

        return run_html(self)


def command_of(lab: Lab, size: Size, seed: int, parameters: Parameters) -> str:
    """The command that runs a lab with these parameters."""
    shown: Size = "full" if size == "full" else "quick"
    defaults = lab.parameters_at(shown)
    words = ["manyheads", "lab", "run", lab.id]
    words += ["--full"] if shown == "full" else []
    words += [f"--seed {seed}"] if seed else []
    words += [flag(name, value) for name, value in parameters.items() if value != defaults[name]]
    return " ".join(words)


def flag(name: str, value: Any) -> str:
    """A parameter as an option of the command line."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    return f"--{option} {shlex.quote(text)}"


def run_lab(
    lab: Lab | str, *, size: Size = "quick", seed: int = 0, progress: OnProgress = no_progress, **parameters: Any
) -> LabRun:
    """Runs a lab, by its name, with the parameters of a size (smallest, quick or full) and others by their names.

    It has one thread, so that its numbers depend on the seed and the kind of processor alone. The result has the
    finding with its verdict, and a notebook shows it as a page.
    """
    if isinstance(lab, str):
        lab = find_lab(lab)
    lab.check(parameters)
    all_parameters = lab.parameters_at(size) | parameters
    extra = {"seed": seed, "progress": progress}
    accepted = {name: extra[name] for name in inspect.signature(lab.function).parameters if name in EXTRA_PARAMETERS}
    with num_threads(1), torch.random.fork_rng():
        torch.manual_seed(seed)
        start = time.perf_counter()
        finding = lab.function(**lab.arguments(all_parameters), **accepted)
        seconds = time.perf_counter() - start
    return LabRun(lab, size, seed, all_parameters, finding, seconds)
