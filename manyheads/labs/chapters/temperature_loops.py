"""Loops: what a greedy text becomes, proven for n-gram models and observed for transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.checkpoint.loading import load
from manyheads.data.builtin import functions_of, read_sources, stdlib
from manyheads.data.tokenizer import TokenizerSpec
from manyheads.errors import InputError
from manyheads.generate.loops import Loop, find_repetition
from manyheads.labs.figures import Lines, Table
from manyheads.labs.finding import Finding, at_least, at_most, equals, reported
from manyheads.labs.fitting import fit, next_token_loss, small_model
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.model.builder import build
from manyheads.model.ngram import Ngram
from manyheads.model.spec import read_model

SPECIAL = list(range(5))  # the special tokens of every tokenizer made here
State = TypeVar("State")
Context = tuple[int, ...]  # the last n − 1 tokens, which are all that an n-gram model reads


def find_loop(next_state: Callable[[State], State], start: State) -> Loop:
    """The loop of start, f(start), f(f(start)), …: exact, with at most two states in memory.

    Brent 1980, "An improved Monte Carlo factorization algorithm", section 7. It ends if the states are finitely many:
    with S of them, prefix + period ≤ S, because the first prefix + period states differ.
    """
    power = period = 1
    slow, fast = start, next_state(start)
    while slow != fast:
        if period == power:
            slow, power, period = fast, 2 * power, 0
        fast, period = next_state(fast), period + 1
    slow = fast = start
    for _ in range(period):
        fast = next_state(fast)
    prefix = 0
    while slow != fast:
        slow, fast, prefix = next_state(slow), next_state(fast), prefix + 1
    return Loop(prefix, period)


def ngram_successor(model: Ngram, eos_token_id: Container[int] = ()) -> Callable[[Context], Context]:
    """Greedy decoding with an n-gram model, as a function of the last n − 1 tokens; an eos token is a fixed point.

    There are V^(n−1) contexts, so each text enters a loop, or ends, within as many tokens.
    """
    length = model.num_previous + 1

    @torch.no_grad()
    def next_context(context: Context) -> Context:
        if len(context) != length:
            raise InputError(f"the context has {len(context)} tokens, expected {length}")
        if context[-1] in eos_token_id:
            return context
        logits = model(torch.tensor([context], device=model.embedding.weight.device))
        return (*context[1:], int(logits[0, -1].argmax()))

    return next_context


@torch.no_grad()
def random_ngram(vocab: int, order: int, seed: int) -> Ngram:
    """An n-gram model with large random weights, so that its greedy texts have no simple pattern."""
    spec = {"vocab": vocab, "ngram": {"order": order, "width": 8}, "head": "untied"}
    model = build(read_model(spec | {"init": {"kind": "normal", "std": 1.5, "scaled": False}}), seed=seed)
    return cast(Ngram, model)


class CheckedLoop(NamedTuple):
    """The loop of a greedy text, compared with the text."""

    length: int  # μ + λ
    is_exact: bool  # whether the text repeats from there, and not before
    is_ended: bool


def checked_loop(model: Ngram, *, ends: bool) -> CheckedLoop:
    """Finds the loop of the text that begins with 1, V − 1, …; with `ends`, token 0 ends it."""
    eos, vocab = (0,) if ends else (), model.embedding.num_embeddings
    successor, start = ngram_successor(model, eos), (1, *[vocab - 1] * model.num_previous)
    loop = find_loop(successor, start)
    states = [start]
    while len(states) < loop.prefix + 2 * loop.period:
        states.append(successor(states[-1]))
    length = loop.prefix + loop.period
    is_exact = states[loop.prefix : length] == states[length:] and len(set(states[:length])) == length
    return CheckedLoop(length, is_exact, states[-1][-1] in eos)


@lab("temperature", rows=("K6",), seconds=(4.0, 25.0), smallest={"models": 20, "largest": 4}, full={"models": 400},
     counterexample={"order": 4}, try_next=("--order 4", "--largest 12"))  # fmt: skip
def greedy_loop(
    *,
    order: Annotated[int, "tokens of an n-gram: 3 reads two tokens"] = 3,
    models: Annotated[int, "random models of each vocabulary"] = 60,
    largest: Annotated[int, "largest vocabulary"] = 8,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """At temperature 0 a trigram model repeats itself for ever, within V² + 1 steps.

    The last two tokens determine the next, so they determine the rest of the text. There are V² pairs of tokens: among
    V² + 1 pairs in a row one occurs twice, and after its second occurrence the text goes on as after the first. So a
    text is a prefix of μ tokens, and then λ tokens again and again, with μ + λ ≤ V². A text that ends stays as it is:
    the end is a loop of one. Brent's algorithm finds μ and λ exactly, with two pairs in memory.
    """
    vocabularies = list(range(2, largest + 1))
    sums: dict[int, list[int]] = {}
    exact = ended = 0
    for vocab in vocabularies:
        seeds = (100_000 * seed + 1000 * vocab + i for i in range(models))
        runs = [checked_loop(random_ngram(vocab, order, number), ends=number % 2 == 1) for number in seeds]
        sums[vocab] = [run.length for run in runs]
        exact, ended = exact + sum(run.is_exact for run in runs), ended + sum(run.is_ended for run in runs)
        progress("vocabulary", vocab, largest)
    share = max(max(values) / vocab**2 for vocab, values in sums.items())
    curves = {
        "mean of μ + λ": [(float(v), fmean(sums[v])) for v in vocabularies],
        "largest μ + λ": [(float(v), float(max(sums[v]))) for v in vocabularies],
        "bound V²": [(float(v), float(v**2)) for v in vocabularies],
    }
    return Finding(
        (
            at_most("largest (μ + λ) / V²", share, 1.0),
            equals("models whose text repeats from there, and not before", exact, models * len(vocabularies)),
            reported("models whose text ends", ended),
        ),
        (Lines("When a greedy text begins to repeat", "vocabulary V", "tokens", curves, log_y=True),),
    )


def library_sentences(files: int) -> list[str]:
    """The first lines of the docstrings of some modules of Python's own standard library."""
    modules = (text for name, text in read_sources(stdlib()) if len(name.parts) == 1)
    return [line for text in islice(modules, files) for _, line in functions_of(text) if line]


