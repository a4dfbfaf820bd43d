"""`manyheads evaluate`: scores of a model next to those of baselines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from manyheads.cli import console, generation
from manyheads.errors import MissingExtraError, one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from manyheads.spec import Tree

MAX_CLASSES = 20  # classes whose scores are printed
MAX_MATRIX = 10  # classes of a confusion matrix that is printed
MAX_CONFUSIONS = 10  # pairs of classes that are printed if there is no matrix
DEFAULT_IMAGES = 8  # in a .png if --examples is not given
ARROWS = {"lower": "↓", "higher": "↑"}


@console.app.command()
def evaluate(
    path: console.CheckpointPath,
    data: Annotated[
        str | None, console.option("FILE", "Evaluate on all rows of this file instead of the run's data.")
    ] = None,
    task: Annotated[
        str | None, console.option("TASK", "A kind of 'manyheads show task' [default: the checkpoint's].")
    ] = None,
    split: Annotated[str, console.option("SPLIT", "validation, test or train.")] = "validation",
    overrides: console.RunOverrides = None,
    max_rows: Annotated[int | None, console.integer_option("Only the first N rows.")] = None,
    max_length: Annotated[int | None, console.integer_option("Truncate texts to this many tokens.")] = None,
    num_beams: Annotated[
        int | None, console.integer_option("Beam width; 1 disables beam search [default: 4 with decoding gnmt-beam].")
    ] = None,
    length_penalty: generation.LengthPenalty = None,
    decoding: generation.Decoding = None,
    max_new_tokens: Annotated[
        int | None,
        console.integer_option(
            "Maximum tokens to generate [default: 8 more than twice the longest of 1,000 training targets]."
        ),
    ] = None,
    examples: Annotated[int, console.integer_option("Show the first N outputs with their targets.")] = 0,
    output: Annotated[
        Path | None,
        console.output_option(
            "FILE",
            "Write text, reference and prediction of each row as JSON lines; "
            "of retrieval query, document and rank; of mae images as a .png.",
        ),
    ] = None,
    parts: console.Parts = None,
    device: console.Device = "auto",
    weights: console.Weights = None,
    quiet: console.Quiet = False,
    as_json: console.AsJson = False,
) -> None:
    """Score a model on its validation set, next to baselines.

    Examples: manyheads evaluate runs/dates · manyheads evaluate runs/reviews --split test --json ·
    manyheads evaluate ./encoder --data queries.jsonl -s data.documents=docs.jsonl
    """
    from manyheads.training.evaluator import evaluate as run

    check_output(output)
    console.check_exists(data)
    is_image = output is not None and output.suffix == ".png"
    with console.Progress(f"loading {path}", quiet=quiet or as_json) as progress:
        report = run(
            path,
            data=data,
            task=task,
            split=split,
            overrides=overrides or [],
            max_rows=max_rows,
            max_length=max_length,
            max_new_tokens=max_new_tokens,
            examples=examples or (DEFAULT_IMAGES if is_image else 0),
            output=None if output is None else "images" if is_image else "rows",
            device=device,
            weights=weights,
            progress=progress.update,
            **generation.settings_of({"num_beams": num_beams, "length_penalty": length_penalty, "decoding": decoding}),
        )
    outputs = report.pop("outputs")
    short_report = report | {"examples": report["examples"][:examples]}
    if output is not None:  # before anything is printed, where the reader may have gone
        write_output(output, outputs, report["examples"])
    console.print_json(short_report) if as_json else print_report(short_report, console.stdout())


def print_report(report: Tree, out: Console) -> None:
    """Prints a table with one row per metric and one column per model; the primary metrics are bold."""
    from rich.table import Column, Table

    from manyheads.metrics.metric import format_value

    documents = f" among {report['documents']:,} documents" if "documents" in report else ""
    out.print(f"{report['task']} · {report['split']} · {report['rows']:,} rows{documents} · {report['seconds']:,.1f} s")
    out.print(report["data"], style="dim")
    table = console.new_table(["metric", ""], report["metrics"])
    for metric, better in report["better"].items():
        values = [scores.get(metric) for scores in report["metrics"].values()]
        cells = ["–" if value is None else format_value(metric, value) for value in values]
        table.add_row(metric, ARROWS[better], *cells, style="bold" if metric in report["primary"] else "dim")
    out.print(table)
    if "by_class" in report:
        print_classes(report, out)
    for line in (*report["notes"], *(f"{name}: {signature}" for name, signature in report["signatures"].items())):
        out.print(line, style="dim")
    for example in report["examples"]:
        out.print()
        if has_images(example):
            images = Table(
                *(Column(name, no_wrap=True) for name in example), box=None, show_edge=False, header_style="dim"
            )
            images.add_row(*(image_text(image, out) for image in example.values()))
            out.print(images)
        else:
            for name, text in example.items():
                out.print(f"  {name:>9}  {one_line(text)}")


def print_classes(report: Tree, out: Console) -> None:
    """Prints precision, recall and F₁ of the classes, and the confusion matrix; only the worst if there are many."""
    rows, names, matrix = report["by_class"], report["classes"], report["confusion_matrix"]
    worst = sorted((row for row in rows if row["f1"] is not None), key=lambda row: (row["f1"], -row["rows"]))
    is_long = len(rows) > MAX_CLASSES
    title = f"the {MAX_CLASSES} classes of {len(rows):,} with the lowest F₁; --json has all" if is_long else None
    scores = ("precision", "recall", "f1")
    table = console.new_table(["class"], [*scores, "rows"], title=title)
    for row in worst[:MAX_CLASSES] if is_long else rows:
        cells = ("–" if row[name] is None else f"{row[name]:.4f}" for name in scores)
        table.add_row(one_line(row["class"]), *cells, f"{row['rows']:,}")
    out.print()
    out.print(table)
    out.print()
    if len(names) <= MAX_MATRIX:
        table = console.new_table(
            ["target ↓ predicted →"], [one_line(name) for name in names], title="confusion matrix"
        )
        for name, counts in zip(names, matrix, strict=True):
            table.add_row(one_line(name), *(f"{count:,}" if count else "·" for count in counts))
        out.print(table)
        return
    pairs = [(n, i, k) for i, counts in enumerate(matrix) for k, n in enumerate(counts) if n and i != k]
    table = console.new_table(["target", "predicted"], ["rows"], title="the most frequent confusions")
    for count, i, k in sorted(pairs, key=lambda pair: -pair[0])[:MAX_CONFUSIONS]:
        table.add_row(one_line(names[i]), one_line(names[k]), f"{count:,}")
    out.print(table)


def has_images(example: Tree) -> bool:
    return not any(isinstance(value, str) for value in example.values())


def image_text(image: Any, out: Console) -> Text:
    """Renders an image as text, with one character per two pixels, one above the other; without colors, as shades."""
    import numpy as np
    from rich.text import Text

    pixels = np.asarray(image, np.float64)
    pixels = pixels[..., None].repeat(3, -1) if pixels.ndim == 2 else pixels
    pixels = np.pad(pixels, ((0, len(pixels) % 2), (0, 0), (0, 0)))
    lines = []
    for upper_row, lower_row in zip(pixels[::2], pixels[1::2], strict=True):
        line = Text()
        for pair in zip(upper_row, lower_row, strict=True):
            if out.color_system is None:
                line.append(console.shade(float(np.mean(pair))))
            else:
                upper, lower = (f"rgb({','.join(str(round(255 * value)) for value in pixel)})" for pixel in pair)
                line.append("▀", style=f"{upper} on {lower}")
        lines.append(line)
    return Text("\n").join(lines)


def check_output(path: Path | None) -> None:
    """Raises, before any work is done, if the output could not be written."""
    from manyheads.files.write import check_new_file

    if path is None:
        return
    check_new_file(path)
    if path.suffix == ".png" and find_spec("matplotlib") is None:
        raise MissingExtraError(f"{path} needs matplotlib", hint="pip install 'manyheads[plot]'")


def write_output(path: Path, rows: Iterable[Tree], images: Sequence[Tree]) -> None:
    """Writes the images as a .png, or one JSON object per row; all or nothing."""
    from manyheads.files.write import atomic_output
    from manyheads.inspect.figure import draw_images

    with atomic_output(path) as temporary:
        if path.suffix == ".png":
            draw_images(images, temporary)
        else:
            temporary.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
