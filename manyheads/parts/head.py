"""From the last layer's vectors to what is asked for: next tokens, masked tokens, classes, one vector, pixels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import field_validator, model_validator
from torch import Tensor, nn

from manyheads.parts.attend import inverse_root
from manyheads.parts.batch import numberless, real_first
from manyheads.parts.embed import Rows
from manyheads.parts.feedforward import ACTIVATIONS, Activation
from manyheads.parts.norm import LayerNormSpec, NormSpec
from manyheads.parts.role import marked
from manyheads.spec import LARGEST, Part, SpecError, field, quoted

Pool = Callable[[Tensor, Tensor | None], Tensor]  # one vector of many, B×D of B×L×D and of where padding is


class HeadSpec(Part, slot="head", default="tied"):
    """What is made of the last layer."""

    scores_tokens: ClassVar[bool] = False  # whether it needs to know how many tokens there are
    a_token: ClassVar[bool] = True  # whether it says something of each token, rather than one thing of the whole text

    @abstractmethod
    def build(self, width: int, vocab: int, rows: Rows | None) -> Head:
        """`rows` is the shape of the token table, None where there is none."""
        raise NotImplementedError


class Head(nn.Module):
    """Reads B×L×D. `table` is the token table V×E of the tower below, borrowed and never owned, so it cannot come untied."""

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding: Tensor | None) -> Tensor:
        raise NotImplementedError


class NoHeadSpec(HeadSpec, kind="none"):
    """h: the vectors themselves"""

    def build(self, width: int, vocab: int, rows: Rows | None) -> Head:
        return NoHead()


class NoHead(Head):
    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding: Tensor | None) -> Tensor:
        return x_BLD


# ------------------------------------------------------------------------------------------------------- tokens


class TokenHeadSpec(HeadSpec):
    """What the token heads have in common: logits = β · score(h, e) + b."""

    scores_tokens: ClassVar[bool] = True

    bias: bool = field(False, "b, one a token")
    temperature: Literal["one", "root"] = field("one", "β = 1, or β = 1/√I with I the size of the inner product")
    learned: bool = field(False, "whether β is learned from there")


class TokenHead(Head):
    """Logits over the vocabulary by an inner product of size I with each token's row."""

    def __init__(self, spec: TokenHeadSpec, size: int, vocab: int) -> None:
        super().__init__()
        self.size = size
        self.start = 1.0 if spec.temperature == "one" else inverse_root(size)
        self.beta = nn.Parameter(torch.full((1,), self.start)) if spec.learned else None
        self.bias = nn.Parameter(torch.zeros(vocab)) if spec.bias else None

    def reset_parameters(self) -> None:
        if self.beta is not None:
            nn.init.constant_(self.beta, self.start)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def logits(self, h_BLI: Tensor, rows_VI: Tensor) -> Tensor:
        beta = self.start if self.beta is None else self.beta
        return F.linear(h_BLI if self.beta is None and beta == 1.0 else h_BLI * beta, rows_VI, self.bias)


class TiedSpec(TokenHeadSpec, kind="tied"):
    """β · h·e + b, with e the token's embedding

    Press and Wolf 2017, arXiv 1608.05859.
    """

    def build(self, width: int, vocab: int, rows: Rows | None) -> Head:
        rows = needed(rows)
        if rows.within != width:
            raise SpecError(
                f"h·e needs one size: h has {width}, e {rows.within}; 'bilinear' and 'masked' bridge the two, 'free' has rows of its own"
            )
        return Tied(self, rows.size, vocab)


def needed(rows: Rows | None) -> Rows:
    if rows is None:
        raise SpecError("there is no token table here to score against; 'free' has rows of its own")
    return rows


class Tied(TokenHead):
    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding: Tensor | None) -> Tensor:
        assert table is not None
        # where positions are concatenated, the token's row is the first share of the vector
        return self.logits(x_BLD if self.size == x_BLD.shape[-1] else x_BLD[..., : self.size], table)


class FreeSpec(TokenHeadSpec, kind="free"):
    """β · h·u + b, with rows u of its own"""

    def build(self, width: int, vocab: int, rows: Rows | None) -> Head:
        return Free(self, width, vocab)


