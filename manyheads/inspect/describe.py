"""Describes models (layers, formulas, weights, costs) and slots (kinds, fields) as plain data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.checkpoint.loading import load
from manyheads.convert.hub import is_name
from manyheads.errors import UnknownKindError, UnsupportedError
from manyheads.files.manifest import TRAINER
from manyheads.files.read import read_json_or_empty
from manyheads.model.builder import build_meta
from manyheads.model.cost import count_parameters, size
from manyheads.model.spec import LayerSpec, ModelSpec, StackSpec, override_model, read_model
from manyheads.presets import is_path, names, preset, read_about, read_description
from manyheads.spec import SLOTS, Part, Spec, Tree, to_tree
from manyheads.tasks.task import task_of

SCHEMA = 1
DEFAULT_LENGTH = 128  # tokens, for a model without a context length
Row = tuple[str, str, str]  # slot, part, formula

# ------------------------------------------------------------------------------------------------------------- a model


def describe_model(
    target: str, overrides: list[str], *, batch: int = 1, length: int | None = None, source_length: int | None = None
) -> Tree:
    """Describes the model of a preset, a file or a checkpoint. Costs are for one batch of the given size."""
    spec, description, checkpoint = read_target(target, overrides)
    costs = describe_costs(
        spec, batch=batch, length=length, source_length=source_length, context=description.get("context")
    )
    head = {"schema": SCHEMA, "name": target, "about": description, "overrides": overrides}
    about_checkpoint = {"checkpoint": describe_checkpoint(checkpoint, target)} if checkpoint else {}
    return head | costs | describe_parts(spec) | about_checkpoint


def describe_costs(
    spec: ModelSpec,
    *,
    batch: int = 1,
    length: int | None = None,
    source_length: int | None = None,
    context: int | None = None,
) -> Tree:
    """The parameters, FLOPs and memory of a model for one batch; its length is the context by default."""
    if length is None:
        length = min(context or DEFAULT_LENGTH, max_positions(spec))
    if source_length is None and spec.decoder and spec.decoder.embed.reads == "memory":
        source_length = max(1, length // 4)  # a masked autoencoder encodes a quarter of the patches, in He et al. 2022
    cost = size(spec, batch=batch, length=length, source_length=source_length)
    return {
        "parameters": cost.parameters,
        "parameters_by_part": cost.parameters_by_part,
        "flops": {
            "batch": cost.batch,
            "length": cost.length,
            "source_length": cost.source_length,
            "forward": 2 * cost.multiply_adds,
            "multiply_adds": cost.multiply_adds,
            "multiply_adds_by_part": cost.multiply_adds_by_part,
        },
        "memory": {
            "weights": cost.weights_bytes,
            "activations": cost.activation_bytes,
            "training": cost.training_bytes,
            "cache": cost.cache_bytes,
        },
    }


def describe_parts(spec: ModelSpec) -> Tree:
    """The architecture of a model, its weights with their shapes, every layer, and all parts with their formulas."""
    stacks = {name: stack for name in ("encoder", "decoder") if (stack := getattr(spec, name))}
    return {
        "architecture": spec.architecture,
        "weights": weights_of(spec),
        "layers": {name: [to_tree(layer) for layer in stack.expanded_layers()] for name, stack in stacks.items()},
        "sections": [
            {"title": title, "rows": [dict(zip(("slot", "part", "formula"), row, strict=True)) for row in rows]}
            for title, rows in sections(spec)
        ],
        "spec": to_tree(spec),
    }


def read_target(target: str, overrides: list[str]) -> tuple[ModelSpec, Tree, Checkpoint | None]:
    """The model of a preset, a file or a checkpoint, with overrides, its `about` table, and the checkpoint."""
    tree, description, checkpoint = read_tree(target)
    return read_model(override_model(tree, overrides)), description, checkpoint


def read_tree(target: str) -> tuple[Tree, Tree, Checkpoint | None]:
    """The description of a preset, a file or a checkpoint as it is written, its `about` table, and the checkpoint."""
    checkpoint = load(target) if is_checkpoint(target) else None
    return (to_tree(checkpoint.spec), {}, checkpoint) if checkpoint else (*read_description(target), None)


def is_checkpoint(target: str) -> bool:
    """Whether a target is a folder, a model file or a name on the Hub; the name of a preset is none of them."""
    path = Path(target)
    if target in names():
        return False
    return path.is_dir() or path.suffix in (".gguf", ".pt") or (is_path(target) and is_name(target))


def describe_checkpoint(checkpoint: Checkpoint, target: str) -> Tree:
    """What a checkpoint has besides its model: format, task, tokenizer, and the state of the run that saved it."""
    metadata, tokenizer = checkpoint.metadata, checkpoint.tokenizer
    task = checkpoint.task["kind"] if checkpoint.task else None
    with suppress(UnsupportedError, UnknownKindError):  # no task fits, or it is one of the user's own
        task = task_of(checkpoint).kind
    state = read_json_or_empty(checkpoint.path / TRAINER) if checkpoint.path else {}
    return {
        "path": str(checkpoint.path or target),
        "format": metadata.family.model_type if metadata else None,
        "architecture": metadata.architecture if metadata and metadata.family.model_type != "manyheads" else None,
        "dtype": str(next(checkpoint.model.parameters()).dtype).removeprefix("torch."),
        "task": task,
        "classes": getattr(checkpoint.spec.head, "classes", None),
        "max_positions": checkpoint.max_positions,
        "vocab_size": None if tokenizer is None else tokenizer.get_vocab_size(),
        "max_length": (tokenizer.truncation or {}).get("max_length") if tokenizer else None,
        "step": state.get("step"),
        "metrics": state.get("metrics"),
    }


def max_positions(spec: ModelSpec) -> int:
    """The longest input that every position table of the model covers."""
    parts = (spec.encoder, spec.decoder, spec.recurrent and spec.recurrent.position)
    limits = [part.max_positions for part in parts if part]
    return min((limit for limit in limits if limit is not None), default=1 << 30)


def weights_of(spec: ModelSpec) -> list[Tree]:
    """Every weight with its name, shape and number of occurrences; `*` is the index of a layer."""
    parameters = build_meta(spec).named_parameters()
    count = Counter((re.sub(r"(layers|positions)\.\d+\.", r"\1.*.", name), tuple(p.shape)) for name, p in parameters)
    return [{"name": name, "shape": list(shape), "count": times} for (name, shape), times in count.items()]


def sections(spec: ModelSpec) -> Iterator[tuple[str, list[Row]]]:
    """Yields titles with their parts: each stack, its layers (equal ones together), the head and the initialization."""
    for name in ("encoder", "decoder"):
        stack: StackSpec | None = getattr(spec, name)
        if stack is None:
            continue
        norm = stack.output_norm()
        title = f"{name}: {stack.layers} layers of width {stack.width}"
        yield title, [to_row("embed", stack.embed), *([to_row("final norm", norm)] if norm else [])]
        shared = f" ({stack.layer_groups} layers have their own weights)" if stack.layer_groups else ""
        for which, layer in group_layers(stack.expanded_layers()):
            yield f"{name}, {which}{shared}", layer_rows(layer)
    for name in ("recurrent", "ngram"):
        if table := getattr(spec, name):
            yield f"{name}: {table.summary()}", [to_row(field, value) for field, value in table]
    yield "output", [to_row("head", spec.head), to_row("init", spec.init)]


def group_layers(layers: list[LayerSpec]) -> Iterator[tuple[str, LayerSpec]]:
    """Yields each different layer with the indices of equal layers, such as 'layers 0–5' or 'layers 0, 2, 4'."""
    distinct = [layer for i, layer in enumerate(layers) if layer not in layers[:i]]
    for layer in distinct:
        first, *others = numbers = [i for i, other in enumerate(layers) if other == layer]
        if not others:
            yield f"layer {first}", layer
        elif numbers == list(range(first, others[-1] + 1)):
            yield f"layers {first}–{others[-1]}", layer
        else:
            yield f"layers {', '.join(map(str, numbers))}", layer


def layer_rows(layer: LayerSpec) -> list[Row]:
    rows = [to_row(name, getattr(layer, name)) for name in ("attention", "core", "position", "mask")]
    if layer.cross is not None:
        rows.append(to_row("cross attention", layer.cross.attention or layer.attention))
        rows.append(to_row("cross core", layer.cross.core or layer.core))
    return rows + [to_row(name, getattr(layer, name)) for name in ("feedforward", "norm", "residual")]


def to_row(slot: str, value: Any) -> Row:
    """A slot, its part with the fields that are set, and the formula of the part."""
    if not isinstance(value, Spec):
        return slot, format_field(value), ""
    fields = {name: field for name, field in value if field not in (None, False, 0.0, ())}
    fields = {name: field for name, field in fields.items() if not isinstance(field, Part) or field.caption}
    inside = ", ".join(name if field is True else f"{name}={format_field(field)}" for name, field in fields.items())
    if isinstance(value, Part):
        return slot, f"{value.kind}({inside})" if inside else value.kind, value.summary()
    return slot, inside or "no mask", ""


def format_field(value: Any) -> str:
    if isinstance(value, Part):
        return to_row("", value)[1]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {format_field(inner)}" for name, inner in value.items()) + "}"
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------ presets, slots and fields


def describe_preset(name: str) -> Tree:
    """The architecture, position scheme, number of parameters and source of a preset."""
    spec, description = read_model(preset(name)), read_about(name)
    stack = spec.decoder or spec.encoder
    return {
        "name": name,
        "title": description["title"],
        "architecture": spec.architecture,
        "position": stack.position.kind if stack else "none",
        "parameters": count_parameters(build_meta(spec)),
        "source": description["source"],
    }


def list_slots() -> list[Tree]:
    """Every slot with its kinds, each with its formula and fields."""
    return [
        {
            "slot": name,
            "meaning": base.summary(),
            "kinds": [
                {
                    "kind": kind,
                    "formula": part.summary(),
                    "default": kind == base.default_kind,
                    "fields": fields_of(part),
                }
                for kind, part in sorted(base.kinds.items())
            ],
        }
        for name, base in sorted(SLOTS.items())
    ]


def list_tables(tables: Mapping[str, type[Spec]]) -> list[Tree]:
    """Tables of a run file that have no kinds, in the same form as `list_slots`."""
    return [
        {"slot": name, "meaning": spec.summary(), "kinds": [], "fields": fields_of(spec)}
        for name, spec in tables.items()
    ]


def fields_of(spec: type[Spec]) -> list[Tree]:
    """Every field with its type, default and meaning."""
    return [
        {
            "field": name,
            "type": type_name(field.annotation) + limits(field.metadata),
            "default": plain_default(field.get_default()),
            "meaning": field.description or "",
        }
        for name, field in spec.model_fields.items()
    ]


def type_name(annotation: Any) -> str:
    """Describes a type in words, such as 'float', 'add, concat or multiply', 'a norm' or 'a table'."""
    if isinstance(annotation, type):
        if issubclass(annotation, Part):
            return f"{'an' if annotation.slot[0] in 'aeio' else 'a'} {annotation.slot}"
        return "a table" if issubclass(annotation, Spec) else annotation.__name__
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        *others, last = (str(value) if str(value).isprintable() else repr(value) for value in arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(annotation) in (tuple, list):
        return "a list"
    return " or ".join(type_name(argument) for argument in arguments if argument is not type(None))


def limits(metadata: list[Any]) -> str:
    """Describes the bounds of a number in words, such as ', 1 to 65,536' or ', above 0'; '' without bounds."""
    bounds = {
        name: getattr(constraint, name)
        for constraint in metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(constraint, name)
    }
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    if {"ge", "le"} <= set(bounds):
        return f", {bounds['ge']:,} to {bounds['le']:,}"
    return "".join(f", {words[name]} {bounds[name]:,}" for name in words if name in bounds)


def plain_default(value: Any) -> Any:
    """A default as a JSON value; None if there is none, or if it is a table with only default fields."""
    if value is PydanticUndefined:
        return None
    if isinstance(value, Part):
        return value.kind
    if isinstance(value, Spec):
        return to_tree(value) if value != type(value)() else None
    return list(value) if isinstance(value, tuple) else value
