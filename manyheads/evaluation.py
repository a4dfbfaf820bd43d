"""How good a model is: the metrics of its task on rows it has not seen, beside baselines on the same rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyheads.checkpoint import Loaded, load
from manyheads.convert.opened import Opened
from manyheads.data.order import plan
from manyheads.data.prepared import Encoded
from manyheads.data.source import Corpus, DataError, DataSpec, FileSpec, Row
from manyheads.metrics import classes, ranking, summary
from manyheads.metrics.baselines import BM25, Bigram, Majority, NaiveBayes, Unigram, copied, lead
from manyheads.metrics.language import Foreseen
from manyheads.metrics.probe import probe
from manyheads.metrics.translation import Translation
from manyheads.model.transformer import Transformer
from manyheads.objective.language import MaskedSpec
from manyheads.objective.pooled import PatchesSpec
from manyheads.objective.score import NOTHING, Batch, ObjectiveSpec, Tokens, asked, cross_entropy, padded
from manyheads.parts.batch import Inputs
from manyheads.parts.embed import PatchesSpec as PatchEmbedSpec
from manyheads.spec import LARGEST, Spec, SpecError, Tree, override, parse, quoted, read_toml
from manyheads.train.run import RunSpec, as_read, read_run, with_extra
from manyheads.train.start import tokens_of as known_tokens

# what each task reads, and the kind of file that holds it
TASKS = {
    "causal": (("text",), "text"),
    "masked": (("text",), "text"),
    "seq2seq": (("source", "target"), "pairs"),
    "classify": (("text", "label"), "labels"),
    "contrastive": (("query", "document"), "queries"),
}
FORMS = tuple(form for _, form in TASKS.values())
SPLITS = ("validation", "test", "train")
LOWER = ("loss", "perplexity", "bits_per_byte", "nats_per_character", "calibration_error")  # is better; of all others higher
LEAD = 12  # words
PLACES, NUMBERS = 8192, 1 << 25  # at once: tokens, and logits
WINDOW = 1024  # tokens of a text that are read together where the model has no limit
Tell = Callable[[str, int, int], None]  # what is going on, how much is done, of how much
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class How:
    """How much is looked at, and how texts are written."""

    rows: int | None = None  # only so many, the first
    longest: int | None = None  # tokens of a text that are read
    beams: int = 4
    penalty: float = 0.6
    max_new: int | None = None
    examples: int = 0

    def check(self) -> None:
        for name, least in (("rows", 1), ("longest", 3), ("beams", 1), ("max_new", 1), ("examples", 0)):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and least <= value <= LARGEST):
                raise ValueError(f"{name} is {quoted(value)}, expected a whole number from {least} to {LARGEST:,}")
        if type(self.penalty) not in (int, float) or not -100 <= self.penalty <= 100:
            raise ValueError(f"penalty is {quoted(self.penalty)}, expected a number from -100 to 100")


@dataclass(frozen=True)
class Subject:
    """A model, the rows it is asked about, and those that a baseline may learn from."""

    loaded: Loaded
    task: str
    objective: ObjectiveSpec | None  # of the run
    tokens: Tokens
    corpus: Corpus
    rows: Sequence[Row]
    learned: Sequence[Row]
    fields: tuple[str, ...]
    how: How
    tell: Tell
    seed: int = 0
    classes: tuple[list[str], list[str]] | None = None  # of these rows and those, where the data knows them

    @property
    def limit(self) -> int | None:
        """Tokens of a text that are read, what stands around it included."""
        known = [one for one in (self.loaded.longest, self.how.longest) if one is not None]
        return min(known, default=None)


@dataclass(frozen=True)
class Found:
    """Scores by who earned them, the model first; what was written; and what must be said beside them."""

    scores: dict[str, dict[str, float]]
    notes: tuple[str, ...] = ()
    matter: tuple[str, ...] = ()
    signatures: dict[str, str] | None = None
    written: tuple[str, ...] = ()
    drawn: tuple[Tree, ...] = ()  # pictures: what was shown, what was made of it, what it was
    more: Tree | None = None


def evaluate(
    path: str | Path, *, data: str | None = None, task: str | None = None, split: str = "validation", overrides: Sequence[str] = (),
    how: How | None = None, tell: Tell = lambda what, done, total: None,
) -> tuple[Tree, tuple[str, ...]]:  # fmt: skip
    """Scores of a model and of baselines as plain data, and all texts that it wrote."""
    begun = time.perf_counter()
    subject = subject_of(Path(path), data, task, split, overrides, how or How(), tell)
    found = SCORED.get(subject.task, other)(subject)
    names = list(next(iter(found.scores.values())))
    report = {
        "schema": 1, "path": str(path), "task": subject.task, "data": subject.corpus.about, "split": "file" if data else split,
        "rows": len(subject.rows), "better": {name: "lower" if name in LOWER else "higher" for name in names},
        "matter": list(found.matter or names), "scores": found.scores, "signatures": found.signatures or {}, "notes": list(found.notes),
        "examples": list(found.drawn) or examples(subject, found.written), "seconds": round(time.perf_counter() - begun, 3),
    }  # fmt: skip
    return report | (found.more or {}), found.written


def examples(subject: Subject, written: Sequence[str]) -> list[Tree]:
    rows = subject.rows[: subject.how.examples] if written and subject.fields[0] != "picture" else []
    return [{"source": row[0], "written": text, "wanted": row[1]} for row, text in zip(rows, written, strict=False)]


# --------------------------------------------------------------------------------------------------- what is asked of whom


def subject_of(path: Path, data: str | None, task: str | None, split: str, overrides: Sequence[str], how: How, tell: Tell) -> Subject:
    """A run says what it was trained for, and on what; of any other checkpoint the head says it, and the caller names a file."""
    how.check()
    if split not in SPLITS:
        raise ValueError(f"split is {quoted(split)}, expected {', '.join(SPLITS)}")
    if task is not None and task not in TASKS:
        raise ValueError(f"task is {quoted(task)}, expected {', '.join(TASKS)}")
    loaded = load(path)
    loaded.model.eval()
    if loaded.tokenizer is None and loaded.spec.vocab is not None:
        raise ValueError(f"{path} has no tokenizer beside it, so no text can be read with it")
    objective, seed = None, 0
    run = read_run(read_toml(path / "run.toml")) if (path / "run.toml").is_file() else None
    if run is not None and task in (None, run.objective.kind):
        run = read_run(override(read_toml(path / "run.toml"), overrides))
        objective, seed, task, spec = run.objective, run.seed, run.objective.kind, run.data
    else:
        run = None
        task = task or task_of(loaded)
        spec = read_data(override({"data": {"kind": TASKS[task][1]} | ({"path": data} if data else {})}, overrides))
    known, rows = chosen(spec, task, data, split, own=objective is not None)
    fields = objective.reads(known.fields) if objective else TASKS[task][0]
    if missing := [name for name in fields if name not in known.fields]:
        raise DataError(f"{task} needs {missing[0]}, and {known.about} gives {', '.join(known.fields)}")
    if not rows:
        sizes = ", ".join(f"{len(part):,} to {name}" for name, part in known.splits.items())
        raise DataError(f"there is nothing to evaluate: the {split} split of {known.about} is empty ({sizes}); name another, or a file")
    order = [known.fields.index(name) for name in fields]
    some, learned = ([tuple(row[i] for i in order) for row in part] for part in (rows[: how.rows], known.train))
    place = known.fields.index("label") if "label" in known.fields else None
    labelled = None if place is None else ([row[place] for row in rows[: how.rows]], [row[place] for row in known.train])
    whole = fields == ("text",)  # a text is read in windows, and nothing of it is cut
    return Subject(
        loaded if whole else cut(loaded, how),
        task,
        objective,
        tokens_of(loaded, run),
        known,
        some,
        learned,
        fields,
        how,
        tell,
        seed,
        labelled,
    )


class Asked(Spec):
    """What is said of a checkpoint that is no run."""

    data: DataSpec


def read_data(tree: Tree) -> DataSpec:
    if isinstance(tree["data"], dict) and set(tree["data"]) == {"kind"} and tree["data"]["kind"] in FORMS:
        raise SpecError("this checkpoint is no run for this task: name a file to evaluate with, --data FILE", ("data", "path"))
    return parse(Asked, tree).data


def chosen(spec: DataSpec, task: str, data: str | None, split: str, *, own: bool) -> tuple[Corpus, Sequence[Row]]:
    """All there is, and the rows that are asked: of a split, or of a file of the same form; a run's baselines learn what it learned."""
    if data is None:
        corpus = spec.load()
        return corpus, corpus.splits[split]
    if not isinstance(spec, FileSpec) and task not in TASKS:
        raise SpecError(f"a file was named, and {task} learns from {spec.kind}, which is made here", ("data",))
    form = spec if isinstance(spec, FileSpec) else read_data({"data": {"kind": TASKS[task][1], "path": data}})
    assert isinstance(form, FileSpec)
    there = form.other(data)
    return (replace(there, train=spec.load().train) if own else there), there.validation


