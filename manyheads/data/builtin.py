"""Built-in data, found on every machine or generated: dates, sequences, the standard library, digits, biographies."""

from __future__ import annotations

import ast
import hashlib
import struct
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import StrictStr

from manyheads.data.order import splitmix64
from manyheads.data.source import Corpus, DataSpec, LazyRows, Row, digest, row_counts
from manyheads.errors import DataError, EmptyDataError, needs_extra
from manyheads.spec import field, quote

Splits = tuple[Sequence[Row], Sequence[Row], Sequence[Row]]  # train, validation, test


def random_integers(count: int, *keys: str | int) -> list[int]:
    """Returns 64-bit integers that depend on the keys alone."""
    return list(struct.unpack(f"<{count}Q", hashlib.shake_128("/".join(map(str, keys)).encode()).digest(8 * count)))


def split_of(number: int) -> str:
    """Returns the split of a hash: one in twenty for validation, one in twenty for test."""
    return {0: "validation", 1: "test"}.get(number % 20, "train")


def split_of_text(text: str) -> str:
    return split_of(int.from_bytes(digest(text)[:8], "big"))


def generated_splits(row: Callable[[str, int], Row], count: int, validation_count: int) -> Splits:
    """Returns training, validation and test rows; row i of a split is `row(split, i)`."""
    validation, test = (LazyRows(partial(row, split), validation_count) for split in ("validation", "test"))
    return LazyRows(partial(row, "train"), count), validation, test


LANGUAGES = (
    *("cs", "da", "de", "el", "en", "es", "et", "fi", "fr", "hu"),
    *("id", "it", "nl", "pl", "pt", "ro", "ru", "sv", "tr", "uk"),
)
FIRST_DAY, LAST_DAY = date(1900, 1, 1).toordinal(), date(2100, 12, 31).toordinal()


class DatesSpec(DataSpec, kind="dates"):
    """Dates as people write them in twenty languages, and in ISO 8601: Dienstag, 3. Mai 2016 → 2016-05-03

    The wording is from CLDR, through Babel. Years have four digits. If day and month could be exchanged in another
    language, a tag names the language (<en> 5/6/2031), so that every text means one day; a quarter of the other dates
    with a number for the month have a tag too. One day in twenty is for validation and one for test, in all languages.
    """

    closed_vocabulary: ClassVar[bool] = True

    count: int = field(30_000, "number of training rows", ge=1)
    validation_count: int = field(1000, "number of validation rows, and of test rows", ge=1)
    languages: tuple[StrictStr, ...] = field(LANGUAGES, "languages, as CLDR names them", strict=False, min_length=1)
    seed: int = field(0, "random seed for days, languages and patterns", ge=0)

    def load(self) -> Corpus:
        date_patterns(self.languages)  # raises now for unknown languages
        splits = generated_splits(self.row, self.count, self.validation_count)
        description = f"dates in {len(self.languages)} languages, 1900 to 2100: {row_counts(*splits)}"
        return Corpus(("source", "target"), *splits, description)

    def row(self, split: str, index: int) -> Row:
        language, pattern, day, tag_number = random_integers(4, self.seed, split, index)
        languages, days = date_patterns(self.languages), days_in(split)
        patterns = languages[language % len(languages)]
        value, (form, tag) = date.fromordinal(days[day % len(days)]), patterns[pattern % len(patterns)]
        text = form(value)
        needs_tag = tag and (tag_number % 4 == 0 or is_ambiguous(text, value, self.languages))
        return f"{tag} {text}" if needs_tag else text, value.isoformat()


@cache
def days_in(split: str) -> list[int]:
    days = np.arange(FIRST_DAY, LAST_DAY + 1)
    return [
        day for day, hash_ in zip(days.tolist(), splitmix64(days).tolist(), strict=True) if split_of(hash_) == split
    ]


Form = Callable[[date], str]  # writes a date


@cache
def date_patterns(languages: tuple[str, ...]) -> list[list[tuple[Form, str]]]:
    """Returns the ways to write a date in each language, and the language's tag if the month is a number."""
    with needs_extra("dates need Babel", "demo"):
        from babel import Locale, UnknownLocaleError
        from babel.dates import parse_pattern
    result = list[list[tuple[Form, str]]]()
    for name in languages:
        try:
            locale = Locale.parse(name)
        except (UnknownLocaleError, ValueError):
            raise DataError(f"CLDR has no language {quote(name)}; expected such as 'de' or 'en_GB'") from None
        skeletons = locale.datetime_skeletons
        formats = [locale.date_formats[size] for size in ("full", "long", "medium", "short")]
        formats += [skeletons[key] for key in ("yMMMd", "yMMMEd", "yMd", "yMEd") if key in skeletons]
        patterns = dict.fromkeys(date_format.pattern.replace("yy", "y") for date_format in formats)
        result.append(
            [
                (partial(format_date, parse_pattern(text), locale), "" if "MMM" in text else f"<{name}>")
                for text in patterns
            ]
        )
    return result


