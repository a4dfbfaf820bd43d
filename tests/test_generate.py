"""Writing: search against all texts there are and against transformers, batches against single texts, and the rules of a checkpoint."""

from __future__ import annotations

import gzip
import itertools
import json
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import run
from kinds import VOCAB, decoder, made, ngram, padded, pair, recurrent, tokens
from small_checkpoints import CASES, folder_of, make, moved
from small_runs import described
from tokenizers import Tokenizer, decoders

import manyheads
from manyheads import Inputs, predicting
from manyheads.answer import infilling, masked, tokens_of
from manyheads.checkpoint import Loaded
from manyheads.generate import search as searching
from manyheads.generate.sample import Rules, sample
from manyheads.generate.search import search
from manyheads.train.loop import train
from manyheads.train.run import made_ready, read_run

SHAPES = {
    "decoder": decoder(),
    "windowed": decoder(mask={"causal": True, "window": 3}, position={"kind": "rope"}),
    "pair": pair(position={"kind": "sinusoidal"}),
    "recurrent": recurrent(),
    "recurrent-language": recurrent(source=False),
    "ngram": ngram(),
}
STEADY = {"head": {"kind": "free"}, "init": {"kind": "normal", "std": 1.0}}  # a tied head likes to repeat what it has read
SHAPES = {name: manyheads.read_model(manyheads.spec.to_tree(spec) | STEADY) for name, spec in SHAPES.items()}
STOP = Rules(stop=(2, 6, 10, 14, 18))
FREE = Rules()


def ends(model, prompt, source, rules=FREE):
    """The rules, with two tokens that end a text: chosen so that texts end at different steps."""
    free = greedy(model, prompt, source, rules)
    pairs = itertools.combinations(range(VOCAB), 2)
    return replace(rules, stop=max(pairs, key=lambda stop: len(set(map(len, cut(free, stop))))))


def sourced(name):
    return name in ("pair", "recurrent")


def asked(name, batch=3, length=4):
    """A prompt and a source, if the shape has one."""
    return (torch.ones(batch, 1, dtype=torch.long), tokens(batch, length)) if sourced(name) else (tokens(batch, length), None)


@torch.no_grad()
def likelihoods(model, prompt, source, texts):
    """log p of each text, by one forward over all of them whole."""
    longest, wanted = max(map(len, texts)), torch.tensor([[*text, *[-1] * (max(map(len, texts)) - len(text))] for text in texts])
    whole = torch.cat((prompt.expand(len(texts), -1), wanted.clamp(min=0)), dim=1)
    logits = model(whole) if source is None else model(whole, source.expand(len(texts), -1))
    chances = logits[:, -longest - 1 : -1].log_softmax(-1).gather(2, wanted.clamp(min=0)[..., None])[..., 0]
    return chances.masked_fill(wanted < 0, 0.0).sum(dim=1).tolist()


def every_text(vocab, longest, stop):
    """All texts that end in a stop, or are cut off."""
    inside = [token for token in range(vocab) if token not in stop]
    for length in range(1, longest + 1):
        last = range(vocab) if length == longest else stop
        yield from ([*before, end] for before in itertools.product(inside, repeat=length - 1) for end in last)


def small(name, vocab=4):
    flat = {"vocab": vocab, "init": {"kind": "normal", "std": 0.2}}  # many texts are about as likely
    return made(manyheads.read_model(manyheads.spec.to_tree(SHAPES[name]) | flat), seed=5)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("stop", [(2,), (2, 3)])
@pytest.mark.parametrize("name", SHAPES)
def test_with_beams_for_all_the_best_of_all_texts_is_found(name, stop, penalty):
    model, (prompt, source) = small(name), asked(name)
    prompt, source = prompt % 4, None if source is None else source % 4
    found = search(model, prompt, source, beams=4**4, penalty=penalty, max_new=4, rules=Rules(stop=stop))
    for i, row in enumerate(found):
        own = prompt[i : i + 1], None if source is None else source[i : i + 1]
        texts = list(every_text(4, 4, stop))
        scores = [found / ((5 + len(text)) / 6) ** penalty for text, found in zip(texts, likelihoods(model, *own, texts), strict=True)]
        assert row == texts[scores.index(max(scores))]


