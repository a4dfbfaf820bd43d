"""`manyheads look`: opens the page on a checkpoint, writes it as one file, or prints a head in the terminal."""

from __future__ import annotations

import time
import webbrowser
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyheads.cli import console
from manyheads.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from manyheads.checkpoint.checkpoint import Checkpoint
    from manyheads.studio.views import ForwardPass

STUDIO_HINT = "pip install 'manyheads[studio]'"
NAME_WIDTH = 16  # characters of a token's name in a terminal


def checkpoint_paths(paths: list[str] | None) -> list[str] | None:
    for path in paths or ():
        console.check_checkpoint_path(path)
    return paths


@console.app.command()
def look(
    path: console.CheckpointPath,
    text: Annotated[str | None, console.argument("TEXT", "The text to show first.")] = None,
    target: Annotated[
        str | None, console.option("TEXT", "Target of an encoder–decoder [default: what it generates].")
    ] = None,
    compare: Annotated[
        list[str] | None,
        console.option("PATH", "Another checkpoint to compare; may be repeated.", callback=checkpoint_paths),
    ] = None,
    html: Annotated[
        Path | None, console.path_option("FILE", "Write one file that works offline, and open nothing.")
    ] = None,
    terminal: Annotated[bool, console.flag("--terminal", "Print a head as shaded blocks.")] = False,
    png: Annotated[Path | None, console.path_option("FILE", "Write a head as a figure.")] = None,
    layer: Annotated[int | None, console.integer_option("Layer for --terminal and --png, from 0.")] = None,
    head: Annotated[int | None, console.integer_option("Head, from 0 [default: the mean over heads].")] = None,
    attention: Annotated[
        str | None, console.option("NAME", "Attention by its name, such as decoder.layers.0.cross [default: the last].")
    ] = None,
    state: Annotated[str, console.option("STATE", "State of the page, from its “Copy command”.")] = "",
    port: Annotated[int, console.integer_option("Port on localhost; 0 picks a free one.")] = 0,
    no_browser: Annotated[bool, console.flag("--no-browser", "Print the address, and open no browser.")] = False,
    device: console.Device = "auto",
    parts: console.Parts = None,
) -> None:
    """See the attention of a checkpoint in a page on this machine: every head, exactly.

    Without TEXT the page starts with an example. Without a tokenizer, TEXT is token ids as numbers; of an image model,
    its pixels from 0 to 1.

    Examples: manyheads look runs/first "April 5, 1985" · manyheads look ./gpt2 "The cat sat on the mat" --terminal
    --layer 3 --head 5 · manyheads look ./gpt2 "The cat sat" --html cat.html
    """
    prints = terminal or png is not None
    check_options(html, png, prints, selection=[layer, head, attention])
    check_page_options(compare, state, port, no_browser, opens=not prints and html is None)
    if not prints and find_spec("fastapi") is None:
        raise MissingExtraError("the page needs FastAPI and uvicorn", hint=STUDIO_HINT)
    with console.Progress(f"loading {path}"):
        checkpoints = [console.load_checkpoint(name, device) for name in (path, *(compare or ()))]
    if prints:
        show_head(checkpoints[0], text, target, attention, layer, head, terminal=terminal, png=png)
    elif html is not None:
        write_page(checkpoints[0], path, text, target, html)
    else:
        open_page(checkpoints, [path, *(compare or ())], text, target, state, port, device, no_browser=no_browser)


def check_options(html: Path | None, png: Path | None, prints: bool, *, selection: Sequence[object]) -> None:
    """Raises for options that do not go together, and for files that exist, before the checkpoint is loaded."""
    from manyheads.files.write import check_new_file

    if html is not None and prints:
        raise UsageError("give --html or --terminal and --png, not both")
    if not prints and any(option is not None for option in selection):
        raise UsageError("--layer, --head and --attention are for --terminal and --png")
    for path in (html, png):
        if path is not None:
            check_new_file(path)
    if png is not None and find_spec("matplotlib") is None:
        raise MissingExtraError("--png needs matplotlib", hint="pip install 'manyheads[plot]'")


def check_page_options(compare: list[str] | None, state: str, port: int, no_browser: bool, *, opens: bool) -> None:
    """Raises for a wrong port, and for options of the page without the page."""
    if not 0 <= port < 1 << 16:
        raise UsageError(f"port is {port}, expected 0 to 65535")
    if not opens and (compare or state or port or no_browser):
        options = "--compare, --state, --port and --no-browser"
        raise UsageError(f"{options} are for the page, without --html, --terminal and --png")


