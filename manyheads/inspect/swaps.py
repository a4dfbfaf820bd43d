"""The difference of two models: overrides that turn one into the other, in steps that are each a valid model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from manyheads.errors import ConfigError
from manyheads.inspect.describe import SCHEMA, format_field, read_target, read_tree, to_row
from manyheads.model.spec import (
    STACKS,
    CrossSpec,
    ModelSpec,
    StackSpec,
    override_model,
    read_model,
    resolve_like,
    with_cross,
)
from manyheads.spec import BARE_WORD, Part, Spec, Tree, parse, to_inline_toml

# the order of the steps: stacks, then parts, then numbers; what is not listed is between parts and numbers
PARTS = ("position", "residual", "norm", "final_norm", "attention", "core", "cross", "mask", "feedforward", "embed")
WIDTHS = ("width", "heads", "kv_heads", "size", "hidden")
NUMBERS = ("init", "dropout", *WIDTHS, "layers", "layer_groups", "pattern", "vocab", "source_vocab")


@dataclass(frozen=True)
class Difference:
    """A field that two models have different values of; None is a field that is not set."""

    path: str
    before: Any
    after: Any
    owner: type[Spec]  # the spec that has the field

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class Change:
    """One field that a step changes, as texts; a part with its formula."""

    path: str
    before: str
    after: str
    before_formula: str
    after_formula: str
    meaning: str


@dataclass(frozen=True)
class Step:
    """Overrides that belong together, because a model with only some of them would not be valid."""

    overrides: tuple[str, ...]
    changes: tuple[Change, ...]


def swaps(model: Tree, goal: ModelSpec) -> list[str]:
    """The overrides after which the description of a model gives the spec `goal`: `override_model(model, swaps)`."""
    return [assignment for step in steps(model, goal) for assignment in step.overrides]


def describe_swaps(start: str, target: str, overrides: list[str]) -> Tree:
    """The steps from a preset, a file or a checkpoint to another, which may have overrides, as plain data."""
    swap_steps = steps(read_tree(start)[0], read_target(target, overrides)[0])
    return {
        "schema": SCHEMA,
        "from": start,
        "to": target,
        "to_overrides": overrides,
        "overrides": [assignment for step in swap_steps for assignment in step.overrides],
        "steps": [asdict(step) for step in swap_steps],
    }


def steps(model: Tree, goal: ModelSpec) -> list[Step]:
    """The steps from the description of a model to the spec `goal`; each of them gives a valid model."""
    spec, result = read_model(model), list[Step]()
    while spec != goal:
        overrides, after = next_step(model, spec, goal)
        result.append(Step(tuple(overrides), tuple(changes(spec, after))))
        model, spec = override_model(model, overrides), after
    return result


def changes(before: ModelSpec, after: ModelSpec) -> Iterator[Change]:
    """What differs between two models, in words."""
    for difference in sorted(both_stacks(list(differences(before, after))), key=rank):
        field = difference.owner.model_fields[difference.name]
        (old, old_formula), (new, new_formula) = (
            describe(difference.before, difference.owner),
            describe(difference.after, difference.owner),
        )
        yield Change(difference.path, old, new, old_formula, new_formula, field.description or "")


# ---------------------------------------------------------------------------------------------------------- differences


def differences(before: Spec, after: Spec, path: str = "") -> Iterator[Difference]:
    """The fields that differ, within parts of the same kind and within tables; another kind is one difference."""
    for name in type(after).model_fields:
        old, new = getattr(before, name), getattr(after, name)
        if old == new:
            continue
        if type(old) is type(new) and isinstance(new, Spec):
            yield from differences(old, new, f"{path}{name}.")
        else:
            yield Difference(path + name, old, new, type(after))


def both_stacks(all_differences: list[Difference]) -> Iterator[Difference]:
    """The same differences; one that encoder and decoder have in common has a short path, which means both."""
    common = dict[tuple[str, str, str], int]()
    for difference in all_differences:
        key = common_key(difference)
        common[key] = common.get(key, 0) + 1
    for difference in all_differences:
        stack, _, rest = difference.path.partition(".")
        if stack not in ("encoder", "decoder") or not rest or common[common_key(difference)] == 1:
            yield difference
        elif stack == "encoder":
            yield Difference(rest, difference.before, difference.after, difference.owner)


def common_key(difference: Difference) -> tuple[str, str, str]:
    stack, _, rest = difference.path.partition(".")
    return (
        (rest if stack in ("encoder", "decoder") else difference.path),
        repr(difference.before),
        repr(difference.after),
    )


def rank(difference: Difference) -> tuple[int, int]:
    """The place of a difference in the order of the steps."""
    if difference.name in STACKS:
        return 0, int(difference.after is None)  # a stack is added before another is removed: it may be a copy
    if difference.name in NUMBERS:
        return 3, NUMBERS.index(difference.name)
    slots = [PARTS.index(name) for name in difference.path.split(".") if name in PARTS]
    return (1, slots[0]) if slots else (2, 0)


def topic(difference: Difference) -> str:
    """What a difference is about; those of one topic are one step, in both stacks."""
    stack, _, rest = difference.path.partition(".")
    path = rest if stack in ("encoder", "decoder") and rest else difference.path
    for names in (("dropout",), WIDTHS):
        if difference.name in names:
            return names[0]
    return path.rpartition(".")[0] or path


def describe(value: Any, owner: type[Spec]) -> tuple[str, str]:
    """A value in words, and the formula of the part that it is or that has it."""
    if isinstance(value, StackSpec):
        return f"{value.layers} layers of width {value.width}", ""
    if isinstance(value, Part):
        return to_row("", value)[1:]
    if isinstance(value, Spec):
        return "as in self-attention" if value == CrossSpec() else to_row("", value)[1], value.summary()
    text = ", ".join(map(format_field, value)) or "none" if isinstance(value, tuple) else format_field(value)
    return text, owner.summary() if issubclass(owner, Part) else ""


# ------------------------------------------------------------------------------------------------------------ overrides


def next_step(model: Tree, spec: ModelSpec, goal: ModelSpec) -> tuple[list[str], ModelSpec]:
    """The overrides of the next step, which are those of one topic or what the first one needs, and the model then."""
    paths = {difference.path for difference in differences(spec, goal)}
    new = [name for name in STACKS if getattr(spec, name) is None]

    def read(overrides: list[str]) -> ModelSpec | None:
        """The model after the overrides, if it is valid and closer to the goal."""
        try:
            after = read_model(override_model(model, overrides))
        except ConfigError:
            return None
        rest = {
            difference.path for difference in differences(after, goal) if difference.path.partition(".")[0] not in new
        }
        return after if rest < paths else None

    topics = {
        to_assignment(difference): topic(difference) for difference in sorted(to_override(model, spec, goal), key=rank)
    }
    first = next(iter(topics))
    for candidate in ([override for override in topics if topics[override] == topics[first]], [first]):
        if after := read(candidate):
            return candidate, after
    needed, before, after = all_overrides(model, list(topics), goal), list[str](), goal
    while needed != before:
        before = needed
        for assignment in reversed(before):
            fewer = [other for other in needed if other != assignment]
            if assignment != first and (smaller := read(fewer)):
                needed, after = fewer, smaller
    return needed, after


def all_overrides(model: Tree, overrides: list[str], goal: ModelSpec) -> list[str]:
    """Overrides that together give the goal: the ones given, if they do."""
    tables = {name: model.get(name) for name in ("encoder", "decoder")}
    # a stack that is like the other follows its changes, unless it is copied first
    copies = [f"{name}.like={table['like']}" for name, table in tables.items() if table and "like" in table]
    fields = {name: getattr(goal, name) for name in ModelSpec.model_fields}
    whole = [f"{name}={to_inline_toml(False if value is None else to_plain(value))}" for name, value in fields.items()]
    for candidate in (overrides, copies + overrides, whole):
        with suppress(ConfigError):
            if read_model(override_model(model, candidate)) == goal:
                return candidate
    raise AssertionError("a spec is read from its own fields")


def to_override(model: Tree, spec: ModelSpec, goal: ModelSpec) -> Iterator[Difference]:
    """The differences to override. A new stack is first a copy of the other one, or has the defaults."""
    result = list[Difference]()
    for difference in differences(spec, goal):
        if difference.path not in STACKS or difference.after is None:
            result.append(difference)
            continue
        other = {"encoder": "decoder", "decoder": "encoder"}.get(difference.path, "")
        if getattr(spec, other, None):
            start, table = {"like": other}, with_cross(resolve_like(model)[other])
        else:
            defaults = {name: field.default for name, field in type(difference.after).model_fields.items()}
            # a table without a kind, which a later override would write, is of the slot's default kind
            parts = {name: part for name, part in defaults.items() if isinstance(part, Part)}
            start = table = {name: part.kind for name, part in parts.items() if part.kind != part.default_kind}
        result.append(Difference(difference.path, None, start, difference.owner))
        result += differences(parse(type(difference.after), table), difference.after, f"{difference.path}.")
    yield from both_stacks(result)


def to_assignment(difference: Difference) -> str:
    """The override that gives a field its new value."""
    if difference.path in STACKS and difference.after and "like" in difference.after:
        return f"{difference.path}.like={difference.after['like']}"
    return f"{difference.path}={to_text(difference.after)}"


def to_text(value: Any) -> str:
    """A value as `-s` takes it: a bare word, or one line of TOML; false for a field that is not set."""
    plain = False if value is None else True if value == CrossSpec() else to_plain(value)
    is_word = isinstance(plain, str) and BARE_WORD.fullmatch(plain) and plain not in ("true", "false", "inf", "nan")
    return str(plain) if is_word else to_inline_toml(plain)


def to_plain(value: Any) -> Any:
    """A value as in a description: a part without its default fields, or its kind alone."""
    if isinstance(value, Part):
        fields = {name: to_plain(inner) for name, inner in value if inner != type(value).model_fields[name].default}
        return {"kind": value.kind, **fields} if fields else value.kind
    if isinstance(value, Spec):
        return {name: to_plain(inner) for name, inner in value if inner is not None}
    if isinstance(value, Mapping):
        return {name: to_plain(inner) for name, inner in value.items()}
    return [to_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
