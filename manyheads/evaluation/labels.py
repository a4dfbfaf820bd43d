"""Which classes a model chooses, beside the commonest and counted words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from manyheads.checkpoint import Loaded
from manyheads.data.source import DataError, Row
from manyheads.evaluation.subject import Found, Subject, as_ids, in_batches, unlearned
from manyheads.metrics import classes
from manyheads.metrics.baselines import Majority, NaiveBayes
from manyheads.parts.batch import Inputs
from manyheads.spec import quoted
from manyheads.train.run import as_read


def classified(subject: Subject) -> Found:
    """The class that the model chooses, the commonest, and what counted words say."""
    names = names_of(subject.loaded)
    given, wanted = [row[0] for row in subject.rows], numbered(subject.rows, names)
    shares, note = chances(subject, given, len(names))
    scores = {"model": classes.scores(wanted, shares)}
    if subject.learned:
        labels = numbered(subject.learned, names)
        scores["majority"] = classes.scores(wanted, Majority(labels, len(names)).probabilities(given))
        if subject.fields[0] == "text":
            bayes = NaiveBayes((row[0] for row in subject.learned), labels, len(names))
            scores["naive Bayes"] = classes.scores(wanted, bayes.probabilities(given))
    chosen = tuple(names[i] for i in shares.argmax(1))
    return Found(scores, (*note, *unlearned(subject)), written=chosen, more={"classes": list(names)})


def chances(subject: Subject, given: Sequence[Any], count: int) -> tuple[classes.Shares, tuple[str, ...]]:
    """The probability of every class for each text or picture."""
    shares, loaded, note = np.zeros((len(given), count)), subject.loaded, tuple[str, ...]()
    pictures = subject.fields[0] == "picture"
    if pictures:
        rows = [patches for (patches,) in as_read([(picture,) for picture in given], ("picture",), loaded.spec)]
    else:
        rows, note = as_ids(subject, given)
    for places in in_batches(subject, [*map(len, rows)], "reading"):
        some = [rows[i] for i in places]
        batch = loaded.there(Inputs(torch.from_numpy(np.stack(some)))) if pictures else loaded.padded(some)
        shares[places] = loaded.model(batch).double().softmax(-1).numpy(force=True)
    return shares, note


def names_of(loaded: Loaded) -> tuple[str, ...]:
    """The classes of a classifier, as its config names them."""
    count = getattr(loaded.spec.head, "classes", 0)
    said = (loaded.origin.config if loaded.origin else {}).get("id2label") or {}
    if count < 2:
        raise ValueError("this model chooses between no classes: it cannot be evaluated as a classifier")
    return tuple(str(said.get(str(i), said.get(i, i))) for i in range(count))


def numbered(rows: Sequence[Row], names: Sequence[str]) -> list[int]:
    number = {name: i for i, name in enumerate(names)}
    if unknown := [label for _, label in rows if label not in number]:
        raise DataError(f"the label {quoted(unknown[0])} is none of the model's {len(names)} classes: {quoted(', '.join(names))}")
    return [number[label] for _, label in rows]
