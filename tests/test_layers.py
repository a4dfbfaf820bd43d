"""The architecture as tests: imports point one way, families are named only where they belong, the documented tree is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "manyheads"
FILES = sorted(PACKAGE.rglob("*.py"))

# the table in docs/architecture.md: a package imports only packages of the rows above its own
ROWS = re.findall(r"^\| (\d+) \| (.*?) \|", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.M)
LAYERS = [(int(layer), re.findall(r"`(\w+)`", packages)) for layer, packages in ROWS]
LAYER = {package: layer for layer, packages in LAYERS for package in packages}


def package_of(module):
    """'manyheads.parts.norm' → 'parts'; the package itself is ''."""
    return module.split(".")[1] if "." in module else ""


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "manyheads")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "manyheads":
            yield from (f"manyheads.{name.name}" if node.module == "manyheads" else node.module for name in node.names)


def relative(path):
    return str(path.relative_to(PACKAGE))


def test_every_package_is_in_one_row_of_the_table_of_layers():
    assert len(LAYER) == sum(len(packages) for _, packages in LAYERS)
    packages = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES}
    assert set(LAYER) == packages - {"__init__", "__main__"}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_point_one_way(path):
    package = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if package in ("__init__", "__main__"):
        return
    assert package in LAYER, f"{package} has no layer: give it one in the table of docs/architecture.md"
    for module in imports_of(path):
        other = package_of(module)
        allowed = other in (package, "__version__") or LAYER[other] < LAYER[package]
        assert allowed, f"{relative(path)} imports {module}, which is not in a layer above {package}"


def module_strings(path):
    """Modules of the package that a file names in a string, which could be imported by that name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and re.fullmatch(r"manyheads(\.\w+)+", str(node.value)):
            yield node.value


def test_one_module_is_named_from_a_layer_below():
    """The renderer of notebooks, which the values that it shows load when a notebook asks."""
    named = {
        (relative(path), module)
        for path in FILES
        for module in module_strings(path)
        if LAYER.get(package_of(module), 0) > LAYER.get(path.relative_to(PACKAGE).with_suffix("").parts[0], 99)
    }
    assert named == {("model/notebook.py", "manyheads.inspect.notebook")}


# files of the kernel and of Python itself, and /dev/null
OWN_READERS = {"training/resources.py", "training/folder.py", "data/builtin.py", "cli/console.py"}


def reads_a_file(node):
    """Whether a call opens a file to read it, and not to write it."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    method = isinstance(node.func, ast.Attribute)
    return (name in ("read_text", "read_bytes") and method) or (name == "open" and not set("wx") & {*"".join(modes)})


@pytest.mark.parametrize("path", [p for p in FILES if relative(p) not in OWN_READERS], ids=relative)
def test_only_files_opens_files(path):
    """`files` bounds what it reads, and opens regular files only."""
    if "files" in path.parts:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        assert not reads_a_file(node), f"{relative(path)}:{node.lineno} reads a file: use manyheads.files"


FAMILIES = re.compile(
    r"(?i)(?<![a-z])(gpt|bert|roberta|albert|distilbert|ernie|llama|pythia|neox|mistral|phi|t5|bart|marian|qwen|gemma|vit)(?![a-z])"
)


def names_and_strings(tree):
    """All names, attributes and strings of a file, without docstrings and comments."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize("path", [p for p in FILES if not {"convert", "chapters"} & {*p.parts}], ids=relative)
def test_no_family_is_named_outside_convert_presets_and_the_chapters_of_the_labs(path):
    for text in names_and_strings(ast.parse(path.read_text())):
        match = FAMILIES.search(text.replace("llama.cpp", "").replace("_", " "))  # a program
        assert not match, f"{path.name} names a family: {text!r}"


def test_the_scan_for_families_would_find_one():
    assert FAMILIES.search("class Bert".replace("_", " "))
    assert FAMILIES.search("is_gpt2".replace("_", " "))
    assert not FAMILIES.search("albertine graphic")


def class_nodes():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield path, node