def open_page(
    checkpoints: Sequence[Checkpoint], paths: Sequence[str], text: str | None, target: str | None, state: str,
    port: int, device: str, *, no_browser: bool,
) -> None:  # fmt: skip
    from functools import partial
    from urllib.parse import parse_qsl, urlencode

    from manyheads.studio.app import serve
    from manyheads.studio.run_checkpoints import find_run_checkpoints
    from manyheads.studio.session import Sessions

    fields = dict(parse_qsl(state)) | ({"text": text} if text else {}) | ({"target": target} if target else {})
    run_checkpoints = find_run_checkpoints(paths[0], checkpoints[0], partial(console.load_checkpoint, device=device))
    with serve(Sessions(checkpoints, paths, text or "", run_checkpoints), port) as address:
        full = f"{address}#{urlencode(fields)}" if fields else address
        typer.echo(full)
        console.print_note("Ctrl-C ends it")
        if not no_browser:
            webbrowser.open_new_tab(full)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            console.print_note("ended")


def write_page(checkpoint: Checkpoint, path: str, text: str | None, target: str | None, html: Path) -> None:
    from manyheads.files.write import write_text

    page, note = render_page(checkpoint, path, text or "", target)
    write_text(html, page)
    console.print_note(f"wrote {html}, {len(page.encode()) / 1e6:.1f} MB. {note}")


def render_page(checkpoint: Checkpoint, path: str, text: str, target: str | None = None) -> tuple[str, str]:
    """The offline page, and a sentence about what it leaves out, with progress."""
    from manyheads.studio.offline import offline_page
    from manyheads.studio.session import Sessions

    with console.Progress("reading the text") as progress:
        return offline_page(Sessions([checkpoint], [path], text), target=target, report=progress.update)


# ------------------------------------------------------------------------------------------------- terminal and figure


def show_head(
    checkpoint: Checkpoint, text: str | None, target: str | None, attention: str | None, layer: int | None,
    head: int | None, *, terminal: bool, png: Path | None,
) -> None:  # fmt: skip
    """Prints one head, or draws it."""
    from manyheads.files.write import atomic_output
    from manyheads.inspect.edit import check_head
    from manyheads.studio import forward
    from manyheads.studio.session import MAX_BYTES
    from manyheads.studio.views import ForwardPass

    if not text:
        raise UsageError("--terminal and --png need a TEXT")
    texts = forward.read(checkpoint, forward.ForwardRequest(text, target))
    forward_pass = ForwardPass(checkpoint, texts, *forward.forward(checkpoint, texts, (), MAX_BYTES), ())
    name = choose_attention(forward_pass, attention, layer)
    info = forward_pass.info(name)
    if head is not None:
        check_head(name, head, info.heads)
    weights = forward_pass.rows(name, "mean" if head is None else str(head), slice(None)).cpu()
    rows, columns = forward_pass.labels(info.queries, info.rows), forward_pass.labels(info.keys, info.columns)
    title = f"{name}, {'mean over heads' if head is None else f'head {head}'}"
    if terminal:
        out = console.stdout()
        out.print(f"{title}\n")
        print_matrix(weights.tolist(), rows, columns, out)
    if png is not None:
        from manyheads.inspect.figure import draw_matrix

        with atomic_output(png) as draft:
            draw_matrix(weights, rows, columns, draft, title=title)


def choose_attention(forward_pass: ForwardPass, attention: str | None, layer: int | None) -> str:
    """The name of an attention: as given, or the last one, or the one like it in another layer."""
    if attention is not None:
        return forward_pass.info(attention).name
    *_, last = forward_pass.infos.values()
    same = [info for info in forward_pass.infos.values() if (info.stack, info.kind) == (last.stack, last.kind)]
    if layer is None:
        return last.name
    if layer not in range(len(same)):
        raise UsageError(f"there is no layer {layer}, expected 0 to {len(same) - 1}")
    return same[layer].name


def print_matrix(weights: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], out: Console) -> None:
    """Prints weights as shaded blocks, with a row per query and the names of the keys below, top to bottom.

    A block is as dark as the root of its weight, as in the page, so that small weights are seen.
    """
    rows, columns = ([short(name) for name in names] for names in (rows, columns))
    width = max(map(len, rows))
    step = next((step for step in (3, 1) if width + 3 + step * len(columns) <= out.width), None)
    if step is None:
        raise UsageError(
            f"{len(columns):,} keys do not fit into {out.width} columns of the terminal",
            hint="use --png FILE or the page",
        )
    block, space = (2, " ") if step == 3 else (1, "")
    for name, line in zip(rows, weights, strict=True):
        cells = "".join(console.shade(max(0.0, weight) ** 0.5) * block + space for weight in line)
        out.print(f"  {name:>{width}} {cells}")
    for i in range(max(map(len, columns))):
        letters = (name[i] if i < len(name) else " " for name in columns)
        out.print(" " * (width + 3) + "".join(f"{letter:<{step}}" for letter in letters))
    out.print("\n" + "   ".join(f"{console.shade(root) * 2} from {root**2:.2f}" for root in (0.2, 0.4, 0.6, 0.8)))


def short(name: str) -> str:
    """A token as a label of a terminal, without control characters."""
    from manyheads.spec import quote

    text = quote(name)[1:-1] if not name.isprintable() else name.strip()
    return text[:NAME_WIDTH] or "␣"
