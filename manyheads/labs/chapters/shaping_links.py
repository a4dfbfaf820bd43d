"""Heads that follow links between words: dependencies, pronouns, tense, the start of a paragraph."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.data.tokenizer import TokenizerSpec
from manyheads.inspect.dependencies import Link, RelationHead, relation_heads, tree_links
from manyheads.labs.chapters.heads_found import relation_table
from manyheads.labs.chapters.shaping import pointing_cost
from manyheads.labs.figures import Bars, Heatmap, Lines
from manyheads.labs.finding import Finding, at_least, at_most, is_true, reported
from manyheads.labs.fitting import fit, small_model
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.labs.paragraphs import Paragraph, make_paragraph
from manyheads.model.recording import record
from manyheads.tasks.auxiliary import AuxiliaryLossSpec, add_attention_targets, loss_with_auxiliary, total_loss
from manyheads.tasks.batch import Batch, SpecialTokens
from manyheads.tasks.language import MaskedSpec

LINKS = ("pronoun", "tense", "paragraph start", "subject of run")


class Reader:
    """A bidirectional encoder that fills in masked words of generated paragraphs, before and after its training."""

    def __init__(self, *, seed: int, layers: int = 2) -> None:
        self.rng = np.random.default_rng(seed)
        self.train = [make_paragraph(self.rng) for _ in range(1000)]
        self.validation = [make_paragraph(self.rng) for _ in range(100)]
        tokenizer = TokenizerSpec.from_config("words").make([paragraph.text for paragraph in self.train])
        self.special = SpecialTokens(vocab_size=tokenizer.get_vocab_size())
        self.ids = [
            np.array(tokenizer.encode(paragraph.text, add_special_tokens=False).ids) for paragraph in self.train
        ]
        fields = {"attention": {"kind": "heads", "heads": 4}, "feedforward": {"kind": "mlp", "hidden": 64},
                  "position": "sinusoidal", "embed": {"kind": "tokens", "scale": True}, "layers": layers}  # fmt: skip
        model = small_model("encoder", vocab=self.special.vocab_size, seed=seed, init="xavier", **fields)
        self.before, self.after = Checkpoint(copy.deepcopy(model), tokenizer), Checkpoint(model, tokenizer)

    def fit(self, steps: int, auxiliary_losses: Sequence[AuxiliaryLossSpec], progress: OnProgress) -> list[float]:
        """Trains by masked language modeling, with auxiliary losses."""
        task = MaskedSpec(mlm_probability=0.25)
        columns: dict[str, list[Any]] = {
            "text": [paragraph.text for paragraph in self.train],
            "arcs": [paragraph.heads for paragraph in self.train],
            "relations": [paragraph.relations for paragraph in self.train],
        }
        targets = {spec.name: spec.attention_targets(columns, self.after.tokenizer, {}) for spec in auxiliary_losses}

        def batch(_: int) -> Batch:
            index = self.rng.integers(len(self.ids), size=24)
            rows = task.batch([(self.ids[i],) for i in index], self.special, self.rng)
            return add_attention_targets(
                rows, task, self.special, {k: [v[i] for i in index] for k, v in targets.items()}
            )

        def loss(model: nn.Module, rows: Batch) -> Tensor:
            task_loss = loss_with_auxiliary(task, auxiliary_losses, model, rows)  # type: ignore[arg-type]
            counts = {name: loss.count for name, loss in task_loss.auxiliary_losses.items()}
            return total_loss(task_loss, task_loss.count, auxiliary_losses, counts)

        return fit(self.after.model, batch, loss, steps=steps, lr=4e-3, progress=progress)

    def score(self, checkpoint: Checkpoint, *, trees: bool) -> dict[str, RelationHead]:
        """For each link of new paragraphs, the best head beside the best fixed offset."""
        rows = [(paragraph.text, links_of(paragraph, trees=trees)) for paragraph in self.validation]
        return {head.relation: head for head in relation_heads(checkpoint, rows)}


def links_of(paragraph: Paragraph, *, trees: bool) -> list[Link]:
    return tree_links(paragraph.heads, paragraph.relations) if trees else paragraph.links


def head_matrix(checkpoint: Checkpoint, text: str, layer: int, head: int) -> list[list[float]]:
    """The weights of one head for the words of a text, without special tokens."""
    with record(checkpoint.model) as tape, torch.no_grad():
        checkpoint.logits(torch.tensor([checkpoint.encode([text])[0].ids]))
    words = len(text.split())
    weights = tape.weights(f"encoder.layers.{layer}.attention", head=head)[0]
    first = (weights.shape[-1] - words) // 2
    rows: list[list[float]] = weights[first : first + words, first : first + words].tolist()
    return rows


@lab("shaping", rows=("J6",), seconds=(6.0, 40.0), smallest={"steps": 120}, full={"steps": 1500},
     counterexample={"weight": 0.0}, try_next=("--weight 0", "--steps 600 --weight 0.1"))  # fmt: skip
def guided_head(
    *,
    weight: Annotated[float, "λ of the term that guides the head; 0 for none"] = 1.0,
    steps: Annotated[int, "optimizer steps"] = 250,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A head that is guided by a parse becomes a dependency relation, far better than any fixed offset.

    Guided attention adds λ times the mean −ln α of the gold links to the loss. Here one head of a small encoder learns
    to attend from each verb to its subject, while the model learns to fill in masked words. On new paragraphs the head
    is right if its highest weight is at the subject. Beside it stands the offset, such as "one word to the left", that
    is right most often, and for the other relations the best head, which nobody guided.
    """
    fields = {"kind": "guided", "by": "arcs", "toward": "dependents", "relation": "nsubj", "layers": [0], "heads": [0]}
    reader = Reader(seed=seed)
    losses = reader.fit(steps, [AuxiliaryLossSpec.from_config(fields | {"weight": weight})], progress)
    heads = reader.score(reader.after, trees=True)
    subject = heads["nsubj⁻¹"]
    text = reader.validation[0].text
    pictures = (
        Heatmap(
            f"The head {name} training", head_matrix(checkpoint, text, 0, 0), text.split(), text.split(), "query", "key"
        )
        for name, checkpoint in (("before", reader.before), ("after", reader.after))
    )
    better = sum(head.is_better for head in heads.values() if head.relation != "nsubj⁻¹")
    return Finding(
        (
            at_least("links from a verb to its subject that the best head follows", subject.accuracy, 0.8),
            at_least("more than the best fixed offset", subject.accuracy - subject.offset_accuracy, 0.15),
            is_true("it is the guided head", (subject.attention, subject.head) == ("encoder.layers.0.attention", 0)),
            reported("other relations in which a head is better than every offset", f"{better} of {len(heads) - 1}"),
            reported("loss at the end, with the term", losses[-1]),
        ),
        (*pictures, relation_table("Relations on new paragraphs", heads)),
    )  # fmt: skip


