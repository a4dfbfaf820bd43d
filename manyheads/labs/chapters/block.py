"""The block: what the feed-forward network, the residual connection and LayerNorm each do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.labs.chapters.attention_matrices import attention_context
from manyheads.labs.figures import Heatmap, Lines, Table, heatmap
from manyheads.labs.finding import Finding, at_least, at_most, equals, is_true, judging, near, reported
from manyheads.labs.fitting import small_model
from manyheads.labs.lab import lab
from manyheads.model.builder import build
from manyheads.model.cost import count_parameters
from manyheads.model.spec import read_model
from manyheads.parts.attention import Attention, HeadsSpec
from manyheads.parts.core import DotSpec
from manyheads.parts.feedforward import ACTIVATIONS, MlpSpec
from manyheads.parts.inputs import Inputs
from manyheads.parts.norm import LayerNormSpec, NoNormSpec, RMSNormSpec
from manyheads.parts.residual import NoResidualSpec, PreSpec

WIDTH = 8


def self_attention(attention: Attention, x_LD: Tensor, *, masks_itself: bool = False, detached: bool = False) -> Tensor:
    """Self-attention of one sequence. With `detached`, the queries are constants for the gradient."""
    x_BLD, length = x_LD[None], len(x_LD)
    context = attention_context(length)
    memory, q = attention.key_value(x_BLD, context), attention.query(x_BLD)
    bias = torch.zeros(1, 1, length, length, dtype=x_LD.dtype)
    if masks_itself:
        bias = bias.masked_fill(torch.eye(length, dtype=torch.bool), -math.inf)
    heads = attention.core(
        q.detach() if detached else q, memory.key, memory.value, mask=context.mask, positions=context.positions,
        bias=bias.expand(1, q.shape[1], -1, -1),
    )  # fmt: skip
    out: Tensor = attention.output(heads.transpose(1, 2).flatten(2))
    return out[0]


def response(function: Callable[[Tensor], Tensor], x_LD: Tensor) -> Tensor:
    """How much each output changes, one per row, if each input changes, one per column; exactly 0 if it does not."""
    columns = []
    for j in range(len(x_LD)):
        changed = x_LD.clone()
        changed[j] += 1
        columns.append((function(changed) - function(x_LD)).norm(dim=-1))
    return torch.stack(columns, dim=1)


def change_map(title: str, values: Tensor) -> Heatmap:
    names = [str(i) for i in range(len(values))]
    return heatmap(title, values, names, names, row_axis="output", column_axis="input")


@lab("block", rows=("F1",), counterexample={"attention": True}, try_next=("--attention", "--hidden 64 --tokens 12"))
@torch.no_grad()
def feed_forward(
    *,
    tokens: Annotated[int, "number of tokens"] = 6,
    hidden: Annotated[int, "size of the hidden layer"] = 32,
    attention: Annotated[bool, "change the input of attention instead"] = False,
) -> Finding:
    """The feed-forward network works on each position alone.

    It is two matrices with a function between them, W₂ f(W₁ x + b₁) + b₂, and each token x passes through it without
    the others. So a change of one token changes one output, and the rest stay equal to the last bit. Only attention
    moves information between positions: there, a change of one token changes every output.
    """
    x = torch.randn(tokens, WIDTH)
    mlp: Any = MlpSpec(hidden=hidden, activation="gelu").build(WIDTH)
    by_hand = ACTIVATIONS["gelu"](x @ mlp.up.weight.T + mlp.up.bias) @ mlp.down.weight.T + mlp.down.bias
    attend = partial(self_attention, HeadsSpec(heads=2).build(WIDTH, DotSpec()))
    moved, mixed = response(mlp, x), response(attend, x)
    others = (mixed if attention else moved).clone().fill_diagonal_(0.0)
    return Finding(
        (
            equals("shape of W₁", str(tuple(mlp.up.weight.shape)), str((hidden, WIDTH))),
            equals("shape of W₂", str(tuple(mlp.down.weight.shape)), str((WIDTH, hidden))),
            at_most("difference from the formula", float((mlp(x) - by_hand).abs().max()), 1e-5),
            equals("outputs of other positions that change", int((others > 0).sum()), 0),
            at_least("change of the output at the position itself", float(moved.diag().min()), 1e-6),
        ),
        (change_map("Change of the outputs: feed-forward network", moved), change_map("The same: attention", mixed)),
    )


@lab("block", rows=("F2", "F3"), errata=("E16",), counterexample={"masks_itself": False},
     row_counterexamples={"F2": {"residual": False}}, try_next=("--no-masks-itself", "--tokens 12"))  # fmt: skip
def residual_connection(
    *,
    tokens: Annotated[int, "number of tokens"] = 5,
    masks_itself: Annotated[bool, "a token may not attend to itself"] = True,
    residual: Annotated[bool, "whether the layer that should have a residual connection has one"] = True,
) -> Finding:
    """Without a residual connection, what attention does not pick up is lost.

    A sublayer f with a residual connection outputs x + f(x). Let no token attend to itself: the values in f(x) are then
    those of the others, and without the sum a token's own content is gone from its output. The gradient of output i
    with respect to input i shows what is left of it.
    """
    x, attention = torch.randn(tokens, WIDTH), HeadsSpec(heads=2).build(WIDTH, DotSpec())

    def output(x_LD: Tensor, spec: PreSpec | NoResidualSpec, *, detached: bool) -> Tensor:
        sublayer = partial(self_attention, attention, masks_itself=masks_itself, detached=detached)
        return spec.build(NoNormSpec(), WIDTH, 1)(x_LD, [sublayer])

    def gradients(spec: PreSpec | NoResidualSpec, *, detached: bool) -> Tensor:
        jacobian = torch.autograd.functional.jacobian(partial(output, spec=spec, detached=detached), x)
        return jacobian.norm(dim=(1, 3))

    without, with_it = NoResidualSpec(), PreSpec() if residual else NoResidualSpec()
    stated, lost, attached = (gradients(r, detached=d) for r, d in ((without, False), (without, True), (with_it, True)))
    with torch.no_grad():
        summed = output(x, with_it, detached=False) - output(x, without, detached=False)
    return Finding(
        (
            *judging("F2", at_most("difference between the output with a residual and x + f(x)",
                                   float((summed - x).abs().max()), 1e-6)),
            *judging(
                "F3",
                at_least("no residual: largest gradient of a token to itself (stated: 0)", float(stated.diag().max()),
                         1e-6),
                equals("no residual, query held constant: the same", float(lost.diag().max()), 0.0),
                at_least("residual, query held constant: smallest gradient", float(attached.diag().min()), 0.5),
            ),
        ),
        (
            change_map("Gradient of output i to input j, no residual", stated.detach()),
            change_map("No residual, query held constant", lost.detach()),
            change_map("Residual, query held constant", attached.detach()),
        ),
        correction="Without a residual connection the gradient of a token to itself is small, not 0: the token is not "
        "among the values, but it still forms the query, which chooses among the others. It is 0 if the query is held "
        "constant.",
        corrected=("F3",),
    )  # fmt: skip


@lab("block", rows=("F4",), counterexample={"normalize": False}, try_next=("--factor 10000", "--width 4"))
@torch.no_grad()
def layer_norm(
    *,
    factor: Annotated[float, "by which the vectors are multiplied"] = 100.0,
    width: Annotated[int, "size of a vector"] = 64,
    normalize: Annotated[bool, "use LayerNorm; otherwise nothing"] = True,
) -> Finding:
    """LayerNorm gives the same output for a vector and for a hundred times that vector.

    It subtracts the mean of a vector and divides by its standard deviation: (x − avg) / √(var + ε) · γ + β, with
    learned γ and β. A factor of x multiplies both the difference and the standard deviation, so it cancels, but for ε.
    RMSNorm, in LLaMA, leaves out the mean.
    """
    norm: Any = LayerNormSpec().build(width).double()
    rms, x = RMSNormSpec().build(width).double(), torch.randn(20, width, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    center, variance = x - x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    formula = center / (variance + LayerNormSpec().eps).sqrt() * norm.weight + norm.bias
    rms_formula = x / (x.square().mean(-1, keepdim=True) + RMSNormSpec().eps).sqrt()
    functions: dict[str, Callable[[Tensor], Tensor]] = {"LayerNorm": norm, "RMSNorm": rms, "nothing": lambda y: y}
    factors = [factor ** (i / 4) for i in range(5)]
    change = {n: [(s, float((f(s * x) - f(x)).abs().max())) for s in factors] for n, f in functions.items()}
    changed = change["LayerNorm" if normalize else "nothing"][-1][1]
    return Finding(
        (
            at_most("LayerNorm: difference from the formula", float((norm(x) - formula).abs().max()), 1e-6),
            at_most("RMSNorm: difference from the formula", float((rms(x) - rms_formula).abs().max()), 1e-6),
            at_most(f"change of the output if x is {factor:g} times as large", changed, 1e-3),
        ),
        (Lines("Change of the output", "factor of x", "largest change", change, log_x=True),),
    )


@lab("block", rows=("F5", "P4"), seconds=(0.5, 7.0), full={"examples": 2000}, counterexample={"factor": 1.0},
     try_next=("--factor 3", "--factor 10"))  # fmt: skip
def large_embeddings(
    *,
    factor: Annotated[float, "by which the embeddings are multiplied"] = 100.0,
    examples: Annotated[int, "number of inputs"] = 200,
    seed: int = 0,
) -> Finding:
    """Large embeddings saturate the softmax, and LayerNorm prevents it.

    With two classes the softmax is the sigmoid of the difference z of the logits: softmax(a, b)₁ = σ(a − b). Its
    derivative is σ(1 − σ), which is almost 0 for a large |z|. Without LayerNorm, embeddings that are 100 times as large
    give a |z| about 100 times as large, so the gradient of a probability is almost 0 for most inputs. LayerNorm divides
    by the size, so z stays as it was.
    """
    ids = torch.randint(0, 16, (examples, 6))
    factors = sorted({1.0, factor, *(factor ** (i / 6) for i in range(1, 6))})
    plain, normed = ({s: Saturation(ids, norm, s, seed) for s in factors} for norm in ("none", "layer"))

    def ratio(runs: dict[float, Saturation], s: float, name: str = "probability") -> float:
        return float((getattr(runs[s], name) / getattr(runs[1.0], name)).median())

    saturated = plain[factor]
    pairs = torch.randn(2, 1000, dtype=torch.float64) * 5
    sigmoid = torch.sigmoid(pairs[0] - pairs[1]) - torch.softmax(pairs, dim=0)[0]
    formula = saturated.slope * saturated.logit
    curves = {
        "no LayerNorm": [(s, max(ratio(plain, s), 1e-12)) for s in factors],
        "LayerNorm": [(s, ratio(normed, s)) for s in factors],
        "no LayerNorm, cross-entropy": [(s, ratio(plain, s, "cross_entropy")) for s in factors],
    }
    return Finding(
        (
            *judging(
                "P4",
                at_most("largest |σ(a − b) − softmax(a, b)₁|", float(sigmoid.abs().max()), 1e-12),
                at_most("largest difference from σ(1 − σ) · gradient of z, relative to the gradient of z",
                        float(((saturated.probability - formula).abs() / saturated.logit).max()), 1e-6),
            ),
            *judging(
                "F5",
                at_most(f"no LayerNorm: gradient with embeddings × {factor:g}, relative", ratio(plain, factor), 1e-3),
                near("LayerNorm: the same, as a power of ten", math.log10(ratio(normed, factor)), 0.0, 1.0),
                at_least("no LayerNorm, cross-entropy of wrong predictions: the same",
                         float((saturated.cross_entropy / plain[1.0].cross_entropy)[saturated.is_wrong].median()), 0.1),
            ),
            *judging("P4", at_most("no LayerNorm: median of σ(1 − σ)", float(saturated.slope.median()), 1e-3)),
        ),
        (Lines("Gradient at the embeddings, relative to × 1 (median)", "factor", "gradient", curves, {"1e-3": 1e-3},
               log_x=True, log_y=True),),
        correction="This is the gradient of a probability, for most inputs: the few with z near 0 have a larger "
        "one than before. A classifier is trained with cross-entropy, whose gradient p − y does not vanish where the "
        "prediction is wrong, however large the logits are.",
        corrected=("F5",),
    )  # fmt: skip


class Saturation:
    """Norms of gradients at the embeddings, one per input: of z, of the probability, and of the cross-entropy.

    The model is an encoder with two classes, whose embeddings are multiplied by a factor.
    """

    def __init__(self, ids: Tensor, norm: str, factor: float, seed: int) -> None:
        stack = {"layers": 2, "width": 32, "attention": {"heads": 2}, "feedforward": {"hidden": 64},
                 "norm": norm, "final_norm": norm}  # fmt: skip
        head = {"kind": "classes", "classes": 2, "pool": "mean"}
        model = build(read_model({"vocab": 16, "encoder": stack, "head": head, "init": "fan-in"}), seed=seed).double()
        nn.init.normal_(model.get_parameter("encoder.embed.table.weight"))
        embeddings: list[Tensor] = []

        def multiply(module: nn.Module, args: tuple[Inputs], output: Tensor) -> Tensor:
            embeddings.append(output)
            return factor * output

        model.get_submodule("encoder.embed").register_forward_hook(multiply)
        logits = model(ids)
        z, ones = logits[:, 1] - logits[:, 0], torch.ones(len(ids), dtype=torch.long)
        losses = (z, torch.softmax(logits, dim=-1)[:, 1], F.cross_entropy(logits, ones, reduction="none"))
        self.logit, self.probability, self.cross_entropy = (
            torch.autograd.grad(loss.sum(), embeddings, retain_graph=True)[0].norm(dim=(1, 2)) for loss in losses
        )  # inputs do not influence each other, so the gradient of the sum has that of each
        self.slope, self.is_wrong = (torch.sigmoid(z) * torch.sigmoid(-z)).detach(), z < 0  # the class is 1


@lab("block", rows=("F6",), seconds=(1.5, 2.0), counterexample={"layers": 1}, full={"width": 64},
     try_next=("--layers 6", "--layers 48"))  # fmt: skip
def deep_gradients(
    *,
    layers: Annotated[int, "number of layers"] = 24,
    width: Annotated[int, "width of the model"] = 32,
    seed: int = 0,
) -> Finding:
    """Residual connections carry gradients to the first layer of a deep stack, and LayerNorm keeps their size.

    Going back through a layer multiplies the gradient by the layer's derivative. Without residual connections, 24 such
    factors make it vanish. With x + f(x) the derivative is 1 plus something, so nothing vanishes; but x grows from
    layer to layer, and the gradients are huge. LayerNorm holds the size of what a layer reads, and the gradients of all
    layers stay within a few powers of ten.
    """
    settings = {
        "no residual": {"residual": "none", "norm": "none"},
        "residual": {"residual": "pre", "norm": "none"},
        "residual and LayerNorm": {"residual": "pre", "norm": "layer"},
        "LayerNorm, no residual": {"residual": "none", "norm": "layer"},
    }
    norms = {name: layer_gradients(layers, width, seed, **fields) for name, fields in settings.items()}
    none, residual, both, norm = (math.log10(by_layer[0] / by_layer[-1]) for by_layer in norms.values())
    growth = math.log10(max(norms["residual"]) / max(norms["residual and LayerNorm"]))
    curves = {name: list(enumerate(by_layer, start=1)) for name, by_layer in norms.items()}
    return Finding(
        (
            at_most("no residual: log₁₀ of the gradient of the first layer / last", none, -3.0),
            at_least("residual: the same", residual, none + 3.0),
            near("residual and LayerNorm: the same", both, 0.0, 2.0),
            at_least("log₁₀ of how much larger gradients are with a residual but no LayerNorm", growth, 2.0),
            reported("LayerNorm, no residual: log₁₀ of first / last", norm),
        ),
        (Lines("Gradient of the weights of each layer", "layer", "norm of the gradient", curves, log_y=True),),
        note="The weights have the initialization of Glorot and Bengio (xavier).",
    )


def layer_gradients(layers: int, width: int, seed: int, **fields: str) -> list[float]:
    """The norm of the gradient of each layer's weights for random targets."""
    stack = {"layers": layers, "width": width, "attention": {"heads": 2}, "feedforward": {"hidden": 2 * width},
             "position": "sinusoidal", **fields}  # fmt: skip
    spec = read_model({"vocab": 16, "encoder": stack, "head": "untied", "init": "xavier"})
    model = build(spec, seed=seed).double()
    rng = torch.Generator().manual_seed(seed)
    ids, targets = (torch.randint(0, 16, (8, 12), generator=rng) for _ in range(2))
    F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
    weights = [[p.grad for n, p in model.named_parameters() if f".layers.{i}." in n] for i in range(layers)]
    return [float(torch.cat([g.flatten() for g in of_layer if g is not None]).norm()) for of_layer in weights]


