"""What `manyheads show` says: a model expanded, with its formulas, shapes and costs; or the parts there are to choose from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from manyheads.model.build import outline
from manyheads.model.size import Size, size
from manyheads.model.spec import LayerSpec, ModelSpec, TowerSpec, read_model
from manyheads.parts.embed import RestoredSpec
from manyheads.presets import names, preset
from manyheads.spec import SLOTS, Part, Spec, SpecError, Tree, nearest, override, read_toml, to_tree

SCHEMA = 1


def describe(target: str, overrides: list[str], *, batch: int, length: int | None, source_length: int | None) -> Tree:
    """Everything about one model, as plain data."""
    tree = read_description(target)
    about = tree.pop("about", {})
    spec = read_model(override(tree, overrides))
    length = length or about.get("context", 128)
    if source_length is None and spec.decoder and isinstance(spec.decoder.embed, RestoredSpec):
        source_length = max(1, length // 4)  # a masked autoencoder reads a quarter of the patches, in He et al. 2022
    cost = size(spec, batch=batch, length=length, source_length=source_length)
    towers = {name: tower for name in ("encoder", "decoder") if (tower := getattr(spec, name))}
    return {
        "schema": SCHEMA,
        "name": target,
        "about": about,
        "shape": spec.shape,
        "parameters": cost.parameters,
        "parameters_by_part": cost.parameters_by_part,
        "flops": flops_of(cost),
        "memory": memory_of(cost),
        "weights": list(weights_of(spec)),
        "layers": {name: [to_tree(layer) for layer in tower.expanded()] for name, tower in towers.items()},
        "spec": to_tree(spec),
    }


def read_description(target: str) -> Tree:
    """A preset by name, or a TOML file: a model's own, or a run's with the model in [model]."""
    if target.endswith(".toml") or "/" in target:
        tree = read_toml(Path(target))
        model = tree.get("model", tree)
        if not isinstance(model, dict):
            raise SpecError(f"[model] in {target} holds {model!r}, expected a table")
        return model
    if target not in names():
        raise SpecError(f"no preset '{target}': {nearest(target, names())}; a file of your own ends in .toml")
    return preset(target)


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
        tree = preset(name)
        about = tree.pop("about", {})
        spec = read_model(tree)
        towers = [tower for tower in (spec.encoder, spec.decoder) if tower]
        rows.append(
            {
                "name": name,
                "title": about["title"],
                "shape": spec.shape,
                "position": towers[-1].position.kind if towers else "none",
                "parameters": sum(parameter.numel() for parameter in outline(spec).parameters()),
                "source": about["source"],
            }
        )
    return rows


def list_parts(slot: str | None = None) -> list[Tree]:
    """Every slot, kind, field, default and meaning."""
    return [
        {
            "slot": name,
            "meaning": base.formula(),
            "kinds": [
                {"kind": kind, "formula": part.formula(), "default": kind == base.default_kind, "fields": fields_of(part)}
                for kind, part in sorted(base.kinds.items())
            ],
        }
        for name, base in sorted(SLOTS.items())
        if slot in (None, name)
    ]


def fields_of(spec: type[Spec]) -> list[Tree]:
    return [
        {
            "field": name,
            "type": kind_of(field.annotation),
            "default": plain(field.default),
            "meaning": field.description,
        }
        for name, field in spec.model_fields.items()
    ]


def kind_of(annotation: Any) -> str:
    """A type as a user would write it: 'float', 'one of add, concat, multiply', 'a norm'."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return f"a {annotation.slot}"
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    if text.startswith("typing.Literal"):
        return "one of " + ", ".join(map(str, annotation.__args__))
    return text.replace(" | None", "").replace("manyheads.parts.norm.", "")


def plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.kind
    return to_tree(value) if isinstance(value, Spec) else list(value) if isinstance(value, tuple) else value


# ---------------------------------------------------------------------------------------------------- on a terminal


def print_model(data: Tree, console: Console) -> None:
    about = data["about"]
    console.print(
        f"[bold]{escape(str(about.get('title', data['name'])))}[/] · {data['shape']} · [bold]{data['parameters']:,}[/] parameters",
        highlight=False,
    )
    if about.get("source"):
        console.print(f"[dim]{escape(str(about['source']))}[/]", highlight=False)
    spec = read_model(data["spec"])
    for title, rows in sections(spec):
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("slot", style="cyan", no_wrap=True)
        table.add_column("part", no_wrap=True)
        table.add_column("formula", style="dim")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print()
        console.print(table)
    print_costs(data, console)


