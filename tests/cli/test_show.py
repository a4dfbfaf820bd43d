"""`manyheads show`: models, presets and parts, as text, TOML and JSON; and what is wrong with a description."""

from __future__ import annotations

import os
import tomllib

import pytest
from command import error_of, run, run_json
from rich.cells import cell_len
from small_checkpoints import folder_of
from small_runs import described, train_all

import manyheads
from manyheads import presets, read_model
from manyheads.cli.show import entries_of_kind, list_parts
from manyheads.inspect.describe import describe_preset
from manyheads.labs.chapters.families import PARAMETERS
from manyheads.spec import SLOTS, to_tree
from manyheads.training import run as _run  # noqa: F401  (fills the slots)


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_number_of_parameters(name):
    """As the list of presets shows it; tests/model/test_cost.py has that of a model with its costs."""
    assert describe_preset(name)["parameters"] == PARAMETERS[name]


def test_the_json_of_a_preset_has_its_parameters_layers_and_weights():
    model = run_json("show", "gpt2")
    assert model["schema"] == 1
    assert model["parameters"] == sum(model["parameters_by_part"].values()) == 124439808
    assert model["flops"]["length"] == 1024
    assert model["flops"]["forward"] == 2 * model["flops"]["multiply_adds"]
    assert len(model["layers"]["decoder"]) == 12
    assert read_model(model["spec"]).decoder.layers == 12
    sizes = [weight["count"] * _product(weight["shape"]) for weight in model["weights"]]
    assert sum(sizes) == model["parameters"]


def _product(shape):
    count = 1
    for size in shape:
        count *= size
    return count


def test_overrides_change_the_model():
    text = run("show", "transformer-base", "-s", "encoder.position=rope", "-s", "decoder.core=argmax").stdout
    assert "rope" in text
    assert "argmax" in text
    assert "sinusoidal" not in text
    assert "63,045,632 parameters" in text
    assert "512×512" in text