class Free(TokenHead):
    def __init__(self, spec: FreeSpec, width: int, vocab: int) -> None:
        super().__init__(spec, width, vocab)
        self.output = marked(nn.Linear(width, vocab, bias=False), "rows")

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding: Tensor | None) -> Tensor:
        return self.logits(x_BLD, self.output.weight)


class BilinearHeadSpec(TokenHeadSpec, kind="bilinear"):
    """β · hᵀWe + b: a parametrised inner product with the token's embedding"""

    def build(self, width: int, vocab: int, rows: Rows | None) -> Head:
        return BilinearHead(self, width, needed(rows).size, vocab)


class BilinearHead(TokenHead):
    def __init__(self, spec: BilinearHeadSpec, width: int, size: int, vocab: int) -> None:
        super().__init__(spec, size, vocab)
        self.project = nn.Linear(width, size, bias=False)

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding: Tensor | None) -> Tensor:
        assert table is not None
        return self.logits(self.project(x_BLD), table)


class MaskedSpec(HeadSpec, kind="masked"):
    """scores of norm(f(Wh + b)): a transform before the token head, for masked tokens

    Devlin et al. 2019, arXiv 1810.04805, as published in code.
    """

    scores_tokens: ClassVar[bool] = True

    activation: Activation = field("gelu", "f")
    norm: NormSpec = field(LayerNormSpec(), "after f")
    scores: HeadSpec = field(TiedSpec(bias=True), "the token head behind the transform")

    @model_validator(mode="after")
    def _scores_tokens(self) -> Self:
        if not isinstance(self.scores, TokenHeadSpec):
            kinds = [kind for kind, part in HeadSpec.kinds.items() if issubclass(part, TokenHeadSpec)]
            raise SpecError(f"given '{self.scores.kind}', expected a head that scores every token: {', '.join(kinds)}", ("scores",))
        return self

    def build(self, width: int, vocab: int, rows: Rows | None) -> Head:
        return Masked(self, width, vocab, rows)


class Masked(Head):
    def __init__(self, spec: MaskedSpec, width: int, vocab: int, rows: Rows | None) -> None:
        super().__init__()
        size = rows.size if rows else width
        self.project = nn.Linear(width, size)
        self.activation = ACTIVATIONS[spec.activation]
        self.norm = spec.norm.build(size)
        self.scores = spec.scores.build(size, vocab, rows and Rows(size, size))

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding: Tensor | None) -> Tensor:
        return self.scores(self.norm(self.activation(self.project(x_BLD))), table=table, padding=padding)


# ------------------------------------------------------------------------------------------------------- pooled


class PoolSpec(Part, slot="pool", default="first"):
    """Which of the output vectors speaks for the sequence."""

    @abstractmethod
    def pool(self, x_BLD: Tensor, padding: Tensor | None) -> Tensor:
        raise NotImplementedError


class FirstSpec(PoolSpec, kind="first"):
    """the first real token's vector"""

    def pool(self, x_BLD: Tensor, padding: Tensor | None) -> Tensor:
        return real_token(x_BLD, padding, 0)


class LastSpec(PoolSpec, kind="last"):
    """the last real token's vector"""

    def pool(self, x_BLD: Tensor, padding: Tensor | None) -> Tensor:
        return real_token(x_BLD, padding, -1)


class MeanSpec(PoolSpec, kind="mean"):
    """the mean over the real tokens"""

    def pool(self, x_BLD: Tensor, padding: Tensor | None) -> Tensor:
        if padding is None:
            return x_BLD.mean(dim=1)
        real = (~padding)[..., None]
        return x_BLD.masked_fill(~real, 0.0).sum(dim=1) / real.sum(dim=1).clamp(min=1)


class AtSpec(PoolSpec, kind="at"):
    """the vector at a given place, counted over the real tokens; from the end where negative"""

    index: int = field(0, "the place: 0 is the first real token, −1 the last", ge=-LARGEST)

    def pool(self, x_BLD: Tensor, padding: Tensor | None) -> Tensor:
        return real_token(x_BLD, padding, self.index)