def continues_otherwise(tokens: list[int]) -> bool:
    """Whether two tokens occur twice, and another token follows the second time."""
    follower: dict[tuple[int, int], int] = {}
    triples = zip(tokens, tokens[1:], tokens[2:], strict=False)
    return any(follower.setdefault((a, b), c) != c for a, b, c in triples)


def loop_table(checkpoint: Checkpoint, rows: list[list[int]], texts: list[list[int]], title: str) -> Table:
    """The loops with the longest periods."""
    loops = [(row, text, loop) for row, text in zip(rows, texts, strict=True) if (loop := find_repetition(text))]
    cells = [
        (checkpoint.decode(row), loop.prefix, loop.period, (len(text) - loop.prefix) // loop.period,
         checkpoint.decode(text[loop.prefix : loop.prefix + loop.period]))
        for row, text, loop in sorted(loops, key=lambda one: -one[2].period)[:6]
    ]  # fmt: skip
    return Table(title, ("prompt", "prefix", "period", "repeats", "text of the loop"), cells)


def trained_decoder(
    sentences: list[str], *, steps: int, seed: int, progress: OnProgress
) -> tuple[Checkpoint, Tensor, float]:
    """A transformer that was trained on sentences in a row; its tokens, and its last loss."""
    tokenizer = TokenizerSpec.from_config({"kind": "words", "vocab_size": 800, "lowercase": True}).make(sentences)
    ids = torch.tensor([i for text in sentences for i in tokenizer.encode(text + "\n", add_special_tokens=False).ids])
    model = small_model(vocab=tokenizer.get_vocab_size(), seed=seed, init="xavier", width=48, position="alibi",
                        attention={"kind": "heads", "heads": 4}, feedforward={"kind": "mlp", "hidden": 96},
                        embed={"kind": "tokens", "scale": True})  # fmt: skip

    def batch(_: int) -> Tensor:
        return ids[torch.randint(len(ids) - 33, (24, 1)) + torch.arange(33)]

    losses = fit(model, batch, partial(next_token_loss, first=2), steps=steps, lr=5e-3, progress=progress)
    return Checkpoint(model, tokenizer), ids, fmean(losses[-10:])


