"""Specs: strict frozen pydantic models, kinds registered in slots, `path=value` overrides, one-sentence errors."""

from __future__ import annotations

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, ClassVar, Self, TypeVar, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from manyheads.errors import (
    ConfigError,
    ConfigSyntaxError,
    MissingKeyError,
    OutOfRangeError,
    PartsFileError,
    UnknownKeyError,
    UnknownKindError,
    WrongTypeError,
)

Tree = dict[str, Any]  # a TOML or JSON object: names to values


MAX_COUNT = 1 << 24  # the upper bound of any count: 16,777,216
MAX_VALUE, MIN_POSITIVE = 1e12, 1e-30  # the bounds of any number that must be positive
MAX_DEPTH = 32  # levels of nested tables


def quote(value: Any) -> str:
    """Returns the repr of a value for an error message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python will write
        return "a number of thousands of digits"
    except RecursionError:
        return "a value nested too deep to show"
    return shorten(text, 80)


def shorten(text: str, length: int = 200) -> str:
    """Returns the text for an error message, without what exceeds `length` characters."""
    return text if len(text) <= length else f"{text[: length - 20]} … ({len(text)} characters)"


@contextmanager
def locate_errors(*path: str | int) -> Iterator[None]:
    """Puts `path` before the path of a ConfigError raised inside."""
    try:
        yield
    except ConfigError as error:
        raise error.with_prefix(*path) from None


def field(default: Any, meaning: str, **bounds: Any) -> Any:
    """Declares a field of a spec: its default, its meaning (shown by `manyheads show parts`) and its bounds.

    A field with only a lower bound also gets an upper bound, and a positive field a smallest value, so that a typo is
    reported here and not by a failed allocation or a NaN loss.
    """
    if {"ge", "gt"} & set(bounds) and not {"le", "lt"} & set(bounds):
        bounds["le"] = MAX_COUNT if "ge" in bounds else MAX_VALUE
    if bounds.get("gt") == 0:
        bounds["ge"] = MIN_POSITIVE
        del bounds["gt"]
    return Field(default, description=meaning, **bounds)


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Returns ': did you mean …?' if a known name is similar, and the list of all known names."""
    names = sorted(candidates)
    close = difflib.get_close_matches(word[:80], names, n=1, cutoff=0.5)
    hint = f": did you mean '{close[0]}'?" if close else ""
    return f"{hint} (known: {', '.join(names) or 'none'})"


def unknown_key(name: str, names: Iterable[str], path: Iterable[str | int] = ()) -> UnknownKeyError:
    return UnknownKeyError(f"no field {quote(name)}{did_you_mean(name, names)}", path, name)


