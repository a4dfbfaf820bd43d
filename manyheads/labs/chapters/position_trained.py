"""Positions in trained models: who chased whom, translation with every scheme, language models without positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import permutations, product
from statistics import mean, stdev
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.labs.figures import Bars, Lines
from manyheads.labs.finding import Check, Finding, at_least, at_most, reported
from manyheads.labs.fitting import fit, small_model
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.labs.language import LENGTH, language_model, perplexity
from manyheads.labs.schemes import POSITIONAL, SCHEMES, by_offset, position_scores, scheme_names
from manyheads.metrics.text import bleu
from manyheads.model.builder import Model, build
from manyheads.model.spec import read_model
from manyheads.parts.inputs import Inputs

NOUNS = {
    "man": ("adam", "adamı"), "dog": ("köpek", "köpeği"), "cat": ("kedi", "kediyi"),
    "mouse": ("fare", "fareyi"), "child": ("çocuk", "çocuğu"), "bird": ("kuş", "kuşu"),
}  # fmt: skip
ADJECTIVES = {"small": "küçük", "big": "büyük", "red": "kırmızı", "old": "yaşlı"}
VERBS = {"chased": "kovaladı", "saw": "gördü", "liked": "sevdi", "found": "buldu"}
Pair = tuple[list[str], list[str]]


def sentences() -> list[Pair]:
    """Every sentence of a small English, "the small dog chased the man", and the same in Turkish word order."""
    phrases = [([adjective] if adjective else [], noun) for adjective in ("", *ADJECTIVES) for noun in NOUNS]
    pairs = []
    for (first, subject), verb, (second, object_) in product(phrases, VERBS, phrases):
        source = ["the", *first, subject, verb, "the", *second, object_]
        target = [*map(ADJECTIVES.get, first), NOUNS[subject][0], *map(ADJECTIVES.get, second), NOUNS[object_][1]]
        pairs.append((source, [*map(str, target), VERBS[verb]]))
    return pairs


def watched(names: Iterable[str], progress: OnProgress) -> Iterator[str]:
    """The names, one after the other, with the progress of the work on each."""
    all_names = list(names)
    for done, name in enumerate(all_names):
        progress(name, done, len(all_names))
        yield name
    progress("done", len(all_names), len(all_names))


def error_bars(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: stdev(runs) for name, runs in values.items() if len(runs) > 1}


# ------------------------------------------------------------------------------------------------------ who chased whom


def chases() -> tuple[Tensor, Tensor]:
    """Every sentence "the X chased the Y" with two nouns, and X, who chases. Each also has its roles swapped."""
    words = ["the", *VERBS, *NOUNS]
    rows = [["the", x, verb, "the", y] for x, y in permutations(NOUNS, 2) for verb in VERBS]
    ids = torch.tensor([[words.index(word) for word in row] for row in rows])
    return ids, ids[:, 1] - words.index("man")


@cache
def chase_accuracy(scheme: str, steps: int, seed: int) -> tuple[float, float]:
    """The share of sentences in which a trained model finds who chases, and how far it tells two sentences apart.

    The model averages its outputs. The two sentences are "the man chased the dog" and "the dog chased the man".
    """
    ids, agents = chases()
    head = {"kind": "classes", "classes": len(NOUNS), "pool": "mean"}
    model = small_model(
        "encoder", vocab=16, head=head, position=dict(SCHEMES[scheme]), embed={"scale": True}, init="xavier", seed=seed
    )
    fit(
        model, lambda step: (ids, agents), lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), steps=steps,
        lr=5e-3,
    )  # fmt: skip
    with torch.no_grad():
        logits = model(ids)
        swapped = model(ids[:1, [0, 4, 2, 3, 1]])
    return float((logits.argmax(-1) == agents).double().mean()), float((logits[:1] - swapped).abs().max())


@lab("position", rows=("D2", "P12"), seconds=(8.0, 50.0), smallest={"schemes": "sinusoidal rope", "steps": 60},
     full={"steps": 300}, counterexample={"blind": "sinusoidal"},
     try_next=("--schemes alibi --steps 25", "--schemes learned --steps 20"))  # fmt: skip
def word_order(
    *,
    schemes: Annotated[str, "schemes that have to learn it"] = POSITIONAL,
    blind: Annotated[str, "scheme that cannot learn it"] = "none",
    steps: Annotated[int, "training steps"] = 100,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """Without positions "the man chased the dog" and "the dog chased the man" are the same.

    A bidirectional model reads "the X chased the Y" and names X, for all pairs of nouns and verbs, so each sentence is
    in the set with its roles swapped too. Both have the same words. Without positions and with the mean over the
    outputs, a model gives both the same logits, and is right for half of the sentences at most. Any scheme of
    positions suffices to learn them all. ALiBi, whose biases are fixed, gets four times as many steps: it learns more
    slowly.
    """
    names = [*scheme_names(blind), *scheme_names(schemes)]
    results = {
        name: chase_accuracy(name, 4 * steps if name == "alibi" else steps, seed) for name in watched(names, progress)
    }
    accuracies = {name: accuracy for name, (accuracy, _) in results.items()}
    checks: list[Check] = [
        at_most(f"{blind}: largest difference of the logits of the two sentences", results[blind][1], 1e-5),
        at_most(f"{blind}: accuracy, half but for ties", accuracies[blind], 0.55),
        *(at_least(f"{name}: accuracy", accuracies[name], 1.0) for name in scheme_names(schemes)),
    ]
    figure = Bars("Share of sentences with the right X", "accuracy", accuracies, levels={"half": 0.5})
    return Finding(tuple(checks), (figure,))


# --------------------------------------------------------------------------------------------------------- translation


WORDS = ["<pad>", "<s>", "</s>", *sorted({word for pair in sentences() for side in pair for word in side})]


def encode(rows: Sequence[Sequence[str]], length: int) -> Tensor:
    return torch.tensor([[WORDS.index(w) for w in row] + [0] * (length - len(row)) for row in rows])


def sources(pairs: Sequence[Pair]) -> Inputs:
    ids = encode([source for source, _ in pairs], 7)
    return Inputs(ids, padding_mask=ids == 0)


def translator(scheme: str, width: int, seed: int) -> Model:
    stack = {
        "layers": 1, "width": width, "attention": {"heads": 4}, "position": dict(SCHEMES[scheme]), "residual": "pre",
        "embed": {"scale": True}, "feedforward": {"hidden": 4 * width},
    }  # fmt: skip
    decoder: dict[str, object] = {"like": "encoder", "embed": "shared", "cross": True}
    if scheme == "bucketed":
        decoder["position"] = {"bidirectional": False}
    return build(read_model({"vocab": len(WORDS), "encoder": stack, "decoder": decoder, "init": "xavier"}), seed=seed)


def translate(model: Model, pairs: Sequence[Pair]) -> list[str]:
    """Greedy translations."""
    source, ids = sources(pairs), torch.full((len(pairs), 1), WORDS.index("<s>"))
    with torch.no_grad():
        for _ in range(7):
            ids = torch.cat((ids, model(ids, source)[:, -1:].argmax(-1)), dim=1)
    return [" ".join(WORDS[i] for i in row[1:]).partition(" </s>")[0] for row in ids.tolist()]


@cache
def translation_bleu(scheme: str, width: int, steps: int, seed: int) -> float:
    """BLEU on sentences that were not in training."""
    pairs, rng = sentences(), torch.Generator().manual_seed(seed)
    order = torch.randperm(len(pairs), generator=rng).tolist()
    tested, trained = [pairs[i] for i in order[:200]], [pairs[i] for i in order[200:]]
    model = translator(scheme, width, seed)

    def batch(step: int) -> tuple[Inputs, Tensor]:
        rows = [trained[i] for i in torch.randint(0, len(trained), (64,), generator=rng).tolist()]
        return sources(rows), encode([["<s>", *target, "</s>"] for _, target in rows], 7)

    def loss(m: torch.nn.Module, rows: tuple[Inputs, Tensor]) -> Tensor:
        source, ids = rows
        return F.cross_entropy(m(ids[:, :-1], source).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)

    fit(model, batch, loss, steps=steps, lr=5e-3)
    return bleu(translate(model, tested), [" ".join(target) for _, target in tested])


@lab("position", rows=("D13",), seconds=(30.0, 440.0), smallest={"schemes": "", "seeds": 1},
     full={"schemes": f"none {POSITIONAL}", "steps": 400, "seeds": 3}, counterexample={"relative": "none"},
     try_next=("--schemes sinusoidal,relative --seeds 5", "--relative shaw"))  # fmt: skip
def schemes_on_one_task(
    *,
    schemes: Annotated[str, "schemes that are compared"] = "none rope",
    relative: Annotated[str, "scheme that is compared with sinusoidal positions"] = "relative",
    steps: Annotated[int, "training steps"] = 200,
    width: Annotated[int, "width of the model"] = 32,
    seeds: Annotated[int, "models of each scheme"] = 2,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """Relative positions alone are enough for translation.

    An encoder–decoder translates sentences such as "the small dog chased the man" to Turkish, where the verb is last
    and the object has an ending: küçük köpek adamı kovaladı. Every scheme has the same model, data and steps, and is
    tested on sentences that were not in training. The relative model has no absolute position anywhere. The encoder
    without positions cannot know who chases, though the decoder, which is causal, knows how far it is.
    """
    names = dict.fromkeys([*scheme_names(schemes), "sinusoidal", *scheme_names(relative)])
    scores = {
        name: [translation_bleu(name, width, steps, seed + i) for i in range(seeds)]
        for name in watched(names, progress)
    }
    means = {name: mean(runs) for name, runs in scores.items()}
    checks: list[Check] = [
        at_least(f"BLEU of {relative}, at least that of sinusoidal − 1", means[relative], means["sinusoidal"] - 1.0),
        at_least("BLEU of sinusoidal", means["sinusoidal"], 80.0),
        *(reported(f"BLEU of {name}", value) for name, value in means.items() if name not in (relative, "sinusoidal")),
    ]
    return Finding(tuple(checks), (Bars(f"BLEU, {seeds} seeds", "BLEU", means, error_bars(scores)),))


# ------------------------------------------------------------------------------------------------------ language models

MARGIN = 1.5  # times the perplexity with sinusoidal positions


@lab("position", rows=("D15",), seconds=(15.0, 450.0), smallest={"steps": 100},
     full={"steps": 600, "seeds": 3, "schemes": "sinusoidal learned relative alibi rope"}, counterexample={"window": 1},
     try_next=("--window 4", "--schemes sinusoidal,rope,alibi"))  # fmt: skip
def no_positions_but_causal(
    *,
    schemes: Annotated[str, "schemes that are compared with none"] = "sinusoidal",
    window: Annotated[int, "tokens that the model without positions sees; 0 for all before"] = 0,
    steps: Annotated[int, "training steps"] = 150,
    width: Annotated[int, "width of the model"] = 48,
    seeds: Annotated[int, "models of each scheme"] = 1,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """With a causal mask, a language model learns without any positions.

    Under the mask the first token sees one token, the second two, and so on, so the tokens are not treated alike, and
    a model can learn to tell them apart. Small models predict the next character of invented biographies. Without
    positions the perplexity is somewhat above that with sinusoidal ones, within a factor of 1.5. A model that sees
    only the last character, as a bigram model does, is far from both.
    """
    names = ["none", *(name for name in scheme_names(schemes) if name != "none")]

    def run(name: str, number: int) -> float:
        model = language_model(
            "biographies", name, width=width, steps=steps, seed=seed + number,
            window=window if name == "none" else 0,
        )  # fmt: skip
        return perplexity(model, "biographies")

    runs = {name: [run(name, number) for number in range(seeds)] for name in watched(names, progress)}
    means = {name: mean(values) for name, values in runs.items()}
    best = names[1]
    return Finding(
        (
            at_most(
                f"perplexity without positions, at most {MARGIN} times {best}", means["none"], MARGIN * means[best]
            ),
            *(reported(f"perplexity of {name}", value) for name, value in means.items()),
        ),
        (Bars("Perplexity on validation texts", "perplexity", means, error_bars(runs)),),
    )


@lab("position", rows=("P6",), seconds=(4.0, 130.0), smallest={"trained": ""},
     full={"trained": "learned relative clipped bucketed shaw", "steps": 600}, counterexample={"schemes": "relative"},
     try_next=("--trained relative --steps 400", "--schemes sinusoidal --trained learned"))  # fmt: skip
def similar_distance(
    *,
    schemes: Annotated[str, "schemes that have it from the start"] = "sinusoidal concatenated alibi rope",
    trained: Annotated[str, "schemes that are trained first, as language models"] = "relative",
    steps: Annotated[int, "training steps"] = 150,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """Pairs of tokens at similar distances get a similar part of the score.

    The position part of the score is a function of the offset. For the schemes that compute it, the curve is smooth:
    neighbouring offsets differ less than far ones, on average by less than half. A learned bias has nothing that makes
    it smooth. It starts as noise, for which the ratio is 1, and has what training gives it.
    """

    def curve(model: Model) -> dict[int, float]:
        return {offset: value for offset, value in by_offset(position_scores(model, LENGTH)).items() if offset <= 0}

    computed = {
        name: curve(small_model(position=dict(SCHEMES[name]), width=64, seed=seed)) for name in scheme_names(schemes)
    }
    learned = {
        f"{name}, trained": curve(language_model("biographies", name, width=48, steps=steps, seed=seed))
        for name in watched(scheme_names(trained), progress)
    }
    checks = [at_most(f"{name}: near over far", near_over_far(f), 0.5) for name, f in computed.items()]
    checks += [reported(f"{name}: near over far", near_over_far(f)) for name, f in learned.items()]
    curves = {
        name: [(float(offset), value / max(map(abs, f.values()))) for offset, value in f.items()]
        for name, f in (computed | learned).items()
    }
    title = "Position part of the score, relative to its largest value"
    return Finding(tuple(checks), (Lines(title, "offset of the key", "part of the score", curves),))


def near_over_far(by_offset: dict[int, float]) -> float:
    """The mean difference of neighbouring offsets, over that of offsets which are a third of the length apart."""
    values, apart = list(by_offset.values()), len(by_offset) // 3

    def difference(step: int) -> float:
        return mean(abs(b - a) for a, b in zip(values, values[step:], strict=False))

    return difference(1) / difference(apart)
