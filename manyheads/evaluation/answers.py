"""Texts that a model writes, against what was wanted."""

from __future__ import annotations

from collections.abc import Sequence

from manyheads.data.order import some_of
from manyheads.evaluation.subject import Found, Subject, as_ids
from manyheads.metrics import summary
from manyheads.metrics.baselines import copied, lead
from manyheads.metrics.translation import Translation

LEAD = 12  # words
LONGEST_GRAM = 4  # words that BLEU counts in a row


def answers(subject: Subject) -> Found:
    """Texts that the model writes, the source itself and its first words, against what was wanted."""
    translation = Translation()  # before minutes are spent
    sources, wanted = [row[0] for row in subject.rows], [row[1] for row in subject.rows]
    written = [""] * len(sources)
    rows, note = as_ids(subject, sources)
    writing = subject.how.writing(most_new(subject))
    for done, (i, ids) in enumerate(subject.loaded.write(rows, writing), 1):
        written[i] = subject.loaded.tokenizer.decode(ids)
        subject.tell("writing", done, len(sources))
    found = {"model": written, "copy": [copied(source) for source in sources], f"lead-{LEAD}": [lead(source, LEAD) for source in sources]}
    if all(one.split() == other.split() for one, other in zip(found["copy"], found[f"lead-{LEAD}"], strict=True)):
        del found[f"lead-{LEAD}"]  # no source is longer
    scores = {name: translation.scores(texts, wanted) | summary.scores(texts, wanted) for name, texts in found.items()}
    if blind := summary.uncounted(wanted):
        note = (*note, f"{blind:,} of {len(wanted):,} wanted texts hold nothing that ROUGE counts, a–z and 0–9: it is 0 for them")
    if not scores["model"]["bleu"] and max(len(text.split()) for text in wanted) < LONGEST_GRAM:
        note = (*note, f"no wanted text has {LONGEST_GRAM} words, and BLEU counts as many in a row: it is 0 however good they are")
    options = {name: getattr(writing, name) for name in ("max_new", "beams", "penalty")}
    return Found(scores, note, matter(sources, wanted), translation.signatures(), tuple(written), more={"writing": options})


def most_new(subject: Subject) -> int:
    """Twice as many tokens as any of some targets that were learned, so that a text without an end is seen to have none."""
    some = [subject.learned[i][1] for i in some_of(len(subject.learned), 1000).tolist()]
    return 8 + 2 * max(len(one.ids) for one in subject.loaded.tokenizer.encode_batch(some)) if some else 256


def matter(sources: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """Which figures are those to read: of answers of a word or two exact match, of much shorter texts ROUGE, otherwise BLEU and chrF."""
    read, told = (sum(len(text.split()) for text in texts) / len(texts) for texts in (sources, wanted))
    if told <= 2:
        return ("exact",)
    return ("rouge1", "rouge2", "rougeL") if told < read / 2 else ("bleu", "chrf")