class Spec(BaseModel):
    """A frozen table of a model or run file. An unknown key is an error, never ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(cls._validate_or_explain, handler(source))

    @classmethod
    def _validate_or_explain(cls, value: Any, validate: Callable[[Any], Self]) -> Self:
        """Passes pydantic's first error, as a sentence with its path, to the enclosing spec."""
        if isinstance(value, Mapping):
            value = {name: inner for name, inner in value.items() if inner is not False or not cls._is_optional(name)}
        try:
            return validate(value)
        except ValidationError as error:
            raise PydanticCustomError("spec", "{error}", {"error": cls._config_error(error)}) from None

    @classmethod
    def _is_optional(cls, name: str) -> bool:
        """Whether `false` leaves the field out, as TOML has no null: it may be None, and it is not a switch."""
        types = get_args(cls.model_fields[name].annotation) if name in cls.model_fields else ()
        return type(None) in types and bool not in types

    @classmethod
    def _config_error(cls, error: ValidationError) -> ConfigError:
        """Converts pydantic's first error to a ConfigError: where, what was given, what was expected."""
        # a misspelt field is reported before a missing one, because both may be the same field
        first = min(error.errors(), key=lambda detail: {"extra_forbidden": 0, "missing": 2}.get(detail["type"], 1))
        location, context, value = first["loc"], first.get("ctx", {}), first["input"]
        inner = context.get("error")
        if isinstance(inner, ConfigError):
            return inner.with_prefix(*location)
        if first["type"] == "extra_forbidden":
            names = [*cls.model_fields, *(["kind"] if issubclass(cls, Part) else [])]
            return unknown_key(str(location[-1]), names, location[:-1])
        if first["type"] == "missing":
            return MissingKeyError("missing, but required", location)
        if first["type"] == "value_error":
            return ConfigError(str(inner), location)
        # pydantic appends the tried member of a union to the path, which should end at the field
        path = tuple(step for i, step in enumerate(location) if i == 0 or isinstance(step, int))
        expected = EXPECTED.get(first["type"]) or first["msg"].removeprefix("Input should be ")
        error_type: type[ConfigError] = WrongTypeError if first["type"] in EXPECTED else ConfigError
        if first["type"] == "too_short":
            expected, error_type = f"at least {context['min_length']} in the list", OutOfRangeError
        for bound, words in (("ge", "at least"), ("le", "at most"), ("gt", "more than"), ("lt", "less than")):
            if bound in context:
                limit, error_type = context[bound], OutOfRangeError
                expected = f"{words} {limit:g}" if isinstance(limit, float) else f"{words} {limit}"
        return error_type(f"given {quote(value)}, expected {expected}", path)

    @classmethod
    def summary(cls) -> str:
        """Returns the first line of the docstring, which says what a part computes or what a table is."""
        lines = (cls.__dict__.get("__doc__") or "").strip().splitlines()
        return lines[0] if lines else "no formula given"

    def replace(self, **fields: Any) -> Self:
        """Returns a copy with some fields replaced, checked as strictly as the original."""
        return parse(type(self), {name: getattr(self, name) for name in type(self).model_fields} | fields)


# expected types by pydantic's type errors, as a TOML file calls them
EXPECTED = {
    "model_type": "a table",
    "dataclass_type": "a table",
    "dict_type": "a table",
    "tuple_type": "a list",
    "list_type": "a list",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "finite_number": "a finite number",
    "string_too_short": "a non-empty string",
}

SLOTS: dict[str, type[Part]] = {}


