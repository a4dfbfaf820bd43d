"""Attention of whole sequences as products of matrices: shapes, projections, and one matrix instead of two."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from manyheads.errors import InputError, InputShapeError
from manyheads.inspect.notebook import attention_table
from manyheads.labs.chapters.attention import FLOAT64, orthonormal
from manyheads.labs.figures import Heatmap, Lines, Table
from manyheads.labs.finding import Finding, at_least, at_most, equals, is_true, judging
from manyheads.labs.fitting import count_calls, small_model
from manyheads.labs.lab import OnProgress, check_choice, lab, no_progress
from manyheads.labs.plain import attend, head_context, plain_core
from manyheads.model.builder import build
from manyheads.model.cache import NoCache
from manyheads.model.spec import read_model
from manyheads.parts.attention import Attention, AttentionContext, HeadsSpec
from manyheads.parts.core import DotSpec, MergedQKSpec, inverse_root
from manyheads.parts.position import AttentionPosition


@lab("attention", rows=("A3", "P8"), counterexample={"transpose": "T"}, row_counterexamples={"P8": {"batched": False}},
     try_next=("--batch 5 --length 4 --dim 3", "--transpose T --batch 5"))  # fmt: skip
def batched_shapes(
    *,
    transpose: Annotated[str, "mT swaps the last two axes; T reverses all axes, as Tensor.T does"] = "mT",
    batch: Annotated[int, "b, the number of sentences"] = 4,
    length: Annotated[int, "l, the number of tokens"] = 4,
    dim: Annotated[int, "d, the size of a vector"] = 4,
    batched: Annotated[bool, "whether attention is given all tokens at once, instead of one after another"] = True,
) -> Finding:
    """A batch of scores is (b, l, d)·(b, d, l) → (b, l, l): the last two axes are swapped, and never the batch.

    All sentences and all their words are multiplied in one step, where a recurrent network takes l steps. `x.T` turns
    (b, l, d) into (d, l, b). Mostly torch refuses the product with an error. The trap is b = l = d: it is computed, and
    mixes the sentences of the batch. The softmax is over the keys, the last axis.
    """
    check_choice("transpose", transpose, ("mT", "T"))
    x = torch.randn(batch, length, dim)
    changed = torch.cat((x[:-1], x[-1:] + 1))  # the last sentence
    axes = (2, 1, 0) if transpose == "T" else (0, 2, 1)
    core = DotSpec().build(1, dim, dim)
    mask, positions = head_context(x[0], x[0], False)
    expected = core.weights(x[:, None], x[:, None], mask=mask, positions=positions)[:, 0]
    try:
        scores, other = (y @ y.permute(axes) for y in (x, changed))
    except RuntimeError:  # of torch, if the shapes do not fit
        scores = other = torch.full((1, 1, 1), math.nan)
    weights = torch.softmax(scores / dim**0.5, dim=-1)
    ids = torch.zeros(batch, length, dtype=torch.long)
    recurrent = build(read_model({"vocab": 16, "recurrent": {"width": 8, "source": False}}))
    model, parts = small_model(layers=1), (ids,) if batched else ids.split(1, dim=1)
    calls = sum(count_calls(model, "decoder.layers.0.attention.core", part) for part in parts)
    return Finding(
        (
            *judging(
                "A3",
                equals("shape of the scores", shape(scores), shape(expected)),
                is_true("the weights are those of the package", torch.allclose(weights, expected, atol=1e-5)),
                is_true("the package refuses keys with swapped axes, by their shapes", refuses_wrong_axes(length, dim)),
            ),
            *judging(
                "P8",
                is_true("changing the last sentence leaves the scores of the first as they are",
                        scores[0].equal(other[0])),
                equals("calls of attention for the batch", calls, 1),
                equals("calls of a recurrent cell for the batch", count_calls(recurrent, "cells.0", ids), length),
            ),
        ),
        (shape_table(batch, length, dim),),
    )  # fmt: skip


def shape(x: Tensor) -> str:
    return str(tuple(x.shape))


def refuses_wrong_axes(length: int, size: int) -> bool:
    """Whether a core names the expected and the given shape of keys d×l with l ≠ d."""
    x, keys = torch.randn(1, 1, length, size), torch.randn(1, 1, size + 1, length)
    mask, positions = head_context(x[0, 0], x[0, 0], False)
    try:
        DotSpec().build(1, size, size)(x, keys, x, mask=mask, positions=positions)
    except InputShapeError as error:
        return shape(x) in str(error) and shape(keys) in str(error)
    return False


def shape_table(b: int, l: int, d: int) -> Table:  # noqa: E741 (the names of the document)
    rows = [
        ("x", "(b, l, d)", f"({b}, {l}, {d})"),
        ("x.transpose(1, 2), or x.mT", "(b, d, l)", f"({b}, {d}, {l})"),
        ("x @ x.mT, the scores", "(b, l, l)", f"({b}, {l}, {l})"),
        ("x.T, the trap", "(d, l, b)", f"({d}, {l}, {b})"),
    ]
    return Table("Shapes", ("tensor", "axes", "here"), rows)


# ----------------------------------------------------------------------------------------- one sequence, or two

ALIGNMENT = [[0.91, 0.04, 0.05], [0.03, 0.10, 0.87], [0.09, 0.88, 0.03]]  # as the document prints it
TURKISH, ENGLISH = ("kediler", "fareleri", "kovalar"), ("cats", "chase", "mice")


@lab("attention", rows=("A12", "A13", "P12"), counterexample={"memory": "another"},
     row_counterexamples={"A12": {"asks": "English"}, "P12": {"asks": "English"}},
     try_next=("--length 1", "--length 100"))  # fmt: skip
def one_or_two_sequences(
    *,
    memory: Annotated[str, "itself or another: the sequence that attention reads"] = "itself",
    length: Annotated[int, "number of tokens"] = 5,
    asks: Annotated[str, "Turkish or English: the words that have a row in the page"] = "Turkish",
) -> Finding:
    """Attention is a matrix between two sequences; self-attention is the same operation with one sequence twice.

    The weights have a row for each token that asks and a column for each token that is read. In the document's matrix
    between a Turkish and an English sentence, the highest weight of a row is the translation of its word: "kovalar" is
    last and means "chase". Read by columns it is no attention: these do not sum to 1. Self-attention takes the queries,
    keys and values from one sequence: `attend(x, x)` gives the bits of a self-attention layer.
    """
    check_choice("memory", memory, ("itself", "another"))
    check_choice("asks", asks, ("Turkish", "English"))
    table = torch.tensor(ALIGNMENT)
    cells = page_cells(*((table, TURKISH, ENGLISH) if asks == "Turkish" else (table.T, ENGLISH, TURKISH)))
    highest = [i for row in cells for i, (classes, _) in enumerate(row) if "highest" in classes]
    numbers = [[float(text) for _, text in row] for row in cells]
    model: Any = small_model("encoder", layers=1)
    layer = model.encoder.layers[0]
    x, other = torch.randn(2, 1, length, 32)
    context = attention_context(length)
    read = layer.attention.key_value(x if memory == "itself" else other, context)
    same = torch.equal(layer.self_attention(x, context, NoCache()), layer.attention(x, read, context))
    return Finding(
        (
            *judging(
                "A12 P12",
                is_true("the cells of the page are the numbers of the document", numbers == ALIGNMENT),
                equals("highest weight of each row of the page", str(highest), "[0, 2, 1]"),
            ),
            *judging("A13", is_true("attend(x, x) has the bits of the self-attention layer", same)),
        ),
        (Heatmap("Attention between two sentences", ALIGNMENT, TURKISH, ENGLISH),),
    )


def page_cells(weights: Tensor, queries: Sequence[str], keys: Sequence[str]) -> list[list[tuple[str, str]]]:
    """The classes and the text of every cell of a page, row by row; none if the page refuses the matrix."""
    try:
        page = attention_table(weights, queries, keys)
    except InputError:
        return []
    rows = [re.findall(r'<td class="([^"]*)"[^>]*>([^<]*)</td>', row) for row in page.split("<tr>")]
    return [row for row in rows if row]


def attention_context(length: int, *, causal: bool = False) -> AttentionContext:
    """The mask and the positions of self-attention without a position scheme."""
    row = torch.zeros(length, 1)
    mask, positions = head_context(row, row, causal)
    return AttentionContext(AttentionPosition(), None, mask, positions)


# ------------------------------------------------------------------------------------------- query, key and value

LETTERS = ("u_a", "u_b", "u_c", "u_d")


def plain_outputs(u: Tensor, added: Tensor | None = None) -> Tensor:
    """Self-attention with q = k = v = x for x = (u_d + u_b, u_a, u_c + u_b), with a vector added to the second."""
    x = lecture_vectors(u)
    if added is not None:
        x[1] += added
    return attend(x, x, x)


def lecture_vectors(u: Tensor) -> Tensor:
    a, b, c, d = u
    return torch.stack((d + b, a, c + b))


def descend(x: Tensor, targets: Tensor, starts: int, steps: int, progress: OnProgress) -> Tensor:
    """Learns Q and V from random starts, with K = I; the squared error of c₁ and c₂ for every step and start."""
    query, value = (nn.Parameter(0.03 * torch.randn(starts, 1, 4, 4, dtype=x.dtype)) for _ in range(2))
    optimizer, losses, core = torch.optim.Adam([query, value], lr=0.005), [], plain_core(x)
    mask, positions = head_context(x, x, False)
    keys = x.expand(starts, 1, -1, -1)
    for step in range(steps):
        outputs = core(keys @ query.mT, keys, keys @ value.mT, mask=mask, positions=positions)
        loss = (outputs[:, 0, :2] - targets).square().mean(dim=(1, 2))
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        losses.append(loss.detach())
        progress("gradient descent", step + 1, steps)
    return torch.stack(losses)


@lab("attention", rows=("A10", "A11", "P12"), seconds=(2, 14.0), smallest={"steps": 800},
     full={"steps": 5000, "starts": 200}, counterexample={"projected": False},
     row_counterexamples={"A10": {"beta": 1.0, "steps": 1}}, try_next=("--beta 2", "--steps 100"))  # fmt: skip
def query_key_value(
    *,
    projected: Annotated[bool, "whether queries and values are projections of x"] = True,
    beta: Annotated[float, "β, the length of the vectors"] = 10.0,
    steps: Annotated[int, "steps of gradient descent"] = 1500,
    starts: Annotated[int, "random starts of gradient descent"] = 20,
    progress: OnProgress = no_progress,
) -> Finding:
    """With queries, keys and values of its own, a token can find another by one part and copy another part of it.

    u_a … u_d are orthogonal, of length β; x₁ = u_d + u_b, x₂ = u_a, x₃ = u_c + u_b. Without projections every token is
    most similar to itself: c₂ = x₂, also if u_d or u_c is added to x₂, and never u_b. With projections, the query Q x₂
    can look for u_d, and V keeps only u_b and −u_c of what is found. So c₂ = u_b and c₁ = u_b − u_c for K = I,
    Q = (u_d u_aᵀ + u_c u_dᵀ) / β² and V = (u_b u_bᵀ − u_c u_cᵀ) / β². Gradient descent finds such matrices from
    many random starts; from the others, both queries settle on one token, and the error stays at β²/16.
    """
    u = beta * orthonormal(4, 4)
    (a, b, c, d), x = u, lecture_vectors(u)
    query = (torch.outer(d, a) + torch.outer(c, d)) / beta**2
    value = (torch.outer(b, b) - torch.outer(c, c)) / beta**2
    built = attend(x @ query.T, x, x @ value.T) if projected else attend(x, x, x)
    targets = torch.stack((b - c, b))
    plain_loss = (attend(x, x, x)[:2] - targets).square().mean().expand(1, 1)
    losses = (descend(x, targets, starts, steps, progress) if projected else plain_loss) / beta**2
    changed = [plain_outputs(u, added)[1] for added in (d, c)]
    stays = max(float((plain_outputs(u)[1] - a).norm()),
                *(float((out - a - added).norm()) for out, added in zip(changed, (d, c), strict=True)))  # fmt: skip
    curves = {f"start {i + 1}": list(enumerate(losses[:, i].tolist(), 1))[::20] for i in range(min(5, losses.shape[1]))}
    return Finding(
        (
            *judging(
                "A10 P12",
                at_most("without projections: largest distance of c₂ from x₂", stays, 1e-6),
                at_least("smallest distance of c₂ from u_b, divided by β",
                         min((out - b).norm() for out in changed) / beta, 1.5),
            ),
            *judging(
                "A11 P12",
                at_most("distance of c₂ from u_b", (built[1] - b).norm(), 1e-6),
                at_most("distance of c₁ from u_b − u_c", (built[0] - b + c).norm(), 1e-6),
                at_most("gradient descent: squared error divided by β², best start", losses[-1].min(), 1e-4),
                at_least("share of starts below 0.0001", (losses[-1] < 1e-4).double().mean(), 0.2),
            ),
        ),
        (
            parts_map("Without projections: how much of each vector an output has", plain_outputs(u), u),
            parts_map("With Q, K and V", built, u),
            Lines("Gradient descent from random starts", "step", "squared error divided by β²", curves, log_y=True),
        ),
    )  # fmt: skip


def parts_map(title: str, outputs: Tensor, u: Tensor) -> Heatmap:
    """The coordinates of the outputs along u_a … u_d."""
    parts = outputs @ u.T / u.square().sum(-1)
    return Heatmap(title, parts.tolist(), ("c₁", "c₂", "c₃"), LETTERS)


# -------------------------------------------------------------------------------------------- parameters of the scores


def merged_weight(query: Tensor, key: Tensor, heads: int, *, scaled: bool = True) -> Tensor:
    """W̃[h] = W_Q[h]ᵀ W_K[h] / √I per head, as the weight of a merged query projection: (H·J)×J from two of (H·I)×J."""
    q_HIJ, k_HIJ = (weight.unflatten(0, (heads, -1)) for weight in (query, key))
    return (k_HIJ.mT @ q_HIJ * (inverse_root(q_HIJ.shape[1]) if scaled else 1.0)).flatten(0, 1)


def split_weight(merged: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    """W_Q and W_K of rank `size` with W_Qᵀ W_K / √I nearest to W̃, by singular value decomposition."""
    left, values, right = torch.linalg.svd(merged.unflatten(0, (heads, -1)).mT)
    root = (values[:, :size] / inverse_root(size)).sqrt()[:, :, None]
    return (root * left.mT[:, :size]).flatten(0, 1), (root * right[:, :size]).flatten(0, 1)


def scoring_parameters(attention: Attention) -> int:
    return sum(p.numel() for part in (attention.query, attention.key, attention.core) for p in part.parameters())


def merge_error(dtype: torch.dtype, width: int, heads: int, size: int, *, causal: bool, scaled: bool) -> float:
    """The largest difference between the weights of two projections and of the one merged from them."""
    separate, merged = merged_pair(width, heads, size, dtype=dtype, scaled=scaled)
    x, context = torch.randn(2, 6, width, dtype=dtype), attention_context(6, causal=causal)
    one, other = (
        a.core.weights(a.query(x), a.key(x), mask=context.mask, positions=context.positions) for a in (separate, merged)
    )
    return float((one - other).abs().max().detach())


def merged_pair(
    width: int, heads: int, size: int, *, dtype: torch.dtype = torch.float64, scaled: bool = True
) -> tuple[Any, Any]:
    """Attention with two projections to heads of a size, and with the one merged from them."""
    spec = HeadsSpec(heads=heads, size=size, bias=False)
    pair: list[Any] = [spec.build(width, core) for core in (DotSpec(), MergedQKSpec())]
    separate, merged = (attention.to(dtype) for attention in pair)
    with torch.no_grad():
        merged.query.weight.copy_(merged_weight(separate.query.weight, separate.key.weight, heads, scaled=scaled))
    return separate, merged


def count_pair(width: int, heads: int, size: int) -> tuple[int, int]:
    """The parameters of the scores, counted from the modules: of two projections, and of the merged one."""
    separate, merged = map(scoring_parameters, merged_pair(width, heads, size))
    return separate, merged


def train_merged(merged: Attention, steps: int) -> None:
    """Fits random targets, so that the matrices leave the rank they began with."""
    width = merged.output.out_features
    x, target = torch.randn(2, 8, 6, width, dtype=torch.float64)
    optimizer, context = torch.optim.Adam(merged.query.parameters(), lr=0.01), attention_context(6)
    for _ in range(steps):
        optimizer.zero_grad()
        (merged(x, merged.key_value(x, context), context) - target).square().sum().backward()
        optimizer.step()


@lab("attention", rows=("A17", "A18", "A19"), errata=("E2",), counterexample={"scaled": False},
     row_counterexamples={"A18": {"head_size": 5}, "A19": {"steps": 0}},
     try_next=("--heads 2", "--width 64 --heads 8"))  # fmt: skip
def one_matrix_for_query_and_key(
    *,
    width: Annotated[int, "J, the width of x"] = 24,
    heads: Annotated[int, "K, the number of heads"] = 4,
    head_size: Annotated[int, "I, the size of a head; 0 for J / K"] = 0,
    scaled: Annotated[bool, "whether the merged matrix includes 1/√I"] = True,
    steps: Annotated[int, "training steps of the merged matrices"] = 30,
) -> Finding:
    """One J × J matrix per head can replace the matrices of query and key; it has J² parameters instead of 2IJ.

    (W_Q x)·(W_K y) / √I = xᵀ W̃ y with W̃ = W_Qᵀ W_K / √I, so the scores are the same. W̃ has rank I at most, and its
    singular value decomposition gives two matrices back. But W̃ has J² parameters, against 2IJ of the two, which is the
    same for I = J/2 and K/2 times as many for I = J/K. Trained, it can reach the rank J, which two matrices cannot.
    """
    size = head_size or width // heads
    cases = {("float32", 1e-6): torch.float32, ("float64", 1e-12): torch.float64}
    checks = [
        at_most(f"largest difference of a weight, {name}, {'causal' if causal else 'no mask'}",
                merge_error(dtype, width, heads, size, causal=causal, scaled=scaled), bound)
        for (name, bound), dtype in cases.items() for causal in (False, True)
    ]  # fmt: skip
    separate, merged = merged_pair(width, heads, size)
    printed_error = error_as_printed(separate)
    weight = merged.query.weight.detach().clone()
    query, key = split_weight(weight, heads, size)
    back = (merged_weight(query, key, heads) - weight).abs().max()
    before = torch.linalg.svdvals(weight.unflatten(0, (heads, -1)))
    train_merged(merged, steps)
    after = torch.linalg.svdvals(merged.query.weight.detach().unflatten(0, (heads, -1)))
    ranks = [int((values / values[:, :1] > 1e-9).sum(-1).max()) for values in (before, after)]
    two, one = scoring_parameters(separate), scoring_parameters(merged)
    half = count_pair(width, heads, width // 2)
    return Finding(
        (
            *judging(
                "A17",
                *checks,
                at_least("as printed, with t₁ twice: largest difference of a weight", printed_error, 0.1),
            ),
            *judging(
                "A18",
                equals("parameters of the two matrices, 2KIJ", two, 2 * heads * size * width),
                equals("parameters of one matrix per head, KJ²", one, heads * width**2),
                equals("the second divided by the first; K/2 for I = J/K", one / two, heads / 2),
                equals(f"the same for I = J/2 = {width // 2}", half[1] / half[0], 1.0),
            ),
            *judging(
                "A19",
                at_most("rank of the merged matrix", ranks[0], size),
                at_most("largest difference after splitting it by its singular values", back, FLOAT64),
                equals("rank after training", ranks[1], width),
            ),
        ),
        (singular_values(before, after), count_table(width)),
        correction="The derivation in the document writes the key as L(t₁, J₂); it must read L(t₂, J₂).",
    )


def singular_values(before: Tensor, after: Tensor) -> Lines:
    curves = {name: list(enumerate(values[0].tolist(), 1)) for name, values in (("merged", before), ("trained", after))}
    return Lines("Singular values of a merged matrix", "number", "singular value", curves, log_y=True)


@torch.no_grad()
def error_as_printed(separate: Any, length: int = 6) -> float:
    """Erratum E2: how much the weights of the printed derivation differ from those of attention.

    softmax over t₂ of 1/√I Σ L(t₁, j₁) W_Q[i, j₁] W_K[i, j₂] L(t₁, j₂).
    """
    x, context = torch.randn(1, length, separate.output.out_features, dtype=torch.float64), attention_context(length)
    q_HLI, k_HLI = separate.query(x)[0], separate.key(x)[0]
    right = separate.core.weights(q_HLI[None], k_HLI[None], mask=context.mask, positions=context.positions)[0]
    scores_HL1 = torch.einsum("hti,hti->ht", q_HLI, k_HLI)[..., None] * inverse_root(q_HLI.shape[-1])
    printed = torch.softmax(scores_HL1.expand_as(right), dim=-1)  # no number of it depends on t₂
    return float((printed - right).abs().max())


def count_table(width: int) -> Table:
    rows = []
    for heads in (h for h in (1, 2, 4, 8) if width % h == 0):
        size = width // heads
        two, one = count_pair(width, heads, size)
        rows.append((heads, size, two, one, one / two))
    return Table(
        f"Parameters of the scores at J = {width}", ("K", "I", "separate, 2KIJ", "merged, KJ²", "ratio, K/2"), rows
    )
