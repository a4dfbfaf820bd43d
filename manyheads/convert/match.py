"""Finds a family that can express a model, by writing its config, reading it again and comparing the fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from manyheads.convert.families import NAMES, Family, get_family
from manyheads.convert.fold import fold_weights
from manyheads.errors import CheckpointConfigError, ConfigError, ExportError
from manyheads.model.builder import Model, build_meta
from manyheads.model.spec import LayerSpec, ModelSpec, StackSpec
from manyheads.parts.attention import AttentionSpec
from manyheads.spec import Tree, to_tree


def canonical(spec: ModelSpec) -> Tree:
    """The fields that the output depends on, with default sizes resolved and every layer listed."""
    tree: Tree = {"vocab": spec.vocab, "source_vocab": spec.source_vocab, "head": to_tree(spec.head)}
    for name in ("encoder", "decoder"):
        stack: StackSpec | None = getattr(spec, name)
        if stack is not None:
            final_norm = stack.output_norm()
            tree[name] = {
                "width": stack.width,
                "embed": to_tree(stack.embed) | {"size": stack.embed.table_width(stack.width)},
                "layer_groups": stack.layer_groups or stack.layers,
                "layers": [canonical_layer(layer, stack.width) for layer in stack.expanded_layers()],
                "final_norm": to_tree(final_norm) if final_norm else {"kind": "none"},
            }
    for name in ("recurrent", "ngram"):
        if backbone := getattr(spec, name):
            tree[name] = to_tree(backbone)
    return without_dropout(tree)


def canonical_layer(layer: LayerSpec, width: int) -> Tree:
    def attention(spec: AttentionSpec) -> Tree:
        return to_tree(spec) | {"size": spec.head_dim(width), "kv_heads": spec.num_kv_heads()}

    feedforward = to_tree(layer.feedforward) | {"hidden": layer.feedforward.hidden_size(width)}
    tree = to_tree(layer) | {"attention": attention(layer.attention), "feedforward": feedforward}
    if layer.cross is not None:
        core = to_tree(layer.cross.core or layer.core)
        tree["cross"] = {"attention": attention(layer.cross.attention or layer.attention), "core": core}
    return tree


def without_dropout(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_dropout(inner) for name, inner in value.items() if name != "dropout"}
    return [without_dropout(inner) for inner in value] if isinstance(value, list) else value


def differences(tree: Any, other: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields the path of each field in which two trees differ, and both values."""
    if isinstance(tree, dict) and isinstance(other, dict) and tree.get("kind") == other.get("kind"):
        for name in sorted(set(tree) | set(other)):
            yield from differences(tree.get(name), other.get(name), f"{path}.{name}" if path else name)
    elif isinstance(tree, list) and isinstance(other, list) and len(tree) == len(other):
        for index, pair in enumerate(zip(tree, other, strict=True)):
            yield from differences(*pair, f"{path}.{index}")
    elif tree != other:
        yield path, summarize(tree), summarize(other)


def same_model(spec: ModelSpec, other: ModelSpec) -> bool:
    """Whether two specs describe the same computation."""
    return not any(differences(canonical(spec), canonical(other)))


def summarize(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("kind", f"a table of {len(value)} fields"))
    return f"a list of {len(value)}" if isinstance(value, list) else str(value)


class Candidate(NamedTuple):
    """An architecture of a family, its config for a model, and the fields in which that config differs from it."""

    family: Family
    architecture: str
    config: Tree
    differences: list[tuple[str, str, str]]
    spec: ModelSpec  # what the config describes

    def distance(self, spec: ModelSpec) -> tuple[bool, int]:
        """How far it is from a model: whether its head gives something else, and how many fields differ."""
        return self.spec.head.output != spec.head.output, len(self.differences)


def candidates(spec: ModelSpec, names: Iterable[str]) -> Iterator[Candidate]:
    """Yields every architecture of these families that can write a config for a model."""
    tree = canonical(spec)
    for name in names:
        family = get_family(name)
        for architecture in family.architectures:
            try:
                config = family.config_of(spec, architecture)
                config_spec = family.spec_of(config)
                differing_fields = list(differences(tree, canonical(config_spec)))
            except (ExportError, CheckpointConfigError, ConfigError):
                continue
            parameters = {} if differing_fields else dict(build_meta(spec).named_parameters())
            if not differing_fields and not family.table(spec, architecture, parameters).covers(parameters):
                differing_fields = [("the layout of the weights", "ours", "different")]
            yield Candidate(family, architecture, config, differing_fields, config_spec)


def find_architecture(spec: ModelSpec, names: Iterable[str] = NAMES) -> Candidate:
    """The first architecture of these families that can express a model. The error names a field that differs."""
    names, nearest = list(names), None
    for candidate in candidates(spec, names):
        if not candidate.differences:
            return candidate
        if first_reads(candidate.spec) != first_reads(spec):  # a family of images is not near a model of texts
            continue
        if nearest is None or candidate.distance(spec) < nearest.distance(spec):
            nearest = candidate
    library = "Hugging Face" if names[0] in NAMES else "llama.cpp"
    message = f"no supported {library} architecture can express this model"
    if nearest is None:
        raise ExportError(f"{message}, which is {spec.architecture}")
    path, value, other = nearest.differences[0]
    family = nearest.family.model_type.removeprefix("gguf-")
    raise ExportError(f"{message}: {path} is {value}, but {other} in {family} ({nearest.architecture}), the nearest")


def first_reads(spec: ModelSpec) -> str | None:
    """What the first stack of a model reads: tokens or patches."""
    stack = spec.encoder or spec.decoder
    return stack.embed.reads if stack else None


def expressible(
    model: Model, names: Iterable[str] = NAMES, resolve: Callable[[ModelSpec], ModelSpec] = lambda spec: spec
) -> tuple[Model, Candidate]:
    """The first architecture that can express a model, or else an equal model, by `fold_weights`.

    `resolve` fills in what the specs of a format must have.
    """
    names = list(names)
    try:
        return model, find_architecture(resolve(model.spec), names)
    except ExportError:
        folded_model = fold_weights(model)
        if folded_model is model:
            raise
        return folded_model, find_architecture(resolve(folded_model.spec), names)
