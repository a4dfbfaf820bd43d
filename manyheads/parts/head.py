"""Heads, which compute token logits, class logits, one vector per sequence, or pixels from the last layer's output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import field_validator, model_validator
from torch import Tensor, nn

from manyheads.errors import ConfigError, IncompatibleError, InputLengthError, OutOfRangeError
from manyheads.kernels.plan import NotLoweredError, Plan, Register, require_type
from manyheads.parts.core import inverse_root
from manyheads.parts.embed import TableShape
from manyheads.parts.feedforward import ACTIVATIONS, Activation
from manyheads.parts.inputs import has_no_data, tokens_first
from manyheads.parts.norm import LayerNormSpec, NormSpec
from manyheads.parts.role import with_role
from manyheads.spec import MAX_COUNT, Part, field, quote

Pool = Callable[[Tensor, Tensor | None], Tensor]  # (vectors B×L×D, padding mask B×L) → B×D


class HeadSpec(Part, slot="head", default="tied"):
    """The computation that follows the last layer."""

    # token logits, class logits, one vector per sequence, pixels, or the hidden states themselves
    output: ClassVar[Literal["tokens", "classes", "vector", "pixels", "states"]] = "states"
    per_token: ClassVar[bool] = True  # whether the head gives one output per token, rather than one per sequence

    @property
    def is_tied(self) -> bool:
        """Whether the logits are inner products with the token embedding itself."""
        return False

    def output_size(self, width: int, vocab: int | None) -> int | None:
        """The size of one output; None if it depends on a vocabulary or on data that is not known yet."""
        return vocab if self.output == "tokens" else width

    @abstractmethod
    def build(self, width: int, vocab: int, table_shape: TableShape | None) -> Head:
        """Builds the head. `table_shape` is the shape of the token embedding; None if the model has none."""


class Head(nn.Module):
    """Reads hidden states B×L×D and the token embedding V×E.

    The embedding matrix is an argument, not a parameter of the head, so the weights stay tied.
    """

    def lower(self, plan: Plan, x: Register, table: nn.Embedding | None) -> Register:
        """Adds the head to a plan; returns the register of its output."""
        raise NotLoweredError


class NoHeadSpec(HeadSpec, kind="none", caption=""):
    """h, the hidden states themselves"""

    def build(self, width: int, vocab: int, table_shape: TableShape | None) -> Head:
        return NoHead()


class NoHead(Head):
    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        return x_BLD


# ------------------------------------------------------------------------------------------------------ one per token


class TokenHeadSpec(HeadSpec):
    """Fields of every token head: logits = β · score(h, e) + b."""

    output = "tokens"

    bias: bool = field(False, "whether there is a bias b per token of the vocabulary")
    logit_scale: Literal["one", "inverse-sqrt"] = field(
        "one", "the factor β is 1, or 1/√I with I the size of the inner product"
    )
    learn_logit_scale: bool = field(False, "whether β is learned, starting from logit_scale")


class TokenHead(Head):
    """Logits over the vocabulary by an inner product of size I with each token's row."""

    def __init__(self, spec: TokenHeadSpec, size: int, vocab: int) -> None:
        super().__init__()
        self.size = size
        self.initial_beta = 1.0 if spec.logit_scale == "one" else inverse_root(size)
        self.beta = nn.Parameter(torch.full((1,), self.initial_beta)) if spec.learn_logit_scale else None
        self.bias = nn.Parameter(torch.zeros(vocab)) if spec.bias else None

    def reset_parameters(self) -> None:
        if self.beta is not None:
            nn.init.constant_(self.beta, self.initial_beta)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def logits(self, h_BLI: Tensor, rows_VI: Tensor) -> Tensor:
        if self.beta is not None or self.initial_beta != 1.0:
            h_BLI = h_BLI * (self.initial_beta if self.beta is None else self.beta)
        return F.linear(h_BLI, rows_VI, self.bias)


