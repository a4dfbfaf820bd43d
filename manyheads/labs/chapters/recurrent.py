"""Recurrent networks: what they forget, what attention adds to them, and how attention looks when it is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.labs.figures import Bars, Heatmap, Lines, heatmap
from manyheads.labs.finding import Check, Finding, at_least, at_most, equals, is_true, reported
from manyheads.labs.fitting import fit
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.labs.plain import attention_weights
from manyheads.model.builder import Model, build
from manyheads.model.recording import record
from manyheads.model.spec import read_model
from manyheads.parts.core import AdditiveSpec, BilinearSpec, Core, CoreSpec, DotSpec, ProjectedSpec, register_score
from manyheads.spec import SLOTS

Pair = tuple[Tensor, Tensor, Tensor]  # source, decoder input, targets


def translator(symbols: int, seed: int, **fields: Any) -> Model:
    """A recurrent encoder–decoder for sequences of symbols; the token after the last symbol starts the output."""
    return build(read_model({"vocab": symbols + 1, "recurrent": fields, "head": "untied", "init": "xavier"}), seed=seed)


def copying_pairs(source_BM: Tensor, symbols: int, *, reverse: bool = False) -> Pair:
    targets = source_BM.flip(-1) if reverse else source_BM
    return source_BM, torch.cat((torch.full_like(targets[:, :1], symbols), targets[:, :-1]), dim=1), targets


def pair_loss(model: nn.Module, pair: Pair) -> Tensor:
    source, inputs, targets = pair
    return F.cross_entropy(model(inputs, source).flatten(0, 1), targets.flatten())


@torch.no_grad()
def exact_match(model: Model, pair: Pair) -> float:
    """The share of rows with every target predicted, which are those that greedy decoding would write without error."""
    source, inputs, targets = pair
    return float((model(inputs, source).argmax(-1) == targets).all(dim=1).float().mean())


@lab("recurrent", rows=("E1",), seconds=(4.0, 8.0), smallest={"steps": 30, "length": 2}, full={"steps": 200},
     counterexample={"steps": 1}, try_next=("--steps 300", "--length 8"))  # fmt: skip
def without_attention(
    *,
    length: Annotated[int, "number of tokens to copy"] = 4,
    steps: Annotated[int, "optimizer steps"] = 100,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A recurrent encoder and decoder learn to copy a short sequence without attention.

    The encoder reads the source, and its last state is all that the decoder gets (Sutskever et al. 2014). GRU and LSTM
    differ in their gates. Attention is one field of the same configuration: attention = true. The loss of a model that
    ignores the source is the entropy of the symbols, ln 6.
    """
    symbols, unigram = 6, math.log(6)
    settings = {"GRU": ("gru", False), "LSTM": ("lstm", False), "GRU with attention": ("gru", True)}
    losses = {}
    for name, (cell, attention) in settings.items():
        model = translator(symbols, seed, width=32, cell=cell, attention=attention, readout="maxout")
        losses[name] = fit(
            model, lambda _: copying_pairs(torch.randint(0, symbols, (16, length)), symbols), pair_loss,
            steps=steps, lr=1e-2, warmup_steps=5, progress=progress, name=name,
        )  # fmt: skip
    last = {name: sum(values[-10:]) / len(values[-10:]) for name, values in losses.items()}
    curves = {name: list(enumerate(values)) for name, values in losses.items()}
    return Finding(
        tuple(at_most(f"{name}: loss after training", value, 0.9 * unigram) for name, value in last.items()),
        (Lines("Training loss", "step", "cross-entropy", curves, {"ignores the source": unigram}),),
    )


@lab("recurrent", rows=("E4",), seconds=(10.0, 80.0),
     smallest={"shortest": 3, "longest": 8, "steps": 150, "symbols": 4}, full={"longest": 50, "steps": 900},
     counterexample={"attention": False}, try_next=("--longest 10", "--steps 600"))  # fmt: skip
