"""`manyheads train`: trains or resumes a run, and shows its events; with --dry-run, estimates its cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.cli import console
from manyheads.errors import RunChangedError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from manyheads.spec import Tree
    from manyheads.training.events import Change, Event, Initialized, Step
    from manyheads.training.run import RunSpec

MAX_NAMES = 8  # names of weights in one line


@console.app.command()
def train(
    run: console.RunFile,
    output: Annotated[
        Path | None, console.output_option("DIR", "Run folder. Run the same command again to resume.")
    ] = None,
    overrides: console.RunOverrides = None,
    parts: console.Parts = None,
    dry_run: Annotated[
        bool, console.flag("--dry-run", "Estimate memory, disk, epochs and time on this machine; write nothing.")
    ] = False,
    seed: Annotated[int | None, console.integer_option("The same as -s seed=N.")] = None,
    device: console.Device = "auto",
    resume: Annotated[
        str,
        console.option(
            "auto|never|PATH",
            "auto: resume from the last checkpoint; never: refuse a folder with a run; or a checkpoint to resume.",
        ),
    ] = "auto",
    override_resume: Annotated[
        list[str] | None, console.option("FIELD", "Resume even though this field changed; may be repeated.")
    ] = None,
    quiet: console.Quiet = False,
    as_json: console.AsJson = False,
) -> None:
    """Train a model, or resume a run. Ctrl-C once finishes the step and saves; twice stops at once.

    Examples: manyheads train run.toml --output runs/first -s train.steps=2000 · manyheads train run.toml --dry-run
    """
    if output is None and not dry_run:
        raise UsageError("--output is missing", hint="name the folder of the run")
    console.check_exists(run)

    from manyheads.training.estimate import estimate_run
    from manyheads.training.preparation import prepare
    from manyheads.training.run import read_run_file

    spec = read_run_file(run, [*(overrides or []), *([] if seed is None else [f"seed={seed}"])])
    options: dict[str, Any] = {"device": device, "resume": resume, "override_resume": override_resume or ()}
    if output is None or dry_run:
        with console.Progress("preparing the data and timing some steps"):
            estimate = estimate_run(prepare(spec), output, **options)
        console.print_json(estimate) if as_json else print_estimate(estimate, console.stdout())
        return
    report, exit_status = train_and_show(spec, output, quiet=quiet or as_json, **options)
    step, reason = report["step"], report["reason"]
    if as_json:
        console.print_json(report)
    elif not quiet and exit_status:
        console.print_note(
            f"stopped after {step:,} of {spec.train.steps:,} steps, and saved; run the same command again to resume"
        )
    elif not quiet:
        reason_note = "" if reason == "steps" else f" (train.best.{reason})"
        console.print_note(f"finished after {step:,} steps{reason_note}; next: manyheads evaluate {output}")
    raise typer.Exit(exit_status)


def train_and_show(
    spec: RunSpec, folder: Path, *, device: str = "auto", quiet: bool = False, **options: Any
) -> tuple[Tree, int]:
    """Trains a run and shows its events on standard error; returns the report and the exit status."""
    from manyheads.training.loop import train as train_run
    from manyheads.training.signals import EXIT_STATUS

    with TrainingProgress(spec.train.steps, device, quiet=quiet) as progress:
        try:
            report = train_run(spec, folder, device=device, progress=progress.show, **options)
        except RunChangedError as error:
            progress.show_changes(error.changes)
            raise
    return report, EXIT_STATUS[report["reason"]]


def print_estimate(estimate: Tree, out: Console) -> None:
    from manyheads.model.cost import format_bytes
    from manyheads.training.estimate import format_seconds

    resources, epoch, speed = estimate["resources"], estimate["epoch"], estimate["speed"]
    rows, length, source_length = resources["batch"]
    sizes = {name: format_bytes(value) for name, value in resources.items() if isinstance(value, int)}
    parts = (
        f"{name.replace('_', ' ')} {sizes[name]}" for name in ("weights", "gradients", "optimizer_state", "activations")
    )
    free = {name: f", {sizes[name]} free" if name in sizes else "" for name in ("memory_free", "disk_free")}
    batch_note = "" if epoch["counted_batches"] == epoch["batches"] else f" (from {epoch['counted_batches']:,} batches)"
    lines = {
        "data": estimate["data"],
        "model": f"{estimate['architecture']}, {resources['parameters']:,} parameters",
        "memory": f"about {sizes['memory']}{free['memory_free']}: {', '.join(parts)}",
        "batch": f"at most {rows:,} × {length:,} tokens" + (f", sources of {source_length:,}" if source_length else ""),
        "disk": f"{sizes['checkpoint']} per checkpoint, {sizes['disk']} in total{free['disk_free']}",
        "epoch": f"{epoch['rows']:,} rows, {epoch['batches']:,} batches, {epoch['tokens']:,} tokens, "
        f"{epoch['padding']:.1%} padding{batch_note}",
        "steps": f"{estimate['steps']:,}, or {estimate['epochs']:.3g} epochs",
        "time": f"about {format_seconds(estimate['seconds'])} on this machine: {1000 * speed['step']:,.0f} ms per step "
        f"(median of {speed['timed_steps']}), {format_seconds(speed['evaluation'])} per evaluation",
    }
    if speed["compiled_step"]:
        saved_seconds = estimate["steps"] * (speed["step"] - speed["compiled_step"]) - speed["compiling"]
        advice = f"-s train.compile=true saves {format_seconds(saved_seconds)}" if saved_seconds > 0 else "not worth it"
        compiling = f"after compiling for {format_seconds(speed['compiling'])}"
        lines["compile"] = f"{1000 * speed['compiled_step']:,.0f} ms per step {compiling}: {advice}"
    for name, text in lines.items():
        out.print(f"{name:<8} {text}")


class TrainingProgress(console.Progress):
    """Shows the events of a run: a bar with loss, metrics, tokens per second and the time left."""

    def __init__(self, steps: int, device: str = "auto", *, quiet: bool) -> None:
        super().__init__("preparing", quiet=quiet, first_line=0)
        self.steps, self.device = steps, device
        self.means = dict[str, float]()  # running means of losses and speed, over about 20 steps
        self.last_metric = ""  # the last metric of the latest evaluation, with its step

    def show(self, event: Event) -> None:
        from manyheads.training import events as e

        step = f"step {event.step:,}"
        match event:
            case e.Step():
                self.show_step(event)
            case e.Prepared(data=data, device=device):
                self.line(data)
                self.line(f"device: {device}{' (no GPU found)' if (self.device, device) == ('auto', 'cpu') else ''}")
            case e.Evaluated(metrics=metrics):
                metric_texts = [*map(format_metric, metrics, metrics.values())]
                self.last_metric = "" if list(metrics) == ["loss"] else f"{metric_texts[-1]} at {step}"
                self.line(f"{step} · validation: {' · '.join(metric_texts)}")
            case e.Saved(path=path) if event.step == self.steps:
                self.line(f"saved {path}")
            case e.SaveFailed(message=message):
                self.line(f"{step}: {message}; earlier checkpoints are untouched; will retry", warning=True)
            case e.Warned(message=message):
                self.line(f"{step}: {message}", warning=True)
            case e.ConfigChanged(changes=changes):
                self.show_changes(changes)
            case e.Resumed(warnings=warnings):
                for warning in warnings:
                    self.line(warning, warning=True)
                self.line(f"resuming from {step}")
            case e.Truncated(train_rows=train_rows, validation_rows=validation_rows):
                self.line(
                    f"truncated {train_rows:,} training rows and {validation_rows:,} validation rows to max_length"
                )
            case e.Initialized():
                self.show_initialized(event)
            case e.Finished(reason=reason) if not self.means and reason not in ("interrupted", "terminated"):
                self.line("the run is already finished; raise train.steps or change train.best to continue")

    def show_step(self, event: Step) -> None:
        speed = event.tokens / max(event.seconds, 1e-9)
        values = {} if event.skipped else {"loss": event.loss} | event.auxiliary_losses
        for name, value in (values | {"tokens/s": speed}).items():
            self.means[name] = 0.95 * self.means[name] + 0.05 * value if name in self.means else value
        losses = [f"{name} {mean:.3f}" for name, mean in self.means.items() if name != "tokens/s"]
        metric = [self.last_metric] if self.last_metric else []
        note = " · ".join((*losses, *metric, f"{self.means['tokens/s']:,.0f} tokens/s"))
        self.update("step", event.step, self.steps, note)
        if event.skipped:
            self.line(f"step {event.step:,}: skipped, the loss or gradients are NaN or infinite", warning=True)

    def show_initialized(self, event: Initialized) -> None:
        self.line(f"loaded {event.loaded} weights from the checkpoint")
        for text, names in (
            ("initialized, not in the checkpoint", event.missing_keys),
            ("in the checkpoint, not used", event.unexpected_keys),
        ):
            if names:
                more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
                self.line(f"{text}: {', '.join(names[:MAX_NAMES])}{more}")
        for note in event.notes:
            self.line(note)

    def show_changes(self, changes: Sequence[Change]) -> None:
        """A table of the fields that differ from those of the run in the folder."""
        from manyheads.spec import quote

        def text(value: Any) -> str:
            return "–" if value is None else quote(value)

        rows = [("field", "was", "is"), *((change.field, text(change.old), text(change.new)) for change in changes)]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        for name, old, new in rows:
            self.line(f"  {name:<{widths[0]}}  {old:<{widths[1]}}  {new}")


def format_metric(name: str, value: float) -> str:
    from manyheads.metrics.metric import format_value

    return f"{name} {format_value(name, value)}"