def format_date(pattern: Any, locale: Any, value: date) -> str:
    return " ".join(pattern.apply(value, locale).split())  # no-break spaces become spaces


@cache
def numeric_forms(languages: tuple[str, ...]) -> list[Form]:
    """Returns the ways to write a date that have a number for the month, without those that are the same."""
    forms = [form for patterns in date_patterns(languages) for form, tag in patterns if tag]
    samples = [date.fromordinal(FIRST_DAY + i) for i in range(7)]  # one of each weekday, with day and month below 10
    return list({tuple(map(form, samples)): form for form in forms}.values())


def is_ambiguous(text: str, value: date, languages: tuple[str, ...]) -> bool:
    """Whether the text is also a way to write the date with day and month exchanged, in any of the languages."""
    if value.day > 12 or value.day == value.month:
        return False
    other = value.replace(month=value.day, day=value.month)
    return any(form(other) == text for form in numeric_forms(languages))


class SequenceSpec(DataSpec, kind="sequence"):
    """Random symbols to copy, reverse, sort or look up, or brackets to close

    copy: a b c → a b c. reverse: → c b a. sort: in alphabetical order. lookup: keys with a value each, then one key:
    a d b c a → d. dyck: brackets are opened (a) and some closed (A), and the target closes the rest: a b B c → C A.
    No source is in two splits.
    """

    closed_vocabulary: ClassVar[bool] = True

    function: Literal["copy", "reverse", "sort", "lookup", "dyck"] = field(
        "copy", "function that maps a source to its target"
    )
    symbols: int = field(16, "number of distinct symbols; for dyck, of brackets", ge=1, le=1 << 16)
    max_length: int = field(10, "maximum number of symbols in a source; for lookup, of pairs", ge=1, le=1 << 16)
    min_length: int = field(1, "minimum number of symbols in a source; for lookup, of pairs", ge=1, le=1 << 16)
    count: int = field(10_000, "number of training rows", ge=1)
    validation_count: int = field(500, "number of validation rows, and of test rows", ge=1)
    seed: int = field(0, "random seed", ge=0)

    def load(self) -> Corpus:
        if self.min_length > self.max_length:
            raise DataError(f"min_length is {self.min_length}, and max_length is {self.max_length}")
        if self.function == "lookup" and self.max_length > self.symbols:
            raise DataError(
                f"lookup needs max_length = {self.max_length} distinct keys, and there are {self.symbols} symbols"
            )
        splits = generated_splits(self.row, self.count, self.validation_count)
        for rows in splits:
            rows[0]  # raises now if there are too few distinct sources
        description = f"sequences to {self.function}, {self.symbols} symbols: {row_counts(*splits)}"
        return Corpus(("source", "target"), *splits, description)

    def row(self, split: str, index: int) -> Row:
        for attempt in range(2000):
            numbers = random_integers(2 * self.max_length + 2, self.seed, split, index, attempt)
            words, target = self._source_and_target(numbers)
            source = " ".join(words)
            if split_of_text(source) == split:
                return source, " ".join(target)
        raise EmptyDataError(
            f"{self.symbols} symbols and max_length {self.max_length} give too few sources for a {split} split"
        )

    def _source_and_target(self, numbers: list[int]) -> tuple[list[str], list[str]]:
        length = self.min_length + numbers[0] % (self.max_length - self.min_length + 1)
        indices = [number % self.symbols for number in numbers[2 : length + 2]]
        words = [symbol(i) for i in indices]
        if self.function == "lookup":
            order = random_integers(self.symbols, numbers[1])
            keys = [symbol(i) for i in sorted(range(self.symbols), key=order.__getitem__)[:length]]
            query = numbers[1] % length
            return [word for pair in zip(keys, words, strict=True) for word in pair] + [keys[query]], [words[query]]
        if self.function == "dyck":
            return brackets(words, [number % 2 == 0 for number in numbers[self.max_length + 2 :]])
        if self.function == "sort":
            return words, [symbol(i) for i in sorted(indices)]
        return words, words[::-1] if self.function == "reverse" else words


@cache
def symbol(number: int) -> str:
    """Names a symbol a, b, … z, ba, bb, … in letters only, so that every tokenizer reads it as one word."""
    letters = ""
    while not letters or number:
        number, rest = divmod(number, 26)
        letters = chr(97 + rest) + letters
    return letters


