"""The tables of the tour, computed with the library's own core, mask and relations."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from manyheads.data.attention_targets import targets_from_arcs
from manyheads.data.tokenizer import TokenizerSpec
from manyheads.labs.chapters.attention_matrices import ALIGNMENT
from manyheads.labs.chapters.attention_pointers import reached_positions, receptive_field, tree_pointers
from manyheads.labs.chapters.masks import PRINTED
from manyheads.labs.plain import attention_weights
from manyheads.parts.core import check_rows
from manyheads.spec import Tree

ORDER = ("the man chased the dog", "the dog chased the man")
PREFER = "I prefer the morning flight"
HEADS, RELATIONS = (1, -1, 4, 4, 1), ("nsubj", "root", "det", "nmod", "dobj")
PARSES = (  # title, toward, relation
    ("each word to its head", "head", None),
    ("only “prefer” has a direct object", "dependents", "dobj"),
)


def attend(scores: Tensor, *, causal: bool = False) -> Tensor:
    """The weights for given scores: the queries are the scores, and the keys are unit vectors."""
    return attention_weights(scores, torch.eye(scores.shape[1]), causal=causal)


def table(title: str, rows: str, columns: str, values: Tensor, *, mark: bool = False) -> Tree:
    """A small matrix with the sums of its rows; `mark` marks the highest of each row."""
    return {
        "title": title,
        "rows": rows.split(),
        "columns": columns.split(),
        "values": values.tolist(),
        "sums": values.sum(dim=-1).tolist(),
        "marked": values.argmax(dim=-1).tolist() if mark else None,
    }


def order_tables() -> list[Tree]:
    """Self-attention without positions, on one random vector per word."""
    words = sorted(set(ORDER[0].split()))
    vectors = torch.randn(len(words), 4, generator=torch.Generator().manual_seed(3))

    def weights(text: str) -> Tensor:
        x = vectors[[words.index(word) for word in text.split()]]
        return attend(x @ x.T / 2)

    return [table("without positions and mask", text, text, weights(text)) for text in ORDER]


def big_tables() -> list[Tree]:
    vectors = torch.randn(2, 4, generator=torch.Generator().manual_seed(5))
    x, words = vectors[[0, 1, 0]], "big dog big"
    return [
        table("without a mask: equal weights", words, words, attend(x @ x.T / 2)),
        table("causal: the later “big” gets 0", words, words, attend(x @ x.T / 2, causal=True)),
    ]


def mask_tables() -> list[Tree]:
    """Masks before and after the softmax. The scores are the logarithms of the printed weights."""
    printed, words = torch.tensor(PRINTED), "1 2 3"
    return [
        table("no mask", words, words, attend(printed.log())),
        table("wrong: set to 0 after the softmax", words, words, attend(printed.log()).tril()),
        table("right: masked before the softmax", words, words, attend(printed.log(), causal=True)),
    ]


def alignment_tables() -> list[Tree]:
    weights = attend(torch.tensor(ALIGNMENT).log())
    check_rows(weights)
    return [
        table("each target word, and where it looks", "kediler fareleri kovalar", "cats chase mice", weights, mark=True)
    ]


def cross_tables() -> list[Tree]:
    scores = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    return [table("2 × 3: a row per target word", "drive safe", "conduis prudemment toi", attend(scores))]


def relation_tables() -> list[Tree]:
    tokenizer = TokenizerSpec.from_config("words").make([PREFER])
    tables = []
    for title, toward, relation in PARSES:
        (links,) = targets_from_arcs([PREFER], [HEADS], [RELATIONS], tokenizer, toward=toward, relation=relation)
        matrix = torch.zeros(5, 5)
        matrix[tuple(torch.from_numpy(links).T)] = 1.0
        tables.append(table(title, PREFER, PREFER, matrix) | ({} if relation is None else {"sums": None}))
    return tables


def pointer_tables() -> list[Tree]:
    """The receptive fields of models whose head h of layer l attends h·(k + 1)ˡ tokens back."""
    sizes = torch.tensor([[pointer_size(k, n) for n in (1, 2)] for k in (1, 2, 3)], dtype=torch.float)
    return [table("measured tokens that change the output", "k=1 k=2 k=3", "n=1 n=2", sizes) | {"sums": None}]


@cache
def pointer_size(heads: int, layers: int) -> int:
    pointers, length = tree_pointers(heads, layers), (heads + 1) ** layers + 2  # two more than they can reach
    with torch.random.fork_rng():
        positions = receptive_field(pointers, length)
    assert positions == reached_positions(pointers, length - 1)[-1]
    return len(positions)
