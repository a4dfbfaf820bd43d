"""Rows as ids: made once and kept in files that are mapped, or held in memory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from manyheads.data.source import Corpus, DataError, DataSpec, Made, Row
from manyheads.data.tokens import TokenizerFileSpec, TokenizerSpec
from manyheads.spec import Tree, field, quoted, to_tree

SCHEMA = 1
SHARD = 1 << 28  # tokens in a file, and a row more
AT_ONCE = 1024  # rows encoded at a time
LARGEST_INDEX = 16 << 20
NO_IDS = {"picture": "pictures", "arcs": "arcs", "alignment": "alignments"}  # of an alignment a tokenizer may know no number


def fingerprint(tokenizer: Tokenizer) -> str:
    """The hash of all that a tokenizer does."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def bare(tokenizer: Tokenizer) -> Tokenizer:
    """What a tokenizer makes of a text's own, of which rows are made: nothing stands around it, and nothing is cut away."""
    found = Tokenizer.from_str(tokenizer.to_str())
    found.no_padding()
    found.no_truncation()
    found.post_processor = None
    return found


def encoded(rows: Sequence[Row], tokenizer: Tokenizer | None, fields: Sequence[str], labels: Sequence[str]) -> Iterator[list[NDArray[Any]]]:
    """Each row as an array a field: of ids, of the number of its class, of the places of heads, or of names; a picture as it is."""
    if tokenizer is not None:
        tokenizer.encode_special_tokens = True  # a text that says </s> remains a text; no file keeps this
    number = {label: i for i, label in enumerate(labels)}
    for start in range(0, len(rows), AT_ONCE):
        columns = []
        for name, column in zip(fields, zip(*rows[start : start + AT_ONCE], strict=True), strict=True):
            if name == "picture":
                columns.append(list(column))
            elif name == "label":
                if unknown := [label for label in column if label not in number]:
                    raise DataError(f"the label {quoted(unknown[0])} is none of the {len(number)} classes")
                columns.append([np.array([number[label]], np.int64) for label in column])
            elif name == "arcs":
                columns.append([np.array(heads, np.int64) for heads in column])
            elif name == "relations":
                columns.append([np.array(names, np.str_) for names in column])
            else:
                assert tokenizer is not None
                found = tokenizer.encode_batch_fast(list(column), add_special_tokens=False)
                columns.append([np.array(one.ids, np.int64) for one in found])
        yield from map(list, zip(*columns, strict=True))


