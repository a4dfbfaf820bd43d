"""Probing for grammar: parts of speech and relations of a parsed text, in a small model or in one of the user's."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
from torch import Tensor

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.checkpoint.loading import load
from manyheads.data.conllu import ConlluSpec
from manyheads.data.tokenizer import TokenizerSpec
from manyheads.errors import PathNotFoundError
from manyheads.inspect.probe import probe
from manyheads.inspect.word_labels import word_labels
from manyheads.labs.figures import Lines
from manyheads.labs.finding import Finding, at_least, reported
from manyheads.labs.fitting import fit, next_token_loss, small_model
from manyheads.labs.lab import OnProgress, check_choice, lab, no_progress

NOUN_OR_VERB, ADJECTIVES, ARTICLES = ("walk", "run", "play", "look", "call"), ("small", "new", "good"), ("the", "a")
SENTENCE = 10  # the words of the longest one


def parsed_sentence(rng: random.Random) -> str:
    """A sentence such as "the walk run a small play", in the format of .conllu: only the order tells noun from verb."""

    def phrase(relation: str) -> list[tuple[str, str, str]]:
        adjectives = [(rng.choice(ADJECTIVES), "ADJ", "amod") for _ in range(rng.randrange(3))]
        return [(rng.choice(ARTICLES), "DET", "det"), *adjectives, (rng.choice(NOUN_OR_VERB), "NOUN", relation)]

    subject, words = phrase("nsubj"), phrase("obj")
    verb, last = len(subject) + 1, len(subject) + 1 + len(words)
    heads = [*[verb - 1] * (verb - 2), verb, 0, *[last] * (len(words) - 1), verb]
    rows = [*subject, (rng.choice(NOUN_OR_VERB), "VERB", "root"), *words]
    cells = (
        (str(i), word, "_", tag, "_", "_", str(head), relation, "_", "_")
        for i, ((word, tag, relation), head) in enumerate(zip(rows, heads, strict=True), 1)
    )
    return "\n".join(map("\t".join, cells)) + "\n\n"


def trained_reader(file: Path, *, causal: bool, steps: int, seed: int, progress: OnProgress) -> Checkpoint:
    """A model of two layers that predicts the next word of the sentences of a file; it has no positions."""
    texts = [row[0] for row in ConlluSpec(path=str(file)).read_rows(file, Counter())]
    tokenizer = TokenizerSpec.from_config({"kind": "words", "vocab_size": 100}).make(texts)
    ids = torch.tensor([
        (tokenizer.encode(text, add_special_tokens=False).ids + [0] * SENTENCE)[:SENTENCE] for text in texts
    ])  # fmt: skip
    model = small_model(vocab=tokenizer.get_vocab_size(), layers=2, width=32, seed=seed, mask={"causal": causal})

    def batch(_: int) -> Tensor:
        return ids[torch.randint(len(ids), (32,))]

    fit(model, batch, next_token_loss, steps=steps, progress=progress)
    return Checkpoint(model.eval(), tokenizer)


@lab("probing", rows=("L6",), seconds=(4.0, 15.0), smallest={"sentences": 150, "steps": 80}, full={"sentences": 1000},
     counterexample={"mask": "none"}, try_next=("--label relation", "--sentences 100"))  # fmt: skip
def grammar_probe(
    *,
    label: Annotated[str, "tag or relation: what is probed for"] = "tag",
    treebank: Annotated[str, "a .conllu file of your own, in place of generated sentences"] = "",
    model: Annotated[str, "a checkpoint with a tokenizer, in place of a small model that is trained"] = "",
    mask: Annotated[str, "causal or none: the mask of the small model"] = "causal",
    sentences: Annotated[int, "generated sentences"] = 300,
    steps: Annotated[int, "training steps of the small model"] = 150,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A probe reads the part of speech of a word, or its relation, from the layers of any model.

    In "the walk run a small play" every noun can be a verb too: the embedding of a word (layer 0) does not tell which
    it is here. A model that predicts the next word has to know it, and a probe finds it in its layers. Labels come from
    a parsed text, a .conllu file, and the last token of a word has its label. Without a mask the small model, which has
    no positions, sees a set of words, and cannot know. With `--model` and `--treebank` the lab probes a model of yours
    on a treebank of yours: an encoder, a decoder, the encoder of an encoder–decoder, or a recurrent network.
    """
    check_choice("label", label, ("tag", "relation"))
    check_choice("mask", mask, ("causal", "none"))
    if treebank and not Path(treebank).exists():
        raise PathNotFoundError(f"no file {treebank}")
    rng = random.Random(seed)
    with TemporaryDirectory() as folder:
        file = Path(treebank) if treebank else Path(folder) / "generated.conllu"
        if not treebank:
            file.write_text("".join(parsed_sentence(rng) for _ in range(sentences)), encoding="utf-8")
        reader = (
            load(model)
            if model
            else trained_reader(file, causal=mask == "causal", steps=steps, seed=seed, progress=progress)
        )
        rows, label_of = word_labels(reader, file, "tag" if label == "tag" else "relation")
    report = probe(reader.model, rows, label_of, seed=seed)
    best = max(layer.accuracy for layer in report.layers[1:])
    curves = {
        name: [(float(i), float(getattr(layer, field))) for i, layer in enumerate(report.layers)]
        for name, field in (("model", "accuracy"), ("untrained", "untrained"), ("shuffled labels", "shuffled"))
    }
    return Finding(
        (
            at_least("best accuracy above, less that of layer 0", best - report.layers[0].accuracy, 0.05),
            reported("largest accuracy with shuffled labels", max(layer.shuffled for layer in report.layers)),
            reported("accuracy at layer 0", report.layers[0].accuracy),
            reported("best accuracy above", best),
            reported("chance", report.chance),
            reported("sentences", len(rows)),
            reported("labels", report.classes),
        ),
        (
            Lines(
                f"Accuracy of the {label}", "layer, 0 is the embeddings", "accuracy", curves, {"chance": report.chance}
            ),
        ),
    )
