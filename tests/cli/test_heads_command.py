"""`manyheads heads`: the head of a relation beside the best offset, and of a pattern, from a file."""

from __future__ import annotations

import gzip

import pytest
from command import error_of, run, run_json
from pointing import WORDS, pointing
from small_checkpoints import folder_of

from manyheads import export

# the head of each word from 1, 0 for the root, and its relation: prefer has the object flight
SENTENCE = {
    "I": (2, "nsubj"),
    "prefer": (0, "root"),
    "the": (5, "det"),
    "morning": (5, "nmod"),
    "flight": (2, "dobj"),
}


def conllu(sentence):
    lines = (
        "\t".join((str(i), word, *"____", str(head), relation, "_", "_"))
        for i, (word, (head, relation)) in enumerate(sentence.items(), 1)
    )
    return "\n".join(lines) + "\n\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file of trees, and a model whose head 0 attends from every word to `flight`."""
    folder = tmp_path_factory.mktemp("heads")
    words = list(SENTENCE)
    (folder / "trees.conllu").write_text(conllu(SENTENCE) * 3)
    export(pointing(lambda _: words.index("flight"), words), folder / "model", to="manyheads")
    return folder


def test_j1_the_head_from_prefer_to_flight_is_found(folder):
    output = run_json("heads", folder / "model", folder / "trees.conllu", "--min-count", "1")
    assert (output["rows"], output["too_long"]) == (3, 0)
    found = {relation["relation"]: relation for relation in output["relations"]}
    assert set(found) == {name + direction for name in ("nsubj", "det", "nmod", "dobj") for direction in ("", "⁻¹")}
    to_object = found["dobj⁻¹"]
    assert (to_object["attention"], to_object["head"]) == ("encoder.layers.0.attention", 0)
    assert (to_object["accuracy"], to_object["count"]) == (1.0, 3)
    assert (to_object["offset"], to_object["offset_accuracy"]) == (3, 1.0)
    assert not to_object["is_better"], "in this one sentence the object is always three words after the verb"
    assert found["det"]["accuracy"] == 1.0
    assert found["nsubj"]["accuracy"] < 1.0 or found["nsubj"]["head"] != 0


def test_p10_coreference_of_the_file_is_measured_too(folder):
    text = (folder / "trees.conllu").read_text()
    lines = [
        line[:-1] + "Entity=(e1)" if "\tflight\t" in line or "\tmorning\t" in line else line
        for line in text.split("\n")
    ]
    (folder / "coreference.conllu").write_text("\n".join(lines).replace("flight\t_\t_", "flight\t_\tPRON"))
    found = run_json("heads", folder / "model", folder / "coreference.conllu", "--min-count", "1")["relations"]
    links = {one["relation"]: (one["count"], one["offset"], one["offset_accuracy"]) for one in found}
    assert links["coref"] == links["coref:pron"] == (3, -1, 1.0)


def test_the_table_has_a_row_per_relation_that_is_frequent_enough(folder):
    trees = folder / "trees.conllu.gz"
    trees.write_bytes(gzip.compress((folder / "trees.conllu").read_bytes()))
    lines = run("heads", folder / "model", trees, "--min-count", "3").stdout.splitlines()
    relations = {line.split()[0]: line for line in lines}
    assert {"det", "det⁻¹", "dobj", "dobj⁻¹", "nmod", "nmod⁻¹", "nsubj", "nsubj⁻¹"} <= set(relations)
    assert "encoder.layers.0.attention, head 0" in relations["dobj⁻¹"]
    assert "100.0%" in relations["dobj⁻¹"]
    assert "+3" in relations["dobj⁻¹"]
    assert "none" in relations["dobj"], (
        "the other head has the same weight everywhere, and no link is to the first word"
    )
    assert "of 0 relations" in run("heads", folder / "model", trees, "--min-count", "4").stdout
    assert run_json("heads", folder / "model", trees, "--max-rows", "2")["rows"] == 2


def test_patterns_of_heads_over_the_lines_of_a_text(folder, tmp_path):
    """A head from each word to the next number: over w0 w1 … all weight is on the next token."""
    export(pointing(lambda i: (i + 1) % 12), tmp_path / "model", to="manyheads")
    text = " ".join(WORDS)
    (tmp_path / "lines.txt").write_text(f"{text}\n\n{text} {text}\n")
    output = run_json("heads", tmp_path / "model", tmp_path / "lines.txt")
    assert output["rows"] == 2
    first, second = output["heads"]
    assert (first["head"], second["head"]) == (0, 1)
    # of 36 tokens, 11 and 2·11 have the next number once or twice in their line, and each line wraps around
    assert first["next"] == pytest.approx((11 + 11 * 0.5 + 12 * 0.5) / 36)
    assert second["next"] == pytest.approx((11 / 12 + 23 / 24) / 36)
    shown = run("heads", tmp_path / "model", tmp_path / "lines.txt").stdout
    row = next(line for line in shown.splitlines() if line.startswith("next"))
    assert "head 0" in row


def test_what_cannot_be_measured_is_an_error(folder, tmp_path):
    model, trees = folder / "model", folder / "trees.conllu"
    (tmp_path / "a.csv").write_text("a\n")
    (tmp_path / "a.txt").write_text("\n")
    (tmp_path / "bad.conllu").write_text("1\tonly three\tcolumns\n")
    codes = {
        ("usage.argument", 2): [
            (tmp_path / "a.csv",),
            (trees, "--max-rows", "0"),
            (trees, "--min-count", "0"),
            (trees, "--min-count", "-5"),
            (tmp_path / "a.txt", "--min-count", "2"),
        ],
        ("usage.path-not-found", 2): [(tmp_path / "none.conllu",)],
        ("data.empty", 3): [(tmp_path / "a.txt",)],
        ("data.row", 3): [(tmp_path / "bad.conllu",)],
    }
    for (code, status), cases in codes.items():
        for case in cases:
            assert error_of("heads", model, *case, check=status)["code"] == code
    (tmp_path / "pair").mkdir()
    pair = folder_of("marian", tmp_path / "pair")
    (tmp_path / "b.txt").write_text("word1\n")
    for file in (trees, tmp_path / "b.txt"):
        assert error_of("heads", pair, file, check=2)["code"] == "model.unsupported"


def test_rows_that_are_too_long_are_counted(tmp_path):
    (tmp_path / "bert").mkdir()
    bert = folder_of("bert", tmp_path / "bert")
    words = {f"word{i % 50}": (0 if i == 0 else 1, "root" if i == 0 else "dep") for i in range(30)}
    long = "".join(
        f"{i}\tword1\t_\t_\t_\t_\t{0 if i == 1 else 1}\t{'root' if i == 1 else 'dep'}\t_\t_\n" for i in range(1, 60)
    )
    (tmp_path / "trees.conllu").write_text(conllu(words) + long)
    output = run_json("heads", bert, tmp_path / "trees.conllu")
    assert (output["rows"], output["too_long"]) == (2, 1)
    assert {relation["count"] for relation in output["relations"]} == {29}
