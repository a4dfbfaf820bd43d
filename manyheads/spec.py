"""Parts as data: strict frozen specs, kinds in slots, `path=value` overrides, and errors of one sentence."""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, SerializerFunctionWrapHandler, ValidationError, model_serializer
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Tree = dict[str, Any]


LARGEST = 1 << 24  # of any count in a description: 16,777,216
HIGHEST, SMALLEST = 1e12, 1e-30  # of any number that must be above a bound
DEEPEST = 32  # tables within tables
LONGEST_TOML = 1 << 20


class SpecError(ValueError):
    """A description that cannot be followed: where (a dotted path), what was given, what would work."""

    def __init__(self, message: str, path: Iterable[str | int] = (), key: str = "") -> None:
        self.message, self.path, self.key = message, tuple(path), key  # key: a name there that is not known
        super().__init__(one_line(f"{'.'.join(map(str, self.path))}: {message}" if self.path else message))


def one_line(text: str) -> str:
    """The text as one printable line: what a file or a user wrote must neither break a sentence nor command a terminal."""
    return "".join(c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode() for c in text)


def quoted(value: Any) -> str:
    """A value as an error repeats it: short, whatever was given."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python will write
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]} … ({len(text)} characters)"


@contextmanager
def located(*path: str | int) -> Iterator[None]:
    """Puts a place before the path of whatever goes wrong inside."""
    try:
        yield
    except SpecError as error:
        raise SpecError(error.message, (*path, *error.path), error.key) from None


def field(default: Any, meaning: str, **bounds: Any) -> Any:
    """A spec's field: its default, its meaning in one phrase (shown by `manyheads show parts`), its bounds.

    What has a lower bound and no upper one ends at LARGEST, and what is above 0 begins at SMALLEST: a slip of the keyboard is
    refused here, not by the memory or by a loss that is NaN.
    """
    if {"ge", "gt"} & set(bounds) and not {"le", "lt"} & set(bounds):
        bounds["le"] = LARGEST if "ge" in bounds else HIGHEST
    if bounds.get("gt") == 0:
        bounds["ge"] = SMALLEST
        del bounds["gt"]
    return Field(default, description=meaning, **bounds)


def nearest(word: str, known: Iterable[str]) -> str:
    """': did you mean …?' where something close exists, and in any case the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word[:80], names, n=1, cutoff=0.5)
    hint = f": did you mean '{close[0]}'?" if close else ""
    return f"{hint} (known: {', '.join(names) or 'none'})"


class Spec(BaseModel):
    """A frozen piece of a description. Unknown keys are refused by name, never ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(cls._explained, handler(source))

    @classmethod
    def _explained(cls, value: Any, validate: Callable[[Any], Self]) -> Self:
        """Turns pydantic's first complaint into a sentence and hands it, with its path, to the spec around this one."""
        try:
            return validate(value)
        except ValidationError as error:
            path, sentence, key = cls._complaint(error)
            raise PydanticCustomError("spec", "{sentence}", {"sentence": sentence, "path": path, "key": key}) from None

    @classmethod
    def _complaint(cls, error: ValidationError) -> tuple[tuple[str | int, ...], str, str]:
        """Where, what, and which name is not known there."""
        # what was written wrongly is said before what was not written: it may be the same
        first = min(error.errors(), key=lambda found: {"extra_forbidden": 0, "missing": 2}.get(found["type"], 1))
        where, context, given = first["loc"], first.get("ctx", {}), first["input"]
        if first["type"] == "spec":
            return where + tuple(context["path"]), context["sentence"], context["key"]
        if first["type"] == "extra_forbidden":
            known = [*cls.model_fields, *(["kind"] if issubclass(cls, Part) else [])]
            return where[:-1], f"no field {quoted(where[-1])} here{nearest(str(where[-1]), known)}", str(where[-1])
        if first["type"] == "missing":
            return where, "is required and was not given", ""
        if isinstance(inner := context.get("error"), SpecError):
            return where + inner.path, inner.message, inner.key
        if first["type"] == "value_error":
            return where, str(context["error"]), ""
        # pydantic appends the tried member of a union to the path: the reader's path ends at the field
        named = tuple(step for i, step in enumerate(where) if i == 0 or isinstance(step, int))
        expected = EXPECTED.get(first["type"]) or first["msg"].removeprefix("Input should be ")
        if first["type"] == "too_short":
            expected = f"at least {context['min_length']} in the list"
        for bound, words in (("ge", "at least"), ("le", "at most")):
            if bound in context:
                limit = context[bound]
                expected = f"{words} {limit:g}" if isinstance(limit, float) else f"{words} {limit}"
        return named, f"given {quoted(given)}, expected {expected}", ""

    def changed(self, **fields: Any) -> Self:
        """A copy with some fields replaced, checked as strictly as the original."""
        return parse(type(self), {name: getattr(self, name) for name in type(self).model_fields} | fields)


