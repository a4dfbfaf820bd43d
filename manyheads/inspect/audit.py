"""Audits a model for invariants such as causality, for models of this package and of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.checkpoint.loading import load
from manyheads.errors import UsageError
from manyheads.inspect.audit_models import AuditedModel, ManyheadsModel, TransformersModel
from manyheads.model.builder import Model

TOLERANCE = 1e-4  # largest difference that rounding can cause
MAX_TABLE = 4096  # longest position table for which an input that is too long is tried

Status = Literal["passed", "failed", "skipped"]
Result = tuple[Status, float | None, str]


@dataclass(frozen=True)
class AuditRow:
    """The result of one check, with its status, the measured value, and an explanation."""

    check: str
    status: Status
    value: float | None
    message: str


def audit(target: Any) -> list[AuditRow]:
    """Runs every check on a path, a checkpoint, a model of this package or a model of transformers."""
    if isinstance(target, str | Path):
        checkpoint = load(target, dtype=torch.float32)
        return [*run_checks(ManyheadsModel(checkpoint, checkpoint.path))]
    if isinstance(target, Checkpoint | Model):
        checkpoint = target if isinstance(target, Checkpoint) else Checkpoint(target)
        with evaluation_mode(checkpoint.model):
            return [*run_checks(ManyheadsModel(checkpoint))]
    if hasattr(target, "config") and hasattr(target, "forward"):
        with evaluation_mode(target):
            return [*run_checks(TransformersModel(target))]
    raise UsageError(f"given a {type(target).__name__}, expected a path, a checkpoint or a model")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode, and afterwards every module into the mode it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def run_checks(model: AuditedModel) -> Iterator[AuditRow]:
    """Runs every check. A check that raises has failed."""
    for name, check in CHECKS.items():
        try:
            yield AuditRow(name, *check(model))
        except Exception as error:
            message = f"could not be run: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
            yield AuditRow(name, "failed", None, message)


def skipped(reason: str) -> Result:
    return "skipped", None, reason


def compare_with_tolerance(worst: float, good: str, bad: str, tolerance: float = TOLERANCE) -> Result:
    """Fails if the largest difference is above the tolerance or not finite."""
    if not math.isfinite(worst):
        return "failed", None, "the output is NaN or infinite"
    return ("passed", worst, good) if worst <= tolerance else ("failed", worst, bad)


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, divided by the standard deviation of `a`."""
    a, b = a.float().cpu(), b.float().cpu()
    return float((a - b).abs().max() / (a.std() if a.numel() > 1 else a.abs().max()).clamp(min=1e-6))


def largest(values: Iterable[Tensor | float]) -> float:
    """The maximum, or NaN if one value is NaN, which Python's `max` may ignore."""
    return float(torch.tensor([float(value) for value in values]).max())


def decoder_logits(model: AuditedModel, source: Tensor | None, ids: Tensor) -> Tensor:
    return model.logits(ids) if source is None else model.logits(source, target=ids)


# -------------------------------------------------------------------------------------------------------------- checks


def rows_sum_to_one(model: AuditedModel) -> Result:
    attention = model.attention(model.random_ids(), model.random_target())
    if not attention:
        return skipped("the model does not return its attention weights")
    worst = largest((weights.float().sum(-1) - 1).abs().max() for weights in attention)
    count = sum(weights[..., 0].numel() for weights in attention)
    return compare_with_tolerance(
        worst, f"{count} rows", "rows do not sum to one: is a mask multiplied after the softmax?", 1e-3
    )


def causality(model: AuditedModel) -> Result:
    if not model.causal:
        return skipped("the model is not causal")
    if not model.per_token:
        return skipped("the model has one output per text, so causality cannot be observed")
    ids, source = model.random_ids(is_target=True), model.random_source()
    before, changes = decoder_logits(model, source, ids), [0.0]
    for position in range(1, ids.shape[1]):
        changed = ids.clone()
        changed[:, position] = (changed[:, position] + 1) % model.vocab
        changes.append(difference(before[:, :position], decoder_logits(model, source, changed)[:, :position]))
    return compare_with_tolerance(
        largest(changes), "changing a token changes no earlier output", "outputs depend on later tokens"
    )


