"""Published models as data: one TOML file each, with where its numbers come from."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from manyheads.model.spec import ModelSpec, read_model
from manyheads.spec import SpecError, Tree, nearest, override, quoted, read_toml


@cache
def names() -> tuple[str, ...]:
    folder = Path(str(files(__name__)))
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def preset(name: str) -> Tree:
    """A published model's description, for `read_model`; `about` tells where its numbers come from."""
    return {key: value for key, value in _read(name).items() if key != "about"}


def about(name: str) -> Tree:
    """Title, source and context length of a preset."""
    return dict(_read(name)["about"])


def is_file(target: str) -> bool:
    """Whether a name is meant as a path, rather than a preset."""
    return target.endswith(".toml") or "/" in target


def describe(target: str) -> tuple[Tree, Tree]:
    """A preset by name, or a TOML file: a model's own, or a run's with the model in [model]. And what is said about it."""
    if not is_file(target):
        return preset(target), about(target)
    tree = read_toml(Path(target))
    model = tree.get("model", tree)
    if not isinstance(model, dict):
        raise SpecError(f"[model] in {target} holds {quoted(model)}, expected a table")
    said = model.pop("about", {})
    context = said.get("context", 1) if isinstance(said, dict) else None
    if type(context) is not int or not 1 <= context <= 1 << 24:
        raise SpecError(f"[about] in {target} holds {quoted(said)}, expected a table with title, source and context, a number of tokens")
    return model, said


def read(target: str | Path, *overrides: str) -> ModelSpec:
    """A preset or a TOML file as a spec, with overrides as on the command line: `read("model.toml", "decoder.layers=2")`."""
    return read_model(override(describe(str(target))[0], overrides))


def _read(name: str) -> Tree:
    if name not in names():
        raise SpecError(f"no preset {quoted(name)}: {nearest(str(name), names())}; a file of your own ends in .toml")
    return read_toml(Path(str(files(__name__))) / f"{name}.toml")
