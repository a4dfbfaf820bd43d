"""Run files: every misspelt key is named with its line, wrong values with theirs, and sizes must fit the data."""

from __future__ import annotations

import json
import re

import pytest
from command import error_of, run
from small_runs import described

from manyheads.errors import UnknownKeyError
from manyheads.spec import to_toml
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run_file

FILE = """seed = 5
[model]
vocab = "tokenizer"
init = "xavier"
[model.encoder]
layers = 1
width = 16
attention = { kind = "heads", heads = 2 }
feedforward = { kind = "mlp", hidden = 32, activation = "relu" }
position = "sinusoidal"
residual = { kind = "pre", dropout = 0.1 }
pattern = [
  { mask = { window = 4 } },
]

# the other stack
[model.decoder]
like = "encoder"
embed = "shared"
cross = true
[data]
kind = "sequence"
function = "reverse"
count = 400
[tokenizer]
kind = "words"
lowercase = true
[task]
kind = "seq2seq"
label_smoothing = 0.1
[optim]
lr = 0.001
[optim.schedule]
kind = "cosine"
warmup_steps = 2
[train]
steps = 4
best = { metric = "loss", stop_at = 0.5, patience = 3 }
"""


def keys(text):
    """The line number and the columns of every key."""
    for number, line in enumerate(text.splitlines(), 1):
        pattern = r"([a-z_]+)(?=\])" if line.startswith("[") else r"(?<![\w\".])([a-z_]+)(?= = |\])"
        for match in re.finditer(pattern, line):
            yield number, match.start(1), match.end(1)


def test_every_misspelt_key_is_named_with_its_line_and_the_nearest_key(tmp_path):
    path, count = tmp_path / "run.toml", 0
    path.write_text(FILE)
    read_run_file(path)
    lines = FILE.splitlines()
    for number, start, end in keys(FILE):
        line = lines[number - 1]
        name = line[start:end]
        wrong = name[:-1] + "q" + name[-1]
        path.write_text("\n".join([*lines[: number - 1], f"{line[:start]}{wrong}{line[end:]}", *lines[number:]]))
        with pytest.raises(UnknownKeyError) as error:
            read_run_file(path)
        # a value over several lines is at the first of them
        first = next(n for n in range(number, 0, -1) if not lines[n - 1].startswith(" "))
        message = str(error.value)
        assert f"{path}:{first}: " in message
        assert f"'{wrong}'" in message
        assert f"'{name}'" in message
        count += 1
    assert count > 35


@pytest.mark.parametrize(
    ("old", "new", "line", "code"),
    [
        ("steps = 4", "steps = 0", "steps = 4", "config.out-of-range"),
        ('kind = "cosine"', 'kind = "cosinus"', "[optim.schedule]", "config.unknown-kind"),
        ("warmup_steps = 2", 'warmup_steps = "2"', "warmup_steps = 2", "config.wrong-type"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(old, new, line, code, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(FILE.replace(old, new))
    error = error_of("train", path, "--output", tmp_path / "run", check=2)
    assert error["code"] == code
    assert f"{path}:{FILE.splitlines().index(line) + 1}: " in error["message"]


def test_a_wrong_value_of_an_override_is_named_with_the_override(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    error = error_of("train", path, "--output", tmp_path / "run", "-s", "train.steps=0", check=2)
    assert error["code"] == "config.out-of-range"
    assert "-s train.steps=0" in error["message"]


def test_a_vocabulary_that_does_not_fit_the_tokenizer_is_refused(tmp_path):
    data = {"kind": "sequence", "function": "reverse", "count": 120, "validation_count": 20}
    path = tmp_path / "run.toml"
    path.write_text(to_toml(described("seq2seq", steps=1) | {"data": data}))
    prepared = prepare(read_run_file(path))
    size = prepared.special_tokens.vocab_size
    error = error_of("train", path, "--output", tmp_path / "small", "-s", f"model.vocab={size - 1}", check=2)
    assert error["code"] == "config.incompatible"
    assert {str(size - 1), str(size)} <= set(re.findall(r"\d+", error["message"]))
    run("train", path, "--output", tmp_path / "exact", "-s", f"model.vocab={size}")

    tokenizer = json.loads(prepared.tokenizer.to_str())
    vocab = tokenizer["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] += 7  # a gap, so that ids are higher than the number of tokens
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    gap = ("-s", f'tokenizer={{kind="file",path="{tmp_path / "tokenizer.json"}"}}')
    error = error_of("train", path, "--output", tmp_path / "gap", *gap, "-s", f"model.vocab={size}", check=2)
    assert str(size + 7) in error["message"]
    run("train", path, "--output", tmp_path / "gap", *gap)
