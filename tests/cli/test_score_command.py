"""`manyheads score`: one text or many, in a terminal and in a pipe; errors with the number of the line."""

from __future__ import annotations

import io
import json
import math
import re

import pytest
from command import error_of, run, run_json
from rich.console import Console
from small_checkpoints import folder_of

import manyheads
from manyheads.cli.console import print_json
from manyheads.cli.score import STYLES, Scorer, print_scores, visible_tokens
from manyheads.generate.score import ScoredText, ScoredToken

TEXTS = ["word0 word4 word2", "word7 word1", "", "word9 word3 word1 word2 word8", "word5 word5"]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return folder_of("gpt2", tmp_path_factory.mktemp("score") / "gpt2", bos_token_id=None)


def test_an_infinite_perplexity_is_null_in_json(capsys):
    """And no other value that JSON lacks is written."""
    scored = ScoredText("a", (ScoredToken("a", 3, "a", -800.0),))
    result = Scorer(None, None, None, None).result("a", scored)
    print_json(result)
    assert json.loads(capsys.readouterr().out) == result | {"perplexity": None}
    assert Scorer.format_line(None, result).split("\t")[1] == "inf"
    with pytest.raises(KeyError):
        print_json({"loss": math.nan})


def as_tree(scored):
    names = ("token", "id", "logprob", "surprisal")
    tokens = [{name: getattr(token, name) for name in names} for token in scored.tokens]
    return {"text": scored.text, "tokens": tokens} | {
        name: getattr(scored, name) for name in ("count", "logprob", "perplexity", "bits_per_token")
    }


