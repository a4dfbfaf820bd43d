"""Built-in data: the same in every process, and no input in two splits."""

from __future__ import annotations

import pickle
import subprocess
import sys
from datetime import date

import numpy as np
import pytest
from data_files import load_data, make_tokenizer
from raising import raises

from manyheads.data.builtin import LANGUAGES, date_patterns, days_in, is_ambiguous
from manyheads.data.tokenizer import special_ids


def test_no_day_is_in_two_splits_in_any_language():
    days = {split: set(days_in(split)) for split in ("train", "validation", "test")}
    assert sum(map(len, days.values())) == len(set().union(*days.values()))
    assert sum(map(len, days.values())) == (date(2101, 1, 1) - date(1900, 1, 1)).days
    corpus = load_data("dates", count=2000, validation_count=300)
    for split, rows in corpus.splits.items():
        assert {date.fromisoformat(target).toordinal() for _, target in rows} <= days[split]


def test_no_text_means_two_days():
    """A text without a tag means one day, unless it is ambiguous, and then a tag makes it mean one."""
    meanings = {}
    for year in (1911, 2016):  # their digits can be days and months too
        days = [
            date.fromordinal(day) for day in range(date(year, 1, 1).toordinal(), date(year, 12, 31).toordinal() + 1)
        ]
        for value in days:
            for form, tag in (pattern for patterns in date_patterns(LANGUAGES) for pattern in patterns):
                text = form(value)
                assert str(year) in text
                meanings.setdefault(text, set()).add(value)
                if tag:
                    meanings.setdefault(f"{tag} {text}", set()).add(value)
    assert all(len(days) == 1 for text, days in meanings.items() if text.startswith("<"))
    untagged = [(text, days) for text, days in meanings.items() if not text.startswith("<")]
    for text, days in [*untagged[::29], *((text, days) for text, days in untagged if len(days) > 1)]:
        assert is_ambiguous(text, min(days), LANGUAGES) == (len(days) > 1), text
    assert len(LANGUAGES) == len(set(LANGUAGES)) == 20


def test_a_tag_is_left_out_of_most_dates_that_do_not_need_it():
    tagged = untagged = 0
    for source, target in load_data("dates", count=1500).train:
        tag, _, text = source.rpartition("> ")
        if not any(letter.isalpha() for letter in text):
            needed = is_ambiguous(text, date.fromisoformat(target), LANGUAGES)
            assert tag or not needed, source
            tagged, untagged = tagged + bool(tag and not needed), untagged + (not tag)
    assert 0 < tagged < untagged / 2


def test_dates_are_the_same_each_time_and_in_any_order():
    one, two = load_data("dates", count=50), load_data("dates", count=100)
    assert [one.train[i] for i in reversed(range(50))][::-1] == list(one.train) == two.train[:50] == one.train[-50:]
    assert load_data("dates", seed=1).train[:5] != one.train[:5]
    assert pickle.loads(pickle.dumps(one.train))[3] == one.train[3]
    with pytest.raises(IndexError):
        one.train[50]
    with raises("data.invalid", "'xx'"):
        load_data("dates", languages=["de", "xx"])


def test_the_words_of_dates_are_few_and_validation_days_need_no_others():
    corpus = load_data("dates")
    words = make_tokenizer("words", (text for row in corpus.train for text in row))
    assert words.get_vocab_size() < 1000
    for source, target in corpus.validation:
        ids = words.encode(source).ids
        assert special_ids(words)["unk"] not in ids
        assert words.decode(ids) == source
        assert words.decode(words.encode(target).ids) == target
    assert len(words.encode("2016-05-03").ids) == 10


FUNCTIONS = {
    "copy": lambda source: source,
    "reverse": lambda source: source[::-1],
    "sort": lambda source: sorted(source),
    "lookup": lambda source: [source[source[:-1:2].index(source[-1]) * 2 + 1]],
}


