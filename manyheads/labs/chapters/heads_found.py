"""What heads find: the word before "run" and its subject, in a small trained model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.inspect.dependencies import Link, RelationHead, relation_heads
from manyheads.inspect.measure import head_patterns
from manyheads.labs.figures import Cell, Heatmap, Table
from manyheads.labs.finding import Check, Finding, at_least, equals, judging, reported
from manyheads.labs.fitting import fit, small_model
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.model.recording import record

SUBJECTS = ("I", "we", "you", "they", "students", "friends")
RUN = ("run", "walk", "work", "play", "talk", "dance")  # nouns and verbs
PREPOSITIONS, ARTICLES, ADVERBS = ("in", "for", "with", "to"), ("a", "the"), ("today", "often", "now")
ADJECTIVES, NOUNS, VERBS = ("small", "good", "new"), ("business", "shop", "school", "city", "park"), ("went", "like")
TAGS = ("noun", "verb")
WORDS = ("?", *SUBJECTS, *RUN, *PREPOSITIONS, *ARTICLES, *ADVERBS, *ADJECTIVES, *NOUNS, *VERBS, *TAGS)
IDS = {word: i for i, word in enumerate(WORDS)}
LENGTH = 20
IS_FOUND = 0.75  # accuracy of a head that attends to the word before
DOCUMENT = ((("I", "run", "a", "small", "business"), 1, "verb"), (("I", "went", "for", "a", "run"), 4, "noun"))

Sentence = tuple[list[str], int, int, str]  # its words, the positions of "run" and of the subject, noun or verb
Batch = tuple[Tensor, Tensor, Tensor]  # ids, the position of "run", and its tag and subject


def phrase(rng: random.Random) -> list[str]:
    """Nothing, or words such as "for a small shop", which have the words that also precede a noun."""
    if rng.random() < 0.5:
        return []
    adjective = [rng.choice(ADJECTIVES)] if rng.random() < 0.5 else []
    return [rng.choice(PREPOSITIONS), rng.choice(ARTICLES), *adjective, rng.choice(NOUNS)]


def sentence(rng: random.Random) -> Sentence:
    """Only the word before tells a noun ("went for a run") from a verb ("like to run", "I run")."""
    start = [*([rng.choice(ADVERBS)] if rng.random() < 0.5 else []), *phrase(rng)]
    verb = [rng.choice(VERBS), *phrase(rng)]
    tag = rng.choice(TAGS)
    if tag == "noun":
        middle = [*verb, rng.choice(PREPOSITIONS), rng.choice(ARTICLES)]
    else:
        middle = [*verb, "to"] if rng.random() < 0.7 else []
    words = [*start, rng.choice(SUBJECTS), *middle, rng.choice(RUN), *phrase(rng)]
    return words, len(start) + 1 + len(middle), len(start), tag


def collate(sentences: list[Sentence]) -> Batch:
    ids = torch.zeros(len(sentences), LENGTH, dtype=torch.long)
    for row, (words, *_) in zip(ids, sentences, strict=True):
        row[: len(words)] = torch.tensor([IDS[word] for word in words])
    targets = [(IDS[tag], IDS[words[subject]]) for words, _, subject, tag in sentences]
    return ids, torch.tensor([position for _, position, _, _ in sentences]), torch.tensor(targets)


def answers(model: nn.Module, batch: Batch) -> Tensor:
    """The logits of the tag and of the subject at "run": N×2 and N×subjects, as two parts of one row."""
    ids, positions, _ = batch
    logits: Tensor = model(ids)
    return logits[torch.arange(len(ids)), positions]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits, (tag, subject) = answers(model, batch), batch[2].T
    first, last = IDS[SUBJECTS[0]], IDS[SUBJECTS[-1]] + 1
    return F.cross_entropy(logits[:, -2:], tag - IDS["noun"]) + F.cross_entropy(logits[:, first:last], subject - first)


@torch.no_grad()
def accuracies(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """The share of right tags, and of right subjects."""
    logits, (tag, subject) = answers(model, batch), batch[2].T
    first, last = IDS[SUBJECTS[0]], IDS[SUBJECTS[-1]] + 1
    right = (logits[:, -2:].argmax(-1) + IDS["noun"] == tag, logits[:, first:last].argmax(-1) + first == subject)
    return float(right[0].double().mean()), float(right[1].double().mean())


def links(one: Sentence) -> tuple[str, list[Link]]:
    """The text, and what "run" should attend to: the word before it, and its subject."""
    words, position, subject, tag = one
    return " ".join(words), [(position, position - 1, f"word before {tag}"), (position, subject, "subject")]


@lab("heads", rows=("C6", "P12"), seconds=(5, 26.0), smallest={"steps": 300, "sentences": 100}, full={"steps": 1000},
     counterexample={"steps": 0}, try_next=("--heads 1", "--heads 4"))  # fmt: skip
def what_heads_find(
    *,
    steps: Annotated[int, "training steps"] = 400,
    heads: Annotated[int, "number of heads"] = 2,
    sentences: Annotated[int, "sentences that are measured, which are not trained on"] = 300,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """Trained heads find structures: one head finds the subject of "run", which is at no fixed offset.

    "I run a small business" and "I went for a run": the word before tells a verb from a noun, and the subject is "I" in
    both. A model of one layer learns both answers at the word "run" from generated sentences. The highest weight of a
    head is compared with the best fixed offset, which needs no model: a head that finds the subject does what no offset
    can. The word before is at an offset of −1 by definition. If a head attends to it, it must do so in the two
    sentences; with some seeds there is such a head, with others none.
    """
    rng = random.Random(seed)
    model = small_model("encoder", vocab=len(WORDS), head="untied", seed=seed, layers=1,
                        attention={"heads": heads}, position={"kind": "clipped", "clip": 4})  # fmt: skip
    fit(model, lambda step: collate([sentence(rng) for _ in range(32)]), loss, steps=steps, lr=5e-3, progress=progress)
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    checkpoint = Checkpoint(model.eval(), tokenizer)
    validation = [sentence(rng) for _ in range(sentences)]
    tags, subjects = accuracies(model, collate(validation))
    by_relation = {
        each.relation: each for each in relation_heads(checkpoint, [links(sentence) for sentence in validation])
    }
    subject, before = by_relation["subject"], by_relation["word before noun"]
    pair = collate([(list(words), position, 0, tag) for words, position, tag in DOCUMENT])
    pair_tags, pair_subjects = accuracies(model, pair)
    return Finding(
        (
            *judging(
                "C6",
                at_least("right tags of sentences not trained on", tags, 0.95),
                at_least("right subjects of sentences not trained on", subjects, 0.95),
                at_least("subject: accuracy of the best head above that of the best offset",
                         subject.accuracy - subject.offset_accuracy, 0.3),
            ),
            *judging(
                "C6 P12",
                at_least("the two sentences of the document: right tags", pair_tags, 1.0),
                at_least("the two sentences of the document: right subjects", pair_subjects, 1.0),
                attended_from_run(model, before.head if before.accuracy >= IS_FOUND else None),
            ),
            *(reported(f"word before {tag}: accuracy of the best head", by_relation[f"word before {tag}"].accuracy)
              for tag in TAGS),
        ),
        (relation_table("Where the highest weight is, beside the best fixed offset", by_relation),
         pattern_table(checkpoint, validation),
         *(attention_from_run(model, list(words), position) for words, position, _ in DOCUMENT)),
    )  # fmt: skip


def relation_table(title: str, heads: dict[str, RelationHead]) -> Table:
    """For each relation, the head whose highest weight is right most often, beside the best fixed offset."""
    rows = [
        (
            head.relation,
            head.count,
            "none" if head.attention is None else f"{head.attention}, head {head.head}",
            head.accuracy,
            head.offset,
            head.offset_accuracy,
        )
        for head in heads.values()
    ]
    return Table(title, ("link", "count", "best head", "accuracy", "best offset", "accuracy of the offset"), rows)


def pattern_table(checkpoint: Checkpoint, sentences: list[Sentence]) -> Table:
    """How much weight each head has on fixed patterns, over all words, and on its best fixed offset."""
    names = ("previous", "first", "self", "next", "same")
    ids = [[IDS[word] for word in words] for words, *_ in sentences[:100]]
    rows = list[list[Cell]]()
    for pattern, (offset, weight) in zip(
        head_patterns(checkpoint, ids), best_offsets(checkpoint.model, ids), strict=True
    ):
        scores = [round(pattern.measures[name], 3) for name in names]
        rows.append([f"head {pattern.head}", *scores, offset, round(weight, 3)])
    columns = ("head", *names, "best fixed offset", "weight on it")
    return Table("Mean weight of all words on a pattern", columns, rows)


@torch.no_grad()
def best_offsets(model: nn.Module, rows: list[list[int]]) -> list[tuple[int, float]]:
    """For each head of the first layer, the fixed offset that has most weight, and the mean of that over all words."""
    offsets = range(1 - LENGTH, LENGTH)
    totals = list[Tensor]()
    for ids in rows:
        with record(model) as tape:
            model(torch.tensor([ids]))
        weights_HLL = F.pad(tape[0].weights()[0], (0, LENGTH - len(ids), 0, LENGTH - len(ids)))
        totals.append(torch.stack([weights_HLL.diagonal(offset, dim1=1, dim2=2).sum(-1) for offset in offsets]))
    means, best = (torch.stack(totals).sum(0) / sum(map(len, rows))).max(dim=0)
    return [(offsets[i], mean) for i, mean in zip(best.tolist(), means.tolist(), strict=True)]


@torch.no_grad()
def weights_from_run(model: nn.Module, words: Sequence[str], position: int) -> Tensor:
    """The weights from "run" to each word, a row per head."""
    with record(model) as tape:
        model(torch.tensor([[IDS[word] for word in words]]))
    return tape[0].weights(rows=position)[0]


def attended_from_run(model: nn.Module, head: int | None) -> Check:
    """What a head attends to most from "run" in the two sentences, if there is one that finds the word before."""
    name = 'the two sentences: word that the head for the word before attends to most from "run"'
    if head is None:
        return reported(name, "no head attends to the word before")
    targets = [words[weights_from_run(model, words, position)[head].argmax()] for words, position, _ in DOCUMENT]
    return equals(name, ", ".join(targets), ", ".join(words[position - 1] for words, position, _ in DOCUMENT))


def attention_from_run(model: nn.Module, words: list[str], position: int) -> Heatmap:
    weights = weights_from_run(model, words, position)
    names = [f"head {i}" for i in range(len(weights))]
    return Heatmap(f'Weights from "run" in "{" ".join(words)}"', weights.tolist(), names, words)