def approximately(tree):
    """Numbers to five digits: a batch changes the last ones."""
    if isinstance(tree, dict):
        return {name: approximately(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [approximately(item) for item in tree]
    return pytest.approx(tree, abs=1e-4, rel=1e-4) if isinstance(tree, float) else tree


def test_the_command_gives_what_the_library_gives(gpt2):
    checkpoint = manyheads.load(gpt2)
    assert run_json("score", gpt2, TEXTS[0]) == {"schema": 1} | approximately(as_tree(checkpoint.score(TEXTS[0])))
    context = ["--context", "word3 "]
    after = as_tree(checkpoint.score(TEXTS[1], context="word3 "))
    assert run_json("score", gpt2, TEXTS[1], *context) == {"schema": 1, "context": "word3 "} | approximately(after)
    long = " ".join(f"word{i % 50}" for i in range(90))
    scored = checkpoint.score(long, stride=7)
    assert run_json("score", gpt2, long, "--stride", 7)["logprob"] == pytest.approx(scored.logprob, rel=1e-4)
    assert scored.logprob != pytest.approx(checkpoint.score(long).logprob, rel=1e-6)


def test_each_line_gives_what_the_text_gives_alone(gpt2, tmp_path):
    checkpoint, lines = manyheads.load(gpt2), "\n".join(TEXTS).encode()
    rows = [json.loads(line) for line in run("score", gpt2, "--json", stdin=lines).stdout.splitlines()]
    expected = [{"schema": 1} | approximately(as_tree(checkpoint.score(item))) if item else None for item in TEXTS]
    assert rows == expected
    (tmp_path / "texts").write_bytes(lines)
    plain = run("score", gpt2, "--file", tmp_path / "texts").stdout.splitlines()
    for line, text, row in zip(plain, TEXTS, rows, strict=True):
        if not text:
            assert line == ""
            continue
        logprob, perplexity, count, shown = line.split("\t")
        assert (shown, int(count)) == (text, row["count"])
        assert [float(logprob), float(perplexity)] == pytest.approx([row["logprob"], row["perplexity"]], abs=1e-3)


def test_a_whole_file_is_one_text(gpt2, tmp_path):
    (tmp_path / "poem").write_text("word1 word2\n\nword3\n")
    row = run_json("score", gpt2, "--whole", "--file", tmp_path / "poem")
    assert (row["text"], len(row["tokens"])) == ("word1 word2\n\nword3", 3)


def test_a_target_is_scored_for_its_source(tmp_path):
    folder = folder_of("bart", tmp_path / "bart", tokenizer=False)
    row = run_json("score", folder, "5 9 7", "--source", "8 4")
    expected = manyheads.load(folder).score([5, 9, 7], source=[8, 4])
    assert row["logprob"] == pytest.approx(expected.logprob, abs=1e-4)
    assert [token["id"] for token in row["tokens"]] == [5, 9, 7]
    assert error_of("score", folder, "5 9 7", check=2)["code"] == "usage.argument"
    assert error_of("score", folder, "word", "--source", "8", check=2)["code"] == "input.invalid"


def test_a_line_that_cannot_be_scored_costs_that_line(gpt2):
    done = run("score", gpt2, "--json", stdin=b"word1 word2\nword1\n\xff\nword3 word4\n", check=3)
    first, short, broken, last = map(json.loads, done.stdout.splitlines())
    assert (first["text"], last["text"]) == ("word1 word2", "word3 word4")
    assert (short["error"]["code"], broken["error"]["code"]) == ("input.length", "data.encoding")
    assert "line 2" in short["error"]["message"]


def test_wrong_options_and_models_are_errors(gpt2, tmp_path):
    assert error_of("score", gpt2, "word1 word2", "--stride", 41, check=2)["code"] == "usage.argument"
    assert error_of("score", gpt2, "word1 word2", "--source", "word1", check=2)["code"] == "usage.argument"
    assert error_of("score", gpt2, "word1", "--whole", check=2)["code"] == "usage.argument"
    bert = folder_of("bert", tmp_path / "bert")
    assert error_of("score", bert, "word1 word2", check=2)["code"] == "model.unsupported"


# ---------------------------------------------------------------------------------------------------------- what is shown


def shown(scored, **options):
    output = io.StringIO()
    print_scores(scored, Console(file=output, width=80, markup=False, highlight=False, **options))
    return output.getvalue()


def token(text, logprob, *, name=None, number=1):
    return ScoredToken(name or text, number, text, logprob)


SCORED = ScoredText(
    "a b\n漢",
    (
        token("a", None),
        token(" b", -0.1),
        token("\n", -2.0),
        token("漢", -5.0, name="�"),
        token("", -6.0, name="�"),
        token("", -9.0, name="</s>"),
    ),
)


def test_the_colors_of_a_text_are_those_of_the_legend():
    text = shown(SCORED, force_terminal=True, color_system="truecolor")
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    first, second, *_ = plain.splitlines()
    assert (first, second.strip()) == ("a b↵", "漢</s>")
    backgrounds = re.findall(r"48;2;[\d;]+", text)
    assert len(set(backgrounds)) == len(STYLES) - 1, "all in the legend, and those of the text are among them"
    assert "5 of 6 tokens" in plain
    assert all(f"{least:g}" in plain for least in STYLES)


def test_tokens_of_one_character_are_shown_together():
    units = dict(visible_tokens(SCORED))
    assert units["漢"] == pytest.approx(SCORED.tokens[3].surprisal + SCORED.tokens[4].surprisal)
    assert units["</s> "] == SCORED.tokens[5].surprisal
    assert units["a"] is None


@pytest.mark.parametrize("options", [{}, {"force_terminal": True, "no_color": True}, {"color_system": None}])
def test_without_colors_every_token_has_a_row(options):
    text = shown(SCORED, **options)
    assert "48;" not in text
    rows = [line.split() for line in text.splitlines()]
    assert sum(row[-1] == f"{SCORED.tokens[2].surprisal:.2f}" for row in rows if row) == 1
    assert sum('"' in line for line in text.splitlines()) == len(SCORED.tokens)


def test_a_text_sends_no_control_codes_to_a_terminal():
    scored = ScoredText("\x1b]0;x\x07", (token("a", None), token("\x1b]0;x\x07", -1.0)))
    for options in ({}, {"force_terminal": True, "color_system": "truecolor"}):
        assert "\x1b]0" not in shown(scored, **options)
