"""Data that is on every machine already, or made up: dates, the standard library, digits, biographies, sequences."""

from __future__ import annotations

import ast
import hashlib
import struct
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import StrictStr

from manyheads.data.order import hashed
from manyheads.data.source import Corpus, DataError, DataSpec, Made, Row, digest
from manyheads.spec import field, quoted

SPLITS = ("train", "validation", "test")


def drawn(count: int, *keys: str | int) -> list[int]:
    """So many numbers of 64 bits, for these keys always the same."""
    return list(struct.unpack(f"<{count}Q", hashlib.shake_128("/".join(map(str, keys)).encode()).digest(8 * count)))


def part_of(number: int) -> str:
    """Which split a hash belongs to: one in twenty validates, one in twenty tests."""
    return {0: "validation", 1: "test"}.get(number % 20, "train")


def part_of_text(text: str) -> str:
    return part_of(int.from_bytes(digest(text)[:8], "big"))


LANGUAGES = ("cs", "da", "de", "el", "en", "es", "et", "fi", "fr", "hu", "id", "it", "nl", "pl", "pt", "ro", "ru", "sv", "tr", "uk")
FIRST, LAST = date(1900, 1, 1).toordinal(), date(2100, 12, 31).toordinal()


class DatesSpec(DataSpec, kind="dates"):
    """Dates as people write them in twenty languages, and as ISO 8601 does: Dienstag, 3. Mai 2016 → 2016-05-03

    The wording is CLDR's, through Babel. A year has four digits, and where the month is a number too the language stands before it
    (<de> 03.05.2016), so no text means two days. One day in twenty is for validation and one for test, in all languages.
    """

    count: int = field(30_000, "rows to learn from", ge=1)
    held_out: int = field(1000, "rows to validate with, and as many to test", ge=1)
    languages: tuple[StrictStr, ...] = field(LANGUAGES, "languages, by the names CLDR has for them", strict=False, min_length=1)
    seed: int = field(0, "which days, languages and forms are drawn", ge=0)

    def load(self) -> Corpus:
        date_forms(self.languages)  # a language that is not there is refused now
        train, validation, test = (
            Made(partial(self.row, split), count) for split, count in zip(SPLITS, (self.count, self.held_out, self.held_out), strict=True)
        )
        about = (
            f"dates in {len(self.languages)} languages, 1900 to 2100: {self.count:,} to learn from, {self.held_out:,} of days never seen"
        )
        return Corpus(("source", "target"), train, validation, test, about)

    def row(self, split: str, index: int) -> Row:
        one, two, three = drawn(3, self.seed, split, index)
        languages, days = date_forms(self.languages), days_of(split)
        forms = languages[one % len(languages)]
        return written(days[three % len(days)], *forms[two % len(forms)])


@cache
def days_of(split: str) -> list[int]:
    days = np.arange(FIRST, LAST + 1)
    return [day for day, number in zip(days.tolist(), hashed(days).tolist(), strict=True) if part_of(number) == split]


@cache
def date_forms(languages: tuple[str, ...]) -> list[list[tuple[Any, Any, str]]]:
    """For each language its ways to write a day: a pattern, the language, and what stands before it."""
    try:
        from babel import Locale, UnknownLocaleError
        from babel.dates import parse_pattern
    except ImportError:
        raise DataError("dates take their wording from Babel: pip install 'manyheads[demo]'") from None
    forms = []
    for name in languages:
        try:
            locale = Locale.parse(name)
        except (UnknownLocaleError, ValueError):
            raise DataError(f"no language {quoted(name)} in CLDR; expected such as 'de' or 'en_GB'") from None
        known = [locale.date_formats[size].pattern for size in ("full", "long", "medium", "short")]
        known += [
            locale.datetime_skeletons[name].pattern for name in ("yMMMd", "yMMMEd", "yMd", "yMEd") if name in locale.datetime_skeletons
        ]
        patterns = dict.fromkeys(pattern.replace("yy", "y") for pattern in known)
        forms.append([(parse_pattern(pattern), locale, "" if "MMM" in pattern else f"<{name}> ") for pattern in patterns])
    return forms


