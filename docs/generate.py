"""Writes docs/reference/, docs/labs/ and the tree in docs/architecture.md: `python docs/generate.py [FOLDERS, PAGE]`.

tests/docs/test_reference.py fails if one of them is stale.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import generate_labs
from json_outputs import json_outputs
from markup import cell, code, page, paragraphs, table

FOLDER = Path(__file__).parent / "reference"
ARCHITECTURE = Path(__file__).parent / "architecture.md"
PACKAGE = Path(__file__).parents[1] / "manyheads"
# packages in the order of the tree: each imports only packages above it
PACKAGES = (
    "__init__.py", "__main__.py", "errors.py", "spec.py", "files", "kernels", "parts", "model", "data", "metrics",
    "presets", "generate", "convert", "checkpoint", "tasks", "training", "inspect", "labs", "studio", "cli",
)  # fmt: skip
MAX_LINE = 115  # characters of a sentence in the tree; a longer one ends at its last comma within them
TREE = re.compile(r"```text\nmanyheads/\n.*?```", re.S)
RUN_TABLES = ("run", "train", "best", "lora", "data", "tokenizer", "task", "auxiliary_loss", "optim", "schedule")


def pages() -> dict[str, str]:
    """The text of every page, by its file name."""
    return {
        "command-line.md": command_line(),
        "run-file.md": run_file(),
        "parts.md": parts(),
        "python.md": python_api(),
        "json.md": json_outputs(),
        "errors.md": errors(),
    }


# ------------------------------------------------------------------------------------------------------------ the tree


def architecture() -> str:
    """docs/architecture.md with the tree as the package is now: one line per file, from its docstring."""
    tree = "\n".join(("manyheads/", *tree_lines(PACKAGE, 1)))
    return TREE.sub(lambda _: f"```text\n{tree}\n```", ARCHITECTURE.read_text(encoding="utf-8"))


def tree_lines(folder: Path, depth: int) -> Iterator[str]:
    alike = {"presets": "*.toml", "families": "*.py"}.get(folder.name)
    if alike:
        yield tree_line(alike, depth, "one file each")
        return
    kinds = (".py", ".c", ".h", ".js", ".css", ".html")
    paths = [path for path in folder.iterdir() if path.suffix in kinds or (path / "__init__.py").exists()]
    paths += [path for path in (folder / "web",) if path.exists()]
    paths = [path for path in paths if path.name != "__init__.py" or folder == PACKAGE]
    order = {name: i for i, name in enumerate(PACKAGES)} if folder == PACKAGE else {}
    for path in sorted(paths, key=lambda path: (order.get(path.name, len(order)), path.name)):
        if path.is_dir():
            described = path / ("index.html" if path.name == "web" else "__init__.py")
            yield tree_line(f"{path.name}/", depth, first_sentence(described))
            yield from tree_lines(path, depth + 1)
        else:
            yield tree_line(path.name, depth, first_sentence(path))


def tree_line(name: str, depth: int, text: str) -> str:
    return f"{'  ' * depth + name:<26} {text}"


def first_sentence(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        docstring = ast.get_docstring(ast.parse(text)) or ""
    else:  # the comment at the top, which may follow a doctype
        docstring = re.sub(r"\n// ?", " ", re.search(r"(?:// ?|/\* |<!-- )(.*?)(?: \*/| -->|\n(?!//))", text, re.S)[1])  # type: ignore[index]
    sentence = re.split(r"\.(?:\s|$)", " ".join(docstring.split("\n\n")[0].split()))[0]
    return sentence if len(sentence) <= MAX_LINE else sentence[:MAX_LINE].rpartition(", ")[0]


# -------------------------------------------------------------------------------------------------------- command line


def command_line() -> str:
    import typer

    from manyheads.cli import console

    console.load_commands()
    root: Any = typer.main.get_command(console.app)
    commands = sorted(all_commands(root), key=lambda item: item[0])
    introduction = (
        "Results go to standard output; progress, notes and errors go to standard error. "
        "`-h` and `--help` show this text for each command. `--debug`, before or after the command, shows the "
        "traceback of an error. An error is one sentence; with `--json` it is one JSON object. "
        "[Exit statuses and codes](errors.md)."
    )
    blocks = [command_block(f"manyheads {name}", command) for name, command in commands]
    return page("Command line", introduction, *blocks)


def all_commands(group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", subcommand) for inner, subcommand in all_commands(command))
        else:
            yield name, command


def command_block(name: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [
        parameter for parameter in command.params if parameter.param_type_name == "option" and parameter.name != "help"
    ]
    rows = [(code(argument_name(parameter)), parameter.help or "", default_of(parameter)) for parameter in arguments]
    rows += [
        (
            ", ".join(code(opt) for opt in parameter.opts) + metavar(parameter),
            parameter.help or "",
            default_of(parameter),
        )
        for parameter in options
    ]
    usage = " ".join((name, *map(argument_name, arguments), "[OPTIONS]"))
    help_text = re.sub(r"\bExamples?: (.*)", examples, paragraphs(command.help))
    return "\n\n".join(
        (f"## {name}", f"```text\n{usage}\n```", help_text, table(("option", "meaning", "default"), rows))
    )


def examples(match: re.Match[str]) -> str:
    return "Examples: " + " · ".join(code(example) for example in match[1].split(" · "))


def argument_name(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]{}")
    name += "…" if argument.nargs == -1 and not name.endswith("…") else ""
    return name if argument.required else f"[{name}]"


def metavar(option: Any) -> str:
    if option.is_flag:
        return ""
    return f" `{option.metavar or 'NUMBER'}`"


def default_of(parameter: Any) -> str:
    if parameter.required:
        return "required"
    return "" if parameter.default is None or parameter.default is False else code(parameter.default)


# ---------------------------------------------------------------------------------------------------- tables and slots


def entries() -> list[dict[str, Any]]:
    from manyheads.cli.show import list_parts

    return list_parts()


def run_file() -> str:
    introduction = (
        "A run file is TOML: model, data, tokenizer, task, and how to train. The keys at its top are those of `run`; "
        "a field with a table, such as `train`, is a table of the file. A slot takes one kind: "
        '`optim = "adamw"` or `optim = { kind = "adamw", lr = 1e-3 }`. '
        "The model is described by [parts](parts.md). `manyheads show NAME` prints each table below."
    )
    by_name = {entry["slot"]: entry for entry in entries()}
    return page("Run file", introduction, *(entry_block(by_name[name]) for name in RUN_TABLES))


def parts() -> str:
    from manyheads import metrics  # noqa: F401  (registers them)
    from manyheads.metrics.metric import METRICS

    introduction = (
        "Every table of a model description, every slot with its kinds, and the metrics. A table has fields; a slot "
        'takes one kind: `"rope"` or `{ kind = "rope", theta = 1e6 }`. `manyheads show parts` prints the same, with '
        "your own parts if you name their file with `--parts`."
    )
    blocks = [entry_block(entry) for entry in entries() if entry["slot"] not in RUN_TABLES]
    rows = [
        (code(metric.name), metric.group, "higher" if metric.higher_is_better else "lower", summary(metric.function))
        for metric in METRICS.values()
    ]
    text = "`evaluate` reports the metrics of the task's group; `train.best.metric` names one that the task validates."
    metric_block = "\n\n".join(("## metrics", text, table(("metric", "group", "better", "meaning"), rows)))
    return page("Parts", introduction, *blocks, metric_block)


def entry_block(entry: dict[str, Any]) -> str:
    blocks = [f"## {entry['slot']}", cell(entry["meaning"])]
    if entry.get("fields"):
        blocks.append(field_table(entry["fields"]))
    for kind in entry["kinds"]:
        default = " (default)" if kind["default"] else ""
        blocks.append(f"**`{kind['kind']}`**{default}: {cell(kind['formula'])}")
        if kind["fields"]:
            blocks.append(field_table(kind["fields"]))
    return "\n\n".join(blocks)


def field_table(fields: Sequence[dict[str, Any]]) -> str:
    rows = [(code(row["field"]), row["type"], default_value(row["default"]), row["meaning"]) for row in fields]
    return table(("field", "type", "default", "meaning"), rows)


def default_value(value: Any) -> str:
    return "" if value is None or value == [] else code(json.dumps(value, ensure_ascii=False))


# -------------------------------------------------------------------------------------------------------------- Python


def python_api() -> str:
    import manyheads

    introduction = (
        "What `import manyheads` gives. Names are imported on first use. Every error is a `ManyheadsError`, "
        "which is a `ValueError` with a `code`, an `exit_status` and a `hint`."
    )
    blocks = []
    for name in sorted(manyheads.__all__, key=str.lower):
        value = getattr(manyheads, name)
        blocks.append(class_block(name, value) if inspect.isclass(value) else function_block(name, value))
    return page("Python", introduction, *blocks)


def function_block(name: str, function: Any) -> str:
    signature = f"```text\nmanyheads.{name}{signature_of(function)}\n```"
    return "\n\n".join((f"## {name}", signature, paragraphs(function.__doc__)))


def class_block(name: str, value: type) -> str:
    """A class with its own public attributes, properties and methods."""
    members: list[str] = []
    for attribute, member in vars(value).items():
        function = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
        function = inspect.unwrap(function) if callable(function) else function
        if attribute.startswith("_") or not (inspect.isfunction(function) and function.__doc__):
            continue
        is_value = isinstance(member, property) or hasattr(member, "func")
        members.append(f"- `{attribute if is_value else attribute + signature_of(function)}`: {summary(function)}")
    blocks = [f"## {name}", paragraphs(value.__doc__ or "")]
    if dataclasses.is_dataclass(value):
        fields = ", ".join(code(field.name) for field in dataclasses.fields(value))
        blocks.append(f"Fields: {fields}.")
    return "\n\n".join([*blocks, "\n".join(members)] if members else blocks)


def signature_of(function: Any) -> str:
    """Parameters and result, with the modules of types left out."""
    signature, names, starred = inspect.signature(function), list[str](), False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            names.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = (
            ""
            if parameter.default is parameter.empty
            else " = …"
            if callable(parameter.default)
            else f" = {parameter.default!r}"
        )
        names.append(f"{prefix}{parameter.name}: {parameter.annotation}{default}")
    text = f"({', '.join(names)}) -> {signature.return_annotation}"
    return re.sub(r"\b(?:[a-z_]+\.)+([A-Z]\w*)", r"\1", text)


def summary(function: Any) -> str:
    return paragraphs(function.__doc__ or "").split("\n\n", maxsplit=1)[0]


# -------------------------------------------------------------------------------------------------------------- errors


def errors() -> str:
    from manyheads import errors as module
    from manyheads.training.signals import EXIT_STATUS

    introduction = (
        "Every error has a class in `manyheads.errors`, a stable code and an exit status. All are `ManyheadsError`, "
        "which is a `ValueError`. `str(error)` is one sentence; `error.hint` says what to do next. "
        'With `--json`: `{"schema": 1, "error": {"code": …, "message": …, "hint": …}}` on standard error.'
    )
    classes = [
        error for error in vars(module).values() if inspect.isclass(error) and issubclass(error, module.ManyheadsError)
    ]
    rows = [
        (code(error.code), code(error.__name__), error.exit_status, paragraphs(error.__doc__ or ""))
        for error in classes[1:]
    ]
    statuses = table(("exit status", "meaning"), exit_statuses(EXIT_STATUS))
    return page(
        "Errors",
        introduction,
        "## Exit statuses",
        statuses,
        "## Codes",
        table(("code", "class", "exit", "meaning"), rows),
    )


def exit_statuses(signals: dict[str, int]) -> list[tuple[str, str]]:
    return [
        ("0", "success"),
        ("1", "an unexpected error, a run that diverged, an audit with a failed check, or a lab whose claim fails"),
        ("2", "a wrong argument, option or run file"),
        ("3", "data that cannot be used"),
        ("4", "a model file that is broken or must not be trusted"),
        ("5", "not enough disk or memory"),
        (str(signals["terminated"]), "stopped by SIGTERM, and saved if a step was made; the same command resumes"),
        (str(signals["interrupted"]), "stopped by Ctrl-C"),
        ("143", "stopped by a second SIGTERM, without saving"),
    ]


def main(folder: Path = FOLDER, architecture_page: Path = ARCHITECTURE, labs: Path = generate_labs.FOLDER) -> None:
    write_pages(folder, pages())
    architecture_page.write_text(architecture(), encoding="utf-8")
    write_pages(labs, generate_labs.lab_pages())


def write_pages(folder: Path, texts: dict[str, str]) -> None:
    """Writes the pages and figures, and removes those that are no longer made."""
    for path in (*folder.glob("*.md"), *folder.glob("*/*.svg")):
        if str(path.relative_to(folder)) not in texts:
            path.unlink()
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*map(Path, sys.argv[1:]))
