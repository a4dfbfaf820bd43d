"""The command line. Data goes to standard output, everything else to standard error; torch is imported by the verbs that need it."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="manyheads",
    help="One transformer, every part swappable, every claim testable.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXIT_FAILURE, EXIT_USAGE, EXIT_FULL, EXIT_INTERRUPTED = 1, 2, 5, 130


def print_version(wanted: bool) -> None:
    if wanted:
        import torch

        from manyheads import __version__

        device = f"cuda ({torch.cuda.get_device_name()})" if torch.cuda.is_available() else "cpu"
        typer.echo(f"manyheads {__version__} · torch {torch.__version__} · {device}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Name, version, torch, device.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Reads the options that stand before the verb."""


def whole(text: str | int) -> int:
    """A number as a user types it."""
    if not re.fullmatch("[+-]?[0-9]{1,30}", str(text)):
        raise typer.BadParameter(f"given {str(text)[:40]!r}, expected a whole number")
    return int(text)


Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="PATH=VALUE", help="Change one value of the description; may be repeated. Example: -s decoder.position=rope"
    ),
]


def load_parts(context: typer.Context, paths: list[Path] | None) -> list[Path] | None:
    from manyheads import spec

    for path in paths or [] if not context.resilient_parsing else []:
        spec.load_parts(path)
    return paths


RunOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="PATH=VALUE", help="Change one value of the run; may be repeated. Example: -s model.decoder.position=rope"
    ),
]
Parts = Annotated[
    list[Path] | None,
    typer.Option(
        "--parts",
        metavar="FILE.py",
        callback=load_parts,
        help="A Python file with parts of your own. It is executed; nothing that is merely read ever is.",
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or mps; auto takes a GPU if there is one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


@app.command()
def show(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|FILE.toml|parts|SLOT]", help="A preset, a file, 'parts', or one slot or table. Nothing: the presets."
        ),
    ] = None,
    overrides: Overrides = None,
    parts: Parts = None,
    batch: Annotated[int, typer.Option(parser=whole, metavar="N", help="Texts at once, for the costs.")] = 1,
    length: Annotated[
        int | None, typer.Option(parser=whole, metavar="N", help="Tokens a text, for the costs; the model's context, or 128, if not given.")
    ] = None,
    source_length: Annotated[int | None, typer.Option(parser=whole, metavar="N", help="Tokens a source; as --length if not given.")] = None,
    as_toml: Annotated[bool, typer.Option("--toml", help="The resolved description: defaults written out, towers made whole.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a model in full, or what there is to choose from.

    Examples: manyheads show gpt2 · manyheads show transformer-base -s encoder.position=rope -s decoder.core=argmax ·
    manyheads show position · manyheads show parts --json
    """
    import manyheads.train.run  # noqa: F401  (fills the slots)
    from manyheads import show as shown
    from manyheads.spec import SLOTS, SpecError, to_toml

    console = console_for_output()
    if target is None or target == "parts" or target in SLOTS or target in shown.TABLES:
        if overrides or as_toml or length is not None or source_length is not None or batch != 1:
            raise SpecError("overrides, lengths and --toml are for one model; name a preset or a file")
        if target is None:
            rows = shown.list_presets()
            write_json({"schema": shown.SCHEMA, "presets": rows}) if as_json else shown.print_presets(rows, console)
        else:
            slots = shown.list_parts(None if target == "parts" else target)
            write_json({"schema": shown.SCHEMA, "slots": slots}) if as_json else shown.print_parts(slots, console)
        return
    if as_json and as_toml:
        raise SpecError("--json and --toml are two forms of one answer; choose one")
    data = shown.describe_model(target, overrides or [], batch=batch, length=length, source_length=source_length)
    if source_length and data["flops"]["source_length"] is None:
        raise SpecError(f"--source-length is for a model that reads a source; {target} does not")
    if as_json:
        write_json(data)
    elif as_toml:
        typer.echo(to_toml(data["spec"] | ({"about": data["about"]} if data["about"] else {})), nl=False)
    else:
        shown.print_model(data, console)


@app.command()
def new(
    task: Annotated[str, typer.Argument(metavar="TASK", help="translate, summarise, classify, embed, lm, mae or copy.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Your data: .tsv, .jsonl or .txt. Nothing: data that is on every machine.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="RUN.toml", help="Where to write; standard output if not given.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Another shape than the one that is advised, such as recurrent.")
    ] = None,
    fields: Annotated[str | None, typer.Option(metavar="A,B", help="The columns to read, by name or by number from 0.")] = None,
    minutes: Annotated[float, typer.Option(metavar="N", help="How long training may take on this machine.")] = 30.0,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a run file for a task and your data: shape, size, tokenizer, batch and steps are chosen, and it says why.

    Examples: manyheads new translate pairs.tsv --output run.toml · manyheads new classify reviews.jsonl --fields text,stars ·
    manyheads new copy
    """
    from manyheads.advice import new as advise
    from manyheads.spec import SpecError, one_line
    from manyheads.train.files import put, writing

    if output is not None and output.exists() and (output.is_dir() or not force):
        raise SpecError(f"{output} is a folder; name a file" if output.is_dir() else f"{output} is there already; --force writes over it")
    with waiting(f"looking at {file or task} and at this machine"):
        text, reasons = advise(task, file, shape=shape, fields=fields, minutes=minutes)
    for reason in reasons:
        typer.echo(one_line(reason), err=True)
    if output is None:
        typer.echo(text, nl=False)
        return
    with writing(output):
        put(output, text)
    command = shlex.join(("manyheads", "train", str(output), "--output", f"runs/{output.stem}"))
    typer.echo(f"{output} written; {command}", err=True)


Source = Annotated[
    str, typer.Argument(metavar="PATH", help="A Hugging Face folder, OWNER/NAME on the Hub, a .gguf file, a run, or a fairseq folder.")
]


@app.command()
def train(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file: model, data, tokenizer, objective, how to train.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="The run's folder; the same command again goes on there.")
    ] = None,
    overrides: RunOverrides = None,
    parts: Parts = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would take (memory, disk, epochs, time on this machine) and write nothing.")
    ] = False,
    seed: Annotated[int | None, typer.Option(parser=whole, metavar="N", help="The same as -s seed=N.")] = None,
    device: Device = "auto",
    resume: Annotated[
        str, typer.Option(metavar="auto|never|PATH", help="Go on where the folder stopped; refuse to; or go on from this checkpoint of it.")
    ] = "auto",
    override_resume: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help="Go on although this field is another than before; may be repeated.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing unless something is wrong.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model, or go on where a run stopped. Ctrl-C once finishes the step and saves.

    Examples: manyheads train run.toml --output runs/first -s train.steps=2000 · manyheads train run.toml --dry-run
    """
    from dataclasses import asdict

    from manyheads.train.run import made_ready, read_run_file
    from manyheads.training import EXIT, foreseen, print_foreseen, trained

    if output is None and not dry_run:
        raise typer.BadParameter("it is missing: where should the run go?", param_hint="--output")
    asked = read_run_file(run, [*(overrides or []), *([] if seed is None else [f"seed={seed}"])])
    if output is None or dry_run:
        found = foreseen(made_ready(asked), output, device=device, resume=resume, overridden=override_resume or ())
        write_json(found) if as_json else print_foreseen(found, console_for_output())
        return
    ended = trained(asked, output, quiet=quiet or as_json, device=device, resume=resume, overridden=override_resume or ())
    if as_json:
        write_json({"schema": 1, "folder": str(output)} | asdict(ended))
    elif not quiet and EXIT[ended.reason]:
        typer.echo(f"stopped after {ended.step:,} of {asked.train.steps:,} steps, and saved; the same command goes on from there", err=True)
    elif not quiet:
        typer.echo(f"ended after {ended.step:,} steps ({ended.reason}); manyheads evaluate {output} tells how good it is", err=True)
    raise typer.Exit(EXIT[ended.reason])


@app.command()
def compare(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run that is changed.")],
    axes: Annotated[
        list[str], typer.Argument(metavar="PATH=A,B,…", help="What is changed, and its values; a bare name means every tower's.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the runs go; again, it goes on there.")],
    seeds: Annotated[int, typer.Option(parser=whole, metavar="N", help="How often each is trained, with other seeds.")] = 3,
    jobs: Annotated[int, typer.Option(parser=whole, metavar="N", help="Runs side by side, each with one thread.")] = 1,
    device: Device = "auto",
    overrides: RunOverrides = None,
    parts: Parts = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing unless something is wrong.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train every combination of some changes, with several seeds, and print a table of means and deviations; and a picture.

    Example: manyheads compare run.toml position=none,sinusoidal,rope residual=pre,post --seeds 3 --output runs/positions
    """
    from manyheads.chart import draw, print_compared
    from manyheads.compare import compare as run_all
    from manyheads.training import EXIT

    found = run_all(
        run, axes, output, seeds=seeds, jobs=jobs, device=device, overrides=overrides or [], parts=parts or [], quiet=quiet or as_json
    )  # fmt: skip
    write_json(found) if as_json else print_compared(found, console_for_output())
    if any(row["seeds"] for row in found["cells"]):
        try:
            draw(found, output / "compare.png")
            if not quiet and not as_json:
                typer.echo(f"figures of unseen rows; curves in {output / 'compare.png'}", err=True)
        except ImportError:
            typer.echo("no picture is drawn: pip install 'manyheads[plot]'", err=True)
    if found["stopped"]:
        typer.echo("stopped; the same command goes on where it was", err=True)
        raise typer.Exit(EXIT[found["stopped"]])
    if all(row["wrong"] for row in found["cells"]):
        raise typer.Exit(EXIT_FAILURE)


