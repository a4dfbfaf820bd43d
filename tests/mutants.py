"""Plants random faults in a copy of the package and reports which of them the tests notice: `make mutants`.

Fault N of a seed is always the same one, so a run that was interrupted goes on where it stopped, and one fault can be
tried alone (`--only N`). The tests of the same package run first; only a fault that survives them meets the whole suite.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any"}
TIMEOUT = 1500  # seconds; a fault that hangs has been noticed


def mutated(node):
    """The node with a fault, or None if it has no place for one."""
    changed = copy.deepcopy(node)
    if isinstance(node, ast.Compare):
        changed.ops[0] = SWAPPED[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPPED:
        changed.op = SWAPPED[type(node.op)]()
    elif isinstance(node, ast.UnaryOp):
        return changed.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        changed.value = not node.value if type(node.value) is bool else node.value * 2 or 1
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
    elif isinstance(node, ast.Name) and node.id in RENAMED:
        changed.id = RENAMED[node.id]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.copy_location(ast.Pass(), node)
    else:
        return None
    return changed


def places(tree):
    """(parent, field, index) of every node that can have a fault: no annotation, no message of an error."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "keywords") and not isinstance(parent, ast.Call):
                continue
            for index, node in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(node, ast.AST) and not isinstance(node, ast.Raise) and mutated(node) is not None:
                    yield parent, field, index if isinstance(value, list) else None


def without_raises(tree):
    """The tree in which nothing under a `raise` can be changed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            node.exc, node.cause = ast.Constant(ast.unparse(node)), None
    return tree


def faults(seed, count):
    """The first faults of a seed: file, number of the place in it."""
    files = sorted((ROOT / "manyheads").rglob("*.py"))
    numbers = [(file, i) for file in files for i, _ in enumerate(places(without_raises(ast.parse(file.read_text()))))]
    return random.Random(seed).sample(numbers, count)


def plant(file, number, target):
    """Writes the file with the fault to `target`; returns the line and the change."""
    source = file.read_text()
    tree, marked = ast.parse(source), without_raises(ast.parse(source))
    parent, field, index = list(places(marked))[number]
    raises = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    for node, original in zip([n for n in ast.walk(marked) if isinstance(n, ast.Raise)], raises, strict=True):
        node.exc, node.cause = original.exc, original.cause
    value = getattr(parent, field)
    node = value if index is None else value[index]
    before, line, new = ast.unparse(node).splitlines()[0], node.lineno, mutated(node)
    if index is None:
        setattr(parent, field, new)
    else:
        value[index] = new
    target.write_text(ast.unparse(ast.fix_missing_locations(marked)))
    return line, f"{before}  →  {ast.unparse(new).splitlines()[0]}"


def noticed_by(folder, tests):
    """The first test that fails, 'hang' at the time limit, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--no-header", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return "hang"
    if process.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return failed[1] if failed else output.strip().splitlines()[-1]


def nearest_tests(file):
    """The tests of the file's own package, those named like the file first."""
    package = file.relative_to(ROOT / "manyheads").parts[0].removesuffix(".py")
    named = sorted((ROOT / "tests").rglob(f"test_{file.stem}*.py"))
    others = sorted((ROOT / "tests" / package).glob("test_*.py")) if (ROOT / "tests" / package).is_dir() else []
    return [str(path.relative_to(ROOT)) for path in dict.fromkeys((*named, *others))]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one fault, by its number")
    parser.add_argument("--quick", action="store_true", help="leave out the whole suite for survivors")
    parser.add_argument("--results", type=Path, default=ROOT / ".mutants.jsonl")
    options = parser.parse_args()
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {(row["seed"], row["number"]): row for row in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder:
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in tracked.splitlines():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder) / name)
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)  # tests ask git for the files
        for number, (file, place) in enumerate(faults(options.seed, options.count)):
            if (options.seed, number) in done or options.only not in (None, number):
                continue
            target, start = Path(folder) / file.relative_to(ROOT), time.time()
            line, change = plant(file, place, target)
            test = noticed_by(folder, nearest_tests(file))
            if test is None and not options.quick:
                test = noticed_by(folder, [])
            shutil.copy(file, target)
            row = {
                "seed": options.seed, "number": number, "file": str(file.relative_to(ROOT)), "line": line,
                "change": change, "noticed_by": test, "seconds": round(time.time() - start),
            }  # fmt: skip
            done[options.seed, number] = row
            with options.results.open("a") as results:
                results.write(json.dumps(row, ensure_ascii=False) + "\n")
            print(
                f"{number:4}  {'SURVIVED' if test is None else 'noticed '}  {row['file']}:{line}  {change}", flush=True
            )
    rows = [row for (seed, _), row in done.items() if seed == options.seed]
    survivors = [row for row in rows if row["noticed_by"] is None]
    print(f"{len(rows) - len(survivors)} of {len(rows)} faults were noticed ({1 - len(survivors) / len(rows):.0%})")


if __name__ == "__main__":
    main()
