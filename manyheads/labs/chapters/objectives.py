"""Objectives: what a model predicts, and why the labels come from the text itself."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.data.builtin import stdlib
from manyheads.files.read import read_bytes
from manyheads.labs.figures import Heatmap, Lines, Table
from manyheads.labs.finding import Finding, at_least, at_most, equals, is_true, near, reported
from manyheads.labs.fitting import add_noise, fit, next_token_loss, output_changes, small_model
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.metrics.baselines import Bigram, Unigram
from manyheads.parts.inputs import Inputs
from manyheads.tasks.batch import IGNORE_INDEX, SpecialTokens
from manyheads.tasks.language import CausalSpec, InfillSpec, MaskedSpec, SpansSpec

NAMES = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")  # the special tokens, ids 0 to 4


def encode(text: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """The ids of the words of a text, and the names of all ids."""
    words = tuple(dict.fromkeys(text.split()))
    ids = {word: i + len(NAMES) for i, word in enumerate(words)}
    return np.array([ids[word] for word in text.split()]), NAMES + words


# ------------------------------------------------------------------------------------------------------- the next token


@lab("objectives", rows=("H1",), counterexample={"causal": False},
     try_next=("--no-causal", "--text 'to be or not to be'"))  # fmt: skip
def next_token_labels(
    *,
    text: Annotated[str, "words"] = "the man chased the dog",
    causal: Annotated[bool, "whether the model has a causal mask"] = True,
    seed: int = 0,
) -> Finding:
    """The labels of a language model are its inputs, shifted by one.

    At every position the model predicts the next token, so the text is its own label: no person has to write any. The
    label of a position stands in the input of the next one. A causal mask hides it: if a token changes, the outputs
    before it do not change.
    """
    ids, names = encode(text)
    batch = CausalSpec().batch([(ids,)], SpecialTokens(vocab_size=len(names)), np.random.default_rng(seed))
    inputs, targets = batch.inputs.tokens, batch.targets
    length = inputs.shape[1]
    model = add_noise(small_model(vocab=len(names), seed=seed, position="sinusoidal", mask={"causal": causal}), 0.2)
    changes = output_changes(model, inputs, vocab=len(names))
    before = torch.ones(length, length).triu(1).bool()
    words = [names[i] for i in inputs[0]]
    rows = [(i + 1, words[i], names[targets[0, i]]) for i in range(length)]
    return Finding(
        (
            is_true("the target is the next input", inputs[0, 1:].tolist() == targets[0, :-1].tolist()),
            equals("the last target", names[targets[0, -1]], "</s>"),
            at_most("change of an output with a later token", float(changes[before].max()), 1e-5),
            at_least("change of an output with its own or an earlier token", float(changes[~before].min()), 1e-4),
        ),
        (
            Table("A text as inputs and targets", ("position", "input", "target"), rows),
            Heatmap("How much each output changes with each input", changes.tolist(), words, words,
                    "output at", "changed input"),
        ),
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- masked tokens


def masked_outputs(position: str, seed: int, *, keep_position: bool) -> tuple[Tensor, list[str]]:
    """The outputs of an encoder at the masked tokens of a text, and the names of their positions."""
    ids, names = encode("a b c d e f g h i j")
    special = SpecialTokens(vocab_size=len(names))
    task = MaskedSpec(mlm_probability=0.4, mask_replace_prob=1.0, random_replace_prob=0.0)
    inputs = task.batch([(ids,)], special, np.random.default_rng(seed + 6)).inputs
    masked = inputs.tokens[0] == special.mask
    if not keep_position:  # every mask is given position 0
        positions = torch.arange(len(masked))[None].masked_fill(masked, 0)
        inputs = Inputs(inputs.tokens, positions=positions)
    model = add_noise(small_model("encoder", vocab=len(names), seed=seed, position=position), 0.2)
    with torch.no_grad():
        return model(inputs)[0, masked], [f"position {i}" for i in masked.nonzero().flatten().tolist()]


def distance_map(outputs: Tensor, names: list[str], *, keep_position: bool) -> Heatmap:
    title = f"Distance between the outputs of masked tokens, positions {'kept' if keep_position else 'masked too'}"
    return Heatmap(title, torch.cdist(outputs, outputs).tolist(), names, names)


@lab("objectives", rows=("H2",), counterexample={"keep_position": False},
     try_next=("--position rope", "--no-keep-position"))  # fmt: skip
def masked_tokens_differ(
    *,
    position: Annotated[str, "position scheme, such as sinusoidal, learned, rope or none"] = "sinusoidal",
    keep_position: Annotated[bool, "whether a masked token keeps its position"] = True,
    seed: int = 0,
) -> Finding:
    """A masked token keeps its position, so the model knows which one it has to restore.

    Masked language modeling replaces some tokens by <mask>, and the model predicts what they were. All of them are the
    same token now. What distinguishes them is the position, which is not masked: the outputs at two masks differ.
    """
    outputs, names = masked_outputs(position, seed, keep_position=keep_position)
    return Finding(
        (
            at_least("masked tokens", len(outputs), 2),
            at_least("smallest distance between their outputs", float(F.pdist(outputs).min()), 1e-3),
        ),
        (distance_map(outputs, names, keep_position=keep_position),),
    )


@lab("objectives", rows=("H3",), counterexample={"keep_position": True},
     try_next=("--position learned", "--keep-position"))  # fmt: skip
def masked_positions(
    *,
    position: Annotated[str, "position scheme, such as sinusoidal, learned or rope"] = "sinusoidal",
    keep_position: Annotated[bool, "whether a masked token keeps its position"] = False,
    seed: int = 0,
) -> Finding:
    """If the position is masked too, all masked tokens have the same output.

    A masked token is then the same vector wherever it stands, its queries, keys and values are the same, and so is all
    that every layer computes from them. The model makes one prediction for all the masked tokens of a text: of k
    different ones it can restore one. That is why the value of a token is masked, and its position is not.
    """
    outputs, names = masked_outputs(position, seed, keep_position=keep_position)
    difference = float((outputs - outputs[:1]).abs().max())
    return Finding(
        (
            at_most("largest difference between their outputs", difference, 1e-6),
            equals("different predictions", len(set(outputs.argmax(-1).tolist())), 1),
            reported("masked tokens", len(outputs)),
        ),
        (distance_map(outputs, names, keep_position=keep_position),),
    )


# ------------------------------------------------------------------------------------------------------ span corruption


def infilled(row: list[int], mask: int) -> tuple[list[int], int]:
    """The text that prefix <mask> suffix <mask> content </s> stands for, and the length of the content."""
    first, second = (i for i, token in enumerate(row) if token == mask)
    prefix, suffix, content = row[:first], row[first + 1 : second], row[second + 1 : -1]
    return prefix + content + suffix, len(content)


def with_spans(source: list[int], row: list[int], sentinels: tuple[int, ...]) -> tuple[list[int], int]:
    """The text with the spans of the target in place of the sentinels of the source, and the length of all spans."""
    spans, text = dict[int, list[int]](), list[int]()
    for token in row:
        if token in sentinels:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    for token in source:
        text += spans.get(token, [token])
    return text, len([token for token in row if token not in sentinels])


def corrupted(objective: str, rows: int, seed: int) -> tuple[list[float], list[int], int, int, list[int]]:
    """The share of every text that is content, its length, texts not restored, pads in the loss, and one row."""
    rng, size = np.random.default_rng(seed), 64
    sentinels = tuple(range(900, 940)) if objective == "spans" else ()
    special, text = SpecialTokens(vocab_size=1000, sentinels=sentinels), np.arange(5, 105)
    task: Any = SpansSpec(num_sentinels=40) if objective == "spans" else InfillSpec(block_size=size)
    shares, lengths, broken, pads, example = list[float](), list[int](), 0, 0, list[int]()
    for _ in range(rows // 50):
        batch = task.batch([(text,)] * 50, special, rng)
        padding = batch.inputs.padding_mask
        pads += 0 if padding is None else int((batch.targets[padding] != IGNORE_INDEX).sum())
        for i, target in enumerate(batch.targets.tolist()):
            row = [token for token in target if token != IGNORE_INDEX]
            restored, content = (
                with_spans(batch.source.tokens[i].tolist()[:-1], row[:-1], sentinels)
                if sentinels
                else infilled(row, special.mask)
            )
            shares.append(content / len(restored))
            lengths.append(len(restored))
            broken += restored != text[: len(restored)].tolist()
            example = min(example or row, row, key=lambda one: abs(len(one) - 16))
    return shares, lengths, broken, pads, example


@lab("objectives", rows=("H4",), seconds=(1, 5), full={"rows": 100_000},
     counterexample={"objective": "spans", "rows": 500}, try_next=("--objective spans", "--rows 1000"))  # fmt: skip
def span_corruption(
    *,
    objective: Annotated[str, "infill: one gap, as in the assignment; spans: many, as in T5"] = "infill",
    rows: Annotated[int, "texts"] = 20_000,
    seed: int = 0,
) -> Finding:
    """Span corruption moves a quarter of a text to its end, where the model learns to write it.

    A text is truncated to a random length, from 4 to 7/8 of a block of 64 tokens, and cut into prefix, content and
    suffix. The model reads prefix <mask> suffix <mask> and learns to continue with the content, which is a quarter of
    the text on average. Nothing is lost: prefix, content and suffix are the text. Padding after the content is not in
    the loss.
    """
    shares, lengths, broken, pads, example = corrupted(objective, rows, seed)
    counts, edges = np.histogram(shares, bins=20, range=(0, 0.6))
    points = [(float(x), float(count) / len(shares)) for x, count in zip(edges, counts, strict=False)]
    names = dict(enumerate(NAMES))
    line = " ".join(names.get(token, f"w{token - 4}") for token in example)
    return Finding(
        (
            near("mean share of the text that is content", float(np.mean(shares)), 0.25, 0.005),
            equals("texts that were not restored", broken, 0),
            equals("pads in the loss", pads, 0),
            equals("lengths of the texts", f"{min(lengths)} to {max(lengths)}", "4 to 56"),
        ),
        (
            Table("A row that the model reads; the text was w1 w2 w3 …", ("row",), [(line,)]),
            Lines("Share of the text that is content", "share", "fraction of the texts", {objective: points}),
        ),
    )


# ------------------------------------------------------------------------------------------------------------- raw text

FILES = ("argparse.py", "typing.py", "inspect.py", "tarfile.py")
WINDOW = 64


def raw_bytes(*, shuffled: bool) -> tuple[Tensor, Tensor]:
    """Files of Python's standard library as bytes to train on, and the first 20,000 of each file to validate on."""
    files = [read_bytes(stdlib() / name, 1 << 24) for name in FILES]
    train, validation = (b"".join(data[part] for data in files) for part in (slice(20_000, None), slice(0, 20_000)))
    tensors = [torch.tensor(list(data)) for data in (train, validation)]
    if shuffled:
        tensors = [data[torch.randperm(len(data))] for data in tensors]
    return tensors[0], tensors[1]


