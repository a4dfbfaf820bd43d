"""The page of JSON outputs: the keys of real commands on tiny models, and their meanings from json_keys.toml."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markup import code, page, paragraphs, table

MEANINGS = Path(__file__).parent / "json_keys.toml"


def json_outputs() -> str:
    from manyheads.training import events

    introduction = (
        "What `--json` prints: one object on one line, on standard output, with `schema` = 1. The keys below are those "
        "of real commands. `*` stands for any name, `[]` for each element of a list. `predict`, `ask` and `score` with "
        "many texts print one object per line. An error is one object on standard error."
    )
    meanings = tomllib.loads(MEANINGS.read_text(encoding="utf-8"))
    outputs = real_outputs()
    assert set(outputs) == set(meanings), f"{MEANINGS.name} and the commands differ: {set(outputs) ^ set(meanings)}"
    blocks = [output_block(name, outputs[name], meanings[name]) for name in meanings]
    text = "Each line is one event: `event`, its name, and the fields of that event."
    rows = [event_row(event) for event in events.Event.__subclasses__()]
    event_block = "\n\n".join(("## metrics.jsonl", text, table(("event", "fields", "meaning"), rows)))
    return page("JSON output", introduction, *blocks, event_block)


def event_row(event: type) -> tuple[str, str, str]:
    fields = [field.name for field in dataclasses.fields(event)]  # type: ignore[arg-type]
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", event.__name__).lower()
    return code(name), ", ".join(map(code, fields)), paragraphs(event.__doc__ or "")


def output_block(name: str, outputs: Sequence[Any], meanings: dict[str, str]) -> str:
    """A row per path. A key without a meaning, or a meaning without a key, is an error."""
    types: dict[str, set[str]] = {}
    unknown: list[str] = []
    for output in outputs:
        for path, value in walk(output, meanings, unknown):
            types.setdefault(path, set()).add(type_name(value))
    assert not unknown, f"{MEANINGS.name}, [{json.dumps(name)}] has no {unknown}"
    unused = set(meanings) - set(types)
    assert not unused, f"{MEANINGS.name}, [{json.dumps(name)}]: no output has {unused}"
    rows = [(code(path), " or ".join(sorted(types[path])), meaning) for path, meaning in meanings.items()]
    return "\n\n".join((f"## {name}", table(("key", "type", "meaning"), rows)))


def walk(value: Any, meanings: dict[str, str], unknown: list[str], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every described path with its value; a described path without described ones inside is not looked into."""
    if isinstance(value, list):
        items = [((f"{path}[]",), item) for item in value]
    else:
        items = [
            ((f"{path}.{key}".lstrip("."), f"{path}.*".lstrip(".")), item)
            for key, item in value.items()
            if key != "schema"
        ]
    for names, inner in items:
        inside = {name for name in names for meaning in meanings if meaning.startswith((f"{name}.", f"{name}["))}
        known = next((name for name in names if name in meanings or name in inside), None)
        if known is None:
            unknown.append(names[0])
            continue
        if known in meanings:
            yield known, inner
        if known in inside and isinstance(inner, dict | list):
            yield from walk(inner, meanings, unknown, known)


def type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {int: "number", float: "number", str: "text", dict: "object", list: "list"}
    return names[type(value)]


TINY = """
[model]
vocab = "tokenizer"
[model.{stack}]
layers = 1
width = 8
attention = {{ kind = "heads", heads = 2 }}
feedforward = {{ kind = "mlp", hidden = 8 }}
{more}
[train]
steps = 2
eval_rows = 4
"""
SEQUENCE = """
[model.decoder]
like = "encoder"
embed = "shared"
cross = true
[data]
kind = "sequence"
count = 200
validation_count = 20
[task]
kind = "copy"
"""
LEARNED = 'position = { kind = "learned", length = 16 }'
TEXT = """
[data]
kind = "biographies"
people = 60
[task]
kind = "{task}"
"""
LABELS = """
[model.head]
kind = "classes"
classes = "data"
[data]
kind = "labels"
path = "reviews.jsonl"
[task]
kind = "classify"
"""
VECTOR = """
[data]
kind = "sequence"
count = 100
validation_count = 20
[task]
kind = "retrieval"
"""


TREES = """1\tborn\t_\t_\t_\t_\t0\troot\t_\t_
2\tin\t_\t_\t_\t_\t3\tcase\t_\t_
3\tApril\t_\t_\t_\t_\t1\tobl\t_\t_
"""


