"""Loss shaping: terms beside any objective, L_total = L + Σ λ·L_term, that say how attention should look.

They read the very run that the objective scores, by hooks that are there only for its forward, and never make a matrix.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import StrictInt
from torch import Tensor

from manyheads.model.build import Model
from manyheads.model.spec import ModelSpec
from manyheads.model.stack import Stack
from manyheads.objective.score import Batch, ObjectiveSpec, Score, Tokens
from manyheads.parts.batch import Inputs
from manyheads.parts.mask import MaskSpec
from manyheads.parts.record import Attended, record
from manyheads.spec import Part, SpecError, field

Tower = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class Place:
    """An attention of a model, before anything is run."""

    name: str  # as a record calls it; layers that share weights share it
    where: Literal["self", "cross"]
    tower: Tower
    layer: int
    heads: int
    mask: MaskSpec


@dataclass(frozen=True)
class Look:
    """An attention of a run: at which place, which of its rows are real, B×L, and the number of the first."""

    place: Place
    attended: Attended
    real: Tensor | None
    first: int = 0

    def total(self, rows_BHL: Tensor, heads: Sequence[int] | None) -> Tensor:
        """The sum over chosen heads and real rows."""
        chosen = rows_BHL if heads is None else rows_BHL[:, list(heads)]
        return (chosen if self.real is None else chosen.masked_fill(~self.real[:, None], 0.0)).sum()


class ShapingSpec(Part, slot="shaping"):
    """A term beside the objective that says how attention should look."""

    weight: float = field(0.1, "λ; at 0 the term is only logged", ge=0)
    where: Literal["self", "cross", "all"] = field("all", "attention within a text, to the source, or both")
    tower: Tower | None = field(None, "the tower whose queries look; both if not given")
    layers: tuple[StrictInt, ...] | None = field(None, "the layers, from 0; all if not given", strict=False, min_length=1)
    heads: tuple[StrictInt, ...] | None = field(None, "the heads, from 0; all if not given", strict=False, min_length=1)
    normalised: bool = field(True, "a mean over heads, positions and layers; if not, their sum, and the mean over texts")

    def places(self, model: ModelSpec) -> list[Place]:
        """The attentions it looks at; refused where there are none."""
        fitting = [
            place for place in attentions(model) if self.where in ("all", place.where) and self.tower in (None, place.tower)
        ]  # fmt: skip
        if not fitting:
            said = "attention" if self.where == "all" else f"{self.where}-attention"
            raise SpecError(f"{self.kind} looks at {said}{f' of the {self.tower}' if self.tower else ''}, and this model has none")
        for name, given, count in (
            ("layers", self.layers, max(place.layer for place in fitting) + 1),
            ("heads", self.heads, min(place.heads for place in fitting)),
        ):
            if wrong := [one for one in given or () if not 0 <= one < count]:
                raise SpecError(f"there is no {wrong[0]} among {count}; they count from 0 to {count - 1}", (name,))
            if given and len(set(given)) < len(given):
                raise SpecError("names one twice", (name,))
        chosen = [place for place in fitting if self.layers is None or place.layer in self.layers]
        if not chosen:
            raise SpecError(f"{self.kind} finds nothing to look at in them", ("layers",))
        return chosen

    def check(self, objective: str) -> None:
        """Refuses an objective, by its kind, that it cannot stand beside."""

    def count(self, model: Model, batch: Batch) -> int:
        """What the sum is divided by, known before the run: heads × real rows × layers, or the texts."""
        if not self.normalised:
            return batch.inputs.batch
        rows = (self.rows(place, model, batch) for place in self.places(model.spec))
        heads = (len(self.heads or range(place.heads)) for place in self.places(model.spec))
        return sum(one * other for one, other in zip(rows, heads, strict=True))

    def rows(self, place: Place, model: Model, batch: Batch) -> int:
        """How many rows an attention has that count."""
        given = read(place, model, batch)
        return sum(one.batch * one.length if one.padding is None else int((~one.padding).sum()) for one in given)

    def score(self, model: Model, looks: Sequence[Look], batch: Batch) -> Score:
        chosen = set(self.places(model.spec))
        totals = [self.total(look, batch) for look in looks if look.place in chosen]
        return Score(torch.stack(totals).sum(), self.count(model, batch))

    @abstractmethod
    def total(self, look: Look, batch: Batch) -> Tensor: ...


class FocusSpec(ShapingSpec, kind="focus"):
    """L_focus = 1/KTL · Σ_lkt H(α[l, k, t, ·]), the mean entropy of attention"""

    def total(self, look: Look, batch: Batch) -> Tensor:
        return look.total(look.attended.statistics.entropy, self.heads)


class NearSpec(ShapingSpec, kind="near"):
    """L_near = 1/KTL · Σ_lkt₁ min(L_max, Σ_t₂ α[l, k, t₁, t₂] (t₁ − t₂)²)

    However long the text, a row costs at most L_max: what must look far may. Between towers, positions are compared as they are.
    """

    where: Literal["self", "cross", "all"] = field("self", "attention within a text, to the source, or both")
    most: float = field(100.0, "L_max, the most that a row can cost", gt=0)

    def total(self, look: Look, batch: Batch) -> Tensor:
        return look.total(look.attended.statistics.distance.clamp(0.0, self.most), self.heads)


class GuidedSpec(ShapingSpec, kind="guided"):
    """−Σ_j t_ij ln α_ij, the mean over the rows i that have a target t

    Chen et al. 2016, arXiv 1607.01628: to the source words aligned with the one that is written. Strubell et al. 2018, arXiv 1804.08199:
    to the head of each word. t is even over the tokens of the words meant that may be seen; the root of a sentence is its own head.
    """

    objectives: ClassVar[dict[str, tuple[str, ...]]] = {"alignment": ("seq2seq",), "arcs": ("causal", "masked", "classify")}

    by: Literal["alignment", "arcs"] = field("alignment", "the field of the data that says who should look where")
    toward: Literal["head", "dependents"] = field("head", "with arcs: a word looks at its head, or a head at its dependents")
    relation: str | None = field(None, "with arcs: of this relation alone, by the field 'relations' of the data", min_length=1)

    def places(self, model: ModelSpec) -> list[Place]:
        meant: Literal["self", "cross"] = "cross" if self.by == "alignment" else "self"
        if self.where not in ("all", meant):
            raise SpecError(f"{self.by} guides {meant}-attention, given '{self.where}'", ("where",))
        return super().places(model) if self.where == meant else self.changed(where=meant).places(model)

    @property
    def fields(self) -> tuple[str, ...]:
        """Which the data must have."""
        if self.by == "alignment":
            return ("source", "target", "alignment")
        return ("text", "arcs") if self.relation is None else ("text", "arcs", "relations")

    @property
    def guide(self) -> str:
        """Which links of a batch are its own."""
        return self.by if self.by == "alignment" else f"{self.toward} {self.relation or 'any'}"

    def check(self, objective: str) -> None:
        if objective not in self.objectives[self.by]:
            known = ", ".join(self.objectives[self.by])
            raise SpecError(f"'{self.by}' is for {known}, where every token keeps its place, and this run learns {objective}", ("by",))

    def rows(self, place: Place, model: Model, batch: Batch) -> int:
        text, query, _ = self.targets(place, batch)
        return len(set(zip(text.tolist(), query.tolist(), strict=True)))

    def targets(self, place: Place, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Which query should look at which key, (text, query, key), as far as it may."""
        text, query, key = batch.links[self.guide].unbind(1)
        seen = torch.ones_like(key, dtype=torch.bool)
        if place.mask.causal:
            seen &= key <= query
        if place.mask.window is not None:
            seen &= (query - key).abs() < place.mask.window
        if place.mask.prefix and batch.inputs.prefix is not None:
            seen |= key < batch.inputs.prefix[text]
        return text[seen], query[seen], key[seen]

    def total(self, look: Look, batch: Batch) -> Tensor:
        text, query, key = self.targets(look.place, batch)
        here = (query >= look.first) & (query < look.first + look.attended.mask.queries)
        text, query, key = text[here], query[here] - look.first, key[here]
        _, row, count = torch.stack((text, query)).unique(dim=1, return_inverse=True, return_counts=True)
        logs_HN = look.attended.log_weights((text, query, key))
        return -((logs_HN if self.heads is None else logs_HN[list(self.heads)]) / count[row]).sum()


