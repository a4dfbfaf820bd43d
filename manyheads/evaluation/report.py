"""A model and its baselines as plain data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from manyheads.evaluation.answers import answers
from manyheads.evaluation.documents import found_documents
from manyheads.evaluation.labels import classified
from manyheads.evaluation.language import language, other
from manyheads.evaluation.pictures import restored
from manyheads.evaluation.subject import Found, How, Subject, Tell, subject_of
from manyheads.metrics.figures import LOWER
from manyheads.spec import Tree


def evaluate(
    path: str | Path, *, data: str | None = None, task: str | None = None, split: str = "validation", overrides: Sequence[str] = (),
    how: How | None = None, device: str = "auto", tell: Tell = lambda what, done, total: None,
) -> tuple[Tree, tuple[str, ...]]:  # fmt: skip
    """Scores of a model and of baselines as plain data, and all texts that it wrote."""
    begun = time.perf_counter()
    subject = subject_of(Path(path), data, task, split, overrides, how or How(), tell, device=device)
    found = SCORED.get(subject.task, other)(subject)
    names = list(next(iter(found.scores.values())))
    report = {
        "schema": 1, "path": str(path), "task": subject.task, "data": subject.corpus.about, "split": "file" if data else split,
        "rows": len(subject.rows), "better": {name: "lower" if name in LOWER else "higher" for name in names},
        "matter": list(found.matter or names), "scores": found.scores, "signatures": found.signatures or {},
        "notes": [*subject.notes, *found.notes], "examples": list(found.drawn) or examples(subject, found.written),
        "seconds": round(time.perf_counter() - begun, 3),
    }  # fmt: skip
    return report | (found.more or {}), found.written


def examples(subject: Subject, written: Sequence[str]) -> list[Tree]:
    rows = subject.rows[: subject.how.examples] if written and subject.fields[0] != "picture" else []
    return [{"source": row[0], "written": text, "wanted": row[1]} for row, text in zip(rows, written, strict=False)]


SCORED: dict[str, Callable[[Subject], Found]] = {
    "causal": language, "seq2seq": answers, "classify": classified, "contrastive": found_documents,
    "patches": restored,
}  # fmt: skip