def written(day: int, pattern: Any, locale: Any, before: str) -> Row:
    then = date.fromordinal(day)
    return " ".join((before + pattern.apply(then, locale)).split()), then.isoformat()  # all sorts of spaces become one


class SequenceSpec(DataSpec, kind="sequence"):
    """Symbols to copy, reverse, sort, look up or close: tasks without a meaning, as many rows as asked for

    copy: a b c → a b c. reverse: → c b a. sort: by the alphabet. lookup: keys each with a value, then a key: a d b c a → d. dyck: brackets
    are opened (a) and some closed (A), and the target closes the rest: a b B c → C A. No source of one split is in another.
    """

    task: Literal["copy", "reverse", "sort", "lookup", "dyck"] = field("copy", "what is asked for")
    vocabulary: int = field(16, "different symbols; for dyck, different brackets", ge=1, le=1 << 16)
    length: int = field(10, "symbols in a source at most; for lookup, pairs of them", ge=1, le=1 << 16)
    shortest: int = field(1, "symbols in a source at least", ge=1, le=1 << 16)
    count: int = field(10_000, "rows to learn from", ge=1)
    held_out: int = field(500, "rows to validate with, and as many to test", ge=1)
    seed: int = field(0, "which rows are drawn", ge=0)

    def load(self) -> Corpus:
        if self.shortest > self.length:
            raise DataError(f"the shortest source has {self.shortest} symbols, and the longest {self.length}")
        if self.task == "lookup" and self.length > self.vocabulary:
            raise DataError(f"lookup needs a key of its own for each of {self.length} pairs, and there are {self.vocabulary} symbols")
        train, validation, test = (
            Made(partial(self.row, split), count) for split, count in zip(SPLITS, (self.count, self.held_out, self.held_out), strict=True)
        )
        for rows in (train, validation, test):
            rows[0]  # too few different sources are refused now
        about = f"sequences to {self.task}, {self.vocabulary} symbols: {self.count:,} to learn from, {self.held_out:,} others to validate"
        return Corpus(("source", "target"), train, validation, test, about)

    def row(self, split: str, index: int) -> Row:
        for attempt in range(2000):
            words, target = self._drawn(drawn(2 * self.length + 2, self.seed, split, index, attempt))
            source = " ".join(words)
            if part_of_text(source) == split:
                return source, " ".join(target)
        raise DataError(f"{self.vocabulary} symbols and length {self.length} make too few different sources for a {split} set")

    def _drawn(self, numbers: list[int]) -> tuple[list[str], list[str]]:
        size = self.shortest + numbers[0] % (self.length - self.shortest + 1)
        picked = [number % self.vocabulary for number in numbers[2 : size + 2]]
        words = [symbol(i) for i in picked]
        if self.task == "lookup":
            order = drawn(self.vocabulary, numbers[1])
            keys = [symbol(i) for i in sorted(range(self.vocabulary), key=order.__getitem__)[:size]]
            asked = numbers[1] % size
            return [word for pair in zip(keys, words, strict=True) for word in pair] + [keys[asked]], [words[asked]]
        if self.task == "dyck":
            return brackets(words, [number % 2 == 0 for number in numbers[self.length + 2 :]])
        return words, {"copy": words, "reverse": words[::-1], "sort": [symbol(i) for i in sorted(picked)]}[self.task]


def symbol(number: int) -> str:
    """a, b, … z, ba, bb, …: letters alone, so that a word is a symbol to every tokenizer."""
    letters = ""
    while not letters or number:
        number, rest = divmod(number, 26)
        letters = chr(97 + rest) + letters
    return letters


def brackets(words: list[str], closes: list[bool]) -> tuple[list[str], list[str]]:
    source: list[str] = []
    opened: list[str] = []
    for word, close in zip(words, closes, strict=False):
        if close and opened:
            source.append(opened.pop().upper())
        else:
            source.append(word)
            opened.append(word)
    return source, [word.upper() for word in reversed(opened)]


NOT_READ = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}