class TiedHeadSpec(TokenHeadSpec, kind="tied", caption="Linear, tied"):
    """β · h·e + b, with e the token's embedding

    Press and Wolf 2017, arXiv 1608.05859.
    """

    @property
    def is_tied(self) -> bool:
        return True

    def build(self, width: int, vocab: int, table_shape: TableShape | None) -> Head:
        shape = require_table(table_shape)
        if shape.vector_size != width:
            raise IncompatibleError(
                f"h·e needs h and e of one size, given {width} for h and {shape.vector_size} for e; use 'bilinear' or "
                f"'masked', which project h to the size of e, or 'untied', which does not use e"
            )
        return TiedHead(self, shape.size, vocab)


def require_table(table_shape: TableShape | None) -> TableShape:
    if table_shape is None:
        raise IncompatibleError("the model has no token embedding to tie the head to; use 'untied'")
    return table_shape


class TiedHead(TokenHead):
    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        assert table is not None
        # with concatenated positions, the token's part of the vector comes first
        return self.logits(x_BLD if self.size == x_BLD.shape[-1] else x_BLD[..., : self.size], table)

    def lower(self, plan: Plan, x: Register, table: nn.Embedding | None) -> Register:
        require_type(self, TiedHead)
        if table is None or self.beta is not None or self.initial_beta != 1.0:
            raise NotLoweredError
        return plan.linear(x, table, kind=nn.Embedding, bias_of=self)


class UntiedHeadSpec(TokenHeadSpec, kind="untied", caption="Linear"):
    """β · h·u + b, with a matrix of its own that has a row u per token"""

    def build(self, width: int, vocab: int, table_shape: TableShape | None) -> Head:
        return UntiedHead(self, width, vocab)


class UntiedHead(TokenHead):
    def __init__(self, spec: UntiedHeadSpec, width: int, vocab: int) -> None:
        super().__init__(spec, width, vocab)
        self.output = with_role(nn.Linear(width, vocab, bias=False), "token_head")

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        return self.logits(x_BLD, self.output.weight)

    def lower(self, plan: Plan, x: Register, table: nn.Embedding | None) -> Register:
        require_type(self, UntiedHead)
        if self.beta is not None or self.initial_beta != 1.0:
            raise NotLoweredError
        return plan.linear(x, self.output, bias_of=self)


class BilinearHeadSpec(TokenHeadSpec, kind="bilinear", caption="Bilinear, tied"):
    """β · hᵀWe + b, a parametrized inner product with the token's embedding e"""

    def build(self, width: int, vocab: int, table_shape: TableShape | None) -> Head:
        return BilinearHead(self, width, require_table(table_shape).size, vocab)


class BilinearHead(TokenHead):
    def __init__(self, spec: BilinearHeadSpec, width: int, size: int, vocab: int) -> None:
        super().__init__(spec, size, vocab)
        self.project = nn.Linear(width, size, bias=False)

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        assert table is not None
        return self.logits(self.project(x_BLD), table)


class MaskedHeadSpec(HeadSpec, kind="masked", caption="Transform, then Linear"):
    """logits of norm(f(Wh + b)), which puts a transform before the token head of a masked language model

    Devlin et al. 2019, arXiv 1810.04805, as published in code.
    """

    output = "tokens"

    activation: Activation = field("gelu", "f, the activation function")
    norm: NormSpec = field(LayerNormSpec(), "the norm after f")
    scores: HeadSpec = field(TiedHeadSpec(bias=True), "the token head after the transform")

    @property
    def is_tied(self) -> bool:
        return self.scores.is_tied

    @model_validator(mode="after")
    def _needs_token_head(self) -> Self:
        if not isinstance(self.scores, TokenHeadSpec):
            kinds = [kind for kind, part in HeadSpec.kinds.items() if issubclass(part, TokenHeadSpec)]
            raise IncompatibleError(f"given '{self.scores.kind}', expected one of {', '.join(kinds)}", ("scores",))
        return self

    def build(self, width: int, vocab: int, table_shape: TableShape | None) -> Head:
        return MaskedHead(self, width, vocab, table_shape)