data_app = typer.Typer(help="Look at data, or make it ready once for many runs.", rich_markup_mode=None, no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("prepare")
def data_prepare(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file: its data, its tokenizer, its objective.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the ids go; it must not exist yet.")],
    overrides: RunOverrides = None,
    parts: Parts = None,
) -> None:
    """Write a run's data as ids, once; runs then map the files: data = { kind = "prepared", path = "DIR" }.

    Example: manyheads data prepare run.toml --output data/ids
    """
    from manyheads.dataset import prepare_run
    from manyheads.train.run import read_run_file

    prepare_run(read_run_file(run, overrides or []), output)
    path = json.dumps(str(output), ensure_ascii=False)
    typer.echo(f'{output} written; in a run file: data = {{ kind = "prepared", path = {path} }}', err=True)


@data_app.command("show")
def data_show(
    target: Annotated[Path, typer.Argument(metavar="RUN.toml|DIR", help="A run file, the folder of a run, or prepared data.")],
    overrides: RunOverrides = None,
    parts: Parts = None,
    as_json: AsJson = False,
) -> None:
    """Count rows, classes and tokens, draw how long they are, and print a few.

    Example: manyheads data show run.toml
    """
    from manyheads.dataset import describe_data, print_data

    found = describe_data(target, overrides or [])
    write_json(found) if as_json else print_data(found, console_for_output())


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the run goes; again, it goes on there.")] = Path(
        "runs/dates"
    ),
) -> None:
    """Train a small encoder–decoder to read dates in twenty languages, and look at what it learned. About a minute.

    Example: manyheads demo
    """
    from manyheads.demo import run

    raise typer.Exit(run(output, console_for_output()))


@app.command()
def predict(
    path: Source,
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="What to read; ids as numbers where the folder has no tokenizer. - or none: standard input."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="One text a line; .gz is unpacked.")] = None,
    max_new: Annotated[int, typer.Option(parser=whole, metavar="N", help="Tokens to write, at most.")] = 64,
    beams: Annotated[int, typer.Option(parser=whole, metavar="N", help="Texts kept at a time in a search for the likeliest; 1: none.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="α of the search: log p / ((5 + length) / 6)^α. Higher gives longer texts.")] = 0.6,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above, one is drawn.")] = 0.0,
    seed: Annotated[int, typer.Option(parser=whole, metavar="N", help="Of what is drawn.")] = 0,
    encoding_errors: Annotated[str, typer.Option(metavar="stop|replace", help="What to do about a line that is not UTF-8.")] = "stop",
    device: Device = "auto",
    parts: Parts = None,
    as_json: AsJson = False,
) -> None:
    """Do what a checkpoint is for: continue, fill in, classify, embed or answer.

    Of many texts, one a line, each answer is one line, in their order: line breaks within it become spaces, a blank line stays blank.
    With --json it is one object a line, null for a blank one.

    Examples: manyheads predict ./gpt2 "The capital of France is" · manyheads predict ./bert "Paris is in [MASK]." ·
    manyheads predict runs/de-en --file german.txt --beams 4 > english.txt
    """
    from manyheads.checkpoint import load
    from manyheads.generate.sample import Writing
    from manyheads.spec import SpecError

    writing = Writing(max_new, temperature, seed, beams, length_penalty)
    if encoding_errors not in ("stop", "replace"):
        raise SpecError(f"--encoding-errors is {encoding_errors!r}, expected stop or replace")
    if text is not None and file is not None:
        raise SpecError("given a TEXT and --file; choose one")
    if text is None and file is None and sys.stdin.isatty():
        raise SpecError("there is nothing to read: give a TEXT, --file FILE, or texts on standard input, one a line")
    if text is None or text == "-":
        predict_lines(path, file, writing, encoding_errors, device=device, as_json=as_json)
        return
    from manyheads.answer import predict_all
    from manyheads.model.build import device_for
    from manyheads.predicting import line_of

    with waiting(f"reading {path}"):
        ((_, found),) = predict_all(load(path, device=device_for(device)), [text], writing)
    if "cut" in found:
        typer.echo(f"of this text the first {found['cut']:,} tokens were read, as many as in training", err=True)
    if as_json:
        write_json({"schema": 1} | found)
    elif found["task"] not in ("classify", "fill"):
        typer.echo(found["written"] if isinstance(found.get("written"), str) else line_of(found))
    else:
        rows = found["classes"] if found["task"] == "classify" else [row for place in found["filled"] for row in place["tokens"]]
        for row in rows:
            typer.echo(f"{row.get('probability', row.get('score')):8.4f}  {row.get('class', row.get('token'))}")


