"""`manyheads lab`: lists the labs, runs them, and writes a chapter of them as a notebook."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.cli import console
from manyheads.cli.lab_report import print_claims, report
from manyheads.errors import ManyheadsError, UsageError, one_line

if TYPE_CHECKING:
    from manyheads.labs.lab import Lab, LabRun, Parameter, Size
    from manyheads.labs.results import Outcome

MAX_NOTE = 40  # characters beside the bar

lab_app = typer.Typer(
    help="Run experiments that test claims about transformers, and report a verdict for each.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
console.app.add_typer(lab_app, name="lab")

# ---------------------------------------------------------------------------------------------------------------- list


@lab_app.command("list")
def lab_list(
    rows: Annotated[bool, console.flag("--rows", "List every claim and erratum, with what shows it.")] = False,
    parts: console.Parts = None,
    as_json: console.AsJson = False,
) -> None:
    """List the labs, or with --rows the claims of the documents and what shows each of them.

    Example: manyheads lab list --rows
    """
    from manyheads.labs.claims import read_claims
    from manyheads.labs.lab import all_labs
    from manyheads.labs.views.explain import claims_of

    claims = read_claims()
    if rows:
        print_claims([*claims.rows.values()], [*claims.errata.values()], (), as_json=as_json)
    elif as_json:
        console.print_json({"schema": 1, "labs": [lab_tree(lab) for lab in all_labs().values()]})
    else:
        table = console.new_table(["lab", "claim", "rows and errata", "sources"], ["seconds", "with --full"])
        for lab in all_labs().values():
            judged = " ".join([*lab.rows, *(f"erratum {name}" for name in lab.errata)])
            sources = "; ".join(dict.fromkeys(row.source for row in claims_of(lab)))
            table.add_row(lab.id, lab.title, judged, sources, *(f"{seconds:,.1f}" for seconds in lab.seconds))
        console.stdout().print(table)


def lab_tree(lab: Lab) -> dict[str, Any]:
    from manyheads.labs.views.explain import claims_of, file_of

    return {
        "lab": lab.id, "chapter": lab.chapter, "claim": lab.title, "text": lab.text,
        "rows": list(lab.rows), "errata": list(lab.errata), "sources": [row.source for row in claims_of(lab)],
        "seconds": {"quick": lab.seconds[0], "full": lab.seconds[1]}, "file": file_of(lab),
        "parameters": [
            {
                "name": parameter.name, "type": parameter.type.__name__, "default": parameter.default,
                "meaning": parameter.meaning,
            }
            for parameter in lab.parameters()
        ],
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- run


@lab_app.command(
    "run", add_help_option=False, context_settings={"ignore_unknown_options": True, "help_option_names": []}
)
def lab_run(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        console.argument(
            "ID|CHAPTER… [--FLAG VALUE…]", "Labs or chapters; one lab may be followed by flags of its own."
        ),
    ] = None,
    every: Annotated[bool, console.flag("--all", "Run every lab.")] = False,
    quick: Annotated[bool, console.flag("--quick", "Small settings that take seconds (default).")] = False,
    full: Annotated[bool, console.flag("--full", "Larger settings: slower, with wider margins.")] = False,
    seed: Annotated[int, console.integer_option("Random seed.")] = 0,
    jobs: Annotated[
        int | None,
        console.integer_option("Labs at a time [default: the number of cores]; the results do not depend on it."),
    ] = None,
    html: Annotated[Path | None, console.path_option("FILE", "Also write a page that opens offline.", "--html")] = None,
    parts: console.Parts = None,
    as_json: console.AsJson = False,
    show_help: Annotated[bool, typer.Option("--help", "-h", help="Show this text, or the flags of one lab.")] = False,
) -> None:
    """Run labs and judge their claims: all of them, those of a chapter, or one, with flags of its own.

    One lab prints a page: the claim, the prediction, what was measured, a figure, what to try next, and the code.
    Several print a line each, and then every claim with its verdict. Exit status 1 if a claim fails.

    Examples: manyheads lab run copying --strength 5 · manyheads lab run masks · manyheads lab run --all --html a.html
    """
    from manyheads.labs.lab import choose_labs

    words = names or []
    if show_help and not words:
        typer.echo(context.get_help())
        return
    ids, flags = split_words(words)
    check_options(ids, every=every, quick=quick, full=full, jobs=jobs, html=html)
    labs = choose_labs(ids)
    if show_help:
        print_flags(labs)
        return
    parameters = read_flags(labs, flags)
    start = time.perf_counter()
    size: Size = "full" if full else "quick"
    if len(labs) == 1:
        outcomes: list[Outcome] = [run_one(labs[0], size, seed, parameters)]
    else:
        outcomes = run_many(labs, size, seed, jobs)
    report(outcomes, time.perf_counter() - start, has_all=every, as_json=as_json, html=html)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names, and from the first flag on the flags of a lab."""
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    return [*words[:first]], [*words[first:]]


def check_options(
    ids: Sequence[str], *, every: bool, quick: bool, full: bool, jobs: int | None, html: Path | None
) -> None:
    from manyheads.files.write import check_new_file

    if every == bool(ids):
        raise UsageError("name a lab or a chapter, or give --all", hint="manyheads lab list")
    if quick and full:
        raise UsageError("--quick and --full exclude each other")
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs is {jobs}, expected 1 or more")
    if html is not None:
        check_new_file(html, force=True)


