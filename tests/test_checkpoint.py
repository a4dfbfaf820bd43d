"""Something loaded: asked in texts or ids, by the library and by the command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from command import run
from kinds import decoder, ngram, recurrent
from small_checkpoints import WORDS, folder_of
from tokenizers import Tokenizer, models, pre_tokenizers

import manyheads
from manyheads import build, read
from manyheads.checkpoint import Loaded


def test_a_decoder_continues_as_the_reference_does(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = folder_of("gpt2", tmp_path / "gpt2", eos_token_id=None, bos_token_id=None)
    ours = manyheads.load(folder)
    ids = [5, 9, 7]
    theirs = AutoModelForCausalLM.from_pretrained(folder).generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert ours.generate(ids, max_new=9) == theirs[0, 3:].tolist()
    written = ours.generate("word0 word4 word2", max_new=9)
    assert written.split() == [WORDS[i] for i in theirs[0, 3:].tolist() if i > 3]
    assert ours.generate(ids, max_new=9, temperature=1.0, seed=3) == ours.generate(ids, max_new=9, temperature=1.0, seed=3)
    assert ours.generate(ids, max_new=30, temperature=2.0, seed=3) != ours.generate(ids, max_new=30, temperature=2.0, seed=4)
    assert run("predict", folder, "word0 word4 word2", "--max-new", 9).stdout.strip() == written


def test_a_pair_answers_as_the_reference_does(tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    folder = folder_of("marian", tmp_path / "marian", tokenizer=False)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder)
    given = {"max_new_tokens": 9, "do_sample": False, "num_beams": 1}
    found = theirs.generate(torch.tensor([[5, 9, 7]]), **given)[0, 1:].tolist()
    ours = manyheads.load(folder).generate([5, 9, 7], max_new=9)
    assert ours == (found[: found.index(0)] if 0 in found else found)
    assert run("predict", folder, "5 9 7", "--max-new", 9).stdout.split() == list(map(str, ours))
    assert "there is no tokenizer beside this model: give ids as numbers" in run("predict", folder, "hello", check=2).stderr


def test_a_masked_model_fills_in(tmp_path):
    folder = folder_of("bert", tmp_path / "bert")
    ours = manyheads.load(folder)
    found = manyheads.predict(ours, "word0 [MASK] word2", best=3)
    logits = ours.logits(torch.tensor([[1, 5, 3, 7, 2]]))[0, 2]
    assert found["filled"][0]["place"] == 2
    assert found["filled"][0]["tokens"][0]["probability"] == pytest.approx(float(torch.softmax(logits, -1).max()))
    assert len(run("predict", folder, "word0 [MASK]").stdout.splitlines()) == 5
    assert "write [MASK] where a word is missing" in run("predict", folder, "word0", check=2).stderr


def test_classes_have_their_names(tmp_path):
    folder = folder_of("bert-classes", tmp_path / "classes")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"id2label": {"0": "bad", "1": "fair", "2": "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2}}))
    rows = json.loads(run("predict", folder, "word0 word1", "--json").stdout)["classes"]
    assert {row["class"] for row in rows} == {"bad", "fair", "good"}
    assert sum(row["probability"] for row in rows) == pytest.approx(1.0)
    assert rows == sorted(rows, key=lambda row: -row["probability"])


@pytest.mark.parametrize(("labels", "kind"), [(1, None), (1, "regression"), (3, "multi_label_classification"), (4, "regression")])
def test_what_a_class_says_is_what_it_was_trained_to_say(labels, kind, tmp_path):
    """One number is a score and no probability; labels that do not exclude each other have one each."""
    folder = folder_of("bert-classes", tmp_path / "classes", num_labels=labels, problem_type=kind)
    ours = manyheads.load(folder)
    logits = ours.logits(torch.tensor([[1, 5, 6, 2]]))[0]
    rows = {row.pop("class"): row for row in manyheads.predict(ours, "word0 word1")["classes"]}
    said, numbers = ("probability", logits.sigmoid()) if kind == "multi_label_classification" else ("score", logits)
    assert rows == {f"LABEL_{i}": {said: pytest.approx(float(number), abs=1e-6)} for i, number in enumerate(numbers)}
    assert len(run("predict", folder, "word0 word1").stdout.splitlines()) == labels


def test_a_problem_that_is_not_known_is_refused(tmp_path):
    folder = folder_of("bert-classes", tmp_path / "classes")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"problem_type": "ranking"}))
    assert "problem_type is 'ranking', expected" in run("predict", folder, "word0", check=2).stderr


def test_names_of_classes_as_others_write_them(tmp_path):
    folder = folder_of("bert-classes", tmp_path / "classes")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for names, said in (
        ({"00": "bad", "1": 3, "7": "good"}, {"bad", "3", "2"}),
        (["bad", "fair", "good"], "expected a table of names by their numbers"),
        ({"LABEL_0": "bad", "LABEL_1": "fair", "LABEL_2": "good"}, "expected a table of names by their numbers"),
    ):
        path.write_text(json.dumps(config | {"id2label": names}))
        if isinstance(said, set):
            assert {row["class"] for row in manyheads.predict(manyheads.load(folder), "word0")["classes"]} == said
        else:
            assert said in run("predict", folder, "word0", check=4).stderr


def sentence(said, run):
    with pytest.raises(ValueError, match=said) as caught:
        run()
    assert "\n" not in str(caught.value)


def test_what_cannot_be_asked_is_one_sentence(tmp_path):
    ours = manyheads.load(folder_of("gpt2", tmp_path / "gpt2"))
    for ids, said in (
        ([2**70], "given .*, expected a text or a list of ids, which are whole numbers"),
        ([-1], "token -1 .*vocabulary"),
        ([61], "token 61 .*vocabulary"),
        ([], "there is nothing to read"),
        ([1.5], "expected whole numbers"),
        ([True], "expected whole numbers"),
        ([[1, 2]], "expected batch × length"),
        ([[1], [1, 2]], "expected a text or a list of ids"),
        (["a", 3], "expected a text or a list of ids"),
        (None, "given None, expected a text or a list of ids"),
        (3, "given 3, expected a text or a list of ids"),
        ("", "there is nothing to read"),
        ("word0 \udcff", "expected a text of Unicode characters"),
    ):
        sentence(said, lambda ids=ids: ours.generate(ids))
    for max_new in (True, 1.5, "3", 0, -1, 2**70, None):
        sentence("max_new is .*, expected a whole number from 1", lambda max_new=max_new: ours.generate([1], max_new=max_new))
    for seed in (-1, 2**63, 2**70, 1.5, None, True):
        sentence("seed is .*, expected a whole number from 0", lambda seed=seed: ours.generate([1], seed=seed))
    for temperature in (-1, float("nan"), float("inf"), 1e-9, "hot", None, True):
        sentence("temperature is .*, expected 0 or a number", lambda t=temperature: ours.generate([1], temperature=t))
    sentence(
        "a target was given beside the ids, but the model is only decoder", lambda: ours.logits(torch.tensor([[1]]), torch.tensor([[1]]))
    )
    for path in (None, "", 3, b"x", []):
        sentence("expected the path of a folder or a file", lambda path=path: manyheads.load(path))
    sentence("dtype is 'float32', expected torch.float64", lambda: manyheads.load(tmp_path / "gpt2", dtype="float32"))
    bert = manyheads.load(folder_of("bert", tmp_path / "bert"))
    for best in (-1, 0, True, 1.5, None):
        sentence("best is .*, expected how many tokens to name", lambda best=best: manyheads.predict(bert, "word0 [MASK]", best=best))
    assert len(manyheads.predict(bert, "word0 [MASK]", best=10**30)["filled"][0]["tokens"]) == 61


def test_special_tokens_that_are_none(tmp_path):
    """What ends a text and is no token never comes; what begins one must be."""
    folder = folder_of("t5", tmp_path / "t5", tokenizer=False)
    config = {"decoder_start_token_id": 0}
    usual = manyheads.load(folder).generate([5, 6], max_new=4)
    for end in (2**70, -1, True, "x", [None, 2**64]):
        (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": end}))
        assert manyheads.load(folder).generate([5, 6], max_new=4) == usual
    for start in (2**70, -1, 61):
        (folder / "generation_config.json").write_text(json.dumps(config | {"decoder_start_token_id": start}))
        sentence("whole numbers|not in the vocabulary", lambda: manyheads.load(folder).generate([5, 6]))


def test_a_mask_that_is_no_text(tmp_path):
    folder = folder_of("bert", tmp_path / "bert")
    for said in ('{"mask_token": "\\ud800"}', '{"mask_token": {"content": 3}}', "[1]", "{"):
        (folder / "tokenizer_config.json").write_text(said)
        assert len(manyheads.predict(manyheads.load(folder), "word0 [MASK]")["filled"]) == 1


def test_without_a_mask_nothing_is_filled(tmp_path):
    """The text "0" is no mask, and neither is the token 0."""
    folder = folder_of("bert", tmp_path / "bert", tokenizer=False)
    ours = manyheads.load(folder)
    sentence("nothing says which token is the mask: give mask_id", lambda: manyheads.predict(ours, "5 0 7"))
    assert [row["place"] for row in manyheads.predict(ours, "5 3 7 3", mask_id=3)["filled"]] == [1, 3]
    sentence("there is nothing to fill: write 3 where", lambda: manyheads.predict(ours, "5 0 7", mask_id=3))
    sentence("mask_id is -1, expected", lambda: manyheads.predict(ours, "5 0 7", mask_id=-1))
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["call", "0", "times", "[UNK]"])}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.save(str(folder / "tokenizer.json"))
    assert "this tokenizer has no mask token" in run("predict", folder, "call 0 times", check=2).stderr
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token_id": 3}))
    (folder / "tokenizer.json").unlink()
    assert json.loads(run("predict", folder, "5 3 7", "--json").stdout)["filled"][0]["place"] == 1


def test_a_model_of_pictures_is_not_asked_in_words(tmp_path):
    for name in ("vit", "vit-bare", "vit-mae"):
        folder = folder_of(name, tmp_path / name, tokenizer=False)
        assert "this model reads pictures, not texts" in run("predict", folder, "hello", check=2).stderr
        sentence("reads pictures", lambda folder=folder: manyheads.load(folder).generate([1]))
        sentence("reads pictures", lambda folder=folder: manyheads.load(folder).embed("x"))


def pooled(folder, **modes):
    steps = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    steps.append({"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    steps.append({"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))


def test_a_sentence_is_the_vector_that_its_folder_says(tmp_path):
    folder = folder_of("bert-bare", tmp_path / "bert")
    ours, ids = manyheads.load(folder), torch.tensor([[1, 5, 6, 7, 2]])
    states = ours.hidden(ids)[-1][0]
    texts = ["word0 word1 word2", "word3"]
    torch.testing.assert_close(ours.embed(texts)[0], states.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.embed(texts[0])[0], ours.embed(texts)[0], rtol=1e-5, atol=1e-5)
    pooled(folder, pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    found = manyheads.load(folder).embed(texts)
    torch.testing.assert_close(found[0], torch.nn.functional.normalize(states[0], dim=0), rtol=1e-5, atol=1e-5)
    for to in ("hf", "manyheads"):  # and so does whatever is written from it
        manyheads.export(folder, tmp_path / to, to=to)
        assert torch.equal(manyheads.load(tmp_path / to).embed(texts), found)
    numbers = json.loads(run("predict", folder, texts[0], "--json").stdout)["vector"]
    torch.testing.assert_close(torch.tensor(numbers), found[0], rtol=1e-5, atol=1e-5)
    pooled(folder, pooling_mode_weightedmean_tokens=True)
    assert "pools by pooling_mode_weightedmean_tokens" in run("predict", folder, "word0", check=4).stderr
    first, pool, unit = json.loads((folder / "modules.json").read_text())
    for steps in ([first, unit, pool], [first, pool, pool], [pool, first], [first, pool, {"type": "sentence_transformers.models.Dense"}]):
        (folder / "modules.json").write_text(json.dumps(steps))
        loaded = manyheads.load(folder)
        assert torch.equal(loaded.logits(ids), ours.logits(ids)), "which needs no pool"
        sentence("has the steps .*, expected Transformer, Pooling, Normalize in this order", lambda loaded=loaded: loaded.embed("word0"))
    (folder / "modules.json").write_text(json.dumps([{"type": "evil.Module", "path": "../.."}]))
    assert "has the steps 'Module', expected" in run("predict", folder, "word0", check=4).stderr


def test_a_decoder_gives_the_vector_that_its_folder_says(tmp_path):
    folder = folder_of("llama", tmp_path / "llama")
    sentence("a vector a text is what an encoder gives, or a decoder", lambda: manyheads.load(folder).embed("word0"))
    pooled(folder, pooling_mode_lasttoken=True, pooling_mode_mean_tokens=False)
    ours = manyheads.load(folder)
    states = ours.hidden(torch.tensor([[5, 6, 7]]))[-1][0]
    found = ours.embed(["word0 word1 word2", "word3 word4 word5 word6 word7"])[0]
    torch.testing.assert_close(found, torch.nn.functional.normalize(states[-1], dim=0), rtol=1e-5, atol=1e-5)


def test_export_from_the_command_is_opened_elsewhere(tmp_path):
    """A separate process of the reference gives the same logits."""
    folder = folder_of("llama", tmp_path / "llama")
    run("export", folder, tmp_path / "copy", "--to", "hf")
    code = (
        "import sys, torch, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
        "torch.save(model(torch.tensor([[5, 9, 7]])).logits, sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "copy"), str(tmp_path / "logits")], check=True, capture_output=True)
    theirs = torch.load(tmp_path / "logits", weights_only=True)
    torch.testing.assert_close(manyheads.load(folder).logits(torch.tensor([[5, 9, 7]])), theirs, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert "exists already" in run("export", folder, tmp_path / "copy", check=2).stderr
    assert "there is no folder" in run("export", tmp_path / "nowhere", tmp_path / "x", check=4).stderr
    assert "given '', expected the path" in run("export", "", tmp_path / "x", check=2).stderr
    for wrong, said in ((folder / "in", "is within"), (folder, "exists already"), (folder / "config.json" / "x", "Not a directory")):
        assert said in run("export", folder, wrong, check=2).stderr


@pytest.mark.parametrize(
    "spec", [decoder(position="alibi"), recurrent(), ngram(), read("mae-tiny", "encoder.layers=1")], ids=lambda spec: spec.shape
)
def test_a_model_that_no_family_has_is_kept_as_it_is_described(spec, tmp_path):
    model = build(spec, seed=3)
    manyheads.export(Loaded(model, origin=None), tmp_path / "own", to="manyheads")
    again = manyheads.load(tmp_path / "own")
    assert again.spec == spec
    assert all(torch.equal(tensor, again.model.get_parameter(name)) for name, tensor in model.named_parameters())
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps(config | {"model": {"decoder": {"layers": "many"}}}))
    with pytest.raises(ValueError, match="config.json: "):
        manyheads.load(tmp_path / "own")


def test_a_folder_of_ours_keeps_its_tokens(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2")
    manyheads.export(folder, tmp_path / "own", to="manyheads")
    theirs, ours = manyheads.load(folder), manyheads.load(tmp_path / "own")
    assert ours.generate("word1 word2", max_new=5) == theirs.generate("word1 word2", max_new=5)
    assert ours.origin.config["eos_token_id"] == theirs.origin.config["eos_token_id"]
    manyheads.export(ours, tmp_path / "back")
    assert torch.equal(manyheads.load(tmp_path / "back").logits(torch.tensor([[3, 4]])), theirs.logits(torch.tensor([[3, 4]])))


def test_writing_stops_where_there_is_no_place_left(tmp_path):
    ours = manyheads.load(folder_of("gpt2", tmp_path / "gpt2", eos_token_id=None, bos_token_id=None))
    assert ours.longest == 40
    assert len(ours.generate([3, 4, 5], max_new=100)) == 38
    assert len(ours.generate([3] * 39, max_new=100)) == 2
    assert len(ours.generate([3] * 40, max_new=100)) == 1
    sentence("position|place|long", lambda: ours.generate([3] * 41))
    towers = ["encoder.layers=1", "decoder.layers=1", "encoder.position=learned", "encoder.position.length=8"]
    pair = build(read("transformer-base", "vocab=61", *towers, "decoder.position=learned", "decoder.position.length=64"))
    assert len(Loaded(pair.eval()).generate([3] * 8, max_new=100, start=1)) == 64
    assert (Loaded(pair).longest, Loaded(pair).longest_written) == (8, 64)


WRITING = {
    "many-ends": {"eos_token_id": [2, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41]},
    "forced": {"forced_bos_token_id": 9, "forced_eos_token_id": 2},
    "never": {"bad_words_ids": [[token] for token in range(4, 50)] + [[51, 52], [53, 53]]},
    "nothing": {},
}


@pytest.mark.parametrize("said", WRITING)
@pytest.mark.parametrize("name", ["gpt2", "t5", "bart", "marian"])
def test_texts_are_written_as_the_folder_says(name, said, tmp_path):
    """As transformers reads generation_config.json, token for token."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    folder = folder_of(name, tmp_path / name, tokenizer=False)
    config = {"eos_token_id": 2, "decoder_start_token_id": 3, "pad_token_id": 60} | WRITING[said]
    (folder / "generation_config.json").write_text(json.dumps(config))
    ours, theirs = manyheads.load(folder), (AutoModelForCausalLM if name == "gpt2" else AutoModelForSeq2SeqLM).from_pretrained(folder)
    for ids in ([5], [5, 9, 7], [8, 20, 31, 44]):
        found = theirs.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False)[0, len(ids) if name == "gpt2" else 1 :].tolist()
        ends = config["eos_token_id"] if said == "many-ends" else [2]
        assert ours.generate(ids, max_new=9) == (found[:-1] if found[-1] in ends else found)


