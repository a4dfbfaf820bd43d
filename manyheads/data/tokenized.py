"""Rows as token ids: in memory, or tokenized once on disk and read from there."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from manyheads.data.source import Corpus, DataSpec, LazyRows, Row
from manyheads.data.tokenizer import TokenizerFileSpec, TokenizerSpec, special_tokens_as_text, without_processing
from manyheads.errors import ColumnError, CorruptFileError, LabelError, TokenizedDataError
from manyheads.files.read import open_regular, read_json, sha256
from manyheads.files.tokenizer import decode_ids, encode_texts
from manyheads.files.write import atomic_output, fsync_path
from manyheads.spec import Tree, field, quote, to_tree

SCHEMA = 1
SHARD_TOKENS = 1 << 28  # tokens per file, exceeded by at most one row
ENCODE_ROWS = 1024  # rows per call of the tokenizer
MAX_INDEX_BYTES = 16 << 20
ROWS_PER_HASH_CALL = 4096  # one call per row would take longer than hashing its ids
# fields without token ids; a tokenizer may not know the digits of an alignment
NOT_TOKENIZED = ("image", "arcs", "alignment")


def fingerprint(tokenizer: Tokenizer) -> str:
    """Hashes everything that a tokenizer.json holds."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def encode_rows(
    rows: Sequence[Row],
    tokenizer: Tokenizer | None,
    fields: Sequence[str],
    labels: Sequence[str],
    *,
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> Iterator[list[NDArray[Any]]]:
    """Yields rows as one array per field: token ids, a class index, positions of heads, relation names, or an image."""
    if tokenizer is not None:
        tokenizer = special_tokens_as_text(tokenizer)
    class_index = {label: i for i, label in enumerate(labels)}
    for start in range(0, len(rows), ENCODE_ROWS):
        progress(start, len(rows))
        columns = []
        for name, column in zip(fields, zip(*rows[start : start + ENCODE_ROWS], strict=True), strict=True):
            if name == "image":
                columns.append(list(column))
            elif name == "label":
                if unknown := [label for label in column if label not in class_index]:
                    raise LabelError(f"the label {quote(unknown[0])} is not one of the {len(class_index)} classes")
                columns.append([np.array([class_index[label]], np.int64) for label in column])
            elif name == "arcs":
                columns.append([np.array(heads, np.int64) for heads in column])
            elif name == "relations":
                columns.append([np.array(names, np.str_) for names in column])
            else:
                assert tokenizer is not None
                encodings = encode_texts(tokenizer, column, add_special_tokens=False, offsets=False)
                columns.append([np.array(encoding.ids, np.int64) for encoding in encodings])
        yield from map(list, zip(*columns, strict=True))
    progress(len(rows), len(rows))


def hash_arrays(header: str, arrays: Iterable[NDArray[Any]] = ()) -> str:
    digest, remaining = hashlib.sha256(header.encode()), iter(arrays)
    while chunks := [array.tobytes() for array in islice(remaining, ROWS_PER_HASH_CALL)]:
        digest.update(b"".join(chunks))
    return digest.hexdigest()[:16]


