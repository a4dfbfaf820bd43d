"""`manyheads heads`: which heads follow the relations of a .conllu file, or fixed patterns over the lines of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from manyheads.cli import console
from manyheads.errors import EmptyDataError, InputLengthError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from manyheads.checkpoint.checkpoint import Checkpoint
    from manyheads.spec import Tree

MIN_COUNT = 10


def check_file(file: Path) -> Path:
    from manyheads.data.records import has_suffix

    console.check_exists(file)
    if not has_suffix(file, ".conllu", ".txt"):
        raise UsageError(f"{file} is neither a .conllu nor a .txt file, which may be gzipped")
    return file


class Rows:
    """The rows of a file that the model can read whole, counted, with progress."""

    def __init__(self, checkpoint: Checkpoint, rows: Sequence[Sequence[Any]], progress: console.Progress) -> None:
        self.checkpoint, self.rows, self.progress, self.too_long = checkpoint, rows, progress, 0

    def __iter__(self) -> Iterator[tuple[list[int], Sequence[Any]]]:
        for number, row in enumerate(self.rows):
            self.progress.update("row", number + 1, len(self.rows))
            try:
                yield self.checkpoint.encode([row[0]])[0].ids, row
            except InputLengthError:
                self.too_long += 1

    def counts(self) -> dict[str, int]:
        return {"rows": len(self.rows), "too_long": self.too_long}


@console.app.command()
def heads(
    path: console.CheckpointPath,
    file: Annotated[Path, console.argument("FILE", "A .conllu or .txt file.", callback=check_file)],
    min_count: Annotated[
        int | None, console.integer_option(f"Links of a relation that is shown [default: {MIN_COUNT}].")
    ] = None,
    max_rows: Annotated[int | None, console.integer_option("Read only the first N sentences or lines.")] = None,
    device: console.Device = "auto",
    parts: console.Parts = None,
    as_json: console.AsJson = False,
) -> None:
    """Find the heads that follow grammatical relations or fixed patterns.

    Of a .conllu file (dependency trees, universaldependencies.org): for each relation, in both directions, the head
    whose highest weight is most often the linked word, beside the best fixed offset in words, which needs no model. If
    the file has coreference (Entity=, as in CorefUD), coref links a mention to the one before it in the sentence. Of a
    .txt file, one text per line: for each fixed pattern, such as the previous token, the head with the most weight on
    it. For an encoder or a decoder with a tokenizer; rows that are too long for it are counted and left out.

    Examples: manyheads heads ./bert en_ewt-dev.conllu · manyheads heads ./gpt2 novel.txt --max-rows 200
    """
    from manyheads.data.records import has_suffix

    is_tree = has_suffix(file, ".conllu")
    if min_count is not None and not is_tree:
        raise UsageError("--min-count is for a .conllu file")
    for option, number in (("--min-count", min_count), ("--max-rows", max_rows)):
        if number is not None and number < 1:
            raise UsageError(f"{option} is {number}, expected 1 or more")
    with console.Progress(f"loading {path}") as progress:
        checkpoint = console.load_checkpoint(path, device)
        if is_tree:
            rows = Rows(checkpoint, read_trees(file)[:max_rows], progress)
            tree, *texts = find_relations(rows, min_count or MIN_COUNT)
        else:
            rows = Rows(checkpoint, read_lines(file)[:max_rows], progress)
            tree, *texts = find_patterns(rows)
    if rows.too_long:
        console.print_note(f"{rows.too_long:,} of {len(rows.rows):,} rows are too long for the model, and left out")
    if as_json:
        console.print_json({"schema": 1} | rows.counts() | tree)
    else:
        console.stdout().print(*texts, sep="\n")


def read_trees(file: Path) -> Sequence[Sequence[Any]]:
    """Sentences with their heads, relations and links of coreference."""
    from manyheads.data.conllu import CoreferenceSpec

    return CoreferenceSpec(path=str(file)).load_file(str(file)).validation


def read_lines(file: Path) -> list[tuple[str]]:
    from manyheads.cli.inputs import open_lines

    return [(line,) for _, line in open_lines(file, "strict") if line.strip()]


def find_relations(rows: Rows, min_count: int) -> tuple[Tree, Table, str]:
    """The best head of each relation as plain data, as a table, and a summary."""
    from dataclasses import asdict

    from manyheads.inspect.dependencies import check_reads_words, relation_heads, tree_links

    check_reads_words(rows.checkpoint)
    sentences = ((text, tree_links(arcs, relations) + list(links)) for _, (text, arcs, relations, links) in rows)
    best_heads = relation_heads(rows.checkpoint, sentences, min_count=min_count)
    table = console.new_table(["relation", "best head"], ["links", "accuracy", "best offset", "its accuracy", ""])
    for relation in best_heads:
        table.add_row(
            relation.relation, f"{relation.attention}, head {relation.head}" if relation.attention else "none",
            f"{relation.count:,}", f"{relation.accuracy:.1%}",
            f"{relation.offset:+d}", f"{relation.offset_accuracy:.1%}", "better" if relation.is_better else "",
        )  # fmt: skip
    better = sum(relation.is_better for relation in best_heads)
    summary = f"In {better:,} of {len(best_heads):,} relations the best head is better than the best offset."
    return (
        {"relations": [asdict(relation) | {"is_better": relation.is_better} for relation in best_heads]},
        table,
        summary,
    )


def find_patterns(rows: Rows) -> tuple[Tree, Table]:
    """The patterns of every head as plain data, and the best head of each pattern as a table."""
    from manyheads.inspect.measure import PATTERNS, head_patterns

    if rows.checkpoint.has_source:
        raise UnsupportedError("this needs an encoder or a decoder alone; this model is an encoder-decoder")
    heads = head_patterns(rows.checkpoint, (ids for ids, _ in rows))
    if not heads:
        raise EmptyDataError("no line of the file fits the model, so no head was measured")
    table = console.new_table(["pattern", "weight on", "best head"], ["weight", "mean of all heads"])
    for name, pattern in PATTERNS.items():
        best = max(heads, key=lambda head: head.measures[name])
        mean = sum(head.measures[name] for head in heads) / len(heads)
        where = f"{best.attention}, head {best.head}"
        table.add_row(name, pattern.meaning, where, f"{best.measures[name]:.1%}", f"{mean:.1%}")
    return {"heads": [{"attention": head.attention, "head": head.head} | head.measures for head in heads]}, table
