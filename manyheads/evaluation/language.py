"""How well a model foresees texts, beside counted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from manyheads.data.prepared import Encoded
from manyheads.data.source import Row
from manyheads.evaluation.labels import names_of
from manyheads.evaluation.subject import Found, Subject, in_batches, unlearned, with_logits
from manyheads.metrics.baselines import Bigram, Unigram
from manyheads.metrics.language import Foreseen
from manyheads.objective.language import MaskedSpec
from manyheads.objective.score import NOTHING, asked, cross_entropy, padded
from manyheads.train.run import as_read

WINDOW = 1024  # tokens of a text that are read together where the model has no limit


def language(subject: Subject) -> Found:
    """−ln p of every token, each asked once; texts longer than a window are read in windows, one after the other."""
    tokens = subject.tokens
    if tokens.begin < 0:
        raise ValueError("nothing says which token begins a text here, so its first token cannot be asked")
    texts, learned = framed(subject, subject.rows), framed(subject, subject.learned)
    window = subject.limit or WINDOW
    pieces = [text[i : i + window + 1] for text in texts for i in range(0, len(text) - 1, window)]
    nats = count = 0.0
    for places in in_batches(subject, [len(piece) for piece in pieces], "reading", with_logits(subject.loaded)):
        some = [pieces[i] for i in places]
        given = subject.loaded.there(padded([piece[:-1] for piece in some], tokens.pad))
        wanted = asked([piece[1:] for piece in some]).to(subject.loaded.device)
        here = wanted != NOTHING
        score = cross_entropy(subject.loaded.model(given, at=here), wanted[here])
        nats, count = nats + float(score.total), count + score.count
    sizes = int(count), sum(len(text) for (text,) in subject.rows), sum(len(text.encode()) for (text,) in subject.rows)
    scores = {"model": Foreseen(nats, *sizes).scores()}
    if learned:
        unigram, bigram = Unigram((text[1:] for text in learned), tokens.count), Bigram(learned, tokens.count)
        scores["unigram"] = Foreseen(float(sum(unigram.nats(text[1:]).sum() for text in texts)), *sizes).scores()
        scores["bigram"] = Foreseen(float(sum(bigram.nats(text).sum() for text in texts)), *sizes).scores()
    unknown = sum(int((text == tokens.unknown).sum()) for text in texts)
    notes = [f"{unknown / sizes[0]:.1%} of the tokens are unknown, and easy to foresee"] if unknown else []
    if any(len(text) - 1 > window for text in texts):
        notes.append(f"texts were read in windows of {window:,} tokens")
    return Found(scores, (*notes, *unlearned(subject)), more={"tokens": sizes[0], "bytes": sizes[2]})


def framed(subject: Subject, rows: Sequence[Row]) -> list[NDArray[np.int64]]:
    """Texts as ids behind the token that begins one, and before the one that ends it where the model was trained to say so."""
    tokens = subject.tokens
    end = [tokens.end] if subject.objective else []
    found = Encoded(rows, subject.loaded.tokenizer, ("text",))
    return [np.concatenate(([tokens.begin], ids, end)).astype(np.int64) for (ids,) in found.rows if len(ids)]


def other(subject: Subject) -> Found:
    """Loss, and accuracy where a guess can be right, as in training."""
    objective, tokens = subject.objective or MaskedSpec(), subject.tokens
    labels = names_of(subject.loaded) if "label" in subject.fields else ()
    whole = as_read(list(subject.rows), subject.fields, subject.loaded.spec)
    rows = Encoded(whole, subject.loaded.tokenizer, subject.fields, labels).rows
    if subject.fields == ("text",):
        window = max(1, (subject.limit or WINDOW) - objective.added)
        rows = [(ids[i : i + window],) for (ids,) in rows for i in range(0, len(ids), window)]
    total, count, right, wanted = 0.0, 0, list[int | None](), list[NDArray[np.int64]]()
    chance = np.random.default_rng(subject.seed)
    lengths = [max(map(len, row)) + objective.added for row in rows]
    for places in in_batches(subject, lengths, "reading", with_logits(subject.loaded)):
        batch = objective.batch([rows[i] for i in places], tokens, chance).to(subject.loaded.device)
        score = objective.score(subject.loaded.model, batch)
        total, count = total + float(score.total), count + score.count
        right.append(score.right)
        wanted.append(batch.wanted[batch.wanted != NOTHING].numpy(force=True))
    scores = {"model": {"loss": total / count} | ({"accuracy": sum(filter(None, right)) / count} if None not in right else {})}
    if subject.task == "masked" and subject.learned:
        learned = Encoded(subject.learned, subject.loaded.tokenizer, ("text",)).rows  # without </s>, which is never hidden
        unigram, hidden = Unigram((ids for (ids,) in learned), tokens.count), np.concatenate(wanted)
        commonest = float((hidden == unigram.likely_V.argmax()).mean())
        scores["unigram"] = {"loss": float(unigram.nats(hidden).mean()), "accuracy": commonest}
    return Found(scores, tuple(unlearned(subject)) if subject.task == "masked" else (), more={"asked": count})
