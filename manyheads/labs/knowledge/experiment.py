"""A small decoder that reads biographies by infilling, is fine-tuned on questions, and answers others."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Annotated, Any

import numpy as np
from torch import Tensor, nn

from manyheads.data.tokenizer import WordsSpec
from manyheads.generate.config import GenerationConfig
from manyheads.generate.generator import TextGenerator
from manyheads.generate.text import GeneratedText
from manyheads.labs.fitting import fit, small_model
from manyheads.labs.knowledge.people import Pair, People, generate_people, read_people
from manyheads.labs.lab import OnProgress, no_progress
from manyheads.model.builder import Model
from manyheads.parts.inputs import pad_rows
from manyheads.tasks.answering import Answer, answer
from manyheads.tasks.batch import IGNORE_INDEX, Batch, SpecialTokens, pad_targets, target_loss
from manyheads.tasks.language import InfillSpec

SPECIAL = SpecialTokens()  # those of every tokenizer trained here
DOT, SYNTHESIZER = "dot", "synthesizer-dense"


@dataclass(frozen=True)
class Setting:
    """What an experiment depends on, its seed included."""

    people: int = 80
    cities: int = 30
    files: tuple[str, str, str] | None = None  # biographies, questions, validation; None for generated people
    width: int = 64
    layers: int = 1
    core: str = DOT
    steps: int = 800  # of pretraining; 0 for none
    fine_tuning_steps: int = 40
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """An answer of a model to a question about a person, and the place that is right."""

    answer: Answer
    place: str

    @property
    def is_right(self) -> bool:
        return self.answer.guess == self.place

    @property
    def probability(self) -> float:
        return self.answer.probability


@dataclass(frozen=True)
class Experiment:
    """A trained model with its tokenizer, the people, and its replies to questions about them."""

    setting: Setting
    people: People
    tokenizer: Any
    model: Model
    validation: tuple[Reply, ...]  # about people in the texts of pretraining, and not of fine-tuning
    held_out: tuple[Reply, ...]  # about people in neither

    def generate(self, questions: Sequence[str]) -> list[GeneratedText]:
        rows = [[SPECIAL.bos, *self.tokenizer.encode(question).ids, SPECIAL.mask] for question in questions]
        config = GenerationConfig(max_new_tokens=12, eos_token_id=(SPECIAL.eos,), logprobs=0)
        texts = dict(TextGenerator(self.model, self.tokenizer).generate_texts(rows, config))
        return [texts[i][0] for i in range(len(rows))]

    def replies(self, pairs: Sequence[Pair]) -> tuple[Reply, ...]:
        texts = self.generate([question for question, _ in pairs])
        return tuple(
            Reply(answer(question, text, threshold=0.0), place)
            for (question, place), text in zip(pairs, texts, strict=True)
        )

    def majority_accuracy(self, replies: Sequence[Reply]) -> float:
        return accuracy([reply.place == self.people.majority() for reply in replies])

    def after_fine_tuning(self, pairs: Sequence[Pair], steps: int) -> Experiment:
        """The experiment with a copy of the model that is fine-tuned on more pairs."""
        model = copy.deepcopy(self.model)
        fine_tune(model, self.tokenizer, pairs, steps, np.random.default_rng(self.setting.seed), no_progress)
        return Experiment(self.setting, self.people, self.tokenizer, model, self.validation, self.held_out)


def accuracy(right: Sequence[bool]) -> float:
    return sum(right) / len(right) if right else 0.0


EXPERIMENTS: dict[Setting, Experiment] = {}  # several labs look at the same model


def run_experiment(setting: Setting, progress: OnProgress = no_progress) -> Experiment:
    """Trains the model of a setting, or returns the one of this process if the people are generated."""
    if setting not in EXPERIMENTS or setting.files:
        EXPERIMENTS[setting] = train(setting, progress)
    return EXPERIMENTS[setting]


@dataclass(frozen=True)
class PeopleRuns:
    """Several experiments, one per seed: the flags that the labs about people share."""

    people: Annotated[int, "people with biographies; about half of them there are questions to fine-tune on"] = 80
    cities: Annotated[int, "number of cities"] = 30
    steps: Annotated[int, "steps of pretraining; 0 for none"] = 800
    seeds: Annotated[int, "models, of the seed and the next ones"] = 1
    biographies: Annotated[str, "a file of your own with one biography per line, instead of generated people"] = ""
    questions: Annotated[str, "its questions to fine-tune on: question, tab, place"] = ""
    validation: Annotated[str, "its questions about other people of the biographies"] = ""

    def run(self, seed: int, progress: OnProgress, **changes: Any) -> list[Experiment]:
        """The experiments with these flags; the changes are fields of `Setting`."""
        paths = self.biographies, self.questions, self.validation
        setting = Setting(self.people, self.cities, files=paths if any(paths) else None, steps=self.steps)
        seeds = range(seed, seed + self.seeds)
        return [run_experiment(replace(setting, **changes, seed=each), progress) for each in seeds]


ONE_SEED, THREE_SEEDS = PeopleRuns(), PeopleRuns(seeds=3)  # defaults of labs
FULL = {"people": 200, "cities": 60, "steps": 2500, "seeds": 3}
SMALLEST = {"people": 40, "cities": 20, "steps": 500, "seeds": 1}


def right(replies: Sequence[Reply]) -> list[bool]:
    return [reply.is_right for reply in replies]


def all_replies(experiments: Sequence[Experiment], *, held_out: bool = True) -> list[Reply]:
    """The replies about people in the texts, and, unless told otherwise, about people in none."""
    return [reply for each in experiments for reply in (*each.validation, *(each.held_out if held_out else ()))]


def majority_of(experiments: Sequence[Experiment]) -> float:
    return mean(each.majority_accuracy(each.validation) for each in experiments)


def train(setting: Setting, progress: OnProgress) -> Experiment:
    people = (
        read_people(*setting.files) if setting.files else generate_people(setting.people, setting.cities, setting.seed)
    )
    pairs = (*people.train, *people.validation, *people.held_out)
    tokenizer = WordsSpec().make((*people.texts, *(text for pair in pairs for text in pair)))
    texts = [np.array(tokenizer.encode(text).ids) for text in people.texts]
    longest = max(len(tokenizer.encode(text).ids) for text in (*people.texts, *map(" ".join, pairs)))
    model = make_model(setting, tokenizer.get_vocab_size(), longest + 4)
    rng = np.random.default_rng(setting.seed)
    if setting.steps:
        task, order = InfillSpec(block_size=max(48, 4 * longest)), endless(len(texts), rng)
        fit(
            model,
            lambda step: task.batch([(texts[next(order)],) for _ in range(32)], SPECIAL, rng),
            mean_loss,
            steps=setting.steps,
            lr=7e-3,
            progress=progress,
            name="pretraining",
        )
    fine_tune(model, tokenizer, people.train, setting.fine_tuning_steps, rng, progress)
    bare = Experiment(setting, people, tokenizer, model, (), ())
    return Experiment(setting, people, tokenizer, model, bare.replies(people.validation), bare.replies(people.held_out))


def make_model(setting: Setting, vocab: int, length: int) -> Model:
    core = {"kind": setting.core} | ({"length": length} if setting.core != DOT else {})
    return small_model(
        vocab=vocab,
        seed=setting.seed,
        layers=setting.layers,
        width=setting.width,
        core=core,
        position={"kind": "learned", "length": length},
        feedforward={"kind": "mlp", "hidden": setting.width},
    )


def fine_tune(
    model: Model, tokenizer: Any, pairs: Sequence[Pair], steps: int, rng: np.random.Generator, progress: OnProgress
) -> None:
    """Trains on <s> question <mask> place </s>, with the place and its end in the loss."""
    rows = [(tokenizer.encode(question).ids, tokenizer.encode(place).ids) for question, place in pairs]
    order, size = endless(len(rows), rng), min(64, len(rows))

    def batch(step: int) -> Batch:
        sample = [rows[next(order)] for _ in range(size)]
        inputs = [[SPECIAL.bos, *question, SPECIAL.mask, *place] for question, place in sample]
        targets = [[IGNORE_INDEX] * (len(question) + 1) + [*place, SPECIAL.eos] for question, place in sample]
        return Batch(pad_rows(inputs, SPECIAL.pad), pad_targets(targets))

    fit(model, batch, mean_loss, steps=steps, lr=2e-3, warmup_steps=5, progress=progress, name="fine-tuning")


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss = target_loss(model, batch)  # type: ignore[arg-type]
    return loss.sum / loss.count


def endless(count: int, rng: np.random.Generator) -> Iterator[int]:
    """All indices in a random order, again and again."""
    while True:
        yield from rng.permutation(count).tolist()
