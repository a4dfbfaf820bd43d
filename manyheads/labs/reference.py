"""Plain implementations of Transformer (2017), BERT and GPT-2, written from the formulas to check composed models.

They share only the names of the weights with the package. Each takes a dictionary of weights and follows its paper line
by line. `attend` is explicit softmax attention unless another function of (q, k, v, visible) is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def literal(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √K + mask) v"""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def layer_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def multi_head(
    w: Weights, name: str, x: Tensor, memory: Tensor, visible: Tensor | None, heads: int, attend: Attend
) -> Tensor:
    """Concat(head₁ … head_H) W_O, with head_i = attend(x W_Q, memory W_K, memory W_V) on its columns of the matrices"""

    def split(y: Tensor) -> Tensor:
        return y.unflatten(-1, (heads, -1)).transpose(1, 2)

    q = split(linear(w, f"{name}.query", x))
    k = split(linear(w, f"{name}.key", memory))
    v = split(linear(w, f"{name}.value", memory))
    return linear(w, f"{name}.output", attend(q, k, v, visible).transpose(1, 2).flatten(2))


def causal_mask(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """PE(t, 2i) = sin(t / 10000^(2i/D)), PE(t, 2i+1) = cos(t / 10000^(2i/D))"""
    table = torch.zeros(length, width, dtype=torch.float64, device=device)
    for i in range(0, width, 2):
        angle = torch.arange(length, dtype=torch.float64, device=device) / 10000 ** (i / width)
        table[:, i] = angle.sin()
        if i + 1 < width:
            table[:, i + 1] = angle.cos()
    return table


def transformer_2017(
    w: Weights,
    source: Tensor,
    target: Tensor,
    *,
    heads: int,
    encoder_layers: int,
    decoder_layers: int,
    attend: Attend = literal,
) -> Tensor:
    """Vaswani et al. 2017: one table scaled by √D, sinusoids, norm(x + f(x)), ReLU, logits against the same table."""
    table, eps = w["encoder.embed.table.weight"], 1e-5
    width = table.shape[1]

    def embed(ids: Tensor) -> Tensor:
        return table[ids] * math.sqrt(width) + sinusoids(ids.shape[1], width, ids.device).to(table.dtype)

    def feed_forward(name: str, x: Tensor) -> Tensor:
        return linear(w, f"{name}.feedforward.down", F.relu(linear(w, f"{name}.feedforward.up", x)))

    x = embed(source)
    for i in range(encoder_layers):
        name = f"encoder.layers.{i}"
        x = layer_norm(
            w, f"{name}.residual.norms.0", x + multi_head(w, f"{name}.attention", x, x, None, heads, attend), eps
        )
        x = layer_norm(w, f"{name}.residual.norms.1", x + feed_forward(name, x), eps)
    memory, y = x, embed(target)
    visible = causal_mask(target.shape[1], target.device)
    for i in range(decoder_layers):
        name = f"decoder.layers.{i}"
        y = layer_norm(
            w, f"{name}.residual.norms.0", y + multi_head(w, f"{name}.attention", y, y, visible, heads, attend), eps
        )
        y = layer_norm(
            w, f"{name}.residual.norms.1", y + multi_head(w, f"{name}.cross", y, memory, None, heads, attend), eps
        )
        y = layer_norm(w, f"{name}.residual.norms.2", y + feed_forward(name, y), eps)
    return y @ table.T


def bidirectional_2018(
    w: Weights, ids: Tensor, types: Tensor, *, heads: int, layers: int, eps: float = 1e-12, attend: Attend = literal
) -> Tensor:
    """BERT, Devlin et al. 2019: norm(tokens + positions + types); norm(x + f(x)), GELU; logits for masked tokens."""
    table = w["encoder.embed.table.weight"]
    x = table[ids] + w["encoder.embed.position.table.weight"][: ids.shape[1]] + w["encoder.embed.types.weight"][types]
    x = layer_norm(w, "encoder.embed.norm", x, eps)
    for i in range(layers):
        name = f"encoder.layers.{i}"
        x = layer_norm(
            w, f"{name}.residual.norms.0", x + multi_head(w, f"{name}.attention", x, x, None, heads, attend), eps
        )
        hidden = F.gelu(linear(w, f"{name}.feedforward.up", x))
        x = layer_norm(w, f"{name}.residual.norms.1", x + linear(w, f"{name}.feedforward.down", hidden), eps)
    x = layer_norm(w, "head.norm", F.gelu(linear(w, "head.project", x)), eps)
    return x @ table.T + w["head.scores.bias"]


def causal_2019(
    w: Weights, ids: Tensor, *, heads: int, layers: int, eps: float = 1e-5, attend: Attend = literal
) -> Tensor:
    """GPT-2, Radford et al. 2019: tokens + positions; x + f(norm(x)), tanh GELU; final norm; logits by the table."""
    table, visible = w["decoder.embed.table.weight"], causal_mask(ids.shape[1], ids.device)
    x = table[ids] + w["decoder.embed.position.table.weight"][: ids.shape[1]]
    for i in range(layers):
        name = f"decoder.layers.{i}"
        y = layer_norm(w, f"{name}.residual.norms.0", x, eps)
        x = x + multi_head(w, f"{name}.attention", y, y, visible, heads, attend)
        y = layer_norm(w, f"{name}.residual.norms.1", x, eps)
        x = x + linear(
            w, f"{name}.feedforward.down", F.gelu(linear(w, f"{name}.feedforward.up", y), approximate="tanh")
        )
    return layer_norm(w, "decoder.norm", x, eps) @ table.T
