"""What `manyheads show` says: a model expanded, with its formulas, shapes and costs; or the parts there are to choose from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticUndefined
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from manyheads.model.build import outline
from manyheads.model.size import Size, readable, size
from manyheads.model.spec import CrossSpec, DecoderSpec, LayerSpec, ModelSpec, NgramSpec, RecurrentSpec, TowerSpec, read_model
from manyheads.parts.mask import MaskSpec
from manyheads.presets import about, describe, is_file, names, preset
from manyheads.spec import SLOTS, Part, Spec, SpecError, Tree, nearest, one_line, override, quoted, to_tree
from manyheads.train.lora import LoraSpec
from manyheads.train.run import GoalSpec, RunSpec, TrainSpec

SCHEMA = 1
DEFAULT_LENGTH = 128

# the tables of a description that are no choice among kinds
TABLES: dict[str, type[Spec]] = {
    "model": ModelSpec,
    "encoder": TowerSpec,
    "decoder": DecoderSpec,
    "cross": CrossSpec,
    "mask": MaskSpec,
    "recurrent": RecurrentSpec,
    "ngram": NgramSpec,
    "run": RunSpec,
    "train": TrainSpec,
    "goal": GoalSpec,
    "lora": LoraSpec,
}


# what a file may say that is worked out before the description is read
LIKE = {
    "field": "like",
    "type": "encoder or decoder",
    "default": None,
    "meaning": "everything as in the other tower, but for what is said here",
}
ABOUT = {"field": "about", "type": "a table", "default": None, "meaning": "title, source, and context: the length that costs are shown for"}
BEFORE: dict[str, list[Tree]] = {"encoder": [LIKE], "decoder": [LIKE], "model": [ABOUT]}


def describe_model(
    target: str, overrides: list[str], *, batch: int = 1, length: int | None = None, source_length: int | None = None
) -> Tree:
    """Everything about one model, as plain data."""
    if not is_file(target) and target not in names():
        raise SpecError(unknown(target))
    tree, said = describe(target)
    spec = read_model(override(tree, overrides))
    length = min(said.get("context", DEFAULT_LENGTH), longest(spec)) if length is None else length
    if source_length is None and spec.decoder and spec.decoder.embed.reads == "memory":
        source_length = max(1, length // 4)  # a masked autoencoder reads a quarter of the patches, in He et al. 2022
    cost = size(spec, batch=batch, length=length, source_length=source_length)
    towers = {name: tower for name in ("encoder", "decoder") if (tower := getattr(spec, name))}
    return {
        "schema": SCHEMA,
        "name": target,
        "about": said,
        "changed": overrides,
        "shape": spec.shape,
        "parameters": cost.parameters,
        "parameters_by_part": cost.parameters_by_part,
        "flops": flops_of(cost),
        "memory": memory_of(cost),
        "weights": list(weights_of(spec)),
        "layers": {name: [to_tree(layer) for layer in tower.expanded()] for name, tower in towers.items()},
        "sections": [
            {"title": title, "rows": [dict(zip(("slot", "part", "formula"), row, strict=True)) for row in rows]}
            for title, rows in sections(spec)
        ],
        "spec": to_tree(spec),
    }


def unknown(target: str) -> str:
    """What to say of a name that is neither preset nor slot."""
    if slots := [slot for slot, base in SLOTS.items() if target in base.kinds]:
        return f"'{target}' is a kind of {' and of '.join(slots)}: 'manyheads show {slots[0]}' tells about it"
    if target.endswith(".py"):
        return f"{quoted(target)} is Python: name it with --parts, beside a model to show"
    close, _, _ = nearest(target, (*names(), *SLOTS, *TABLES, "parts")).partition(" (")
    lists = "'manyheads show' lists the presets, 'manyheads show parts' the slots"
    return f"no preset, slot or table {quoted(target)}{close or ':'} {lists}; a file of your own ends in .toml"


def longest(spec: ModelSpec) -> int:
    """The longest text that every table of the model holds."""
    parts = [part for tower in (spec.encoder, spec.decoder) if tower for layer in tower.expanded() for part in (layer.position, layer.core)]
    if spec.recurrent:
        parts.append(spec.recurrent.position)
    return min((part.longest for part in parts if part.longest is not None), default=1 << 30)


def flops_of(cost: Size) -> Tree:
    return {
        "batch": cost.batch,
        "length": cost.length,
        "source_length": cost.source_length,
        "forward": 2 * cost.multiply_adds,
        "multiply_adds": cost.multiply_adds,
        "multiply_adds_by_part": cost.multiply_adds_by_part,
    }


def memory_of(cost: Size) -> Tree:
    return {"weights": cost.weights_bytes, "activations": cost.activation_bytes, "training": cost.training_bytes, "cache": cost.cache_bytes}


def weights_of(spec: ModelSpec) -> Iterator[Tree]:
    """Every weight once, those of like layers together: name with * for the layer, shape, how many layers have it."""
    together: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, parameter in outline(spec).named_parameters():
        key = re.sub(r"(layers|positions)\.\d+\.", r"\1.*.", name), tuple(parameter.shape)
        together[key] = together.get(key, 0) + 1
    for (name, shape), count in together.items():
        yield {"name": name, "shape": list(shape), "times": count}


def list_presets() -> list[Tree]:
    rows = []
    for name in names():
        spec, said = read_model(preset(name)), about(name)
        towers = [tower for tower in (spec.encoder, spec.decoder) if tower]
        rows.append(
            {
                "name": name,
                "title": said["title"],
                "shape": spec.shape,
                "position": towers[-1].position.kind if towers else "none",
                "parameters": sum(parameter.numel() for parameter in outline(spec).parameters()),
                "source": said["source"],
            }
        )
    return rows


def list_parts(only: str | None = None) -> list[Tree]:
    """Every slot with its kinds, and every table, each with its fields, their defaults and meanings."""
    slots = [
        {
            "slot": name,
            "meaning": base.formula(),
            "kinds": [
                {"kind": kind, "formula": part.formula(), "default": kind == base.default_kind, "fields": fields_of(part)}
                for kind, part in sorted(base.kinds.items())
            ],
        }
        for name, base in sorted(SLOTS.items())
    ]
    tables = [
        {"slot": name, "meaning": first_line(spec), "kinds": [], "fields": fields_of(spec) + BEFORE.get(name, [])}
        for name, spec in TABLES.items()
    ]
    return [entry for entry in (*tables, *slots) if only in (None, entry["slot"])]


def first_line(spec: type[Spec]) -> str:
    return (spec.__doc__ or "").strip().splitlines()[0]


def fields_of(spec: type[Spec]) -> list[Tree]:
    return [
        {"field": name, "type": kind_of(field.annotation), "default": plain(field.get_default()), "meaning": field.description or ""}
        for name, field in spec.model_fields.items()
    ]


def kind_of(annotation: Any) -> str:
    """A type as a user would write it: 'float', 'add, concat or multiply', 'a norm', 'a table'."""
    if isinstance(annotation, type):
        if issubclass(annotation, Spec):
            return f"{'an' if annotation.slot[0] in 'aeio' else 'a'} {annotation.slot}" if issubclass(annotation, Part) else "a table"
        return annotation.__name__
    choices = getattr(annotation, "__args__", ())
    if str(annotation).startswith("typing.Literal"):
        *most, last = map(str, choices)
        return f"{', '.join(most)} or {last}" if most else last
    if "tuple" in str(annotation) or "list" in str(annotation):
        return "a list"
    return " or ".join(kind_of(choice) for choice in choices if choice is not type(None))


def plain(value: Any) -> Any:
    if value is PydanticUndefined:
        return None
    if isinstance(value, Part):
        return value.kind
    if isinstance(value, Spec):
        return to_tree(value) if value != type(value)() else None  # a table's own defaults are shown where it is
    return list(value) if isinstance(value, tuple) else value


# ---------------------------------------------------------------------------------------------- a model's sections

Row = tuple[str, str, str]  # slot, part, formula


def sections(spec: ModelSpec) -> Iterator[tuple[str, list[Row]]]:
    """Each tower, then its layers, like ones together, then what stands on top."""
    for name in ("encoder", "decoder"):
        tower: TowerSpec | None = getattr(spec, name)
        if tower is None:
            continue
        closing = tower.closing_norm()
        yield (
            f"{name}: {tower.layers} layers of width {tower.width}",
            [row("embed", tower.embed), *([row("final norm", closing)] if closing else [])],
        )
        for which, layer in alike(tower.expanded()):
            shared = f" ({tower.distinct} with weights of their own)" if tower.distinct else ""
            yield f"{name}, {which}{shared}", list(layer_rows(layer))
    for name in ("recurrent", "ngram"):
        own = getattr(spec, name)
        if own is not None:
            lines = (type(own).__doc__ or "").strip().splitlines()
            yield f"{name}: {lines[0]}", [row(field, getattr(own, field)) for field in type(own).model_fields]
    yield "on top", [row("head", spec.head), row("init", spec.init)]


def alike(layers: list[LayerSpec]) -> Iterator[tuple[str, LayerSpec]]:
    """Layers that are the same, with the places they stand at: 'layers 0–5', 'layers 0, 2, 4'."""
    kinds: list[LayerSpec] = []
    for layer in layers:
        if layer not in kinds:
            kinds.append(layer)
    for kind in kinds:
        places = [i for i, layer in enumerate(layers) if layer == kind]
        together = places == list(range(places[0], places[-1] + 1))
        if len(places) == 1:
            yield f"layer {places[0]}", kind
        else:
            yield f"layers {places[0]}–{places[-1]}" if together else f"layers {', '.join(map(str, places))}", kind


def layer_rows(layer: LayerSpec) -> Iterator[Row]:
    for name in ("attention", "core", "position", "mask"):
        yield row(name, getattr(layer, name))
    if layer.cross is not None:
        yield row("cross attention", layer.cross.attention or layer.attention)
        yield row("cross core", layer.cross.core or layer.core)
    for name in ("feedforward", "norm", "residual"):
        yield row(name, getattr(layer, name))


def row(slot: str, value: Any) -> Row:
    if not isinstance(value, Spec):
        return slot, written(value), ""
    fields = {name: getattr(value, name) for name in type(value).model_fields}
    # what is off is left out; everything else is said, default or not
    off = (None, False, 0.0, ())
    said = {name: inner for name, inner in fields.items() if inner not in off and getattr(inner, "kind", "") != "none"}
    inside = ", ".join(name if inner is True else f"{name}={written(inner)}" for name, inner in said.items())
    if isinstance(value, Part):
        return slot, f"{value.kind}({inside})" if inside else value.kind, value.formula()
    return slot, inside or "everybody sees everybody", ""


def written(value: Any) -> str:
    if isinstance(value, Part):
        return row("", value)[1]
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "not given"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {written(inner)}" for name, inner in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------------------- on a terminal


def new_table(title: str, *columns: str) -> Table:
    """A plain table; the first column is text, the rest stand at the right. Nothing is cut off: what is too long is folded."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return table


