"""A checkpoint from any path: used with texts or token ids, by the library and by the command line, and exported."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from command import error_of, run, run_json
from kinds import decoder, ngram, recurrent
from raising import raises
from small_checkpoints import WORDS, folder_of
from small_runs import described, train_all
from tokenizers import Tokenizer, models, pre_tokenizers

import manyheads
from manyheads import Checkpoint, build, read
from manyheads.errors import ManyheadsError
from manyheads.tasks.evaluation import EvalOptions
from manyheads.tasks.task import task_of
from manyheads.training.evaluator import load_rows, make_evaluation
from manyheads.training.loop import train_events
from manyheads.training.preparation import prepare
from manyheads.training.run import read_run, read_run_file


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "use",
    [
        lambda path: manyheads.predict(path, "a"),
        lambda path: manyheads.evaluate(path, data="texts"),
        manyheads.audit,
        lambda path: manyheads.export(path, path.with_name("exported")),
    ],
    ids=["predict", "evaluate", "audit", "export"],
)
def test_without_a_model_every_command_gives_the_same_error(use, tmp_path):
    (tmp_path / "folder").mkdir()
    with raises("usage.path-not-found", tmp_path / "missing"):
        use(tmp_path / "missing")
    with raises("checkpoint.not-found", tmp_path / "folder" / "config.json"):
        use(tmp_path / "folder")
    folder_of("gpt2", tmp_path / "whole")
    (tmp_path / "whole" / "config.json").rename(tmp_path / "folder" / "config.json")
    with raises("checkpoint.weights", tmp_path / "folder"):
        use(tmp_path / "folder")


# --------------------------------------------------------------------------------------------------------- prediction


def test_a_decoder_generates_what_transformers_generates(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = folder_of("gpt2", tmp_path / "gpt2", eos_token_id=None, bos_token_id=None)
    ours = manyheads.load(folder)
    ids = [5, 9, 7]
    theirs = AutoModelForCausalLM.from_pretrained(folder).generate(
        torch.tensor([ids]), max_new_tokens=9, do_sample=False, pad_token_id=0
    )
    assert ours.generate(ids, max_new_tokens=9) == theirs[0, 3:].tolist()
    text = ours.generate("word0 word4 word2", max_new_tokens=9)
    assert text.split() == [WORDS[i] for i in theirs[0, 3:].tolist() if i > 3]
    sampled = {"max_new_tokens": 30, "temperature": 2.0}
    assert ours.generate(ids, seed=3, **sampled) == ours.generate(ids, seed=3, **sampled)
    assert ours.generate(ids, seed=3, **sampled) != ours.generate(ids, seed=4, **sampled)
    assert run("predict", folder, "word0 word4 word2", "--max-new-tokens", 9).stdout.strip() == text


def test_an_encoder_decoder_generates_what_transformers_generates(tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    folder = folder_of("marian", tmp_path / "marian", tokenizer=False)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder)
    settings = {"max_new_tokens": 9, "do_sample": False, "num_beams": 1}
    expected = theirs.generate(torch.tensor([[5, 9, 7]]), **settings)[0, 1:].tolist()
    ours = manyheads.load(folder).generate([5, 9, 7], max_new_tokens=9)
    assert ours == (expected[: expected.index(0)] if 0 in expected else expected)
    assert run("predict", folder, "5 9 7", "--max-new-tokens", 9).stdout.split() == list(map(str, ours))
    assert error_of("predict", folder, "hello", check=2)["code"] == "input.invalid"


def test_a_masked_model_fills_masks(tmp_path):
    folder = folder_of("bert", tmp_path / "bert")
    ours = manyheads.load(folder)
    result = manyheads.predict(ours, "word0 [MASK] word2", num_fills=3)
    logits = ours.logits(torch.tensor([[1, 5, 3, 7, 2]]))[0, 2]
    assert result["task"] == "masked"
    assert result["filled"][0]["position"] == 2
    assert len(result["filled"][0]["tokens"]) == 3
    assert result["filled"][0]["tokens"][0]["probability"] == pytest.approx(float(torch.softmax(logits, -1).max()))
    assert len(run("predict", folder, "word0 [MASK]").stdout.splitlines()) == 5
    error = error_of("predict", folder, "word0", check=2)
    assert error["code"] == "input.invalid"
    assert "[MASK]" in error["message"]


def test_classes_have_their_names(tmp_path):
    folder = folder_of("bert-classes", tmp_path / "classes")
    names = {"0": "bad", "1": "fair", "2": "good"}
    edit_config(folder, id2label=names, label2id={name: int(i) for i, name in names.items()})
    rows = run_json("predict", folder, "word0 word1")["classes"]
    assert {row["class"] for row in rows} == {"bad", "fair", "good"}
    assert sum(row["probability"] for row in rows) == pytest.approx(1.0)
    assert rows == sorted(rows, key=lambda row: -row["probability"])


@pytest.mark.parametrize(
    ("labels", "kind"), [(1, None), (1, "regression"), (3, "multi_label_classification"), (4, "regression")]
)
def test_the_values_of_classes_follow_the_problem_type(labels, kind, tmp_path):
    """A regression gives scores, not probabilities; labels that do not exclude each other have one probability each."""
    folder = folder_of("bert-classes", tmp_path / "classes", num_labels=labels, problem_type=kind)
    ours = manyheads.load(folder)
    logits = ours.logits(torch.tensor([[1, 5, 6, 2]]))[0]
    rows = {row.pop("class"): row for row in manyheads.predict(ours, "word0 word1")["classes"]}
    key, values = ("probability", logits.sigmoid()) if kind == "multi_label_classification" else ("score", logits)
    assert rows == {f"LABEL_{i}": {key: pytest.approx(float(value), abs=1e-6)} for i, value in enumerate(values)}
    assert len(run("predict", folder, "word0 word1").stdout.splitlines()) == labels


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_labels_that_do_not_exclude_each_other_are_not_evaluated_as_one_class(kind, tmp_path):
    folder = folder_of("bert-classes", tmp_path / "classes", num_labels=3, problem_type=kind)
    (tmp_path / "labels.tsv").write_text("".join(f"word{i}\tLABEL_{i % 3}\n" for i in range(6)))
    error = error_of("evaluate", folder, "--data", tmp_path / "labels.tsv", check=2)
    assert error["code"] == "model.unsupported"
    assert kind in error["message"]
    edit_config(folder, problem_type=None)
    assert run_json("evaluate", folder, "--data", tmp_path / "labels.tsv")["rows"] == 6


def test_an_unknown_problem_type_is_refused(tmp_path):
    folder = folder_of("bert-classes", tmp_path / "classes")
    edit_config(folder, problem_type="ranking")
    error = error_of("predict", folder, "word0", check=4)
    assert error["code"] == "checkpoint.config"
    assert "ranking" in error["message"]


def test_names_of_classes_may_have_gaps_and_other_forms_are_refused(tmp_path):
    folder = folder_of("bert-classes", tmp_path / "classes")
    edit_config(folder, id2label={"00": "bad", "1": 3, "7": "good"})
    classes = manyheads.predict(manyheads.load(folder), "word0")["classes"]
    assert {row["class"] for row in classes} == {"bad", "3", "2"}
    for names in (["bad", "fair", "good"], {"LABEL_0": "bad", "LABEL_1": "fair", "LABEL_2": "good"}):
        edit_config(folder, id2label=names)
        assert error_of("predict", folder, "word0", check=4)["code"] == "checkpoint.config"


def test_wrong_inputs_have_a_code(tmp_path):
    ours = manyheads.load(folder_of("gpt2", tmp_path / "gpt2"))
    for text, code, *values in (
        ([2**70], "input.shape", 2**70),
        ([-1], "input.invalid", -1, 61),
        ([61], "input.invalid", 61),
        ([[]], "input.length"),
        ([1.5], "input.shape", "float"),
        ([True], "input.shape", "bool"),
        ([[[1, 2]]], "input.shape", "(1, 1, 2)"),
        ([[1], ["a"]], "input.shape"),
        (["a", [1]], "input.shape"),
        (["a", 3], "input.shape", ["a", 3]),
        (None, "input.shape", None),
        (3, "input.shape", 3),
        (b"hi", "input.shape", b"hi"),
        ([b"hi", b"you"], "input.shape", b"hi"),
        (bytearray(b"hi"), "input.shape"),
        ("", "input.length"),
        ("word0 \udcff", "input.invalid"),
    ):
        with raises(code, *values):
            ours.generate(text)
    for name, values in (("max_new_tokens", (True, 0)), ("seed", (-1, 2**63)), ("temperature", (-1, True))):
        for value in values:
            with raises("generate.config", name):
                ours.generate([1], **{name: value})
    with raises("usage.argument", "decoder_input_ids"):
        ours.logits(torch.tensor([[1]]), torch.tensor([[1]]))
    for path in (None, "", 3, b"x", []):
        with raises("usage.argument", repr(path)):
            manyheads.load(path)
    with raises("usage.argument", "float32", "torch.float64"):
        manyheads.load(tmp_path / "gpt2", dtype="float32")
    bert = manyheads.load(folder_of("bert", tmp_path / "bert"))
    for num_fills in (-1, 0, True, 1.5, None):
        with raises("usage.argument", "num_fills", num_fills):
            manyheads.predict(bert, "word0 [MASK]", num_fills=num_fills)
    assert len(manyheads.predict(bert, "word0 [MASK]", num_fills=10**30)["filled"][0]["tokens"]) == 61


@pytest.mark.parametrize("data", [b"hi", bytearray(b"hi"), memoryview(b"hi")], ids=lambda data: type(data).__name__)
def test_bytes_are_neither_a_text_nor_token_ids(data, tmp_path):
    checkpoint = manyheads.load(folder_of("gpt2", tmp_path / "gpt2"))
    for call in (
        lambda: checkpoint.generate(data),
        lambda: checkpoint.score(data),
        lambda: checkpoint.score([3, 4], context=data),
        lambda: list(checkpoint.stream(data)),
        lambda: checkpoint.embed(data),
        lambda: manyheads.predict(checkpoint, data),
        lambda: manyheads.predict(Checkpoint(checkpoint.model), data),
        lambda: checkpoint.chat([{"role": "user", "content": data}]),
    ):
        with pytest.raises(ManyheadsError) as caught:
            call()
        assert caught.value.code in ("input.shape", "input.invalid", "usage.argument")


def test_predict_samples_from_the_top_k_tokens(tmp_path):
    ours = manyheads.load(folder_of("gpt2", tmp_path / "gpt2"))
    greedy = manyheads.predict(ours, "word0 word1", max_new_tokens=8)
    assert manyheads.predict(ours, "word0 word1", max_new_tokens=8, temperature=50.0, seed=3) != greedy
    assert manyheads.predict(ours, "word0 word1", max_new_tokens=8, temperature=50.0, seed=3, top_k=1) == greedy


def test_an_end_token_outside_the_vocabulary_never_comes_and_such_a_start_token_is_refused(tmp_path):
    """An end token that does not exist never comes; a start token must exist."""
    folder = folder_of("t5", tmp_path / "t5", tokenizer=False)
    config = {"decoder_start_token_id": 0}
    usual = manyheads.load(folder).generate([5, 6], max_new_tokens=4)
    for eos in (2**70, -1, [-1, 2**64]):
        (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
        assert manyheads.load(folder).generate([5, 6], max_new_tokens=4) == usual
    for eos in (True, "x", [None]):
        (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
        with raises("checkpoint.config", "eos_token_id"):
            manyheads.load(folder)
    for start, code in ((2**70, "generate.config"), (-1, "generate.config"), (61, "input.invalid")):
        (folder / "generation_config.json").write_text(json.dumps(config | {"decoder_start_token_id": start}))
        with raises(code, start):
            manyheads.load(folder).generate([5, 6])


def test_a_mask_token_that_is_not_a_text_is_not_used(tmp_path):
    folder = folder_of("bert", tmp_path / "bert")
    for config in ('{"mask_token": "\\u0000"}', '{"mask_token": {"content": 3}}'):
        (folder / "tokenizer_config.json").write_text(config)
        assert len(manyheads.predict(manyheads.load(folder), "word0 [MASK]")["filled"]) == 1


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize(
    "content", [b"{", b"", b"[1]", b"null", b"\xff", b"[" * 100_000], ids=lambda item: repr(item[:9])
)
def test_a_tokenizer_config_that_is_not_a_table_is_refused(content, tokenizer, tmp_path):
    folder = folder_of("bert", tmp_path / "bert", tokenizer=tokenizer)
    (folder / "tokenizer_config.json").write_bytes(content)
    with raises("checkpoint.corrupt", folder, "tokenizer_config.json") as caught:
        manyheads.load(folder)
    assert caught.value.exit_status == 4


def test_without_a_mask_token_nothing_is_filled(tmp_path):
    """The text "0" is not a mask, and neither is the token 0."""
    folder = folder_of("bert", tmp_path / "bert", tokenizer=False)
    ours = manyheads.load(folder)
    with raises("usage.argument", "mask_token_id"):
        manyheads.predict(ours, "5 0 7")
    filled = manyheads.predict(ours, "5 3 7 3", mask_token_id=3)["filled"]
    assert [row["position"] for row in filled] == [1, 3]
    with raises("input.invalid", 3):
        manyheads.predict(ours, "5 0 7", mask_token_id=3)
    with raises("usage.argument", "mask_token_id", -1):
        manyheads.predict(ours, "5 0 7", mask_token_id=-1)
    vocab = {word: i for i, word in enumerate(["call", "0", "times", "[UNK]"])}
    own = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.save(str(folder / "tokenizer.json"))
    assert error_of("predict", folder, "call 0 times", check=2)["code"] == "model.unsupported"
    edit_config(folder, mask_token_id=3)
    (folder / "tokenizer.json").unlink()
    assert run_json("predict", folder, "5 3 7")["filled"][0]["position"] == 1


@pytest.mark.parametrize("name", ["vit", "vit-bare", "vit-mae"])
def test_a_model_of_images_reads_no_texts(name, tmp_path):
    folder = folder_of(name, tmp_path / name, tokenizer=False)
    assert error_of("predict", folder, "hello", check=2)["code"] == "model.unsupported"
    ours = manyheads.load(folder)
    for ask in (lambda: ours.generate([1]), lambda: ours.embed("x"), lambda: manyheads.predict(ours, "x")):
        with raises("model.unsupported", "images"):
            ask()


@pytest.mark.parametrize(
    "task",
    [
        {"kind": "mae"},
        {"kind": "seq2seq"},
        {"kind": "no-such-task"},
        {"kind": "causal", "none": 1},
        {"kind": 3},
        "mae",
        3,
        None,
    ],
)
def test_a_recorded_task_that_does_not_fit_the_model_is_not_followed(task, tmp_path):
    """A config may come from anywhere: its task must at least fit the shape and the head."""
    folder = folder_of("gpt2", tmp_path / "gpt2")
    edit_config(folder, task=task)
    checkpoint = manyheads.load(folder)
    assert task_of(checkpoint).kind == "causal"
    assert manyheads.predict(checkpoint, "word0", max_new_tokens=2)["task"] == "causal"


# ---------------------------------------------------------------------------------------------------------- embeddings


def write_pooling(folder, **modes):
    steps = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    steps.append({"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    steps.append({"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))


def test_a_text_is_embedded_by_the_pooling_of_its_folder(tmp_path):
    folder = folder_of("bert-bare", tmp_path / "bert")
    ours, ids = manyheads.load(folder), torch.tensor([[1, 5, 6, 7, 2]])
    states = ours.hidden_states(ids)[-1][0]
    texts = ["word0 word1 word2", "word3"]
    torch.testing.assert_close(ours.embed(texts)[0], states.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.embed(texts[0])[0], ours.embed(texts)[0], rtol=1e-5, atol=1e-5)
    write_pooling(folder, pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    vectors = manyheads.load(folder).embed(texts)
    torch.testing.assert_close(vectors[0], torch.nn.functional.normalize(states[0], dim=0), rtol=1e-5, atol=1e-5)
    for to in ("hf", "manyheads"):  # an export keeps the pooling
        manyheads.export(folder, tmp_path / to, to=to)
        assert torch.equal(manyheads.load(tmp_path / to).embed(texts), vectors)
    result = run_json("predict", folder, texts[0])
    assert result["task"] == "retrieval"
    torch.testing.assert_close(torch.tensor(result["vector"]), vectors[0], rtol=1e-5, atol=1e-5)


def test_a_sentence_encoder_truncates_texts_as_its_folder_says(tmp_path):
    """To max_seq_length tokens, as sentence-transformers does, and never silently."""
    folder = folder_of("bert-bare", tmp_path / "bert")
    write_pooling(folder, pooling_mode_mean_tokens=True)
    words = [f"word{i}" for i in range(50)]
    short, text = " ".join(words[:10]), " ".join(words)
    with raises("input.length"):
        manyheads.load(folder).embed(text)
    for settings, count in (({"max_seq_length": 12, "do_lower_case": True}, 10), ({"max_seq_length": 512}, 38)):
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
        ours = manyheads.load(folder)
        with pytest.warns(UserWarning, match="1 of 2"):
            vectors = ours.embed([text.upper() if settings.get("do_lower_case") else text, short])
        assert torch.equal(vectors[1], ours.embed([short])[0]) or vectors[1].allclose(ours.embed([short])[0], atol=1e-6)
        torch.testing.assert_close(vectors[0], ours.embed(" ".join(words[:count]))[0], rtol=1e-5, atol=1e-5)
        assert run_json("predict", folder, text)["truncated_to"] == count + 2
        for to in ("hf", "manyheads"):  # an export keeps the setting, and the tokenizer of others as it was
            manyheads.export(folder, tmp_path / f"{to}{count}", to=to)
            assert manyheads.predict(tmp_path / f"{to}{count}", text)["truncated_to"] == count + 2
            assert json.loads((tmp_path / f"{to}{count}" / "tokenizer.json").read_text())["truncation"] is None
    for wrong in ({"max_seq_length": 0}, {"max_seq_length": "9"}, {"do_lower_case": 1}):
        (folder / "sentence_bert_config.json").write_text(json.dumps(wrong))
        with raises("checkpoint.config", next(iter(wrong))):
            manyheads.load(folder).embed(short)


def test_an_empty_list_is_an_empty_batch(tmp_path):
    encoder = manyheads.load(folder_of("bert-bare", tmp_path / "bert"))
    assert encoder.embed([]).shape == (0, *encoder.embed("word0").shape[1:])
    for name in ("gpt2", "t5"):
        ours = manyheads.load(folder_of(name, tmp_path / name))
        source = {"source": "word0"} if ours.has_source else {}
        for checkpoint in (ours, Checkpoint(ours.model)):  # with a tokenizer, and without
            assert checkpoint.generate([]) == checkpoint.generate((), n=1) == manyheads.predict(ours, []) == []
        assert ours.score([], **source) == ours.score([], **source | {"context": []}) == []
    with raises("input.length"):
        manyheads.load(tmp_path / "gpt2").generate([[]])


def test_embed_truncates_if_asked(tmp_path):
    ours = manyheads.load(folder_of("bert-bare", tmp_path / "bert"))
    words = [f"word{i}" for i in range(50)]
    with pytest.warns(UserWarning, match="1 of 1"):
        vector = ours.embed(" ".join(words), truncate=True)
    torch.testing.assert_close(vector, ours.embed(" ".join(words[:38]), truncate=True), rtol=1e-5, atol=1e-5)


def test_a_pooling_that_cannot_be_followed_is_refused_where_it_is_needed(tmp_path):
    folder = folder_of("bert-bare", tmp_path / "bert")
    ids = torch.tensor([[1, 5, 6, 7, 2]])
    logits = manyheads.load(folder).logits(ids)
    write_pooling(folder, pooling_mode_weightedmean_tokens=True)
    error = error_of("predict", folder, "word0", check=4)
    assert error["code"] == "checkpoint.config"
    assert "pooling_mode_weightedmean_tokens" in error["message"]
    first, pool, unit = json.loads((folder / "modules.json").read_text())
    for steps in (
        [first, unit, pool],
        [first, pool, pool],
        [pool, first],
        [first, pool, {"type": "sentence_transformers.models.Dense"}],
    ):
        (folder / "modules.json").write_text(json.dumps(steps))
        checkpoint = manyheads.load(folder)
        assert torch.equal(checkpoint.logits(ids), logits), "logits need no pooling"
        with raises("checkpoint.config", "Transformer, Pooling, Normalize"):
            checkpoint.embed("word0")
    (folder / "modules.json").write_text(json.dumps([{"type": "evil.Module", "path": "../.."}]))
    error = error_of("predict", folder, "word0", check=4)
    assert error["code"] == "checkpoint.config"
    assert "Module" in error["message"]


def test_a_decoder_embeds_texts_by_the_pooling_of_its_folder(tmp_path):
    folder = folder_of("llama", tmp_path / "llama")
    with raises("model.unsupported", "decoder"):
        manyheads.load(folder).embed("word0")
    write_pooling(folder, pooling_mode_lasttoken=True, pooling_mode_mean_tokens=False)
    ours = manyheads.load(folder)
    states = ours.hidden_states(torch.tensor([[5, 6, 7]]))[-1][0]
    vector = ours.embed(["word0 word1 word2", "word3 word4 word5 word6 word7"])[0]
    torch.testing.assert_close(vector, torch.nn.functional.normalize(states[-1], dim=0), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- exports


def test_an_export_by_the_command_line_is_opened_by_transformers(tmp_path):
    """Which gives the same logits."""
    folder = folder_of("llama", tmp_path / "llama")
    run("export", folder, tmp_path / "copy", "--to", "hf")
    ids, theirs = torch.tensor([[5, 9, 7]]), transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy").eval()
    torch.testing.assert_close(manyheads.load(folder).logits(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    for source, target, code, status in (
        (folder, tmp_path / "copy", "usage.output-exists", 2),
        (folder, folder, "usage.output-exists", 2),
        (folder, folder / "inside", "usage.output", 2),
        (folder, folder / "config.json" / "x", "usage.output", 2),
        (tmp_path / "nowhere", tmp_path / "x", "usage.path-not-found", 2),
        ("", tmp_path / "x", "usage.argument", 2),
    ):
        assert error_of("export", source, target, check=status)["code"] == code


@pytest.mark.parametrize(
    "spec",
    [decoder(position="alibi"), recurrent(), ngram(), read("mae-tiny", "encoder.layers=1")],
    ids=lambda spec: spec.architecture,
)
def test_a_model_that_no_family_can_express_is_exported_as_its_description(spec, tmp_path):
    model = build(spec, seed=3)
    manyheads.export(Checkpoint(model), tmp_path / "own", to="manyheads")
    again = manyheads.load(tmp_path / "own")
    assert again.spec == spec
    assert all(torch.equal(tensor, again.model.get_parameter(name)) for name, tensor in model.named_parameters())
    edit_config(tmp_path / "own", model={"decoder": {"layers": "many"}})
    with raises("checkpoint.config", "config.json"):
        manyheads.load(tmp_path / "own")


def test_a_folder_in_our_own_form_keeps_the_tokens(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2")
    manyheads.export(folder, tmp_path / "own", to="manyheads")
    theirs, ours = manyheads.load(folder), manyheads.load(tmp_path / "own")
    assert ours.generate("word1 word2", max_new_tokens=5) == theirs.generate("word1 word2", max_new_tokens=5)
    assert ours.config["eos_token_id"] == theirs.config["eos_token_id"]
    manyheads.export(ours, tmp_path / "back")
    ids = torch.tensor([[3, 4]])
    assert torch.equal(manyheads.load(tmp_path / "back").logits(ids), theirs.logits(ids))


def test_the_format_of_an_export_follows_from_its_name_and_what_is_missing_is_reported(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", tokenizer=False)
    done = run("export", folder, tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").is_file()
    assert "tokenizer" in done.stderr.splitlines()[0]


def test_only_a_gguf_file_has_an_outtype(tmp_path):
    own = build(decoder())
    for to in ("hf", "onnx", "manyheads"):
        with raises("usage.argument", "q8_0"):
            manyheads.export(own, tmp_path / "out", to=to, outtype="q8_0")
    assert not (tmp_path / "out").exists()
    assert error_of("export", tmp_path, tmp_path / "out", "--outtype", "f16", check=2)["code"] == "usage.argument"


# ---------------------------------------------------------------------------------------------------------- generation


def test_generation_ends_at_the_last_position(tmp_path):
    ours = manyheads.load(folder_of("gpt2", tmp_path / "gpt2", eos_token_id=None, bos_token_id=None))
    assert ours.max_positions == 40
    for length in (3, 39, 40):
        with pytest.warns(UserWarning, match="40 positions"):
            text = ours.generate([3] * length, details=True)
        assert (len(text.token_ids), text.finish_reason, "40" in text.note) == (41 - length, "length", True)
    assert len(ours.generate([3, 4, 5], max_new_tokens=37)) == 37
    with raises("input.length", 40):
        ours.generate([3] * 41)
    stacks = ["encoder.layers=1", "decoder.layers=1", "encoder.position=learned", "encoder.position.length=8"]
    pair = build(
        read("transformer-base", "vocab=61", *stacks, "decoder.position=learned", "decoder.position.length=48")
    )
    checkpoint = Checkpoint(pair.eval())
    with pytest.warns(UserWarning, match="48 positions"):
        assert len(checkpoint.generate([3] * 8, decoder_start_token_id=1)) == 48
    assert (checkpoint.max_positions, checkpoint.max_target_positions) == (8, 48)


GENERATION_CONFIGS = {
    "many-ends": {"eos_token_id": [2, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41]},
    "forced": {"forced_bos_token_id": 9, "forced_eos_token_id": 2},
    "bad-words": {"bad_words_ids": [[token] for token in range(4, 50)] + [[51, 52], [53, 53]]},
    "nothing": {},
}


@pytest.mark.parametrize("kind", GENERATION_CONFIGS)
@pytest.mark.parametrize("name", ["gpt2", "t5", "bart", "marian"])
def test_generation_config_json_is_followed_as_transformers_follows_it(name, kind, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    folder = folder_of(name, tmp_path / name, tokenizer=False)
    config = {"eos_token_id": 2, "decoder_start_token_id": 3, "pad_token_id": 60} | GENERATION_CONFIGS[kind]
    (folder / "generation_config.json").write_text(json.dumps(config))
    architecture = AutoModelForCausalLM if name == "gpt2" else AutoModelForSeq2SeqLM
    ours, theirs = manyheads.load(folder), architecture.from_pretrained(folder)
    for ids in ([5], [5, 9, 7], [8, 20, 31, 44]):
        row = theirs.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False)[0].tolist()
        row = row[len(ids) if name == "gpt2" else 1 :]
        ends = config["eos_token_id"] if kind == "many-ends" else [2]
        assert ours.generate(ids, max_new_tokens=9) == (row[:-1] if row[-1] in ends else row)


# ------------------------------------------------------------------------------------------------ devices and threads


def test_inputs_go_to_the_device_of_the_model(tmp_path):
    """The device `meta` stands for those that this machine lacks: outputs are where the model is."""
    folder = folder_of("bert", tmp_path / "bert")
    for device in ("meta", "cuda:99x", 3.5, *([] if torch.cuda.is_available() else ["cuda"])):
        with raises("usage.device", device):
            manyheads.load(folder, device=device)
    ours = manyheads.load(folder, device="cpu")
    assert ours.device == torch.device("cpu")
    ours.model.to("meta")
    ids, padding_mask = torch.tensor([[3, 4, 5]]), torch.tensor([[False, False, True]])
    for output in (
        ours.logits(ids, padding_mask=padding_mask),
        *ours.hidden_states(ids),
        ours.embed(["word0", "word1 word2"]),
        ours.pad([[1, 2]]).tokens,
    ):
        assert output.device == ours.device == torch.device("meta")
    pair = manyheads.load(folder_of("t5", tmp_path / "t5", tokenizer=False))
    pair.model.to("meta")
    assert pair.logits(ids, ids).device == pair.device


@pytest.mark.parametrize("spec", [recurrent(), ngram()], ids=lambda spec: spec.architecture)
def test_only_a_transformer_has_hidden_states(spec):
    with raises("model.unsupported", spec.architecture):
        Checkpoint(build(spec)).hidden_states(torch.tensor([[1]]))


@pytest.fixture(scope="module")
def small_runs(tmp_path_factory):
    """Runs of tasks that read special tokens in a text, and of others, trained for a step."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("masked", "spans", "infill", "causal", "retrieval"):
        train_all(described(name, steps=1, save_every=1, eval_every=1), folder / name)
    return folder