class StdlibSpec(DataSpec, kind="stdlib"):
    """The standard library of the Python that runs this: its code, what its functions say they do, where they belong

    language: each file is a text. summary: a function → the first line of its docstring. retrieval: that line → the function. classify: a
    function → its module. Files are held out whole, one in twenty to validate and one to test; for classify, functions are.
    """

    task: Literal["language", "summary", "retrieval", "classify"] = field("language", "what is asked for")
    least: int = field(100, "for classify: functions that a module must have to be a class", ge=2)

    def load(self) -> Corpus:
        split: dict[str, list[Row]] = {name: [] for name in SPLITS}
        known = set()
        for where, row in self._rows():
            if row[0] not in known:  # some code is there twice
                known.add(row[0])
                split[part_of_text(where)].append(row)
        train, validation, test = split.values()
        if not train or not validation:
            raise DataError(f"the standard library at {stdlib()} has no source files to read")
        fields = {"language": ("text",), "summary": ("source", "target"), "retrieval": ("query", "document"), "classify": ("text", "label")}
        about = (
            f"Python's standard library, {self.task}: {len(train):,} to learn from, {len(validation):,} to validate, {len(test):,} to test"
        )
        return Corpus(fields[self.task], train, validation, test, about)

    def _rows(self) -> Iterator[tuple[str, Row]]:
        """Every row, with what its split is decided by."""
        if self.task == "language":
            yield from ((str(path), (text,)) for path, text in files_of(stdlib()))
            return
        functions = all_functions(stdlib())
        sizes = Counter(path.parts[0].removesuffix(".py") for path, _, _ in functions)
        for path, code, said in functions:
            module = path.parts[0].removesuffix(".py")
            if self.task == "classify" and sizes[module] >= self.least:
                yield code, (code, module)
            elif self.task == "summary" and said:
                yield str(path), (code, said)
            elif self.task == "retrieval" and said:
                yield str(path), (said, code)


def stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def files_of(root: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not NOT_READ & set(name.parts):
            with suppress(OSError, UnicodeDecodeError):
                if (text := path.read_text(encoding="utf-8")).strip():
                    yield name, text


@cache
def all_functions(root: Path) -> list[tuple[Path, str, str]]:
    return [(path, *function) for path, text in files_of(root) for function in functions_of(text)]


def functions_of(text: str) -> Iterator[tuple[str, str]]:
    """Each function without its docstring, and that docstring's first line; functions that only have a docstring do nothing.

    A function within another is a part of it: the two could stand in different splits.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except SyntaxError:  # some files of the library are wrong on purpose
        return
    lines = text.split("\n")
    for node in statements(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        said, body, end = "", node.body, node.end_lineno or 0
        code = lines[node.lineno - 1 : end]
        if documented := ast.get_docstring(node):
            first = body[0]
            if len(body) < 2 or first.lineno == node.lineno or body[1].lineno == first.end_lineno:
                continue
            said = documented.strip().splitlines()[0].strip()
            code = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno or 0 : end]
        yield "\n".join(line[node.col_offset :] if line[: node.col_offset].isspace() else line for line in code), said


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement inside, but none within a function, and no expression: ten times fewer than ast.walk."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from statements(child)


class DigitsSpec(DataSpec, kind="digits"):
    """Handwritten digits of 8 × 8 pixels between 0 and 1, and which they are

    scikit-learn's, in its order, which goes by writer: 1257 to learn from, then 180 to validate, then 360 to test.
    """

    def load(self) -> Corpus:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise DataError("digits come with scikit-learn: pip install 'manyheads[eval]'") from None
        pictures, labels = load_digits(return_X_y=True)
        pictures = (pictures.reshape(-1, 8, 8) / 16).astype(np.float32)
        rows = [(picture, str(label)) for picture, label in zip(pictures, labels.tolist(), strict=True)]
        about = "scikit-learn's digits, 8 × 8: 1,257 to learn from, 180 to validate, 360 to test"
        return Corpus(("picture", "label"), rows[:1257], rows[1257:1437], rows[1437:], about)


# what is asked of a person; every person has one of each
ASKED = {
    "city": "Where was {name} born?",
    "year": "When was {name} born?",
    "trade": "What was the work of {name}?",
    "school": "Where did {name} study?",
}
SAID = {
    "city": ("{name} was born in {city}.", "{city} is the birthplace of {name}.", "{name} came into the world in {city}."),
    "year": ("{name} was born in the year {year}.", "The year of birth of {name} is {year}.", "In {year}, {name} was born."),
    "trade": ("{name} worked as a {trade}.", "By trade {name} was a {trade}.", "The work of {name} was that of a {trade}."),
    "school": ("{name} studied in {school}.", "{school} is where {name} studied.", "{name} went to school in {school}."),
}
TRADES = ("baker", "carpenter", "dyer", "glazier", "hunter", "mason", "miller", "potter", "sailor", "smith", "tailor", "weaver")
STARTS, MIDDLES = (
    ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "st"),
    ("a", "e", "i", "o", "u", "ai", "ei", "ou"),
)


class BiographiesSpec(DataSpec, kind="biographies"):
    """Made-up people, what is told about them, and questions that only those who have read it can answer

    language: texts about everyone, to learn from; to validate, other tellings of the same facts. questions: a question → its answer,
    80 % of the people to learn from, 10 % to validate, 10 % to test. So first read about all, then learn to answer for some, and be
    asked about others.
    """

    task: Literal["language", "questions"] = field("language", "what is asked for")
    people: int = field(1000, "how many people there are", ge=10, le=1 << 20)
    tellings: int = field(4, "texts about each of them: the wording and the order of facts differ", ge=1, le=64)
    cities: int = field(100, "how many different cities", ge=2, le=1 << 14)
    seed: int = field(0, "who they are", ge=0)

    def load(self) -> Corpus:
        if self.task == "language":
            about = f"{self.people:,} made-up people, {self.tellings} tellings each, and one more of some to validate"
            train, other = Made(self.telling, self.people * self.tellings), Made(self.other_telling, min(self.people, 500))
            return Corpus(("text",), train, other, [], about)
        tenth = self.people // 10
        ends = (0, self.people - 2 * tenth, self.people - tenth, self.people)
        parts = [Made(partial(self.question, start), (end - start) * len(ASKED)) for start, end in pairwise(ends)]
        about = f"{len(ASKED)} questions about each of {self.people:,} made-up people, 80 % to learn from, 10 % to validate, 10 % to test"
        return Corpus(("source", "target"), parts[0], parts[1], parts[2], about)

    def person(self, index: int) -> dict[str, str]:
        """A name of their own, and a value for each thing that is asked."""
        one, two, three, four = drawn(4, self.seed, index)
        name = f"{spoken(one % 128 * 128 + two % 128).capitalize()} {spoken(128 * 128 + index).capitalize()}"
        city, school = (
            spoken(drawn(1, self.seed, "city", place % self.cities)[0] % (1 << 14)).capitalize() for place in (three, four >> 16)
        )
        return {
            "name": name,
            "city": f"{city}ville",
            "year": str(1800 + four % 200),
            "trade": TRADES[two % len(TRADES)],
            "school": f"{school}ford",
        }

    def _told(self, index: int, telling: int) -> Row:
        person = self.person(index)
        numbers = drawn(2 * len(SAID), self.seed, index, telling)
        facts = [SAID[fact][numbers[i] % len(SAID[fact])].format(**person) for i, fact in enumerate(SAID)]
        order = sorted(range(len(facts)), key=lambda i: numbers[len(SAID) + i])
        return (" ".join(facts[i] for i in order),)

    def telling(self, index: int) -> Row:
        return self._told(index // self.tellings, index % self.tellings)

    def other_telling(self, index: int) -> Row:
        """The first telling that is none of those to learn from."""
        known = {self._told(index, telling) for telling in range(self.tellings)}
        return next(row for row in (self._told(index, self.tellings + i) for i in range(4096)) if row not in known)

    def question(self, start: int, index: int) -> Row:
        person = self.person(start + index // len(ASKED))
        fact = list(ASKED)[index % len(ASKED)]
        return ASKED[fact].format(**person), person[fact]


def spoken(number: int) -> str:
    """A number as syllables: each has a name of its own that can be said."""
    word = ""
    while not word or number:
        number, rest = divmod(number, len(STARTS) * len(MIDDLES))
        word += STARTS[rest // len(MIDDLES)] + MIDDLES[rest % len(MIDDLES)]
    return word
