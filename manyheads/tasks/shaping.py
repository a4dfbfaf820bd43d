"""Loss shaping: terms added to any task's loss, L_total = L + Σ λ·L_term, that shape the attention weights.

They read the forward pass of the task's loss, through hooks that exist only for it, and never make the full matrix.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from pydantic import StrictInt
from torch import Tensor

from manyheads.data.attention_targets import (
    AttentionTargets,
    targets_from_alignments,
    targets_from_arcs,
    truncate_targets,
)
from manyheads.errors import ConfigError, IncompatibleError, OutOfRangeError
from manyheads.model.build import Model
from manyheads.model.record import RecordedAttention, record
from manyheads.model.spec import ModelSpec
from manyheads.model.stack import Stack
from manyheads.parts.inputs import Inputs
from manyheads.parts.mask import MaskSpec
from manyheads.spec import Part, field
from manyheads.tasks.task import Batch, Loss, SpecialTokens, TaskSpec

Tower = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class AttentionSite:
    """An attention of a model, before any forward pass."""

    name: str  # as `record` names it; layers with shared weights share it
    where: Literal["self", "cross"]
    tower: Tower
    layer: int
    heads: int
    mask: MaskSpec


@dataclass(frozen=True)
class SiteRecord:
    """A recorded attention, its site, which of its query rows are real (B×L), and the position of the first."""

    site: AttentionSite
    attention: RecordedAttention
    real: Tensor | None
    first: int = 0

    def total(self, rows_BHL: Tensor, heads: Sequence[int] | None) -> Tensor:
        """The sum over the heads and the real rows."""
        rows_BHL = rows_BHL if heads is None else rows_BHL[:, list(heads)]
        return (rows_BHL if self.real is None else rows_BHL.masked_fill(~self.real[:, None], 0.0)).sum()


class ShapingSpec(Part, slot="shaping"):
    """A term added to the task's loss that shapes the attention weights."""

    weight: float = field(0.1, "λ; at 0 the term is only logged", ge=0)
    where: Literal["self", "cross", "all"] = field("all", "self-attention, cross-attention or both")
    tower: Tower | None = field(None, "the tower of the queries; both if not given")
    layers: tuple[StrictInt, ...] | None = field(None, "layers, from 0; all if not given", strict=False, min_length=1)
    heads: tuple[StrictInt, ...] | None = field(None, "heads, from 0; all if not given", strict=False, min_length=1)
    normalised: bool = field(
        True, "a mean over heads, positions and layers; otherwise their sum, and the mean over texts"
    )

    def sites(self, model: ModelSpec) -> list[AttentionSite]:
        """The attentions it applies to; raises if there are none."""
        fitting = [
            site
            for site in attention_sites(model)
            if self.where in ("all", site.where) and self.tower in (None, site.tower)
        ]
        if not fitting:
            name = "attention" if self.where == "all" else f"{self.where}-attention"
            tower = f" in the {self.tower}" if self.tower else ""
            raise IncompatibleError(f"{self.kind} needs {name}{tower}, and this model has none")
        for name, indices, count in (
            ("layers", self.layers, max(site.layer for site in fitting) + 1),
            ("heads", self.heads, min(site.heads for site in fitting)),
        ):
            if wrong := [index for index in indices or () if not 0 <= index < count]:
                raise OutOfRangeError(f"given {wrong[0]}, expected 0 to {count - 1}", (name,))
            if indices and len(set(indices)) < len(indices):
                raise ConfigError("an index is repeated", (name,))
        selected = [site for site in fitting if self.layers is None or site.layer in self.layers]
        if not selected:
            raise IncompatibleError(f"{self.kind} has no attention in these layers", ("layers",))
        return selected

    def check_task(self, task: TaskSpec) -> None:
        """Raises if the term cannot be added to this task."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that the data must have, if it needs target links."""
        return ()

    @property
    def name(self) -> str:
        """The key of its target links in a batch."""
        return self.kind

    def target_links(
        self, columns: Mapping[str, list[Any]], tokenizer: Any, limits: Mapping[str, int]
    ) -> list[AttentionTargets]:
        """The target links of each training row, from its fields; texts are truncated to `limits`."""
        raise NotImplementedError

    def count(self, model: Model, batch: Batch) -> int:
        """The divisor, known before the forward pass: heads × real rows × layers, or the number of texts."""
        if not self.normalised:
            return batch.inputs.batch
        sites = self.sites(model.spec)
        return sum(self.rows(site, model, batch) * len(self.heads or range(site.heads)) for site in sites)

    def rows(self, site: AttentionSite, model: Model, batch: Batch) -> int:
        """The number of query rows that count."""
        inputs = tower_inputs(site, model, batch)
        return sum(one.batch * one.length if one.padding is None else int((~one.padding).sum()) for one in inputs)

    def loss(self, model: Model, records: Sequence[SiteRecord], batch: Batch) -> Loss:
        sites = set(self.sites(model.spec))
        totals = [self.total(one, batch) for one in records if one.site in sites]
        return Loss(torch.stack(totals).sum(), self.count(model, batch))

    @abstractmethod
    def total(self, record: SiteRecord, batch: Batch) -> Tensor:
        """The sum over the heads and positions of one attention."""


