"""`manyheads ask`: answers with their source, real SQLite files and hostile ones, and the queue for training."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from command import error_of, run, run_json
from small_runs import STACK, train_all

from manyheads.data.tables import PairsSpec
from manyheads.errors import DatabaseError
from manyheads.files import database as database_module
from manyheads.files.database import AnswerDatabase
from manyheads.spec import to_toml
from manyheads.tasks.answering import queue_pair

KNOWN = {"Where was Ada Byron born?": "London", "Where was Emmy Noether born?": "Erlangen"}
STRANGE = "Where was Bo Ek born?"
ODD = [
    'Who is "X"; DROP TABLE answers; --?',
    "Where's O'Neil?",
    "100% of \\ $HOME?",
    '"quoted" at once?',
    "né à l’île?",
]


def write_database(path, rows, *, script="CREATE TABLE answers (question TEXT PRIMARY KEY, answer TEXT)"):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(script)
        if rows:
            connection.executemany("INSERT INTO answers VALUES (?, ?)", rows)
    return path


def run_tree(path, **more):
    model = {
        "vocab": "tokenizer",
        "encoder": STACK | {"width": 32, "residual": "pre"},
        "decoder": {"like": "encoder", "embed": "shared", "cross": True},
    }
    optim = {"lr": 1e-2, "schedule": {"kind": "cosine", "warmup_steps": 5}}
    settings = {"steps": 220, "batch_tokens": 1000, "eval_every": 220, "eval_rows": 2, "save_every": 220}
    data = {"kind": "pairs", "path": str(path), "validation": str(path.with_name("validation.tsv"))}
    tree = {"data": data, "task": {"kind": "seq2seq"}, "optim": optim, "train": settings, "model": model, "seed": 1}
    return tree | more


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that knows the answers to two questions, and the words of more."""
    path = tmp_path_factory.mktemp("ask")
    words = " ".join(("Lund", STRANGE, *ODD))
    rows = [*KNOWN.items()] * 12 + [(words, "Lund")]
    (path / "pairs.tsv").write_text("".join(f"{question}\t{answer}\n" for question, answer in rows))
    (path / "validation.tsv").write_text("Where was Lund born?\tLund\n")
    train_all(run_tree(path / "pairs.tsv"), path / "run")
    write_database(path / "facts.db", [(STRANGE, "Lund"), *((question, "odd") for question in ODD)])
    return path


def ask(folder, *arguments, **options):
    return run("ask", "run", *map(str, arguments), cwd=folder, **options)


def answered(folder, *arguments):
    return run_json("ask", "run", *map(str, arguments), cwd=folder)


def test_a_confident_answer_is_of_the_model(folder):
    for question, answer in KNOWN.items():
        result = answered(folder, question, "--database", "facts.db")
        assert (result["answer"], result["source"]) == (answer, "model")
        assert 0.5 <= result["probability"] <= result["min_token_probability"] <= 1
    done = ask(folder, next(iter(KNOWN)))
    assert done.stdout == "London\nsource: model\n"


def test_below_the_threshold_the_database_answers_and_else_nobody(folder):
    result = answered(folder, STRANGE, "--threshold", 1, "--database", "facts.db")
    assert (result["answer"], result["source"]) == ("Lund", "database")
    assert result["model_answer"], "what the model would have made up is shown"
    result = answered(folder, STRANGE, "--threshold", 1)
    assert (result["answer"], result["source"]) == (None, "none")
    done = ask(folder, STRANGE, "--threshold", "1")
    assert done.stdout == "unknown\nsource: none\n"
    assert answered(folder, STRANGE, "--threshold", 0)["source"] == "model"


@pytest.mark.parametrize("question", ODD)
def test_a_question_is_never_sql(folder, question):
    before = (folder / "facts.db").read_bytes()
    result = answered(folder, question, "--threshold", 1, "--database", "facts.db")
    assert (result["text"], result["answer"], result["source"]) == (question, "odd", "database")
    assert (folder / "facts.db").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir() if "facts" in path.name) == ["facts.db"]


def test_many_questions_give_one_line_each(folder):
    lines = "".join(f"{question}\n" for question in (*KNOWN, STRANGE, ""))
    (folder / "questions.txt").write_text(lines)
    done = ask(folder, "--file", "questions.txt", "--threshold", "1", "--database", "facts.db")
    columns = [line.split("\t")[:2] for line in done.stdout.splitlines()]
    assert columns == [["", "none"], ["", "none"], ["Lund", "database"], [""]]