def predict_lines(path: str, file: Path | None, writing: Any, encoding_errors: str, *, device: str, as_json: bool) -> None:
    """One answer a line, as many at once as are read at once."""
    from itertools import chain

    from manyheads.checkpoint import load
    from manyheads.model.build import device_for
    from manyheads.predicting import Counted, answered, chunks, line_of, lines_of
    from manyheads.spec import one_line

    lines = lines_of(file, encoding_errors)
    given = chunks(lines)
    first = next(given)  # before the model is loaded: what cannot be read is said at once
    with waiting(f"reading {path}"):
        loaded = load(path, device=device_for(device))
    were_cut = 0
    with Counted(lines.path) as told:
        for found in answered(loaded, lines.path, chain([first], given), writing, told):
            told.hide()
            were_cut += sum("cut" in one for one in found if one)
            for one in found:
                typer.echo(line_of(one)) if not as_json else write_json(None if one is None else {"schema": 1} | one)
    for fault, count in lines.faults.items():
        typer.echo(one_line(f"{lines.path}: {count:,} lines {fault}"), err=True)
    if were_cut:
        typer.echo(one_line(f"{lines.path}: of {were_cut:,} texts only the beginning was read, as much as in training"), err=True)


@app.command()
def evaluate(
    path: Source,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Another file to evaluate on, all of it; of the form that the run learned from.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK", help="causal, masked, seq2seq, classify or contrastive; if not given, what the run or its head is for."
        ),
    ] = None,
    split: Annotated[str, typer.Option(metavar="SPLIT", help="validation, test or train.")] = "validation",
    overrides: RunOverrides = None,
    rows: Annotated[int | None, typer.Option(parser=whole, metavar="N", help="Only the first N rows.")] = None,
    longest: Annotated[int | None, typer.Option(parser=whole, metavar="N", help="Tokens of a text that are read; the rest is cut.")] = None,
    beams: Annotated[int, typer.Option(parser=whole, metavar="N", help="Texts that are followed while writing; 1 is greedy.")] = 4,
    length_penalty: Annotated[float, typer.Option(help="α of the search: log p / ((5 + length) / 6)^α. Higher gives longer texts.")] = 0.6,
    max_new: Annotated[
        int | None,
        typer.Option(
            parser=whole, metavar="N", help="Tokens to write, at most; if not given, twice the longest learned, of a thousand, and 8."
        ),
    ] = None,
    examples: Annotated[int, typer.Option(parser=whole, metavar="N", help="Show the first N answers beside what was wanted.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Keep every answer, one a line; of pictures, a .png of examples.")
    ] = None,
    parts: Parts = None,
    device: Device = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Score a model on rows it has not seen, beside the baselines that make a number mean something.

    Examples: manyheads evaluate runs/dates · manyheads evaluate runs/reviews --split test --json · manyheads evaluate ./encoder
    --data queries.jsonl -s data.documents=docs.jsonl
    """
    from manyheads import scoreboard
    from manyheads.evaluation import How
    from manyheads.evaluation import evaluate as run

    scoreboard.check_free(output)
    drawn = output is not None and output.suffix == ".png"
    how = How(rows, longest, beams, length_penalty, max_new, examples or (scoreboard.PICTURES if drawn else 0))
    with scoreboard.progress(quiet=quiet) as tell:
        report, written = run(path, data=data, task=task, split=split, overrides=overrides or [], how=how, device=device, tell=tell)
    shown = report | {"examples": report["examples"][:examples]}
    write_json(shown) if as_json else scoreboard.show(shown, console_for_output())
    scoreboard.keep(output, written, report["examples"])


@app.command()
def export(
    path: Source,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Where to write; it must not exist yet.")],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="hf: for transformers. gguf: for llama.cpp. onnx: for onnxruntime. manyheads: as described here. If not given: gguf for a "
            "target that ends so, otherwise hf.",
        ),
    ] = None,
    form: Annotated[
        str | None, typer.Option(metavar="FORM", help="How a GGUF file stores matrices: f32, f16 or q8_0; f32 if not given.")
    ] = None,
    parts: Parts = None,
) -> None:
    """Write a model out again, for other libraries to open.

    Examples: manyheads export ./model ./copy · manyheads export ./model model.gguf --to gguf --form q8_0 ·
    manyheads export ./model ./graph --to onnx
    """
    from manyheads.checkpoint import export as run
    from manyheads.spec import one_line

    with waiting(f"reading {path} and writing {target}"):
        run(path, target, to=to or ("gguf" if target.suffix == ".gguf" else "hf"), form=form)
    typer.echo(one_line(f"{target} written"), err=True)


@app.command()
def audit(path: Source, parts: Parts = None, as_json: AsJson = False) -> None:
    """Check a model: does its attention sum to one, does it see the future, does padding matter, do caches agree?

    Example: manyheads audit ./model
    """
    from dataclasses import asdict

    from manyheads.auditing import audit as run

    with waiting(f"checking {path}"):
        rows = run(path)
    if as_json:
        write_json({"schema": 1, "rows": [asdict(row) for row in rows]})
    else:
        print_audit(rows)
    if any(row.verdict == "fault" for row in rows):
        raise typer.Exit(EXIT_FAILURE)


def print_audit(rows: list[Any]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("law", "", "figure", ""):
        table.add_column(name, overflow="fold")
    marks = {"ok": "[green]ok[/]", "fault": "[bold red]FAULT[/]", "not checked": "[dim]–[/]"}
    for row in rows:
        table.add_row(row.law, marks[row.verdict], "" if row.figure is None else f"{row.figure:.3g}", escape(row.said))
    console_for_output().print(table)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Tells whoever sits at a terminal what is going on; warnings are one line."""
    from rich.console import Console

    from manyheads.spec import one_line

    console = Console(stderr=True)
    with warnings.catch_warnings(), console.status(one_line(text)) if sys.stderr.isatty() else nullcontext():
        warnings.showwarning = lambda message, *_, **__: print(f"manyheads: {one_line(str(message))}", file=sys.stderr)
        yield