class InMemoryDataset:
    """Rows as ids in memory. Without a text field, no tokenizer is needed."""

    def __init__(
        self, rows: Sequence[Row], tokenizer: Tokenizer | None, fields: Sequence[str], labels: Sequence[str] = ()
    ) -> None:
        self.fields, self.labels = tuple(fields), tuple(labels)
        self.rows = [tuple(row) for row in encode_rows(rows, tokenizer, fields, labels)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[NDArray[Any], ...]:
        return self.rows[index]

    def check(self) -> None:
        """Rows in memory do not change."""

    def lengths(self, name: str) -> NDArray[np.int64]:
        index = field_index(name, self.fields)
        return np.array([len(row[index]) for row in self.rows], np.int64)

    def content_hash(self) -> str:
        """Hashes every id."""
        lengths = (self.lengths(name) for name in self.fields)
        return hash_arrays(json.dumps([len(self), self.fields]), chain(lengths, chain.from_iterable(self.rows)))


class TruncatedDataset:
    """Rows truncated to a maximum length per field; `num_truncated` of them were longer."""

    def __init__(self, dataset: TokenizedDataset, max_lengths: Mapping[str, int]) -> None:
        self.dataset = dataset
        self.fields: tuple[str, ...] = dataset.fields
        self.max_lengths = [max_lengths.get(name) for name in dataset.fields]
        longer = [dataset.lengths(name) > max_length for name, max_length in max_lengths.items()]
        self.num_truncated = int(np.logical_or.reduce(longer).sum()) if longer else 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[NDArray[Any], ...]:
        return tuple(ids[:max_length] for ids, max_length in zip(self.dataset[index], self.max_lengths, strict=True))

    def check(self) -> None:
        self.dataset.check()

    def lengths(self, name: str) -> NDArray[np.int64]:
        lengths, max_length = self.dataset.lengths(name), self.max_lengths[field_index(name, self.fields)]
        return lengths if max_length is None else np.minimum(lengths, max_length)

    def content_hash(self) -> str:
        return hash_arrays(json.dumps([self.max_lengths, self.dataset.content_hash()]))


def field_index(name: str, fields: tuple[str, ...]) -> int:
    if name not in fields:
        raise ColumnError(f"no field {quote(name)} (known: {', '.join(fields)})")
    return fields.index(name)


def write_tokenized(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    tokenizer_spec: TokenizerSpec | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[str, int, int], None] = lambda split, done, count: None,
) -> Path:
    """Writes every split as ids; the folder appears when it is complete.

    `tokenizer_spec` is the spec of the tokenizer; a run with the same spec uses it without training it again.
    """
    folder = Path(folder)
    if names := [name for name in NOT_TOKENIZED if name in corpus.fields]:
        raise TokenizedDataError(f"the field {names[0]} is not tokenized", hint="train on this data as it is")
    if corpus.candidates:
        raise TokenizedDataError(
            "data with a documents file cannot be tokenized once: queries would be evaluated against fewer documents",
            hint="train on this data as it is",
        )
    vocab, labels = tokenizer.get_vocab_size(), corpus.labels()
    dtype = "uint16" if max(vocab, len(labels)) <= 1 << 16 else "uint32"
    index: Tree = {
        "schema": SCHEMA,
        "description": corpus.description,
        "fields": corpus.fields,
        "labels": labels,
        "dtype": dtype,
        "vocab": vocab,
        "tokenizer": fingerprint(without_processing(tokenizer)),
        "tokenizer_spec": to_tree(tokenizer_spec) if tokenizer_spec else None,
        "splits": {},
    }
    with atomic_output(folder) as temporary:
        temporary.mkdir()
        for split, rows in corpus.splits.items():
            (temporary / split).mkdir()
            ids = encode_rows(rows, tokenizer, corpus.fields, labels, progress=partial(progress, split))
            index["splits"][split] = _write_split(
                temporary / split, ids, dtype=np.dtype(dtype).newbyteorder("<"), shard_tokens=shard_tokens
            )
        (temporary / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        (temporary / "index.json").write_text(json.dumps(index, indent=1, ensure_ascii=False), encoding="utf-8")
        for path in (*temporary.rglob("*"), temporary):
            fsync_path(path)
    fsync_path(folder.parent)
    return folder


def _write_split(folder: Path, rows: Iterator[list[NDArray[Any]]], *, dtype: np.dtype[Any], shard_tokens: int) -> Tree:
    """Writes shards with the ids of all rows, field after field, and docs.idx with the end of each field."""
    shards: list[Tree] = []
    count = total = 0
    row = next(rows, None)
    with (folder / "docs.idx").open("wb") as index:
        index.write(np.zeros(1, "<u8").tobytes())
        while row is not None:
            tokens, path = 0, folder / shard_name(len(shards))
            with path.open("wb") as file:
                while row is not None and tokens < shard_tokens:
                    ends = total + np.cumsum([len(ids) for ids in row])
                    file.write(np.concatenate(row).astype(dtype).tobytes())
                    index.write(ends.astype("<u8").tobytes())
                    tokens, total, count = tokens + int(ends[-1]) - total, int(ends[-1]), count + 1
                    row = next(rows, None)
            shards.append({"tokens": tokens, "sha256": sha256(path)})
    return {"rows": count, "tokens": total, "docs": sha256(folder / "docs.idx"), "shards": shards}


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"


class TokenizedFile:
    """A file of a tokenized folder, which is read rather than mapped: under a map, a truncation would kill the process.

    Its size is always checked, its hash if `verify`, or if the file was written since the last check.
    """

    def __init__(self, path: Path, size: int, digest: str, *, verify: bool) -> None:
        self.path, self.size, self.digest = path, size, digest
        self.stamp = None if verify else self._stamp()
        self.check()

    def __getstate__(self) -> Tree:
        return {name: value for name, value in self.__dict__.items() if name != "_file"}

    @cached_property
    def _file(self) -> BufferedReader:
        """The file as it was when it was first read in this process, even if its name is of another file later."""
        file = open_regular(self.path)
        weakref.finalize(self, file.close)
        return file

    def _stamp(self) -> tuple[int, int, int] | None:
        """The size and the times of changes, or None if there is no such file."""
        try:
            status = os.fstat(self._file.fileno()) if "_file" in self.__dict__ else os.stat(self.path)
        except OSError:
            return None
        return (status.st_size, status.st_mtime_ns, status.st_ctime_ns) if stat.S_ISREG(status.st_mode) else None

    def check(self) -> None:
        """Raises if the file is not the one that was written."""
        stamp = self._stamp()
        if stamp is None or stamp[0] != self.size or (stamp != self.stamp and self._hash() != self.digest):
            raise self.changed_error()
        self.stamp = stamp

    def _hash(self) -> str:
        with explain_changes(self):
            self._file.seek(0)
            return hashlib.file_digest(self._file, "sha256").hexdigest()

    def read(self, dtype: np.dtype[Any] | str, start: int, stop: int) -> NDArray[Any]:
        """Reads the items from `start` to `stop`."""
        item = np.dtype(dtype).itemsize
        with explain_changes(self):
            data = read_at(self._file.fileno(), max(0, stop - start) * item, start * item) if start >= 0 else b""
        if len(data) != (stop - start) * item:
            raise self.changed_error()
        return np.frombuffer(data, dtype)

    def changed_error(self) -> TokenizedDataError:
        return TokenizedDataError(
            f"{self.path} is missing or has changed since it was written, with {self.size:,} bytes",
            hint="prepare the data again",
        )


def read_at(handle: int, size: int, offset: int) -> bytes:
    """Reads `size` bytes, or those up to the end of the file; one call of pread reads at most 2 GiB."""
    parts = []
    while size and (part := os.pread(handle, size, offset)):
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def explain_changes(file: TokenizedFile) -> Iterator[None]:
    try:
        yield
    except (OSError, OverflowError):
        raise file.changed_error() from None


class OnDiskDataset:
    """The rows of one split of a tokenized folder, whose files are opened on first use in each process.

    `verify` checks their hashes, a given tokenizer must be theirs. `fields` selects and orders the fields; `labels` are
    the classes in the order of their indices, if it is not the order in the folder.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str = "train",
        *,
        tokenizer: Tokenizer | None = None,
        verify: bool = True,
        fields: Sequence[str] | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        self.folder, index = Path(folder) / split, read_index(Path(folder))
        try:
            entry = index["splits"][split]
            self.stored_fields, stored_labels = tuple(index["fields"]), tuple(index["labels"])
            self.dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[index["dtype"]])
            self.count, self.vocab = int(entry["rows"]), int(index["vocab"])
            shard_tokens = [int(shard["tokens"]) for shard in entry["shards"]]
            expected = {"docs.idx": (8 * (self.count * len(self.stored_fields) + 1), entry["docs"])}
            for i, shard in enumerate(entry["shards"]):
                expected[shard_name(i)] = shard_tokens[i] * self.dtype.itemsize, shard["sha256"]
            stored_tokenizer = index["tokenizer"]
        except (KeyError, TypeError, ValueError) as error:
            raise TokenizedDataError(
                f"{folder}/index.json is not an index of tokenized data with a split {quote(split)}: {error!r}"
            ) from None
        if tokenizer is not None and fingerprint(without_processing(tokenizer)) != stored_tokenizer:
            raise TokenizedDataError(
                f"{folder} was tokenized with another tokenizer, of {self.vocab:,} tokens",
                hint="prepare the data again, or leave [tokenizer] out to use its own",
            )
        # the end of every field of every row, the ids, and the first token of each shard
        self.ends, *self.shards = (
            TokenizedFile(self.folder / name, size, digest, verify=verify) for name, (size, digest) in expected.items()
        )
        self.starts = np.cumsum([0, *shard_tokens], dtype=np.int64)
        self.labels = tuple(labels) or stored_labels
        self.class_index = np.array([self.labels.index(name) for name in stored_labels], np.int64)
        self.fields = tuple(fields or self.stored_fields)
        self.field_indices = [field_index(name, self.stored_fields) for name in self.fields]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], ...]:
        first = range(self.count)[index] * len(self.stored_fields)
        bounds = self.ends.read("<u8", first, first + len(self.stored_fields) + 1).astype(np.int64)
        number = min(int(np.searchsorted(self.starts, bounds[0], "right")) - 1, len(self.shards) - 1)
        shard, start = self.shards[number], self.starts[number]
        ids = shard.read(self.dtype, int(bounds[0] - start), int(bounds[-1] - start)).astype(np.int64)
        columns = np.split(ids, bounds[1:-1] - bounds[0])
        for name, column in zip(self.stored_fields, columns, strict=True):
            if column.max(initial=-1) >= (len(self.class_index) if name == "label" else self.vocab):
                self.check()  # a vocabulary with gaps has such ids too
        return tuple(
            self.class_index[columns[i]] if name == "label" else columns[i]
            for name, i in zip(self.fields, self.field_indices, strict=True)
        )

    def check(self) -> None:
        """Raises if a file changed, which costs a call of stat per file, and a hash if it was written."""
        for file in (self.ends, *self.shards):
            file.check()

    def lengths(self, name: str) -> NDArray[np.int64]:
        """The number of ids of each row. Every epoch and every evaluation begins with it, so it checks the files."""
        self.check()
        ends = self.ends.read("<u8", 0, self.count * len(self.stored_fields) + 1).astype(np.int64)
        return (ends[1:] - ends[:-1])[field_index(name, self.stored_fields) :: len(self.stored_fields)]

    def content_hash(self) -> str:
        """Hashes the index, whose own hashes of the files were checked when they were opened."""
        split = read_index(self.folder.parent)["splits"][self.folder.name]
        return hash_arrays(json.dumps([self.fields, split], sort_keys=True))


TokenizedDataset = InMemoryDataset | OnDiskDataset | TruncatedDataset


def read_index(folder: Path) -> Tree:
    """Reads the index.json of a tokenized folder."""
    path = folder / "index.json"
    try:
        index = read_json(path, MAX_INDEX_BYTES)
    except OSError as error:
        raise TokenizedDataError(f"cannot read {path}: {error.strerror or error}") from None
    except CorruptFileError as error:
        raise TokenizedDataError(error.message) from None
    if index.get("schema") != SCHEMA:
        raise TokenizedDataError(
            f"{path} is not an index of tokenized data in schema {SCHEMA}, the one this version reads"
        )
    return index


class TokenizedSpec(DataSpec, kind="tokenized"):
    """Rows as ids from `manyheads data prepare`, checked by hash when opened, and in every epoch if they were written

    The run uses the tokenizer of that folder.
    """

    path: str = field(..., "folder of tokenized data", min_length=1)

    @property
    def tokenized_folder(self) -> Path:
        return Path(self.path)

    def load(self) -> Corpus:
        tokenizer = stored_tokenizer_spec(self.tokenized_folder).make(())
        names = ("train", "validation", "test")
        splits = [OnDiskDataset(self.path, split, tokenizer=tokenizer, verify=False) for split in names]
        train, validation, test = (LazyRows(partial(decode_row, split, tokenizer), len(split)) for split in splits)
        description = str(read_index(self.tokenized_folder).get("description"))
        return Corpus(splits[0].fields, train, validation, test, description, classes=splits[0].labels)


def stored_tokenizer_spec(folder: Path) -> TokenizerSpec:
    """Returns the spec of a tokenized folder's tokenizer, without reading it."""
    return TokenizerFileSpec(path=str(folder / "tokenizer.json"))


def resolve_tokenizer_spec(folder: Path, spec: TokenizerSpec) -> TokenizerSpec:
    """Returns the tokenizer of a tokenized folder if it was trained with this spec, otherwise this spec."""
    return stored_tokenizer_spec(folder) if read_index(folder).get("tokenizer_spec") == to_tree(spec) else spec


def decode_row(dataset: OnDiskDataset, tokenizer: Tokenizer, index: int) -> Row:
    return tuple(
        dataset.labels[int(ids[0])] if name == "label" else decode_ids(tokenizer, ids.tolist())
        for name, ids in zip(dataset.fields, dataset[index], strict=True)
    )
