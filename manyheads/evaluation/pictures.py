"""How well a model restores pictures, and what a line can read from its states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyheads.evaluation.language import other
from manyheads.evaluation.subject import Found, Subject
from manyheads.metrics.probe import probe
from manyheads.model.build import Model, build
from manyheads.model.transformer import Transformer
from manyheads.objective.pooled import PatchesSpec
from manyheads.objective.score import NOTHING
from manyheads.parts.batch import Inputs
from manyheads.parts.embed import PatchesSpec as PatchEmbedSpec
from manyheads.spec import Tree
from manyheads.train.run import as_read


def restored(subject: Subject) -> Found:
    """The error of hidden patches beside that of the mean picture; where classes are known, what a line reads from the encoder's states.

    Read place by place, states hold so many numbers that those of weights by chance do as well as learned ones; so their mean is read, and
    beside it that of such an encoder with weights by chance, and the pixels.
    """
    found = replace(other(subject), drawn=tuple(drawn(subject)))
    if not subject.learned:
        return found
    patches = [torch.from_numpy(np.stack([one for one, *_ in as_read(list(rows), subject.fields, subject.loaded.spec)])) for rows in
               (subject.rows, subject.learned)]  # fmt: skip
    assert isinstance(subject.objective, PatchesSpec)
    unseen, learned = (asked_for(subject.objective, part) for part in patches)
    scores = {"model": dict(found.scores["model"]), "pixels": {"loss": float((unseen - learned.mean(0)).square().mean())}}
    notes = ["pixels: the mean picture"]
    if subject.classes:
        wanted, labels = subject.classes
        untrained = build(subject.loaded.spec, seed=subject.seed, device=subject.loaded.device).eval()
        for name, encoder in {"model": subject.loaded.model, "untrained": untrained, "pixels": None}.items():
            unseen, learned = (part.flatten(1) if encoder is None else states_of(subject, encoder, part) for part in patches)
            scores.setdefault(name, {})["probe"] = probe(learned.numpy(), labels, unseen.numpy(), wanted)
        notes = [
            "pixels: the mean picture, and a probe of the picture; the model's probe reads the mean of the encoder's last states",
            "untrained: the same of such an encoder whose weights are drawn by chance",
        ]
    return replace(found, scores=scores, notes=(*found.notes, *notes))


def asked_for(objective: PatchesSpec, patches: Tensor) -> Tensor:
    """Patches as the objective asks for them."""
    mean, scale = objective.level(patches)
    return (patches - mean) / scale


def drawn(subject: Subject) -> Iterator[Tree]:
    """The first pictures as the model saw them (hidden patches are 0.5), as it restored them, and as they are."""
    rows, objective, spec = subject.rows[: subject.how.examples], subject.objective, subject.loaded.spec.encoder
    if not rows:
        return
    assert isinstance(objective, PatchesSpec)
    assert spec is not None
    assert isinstance(spec.embed, PatchEmbedSpec)
    batch = objective.batch(as_read(list(rows), subject.fields, subject.loaded.spec), subject.tokens, np.random.default_rng(subject.seed))
    batch = batch.to(subject.loaded.device)
    with torch.no_grad():
        made = objective.restored(subject.loaded.model, batch)
    shown = batch.inputs.tokens.masked_fill((batch.wanted != NOTHING)[..., None], 0.5)
    size = np.shape(rows[0][0])[-2:]
    kinds = {"shown": shown, "restored": made, "wanted": batch.inputs.tokens}
    whole = {name: spec.embed.joined(patches.cpu(), *size).clamp(0, 1) for name, patches in kinds.items()}
    for i in range(len(rows)):
        yield {name: as_numbers(pictures[i]) for name, pictures in whole.items()}


def as_numbers(picture: Tensor) -> list[Any]:
    """Rows of numbers, or of colours."""
    points = picture[0] if len(picture) == 1 else picture.permute(1, 2, 0)
    numbers: list[Any] = points.double().mul(1000).round().div(1000).tolist()
    return numbers


def states_of(subject: Subject, model: Model, patches_NLP: Tensor) -> Tensor:
    """What the encoder makes of whole pictures, the mean over their places, N×D."""
    found = list[Tensor]()
    assert isinstance(model, Transformer)
    with torch.no_grad():
        for some in patches_NLP.split(256):
            memory = model.encode(subject.loaded.there(Inputs(some)))
            assert memory is not None
            found.append(memory.states.mean(dim=1).cpu())
            subject.tell("looking", sum(map(len, found)), len(patches_NLP))
    return torch.cat(found)
