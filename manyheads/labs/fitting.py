"""Small models for labs, and their training in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from manyheads.labs.lab import OnProgress, no_progress
from manyheads.model.builder import Model, build
from manyheads.model.spec import read_model
from manyheads.spec import Tree, merge_trees

Batch = TypeVar("Batch")


def small_model(
    stack: str = "decoder", *, vocab: int = 16, seed: int = 0, head: Any = "tied", init: Any = "normal", **fields: Any
) -> Model:
    """A model with one stack: pre-norm, two layers, width 32 and two heads, unless the fields of the stack say more."""
    base: Tree = {
        "layers": 2, "width": 32, "attention": {"kind": "heads", "heads": 2}, "position": "none",
        "mask": {"causal": stack == "decoder"}, "residual": "pre",
        "feedforward": {"kind": "mlp", "hidden": 128},
    }  # fmt: skip
    return build(read_model({"vocab": vocab, stack: merge_trees(base, fields), "head": head, "init": init}), seed=seed)


def fit(
    model: nn.Module,
    batch: Callable[[int], Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    *,
    steps: int,
    lr: float = 3e-3,
    warmup_steps: int = 20,
    progress: OnProgress = no_progress,
    name: str = "step",
) -> list[float]:
    """Trains with AdamW, a linear warm-up and a cosine to zero; returns the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup_steps, total_iters=warmup_steps)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warmup_steps))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [warmup_steps])
    losses = []
    model.train()
    for step in range(steps):
        value = loss(model, batch(step))
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(value.detach()))
        progress(name, step + 1, steps)
    model.eval()
    return losses
