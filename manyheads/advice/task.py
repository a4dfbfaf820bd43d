"""What can be asked for, the shapes that learn it, and the data it is learned from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from manyheads.data.columns import Columns, by_name, columns_of, wanted_by
from manyheads.data.source import Corpus, DataSpec
from manyheads.data.tables import TableSpec
from manyheads.spec import SLOTS, SpecError, Tree, parse, quoted

WHOLE = "the whole source is read before the first word is written, and every word that is written looks at all of it"


@dataclass(frozen=True)
class Task:
    """What is asked for: the shapes that can learn it, the first of them advised, each with its objective."""

    about: str
    shapes: dict[str, str]
    why: str
    file: str | None  # the kind of data that a file is
    usual: Tree  # the data where there is no file
    long_first: bool = False


TASKS = {
    "translate": Task("a text into another", {"encoder–decoder": "seq2seq", "recurrent": "seq2seq"}, WHOLE, "pairs", {"kind": "dates"}),
    "summarise": Task(
        "a long text in a short one", {"encoder–decoder": "seq2seq", "recurrent": "seq2seq"}, WHOLE, "pairs",
        {"kind": "stdlib", "task": "summary"}, long_first=True,
    ),
    "classify": Task(
        "the class of a text", {"encoder": "classify", "decoder": "classify"},
        "nothing is written, so every word may look at every other, before and behind it", "labels", {"kind": "stdlib", "task": "classify"},
    ),
    "embed": Task(
        "a vector a text, by which a query finds its document", {"encoder": "contrastive"},
        "nothing is written, so every word may look at every other, before and behind it", "queries",
        {"kind": "stdlib", "task": "retrieval"},
    ),
    "lm": Task(
        "how a text goes on", {"decoder": "causal", "recurrent": "causal", "ngram": "causal", "encoder": "masked"},
        "each word is written from those before it, and nothing else is read", "text", {"kind": "stdlib", "task": "language"},
    ),
    "mae": Task(
        "a picture from a few of its patches", {"encoder–decoder": "patches"},
        "the encoder reads the patches that are shown, and a small decoder restores the rest", "pictures", {"kind": "digits"},
    ),
    "copy": Task("the same symbols again: the smallest task there is", {"encoder–decoder": "seq2seq", "recurrent": "seq2seq"}, WHOLE, None,
                 {"kind": "sequence", "task": "copy"}),
}  # fmt: skip
ALSO = {"summarize": "summarise", "sentiment": "classify", "retrieval": "embed", "language": "lm"}


def chosen_shape(name: str, said: str | None) -> str:
    shapes = TASKS[name].shapes
    shape = (said or next(iter(shapes))).replace("-", "–")
    if shape not in shapes:
        raise SpecError(f"--shape is {quoted(said)}, and {name} is learned by {' or '.join(shapes)}")
    return shape


@dataclass(frozen=True)
class Data:
    """The table [data], why its columns are those, and the samples themselves."""

    tree: Tree
    why: str
    corpus: Corpus


def data_of(name: str, file: Path | None, said: str | None) -> Data:
    task = TASKS[name]
    if file is None or task.file is None:
        if file is not None or said:
            raise SpecError(f"{name} makes its own data" if file is not None else "--fields are the columns of a file; name one")
        return Data(task.usual, "", SLOTS["data"].choose(task.usual).load())  # type: ignore[attr-defined]
    kind = cast(type[DataSpec], SLOTS["data"].kinds[task.file])
    found = Columns(None, "")
    if issubclass(kind, TableSpec):
        found = columns_of(file, kind, long_first=task.long_first) if said is None else said_columns(file, kind, said)
    elif said is not None:
        raise SpecError(f"--fields are columns, and {name} reads a file without them")
    tree: Tree = {"kind": task.file, "path": str(file)} | ({"fields": list(found.fields)} if found.fields else {})
    return Data(tree, found.why, loaded(tree))


def loaded(tree: Tree) -> Corpus:
    spec = parse(cast(type[DataSpec], SLOTS["data"].kinds[tree["kind"]]), {key: value for key, value in tree.items() if key != "kind"})
    return spec.load()


def said_columns(file: Path, kind: type[TableSpec], said: str) -> Columns:
    names, wanted = [name.strip() for name in said.split(",")], wanted_by(kind)
    if not len(wanted) <= len(names) <= len(kind.names) or not all(names):
        raise SpecError(f"--fields is {quoted(said)}, expected {len(wanted)} columns, separated by a comma: {' and '.join(wanted)}")
    return Columns(by_name(file, tuple(int(name) if name.isdecimal() else name for name in names)), "as was said")
