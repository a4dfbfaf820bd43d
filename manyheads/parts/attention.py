"""Multi-head attention: the projections from x to queries, keys and values, and from the heads back to x."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import IncompatibleError, UnsupportedError
from manyheads.kernels.plan import NotLoweredError, Plan, Register, require_type
from manyheads.parts.core import Core, CoreSpec, Dot
from manyheads.parts.mask import Mask
from manyheads.parts.norm import NoNormSpec, NormSpec, lower_norm
from manyheads.parts.position import AttentionPosition, Positions, Rotation
from manyheads.parts.role import with_role
from manyheads.spec import Part, field, locate_errors


class AttentionSpec(Part, slot="attention", default="heads"):
    """The projections to queries, keys and values, and from the heads back to the model width."""

    heads: int = field(4, "H, the number of query heads", ge=1, le=65536)
    bias: bool = field(True, "whether the projections to q, k and v have biases")
    output_bias: bool = field(True, "whether the output projection has a bias")
    qk_norm: NormSpec = field(NoNormSpec(), "normalizes each query and each key within its head")

    @abstractmethod
    def head_dim(self, width: int) -> int:
        """K, the size of a head. Raises an error that names widths and numbers of heads that fit."""

    def num_kv_heads(self) -> int:
        """G, the number of key and value heads."""
        return self.heads

    def keep_heads(self, kept_heads: Sequence[int], width: int) -> AttentionSpec:
        """The attention with only these heads."""
        raise UnsupportedError(f"heads of the attention '{self.kind}' cannot be pruned")

    def projection(self, width: int, heads: int, size: int) -> nn.Module:
        return HeadsLinear(width, heads, size, bias=self.bias)

    def query_size(self, width: int, core: CoreSpec, memory_width: int | None = None) -> int:
        """The size of one query as the core and the position scheme receive it; 0 if the core has no queries."""
        return {"head": self.head_dim(width), "memory": memory_width or width, "none": 0}[core.query_source]

    def build(self, width: int, core: CoreSpec, memory_width: int | None = None) -> Attention:
        memory_width = memory_width or width
        with locate_errors("attention"):
            size, query_size = self.head_dim(width), self.query_size(width, core, memory_width)
            key_size = {"head": size, "raw": memory_width, "none": 0}[core.key_source]
            query = self.projection(width, self.heads, query_size) if query_size else EmptyHeads(self.heads)
            key: nn.Module = RawHead() if key_size else EmptyHeads(1)
            if core.key_source == "head":
                key = self.projection(memory_width, self.num_kv_heads(), size)
            value = self.projection(memory_width, self.num_kv_heads(), size)
        with locate_errors("core"):
            built_core = core.build(self.heads, query_size, key_size)
        return Attention(
            query=query,
            key=key,
            value=value,
            core=built_core,
            output=nn.Linear(self.heads * size, width, bias=self.output_bias),
            query_norm=self.qk_norm.build(query_size) if query_size else nn.Identity(),
            key_norm=self.qk_norm.build(key_size) if key_size else nn.Identity(),
        )


def split_width(width: int, heads: int) -> int:
    """Returns width / heads. Raises an error that names the nearest numbers that divide."""
    if width % heads:
        fitting = [h for h in range(1, width + 1) if width % h == 0]
        nearest_heads = [*[h for h in fitting if h < heads][-1:], *[h for h in fitting if h > heads][:1]]
        nearest_widths = [w for w in (width // heads * heads, (width // heads + 1) * heads) if w]
        raise IncompatibleError(
            f"{heads} heads do not divide width {width}; use {' or '.join(map(str, nearest_heads))} "
            f"heads or width {' or '.join(map(str, nearest_widths))}",
            ("heads",),
        )
    return width // heads


class HeadsSpec(AttentionSpec, kind="heads", caption="Multi-Head Attention"):
    """q, k, v = W_Q x, W_K y, W_V y split into H heads of size K = D/H; heads concatenated and projected by W_O

    Vaswani et al. 2017, section 3.2.2: 4D² weights. Fewer key heads than query heads are grouped-query attention
    (Ainslie et al. 2023), one key head is multi-query attention (Shazeer 2019).
    """

    kv_heads: int | None = field(None, "G, the number of key and value heads; equal to H by default", ge=1, le=65536)
    size: int | None = field(None, "K, the size of a head; D/H by default", ge=1, le=65536)

    def head_dim(self, width: int) -> int:
        if self.heads % self.num_kv_heads():
            fits = ", ".join(str(g) for g in range(1, self.heads + 1) if self.heads % g == 0)
            raise IncompatibleError(
                f"{self.kv_heads} key heads do not divide {self.heads} query heads; use one of {fits}", ("kv_heads",)
            )
        return self.size or split_width(width, self.heads)

    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    def keep_heads(self, kept_heads: Sequence[int], width: int) -> AttentionSpec:
        counts = Counter(head * self.num_kv_heads() // self.heads for head in kept_heads)
        if len(set(counts.values())) > 1:
            shared = self.heads // self.num_kv_heads()
            raise UnsupportedError(
                f"{shared} query heads share a key head, and as many of each must stay; to keep: {list(kept_heads)}"
            )
        kv_heads = None if self.kv_heads is None else len(counts)
        return self.replace(heads=len(kept_heads), kv_heads=kv_heads, size=self.head_dim(width))


class WideSpec(AttentionSpec, kind="wide", caption="Wide Multi-Head Attention"):
    """Every head as wide as the model (K = D); the n×(H·D) heads are projected back to D: 4·H·D² weights

    The drawing of many lectures, where the heads are n×D each.
    """

    def head_dim(self, width: int) -> int:
        return width


class NarrowSpec(AttentionSpec, kind="narrow", caption="Narrow Multi-Head Attention"):
    """x is split into H chunks, each with its own (D/H)² matrices for q, k and v: 3D²/H + D² weights

    A head reads only its chunk of the input; W_O mixes them. Bloem 2019 calls the two narrow and wide self-attention.
    """

    def head_dim(self, width: int) -> int:
        return split_width(width, self.heads)

    def projection(self, width: int, heads: int, size: int) -> nn.Module:
        return ChunksLinear(heads, split_width(width, heads), size, bias=self.bias)


class HeadsLinear(nn.Linear):
    """Computes W x + b and splits the result into heads, B×L×D → B×H×L×K."""

    def __init__(self, width: int, heads: int, size: int, *, bias: bool) -> None:
        super().__init__(width, heads * size, bias=bias)
        self.size = size

    def forward(self, x_BLD: Tensor) -> Tensor:
        return super().forward(x_BLD).unflatten(-1, (-1, self.size)).transpose(1, 2)


class ChunksLinear(nn.Module):
    """Applies a separate matrix to each chunk of x, B×L×D → B×H×L×K."""

    def __init__(self, heads: int, chunk: int, size: int, *, bias: bool) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(heads, chunk, size))
        self.bias = nn.Parameter(torch.empty(heads, 1, size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        y_BHLK = x_BLD.unflatten(-1, (len(self.weight), -1)).transpose(1, 2) @ self.weight
        return y_BHLK if self.bias is None else y_BHLK + self.bias


class RawHead(nn.Module):
    """Uses the memory itself, without a projection, as one key head that all query heads share."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD[:, None]


