"""Every recipe runs as a dry run, on little data of its own kind."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import tomllib

import pytest
from command import run
from examples import ROOT
from small_checkpoints import folder_of

from manyheads.training.run import read_run_file

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
WORDS = [
    "a",
    "red",
    "small",
    "old",
    "dog",
    "cat",
    "man",
    "woman",
    "runs",
    "sits",
    "eats",
    "sees",
    "in",
    "the",
    "on",
    "house",
    "park",
    "field",
]
ROWS = 60


def sentences(seed):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) for _ in range(ROWS)]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def idx(path, shape):
    """An idx file of random bytes, compressed as MNIST is."""
    header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    size = 1
    for each in shape:
        size *= each
    path.write_bytes(gzip.compress(header + random.Random(0).randbytes(size)))


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A folder with a file for each kind of data, and a small checkpoint in the place of the real one."""
    folder = tmp_path_factory.mktemp("user")
    first, second = sentences(0), sentences(1)
    (folder / "text.txt").write_text("\n".join(first))
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in zip(first, second, strict=True)))
    jsonl(
        folder / "summaries.jsonl", [{"document": f"{a} {b}", "summary": a} for a, b in zip(first, second, strict=True)]
    )
    jsonl(folder / "labels.jsonl", [{"text": text, "label": f"class {i % 3}"} for i, text in enumerate(first)])
    jsonl(folder / "queries.jsonl", [{"query": text, "doc_id": f"d{i}"} for i, text in enumerate(first)])
    jsonl(folder / "documents.jsonl", [{"id": f"d{i}", "text": text} for i, text in enumerate(second)])
    idx(folder / "images.gz", (ROWS, 28, 28))
    idx(folder / "classes.gz", (ROWS,))
    folder_of("bert-bare", folder / "encoder")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    return folder


FILES = {
    "text": {"path": "text.txt", "validation": "text.txt"},
    "pairs": {"path": "pairs.tsv", "validation": "pairs.tsv"},
    "labels": {"path": "labels.jsonl", "validation": "labels.jsonl"},
    "queries": {"path": "queries.jsonl", "validation": "queries.jsonl", "documents": "documents.jsonl"},
    "images": {"path": "images.gz", "labels": "classes.gz"},
    "digits": {},
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_reading_a_recipe_opens_no_data(recipe, tmp_path):
    copy = shutil.copytree(ROOT / "recipes", tmp_path / "far" / "recipes") / recipe.name  # no data is beside it
    assert read_run_file(copy).train.steps > 0


def options_of(recipe):
    """What a user gives who has the data and the checkpoint somewhere else."""
    tree = tomllib.loads(recipe.read_text(encoding="utf-8"))
    data = tree["data"]
    files = FILES[data["kind"]]
    if data.get("columns") == ["document", "summary"]:
        files = {"path": "summaries.jsonl", "validation": "summaries.jsonl"}
    settings = {f"data.{name}": file for name, file in files.items()}
    settings |= {"train.steps": 3, "train.batch_tokens": 512}  # a dry run measures steps, and compiles for a long run
    if tree.get("tokenizer", {}).get("kind") == "bpe":
        settings["tokenizer.vocab_size"] = 280
    return settings | ({"init_from": "encoder"} if "init_from" in tree else {})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_runs_and_has_a_row(recipe, user):
    options = [part for name, value in options_of(recipe).items() for part in ("-s", f"{name}={value}")]
    report = json.loads(run("train", f"recipes/{recipe.name}", "--dry-run", "--json", *options, cwd=user).stdout)
    assert report["resources"]["parameters"] > 0
    assert report["epoch"]["rows"] > 0
    assert f"| `{recipe.stem}` |" in (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
