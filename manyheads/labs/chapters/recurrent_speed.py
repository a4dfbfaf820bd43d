"""Recurrence, convolution and attention: how far each sees, how many steps it takes, and how fast it learns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.inspect.measure import receptive_field
from manyheads.labs.figures import Lines, Table
from manyheads.labs.finding import Finding, at_least, at_most, equals, is_true, reported
from manyheads.labs.fitting import count_calls, fastest, fit, small_model
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.labs.plain import attend
from manyheads.model.builder import Model, build
from manyheads.model.cost import count_parameters
from manyheads.model.spec import read_model

SYMBOLS = 8


def recurrent_model(seed: int, width: int = 32) -> Model:
    fields = {"width": width, "source": False}
    return build(read_model({"vocab": SYMBOLS, "recurrent": fields, "head": "untied"}), seed=seed)


@lab("recurrent", rows=("E6",), seconds=(1.0, 2.0), smallest={"longest": 64}, full={"longest": 1024},
     counterexample={"recurrent": True}, try_next=("--longest 1024", "--recurrent"))  # fmt: skip
def sequential_steps(
    *,
    longest: Annotated[int, "tokens of the longest sequence that is timed"] = 512,
    recurrent: Annotated[bool, "a recurrent network instead of the transformer layer"] = False,
    seed: int = 0,
) -> Finding:
    """A recurrent network takes one step per token, a transformer layer one step for all tokens.

    Each state needs the state before it, so L tokens are L steps that no computer can take at the same time. Attention
    computes all outputs from all inputs at once. The depth is the longest chain of operations in which each needs the
    result of the one before; it is counted in the graph that torch records for the gradient.
    """
    layer = recurrent_model(seed) if recurrent else small_model(vocab=SYMBOLS, layers=1, seed=seed)
    module = "cells.0" if recurrent else "decoder.layers.0"
    network, lengths = recurrent_model(seed), [n for n in (32, 64, 128, 256, 512, 1024) if n <= longest]
    short, long = 16, 32
    depth = {
        name: [chain(model(zeros(n))) for n in (short, long)] for name, model in (("net", network), ("layer", layer))
    }
    per_token = (depth["net"][1] - depth["net"][0]) / (long - short)
    times = {
        name: [(float(n), 1e6 * fastest(partial(model, zeros(n)), 3) / n) for n in lengths]
        for name, model in (("recurrent network", network), ("transformer layer", layer))
    }
    return Finding(
        (
            equals("steps of the recurrent network for 32 tokens", count_calls(network, "cells.0", zeros(long)), long),
            equals("steps of the transformer layer", count_calls(layer, module, zeros(long)), 1),
            at_least("operations that each further token adds to the chain: recurrent network", per_token, 1.0),
            equals("the same: transformer layer", float(depth["layer"][1] - depth["layer"][0]), 0.0),
            *(
                reported(f"microseconds per token, {name}, {n:.0f} tokens", t)
                for name, ts in times.items()
                for n, t in ts
            ),
        ),
        (Lines("Time per token, forward", "tokens", "microseconds", times, log_x=True, log_y=True),),
    )


def zeros(length: int) -> Tensor:
    return torch.zeros(1, length, dtype=torch.long)


def chain(out: Tensor) -> int:
    """The number of operations on the longest path of the graph of an output."""
    depth: dict[Any, int] = {}
    stack = [out.grad_fn]
    while stack:
        node = stack[-1]
        inputs = [parent for parent, _ in node.next_functions if parent is not None] if node else []
        if missing := [parent for parent in inputs if parent not in depth]:
            stack.extend(missing)
        else:
            depth[stack.pop()] = 1 + max((depth[parent] for parent in inputs), default=0)
    return depth[out.grad_fn]


class Decomposable(nn.Module):
    """Attend, compare, aggregate: one vector for a pair of sentences (Parikh et al. 2016, section 3)."""

    def __init__(self, size: int, *, recurrent: bool) -> None:
        super().__init__()
        self.score, self.compare = nn.Linear(size, size), nn.Linear(2 * size, size)
        self.reader = nn.RNN(size, size) if recurrent else None

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if self.reader is not None:
            a, b = self.reader(a)[0], self.reader(b)[0]
        attended = attend(self.score(a).relu(), self.score(b).relu(), b)  # equations 1 and 2, one network for both
        compared: Tensor = self.compare(torch.cat((a, attended), dim=-1)).relu()
        return compared.sum(0)


@lab("recurrent", errata=("E15",), counterexample={"recurrent": True},
     try_next=("--words 40", "--recurrent --words 2"))  # fmt: skip
def attention_before_the_transformer(
    *,
    words: Annotated[int, "words of each of the two sentences"] = 8,
    width: Annotated[int, "numbers of a word"] = 16,
    recurrent: Annotated[bool, "whether a recurrent network reads the words first"] = False,
) -> Finding:
    """A model that only attends, without recurrence, is older than the transformer.

    Decomposable attention compares two sentences, a year before the transformer. Each word of the first attends to the
    words of the second, a network compares it with the mean that it gets, and the results are added up. Every word is
    compared at once: the output is the sum over words that are compared alone, their order does not matter, and more
    words add nothing to the longest chain of operations. Most models of the time read the words with a recurrent
    network first; then each word waits for the one before it.
    """
    model = Decomposable(width, recurrent=recurrent).double()
    a, b = torch.randn(2, 2 * words, width, dtype=torch.float64)
    first, second = a[:words], b[:words]
    out = model(first, second)
    with torch.no_grad():
        reordered = (model(first.flip(0), second.flip(0)) - out).abs().max()
        alone = (torch.stack([model(word[None], second) for word in first]).sum(0) - out).abs().max()
    return Finding(
        (
            at_most("change of the output if the words of both sentences are reversed", reordered, 1e-9),
            at_most("difference from the sum over words that are compared alone", alone, 1e-9),
            equals(f"operations that {words} more words add to the longest chain", chain(model(a, b)) - chain(out), 0),
        ),
        correction="The transformer is not the first model without recurrence: decomposable attention (Parikh et al. "
        "2016) has none either. It reads a pair of sentences and writes no text, so whether it counts is contested.",
    )


@lab("recurrent", rows=("P1",), smallest={"layers": 2, "kernel": 3}, full={"layers": 5, "kernel": 6},
     counterexample={"attention": True}, try_next=("--layers 6 --kernel 2", "--attention"))  # fmt: skip
@torch.no_grad()
def reach_of_convolution(
    *,
    layers: Annotated[int, "largest number of layers"] = 3,
    kernel: Annotated[int, "largest kernel"] = 4,
    tokens: Annotated[int, "length of the sequence"] = 32,
    attention: Annotated[bool, "attention in place of the convolution"] = False,
    seed: int = 0,
) -> Finding:
    """A convolution sees 1 + n(k − 1) tokens after n layers, attention all of them after one.

    In the attention slot, a convolution gives each neighbour a learned weight by its offset: k of them under a causal
    mask. A layer reaches k − 1 tokens further back than the one below it. The reach is measured: a token is seen if a
    change of it changes the last output.
    """
    ids = torch.randint(0, SYMBOLS, (tokens,)).tolist()

    def reach(layers: int, core: dict[str, Any]) -> int:
        model = small_model(vocab=SYMBOLS, layers=layers, core=core, seed=seed).double()
        return len(receptive_field(model, ids, tokens - 1, replacements=[0, 1]))

    rows = []
    for n in range(1, layers + 1):
        for k in range(2, kernel + 1):
            measured = reach(n, {} if attention else {"kind": "convolution", "kernel": k})
            rows.append((n, k, min(1 + n * (k - 1), tokens), measured))
    return Finding(
        (
            equals("settings in which the reach is 1 + n(k − 1)", sum(e == m for *_, e, m in rows), len(rows)),
            equals("tokens that one layer of attention sees", reach(1, {}), tokens),
        ),
        (Table("Tokens that the last output depends on", ("layers n", "kernel k", "1 + n(k − 1)", "measured"), rows),),
    )


@lab("recurrent", rows=("P1",), seconds=(5.0, 22.0), smallest={"distance": 6, "tokens": 12, "steps": 80},
     full={"distance": 16, "tokens": 32, "steps": 400}, counterexample={"distance": 1},
     try_next=("--distance 2", "--kernel 13 --tokens 24"))  # fmt: skip
def learning_speed(
    *,
    distance: Annotated[int, "how far back the token to repeat is"] = 10,
    tokens: Annotated[int, "length of a sequence"] = 20,
    kernel: Annotated[int, "kernel of the convolution"] = 3,
    steps: Annotated[int, "optimizer steps"] = 150,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """On a task that needs a far token, attention learns in fewer steps than a convolution or a recurrent network.

    The task: repeat the token that is d back. The three have as many parameters as each other, and train on the same
    data. A convolution learns nothing of what is beyond its kernel. A recurrent network must carry d tokens in its
    state. Attention needs one offset. If the token is near, the others are as fast.
    """
    goal = 0.5 * torch.log(torch.tensor(float(SYMBOLS))).item()
    models, curves, rows = three_models(kernel, tokens, seed), {}, []
    reached: dict[str, int] = {}
    for name, model in models.items():
        torch.manual_seed(seed)  # the same batches
        start = time.perf_counter()
        losses = fit(model, lambda _: torch.randint(0, SYMBOLS, (32, tokens)), RepeatLoss(distance),
                     steps=steps, lr=1e-2, progress=progress, name=name)  # fmt: skip
        seconds, smooth = time.perf_counter() - start, means(losses, 5)
        reached[name] = next((i for i, value in enumerate(smooth) if value < goal), steps)
        curves[name] = list(enumerate(smooth))
        to_goal = f"{seconds * reached[name] / steps:.1f}" if reached[name] < steps else "not reached"
        rows.append((name, count_parameters(model), reached[name] if reached[name] < steps else "not reached", to_goal))
    counts = [count_parameters(model) for model in models.values()]
    best_other = min(reached["convolution"], reached["recurrent"])
    return Finding(
        (
            at_most("largest difference in parameters, relative", max(counts) / min(counts) - 1, 0.05),
            is_true(f"attention reaches a loss of {goal:.2f}", reached["attention"] < steps),
            at_most("its steps, relative to the faster of the others", reached["attention"] / best_other, 0.8),
            *(reported(f"{name}: seconds to this loss", duration) for name, _, _, duration in rows),
        ),
        (
            Lines("Training loss", "step", "cross-entropy", curves, {"goal": goal}),
            Table(f"To a loss of {goal:.2f}", ("network", "parameters", "steps", "seconds"), rows),
        ),
    )


def three_models(kernel: int, tokens: int, seed: int) -> dict[str, Model]:
    """Attention, a convolution and a recurrent network with about as many parameters as each other."""
    fields: dict[str, Any] = {"layers": 1, "seed": seed, "vocab": SYMBOLS, "head": "untied"}
    attention = small_model(**fields, position={"kind": "relative", "length": tokens})
    goal = count_parameters(attention)

    def nearest(models: Sequence[Model]) -> Model:
        return min(models, key=lambda model: abs(count_parameters(model) - goal))

    core = {"kind": "convolution", "kernel": kernel}
    convolutions = [small_model(**fields, core=core, feedforward={"hidden": 128 + n}) for n in range(0, 64, 8)]
    return {
        "attention": attention,
        "convolution": nearest(convolutions),
        "recurrent": nearest([recurrent_model(seed, width) for width in range(32, 64)]),
    }


class RepeatLoss:
    """The loss of a model that repeats the token that is `distance` back."""

    def __init__(self, distance: int) -> None:
        self.distance = distance

    def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids)[:, self.distance :]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, : -self.distance].flatten())


def means(values: Sequence[float], count: int) -> list[float]:
    """Each value's mean with the values before it, of up to `count`."""
    return [sum(values[max(0, i + 1 - count) : i + 1]) / min(count, i + 1) for i in range(len(values))]
