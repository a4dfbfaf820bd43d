"""The tab Model: its drawing, figures and steps are those of the library, and a request names no files."""

from __future__ import annotations

import re
import shlex
import tomllib
from xml.etree import ElementTree

import kinds
import pytest
from studio_client import Client

from manyheads import Checkpoint, build, presets, read, read_model
from manyheads.inspect.describe import describe_model
from manyheads.inspect.drawing import draw_model
from manyheads.model.spec import override_model
from manyheads.spec import to_tree

HOSTILE = "runs/<img src=x onerror=alert(1)>"


@pytest.fixture
def ask():
    client = Client(Checkpoint(build(kinds.decoder()).eval()), paths=[HOSTILE])

    def request(path, status=200, **body):
        return client.post(f"model/{path}", status, **body) if body else client.get(f"model/{path}", status).json()

    return request


def options_of(command):
    """The target and the overrides of a `manyheads show` command."""
    words = shlex.split(command)
    assert words[:2] == ["manyheads", "show"]
    assert words[3::2] == ["-s"] * len(words[4::2])
    return words[2], words[4::2]


def test_every_preset_and_open_checkpoint_can_be_chosen_and_every_kind_has_its_formula(ask):
    known = ask("targets")
    assert [preset["target"] for preset in known["presets"]] == list(presets.names())
    assert all(preset["title"] and preset["source"] for preset in known["presets"])
    assert known["checkpoints"] == [{"target": "checkpoint-0", "title": HOSTILE}]
    assert all(kind["formula"] for kinds in known["slots"].values() for kind in kinds)


@pytest.mark.parametrize("target", ["transformer-base", "bert-base", "rnnsearch", "mae-tiny", "checkpoint-0"])
def test_a_model_is_described_as_by_the_library(target, ask):
    shown = ask("describe", target=target)
    spec = kinds.decoder() if target == "checkpoint-0" else read(target)
    assert read_model(tomllib.loads(shown["toml"])) == spec
    assert shown["equal_presets"] == ([] if target == "checkpoint-0" else [target])
    assert shown["parameters"] == sum(shown["parameters_by_part"].values()) == ask("costs", target=target)["parameters"]
    title = HOSTILE if target == "checkpoint-0" else target
    drawing = re.sub("<style>.*</style>", "", draw_model(spec, title=title), flags=re.S)
    assert shown["svg"] == drawing
    assert "style" not in {node.tag.rpartition("}")[2] for node in ElementTree.fromstring(shown["svg"]).iter()}
    assert options_of(shown["command"]) == (title, [])


def test_a_swap_changes_figures_and_gives_the_shortest_command(ask):
    overrides = ["decoder.position=none", "decoder.position=rope", "decoder.norm=rms"]
    shown = ask("describe", target="gpt2", overrides=overrides)
    expected = describe_model("gpt2", overrides)
    costs = ask("costs", target="gpt2", overrides=overrides)
    assert shown["parameters"] == costs["parameters"] == expected["parameters"] < 124_439_808
    assert shown["parameters_at_start"] == 124_439_808
    assert (costs["flops"], costs["memory"]) == (expected["flops"], expected["memory"])
    target, shortest = options_of(shown["command"])
    assert shortest == ["decoder.position=rope", "decoder.norm=rms"]
    assert read(target, *shortest) == read("gpt2", *overrides)
    assert ask("costs", target="gpt2", batch=3, length=10)["flops"]["batch"] == 3


def fields_of(fields):
    for field in fields:
        yield field
        yield from fields_of(field.get("fields", []))


@pytest.mark.parametrize("target", ["transformer-base", "albert-base-v2", "rnnsearch", "mae-tiny"])
def test_every_field_has_a_control_whose_value_is_an_override_that_changes_nothing(target, ask):
    spec = read(target)
    found = list(fields_of(ask("describe", target=target)["fields"]))
    assert {"encoder.position", "head"} <= {field["path"] for field in found} or target == "rnnsearch"
    for field in found:
        assert field["meaning"]
        if field["type"] == "table" and field["value"]:
            continue  # has fields of its own
        value = field["value"] if field["value"] is not None else "false"
        tree = override_model(to_tree(spec), [f"{field['path']}={value}"])
        assert read_model(tree) == spec, field


def test_a_walk_ends_in_an_equal_spec(ask):
    overrides = []
    for goal in ("gpt2", "llama-7b"):
        steps = ask("walk", target="transformer-base", overrides=overrides, goal=goal)["steps"]
        assert len(steps) > 3
        for step in steps:
            overrides += step["overrides"]
            read("transformer-base", *overrides)
        assert read("transformer-base", *overrides) == read(goal)
    shown = ask("describe", target="transformer-base", overrides=overrides)
    assert shown["equal_presets"] == ["llama-7b"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"target": "gtp2"}, "usage.argument"),
        ({"target": "../gpt2.toml"}, "usage.argument"),
        ({"target": "/etc/passwd"}, "usage.argument"),
        ({"target": "checkpoint-1"}, "usage.argument"),
        ({"target": "checkpoint-²"}, "usage.argument"),
        ({"target": 3}, "usage.argument"),
        ({"target": "gpt2", "overrides": ["x" * 9000]}, "usage.argument"),
        ({"target": "gpt2", "overrides": ["decoder.layers=2"] * 600}, "usage.argument"),
        ({"target": "gpt2", "overrides": ["decoder.attention.heads=7"]}, "config.incompatible"),
        ({"target": "gpt2", "overrides": ["decoder.position=rop"]}, "config.unknown-kind"),
    ],
)
def test_a_wrong_model_is_explained(body, code, ask):
    for path, more in (("describe", {}), ("costs", {}), ("walk", {"goal": "gpt2"})):
        answer = ask(path, status=422, **body, **more)
        assert answer["code"] == code
        assert answer["message"]
