"""Position schemes: their parameters, what their tables share, and the part of the score that each gives."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from manyheads.errors import InputLengthError
from manyheads.labs.figures import Cell, Figure, Heatmap, Lines, Table, heatmap
from manyheads.labs.finding import Check, Finding, at_least, at_most, equals, is_true, judging
from manyheads.labs.fitting import small_model
from manyheads.labs.lab import lab
from manyheads.labs.plain import attention_weights
from manyheads.labs.schemes import (
    POSITIONAL,
    SCHEMES,
    count_positions,
    position_scores,
    position_table,
    scheme_names,
    spread_of_diagonals,
)
from manyheads.model.builder import Model
from manyheads.model.cost import count_parameters
from manyheads.parts.core import DotSpec
from manyheads.parts.position import ClippedSpec, PositionSpec, ShawSpec
from manyheads.parts.rope import RopeSpec
from manyheads.spec import SLOTS, Tree


def parameters_of(position: Tree, **fields: Any) -> int:
    """The parameters that a scheme adds to a model without positions."""
    with_scheme, without = (small_model(position=dict(tree), **fields) for tree in (position, {"kind": "none"}))
    return count_parameters(with_scheme) - count_parameters(without)


def fails_at(model: Model, length: int) -> str:
    """The message of the error for a sequence of this length; empty if there is none."""
    try:
        model(torch.zeros(1, length, dtype=torch.long))
    except InputLengthError as error:
        return str(error)
    return ""


@lab("position", rows=("D9",), counterexample={"scheme": "sinusoidal"},
     try_next=("--scheme sinusoidal", "--length 1024 --width 64"))  # fmt: skip
def learned_positions(
    *,
    scheme: Annotated[str, "position scheme that is judged"] = "learned",
    length: Annotated[int, "T, the number of positions"] = 40,
    width: Annotated[int, "d, the width of the model"] = 32,
) -> Finding:
    """Learned positions are a table of T rows and d columns, and end after T positions.

    Row t is added to the word at position t and trained like the word table. There is no row for position T, so a
    longer text is an error. The other schemes compute a position, or learn a value per offset, and most take any
    length.
    """
    trees = {name: {**tree, **({"length": length} if "length" in tree else {})} for name, tree in SCHEMES.items()}
    shape: dict[str, Any] = {"width": width, "attention": {"heads": 4}, "layers": 2}
    counts = {name: parameters_of(tree, **shape) for name, tree in trees.items()}
    model = small_model(position=trees[scheme_names(scheme)[0]], **shape)
    error = fails_at(model, length + 1)

    def longest(tree: Tree) -> str:
        spec: PositionSpec = SLOTS["position"].from_config(dict(tree))  # type: ignore[assignment]
        return str(spec.max_positions or "any")

    rows: list[list[Cell]] = [
        [name, counts[name], longest(tree)] for name, tree in trees.items() if name != "concatenated"
    ]
    return Finding(
        (
            equals("parameters", counts[scheme], length * width),
            is_true(f"{length} tokens run", not fails_at(model, length)),
            is_true(f"{length + 1} tokens are an error that names T = {length}", f"{length} positions" in error),
        ),
        (Table(f"Two layers of width {width} with 4 heads, T = {length}", ["scheme", "parameters", "length"], rows),),
        note=error,
    )


@lab("position", rows=("D10", "D11"), counterexample={"unclipped": "shaw"},
     row_counterexamples={"D11": {"clipped": "bucketed"}}, try_next=("--length 100 --heads 8", "--clip 2"))  # fmt: skip
def relative_bias(
    *,
    length: Annotated[int, "T, the number of positions"] = 12,
    clip: Annotated[int, "k, the largest offset with a value of its own"] = 4,
    heads: Annotated[int, "m, the number of heads"] = 4,
    unclipped: Annotated[str, "kind of the scheme with a value for every offset: relative or shaw"] = "relative",
    clipped: Annotated[str, "kind of the scheme with fewer values: clipped, or bucketed with 2k + 2"] = "clipped",
    seed: int = 0,
) -> Finding:
    """A bias per offset needs (2(T − 1) + 1)·m parameters in a layer, and (2k + 1)·m if offsets are clipped at k.

    The score of query i and key j gets a learned number π that depends on the offset j − i alone: π for (1, 4) is the
    same parameter as for (2, 5). T positions have the offsets −(T − 1) to T − 1, and each of the m heads has its own
    numbers. Clipped at k, all farther offsets share the numbers of ±k, so the table fits any length.
    """
    shape: dict[str, Any] = {"width": 8 * heads, "attention": {"heads": heads}, "layers": 1}
    trees = {
        "full": {"kind": unclipped, **({"clip": length - 1} if unclipped == "shaw" else {"length": length})},
        "clipped": {"kind": clipped, **({"buckets": 2 * clip + 2} if clipped == "bucketed" else {"clip": clip})},
    }
    models = {name: small_model(position=tree, seed=seed, **shape) for name, tree in trees.items()}
    counts = {name: parameters_of(tree, **shape) for name, tree in trees.items()}
    bias = {name: position_scores(model, length, seed=seed) for name, model in models.items()}
    long = position_scores(models["clipped"], 5 * length)
    ends = float((long[0, clip:] - long[0, clip]).abs().max())
    return Finding(
        (
            *judging(
                "D10",
                equals("parameters per layer", counts["full"], (2 * (length - 1) + 1) * heads),
                equals("π(1, 4) − π(2, 5)", float(bias["full"][1, 4] - bias["full"][2, 5]), 0.0),
                equals("largest difference on a diagonal", spread_of_diagonals(bias["full"]), 0.0),
                is_true(f"{length + 1} tokens are an error", fails_at(models["full"], length + 1) != ""),
            ),
            *judging(
                "D11",
                equals("parameters per layer, clipped", counts["clipped"], (2 * clip + 1) * heads),
                equals("largest difference on a diagonal, clipped", spread_of_diagonals(bias["clipped"]), 0.0),
                equals(f"largest difference beyond offset {clip}, at {5 * length} positions", ends, 0.0),
            ),
        ),
        (heatmap("Bias of a head", bias["full"]), heatmap(f"Bias of a head, clipped at {clip}", bias["clipped"])),
    )  # fmt: skip


@lab("position", errata=("E14",), counterexample={"kind": "clipped"}, try_next=("--kind clipped", "--clip 16"))
def vectors_of_shaw(
    *,
    kind: Annotated[str, "shaw, or clipped for scalars"] = "shaw",
    clip: Annotated[int, "k, the largest offset with a vector of its own"] = 8,
) -> Finding:
    """A bias per offset is simpler than the scheme of Shaw et al. 2018, which has vectors.

    The document calls them essentially the same. Shaw's scheme has a vector a per offset and adds q_i · a: the same
    offset counts more for one query than for another. The vectors have the size K of a head, and the heads share them,
    so there are (2k + 1)·K parameters in a layer. A scalar bias adds the same π to every query, and each head has its
    own.
    """
    heads, size = 4, 8
    build = {"shaw": ShawSpec(clip=clip), "clipped": ClippedSpec(clip=clip)}[kind].build(heads, size).double()
    positions, q = count_positions(20), torch.randn(2, heads, 20, size, dtype=torch.float64)
    with torch.no_grad():
        data = build.precompute(positions, torch.float64)
        first, second, same = (
            build.bias(x, data, size**-0.5) for x in (q[:1], q[1:], q[:1, :1].expand(1, heads, -1, -1))
        )
    assert first is not None
    assert second is not None
    assert same is not None
    changes = float((first - second).abs().max())
    shares = float((same - same[:, :1]).abs().max())
    return Finding(
        (
            at_least("difference of the bias for two queries", changes, 1e-3),
            equals("difference between heads with one query", shares, 0.0),
            equals("parameters", count_parameters(build), (2 * clip + 1) * size),
        ),
        tuple(heatmap(f"Bias for query vectors {name}", b[0, 0]) for name, b in (("A", first), ("B", second))),
        correction="Shaw et al. learn a vector per offset, shared by the heads, whose product with the query is added; "
        "a scalar per offset and head, which does not depend on the query, is another scheme.",
    )


@lab("position", rows=("D12",), errata=("E5",), counterexample={"own_scale": True},
     try_next=("--own-scale", "--position-size 32"))  # fmt: skip
def bias_or_concatenation(
    *,
    own_scale: Annotated[bool, "each attention divides by the root of its own size"] = False,
    position_size: Annotated[int, "coordinates of the position in queries and keys"] = 4,
) -> Finding:
    """A bias q_pos · k_pos does the same as concatenating the positions to queries and keys.

    [q, q_pos] · [k, k_pos] = q·k + q_pos · k_pos, so π = q_pos · k_pos as a bias gives the same scores. But attention
    divides q·k by the root of its size, and concatenation makes the vectors longer: √(d + d_pos) instead of √d. The
    two are equal only if both use the same scale, for the bias too.
    """
    size, scale = 8, (8 + position_size) ** -0.5
    q, k = torch.randn(2, 6, size, dtype=torch.float64)
    q_position, k_position = torch.randn(2, 6, position_size, dtype=torch.float64)
    bias = q_position @ k_position.T
    plain, scaled = DotSpec().build(1, size, size), DotSpec(scale=scale).build(1, size, size)
    wide = DotSpec().build(1, size + position_size, size + position_size)
    joined = attention_weights(torch.cat((q, q_position), -1), torch.cat((k, k_position), -1), wide)
    same = attention_weights(q, k, scaled, bias_LM=scale * bias)
    unequal = attention_weights(q, k, plain, bias_LM=size**-0.5 * bias)
    judged = unequal if own_scale else same
    return Finding(
        (
            at_most("largest difference of the weights", float((judged - joined).abs().max()), 1e-6),
            at_least("the same with a bias and 1/√d of its own", float((unequal - joined).abs().max()), 1e-3),
        ),
        (
            heatmap("Weights with concatenated positions", joined),
            heatmap("Weights with a bias, same scale", same),
            heatmap("Difference with its own scale", unequal - joined),
        ),
        correction="Concatenation changes the size of the vectors, and so the factor 1/√d. Bias and concatenation give "
        "the same weights only if both use the factor of the longer vectors.",
        corrected=("D12",),
    )


@lab("position", rows=("D14",), counterexample={"scheme": "sinusoidal"},
     try_next=("--fraction 0.25", "--scheme sinusoidal"))  # fmt: skip
def rotation(
    *,
    scheme: Annotated[str, "rope, or sinusoidal: positions added to the same q and k"] = "rope",
    fraction: Annotated[float, "share of the coordinates that are rotated"] = 1.0,
    length: Annotated[int, "positions"] = 60,
) -> Finding:
    """Rotating queries and keys by their position makes their score depend on the offset alone.

    RoPE turns each pair of coordinates of q at position m by the angle m ω_i, and of k at position n by n ω_i. The
    inner product of two vectors that are both turned depends on the difference of the angles, (m − n) ω_i, only.
    Turning keeps the length of a vector, and there is nothing to learn. Some models turn only a part of the
    coordinates.
    """
    q, k = torch.randn(2, 16, dtype=torch.float64)
    rope = RopeSpec(fraction=fraction).build(1, 16)

    def moved(x: Tensor) -> Tensor:
        x_LK = x.expand(length, -1)
        if scheme == "sinusoidal":
            embed = SLOTS["position"].from_config("sinusoidal").build_embed(16)  # type: ignore[attr-defined]
            return embed(x_LK[None], count_positions(length))[0]
        return rope.rotate(x_LK[None, None], rope.precompute(count_positions(length), torch.float64))[0, 0]

    rotated_q, rotated_k = moved(q), moved(k)
    scores, num_rotated = rotated_q @ rotated_k.T, int(16 * fraction)
    diagonal = max(float(d.max() - d.min()) for d in map(scores.diagonal, range(1 - length, length)))
    return Finding(
        (
            at_most("largest difference at one offset", diagonal, 1e-9),
            at_most("change of the length of q", float((rotated_q.norm(dim=-1) - q.norm()).abs().max()), 1e-9),
            equals("parameters", count_parameters(rope), 0),
            equals("change of the other coordinates", float((rotated_q - q)[:, num_rotated:].abs().sum()), 0.0),
        ),
        (
            heatmap("Score of one q at position m (row) and one k at position n (column)", scores, row_axis="m",
                    column_axis="n"),
            Lines("Score by offset", "n − m", "score",
                  {scheme: [(float(o), float(scores.diagonal(o)[0])) for o in range(1 - length, length)]}),
        ),
    )  # fmt: skip


def pictures(name: str, model: Model, length: int) -> list[Figure]:
    table, scores = position_table(model, length), position_scores(model, length)
    figures: list[Figure] = []
    if table is not None:
        figures.append(heatmap(f"{name}: position vectors", table, row_axis="position", column_axis="coordinate"))
    return [*figures, heatmap(f"{name}: position part of the score", scores)]


@lab("position", rows=("D17",), seconds=(0.5, 1.0), full={"length": 64}, counterexample={"offset_alone": "learned"},
     try_next=("--schemes learned", "--length 64 --schemes sinusoidal,rope"))  # fmt: skip
def pictures_of_schemes(
    *,
    schemes: Annotated[str, "schemes that are drawn"] = POSITIONAL,
    offset_alone: Annotated[
        str, "schemes whose position part depends on the offset alone"
    ] = "sinusoidal concatenated relative clipped bucketed shaw alibi rope",
    length: Annotated[int, "positions"] = 32,
    seed: int = 0,
) -> Finding:
    """All schemes but learned positions give a score that depends on the offset alone.

    Schemes that join a vector to the word are drawn as that table, a row per position, and as the products of all
    pairs of rows, the Gram matrix. Schemes that add a bias or rotate have no table: drawn is what they add to the
    score, for one query vector at every position. Stripes along the diagonals mean that only the offset counts.
    """
    models = {
        name: small_model("encoder", position=dict(SCHEMES[name]), width=64, seed=seed)
        for name in scheme_names(f"{schemes} {offset_alone} learned")
    }
    spreads = {name: spread_of_diagonals(position_scores(model, length)) for name, model in models.items()}
    checks: list[Check] = [
        at_most(f"{name}: spread along a diagonal", spreads[name], 1e-5) for name in scheme_names(offset_alone)
    ]
    checks.append(at_least("learned: spread along a diagonal", spreads["learned"], 0.1))
    drawn = [figure for name in scheme_names(schemes) for figure in pictures(name, models[name], length)]
    finite = all(torch.isfinite(torch.tensor(figure.values)).all() for figure in drawn if isinstance(figure, Heatmap))
    return Finding((*checks, is_true("every picture has finite values", finite)), tuple(drawn))
