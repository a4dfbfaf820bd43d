"""Laws of data: every row once, the same each time; nothing seen that was held out; every fault of a file said in one sentence."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import resource
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from command import FORKS, run
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from trees import SHE, conllu

from manyheads.data import pictures as _pictures  # noqa: F401  (fills the slot)
from manyheads.data import prepared
from manyheads.data.builtin import LANGUAGES, date_forms, days_of, written
from manyheads.data.order import packed, permuted, plan
from manyheads.data.prepared import Cut, Encoded, Rows, prepare
from manyheads.data.source import Corpus, DataError, Lines, Made
from manyheads.data.tokens import SPECIAL, special_ids
from manyheads.evaluation import evaluate
from manyheads.spec import SLOTS, SpecError, parse, to_toml, to_tree
from manyheads.train.loop import train
from manyheads.train.run import made_ready, read_run


def data(kind, **fields):
    return parse(SLOTS["data"].kinds[kind], fields).load()


def tokenizer(kind, texts=(), **fields):
    return parse(SLOTS["tokenizer"].kinds[kind], fields).make(texts)


def file(folder, name, content):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


# --- order ---


@given(st.integers(-(2**70), 2**70), st.integers(0, 1000), st.integers(0, 3000))
def test_shuffling_is_a_permutation_with_random_access(seed, epoch, count):
    whole = permuted(seed, epoch, np.arange(count), count)
    assert sorted(whole.tolist()) == list(range(count))
    for index in {0, count // 2, count - 1} & set(range(count)):
        assert permuted(seed, epoch, index, count).item() == whole[index]


def test_shuffling_depends_on_seed_and_epoch_and_looks_random():
    first, second, third = (permuted(seed, epoch, np.arange(5000), 5000) for seed, epoch in ((1, 0), (1, 1), (2, 0)))
    for one, other in ((first, second), (first, third), (first, np.arange(5000))):
        assert (one == other).sum() < 12  # one match is expected
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.06
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.06
    with pytest.raises(ValueError, match="outside"):
        permuted(1, 0, 5, 5)


def test_a_huge_count_needs_no_memory():
    assert 0 <= permuted(1, 0, 10**15, 10**17).item() < 10**17


def padded(lengths, batches):
    sizes = lengths.reshape(len(lengths), -1) if len(lengths) else lengths
    return [len(batch) * int(sizes[batch].max(0).sum()) for batch in batches]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=300), st.integers(120, 500), st.integers(1, 400), st.integers(0, 9)
)
def test_batches_hold_every_row_once_within_the_budget(pairs, tokens, pool, epoch):
    for lengths in (np.array(pairs, int).reshape(-1, 2), np.array(pairs, int).reshape(-1, 2)[:, 0]):
        batches = plan(lengths, 7, epoch, tokens=tokens, pool=pool)
        assert sorted(np.concatenate([*batches, np.empty(0, int)]).tolist()) == list(range(len(lengths)))
        assert all(size <= tokens for size in padded(np.maximum(lengths, 1), batches))
        again = plan(lengths.copy(), 7, epoch, tokens=tokens, pool=pool)
        assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]


@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
def test_padding_wastes_less_than_a_tenth(tokens):
    random = np.random.default_rng(0)
    source = np.clip(random.lognormal(2.7, 0.5, 30_000).astype(int), 1, 256)
    target = np.clip((source * random.lognormal(0, 0.2, 30_000)).astype(int), 1, 256)
    for lengths in (source, np.stack((source, target), 1)):
        waste = 1 - lengths.sum() / sum(padded(lengths, plan(lengths, 0, 0, tokens=tokens)))
        assert waste < 0.1


def test_batches_come_in_random_order_and_others_every_epoch():
    lengths = np.arange(1, 2001) % 50 + 1
    one, two = (plan(lengths, 0, epoch, tokens=500) for epoch in (0, 1))
    assert {tuple(sorted(batch)) for batch in one} != {tuple(sorted(batch)) for batch in two}
    means = np.array([lengths[batch].mean() for batch in one])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3


def test_a_row_beyond_the_budget_is_named():
    lengths = np.array([3, 900, 4])
    with pytest.raises(DataError, match="row 1 has 900 tokens, and a batch may have 100"):
        plan(lengths, 0, 0, tokens=100)
    assert sorted(np.concatenate(plan(lengths, 0, 0, tokens=100, longest=50)).tolist()) == [0, 1, 2]


@given(st.lists(st.integers(0, 100), max_size=200), st.integers(1, 40), st.integers(1, 90))
def test_packing_holds_every_token_once(lengths, length, pool):
    rows = packed(np.array(lengths, int), length, 3, 1, pool=pool)
    assert all((row[:, 2] - row[:, 1]).min() > 0 and (row[:, 2] - row[:, 1]).sum() <= length for row in rows)
    pieces = sorted(tuple(piece) for row in rows for piece in row.tolist())
    for document, count in enumerate(lengths):
        places = [place for which, start, stop in pieces if which == document for place in range(start, stop)]
        assert places == list(range(count))
        assert count > length or sum(which == document for which, _, _ in pieces) == min(count, 1)  # what fits is not cut


def test_packing_wastes_less_than_a_tenth():
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1, 20_000).astype(int), 1, 5000)
    rows = packed(lengths, 256, 0, 0)
    assert 1 - lengths.sum() / (256 * len(rows)) < 0.1
    cuts = [{tuple(piece) for row in packed(lengths, 256, 0, epoch) for piece in row.tolist()} for epoch in (0, 1)]
    assert cuts[0] != cuts[1]


# --- what is built in ---


def test_days_held_out_are_never_seen_in_any_language():
    days = {split: set(days_of(split)) for split in ("train", "validation", "test")}
    assert sum(map(len, days.values())) == len(set().union(*days.values())) == (date(2101, 1, 1) - date(1900, 1, 1)).days
    corpus = data("dates", count=2000, held_out=300)
    for split, rows in corpus.splits.items():
        assert {date.fromisoformat(target).toordinal() for _, target in rows} <= days[split]


def test_no_text_means_two_days():
    meaning = {}
    for year in (1911, 2016):  # their digits can be days and months too
        for day in range(date(year, 1, 1).toordinal(), date(year, 12, 31).toordinal() + 1):
            for source, target in (written(day, *form) for forms in date_forms(LANGUAGES) for form in forms):
                assert meaning.setdefault(source, target) == target, source
                assert str(year) in source
    assert len(LANGUAGES) == len(set(LANGUAGES)) == 20


def test_dates_are_the_same_each_time_and_in_any_order():
    one, two = data("dates", count=50), data("dates", count=100)
    assert [one.train[i] for i in reversed(range(50))][::-1] == list(one.train) == two.train[:50] == one.train[-50:]
    assert data("dates", seed=1).train[:5] != one.train[:5]
    assert pickle.loads(pickle.dumps(one.train))[3] == one.train[3]
    with pytest.raises(IndexError):
        one.train[50]
    with pytest.raises(DataError, match="no language 'xx'"):
        data("dates", languages=["de", "xx"])


def test_words_of_dates_are_few_and_none_of_the_unseen_days_needs_another():
    corpus = data("dates")
    words = tokenizer("words", (text for row in corpus.train for text in row))
    assert words.get_vocab_size() < 1000
    for source, target in corpus.validation:
        found = words.encode(source)
        assert special_ids(words).unknown not in found.ids
        assert words.decode(found.ids) == source
        assert words.decode(words.encode(target).ids) == target
    assert len(words.encode("2016-05-03").ids) == 10


ANSWERS = {
    "copy": lambda source: source,
    "reverse": lambda source: source[::-1],
    "sort": lambda source: sorted(source),
    "lookup": lambda source: [source[source[:-1:2].index(source[-1]) * 2 + 1]],
}


@pytest.mark.parametrize("task", [*ANSWERS, "dyck"])
def test_sequences_are_what_their_task_says(task):
    corpus = data("sequence", task=task, vocabulary=20, length=8, count=300, held_out=100)
    for source, target in (row for rows in corpus.splits.values() for row in rows):
        given, wanted = source.split(), target.split()
        if task == "dyck":
            opened = []
            for word in given + wanted:
                assert word.islower() or opened.pop() == word.lower()
                if word.islower():
                    opened.append(word)
            assert not opened
        else:
            assert wanted == ANSWERS[task](given)
    sources = [{source for source, _ in rows} for rows in corpus.splits.values()]
    assert not sources[0] & (sources[1] | sources[2])
    assert not sources[1] & sources[2]
    assert list(corpus.train) == list(data("sequence", task=task, vocabulary=20, length=8, count=300).train)


def test_a_task_too_small_to_split_says_so():
    with pytest.raises(DataError, match="too few different sources"):
        data("sequence", vocabulary=1, length=2)
    with pytest.raises(DataError, match="lookup needs a key"):
        data("sequence", task="lookup", vocabulary=3)


@pytest.mark.parametrize("task", ["language", "summary", "retrieval", "classify"])
def test_the_standard_library_keeps_its_splits_apart(task):
    corpus = data("stdlib", task=task)
    parts = [set(rows) for rows in corpus.splits.values()]
    given = [{row[0] for row in rows} for rows in parts]
    assert all(len(row) == len(corpus.fields) and all(row) for rows in parts for row in rows)
    assert min(map(len, parts)) > 10
    assert not given[0] & (given[1] | given[2])
    if task == "classify":
        assert len(corpus.labels()) > 5
        learned = "\n".join("\n".join(line.strip() for line in code.split("\n")) for code in given[0])
        long = ["\n".join(line.strip() for line in code.split("\n")) for code in given[1] if code.count("\n") > 5]
        assert len(long) > 10
        assert not [code for code in long if code in learned], "no function stands within one that is learned from"
    if task == "summary":
        assert not any(f'"""{said}' in code for code, said in corpus.train)
        assert any(code.startswith("def dumps(obj") for rows in parts for code, _ in rows)


