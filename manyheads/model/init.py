"""How weights begin: every module sets itself up, then a scheme sets the matrices."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from manyheads.spec import Part, field


def into_stream(path: str) -> bool:
    """Whether a matrix writes into the stream between layers: the last of attention, the last of feed-forward."""
    return ".layers." in path and path.rpartition(".")[2] in ("output", "down")


class InitSpec(Part, slot="init", default="normal"):
    """What the matrices hold before training; norms start at one, biases at zero."""

    @abstractmethod
    def matrix(self, module: nn.Linear, path: str, *, layers: int) -> None:
        raise NotImplementedError

    @abstractmethod
    def table(self, weight: Tensor, path: str) -> None:
        raise NotImplementedError


class NormalInitSpec(InitSpec, kind="normal"):
    """N(0, σ²), and σ/√(2·layers) for what writes into the stream

    Radford et al. 2019: the stream is a sum of 2·layers terms, which keeps its variance where it was.
    """

    std: float = field(0.02, "σ", gt=0)
    scaled: bool = field(True, "the smaller σ for what writes into the stream")

    def matrix(self, module: nn.Linear, path: str, *, layers: int) -> None:
        shrink = (2 * max(layers, 1)) ** -0.5 if self.scaled and into_stream(path) else 1.0
        nn.init.normal_(module.weight, std=self.std * shrink)

    def table(self, weight: Tensor, path: str) -> None:
        nn.init.normal_(weight, std=self.std)


class XavierInitSpec(InitSpec, kind="xavier"):
    """U(−a, a) with a = √(6 / (in + out)); tables N(0, 1/D)

    Glorot and Bengio 2010, as used for Vaswani et al. 2017.
    """

    def matrix(self, module: nn.Linear, path: str, *, layers: int) -> None:
        nn.init.xavier_uniform_(module.weight)

    def table(self, weight: Tensor, path: str) -> None:
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


class FanInInitSpec(InitSpec, kind="fan-in"):
    """N(0, 1/in), queries N(0, 1/(in·K)) because the scores are not scaled; tables and a head of its own N(0, 1)

    Raffel et al. 2020, arXiv 1910.10683, as published in code, but for the relative biases: N(0, 1) too, where it has N(0, 1/D).
    """

    factor: float = field(1.0, "multiplies every σ", gt=0)

    def matrix(self, module: nn.Linear, path: str, *, layers: int) -> None:
        of_head = path.startswith("head.")  # a head of its own begins like a table
        size = getattr(module, "size", 1) if path.endswith(".query") else 1
        nn.init.normal_(module.weight, std=self.factor * (1.0 if of_head else (module.in_features * size) ** -0.5))

    def table(self, weight: Tensor, path: str) -> None:
        nn.init.normal_(weight, std=self.factor)


def initialise(model: nn.Module, init: InitSpec) -> None:
    """Sets every parameter, also of a model that was built without memory and only then given some."""
    for path, module in model.named_modules():
        if reset := getattr(module, "reset_parameters", None):
            reset()
        if isinstance(module, nn.Linear):
            tower = getattr(model, path.partition(".")[0])
            init.matrix(module, path, layers=len(getattr(tower, "layer_specs", ())))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.table(module.weight, path)
