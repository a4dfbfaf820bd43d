"""Positions: what attention cannot see without them, and what each scheme adds to the score."""

from __future__ import annotations

import math
from typing import Annotated, cast

import torch
from torch import Tensor

from manyheads.labs.figures import Cell, Lines, Table, heatmap
from manyheads.labs.finding import Finding, at_least, at_most, equals, is_true, judging, near, reported
from manyheads.labs.fitting import small_model
from manyheads.labs.lab import lab
from manyheads.labs.schemes import (
    SCHEMES,
    count_positions,
    scheme_names,
    sinusoids,
)
from manyheads.model.builder import Model, build
from manyheads.model.recording import record
from manyheads.model.spec import read_model
from manyheads.model.transformer import as_transformer
from manyheads.parts.position import Join, SinusoidalSpec

PHRASE = ("big", "red", "dog", "saw", "another", "big", "cat")
CIRCLE_GAP, CIRCLE_OFFSET, WIDE_GAP = 6.03e-5, 710, 1.47  # of sinusoids with 2 and with 64 coordinates, to 2000


def encoder(scheme: str, **fields: object) -> Model:
    """A small encoder, whose weights are large enough that its attention is not uniform."""
    spec = {"width": 32, "attention": {"heads": 2}, "position": dict(SCHEMES[scheme]), "layers": 2, "residual": "pre"}
    return build(read_model({"vocab": 64, "encoder": spec | fields, "head": "untied", "init": {"std": 0.3}})).double()


@lab("position", rows=("D1",), counterexample={"position": "sinusoidal"},
     try_next=("--position rope", "--position learned"))  # fmt: skip
def order_blindness(*, position: Annotated[str, "position scheme of the model"] = "none") -> Finding:
    """Without positions and without a mask, attention does not see the order of the words.

    Every query is compared with every key by q·k, and nothing in q or k tells where a word is. If the words are put in
    another order P, the outputs come in that order too, and are otherwise the same: f(Px) = P f(x). So in "big red dog
    saw another big cat" the word dog attends to the big that describes it as much as to the one that describes the
    cat.
    """
    model = encoder(scheme_names(position)[0])
    ids = torch.tensor([[sorted(set(PHRASE)).index(word) for word in PHRASE]])
    order = torch.randperm(len(PHRASE))
    with torch.no_grad(), record(model) as attentions:
        difference = float((model(ids[:, order]) - model(ids)[:, order]).abs().max())
    weights = attentions[2].weights()[0, 0]  # of the first layer, for the words in their own order
    both = float((weights[2, 0] - weights[2, 5]).abs())
    return Finding(
        (
            at_most("largest difference of f(Px) and P f(x)", difference, 1e-5),
            at_most("difference between the weights of dog on the two big", both, 1e-10),
            reported("weight of dog on each big", float(weights[2, 0])),
        ),
        (heatmap("Attention of a head in the first layer", weights, PHRASE, PHRASE),),
    )


@lab("position", rows=("D3",), counterexample={"step": math.pi / 6},
     try_next=("--step 0.5235987755982988", "--width 128"))  # fmt: skip