class EmptyHeads(nn.Module):
    """Returns queries or keys of size 0 for a core that uses none. Their shape still gives the heads and the length."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD.new_empty(x_BLD.shape[0], self.heads, x_BLD.shape[1], 0)


@dataclass(frozen=True)
class KeyValue:
    """The keys and values of a memory, B×G×M×K."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class AttentionContext:
    """Positions and mask of one attention call, computed once for all layers with the same position scheme and mask."""

    position: AttentionPosition
    position_data: Any
    mask: Mask
    positions: Positions


class Attention(nn.Module):
    """Multi-head attention of x to a memory. In self-attention the memory is computed from x itself."""

    def __init__(
        self, *, query: nn.Module, key: nn.Module, value: nn.Module, core: Core, output: nn.Linear,
        query_norm: nn.Module, key_norm: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.query, self.key, self.value, self.core = with_role(query, "query"), key, value, core
        self.output = with_role(output, "residual")
        self.query_norm, self.key_norm = query_norm, key_norm

    def key_value(self, y_BMD: Tensor, context: AttentionContext) -> KeyValue:
        """Keys and values of y. Cross-attention computes them once per source, a cache once per token."""
        key = context.position.rotate(self.key_norm(self.key(y_BMD)), context.position_data)
        return KeyValue(self.core.key_transform(key), self.value(y_BMD))

    def forward(self, x_BLD: Tensor, key_value: KeyValue, context: AttentionContext) -> Tensor:
        q = context.position.rotate(self.query_norm(self.query(x_BLD)), context.position_data)
        bias = context.position.bias(q, context.position_data, self.core.scale)
        k, v = key_value.key, key_value.value
        heads_BHLK = self.core(q, k, v, mask=context.mask, positions=context.positions, bias=bias)
        return self.output(heads_BHLK.transpose(1, 2).flatten(2))

    def lower(
        self, plan: Plan, x: Register, add_to: Register | None, *, layer: int, rotation: Rotation | None, angles: int,
        window: int | None,
    ) -> Register:  # fmt: skip
        """Adds self-attention over the cache of a layer to a plan; `angles` is the index of its position scheme."""
        projections = (self.query, self.key, self.value)
        require_type(self, Attention)
        sizes = {projection.size if isinstance(projection, HeadsLinear) else None for projection in projections}
        size = sizes.pop()
        if sizes or size is None or type(self.core) is not Dot or rotation is None:
            raise NotLoweredError
        q, k, v = (plan.linear(x, projection, kind=HeadsLinear) for projection in projections)
        heads = plan.attend(
            lower_norm(self.query_norm, plan, q, width=size), lower_norm(self.key_norm, plan, k, width=size), v,
            layer=layer, heads=q.width // size, head_dim=size, scale=self.core.scale, window=window,
            rotated=rotation.size, interleaved=rotation.interleaved, angles=angles,
        )  # fmt: skip
        return plan.linear(heads, self.output, add_to=add_to)
