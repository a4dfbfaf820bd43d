"""Reads answers from SQLite databases of other people: opened read-only, and bounded in time and in size."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from manyheads.errors import DatabaseError
from manyheads.files.read import open_regular

TABLE = "answers"  # with the columns question and answer
MAX_BYTES = 1 << 20  # of a value, or of a row
MAX_SECONDS = 5.0  # of a lookup, so that a question without an index reads a large table, and a loop ends
SETTINGS = ("query_only=ON", "trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0")


@dataclass(frozen=True)
class AnswerDatabase:
    """A SQLite file with a table `answers` of two texts, question and answer; the first row of a question counts."""

    path: Path

    def look_up(self, question: str) -> str | None:
        """The answer to a question as it is written, or None."""
        with self.connect() as connection:
            row = connection.execute(f"SELECT answer FROM {TABLE} WHERE question = ? LIMIT 1", (question,)).fetchone()
        if row is None or row[0] is None:
            return None
        if not isinstance(row[0], str):
            raise DatabaseError(f"{self.path}: the answer is {type(row[0]).__name__}, expected a text")
        return row[0]

    @contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        """A connection that can only read a plain table of this name, and for a few seconds."""
        end = time.monotonic() + MAX_SECONDS
        try:
            open_regular(self.path).close()  # a pipe would block
            uri = f"file:{quote(str(self.path.absolute()))}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True, timeout=MAX_SECONDS)) as connection:
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
                connection.set_progress_handler(lambda: time.monotonic() > end, 10_000)
                for setting in SETTINGS:
                    connection.execute(f"PRAGMA {setting}")
                self.check_table(connection)
                yield connection
        except (sqlite3.Error, sqlite3.Warning, UnicodeError, ValueError) as error:
            if isinstance(error, DatabaseError):
                raise
            reason = f"it takes more than {MAX_SECONDS:g} seconds" if time.monotonic() > end else str(error)
            raise DatabaseError(f"cannot read the database {self.path}: {reason}") from None
        except OSError as error:
            raise DatabaseError(f"cannot read the database {self.path}: {error.strerror or error}") from None

    def check_table(self, connection: sqlite3.Connection) -> None:
        """Raises unless the name is that of a plain table with both columns: a view or virtual table would run code."""
        query = "SELECT type FROM sqlite_schema WHERE name = ? AND rootpage > 0"
        if connection.execute(query, (TABLE,)).fetchone() != ("table",):
            hint = f"CREATE TABLE {TABLE} (question TEXT PRIMARY KEY, answer TEXT)"
            raise DatabaseError(f"{self.path} has no table {TABLE}", hint=hint)
        columns = {row[1] for row in connection.execute(f"PRAGMA table_info({TABLE})")}
        if missing := [name for name in ("question", "answer") if name not in columns]:
            raise DatabaseError(f"{self.path}: the table {TABLE} has no column {missing[0]}")
