"""Probing: what a linear classifier reads from the layers of a frozen model."""

from __future__ import annotations

import copy
from typing import Annotated

import torch

from manyheads.errors import UsageError
from manyheads.inspect.probe import (
    Label,
    ProbeReport,
    hash_weights,
    position,
    previous_token,
    probe,
    wilson,
)
from manyheads.labs.figures import Lines, Table
from manyheads.labs.finding import Check, Finding, at_least, at_most, is_true, judging, reported
from manyheads.labs.fitting import add_noise
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.labs.language import LENGTH, language_model, source
from manyheads.labs.schemes import scheme_names

Mask = Annotated[str, "causal or bidirectional"]


def is_causal(mask: str) -> bool:
    if mask not in ("causal", "bidirectional"):
        raise UsageError(f"mask is {mask}, expected causal or bidirectional")
    return mask == "causal"


def probe_model(
    scheme: str,
    mask: str,
    label: Label,
    *,
    steps: int,
    rows: int,
    seed: int,
    text: str = "tune",
    layers: int = 2,
    noise: float = 0.0,
) -> tuple[ProbeReport, bool]:
    """The probes of a language model, and whether its weights are then the same, unless noise is added to them."""
    model = language_model(
        text, scheme, causal=is_causal(mask), width=64, rows=24, layers=layers, steps=steps, seed=seed
    )
    before = hash_weights(model)
    if noise:
        model = add_noise(copy.deepcopy(model), noise)
    windows = source(text).windows(rows, torch.Generator().manual_seed(seed + 1)).tolist()
    report = probe(model, windows, label, seed=seed)
    return report, hash_weights(model) == before == report.weights_hash


def layers_table(report: ProbeReport, title: str) -> Table:
    rows = [
        [i, layer.accuracy, layer.mean_distance, layer.untrained, layer.shuffled]
        for i, layer in enumerate(report.layers)
    ]
    return Table(title, ["layer", "accuracy", "mean distance", "untrained", "shuffled labels"], rows)


def layers_figure(report: ProbeReport, title: str) -> Lines:
    curves = {
        name: [(float(i), float(getattr(layer, field))) for i, layer in enumerate(report.layers)]
        for name, field in (("model", "accuracy"), ("untrained", "untrained"), ("shuffled labels", "shuffled"))
    }
    return Lines(title, "layer, 0 is the embeddings", "accuracy", curves, {"chance": report.chance})