def test_how_texts_are_written_must_be_said(tmp_path):
    folder = folder_of("bart", tmp_path / "bart", tokenizer=False)
    for said, sentences in (
        ("[1]", "generation_config.json cannot be read: expected a table"),
        ('{"eos_token_id": 2}', "nothing says which token begins an answer"),
        ('{"bos_token_id": 2, "forced_bos_token_id": 99}', "token 99 must be written, and is not in the vocabulary of 61"),
    ):
        (folder / "generation_config.json").write_text(said)
        sentence(sentences, lambda: manyheads.load(folder).generate([5, 6]))
    (folder / "generation_config.json").unlink()
    assert manyheads.load(folder).generate([5, 6], max_new=4, start=2) == manyheads.load(folder).generate([5, 6], max_new=4)


def test_what_is_asked_goes_where_the_model_is(tmp_path):
    """The device without numbers stands for those that are not here: the answer is where the model is."""
    folder = folder_of("bert", tmp_path / "bert")
    for device, said in (
        ("meta", "there is no meta here"),
        ("cuda:99x", "device is 'cuda:99x', expected"),
        (3.5, "device is 3.5, expected"),
    ):
        sentence(said, lambda device=device: manyheads.load(folder, device=device))
    if not torch.cuda.is_available():
        sentence("there is no cuda here; take cpu", lambda: manyheads.load(folder, device="cuda"))
    ours = manyheads.load(folder, device="cpu")
    assert ours.device == torch.device("cpu")
    ours.model.to("meta")
    ids, padding = torch.tensor([[3, 4, 5]]), torch.tensor([[False, False, True]])
    for found in (ours.logits(ids, padding=padding), *ours.hidden(ids), ours.embed(["word0", "word1 word2"]), ours.batch([1, 2]).tokens):
        assert found.device == ours.device == torch.device("meta")
    pair = manyheads.load(folder_of("t5", tmp_path / "t5", tokenizer=False))
    pair.model.to("meta")
    assert pair.logits(ids, ids).device == pair.device