def test_digits_are_pictures_between_0_and_1():
    corpus = data("digits")
    assert [len(rows) for rows in corpus.splits.values()] == [1257, 180, 360]
    pictures = np.stack([picture for picture, _ in corpus.train])
    assert pictures.shape == (1257, 8, 8)
    assert (pictures.min(), pictures.max()) == (0, 1)
    assert corpus.labels() == tuple("0123456789")


def test_biographies_answer_the_questions_about_everyone():
    told, asked = data("biographies", people=60, tellings=32), data("biographies", people=60, task="questions")
    assert not set(told.train) & set(told.validation)
    names, about = [set(), set(), set()], {}
    for found, rows in zip(names, asked.splits.values(), strict=True):
        for question, answer in rows:
            name = " ".join(word.strip("?") for word in question.split() if word[0].isupper() and word not in ("Where", "When", "What"))
            found.add(name)
            about[name] = about[name] if name in about else [text for (text,) in told.train if name in text]
            assert any(answer in text for text in about[name])
    assert sum(map(len, names)) == len(set().union(*names)) == 60


# --- the user's own files ---


def test_texts_by_blank_line_line_or_file(tmp_path):
    path = file(tmp_path, "a.txt", "one\ntwo\n \nthree\n\n\nfour\n")
    rows = lambda **fields: sorted(row[0] for part in data("text", path=path, **fields).splits.values() for row in part)  # noqa: E731
    assert rows() == ["four", "one\ntwo", "three"]
    assert rows(document="line") == ["four", "one", "three", "two"]
    alone = data("text", path=path, document="file")  # its end is held out
    assert alone.train[0][0] + alone.validation[0][0] == "one\ntwo\n \nthree\n\n\nfour"
    file(tmp_path, "b.txt.gz", gzip.compress(b"five"))
    file(tmp_path, "c.md", "not read")
    found = data("text", path=str(tmp_path), document="file")
    assert sorted(row[0] for part in found.splits.values() for row in part) == ["five", "one\ntwo\n \nthree\n\n\nfour"]


def test_what_is_held_out_depends_on_no_order_and_repeats_stay_together(tmp_path):
    lines = [f"question {i % 180}\tanswer {i}" for i in range(200)]
    first = data("pairs", path=file(tmp_path, "a.tsv", "\n".join(lines)))
    second = data("pairs", path=file(tmp_path, "b.tsv", "\n".join(reversed(lines))))
    assert set(first.validation) == set(second.validation)
    assert len(first.validation) == 10
    assert not {row[0] for row in first.train} & {row[0] for row in first.validation}
    assert len(first.train) + len(first.validation) == 200


def test_columns_by_name_by_number_and_by_default(tmp_path):
    tsv = file(tmp_path, "a.tsv", "id\ttarget\tsource\n1\tz\ta\n2\ty\tb\n3\tx\tc\n")
    rows = lambda **fields: sorted(row for part in data("pairs", **fields).splits.values() for row in part)  # noqa: E731
    assert rows(path=tsv) == [("a", "z"), ("b", "y"), ("c", "x")]
    assert rows(path=tsv, fields=["id", "source"]) == [("1", "a"), ("2", "b"), ("3", "c")]
    assert rows(path=tsv, fields=[1, 0])[-1] == ("z", "1")
    plain = file(tmp_path, "no name.data.gz", gzip.compress(b"a\tz\nb\ty\n"))
    assert rows(path=plain) == [("a", "z"), ("b", "y")]
    lines = file(tmp_path, "odd", '{"source": "a", "target": "z", "more": 1}\n\n{"target": "y", "source": "b"}\n')
    assert rows(path=lines) == [("a", "z"), ("b", "y")]
    labels = data(
        "labels", path=file(tmp_path, "l.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": true}\n{"text": "c", "label": "x"}')
    )
    assert labels.labels() == ("1", "true", "x")
    own = data("pairs", path=tsv, validation=plain, test=plain)
    assert (len(own.train), len(own.validation), len(own.test)) == (3, 2, 2)