def test_a_path_with_odd_characters_is_a_path(folder):
    name = "facts ?mode=rwc&x=%20#'.db"
    write_database(folder / name, [(STRANGE, "Lund")])
    assert AnswerDatabase(folder / name).look_up(STRANGE) == "Lund"
    assert AnswerDatabase(folder / name).look_up("Where?") is None


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        ([STRANGE, "--threshold", "1.5"], 2, "usage.argument"),
        ([STRANGE, "--threshold", "-0.1"], 2, "usage.argument"),
        ([STRANGE, "--threshold", "nan"], 2, "usage.argument"),
        ([STRANGE, "--database", "none.db"], 2, "usage.path-not-found"),
        ([STRANGE, "--database", "pairs.tsv"], 4, "database.invalid"),
        ([STRANGE, "--database", "run"], 4, "database.invalid"),
        ([STRANGE, "--answer", "Lund"], 2, "usage.argument"),
        (["--file", "pairs.txt", "--queue", "queue.tsv"], 2, "usage.argument"),
        ([STRANGE, "--threshold", "1", "--queue", "none/queue.tsv", "--answer", "x"], 2, "usage.output"),
        ([" "], 2, "usage.argument"),
    ],
)
def test_errors_are_one_sentence(folder, arguments, status, code):
    (folder / "pairs.txt").write_text("x\n")
    assert error_of("ask", "run", *arguments, cwd=folder, check=status)["code"] == code


HOSTILE = {
    "no table": "CREATE TABLE other (question TEXT, answer TEXT)",
    "no column": "CREATE TABLE answers (question TEXT, place TEXT)",
    "a view": "CREATE VIEW answers AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    "SELECT i AS question, i AS answer FROM n",
    "a virtual table": "CREATE VIRTUAL TABLE answers USING fts5(question, answer)",
    "a number": f"CREATE TABLE answers (question TEXT, answer); INSERT INTO answers VALUES ('{STRANGE}', x'00ff')",
    "a large value": "CREATE TABLE answers (question TEXT, answer TEXT); "
    f"INSERT INTO answers VALUES ('{STRANGE}', hex(zeroblob(2000000)))",
    "invalid text": "CREATE TABLE answers (question TEXT, answer TEXT); "
    f"INSERT INTO answers VALUES ('{STRANGE}', CAST(x'ff' AS TEXT))",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_database_is_an_error(tmp_path, name):
    write_database(tmp_path / "facts.db", (), script=HOSTILE[name])
    with pytest.raises(DatabaseError):
        AnswerDatabase(tmp_path / "facts.db").look_up(STRANGE)


def test_a_broken_file_is_an_error(tmp_path):
    path = write_database(tmp_path / "facts.db", [(f"{i}?", "x" * 900) for i in range(200)])
    data = path.read_bytes()
    for broken in (data[: len(data) // 2], data[:100] + os.urandom(len(data) - 100), b"", b"SQLite format 3\0"):
        path.write_bytes(broken)
        with pytest.raises(DatabaseError):
            AnswerDatabase(path).look_up("199?")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DatabaseError):
        AnswerDatabase(path).look_up("199?")


def test_a_slow_lookup_ends(tmp_path, monkeypatch):
    path = write_database(
        tmp_path / "facts.db", ((f"{i}?", "x") for i in range(50_000)), script="CREATE TABLE answers (question, answer)"
    )
    assert AnswerDatabase(path).look_up("49999?") == "x"
    monkeypatch.setattr(database_module, "MAX_SECONDS", 0.0)
    with pytest.raises(DatabaseError):
        AnswerDatabase(path).look_up("49999?")


def append_many(path, number):
    for i in range(200):
        queue_pair(Path(path), f"Where was {number} {i} born?", "x" * (i % 50 + 1))


def test_processes_that_append_at_once_keep_every_pair(tmp_path):
    path = tmp_path / "queue.tsv"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=append_many, args=(str(path), number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    assert sorted(rows) == sorted(
        [f"Where was {number} {i} born?", "x" * (i % 50 + 1)] for number in range(4) for i in range(200)
    )


def test_odd_pairs_are_read_from_the_queue_as_they_are(tmp_path):
    path, pairs = tmp_path / "queue.tsv", [(question, f"'{question}'") for question in ODD]
    for question, answer in pairs:
        queue_pair(path, question, answer)
    queue_pair(path, "a\tb\nc", "d\r\n")
    rows = PairsSpec(path=str(path)).read_rows(path, Counter())
    assert [row[:2] for row in rows] == [*pairs, ("a b c", "d")]


def test_a_new_answer_is_queued_and_learned(folder):
    """Ask, queue the user's answer, fine-tune on the queue, ask again: the model knows it."""
    options = STRANGE, "--threshold", "0.9999", "--queue", "queue.tsv"
    ask(folder, *options)
    assert not (folder / "queue.tsv").exists(), "without an answer there is nothing to learn"
    for _ in range(2):
        ask(folder, *options, "--answer", "Lund")
    assert (folder / "queue.tsv").read_text() == f"{STRANGE}\tLund\n" * 2
    tree = run_tree(folder / "queue.tsv", init_from="run")
    tree["train"] |= {"steps": 30, "eval_every": 30, "save_every": 30}
    (folder / "learn.toml").write_text(to_toml({key: tree[key] for key in tree if key != "model"}))
    run("train", "learn.toml", "--output", "learned", cwd=folder)
    result = run_json("ask", "learned", STRANGE, cwd=folder)
    assert (result["answer"], result["source"]) == ("Lund", "model")