# pydantic's complaints about types, in the words of a TOML file
EXPECTED = {
    "model_type": "a table", "dataclass_type": "a table", "dict_type": "a table", "tuple_type": "a list", "list_type": "a list",
    "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "a text",
    "finite_number": "a finite number", "string_too_short": "a text that is not empty",
}  # fmt: skip

SLOTS: dict[str, type[Part]] = {}


class Part(Spec):
    """A spec that fills a slot. A direct subclass opens a slot; a subclass of that, with a `kind`, is a choice for it."""

    slot: ClassVar[str]
    kind: ClassVar[str]
    default_kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Part]]]

    def __init_subclass__(cls, *, slot: str = "", default: str = "", kind: str = "") -> None:
        super().__init_subclass__()
        if slot:
            if slot in SLOTS:
                raise SpecError(f"there is a slot '{slot}' already; a part of your own is a subclass of {SLOTS[slot].__name__} with a kind")
            cls.slot, cls.default_kind, cls.kinds = slot, default, {}
            SLOTS[slot] = cls
        elif kind:
            known = cls.kinds.get(kind)
            if known and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):  # a notebook's cell may run again
                raise SpecError(f"the slot '{cls.slot}' already has a kind '{kind}'; give yours another name")
            cls.kind = kind
            cls.kinds[kind] = cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls.is_choice():
            return super().__get_pydantic_core_schema__(source, handler)
        dump = core_schema.plain_serializer_function_ser_schema(lambda part: part.model_dump(mode="json"))
        return core_schema.no_info_plain_validator_function(cls.choose, serialization=dump)

    @classmethod
    def is_choice(cls) -> bool:
        """Whether this class is one kind, rather than the slot that holds them."""
        return cls is not SLOTS.get(getattr(cls, "slot", ""), cls)

    @classmethod
    def choose(cls, value: Any) -> Part:
        """`"rope"`, `{kind = "rope", theta = 1e6}` or a ready part, as the part it describes."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, Mapping):
            raise ValueError(f"given {quoted(value)}, expected a kind of {cls.slot} or a table with one{nearest('', cls.kinds)}")
        fields = dict(value)
        kind = fields.pop("kind", cls.default_kind)
        if not kind and (close := difflib.get_close_matches("kind", fields, n=1)):
            raise SpecError(f"no field {quoted(close[0])} here: did you mean 'kind'? (known: {', '.join(sorted(cls.kinds))})", key=close[0])
        if not isinstance(kind, str) or kind not in cls.kinds:
            raise ValueError(
                f"no kind {quoted(kind)} of {cls.slot}{nearest(str(kind), cls.kinds)}. If it is a part of your own, name its "
                f"file with --parts (in Python: import it first): reading a description never executes code"
            )
        return cls.kinds[kind].model_validate(fields)

    @model_serializer(mode="wrap")
    def _with_kind(self, serialize: SerializerFunctionWrapHandler) -> Tree:
        return {"kind": self.kind} | cast(Tree, serialize(self))

    @classmethod
    def formula(cls) -> str:
        """The first line of the docstring: what the part computes."""
        lines = (cls.__dict__.get("__doc__") or "").strip().splitlines()
        return lines[0] if lines else "no formula given"


SpecType = TypeVar("SpecType", bound=Spec)


def parse(spec: type[SpecType], tree: Mapping[str, Any], *, at: str = "") -> SpecType:
    """The tree as a spec, or one sentence that says what is wrong with it and where."""
    tree = copied(tree)
    try:
        return spec.model_validate(tree)
    except ValidationError as error:
        path, sentence, key = spec._complaint(error)
        raise SpecError(sentence, (at, *path) if at else path, key) from None


def check_names(spec: type[Spec], tree: Mapping[str, Any], *also: str) -> None:
    """Refuses a field that a spec has not, before anything else is made of the tree."""
    known = (*spec.model_fields, *also)
    if unknown := [name for name in tree if name not in known]:
        raise SpecError(f"no field {quoted(unknown[0])} here{nearest(unknown[0], known)}", key=unknown[0])


def to_tree(spec: Spec) -> Tree:
    """The resolved description, every default written out; what is absent is left out."""
    return _without_none(spec.model_dump(mode="json"))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value


def to_toml(tree: Tree) -> str:
    import tomli_w

    return tomli_w.dumps(tree)


def read_toml(path: Path) -> Tree:
    try:
        with path.open("rb") as file:
            data = file.read(LONGEST_TOML + 1)  # a device may never end
        if len(data) > LONGEST_TOML:
            raise SpecError(f"{path} has more than {LONGEST_TOML:,} bytes; no description needs that")
        text = data.decode("utf-8").replace("\r\n", "\n")
    except SpecError:
        raise
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None
    except ValueError:  # a name that no file can have
        raise SpecError(f"cannot read {quoted(str(path))}: no file can have that name") from None
    try:
        return copied(tomllib.loads(text))
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    except RecursionError:
        raise SpecError(f"{path}: {TOO_DEEP}") from None
    except ValueError as error:  # no TOML, or a number of more digits than Python reads
        raise SpecError(f"{path} is not TOML: {error}") from None


@contextmanager
def in_file(path: Path, overrides: Iterable[str] = ()) -> Iterator[None]:
    """Puts the file and its line, or the override, before what is wrong in a description that was read from there."""
    try:
        yield
    except SpecError as error:
        place = tuple(str(step) for step in (*error.path, *([error.key] if error.key else [])))
        changed = [one for one in overrides if place and covers(tuple(one.partition("=")[0].strip().split(".")), place)]
        line = None if changed else line_of(path, tuple(step for step in place if not step.isdigit()))
        if not changed and line is None:
            raise
        raise SpecError(f"{f'-s {changed[-1]}' if changed else f'{path}:{line}'}: {error}") from None


def covers(path: tuple[str, ...], place: tuple[str, ...]) -> bool:
    return place[: len(path)] == path


def line_of(path: Path, place: tuple[str, ...]) -> int | None:
    """The line of a TOML file at which a field, or a table, is first said."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    table: tuple[str, ...] = ()
    begun = 0
    for end in range(1, len(lines) + 1):
        try:
            said = tomllib.loads("\n".join(lines[begun:end]))  # a field, or the head of a table, which may take several lines
        except (ValueError, RecursionError):
            continue
        names = list(paths(said))
        if lines[begun].lstrip().startswith("["):
            table, names = max(names, key=len), [()]
        if place and any(covers(place, (*table, *name)) for name in names):
            return begun + 1
        begun = end
    return None


