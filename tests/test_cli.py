"""The command line as a user meets it: real processes, data on stdout, one sentence on stderr, the right exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command import run
from published import PARAMETERS
from rich.cells import cell_len

from manyheads import demo, presets, read_model
from manyheads.spec import SLOTS, parse, to_toml
from manyheads.train.run import RunSpec, read_run  # fills the slots, as show does

ROOT = Path(__file__).parent.parent


def refused(*arguments):
    """An error is one line on stderr, nothing on stdout, no traceback, exit code 2."""
    done = run(*arguments, check=2)
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_show_json_of_published_presets():
    # one process for all: what a shell would run many times; those with fewer layers, for test_size counts the others
    small = {name: count for name, count in PARAMETERS.items() if count < 200_000_000}
    code = (
        "import json, sys\nfrom manyheads.show import describe_model\n"
        "print(json.dumps({n: describe_model(n, [], length=8)['parameters'] for n in sys.argv[1:]}))"
    )
    done = subprocess.run([sys.executable, "-c", code, *small], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == small


def test_show_json_from_the_shell():
    data = json.loads(run("show", "gpt2", "--json").stdout)
    assert data["schema"] == 1
    assert data["parameters"] == 124439808
    assert sum(data["parameters_by_part"].values()) == 124439808
    assert data["flops"]["length"] == 1024
    assert len(data["layers"]["decoder"]) == 12
    assert read_model(data["spec"]).decoder.layers == 12


def test_show_prints_the_changed_model():
    text = run("show", "transformer-base", "-s", "encoder.position=rope", "-s", "decoder.core=argmax").stdout
    assert "rope" in text
    assert "argmax" in text
    assert "sinusoidal" not in text
    assert "63,045,632 parameters" in text
    assert "512×512" in text


def test_show_expands_patterns(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('vocab = 9\n[decoder]\nlayers = 4\nmask = {causal = true}\npattern = [{mask.window = 2}, {position = "rope"}]\n')
    text = run("show", path).stdout
    assert "layers 0, 2" in text
    assert "layers 1, 3" in text
    assert "window=2" in text
    resolved = tomllib.loads(run("show", path, "--toml").stdout)
    assert read_model(resolved) == read_model(tomllib.loads(path.read_text()))


def test_toml_shown_is_shown_the_same(tmp_path):
    path = tmp_path / "again.toml"
    path.write_text(run("show", "mae-tiny", "--toml").stdout)
    first, again = (json.loads(run("show", target, "--json").stdout) for target in ("mae-tiny", path))
    assert first | {"name": ""} == again | {"name": ""}


def test_a_short_table_shortens_the_text_the_costs_are_for(tmp_path):
    path = tmp_path / "short.toml"
    path.write_text('vocab = 9\n[decoder]\nposition = {kind = "learned", length = 64}\n')
    assert json.loads(run("show", path, "--json").stdout)["flops"]["length"] == 64


@pytest.mark.parametrize("target", ["mistral-7b", "t5-small", "rnnsearch", "parts", "position"])
def test_nothing_is_cut_off_on_a_narrow_terminal(target):
    text = run("show", target, env=os.environ | {"COLUMNS": "80"}).stdout
    assert "…" not in text.replace("e(w_{t−n+2}) … e(w_t)", "").replace("sin, cos …", "").replace("cos …", "")
    assert max(map(cell_len, text.splitlines())) <= 80


def test_show_reads_the_model_of_a_run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\n[model]\nvocab = 9\n[model.encoder]\nlayers = 1\n")
    assert json.loads(run("show", path, "--json").stdout)["shape"] == "encoder"


def test_show_parts_lists_every_slot_kind_and_field():
    slots = {slot["slot"]: slot for slot in json.loads(run("show", "parts", "--json").stdout)["slots"]}
    assert set(slots) >= set(SLOTS)
    tables = {name: {field["field"] for field in slots[name]["fields"]} for name in set(slots) - set(SLOTS)}
    assert {"causal", "window", "prefix"} <= tables["mask"]
    assert {"layers", "width", "pattern", "distinct", "final_norm"} <= tables["decoder"]
    assert {"vocab", "source_vocab", "head"} <= tables["model"]
    assert {"order", "hidden"} <= tables["ngram"]
    assert "two_way" in tables["recurrent"]
    for name, base in SLOTS.items():
        kinds = {kind["kind"]: kind for kind in slots[name]["kinds"]}
        ours = {kind: part for kind, part in base.kinds.items() if part.__module__.startswith("manyheads.")}  # other tests add their own
        assert set(kinds) == set(ours)
        for kind, part in ours.items():
            assert [field["field"] for field in kinds[kind]["fields"]] == list(part.model_fields)
            assert all(field["meaning"] for field in kinds[kind]["fields"])
    text = run("show", "position").stdout
    assert "sinusoidal" in text
    assert "E[token]" not in text
    assert "E[token]" in run("show", "embed").stdout, "square brackets of a formula are not markup"


def test_show_alone_lists_the_presets_with_their_source():
    rows = json.loads(run("show", "--json").stdout)["presets"]
    assert [row["name"] for row in rows] == list(presets.names())
    assert all(row["source"] for row in rows)
    positions = {row["name"]: row["position"] for row in rows}
    learned = ("gpt2", "gpt3-175b", "bert-base", "roberta-base", "albert-base-v2", "distilbert", "ernie-2.0-base-en")
    rotary = ("llama-7b", "llama-2-7b", "llama-3-8b", "gpt-j-6b", "pythia-70m", "mistral-7b", "phi-2")
    assert {positions[name] for name in learned} == {"learned"}
    assert {positions[name] for name in rotary} == {"rope"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "gtp2"], "did you mean 'gpt2'?"),
        (["show", "gpt2", "-s", "decoder.widht=3"], "decoder: no field 'widht' here: did you mean 'width'?"),
        (["show", "gpt2", "-s", "decoder.attention.heads=10"], "10 heads do not divide width 768; nearest that do: 8 or 12 heads"),
        (["show", "gpt2", "-s", "decoder.width"], "an override is path=value"),
        (["show", "gpt2", "--length", "2000"], "position 1999 is beyond"),
        (["show", "missing.toml"], "cannot read missing.toml: No such file"),
        (["show", "gpt2", "--parts", "missing.py"], "there is no file missing.py"),
        (["show", "gpt2", "-s", "decoder.mask=causal"], "decoder.mask: given 'causal', expected a table"),
        (["show", "gpt2", "-s", "encoder.layers=2"], "nothing in the decoder looks at the encoder"),
        (["show", "gpt2", "--source-length", "9"], "is for a model that reads a source"),
        (["show", "gpt2", "--toml", "--json"], "choose one"),
        (["show", "parts", "-s", "a=1"], "name a preset or a file"),
        (["show", "positions"], "did you mean 'position'?"),
        (["show", "gpt2", "--length", "99999999999999999999"], "length is 99999999999999999999, expected a whole number from 1 to"),
        (["show", "gpt2", "--length", "0"], "length is 0, expected a whole number from 1"),
        (["show", "gpt2", "--length", "x"], "given 'x', expected a whole number"),
        (["show", "rope"], "'rope' is a kind of position: 'manyheads show position' tells about it"),
        (["show", "mine.py"], "name it with --parts"),
        (["show", "gpt2", "--batch", "-1"], "batch is -1, expected a whole number from 1"),
        (["show", "llama-7b", "--length", "16777216", "--batch", "16777216"], "more numbers than can be counted"),
        (["show", "rnnsearch", "--length", "100000"], "is walked token by token"),
        (["show", "--nonsense"], "No such option: --nonsense"),
        (["shw"], "No such command 'shw'"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, said):
    assert said in refused(*arguments)


def test_a_file_that_is_not_toml_or_not_text(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("vocab = = 3\n")
    assert "is not TOML" in refused("show", path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text: byte 0 is 0xff" in refused("show", path)
    path.write_text(f"vocab = {'9' * 5000}\n")
    assert "is not TOML" in refused("show", path)
    path.write_text(f"vocab = {'[' * 5000}\n")
    assert "more than 32 deep" in refused("show", path)
    path.write_text("about = {contxt = 5}\nvocab = 9\ndecoder = {}\n")
    assert "expected title and source, texts, and context" in refused("show", path)
    path.write_text("model = 3\n")
    assert "expected a table" in refused("show", path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = = 3", "stopped with SyntaxError: invalid syntax"),
        ("import sys; sys.exit(0)", "stopped with SystemExit: 0"),
        ("import nowhere_at_all", "stopped with ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("from manyheads.parts.norm import NormSpec\nclass X(NormSpec, kind='x'): pass", "the kind 'x' of norm lacks build"),
    ],
)
def test_a_parts_file_that_cannot_be_used_is_refused(tmp_path, text, said):
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert said in refused("show", "gpt2", "--parts", path)
    assert "its name ends in .py" in refused("show", "gpt2", "--parts", path.rename(tmp_path / "mine.txt"))


def test_help_alone_and_debug():
    assert "Usage:" in run().stdout
    assert "Traceback" in run("show", "gtp2", "--debug", check=1).stderr


def blocks_of_the_readme(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


OWN = next(block for block in blocks_of_the_readme("python") if "my_parts.py" in block)


@pytest.fixture
def own_parts(tmp_path):
    path = tmp_path / "my_parts.py"
    path.write_text(OWN)
    return path


def test_a_part_of_ones_own_fills_a_slot_when_its_file_is_named(own_parts, tmp_path):
    text = run(
        "show", "gpt2", "--parts", own_parts, "-s", "decoder.core={kind='gaussian', sigma=2.0}", "-s", "decoder.residual=sandwich"
    ).stdout
    assert "gaussian(sigma=2)" in text
    assert "σ²" in text
    assert "sandwich" in text
    described = tmp_path / "saved.toml"
    described.write_text(run("show", "gpt2", "--parts", own_parts, "-s", "decoder.core=gaussian", "--toml").stdout)
    assert "reading a description never executes code" in refused("show", described)
    assert "124,4" in run("show", described, "--parts", own_parts).stdout


def test_a_run_with_a_part_of_ones_own_is_asked_audited_and_exported(own_parts, tmp_path):
    tower = {
        "layers": 1,
        "width": 8,
        "attention": {"kind": "heads", "heads": 2},
        "core": "gaussian",
        "feedforward": {"kind": "mlp", "hidden": 8},
    }
    tree = {
        "model": {"vocab": "tokenizer", "decoder": tower}, "data": {"kind": "biographies", "people": 60}, "objective": {"kind": "causal"},
        "train": {"steps": 1, "evaluate_rows": 1},
    }  # fmt: skip
    (tmp_path / "run.toml").write_text(to_toml(tree))
    mine = ("--parts", own_parts)
    run("train", tmp_path / "run.toml", "--output", tmp_path / "run", *mine)
    assert "name its file with --parts" in run("predict", tmp_path / "run", "a", check=4).stderr
    run("predict", tmp_path / "run", "a", "--max-new", "2", *mine)
    run("audit", tmp_path / "run", *mine)
    run("export", tmp_path / "run", tmp_path / "out", "--to", "manyheads", *mine)


def test_a_slip_in_the_path_of_a_run_is_no_name_on_the_hub(tmp_path):
    (tmp_path / "runs").mkdir()
    assert run("predict", "runs/nosuch", "a", cwd=tmp_path, check=4).stderr == "manyheads: there is no folder runs/nosuch\n"


def test_the_laws_run_on_a_part_of_ones_own_and_catch_a_wrong_one(own_parts):
    laws = [sys.executable, "-m", "pytest", str(ROOT / "tests/test_laws.py"), "-n", "0", "-x", "-p", "no:cacheprovider"]
    chosen = ["-k", "gaussian and (test_decoder or float64)"]
    good = subprocess.run([*laws, "--parts", str(own_parts), *chosen], capture_output=True, text=True)
    assert good.returncode == 0, good.stdout
    assert " passed" in good.stdout
    own_parts.write_text(
        OWN.replace("def scores", "def forward(self, q, k, v, **rest):\n        return v.flip(2)[:, :, :q.shape[2]]\n\n    def scores")
    )
    bad = subprocess.run([*laws, "--parts", str(own_parts), *chosen], capture_output=True, text=True)
    assert bad.returncode == 1, "a core whose forward is not its weights must be caught"


def test_the_readme_runs_as_written(tmp_path):
    described = tmp_path / "model.toml"
    model, dates, beginning, shaping = blocks_of_the_readme("toml")
    described.write_text(model)
    assert "window=64" in run("show", described).stdout
    assert read_run(tomllib.loads(dates)) == read_run(demo.RUN)
    assert len(read_run(tomllib.loads(dates) | tomllib.loads(shaping)).shaping) == 3
    tree = tomllib.loads(beginning)
    assert parse(RunSpec, tree | {"model": read_model({"vocab": 9, "encoder": {}})}).lora.rank == tree["lora"]["rank"]
    for block in blocks_of_the_readme("python"):
        subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)
    lines = [line.split("#")[0].strip() for block in blocks_of_the_readme("sh") for line in block.splitlines()]
    shown = [line.split("manyheads ", 1)[1] for line in lines if "manyheads show" in line]
    assert len(shown) >= 7
    (tmp_path / "my_parts.py").write_text(OWN)
    for arguments in shown:
        assert run(*arguments.split(), cwd=tmp_path).stdout


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(f"{sys.executable} -m manyheads show parts | head -n 1", shell=True, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_what_a_file_says_about_itself_commands_no_terminal(tmp_path):
    path = tmp_path / "loud.toml"
    path.write_text('vocab = 9\ndecoder = {}\nabout = {title = "\\u001b[31mred", source = "a\\u001b]0;t"}\n')
    assert "\x1b" not in run("show", path).stdout


def test_a_terminal_without_the_letters_still_gets_the_rest():
    assert "parameters" in run("show", "gpt2", env=os.environ | {"PYTHONIOENCODING": "ascii"}).stdout


def test_a_part_without_descriptions_can_be_shown(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(OWN.replace('field(1.0, "σ", gt=0)', "1.0"))
    assert "sigma" in run("show", "core", "--parts", path).stdout
    path.write_text("from manyheads.spec import Part\nclass Mine(Part, slot='core'): pass\n")
    assert "there is a slot 'core' already" in refused("show", "core", "--parts", path)


def test_version_names_everything():
    assert run("--version").stdout.startswith("manyheads 0.")
    assert "torch 2." in run("--version").stdout


def test_a_file_that_does_not_end_is_not_read_to_its_end():
    assert "/dev/zero has more than 1,048,576 bytes" in refused("show", "/dev/zero")
