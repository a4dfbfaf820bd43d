"""Auxiliary losses on the attention weights, added to any task's loss: L_total = L + Σ λ·L_auxiliary.

Forward hooks record queries and keys during the task's own forward pass; the attention matrix is never computed whole.
"""

from __future__ import annotations

from abc import abstractmethod
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
from manyheads.model.builder import Model
from manyheads.model.recording import RecordedAttention, record
from manyheads.model.spec import ModelSpec
from manyheads.model.stack import Stack
from manyheads.parts.inputs import Inputs
from manyheads.parts.mask import MaskSpec
from manyheads.spec import Part, field
from manyheads.tasks.batch import Batch, Loss, SpecialTokens
from manyheads.tasks.task import TaskSpec

StackName = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class AttentionLayer:
    """One self- or cross-attention of a model, as its spec describes it."""

    name: str  # the name that `record` gives it
    where: Literal["self", "cross"]
    stack: StackName
    index: int
    heads: int
    mask: MaskSpec


@dataclass(frozen=True)
class RecordedQueries:
    """The queries of a recorded attention: its layer, a mask that is False at padding (B×L), the first position."""

    layer: AttentionLayer
    attention: RecordedAttention
    query_mask: Tensor | None
    query_offset: int = 0

    def total(self, rows_BHL: Tensor, heads: Sequence[int] | None) -> Tensor:
        """Returns the sum over the heads and the non-padding queries."""
        rows_BHL = rows_BHL if heads is None else rows_BHL[:, list(heads)]
        return (rows_BHL if self.query_mask is None else rows_BHL.masked_fill(~self.query_mask[:, None], 0.0)).sum()


class AuxiliaryLossSpec(Part, slot="auxiliary_loss"):
    """A loss on the attention weights that is added to the task's loss."""

    weight: float = field(0.1, "λ; at 0 the loss is only logged", ge=0)
    where: Literal["self", "cross", "all"] = field("all", "self-attention, cross-attention or both")
    stack: StackName | None = field(None, "stack of the queries [default: both]")
    layers: tuple[StrictInt, ...] | None = field(
        None, "indices of layers, from 0 [default: all]", strict=False, min_length=1
    )
    heads: tuple[StrictInt, ...] | None = field(
        None, "indices of heads, from 0 [default: all]", strict=False, min_length=1
    )
    reduction: Literal["mean", "batchmean"] = field(
        "mean", "mean over heads, queries and layers; or their sum, averaged over the texts of a batch"
    )

    def select_layers(self, model: ModelSpec) -> list[AttentionLayer]:
        """Returns the attentions that the loss applies to; raises if there are none."""
        candidates = [
            layer
            for layer in attention_layers(model)
            if self.where in ("all", layer.where) and self.stack in (None, layer.stack)
        ]
        if not candidates:
            name = "attention" if self.where == "all" else f"{self.where}-attention"
            stack = f" in the {self.stack}" if self.stack else ""
            raise IncompatibleError(f"{self.kind} needs {name}{stack}, and this model has none")
        for name, indices, count in (
            ("layers", self.layers, max(layer.index for layer in candidates) + 1),
            ("heads", self.heads, min(layer.heads for layer in candidates)),
        ):
            if wrong := [index for index in indices or () if not 0 <= index < count]:
                raise OutOfRangeError(f"given {wrong[0]}, expected 0 to {count - 1}", (name,))
            if indices and len(set(indices)) < len(indices):
                raise ConfigError("an index is repeated", (name,))
        layers = [layer for layer in candidates if self.layers is None or layer.index in self.layers]
        if not layers:
            raise IncompatibleError(f"{self.kind} has no attention in these layers", ("layers",))
        return layers

    def check_task(self, task: TaskSpec) -> None:
        """Raises if the loss cannot be added to this task."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that the data must have for the attention targets; () if the loss needs none."""
        return ()

    @property
    def name(self) -> str:
        """The key of the attention targets in a batch."""
        return self.kind

    def attention_targets(
        self, columns: Mapping[str, list[Any]], tokenizer: Any, limits: Mapping[str, int]
    ) -> list[AttentionTargets]:
        """Returns the attention targets of each training row, from its fields; texts are truncated to `limits`."""
        raise NotImplementedError

    def count(self, model: Model, batch: Batch) -> int:
        """Returns the divisor before the forward pass: heads × non-padding queries × layers, or the number of texts."""
        if self.reduction == "batchmean":
            return batch.inputs.batch_size
        layers = self.select_layers(model.spec)
        return sum(self.num_queries(layer, model, batch) * len(self.heads or range(layer.heads)) for layer in layers)

    def num_queries(self, layer: AttentionLayer, model: Model, batch: Batch) -> int:
        """Returns the number of queries that the loss is a mean over."""
        return sum(inputs.num_tokens for inputs in stack_inputs(layer, model, batch))

    def loss(self, model: Model, records: Sequence[RecordedQueries], batch: Batch) -> Loss:
        layers = set(self.select_layers(model.spec))
        totals = [self.total(record, batch) for record in records if record.layer in layers]
        return Loss(torch.stack(totals).sum(), self.count(model, batch))

    @abstractmethod
    def total(self, record: RecordedQueries, batch: Batch) -> Tensor:
        """Returns the sum of the loss over the heads and positions of one attention."""


