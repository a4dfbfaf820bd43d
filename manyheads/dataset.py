"""What manyheads data says and does: rows prepared once, counted, drawn and shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.data.prepared import Ids, PreparedSpec, Rows, prepare
from manyheads.data.source import NO_TEXT, Corpus, DataError
from manyheads.spec import SpecError, Tree
from manyheads.train.forecast import epoch_of
from manyheads.train.run import RunSpec, made_ready, read_run_file, with_tokenizer
from manyheads.train.start import opened_start
from manyheads.training import EXIT, heard

BINS = 10
SAMPLES = 3
WIDEST = 48  # of a bar, in letters


def prepare_run(run: RunSpec, folder: Path) -> Path:
    """Writes the ids of a run's data, telling on standard error how far it is; a signal leaves nothing behind."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if run.data.prepared:
        raise SpecError(f"{run.data.prepared} is prepared already", ("data",))
    if folder.exists():
        raise DataError(f"{folder} is there already: remove it or name another")
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,} rows"), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
    tasks: dict[str, Any] = {}
    with heard() as wish, bar:

        def tell(split: str, done: int, rows: int) -> None:
            if split not in tasks:
                tasks[split] = bar.add_task(split, total=rows)
            bar.update(tasks[split], completed=done)
            if reason := wish():
                raise SystemExit(EXIT[reason])

        start = opened_start(run.start) if run.start else None
        corpus, tokenizer, _ = with_tokenizer(run, start)
        written = prepare(corpus, tokenizer, folder, made=run.tokenizer, tell=tell)
    print(f"{corpus.about}; {tokenizer.get_vocab_size():,} different tokens", file=sys.stderr)
    return written


def describe_data(target: Path, overrides: list[str]) -> Tree:
    """Counts, lengths, padding and a few rows, of a run's data or of a prepared folder."""
    if (target / "index.json").is_file():
        if overrides:
            raise SpecError(f"{target} is prepared data, in which there is nothing to override")
        corpus = PreparedSpec(path=str(target)).load()
        return described(corpus, Rows(target)) | {"batches": None, "padding": None, "budget": None}
    path = target / "run.toml" if target.is_dir() else target
    if not path.is_file():
        raise SpecError(f"{target} is neither a run file nor a folder of prepared data or of a run")
    ready = made_ready(read_run_file(path, overrides))
    epoch = epoch_of(ready)
    found = described(ready.corpus, ready.rows)
    return found | {"batches": epoch.batches, "padding": epoch.padding, "budget": ready.run.train.tokens}


def described(corpus: Corpus, rows: Ids) -> Tree:
    texts = [name for name in rows.fields if name not in NO_TEXT]
    place = corpus.fields.index("label") if "label" in corpus.fields else None
    counts = np.unique([row[place] for row in corpus.train], return_counts=True) if place is not None else ((), ())
    return {
        "schema": 1,
        "about": corpus.about,
        "fields": corpus.fields,
        "rows": {name: len(part) for name, part in corpus.splits.items()},
        "classes": {str(name): int(count) for name, count in zip(*counts, strict=True)},
        "lengths": {name: lengths_of(rows.lengths(name)) for name in texts},
        "samples": [dict(zip(corpus.fields, map(shown, row), strict=True)) for row in corpus.train[:SAMPLES]],
    }


def shown(value: Any) -> str:
    """A text as it is, a picture by its size."""
    return f"{' × '.join(map(str, value.shape))} pixels" if isinstance(value, np.ndarray) else str(value)


def lengths_of(lengths: NDArray[np.int64]) -> Tree:
    """Of one field, in tokens."""
    width = -(-int(lengths.max() - lengths.min() + 1) // BINS)  # all ranges are as wide, so that bars compare
    counts, edges = np.histogram(lengths, np.arange(lengths.min(), lengths.max() + width + 1, width))
    median, most = np.quantile(lengths, (0.5, 0.95)).tolist()
    return {
        "tokens": int(lengths.sum()), "shortest": int(lengths.min()), "median": median, "mean": float(lengths.mean()), "most": most,
        "longest": int(lengths.max()), "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }  # fmt: skip


def print_data(found: Tree, console: Any) -> None:
    def say(text: str = "") -> None:
        console.print(text, highlight=False, markup=False)

    say(found["about"])
    if found["padding"] is not None:
        say(f"{found['batches']:,} batches an epoch of at most {found['budget']:,} places, {found['padding']:.1%} of them padding")
    if classes := found["classes"]:
        usual = sorted(classes.items(), key=lambda pair: (-pair[1], pair[0]))
        more = f" and {len(usual) - 12:,} more" if len(usual) > 12 else ""
        say(f"{len(classes):,} classes: {', '.join(f'{name} {count:,}' for name, count in usual[:12])}{more}")
    for name, one in found["lengths"].items():
        say(
            f"\n{name}: {one['tokens']:,} tokens to learn from; a row has {one['shortest']:,} to {one['longest']:,}, "
            f"{one['mean']:.3g} in the mean, half of them at most {one['median']:g}, 95 % at most {one['most']:g}"
        )
        draw(one["histogram"], say)
    for sample in found["samples"]:
        say()
        for name, text in sample.items():
            say(f"{name}: {' '.join(text.split())[:400]}")


def draw(histogram: Tree, say: Any) -> None:
    """A bar a range of lengths."""
    edges, counts = histogram["edges"], histogram["counts"]
    wide = len(f"{edges[-1]:,}")
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        bar = "█" * round(WIDEST * count / max(counts)) or ("▏" if count else "")
        say(f"  {low:>{wide},} {'to' if high - low > 1 else '  '} {high - 1 if high - low > 1 else '':<{wide}} {bar} {count:,}")