def calls_of(checkpoint, name):
    """Everything that a checkpoint of this task can do, as functions of a number."""
    mask = {"masked": "was <mask> born </s> in <mask>", "infill": "was <mask> in"}.get(name, "was <extra_0> born <s>")
    special = ["<mask>"] if name in ("masked", "infill") else ["<extra_0>"] if name == "spans" else []
    texts = [f"{'he was born ' * (1 + i % 3)}{mask} 18{i:02}" for i in range(4)]
    calls = [lambda i: manyheads.predict(checkpoint, texts[i], max_new_tokens=6, temperature=1.0 * (i % 2), seed=i)]
    if special:
        calls.append(lambda i: [item.ids for item in checkpoint.encode_with_special(texts[: 1 + i], special)])
    if name in ("masked", "retrieval"):
        calls.append(lambda i: checkpoint.embed(texts[: 1 + i]).tolist())
    if checkpoint.model.can_generate:
        calls.append(lambda i: checkpoint.generate(texts[: 1 + i], max_new_tokens=6))
    calls.append(lambda i: [item.ids for item in checkpoint.encode(texts[: 1 + i])])
    return calls


def tokenizer_state(checkpoint):
    return checkpoint.tokenizer.to_str(), checkpoint.tokenizer.encode_special_tokens


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("name", ["masked", "spans", "infill", "causal", "retrieval"])
def test_two_threads_ask_one_checkpoint_and_get_what_one_gets(name, small_runs):
    alone = calls_of(manyheads.load(small_runs / name), name)
    expected = [[call(i) for call in alone] for i in range(4)]
    checkpoint = manyheads.load(small_runs / name)
    before, calls = tokenizer_state(checkpoint), calls_of(checkpoint, name)

    def call_all(order):
        return {i: [call(i) for call in calls] for i in order}

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(call_all, [range(4), (3, 2, 1, 0), (1, 3, 0, 2), range(4)]):
            assert [results[i] for i in range(4)] == expected
    assert tokenizer_state(checkpoint) == before


