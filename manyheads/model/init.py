"""How weights begin: every module sets itself up, then a scheme sets the matrices."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from manyheads.parts.attention import ChunksLinear
from manyheads.parts.role import role_of
from manyheads.spec import Part, field


class InitSpec(Part, slot="init", default="normal"):
    """What projections and tables hold before training. Norms start at one, biases at zero; a core's own matrices at N(0, 1/in)."""

    @abstractmethod
    def matrix(self, weight: Tensor, module: nn.Module, *, inputs: int, outputs: int, terms: int) -> None:
        """A projection from `inputs` to `outputs`; `terms` is how many the stream of its tower is a sum of."""
        raise NotImplementedError

    @abstractmethod
    def table(self, weight: Tensor) -> None:
        raise NotImplementedError


class NormalInitSpec(InitSpec, kind="normal"):
    """N(0, σ²), and σ/√n for what writes into the stream, n the number of sublayers that do

    Radford et al. 2019: the stream is a sum of n terms (2 a layer), which keeps its variance where it was.
    """

    std: float = field(0.02, "σ", gt=0)
    scaled: bool = field(True, "the smaller σ for what writes into the stream")

    def matrix(self, weight: Tensor, module: nn.Module, *, inputs: int, outputs: int, terms: int) -> None:
        shrink = terms**-0.5 if self.scaled and role_of(module) == "stream" else 1.0
        nn.init.normal_(weight, std=self.std * shrink)

    def table(self, weight: Tensor) -> None:
        nn.init.normal_(weight, std=self.std)


class XavierInitSpec(InitSpec, kind="xavier"):
    """U(−a, a) with a = √(6 / (in + out)); tables N(0, 1/size of a row)

    Glorot and Bengio 2010, as used for Vaswani et al. 2017.
    """

    def matrix(self, weight: Tensor, module: nn.Module, *, inputs: int, outputs: int, terms: int) -> None:
        reach = (6 / (inputs + outputs)) ** 0.5
        nn.init.uniform_(weight, -reach, reach)

    def table(self, weight: Tensor) -> None:
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


class FanInInitSpec(InitSpec, kind="fan-in"):
    """N(0, 1/in), queries N(0, 1/(in·K)) because the scores are not scaled; tables and a head of its own N(0, 1)

    Raffel et al. 2020, arXiv 1910.10683, as published in code, but for the relative biases: N(0, 1) too, where it has N(0, 1/D).
    """

    factor: float = field(1.0, "multiplies every σ", gt=0)

    def matrix(self, weight: Tensor, module: nn.Module, *, inputs: int, outputs: int, terms: int) -> None:
        role = role_of(module)
        size = getattr(module, "size", 1) if role == "query" else 1
        std = 1.0 if role == "rows" else (inputs * size) ** -0.5  # a head of its own begins like a table
        nn.init.normal_(weight, std=self.factor * std)

    def table(self, weight: Tensor) -> None:
        nn.init.normal_(weight, std=self.factor)


def initialise(model: nn.Module, init: InitSpec) -> None:
    """Sets every parameter, also of a model that was built without memory and only then given some."""
    for path, module in model.named_modules():
        if reset := getattr(module, "reset_parameters", None):
            reset()
        terms = max(1, getattr(getattr(model, path.partition(".")[0], None), "terms", 1))
        if isinstance(module, nn.Linear):
            init.matrix(module.weight, module, inputs=module.in_features, outputs=module.out_features, terms=terms)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, ChunksLinear):
            _, inputs, outputs = module.weight.shape
            init.matrix(module.weight, module, inputs=inputs, outputs=outputs, terms=terms)
        elif isinstance(module, nn.Embedding):
            init.table(module.weight)