def padding_is_ignored(model: AuditedModel, *, left: bool) -> Result:
    if model.image_size:
        return skipped("images are not padded")
    ids, padding, target = model.random_ids(1), model.random_ids(1, 4, seed=3), model.random_target(1)
    padded = torch.cat((padding, ids) if left else (ids, padding), dim=1)
    mask = torch.zeros_like(padded, dtype=torch.bool)
    mask[:, slice(0, 4) if left else slice(ids.shape[1], None)] = True
    alone = model.logits(ids, target=target)
    among = model.logits(padded, padding_mask=mask, target=target)
    if target is None and model.per_token:
        among = among[~mask][None]
    return compare_with_tolerance(
        difference(alone, among), "padding changes no output", "padding changes the outputs of non-padding tokens"
    )


def cached_equals_full(model: AuditedModel) -> Result:
    ids, source = model.random_ids(is_target=True), model.random_source()
    steps = None if model.image_size else model.stepwise(ids, source)
    if steps is None:
        return skipped("the model does not generate")
    worst = difference(decoder_logits(model, source, ids), steps)
    return compare_with_tolerance(
        worst, "cached decoding gives the logits of the full forward", "cached decoding gives other logits"
    )


def batch_invariance(model: AuditedModel) -> Result:
    ids, target = model.random_ids(3), model.random_target(3)
    together = model.logits(ids, target=target)
    alone = [model.logits(ids[i : i + 1], target=None if target is None else target[i : i + 1]) for i in range(3)]
    worst = difference(together, torch.cat(alone))
    return compare_with_tolerance(
        worst, "a text has the same output alone and in a batch", "texts of a batch change each other's outputs"
    )


def tied_weights(model: AuditedModel) -> Result:
    pair = model.tied()
    if isinstance(pair, str):
        return skipped(pair)
    worst = float((pair[0] - pair[1]).abs().max())
    return compare_with_tolerance(
        worst, "head and embedding are equal", "the config ties head and embedding, but they differ", 0.0
    )


def live_heads(model: AuditedModel) -> Result:
    ids, target = model.random_ids(), model.random_target()
    attention = model.attention(ids, target)
    if not attention:
        return skipped("the model does not give its attention weights")
    if attention[0].shape[-1] == 1:
        return skipped("an input of one token does not distinguish heads")
    dead = model.count_dead_heads(ids, target) or 0
    duplicates = sum(
        int(torch.equal(weights[:, head], weights[:, other]))
        for weights in attention
        for head in range(weights.shape[1])
        for other in range(head)
    )
    if dead or duplicates:
        return "failed", float(dead + duplicates), f"{duplicates} heads duplicate another, {dead} contribute nothing"
    return "passed", 0.0, "every head differs from the others and contributes"


def too_long_is_refused(model: AuditedModel) -> Result:
    limit = model.max_positions
    if model.image_size:
        return skipped("all images have the same size")
    if limit is None or limit > MAX_TABLE:
        return skipped(f"the number of positions is unlimited, or above {MAX_TABLE:,}")
    try:
        logits = model.logits(torch.zeros(1, limit + 1, dtype=torch.long), target=model.random_target(1))
    except (ValueError, IndexError, RuntimeError) as error:
        return "passed", float(limit), f"refused past {limit}: {' '.join(str(error).split())}"
    result = "an output" if logits.isfinite().all() else "NaN or infinity"
    return "failed", float(limit), f"an input longer than {limit} tokens gives {result} instead of an error"


def tokenizer_fits(model: AuditedModel) -> Result:
    sizes = model.vocabulary_sizes()
    if sizes is None:
        return skipped("there is no tokenizer")
    count, vocab = sizes
    status: Status = "passed" if count <= vocab else "failed"
    return status, float(count - vocab), f"{count} tokens for a vocabulary of {vocab}"


def agrees_with_reference(model: AuditedModel) -> Result:
    reference = model.reference_implementation()
    if reference is None:
        return skipped("there is no reference implementation to compare with")
    name, logits = reference
    ids, target = model.random_ids(), model.random_target()
    worst = difference(model.logits(ids, target=target), logits(ids, target))
    return compare_with_tolerance(worst, f"the logits of {name}", f"the logits differ from those of {name}", 1e-3)


CHECKS: dict[str, Callable[[AuditedModel], Result]] = {
    "attention rows sum to one": rows_sum_to_one,
    "no dependence on later tokens": causality,
    "right padding is ignored": partial(padding_is_ignored, left=False),
    "left padding is ignored": partial(padding_is_ignored, left=True),
    "cached decoding equals full forward": cached_equals_full,
    "batch invariance": batch_invariance,
    "tied weights are equal": tied_weights,
    "no dead or duplicate heads": live_heads,
    "inputs that are too long are refused": too_long_is_refused,
    "tokenizer fits vocabulary": tokenizer_fits,
    "agrees with a reference implementation": agrees_with_reference,
}