class MaskedHead(Head):
    def __init__(self, spec: MaskedHeadSpec, width: int, vocab: int, table_shape: TableShape | None) -> None:
        super().__init__()
        size = table_shape.size if table_shape else width
        self.project = nn.Linear(width, size)
        self.activation = ACTIVATIONS[spec.activation]
        self.norm = spec.norm.build(size)
        self.scores = spec.scores.build(size, vocab, table_shape and TableShape(size, size))

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        return self.scores(self.norm(self.activation(self.project(x_BLD))), table=table, padding_mask=padding_mask)


# --------------------------------------------------------------------------------------------------- one per sequence


class PoolSpec(Part, slot="pool", default="first"):
    """How the hidden states of a sequence are reduced to one vector."""

    @abstractmethod
    def pool(self, x_BLD: Tensor, padding_mask: Tensor | None) -> Tensor:
        """One vector per sequence, B×D."""


class FirstSpec(PoolSpec, kind="first"):
    """the vector of the first non-padding token"""

    def pool(self, x_BLD: Tensor, padding_mask: Tensor | None) -> Tensor:
        return token_at(x_BLD, padding_mask, 0)


class LastSpec(PoolSpec, kind="last"):
    """the vector of the last non-padding token"""

    def pool(self, x_BLD: Tensor, padding_mask: Tensor | None) -> Tensor:
        return token_at(x_BLD, padding_mask, -1)


class MeanSpec(PoolSpec, kind="mean"):
    """the mean over the non-padding tokens"""

    def pool(self, x_BLD: Tensor, padding_mask: Tensor | None) -> Tensor:
        if padding_mask is None:
            return x_BLD.mean(dim=1)
        non_padding = (~padding_mask)[..., None]
        return x_BLD.masked_fill(~non_padding, 0.0).sum(dim=1) / non_padding.sum(dim=1).clamp(min=1)


class AtSpec(PoolSpec, kind="at"):
    """the vector at an index, which counts non-padding tokens, from the end if negative"""

    index: int = field(0, "0 is the first non-padding token, −1 the last", ge=-MAX_COUNT)

    def pool(self, x_BLD: Tensor, padding_mask: Tensor | None) -> Tensor:
        return token_at(x_BLD, padding_mask, self.index)


def token_at(x_BLD: Tensor, padding_mask: Tensor | None, index: int) -> Tensor:
    """The vector of each sequence at an index that counts non-padding tokens, from the end if negative."""
    length = x_BLD.shape[1]
    if padding_mask is None:
        if not -length <= index < length:
            raise InputLengthError(f"a sequence of {length} tokens has no token at index {index}")
        return x_BLD[:, index]
    counts = (~padding_mask).sum(dim=1)
    rank = counts + index if index < 0 else torch.full_like(counts, index)
    if not has_no_data(counts) and bool(((rank < 0) | (rank >= counts)).any()):
        raise InputLengthError(f"a sequence of {int(counts.min())} tokens has no token at index {index}")
    position = tokens_first(padding_mask).gather(1, rank[:, None])
    return x_BLD.gather(1, position[..., None].expand(-1, -1, x_BLD.shape[-1])).squeeze(1)


class PooledHeadSpec(HeadSpec):
    """Fields of every pooled head, which gives one output per sequence."""

    per_token: ClassVar[bool] = False

    pool: PoolSpec = field(FirstSpec(), "how one vector per sequence is computed")
    dense: bool = field(False, "whether a layer f(Wh + b) follows the pooling")
    activation: Activation = field("tanh", "f, the activation function of that layer")
    dense_before_pool: bool = field(False, "whether that layer comes before the pooling, at every token")
    dropout: float = field(0.0, "dropout probability of the pooled vector", ge=0, lt=1)

    @model_validator(mode="after")
    def _dense_before_pool_needs_dense(self) -> Self:
        if self.dense_before_pool and not self.dense:
            raise IncompatibleError(
                "dense_before_pool needs dense = true, the layer that comes before the pooling", ("dense_before_pool",)
            )
        return self