def print_model(data: Tree, console: Console) -> None:
    said = data["about"]
    title = escape(one_line(said.get("title", data["name"])))
    console.print(f"[bold]{title}[/] · {data['shape']} · [bold]{data['parameters']:,}[/] parameters", highlight=False)
    if said.get("source"):
        console.print(f"[dim]{escape(one_line(said['source']))}[/]", highlight=False)
    if data["changed"]:
        console.print(f"changed: {escape(', '.join(data['changed']))}", highlight=False)
    for section in data["sections"]:
        console.print(f"\n[bold]{escape(section['title'])}[/]", highlight=False)
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="cyan", no_wrap=True, width=15)
        table.add_column(overflow="fold")
        for line in section["rows"]:
            formula = f"\n[dim]{escape(line['formula'])}[/]" if line["formula"] else ""
            table.add_row(line["slot"], escape(line["part"]) + formula)
        console.print(table)
    print_weights(data, console)
    print_costs(data, console)


def print_weights(data: Tree, console: Console) -> None:
    table = new_table("weights", "weight", "shape", "×", "parameters")
    for weight in data["weights"]:
        count = weight["times"]
        for length in weight["shape"]:
            count *= length
        table.add_row(weight["name"], "×".join(map(str, weight["shape"])), str(weight["times"]), f"{count:,}")
    console.print()
    console.print(table)


