"""Published models as TOML files, each with the source of its numbers."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from manyheads.errors import OutOfRangeError, UnknownPresetError, WrongTypeError
from manyheads.files.read import read_toml
from manyheads.model.spec import ModelSpec, override_model, read_model
from manyheads.spec import MAX_COUNT, Tree, did_you_mean, quote


@cache
def names() -> tuple[str, ...]:
    folder = Path(str(files(__name__)))
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def preset(name: str) -> Tree:
    """The description of a published model, for `read_model`."""
    return {key: value for key, value in _read(name).items() if key != "about"}


def read_about(name: str) -> Tree:
    """The title, source and context length of a preset."""
    return dict(_read(name)["about"])


def is_path(target: str) -> bool:
    """Whether a target is a path, rather than the name of a preset."""
    return target.endswith(".toml") or "/" in target


def read_description(target: str) -> tuple[Tree, Tree]:
    """The description of a model, from a preset, a TOML file or the [model] table of a run file; and [about]."""
    if not is_path(target):
        return preset(target), read_about(target)
    tree = read_toml(Path(target))
    model = tree.get("model", tree)
    if not isinstance(model, dict):
        raise WrongTypeError(f"[model] in {target} is {quote(model)}, expected a table")
    return model, check_about(model.pop("about", {}), target)


def check_about(table: object, target: str) -> Tree:
    """Checks an [about] table, which may have a title, a source and a context length."""
    types = {"title": str, "source": str, "context": int}
    if not isinstance(table, dict) or any(type(value) is not types.get(name) for name, value in table.items()):
        raise WrongTypeError(
            f"[about] in {target} is {quote(table)}, expected strings title and source, and an integer context"
        )
    if not 1 <= table.get("context", 1) <= MAX_COUNT:
        raise OutOfRangeError(f"context is {table['context']}, expected 1 to {MAX_COUNT} tokens", ("about",))
    return table


def read(target: str | Path, *overrides: str) -> ModelSpec:
    """Reads a preset or a TOML file as a spec, with overrides such as `read("model.toml", "decoder.layers=2")`."""
    if not isinstance(target, str | Path):
        raise WrongTypeError(f"given a {type(target).__name__}, expected a preset or a file; read_model reads a table")
    return read_model(override_model(read_description(str(target))[0], overrides))


def _read(name: str) -> Tree:
    if name not in names():
        raise UnknownPresetError(
            f"no preset {quote(name)}{did_you_mean(str(name), names())}; a file name ends in .toml"
        )
    return read_toml(Path(str(files(__name__))) / f"{name}.toml")
