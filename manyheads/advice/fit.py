"""Choosing: pieces, rows, size, batch and steps for the data; then what the machine cannot hold or do in time is made smaller."""

from __future__ import annotations

import math

import numpy as np

from manyheads.advice.draft import LADDER, LOOKS, Draft
from manyheads.data.source import DataError
from manyheads.data.tokens import BPESpec
from manyheads.model.build import device_for
from manyheads.train.forecast import epoch_of, needs_of, pace_of
from manyheads.train.stream import lengths_of

PACKED = 512  # tokens in a row, where one text may be cut into several
USUAL, LONGEST = 2048, 8192  # tokens in a row; longer ones are cut where little is lost, or in any case
FEWEST_STEPS = 400
SAMPLE = 2_000_000  # characters that a tokenizer is tried on
IN_WORDS = ("dates", "sequence")  # data of few different words
PIECES = ((5e7, 16000), (5e6, 8000), (1e6, 4000), (3e5, 2000), (5e4, 1000), (0, 500))  # characters in all, and pieces of a tokenizer
PASSES = ((1e5, 40), (1e6, 20), (1e7, 10), (math.inf, 3))  # tokens in all at most, and passes over them


def fitted(draft: Draft) -> Draft:
    """Size, batch and steps for the data; then what the machine cannot do in time is made smaller."""
    check_classes(draft)
    draft = with_rows_cut(with_tokenizer(draft))
    lengths = lengths_of(draft.made, draft.made.rows).sum(1)
    longest, total = draft.pack or int(lengths.max()), int(lengths.sum())
    share = total // (10 if draft.objective == "contrastive" else 20)  # of an epoch; in contrast to many others one learns more
    budget = max(512, min(4096, 1 << max(0, share).bit_length() - 1 if share else 512), 64 * math.ceil(longest / 64))
    rung = next(rung for rung in LADDER if total <= rung.most)
    draft = with_room(draft.changed(rung=rung, tokens=budget))
    epoch = epoch_of(draft.made)
    passes = next(passes for most, passes in PASSES if total <= most)
    return in_time(draft, rounded(max(FEWEST_STEPS, passes * epoch.batches)), epoch.batches)


def with_rows_cut(draft: Draft) -> Draft:
    """A few long rows would decide how large every batch is: they are cut, if little is lost; or, where one text goes on, in pieces."""
    if not draft.texts:
        return draft
    lengths = lengths_of(draft.made, draft.made.rows).max(1)
    if draft.task == "lm" and draft.shape in ("decoder", "encoder") and lengths.max() > PACKED:
        return draft.changed(pack=PACKED)
    for most, share in ((USUAL, 0.05), (LONGEST, 0.5)):
        lost = 1 - np.minimum(lengths, most).sum() / lengths.sum()
        if 0 < lost <= share:
            said = f"tokens; {int((lengths > most).sum()):,} of {len(lengths):,} rows are longer, and their ends are left out"
            return draft.changed(longest=most, cut_rows=said)
    if (longest := int(lengths.max())) > LONGEST:
        raise DataError(f"the longest row has {longest:,} tokens, and {LONGEST:,} are the most that is advised; cut it in pieces")
    return draft


def check_classes(draft: Draft) -> None:
    labels, rows = draft.data.corpus.labels(), sum(len(part) for part in draft.data.corpus.splits.values())
    if draft.objective == "classify" and not 2 <= len(labels) <= rows / 2:
        raise DataError(
            f"{rows:,} texts have {len(labels):,} different classes, which cannot be learned; --fields says which column is the class"
        )


def with_tokenizer(draft: Draft) -> Draft:
    """Many pieces for much text, and no more than it gives."""
    if not draft.texts:
        return draft.changed()
    if draft.data.tree["kind"] in IN_WORDS:
        return draft.changed(pieces=0)
    sample, characters = sampled(draft)
    for least, size in PIECES:
        if characters >= least:
            try:
                BPESpec(size=size).make(sample)
                return draft.changed(pieces=size)
            except DataError:  # too few different ones
                continue
    return draft.changed(pieces=None)


def sampled(draft: Draft) -> tuple[list[str], int]:
    """The first texts, and how many characters there are in all."""
    places = [draft.data.corpus.fields.index(name) for name in draft.texts]
    sample, characters = list[str](), 0
    for row in draft.data.corpus.train:
        if characters <= SAMPLE:
            sample += [row[i][:SAMPLE] for i in places]
        characters += sum(len(row[i]) for i in places)
    return sample, characters


def with_room(draft: Draft) -> Draft:
    """The largest model down the ladder that half of the memory holds."""
    needs = needs_of(draft.made, device=device_for("auto"))
    if needs.memory_free is None or needs.memory <= needs.memory_free / 2:
        return draft
    lower = draft.smaller()
    return draft if lower is None else with_room(lower)


def in_time(draft: Draft, steps: int, batches: int) -> Draft:
    """As many steps as wanted, if the machine makes half of them in time; otherwise a smaller model, or as many as it makes."""
    pace, seconds = pace_of(draft.made, device_for("auto"), seconds=1.5), 60 * draft.minutes
    looks = max(1, min(LOOKS, int(seconds / 5 / max(pace.evaluation, 1e-9))))  # in a fifth of the time
    possible = rounded(max(1.0, (seconds - looks * pace.evaluation) / pace.step))
    lower = draft.smaller() if 2 * possible < steps else None
    if lower is not None:
        return in_time(lower, steps, batches)
    count = min(steps, possible)
    return draft.changed(steps=count, passes=count / batches, looks=looks, pace=pace, cut=possible < steps)


def rounded(count: float) -> int:
    """Downwards to two digits."""
    size: int = 10 ** max(0, len(str(int(count))) - 2)
    return int(count) // size * size