def print_costs(data: Tree, console: Console) -> None:
    flops, parameters = data["flops"], data["parameters_by_part"]
    of = f"{flops['batch']} × {flops['length']} tokens" + (f", source {flops['source_length']}" if flops["source_length"] else "")
    wide = console.width >= 100
    columns = ("part", "parameters", "share", "multiply–adds", "share") if wide else ("part", "parameters", "multiply–adds")
    table = new_table(f"cost, for {of}, products alone, as if nothing were masked", *columns)
    products = flops["multiply_adds_by_part"]
    for part in dict.fromkeys((*parameters, *products)):
        own, done = parameters.get(part, 0), products.get(part, 0)
        shares = share(own, data["parameters"]), share(done, flops["multiply_adds"])
        table.add_row(part, *([f"{own:,}", shares[0], f"{done:,}", shares[1]] if wide else [f"{own:,}", f"{done:,}"]))
    total = [f"{data['parameters']:,}", "", f"{flops['multiply_adds']:,}", ""]
    table.add_row("all", *(total if wide else total[::2]), style="bold")
    console.print()
    console.print(table)
    memory = data["memory"]
    said = f"{readable(memory['weights'])} of weights (float32) · about {readable(memory['training'])} to train with Adam"
    if memory["cache"] is not None:
        said += f" · {readable(memory['cache'])} of cache after {flops['length']} tokens"
    console.print(f"\n{flops['forward']:,} FLOPs a forward · {said}", highlight=False)


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if part else ""


def print_presets(rows: list[Tree], console: Console) -> None:
    columns = ["name", "shape", "position", "parameters", *(["source"] if console.width >= 120 else [])]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name == "parameters" else "left", no_wrap=name != "source")
    for line in rows:
        table.add_row(*(f"{line[name]:,}" if name == "parameters" else escape(line[name]) for name in columns))
    console.print(table)


def print_parts(entries: list[Tree], console: Console) -> None:
    for entry in entries:
        console.print(f"\n[bold cyan]{entry['slot']}[/]  {escape(entry['meaning'])}", highlight=False)
        print_fields(entry.get("fields", []), console, indent=2)
        for kind in entry["kinds"]:
            default = " (default)" if kind["default"] else ""
            console.print(Padding(f"[bold]{kind['kind']}[/]{default}  [dim]{escape(kind['formula'])}[/]", (0, 0, 0, 2)))
            print_fields(kind["fields"], console, indent=6)


def print_fields(fields: list[Tree], console: Console, *, indent: int) -> None:
    for field in fields:
        value = "" if field["default"] in (None, []) else f" = {written(field['default'])}"
        console.print(
            Padding(f"{field['field']}{escape(value)}  [dim]{escape(field['meaning'])} ({escape(field['type'])})[/]", (0, 0, 0, indent))
        )