class FocusSpec(AuxiliaryLossSpec, kind="focus"):
    """L_focus = 1/KTL · Σ_lkt H(α[l, k, t, ·]), the mean entropy"""

    def total(self, record: RecordedQueries, batch: Batch) -> Tensor:
        return record.total(record.attention.entropy, self.heads)


class NearSpec(AuxiliaryLossSpec, kind="near"):
    """L_near = 1/KTL · Σ_lkt₁ min(L_max, Σ_t₂ α[l, k, t₁, t₂] (t₁ − t₂)²)

    The cost of a query is at most L_max, so long-range attention stays possible. In cross-attention the
    positions of both texts are compared as they are.
    """

    where: Literal["self", "cross", "all"] = field("self", "self-attention, cross-attention or both")
    max_cost: float = field(100.0, "L_max, the highest cost of a query", gt=0)

    def total(self, record: RecordedQueries, batch: Batch) -> Tensor:
        return record.total(record.attention.squared_distance.clamp(0.0, self.max_cost), self.heads)


class GuidedSpec(AuxiliaryLossSpec, kind="guided"):
    """Guided attention: −Σ_j t_ij ln α_ij, the mean over the queries i that have a target t

    Chen et al. 2016, arXiv 1607.01628, guide attention to the source words aligned with the generated one. Strubell
    et al. 2018, arXiv 1804.08199, guide it to the head of each word. t is uniform over the tokens of the target words
    that are not masked; the root of a sentence is its own head.
    """

    by: Literal["alignment", "arcs"] = field("alignment", "the field of the data with the attention targets")
    toward: Literal["head", "dependents"] = field(
        "head", "with arcs: to the syntactic head of a word, or to its dependents"
    )
    relation: str | None = field(None, "with arcs: only this relation, by the field 'relations'", min_length=1)

    def select_layers(self, model: ModelSpec) -> list[AttentionLayer]:
        where: Literal["self", "cross"] = "cross" if self.by == "alignment" else "self"
        if self.where not in ("all", where):
            raise IncompatibleError(f"{self.by} guides {where}-attention, given '{self.where}'", ("where",))
        return super().select_layers(model) if self.where == where else self.replace(where=where).select_layers(model)

    @property
    def fields(self) -> tuple[str, ...]:
        if self.by == "alignment":
            return ("source", "target", "alignment")
        return ("text", "arcs") if self.relation is None else ("text", "arcs", "relations")

    @property
    def name(self) -> str:
        return self.by if self.by == "alignment" else f"{self.toward} {self.relation!r}"

    def check_task(self, task: TaskSpec) -> None:
        if self.by not in task.attention_target_fields:
            raise IncompatibleError(f"'{self.by}' cannot guide the attention of the task {task.kind}", ("by",))

    def attention_targets(
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

    def num_queries(self, layer: AttentionLayer, model: Model, batch: Batch) -> int:
        row, query, _ = self.visible_targets(layer, batch)
        return len(set(zip(row.tolist(), query.tolist(), strict=True)))

    def visible_targets(self, layer: AttentionLayer, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the attention targets that the mask allows, as (row, query, key)."""
        row, query, key = batch.attention_targets[self.name].unbind(1)
        visible = torch.ones_like(key, dtype=torch.bool)
        if layer.mask.causal:
            visible &= key <= query
        if layer.mask.window is not None:
            visible &= (query - key).abs() < layer.mask.window
        if layer.mask.prefix and batch.inputs.prefix_lengths is not None:
            visible |= key < batch.inputs.prefix_lengths[row]
        return row[visible], query[visible], key[visible]

    def total(self, record: RecordedQueries, batch: Batch) -> Tensor:
        row, query, key = self.visible_targets(record.layer, batch)
        is_recorded = (query >= record.query_offset) & (query < record.query_offset + record.attention.mask.num_queries)
        row, query, key = row[is_recorded], query[is_recorded] - record.query_offset, key[is_recorded]
        _, target, count = torch.stack((row, query)).unique(dim=1, return_inverse=True, return_counts=True)
        logs_HN = record.attention.log_weights((row, query, key))
        return -((logs_HN if self.heads is None else logs_HN[list(self.heads)]) / count[target]).sum()


def add_attention_targets(
    batch: Batch, task: TaskSpec, special_tokens: SpecialTokens, targets: dict[str, list[np.ndarray]]
) -> Batch:
    """Adds the attention targets of the rows, N×2 each, to the batch, shifted by the special tokens before a text.

    A target has the same special tokens as a source. A target token's query is at the position that predicts it, one to
    its left.
    """
    shift = np.array((0, *[task.num_prefix_tokens(special_tokens)] * 2))
    attention_targets = {}
    for name, rows in targets.items():
        row_targets = [np.insert(row, 0, index, axis=1) + shift for index, row in enumerate(rows)]
        attention_targets[name] = torch.from_numpy(np.concatenate(row_targets))
    return replace(batch, attention_targets=attention_targets)


# --------------------------------------------------------------------------------------------------------------- layers


@lru_cache(maxsize=16)
def attention_layers(model: ModelSpec) -> tuple[AttentionLayer, ...]:
    """Returns every attention of a model, in the order of its layers."""
    layers = []
    names: tuple[StackName, ...] = ("encoder", "decoder")
    for stack in names:
        spec = getattr(model, stack)
        for i, layer in enumerate(spec.expanded_layers() if spec else ()):
            name = f"{stack}.layers.{i}"
            layers.append(AttentionLayer(f"{name}.attention", "self", stack, i, layer.attention.heads, layer.mask))
            if layer.cross is not None:
                heads = (layer.cross.attention or layer.attention).heads
                layers.append(AttentionLayer(f"{name}.cross", "cross", stack, i, heads, MaskSpec()))
    if model.recurrent is not None and model.recurrent.source and model.recurrent.attention:
        layers.append(AttentionLayer("core", "cross", "decoder", 0, 1, MaskSpec()))
    return tuple(layers)


def stack_inputs(layer: AttentionLayer, model: Model, batch: Batch) -> Iterator[Inputs]:
    """Yields the inputs of a stack after `embed.prepare_inputs`; a single stack also reads a pair's second text."""
    has_both = model.spec.encoder is not None and model.spec.decoder is not None
    all_inputs = [batch.inputs, batch.source]
    if has_both or model.spec.recurrent is not None:
        all_inputs = [batch.source] if layer.stack == "encoder" else [batch.inputs]
    stack = getattr(model, layer.stack, None)
    for inputs in all_inputs:
        if inputs is not None:
            yield stack.embed.prepare_inputs(inputs) if isinstance(stack, Stack) else inputs


def attention_records(model: ModelSpec, attentions: Sequence[RecordedAttention], batch: Batch) -> list[RecordedQueries]:
    """Pairs the recorded attentions with their layers. A recurrent network attends once per generated token."""
    layers = {layer.name: layer for layer in attention_layers(model)}
    records, padding_mask = [], batch.inputs.padding_mask
    for call, attention in enumerate(attentions):
        layer, first = layers[attention.name], 0
        if model.recurrent is not None:
            first = call
            query_mask = None if padding_mask is None else ~padding_mask[:, first : first + 1]
        else:
            if layer.where == "self":  # the cross-attention after it has the same queries
                padding_mask = attention.mask.padding_BM
            query_mask = None if padding_mask is None else ~padding_mask
        records.append(RecordedQueries(layer, attention, query_mask, first))
    return records


# ---------------------------------------------------------------------------------------------------------------- loss


def auxiliary_names(auxiliary_losses: Sequence[AuxiliaryLossSpec]) -> list[str]:
    """Returns the name of each auxiliary loss: its kind, with a number if several have this kind."""
    kinds = [spec.kind for spec in auxiliary_losses]
    return [kind if kinds.count(kind) == 1 else f"{kind}-{kinds[:i].count(kind) + 1}" for i, kind in enumerate(kinds)]


def loss_with_auxiliary(
    task: TaskSpec, auxiliary_losses: Sequence[AuxiliaryLossSpec], model: Model, batch: Batch
) -> Loss:
    """Returns the task's loss, with the auxiliary losses of the same forward pass."""
    if not auxiliary_losses:
        return task.loss(model, batch)
    with record(model, activations=False) as attentions:
        loss = task.loss(model, batch)
    records = attention_records(model.spec, attentions, batch)
    losses = {
        name: spec.loss(model, records, batch)
        for name, spec in zip(auxiliary_names(auxiliary_losses), auxiliary_losses, strict=True)
    }
    return replace(loss, auxiliary_losses=losses)


def auxiliary_counts(
    auxiliary_losses: Sequence[AuxiliaryLossSpec], model: Model, batches: Sequence[Batch]
) -> dict[str, int]:
    """Returns the divisor of each auxiliary loss over all batches of a step."""
    return {
        name: sum(spec.count(model, batch) for batch in batches)
        for name, spec in zip(auxiliary_names(auxiliary_losses), auxiliary_losses, strict=True)
    }


def total_loss(loss: Loss, count: int, auxiliary_losses: Sequence[AuxiliaryLossSpec], counts: dict[str, int]) -> Tensor:
    """Returns L + Σ λ·L_auxiliary, each sum divided by its own count. One with λ = 0 is not added."""
    total = loss.sum / count
    for spec, (name, auxiliary) in zip(auxiliary_losses, loss.auxiliary_losses.items(), strict=True):
        if spec.weight:
            total = total + spec.weight * auxiliary.sum / max(1, counts[name])
    return total
