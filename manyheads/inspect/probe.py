"""Linear probes on every layer of a frozen model, with chance, a confidence interval and two controls."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import EmptyDataError, UsageError
from manyheads.model.builder import build
from manyheads.model.recording import record
from manyheads.model.transformer import Transformer
from manyheads.parts.inputs import group_by_length, pad_rows

Label = Callable[[Sequence[int], int], Hashable | None]  # of a token in its row; None leaves the token out
WEIGHT_DECAYS = (1e-4, 1e-2, 1.0)
STEPS = 60  # of LBFGS
CONFIDENCE = 1.96  # standard deviations: 95 %


def position(ids: Sequence[int], index: int) -> int:
    """The absolute position of a token."""
    return index


def next_token(ids: Sequence[int], index: int) -> int | None:
    """The id of the token after it."""
    return ids[index + 1] if index + 1 < len(ids) else None


@dataclass(frozen=True)
class LayerProbe:
    """How well a linear classifier reads the label from one layer, on rows that it was not fitted on."""

    name: str  # of the activation; decoder.embed is layer 0
    accuracy: float
    interval: tuple[float, float]  # 95 %, Wilson
    shuffled: float  # control: accuracy of a probe fitted on shuffled labels
    untrained: float  # control: accuracy on the same model with random weights
    mean_distance: float | None  # of predicted and true label, if labels are integers


@dataclass(frozen=True)
class ProbeReport:
    """The probes of all layers; `chance` is the share of the most frequent label."""

    layers: tuple[LayerProbe, ...]
    chance: float
    classes: int
    tokens: int  # that the probes were tested on
    weights_hash: str  # of the model, before and after


def probe(model: nn.Module, rows: Sequence[Sequence[int]], label: Label = position, *, seed: int = 0) -> ProbeReport:
    """Fits a softmax classifier on each layer's output, with the model frozen: layer 0 is the embeddings.

    A fifth of the rows tests the classifiers. The untrained control is the same spec with new random weights.
    """
    if not isinstance(model, Transformer) or model.spec.has_source:
        raise UsageError("probes are for a transformer with one stack")
    before = hash_weights(model)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    tested = set(order[: max(1, len(rows) // 5)])
    labels = [[label(row, index) for index in range(len(row))] for row in rows]
    names = sorted({one for row in labels for one in row if one is not None}, key=lambda one: (str(type(one)), one))
    index = {name: number for number, name in enumerate(names)}
    targets = [torch.tensor([-1 if one is None else index[one] for one in row]) for row in labels]
    is_test = torch.cat([torch.full((len(row),), i in tested) for i, row in enumerate(rows)])
    y = torch.cat(targets)
    if len(names) < 2 or not (y[is_test] >= 0).any() or not (y[~is_test] >= 0).any():
        raise EmptyDataError(f"{len(rows):,} rows have {len(names)} labels, too few for a probe")
    fit, test = (y >= 0) & ~is_test, (y >= 0) & is_test
    untrained = build(model.spec, seed=seed, device=next(model.parameters()).device)
    assert isinstance(untrained, Transformer)
    shuffled = y[fit][torch.randperm(int(fit.sum()), generator=torch.Generator().manual_seed(seed + 1))]
    numbers = torch.tensor(names, dtype=torch.float) if all(type(name) is int for name in names) else None
    layers = []
    for (name, x), (_, control) in zip(layer_outputs(model, rows), layer_outputs(untrained, rows), strict=True):
        predicted = classify(x[fit], y[fit], x[test], len(names), seed)
        right = share(predicted == y[test])
        distance = None if numbers is None else float((numbers[predicted] - numbers[y[test]]).abs().mean())
        of_shuffled = classify(x[fit], shuffled, x[test], len(names), seed)
        of_untrained = classify(control[fit], y[fit], control[test], len(names), seed)
        interval = wilson(right, int(test.sum()))
        layers.append(
            LayerProbe(name, right, interval, share(of_shuffled == y[test]), share(of_untrained == y[test]), distance)
        )
    if hash_weights(model) != before:
        raise AssertionError("the probe changed the model")
    most = Counter(y[test].tolist()).most_common(1)[0][1]
    return ProbeReport(tuple(layers), most / int(test.sum()), len(names), int(test.sum()), before)


def layer_outputs(model: Transformer, rows: Sequence[Sequence[int]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the outputs of the embeddings and of each layer, for the tokens of all rows, N×D."""
    stack, prefix = model.last, "encoder" if model.decoder is None else "decoder"
    names = [f"{prefix}.embed", *(f"{prefix}.layers.{i}" for i in range(stack.spec.layers))]
    outputs: dict[str, list[Tensor]] = {name: [torch.empty(0)] * len(rows) for name in names}
    was_training = model.training
    model.eval()
    try:
        for batch in group_by_length([len(row) for row in rows]):
            with torch.no_grad(), record(model) as tape:
                model(pad_rows([list(rows[i]) for i in batch]).to(next(model.parameters()).device))
            activations = tape.activations()
            for name in names:
                for k, i in enumerate(batch):
                    outputs[name][i] = activations[name][k, : len(rows[i])].float().cpu()
    finally:
        model.train(was_training)
    for name in names:
        yield name, torch.cat(outputs.pop(name))


def classify(x: Tensor, y: Tensor, test_x: Tensor, classes: int, seed: int) -> Tensor:
    """The labels that a softmax classifier predicts for `test_x`; its weight decay is chosen on a fifth of `x`."""
    mean, scale = x.mean(dim=0), x.std(dim=0) + 1e-6
    x, test_x = (x - mean) / scale, (test_x - mean) / scale
    held_out = torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) < 0.2
    if held_out.all() or not held_out.any():
        held_out = torch.arange(len(x)) % 5 == 0
    accuracies = []
    for weight_decay in WEIGHT_DECAYS:
        weight, bias = fit_softmax(x[~held_out], y[~held_out], classes, weight_decay)
        accuracies.append(share((x[held_out] @ weight + bias).argmax(dim=1) == y[held_out]))
    best = WEIGHT_DECAYS[accuracies.index(max(accuracies))]
    weight, bias = fit_softmax(x, y, classes, best)
    return (test_x @ weight + bias).argmax(dim=1)


def fit_softmax(x: Tensor, y: Tensor, classes: int, weight_decay: float) -> tuple[Tensor, Tensor]:
    """W and b that minimise the mean cross-entropy of xW + b plus weight_decay/N ‖W‖², from zero."""
    weight = torch.zeros(x.shape[1], classes, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weight + bias, y) + weight_decay / len(x) * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weight.detach(), bias.detach()


def share(is_right: Tensor) -> float:
    return float(is_right.double().mean())


def wilson(fraction: float, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a fraction of `count` trials (Wilson 1927)."""
    square = CONFIDENCE**2
    middle = (fraction + square / (2 * count)) / (1 + square / count)
    half = CONFIDENCE / (1 + square / count) * math.sqrt(fraction * (1 - fraction) / count + square / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def hash_weights(model: nn.Module) -> str:
    """The SHA-256 of all parameters and buffers, with their names."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
