"""Small models for labs: their training in memory, their time, and what a change of a token changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
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


@torch.no_grad()
def add_noise(model: Model, std: float) -> Model:
    """The model with noise added to every weight, so that biases are not 0 and outputs differ; for evaluation."""
    for parameter in model.parameters():
        parameter.add_(std * torch.randn_like(parameter))
    return model.eval()


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=True)
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


def next_token_loss(model: nn.Module, ids: Tensor, *, first: int = 1) -> Tensor:
    """The mean −ln p of each token from index `first` on, given all tokens before it."""
    logits: Tensor = model(ids[:, :-1])[:, first - 1 :]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, first:].flatten())


@torch.no_grad()
def fastest(run: Callable[[], object], repeats: int) -> float:
    """The seconds of the shortest of some runs."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def count_calls(model: nn.Module, name: str, ids: Tensor) -> int:
    """How often a module runs in one forward pass."""
    calls: list[None] = []
    handle = model.get_submodule(name).register_forward_hook(lambda *_: calls.append(None))
    model(ids)
    handle.remove()
    return len(calls)


@torch.no_grad()
def output_changes(model: Callable[..., Tensor], ids: Tensor, *rest: Tensor, vocab: int) -> Tensor:
    """The largest change of each output of one text, one per row, if each token changes, one per column."""
    before, columns = model(ids, *rest), []
    for j in range(ids.shape[1]):
        changed = ids.clone()
        changed[0, j] = (ids[0, j] + 1) % vocab
        columns.append((model(changed, *rest) - before)[0].abs().amax(-1))
    return torch.stack(columns, dim=-1)