def sections(spec: ModelSpec) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Each tower, then each run of like layers in it, then what stands on top."""
    for name in ("encoder", "decoder"):
        tower: TowerSpec | None = getattr(spec, name)
        if tower is None:
            continue
        closing = tower.closing_norm()
        rows = [row("embed", tower.embed), *([row("final norm", closing)] if closing else [])]
        yield f"{name}: {tower.layers} layers of width {tower.width}", rows
        for first, last, layer in runs(tower.expanded()):
            which = f"layers {first}–{last}" if last > first else f"layer {first}"
            shared = f" ({tower.distinct} with weights of their own)" if tower.distinct else ""
            yield f"{name}, {which}{shared}", list(layer_rows(layer))
    for name in ("recurrent", "ngram"):
        own = getattr(spec, name)
        if own is not None:
            yield name, [row(field, getattr(own, field)) for field in type(own).model_fields]
    yield "on top", [row("head", spec.head), row("init", spec.init)]


def runs(layers: list[LayerSpec]) -> Iterator[tuple[int, int, LayerSpec]]:
    start = 0
    for i in range(1, len(layers) + 1):
        if i == len(layers) or layers[i] != layers[start]:
            yield start, i - 1, layers[start]
            start = i


def layer_rows(layer: LayerSpec) -> Iterator[tuple[str, str, str]]:
    for name in ("attention", "core", "position", "mask"):
        yield row(name, getattr(layer, name))
    if layer.cross is not None:
        yield row("cross attention", layer.cross.attention or layer.attention)
        yield row("cross core", layer.cross.core or layer.core)
    for name in ("feedforward", "norm", "residual"):
        yield row(name, getattr(layer, name))


def row(slot: str, value: Any) -> tuple[str, str, str]:
    if not isinstance(value, Spec):
        return slot, str(value), ""
    set_fields = {name: getattr(value, name) for name, field in type(value).model_fields.items() if getattr(value, name) != field.default}
    inside = ", ".join(f"{name}={written(inner)}" for name, inner in set_fields.items())
    if isinstance(value, Part):
        return slot, f"{value.kind}({inside})" if inside else value.kind, value.formula()
    return slot, inside or "everybody sees everybody", ""


def written(value: Any) -> str:
    if isinstance(value, Part):
        return row("", value)[1]
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def print_costs(data: Tree, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title="weights", title_justify="left", title_style="bold")
    for title, justify in (("weight", "left"), ("shape", "right"), ("×", "right"), ("parameters", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for weight in data["weights"]:
        count = weight["times"]
        for length in weight["shape"]:
            count *= length
        table.add_row(weight["name"], "×".join(map(str, weight["shape"])) or "1", str(weight["times"]), f"{count:,}")
    console.print()
    console.print(table)
    flops, parameters = data["flops"], data["parameters_by_part"]
    of = f"{flops['batch']} × {flops['length']} tokens" + (f", source {flops['source_length']}" if flops["source_length"] else "")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=f"cost, for {of}", title_justify="left", title_style="bold")
    for title in ("part", "parameters", "share", "multiply–adds", "share"):
        table.add_column(title, justify="left" if title == "part" else "right")
    products = flops["multiply_adds_by_part"]
    for part in dict.fromkeys((*parameters, *products)):
        own, done = parameters.get(part, 0), products.get(part, 0)
        table.add_row(part, f"{own:,}", share(own, data["parameters"]), f"{done:,}", share(done, flops["multiply_adds"]))
    table.add_row("all", f"{data['parameters']:,}", "", f"{flops['multiply_adds']:,}", "", style="bold")
    console.print()
    console.print(table)
    memory = data["memory"]
    said = f"{readable(memory['weights'])} of weights (float32) · about {readable(memory['training'])} to train with Adam"
    if memory["cache"] is not None:
        said += f" · {readable(memory['cache'])} of cache after {flops['length']} tokens"
    console.print(f"\n{flops['forward']:,} FLOPs a forward · {said}", highlight=False)


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if part else ""


def readable(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def print_presets(rows: list[Tree], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("name", "shape", "position", "parameters", "source"):
        table.add_column(name, justify="right" if name == "parameters" else "left", no_wrap=name != "source")
    for preset_row in rows:
        table.add_row(
            *(f"{preset_row[k]:,}" if k == "parameters" else preset_row[k] for k in ("name", "shape", "position", "parameters", "source"))
        )
    console.print(table)


def print_parts(slots: list[Tree], console: Console) -> None:
    for slot in slots:
        console.print(f"\n[bold cyan]{slot['slot']}[/]  {escape(slot['meaning'])}", highlight=False)
        for kind in slot["kinds"]:
            default = " (default)" if kind["default"] else ""
            console.print(f"  [bold]{kind['kind']}[/]{default}  [dim]{escape(kind['formula'])}[/]", highlight=False)
            for field in kind["fields"]:
                value = "" if field["default"] is None else f" = {written(field['default'])}"
                console.print(
                    f"      {field['field']}{escape(value)}  [dim]{escape(field['meaning'])} ({escape(field['type'])})[/]", highlight=False
                )
