"""Linear probes on every layer of a frozen model, with chance, a confidence interval and two controls."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import EmptyDataError, InputError, UnsupportedError
from manyheads.model.builder import Model, build
from manyheads.model.finite import check_finite
from manyheads.model.recording import record
from manyheads.model.transformer import Transformer, as_transformer
from manyheads.parts.inputs import Inputs, group_by_length, pad_rows

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


def previous_token(ids: Sequence[int], index: int) -> int | None:
    """The id of the token before it."""
    return ids[index - 1] if index else None


def only_frequent(label: Label, rows: Sequence[Sequence[int]], count: int) -> Label:
    """A label that leaves out the tokens whose label is not among the `count` most frequent of these rows."""
    counts = Counter(label(row, index) for row in rows for index in range(len(row)))
    del counts[None]
    values = {value for value, _ in sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))[:count]}

    def frequent(ids: Sequence[int], index: int) -> Hashable | None:
        value = label(ids, index)
        return value if value in values else None

    return frequent


@dataclass(frozen=True)
class LabelledTokens:
    """The tokens of all rows with their labels, of which a fifth of the rows tests a probe."""

    rows: Sequence[Sequence[int]]
    names: list[Hashable]  # of the classes
    y: Tensor  # class of each token; −1 for a token that is left out
    fit: Tensor  # the tokens that fit a probe
    test: Tensor  # the tokens that test it

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], label: Label, *, seed: int = 0) -> LabelledTokens:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
        tested = set(order[: max(1, len(rows) // 5)])
        labels = [[label(row, index) for index in range(len(row))] for row in rows]
        names = sorted(
            {value for row in labels for value in row if value is not None}, key=lambda value: (str(type(value)), value)
        )
        index = {name: number for number, name in enumerate(names)}
        y = torch.tensor([-1 if value is None else index[value] for row in labels for value in row], dtype=torch.long)
        is_test = torch.tensor([i in tested for i, row in enumerate(rows) for _ in row], dtype=torch.bool)
        fit, test = (y >= 0) & ~is_test, (y >= 0) & is_test
        if len(names) < 2 or not fit.any() or not test.any():
            raise EmptyDataError(f"{len(rows):,} rows have {len(names)} labels, too few for a probe")
        return cls(rows, names, y, fit, test)

    @property
    def chance(self) -> float:
        """The share of the most frequent label among the tokens that test a probe."""
        return Counter(self.y[self.test].tolist()).most_common(1)[0][1] / self.tested

    @property
    def tested(self) -> int:
        return int(self.test.sum())

    @property
    def repeated(self) -> int:
        """How many rows test a probe although the same row fits it, which flatters the accuracy."""
        starts = torch.tensor([0, *(len(row) for row in self.rows)]).cumsum(0).tolist()
        fits = [bool(self.fit[a:b].any()) for a, b in pairwise(starts)]
        fitted = {tuple(row) for row, fits_probe in zip(self.rows, fits, strict=True) if fits_probe}
        return sum(tuple(row) in fitted for row, fits_probe in zip(self.rows, fits, strict=True) if not fits_probe)

    def mean_distance(self, predicted: Tensor) -> float | None:
        """Of the predicted and the true label, if labels are integers."""
        if any(type(name) is not int for name in self.names):
            return None
        numbers = torch.tensor(self.names, dtype=torch.float)
        return float((numbers[predicted] - numbers[self.y[self.test]]).abs().mean())


def probe(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    label: Label = position,
    *,
    sources: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> ProbeReport:
    """Fits a softmax classifier on each layer's output, with the model frozen: layer 0 is the embeddings.

    A fifth of the rows tests the classifiers. The untrained control is the same spec with new random weights. The rows
    are read by the encoder of an encoder–decoder, or by its decoder if each has a source. A recurrent network has two
    layers here: the embeddings, and what its head reads of the states.
    """
    check_probed(model)
    tokens = LabelledTokens.from_rows(rows, label, seed=seed)
    if sources is not None and len(sources) != len(rows):
        raise InputError(f"there are {len(sources):,} sources for {len(rows):,} rows")
    before = hash_weights(model)
    layers = tuple(probe_layers(model, tokens, sources=sources, seed=seed))
    if hash_weights(model) != before:
        raise AssertionError("the probe changed the model")
    return ProbeReport(layers, tokens.chance, len(tokens.names), tokens.tested, before)


def probe_layers(
    model: nn.Module, tokens: LabelledTokens, *, sources: Sequence[Sequence[int]] | None = None, seed: int = 0
) -> Iterator[LayerProbe]:
    """Yields the probe of the embeddings and of each layer, as soon as it is fitted."""
    probed, y, fit, test = check_probed(model), tokens.y, tokens.fit, tokens.test
    shuffled = y[fit][torch.randperm(int(fit.sum()), generator=torch.Generator().manual_seed(seed + 1))]
    outputs = layer_outputs(probed, tokens.rows, sources)
    untrained = build(probed.spec, seed=seed, device=next(model.parameters()).device)
    controls = layer_outputs(untrained, tokens.rows, sources)

    def predict(x: Tensor, labels: Tensor) -> Tensor:
        return classify(x[fit], labels, x[test], len(tokens.names), seed)

    for name in list(outputs):
        x, control = outputs.pop(name), controls.pop(name)
        predicted = predict(x, y[fit])
        accuracy = share(predicted == y[test])
        yield LayerProbe(
            name,
            accuracy,
            wilson(accuracy, tokens.tested),
            shuffled=share(predict(x, shuffled) == y[test]),
            untrained=share(predict(control, y[fit]) == y[test]),
            mean_distance=tokens.mean_distance(predicted),
        )


def check_probed(model: nn.Module) -> Model:
    """The model, if it is a transformer, or names its hidden states."""
    if not getattr(model, "hidden_names", ()):
        as_transformer(model, "a probe")
    return cast(Model, model)


def check_single_stack(model: nn.Module) -> Transformer:
    """The model, if it has one stack."""
    transformer = as_transformer(model, "a probe")
    if transformer.spec.has_source:
        raise UnsupportedError("this needs a model of one stack, an encoder or a decoder; this model has both")
    return transformer


def layer_names(probed: Model, *, has_sources: bool = False) -> list[str]:
    """The names of the activations that are probed: of the embeddings, and of each layer of the stack that reads."""
    if not probed.stacks:
        return list(probed.hidden_names)
    model = as_transformer(probed, "a probe")
    prefix, stack = "decoder", model.decoder
    if model.encoder is not None and not has_sources:
        prefix, stack = "encoder", model.encoder
    return [f"{prefix}.embed", *(f"{prefix}.layers.{i}" for i in range((stack or model.last).spec.layers))]


def layer_outputs(
    probed: nn.Module, rows: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None = None
) -> dict[str, Tensor]:
    """The outputs of the embeddings and of each layer by their names, for the tokens of all rows, N×D."""
    model = check_probed(probed)
    names = layer_names(model, has_sources=sources is not None)
    outputs: dict[str, list[Tensor]] = {name: [torch.empty(0)] * len(rows) for name in names}
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        for batch in group_by_length([len(row) for row in rows]):
            ids = pad_rows([list(rows[i]) for i in batch]).to(device)
            source = None if sources is None else pad_rows([list(sources[i]) for i in batch]).to(device)
            with torch.no_grad(), record(model) as tape:
                read_rows(model, ids, source)
            activations = tape.activations()
            check_finite(model, activations[names[-1]], partial(read_rows, model, ids, source))
            for name in names:
                for k, i in enumerate(batch):
                    outputs[name][i] = activations[name][k, : len(rows[i])].float().cpu()
    finally:
        model.train(was_training)
    return {name: torch.cat(parts) for name, parts in outputs.items()}


def read_rows(model: Model, ids: Inputs, source: Inputs | None) -> None:
    """Runs the stack that is probed: of an encoder–decoder its encoder, unless there is a source."""
    if model.stacks and model.spec.has_source and source is None:
        as_transformer(model, "a probe").encode(ids)
    else:
        model.last_hidden_state(ids, source)


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
    """W and b that minimize the mean cross-entropy of xW + b plus weight_decay/N ‖W‖², from zero."""
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


def wilson(fraction: float, count: int, deviations: float = CONFIDENCE) -> tuple[float, float]:
    """The confidence interval of a fraction of `count` trials (Wilson 1927): 95 %, or of other standard deviations."""
    square = deviations**2
    middle = (fraction + square / (2 * count)) / (1 + square / count)
    half = deviations / (1 + square / count) * math.sqrt(fraction * (1 - fraction) / count + square / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def hash_weights(model: nn.Module) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
