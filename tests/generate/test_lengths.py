"""Texts longer than the model's positions or than those of training: refused, limited or allowed, never in silence."""

from __future__ import annotations

import json

import pytest
from command import error_of, run, run_json
from kinds import decoder, ngram, random_model, recurrent
from raising import raises
from small_checkpoints import folder_of

import manyheads
from manyheads import Checkpoint
from manyheads.generate.generator import TextGenerator

LEARNED = decoder(position={"kind": "learned", "length": 12})


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """40 learned positions, and no token that ends a text."""
    return folder_of("gpt2", tmp_path_factory.mktemp("lengths") / "gpt2", eos_token_id=None, bos_token_id=None)


def test_tokens_that_the_model_has_no_positions_for_are_refused_if_the_caller_wants_them():
    checkpoint = Checkpoint(random_model(LEARNED))
    for method in ({}, {"num_beams": 2}, {"temperature": 1.0}, {"prompt_lookup_num_tokens": 3}, {"penalty_alpha": 0.5}):
        most = 7 if "penalty_alpha" in method else 8  # contrastive search reads the last token too
        assert len(checkpoint.generate([3] * 5, max_new_tokens=most, **method)) == most
        with raises("input.length", 5, most + 1, 12, most):
            checkpoint.generate([3] * 5, max_new_tokens=most + 1, **method)
    with raises("input.length", 12):
        checkpoint.generate([3] * 12, penalty_alpha=0.5)
    with raises("input.length") as caught:
        checkpoint.generate([[3], [3] * 5, [3] * 9], max_new_tokens=6)
    assert caught.value.index == 2


def test_generate_stream_predict_and_the_command_line_agree(gpt2):
    checkpoint, text = manyheads.load(gpt2), "word1 word2 word3"
    for call in (
        lambda: checkpoint.generate(text, max_new_tokens=39),
        lambda: list(checkpoint.stream(text, max_new_tokens=39)),
        lambda: manyheads.predict(checkpoint, text, max_new_tokens=39),
    ):
        with raises("input.length", 39, 40, 38):
            call()
    assert error_of("predict", gpt2, text, "--max-new-tokens", 39, check=2)["code"] == "input.length"
    done = run("predict", gpt2, text, "--max-new-tokens", 39, "--stream", check=2)
    assert (done.stdout, "38" in done.stderr) == ("", True)
    assert len(manyheads.predict(checkpoint, text, max_new_tokens=38)["generated"].split()) == 38


def test_one_line_without_room_is_an_error_of_that_line(gpt2):
    lines = "word1\n" + "word1 " * 30 + "\nword2\n"
    done = run("predict", gpt2, "--max-new-tokens", 20, "--json", stdin=lines.encode(), check=3)
    first, wrong, last = (json.loads(line) for line in done.stdout.splitlines())
    assert wrong["error"]["code"] == "input.length"
    assert "line 2" in wrong["error"]["message"]
    assert "note" not in first | last


def test_a_default_ends_where_the_positions_end_and_says_so(gpt2):
    checkpoint = manyheads.load(gpt2)
    with pytest.warns(UserWarning, match="40 positions"):
        text = checkpoint.generate("word1 word2 word3", details=True)
    assert (len(text.token_ids), text.finish_reason) == (38, "length")
    with pytest.warns(UserWarning, match="40 positions"):
        assert "".join(checkpoint.stream("word1 word2 word3")) == text.text
    result = run_json("predict", gpt2, "word1 word2 word3")
    assert (result["generated"], result["note"]) == (text.text, text.note)
    assert manyheads.predict(checkpoint, "word1 word2 word3")["note"] == text.note
    done = run("predict", gpt2, stdin=b"word1\nword2\nword3\n")
    assert done.stderr.count("40 positions") == 1
    ended = checkpoint.generate("word1 word2 word3", details=True, stop=text.text.split()[3])
    assert (ended.finish_reason, ended.note) == ("stop", None)


@pytest.mark.parametrize(
    ("position", "named"),
    [
        ({"kind": "rope"}, "rope"),
        ({"kind": "alibi"}, "alibi"),
        ({"kind": "clipped"}, "clipped"),
        ({"kind": "sinusoidal"}, "sinusoidal"),
        ({"kind": "rope", "scaling": {"kind": "yarn", "factor": 4.0, "length": 8}}, "yarn scaling"),
        ({"kind": "rope", "scaling": {"kind": "dynamic", "factor": 4.0, "length": 8}}, "dynamic scaling"),
        (
            {"kind": "rope", "scaling": {"kind": "longrope", "short_factor": [1.0], "long_factor": [4.0], "length": 8}},
            "longrope scaling",
        ),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_a_scheme_without_a_limit_goes_on_beyond_the_trained_length_and_says_so(position, named):
    checkpoint = Checkpoint(random_model(decoder(position=position)))
    if "scaling" not in position:
        assert checkpoint.context_length is None
        assert checkpoint.generate([3] * 20, details=True).note is None, "no length is known"
        checkpoint.__dict__["text_generator"] = TextGenerator(checkpoint.model, None, 8)
    with pytest.warns(UserWarning, match=f"8 tokens.*{named}"):
        text = checkpoint.generate([3] * 6, max_new_tokens=30, details=True)
    assert len(text.token_ids) == 30
    assert checkpoint.generate([3] * 6, max_new_tokens=3, details=True).note is None, "the last token is not read"


def test_the_context_length_is_that_of_the_positions_the_config_or_the_run(tmp_path):
    assert manyheads.load(folder_of("llama", tmp_path / "llama", tokenizer=False)).context_length == 40
    checkpoint = manyheads.load(folder_of("gpt2", tmp_path / "gpt2"))
    assert checkpoint.context_length == checkpoint.max_positions
    checkpoint.tokenizer.enable_truncation(17)
    assert Checkpoint(random_model(decoder(position="rope")), checkpoint.tokenizer).context_length == 17


@pytest.mark.parametrize("spec", [ngram(), recurrent(source=False)], ids=["ngram", "recurrent"])
def test_models_without_positions_have_no_limit(spec):
    assert len(Checkpoint(random_model(spec)).generate([3] * 20, max_new_tokens=100)) == 100


def test_max_length_of_a_checkpoint_says_that_it_ended_the_text(gpt2, tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", eos_token_id=None, bos_token_id=None)
    (folder / "generation_config.json").write_text('{"max_length": 9}')
    with pytest.warns(UserWarning, match="max_length.*9"):
        assert len(manyheads.load(folder).generate([3, 4, 5])) == 6
