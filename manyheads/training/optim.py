"""Optimizers, learning rate schedules, and the moving average of the weights (EMA)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.spec import Part, field

# ----------------------------------------------------------------------------------------------------------- schedules


class ScheduleSpec(Part, slot="schedule", default="cosine"):
    """The learning rate over time, as a factor of optim.lr."""

    warmup_steps: int = field(100, "steps in which the learning rate rises linearly from 0", ge=0)

    def factor(self, step: int, steps: int) -> float:
        """Returns the factor for step 1, 2, … of `steps`; it is never 0, because such a step would not train."""
        return step / self.warmup_steps if step <= self.warmup_steps else self.after_warmup(step, steps)

    @abstractmethod
    def after_warmup(self, step: int, steps: int) -> float:
        """Returns the factor after the warm-up."""

    def progress(self, step: int, steps: int) -> float:
        """Returns 0 at the first step after the warm-up, and 1 at the step after the last one."""
        return min(1.0, (step - 1 - self.warmup_steps) / max(1, steps - self.warmup_steps))


class InverseSqrtSpec(ScheduleSpec, kind="inverse-sqrt"):
    """√(w / t) after the warm-up of w steps

    Vaswani et al. 2017, arXiv 1706.03762; here the peak is optim.lr instead of a function of the width.
    """

    def after_warmup(self, step: int, steps: int) -> float:
        return math.sqrt(max(1, self.warmup_steps) / max(1, step))


class CosineSpec(ScheduleSpec, kind="cosine"):
    """m + (1 − m)(1 + cos πp)/2 for progress p

    Loshchilov and Hutter 2016, arXiv 1608.03983.
    """

    min_lr_ratio: float = field(0.1, "m, the last learning rate as a fraction of lr", ge=0, le=1)

    def after_warmup(self, step: int, steps: int) -> float:
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * self.progress(step, steps))) / 2


class LinearSpec(ScheduleSpec, kind="linear"):
    """1 − (1 − m)p for progress p"""

    min_lr_ratio: float = field(0.0, "m, the last learning rate as a fraction of lr", ge=0, le=1)

    def after_warmup(self, step: int, steps: int) -> float:
        return 1 - (1 - self.min_lr_ratio) * self.progress(step, steps)


class WarmupStableDecaySpec(ScheduleSpec, kind="warmup-stable-decay"):
    """1 until the last part of the steps, then linearly towards 0

    Hu et al. 2024, arXiv 2404.06395.
    """

    decay_fraction: float = field(
        0.2, "fraction of all steps, at the end, in which the learning rate falls", ge=0, le=1
    )

    def after_warmup(self, step: int, steps: int) -> float:
        decay_steps = self.decay_fraction * steps
        return 1.0 if decay_steps == 0 else min(1.0, max(0.0, (steps + 1 - step) / decay_steps))


# ---------------------------------------------------------------------------------------------------------- optimizers


class OptimSpec(Part, slot="optim", default="adamw"):
    """The optimizer. Weight decay applies to matrices only, not to biases, gains and other vectors."""

    lr: float = field(1e-3, "peak learning rate", gt=0, le=100)
    schedule: ScheduleSpec = field(CosineSpec(), "learning rate schedule")
    weight_decay: float = field(0.01, "weight decay of matrices", ge=0, le=1)
    beta1: float = field(0.9, "β₁, decay rate of the mean of gradients", ge=0, lt=1)
    beta2: float = field(0.98, "β₂, decay rate of the mean of squared gradients", ge=0, lt=1)
    eps: float = field(1e-9, "ε, added to the denominator", gt=0)
    clip: float = field(1.0, "maximum norm of all gradients together; 0 disables clipping", ge=0)
    ema_decay: float = field(
        0.0, "decay rate of a moving average of the weights, which is evaluated and saved; 0 disables it", ge=0, lt=1
    )

    @abstractmethod
    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer of a model's trainable weights."""

    def adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """Returns AdamW with a group for matrices and one for vectors, or an empty group without parameters."""
        all_parameters = list(parameters)
        split = (
            ([p for p in all_parameters if (p.dim() >= 2) == decays], self.weight_decay * decays)
            for decays in (True, False)
        )
        groups = [{"params": params, "weight_decay": decay} for params, decay in split if params] or [{"params": []}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)


