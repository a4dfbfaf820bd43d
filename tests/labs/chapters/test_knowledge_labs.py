"""The slow labs of the chapter on knowledge: each holds, and fails with its counterexample; and people from files."""

from __future__ import annotations

import gzip

import pytest
from lab_verdicts import check_both_ways, slow_labs

from manyheads.data.builtin import QUESTIONS, STATEMENTS, BiographiesSpec
from manyheads.errors import ManyheadsError
from manyheads.labs.knowledge.experiment import Setting, run_experiment
from manyheads.labs.knowledge.people import generate_people, read_people


@pytest.mark.parametrize("name", slow_labs("knowledge"))
def test_the_claim_holds_and_its_counterexample_fails(name):
    check_both_ways(name)


def write_people(folder, count=24):
    """The files of the assignment: one biography per line, and question, tab, place."""
    spec = BiographiesSpec(people=count, cities=6)
    people = [spec.person(i) for i in range(count)]
    pairs = [f"{QUESTIONS['city'].format(**person)}\t{person['city']}\n" for person in people]
    texts = [f"{form.format(**person)}\n" for person in people for form in STATEMENTS["city"]]
    (folder / "bios.txt").write_text("".join(texts))
    with gzip.open(folder / "train.tsv.gz", "wt") as file:
        file.writelines(pairs[: count // 2])
    (folder / "validation.tsv").write_text("".join(pairs[count // 2 :]))
    return tuple(str(folder / name) for name in ("bios.txt", "train.tsv.gz", "validation.tsv"))


def test_nothing_is_read_about_people_who_are_held_out():
    people = generate_people(40, 10, 3)
    names = [people.subject(question) for question, _ in people.held_out]
    assert len(names) == 20
    assert not any(name in text for name in names for text in people.texts)
    assert all(people.is_in_texts(*pair) for pair in (*people.train, *people.validation))
    assert not any(people.is_in_texts(*pair) for pair in people.held_out)
    groups = [{question for question, _ in pairs} for pairs in (people.train, people.validation, people.held_out)]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 60


def test_files_of_the_same_form_are_read_as_they_are(tmp_path):
    people = read_people(*write_people(tmp_path))
    assert (len(people.train), len(people.validation), len(people.held_out)) == (12, 6, 6)
    assert len(people.texts) == 3 * 18, "the texts about people who are held out are held out"
    assert {people.subject(question) for question, _ in people.train} == {
        question.removeprefix("Where was ").removesuffix(" born?") for question, _ in people.train
    }
    experiment = run_experiment(Setting(files=write_people(tmp_path), steps=3, fine_tuning_steps=3, width=16))
    assert len(experiment.validation) == 6
    assert all(0 < reply.answer.min_token_probability <= 1 for reply in experiment.held_out)


@pytest.mark.parametrize("missing", range(3))
def test_a_missing_file_is_an_error(tmp_path, missing):
    files = list(write_people(tmp_path))
    files[missing] = ["", str(tmp_path / "none.tsv")][missing % 2]
    with pytest.raises(ManyheadsError):
        read_people(*files)
