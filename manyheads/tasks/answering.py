"""Answers to questions: of a model if it is confident, else of a database, each labelled with its source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import InputError, UnsupportedError, UsageError, one_line
from manyheads.files.database import AnswerDatabase
from manyheads.files.write import append_atomic, explain_write_errors
from manyheads.generate.config import GenerationConfig, generation_config
from manyheads.generate.text import GeneratedText
from manyheads.spec import Tree
from manyheads.tasks.prediction import PredictOptions, apply_to_each
from manyheads.tasks.task import TaskSpec, task_of

Source = Literal["model", "database", "none"]


@dataclass(frozen=True)
class Answer:
    """An answer with its source; `guess` and the probabilities are those of the model, whichever source was used."""

    question: str
    text: str | None  # None if neither the model nor the database has an answer
    source: Source
    guess: str
    probability: float  # of the guess and its end, Π p(token)
    min_token_probability: float  # the smallest p(token)

    def to_tree(self) -> Tree:
        return {
            "text": self.question,
            "answer": self.text,
            "source": self.source,
            "model_answer": self.guess,
            "probability": self.probability,
            "min_token_probability": self.min_token_probability,
        }


def answer(
    question: str, generated: GeneratedText, *, threshold: float, database: AnswerDatabase | None = None
) -> Answer:
    """Takes the generated text if its probability is at least the threshold, else what the database has."""
    logprobs, guess = generated.logprobs or [], generated.text.strip()
    probability, smallest = math.exp(sum(logprobs)), math.exp(min(logprobs, default=0.0))
    model_answer = Answer(question, guess, "model", guess, probability, smallest)
    if guess and probability >= threshold:
        return model_answer
    answer = database.look_up(question) if database is not None else None
    return replace(model_answer, text=answer, source="none" if answer is None else "database")


@dataclass(frozen=True)
class Answerer:
    """A checkpoint that answers questions, with a threshold and perhaps a database."""

    checkpoint: Checkpoint
    task: TaskSpec
    generation: GenerationConfig
    threshold: float
    database: AnswerDatabase | None = None

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        threshold: float,
        database: Path | None = None,
        max_new_tokens: int | None = None,
    ) -> Answerer:
        """Raises if the model generates no texts, or the database cannot be read."""
        check_threshold(threshold)
        checkpoint.check_reads_text()
        task = task_of(checkpoint)
        if not task.generates_text or checkpoint.tokenizer is None:
            raise UnsupportedError(
                f"this needs a checkpoint that generates text and has a tokenizer; the task of this one is {task.kind}"
            )
        generation = generation_config(checkpoint.generation_settings, logprobs=0, max_new_tokens=max_new_tokens)
        answers = None if database is None else AnswerDatabase(database)
        if answers is not None:
            with answers.connect():
                pass
        return cls(checkpoint, task, generation, threshold, answers)

    def answers(
        self, questions: Sequence[str], errors: dict[int, InputError] | None = None
    ) -> Iterator[tuple[int, Answer]]:
        """Yields the index and the answer for each question; one that cannot be read raises, or is in `errors`."""
        options = PredictOptions(self.generation)
        encoded = apply_to_each(
            lambda texts: self.task.encode_checked(self.checkpoint, options, texts), questions, errors
        )
        index = list(encoded)
        rows = [ids for ids, _ in encoded.values()]
        for k, (best, *_) in self.checkpoint.text_generator.generate_texts(rows, self.generation):
            question = questions[index[k]]
            yield index[k], answer(question, best, threshold=self.threshold, database=self.database)

    # what `manyheads ask` needs for many lines

    def results(self, texts: Sequence[str], errors: dict[int, InputError]) -> Iterator[tuple[int, Tree]]:
        for i, result in self.answers(texts, errors):
            yield i, result.to_tree()

    def format_line(self, result: Tree) -> str:
        columns = one_line(result["answer"] or ""), result["source"], f"{result['probability']:.4f}"
        return "\t".join(columns)


def check_threshold(threshold: float) -> None:
    if not 0 <= threshold <= 1:
        raise UsageError(f"the threshold is {threshold:g}, expected a probability from 0 to 1")


def queue_pair(path: Path, question: str, text: str) -> None:
    """Appends a question and its answer to a .tsv, which the data kind `pairs` reads; white space becomes spaces."""
    columns = [" ".join(one_line(column).split()) for column in (question, text)]
    if not all(columns):
        raise UsageError("a question or an answer is empty, so there is nothing to train on")
    with explain_write_errors(path):
        append_atomic(path, ("\t".join(columns) + "\n").encode(), create=True)