def tokens_of(loaded: Loaded, run: RunSpec | None) -> Tokens:
    """The ids that begin, end and hide, as training has them."""
    if loaded.tokenizer is None:
        return Tokens(count=0)
    found = Opened(loaded.model, loaded.origin, loaded.tokenizer) if loaded.origin else None
    return with_extra(loaded.tokenizer, run, found) if run else known_tokens(loaded.tokenizer, found)


def task_of(loaded: Loaded) -> str:
    """What a checkpoint without a run is for, by its shape and its head."""
    head = loaded.spec.head
    if loaded.paired:
        return "seq2seq"
    if head.kind == "classes":
        return "classify"
    if head.scores_tokens:
        return "causal" if loaded.spec.shape in ("decoder", "ngram") else "masked"
    return "contrastive"


def cut(loaded: Loaded, how: How) -> Loaded:
    """With a tokenizer of its own, which cuts what is too long to be read, and for which a text that says </s> remains a text."""
    if loaded.tokenizer is None:
        return loaded
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(loaded.tokenizer.to_str())
    tokenizer.encode_special_tokens = True
    known = [one for one in (loaded.longest, how.longest) if one is not None]
    if known:
        tokenizer.enable_truncation(min(known))
    return replace(loaded, tokenizer=tokenizer)


