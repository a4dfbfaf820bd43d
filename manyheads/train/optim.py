"""How weights change: the optimiser, which weights decay, and the rate at every step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from manyheads.spec import Part, Spec, field


class ScheduleSpec(Part, slot="schedule", default="cosine"):
    """The rate at a step, as a share of the highest."""

    warmup: int = field(100, "steps in which the rate rises from 0", ge=0)

    def share(self, step: int, steps: int) -> float:
        """At step 1, 2, … of so many."""
        if step < self.warmup:
            return step / self.warmup
        return self.after(step, steps)

    @abstractmethod
    def after(self, step: int, steps: int) -> float: ...

    def progress(self, step: int, steps: int) -> float:
        """From 0 behind the warm-up to 1 at the end."""
        return min(1.0, (step - self.warmup) / max(1, steps - self.warmup))


class InverseRootSpec(ScheduleSpec, kind="inverse-root"):
    """√(w / t) behind the warm-up of w steps

    Vaswani et al. 2017, arXiv 1706.03762, with the highest rate said outright.
    """

    def after(self, step: int, steps: int) -> float:
        return math.sqrt(max(1, self.warmup) / max(1, step))


class CosineSpec(ScheduleSpec, kind="cosine"):
    """l + (1 − l)(1 + cos πp)/2 for progress p

    Loshchilov and Hutter 2016, arXiv 1608.03983.
    """

    least: float = field(0.1, "l, the share that is left at the end", ge=0, le=1)

    def after(self, step: int, steps: int) -> float:
        return self.least + (1 - self.least) * (1 + math.cos(math.pi * self.progress(step, steps))) / 2


class LinearSpec(ScheduleSpec, kind="linear"):
    """1 − (1 − l)p for progress p"""

    least: float = field(0.0, "l, the share that is left at the end", ge=0, le=1)

    def after(self, step: int, steps: int) -> float:
        return 1 - (1 - self.least) * self.progress(step, steps)


class StableSpec(ScheduleSpec, kind="stable"):
    """1 until the last share of steps, then down to 0 in a straight line (warm-up, stable, decay)

    Hu et al. 2024, arXiv 2404.06395.
    """

    decay: float = field(0.2, "the share of steps at the end in which the rate falls", ge=0, le=1)

    def after(self, step: int, steps: int) -> float:
        falling = self.decay * steps
        return 1.0 if falling == 0 else min(1.0, max(0.0, (steps - step) / falling))


class OptimSpec(Spec):
    """AdamW: Loshchilov and Hutter 2017, arXiv 1711.05101."""

    rate: float = field(1e-3, "the highest rate", gt=0, le=100)
    schedule: ScheduleSpec = field(CosineSpec(), "the rate over time")
    decay: float = field(0.01, "weight decay, of matrices alone", ge=0, le=1)
    first: float = field(0.9, "β₁, the memory of gradients", ge=0, lt=1)
    second: float = field(0.98, "β₂, the memory of their squares", ge=0, lt=1)
    eps: float = field(1e-9, "ε under the fraction", gt=0)
    clip: float = field(1.0, "the longest that all gradients together may be; 0 for any length", ge=0)


def optimiser(model: nn.Module, spec: OptimSpec) -> torch.optim.AdamW:
    """Matrices decay; biases, gains and what else has one axis do not."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for _, parameter in named if parameter.dim() >= 2], "weight_decay": spec.decay},
        {"params": [parameter for _, parameter in named if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=spec.rate, betas=(spec.first, spec.second), eps=spec.eps, fused=True
    )


def gradient_length(parameters: Iterable[nn.Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
