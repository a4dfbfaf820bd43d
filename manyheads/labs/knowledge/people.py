"""Biographies, and questions about the people in them: generated, or from a user's files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from os.path import commonprefix
from pathlib import Path

from manyheads.data.builtin import QUESTIONS, STATEMENTS, BiographiesSpec
from manyheads.data.tables import PairsSpec
from manyheads.data.texts import TextSpec
from manyheads.errors import EmptyDataError, UsageError

Pair = tuple[str, str]  # a question, and the place that answers it


@dataclass(frozen=True)
class People:
    """The texts of pretraining, and questions: to fine-tune on, about others in the texts, and about people in none."""

    texts: tuple[str, ...]
    train: tuple[Pair, ...]
    validation: tuple[Pair, ...]
    held_out: tuple[Pair, ...]

    def majority(self) -> str:
        """The most common place of the questions to fine-tune on, "London" in the assignment."""
        return Counter(place for _, place in self.train).most_common(1)[0][0]

    def subject(self, question: str) -> str:
        """The name in a question: what is not the same in all of them."""
        prefix, suffix = self.common_ends
        return question.removeprefix(prefix).removesuffix(suffix)

    @cached_property
    def common_ends(self) -> tuple[str, str]:
        """The words that all questions begin with, and those that they end with."""
        questions = [question for question, _ in (*self.train, *self.validation, *self.held_out)]
        prefix = commonprefix(questions)  # noqa: RUF071 (of texts, which are no paths)
        suffix = commonprefix([question[len(prefix) :][::-1] for question in questions])[::-1]  # noqa: RUF071
        return prefix[: prefix.rfind(" ") + 1], suffix[suffix.find(" ") :] if " " in suffix else ""

    def is_in_texts(self, question: str, place: str) -> bool:
        """Whether a text has both the name in the question and the place."""
        name = self.subject(question)
        return any(name in text and place in text for text in self.texts)

    def nearest_names(self, question: str, count: int) -> list[tuple[str, str, float]]:
        """The people of fine-tuning whose names have the most characters in common, their places, and how similar."""
        name = self.subject(question)
        rows = [(self.subject(other), place) for other, place in self.train]
        ratios = [(other, place, SequenceMatcher(None, name, other).ratio()) for other, place in rows]
        return sorted(ratios, key=lambda row: -row[2])[:count]


def hold_out(texts: Sequence[str], train: Sequence[Pair], others: Sequence[Pair]) -> People:
    """Takes the texts about every second of the other people away, so that nothing has been read about them."""
    people = People(tuple(texts), tuple(train), tuple(others[::2]), tuple(others[1::2]))
    names = [people.subject(question) for question, _ in people.held_out]
    rest = tuple(text for text in texts if not any(name in text for name in names))
    if not rest or not people.train or not people.validation:
        raise EmptyDataError("there are no texts, or no questions, left besides those of people whom no text is about")
    return People(rest, people.train, people.validation, people.held_out)


def generate_people(count: int, cities: int, seed: int) -> People:
    """Invented people: `count` with three texts each, half of them to fine-tune on, and half as many held out."""
    spec = BiographiesSpec(people=max(10, 2 * count), cities=cities, seed=seed)
    people = [spec.person(i) for i in range(count // 2 * 3)]
    texts = [form.format(**person) for person in people for form in STATEMENTS["city"]]
    pairs = [(QUESTIONS["city"].format(**person), person["city"]) for person in people]
    return hold_out(texts, pairs[: count // 2], pairs[count // 2 :])


def read_people(texts: str, questions: str, validation: str) -> People:
    """The people of three files: biographies, one per line, and question and place, separated by a tab."""
    if not (texts and questions and validation):
        raise UsageError("give all three files: biographies, questions and validation")
    rows = TextSpec(path=texts, document="line").read_rows(Path(texts), Counter())
    train, others = (
        [(row[0], row[1]) for row in PairsSpec(path=path).read_rows(Path(path), Counter())]
        for path in (questions, validation)
    )
    return hold_out([row[0] for row in rows], train, others)