# ------------------------------------------------------------------------------------------------------------- language


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
    return Found(scores, (*notes, *unlearned(subject)), more={"tokens": sizes[0], "bytes": sizes[2]})


def framed(subject: Subject, rows: Sequence[Row]) -> list[Ids]:
    """Texts as ids behind the token that begins one, and before the one that ends it where the model was trained to say so."""
    tokens = subject.tokens
    end = [tokens.end] if subject.objective else []
    found = Encoded(rows, subject.loaded.tokenizer, ("text",))
    return [np.concatenate(([tokens.begin], ids, end)).astype(np.int64) for (ids,) in found.rows if len(ids)]


def unlearned(subject: Subject) -> list[str]:
    return [] if subject.learned else ["there was nothing for baselines to learn from: -s data.path=... names a file to learn from"]


def other(subject: Subject) -> Found:
    """Loss, and accuracy where a guess can be right, as in training."""
    objective, tokens = subject.objective or MaskedSpec(), subject.tokens
    labels = names_of(subject.loaded) if "label" in subject.fields else ()
    whole = as_read(list(subject.rows), subject.fields, subject.loaded.spec)
    rows = Encoded(whole, subject.loaded.tokenizer, subject.fields, labels).rows
    if subject.fields == ("text",):
        window = max(1, (subject.limit or WINDOW) - objective.added)
        rows = [(ids[i : i + window],) for (ids,) in rows for i in range(0, len(ids), window)]
    total, count, right, wanted = 0.0, 0, list[int | None](), list[Ids]()
    chance = np.random.default_rng(subject.seed)
    lengths = [max(map(len, row)) + objective.added for row in rows]
    for places in in_batches(subject, lengths, "reading", with_logits(subject.loaded)):
        batch = there(subject.loaded, objective.batch([rows[i] for i in places], tokens, chance))
        score = objective.score(subject.loaded.model, batch)
        total, count = total + float(score.total), count + score.count
        right.append(score.right)
        wanted.append(batch.wanted[batch.wanted != NOTHING].numpy(force=True))
    scores = {"model": {"loss": total / count} | ({"accuracy": sum(filter(None, right)) / count} if None not in right else {})}
    if subject.task == "masked" and subject.learned:
        unigram, hidden = Unigram((text[1:] for text in framed(subject, subject.learned)), tokens.count), np.concatenate(wanted)
        commonest = float((hidden == unigram.likely_V.argmax()).mean())
        scores["unigram"] = {"loss": float(unigram.nats(hidden).mean()), "accuracy": commonest}
    return Found(scores, tuple(unlearned(subject)) if subject.task == "masked" else (), more={"asked": count})


