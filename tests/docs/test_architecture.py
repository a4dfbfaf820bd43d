"""docs/architecture.md: its layers are those of the imports in the code, and the files that its drawings name exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "manyheads"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def layers():
    """The layer of each room, as the table has it."""
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", TEXT, re.M)
    return {room: int(layer) for layer, rooms in rows for room in re.findall(r"`(\w+)`", rooms)}


def room_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("manyheads."):
            yield node.module.split(".")[1]


def test_the_table_of_layers_is_that_of_the_imports():
    layer = layers()
    paths = [path for path in PACKAGE.rglob("*.py") if room_of(path) not in ("__init__", "__main__")]
    assert {room_of(path) for path in paths} == set(layer)
    for path in paths:
        for other in imported_rooms(path):
            assert other == room_of(path) or layer[other] < layer[room_of(path)], f"{path} imports {other}"


def test_the_drawings_name_what_exists():
    drawings = re.findall(r"```text\n(?!manyheads/)(.*?)```", TEXT, re.S)
    assert len(drawings) == 2
    paths = [path for drawing in drawings for path in re.findall(r"\b([a-z]+/(?:\w+(?:\.py)?)?)", drawing)]
    assert len(paths) > 20
    for path in paths:
        assert any((PACKAGE / f"{path}{suffix}").exists() for suffix in ("", ".py")), path
    names = {name for drawing in drawings for name in re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", drawing)} - {"TOML"}
    code = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert {name for name in names if f"class {name}" not in code} == set()
