"""`manyheads predict`: one text or many, one per line, of every task; errors with the number of the line."""

from __future__ import annotations

import gzip
import json
import os
import signal
from functools import partial
from multiprocessing import Pipe

import pytest
from command import error_of, run, run_json, set_attribute, started
from raising import raises
from small_checkpoints import folder_of
from small_runs import described, train_all
from tokenizers import Tokenizer, decoders

import manyheads
from manyheads.cli.inputs import CHUNK
from manyheads.generate.config import GenerationConfig
from manyheads.tasks.prediction import PredictOptions
from manyheads.tasks.task import task_of
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run

OPTIONS = PredictOptions(GenerationConfig())
TEXTS = ["word0 word4 word2", "word7", "", "word9 word3 word1 word2 word8", "word7", "   ", "word5 word5"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 2, "length_penalty": 2},
        {"temperature": 1.5, "seed": 4},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_each_line_gives_what_the_text_gives_alone(options, tmp_path):
    """From a file, a gzip file and standard input; in the same order, with blank lines."""
    folder = folder_of("gpt2", tmp_path / "gpt2", eos_token_id=9, bos_token_id=None)
    data = "\r\n".join(TEXTS).encode()
    (tmp_path / "texts").write_bytes(b"\xef\xbb\xbf" + data)
    (tmp_path / "texts.gz").write_bytes(gzip.compress(data))
    ours, settings = manyheads.load(folder), {"max_new_tokens": 7} | options
    expected = [ours.generate(text, **settings) if text.strip() else "" for text in TEXTS]
    texts = [text for text in TEXTS if text.strip()]
    assert ours.generate(texts, **settings) == [text for text in expected if text]
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    common = ["predict", folder, *flags]
    for done in (
        run(*common, "--file", tmp_path / "texts"),
        run(*common, "-f", tmp_path / "texts.gz"),
        run(*common, stdin=data),
    ):
        assert done.stdout == "".join(f"{line}\n" for line in expected)
        assert done.stderr == ""
    rows = [json.loads(line) for line in run(*common, "-", "--json", stdin=data).stdout.splitlines()]
    assert [row["generated"] if row else "" for row in rows] == expected
    assert rows[2] is rows[5] is None
    fixed = {"schema": 1, "task": "causal", "text": TEXTS[0], "generated": expected[0]}
    assert rows[0].items() >= fixed.items()
    assert rows[0].keys() - fixed.keys() == {"finish_reason", *(["score"] if "num_beams" in options else [])}
    one = run_json(*common, TEXTS[0])
    given = {name: setting["value"] for name, setting in one.pop("settings").items() if setting["from"] == "caller"}
    assert given.pop("decoding", "greedy") in ("beam", "sample") or not options
    assert given == settings
    if "num_beams" in options:  # a batch of other texts changes the last digits
        assert one.pop("score") == pytest.approx(rows[0].pop("score"), abs=1e-4)
    assert one == rows[0]


TASKS = {
    "bert": ("masked", ["word0 [MASK] word2", "[MASK]", "word1 [MASK] word3 [MASK] word5"]),
    "bert-classes": ("classify", ["word0", "word1 word2 word3", "word4 word5"]),
    "bert-bare": ("retrieval", ["word0", "word1 word2 word3", "word4 word5"]),
    "marian": ("seq2seq", ["5 9 7", "8", "9 10 11 12"]),
}


@pytest.mark.parametrize("name", TASKS)
def test_every_task_reads_many_texts(name, tmp_path):
    (task, texts), folder = TASKS[name], folder_of(name, tmp_path / name, tokenizer=name != "marian")
    lines = "\n".join(["", *texts]).encode()
    rows = [json.loads(line) for line in run("predict", folder, "--json", stdin=lines).stdout.splitlines()]
    ours = manyheads.load(folder)
    alone = [manyheads.predict(ours, text) for text in texts]
    assert rows[0] is None
    assert [row["task"] for row in rows[1:]] == [task] * 3
    for row, result in zip(rows[1:], alone, strict=True):
        expected = {
            key: pytest.approx(value, abs=1e-5) if isinstance(value, float) else value
            for key, value in flatten(result).items()
        }
        assert flatten(row) == {"schema": 1} | expected
    plain = run("predict", folder, stdin=lines).stdout.splitlines()
    assert plain[0] == ""
    assert len(plain) == 4
    if task == "classify":
        assert [line.split("\t")[0] for line in plain[1:]] == [result["classes"][0]["class"] for result in alone]
    if task == "masked":
        assert plain[3].split("\t") == [item["tokens"][0]["token"] for item in alone[2]["filled"]]