def read_flags(labs: Sequence[Lab], flags: Sequence[str]) -> dict[str, Any]:
    """The parameters of one lab from its flags: --name VALUE, --name=VALUE, and --name or --no-name of a switch."""
    if not flags:
        return {}
    if len(labs) != 1:
        raise UsageError(
            f"a flag such as {flags[0]} belongs to one lab, given {len(labs)} labs", hint="manyheads lab run ID --help"
        )
    parameters = {parameter.name.replace("_", "-"): parameter for parameter in labs[0].parameters()}
    values, words = dict[str, Any](), iter(flags)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        parameter = parameters.get(name) or parameters.get(name.removeprefix("no-"))
        if parameter is None or not word.startswith("--"):
            raise unknown_flag(labs[0], word, parameters)
        if parameter.type is bool and not equals:
            values[parameter.name] = name in parameters
        else:
            value = text if equals else next(words, None)
            if value is None:
                raise UsageError(f"{word} needs a value", hint=f"manyheads lab run {labs[0].id} --help")
            values[parameter.name] = parse(parameter, value, word)
    return values


def unknown_flag(lab: Lab, word: str, names: Sequence[str] | dict[str, Parameter]) -> UsageError:
    from manyheads.spec import did_you_mean, quote

    flags = [f"--{name}" for name in names]
    return UsageError(
        f"{lab.id} has no flag {quote(word)}{did_you_mean(word, flags)}", hint=f"manyheads lab run {lab.id} --help"
    )


def parse(parameter: Parameter, text: str, word: str) -> Any:
    from manyheads.labs.lab import TYPES
    from manyheads.spec import quote

    booleans = {"true": True, "false": False}
    try:
        return booleans[text] if parameter.type is bool else parameter.type(text)
    except (ValueError, KeyError):
        flag = word.partition("=")[0]
        raise UsageError(f"{flag} is {quote(text)}, expected {TYPES[parameter.type]}") from None


def print_flags(labs: Sequence[Lab]) -> None:
    """The flags of each lab, with their meanings and defaults."""
    for lab in labs:
        out = console.stdout()
        out.print(f"manyheads lab run {lab.id}: {lab.title}", style="bold")
        table = console.new_table(["flag", "meaning"], ["default", "with --full"])
        for parameter, full in zip(
            lab.parameters(), (lab.parameters_at("full")[parameter.name] for parameter in lab.parameters()), strict=True
        ):
            flag = parameter.name.replace("_", "-")
            name = f"--{flag}, --no-{flag}" if parameter.type is bool else f"--{flag} {parameter.type.__name__.upper()}"
            table.add_row(
                name, parameter.meaning, str(parameter.default), "" if full == parameter.default else str(full)
            )
        out.print(table)


def run_one(lab: Lab, size: Size, seed: int, parameters: dict[str, Any]) -> LabRun:
    from manyheads.labs.lab import run_lab

    with console.Progress(f"running {lab.id}") as progress:
        try:
            return run_lab(lab, size=size, seed=seed, progress=progress.update, **parameters)
        except (ValueError, RuntimeError, ArithmeticError, LookupError) as error:
            if not parameters or isinstance(error, ManyheadsError):
                raise
            raise UsageError(f"{lab.id} cannot run with these parameters: {one_line(str(error))}") from error


def run_many(labs: Sequence[Lab], size: Size, seed: int, jobs: int | None) -> list[Outcome]:
    from manyheads.labs.processes import run_labs
    from manyheads.labs.results import available_cores

    with console.Progress(f"running {len(labs)} labs") as progress:

        def show(ended: int, running: Sequence[str]) -> None:
            note = ", ".join(running)
            progress.update("lab", ended, len(labs), note if len(note) <= MAX_NOTE else f"{note[:MAX_NOTE]}…")

        return run_labs(labs, size=size, seed=seed, jobs=jobs or available_cores(), on_lab=show)


# ------------------------------------------------------------------------------------------------------------ notebook


@lab_app.command("notebook")
def lab_notebook(
    chapter: Annotated[str, console.argument("CHAPTER", "A chapter, such as attention.")],
    output: Annotated[
        Path | None, console.output_option("FILE.ipynb", "File to write [default: CHAPTER.ipynb].")
    ] = None,
    parts: console.Parts = None,
    as_json: console.AsJson = False,
) -> None:
    """Write the labs of a chapter as a Jupyter notebook, with the parameters of each to change.

    Example: manyheads lab notebook attention -o attention.ipynb
    """
    from manyheads.files.write import check_new_file, write_text
    from manyheads.labs.claims import Chapter, read_claims
    from manyheads.labs.lab import all_labs
    from manyheads.labs.views.notebook_file import notebook_json
    from manyheads.spec import did_you_mean, quote

    labs = [lab for lab in all_labs().values() if lab.chapter == chapter]
    if not labs:
        chapters = {lab.chapter for lab in all_labs().values()}
        raise UsageError(f"no chapter {quote(chapter)} has labs{did_you_mean(chapter, chapters)}")
    path = output or Path(f"{chapter}.ipynb")
    check_new_file(path)
    about = read_claims().chapters.get(chapter, Chapter(chapter, chapter, ""))
    write_text(path, notebook_json(about, labs))
    if as_json:
        console.print_json({"schema": 1, "path": str(path), "labs": [lab.id for lab in labs]})
    else:
        console.print_note(f"wrote {path}")