@pytest.fixture
def frequent_switches():
    """Threads take turns after a microsecond, rather than after five milliseconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_a_thread_that_reads_special_tokens_does_not_change_what_another_reads(small_runs):
    checkpoint = manyheads.load(small_runs / "masked")
    text = "was <mask> born </s> in <mask> <s>"

    def encode(_):
        return checkpoint.encode([text])[0].ids

    def encode_mask(_):
        return checkpoint.encode_with_special([text], ["<mask>"])[0].ids

    plain, special = encode(0), encode_mask(0)
    assert plain != special
    with ThreadPoolExecutor(4) as pool:
        rounds = [pool.map(function, range(300)) for function in (encode, encode_mask) * 2]
        results = [{tuple(ids) for ids in results} for results in rounds]
    assert results == [{tuple(plain)}, {tuple(special)}] * 2


@pytest.mark.parametrize("name", ["masked", "spans", "infill", "causal", "retrieval"])
def test_a_tokenizer_never_changes_after_loading(name, small_runs):
    """Neither by a prediction nor by an evaluation, which truncates texts and reads special tokens as text."""
    checkpoint = manyheads.load(small_runs / name)
    before = tokenizer_state(checkpoint)
    for call in calls_of(checkpoint, name):
        call(3)
    spec = read_run_file(small_runs / name / "run.toml")
    corpus, rows = load_rows(spec.data, spec.task, data=None, split="validation", from_run=True)
    options = EvalOptions(max_rows=4, max_length=12, settings={"num_beams": 1})
    evaluation = make_evaluation(
        checkpoint, spec.task, spec, corpus, rows, options=options, progress=lambda what, done, total: None
    )
    assert spec.task.evaluate(evaluation).scores["model"]
    assert tokenizer_state(checkpoint) == before


# ----------------------------------------------------------------------------------------------- files of another task


def test_a_run_and_its_export_have_no_key_and_no_file_of_the_task_that_the_checkpoint_was_for(tmp_path):
    """A classifier from a checkpoint for vectors; and one for vectors from a classifier."""
    folder = folder_of("bert-bare", tmp_path / "bert")
    write_pooling(folder)
    for name in ("sentence_bert_config.json", "config_sentence_transformers.json", "generation_config.json"):
        (folder / name).write_text("{}")
    edit_config(folder, problem_type="regression", task_specific_params={"x": {}}, forced_eos_token_id=2)
    labels = tmp_path / "labels.tsv"
    labels.write_text("".join(f"word{i} word{i + 1}\t{'ab'[i % 2]}\n" for i in range(40)))
    head = {"kind": "classes", "classes": "data", "dense": True}
    classifier = finetuned(folder, tmp_path / "classifier", {"kind": "labels", "path": str(labels)}, "classify", head)
    assert set(classifier["label2id"]) == {"a", "b"}
    assert not {"problem_type", "task_specific_params", "decoder_start_token_id", "forced_eos_token_id"} & set(
        classifier
    )
    pairs = {"kind": "queries", "path": str(labels), "columns": [0, 0]}
    vectors = finetuned(tmp_path / "classifier-hf", tmp_path / "vectors", pairs, "retrieval", "none")
    assert not {"id2label", "label2id"} & set(vectors)
    for name in ("classifier", "vectors"):
        files = {path.name for path in (tmp_path / f"{name}-hf").iterdir()}
        assert files == {"config.json", "model.safetensors", "tokenizer.json"}


def finetuned(checkpoint, folder, data, task, head):
    """Trains two steps, exports the run, and returns the config of the export."""
    tree = {"init_from": str(checkpoint), "model": {"head": head}, "data": data, "task": task, "train": {"steps": 2}}
    list(train_events(prepare(read_run(tree)), folder))
    manyheads.export(folder, f"{folder}-hf")
    return json.loads(Path(f"{folder}-hf", "config.json").read_text())


def test_what_a_checkpoint_for_vectors_needs_stays_if_it_is_trained_for_vectors(tmp_path):
    folder = folder_of("bert-bare", tmp_path / "bert")
    write_pooling(folder)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"word{i} word{i + 1}\tword{i + 2}\n" for i in range(40)))
    finetuned(folder, tmp_path / "vectors", {"kind": "queries", "path": str(pairs)}, "retrieval", "none")
    assert (tmp_path / "vectors-hf" / "1_Pooling" / "config.json").exists()
    ours, again = manyheads.load(tmp_path / "vectors"), manyheads.load(tmp_path / "vectors-hf")
    torch.testing.assert_close(again.embed("word1 word2"), ours.embed("word1 word2"))
