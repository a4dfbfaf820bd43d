"""Plants random faults in a copy of the package and reports which of them the tests notice: `make mutants`.

A fault has an id, the hash of the seed, its file, its line and its change, and the ids order the faults. So another change
of the sources leaves the choice as it was, and a run that was interrupted goes on where it stopped. `--only ID` tries one
fault again. First the whole suite runs once with coverage, which tells the tests that run each line. They meet a fault of
the line, the shortest first, and then the others that run the file. A survivor of the first minute meets all of them.
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
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData
from coverage.exceptions import CoverageException

ROOT = Path(__file__).parent.parent
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any"}
REFERENCE = "tests/docs/test_reference.py::test_the_pages_are_what_the_generator_writes"  # prints defaults and bounds
TIMEOUT = 1500  # seconds; a fault that hangs has been noticed
FIRST_SECONDS = 60
PARSING = threading.Lock()  # ast.parse in two threads at once raises SystemError in Python 3.11
CONFIG = """[run]
data_file = {data}
source = {package}
context = ${{TEST_CONTEXT-}}
parallel = true
sigterm = true
patch = fork, _exit
"""


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


def sites(node):
    """(parent, field, index) of every node that can have a fault: no annotation, no message of an error."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "keywords") and not isinstance(node, ast.Call):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise):
                if mutated(child) is not None:
                    yield node, field, index if isinstance(value, list) else None
                yield from sites(child)


def faults(seed):
    """Every fault as (id, file, number of its site in the file), in the order of the seed."""
    found = {}
    for file in sorted((ROOT / "manyheads").rglob("*.py")):
        source = file.read_text()
        lines = source.splitlines()
        for number, (parent, field, index) in enumerate(sites(ast.parse(source))):
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
    with PARSING:
        tree = ast.parse(file.read_text())
    parent, field, index = list(sites(tree))[number]
    value = getattr(parent, field)
    node = value if index is None else value[index]
    line, change, new = node.lineno, change_of(node), mutated(node)
    if index is None:
        setattr(parent, field, new)
    else:
        value[index] = new
    write_source(target, ast.unparse(ast.fix_missing_locations(tree)))
    return line, change


def write_source(path, text):
    """Writes a file without its bytecode, which is thought new if the time in seconds and the size are the same."""
    path.write_text(text)
    Path(cache_from_source(path)).unlink(missing_ok=True)


def run_tests(folder, options, timeout=None, **environment):
    """Runs the tests of a copy; returns the exit status, None at the time limit, and what was printed."""
    paths = f"{folder}:{folder / 'tests/helpers'}"
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", *options],
        cwd=folder, env=os.environ | {"PYTHONPATH": paths} | environment,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return None, ""
    return process.returncode, output


def noticed_by(folder, tests):
    """The first test that fails, 'hang' at the time limit, or None."""
    listed = folder / "tests.txt"
    listed.write_text("".join(f"{test}\n" for test in tests))
    status, output = run_tests(folder, ["-x", "-n", "0", f"@{listed}"], TIMEOUT)
    if not status:
        return "hang" if status is None else None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return failed[1] if failed else output.strip().splitlines()[-1]


