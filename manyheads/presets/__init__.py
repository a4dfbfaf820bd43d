"""Published models as data: one TOML file each, with where its numbers come from."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from manyheads.spec import SpecError, Tree, nearest, read_toml


@cache
def names() -> tuple[str, ...]:
    folder = Path(str(files(__name__)))
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def preset(name: str) -> Tree:
    """The description as it stands in the file: the model's fields and `about`."""
    if name not in names():
        raise SpecError(f"no preset '{name}': {nearest(name, names())}")
    return read_toml(Path(str(files(__name__))) / f"{name}.toml")
