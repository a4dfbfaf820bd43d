"""Published models as data: one TOML file each, with where its numbers come from."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from manyheads.model.spec import ModelSpec, read_model
from manyheads.spec import LARGEST, SpecError, Tree, nearest, override, quoted, read_toml


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
    return model, checked(model.pop("about", {}), target)


def checked(said: object, target: str) -> Tree:
    """What a file says about its model, if it is a title, a source and a context, and nothing else."""
    expected = {"title": str, "source": str, "context": int}
    if not isinstance(said, dict) or any(type(value) is not expected.get(name) for name, value in said.items()):
        raise SpecError(f"[about] in {target} holds {quoted(said)}, expected title and source, texts, and context, a number of tokens")
    if not 1 <= said.get("context", 1) <= LARGEST:
        raise SpecError(f"[about] in {target} has context {said['context']}, expected a number of tokens from 1 to {LARGEST}")
    return said


def read(target: str | Path, *overrides: str) -> ModelSpec:
    """A preset or a TOML file as a spec, with overrides as on the command line: `read("model.toml", "decoder.layers=2")`."""
    if not isinstance(target, str | Path):
        raise SpecError(f"given a {type(target).__name__}, expected the name of a preset or a file; read_model reads a description")
    return read_model(override(describe(str(target))[0], overrides))


def _read(name: str) -> Tree:
    if name not in names():
        raise SpecError(f"no preset {quoted(name)}{nearest(str(name), names())}; a file of your own ends in .toml")
    return read_toml(Path(str(files(__name__))) / f"{name}.toml")
