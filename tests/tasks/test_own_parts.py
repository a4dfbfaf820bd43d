"""A user's own task, decoding method and metric in a --parts file: used by every command when the file is named."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import pytest
from command import FORKS, error_of, run, run_json
from kinds import decoder, random_model
from raising import raises
from small_checkpoints import folder_of
from small_runs import described

import manyheads
from manyheads import Checkpoint
from manyheads.generate.config import generation_config
from manyheads.spec import load_parts, to_toml
from manyheads.tasks.language import CausalSpec
from manyheads.tasks.prediction import PredictOptions

TAGGING = '''
"""Tagging: one tag per word of a text."""

from dataclasses import replace

from manyheads.spec import field
from manyheads.parts.inputs import pad_rows
from manyheads.tasks.batch import Batch, pad_targets
from manyheads.tasks.task import TaskSpec


class TagSpec(TaskSpec, kind="tag"):
    """−Σ log p(tag_t | x), one tag per word"""

    fields = ("source", "target")
    architectures = ("encoder",)
    generates_text = False
    template = "$A"
    num_special_tokens = 0
    file_kind = "pairs"
    word_tokens = True
    architecture_reason = "a tag depends on the words before and after it"

    weight: float = field(1.0, "of the loss", gt=0)

    def batch(self, rows, special_tokens, rng):
        words, tags = zip(*rows)
        return Batch(pad_rows(words, special_tokens.pad), pad_targets(tags))

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return replace(loss, sum=self.weight * loss.sum)

    def results(self, checkpoint, rows, options):
        for i, logits_LV in checkpoint.outputs(rows):
            yield i, {"tags": [checkpoint.decode([tag]) for tag in logits_LV[: len(rows[i])].argmax(-1).tolist()]}

    def format_line(self, result):
        return " ".join(result["tags"])

    def format_result(self, result):
        words = result["text"].split()
        return [f"{word}\\t{tag}" for word, tag in zip(words, result["tags"], strict=True)]

    @classmethod
    def suggest_head(cls, suggestion):
        return [("head", "untied", "words and tags have different vectors")]
'''

RULES = {"the": "DET", "a": "DET", "cat": "NOUN", "dog": "NOUN", "sees": "VERB", "likes": "VERB"}


def tagged_rows(count):
    """The word "can" is a noun after a determiner, else a verb: a tag depends on the words around it."""
    words = list(RULES)
    for i in range(count):
        text = [words[(i * 7 + j * j + i // 3) % len(words)] for j in range(3 + i % 4)] + ["can"] * (i % 2)
        tags = [
            RULES.get(word) or ("NOUN" if RULES.get(text[j - 1]) == "DET" else "VERB") for j, word in enumerate(text)
        ]
        yield " ".join(text), " ".join(tags)


@pytest.fixture(scope="module")
def tagging(tmp_path_factory):
    """The parts file, and the folder of a trained run."""
    folder = tmp_path_factory.mktemp("tagging")
    (folder / "tag.py").write_text(TAGGING)
    (folder / "tags.tsv").write_text("".join(f"{text}\t{tags}\n" for text, tags in tagged_rows(240)))
    attention, mlp = {"kind": "heads", "heads": 2}, {"kind": "mlp", "hidden": 32}
    stack = {"layers": 1, "width": 16, "attention": attention, "feedforward": mlp, "position": "sinusoidal"}
    tree = {
        "model": {"vocab": "tokenizer", "encoder": stack, "head": "untied", "init": "xavier"},
        "data": {"kind": "pairs", "path": str(folder / "tags.tsv")},
        "tokenizer": "words",
        "task": {"kind": "tag", "weight": 2.0},
        "optim": {"lr": 1e-2, "schedule": {"kind": "linear", "warmup_steps": 5}},
        "train": {"steps": 60, "batch_tokens": 400, "eval_every": 30, "save_every": 30, "best": {"metric": "accuracy"}},
    }
    (folder / "run.toml").write_text(to_toml(tree))
    run("train", folder / "run.toml", "--output", folder / "run", "--parts", folder / "tag.py")
    return folder


def test_an_own_task_is_listed_by_show(tagging):
    (slot,) = run_json("show", "task", "--parts", tagging / "tag.py")["slots"]
    (kind,) = [kind for kind in slot["kinds"] if kind["kind"] == "tag"]
    assert kind["formula"] == "−Σ log p(tag_t | x), one tag per word"
    assert [(field["field"], field["default"]) for field in kind["fields"]] == [("weight", 1.0)]
    assert "tag" not in [kind["kind"] for kind in run_json("show", "task")["slots"][0]["kinds"]]
    assert "one tag per word" in run("show", "task", "--parts", tagging / "tag.py").stdout


def test_an_own_task_is_trained_and_validated(tagging):
    lines = [json.loads(line) for line in (tagging / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line["metrics"] for line in lines if line["event"] == "evaluated"]
    assert [set(metrics) for metrics in evaluations] == [{"loss", "accuracy"}] * 2
    assert evaluations[-1]["accuracy"] == 1
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]


def test_an_own_task_is_evaluated(tagging):
    report = run_json("evaluate", tagging / "run", "--parts", tagging / "tag.py")
    assert report["task"] == "tag"
    assert report["metrics"]["model"]["accuracy"] == 1
    assert report["better"] == {"loss": "lower", "accuracy": "higher"}
    other = tagging / "other.tsv"
    other.write_text("the cat\tDET NOUN\nthe dog\tVERB NOUN\n")
    report = run_json("evaluate", tagging / "run", "--data", other, "--parts", tagging / "tag.py")
    assert (report["rows"], report["targets"]) == (2, 4)
    assert report["metrics"]["model"]["accuracy"] == 0.75


def test_an_own_task_predicts_one_text_and_many(tagging):
    common = ["predict", tagging / "run", "--parts", tagging / "tag.py"]
    texts = ["the cat sees a can", "can", "a dog likes the cat"]
    tags = [["DET", "NOUN", "VERB", "DET", "NOUN"], ["VERB"], ["DET", "NOUN", "VERB", "DET", "NOUN"]]
    assert run(*common, texts[0]).stdout.splitlines() == ["the\tDET", "cat\tNOUN", "sees\tVERB", "a\tDET", "can\tNOUN"]
    assert run_json(*common, texts[0]) == {"schema": 1, "task": "tag", "text": texts[0], "tags": tags[0]}
    lines = "\n".join([texts[0], "", *texts[1:]]).encode()
    plain = run(*common, stdin=lines).stdout.splitlines()
    assert plain == [" ".join(tags[0]), "", " ".join(tags[1]), " ".join(tags[2])]
    rows = [json.loads(line) for line in run(*common, "--json", stdin=lines).stdout.splitlines()]
    assert rows[1] is None
    assert [row["tags"] for row in rows if row] == tags


class Quoting(CausalSpec):
    """A causal task whose results have one key more."""

    def encode(self, checkpoint, texts, options):
        return super().encode(checkpoint, [text.strip() for text in texts], options)

    def results(self, checkpoint, rows, options):
        for i, result in super().results(checkpoint, rows, options):
            yield i, result | {"quoted": repr(result["generated"])}


def test_an_own_task_that_extends_the_results_of_another_still_generates_text():
    """It may stream, report loops and chat, and a text without room for new tokens is refused before the model runs."""
    task, checkpoint = Quoting(), Checkpoint(random_model(decoder(position={"kind": "learned", "length": 8})))
    options = PredictOptions(generation_config(max_new_tokens=3), loops=True, chat=True)
    task.check_options(options)
    ((_, result),) = task.predict(checkpoint, [" 3 4 "], replace(options, chat=False))
    assert {"generated", "quoted", "loop"} <= set(result)
    with raises("input.length"):
        task.encode_checked(checkpoint, replace(options, chat=False), ["3 " * 8])


def test_an_own_task_has_a_suggested_run(tagging, tmp_path):
    common = ["new", "tag", tagging / "tags.tsv", "--parts", tagging / "tag.py"]
    run(*common, "--minutes", "0.01", "--output", tmp_path / "run.toml")
    tree = tomllib.loads((tmp_path / "run.toml").read_text())
    assert (tree["task"]["kind"], tree["model"]["head"]) == ("tag", "untied")
    steps = ["-s", "train.steps=1", "-s", "train.eval_rows=2"]
    run("train", tmp_path / "run.toml", "--output", tmp_path / "run", "--parts", tagging / "tag.py", *steps)


@pytest.mark.parametrize("command", ["train", "evaluate", "predict", "new"])
def test_without_its_file_an_own_task_is_an_error_that_names_the_option(command, tagging):
    arguments = {
        "train": [tagging / "run.toml", "--output", tagging / "other"],
        "evaluate": [tagging / "run"],
        "predict": [tagging / "run", "the cat"],
        "new": ["tag"],
    }[command]
    error = error_of(command, *arguments, check=2)
    assert error["code"] == ("usage.argument" if command == "new" else "config.unknown-kind")
    assert "tag" in error["message"]
    assert command == "new" or "--parts" in error["message"] + error["hint"]


# ---------------------------------------------------------------------------------------------------- own metric, method


def test_a_result_without_generated_text_is_printed_as_one_line():
    class LengthSpec(CausalSpec):
        def format_line(self, result):
            return f"{result['length']} words"

    assert LengthSpec().format_result({"length": 3}) == ["3 words"]


SCORES = '''
"""A metric and a decoding method."""

from manyheads.generate.decoding import TokenByTokenSpec
from manyheads.metrics.metric import register_metric


@register_metric("length_error", "text", higher_is_better=False)
def length_error(outputs, targets):
    pairs = zip(outputs, targets, strict=True)
    return sum(abs(len(output.split()) - len(target.split())) for output, target in pairs) / len(targets)


class ConstantSpec(TokenByTokenSpec, kind="test-constant"):
    """v = 7 at every step"""

    def next_tokens(self, logits_BV, rng):
        return logits_BV.argmax(-1) * 0 + 7
'''


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """The parts file, and the folder of a run whose best checkpoint is selected by the metric in it."""
    folder = tmp_path_factory.mktemp("scored")
    (folder / "scores.py").write_text(SCORES)
    best = {"metric": "length_error"}
    tree = described("seq2seq", steps=8, eval_every=2, save_every=2, best=best) | {"optim": {"lr": 1e-2}}
    (folder / "run.toml").write_text(to_toml(tree))
    run("train", folder / "run.toml", "--output", folder / "run", "--parts", folder / "scores.py")
    return folder


def test_an_own_metric_is_reported_by_evaluate(scored):
    common = ["evaluate", scored / "run", "--num-beams", 1, "--examples", 20, "--max-rows", 20]
    report = run_json(*common, "--parts", scored / "scores.py")
    assert report["better"]["length_error"] == "lower"
    examples = [(len(row["prediction"].split()), len(row["reference"].split())) for row in report["examples"]]
    expected = sum(abs(output - target) for output, target in examples) / 20
    assert report["metrics"]["model"]["length_error"] == pytest.approx(expected)
    assert report["metrics"]["copy"]["length_error"] == 0, "a reversed text is as long as its source"
    assert "length_error" in run(*common, "--parts", scored / "scores.py").stdout


def test_an_own_metric_selects_the_best_checkpoint(scored):
    lines = [json.loads(line) for line in (scored / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = {line["step"]: line["metrics"]["length_error"] for line in lines if line["event"] == "evaluated"}
    assert len(evaluations) == 4
    best = min(evaluations, key=lambda step: (evaluations[step], step))  # lower is better, the first of equals
    assert (scored / "run" / "checkpoints" / "best").read_text().strip() == f"step-{best:08}"
    error = error_of("train", scored / "run.toml", "--output", scored / "other", check=2)
    assert (error["code"], "length_error" in error["message"]) == ("config.incompatible", True)


def use_own_method(parts, folder, results):
    """In a process of its own, which alone has the parts."""
    load_parts(parts)
    checkpoint = manyheads.load(folder)
    ids = checkpoint.generate(checkpoint.tokenizer.encode("a b").ids, decoding="test-constant", max_new_tokens=3)
    text = manyheads.predict(checkpoint, "a b", decoding={"kind": "test-constant"}, max_new_tokens=2)["generated"]
    results.write_text(json.dumps([ids, text]))


def test_an_own_method_is_listed_and_used(scored, tmp_path):
    (slot,) = run_json("show", "decoding", "--parts", scored / "scores.py")["slots"]
    assert {"greedy", "sample", "beam", "test-constant"} <= {kind["kind"] for kind in slot["kinds"]}
    process = FORKS.Process(target=use_own_method, args=(scored / "scores.py", scored / "run", tmp_path / "results"))
    process.start()
    process.join(120)
    ids, text = json.loads((tmp_path / "results").read_text())
    assert ids == [7, 7, 7]
    assert len(text.split()) == 2
    command = ("predict", scored / "run", "a b", "--parts", scored / "scores.py", "--max-new-tokens", "2", "--decoding")
    assert run(*command, "test-constant").stdout.strip() == text
    assert run(*command, '{kind = "test-constant"}').stdout.strip() == text
    assert error_of(*command, "no-such-method", check=2)["code"] == "generate.config"
    assert error_of(*command, "test-constant", "--num-beams", "2", check=2)["code"] == "generate.config"


# ------------------------------------------------------------------------------------------------------------ own logits processor

PROCESSOR = '''
"""A logits processor."""

from manyheads.generate.logits_processor import LogitsProcessorSpec, remove
from manyheads.spec import field


class NeverAtSpec(LogitsProcessorSpec, kind="test-never-at"):
    """−∞ for a token at one step"""

    test_never: int = field(-1, "token id", ge=-1)
    test_step: int = field(0, "step", ge=0)

    def apply(self, logits_BV, context):
        return remove((self.test_never,), logits_BV) if context.num_generated == self.test_step else logits_BV
'''


def test_an_own_processor_is_listed_and_changes_the_output(tmp_path):
    (tmp_path / "own.py").write_text(PROCESSOR)
    parts = ["--parts", tmp_path / "own.py"]
    (slot,) = run_json("show", "logits_processor", *parts)["slots"]
    (kind,) = [kind for kind in slot["kinds"] if kind["kind"] == "test-never-at"]
    assert kind["formula"] == "−∞ for a token at one step"
    assert [field["field"] for field in kind["fields"]] == ["test_never", "test_step"]
    assert "test-never-at" not in [kind["kind"] for kind in run_json("show", "logits_processor")["slots"][0]["kinds"]]
    folder = folder_of("gpt2", tmp_path / "gpt2", bos_token_id=None, eos_token_id=None)
    common = ["predict", folder, "word1 word2", "--max-new-tokens", 4, "--logprobs", 1]
    before = [token["id"] for token in run_json(*common)["logprobs"]]
    own = ["-s", f"test_never={before[1]}", "-s", "test_step=1", *parts]
    result = run_json(*common, *own)
    after = [token["id"] for token in result["logprobs"]]
    assert (after[0], after[1] != before[1]) == (before[0], True)
    assert result["settings"]["test_never"] == {"value": before[1], "from": "caller"}
    off = run_json(*common, "-s", "test_never=-1", *parts)
    assert [token["id"] for token in off["logprobs"]] == before
    assert error_of(*common, "-s", "test_never=3", check=2)["code"] == "generate.config", "without its file"
    assert error_of(*common, "-s", "test_step=1", *parts, check=2)["code"] == "generate.config"
