"""`manyheads data`: shows the data of a run, or prepares it once for many runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.cli import console
from manyheads.errors import ConfigFileError, IncompatibleError, UsageError, one_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

    from manyheads.data.source import Corpus
    from manyheads.data.tokenized import TokenizedDataset
    from manyheads.spec import Tree
    from manyheads.training.run import RunSpec

BINS = 10  # bins of a histogram
SAMPLES = 3  # rows that are shown
MAX_CLASSES = 12  # classes that are listed
BAR_WIDTH = 48  # characters

data_app = typer.Typer(help="Show data, or prepare it once for many runs.", rich_markup_mode=None, no_args_is_help=True)
console.app.add_typer(data_app, name="data")


@data_app.command("prepare")
def data_prepare(
    run: console.RunFile,
    output: Annotated[Path, console.output_option("DIR", "Folder to write; must not exist.")],
    overrides: console.RunOverrides = None,
    parts: console.Parts = None,
    as_json: console.AsJson = False,
) -> None:
    """Tokenize a run's data once; runs then read it with data = { kind = "tokenized", path = "DIR" }.

    Example: manyheads data prepare run.toml --output data/ids
    """
    from manyheads.training.run import read_run_file

    prepare_run(read_run_file(run, overrides or []), output)
    if as_json:
        console.print_json({"schema": 1, "path": str(output)})
    else:
        path = json.dumps(str(output), ensure_ascii=False)
        console.print_note(f'wrote {output}; in a run file: data = {{ kind = "tokenized", path = {path} }}')


def prepare_run(spec: RunSpec, folder: Path) -> None:
    """Writes the token ids of a run's data; a signal leaves nothing behind."""
    from manyheads.data.tokenized import write_tokenized
    from manyheads.files.write import check_absent
    from manyheads.training.preparation import prepare_data
    from manyheads.training.signals import EXIT_STATUS, handle_signals

    if spec.data.tokenized_folder:
        raise IncompatibleError(f"{spec.data.tokenized_folder} is tokenized already", ("data",))
    check_absent(folder)
    with handle_signals() as should_stop, console.Progress("reading the data") as progress:

        def update(split: str, done: int, total: int) -> None:
            progress.update(f"{split} row", done, total)
            if reason := should_stop():
                raise SystemExit(EXIT_STATUS[reason])

        data = prepare_data(spec)
        write_tokenized(data.corpus, data.tokenizer, folder, tokenizer_spec=spec.tokenizer, progress=update)
    console.print_note(f"{data.corpus.description}; a vocabulary of {data.tokenizer.get_vocab_size():,} tokens")


@data_app.command("show")
def data_show(
    target: Annotated[
        Path, console.argument("RUN.toml|DIR", "A run file, a run folder, or a folder of tokenized data.")
    ],
    overrides: console.RunOverrides = None,
    parts: console.Parts = None,
    as_json: console.AsJson = False,
) -> None:
    """Count rows, classes and tokens, and show a histogram of the lengths and a few rows.

    Example: manyheads data show run.toml
    """
    with console.Progress(f"reading {target}"):
        description = describe_data(target, overrides or [])
    console.print_json(description) if as_json else print_data(description, console.stdout())


def describe_data(target: Path, overrides: list[str]) -> Tree:
    """Returns counts, lengths, padding and a few rows of a run's data, or of a folder of tokenized data."""
    from manyheads.data.tokenized import OnDiskDataset, TokenizedSpec
    from manyheads.training.estimate import estimate_epoch
    from manyheads.training.preparation import prepare
    from manyheads.training.run import read_run_file

    if (target / "index.json").is_file():
        if overrides:
            raise UsageError(f"{target} is tokenized data, which has no fields to override")
        corpus = TokenizedSpec(path=str(target)).load()
        return describe_dataset(corpus, OnDiskDataset(target)) | {
            "batches": None,
            "padding": None,
            "batch_tokens": None,
        }
    path = target / "run.toml" if target.is_dir() else target
    if not path.is_file():
        raise ConfigFileError(f"{target} is not a run file, a run folder or a folder of tokenized data")
    run = prepare(read_run_file(path, overrides))
    epoch = estimate_epoch(run)
    batches = {"batches": epoch.batches, "padding": epoch.padding, "batch_tokens": run.spec.train.batch_tokens}
    return describe_dataset(run.corpus, run.train_dataset) | batches


def describe_dataset(corpus: Corpus, dataset: TokenizedDataset) -> Tree:
    from collections import Counter

    from manyheads.data.source import NON_TEXT_FIELDS

    labels = [row[corpus.fields.index("label")] for row in corpus.train] if "label" in corpus.fields else []
    texts = [name for name in dataset.fields if name not in NON_TEXT_FIELDS]
    return {
        "schema": 1,
        "description": corpus.description,
        "fields": corpus.fields,
        "rows": {name: len(split) for name, split in corpus.splits.items()},
        "classes": dict(Counter(map(str, labels)).most_common()),
        "lengths": {name: describe_lengths(dataset.lengths(name)) for name in texts},
        "samples": [dict(zip(corpus.fields, map(text_of, row), strict=True)) for row in corpus.train[:SAMPLES]],
    }


def text_of(value: Any) -> str:
    """Returns a text as it is, and an image as its size."""
    return f"{' × '.join(map(str, value.shape))} pixels" if hasattr(value, "shape") else str(value)


def describe_lengths(lengths: NDArray[np.int64]) -> Tree:
    """Returns statistics of the number of tokens per row; all bins of the histogram are equally wide."""
    import numpy as np

    minimum, maximum = int(lengths.min()), int(lengths.max())
    width = -(-(maximum - minimum + 1) // BINS)
    counts, edges = np.histogram(lengths, np.arange(minimum, maximum + width + 1, width))
    median, percentile = np.quantile(lengths, (0.5, 0.95)).tolist()
    return {
        "tokens": int(lengths.sum()),
        "min": minimum,
        "median": median,
        "mean": float(lengths.mean()),
        "percentile_95": percentile,
        "max": maximum,
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def print_data(data: Tree, out: Console) -> None:
    out.print(data["description"])
    if data["padding"] is not None:
        size = f"at most {data['batch_tokens']:,} tokens, {data['padding']:.1%} padding"
        out.print(f"{data['batches']:,} batches per epoch, each {size}")
    if classes := data["classes"]:
        names = ", ".join(f"{name} {count:,}" for name, count in list(classes.items())[:MAX_CLASSES])
        more = f" and {len(classes) - MAX_CLASSES:,} more" if len(classes) > MAX_CLASSES else ""
        out.print(f"{len(classes):,} classes: {names}{more}")
    for name, lengths in data["lengths"].items():
        spread = f"median {lengths['median']:g}, mean {lengths['mean']:.3g}, 95 % at most {lengths['percentile_95']:g}"
        per_row = f"{lengths['min']:,} to {lengths['max']:,} per row, {spread}"
        out.print(f"\n{name}: {lengths['tokens']:,} training tokens; {per_row}")
        print_histogram(lengths["histogram"], out)
    for sample in data["samples"]:
        out.print()
        for name, text in sample.items():
            out.print(f"{name}: {one_line(' '.join(text.split())[:400])}")


def print_histogram(histogram: Tree, out: Console) -> None:
    edges, counts = histogram["edges"], histogram["counts"]
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        label = f"{low:,}" if high - low == 1 else f"{low:,}–{high - 1:,}"
        bar = "█" * round(BAR_WIDTH * count / max(counts)) or ("▏" if count else "")
        out.print(f"  {label:>{2 * len(f'{edges[-1]:,}') + 1}} {bar} {count:,}")