def corrected_interval(accuracy: float, report: ProbeReport) -> tuple[float, float]:
    """The Wilson interval that holds for all layers together with 99 %: each has 1 − 1 %/k (Bonferroni).

    It counts rows: the tokens of one row share their key, and are right or wrong together.
    """
    k = len(report.layers)
    z = float(torch.special.ndtri(torch.tensor(1 - 0.005 / k, dtype=torch.float64)))
    return wilson(accuracy, report.tokens // LENGTH, z)


def largest_at_chance(report: ProbeReport) -> float:
    """The largest accuracy whose interval still contains chance: the test cannot tell it from chance."""
    steps = [i / 1000 for i in range(1000)]
    return max(accuracy for accuracy in steps if corrected_interval(accuracy, report)[0] <= report.chance)


def at_chance(report: ProbeReport, layer: int) -> Check:
    low, high = corrected_interval(report.layers[layer].accuracy, report)
    name, expected = f"layer {layer}: interval of the accuracy", f"contains chance, {report.chance:.3f}"
    return Check(name, f"{low:.3f} to {high:.3f}", expected, low <= report.chance <= high)


@lab("probing", rows=("L1", "L2", "L3", "L7"), seconds=(20.0, 60.0), full={"layers": 4, "rows": 600, "steps": 1500},
     counterexample={"mask": "bidirectional"},
     row_counterexamples={"L1": {"noise": 1e-6, "steps": 1, "rows": 60},
                          "L7": {"shuffled": False, "steps": 1, "rows": 60}},
     try_next=("--text biographies", "--scheme sinusoidal --rows 500"))  # fmt: skip
def position_probe(
    *,
    text: Annotated[str, "tune or biographies"] = "tune",
    scheme: Annotated[str, "position scheme of the model"] = "none",
    mask: Mask = "causal",
    layers: Annotated[int, "layers of the model"] = 3,
    steps: Annotated[int, "training steps"] = 1500,
    rows: Annotated[int, "rows for the probes, a fifth of them to test"] = 300,
    noise: Annotated[float, "standard deviation of what is added to the weights of the model before the probes"] = 0.0,
    shuffled: Annotated[bool, "whether the labels of the second control are shuffled"] = True,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A causal language model without positions knows where each token is.

    The model predicts the next note of a tune that repeats, from a random note on, in a random key, with wrong notes.
    It gets no positions, and neither a note nor its neighbors are more frequent at one position than at another, so
    the embeddings (layer 0) tell nothing. But under a causal mask each token sees only what is before it, and that
    grows. A probe is one linear layer and a softmax on the outputs of a layer, which predicts the position; the model
    stays frozen. Two controls are beside it: probes of the model before training, and probes fitted on shuffled
    labels, which must stay at chance.
    """
    progress("training and probes", 0, 1)
    report, is_frozen = probe_model(
        scheme, mask, position, steps=steps, rows=rows, seed=seed, layers=layers, text=text, noise=noise
    )
    best = max(range(1, len(report.layers)), key=lambda i: report.layers[i].accuracy)
    layer, title = report.layers[best], f"Accuracy of the position, {LENGTH} positions"
    low, _ = corrected_interval(layer.accuracy, report)
    control = max(each.shuffled if shuffled else each.accuracy for each in report.layers)
    return Finding(
        (
            *judging(
                "L2 L3",
                at_least(f"layer {best}: accuracy, 5 times chance", layer.accuracy, 5 * report.chance),
                at_least(f"layer {best}: lower end of its interval, above chance", low, report.chance),
                at_chance(report, 0),
            ),
            *judging("L7", at_most("largest accuracy with shuffled labels, below twice chance", control,
                                   2 * report.chance)),
            *judging("L1", is_true("the weights of the model are the same after the probes", is_frozen)),
            reported(f"layer {best}: mean distance to the position", layer.mean_distance or 0.0),
            reported(f"layer {best}: accuracy before training", layer.untrained),
            reported("chance", report.chance),
        ),
        (layers_figure(report, title), layers_table(report, title)),
        note="Random weights already give half of it: attention to all tokens before is a mean of more tokens the "
        "later the position is. The untrained control shows how much. It takes training: the same model with 120 steps "
        "is at three to four times chance. How well a position can be read depends on the text: on the characters of "
        "biographies the accuracy is above chance too, but below five times chance.",
    )  # fmt: skip


@lab("probing", rows=("L4",), seconds=(7.0, 60.0), smallest={"steps": 60},
     full={"rows": 1000, "steps": 600}, counterexample={"mask": "causal"},
     try_next=("--mask causal", "--scheme rope"))  # fmt: skip
def blind_probe(
    *,
    scheme: Annotated[str, "position scheme of the model"] = "none",
    mask: Mask = "bidirectional",
    layers: Annotated[int, "layers of the model"] = 2,
    steps: Annotated[int, "training steps"] = 120,
    rows: Annotated[int, "rows for the probes, a fifth of them to test"] = 300,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A bidirectional model without positions does not know where a token is, in any layer.

    Without a mask every token sees the same set of tokens, and its output is a function of itself and of that set.
    Here neither tells a position: all rows have the same length, without begin and end tokens, which would give it
    away. So every layer is at chance. With k layers, one of k intervals of 95 % often misses chance by luck. The
    intervals here are wider, 1 − 1 %/k each, so that all of them contain it together in 99 % of such experiments
    (Bonferroni), and they count rows and not tokens, since the tokens of one row are not independent.
    """
    progress("training and probes", 0, 1)
    report, _ = probe_model(scheme, mask, position, steps=steps, rows=rows, seed=seed, layers=layers)
    title = f"Accuracy of the position, {LENGTH} positions"
    return Finding(
        (
            *(at_chance(report, i) for i in range(len(report.layers))),
            reported("largest accuracy that so few rows cannot tell from chance", largest_at_chance(report)),
        ),
        (layers_figure(report, title), layers_table(report, title)),
    )


@lab("probing", rows=("L5",), seconds=(15.0, 440.0),
     smallest={"schemes": "none", "embedded": "sinusoidal", "rows": 60, "steps": 60},
     full={"rows": 600, "steps": 600, "schemes": "none relative clipped bucketed shaw alibi rope",
           "embedded": "sinusoidal learned concatenated multiplied"},
     counterexample={"embedded": "none"},
     try_next=("--mask bidirectional", "--schemes clipped,alibi,shaw"))  # fmt: skip
def schemes_probed(
    *,
    schemes: Annotated[str, "schemes that act in attention, or none"] = "none relative rope",
    embedded: Annotated[str, "schemes that join positions to the embeddings"] = "sinusoidal learned",
    mask: Mask = "causal",
    steps: Annotated[int, "training steps"] = 100,
    rows: Annotated[int, "rows for the probes, a fifth of them to test"] = 120,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """Every scheme can be compared by the layer from which its positions can be read.

    Sinusoidal and learned positions are joined to the embeddings, so a probe finds them in layer 0. Relative biases,
    RoPE and no positions at all leave the embeddings as they are: layer 0 is at chance, and what attention makes of
    the offsets and of the mask is found above it.
    """
    names = [*dict.fromkeys(scheme_names(f"{schemes} {embedded}"))]
    reports = {}
    for done, name in enumerate(names):
        progress(name, done, len(names))
        reports[name], _ = probe_model(name, mask, position, steps=steps, rows=rows, seed=seed)
    chance = reports[names[0]].chance
    checks = [
        at_least(f"{name}: accuracy at layer 0", reports[name].layers[0].accuracy, 0.9)
        for name in scheme_names(embedded)
    ]
    for name in scheme_names(schemes):
        layers = reports[name].layers
        checks.append(at_most(f"{name}: accuracy at layer 0, below twice chance", layers[0].accuracy, 2 * chance))
        checks.append(
            at_least(f"{name}: best accuracy above, twice chance", max(x.accuracy for x in layers[1:]), 2 * chance)
        )
    curves = {name: [(float(i), x.accuracy) for i, x in enumerate(report.layers)] for name, report in reports.items()}
    tables = tuple(layers_table(report, name) for name, report in reports.items())
    title = "Accuracy of the position by layer"
    return Finding(tuple(checks), (Lines(title, "layer", "accuracy", curves, {"chance": chance}), *tables))  # fmt: skip


@lab("probing", rows=("L6",), seconds=(5.0, 40.0), smallest={"steps": 200}, full={"rows": 600, "steps": 600},
     counterexample={"scheme": "none", "mask": "bidirectional"},
     try_next=("--scheme none", "--scheme none --mask bidirectional"))  # fmt: skip
def previous_token_probe(
    *,
    scheme: Annotated[str, "position scheme of the model"] = "sinusoidal",
    mask: Mask = "causal",
    steps: Annotated[int, "training steps"] = 300,
    rows: Annotated[int, "rows for the probes, a fifth of them to test"] = 200,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A probe reads any label of a token, such as the token before it.

    A label is a function of a row and an index. The label here is the note before: it is not in the embedding of a
    note, but attention brings it. A bidirectional model without positions sees the note too, among all others, and
    cannot tell which of them it is. A part of speech or a relation of a parsed text is a label in the same way.
    """
    progress("training and probes", 0, 1)
    report, _ = probe_model(scheme, mask, previous_token, steps=steps, rows=rows, seed=seed)
    best, title = max(layer.accuracy for layer in report.layers[1:]), "Accuracy of the token before"
    return Finding(
        (
            at_most("accuracy at layer 0, below 3 times chance", report.layers[0].accuracy, 3 * report.chance),
            at_least("best accuracy above, 4 times chance", best, 4 * report.chance),
            reported("chance", report.chance),
        ),
        (layers_figure(report, title), layers_table(report, title)),
    )
