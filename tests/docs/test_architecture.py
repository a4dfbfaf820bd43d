"""docs/architecture.md: the files and classes that its drawings name exist; its tree and layers: tests/test_layers.py."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "manyheads"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


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