class AdamWSpec(OptimSpec, kind="adamw"):
    """w ← w − η (m̂ / (√v̂ + ε) + λw)

    Loshchilov and Hutter 2017, arXiv 1711.05101.
    """

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.adamw(trainable(model))


class MuonSpec(OptimSpec, kind="muon"):
    """W ← W − η (0.2 √max(n, m) · UVᵀ + λW) for the matrices inside layers, with UΣVᵀ the momentum; AdamW for the rest

    Jordan et al. 2024; scaled so that learning rates of AdamW fit: Liu et al. 2025, arXiv 2502.16982.
    """

    momentum: float = field(0.95, "decay rate of the mean of gradients of those matrices", ge=0, lt=1)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        hidden = {id(weight) for weight in hidden_matrices(model)}
        matrices = [weight for weight in trainable(model) if id(weight) in hidden]
        adamw = self.adamw(weight for weight in trainable(model) if id(weight) not in hidden)
        return Muon(matrices, adamw, lr=self.lr, weight_decay=self.weight_decay, momentum=self.momentum)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def hidden_matrices(model: nn.Module) -> Iterator[Tensor]:
    """Yields the trainable weights of linear layers, except those of the head."""
    heads = {id(weight) for name, weight in model.named_parameters() if name.split(".")[0] == "head"}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad and id(module.weight) not in heads:
            yield module.weight


class Muon(torch.optim.Optimizer):
    """Updates some matrices by orthogonalized momentum, and all other parameters by another optimizer.

    torch's own Muon computes in bfloat16, which a CPU emulates; these float32 products are 10 × faster there.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        other_optimizer: torch.optim.Optimizer,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
    ) -> None:
        super().__init__([{"params": matrices}], {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.other_optimizer = other_optimizer
        self.other_optimizer.state = self.state
        # the same objects, so that a learning rate set here holds there
        self.param_groups += other_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        by_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}  # orthogonalized together
        for weight in group["params"]:
            if weight.grad is not None:
                mean = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                nesterov = weight.grad.lerp(mean, group["momentum"])
                by_shape.setdefault(weight.shape, []).append((weight, nesterov))
        for shape, pairs in by_shape.items():
            scale = 0.2 * max(shape) ** 0.5
            updates = orthogonalize(torch.stack([momentum for _, momentum in pairs]))
            for (weight, _), update in zip(pairs, updates, strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"] * scale)
        self.other_optimizer.step()


def orthogonalize(matrices: Tensor) -> Tensor:
    """Returns about UVᵀ for each UΣVᵀ, by five Newton–Schulz iterations; its singular values are between 0.7 and 1.2.

    Each iteration maps every singular value x to a x + b x³ + c x⁵, with the coefficients of Jordan et al. 2024.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


# ---------------------------------------------------------------------------------------------------------------- EMA

# Key of the averages in the optimizer's state of each weight. For evaluation and saving, the averages are swapped into
# the model, and the key holds the weights of training.
EMA = "ema"


@torch.no_grad()
def update_ema(optimizer: torch.optim.Optimizer, decay: float, step: int) -> None:
    """m ← βm + (1 − β)w, with β = min(decay, 1 − 1/step), which is the plain mean at first."""
    for weight, state in states(optimizer):
        if state:
            state.setdefault(EMA, weight.detach().clone()).lerp_(weight, 1 - min(decay, 1 - 1 / step))


@contextmanager
def ema_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Puts the averages into the model inside the block, if there are any."""
    swap_ema(optimizer)
    try:
        yield
    finally:
        swap_ema(optimizer)


def swap_ema(optimizer: torch.optim.Optimizer) -> None:
    """Exchanges the weights of the model with those in the optimizer's state."""
    for weight, state in states(optimizer):
        if EMA in state:
            state[EMA], weight.data = weight.data, state[EMA]


def restore_ema(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """A saved model holds the EMA weights; swaps the training weights back in.

    Without a decay the averages are dropped, because they are no longer updated.
    """
    swap_ema(optimizer)
    for state in optimizer.state.values() if not decay else ():
        state.pop(EMA, None)


def states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            yield weight, optimizer.state.get(weight, {})
