"""The three shapes of model on one task, with equally many parameters and equally many examples."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.labs.figures import Bars, Figure, Table
from manyheads.labs.finding import Finding, at_least, at_most
from manyheads.labs.fitting import fit
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.model.builder import build
from manyheads.model.cost import size
from manyheads.model.spec import ModelSpec, read_model
from manyheads.model.transformer import Transformer, as_transformer
from manyheads.spec import Tree

SYMBOLS, WIDTH = 10, 32
# the words of the source and of two dialects; START begins an answer, GAP is a word that the encoder has to fill in
VOCAB, START, GAP = 3 * SYMBOLS + 2, 3 * SYMBOLS, 3 * SYMBOLS + 1
SHAPES = ("encoder", "decoder", "encoder-decoder")


def shape_spec(shape: str, length: int) -> ModelSpec:
    """Two layers in all. Cross-attention has 4D² parameters, so the feed-forward networks beside it are narrower."""
    stack: Tree = {
        "layers": 2, "width": WIDTH, "attention": {"kind": "heads", "heads": 2}, "residual": "pre",
        "position": {"kind": "learned", "length": 2 * length}, "feedforward": {"kind": "mlp", "hidden": 4 * WIDTH},
    }  # fmt: skip
    causal: Tree = {"mask": {"causal": True}}
    tables: dict[str, Tree] = {"encoder": {"encoder": stack}, "decoder": {"decoder": stack | causal}}
    half = stack | {"layers": 1, "feedforward": {"kind": "mlp", "hidden": 3 * WIDTH}}
    half["position"] = {"kind": "learned", "length": length}
    tables["encoder-decoder"] = {"encoder": half, "decoder": half | causal | {"embed": "shared", "cross": True}}
    return read_model({"vocab": VOCAB, "init": "xavier", "head": "untied"} | tables[shape])


def draw(count: int, length: int, dialects: int) -> tuple[Tensor, Tensor]:
    """Sources of random words, and the translation of each, in reverse order and in a dialect drawn at random."""
    source = torch.randint(0, SYMBOLS, (count, length))
    return source, source.flip(1) + SYMBOLS * torch.randint(1, dialects + 1, (count, 1))


def logits(model: Transformer, source: Tensor, answer: Tensor) -> Tensor:
    """The logits of the answer: all at once by an encoder, each after the answer's earlier tokens by the others."""
    length, start = answer.shape[1], torch.full_like(answer[:, :1], START)
    shifted = torch.cat((start, answer[:, :-1]), dim=1)
    if model.encoder is None:
        out: Tensor = model(torch.cat((source, shifted), dim=1))
    elif model.decoder is None:
        out = model(torch.cat((source, torch.full_like(answer, GAP)), dim=1))
    else:
        out = model(shifted, source)
    return out[:, -length:]


@torch.no_grad()
def sample(model: Transformer, source: Tensor, length: int) -> Tensor:
    """Answers drawn from the model; a decoder reads its own tokens, with the keys and values of earlier ones cached."""

    def pick(scores: Tensor) -> Tensor:
        return torch.multinomial(scores.softmax(-1).flatten(0, -2), 1).view(scores.shape[:-1])

    if model.decoder is None:
        return pick(logits(model, source, source))
    start = torch.full_like(source[:, :1], START)
    inputs = start if model.encoder else torch.cat((source, start), dim=1)
    state, drawn = model.start(source if model.encoder else None, capacity=2 * length), list[Tensor]()
    for _ in range(length):
        scores, state = model.step(inputs, state)
        inputs = pick(scores[:, -1:])
        drawn.append(inputs)
    return torch.cat(drawn, dim=1)


@dataclass
class ShapeResult:
    """What one shape costs, and how often its answers are right, over seeds."""

    parameters: int
    multiply_adds: int  # for one answer, read or trained on
    right: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0

    @property
    def mean(self) -> float:
        return fmean(self.right)