def load_prompts(model: str, sentences: list[str], count: int) -> tuple[Checkpoint, list[list[int]]]:
    """A checkpoint of the user's, and the first four words of some sentences as its input ids."""
    checkpoint = load(model)
    index = torch.randint(len(sentences), (count,)).tolist()
    return checkpoint, checkpoint.to_input_ids([" ".join(sentences[i].split()[:4]) for i in index])


@lab("temperature", rows=("K7",), errata=("E10",), seconds=(8.0, 60.0),
     smallest={"steps": 60, "prompts": 16, "tokens": 32, "files": 20},
     full={"steps": 1500, "prompts": 200, "tokens": 120}, counterexample={"coldest": 2.0},
     try_next=("--steps 800", "--tokens 200 --prompts 20"))  # fmt: skip
def transformer_loop(
    *,
    coldest: Annotated[float, "lowest temperature"] = 0.0,
    model: Annotated[str, "a checkpoint, folder or file, in place of a small transformer that is trained"] = "",
    steps: Annotated[int, "optimizer steps of the small transformer"] = 200,
    prompts: Annotated[int, "texts that are continued at each temperature"] = 40,
    tokens: Annotated[int, "tokens of each continuation"] = 80,
    files: Annotated[int, "modules of the standard library whose docstrings are the text"] = 90,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A transformer ends in a loop far more often at temperature 0 than at temperature 1.

    For a transformer this is only observed. It reads all tokens before the next one, so a repeated pair of tokens need
    not be continued in the same way, and in some texts it is not. With a window of C tokens there are V^C states, and
    the bound that they give is of no use. A loop is here what the end of a text repeats at least twice. A small model
    is trained on docstrings and continues four tokens of them; one that is trained longer loops less. With `--model`
    the lab loads a model of yours, such as a GGUF file, which continues the first four words of docstrings.
    """
    sentences, loss = library_sentences(files), None
    if model:
        checkpoint, rows = load_prompts(model, sentences, prompts)
    else:
        checkpoint, ids, loss = trained_decoder(sentences, steps=steps, seed=seed, progress=progress)
        rows = [ids[i : i + 4].tolist() for i in torch.randint(len(ids) - 4, (prompts,)).tolist()]
    settings: dict[str, Any] = {} if model else {"suppress_tokens": SPECIAL}
    temperatures, texts = sorted({coldest, 0.2, 0.4, 0.6, 1.0, 1.5}), dict[float, list[list[int]]]()
    for done, temperature in enumerate(temperatures):
        progress(f"temperature {temperature:g}", done, len(temperatures))
        texts[temperature] = checkpoint.generate(
            rows, temperature=temperature, max_new_tokens=tokens, seed=seed, **settings
        )
    shares = {t: sum(find_repetition(text) is not None for text in outputs) / prompts for t, outputs in texts.items()}
    differ = sum(continues_otherwise(row[-2:] + text) for row, text in zip(rows, texts[coldest], strict=True))
    digits = (max(map(len, rows)) + tokens) * math.log10(checkpoint.tokenizer.get_vocab_size())
    return Finding(
        (
            at_least(
                f"share of texts with a loop at temperature {coldest:g}, less that at 1",
                shares[coldest] - shares[1.0],
                0.3,
            ),
            at_most("share of texts with a loop at temperature 1", shares[1.0], 0.2),
            at_least(f"texts at {coldest:g} in which a repeated pair is continued in another way", differ, 1),
            reported("decimal digits of the bound V^C", math.floor(digits) + 1),
            *([] if loss is None else [reported("loss of the model, in nats per token", loss)]),
        ),
        (
            Lines("Share of texts that end in a loop", "temperature", "share", {"transformer": list(shares.items())}),
            loop_table(checkpoint, rows, texts[coldest], f"Loops at temperature {coldest:g}"),
        ),
        correction="The loop is guaranteed for an n-gram model, whose state is its last n − 1 tokens. A transformer "
        "reads the whole text: a repeated pair can be continued in another way, and loops are only observed.",
    )