def real_outputs() -> dict[str, list[Any]]:
    """The objects that each command prints for tiny models, trained in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        runs = {
            "copy": TINY.format(stack="encoder", more=SEQUENCE),
            "causal": TINY.format(stack="decoder", more=LEARNED + TEXT.format(task="causal")),
            "masked": TINY.format(stack="encoder", more=TEXT.format(task="masked")),
            "classify": TINY.format(stack="encoder", more=LABELS),
            "retrieval": TINY.format(stack="encoder", more=VECTOR).replace("[model]\n", '[model]\nhead = "none"\n', 1),
        }
        rows = [{"text": f"{word} film", "label": word} for word in ("good", "bad") for _ in range(20)]
        Path("reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("trees.conllu").write_text(TREES)
        Path("lines.txt").write_text("born in April\n")
        trained, predicted, evaluated = [], [], []
        for name, text in runs.items():
            Path(f"{name}.toml").write_text(text)
            short = ("-s", "train.max_length=4") if name == "classify" else ()  # so that a text is truncated
            trained += call("train", f"{name}.toml", "--output", name, *short)
            input_text = {"masked": "a <mask> b", "classify": "a b c d e f g"}.get(name, "a b")
            predicted += call("predict", name, input_text, "--max-new-tokens", "2")
            if name == "copy":
                more = ("--num-beams", "2", "-n", "2", "--logprobs", "1")
                predicted += call("predict", name, input_text, "--max-new-tokens", "2", *more)
                predicted += call("predict", name, input_text, "--loops", "-s", f"forced_prefix_ids={[7] * 64}")
            if name == "causal":
                predicted += call("predict", name, input_text)  # ends where the positions end, with a note
            evaluated += call("evaluate", name, "--max-rows", "4", "--examples", "1", "--max-new-tokens", "2")
        return {
            "manyheads show": call("show"),
            "manyheads show MODEL": [*call("show", "transformer-base"), *call("show", "bert-base")],
            "manyheads show MODEL --swaps-from": call("show", "gpt2", "--swaps-from", "transformer-base"),
            "manyheads show CHECKPOINT": [
                {"checkpoint": description["checkpoint"]} for name in runs for description in call("show", name)
            ],
            "manyheads show parts": call("show", "parts"),
            "manyheads new": call("new", "copy", "--minutes", "0.001"),
            "manyheads train": trained,
            "manyheads train --dry-run": call("train", "copy.toml", "--dry-run"),
            "manyheads compare": call("compare", "copy.toml", "position=none,rope", "--seeds", "2", "-o", "grid"),
            "manyheads predict": predicted,
            "manyheads ask": call("ask", "copy", "a b", "--max-new-tokens", "2"),
            "manyheads score": [
                *call("score", "causal", "born in", "--context", "was "),
                *call("score", "copy", "a b", "--source", "b a"),
            ],
            "manyheads evaluate": evaluated,
            "manyheads export": call("export", "copy", "out", "--to", "manyheads"),
            "manyheads audit": call("audit", "copy"),
            "manyheads heads PATH FILE.conllu": call("heads", "causal", "trees.conllu", "--min-count", "1"),
            "manyheads heads PATH FILE.txt": call("heads", "causal", "lines.txt"),
            "manyheads lab list": call("lab", "list"),
            "manyheads lab list --rows": call("lab", "list", "--rows"),
            "manyheads lab run": lab_runs(),
            "manyheads lab notebook": call("lab", "notebook", "attention"),
            "manyheads data show": [*call("data", "show", "copy.toml"), *call("data", "show", "classify.toml")],
            "manyheads data prepare": call("data", "prepare", "copy.toml", "--output", "ids"),
            "an error": [json.loads(error_line("show", "nosuch"))],
        }


OWN_LAB = '''
from manyheads.labs.lab import lab


@lab("mine")
def raising():
    """A lab that raises."""
    raise RuntimeError("an error")
'''


def lab_runs() -> list[Any]:
    """Labs that hold, fail and raise."""
    from manyheads.labs.lab import LABS

    Path("own.py").write_text(OWN_LAB)
    runs = call("lab", "run", "copying") + call("lab", "run", "copying", "--strength", "1")
    try:
        return runs + call("lab", "run", "copying", "raising", "--parts", "own.py")
    finally:
        LABS.pop("raising", None)  # the pages of the labs are written after this one


def call(*arguments: str) -> list[Any]:
    """What a command prints with --json."""
    output, errors = run_command(*arguments)
    assert output, f"manyheads {' '.join(arguments)} printed nothing: {errors}"
    return [json.loads(line) for line in output.splitlines()]


def error_line(*arguments: str) -> str:
    return run_command(*arguments)[1].splitlines()[-1]


def run_command(*arguments: str) -> tuple[str, str]:
    from manyheads.cli.console import main

    output, errors, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["manyheads", *arguments, "--json"]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.argv = argv
    return output.getvalue(), errors.getvalue()
