"""Answers of a model about people: made up or not, how confident, when to abstain, and about people in no text."""

from __future__ import annotations

import math
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Annotated

from manyheads.data.tables import PairsSpec
from manyheads.files.database import AnswerDatabase
from manyheads.labs.figures import Bars, Lines, Table
from manyheads.labs.finding import Check, Finding, at_least, at_most, judging, reported
from manyheads.labs.knowledge.experiment import (
    FULL,
    ONE_SEED,
    SMALLEST,
    THREE_SEEDS,
    Experiment,
    PeopleRuns,
    Reply,
    accuracy,
    all_replies,
    majority_of,
    right,
)
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.metrics.classes import BINS, expected_calibration_error
from manyheads.metrics.confidence import auroc, auroc_interval, risk_coverage, wilson_interval
from manyheads.tasks.answering import Answer, answer, queue_pair


@lab("knowledge", rows=("I6",), seconds=(9.0, 90.0), smallest=SMALLEST, full=FULL, counterexample={"steps": 0},
     try_next=("--steps 600", "--seed 1"))  # fmt: skip
def made_up_answers(
    *,
    runs: PeopleRuns = ONE_SEED,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A right answer and a made-up one look alike.

    Every answer is the name of a place, in the form of the right ones. Whether it was read or made up is not in the
    text of the answer. Here it can be told, because the texts of pretraining are known: a right answer has the person
    and the place in one of them, and a made-up one does not. The probability of the answer is what is left to a reader.
    """
    experiments = runs.run(seed, progress)
    replies = [(each.people, reply) for each in experiments for reply in (*each.validation, *each.held_out)]
    places = {place for each in experiments for _, place in (*each.people.train, *each.people.validation)}
    good, bad = ([(p, reply) for p, reply in replies if reply.is_right is expected] for expected in (True, False))
    read = [p.is_in_texts(reply.answer.question, reply.answer.guess) for p, reply in good]
    invented = [p.is_in_texts(reply.answer.question, reply.answer.guess) for p, reply in bad]
    rows = [answer_row(p.is_in_texts(r.answer.question, r.answer.guess), r) for p, r in (*good[:6], *bad[:6])]
    return Finding(
        (
            at_least("right answers", len(good), 5),
            at_least("made-up answers", len(bad), 5),
            at_least("made-up answers that are places", accuracy([r.answer.guess in places for _, r in bad]), 0.95),
            at_least("right answers that are in the texts, the others being luck", accuracy(read), 0.75),
            at_most("made-up answers that are in the texts", accuracy(invented), 0.05),
            reported("majority baseline", majority_of(experiments)),
        ),
        (Table("Right and made-up answers", ["question", "answer", "right", "probability", "in the texts"], rows),),
        note="Shown to a user without their source, made-up answers cost the trust in the right ones too.",
    )


def answer_row(in_texts: bool, reply: Reply) -> list[float | str | None]:
    yes_no = ["yes" if value else "no" for value in (reply.is_right, in_texts)]
    return [reply.answer.question, reply.answer.guess, yes_no[0], f"{reply.probability:.3f}", yes_no[1]]


@lab("knowledge", rows=("I7",), seconds=(27.0, 60.0), smallest=SMALLEST, full=FULL | {"steps": 1500},
     counterexample={"steps": 0}, try_next=("--steps 600", "--seeds 5"))  # fmt: skip
def confidence(
    *,
    runs: PeopleRuns = THREE_SEEDS,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """The probability of an answer tells right answers from made-up ones better than chance.

    The confidence is the probability of the whole answer, Π p(token), or its smallest p(token). AUROC is the
    probability that a right answer is more confident than a wrong one: ½ for chance. Answering only above a threshold
    covers fewer questions with fewer errors: risk against coverage. The calibration error is the mean distance between
    confidence and accuracy. Half of the questions here are about people in no text, whose names alone could give them
    away, so AUROC is also measured among people of the texts. The steps are few enough that some answers are wrong.
    """
    experiments = runs.run(seed, progress)
    replies = all_replies(experiments)
    correct, probabilities = right(replies), [reply.probability for reply in replies]
    smallest = [reply.answer.min_token_probability for reply in replies]
    low, high = auroc_interval(correct, probabilities)
    curve = risk_coverage(correct, probabilities)
    half = next(risk for coverage, risk in curve if coverage >= 0.5)
    return Finding(
        (
            at_least("right answers", sum(correct), 5),
            at_least("AUROC, lower end of the 95 % interval", low, 0.5),
            reported("AUROC", auroc(correct, probabilities)),
            reported("AUROC, upper end", high),
            reported("AUROC of the smallest token probability", auroc(correct, smallest)),
            *auroc_of_readers(experiments),
            at_most("risk at half of the coverage, less that of all answers", half - curve[-1][1], 0.0),
            reported("expected calibration error", expected_calibration_error(correct, probabilities)),
            reported("majority baseline", majority_of(experiments)),
        ),
        (
            Lines("Risk and coverage", "share of the questions answered", "share of errors", {"model": curve},
                  {"all answers": curve[-1][1]}),
            Lines("Calibration", "confidence", "accuracy", {"model": reliability(correct, probabilities),
                  "calibrated": [(0.0, 0.0), (1.0, 1.0)]}),
        ),
    )  # fmt: skip


def auroc_of_readers(experiments: Sequence[Experiment]) -> list[Check]:
    """AUROC without the people in no text, whose names alone give them away; undecided if all answers are alike."""
    replies = all_replies(experiments, held_out=False)
    correct, probabilities = right(replies), [reply.probability for reply in replies]
    name = "AUROC among people of the texts"
    if len(set(correct)) == 1:
        return [Check(name, f"all are {'right' if correct[0] else 'wrong'}", "≥ 0.5")]
    low, high = auroc_interval(correct, probabilities)
    return [
        at_least(f"{name}, lower end of the 95 % interval", low, 0.5),
        reported(name, auroc(correct, probabilities)),
        reported(f"{name}, upper end", high),
        reported("right answers about people of the texts", accuracy(correct)),
    ]


def reliability(correct: Sequence[bool], probabilities: Sequence[float]) -> list[tuple[float, float]]:
    """(mean confidence, accuracy) of the answers in each bin."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for probability, is_right in zip(probabilities, correct, strict=True):
        bins.setdefault(math.ceil(probability * BINS), []).append((probability, is_right))
    return [(mean(p for p, _ in rows), accuracy([r for _, r in rows])) for _, rows in sorted(bins.items())]


@lab("knowledge", rows=("I8", "I9"), seconds=(10.0, 160.0), smallest=SMALLEST, full=FULL,
     counterexample={"threshold": 0.0}, try_next=("--threshold 0.9", "--threshold 0.2"))  # fmt: skip
def abstention(
    *,
    threshold: Annotated[float, "probability from which on the model answers itself"] = 0.5,
    runs: PeopleRuns = ONE_SEED,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A model that answers only above a threshold, and else asks a database and then the user, is right more often.

    Below the threshold the answer is looked up in a SQLite database, which has every second person here. What is not
    there either has the source none: the user is asked, and question and answer go to a queue. The model is
    fine-tuned on the queue, and then answers these questions itself. `manyheads ask` does the same.
    """
    experiments = runs.run(seed, progress)
    rows = [row for each in experiments for row in with_database(each, threshold)]
    answered = [(result, place) for result, place in rows if result.text is not None]
    by_source = {
        source: [result.text == place for result, place in answered if result.source == source]
        for source in ("model", "database")
    }
    without, count = accuracy(right(all_replies(experiments))), Counter(result.source for result, _ in rows)
    with_both = accuracy([result.text == place for result, place in answered])
    learned = [each for experiment in experiments for each in learn_queue(experiment, threshold)]
    shares = {"without a threshold": without, "model above it": accuracy(by_source["model"]), "with both": with_both}
    table = [[each.question, each.text or "unknown", each.source, f"{each.probability:.3f}"] for each, _ in rows[::6]]
    return Finding(
        (
            *judging(
                "I8",
                at_least("accuracy of the model above the threshold, less without",
                         shares["model above it"] - without, 0.0),
                at_least("accuracy with the database, less without", with_both - without, 0.0),
                *(at_least(f"answers with the source {name}", count[name], 1) for name in ("model", "database")),
            ),
            *judging(
                "I9",
                at_least("answers with the source none", count["none"], 1),
                at_least("accuracy on the queue after fine-tuning on it", accuracy(learned), 0.9),
            ),
            reported("coverage", len(answered) / len(rows)),
            reported("majority baseline", majority_of(experiments)),
        ),
        (
            Bars("Accuracy of the answers that are given", "accuracy", shares),
            Table("Answers and their sources", ["question", "answer", "source", "probability"], table),
        ),
    )  # fmt: skip


def with_database(experiment: Experiment, threshold: float) -> list[tuple[Answer, str]]:
    """Asks about all people, with a database that has the places of every second one."""
    pairs = [*experiment.people.validation, *experiment.people.held_out]
    texts = experiment.generate([question for question, _ in pairs])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "facts.db"
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE answers (question TEXT PRIMARY KEY, answer TEXT)")
            connection.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", pairs[::2])
        database = AnswerDatabase(path)
        return [
            (answer(question, text, threshold=threshold, database=database), place)
            for (question, place), text in zip(pairs, texts, strict=True)
        ]


def learn_queue(experiment: Experiment, threshold: float) -> list[bool]:
    """Fine-tunes on the questions that nobody knew, and whether the model now answers each right and by itself."""
    unknown = [(each.question, place) for each, place in with_database(experiment, threshold) if each.source == "none"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "queue.tsv"
        for question, place in unknown:
            queue_pair(path, question, place)
        rows = PairsSpec(path=str(path)).read_rows(path, Counter()) if unknown else iter(())
        pairs = [(row[0], row[1]) for row in rows]
    if not pairs:
        return []
    replies = experiment.after_fine_tuning([*experiment.people.train, *pairs], 120).replies(pairs)
    return [reply.is_right and reply.probability >= threshold for reply in replies]


@lab("knowledge", rows=("I10",), seconds=(9.0, 130.0), smallest=SMALLEST, full=FULL, counterexample={"read": True},
     try_next=("--steps 0", "--seeds 3"))  # fmt: skip
def unknown_people(
    *,
    read: Annotated[bool, "ask about people of the biographies instead"] = False,
    runs: PeopleRuns = ONE_SEED,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """Asked about a person whom it has never read of, a model still answers, no better than a constant guess.

    The person is in no biography and in no question before. The model has learned that such a question ends in a place,
    so it gives one. A model of words, as here, knows nothing of a new name, and gives nearly everyone the same place;
    one of characters would follow similar names. The accuracy is that of the most common place, within its interval.
    """
    experiments = runs.run(seed, progress)
    pairs = [(each, reply) for each in experiments for reply in (each.validation if read else each.held_out)]
    replies = [reply for _, reply in pairs]
    low, high = wilson_interval(sum(right(replies)), len(replies))
    majority = accuracy([reply.place == each.people.majority() for each, reply in pairs])
    answers, places = (Counter(texts) for texts in ([r.answer.guess for r in replies], [r.place for r in replies]))
    shares = {place: count / len(replies) for place, count in answers.most_common(8)}
    return Finding(
        (
            reported("accuracy", accuracy(right(replies))),
            reported("majority baseline", majority),
            at_most("accuracy, lower end of the 95 % interval, less the baseline", low - majority, 0.0),
            at_least("accuracy, upper end, less the baseline", high - majority, 0.0),
            at_least("questions that get an answer", accuracy([bool(reply.answer.guess) for reply in replies]), 1.0),
            reported("different answers, of different places", f"{len(answers)} of {len(places)}"),
            reported("largest probability of a wrong answer", max((r.probability for r in replies if not r.is_right),
                                                                  default=0.0)),
        ),
        (
            Bars("The most frequent answers", "share of the questions", shares),
            Table("Answers, and the people of fine-tuning with the most similar names",
                  ["question", "answer", "probability", "similar name", "born in", "similarity"],
                  similar_names(pairs[:9])),
        ),
        note="The danger: the answer has the form of knowledge and nothing behind it, and who asks cannot see that. "
        "Names carry origin and gender, so answers by similar names repeat prejudices.",
    )  # fmt: skip


def similar_names(pairs: Sequence[tuple[Experiment, Reply]]) -> list[list[float | str | None]]:
    rows: list[list[float | str | None]] = []
    for experiment, reply in pairs:
        ((name, place, ratio),) = experiment.people.nearest_names(reply.answer.question, 1)
        rows.append(
            [reply.answer.question, reply.answer.guess, f"{reply.probability:.3f}", name, place, f"{ratio:.2f}"]
        )
    return rows
