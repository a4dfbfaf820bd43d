"""`manyheads show`: prints or draws a model or a checkpoint, or prints the presets, or all parts and their fields."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.cli import console
from manyheads.errors import ConfigError, UsageError, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from manyheads.spec import Spec, Tree

# fields of a file that are resolved before the spec is read
LIKE = ("like", "encoder or decoder", "copy the other stack, except for the fields given here")
ABOUT = ("about", "a table", "title, source, and context, which is the length for which costs are shown")
EXTRA_FIELDS = {"encoder": LIKE, "decoder": LIKE, "model": ABOUT}


@console.app.command()
def show(
    target: Annotated[
        str | None,
        console.argument(
            "[NAME|FILE.toml|CHECKPOINT|parts|SLOT|KIND]",
            "A preset, a file, a checkpoint or run folder, a .gguf file, 'parts', a slot or table, or a kind "
            "[default: list the presets].",
        ),
    ] = None,
    overrides: console.ModelOverrides = None,
    parts: console.Parts = None,
    batch: Annotated[int, console.integer_option("Texts per batch, for the costs.")] = 1,
    length: Annotated[
        int | None, console.integer_option("Tokens per text, for the costs [default: the context, or 128].")
    ] = None,
    source_length: Annotated[int | None, console.integer_option("Tokens per source [default: as --length].")] = None,
    as_toml: Annotated[bool, console.flag("--toml", "Print the resolved description with all defaults.")] = False,
    svg: Annotated[
        Path | None, console.path_option("FILE", "Draw the architecture, and write it to this file; - prints it.")
    ] = None,
    swaps_from: Annotated[
        str | None, console.option("MODEL", "List the overrides that turn this preset, file or checkpoint into NAME.")
    ] = None,
    as_json: console.AsJson = False,
) -> None:
    """Show a model in full, or list presets and parts.

    -s with a short path, such as -s position=none, changes every stack that has the field.

    Examples: manyheads show gpt2 · manyheads show transformer-base -s encoder.position=rope -s decoder.core=argmax ·
    manyheads show gpt2 --svg gpt2.svg · manyheads show gpt2 --swaps-from transformer-base · manyheads show runs/first ·
    manyheads show position · manyheads show rope · manyheads show parts --json
    """
    from manyheads.inspect.describe import describe_model, is_checkpoint
    from manyheads.presets import is_path, names
    from manyheads.spec import SLOTS, to_toml

    has_costs = length is not None or source_length is not None or batch != 1
    entries = list_parts()
    is_slot = target in ("parts", *(entry["slot"] for entry in entries))
    is_model = target is not None and (target in names() or is_path(target) or is_checkpoint(target))
    if target is None or is_slot or (not is_model and (entries := entries_of_kind(target, entries))):
        if overrides or as_toml or svg or swaps_from or has_costs:
            raise UsageError(
                "overrides, lengths, --toml, --svg and --swaps-from need one model; name a preset or a file"
            )
        entries = [entry for entry in entries if not is_slot or target in ("parts", entry["slot"])]
        show_presets(as_json=as_json) if target is None else show_parts(entries, as_json=as_json)
        return
    if as_json + as_toml + (svg is not None) > 1 or (swaps_from and (as_toml or svg)):
        raise UsageError("--json, --toml and --svg exclude each other, and --swaps-from goes with --json alone")
    if (svg or swaps_from) and has_costs:
        raise UsageError("a drawing and a list of swaps show no costs; leave out --batch and the lengths")
    if not is_model:
        raise unknown_target(target, [*SLOTS, *tables()])
    if swaps_from:
        show_swaps(swaps_from, target, overrides or [], as_json=as_json)
        return
    if svg is not None:
        write_drawing(target, overrides or [], svg)
        return
    model = describe_model(target, overrides or [], batch=batch, length=length, source_length=source_length)
    if source_length and model["flops"]["source_length"] is None:
        raise UsageError(f"--source-length needs a model with a source; {target} has none")
    if as_json:
        console.print_json(model)
    elif as_toml:
        typer.echo(to_toml(model["spec"] | ({"about": model["about"]} if model["about"] else {})), nl=False)
    else:
        print_model(model, console.stdout())


def write_drawing(target: str, overrides: list[str], path: Path) -> None:
    """Draws a model to a file, or to standard output if the path is '-'."""
    from manyheads.files.write import check_new_file, write_text
    from manyheads.inspect.describe import read_target
    from manyheads.inspect.drawing import draw_model

    to_stdout = str(path) == "-"
    if not to_stdout:
        check_new_file(path)
    spec, about, _ = read_target(target, overrides)
    drawing = draw_model(spec, title=one_line(about.get("title", target)))
    if to_stdout:
        typer.echo(drawing, nl=False)
        return
    write_text(path, drawing)
    console.print_note(f"wrote {path}")


def tables() -> dict[str, type[Spec]]:
    """Returns the tables of a run file that have no kinds; importing them also registers all kinds."""
    from manyheads.model.spec import CrossSpec, DecoderSpec, ModelSpec, NgramSpec, RecurrentSpec, StackSpec
    from manyheads.parts.mask import MaskSpec
    from manyheads.training.lora import LoraSpec
    from manyheads.training.run import BestSpec, RunSpec, TrainSpec

    return {
        "model": ModelSpec,
        "encoder": StackSpec,
        "decoder": DecoderSpec,
        "cross": CrossSpec,
        "mask": MaskSpec,
        "recurrent": RecurrentSpec,
        "ngram": NgramSpec,
        "run": RunSpec,
        "train": TrainSpec,
        "best": BestSpec,
        "lora": LoraSpec,
    }


def list_parts() -> list[Tree]:
    """Returns every table and slot of a run file, with its kinds and fields, as plain data."""
    from manyheads.inspect.describe import list_slots, list_tables

    entries = list_tables(tables())
    for entry in entries:
        if entry["slot"] in EXTRA_FIELDS:
            name, kind, meaning = EXTRA_FIELDS[entry["slot"]]
            entry["fields"].append({"field": name, "type": kind, "default": None, "meaning": meaning})
    return entries + list_slots()


def entries_of_kind(target: str, entries: list[Tree]) -> list[Tree]:
    """Returns the slot that has this kind, with this kind alone; [] if there is none. `SLOT.KIND` names one slot."""
    slot, _, kind = target.rpartition(".")
    matches = [
        entry | {"kinds": kinds}
        for entry in entries
        if slot in ("", entry["slot"])
        and (kinds := [kind_entry for kind_entry in entry["kinds"] if kind_entry["kind"] == kind])
    ]
    if len(matches) > 1:
        slots = [entry["slot"] for entry in matches]
        raise UsageError(
            f"'{kind}' is a kind of {', '.join(slots[:-1])} and {slots[-1]}", hint=f"manyheads show {slots[0]}.{kind}"
        )
    return matches


def unknown_target(target: str, slots_and_tables: list[str]) -> ConfigError:
    """Returns the error for a name that is neither a preset nor a slot nor a table."""
    from manyheads.errors import UnknownPresetError
    from manyheads.presets import names
    from manyheads.spec import SLOTS, did_you_mean, quote

    if target.endswith(".py"):
        return UnknownPresetError(f"{quote(target)} is a Python file", hint="name it with --parts and a model to show")
    kinds = {kind for base in SLOTS.values() for kind in base.kinds}
    close, _, _ = did_you_mean(target, (*names(), *slots_and_tables, *kinds, "parts")).partition(" (")
    hint = "'manyheads show' lists the presets, 'manyheads show parts' the slots; a file ends in .toml"
    return UnknownPresetError(f"no preset, slot, table, kind or checkpoint {quote(target)}{close}", hint=hint)


# ------------------------------------------------------------------------------------------------------------ printing


def print_model(model: Tree, out: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    about, bold = model["about"], "bold"
    title = one_line(about.get("title", model["name"]))
    out.print(
        Text.assemble(
            (title, bold), f" · {model['architecture']} · ", (f"{model['parameters']:,}", bold), " parameters"
        )
    )
    if about.get("source"):
        out.print(one_line(about["source"]), style="dim")
    for name, value in model.get("checkpoint", {}).items():
        if value is not None:
            out.print(f"{name.replace('_', ' '):<14} {one_line(checkpoint_text(name, value))}", soft_wrap=True)
    if model["overrides"]:
        out.print(f"overrides: {', '.join(model['overrides'])}")
    for section in model["sections"]:
        out.print(f"\n{section['title']}", style=bold)
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="cyan", no_wrap=True, width=15)
        table.add_column(overflow="fold")
        for row in section["rows"]:
            formula = f"\n{row['formula']}" if row["formula"] else ""
            table.add_row(row["slot"], Text.assemble(row["part"], (formula, "dim")))
        out.print(table)
    print_weights(model, out)
    print_costs(model, out)


def show_swaps(start: str, target: str, overrides: list[str], *, as_json: bool) -> None:
    """Prints the steps from one model to another: overrides, and each change with the formulas of its parts."""
    import shlex

    from rich.text import Text

    from manyheads.inspect.swaps import describe_swaps

    description, out = describe_swaps(start, target, overrides), console.stdout()
    if as_json:
        console.print_json(description)
        return
    for number, step in enumerate(description["steps"], 1):
        out.print(
            Text(f"{number}. {' '.join(f'-s {shlex.quote(override)}' for override in step['overrides'])}", "bold")
        )
        for change in step["changes"]:
            print_indented(out, 3, (change["path"], "cyan"), f"  {change['before']} → {change['after']}")
            formulas = [change["before_formula"], change["after_formula"]]
            lines = [change["meaning"]] if formulas[0] == formulas[1] else formulas
            for label, line in zip(("" if len(lines) == 1 else "before: ", "after: "), lines, strict=False):
                if line:
                    print_indented(out, 5, (label + line, "dim"))
    words = ["manyheads", "show", start, *(word for override in description["overrides"] for word in ("-s", override))]
    out.print(shlex.join(words) if description["steps"] else "the models are equal", soft_wrap=True)


def checkpoint_text(name: str, value: Any) -> str:
    from manyheads.metrics.metric import format_value

    if isinstance(value, dict):
        return " · ".join(
            f"{metric} {format_value(metric, number)}" for metric, number in value.items() if number is not None
        )
    unit = " tokens" if name in ("vocab_size", "max_positions", "max_length") else ""
    return f"{value:,}{unit}" if isinstance(value, int) else str(value)


def print_weights(model: Tree, out: Console) -> None:
    from math import prod

    table = console.new_table(["weight"], ["shape", "×", "parameters"], title="weights")
    for weight in model["weights"]:
        shape, count = weight["shape"], weight["count"]
        table.add_row(weight["name"], "×".join(map(str, shape)), str(count), f"{count * prod(shape):,}")
    out.print()
    out.print(table)


def print_costs(model: Tree, out: Console) -> None:
    from manyheads.model.cost import format_bytes

    flops, parameters, memory = model["flops"], model["parameters_by_part"], model["memory"]
    source = f", source {flops['source_length']}" if flops["source_length"] else ""
    title = f"cost of {flops['batch']} × {flops['length']} tokens{source}: matrix products, ignoring masks"
    columns = ["parameters", "share", "multiply–adds", "share"]
    step = 1 if out.width >= 100 else 2  # a narrow table leaves out the shares
    table = console.new_table(["part"], columns[::step], title=title)
    products = flops["multiply_adds_by_part"]
    for part in dict.fromkeys((*parameters, *products)):
        cells = []
        for count, total in (
            (parameters.get(part, 0), model["parameters"]),
            (products.get(part, 0), flops["multiply_adds"]),
        ):
            cells += [f"{count:,}", f"{count / total:.1%}" if count else ""]
        table.add_row(part, *cells[::step])
    table.add_row("all", *[f"{model['parameters']:,}", "", f"{flops['multiply_adds']:,}", ""][::step], style="bold")
    out.print()
    out.print(table)
    weights, training = format_bytes(memory["weights"]), format_bytes(memory["training"])
    text = f"{weights} of weights (float32) · about {training} to train with Adam"
    if memory["cache"] is not None:
        text += f" · {format_bytes(memory['cache'])} of cache after {flops['length']} tokens"
    out.print(f"\n{flops['forward']:,} FLOPs per forward pass · {text}")


def show_presets(*, as_json: bool) -> None:
    from manyheads.inspect.describe import SCHEMA, describe_preset
    from manyheads.presets import names

    out, presets = console.stdout(), [describe_preset(name) for name in names()]
    if as_json:
        console.print_json({"schema": SCHEMA, "presets": presets})
        return
    columns = ["name", "architecture", "position", *(["source"] if out.width >= 120 else [])]
    table = console.new_table(columns, ["parameters"])
    for preset in presets:
        table.add_row(*(preset[name] for name in columns), f"{preset['parameters']:,}")
    out.print(table)


def show_parts(entries: list[Tree], *, as_json: bool) -> None:
    from rich.text import Text

    from manyheads.inspect.describe import SCHEMA

    out = console.stdout()
    if as_json:
        console.print_json({"schema": SCHEMA, "slots": entries})
        return
    for entry in entries:
        out.print(Text.assemble("\n", (entry["slot"], "bold cyan"), f"  {entry['meaning']}"))
        print_fields(entry.get("fields", []), out, indent=2)
        for kind in entry["kinds"]:
            default = " (default)" if kind["default"] else ""
            print_indented(out, 2, (kind["kind"], "bold"), f"{default}  ", (kind["formula"], "dim"))
            print_fields(kind["fields"], out, indent=6)


def print_fields(fields: list[Tree], out: Console, *, indent: int) -> None:
    from manyheads.inspect.describe import format_field

    for field in fields:
        value = "" if field["default"] in (None, []) else f" = {format_field(field['default'])}"
        print_indented(out, indent, f"{field['field']}{value}  ", (f"{field['meaning']} ({field['type']})", "dim"))


def print_indented(out: Console, indent: int, *pieces: Any) -> None:
    """Prints pieces of text with their styles, wrapped within the indentation."""
    from rich.padding import Padding
    from rich.text import Text

    out.print(Padding(Text.assemble(*pieces), (0, 0, 0, indent), expand=False))