class PooledHead(Head):
    def __init__(self, spec: PooledHeadSpec, width: int) -> None:
        super().__init__()
        self.pool, self.dense_before_pool = spec.pool, spec.dense_before_pool
        self.dense = nn.Linear(width, width) if spec.dense else None
        self.activation = ACTIVATIONS[spec.activation]
        self.dropout = nn.Dropout(spec.dropout)

    def pool_states(self, x_BLD: Tensor, padding_mask: Tensor | None) -> Tensor:
        if self.dense_before_pool:
            x_BLD = self.transform(x_BLD)
        h_BD = self.pool.pool(x_BLD, padding_mask)
        return self.dropout(h_BD if self.dense_before_pool else self.transform(h_BD))

    def transform(self, x: Tensor) -> Tensor:
        return x if self.dense is None else self.activation(self.dense(x))


class ClassesSpec(PooledHeadSpec, kind="classes", caption="Pooling, then Linear"):
    """U·pool(h) + b, one logit per class"""

    output = "classes"

    classes: int | Literal["data"] = field(2, "the number of classes; 'data' takes it from the training data")
    bias: bool = field(True, "whether there is a bias b")

    @field_validator("classes", mode="before")
    @classmethod
    def _in_range(cls, value: Any) -> Any:
        if value != "data" and not (type(value) is int and 1 <= value <= MAX_COUNT):
            raise OutOfRangeError(
                f"given {quote(value)}, expected a number of classes from 1 to {MAX_COUNT}, or 'data'"
            )
        return value

    def output_size(self, width: int, vocab: int | None) -> int | None:
        return None if self.classes == "data" else self.classes

    def build(self, width: int, vocab: int, table_shape: TableShape | None) -> Head:
        return ClassHead(self, width)


class ClassHead(PooledHead):
    def __init__(self, spec: ClassesSpec, width: int) -> None:
        super().__init__(spec, width)
        if spec.classes == "data":
            raise ConfigError(
                "'data' needs training data; give a number of classes to build without data", ("classes",)
            )
        self.output = nn.Linear(width, spec.classes, bias=spec.bias)

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        return self.output(self.pool_states(x_BLD, padding_mask))


class VectorSpec(PooledHeadSpec, kind="vector", caption="Pooling"):
    """pool(h), one vector per sequence; of length one with `normalize`"""

    output = "vector"

    normalize: bool = field(False, "divide the vector by its length")

    def build(self, width: int, vocab: int, table_shape: TableShape | None) -> Head:
        return VectorHead(self, width)


class VectorHead(PooledHead):
    def __init__(self, spec: VectorSpec, width: int) -> None:
        super().__init__(spec, width)
        self.normalize = spec.normalize

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        h_BD = self.pool_states(x_BLD, padding_mask)
        return F.normalize(h_BD, dim=-1) if self.normalize else h_BD


# ------------------------------------------------------------------------------------------------------ one per patch


class PixelsSpec(HeadSpec, kind="pixels", caption="Linear to Pixels"):
    """U·h + b, the pixels of each patch"""

    output = "pixels"

    pixels: int = field(4, "pixel values per patch", ge=1)
    skip: int = field(0, "the number of vectors before the first patch, such as a class token, which are skipped", ge=0)

    def output_size(self, width: int, vocab: int | None) -> int | None:
        return self.pixels

    def build(self, width: int, vocab: int, table_shape: TableShape | None) -> Head:
        return PixelHead(self, width)


class PixelHead(Head):
    def __init__(self, spec: PixelsSpec, width: int) -> None:
        super().__init__()
        self.skip = spec.skip
        self.output = nn.Linear(width, spec.pixels)

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        return self.output(x_BLD[:, self.skip :])
