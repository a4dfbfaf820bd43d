"""Reads texts: the documents of .txt files, or a column of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import ClassVar, Literal, Self

from manyheads.data.records import TABLES, first_items, has_suffix
from manyheads.data.source import Row
from manyheads.data.tables import ColumnNames, TableSpec, column_names
from manyheads.errors import DataFileError, EmptyDataError, IncompatibleError
from manyheads.spec import field

Document = Literal["paragraph", "line", "file"]
SAMPLE_LINES = 10_000  # lines by which it is decided what a document is
MAX_PARAGRAPH_LINES = 20  # on average
WRAPPED = range(40, 121)  # characters per line of text that is wrapped
SENTENCE_ENDS = tuple(".!?…:;\"'”’»)]。！？")


class TextSpec(TableSpec, kind="text"):
    """Texts from a .txt file or a folder of them, or from a column of a .csv, .tsv, .jsonl or .parquet file

    A single text is split into its beginning, for training, and its end, for validation.
    """

    row_fields: ClassVar[tuple[str, ...]] = ("text",)
    unit: ClassVar[str] = "texts"

    columns: ColumnNames = column_names("text")
    document: Document | None = field(
        None,
        "unit of text of a .txt: a paragraph (lines between blank lines), a line, or a whole file; decided by the file "
        "by default",
    )
    max_document_length: int | None = field(
        None, "characters; a longer text is split, at the end of a line, of a sentence or of a word", ge=16
    )

    @classmethod
    def file_columns(cls, path: str | Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return super().file_columns(path) if has_suffix(Path(path), *TABLES) else ((), ())

    def read_rows(self, path: Path, warnings: Counter[str]) -> Iterator[Row]:
        is_table = has_suffix(path, *TABLES) and not path.is_dir()
        if is_table and self.document:
            raise IncompatibleError(f"document is {self.document}, and a row of {path} is a text", ("document",))
        rows = super().read_rows(path, warnings) if is_table else self._documents(path, warnings)
        for (text,) in rows:
            yield from ((piece,) for piece in split_text(text, self.max_document_length))

    def _documents(self, path: Path, warnings: Counter[str]) -> Iterator[Row]:
        texts = (file for file in path.rglob("*") if file.name.endswith((".txt", ".txt.gz")))
        files = sorted(texts) if path.is_dir() else [path]
        if not files:
            raise DataFileError(f"{path} is a folder without a .txt or .txt.gz file")
        document = self.document or self._decide_document(files, warnings)
        for file in files:
            block: list[str] = []
            for _, line in self.lines(file, warnings):
                if line.strip() or document == "file":
                    block.append(line)
                if document == "line" or (document == "paragraph" and not line.strip()):
                    yield from join_lines(block)
                    block = []
            yield from join_lines(block)

    def _decide_document(self, files: Sequence[Path], warnings: Counter[str]) -> Document:
        lines = (line for file in files for _, line in chain(self.lines(file, Counter()), [(0, "")]))
        document = detect_document(list(first_items(lines, SAMPLE_LINES)))
        others = " or ".join(f'"{unit}"' for unit in ("paragraph", "line", "file") if unit != document)
        warnings[f"one text per {document} (document = {others} overrides it)"] = 0
        return document

    def for_file(self, path: str) -> Self:
        return self.model_copy(update={"document": None}) if self.file_columns(path)[0] else self  # a row is a text

    def split(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        if len(rows) > 1:
            return super().split(rows)
        text = rows[0][0]
        middle = int(len(text) * (1 - self.validation_fraction))
        end = text.rfind("\n", 0, middle) + 1 or middle
        if not text[:end].strip() or not text[end:].strip():
            raise EmptyDataError(
                f"{self.path} has one text of {len(text):,} characters, too short to split",
                hint="set data.validation to a validation file",
            )
        return [(text[:end],)], [(text[end:],)]


def join_lines(lines: list[str]) -> Iterator[Row]:
    """Yields the lines as one text, unless all are blank."""
    text = "\n".join(lines)
    if text.strip():
        yield (text,)


def detect_document(lines: Sequence[str]) -> Document:
    """Decides by the lines of a file what one text is.

    Blank lines separate paragraphs. Without them, or with few, every line is a text, unless most lines end within a
    sentence and are as long as lines of text that is wrapped.
    """
    is_text = [bool(line.strip()) for line in lines]
    paragraphs = sum(after and not before for before, after in zip([False, *is_text], is_text, strict=False))
    texts = [line.strip() for line in lines if line.strip()]
    if paragraphs > 1 and len(texts) <= MAX_PARAGRAPH_LINES * paragraphs:
        return "paragraph"
    ends = sum(text.endswith(SENTENCE_ENDS) for text in texts)
    is_wrapped = 2 * ends < len(texts) and int(median(map(len, texts or [""]))) in WRAPPED
    if len(texts) > 1 and not is_wrapped:
        return "line"
    return "paragraph" if paragraphs > 1 else "file"


def split_text(text: str, max_length: int | None) -> Iterator[str]:
    """Yields the text, or pieces of at most `max_length` characters, the last half of which is searched for an end."""
    start = 0
    while max_length is not None and len(text) - start > max_length:
        middle, stop = start + max_length // 2, start + max_length
        ends = (text.rfind(end, middle, stop) + len(end) for end in ("\n", ". ", " "))
        end = next((end for end in ends if end > middle), stop)
        if text[start:end].strip():
            yield text[start:end]
        start = end
    if text[start:].strip():
        yield text[start:]
