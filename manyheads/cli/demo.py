"""`manyheads demo`: trains a model that reads dates in twenty languages, shows its attention, and writes its page."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.cli import console
from manyheads.cli.look import STUDIO_HINT, print_matrix, render_page
from manyheads.cli.train import train_and_show

if TYPE_CHECKING:
    from rich.console import Console

    from manyheads.checkpoint.checkpoint import Checkpoint

STACK: dict[str, Any] = {
    "layers": 2,
    "width": 64,
    "attention": {"kind": "heads", "heads": 4},
    "embed": {"kind": "tokens", "scale": True},
    "position": "sinusoidal",
    "feedforward": {"kind": "mlp", "hidden": 256, "activation": "relu"},
    "residual": "pre",
}
RUN: dict[str, Any] = {
    "seed": 1,
    "model": {
        "vocab": "tokenizer",
        "init": "xavier",
        "encoder": STACK,
        "decoder": {"like": "encoder", "embed": {"kind": "shared", "scale": True}, "cross": True},
    },
    "data": {"kind": "dates"},
    "task": {"kind": "seq2seq"},
    "optim": {"lr": 3e-3, "schedule": {"kind": "linear", "warmup_steps": 100}},
    "train": {"steps": 1100, "batch_tokens": 4096, "best": {"metric": "exact_match", "stop_at": 0.99}},
}
TAG = (
    "A tag such as <en> is the language of a date whose day and month could be exchanged: <en> 5/6/2031 is 6 May, "
    "<fr> 5/6/2031 is 5 June. Other dates need none."
)
EXAMPLES = (*range(0, 240, 40), 214)  # rows of the validation set; the last has a tag that it needs
DATE = "25 December 2031"  # shown in the page


@console.app.command()
def demo(
    output: Annotated[Path, console.output_option("DIR", "Run folder. Run the same command again to resume.")] = Path(
        "runs/dates"
    ),
) -> None:
    """Train a model that reads dates in 20 languages (one to two minutes).

    A small encoder–decoder; shows some results and the cross-attention, and writes every head into look.html, a page
    that opens offline, in the run folder.

    Example: manyheads demo
    """
    from manyheads.checkpoint.loading import load
    from manyheads.training.run import read_run

    out, spec = console.stdout(), read_run(RUN)
    _, exit_status = train_and_show(spec, output)
    if exit_status:
        console.print_note("stopped, and saved; run the same command again to resume")
        raise typer.Exit(exit_status)
    checkpoint, rows = load(output), spec.data.load().validation
    print_examples(checkpoint, [rows[i] for i in EXAMPLES], out)
    print_attention(checkpoint, rows[120][0], out)
    folder = shlex.quote(str(output))
    out.print("\nNext:")
    commands = (
        f'predict {folder} "25.12.2031"',
        f'predict {folder} "<en> 5/6/2031"',
        f"evaluate {folder} --examples 5",
        f"audit {folder}",
    )
    for command in commands:
        out.print(f"  {program_name()} {command}", soft_wrap=True)
    out.print(f"\n{write_demo_page(checkpoint, output)}", soft_wrap=True)
    out.print(f'  {program_name()} look {folder} "{DATE}"', soft_wrap=True)


def print_examples(checkpoint: Checkpoint, rows: Sequence[Sequence[str]], out: Console) -> None:
    """Prints the exact match of the validation set, and some of its dates with what the model generates."""
    from manyheads.files.manifest import TRAINER
    from manyheads.files.read import read_json_or_empty
    from manyheads.metrics.metric import format_value

    assert checkpoint.path is not None
    state = read_json_or_empty(checkpoint.path / TRAINER)
    score = format_value("exact_match", state["metrics"]["exact_match"] or 0.0)
    out.print(f"{score} of the dates in the validation set are exact after {state['step']:,} steps. Some of them:\n")
    for source, target in rows:
        generated = checkpoint.generate(source, max_new_tokens=16)
        is_exact = generated.replace(" ", "") == target.replace(" ", "")
        out.print(f"  {source:<38} → {generated:<12} {'' if is_exact else f'(target: {target})'}", soft_wrap=True)
    out.print(f"\n{TAG}", soft_wrap=True)


def write_demo_page(checkpoint: Checkpoint, folder: Path) -> str:
    """Writes the offline page into the run folder, in the place of an earlier one; returns a sentence about it."""
    if find_spec("fastapi") is None:
        return f"Every head, in a page (needs {STUDIO_HINT}):"
    from manyheads.files.write import write_text

    page, _ = render_page(checkpoint, str(folder), DATE)
    path = folder / "look.html"
    write_text(path, page, overwrite=True)
    return f"Every head for “{DATE}”: open {path} ({len(page.encode()) / 1e6:.1f} MB, offline). For other dates:"


def program_name() -> str:
    """Returns the command that runs this program again."""
    path = os.path.relpath(sys.argv[0])
    return "manyheads" if shutil.which("manyheads") else "python -m manyheads" if path.endswith("__main__.py") else path


def print_attention(checkpoint: Checkpoint, text: str, out: Console) -> None:
    """Prints the last cross-attention, averaged over heads, with a row per generated and a column per input token."""
    import torch

    from manyheads.model.recording import record

    encoding = checkpoint.tokenizer.encode(text)
    generated = checkpoint.generate(encoding.ids, max_new_tokens=16)
    target = torch.tensor([[checkpoint.generation_settings.decoder_start_token_id, *generated]])
    with record(checkpoint.model) as attentions:
        checkpoint.logits(torch.tensor([encoding.ids]), target)
    weights_LM = [attention for attention in attentions if "cross" in attention.name][-1].weights()[0].mean(dim=0)
    columns = [token.strip("▁") or " " for token in encoding.tokens]  # ▁ stands for a space
    rows = [checkpoint.tokenizer.id_to_token(token).strip("▁") for token in generated] + ["</s>"]
    out.print(f"\nCross-attention while generating {''.join(rows[:-1])} (last layer, mean over heads):\n")
    print_matrix(weights_LM.tolist(), rows, columns, out)
