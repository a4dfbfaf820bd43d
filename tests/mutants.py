"""Plants random faults in a copy of the package and reports which of them the tests notice: `make mutants`.

A fault has an id, the hash of its file, its line and its change; a seed orders all faults by their ids, so another change
of the sources leaves the choice as it was, and a run that was interrupted goes on where it stopped. `--only ID` tries one
fault. The tests of the same package run first; only a fault that survives them meets the whole suite.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
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


def sites(tree):
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


def faults(seed):
    """Every fault as (id, file, number of its site in the file), in the order of the seed."""
    found = {}
    for file in sorted((ROOT / "manyheads").rglob("*.py")):
        source = file.read_text()
        lines = source.splitlines()
        for number, (parent, field, index) in enumerate(sites(without_raises(ast.parse(source)))):
            value = getattr(parent, field)
            node = value if index is None else value[index]
            text = f"{seed}\n{file.relative_to(ROOT)}\n{lines[node.lineno - 1]}\n{change_of(node)}"
            key, repeated = hashlib.sha256(text.encode()).hexdigest()[:12], 0
            while f"{key}-{repeated}" in found:
                repeated += 1
            found[f"{key}-{repeated}"] = (file, number)
    return [(key, *found[key]) for key in sorted(found)]


def change_of(node):
    return f"{ast.unparse(node).splitlines()[0]}  →  {ast.unparse(mutated(node)).splitlines()[0]}"


def plant(file, number, target):
    """Writes the file with the fault to `target`; returns the line and the change."""
    source = file.read_text()
    tree, marked = ast.parse(source), without_raises(ast.parse(source))
    parent, field, index = list(sites(marked))[number]
    raises = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    for node, original in zip([n for n in ast.walk(marked) if isinstance(n, ast.Raise)], raises, strict=True):
        node.exc, node.cause = original.exc, original.cause
    value = getattr(parent, field)
    node = value if index is None else value[index]
    line, change, new = node.lineno, change_of(node), mutated(node)
    if index is None:
        setattr(parent, field, new)
    else:
        value[index] = new
    target.write_text(ast.unparse(ast.fix_missing_locations(marked)))
    return line, change


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


def copy_sources(folder):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)  # tests ask git for the files


def try_fault(fault, folder, *, quick):
    """Plants one fault, runs the tests and restores the file; returns a row of the results."""
    key, file, number = fault
    target, start = folder / file.relative_to(ROOT), time.time()
    line, change = plant(file, number, target)
    test = noticed_by(folder, nearest_tests(file))
    if test is None and not quick:
        test = noticed_by(folder, [])
    shutil.copy(file, target)
    return {
        "id": key, "file": str(file.relative_to(ROOT)), "line": line, "change": change, "noticed_by": test,
        "seconds": round(time.time() - start),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="ID", help="one fault, by its id")
    parser.add_argument("--quick", action="store_true", help="leave out the whole suite for survivors")
    parser.add_argument("--results", type=Path, default=ROOT / ".mutants.jsonl")
    options = parser.parse_args()
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {row["id"]: row for row in map(json.loads, lines)}
    chosen = [fault for fault in faults(options.seed) if options.only in (None, fault[0])][: options.count]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder)
        todo = [fault for fault in chosen if fault[0] not in done]
        if todo and (
            failed := noticed_by(folder, sorted({test for _, file, _ in todo for test in nearest_tests(file)}))
        ):
            sys.exit(f"{failed} fails without a fault")
        for fault in todo:
            row = try_fault(fault, folder, quick=options.quick)
            done[row["id"]] = row
            with options.results.open("a") as results:
                results.write(json.dumps(row, ensure_ascii=False) + "\n")
            verdict = "SURVIVED" if row["noticed_by"] is None else "noticed "
            print(f"{row['id']}  {verdict}  {row['file']}:{row['line']}  {row['change']}", flush=True)
    rows = [done[key] for key, *_ in chosen]
    survivors = [row for row in rows if row["noticed_by"] is None]
    print(f"{len(rows) - len(survivors)} of {len(rows)} faults were noticed ({1 - len(survivors) / len(rows):.0%})")


if __name__ == "__main__":
    main()
