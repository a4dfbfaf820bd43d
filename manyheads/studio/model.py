"""The tab Model: a drawing of the architecture, and what changes when a part is swapped."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import asdict
from functools import cache, lru_cache
from math import prod
from threading import Lock
from typing import Annotated, Any, get_args

from fastapi import APIRouter
from pydantic import BaseModel, Field

from manyheads.errors import UsageError
from manyheads.inspect.describe import describe_costs, describe_parts, list_slots
from manyheads.inspect.drawing import draw_model
from manyheads.inspect.svg import style
from manyheads.inspect.swaps import steps, swaps, to_text
from manyheads.model.builder import build_meta
from manyheads.model.cost import count_parameters, part_of
from manyheads.model.spec import ModelSpec, override_model, read_model
from manyheads.presets import names, preset, read_about
from manyheads.spec import Part, Spec, Tree, quote, to_toml, to_tree
from manyheads.studio.session import Sessions

Override = Annotated[str, Field(max_length=8192)]
CHECKPOINT = "checkpoint-"  # targets of requests are presets, or checkpoints by their number: never paths


class Model(BaseModel):
    """A request for a preset or an open checkpoint, with overrides."""

    session: str
    target: str = Field(max_length=100)
    overrides: list[Override] = Field(default=[], max_length=512)


class Batch(Model):
    """A request for the costs of one batch."""

    batch: int = 1
    length: int | None = None
    source_length: int | None = None


class Walk(Model):
    """A request for the steps from a model to a preset or an open checkpoint."""

    goal: str = Field(max_length=100)


def router(sessions: Sessions) -> APIRouter:
    routes, lock = APIRouter(prefix="/model"), Lock()  # one model at a time: they share the processor

    def start(target: str) -> Tree:
        """The description of a target before any override."""
        if target in names():
            return preset(target)
        specs = {f"{CHECKPOINT}{index}": checkpoint.spec for index, checkpoint in enumerate(sessions.checkpoints)}
        if target in specs:
            return to_tree(specs[target])
        raise UsageError(f"no preset or open checkpoint {quote(target)}")

    def name_of(target: str) -> str:
        """The target as `manyheads show` takes it."""
        paths = {f"{CHECKPOINT}{index}": path for index, path in enumerate(sessions.names)}
        return paths.get(target) or target

    @routes.get("/targets")
    def targets(session: str) -> Tree:
        sessions[session]
        checkpoints = [f"{CHECKPOINT}{index}" for index in range(len(sessions.checkpoints))]
        return {
            "checkpoints": [{"target": target, "title": name_of(target)} for target in checkpoints],
            "presets": [{"target": name, **read_about(name)} for name in names()],
            "style": style(),  # of every drawing; the page allows no inline style
            "slots": {entry["slot"]: entry["kinds"] for entry in list_slots()},
        }

    @routes.post("/describe")
    def describe(model: Model) -> Tree:
        sessions[model.session]
        tree = start(model.target)
        spec = read_model(override_model(tree, model.overrides))
        name = name_of(model.target)
        with lock:
            parts = describe_parts(spec)
            equal = [other for other in names() if preset_spec(other) == spec]
            title = name if not model.overrides else equal[0] if equal else f"{name}, changed"
            drawing = draw_model(spec, title=title).replace(f"<style>{style()}</style>", "")
            shortest = swaps(tree, spec) if model.overrides else []
            at_start = parameters_of(read_model(tree))
        by_part = Counter[str]()
        for weight in parts["weights"]:
            by_part[part_of(weight["name"].replace(".*", ""))] += weight["count"] * prod(weight["shape"])
        return {
            "about": read_about(model.target) if model.target in names() else {},
            "parameters": by_part.total(),
            "parameters_at_start": at_start,
            "parameters_by_part": dict(by_part),
            **{key: parts[key] for key in ("architecture", "weights", "sections")},
            "fields": editable_fields(spec),
            "equal_presets": equal,
            "svg": drawing,
            "toml": to_toml(to_tree(spec)),
            "command": shlex.join(
                ["manyheads", "show", name, *(word for override in shortest for word in ("-s", override))]
            ),
        }

    @routes.post("/costs")
    def costs(model: Batch) -> Tree:
        sessions[model.session]
        spec = read_model(override_model(start(model.target), model.overrides))
        context = read_about(model.target).get("context") if model.target in names() else None
        with lock:
            return costs_of(spec, model.batch, model.length, model.source_length, context)

    @routes.post("/walk")
    def walk(model: Walk) -> Tree:
        sessions[model.session]
        tree = override_model(start(model.target), model.overrides)
        swap_steps = steps(tree, read_model(start(model.goal)))
        return {"goal": model.goal, "title": name_of(model.goal), "steps": [asdict(step) for step in swap_steps]}

    return routes


@cache
def preset_spec(name: str) -> ModelSpec:
    return read_model(preset(name))


@lru_cache(64)
def parameters_of(spec: ModelSpec) -> int:
    return count_parameters(build_meta(spec))


@lru_cache(64)
def costs_of(spec: ModelSpec, batch: int, length: int | None, source_length: int | None, context: int | None) -> Tree:
    costs = describe_costs(spec, batch=batch, length=length, source_length=source_length, context=context)
    return {key: costs[key] for key in ("parameters", "flops", "memory")}


# ---------------------------------------------------------------------------------------------------------- fields


def editable_fields(spec: Spec, path: str = "") -> list[Tree]:
    """Every field of a spec as a control of the page: its path, value as in `-s`, meaning, and what it may be."""
    rows = []
    for name, field in type(spec).model_fields.items():
        value, types = getattr(spec, name), get_args(field.annotation) or (field.annotation,)
        if value is None and any(is_table(annotation) for annotation in types) and name != "cross":
            continue  # a stack that the model does not have
        own = path + name
        rows.append(
            {
                "path": own,
                "name": name,
                "meaning": field.description or "",
                "optional": spec._is_optional(name),
                "value": None if value is None else to_text(value),
                **control(value, types, f"{own}."),
            }
        )
    return rows


def is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Spec) and not issubclass(annotation, Part)


def control(value: Any, types: tuple[Any, ...], path: str) -> Tree:
    """What the page needs to change a value: the slot of a part, the fields of a table, or the choices of a word."""
    fields = editable_fields(value, path) if isinstance(value, Spec) else []
    for annotation in types:
        if isinstance(annotation, type) and issubclass(annotation, Part):
            kind = value.kind if value is not None else None
            return {
                "type": "part",
                "slot": annotation.slot,
                "kind": kind,
                "formula": value.summary() if kind else "",
                "fields": fields,
            }
        if is_table(annotation):
            return {"type": "table", "formula": annotation.summary(), "fields": fields}
    if bool in types:
        return {"type": "switch"}
    if all(isinstance(choice, str) for choice in types):  # the arguments of a Literal
        return {"type": "choice", "choices": list(types)}
    return {"type": "text"}