def built_by(node):
    """The names that the methods of a class whose names begin with build call."""
    builds = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name.startswith("build")]
    calls = [each for method in builds for each in ast.walk(method) if isinstance(each, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def kinds_and_classes():
    """The files of each kind by its name, and that of each class that is a kind or that one builds, without subclasses."""
    nodes = [*class_nodes()]
    files = {node.name: path for path, node in nodes}
    bases = {base.id for _, node in nodes for base in node.bases if isinstance(base, ast.Name)}
    kinds = defaultdict(set)  # kinds of several slots may have the same name, such as none
    classes = {"Transformer": files["Transformer"], "Recurrent": files["Recurrent"], "Ngram": files["Ngram"]}
    for path, node in nodes:
        for keyword in node.keywords:
            if keyword.arg == "kind" and isinstance(keyword.value, ast.Constant):
                kinds[keyword.value.value].add(path)
                built = {name for name in built_by(node) if files.get(name) == path}
                classes |= dict.fromkeys({node.name, *built} - bases, path)
    return kinds, classes


KINDS, KIND_CLASSES = kinds_and_classes()


def compared_values(node):
    """The sides of a comparison; the subject and the patterns of a match."""
    if isinstance(node, ast.Match):
        return [node.subject, *(case.pattern for case in node.cases)]
    return [node.left, *node.comparators] if isinstance(node, ast.Compare) else []


def checked_classes(node):
    """The classes of isinstance, of issubclass or of a pattern."""
    if isinstance(node, ast.MatchClass):
        return [node.cls]
    is_check = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
    return node.args[1:] if is_check else []


def walk_all(nodes):
    return [each for node in nodes for each in ast.walk(node)]


def compared_kinds(path, tree):
    """The kinds of other files that a file compares or matches, by name or by class."""
    for node in ast.walk(tree):
        values = walk_all(compared_values(node))
        strings = [each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        read = {each.attr for each in values if isinstance(each, ast.Attribute)} | {*strings}  # or with getattr
        if "architecture" in read:
            yield from (string for string in strings if string != "architecture")
        elif "kind" in read:
            yield from (string for string in strings if path not in KINDS.get(string, [path]))
        names = {each.id for each in walk_all(checked_classes(node)) if isinstance(each, ast.Name)}
        yield from (name for name in names if KIND_CLASSES.get(name, path) != path)


# one file has what `new` suggests for each architecture, and one the claims on which family has which position scheme
COMPARE_KINDS = {"tasks/suggestion.py", "labs/chapters/families.py"}


@pytest.mark.parametrize(
    "path", [p for p in FILES if "convert" not in p.parts and relative(p) not in COMPARE_KINDS], ids=relative
)
def test_no_kind_is_compared_outside_its_own_file(path):
    found = [*compared_kinds(path, ast.parse(path.read_text()))]
    assert not found, f"{relative(path)} compares {found}: give the base class an attribute"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("a.kind == 'rope'", ["rope"]),
        ("'rope' == a.kind", ["rope"]),
        ("(a.kind, b) != ('rope', 1)", ["rope"]),
        ("getattr(a, 'kind', '') in NAMES + ('rope',)", ["rope"]),
        ("a['kind'] == 'rope'", ["rope"]),
        ("match a.kind:\n case 'rope' | 'alibi': 1", ["rope", "alibi"]),
        ("match a:\n case RopeSpec(theta=1): 1", ["RopeSpec"]),
        ("a.architecture in ('decoder',)", ["decoder"]),
        ("'decoder' == getattr(a, 'architecture')", ["decoder"]),
        ("isinstance(a, RopeSpec)", ["RopeSpec"]),
        ("isinstance(a, b.C | Argmax)", ["Argmax"]),  # the module that a spec builds
        ("a.kind == 'self' and name == 'rope' and a.kind == b.kind", []),
    ],
)
def test_the_scan_for_kinds_would_find_one(code, found):
    assert [*compared_kinds(Path(__file__), ast.parse(code))] == found


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_each_file_opens_with_a_sentence_that_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


DIALECT = re.compile(
    r"(?i)(?<![a-z])(changer|wish(es)?|made_ready|numberless|unseen|foreseen|forecast|settled|side_by_side|framed|heard"
    r"|wanted|chance_of|likeliest|longest_written|two_way|keeper|everybody|(?<!_)a_token(?!_)|it has not seen"
    r"|who sees what|a text a line)(?![a-z])"
)
PROSE = [ROOT / "README.md", ROOT / "LOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = sorted((PACKAGE / "studio" / "web").glob("*.js"))
SOURCES = [
    *FILES,
    *SCRIPTS,
    *PROSE,
    *(path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)),
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_word_of_our_own_where_the_field_has_one(path):
    match = DIALECT.search(path.read_text(encoding="utf-8"))
    assert not match, match[0]


def test_the_scan_for_words_of_our_own_would_find_one():
    for text in ("changer", "my_changer.step", "Wish", "made_ready", "a_token = 3", "rows of unseen text", "two_way"):
        assert DIALECT.search(text), text
    for text in ("test_a_token_of_a_text", "unseenly", "wishful", "a token"):
        assert not DIALECT.search(text), text


# a name says what a thing is: `stacks`, not `found`
PARTICIPLES = {"asked", "chosen", "found", "given", "heard", "held", "kept", "known", "made", "said", "seen", "taken"}
PARTICIPLES |= {"told", "wanted", "written"}


def own_names(tree):
    """The names that a file gives: variables, attributes, parameters, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.MatchAs | ast.MatchStar):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def participles(tree):
    return [name for name in own_names(tree) if (name or "").strip("_").lower() in PARTICIPLES]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_name_is_a_past_participle_alone(path):
    names = participles(ast.parse(path.read_text()))
    assert not names


def test_the_scan_for_participles_would_find_one():
    code = "known = 1\nfor taken, _kept in b: c.held = (found := 1)\ndef chosen(given): return [seen for seen in given]"
    code += "\nmatch a:\n case [told, *_]: read(written=told)\nclass Made: known_names = kept_weights = 0"
    names = {"known", "taken", "_kept", "held", "found", "chosen", "given", "seen", "told", "Made"}
    assert {*participles(ast.parse(code))} == names


def test_the_top_level_has_only_the_four_files_that_everything_stands_on():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py", "spec.py"}


def test_the_tree_in_the_documentation_is_true():
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"```text\n(manyheads/\n.*?)```", text, re.S).group(1)
    listed, folders = set(), []
    for line in block.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        folders = folders[: len(indent) // 2]
        assert len(line.split()) > 1 or name == "manyheads/", f"{name} has no line that says what it is"
        if name.endswith("/"):
            folders.append(name)
        else:
            listed.add("".join((*folders, name)))
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    package = {path for path in tracked if path.startswith("manyheads/") and (ROOT / path).exists()}
    package = {path for path in package if not path.endswith((".toml", ".typed"))}
    package = {path for path in package if not path.endswith("__init__.py") or path == "manyheads/__init__.py"}
    package = {path for path in package if not path.startswith("manyheads/convert/families/")}  # alike, and many
    assert listed == package | {"manyheads/presets/*.toml", "manyheads/convert/families/*.py"}


TESTS = sorted(Path(__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_no_test_file_imports_another(path):
    """Shared code is in tests/helpers, so that one file of tests runs without the others."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes]
    assert not [name for name in names if name.startswith("test_")]


def test_helpers_do_not_shadow_rooms_and_tests_mirror_them():
    helpers = {path.stem for path in (ROOT / "tests" / "helpers").glob("*.py")}
    modules = {path.stem for path in FILES}
    assert not helpers & modules
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders <= set(LAYER) | {"helpers", "docs", "browser"}


def test_importing_the_package_and_asking_for_help_leaves_torch_alone():
    code = "import sys, manyheads; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, manyheads.spec, manyheads.errors; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = (
        "import sys\nsys.argv = ['manyheads', '--help']\nfrom manyheads.cli.console import main\n"
        "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