def restored(subject: Subject) -> Found:
    """The error of hidden patches beside that of the mean picture; where classes are known, what a line reads from states and pixels."""
    found = replace(other(subject), drawn=tuple(drawn(subject)))
    if not subject.learned:
        return found
    patches = [torch.from_numpy(np.stack([one for one, *_ in as_read(list(rows), subject.fields, subject.loaded.spec)])) for rows in
               (subject.rows, subject.learned)]  # fmt: skip
    scores = {"model": dict(found.scores["model"]), "pixels": {"loss": float((patches[0] - patches[1].mean(0)).square().mean())}}
    if subject.classes:
        wanted, labels = subject.classes
        for name, (unseen, learned) in (("model", [states_of(subject, part) for part in patches]), ("pixels", patches)):
            scores[name]["probe"] = probe(learned.flatten(1).numpy(), labels, unseen.flatten(1).numpy(), wanted)
    note = "pixels: the mean picture, and a probe of the picture itself; the model's probe reads the encoder's last states, place by place"
    return replace(found, scores=scores, notes=(*found.notes, note))


def drawn(subject: Subject) -> Iterator[Tree]:
    """The first pictures as the model saw them (hidden patches are 0.5), as it restored them, and as they are."""
    rows, objective, spec = subject.rows[: subject.how.examples], subject.objective, subject.loaded.spec.encoder
    if not rows:
        return
    assert isinstance(objective, PatchesSpec)
    assert spec is not None
    assert isinstance(spec.embed, PatchEmbedSpec)
    batch = objective.batch(as_read(list(rows), subject.fields, subject.loaded.spec), subject.tokens, np.random.default_rng(subject.seed))
    batch = there(subject.loaded, batch)
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


def states_of(subject: Subject, patches_NLP: Tensor) -> Tensor:
    """What the encoder makes of whole pictures, N×L×D."""
    model, found = subject.loaded.model, []
    assert isinstance(model, Transformer)
    with torch.no_grad():
        for some in patches_NLP.split(256):
            memory = model.encode(subject.loaded.there(Inputs(some)))
            assert memory is not None
            found.append(memory.states.cpu())
            subject.tell("looking", sum(map(len, found)), len(patches_NLP))
    return torch.cat(found)


def there(loaded: Loaded, batch: Batch) -> Batch:
    """A batch where the model is."""
    source = None if batch.source is None else loaded.there(batch.source)
    return replace(batch, inputs=loaded.there(batch.inputs), wanted=batch.wanted.to(loaded.device), source=source)


# -------------------------------------------------------------------------------------------------------- written answers