@lab("block", rows=("F7",), counterexample={"final_norm": True}, try_next=("--layers 12", "--final-norm"))
@torch.no_grad()
def stacking(
    *,
    layers: Annotated[int, "largest number of layers"] = 6,
    final_norm: Annotated[bool, "a norm after the last layer"] = False,
    seed: int = 0,
) -> Finding:
    """The number of layers is one number in the configuration, and 0 works.

    A layer reads vectors and outputs as many of the same size, so any number of them can be stacked. Each adds the same
    number of parameters. With none, the output is the token embeddings.
    """
    ids, counts = torch.randint(0, 16, (2, 7)), []
    models: list[Any] = [
        small_model(layers=n, final_norm="layer" if final_norm else "none", seed=seed) for n in range(layers + 1)
    ]
    for model in models:
        states, _ = model.last_hidden_state(Inputs(ids))
        counts.append((count_parameters(model), tuple(states.shape)))
    embeddings = models[0].decoder.embed.table.weight[ids]
    empty, _ = models[0].last_hidden_state(Inputs(ids))
    added = {after - before for (before, _), (after, _) in itertools.pairwise(counts)}
    return Finding(
        (
            is_true("with 0 layers the output is the embeddings", torch.equal(empty, embeddings)),
            equals("different shapes of the output", len({shape for _, shape in counts}), 1),
            equals("different numbers of parameters that a layer adds", len(added), 1),
        ),
        (Table("Layers", ("layers", "parameters", "output"), [(n, p, str(s)) for n, (p, s) in enumerate(counts)]),),
    )