def test_what_a_target_is_called_says_what_it_is_and_what_is_left_out_is_said(tmp_path):
    folder = folder_of("gpt2", tmp_path / "gpt2", tokenizer=False)
    done = run("export", folder, tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").is_file()
    assert done.stderr.splitlines()[0].startswith("manyheads: without a tokenizer llama.cpp opens a file, and cannot be asked")


@pytest.mark.parametrize("spec", [recurrent(), ngram()], ids=lambda spec: spec.shape)
def test_only_layers_are_looked_into(spec):
    sentence(
        f"this model is {spec.shape}, and only a transformer has layers to look into",
        lambda: Loaded(build(spec)).hidden(torch.tensor([[1]])),
    )


def test_a_form_is_for_gguf_alone(tmp_path):
    own = build(decoder())
    for to in ("hf", "onnx", "manyheads"):
        sentence("form is 'q8_0', and only a GGUF file has one", lambda to=to: manyheads.export(own, tmp_path / "out", to=to, form="q8_0"))
    assert not (tmp_path / "out").exists()
    run("export", tmp_path, tmp_path / "out", "--form", "f16", check=2)


def test_a_command_that_does_not_end_is_said_so():
    with pytest.raises(AssertionError, match="show gpt2 did not end within 0.001 seconds"):
        run("show", "gpt2", check=None, seconds=0.001)