def paths(value: Any) -> Iterator[tuple[str, ...]]:
    """Of every table and field within a tree; places in lists are passed over."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (name,)
            yield from ((name, *rest) for rest in paths(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner)


BARE_WORD = re.compile(r"[./]*[A-Za-z_][\w.+/-]*")  # a path too


def override(tree: Tree, assignments: Iterable[str]) -> Tree:
    """The tree with `path=value` applied in order; a value is TOML, or a bare word: `decoder.position.theta=1e6`."""
    tree = copied(tree)
    for assignment in assignments:
        if not isinstance(assignment, str):
            raise SpecError(f"an override is a text such as 'decoder.width=64'; given {quoted(assignment)}")
        path, equals, text = assignment.partition("=")
        steps = path.strip().split(".")
        if not equals or not all(steps):
            raise SpecError(f"an override is path=value, such as decoder.width=64; given {quoted(assignment)}")
        _assign(tree, steps, _value(text.strip(), assignment))
    return tree


def _value(text: str, assignment: str) -> Any:
    if BARE_WORD.fullmatch(text) and text not in ("true", "false", "inf", "nan"):
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    if set(parsed) != {"value"}:  # a line break would begin another assignment
        raise SpecError(f"{quoted(text)} in {quoted(assignment)} is neither a TOML value nor a bare word; put a text in quotes")
    return parsed["value"]


def _assign(tree: Any, steps: list[str], value: Any) -> None:
    for depth, step in enumerate(steps[:-1]):
        inner = tree[_index(tree, step, steps)] if isinstance(tree, list) else tree.get(step, {})
        inner = {"kind": inner} if isinstance(inner, str) else {} if inner is True else inner
        if not isinstance(inner, dict | list):
            raise SpecError(f"holds {quoted(inner)}, which has nothing inside to override", steps[: depth + 1])
        tree[_index(tree, step, steps) if isinstance(tree, list) else step] = inner
        tree = inner
    tree[_index(tree, steps[-1], steps) if isinstance(tree, list) else steps[-1]] = value


def _index(items: list[Any], step: str, path: list[str]) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", step) or int(step) >= len(items):
        raise SpecError(f"{quoted(step)} is not a place in a list of {len(items)}; count from 0", path)
    return int(step)


TOO_DEEP = f"tables within tables, more than {DEEPEST} deep; no description needs that"


def copied(value: Any, depth: int = 0) -> Any:
    """A tree of its own, down to the leaves: a spec must not change with what it was read from."""
    if depth > DEEPEST:
        raise SpecError(TOO_DEEP)
    if isinstance(value, Mapping):
        if wrong := [name for name in value if not isinstance(name, str)]:
            raise SpecError(f"{quoted(wrong[0])} stands where the name of a field should, a text")
        return {name: copied(inner, depth + 1) for name, inner in value.items()}
    return [copied(inner, depth + 1) for inner in value] if isinstance(value, list | tuple) else value


class FrozenTable(dict[str, Any]):
    """A table within a spec: like the spec, it does not change."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a spec is frozen; make another with changed(...)")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[Tree]]:
        return FrozenTable, (dict(self),)

    def __deepcopy__(self, memo: Any) -> FrozenTable:
        return self