def with_links(batch: Batch, objective: ObjectiveSpec, tokens: Tokens, links: dict[str, list[np.ndarray]]) -> Batch:
    """The batch with the links of its rows, N×2 each, moved to where its tokens stand: behind what is put before a text.

    An answer is framed as what is read is. Its words look from where each is wanted, the place at which the token before it is read.
    """
    shift = np.array((0, *[objective.before(tokens)] * 2))
    moved = {}
    for guide, rows in links.items():
        numbered = [np.insert(row, 0, text, axis=1) + shift for text, row in enumerate(rows)]
        moved[guide] = torch.from_numpy(np.concatenate(numbered))
    return replace(batch, links=moved)


# ------------------------------------------------------------------------------------------------------ what is looked at


@lru_cache(maxsize=16)
def attentions(model: ModelSpec) -> tuple[Place, ...]:
    """Every attention of a model, in the order of its layers."""
    found = []
    towers: tuple[Tower, ...] = ("encoder", "decoder")
    for tower in towers:
        stack = getattr(model, tower)
        for i, layer in enumerate(stack.expanded() if stack else ()):
            name = f"{tower}.layers.{i // stack.run}"
            found.append(Place(f"{name}.attention", "self", tower, i, layer.attention.heads, layer.mask))
            if layer.cross is not None:
                found.append(Place(f"{name}.cross", "cross", tower, i, (layer.cross.attention or layer.attention).heads, MaskSpec()))
    if model.recurrent is not None and model.recurrent.source and model.recurrent.attention:
        found.append(Place("core", "cross", "decoder", 0, 1, MaskSpec()))
    return tuple(found)


