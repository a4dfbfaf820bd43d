"""Several experiments on birth places, one per seed, and the parameters that their labs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Annotated, Any

from manyheads.labs.knowledge.experiment import Experiment, Reply, Setting, run_experiment
from manyheads.labs.lab import OnProgress

PeopleCount = Annotated[int, "people with biographies; about half of them there are questions to fine-tune on"]
Cities = Annotated[int, "number of cities"]
Steps = Annotated[int, "steps of pretraining; 0 for none"]
Seeds = Annotated[int, "models, of the seed and the next ones"]
Biographies = Annotated[str, "a file of your own with one biography per line, instead of generated people"]
Questions = Annotated[str, "its questions to fine-tune on: question, tab, place"]
Validation = Annotated[str, "its questions about other people of the biographies"]
FULL = {"people": 200, "cities": 60, "steps": 2500, "seeds": 3}
SMALLEST = {"people": 40, "cities": 20, "steps": 500, "seeds": 1}


def run_seeds(
    settings: Mapping[str, Any], files: Sequence[str], seeds: int, seed: int, progress: OnProgress
) -> list[Experiment]:
    """One experiment per seed; the files are those of the user, or all empty."""
    given = (files[0], files[1], files[2]) if any(files) else None
    return [run_experiment(Setting(**settings, files=given, seed=each), progress) for each in range(seed, seed + seeds)]


def right(replies: Sequence[Reply]) -> list[bool]:
    return [reply.is_right for reply in replies]


def all_replies(experiments: Sequence[Experiment], *, held_out: bool = True) -> list[Reply]:
    """The replies about people in the texts, and, unless told otherwise, about people in none."""
    return [reply for each in experiments for reply in (*each.validation, *(each.held_out if held_out else ()))]


def majority_of(experiments: Sequence[Experiment]) -> float:
    return mean(each.majority_accuracy(each.validation) for each in experiments)
