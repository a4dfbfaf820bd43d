"""Feed-forward networks, applied to each position separately."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.kernels.plan import Plan, Register, require_type
from manyheads.parts.role import with_role
from manyheads.spec import Part, field

Activation = Literal["relu", "gelu", "gelu-tanh", "gelu-quick", "silu", "relu-squared", "tanh", "sigmoid", "identity"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu-quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu-squared": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


def activation_number(name: str) -> int:
    """The number of an activation function in kernels/step.c."""
    return list(ACTIVATIONS).index(name)


class FeedForwardSpec(Part, slot="feedforward", default="mlp"):
    """The network applied to each vector after attention."""

    def hidden_size(self, width: int) -> int | None:
        """F, the size of the hidden layer in a stack of this width; None if there is none."""
        return None

    @abstractmethod
    def build(self, width: int) -> nn.Module | None:
        """The network for vectors of this width; None if the layer has none."""


class MlpSpec(FeedForwardSpec, kind="mlp", caption="Feed Forward"):
    """W₂ f(W₁ x + b₁) + b₂

    Vaswani et al. 2017, section 3.3.
    """

    hidden: int | None = field(None, "F, the size of the hidden layer; 4·D by default", ge=1, le=1 << 20)
    activation: Activation = field("gelu", "f, the activation function")
    bias: bool = field(True, "whether there are biases b₁ and b₂")
    dropout: float = field(0.0, "dropout probability of the hidden units", ge=0, lt=1)

    def hidden_size(self, width: int) -> int:
        return self.hidden or 4 * width

    def build(self, width: int) -> nn.Module:
        return Mlp(self, width)


class Mlp(nn.Module):
    def __init__(self, spec: MlpSpec, width: int) -> None:
        super().__init__()
        hidden = spec.hidden_size(width)
        self.up = nn.Linear(width, hidden, bias=spec.bias)
        self.spec, self.activation = spec, ACTIVATIONS[spec.activation]
        self.dropout = nn.Dropout(spec.dropout)
        self.down = with_role(nn.Linear(hidden, width, bias=spec.bias), "residual")

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down(self.dropout(self.activation(self.up(x_BLD))))

    def lower(self, plan: Plan, x: Register, add_to: Register | None) -> Register:
        require_type(self, Mlp)
        hidden = plan.activate(plan.linear(x, self.up), activation_number(self.spec.activation))
        return plan.linear(hidden, self.down, add_to=add_to)


class GatedSpec(FeedForwardSpec, kind="gated", caption="Gated Feed Forward"):
    """W₂ (f(W_g x) ∘ W₁ x): f = silu is SwiGLU, gelu GEGLU, relu ReGLU, sigmoid GLU, identity bilinear

    Shazeer 2020, arXiv 2002.05202.
    """

    hidden: int | None = field(
        None, "F, the size of the hidden layer; 8/3·D, rounded up to a multiple of 8, by default", ge=1, le=1 << 20
    )
    activation: Activation = field("silu", "f, the activation function of the gate")
    bias: bool = field(False, "whether all three matrices have biases")
    dropout: float = field(0.0, "dropout probability of the hidden units", ge=0, lt=1)

    def hidden_size(self, width: int) -> int:
        return self.hidden or -(-width // 3) * 8

    def build(self, width: int) -> nn.Module:
        return GatedMlp(self, width)


class GatedMlp(nn.Module):
    def __init__(self, spec: GatedSpec, width: int) -> None:
        super().__init__()
        hidden = spec.hidden_size(width)
        self.gate = nn.Linear(width, hidden, bias=spec.bias)
        self.up = nn.Linear(width, hidden, bias=spec.bias)
        self.spec, self.activation = spec, ACTIVATIONS[spec.activation]
        self.dropout = nn.Dropout(spec.dropout)
        self.down = with_role(nn.Linear(hidden, width, bias=spec.bias), "residual")

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down(self.dropout(self.activation(self.gate(x_BLD)) * self.up(x_BLD)))

    def lower(self, plan: Plan, x: Register, add_to: Register | None) -> Register:
        require_type(self, GatedMlp)
        gate, up = plan.linear(x, self.gate), plan.linear(x, self.up)
        return plan.linear(plan.activate(gate, activation_number(self.spec.activation), up), self.down, add_to=add_to)


class NoFeedForwardSpec(FeedForwardSpec, kind="none", caption=""):
    """no feed-forward network after the attention of the layer"""

    def build(self, width: int) -> None:
        return None