def read(place: Place, model: Model, batch: Batch) -> Iterator[Inputs]:
    """What a tower reads, as it lays it out; one that stands alone reads a source too, where there is one."""
    pair = model.spec.encoder is not None and model.spec.decoder is not None
    given = [batch.inputs, batch.source]
    if pair or model.spec.recurrent is not None:
        given = [batch.source] if place.tower == "encoder" else [batch.inputs]
    stack = getattr(model, place.tower, None)
    for one in given:
        if one is not None:
            yield stack.embed.lay_out(one) if isinstance(stack, Stack) else one


def looks_of(model: ModelSpec, seen: Sequence[Attended], batch: Batch) -> list[Look]:
    """What was recorded, by place. A recurrent network looks once for every token it writes."""
    named: dict[str, list[Place]] = {}
    for place in attentions(model):
        named.setdefault(place.name, []).append(place)
    looks, turns, padding = [], Counter[str](), batch.inputs.padding
    for attended in seen:
        turn = turns[attended.name]
        turns[attended.name] += 1
        if model.recurrent is not None:
            place, first = named[attended.name][0], turn
            real = None if padding is None else ~padding[:, first : first + 1]
        else:
            place, first = named[attended.name][turn % len(named[attended.name])], 0
            if place.where == "self":  # the queries of the cross-attention behind it are the same
                padding = attended.mask.padding_BM
            real = None if padding is None else ~padding
        looks.append(Look(place, attended, real, first))
    return looks


# ------------------------------------------------------------------------------------------------------------ the loss


def names(shaping: Sequence[ShapingSpec]) -> list[str]:
    """What each term is called: by its kind, and by its number where there are several."""
    kinds = [spec.kind for spec in shaping]
    return [kind if kinds.count(kind) == 1 else f"{kind}-{kinds[:i].count(kind) + 1}" for i, kind in enumerate(kinds)]


def shaped(objective: ObjectiveSpec, shaping: Sequence[ShapingSpec], model: Model, batch: Batch) -> Score:
    """The objective's score, with the terms of the same run."""
    if not shaping:
        return objective.score(model, batch)
    with record(model) as seen:
        score = objective.score(model, batch)
    looks = looks_of(model.spec, seen, batch)
    terms = {name: spec.score(model, looks, batch) for name, spec in zip(names(shaping), shaping, strict=True)}
    return replace(score, terms=terms)


def counts_of(shaping: Sequence[ShapingSpec], model: Model, batches: Sequence[Batch]) -> dict[str, int]:
    """What each term is divided by, over all batches of an update."""
    return {name: sum(spec.count(model, batch) for batch in batches) for name, spec in zip(names(shaping), shaping, strict=True)}


def total(score: Score, count: int, shaping: Sequence[ShapingSpec], counts: dict[str, int]) -> Tensor:
    """L + Σ λ·L_term, each sum divided by its own count. At λ = 0 nothing is added, not even zeros."""
    loss = score.total / count
    for spec, (name, term) in zip(shaping, score.terms.items(), strict=True):
        if spec.weight:
            loss = loss + spec.weight * term.total / max(1, counts[name])
    return loss