def console_for_output() -> Any:
    from rich.console import Console

    # piped output is for a program or a file: never wrapped to a narrow default
    columns = os.environ.get("COLUMNS", "")
    return Console() if sys.stdout.isatty() else Console(width=int(columns) if re.fullmatch("[1-9][0-9]{1,3}", columns) else 200)


def write_json(data: Any) -> None:
    typer.echo(json.dumps(data, ensure_ascii=False, allow_nan=False, default=str))


def main() -> None:
    """Runs a command; an error is one sentence on standard error and an exit code, a traceback only with --debug."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter still gets the rest
    debug = "--debug" in sys.argv[1:]
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        sys.exit(app(arguments or ["--help"], standalone_mode=False))
    except BrokenPipeError:
        # the reader went away; closing quietly is what a pipe expects
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILURE)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        sentence, code = explained(error)
        print(f"manyheads: {sentence}", file=sys.stderr)
        sys.exit(code)


def explained(error: Exception) -> tuple[str, int]:
    """An error as one sentence and an exit code."""
    from manyheads.spec import one_line

    if usage := getattr(error, "format_message", None):  # of the command line itself
        context = getattr(error, "ctx", None)
        return one_line(f"{usage().rstrip('.')} ('{context.command_path if context else 'manyheads'} --help' tells more)"), EXIT_USAGE
    if isinstance(error, ValueError):
        return one_line(str(error)), getattr(error, "exit_code", EXIT_USAGE)
    if isinstance(error, OSError) and error.errno and error.filename is not None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return one_line(f"cannot read or write {error.filename}: {error.strerror}"), EXIT_FULL if full else EXIT_USAGE
    return one_line(f"{error} ({type(error).__name__}; --debug shows where)"), EXIT_FAILURE