def train_and_sample(
    shape: str, *, length: int, dialects: int, steps: int, seed: int, result: ShapeResult, progress: OnProgress
) -> None:
    torch.manual_seed(seed)
    model = as_transformer(build(shape_spec(shape, length), seed=seed), "a shape")

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores: Any = logits(model, *batch)  # type: ignore[arg-type]
        return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten())

    fit(model, lambda _: draw(64, length, dialects), loss, steps=steps, lr=5e-3, progress=progress, name=shape)
    source, _ = draw(500, length, dialects)
    begin = time.perf_counter()
    drawn = sample(model, source, length)
    result.tokens_per_second = drawn.numel() / (time.perf_counter() - begin)
    right = [(drawn == source.flip(1) + SYMBOLS * dialect).all(1) for dialect in range(1, dialects + 1)]
    result.right.append(float(torch.stack(right).any(0).float().mean()))


def comparison(results: Mapping[str, ShapeResult], length: int, mixed: float) -> tuple[Figure, ...]:
    columns = ("shape", "parameters", "multiply–adds", "passes per answer", "tokens/s", "right answers")
    rows = [
        (
            shape,
            result.parameters,
            result.multiply_adds,
            1 if shape == "encoder" else length,
            round(result.tokens_per_second),
            round(result.mean, 3),
        )
        for shape, result in results.items()
    ]
    means = {shape: result.mean for shape, result in results.items()}
    deviations = {shape: pstdev(result.right) for shape, result in results.items() if len(result.right) > 1}
    bars = Bars("Right answers", "share", means, deviations, {"dialects mixed": mixed})
    return Table("The three shapes on one task", columns, rows), bars


@lab("shapes", rows=("G8",), seconds=(10, 160), smallest={"steps": 100, "length": 3}, full={"steps": 1000, "seeds": 3},
     counterexample={"dialects": 1}, try_next=("--dialects 1", "--length 6"))  # fmt: skip
def shapes_compared(
    *,
    length: Annotated[int, "words of a source"] = 4,
    dialects: Annotated[int, "dialects of the target language, 1 or 2"] = 2,
    steps: Annotated[int, "training steps"] = 300,
    seeds: Annotated[int, "trainings per shape"] = 1,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """With equal parameters a decoder alone answers as well as an encoder–decoder; an encoder alone mixes.

    The task is a translation into a language with two dialects: each word has one translation in either, the order is
    reversed, and an answer is right if all of it is in one dialect. The shapes have equally many parameters and see
    equally many examples. A decoder reads source and answer as one text: one stack is enough, but it writes word by
    word, and every word passes all layers; in an encoder–decoder it passes one of the two stacks. An encoder fills n
    gaps in one pass, each without knowing the others, so it mixes the dialects, and 2¹⁻ⁿ of its answers are right.
    """
    results = {}
    for shape in SHAPES:
        cost = size(shape_spec(shape, length), length=length if "-" in shape else 2 * length, source_length=length)
        results[shape] = ShapeResult(cost.parameters, cost.multiply_adds)
        for i in range(seeds):
            train_and_sample(
                shape, length=length, dialects=dialects, steps=steps, seed=seed + i, result=results[shape],
                progress=progress,
            )  # fmt: skip
    counts = [result.parameters for result in results.values()]
    products, mixed = {shape: result.multiply_adds for shape, result in results.items()}, 2 ** (1 - length)
    return Finding(
        (
            at_most("largest difference of parameters", max(counts) / min(counts) - 1, 0.05),
            at_most("multiply–adds, encoder–decoder relative to decoder",
                    products["encoder-decoder"] / products["decoder"], 0.6),
            at_least("right answers, decoder", results["decoder"].mean, 0.8),
            at_least("right answers, encoder–decoder", results["encoder-decoder"].mean, 0.8),
            at_most("right answers, encoder", results["encoder"].mean, mixed + 0.15),
        ),
        comparison(results, length, mixed),
        note="The tokens per second are those of this machine and of small models, and decide nothing.",
    )  # fmt: skip