def frozen(value: Any) -> Any:
    """A tree of plain values that does not change; of a ready part, what was said of it."""
    if isinstance(value, Spec):
        value = _without_none(value.model_dump(mode="json", exclude_unset=True))
    if value is None:
        raise SpecError("given null, which no file can say; leave the field out")
    if isinstance(value, Mapping):
        return FrozenTable({name: frozen(inner) for name, inner in value.items()})
    if isinstance(value, list | tuple):
        return tuple(frozen(inner) for inner in value)
    if not isinstance(value, str | int | float):
        raise SpecError(f"given {quoted(value)}, which no file can say")
    return value


def merged(base: Tree, own: Tree) -> Tree:
    """`own` laid over `base`; a table without a kind refines the part below it, one with a kind replaces it."""
    result = dict(base)
    for name, value in own.items():
        below = {"kind": base[name]} if isinstance(base.get(name), str) else base.get(name)
        refines = isinstance(value, dict) and "kind" not in value and isinstance(below, dict)
        result[name] = merged(cast(Tree, below), value) if refines else value
    return result


def load_parts(path: Path) -> None:
    """Runs a file of the user's own parts, which register themselves. Called only for a path the user typed."""
    import importlib.util

    if not path.is_file():
        raise SpecError(f"--parts: there is no file {path}")
    loader = importlib.util.spec_from_file_location(f"manyheads_user_parts.{path.stem}_{hash(path.resolve()):x}", path)
    if loader is None or loader.loader is None:
        raise SpecError(f"--parts: {path} is not a Python file; its name ends in .py")
    module = importlib.util.module_from_spec(loader)
    sys.modules[module.__name__] = module  # annotations of the file's own specs are looked up there
    try:
        loader.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise SpecError(f"--parts: {path} stopped with {said}; --debug shows where") from error
    for base in SLOTS.values():
        for kind, part in base.kinds.items():
            missing = sorted(getattr(part, "__abstractmethods__", ()))
            if missing:
                raise SpecError(f"--parts: the kind '{kind}' of {base.slot} lacks {' and '.join(missing)}")