def test_many_beams_find_better_texts_than_one():
    """Few need not: what one beam finds may fall out of two on its way (a sum of −29.5 against −28.6 for these texts)."""
    model, prompt = made(SHAPES["decoder"]), tokens(16, 3)
    found = [search(model, prompt, beams=beams, penalty=0.0, max_new=6, rules=STOP) for beams in (1, 16)]
    one, many = ([likelihoods(model, prompt[i : i + 1], None, [text])[0] for i, text in enumerate(texts)] for texts in found)
    assert sum(many) > sum(one) + 1


def cut(rows, stop):
    ends = [next((i + 1 for i, token in enumerate(row) if token in stop), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def greedy(model, prompt, source, rules=FREE, max_new=12):
    return cut(torch.stack(list(sample(model, prompt, source, max_new=max_new, rules=rules)), dim=1).tolist(), rules.stop)


@pytest.mark.parametrize("penalty", [0.0, 8.0])
@pytest.mark.parametrize("name", SHAPES)
def test_one_beam_takes_the_likeliest_token(name, penalty):
    model = made(SHAPES[name])
    prompt, source = asked(name, batch=8)
    rules = ends(model, prompt, source)
    found = search(model, prompt, source, beams=1, penalty=penalty, max_new=12, rules=rules)
    assert found == greedy(model, prompt, source, rules)
    assert len({len(row) for row in found}) > 1, "some end before others, or nothing was tried"


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_gives_what_each_text_gives_alone(name, side, beams):
    """Texts of many lengths, padded on either side, that end at many steps and leave the batch."""
    model, counts = made(SHAPES[name]), [6, 1, 4, 2, 5, 3]
    ids = tokens(len(counts), 6)
    batch, begin = padded(ids, counts, side, filler=2), torch.ones(len(counts), 1, dtype=torch.long)
    given = (begin, batch) if sourced(name) else (batch, None)
    rules = ends(model, *given, Rules(never=((5,), (9, 4), (3, 3))))

    def written(prompt, source):
        if beams == 1:
            return greedy(model, prompt, source, rules)
        return search(model, prompt, source, beams=beams, max_new=12, rules=rules)

    together = written(*given)
    alone = [ids[i : i + 1, :count] for i, count in enumerate(counts)]
    assert together == [written(begin[:1], one)[0] if sourced(name) else written(one, None)[0] for one in alone]
    assert len({len(row) for row in together}) > 1


def test_what_has_ended_is_computed_no_more():
    """Rows leave the batch, of search and of sampling alike, and a source is encoded once."""
    model, prompt, source = made(SHAPES["pair"]), torch.ones(8, 1, dtype=torch.long), tokens(8, 5)
    seen, encoded = [], []
    model.decoder.register_forward_hook(lambda module, given, made: seen.append(len(given[0].tokens)))
    model.encoder.register_forward_hook(lambda module, given, made: encoded.append(len(given[0].tokens)))
    found = search(model, prompt, source, beams=3, max_new=20, rules=STOP)
    assert seen[0] == 8, "a prompt is read once, whatever the number of beams"
    assert seen == sorted(seen[:1]) + sorted(seen[1:], reverse=True)
    assert seen[-1] < 24
    assert encoded == [8]
    seen.clear()
    written = greedy(model, prompt, source, STOP, max_new=20)
    assert seen == [sum(len(row) > step for row in written) for step in range(max(map(len, written)))]
    assert len(found) == 8


class Scripted:
    """A language model of given probabilities: what follows depends on the length of the text alone."""

    def __init__(self, steps):
        self.steps = torch.tensor(steps).log()

    def start(self, source=None, *, capacity=None):
        return Counted(0)

    def step(self, inputs, state):
        logits = self.steps[min(state.length, len(self.steps) - 1)]
        return logits.expand(inputs.batch, inputs.length, -1), Counted(state.length + 1)


class Counted:
    def __init__(self, length):
        self.length = length

    def select(self, rows):
        return self


def test_a_higher_penalty_gives_longer_texts():
    """A text may end now, or go on at a price that falls: the more is forgiven, the later it ends."""
    model = Scripted([[0.0, 0.5, 0.5], [0.0, 0.45, 0.55], [0.0, 0.4, 0.6], [0.0, 0.35, 0.65], [0.0, 1.0, 0.0]])
    lengths = []
    for penalty in (0.0, 0.5, 1.0, 2.0, 3.0, 4.0):
        (text,) = search(model, torch.tensor([[0]]), beams=8, penalty=penalty, max_new=5, rules=Rules(stop=(1,)))
        lengths.append(len(text))
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (1, 5)


def test_a_search_ends_when_nothing_can_be_better():
    model = Scripted([[0.01, 0.98, 0.01]])
    steps = []
    take = model.step
    model.step = lambda inputs, state: steps.append(inputs.batch) or take(inputs, state)
    assert search(model, torch.tensor([[0]]), beams=4, penalty=0.0, max_new=50, rules=Rules(stop=(1,))) == [[1]]
    assert len(steps) == 1, "0.01 is less than 0.98 already"
    steps.clear()
    search(model, torch.tensor([[0]]), beams=4, penalty=5.0, max_new=50, rules=Rules(stop=(1,)))
    assert 1 < len(steps) < 10, "four have ended"


@pytest.mark.parametrize("beams", [1, 4])
def test_the_rules_hold(beams):
    """First and last tokens that must be, tokens and pairs that must not; nothing follows the token that ends a text."""
    model, (prompt, source) = made(pair()), asked("pair", batch=6)
    rules = Rules(stop=(2, 3), first=(9,), last=(2,), never=((4,), (5,), (9, 6), (7, 7)))
    written = search(model, prompt, source, beams=beams, max_new=6, rules=rules)
    for row in written:
        assert row[0] == 9
        assert len(row) < 6 or row[-1] == 2
        assert not {4, 5} & set(row)
        assert not {(9, 6), (7, 7)} & set(itertools.pairwise(row))
        assert not {2, 3} & set(row[:-1])
    with pytest.raises(ValueError, match=f"token {VOCAB} must be written, and is not in the vocabulary of {VOCAB}"):
        search(model, prompt, source, beams=beams, rules=Rules(first=(VOCAB,)))


def test_a_first_token_is_for_texts_of_one_token_whoever_stands_beside():
    model, rules = made(decoder()), Rules(first=(9,))
    batch = Inputs(torch.tensor([[0, 0, 5], [6, 7, 8]]), padding=torch.tensor([[True, True, False], [False] * 3]))
    one, other = greedy(model, batch, None, rules, max_new=3)
    assert one == greedy(model, torch.tensor([[5]]), None, rules, max_new=3)[0]
    assert other == greedy(model, torch.tensor([[6, 7, 8]]), None, FREE, max_new=3)[0]
    assert one[0] == 9


# ------------------------------------------------------------------------------------------------ against transformers


SAID = [{}, {"forced_bos_token_id": 9, "forced_eos_token_id": 2}, {"bad_words_ids": [[5], [7, 8], [31]]}]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("name", ["marian", "bart", "t5", "gpt2", "llama"])
def test_four_beams_find_what_the_reference_finds(name, penalty, monkeypatch, tmp_path):
    """With its length penalty, n^α, in place of ours; it stops when as many texts have ended as there are beams."""
    torch.manual_seed(1)
    found, config, more = CASES[name]
    theirs = moved(make(found, config, **more)).eval()
    theirs.save_pretrained(tmp_path / name)
    monkeypatch.setattr(searching, "lengthened", lambda length, penalty: float(length**penalty))
    how = {"num_beams": 4, "length_penalty": penalty, "early_stopping": True, "do_sample": False, "max_new_tokens": 9}
    for said in SAID:
        rules = {"eos_token_id": [2, 11], "decoder_start_token_id": 3, "pad_token_id": 60, "bos_token_id": 1} | said
        (tmp_path / name / "generation_config.json").write_text(json.dumps(rules))
        theirs.generation_config = type(theirs.generation_config)(**rules)
        ours = manyheads.load(tmp_path / name)
        for ids in ([5], [5, 9, 7], [8, 20, 31, 44]):
            row = theirs.generate(torch.tensor([ids]), **how)[0, 1 if theirs.config.is_encoder_decoder else len(ids) :].tolist()
            wanted = [token for token in cut([row], (2, 11))[0] if token not in (2, 11)]
            assert ours.generate(ids, beams=4, penalty=penalty, max_new=9) == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("name", ["decoder", "pair"])
def test_something_loaded_answers_each_text_as_if_alone(name, temperature):
    """Places that run out at different lengths, angles that depend on the length, and chance are each text's own."""
    learned = {"kind": "learned", "length": 12}
    spec = pair(position=learned) if name == "pair" else decoder(position=learned)
    rows = [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [5], [6, 7], [5], [9, 8, 7, 6, 5]]
    dynamic = decoder(position={"kind": "rope", "scaling": {"kind": "longrope", "short": [1.0], "long": [50.0], "length": 12}})
    dynamic = manyheads.read_model(manyheads.spec.to_tree(dynamic) | STEADY)
    for one in (spec, dynamic):
        ours = Loaded(made(one))
        how = {"max_new": 9, "temperature": temperature, "seed": 3, "start": 1}
        together = dict(ours.write(rows, manyheads.generate.sample.Writing(**how)))
        assert [together[i] for i in range(len(rows))] == [ours.generate(row, **how) for row in rows]
        assert together[1] == together[3]
        wild = [ours.generate([token], max_new=9, temperature=1e6, start=1) for token in (5, 6, 5)]
        assert wild[0] == wild[2] != wild[1], "chance is a function of the text too"


# ----------------------------------------------------------------------------------------------------- texts by the line

TEXTS = ["word0 word4 word2", "word7", "", "word9 word3 word1 word2 word8", "word7", "   ", "word5 word5"]


@pytest.mark.parametrize("how", [[], ["--beams", 3], ["--beams", 2, "--length-penalty", 2], ["--temperature", 1.5, "--seed", 4]])
def test_each_line_is_answered_as_the_text_alone_would_be(how, tmp_path):
    """From a file, a packed file and standard input; in their order, blank lines kept."""
    folder = folder_of("gpt2", tmp_path / "gpt2", eos_token_id=9, bos_token_id=None)
    data = "\r\n".join(TEXTS).encode()
    (tmp_path / "texts").write_bytes(b"\xef\xbb\xbf" + data)
    (tmp_path / "texts.gz").write_bytes(gzip.compress(data))
    ours, names = (
        manyheads.load(folder),
        {"--beams": "beams", "--length-penalty": "penalty", "--temperature": "temperature", "--seed": "seed"},
    )
    given = {names[name]: value for name, value in zip(how[::2], how[1::2], strict=True)}
    wanted = [ours.generate(text, max_new=7, **given) if text.strip() else "" for text in TEXTS]
    assert [ours.generate([text for text in TEXTS if text.strip()], max_new=7, **given)] == [[text for text in wanted if text]]
    common = ["predict", folder, "--max-new", 7, *how]
    for done in (run(*common, "--file", tmp_path / "texts"), run(*common, "-f", tmp_path / "texts.gz"), run(*common, given=data)):
        assert done.stdout == "".join(f"{line}\n" for line in wanted)
        assert done.stderr == ""
    rows = [json.loads(line) for line in run(*common, "-", "--json", given=data).stdout.splitlines()]
    assert [row["written"] if row else "" for row in rows] == wanted
    assert rows[2] is rows[5] is None
    assert rows[0] == {"schema": 1, "task": "continue", "text": TEXTS[0], "written": wanted[0]}
    assert json.loads(run(*common, TEXTS[0], "--json").stdout) == rows[0]


TASKS = {
    "bert": ("fill", ["word0 [MASK] word2", "[MASK]", "word1 [MASK] word3 [MASK] word5"]),
    "bert-classes": ("classify", ["word0", "word1 word2 word3", "word4 word5"]),
    "bert-bare": ("embed", ["word0", "word1 word2 word3", "word4 word5"]),
    "marian": ("answer", ["5 9 7", "8", "9 10 11 12"]),
}


@pytest.mark.parametrize("name", TASKS)
def test_every_task_takes_many_texts(name, tmp_path):
    (task, texts), folder = TASKS[name], folder_of(name, tmp_path / name, tokenizer=name != "marian")
    lines = "\n".join(["", *texts]).encode()
    rows = [json.loads(line) for line in run("predict", folder, "--json", given=lines).stdout.splitlines()]
    ours = manyheads.load(folder)
    alone = [manyheads.predict(ours, text) for text in texts]
    assert rows[0] is None
    assert [row["task"] for row in rows[1:]] == [task] * 3
    for row, one in zip(rows[1:], alone, strict=True):
        assert flat(row) == {"schema": 1} | {
            key: pytest.approx(value, abs=1e-5) if isinstance(value, float) else value for key, value in flat(one).items()
        }
    plain = run("predict", folder, given=lines).stdout.splitlines()
    assert plain[0] == ""
    assert len(plain) == 4
    if task == "classify":
        assert [line.split("\t")[0] for line in plain[1:]] == [one["classes"][0]["class"] for one in alone]
    if task == "fill":
        assert plain[3].split("\t") == [place["tokens"][0]["token"] for place in alone[2]["filled"]]


def flat(value, path=""):
    """A tree as one table, to be compared number by number."""
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return {place: leaf for key, one in inner for place, leaf in flat(one, f"{path}.{key}".strip(".")).items()}
    return {path: value}


def test_what_cannot_be_read_is_said_with_its_place(tmp_path):
    folder = folder_of("bert", tmp_path / "bert")
    for given, said in (
        (b"", "standard input holds no texts: it is empty"),
        (b"\n \n\r\n", "standard input holds no texts: all of its 3 lines are blank"),
        (
            b"word0 [MASK]\n\xff\n",
            "standard input, line 2 is not UTF-8 (0xff) at byte 13; save it as UTF-8, or give --encoding-errors replace",
        ),
        (b"word0 [MASK]\n\n[MASK] \xe9t\xe9", "standard input, line 3 is not UTF-8 (0xe9) at byte 21"),
        ("word0".encode("utf-16"), "standard input, line 1 is not UTF-8 (0xff) at byte 0"),
        (b"[MASK]\nword0 \0 [MASK]", "standard input, line 2 holds a NUL at byte 13"),
        (b"[MASK]\n\nword0\n", "standard input, line 3: there is nothing to fill: write [MASK] where a word is missing"),
        (b"[MASK]\n" + b"word0 " * 50, "standard input, line 2: the text has 52 tokens, and the model has places for 40: it is too long"),
        (gzip.compress(b"word0 [MASK]\n" * 100)[:-20], "standard input is a broken gzip file"),
    ):
        done = run("predict", folder, given=given, check=3)
        assert said in done.stderr
        assert (len(done.stderr.splitlines()), done.stdout) == (1, "")
    assert "cannot read" in run("predict", folder, "--file", tmp_path / "nowhere", check=3).stderr
    assert "cannot read" in run("predict", folder, "--file", tmp_path, check=3).stderr
    mended = run("predict", folder, "--encoding-errors", "replace", given=b"[MASK] \xe9t\xe9\n[MASK]\n")
    assert len(mended.stdout.splitlines()) == 2
    assert mended.stderr == "standard input: 1 lines mended that were not UTF-8\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["TEXT", "--file", "x"], "given a TEXT and --file; choose one"),
        (["TEXT", "--beams", 0], "beams is 0, expected a whole number from 1 to 256"),
        (["TEXT", "--beams", "x"], "given 'x', expected a whole number"),
        (["TEXT", "--beams", 2, "--temperature", 1], "2 beams look for the likeliest text, and a temperature draws one by chance"),
        (["TEXT", "--length-penalty", -1], "penalty is -1.0, expected a number from 0 to 10"),
        (["TEXT", "--length-penalty", "nan"], "penalty is nan, expected a number from 0 to 10"),
        (["--encoding-errors", "skip"], "--encoding-errors is 'skip', expected stop or replace"),
    ],
)
def test_wrong_options_are_said_before_anything_is_read(arguments, said, tmp_path):
    assert said in run("predict", tmp_path / "nowhere", *arguments, check=2).stderr