class Ids(Protocol):
    """Rows as ids, wherever they are."""

    @property
    def fields(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[NDArray[Any], ...]: ...
    def lengths(self, name: str) -> NDArray[np.int64]: ...


class Encoded:
    """Rows as ids in memory: what `Rows` is for files. Where no field is a text, no tokenizer is needed."""

    def __init__(self, rows: Sequence[Row], tokenizer: Tokenizer | None, fields: Sequence[str], labels: Sequence[str] = ()) -> None:
        self.fields, self.labels = tuple(fields), tuple(labels)
        self.rows = [tuple(row) for row in encoded(rows, tokenizer, fields, labels)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[NDArray[Any], ...]:
        return self.rows[index]

    def lengths(self, name: str) -> NDArray[np.int64]:
        place = place_of(name, self.fields)
        return np.array([len(row[place]) for row in self.rows], np.int64)


class Cut:
    """Rows of which no field is longer than it may be."""

    def __init__(self, rows: Ids, longest: Mapping[str, int]) -> None:
        self.rows, self.fields = rows, rows.fields
        self.most = [longest.get(name) for name in rows.fields]
        longer = [rows.lengths(name) > most for name, most in longest.items()]
        self.count = int(np.logical_or.reduce(longer).sum()) if longer else 0  # of those that were

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[NDArray[Any], ...]:
        return tuple(ids[:most] for ids, most in zip(self.rows[index], self.most, strict=True))

    def lengths(self, name: str) -> NDArray[np.int64]:
        found, most = self.rows.lengths(name), self.most[place_of(name, self.fields)]
        return found if most is None else np.minimum(found, most)


def place_of(name: str, fields: tuple[str, ...]) -> int:
    if name not in fields:
        raise DataError(f"no field {quoted(name)} here (known: {', '.join(fields)})")
    return fields.index(name)


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    made: TokenizerSpec | None = None,
    tell: Callable[[str, int, int], None] = lambda split, done, rows: None,
) -> Path:
    """Writes every split as ids; the folder appears under its name when it is whole, never before.

    `made` is how the tokenizer came about, so that a run that says the same may use it. `tell` hears how many rows of a split are done.
    """
    folder = Path(folder)
    if folder.exists():
        raise DataError(f"{folder} is there already: remove it or name another")
    if found := [said for name, said in NO_IDS.items() if name in corpus.fields]:
        raise DataError(f"{found[0]} have no ids to prepare; they are used as they are")
    if corpus.pool:
        raise DataError("documents in a file of their own are not prepared: a query would be looked for among fewer; use them as they are")
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    draft.mkdir(parents=True)
    try:
        vocab, labels = tokenizer.get_vocab_size(), corpus.labels()
        dtype = "uint16" if max(vocab, len(labels)) <= 1 << 16 else "uint32"
        splits = {}
        for name, rows in corpus.splits.items():
            (draft / name).mkdir()
            ids = told(encoded(rows, tokenizer, corpus.fields, labels), partial(tell, name), len(rows))
            splits[name] = _write(draft / name, ids, np.dtype(dtype).newbyteorder("<"))
        (draft / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        index = {"schema": SCHEMA, "about": corpus.about, "fields": corpus.fields, "labels": labels, "dtype": dtype, "vocab": vocab}
        index |= {"tokenizer": fingerprint(bare(tokenizer)), "made": to_tree(made) if made else None, "splits": splits}
        (draft / "index.json").write_text(json.dumps(index, indent=1, ensure_ascii=False), encoding="utf-8")
        for path in (*draft.rglob("*"), draft):
            flushed(path)
        draft.rename(folder)
        flushed(folder.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return folder


def told(rows: Iterator[list[NDArray[Any]]], tell: Callable[[int, int], None], count: int) -> Iterator[list[NDArray[Any]]]:
    tell(0, count)
    for done, row in enumerate(rows, 1):
        yield row
        if done % AT_ONCE == 0 or done == count:
            tell(done, count)


def flushed(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(folder: Path, rows: Iterator[list[NDArray[Any]]], dtype: np.dtype[Any]) -> Tree:
    """One split: the ids of all rows, field after field, and in docs.idx where each ends."""
    shards: list[Tree] = []
    count = total = 0
    row = next(rows, None)
    with (folder / "docs.idx").open("wb") as index:
        index.write(np.zeros(1, "<u8").tobytes())
        while row is not None:
            tokens = 0
            with (folder / shard(len(shards))).open("wb") as file:
                while row is not None and tokens < SHARD:
                    ends = total + np.cumsum([len(ids) for ids in row])
                    file.write(np.concatenate(row).astype(dtype).tobytes())
                    index.write(ends.astype("<u8").tobytes())
                    tokens, total, count = tokens + int(ends[-1]) - total, int(ends[-1]), count + 1
                    row = next(rows, None)
            shards.append({"tokens": tokens, "sha256": sha256(folder / shard(len(shards)))})
    return {"rows": count, "tokens": total, "docs": sha256(folder / "docs.idx"), "shards": shards}


def shard(number: int) -> str:
    return f"shard-{number:05d}.bin"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Rows:
    """The rows of one split of a prepared folder, mapped when first used by each process; nothing is read that is not asked for.

    Sizes are always checked, hashes where `check` says so, and the tokenizer where one is given. `only` names the fields that are
    wanted, in that order, and `labels` the classes in the order by which they are numbered, where it is not that of the files.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str = "train",
        *,
        tokenizer: Tokenizer | None = None,
        check: bool = True,
        only: Sequence[str] | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        self.folder = Path(folder) / split
        index = read_index(Path(folder))
        try:
            found = index["splits"][split]
            self.stored, self.labels = tuple(index["fields"]), tuple(index["labels"])
            self.dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[index["dtype"]])
            self.count, self.vocab = int(found["rows"]), int(index["vocab"])
            self.tokens = [int(one["tokens"]) for one in found["shards"]]
            expected = {"docs.idx": (8 * (self.count * len(self.stored) + 1), found["docs"])}
            expected |= {shard(i): (one["tokens"] * self.dtype.itemsize, one["sha256"]) for i, one in enumerate(found["shards"])}
            if tokenizer is not None and fingerprint(bare(tokenizer)) != index["tokenizer"]:
                raise DataError(f"{folder} was prepared with another tokenizer, of {self.vocab:,} tokens: prepare it again, or use its own")
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{folder}/index.json is no index of prepared data with a split {quoted(split)}: {error!r}") from None
        for name, (size, known) in expected.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != size:
                there = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is not there"
                raise DataError(f"{path} {there}, expected {size:,} bytes: prepare the data again")
            if check and sha256(path) != known:
                raise DataError(f"{path} has changed since it was written: prepare the data again")
        self.numbers = np.array([labels.index(name) for name in self.labels] if labels else range(len(self.labels)), np.int64)
        self.labels = tuple(labels) or self.labels
        self.fields = tuple(only or self.stored)
        self.places = [place_of(name, self.stored) for name in self.fields]
        self._open: tuple[NDArray[np.uint64], list[NDArray[Any]], NDArray[np.int64]] | None = None

    def __getstate__(self) -> Tree:
        return self.__dict__ | {"_open": None}

    def _maps(self) -> tuple[NDArray[np.uint64], list[NDArray[Any]], NDArray[np.int64]]:
        """Where everything ends, the shards, and where each of them starts."""
        if self._open is None:
            shards = [
                np.memmap(self.folder / shard(i), self.dtype, "r") if n else np.empty(0, self.dtype) for i, n in enumerate(self.tokens)
            ]
            starts = np.cumsum([0, *self.tokens], dtype=np.int64)
            self._open = np.memmap(self.folder / "docs.idx", "<u8", "r"), shards, starts
        return self._open

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], ...]:
        ends, shards, starts = self._maps()
        first = range(self.count)[index] * len(self.stored)
        places = ends[first : first + len(self.stored) + 1].astype(np.int64)
        number = min(int(np.searchsorted(starts, places[0], "right")) - 1, len(shards) - 1)
        ids = shards[number][places[0] - starts[number] : places[-1] - starts[number]].astype(np.int64)
        columns = np.split(ids, places[1:-1] - places[0])
        return tuple(
            self.numbers[columns[place]] if name == "label" else columns[place]
            for name, place in zip(self.fields, self.places, strict=True)
        )

    def lengths(self, name: str) -> NDArray[np.int64]:
        ends = self._maps()[0].astype(np.int64)
        return (ends[1:] - ends[:-1])[place_of(name, self.stored) :: len(self.stored)]


def read_index(folder: Path) -> Tree:
    """What a prepared folder says of itself."""
    path = folder / "index.json"
    try:
        if path.stat().st_size > LARGEST_INDEX:
            raise DataError(f"{path} has more than {LARGEST_INDEX:,} bytes; no index needs that")
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(index, dict) or index.get("schema") != SCHEMA:
        raise DataError(f"{path} is no index of prepared data that this version reads (schema {SCHEMA})")
    return index


@dataclass(frozen=True)
class Decoded(Corpus):
    """Rows that were texts, and the classes that are known without reading them."""

    known: tuple[str, ...] = ()

    def labels(self) -> tuple[str, ...]:
        return self.known


class PreparedSpec(DataSpec, kind="prepared"):
    """Rows as ids, in the folder that `manyheads data prepare` wrote: hashed when opened, then mapped

    Its tokenizer is the one they were made with.
    """

    path: str = field(..., "the folder", min_length=1)

    @property
    def prepared(self) -> Path:
        return Path(self.path)

    def load(self) -> Corpus:
        """The rows as texts, each decoded when it is asked for."""
        tokenizer = tokenizer_of(self.prepared).make(())
        found = [Rows(self.path, split, tokenizer=tokenizer, check=False) for split in ("train", "validation", "test")]
        train, validation, test = (Made(partial(decoded, rows, tokenizer), len(rows)) for rows in found)
        return Decoded(found[0].fields, train, validation, test, str(read_index(self.prepared).get("about")), known=found[0].labels)


def tokenizer_of(folder: Path) -> TokenizerSpec:
    """The tokenizer of a prepared folder."""
    return TokenizerFileSpec(path=str(folder / "tokenizer.json"))


def tokenizer_for(folder: Path, said: TokenizerSpec) -> TokenizerSpec:
    """The folder's own, if it was made as is said; otherwise what is said, whose hash will then be compared."""
    return tokenizer_of(folder) if read_index(folder).get("made") == to_tree(said) else said


def decoded(rows: Rows, tokenizer: Tokenizer, index: int) -> Row:
    return tuple(
        rows.labels[int(ids[0])] if name == "label" else tokenizer.decode(ids.tolist())
        for name, ids in zip(rows.fields, rows[index], strict=True)
    )