@lab("objectives", rows=("H5",), seconds=(6, 50), smallest={"steps": 50}, full={"steps": 2000},
     counterexample={"shuffled": True}, try_next=("--shuffled", "--steps 1000"))  # fmt: skip
def labels_from_raw_text(
    *,
    steps: Annotated[int, "training steps"] = 250,
    shuffled: Annotated[bool, "whether the bytes are in random order"] = False,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """Text without labels is enough to learn from: the next character is the label.

    A small decoder reads files of Python's standard library, byte by byte, and predicts the next byte. To know only how
    frequent each byte is gives a loss of −Σ p ln p, the unigram entropy. The loss on other text falls below it, so the
    model has learned from the order of the characters. If the text is shuffled there is nothing to learn, and it does
    not.
    """
    train, validation = raw_bytes(shuffled=shuffled)
    position = {"kind": "learned", "length": WINDOW}
    model = small_model(vocab=256, seed=seed, position=position, width=64, feedforward={"hidden": 256})

    def batch(_: int) -> Tensor:
        starts = torch.randint(0, len(train) - WINDOW - 1, (16,))
        return torch.stack([train[start : start + WINDOW + 1] for start in starts.tolist()])

    losses = fit(model, batch, next_token_loss, steps=steps, progress=progress)
    windows = validation.unfold(0, WINDOW + 1, WINDOW)[:: max(1, len(validation) // WINDOW // 200)]
    with torch.no_grad():
        loss = float(next_token_loss(model, windows))
    unigram, bigram = Unigram([train.numpy()], 256), Bigram([train.numpy()], 256)
    levels = {"unigram": float(unigram.nats(windows[:, 1:].flatten().numpy()).mean()),
              "bigram": float(np.mean([bigram.nats(row) for row in windows.numpy()]))}  # fmt: skip
    curve = [(step + 1.0, value) for step, value in enumerate(losses)]
    return Finding(
        (
            at_most("loss on other text", loss, levels["unigram"] - 0.1),
            reported("unigram entropy", levels["unigram"]),
            reported("loss of bigram counts", levels["bigram"]),
            reported("labels written by people", 0),
        ),
        (Lines("Loss while training", "step", "nats per byte", {"training loss": curve}, levels),),
    )
