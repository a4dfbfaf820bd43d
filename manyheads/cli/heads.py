"""`manyheads heads`: which heads follow the relations of a .conllu file, or fixed patterns over the lines of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from manyheads.cli import console
from manyheads.errors import EmptyDataError, InputLengthError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from manyheads.checkpoint.checkpoint import Checkpoint
    from manyheads.inspect.dependencies import RelationHead
    from manyheads.inspect.measure import HeadPattern

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
    it. For a model with one stack and a tokenizer; rows that are too long for it are counted and left out.

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
        rows = Rows(checkpoint, (read_trees(file) if is_tree else read_lines(file))[:max_rows], progress)
        if is_tree:
            relations = find_relations(rows, MIN_COUNT if min_count is None else min_count)
        else:
            patterns = find_patterns(rows)
    if rows.too_long:
        console.print_note(f"{rows.too_long:,} of {len(rows.rows):,} rows are too long for the model, and left out")
    if is_tree:
        print_relations(relations, rows, as_json=as_json)
    else:
        print_patterns(patterns, rows, as_json=as_json)


def read_trees(file: Path) -> Sequence[Sequence[Any]]:
    """Sentences with their heads, relations and links of coreference."""
    from manyheads.data.conllu import CoreferenceSpec

    return CoreferenceSpec(path=str(file)).load_file(str(file)).validation


def read_lines(file: Path) -> list[tuple[str]]:
    from manyheads.cli.inputs import open_lines

    return [(line,) for _, line in open_lines(file, "strict") if line.strip()]


# ----------------------------------------------------------------------------------------------------------- relations


def find_relations(rows: Rows, min_count: int) -> list[RelationHead]:
    from manyheads.inspect.dependencies import check_reads_words, relation_heads, tree_links

    check_reads_words(rows.checkpoint)
    sentences = ((text, tree_links(arcs, relations) + list(links)) for _, (text, arcs, relations, links) in rows)
    return relation_heads(rows.checkpoint, sentences, min_count=min_count)


def print_relations(found: Sequence[RelationHead], rows: Rows, *, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        relations = [asdict(relation) | {"is_better": relation.is_better} for relation in found]
        console.print_json({"schema": 1} | rows.counts() | {"relations": relations})
        return
    table = console.new_table(["relation", "best head"], ["links", "accuracy", "best offset", "its accuracy", ""])
    for relation in found:
        table.add_row(
            relation.relation, f"{relation.attention}, head {relation.head}" if relation.attention else "none",
            f"{relation.count:,}", f"{relation.accuracy:.1%}",
            f"{relation.offset:+d}", f"{relation.offset_accuracy:.1%}", "better" if relation.is_better else "",
        )  # fmt: skip
    console.stdout().print(table)
    better = sum(relation.is_better for relation in found)
    console.stdout().print(f"In {better:,} of {len(found):,} relations the best head is better than the best offset.")


# ------------------------------------------------------------------------------------------------------------ patterns


def find_patterns(rows: Rows) -> list[HeadPattern]:
    from manyheads.inspect.measure import head_patterns

    if rows.checkpoint.has_source:
        raise UnsupportedError("patterns of heads are for a model with one stack; this one has two")
    found = head_patterns(rows.checkpoint, (ids for ids, _ in rows))
    if not found:
        raise EmptyDataError("no line was read by an attention")
    return found


def print_patterns(heads: Sequence[HeadPattern], rows: Rows, *, as_json: bool) -> None:
    from manyheads.inspect.measure import PATTERNS

    if as_json:
        measures = [{"attention": head.attention, "head": head.head} | head.measures for head in heads]
        console.print_json({"schema": 1} | rows.counts() | {"heads": measures})
        return
    table = console.new_table(["pattern", "weight on", "best head"], ["weight", "mean of all heads"])
    for name, pattern in PATTERNS.items():
        best = max(heads, key=lambda head: head.measures[name])
        mean = sum(head.measures[name] for head in heads) / len(heads)
        where = f"{best.attention}, head {best.head}"
        table.add_row(name, pattern.meaning, where, f"{best.measures[name]:.1%}", f"{mean:.1%}")
    console.stdout().print(table)
