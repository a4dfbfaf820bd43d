"""Several heads: how the width is divided among them, what they find, and what they save."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from manyheads.labs.chapters.attention_matrices import attention_context
from manyheads.labs.chapters.attention_pointers import receptive_field, tree_pointers
from manyheads.labs.figures import Bars, Lines, Table
from manyheads.labs.finding import Check, Finding, at_least, at_most, equals, is_true, judging, near, reported
from manyheads.labs.fitting import fastest, small_model
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.labs.plain import head_context
from manyheads.model.cost import count_parameters, size
from manyheads.parts.attention import Attention, AttentionSpec, HeadsSpec, NarrowSpec, WideSpec
from manyheads.parts.core import DotSpec
from manyheads.parts.norm import NoNormSpec
from manyheads.parts.residual import PreSpec


def run_attention(attention: Attention, x: Tensor) -> Tensor:
    """The output of self-attention for x, B×L×D."""
    context = attention_context(x.shape[1])
    out: Tensor = attention(x, attention.key_value(x, context), context)
    return out


def torch_difference(width: int, heads: int, *, interleaved: bool) -> float:
    """The largest difference from nn.MultiheadAttention with the same weights.

    If `interleaved`, head h takes every H-th row of a projection, instead of rows that follow one another.
    """
    theirs, ours = nn.MultiheadAttention(width, heads, batch_first=True), HeadsSpec(heads=heads).build(width, DotSpec())
    order = torch.arange(width)
    if interleaved:
        order = order.unflatten(0, (-1, heads)).T.flatten()
    with torch.no_grad():
        nn.init.normal_(theirs.in_proj_bias)
        weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
        projections: list[Any] = [ours.query, ours.key, ours.value]
        for projection, weight, bias in zip(projections, weights, biases, strict=True):
            projection.weight.copy_(weight[order])
            projection.bias.copy_(bias[order])
        ours.output.load_state_dict(theirs.out_proj.state_dict())
        x = torch.randn(2, 6, width)
        return float((run_attention(ours, x) - theirs(x, x, x, need_weights=False)[0]).abs().max())


def reads_own_chunk(width: int, heads: int) -> bool:
    """Whether a change of the last chunk of x changes the queries of the last head alone."""
    query = NarrowSpec(heads=heads).build(width, DotSpec()).query
    x = torch.randn(1, 3, width)
    changed = torch.cat((x[..., :-1], x[..., -1:] + 1), dim=-1)
    same = [torch.equal(a, b) for a, b in zip(query(x)[0], query(changed)[0], strict=True)]
    return same == [True] * (heads - 1) + [False]


@lab("heads", rows=("C1", "C2", "C3"), counterexample={"interleaved": True},
     row_counterexamples={"C2": {"biases": True}, "C3": {"biases": True}},
     try_next=("--heads 1", "--width 512 --heads 8"))  # fmt: skip
def three_ways_to_split_heads(
    *,
    width: Annotated[int, "d, the width of x"] = 24,
    heads: Annotated[int, "h, the number of heads"] = 4,
    interleaved: Annotated[bool, "whether a head takes every h-th column, instead of neighbouring ones"] = False,
    biases: Annotated[bool, "whether the matrices that are counted have biases"] = False,
) -> Finding:
    """Heads can divide the width, have all of it each, or read a chunk of x each: 4d², 4hd² or 3d²/h + d² parameters.

    The paper projects x to d columns and gives each head d/h of them, at the same cost for any number of heads, as does
    `nn.MultiheadAttention`. In the drawing of many lectures each head is as wide as the model, and the h·d columns
    are projected back to d: h times the cost. The cheapest splits x first, so that a head sees only its chunk.
    """
    kinds: dict[str, tuple[str, type[AttentionSpec], int]] = {
        "divided": ("C1", HeadsSpec, 4 * width**2),
        "wide": ("C2", WideSpec, 4 * heads * width**2),
        "chunks": ("C3", NarrowSpec, 3 * width**2 // heads + width**2),
    }
    checks, counts, x = list[Check](), dict[str, float](), torch.randn(1, 3, width)
    for name, (row, spec, expected) in kinds.items():
        attention = spec(heads=heads, bias=biases, output_bias=biases).build(width, DotSpec())
        counts[name] = count_parameters(attention)
        checks += judging(
            row,
            equals(f"{name}: parameters", count_parameters(attention), expected),
            equals(f"{name}: shape of the output", str(tuple(run_attention(attention, x).shape)), f"(1, 3, {width})"),
        )
    with_biases = count_parameters(HeadsSpec(heads=heads).build(width, DotSpec()))
    difference = torch_difference(width, heads, interleaved=interleaved)
    return Finding(
        (
            *checks,
            *judging(
                "C1",
                equals("divided, with biases: parameters", with_biases, 4 * width**2 + 4 * width),
                at_most("divided: largest difference from nn.MultiheadAttention", difference, 1e-5),
            ),
            *judging("C3", is_true("chunks: a head reads only its chunk", reads_own_chunk(width, heads))),
        ),
        (Bars(f"Parameters of {heads} heads at width {width}", "parameters", counts),),
    )


@lab("heads", rows=("C4",), seconds=(0.3, 1), smallest={"draws": 4000}, full={"draws": 100_000},
     counterexample={"rescaled": False}, try_next=("--rate 0.5", "--draws 100"))  # fmt: skip
def dropout_keeps_the_mean(
    *,
    rate: Annotated[float, "probability that a weight is dropped"] = 0.1,
    rescaled: Annotated[bool, "whether what is kept is divided by 1 − rate"] = True,
    draws: Annotated[int, "forward passes in training mode"] = 10_000,
) -> Finding:
    """Dropout changes every pass of training, and keeps the mean; in evaluation it does nothing.

    A weight is set to 0 with the probability p, and divided by 1 − p otherwise: its mean stays α. So a network that was
    trained with dropout can be used without it and has the same outputs on average. There is dropout of the attention
    weights, and of what a sublayer adds to the residual stream.
    """
    q, k, v = torch.randn(3, 8, 8)
    v = v.abs()  # so that a relative difference says something
    mask, positions = head_context(q, k, False)
    core = DotSpec(dropout=rate).build(1, 8, 8)
    factor = 1.0 if rescaled else 1 - rate

    def attend_often(count: int) -> Tensor:
        rows = (x.expand(count, 1, -1, -1) for x in (q, k, v))
        return core(*rows, mask=mask, positions=positions)[:, 0] * factor

    core.eval()
    steady, again = attend_often(1)[0] / factor, attend_often(1)[0] / factor
    core.train()
    outputs = attend_often(draws)
    residual = PreSpec(dropout=rate).build(NoNormSpec(), 8, 1).train()
    sums = residual(torch.ones(draws, 1, 8), [torch.ones_like]) - 1  # a sublayer that adds 1
    means = outputs.cumsum(0) / torch.arange(1, draws + 1)[:, None, None]
    errors = ((means - steady).abs() / steady).amax(dim=(1, 2))
    curve = [(n, float(errors[n - 1])) for n in sorted({int(1.3**i) for i in range(60)}) if n <= draws]
    return Finding(
        (
            is_true("two passes in evaluation are equal", torch.equal(steady, again)),
            at_least("smallest standard deviation of an output in training", outputs.std(0).min(), 1e-3),
            at_most("attention: largest relative difference of the mean", errors[-1], 0.02),
            near("residual: mean of what a sublayer of 1 adds", (sums * factor).mean(), 1, 0.02),
        ),
        (Lines("Relative difference between the mean output and that without dropout", "passes", "difference",
               {"largest of all outputs": curve}, {"2 %": 0.02}, log_x=True, log_y=True),),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- heads and layers


def layers_needed(heads: int, tokens: int) -> int:
    """n = ⌈log_{k+1} R⌉, in integers."""
    layers = 0
    while (heads + 1) ** layers < tokens:
        layers += 1
    return layers


@lab("heads", rows=("C7",), seconds=(3, 3), smallest={"tokens": 8}, counterexample={"missing": 1},
     try_next=("--tokens 100", "--tokens 20"))  # fmt: skip
def more_heads_fewer_layers(
    *,
    tokens: Annotated[int, "R, the tokens that an output should depend on"] = 64,
    missing: Annotated[int, "layers fewer than the formula says"] = 0,
    width: Annotated[int, "width of the layers whose cost is counted; a multiple of 42"] = 84,
    progress: OnProgress = no_progress,
) -> Finding:
    """With k heads that each point at one token, n = ⌈log_{k+1} R⌉ layers reach R tokens: more heads need fewer layers.

    The receptive field of n layers is (k + 1)ⁿ at most, so R tokens need the logarithm of R to the base k + 1. Heads of
    one layer run at the same time, and layers one after another. At equal width the parameters and products of a layer
    do not depend on the number of its heads, so the configuration with fewer layers is also cheaper.
    """
    rows, enough, too_few = [], 0, 0
    counts = (1, 2, 3, 7)
    for number, heads in enumerate(counts):
        layers = layers_needed(heads, tokens) - missing
        length = (heads + 1) ** (layers + missing)
        reached, reached_with_less = (
            len(receptive_field(tree_pointers(heads, count), length)) for count in (layers, layers - 1)
        )
        model = small_model(vocab=64, layers=layers, width=width, attention={"heads": heads})
        cost = size(model.spec, length=tokens)
        milliseconds = 1000 * fastest(partial(model.eval(), torch.zeros(1, tokens, dtype=torch.long)), 5)
        rows.append((heads, layers, reached, cost.parameters, cost.multiply_adds, round(milliseconds, 2)))
        enough += reached >= tokens
        too_few += reached_with_less < tokens
        progress("heads", number + 1, len(counts))
    columns = ("heads k", "layers n", "receptive field", "parameters", "multiply–adds", "milliseconds")
    return Finding(
        (
            equals(f"configurations with a receptive field of at least {tokens} tokens", enough, len(counts)),
            equals("configurations that need all their layers for it", too_few, len(counts)),
            equals("layers fall with the heads", str([row[1] for row in rows]), str(sorted((row[1] for row in rows),
                   reverse=True))),
            is_true("multiply–adds fall with the heads", is_falling([row[4] for row in rows])),
            reported("time of the first configuration, divided by that of the last", rows[0][5] / rows[-1][5]),
        ),
        (Table(f"Configurations that reach {tokens} tokens, layers of width {width}", columns, rows),),
        note="Times depend on the machine and decide nothing.",
    )  # fmt: skip


def is_falling(values: list[int]) -> bool:
    return values == sorted(values, reverse=True)