def flatten(value, path=""):
    """A tree as one table, to be compared number by number."""
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for name, item in inner for key, leaf in flatten(item, f"{path}.{name}".strip(".")).items()}
    return {path: value}


BAD_LINES = {
    "not UTF-8": (b"\xff", "data.encoding", "0xff"),
    "Latin-1": (b"[MASK] \xe9t\xe9", "data.encoding", "0xe9"),
    "UTF-16": ("word0".encode("utf-16"), "data.encoding", "0xff"),
    "NUL": (b"word0 \0 [MASK]", "data.encoding", "NUL"),
    "no mask": (b"word0", "input.invalid", "[MASK]"),
    "too long": (b"[MASK] " + b"word0 " * 50, "input.length", 53, 40),
    "a long line": (b"[MASK] " * 300, "data.too-large", "1,000"),
    "a longer line": (b"[MASK] " * 900, "data.too-large", "1,000"),
}


# a character may have four bytes
SMALL_LIMITS = partial(set_attribute, "manyheads.cli.inputs", "MAX_LINE_LENGTH", 1000)


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_that_cannot_be_read_costs_that_line(name, tmp_path):
    """Its error stands in its place, and the other lines have what they have alone."""
    folder, (line, code, *values) = folder_of("bert", tmp_path / "bert"), BAD_LINES[name]
    good = [
        json.loads(row) for row in run("predict", folder, "--json", stdin=b"[MASK]\nword1 [MASK]").stdout.splitlines()
    ]
    data = b"[MASK]\n\n" + line + b"\nword1 [MASK]\n" + line
    (tmp_path / "lines").write_bytes(data)
    common = ["predict", folder, "--file", tmp_path / "lines"]
    done = run(*common, "--json", check=3, before=SMALL_LIMITS)
    first, blank, bad, second, last = map(json.loads, done.stdout.splitlines())
    assert (first["filled"][0]["tokens"][0], blank, second["text"]) == (
        good[0]["filled"][0]["tokens"][0],
        None,
        "word1 [MASK]",
    )
    for error, number in ((bad, 3), (last, 5)):
        assert set(error) == {"schema", "error"}
        assert error["error"]["code"] == code
        assert all(str(value) in error["error"]["message"] for value in (tmp_path / "lines", f"line {number}", *values))
    plain = run(*common, check=3, before=SMALL_LIMITS)
    lines = plain.stdout.split("\n")
    assert [bool(item) for item in lines] == [True, False, False, True, False, False]
    assert plain.stderr.count(str(values[0])) >= 2
    assert "Traceback" not in plain.stderr


# --------------------------------------------------------------------------------------------- prompts with line breaks


