"""The architecture as tests: imports point one way, families are named only where they belong, the README's tree is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "manyheads"
FILES = sorted(PACKAGE.rglob("*.py"))

# each room may import the rooms it stands on: spec ← parts ← model | data ← … ← labs ← show, cli
STANDS_ON = {
    "spec": set(),
    "parts": {"spec"},
    "model": {"parts", "spec"},
    "data": {"spec"},
    "presets": {"model", "spec"},
    "convert": {"generate", "model", "parts", "spec"},
    "generate": {"model", "parts", "spec"},
    "inspect": {"model", "parts", "spec"},
    "objective": {"model", "parts", "spec"},
    "train": {"convert", "data", "generate", "model", "objective", "parts", "spec"},
    "training": {"metrics", "model", "spec", "train"},
    "chart": {"metrics", "spec"},
    "grid": {"model", "spec", "train"},
    "compare": {"grid", "model", "spec", "train", "training"},
    "advice": {"data", "model", "spec", "train", "training"},
    "dataset": {"data", "spec", "train", "training"},
    "checkpoint": {"convert", "generate", "inspect", "model", "parts", "spec"},
    "demo": {"checkpoint", "inspect", "model", "parts", "spec", "train", "training"},
    "answer": {"checkpoint", "convert", "generate", "parts", "spec"},
    "predicting": {"answer", "checkpoint", "data", "generate", "spec"},
    "auditing": {"checkpoint", "inspect", "model", "parts"},
    "metrics": set(),
    "evaluation": {"checkpoint", "convert", "data", "generate", "metrics", "model", "objective", "parts", "spec", "train"},
    "scoreboard": {"chart", "evaluation", "metrics", "spec", "training"},
    "labs": set(),
    "show": {"model", "parts", "presets", "spec", "train"},
    "cli": {
        *(
            "advice",
            "answer",
            "auditing",
            "chart",
            "checkpoint",
            "compare",
            "dataset",
            "demo",
            "evaluation",
            "generate",
            "model",
            "predicting",
        ),
        *("scoreboard", "show", "spec", "train", "training"),
    },
}


def room_of(module):
    """'manyheads.parts.norm' → 'parts'; the package itself is ''."""
    return module.split(".")[1] if "." in module else ""


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "manyheads")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "manyheads":
            yield from (f"manyheads.{name.name}" if node.module == "manyheads" else node.module for name in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    room = room_of(".".join(("manyheads", *path.relative_to(PACKAGE).with_suffix("").parts)))
    if room in ("__init__", "__main__"):
        return
    assert room in STANDS_ON, f"{room} has no place in the architecture yet: give it one here and in the README"
    for module in imports_of(path):
        other = room_of(module)
        assert other in STANDS_ON[room] | {room, "__version__"}, f"{path.name} imports {module}: {room} does not stand on {other}"


FAMILIES = re.compile(
    r"(?i)(?<![a-z])(gpt|bert|roberta|albert|distilbert|ernie|llama|pythia|neox|mistral|phi|t5|bart|marian|qwen|gemma|vit)(?![a-z])"
)


def names_and_strings(tree):
    """Everything in a file that does something: names, attributes and strings, but no docstring and no comment."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize("path", [p for p in FILES if "convert" not in p.parts], ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_family_is_named_outside_convert_and_presets(path):
    for text in names_and_strings(ast.parse(path.read_text())):
        found = FAMILIES.search(text.replace("llama.cpp", "").replace("_", " "))  # which is a program
        assert not found or text in ALLOWED, f"{path.name} names a family: {text!r}"


# the one place where a user of the command line is shown what to type
ALLOWED = {
    "Show a model in full, or what there is to choose from.\n\n    Examples: manyheads show gpt2 · manyheads show transformer-base -s "
    "encoder.position=rope -s decoder.core=argmax ·\n    manyheads show position · manyheads show parts --json\n    "
}


def test_the_scan_for_families_would_find_one():
    assert FAMILIES.search("class Bert".replace("_", " "))
    assert FAMILIES.search("is_gpt2".replace("_", " "))
    assert not FAMILIES.search("albertine graphic")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_file_opens_with_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_tree_in_the_readme_is_true():
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```text\n(manyheads/\n.*?)```", text, re.S).group(1)
    listed, folders = set(), []
    for line in block.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        folders = folders[: len(indent) // 2]
        if name.endswith("/"):
            folders.append(name)
        else:
            listed.add("".join((*folders, name)))
        assert name.endswith("/") or len(line.split()) > 1, f"{name} has no line that says what it is"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    shown = {path for path in tracked if path.split("/")[0] in ("manyheads", "bench", "tests") and not path.endswith((".toml", ".typed"))}
    shown = {path for path in shown if not path.endswith("__init__.py") or path == "manyheads/__init__.py"}
    shown = {path for path in shown if not path.startswith("manyheads/convert/families/")}  # alike, and many
    assert listed == shown | {"manyheads/presets/*.toml", "manyheads/convert/families/*.py"}


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_no_file_of_tests_imports_a_module_of_tests(path):
    """What is shared has a file of its own: one who runs a part of the tests imports no other, and one who moves a test breaks none."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in found]
    assert not [name for name in names if name.startswith("test_")]


def test_importing_the_package_and_asking_for_help_leaves_torch_alone():
    code = "import sys, manyheads; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, manyheads.spec; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = (
        "import sys\nsys.argv = ['manyheads', '--help']\nfrom manyheads.cli import main\n"
        "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