def sinusoid_repeats(
    *,
    step: Annotated[float, "radians of the fastest pair per position; π/6 is a clock with twelve hours"] = 1.0,
    width: Annotated[int, "coordinates of a position vector"] = 64,
) -> Finding:
    """Sinusoidal positions never repeat exactly.

    Each pair of coordinates is the hand of a clock: PE(t, 2i) = sin(t ω_i) and PE(t, 2i+1) = cos(t ω_i), with ω_i =
    10000^(−2i/d). The fastest hand turns by one radian per position. A full turn is 2π, which is irrational, so no
    whole number of positions is a whole number of turns. With a single hand some positions come close (355/113 ≈ π, so
    710 positions are almost 113 turns); with 64 coordinates, all positions to 2000 stay far apart.
    """
    circle, wide = sinusoids(2, 2000, step=step), sinusoids(width, 2000, step=step)
    distances = (circle[1:] - circle[0]).norm(dim=-1)
    offset, gap = int(distances.argmin()) + 1, float(distances.min())
    squares = wide @ wide.T
    apart = (squares.diagonal()[:, None] + squares.diagonal() - 2 * squares).clamp(min=0).sqrt()
    from_zero = apart[0, 1:].tolist()
    checks = [
        is_true("row 0 is 0, 1, 0, 1, …", wide[0].tolist() == [0, 1] * (width // 2)),
        at_least("smallest distance, one pair", gap, 1e-9),
        equals("offset of that distance", offset, CIRCLE_OFFSET),
        near("smallest distance, one pair, to three digits", gap, CIRCLE_GAP, 1e-7),
    ]
    smallest = float((apart + 9 * torch.eye(2000)).min())
    name = f"smallest distance of two positions below 2000, {width} coordinates"
    checks.append(near(name, smallest, WIDE_GAP, 0.005) if width == 64 else reported(name, smallest))
    curves = {
        "2 coordinates": [(t + 1, value) for t, value in enumerate(distances[:800].tolist())],
        f"{width} coordinates": [(t + 1, value) for t, value in enumerate(from_zero[:800])],
    }
    title = "Distance between position 0 and position t"
    return Finding(tuple(checks), (Lines(title, "t", "distance", curves),))


@lab("position", rows=("D4",), counterexample={"table": "learned"},
     try_next=("--table learned", "--width 16 --length 100"))  # fmt: skip
def gram_matrix(
    *,
    table: Annotated[str, "sinusoidal, or learned as it is initialized"] = "sinusoidal",
    width: Annotated[int, "coordinates of a position vector"] = 64,
    length: Annotated[int, "positions"] = 300,
) -> Finding:
    """The inner product of two sinusoidal positions depends on their offset alone, and is larger for near ones.

    For one pair, sin(i ω) sin(j ω) + cos(i ω) cos(j ω) = cos((i − j) ω), and p_i · p_j is the sum over the pairs. So
    the matrix of all products, the Gram matrix, has one value per diagonal: it is a Toeplitz matrix. At offset 0 all
    cosines are 1 and the sum is d/2, its largest value. The sum falls at first, and then waves at a lower level.
    """
    p = sinusoids(width, length) if table == "sinusoidal" else torch.randn(length, width, dtype=torch.float64)
    gram = p @ p.T
    diagonals = [gram.diagonal(offset) for offset in range(length)]
    deviation = max(float((diagonal - diagonal[0]).abs().max()) for diagonal in diagonals)
    close, far = gram[0, :5], gram[0, 5:]
    curve = [(offset, float(gram[0, offset])) for offset in range(min(length, 100))]
    return Finding(
        (
            at_most("largest difference on a diagonal", deviation, 1e-9),
            is_true("falls from offset 0 to 4", bool((close.diff() < 0).all())),
            is_true("every larger offset has a smaller product", bool(far.max() < close.min())),
            reported("product at offset 0", float(gram[0, 0])),
        ),
        (
            heatmap(
                "Gram matrix of the first 60 positions", gram[:60, :60], row_axis="position", column_axis="position"
            ),
            Lines("Inner product by offset", "offset", "p · p", {table: curve}),
        ),
    )


# ------------------------------------------------------------------------------------- added, concatenated, multiplied


def word_and_position(join: str, length: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """x as the model embeds it, with the same word at positions 1 and 3, and its parts: w of the words, p of positions.

    They come from the embedding itself: p is what it makes of no words (all zeros), and w is the rest.
    """
    spec = SinusoidalSpec(join=cast(Join, join))
    embed, token_width = spec.build_embed(width), spec.token_width(width)
    words = torch.randn(1, length, token_width, dtype=torch.float64)
    words[:, 3] = words[:, 1]
    words[:, 4] = words[:, 2]
    x, p = (embed(w, count_positions(length))[0] for w in (words, torch.zeros_like(words)))
    return x, x - p, p


def four_terms(join: str, width: int) -> tuple[Tensor, dict[str, Tensor]]:
    x, w, p = word_and_position(join, 7, width)
    terms = {
        "word · word": w @ w.T,
        "word · position": w @ p.T,
        "position · word": p @ w.T,
        "position · position": p @ p.T,
    }
    return x @ x.T, terms


@lab("position", rows=("D5", "D18"), counterexample={"join": "concat"}, try_next=("--join concat", "--width 256"))
def added_positions(
    *,
    join: Annotated[str, "how positions are joined to the words: add or concat"] = "add",
    width: Annotated[int, "width of the model"] = 32,
) -> Finding:
    """Adding the position to the word makes four terms of every score.

    With q = k = w + p, the score of two tokens is w_i·w_j + w_i·p_j + p_i·w_j + p_i·p_j: word with word, position with
    position, and two cross terms that compare a word with a position. In the example, tokens 1 and 2 are the same two
    words as tokens 3 and 4. Their offset is the same, so word·word and position·position are the same. The two scores
    differ all the same, through the cross terms.
    """
    score, terms = four_terms(join, width)
    total = sum(terms.values(), torch.zeros_like(score))
    cross = terms["word · position"] + terms["position · word"]
    pairs = {"1 and 2": (1, 2), "3 and 4": (3, 4)}
    rows: list[list[Cell]] = [
        [name, *(float(term[pair]) for term in terms.values()), float(score[pair])] for name, pair in pairs.items()
    ]
    same_offset = {name: abs(float(t[1, 2] - t[3, 4])) for name, t in {**terms, "score": score}.items()}
    return Finding(
        (
            *judging(
                "D5",
                at_most("score − sum of the four terms", float((score - total).abs().max()), 1e-6),
                at_least("mean size of the cross terms", float(cross.abs().mean()), 0.1),
            ),
            *judging(
                "D18",
                at_most("position · position, difference at the same offset", same_offset["position · position"], 1e-9),
                at_least("score, difference of the same words at the same offset", same_offset["score"], 1e-3),
            ),
        ),
        (
            Table("The same two words twice, at the same offset", ["tokens", *terms, "score"], rows),
            *(heatmap(name, term) for name, term in {**terms, "score": score}.items()),
        ),
    )  # fmt: skip


@lab("position", rows=("D6",), counterexample={"join": "add"}, try_next=("--join add", "--width 64"))
def concatenated_positions(
    *,
    join: Annotated[str, "how positions are joined to the words: concat or add"] = "concat",
    width: Annotated[int, "width of the model, half of it for the position"] = 32,
) -> Finding:
    """Concatenating the position to the word leaves no cross terms.

    With q = k = [w, p], the score is [w_i, p_i] · [w_j, p_j] = w_i·w_j + p_i·p_j. Words are compared with words and
    positions with positions. The price is width: with the same width, each part has fewer coordinates.
    """
    score, terms = four_terms(join, width)
    cross = float((terms["word · position"].abs() + terms["position · word"].abs()).max())
    rest = score - terms["word · word"] - terms["position · position"]
    return Finding(
        (
            equals("largest cross term", cross, 0.0),
            at_most("score − (word·word + position·position)", float(rest.abs().max()), 1e-10),
        ),
        tuple(heatmap(name, term) for name, term in {**terms, "score": score}.items()),
    )


INITS = (("normal", 0.02), ("xavier", None), ("fan-in", 1.0))  # σ of the table; None for 1/√d


def cross_term_ratio(width: int, init: str, scale: bool, seed: int) -> float:
    """mean |w·p| over mean p·p of neighbours, for the token table of a model as the package initializes it."""
    embed = {"kind": "tokens", "scale": scale}
    stack = {"layers": 0, "width": width, "embed": embed, "position": "none", "norm": "none"}
    model = build(read_model({"vocab": 400, "encoder": stack, "head": "none", "init": init}), seed=seed)
    with torch.no_grad():
        w, p = model(torch.arange(400)[None])[0].double(), sinusoids(width, 200)
    return float((w @ p.T).abs().mean() / (p[1:] * p[:-1]).sum(-1).mean())


def predicted_ratio(width: int, std: float | None, scale: bool) -> float:
    """E|N(0, σ²‖p‖²)| over p·p of neighbours, with ‖p‖² = d/2"""
    p = sinusoids(width, 2)
    sigma = (width**-0.5 if std is None else std) * (width**0.5 if scale else 1)
    return sigma * math.sqrt(width / 2) * math.sqrt(2 / math.pi) / float(p[0] @ p[1])


@lab("position", rows=("D8",), errata=("E11",), counterexample={"scale": True}, try_next=("--scale", "--widest 2048"))
def cross_terms_by_width(
    *,
    scale: Annotated[bool, "judge token tables that are multiplied by √d"] = False,
    widest: Annotated[int, "largest width, 16 times the smallest"] = 512,
    seed: int = 0,
) -> Finding:
    """At initialization, the cross terms of added positions are small beside the term of near positions.

    A word is a random vector at first. Random vectors in many dimensions are almost orthogonal to everything: w·p is
    of the size σ√(d/2), for a table N(0, σ²), while p·p of neighbours is about d/2. Their ratio is σ√(2/d), up to a
    constant: it falls as 1/√d if σ does not depend on d. Some models multiply the table by √d. Then the ratio no
    longer falls.
    """
    widths = (widest // 16, widest // 4, widest)
    measured = {
        (init, s): [cross_term_ratio(width, init, s, seed) for width in widths]
        for init, _ in INITS
        for s in (False, True)
    }
    expected = {
        (init, s): [predicted_ratio(width, std, s) for width in widths] for init, std in INITS for s in (False, True)
    }
    error = max(abs(m / e - 1) for key in measured for m, e in zip(measured[key], expected[key], strict=True))
    first, last = measured["normal", scale][0], measured["normal", scale][-1]
    scaled = measured["normal", True]
    curves = {
        f"{init}{', times √d' if s else ''}": list(zip(map(float, widths), values, strict=True))
        for (init, s), values in measured.items()
    }
    return Finding(
        (
            near("ratio at the smallest over the largest width, normal", first / last, 4.0, 1.0),
            at_most("ratio at the largest width, normal", last, 0.1),
            at_most("ratio at the largest width, xavier", measured["xavier", scale][-1], 0.1),
            near("smallest over largest width, normal times √d", scaled[0] / scaled[-1], 1.0, 0.2),
            at_least("smallest ratio, fan-in times √d", min(measured["fan-in", True]), 1.0),
            at_most("largest relative difference to σ√(2/d)·c", error, 0.1),
        ),
        (Lines("Cross terms over the term of neighbours", "width d", "ratio", curves, log_x=True, log_y=True),),
        correction="The cross terms shrink as 1/√d only if σ times the factor of the token table does not grow with d. "
        "Multiplied by √d, a table N(0, 0.02²) keeps its ratio at every width, a table N(0, 1) has cross terms that "
        "exceed the term of the positions, and only a table N(0, 1/d) still has a ratio that falls as 1/√d.",
        corrected=("D8",),
    )  # fmt: skip


@lab("position", rows=("D7",), counterexample={"join": "add"}, try_next=("--join add", "--width 64"))
def multiplied_positions(
    *,
    join: Annotated[str, "how positions are joined to the words: multiply or add"] = "multiply",
    width: Annotated[int, "width of the model"] = 32,
    seed: int = 0,
) -> Finding:
    """Positions can be multiplied with the words, coordinate by coordinate.

    With x = w ∘ p the score is the sum of w_c w'_c p_c p'_c over the coordinates c: the position decides how much each
    coordinate counts. There is no term of the positions alone. The model runs, learns and generates as with any other
    scheme. But position 0 is (0, 1, 0, 1, …), so the first word loses half of its coordinates.
    """
    spec = SinusoidalSpec(join=cast(Join, join))
    w, p = torch.randn(1, 7, width, dtype=torch.float64), sinusoids(width, 7)
    x = spec.build_embed(width)(w, count_positions(7))[0]
    product = torch.einsum("ic,jc,ic,jc->ij", w[0], w[0], p, p)
    table = {"kind": "sinusoidal", "join": join}
    model = as_transformer(small_model(position=table, width=width, seed=seed).double(), "a position scheme")
    ids = torch.randint(0, 16, (2, 9))
    logits = model(ids)
    logits.sum().backward()
    weights = model.last.embed.parameters()
    has_gradients = all(weight.grad is not None and bool(weight.grad.any()) for weight in weights)
    with torch.no_grad():
        _, state = model.step(ids[:, :5], model.start())
        step = float((model.step(ids[:, 5:], state)[0] - logits[:, 5:]).abs().max())
    lost = [float((row == 0).double().mean()) for row in x]
    return Finding(
        (
            at_most("score − Σ w w' p p'", float((x @ x.T - product).abs().max()), 1e-10),
            at_most("cached generation − full forward", step, 1e-10),
            is_true("the token table has a gradient", has_gradients),
            near("share of coordinates of the first word that are 0", lost[0], 0.5, 0.0),
        ),
        (
            heatmap(
                "A word in every coordinate, at 7 positions: w ∘ p", x, row_axis="position", column_axis="coordinate"
            ),
        ),
    )