def brackets(words: list[str], closes: list[bool]) -> tuple[list[str], list[str]]:
    """Returns a sequence of brackets of which some are closed, and the sequence that closes the rest."""
    source: list[str] = []
    stack: list[str] = []
    for word, close in zip(words, closes, strict=False):
        if close and stack:
            source.append(stack.pop().upper())
        else:
            source.append(word)
            stack.append(word)
    return source, [word.upper() for word in reversed(stack)]


EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}


class StdlibSpec(DataSpec, kind="stdlib"):
    """The standard library of the running Python: its code, the docstrings of its functions, their modules

    language: one text per file. summary: a function → the first line of its docstring. retrieval: that line → the
    function. classify: a function → its module. One file in twenty is for validation and one for test; for classify,
    one function in twenty.
    """

    subset: Literal["language", "summary", "retrieval", "classify"] = field(
        "language", "which rows are made from the library"
    )
    min_functions: int = field(100, "for classify, number of functions that a module needs to be a class", ge=2)

    def load(self) -> Corpus:
        splits: Any = {"train": [], "validation": [], "test": []}
        inputs = set()
        for key, row in self._rows():
            if row[0] not in inputs:  # some code occurs twice
                inputs.add(row[0])
                splits[split_of_text(key)].append(row)
        if not splits["train"] or not splits["validation"]:
            raise EmptyDataError(f"the standard library at {stdlib()} has no source files")
        fields = {
            "language": ("text",),
            "summary": ("source", "target"),
            "retrieval": ("query", "document"),
            "classify": ("text", "label"),
        }
        description = f"Python's standard library, {self.subset}: {row_counts(**splits)}"
        return Corpus(fields[self.subset], description=description, **splits)

    def _rows(self) -> Iterator[tuple[str, Row]]:
        """Yields every row, with the text whose hash decides its split."""
        if self.subset == "language":
            yield from ((str(path), (text,)) for path, text in read_sources(stdlib()))
            return
        functions = all_functions(stdlib())
        sizes = Counter(path.parts[0].removesuffix(".py") for path, _, _ in functions)
        for path, code, summary in functions:
            module = path.parts[0].removesuffix(".py")
            if self.subset == "classify" and sizes[module] >= self.min_functions:
                yield code, (code, module)
            elif self.subset == "summary" and summary:
                yield str(path), (code, summary)
            elif self.subset == "retrieval" and summary:
                yield str(path), (summary, code)


def stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def read_sources(root: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not EXCLUDED & set(name.parts):
            with suppress(OSError, UnicodeDecodeError):
                if (text := path.read_text(encoding="utf-8")).strip():
                    yield name, text


@cache
def all_functions(root: Path) -> list[tuple[Path, str, str]]:
    return [(path, *function) for path, text in read_sources(root) for function in functions_of(text)]


def functions_of(text: str) -> Iterator[tuple[str, str]]:
    """Yields each function without its docstring, and the docstring's first line; skips those with only a docstring.

    A nested function is part of the outer one, because alone it could be in another split.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except SyntaxError:  # some files of the library have syntax errors on purpose
        return
    lines = text.split("\n")
    for node in statements(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        summary, body, end = "", node.body, node.end_lineno or 0
        code = lines[node.lineno - 1 : end]
        if docstring := ast.get_docstring(node):
            first = body[0]
            if len(body) < 2 or first.lineno == node.lineno or body[1].lineno == first.end_lineno:
                continue
            summary = docstring.strip().splitlines()[0].strip()
            code = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno or 0 : end]
        yield (
            "\n".join(line[node.col_offset :] if line[: node.col_offset].isspace() else line for line in code),
            summary,
        )


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all statements outside of functions; without expressions, ten times fewer nodes than ast.walk."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from statements(child)


class DigitsSpec(DataSpec, kind="digits"):
    """Handwritten digits, 8 × 8 pixels from 0 to 1, and their classes

    From scikit-learn, in its order, which is by writer: 1257 training rows, then 180 validation rows, then 360 test
    rows.
    """

    def load(self) -> Corpus:
        with needs_extra("digits need scikit-learn", "eval"):
            from sklearn.datasets import load_digits
        images, labels = load_digits(return_X_y=True)
        images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
        rows = [(image, str(label)) for image, label in zip(images, labels.tolist(), strict=True)]
        splits = rows[:1257], rows[1257:1437], rows[1437:]
        return Corpus(("image", "label"), *splits, f"scikit-learn's digits, 8 × 8: {row_counts(*splits)}")


QUESTIONS = {
    "city": "Where was {name} born?",
    "year": "When was {name} born?",
    "trade": "What was the work of {name}?",
    "school": "Where did {name} study?",
}
STATEMENTS = {
    "city": (
        "{name} was born in {city}.",
        "{city} is the birthplace of {name}.",
        "{name} came into the world in {city}.",
    ),
    "year": (
        "{name} was born in the year {year}.",
        "The year of birth of {name} is {year}.",
        "In {year}, {name} was born.",
    ),
    "trade": (
        "{name} worked as a {trade}.",
        "By trade {name} was a {trade}.",
        "The work of {name} was that of a {trade}.",
    ),
    "school": (
        "{name} studied in {school}.",
        "{school} is where {name} studied.",
        "{name} went to school in {school}.",
    ),
}
TRADES = (
    *("baker", "carpenter", "dyer", "glazier", "hunter", "mason"),
    *("miller", "potter", "sailor", "smith", "tailor", "weaver"),
)
CONSONANTS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "st")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ei", "ou")


class BiographiesSpec(DataSpec, kind="biographies"):
    """Invented people: texts about them, and questions that only a model that has read the texts can answer

    language: texts about all people; for validation, other texts with the same facts. questions: a question → its
    answer, 80 % of the people for training, 10 % for validation, 10 % for test. A model first reads about all
    people, then is trained to answer questions about some, and is evaluated on the others.
    """

    subset: Literal["language", "questions"] = field("language", "texts, or questions with their answers")
    people: int = field(1000, "number of people", ge=10, le=1 << 20)
    texts_per_person: int = field(4, "texts about each person, which differ in wording and order", ge=1, le=64)
    cities: int = field(100, "number of cities", ge=2, le=1 << 14)
    seed: int = field(0, "random seed", ge=0)

    def load(self) -> Corpus:
        if self.subset == "language":
            train = LazyRows(self.text, self.people * self.texts_per_person)
            validation = LazyRows(self.validation_text, min(self.people, 500))
            counts = row_counts(train, validation, [], "texts")
            return Corpus(("text",), train, validation, [], f"{self.people:,} invented people: {counts}")
        tenth = self.people // 10
        starts = 0, self.people - 2 * tenth, self.people - tenth, self.people
        train, validation, test = (
            LazyRows(partial(self.question, start), (end - start) * len(QUESTIONS)) for start, end in pairwise(starts)
        )
        counts = row_counts(train, validation, test, "questions")
        return Corpus(("source", "target"), train, validation, test, f"{self.people:,} invented people: {counts}")

    def person(self, index: int) -> dict[str, str]:
        """Returns a unique name, and one value per question."""
        numbers = random_integers(4, self.seed, index)
        first, last = syllables(numbers[0] % 128 * 128 + numbers[1] % 128), syllables(128 * 128 + index)
        return {
            "name": f"{first.capitalize()} {last.capitalize()}",
            "city": f"{self._town(numbers[2])}ville",
            "year": str(1800 + numbers[3] % 200),
            "trade": TRADES[numbers[1] % len(TRADES)],
            "school": f"{self._town(numbers[3] >> 16)}ford",
        }

    def _town(self, number: int) -> str:
        return syllables(random_integers(1, self.seed, "city", number % self.cities)[0] % (1 << 14)).capitalize()

    def _text(self, index: int, version: int) -> Row:
        person = self.person(index)
        numbers = random_integers(2 * len(STATEMENTS), self.seed, index, version)
        facts = [forms[numbers[i] % len(forms)].format(**person) for i, forms in enumerate(STATEMENTS.values())]
        order = sorted(range(len(facts)), key=lambda i: numbers[len(STATEMENTS) + i])
        return (" ".join(facts[i] for i in order),)

    def text(self, index: int) -> Row:
        return self._text(index // self.texts_per_person, index % self.texts_per_person)

    def validation_text(self, index: int) -> Row:
        """Returns the first text about a person that is not a training text."""
        train = {self._text(index, version) for version in range(self.texts_per_person)}
        versions = (self._text(index, self.texts_per_person + i) for i in range(4096))
        return next(row for row in versions if row not in train)

    def question(self, start: int, index: int) -> Row:
        person = self.person(start + index // len(QUESTIONS))
        fact = list(QUESTIONS)[index % len(QUESTIONS)]
        return QUESTIONS[fact].format(**person), person[fact]


def syllables(number: int) -> str:
    """Returns a pronounceable word, a different one for each number."""
    word = ""
    while not word or number:
        number, rest = divmod(number, len(CONSONANTS) * len(VOWELS))
        word += CONSONANTS[rest // len(VOWELS)] + VOWELS[rest % len(VOWELS)]
    return word
