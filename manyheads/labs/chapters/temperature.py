"""Temperature: the scale of logits at the start of training, and what a generated text becomes at 0."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from statistics import fmean, stdev
from typing import Annotated

import torch
from torch import Tensor, nn

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.labs.figures import Bars, Lines
from manyheads.labs.finding import Finding, at_least, at_most, is_true, judging, near, reported
from manyheads.labs.fitting import fit, next_token_loss
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.model.builder import Model, build
from manyheads.model.spec import read_model
from manyheads.parts.core import DotSpec
from manyheads.parts.embed import TableShape
from manyheads.parts.head import HeadSpec

# --------------------------------------------------------------------------------------------------------- variance


@lab("temperature", rows=("K1", "K2"), seconds=(1.5, 1.5), smallest={"largest": 64}, counterexample={"beta": "one"},
     try_next=("--beta one", "--largest 4096 --count 500"))  # fmt: skip
def unit_variance(
    *,
    beta: Annotated[str, "factor of the logits: inverse-sqrt (1/√I) or one"] = "inverse-sqrt",
    largest: Annotated[int, "largest size I"] = 1024,
    count: Annotated[int, "number of vectors h, and of tokens"] = 2000,
) -> Finding:
    """The factor β = 1/√I gives an inner product of I random components the variance 1, as in attention.

    The logit of a token is β h·e, a sum of I products. If the components of h and e are independent, with mean 0 and
    variance 1, each product has variance 1, and the sum has I: its standard deviation grows with √I, and the softmax
    would begin as a near arg-max in a wide model. β = 1/√I makes the variance 1 for every I. It is the factor that
    attention gives to q·k, and here one function computes both.
    """
    sizes = [4**i for i in range(2, 7) if 4**i <= largest]
    scaled, plain, attention, factors = [], [], [], []
    for size in sizes:
        h, e = torch.randn(count, size), torch.randn(count, size)
        head = HeadSpec.from_config({"kind": "tied", "logit_scale": beta}).build(size, count, TableShape(size, size))
        learned = HeadSpec.from_config({"kind": "tied", "logit_scale": beta, "learn_logit_scale": True})
        core = DotSpec().build(1, size, size)
        logits = head(h[None], table=e, padding_mask=None)
        scaled.append(logits)
        plain.append(float((h @ e.T).var()))
        attention.append(float((core.scale * h @ e.T).var()))
        start = float(dict(learned.build(size, count, TableShape(size, size)).named_parameters())["beta"].detach())
        factors.append(max(abs(core.scale - size**-0.5), abs(start - size**-0.5)))
    variances = {"β = " + beta: [float(x.var()) for x in scaled], "β = 1": plain, "attention": attention}
    curves = {name: list(zip(map(float, sizes), values, strict=True)) for name, values in variances.items()}
    worst = max(variances["β = " + beta], key=lambda v: abs(v - 1))
    return Finding(
        (
            *judging(
                "K1",
                near("variance of β h·e, farthest from 1 of all sizes", worst, 1.0, 0.05),
                near("mean of β h·e, largest of all sizes", max((float(x.mean()) for x in scaled), key=abs), 0.0, 0.05),
                near("variance of h·e, divided by I", plain[-1] / sizes[-1], 1.0, 0.05),
            ),
            *judging(
                "K2",
                near("variance of the scores of attention", max(attention, key=lambda v: abs(v - 1)), 1.0, 0.05),
                at_most("attention's scale and a learned β at its start, difference to 1/√I", max(factors), 1e-6),
            ),
        ),
        (Lines("Variance of the logits before training", "size I", "variance", curves, log_x=True, log_y=True),),
    )


# --------------------------------------------------------------------------------------------------------- sampling


@torch.no_grad()
def trigram_with_logits(logits_V: Tensor) -> Model:
    """A trigram model that has the same logits after every context."""
    vocab = len(logits_V)
    model = build(read_model({"vocab": vocab, "ngram": {"width": 2}, "head": {"kind": "untied", "bias": True}}))
    for parameter in model.parameters():
        parameter.zero_()
    dict(model.named_parameters())["head.bias"].copy_(logits_V)
    return model


def entropy(probabilities: Tensor) -> float:
    return float(torch.special.entr(probabilities).sum())


@lab("temperature", rows=("K3",), seconds=(2.0, 6.0), smallest={"samples": 200}, full={"samples": 3000},
     counterexample={"spread": 0.0}, try_next=("--spread 0.5", "--tokens 200"))  # fmt: skip
def sampling_temperature(
    *,
    tokens: Annotated[int, "size of the vocabulary"] = 20,
    spread: Annotated[float, "standard deviation of the logits"] = 2.0,
    samples: Annotated[int, "tokens that are sampled at each temperature"] = 1500,
    seed: int = 0,
) -> Finding:
    """A higher temperature gives samples of a higher entropy, and temperature 0 is the arg-max.

    Sampling at temperature T draws from softmax(z/T); here z is the same at every step, so one text gives all samples.
    The entropy H of this distribution grows with T, because dH/dT = Var(z)/T³, and the variance of the logits z under
    the distribution is 0 only if all logits that count are equal. As T falls to 0 the largest logit takes all, so T = 0
    means: take the arg-max, without a division.
    """
    logits = spread * torch.linspace(-1.7, 1.7, tokens)[torch.randperm(tokens)]
    checkpoint = Checkpoint(trigram_with_logits(logits))

    def sample(temperature: float, count: int = samples) -> Tensor:
        tokens = checkpoint.generate([0, 0], max_new_tokens=count, temperature=temperature, seed=seed)
        return torch.tensor(tokens)

    temperatures = [0.25, 0.5, 1.0, 2.0, 4.0]
    shares = {t: sample(t).bincount(minlength=tokens) / samples for t in temperatures}
    measured = [entropy(shares[t]) for t in temperatures]
    exact = [entropy((logits / t).softmax(0)) for t in temperatures]
    greedy, cold = sample(0.0, 20), sample(1e-6, 20)
    curves = {
        "samples": list(zip(temperatures, measured, strict=True)),
        "softmax(z/T)": list(zip(temperatures, exact, strict=True)),
    }
    rise = min(b - a for a, b in pairwise(measured))
    error = max(abs(a - b) for a, b in zip(measured, exact, strict=True))
    title = "Entropy against temperature"
    return Finding(
        (
            at_least("smallest rise from a temperature to twice it, in nats", rise, 0.02),
            at_most("entropy of the samples, largest difference to softmax(z/T)", error, 5 / math.sqrt(samples)),
            is_true("T = 0 is always the arg-max", bool((greedy == logits.argmax()).all())),
            is_true("T = 10⁻⁶ too, without infinities", bool((cold == logits.argmax()).all())),
        ),
        (Lines(title, "temperature", "nats", curves, {"uniform, ln V": math.log(tokens)}, log_x=True),),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------- a source of pairs


class PairSource:
    """Texts in which two tokens determine the distribution of the next: P(c | a, b), random; with known entropies."""

    def __init__(self, vocab: int, sharpness: float) -> None:
        self.vocab = vocab
        self.next_VVV = (sharpness * torch.randn(vocab, vocab, vocab, dtype=torch.float64)).softmax(-1)
        pairs = torch.full((vocab, vocab), vocab**-2, dtype=torch.float64)
        for _ in range(500):  # p(b, c) = Σ_a p(a, b) P(c | a, b)
            pairs = torch.einsum("ab,abc->bc", pairs, self.next_VVV)
        self.triples_VVV = pairs[..., None] * self.next_VVV

    def nats(self, previous: int) -> float:
        """The entropy of the next token for a model that knows 0, 1 or 2 previous tokens."""
        joint = self.triples_VVV
        for _ in range(2 - previous):
            joint = joint.sum(0)
        return entropy(joint) - (entropy(joint.sum(-1)) if previous else 0.0)

    def draw(self, rows: int, length: int) -> Tensor:
        tokens = torch.randint(self.vocab, (rows, 2))
        for _ in range(length + 18):  # the first 20 are burn-in: not stationary yet
            probabilities = self.next_VVV[tokens[:, -2], tokens[:, -1]]
            tokens = torch.cat((tokens, torch.multinomial(probabilities, 1)), dim=1)
        return tokens[:, 20:]


def train_ngram(
    source: PairSource, train: Tensor, *, order: int = 3, width: int = 24, head: str = "tied", steps: int, seed: int,
    progress: OnProgress = no_progress, name: str = "step",
) -> tuple[Model, list[float]]:  # fmt: skip
    """A trained neural n-gram model, and its losses; two tokens are known before each target."""
    backbone = {"order": order, "width": width, "hidden": width}
    model = build(read_model({"vocab": source.vocab, "ngram": backbone, "head": head, "init": "xavier"}), seed=seed)
    torch.manual_seed(seed)
    losses = fit(model, lambda _: train[torch.randint(len(train), (24,))], partial(next_token_loss, first=2),
                 steps=steps, lr=1.5e-2, progress=progress, name=name)  # fmt: skip
    return model, losses


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: Tensor) -> float:
    return float(next_token_loss(model, tokens, first=2))


@lab("temperature", rows=("K5",), seconds=(3.0, 8.0), smallest={"steps": 150, "vocab": 4}, full={"steps": 1500},
     counterexample={"order": 2}, try_next=("--order 2", "--vocab 12 --steps 1200"))  # fmt: skip
def neural_trigram(
    *,
    order: Annotated[int, "tokens of an n-gram: 3 reads two tokens and predicts the third"] = 3,
    vocab: Annotated[int, "size of the vocabulary"] = 6,
    steps: Annotated[int, "optimizer steps"] = 400,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A neural trigram model reaches the lowest possible loss, the entropy of P(c | a, b).

    The model is softmax h(e(a), e(b))ᵀe(c), with a hidden layer h on the embeddings of two tokens. The texts come from
    random probabilities P(c | a, b), so the best possible loss is known: the entropy of c, given a and b. A model that
    knows only b cannot be better than the entropy given b.
    """
    source = PairSource(vocab, sharpness=2.0)
    train, validation = source.draw(400, 64), source.draw(200, 64)
    model, losses = train_ngram(source, train, order=order, steps=steps, seed=seed, progress=progress)
    loss, best, pair = validation_loss(model, validation), source.nats(2), source.nats(1)
    every = max(1, steps // 50)
    curve = [(float(i), fmean(losses[i : i + every])) for i in range(0, steps, every)]
    levels = {"no token known": source.nats(0), "one token known": pair, "two tokens known": best}
    return Finding(
        (
            near("loss on new texts, in nats per token", loss, best, 0.1),
            at_most("the same loss, below that of every bigram model", loss, pair - 0.1),
        ),
        (Lines("Learning P(c | a, b)", "step", "nats per token", {"training loss": curve}, levels),),
    )


# ------------------------------------------------------------------------------------------------- inner product


@lab("temperature", rows=("K4",), seconds=(8.0, 150.0), smallest={"seeds": 1, "steps": 150, "vocab": 4},
     full={"seeds": 10, "steps": 1500}, counterexample={"other_width": 2},
     try_next=("--seeds 6", "--vocab 12"))  # fmt: skip
def inner_product(
    *,
    seeds: Annotated[int, "models of each kind"] = 3,
    steps: Annotated[int, "optimizer steps"] = 350,
    vocab: Annotated[int, "size of the vocabulary"] = 6,
    other_width: Annotated[int, "width of the models with the matrix W; the others have 24"] = 24,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A matrix in the output, hᵀWe instead of hᵀe, changes the perplexity by less than 2 %.

    The network before it can learn to output Wᵀh itself, so W adds parameters, and no functions that matter. Neural
    trigram models of both kinds are trained on the same texts, with several seeds. Their mean perplexities differ by
    less than 2 %, though W may be the better one with every seed. In attention the matrix is needed: without it all
    heads would have the same scores.
    """
    source = PairSource(vocab, sharpness=2.0)
    train, validation = source.draw(400, 64), source.draw(400, 64)
    kinds = {"hᵀe": ("tied", 24), "hᵀWe": ("bilinear", other_width)}
    losses: dict[str, list[float]] = {name: [] for name in kinds}
    for i in range(seeds):
        for name, (head, width) in kinds.items():
            model, _ = train_ngram(source, train, width=width, head=head, steps=steps, seed=1000 * seed + i,
                                   progress=progress, name=f"{name}, seed {i}: step")  # fmt: skip
            losses[name].append(validation_loss(model, validation))
    means = {name: fmean(values) for name, values in losses.items()}
    differences = [b - a for a, b in zip(*losses.values(), strict=True)]
    deviations = {name: math.exp(means[name]) * stdev(values) for name, values in losses.items()} if seeds > 1 else {}
    perplexities = {name: math.exp(mean) for name, mean in means.items()}
    return Finding(
        (
            near("perplexity with W, divided by that without", math.exp(fmean(differences)), 1.0, 0.02),
            reported("seeds for which W is better", sum(d < 0 for d in differences)),
            reported("seeds for which it is worse", sum(d > 0 for d in differences)),
        ),
        (
            Bars("Perplexity on new texts, mean and standard deviation over seeds", "perplexity", perplexities,
                 deviations, {"best possible": math.exp(source.nats(2))}),
        ),
    )  # fmt: skip