class Part(Spec):
    """`class X(Part, slot=…)` defines a slot; `class Y(X, kind=…)` registers an implementation of it."""

    slot: ClassVar[str]
    kind: ClassVar[str]
    default_kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Part]]]
    caption: ClassVar[str]  # its name in a drawing, by default kind and slot; "" to show nothing

    def __init_subclass__(
        cls, *, slot: str = "", default: str = "", kind: str = "", caption: str | None = None
    ) -> None:
        super().__init_subclass__()
        if slot:
            if slot in SLOTS:
                name = SLOTS[slot].__name__
                raise PartsFileError(
                    f"the slot '{slot}' exists; a part of your own is a subclass of {name} with a kind"
                )
            cls.slot, cls.default_kind, cls.kinds = slot, default, {}
            SLOTS[slot] = cls
        elif kind:
            registered = cls.kinds.get(kind)
            names = [(part.__module__, part.__qualname__) for part in (registered or cls, cls)]
            if names[0] != names[1]:  # the same class may be defined again, in a notebook
                raise PartsFileError(f"the slot '{cls.slot}' already has a kind '{kind}'; give yours another name")
            cls.kind, cls.caption = kind, f"{kind} {cls.slot}" if caption is None else caption
            cls.kinds[kind] = cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls.is_kind():
            return super().__get_pydantic_core_schema__(source, handler)
        dump = core_schema.plain_serializer_function_ser_schema(cls._dump, info_arg=True)
        return core_schema.no_info_plain_validator_function(cls.from_config, serialization=dump)

    @staticmethod
    def _dump(part: Part, info: SerializationInfo) -> Tree:
        return part.model_dump(mode="json", exclude_none=info.exclude_none)

    @classmethod
    def is_kind(cls) -> bool:
        """Whether this class is one kind, rather than the slot itself."""
        return cls is not SLOTS.get(getattr(cls, "slot", ""), cls)

    @classmethod
    def from_config(cls, value: Any) -> Self:
        """Returns the part that `"rope"` or `{kind = "rope", theta = 1e6}` describes; a part is returned as it is."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, Mapping):
            raise WrongTypeError(
                f"given {quote(value)}, expected a kind of {cls.slot} or a table with one{did_you_mean('', cls.kinds)}"
            )
        fields = dict(value)
        kind = fields.pop("kind", cls.default_kind)
        if not kind and (close := difflib.get_close_matches("kind", fields, n=1)):
            raise UnknownKeyError(
                f"no field {quote(close[0])}: did you mean 'kind'? (known: {', '.join(sorted(cls.kinds))})",
                key=close[0],
            )
        if not isinstance(kind, str) or kind not in cls.kinds:
            raise UnknownKindError(
                f"no kind {quote(kind)} of {cls.slot}{did_you_mean(str(kind), cls.kinds)}",
                hint="if it is your own part, name its file with --parts; in Python, import it",
            )
        return cast(Self, parse(cls.kinds[kind], fields))

    @model_serializer(mode="wrap")
    def _with_kind(self, serialize: SerializerFunctionWrapHandler) -> Tree:
        return {"kind": self.kind} | cast(Tree, serialize(self))


SpecType = TypeVar("SpecType", bound=Spec)


def parse(spec: type[SpecType], tree: Mapping[str, Any]) -> SpecType:
    """Parses a tree as a spec; an error names the path of the field."""
    tree = copy_tree(tree)
    try:
        return spec.model_validate(tree)
    except ValidationError as error:
        raise spec._config_error(error) from None


def check_names(spec: type[Spec], tree: Mapping[str, Any], *also: str) -> None:
    """Raises if the tree has a field that the spec does not have."""
    names = (*spec.model_fields, *also)
    if unknown := [name for name in tree if name not in names]:
        raise unknown_key(unknown[0], names)


def to_tree(spec: Spec) -> Tree:
    """Returns the spec as a tree with every default; None is left out."""
    return spec.model_dump(mode="json", exclude_none=True)


def to_toml(tree: Tree) -> str:
    import tomli_w

    return tomli_w.dumps(tree)


def to_inline_toml(value: Any) -> str:
    """Formats a value on one line of TOML."""
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{key} = {to_inline_toml(inner)}" for key, inner in value.items()) + " }"
            if value
            else "{}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_inline_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


BARE_WORD = re.compile(r"[./]*[A-Za-z_][\w.+/-]*")  # a word or a path, without quotes


def override(tree: Tree, assignments: Iterable[str]) -> Tree:
    """Returns the tree with overrides such as `decoder.position.theta=1e6` applied; a value is TOML or a bare word."""
    tree = copy_tree(tree)
    for assignment in assignments:
        if not isinstance(assignment, str):
            raise ConfigSyntaxError(f"given {quote(assignment)}, expected an override such as 'decoder.width=64'")
        path, equals, text = assignment.partition("=")
        steps = path.strip().split(".")
        if not equals or not all(steps):
            raise ConfigSyntaxError(f"given {quote(assignment)}, expected path=value, such as decoder.width=64")
        value = _value(text.strip(), assignment)
        if value == text.strip() != text and path == path.strip():  # not written as in TOML, path = value
            raise ConfigSyntaxError(
                f"{quote(text)} in {quote(assignment)} begins or ends with a space; put it in quotes"
            )
        assign(tree, steps, value)
    return tree


def _value(text: str, assignment: str) -> Any:
    if BARE_WORD.fullmatch(text) and text not in ("true", "false", "inf", "nan"):
        return text
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        table = {}
    if set(table) != {"value"}:  # a line break would begin another assignment
        raise ConfigSyntaxError(
            f"{quote(text)} in {quote(assignment)} is neither a TOML value nor a bare word; put a string in quotes"
        )
    return table["value"]


def assign(tree: Any, steps: list[str], value: Any) -> None:
    """Sets the field at a path; a bare kind on the path, "rope", becomes {kind = "rope"}."""
    for depth, step in enumerate(steps[:-1]):
        inner = tree[_index(tree, step, steps)] if isinstance(tree, list) else tree.get(step, {})
        inner = {"kind": inner} if isinstance(inner, str) else {} if inner is True else inner
        if not isinstance(inner, dict | list):
            raise ConfigError(f"given {quote(inner)}, which has no fields to override", steps[: depth + 1])
        tree[_index(tree, step, steps) if isinstance(tree, list) else step] = inner
        tree = inner
    tree[_index(tree, steps[-1], steps) if isinstance(tree, list) else steps[-1]] = value


def _index(items: list[Any], step: str, path: list[str]) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", step) or int(step) >= len(items):
        raise OutOfRangeError(f"{quote(step)} is not an index of a list of {len(items)}, counted from 0", path)
    return int(step)


TOO_DEEP = f"tables are nested more than {MAX_DEPTH} deep"


def copy_tree(value: Any, depth: int = 0) -> Any:
    """Returns a deep copy, so that a spec does not change with the tree it was read from."""
    if depth > MAX_DEPTH:
        raise ConfigError(TOO_DEEP)
    if isinstance(value, Mapping):
        if wrong := [name for name in value if not isinstance(name, str)]:
            raise WrongTypeError(f"the name of a field is {quote(wrong[0])}, expected a string")
        return {name: copy_tree(inner, depth + 1) for name, inner in value.items()}
    return [copy_tree(inner, depth + 1) for inner in value] if isinstance(value, list | tuple) else value


class FrozenTable(dict[str, Any]):
    """A table within a spec, immutable like the spec."""

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a spec is frozen; make a copy with replace(...)")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _raise

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[Tree]]:
        return FrozenTable, (dict(self),)


def make_immutable(value: Any) -> Any:
    """Returns an immutable copy of a tree; a spec in it becomes the tree of the fields that were set."""
    if isinstance(value, Spec):
        value = value.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if value is None:
        raise WrongTypeError("given None, which TOML does not have; leave the field out")
    if isinstance(value, Mapping):
        return FrozenTable({name: make_immutable(inner) for name, inner in value.items()})
    if isinstance(value, list | tuple):
        return tuple(make_immutable(inner) for inner in value)
    if not isinstance(value, str | int | float):
        raise WrongTypeError(f"given {quote(value)}, which TOML does not have")
    return value


def merge_trees(base: Tree, overrides: Tree) -> Tree:
    """Merges `overrides` into `base`: a table without a kind changes a part's fields, one with a kind replaces it."""
    result = dict(base)
    for name, value in overrides.items():
        base_value = {"kind": base[name]} if isinstance(base.get(name), str) else base.get(name)
        refines = isinstance(value, dict) and "kind" not in value and isinstance(base_value, dict)
        result[name] = merge_trees(cast(Tree, base_value), value) if refines else value
    return result


def import_all(package: str) -> None:
    """Imports every module of a package; importing a module registers its parts, metrics or commands."""
    for module in iter_modules(import_module(package).__path__):
        import_module(f"{package}.{module.name}")


def load_parts(path: Path) -> None:
    """Executes a file with the user's own parts, which registers them. Only call it with a path that the user typed."""
    import importlib.util

    if not path.is_file():
        raise PartsFileError(f"--parts: no file {path}")
    name = f"manyheads_user_parts.{path.stem}_{hash(path.resolve()):x}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise PartsFileError(f"--parts: {path} is not a Python file; its name ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module.__name__] = module  # pydantic looks up annotations of the file's specs there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise PartsFileError(f"--parts: {path} raised {reason}", hint="--debug shows where") from error
    for base in SLOTS.values():
        for kind, part in base.kinds.items():
            missing = sorted(getattr(part, "__abstractmethods__", ()))
            if missing:
                raise PartsFileError(f"--parts: the kind '{kind}' of {base.slot} lacks {' and '.join(missing)}")