def test_a_whole_input_is_one_text_with_its_line_breaks(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", bos_token_id=None)
    (tmp_path / "prompt").write_bytes(b"\xef\xbb\xbfword1 word2\r\n\r\nword3\n")
    text = "word1 word2\n\nword3"
    expected = run_json("predict", folder, text)
    assert expected["text"] == text
    common = ["predict", folder, "--whole"]
    assert run_json(*common, "--file", tmp_path / "prompt") == expected
    assert run_json(*common, stdin=f"{text}\n".encode()) == run_json(*common, "-", stdin=text.encode()) == expected
    assert run_json(*common, stdin=f"{text}\n\n".encode())["text"] == f"{text}\n", "one line break ends the last line"
    (tmp_path / "prompt.jsonl").write_text('"word1"\n')
    assert run_json(*common, "--file", tmp_path / "prompt.jsonl")["text"] == '"word1"'


def test_a_whole_input_that_cannot_be_read_is_an_error(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", bos_token_id=None)
    common = ["predict", folder, "--whole"]
    for stdin, code in (
        (b"", "data.empty"),
        (b"\n \n", "data.empty"),
        (b"word1\n\xff\n", "data.encoding"),
        (b"word1 word2\n" * 100, "data.too-large"),
        (b"word1 " * 1000, "data.too-large"),
    ):
        assert error_of(*common, stdin=stdin, check=3, before=SMALL_LIMITS)["code"] == code
    assert error_of(*common, "word1", check=2)["code"] == "usage.argument"
    replaced = run(*common, "--encoding-errors", "replace", stdin=b"word1\n\xe9\n")
    assert replaced.stderr.startswith("standard input: 1 ")


def test_json_lines_are_texts_with_line_breaks(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", bos_token_id=None)
    texts = ["word1\nword2 word3", "word4", "word5 \n\n word6"]
    lines = [json.dumps(texts[0]), "", json.dumps({"text": texts[1], "label": 3}), json.dumps({"prompt": texts[2]})]
    data = "\n".join([*lines, '""']).encode()
    (tmp_path / "prompts.jsonl").write_bytes(data)
    (tmp_path / "prompts.ndjson.gz").write_bytes(gzip.compress(data))
    common = ["predict", folder, "--max-new-tokens", 3]
    alone = [run_json(*common, text)["generated"] for text in texts]
    for name in ("prompts.jsonl", "prompts.ndjson.gz"):
        rows = [json.loads(line) for line in run(*common, "--json", "-f", tmp_path / name).stdout.splitlines()]
        assert [row and row["text"] for row in rows] == [texts[0], None, *texts[1:], None]
        assert [row["generated"] for row in rows if row] == alone
    plain = run(*common, "-f", tmp_path / "prompts.jsonl").stdout.splitlines()
    assert plain == [" ".join(alone[0].split()), "", *(" ".join(result.split()) for result in alone[1:]), ""]


BAD_JSON = [
    "{",
    "3",
    "null",
    '{"text": 3}',
    '{"label": "word1"}',
    '{"text": "a", "prompt": "b"}',
    '{"text": "a", "text": "b"}',
]


def test_a_line_of_json_without_a_text_costs_that_line(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", bos_token_id=None)
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(['"word1"', *BAD_JSON, '"\\ud800"', '"word2"']))
    done = run("predict", folder, "--max-new-tokens", 2, "--json", "--file", path, check=3)
    first, *bad, surrogate, last = map(json.loads, done.stdout.splitlines())
    assert (first["text"], last["text"]) == ("word1", "word2")
    assert [row["error"]["code"] for row in bad] == ["data.row"] * len(BAD_JSON)
    assert [f"{path}, line {i + 2}" in row["error"]["message"] for i, row in enumerate(bad)] == [True] * len(BAD_JSON)
    assert surrogate["error"]["code"] == "input.invalid"


# ----------------------------------------------------------------------------------------------------------------- loops


def test_loops_are_reported(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", bos_token_id=None, eos_token_id=None)
    common = ["predict", folder, "--loops", "-s", "suppress_tokens=[0, 1, 2, 3]"]
    result = run_json(*common, "word1", "--max-new-tokens", 36)
    words, loop = result["generated"].split(), result["loop"]
    assert set(loop) == {"prefix", "period", "repeats", "text"}, "this model repeats itself"
    assert words[loop["prefix"] : len(words) - loop["period"]] == words[loop["prefix"] + loop["period"] :]
    assert words[loop["prefix"] :][: loop["period"]] == loop["text"].split()
    assert loop["repeats"] == (36 - loop["prefix"]) // loop["period"] >= 2
    plain = run(*common, "word1", "--max-new-tokens", 36).stdout.splitlines()
    assert plain[0] == result["generated"]
    assert all(str(value) in plain[1] for value in loop.values())
    assert "loop" not in run_json("predict", folder, "word1")
    none = run_json(*common, "word1", "--max-new-tokens", 1)
    assert none["loop"] is None
    several = run_json(*common, "word1", "--num-beams", 2, "-n", 2, "--max-new-tokens", 4)
    assert all("loop" in sequence for sequence in several["sequences"])
    done = run(*common, "--max-new-tokens", 36, stdin=b"word1\n\nword2\n")
    assert len(done.stdout.splitlines()) == 3
    assert "of 2" in done.stderr


def test_a_text_that_ended_has_no_loop(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", bos_token_id=None, eos_token_id=None)
    command = ["predict", folder, "word1", "--loops", "--max-new-tokens", 30]
    generated = run_json(*command)["generated"].split()
    result = run_json(*command, "--stop", generated[-1])
    assert (result["finish_reason"], result["loop"]) == ("stop", None)


def test_loops_need_a_generated_text_that_is_complete(tmp_path):
    bert = folder_of("bert", tmp_path / "bert")
    assert error_of("predict", bert, "[MASK]", "--loops", check=2)["code"] == "usage.argument"
    with raises("usage.argument"):
        manyheads.predict(bert, "[MASK]", loops=True)
    assert error_of("predict", bert, "[MASK]", "--loops", "--stream", check=2)["code"] == "usage.argument"


def test_when_no_line_can_be_read_each_has_its_error(tmp_path):
    folder = folder_of("bert", tmp_path / "bert")
    done = run("predict", folder, "--json", stdin=b"\xff\nword0\n", check=3)
    codes = [json.loads(line)["error"]["code"] for line in done.stdout.splitlines()]
    assert codes == ["data.encoding", "input.invalid"]


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    folder = folder_of("bert", tmp_path / "bert")
    broken = gzip.compress(b"word0 [MASK]\n" * 100)[:-20]
    for stdin, code in ((b"", "data.empty"), (b"\n \n\r\n", "data.empty"), (broken, "data.file")):
        assert error_of("predict", folder, stdin=stdin, check=3)["code"] == code
        done = run("predict", folder, stdin=stdin, check=3)
        assert (len(done.stderr.splitlines()), done.stdout) == (1, "")
    assert error_of("predict", folder, "--file", tmp_path, check=3)["code"] == "data.file"
    replaced = run("predict", folder, "--encoding-errors", "replace", stdin=b"[MASK] \xe9t\xe9\n[MASK]\n")
    assert len(replaced.stdout.splitlines()) == 2
    assert replaced.stderr.startswith("standard input: 1 ")


def test_token_ids_that_the_model_lacks_cost_their_line(tmp_path):
    folder = folder_of("bart", tmp_path / "bart", tokenizer=False)
    done = run("predict", folder, "--json", stdin=b"5 9 7\n5 99\n8\n" + b"5 " * 41, check=3)
    first, unknown, second, long = map(json.loads, done.stdout.splitlines())
    assert (first["text"], second["text"]) == ("5 9 7", "8")
    assert (unknown["error"]["code"], long["error"]["code"]) == ("input.invalid", "input.length")
    assert "99" in unknown["error"]["message"]
    assert "41" in long["error"]["message"]


def test_a_truncated_text_has_room_for_the_last_token_that_contrastive_search_reads(tmp_path):
    checkpoint = manyheads.load(folder_of("gpt2", tmp_path / "gpt2", eos_token_id=None, bos_token_id=None))
    result = manyheads.predict(checkpoint, "word1 " * 60, truncate=True, max_new_tokens=8, penalty_alpha=0.5)
    assert (result["truncated_to"], len(result["generated"].split())) == (32, 8)


TRUNCATED = {
    "gpt2": 33,
    "bert-classes": 40,
    "bert-bare": 40,
    "bart": 40,
}  # tokens that are read of 60, with 8 to generate


@pytest.mark.parametrize("name", TRUNCATED)
def test_a_long_text_is_truncated_if_asked_and_says_so(name, tmp_path):
    folder, count = folder_of(name, tmp_path / name), TRUNCATED[name]
    words = [f"word{i % 50}" for i in range(60)]
    checkpoint, text = manyheads.load(folder), " ".join(words)
    with raises("input.length"):
        manyheads.predict(checkpoint, text, max_new_tokens=8)
    result = manyheads.predict(checkpoint, text, max_new_tokens=8, truncate=True)
    assert result["truncated_to"] == count
    kept = words[-count:] if name == "gpt2" else words[: 38 if name.startswith("bert") else 40]
    shortened = task_of(checkpoint).with_truncation(checkpoint, GenerationConfig(max_new_tokens=8))
    assert [token for token in shortened.encode([text])[0].tokens if token.startswith("word")] == kept
    alone = manyheads.predict(checkpoint, " ".join(kept), max_new_tokens=8)
    assert flatten(result | {"text": "", "truncated_to": 0}) == flatten(alone | {"text": "", "truncated_to": 0})
    done = run("predict", folder, text, "--truncate", "--max-new-tokens", 8)
    assert str(count) in done.stderr
    done = run("predict", folder, "--truncate", "--max-new-tokens", 8, "--json", stdin=f"word0\n{text}\n".encode())
    first, second = map(json.loads, done.stdout.splitlines())
    assert ("truncated_to" in first, second["truncated_to"]) == (False, count)
    assert len(done.stderr.splitlines()) == 1
    assert "truncated_to" not in manyheads.predict(checkpoint, "word0", truncate=True)


def test_a_masked_run_truncates_if_asked(tmp_path):
    tree = described("masked", steps=1)
    stack = tree["model"]["encoder"] | {"position": {"kind": "learned", "length": 12}}
    tree["model"] = tree["model"] | {"encoder": stack}
    train_all(tree, tmp_path / "run")
    text = "<mask> " + "born in " * 20
    with raises("input.length"):
        manyheads.predict(tmp_path / "run", text)
    result = manyheads.predict(tmp_path / "run", text, truncate=True)
    assert (result["truncated_to"], len(result["filled"])) == (12, 1)
    with raises("input.invalid", "<mask>"):
        manyheads.predict(tmp_path / "run", "born in " * 20 + "<mask>", truncate=True)


def test_a_path_and_one_text_or_several_from_python(tmp_path):
    folder = folder_of("bert-classes", tmp_path / "bert")
    one = manyheads.predict(str(folder), "word0")
    assert one == manyheads.predict(folder, "word0") == manyheads.predict(manyheads.load(folder), "word0")
    assert [row["text"] for row in manyheads.predict(str(folder), ["word0", "word1"])] == ["word0", "word1"]
    assert manyheads.predict(folder, []) == []
    for wrong in (3, None, {"text"}):
        with raises("input.invalid"):
            manyheads.predict(folder, wrong)
        with raises("usage.argument"):
            manyheads.predict(wrong, "word0")


@pytest.mark.parametrize(
    ("arguments", "code", "name"),
    [
        (["TEXT", "--file", "x"], "usage.argument", "--file"),
        (["TEXT", "--num-beams", 0], "generate.config", "num_beams"),
        (["TEXT", "--num-beams", 257], "generate.config", "num_beams"),
        (["TEXT", "--num-beams", "x"], "usage.argument", "num-beams"),
        (["TEXT", "--num-beams", 2, "--temperature", 1], "generate.config", "temperature"),
        (["TEXT", "--temperature", -1], "generate.config", "temperature"),
        (["TEXT", "--length-penalty", 1], "generate.config", "num_beams"),
        (["TEXT", "--num-beams", 2, "--length-penalty", -99], "generate.config", "length_penalty"),
        (["TEXT", "--num-beams", 2, "--length-penalty", "nan"], "generate.config", "length_penalty"),
        (["TEXT", "--max-new-tokens", 0], "generate.config", "max_new_tokens"),
        (["TEXT", "--decoding", ""], "usage.argument", "decoding"),
        (["--encoding-errors", "skip"], "usage.argument", "encoding-errors"),
        (["TEXT", "--stream"], "usage.argument", "stream"),
        (["TEXT", "--regex", ""], "generate.config", "regex"),
        (["TEXT", "--json-schema", "false"], "generate.config", "json_schema"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(arguments, code, name, tmp_path):
    error = error_of("predict", tmp_path, *arguments, check=2)  # an empty folder is no checkpoint, exit status 4
    assert error["code"] == code
    assert name in error["message"]


def test_a_stream_is_that_of_one_generated_text(tmp_path):
    """One that is asked for; in a terminal, other results are printed as they are."""
    folder, lines = tmp_path, tmp_path / "lines.txt"
    lines.write_text("word1\nword2\n")
    for arguments in (("--file", lines), ("-",)):
        done = run("predict", folder, *arguments, "--stream", stdin=b"word1\nword2\n", check=2)
        assert (done.stdout, "--stream" in done.stderr) == ("", True)
    bert = folder_of("bert-classes", tmp_path / "bert")
    done = run("predict", bert, "word1", "--stream", check=2)
    assert (done.stdout, "--stream" in done.stderr) == ("", True)


def test_line_breaks_in_a_result_become_spaces(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", eos_token_id=None, bos_token_id=None)
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.decoder = decoders.Replace("word", "\n")
    own.save(str(folder / "tokenizer.json"))
    alone = run("predict", folder, "word0 word1").stdout
    assert "\n" in alone.strip()
    line = run("predict", folder, stdin=b"word0 word1\nword2\n").stdout.splitlines()[0]
    assert line.split() == alone.split()
    assert json.loads(run("predict", folder, "--json", stdin=b"word0 word1\n").stdout)["generated"] == alone[:-1]


def test_ctrl_c_ends_it_and_the_results_so_far_are_there(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", eos_token_id=None, bos_token_id=None)
    (stdin, typing), (reading, stdout), stderr = Pipe(duplex=False), Pipe(duplex=False), tmp_path / "err"
    stderr.touch()
    process = started("predict", folder, "--max-new-tokens", 1, stdin=stdin, stdout=stdout, stderr=stderr)
    with typing, reading, open(reading.fileno(), "rb", closefd=False) as output:
        with open(typing.fileno(), "wb", closefd=False) as file:
            file.write(b"word0 word1\n" * CHUNK)
        lines = [output.readline() for _ in range(CHUNK)]  # now it waits for more
        for _ in range(3):  # Python drops a signal that arrives while it shuts down; a user presses again
            os.kill(process.pid, signal.SIGINT)
            process.join(30)
            if process.exitcode is not None:
                break
    assert process.exitcode == 130
    assert "Traceback" not in stderr.read_text()
    assert len(set(lines)) == 1


# ---------------------------------------------------------------------------------------------- special tokens in texts


def ids_of(checkpoint, text):
    (encoding,) = checkpoint.encode([text])
    return encoding.ids


def test_a_run_reads_special_tokens_in_a_text_as_text_except_the_mask(tmp_path):
    """As in training; and so does an export of it, here and in transformers."""
    from transformers import PreTrainedTokenizerFast

    for name in ("causal", "masked"):
        tree = described(name, steps=1)
        train_all(tree, tmp_path / name)
        tokenizer = prepare(read_run(tree)).tokenizer
        checkpoint = manyheads.load(tmp_path / name)
        exported = tmp_path / f"{name}-exported"
        manyheads.export(checkpoint, exported, to="manyheads")
        text = "was </s> born <s> in"
        expected = [1, *tokenizer.encode(text, add_special_tokens=False).ids, *[2] * (name == "masked")]
        assert ids_of(checkpoint, text) == ids_of(manyheads.load(exported), text) == expected
        assert {1, 2} & set(expected[1:-1]) == set()
        assert PreTrainedTokenizerFast.from_pretrained(exported)(text)["input_ids"] == expected
    text = "a <mask> b </s> <mask>"
    before, between = (tokenizer.encode(piece, add_special_tokens=False).ids for piece in ("a ", " b </s> "))
    (encoding,) = checkpoint.encode_with_special([text], ["<mask>"])
    assert encoding.ids == [1, *before, 4, *between, 4, 2]
    done = run("predict", tmp_path / "masked", "--json", stdin=f"{text}\n<mask>".encode())
    positions = [[item["position"] for item in json.loads(line)["filled"]] for line in done.stdout.splitlines()]
    assert positions == [[1 + len(before), 2 + len(before) + len(between)], [1]]


def test_infill_generates_what_is_missing(tmp_path):
    """It reads prefix <mask> suffix <mask>, as in training; the user writes the text with one <mask>; so does an export."""
    attention, position = {"kind": "heads", "heads": 2}, {"kind": "learned", "length": 40}
    stack = {"layers": 1, "width": 32, "attention": attention, "position": position}
    pairs = (("sky", "blue"), ("grass", "green"), ("rose", "red"), ("sun", "yellow"))
    texts = [f"the {thing} is {color} today" for thing, color in pairs]
    (tmp_path / "texts.txt").write_text("\n".join([*texts * 10, "the sky is blue"]))
    tree = {
        "model": {"vocab": "tokenizer", "decoder": stack, "init": "xavier"},
        "data": {"kind": "text", "path": str(tmp_path / "texts.txt"), "document": "line"},
        "task": {"kind": "infill", "block_size": 8},
        "optim": {"lr": 1e-2, "schedule": {"kind": "linear", "warmup_steps": 5}},
        "train": {"steps": 200, "batch_tokens": 400, "eval_every": 200, "eval_rows": 1},
    }
    train_all(tree, tmp_path / "run")
    prompts = ["the grass is <mask> today", "<mask> rose is red today", "the sun is yellow <mask>"]
    for to in ("run", "hf", "manyheads"):
        if to != "run":
            manyheads.export(tmp_path / "run", tmp_path / to, to=to)
        checkpoint = manyheads.load(tmp_path / to)
        results = [manyheads.predict(checkpoint, text) for text in prompts]
        assert [row["generated"] for row in results] == ["green", "the", "today"]
        assert {row["task"] for row in results} == {"infill"}
    rows, _ = task_of(checkpoint).encode(checkpoint, prompts, OPTIONS)
    word = checkpoint.tokenizer.token_to_id
    assert rows[0] == [1, word("▁the"), word("▁grass"), word("▁is"), 4, word("▁today"), 4]
    long = "the sky is blue " * 30 + "<mask> today " + "the rose is " * 30
    (row,), truncated = task_of(checkpoint).encode(checkpoint.with_truncation(40), [long], OPTIONS)
    assert (len(row), truncated) == (40, {0: {"truncated_to": 40}})
    gap = row.index(4)
    assert [row[gap - 1], row[gap + 1]] == [word("▁blue"), word("▁today")], "what is nearest to the gap is kept"
    assert manyheads.predict(checkpoint, long, truncate=True)["truncated_to"] == 40
    with raises("input.length", 40):
        task_of(checkpoint).encode(checkpoint, [prompts[0], long], OPTIONS)
    for text, count in (("the grass", 0), ("<mask> is <mask>", 2)):
        with raises("input.invalid", "<mask>", count):
            manyheads.predict(checkpoint, text)
    assert run("predict", tmp_path / "run", prompts[0]).stdout == "green\n"


def test_a_run_of_spans_reads_sentinels(tmp_path):
    tree = described("spans", steps=1)
    train_all(tree, tmp_path / "run")
    tokens, checkpoint = prepare(read_run(tree)).special_tokens, manyheads.load(tmp_path / "run")
    text = "was <extra_0> born </s> in <extra_1>"
    (ids,), _ = task_of(checkpoint).encode(checkpoint, [text], OPTIONS)
    assert [token for token in ids if token in tokens.sentinels] == list(tokens.sentinels[:2])
    assert ids.count(tokens.eos) == 1, "at the end; the one in the text is text"
    assert run_json("predict", tmp_path / "run", text, "--max-new-tokens", 3)["task"] == "spans"


def test_a_command_that_does_not_end_is_reported():
    """By the helper of these tests, rather than waited for."""
    with pytest.raises(AssertionError, match=r"show gpt2 .* 0\.001 seconds"):
        run("show", "gpt2", check=None, timeout=0.001)


def test_a_line_that_never_ends_is_refused(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2")
    assert error_of("predict", folder, "--file", "/dev/zero", check=3)["code"] == "data.too-large"


def test_a_stop_string_may_be_a_line_break_as_a_shell_passes_it(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", eos_token_id=9, bos_token_id=None)
    stops = ["--stop", r"\n", "--stop", r"a\\nb\t"]
    settings = run_json("predict", folder, "word1", *stops, "--max-new-tokens", 1)["settings"]
    assert settings["stop"] == {"value": ["\n", "a\\nb\t"], "from": "caller"}
    assert settings["max_new_tokens"] == {"value": 1, "from": "caller"}
    assert (settings["seed"], settings["n"]) == ({"value": 0, "from": "default"}, {"value": 1, "from": "default"})


@pytest.mark.parametrize("command", ["predict", "score"])
def test_a_table_is_not_read_as_lines_of_text(command, tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", eos_token_id=9, bos_token_id=None)
    for name in ("a.csv", "a.tsv", "a.csv.gz", "a.parquet"):
        (tmp_path / name).write_text("text,label\nword1,a\n")
        assert error_of(command, folder, "--file", tmp_path / name, check=2)["code"] == "usage.argument"
