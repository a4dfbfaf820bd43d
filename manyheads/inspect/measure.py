"""Measures of recorded attention: what a head attends to, how layers compose, what a token reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

import torch
from torch import Tensor

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import UnsupportedError, UsageError
from manyheads.model.recording import RecordedAttention, Tape, record
from manyheads.parts.attention import Attention
from manyheads.parts.core import Core, InnerProduct

ROUNDING = 64  # units in the last place that are no change of an output


@dataclass(frozen=True)
class Pattern:
    """A fixed pattern of attention, which is a mass of HeadMeasures by the same name."""

    meaning: str  # what the weight is on
    letter: str  # of its badge
    threshold: float  # mean mass from which a head has the badge


PATTERNS = {
    "previous": Pattern("previous token", "P", 0.5),
    "next": Pattern("next token", "N", 0.5),
    "first": Pattern("first token", "1", 0.5),
    "self": Pattern("the token itself", "S", 0.5),
    "same": Pattern("same token elsewhere", "=", 0.3),
    "induction": Pattern("token after an earlier occurrence", "I", 0.3),
}


@dataclass(frozen=True)
class HeadMeasures:
    """Means over the queries of one attention, for each head (H). Masses are sums of weights."""

    queries: int  # that were measured
    entropy: Tensor  # −Σ_j α_ij ln α_ij
    squared_distance: Tensor  # Σ_j α_ij (i − j)²
    first: Tensor  # mass on the first key that is no padding
    self: Tensor  # on the key at the query's own position; these and the next are 0 in cross-attention
    previous: Tensor  # on the key one position before
    next: Tensor  # on the key one position after
    same: Tensor  # on other keys with the query's token
    induction: Tensor  # on the keys after earlier occurrences of the query's token

    @property
    def distance(self) -> Tensor:
        """The root of the mean squared distance."""
        return self.squared_distance.clamp(min=0).sqrt()

    def to_dict(self, head: int) -> dict[str, float]:
        names = ["entropy", "distance", *(field.name for field in fields(self)[3:])]
        return {name: float(getattr(self, name)[head]) for name in names}


def mean_measures(measures: Sequence[HeadMeasures]) -> HeadMeasures:
    """The means over the queries of several calls of one attention."""
    queries = torch.tensor([measure.queries for measure in measures], dtype=torch.float64)
    shares = queries / queries.sum().clamp(min=1)
    means = (
        sum(share * getattr(measure, field.name).cpu() for share, measure in zip(shares, measures, strict=True))
        for field in fields(HeadMeasures)[1:]
    )
    return HeadMeasures(int(queries.sum()), *means)


@torch.no_grad()
def measure_heads(attention: RecordedAttention, tokens: Tensor | None = None) -> HeadMeasures:
    """Measures every head. `tokens`, B×M, are the ids of the keys of self-attention; without them, same and induction
    are 0. Rows of padding, whose query is a padded key, and rows without a visible key are left out."""
    is_self = attention.mask.num_queries == attention.mask.num_keys and attention.name.split(".")[-1] == "attention"
    padding_BM = attention.mask.padding_BM
    rows_BL = row_mask(attention, is_self)
    masses = torch.zeros(len(PATTERNS), attention.query.shape[1], dtype=torch.float64)
    for rows, _, _ in Core.blocks(attention.core, attention.query, attention.key, attention.mask):
        weights = attention.weights(rows=rows)
        rows_BL[:, rows] &= (weights > 0).any(dim=-1).any(dim=1)  # a row without a visible key has only zeros
        weights = weights.masked_fill(~rows_BL[:, None, rows, None], 0.0)
        for number, cells in enumerate(cells_of(attention, rows, tokens if is_self else None, padding_BM, is_self)):
            masses[number] += (weights * cells[:, None]).sum(dim=(0, 2, 3), dtype=torch.float64)
    count, measured_BHL = int(rows_BL.sum()), rows_BL[:, None]

    def mean(values_BHL: Tensor) -> Tensor:
        return values_BHL.masked_fill(~measured_BHL, 0.0).sum(dim=(0, 2), dtype=torch.float64) / max(1, count)

    return HeadMeasures(count, mean(attention.entropy), mean(attention.squared_distance), *(masses / max(1, count)))


def row_mask(attention: RecordedAttention, is_self: bool) -> Tensor:
    """True for the queries that are measured, B×L."""
    batch, queries = attention.query.shape[0], attention.mask.num_queries
    rows = torch.ones(batch, queries, dtype=torch.bool, device=attention.query.device)
    if is_self and attention.mask.padding_BM is not None:
        rows = rows & ~attention.mask.padding_BM
    return rows


def cells_of(
    attention: RecordedAttention, rows: slice, tokens: Tensor | None, padding_BM: Tensor | None, is_self: bool
) -> list[Tensor]:
    """Where each of the masses from `first` to `induction` is counted, 1 or B×rows×M, in the order of the fields."""
    keys = torch.arange(attention.mask.num_keys, device=attention.query.device)[None, None]
    queries = torch.arange(attention.mask.num_queries, device=keys.device)[rows][None, :, None]
    first = keys == 0 if padding_BM is None else keys == (~padding_BM).int().argmax(dim=1)[:, None, None]
    none = torch.zeros(1, 1, 1, dtype=torch.bool, device=keys.device)
    if not is_self:
        return [first, none, none, none, none, none]
    offsets = [keys == queries + step for step in (0, -1, 1)]
    if tokens is None:
        return [first, *offsets, none, none]
    same = (tokens[:, rows, None] == tokens[:, None]) & ~offsets[0]
    if padding_BM is not None:
        same = same & ~padding_BM[:, None]
    earlier = same & (keys < queries)
    after = torch.cat((torch.zeros_like(earlier[..., :1]), earlier[..., :-1]), dim=-1)
    return [first, *offsets, same, after]


@dataclass(frozen=True)
class HeadPattern:
    """The measures of one head, as means over the tokens of texts."""

    attention: str
    head: int
    measures: dict[str, float]


@torch.no_grad()
def head_patterns(checkpoint: Checkpoint, rows: Iterable[Sequence[int]]) -> list[HeadPattern]:
    """Measures every head of self-attention over rows of ids, each token counting once."""
    measures: dict[str, HeadMeasures] = {}
    for row in rows:
        ids = torch.tensor([list(row)])
        with record(checkpoint.model, activations=False) as tape:
            checkpoint.logits(ids)
        for attention in tape:
            measured = measure_heads(attention, ids.to(attention.query.device))
            before = measures.get(attention.name)
            measures[attention.name] = mean_measures([before, measured] if before else [measured])
    return [
        HeadPattern(name, head, measured.to_dict(head))
        for name, measured in measures.items()
        for head in range(len(measured.entropy))
    ]


# ------------------------------------------------------------------------------------------------------- over layers


@torch.no_grad()
def rollout(tape: Tape, stack: str = "") -> Tensor:
    """Attention rollout, B×L×L: the product over layers of (A + I)/2, with A the mean over heads (Abnar, Zuidema 2020).

    Entry (i, j) is how much of position i of the last layer comes from input j. `stack` is encoder or decoder; by
    default the only one.
    """
    names = [name for name in tape.names() if name.endswith(".attention") and name.startswith(stack)]
    if len({name.split(".")[0] for name in names}) != 1:
        stacks = " and ".join(dict.fromkeys(name.split(".")[0] for name in names)) or "no self-attention"
        raise UsageError(f"the tape has {stacks}; name one stack")
    result: Tensor | None = None
    for name in names:
        weights = tape.weights(name).mean(dim=1)
        layer = (weights + torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)) / 2
        layer = layer / layer.sum(dim=-1, keepdim=True)
        result = layer if result is None else layer @ result
    assert result is not None
    return result


def top_down(tape: Tape, layers: int | None) -> list[str]:
    """The names of the self-attentions of the first `layers` layers, the last layer first."""
    names = [name for name in tape.names() if name.endswith(".attention")]
    return [name for name in reversed(names) if layers is None or int(name.split(".")[-2]) < layers]


def pointer_tree(tape: Tape, position: int, *, layers: int | None = None) -> list[dict[int, list[int]]]:
    """From the output at `position` down to the inputs: for each layer, which key each head of a reached query takes.

    The key is the one with the highest weight. `layers` is the number of layers below the output; by default all.
    """
    reached, tree = [position], []
    for name in top_down(tape, layers):
        pointers = tape.weights(name)[0].argmax(dim=-1)  # H×L
        tree.append({i: pointers[:, i].tolist() for i in reached})
        reached = sorted({*reached, *(j for keys in tree[-1].values() for j in keys)})
    return tree


def pointer_field(tape: Tape, position: int, *, layers: int | None = None) -> set[int]:
    """The input positions that can reach an output through the highest weight of each head and the residual stream.

    For cores that take only the highest weight (argmax) this is the receptive field, of at most (k + 1)ⁿ positions
    with n layers of k heads.
    """
    tree = pointer_tree(tape, position, layers=layers)
    return {position}.union(*(keys for level in tree for keys in level.values()))


def visible_field(tape: Tape, position: int, *, layers: int | None = None) -> set[int]:
    """The input positions that the masks let reach an output; with a causal mask, those up to its own."""
    reached = {position}
    for name in top_down(tape, layers):
        (attention,) = tape.calls(name)
        visible = attention.visible()
        if visible is None:
            return set(range(attention.mask.num_keys))
        rows = visible[0, 0, sorted(reached)]
        reached |= set(rows.any(dim=0).nonzero().flatten().tolist())
    return reached


@torch.no_grad()
def receptive_field(
    outputs: Callable[[Tensor], Tensor], ids: Sequence[int], position: int, *, replacements: Sequence[int]
) -> set[int]:
    """The input positions whose change alters the output at `position`, by changing each token in turn.

    `outputs` maps ids, N×L, to outputs, N×L×…; each token is replaced by each of `replacements` that differs from it.
    """
    (field,) = receptive_fields(lambda rows: [outputs(rows)], ids, position, replacements=replacements)
    return field


@torch.no_grad()
def receptive_fields(
    outputs: Callable[[Tensor], Sequence[Tensor]], ids: Sequence[int], position: int, *, replacements: Sequence[int]
) -> list[set[int]]:
    """The receptive field of each of several outputs, such as those of all layers, with the same forward passes."""
    row, fields_by_output = torch.tensor(list(ids)), list[set[int]]()
    for j in range(len(ids)):
        changed = [token for token in replacements if token != ids[j]]
        rows = row.repeat(1 + len(changed), 1)  # the first is unchanged
        rows[1:, j] = torch.tensor(changed)
        for number, all_positions in enumerate(outputs(rows)):
            if number == len(fields_by_output):
                fields_by_output.append(set())
            out = all_positions[:, position]
            rounding = ROUNDING * torch.finfo(out.dtype).eps * out[0].abs().max()  # kernels round each row anew
            if ((out[1:] - out[0]).abs() > rounding).any():
                fields_by_output[number].add(j)
    return fields_by_output


# ----------------------------------------------------------------------------------------------------------- matrices


def has_qk_matrix(core: Core) -> TypeGuard[InnerProduct]:
    """Whether scores are x_iᵀ M x_j with the same scale in every head."""
    return isinstance(core, InnerProduct) and core.heads_are_alike


@torch.no_grad()
def qk_matrix(attention: Attention, head: int) -> Tensor:
    """W_QᵀW_K of a head times the scale, D×D: the score of x_i and x_j is x_iᵀ M x_j, without biases and positions."""
    core = attention.core
    if not has_qk_matrix(core):
        raise UnsupportedError("a QK matrix needs the core 'dot'")
    query, key = head_weight(attention.query, head), head_weight(attention.key, head, attention.query)
    return query.mT @ key * core.scale


@torch.no_grad()
def ov_matrix(attention: Attention, head: int) -> Tensor:
    """W_O W_V of a head, D×D: what a head adds to the residual stream for an x that it attends to, without biases."""
    value = head_weight(attention.value, head, attention.query)
    size = value.shape[0]
    return attention.output.weight[:, head * size : (head + 1) * size] @ value


def head_weight(projection: Any, head: int, query: Any = None) -> Tensor:
    """The matrix of one head, K×D; key and value heads may be shared by several query heads."""
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise UnsupportedError("this kind of attention has no projection of the whole vector per head")
    matrices = weight.unflatten(0, (-1, projection.size))
    heads = len(matrices) if query is None else query.weight.shape[0] // query.size
    if not 0 <= head < heads:
        raise UsageError(f"there is no head {head}, expected 0 to {heads - 1}")
    return matrices[head * len(matrices) // heads]