def answers(subject: Subject) -> Found:
    """Texts that the model writes, the source itself and its first words, against what was wanted."""
    translation = Translation()  # before minutes are spent
    sources, wanted = [row[0] for row in subject.rows], [row[1] for row in subject.rows]
    written = [""] * len(sources)
    lengths, note = measured(subject, sources)
    options: Any = {"max_new": subject.how.max_new or most_new(subject), "beams": subject.how.beams, "penalty": subject.how.penalty}
    for places in in_batches(subject, lengths, "writing", PLACES // subject.how.beams):
        for i, text in zip(places, subject.loaded.generate([sources[i] for i in places], **options), strict=True):
            written[i] = text
    found = {"model": written, "copy": [copied(source) for source in sources], f"lead-{LEAD}": [lead(source, LEAD) for source in sources]}
    if all(one.split() == other.split() for one, other in zip(found["copy"], found[f"lead-{LEAD}"], strict=True)):
        del found[f"lead-{LEAD}"]  # no source is longer
    scores = {name: translation.scores(texts, wanted) | summary.scores(texts, wanted) for name, texts in found.items()}
    if blind := summary.uncounted(wanted):
        note = (*note, f"{blind:,} of {len(wanted):,} wanted texts hold nothing that ROUGE counts, a–z and 0–9: it is 0 for them")
    return Found(scores, note, matter(sources, wanted), translation.signatures(), tuple(written), more={"writing": options})


def most_new(subject: Subject) -> int:
    """Twice as many tokens as any of some targets that were learned, so that a text without an end is seen to have none."""
    some = [row[1] for row in subject.learned[:1000]]
    return 8 + 2 * max(len(one.ids) for one in subject.loaded.tokenizer.encode_batch(some)) if some else 256


def matter(sources: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """Which figures are those to read: of answers of a word or two exact match, of much shorter texts ROUGE, otherwise BLEU and chrF."""
    read, told = (sum(len(text.split()) for text in texts) / len(texts) for texts in (sources, wanted))
    if told <= 2:
        return ("exact",)
    return ("rouge1", "rouge2", "rougeL") if told < read / 2 else ("bleu", "chrf")


# --------------------------------------------------------------------------------------------------------------- classes


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
        given = [patches for (patches,) in as_read([(picture,) for picture in given], ("picture",), loaded.spec)]
        lengths = [len(patches) for patches in given]
    else:
        lengths, note = measured(subject, given)
    for places in in_batches(subject, lengths, "reading"):
        some = [given[i] for i in places]
        batch = loaded.there(Inputs(torch.from_numpy(np.stack(some)))) if pictures else loaded.encode(some)
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


# --------------------------------------------------------------------------------------------------------------- ranking


def found_documents(subject: Subject) -> Found:
    """The place of each query's document among all there are, by the cosine of their vectors, by BM25, and by chance."""
    documents = subject.corpus.documents(subject.fields[1])
    place = {text: i for i, text in enumerate(documents)}
    queries, wanted = [row[0] for row in subject.rows], [place[row[1]] for row in subject.rows]
    vectors, note = embedded(subject, documents, "reading documents")
    asked_for, _ = embedded(subject, queries, "reading queries")
    ours = [ranking.ranks((asked_for[i : i + 64] @ vectors.T).numpy(), wanted[i : i + 64]) for i in range(0, len(queries), 64)]
    words = BM25(documents)
    theirs = [ranking.ranks(words.scores(query)[None], [own]) for query, own in zip(queries, wanted, strict=True)]
    scores = {"model": ranking.scores(np.concatenate(ours)), "BM25": ranking.scores(np.concatenate(theirs))}
    return Found(scores | {"chance": ranking.chance(len(documents))}, note, more={"documents": len(documents)})


def embedded(subject: Subject, texts: Sequence[str], what: str) -> tuple[torch.Tensor, tuple[str, ...]]:
    lengths, note = measured(subject, texts)
    vectors: torch.Tensor | None = None
    for places in in_batches(subject, lengths, what):
        found = torch.nn.functional.normalize(subject.loaded.embed([texts[i] for i in places]).float().cpu(), dim=-1)
        vectors = torch.empty(len(texts), found.shape[1]) if vectors is None else vectors
        vectors[places] = found
    assert vectors is not None
    return vectors, note


# ------------------------------------------------------------------------------------------------------------ in batches


def measured(subject: Subject, texts: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """How many tokens each text has, and a word about those that were cut."""
    found = subject.loaded.tokenizer.encode_batch(list(texts))
    were_cut = sum(bool(one.overflowing) for one in found)
    note = (f"{were_cut:,} of {len(texts):,} texts were cut to {subject.limit:,} tokens",) if were_cut else ()
    return [len(one.ids) for one in found], note


def with_logits(loaded: Loaded) -> int:
    """How many places there is room for where each has a score for every token."""
    vocabulary = loaded.spec.vocab
    return min(PLACES, NUMBERS // vocabulary) if isinstance(vocabulary, int) else PLACES


def in_batches(subject: Subject, lengths: Sequence[int], what: str, most: int | None = None) -> Iterator[list[int]]:
    """Which rows go together: those of like length, as many as there is room for; without gradients while they are used."""
    done = 0
    with torch.no_grad():
        for places in plan(np.array(lengths), 0, 0, tokens=max(most or PLACES, *lengths, 1)):
            subject.tell(what, done, len(lengths))
            yield places.tolist()
            done += len(places)
    subject.tell(what, done, len(lengths))


SCORED: dict[str, Callable[[Subject], Found]] = {
    "causal": language, "seq2seq": answers, "classify": classified, "contrastive": found_documents,
    "patches": restored,
}  # fmt: skip