def test_patterns_are_expanded(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(
        'vocab = 9\n[decoder]\nlayers = 4\nmask = {causal = true}\npattern = [{mask.window = 2}, {position = "rope"}]\n'
    )
    titles = [section["title"] for section in run_json("show", path)["sections"]]
    assert titles[1:] == ["decoder, layers 0, 2", "decoder, layers 1, 3", "output"]
    assert "window=2" in run("show", path).stdout
    resolved = tomllib.loads(run("show", path, "--toml").stdout)
    assert read_model(resolved) == read_model(tomllib.loads(path.read_text()))


def test_toml_output_describes_the_same_model(tmp_path):
    path = tmp_path / "again.toml"
    path.write_text(run("show", "mae-tiny", "--toml").stdout)
    first, again = (run_json("show", target) for target in ("mae-tiny", path))
    assert first | {"name": ""} == again | {"name": ""}


def test_costs_are_for_at_most_as_many_tokens_as_there_are_positions(tmp_path):
    path = tmp_path / "short.toml"
    path.write_text('vocab = 9\n[decoder]\nposition = {kind = "learned", length = 64}\n')
    assert run_json("show", path)["flops"]["length"] == 64


@pytest.mark.parametrize("target", ["mistral-7b", "t5-small", "rnnsearch", "parts", "position"])
def test_a_narrow_terminal_loses_nothing(target):
    short = ("--length", 10) if target == "rnnsearch" else ()  # which is run token by token
    text = run("show", target, *short, env=os.environ | {"COLUMNS": "80"}).stdout
    assert "…" not in text.replace("e(w_{t−n+2}) … e(w_t)", "").replace("sin, cos …", "").replace("cos …", "")
    assert max(map(cell_len, text.splitlines())) <= 80


def test_the_model_of_a_run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\n[model]\nvocab = 9\n[model.encoder]\nlayers = 1\n")
    assert run_json("show", path)["architecture"] == "encoder"


def test_svg_draws_a_model_to_a_file_or_to_standard_output(tmp_path):
    path, arguments = tmp_path / "model.svg", ("show", "gpt2", "-s", "position=rope", "-s", "decoder.layers=7")
    done = run(*arguments, "--svg", path)
    assert done.stdout == ""
    assert str(path) in done.stderr
    printed = run(*arguments, "--svg", "-").stdout
    assert path.read_text() == printed == manyheads.draw_model(
        presets.read("gpt2", "position=rope", "decoder.layers=7"), title=presets.read_about("gpt2")["title"]
    )  # fmt: skip
    assert "7 ×" in printed
    assert [item.name for item in tmp_path.iterdir()] == ["model.svg"]
    run("show", "gpt2", "--svg", path, check=2)
    assert path.read_text() == printed  # no file is overwritten
    run("show", "gpt2", "--svg", tmp_path / "missing" / "model.svg", check=2)
    run("show", "gpt2", "--svg", "-", "--length", "9", check=2)


def test_a_model_whose_vocabulary_is_not_known_yet_is_drawn(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text('vocab = "tokenizer"\ndecoder = {}\nabout = {title = "\\u001b[31m<b>"}\n')
    text = run("show", path, "--svg", "-").stdout
    assert "&lt;b&gt;" in text
    assert "\x1b" not in text


def test_parts_lists_every_slot_kind_and_field():
    slots = {slot["slot"]: slot for slot in run_json("show", "parts")["slots"]}
    assert set(slots) >= set(SLOTS)
    tables = {name: {field["field"] for field in slots[name]["fields"]} for name in set(slots) - set(SLOTS)}
    assert {"causal", "window", "prefix"} <= tables["mask"]
    assert {"layers", "width", "pattern", "layer_groups", "final_norm", "like"} <= tables["decoder"]
    assert {"vocab", "source_vocab", "head", "about"} <= tables["model"]
    assert {"order", "hidden"} <= tables["ngram"]
    assert "bidirectional" in tables["recurrent"]
    for name, base in SLOTS.items():
        kinds = {kind["kind"]: kind for kind in slots[name]["kinds"]}
        ours = {kind: part for kind, part in base.kinds.items() if part.__module__.startswith("manyheads.")}
        assert set(kinds) == set(ours)  # other tests register more
        for kind, part in ours.items():
            assert [field["field"] for field in kinds[kind]["fields"]] == list(part.model_fields)
            assert all(field["meaning"] for field in kinds[kind]["fields"])


def test_a_kind_is_shown_by_its_name():
    (slot,) = run_json("show", "rope")["slots"]
    assert (slot["slot"], [kind["kind"] for kind in slot["kinds"]]) == ("position", ["rope"])
    assert run_json("show", "position.rope")["slots"] == [slot]
    for name, base in SLOTS.items():
        for kind in base.kinds:
            slots = [item for item in SLOTS.values() if kind in item.kinds]
            if len(slots) == 1 and base.kinds[kind].__module__.startswith("manyheads."):
                found = entries_of_kind(kind, list_parts())
                assert [(result["slot"], len(result["kinds"])) for result in found] == [(name, 1)]


def test_swaps_from_lists_the_overrides_that_lead_from_one_model_to_another():
    found = run_json("show", "gpt2", "-s", "decoder.layers=2", "--swaps-from", "transformer-base")
    options = [word for override in found["overrides"] for word in ("-s", override)]
    reached = run_json("show", "transformer-base", *options)["spec"]
    assert reached == run_json("show", "gpt2", "-s", "decoder.layers=2")["spec"]
    assert [override for step in found["steps"] for override in step["overrides"]] == found["overrides"]
    text = run("show", "gpt2", "--swaps-from", "transformer-base").stdout
    assert "p[t] = row t of a learned table" in text, "the formula of a new part"
    assert "-s decoder.width=768" in text
    change = next(change for step in found["steps"] for change in step["changes"])
    assert any(change["path"] in line and f"{change['before']} → " in line for line in text.splitlines())


def test_a_short_path_changes_every_stack_that_has_the_field():
    model = run_json("show", "transformer-base", "-s", "position=none", "-s", "decoder.layers=2")
    assert {layer["position"]["kind"] for stack in model["layers"].values() for layer in stack} == {"none"}
    assert (len(model["layers"]["encoder"]), len(model["layers"]["decoder"])) == (6, 2)
    assert model["spec"] == run_json(
        "show", "transformer-base", "-s", "encoder.position=none", "-s", "decoder.position=none", "-s", "decoder.layers=2"
    )["spec"]  # fmt: skip
    assert presets.read("gpt2", "position=rope").decoder.position.kind == "rope"


def test_a_checkpoint_is_shown_with_its_task_tokenizer_and_step(tmp_path):
    train_all(described("classify", steps=2), tmp_path / "run")
    model = run_json("show", tmp_path / "run")
    checkpoint = manyheads.load(tmp_path / "run")
    assert model["spec"] == to_tree(checkpoint.spec)
    about = model["checkpoint"]
    assert (about["task"], about["step"], about["classes"], about["format"]) == ("classify", 2, 10, "manyheads")
    assert "loss" in about["metrics"]
    assert "classify" in run("show", tmp_path / "run").stdout
    folder = folder_of("gpt2", tmp_path / "gpt2")
    about = run_json("show", folder)["checkpoint"]
    assert (about["vocab_size"], about["max_positions"], about["step"], about["task"]) == (61, 40, None, "causal")
    folder_of("llama", tmp_path / "llama", tokenizer=False)
    with pytest.warns(UserWarning, match="tokenizer"):
        manyheads.export(tmp_path / "llama", tmp_path / "llama.gguf", to="gguf")
    model = run_json("show", tmp_path / "llama.gguf")
    assert model["parameters"] == sum(
        parameter.numel() for parameter in manyheads.load(tmp_path / "llama").model.parameters()
    )
    assert model["checkpoint"]["task"] == "causal"


def test_tasks_are_one_slot():
    (slot,) = run_json("show", "task")["slots"]
    kinds = {kind["kind"] for kind in slot["kinds"]}
    assert kinds >= {"causal", "masked", "spans", "infill", "seq2seq", "translate", "summarise", "copy", "classify"}
    assert kinds >= {"retrieval", "mae"}


def test_show_prints_one_slot_and_keeps_the_brackets_of_its_formulas():
    text = run("show", "position").stdout
    assert "sinusoidal" in text
    assert "E[token]" not in text
    assert "E[token]" in run("show", "embed").stdout


def test_without_a_target_the_presets_are_listed():
    rows = run_json("show")["presets"]
    assert [row["name"] for row in rows] == list(presets.names())
    assert all(row["source"] for row in rows)
    positions = {row["name"]: row["position"] for row in rows}
    learned = ("gpt2", "gpt3-175b", "bert-base", "roberta-base", "albert-base-v2", "distilbert", "ernie-2.0-base-en")
    rotary = ("llama-7b", "llama-2-7b", "llama-3-8b", "gpt-j-6b", "pythia-70m", "mistral-7b", "phi-2")
    assert {positions[name] for name in learned} == {"learned"}
    assert {positions[name] for name in rotary} == {"rope"}


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        (["gtp2"], "config.unknown-preset", "'gpt2'"),
        (["positions"], "config.unknown-preset", "'position'"),
        (["none"], "usage.argument", "position"),
        (["rope", "-s", "theta=3"], "usage.argument", "model"),
        (["norm.rope"], "config.unknown-preset", "norm.rope"),
        (["mine.py"], "config.unknown-preset", "mine.py"),
        (["gpt2", "-s", "decoder.widht=3"], "config.unknown-key", "'width'"),
        (["gpt2", "-s", "decoder.attention.heads=10"], "config.incompatible", "768"),
        (["gpt2", "-s", "decoder.width"], "config.syntax", "decoder.width"),
        (["gpt2", "-s", "decoder.mask=causal"], "config.wrong-type", "decoder.mask"),
        (["gpt2", "-s", "encoder.layers=2"], "config.incompatible", "decoder.cross"),
        (["gpt2", "--length", "2000"], "input.length", "1999"),
        (["gpt2", "--length", "99999999999999999999"], "usage.argument", "99999999999999999999"),
        (["gpt2", "--length", "0"], "usage.argument", "length is 0"),
        (["gpt2", "--length", "x"], "usage.argument", "'x'"),
        (["gpt2", "--batch", "-1"], "usage.argument", "batch is -1"),
        (["llama-7b", "--length", "16777216", "--batch", "16777216"], "config.out-of-range", ""),
        (["rnnsearch", "--length", "100000"], "usage.argument", "100000"),
        (["missing.toml"], "config.file", "missing.toml"),
        (["/dev/zero"], "config.file", "/dev/zero"),
        (["gpt2", "--parts", "missing.py"], "usage.parts-file", "missing.py"),
        (["gpt2", "--source-length", "9"], "usage.argument", "gpt2"),
        (["gpt2", "--toml"], "usage.argument", "--toml"),
        (["gpt2", "--svg", "-"], "usage.argument", "--svg"),
        (["position", "--svg", "-"], "usage.argument", "--svg"),
        (["position", "--swaps-from", "gpt2"], "usage.argument", "--swaps-from"),
        (["gpt2", "--swaps-from", "gtp2"], "config.unknown-preset", "'gpt2'"),
        (["gpt2", "--swaps-from", "bert-base", "--batch", "2"], "usage.argument", "--batch"),
        (["parts", "-s", "a=1"], "usage.argument", ""),
    ],
)
def test_a_wrong_target_or_value_has_a_code_and_is_named(arguments, code, value):
    error = error_of("show", *arguments, check=2)
    assert error["code"] == code
    assert value in error["message"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"vocab = = 3\n", "config.syntax"),
        (b"\xff\xfe\x00", "config.file"),
        (b"vocab = " + b"9" * 5000, "config.syntax"),
        (b"vocab = " + b"[" * 5000, "config.invalid"),
        (b"about = {contxt = 5}\nvocab = 9\ndecoder = {}\n", "config.wrong-type"),
        (b"model = 3\n", "config.wrong-type"),
    ],
)
def test_a_file_that_is_no_description(content, code, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    error = error_of("show", path, check=2)
    assert error["code"] == code
    assert "broken.toml" in error["message"]


def test_a_title_sends_no_control_codes(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text('vocab = 9\ndecoder = {}\nabout = {title = "\\u001b[31mred", source = "a\\u001b]0;t"}\n')
    assert "\x1b" not in run("show", path).stdout


def test_a_preset_is_shown_even_if_a_folder_has_its_name(tmp_path):
    (tmp_path / "gpt2").mkdir()
    assert run_json("show", "gpt2", cwd=tmp_path)["parameters"] == 124_439_808