@pytest.mark.parametrize("function", [*FUNCTIONS, "dyck"])
def test_targets_of_sequences_follow_from_their_sources(function):
    settings = {"function": function, "symbols": 20, "max_length": 8, "count": 300}
    corpus = load_data("sequence", **settings, validation_count=100)
    for source, target in (row for rows in corpus.splits.values() for row in rows):
        if function == "dyck":
            stack = []
            for word in source.split() + target.split():
                assert word.islower() or stack.pop() == word.lower()
                if word.islower():
                    stack.append(word)
            assert not stack
        else:
            assert target.split() == FUNCTIONS[function](source.split())
    train, validation, test = ({source for source, _ in rows} for rows in corpus.splits.values())
    assert not train & (validation | test)
    assert not validation & test
    assert list(corpus.train) == list(load_data("sequence", **settings).train)


def test_sequences_too_few_to_split_are_refused():
    with raises("data.empty", "1 symbols", "max_length 2"):
        load_data("sequence", symbols=1, max_length=2)
    with raises("data.invalid", "lookup", "10", "3 symbols"):
        load_data("sequence", function="lookup", symbols=3)
    with raises("data.invalid", "min_length is 9", "max_length is 3"):
        load_data("sequence", min_length=9, max_length=3)


@pytest.mark.parametrize("subset", ["language", "summary", "retrieval", "classify"])
def test_the_splits_of_the_standard_library_share_nothing(subset):
    corpus = load_data("stdlib", subset=subset)
    splits = [set(rows) for rows in corpus.splits.values()]
    train, validation, test = ({row[0] for row in rows} for rows in splits)
    assert all(len(row) == len(corpus.fields) and all(row) for rows in splits for row in rows)
    assert min(map(len, splits)) > 10
    assert not train & (validation | test)
    if subset == "classify":
        assert len(corpus.labels()) > 5
        all_training_code = "\n".join(map(without_indents, train))
        long = [without_indents(code) for code in validation if code.count("\n") > 5]
        assert len(long) > 10
        assert not [code for code in long if code in all_training_code], (
            "a validation function is within a training one"
        )
    if subset == "summary":
        assert not any(f'"""{summary}' in code for code, summary in corpus.train)
        assert any(code.startswith("def dumps(obj") for rows in splits for code, _ in rows)


def without_indents(code):
    return "\n".join(line.strip() for line in code.split("\n"))


def test_digits_are_images_between_0_and_1():
    corpus = load_data("digits")
    assert [len(rows) for rows in corpus.splits.values()] == [1257, 180, 360]
    images = np.stack([image for image, _ in corpus.train])
    assert images.shape == (1257, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert corpus.labels() == tuple("0123456789")


def test_biographies_answer_the_questions_about_every_person():
    texts = load_data("biographies", people=60, texts_per_person=32)
    questions = load_data("biographies", people=60, subset="questions")
    train = list(texts.train)  # which are made as they are read
    assert not set(train) & set(texts.validation)
    names, about = [set(), set(), set()], {}
    for split_names, rows in zip(names, questions.splits.values(), strict=True):
        for question, answer in rows:
            words = [word.strip("?") for word in question.split() if word[0].isupper()]
            name = " ".join(word for word in words if word not in ("Where", "When", "What"))
            split_names.add(name)
            if name not in about:
                about[name] = [text for (text,) in train if name in text]
            assert any(answer in text for text in about[name])
    assert sum(map(len, names)) == len(set().union(*names)) == 60


def test_the_room_imports_neither_torch_nor_optional_packages():
    code = """
import sys
for name in ("source", "builtin", "images", "tokenizer", "order", "tokenized"):
    __import__(f"manyheads.data.{name}")
assert not {"torch", "babel", "sklearn"} & set(sys.modules)
sys.modules["babel"] = sys.modules["sklearn.datasets"] = None
from manyheads.spec import SLOTS
for kind in ("dates", "digits"):
    try:
        SLOTS["data"].from_config(kind).load()
    except ValueError as error:
        print(error.code, error.hint)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    extras = ["usage.missing-extra pip install 'manyheads[demo]'", "usage.missing-extra pip install 'manyheads[eval]'"]
    assert done.stdout.splitlines() == extras