FAULTS = {
    "a column missing": ("pairs", "a.tsv", "source\ttargte\na\tb\n", {}, "line 1 has no column 'target': did you mean 'targte'"),
    "a name that is not there": ("pairs", "a.tsv", "a\tb\nc\td\n", {"fields": ["en", "de"]}, "line 1 has no column 'en'"),
    "a field missing": ("queries", "a.jsonl", '{"query": "a", "doc": "b"}', {}, "line 1 has no field 'document'"),
    "a short row": ("pairs", "a.tsv", "a\tb\nc\n", {}, "line 2 has 1 columns, expected at least 2"),
    "no JSON": ("pairs", "a.jsonl", "{}}", {}, "line 1 is not JSON"),
    "deep JSON": ("pairs", "a.jsonl", "[" * 100_000, {}, "line 1 is not JSON"),
    "no object": ("pairs", "a.jsonl", "[1]", {}, "expected one object a line"),
    "a number for a text": ("pairs", "a.jsonl", '{"source": 1, "target": "b"}', {}, "source holds 1, expected a text"),
    "half a pair": ("pairs", "a.jsonl", '{"source": "\\ud800", "target": "b"}', {}, "half a surrogate pair"),
    "latin-1": ("text", "a.txt", b"ab\r\ncaf\xe9\n", {}, r"line 2 is not UTF-8 \(0xe9\) at byte 7"),
    "latin-1 after a mark": ("text", "a.txt", b"\xef\xbb\xbfab\ncaf\xe9\n", {}, r"line 2 is not UTF-8 \(0xe9\) at byte 9"),
    "latin-1, packed": ("text", "a.gz", gzip.compress(b"ab\ncaf\xe9"), {}, r"line 2 is not UTF-8 \(0xe9\) at byte 6"),
    "latin-1 between returns": ("text", "a.txt", b"a\rb\rcaf\xe9\n", {}, r"line 3 is not UTF-8 \(0xe9\) at byte 7"),
    "surrogates": ("text", "a.txt", b"a\xed\xa0\x80", {}, "line 1 is not UTF-8"),
    "UTF-16": ("text", "a.txt", "hello".encode("utf-16"), {}, "line 1 is not UTF-8 .* at byte 0"),
    "UTF-16 without a mark": ("text", "a.txt", "hello".encode("utf-16-le"), {}, "line 1 holds a NUL at byte 1"),
    "empty": ("text", "a.txt", b"", {}, "holds no texts: it is empty or blank"),
    "blank": ("pairs", "a.tsv", " \n\n\t\r\n", {}, "holds no pairs"),
    "only a mark": ("text", "a.txt", b"\xef\xbb\xbf", {}, "holds no texts"),
    "one pair": ("pairs", "a.tsv", "a\tb\n", {}, "1 pairs, 1 of them different: too few to hold one out"),
    "always the same": ("pairs", "a.tsv", "a\tb\n" * 50, {}, "50 pairs, 1 of them different"),
    "one short text": ("text", "a.txt", "a", {}, "one text of 1 characters"),
    "a long line": ("text", "a.txt", "ok\n" + "x" * 101, {"longest_line": 100}, "line 2 is longer than 100 characters"),
    "a very long line": ("text", "a.txt", "ok\n" + "x" * 1000, {"longest_line": 100}, "line 2 is longer than 100 characters"),
    "a line cut by reading": ("text", "a.txt", "ok\n" + "x\r" * 1000, {"longest_line": 100}, "line 2 is longer than 100 characters"),
    "a bomb": ("text", "a.gz", gzip.compress(b"0123456789abcde\n" * (1 << 17)), {}, "too many to be text"),
    "a broken archive": ("text", "a.gz", gzip.compress(os.urandom(1000).hex().encode())[:-20], {}, "broken gzip file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_a_file_is_one_sentence_that_names_its_place(fault, tmp_path):
    kind, name, content, fields, sentence = FAULTS[fault]
    path = file(tmp_path, name, content)
    with pytest.raises(DataError, match=sentence) as found:
        data(kind, path=path, **fields)
    assert str(path) in str(found.value)
    assert "\n" not in str(found.value)
    assert found.value.exit_code == 3


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        data("text", path=str(tmp_path / "none.txt"))
    with pytest.raises(DataError, match="without any .txt"):
        data("text", path=str(tmp_path))
    with pytest.raises(DataError, match="is a folder"):
        data("pairs", path=str(tmp_path))
    with pytest.raises(SpecError, match="held_out"):
        data("text", path="x", held_out=0.0)


def test_what_is_not_text_is_mended_or_skipped_and_counted(tmp_path):
    path = file(tmp_path, "a.txt", b"caf\xe9\none\ntwo\x00\nthree \xef\xbf\xbd\n")
    mended, skipped = (data("text", path=path, document="line", encoding_errors=choice) for choice in ("replace", "skip"))
    of = lambda corpus: sorted(row[0] for part in corpus.splits.values() for row in part)  # noqa: E731
    assert of(mended) == ["caf�", "one", "three �", "two�"]
    assert of(skipped) == ["one", "three �"]
    assert "2 lines mended" in mended.about
    assert "2 lines skipped" in skipped.about
    path = file(
        tmp_path,
        "a.jsonl",
        '{"source": "\\ud800x", "target": "b"}\n{"source": "c", "target": "d"}\n{"source": "\\ud83d\\ude00", "target": "d"}',
    )
    assert sorted(row for part in data("pairs", path=path, encoding_errors="replace").splits.values() for row in part)[-2:] == [
        ("�x", "b"),
        ("😀", "d"),
    ]
    assert "1 lines skipped" in data("pairs", path=path, encoding_errors="skip").about


def test_the_same_tokens_whatever_ends_a_line(tmp_path):
    text = "\ufeffone\ntwo\n\nthree \ufeff four\n\nfive"
    corpora = [data("text", path=file(tmp_path, f"{i}.txt", text.replace("\n", end))) for i, end in enumerate(("\n", "\r\n", "\r"))]
    rows = [list(corpus.train) + list(corpus.validation) for corpus in corpora]
    assert rows[0] == rows[1] == rows[2]
    assert ("one\ntwo",) in rows[0]
    assert ("three \ufeff four",) in rows[0]  # only the first is a mark


def test_a_line_without_end_takes_bounded_memory(tmp_path):
    path = tmp_path / "endless.txt"
    with path.open("wb") as handle:
        handle.truncate(1 << 30)
    code = (
        "import sys\nfrom manyheads.data.source import TextSpec\n"
        "try: TextSpec(path=sys.argv[1]).load()\nexcept ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (700 << 20, 700 << 20)),
    )  # fmt: skip
    assert "line 1 is longer than 16,777,216 characters" in done.stdout, done.stderr


# --- tokenizers ---

TEXTS = [f"the {adjective} {noun} saw {i} of {i * i} other things, didn't it?" for i, (adjective, noun) in enumerate(
    (a, n) for a in ("old", "younger", "unhappy", "größte", "naïve") for n in ("cat", "catfish", "fisher", "houses", "домов")
)]  # fmt: skip
SIZES = {"bpe": {"size": 300}, "wordpiece": {"size": 90}, "unigram": {"size": 280}}
TRAINED = ("bytes", "characters", "words", "bpe", "wordpiece", "unigram")


@pytest.fixture(scope="module")
def trained():
    return {kind: tokenizer(kind, TEXTS, **SIZES.get(kind, {})) for kind in TRAINED}


@given(st.text())
def test_decoding_gives_the_text_back(trained, text):
    for kind in ("bytes", "bpe", "unigram"):
        assert trained[kind].decode(trained[kind].encode(text).ids) == text
    if text:
        own = tokenizer("characters", [text])
        assert own.decode(own.encode(text).ids) == text
        assert len(own.encode(text).ids) == len(text)


@pytest.mark.parametrize("kind", TRAINED)
def test_special_tokens_come_first_and_no_text_becomes_one(trained, kind):
    found = trained[kind]
    assert [found.token_to_id(token) for token in SPECIAL] == list(range(5)) == list(special_ids(found))
    unknown = special_ids(found).unknown
    for text in ("".join(SPECIAL), "a</s><pad>", *TEXTS):
        assert set(found.encode(text).ids) & set(range(5)) <= {unknown}
    assert found.post_processor is None
    assert found.padding is None
    assert found.truncation is None
    assert found.encode("").ids == []
    ids = [1, *found.encode(TEXTS[0]).ids, 2, 0, 0]
    decoded = found.decode(ids)  # of a text it has seen; what begins, ends and pads falls away
    assert decoded == TEXTS[0] or (kind == "wordpiece" and decoded.replace(" ' ", "'") == TEXTS[0])


def test_bytes_are_numbered_as_bytes(trained):
    assert trained["bytes"].get_vocab_size() == 261
    assert [i - 5 for i in trained["bytes"].encode("aé\n").ids] == list("aé\n".encode())


def test_words_digits_and_marks_stand_apart():
    words = tokenizer("words", ["Don't go to 12.5, Ünal!"])
    assert [token.strip("▁") for token in words.encode("Don't go to 12.5, Ünal!").tokens] == [
        "Don",
        "'",
        "t",
        "go",
        "to",
        *"12.5,",
        "Ünal",
        "!",
    ]
    assert tokenizer("words", ["Ab ab aB"], lower=True).get_vocab_size() == 6
    assert tokenizer("words", ["a a b"], least=2).get_vocab_size() == 6
    assert tokenizer("words", ["a b c d"], size=7).get_vocab_size() == 7


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_a_vocabulary_too_large_names_the_largest_possible(kind):
    with pytest.raises(DataError, match="give ([0-9,]+) at most") as found:
        tokenizer(kind, TEXTS, size=50_000)
    largest = int(str(found.value).split("give ")[1].split(" at most")[0].replace(",", ""))
    assert tokenizer(kind, TEXTS, size=largest).get_vocab_size() == largest
    with pytest.raises(DataError, match="need|large enough"):
        tokenizer(kind, TEXTS, size=20)
    with pytest.raises(DataError, match="no text"):
        tokenizer(kind, ["", ""])


def test_training_gives_the_same_bits_in_every_process(trained):
    code = (
        "import sys, json\nfrom manyheads.data.prepared import fingerprint\nfrom manyheads.spec import SLOTS\nimport manyheads.data.tokens\n"
        "texts, specs = json.load(sys.stdin)\n"
        "print(json.dumps([fingerprint(SLOTS['tokenizer'].choose(spec).make(texts)) for spec in specs]))"
    )
    asked = json.dumps([TEXTS, [{"kind": kind, **SIZES.get(kind, {})} for kind in TRAINED]])
    ours = [prepared.fingerprint(trained[kind]) for kind in TRAINED]
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == ours


def test_a_tokenizer_from_a_file_has_nothing_of_its_own(trained, tmp_path):
    copy = Tokenizer.from_str(trained["bpe"].to_str())
    copy.enable_padding(length=50)
    copy.enable_truncation(3)
    copy.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    path = tmp_path / "tokenizer.json"
    copy.save(str(path))
    found = tokenizer("file", path=str(path))
    assert found.encode(TEXTS[0] + "<s>").ids == trained["bpe"].encode(TEXTS[0] + "<s>").ids
    for content in (b"", b"{}", b"[" * 100_000, b'{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}', path.read_bytes()[:-9]):
        with pytest.raises(DataError, match="is no tokenizer"):
            tokenizer("file", path=file(tmp_path, "broken.json", content))
    with (tmp_path / "huge.json").open("wb") as handle:
        handle.truncate((64 << 20) + 1)
    with pytest.raises(DataError, match="more than"):
        tokenizer("file", path=str(tmp_path / "huge.json"))
    with pytest.raises(DataError, match="No such file"):
        tokenizer("file", path=str(tmp_path / "none.json"))


# --- rows as ids ---


@pytest.fixture
def corpus():
    rows = [(text, str(i % 3)) for i, text in enumerate([*TEXTS, "", "x</s>"])]
    return Corpus(("text", "label"), rows, rows[:5], [], "a test")


@pytest.mark.parametrize("shard", [1, 50, 1 << 28])
def test_prepared_rows_are_the_encoded_ones(corpus, trained, tmp_path, shard, monkeypatch):
    monkeypatch.setattr(prepared, "SHARD", shard)
    forgetful = Tokenizer.from_str(trained["bpe"].to_str())  # it takes </s> for the end of a text
    folder = prepare(corpus, forgetful, tmp_path / "deep" / "data")
    for split, rows in corpus.splits.items():
        found, memory = Rows(folder, split, tokenizer=trained["bpe"]), Encoded(rows, trained["bpe"], corpus.fields, corpus.labels())
        assert len(found) == len(memory) == len(rows)
        for name in corpus.fields:
            assert found.lengths(name).tolist() == memory.lengths(name).tolist()
        for view in (found, pickle.loads(pickle.dumps(found))):
            for i in reversed(range(len(rows))):
                assert [ids.tolist() for ids in view[i]] == [ids.tolist() for ids in memory[i]]
                assert trained["bpe"].decode(view[i][0].tolist()) == rows[i][0]
                assert corpus.labels()[view[i][1].item()] == rows[i][1]
        with pytest.raises(IndexError):
            found[len(rows)]


def test_preparing_twice_gives_the_same_bits_and_overwrites_nothing(corpus, trained, tmp_path):
    one, two = (prepare(corpus, trained["bpe"], tmp_path / name) for name in "ab")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    files = [{str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()} for root in (one, two)]
    assert files[0] == files[1]
    with pytest.raises(DataError, match="is there already"):
        prepare(corpus, trained["bpe"], one)
    index = json.loads(files[0]["index.json"])
    assert (index["vocab"], index["dtype"], index["splits"]["train"]["rows"]) == (300, "uint16", len(corpus.train))


def test_nothing_is_published_before_it_is_whole(corpus, trained, tmp_path):
    def stops(i):
        if i == 7:
            raise KeyboardInterrupt
        return corpus.train[i % 5]

    broken = Corpus(corpus.fields, Made(stops, 9), corpus.validation, [], "a test")
    with pytest.raises(KeyboardInterrupt):
        prepare(broken, trained["bpe"], tmp_path / "data")
    assert not list(tmp_path.iterdir())


def test_changed_files_and_another_tokenizer_are_refused(corpus, trained, tmp_path):
    folder = prepare(corpus, trained["bpe"], tmp_path / "data")
    with pytest.raises(DataError, match="another tokenizer, of 300 tokens"):
        Rows(folder, tokenizer=trained["bytes"])
    with pytest.raises(DataError, match="split 'dev'"):
        Rows(folder, "dev")
    for name in ("shard-00000.bin", "docs.idx"):
        path = folder / "train" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(DataError, match=f"{name} has {len(whole) - 1:,} bytes, expected {len(whole):,}"):
            Rows(folder)
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        with pytest.raises(DataError, match=f"{name} has changed"):
            Rows(folder)
        path.unlink()
        with pytest.raises(DataError, match=f"{name} is not there"):
            Rows(folder)
        path.write_bytes(whole)
    for content in (b"", b"{", b"[]", b'{"schema": 2}', b'{"schema": 1}', b'{"schema": 1, "splits": {"train": 3}}'):
        (folder / "index.json").write_bytes(content)
        with pytest.raises(DataError, match="index.json"):
            Rows(folder)
    with pytest.raises(DataError, match="cannot read"):
        Rows(tmp_path / "none")


def test_pictures_stay_in_memory_and_an_unknown_label_is_named(trained, tmp_path):
    corpus = Corpus(("picture", "label"), [(np.ones((2, 2)), "a")], [], [], "a test")
    assert Encoded(corpus.train, trained["bytes"], corpus.fields, ["a"])[0][0].shape == (2, 2)
    with pytest.raises(DataError, match="pictures"):
        prepare(corpus, trained["bytes"], tmp_path / "data")
    several = Corpus(("query", "document"), [("a", "b")], [], [], "a test", pool=("b", "c"))
    with pytest.raises(DataError, match="documents in a file of their own are not prepared"):
        prepare(several, trained["bytes"], tmp_path / "data")
    with pytest.raises(DataError, match="the label 'a' is none of the 1 classes"):
        Encoded(corpus.train, trained["bytes"], corpus.fields, ["b"])


def test_every_kind_of_data_and_tokenizer_says_what_it_is():
    for slot in ("data", "tokenizer"):
        for kind, spec in SLOTS[slot].kinds.items():
            assert spec.formula() != "no formula given", kind
            assert all(field.description for field in spec.model_fields.values()), kind
            made = parse(spec, {"path": "x"} if "path" in spec.model_fields else {})
            assert parse(spec, {name: value for name, value in to_tree(made).items() if name != "kind"}) == made


def test_the_room_needs_neither_torch_nor_what_only_some_data_needs():
    code = (
        "import sys\nfor name in ('source', 'builtin', 'pictures', 'tokens', 'order', 'prepared'): __import__(f'manyheads.data.{name}')\n"
    )
    code += "assert not {'torch', 'babel', 'sklearn'} & set(sys.modules)\n"
    code += "sys.modules['babel'] = sys.modules['sklearn.datasets'] = None\n"
    code += "from manyheads.spec import SLOTS\n"
    code += "for kind in ('dates', 'digits'):\n  try: SLOTS['data'].choose(kind).load()\n  except ValueError as error: print(error)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'manyheads[demo]'" in done.stdout
    assert "pip install 'manyheads[eval]'" in done.stdout


# --- prepared rows in a run ---


def run_of(data, **others):
    tower = {"layers": 1, "width": 16, "attention": {"kind": "heads", "heads": 2}}
    return {
        "model": {"vocab": "tokenizer", "encoder": tower, "decoder": {"like": "encoder", "embed": "shared", "cross": True}},
        "data": data, "objective": {"kind": "seq2seq"}, "train": {"steps": 3, "tokens": 200, "evaluate_rows": 20},
    } | others  # fmt: skip


def events_of(tree, folder):
    from manyheads.train.loop import train
    from manyheads.train.run import made_ready, read_run

    return [
        getattr(event, "loss", None) or getattr(event, "metrics", None)
        for event in train(made_ready(read_run(tree)), folder)
        if type(event).__name__ in ("Stepped", "Evaluated")
    ]


WORDS = {"kind": "sequence", "task": "reverse", "count": 300, "held_out": 40}


@pytest.mark.parametrize("said", [{}, {"tokenizer": {"kind": "bpe", "size": 270}}])
def test_training_from_prepared_rows_gives_the_same_bits(said, tmp_path):
    source = run_of(WORDS, **said)
    (tmp_path / "run.toml").write_text(to_toml(source))
    done = run("data", "prepare", tmp_path / "run.toml", "--output", tmp_path / "ids")
    assert done.stdout == ""
    assert "300" in done.stderr
    ids = {"kind": "prepared", "path": str(tmp_path / "ids")}
    expected = events_of(source, tmp_path / "texts")
    assert events_of(run_of(ids), tmp_path / "silent") == expected
    assert events_of(run_of(ids, **said), tmp_path / "said") == expected
    # what a run folder says of itself can be started again
    assert events_of(tomllib.loads((tmp_path / "silent" / "run.toml").read_text()), tmp_path / "again") == expected


def test_prepared_rows_are_refused_with_another_tokenizer(tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(run_of(WORDS)))
    run("data", "prepare", tmp_path / "run.toml", "--output", tmp_path / "ids")
    swapped = run_of({"kind": "prepared", "path": str(tmp_path / "ids")}, tokenizer={"kind": "bytes"})
    (tmp_path / "swapped.toml").write_text(to_toml(swapped))
    done = run("train", tmp_path / "swapped.toml", "--output", tmp_path / "run", check=3)
    assert "prepared with another tokenizer, of 21 tokens" in done.stderr
    assert not (tmp_path / "run").exists()
    run("data", "prepare", tmp_path / "run.toml", "--output", tmp_path / "ids", check=3)


def test_prepared_classes_and_texts_are_those_of_the_source(tmp_path):
    rows = [(f"word {'ab'[i % 2]} {i}", "yes" if i % 2 else "no") for i in range(60)]
    path = file(tmp_path, "labels.tsv", "".join(f"{text}\t{label}\n" for text, label in rows))
    source = parse(SLOTS["data"].kinds["labels"], {"path": path}).load()
    prepare(source, tokenizer("words", [text for text, _ in rows]), tmp_path / "ids")
    found = data("prepared", path=str(tmp_path / "ids"))
    assert found.labels() == source.labels() == ("no", "yes")
    assert {name: list(part) for name, part in found.splits.items()} == {name: list(part) for name, part in source.splits.items()}


def test_batch_i_is_the_same_in_any_order_and_in_any_process(tmp_path):
    tree = run_of(WORDS)
    in_order = batches_of(tree, range(12))
    assert batches_of(tree, reversed(range(12)))[::-1] == in_order
    with FORKS.Pool(2) as pool:
        halves = pool.starmap(batches_of, [(tree, range(0, 12, 2)), (tree, range(1, 12, 2))])
    assert [batch for pair in zip(*halves, strict=True) for batch in pair] == in_order


def batches_of(tree, places):
    from manyheads.train.run import made_ready, read_run
    from manyheads.train.state import State
    from manyheads.train.stream import Stream

    ready = made_ready(read_run(tree))
    return [Stream(ready, State(index=place)).next().inputs.tokens.tolist() for place in places]


def test_data_show_counts_and_draws(tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(run_of(WORDS)))
    run("data", "prepare", tmp_path / "run.toml", "--output", tmp_path / "ids")
    found = json.loads(run("data", "show", tmp_path / "run.toml", "--json").stdout)
    kept = json.loads(run("data", "show", tmp_path / "ids", "--json").stdout)
    assert found["rows"] == kept["rows"] == {"train": 300, "validation": 40, "test": 40}
    assert found["lengths"] == kept["lengths"]
    assert sum(found["lengths"]["source"]["histogram"]["counts"]) == 300
    assert len(set(np.diff(found["lengths"]["source"]["histogram"]["edges"]))) == 1, "a bar is as long as what it counts, not as wide as"
    assert 0 < found["padding"] < 0.5
    assert kept["padding"] is None
    text = run("data", "show", tmp_path / "ids").stdout
    assert "300" in text
    assert "█" in text
    source, target = data("sequence", **{name: value for name, value in WORDS.items() if name != "kind"}).train[0]
    assert source in text
    assert target in text
    assert "is neither a run file nor a folder" in run("data", "show", tmp_path / "nothing", check=2).stderr


HEADED = {
    "pairs": ("english\tgerman", "a small word {}\tein kleines Wort {}"),
    "labels": ("review\tsentiment", "how good it was {}\tgood{}"),
    "queries": ("question\tanswer", "what is it {}\tit is {}"),
}


@pytest.mark.parametrize("kind", HEADED)
def test_a_line_that_names_columns_is_no_row(kind, tmp_path):
    """Whatever it calls them; that is said, and whoever means it as a row says which columns by number."""
    header, line = HEADED[kind]
    rows = [line.format(i, i % 3) for i in range(40)]
    path = file(tmp_path, "a.tsv", "\n".join((header, *rows)) + "\n")
    corpus = data(kind, path=path, test=path)
    assert sorted(corpus.train + corpus.validation) == sorted(tuple(row.split("\t")) for row in rows)
    assert len(corpus.test) == 40
    one, other = header.split("\t")
    assert f"2 lines left out that name columns, '{one}' and '{other}': fields = [0, 1] reads them as rows" in corpus.about
    meant = data(kind, path=path, fields=[0, 1])
    assert tuple(header.split("\t")) in meant.train + meant.validation
    assert "left out" not in meant.about
    named = data(kind, path=path, fields=header.split("\t"))
    assert (len(named.train + named.validation), "left out" in named.about) == (40, False)


@pytest.mark.parametrize("first", ["one word\tzwei", "small\tgroß und klein", "word1\tWort2"])
def test_a_row_is_no_header(first, tmp_path):
    """Several words are none, and what comes again is none."""
    lines = [first, *(f"a word{i}\tein Wort{i}" for i in range(30)), "word1\tsonst"]
    corpus = data("pairs", path=file(tmp_path, "a.tsv", "\n".join(lines)))
    assert sorted(corpus.train + corpus.validation) == sorted(tuple(line.split("\t")) for line in lines)


# --- pictures ---


def idx(numbers, sort=0x08):
    """As MNIST's files are: the sort of numbers, the sizes, the numbers."""
    kind = {0x08: ">u1", 0x0D: ">f4"}[sort]
    return bytes([0, 0, sort, numbers.ndim]) + np.array(numbers.shape, ">u4").tobytes() + numbers.astype(kind).tobytes()


@pytest.fixture
def drawn(tmp_path):
    """Forty pictures of 4 × 6 and their classes, as idx files."""
    pictures = np.random.default_rng(0).integers(0, 256, (40, 4, 6))
    pictures[0, 0, 0] = 255
    (tmp_path / "images").write_bytes(idx(pictures))
    (tmp_path / "labels").write_bytes(idx(np.arange(40) % 3))
    return pictures, {"path": str(tmp_path / "images"), "labels": str(tmp_path / "labels")}


@pytest.mark.parametrize("packed", [False, True])
def test_pictures_come_from_idx_files(drawn, packed):
    pictures, where = drawn
    if packed:
        for path in map(Path, where.values()):
            path.write_bytes(gzip.compress(path.read_bytes()))
    corpus = data("pictures", **where)
    assert corpus.fields == ("picture", "label")
    assert (len(corpus.train), len(corpus.validation)) == (38, 2)
    assert corpus.labels() == ("0", "1", "2")
    found = {picture.tobytes(): label for rows in corpus.splits.values() for picture, label in rows}
    assert found == {(picture / 255).astype(np.float32).tobytes(): str(i % 3) for i, picture in enumerate(pictures)}
    assert "4 × 6 pixels, divided by 255" in corpus.about
    alone = data("pictures", path=where["path"])
    assert alone.fields == ("picture",)
    assert not {row[0].tobytes() for row in alone.train} & {row[0].tobytes() for row in alone.validation}


@pytest.mark.parametrize("label", ["first", "last", "none"])
def test_pictures_come_from_a_table(label, tmp_path):
    pictures = np.random.default_rng(0).integers(0, 17, (30, 9))
    lines = [",".join(map(str, {"first": [i % 2, *one], "last": [*one, i % 2], "none": one}[label])) for i, one in enumerate(pictures)]
    (tmp_path / "p.csv").write_text("\n".join((",".join(f"x{i}" for i in range(10 - (label == "none"))), *lines)) + "\n")
    corpus = data("pictures", path=str(tmp_path / "p.csv"), label=label, white=16.0)
    assert corpus.fields == (("picture",) if label == "none" else ("picture", "label"))
    assert corpus.train[0][0].shape == (3, 3)
    found = sorted(row[0].tobytes() for rows in corpus.splits.values() for row in rows)
    assert found == sorted((one.reshape(3, 3) / 16).astype(np.float32).tobytes() for one in pictures)
    wide = data("pictures", path=str(tmp_path / "p.csv"), label=label, height=1)
    assert wide.train[0][0].shape == (1, 9)
    coloured = data("pictures", path=str(tmp_path / "p.csv"), label=label, channels=3, height=1)
    assert coloured.train[0][0].shape == (3, 1, 3)


def test_pictures_of_one_file_are_scaled_as_those_of_the_other(drawn, tmp_path):
    pictures, where = drawn
    (tmp_path / "more").write_bytes(idx(pictures[:5] // 2))
    (tmp_path / "more-labels").write_bytes(idx(np.zeros(5)))
    more = {"validation": str(tmp_path / "more"), "validation_labels": str(tmp_path / "more-labels")}
    corpus = data("pictures", **where, **more)
    assert (len(corpus.train), len(corpus.validation)) == (40, 5)
    assert np.array_equal(corpus.validation[0][0], (pictures[0] // 2 / 255).astype(np.float32))


def tables(tmp_path):
    """Pictures of 4 × 4 and their classes in two tables, of which the second is darker, and the second once more."""
    for name, most, seed in (("some", 17, 0), ("dark", 5, 1), ("other", 5, 1)):
        pictures = np.random.default_rng(seed).integers(0, most, (30, 16))
        (tmp_path / f"{name}.csv").write_text("\n".join(",".join(map(str, (*one, i % 2))) for i, one in enumerate(pictures)) + "\n")
    return {"path": str(tmp_path / "some.csv"), "validation": str(tmp_path / "dark.csv")}


@pytest.mark.parametrize("objective", ["classify", "patches"])
def test_another_file_of_pictures_is_read_as_a_validation_file_is(objective, tmp_path):
    tower = {"layers": 1, "width": 16, "attention": {"kind": "heads", "heads": 2}, "position": "sinusoidal"}
    patches = tower | {"embed": {"kind": "patches", "pixels": 4, "channels": 1}}
    restored = {"decoder": tower | {"embed": "restored", "mask": {"causal": False}}, "head": {"kind": "pixels", "pixels": 4}}
    model = {"encoder": patches} | ({"head": {"kind": "classes", "classes": 2}} if objective == "classify" else restored)
    tree = {"model": model, "data": {"kind": "pictures"} | tables(tmp_path), "objective": objective, "train": {"steps": 2}}
    list(train(made_ready(read_run(tree)), tmp_path / "run"))
    own, _ = evaluate(tmp_path / "run")
    there, _ = evaluate(tmp_path / "run", data=str(tmp_path / "other.csv"))
    assert there["scores"] == own["scores"]
    assert "other.csv: 30 pictures; 4 × 4 pixels, divided by 16" in there["data"]


def test_another_idx_file_has_no_classes_of_its_own(drawn, tmp_path):
    pictures, where = drawn
    (tmp_path / "more").write_bytes(idx(pictures[:5] // 2))
    alone = parse(SLOTS["data"].kinds["pictures"], {"path": where["path"]}).other(str(tmp_path / "more"))
    assert (alone.fields, len(alone.train)) == (("picture",), 0)
    assert np.array_equal(alone.validation[0][0], (pictures[0] // 2 / 255).astype(np.float32))
    labelled = parse(SLOTS["data"].kinds["pictures"], where)
    assert len(labelled.other(where["path"]).validation) == 40
    with pytest.raises(DataError, match="more has its classes in a file of their own: name both, test = … and test_labels = …"):
        labelled.other(str(tmp_path / "more"))
    (tmp_path / "wide").write_bytes(idx(np.zeros((5, 4, 7))))
    with pytest.raises(DataError, match="wide has pictures of 4 × 7, and .*images of 4 × 6"):
        parse(SLOTS["data"].kinds["pictures"], {"path": where["path"]}).other(str(tmp_path / "wide"))


HEAD = bytes([0, 0, 8, 3])
SPOILED = {
    "is no idx file": b"PK\3\4 and so on",
    "ends after 3 of 12 bytes that its head promises": HEAD + b"\0\0\0",
    "says that it holds 4294967295 × 4294967295 × 9 numbers": HEAD + b"\xff" * 8 + b"\0\0\0\x09",
    "says that it holds 0 × 4 × 6 numbers": HEAD + np.array((0, 4, 6), ">u4").tobytes(),
    "has 1 sizes, and pictures have 3 or 4": idx(np.zeros(3)),
    "ends after 5 of 24 bytes": HEAD + np.array((1, 4, 6), ">u4").tobytes() + b"12345",
    "goes on after its 1 × 2 × 2 numbers": idx(np.zeros((1, 2, 2))) + b"\0",
    "holds numbers that are NaN or infinite": idx(np.full((1, 2, 2), np.nan), 0x0D),
    "is a broken gzip file": gzip.compress(idx(np.zeros((9, 9, 9))))[:-9],
    "too many to be pictures": gzip.compress(idx(np.zeros((64, 512, 512)))),
}


@pytest.mark.parametrize("sentence", SPOILED)
def test_a_spoiled_idx_file_is_refused_in_one_sentence(sentence, tmp_path):
    path = tmp_path / "images-idx3-ubyte"
    path.write_bytes(SPOILED[sentence])
    with pytest.raises(DataError) as found:
        data("pictures", path=str(path))
    assert sentence in str(found.value)
    assert str(path) in str(found.value)


def test_pictures_that_do_not_fit_together_are_refused(drawn, tmp_path):
    pictures, where = drawn
    (tmp_path / "other").write_bytes(idx(pictures[:, :3]))
    (tmp_path / "same").write_bytes(idx(pictures))
    (tmp_path / "few").write_bytes(idx(np.zeros(7)))
    (tmp_path / "p.csv").write_text("1,2,3,4,0\n1,2,3,4\n")
    (tmp_path / "q.csv").write_text("1,2,3,0\n1,2,3,0\n")
    (tmp_path / "r.csv").write_text("1,2,3,4,0\n1,2,x,4,0\n")
    (tmp_path / "empty.csv").write_text("\n")
    for options, sentence in (
        (where | {"labels": str(tmp_path / "few")}, "few has 7 classes, and"),
        (where | {"validation": str(tmp_path / "other")}, "other has pictures of 3 × 6, and"),
        (where | {"validation": str(tmp_path / "same")}, "same has no classes, unlike"),
        (where | {"test_labels": str(tmp_path / "few")}, "few has the classes of a file that is not named; set test"),
        ({"path": str(tmp_path)}, "is a folder"),
        ({"path": str(tmp_path / "none")}, "cannot read"),
        ({"path": str(tmp_path / "p.csv")}, "p.csv, line 2 has 4 columns, expected 5"),
        ({"path": str(tmp_path / "q.csv")}, "q.csv, line 1 has 3 pixels, which are no picture of a square"),
        ({"path": str(tmp_path / "r.csv")}, "r.csv, line 2 has the pixel 'x', expected a number"),
        ({"path": str(tmp_path / "p.csv"), "labels": str(tmp_path / "few")}, "has its classes in the last column"),
        ({"path": str(tmp_path / "empty.csv")}, "holds no pictures: it is empty or blank"),
    ):
        with pytest.raises(DataError) as found:
            data("pictures", **options)
        assert sentence in str(found.value)


# --- dependencies ---


def test_trees_come_as_words_the_places_of_their_heads_and_relations(tmp_path):
    (tmp_path / "t.conllu").write_text(conllu(SHE, [("1", "Yes", "0")]))
    corpus = data("conllu", path=str(tmp_path / "t.conllu"), validation=str(tmp_path / "t.conllu"))
    assert corpus.fields == ("text", "arcs", "relations")
    relations = ("nsubj", "root", "aux:can", "advmod", "obj")
    assert corpus.train == [("She sees can not 10_000", (1, -1, 1, 2, 1), relations), ("Yes", (-1,), ("_",))]
    assert all(len(text.split()) == len(heads) == len(names) for text, heads, names in corpus.train)
    rows = Encoded(corpus.train, tokenizer("words", [text for text, *_ in corpus.train]), corpus.fields)
    assert rows[0][1].dtype == np.int64
    assert rows[0][1].tolist() == [1, -1, 1, 2, 1]
    assert rows[0][2].tolist() == list(relations)


def test_what_is_no_text_is_not_prepared(tmp_path):
    """Nor what a tokenizer of the other texts would not know."""
    (tmp_path / "t.conllu").write_text(conllu(SHE, [("1", "Yes", "0")]))
    (tmp_path / "p.tsv").write_text("".join(f"a {i}\t{i} a\t0-1 1-0\n" for i in range(9)))
    aligned = data("pairs", path=str(tmp_path / "p.tsv"), fields=["source", "target", "alignment"])
    for corpus, said in ((data("conllu", path=str(tmp_path / "t.conllu")), "arcs"), (aligned, "alignments")):
        with pytest.raises(DataError, match=f"{said} have no ids to prepare; they are used as they are"):
            prepare(corpus, tokenizer("bytes", []), tmp_path / "prepared")


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("1\tShe\t2\n", "line 1 has 3 columns, expected 10"),
        (conllu([("2", "She", "0")]), "line 2 is word '2', expected 1"),
        (conllu([("1", "She", "0"), ("1", "sees", "1")]), "line 3 is word '1', expected 2"),
        (conllu([("x", "She", "0")]), "line 2 is word 'x', expected 1"),
        (conllu([("1", "She", "_")]), "line 2 has the head '_', expected the number of another word"),
        (conllu([("1", "She", "1")]), "line 2 has the head '1', expected the number of another word"),
        (conllu([("1", "She", "7")]), "line 2 ends a sentence of 1 words, and one of them has the head 7"),
        (conllu([("1", " ", "0")]), "line 2 has no word"),
        ("# only a comment\n", "holds no sentences"),
    ],
)
def test_a_tree_with_a_fault_is_refused_with_its_line(lines, sentence, tmp_path):
    (tmp_path / "t.conllu").write_text(lines)
    with pytest.raises(DataError) as found:
        data("conllu", path=str(tmp_path / "t.conllu"))
    assert sentence in str(found.value)
    assert "t.conllu" in str(found.value)


# ------------------------------------------------------------------------------------------------------------ small laws


def test_a_share_is_held_out_and_of_many_rows_no_more_than_two_thousand():
    spec = SLOTS["data"].choose({"kind": "pairs", "path": "none.tsv", "held_out": 0.1})
    for count, expected in ((60, 6), (5, 1), (30_000, 2000)):
        learned, held = spec.split([(str(i), "x") for i in range(count)])
        assert (len(learned), len(held)) == (count - expected, expected)
        assert not set(learned) & set(held)


def test_long_rows_keep_their_beginning_and_are_as_long_as_they_are_said_to_be():
    tokenizer = SLOTS["tokenizer"].choose({"kind": "words"}).make(["a b c d e f g"])
    rows = Encoded([("a b c d e", "f g"), ("a", "a b c d e f g")], tokenizer, ("source", "target"))
    cut = Cut(rows, {"source": 3, "target": 4})
    assert cut.count == 2
    for name, most, place in (("source", 3, 0), ("target", 4, 1)):
        assert [row[place].tolist() for row in (cut[0], cut[1])] == [rows[i][place][:most].tolist() for i in (0, 1)]
        assert cut.lengths(name).tolist() == [len(cut[i][place]) for i in (0, 1)]


def test_another_seed_is_another_order():
    orders = {(seed, epoch): tuple(permuted(seed, epoch, np.arange(500), 500).tolist()) for seed in (0, 1, 2) for epoch in (0, 1, 2)}
    assert len(set(orders.values())) == 9


def test_a_mark_within_a_file_is_a_character_of_its_line(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone\n\ufefftwo\n")
    assert [line for _, line in Lines(tmp_path / "a.txt", "stop", 100)] == ["one", "\ufefftwo"]
