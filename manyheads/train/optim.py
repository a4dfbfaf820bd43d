"""How weights change: the optimiser, which weights decay, and the rate at every step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.spec import Part, field


class ScheduleSpec(Part, slot="schedule", default="cosine"):
    """The rate at a step, as a share of the highest."""

    warmup: int = field(100, "steps in which the rate rises from 0", ge=0)

    def share(self, step: int, steps: int) -> float:
        """At step 1, 2, … of so many; at none of them is it 0, for that would be a step that learns nothing."""
        return step / self.warmup if step <= self.warmup else self.after(step, steps)

    @abstractmethod
    def after(self, step: int, steps: int) -> float: ...

    def progress(self, step: int, steps: int) -> float:
        """From 0 at the first step behind the warm-up to 1 behind the last, where nothing is learned any more."""
        return min(1.0, (step - 1 - self.warmup) / max(1, steps - self.warmup))


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
    """1 until the last share of steps, then towards 0 in a straight line (warm-up, stable, decay)

    Hu et al. 2024, arXiv 2404.06395.
    """

    decay: float = field(0.2, "the share of steps at the end in which the rate falls", ge=0, le=1)

    def after(self, step: int, steps: int) -> float:
        falling = self.decay * steps
        return 1.0 if falling == 0 else min(1.0, max(0.0, (steps + 1 - step) / falling))


class OptimSpec(Part, slot="optim", default="adamw"):
    """How weights change. Matrices decay; biases, gains and what else has one axis do not."""

    rate: float = field(1e-3, "the highest rate", gt=0, le=100)
    schedule: ScheduleSpec = field(CosineSpec(), "the rate over time")
    decay: float = field(0.01, "weight decay, of matrices alone", ge=0, le=1)
    first: float = field(0.9, "β₁, the memory of gradients", ge=0, lt=1)
    second: float = field(0.98, "β₂, the memory of their squares", ge=0, lt=1)
    eps: float = field(1e-9, "ε under the fraction", gt=0)
    clip: float = field(1.0, "the longest that all gradients together may be; 0 for any length", ge=0)
    average: float = field(0.0, "the memory of a running mean of the weights, which is then looked at and saved; 0 for none", ge=0, lt=1)

    @abstractmethod
    def build(self, model: nn.Module) -> torch.optim.Optimizer: ...

    def groups(self, weights: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        known = list(weights)
        found = (([one for one in known if (one.dim() >= 2) == matrices], self.decay * matrices) for matrices in (True, False))
        return [{"params": some, "weight_decay": decay} for some, decay in found if some]

    def adamw(self, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
        return torch.optim.AdamW(groups, lr=self.rate, betas=(self.first, self.second), eps=self.eps, fused=True)


class AdamWSpec(OptimSpec, kind="adamw"):
    """w ← w − η (m̂ / (√v̂ + ε) + λw)

    Loshchilov and Hutter 2017, arXiv 1711.05101.
    """

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.adamw(self.groups(weights_of(model)))


class MuonSpec(OptimSpec, kind="muon"):
    """W ← W − η (0.2 √max(n, m) · UVᵀ + λW) for the matrices within layers, with UΣVᵀ their momentum; AdamW for everything else

    Jordan et al. 2024; scaled so that AdamW's rates fit: Liu et al. 2025, arXiv 2502.16982.
    """

    momentum: float = field(0.95, "the memory of a matrix's gradients", ge=0, lt=1)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        inner = {id(weight) for weight in matrices_of(model)}
        turned = [weight for weight in weights_of(model) if id(weight) in inner]
        rest = self.groups(weight for weight in weights_of(model) if id(weight) not in inner)
        # where only low ranks are learned nothing is left for AdamW, which must then be told so
        return Muon(turned, self.adamw(rest or [{"params": []}]), rate=self.rate, decay=self.decay, momentum=self.momentum)


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def matrices_of(model: nn.Module) -> Iterator[Tensor]:
    """The matrices that every token passes through: no table of tokens or places, and nothing of the head."""
    heads = {id(weight) for name, weight in model.named_parameters() if name.split(".")[0] == "head"}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad and id(module.weight) not in heads:
            yield module.weight


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, for some matrices; what remains is another optimiser's. To the caller both are one.

    torch's own works in bfloat16, which a processor emulates: 10 × slower there than these float32 products.
    """

    def __init__(self, turned: list[nn.Parameter], rest: torch.optim.Optimizer, *, rate: float, decay: float, momentum: float) -> None:
        super().__init__([{"params": turned}], {"lr": rate, "weight_decay": decay, "momentum": momentum})
        self.rest = rest
        self.rest.state = self.state
        self.param_groups += rest.param_groups  # the very same, so that a rate set here holds there

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        alike: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}  # by shape, so that many are turned at once
        for weight in group["params"]:
            if weight.grad is not None:
                held = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                held.lerp_(weight.grad, 1 - group["momentum"])
                ahead = weight.grad.lerp(held, group["momentum"])  # Nesterov's
                alike.setdefault(weight.shape, []).append((weight, ahead))
        for shape, pairs in alike.items():
            reach = 0.2 * max(shape) ** 0.5
            for (weight, _), turn in zip(pairs, orthogonal(torch.stack([ahead for _, ahead in pairs])), strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(turn, alpha=group["lr"] * reach)
        self.rest.step()


def orthogonal(matrices: Tensor) -> Tensor:
    """About UVᵀ for each UΣVᵀ: five turns of Newton and Schulz, whose singular values end between 0.7 and 1.2.

    x ← a x + b x³ + c x⁵ on every singular value, with the coefficients of Jordan et al. 2024.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def gradient_length(parameters: Iterable[nn.Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
