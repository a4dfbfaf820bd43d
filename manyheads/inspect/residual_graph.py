"""The graph of a layer, found by tracing its residual connection: which norm, sublayer and sum reads which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, fx, nn

from manyheads.parts.residual import Residual

SUMS = ("add", "iadd", "add_")
UNCHANGED = (nn.Dropout, nn.Identity)  # modules that return their input in evaluation


@dataclass(frozen=True)
class Node:
    """A step of a layer. The nodes of a graph are in the order in which they run."""

    name: str  # unique, such as 'norm1' or 'attention'
    role: Literal["input", "norm", "sublayer", "sum", "other"]
    label: str = ""  # the name of a sublayer, or of another step
    inputs: tuple[str, ...] = ()  # the names of the nodes that it reads


class Marker(nn.Module):
    """Stands for a sublayer."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Traced(nn.Module):
    """A residual connection around markers."""

    def __init__(self, residual: Residual, sublayers: Sequence[str]) -> None:
        super().__init__()
        self.residual = residual
        self.sublayers = nn.ModuleDict({name: Marker() for name in sublayers})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x, list(self.sublayers.values()))
        return out


class Tracer(fx.Tracer):
    """Looks into the residual connection, and into no other module."""

    def is_leaf_module(self, module: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(module, Residual)


def residual_graph(residual: Residual, sublayers: Sequence[str], *, has_norm: bool = True) -> list[Node]:
    """The nodes of a layer, from its input to its output, without dropout, and without norms that change nothing.

    If a residual connection cannot be traced, because its forward depends on values, only its sublayers are known, and
    the last node says so.
    """
    module = Traced(residual, sublayers)
    try:
        graph = Tracer().trace(module)
    except Exception:  # of any kind: the code of a user's own part met a value that is not there
        chain = [Node("input", "input")]
        for name in sublayers:
            chain.append(Node(name, "sublayer", name, (chain[-1].name,)))
        return [*chain, Node("other", "other", "paths that depend on values", (chain[-1].name,))]
    return merge_sums(to_nodes(graph, module, has_norm=has_norm))


def to_nodes(graph: fx.Graph, module: Traced, *, has_norm: bool) -> list[Node]:
    """The steps that depend on the input and that the output depends on."""
    nodes, names, counts = [Node("input", "input")], dict[fx.Node, str](), Counter[str]()
    for step in graph.nodes:
        inputs = tuple(dict.fromkeys(names[node] for node in step.all_input_nodes if node in names))
        if step.op == "output":
            return ancestors(nodes, inputs)
        if step.op == "placeholder":
            names[step] = "input"
        if not inputs:
            continue
        node = to_node(step, module, inputs)
        if node is None or (node.role == "norm" and not has_norm):
            names[step] = inputs[0]
            continue
        count, counts[node.name] = counts[node.name], counts[node.name] + 1
        names[step] = f"{node.name}{count or ''}" if node.role == "sublayer" else f"{node.name}{count}"
        nodes.append(replace(node, name=names[step]))
    return nodes


def to_node(step: fx.Node, module: Traced, inputs: tuple[str, ...]) -> Node | None:
    """What a step of the trace is, with a name that is not unique yet; None if it changes nothing."""
    if step.op == "call_module":
        owner, name = module.get_submodule(str(step.target)), str(step.target).rpartition(".")[2]
        if isinstance(owner, Marker):
            return Node(name, "sublayer", name, inputs)
        if isinstance(owner, UNCHANGED):
            return None
        if owner in list(module.residual.norms):
            return Node("norm", "norm", "", inputs)
        return Node("other", "other", type(owner).__name__, inputs)
    function = str(getattr(step.target, "__name__", step.target))
    if function in SUMS and len(inputs) > 1:
        return Node("sum", "sum", "", inputs)
    return Node("other", "other", function, inputs)


def ancestors(nodes: list[Node], outputs: Sequence[str]) -> list[Node]:
    """The nodes that the output depends on."""
    needed = {"input", *outputs}
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(node.inputs)
    return [node for node in nodes if node.name in needed]


def merge_sums(nodes: list[Node]) -> list[Node]:
    """Writes (x + a) + b as one sum of three, if nothing else reads the inner sum."""
    for inner in nodes:
        readers = [node for node in nodes if inner.name in node.inputs]
        if inner.role == "sum" and [node.role for node in readers] == ["sum"]:
            inputs = dict.fromkeys((*inner.inputs, *(name for name in readers[0].inputs if name != inner.name)))
            outer = replace(readers[0], inputs=tuple(inputs))
            return merge_sums([outer if node is readers[0] else node for node in nodes if node is not inner])
    return nodes


def ranks(nodes: Sequence[Node]) -> dict[str, int]:
    """The length of the longest path from the input to each node, so that parallel steps have one rank."""
    rank = dict[str, int]()
    for node in nodes:
        rank[node.name] = max((rank[name] + 1 for name in node.inputs), default=0)
    return rank
