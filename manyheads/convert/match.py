"""Which family can say a description: its config is written, read again, and compared part by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from manyheads.convert.families import NAMES, Family, family
from manyheads.convert.weights import Row, Weight
from manyheads.model.build import outline
from manyheads.model.spec import LayerSpec, ModelSpec, TowerSpec
from manyheads.spec import Tree, to_tree


def plain(spec: ModelSpec) -> Tree:
    """What a forward depends on, every choice made and nothing else: no dropout, no init, towers as explicit layers."""
    tree: Tree = {"vocab": spec.vocab, "source_vocab": spec.source_vocab, "head": to_tree(spec.head)}
    for name in ("encoder", "decoder"):
        tower: TowerSpec | None = getattr(spec, name)
        if tower is not None:
            closing = tower.closing_norm()
            tree[name] = {
                "width": tower.width,
                "embed": to_tree(tower.embed) | {"size": tower.embed.table_width(tower.width)},
                "distinct": tower.distinct or tower.layers,
                "layers": [plain_layer(layer, tower.width) for layer in tower.expanded()],
                "final_norm": to_tree(closing) if closing else {"kind": "none"},
            }
    for name in ("recurrent", "ngram"):
        if own := getattr(spec, name):
            tree[name] = to_tree(own)
    return without_dropout(tree)


def plain_layer(layer: LayerSpec, width: int) -> Tree:
    tree = to_tree(layer)
    attention = to_tree(layer.attention) | {"size": layer.attention.head_size(width), "groups": layer.attention.key_heads()}
    tree |= {"attention": attention, "feedforward": to_tree(layer.feedforward) | {"hidden": layer.feedforward.hidden_size(width)}}
    if layer.cross is not None:
        own = layer.cross.attention or layer.attention
        across = to_tree(own) | {"size": own.head_size(width), "groups": own.key_heads()}
        tree["cross"] = {"attention": across, "core": to_tree(layer.cross.core or layer.core)}
    return tree


def without_dropout(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_dropout(inner) for name, inner in value.items() if name != "dropout"}
    return [without_dropout(inner) for inner in value] if isinstance(value, list) else value


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every place where two trees differ: the path, and what stands there in each."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.get("kind") == theirs.get("kind"):
        for name in sorted(set(ours) | set(theirs)):
            yield from differences(ours.get(name), theirs.get(name), f"{path}.{name}" if path else name)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, f"{path}.{index}")
    elif ours != theirs:
        yield path, said(ours), said(theirs)


def said(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("kind", f"a table of {len(value)} fields"))
    return "nothing" if value is None else str(value) if not isinstance(value, list) else f"a list of {len(value)}"


def attempts(spec: ModelSpec, names: Iterable[str]) -> Iterator[tuple[Family, str, Tree, list[tuple[str, str, str]]]]:
    """Every family and task, the config it would write, and where that config says something else."""
    ours = plain(spec)
    for name in names:
        known = family(name)
        for architecture in known.tasks:
            try:
                config = known.config_of(spec, architecture)
                found = known.spec_of(config)
            except ValueError:
                continue  # a config of this family cannot even be written
            wrong = list(differences(ours, plain(found)))
            if not wrong and not covers(known.rows(spec, architecture), spec):
                wrong = [("its weights", "laid out", "another layout")]
            yield known, architecture, config, wrong


def covers(rows: list[Row], spec: ModelSpec) -> bool:
    """Whether a table has a row for every weight of the model, and none for a weight it has not."""
    named = [name for row in rows if isinstance(row, Weight) for name in row.names]
    return sorted(named) == sorted(name for name, _ in outline(spec).named_parameters())


def fitting(spec: ModelSpec, names: Iterable[str] = NAMES) -> tuple[Family, str, Tree]:
    """The first family of those named that can say the spec, its task and config; or a sentence on the first part that does not fit."""
    nearest: tuple[int, Family, list[tuple[str, str, str]]] | None = None
    for known, architecture, config, wrong in attempts(spec, names):
        if not wrong:
            return known, architecture, config
        if nearest is None or len(wrong) < nearest[0]:
            nearest = len(wrong), known, wrong
    if nearest is None:
        raise ValueError(f"no family has a model like this: {spec.shape}")
    _, known, wrong = nearest
    path, ours, theirs = wrong[0]
    raise ValueError(f"no family can say this model: {path} is {ours}, and {known.model_type}, the nearest, has {theirs} there")