def bottleneck(
    *,
    shortest: Annotated[int, "tokens of the shortest sequence"] = 5,
    longest: Annotated[int, "tokens of the longest sequence"] = 20,
    symbols: Annotated[int, "number of different tokens"] = 6,
    steps: Annotated[int, "optimizer steps"] = 260,
    attention: Annotated[bool, "give one of the two networks attention"] = True,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """One state vector is a bottleneck, and attention removes it.

    Both networks copy their input, and train on all lengths at once. Without attention the whole input must fit into
    the encoder's last state, and long inputs do not. With attention the decoder reads every encoder state when it needs
    it, c_i = Σ_j a_ij h_j, so the length does not matter. A copy counts only if every token is right.
    """
    lengths = [shortest, *(n for n in (10, 20) if shortest < n < longest), longest]

    def pairs(length: int, size: int = 32) -> Pair:
        return copying_pairs(torch.randint(0, symbols, (size, length)), symbols)

    def measured(attends: bool, name: str) -> list[float]:
        model = translator(
            symbols, seed, width=64, attention=attends, bidirectional=False, core="dot", readout="maxout",
            position={"kind": "sinusoidal", "join": "concat"},
        )  # fmt: skip
        fit(model, lambda step: pairs(lengths[step % len(lengths)]), pair_loss, steps=steps, lr=1e-2,
            progress=progress, name=name)  # fmt: skip
        return [exact_match(model, pairs(length, 200)) for length in lengths]

    plain = measured(False, "without attention")
    attentive = measured(True, "with attention") if attention else plain
    points = {"without attention": plain, "with attention": attentive}
    curves = {name: list(zip(map(float, lengths), values, strict=True)) for name, values in points.items()}
    checks = [
        at_least(f"with attention: exact match at {longest} tokens", attentive[-1], 0.95),
        at_least(f"without attention: exact match lost from {lengths[0]} to {longest}", plain[0] - plain[-1], 0.3),
        reported(f"without attention: exact match at {lengths[0]} tokens", plain[0]),
    ]
    if longest < 50:
        checks.append(Check("both at 50 tokens", "not measured", "≥ 0.95 and ≥ 0.3"))
    return Finding(
        tuple(checks),
        (Lines("Exact copies", "tokens", "share", curves, {"95 %": 0.95}),),
    )


@lab("recurrent", rows=("E2",), errata=("E13",), seconds=(6.0, 27.0), smallest={"length": 4, "steps": 80},
     full={"length": 8, "steps": 400}, counterexample={"steps": 1},
     try_next=("--readout state", "--length 10 --steps 400"))  # fmt: skip
def alignment(
    *,
    length: Annotated[int, "number of tokens"] = 6,
    steps: Annotated[int, "optimizer steps"] = 160,
    readout: Annotated[str, "what the head reads: maxout, tanh or state"] = "maxout",
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A trained translator attends to the word that it translates.

    The decoder computes a score of its state with each encoder state, makes a distribution of them by a softmax, and
    reads the mean c_i = Σ_j a_ij h_j (Bahdanau et al. 2015). Nobody tells it which word to look at. Trained to copy, it
    finds the diagonal; trained to reverse, the other diagonal.
    """
    checks, figures = list[Check](), list[Heatmap]()
    for reverse in (False, True):
        name = "reverse" if reverse else "copy"
        model = train_to_align(length, steps, readout, reverse=reverse, seed=seed, progress=progress)
        source, inputs, _ = copying_pairs(permutations(64, length), 12, reverse=reverse)
        with torch.no_grad(), record(model) as tape:
            model(inputs, source)
            weights, call = tape.weights("core", head=0), tape.calls("core")[-1]
            lowest = float(call.core.scores(call.query, call.key, call.positions).min())
        expected = torch.arange(length).flip(0) if reverse else torch.arange(length)
        checks += [
            at_least(f"{name}: share of steps aligned", float((weights.argmax(-1) == expected).float().mean()), 0.95),
            at_most(
                f"{name}: largest difference of a row's sum from 1", float((weights.sum(-1) - 1).abs().max()), 1e-6
            ),
        ]
        figures.append(Heatmap(f"Mean attention, {name}", weights.mean(0).tolist(), row_axis="output",
                               column_axis="source"))  # fmt: skip
    return Finding(
        (
            *checks,
            is_true("gradients of the context equal finite differences", context_gradients_are_exact()),
            at_most("lowest score (reverse)", lowest, -0.1),
        ),
        tuple(figures),
        correction="The weights are not proportional to the scores but to their exponentials: a score can be negative, "
        "and a weight cannot.",
        note="The encoder reads in one direction for copying, and in both for reversing.",
    )


def permutations(count: int, length: int) -> Tensor:
    """Rows of different tokens, so that each has one right alignment."""
    return torch.stack([torch.randperm(12)[:length] for _ in range(count)])


def train_to_align(length: int, steps: int, readout: str, *, reverse: bool, seed: int, progress: OnProgress) -> Model:
    # for copying, one direction: with both, the state of a neighbour holds the token too and may be attended to
    model = translator(
        12, seed, width=48, core={"kind": "additive", "size": 24}, readout=readout, bidirectional=reverse,
        position={"kind": "sinusoidal", "join": "concat"},
    )  # fmt: skip
    fit(model, lambda _: copying_pairs(permutations(48, length), 12, reverse=reverse), pair_loss, steps=steps, lr=1e-2,
        progress=progress, name="reverse" if reverse else "copy")  # fmt: skip
    return model


def context_gradients_are_exact() -> bool:
    core = AdditiveSpec(size=3).build(1, 4, 5).double()
    s, h = (torch.randn(n, d, dtype=torch.float64, requires_grad=True) for n, d in ((2, 4), (3, 5)))

    def context(s: Tensor, h: Tensor) -> Tensor:
        return attention_weights(s, core.key_transform(h[None, None])[0, 0], core) @ h

    return bool(torch.autograd.gradcheck(context, (s, h), raise_exception=False))


@lab("recurrent", rows=("E3",), counterexample={"noise": 0.5}, try_next=("--dim 1", "--noise 0.01"))
@torch.no_grad()
def score_functions(
    *,
    dim: Annotated[int, "size of the two projections"] = 3,
    noise: Annotated[float, "noise added to W"] = 0.0,
) -> Finding:
    """Projecting query and key and taking their product is a bilinear score.

    (W₁x)ᵀ(W₂y) = xᵀ(W₁ᵀW₂)y, so two projections are one matrix W = W₁ᵀW₂, whose rank is at most the size of the
    projections. A dot product is the case W = 1, and needs vectors of one size. The additive score of Bahdanau et al.
    is another family. A score of your own is one line: register_score(name, function).
    """
    q, k = torch.randn(4, 5), torch.randn(6, 5)
    projected: Any = ProjectedSpec(size=dim, scaled=False).build(1, 5, 5)
    bilinear: Any = BilinearSpec(scaled=False).build(1, 5, 5)
    product = projected.query_weight @ projected.key_transform.weight.transpose(1, 2)
    bilinear.weight.copy_(product + noise * torch.randn_like(product))
    keys = projected.key_transform(k[None, None])[0, 0]
    weights = {"two projections": attention_weights(q, keys, projected), "bilinear": attention_weights(q, k, bilinear)}
    others: dict[str, CoreSpec] = {"dot": DotSpec(scale=1.0), "scaled dot": DotSpec(), "additive": AdditiveSpec()}
    for name, spec in others.items():
        core = spec.build(1, 5, 5)
        weights[name] = attention_weights(q, core.key_transform(k[None, None])[0, 0], core)
    weights["−distance, registered in one line"] = attention_weights(q, k, own_core())
    difference = float((weights["two projections"] - weights["bilinear"]).abs().max())
    sums = max(float((matrix.sum(-1) - 1).abs().max()) for matrix in weights.values())
    return Finding(
        (
            at_most("largest difference between two projections and bilinear", difference, 1e-6),
            at_most("rank of W", int(torch.linalg.matrix_rank(product[0])), dim),
            at_most("largest difference of a row's sum from 1, all scores", sums, 1e-6),
        ),
        tuple(heatmap(name, matrix) for name, matrix in weights.items()),
    )


def own_core() -> Core:
    """A core of a function of queries and keys, which is registered only for this lab."""
    try:
        register_score("lab-distance", lambda q, k: -torch.cdist(q, k))
        return CoreSpec.from_config("lab-distance").build(1, 5, 5)
    finally:
        SLOTS["core"].kinds.pop("lab-distance", None)


@lab("recurrent", rows=("E5",), seconds=(0.5, 2.0), full={"length": 100}, counterexample={"attention": False},
     try_next=("--cell lstm", "--length 100"))  # fmt: skip
def gradient_reach(
    *,
    length: Annotated[int, "number of source tokens"] = 40,
    cell: Annotated[str, "gru or lstm"] = "gru",
    attention: Annotated[bool, "give one of the two networks attention"] = True,
    seed: int = 0,
) -> Finding:
    """A recurrent network leans on its recent input, and attention reaches far.

    The gradient of the output with respect to a source token says how much the output depends on it. Through a
    recurrent network it passes one step per token between them, and each step shrinks it: its logarithm falls along a
    line. Attention reads every encoder state directly, so the line is flatter.
    """
    curves = {
        name: source_gradients(length, cell, attends, seed)
        for name, attends in (("without attention", False), ("with attention", attention))
    }
    plain, attentive = (slope(points) for points in curves.values())
    return Finding(
        (
            at_most("without attention: slope of log₁₀ of the gradient per token", plain, -0.01),
            at_most("with attention: its slope, as a share of that", attentive / plain, 0.5),
        ),
        (Lines("Gradient of the first output to a source token", "distance from the end of the source", "norm", curves,
               log_y=True),),
        note="The networks are not trained: this is where training starts from.",
    )  # fmt: skip


def source_gradients(length: int, cell: str, attention: bool, seed: int) -> list[tuple[float, float]]:
    """The norm of the gradient of the first output to each source embedding, by its distance from the end."""
    model = translator(12, seed, width=32, cell=cell, attention=attention, bidirectional=False, readout="tanh").double()
    rng = torch.Generator().manual_seed(seed)
    source, embeddings = torch.randint(0, 12, (64, length), generator=rng), list[Tensor]()
    model.get_submodule("encoder.embed").register_forward_hook(lambda _, __, output: embeddings.append(output))
    out = model(torch.full((64, 1), 12), source)
    weights = torch.randn(out.shape, generator=rng, dtype=out.dtype)
    (gradient,) = torch.autograd.grad((weights * out).sum(), embeddings)
    norms = gradient.norm(dim=(0, 2)).flip(0).tolist()
    return [(float(distance), max(norm, 1e-300)) for distance, norm in enumerate(norms)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of log₁₀ y over x, by least squares."""
    x, y = (torch.tensor(values, dtype=torch.float64) for values in zip(*points, strict=True))
    x, y = x - x.mean(), y.log10()
    return float((x @ (y - y.mean())) / (x @ x))


@lab("recurrent", rows=("P2",), seconds=(8.0, 40.0), smallest={"distance": 10, "steps": 60},
     full={"distance": 40, "steps": 300}, counterexample={"cell": "gru"},
     try_next=("--distance 5", "--distance 40"))  # fmt: skip
def attentive_cell(
    *,
    distance: Annotated[int, "tokens between the one to remember and the question"] = 16,
    steps: Annotated[int, "optimizer steps"] = 100,
    cell: Annotated[str, "the cell that is compared with an LSTM"] = "lstmn",
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A recurrent cell that attends to all its earlier states remembers what came long ago.

    A recurrent state depends on its predecessor alone, so what came first must survive every step. In a long short-term
    memory-network (Cheng et al. 2016) a step computes a distribution over all earlier states, and continues from their
    mean: self-attention inside a recurrent network. The task: say the first token after a row of others.
    """
    accuracy = {}
    for kind in ("lstm", cell):
        fields = {"width": 24, "cell": kind, "source": False}
        model = build(read_model({"vocab": 17, "recurrent": fields, "head": "untied", "init": "xavier"}), seed=seed)
        fit(model, lambda _: remember(32, distance), last_loss, steps=steps, lr=1e-2, progress=progress, name=kind)
        accuracy[kind] = last_accuracy(model, remember(300, distance))
    ids, _ = remember(20, distance)
    later = ids.clone()
    later[:, -1] = 0
    with torch.no_grad(), record(model) as tape:
        out = model(ids)
        weights = tape.weights("cells.0", head=0) if tape.attentions else out.new_zeros(0)
    with torch.no_grad():
        leak = float((model(later)[:, :-1] - out[:, :-1]).abs().max())
    checks = [
        at_least("share of right answers, more than that of an LSTM", accuracy[cell] - accuracy["lstm"], 0.2),
        equals("largest change of an output by a later token", leak, 0.0),
    ]
    figures = list[Any]([Bars("Right answers", "share", accuracy, levels={"chance": 1 / 8})])
    if weights.numel():
        checks.append(
            at_most("largest difference of a row's sum from 1", float((weights.sum(-1) - 1).abs().max()), 1e-6)
        )
        figures.append(Heatmap("Attention to earlier states, mean of 20 texts", weights.mean(0).tolist(),
                               row_axis="step", column_axis="earlier state"))  # fmt: skip
    return Finding(tuple(checks), tuple(figures))


def remember(size: int, distance: int) -> tuple[Tensor, Tensor]:
    """A token, other tokens, and a question mark; the target is the first token."""
    first, others = torch.randint(0, 8, (size, 1)), torch.randint(8, 16, (size, distance))
    return torch.cat((first, others, torch.full((size, 1), 16)), dim=1), first[:, 0]


def last_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0])[:, -1], batch[1])


@torch.no_grad()
def last_accuracy(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> float:
    return float((model(batch[0])[:, -1].argmax(-1) == batch[1]).float().mean())
