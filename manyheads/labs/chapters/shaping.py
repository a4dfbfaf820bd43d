"""Loss shaping: terms that make attention focused or near, their price, and heads as relations between words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any

import torch
from torch import Tensor

from manyheads.data.attention_targets import targets_from_arcs
from manyheads.data.tokenizer import TokenizerSpec
from manyheads.labs.figures import Lines, Table, heatmap
from manyheads.labs.finding import Finding, at_least, at_most, equals, near
from manyheads.labs.fitting import small_model
from manyheads.labs.lab import lab
from manyheads.labs.plain import attention_weights, head_context, plain_core
from manyheads.model.builder import Model
from manyheads.model.recording import RecordedAttention, record
from manyheads.parts.inputs import Inputs
from manyheads.parts.mask import MaskSpec
from manyheads.tasks.auxiliary import (
    AttentionLayer,
    AuxiliaryLossSpec,
    RecordedQueries,
    attention_records,
    loss_with_auxiliary,
    total_loss,
)
from manyheads.tasks.batch import Batch
from manyheads.tasks.language import CausalSpec


def small_decoder(seed: int, *, sharpness: float = 1.0, layers: int = 2, heads: int = 2) -> Model:
    """A decoder in float64 whose queries are multiplied by a number: at 0 attention is uniform, far above 1 one-hot."""
    model = small_model(seed=seed, layers=layers, width=16, attention={"kind": "heads", "heads": heads},
                        position="sinusoidal", init={"kind": "normal", "std": 0.3}).double()  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attention.query." in name:
                parameter.mul_(sharpness)
    return model


def logits_and_term(model: Model, ids: Tensor, term: AuxiliaryLossSpec) -> tuple[Tensor, Tensor]:
    """The logits of a model, and a term of the same forward pass."""
    batch = Batch(Inputs(ids), ids)
    with record(model, activations=False) as attentions:
        logits = model(ids)
    loss = term.loss(model, attention_records(model.spec, attentions, batch), batch)
    return logits, loss.sum / loss.count


def term_of(model: Model, ids: Tensor, **fields: Any) -> Tensor:
    return logits_and_term(model, ids, AuxiliaryLossSpec.from_config(fields))[1]


@torch.no_grad()
def literal_weights(model: Model, ids: Tensor) -> Tensor:
    """α[ℓ, b, k, t₁, t₂], computed whole."""
    with record(model) as attentions:
        model(ids)
    return torch.stack([attention.weights() for attention in attentions])


# ------------------------------------------------------------------------------------------------ a head as a relation


@lab("shaping", rows=("J1", "P12"), counterexample={"strength": 1.0}, try_next=("--strength 3", "--relation nsubj"))
def dependency_head(
    *,
    relation: Annotated[str, "relation whose head is shown: dobj, nsubj, nmod or det"] = "dobj",
    strength: Annotated[float, "length of the queries"] = 20.0,
) -> Finding:
    """A head can be a relation of grammar: from "prefer" it attends to its object, "flight".

    In the parse of "I prefer the morning flight" each word has one head, so the matrix of all arcs has one 1 in every
    row. The head of the relation dobj has α(dobj, prefer, w) = 1 for w = flight, and 0 for the other words. If the keys
    of the words are orthonormal, and the query of a word is long and points to the key of the linked word, attention
    has these weights.
    """
    words, heads = ["I", "prefer", "the", "morning", "flight"], [1, -1, 4, 4, 1]
    text, relations = " ".join(words), ["nsubj", "root", "det", "nmod", "dobj"]
    tokenizer = TokenizerSpec.from_config("words").make([text])

    def target(**options: Any) -> Tensor:
        (links,) = targets_from_arcs([text], [heads], [relations], tokenizer, **options)
        matrix = torch.zeros(5, 5, dtype=torch.float64)
        matrix[tuple(torch.from_numpy(links).T)] = 1.0
        return matrix

    parse, children = target(toward="head", relation=None), target(toward="dependents", relation=relation)
    keys = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    weights = attention_weights(strength * children @ keys, keys)
    rows = children.sum(1) > 0
    prefer = int(target(toward="dependents", relation="dobj")[words.index("prefer")].argmax())
    return Finding(
        (
            equals("words in each row of the parse", f"{parse.sum(1).min():g} to {parse.sum(1).max():g}", "1 to 1"),
            equals("object of prefer", words[prefer], "flight"),
            at_most("weights of the head, largest difference to the relation",
                    float((weights - children)[rows].abs().max()), 1e-6),
        ),
        (
            heatmap("All arcs: a word and its head", parse, words, words, row_axis="word", column_axis="head"),
            heatmap(f"Attention of the head {relation}", weights, words, words),
        ),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- the terms


def slope_error(model: Model, ids: Tensor, step_size: float = 1e-6) -> float:
    """The largest relative difference between the gradient of L_focus and its finite differences, over the queries."""
    errors = []
    term_of(model, ids, kind="focus").backward()
    for name, parameter in model.named_parameters():
        if ".attention.query.weight" in name and parameter.grad is not None:
            step, values = step_size * torch.randn_like(parameter).sign(), []
            with torch.no_grad():
                for sign in (1, -1):
                    parameter.add_(sign * step)
                    values.append(float(term_of(model, ids, kind="focus")))
                    parameter.sub_(sign * step)
            slope = float((parameter.grad * step).sum())
            errors.append(abs((values[0] - values[1]) / 2 - slope) / abs(slope))
    return max(errors)


@lab("shaping", rows=("J2",), counterexample={"sharpness": 10.0}, try_next=("--sharpness 100", "--length 100"))
def focus_term(
    *,
    length: Annotated[int, "tokens of the text"] = 12,
    sharpness: Annotated[float, "factor of the queries for which attention should be one-hot"] = 1e5,
    seed: int = 0,
) -> Finding:
    """L_focus is the mean entropy of attention: 0 if every query attends to one key, ln T if to all T alike.

    L_focus = 1/(KTL) Σ α (−ln α), over L layers, K heads and T queries, with 0 · ln 0 = 0. Under a causal mask query t
    sees t keys, so uniform attention costs the mean of ln t. The term is computed without the matrix of weights, and is
    compared here with the formula, and its gradient with finite differences.
    """
    ids = torch.randint(16, (3, length))
    factors = [0.0, *[sharpness ** (i / 6) / 100 ** (1 - i / 6) for i in range(7)]]
    with torch.no_grad():
        values = [float(term_of(small_decoder(seed, sharpness=f), ids, kind="focus")) for f in factors]
    model = small_decoder(seed)
    alpha = literal_weights(model, ids)
    literal = float(torch.special.entr(alpha).sum() / alpha[..., 0].numel())
    zeros = torch.zeros(length, 4, dtype=torch.float64)
    free = float(torch.special.entr(attention_weights(zeros, zeros)).sum(-1).mean())
    causal = fmean(math.log(t) for t in range(1, length + 1))
    sharp = small_decoder(seed, sharpness=sharpness)
    term_of(sharp, ids, kind="focus").backward()
    gradients = [parameter.grad for parameter in sharp.parameters() if parameter.grad is not None]
    curve = {"L_focus": list(zip(factors[1:], values[1:], strict=True))}
    levels = {"causal, uniform: mean of ln t": causal, "one-hot": 0.0}
    return Finding(
        (
            near("one-hot attention", values[-1], 0.0, 1e-3),
            near("uniform attention without a mask", free, math.log(length), 1e-10),
            near("uniform attention under a causal mask", values[0], causal, 1e-10),
            near("a random model, by the formula", float(term_of(model, ids, kind="focus").detach()), literal, 1e-10),
            at_most("gradient against finite differences, relative", slope_error(model, ids), 1e-4),
            equals("gradients that are not finite, for one-hot rows",
                   sum(int((~gradient.isfinite()).sum()) for gradient in gradients), 0),
        ),
        (Lines("Entropy of attention as queries grow", "factor of the queries", "nats", curve, levels, log_x=True),),
    )  # fmt: skip


def near_cost(q_TK: Tensor, k_TK: Tensor, max_cost: float, *, causal: bool = False) -> float:
    """L_near of one head, the mean over its queries."""
    mask, positions = head_context(q_TK, k_TK, causal)
    core, q, k = plain_core(q_TK), q_TK[None, None], k_TK[None, None]
    attention = RecordedAttention("head", core, q, k, mask, positions, None)
    layer = AttentionLayer("head", "self", "decoder", 0, 1, MaskSpec())
    term = AuxiliaryLossSpec.from_config({"kind": "near", "max_cost": max_cost})
    return float(term.total(RecordedQueries(layer, attention, None), Batch(Inputs(q[0, 0]), q[0, 0]))) / len(q_TK)


def pointing_cost(links: Sequence[tuple[int, int]], length: int, max_cost: float) -> float:
    """The sum of the costs of a head that attends from each word to itself, or to the word that it is linked to."""
    keys = torch.eye(length, dtype=torch.float64)
    target = torch.arange(length)
    for word, linked in links:
        target[word] = linked
    return near_cost(100 * keys[target], keys, max_cost) * length


@lab("shaping", rows=("J3",), seconds=(1.5, 1.5), smallest={"longest": 256}, counterexample={"bounded": False},
     try_next=("--max-cost 25", "--no-bounded"))  # fmt: skip
def near_term(
    *,
    max_cost: Annotated[float, "L_max"] = 100.0,
    longest: Annotated[int, "longest text"] = 4096,
    bounded: Annotated[bool, "whether the cost of a query is at most L_max"] = True,
) -> Finding:
    """L_near prefers attention to near tokens, and costs at most L_max, however long the text is.

    L_near is the mean over all queries of min(L_max, Σ α (t₁ − t₂)²). A query that attends to itself costs nothing. One
    that attends far away costs L_max and no more, so a few long links stay possible, as those from a pronoun to its
    noun. Without the bound a text of T tokens would cost up to T².
    """
    limit = max_cost if bounded else 1e12
    lengths = [4**i for i in range(1, 7) if 4**i <= longest]
    costs = {}
    for name, factor in (("uniform", 0.0), ("random", 3.0)):
        pairs = ((factor * torch.randn(n, 4), torch.randn(n, 4)) for n in lengths)
        costs[name] = [
            (float(n), near_cost(q, k, limit, causal=True)) for n, (q, k) in zip(lengths, pairs, strict=True)
        ]
    highest = max(value for curve in costs.values() for _, value in curve)
    outlier = {distance: pointing_cost([(distance, 0)], 64, limit) for distance in (1, 3, 9, 30, 60)}
    rows = [(distance, distance**2, cost) for distance, cost in outlier.items()]
    return Finding(
        (
            at_most(f"largest cost per query, texts up to {lengths[-1]:,} tokens", highest, max_cost * (1 + 1e-5)),
            near("cost if every query attends to itself", pointing_cost([], 64, limit), 0.0, 1e-9),
            near("cost of one link over 3 tokens", outlier[3], min(9.0, max_cost), 1e-6),
            near("cost of one link over 60 tokens", outlier[60], min(3600.0, max_cost), 1e-6),
        ),
        (
            Lines("Cost per query of two heads", "tokens", "cost", costs, {"L_max": max_cost}, log_x=True, log_y=True),
            Table("Cost of one link", ("distance", "distance²", "cost"), rows),
        ),
    )


@lab("shaping", rows=("J4",), errata=("E3",), counterexample={"reduction": "batchmean"},
     try_next=("--reduction batchmean", "--length 40"))  # fmt: skip
def shaped_loss(
    *,
    reduction: Annotated[str, "mean over layers, heads and queries; or batchmean"] = "mean",
    length: Annotated[int, "tokens of the text"] = 10,
    seed: int = 0,
) -> Finding:
    """L_total = L_LM + λ L, where L is a mean over layers, heads and queries, so that λ fits models of every size.

    Uniform attention costs the same per query in every model: as a mean, the term is the same for 2 heads or 4, and for
    2 layers or 6. As a sum it is K·T·L times as large, and λ would have to be chosen anew. The loss of the language
    model is the same with and without the term, and both are logged.
    """
    ids, sizes = torch.randint(16, (2, length)), ((2, 2), (4, 2), (2, 6))
    with torch.no_grad():
        terms = [
            float(term_of(small_decoder(seed, sharpness=0.0, layers=layers, heads=heads), ids,
                          kind="focus", reduction=reduction))
            for heads, layers in sizes
        ]  # fmt: skip
        model, batch = small_decoder(seed, layers=3), Batch(Inputs(ids), ids)
        spec = AuxiliaryLossSpec.from_config({"kind": "near", "weight": 0.3, "layers": [0, 1]})
        loss, plain = (loss_with_auxiliary(CausalSpec(), specs, model, batch) for specs in ([spec], []))
        total = float(total_loss(loss, loss.count, [spec], {"near": loss.auxiliary_losses["near"].count}))
        term, every = (float(term_of(model, ids, kind="near", layers=layers)) for layers in ([0, 1], None))
        t = torch.arange(length)
        rows = (literal_weights(model, ids) * (t[:, None] - t) ** 2).sum(-1).clamp(max=100.0)
    language = float(plain.sum / plain.count)
    table = [(f"{heads} heads, {layers} layers", value) for (heads, layers), value in zip(sizes, terms, strict=True)]
    return Finding(
        (
            at_most("L_focus of uniform attention, largest ratio between sizes", max(terms) / min(terms), 1 + 1e-9),
            near("L_total − L_LM − λ L", total - language - 0.3 * term, 0.0, 1e-6),
            near("L_LM with the term, less that without", float((loss.sum - plain.sum).abs()), 0.0, 0.0),
            near("L_near without the last layer, by the formula", term, float(rows[:-1].mean()), 1e-9),
            near("L_near of all layers, by the formula", every, float(rows.mean()), 1e-9),
            at_least("relative difference of the two", abs(term - every) / every, 1e-3),
        ),
        (Table("L_focus of uniform attention", ("model", "term"), table),),
        correction="The document divides L_focus by K·T·L, over all layers, and L_near by K·T·(L − 1), over all but "
        "the last, and does not say why. The two give different numbers. Here every layer counts in both, unless the "
        "field layers names those that do.",
    )