@lab("shaping", rows=("P10",), seconds=(6.0, 60.0), smallest={"steps": 160}, full={"steps": 3000},
     counterexample={"steps": 1}, try_next=("--steps 1000", "--layers 4"))  # fmt: skip
def heads_for_links(
    *,
    steps: Annotated[int, "optimizer steps"] = 300,
    layers: Annotated[int, "layers of four heads"] = 2,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """Training alone gives heads that follow some links which the task needs; which ones is measured.

    In the generated paragraphs a pronoun goes back to a name, the tense of a verb to a word of time, the mark that ends
    a sentence to the one that begins the paragraph, and "run" has a subject. A model that fills in masked words needs
    these links, and nobody shows them to it. For each link: how often the best head has its highest weight there, after
    training and before, and how often the best fixed offset is right.
    """
    reader = Reader(seed=seed, layers=layers)
    before = reader.score(reader.before, trees=False)
    losses = reader.fit(steps, [], progress)
    after = reader.score(reader.after, trees=False)
    gains = {name: after[name].accuracy - before[name].accuracy for name in LINKS}
    accuracies = {"head": after, "untrained head": before}
    bars = {f"{name}, {kind}": scores[name].accuracy for name in LINKS for kind, scores in accuracies.items()}
    bars |= {f"{name}, offset": after[name].offset_accuracy for name in LINKS}
    return Finding(
        (
            at_least("largest gain of the best head by training", max(gains.values()), 0.15),
            at_least("mean gain over the four links", sum(gains.values()) / len(gains), 0.05),
            *(reported(f"{name}: best head is better than every fixed offset", "yes" if after[name].is_better else "no")
              for name in LINKS),
            reported("loss at the end, in nats per masked word", losses[-1]),
        ),
        (Bars("Links that are followed, on new paragraphs", "share", bars), relation_table("After training", after)),
    )  # fmt: skip


@lab("shaping", rows=("P11",), seconds=(0.5, 1.0), smallest={"paragraphs": 20}, full={"paragraphs": 1000},
     counterexample={"bounded": False}, try_next=("--max-cost 9", "--no-bounded"))  # fmt: skip
def far_links(
    *,
    max_cost: Annotated[float, "L_max"] = 25.0,
    paragraphs: Annotated[int, "generated paragraphs"] = 100,
    bounded: Annotated[bool, "whether the cost of a query is at most L_max"] = True,
    seed: int = 0,
) -> Finding:
    """With the bound L_max, L_near leaves room for links over many words, such as those of pronouns.

    A head that attends from every pronoun, verb and end mark to its linked word, and from the other words to
    themselves, pays d² for a link over d words. With L_near it pays L_max at most: the price of a far link does not
    grow with its length, and the price of the head is at most the number of its links times L_max.
    """
    rng = np.random.default_rng(seed)
    texts = [make_paragraph(rng) for _ in range(paragraphs)]
    limit = max_cost if bounded else 1e12
    prices: dict[int, float] = {}
    for text in texts:
        for word, linked, _ in text.links:
            if abs(word - linked) not in prices:
                prices[abs(word - linked)] = pointing_cost([(word, linked)], len(text.words), limit)
    far = {distance: price for distance, price in prices.items() if distance**2 > max_cost}
    pronouns = [abs(i - j) for text in texts for i, j, name in text.links if name == "pronoun"]
    points = sorted(prices.items())
    curves = {
        "L_near": [(float(d), p) for d, p in points],
        "without L_max": [(float(d), float(d**2)) for d, _ in points],
    }
    return Finding(
        (
            at_most("largest cost of a link", max(prices.values()), max_cost * (1 + 1e-9)),
            at_least("lengths of links whose square is above L_max", len(far), 2),
            at_most("largest difference in price among them", max(far.values()) - min(far.values()), 1e-6),
            reported("mean length of the links of pronouns, in words", sum(pronouns) / len(pronouns)),
            reported("longest of them", max(pronouns)),
        ),
        (Lines("Price of a link", "words between the two", "cost", curves, {"L_max": max_cost}),),
    )  # fmt: skip
