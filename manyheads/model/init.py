"""Weight initialization. Every module resets its own parameters, then a scheme sets matrices and embedding tables."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from manyheads.parts.attention import ChunksLinear
from manyheads.parts.role import role_of
from manyheads.spec import Part, field


class InitSpec(Part, slot="init", default="normal"):
    """Initial values of projections and tables. Norms start at one, biases at zero, a core's matrices at N(0, 1/in)."""

    @abstractmethod
    def matrix(self, weight: Tensor, module: nn.Module, *, inputs: int, outputs: int, residual_terms: int) -> None:
        """Sets a projection from `inputs` to `outputs`. `residual_terms` sublayers add to the residual stream."""

    @abstractmethod
    def table(self, weight: Tensor) -> None:
        """Sets an embedding table."""


class NormalInitSpec(InitSpec, kind="normal"):
    """N(0, σ²), with σ/√n for projections that add to the residual stream, where n is the number of sublayers

    Radford et al. 2019. The residual stream is a sum of n terms (2 per layer), whose variance σ/√n keeps constant.
    """

    std: float = field(0.02, "σ", gt=0)
    scaled: bool = field(True, "whether projections that add to the residual stream have σ/√n")

    def matrix(self, weight: Tensor, module: nn.Module, *, inputs: int, outputs: int, residual_terms: int) -> None:
        factor = residual_terms**-0.5 if self.scaled and role_of(module) == "residual" else 1.0
        nn.init.normal_(weight, std=self.std * factor)

    def table(self, weight: Tensor) -> None:
        nn.init.normal_(weight, std=self.std)


class XavierInitSpec(InitSpec, kind="xavier"):
    """U(−a, a) with a = √(6 / (in + out)); tables N(0, 1/width)

    Glorot and Bengio 2010, as used for Vaswani et al. 2017.
    """

    def matrix(self, weight: Tensor, module: nn.Module, *, inputs: int, outputs: int, residual_terms: int) -> None:
        bound = (6 / (inputs + outputs)) ** 0.5
        nn.init.uniform_(weight, -bound, bound)

    def table(self, weight: Tensor) -> None:
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


class FanInInitSpec(InitSpec, kind="fan-in"):
    """N(0, 1/in), queries N(0, 1/(in·K)) because the scores are not scaled; tables and untied heads N(0, 1)

    Raffel et al. 2020, arXiv 1910.10683, as published in code, except for the relative biases, which are N(0, 1)
    here and N(0, 1/D) there.
    """

    factor: float = field(1.0, "factor of every σ", gt=0)

    def matrix(self, weight: Tensor, module: nn.Module, *, inputs: int, outputs: int, residual_terms: int) -> None:
        role = role_of(module)
        size = getattr(module, "size", 1) if role == "query" else 1
        std = 1.0 if role == "token_head" else (inputs * size) ** -0.5  # an untied head is initialized like a table
        nn.init.normal_(weight, std=self.factor * std)

    def table(self, weight: Tensor) -> None:
        nn.init.normal_(weight, std=self.factor)


def init_weights(model: nn.Module, init: InitSpec) -> None:
    """Sets every parameter of a model, which may have been built on the meta device and moved by to_empty."""
    for path, module in model.named_modules():
        if reset := getattr(module, "reset_parameters", None):
            reset()
        terms = max(1, getattr(getattr(model, path.partition(".")[0], None), "residual_terms", 1))
        if isinstance(module, nn.Linear):
            outputs, inputs = module.weight.shape
            init.matrix(module.weight, module, inputs=inputs, outputs=outputs, residual_terms=terms)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, ChunksLinear):
            _, inputs, outputs = module.weight.shape
            init.matrix(module.weight, module, inputs=inputs, outputs=outputs, residual_terms=terms)
        elif isinstance(module, nn.Embedding):
            init.table(module.weight)