def real_token(x_BLD: Tensor, padding: Tensor | None, index: int) -> Tensor:
    """The vector of one real token of each sequence, counted from its end where negative."""
    length = x_BLD.shape[1]
    if padding is None:
        if not -length <= index < length:
            raise ValueError(f"there is no token at place {index} of a sequence of {length}")
        return x_BLD[:, index]
    counts = (~padding).sum(dim=1)
    wanted = counts + index if index < 0 else torch.full_like(counts, index)
    if not numberless(counts) and bool(((wanted < 0) | (wanted >= counts)).any()):
        raise ValueError(f"there is no token at place {index} of a sequence of {int(counts.min())} (padded to {length})")
    place = real_first(padding).gather(1, wanted[:, None])
    return x_BLD.gather(1, place[..., None].expand(-1, -1, x_BLD.shape[-1])).squeeze(1)


class PooledHeadSpec(HeadSpec):
    """What the pooled heads have in common."""

    a_token: ClassVar[bool] = False

    pool: PoolSpec = field(FirstSpec(), "which vector speaks for the sequence")
    dense: bool = field(False, "a layer f(Wh + b) behind the pool")
    activation: Activation = field("tanh", "f")
    dropout: float = field(0.0, "share dropped in training", ge=0, lt=1)


class Pooled(Head):
    def __init__(self, spec: PooledHeadSpec, width: int) -> None:
        super().__init__()
        self.pool = spec.pool
        self.dense = nn.Linear(width, width) if spec.dense else None
        self.activation = ACTIVATIONS[spec.activation]
        self.dropout = nn.Dropout(spec.dropout)

    def pooled(self, x_BLD: Tensor, padding: Tensor | None) -> Tensor:
        h_BD = self.pool.pool(x_BLD, padding)
        if self.dense is not None:
            h_BD = self.activation(self.dense(h_BD))
        return self.dropout(h_BD)


class ClassesSpec(PooledHeadSpec, kind="classes"):
    """U·pool(h) + b: a score a class"""

    classes: int | Literal["data"] = field(2, "how many; 'data' until the data says")
    bias: bool = field(True, "b")

    @field_validator("classes", mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        if value != "data" and not (type(value) is int and 1 <= value <= LARGEST):
            raise ValueError(f"given {quoted(value)}, expected a number of classes from 1 to {LARGEST}, or 'data'")
        return value

    def build(self, width: int, vocab: int, rows: Rows | None) -> Head:
        return Classes(self, width)


class Classes(Pooled):
    def __init__(self, spec: ClassesSpec, width: int) -> None:
        super().__init__(spec, width)
        if spec.classes == "data":
            raise SpecError("is 'data': the number of classes is known only with the data; give a number to build without", ("classes",))
        self.output = nn.Linear(width, spec.classes, bias=spec.bias)

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding: Tensor | None) -> Tensor:
        return self.output(self.pooled(x_BLD, padding))


class VectorSpec(PooledHeadSpec, kind="vector"):
    """pool(h), one vector a sequence; of length one where `unit`"""

    unit: bool = field(False, "divide by its length")

    def build(self, width: int, vocab: int, rows: Rows | None) -> Head:
        return Vector(self, width)


class Vector(Pooled):
    def __init__(self, spec: VectorSpec, width: int) -> None:
        super().__init__(spec, width)
        self.unit = spec.unit

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding: Tensor | None) -> Tensor:
        h_BD = self.pooled(x_BLD, padding)
        return F.normalize(h_BD, dim=-1) if self.unit else h_BD


class PixelsSpec(HeadSpec, kind="pixels"):
    """U·h + b: the pixels of each patch"""

    pixels: int = field(4, "numbers in a patch", ge=1)
    skip: int = field(0, "vectors before the first patch, of which nothing is said", ge=0)

    def build(self, width: int, vocab: int, rows: Rows | None) -> Head:
        return Pixels(self, width)


class Pixels(Head):
    def __init__(self, spec: PixelsSpec, width: int) -> None:
        super().__init__()
        self.skip = spec.skip
        self.output = nn.Linear(width, spec.pixels)

    def forward(self, x_BLD: Tensor, *, table: Tensor | None, padding: Tensor | None) -> Tensor:
        return self.output(x_BLD[:, self.skip :])
