"""Queries and documents in files of their own."""

from __future__ import annotations

import json

import pytest
from data_files import all_rows, data_spec
from raising import raises


def write_jsonl(folder, **files):
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(folder / f"{name}.jsonl") for name in files}


def test_queries_name_documents_of_another_file(tmp_path):
    queries = [{"query": f"q{i}", "doc_id": i} for i in range(10)]
    paths = write_jsonl(tmp_path, queries=queries, docs=[{"id": i, "text": f"text {i}"} for i in range(30)])
    spec = data_spec("queries", path=paths["queries"], columns=["query", "doc_id"], documents=paths["docs"])
    corpus = spec.load()
    assert all_rows(corpus) == sorted((f"q{i}", f"text {i}") for i in range(10))
    assert corpus.documents() == tuple(f"text {i}" for i in range(30))
    other = spec.load_file(paths["queries"])
    assert (len(other.train), len(other.validation), len(other.candidates)) == (0, 10, 30)


@pytest.mark.parametrize(
    ("docs", "code", "value"),
    [
        ([{"id": "a", "text": "x"}], "data.row", "'b'"),
        ([{"id": "a", "text": "x"}, {"id": "a", "text": "y"}], "data.row", "'a'"),
        ([{"id": "a", "body": "x"}], "data.columns", "text"),
        ([], "data.empty", "docs.jsonl"),
    ],
)
def test_documents_that_are_missing_or_ambiguous_are_named(tmp_path, docs, code, value):
    queries = [{"query": "q", "document": "a"}, {"query": "r", "document": "b"}]
    paths = write_jsonl(tmp_path, queries=queries, docs=docs)
    with raises(code, value) as caught:
        data_spec("queries", path=paths["queries"], documents=paths["docs"]).load()
    assert caught.value.exit_status == 3
