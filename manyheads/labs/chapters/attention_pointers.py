"""Hard attention: every head points at one token, and the pointers of all layers are a tree."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import torch
from torch import nn

from manyheads.inspect import measure
from manyheads.labs.chapters.attention import orthonormal
from manyheads.labs.figures import Heatmap, Table, heatmap
from manyheads.labs.finding import Finding, at_least, at_most, equals, is_true, judging
from manyheads.labs.fitting import small_model
from manyheads.labs.lab import OnProgress, check_choice, lab, no_progress
from manyheads.labs.plain import attend, attention_weights
from manyheads.parts.core import ArgmaxSpec, Core, DotSpec

Pointers = list[list[int]]  # of each layer and head: how many tokens back it points


@torch.no_grad()
def pointing_model(pointers: Pointers, length: int, core: str = "argmax") -> Any:
    """Causal layers whose head h of layer l points `pointers[l][h]` tokens back for any tokens, by relative biases."""
    heads = len(pointers[0])
    model: Any = small_model(
        vocab=2, head="none", layers=len(pointers), width=4 * heads, attention={"heads": heads}, core=core,
        position={"kind": "relative", "length": length}, feedforward={"kind": "none"}, norm="none",
    ).double()  # fmt: skip
    for layer, steps in zip(model.decoder.layers, pointers, strict=True):
        for projection in (layer.attention.query, layer.attention.key):
            nn.init.zeros_(projection.weight)
            nn.init.zeros_(projection.bias)
        for projection in (layer.attention.value, layer.attention.output):
            nn.init.normal_(projection.weight)
        nn.init.zeros_(layer.position.table.weight)
        for head, step in enumerate(steps):
            if step < length:
                layer.position.table.weight[length - 1 - step, head] = 9.0
    nn.init.normal_(model.decoder.embed.table.weight)
    return model.eval()


def tree_pointers(heads: int, layers: int) -> Pointers:
    """Head h of layer l points h·(k + 1)ˡ back, as the digits of a number in base k + 1: no two paths meet."""
    return [[h * (heads + 1) ** layer for h in range(1, heads + 1)] for layer in range(layers)]


def reached_positions(pointers: Pointers, position: int) -> list[set[int]]:
    """The positions that an output depends on: itself, then those one layer below, and so on to the input."""
    levels = [{position}]
    for steps in reversed(pointers):
        levels.append(levels[-1] | {i - step for i in levels[-1] for step in steps if i >= step})
    return levels


def receptive_field(pointers: Pointers, length: int, core: str = "argmax") -> set[int]:
    """By perturbation: the input positions whose change alters the last output; without a layer, its own."""
    if not pointers:
        return {length - 1}
    return measure.receptive_field(pointing_model(pointers, length, core), [0] * length, length - 1, replacements=[1])


def learn_pointer(core: Core, steps: int = 100) -> float:
    """Learns a query by gradient descent, so that the output is one of five values; returns the distance at the end."""
    k = v = orthonormal(5, 5)
    query = nn.Parameter(0.1 * torch.randn(1, 5, dtype=torch.float64))
    optimizer = torch.optim.SGD([query], lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        (attend(query, k, v, core)[0] - v[2]).square().sum().backward()
        optimizer.step()
    return float((attend(query, k, v, core)[0] - v[2]).norm().detach())


@lab("attention", rows=("A14",), counterexample={"core": "dot"}, try_next=("--steps 3", "--seed 1"))
def hard_attention(
    *,
    core: Annotated[str, "argmax or dot: what makes weights from scores"] = "argmax",
    steps: Annotated[int, "steps of gradient descent"] = 100,
) -> Finding:
    """Argmax attention gives all weight to one key, and can still be trained.

    Instead of the softmax, a row has weight 1 at its highest score and 0 elsewhere; of equal scores the first counts.
    Such a step has no gradient. The straight-through estimator goes forward with the argmax and backward with the
    gradient of the softmax, which is enough to learn where to point.
    """
    check_choice("core", core, ("argmax", "dot"))
    spec = ArgmaxSpec() if core == "argmax" else DotSpec()
    head = spec.build(1, 5, 5).double()
    q, k = torch.randn(2, 6, 5, dtype=torch.float64)
    weights = attention_weights(q, k, head, causal=True)
    ties = attention_weights(q, k[:1].expand(6, -1), head)
    visible = torch.ones(6, 6).tril().bool()
    return Finding(
        (
            is_true("every row is one 1 and else 0", bool(((weights == 0) | (weights == 1)).all())),
            at_most("largest difference between a row sum and 1", (weights.sum(-1) - 1).abs().max(), 0),
            is_true("of equal scores, the first key is taken", bool((ties[:, 0] == 1).all())),
            at_most("distance from the value to point at, after training", learn_pointer(head, steps), 1e-10),
        ),
        (heatmap("Weights under a causal mask", weights, visible=visible),),
    )


@lab("attention", rows=("A15", "A16", "P12"), errata=("E6",), seconds=(3, 8), smallest={"max_count": 2, "draws": 6},
     full={"draws": 200}, counterexample={"core": "dot"}, try_next=("--max-count 4", "--draws 100"))  # fmt: skip
def receptive_field_of_pointers(
    *,
    max_count: Annotated[int, "largest number of heads, and of layers"] = 3,
    draws: Annotated[int, "models with random pointers"] = 20,
    core: Annotated[str, "argmax or dot: what makes weights from scores"] = "argmax",
    progress: OnProgress = no_progress,
) -> Finding:
    """With argmax attention, an output of n layers with k heads depends on at most (k + 1)ⁿ inputs.

    A token reads itself, through the residual connection, and one token per head: k + 1 tokens of the layer below, each
    of which reads k + 1 again. Every token is changed in turn, and the receptive field is the set of those that change
    the output. If head h of layer l points h·(k + 1)ˡ back, no two paths meet, and it has (k + 1)ⁿ tokens.
    Pointers that meet give fewer, and a text has no more than its t + 1 tokens up to the output.
    """
    check_choice("core", core, ("argmax", "dot"))
    rows, exact, alike = list[tuple[float, ...]](), 0, 0
    cases = list(itertools.product(range(1, max_count + 1), repeat=2))
    for number, (k, n) in enumerate(cases):
        size = (k + 1) ** n
        reached = len(receptive_field(tree_pointers(k, n), size, core))
        longer = len(receptive_field(tree_pointers(k, n), 2 * size, core))  # with as many tokens that it must not reach
        rows.append((k, n, size, longer))
        exact += reached == longer == size
        progress("heads and layers", number + 1, len(cases))
    sizes, length = list[tuple[int, int]](), 3 * max_count + 3
    for number in range(draws):
        k, n = (int(i) for i in torch.randint(1, max_count + 1, (2,)))
        pointers = [torch.randint(0, 4, (k,)).tolist() for _ in range(n)]
        positions = receptive_field(pointers, length, core)
        alike += positions == reached_positions(pointers, length - 1)[-1]
        sizes.append((len(positions), min((k + 1) ** n, length)))
        progress("random pointers", number + 1, draws)
    short = len(receptive_field(tree_pointers(max_count, 2), max_count + 1, core))
    return Finding(
        (
            *judging(
                "A15 P12",
                equals("pairs k, n with a receptive field of (k + 1)ⁿ tokens", exact, len(cases)),
                is_true("random pointers: no receptive field above (k + 1)ⁿ", all(x <= bound for x, bound in sizes)),
                at_least("random pointers: receptive fields below (k + 1)ⁿ", sum(x < bound for x, bound in sizes), 1),
            ),
            *judging(
                "A16",
                equals("random pointers: receptive fields that are those of the tree", alike, draws),
                at_most(
                    f"receptive field at t = {max_count} for pointers that would reach {(max_count + 1) ** 2} tokens",
                    short, max_count + 1,
                ),
            ),
        ),
        (tree_map(2, 3), Table("Measured receptive field", ("heads k", "layers n", "(k + 1)ⁿ", "measured"), rows)),
        correction="(k + 1)ⁿ is the largest size, not the size: pointers that meet give fewer tokens, and a causal "
        "mask allows t + 1.",
        corrected=("A15",),
    )  # fmt: skip


def tree_map(heads: int, layers: int) -> Heatmap:
    """The tokens that the last output depends on, from the output down to the input."""
    length = (heads + 1) ** layers
    levels = reached_positions(tree_pointers(heads, layers), length - 1)
    cells = [[float(i in level) for i in range(length)] for level in levels]
    names = [f"layer {layers - i}" if i < layers else "input" for i in range(layers + 1)]
    title = f"The tree of pointers: {heads} heads, {layers} layers"
    return Heatmap(title, cells, names, column_axis="position")