class FocusSpec(ShapingSpec, kind="focus"):
    """L_focus = 1/KTL · Σ_lkt H(α[l, k, t, ·]), the mean entropy of attention"""

    def total(self, record: SiteRecord, batch: Batch) -> Tensor:
        return record.total(record.attention.statistics.entropy, self.heads)


class NearSpec(ShapingSpec, kind="near"):
    """L_near = 1/KTL · Σ_lkt₁ min(L_max, Σ_t₂ α[l, k, t₁, t₂] (t₁ − t₂)²)

    However long the text, a row costs at most L_max, so long-range attention stays possible. In cross-attention the
    positions of both texts are compared as they are.
    """

    where: Literal["self", "cross", "all"] = field("self", "self-attention, cross-attention or both")
    max_cost: float = field(100.0, "L_max, the highest cost of a row", gt=0)

    def total(self, record: SiteRecord, batch: Batch) -> Tensor:
        return record.total(record.attention.statistics.distance.clamp(0.0, self.max_cost), self.heads)


class GuidedSpec(ShapingSpec, kind="guided"):
    """−Σ_j t_ij ln α_ij, the mean over the rows i that have a target t

    Chen et al. 2016, arXiv 1607.01628: towards the source words aligned with the generated one. Strubell et al. 2018,
    arXiv 1804.08199: towards the head of each word. t is uniform over the tokens of the target words that are not
    masked; the root of a sentence is its own head.
    """

    by: Literal["alignment", "arcs"] = field("alignment", "the field of the data with the target links")
    toward: Literal["head", "dependents"] = field("head", "with arcs: from a word to its head, or to its dependents")
    relation: str | None = field(None, "with arcs: only this relation, by the field 'relations'", min_length=1)

    def sites(self, model: ModelSpec) -> list[AttentionSite]:
        where: Literal["self", "cross"] = "cross" if self.by == "alignment" else "self"
        if self.where not in ("all", where):
            raise IncompatibleError(f"{self.by} guides {where}-attention, given '{self.where}'", ("where",))
        return super().sites(model) if self.where == where else self.changed(where=where).sites(model)

    @property
    def fields(self) -> tuple[str, ...]:
        if self.by == "alignment":
            return ("source", "target", "alignment")
        return ("text", "arcs") if self.relation is None else ("text", "arcs", "relations")

    @property
    def name(self) -> str:
        return self.by if self.by == "alignment" else f"{self.toward} {self.relation or 'any'}"

    def check_task(self, task: TaskSpec) -> None:
        if self.by not in task.guides:
            raise IncompatibleError(f"'{self.by}' cannot guide the attention of the task {task.kind}", ("by",))

    def target_links(
        self, columns: Mapping[str, list[Any]], tokenizer: Any, limits: Mapping[str, int]
    ) -> list[AttentionTargets]:
        if self.by == "alignment":
            rows = targets_from_alignments(columns["source"], columns["target"], columns["alignment"], tokenizer)
            max_query, max_key = limits.get("target"), limits.get("source")
        else:
            arcs = columns["text"], columns["arcs"], columns.get("relations")
            rows = targets_from_arcs(*arcs, tokenizer, toward=self.toward, relation=self.relation)
            max_query = max_key = limits.get("text")
        return [truncate_targets(row, max_query, max_key) for row in rows]

    def rows(self, site: AttentionSite, model: Model, batch: Batch) -> int:
        row, query, _ = self.links(site, batch)
        return len(set(zip(row.tolist(), query.tolist(), strict=True)))

    def links(self, site: AttentionSite, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The links that the mask allows: (row, query, key)."""
        row, query, key = batch.links[self.name].unbind(1)
        visible = torch.ones_like(key, dtype=torch.bool)
        if site.mask.causal:
            visible &= key <= query
        if site.mask.window is not None:
            visible &= (query - key).abs() < site.mask.window
        if site.mask.prefix and batch.inputs.prefix is not None:
            visible |= key < batch.inputs.prefix[row]
        return row[visible], query[visible], key[visible]

    def total(self, record: SiteRecord, batch: Batch) -> Tensor:
        row, query, key = self.links(record.site, batch)
        here = (query >= record.first) & (query < record.first + record.attention.mask.num_queries)
        row, query, key = row[here], query[here] - record.first, key[here]
        _, target, count = torch.stack((row, query)).unique(dim=1, return_inverse=True, return_counts=True)
        logs_HN = record.attention.log_weights((row, query, key))
        return -((logs_HN if self.heads is None else logs_HN[list(self.heads)]) / count[target]).sum()


def add_links(batch: Batch, task: TaskSpec, tokens: SpecialTokens, links: dict[str, list[np.ndarray]]) -> Batch:
    """The batch with the links of its rows, N×2 each, shifted by the special tokens before a text.

    A target has the same special tokens as a source. Its words attend from the position whose output predicts them,
    which is that of the token before.
    """
    shift = np.array((0, *[task.tokens_before(tokens)] * 2))
    shifted = {}
    for name, rows in links.items():
        numbered = [np.insert(row, 0, index, axis=1) + shift for index, row in enumerate(rows)]
        shifted[name] = torch.from_numpy(np.concatenate(numbered))
    return replace(batch, links=shifted)


# --------------------------------------------------------------------------------------------------------------- sites


@lru_cache(maxsize=16)
def attention_sites(model: ModelSpec) -> tuple[AttentionSite, ...]:
    """Every attention of a model, in the order of its layers."""
    sites = []
    towers: tuple[Tower, ...] = ("encoder", "decoder")
    for tower in towers:
        stack = getattr(model, tower)
        for i, layer in enumerate(stack.expanded_layers() if stack else ()):
            name = f"{tower}.layers.{i // stack.group_size}"
            sites.append(AttentionSite(f"{name}.attention", "self", tower, i, layer.attention.heads, layer.mask))
            if layer.cross is not None:
                heads = (layer.cross.attention or layer.attention).heads
                sites.append(AttentionSite(f"{name}.cross", "cross", tower, i, heads, MaskSpec()))
    if model.recurrent is not None and model.recurrent.source and model.recurrent.attention:
        sites.append(AttentionSite("core", "cross", "decoder", 0, 1, MaskSpec()))
    return tuple(sites)


def tower_inputs(site: AttentionSite, model: Model, batch: Batch) -> Iterator[Inputs]:
    """What a tower reads, as it lays it out; a single tower also reads the second text of a pair."""
    has_both = model.spec.encoder is not None and model.spec.decoder is not None
    inputs = [batch.inputs, batch.source]
    if has_both or model.spec.recurrent is not None:
        inputs = [batch.source] if site.tower == "encoder" else [batch.inputs]
    stack = getattr(model, site.tower, None)
    for one in inputs:
        if one is not None:
            yield stack.embed.prepare_inputs(one) if isinstance(stack, Stack) else one


def site_records(model: ModelSpec, recorded: Sequence[RecordedAttention], batch: Batch) -> list[SiteRecord]:
    """The recorded attentions with their sites. A recurrent network attends once per generated token."""
    by_name: dict[str, list[AttentionSite]] = {}
    for site in attention_sites(model):
        by_name.setdefault(site.name, []).append(site)
    records, calls, padding = [], Counter[str](), batch.inputs.padding
    for attention in recorded:
        call = calls[attention.name]
        calls[attention.name] += 1
        if model.recurrent is not None:
            site, first = by_name[attention.name][0], call
            real = None if padding is None else ~padding[:, first : first + 1]
        else:
            site, first = by_name[attention.name][call % len(by_name[attention.name])], 0
            if site.where == "self":  # the cross-attention after it has the same queries
                padding = attention.mask.padding_BM
            real = None if padding is None else ~padding
        records.append(SiteRecord(site, attention, real, first))
    return records


# ---------------------------------------------------------------------------------------------------------------- loss


def term_names(shaping: Sequence[ShapingSpec]) -> list[str]:
    """The name of each term: its kind, with a number if there are several of it."""
    kinds = [spec.kind for spec in shaping]
    return [kind if kinds.count(kind) == 1 else f"{kind}-{kinds[:i].count(kind) + 1}" for i, kind in enumerate(kinds)]


def shaped_loss(task: TaskSpec, shaping: Sequence[ShapingSpec], model: Model, batch: Batch) -> Loss:
    """The task's loss, with the terms of the same forward pass."""
    if not shaping:
        return task.loss(model, batch)
    with record(model) as recorded:
        loss = task.loss(model, batch)
    records = site_records(model.spec, recorded, batch)
    terms = {name: spec.loss(model, records, batch) for name, spec in zip(term_names(shaping), shaping, strict=True)}
    return replace(loss, terms=terms)


def term_counts(shaping: Sequence[ShapingSpec], model: Model, batches: Sequence[Batch]) -> dict[str, int]:
    """The divisor of each term over all batches of a step."""
    return {
        name: sum(spec.count(model, batch) for batch in batches)
        for name, spec in zip(term_names(shaping), shaping, strict=True)
    }


def total_loss(loss: Loss, count: int, shaping: Sequence[ShapingSpec], counts: dict[str, int]) -> Tensor:
    """L + Σ λ·L_term, each sum divided by its own count. At λ = 0 nothing is added, not even zeros."""
    total = loss.sum / count
    for spec, (name, term) in zip(shaping, loss.terms.items(), strict=True):
        if spec.weight:
            total = total + spec.weight * term.sum / max(1, counts[name])
    return total
