"""`manyheads compare`: trains every combination of some changes to a run, with several seeds, and compares them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyheads.cli import console

if TYPE_CHECKING:
    from rich.console import Console

    from manyheads.spec import Tree
    from manyheads.training.comparison import CellProgress


@console.app.command()
def compare(
    run: console.RunFile,
    axes: Annotated[
        list[str],
        console.argument("FIELD=A,B,…", "A field and its values; a short name sets the field in every stack."),
    ],
    output: Annotated[Path, console.output_option("DIR", "Folder of the runs. Run the same command again to resume.")],
    seeds: Annotated[int, console.integer_option("Random seeds per combination.")] = 3,
    jobs: Annotated[int, console.integer_option("Runs in parallel, with one thread each.")] = 1,
    device: console.Device = "auto",
    overrides: console.RunOverrides = None,
    parts: console.Parts = None,
    quiet: console.Quiet = False,
    as_json: console.AsJson = False,
) -> None:
    """Train every combination of some changes, and compare.

    Each is trained with several seeds; prints means and standard deviations, and plots the learning curves.

    Example: manyheads compare run.toml position=none,sinusoidal,rope residual=pre,post --output runs/positions
    """
    from manyheads.inspect.figure import draw_comparison
    from manyheads.training.comparison import compare as run_all
    from manyheads.training.signals import EXIT_STATUS

    with CompareProgress("reading the run", quiet=quiet or as_json) as progress:
        report = run_all(
            run,
            axes,
            output,
            seeds=seeds,
            jobs=jobs,
            device=device,
            overrides=overrides or [],
            parts=parts or [],
            progress=progress.show,
        )
    console.print_json(report) if as_json else print_comparison(report, console.stdout())
    if not quiet and not as_json and (improving := sum(cell["still_improving"] for cell in report["cells"])):
        num_runs = sum(len(cell["seeds"]) for cell in report["cells"])
        console.print_note(
            f"in {improving} of {num_runs} runs the validation loss was still falling at the end; "
            "more steps (train.steps) may change the order"
        )
    if any(cell["seeds"] for cell in report["cells"]):
        try:
            draw_comparison(report, output / "compare.png")
            if not quiet and not as_json:
                console.print_note(f"metrics are those of the validation set; curves are in {output / 'compare.png'}")
        except ImportError:
            console.print_note(
                "compare.png was not drawn, because matplotlib is missing: pip install 'manyheads[plot]'"
            )
    if report["stopped"]:
        console.print_note("stopped; run the same command again to resume")
        raise typer.Exit(EXIT_STATUS[report["stopped"]])
    if all(cell["error"] for cell in report["cells"]):
        raise typer.Exit(console.EXIT_FAILURE)


class CompareProgress(console.Progress):
    """Shows which run is trained, and the metrics of each finished run."""

    def __init__(self, text: str, *, quiet: bool) -> None:
        super().__init__(text, quiet=quiet)
        self.start, self.finished = time.monotonic(), 0

    def show(self, event: CellProgress) -> None:
        from manyheads.metrics.metric import format_value
        from manyheads.training.estimate import format_seconds

        run = f"{event.number} of {event.runs} · {event.name}, seed {event.seed}"
        if event.metrics is None:
            self.update(f"run {run} · step", event.step, event.steps)
            return
        self.finished += 1
        seconds_left = (time.monotonic() - self.start) / self.finished * (event.runs - event.number)
        result = event.error or " · ".join(
            f"{name} {format_value(name, value)}" for name, value in event.metrics.items()
        )
        more = f" · about {format_seconds(seconds_left)} left" if event.number < event.runs else ""
        self.line(f"{run}: {result}{more}")


def print_comparison(report: Tree, out: Console) -> None:
    """Prints one row per cell: its values, mean ± standard deviation of every metric, parameters and seconds."""
    cells = report["cells"]
    metrics = list(dict.fromkeys(name for cell in cells for name in cell["metrics"]))
    has_errors = any(cell["error"] for cell in cells)
    table = console.new_table(report["axes"], [*metrics, "parameters", "seconds", *(["error"] if has_errors else [])])
    for cell in cells:
        values = [format_mean(name, cell["metrics"][name]) if name in cell["metrics"] else "" for name in metrics]
        parameters = "" if cell["parameters"] is None else f"{cell['parameters']:,}"
        seconds = "" if cell["seconds"] is None else f"{cell['seconds']:.3g}"
        table.add_row(
            *cell["cell"].values(), *values, parameters, seconds, *([cell["error"] or ""] if has_errors else [])
        )
    out.print(table)


def format_mean(name: str, summary: Tree) -> str:
    from manyheads.metrics.metric import format_value

    deviation = "" if summary["std"] is None else f" ± {format_value(name, summary['std'])}"
    return f"{format_value(name, summary['mean'])}{deviation}"