def test_line_breaks_in_an_answer_become_spaces(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", eos_token_id=None, bos_token_id=None)
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.decoder = decoders.Replace("word", "\n")
    own.save(str(folder / "tokenizer.json"))
    alone = run("predict", folder, "word0 word1").stdout
    assert "\n" in alone.strip()
    line = run("predict", folder, given=b"word0 word1\nword2\n").stdout.splitlines()[0]
    assert line.split() == alone.split()
    assert json.loads(run("predict", folder, "--json", given=b"word0 word1\n").stdout)["written"] == alone[:-1]


def test_ctrl_c_ends_it_and_what_was_answered_is_there(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", eos_token_id=None, bos_token_id=None)
    command = [sys.executable, "-m", "manyheads", "predict", str(folder), "--max-new", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write(b"word0 word1\n" * predicting.AT_ONCE)
        process.stdin.flush()
        lines = [process.stdout.readline() for _ in range(predicting.AT_ONCE)]  # now it waits for more
        for _ in range(3):  # Python drops one that comes while it tidies up; whoever sits there presses again
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
                break
        assert process.returncode == 130
        assert process.stderr.read() == b""
    assert len(set(lines)) == 1


def test_whoever_waits_is_told_how_far_it_is(monkeypatch, capsys):
    told = predicting.Counted(Path("texts"))
    told()
    assert capsys.readouterr().err == "", "nobody has waited yet"
    monkeypatch.setattr(predicting, "PATIENCE", 0.0)
    with predicting.Counted(Path("texts")) as told:
        told()
        told()
    assert capsys.readouterr().err.startswith("texts: 1 texts answered, ")


def test_a_run_reads_special_tokens_as_text_but_for_the_mask(tmp_path):
    """As it was trained; and so does whatever is exported from it, here and in transformers."""
    from transformers import PreTrainedTokenizerFast

    for name in ("causal", "masked"):
        ready = made_ready(read_run(described(name, steps=1)))
        list(train(ready, tmp_path / name))
        loaded = manyheads.load(tmp_path / name)
        manyheads.export(loaded, tmp_path / f"{name}-again", to="manyheads")
        text = "was </s> born <s> in"
        frame = [1, *ready.tokenizer.encode(text, add_special_tokens=False).ids, *[2] * (name == "masked")]
        assert loaded.ids([text]) == manyheads.load(tmp_path / f"{name}-again").ids([text]) == [frame]
        assert {1, 2} & set(frame[1:-1]) == set()
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / f"{name}-again")
        assert theirs(text)["input_ids"] == frame
    text = "a <mask> b </s> <mask>"
    before, between = (ready.tokenizer.encode(piece, add_special_tokens=False).ids for piece in ("a ", " b </s> "))
    assert masked(loaded, [text]) == [[1, *before, 4, *between, 4, 2]]
    done = run("predict", tmp_path / "masked", "--json", given=f"{text}\n<mask>".encode())
    assert [len(json.loads(line)["filled"]) for line in done.stdout.splitlines()] == [2, 1]


def test_what_is_missing_is_written_where_a_model_learned_to(tmp_path):
    """It reads prefix <mask> suffix <mask>, as it was trained, of which the user writes what is known; so does what is exported."""
    tower = {"layers": 1, "width": 32, "attention": {"kind": "heads", "heads": 2}, "position": {"kind": "learned", "length": 40}}
    learned = [
        f"the {thing} is {colour} today" for thing, colour in (("sky", "blue"), ("grass", "green"), ("rose", "red"), ("sun", "yellow"))
    ]
    (tmp_path / "texts.txt").write_text("\n".join([*learned * 10, "the sky is blue"]))
    data = {"kind": "text", "path": str(tmp_path / "texts.txt"), "document": "line"}
    how = {"steps": 200, "tokens": 400, "evaluate_every": 200, "evaluate_rows": 1}
    tree = {"model": {"vocab": "tokenizer", "decoder": tower, "init": "xavier"}, "data": data, "objective": {"kind": "infill", "block": 8}}
    ready = made_ready(read_run(tree | {"optim": {"rate": 1e-2, "schedule": {"kind": "linear", "warmup": 5}}, "train": how}))
    list(train(ready, tmp_path / "run"))
    asked = ["the grass is <mask> today", "<mask> rose is red today", "the sun is yellow <mask>"]
    for to in ("run", "hf", "manyheads"):
        if to != "run":
            manyheads.export(tmp_path / "run", tmp_path / to, to=to)
        loaded = manyheads.load(tmp_path / to)
        found = [manyheads.predict(loaded, text) for text in asked]
        assert [row["written"] for row in found] == ["green", "the", "today"]
        assert {row["task"] for row in found} == {"infill"}
    ids = infilling(loaded, asked)
    word = ready.tokenizer.token_to_id
    assert ids[0] == [1, word("▁the"), word("▁grass"), word("▁is"), 4, word("▁today"), 4]
    for text, said in (("the grass", "there is nothing to fill: write <mask> where"), ("<mask> is <mask>", "<mask> stands 2 times in it")):
        with pytest.raises(ValueError, match=said):
            manyheads.predict(loaded, text)
    assert run("predict", tmp_path / "run", asked[0]).stdout == "green\n"


def test_a_run_that_hides_spans_reads_what_stands_for_them(tmp_path):
    from small_runs import described

    ready = made_ready(read_run(described("spans", steps=1)))
    list(train(ready, tmp_path / "run"))
    loaded = manyheads.load(tmp_path / "run")
    (ids,), _ = tokens_of(loaded, ["was <extra_0> born </s> in <extra_1>"], "answer", None)
    assert [token for token in ids if token in ready.tokens.extra] == list(ready.tokens.extra[:2])
    assert ids.count(ready.tokens.end) == 1, "which stands at the end; one that a text says remains a text"