class Coverage:
    """The tests that run each line, from a run of the whole suite, whose data stay in a folder."""

    def __init__(self, folder, sources):
        folder = folder / hash_of_sources()  # lines and tests have moved if they differ
        self.data, durations = CoverageData(str(folder / "coverage")), folder / "durations"
        if not (folder / "coverage").exists():
            folder.mkdir(exist_ok=True, parents=True)
            config = folder / "config.ini"
            config.write_text(CONFIG.format(data=folder / "coverage", package=sources / "manyheads"))
            environment = {"COVERAGE_PROCESS_START": str(config), "TEST_DURATIONS": str(durations)}
            everything = ["-p", "coverage_contexts", "-o", "norecursedirs=browser .*"]  # with the tests of `make labs`
            status, output = run_tests(sources, everything, **environment)
            if status:
                print(f"without a fault:\n{output[-5000:]}", flush=True)
            self.combine(folder)
        self.data.read()
        self.seconds = {
            test: float(time) for time, test in (row.split(" ", 1) for row in durations.read_text().splitlines())
        }
        assert REFERENCE in self.seconds, f"{REFERENCE} failed, or has another name"
        self.files = {name.partition("/manyheads/")[2]: name for name in self.data.measured_files()}

    def combine(self, folder):
        """Adds up the data of all processes, without those that a test killed while they wrote."""
        for path in sorted(folder.glob("coverage.*")):
            with suppress(CoverageException):
                data = CoverageData(str(path))
                data.read()
                self.data.update(data)
            path.unlink()
        self.data.write()

    def tests(self, file, line):
        """The tests that run a line, the shortest first, and then the others that run its file.

        Some lines of processes that were killed, or that a test stopped from tracing, are missing from the data.
        """
        by_line = self.data.contexts_by_lineno(self.files[str(file.relative_to(ROOT / "manyheads"))])
        covering = {number: self.names(contexts) for number, contexts in by_line.items()}
        of_line = next((covering[item] for item in range(line, line - 4, -1) if covering.get(item)), set())
        of_file = set().union(*covering.values(), {REFERENCE}, self.importing(file)) - of_line
        return [sorted(tests, key=self.seconds.__getitem__) for tests in (of_line, of_file)]

    def importing(self, file):
        """The tests of files that import a module, whose constants no line of a test runs."""
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        importing = {
            path for path in {test.partition("::")[0] for test in self.seconds} if module in (ROOT / path).read_text()
        }
        return {test for test in self.seconds if test.partition("::")[0] in importing}

    def names(self, contexts):
        parts = {part for context in contexts for part in context.split("|")}
        return {part for part in parts if part in self.seconds}


def hash_of_sources():
    files = sorted(path for name in ("manyheads", "tests") for path in (ROOT / name).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def copy_sources(folder):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)  # tests ask git for the files


def try_fault(fault, folder, coverage, *, quick):
    """Plants one fault, runs the tests and restores the file; returns a row of the results."""
    key, file, number = fault
    target, start = folder / file.relative_to(ROOT), time.time()
    line, change = plant(file, number, target)
    of_line, of_file = coverage.tests(file, line)
    tests, total = of_line + of_file, 0.0
    first = [test for test in tests if (total := total + coverage.seconds[test]) < FIRST_SECONDS] or tests[:1]
    test = noticed_by(folder, first) if tests else None
    others = [test for test in tests[len(first) :] if test == REFERENCE or not quick]
    if test is None and others:
        test = noticed_by(folder, others)
    write_source(target, file.read_text())
    return {
        "id": key, "file": str(file.relative_to(ROOT)), "line": line, "change": change, "noticed_by": test,
        "tests": len(tests), "seconds": round(time.time() - start),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="ID", help="one fault, by its id")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="faults at a time")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="survivors of the first minute meet the test of the generated pages, and no more",
    )
    parser.add_argument("--coverage", type=Path, default=ROOT / ".mutants", help="folder of the coverage data")
    parser.add_argument("--results", type=Path, default=ROOT / ".mutants.jsonl")
    options = parser.parse_args()
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {row["id"]: row for row in map(json.loads, lines)}
    chosen = [fault for fault in faults(options.seed) if options.only in (None, fault[0])][: options.count]
    if not chosen:
        sys.exit(f"no fault {options.only}")
    todo = [fault for fault in chosen if options.only or fault[0] not in done]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        folders = SimpleQueue()
        for k in range(options.jobs):
            copy_sources(Path(name) / str(k))
            folders.put(Path(name) / str(k))
        coverage = Coverage(options.coverage.absolute(), Path(name) / "0")

        def work(fault):
            folder = folders.get()
            try:
                return try_fault(fault, folder, coverage, quick=options.quick)
            finally:
                folders.put(folder)

        try:
            for result in as_completed([pool.submit(work, fault) for fault in todo]):
                row = result.result()
                done[row["id"]] = row
                with options.results.open("a") as results:
                    results.write(json.dumps(row, ensure_ascii=False) + "\n")
                verdict = "SURVIVED" if row["noticed_by"] is None else "noticed "
                print(f"{row['id']}  {verdict}  {row['file']}:{row['line']}  {row['change']}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    rows = [done[key] for key, *_ in chosen]
    survivors = [row for row in rows if row["noticed_by"] is None]
    print(f"{len(rows) - len(survivors)} of {len(rows)} faults were noticed ({1 - len(survivors) / len(rows):.0%})")


if __name__ == "__main__":
    main()
