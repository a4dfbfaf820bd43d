"""A user's own part: it works in every command when its file is named, and nothing is executed otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command import error_of, run, run_json

from manyheads.spec import to_toml

ROOT = Path(__file__).parents[2]
GAUSSIAN = '''
from manyheads.parts.core import Core, CoreSpec
from manyheads.spec import field


class GaussianSpec(CoreSpec, kind="gaussian"):
    """softmax(−‖q − k‖² / 2σ²) v"""

    sigma: float = field(1.0, "σ", gt=0)

    def build(self, heads, query_size, key_size):
        return Gaussian(self)


class Gaussian(Core):
    def __init__(self, spec):
        super().__init__(spec)
        self.sigma = spec.sigma

    def scores(self, q, k, places):
        distance = (q.unsqueeze(3) - k.unsqueeze(2)).square().sum(-1)  # B×H×L×M
        return -distance / (2 * self.sigma**2)
'''
WRONG = (
    GAUSSIAN.replace("Gaussian", "Wrong")
    .replace('"gaussian"', '"wrong"')
    .replace(
        "def scores",
        "def forward(self, q, k, v, **rest):\n        return v.flip(2)[:, :, :q.shape[2]]\n\n    def scores",
    )
)


@pytest.fixture
def own_parts(tmp_path):
    path = tmp_path / "my_parts.py"
    path.write_text(GAUSSIAN)
    return path


def test_an_own_part_takes_its_slot(own_parts, tmp_path):
    core, few = "decoder.core={kind='gaussian', sigma=2.0}", ("-s", "decoder.layers=2")
    text = run("show", "gpt2", "--parts", own_parts, "-s", core, "-s", "decoder.residual=sandwich", *few).stdout
    assert "gaussian(sigma=2)" in text
    assert "σ²" in text
    assert "sandwich" in text
    described = tmp_path / "saved.toml"
    command = ("show", "gpt2", "--parts", own_parts, "-s", "decoder.core=gaussian", *few)
    described.write_text(run(*command, "--toml").stdout)
    assert error_of("show", described, check=2)["code"] == "config.unknown-kind", "reading it executes nothing"
    shown = run_json("show", described, "--parts", own_parts)
    assert shown["parameters"] == run_json(*command)["parameters"]
    assert {layer["core"]["kind"] for layer in shown["layers"]["decoder"]} == {"gaussian"}


def test_a_run_with_an_own_part_is_trained_predicted_audited_and_exported(own_parts, tmp_path):
    stack = {
        "layers": 1,
        "width": 8,
        "attention": {"kind": "heads", "heads": 2},
        "core": "gaussian",
        "feedforward": {"kind": "mlp", "hidden": 8},
    }
    tree = {
        "model": {"vocab": "tokenizer", "decoder": stack},
        "data": {"kind": "biographies", "people": 60},
        "task": {"kind": "causal"},
        "train": {"steps": 1, "eval_rows": 1},
    }
    (tmp_path / "run.toml").write_text(to_toml(tree))
    run("train", tmp_path / "run.toml", "--output", tmp_path / "run", "--parts", own_parts)
    error = error_of("predict", tmp_path / "run", "a", check=4)
    assert "--parts" in error["message"] + error["hint"]
    run("predict", tmp_path / "run", "a", "--max-new-tokens", "2", "--parts", own_parts)
    run("audit", tmp_path / "run", "--parts", own_parts)
    run("export", tmp_path / "run", tmp_path / "out", "--to", "manyheads", "--parts", own_parts)


def test_the_invariants_are_tested_with_an_own_part_and_find_a_wrong_one(own_parts):
    own_parts.write_text(GAUSSIAN + WRONG)
    report = own_parts.with_name("report.xml")
    names = "(gaussian or wrong) and (any_decoder or fast_forward)"
    options = ("-n", "0", "-p", "no:cacheprovider", "--junitxml", report, "--parts", own_parts, "-k", names)
    invariants = [sys.executable, "-m", "pytest", ROOT / "tests/model/test_invariants.py", *options]
    done = subprocess.run(invariants, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    failed = {name: [] for name in ("gaussian", "wrong")}
    for case in ElementTree.parse(report).iter("testcase"):
        (kind,) = (name for name in failed if name in case.get("name"))
        failed[kind].append(case.find("failure") is not None)
    assert failed["gaussian"]
    assert not any(failed["gaussian"])
    assert any(failed["wrong"]), "a core whose forward does not use its weights"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x = = 3", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import nowhere_at_all", "nowhere_at_all"),
        ("from manyheads.parts.norm import NormSpec\nclass X(NormSpec, kind='x'): pass", "build"),
        ("from manyheads.spec import Part\nclass Mine(Part, slot='core'): pass\n", "'core'"),
    ],
)
def test_a_file_of_parts_that_cannot_be_used(tmp_path, text, value):
    path = tmp_path / "mine.py"
    path.write_text(text)
    error = error_of("show", "gpt2", "--parts", path, check=2)
    assert error["code"] == "usage.parts-file"
    assert value in error["message"]


def test_a_file_of_parts_ends_in_py(tmp_path):
    (tmp_path / "mine.txt").write_text(GAUSSIAN)
    assert error_of("show", "gpt2", "--parts", tmp_path / "mine.txt", check=2)["code"] == "usage.parts-file"


def test_a_field_without_a_description_can_be_shown(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(GAUSSIAN.replace('field(1.0, "σ", gt=0)', "1.0"))
    (slot,) = run_json("show", "core", "--parts", path)["slots"]
    (kind,) = [kind for kind in slot["kinds"] if kind["kind"] == "gaussian"]
    assert [field["field"] for field in kind["fields"]][-1:] == ["sigma"]


def test_a_missing_run_is_not_a_name_on_the_hub(tmp_path):
    (tmp_path / "runs").mkdir()
    error = error_of("predict", "runs/nosuch", "a", cwd=tmp_path, check=2)
    assert error["code"] == "usage.path-not-found"
    assert "runs/nosuch" in error["message"]
